//! The emulated kernel as a subject: it runs the schedule of a problem's own algorithm on the CPU device, with all
//! ranks in one process.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::rc::Rc;

use super::{World, in_steps};
use seamproof_oracle::envelope::{
    self, Accumulation, Delta, DsWeights, GroupSums, Partition, SoftCap, WeightRounding,
};
use seamproof_oracle::replay::ReplayedLaunch;
use seamproof_oracle::segments::SegmentsError;
use seamproof_oracle::sharding::ShardingError;
use seamproof_oracle::{
    Element, Form, Format, Given, Inputs, LseLayout, LseOrder, Problem, ProblemFields, Scaling, TensorName,
};
use seamproof_simulator::device::Cpu;
use seamproof_simulator::emulated::{Roundings, Tiles, Units, Variant};
use seamproof_simulator::is_unwritten;
use seamproof_simulator::schedule::{BuildError, MergeOrder, Schedule};

use serde::de::DeserializeOwned;

use super::built::built;
use super::on_device;
use super::options::OptionError;
use crate::subject::{
    Backend, Declaration, Outputs, PaddingContract, PaddingInputs, PaddingOutputs, ParallelRule, Partials,
    Promises, Refusal, RunError, START_SECONDS, Table, lse,
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
    /// Time and formula with which a ring merges its steps.
    pub merge: MergeOrder,
    /// Units that the kernel computes on.
    pub arithmetic: Arithmetic,
    /// Order of rounding weights and normalising them.
    pub weights: WeightRounding,
    /// Source of D.
    pub delta: Delta,
    /// Format of the gradients of one query head of a group.
    pub group_sums: GroupSums,
    /// Accuracy of the soft cap.
    pub soft_cap: SoftCap,
    /// Weights that dS is made of.
    pub ds_weights: DsWeights,
    /// Format of out and of the gradients.
    pub results: Results,
    /// Whether the kernel declares its arithmetic. If not, everything about it is unknown.
    pub declares: bool,
    /// Manner in which ranks run.
    pub ranks: Ranks,
    /// Layout in which the LSE is returned.
    pub lse: LseLayout,
}

/// Manner in which the ranks of a schedule run. No bit depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ranks {
    /// One thread goes through the operations of all ranks.
    InTurn,
    /// Each rank has a thread of the host, and memory and streams of its own.
    Threads,
}

/// Format of out and of the gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Results {
    /// Format of the inputs.
    Inputs,
    /// f32.
    F32,
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
            weights: WeightRounding::BeforeNormalisation,
            delta: Delta::StoredOut,
            group_sums: GroupSums::F32,
            soft_cap: SoftCap::Accurate,
            ds_weights: DsWeights::Unrounded,
            results: Results::Inputs,
            declares: true,
            ranks: Ranks::InTurn,
            lse: LseLayout::default(),
        }
    }
}

/// Returns the choice of a kernel by its name in a declaration. A kernel has a choice, so `unknown` is none.
fn choice<T: DeserializeOwned + Default + PartialEq>(name: &str) -> Option<T> {
    serde_json::from_value(name.into()).ok().filter(|choice| *choice != T::default())
}

impl Ranks {
    /// Every manner.
    pub const ALL: [Ranks; 2] = [Ranks::InTurn, Ranks::Threads];

    /// Returns the name, as options have it.
    pub fn name(self) -> &'static str {
        match self {
            Ranks::InTurn => "in-turn",
            Ranks::Threads => "threads",
        }
    }

    /// Returns the manner of a name; `None` for a name that is none.
    pub fn by_name(name: &str) -> Option<Ranks> {
        Ranks::ALL.into_iter().find(|ranks| ranks.name() == name)
    }
}

