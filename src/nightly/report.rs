//! A night's report: for people, and the same as JSON.

use std::collections::BTreeMap;
use std::fmt::{self, Display, Formatter};

use serde::{Deserialize, Serialize};

use super::known::{Failure, Listed, Standing};
use super::trend::{Point, Trend};
use super::{Known, Night, Regressions};
use crate::campaign::{Canary, Distinct, Left, Summary, met};
use crate::paste::code;
use seamproof_judge::failure::FailureKey;
use seamproof_judge::generate::Profile;
use seamproof_judge::prose::counted;

/// Number of lines about one campaign that say what was too little; more are counted.
const LINES_MAX: usize = 4;

/// Explanation of the columns.
const LEGEND: &str = "\
*cases*: all that were run. *refused*: those outside the subject's table. *malformed*: those that no subject may
take, refused as such. *failed*: those in which a check broke. *different*: failures, each with a key of its own.
*against the night before*: cases per second, and the p99 of each tensor, the error ÷ bound that 99 of 100 cases stay below.";

/// A failure of a night, whatever campaigns it was seen in.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct ReportedFailure {
    pub(crate) key: String,
    /// Number of failing cases of it, shrunk ones and those that were only counted.
    pub(crate) cases: u64,
    /// Number of cases that were shrunk to it.
    pub(crate) shrunk: u64,
    /// Whether the subject died or hung.
    pub(crate) is_end: bool,
    /// The smallest case in words, or the file of a stored one.
    pub(crate) problem: String,
    pub(crate) finding: String,
    /// Command that shows it again.
    pub(crate) replay: String,
    /// Script that shows it without this project, or why there is none; absent where the subject is in no Python file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) script: Option<String>,
    /// The reason why it is known, and its source.
    pub(crate) known: Option<Excuse>,
}

/// Reason of a known failure, and its source.
pub(crate) type Excuse = (String, String);

/// Returns why a failure is known, if it is.
pub(super) fn excuse(known: &Known, failure: Failure<'_>) -> Option<Excuse> {
    known.of(failure).map(|entry| (entry.reason.clone(), entry.source.clone()))
}

impl ReportedFailure {
    /// Returns a failure that was met in so many cases, of which so many were shrunk.
    pub(super) fn new(
        key: &FailureKey,
        (cases, shrunk): (u64, u64),
        problem: String,
        finding: String,
        replay: String,
        known: Option<Excuse>,
    ) -> ReportedFailure {
        let (is_end, key) = (key.check.is_end(), key.to_string());
        ReportedFailure { key, cases, shrunk, is_end, problem, finding, replay, script: None, known }
    }
}

impl Display for ReportedFailure {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let ReportedFailure { key, cases, shrunk, problem, finding, replay, script, known, .. } = self;
        write!(f, "**{key}** ({}).", met(*cases, *shrunk))?;
        if let Some((why, source)) = known {
            write!(f, " Known: {why} ({source})")?;
        }
        write!(f, " {problem}: {finding}\n  {}", code(replay))?;
        script.iter().try_for_each(|script| write!(f, "\n  script: {}", code(script)))
    }
}

/// A campaign of a night.
#[derive(Clone, Debug)]
pub(crate) struct NightCampaign {
    pub(crate) subject: String,
    pub(crate) profile: Profile,
    pub(crate) summary: Summary,
}

impl Display for NightCampaign {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let NightCampaign { subject, profile, summary } = self;
        let (cases, distinct) = (counted(summary.cases, "case"), summary.distinct.len());
        let (held, failed, rate) = (summary.held, summary.failed_count(), summary.per_second(summary.cases));
        write!(f, "{subject} {profile}: {cases} · held {held} · failed {failed} ({distinct} distinct)")?;
        write!(f, " · {rate:.0} cases/s")
    }
}

/// What a night came to.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Report {
    night: u32,
    program: &'static str,
    seed: String,
    /// Time of all campaigns together.
    seconds: f64,
    pub(crate) canary: Canary,
    /// Subjects that were not there, each with the reason.
    absent: Vec<(String, String)>,
    pub(crate) regressions: Vec<Regressions>,
    #[serde(skip)]
    pub(crate) campaigns: Vec<NightCampaign>,
    /// Campaigns in short.
    pub(super) points: Vec<Point>,
    /// How each campaign differs from an earlier night's.
    trend: Vec<String>,
    /// Failures of campaigns, each key once.
    pub(crate) failures: Vec<ReportedFailure>,
    /// What earlier nights without a report left behind.
    pub(crate) left: Vec<Left>,
    known: Vec<Listed>,
    /// Known failures that are still true.
    #[serde(skip)]
    excusing: Known,
    /// Number of failing cases, beyond those that were shrunk, that are like none of the failures.
    unexplained: u64,
    /// What the budget was too short for.
    left_out: Option<String>,
    /// What was too little.
    pub(crate) missed: Vec<String>,
    /// Faults of this program, or of a device.
    pub(crate) internal: Vec<String>,
    /// Lines of the trend's file that are no night's, in words.
    passed_over: Option<String>,
}

