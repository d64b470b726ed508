//! Scoring the catalogue of planted faults: what catches each, how soon, and how small the repro becomes.
//!
//! A fault is met on a seeded *stream* of the generator's problems, those whose schedule it changes, or whose result where
//! it is in the kernel. Its *cases* are the problems of the stream up to the first that is caught. The checker looks at
//! the edited schedule, the campaign judges the emulated kernel that runs it; the repro is shrunk as a campaign's
//! findings are.

mod call;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use rayon::prelude::*;
use seamproof_oracle::{Format, Problem, TensorName};
use seamproof_simulator::check::check;
use seamproof_simulator::faults::{Catcher, Fault, Plant};
use seamproof_simulator::schedule::{Schedule, build};

use crate::backend::{Backend, Capabilities, Outputs, RankGradients, RankOutputs, Wrapper};
use crate::backends::{Emulated, Planted};
use crate::campaign::{SHRINK_EVALUATIONS_MAX, same_failure};
use crate::evaluate::evaluate;
use crate::generate::{self, Draw, Limits};
use crate::shrink;
use crate::values::{self, Poison};
use crate::verdict::{Check, Finding, Verdict};

pub use call::{CallScore, call_stream, miscalled, score_calls};

/// A planted fault of a capability table: the subject runs and refuses as before, and declares something else.
#[derive(Clone, Copy, Debug)]
pub struct TableFault {
    /// Its name in reports.
    pub id: &'static str,
    /// What goes wrong.
    pub imitates: &'static str,
    /// Where that happened.
    pub source: &'static str,
    /// Its entries in the list of real bugs.
    pub entries: &'static [u16],
    /// The edit.
    pub edit: fn(&mut Capabilities),
}

/// Tables that promise too much or too little: the judge's capability check is to see both.
pub const TABLE_FAULTS: &[TableFault] = &[
    TableFault {
        id: "table-too-wide",
        imitates: "a gate lists what a backend has no code for: dispatch reaches it all the same",
        source: "https://github.com/NVIDIA/TransformerEngine/issues/2892",
        entries: &[1, 10],
        edit: |table| {
            table.formats.extend([Format::E4m3, Format::E5m2]);
            table.weight_formats.extend([Format::E4m3, Format::E5m2]);
        },
    },
    TableFault {
        id: "table-too-narrow",
        imitates: "a gate is keyed on one head dimension and refuses what the backend runs",
        source: "https://github.com/NVIDIA/TransformerEngine/pull/2596",
        entries: &[11, 202],
        edit: |table| table.head_dims = *table.head_dims.start()..=64,
    },
];

/// The emulated kernel behind a planted table.
#[derive(Debug)]
pub struct Tabled {
    inner: Emulated,
    fault: &'static TableFault,
}

impl Tabled {
    /// The kernel with a fault in its table.
    pub fn new(fault: &'static TableFault) -> Tabled {
        Tabled { inner: Emulated::default(), fault }
    }
}

impl Wrapper for Tabled {
    fn inner(&self) -> &dyn Backend {
        &self.inner
    }

    fn name(&self) -> &str {
        self.fault.id
    }

    fn capabilities(&self) -> Capabilities {
        let mut table = self.inner.capabilities();
        (self.fault.edit)(&mut table);
        table
    }
}

/// Problems that are drawn for one fault and seed.
pub const DRAWN_MAX: u64 = 20_000;
/// Problems that are proved or judged for one fault and seed.
pub const CASES_MAX: usize = 1_000;

/// The first case that something caught.
#[derive(Clone, Debug)]
pub struct First {
    /// By what.
    pub by: Catcher,
    /// The tensor that was wrong, where one was.
    pub tensor: Option<TensorName>,
    /// In which words.
    pub what: String,
    /// Cases up to it.
    pub cases: usize,
    /// Seconds up to it, those that drew cases included.
    pub seconds: f64,
    /// The case.
    pub problem: Problem,
}

impl First {
    /// By what and on which tensor, in words.
    pub fn by(&self) -> String {
        let tensor = self.tensor.map(|tensor| format!(" {tensor}")).unwrap_or_default();
        format!("{}{tensor}", self.by.name())
    }
}

