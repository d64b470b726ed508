//! A night's report: for people, and the same as JSON.

use std::collections::BTreeMap;
use std::fmt::{self, Display, Formatter};

use serde::Serialize;

use super::{Known, Night, NightError, Outcome, Point, Regressed, Regressions, Standing, Trend};
use crate::campaign::{Distinct, Summary};

/// The file that ends a night.
pub(super) const JSON: &str = "report.json";

/// Lines of one campaign about what was too little.
const LINES_MAX: usize = 4;

/// A failure of a night, whatever campaigns it was seen in.
#[derive(Clone, Debug, Serialize)]
pub struct Failure {
    /// Its key in words.
    pub key: String,
    /// Shrunk cases that came to it.
    pub seen: u64,
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
    pub failures: Vec<Failure>,
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
}

impl Report {
    pub(super) fn new(
        night: &Night,
        outcome: &Outcome,
        known: &Known,
        trend: &Trend,
    ) -> Result<Report, NightError> {
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
        let listed = known.standings()?.into_iter();
        Ok(Report {
            night: night.number,
            program: night.orders.program.clone(),
            seed: format!("{:#x}", night.orders.seed),
            seconds: outcome.campaigns.iter().map(|campaign| campaign.summary.seconds).sum(),
            canary: outcome.canary.finding.as_ref().map(|_| outcome.canary.to_string()),
            absent: night.orders.absent.clone(),
            regressions: outcome.regressions.clone(),
            trend: points.iter().map(|point| point.against(trend.before(point))).collect(),
            points,
            failures: failures(outcome, known),
            known: listed.map(|(entry, standing)| Listed { key: entry.key.clone(), standing }).collect(),
            unexplained: outcome.campaigns.iter().map(|c| c.summary.kept + c.summary.dropped).sum(),
            missed: told(|summary| {
                let more = summary.kept + summary.dropped;
                let more = (more > 0).then(|| {
                    format!("{more} failing cases are like no failure above; look at whole/findings")
                });
                few(&summary.missed).into_iter().chain(more).collect()
            }),
            internal: told(|summary| summary.infrastructure.clone()),
            lost: outcome.campaigns.iter().flat_map(|campaign| campaign.lost.clone()).collect(),
        })
    }

    /// Failures that are not known, those of the subject's end or the others.
    pub fn news(&self, is_end: bool) -> usize {
        self.failures.iter().filter(|failure| failure.known.is_none() && failure.is_end == is_end).count()
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
        all.filter(move |failed| self.known.iter().any(|listed| listed.key == failed.key) == is_known)
    }
}

/// The first lines, and how many others there are.
fn few(lines: &[String]) -> Vec<String> {
    let mut few: Vec<String> = lines.iter().take(LINES_MAX).cloned().collect();
    if lines.len() > LINES_MAX {
        few.push(format!("and {} others", lines.len() - LINES_MAX));
    }
    few
}

/// Every key once, with its smallest case.
fn failures(outcome: &Outcome, known: &Known) -> Vec<Failure> {
    let mut all: BTreeMap<String, (u64, &Distinct)> = BTreeMap::new();
    for distinct in outcome.campaigns.iter().flat_map(|campaign| &campaign.summary.distinct) {
        let (seen, smallest) = all.entry(distinct.key.to_string()).or_insert((0, distinct));
        *seen += distinct.seen;
        if distinct.size < smallest.size {
            *smallest = distinct;
        }
    }
    let failure = |(key, (seen, distinct)): (String, (u64, &Distinct))| Failure {
        known: known.of(&key).map(|entry| (entry.reason.clone(), entry.source.clone())),
        key,
        seen,
        is_end: distinct.key.check.is_end(),
        problem: distinct.problem.clone(),
        finding: distinct.finding.to_string(),
        replay: distinct.replay.clone(),
    };
    all.into_iter().map(failure).collect()
}

impl Display for Report {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let news = self.news(false) + self.news(true) + self.regressed(false).count();
        let title = match (&self.canary, news, self.unexplained) {
            (None, ..) => "proves nothing".to_owned(),
            (Some(_), 0, 0) => "nothing new".to_owned(),
            (Some(_), 0, more) => format!("{more} failing cases that are like no failure"),
            (Some(_), news, _) => format!("{news} new failures"),
        };
        writeln!(f, "# Night {}: {title}\n", self.night)?;
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
        section(f, "Lost when an earlier start ended", &self.lost)
    }
}