/// Returns the values that an option takes, in words.
fn expected(option: &str) -> &'static str {
    match option {
        "order" => "a whole number",
        "merge" => "running, deferred or difference",
        "arithmetic" => "f32 or hopper",
        "weights" => "before-normalisation or after-normalisation",
        "delta" => "stored-out, weighted-dots or unrounded-out",
        "group_sums" => "f32 or stored",
        "soft_cap" => "accurate or approximate",
        "ds_weights" => "unrounded or rounded",
        "results" => "inputs or f32",
        "declares" => "all or nothing",
        "ranks" => "in-turn or threads",
        "lse" => "rows, padded-rows or padded-batch",
        _ => "a whole number from 1 to 4096",
    }
}

/// Options that the kernel has.
const KNOWN: &str = "q_tile, kv_tile, order, merge, arithmetic, weights, delta, group_sums, soft_cap, ds_weights, results, declares, ranks, lse";

/// Layouts of the LSE by the names that options have for them.
const LSE_LAYOUTS: [(&str, LseLayout); 3] = [
    ("rows", LseLayout { order: LseOrder::HeadsRows, multiple: 1 }),
    ("padded-rows", LseLayout { order: LseOrder::HeadsRows, multiple: 128 }),
    ("padded-batch", LseLayout { order: LseOrder::Batch, multiple: 128 }),
];

fn one_of<T: Copy, const N: usize>(name: &str, of: [(&str, T); N]) -> Option<T> {
    of.into_iter().find(|(known, _)| *known == name).map(|(_, value)| value)
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
        ("merge".into(), MergeOrder::WEIGHTED[(draw >> 63) as usize].name().into()),
    ])
}

impl Emulated {
    /// Returns the kernel with the options `q_tile` and `kv_tile` (each 1 to 4096), `order`, `merge` (`running`,
    /// `deferred` or `difference`) and `arithmetic` (`f32` or `hopper`). The defaults are 4, 4, 0, `running` and `f32`.
    ///
    /// Further options are `weights` (`before-normalisation`, or `after-normalisation`), `delta` (`stored-out`,
    /// `weighted-dots` or `unrounded-out`), `group_sums` (`f32` or `stored`), `soft_cap` (`accurate` or `approximate`),
    /// `ds_weights` (`unrounded` or `rounded`), `results` (`inputs` or `f32`: the format of out and gradients),
    /// `declares` (`all`, or `nothing` of its arithmetic), `ranks` (`in-turn` or `threads`) and `lse` (`rows`,
    /// `padded-rows` or `padded-batch`, with rows padded to a multiple of 128). The first of each is the default.
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
                "weights" => choice(value).map(|weights| backend.weights = weights),
                "delta" => choice(value).map(|delta| backend.delta = delta),
                "group_sums" => choice(value).map(|sums| backend.group_sums = sums),
                "soft_cap" => choice(value).map(|cap| backend.soft_cap = cap),
                "ds_weights" => choice(value).map(|weights| backend.ds_weights = weights),
                "results" => one_of(value, [("inputs", Results::Inputs), ("f32", Results::F32)])
                    .map(|results| backend.results = results),
                "declares" => one_of(value, [("all", true), ("nothing", false)])
                    .map(|declares| backend.declares = declares),
                "lse" => one_of(value, LSE_LAYOUTS).map(|lse| backend.lse = lse),
                "ranks" => Ranks::by_name(value).map(|ranks| backend.ranks = ranks),
                _ => {
                    let (option, known) = (option.clone(), KNOWN);
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
        Cpu::with(self.units().right(self.tiles, self.roundings(problem)))
    }

    /// Returns the device of a problem, with another kernel.
    pub fn variant(&self, problem: &Problem, kernel: &'static dyn Variant) -> Cpu<f32> {
        Cpu::with(self.units().variant(self.tiles, self.roundings(problem), kernel))
    }

    fn roundings(&self, problem: &Problem) -> Roundings {
        let (p, ds) = (problem.precision.p.format, problem.precision.ds.format);
        Roundings {
            normalises_first: self.weights == WeightRounding::AfterNormalisation,
            weighs_dots: self.delta == Delta::WeightedDots,
            stored_heads: (self.group_sums == GroupSums::Stored)
                .then_some(problem.precision.gradients.format),
            coarse_cap: self.soft_cap == SoftCap::Approximate,
            rounds_ds_weights: self.ds_weights == DsWeights::Rounded,
            ..Roundings::new(p, ds)
        }
    }