impl Report {
    /// Returns the report of a night whose canary was looked for.
    pub(super) fn new(night: &Night, left: Vec<Left>, canary: Canary) -> Report {
        Report {
            night: night.number,
            program: env!("CARGO_PKG_VERSION"),
            seed: format!("{:#x}", night.orders.seed),
            seconds: 0.0,
            canary,
            absent: night.orders.absent.clone(),
            regressions: Vec::new(),
            campaigns: Vec::new(),
            points: Vec::new(),
            trend: Vec::new(),
            failures: Vec::new(),
            left,
            known: Vec::new(),
            excusing: Known::default(),
            unexplained: 0,
            left_out: night.left_out(),
            missed: Vec::new(),
            internal: Vec::new(),
            passed_over: night.trend.passed_over(),
        }
    }

    /// Adds the stored cases of a subject.
    pub(super) fn add_regressions(&mut self, all: Regressions) {
        let subject = &all.subject;
        self.internal.extend(all.internal.iter().map(|(file, what)| format!("{subject} {file}: {what}")));
        if !all.not_begun.is_empty() {
            let left = counted(all.not_begun.len(), "stored case");
            self.missed.push(format!("{subject}: {left} not begun, as no time was left"));
        }
        self.regressions.push(all);
    }

    /// Adds a campaign.
    pub(super) fn add_campaign(&mut self, campaign: NightCampaign, trend: &Trend) {
        let NightCampaign { subject, profile, summary } = &campaign;
        let point = Point::of(self.night, &campaign);
        let named = |what: String| format!("{subject} {profile}: {what}");
        self.missed.extend(few(&summary.missed).into_iter().map(named));
        self.missed.extend(summary.adapter.iter().cloned().map(named));
        self.internal.extend(summary.infrastructure.iter().cloned().map(named));
        self.seconds += summary.seconds;
        self.unexplained += point.unexplained;
        self.trend.push(point.against(trend.before(&point)));
        self.points.push(point);
        self.campaigns.push(campaign);
    }

    /// Adds what became of the known failures; those that are still true excuse the others.
    pub(super) fn add_known(&mut self, listed: Vec<Listed>, known: &Known) {
        self.excusing = known.still_true(&listed);
        self.known = listed;
    }

    /// Returns the known failures that are still true.
    pub(super) fn excusing(&self) -> &Known {
        &self.excusing
    }

    /// Adds the failures of all campaigns.
    pub(super) fn finish(&mut self) {
        self.failures = failures(&self.campaigns, &self.excusing);
    }

    /// Whether a failure of a campaign is known.
    pub(crate) fn is_known(&self, distinct: &Distinct) -> bool {
        self.excusing.of(Failure::of_distinct(distinct)).is_some()
    }

    /// Whether anything failed that is not known, by the subject's end or otherwise.
    pub(crate) fn has_news(&self, is_end: bool) -> bool {
        let stored = self.regressions.iter().flat_map(|all| &all.failed);
        let is_news = |failure: &ReportedFailure| failure.known.is_none() && failure.is_end == is_end;
        self.failures.iter().chain(stored).any(is_news)
            || self.left.iter().any(|left| left.is_end() == is_end)
            || (!is_end && self.unexplained > 0)
    }

    /// Returns the known failures that are not true any more, each with what happens instead.
    pub(crate) fn stale(&self) -> Vec<String> {
        let stale = |listed: &Listed| match &listed.standing {
            Standing::Stale(what) => Some(format!("{}: {what}", listed.key)),
            _ => None,
        };
        self.known.iter().filter_map(stale).collect()
    }

    /// Returns the failing stored cases, those of a known key or the others.
    fn regressed(&self, is_known: bool) -> impl Iterator<Item = &ReportedFailure> {
        let all = self.regressions.iter().flat_map(|all| &all.failed);
        all.filter(move |failure| failure.known.is_some() == is_known)
    }

    /// Returns what the exit code says, in a few words.
    pub(super) fn title(&self) -> String {
        match self.canary.permits() {
            true => self.news_title(),
            false => "proves nothing, as the canary was missed".to_owned(),
        }
    }

