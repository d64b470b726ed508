//! The fault catalogue. Every fault applies to something, and something that it names catches it. The cases on which
//! it is caught hold when it is not planted.

use std::collections::BTreeSet;
use std::rc::Rc;

use crate::any_order::{AnyOrder, hopper};
use rayon::prelude::*;
use seamproof::backends;
use seamproof::campaign::Registered;
use seamproof::faults::{
    Effort, First, MEDIAN_CASES_MAX, NotRun, Score, Scored, Suspect, TABLE_FAULTS, by_campaign, by_checker,
    by_resources, call_stream, score, score_all, stream,
};
use seamproof_judge::evaluate::{evaluate, findings};
use seamproof_judge::finding::Check;
use seamproof_judge::generate::{self, Draw, Limits};
use seamproof_judge::ladder::faults::JudgeScore;
use seamproof_judge::ladder::{self, Judge, judge};
use seamproof_judge::subject::Backend;
use seamproof_judge::subjects::{Emulated, MISCALLS, Miscall, Miscalled, SubjectName, miscall};
use seamproof_judge::values;
use seamproof_judge::verdict::Verdict;
use seamproof_oracle::{Pass, Problem, Sink};
use seamproof_simulator::check::check;
use seamproof_simulator::faults::{ABSENT, Catcher, Fault, PLANTABLE, WINDOW_OFF_BY_ONE, by_id, catalogue};

/// Seed of the stream that the tests draw from.
const SEED: u64 = 1;

fn faults() -> Vec<&'static Fault> {
    catalogue().collect()
}

/// Whether the case holds without the fault, so that the finding shows the fault.
fn holds(fault: &Fault, problem: &Problem) -> bool {
    let proved = fault.schedule(problem).is_some_and(|schedule| check(problem, &schedule).is_ok());
    proved && is_right(problem)
}

/// Whether the kernel without any fault holds.
fn is_right(problem: &Problem) -> bool {
    matches!(judge(&Emulated::default(), problem), Verdict::Pass(_))
}

#[test]
fn every_fault_that_the_checker_is_to_catch_is_rejected() {
    let missed: Vec<&str> = faults()
        .into_par_iter()
        .filter(|fault| fault.caught_by.contains(&Catcher::Checker))
        .filter(|fault| !by_checker(fault, SEED).is_some_and(|first| holds(fault, &first.problem)))
        .map(|fault| fault.id)
        .collect();
    assert!(missed.is_empty(), "{missed:?}");
}

#[test]
fn every_fault_of_resources_is_told_by_its_growth() {
    let missed: Vec<String> = faults()
        .into_par_iter()
        .filter(|fault| fault.caught_by.contains(&Catcher::Resources))
        .filter_map(|fault| match by_resources(fault, SEED) {
            Some(first) if first.what.contains("the schedule of record grows as") => None,
            other => Some(format!("{}: {other:?}", fault.id)),
        })
        .collect();
    assert!(missed.is_empty(), "{missed:#?}");
}

#[test]
fn every_fault_that_a_check_of_the_judge_is_to_catch_is_found() {
    let missed: Vec<String> = faults()
        .into_par_iter()
        .filter(|fault| fault.shows_in_runs())
        .filter_map(|fault| match by_campaign(fault, SEED) {
            Ok(Some((first, _))) if fault.is_caught_by(first.by) && holds(fault, &first.problem) => None,
            other => Some(format!("{}: {other:?}", fault.id)),
        })
        .collect();
    assert!(missed.is_empty(), "{missed:#?}");
}

#[test]
fn every_fault_applies_and_replays_by_name() {
    for fault in faults() {
        assert!(stream(fault, SEED).next().is_some(), "{} changes no schedule", fault.id);
        let name = format!("emulated+{}", fault.id);
        let backend = backends::by_name(&name, &backends::draw_options(&name, 3)).expect("a backend");
        assert_eq!(backend.name(), name);
    }
    assert!(backends::by_name("emulated+nothing", &Default::default()).is_err());
}

#[test]
fn a_capability_table_that_is_too_wide_or_too_narrow_is_found() {
    for fault in TABLE_FAULTS {
        let score = score(fault.into(), Effort::QUICK);
        assert!(score.caught() && score.only() == Some(Catcher::Capability), "{score:?}");
    }
}

