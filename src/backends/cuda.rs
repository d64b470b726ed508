//! The kernels of this project on an H100 or H200 as a subject. It runs the schedule of a problem's own algorithm on
//! the CUDA device, with all ranks on one GPU.
//!
//! [`Cuda`] is the subject's declaration, and needs no CUDA: its table, its contract, its schedule, its partition of
//! sums. [`CudaRunner`] runs problems on one GPU, in a worker process ([`crate::worker`]). Attention runs on tensor
//! cores, with forwards in one of four shapes and backwards with dq summed in a fixed order or in any ([`DqOrder`]), or
//! on the simple kernels, whose sums are serial ([`AttentionKernels`]). The results of the simple kernels are bit for
//! bit those of the emulated kernel with tiles of [`KEY_TILE`] keys, and so are the results of all kernels on tables of
//! rows. For the tensor cores' sums the envelope has a bound but no replay. Tiles of [`KEY_TILE`] keys are the smallest
//! of all kernels, and so change the maximum at least as often as any.
//!
//! A mask is bands at every launch: documents and chunks are segments of their own, and a prefix is two bands
//! ([`CallTables`](seamproof_kernels::attend::CallTables)). A band may have sink tokens beside it. Keys in pages are read
//! through a block table by the simple kernel, and through runs of rows by those on tensor cores. Each step of a problem is
//! a launch of its own.

mod options;

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::sync::{Mutex, PoisonError};

use seamproof_kernels::KernelError;
use seamproof_kernels::attend::{KEY_TILE, WeightFormats};
use seamproof_kernels::backward::{DqOrder, KEYS_BY_TURNS, Walks};
use seamproof_kernels::cache::Cache;
use seamproof_kernels::device::{self, DeviceOptions, TileLaunch, Workspace};
use seamproof_kernels::forward::{AttentionKernels, Instance, LATENT_DIMS};
use seamproof_kernels::forward_fp8::Fp8Shape;
use seamproof_kernels::gpu::{self, Gpu, PLANNERS_LEAST};
use seamproof_kernels::source::sources;
use seamproof_lab::faults::{self, SourceFault};
use seamproof_oracle::envelope::{Accumulation, Partition};
use seamproof_oracle::replay::ReplayedLaunch;
use seamproof_oracle::{Algorithm, Form, Inputs, Problem};
use seamproof_simulator::emulated::Tiles;
use seamproof_simulator::schedule::{BuildError, MergeOrder, Schedule};

use options::FEW_BLOCKS;
pub(super) use options::{INSTANCE, draw_options};

use super::{CudaFp8, Emulated};
use crate::worker::{OpenError, Opened, Runner};
use seamproof_judge::finding::Phase;
use seamproof_judge::subject::{
    BACKWARD_ON_TENSOR_CORES, Backend, Declaration, FORWARD_ON_TENSOR_CORES, HeadDims, MaskKind, Outputs,
    Promises, RunError, SEVERAL_FOR_A_PLANNER, SEVERAL_IN_A_BLOCK, SEVERAL_LATE_TURNS, SEVERAL_TURNS, Sizes,
    Table, Way, Word,
};
use seamproof_judge::subjects::{
    Ranks, Reached, SubjectName, World, built, in_steps, launchable, run_on_threads, run_world,
};

/// Name of the subject, as `--backend` takes it.
pub(super) const NAME: &str = "cuda";
/// Tiles that sums are cut into. A query row is alone, and its sums over keys have one accumulator whose maximum
/// changes from tile to tile.
const TILES: Tiles = Tiles { q: 1, kv: KEY_TILE };