    fn news_title(&self) -> String {
        let mut told = Vec::new();
        let mut tell = |count: usize, what: &str, rest: &str| {
            told.extend((count > 0).then(|| counted(count as u64, what) + rest));
        };
        tell(self.failures.iter().filter(|failure| failure.known.is_none()).count(), "new failure", "");
        tell(self.regressed(false).count(), "failing regression", "");
        tell(self.unexplained as usize, "failing case", " like no failure");
        tell(self.left.iter().map(Left::count).sum(), "finding", " left behind");
        tell(self.stale().len(), "known failure", " not seen any more");
        told.extend((!self.internal.is_empty()).then(|| "faults of Seamproof or of a device".to_owned()));
        let not_told = self.canary.not_told.is_some();
        told.extend(not_told.then(|| "the canary was inconclusive".to_owned()));
        told.extend((!self.missed.is_empty()).then(|| "too little was run".to_owned()));
        match (self.has_news(false) || self.has_news(true), told.is_empty()) {
            (true, _) => told.join(", "),
            (false, true) => "nothing new".to_owned(),
            (false, false) => format!("nothing new, but {}", told.join(", ")),
        }
    }
}

/// Returns the first lines, and how many others there are.
fn few(lines: &[String]) -> Vec<String> {
    let others = lines.len().saturating_sub(LINES_MAX);
    let others = (others > 0).then(|| format!("and {}", counted(others as u64, "other")));
    lines.iter().take(LINES_MAX).cloned().chain(others).collect()
}

/// Returns every key once, with its smallest case; twice, where one campaign saw what is known and another one what is
/// not.
fn failures(campaigns: &[NightCampaign], known: &Known) -> Vec<ReportedFailure> {
    let mut all: BTreeMap<_, ((u64, u64), &Distinct)> = BTreeMap::new();
    for distinct in campaigns.iter().flat_map(|campaign| &campaign.summary.distinct) {
        let excuse = excuse(known, Failure::of_distinct(distinct));
        let entry = all.entry((distinct.key.to_string(), excuse));
        let ((cases, shrunk), smallest) = entry.or_insert(((0, 0), distinct));
        *cases += distinct.cases();
        *shrunk += distinct.seen;
        if distinct.size < smallest.size {
            *smallest = distinct;
        }
    }
    let failures = all.into_iter().map(|((_, known), (met, distinct))| {
        let Distinct { key, problem, found, replay, script, .. } = distinct;
        let failure =
            ReportedFailure::new(key, met, problem.clone(), found.to_string(), replay.clone(), known);
        ReportedFailure { script: script.as_ref().map(ToString::to_string), ..failure }
    });
    failures.collect()
}

impl Display for Report {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        writeln!(f, "# Night {}: {}\n", self.night, self.title())?;
        writeln!(f, "Seamproof {}, seed {}, {:.0} s of campaigns.\n", self.program, self.seed, self.seconds)?;
        match self.canary.permits() {
            true => writeln!(f, "- {}", self.canary)?,
            false => writeln!(f, "- **The canary was missed: this night proves nothing.**")?,
        }
        self.absent.iter().try_for_each(|(name, why)| writeln!(f, "- **{name} is not there**: {why}"))?;
        self.regressions.iter().try_for_each(|all| writeln!(f, "- {all}"))?;
        self.left_out.iter().try_for_each(|what| writeln!(f, "- left out: {what}"))?;
        self.campaigns(f)?;
        self.failed(f)?;
        section(f, "Too little was run", &self.missed)?;
        section(f, "Faults of Seamproof, or of a device", &self.internal)
    }
}

impl Report {
    fn campaigns(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let head = "subject | sizes | cases | refused | malformed | failed | different | cases/s | against the night before";
        writeln!(f, "\n| {head} |\n|---|---|---|---|---|---|---|---|---|")?;
        for (point, trend) in self.points.iter().zip(&self.trend) {
            let Point { subject, profile, cases, refused, malformed, failed, distinct, .. } = point;
            write!(
                f,
                "| {subject} | {profile} | {cases} | {refused} | {malformed} | {failed} | {distinct} "
            )?;
            writeln!(f, "| {:.1} | {trend} |", point.cases_per_second)?;
        }
        writeln!(f, "\n{LEGEND}")?;
        self.passed_over.iter().try_for_each(|what| writeln!(f, "\n`trend.jsonl` has {what}."))
    }

