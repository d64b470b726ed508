//! A JUnit report: one suite for the subject, one test case for each check of the judge.
//!
//! The file exists from the beginning, saying that the campaign has not ended, so that even a killed one leaves a report
//! and never that of an earlier run.

use std::path::{Path, PathBuf};
use std::time::Duration;

use quick_junit::{NonSuccessKind, TestCase, TestCaseStatus, TestSuite};

use super::run::Outcome;
use crate::campaign::{Distinct, FailureKey, Summary};
use crate::record::{RecordError, write_whole};
use crate::verdict::Check;

pub(super) struct Report {
    path: PathBuf,
}

impl Report {
    /// Makes the file, before any case runs.
    pub(super) fn create(path: &Path) -> Result<Report, RecordError> {
        let report = Report { path: path.to_owned() };
        let unfinished =
            test("campaign", Some(("error", "the campaign has not ended".to_owned())), String::new());
        report.save("seamproof", vec![unfinished], Duration::ZERO)?;
        Ok(report)
    }

    /// Replaces it by the campaign's results.
    pub(super) fn write(&self, backend: &str, outcome: &Outcome) -> Result<(), RecordError> {
        let missed = outcome.canary.finding.is_none().then(|| ("missed", outcome.canary.to_string()));
        let mut tests = vec![test("canary", missed, String::new())];
        let mut time = Duration::ZERO;
        if let Some(summary) = &outcome.summary {
            time = time_of(summary);
            tests.extend(of_summary(summary, &|_| false));
        }
        self.save(backend, tests, time)
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
    let text = text.map_err(|source| RecordError::Io { path: path.to_owned(), what: "made", source })?;
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
        let mut status = TestCaseStatus::skipped();
        status.set_type("known").set_message("only known failures");
        return TestCase::new(check.name(), status);
    }
    let failed = summary.failed.get(&check).map(|count| ("finding", format!("{count} cases failed")));
    test(check.name(), failed, broken.iter().map(ToString::to_string).collect())
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
