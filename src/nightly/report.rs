//! A night's report: for people, and the same as JSON.

use std::collections::BTreeMap;
use std::fmt::{self, Display, Formatter};

use serde::Serialize;

use super::{
    Known, Left, Night, NightError, NightOutcome, Point, Regressed, Regressions, Standing, Unjudged, left,
};
use crate::campaign::{Distinct, Registered, Summary, met};
use crate::paste::code;
use seamproof_judge::prose::counted;

/// The file that ends a night.
pub(super) const JSON: &str = "report.json";

/// Lines of one campaign about what was too little.
const LINES_MAX: usize = 4;

/// What the columns of the campaigns are.
const LEGEND: &str = "\
*cases*: all that were run. *refused*: of them, outside of the subject's capability table. *malformed*: those that no subject
may take, refused as such. *failed*: those in which a check broke. *different*: failures, each with a key of its own. Of *large*
cases, of which a second holds few, no floors are asked.
*against the night before*: cases a second, and the p99 of each tensor, the error ÷ bound that 99 of 100 cases stay below.";

/// A failure of a night, whatever campaigns it was seen in.
#[derive(Clone, Debug, Serialize)]
pub struct ReportedFailure {
    /// Its key in words.
    pub key: String,
    /// The key without its features: check, subject and tensor. Failures that share it are often one fault.
    pub symptom: String,
    /// Failing cases of it: those that were shrunk to it, and those that were only counted, as each has its check, its
    /// tensor and all features that it needs.
    pub cases: u64,
    /// Those of them that were shrunk to it.
    pub shrunk: u64,
    /// Whether the subject died or hung.
    pub is_end: bool,
    /// The smallest case in words.
    pub problem: String,
    /// What is wrong in it.
    pub finding: String,
    /// The command that shows it again.
    pub replay: String,
    /// Why it is known, and where that is said.
    pub known: Option<(String, String)>,
}

impl Display for ReportedFailure {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let ReportedFailure { key, problem, finding, replay, .. } = self;
        match self.cases {
            0 => write!(f, "**{key}**.")?,
            cases => write!(f, "**{key}** ({}).", met(cases, self.shrunk))?,
        }
        if let Some((why, source)) = &self.known {
            write!(f, " Known: {why} ({source})")?;
        }
        write!(f, " {problem}: {finding}\n  {}", code(replay))
    }
}

/// An entry of the list of known failures.
#[derive(Clone, Debug, Serialize)]
pub struct Listed {
    /// Its key.
    pub key: String,
    /// What became of it.
    pub standing: Standing,
}

/// What a night came to.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Its number.
    pub night: u32,
    /// The version of this program.
    pub program: String,
    /// The seed of all cases.
    pub seed: String,
    /// Time of all campaigns together.
    pub seconds: f64,
    /// The planted fault in words; absent where it was missed.
    pub canary: Option<String>,
    /// Subjects that were not there, and why.
    pub absent: Vec<(String, String)>,
    /// Stored cases.
    pub regressions: Vec<Regressions>,
    /// The campaigns in short.
    pub points: Vec<Point>,
    /// How each differs from an earlier night.
    pub trend: Vec<String>,
    /// Failures, each key once.
    pub failures: Vec<ReportedFailure>,
    /// What killed starts left behind, of unfinished nights and of slices of this one.
    pub left: Vec<Left>,
    /// The list of known failures.
    pub known: Vec<Listed>,
    /// Failing cases that are like none of these, past what was shrunk.
    pub unexplained: u64,
    /// What was too little.
    pub missed: Vec<String>,
    /// Faults of this program.
    pub internal: Vec<String>,
    /// What was lost by an earlier end of the night.
    pub lost: Vec<String>,
    /// What of the trend's file is no night's.
    pub passed_over: Option<String>,
}