    fn failed(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let regressed = |is_known| words(self.regressed(is_known));
        section(f, "Regressions that fail", &regressed(false))?;
        section(f, "Regressions that fail as is known", &regressed(true))?;
        let (old, new): (Vec<_>, Vec<_>) = self.failures.iter().partition(|failure| failure.known.is_some());
        section(f, "New failures", &words(new))?;
        let unexplained = self.points.iter().filter(|point| point.unexplained > 0);
        let unexplained = unexplained.map(|Point { subject, profile, unexplained, .. }| {
            format!("{subject} {profile}: {unexplained}, as they were drawn, in its folder of findings")
        });
        section(f, "Failing cases like no failure above", &words(unexplained))?;
        let left = self.left.iter().map(|left| format!("{left}\n  {}", code(&left.replay)));
        section(f, "Left behind by nights that never ended", &words(left))?;
        section(f, "Known failures", &words(old))?;
        let stale = self.stale().into_iter().map(|stale| stale + "; take it off the list");
        section(f, "Known failures that are none any more", &words(stale))?;
        let unchecked = self.known.iter().filter_map(|listed| match &listed.standing {
            Standing::Unchecked(why) => Some(format!("{}: {why}", listed.key)),
            _ => None,
        });
        section(f, "Known failures that could not be looked at", &words(unchecked))
    }
}

fn words(items: impl IntoIterator<Item = impl Display>) -> Vec<String> {
    items.into_iter().map(|item| item.to_string()).collect()
}

