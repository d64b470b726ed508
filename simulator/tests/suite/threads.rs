//! Ranks as threads: the bits of a run in one thread, and what a run shows that does not wait.

use crate::common::hold::inputs;
use crate::common::{Draws, problem};

use seamproof_oracle::{Algorithm, Balance, Problem};
use seamproof_simulator::Real;
use seamproof_simulator::device::{Buffers, Cpu};
use seamproof_simulator::emulated::Tiles;
use seamproof_simulator::executor::{ExecuteError, ExecutedPasses, execute, load};
use seamproof_simulator::faults::by_id;
use seamproof_simulator::schedule::{MergeOrder, Schedule, Work, build_with};
use seamproof_simulator::threads::execute_on_threads;

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

fn on_threads(problem: &Problem, schedule: &Schedule, seed: u64) -> Result<Vec<Vec<u64>>, ExecuteError> {
    let mut memory = loaded(problem, schedule, 1);
    let choose = |rank: usize| {
        let mut draws = Draws(seed.wrapping_mul(97).wrapping_add(rank as u64));
        move |n: usize| draws.below(n)
    };
    let counts = execute_on_threads(schedule, ExecutedPasses::Both, &device(problem), &mut memory, choose)?;
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
                    let got = on_threads(&problem, &schedule, seed).unwrap_or_else(|error| panic!("{error}"));
                    assert!(got == expected, "seed {seed}: {problem:?}");
                }
            }
        }
    }
}

/// Returns the number of runs on threads, and of those whose results differ from those of the right schedule.
fn shown(fault: &str, (algorithm, balance): (Algorithm, Balance)) -> (usize, usize) {
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
            wrong += usize::from(on_threads(&problem, &schedule, seed).map(results) != Ok(expected.clone()));
        }
    }
    (runs, wrong)
}

#[test]
fn work_that_does_not_wait_shows() {
    let ring = (Algorithm::Ring, DUAL);
    let gather = (Algorithm::AllGather, DUAL);
    for (fault, form) in [
        ("kv-read-before-it-arrives", ring),
        ("sent-before-it-is-made", ring),
        ("step-before-the-gather", gather),
        ("steps-not-joined", gather),
    ] {
        let (runs, wrong) = shown(fault, form);
        assert!(runs >= 50 && wrong * 4 > runs, "{fault}: {wrong} of {runs}");
    }
}

#[test]
fn ranks_that_wait_for_ever_are_told() {
    let problem = problem(&mut Draws(3), Algorithm::Ring, DUAL, 3);
    let mut schedule = build_with(&problem, MergeOrder::Running).unwrap();
    let sends = |work: &Work| matches!(work, Work::Send { .. });
    let first = schedule.ranks[1].operations.iter().position(|operation| sends(&operation.work)).unwrap();
    schedule.ranks[1].operations.remove(first);
    schedule.ranks[1].backward = schedule.ranks[1].backward.map(|begin| begin - 1);
    let stuck = on_threads(&problem, &schedule, 1);
    assert!(matches!(stuck, Err(ExecuteError::Stuck(_))), "{stuck:?}");
}