/// How large a repro is.
#[derive(Clone, Copy, Debug)]
pub struct Repro {
    /// Sequences.
    pub sequences: usize,
    /// Real queries.
    pub tokens: usize,
    /// Ranks.
    pub cp: usize,
}

/// What came of one fault.
#[derive(Clone, Debug)]
pub struct Score {
    /// The fault.
    pub fault: &'static Fault,
    /// The checker's first rejection for each seed that had one.
    pub checker: Vec<First>,
    /// The judge's first finding for each seed that had one.
    pub campaign: Vec<First>,
    /// The first seed's repro, shrunk: the campaign's, or the checker's where the campaign has none.
    pub repro: Option<Repro>,
}

impl Score {
    /// Whether something that the fault names caught it.
    pub fn caught(&self) -> bool {
        let named = |first: &First| self.fault.is_caught_by(first.by);
        self.checker.iter().chain(&self.campaign).any(named)
    }

    /// Cases and seconds to the first finding of either, in the median over seeds.
    pub fn median(firsts: &[First]) -> Option<(usize, f64)> {
        let mut cases: Vec<usize> = firsts.iter().map(|first| first.cases).collect();
        let mut seconds: Vec<f64> = firsts.iter().map(|first| first.seconds).collect();
        cases.sort_unstable();
        seconds.sort_unstable_by(f64::total_cmp);
        Some((*cases.get(cases.len() / 2)?, *seconds.get(seconds.len() / 2)?))
    }
}

/// The check of the judge as a catcher.
fn catcher(check: Check) -> Catcher {
    match check {
        Check::Crash | Check::Capability | Check::Validation => Catcher::Crash,
        Check::Structure => Catcher::Structure,
        Check::Poison => Catcher::Poison,
        Check::Exact => Catcher::Exact,
        Check::Identity => Catcher::Identity,
        Check::Envelope => Catcher::Envelope,
    }
}

/// The schedule of a problem with the fault in it; none where there is no schedule or the fault changes nothing.
pub fn planted(fault: &Fault, problem: &Problem) -> Option<Schedule> {
    let mut schedule = build(problem).ok()?;
    let applies = match fault.edit {
        Plant::Schedule(_) => fault.plant(problem, &mut schedule),
        Plant::Kernel(_) => changes_result(fault, problem),
    };
    applies.then_some(schedule)
}

/// Whether a fault in the kernel changes a bit of what the emulated subject makes of a problem, padding poisoned.
fn changes_result(fault: &Fault, problem: &Problem) -> bool {
    let mut inputs = values::inputs(problem);
    values::poison(&mut inputs, problem, Poison::Nan);
    let right = Emulated::default();
    let run = |subject: &dyn Backend| {
        catch_unwind(AssertUnwindSafe(|| subject.run(problem, &inputs))).ok().and_then(Result::ok)
    };
    let (right, wrong) = (run(&right), run(&Planted::new(right, *fault)));
    match (right, wrong) {
        (Some(right), Some(wrong)) => !same_bits(&right, &wrong),
        (right, wrong) => right.is_some() != wrong.is_some(),
    }
}

/// Whether two runs left the same bits.
fn same_bits(a: &Outputs, b: &Outputs) -> bool {
    let bits = |outputs: &Outputs| -> Vec<u32> {
        let of = |rank: &RankOutputs| {
            let mut values: Vec<f32> = rank.out.iter().copied().collect();
            values.extend(rank.lse.iter().flatten().chain(rank.max_logit.iter().flatten()));
            if let Some(RankGradients { dq, dk, dv, dsink }) = &rank.gradients {
                values.extend(dq.iter().chain(dk).chain(dv).chain(dsink));
            }
            values
        };
        outputs.ranks.iter().flat_map(of).map(f32::to_bits).collect()
    };
    a.damage == b.damage && bits(a) == bits(b)
}

