//! Subjects that come with the judge: the emulated kernel, right and with planted faults, and wrappers around any
//! subject.

mod beside;
mod borrowed;
mod built;
mod difference;
mod emulated;
mod fp8;
mod fp8_backward;
mod fp8_given;
mod fp8_schedule;
mod ideal;
mod miscall;
mod miscalled;
mod miscalls;
mod misreads;
mod missteps;
mod name;
mod on_device;
mod options;
mod planted;
mod recorded;
mod stepwise;
mod unfused;
mod world;

pub use beside::Beside;
pub use borrowed::Borrowed;
pub use built::built;
pub use difference::{difference, same_bits};
pub use emulated::{Arithmetic, Emulated, Ranks, Results, draw_options, launchable};
pub use fp8::{Descales, FP8_FAULTS, Fp8, Fp8Fault, LocalPlace, Place, PlantedFp8, Recipe, fp8_fault};
pub use fp8_backward::{BackwardRecipe, FP8_BACKWARD_FAULTS};
pub use fp8_given::{FP8_GIVEN_BACKWARD_FAULTS, FP8_GIVEN_FAULTS, Fp8Sequence, Kept};
pub use fp8_schedule::descaled;
pub use miscall::{Miscall, WrongCall};
pub use miscalled::Miscalled;
pub use miscalls::{MISCALLS, miscall};
pub use missteps::needs_steps;
pub use name::SubjectName;
pub use on_device::{Reached, run_on_threads, run_world};
pub use options::{OptionError, Options, listed};
pub use planted::Planted;
pub use recorded::Recorded;
pub use stepwise::in_steps;
pub use unfused::Unfused;
pub use world::World;
