//! The rungs: every one that sees a fault, and the worth of each.
//!
//! A rung *sees* a fault when it condemns one of the cases that the score examines, whatever the rungs before it
//! said. It sees the fault *first* when it was the first to catch it on the first seed. On one case the proof comes
//! before the judge's ladder. A rung sees a fault *alone* when no other rung sees it on any examined case.

use seamproof_simulator::faults::Catcher;

use super::score::Score;

/// Worth of one rung.
#[derive(Clone, Debug)]
pub struct RungScore {
    /// Rung that is scored.
    pub rung: Catcher,
    /// Number of faults that it saw.
    pub saw: usize,
    /// Number of faults that it saw first.
    pub first: usize,
    /// Ids of the faults that it alone saw.
    pub alone: Vec<&'static str>,
}

impl RungScore {
    /// Returns the worth of each rung from the scores of the faults.
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

/// Returns why a rung is kept, whatever it sees alone.
pub fn reason(rung: Catcher) -> &'static str {
    match rung {
        Catcher::Checker => {
            "proves a schedule for every input, races and deadlocks included, and runs nothing"
        }
        Catcher::Resources => "counts what a right schedule takes, and runs nothing",
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
