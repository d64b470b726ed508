//! Findings of a campaign: they are recorded, shrunk, counted once, and the same with any number of threads.

use std::fs;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::crashing::Crashing;
use seamproof::backends::{self, BackendError};
use seamproof::campaign::{
    self, Canary, Control, Distinct, Early, Event, FAILING_MIN, OWN_FAILURES_MAX, Observer, Options, Plan,
    PlantedSubjects, Shard, Silent, Sinks, Subjects, Summary, Wrong,
};
use seamproof::record::Findings;
use seamproof_judge::case::{Case, Subject};
use seamproof_judge::evaluate::evaluate;
use seamproof_judge::failure::{Symptom, features, ratio};
use seamproof_judge::finding::Check;
use seamproof_judge::generate::Profile;
use seamproof_judge::subject::{Backend, Declaration, MaskForm, Outputs, RunError, Table};
use seamproof_judge::subjects::Emulated;
use seamproof_judge::verdict::Verdict;
use seamproof_oracle::{Inputs, Problem, Sink};

const CASES: u64 = 200;

/// Observer that keeps the events as text.
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
    // Both campaigns write to one place, because events name their files.
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
        // The subject crashes from 4 tokens on. An identity may ask it about a problem larger than the case.
        assert!(case.problem.tokens() <= 4, "{}", case.problem.tokens());
        let subject = Crashing.backend(&case.subject.options).expect("the subject is made");
        assert!(matches!(evaluate(subject.as_ref(), &case.problem), Verdict::Finding(_)));
        let name = format!("{}-{}", Symptom::of(&found.finding).name(), case.id());
        let path = place.path().join(format!("{name}.rs"));
        let test = fs::read_to_string(&path).expect("a test to paste");
        assert!(test.contains(&case.to_json()));
        // No command knows the subject, so the words must point to the test.
        let words = fs::read_to_string(path.with_extension("txt")).expect("words");
        let told = summary.distinct.iter().find(|distinct| distinct.name.as_ref() == Some(&name));
        let told = &told.expect("the summary tells it").replay;
        assert!(words.ends_with(&format!("\nreplay: {told}\n")), "{words}");
        let path = path.display().to_string();
        assert!([&path, "\"broken\""].iter().all(|text| told.contains(*text)), "{told}");
        assert!(!told.contains("seamproof replay"), "{told}");
    }
}

/// Tests that findings left, as they were pasted. They compile, and hold once the subject is right.
mod pasted {
    use std::collections::BTreeMap;

    use seamproof_judge::subjects::Emulated;

    /// Returns the subject that a reader puts in the place of the name. The fault is gone in it.
    fn your_backend(options: &BTreeMap<String, String>) -> Emulated {
        assert_eq!(options["q_tile"], "16");
        Emulated::default()
    }

    include!("pasted/registered.rs");
    include!("pasted/foreign.rs");
}

/// Test that a case of a subject of this program is judged by its name, and one of another crate's by the subject
/// that the crate puts there.
#[test]
fn a_test_to_paste_is_that_of_the_module_above() {
    let stored = concat!(env!("CARGO_MANIFEST_DIR"), "/corpus/regressions/te-1930-seven-in-eight.json");
    let case = Case { story: None, ..Case::load(Path::new(stored)).expect("a stored case") };
    let place = tempfile::tempdir().expect("a temporary directory");
    let findings = Findings::create(place.path()).expect("the directory is made");
    let texts = [include_str!("pasted/registered.rs"), include_str!("pasted/foreign.rs")];
    for (subject, name, text) in
        [("emulated", "registered", texts[0]), ("my \"kernel\"", "foreign", texts[1])]
    {
        let options = [("q_tile".to_owned(), "16".to_owned())].into_iter().collect();
        let case = Case { subject: Subject { name: subject.to_owned(), options }, ..case.clone() };
        findings.explain(name, &case).expect("the test is written");
        let left = fs::read_to_string(place.path().join(format!("{name}.rs"))).expect("a test to paste");
        assert!(left == text, "tests/suite/pasted/{name}.rs is to hold:\n{left}");
        let is_told = findings.replay(name, &case).starts_with("seamproof replay ");
        assert_eq!(is_told, subject == "emulated");
    }
}

/// A subject with a frequent fault on out, and a rare one on out that no case of the frequent one shows.
struct TwoFaults;

struct Faulty(Emulated);

impl Subjects for TwoFaults {
    fn name(&self) -> &str {
        "two-faults"
    }

    fn options(&self, _seed: u64) -> Options {
        Options::new()
    }

