//! A summary as people read it: the verdict first, then findings, then numbers.
//!
//! Lines carry a [`Tone`], so that a terminal can colour them and knows which of them it may wrap. The label of a line
//! takes its first [`LABEL_COLUMNS`] columns.

use std::collections::BTreeMap;
use std::fmt::{self, Display, Formatter};

use serde::{Deserialize, Serialize};

use super::streak::ALIKE_MIN;
use super::summary::{Canary, Distinct, Early, Summary, total};
use crate::script::Script;
use seamproof_judge::census::CLASSES;
use seamproof_judge::finding::common_mistakes;
use seamproof_judge::prose::{self, counted};
use seamproof_judge::subject::DeviceRuns;
use seamproof_judge::verdict::Cost;

/// Columns of a line's label.
pub const LABEL_COLUMNS: usize = 10;
/// Floors that are named where too little was run; the others are counted.
const MISSED_SHOWN_MAX: usize = 4;
/// Mistakes that are named where they would explain several findings.
const COMMON_SHOWN_MAX: usize = 2;
/// Rows of a table and rules of malformed problems that are named on one line; the others are summed.
const NAMED_MAX: usize = 6;

/// How a line is meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Tone {
    /// Good news.
    Good,
    /// A finding.
    Bad,
    /// Something that makes the result doubtful.
    Doubt,
    /// Everything else.
    Plain,
    /// The label `replay:`, `try:` or `script:` and a command, which must stay on one line to be pasted.
    Command,
}

/// One line of a report.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line {
    /// How it is meant.
    pub tone: Tone,
    /// The text. It holds no line break unless a name from outside does.
    pub text: String,
}

impl Line {
    /// Returns a line of a label and a text.
    pub fn new(tone: Tone, label: &str, text: impl Display) -> Line {
        Line { tone, text: format!("{label:<LABEL_COLUMNS$}{text}") }
    }
}

/// Returns what several of these findings look like, a line each: they may have one cause.
pub(crate) fn common_lines<'a>(words: impl ExactSizeIterator<Item = &'a str>) -> Vec<Line> {
    let all = words.len();
    let common = common_mistakes(words).into_iter().take(COMMON_SHOWN_MAX);
    let line = |(mistake, count): (&str, usize)| {
        Line::new(Tone::Bad, "common", format!("{count} of {all} findings look as if {mistake}"))
    };
    common.map(line).collect()
}

/// What every report tells of a failure, below its head.
pub(crate) struct FailureLines<'a> {
    /// The case in words.
    pub(crate) problem: &'a str,
    /// What was found, in lines; `None` where the head says it.
    pub(crate) words: Option<&'a str>,
    /// Whether the case is minimal, and the evaluations that it took.
    pub(crate) shrunk: (bool, usize),
    /// Why the failure is expected, or which finding may have the same fault, in words.
    pub(crate) known: Option<String>,
    /// Commands that judge the case again: as it is stored, and typed from its words.
    pub(crate) commands: (&'a str, Option<&'a String>),
    pub(crate) script: Option<Script>,
}

impl FailureLines<'_> {
    /// Returns the lines, the commands last.
    pub(crate) fn lines(&self) -> Vec<Line> {
        let plain = |text: &str| Line::new(Tone::Plain, "", text);
        let mut lines = vec![plain(self.problem)];
        if let Some(words) = self.words {
            lines.extend(words.lines().map(plain));
            let (minimal, evaluations) = self.shrunk;
            let state = if minimal { "minimal" } else { "not minimal" };
            lines.push(plain(&format!("{state} after {}", counted(evaluations, "evaluation"))));
        }
        lines.extend(self.known.as_deref().map(plain));
        let (replay, typed) = self.commands;
        let command = |label: &str, text: &str| Line::new(Tone::Command, "", format!("{label}: {text}"));
        lines.push(command("replay", replay));
        lines.extend(typed.map(|text| command("try", text)));
        lines.extend(self.script.iter().flat_map(script_lines));
        lines
    }
}

