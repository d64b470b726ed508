//! A JUnit report: one suite for the subject, one test case for each check of the judge, and one for each finding of a shard
//! that did not end, which no check counts.
//!
//! The file exists from the beginning, saying that the campaign has not ended, so that even a killed one leaves a report
//! and never that of an earlier run.

use std::path::{Path, PathBuf};
use std::time::Duration;

use quick_junit::{NonSuccessKind, TestCase, TestCaseStatus, TestSuite};

use super::output::print_to_stdout;
use super::run::RunOutcome;
use crate::campaign::{Distinct, Holds, LeftFinding, Summary};
use crate::nightly::{Regressed, Regressions, Unjudged};
use crate::record::{RecordError, is_stdout, write_whole};
use seamproof_judge::failure::FailureKey;
use seamproof_judge::finding::Check;
use seamproof_judge::prose::counted;

/// Noncharacters that XML excludes and quick_junit, which removes the control characters, lets pass.
const NO_XML: [char; 2] = ['\u{fffe}', '\u{ffff}'];
/// Test cases of a suite, so that whoever shows them need not draw tens of thousands of lines.
const TESTS_MAX: usize = 1000;

pub(super) struct JunitFile {
    path: PathBuf,
}

impl JunitFile {
    /// Makes the file, before any case runs. Standard output (`-`) takes nothing yet.
    pub(super) fn create(path: &Path) -> Result<JunitFile, RecordError> {
        let report = JunitFile { path: path.to_owned() };
        if is_stdout(path) {
            return Ok(report);
        }
        let unfinished =
            test("campaign", Some(("error", "the campaign has not ended".to_owned())), String::new());
        report.save("seamproof", vec![unfinished], Duration::ZERO)?;
        Ok(report)
    }

    /// Replaces it by the campaign's results, and by what parts of it found that did not end.
    pub(super) fn write(
        &self,
        backend: &str,
        outcome: &RunOutcome,
        left: &[LeftFinding],
    ) -> Result<(), RecordError> {
        let missed = outcome.canary.finding.is_none().then(|| ("missed", outcome.canary.to_string()));
        let mut tests = vec![test("canary", missed, String::new())];
        let mut time = Duration::ZERO;
        if let Some(summary) = &outcome.summary {
            time = time_of(summary);
            tests.extend(of_summary(summary, &|_| false));
        }
        tests.extend(of_left(left));
        self.save(backend, tests, time)
    }

    /// Replaces it where no part of a campaign ended: by the reason why there are no results, and by what was found.
    pub(super) fn write_left(&self, why: &str, left: &[LeftFinding]) -> Result<(), RecordError> {
        let campaign = test("campaign", Some(("too little run", why.to_owned())), String::new());
        self.save("seamproof", [vec![campaign], of_left(left)].concat(), Duration::ZERO)
    }

    fn save(&self, suite: &str, tests: Vec<TestCase>, time: Duration) -> Result<(), RecordError> {
        write_suites(&self.path, [suite_of(suite, tests, time)])
    }
}

/// Writes a report of these suites.
pub(super) fn write_suites(
    path: &Path,
    suites: impl IntoIterator<Item = TestSuite>,
) -> Result<(), RecordError> {
    let mut report = quick_junit::Report::new("seamproof");
    report.add_test_suites(suites);
    let text = report.to_string().map_err(std::io::Error::other);
    let mut text = text.map_err(|source| RecordError::Io { path: path.to_owned(), what: "made", source })?;
    text.retain(|letter| !NO_XML.contains(&letter));
    if is_stdout(path) {
        print_to_stdout(&text);
        return Ok(());
    }
    write_whole(path, &text)
}

pub(super) fn suite_of(name: &str, tests: Vec<TestCase>, time: Duration) -> TestSuite {
    let mut suite = TestSuite::new(name);
    suite.add_test_cases(tests);
    suite.set_time(time);
    suite
}

pub(super) fn time_of(summary: &Summary) -> Duration {
    Duration::try_from_secs_f64(summary.seconds).unwrap_or_default()
}

