//! `seamproof replay`: judges stored cases again.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::path::{Path, PathBuf};

use super::exit::Exit;
use super::options::BesideOptions;
use super::output::{complain, print_line};
use super::{CliError, load_beside, recorded_beside, tell_if_long, worker};
use crate::campaign::{OnDisk, Registered};
use crate::nightly::{found_by, newest_of};
use crate::record::findings_of;
use crate::recording;
use crate::replay::replay_as;
use crate::worker::{is_lacking, shared};
use seamproof_judge::case::{Case, CaseError, InputSource, Subject};
use seamproof_judge::files;
use seamproof_judge::finding::Finding;
use seamproof_judge::prose;
use seamproof_judge::subjects::SubjectName;
use seamproof_judge::verdict::Verdict;

const EXAMPLES: &str = "\
Examples:
  seamproof replay corpus/regressions             every *.json in a directory
  seamproof replay seamproof.out                  what the last campaign found
  seamproof replay nights/night-0001              what a night found
  seamproof replay case.json --backend emulated   a case on another subject
  seamproof replay case.json --beside python:old.py
                                                  and the results of both held to each other

Cases of Python subjects whose library or device this machine lacks are skipped, with a line each.";

#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(super) struct Args {
    /// Case files, directories of them, or directories of campaigns or nights
    #[arg(required = true, value_name = "FILE|DIR")]
    paths: Vec<PathBuf>,
    /// Judge this subject instead of each case's own
    #[arg(long, value_name = "NAME")]
    backend: Option<String>,
    #[command(flatten)]
    beside: BesideOptions,
    #[command(flatten)]
    workers: worker::WorkerOptions,
}

/// Outcome of a stored case.
enum Replayed {
    Judged(Box<(Case, Verdict)>),
    /// A case of a subject from outside whose library or device this machine lacks, with the reason.
    Skipped(String),
}

/// Counts of cases by outcome.
#[derive(Default)]
pub(super) struct Tally {
    held: usize,
    refused: usize,
    failed: usize,
    crashed: usize,
    unreadable: usize,
    internal: usize,
    skipped: usize,
}

pub(super) fn run(args: &Args) -> Result<Exit, CliError> {
    args.workers.configure();
    // A fault of the subject itself is the same for every file, so it is told once.
    if let Some(text) = &args.backend {
        let subject = Registered::new(text)?;
        subject.ready().map_err(|what| CliError::Start { name: text.clone(), what })?;
    }
    let (mut tally, mut lacking) = (Tally::default(), Lacking::default());
    let (all, unread) = asked(&args.paths)?;
    unread.iter().for_each(complain);
    tally.unreadable = unread.len();
    for path in all {
        match replayed(&path, args, &mut lacking) {
            Ok(Replayed::Judged(judged)) => {
                let (case, verdict) = judged.as_ref();
                let gone = gone(case, verdict).filter(|_| args.backend.is_none()).unwrap_or_default();
                print_line(&tally.line(&path.display(), &(described(case) + &gone), verdict));
            }
            Ok(Replayed::Skipped(what)) => {
                print_line(&format_args!("skipped  {} · {what}", path.display()));
                tally.skipped += 1;
            }
            Err(error) => {
                // One bad file must not hide what the others show.
                complain(&error);
                tally.unreadable += 1;
            }
        }
    }
    print_line(&tally.summary());
    Ok(tally.exit())
}

/// Subjects from outside, by their name and options, each with the reason why this machine lacks it; `None` for one
/// that is here.
type Lacking = BTreeMap<String, Option<String>>;

/// Returns why this machine lacks a case's subject, if it is one from outside. A worker is started to find out.
fn lacks(case: &Case, known: &mut Lacking) -> Option<String> {
    if !SubjectName::from(&case.subject).is_outside() {
        return None;
    }
    let ask = || {
        let Subject { name, options } = case.subject.clone();
        let subject = Registered::with(name, options).map_err(|error| error.to_string());
        let why = subject.and_then(|subject| subject.ready()).err()?;
        // It has used up the seats of the next subject's workers.
        shared().restore();
        is_lacking(&why).then(|| why.replace('\n', "; "))
    };
    let Subject { name, options } = &case.subject;
    known.entry(format!("{name} {options:?}")).or_insert_with(ask).clone()
}

fn replayed(path: &Path, args: &Args, lacking: &mut Lacking) -> Result<Replayed, CliError> {
    let backend = args.backend.as_deref();
    // A subject that is asked for by name has to be there.
    let stored = if backend.is_none() { Case::load(path).ok() } else { None };
    if let Some(what) = stored.and_then(|case| lacks(&case, lacking)) {
        return Ok(Replayed::Skipped(what));
    }
    if let Some((case, recording)) = recorded_beside(path)?.filter(|_| backend.is_none()) {
        let sample = recording::sample_of(&case);
        if sample.is_none() {
            tell_if_long(path, &case.problem);
        }
        let verdict = recording::judge(&recording, sample, None)?;
        return judged(path, case, verdict);
    }
    let (case, backend) = load_beside(path, backend, &args.beside)?;
    tell_if_long(path, &case.problem);
    let file = || path.display().to_string();
    let verdict = replay_as(&case, backend.as_ref(), &case.problem);
    judged(path, case, verdict.map_err(|source| CliError::Replay { file: file(), source })?)
}

