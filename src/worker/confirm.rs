//! Confirmation of a worker's failure: the search for what it really was.
//!
//! A run that ended its worker is repeated *alone*, in a fresh worker. If it fails there too, the failure belongs to
//! that run. If not, the worker's *history* (the runs since its start) is run again before it. Where that shows the
//! failure, the history is cut down to the few runs that the failure needs. Otherwise the failure could not be
//! reproduced, and the text says how often this was tried. A sentinel that came out differently is followed up in the
//! same way, with its digest as the sign of failure.

use super::history::{History, PastRun, smallest};
use super::message;
use super::process::is_abandoned;
use super::sentinel;
use super::session::{Death, Session, StartError};
use super::settings::{Deadlines, Launch};
use seamproof_judge::case::{EARLIER_MAX, Subject};
use seamproof_judge::finding::Cause;
use seamproof_judge::finding::Earlier;
use seamproof_judge::prose::{self, counted};
use seamproof_judge::subject::{Ended, Outputs, RunError};

/// Number of times that a failure which does not show at once is tried again, and that a reproduced failure is
/// repeated.
const TRIES: usize = 3;
/// Largest number of fresh workers that one search may use.
const SEARCH_MAX: usize = 64;
/// Largest number of fresh workers that the search for a hang may use, since each may take a whole deadline.
const HANG_SEARCH_MAX: usize = 4;
/// Largest number of needed runs that are written out.
const SHOWN_MAX: usize = 3;

/// Reason why a failure is not confirmed once this program waits for no run.
const ASKED_TO_END: &str = "the program was asked to end";

/// Source of fresh workers.
pub(super) struct Bench {
    pub(super) launch: Launch,
    pub(super) device: usize,
    pub(super) deadlines: Deadlines,
}

impl Bench {
    /// Returns a fresh worker with a subject open.
    pub(super) fn session(&self, subject: &Subject) -> Result<Session, StartError> {
        let mut session = Session::start(&self.launch, self.device, self.deadlines)?;
        session.open(subject)?;
        Ok(session)
    }

    /// Runs `before`, then the target, in a fresh worker.
    fn trial(&self, before: &[PastRun], target: &PastRun) -> Trial {
        let run = || -> Result<Trial, StartError> {
            let first = before.first().unwrap_or(target);
            let mut session = self.session(&first.subject)?;
            for entry in before {
                session.open(&entry.subject)?;
                if let Err(death) = session.run(&entry.body) {
                    return Err(format!("an earlier run failed: {}{}", death.ending, death.said));
                }
            }
            session.open(&target.subject)?;
            Ok(session.run(&target.body).map_or_else(Trial::Died, Trial::Answered))
        };
        match run().unwrap_or_else(Trial::Lost) {
            // The worker may have been killed because nobody waits for it.
            Trial::Died(_) | Trial::Lost(_) if is_abandoned() => Trial::Lost(ASKED_TO_END.to_owned()),
            trial => trial,
        }
    }
}

/// Result of a run in a fresh worker.
enum Trial {
    Answered(Result<Outputs, RunError>),
    Died(Death),
    /// A run that was not reached.
    Lost(String),
}

/// Explanation of a sentinel that came out differently, in words.
pub(super) enum Drift {
    /// A fault of the worker, which some run of it spoilt.
    Worker(String),
    /// A fault of the device, for every worker on it. The runs on it are not to blame.
    Device(String),
}

/// A run that failed, and all runs of its worker before it.
pub(super) struct Suspicion {
    pub(super) bench: Bench,
    pub(super) history: History,
    pub(super) target: PastRun,
}

impl Suspicion {
    /// Returns the ending of a death, after trying to confirm it.
    pub(super) fn confirmed(self, first: Death) -> Ended {
        let ended = |death: &Death, how: &str| Ended {
            ending: death.ending,
            what: format!("{how}{}", death.said),
            before: Vec::new(),
        };
        match self.bench.trial(&[], &self.target) {
            Trial::Died(again) if again.ending == first.ending => {
                ended(&again, "and again alone in a fresh worker")
            }
            Trial::Died(again) => {
                ended(&again, &format!("alone in a fresh worker; the first time {}", first.ending))
            }
            Trial::Lost(what) => ended(&first, &format!("could not be confirmed ({what})")),
            Trial::Answered(_) => {
                let died =
                    |before: &[PastRun]| matches!(self.bench.trial(before, &self.target), Trial::Died(_));
                let search = if first.ending.cause == Cause::Hang { HANG_SEARCH_MAX } else { SEARCH_MAX };
                let (how, needed) = self.in_company(&self.history.entries(), search, died);
                // A search that was broken off has shown nothing.
                if is_abandoned() {
                    let how =
                        format!("alone in a fresh worker it does not fail; not confirmed ({ASKED_TO_END})");
                    return ended(&first, &how);
                }
                let ended = ended(&first, &format!("alone in a fresh worker it does not fail; {how}"));
                Ended { before: stored(&needed), ..ended }
            }
        }
    }