/// The subject's options, and its declaration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cuda {
    /// Seed of the order in which ranks and streams proceed. No order may change a bit.
    pub order: u64,
    /// Time at which a ring merges its steps.
    pub merge: MergeOrder,
    /// Whether kernels for packed slots run where they can. Otherwise kernels on tables of rows run everywhere.
    pub helpers: bool,
    /// Kernels that run forwards and backwards.
    pub attention: AttentionKernels,
    /// Order in which dq is summed on tensor cores. With `any`, gradient bits may vary between runs.
    pub dq: DqOrder,
    /// Walks of backwards on tensor cores, which then have the long form; `None` for the form and the walks that fit each
    /// call. Small problems have other forms of their own accord.
    pub walks: Option<Walks>,
    /// Number of CUDA streams that the schedule's streams run on. With 1 they run one after the other, in the order
    /// that is drawn.
    pub streams: usize,
    /// Most blocks of attention on tensor cores, each of which then has several tiles even of small problems, and plans of
    /// one warp; `None` for a block on each multiprocessor.
    pub blocks: Option<NonZeroUsize>,
    /// Manner in which ranks run. With threads, each stream of each rank is a CUDA stream, whatever `streams` is.
    pub ranks: Ranks,
    /// The instance of the kernels on tensor cores that all problems go to; `None` for all instances.
    pub instance: Option<Instance>,
}

impl Default for Cuda {
    fn default() -> Cuda {
        let (merge, attention) = (MergeOrder::default(), AttentionKernels::default());
        Cuda {
            order: 0,
            merge,
            helpers: true,
            attention,
            dq: DqOrder::Fixed,
            walks: None,
            streams: 1,
            blocks: None,
            ranks: Ranks::InTurn,
            instance: None,
        }
    }
}

/// Leaves problems of one instance of the kernels on tensor cores in a table. Of those with head dims up to 128 that
/// only the general instance takes, they are the ones whose head dims are no multiples of 8. Of wide heads values have over
/// 64 lanes, so that head dims are drawn from all that there are.
fn of_one_instance(table: &mut Table, instance: Instance) {
    let [most, most_v] = LATENT_DIMS;
    let dims = match instance {
        Instance::Narrow => [Sizes::multiples(8, 64, 8), Sizes::multiples(8, 64, 8)],
        Instance::Wide => [Sizes::multiples(72, 128, 8), Sizes::multiples(72, 128, 8)],
        Instance::General => [(); 2].map(|()| Sizes::new((1..=128).filter(|dim| dim % 8 > 0))),
        Instance::Widest => [Sizes::multiples(129, 256, 1), Sizes::multiples(65, 256, 1)],
        Instance::Latent => [Sizes::multiples(257, most, 1), Sizes::multiples(65, most_v, 1)],
    };
    let [qk, v] = dims.map(|dims| dims.expect("sizes that are named here"));
    table.dims = HeadDims { qk, v, ..table.dims };
    if matches!(instance, Instance::Narrow | Instance::Wide) {
        table.softcap = false;
        table.masks.kinds.retain(|kind| !matches!(kind, MaskKind::Prefix | MaskKind::SinkTokens));
    }
}

/// Returns the formats to which P and dS of a problem are rounded.
fn formats(problem: &Problem) -> WeightFormats {
    WeightFormats { p: problem.precision.p.format, ds: problem.precision.ds.format }
}

/// Returns the calls that a problem is made in: itself, where it has no steps.
pub(super) fn calls_of(problem: &Problem) -> Vec<Problem> {
    if problem.steps.is_empty() {
        return vec![problem.clone()];
    }
    problem.calls().into_iter().map(|call| call.problem).collect()
}

/// Returns the ways of launches on tensor cores in few blocks: of several tiles in a block, and of several segments for a
/// planner.
pub(super) fn ways_in(
    blocks: NonZeroUsize,
    launches: &[TileLaunch],
    [tiles, segments]: [Word; 2],
) -> [Way; 2] {
    let repeats = launches.iter().any(|launch| launch.repeats_in(blocks));
    let plans = launches.iter().any(|launch| launch.segments > PLANNERS_LEAST);
    [Way { name: tiles, taken: repeats }, Way { name: segments, taken: plans }]
}

