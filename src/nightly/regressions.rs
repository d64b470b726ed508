//! The stored regressions on one subject, each judged once a night: a verdict is a line on disk as soon as it is there, and
//! a start that goes on with the night takes it from there, as long as the case is the same text. What could not be judged
//! is tried again.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Mutex, PoisonError};

use rayon::prelude::*;
use seamproof_oracle::Problem;
use serde::{Deserialize, Serialize};

use super::home::JSON_BYTES_MAX;
use super::{NightError, Watch};
use crate::campaign::{Registered, Subjects};
use crate::paste::{code, replay_command};
use crate::record::EventLog;
use seamproof_judge::case::{CASE_BYTES_MAX, Case};
use seamproof_judge::evaluate::evaluate;
use seamproof_judge::failure::FailureKey;
use seamproof_judge::files;
use seamproof_judge::verdict::Verdict;

/// How the name of a log ends.
pub(super) const LOG: &str = "-regressions.jsonl";

/// Stored cases on one subject.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Regressions {
    /// The subject.
    pub subject: String,
    /// Files of the cases in which every check held.
    pub held: Vec<String>,
    /// Files of the cases that the subject refuses.
    pub refused: Vec<String>,
    /// Cases that failed.
    pub failed: Vec<Regressed>,
    /// Cases that could not be judged.
    pub internal: Vec<Unjudged>,
}

/// A stored case that could not be judged.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Unjudged {
    /// Its file.
    pub file: String,
    /// Why not.
    pub what: String,
}

impl std::fmt::Display for Unjudged {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.file, self.what)
    }
}

/// A stored case that failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Regressed {
    /// Its file.
    pub file: String,
    /// The subject on which it failed.
    pub subject: String,
    /// Its [`FailureKey`] in words, as the list of known failures takes it.
    pub key: String,
    /// Whether the subject died or hung.
    pub is_end: bool,
    /// What is wrong.
    pub finding: String,
    /// The command that shows it again.
    pub replay: String,
}

impl std::fmt::Display for Regressed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Regressed { file, key, finding, replay, .. } = self;
        write!(f, "**{key}** {file}: {finding}\n  {}", code(replay))
    }
}

/// A stored case that was judged.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Judged {
    /// Its file.
    file: String,
    /// The subject on which it was judged.
    subject: String,
    /// BLAKE3 of the file's text.
    digest: String,
    /// What came of it.
    came: Came,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Came {
    Held,
    Refused,
    /// The key, what is wrong, and whether the subject died or hung.
    Failed {
        key: String,
        finding: String,
        #[serde(default)]
        is_end: bool,
    },
    Internal(String),
}

impl Came {
    fn of(verdict: Verdict, backend: &str, problem: &Problem) -> Came {
        match verdict {
            Verdict::Pass(_) => Came::Held,
            Verdict::Refused(_) => Came::Refused,
            Verdict::Finding(finding) => Came::Failed {
                key: FailureKey::of(&finding, backend, problem).to_string(),
                finding: finding.to_string(),
                is_end: finding.check.is_end(),
            },
            other => Came::Internal(other.to_string()),
        }
    }
}