    fn backend(&self, _options: &Options) -> Result<Box<dyn Backend + '_>, BackendError> {
        Ok(Box::new(Faulty(Emulated::default())))
    }
}

impl Backend for Faulty {
    fn declaration(&self) -> Declaration {
        self.0.declaration()
    }

    fn inner(&self) -> Option<&dyn Backend> {
        Some(&self.0)
    }

    fn name(&self) -> &str {
        "two-faults"
    }

    fn run(&self, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
        let mut outputs = self.0.run(problem, inputs)?;
        let frequent = problem.mask.left.is_some();
        let rare = problem.softmax.sink == Sink::Learnable && problem.heads.q > problem.heads.kv;
        if frequent || rare {
            outputs.ranks.iter_mut().for_each(|rank| rank.out.mapv_inplace(shifted));
        }
        Ok(outputs)
    }
}

/// Returns a value that is wrong by far. 0 and NaN stay, since they stand where nobody writes.
fn shifted(value: f32) -> f32 {
    if value == 0.0 || value.is_nan() { value } else { value + 8.0 }
}

#[test]
fn a_rare_fault_is_not_lost_among_cases_of_a_frequent_one() {
    let place = tempfile::tempdir().expect("a temporary directory");
    let findings = Findings::create(place.path()).expect("the directory is made");
    let control = Control::default();
    let sinks = Sinks { findings: &findings, observer: &Silent, control: &control };
    let summary = campaign::run(&Plan { cases: Some(500), ..plan(2) }, &TwoFaults, &sinks);
    let has = |distinct: &Distinct, feature| distinct.key.features.contains(feature);
    let of = |test: &dyn Fn(&Distinct) -> bool| summary.distinct.iter().any(test);
    assert!(of(&|distinct| has(distinct, "left window") && !has(distinct, "sink")), "{summary}");
    assert!(of(&|distinct| has(distinct, "sink") && !has(distinct, "left window")), "{summary}");
    assert!(summary.not_shrunk > 0, "{summary}");
    assert_eq!(cases(place.path()).len(), summary.distinct.len() + summary.kept as usize);
    // Each has the largest error of all its cases, and its smallest problem.
    let least = |distinct: &Distinct| ratio(&distinct.found.finding);
    assert!(summary.distinct.iter().all(|distinct| distinct.worst >= least(distinct)), "{summary}");
    assert!(summary.distinct.iter().any(|distinct| distinct.worst > least(distinct)), "{summary}");
    let shown = |distinct: &Distinct| distinct.smallest.as_deref().map(features);
    let is_own = |distinct: &Distinct| shown(distinct) == Some(distinct.key.features.clone());
    assert!(summary.distinct.iter().all(is_own), "{summary}");
    // Minimal ones first, and small cases before large ones.
    let order = |distinct: &Distinct| (!distinct.found.minimal, distinct.size);
    assert!(summary.distinct.is_sorted_by_key(order), "{summary}");
}

#[test]
fn a_campaign_that_was_cut_short_is_too_little() {
    /// Observer that asks the campaign to stop after this number of judged cases.
    struct Stopping<'a>(&'a Control, u64);
    impl Observer for Stopping<'_> {
        fn event(&self, event: &Event) {
            if matches!(event, Event::Case(case) if case.index + 1 == self.1) {
                self.0.stop();
            }
        }
    }
    let too_short = |last: u64| {
        let place = tempfile::tempdir().expect("a temporary directory");
        let findings = Findings::create(place.path()).expect("the directory is made");
        let control = Control::default();
        let sinks = Sinks { findings: &findings, observer: &Stopping(&control, last), control: &control };
        let summary = campaign::run(&plan(1), &PlantedSubjects::default(), &sinks);
        assert!(summary.interrupted);
        summary.missed.iter().any(|missed| missed.contains("interrupted"))
    };
    assert!(too_short(CASES / 2));
    assert!(!too_short(CASES), "whoever stops it after its last case has not cut it short");
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
    let canary = campaign::canary(&plan(3), &Wrong::planted(), &findings, &Control::default());
    let finding = canary.finding.expect("the canary is found");
    assert!(finding.found.minimal);
    assert_eq!(cases(place.path()).len(), 1);
}

/// What a subject does on some problems.
#[derive(Clone, Copy)]
enum Accident {
    /// It raises an error on problems with an odd number of tokens.
    Raises,
    /// It raises an error on every problem.
    Broken,
    /// Its results are wrong wherever there are any.
    Wrong,
}

/// A subject with an accident, with the canary's fault or without it.
struct Accidental(Accident, bool);

struct AccidentalKernel(Accident, Box<dyn Backend>);

