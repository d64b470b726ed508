//! The identity rung: silent on the right kernel, and each identity sees the fault that is planted for it.

use std::collections::BTreeMap;
use std::sync::Mutex;

use rayon::prelude::*;
use seamproof::backend::{
    Backend, Capabilities, Outputs, PaddingContract, Promises, RankOutputs, RunError,
};
use seamproof::backends::{self, Emulated};
use seamproof::campaign::same_failure;
use seamproof::generate::{self, Draw, Limits};
use seamproof::judge::identity::{self, Identity, TABLE};
use seamproof::judge::{Depth, Judge, Rung};
use seamproof::shrink::shrink;
use seamproof::verdict::{Check, Finding, Relation, Verdict};
use seamproof_oracle::envelope::{Accumulation, Partition};
use seamproof_oracle::{Algorithm, Alignment, Inputs, Mask, Pass, Problem, ProblemFields, Side};

/// Cases of the emulated kernel that no identity may break on, all algorithms and modes, tiles drawn.
const RIGHT_CASES: u64 = 10_000;
/// Cases within which a planted fault must be seen by its identity.
const CASES_MAX: u64 = 2_000;

/// A judge that asks identities alone: the oracle is never asked, so every identity is.
fn identities_alone() -> Judge {
    let judge = Judge::default();
    let rungs: Vec<Rung> = judge.rungs.iter().filter(|rung| rung.check == Check::Identity).copied().collect();
    Judge { products_max: 0, rungs, ..judge }
}

fn problems(seed: u64, limits: Limits, cases: u64) -> impl ParallelIterator<Item = (u64, Problem)> {
    let drawn = move |index| match generate::draw(seed, index, &limits) {
        Draw::Problem(problem) => Some((index, problem)),
        Draw::Malformed(_) => None,
    };
    (0..cases).into_par_iter().filter_map(drawn)
}

#[test]
fn no_identity_breaks_on_the_right_kernel() {
    let judge = identities_alone();
    let alarms: Vec<String> = [Limits::quick(), Limits::seams()]
        .into_iter()
        .enumerate()
        .flat_map(|(seed, limits)| {
            let cases = problems(seed as u64, limits, RIGHT_CASES / 2);
            let alarm = |(index, problem): (u64, Problem)| {
                let options = backends::draw_options("emulated", index);
                let backend = backends::by_name("emulated", &options).expect("a backend");
                match judge.examine(backend.as_ref(), &problem, Depth::First).verdict {
                    Verdict::Pass(margin) if margin.compared == 0 => None,
                    Verdict::Refused(_) => None,
                    verdict => Some(format!("case {index} {options:?}: {verdict:?}\n{problem:?}")),
                }
            };
            cases.filter_map(alarm).collect::<Vec<_>>()
        })
        .collect();
    assert!(alarms.is_empty(), "{} alarms, the first: {}", alarms.len(), alarms[0]);
}
