//! Ranks as threads: the bits of a run in one thread, and what a run shows that does not wait, on a device that does
//! everything at once and on one that works far behind its host.

use crate::common::behind::Behind;
use crate::common::hold::inputs;
use crate::common::{Draws, problem};

use seamproof_oracle::{Algorithm, Balance, Problem, TensorName};
use seamproof_simulator::device::{Buffers, Cpu, Divided};
use seamproof_simulator::emulated::Tiles;
use seamproof_simulator::executor::{ExecuteError, ExecutedPasses, execute, load};
use seamproof_simulator::faults::by_id;
use seamproof_simulator::schedule::{MergeOrder, Schedule, Work, build_with};
use seamproof_simulator::threads::execute_on_threads;
use seamproof_simulator::{Real, is_unwritten};

const DUAL: Balance = Balance::DualChunk;
const STRIPES: Balance = Balance::Striped { stripe: 1 };

/// Every algorithm of several ranks with two ways to cut.
const FORMS: [(Algorithm, Balance); 8] = [
    (Algorithm::Ring, DUAL),
    (Algorithm::Ring, STRIPES),
    (Algorithm::AllGather, DUAL),
    (Algorithm::AllGather, Balance::Contiguous),
    (Algorithm::AllToAll, DUAL),
    (Algorithm::AllToAll, STRIPES),
    (Algorithm::Hierarchical { all_to_all: 2 }, DUAL),
    (Algorithm::Hierarchical { all_to_all: 2 }, STRIPES),
];

fn device(problem: &Problem) -> Cpu<f32> {
    Cpu::new(Tiles { q: 2, kv: 3 }, problem.precision.p.format, problem.precision.ds.format)
}

/// Returns the memory before a run.
fn loaded(problem: &Problem, schedule: &Schedule, seed: u64) -> Buffers<f32> {
    load(schedule, problem, &inputs(problem, &mut Draws(seed)), f32::NAN)
}

/// Returns the bits of every buffer.
fn bits(buffers: &Buffers<f32>) -> Vec<Vec<u64>> {
    buffers.tensors().iter().map(|tensor| tensor.raw().iter().map(|value| value.bits()).collect()).collect()
}

/// Returns a device that works behind its host.
fn behind(problem: &Problem, seed: u64) -> Behind {
    Behind { cpu: device(problem), seed, poisons: true }
}

/// Returns the bits after a run on threads.
fn on_threads<D: Divided<Real = f32, Memory = Buffers<f32>>>(
    device: &D,
    problem: &Problem,
    schedule: &Schedule,
    seed: u64,
) -> Result<Vec<Vec<u64>>, ExecuteError> {
    let mut memory = loaded(problem, schedule, 1);
    let choose = |rank: usize| {
        let mut draws = Draws(seed.wrapping_mul(97).wrapping_add(rank as u64));
        move |n: usize| draws.below(n)
    };
    let counts = execute_on_threads(schedule, ExecutedPasses::Both, device, &mut memory, choose)?;
    let operations: usize = schedule.ranks.iter().map(|program| program.operations.len()).sum();
    assert_eq!(counts.operations, operations);
    Ok(bits(&memory))
}

fn in_one_thread(problem: &Problem, schedule: &Schedule) -> Vec<Vec<u64>> {
    let mut memory = loaded(problem, schedule, 1);
    execute(schedule, ExecutedPasses::Both, &device(problem), &mut memory, |_| 0).unwrap();
    bits(&memory)
}

#[test]
fn threads_give_the_bits_of_one_thread() {
    let mut draws = Draws(5);
    for (algorithm, balance) in FORMS {
        for _ in 0..12 {
            let problem = problem(&mut draws, algorithm, balance, 4);
            for &order in MergeOrder::of(algorithm) {
                let schedule = build_with(&problem, order).unwrap();
                let expected = in_one_thread(&problem, &schedule);
                for seed in 0..4 {
                    let at_once = on_threads(&device(&problem), &problem, &schedule, seed);
                    assert!(at_once.as_ref() == Ok(&expected), "seed {seed}: {problem:?}");
                    let behind = on_threads(&behind(&problem, seed), &problem, &schedule, seed);
                    assert!(behind.as_ref() == Ok(&expected), "behind, seed {seed}: {problem:?}");
                }
            }
        }
    }
}

