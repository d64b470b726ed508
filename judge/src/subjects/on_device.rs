//! A world's schedules run on a device with all ranks in one process. The inputs are dealt to the ranks and the forward
//! runs. Its saved results are poisoned where the contract allows. The backward then runs, and the ranks' results are
//! read.

use ndarray::{Array1, Array3};
use seamproof_oracle::amax::Amaxes;
use seamproof_oracle::{Inputs, Pass, Problem, Run, TensorName, runs_of};
use seamproof_simulator::GuardedTensor;
use seamproof_simulator::device::{Buffers, Device, DeviceError, Divided};
use seamproof_simulator::executor::{ExecuteError, ExecutedPasses, execute, output};
use seamproof_simulator::schedule::Schedule;
use seamproof_simulator::threads::execute_on_threads;

use super::World;
use crate::subject::{Costs, Outputs, RankGradients, RankOutputs, RunError};
use crate::values;

/// Progress of a run on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reached {
    /// The inputs are on their way to the device.
    Uploaded,
    /// All launches of the forward have been asked for. Those of the backward follow once the forward's results have
    /// arrived.
    Launched,
}

/// Runs a world's schedules in two phases, in an order of ranks and streams drawn from `order`. Between the two, the
/// rows of the saved out and lse that are not real are poisoned.
pub fn run_world<D: Device<Real = f32>>(
    device: &D,
    problem: &Problem,
    inputs: &Inputs,
    world: &World,
    order: u64,
    reached: &mut dyn FnMut(Reached),
) -> Result<Outputs, RunError> {
    let mut choose = choices(order);
    let mut execute = |phase: ExecutedPasses, memory: &mut D::Memory| {
        execute(world.all(), phase, device, memory, &mut choose).map(drop)
    };
    run_phases(device, problem, inputs, world, &mut execute, reached)
}

/// Runs a world's schedules like [`run_world`], with a thread for each rank. The choices of each are drawn from
/// `order`.
pub fn run_on_threads<D: Divided<Real = f32>>(
    device: &D,
    problem: &Problem,
    inputs: &Inputs,
    world: &World,
    order: u64,
    reached: &mut dyn FnMut(Reached),
) -> Result<Outputs, RunError> {
    let mut execute = |phase: ExecutedPasses, memory: &mut D::Memory| {
        let of_rank = |rank: usize| choices(crate::hash::mix(order ^ crate::hash::mix(rank as u64)));
        execute_on_threads(world.all(), phase, device, memory, of_rank).map(drop)
    };
    run_phases(device, problem, inputs, world, &mut execute, reached)
}

/// Returns a maker of choices, of one of some number each time.
fn choices(mut state: u64) -> impl FnMut(usize) -> usize {
    move |ready| {
        state = crate::hash::mix(state.wrapping_add(1));
        (state % ready as u64) as usize
    }
}

/// Function that executes one phase of a schedule.
type Execute<'a, M> = dyn FnMut(ExecutedPasses, &mut M) -> Result<(), ExecuteError> + 'a;

fn run_phases<D: Device<Real = f32>>(
    device: &D,
    problem: &Problem,
    inputs: &Inputs,
    world: &World,
    execute: &mut Execute<'_, D::Memory>,
    reached: &mut dyn FnMut(Reached),
) -> Result<Outputs, RunError> {
    let schedule = &*world.own;
    let slack = slack(problem, inputs);
    let mut memory = device.upload(world.load(problem, inputs, slack)).map_err(failed)?;
    reached(Reached::Uploaded);
    let mut pass = |phase: ExecutedPasses, memory: &mut D::Memory| {
        execute(phase, memory).map_err(not_executed)?;
        device.submit(memory).map_err(failed)
    };
    pass(ExecutedPasses::Forward, &mut memory)?;
    reached(Reached::Launched);
    let image = device.download(&mut memory).map_err(failed)?;
    let mut ranks = { schedule.members.iter() }
        .map(|&rank| forward_results(schedule, image, rank))
        .collect::<Option<Vec<_>>>()
        .ok_or_else(|| RunError::Infrastructure("the schedule places no result".into()))?;
    if problem.pass == Pass::Forward {
        return Ok(Outputs { ranks, damage: image.damage(), changed: Vec::new(), costs: Costs::default() });
    }
    poison_saved(world.all(), device, slack, &mut memory).map_err(failed)?;
    pass(ExecutedPasses::Backward, &mut memory)?;
    let image = device.download(&mut memory).map_err(failed)?;
    for (&rank, outputs) in schedule.members.iter().zip(&mut ranks) {
        outputs.gradients = gradients(problem, schedule, image, rank);
    }
    Ok(Outputs { ranks, damage: image.damage(), changed: Vec::new(), costs: Costs::default() })
}

fn not_executed(error: ExecuteError) -> RunError {
    match error {
        ExecuteError::Device {
            error: error @ (DeviceError::OutOfMemory(_) | DeviceError::NotBuilt(_)),
            ..
        }
        | ExecuteError::Divided(error) => failed(error),
        error => RunError::Crash(error.to_string()),
    }
}

