//! Scoring faults at the call.

use std::collections::BTreeSet;
use std::time::Instant;

use rayon::prelude::*;
use seamproof_oracle::Problem;
use seamproof_simulator::faults::Catcher;

use super::{CASES_MAX, DRAWN_MAX, First, catcher};
use crate::backend::Backend;
use crate::backends::{Emulated, Miscall, Miscalled};
use crate::generate::{self, Draw, Limits};
use crate::judge::{Depth, Judge};
use crate::values;
use crate::verdict::{Finding, Verdict};

/// What came of one fault at the call.
#[derive(Clone, Debug)]
pub struct CallScore {
    /// The fault.
    pub miscall: &'static Miscall,
    /// The judge's first finding for each seed that had one.
    pub firsts: Vec<First>,
    /// Every rung that condemned one of these first cases.
    pub rungs: BTreeSet<Catcher>,
}

impl CallScore {
    /// Whether something that the fault names caught it.
    pub fn caught(&self) -> bool {
        self.firsts.iter().any(|first| self.miscall.caught_by.contains(&first.by))
    }
}

/// The problems of a seed's stream on which the fault changes a bit: on the others it is equivalent.
pub fn call_stream(subject: &Miscalled<Emulated>, seed: u64) -> impl Iterator<Item = Problem> {
    let limits = Limits::seams();
    let drawn = (0..DRAWN_MAX).filter_map(move |index| match generate::draw(seed, index, &limits) {
        Draw::Problem(problem) if subject.capabilities().refusal(&problem).is_none() => Some(problem),
        _ => None,
    });
    drawn.filter(|problem| subject.shows(problem, &values::inputs(problem))).take(CASES_MAX)
}

/// The emulated kernel, called wrongly.
pub fn miscalled(miscall: &'static Miscall, seed: u64) -> Miscalled<Emulated> {
    Miscalled::new(Emulated { order: seed, ..Emulated::default() }, miscall)
}

/// The first problem of a seed's stream on which the judge finds the subject wrong, and every rung that does.
fn by_judge(miscall: &'static Miscall, seed: u64) -> Option<(First, BTreeSet<Catcher>)> {
    let (start, subject) = (Instant::now(), miscalled(miscall, seed));
    call_stream(&subject, seed).enumerate().find_map(|(index, problem)| {
        let examination = Judge::default().examine(&subject, &problem, Depth::All);
        let Verdict::Finding(finding) = examination.verdict else { return None };
        let all: Vec<&Finding> = std::iter::once(&*finding).chain(&examination.further).collect();
        let rungs = all.iter().map(|finding| catcher(finding.check)).collect();
        let first = First {
            by: catcher(finding.check),
            tensor: finding.tensor,
            what: finding.to_string(),
            cases: index + 1,
            seconds: start.elapsed().as_secs_f64(),
            problem,
        };
        Some((first, rungs))
    })
}

/// Scores faults at the call over `seeds` streams, several at once.
pub fn score_calls(miscalls: &'static [Miscall], seeds: u64) -> Vec<CallScore> {
    let score = |miscall: &'static Miscall| {
        let found: Vec<_> = (0..seeds).filter_map(|seed| by_judge(miscall, seed)).collect();
        let rungs = found.iter().flat_map(|(_, rungs)| rungs).copied().collect();
        CallScore { miscall, firsts: found.into_iter().map(|(first, _)| first).collect(), rungs }
    };
    miscalls.par_iter().map(score).collect()
}
