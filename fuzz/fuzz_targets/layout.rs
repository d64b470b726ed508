//! Layouts. Every row has one owner and one place, and reorderings are bijections.
#![no_main]

use libfuzzer_sys::fuzz_target;
use seamproof::fuzz;
use seamproof_fuzz as _;

fuzz_target!(|bytes: &[u8]| {
    if let Some(problem) = fuzz::problem(bytes) {
        fuzz::layout(&problem);
    }
});