/// Writes a list under a title; nothing where it is empty.
fn section(f: &mut Formatter<'_>, title: &str, items: &[String]) -> fmt::Result {
    if items.is_empty() {
        return Ok(());
    }
    writeln!(f, "\n## {title}\n")?;
    items.iter().try_for_each(|item| writeln!(f, "- {item}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nightly::tests::night;
    use seamproof_judge::case::{Case, Found};
    use seamproof_judge::finding::{Check, Finding};
    use seamproof_judge::subject::TensorName;
    use std::path::Path;

    fn failure(key: &str, cases: u64, shrunk: u64) -> ReportedFailure {
        let [key, problem, finding, replay] =
            [key, "1 sequence", "wrong", "seamproof replay f.json"].map(str::to_owned);
        let (is_end, script, known) = (false, None, None);
        ReportedFailure { key, cases, shrunk, is_end, problem, finding, replay, script, known }
    }

    fn listed() -> Option<(String, String)> {
        Some(("planted".to_owned(), "https://example.org".to_owned()))
    }

    /// Returns the report of a night in which nothing is new.
    fn right() -> Report {
        let home = tempfile::tempdir().unwrap();
        let mut summary = Summary::default();
        (summary.cases, summary.seconds) = (400, 2.0);
        summary.refused = [("head dim".to_owned(), 3), ("format".to_owned(), 4)].into();
        summary.malformed = [("offsets".to_owned(), 2)].into();
        summary.failed = [(Check::Exact, 313)].into();
        let (subject, profile) = ("cuda".to_owned(), Profile::Quick);
        let canary = Canary { cases: 1, ..Canary::default() };
        let mut report = Report::new(&night(home.path(), 2.0), Vec::new(), canary);
        report.add_campaign(NightCampaign { subject, profile, summary }, &Trend::default());
        report
    }

    /// Returns the report of a night with two new failures, and stored cases of a new and of a known one.
    fn wrong() -> Report {
        let stored = ReportedFailure { known: listed(), ..failure("listed", 1, 0) };
        let failed = vec![failure("envelope", 1, 0), stored];
        Report {
            regressions: vec![Regressions { failed, ..Regressions::default() }],
            failures: vec![failure("a", 1, 1), failure("b", 312, 8)],
            ..right()
        }
    }

    #[test]
    fn cases_are_counted_and_failing_ones_have_their_key_and_command() {
        let text = wrong().to_string();
        for part in [
            "# Night 1: ",
            "| cuda | quick | 400 | 7 | 2 | 313 | 0 | 200.0 | first night |",
            "- **a** (1 failing case).",
            "- **b** (312 failing cases, 8 of them shrunk, the others like them).",
            "## Regressions that fail\n\n- **envelope** (1 failing case, not shrunk). 1 sequence: wrong\n  `seamproof",
            "## Regressions that fail as is known\n\n- **listed** (1 failing case, not shrunk). Known: planted (",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }

    /// Test with a failure of one key that two campaigns saw, one of them far above what is known.
    #[test]
    fn a_failure_that_one_campaign_shows_as_known_and_another_one_not_is_listed_twice() {
        let entry = "
            [[known]]
            key = 'envelope · cuda · dq'
            shows = [{ checks = ['envelope'], tensors = ['dq'], needs = [], ratio = 2.0 }]
            case = 'case.json'
            reason = 'planted'
            source = 'https://example.org'";
        let known: Known = toml::from_str(entry).unwrap();
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus/defects/ring-merge-cancels.json");
        let problem = Case::load(&file).unwrap().problem;
        let finding = Finding {
            ratio: Some(1.5),
            ..Finding::new(Check::Envelope, Some(TensorName::Dq), String::new())
        };
        let distinct = |worst| Distinct {
            key: FailureKey::without_problem(&finding, "cuda"),
            seen: 1,
            counted: 2,
            first_case: 0,
            found: Found::drawn(finding.clone()),
            worst,
            smallest: Some(Box::new(problem.clone())),
            problem: String::new(),
            size: None,
            name: None,
            replay: String::new(),
            try_command: None,
            script: None,
        };
        let campaign = |worst| {
            let mut summary = Summary::default();
            summary.distinct.push(distinct(worst));
            NightCampaign { subject: "cuda".to_owned(), profile: Profile::Quick, summary }
        };
        let listed = |worst: &[f64]| {
            let campaigns: Vec<_> = worst.iter().copied().map(campaign).collect();
            failures(&campaigns, &known)
                .iter()
                .map(|failure| (failure.known.is_some(), failure.cases))
                .collect::<Vec<_>>()
        };
        assert_eq!(listed(&[1.5, 3.9]), [(true, 6)]);
        assert_eq!(listed(&[1.5, 4.1]), [(false, 3), (true, 3)]);
        assert_eq!(listed(&[f64::INFINITY]), [(false, 3)]);
    }

    /// Test that the page on nights shows a report as it is.
    #[test]
    fn the_page_on_nights_shows_the_legend() {
        let page = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/nightly.md");
        let page = std::fs::read_to_string(page).expect("the page is there");
        assert!(page.contains(LEGEND), "{LEGEND}");
    }

    /// Test that words and exit code agree, the missed canary apart, which outweighs everything.
    #[test]
    fn the_title_says_what_the_exit_code_says() {
        let (dir, replay, unread) = (String::new(), String::new(), Vec::new());
        let left = Left { dir, findings: 3, ends: 2, unread, replay };
        let missed = || vec!["cases".to_owned()];
        let stale = Listed { key: "a".to_owned(), standing: Standing::Stale("holds".to_owned()) };
        let lost = vec!["no device".to_owned()];
        let crash = |known| ReportedFailure { is_end: true, known, ..failure("crash", 1, 0) };
        for (report, [wrong, ended], title) in [
            (right(), [false; 2], "nothing new"),
            (Report { missed: missed(), ..right() }, [false; 2], "nothing new, but too little was run"),
            (
                Report { known: vec![stale], ..right() },
                [false; 2],
                "nothing new, but 1 known failure not seen any more",
            ),
            (
                Report { missed: missed(), ..wrong() },
                [true, false],
                "2 new failures, 1 failing regression, too little was run",
            ),
            (
                Report { internal: lost, unexplained: 1, ..right() },
                [true, false],
                "1 failing case like no failure, faults of Seamproof or of a device",
            ),
            (Report { left: vec![left], ..right() }, [true, false], "3 findings left behind"),
            (Report { failures: vec![crash(None)], ..right() }, [false, true], "1 new failure"),
            (Report { failures: vec![crash(listed())], ..right() }, [false; 2], "nothing new"),
        ] {
            assert_eq!([report.has_news(false), report.has_news(true)], [wrong, ended], "{title}");
            assert_eq!(report.news_title(), title);
            assert_eq!(report.title(), "proves nothing, as the canary was missed");
        }
        let canary = Canary { not_told: Some("the subject fails by itself".to_owned()), ..Canary::default() };
        let title = Report { canary, ..right() }.title();
        assert_eq!(title, "nothing new, but the canary was inconclusive");
    }

    #[test]
    fn of_many_lines_the_first_are_told_and_the_others_counted() {
        let lines: Vec<String> = (0..LINES_MAX + 2).map(|line| line.to_string()).collect();
        assert_eq!(few(&lines).last().map(String::as_str), Some("and 2 others"));
        assert_eq!(few(&lines[..=LINES_MAX]).last().map(String::as_str), Some("and 1 other"));
        assert_eq!(few(&lines[..LINES_MAX]).len(), LINES_MAX);
    }
}