impl Report {
    pub(super) fn new(night: &Night, outcome: &NightOutcome, known: &Known) -> Result<Report, NightError> {
        let points: Vec<Point> = outcome
            .campaigns
            .iter()
            .map(|c| Point::of(night.number, &c.subject, c.profile.name(), &c.summary))
            .collect();
        let told = |of: fn(&Summary) -> Vec<String>| -> Vec<String> {
            let campaigns = outcome.campaigns.iter();
            let said = campaigns.flat_map(|c| {
                of(&c.summary).into_iter().map(move |what| format!("{} {}: {what}", c.subject, c.profile))
            });
            said.collect()
        };
        let subjects = night.orders.subjects.iter().map(|text| Registered::new(text));
        let listed = known.standings(&subjects.collect::<Result<Vec<_>, _>>()?)?.into_iter();
        let unjudged = outcome.regressions.iter().flat_map(|all| {
            all.internal.iter().map(move |Unjudged { file, what }| format!("{} {file}: {what}", all.subject))
        });
        let failures = failures(outcome, known);
        Ok(Report {
            night: night.number,
            program: night.orders.program.clone(),
            seed: format!("{:#x}", night.orders.seed),
            seconds: outcome.campaigns.iter().map(|campaign| campaign.summary.seconds).sum(),
            canary: outcome.canary.finding.as_ref().map(|_| outcome.canary.to_string()),
            absent: night.orders.absent.clone(),
            regressions: outcome.regressions.clone(),
            trend: points.iter().map(|point| point.against(night.trend.before(point))).collect(),
            unexplained: points.iter().map(|point| point.unexplained).sum(),
            points,
            left: left::left(night, known, &failures),
            failures,
            known: listed.map(|(entry, standing)| Listed { key: entry.key.clone(), standing }).collect(),
            missed: told(|summary| few(&summary.missed)),
            internal: unjudged.chain(told(|summary| summary.infrastructure.clone())).collect(),
            lost: outcome.campaigns.iter().flat_map(|campaign| campaign.lost.clone()).collect(),
            passed_over: night.trend.passed_over(),
        })
    }

    /// Failures that are not known, those of the subject's end or the others.
    pub fn news(&self, is_end: bool) -> usize {
        self.failures.iter().filter(|failure| failure.known.is_none() && failure.is_end == is_end).count()
    }

    /// Failures that killed starts left behind and that are not known, those of the subject's end or the others.
    pub fn left_behind(&self, is_end: bool) -> usize {
        let is_new = |failure: &&ReportedFailure| failure.known.is_none() && failure.is_end == is_end;
        let is_regressed = |failed: &&Regressed| failed.is_end == is_end && !self.lists(&failed.key);
        let of_one = |left: &Left| {
            left.findings.iter().filter(is_new).count() + left.regressions.iter().filter(is_regressed).count()
        };
        self.left.iter().map(of_one).sum()
    }

    /// Whether anything failed that is not known: by the subject's end, or otherwise.
    pub fn has_news(&self, is_end: bool) -> bool {
        self.news(is_end) + self.left_behind(is_end) > 0
            || self.regressed(false).any(|failed| failed.is_end == is_end)
            || (!is_end && self.unexplained > 0)
    }

    /// Entries of the list that are not true any more.
    pub fn stale(&self) -> impl Iterator<Item = (&str, &str)> {
        self.known.iter().filter_map(|listed| match &listed.standing {
            Standing::Stale(what) => Some((listed.key.as_str(), what.as_str())),
            _ => None,
        })
    }

    /// Stored cases that fail, those of a known key or the others.
    pub fn regressed(&self, is_known: bool) -> impl Iterator<Item = &Regressed> {
        let all = self.regressions.iter().flat_map(|all| &all.failed);
        all.filter(move |failed| self.lists(&failed.key) == is_known)
    }

    /// Whether a key is on the list of known failures.
    pub fn lists(&self, key: &str) -> bool {
        self.known.iter().any(|listed| listed.key == key)
    }