/// A window off by one, registered with a catcher that does not see it.
static MISNAMED: Fault = Fault { caught_by: &[Catcher::Crash], ..WINDOW_OFF_BY_ONE.entry() };

#[test]
fn a_catalogue_with_a_missed_fault_does_not_hold() {
    let [named, misnamed] = [by_id("window-off-by-one").expect("a fault"), &MISNAMED]
        .map(|fault| score(fault.into(), Effort::QUICK));
    assert!(named.rungs.contains(&Catcher::Checker) && named.rungs.contains(&Catcher::Envelope), "{named:?}");
    let unseen = Score { schedule: Vec::new(), campaign: Vec::new(), ..named.clone() };
    let slow = {
        let late = |first: &First| First { cases: MEDIAN_CASES_MAX + 1, ..first.clone() };
        let [schedule, campaign] =
            [&named.schedule, &named.campaign].map(|firsts| firsts.iter().map(late).collect());
        Score { schedule, campaign, ..named.clone() }
    };
    let not_run = Score { not_run: Some(NotRun::Failed("no worker".to_owned())), ..unseen.clone() };
    let held = |score: &Score| Scored { subjects: vec![score.clone()], judge: Vec::new() }.holds();
    assert_eq!([&named, &misnamed, &unseen, &slow, &not_run].map(held), [true, false, false, false, false]);
    let nobody = Scored { subjects: vec![not_run], judge: Vec::new() };
    assert_eq!((nobody.missed(), nobody.not_run()), (Vec::new(), vec!["window-off-by-one"]));
    let all = Scored { subjects: vec![named, misnamed, unseen], judge: Vec::new() };
    assert_eq!(all.missed(), ["window-off-by-one"; 2]);
}

#[test]
fn a_fault_in_the_judge_is_missed_without_a_probe_of_its_rung() {
    let fault = ladder::faults::FAULTS[0];
    let score = |missed| Scored { subjects: Vec::new(), judge: vec![JudgeScore { fault, missed }] };
    assert_eq!(fault.caught_by, [Catcher::Envelope]);
    let [rung, other] = [Check::Envelope, Check::Poison];
    assert!(score(vec![("a probe", rung)]).holds());
    assert_eq!(score(vec![("a probe", other)]).missed(), [fault.id]);
    assert!(!score(Vec::new()).holds());
}

/// Test that every entry of the list of known bugs that can be planted without a GPU is planted, or absent for a
/// reason, and not both.
#[test]
fn every_plantable_entry_is_planted_or_absent() {
    let of_schedules = catalogue().flat_map(|fault| fault.entries);
    let of_tables = TABLE_FAULTS.iter().flat_map(|fault| fault.entries);
    let of_calls = MISCALLS.iter().flat_map(|fault| fault.entries);
    let planted: BTreeSet<u16> = of_schedules.chain(of_tables).chain(of_calls).copied().collect();
    let absent: BTreeSet<u16> = ABSENT.iter().flat_map(|absent| absent.entries).copied().collect();
    let plantable: BTreeSet<u16> = PLANTABLE.iter().copied().collect();
    assert_eq!(plantable.len(), 131);
    assert_eq!(planted.intersection(&absent).collect::<Vec<_>>(), Vec::<&u16>::new());
    assert_eq!(planted.union(&absent).copied().collect::<BTreeSet<_>>(), plantable);
}

#[test]
fn every_fault_at_the_call_is_found_where_it_shows() {
    let suspects: Vec<Suspect> = MISCALLS.iter().map(Suspect::from).collect();
    let missed: Vec<String> = score_all(&suspects, Effort::QUICK)
        .into_iter()
        .filter(|score| !score.caught() || !score.campaign.iter().all(|first| is_right(&first.problem)))
        .map(|score| format!("{}: {:?}", score.suspect.id(), score.campaign))
        .collect();
    assert!(missed.is_empty(), "{missed:#?}");
}