/// A GPU that runs problems, one after the other. After an error of the driver it is useless.
#[derive(Debug)]
pub struct CudaRunner {
    workspace: Workspace,
}

impl Cuda {
    /// Returns the subject of one of many cases that are compared with its twin: the order of ranks, the merges, the
    /// streams, the helper kernels and the threads vary with the case.
    pub fn of_case(case: u64, problem: &Problem) -> Cuda {
        let subject = Cuda {
            order: case,
            merge: MergeOrder::WEIGHTED[(case % 2) as usize],
            helpers: !case.is_multiple_of(3),
            streams: 1 + 3 * ((case / 2 % 2) as usize),
            ranks: Ranks::ALL[usize::from(case.is_multiple_of(5))],
            ..Cuda::default()
        };
        subject.with_twins_bits(problem)
    }

    /// Returns the subject with the simple attention kernels, and with kernels for packed slots only where they give
    /// the twin's bits. Merges of those kernels take other steps to e^x and ln x than the CPU device, within the same
    /// bounds.
    pub fn with_twins_bits(self, problem: &Problem) -> Cuda {
        let helpers = self.helpers && self.partition(problem).merges.count == 0;
        Cuda { helpers, attention: AttentionKernels::Simple, ..self }
    }

    /// Returns the subject with every forward in the shape of this problem's. The bits of a sequence then depend
    /// neither on other sequences nor on the place of rows, since tiles follow from their sequence and from the
    /// shape. Returns `None` on several ranks and in several steps, whose launches may have shapes of their own, and
    /// where the launch goes to the simple kernels.
    pub fn in_shape_of(self, problem: &Problem) -> Option<Cuda> {
        if problem.parallel.algorithm != Algorithm::Single || !problem.steps.is_empty() {
            return None;
        }
        let schedule = self.schedule(problem).ok()?;
        match device::shapes(&schedule, formats(problem), self.attention).ok()?[..] {
            [Some(shape)] => Some(Cuda { attention: AttentionKernels::Of(shape), ..self }),
            _ => None,
        }
    }

    /// Returns for each forward launch of all calls what the blocks of a kernel on tensor cores share, and for each
    /// backward launch: `None` for one of the simple kernels. Nothing where a call has no schedule or a launch no
    /// tables, since it is refused.
    fn tile_launches(&self, problem: &Problem) -> Option<[Vec<Option<TileLaunch>>; 2]> {
        let mut launches = [Vec::new(), Vec::new()];
        for call in calls_of(problem) {
            let schedule = built(&call, self.merge).ok()?;
            let of_call = device::tile_launches(&schedule, formats(&call), self.attention).ok()?;
            launches.iter_mut().zip(of_call).for_each(|(launches, here)| launches.extend(here));
        }
        Some(launches)
    }

    /// Returns whether heads of a problem may walk up and down by turns, so that their numbers say in which order
    /// gradients are added up.
    pub(super) fn may_walk_by_turns(&self, problem: &Problem) -> bool {
        let lengths = problem.sequences.iter().map(|sequence| sequence.kv.len);
        // A segment may have keys of several sequences where these share some.
        let keys = if problem.sharing.is_empty() { lengths.max().unwrap_or(0) } else { lengths.sum() };
        let is_fitting = self.dq == DqOrder::Fixed && problem.group() == 1 && keys >= KEYS_BY_TURNS;
        self.walks.map_or(is_fitting, |walks| walks == Walks::ByTurns)
    }

    /// Returns the most blocks of attention where these are so few that small problems often have several tiles in one.
    pub(super) fn few_blocks(&self) -> Option<NonZeroUsize> {
        self.blocks.filter(|blocks| blocks.get() <= FEW_BLOCKS)
    }

    /// Returns the emulated kernel that gives the same bits as a subject from [`Cuda::with_twins_bits`].
    pub fn twin(&self) -> Emulated {
        Emulated { tiles: TILES, order: self.order, merge: self.merge, ..Emulated::default() }
    }
}

