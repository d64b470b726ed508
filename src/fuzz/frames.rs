//! The worker protocol on any bytes: what comes from a worker is decoded without a panic, takes no more memory than its
//! bytes, and means the same once it is written again.

use crate::worker::frame::{self, BODY_MAX, Frame, Kind};
use crate::worker::message::{self, NoOutputs, OpenRequest, TEXT_MAX};

/// Longest text that is kept, its mark included.
const KEPT_MAX: usize = TEXT_MAX + '…'.len_utf8();

/// Checks bytes as a stream of frames, and as the body of one frame whose kind the first byte chooses.
///
/// # Panics
/// Panics where a frame is not what was written, or a message holds more than its bytes.
pub fn frames(bytes: &[u8]) {
    let mut rest = bytes;
    while let Ok(frame) = frame::read(&mut rest, BODY_MAX) {
        assert!(frame.body.len() < bytes.len());
        decoded(&frame);
    }
    let Some((first, body)) = bytes.split_first() else { return };
    let kind = Kind::ALL[usize::from(*first) % Kind::ALL.len()];
    if body.len() as u64 > kind.body_max() {
        return;
    }
    let mut written = Vec::new();
    frame::write(&mut written, kind, u64::from(*first), body).expect("a vector takes everything");
    let frame = frame::read(&mut &written[..], BODY_MAX).expect("the frame is whole");
    assert_eq!(frame, Frame { kind, sequence: u64::from(*first), body: body.to_vec() });
    decoded(&frame);
}

/// Checks what the body of a frame says, if it says anything.
fn decoded(Frame { kind, body, .. }: &Frame) {
    match kind {
        Kind::Open => drop(message::decode::<OpenRequest>(body)),
        Kind::Run => {
            let Ok((problem, inputs)) = message::decode_run(body) else { return };
            let written = message::encode_run(&problem, &inputs);
            let again = message::decode_run(&written).expect("what was read is written");
            assert!(again.0 == problem && 4 * inputs.q.len() <= body.len());
        }
        Kind::Outputs => {
            let Ok(outputs) = message::decode_outputs(body) else { return };
            let written = message::encode_outputs(&outputs);
            let again = message::decode_outputs(&written).expect("what was read is written");
            assert_eq!(message::encode_outputs(&again), written);
            assert!(4 * outputs.ranks.iter().map(|rank| rank.out.len()).sum::<usize>() <= body.len());
        }
        Kind::Phase => drop(message::decode_phase(body)),
        Kind::Ready => {
            let Ok(ready) = message::decode_ready(body) else { return };
            assert!(ready.devices > 0 && ready.name.len() <= KEPT_MAX);
            assert!(ready.versions.iter().all(|(name, version)| name.len().max(version.len()) <= KEPT_MAX));
        }
        Kind::Failed => {
            if let Ok(NoOutputs::Raised(what) | NoOutputs::Crash(what)) = message::decode_failed(body) {
                assert!(what.len() <= KEPT_MAX);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use seamproof_judge::generate::{Limits, draw_raw};

    /// Test that the seed of a stream is of this version of the protocol.
    #[test]
    fn frames_are_read_from_the_seed_of_a_stream() {
        let stream = include_bytes!("../../corpus/fuzz/frames/stream");
        assert!(frame::read(&mut &stream[..], BODY_MAX).is_ok());
    }

    /// Test that seeds, whole frames and noise are all taken.
    #[test]
    fn frames_hold_on_seeds_and_noise() {
        let seeds = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus/fuzz/frames");
        for seed in std::fs::read_dir(seeds).expect("the seeds") {
            let bytes = std::fs::read(seed.expect("a seed").path()).expect("its bytes");
            frames(&bytes);
            (0..bytes.len()).step_by(7).for_each(|kept| frames(&bytes[..kept]));
        }
        for index in 0..200 {
            let noise = super::super::to_bytes(&draw_raw(9, index, &Limits::fuzz()));
            (0..=7).for_each(|kind| frames(&[&[kind], &noise[..]].concat()));
        }
    }
}
