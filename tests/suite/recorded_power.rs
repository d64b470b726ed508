//! Power on recordings: which planted faults show in a run that is over, beside those that show to a judge who runs the
//! subject again. The table in `docs/scoring.md` is the one that is counted here.

use std::fmt::Write;
use std::fs;
use std::path::Path;

use rayon::prelude::*;
use seamproof::faults::Suspect;
use seamproof::recording;
use seamproof_judge::evaluate::{caught, evaluate};
use seamproof_judge::verdict::Verdict;
use seamproof_oracle::Problem;
use seamproof_simulator::faults::Plant;

use super::recordings::recorded;

/// Seed of the streams of problems.
const SEED: u64 = 1;
/// Number of problems on which a fault is looked for. It shows on each of them.
const PROBLEMS: usize = 24;
/// Kinds of faults, by the words of the table.
const KINDS: [&str; 3] = ["in a schedule", "in a stage of the kernel", "at the call"];

/// Returns the kind of a fault that a run can show, as an index of [`KINDS`].
fn kind(suspect: &Suspect) -> Option<usize> {
    match suspect {
        _ if !suspect.record().shows_in_runs() => None,
        Suspect::Planted(fault) => Some(usize::from(!matches!(fault.edit, Plant::Schedule(_)))),
        Suspect::Call(_) => Some(2),
        Suspect::Table(_) | Suspect::Source(_) | Suspect::Fp8(_) => None,
    }
}

/// Whether a recording of the run is found wrong.
fn shows_recorded(suspect: &Suspect, problem: &Problem) -> bool {
    let subject = suspect.subject(SEED).expect("the subject is made");
    let place = tempfile::tempdir().expect("a temporary directory");
    // A run that dies leaves no recording.
    let made = caught(|| recorded(place.path(), subject.as_ref(), problem, false).is_some());
    if made != Ok(true) {
        return false;
    }
    // Results of a wrong shape are refused as files, in words; that is no finding.
    let Ok(read) = recording::read(place.path()) else { return false };
    matches!(recording::judge(&read, None, None).expect("the files are the same"), Verdict::Finding(_))
}

/// What became of a fault: whether it showed to a live judge, and in a recording.
struct Seen {
    kind: usize,
    id: &'static str,
    live: bool,
    recorded: bool,
}

fn look(suspect: &Suspect) -> Option<Seen> {
    let (kind, subject) = (kind(suspect)?, suspect.subject(SEED).ok()?);
    let problems: Vec<Problem> = suspect.stream(SEED).ok()?.take(PROBLEMS).collect();
    let live =
        problems.iter().any(|problem| matches!(evaluate(subject.as_ref(), problem), Verdict::Finding(_)));
    let recorded = problems.iter().any(|problem| shows_recorded(suspect, problem));
    Some(Seen { kind, id: suspect.id(), live, recorded })
}

/// Returns the rows of the table.
fn table(all: &[Seen]) -> String {
    let mut rows = String::new();
    for (kind, words) in KINDS.iter().enumerate() {
        let of_kind: Vec<&Seen> = all.iter().filter(|seen| seen.kind == kind).collect();
        let count = |is: fn(&Seen) -> bool| of_kind.iter().filter(|seen| is(seen)).count();
        let mut unseen: Vec<String> =
            of_kind.iter().filter(|seen| !seen.recorded).map(|seen| format!("`{}`", seen.id)).collect();
        unseen.sort_unstable();
        let unseen = if unseen.is_empty() { "none".to_owned() } else { unseen.join(", ") };
        let (faults, live, recorded) = (of_kind.len(), count(|seen| seen.live), count(|seen| seen.recorded));
        writeln!(rows, "| {words} | {faults} | {live} | {recorded} | {unseen} |").expect("a text takes all");
    }
    rows
}

#[test]
fn the_faults_that_show_in_a_recording_are_those_of_the_table() {
    let suspects: Vec<Suspect> = Suspect::all().collect();
    let all: Vec<Seen> = suspects.par_iter().filter_map(look).collect();
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/scoring.md");
    let docs = fs::read_to_string(path).expect("the page is there");
    let table = table(&all);
    assert!(docs.contains(&table), "docs/scoring.md needs these rows:\n{table}");
}