impl Distinct {
    /// Returns the finding of the same symptom that needs fewer features, and none that this one does not need; of several
    /// the one that needs most.
    fn simpler<'a>(&self, all: &'a [Distinct]) -> Option<&'a Distinct> {
        let (symptom, needs) = (self.key.without_features(), &self.key.features);
        let fewer = |other: &Distinct| {
            let features = &other.key.features;
            features.len() < needs.len()
                && features.is_subset(needs)
                && other.key.without_features() == symptom
        };
        all.iter().filter(|other| fewer(other)).max_by_key(|other| other.key.features.len())
    }

    /// Returns words for a finding that may be another one's fault: a bug is met in many ways, and not every case of it
    /// loses the same features.
    fn perhaps(&self, all: &[Distinct]) -> Option<String> {
        let simpler = self.simpler(all)?;
        let besides: Vec<_> = self.key.features.difference(&simpler.key.features).copied().collect();
        let (first, besides) = (simpler.first_case, besides.join(", "));
        Some(format!(
            "perhaps the fault of the finding first met in case {first}, seen with {besides} besides"
        ))
    }

    /// Returns the finding in lines, one of `all`; its commands come last.
    fn lines(&self, all: &[Distinct]) -> Vec<Line> {
        let said = format!("{} ({}; first in case {})", self.key, self.met(), self.first_case);
        let words = self.found.text();
        let below = FailureLines {
            problem: &self.problem,
            words: Some(&words),
            shrunk: (self.found.minimal, self.found.evaluations),
            known: self.perhaps(all),
            commands: (&self.replay, self.try_command.as_ref()),
            script: self.script.clone(),
        };
        std::iter::once(Line::new(Tone::Bad, "FAIL", said)).chain(below.lines()).collect()
    }

    /// Returns how often the failure was met, as in `1 failing case` or `312 failing cases, 8 of them shrunk`.
    pub fn met(&self) -> String {
        met(self.cases(), self.seen)
    }
}

/// What the verdict on a campaign is made of: some fields of its summary, as `run.json` holds them too.
#[derive(Clone, Debug, Default, Deserialize)]
pub(crate) struct Ended {
    pub(crate) cases: u64,
    pub(crate) held: u64,
    pub(crate) failed: BTreeMap<String, u64>,
    pub(crate) distinct: usize,
    pub(crate) infrastructure_count: u64,
    #[serde(default)]
    pub(crate) void: Option<String>,
    pub(crate) interrupted: bool,
    #[serde(default)]
    pub(crate) adapter: Vec<String>,
    pub(crate) missed: Vec<String>,
    pub(crate) times: Pace,
}

/// Length and speed of a campaign.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
pub(crate) struct Pace {
    pub(crate) seconds: f64,
    pub(crate) cases_per_second: f64,
}

impl Ended {
    /// Returns the verdict in one sentence, with cases and seconds.
    pub(crate) fn verdict(&self) -> (Tone, String) {
        let run = format!("{} in {:.1} s", counted(self.cases, "case"), self.times.seconds);
        if !self.failed.is_empty() {
            let (findings, failed) = (counted(self.distinct, "finding"), total(self.failed.values()));
            (Tone::Bad, format!("{findings}: {failed} of {run} failed"))
        } else if self.infrastructure_count > 0 {
            let faults = counted(self.infrastructure_count, "fault");
            (Tone::Doubt, format!("{faults} of this program or of a device: {run}"))
        } else if let Some(why) = self.void.as_ref().filter(|_| !self.interrupted) {
            (Tone::Doubt, format!("no pass: {run} found nothing, but {why}"))
        } else if !self.adapter.is_empty() {
            (Tone::Doubt, format!("the subject's adapter is at fault: {run} say little"))
        } else if !self.missed.is_empty() {
            let more = if self.interrupted { "" } else { "; give it more --cases or --time" };
            (Tone::Doubt, format!("too little run: {run} say nothing yet{more}"))
        } else {
            let refused = self.cases.saturating_sub(self.held);
            let held = format!("{} held, {refused} refused as they must be", self.held);
            (Tone::Good, format!("held: {run}; nothing was found; {held}"))
        }
    }
}

impl Display for Early {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Early::NoTimeLeft => f.write_str("the time left was too short for the next case"),
            Early::NothingNew => write!(
                f,
                "every judged case with a key to see failed, the last {ALIKE_MIN} or more in no new way; --cases N \
                 without --time runs N cases all the same"
            ),
        }
    }
}

