//! Common parts of the fuzz targets: a fuzzer's bytes as problems, properties that hold for every problem, and a
//! failure as a stored case.
//!
//! A target is a few lines over this module (`fuzz/fuzz_targets`). A property that does not hold is a panic, as
//! libFuzzer expects. A finding of the judge is first shrunk and stored, so that the panic's text is a command that
//! replays it.
//!
//! Three environment variables are read. [`BACKEND_VARIABLE`] names the subject of the targets that run one.
//! [`FAULT_VARIABLE`] plants a fault of the catalogue in the emulated kernel, to see that a target finds it.
//! [`FINDINGS_VARIABLE`] names the folder of stored cases.

mod descriptor;
mod frames;
mod hunt;
mod judged;
mod masks;
mod property;
mod recordings;
mod value;

pub use descriptor::{DrawnSide, batches, described, descriptor};
pub use frames::frames;
pub use hunt::{BACKEND_VARIABLE, FAULT_VARIABLE, FINDINGS_VARIABLE, Hunter, start};
pub use judged::judged;
pub use masks::masks;
pub use property::{formats, interleaving, layout, schedule};
pub use recordings::recordings;
pub use value::{VALUE_VERSION, from_bytes, mutate, to_bytes};

use arbitrary::Unstructured;
use seamproof_oracle::Problem;

use seamproof_judge::generate::{self, Draw, Limits, RawProblem};

/// Returns the integers that bytes of choices make.
pub fn choices(bytes: &[u8]) -> RawProblem {
    generate::raw(&mut Unstructured::new(bytes), &Limits::fuzz())
}

/// Returns the problem that bytes of choices make; never a malformed one.
pub fn problem(bytes: &[u8]) -> Option<Problem> {
    let legal = RawProblem { malformed: 0, ..choices(bytes) };
    match generate::fixup(&legal, &Limits::fuzz()) {
        Draw::Problem(problem) => Some(problem),
        Draw::Malformed(_) => None,
    }
}
