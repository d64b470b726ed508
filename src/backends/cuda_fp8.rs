//! The forward of this project in FP8 on an H100 or H200 as a subject: one launch on codes of e4m3 with descales, and
//! before it the kernel that makes v's turned copy.
//!
//! What it declares is what `emulated-fp8` declares: weights that are multiplied by 2⁸ and rounded to e4m3, the row's
//! sum of unrounded ones, and sums of tensor cores that are promoted after four steps. Blocks of keys begin with a
//! group of 16 rows of the tensor, so that the bits of a sequence depend on its place.

use std::num::NonZeroUsize;

use seamproof_kernels::KernelError;
use seamproof_kernels::forward_fp8::{DIM_MULTIPLE, Fp8Shape};
use seamproof_oracle::envelope::Partition;
use seamproof_oracle::{Format, Inputs, Problem};
use seamproof_simulator::emulated::{ForwardLaunch, Tiles};
use seamproof_simulator::schedule::Descales;
use seamproof_simulator::{AttentionCall, GuardedTensor};

use super::cuda::{CudaRunner, Launched, Place, fault_in, opened, run_here};
use crate::worker::{OpenError, Opened};
use seamproof_judge::finding::Phase;
use seamproof_judge::subject::{
    Backend, Costs, Declaration, Outputs, Parallelism, Promises, RankOutputs, RunError, Sizes,
};
use seamproof_judge::subjects::{Fp8, OptionError, Options, SubjectName};
use seamproof_kernels::forward::DIM_MAX;

/// Tiles that no block of keys is smaller than, but for the first and the last of a run.
const TILES: Tiles = Tiles { q: 64, kv: 64 };
/// Steps of the tensor core in a block of keys.
const STEPS: NonZeroUsize = NonZeroUsize::new(4).unwrap();

/// The subject's options, and its declaration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CudaFp8 {
    /// Shape of the forward; `None` for the one that fits the call.
    pub shape: Option<Fp8Shape>,
}

impl CudaFp8 {
    /// Name of the subject, as `--backend` takes it.
    pub const NAME: &str = "cuda-fp8";

    /// Returns the subject with the option `attention` (`tuned`, `long` or `short`; the default is `tuned`).
    pub fn from_options(options: &Options) -> Result<CudaFp8, OptionError> {
        let mut subject = CudaFp8::default();
        for (option, value) in options {
            if option != "attention" {
                let known = "attention";
                return Err(OptionError::Unknown { backend: CudaFp8::NAME, option: option.clone(), known });
            }
            let shape = Fp8Shape::ALL.into_iter().find(|shape| shape.name() == value);
            if shape.is_none() && value != "tuned" {
                return Err(OptionError::Value {
                    backend: CudaFp8::NAME,
                    option: option.clone(),
                    value: value.clone(),
                    expected: "tuned, long or short",
                });
            }
            subject.shape = shape;
        }
        Ok(subject)
    }

    /// Returns the options from which [`CudaFp8::from_options`] makes this subject.
    pub(super) fn options(&self) -> Options {
        let shape = self.shape.map_or("tuned", Fp8Shape::name);
        Options::from([("attention".into(), shape.into())])
    }

    /// Returns options for one case of a campaign.
    pub(super) fn draw_options(seed: u64) -> Options {
        let names = ["tuned", "long", "short"];
        let drawn = seamproof_judge::hash::mix(seed) % names.len() as u64;
        Options::from([("attention".into(), names[drawn as usize].into())])
    }

    fn attend(&self, runner: &CudaRunner, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
        let call = AttentionCall::whole(problem);
        let segments = call.segments.len();
        if segments != problem.sequences.len() {
            let what = format!("{segments} segments for {} sequences", problem.sequences.len());
            return Err(RunError::Crash(what));
        }
        let descales = descales_of(problem, inputs);
        let tensor = |name, values: &ndarray::Array3<f32>| {
            GuardedTensor::from_array(name, values.view(), Format::E4m3)
        };
        let (q, k, v) = (tensor("q", &inputs.q), tensor("k", &inputs.k), tensor("v", &inputs.v));
        let mut out = GuardedTensor::unwritten("out", problem.out_shape(), problem.precision.out.format);
        let [heads, rows] = problem.lse_shape();
        let mut lse = GuardedTensor::unwritten("lse", [heads, rows, 1], Format::F32);
        let mut max_logit = GuardedTensor::unwritten("max_logit", [heads, 1, 1], Format::F32);
        max_logit.values_mut().fill(f32::NEG_INFINITY);
        let launch = ForwardLaunch {
            q: &q,
            k: &k,
            v: &v,
            sink: inputs.sink.as_slice().unwrap_or(&[]),
            descales: &descales,
            out: &mut out,
            lse: &mut lse,
            max_logit: &mut max_logit,
        };
        runner.attend_fp8(&call, self.shape, launch).map_err(failed)?;
        let outputs = RankOutputs {
            out: out.to_array3(),
            lse: Some(lse.to_array2()),
            max_logit: Some(max_logit.values().iter().copied().collect()),
            gradients: None,
        };
        let damage = [&out, &lse, &max_logit].into_iter().flat_map(GuardedTensor::damage).collect();
        Ok(Outputs { damage, costs: Costs::default(), ..outputs.into() })
    }
}

