//! The rungs: every one that sees a fault, and what each is worth.
//!
//! A rung *sees* a fault when it condemns one of the cases that the score examines, whatever the rungs before it said. It
//! sees it *first* when nothing met the fault sooner on the first seed; of one case the proof comes first, then the
//! judge's ladder. It sees it *alone* when no other rung sees it on any examined case.

use std::collections::BTreeSet;

use seamproof_oracle::Problem;
use seamproof_simulator::faults::Catcher;

use super::score::Score;
use seamproof_judge::evaluate::findings;
use seamproof_judge::ladder::Judge;
use seamproof_judge::subject::Backend;

/// Every rung of the judge that condemns a subject on a case. What is structurally wrong is looked at no further by the
/// judge; a judge that is blind for it says which other rungs would have seen it.
pub(super) fn seen_by(subject: &dyn Backend, problem: &Problem) -> BTreeSet<Catcher> {
    let seen =
        |judge: &Judge| findings(judge, subject, problem).into_iter().map(|found| found.check.catcher());
    let mut rungs: BTreeSet<Catcher> = seen(&Judge::default()).collect();
    if rungs.contains(&Catcher::Structure) {
        rungs.extend(seen(&Judge { structure: |_, _, _, _| None, ..Judge::default() }));
    }
    rungs
}

/// What one rung is worth.
#[derive(Clone, Debug)]
pub struct RungScore {
    /// The rung.
    pub rung: Catcher,
    /// Faults that it saw.
    pub saw: usize,
    /// Faults that it saw first.
    pub first: usize,
    /// Faults that it alone saw.
    pub alone: Vec<&'static str>,
}

impl RungScore {
    /// The worth of each rung by what came of the faults.
    pub fn table(scores: &[Score]) -> Vec<RungScore> {
        let of = |rung: Catcher| RungScore {
            rung,
            saw: scores.iter().filter(|score| score.rungs.contains(&rung)).count(),
            first: scores.iter().filter(|score| score.first() == Some(rung)).count(),
            alone: scores
                .iter()
                .filter(|score| score.only() == Some(rung))
                .map(|score| score.suspect.id())
                .collect(),
        };
        Catcher::ALL.into_iter().map(of).collect()
    }
}

/// Why a rung is kept, whatever it sees alone.
pub fn reason(rung: Catcher) -> &'static str {
    match rung {
        Catcher::Checker => {
            "proves a schedule for every input, races and deadlocks included, and runs nothing"
        }
        Catcher::Capability => "compares two refusals: it costs nothing",
        Catcher::Crash => "is the run itself: it costs nothing",
        Catcher::Structure => "costs one pass over the results and asks no oracle",
        Catcher::Poison => "says that padding is the cause; costs one more run and asks no oracle",
        Catcher::Exact => "has no tolerance, names the keys that a query saw and asks no oracle in f64",
        Catcher::Envelope => {
            "bounds every element of every case that the oracle can afford, and of a sample of rows of others"
        }
        Catcher::Identity => {
            "asks no oracle: at sizes where the oracle is too dear it alone judges every row"
        }
    }
}
