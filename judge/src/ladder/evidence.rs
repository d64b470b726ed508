//! Evidence: one case, its runs, and the parts of the judge that examine them.

use std::borrow::Cow;
use std::cell::{Cell, OnceCell};
use std::rc::Rc;
use std::time::{Duration, Instant};

use seamproof_oracle::envelope::Partition;
use seamproof_oracle::replay::Replay;
use seamproof_oracle::sharding::ShardingError;
use seamproof_oracle::{Inputs, Problem};

use super::bounds::MeasureRatios;
use super::draw::Sampled;
use super::runs::run;
use crate::finding::{Check, Finding, Relation};
use crate::identity::norms::Norms;
use crate::subject::{Backend, Outputs, RankGradients, RankOutputs, RunError};
use crate::verdict::{Cost, Margin};
use seamproof_oracle::sharding::RankLayout;

/// Largest number of elements of all tensors in a case. Inputs, results, exact answer and bounds take about 50 bytes
/// for each.
pub const ELEMENTS_MAX: u64 = 1 << 27;
/// Largest number of visible pairs × query heads × head dimension for which the oracle computes every row: about ten
/// minutes on two cores.
pub const PRODUCTS_MAX: u64 = 1 << 41;

/// Evidence that a rung examines: a case, its runs, and the judge's own map of its rows.
pub struct Evidence<'a> {
    /// Subject of the case. A rung that runs it again does so through [`Evidence::run`].
    pub backend: &'a dyn Backend,
    /// Problem of the case.
    pub problem: &'a Problem,
    /// Layout of the problem, in which the results are.
    pub layout: &'a RankLayout,
    /// Inputs, with padding rows of zero.
    pub inputs: &'a Inputs,
    /// Results under the first poison, assembled from the ranks.
    pub first: &'a RankOutputs,
    /// Results under the second poison, assembled from the ranks; those of the first once more where there was one run.
    pub second: &'a RankOutputs,
    /// Judge that asks.
    pub judge: &'a Judge,
    /// Depth to which the case goes down the ladder.
    pub depth: Depth,
    /// Meter that adds up the case's time.
    pub meter: &'a Meter,
    /// Answers that several rungs ask for.
    pub told: &'a Told,
}

/// Answers that several rungs need of a case: how the subject cuts its sums, and the norms of its inputs.
#[derive(Default)]
pub struct Told {
    partition: OnceCell<Partition>,
    pub(crate) norms: OnceCell<Rc<Norms>>,
    /// Whether a second problem of the identity in question lay outside the subject's table.
    pub(crate) outside: Cell<bool>,
}

impl Evidence<'_> {
    /// Runs the subject on another problem, or on other inputs. The time counts as the subject's.
    pub fn run(&self, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
        self.meter.subject(|| run(self.backend, problem, inputs))
    }

    /// Returns how the subject cuts the sums of the case's problem. The time counts as the subject's.
    pub fn partition(&self) -> Partition {
        *self.told.partition.get_or_init(|| self.partition_of(self.problem))
    }

    /// Returns how the subject cuts the sums of another problem. The time counts as the subject's.
    pub fn partition_of(&self, problem: &Problem) -> Partition {
        self.meter.subject(|| self.backend.partition(problem))
    }

    /// Returns what tier R replays. The time in which the subject tells its launches counts as the subject's.
    pub fn replay(&self) -> Option<Replay> {
        self.meter.subject(|| self.backend.replay(self.problem))
    }

    /// Whether the oracle computes every row of the case. Where it does not, it computes some rows, and every
    /// identity is asked.
    pub fn has_oracle(&self) -> bool {
        products(self.problem) <= self.judge.products_max
    }

    /// Returns how the rows of the case lie on its ranks; nothing where they cannot be dealt.
    pub(crate) fn ranks(&self) -> Cow<'_, [RankLayout]> {
        match &self.judge.placed {
            Some(placed) => placed.into(),
            None => (self.judge.layouts)(self.problem).unwrap_or_default().into(),
        }
    }

    /// Returns the runs whose gradients are examined: one, or both where the subject may sum gradients in another
    /// order in each run. Their bits then say nothing.
    pub(crate) fn gradient_runs(&self) -> Vec<&RankGradients> {
        let both = [self.first, self.second];
        let is_one = std::ptr::eq(self.first, self.second)
            || self.backend.declaration().promises.deterministic_backward;
        let runs = if is_one { &both[..1] } else { &both[..] };
        runs.iter().filter_map(|run| run.gradients.as_ref()).collect()
    }

    /// Makes inputs. The time counts as that of the inputs.
    pub(crate) fn making<T>(&self, make: impl FnOnce() -> T) -> T {
        self.meter.inputs(make)
    }

    /// Asks the oracle. The time counts as the oracle's.
    pub fn oracle<T>(&self, ask: impl FnOnce() -> T) -> T {
        self.meter.oracle(ask)
    }
}

