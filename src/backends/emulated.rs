//! The emulated kernel as a subject: the schedule of a problem's own algorithm, run on the CPU device with all ranks in
//! one process.

use std::collections::BTreeMap;

use ndarray::Array1;
use seamproof_oracle::envelope::{Accumulation, Partition};
use seamproof_oracle::limits::HEAD_DIM_MAX;
use seamproof_oracle::replay::Launch;
use seamproof_oracle::{Format, Inputs, Pass, Problem, ProblemFields, Scaling, Sink, TensorName};
use seamproof_simulator::Tensor;
use seamproof_simulator::device::{Buffers, Cpu};
use seamproof_simulator::emulated::{Right, Tiles, Units, Variant};
use seamproof_simulator::executor::{ExecuteError, Phase, execute, load, output};
use seamproof_simulator::schedule::{BuildError, MergeOrder, Schedule, build_with};
use seamproof_simulator::shard::ShardError;

use super::BackendError;
use crate::backend::{
    ALGORITHMS, Backend, Capabilities, Outputs, PaddingContract, PaddingInputs, PaddingOutputs, ParallelRule,
    Promises, RankGradients, RankOutputs, Refusal, RunError,
};
use crate::values;

/// Tile sizes that a campaign draws from: the smallest, unequal ones, and sizes of real kernels' fractions.
const TILE_SIZES: [usize; 6] = [1, 2, 4, 8, 16, 64];
/// Orders of ranks and streams that a campaign draws from.
const ORDERS: u64 = 1_000;
/// Largest tile that an option may ask for.
const TILE_MAX: usize = 1 << 12;

/// The emulated kernel with its tile sizes.
#[derive(Clone, Copy, Debug)]
pub struct Emulated {
    /// Tile sizes.
    pub tiles: Tiles,
    /// Draws the order in which ranks and streams go on; no order may change a bit.
    pub order: u64,
    /// When a ring merges its steps.
    pub merge: MergeOrder,
    /// What the kernel computes on.
    pub arithmetic: Arithmetic,
}

/// What the emulated kernel computes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arithmetic {
    /// Serial f32.
    F32,
    /// Hopper's tensor cores; [`Emulated::order`] draws the order of dq's tiles too.
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

/// What an option takes.
fn expected(option: &str) -> &'static str {
    match option {
        "order" => "a whole number",
        "merge" => "running or deferred",
        "arithmetic" => "f32 or hopper",
        _ => "a whole number from 1 to 4096",
    }
}

/// Options for one case of a campaign.
pub(super) fn draw_options(seed: u64) -> BTreeMap<String, String> {
    let size = |draw: u64| TILE_SIZES[(draw % TILE_SIZES.len() as u64) as usize].to_string();
    let draw = values::mix(seed);
    // The tensor core's model is slow: a case in eight.
    let hopper = values::mix(draw ^ 1).is_multiple_of(16);
    BTreeMap::from([
        ("arithmetic".into(), if hopper { "hopper" } else { "f32" }.into()),
        ("q_tile".into(), size(draw)),
        ("kv_tile".into(), size(draw >> 32)),
        ("order".into(), (values::mix(draw) % ORDERS).to_string()),
        ("merge".into(), MergeOrder::ALL[(draw >> 63) as usize].name().into()),
    ])
}

