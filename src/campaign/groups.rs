//! Judged cases of several ranks, by algorithm and by the number of ranks: of which programs a campaign says how much.

use std::collections::BTreeMap;
use std::fmt;

use seamproof_oracle::Problem;
use serde::{Deserialize, Serialize};

/// Judged cases, and those of them that failed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct Judgements {
    pub judged: u64,
    pub failed: u64,
}

/// Judged cases by the name of the algorithm and by the ranks of the group. Cases of one rank are left out.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Groups(BTreeMap<String, BTreeMap<usize, Judgements>>);

impl Groups {
    /// Counts a judged case.
    pub(super) fn add(&mut self, problem: &Problem, failed: bool) {
        let ranks = problem.parallel.size();
        if ranks > 1 {
            self.count(
                problem.parallel.algorithm.name(),
                ranks,
                Judgements { judged: 1, failed: failed.into() },
            );
        }
    }

    /// Adds a part's.
    pub(super) fn merge(&mut self, other: &Groups) {
        for (algorithm, ranks) in &other.0 {
            ranks.iter().for_each(|(&ranks, &here)| self.count(algorithm, ranks, here));
        }
    }

    fn count(&mut self, algorithm: &str, ranks: usize, here: Judgements) {
        let sum = self.0.entry(algorithm.to_owned()).or_default().entry(ranks).or_default();
        sum.judged += here.judged;
        sum.failed += here.failed;
    }

    /// Whether no case of several ranks was judged.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl fmt::Display for Groups {
    /// A line for each algorithm.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let part = |(ranks, Judgements { judged, failed }): (&usize, &Judgements)| match failed {
            0 => format!("{ranks} ranks {judged}"),
            _ => format!("{ranks} ranks {judged}, {failed} failed"),
        };
        for (algorithm, ranks) in &self.0 {
            let parts: Vec<String> = ranks.iter().map(part).collect();
            writeln!(f, "{algorithm}: {}", parts.join(" · "))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use seamproof_oracle::{Algorithm, Balance, ContextParallel, Problem, ProblemFields};

    use super::*;

    fn problem(algorithm: Algorithm, ranks: usize) -> Problem {
        let parallel = ContextParallel::over(ranks, algorithm, Balance::Contiguous);
        Problem::new(ProblemFields { parallel, ..ProblemFields::padded(&[(8, 8)], 1) }).unwrap()
    }

    #[test]
    fn cases_are_counted_by_algorithm_and_ranks_and_those_of_one_rank_are_not() {
        let mut groups = Groups::default();
        assert!(groups.is_empty());
        groups.add(&problem(Algorithm::Single, 1), true);
        assert!(groups.is_empty());
        groups.add(&problem(Algorithm::Ring, 2), false);
        groups.add(&problem(Algorithm::Ring, 2), true);
        groups.add(&problem(Algorithm::Ring, 4), false);
        let mut all = Groups::default();
        all.add(&problem(Algorithm::AllGather, 4), false);
        all.merge(&groups);
        assert_eq!(all.to_string(), "all-gather: 4 ranks 1\nring: 2 ranks 2, 1 failed · 4 ranks 1\n");
        let text = serde_json::to_string(&all).unwrap();
        assert!(text.contains(r#""ring":{"2":{"judged":2,"failed":1},"#), "{text}");
        assert_eq!(serde_json::from_str::<Groups>(&text).unwrap(), all);
    }
}
