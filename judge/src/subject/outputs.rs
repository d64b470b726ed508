//! Results of a run, as a subject returns them.

use ndarray::{Array, Array1, Array2, Array3, ShapeBuilder};
use seamproof_oracle::amax::Amaxes;
use seamproof_oracle::{Pass, Problem};
use seamproof_simulator::{Damage, UNWRITTEN_BITS};
use serde::{Deserialize, Serialize};

use super::{Refusal, TensorName};
use crate::finding::{Earlier, Ending};

/// Results of one rank in the rank's own layout, padding included.
///
/// A rank of a [region](seamproof_oracle::region) returns its hidden rows of out, dq, dk and dv, with all heads. Its
/// lse and max_logit are those of its own heads, on all rows of the region, and its dsink is 0 for any other head.
///
/// The subject makes these arrays, and fills out, lse, dq, dk and dv with [`UNWRITTEN_BITS`] before its kernel writes
/// to them. Afterwards no real row may hold these bits, and rows that no sequence owns must hold nothing else,
/// whatever the subject's [`PaddingOutputs`](super::PaddingOutputs). The judge thus sees what was forgotten, and what
/// was written outside. A kernel that adds to zeroed memory does so in another buffer, and the rows that a sequence
/// owns are copied here.
///
/// [`UNWRITTEN_BITS`]: seamproof_simulator::UNWRITTEN_BITS
#[derive(Clone, Debug)]
pub struct RankOutputs {
    /// Tensor `[q rows, q heads, v dim]`; 0 for a row that sees no key.
    pub out: Array3<f32>,
    /// Statistic `[q heads, q rows]`, where the subject shows it: the natural logarithm of the row's sum, the sink
    /// included, and −∞ for a row that sees neither key nor sink. A kernel that has +∞ there, or logarithms of base
    /// 2, converts them.
    pub lse: Option<Array2<f32>>,
    /// Statistic `[q heads]`, where the subject shows it: the largest logit of all ranks' visible pairs, without the
    /// sink; −∞ where there is none.
    pub max_logit: Option<Array1<f32>>,
    /// Gradients, for a backward pass.
    pub gradients: Option<RankGradients>,
    /// Amaxes of what the kernel quantised, where the subject shows them: those over the real rows of all ranks, as
    /// [`seamproof_oracle::amax`] defines them. Those of logit gradients and of gradients are of a backward pass.
    pub amax: Amaxes,
}

/// Gradients of one rank, taken at the out and lse that the same run returned, in the form in which it returned them.
///
/// For query i and key j, with `out_i` in its stored format and `lse_i` in f32, for a subject that declares
/// [`Delta::StoredOut`](seamproof_oracle::envelope::Delta::StoredOut):
///
/// ```text
/// D_i = ⟨dout_i, out_i⟩
/// p_ij = exp(s_ij − lse_i)
/// ds_ij = p_ij · (⟨dout_i, v_j⟩ − D_i) · cap'(s_ij)
/// dq_i = scale · Σ_j ds_ij · k_j      dk_j = scale · Σ_i ds_ij · q_i      dv_j = Σ_i p_ij · dout_i
/// ```
///
/// The bounds cover the f32 errors in these formulas, the rounding of p to its format (for dv), the rounding of ds or
/// of `scale · ds`, and the rounding of the result. A kernel that takes `D` from an out before it was rounded, or as
/// `Σ_j p_ij · ⟨dout_i, v_j⟩`, declares so in [`Declaration::arithmetic`](super::Declaration::arithmetic), and its D is
/// judged as such. So does one that stores the gradients of each query head before it sums them over a group. Where the
/// subject hides its LSE, the exact one takes its place, and the bounds grow by the error that the forward may have.
#[derive(Clone, Debug)]
pub struct RankGradients {
    /// Tensor `[q rows, q heads, qk dim]`.
    pub dq: Array3<f32>,
    /// Tensor `[kv rows, kv heads, qk dim]`, summed over the group's query heads.
    pub dk: Array3<f32>,
    /// Tensor `[kv rows, kv heads, v dim]`, summed over the group's query heads.
    pub dv: Array3<f32>,
    /// Vector `[q heads]`, this rank's partial sum; empty without a learnable sink.
    pub dsink: Array1<f32>,
}