#[test]
fn every_fault_at_the_call_replays_by_name_on_every_backend() {
    for miscall in MISCALLS.iter() {
        assert!(miscall.source.starts_with("https://") && miscall.imitates.len() > 20, "{}", miscall.id);
        let mut problems = Suspect::from(miscall).stream(SEED).expect("the emulated kernel");
        assert!(problems.next().is_some(), "{} changes nothing", miscall.id);
        for called in ["emulated", "emulated@worker", "emulated+window-off-by-one", "cuda", "mock"] {
            let name = format!("{called}~{}", miscall.id);
            let options = backends::draw_options(&name, 3);
            assert_eq!(options, backends::draw_options(called, 3));
            assert_eq!(backends::by_name(&name, &options).expect("a backend").name(), name);
            assert_eq!(SubjectName::from(name.as_str()).called().name(), called);
        }
    }
    for name in ["emulated~nothing", "abacus~call-scale-off", "~call-scale-off", "emulated~"] {
        assert!(backends::by_name(name, &Default::default()).is_err(), "{name}");
    }
}

#[test]
fn a_fault_at_the_call_stands_behind_the_name_or_the_options() {
    let read =
        |text: &str| text.parse().map(|read: SubjectName| (read.name(), read.options.into_iter().collect()));
    let long: Vec<(String, String)> = vec![("attention".into(), "long".into())];
    let wrong = "cuda~call-scale-off".to_owned();
    assert_eq!(read("cuda~call-scale-off"), Ok((wrong.clone(), Vec::new())));
    for text in ["cuda~call-scale-off:attention=long", "cuda:attention=long~call-scale-off"] {
        assert_eq!(read(text), Ok((wrong.clone(), long.clone())));
    }
    let path = vec![("once".to_owned(), "~/here".to_owned())];
    assert_eq!(read("mock:once=~/here"), Ok(("mock".to_owned(), path)));
    for text in ["emulated:", "emulated:q_tile", "emulated:q_tile=4,", "emulated:~call-scale-off"] {
        assert!(read(text).is_err(), "{text}");
    }
}

fn any_order() -> Box<dyn Backend> {
    Box::new(AnyOrder::from(0))
}

fn wrong(subject: Box<dyn Backend>, id: &str) -> Miscalled<'static> {
    Miscalled::new(subject, miscall(id).expect("a fault at the call"))
}

/// Test that a difference between two runs of a subject that sums in any order is no fault of the call. A subject
/// with a fixed order gets the same question, and gives the same answer.
#[test]
fn an_equivalent_call_does_not_show_whatever_the_order_of_sums() {
    let problem = |index| match generate::draw(SEED, index, &Limits::seams()) {
        Draw::Problem(problem) => Some(problem),
        Draw::Malformed(_) => None,
    };
    let without_window = |problem: &Problem| problem.mask.left.is_none() && problem.pass == Pass::Backward;
    let mut differ = 0;
    for problem in (0..400).filter_map(problem).filter(without_window) {
        let inputs = values::inputs(&problem);
        let subject = any_order();
        if let (Ok(first), Ok(second)) = (subject.run(&problem, &inputs), subject.run(&problem, &inputs)) {
            differ += usize::from(seamproof_judge::subjects::difference(&first, &second).is_some());
        }
        for subject in [subject, Box::new(hopper())] {
            assert!(!wrong(subject, "call-window-narrower").shows(&problem, &inputs));
        }
    }
    assert!(differ > 0, "no two runs differ");
}

#[test]
fn every_fault_at_the_call_is_found_on_subjects_of_either_order() {
    let subjects: [fn() -> Box<dyn Backend>; 2] = [any_order, || Box::new(hopper())];
    let found = |miscall: &Miscall, subject: fn() -> Box<dyn Backend>| {
        let subject = Rc::new(wrong(subject(), miscall.id));
        let mut problems = call_stream(&subject, SEED, &Limits::seams()).take(MEDIAN_CASES_MAX);
        problems.any(|problem| matches!(evaluate(&*subject, &problem), Verdict::Finding(_)))
    };
    let missed: Vec<&str> = MISCALLS
        .par_iter()
        .filter(|miscall| !subjects.into_iter().all(|subject| found(miscall, subject)))
        .map(|miscall| miscall.id)
        .collect();
    assert!(missed.is_empty(), "{missed:#?}");
}

