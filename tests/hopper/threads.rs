//! Ranks at once on a GPU, each by a thread of the host: the bits of ranks in turn, and a wait that is missing shows.
//! `cargo test --release --test hopper threads -- --ignored`

use seamproof_judge::values;
use seamproof_kernels::Gpu;
use seamproof_kernels::cache::Cache;
use seamproof_kernels::device::{CudaDevice, Workspace};
use seamproof_oracle::Problem;
use seamproof_simulator::device::Device;
use seamproof_simulator::executor::{ExecuteError, ExecutedPasses, execute, load};
use seamproof_simulator::faults;
use seamproof_simulator::schedule::Schedule;
use seamproof_simulator::threads::execute_on_threads;

use crate::lanes::{device, drawn, makes_tables, on_kernels};

/// Returns the bits of every buffer after a run, with all ranks in one thread, or with a thread for each where there is
/// a seed of their choices.
fn run(
    device: &CudaDevice<'_>,
    problem: &Problem,
    schedule: &Schedule,
    threads: Option<u64>,
) -> Result<Vec<Vec<u32>>, ExecuteError> {
    let image = load(schedule, problem, &values::inputs(problem), 0.0);
    let mut memory = device.upload(image).unwrap_or_else(|error| panic!("{error}"));
    match threads {
        None => execute(schedule, ExecutedPasses::Both, device, &mut memory, |_| 0)?,
        Some(seed) => {
            let choose = |rank: usize| {
                let mut state = drawn(seed ^ drawn(rank as u64));
                move |count: usize| {
                    state = drawn(state);
                    (state % count as u64) as usize
                }
            };
            execute_on_threads(schedule, ExecutedPasses::Both, device, &mut memory, choose)?
        }
    };
    let buffers = device.download(&mut memory).unwrap_or_else(|error| panic!("{error}"));
    assert!(buffers.damage().is_empty(), "{problem:?}");
    Ok(buffers.tensors().iter().map(|tensor| tensor.raw().iter().map(|x| x.to_bits()).collect()).collect())
}

fn workspace() -> Workspace {
    Workspace::new(Gpu::open(0, &Cache::of_user()).unwrap_or_else(|error| panic!("{error}")))
}

#[test]
#[ignore = "needs a Hopper GPU"]
fn threads_on_a_gpu_give_the_bits_of_ranks_in_turn() {
    let (workspace, mut runs) = (workspace(), 0);
    for (case, (problem, schedule)) in on_kernels(1200).enumerate() {
        let device = device(&workspace, 1, &problem);
        let expected = run(&device, &problem, &schedule, None);
        for seed in 0..2 {
            let got = run(&device, &problem, &schedule, Some(2 * case as u64 + seed));
            assert!(expected.is_ok() && got == expected, "case {case}, {:?}: {problem:?}", got.err());
            runs += 1;
        }
    }
    assert!(runs >= 300, "too little run: {runs}");
}

/// Faults that remove waits.
const WITHOUT_WAITS: [&str; 4] =
    ["kv-read-before-it-arrives", "sent-before-it-is-made", "step-before-the-gather", "steps-not-joined"];

#[test]
#[ignore = "needs a Hopper GPU"]
fn threads_on_a_gpu_show_a_wait_that_is_missing() {
    let workspace = workspace();
    for id in WITHOUT_WAITS {
        let (fault, mut runs, mut shown) = (faults::by_id(id).unwrap(), 0, 0);
        for (case, (problem, _)) in on_kernels(3000).enumerate() {
            if runs == 60 {
                break;
            }
            // A launch that reads a table too early reads any numbers, and no other run follows on its GPU.
            let Some(right) = fault.schedule(&problem).filter(|right| !makes_tables(right)) else { continue };
            let mut wrong = right.clone();
            if !fault.plant(&problem, &mut wrong) {
                continue;
            }
            let device = device(&workspace, 1, &problem);
            let results = |bits: Vec<Vec<u32>>| -> Vec<Vec<u32>> {
                right.placements.iter().map(|placement| bits[placement.buffer.0].clone()).collect()
            };
            let expected = run(&device, &problem, &right, None).map(results);
            runs += 1;
            let got = run(&device, &problem, &wrong, Some(case as u64)).map(results);
            shown += usize::from(got != expected);
        }
        assert!(shown * 10 > runs && runs >= 20, "{id}: {shown} of {runs}");
    }
}