impl CudaRunner {
    /// Opens a GPU. The kernels come from the user's cache, or are compiled.
    pub fn open(ordinal: usize) -> Result<CudaRunner, KernelError> {
        Ok(CudaRunner::on(Gpu::open(ordinal, &Cache::of_user())?))
    }

    /// Takes over a GPU.
    pub fn on(gpu: Gpu) -> CudaRunner {
        CudaRunner { workspace: Workspace::new(gpu) }
    }

    /// Runs a problem. One with steps is run call by call, and all of these together reach each phase once.
    pub fn run(
        &mut self,
        subject: &Cuda,
        problem: &Problem,
        inputs: &Inputs,
        reached: &mut dyn FnMut(Phase),
    ) -> Result<Outputs, RunError> {
        if !problem.steps.is_empty() {
            [Phase::Uploaded, Phase::Launched].into_iter().for_each(&mut *reached);
            let outputs = in_steps(&Calls { subject: *subject, runner: Mutex::new(self) }, problem, inputs)?;
            reached(Phase::Done);
            return Ok(outputs);
        }
        let world = World::new(problem, |problem| launchable(problem, subject.merge))?;
        self.run_world(subject, None, (problem, inputs), &world, reached)
    }

    /// Runs the schedules of a world, with forwards in FP8 in this shape.
    pub(super) fn run_world(
        &mut self,
        subject: &Cuda,
        codes: Option<Fp8Shape>,
        (problem, inputs): (&Problem, &Inputs),
        world: &World,
        reached: &mut dyn FnMut(Phase),
    ) -> Result<Outputs, RunError> {
        let Cuda { order, helpers, attention, dq, walks, streams, blocks, ranks, .. } = *subject;
        let page = problem.pages.as_ref().map(|pages| pages.size);
        let options = DeviceOptions { helpers, attention, codes, dq, walks, streams, blocks, page };
        let device = self.workspace.device(formats(problem), options);
        let mut on_way = |stage: Reached| {
            reached(match stage {
                Reached::Uploaded => Phase::Uploaded,
                Reached::Launched => Phase::Launched,
            });
        };
        let outputs = match ranks {
            Ranks::InTurn => run_world(&device, problem, inputs, world, order, &mut on_way)?,
            Ranks::Threads => run_on_threads(&device, problem, inputs, world, order, &mut on_way)?,
        };
        reached(Phase::Done);
        Ok(outputs)
    }

    /// Returns the GPU's name.
    pub fn name(&self) -> Result<String, KernelError> {
        self.workspace.name()
    }

    /// Returns the GPU's name and UUID.
    pub fn identity(&self) -> Result<String, KernelError> {
        self.workspace.identity()
    }

    /// Returns how many launches the GPU was asked for.
    pub fn launches(&self) -> u64 {
        self.workspace.launches()
    }

    /// Returns how many operations of each kind went to which kernel.
    pub fn counts(&self) -> BTreeMap<&'static str, u64> {
        self.workspace.counts()
    }
}

/// A subject on a GPU that is open, for the calls of a problem in steps.
struct Calls<'a> {
    subject: Cuda,
    runner: Mutex<&'a mut CudaRunner>,
}

impl Backend for Calls<'_> {
    fn name(&self) -> &str {
        NAME
    }

    fn declaration(&self) -> Declaration {
        self.subject.declaration()
    }

    fn run(&self, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
        let mut runner = self.runner.lock().unwrap_or_else(PoisonError::into_inner);
        runner.run(&self.subject, problem, inputs, &mut |_| {})
    }
}

/// The kernels on a GPU: the GPU's ordinal, and the id of the fault in the kernels' sources.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) ordinal: usize,
    pub(super) fault: Option<&'static str>,
}

