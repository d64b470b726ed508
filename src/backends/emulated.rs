//! The emulated kernel as a subject: one rank, one launch forward and one backward.

use std::collections::BTreeMap;

use ndarray::{Array1, Axis};
use seamproof_oracle::envelope::{Accumulation, Partition};
use seamproof_oracle::limits::HEAD_DIM_MAX;
use seamproof_oracle::{Algorithm, Format, Inputs, Pass, Problem, Scaling, Sink};
use seamproof_simulator::emulated::{self, Tiles};
use seamproof_simulator::{AttentionCall, Tensor};

use super::BackendError;
use crate::backend::{
    Backend, Capabilities, Outputs, PaddingContract, PaddingInputs, PaddingOutputs, RankGradients,
    RankOutputs, Refusal, RunError, algorithm_name,
};
use crate::values::{self, Poison};

/// Tile sizes that a campaign draws from: the smallest, unequal ones, and sizes of real kernels' fractions.
const TILE_SIZES: [usize; 6] = [1, 2, 4, 8, 16, 64];
/// Largest tile that an option may ask for.
const TILE_MAX: usize = 1 << 12;

/// The emulated kernel with its tile sizes.
#[derive(Clone, Copy, Debug)]
pub struct Emulated {
    /// Tile sizes.
    pub tiles: Tiles,
}

impl Default for Emulated {
    fn default() -> Emulated {
        Emulated { tiles: Tiles { q: 4, kv: 4 } }
    }
}

/// Options for one case of a campaign.
pub(super) fn draw_options(seed: u64) -> BTreeMap<String, String> {
    let size = |draw: u64| TILE_SIZES[(draw % TILE_SIZES.len() as u64) as usize].to_string();
    let draw = values::mix(seed);
    BTreeMap::from([("q_tile".into(), size(draw)), ("kv_tile".into(), size(draw >> 32))])
}

impl Emulated {
    /// From `q_tile` and `kv_tile`, each 1 to 4096; 4 where absent.
    pub(super) fn from_options(options: &BTreeMap<String, String>) -> Result<Emulated, BackendError> {
        let mut backend = Emulated::default();
        for (option, value) in options {
            let size = match option.as_str() {
                "q_tile" => &mut backend.tiles.q,
                "kv_tile" => &mut backend.tiles.kv,
                _ => {
                    let option = option.clone();
                    let known = "q_tile, kv_tile";
                    return Err(BackendError::UnknownOption { backend: "emulated", option, known });
                }
            };
            *size = match value.parse() {
                Ok(size) if (1..=TILE_MAX).contains(&size) => size,
                _ => {
                    return Err(BackendError::OptionValue {
                        backend: "emulated",
                        option: option.clone(),
                        value: value.clone(),
                        expected: "a whole number from 1 to 4096",
                    });
                }
            };
        }
        Ok(backend)
    }

    /// Runs one launch, and its backward where the problem asks for it. Padding rows of the saved out and lse are
    /// poisoned between the two, as the contract allows.
    pub(super) fn launch(
        &self,
        problem: &Problem,
        inputs: &Inputs,
        call: &AttentionCall,
    ) -> Result<Outputs, RunError> {
        check_launch(problem)?;
        call.check(problem.rows.q, problem.rows.kv)
            .map_err(|error| RunError::Infrastructure(format!("launch: {error}")))?;
        let device = Loaded::new(problem, inputs);
        let precision = problem.precision;
        let mut out = Tensor::unwritten("out", problem.out_shape(), precision.out.format);
        let mut lse = Tensor::unwritten("lse", [problem.heads.q, problem.rows.q, 1], Format::F32);
        let mut max_logit = Tensor::unwritten("max_logit", [problem.heads.q, 1, 1], Format::F32);
        let forward = emulated::Forward {
            q: &device.q,
            k: &device.k,
            v: &device.v,
            sink: &device.sink,
            out: &mut out,
            lse: &mut lse,
            max_logit: &mut max_logit,
        };
        emulated::forward(call, self.tiles, precision.p.format, forward);
        let mut damage: Vec<_> = [&out, &lse, &max_logit].into_iter().flat_map(Tensor::damage).collect();
        let gradients = (problem.pass == Pass::Backward).then(|| {
            let (gradients, found) = self.launch_backward(problem, inputs, call, &device, (&out, &lse));
            damage.extend(found);
            gradients
        });
        damage.extend([&device.q, &device.k, &device.v].into_iter().flat_map(Tensor::damage));
        let rank = RankOutputs {
            out: out.to_array3(),
            lse: Some(lse.to_array2()),
            max_logit: Some(Array1::from_vec(max_logit.values().to_vec())),
            gradients,
        };
        Ok(Outputs { ranks: vec![rank], damage })
    }

