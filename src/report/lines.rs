//! A report as text: what came of it, then each failure with its file and its commands, then what makes it doubtful.

use super::{Entry, Kind, Pasted, Report, State};
use crate::campaign::{FailureLines, Line, Tone, common_lines, met};
use crate::script::Script;
use seamproof_judge::prose::counted;

/// Largest number of failures that are told in full.
const FULL_MAX: usize = 16;
/// Largest number of failures that are told.
const TOLD_MAX: usize = 64;
/// Largest number of doubts, and of failures that are gone, that are told.
const LISTED_MAX: usize = 8;

impl Report {
    /// Returns the report in lines.
    pub(crate) fn lines(&self) -> Vec<Line> {
        let of = plain("of", format!("{} · {}", self.title, self.folder));
        let mut lines = vec![Line::new(self.tone, "verdict", &self.sentence), of];
        lines.extend(self.common());
        for (at, entry) in self.findings.iter().enumerate().take(TOLD_MAX) {
            lines.extend(if at < FULL_MAX { entry.lines(self.kind) } else { entry.in_short(self.kind) });
        }
        let left = self.findings_left + self.findings.len().saturating_sub(TOLD_MAX);
        lines.extend(
            (left > 0).then(|| plain("", format!("… and {} in the folder", counted(left, "more failure")))),
        );
        lines.extend(listed(Tone::Doubt, "doubt", &self.doubts));
        lines.extend(listed(Tone::Plain, "gone", &self.gone));
        lines
    }

    /// Returns what several findings look like, a line each.
    pub(crate) fn common(&self) -> Vec<Line> {
        common_lines(self.findings.iter().map(|entry| entry.words.as_str()))
    }

    /// Returns what came of it and what is wrong, a line each: what stands beside a page.
    pub(crate) fn heads(&self) -> Vec<Line> {
        let verdict = Line::new(self.tone, "verdict", &self.sentence);
        let heads = self.findings.iter().take(TOLD_MAX).map(|entry| entry.head(self.kind));
        std::iter::once(verdict).chain(heads).collect()
    }
}

impl Entry {
    /// Returns the failure in lines, its commands last.
    fn lines(&self, kind: Kind) -> Vec<Line> {
        let met = self.met.map(|(cases, shrunk)| format!(" ({})", met(cases, shrunk))).unwrap_or_default();
        let below = FailureLines {
            problem: &self.problem,
            // A failure of which nothing is known but words has them as its sentence.
            words: self.finding.as_ref().map(|_| self.words.as_str()),
            shrunk: (self.minimal, self.evaluations),
            known: self.known.as_ref().map(|(why, source)| format!("known: {why} ({source})")),
            commands: (&self.replay, self.try_command.as_ref()),
            script: self.script.as_ref().map(Pasted::told),
        };
        [self.head(kind), plain("", format!("{}{met}", self.key))].into_iter().chain(below.lines()).collect()
    }

    /// Returns what is wrong, and the command that judges it again.
    fn in_short(&self, kind: Kind) -> Vec<Line> {
        vec![self.head(kind), command("replay", &self.replay)]
    }

    /// Returns what is wrong, in one line, with the state where the report tells several apart.
    fn head(&self, kind: Kind) -> Line {
        let tone = if self.state < State::Flaky { Tone::Bad } else { Tone::Doubt };
        let marks: Vec<&str> = self.state.mark(kind).into_iter().chain(self.campaign.as_deref()).collect();
        let marks = if marks.is_empty() { String::new() } else { format!(" [{}]", marks.join(", ")) };
        Line::new(tone, "FAIL", format!("{}{marks}", self.sentence))
    }
}

impl Pasted {
    /// Returns the script as a campaign tells it.
    fn told(&self) -> Script {
        Script { path: Some(self.path.clone()), shows: self.doubt.is_none(), doubt: self.doubt.clone() }
    }
}

fn plain(label: &str, text: String) -> Line {
    Line::new(Tone::Plain, label, text)
}

/// Returns a command, or the words that stand in its place.
fn command(label: &str, text: &str) -> Line {
    Line::new(Tone::Command, "", format!("{label}: {text}"))
}

/// Returns the first of some texts, a line each, and the number of the others.
fn listed(tone: Tone, label: &str, texts: &[String]) -> Vec<Line> {
    let mut lines: Vec<Line> =
        texts.iter().take(LISTED_MAX).map(|text| Line::new(tone, label, text)).collect();
    let left = texts.len().saturating_sub(LISTED_MAX);
    lines.extend((left > 0).then(|| Line::new(tone, label, format!("… and {left} more"))));
    lines
}
