//! Masks: names and windows of TransformerEngine and FlashAttention, both ways.
#![no_main]

use libfuzzer_sys::fuzz_target;
use seamproof::fuzz;
use seamproof_fuzz as _;

fuzz_target!(|input: (u8, [i8; 2], [u8; 2])| fuzz::masks(input.0, input.1, input.2));