/// Returns the descales of each sequence and query head. Each scaling of the table has one for all rows.
fn descales_of(problem: &Problem, inputs: &Inputs) -> Vec<Vec<Descales>> {
    let of_head = |sequence, head| Descales::of(&inputs.scales, sequence, head, head / problem.group());
    let of_sequence = |sequence| (0..problem.heads.q).map(|head| of_head(sequence, head)).collect();
    (0..problem.sequences.len()).map(of_sequence).collect()
}

fn failed(error: KernelError) -> RunError {
    match error {
        error @ KernelError::OutOfMemory { .. } => RunError::OutOfMemory(error.to_string()),
        error => RunError::Crash(error.to_string()),
    }
}

impl Launched for CudaFp8 {
    fn launch(
        &self,
        runner: &mut CudaRunner,
        problem: &Problem,
        inputs: &Inputs,
        reached: &mut dyn FnMut(Phase),
    ) -> Result<Outputs, RunError> {
        [Phase::Uploaded, Phase::Launched].into_iter().for_each(&mut *reached);
        let outputs = self.attend(runner, problem, inputs);
        reached(Phase::Done);
        outputs
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
        let mut declared = Fp8 { tiles: TILES, promoted_after: Some(STEPS), ..Fp8::default() }.declaration();
        let table = &mut declared.table;
        let sizes = Sizes::multiples(DIM_MULTIPLE, DIM_MAX, DIM_MULTIPLE);
        if let Ok(sizes) = sizes {
            table.dims.qk = sizes.clone();
            table.dims.v = sizes;
        }
        table.softcap = false;
        table.masks.kinds = Vec::new();
        table.layout.steps = false;
        // One launch, outside of any schedule.
        table.parallel = Parallelism::default();
        table.parallel.ranks_most = 1;
        declared.with_promises(Promises { sequences_alone: false, rows_alone: false, ..Promises::ALL })
    }

    fn partition(&self, _: &Problem) -> Partition {
        Partition::single(TILES.q, TILES.kv)
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
    use seamproof_oracle::TensorName;

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
        let fitted = drawn().map(|problem| table.fitted(problem));
        assert!(fitted.into_iter().all(|problem| problem.parallel.size() * problem.parallel.region == 1));
        for problem in refused {
            let ran = subject.run(&problem, &values::inputs(&problem));
            assert!(matches!(ran, Err(RunError::Refused(_))), "{ran:?}");
        }
    }

    #[test]
    fn every_sequence_and_head_has_its_descale() {
        let table = CudaFp8::default().declaration().table;
        let problems = drawn().map(|problem| table.fitted(problem)).filter(|problem| problem.group() > 1);
        let mut seen = 0;
        for problem in problems {
            let inputs = values::inputs(&problem);
            let all = descales_of(&problem, &inputs);
            for (sequence, heads) in all.iter().enumerate() {
                assert_eq!(heads.len(), problem.heads.q);
                for (head, descales) in heads.iter().enumerate() {
                    let places = [
                        (TensorName::Q, head, descales.q),
                        (TensorName::K, head / problem.group(), descales.k),
                        (TensorName::V, head / problem.group(), descales.v),
                    ];
                    for (tensor, head, descale) in places {
                        let scales = inputs.scales.of(tensor).expect("the table's inputs have scales");
                        assert_eq!(f64::from(descale), scales.of(sequence, 0, head, 0), "{problem:?}");
                        seen += 1;
                    }
                }
            }
        }
        assert!(seen > 100);
    }

    #[test]
    fn options_are_those_of_the_shapes() {
        for name in ["tuned", "long", "short"] {
            let subject = CudaFp8::from_options(&Options::from([("attention".into(), name.into())])).unwrap();
            assert_eq!(subject.options()["attention"], name);
        }
        let wrong = CudaFp8::from_options(&Options::from([("attention".into(), "middle".into())]));
        assert!(wrong.unwrap_err().to_string().contains("tuned, long or short"));
        assert!(CudaFp8::from_options(&Options::from([("dq".into(), "any".into())])).is_err());
    }
}
