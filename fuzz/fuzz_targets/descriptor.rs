//! Segment ids and positions: runs say exactly them, and a rank's rows so described give back what it owns.
#![no_main]

use libfuzzer_sys::fuzz_target;
use seamproof::fuzz;
use seamproof_fuzz as _;

fuzz_target!(|input: (u8, Vec<(i8, i8)>, &[u8])| {
    fuzz::descriptor(&input.1, input.0);
    if let Some(problem) = fuzz::problem(input.2) {
        fuzz::described(&problem);
    }
});