    /// What the night came to, as its exit code says, in a few words.
    fn title(&self) -> String {
        if self.canary.is_none() {
            return "proves nothing, as the canary was missed".to_owned();
        }
        let (news, regressed) = (self.news(false) + self.news(true), self.regressed(false).count());
        let (unexplained, stale) = (self.unexplained, self.stale().count());
        let left = self.left_behind(false) + self.left_behind(true);
        let mut told = Vec::new();
        let mut tell = |is_so: bool, what: String| told.extend(is_so.then_some(what));
        tell(news > 0, counted(news, "new failure"));
        tell(regressed > 0, counted(regressed, "failing regression"));
        tell(unexplained > 0, counted(unexplained, "failing case") + " like no failure");
        tell(left > 0, counted(left, "failure") + " left behind");
        tell(stale > 0, counted(stale, "known failure") + " not seen any more");
        tell(!self.internal.is_empty(), "faults of Seamproof or of a device".to_owned());
        tell(!self.missed.is_empty(), "too little was run".to_owned());
        match (self.has_news(false) || self.has_news(true), told.is_empty()) {
            (true, _) => told.join(", "),
            (false, true) => "nothing new".to_owned(),
            (false, false) => format!("nothing new, but {}", told.join(", ")),
        }
    }
}

/// The first lines, and how many others there are.
fn few(lines: &[String]) -> Vec<String> {
    let mut few: Vec<String> = lines.iter().take(LINES_MAX).cloned().collect();
    if lines.len() > LINES_MAX {
        few.push(format!("and {}", counted((lines.len() - LINES_MAX) as u64, "other")));
    }
    few
}

/// Every key once, with its smallest case.
fn failures(outcome: &NightOutcome, known: &Known) -> Vec<ReportedFailure> {
    let mut all: BTreeMap<String, ([u64; 2], &Distinct)> = BTreeMap::new();
    for distinct in outcome.campaigns.iter().flat_map(|campaign| &campaign.summary.distinct) {
        let ([cases, shrunk], smallest) = all.entry(distinct.key.to_string()).or_insert(([0; 2], distinct));
        *cases += distinct.cases();
        *shrunk += distinct.seen;
        if distinct.size < smallest.size {
            *smallest = distinct;
        }
    }
    let failure = |(key, ([cases, shrunk], distinct)): (String, ([u64; 2], &Distinct))| ReportedFailure {
        known: known.of(&key).map(|entry| (entry.reason.clone(), entry.source.clone())),
        key,
        symptom: distinct.key.without_features().to_string(),
        cases,
        shrunk,
        is_end: distinct.key.check.is_end(),
        problem: distinct.problem.clone(),
        finding: distinct.found.to_string(),
        replay: distinct.replay.clone(),
    };
    all.into_iter().map(failure).collect()
}

impl Display for Report {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        writeln!(f, "# Night {}: {}\n", self.night, self.title())?;
        writeln!(f, "Seamproof {}, seed {}, {:.0} s of campaigns.\n", self.program, self.seed, self.seconds)?;
        match &self.canary {
            Some(canary) => writeln!(f, "- {canary}")?,
            None => writeln!(f, "- **The canary was missed: this night proves nothing.**")?,
        }
        self.absent.iter().try_for_each(|(name, why)| writeln!(f, "- **{name} is not there**: {why}"))?;
        self.regressions.iter().try_for_each(|all| writeln!(f, "- {all}"))?;
        self.campaigns(f)?;
        self.failed(f)?;
        section(f, "Too little was run", &self.missed)?;
        section(f, "Faults of Seamproof, or of a device", &self.internal)?;
        section(f, "Cut off when an earlier start ended", &self.lost)
    }
}

