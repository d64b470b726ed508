//! proptest over the suite's own shrinker.
//!
//! proptest asks a value tree to simplify (the last value failed) or to complicate (it did not); that is accept and
//! reject. Values are therefore shrunk exactly as the command line shrinks them.

use proptest::strategy::ValueTree;
use seamproof_oracle::Problem;

use crate::shrink::Shrinker;

/// A problem with its shrinker.
#[derive(Clone, Debug)]
pub struct ProblemTree {
    shrinker: Shrinker,
}

impl ProblemTree {
    /// A tree whose current value is `start`.
    pub fn new(start: Problem) -> ProblemTree {
        ProblemTree { shrinker: Shrinker::new(start) }
    }
}

impl ValueTree for ProblemTree {
    type Value = Problem;

    fn current(&self) -> Problem {
        self.shrinker.candidate().unwrap_or_else(|| self.shrinker.best()).clone()
    }

    fn simplify(&mut self) -> bool {
        // The first call is about the start, which is the best already: there is no candidate to accept.
        self.shrinker.accept(0);
        self.shrinker.propose().is_some()
    }

    fn complicate(&mut self) -> bool {
        self.shrinker.reject();
        self.shrinker.propose().is_some()
    }
}
