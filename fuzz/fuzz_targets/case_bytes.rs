//! Cases as bytes of choices. The generator takes any bytes, and the judge finds nothing wrong with the emulated
//! kernel.
#![no_main]

use libfuzzer_sys::fuzz_target;
use seamproof::fuzz::{self, Hunter};
use seamproof_fuzz as _;

thread_local! {
    static HUNTER: Hunter = Hunter::from_environment();
}

fuzz_target!(init: { fuzz::start(); }, |bytes: &[u8]| {
    HUNTER.with(|hunter| hunter.case(&fuzz::choices(bytes)));
});
