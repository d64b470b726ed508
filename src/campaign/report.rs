//! A summary as people read it.

use std::collections::BTreeMap;
use std::fmt::{self, Display, Formatter};

use super::summary::{Canary, Distinct, Summary};
use seamproof_judge::prose::counted;
use seamproof_judge::subject::DeviceRuns;
use seamproof_judge::verdict::Cost;

/// What was too little is named up to this many times; the rest is counted.
const MISSED_SHOWN_MAX: usize = 4;

impl Display for Distinct {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        writeln!(f, "FAIL      {} ({}; first in case {})", self.key, self.met(), self.first_case)?;
        writeln!(f, "          {}", self.problem)?;
        writeln!(f, "          {}", self.found)?;
        let state = if self.found.minimal { "minimal" } else { "not minimal" };
        writeln!(f, "          {state} after {}", counted(self.found.evaluations, "evaluation"))?;
        writeln!(f, "          replay: {}", self.replay)
    }
}

impl Distinct {
    /// How often it was met: `1 failing case`, `312 failing cases, 8 of them shrunk`.
    pub fn met(&self) -> String {
        met(self.cases(), self.seen)
    }
}

/// How many cases failed in one way, and of how many of them that is more than a likeness.
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
                )
            }
            None => {
                let cases = counted(self.cases, "case");
                write!(f, "canary    NOT FOUND in {cases}: this campaign proves nothing")
            }
        }
    }
}

impl Display for Summary {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.census)?;
        self.margins(f)?;
        self.counts(f)?;
        self.distinct.iter().try_for_each(|distinct| write!(f, "{distinct}"))?;
        self.missed(f)?;
        self.result(f)
    }
}

impl Summary {
    /// The failing cases that no line above stands for.
    fn not_shrunk(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let lines = [
            (self.not_shrunk, "with check, tensor and all needed features of a failure below: not shrunk"),
            (self.kept, "like no failure below: kept as drawn"),
            (self.dropped, "like no failure below: only counted, as too many are kept already"),
        ];
        let mut told = lines.iter().filter(|(count, _)| *count > 0);
        told.try_for_each(|(count, what)| {
            writeln!(f, "          {} {what}", counted(*count, "more failing case"))
        })
    }

    /// Says so where nothing is wrong; what is wrong has its lines above.
    fn result(&self, f: &mut Formatter<'_>) -> fmt::Result {
        if !self.failed.is_empty() || self.infrastructure_count > 0 || !self.missed.is_empty() {
            return Ok(());
        }
        let refused = self.cases.saturating_sub(self.held);
        let held = counted(self.held, "case");
        write!(f, "result    nothing was found: {held} held, {refused} refused as they must be")
    }

    fn missed(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let shown = self.missed.len().min(MISSED_SHOWN_MAX);
        self.missed[..shown].iter().try_for_each(|missed| writeln!(f, "too little run: {missed}"))?;
        match self.missed.len() - shown {
            0 => Ok(()),
            others => {
                writeln!(f, "too little run: {}; run.json names all", counted(others, "other floor"))
            }
        }
    }

    fn margins(&self, f: &mut Formatter<'_>) -> fmt::Result {
        writeln!(f, "margin    error ÷ bound of the cases that held, where the error is not 0")?;
        writeln!(
            f,
            "          {:<10}{:>4}{:>9}{:>10}{:>10}{:>10}",
            "tensor", "tier", "cases", "p50", "p99", "max"
        )?;
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
                    writeln!(f, "          {name:<10}{tier:>4}{count:>9}{p50:>10}{p99:>10}{max:>10}")?;
                }
            }
        }
        Ok(())
    }

    fn counts(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let refused: u64 = self.refused.values().sum();
        let malformed: u64 = self.malformed.values().sum();
        writeln!(
            f,
            "cases     {} · held {} · refused {refused} · malformed {malformed} · failed {} ({} distinct) · internal {}",
            self.cases,
            self.held,
            self.failed_count(),
            self.distinct.len(),
            self.infrastructure_count
        )?;
        if self.without_envelope > 0 {
            writeln!(
                f,
                "          {} of those held are too large for the oracle: the envelope judged a sample of their rows",
                self.without_envelope
            )?;
        }
        by_name(f, "refused", &self.refused)?;
        by_name(f, "malformed", &self.malformed)?;
        write!(f, "{}", self.ways)?;
        self.not_shrunk(f)?;
        self.infrastructure.iter().try_for_each(|what| writeln!(f, "internal  {what}"))?;
        for DeviceRuns { device, name, runs } in &self.devices {
            writeln!(f, "device    {device}: {runs} runs{}{name}", if name.is_empty() { "" } else { " · " })?;
        }
        writeln!(
            f,
            "rate      {:.0} cases/s · {:.0} tokens/s · {:.3e} pair·head·dim products/s · {:.1} s{}",
            self.per_second(self.cases),
            self.per_second(self.token_count),
            self.per_second(self.product_count),
            self.seconds,
            if self.interrupted { " · interrupted" } else { "" }
        )?;
        let Cost { inputs, subject, oracle, judge } = self.cost;
        let parts = [inputs, subject, oracle, judge];
        let [inputs, subject, oracle, judge] = parts.map(|part| self.case_microseconds(part));
        let element = self.judge_nanoseconds();
        writeln!(
            f,
            "cost      a case: inputs {inputs:.0} µs · subject {subject:.0} µs · oracle {oracle:.0} µs · judge {judge:.0} µs · judge {element:.1} ns/element"
        )
    }
}

fn by_name(f: &mut Formatter<'_>, title: &str, counts: &BTreeMap<String, u64>) -> fmt::Result {
    if counts.is_empty() {
        return Ok(());
    }
    let parts: Vec<String> = counts.iter().map(|(name, count)| format!("{name} {count}")).collect();
    writeln!(f, "{title:<10}{}", parts.join(" · "))
}

/// Margins agree to two digits between machines, so no more are shown.
fn two_digits(value: f64) -> String {
    if value < 0.001 { format!("{value:.1e}") } else { format!("{value:.2}") }
}

#[cfg(test)]
mod tests {
    use super::met;

    #[test]
    fn how_often_a_failure_was_met_is_said_in_plain_words() {
        assert_eq!(met(1, 1), "1 failing case");
        assert_eq!(met(1, 0), "1 failing case, not shrunk");
        assert_eq!(met(3, 0), "3 failing cases, none of them shrunk");
        assert_eq!(met(3, 1), "3 failing cases, 1 of them shrunk, the others like them");
    }
}