/// Test that kernels for tensor cores are called on problems that go to them. The choice of these problems needs no
/// GPU.
#[test]
fn the_kernels_that_are_called_wrongly_are_those_on_tensor_cores() {
    let cuda = Registered::new("cuda:attention=tuned").expect("a backend");
    for suspect in Suspect::at_calls_of(cuda) {
        let problem = suspect.stream(SEED).expect("a stream").next().expect("it shows");
        let ways = suspect.subject(SEED).expect("a backend").ways(&problem);
        let taken = !ways.is_empty() && ways.iter().all(|way| way.taken);
        assert!(taken, "{}", suspect.id());
    }
}

/// Test that a failure of the subject itself does not count as the fault at its call.
#[test]
fn a_subjects_own_fault_is_not_taken_for_the_one_at_its_call() {
    let registered = || Registered::new("emulated+window-off-by-one").expect("a backend");
    let of = |id: &'static str| {
        Suspect::at_calls_of(registered()).find(|suspect| suspect.id() == id).expect("a fault at the call")
    };
    let own = backends::by_name("emulated+window-off-by-one", &Default::default()).expect("a backend");
    let mut flawed = 0;
    let ids = ["call-scale-off", "call-dk-of-a-head-halved", "call-kv-heads-rotated"];
    for (id, seed) in ids.into_iter().flat_map(|id| (SEED..SEED + 8).map(move |seed| (id, seed))) {
        let (first, _) = by_campaign(of(id), seed).expect("it runs").expect("it is found");
        assert!(matches!(judge(&*own, &first.problem), Verdict::Pass(_)), "{id}");
        flawed += first.flawed;
    }
    assert!(flawed > 0, "no case of any fault met the subject's own");
    // The subject is nearly always wrong on problems with a window.
    let why = by_campaign(of("call-window-narrower"), SEED).expect_err("the subject is of no use here");
    assert!(why.to_string().contains("wrong without the fault"), "{why}");
}

/// Test of a score, which asks all identities, while a campaign draws some. Those that the subject breaks by itself
/// do not count for the fault.
#[test]
fn a_rung_that_a_subject_breaks_by_itself_is_not_the_faults() {
    let name = "emulated+padded-lengths-in-a-region";
    let registered = Registered::new(name).expect("a backend");
    let suspect = Suspect::at_calls_of(registered).find(|suspect| suspect.id() == "call-dk-of-a-head-halved");
    let score = score(suspect.expect("a fault at the call"), Effort::QUICK);
    let own = backends::by_name(name, &Default::default()).expect("a backend");
    let of_itself = findings(&Judge::default(), &*own, &score.campaign[0].problem);
    assert!(of_itself.iter().any(|finding| finding.check == Check::Identity), "{of_itself:?}");
    assert!(score.rungs.contains(&Catcher::Envelope), "{:?}", score.rungs);
    assert!(!score.rungs.contains(&Catcher::Identity), "{:?}", score.rungs);
}

/// Test of faults that show only on problems that the subject refuses. The subject cannot be called wrongly there, so
/// no fault was missed, and nothing failed.
#[test]
fn a_fault_that_shows_on_refused_problems_alone_is_excluded() {
    let of = |id: &'static str| {
        let registered = Registered::new("mock:narrow=always").expect("a backend");
        Suspect::at_calls_of(registered).find(|suspect| suspect.id() == id).expect("a fault at the call")
    };
    for id in ["call-sink-dropped", "call-dsink-halved"] {
        let score = score(of(id), Effort::QUICK);
        assert!(score.is_excluded() && !score.caught(), "{score:?}");
        let why = score.not_run.as_ref().map(ToString::to_string).unwrap_or_default();
        assert!(why.starts_with("excluded by the table") && why.contains("sink"), "{why}");
        let scored = Scored { subjects: vec![score], judge: Vec::new() };
        assert_eq!((scored.missed(), scored.not_run(), scored.excluded()), (vec![], vec![], vec![id]));
        assert!(!scored.holds(), "nothing was looked for");
    }
    let others = of("call-scale-off").stream(SEED).expect("a stream").next();
    assert!(others.is_some_and(|problem| problem.softmax.sink == Sink::None), "the others are looked for");
}
