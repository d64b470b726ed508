//! A proptest strategy over the suite's own generator and shrinker.
//!
//! A value is drawn as a campaign draws it: bytes of choices, here from proptest's own generator, pass through
//! [`generate::raw`] and [`generate::fixup`]. It is shrunk as the command line shrinks it. Proptest asks a value tree
//! to simplify (the last value failed) or to complicate (it passed); the shrinker accepts or rejects accordingly.
//!
//! The strategy draws nothing malformed, because a property is about problems. Turn proptest's persistence off and
//! store the [`Case`](crate::case::Case) instead: a seed means something only to the generator that it was drawn
//! with.

use arbitrary::Unstructured;
use proptest::prelude::Rng;
use proptest::strategy::{NewTree, Strategy, ValueTree};
use proptest::test_runner::TestRunner;
use seamproof_oracle::Problem;

use crate::generate::{self, Draw, Limits, RawProblem};
use crate::shrink::Shrinker;
use crate::subject::Table;

/// Number of bytes of choices behind one value. The number is fixed and larger than what is read, so no choice is
/// starved.
const CHOICE_BYTES: usize = 4096;

/// Returns problems within the limits, some of them outside a subject's table. [`problems_for`] has those inside.
pub fn problems(limits: Limits) -> impl Strategy<Value = Problem> {
    Problems { limits, table: None }
}

/// Returns problems within the limits that a table takes. What they shrink to is inside as well.
///
/// ```
/// use seamproof_judge::prelude::*;
/// use seamproof_judge::proptest::prelude::*;
/// use seamproof_judge::proptest::test_runner::TestRunner;
/// use seamproof_judge::subjects::Emulated;
///
/// let kernel = Emulated::default();
/// let mut runner = TestRunner::new(ProptestConfig { cases: 8, failure_persistence: None, ..Default::default() });
/// runner.run(&problems_for(&kernel.declaration().table, Limits::fuzz()), |problem| {
///     let verdict = judge(&kernel, &problem);
///     prop_assert!(matches!(verdict, Verdict::Pass(_)), "{}", verdict);
///     Ok(())
/// })?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn problems_for(table: &Table, limits: Limits) -> impl Strategy<Value = Problem> + use<> {
    Problems { limits, table: Some(table.clone()) }
}

#[derive(Clone, Debug)]
struct Problems {
    limits: Limits,
    /// Table that the problems are inside of, if there is one.
    table: Option<Table>,
}

impl Strategy for Problems {
    type Tree = ProblemTree;
    type Value = Problem;

    fn new_tree(&self, runner: &mut TestRunner) -> NewTree<Self> {
        let mut bytes = [0; CHOICE_BYTES];
        runner.rng().fill_bytes(&mut bytes);
        let drawn = generate::raw(&mut Unstructured::new(&bytes), &self.limits);
        let legal = RawProblem { malformed: 0, ..drawn };
        match generate::fixup(&legal, &self.limits) {
            Draw::Problem(problem) => Ok(match &self.table {
                Some(table) => ProblemTree::within(table.clone(), problem),
                None => ProblemTree::new(problem),
            }),
            Draw::Malformed(malformed) => {
                Err(format!("nothing malformed was asked for: {malformed:?}").into())
            }
        }
    }
}

/// A problem with its shrinker.
#[derive(Clone, Debug)]
pub struct ProblemTree {
    shrinker: Shrinker,
}

impl ProblemTree {
    /// Returns a tree whose current value is `start`.
    pub fn new(start: Problem) -> ProblemTree {
        ProblemTree { shrinker: Shrinker::new(start) }
    }

    /// Returns a tree inside a table, whose current value is the problem that is nearest to `drawn`.
    pub fn within(table: Table, drawn: Problem) -> ProblemTree {
        let start = table.asked(drawn);
        ProblemTree { shrinker: Shrinker::within(table, start) }
    }
}

impl ValueTree for ProblemTree {
    type Value = Problem;

    fn current(&self) -> Problem {
        self.shrinker.candidate().unwrap_or_else(|| self.shrinker.best()).clone()
    }

    fn simplify(&mut self) -> bool {
        // The first call is about the start, which is already the best: there is no candidate to accept.
        self.shrinker.accept(0);
        self.shrinker.propose().is_some()
    }

    fn complicate(&mut self) -> bool {
        self.shrinker.reject();
        self.shrinker.propose().is_some()
    }
}