impl Subjects for Accidental {
    fn name(&self) -> &str {
        if self.1 { "accidental~wrong" } else { "accidental" }
    }

    fn options(&self, _seed: u64) -> Options {
        Options::new()
    }

    fn backend(&self, _options: &Options) -> Result<Box<dyn Backend + '_>, BackendError> {
        let right = || Box::new(Emulated::default()) as Box<dyn Backend>;
        Ok(Box::new(AccidentalKernel(self.0, if self.1 { backends::canary() } else { right() })))
    }
}

impl Backend for AccidentalKernel {
    fn declaration(&self) -> Declaration {
        self.1.as_ref().declaration()
    }

    fn inner(&self) -> Option<&dyn Backend> {
        Some(self.1.as_ref())
    }

    fn name(&self) -> &str {
        "accidental"
    }

    fn run(&self, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
        let mut outputs = self.1.run(problem, inputs)?;
        match self.0 {
            Accident::Raises if problem.tokens() % 2 == 1 => return Err(RunError::Crash("bad luck".into())),
            Accident::Raises => {}
            Accident::Broken => return Err(RunError::Crash("no luck".into())),
            Accident::Wrong => outputs.ranks.iter_mut().for_each(|rank| rank.out.mapv_inplace(shifted)),
        }
        Ok(outputs)
    }
}

/// Looks for the canary of a subject with an accident.
fn canary_of(accident: Accident, plan: &Plan, dir: &Path) -> Canary {
    let findings = Findings::create(dir).expect("the directory is made");
    let [wrong, right] = [true, false].map(|is_wrong| Box::new(Accidental(accident, is_wrong)));
    campaign::canary(plan, &Wrong { wrong, right, call: None }, &findings, &Control::default())
}

/// Test that a subject's own errors are neither taken for the canary nor shrunk, with any number of threads.
#[test]
fn an_error_of_the_subject_is_no_canary() {
    let place = tempfile::tempdir().expect("a temporary directory");
    let told = |seed: u64, jobs: usize| {
        let dir = place.path().join(format!("{seed}-{jobs}"));
        let canary = canary_of(Accident::Raises, &Plan { seed, ..plan(jobs) }, &dir);
        let own: Vec<u64> = canary.own.iter().map(|own| own.first_case).collect();
        assert!(canary.own.iter().all(|own| own.key.check == Check::Crash && !own.found.minimal));
        assert_eq!(cases(&dir).len(), own.len() + usize::from(canary.finding.is_some()));
        let finding = canary.finding.map(|finding| {
            assert!(finding.found.minimal && finding.key.check != Check::Crash, "{finding}");
            (finding.first_case, finding.problem)
        });
        assert_eq!(canary.not_told.is_some(), finding.is_none());
        (canary.cases, finding, own)
    };
    let all = (0..8).map(|seed| {
        let one = told(seed, 1);
        assert_eq!(one, told(seed, 3));
        one
    });
    let past_errors = all.filter(|(_, finding, own)| finding.is_some() && !own.is_empty()).count();
    assert!(past_errors > 0, "no seed has an error before its canary");
}

/// Test that a failure which the right call has as well is no canary. A few of them end the search, and the campaign
/// meets them.
#[test]
fn a_canary_is_not_told_of_a_subject_that_is_wrong_everywhere() {
    let place = tempfile::tempdir().expect("a temporary directory");
    let canary = canary_of(Accident::Wrong, &plan(3), &place.path().join("canary"));
    assert!(canary.finding.is_none() && canary.permits());
    assert_eq!(canary.own.len() as u64, OWN_FAILURES_MAX);
    let words = format!("canary    inconclusive: the subject fails by itself: 4 of {} cases", canary.cases);
    assert_eq!(canary.to_string(), words);
    for case in cases(&place.path().join("canary")) {
        assert_eq!(case.subject.name, "accidental", "the right call fails");
        assert!(!case.found.expect("a finding").minimal);
    }
    let findings = Findings::create(&place.path().join("findings")).expect("the directory is made");
    let control = Control::default();
    let sinks = Sinks { findings: &findings, observer: &Silent, control: &control };
    let wrong = Accidental(Accident::Wrong, false);
    let mut summary = campaign::run(&Plan { cases: Some(20), ..plan(2) }, &wrong, &sinks);
    summary.heed(&canary);
    assert!(!summary.distinct.is_empty() && summary.void.is_none() && summary.own.is_empty(), "{summary}");
    let right = PlantedSubjects::default();
    let mut held = campaign::run(&Plan { cases: Some(0), ..plan(1) }, &right, &sinks);
    held.heed(&canary);
    assert_eq!(held.own.len(), canary.own.len(), "what the campaign does not show is told");
    assert!(held.to_string().contains("no pass: 0 cases"), "{held}");
}

