//! The forward and the backward of this project in FP8 on an H100 or H200 as a subject: the schedule of a problem's own
//! algorithm, on the CUDA device with all ranks on one GPU, with codes of e4m3 in q, k and v, and of e4m3 or e5m2 in dout.
//! Turned copies are made on the GPU, before each launch.
//!
//! What it declares is what `emulated-fp8` declares: weights that are multiplied by 2⁸ and rounded to e4m3, the row's
//! sum of unrounded ones, dS that is multiplied by a factor of its tile, and sums of tensor cores that are promoted after
//! four steps. In the forward blocks of keys begin with a group of 16 rows of the tensor, so that the bits of a sequence
//! depend on its place.

use std::num::NonZeroUsize;

use seamproof_kernels::backward::DqOrder;
use seamproof_kernels::backward_fp8;
use seamproof_kernels::device;
use seamproof_kernels::forward_fp8::{self, DIM_MULTIPLE, Fp8Shape};
use seamproof_oracle::envelope::Partition;
use seamproof_oracle::replay::ReplayedLaunch;
use seamproof_oracle::{Inputs, Problem};
use seamproof_simulator::emulated::Tiles;
use seamproof_simulator::schedule::{BuildError, KeyBlocks, Schedule};

use super::Cuda;
use super::cuda::{self, CudaRunner, Launched, Place, fault_in, opened, run_here};
use crate::worker::{OpenError, Opened};
use seamproof_judge::finding::Phase;
use seamproof_judge::subject::{
    Backend, Declaration, MaskKind, Outputs, Promises, RunError, SEVERAL_FOR_A_PLANNER_FP8,
    SEVERAL_IN_A_BLOCK_FP8, Sizes, Way,
};
use seamproof_judge::subjects::{Fp8, OptionError, Options, SubjectName, World, descaled};

/// Tiles that no block of keys is smaller than, but for the first and the last of a run.
const TILES: Tiles = Tiles { q: 64, kv: 64 };
/// Blocks of keys, and the groups of rows that they begin with.
const BLOCKS: KeyBlocks = KeyBlocks { rows: 128, group: 16 };
/// Steps of the tensor core in a block of keys.
const STEPS: NonZeroUsize = NonZeroUsize::new(4).unwrap();
/// Options of the kernels in 16 bits that say nothing here.
const FOREIGN: [&str; 2] = ["attention", cuda::INSTANCE];
/// Option of the passes that the subject has, and its values.
const PASS: &str = "pass";
const PASSES: [&str; 2] = ["forward", "both"];
/// Option of the forward's shape, and its values.
const SHAPE: &str = "attention";
const SHAPES: [&str; 3] = ["tuned", "long", "short"];

/// The subject's options, and its declaration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CudaFp8 {
    /// Shape of the forward; `None` for the one that fits the call.
    pub shape: Option<Fp8Shape>,
    /// Whether there is a backward. Then dout and dS are in FP8 too.
    pub backward: bool,
    /// How the schedule runs, as that of a subject in 16 bits: order, merges, helper kernels, streams, ranks, the order of
    /// dq, and blocks.
    pub scheduled: Cuda,
}

impl CudaFp8 {
    /// Name of the subject, as `--backend` takes it.
    pub const NAME: &str = "cuda-fp8";

