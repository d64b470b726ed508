//! A device that runs a schedule's lanes behind its host, in an order of its own. An executor tells a device the lane
//! of each operation, the marks and the waits. That is enough for the right bits, and a missing wait shows. The same
//! is tested on streams of a Hopper GPU where one is asked for, `cargo test --release --test hopper lanes --
//! --ignored`.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use seamproof::backends::Cuda;
use seamproof_judge::generate::{self, Draw, Profile};
use seamproof_judge::subject::Backend;
use seamproof_judge::subjects::Emulated;
use seamproof_judge::values;
use seamproof_kernels::Gpu;
use seamproof_kernels::attend::WeightFormats;
use seamproof_kernels::backward::DqOrder;
use seamproof_kernels::cache::Cache;
use seamproof_kernels::device::{CudaDevice, DeviceOptions, Workspace};
use seamproof_kernels::forward::AttentionKernels;
use seamproof_oracle::{Problem, Run};
use seamproof_simulator::GuardedTensor;
use seamproof_simulator::device::{Buffers, Cpu, Device, DeviceError, Transfer};
use seamproof_simulator::emulated::Tiles;
use seamproof_simulator::executor::{ExecutedPasses, execute, load};
use seamproof_simulator::faults;
use seamproof_simulator::schedule::{BufferId, MergeOrder, Reduction, Region, Schedule, Work};

/// A device whose streams are each in order, and otherwise wait for marks alone. A seed draws which stream proceeds.
struct Behind {
    cpu: Cpu<f32>,
    seed: u64,
}

struct Memory {
    buffers: Buffers<f32>,
    lane: usize,
    lanes: BTreeMap<usize, VecDeque<Asked>>,
    /// Last mark for each number.
    marks: BTreeMap<usize, usize>,
    made: usize,
}

enum Asked {
    Work(Box<Work>),
    Transfers(Vec<(Vec<Region>, Reduction, Vec<Region>)>),
    Mark(usize),
    Wait(usize),
}

impl Memory {
    fn ask(&mut self, asked: Asked) {
        self.lanes.entry(self.lane).or_default().push_back(asked);
    }
}

fn owned(regions: &[&Region]) -> Vec<Region> {
    regions.iter().map(|&region| region.clone()).collect()
}

impl Behind {
    fn carry_out(&self, asked: &Asked, buffers: &mut Buffers<f32>) -> Result<(), DeviceError> {
        match asked {
            Asked::Work(work) => self.cpu.execute(work, buffers),
            Asked::Transfers(transfers) => {
                let borrowed: Vec<Transfer> = transfers
                    .iter()
                    .map(|(from, reduction, to)| Transfer {
                        from: from.iter().collect(),
                        reduction: *reduction,
                        to: to.iter().collect(),
                    })
                    .collect();
                self.cpu.transfer(&borrowed, buffers)
            }
            Asked::Mark(_) | Asked::Wait(_) => Ok(()),
        }
    }
}

impl Device for Behind {
    type Real = f32;
    type Memory = Memory;

    fn upload(&self, buffers: Buffers<f32>) -> Result<Memory, DeviceError> {
        Ok(Memory { buffers, lane: 0, lanes: BTreeMap::new(), marks: BTreeMap::new(), made: 0 })
    }

