//! The worker protocol. Whatever a worker sends is decoded or refused, within the memory that its bytes take.
#![no_main]

use libfuzzer_sys::fuzz_target;
use seamproof::fuzz;
use seamproof_fuzz as _;

fuzz_target!(|bytes: &[u8]| fuzz::frames(bytes));