    /// Returns the subject with the options `attention` (`tuned`, `long` or `short`; the default is `tuned`), `pass`
    /// (`forward` or `both`; the default is `forward`), and `order`, `merge`, `helpers`, `dq`, `walks`, `streams`,
    /// `blocks` and `ranks` as the subject `cuda` has them.
    pub fn from_options(options: &Options) -> Result<CudaFp8, OptionError> {
        let mut options = options.clone();
        let wrong = |option: &str, value, expected| OptionError::Value {
            backend: CudaFp8::NAME,
            option: option.to_owned(),
            value,
            expected,
        };
        let backward = match options.remove(PASS) {
            None => false,
            Some(value) if PASSES.contains(&value.as_str()) => value == PASSES[1],
            Some(value) => return Err(wrong(PASS, value, "forward or both")),
        };
        let shape = match options.remove(SHAPE) {
            None => None,
            Some(value) => {
                let shape = Fp8Shape::ALL.into_iter().find(|shape| shape.name() == value);
                if shape.is_none() && value != SHAPES[0] {
                    return Err(wrong(SHAPE, value, "tuned, long or short"));
                }
                shape
            }
        };
        if options.contains_key(cuda::INSTANCE) {
            return Err(unknown(cuda::INSTANCE.to_owned()));
        }
        let scheduled = Cuda::from_options(&options).map_err(|error| match error {
            OptionError::Unknown { option, .. } => unknown(option),
            OptionError::Value { option, value, expected, .. } => {
                OptionError::Value { backend: CudaFp8::NAME, option, value, expected }
            }
            other => other,
        })?;
        Ok(CudaFp8 { shape, backward, scheduled })
    }

    /// Returns the options from which [`CudaFp8::from_options`] makes this subject.
    pub(super) fn options(&self) -> Options {
        let pass = PASSES[usize::from(self.backward)];
        of_schedule(self.scheduled.options(), self.shape.map_or(SHAPES[0], Fp8Shape::name), pass)
    }

    /// Returns options for one case of a campaign.
    pub(super) fn draw_options(seed: u64) -> Options {
        let pick = |of: &[&'static str], number: u64| {
            of[(seamproof_judge::hash::mix(seed ^ number) % of.len() as u64) as usize]
        };
        of_schedule(cuda::draw_options(seed), pick(&SHAPES, 0), pick(&PASSES, 1))
    }
}

impl CudaFp8 {
    /// Returns the emulated kernel of the same sums, in tiles that none of this one's is smaller than.
    fn emulated(&self) -> Fp8 {
        let Cuda { merge, order, .. } = self.scheduled;
        let backward = self.backward;
        Fp8 { tiles: TILES, promoted_after: Some(STEPS), merge, order, backward, ..Fp8::default() }
    }
}

/// Returns the options of a schedule in 16 bits, with what says nothing in FP8 left out, and with this shape and these
/// passes.
fn of_schedule(mut options: Options, shape: &str, pass: &str) -> Options {
    FOREIGN.iter().for_each(|option| drop(options.remove(*option)));
    options.insert(SHAPE.into(), shape.into());
    options.insert(PASS.into(), pass.into());
    options
}

fn unknown(option: String) -> OptionError {
    let known = "attention, pass, order, merge, helpers, dq, walks, streams, blocks, ranks";
    OptionError::Unknown { backend: CudaFp8::NAME, option, known }
}

impl Launched for CudaFp8 {
    fn launch(
        &self,
        runner: &mut CudaRunner,
        problem: &Problem,
        inputs: &Inputs,
        reached: &mut dyn FnMut(Phase),
    ) -> Result<Outputs, RunError> {
        let world = World::new(problem, |problem| descaled(problem, inputs, self.scheduled.merge))?;
        runner.run_world(&self.scheduled, self.shape, (problem, inputs), &world, reached)
    }
}

/// Whether the kernel of a subject of this name runs on a GPU.
pub(super) fn is_named(name: &SubjectName) -> bool {
    fault_in(name, CudaFp8::NAME).is_some()
}

/// Opens the subject on a GPU. An error says that there is no GPU before any case runs.
pub(super) fn open(name: &SubjectName, ordinal: usize) -> Result<Opened, OpenError> {
    let subject = CudaFp8::from_options(&name.options).map_err(|error| OpenError(error.to_string()))?;
    let fault = fault_in(name, CudaFp8::NAME).flatten().map(|fault| fault.id);
    opened(subject, Place { ordinal, fault })
}

impl Backend for CudaFp8 {
    fn name(&self) -> &str {
        CudaFp8::NAME
    }

