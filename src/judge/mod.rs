//! The judge: is a subject right on one problem?
//!
//! A ladder of checks, the cheapest and sharpest first; the first one that breaks is the finding. *Capability*: it
//! refuses what its table refuses, for that reason, and nothing else. *Structure*: shapes, guard bands, every real
//! row written, padding rows as the subject's contract says, rows that nobody owns untouched. *Poison*: two runs that
//! differ only in what padding and slack rows of the inputs hold agree in every bit of every real row, and in whether it is
//! a NaN where a subject promises no bits of its gradients. *Exact*: inputs of
//! an exact mode allow one result, and the set of keys that a wrong one shows is named. *Envelope*:
//! each element within the largest honest error of the exact answer, the LSE first; the backward is judged on the out
//! and lse that the subject itself returned; where the oracle is too dear for the case, on a sample of its rows. *Identity*:
//! relations between results of the subject alone ([`identity`]); they come last because each runs the subject again.

mod assemble;
mod compare;
mod diagnosis;
mod envelope;
mod exact;
pub mod faults;
pub mod identity;
pub mod large;
mod poison;
mod sample;
mod stories;
mod structure;
mod trial;

use std::cell::{Cell, OnceCell};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::time::{Duration, Instant};

use seamproof_oracle::envelope::Partition;
use seamproof_oracle::replay::Replay;
use seamproof_oracle::sharding::{self as layout, RankLayout, ShardError};
use seamproof_oracle::{Format, Inputs, Problem};

pub use trial::Trial;

use crate::backend::{Backend, Outputs, PaddingInputs, RankGradients, RankOutputs, RunError};
use crate::generate::Malformed;
use crate::values::{self, Poison};
use crate::verdict::{Check, Cost, Finding, Margin, Verdict};
pub use identity::Relation;

/// Most elements of all tensors that a case may have: about 50 bytes each in inputs, results, exact answer and bounds.
pub const ELEMENTS_MAX: u64 = 1 << 27;
/// Most visible pairs × query heads × head dimension for which the oracle is asked about every row: about ten minutes on two cores.
pub const PRODUCTS_MAX: u64 = 1 << 41;

/// What a rung looks at: a case, its runs, and the judge's own map of its rows.
pub struct Evidence<'a> {
    /// The subject; a rung that runs it again does so through [`Evidence::run`].
    pub backend: &'a dyn Backend,
    /// The problem.
    pub problem: &'a Problem,
    /// The problem's own layout, in which the results are.
    pub layout: &'a RankLayout,
    /// The inputs, their padding rows zero.
    pub inputs: &'a Inputs,
    /// The results under the first poison, assembled from the ranks.
    pub first: &'a RankOutputs,
    /// Under the second.
    pub second: &'a RankOutputs,
    /// The judge that asks.
    pub judge: &'a Judge,
    /// How far down the ladder the case goes.
    pub depth: Depth,
    meter: &'a Meter,
    told: &'a Told,
}

/// What several rungs need of a case: how the subject cuts its sums, and the norms of its inputs.
#[derive(Default)]
struct Told {
    partition: OnceCell<Partition>,
    norms: OnceCell<Rc<identity::Norms>>,
}

impl Evidence<'_> {
    /// Runs the subject on another problem, or on other inputs; its time counts as the subject's.
    pub fn run(&self, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
        self.meter.subject(|| run(self.backend, problem, inputs))
    }

    /// How the subject cuts the sums of the case's problem; its time counts as the subject's.
    pub fn partition(&self) -> Partition {
        *self.told.partition.get_or_init(|| self.partition_of(self.problem))
    }

    /// The same of another problem.
    pub fn partition_of(&self, problem: &Problem) -> Partition {
        self.meter.subject(|| self.backend.partition(problem))
    }

    /// What tier R replays; what the subject says of its launches counts as its time.
    pub fn replay(&self) -> Option<Replay> {
        self.meter.subject(|| self.backend.replay(self.problem))
    }

    /// Whether the oracle can be asked about the whole case. Where it cannot, it is asked about some rows, and every identity
    /// is.
    pub fn has_oracle(&self) -> bool {
        products(self.problem) <= self.judge.products_max
    }

    /// The runs whose gradients are looked at: both where the subject may sum them in another order in each, since their bits
    /// say nothing then.
    fn gradient_runs(&self) -> Vec<&RankGradients> {
        let both = [self.first, self.second];
        let runs = if self.backend.promises().deterministic_backward { &both[..1] } else { &both[..] };
        runs.iter().filter_map(|run| run.gradients.as_ref()).collect()
    }

    /// Makes inputs; the time counts as theirs.
    fn making<T>(&self, make: impl FnOnce() -> T) -> T {
        self.meter.inputs(make)
    }

    /// Asks the oracle; its time counts as the oracle's.
    pub fn oracle<T>(&self, ask: impl FnOnce() -> T) -> T {
        self.meter.oracle(ask)
    }
}

