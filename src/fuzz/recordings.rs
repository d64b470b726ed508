//! Check of the readers of recordings.

use std::path::Path;
use std::sync::LazyLock;

use seamproof_oracle::Problem;
use seamproof_oracle::sharding::whole;

use crate::recording::{Manifest, RankFile, RankPlace, RecordingError, Share};

/// Manifest whose rank files the bytes are taken for: a backward with a learnable sink, on one rank.
const MANIFEST: &str = include_str!("recording.json");

static KNOWN: LazyLock<Option<(Manifest, Problem)>> =
    LazyLock::new(|| Manifest::parse(Path::new("known"), MANIFEST.as_bytes()).ok());

/// Checks bytes as a manifest, and as the file of one rank, with rows by the rule and with rows by its own shapes.
///
/// A manifest is read or refused in one line, and one that is written reads back as it was. So is a rank file.
pub fn recordings(bytes: &[u8]) {
    match Manifest::parse(Path::new("bytes"), bytes) {
        Ok((manifest, _)) => {
            let again = Manifest::parse(Path::new("again"), manifest.to_json().as_bytes());
            assert_eq!(again.expect("a manifest that was written can be read").0, manifest);
        }
        Err(error) => one_line(&error),
    }
    let (manifest, problem) = KNOWN.as_ref().expect("the known manifest is one");
    let rule = whole(problem);
    for layout in [Some(&rule), None] {
        let place = RankPlace { manifest, problem, rank: 0, layout, share: Share::all(problem) };
        match RankFile::parse(Path::new("bytes"), bytes, place) {
            Ok(file) => {
                let written = file.to_bytes(place).expect("a file that was read can be written");
                let again = RankFile::parse(Path::new("again"), &written, place);
                let again = again.expect("a file that was written can be read");
                assert_eq!(again.inputs.q.shape(), file.inputs.q.shape());
                assert_eq!(again.tables, file.tables);
            }
            Err(error) => one_line(&error),
        }
    }
}

fn one_line(error: &RecordingError) {
    let said = error.to_string();
    assert!(!said.contains('\n') && said.len() < 4096, "{said}");
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Test that seeds, their beginnings and noise are all taken.
    #[test]
    fn recordings_hold_on_seeds_and_noise() {
        let seeds = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus/fuzz/recordings");
        let mut read = [0; 2];
        for entry in std::fs::read_dir(seeds).expect("the seeds are there") {
            let bytes = std::fs::read(entry.expect("an entry").path()).expect("a seed is a file");
            recordings(&bytes);
            (0..bytes.len()).step_by(7).for_each(|kept| recordings(&bytes[..kept]));
            let (manifest, problem) = KNOWN.as_ref().expect("the known manifest is one");
            let place = RankPlace { manifest, problem, rank: 0, layout: None, share: Share::all(problem) };
            read[0] += usize::from(Manifest::parse(Path::new("seed"), &bytes).is_ok());
            read[1] += usize::from(RankFile::parse(Path::new("seed"), &bytes, place).is_ok());
        }
        assert!(read.iter().all(|count| *count > 0), "no seed is whole: {read:?}");
    }
}