    /// Returns the problem that the schedule is built for. A kernel that takes D from an unrounded out keeps it in f32
    /// up to the end.
    fn scheduled<'a>(&self, problem: &'a Problem) -> Cow<'a, Problem> {
        if self.delta != Delta::UnroundedOut {
            return Cow::Borrowed(problem);
        }
        let mut fields = ProblemFields::from(problem.clone());
        fields.precision.out = Element::from(Format::F32);
        Problem::new(fields).map_or(Cow::Borrowed(problem), Cow::Owned)
    }

    /// Returns the schedule of a problem, or the refusal as a row of the table.
    pub fn launchable(&self, problem: &Problem) -> Result<Rc<Schedule>, RunError> {
        check_launch(problem, self.results)?;
        if self.delta == Delta::WeightedDots && !WHOLE_ROWS.contains(&problem.parallel.algorithm.name()) {
            return Err(RunError::Refused(Refusal::Algorithm(problem.parallel.algorithm.name())));
        }
        scheduled(&self.scheduled(problem), self.merge)
    }

    fn units(&self) -> Units {
        match self.arithmetic {
            Arithmetic::F32 => Units::F32,
            Arithmetic::Hopper => Units::Hopper(self.order),
        }
    }

    /// Runs a world's schedules in an order of ranks and streams drawn from the backend's seed.
    pub fn run_world(
        &self,
        problem: &Problem,
        inputs: &Inputs,
        world: &World,
        device: &Cpu<f32>,
    ) -> Result<Outputs, RunError> {
        let scheduled = self.scheduled(problem);
        let mut outputs = match self.ranks {
            Ranks::InTurn => {
                on_device::run_world(device, &scheduled, inputs, world, self.order, &mut |_| {})?
            }
            Ranks::Threads => {
                on_device::run_on_threads(device, &scheduled, inputs, world, self.order, &mut |_| {})?
            }
        };
        if self.delta == Delta::UnroundedOut {
            let format = problem.precision.out.format;
            let round = |out: &mut f32| {
                if !is_unwritten(*out) {
                    *out = format.round_f32(*out);
                }
            };
            outputs.ranks.iter_mut().for_each(|rank| rank.out.iter_mut().for_each(round));
        }
        Ok(outputs)
    }
}

/// Algorithms whose backward launches see all keys of their rows, which `Σ P·dP` needs.
const WHOLE_ROWS: [&str; 2] = ["single", "all-to-all"];

/// Refuses the problems that the launcher itself cannot run. It is written without the table on purpose: the judge
/// compares the two, and thus finds a table that promises too much or too little.
fn check_launch(problem: &Problem, results: Results) -> Result<(), Refusal> {
    let io = problem.precision.q.format;
    let result = if results == Results::F32 { Format::F32 } else { io };
    for (quantity, element) in problem.precision.elements() {
        let format = element.format;
        let runs = match quantity {
            "p" => format == io || format == Format::F32,
            "out" | "gradients" => format == result,
            _ => matches!(format, Format::Bf16 | Format::Fp16) && format == io,
        };
        if !runs || element.scaling != Scaling::None {
            return Err(Refusal::Precision { quantity, element });
        }
    }
    Ok(())
}

/// Returns the schedule of a problem whose tensors are all in one format, or the refusal as a row of the table.
pub fn launchable(problem: &Problem, order: MergeOrder) -> Result<Rc<Schedule>, RunError> {
    check_launch(problem, Results::Inputs)?;
    scheduled(problem, order)
}

/// Returns the schedule of a problem, or the builder's refusal as a row of the table.
pub(super) fn scheduled(problem: &Problem, order: MergeOrder) -> Result<Rc<Schedule>, RunError> {
    built(problem, order).map_err(|error| match rule(&error) {
        Some(rule) => RunError::Refused(Refusal::Parallel(rule)),
        None => RunError::Infrastructure(error.to_string()),
    })
}