/// Judges those stored cases on a subject that `log` has no verdict of, and adds theirs to it; `None` where somebody stopped
/// the night before all were judged.
pub(super) fn judge(
    subject: &str,
    files: &[PathBuf],
    log: &Path,
    watch: &Watch,
) -> Result<Option<Regressions>, NightError> {
    let registered = Registered::new(subject)?;
    let (before, control) = (read(log).map_err(unread(log))?, watch.next());
    let lines = Mutex::new(EventLog::append(log)?);
    let of_file = |path: &PathBuf| -> Result<Option<Judged>, NightError> {
        let text = files::read(path, CASE_BYTES_MAX).map_err(unread(path))?;
        let (file, digest) = (path.display().to_string(), blake3::hash(&text).to_hex().to_string());
        if let Some(judged) = before.get(&file).filter(|judged| judged.digest == digest) {
            return Ok(Some(judged.clone()));
        }
        if watch.stopped() {
            return Ok(None);
        }
        let case = Case::load(path)?;
        let backend = registered.backend(registered.fixed())?;
        let verdict = evaluate(backend.as_ref(), &case.problem);
        let came = Came::of(verdict, registered.name(), &case.problem);
        control.cases.fetch_add(1, Ordering::Relaxed);
        control.failed.fetch_add(u64::from(matches!(came, Came::Failed { .. })), Ordering::Relaxed);
        let judged = Judged { file, subject: subject.to_owned(), digest, came };
        lines.lock().unwrap_or_else(PoisonError::into_inner).write(&judged)?;
        Ok(Some(judged))
    };
    let all = files.par_iter().map(of_file).collect::<Result<Vec<_>, _>>()?;
    let all: Option<Vec<Judged>> = all.into_iter().collect();
    Ok(all.map(|all| sum(subject, all)))
}

/// What an earlier start judged, by file; lines that are not whole, and cases that could not be judged, do not count. Nothing
/// where there is no log.
fn read(log: &Path) -> io::Result<BTreeMap<String, Judged>> {
    if files::is_absent(log) {
        return Ok(BTreeMap::new());
    }
    let text = files::read(log, JSON_BYTES_MAX)?;
    let text = String::from_utf8_lossy(&text);
    let whole = text.lines().filter_map(|line| serde_json::from_str::<Judged>(line).ok());
    let judged = whole.filter(|judged| !matches!(judged.came, Came::Internal(_)));
    Ok(judged.map(|judged| (judged.file.clone(), judged)).collect())
}

/// The stored cases that a log says failed.
pub(super) fn failed_in(log: &Path) -> io::Result<Vec<Regressed>> {
    Ok(read(log)?.into_values().filter_map(|judged| regressed(&judged)).collect())
}

/// A stored case that failed; `None` where another thing came of it.
fn regressed(Judged { file, subject, came, .. }: &Judged) -> Option<Regressed> {
    let Came::Failed { key, finding, is_end } = came else { return None };
    Some(Regressed {
        file: file.clone(),
        subject: subject.clone(),
        key: key.clone(),
        is_end: *is_end,
        finding: finding.clone(),
        replay: replay_command(Path::new(file), Some(subject)),
    })
}

/// The files of the stored regressions of a corpus, by name.
pub fn regressions_of(corpus: &Path) -> Result<Vec<PathBuf>, NightError> {
    let folder = corpus.join("regressions");
    let missing = |error: std::io::Error| NightError::Read {
        path: folder.clone(),
        what: format!(
            "{error}; --corpus names the folder that holds regressions/, as corpus/ of a checkout does"
        ),
    };
    let entries = fs::read_dir(&folder).map_err(missing)?.map(|entry| entry.map(|entry| entry.path()));
    let mut files = entries.collect::<Result<Vec<_>, _>>().map_err(missing)?;
    files.retain(|path| files::is_json(path));
    files.sort();
    Ok(files)
}

fn unread(path: &Path) -> impl Fn(std::io::Error) -> NightError {
    move |error| NightError::Read { path: path.to_owned(), what: error.to_string() }
}

fn sum(subject: &str, all: Vec<Judged>) -> Regressions {
    let mut sum = Regressions { subject: subject.to_owned(), ..Regressions::default() };
    for judged in all {
        sum.failed.extend(regressed(&judged));
        let Judged { file, came, .. } = judged;
        match came {
            Came::Held => sum.held.push(file),
            Came::Refused => sum.refused.push(file),
            Came::Failed { .. } => {}
            Came::Internal(what) => sum.internal.push(Unjudged { file, what }),
        }
    }
    sum
}