/// What a rung says.
pub enum Look {
    /// It holds, or the rung has nothing to say of this case.
    Held,
    /// It is broken.
    Broken(Box<Finding>),
    /// The rung could not look: a fault of the harness.
    Failed(String),
}

impl From<Option<Finding>> for Look {
    fn from(finding: Option<Finding>) -> Look {
        finding.map_or(Look::Held, |finding| Look::Broken(Box::new(finding)))
    }
}

/// A rung: a check and how it looks. The envelope writes the margin, nobody else.
#[derive(Clone, Copy)]
pub struct Rung {
    /// Its name.
    pub check: Check,
    /// Looks at the evidence.
    pub look: fn(&Evidence<'_>, &mut Margin) -> Look,
}

/// Error ÷ bound of each of some elements: what was got, the exact values, their bounds, the format where they can
/// overflow, and where the ratios go.
pub type Ratios = fn(&[f32], &[f64], &[f64], Option<Format>, &mut [f64]);

/// Makes one set of results, in the problem's own layout, of the ranks'.
pub type Assemble = fn(&Problem, &[RankLayout], Vec<RankOutputs>) -> Result<RankOutputs, Box<Finding>>;

/// The judge, as data: its parts can be looked at one by one, and exchanged for wrong ones to see whether that is
/// noticed.
#[derive(Clone)]
pub struct Judge {
    /// Who owns which row on each rank.
    pub layouts: fn(&Problem) -> Result<Vec<RankLayout>, ShardError>,
    /// The first structural fault of a run.
    pub structure: fn(&dyn Backend, &Problem, &[RankLayout], &Outputs) -> Option<Finding>,
    /// The ranks' results in the problem's own layout.
    pub assemble: Assemble,
    /// Error ÷ bound.
    pub ratio: Ratios,
    /// Visible products up to which the oracle is asked about every row.
    pub products_max: u64,
    /// Elements up to which a case is judged, and a further run of the subject made.
    pub elements_max: u64,
    /// The identities that may be asked.
    pub identities: Vec<Relation>,
    /// What is asked of the assembled results, in order.
    pub rungs: Vec<Rung>,
}

impl Default for Judge {
    fn default() -> Judge {
        Judge {
            layouts: layout::layouts,
            structure: structure::check,
            assemble: assemble::assemble,
            ratio: envelope::error_ratios,
            products_max: PRODUCTS_MAX,
            elements_max: ELEMENTS_MAX,
            identities: identity::TABLE.iter().map(|identity| identity.relation).collect(),
            rungs: vec![
                Rung { check: Check::Poison, look: poison::look },
                Rung { check: Check::Exact, look: exact::look },
                Rung { check: Check::Envelope, look: envelope::look },
                Rung { check: Check::Identity, look: identity::look },
            ],
        }
    }
}

/// How far down the ladder a case goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Depth {
    /// To the first rung that breaks: a campaign.
    First,
    /// All rungs, whatever broke before: scoring.
    All,
}

/// All that a judge found out about a case.
#[derive(Clone, Debug, PartialEq)]
pub struct Examination {
    /// The first thing wrong, or that nothing is.
    pub verdict: Verdict,
    /// What each further rung found after the first ([`Depth::All`]).
    pub further: Vec<Finding>,
    /// Where the time went.
    pub cost: Cost,
}

/// Judges `backend` on `problem`, with the inputs that the problem's mode and data seed give.
pub fn judge(backend: &dyn Backend, problem: &Problem) -> Verdict {
    examine(backend, problem).verdict
}

/// The same, with where the time went.
pub fn examine(backend: &dyn Backend, problem: &Problem) -> Examination {
    Judge::default().examine(backend, problem, Depth::First)
}

impl Judge {
    /// Runs the subject under two poisons and asks each rung.
    pub fn examine(&self, backend: &dyn Backend, problem: &Problem, depth: Depth) -> Examination {
        let (start, meter) = (Instant::now(), Meter::default());
        let mut findings = Vec::new();
        let verdict = self.ladder(backend, problem, depth, &meter, &mut findings);
        let mut findings = findings.into_iter();
        let verdict =
            verdict.unwrap_or_else(|margin| findings.next().map_or(Verdict::Pass(margin), Verdict::from));
        Examination { verdict, further: findings.collect(), cost: meter.cost(start.elapsed()) }
    }