/// Returns the rule that a builder's refusal stands for; none where a problem is too large for any subject.
fn rule(error: &BuildError) -> Option<ParallelRule> {
    match error {
        BuildError::Shard(ShardingError::Span { .. }) => Some(ParallelRule::SpanMultiple),
        BuildError::Shard(ShardingError::Strided { .. }) => Some(ParallelRule::ConsecutiveRows),
        BuildError::QueryHeads { .. } => Some(ParallelRule::QueryHeads),
        BuildError::KvHeads { .. } => Some(ParallelRule::KvHeads),
        BuildError::TooLarge { .. } => None,
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
        let arithmetic = envelope::Arithmetic {
            accumulation,
            weights: self.weights,
            delta: self.delta,
            group_sums: self.group_sums,
            soft_cap: self.soft_cap,
            ds_weights: self.ds_weights,
            ..envelope::Arithmetic::flash_attention(accumulation)
        };
        let statistics = vec![TensorName::Lse, TensorName::MaxLogit];
        let mut table = Table { statistics, lse: self.lse, ..Table::widest() };
        if self.delta == Delta::WeightedDots {
            table.parallel.algorithms = WHOLE_ROWS.to_vec();
        }
        if self.results == Results::F32 {
            for precision in &mut table.precisions {
                (precision.out, precision.gradients) = (Format::F32.into(), Format::F32.into());
            }
        }
        Declaration {
            table,
            padding: PaddingContract { inputs: PaddingInputs::Anything, outputs: PaddingOutputs::Zero },
            promises,
            arithmetic: if self.declares { arithmetic } else { envelope::Arithmetic::default() },
            partials: Partials::default(),
            refuses: true,
            start_seconds: START_SECONDS,
        }
    }

    fn partition(&self, problem: &Problem) -> Partition {
        let single = Partition::single(self.tiles.q, self.tiles.kv);
        built(&self.scheduled(problem), self.merge).map_or(single, |schedule| schedule.partition(self.tiles))
    }

    fn schedule(&self, problem: &Problem) -> Result<Schedule, BuildError> {
        built(&self.scheduled(problem), self.merge).map(|schedule| (*schedule).clone())
    }

    fn promises(&self, problem: &Problem) -> Promises {
        self.declaration().promises.of_schedule(problem)
    }

    fn launches(&self, problem: &Problem) -> Option<Vec<ReplayedLaunch>> {
        let forward = self.scheduled(problem).forward();
        built(&forward, self.merge).ok()?.launches(&forward, None)
    }

    fn run(&self, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
        if !self.lse.is_plain() {
            let plain = Emulated { lse: LseLayout::default(), ..*self }.run(problem, inputs)?;
            return lse::in_layout(self.lse, problem, plain);
        }
        if !problem.steps.is_empty() {
            return in_steps(self, problem, inputs);
        }
        let problem = &*read(problem)?;
        let world = World::new(problem, |problem| self.launchable(problem))?;
        self.run_world(problem, inputs, &world, &self.device(problem))
    }
}

/// Returns the problem as it is read from the form in which it is given. What does not go together is refused by the
/// reader itself, whatever the table says.
pub(super) fn read(problem: &Problem) -> Result<Cow<'_, Problem>, RunError> {
    let Some(given) = Given::of(problem) else { return Ok(Cow::Borrowed(problem)) };
    let sequences = given.sequences(problem.rows).map_err(|error| match error {
        SegmentsError::Leading { .. } | SegmentsError::Lengths { .. } => {
            RunError::Refused(Refusal::Form(problem.form))
        }
        error => RunError::Crash(error.to_string()),
    })?;
    // Faults of what is dealt to ranks go by the form.
    let form = if matches!(given, Given::Dealt { .. }) { problem.form } else { Form::CuSeqlens };
    let fields = ProblemFields { sequences, form, ..problem.clone().into() };
    Problem::new(fields).map(Cow::Owned).map_err(|error| RunError::Crash(error.to_string()))
}
