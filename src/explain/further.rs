//! The further runs of an identity, whose results are compared with those of the case's own run.
//!
//! The judge decides which runs these are, and they follow from the problem. Here the judge asks the right emulated
//! kernel, which notes the problems that it is given. The subject of an identity was given the same problems.

use std::sync::{Mutex, PoisonError};

use seamproof_oracle::{Inputs, Problem};

use seamproof_judge::finding::Check;
use seamproof_judge::finding::Relation;
use seamproof_judge::ladder::{Depth, Judge};
use seamproof_judge::subject::{Backend, Declaration, Outputs, RunError};
use seamproof_judge::subjects::Emulated;

/// Number of runs of the case itself, under the two contents of padding, which come before those of any identity.
const OWN_RUNS: usize = 2;

/// Returns the problems of the runs that an identity makes beside the case's own, in their order; none where it needs
/// none, or where the emulated kernel does not take the problem.
pub(super) fn further_runs(problem: &Problem, relation: Relation) -> Vec<Problem> {
    let noted = Noted { kernel: Emulated::default(), problems: Mutex::default() };
    let mut judge = Judge { identities: vec![relation], ..Judge::default() };
    judge.rungs.retain(|rung| rung.check == Check::Identity);
    judge.examine(&noted, problem, Depth::All);
    let problems = noted.problems.into_inner().unwrap_or_else(PoisonError::into_inner);
    problems.into_iter().skip(OWN_RUNS).collect()
}

/// The emulated kernel, with the problems that it was given.
struct Noted {
    kernel: Emulated,
    problems: Mutex<Vec<Problem>>,
}

impl Backend for Noted {
    fn name(&self) -> &str {
        self.kernel.name()
    }

    fn declaration(&self) -> Declaration {
        self.kernel.declaration()
    }

    fn inner(&self) -> Option<&dyn Backend> {
        Some(&self.kernel)
    }

    fn run(&self, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
        self.problems.lock().unwrap_or_else(PoisonError::into_inner).push(problem.clone());
        self.kernel.run(problem, inputs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use seamproof_judge::generate::{self, Draw, Limits};
    use seamproof_judge::identity::TABLE;

    /// Test that every run of an identity beside the case is here, and none of the case's own.
    #[test]
    fn the_runs_are_those_that_the_table_counts() {
        let mut asked = [0; TABLE.len()];
        for index in 0..120 {
            let Draw::Problem(problem) = generate::draw(3, index, &Limits::fuzz()) else { continue };
            for (identity, asked) in TABLE.iter().zip(&mut asked) {
                let (runs, most) = (further_runs(&problem, identity.relation).len(), identity.runs as usize);
                // A problem is given in as many other forms as say it.
                let is_any = identity.relation == Relation::OtherForm && runs < most;
                assert!(runs == most || runs == 0 || is_any, "{}: {runs}", identity.relation.name());
                *asked += usize::from(runs > 0);
            }
        }
        for (identity, asked) in TABLE.iter().zip(asked) {
            // There is no subject beside this one, and it tells of no memory.
            let is_mute = matches!(identity.relation, Relation::Beside | Relation::Memory);
            let is_asked = identity.runs > 0 && !is_mute;
            assert_eq!(asked > 0, is_asked, "{}", identity.relation.name());
        }
    }
}
