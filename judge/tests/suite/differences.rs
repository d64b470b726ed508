//! Merges by a difference: right where they are declared, and wrong where weights are.

use std::path::Path;

use seamproof_judge::case::Case;
use seamproof_judge::finding::Check;
use seamproof_judge::generate::{self, Draw, Limits};
use seamproof_judge::ladder::judge;
use seamproof_judge::subject::{Backend, Declaration, Outputs, RunError};
use seamproof_judge::subjects::{Emulated, Planted, draw_options};
use seamproof_judge::verdict::Verdict;
use seamproof_oracle::envelope::{MergeBy, Merges, Partition};
use seamproof_oracle::{Inputs, Problem, TensorName};
use seamproof_simulator::faults;
use seamproof_simulator::schedule::MergeOrder;

/// Number of cases of the test that is run alone.
const MANY: usize = 10_000;

/// Returns the stored case in which a block of weight 1 hides one of weight 1.5e-8.
fn cancels() -> Problem {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace");
    Case::load(&root.join("corpus/defects/ring-merge-cancels.json")).expect("a stored case").problem
}

/// A kernel that says by which formula it merges.
struct Claims {
    kernel: Emulated,
    by: MergeBy,
}

impl Backend for Claims {
    fn name(&self) -> &str {
        "claims"
    }

    fn declaration(&self) -> Declaration {
        self.kernel.declaration()
    }

    fn partition(&self, problem: &Problem) -> Partition {
        let partition = self.kernel.partition(problem);
        Partition { merges: Merges { by: self.by, ..partition.merges }, ..partition }
    }

    fn run(&self, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
        self.kernel.run(problem, inputs)
    }
}

fn verdict(merge: MergeOrder, by: MergeBy) -> Verdict {
    let kernel = Emulated { merge, ..Emulated::default() };
    judge(&Claims { kernel, by }, &cancels())
}

#[test]
fn an_out_that_a_difference_loses_is_right_where_differences_are_declared_alone() {
    assert!(matches!(verdict(MergeOrder::Running, MergeBy::Weights), Verdict::Pass(_)));
    assert!(matches!(verdict(MergeOrder::Difference, MergeBy::Difference), Verdict::Pass(_)));
    let Verdict::Finding(finding) = verdict(MergeOrder::Difference, MergeBy::Weights) else {
        panic!("a lost out is no finding");
    };
    assert_eq!((finding.check, finding.tensor), (Check::Envelope, Some(TensorName::Out)));
    assert!(finding.ratio.is_some_and(|ratio| ratio > 100.0), "{finding:?}");
}

/// Returns the first problems of a seed that the kernel merges, each with the options of a campaign's case.
fn merged(seed: u64) -> impl Iterator<Item = (Emulated, Problem)> {
    (0..).filter_map(move |case| {
        let mut options = draw_options(case);
        options.insert("merge".into(), "difference".into());
        let kernel = Emulated::from_options(&options).expect("the options are legal");
        let Draw::Problem(problem) = generate::draw(seed, case, &Limits::quick()) else { return None };
        let problem = kernel.declaration().table.fitted(problem);
        let merges = kernel.partition(&problem).merges;
        (merges.by == MergeBy::Difference).then_some((kernel, problem))
    })
}

fn holds(cases: usize) {
    for (kernel, problem) in merged(29).take(cases) {
        let verdict = judge(&kernel, &problem);
        assert!(matches!(verdict, Verdict::Pass(_)), "{verdict:?} of {kernel:?}\n{problem:?}");
    }
}

#[test]
fn rings_that_merge_by_differences_hold() {
    holds(150);
}

#[test]
#[ignore = "takes minutes: run it alone"]
fn many_rings_that_merge_by_differences_hold() {
    holds(MANY);
}

#[test]
fn differences_that_are_wrong_are_found_though_differences_are_declared() {
    for id in [
        "difference-share-swapped",
        "difference-of-the-step",
        "difference-lse-swapped",
        "difference-in-16-bit",
    ] {
        let fault = *faults::by_id(id).expect("a fault of the catalogue");
        let found = merged(7).take(60).any(|(kernel, problem)| {
            matches!(judge(&Planted::new(kernel, fault), &problem), Verdict::Finding(_))
        });
        assert!(found, "{id}");
    }
}
