//! Faults in the judge: a judge that skips a check passes what it must not pass.
//!
//! A [`Probe`] is a broken subject and a case on which the right judge
//! condemns it. A fault in the judge is *caught* when the right judge condemns some probe by the rung that the fault
//! blinds, and the faulty judge does not condemn that probe.

use ndarray::{Axis, s};
use seamproof_oracle::amax::Amaxes;
use seamproof_oracle::{
    Algorithm, Balance, ContextParallel, Heads, Inputs, Mask, Pass, Problem, ProblemError, ProblemFields,
    Scales, Sink, Softmax, TensorName,
};
use seamproof_simulator::faults::{Catcher, Fault};
use seamproof_simulator::{UNWRITTEN_BITS, is_unwritten};

use super::{bounds, envelope, structure};
use crate::finding::Check;
use crate::finding::Relation;
use crate::identity;
use crate::ladder::evidence::{Depth, Evidence, Judge, Look, Told};
use crate::subject::{Backend, Declaration, Outputs, RankGradients, RankOutputs, RunError};
use crate::subjects::Emulated;
use crate::verdict::{Margin, Verdict};
use seamproof_oracle::sharding::{self as layout, RankLayout};

/// A fault in the judge, which edits the judge's data. It is caught by the rung that it blinds: the faulty judge passes
/// what the right judge condemns by that rung.
pub type JudgeFault = Fault<fn(&mut Judge)>;

/// Source of tests of context parallelism that passed on an all-zero tensor.
const ALL_ZERO: &str = "https://github.com/NVIDIA/TransformerEngine/pull/3536";
/// Source of a comparison that NaN slips through.
const NAN_EQUAL: &str = "https://github.com/tracel-ai/cubecl/issues/1070";
/// Source of tests whose tolerance lies above the signal, and that zero padding on both sides before they compare.
const TE_TESTS: &str =
    "https://github.com/NVIDIA/TransformerEngine/blob/main/tests/pytorch/attention/run_attention_with_cp.py";
/// Source of tests that compare out and gradients, and never the LSE.
const FA_TESTS: &str = "https://github.com/Dao-AILab/flash-attention/blob/main/hopper/test_flash_attn.py";

