//! Faults of merges by a difference. They show on schedules that merge so ([`MergeOrder::Difference`]).
//!
//! [`MergeOrder::Difference`]: crate::schedule::MergeOrder::Difference

use super::entry::{VALUES, bf16, fault, kernels, right};
use crate::emulated::{Stages, UnitArithmetic};
use crate::faults::fault::{Catcher, Fault};

/// The public record of the formula.
const DIFFERENCE: &str = "https://github.com/zhuzilin/ring-flash-attention/pull/34";

pub(super) const FAULTS: &[Fault] = &[
    fault(
        "difference-share-swapped",
        "a merge by a difference takes the share of the running out for that of the step",
        DIFFERENCE,
        VALUES,
        &SwappedShare,
    ),
    fault(
        "difference-of-the-step",
        "a merge by a difference subtracts from the step's out, and not from the running one",
        DIFFERENCE,
        VALUES,
        &FromTheStep,
    ),
    fault(
        "difference-lse-swapped",
        "a merge by a difference takes the logarithm of the other side's share",
        DIFFERENCE,
        VALUES,
        &SwappedLse,
    ),
    fault(
        "difference-in-16-bit",
        "a merge by a difference subtracts outs in 16 bits, and what is left of a large one hides a small one",
        DIFFERENCE,
        &[Catcher::Envelope],
        &In16Bits,
    ),
];

kernels! {
    /// The argument of the share has the other sign.
    SwappedShare {
        fn difference_share(&self, running: f32, step: f32) -> f32 {
            Stages::<f32, A>::difference_share(&right::<A>(), step, running)
        }
    }
    /// The out from which the difference is subtracted is the step's.
    FromTheStep {
        fn difference(&self, out: f32, step: f32, share: f32) -> f32 {
            step - share * (out - step)
        }
    }
    /// The argument of the logarithm has the other sign.
    SwappedLse {
        fn difference_lse(&self, running: f32, step: f32) -> f32 {
            let merged = Stages::<f32, A>::difference_lse(&right::<A>(), step, running);
            running + (merged - step)
        }
    }
    /// The difference of outs is rounded.
    In16Bits {
        fn difference(&self, out: f32, step: f32, share: f32) -> f32 {
            out - share * bf16(out - step)
        }
    }
}
