//! Cases as values, in which one number or one sequence changes at a time. The judge finds nothing wrong with the
//! emulated kernel.
#![no_main]

use libfuzzer_sys::{fuzz_mutator, fuzz_target};
use seamproof::fuzz::{self, Hunter};
use seamproof_fuzz as _;

thread_local! {
    static HUNTER: Hunter = Hunter::from_environment();
}

fuzz_target!(init: { fuzz::start(); }, |bytes: &[u8]| {
    if let Some(raw) = fuzz::from_bytes(bytes) {
        HUNTER.with(|hunter| hunter.case(&raw));
    }
});

fuzz_mutator!(|data: &mut [u8], size: usize, max_size: usize, seed: u32| {
    let room = max_size.min(data.len());
    fuzz::mutate(&mut data[..room], size, seed)
});