    fn launch_backward(
        &self,
        problem: &Problem,
        inputs: &Inputs,
        call: &AttentionCall,
        device: &Loaded,
        (out, lse): (&Tensor, &Tensor),
    ) -> (RankGradients, Vec<seamproof_simulator::Damage>) {
        let precision = problem.precision;
        let dout = Tensor::from_array("dout", inputs.dout.view(), precision.dout.format);
        let (mut out, mut lse) = (out.to_array3(), lse.to_array2());
        let real = values::real_q_rows(problem);
        values::poison_rows(out.view_mut(), Axis(0), &real, Poison::Nan);
        values::poison_rows(lse.view_mut(), Axis(1), &real, Poison::Nan);
        let out = Tensor::from_array("saved out", out.view(), precision.out.format);
        let lse = Tensor::from_array("saved lse", lse.view(), Format::F32);
        let format = precision.gradients.format;
        let mut dq = Tensor::unwritten("dq", problem.q_shape(), format);
        let mut dk = Tensor::unwritten("dk", problem.k_shape(), format);
        let mut dv = Tensor::unwritten("dv", problem.v_shape(), format);
        let mut dsink = Tensor::unwritten("dsink", [problem.learnable_sinks(), 1, 1], Format::F32);
        let backward = emulated::Backward {
            q: &device.q,
            k: &device.k,
            v: &device.v,
            sink: &device.sink,
            dout: &dout,
            out: &out,
            lse: &lse,
            dq: &mut dq,
            dk: &mut dk,
            dv: &mut dv,
            dsink: &mut dsink,
        };
        emulated::backward(call, self.tiles, precision.p.format, precision.ds.format, backward);
        let tensors = [&dq, &dk, &dv, &dsink, &dout, &out, &lse];
        let damage = tensors.into_iter().flat_map(Tensor::damage).collect();
        let gradients = RankGradients {
            dq: dq.to_array3(),
            dk: dk.to_array3(),
            dv: dv.to_array3(),
            dsink: Array1::from_vec(dsink.values().to_vec()),
        };
        (gradients, damage)
    }
}

/// The inputs between guard bands.
struct Loaded {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Vec<f32>,
}

impl Loaded {
    fn new(problem: &Problem, inputs: &Inputs) -> Loaded {
        let precision = problem.precision;
        Loaded {
            q: Tensor::from_array("q", inputs.q.view(), precision.q.format),
            k: Tensor::from_array("k", inputs.k.view(), precision.k.format),
            v: Tensor::from_array("v", inputs.v.view(), precision.v.format),
            sink: inputs.sink.to_vec(),
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
    match problem.parallel.algorithm {
        Algorithm::Single if problem.parallel.world == 1 => Ok(()),
        Algorithm::Single => Err(Refusal::World),
        other => Err(Refusal::Algorithm(algorithm_name(other))),
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
            algorithms: vec!["single"],
            sub_groups: false,
            softcap: true,
            sinks: vec![Sink::None, Sink::OffByOne, Sink::Learnable],
        }
    }

    fn padding(&self) -> PaddingContract {
        PaddingContract { inputs: PaddingInputs::Anything, outputs: PaddingOutputs::Zero }
    }

    fn accumulation(&self) -> Accumulation {
        Accumulation::F32Serial
    }

    fn partition(&self, _problem: &Problem) -> Partition {
        Partition { q_tile: self.tiles.q, kv_tile: self.tiles.kv }
    }

    fn run(&self, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
        self.launch(problem, inputs, &AttentionCall::whole(problem))
    }
}