impl Display for Distinct {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        self.lines(&[]).iter().try_for_each(|line| writeln!(f, "{}", line.text))
    }
}

/// Returns a script's command on a line that can be pasted, and what is to be said about it on the next.
fn script_lines(script: &Script) -> Vec<Line> {
    let doubt = script.doubt.iter();
    match script.command() {
        Some(command) => {
            let command = Line::new(Tone::Command, "", format!("script: {command}"));
            let doubt = doubt.map(|doubt| Line::new(Tone::Plain, "", format!("        {doubt}")));
            std::iter::once(command).chain(doubt).collect()
        }
        None => doubt.map(|doubt| Line::new(Tone::Plain, "", format!("script: {doubt}"))).collect(),
    }
}

/// Returns how many cases failed in one way, and how many of them were shrunk.
pub(crate) fn met(cases: u64, shrunk: u64) -> String {
    let all = counted(cases, "failing case");
    match (cases, shrunk) {
        (1, 0) => format!("{all}, not shrunk"),
        (_, 0) => format!("{all}, none of them shrunk"),
        _ if cases == shrunk => all,
        _ => format!("{all}, {shrunk} of them shrunk, the others like them"),
    }
}

impl Display for Canary {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match &self.finding {
            Some(finding) => {
                let (case, evaluations) = (finding.first_case, finding.found.evaluations);
                write!(
                    f,
                    "canary    found in case {case}, shrunk in {} to {}",
                    counted(evaluations, "evaluation"),
                    finding.problem
                )?;
                let own = counted(self.own.len(), "case");
                if self.own.is_empty() {
                    Ok(())
                } else {
                    write!(f, " · the subject fails by itself in {own}")
                }
            }
            None if self.cases == 0 && self.infrastructure.is_empty() => {
                let what = "no wrong call shows on what the subject takes: this campaign proves nothing";
                write!(f, "canary    {what}")
            }
            None if let Some(why) = &self.not_told => write!(f, "canary    inconclusive: {why}"),
            None => {
                let cases = counted(self.cases, "case");
                write!(f, "canary    NOT FOUND in {cases}: this campaign proves nothing")
            }
        }
    }
}

impl Display for Summary {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let texts: Vec<String> = self.lines().into_iter().map(|line| line.text).collect();
        f.write_str(&texts.join("\n"))
    }
}

impl Summary {
    /// Returns the report: the verdict, what was found, what makes it doubtful, then numbers.
    pub fn lines(&self) -> Vec<Line> {
        let mut lines = vec![self.verdict()];
        let words: Vec<String> = self.distinct.iter().map(|distinct| distinct.found.text()).collect();
        lines.extend(common_lines(words.iter().map(String::as_str)));
        lines.extend(self.distinct.iter().flat_map(|distinct| distinct.lines(&self.distinct)));
        lines.extend(self.own.iter().flat_map(|own| own.lines(&[])));
        lines.extend(self.not_shrunk());
        lines.extend(self.doubts());
        lines.extend(self.counts());
        lines.extend(self.margins());
        lines.extend(self.rates());
        lines.push(self.census_line());
        lines
    }

    /// Returns the verdict in one line, with cases and seconds.
    fn verdict(&self) -> Line {
        let (tone, text) = self.ended().verdict();
        Line::new(tone, "verdict", text)
    }

    /// Returns what the verdict is made of.
    fn ended(&self) -> Ended {
        Ended {
            cases: self.cases,
            held: self.held,
            failed: self.failed.iter().map(|(check, count)| (check.name().to_owned(), *count)).collect(),
            distinct: self.distinct.len(),
            infrastructure_count: self.infrastructure_count,
            void: self.void.clone(),
            interrupted: self.interrupted,
            adapter: self.adapter.clone(),
            missed: self.missed.clone(),
            times: Pace { seconds: self.seconds, cases_per_second: self.per_second(self.cases) },
        }
    }

    /// Returns the failing cases that no finding stands for.
    fn not_shrunk(&self) -> Vec<Line> {
        let counts = [
            (self.not_shrunk, "with check, tensor and all needed features of a finding above: not shrunk"),
            (self.kept, "like no finding above: kept as drawn"),
            (self.dropped, "like no finding above: only counted, as too many are kept already"),
        ];
        let told = counts.into_iter().filter(|(count, _)| *count > 0);
        let line = |(count, what)| {
            Line::new(Tone::Plain, "", format!("{} {what}", counted(count, "more failing case")))
        };
        told.map(line).collect()
    }

