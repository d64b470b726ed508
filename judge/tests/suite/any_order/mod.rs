//! Two right subjects: one without fixed bits of gradients, and one with them.

use std::sync::atomic::{AtomicU64, Ordering};

use seamproof_judge::subject::{Backend, Declaration, Outputs, RunError};
use seamproof_judge::subjects::{Arithmetic, Emulated};
use seamproof_oracle::{Inputs, Problem};

/// Returns the emulated kernel with Hopper's arithmetic.
pub(crate) fn hopper() -> Emulated {
    Emulated { arithmetic: Arithmetic::Hopper, ..Emulated::default() }
}

/// The emulated kernel with Hopper's arithmetic, which sums dq in another order on every run, and promises no bits of
/// it.
pub(crate) struct AnyOrder {
    inner: Emulated,
    runs: AtomicU64,
}

impl AnyOrder {
    /// Returns a subject whose first run has this order.
    pub(crate) fn from(order: u64) -> AnyOrder {
        AnyOrder { inner: hopper(), runs: AtomicU64::new(order) }
    }
}

impl Backend for AnyOrder {
    fn declaration(&self) -> Declaration {
        let mut declaration = self.inner.declaration();
        declaration.promises.deterministic_backward = false;
        declaration
    }

    fn inner(&self) -> Option<&dyn Backend> {
        Some(&self.inner)
    }

    fn name(&self) -> &str {
        "any-order"
    }

    fn run(&self, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
        Emulated { order: self.runs.fetch_add(1, Ordering::Relaxed), ..self.inner }.run(problem, inputs)
    }
}