/// Returns the problem of a stored case in words. Values of a recording were not drawn.
fn described(case: &Case) -> String {
    match case.inputs {
        InputSource::Generated => prose::describe(&case.problem),
        InputSource::Recorded { .. } => prose::describe_recorded(&case.problem),
    }
}

/// Returns in words that a case holds in which something was found: it was mended, or it comes and goes.
fn gone(case: &Case, verdict: &Verdict) -> Option<String> {
    let found = case.found.as_ref().filter(|_| matches!(verdict, Verdict::Pass(_)))?;
    let Finding { check, tensor, .. } = &found.finding;
    let tensor = tensor.map(|tensor| format!(" · {tensor}")).unwrap_or_default();
    Some(format!(" · what was found here ({check}{tensor}) did not recur"))
}

fn judged(path: &Path, case: Case, verdict: Verdict) -> Result<Replayed, CliError> {
    match verdict {
        Verdict::TooLarge(what) => Err(CliError::TooLarge { file: path.display().to_string(), what }),
        verdict => Ok(Replayed::Judged(Box::new((case, verdict)))),
    }
}

/// Returns the case files in the order given, those of a directory by name, and what cannot be read of a night.
fn asked(paths: &[PathBuf]) -> Result<(Vec<PathBuf>, Vec<String>), CliError> {
    let (mut all, mut unread) = (Vec::new(), Vec::new());
    for path in paths {
        if let Some(OnDisk { cases, unread: others }) = found_by(path) {
            if cases.is_empty() && others.is_empty() {
                return Err(CliError::Usage(format!("{}: this night found nothing", path.display())));
            }
            all.extend(cases);
            unread.extend(others);
        } else if let Some(night) = newest_of(path) {
            let (home, night) = (path.display(), night.display());
            return Err(CliError::Usage(format!("{home}: holds nights; name one of them, such as {night}")));
        } else if path.is_dir() {
            all.extend(files_in(path)?);
        } else {
            all.push(path.clone());
        }
    }
    Ok((all, unread))
}

/// Returns the cases in a directory, or among a campaign's findings.
fn files_in(path: &Path) -> Result<Vec<PathBuf>, CliError> {
    let findings = findings_of(path);
    let dir = findings.as_deref().unwrap_or(path);
    let listed = files::list(dir).map_err(|source| CaseError::Read { path: dir.to_owned(), source })?;
    let files: Vec<PathBuf> = listed.into_iter().filter(|path| files::is_json(path)).collect();
    if files.is_empty() {
        let what = if findings.is_some() {
            "this campaign found nothing"
        } else {
            "holds no *.json; name a directory of cases"
        };
        return Err(CliError::Usage(format!("{}: {what}", path.display())));
    }
    Ok(files)
}

impl Tally {
    /// Counts a verdict, and returns it as a line about the case of this name, with its problem in words.
    pub(super) fn line(&mut self, path: &dyn Display, problem: &str, verdict: &Verdict) -> String {
        match verdict {
            Verdict::Pass(margin) => {
                self.held += 1;
                format!("held     {path} · margin {:.2} · {problem}", margin.worst())
            }
            Verdict::Refused(reason) => {
                self.refused += 1;
                format!("refused  {path} · {reason} · {problem}")
            }
            Verdict::Finding(finding) => {
                *(if finding.check.is_end() { &mut self.crashed } else { &mut self.failed }) += 1;
                format!("FAIL     {path} · {finding} · {problem}")
            }
            // Only fields that make no problem are malformed, and a stored case holds a problem.
            Verdict::RefusedMalformed(rule) => {
                self.internal += 1;
                format!("internal {path} · refused as malformed: {rule} · {problem}")
            }
            Verdict::TooLarge(what) | Verdict::Infrastructure(what) => {
                self.internal += 1;
                format!("internal {path} · {what} · {problem}")
            }
        }
    }

    fn summary(&self) -> String {
        let skipped = match self.skipped {
            0 => String::new(),
            count => format!(" · skipped {count}"),
        };
        format!(
            "cases    held {} · refused {} · failed {} · crashed {} · unreadable {} · internal {}{skipped}",
            self.held, self.refused, self.failed, self.crashed, self.unreadable, self.internal
        )
    }

    /// Returns the exit code of all that was counted.
    pub(super) fn exit(&self) -> Exit {
        match self {
            Tally { failed: 1.., .. } => Exit::Finding,
            Tally { crashed: 1.., .. } => Exit::Crash,
            Tally { unreadable: 1.., .. } => Exit::Input,
            Tally { internal: 1.., .. } => Exit::Internal,
            Tally { held: 0, .. } => Exit::TooLittle,
            _ => Exit::Held,
        }
    }
}
