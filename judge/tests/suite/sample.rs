//! Cases that are too large for the oracle. The envelope examines a sample of their rows. It is silent on right
//! kernels, and sees a factor on a whole gradient, which identities do not.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::any_order::AnyOrder;
use rayon::prelude::*;
use seamproof_judge::finding::{Check, Finding};
use seamproof_judge::generate::{self, Draw, Limits};
use seamproof_judge::ladder::{Depth, Judge, Rung};
use seamproof_judge::subject::Backend;
use seamproof_judge::subjects::{Emulated, Miscalled, draw_options, miscall};
use seamproof_judge::verdict::Verdict;
use seamproof_oracle::{Pass, Problem, Sink, TensorName};

/// A number of cases of a profile.
type Cases = (u64, fn() -> Limits);

/// Cases on which the emulated kernel may not be condemned: small ones, and ones around the edges of chunks and
/// tiles.
const RIGHT_CASES: [Cases; 2] = [(900, Limits::quick), (100, Limits::seams)];
/// Cases on which the emulated kernel may not be condemned, for a run of some minutes.
const MANY_RIGHT_CASES: [Cases; 2] = [(32_000, Limits::quick), (4_000, Limits::seams)];

/// Returns a judge with the envelope alone, and with the oracle for this many products.
fn envelope(products_max: u64) -> Judge {
    let judge = Judge::default();
    let rungs: Vec<Rung> = judge.rungs.iter().filter(|rung| rung.check == Check::Envelope).copied().collect();
    Judge { products_max, rungs, ..judge }
}

fn problems(seed: u64, limits: Limits, cases: u64) -> impl ParallelIterator<Item = (u64, Problem)> {
    let drawn = move |index| match generate::draw(seed, index, &limits) {
        Draw::Problem(problem) => Some((index, problem)),
        Draw::Malformed(_) => None,
    };
    (0..cases).into_par_iter().filter_map(drawn)
}

/// Returns the emulated kernel in any of its forms, one in 16 without fixed bits.
fn right(index: u64) -> Box<dyn Backend> {
    if index % 16 == 5 {
        return Box::new(AnyOrder::from(index));
    }
    Box::new(Emulated::from_options(&draw_options(index)).expect("options"))
}

/// Returns the findings of a judge that samples against right kernels, and the number of cases that it judged.
fn alarms(cases: [Cases; 2]) -> (Vec<String>, usize) {
    let (judge, judged) = (envelope(0), AtomicU64::new(0));
    let of_profile = |(seed, (count, limits)): (usize, Cases)| -> Vec<String> {
        let alarm = |(index, problem): (u64, Problem)| match judge
            .examine(right(index).as_ref(), &problem, Depth::First)
            .verdict
        {
            Verdict::Pass(_) => {
                judged.fetch_add(1, Ordering::Relaxed);
                None
            }
            Verdict::Refused(_) => None,
            verdict => Some(format!("case {index}: {verdict:?}\n{problem:?}")),
        };
        problems(20 + seed as u64, limits(), count).filter_map(alarm).collect()
    };
    let alarms = cases.into_iter().enumerate().flat_map(of_profile).collect();
    (alarms, judged.into_inner() as usize)
}

fn assert_silent(cases: [Cases; 2]) {
    let (alarms, judged) = alarms(cases);
    assert!(alarms.is_empty(), "{} alarms, the first: {}", alarms.len(), alarms[0]);
    let asked: u64 = cases.iter().map(|(count, _)| count).sum();
    assert!(judged as u64 > asked / 2, "{judged} of {asked}");
}

#[test]
fn a_sample_is_silent_on_the_right_kernel() {
    assert_silent(RIGHT_CASES);
}

#[test]
#[ignore = "takes minutes: run it alone, with --release"]
fn a_sample_is_silent_on_the_right_kernel_for_many_cases() {
    assert_silent(MANY_RIGHT_CASES);
}

/// Returns the emulated kernel with options.
fn emulated(options: &[(&str, &str)]) -> Emulated {
    let options = options.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    Emulated::from_options(&options).expect("options")
}

/// What D may be made of, and dS of rounded weights.
const DELTAS: [[&str; 2]; 4] = [
    ["stored-out", "unrounded"],
    ["unrounded-out", "unrounded"],
    ["weighted-dots", "unrounded"],
    ["weighted-dots", "rounded"],
];

#[test]
fn a_sample_is_silent_whatever_d_is_made_of_and_whether_it_is_declared() {
    let judge = envelope(0);
    for ([delta, ds_weights], declares) in
        DELTAS.into_iter().flat_map(|made| ["all", "nothing"].map(|declares| (made, declares)))
    {
        let options = [("delta", delta), ("ds_weights", ds_weights), ("declares", declares)];
        let subject = emulated(&options);
        let judged = AtomicU64::new(0);
        let limits = [(Limits::quick as fn() -> Limits, 100), (Limits::seams, 12)];
        for (seed, (limits, cases)) in (40..).zip(limits) {
            let backward = |(_, problem): &(u64, Problem)| problem.pass == Pass::Backward;
            problems(seed, limits(), cases).filter(backward).for_each(|(index, problem)| {
                let problem = subject.declaration().table.fitted(problem);
                match judge.examine(&subject, &problem, Depth::First).verdict {
                    Verdict::Pass(margin) if margin.worst_case.dk > 0.0 => {
                        judged.fetch_add(1, Ordering::Relaxed);
                    }
                    Verdict::Pass(_) | Verdict::Refused(_) => {}
                    verdict => panic!("{options:?}, case {index}: {verdict:?}\n{problem:?}"),
                }
            });
        }
        assert!(judged.into_inner() > 30, "{options:?}: dk is judged");
    }
}