    fn download<'m>(&self, memory: &'m mut Memory) -> Result<&'m Buffers<f32>, DeviceError> {
        self.submit(memory)?;
        Ok(&memory.buffers)
    }

    fn submit(&self, memory: &mut Memory) -> Result<(), DeviceError> {
        let (mut reached, mut state) = (BTreeSet::new(), self.seed);
        loop {
            let can = |asked: &Asked| !matches!(asked, Asked::Wait(mark) if !reached.contains(mark));
            let heads = memory.lanes.iter().filter_map(|(&lane, queue)| Some((lane, queue.front()?)));
            let ready: Vec<usize> = heads.filter(|(_, asked)| can(asked)).map(|(lane, _)| lane).collect();
            if ready.is_empty() {
                break;
            }
            state = drawn(state);
            let lane = ready[(state % ready.len() as u64) as usize];
            let Some(asked) = memory.lanes.get_mut(&lane).and_then(VecDeque::pop_front) else { break };
            self.carry_out(&asked, &mut memory.buffers)?;
            if let Asked::Mark(mark) = asked {
                reached.insert(mark);
            }
        }
        assert!(memory.lanes.values().all(VecDeque::is_empty), "a mark is waited for before it is asked for");
        Ok(())
    }

    fn execute(&self, work: &Work, memory: &mut Memory) -> Result<(), DeviceError> {
        memory.ask(Asked::Work(Box::new(work.clone())));
        Ok(())
    }

    fn transfer(&self, transfers: &[Transfer<'_>], memory: &mut Memory) -> Result<(), DeviceError> {
        let own = |transfer: &Transfer| (owned(&transfer.from), transfer.reduction, owned(&transfer.to));
        memory.ask(Asked::Transfers(transfers.iter().map(own).collect()));
        Ok(())
    }

    fn poison(&self, to: BufferId, rows: &[Run], value: f32, memory: &mut Memory) -> Result<(), DeviceError> {
        self.cpu.poison(to, rows, value, &mut memory.buffers)
    }

    fn host_read(&self, region: &Region, memory: &mut Memory) -> Result<(), DeviceError> {
        self.submit(memory)?;
        self.cpu.host_read(region, &mut memory.buffers)
    }

    fn lane(&self, lane: usize, memory: &mut Memory) {
        memory.lane = lane;
    }

    fn mark(&self, mark: usize, memory: &mut Memory) {
        memory.made += 1;
        memory.marks.insert(mark, memory.made);
        memory.ask(Asked::Mark(memory.made));
    }

    fn wait(&self, mark: usize, memory: &mut Memory) {
        let mark = memory.marks[&mark];
        memory.ask(Asked::Wait(mark));
    }
}

/// Returns drawn problems on several ranks, with their schedules: half of them in the shipped order, in which an
/// all-gather has two steps on two streams.
fn problems(cases: u64) -> impl Iterator<Item = (Problem, Schedule)> {
    let limits = Profile::Seams.limits();
    let drawn = (0..cases).filter_map(move |case| match generate::draw(9, case, &limits) {
        Draw::Problem(problem) => Some(problem),
        Draw::Malformed(_) => None,
    });
    drawn.filter(|problem| problem.parallel.size() > 1).enumerate().filter_map(|(index, problem)| {
        let merge = MergeOrder::WEIGHTED[index % 2];
        let subject = Emulated { merge, ..Emulated::default() };
        let taken = subject.declaration().table.refusal(&problem).is_none();
        let schedule = taken.then(|| subject.schedule(&problem).ok()).flatten()?;
        Some((problem, schedule))
    })
}

/// Returns those that the kernels take.
pub(crate) fn on_kernels(cases: u64) -> impl Iterator<Item = (Problem, Schedule)> {
    let table = Cuda::default().declaration().table;
    problems(cases).filter(move |(problem, _)| table.refusal(problem).is_none())
}

/// Whether launches read segments that were made on the device.
pub(crate) fn makes_tables(schedule: &Schedule) -> bool {
    let mut works = schedule.ranks.iter().flat_map(|program| &program.operations);
    works.any(|operation| matches!(operation.work, Work::MakeSegments { .. }))
}