    /// Returns what makes the result doubtful: faults of this program, and what was too little.
    fn doubts(&self) -> Vec<Line> {
        let doubt = |label: &str, text: &str| Line::new(Tone::Doubt, label, text);
        let mut lines: Vec<Line> = self.infrastructure.iter().map(|what| doubt("internal", what)).collect();
        lines.extend(self.adapter.iter().map(|what| doubt("adapter", what)));
        lines.extend(self.ended_early.map(|early| doubt("ended", &format!("before its time: {early}"))));
        let shown = self.missed.len().min(MISSED_SHOWN_MAX);
        let too_little = |what: &str| Line { tone: Tone::Doubt, text: format!("too little run: {what}") };
        lines.extend(self.missed[..shown].iter().map(|missed| too_little(missed)));
        let others = self.missed.len() - shown;
        if others > 0 {
            lines.push(too_little(&format!("{}; run.json names all", counted(others, "other floor"))));
        }
        lines
    }

    fn counts(&self) -> Vec<Line> {
        let plain = |label: &str, text: String| Line::new(Tone::Plain, label, text);
        let refused = total(self.refused.values());
        let malformed = total(self.malformed.values());
        let mut lines = vec![plain(
            "cases",
            format!(
                "{} · held {} · refused {refused} · malformed {malformed} · failed {} · internal {}",
                self.cases,
                self.held,
                self.failed_count(),
                self.infrastructure_count
            ),
        )];
        if self.without_envelope > 0 {
            let what =
                "of those held are too large for the oracle: the envelope judged a sample of their rows";
            lines.push(plain("", format!("{} {what}", self.without_envelope)));
        }
        lines.extend(by_name("refused", &self.refused));
        lines.extend(by_name("malformed", &self.malformed));
        lines.extend(prose::not_asked(&self.not_asked).map(|what| plain("identity", what)));
        let ways = self.ways.to_string();
        lines.extend(ways.lines().map(|line| Line { tone: Tone::Plain, text: line.to_owned() }));
        lines.extend(self.groups.to_string().lines().map(|what| plain("parallel", what.to_owned())));
        for DeviceRuns { device, name, runs, versions } in &self.devices {
            let mut told = vec![format!("{device}: {runs} runs")];
            told.extend((!name.is_empty()).then(|| name.clone()));
            told.extend(versions.iter().map(|(what, version)| format!("{what} {version}")));
            lines.push(plain("device", told.join(" · ")));
        }
        lines
    }

    fn margins(&self) -> Vec<Line> {
        let plain = |label: &str, text: String| Line::new(Tone::Plain, label, text);
        let mut rows = Vec::new();
        for (tier, histograms) in &self.margins {
            for (tensor, histogram) in histograms {
                if let Some(quantiles) = histogram.quantiles() {
                    let told = |share, value| match quantiles.tells(share) {
                        true => two_digits(value),
                        false => "-".to_owned(),
                    };
                    let (p50, p99) = (told(0.5, quantiles.p50), told(0.99, quantiles.p99));
                    let max = two_digits(quantiles.max);
                    let (name, count) = (tensor.name(), quantiles.count);
                    rows.push(plain("", format!("{name:<10}{tier:>4}{count:>9}{p50:>10}{p99:>10}{max:>10}")));
                }
            }
        }
        if rows.is_empty() {
            return rows;
        }
        let columns =
            format!("{:<10}{:>4}{:>9}{:>10}{:>10}{:>10}", "tensor", "tier", "cases", "p50", "p99", "max");
        let heads = [
            plain("margin", "error ÷ bound of the cases that held, where the error is not 0".to_owned()),
            plain("", columns),
        ];
        heads.into_iter().chain(rows).collect()
    }

