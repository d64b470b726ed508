//! Segment ids and positions. Their runs say exactly the same, a rank's rows described in this way give back what the
//! rank owns, and batches of any shapes are read as the sequences that they mean, or refused; so say their paired runs.
#![no_main]

use libfuzzer_sys::fuzz_target;
use seamproof::fuzz::{self, DrawnSide};
use seamproof_fuzz as _;

/// Length of batch rows and rows of these, sides of batches, and bytes of a problem.
type Input<'a> = (u8, Vec<(i8, i8)>, [DrawnSide; 2], &'a [u8]);

fuzz_target!(|input: Input<'_>| {
    let (row_length, rows, sides, bytes) = input;
    fuzz::descriptor(&rows, row_length);
    fuzz::batches(&sides);
    if let Some(problem) = fuzz::problem(bytes) {
        fuzz::described(&problem);
    }
});
