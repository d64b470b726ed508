//! Results of a run, as a subject returns them.

use ndarray::{Array, Array1, Array2, Array3, ShapeBuilder};
use seamproof_oracle::{Pass, Problem};
use seamproof_simulator::{Damage, UNWRITTEN_BITS};

use super::Refusal;
use crate::finding::{Earlier, Ending};

/// One rank's results in the rank's own layout, padding included.
///
/// The subject makes these arrays, and fills out, lse, dq, dk and dv with [`UNWRITTEN_BITS`] before its kernel writes to
/// them. Afterwards no real row may hold these bits, and rows that no sequence owns must hold nothing else, whatever the
/// subject's [`PaddingOutputs`]: so the judge sees what was forgotten, and what was written outside. A kernel that adds to
/// zeroed memory does that elsewhere, and its owned rows are copied here.
///
/// [`UNWRITTEN_BITS`]: seamproof_simulator::UNWRITTEN_BITS
#[derive(Clone, Debug)]
pub struct RankOutputs {
    /// `[q rows, q heads, v dim]`; 0 for a row that sees no key.
    pub out: Array3<f32>,
    /// `[q heads, q rows]`, where the subject shows it: the natural logarithm of the row's sum, the sink included, and −∞
    /// for a row that sees neither key nor sink. A kernel that has +∞ there, or logarithms of base 2, converts them.
    pub lse: Option<Array2<f32>>,
    /// `[q heads]`, where the subject shows it: the largest logit of all ranks' visible pairs, without the sink; −∞ where
    /// there is none.
    pub max_logit: Option<Array1<f32>>,
    /// The gradients, for a backward pass.
    pub gradients: Option<RankGradients>,
}

/// One rank's gradients: those of the out and lse that the same run returned, as it returned them.
///
/// For query i and key j, with `out_i` in its stored format and `lse_i` in f32:
///
/// ```text
/// D_i = ⟨dout_i, out_i⟩
/// p_ij = exp(s_ij − lse_i)
/// ds_ij = p_ij · (⟨dout_i, v_j⟩ − D_i) · cap'(s_ij)
/// dq_i = scale · Σ_j ds_ij · k_j      dk_j = scale · Σ_i ds_ij · q_i      dv_j = Σ_i p_ij · dout_i
/// ```
///
/// The bounds hold the errors of f32 in that, the rounding of p to its format (for dv), that of ds or of `scale · ds`, and
/// that of the result. A kernel that takes `D` from an out before it was rounded, or as `Σ_j p_ij · ⟨dout_i, v_j⟩`, is off
/// from these gradients by the rounding of out. No bound has room for that, and the judge condemns it, although the gradients
/// of an exact out may be nearer: the bounds are not for such a kernel. Where the subject hides its LSE, the exact one
/// takes its place, and the bounds grow by the error that the forward may have.
#[derive(Clone, Debug)]
pub struct RankGradients {
    /// `[q rows, q heads, qk dim]`.
    pub dq: Array3<f32>,
    /// `[kv rows, kv heads, qk dim]`, summed over the group's query heads.
    pub dk: Array3<f32>,
    /// `[kv rows, kv heads, v dim]`, summed over the group's query heads.
    pub dv: Array3<f32>,
    /// `[q heads]`, this rank's partial sum; empty without a learnable sink.
    pub dsink: Array1<f32>,
}

/// What a run leaves behind.
#[derive(Clone, Debug)]
pub struct Outputs {
    /// In group order. One rank holds the problem's own layout.
    pub ranks: Vec<RankOutputs>,
    /// Guard bands that were written.
    pub damage: Vec<Damage>,
}

impl RankOutputs {
    /// Results of one rank into which no kernel has written: out, lse and, for a backward pass, the gradients. Without
    /// `max_logit`.
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
        }
    }
}

fn unwritten<S: ShapeBuilder>(shape: S) -> Array<f32, S::Dim> {
    Array::from_elem(shape, f32::from_bits(UNWRITTEN_BITS))
}

impl From<RankOutputs> for Outputs {
    /// The results of a subject on one rank, without guard bands.
    fn from(rank: RankOutputs) -> Outputs {
        Outputs { ranks: vec![rank], damage: Vec::new() }
    }
}

/// Why a run gave no outputs.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum RunError {
    /// The subject does not take this problem.
    #[error("refused: {0}")]
    Refused(#[from] Refusal),
    /// The subject died, by its own word.
    #[error("crashed: {0}")]
    Crash(String),
    /// The device has no memory left, by the subject's own word: nothing is known of the subject.
    #[error("out of memory: {0}")]
    OutOfMemory(String),
    /// The subject's process died, hung, or answered what is no answer.
    #[error("{0}")]
    Ended(Box<Ended>),
    /// The sentinel (a run whose results are known) came out differently: the process or its device went bad.
    #[error("the sentinel: {0}")]
    Sentinel(String),
    /// The harness failed, not the subject.
    #[error("infrastructure: {0}")]
    Infrastructure(String),
}

/// How a subject's process ended.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{ending}: {what}")]
pub struct Ended {
    /// What makes it the same as another one.
    pub ending: Ending,
    /// What was tried to confirm it, and what the process said.
    pub what: String,
    /// Runs that it needs before it, where it was seen to come after them and not alone; none where they are too many to
    /// be stored.
    pub before: Vec<Earlier>,
}