impl Report {
    fn campaigns(&self, f: &mut Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "\n| subject | sizes | cases | refused | malformed | failed | different | cases/s | against the night before |"
        )?;
        writeln!(f, "|---|---|---|---|---|---|---|---|---|")?;
        for (point, trend) in self.points.iter().zip(&self.trend) {
            let Point { subject, profile, cases, refused, malformed, failed, distinct, .. } = point;
            let rate = point.cases_per_second;
            writeln!(
                f,
                "| {subject} | {profile} | {cases} | {refused} | {malformed} | {failed} | {distinct} | {rate:.1} | {trend} |"
            )?;
        }
        writeln!(f, "\n{LEGEND}")?;
        match &self.passed_over {
            Some(what) => writeln!(f, "\n`trend.jsonl` has {what}."),
            None => Ok(()),
        }
    }

    /// Where those failing cases lie that nothing was shrunk for.
    fn unexplained(&self) -> Vec<String> {
        let points = self.points.iter().filter(|point| point.unexplained > 0);
        let told = points.map(|Point { subject, profile, unexplained, .. }| {
            format!("{subject} {profile}: {unexplained}, as they were drawn, in whole/findings")
        });
        told.collect()
    }

    /// Each night with the command that judges it again, and then what it found.
    fn told_of_left(&self) -> Vec<String> {
        let of_one = |left: &Left| {
            let Left { night, replay, findings, regressions } = left;
            let what = match *night == self.night {
                true => "Slices of this night were cut off, and what they found was not met again".to_owned(),
                false => format!("Night {night} never ended, and no report told what it found"),
            };
            let findings = findings.iter().map(ToString::to_string);
            let each = findings.chain(regressions.iter().map(ToString::to_string));
            let each = each.map(|each| format!("night {night}: {each}"));
            std::iter::once(format!("{what}\n  {}", code(replay))).chain(each).collect::<Vec<_>>()
        };
        self.left.iter().flat_map(of_one).collect()
    }

    fn failed(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let regressed = |is_known| self.regressed(is_known).map(Regressed::to_string).collect::<Vec<_>>();
        section(f, "Regressions that fail", &regressed(false))?;
        section(f, "Regressions that fail as is known", &regressed(true))?;
        let (old, new): (Vec<_>, Vec<_>) = self.failures.iter().partition(|failure| failure.known.is_some());
        section(f, "New failures", &grouped(&new))?;
        section(f, "Failing cases like no failure above", &self.unexplained())?;
        section(f, "Left behind by starts that were killed", &self.told_of_left())?;
        section(f, "Known failures", &old.iter().map(ToString::to_string).collect::<Vec<_>>())?;
        let stale: Vec<String> =
            self.stale().map(|(key, what)| format!("{key}: {what}; take it off the list")).collect();
        section(f, "Known failures that are none any more", &stale)?;
        let unchecked = self.known.iter().filter_map(|listed| match &listed.standing {
            Standing::Unchecked(why) => Some(format!("{}: {why}", listed.key)),
            _ => None,
        });
        section(f, "Known failures that could not be looked at", &unchecked.collect::<Vec<_>>())
    }
}

/// Failures, those of one symptom under one head.
fn grouped(failures: &[&ReportedFailure]) -> Vec<String> {
    let mut groups: BTreeMap<&str, Vec<&ReportedFailure>> = BTreeMap::new();
    failures.iter().for_each(|failure| groups.entry(&failure.symptom).or_default().push(failure));
    let told = |(symptom, group): (&str, Vec<&ReportedFailure>)| match &group[..] {
        [alone] => alone.to_string(),
        group => {
            let cases = counted(group.iter().map(|failure| failure.cases).sum::<u64>(), "failing case");
            let head = format!("**{symptom}**: {cases} by {} keys, often of one fault", group.len());
            let each =
                group.iter().map(|failure| format!("\n  - {}", failure.to_string().replace('\n', "\n  ")));
            head + &each.collect::<String>()
        }
    };
    groups.into_iter().map(told).collect()
}