    /// Returns the explanation of a sentinel whose results differ from the known ones.
    pub(super) fn drifted(self, known: &[u8; blake3::OUT_LEN]) -> Drift {
        let differs = |before: &[PastRun]| match self.bench.trial(before, &self.target) {
            Trial::Answered(Ok(outputs)) => sentinel::digest(&outputs) != *known,
            Trial::Answered(Err(_)) | Trial::Died(_) => true,
            Trial::Lost(_) => false,
        };
        // The last entry is the sentinel itself, which came out differently.
        let mut entries = self.history.entries();
        entries.pop();
        let doubtful = self.history.doubtful().saturating_sub(1);
        let what = format!(
            "its results changed; the {doubtful} runs of this worker since it last came out right are doubtful"
        );
        let wrong = if differs(&[]) { 1 + (1..TRIES).filter(|_| differs(&[])).count() } else { 0 };
        if wrong == TRIES {
            let bad = "in fresh workers it is wrong as well: the device went bad";
            return Drift::Device(format!("{what}; {bad}"));
        }
        let broken_off = || Drift::Worker(format!("{what}; not confirmed ({ASKED_TO_END})"));
        if is_abandoned() {
            return broken_off();
        }
        if wrong > 0 {
            let seldom =
                format!("in fresh workers it is wrong {wrong} of {TRIES} times: bits change from run to run");
            return Drift::Worker(format!("{what}; {seldom}"));
        }
        let suspects = &entries[entries.len().saturating_sub(doubtful)..];
        let (how, _) = self.in_company(suspects, SEARCH_MAX, differs);
        if is_abandoned() {
            return broken_off();
        }
        Drift::Worker(format!("{what}; in a fresh worker it is right; {how}"))
    }

    /// Returns the earlier runs that a failure needs which does not show alone, in words and as they are.
    fn in_company(
        &self,
        before: &[PastRun],
        search: usize,
        fails: impl Fn(&[PastRun]) -> bool,
    ) -> (String, Vec<PastRun>) {
        let forgotten = match self.history.forgotten() {
            0 => String::new(),
            count => format!(" ({count} still earlier ones are not kept)"),
        };
        let count = before.len();
        if count == 0 {
            let how = format!("no run came before it{forgotten}: not reproduced, 1 of 2 times in all");
            return (how, Vec::new());
        }
        let Some(tried) = (1..=TRIES).find(|_| fails(before)) else {
            let how = format!(
                "nor does it after the {} before it{forgotten}: not reproduced, 1 of {} times in all",
                counted(count, "run"),
                TRIES + 2
            );
            return (how, Vec::new());
        };
        let needed = smallest(before, search, &fails);
        let again = (0..TRIES).filter(|_| fails(&needed)).count();
        let seldom = if tried > 1 { format!(" (seen at try {tried})") } else { String::new() };
        let how = format!(
            "it fails after {} of the {count} runs before it, {again} of {TRIES} times{seldom}{forgotten}: {}",
            needed.len(),
            shown(&needed)
        );
        (how, needed)
    }
}

/// Returns runs as a case stores them; none where there are too many.
fn stored(entries: &[PastRun]) -> Vec<Earlier> {
    let all: Option<Vec<Earlier>> = entries.iter().map(earlier).collect();
    all.filter(|all| all.len() <= EARLIER_MAX).unwrap_or_default()
}

/// Returns all runs as cases store them. Runs of the same problem one after the other are one.
pub(super) fn told(entries: &[PastRun]) -> Vec<Earlier> {
    let mut all: Vec<Earlier> = entries.iter().filter_map(earlier).collect();
    all.dedup();
    all
}

fn earlier(entry: &PastRun) -> Option<Earlier> {
    let (problem, _) = message::decode_run(&entry.body).ok()?;
    Some(Earlier { options: entry.subject.options.clone(), problem })
}

/// Returns runs in words.
fn shown(entries: &[PastRun]) -> String {
    let words = |entry: &PastRun| match message::decode_run(&entry.body) {
        Ok((problem, _)) => format!("«{}»", prose::describe(&problem)),
        Err(error) => error.to_string(),
    };
    let mut texts: Vec<String> = entries.iter().take(SHOWN_MAX).map(words).collect();
    if entries.len() > SHOWN_MAX {
        texts.push(counted(entries.len() - SHOWN_MAX, "other"));
    }
    texts.join(", then ")
}