fn failed(error: DeviceError) -> RunError {
    match error {
        DeviceError::OutOfMemory(what) => RunError::OutOfMemory(what),
        // That says nothing about the subject.
        DeviceError::NotBuilt(what) => RunError::Infrastructure(what),
        error => RunError::Crash(error.to_string()),
    }
}

/// Returns the number for rows that no sequence owns on a rank: the one in such rows of the problem, or NaN where it
/// has none.
fn slack(problem: &Problem, inputs: &Inputs) -> f32 {
    let of = |tensor: &Array3<f32>, real: Vec<bool>| {
        let row = real.iter().position(|&real| !real)?;
        tensor.get([row, 0, 0]).copied()
    };
    let keys = of(&inputs.k, values::real_kv_rows(problem));
    keys.or_else(|| of(&inputs.q, values::real_q_rows(problem))).unwrap_or(f32::NAN)
}

fn tensor<'a>(
    schedule: &Schedule,
    buffers: &'a Buffers<f32>,
    rank: usize,
    name: TensorName,
) -> Option<&'a GuardedTensor<f32>> {
    output(schedule, rank, name).map(|id| buffers.tensor(id))
}

fn forward_results(schedule: &Schedule, buffers: &Buffers<f32>, rank: usize) -> Option<RankOutputs> {
    let of = |name| tensor(schedule, buffers, rank, name);
    Some(RankOutputs {
        out: of(TensorName::Out)?.to_array3(),
        lse: Some(of(TensorName::Lse)?.to_array2()),
        max_logit: Some(Array1::from_vec(of(TensorName::MaxLogit)?.values().to_vec())),
        gradients: None,
        amax: Amaxes::default(),
    })
}

fn gradients(
    problem: &Problem,
    schedule: &Schedule,
    buffers: &Buffers<f32>,
    rank: usize,
) -> Option<RankGradients> {
    let of = |name| tensor(schedule, buffers, rank, name);
    // A rank's dsink may cover some heads only; the partial sum of the others is 0.
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

/// Numbers that fill, in turn, the runs of rows of the saved out and lse that are not real.
const SAVED: [f32; 3] = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY];

/// Fills every row of the saved out and lse that is not real with NaN and infinities. Another padding of the inputs,
/// `slack`, gives other numbers.
fn poison_saved<D: Device>(
    schedule: &Schedule,
    device: &D,
    slack: f32,
    memory: &mut D::Memory,
) -> Result<(), DeviceError> {
    let first = match slack {
        _ if slack.is_nan() => 0,
        _ if slack.is_finite() => 1,
        _ => 2,
    };
    for placement in &schedule.placements {
        if !matches!(placement.tensor, TensorName::Out | TensorName::Lse) {
            continue;
        }
        let mut real = vec![false; schedule.buffers[placement.buffer.0].rows];
        for row in placement.rows.iter().flat_map(|placed| placed.local.real_rows()) {
            real[row] = true;
        }
        for (value, runs) in dealt(&unmarked(&real), first) {
            device.poison(placement.buffer, &runs, value, memory)?;
        }
    }
    Ok(())
}

/// Deals runs to the values of [`SAVED`] in turn, beginning with the value of index `first`. Values without runs are
/// left out.
fn dealt(runs: &[Run], first: usize) -> Vec<(f32, Vec<Run>)> {
    let of = |index: usize| runs.iter().skip(index).step_by(SAVED.len()).copied().collect::<Vec<Run>>();
    let all = (0..SAVED.len()).map(|index| (SAVED[(first + index) % SAVED.len()], of(index)));
    all.filter(|(_, runs)| !runs.is_empty()).collect()
}

/// Returns the rows that are not marked, in as few runs as possible.
fn unmarked(marks: &[bool]) -> Vec<Run> {
    runs_of((0..marks.len()).filter(|&row| !marks[row]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_that_is_not_real_is_dealt_a_value_and_another_one_under_another_poison() {
        let mut real = [true; 12];
        for row in [0, 2, 3, 5, 7, 11] {
            real[row] = false;
        }
        let held = |first: usize| {
            let mut held = [0.0f32; 12];
            for (value, runs) in dealt(&unmarked(&real), first) {
                runs.iter().flat_map(Run::real_rows).for_each(|row| held[row] = value);
            }
            held
        };
        let (nan, inf) = (f32::NAN.to_bits(), f32::INFINITY.to_bits());
        let minus = f32::NEG_INFINITY.to_bits();
        let bits = |first| held(first).map(f32::to_bits);
        assert_eq!(bits(0), [nan, 0, inf, inf, 0, minus, 0, nan, 0, 0, 0, inf]);
        assert!(bits(0).iter().zip(bits(1)).zip(real).all(|((a, b), real)| real == (*a == b)));
    }
}
