//! Number formats. Rounding gives the nearest number, and numbers of a format stay as they are.
#![no_main]

use libfuzzer_sys::fuzz_target;
use seamproof::fuzz;
use seamproof_fuzz as _;

fuzz_target!(|input: (f64, u32)| fuzz::formats(input.0, input.1));