    /// The rungs, from the first run on. `Ok` is a verdict that ends the case, whatever was found before.
    fn ladder(
        &self,
        backend: &dyn Backend,
        problem: &Problem,
        depth: Depth,
        meter: &Meter,
        findings: &mut Vec<Finding>,
    ) -> Result<Verdict, Box<Margin>> {
        let mut margin = Box::<Margin>::default();
        if let Some(reason) = self.too_large(problem) {
            return Ok(Verdict::TooLarge(reason));
        }
        let inputs = meter.inputs(|| values::inputs(problem));
        let runs = Judge::runs(backend, problem, &inputs, meter);
        let [first, second] = match runs.and_then(|runs| self.whole(backend, problem, runs)) {
            Ok(results) => results,
            Err(verdict) => return Ok(verdict),
        };
        let layout = layout::whole(problem);
        let told = Told::default();
        let evidence = Evidence {
            backend,
            problem,
            layout: &layout,
            inputs: &inputs,
            first: &first,
            second: &second,
            judge: self,
            depth,
            meter,
            told: &told,
        };
        match self.climb(&evidence, findings, &mut margin) {
            Some(what) => Ok(Verdict::Infrastructure(what)),
            None => Err(margin),
        }
    }

    /// Asks rung after rung, and gathers what they find; a rung that fails to look ends the case if nothing was found before.
    fn climb(
        &self,
        evidence: &Evidence<'_>,
        findings: &mut Vec<Finding>,
        margin: &mut Margin,
    ) -> Option<String> {
        for rung in &self.rungs {
            match (rung.look)(evidence, margin) {
                Look::Held => {}
                Look::Broken(finding) => findings.push(*finding),
                Look::Failed(what) if findings.is_empty() => return Some(what),
                Look::Failed(_) => {}
            }
            if evidence.depth == Depth::First && !findings.is_empty() {
                break;
            }
        }
        None
    }

    fn too_large(&self, problem: &Problem) -> Option<String> {
        let (elements, most) = (problem.elements(), self.elements_max);
        (elements > most)
            .then(|| format!("the case has {elements} tensor elements; at most {most} are judged"))
    }

    /// The results of two runs in the problem's own layout, or what is wrong with their structure: what is unwritten or of
    /// another shape cannot be looked at further.
    fn whole(
        &self,
        backend: &dyn Backend,
        problem: &Problem,
        runs: [Outputs; 2],
    ) -> Result<[RankOutputs; 2], Verdict> {
        let layouts = (self.layouts)(problem).map_err(|error| {
            Verdict::Infrastructure(format!("the subject ran what cannot be cut: {error}"))
        })?;
        let broken = runs.iter().find_map(|outputs| (self.structure)(backend, problem, &layouts, outputs));
        if let Some(finding) = broken {
            return Err(Verdict::from(finding));
        }
        let [first, second] = runs.map(|outputs| {
            (self.assemble)(problem, &layouts, outputs.ranks).map_err(|finding| Verdict::from(*finding))
        });
        Ok([first?, second?])
    }

    /// The two runs under different poison, or the verdict where there is none to compare.
    fn runs(
        backend: &dyn Backend,
        problem: &Problem,
        inputs: &Inputs,
        meter: &Meter,
    ) -> Result<[Outputs; 2], Verdict> {
        let fills = fills(backend, problem);
        let mut poisoned = meter.inputs(|| poisoned(inputs, problem, fills[0]));
        let first = meter.subject(|| run(backend, problem, &poisoned));
        let first = match (first, expected_refusal(backend, problem)) {
            (Ok(outputs), None) => outputs,
            (Err(RunError::Refused(got)), Some(expected)) if got == expected => {
                return Err(Verdict::Refused(got));
            }
            (result, expected) => return Err(capability_verdict(result, expected)),
        };
        meter.inputs(|| values::poison(&mut poisoned, problem, fills[1]));
        match meter.subject(|| run(backend, problem, &poisoned)) {
            Ok(second) => Ok([first, second]),
            Err(error) => Err(capability_verdict(Err(error), None)),
        }
    }
}

/// Adds up where the time of a case goes.
#[derive(Default)]
struct Meter {
    inputs: Cell<Duration>,
    subject: Cell<Duration>,
    oracle: Cell<Duration>,
}