impl Place {
    fn open(self) -> Result<CudaRunner, KernelError> {
        let sources = match self.fault {
            None => Some(sources()),
            Some(id) => faults::by_id(id).and_then(|fault| fault.edit.sources()),
        };
        let sources =
            sources.ok_or_else(|| KernelError::Shape("the fault is about a text that is no more".into()))?;
        Ok(CudaRunner::on(Gpu::with_sources(self.ordinal, &Cache::of_user(), &sources)?))
    }
}

/// GPU of this process, which stays open while subjects come and go.
static GPU: Mutex<Option<(Place, CudaRunner)>> = Mutex::new(None);

/// Runs `work` on a GPU, and opens the GPU if it is not open.
fn on_gpu<T>(place: Place, work: impl FnOnce(&mut CudaRunner) -> T) -> Result<T, KernelError> {
    let mut gpu = GPU.lock().unwrap_or_else(PoisonError::into_inner);
    let open = gpu.take().filter(|(of, _)| *of == place);
    let (_, runner) = gpu.insert(match open {
        Some(open) => open,
        None => (place, place.open()?),
    });
    Ok(work(runner))
}

/// A subject whose kernels run on a GPU.
pub(super) trait Launched: Backend + Copy + 'static {
    /// Runs a problem that the subject takes.
    fn launch(
        &self,
        runner: &mut CudaRunner,
        problem: &Problem,
        inputs: &Inputs,
        reached: &mut dyn FnMut(Phase),
    ) -> Result<Outputs, RunError>;
}

impl Launched for Cuda {
    fn launch(
        &self,
        runner: &mut CudaRunner,
        problem: &Problem,
        inputs: &Inputs,
        reached: &mut dyn FnMut(Phase),
    ) -> Result<Outputs, RunError> {
        runner.run(self, problem, inputs, reached)
    }
}

/// A subject on a GPU, as a worker process holds it.
struct OnGpu<S> {
    subject: S,
    place: Place,
}

impl<S: Launched> Runner for OnGpu<S> {
    fn run(
        &mut self,
        problem: &Problem,
        inputs: &Inputs,
        reached: &mut dyn FnMut(Phase),
    ) -> Result<Outputs, RunError> {
        // What no kernel takes must not reach one.
        self.subject.declaration().table.check(problem)?;
        on_gpu(self.place, |runner| self.subject.launch(runner, problem, inputs, reached))
            .unwrap_or_else(|error| Err(RunError::Infrastructure(error.to_string())))
    }
}

/// Returns the fault that the name of a subject plants in the kernels; `None` for a name that belongs to no subject
/// on a GPU.
fn fault_of(name: &SubjectName) -> Option<Option<&'static SourceFault>> {
    fault_in(name, NAME)
}

/// Returns the fault that a name plants in the kernels of the subject `base`; `None` for a name of another subject.
pub(super) fn fault_in(name: &SubjectName, base: &str) -> Option<Option<&'static SourceFault>> {
    match name.planted.as_deref() {
        _ if name.base != base => None,
        None => Some(None),
        Some(id) => faults::by_id(id).map(Some),
    }
}

/// Returns the bug that the fault in a subject's name imitates, where the fault is in the kernels.
pub(super) fn imitated(name: &SubjectName) -> Option<&'static str> {
    Some(fault_of(name).or_else(|| fault_in(name, CudaFp8::NAME))??.imitates)
}

/// Whether the kernels of a subject of this name run on a GPU.
pub(super) fn is_named(name: &SubjectName) -> bool {
    fault_of(name).is_some()
}

/// Opens a subject on a GPU. An error says that there is no GPU before any case runs.
pub(super) fn open(name: &SubjectName, ordinal: usize) -> Result<Opened, OpenError> {
    let subject = Cuda::from_options(&name.options).map_err(|error| OpenError(error.to_string()))?;
    let fault = fault_of(name).ok_or_else(|| OpenError(format!("{name} is no subject on a GPU")))?;
    let place = Place { ordinal, fault: fault.map(|fault| fault.id) };
    opened(subject, place)
}

