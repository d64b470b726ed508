//! What a campaign does with findings: recorded, shrunk, counted once, and the same whatever the threads.

mod crashing;

use std::fs;
use std::path::Path;
use std::sync::Mutex;

use seamproof::campaign::{self, Control, Event, Observer, Plan, Shard, Sinks, Subjects, Summary};
use seamproof::case::Case;
use seamproof::evaluate::evaluate;
use seamproof::generate::Profile;
use seamproof::record::Findings;
use seamproof::verdict::{Check, Verdict};

use crashing::Crashing;

const CASES: u64 = 200;

/// Keeps the events as text.
#[derive(Default)]
struct Kept(Mutex<Vec<String>>);

impl Observer for Kept {
    fn event(&self, event: &Event) {
        let text = serde_json::to_string(event).expect("an event is JSON");
        self.0.lock().expect("no thread panicked").push(text);
    }
}

fn plan(jobs: usize) -> Plan {
    Plan { seed: 5, profile: Profile::Quick, cases: Some(CASES), time: None, shard: Shard::WHOLE, jobs }
}

fn run(dir: &Path, jobs: usize, control: &Control) -> (Summary, Vec<String>) {
    let findings = Findings::create(dir).expect("the directory is made");
    let kept = Kept::default();
    let summary =
        campaign::run(&plan(jobs), &Crashing, &Sinks { findings: &findings, observer: &kept, control });
    (summary, kept.0.into_inner().expect("no thread panicked"))
}

fn cases(dir: &Path) -> Vec<Case> {
    let entries = fs::read_dir(dir).expect("the directory is there");
    let paths = entries.map(|entry| entry.expect("an entry").path());
    let json = paths.filter(|path| path.extension().is_some_and(|extension| extension == "json"));
    json.map(|path| Case::load(&path).expect("a finding is a case")).collect()
}

#[test]
fn findings_depend_on_no_thread() {
    // In one place: events name their files.
    let place = tempfile::tempdir().expect("a temporary directory");
    let dir = place.path().join("findings");
    let (first, first_events) = run(&dir, 1, &Control::default());
    fs::remove_dir_all(&dir).expect("the directory is removed");
    let (second, second_events) = run(&dir, 3, &Control::default());
    assert_eq!(first_events, second_events);
    assert_eq!(first.failed, second.failed);
    assert_eq!(first.cases, CASES);
}

#[test]
fn each_failure_is_kept_once_minimal_and_fails_again() {
    let place = tempfile::tempdir().expect("a temporary directory");
    let (summary, _) = run(place.path(), 2, &Control::default());
    assert!(summary.failed[&Check::Crash] > CASES / 2, "{:?}", summary.failed);
    assert!(summary.not_shrunk > 0);
    let cases = cases(place.path());
    assert_eq!(cases.len(), summary.distinct.len());
    for case in &cases {
        let found = case.found.as_ref().expect("a finding says what was found");
        assert!(found.minimal);
        assert_eq!(case.problem.tokens(), 4, "one token less and the subject holds");
        let subject = Crashing.backend(&case.subject.options).expect("the subject is made");
        assert!(matches!(evaluate(subject.as_ref(), &case.problem), Verdict::Finding(_)));
        let name = format!("crash-{}", case.id());
        let test = fs::read_to_string(place.path().join(format!("{name}.rs"))).expect("a test to paste");
        assert!(test.contains(&case.to_json()));
        let words = fs::read_to_string(place.path().join(format!("{name}.txt"))).expect("words");
        assert!(words.contains("seamproof replay"));
    }
}

#[test]
fn a_stopped_campaign_runs_nothing_more_and_says_so() {
    let place = tempfile::tempdir().expect("a temporary directory");
    let control = Control::default();
    control.stop();
    let (summary, _) = run(place.path(), 2, &control);
    assert_eq!((summary.cases, summary.interrupted), (0, true));
    assert!(!summary.missed.is_empty());
}

#[test]
fn the_canary_is_found_and_nothing_else_is_left_behind() {
    let place = tempfile::tempdir().expect("a temporary directory");
    let findings = Findings::create(place.path()).expect("the directory is made");
    let canary = campaign::canary(&plan(3), &findings, &Control::default());
    let finding = canary.finding.expect("the canary is found");
    assert!(finding.minimal);
    assert_eq!(cases(place.path()).len(), 1);
}