/// Returns the number of runs on threads, and of those whose results differ from those of the right schedule. Each is
/// a run on the device that `device` makes of a problem and a seed.
fn shown<D: Divided<Real = f32, Memory = Buffers<f32>>>(
    device: impl Fn(&Problem, u64) -> D,
    fault: &str,
    (algorithm, balance): (Algorithm, Balance),
) -> (usize, usize) {
    let (fault, mut draws) = (by_id(fault).unwrap(), Draws(7));
    let (mut runs, mut wrong) = (0, 0);
    for _ in 0..12 {
        let problem = problem(&mut draws, algorithm, balance, 4);
        let right = fault.schedule(&problem).unwrap();
        let mut schedule = right.clone();
        if !fault.plant(&problem, &mut schedule) {
            continue;
        }
        let results = |bits: Vec<Vec<u64>>| -> Vec<Vec<u64>> {
            right.placements.iter().map(|placement| bits[placement.buffer.0].clone()).collect()
        };
        let expected = results(in_one_thread(&problem, &right));
        for seed in 0..8 {
            runs += 1;
            let got = on_threads(&device(&problem, seed), &problem, &schedule, seed).map(results);
            wrong += usize::from(got != Ok(expected.clone()));
        }
    }
    (runs, wrong)
}

/// Faults that remove waits, each with a form in which it is planted.
const WITHOUT_WAITS: [(&str, (Algorithm, Balance)); 4] = [
    ("kv-read-before-it-arrives", (Algorithm::Ring, DUAL)),
    ("sent-before-it-is-made", (Algorithm::Ring, DUAL)),
    ("step-before-the-gather", (Algorithm::AllGather, DUAL)),
    ("steps-not-joined", (Algorithm::AllGather, DUAL)),
];

#[test]
fn work_that_does_not_wait_shows() {
    for (fault, form) in WITHOUT_WAITS {
        for (runs, wrong) in [shown(|problem, _| device(problem), fault, form), shown(behind, fault, form)] {
            assert!(runs >= 50 && wrong * 4 > runs, "{fault}: {wrong} of {runs}");
        }
    }
}

/// Test of memory that holds what an earlier run has left, as a buffer that is used again does: what is read too early
/// there is mostly a number like any other.
#[test]
fn poison_shows_what_is_read_too_early_where_something_lay_before() {
    let (fault, mut draws) = (by_id("kv-read-before-it-arrives").unwrap(), Draws(7));
    let (mut bare, mut poisoned) = (0, 0);
    for seed in 0..60 {
        let problem = problem(&mut draws, Algorithm::Ring, DUAL, 4);
        let right = build_with(&problem, MergeOrder::Running).unwrap();
        let mut wrong = right.clone();
        if !fault.plant(&problem, &mut wrong) {
            continue;
        }
        let is_poisoned = |poisons: bool| {
            let mut memory = loaded(&problem, &right, 1);
            execute(&right, ExecutedPasses::Both, &device(&problem), &mut memory, |_| 0).unwrap();
            let device = Behind { poisons, ..behind(&problem, seed) };
            execute_on_threads(&wrong, ExecutedPasses::Both, &device, &mut memory, |_| |_| 0).unwrap();
            let outs = right.placements.iter().filter(|placement| placement.tensor == TensorName::Out);
            let mut values = outs.flat_map(|placement| memory.tensor(placement.buffer).values());
            usize::from(values.any(|value| value.is_nan() && !is_unwritten(*value)))
        };
        (bare, poisoned) = (bare + is_poisoned(false), poisoned + is_poisoned(true));
    }
    assert!(bare + 3 < poisoned, "{bare} without poison, {poisoned} with it");
}

#[test]
fn ranks_that_wait_for_ever_are_told() {
    let problem = problem(&mut Draws(3), Algorithm::Ring, DUAL, 3);
    let mut schedule = build_with(&problem, MergeOrder::Running).unwrap();
    let sends = |work: &Work| matches!(work, Work::Send { .. });
    let first = schedule.ranks[1].operations.iter().position(|operation| sends(&operation.work)).unwrap();
    schedule.ranks[1].operations.remove(first);
    schedule.ranks[1].backward = schedule.ranks[1].backward.map(|begin| begin - 1);
    let stuck = on_threads(&device(&problem), &problem, &schedule, 1);
    assert!(matches!(stuck, Err(ExecuteError::Stuck(_))), "{stuck:?}");
}
