//! The kernels on this process's first GPU, on cases as values. They give the bits of their twin on the CPU, and the
//! judge finds nothing wrong with them. Build with `--features cuda`; README.md says how to run this beside a
//! sanitizer.
#![no_main]

use libfuzzer_sys::{fuzz_mutator, fuzz_target};
use seamproof::fuzz::{self, Hunter};
use seamproof_fuzz as _;

thread_local! {
    static HUNTER: Hunter = Hunter::on_gpu();
}

fuzz_target!(init: { fuzz::start(); }, |bytes: &[u8]| {
    if let Some(raw) = fuzz::from_bytes(bytes) {
        HUNTER.with(|hunter| hunter.differential(&raw));
    }
});

fuzz_mutator!(|data: &mut [u8], size: usize, max_size: usize, seed: u32| {
    let room = max_size.min(data.len());
    fuzz::mutate(&mut data[..room], size, seed)
});
