//! Recordings as stored cases: what was found in one, as a file that `replay` and `explain` take.
//!
//! The values of such a case are those of a recording that lies beside it. The case names the recording's directory and
//! the digest of its manifest, which in turn has the digests of all other files. Its subject is over, so no other
//! subject is run on it, and nothing of it can be drawn again.

use std::fs;
use std::path::{Component, Path};

use seamproof_judge::case::{Case, Found, InputSource, Sample, Subject};
use seamproof_judge::finding::Finding;

use super::{Fault, MANIFEST, Recording, RecordingError, read};

/// Returns the case of a finding in a recording, of which these rows were judged. It names the recording's directory,
/// beside which it is to lie.
pub fn case_of(
    recording: &Recording,
    sample: Option<Sample>,
    finding: Finding,
) -> Result<Case, RecordingError> {
    let dir = directory_name(&recording.dir)?;
    let subject = Subject { name: recording.manifest.subject.name.clone(), options: Default::default() };
    let mut case = Case::new(subject, 0, recording.problem.clone());
    case.inputs = InputSource::Recorded { file: dir, digest: recording.digest.clone(), sample };
    case.found = Some(Found::drawn(finding));
    Ok(case)
}

/// Returns the rows of a recording that a stored case judges; `None` for every row.
pub fn sample_of(case: &Case) -> Option<Sample> {
    match case.inputs {
        InputSource::Recorded { sample, .. } => sample,
        InputSource::Generated => None,
    }
}

/// Reads the recording of a stored case, which lies beside the case's file.
pub fn read_beside(case_file: &Path, case: &Case) -> Result<Option<Recording>, RecordingError> {
    let InputSource::Recorded { file, digest, .. } = &case.inputs else { return Ok(None) };
    let wrong = |field: &str, fault| RecordingError::field(case_file, field, fault);
    let mut parts = Path::new(file).components();
    if !matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None)) {
        let missing = Fault::Missing("name the directory of a recording beside the case, without a path");
        return Err(wrong("inputs.recorded.file", missing));
    }
    let dir = case_file.with_file_name(file);
    if !dir.is_dir() {
        let missing = Fault::Missing("no recording of this name lies beside the case");
        return Err(wrong("inputs.recorded.file", missing));
    }
    let recording = read(&dir)?;
    if recording.digest != *digest {
        let fault = Fault::Differs {
            got: digest.clone(),
            whose: "the manifest beside the case has",
            expected: recording.digest,
            advice: "another recording lies there; judge it with judge-recording",
        };
        return Err(wrong("inputs.recorded.digest", fault));
    }
    if recording.problem != case.problem {
        return Err(wrong("problem", Fault::Unexpected("it is another problem than the recording's")));
    }
    Ok(Some(recording))
}

/// Returns the last name of a directory's path.
fn directory_name(dir: &Path) -> Result<String, RecordingError> {
    let whole =
        fs::canonicalize(dir).map_err(|source| RecordingError::Read { path: dir.to_owned(), source })?;
    let name = whole.file_name().and_then(|name| name.to_str()).map(str::to_owned);
    let missing = Fault::Missing("its directory has no name in UTF-8; move it into one that has");
    name.ok_or_else(|| RecordingError::field(&dir.join(MANIFEST), "directory", missing))
}