/// Opens a GPU, and makes the runner of a subject on it.
pub(super) fn opened(subject: impl Launched, place: Place) -> Result<Opened, OpenError> {
    let said = |error: KernelError| OpenError(error.to_string());
    let name = on_gpu(place, |runner| runner.identity()).and_then(|name| name).map_err(said)?;
    let devices = gpu::count().map_err(said)?;
    Ok(Opened { runner: Box::new(OnGpu { subject, place }), devices, name })
}

/// Runs a problem on this process's first GPU.
pub(super) fn run_here(
    subject: impl Launched,
    problem: &Problem,
    inputs: &Inputs,
) -> Result<Outputs, RunError> {
    let place = Place { ordinal: 0, fault: None };
    OnGpu { subject, place }.run(problem, inputs, &mut |_| {})
}

impl Backend for Cuda {
    fn name(&self) -> &str {
        NAME
    }

    fn declaration(&self) -> Declaration {
        let mut twin = self.twin().declaration();
        // The kernels read first rows and lengths.
        twin.table.forms = vec![Form::CuSeqlens];
        if self.attention != AttentionKernels::Simple {
            // Tensor cores multiply P and dS in the format of their other operand.
            twin.table.precisions.retain(|precision| [precision.p, precision.ds] == [precision.q; 2]);
        }
        if let Some(instance) = self.instance {
            of_one_instance(&mut twin.table, instance);
        }
        match self.attention {
            AttentionKernels::Simple => twin
                // Where partial results are merged, the steps between all rows decide which kernel does it, and the two
                // take other steps to e^x.
                .with_promises(Promises { sequences_alone: !self.helpers, ..Promises::ALL })
                .with_accumulation(Accumulation::F32Serial),
            AttentionKernels::Tuned | AttentionKernels::Of(_) => twin
                // All sequences of a call and their places decide which kernel takes it, and in which shape.
                .with_promises(Promises {
                    deterministic_backward: self.dq == DqOrder::Fixed,
                    sequences_alone: false,
                    // Tiles of keys add to dq downward for a group, but upward, around or by turns for a head alone.
                    groups_alone: false,
                    rows_alone: false,
                    ..Promises::ALL
                })
                // A call that the tensor cores' kernels do not take goes to the simple ones.
                .with_accumulation(Accumulation::Unknown),
        }
    }

    /// Returns the declared promises. The simple kernels take merges of packed sequences in other steps than other
    /// merges: where nothing is merged, sequences stand alone. Where the tuned kernels' heads walk by turns, a head's
    /// number says in which order gradients are added up.
    fn promises(&self, problem: &Problem) -> Promises {
        let declared = self.declaration().promises.of_schedule(problem);
        let merges = matches!(problem.parallel.algorithm, Algorithm::Ring | Algorithm::Hierarchical { .. });
        let is_simple = self.attention == AttentionKernels::Simple;
        Promises {
            sequences_alone: declared.sequences_alone || is_simple && !merges,
            heads_alone: declared.heads_alone && (is_simple || !self.may_walk_by_turns(problem)),
            ..declared
        }
    }

    fn partition(&self, problem: &Problem) -> Partition {
        let single = Partition::single(TILES.q, TILES.kv);
        built(problem, self.merge).map_or(single, |schedule| schedule.partition(TILES))
    }

    fn schedule(&self, problem: &Problem) -> Result<Schedule, BuildError> {
        built(problem, self.merge).map(|schedule| (*schedule).clone())
    }

    fn launches(&self, problem: &Problem) -> Option<Vec<ReplayedLaunch>> {
        let schedule = built(problem, self.merge).ok()?;
        // Tiles of the kernels on tensor cores depend on the shape of the whole launch.
        let is_simple = self.attention == AttentionKernels::Simple
            || self.tile_launches(problem)?.concat().iter().all(Option::is_none);
        if is_simple { schedule.launches(problem, None) } else { None }
    }