impl Emulated {
    /// From `q_tile` and `kv_tile`, each 1 to 4096, `order`, `merge` (`running` or `deferred`) and `arithmetic` (`f32` or
    /// `hopper`); 4, 4, 0, `running` and `f32` where absent.
    pub(super) fn from_options(options: &BTreeMap<String, String>) -> Result<Emulated, BackendError> {
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
                    return Err(BackendError::UnknownOption { backend: "emulated", option, known });
                }
            };
            taken.ok_or_else(|| BackendError::OptionValue {
                backend: "emulated",
                option: option.clone(),
                value: value.clone(),
                expected: expected(option),
            })?;
        }
        Ok(backend)
    }

    /// The device of a problem with the right kernel.
    pub(super) fn device(&self, problem: &Problem) -> Cpu<f32> {
        let (p, ds) = (problem.precision.p.format, problem.precision.ds.format);
        Cpu::with(self.units().kernel(self.tiles, p, ds, &Right))
    }

    /// The device of a problem with another kernel.
    pub(super) fn variant(&self, problem: &Problem, kernel: &'static dyn Variant) -> Cpu<f32> {
        let (p, ds) = (problem.precision.p.format, problem.precision.ds.format);
        Cpu::with(self.units().kernel(self.tiles, p, ds, kernel))
    }

    fn units(&self) -> Units {
        match self.arithmetic {
            Arithmetic::F32 => Units::F32,
            Arithmetic::Hopper => Units::Hopper(self.order),
        }
    }

    /// Runs a schedule in two phases, in an order of ranks and streams drawn from the backend's seed. Rows of the saved
    /// out and lse that are not real are poisoned between the two, as the contract allows.
    pub(super) fn run_schedule(
        &self,
        problem: &Problem,
        inputs: &Inputs,
        schedule: &Schedule,
        device: &Cpu<f32>,
    ) -> Result<Outputs, RunError> {
        let mut buffers = load::<f32>(schedule, problem, inputs, slack(problem, inputs));
        let mut state = self.order;
        let mut choose = |ready: usize| {
            state = values::mix(state.wrapping_add(1));
            (state % ready as u64) as usize
        };
        let failed = |error: ExecuteError| RunError::Crash(error.to_string());
        execute(schedule, Phase::Forward, device, &mut buffers, &mut choose).map_err(failed)?;
        let mut ranks = (0..schedule.ranks.len())
            .map(|rank| forward_results(schedule, &buffers, rank))
            .collect::<Option<Vec<_>>>()
            .ok_or_else(|| RunError::Infrastructure("the schedule places no result".into()))?;
        if problem.pass == Pass::Backward {
            poison_saved(schedule, &mut buffers);
            execute(schedule, Phase::Backward, device, &mut buffers, &mut choose).map_err(failed)?;
            for (rank, outputs) in ranks.iter_mut().enumerate() {
                outputs.gradients = gradients(problem, schedule, &buffers, rank);
            }
        }
        Ok(Outputs { ranks, damage: buffers.damage() })
    }
}

/// The problem without its backward.
fn forward_of(problem: &Problem) -> Option<Problem> {
    let mut fields: ProblemFields = problem.clone().into();
    fields.pass = Pass::Forward;
    Problem::new(fields).ok()
}

/// What rows hold that no sequence owns on a rank: what the problem's own such rows hold, NaN where it has none.
fn slack(problem: &Problem, inputs: &Inputs) -> f32 {
    let real = values::real_kv_rows(problem);
    let row = real.iter().position(|&real| !real);
    row.and_then(|row| inputs.k.get([row, 0, 0])).copied().unwrap_or(f32::NAN)
}

fn tensor<'a>(
    schedule: &Schedule,
    buffers: &'a Buffers<f32>,
    rank: usize,
    name: TensorName,
) -> Option<&'a Tensor<f32>> {
    output(schedule, rank, name).map(|id| buffers.tensor(id))
}

fn forward_results(schedule: &Schedule, buffers: &Buffers<f32>, rank: usize) -> Option<RankOutputs> {
    let of = |name| tensor(schedule, buffers, rank, name);
    Some(RankOutputs {
        out: of(TensorName::Out)?.to_array3(),
        lse: Some(of(TensorName::Lse)?.to_array2()),
        max_logit: Some(Array1::from_vec(of(TensorName::MaxLogit)?.values().to_vec())),
        gradients: None,
    })
}

fn gradients(
    problem: &Problem,
    schedule: &Schedule,
    buffers: &Buffers<f32>,
    rank: usize,
) -> Option<RankGradients> {
    let of = |name| tensor(schedule, buffers, rank, name);
    // A rank's dsink may be that of some heads only; the others' partial sum is 0.
    let mut dsink = Array1::zeros(problem.learnable_sinks());
    for placement in &schedule.placements {
        let here = schedule.buffers[placement.buffer.0].rank == rank;
        if here && placement.tensor == TensorName::Dsink {
            let values = buffers.tensor(placement.buffer).values();
            placement.heads.clone().zip(values).for_each(|(head, value)| dsink[head] = *value);
        }
    }
    Some(RankGradients {
        dq: of(TensorName::Dq)?.to_array3(),
        dk: of(TensorName::Dk)?.to_array3(),
        dv: of(TensorName::Dv)?.to_array3(),
        dsink,
    })
}