/// Test that a campaign with a limit of time ends early where every case fails in the same way, and one without runs
/// all of its cases.
#[test]
fn a_campaign_of_failures_alone_ends_before_its_time() {
    let place = tempfile::tempdir().expect("a temporary directory");
    let run = |name: &str, subjects: &dyn Subjects, plan: Plan| {
        let findings = Findings::create(&place.path().join(name)).expect("the directory is made");
        let control = Control::default();
        campaign::run(&plan, subjects, &Sinks { findings: &findings, observer: &Silent, control: &control })
    };
    let cases = FAILING_MIN + 300;
    let counted = Plan { cases: Some(cases), ..plan(2) };
    let timed = Plan { time: Some(Duration::from_secs(600)), ..counted.clone() };
    let broken = Accidental(Accident::Broken, false);
    let early = run("early", &broken, timed.clone());
    assert_eq!(early.ended_early, Some(Early::NothingNew), "{early}");
    assert!((FAILING_MIN..cases).contains(&early.failed_count()) && early.cases < cases, "{early}");
    assert!(early.distinct.iter().all(|distinct| distinct.found.minimal), "{early}");
    assert!(
        early.to_string().contains("ended     before its time: every judged case with a key to see failed"),
        "{early}"
    );
    let all = run("all", &broken, counted);
    assert_eq!((all.cases, all.ended_early), (cases, None));
    let some = run("some", &Accidental(Accident::Raises, false), timed);
    assert_eq!((some.cases, some.ended_early), (cases, None), "some cases hold");
}

/// A kernel of a narrow table that refuses nothing by itself, with a fault where there is a learnable sink.
struct Narrow {
    table: Table,
    /// Number of problems outside the table that were asked.
    outside: AtomicU64,
}

struct NarrowKernel<'a>(&'a Narrow, Emulated);

impl Subjects for Narrow {
    fn name(&self) -> &str {
        "narrow"
    }

    fn options(&self, _seed: u64) -> Options {
        Options::new()
    }

    fn backend(&self, _options: &Options) -> Result<Box<dyn Backend + '_>, BackendError> {
        Ok(Box::new(NarrowKernel(self, Emulated::default())))
    }
}

impl Backend for NarrowKernel<'_> {
    fn declaration(&self) -> Declaration {
        let mut declaration = self.1.declaration().with_table(self.0.table.clone());
        declaration.refuses = false;
        declaration
    }

    fn inner(&self) -> Option<&dyn Backend> {
        Some(&self.1)
    }

    fn name(&self) -> &str {
        "narrow"
    }

    fn run(&self, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
        self.0.outside.fetch_add(u64::from(self.0.table.refusal(problem).is_some()), Ordering::Relaxed);
        let mut outputs = self.1.run(problem, inputs)?;
        if problem.softmax.sink == Sink::Learnable {
            outputs.ranks.iter_mut().for_each(|rank| rank.out.mapv_inplace(shifted));
        }
        Ok(outputs)
    }
}

/// Test that a campaign asks a narrow kernel inside its table alone, shrinks to a case inside, and asks no more floors
/// of it than its table can show.
#[test]
fn a_narrow_kernel_is_asked_inside_its_table() {
    let place = tempfile::tempdir().expect("a temporary directory");
    let findings = Findings::create(place.path()).expect("the directory is made");
    let control = Control::default();
    let sinks = Sinks { findings: &findings, observer: &Silent, control: &control };
    let mut table = Emulated::default().declaration().table;
    table.masks.forms = vec![MaskForm::Causal];
    table.lengths.equal = true;
    table.layout.padding = false;
    table.parallel.algorithms = vec!["single"];
    let narrow = Narrow { table, outside: AtomicU64::new(0) };
    let plan = Plan { cases: Some(1200), profile: Profile::Seams, ..plan(2) };
    let summary = campaign::run(&plan, &narrow, &sinks);
    assert_eq!(narrow.outside.load(Ordering::Relaxed), 0, "{summary}");
    assert!(summary.refused.is_empty() && summary.infrastructure.is_empty(), "{summary}");
    assert!(summary.missed.is_empty() && summary.adapter.is_empty(), "{summary}");
    assert!(summary.to_string().contains("not asked: padding-amount ("), "{summary}");
    let stored = cases(place.path());
    assert!(!stored.is_empty());
    for case in stored {
        assert_eq!(narrow.table.refusal(&case.problem), None, "{:?}", case.problem);
        assert_eq!(case.problem.softmax.sink, Sink::Learnable);
    }
}