impl Report {
    fn campaigns(&self, f: &mut Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "\n| subject | sizes | cases | refused | malformed | cases/s | failures | against the night before |"
        )?;
        writeln!(f, "|---|---|---|---|---|---|---|---|")?;
        for (point, trend) in self.points.iter().zip(&self.trend) {
            let Point { subject, profile, cases, refused, malformed, distinct, .. } = point;
            let rate = point.cases_per_second;
            writeln!(
                f,
                "| {subject} | {profile} | {cases} | {refused} | {malformed} | {rate:.1} | {distinct} | {trend} |"
            )?;
        }
        Ok(())
    }

    fn failed(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let regressed = |is_known| self.regressed(is_known).map(Regressed::to_string).collect::<Vec<_>>();
        section(f, "Regressions that fail", &regressed(false))?;
        section(f, "Regressions that fail as is known", &regressed(true))?;
        let (old, new): (Vec<_>, Vec<_>) = self.failures.iter().partition(|failure| failure.known.is_some());
        let told = |failure: &&Failure| {
            let Failure { key, seen, problem, finding, replay, known, .. } = failure;
            let why =
                known.as_ref().map_or(String::new(), |(why, source)| format!(" Known: {why} ({source})"));
            let seen = if *seen == 1 { "once".to_owned() } else { format!("{seen} times") };
            format!("**{key}** (seen {seen}).{why} {problem}: {finding}\n  `{replay}`")
        };
        section(f, "New failures", &new.iter().map(told).collect::<Vec<_>>())?;
        section(f, "Known failures", &old.iter().map(told).collect::<Vec<_>>())?;
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

    fn regressed(key: &str) -> Regressed {
        let [file, finding, replay] = ["case.json", "wrong", "seamproof replay case.json --backend cuda"];
        Regressed {
            file: file.to_owned(),
            key: key.to_owned(),
            finding: finding.to_owned(),
            replay: replay.to_owned(),
        }
    }

    fn failure(key: &str, seen: u64) -> Failure {
        Failure {
            key: key.to_owned(),
            seen,
            is_end: false,
            problem: "1 sequence".to_owned(),
            finding: "wrong".to_owned(),
            replay: "seamproof replay f.json".to_owned(),
            known: None,
        }
    }

    fn report() -> Report {
        let mut summary = Summary::default();
        (summary.cases, summary.seconds) = (40, 2.0);
        summary.refused = [("head dim".to_owned(), 3), ("format".to_owned(), 4)].into();
        summary.malformed = [("offsets".to_owned(), 2)].into();
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
            failures: vec![failure("a", 1), failure("b", 2)],
            known: vec![Listed { key: "listed".to_owned(), standing: Standing::True }],
            unexplained: 0,
            missed: Vec::new(),
            internal: Vec::new(),
            lost: Vec::new(),
        }
    }

    #[test]
    fn what_was_refused_is_counted_and_once_is_once() {
        let text = report().to_string();
        assert!(text.contains("| cuda | quick | 40 | 7 | 2 | 20.0 | 0 | first night |"), "{text}");
        assert!(text.contains("**a** (seen once).") && text.contains("**b** (seen 2 times)."), "{text}");
    }

    #[test]
    fn a_failing_regression_has_key_and_command_and_is_no_news_where_it_is_known() {
        let report = report();
        let [news, known] = [false, true].map(|is_known| report.regressed(is_known).count());
        assert_eq!((news, known), (1, 1));
        let text = report.to_string();
        assert!(text.starts_with("# Night 1: 3 new failures"), "{text}");
        let line = "- **envelope · lse** case.json: wrong\n  `seamproof replay case.json --backend cuda`\n";
        assert!(text.contains(&format!("## Regressions that fail\n\n{line}")), "{text}");
        assert!(text.contains("## Regressions that fail as is known\n\n- **listed** case.json"), "{text}");
    }
}