    fn declaration(&self) -> Declaration {
        let mut declared = self.emulated().declaration();
        let table = &mut declared.table;
        let dim_max = if self.backward { backward_fp8::DIM_MAX } else { forward_fp8::DIM_MAX };
        let sizes = Sizes::multiples(DIM_MULTIPLE, dim_max, DIM_MULTIPLE);
        if let Ok(sizes) = sizes {
            table.dims.qk = sizes.clone();
            table.dims.v = sizes;
        }
        table.softcap = false;
        // Documents and chunks are segments of their own.
        table.masks.kinds = vec![MaskKind::Documents, MaskKind::Chunks];
        table.layout.steps = false;
        let deterministic_backward = self.scheduled.dq == DqOrder::Fixed;
        // Tiles of keys add to dq downward for a group, but upward or by turns for a head alone.
        let groups_alone = !self.backward;
        let promises = Promises { sequences_alone: false, rows_alone: false, ..Promises::ALL };
        declared.with_promises(Promises { deterministic_backward, groups_alone, ..promises })
    }

    fn promises(&self, problem: &Problem) -> Promises {
        let declared = self.declaration().promises.of_schedule(problem);
        let by_turns = self.backward && self.scheduled.may_walk_by_turns(problem);
        Promises { heads_alone: declared.heads_alone && !by_turns, ..declared }
    }

    fn partition(&self, problem: &Problem) -> Partition {
        self.emulated().partition(problem)
    }

    fn launches(&self, problem: &Problem) -> Option<Vec<ReplayedLaunch>> {
        let forward = problem.forward();
        self.schedule(&forward).ok()?.launches(&forward, Some(BLOCKS))
    }

    fn schedule(&self, problem: &Problem) -> Result<Schedule, BuildError> {
        self.emulated().schedule(problem)
    }

    /// Returns the ways as the device decides them: by the schedule's launches. All of them run on tensor cores.
    fn ways(&self, problem: &Problem) -> Vec<Way> {
        let Some(blocks) = self.scheduled.few_blocks() else { return Vec::new() };
        let launches = cuda::calls_of(problem).into_iter().map(|call| {
            let schedule = self.schedule(&call).ok()?;
            device::tile_launches_fp8(&schedule, self.shape).ok()
        });
        let Some(launches) = launches.collect::<Option<Vec<_>>>() else { return Vec::new() };
        let names = [SEVERAL_IN_A_BLOCK_FP8, SEVERAL_FOR_A_PLANNER_FP8];
        cuda::ways_in(blocks, &launches.concat().concat(), names).into()
    }

