//! The judge. It sees an element moved past its bound, and does not condemn one within its bound.
#![no_main]

use libfuzzer_sys::fuzz_target;
use seamproof::fuzz;
use seamproof_fuzz as _;

fuzz_target!(|input: ([u32; 3], &[u8])| {
    if let Some(problem) = fuzz::problem(input.1) {
        fuzz::judged(&problem, input.0);
    }
});