/// Answer of a rung.
pub enum Look {
    /// The check holds, or the rung has nothing to say about this case.
    Held,
    /// The check is broken.
    Broken(Box<Finding>),
    /// The rung could not look, which is a fault of the harness.
    Failed(String),
}

impl From<Option<Finding>> for Look {
    fn from(finding: Option<Finding>) -> Look {
        finding.map_or(Look::Held, |finding| Look::Broken(Box::new(finding)))
    }
}

/// A rung: a check, and the function that makes it. The envelope writes the margin's ratios, the identities those that
/// were not asked.
#[derive(Clone, Copy)]
pub struct Rung {
    /// Check that the rung makes.
    pub check: Check,
    /// Function that examines the evidence.
    pub look: fn(&Evidence<'_>, &mut Margin) -> Look,
}

/// Function that makes one set of results, in the problem's own layout, from those of the ranks.
pub type Assemble = fn(&Problem, &[RankLayout], Vec<RankOutputs>) -> Result<RankOutputs, Box<Finding>>;

/// The judge, as data. Its parts can be examined one by one, and exchanged for wrong ones to see whether that is
/// noticed.
#[derive(Clone)]
pub struct Judge {
    /// Function that returns which rank owns which row.
    pub layouts: fn(&Problem) -> Result<Vec<RankLayout>, ShardingError>,
    /// Function that returns the first structural fault of a run.
    pub structure: fn(&dyn Backend, &Problem, &[RankLayout], &Outputs) -> Option<Finding>,
    /// Function that brings the ranks' results into the problem's own layout.
    pub assemble: Assemble,
    /// Function that computes error ÷ bound.
    pub ratio: MeasureRatios,
    /// Largest number of visible products for which the oracle computes every row.
    pub products_max: u64,
    /// Layouts of the ranks of a run that is over; `None` for those of [`Judge::layouts`].
    pub placed: Option<Vec<RankLayout>>,
    /// Rows to examine where the oracle does not compute every row; `None` for a draw by the problem's data seed.
    pub sampled: Option<Sampled>,
    /// Largest number of elements for which a case is judged, or the subject run once more.
    pub elements_max: u64,
    /// Identities that may be asked.
    pub identities: Vec<Relation>,
    /// Rungs that examine the assembled results, in order.
    pub rungs: Vec<Rung>,
}

/// Depth to which a case goes down the ladder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Depth {
    /// Down to the first rung that breaks, as in a campaign.
    First,
    /// Down to the last rung, whatever broke before, as in scoring.
    All,
}

/// Meter of the time that the parts of a case take.
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

/// Returns visible pairs × query heads × head dimension, the number with which the oracle's time grows.
pub fn products(problem: &Problem) -> u64 {
    let width = (problem.heads.q * problem.dims.qk.max(problem.dims.v)) as u64;
    problem.pairs().saturating_mul(width)
}
