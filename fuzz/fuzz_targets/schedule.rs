//! Schedules. The checker proves every schedule that a builder makes.
#![no_main]

use libfuzzer_sys::fuzz_target;
use seamproof::fuzz;
use seamproof_fuzz as _;

fuzz_target!(|bytes: &[u8]| {
    if let Some(problem) = fuzz::problem(bytes) {
        fuzz::schedule(&problem);
    }
});