    /// Returns the ways as the device decides them: by the schedule's launches.
    fn ways(&self, problem: &Problem) -> Vec<Way> {
        if self.attention == AttentionKernels::Simple {
            return Vec::new();
        }
        let launches = self.tile_launches(problem).unwrap_or_default();
        let turns: Vec<usize> =
            launches[1].iter().map(|launch| launch.map_or(0, |launch| launch.turns)).collect();
        let passes = [FORWARD_ON_TENSOR_CORES, BACKWARD_ON_TENSOR_CORES].into_iter().zip(&launches);
        let passes = passes.filter(|(_, launches)| !launches.is_empty());
        // A subject of one instance is asked for no way that none of its problems has.
        let has_backward = self.instance != Some(Instance::Latent);
        let passes = passes.filter(|(name, _)| *name == FORWARD_ON_TENSOR_CORES || has_backward);
        let mut ways: Vec<Way> =
            passes.map(|(name, launches)| Way { name, taken: !launches.contains(&None) }).collect();
        let launches: Vec<TileLaunch> = launches.into_iter().flatten().flatten().collect();
        if let Some(blocks) = self.few_blocks() {
            ways.extend(ways_in(blocks, &launches, [SEVERAL_IN_A_BLOCK, SEVERAL_FOR_A_PLANNER]));
        }
        if self.walks.is_some() && !turns.is_empty() && has_backward {
            let several = turns.iter().any(|&turns| turns > 1);
            let instance = Instance::of_bands(&problem.softmax, [problem.dims.qk, problem.dims.v]);
            ways.push(Way { name: SEVERAL_TURNS, taken: several });
            if self.instance.is_none_or(|only| only == Instance::Wide) {
                ways.push(Way { name: SEVERAL_LATE_TURNS, taken: several && instance == Instance::Wide });
            }
        }
        ways
    }

    /// Runs the problem on this process's first GPU. A campaign's supervisor has no GPU, and runs the subject in
    /// workers.
    fn run(&self, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
        run_here(*self, problem, inputs)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;

    use seamproof_judge::asked::Asked;
    use seamproof_judge::case::Case;
    use seamproof_judge::census::{Census, Floors};
    use seamproof_judge::generate::Profile;
    use seamproof_judge::{files, values};

    use super::*;

    /// Returns the problems of the stored cases.
    fn stored() -> impl Iterator<Item = Problem> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus/regressions");
        let paths = files::list(&folder).unwrap().into_iter();
        paths.map(|path| Case::load(&path).unwrap().problem)
    }

    /// Test that stored cases of documents, chunks, prefixes and sink tokens are among those that the subject takes, and
    /// that those with rows of one step go to tensor cores.
    #[test]
    fn stored_masks_that_are_no_bands_are_taken() {
        let table = Cuda::default().declaration().table;
        let masks: Vec<Problem> = stored().filter(|problem| !problem.mask.is_band()).collect();
        assert!(masks.iter().filter(|problem| problem.mask.prefix > 0).count() >= 3);
        assert!(masks.iter().filter(|problem| problem.mask.blocks.is_some()).count() >= 4);
        let keeps = |problem: &Problem| problem.mask.left.is_some() && problem.mask.sink_tokens > 0;
        assert!(masks.iter().filter(|problem| keeps(problem)).count() >= 4);
        let tuned = Cuda { attention: AttentionKernels::Tuned, ..Cuda::default() };
        let apart =
            |problem: &Problem| problem.sequences.iter().any(|both| both.q.step.max(both.kv.step) > 1);
        assert!(masks.iter().filter(|problem| !apart(problem)).count() >= 11);
        for problem in masks {
            assert_eq!(table.refusal(&problem), None, "{problem:?}");
            let launches = tuned.tile_launches(&problem).expect("tables of every launch");
            assert!(!launches.concat().contains(&None) || apart(&problem), "{problem:?}");
        }
    }