fn wrong_call(id: &str) -> Box<dyn Backend> {
    wrong_call_of(id, Emulated::default())
}

fn wrong_call_of(id: &str, called: Emulated) -> Box<dyn Backend> {
    Box::new(Miscalled::new(Box::new(called), miscall(id).expect("a fault")))
}

fn finding(judge: &Judge, subject: &dyn Backend, problem: &Problem) -> Option<Finding> {
    match judge.examine(subject, problem, Depth::First).verdict {
        Verdict::Finding(finding) => Some(*finding),
        _ => None,
    }
}

#[test]
fn a_factor_on_a_whole_gradient_is_seen_without_the_whole_oracle() {
    // Problems of other kinds are told the truth, and need not be judged.
    type Kind = fn(&Problem) -> bool;
    let any: Kind = |_| true;
    let faults: [(&str, Vec<TensorName>, Kind); 5] = [
        ("call-dq-and-dk-halved", vec![TensorName::Dq, TensorName::Dk], any),
        ("call-dk-doubled", vec![TensorName::Dk], any),
        ("call-dsink-halved", vec![TensorName::Dsink], |problem| problem.softmax.sink == Sink::Learnable),
        ("call-dv-of-half-the-queries", vec![TensorName::Dv], any),
        ("call-softcap-dropped", vec![TensorName::Lse, TensorName::Out, TensorName::Dq], |problem| {
            problem.softmax.softcap.is_some()
        }),
    ];
    let (whole, sampled) = (envelope(u64::MAX), envelope(0));
    for (id, tensors, may_show) in faults {
        let subject = wrong_call(id);
        let both: Vec<Option<Finding>> = problems(30, Limits::quick(), 400)
            .filter(|(_, problem)| problem.pass == Pass::Backward && may_show(problem))
            .filter(|(_, problem)| finding(&whole, subject.as_ref(), problem).is_some())
            .map(|(_, problem)| finding(&sampled, subject.as_ref(), &problem))
            .collect();
        let seen: Vec<&Finding> = both.iter().flatten().collect();
        assert!(
            seen.len() > 10 && 10 * seen.len() > 9 * both.len(),
            "{id}: {} of {}",
            seen.len(),
            both.len()
        );
        for finding in seen {
            assert!(finding.tensor.is_some_and(|tensor| tensors.contains(&tensor)), "{id}: {finding}");
        }
    }
}

#[test]
fn a_factor_on_dk_and_dsink_is_seen_where_nothing_is_declared() {
    // The rows of dsink add up and their errors too, so that half of it is often within them.
    let faults = [("call-dk-doubled", TensorName::Dk, 0.9), ("call-dsink-halved", TensorName::Dsink, 0.25)];
    let (whole, sampled) = (envelope(u64::MAX), envelope(0));
    for (id, tensor, least) in faults {
        let subject = wrong_call_of(id, emulated(&[("declares", "nothing")]));
        let is_at =
            |finding: &Option<Finding>| finding.as_ref().and_then(|finding| finding.tensor) == Some(tensor);
        let both: Vec<[bool; 2]> = problems(32, Limits::quick(), 400)
            .filter(|(_, problem)| problem.pass == Pass::Backward)
            .filter(|(_, problem)| tensor == TensorName::Dk || problem.softmax.sink == Sink::Learnable)
            .map(|(_, problem)| {
                [&whole, &sampled].map(|judge| is_at(&finding(judge, subject.as_ref(), &problem)))
            })
            .collect();
        let [of_whole, of_sample] = [0, 1].map(|judge| both.iter().filter(|seen| seen[judge]).count());
        let share = of_sample as f64 / of_whole as f64;
        assert!(of_whole > 10 && share > least, "{id}: {of_sample} of {of_whole}");
    }
}

/// Test that a finding about a part is reported in the case's own numbers: its sequence and row.
#[test]
fn a_finding_of_a_sample_is_where_the_whole_oracle_finds_it() {
    let subject = wrong_call("call-dq-stale");
    let (whole, sampled) = (envelope(u64::MAX), envelope(0));
    let places: Vec<_> = problems(31, Limits::quick(), 2_000)
        .filter(|(_, problem)| problem.tokens() <= 32)
        .filter_map(|(_, problem)| {
            let [a, b] = [&whole, &sampled].map(|judge| finding(judge, subject.as_ref(), &problem));
            let (a, b) = a.zip(b)?;
            // One row is wrong, so both judges name the same.
            Some([a, b].map(|finding| (finding.tensor, finding.place.sequence, finding.place.row)))
        })
        .collect();
    assert!(places.len() > 20 && places.iter().all(|[a, b]| a == b), "{places:?}");
}
