//! The parts of a kernel's entries: the right kernel, kernels that differ from it in some stages, and the checks that
//! catch them.

use seamproof_oracle::Format;

use crate::emulated::{Right, Stages, UnitArithmetic};
use crate::faults::fault::{Catcher, Fault, Plant};

/// Catchers of wrong values: exact inputs and bounds show them.
pub(super) const VALUES: &[Catcher] = &[Catcher::Exact, Catcher::Identity, Catcher::Envelope];
/// Catchers of forbidden reads: a poisoned row shows them, besides the checks of values.
pub(super) const READS: &[Catcher] = &[Catcher::Poison, Catcher::Exact, Catcher::Identity, Catcher::Envelope];
/// Catchers of forgotten rows, and of rows whose old content enters others.
pub(super) const FORGETS: &[Catcher] =
    &[Catcher::Structure, Catcher::Exact, Catcher::Identity, Catcher::Envelope];
/// Catchers of rows that are wrongly left or overwritten.
pub(super) const WRITES: &[Catcher] = &[Catcher::Structure];

/// Returns the stages of the right kernel.
pub(super) fn right<A: UnitArithmetic<f32>>() -> impl Stages<f32, A> {
    Right
}

/// 1 + 2^-8: 1 and half a step of bf16 at 1.
pub(super) const OFF: f32 = 1.0 + 1.0 / 256.0;

/// Defines kernels that differ from the right one in the given stages.
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

/// Returns an entry of the catalogue: id, imitated bug, its source, its catchers, and the kernel.
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
    /// Returns this fault with its entries in the list of real bugs.
    pub(super) const fn of(self, entries: &'static [u16]) -> Fault {
        Fault { entries, ..self }
    }
}

/// Returns the nearest bf16.
pub(super) fn bf16(value: f32) -> f32 {
    Format::Bf16.round_f32(value)
}