/// Costs of a run, as far as the subject reports them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Costs {
    /// Largest number of bytes of device memory that the run held at once.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peak_bytes: Option<u64>,
    /// Number of kernel launches.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub launches: Option<u64>,
    /// Number of times that the host waited for the device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_synchronisations: Option<u64>,
}

/// An input that the subject changed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ChangedInput {
    /// The input.
    pub tensor: TensorName,
    /// Index of the first changed element: row, head and lane, or the head of a sink.
    pub first: Vec<usize>,
    /// Number of changed elements.
    pub elements: usize,
}

/// Results of a run.
#[derive(Clone, Debug)]
pub struct Outputs {
    /// Results of each rank, in group order, and of one rank after the other in each region. One rank alone holds the
    /// problem's own layout.
    pub ranks: Vec<RankOutputs>,
    /// Guard bands that were overwritten.
    pub damage: Vec<Damage>,
    /// Inputs that were overwritten, where the subject's side has compared them. A [`Backend`](super::Backend) in
    /// this process cannot write into its inputs.
    pub changed: Vec<ChangedInput>,
    /// Costs of the run.
    pub costs: Costs,
}

impl RankOutputs {
    /// Returns results of one rank into which no kernel has written: out, lse and, for a backward pass, the
    /// gradients. There is no `max_logit`.
    pub fn unwritten(problem: &Problem) -> RankOutputs {
        RankOutputs {
            out: unwritten(problem.out_shape()),
            lse: Some(unwritten(problem.lse_shape())),
            max_logit: None,
            gradients: (problem.pass == Pass::Backward).then(|| RankGradients {
                dq: unwritten(problem.q_shape()),
                dk: unwritten(problem.k_shape()),
                dv: unwritten(problem.v_shape()),
                dsink: Array1::zeros(problem.learnable_sinks()),
            }),
            amax: Amaxes::default(),
        }
    }
}

fn unwritten<S: ShapeBuilder>(shape: S) -> Array<f32, S::Dim> {
    Array::from_elem(shape, f32::from_bits(UNWRITTEN_BITS))
}

impl From<RankOutputs> for Outputs {
    /// Returns the results of a subject on one rank, without damage and with unknown costs.
    fn from(rank: RankOutputs) -> Outputs {
        Outputs { ranks: vec![rank], damage: Vec::new(), changed: Vec::new(), costs: Costs::default() }
    }
}

/// Reason why a run gave no outputs.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum RunError {
    /// A refusal: the subject does not take this problem.
    #[error("refused: {0}")]
    Refused(#[from] Refusal),
    /// A refusal for a reason that is no row of a table, from a subject in another language.
    #[error("refused: {0}")]
    RefusedByName(String),
    /// A crash, as the subject itself reports it.
    #[error("crashed: {0}")]
    Crash(String),
    /// A device without memory left, as the subject itself reports it. This says nothing about the subject's results.
    #[error("out of memory: {0}")]
    OutOfMemory(String),
    /// A process that died, hung, or did not give a proper answer.
    #[error("{0}")]
    Ended(Box<Ended>),
    /// A sentinel (a run with known results) that came out differently: the process or its device went bad.
    #[error("the sentinel: {0}")]
    Sentinel(String),
    /// A failure of the harness, not of the subject.
    #[error("infrastructure: {0}")]
    Infrastructure(String),
}

/// Ending of a subject's process, with its circumstances.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{ending}: {what}")]
pub struct Ended {
    /// The ending, which two endings that count as the same have in common.
    pub ending: Ending,
    /// Description of the attempts to confirm it, and of the process's messages.
    pub what: String,
    /// Runs that must come first, where the failure was seen to follow them and not to occur alone; empty where they
    /// are too many to be stored.
    pub before: Vec<Earlier>,
}
