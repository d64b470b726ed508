//! Interleavings. Ranks and streams may proceed in any order, and no order changes a bit.
#![no_main]

use libfuzzer_sys::fuzz_target;
use seamproof::fuzz;
use seamproof_fuzz as _;

fuzz_target!(|input: ([u64; 2], &[u8])| {
    if let Some(problem) = fuzz::problem(input.1) {
        fuzz::interleaving(&problem, input.0);
    }
});
