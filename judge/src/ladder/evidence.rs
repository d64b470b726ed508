//! Evidence: one case, its runs, and the parts of the judge that look at them.

use std::cell::{Cell, OnceCell};
use std::rc::Rc;
use std::time::{Duration, Instant};

use seamproof_oracle::envelope::Partition;
use seamproof_oracle::replay::Replay;
use seamproof_oracle::sharding::ShardError;
use seamproof_oracle::{Format, Inputs, Problem};

use super::runs::run;
use crate::finding::{Check, Finding, Relation};
use crate::identity::norms::Norms;
use crate::subject::{Backend, Outputs, RankGradients, RankOutputs, RunError};
use crate::verdict::{Cost, Margin};
use seamproof_oracle::sharding::RankLayout;

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
    /// Where its time is added up.
    pub meter: &'a Meter,
    /// Answers that several rungs ask for.
    pub told: &'a Told,
}

/// What several rungs need of a case: how the subject cuts its sums, and the norms of its inputs.
#[derive(Default)]
pub struct Told {
    partition: OnceCell<Partition>,
    pub(crate) norms: OnceCell<Rc<Norms>>,
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
    pub(crate) fn gradient_runs(&self) -> Vec<&RankGradients> {
        let both = [self.first, self.second];
        let runs =
            if self.backend.declaration().promises.deterministic_backward { &both[..1] } else { &both[..] };
        runs.iter().filter_map(|run| run.gradients.as_ref()).collect()
    }

    /// Makes inputs; the time counts as theirs.
    pub(crate) fn making<T>(&self, make: impl FnOnce() -> T) -> T {
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

/// How far down the ladder a case goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Depth {
    /// To the first rung that breaks: a campaign.
    First,
    /// All rungs, whatever broke before: scoring.
    All,
}

/// Adds up where the time of a case goes.
#[derive(Default)]
pub struct Meter {
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

    pub(super) fn inputs<T>(&self, work: impl FnOnce() -> T) -> T {
        Meter::time(&self.inputs, work)
    }

    pub(super) fn subject<T>(&self, work: impl FnOnce() -> T) -> T {
        Meter::time(&self.subject, work)
    }

    pub(super) fn oracle<T>(&self, work: impl FnOnce() -> T) -> T {
        Meter::time(&self.oracle, work)
    }

    pub(super) fn cost(&self, all: Duration) -> Cost {
        let (inputs, subject, oracle) = (self.inputs.get(), self.subject.get(), self.oracle.get());
        Cost { inputs, subject, oracle, judge: all.saturating_sub(inputs + subject + oracle) }
    }
}

/// Visible pairs × query heads × head dimension: what the oracle's time grows with.
pub fn products(problem: &Problem) -> u64 {
    let width = (problem.heads.q * problem.dims.qk.max(problem.dims.v)) as u64;
    problem.pairs().saturating_mul(width)
}