    /// Test that floors follow the options that are drawn: five campaigns in six are of kernels that leave P in f32 out.
    #[test]
    fn a_campaign_meets_the_floors_of_the_options_that_it_draws() {
        let declaration = |seed: u64| Cuda::from_options(&draw_options(seed)).unwrap().declaration();
        let asked = |index: u64| Asked::drawn(5, index, &Profile::Quick.limits(), &declaration(index + 9000));
        let mut census = Census::default();
        (0..3000).for_each(|index| census.add_asked(&asked(index)));
        assert_eq!(census.below(&Floors::of_each(Profile::Quick, declaration)), []);
        let simple = Cuda { attention: AttentionKernels::Simple, ..Cuda::default() };
        assert_ne!(census.below(&Floors::of(&simple.declaration(), Profile::Quick)), []);
    }

    /// Test that a problem outside the table never reaches a GPU: it is refused where there is none.
    #[test]
    fn what_the_table_refuses_reaches_no_gpu() {
        let table = Cuda::default().declaration().table;
        let refused: Vec<Problem> = stored().filter(|problem| table.refusal(problem).is_some()).collect();
        assert!(!refused.is_empty(), "forms are among the stored cases");
        for problem in refused {
            let ran = Cuda::default().run(&problem, &values::inputs(&problem));
            assert!(matches!(ran, Err(RunError::Refused(_))), "{ran:?}");
        }
    }

    /// Test that every problem of a subject with one instance goes to that instance, and that the backward's long form
    /// then often has several turns, whose dQ is a turn late with over 64 lanes.
    #[test]
    fn problems_of_one_instance_go_to_it() {
        for instance in Instance::ALL {
            let subject =
                Cuda { attention: AttentionKernels::Tuned, instance: Some(instance), ..Cuda::default() };
            let subject = Cuda { walks: Some(Walks::Down), ..subject };
            let declaration = subject.declaration();
            let drawn = |index| Asked::drawn(6, index, &Profile::Quick.limits(), &declaration).inside();
            let problems: Vec<Problem> = (0..400).filter_map(drawn).collect();
            let dims = |problem: &Problem| [problem.dims.qk, problem.dims.v];
            assert!(problems.len() > 300);
            assert!(
                problems.iter().all(|one| Instance::of_bands(&one.softmax, dims(one)) == instance),
                "{instance:?}"
            );
            let share = |what: &dyn Fn(&Problem) -> bool| {
                problems.iter().filter(|one| what(one)).count() * 100 / problems.len()
            };
            if instance.dim() > 64 {
                let all: BTreeSet<[usize; 2]> = problems.iter().map(dims).collect();
                assert!(all.len() > 40, "{instance:?}: {all:?}");
            }
            if instance == Instance::Latent {
                let whole = share(&|one| one.dims.qk > 512 && one.dims.v > 256);
                let by_engine = share(&|one| dims(one).iter().all(|dim| dim.is_multiple_of(8)));
                let several = share(&|one| one.sequences.iter().any(|both| both.kv.len > 3 * 32));
                assert!(whole > 20 && by_engine > 30 && several > 5, "{whole} {by_engine} {several} %");
            }
            let late = |way: &Way| way.name == SEVERAL_LATE_TURNS && way.taken;
            let lates = problems.iter().filter(|one| subject.ways(one).iter().any(late)).count();
            assert_eq!(lates > 40, instance == Instance::Wide, "{lates}");
        }
    }

    /// Test that campaigns ask for the long form of the backward in half of the cases, in each walk alike.
    #[test]
    fn campaigns_draw_the_long_form() {
        let mut drawn = BTreeMap::<String, usize>::new();
        for seed in 0..6000 {
            *drawn.entry(draw_options(seed)["walks"].clone()).or_default() += 1;
        }
        assert!(drawn["fitting"].abs_diff(3000) < 200, "{drawn:?}");
        assert!(Walks::ALL.iter().all(|walks| drawn[walks.name()].abs_diff(1000) < 150), "{drawn:?}");
    }
}
