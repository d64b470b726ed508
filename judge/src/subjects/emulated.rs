//! The emulated kernel as a subject: it runs the schedule of a problem's own algorithm on the CPU device, with all
//! ranks in one process.

use std::collections::BTreeMap;
use std::rc::Rc;

use seamproof_oracle::envelope::{Accumulation, Partition};
use seamproof_oracle::replay::ReplayedLaunch;
use seamproof_oracle::sharding::ShardingError;
use seamproof_oracle::{Format, Inputs, Problem, Scaling, TensorName};
use seamproof_simulator::device::Cpu;
use seamproof_simulator::emulated::{Right, Tiles, Units, Variant};
use seamproof_simulator::schedule::{BuildError, MergeOrder, Schedule};

use super::built::built;
use super::on_device;
use super::options::OptionError;
use crate::subject::{
    Backend, Declaration, Outputs, PaddingContract, PaddingInputs, PaddingOutputs, ParallelRule, Promises,
    Refusal, RunError, START_SECONDS, Table,
};

/// Tile sizes that a campaign draws from: the smallest, unequal ones, and fractions of real kernels' sizes.
const TILE_SIZES: [usize; 6] = [1, 2, 4, 8, 16, 64];
/// Number of orders of ranks and streams that a campaign draws from.
const ORDERS: u64 = 1_000;
/// Largest tile that an option may ask for.
const TILE_MAX: usize = 1 << 12;

/// The emulated kernel with its options.
#[derive(Clone, Copy, Debug)]
pub struct Emulated {
    /// Tile sizes of the kernel.
    pub tiles: Tiles,
    /// Seed of the order in which ranks and streams proceed. With f32 arithmetic, no order may change a bit.
    pub order: u64,
    /// Time at which a ring merges its steps.
    pub merge: MergeOrder,
    /// Units that the kernel computes on.
    pub arithmetic: Arithmetic,
}

/// Units that the emulated kernel computes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arithmetic {
    /// Serial f32.
    F32,
    /// Hopper's tensor cores. [`Emulated::order`] also draws the order of dq's tiles.
    Hopper,
}

impl Arithmetic {
    fn by_name(name: &str) -> Option<Arithmetic> {
        match name {
            "f32" => Some(Arithmetic::F32),
            "hopper" => Some(Arithmetic::Hopper),
            _ => None,
        }
    }
}

impl Default for Emulated {
    fn default() -> Emulated {
        Emulated {
            tiles: Tiles { q: 4, kv: 4 },
            order: 0,
            merge: MergeOrder::Running,
            arithmetic: Arithmetic::F32,
        }
    }
}

/// Returns the values that an option takes, in words.
fn expected(option: &str) -> &'static str {
    match option {
        "order" => "a whole number",
        "merge" => "running or deferred",
        "arithmetic" => "f32 or hopper",
        _ => "a whole number from 1 to 4096",
    }
}

/// Returns options for one case of a campaign.
pub fn draw_options(seed: u64) -> BTreeMap<String, String> {
    let size = |draw: u64| TILE_SIZES[(draw % TILE_SIZES.len() as u64) as usize].to_string();
    let draw = crate::hash::mix(seed);
    // The model of the tensor core is slow, so one case in 16 uses it.
    let hopper = crate::hash::mix(draw ^ 1).is_multiple_of(16);
    BTreeMap::from([
        ("arithmetic".into(), if hopper { "hopper" } else { "f32" }.into()),
        ("q_tile".into(), size(draw)),
        ("kv_tile".into(), size(draw >> 32)),
        ("order".into(), (crate::hash::mix(draw) % ORDERS).to_string()),
        ("merge".into(), MergeOrder::ALL[(draw >> 63) as usize].name().into()),
    ])
}

impl Emulated {
    /// Returns the kernel with the options `q_tile` and `kv_tile` (each 1 to 4096), `order`, `merge` (`running` or
    /// `deferred`) and `arithmetic` (`f32` or `hopper`). The defaults are 4, 4, 0, `running` and `f32`.
    pub fn from_options(options: &BTreeMap<String, String>) -> Result<Emulated, OptionError> {
        let mut backend = Emulated::default();
        for (option, value) in options {
            let tile = || value.parse().ok().filter(|size| (1..=TILE_MAX).contains(size));
            let taken = match option.as_str() {
                "q_tile" => tile().map(|size| backend.tiles.q = size),
                "kv_tile" => tile().map(|size| backend.tiles.kv = size),
                "order" => value.parse().ok().map(|order| backend.order = order),
                "merge" => MergeOrder::by_name(value).map(|order| backend.merge = order),
                "arithmetic" => Arithmetic::by_name(value).map(|units| backend.arithmetic = units),
                _ => {
                    let (option, known) = (option.clone(), "q_tile, kv_tile, order, merge, arithmetic");
                    return Err(OptionError::Unknown { backend: "emulated", option, known });
                }
            };
            taken.ok_or_else(|| OptionError::Value {
                backend: "emulated",
                option: option.clone(),
                value: value.clone(),
                expected: expected(option),
            })?;
        }
        Ok(backend)
    }

