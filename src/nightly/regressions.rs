//! Stored regressions, judged on one subject.
//!
//! A case that fails is a finding like any other: it is on disk in a run's folder before its thread takes the next one.

use std::collections::BTreeMap;
use std::fmt::{self, Display, Formatter};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rayon::prelude::*;
use serde::Serialize;

use super::known::Failure;
use super::report::excuse;
use super::{Known, NightError, ReportedFailure, Watch};
use crate::campaign::{Registered, Subjects};
use crate::paste::replay_command;
use crate::record::RunDir;
use seamproof_judge::case::{Case, Subject};
use seamproof_judge::evaluate::evaluate;
use seamproof_judge::failure::FailureKey;
use seamproof_judge::files;
use seamproof_judge::finding::Finding;
use seamproof_judge::verdict::Verdict;

/// Time after which no stored case is begun on a subject.
const TIME_MAX: Duration = Duration::from_secs(120);

/// Stored cases with their files.
pub(crate) type StoredCases = Vec<(PathBuf, Case)>;

/// Reads the stored regressions of a corpus.
pub(crate) fn regressions_of(corpus: &Path) -> Result<StoredCases, NightError> {
    let folder = corpus.join("regressions");
    // A folder that is missing is an error here, and no empty list.
    let listed = std::fs::read_dir(&folder).and_then(|_| files::list(&folder)).map_err(|error| {
        let help = "--corpus names the folder that holds regressions/, as corpus/ of a checkout does";
        NightError::Read { path: folder, what: format!("cannot be read: {error}; {help}") }
    })?;
    let cases = listed.into_iter().filter(|path| files::is_json(path));
    cases.map(|path| Ok((path.clone(), Case::load(&path)?))).collect()
}

/// What came of the stored cases on one subject, each named by its file.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Regressions {
    pub(crate) subject: String,
    pub(crate) held: Vec<String>,
    /// Cases that the subject refuses as its table says.
    pub(crate) refused: Vec<String>,
    /// Cases that failed; the `problem` of each is its file.
    pub(crate) failed: Vec<ReportedFailure>,
    /// Cases that could not be judged, each with the reason.
    pub(crate) internal: BTreeMap<String, String>,
    /// Cases that were left, because the time was over or somebody stopped the night.
    pub(crate) not_begun: Vec<String>,
}

impl Display for Regressions {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Regressions { subject, held, refused, failed, internal, not_begun } = self;
        let [held, refused, failed] = [held.len(), refused.len(), failed.len()];
        write!(f, "{subject} regressions: held {held} · refused {refused} · failed {failed}")?;
        write!(f, " · internal {}", internal.len())?;
        if not_begun.is_empty() { Ok(()) } else { write!(f, " · not begun {}", not_begun.len()) }
    }
}

/// Judges stored cases on a subject, several at a time; `dir` becomes the folder of this run.
pub(super) fn judge(
    subject: &str,
    stored: &StoredCases,
    known: &Known,
    dir: &Path,
    jobs: usize,
    watch: &Watch,
) -> Result<Regressions, NightError> {
    let (registered, run) = (Registered::new(subject)?, RunDir::create(dir)?);
    let (findings, control) = (run.findings()?, watch.begin(&format!("{subject} regressions")));
    let begun = Instant::now();
    let judge_one = |(file, case): &(PathBuf, Case)| -> Result<Option<Verdict>, NightError> {
        if control.stopped() || begun.elapsed() >= TIME_MAX {
            return Ok(None);
        }
        let verdict = evaluate(registered.backend(registered.fixed())?.as_ref(), &case.problem);
        control.cases.fetch_add(1, Ordering::Relaxed);
        if let Verdict::Finding(finding) = &verdict {
            findings.record(&name_of(file), &failing(case, &registered, finding))?;
            control.failed.fetch_add(1, Ordering::Relaxed);
        }
        Ok(Some(verdict))
    };
    let judge_all = || stored.par_iter().map(judge_one).collect::<Result<Vec<_>, _>>();
    let verdicts = match rayon::ThreadPoolBuilder::new().num_threads(jobs).build() {
        Ok(pool) => pool.install(judge_all),
        // A machine without room for more threads still has the common ones.
        Err(_) => judge_all(),
    }?;
    let mut sum = Regressions { subject: subject.to_owned(), ..Regressions::default() };
    for (verdict, (path, case)) in verdicts.into_iter().zip(stored) {
        let file = path.display().to_string();
        match verdict {
            None => sum.not_begun.push(file),
            Some(Verdict::Pass(_)) => sum.held.push(file),
            Some(Verdict::Refused(_)) => sum.refused.push(file),
            Some(Verdict::Finding(finding)) => {
                let key = FailureKey::of(&finding, registered.name(), &case.problem);
                let replay = replay_command(&findings.path(&name_of(path)), None);
                let known = excuse(known, Failure::of(&key, &finding, &case.problem));
                sum.failed.push(ReportedFailure::new(&key, (1, 0), file, finding.to_string(), replay, known));
            }
            Some(other) => drop(sum.internal.insert(file, other.to_string())),
        }
    }
    Ok(sum)
}

fn name_of(file: &Path) -> String {
    file.file_stem().unwrap_or_default().to_string_lossy().into_owned()
}

/// Returns a stored case as a finding on this subject.
fn failing(case: &Case, subject: &Registered, finding: &Finding) -> Case {
    Case {
        subject: Subject { name: subject.name().to_owned(), options: subject.fixed().clone() },
        ..case.clone().as_drawn(finding)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stored() -> StoredCases {
        let file = "corpus/regressions/te-1212-window-one-key-short.json";
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(file);
        vec![(file.clone(), Case::load(&file).unwrap())]
    }

    /// Test that what fails has the key that the list of known failures takes, and a file that shows it again.
    #[test]
    fn a_failing_case_is_a_finding_on_disk() {
        let place = tempfile::tempdir().unwrap();
        let (watch, dir, subject) = (Watch::default(), place.path().join("run"), "window-off-by-one");
        let judged = judge(subject, &stored(), &Known::default(), &dir, 1, &watch).unwrap();
        let progress = watch.progress();
        assert_eq!(
            (&*progress.what, progress.cases, progress.failed),
            ("window-off-by-one regressions", 1, 1)
        );
        let [told] = &judged.failed[..] else { panic!("{judged:?}") };
        let file = dir.join("findings/te-1212-window-one-key-short.json");
        assert_eq!(told.replay, format!("seamproof replay {}", file.display()));
        let case = Case::load(&file).unwrap();
        let Verdict::Finding(finding) = crate::replay::replay(&case).unwrap() else { panic!("it fails") };
        assert_eq!(told.key, FailureKey::of(&finding, subject, &case.problem).to_string());
        assert_eq!(told.finding, finding.to_string());
    }

    #[test]
    fn a_night_that_is_stopped_begins_no_case() {
        let place = tempfile::tempdir().unwrap();
        let (watch, dir) = (Watch::default(), place.path().join("run"));
        watch.stop();
        let judged = judge("emulated", &stored(), &Known::default(), &dir, 1, &watch).unwrap();
        assert_eq!((judged.not_begun.len(), judged.held.len()), (1, 0));
        assert!(judged.to_string().ends_with("internal 0 · not begun 1"), "{judged}");
    }
}