impl Meter {
    fn time<T>(sum: &Cell<Duration>, work: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let result = work();
        sum.set(sum.get() + start.elapsed());
        result
    }

    fn inputs<T>(&self, work: impl FnOnce() -> T) -> T {
        Meter::time(&self.inputs, work)
    }

    fn subject<T>(&self, work: impl FnOnce() -> T) -> T {
        Meter::time(&self.subject, work)
    }

    fn oracle<T>(&self, work: impl FnOnce() -> T) -> T {
        Meter::time(&self.oracle, work)
    }

    fn cost(&self, all: Duration) -> Cost {
        let (inputs, subject, oracle) = (self.inputs.get(), self.subject.get(), self.oracle.get());
        Cost { inputs, subject, oracle, judge: all.saturating_sub(inputs + subject + oracle) }
    }
}

/// Judges the validation: fields with one planted rule broken must be refused by exactly that rule.
pub fn judge_malformed(malformed: &Malformed) -> Verdict {
    match malformed.check() {
        Ok(()) => Verdict::RefusedMalformed(malformed.rule),
        Err(what) => {
            let what = format!("a problem that breaks the rule {} was {what}", malformed.rule);
            whole_case(Check::Validation, what).into()
        }
    }
}

fn expected_refusal(backend: &dyn Backend, problem: &Problem) -> Option<crate::backend::Refusal> {
    backend.capabilities().refusal(problem)
}

/// Visible pairs × query heads × head dimension: what the oracle's time grows with.
pub(crate) fn products(problem: &Problem) -> u64 {
    let width = (problem.heads.q * problem.dims.qk.max(problem.dims.v)) as u64;
    problem.pairs().saturating_mul(width)
}

/// The two fills that a subject's padding contract allows, the stronger one first.
fn fills(backend: &dyn Backend, problem: &Problem) -> [Poison; 2] {
    match backend.padding().inputs {
        PaddingInputs::Anything => [Poison::strongest(problem), Poison::Large],
        PaddingInputs::Finite => [Poison::Large, Poison::Zero],
    }
}

fn poisoned(inputs: &Inputs, problem: &Problem, poison: Poison) -> Inputs {
    let mut inputs = inputs.clone();
    values::poison(&mut inputs, problem, poison);
    inputs
}

/// Runs the subject; its panic is a crash of the subject, not of the judge.
fn run(backend: &dyn Backend, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
    catch_unwind(AssertUnwindSafe(|| backend.run(problem, inputs))).unwrap_or_else(|payload| {
        let text = payload
            .downcast_ref::<String>()
            .map(String::as_str)
            .or_else(|| payload.downcast_ref::<&str>().copied());
        Err(RunError::Crash(format!("panicked: {}", text.unwrap_or("without a message"))))
    })
}

/// Whatever is not "refused exactly as the table says" and not "ran, as the table says".
fn capability_verdict(
    result: Result<Outputs, RunError>,
    expected: Option<crate::backend::Refusal>,
) -> Verdict {
    let what = match (result, expected) {
        (Err(RunError::Infrastructure(what)), _) => return Verdict::Infrastructure(what),
        (Err(error @ RunError::OutOfMemory(_)), _) => return Verdict::Infrastructure(error.to_string()),
        (Err(RunError::Refused(got)), None) => format!("refused what its table takes: {got}"),
        (Err(RunError::Refused(got)), Some(expected)) => {
            format!("refused because «{got}»; its table says «{expected}»")
        }
        (Err(error), _) => return death(error).into(),
        (Ok(_), Some(expected)) => format!("ran what its table refuses: {expected}"),
        (Ok(_), None) => return Verdict::Infrastructure("a run was judged twice".into()),
    };
    whole_case(Check::Capability, what).into()
}

/// The finding of a run that ended without results, whatever was asked of it.
fn death(error: RunError) -> Finding {
    match error {
        RunError::Crash(what) => whole_case(Check::Crash, what),
        RunError::Sentinel(what) => whole_case(Check::Sentinel, what),
        RunError::Ended(ended) => {
            let finding = whole_case(ended.ending.check(), ended.to_string());
            Finding { ending: Some(ended.ending), before: ended.before, ..finding }
        }
        error => whole_case(Check::Crash, error.to_string()),
    }
}

/// A finding about the case as a whole.
fn whole_case(check: Check, what: String) -> Finding {
    Finding::new(check, None, what)
}

impl From<Finding> for Verdict {
    fn from(finding: Finding) -> Verdict {
        Verdict::Finding(Box::new(finding))
    }
}
