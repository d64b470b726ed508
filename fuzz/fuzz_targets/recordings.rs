//! Recordings. Any bytes give a manifest or an error of one line, and so do they as a rank file.
#![no_main]

use libfuzzer_sys::fuzz_target;
use seamproof::fuzz;
use seamproof_fuzz as _;

fuzz_target!(|bytes: &[u8]| fuzz::recordings(bytes));