/// Returns the number after another one, with very different bits (the finaliser of SplitMix64).
pub(crate) fn drawn(state: u64) -> u64 {
    let a = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let b = (a ^ (a >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let c = (b ^ (b >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    c ^ (c >> 31)
}

/// Returns the bits of every buffer after a run, with the host's order drawn from a seed.
fn run<D: Device<Real = f32>>(
    device: &D,
    problem: &Problem,
    schedule: &Schedule,
    seed: u64,
) -> Vec<Vec<u32>> {
    try_run(device, problem, schedule, seed).unwrap()
}

/// Returns the bits of every buffer after a run; `None` where it ends with an error.
fn try_run<D: Device<Real = f32>>(
    device: &D,
    problem: &Problem,
    schedule: &Schedule,
    seed: u64,
) -> Option<Vec<Vec<u32>>> {
    let image = load(schedule, problem, &values::inputs(problem), 0.0);
    let mut memory = device.upload(image).unwrap();
    let mut state = seed;
    let mut choose = |ready: usize| {
        state = drawn(state);
        (state % ready as u64) as usize
    };
    execute(schedule, ExecutedPasses::Both, device, &mut memory, &mut choose).ok()?;
    let buffers = device.download(&mut memory).ok()?;
    let bits = |tensor: &GuardedTensor<f32>| tensor.values().iter().map(|x| x.to_bits()).collect();
    Some(buffers.tensors().iter().map(bits).collect())
}

fn cpu(problem: &Problem) -> Cpu<f32> {
    Cpu::new(Tiles { q: 4, kv: 8 }, problem.precision.p.format, problem.precision.ds.format)
}

#[test]
fn lanes_that_wait_as_they_are_told_give_the_bits_of_one_after_the_other() {
    let mut seen: BTreeMap<&str, u32> = BTreeMap::new();
    for (case, (problem, schedule)) in problems(1200).enumerate() {
        let want = run(&cpu(&problem), &problem, &schedule, 0);
        let behind = Behind { cpu: cpu(&problem), seed: case as u64 };
        assert_eq!(run(&behind, &problem, &schedule, case as u64), want, "{problem:?}");
        *seen.entry(problem.parallel.algorithm.name()).or_default() += 1;
    }
    assert!(seen.len() == 4 && seen.values().all(|&count| count >= 20), "too little run: {seen:?}");
}

/// Faults that remove waits from a ring, or from whatever has a collective.
const WITHOUT_WAITS: [&str; 3] =
    ["kv-read-before-it-arrives", "sent-before-it-is-made", "merge-before-its-turn"];
/// Faults that remove waits between the two steps of an all-gather.
const WITHOUT_WAITS_OF_STEPS: [&str; 3] =
    ["step-before-the-gather", "steps-not-joined", "gradients-added-at-once"];

#[test]
fn a_wait_that_a_schedule_lacks_shows() {
    for id in WITHOUT_WAITS.into_iter().chain(WITHOUT_WAITS_OF_STEPS) {
        let (fault, mut shown) = (faults::by_id(id).unwrap(), 0);
        for (case, (problem, right)) in problems(2_000).enumerate() {
            if shown == 3 {
                break;
            }
            let mut wrong = right.clone();
            if fault.plant(&problem, &mut wrong) {
                let want = run(&cpu(&problem), &problem, &right, 0);
                let behind = Behind { cpu: cpu(&problem), seed: case as u64 };
                // The host goes through the schedule in order of lanes, so only the device's order differs. A table that
                // is read before it is made ends the run.
                shown += usize::from(try_run(&behind, &problem, &wrong, 0) != Some(want));
            }
        }
        assert_eq!(shown, 3, "{id}");
    }
}

/// Returns the bits of a run on this number of streams of a GPU. The host's order is the same for all.
fn on_gpu(workspace: &Workspace, streams: usize, problem: &Problem, schedule: &Schedule) -> Vec<Vec<u32>> {
    run(&device(workspace, streams, problem), problem, schedule, 0)
}

/// Returns the device of a problem, with the simple kernels and this number of streams.
pub(crate) fn device<'w>(workspace: &'w Workspace, streams: usize, problem: &Problem) -> CudaDevice<'w> {
    let formats = WeightFormats { p: problem.precision.p.format, ds: problem.precision.ds.format };
    let (attention, dq) = (AttentionKernels::Simple, DqOrder::Fixed);
    workspace.device(
        formats,
        DeviceOptions {
            helpers: true,
            attention,
            codes: None,
            dq,
            walks: None,
            streams,
            blocks: None,
            page: None,
        },
    )
}

#[test]
#[ignore = "needs a Hopper GPU"]
fn streams_of_a_gpu_give_the_bits_of_one_and_show_a_wait_that_is_missing() {
    let gpu = Gpu::open(0, &Cache::of_user()).unwrap_or_else(|error| panic!("{error}"));
    let workspace = Workspace::new(gpu);
    let differs = |problem: &Problem, schedule: &Schedule| {
        on_gpu(&workspace, 1, problem, schedule) != on_gpu(&workspace, 16, problem, schedule)
    };
    for (problem, schedule) in on_kernels(1200) {
        assert!(!differs(&problem, &schedule), "{problem:?}");
    }
    for id in WITHOUT_WAITS {
        let (fault, mut shown) = (faults::by_id(id).unwrap(), 0);
        // A table that a GPU reads before it is made may say any row.
        let without_tables = |(_, right): &(Problem, Schedule)| !makes_tables(right);
        for (problem, right) in on_kernels(1200).filter(without_tables) {
            let mut wrong = right.clone();
            shown += usize::from(fault.plant(&problem, &mut wrong) && differs(&problem, &wrong));
        }
        assert!(shown > 0, "{id}");
    }
}