    /// Returns the device of a problem, with the right kernel.
    pub fn device(&self, problem: &Problem) -> Cpu<f32> {
        let (p, ds) = (problem.precision.p.format, problem.precision.ds.format);
        Cpu::with(self.units().kernel(self.tiles, p, ds, &Right))
    }

    /// Returns the device of a problem, with another kernel.
    pub fn variant(&self, problem: &Problem, kernel: &'static dyn Variant) -> Cpu<f32> {
        let (p, ds) = (problem.precision.p.format, problem.precision.ds.format);
        Cpu::with(self.units().kernel(self.tiles, p, ds, kernel))
    }

    fn units(&self) -> Units {
        match self.arithmetic {
            Arithmetic::F32 => Units::F32,
            Arithmetic::Hopper => Units::Hopper(self.order),
        }
    }

    /// Runs a schedule in an order of ranks and streams drawn from the backend's seed.
    pub fn run_schedule(
        &self,
        problem: &Problem,
        inputs: &Inputs,
        schedule: &Schedule,
        device: &Cpu<f32>,
    ) -> Result<Outputs, RunError> {
        on_device::run_schedule(device, problem, inputs, schedule, self.order, &mut |_| {})
    }
}

/// Refuses the problems that the launcher itself cannot run. It is written without the table on purpose: the judge
/// compares the two, and thus finds a table that promises too much or too little.
fn check_launch(problem: &Problem) -> Result<(), Refusal> {
    let io = problem.precision.q.format;
    for (quantity, element) in problem.precision.elements() {
        let format = element.format;
        let runs = matches!(format, Format::Bf16 | Format::Fp16) && format == io
            || quantity == "p" && format == Format::F32;
        if !runs || element.scaling != Scaling::None {
            return Err(Refusal::Precision { quantity, element });
        }
    }
    Ok(())
}

/// Returns the schedule of a problem, or the builder's refusal as a row of the table.
pub fn launchable(problem: &Problem, order: MergeOrder) -> Result<Rc<Schedule>, RunError> {
    check_launch(problem)?;
    built(problem, order).map_err(|error| RunError::Refused(Refusal::Parallel(rule(&error))))
}

/// Returns the rule that a builder's refusal stands for.
fn rule(error: &BuildError) -> ParallelRule {
    match error {
        BuildError::Shard(ShardingError::Span { .. }) => ParallelRule::SpanMultiple,
        BuildError::Shard(ShardingError::Strided { .. }) => ParallelRule::ConsecutiveRows,
        BuildError::QueryHeads { .. } => ParallelRule::QueryHeads,
        BuildError::KvHeads { .. } => ParallelRule::KvHeads,
        BuildError::RingStripe { .. } => ParallelRule::RingStripe,
        BuildError::HierarchicalBalance => ParallelRule::HierarchicalBalance,
    }
}

impl Backend for Emulated {
    fn name(&self) -> &str {
        "emulated"
    }

    fn declaration(&self) -> Declaration {
        let (promises, accumulation) = match self.arithmetic {
            Arithmetic::F32 => (Promises::ALL, Accumulation::F32Serial),
            // The order of dq's tiles is drawn from the head and the tile of queries.
            Arithmetic::Hopper => (
                Promises { heads_alone: false, rows_alone: false, ..Promises::ALL },
                Accumulation::WgmmaTruncating,
            ),
        };
        Declaration {
            table: Table { statistics: vec![TensorName::Lse, TensorName::MaxLogit], ..Table::widest() },
            padding: PaddingContract { inputs: PaddingInputs::Anything, outputs: PaddingOutputs::Zero },
            promises,
            accumulation,
            refuses: true,
            start_seconds: START_SECONDS,
        }
    }

    fn partition(&self, problem: &Problem) -> Partition {
        let single = Partition::single(self.tiles.q, self.tiles.kv);
        built(problem, self.merge).map_or(single, |schedule| schedule.partition(self.tiles))
    }

    fn schedule(&self, problem: &Problem) -> Result<Schedule, BuildError> {
        built(problem, self.merge).map(|schedule| (*schedule).clone())
    }

    fn launches(&self, problem: &Problem) -> Option<Vec<ReplayedLaunch>> {
        let forward = problem.forward();
        built(&forward, self.merge).ok()?.launches(&forward)
    }

    fn run(&self, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
        let schedule = launchable(problem, self.merge)?;
        self.run_schedule(problem, inputs, &schedule, &self.device(problem))
    }
}