    fn rates(&self) -> [Line; 2] {
        let Cost { inputs, subject, oracle, judge } = self.cost;
        let [inputs, subject, oracle, judge] =
            [inputs, subject, oracle, judge].map(|part| self.case_microseconds(part));
        let rate = format!(
            "{:.0} cases/s · {:.0} tokens/s · {:.3e} pair·head·dim products/s",
            self.per_second(self.cases),
            self.per_second(self.token_count),
            self.per_second(self.product_count),
        );
        let cost = format!(
            "a case: inputs {inputs:.0} µs · subject {subject:.0} µs · oracle {oracle:.0} µs · judge {judge:.0} µs ({:.1} ns/element)",
            self.judge_nanoseconds()
        );
        [Line::new(Tone::Plain, "rate", rate), Line::new(Tone::Plain, "cost", cost)]
    }

    /// Returns the census in one line.
    fn census_line(&self) -> Line {
        let met = CLASSES.iter().filter(|class| self.census.count(class.name) > 0).count();
        let text = format!(
            "{met} of {} classes of problems met · tokens p50 {}, p95 {} · --census lists the classes",
            CLASSES.len(),
            self.census.tokens(0.5),
            self.census.tokens(0.95)
        );
        Line::new(Tone::Plain, "census", text)
    }
}

/// Returns a line of counts, the largest first; those past [`NAMED_MAX`] are summed.
fn by_name(title: &str, counts: &BTreeMap<String, u64>) -> Option<Line> {
    let mut all: Vec<(&String, u64)> = counts.iter().map(|(name, &count)| (name, count)).collect();
    all.sort_by_key(|&(_, count)| std::cmp::Reverse(count));
    let others = total(all.iter().skip(NAMED_MAX).map(|(_, count)| count));
    let mut parts: Vec<String> =
        all.iter().take(NAMED_MAX).map(|(name, count)| format!("{name} {count}")).collect();
    if others > 0 {
        parts.push(format!("others {others}"));
    }
    (!parts.is_empty()).then(|| Line::new(Tone::Plain, title, parts.join(" · ")))
}

/// Margins agree to two digits between machines, so no more are shown.
fn two_digits(value: f64) -> String {
    if value < 0.001 { format!("{value:.1e}") } else { format!("{value:.2}") }
}

#[cfg(test)]
mod tests {
    use seamproof_judge::case::Found;
    use seamproof_judge::failure::FailureKey;
    use seamproof_judge::finding::{Check, Finding};
    use seamproof_oracle::TensorName;

    use super::{Distinct, met};

    /// A finding in a tensor, first met in a case, that needs some features.
    fn distinct(tensor: TensorName, first_case: u64, features: &[&'static str]) -> Distinct {
        let finding = Finding::new(Check::Envelope, Some(tensor), String::new());
        let key = FailureKey::without_problem(&finding, "subject");
        Distinct {
            key: FailureKey { features: features.iter().copied().collect(), ..key },
            seen: 1,
            counted: 0,
            first_case,
            found: Found::drawn(finding),
            worst: 1.0,
            smallest: None,
            problem: String::new(),
            size: None,
            name: None,
            replay: String::new(),
            try_command: None,
            script: None,
        }
    }

    #[test]
    fn a_finding_is_held_against_the_one_that_needs_the_most_of_what_it_needs() {
        let all = [
            distinct(TensorName::Out, 0, &[]),
            distinct(TensorName::Out, 1, &["causal"]),
            distinct(TensorName::Out, 2, &["causal", "not bf16", "sink"]),
            distinct(TensorName::Out, 3, &["padding"]),
            distinct(TensorName::Dq, 4, &["causal", "sink"]),
        ];
        let perhaps = |index: usize| all[index].perhaps(&all);
        let besides =
            "perhaps the fault of the finding first met in case 1, seen with not bf16, sink besides";
        assert_eq!(perhaps(2).as_deref(), Some(besides));
        let besides = "perhaps the fault of the finding first met in case 0, seen with padding besides";
        assert_eq!(perhaps(3).as_deref(), Some(besides));
        assert_eq!(perhaps(0), None, "it needs nothing");
        assert_eq!(perhaps(4), None, "no other one is in dq");
    }

    #[test]
    fn how_often_a_failure_was_met_is_said_in_plain_words() {
        assert_eq!(met(1, 1), "1 failing case");
        assert_eq!(met(1, 0), "1 failing case, not shrunk");
        assert_eq!(met(3, 0), "3 failing cases, none of them shrunk");
        assert_eq!(met(3, 1), "3 failing cases, 1 of them shrunk, the others like them");
    }
}