/// The problems of a seed's stream that the fault applies to, with their edited schedules.
pub fn stream(fault: &Fault, seed: u64) -> impl Iterator<Item = (Problem, Schedule)> {
    let limits = Limits::seams();
    let subject = Emulated::default().capabilities();
    let drawn = (0..DRAWN_MAX).filter_map(move |index| match generate::draw(seed, index, &limits) {
        Draw::Problem(problem) if subject.refusal(&problem).is_none() => Some(problem),
        _ => None,
    });
    drawn.filter_map(|problem| planted(fault, &problem).map(|schedule| (problem, schedule))).take(CASES_MAX)
}

/// What the checker says first of an edited schedule.
fn rejection(problem: &Problem, schedule: &Schedule) -> Option<String> {
    check(problem, schedule).err().and_then(|errors| errors.first().map(ToString::to_string))
}

/// The first problem of a seed's stream whose edited schedule the checker rejects.
pub fn by_checker(fault: &Fault, seed: u64) -> Option<First> {
    let start = Instant::now();
    stream(fault, seed).enumerate().find_map(|(index, (problem, schedule))| {
        let what = rejection(&problem, &schedule)?;
        let (cases, seconds) = (index + 1, start.elapsed().as_secs_f64());
        Some(First { by: Catcher::Checker, tensor: None, what, cases, seconds, problem })
    })
}

fn finding(subject: &Planted, problem: &Problem) -> Option<Finding> {
    match evaluate(subject, problem) {
        Verdict::Finding(finding) => Some(*finding),
        _ => None,
    }
}

/// The first problem of a seed's stream on which the judge finds the subject wrong, and the finding.
pub fn by_campaign(fault: &Fault, seed: u64) -> Option<(First, Finding)> {
    let (start, subject) = (Instant::now(), subject(fault, seed));
    stream(fault, seed).enumerate().find_map(|(index, (problem, _))| {
        let finding = finding(&subject, &problem)?;
        let first = First {
            by: catcher(finding.check),
            tensor: finding.tensor,
            what: finding.to_string(),
            cases: index + 1,
            seconds: start.elapsed().as_secs_f64(),
            problem,
        };
        Some((first, finding))
    })
}

/// The emulated kernel with the fault, its streams in an order drawn from the seed.
fn subject(fault: &Fault, seed: u64) -> Planted {
    Planted::new(Emulated { order: seed, ..Emulated::default() }, *fault)
}

fn repro(problem: &Problem, fails: impl FnMut(&Problem) -> bool) -> Repro {
    let small = shrink::shrink(problem, SHRINK_EVALUATIONS_MAX, fails).problem;
    Repro { sequences: small.sequences.len(), tokens: small.tokens(), cp: small.parallel.size() }
}

/// Scores a fault over `seeds` streams.
pub fn score(fault: &'static Fault, seeds: u64) -> Score {
    let proved = if matches!(fault.edit, Plant::Kernel(_)) { 0 } else { seeds };
    let checker: Vec<First> = (0..proved).filter_map(|seed| by_checker(fault, seed)).collect();
    // What only the proof can see is not looked for where it cannot be seen.
    let judged = if fault.caught_by == [Catcher::Checker] { 0 } else { seeds };
    let campaign: Vec<(First, Finding)> = (0..judged).filter_map(|seed| by_campaign(fault, seed)).collect();
    let small = match (campaign.first(), checker.first()) {
        (Some((first, start)), _) => {
            let subject = subject(fault, 0);
            Some(repro(&first.problem, |candidate| {
                same_failure(start, evaluate(&subject, candidate)).is_some()
            }))
        }
        (None, Some(first)) => Some(repro(&first.problem, |candidate| {
            planted(fault, candidate).is_some_and(|schedule| rejection(candidate, &schedule).is_some())
        })),
        (None, None) => None,
    };
    Score { fault, checker, campaign: campaign.into_iter().map(|(first, _)| first).collect(), repro: small }
}

/// Scores faults, several at once.
pub fn score_all(faults: &[&'static Fault], seeds: u64) -> Vec<Score> {
    faults.par_iter().map(|fault| score(fault, seeds)).collect()
}
