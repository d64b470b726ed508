//! The identity rung. It is silent on the right kernel, and each identity sees the fault that is planted for it.

use std::path::Path;
use std::sync::Mutex;

use rayon::prelude::*;
use seamproof_judge::case::Case;
use seamproof_judge::failure::same_failure;
use seamproof_judge::finding::{Check, Finding, Relation};
use seamproof_judge::generate::{self, Draw, Limits};
use seamproof_judge::identity::{self, Identity, TABLE};
use seamproof_judge::ladder::{Depth, Judge, Rung};
use seamproof_judge::shrink::shrink;
use seamproof_judge::subject::{Backend, Declaration, Other, Outputs, Promises, RankOutputs, RunError};
use seamproof_judge::subjects::{Emulated, draw_options};
use seamproof_judge::verdict::Verdict;
use seamproof_oracle::{Algorithm, Alignment, Form, Inputs, Mask, Pass, Problem, ProblemFields, TensorName};

/// Cases of the emulated kernel on which no identity may break, with all algorithms and modes and drawn tiles: small
/// ones, and ones around the edges of chunks and tiles. Every identity is asked in each, so that its two first runs
/// serve all of them.
const RIGHT_CASES: [(u64, fn() -> Limits); 2] = [(1_000, Limits::quick), (200, Limits::seams)];
/// Number of cases within which an identity must see the fault that is planted for it.
const CASES_MAX: u64 = 2_000;