/// A test case for each check, and two for what makes a campaign doubtful. A check that only known failures broke is skipped.
pub(super) fn of_summary(summary: &Summary, known: &dyn Fn(&FailureKey) -> bool) -> Vec<TestCase> {
    let missed = (!summary.missed.is_empty()).then(|| ("too little run", summary.missed.join("; ")));
    let internal =
        (summary.infrastructure_count > 0).then(|| ("internal", summary.infrastructure.join("; ")));
    let doubts =
        [test("enough was run", missed, String::new()), test("no internal fault", internal, String::new())];
    Check::ALL.map(|check| of_check(summary, check, known)).into_iter().chain(doubts).collect()
}

/// A check holds, or fails with the different failures that broke it.
fn of_check(summary: &Summary, check: Check, known: &dyn Fn(&FailureKey) -> bool) -> TestCase {
    let broken: Vec<&Distinct> =
        summary.distinct.iter().filter(|distinct| distinct.key.check == check).collect();
    let unexplained = summary.kept + summary.dropped > 0;
    if !broken.is_empty() && !unexplained && broken.iter().all(|distinct| known(&distinct.key)) {
        return skipped(check.name(), "known", "only known failures");
    }
    let failed =
        summary.failed.get(&check).map(|&count| ("finding", format!("{} failed", counted(count, "case"))));
    test(check.name(), failed, broken.iter().map(ToString::to_string).collect())
}

/// A test case for each stored case, those that failed first. One that fails as is known, or that the subject refuses, is
/// skipped; those past [`TESTS_MAX`] are one.
pub(super) fn of_regressions(all: &Regressions, known: &dyn Fn(&str) -> bool) -> Vec<TestCase> {
    let Regressions { held, refused, failed, internal, .. } = all;
    let failed = failed.iter().map(|Regressed { file, key, finding, replay, .. }| match known(key) {
        true => skipped(file, "known", key),
        false => test(file, Some(("finding", finding.clone())), format!("{key}\nreplay: {replay}")),
    });
    let internal = internal
        .iter()
        .map(|Unjudged { file, what }| test(file, Some(("internal", what.clone())), String::new()));
    let refused = refused.iter().map(|file| skipped(file, "refused", "the subject's table excludes it"));
    let held = held.iter().map(|file| test(file, None, String::new()));
    bounded(failed.chain(internal).chain(refused).chain(held).collect(), "more stored case")
}

/// A failed test case for each finding that no sum counts.
fn of_left(left: &[LeftFinding]) -> Vec<TestCase> {
    let of_one = |left: &LeftFinding| {
        let (message, details) = match &left.holds {
            Holds::Finding { key, found, problem } => (found.to_string(), format!("{key}\n{problem}\n")),
            Holds::Unread { unread } => (unread.clone(), String::new()),
        };
        let details = format!("{details}replay: {}", left.replay);
        test(&format!("left behind: {}", left.file), Some(("finding", message)), details)
    };
    bounded(left.iter().map(of_one).collect(), "more left finding")
}

/// Test cases, of which those past [`TESTS_MAX`] are one that says how many more of what they are.
fn bounded(mut tests: Vec<TestCase>, what: &str) -> Vec<TestCase> {
    if tests.len() > TESTS_MAX {
        let others = tests.split_off(TESTS_MAX - 1);
        let is_wrong = |test: &&TestCase| matches!(test.status, TestCaseStatus::NonSuccess { .. });
        let wrong = others.iter().filter(is_wrong).count();
        let failed = (wrong > 0).then(|| ("finding", format!("{} of them failed", counted(wrong, "case"))));
        tests.push(test(&counted(others.len(), what), failed, String::new()));
    }
    tests
}

fn skipped(name: &str, kind: &str, message: &str) -> TestCase {
    let mut status = TestCaseStatus::skipped();
    status.set_type(kind).set_message(message);
    TestCase::new(name, status)
}

