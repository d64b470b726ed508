//! JUnit reports: a suite for the subject, with a test case for each check of the judge and one for each shard that
//! did not end but found something.
//!
//! A campaign's file exists from the beginning and says that the campaign has not ended. A killed campaign therefore
//! leaves a report, and not that of an earlier run.

use std::path::{Path, PathBuf};
use std::time::Duration;

use quick_junit::{NonSuccessKind, TestCase, TestCaseStatus, TestSuite};

use super::output::print_to_stdout;
use crate::campaign::{Canary, Distinct, Left, Summary, met};
use crate::nightly::{Regressions, ReportedFailure};
use crate::record::{RecordError, is_stdout, write_whole};
use seamproof_judge::finding::Check;
use seamproof_judge::prose::counted;

/// Characters that XML excludes and quick_junit lets pass. It removes control characters itself.
const NO_XML: [char; 2] = ['\u{fffe}', '\u{ffff}'];

/// The report of one campaign.
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

    /// Replaces the file by the campaign's results, and by what those parts of it found that did not end.
    pub(super) fn write(
        &self,
        backend: &str,
        canary: &Canary,
        summary: Option<&Summary>,
        left: &[Left],
    ) -> Result<(), RecordError> {
        let of_campaign = summary.map(|summary| of_summary(summary, &|_| false)).unwrap_or_default();
        let left = left.iter().map(of_left);
        let tests = std::iter::once(of_canary(canary)).chain(of_campaign).chain(left).collect();
        self.save(backend, tests, summary.map_or(Duration::ZERO, time_of))
    }

    /// Replaces the file, where no part of a campaign ended, by the reason and by what was found.
    pub(super) fn write_left(&self, why: &str, left: &[Left]) -> Result<(), RecordError> {
        let campaign = test("campaign", Some(("too little run", why.to_owned())), String::new());
        let tests = std::iter::once(campaign).chain(left.iter().map(of_left)).collect();
        self.save("seamproof", tests, Duration::ZERO)
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

/// Returns the test case of the planted fault.
pub(super) fn of_canary(canary: &Canary) -> TestCase {
    let kind = if canary.not_told.is_some() { "not told" } else { "missed" };
    let missed = canary.finding.is_none().then(|| (kind, canary.to_string()));
    test("canary", missed, canary.own.iter().map(ToString::to_string).collect())
}

/// Returns a test case for each check, and two for what makes a campaign doubtful. A check that only known failures
/// broke is skipped.
pub(super) fn of_summary(summary: &Summary, known: &dyn Fn(&Distinct) -> bool) -> Vec<TestCase> {
    let void: Vec<String> = summary.void.iter().cloned().collect();
    let all = [
        ("proves nothing", &void),
        ("too little run", &summary.missed),
        ("adapter at fault", &summary.adapter),
    ];
    let told = all.iter().filter(|(_, what)| !what.is_empty());
    // The first names the kind of the failure, and none hides another.
    let doubt = told.clone().next().map(|(kind, _)| {
        let texts: Vec<String> = told.map(|(_, what)| what.join("; ")).collect();
        (*kind, texts.join("; "))
    });
    let internal =
        (summary.infrastructure_count > 0).then(|| ("internal", summary.infrastructure.join("; ")));
    let doubts = [("enough was run", doubt), ("no internal fault", internal)];
    let doubts = doubts.map(|(name, doubt)| test(name, doubt, String::new()));
    Check::ALL.map(|check| of_check(summary, check, known)).into_iter().chain(doubts).collect()
}

fn of_check(summary: &Summary, check: Check, known: &dyn Fn(&Distinct) -> bool) -> TestCase {
    let broken: Vec<&Distinct> =
        summary.distinct.iter().filter(|distinct| distinct.key.check == check).collect();
    let unexplained = summary.kept + summary.dropped > 0;
    if !broken.is_empty() && !unexplained && broken.iter().all(|distinct| known(distinct)) {
        return skipped(check.name(), "known", "only known failures");
    }
    let failed =
        summary.failed.get(&check).map(|&count| ("finding", format!("{} failed", counted(count, "case"))));
    test(check.name(), failed, broken.iter().map(ToString::to_string).collect())
}

/// Returns a test case for each stored case, those that failed first. One that fails as is known, or that the subject
/// refuses, is skipped.
pub(super) fn of_regressions(all: &Regressions) -> Vec<TestCase> {
    let failed = all.failed.iter().map(|failure| match failure.known {
        Some(_) => skipped(&failure.problem, "known", &failure.key),
        None => of_failure(&failure.problem, failure),
    });
    let internal = all.internal.iter();
    let internal = internal.map(|(file, what)| test(file, Some(("internal", what.clone())), String::new()));
    let refused = all.refused.iter().map(|file| skipped(file, "refused", "the subject's table excludes it"));
    let not_begun = all.not_begun.iter().map(|file| skipped(file, "not begun", "no time was left"));
    let held = all.held.iter().map(|file| test(file, None, String::new()));
    failed.chain(internal).chain(refused).chain(not_begun).chain(held).collect()
}

/// Returns the test case of a night's failure.
pub(super) fn of_failure(name: &str, failure: &ReportedFailure) -> TestCase {
    let ReportedFailure { key, cases, shrunk, problem, finding, replay, script, .. } = failure;
    let script = script.iter().map(|script| format!("\nscript: {script}")).collect::<String>();
    let details = format!("{key}\n{}\n{problem}\n{finding}\nreplay: {replay}{script}", met(*cases, *shrunk));
    test(name, Some(("finding", finding.clone())), details)
}

/// Returns a failed test case for a shard or a night that did not end and found something.
pub(super) fn of_left(left: &Left) -> TestCase {
    test(
        &format!("left behind: {}", left.dir),
        Some(("finding", left.to_string())),
        format!("replay: {}", left.replay),
    )
}

fn skipped(name: &str, kind: &str, message: &str) -> TestCase {
    let mut status = TestCaseStatus::skipped();
    status.set_type(kind).set_message(message);
    TestCase::new(name, status)
}

/// Returns a test case that holds, or fails in a way (`type`) with a message.
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

    #[test]
    fn each_stored_case_is_a_test_case_and_what_failed_is_first() {
        let all = Regressions {
            held: files(2),
            refused: files(1),
            internal: [("lost.json".to_owned(), "no device".to_owned())].into(),
            not_begun: files(1),
            ..Regressions::default()
        };
        let tests = of_regressions(&all);
        let is = |test: &TestCase| match test.status {
            TestCaseStatus::NonSuccess { .. } => "failed",
            TestCaseStatus::Skipped { .. } => "skipped",
            _ => "held",
        };
        let told: Vec<&str> = tests.iter().map(is).collect();
        assert_eq!(told, ["failed", "skipped", "skipped", "held", "held"]);
        assert_eq!(tests[0].name.as_str(), "lost.json");
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
}