/// Returns a judge that asks identities alone. The oracle is never asked, so every identity is.
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
    let alarms: Vec<String> = RIGHT_CASES
        .into_iter()
        .enumerate()
        .flat_map(|(seed, (count, limits))| {
            let cases = problems(seed as u64, limits(), count);
            let alarm = |(index, problem): (u64, Problem)| {
                let options = draw_options(index);
                let backend = Emulated::from_options(&options).expect("a backend");
                match judge.examine(&backend, &problem, Depth::First).verdict {
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

/// Function that spoils the results of a run. It takes the problem, the number of earlier runs, and the results.
type Spoil = fn(&Problem, usize, &mut Outputs);

/// The emulated kernel with spoilt results, or with another problem than it is asked.
struct Spoilt {
    inner: Emulated,
    spoil: Spoil,
    told: fn(&mut ProblemFields),
    promises: Promises,
    runs: Mutex<usize>,
}

impl Spoilt {
    fn new(fault: &Fault) -> Spoilt {
        let (spoil, told) = (fault.spoil, fault.told);
        Spoilt {
            inner: Emulated::default(),
            spoil,
            told,
            promises: Promises { linear_memory: true, ..Promises::ALL },
            runs: Mutex::new(0),
        }
    }
}

impl Backend for Spoilt {
    fn declaration(&self) -> Declaration {
        self.inner.declaration().with_promises(self.promises)
    }

    fn inner(&self) -> Option<&dyn Backend> {
        Some(&self.inner)
    }

    fn beside(&self) -> Option<Other<'_>> {
        Some(Other { subject: &self.inner, bits: false })
    }

    fn name(&self) -> &str {
        "spoilt"
    }

    fn run(&self, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
        let mut fields: ProblemFields = problem.clone().into();
        (self.told)(&mut fields);
        let told = Problem::new(fields.sayable()).expect("a small edit is legal");
        let mut outputs = self.inner.run(&told, inputs)?;
        let mut runs = self.runs.lock().expect("nobody panics with the lock");
        (self.spoil)(problem, *runs, &mut outputs);
        *runs += 1;
        Ok(outputs)
    }
}

/// Test that a poison finding says whether the same inputs give other bits as well.
#[test]
fn padding_is_not_blamed_alone_where_the_same_run_differs_too() {
    let told = |_: &mut ProblemFields| ();
    let file = "../corpus/regressions/te-docstring-padded-pack.json";
    let problem = Case::load(Path::new(file)).expect("a stored case").problem;
    let again = |spoil: Spoil| {
        let spoilt = Spoilt::new(&Fault { relation: Relation::Rerun, spoil, told });
        let verdict = Judge::default().examine(&spoilt, &problem, Depth::First).verdict;
        let Verdict::Finding(finding) = verdict else { panic!("the second run is spoilt: {verdict}") };
        assert_eq!(finding.check, Check::Poison);
        finding.what.contains("the same inputs once more")
    };
    assert!(!again(|_, before, o| out_if(before == 1, o)), "the third run is the first once more");
    assert!(again(|_, before, o| out_if(before >= 1, o)));
}

/// A fault that one identity is meant to catch.
struct Fault {
    relation: Relation,
    spoil: Spoil,
    told: fn(&mut ProblemFields),
}

fn each(outputs: &mut Outputs, change: impl Fn(&mut RankOutputs)) {
    outputs.ranks.iter_mut().for_each(change);
}

/// Multiplies out by 1.5 where a condition holds; zeros in padding stay.
fn out_if(condition: bool, outputs: &mut Outputs) {
    if condition {
        each(outputs, |rank| rank.out.mapv_inplace(|x| written(x, |x| 1.5 * x)));
    }
}

fn written(x: f32, change: impl Fn(f32) -> f32) -> f32 {
    if seamproof_simulator::is_unwritten(x) { x } else { change(x) }
}

fn gradients(outputs: &mut Outputs, change: impl Fn(&mut seamproof_judge::subject::RankGradients)) {
    each(outputs, |rank| {
        if let Some(gradients) = &mut rank.gradients {
            change(gradients);
        }
    });
}

fn spoilt(relation: Relation, spoil: Spoil) -> Fault {
    Fault { relation, spoil, told: |_| {} }
}

fn told(relation: Relation, told: fn(&mut ProblemFields)) -> Fault {
    Fault { relation, spoil: |_, _, _| {}, told }
}

/// Returns a fault for every identity.
fn faults() -> Vec<Fault> {
    vec![
        spoilt(Relation::PaddingAmount, |p, _, o| out_if(p.sequences.iter().any(|s| s.q.span > s.q.len), o)),
        spoilt(Relation::Placement, |p, _, o| out_if(p.sequences.first().is_some_and(|s| s.q.offset > 0), o)),
        spoilt(Relation::SequenceOrder, |p, _, o| {
            let mut lengths = p.sequences.iter().map(|sequence| sequence.q.len);
            out_if(lengths.next() < lengths.next_back(), o);
        }),
        spoilt(Relation::Alone, |p, _, o| out_if(p.sequences.len() == 1, o)),
        spoilt(Relation::EmptySequence, |p, _, o| out_if(p.sequences.iter().any(|s| s.kv.len == 0), o)),
        spoilt(Relation::ClosingOffsets, |p, _, o| {
            out_if(p.sequences.last().is_some_and(|s| s.q.span == 0), o);
        }),
        spoilt(Relation::OneRank, |p, _, o| out_if(p.parallel.algorithm != Algorithm::Single, o)),
        spoilt(Relation::UnitValues, |_, _, o| out_if(true, o)),
        spoilt(Relation::SumOfDv, |_, _, o| {
            gradients(o, |g| g.dv.mapv_inplace(|x| written(x, |x| 1.5 * x)));
        }),
        spoilt(Relation::SumOfDk, |_, _, o| {
            gradients(o, |g| g.dk.mapv_inplace(|x| written(x, f32::abs)));
        }),
        spoilt(Relation::LinearInV, |_, _, o| each(o, |r| r.out.mapv_inplace(|x| written(x, f32::abs)))),
        spoilt(Relation::LinearInDout, |_, _, o| {
            gradients(o, |g| g.dq.mapv_inplace(|x| written(x, f32::abs)));
        }),
        told(Relation::ScaleFolding, |f| f.softmax.scale = 0.25),
        spoilt(Relation::Negation, |_, _, o| gradients(o, |g| g.dq.mapv_inplace(|x| written(x, f32::abs)))),
        spoilt(Relation::RepeatedKvHeads, |p, _, o| out_if(p.heads.kv < p.heads.q, o)),
        spoilt(Relation::HeadOrder, |_, _, o| {
            each(o, |r| r.out.index_axis_mut(ndarray::Axis(1), 0).mapv_inplace(|x| written(x, |x| 1.5 * x)));
        }),
        spoilt(Relation::WideWindow, |p, _, o| out_if(p.mask.left.is_none(), o)),
        spoilt(Relation::MaskForm, |p, _, o| out_if(p.mask.align == Alignment::BottomRight, o)),
        told(Relation::NarrowerWindow, |f| f.mask = Mask { left: None, ..f.mask }),
        spoilt(Relation::Prefix, |p, _, o| out_if(p.tokens() % 2 == 1, o)),
        told(Relation::Influence, |f| f.mask.right = f.mask.right.map(|right| right.saturating_add(1))),
        told(Relation::Cotangent, |f| f.mask.right = f.mask.right.map(|right| right.saturating_add(1))),
        spoilt(Relation::Rerun, |_, before, o| out_if(before == 2, o)),
        spoilt(Relation::History, |_, before, o| out_if(before == 3, o)),
        spoilt(Relation::Euler, |_, _, o| {
            gradients(o, |g| g.dk.mapv_inplace(|x| written(x, |x| 1.5 * x)));
        }),
        spoilt(Relation::Mass, |_, _, o| {
            gradients(o, |g| g.dv.mapv_inplace(|x| written(x, |x| 1.5 * x)));
        }),
        spoilt(Relation::OtherForm, |p, _, o| out_if(p.form == Form::Segments, o)),
        spoilt(Relation::OneCall, |p, _, o| out_if(!p.steps.is_empty(), o)),
        spoilt(Relation::Beside, |_, _, o| out_if(true, o)),
        spoilt(Relation::Memory, |p, _, o| o.costs.peak_bytes = Some(p.pairs())),
        spoilt(Relation::OutOfPages, |p, _, o| out_if(p.pages.is_some(), o)),
    ]
}

#[test]
fn every_identity_sees_the_fault_that_it_is_there_for() {
    let faults = faults();
    assert!(faults.iter().map(|fault| fault.relation).eq(TABLE.iter().map(|identity| identity.relation)));
    let missed: Vec<&str> = faults
        .iter()
        .filter(|fault| {
            let judge = Judge { identities: vec![fault.relation], ..identities_alone() };
            let found = problems(5, Limits::quick(), CASES_MAX).find_map_any(|(_, problem)| {
                match judge.examine(&Spoilt::new(fault), &problem, Depth::First).verdict {
                    Verdict::Finding(finding) if finding.check == Check::Identity => Some(finding),
                    _ => None,
                }
            });
            found.is_none_or(|finding| finding.identity != Some(fault.relation))
        })
        .map(|fault| fault.relation.name())
        .collect();
    assert!(missed.is_empty(), "{missed:?}");
}

fn infinite(x: f32) -> f32 {
    if x == 0.0 { x } else { f32::INFINITY.copysign(x) }
}

/// Test that an infinity is seen where small inputs allow none, although an infinity may be right in fp16.
#[test]
fn an_infinity_where_none_can_be_is_seen_without_the_oracle() {
    let faults: [(Relation, Spoil); 2] = [
        (Relation::SumOfDv, |_, _, o| gradients(o, |g| g.dv.mapv_inplace(|x| written(x, infinite)))),
        (Relation::SumOfDk, |_, _, o| gradients(o, |g| g.dk.mapv_inplace(|x| written(x, infinite)))),
    ];
    for (relation, spoil) in faults {
        let judge = Judge { identities: vec![relation], ..identities_alone() };
        let fault = spoilt(relation, spoil);
        let seen = problems(9, Limits::quick(), CASES_MAX).find_map_any(|(_, problem)| {
            match judge.examine(&Spoilt::new(&fault), &problem, Depth::First).verdict {
                Verdict::Finding(finding) => finding.identity,
                _ => None,
            }
        });
        assert_eq!(seen, Some(relation));
    }
}

/// Scales one gradient alone.
fn scaled(outputs: &mut Outputs, tensor: TensorName, condition: bool) {
    if condition {
        gradients(outputs, |gradients| {
            let tensor = match tensor {
                TensorName::Dq => &mut gradients.dq,
                TensorName::Dk => &mut gradients.dk,
                _ => &mut gradients.dv,
            };
            tensor.mapv_inplace(|x| written(x, |x| 1.25 * x));
        });
    }
}

#[test]
fn gradients_of_several_ranks_and_of_grouped_heads_are_held_to_those_of_one() {
    use TensorName::{Dk, Dq, Dv};
    let ranks = |p: &Problem| p.parallel.algorithm != Algorithm::Single;
    let faults: [(Relation, TensorName, Spoil); 5] = [
        (Relation::OneRank, Dq, |p, _, o| scaled(o, Dq, p.parallel.algorithm != Algorithm::Single)),
        (Relation::OneRank, Dk, |p, _, o| scaled(o, Dk, p.parallel.algorithm != Algorithm::Single)),
        (Relation::OneRank, Dv, |p, _, o| scaled(o, Dv, p.parallel.algorithm != Algorithm::Single)),
        (Relation::RepeatedKvHeads, Dk, |p, _, o| scaled(o, Dk, p.heads.kv < p.heads.q)),
        (Relation::RepeatedKvHeads, Dv, |p, _, o| scaled(o, Dv, p.heads.kv < p.heads.q)),
    ];
    for (relation, tensor, spoil) in faults {
        let judge = Judge { identities: vec![relation], ..identities_alone() };
        let asked = |problem: &Problem| match relation {
            Relation::OneRank => ranks(problem),
            _ => problem.heads.kv < problem.heads.q,
        };
        let verdicts: Vec<Option<Finding>> = problems(6, Limits::quick(), 400)
            .filter(|(_, problem)| problem.pass == Pass::Backward && asked(problem))
            .filter_map(|(_, problem)| {
                let subject = Spoilt::new(&spoilt(relation, spoil));
                match judge.examine(&subject, &problem, Depth::First).verdict {
                    Verdict::Finding(finding) => Some(Some(*finding)),
                    Verdict::Pass(_) => Some(None),
                    _ => None,
                }
            })
            .collect();
        let found: Vec<&Finding> = verdicts.iter().flatten().collect();
        assert!(found.iter().all(|finding| finding.identity == Some(relation)));
        assert!(found.iter().all(|finding| finding.tensor == Some(tensor)));
        // A row of one key has no dq and no dk, and for large logits the bound says nothing.
        assert!(
            10 * found.len() > verdicts.len(),
            "{relation} {tensor}: {} of {}",
            found.len(),
            verdicts.len()
        );
    }
}

/// Test of a kernel that may add to dq in another order where heads share keys. It is then judged by a bound, and by
/// its bits only where it promises one order.
#[test]
fn dq_of_grouped_heads_is_held_to_bits_where_that_is_promised_and_else_to_a_bound() {
    let last_bit: Spoil = |problem, _, outputs| {
        if problem.heads.kv < problem.heads.q {
            gradients(outputs, |g| {
                g.dq.mapv_inplace(|x| {
                    written(x, |x| if x == 0.0 { x } else { f32::from_bits(x.to_bits() ^ 1) })
                });
            });
        }
    };
    let wrong: Spoil = |p, _, o| scaled(o, TensorName::Dq, p.heads.kv < p.heads.q);
    let open = Promises { groups_alone: false, ..Promises::ALL };
    let judge = Judge { identities: vec![Relation::RepeatedKvHeads], ..identities_alone() };
    let seen = |spoil: Spoil, promises: Promises| {
        let verdicts: Vec<Option<Finding>> = problems(6, Limits::quick(), 400)
            .filter(|(_, problem)| problem.pass == Pass::Backward && problem.heads.kv < problem.heads.q)
            .filter_map(|(_, problem)| {
                let subject = Spoilt { promises, ..Spoilt::new(&spoilt(Relation::RepeatedKvHeads, spoil)) };
                match judge.examine(&subject, &problem, Depth::First).verdict {
                    Verdict::Finding(finding) => Some(Some(*finding)),
                    Verdict::Pass(_) => Some(None),
                    _ => None,
                }
            })
            .collect();
        let found: Vec<&Finding> = verdicts.iter().flatten().collect();
        assert!(found.iter().all(|finding| finding.tensor == Some(TensorName::Dq)), "{found:?}");
        (found.len(), verdicts.len())
    };
    let (found, of) = seen(last_bit, Promises::ALL);
    assert!(2 * found > of, "{found} of {of}");
    let (found, _) = seen(last_bit, open);
    assert_eq!(found, 0);
    let (found, of) = seen(wrong, open);
    assert!(10 * found > of, "{found} of {of}");
}

/// A fault that changes the last bit of the LSE of a sequence that is alone, far inside every bound.
const LAST_BIT: Fault = Fault {
    relation: Relation::Alone,
    spoil: |problem, _, outputs| {
        if problem.sequences.len() == 1 {
            each(outputs, |rank| {
                if let Some(lse) = &mut rank.lse {
                    lse.mapv_inplace(
                        |lse| if lse.is_finite() { f32::from_bits(lse.to_bits() ^ 1) } else { lse },
                    );
                }
            });
        }
    },
    told: |_| {},
};

#[test]
fn a_broken_identity_shrinks_and_keeps_its_name() {
    let judge = Judge { identities: vec![Relation::Alone], ..identities_alone() };
    let verdict = |problem: &Problem| judge.examine(&Spoilt::new(&LAST_BIT), problem, Depth::First).verdict;
    let found: Option<(Problem, Finding)> = (0..CASES_MAX).find_map(|index| {
        let Draw::Problem(problem) = generate::draw(7, index, &Limits::quick()) else { return None };
        match verdict(&problem) {
            Verdict::Finding(finding) => Some((problem, *finding)),
            _ => None,
        }
    });
    let (problem, finding) = found.expect("an identity sees one bit");
    assert_eq!((finding.check, finding.identity), (Check::Identity, Some(Relation::Alone)));
    assert!(finding.to_string().starts_with("identity alone · lse · "), "{finding}");
    for text in
        ["a second run's result (got)", "the second run: the sequence by itself", "a replay makes both"]
    {
        assert!(finding.what.contains(text), "{finding}");
    }
    let shrunk = shrink(&problem, 400, |candidate| same_failure(&finding, verdict(candidate)).is_some());
    let tokens = shrunk.problem.tokens();
    assert!(shrunk.complete && shrunk.problem.sequences.len() == 2 && tokens <= 2, "{shrunk:?}");
}

#[test]
fn a_campaign_asks_few_identities_and_an_unknown_subject_none_that_need_a_promise() {
    let needs: Vec<&Identity> =
        TABLE.iter().filter(|identity| !(identity.needs)(&Promises::default())).collect();
    assert!(needs.len() > 10);
    let runs = |seed: u64| identity::drawn(seed).iter().map(|identity| identity.runs).sum::<u32>();
    // The most runs has the identity of forms: one in each other form.
    assert!((0..1_000).all(|seed| runs(seed) < Form::ALL.len() as u32));
}

#[test]
fn without_the_oracle_the_verdict_says_that_no_tensor_was_compared_whole() {
    let right = Emulated::default();
    let (_, problem) = problems(3, Limits::quick(), 50)
        .find_any(|(_, problem)| problem.pass == Pass::Backward && problem.tokens() > 4)
        .expect("a backward problem");
    let compared = |judge: Judge| match judge.examine(&right, &problem, Depth::First).verdict {
        Verdict::Pass(margin) => margin.compared,
        verdict => panic!("{verdict:?}"),
    };
    assert_eq!(compared(Judge { products_max: 0, ..Judge::default() }), 0);
    assert_eq!(compared(Judge::default()), 7);
}