/// Every fault in the judge.
pub const FAULTS: [JudgeFault; 18] = [
    JudgeFault {
        id: "judge-nan-equals",
        imitates: "a NaN counts as equal to anything",
        source: NAN_EQUAL,
        entries: &[],
        caught_by: &[Catcher::Envelope],
        edit: |judge| {
            judge.ratio = |got, exact, bound, format, to| {
                bounds::each_ratio(got, exact, bound, to, |got, exact, bound| match got.is_nan() {
                    true => 0.0,
                    false => bounds::error_ratio(got, exact, bound, format),
                });
            }
        },
    },
    JudgeFault {
        id: "judge-zero-accepted",
        imitates: "a result of zeros counts as right",
        source: ALL_ZERO,
        entries: &[],
        caught_by: &[Catcher::Envelope],
        edit: |judge| {
            judge.ratio = |got, exact, bound, format, to| {
                bounds::each_ratio(got, exact, bound, to, |got, exact, bound| match got == 0.0 {
                    true => 0.0,
                    false => bounds::error_ratio(got, exact, bound, format),
                });
            }
        },
    },
    JudgeFault {
        id: "judge-bound-times-100",
        imitates: "every bound is 100 times too wide",
        source: TE_TESTS,
        entries: &[],
        caught_by: &[Catcher::Envelope],
        edit: |judge| {
            judge.ratio = |got, exact, bound, format, to| {
                bounds::each_ratio(got, exact, bound, to, |got, exact, bound| {
                    bounds::error_ratio(got, exact, 100.0 * bound, format)
                });
            }
        },
    },
    JudgeFault {
        id: "judge-sign-ignored",
        imitates: "magnitudes are compared",
        source: TE_TESTS,
        entries: &[],
        caught_by: &[Catcher::Envelope],
        edit: |judge| {
            judge.ratio = |got, exact, bound, format, to| {
                bounds::each_ratio(got, exact, bound, to, |got, exact, bound| {
                    bounds::error_ratio(got.abs(), exact.abs(), bound, format)
                });
            }
        },
    },
    JudgeFault {
        id: "judge-infinity-equals",
        imitates: "an infinity counts as an overflow, whatever the exact value",
        source: NAN_EQUAL,
        entries: &[],
        caught_by: &[Catcher::Envelope],
        edit: |judge| {
            judge.ratio = |got, exact, bound, format, to| {
                bounds::each_ratio(got, exact, bound, to, |got, exact, bound| match got.is_infinite() {
                    true => 0.0,
                    false => bounds::error_ratio(got, exact, bound, format),
                });
            }
        },
    },
    JudgeFault {
        id: "judge-structure-not-looked-at",
        imitates: "nobody looks at unwritten rows, guards and padding",
        source: FA_TESTS,
        entries: &[],
        caught_by: &[Catcher::Structure],
        edit: |judge| judge.structure = |_, _, _, _| None,
    },
    JudgeFault {
        id: "judge-padding-not-looked-at",
        imitates: "padding rows of outputs are set to zero before the comparison",
        source: TE_TESTS,
        entries: &[],
        caught_by: &[Catcher::Structure],
        edit: |judge| {
            judge.structure = |backend, problem, layouts, outputs| {
                let beside = [structure::PADDING_BROKEN, structure::UNOWNED_WRITTEN];
                structure::check(backend, problem, layouts, outputs)
                    .filter(|finding| !beside.iter().any(|said| finding.what.contains(said)))
            }
        },
    },
    JudgeFault {
        id: "judge-guards-not-looked-at",
        imitates: "writes outside a tensor are not looked for",
        source: FA_TESTS,
        entries: &[],
        caught_by: &[Catcher::Structure],
        edit: |judge| {
            judge.structure = |backend, problem, layouts, outputs| {
                let undamaged = Outputs { damage: Vec::new(), ..outputs.clone() };
                structure::check(backend, problem, layouts, &undamaged)
            }
        },
    },
    JudgeFault {
        id: "judge-structure-of-the-last-rank",
        imitates: "the structure of the last rank's results is not looked at",
        source: TE_TESTS,
        entries: &[],
        caught_by: &[Catcher::Structure],
        edit: |judge| {
            judge.structure = |backend, problem, layouts, outputs| {
                let ranks = layouts.len().saturating_sub(1).max(1);
                let but_last = Outputs {
                    ranks: outputs.ranks.iter().take(ranks).cloned().collect(),
                    damage: Vec::new(),
                    ..outputs.clone()
                };
                structure::check(backend, problem, &layouts[..ranks.min(layouts.len())], &but_last)
            }
        },
    },
    JudgeFault {
        id: "judge-deals-in-order",
        imitates: "who owns which row is asked of the subject: whatever cut it makes is the right one",
        source: TE_TESTS,
        entries: &[],
        caught_by: &[Catcher::Envelope],
        edit: |judge| judge.layouts = |problem| layout::layouts(&in_order(problem)),
    },
    JudgeFault {
        id: "judge-last-rank-not-compared",
        imitates: "the rows of the last rank are not compared",
        source: TE_TESTS,
        entries: &[],
        caught_by: &[Catcher::Envelope],
        edit: |judge| {
            replace(judge, Check::Envelope, |evidence, margin| {
                but(evidence, margin, without_last_rank(evidence.problem))
            });
        },
    },
    JudgeFault {
        id: "judge-last-row-not-compared",
        imitates: "a loop over rows ends one early",
        source: FA_TESTS,
        entries: &[],
        caught_by: &[Catcher::Envelope],
        edit: |judge| {
            replace(judge, Check::Envelope, |evidence, margin| {
                let mut layout = evidence.layout.clone();
                for placed in layout.q.runs.iter_mut().chain(&mut layout.kv.runs) {
                    placed.local.len = placed.local.len.saturating_sub(1);
                }
                but(evidence, margin, layout)
            });
        },
    },
    JudgeFault {
        id: "judge-first-head-compared",
        imitates: "the first KV head and its group are compared, no other",
        source: TE_TESTS,
        entries: &[],
        caught_by: &[Catcher::Envelope],
        edit: |judge| replace(judge, Check::Envelope, first_head),
    },
    JudgeFault {
        id: "judge-lse-not-looked-at",
        imitates: "the LSE is not compared",
        source: FA_TESTS,
        entries: &[],
        caught_by: &[Catcher::Envelope],
        edit: |judge| {
            replace(judge, Check::Envelope, |evidence, margin| {
                unless(envelope::look(evidence, margin), TensorName::Lse)
            });
        },
    },
    JudgeFault {
        id: "judge-dsink-not-compared",
        imitates: "the gradient of the sink is not compared",
        source: "https://github.com/NVIDIA/TransformerEngine/pull/3551",
        entries: &[],
        caught_by: &[Catcher::Envelope],
        edit: |judge| {
            replace(judge, Check::Envelope, |evidence, margin| {
                unless(envelope::look(evidence, margin), TensorName::Dsink)
            });
        },
    },
    JudgeFault {
        id: "judge-poison-missing",
        imitates: "what padding of the inputs holds is never varied",
        source: TE_TESTS,
        entries: &[],
        caught_by: &[Catcher::Poison],
        edit: |judge| judge.rungs.retain(|rung| rung.check != Check::Poison),
    },
    JudgeFault {
        id: "judge-envelope-missing",
        imitates: "no result is compared with an exact answer",
        source: ALL_ZERO,
        entries: &[],
        caught_by: &[Catcher::Envelope],
        edit: |judge| judge.rungs.retain(|rung| rung.check != Check::Envelope),
    },
    JudgeFault {
        id: "judge-identity-missing",
        imitates: "no run is compared with another",
        source: TE_TESTS,
        entries: &[],
        caught_by: &[Catcher::Identity],
        edit: |judge| judge.rungs.retain(|rung| rung.check != Check::Identity),
    },
];

