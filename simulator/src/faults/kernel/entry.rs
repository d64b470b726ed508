//! What entries of kernels are made of: the right kernel, one that differs from it in some stages, and what catches that.

use seamproof_oracle::Format;

use crate::emulated::{Right, Stages, UnitArithmetic};
use crate::faults::fault::{Catcher, Fault, Plant};

/// A fault whose values are wrong: exact inputs and bounds show it.
pub(super) const VALUES: &[Catcher] = &[Catcher::Exact, Catcher::Identity, Catcher::Envelope];
/// A fault that reads what it must not: besides, a poisoned row shows it.
pub(super) const READS: &[Catcher] = &[Catcher::Poison, Catcher::Exact, Catcher::Identity, Catcher::Envelope];
/// A fault that forgets rows, or leaves what they hold so that it enters others.
pub(super) const FORGETS: &[Catcher] =
    &[Catcher::Structure, Catcher::Exact, Catcher::Identity, Catcher::Envelope];
/// A fault that leaves or overwrites rows.
pub(super) const WRITES: &[Catcher] = &[Catcher::Structure];

/// The stages of the right kernel.
pub(super) fn right<A: UnitArithmetic<f32>>() -> impl Stages<f32, A> {
    Right
}

/// 1 + 2^-8: one step of bf16 at 1, and a half.
pub(super) const OFF: f32 = 1.0 + 1.0 / 256.0;

/// A kernel that differs from the right one in the given stages.
macro_rules! kernels {
    ($($(#[$doc:meta])* $name:ident { $($stage:item)* })*) => {
        $(
            $(#[$doc])*
            #[derive(Debug)]
            struct $name;

            impl<A: UnitArithmetic<f32>> Stages<f32, A> for $name {
                $($stage)*
            }
        )*
    };
}
pub(super) use kernels;

/// An entry: id, what it imitates, where that happened, what catches it, the kernel.
pub(super) const fn fault(
    id: &'static str,
    imitates: &'static str,
    source: &'static str,
    caught_by: &'static [Catcher],
    kernel: &'static dyn crate::emulated::Variant,
) -> Fault {
    Fault { id, imitates, source, entries: &[], caught_by, edit: Plant::Kernel(kernel) }
}

impl Fault {
    /// The same, as these entries of the list of real bugs.
    pub(super) const fn of(self, entries: &'static [u16]) -> Fault {
        Fault { entries, ..self }
    }
}

/// The nearest bf16.
pub(super) fn bf16(value: f32) -> f32 {
    Format::Bf16.round_f32(value)
}