    /// Runs the problem on this process's first GPU. A campaign's supervisor has no GPU, and runs the subject in
    /// workers.
    fn run(&self, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
        run_here(*self, problem, inputs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use seamproof_judge::generate::{self, Draw, Limits};
    use seamproof_judge::values;
    use seamproof_kernels::attend::CallTables;
    use seamproof_kernels::backward_fp8;
    use seamproof_simulator::schedule::{AttendBackward, Buffer, BufferId, Work};

    fn drawn() -> impl Iterator<Item = Problem> {
        (0..200).filter_map(|case| match generate::draw(1, case, &Limits::quick()) {
            Draw::Problem(problem) => Some(problem),
            _ => None,
        })
    }

    /// Test that a problem outside the table never reaches a GPU: it is refused where there is none.
    #[test]
    fn what_the_table_refuses_reaches_no_gpu() {
        let subject = CudaFp8::default();
        let table = subject.declaration().table;
        let refused: Vec<Problem> = drawn().filter(|problem| table.refusal(problem).is_some()).collect();
        assert!(refused.len() > 100);
        for problem in refused {
            let ran = subject.run(&problem, &values::inputs(&problem));
            assert!(matches!(ran, Err(RunError::Refused(_))), "{ran:?}");
        }
    }

    /// Test that the kernels take every launch of the schedules of what the table takes, on one rank and on several, and
    /// that each segment with queries is told a descale for each of its heads.
    #[test]
    fn the_kernel_takes_every_launch_of_what_the_table_takes() {
        let (mut launches, mut backwards, mut over_ranks) = (0, 0, 0);
        for (case, problem) in drawn().enumerate() {
            let options = CudaFp8::draw_options(case as u64);
            let subject = CudaFp8::from_options(&options).expect("drawn options");
            let problem = subject.declaration().table.fitted(problem);
            let inputs = values::inputs(&problem);
            let schedule = descaled(&problem, &inputs, subject.scheduled.merge).expect("a schedule");
            for operation in schedule.ranks.iter().flat_map(|rank| &rank.operations) {
                let buffer = |id: BufferId| &schedule.buffers[id.0];
                if let Work::AttendBackward(attend) = &operation.work {
                    backwards += usize::from(taken_backward(attend, buffer));
                    continue;
                }
                let Work::Attend(attend) = &operation.work else { continue };
                let [q, k, v, out] = [attend.q, attend.k, attend.v, attend.out].map(buffer);
                let tables = CallTables::new(&attend.call, [q.rows, k.rows], false).expect("tables");
                let refused = forward_fp8::refusal(&tables, out.format, [q.dim, v.dim]);
                assert_eq!(refused, None, "{problem:?}");
                assert_eq!(tables.bands_of_queries(), attend.descales.len(), "{problem:?}");
                for (segment, descales) in attend.call.segments.iter().zip(&attend.descales) {
                    assert!(segment.q.len == 0 || descales.len() == q.heads, "{problem:?}");
                }
                launches += 1;
                over_ranks += usize::from(problem.parallel.size() > 1);
            }
        }
        assert!(
            launches > 200 && backwards > 80 && over_ranks > 100,
            "{launches}, {backwards}, {over_ranks}"
        );
    }

    /// Whether the kernel takes a launch of a backward. Fails where it does not.
    fn taken_backward<'b>(attend: &AttendBackward, buffer: impl Fn(BufferId) -> &'b Buffer) -> bool {
        let [q, k, v, dout] = [attend.q, attend.k, attend.v, attend.dout].map(&buffer);
        let [out, dq, dk, dv] = [attend.out, attend.dq, attend.dk, attend.dv].map(|id| buffer(id).format);
        let tables = CallTables::new(&attend.call, [q.rows, k.rows], true).expect("tables");
        let formats = ([q, k, v, dout].map(|buffer| buffer.format), out, [dq, dk, dv]);
        assert_eq!(backward_fp8::refusal(&tables, formats, [q.dim, v.dim]), None, "{attend:?}");
        assert_eq!(tables.bands_of_queries(), attend.descales.len(), "{attend:?}");
        true
    }

    #[test]
    fn options_are_those_of_the_shapes() {
        for name in ["tuned", "long", "short"] {
            let subject = CudaFp8::from_options(&Options::from([("attention".into(), name.into())])).unwrap();
            assert_eq!(subject.options()["attention"], name);
        }
        let wrong = CudaFp8::from_options(&Options::from([("attention".into(), "middle".into())]));
        assert!(wrong.unwrap_err().to_string().contains("tuned, long or short"));
        let wrong = CudaFp8::from_options(&Options::from([("pass".into(), "backward".into())]));
        assert!(wrong.unwrap_err().to_string().contains("forward or both"));
        let given = Options::from([("merge".into(), "deferred".into()), ("ranks".into(), "threads".into())]);
        let subject = CudaFp8::from_options(&given).unwrap();
        assert!(given.iter().all(|(option, value)| subject.options()[option] == *value));
        let wrong = CudaFp8::from_options(&Options::from([("merge".into(), "never".into())]));
        assert!(wrong.unwrap_err().to_string().contains(CudaFp8::NAME));
    }
}