fn replace(judge: &mut Judge, check: Check, look: fn(&Evidence<'_>, &mut Margin) -> Look) {
    for rung in judge.rungs.iter_mut().filter(|rung| rung.check == check) {
        rung.look = look;
    }
}

/// Examines the envelope on another layout's rows.
fn but(evidence: &Evidence<'_>, margin: &mut Margin, layout: RankLayout) -> Look {
    envelope::look(&Evidence { layout: &layout, ..*evidence }, margin)
}

/// Returns the answer of a rung, unless it is a finding on one tensor.
fn unless(look: Look, tensor: TensorName) -> Look {
    match look {
        Look::Broken(finding) if finding.tensor == Some(tensor) => Look::Held,
        look => look,
    }
}

/// Returns the problem with contiguous balance, which deals each sequence to the ranks in order.
fn in_order(problem: &Problem) -> Problem {
    let mut fields = ProblemFields::from(problem.clone());
    fields.parallel.balance = Balance::Contiguous;
    Problem::new(fields).unwrap_or_else(|_| problem.clone())
}

/// Returns the problem's own layout with the runs cut where the last rank's first row begins.
fn without_last_rank(problem: &Problem) -> RankLayout {
    let mut whole = layout::whole(problem);
    let Ok(ranks) = layout::layouts(problem) else { return whole };
    if let Some(last) = ranks.last().filter(|_| ranks.len() > 1) {
        for (side, last) in [(&mut whole.q, &last.q), (&mut whole.kv, &last.kv)] {
            for placed in &mut side.runs {
                let own = last.runs.iter().filter(|run| run.sequence == placed.sequence);
                let first = own.map(|run| run.piece.start).min().unwrap_or(usize::MAX);
                placed.local.len = placed.local.len.min(first);
            }
        }
    }
    whole
}

/// Examines the envelope on the first KV head and its group alone.
fn first_head(evidence: &Evidence<'_>, margin: &mut Margin) -> Look {
    let group = evidence.problem.group();
    let mut fields: ProblemFields = evidence.problem.clone().into();
    fields.heads = Heads { q: group, kv: 1 };
    let Ok(problem) = Problem::new(fields) else { return Look::Failed("one head is no problem".into()) };
    let inputs = Inputs {
        q: evidence.inputs.q.slice(s![.., ..group, ..]).to_owned(),
        k: evidence.inputs.k.slice(s![.., ..1, ..]).to_owned(),
        v: evidence.inputs.v.slice(s![.., ..1, ..]).to_owned(),
        dout: evidence.inputs.dout.slice(s![.., ..group, ..]).to_owned(),
        sink: evidence.inputs.sink.iter().take(group).copied().collect(),
        scales: Scales::default(),
    };
    let gradients = evidence.first.gradients.as_ref().map(|gradients| RankGradients {
        dq: gradients.dq.slice(s![.., ..group, ..]).to_owned(),
        dk: gradients.dk.slice(s![.., ..1, ..]).to_owned(),
        dv: gradients.dv.slice(s![.., ..1, ..]).to_owned(),
        dsink: gradients.dsink.iter().take(group).copied().collect(),
    });
    let first = RankOutputs {
        out: evidence.first.out.slice(s![.., ..group, ..]).to_owned(),
        lse: evidence.first.lse.as_ref().map(|lse| lse.slice(s![..group, ..]).to_owned()),
        max_logit: evidence.first.max_logit.as_ref().map(|max| max.iter().take(group).copied().collect()),
        gradients,
        amax: Amaxes::default(),
    };
    let told = Told::default();
    let one = Evidence { problem: &problem, inputs: &inputs, first: &first, told: &told, ..*evidence };
    envelope::look(&one, margin)
}

/// A broken subject and a case on which the right judge condemns it.
pub struct Probe {
    /// Description of what is wrong with the subject.
    pub what: &'static str,
    /// Broken subject.
    pub subject: Box<dyn Backend>,
    /// Problem of the case.
    pub problem: Problem,
}

impl Probe {
    /// Returns the rung by which a judge condemns the subject on the case, if it does.
    pub fn condemned_by(&self, judge: &Judge) -> Option<Check> {
        match judge.examine(self.subject.as_ref(), &self.problem, Depth::First).verdict {
            Verdict::Finding(finding) => Some(finding.check),
            _ => None,
        }
    }
}

/// Function that spoils the results of a right run. It takes the problem, the inputs, the number of earlier runs of
/// the subject, and the results.
type Spoil = fn(&Problem, &Inputs, usize, &mut Outputs);

/// Function that makes a probe's case from [`fields`].
type Edit = fn(&mut ProblemFields);

/// The emulated kernel with spoilt results.
struct Spoilt {
    inner: Emulated,
    spoil: Spoil,
    runs: std::sync::atomic::AtomicUsize,
}

impl Backend for Spoilt {
    fn declaration(&self) -> Declaration {
        self.inner.declaration()
    }

    fn inner(&self) -> Option<&dyn Backend> {
        Some(&self.inner)
    }

    fn name(&self) -> &str {
        "spoilt"
    }

    fn run(&self, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
        let before = self.runs.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let mut outputs = self.inner.run(problem, inputs)?;
        (self.spoil)(problem, inputs, before, &mut outputs);
        Ok(outputs)
    }
}

/// Returns two padded sequences on two heads.
fn fields() -> ProblemFields {
    ProblemFields {
        heads: Heads { q: 2, kv: 2 },
        mask: Mask::CAUSAL,
        softmax: Softmax::scaled(0.353_553_4),
        data_seed: calm_seed(),
        pass: Pass::Forward,
        ..ProblemFields::padded(&[(5, 8), (7, 8)], 8)
    }
}

/// Returns the first data seed that draws only identities under which a subject that is always wrong in the same way
/// holds.
fn calm_seed() -> u64 {
    let calm = |identity: &&identity::Identity| {
        identity.runs == 0
            || matches!(identity.relation, Relation::Rerun | Relation::WideWindow | Relation::History)
    };
    (0..u64::MAX).find(|&seed| identity::drawn(seed).iter().all(calm)).unwrap_or(0)
}

/// Changes the last real row of the second sequence, where the run has one.
fn out_of(outputs: &mut Outputs, change: impl Fn(f32) -> f32) {
    for rank in outputs.ranks.iter_mut().filter(|rank| rank.out.shape()[0] > 14) {
        let mut row = rank.out.index_axis_mut(Axis(0), 14);
        row.mapv_inplace(|x| if is_unwritten(x) { x } else { change(x) });
    }
}

fn ring(fields: &mut ProblemFields) {
    let (algorithm, balance) = (Algorithm::Ring, Balance::Contiguous);
    fields.parallel = ContextParallel::over(2, algorithm, balance);
}

/// Makes a ring of dual chunks without padding, so that every row of another cut holds a result.
fn dual_chunk(fields: &mut ProblemFields) {
    ring(fields);
    fields.parallel.balance = Balance::DualChunk;
    let runs = fields.sequences.iter_mut().flat_map(|sequence| [&mut sequence.q, &mut sequence.kv]);
    runs.for_each(|run| run.len = run.span);
}

fn backward(fields: &mut ProblemFields) {
    fields.pass = Pass::Backward;
    fields.softmax.sink = Sink::Learnable;
}

fn plain(_: &mut ProblemFields) {}

/// Returns the probes, each broken in one place. The right judge condemns all of them.
pub fn probes() -> Result<Vec<Probe>, ProblemError> {
    let table: [(&str, Edit, Spoil); 15] = [
        ("a NaN in out", plain, |_, _, _, outputs| out_of(outputs, |_| f32::NAN)),
        ("a row of out is 0", plain, |_, _, _, outputs| out_of(outputs, |_| 0.0)),
        ("an infinity in out", plain, |_, _, _, outputs| out_of(outputs, |_| f32::INFINITY)),
        ("a row of out is an eighth too large", plain, |_, _, _, outputs| out_of(outputs, |x| x * 1.125)),
        ("a row of out has the wrong sign", plain, |_, _, _, outputs| out_of(outputs, |x| -x)),
        ("the second head of out is too large", plain, |_, _, _, outputs| {
            outputs.ranks.iter_mut().for_each(|rank| {
                rank.out.slice_mut(s![..5, 1, ..]).mapv_inplace(|x| x * 2.0);
            });
        }),
        ("the last rank's out is doubled", ring, |_, _, _, outputs| {
            if let Some(rank) = outputs.ranks.last_mut() {
                rank.out.index_axis_mut(Axis(0), 0).mapv_inplace(|x| x * 2.0);
            }
        }),
        ("ranks hold the rows of another cut", dual_chunk, |problem, inputs, _, outputs| {
            if let Ok(dealt) = Emulated::default().run(&in_order(problem), inputs) {
                *outputs = dealt;
            }
        }),
        ("the last rank's padding is unwritten", ring, |_, _, _, outputs| {
            if let Some(rank) = outputs.ranks.last_mut() {
                let row = rank.out.shape()[0] - 1;
                rank.out.index_axis_mut(Axis(0), row).fill(f32::from_bits(UNWRITTEN_BITS));
            }
        }),
        ("a padding row of out is not 0", plain, |_, _, _, outputs| {
            outputs.ranks.iter_mut().for_each(|rank| rank.out.index_axis_mut(Axis(0), 15).fill(1.0));
        }),
        ("a write outside a tensor", plain, |_, _, _, outputs| {
            outputs.damage.push(seamproof_simulator::Damage {
                tensor: "out".to_owned(),
                guard: seamproof_simulator::Guard::After,
                distance: 1,
                elements: 1,
            });
        }),
        ("the LSE is off", plain, |_, _, _, outputs| {
            outputs.ranks.iter_mut().filter_map(|rank| rank.lse.as_mut()).for_each(|lse| {
                lse.slice_mut(s![.., 8..12]).mapv_inplace(|lse| lse + 0.01);
            });
        }),
        ("dsink has the wrong sign", backward, |_, _, _, outputs| {
            outputs.ranks.iter_mut().filter_map(|rank| rank.gradients.as_mut()).for_each(|gradients| {
                gradients.dsink.mapv_inplace(|x| -x);
            });
        }),
        ("finite padding moves a real row", plain, |_, inputs, _, outputs| {
            let padding = inputs.v[[15, 0, 0]];
            let factor = if padding.is_finite() && padding != 0.0 { 2.0 } else { 1.0 };
            out_of(outputs, |x| x * factor);
        }),
        ("every third run moves a row by an ulp", plain, |_, _, before, outputs| {
            out_of(outputs, |x| if before % 3 == 2 { f32::from_bits(x.to_bits() ^ 0x1_0000) } else { x });
        }),
    ];
    let probe = |(what, edit, spoil): (&'static str, Edit, Spoil)| {
        let mut fields = fields();
        edit(&mut fields);
        let subject = Box::new(Spoilt { inner: Emulated::default(), spoil, runs: Default::default() });
        Ok(Probe { what, subject, problem: Problem::new(fields)? })
    };
    table.into_iter().map(probe).collect()
}

/// Score of one fault in the judge.
pub struct JudgeScore {
    /// Fault in the judge.
    pub fault: JudgeFault,
    /// Probes that the faulty judge does not condemn, and the rung by which the right one does.
    pub missed: Vec<(&'static str, Check)>,
}

impl JudgeScore {
    /// Whether the faulty judge misses a probe of the rung that the fault blinds.
    pub fn caught(&self) -> bool {
        self.missed.iter().any(|(_, rung)| self.fault.caught_by.contains(&rung.catcher()))
    }
}

/// Returns each probe with the rung by which a judge condemns it. A probe remembers how often it ran, so each judge
/// gets new ones.
fn condemned(judge: &Judge) -> Result<Vec<(&'static str, Option<Check>)>, String> {
    let probes = probes().map_err(|error| error.to_string())?;
    Ok(probes.iter().map(|probe| (probe.what, probe.condemned_by(judge))).collect())
}

/// Scores faults in the judge; returns an error where the right judge itself does not condemn a probe.
pub fn score(faults: &[JudgeFault]) -> Result<Vec<JudgeScore>, String> {
    let by_right = |(what, rung): (&'static str, Option<Check>)| match rung {
        Some(rung) => Ok((what, rung)),
        None => Err(format!("the right judge does not condemn a probe: {what}")),
    };
    let right = condemned(&Judge::default())?.into_iter().map(by_right).collect::<Result<Vec<_>, _>>()?;
    let of = |fault: &JudgeFault| {
        let mut judge = Judge::default();
        (fault.edit)(&mut judge);
        let wrong = condemned(&judge)?.into_iter();
        let missed = wrong.zip(&right).filter(|((_, rung), _)| rung.is_none()).map(|(_, right)| *right);
        Ok(JudgeScore { fault: *fault, missed: missed.collect() })
    };
    faults.iter().map(of).collect()
}