/// A test case that holds, or fails in a way (`type`) with a message.
pub(super) fn test(name: &str, failure: Option<(&str, String)>, details: String) -> TestCase {
    let status = match failure {
        None => TestCaseStatus::success(),
        Some((kind, message)) => {
            let mut status = TestCaseStatus::non_success(NonSuccessKind::Failure);
            status.set_type(kind).set_message(message);
            status
        }
    };
    let mut test = TestCase::new(name, status);
    if !details.is_empty() {
        test.set_system_out(details);
    }
    test
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(count: usize) -> Vec<String> {
        (0..count).map(|number| format!("{number}.json")).collect()
    }

    fn regressed(key: &str) -> Regressed {
        let [file, subject, finding, replay] =
            ["failed.json", "cuda", "wrong", "seamproof replay failed.json"].map(str::to_owned);
        Regressed { file, subject, key: key.to_owned(), is_end: false, finding, replay }
    }

    #[test]
    fn each_stored_case_is_a_test_case_and_what_failed_is_first() {
        let all = Regressions {
            held: files(2),
            refused: files(1),
            failed: vec![regressed("new"), regressed("listed")],
            internal: vec![Unjudged { file: "lost.json".to_owned(), what: "no device".to_owned() }],
            ..Regressions::default()
        };
        let tests = of_regressions(&all, &|key| key == "listed");
        let is = |test: &TestCase| match test.status {
            TestCaseStatus::NonSuccess { .. } => "failed",
            TestCaseStatus::Skipped { .. } => "skipped",
            _ => "held",
        };
        let told: Vec<&str> = tests.iter().map(is).collect();
        assert_eq!(told, ["failed", "skipped", "failed", "skipped", "held", "held"]);
        assert_eq!(tests[2].name.as_str(), "lost.json");
    }

    #[test]
    fn what_no_xml_may_hold_is_left_out() {
        let place = tempfile::NamedTempFile::new().expect("a temporary file");
        let [name, message, details] =
            ["name", "message", "details"].map(|text| format!("{text}\0\u{fffe}\u{ffff}!"));
        let tests = vec![test(&name, Some(("finding", message)), details)];
        write_suites(place.path(), [suite_of("suite\u{ffff}!", tests, Duration::ZERO)]).expect("written");
        let text = std::fs::read_to_string(place.path()).expect("a file");
        assert!(["suite!", "name!", "message!", "details!"].iter().all(|kept| text.contains(kept)), "{text}");
        assert!(!text.contains(['\0', '\u{fffe}', '\u{ffff}']), "{text:?}");
    }

    #[test]
    fn a_suite_is_bounded_and_says_what_it_leaves_out() {
        let many = Regressions { held: files(TESTS_MAX + 1), ..Regressions::default() };
        let tests = of_regressions(&many, &|_| false);
        assert_eq!((tests.len(), tests[TESTS_MAX - 1].name.as_str()), (TESTS_MAX, "2 more stored cases"));
        assert!(matches!(tests[TESTS_MAX - 1].status, TestCaseStatus::Success { .. }));
        let failed = (0..=TESTS_MAX).map(|_| regressed("new")).collect();
        let tests = of_regressions(&Regressions { failed, ..Regressions::default() }, &|_| false);
        assert!(matches!(tests[TESTS_MAX - 1].status, TestCaseStatus::NonSuccess { .. }));
        let all = Regressions { held: files(TESTS_MAX), ..Regressions::default() };
        assert_eq!(of_regressions(&all, &|_| false).len(), TESTS_MAX);
        let unread = |number: usize| LeftFinding {
            shard: "shard".to_owned(),
            file: format!("shard/findings/{number}.json"),
            holds: Holds::Unread { unread: "torn".to_owned() },
            replay: String::new(),
        };
        let tests = of_left(&(0..=TESTS_MAX).map(unread).collect::<Vec<_>>());
        assert_eq!((tests.len(), tests[TESTS_MAX - 1].name.as_str()), (TESTS_MAX, "2 more left findings"));
        assert!(matches!(tests[TESTS_MAX - 1].status, TestCaseStatus::NonSuccess { .. }));
    }
}