/// A list under a title; nothing where it is empty.
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
    use seamproof_judge::finding::Check;

    fn regressed(key: &str) -> Regressed {
        let [file, finding, replay] = ["case.json", "wrong", "seamproof replay case.json --backend cuda"];
        Regressed {
            file: file.to_owned(),
            subject: "cuda".to_owned(),
            key: key.to_owned(),
            is_end: false,
            finding: finding.to_owned(),
            replay: replay.to_owned(),
        }
    }

    fn failure(key: &str, cases: u64, shrunk: u64) -> ReportedFailure {
        ReportedFailure {
            key: key.to_owned(),
            symptom: key.split(", ").next().unwrap_or_default().to_owned(),
            cases,
            shrunk,
            is_end: false,
            problem: "1 sequence".to_owned(),
            finding: "wrong".to_owned(),
            replay: "seamproof replay f.json".to_owned(),
            known: None,
        }
    }

    fn report() -> Report {
        let mut summary = Summary::default();
        (summary.cases, summary.seconds) = (400, 2.0);
        summary.refused = [("head dim".to_owned(), 3), ("format".to_owned(), 4)].into();
        summary.malformed = [("offsets".to_owned(), 2)].into();
        summary.failed = [(Check::Exact, 313)].into();
        Report {
            night: 1,
            program: "1".to_owned(),
            seed: "0x1".to_owned(),
            seconds: 2.0,
            canary: Some("found".to_owned()),
            absent: Vec::new(),
            regressions: vec![Regressions {
                subject: "cuda".to_owned(),
                failed: vec![regressed("envelope · lse"), regressed("listed")],
                ..Regressions::default()
            }],
            points: vec![Point::of(1, "cuda", "quick", &summary)],
            trend: vec!["first night".to_owned()],
            failures: vec![failure("a", 1, 1), failure("b", 312, 8)],
            left: Vec::new(),
            known: vec![Listed { key: "listed".to_owned(), standing: Standing::True }],
            unexplained: 0,
            missed: Vec::new(),
            internal: Vec::new(),
            lost: Vec::new(),
            passed_over: None,
        }
    }

    #[test]
    fn what_was_refused_and_what_failed_is_counted() {
        let text = report().to_string();
        assert!(text.contains("| cuda | quick | 400 | 7 | 2 | 313 | 0 | 200.0 | first night |"), "{text}");
        let b = "**b** (312 failing cases, 8 of them shrunk, the others like them).";
        assert!(text.contains("**a** (1 failing case).") && text.contains(b), "{text}");
    }

    #[test]
    fn failures_of_one_symptom_stand_under_one_head_and_columns_are_explained() {
        let failures = vec![failure("a, x", 3, 1), failure("a, y", 2, 2), failure("b", 1, 1)];
        let text = Report { failures, ..report() }.to_string();
        let group = "- **a**: 5 failing cases by 2 keys, often of one fault
  - **a, x** (3 failing cases, 1 of them shrunk, the others like them). 1 sequence: wrong
    `seamproof replay f.json`
  - **a, y** (2 failing cases). 1 sequence: wrong
    `seamproof replay f.json`
- **b** (1 failing case). 1 sequence: wrong
  `seamproof replay f.json`
";
        assert!(text.contains(group), "{text}");
        for column in ["cases", "refused", "malformed", "failed", "different", "against the night before"] {
            assert!(text.contains(&format!("*{column}*: ")), "{column}: {text}");
        }
    }

    /// The page on nights shows a report: its legend is this one, and what it leaves out of the p99 is named by the true names.
    #[test]
    fn the_page_on_nights_shows_the_columns_and_tensors_that_there_are() {
        let page = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/nightly.md");
        let page = std::fs::read_to_string(page).expect("the page is there");
        assert!(page.contains(LEGEND), "{LEGEND}");
        let few = page.lines().find(|line| line.contains("too few cases for p99 of")).expect("the sample");
        assert!(few.contains("p99 of out, lse, max_logit, dq, dk, dv"), "{few}");
    }

    /// The title says what the exit code says.
    #[test]
    fn the_title_says_what_is_so() {
        let right =
            || Report { regressions: Vec::new(), failures: Vec::new(), known: Vec::new(), ..report() };
        let few = |report: Report| Report { missed: vec!["cases".to_owned()], ..report };
        let stale = |report: Report| {
            let standing = Standing::Stale("does not fail any more".to_owned());
            Report { known: vec![Listed { key: "a".to_owned(), standing }], ..report }
        };
        let titled = |report: Report, title: &str| {
            let text = report.to_string();
            assert_eq!(text.lines().next(), Some(&*format!("# Night 1: {title}")));
        };
        titled(right(), "nothing new");
        titled(few(right()), "nothing new, but too little was run");
        titled(stale(right()), "nothing new, but 1 known failure not seen any more");
        titled(few(report()), "2 new failures, 1 failing regression, too little was run");
        let lost = Report { internal: vec!["no device".to_owned()], unexplained: 1, ..right() };
        titled(lost, "1 failing case like no failure, faults of Seamproof or of a device");
        let left = |is_end: bool, known: Option<(String, String)>| Left {
            night: 1,
            replay: "seamproof replay nights/night-0001".to_owned(),
            findings: vec![ReportedFailure { is_end, known, ..failure("a", 1, 1) }],
            regressions: vec![regressed("listed")],
        };
        let known = Some(("planted".to_owned(), "https://example.org".to_owned()));
        let list = || vec![Listed { key: "listed".to_owned(), standing: Standing::True }];
        let behind = |left: Left| Report { left: vec![left], known: list(), ..right() };
        titled(behind(left(false, None)), "1 failure left behind");
        titled(behind(left(true, known)), "nothing new");
        titled(Report { left: vec![left(true, None)], ..right() }, "2 failures left behind");
        let missed = Report { canary: None, ..report() };
        titled(missed, "proves nothing, as the canary was missed");
    }

    /// The exit code tells a crash from a wrong result, in stored cases and in what was left behind too.
    #[test]
    fn a_stored_case_in_which_the_subject_died_is_a_crash() {
        let ended = || vec![Regressed { is_end: true, ..regressed("crash · cuda") }];
        let right =
            || Report { regressions: Vec::new(), failures: Vec::new(), known: Vec::new(), ..report() };
        let news = |report: &Report| [false, true].map(|is_end| report.has_news(is_end));
        assert_eq!(news(&right()), [false, false]);
        let stored = Regressions { failed: ended(), ..Regressions::default() };
        assert_eq!(news(&Report { regressions: vec![stored], ..right() }), [false, true]);
        let left = Left { night: 1, replay: String::new(), findings: Vec::new(), regressions: ended() };
        assert_eq!(news(&Report { left: vec![left], ..right() }), [false, true]);
        assert_eq!(news(&report()), [true, false]);
    }

    #[test]
    fn of_many_lines_the_first_are_told_and_the_others_counted() {
        let lines: Vec<String> = (0..LINES_MAX + 2).map(|line| line.to_string()).collect();
        assert_eq!(few(&lines).last().map(String::as_str), Some("and 2 others"));
        assert_eq!(few(&lines[..=LINES_MAX]).last().map(String::as_str), Some("and 1 other"));
        assert_eq!(few(&lines[..LINES_MAX]).len(), LINES_MAX);
    }

    #[test]
    fn a_failing_regression_has_key_and_command_and_is_no_news_where_it_is_known() {
        let report = report();
        let [news, known] = [false, true].map(|is_known| report.regressed(is_known).count());
        assert_eq!((news, known), (1, 1));
        let text = report.to_string();
        assert!(text.starts_with("# Night 1: 2 new failures, 1 failing regression\n"), "{text}");
        let line = "- **envelope · lse** case.json: wrong\n  `seamproof replay case.json --backend cuda`\n";
        assert!(text.contains(&format!("## Regressions that fail\n\n{line}")), "{text}");
        assert!(text.contains("## Regressions that fail as is known\n\n- **listed** case.json"), "{text}");
    }
}
