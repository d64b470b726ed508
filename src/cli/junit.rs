//! A JUnit report: one suite for the subject, one test case for each check of the judge.
//!
//! The file exists from the beginning, saying that the campaign has not ended, so that even a killed one leaves a report
//! and never that of an earlier run.

use std::path::{Path, PathBuf};
use std::time::Duration;

use quick_junit::{NonSuccessKind, TestCase, TestCaseStatus, TestSuite};

use super::run::Outcome;
use crate::campaign::{Distinct, Summary};
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
            time = Duration::try_from_secs_f64(summary.seconds).unwrap_or_default();
            tests.extend(Check::ALL.map(|check| of_check(summary, check)));
            let missed = (!summary.missed.is_empty()).then(|| ("too little run", summary.missed.join("; ")));
            tests.push(test("enough was run", missed, String::new()));
            let internal =
                (summary.infrastructure_count > 0).then(|| ("internal", summary.infrastructure.join("; ")));
            tests.push(test("no internal fault", internal, String::new()));
        }
        self.save(backend, tests, time)
    }

    fn save(&self, suite: &str, tests: Vec<TestCase>, time: Duration) -> Result<(), RecordError> {
        let mut suite = TestSuite::new(suite);
        suite.add_test_cases(tests);
        suite.set_time(time);
        let mut report = quick_junit::Report::new("seamproof");
        report.add_test_suite(suite);
        let text = report.to_string().map_err(std::io::Error::other);
        let text =
            text.map_err(|source| RecordError::Io { path: self.path.clone(), what: "made", source })?;
        write_whole(&self.path, &text)
    }
}

/// A check holds, or fails with the different failures that broke it.
fn of_check(summary: &Summary, check: Check) -> TestCase {
    let broken: Vec<&Distinct> =
        summary.distinct.iter().filter(|distinct| distinct.key.check == check).collect();
    let failed = summary.failed.get(&check).map(|count| ("finding", format!("{count} cases failed")));
    test(check.name(), failed, broken.iter().map(ToString::to_string).collect())
}

/// A test case that holds, or fails in a way (`type`) with a message.
fn test(name: &str, failure: Option<(&str, String)>, details: String) -> TestCase {
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
