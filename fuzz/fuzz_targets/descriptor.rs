//! Segment ids and positions. Their runs say exactly the same, and a rank's rows described in this way give back what
//! the rank owns.
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