impl std::fmt::Display for Regressions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Regressions { subject, held, refused, failed, internal } = self;
        let (held, refused, failed, internal) = (held.len(), refused.len(), failed.len(), internal.len());
        write!(
            f,
            "{subject} regressions: held {held} · refused {refused} · failed {failed} · internal {internal}"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A corpus of two cases that hold.
    fn corpus() -> tempfile::TempDir {
        let corpus = tempfile::tempdir().unwrap();
        fs::create_dir(corpus.path().join("regressions")).unwrap();
        for name in ["fa-2515-no-sequences.json", "te-2186-short-sequences.json"] {
            let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus/regressions").join(name);
            fs::copy(from, corpus.path().join("regressions").join(name)).unwrap();
        }
        corpus
    }

    #[test]
    fn what_was_judged_is_not_judged_again_unless_it_is_another_case() {
        let corpus = corpus();
        let log = corpus.path().join("log.jsonl");
        let files = regressions_of(corpus.path()).unwrap();
        // The list is the night's: a file that comes later is the next one's.
        let late = corpus.path().join("regressions/late.json");
        fs::copy(&files[0], late).unwrap();
        let stopped = Watch::default();
        stopped.stop();
        assert_eq!(judge("emulated", &files, &log, &stopped).unwrap(), None, "nothing is begun any more");
        assert_eq!(fs::read_to_string(&log).unwrap(), "");
        let judge = || judge("emulated", &files, &log, &Watch::default()).unwrap().unwrap();
        let first = judge();
        assert_eq!((first.held.len(), first.failed.len()), (2, 0));
        let text = fs::read_to_string(&log).unwrap();
        assert_eq!(text.lines().count(), 2);

        // What the log says is taken, a torn line is not, and what could not be judged is tried again.
        let [mut failed, internal] =
            [0, 1].map(|line| serde_json::from_str::<Judged>(text.lines().nth(line).unwrap()).unwrap());
        failed.came =
            Came::Failed { key: "a key".to_owned(), finding: "as it was".to_owned(), is_end: false };
        let internal = Judged { came: Came::Internal("no device".to_owned()), ..internal };
        let lines = [&failed, &internal].map(|judged| serde_json::to_string(judged).unwrap());
        fs::write(&log, format!("{}\n{}\n{{\"file\":", lines[0], lines[1])).unwrap();
        let again = judge();
        let [told] = &again.failed[..] else { panic!("{:?}", again.failed) };
        assert_eq!((again.held.len(), &*told.finding, &*told.key), (1, "as it was", "a key"));
        assert_eq!(judge(), again, "the line behind the torn one is whole");
        assert_eq!(fs::read_to_string(&log).unwrap().lines().count(), 4);

        let path = Path::new(&failed.file);
        fs::write(path, fs::read_to_string(path).unwrap() + " ").unwrap();
        assert_eq!(judge().held.len(), 2);
    }

    /// What fails is named as the list of known failures names it, with the command that shows it on that subject.
    #[test]
    fn a_failing_case_has_its_key_and_its_command() {
        let place = tempfile::tempdir().unwrap();
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus/regressions");
        let file = folder.join("te-1212-window-one-key-short.json");
        let subject = "window-off-by-one";
        let log = place.path().join("log.jsonl");
        let watch = Watch::default();
        watch.begin("regressions".to_owned());
        let judged = judge(subject, std::slice::from_ref(&file), &log, &watch).unwrap().unwrap();
        let progress = watch.progress();
        assert_eq!((&*progress.what, progress.cases, progress.failed), ("regressions", 1, 1));
        let [told] = &judged.failed[..] else { panic!("{judged:?}") };
        let mut case = Case::load(&file).unwrap();
        case.subject.name = subject.to_owned();
        let Verdict::Finding(finding) = crate::replay::replay(&case).unwrap() else { panic!("it fails") };
        assert_eq!(told.key, FailureKey::of(&finding, subject, &case.problem).to_string());
        assert_eq!(told.finding, finding.to_string());
        assert_eq!(told.replay, format!("seamproof replay {} --backend {subject}", file.display()));
    }
}