/// NaN into every row of the saved out and lse that is not real.
fn poison_saved(schedule: &Schedule, buffers: &mut Buffers<f32>) {
    for placement in &schedule.placements {
        if !matches!(placement.tensor, TensorName::Out | TensorName::Lse) {
            continue;
        }
        let buffer = &schedule.buffers[placement.buffer.0];
        let mut real = vec![false; buffer.rows];
        for row in placement.rows.iter().flat_map(|placed| placed.local.real_rows()) {
            real[row] = true;
        }
        for row in (0..buffer.rows).filter(|&row| !real[row]) {
            (0..buffer.heads).for_each(|head| buffers.lane_mut(placement.buffer, row, head).fill(f32::NAN));
        }
    }
}

/// What the launcher itself refuses. It is written without the capability table on purpose: the judge compares the
/// two, so that a table which promises too much, or too little, is found.
fn check_launch(problem: &Problem) -> Result<(), Refusal> {
    let io = problem.precision.q.format;
    for (quantity, element) in problem.precision.elements() {
        if element.scaling != Scaling::None {
            return Err(Refusal::Scaling { quantity });
        }
        let format = element.format;
        let runs = match quantity {
            "p" => matches!(format, Format::F32 | Format::Bf16 | Format::Fp16),
            _ => matches!(format, Format::Bf16 | Format::Fp16) && format == io,
        };
        if !runs {
            return Err(Refusal::Format { quantity, format: format.name() });
        }
    }
    Ok(())
}

/// The schedule of a problem, or the builder's refusal in the words of the capability table.
pub(super) fn launchable(problem: &Problem, order: MergeOrder) -> Result<Schedule, RunError> {
    check_launch(problem)?;
    build_with(problem, order).map_err(|error| RunError::Refused(Refusal::Parallel(rule(&error))))
}

/// The rule of the capability table that a builder's refusal stands for.
fn rule(error: &BuildError) -> ParallelRule {
    match error {
        BuildError::Shard(ShardError::Span { .. }) => ParallelRule::SpanMultiple,
        BuildError::Shard(ShardError::Strided { .. }) => ParallelRule::ConsecutiveRows,
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

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            formats: vec![Format::Bf16, Format::Fp16],
            weight_formats: vec![Format::F32, Format::Bf16, Format::Fp16],
            head_dims: 1..=HEAD_DIM_MAX,
            algorithms: ALGORITHMS.to_vec(),
            sub_groups: true,
            softcap: true,
            sinks: vec![Sink::None, Sink::OffByOne, Sink::Learnable],
            statistics: vec![TensorName::Lse, TensorName::MaxLogit],
        }
    }

    fn padding(&self) -> PaddingContract {
        PaddingContract { inputs: PaddingInputs::Anything, outputs: PaddingOutputs::Zero }
    }

    fn promises(&self) -> Promises {
        match self.arithmetic {
            Arithmetic::F32 => Promises::ALL,
            // The order of dq's tiles is drawn from the head and the tile of queries.
            Arithmetic::Hopper => Promises { heads_alone: false, rows_alone: false, ..Promises::ALL },
        }
    }

    fn accumulation(&self) -> Accumulation {
        match self.arithmetic {
            Arithmetic::F32 => Accumulation::F32Serial,
            Arithmetic::Hopper => Accumulation::WgmmaTruncating,
        }
    }

    fn partition(&self, problem: &Problem) -> Partition {
        let single = Partition::single(self.tiles.q, self.tiles.kv);
        self.schedule(problem).map_or(single, |schedule| schedule.partition(self.tiles))
    }

    fn schedule(&self, problem: &Problem) -> Result<Schedule, BuildError> {
        build_with(problem, self.merge)
    }

    fn launches(&self, problem: &Problem) -> Option<Vec<Launch>> {
        let forward = forward_of(problem)?;
        build_with(&forward, self.merge).ok()?.launches(&forward)
    }

    fn run(&self, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
        self.run_schedule(problem, inputs, &launchable(problem, self.merge)?, &self.device(problem))
    }
}
