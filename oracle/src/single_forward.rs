//! What steps and pages have in common: they are for one forward call on one rank, in the plain form.

use crate::{Algorithm, Form, Pass, ProblemFields};

/// The reason why a problem is not one forward call on one rank in the plain form.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SingleForwardError {
    /// An algorithm of several ranks.
    #[error("the algorithm is {algorithm}; use single")]
    Algorithm {
        /// The algorithm.
        algorithm: &'static str,
    },
    /// A sequence-parallel region.
    #[error("the region has {ranks} ranks; use 1")]
    Region {
        /// The ranks of the region.
        ranks: usize,
    },
    /// A backward pass.
    #[error("the pass is backward; use forward")]
    Backward,
    /// A form other than the plain one.
    #[error("the form is {}; use cu_seqlens", form.name())]
    Form {
        /// The form.
        form: Form,
    },
}

impl ProblemFields {
    /// Checks that these fields are one forward call on one rank in the plain form.
    pub fn check_single_forward(&self) -> Result<(), SingleForwardError> {
        let (algorithm, ranks, form) = (self.parallel.algorithm, self.parallel.region, self.form);
        if algorithm != Algorithm::Single {
            return Err(SingleForwardError::Algorithm { algorithm: algorithm.name() });
        }
        if ranks > 1 {
            return Err(SingleForwardError::Region { ranks });
        }
        if self.pass == Pass::Backward {
            return Err(SingleForwardError::Backward);
        }
        if !form.is_plain() {
            return Err(SingleForwardError::Form { form });
        }
        Ok(())
    }
}
