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
use super::{Known, NightError, ReportedFailure, Watch, warm_up};
use crate::campaign::{Registered, Subjects};
use crate::paste::replay_command;
use crate::record::RunDir;
use seamproof_judge::case::{Case, Subject};
use seamproof_judge::evaluate::evaluate;
use seamproof_judge::failure::FailureKey;
use seamproof_judge::files;
use seamproof_judge::finding::Finding;
use seamproof_judge::verdict::Verdict;

/// Nights in which the turn goes once around the list.
const TURN: usize = 4;

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

/// The part of a night that stored cases have on one subject.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    /// Time after which no case is begun. A subject that compiles each shape would take minutes for all.
    pub(super) time: Duration,
    /// Number of the night. Each begins elsewhere in the list, so that no case is left out in all of them.
    pub(super) night: u32,
    pub(super) jobs: usize,
}

impl Part {
    /// Returns the positions of a list in the order in which this night takes them.
    fn turn(self, length: usize) -> impl Iterator<Item = usize> + Send {
        let first = self.night as usize % TURN * length / TURN;
        (first..length).chain(0..first)
    }
}

/// Judges stored cases on a subject, several at a time; `dir` becomes the folder of this run.
pub(super) fn judge(
    subject: &str,
    stored: &StoredCases,
    known: &Known,
    dir: &Path,
    part: Part,
    watch: &Watch,
) -> Result<Regressions, NightError> {
    let (registered, run) = (Registered::new(subject)?, RunDir::create(dir)?);
    let (findings, control) = (run.findings()?, watch.begin(&format!("{subject} regressions")));
    warm_up(&registered, part.jobs);
    let begun = Instant::now();
    let judge_one = |(file, case): &(PathBuf, Case)| -> Result<Option<Verdict>, NightError> {
        if control.stopped() || begun.elapsed() >= part.time {
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
    // One after the other by the turn: a parallel slice would begin at several places.
    let judge_at = |at: usize| judge_one(&stored[at]).map(|verdict| (at, verdict));
    let judge_all =
        || part.turn(stored.len()).par_bridge().map(judge_at).collect::<Result<BTreeMap<_, _>, _>>();
    let verdicts = match rayon::ThreadPoolBuilder::new().num_threads(part.jobs).build() {
        Ok(pool) => pool.install(judge_all),
        // A machine without room for more threads still has the common ones.
        Err(_) => judge_all(),
    }?;
    let mut sum = Regressions { subject: subject.to_owned(), ..Regressions::default() };
    for (at, verdict) in verdicts {
        let (path, case) = &stored[at];
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

    fn part(night: u32) -> Part {
        Part { time: Duration::from_secs(60), night, jobs: 1 }
    }

    /// Test that what fails has the key that the list of known failures takes, and a file that shows it again.
    #[test]
    fn a_failing_case_is_a_finding_on_disk() {
        let place = tempfile::tempdir().unwrap();
        let (watch, dir, subject) = (Watch::default(), place.path().join("run"), "window-off-by-one");
        let judged = judge(subject, &stored(), &Known::default(), &dir, part(1), &watch).unwrap();
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
        let judged = judge("emulated", &stored(), &Known::default(), &dir, part(1), &watch).unwrap();
        assert_eq!((judged.not_begun.len(), judged.held.len()), (1, 0));
        assert!(judged.to_string().ends_with("internal 0 · not begun 1"), "{judged}");
    }
    #[test]
    fn each_night_takes_all_cases_and_begins_elsewhere() {
        let turns = [1, 2, 3, 4, 5].map(|night| part(night).turn(10).collect::<Vec<_>>());
        assert_eq!(turns[0], [2, 3, 4, 5, 6, 7, 8, 9, 0, 1]);
        assert_eq!([1, 2, 3, 4].map(|night| turns[night][0]), [5, 7, 0, 2]);
        assert_eq!(part(1).turn(0).count(), 0);
    }

    #[test]
    fn no_case_begins_when_the_time_is_over() {
        let place = tempfile::tempdir().unwrap();
        let (watch, dir) = (Watch::default(), place.path().join("run"));
        let part = Part { time: Duration::ZERO, ..part(1) };
        let judged = judge("emulated", &stored(), &Known::default(), &dir, part, &watch).unwrap();
        assert_eq!((judged.not_begun.len(), judged.held.len()), (1, 0));
    }
}
