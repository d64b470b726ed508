//! Who saw whom: the keys of every row of a run, decoded, for whoever wants to see them. Nothing is decided here.

use std::ops::Range;

use seamproof_oracle::{Dims, InputMode, Problem, ProblemFields, Softmax};

use super::row::KeySet;
use super::{Forward, Wrong, decode};
use crate::exact::{ExactPlan, Why, eligible};
use crate::ladder::evidence::{Depth, Judge, Meter};
use crate::subject::Backend;
use crate::verdict::Verdict;

/// Modes in which each key counts alike, so that a row shows its keys whatever they hold. That of both ends of an
/// interval comes first.
const MODES: [InputMode; 2] = [InputMode::Endpoints, InputMode::UniformCount];

/// Largest work of searches for the keys of wrong rows of a run: sets of keys times lanes. Rows that are left then are
/// told as ones that no set gives.
const SEARCH_MAX: usize = 1 << 26;

/// Head dimensions that have room for the numbers of many keys.
const ROUTED_DIM: usize = 64;

/// Least number of lanes by which values of keys are told apart.
const ROUTED_LANES_MIN: usize = 16;

/// The keys that a query of a head saw.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SeenRow {
    /// Index of the sequence.
    pub sequence: usize,
    /// Index of the query head.
    pub head: usize,
    /// Position of the query.
    pub query: usize,
    /// Positions of the keys, in order; `None` where no set of keys gives the row.
    pub keys: Option<Vec<Range<usize>>>,
}

/// The value that a query of a head read in the place of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReadRow {
    /// Index of the sequence.
    pub sequence: usize,
    /// Index of the query head.
    pub head: usize,
    /// Position of the query.
    pub query: usize,
    /// Position of the key whose value it should read.
    pub key: usize,
    /// Sequence, KV head and position of the key whose value it read.
    pub read: (usize, usize, usize),
}

impl Judge {
    /// Runs the forward of a subject on a problem in which each query puts its whole weight on one key, and returns the
    /// rows that hold another key's value. Head dimensions are enlarged where the problem's have no room for the
    /// numbers of its keys, and a soft cap is left out. There are none where no such problem is taken. `Err` is a
    /// verdict that leaves nothing to decode.
    pub fn read(&self, backend: &dyn Backend, problem: &Problem) -> Result<Vec<ReadRow>, Verdict> {
        self.decoded(backend, routed(problem), read_rows)
    }

    /// Runs the forward of a subject on a problem with inputs of an exact mode in the place of its own, and returns the
    /// keys that each row saw: of several sets that give the same row, the one nearest to the mask's. There are none
    /// where no such mode takes the problem. `Err` is a verdict that leaves nothing to decode.
    pub fn seen(&self, backend: &dyn Backend, problem: &Problem) -> Result<Vec<SeenRow>, Verdict> {
        self.decoded(backend, decodable(problem), seen_rows)
    }

    /// Runs the forward on a problem of an exact mode, and returns what `decode` makes of it; nothing of no problem.
    fn decoded<T>(
        &self,
        backend: &dyn Backend,
        problem: Option<Problem>,
        decode: impl FnOnce(&Forward<'_>, &[ExactPlan<'_>]) -> Vec<T>,
    ) -> Result<Vec<T>, Verdict> {
        let Some(problem) = problem else { return Ok(Vec::new()) };
        self.with_evidence(backend, &problem, Depth::First, &Meter::default(), |evidence| {
            let plans: Vec<ExactPlan<'_>> =
                (0..problem.sequences.len()).map(|index| ExactPlan::new(&problem, index)).collect();
            decode(&Forward::new(evidence), &plans)
        })
    }
}

/// Returns why [`Judge::seen`] has no inputs for a problem from which keys can be decoded; `None` where it has some.
pub fn undecodable(problem: &Problem) -> Option<Why> {
    let [_, last] = MODES;
    if decodable(problem).is_some() { None } else { eligible(last, problem).err() }
}

/// Returns a problem with inputs from which keys can be decoded.
fn decodable(problem: &Problem) -> Option<Problem> {
    let in_mode = |mode| Problem::new(ProblemFields { mode, ..problem.clone().into() }).ok();
    MODES.into_iter().filter_map(in_mode).find(|problem| eligible(problem.mode, problem).is_ok())
}

/// Returns a problem each of whose queries reads one key.
fn routed(problem: &Problem) -> Option<Problem> {
    let of = |dims: Dims| {
        let softmax = Softmax { softcap: None, ..problem.softmax };
        let fields = ProblemFields { mode: InputMode::Routing, dims, softmax, ..problem.clone().into() };
        Problem::new(fields).ok().filter(|problem| eligible(problem.mode, problem).is_ok())
    };
    // A value of few lanes is another key's by chance.
    let own = Some(problem.dims).filter(|dims| dims.v >= ROUTED_LANES_MIN);
    own.and_then(of).or_else(|| of(Dims { qk: ROUTED_DIM, v: ROUTED_DIM }))
}

fn read_rows(forward: &Forward<'_>, plans: &[ExactPlan<'_>]) -> Vec<ReadRow> {
    let mut read = Vec::new();
    forward.each_row(plans, |plan, Wrong { sequence, head, position: query, .. }, row| {
        let other = plan.chosen(query, head).next().and_then(|key| Some((key, row.read(plans)?)));
        read.extend(other.map(|(key, read)| ReadRow { sequence, head, query, key, read }));
    });
    read
}

fn seen_rows(forward: &Forward<'_>, plans: &[ExactPlan<'_>]) -> Vec<SeenRow> {
    let (mut seen, mut left) = (Vec::new(), SEARCH_MAX);
    forward.each_row(plans, |plan, Wrong { sequence, head, position: query, .. }, row| {
        let right = KeySet::all(plan.visible(query));
        let keys = if row.is_of(&right) { Some(right) } else { row.search(&right, &mut left) };
        seen.push(SeenRow { sequence, head, query, keys: keys.map(|keys| keys.ranges()) });
    });
    seen
}

impl Forward<'_> {
    /// Hands every real row of the results over, with its sequence's plan and its place.
    fn each_row(
        &self,
        plans: &[ExactPlan<'_>],
        mut take: impl FnMut(&ExactPlan<'_>, Wrong, decode::Row<'_>),
    ) {
        for (sequence, plan) in plans.iter().enumerate() {
            for head in 0..self.evidence.problem.heads.q {
                let of_head = self.head(plan, head);
                for position in 0..plan.queries() {
                    let place = Wrong { sequence, head, position, lane: None };
                    take(plan, place, self.row(plan, &of_head, place));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::subjects::{Emulated, Planted};
    use seamproof_oracle::{Format, Heads, Mask, Precision};
    use seamproof_simulator::faults::by_id;

    fn problem() -> Problem {
        let fields = ProblemFields {
            heads: Heads { q: 4, kv: 2 },
            mask: Mask { left: Some(3), ..Mask::CAUSAL },
            mode: InputMode::Peaked,
            ..ProblemFields::padded(&[(9, 12), (0, 4), (6, 6)], 8)
        };
        Problem::new(fields).unwrap()
    }

    /// Test that a problem whose keys cannot be told has a reason, and any other has none.
    #[test]
    fn keys_that_are_not_told_have_a_reason() {
        assert_eq!(undecodable(&problem()), None);
        let precision = Precision::uniform(Format::F32);
        let wide = Problem::new(ProblemFields { precision, ..problem().into() }).unwrap();
        assert!(matches!(undecodable(&wide), Some(Why::Format { quantity: "q", .. })));
        assert_eq!(Judge::default().seen(&Emulated::default(), &wide), Ok(Vec::new()));
    }

    /// Test that a right subject is seen to see what the mask shows, whatever the problem's own mode.
    #[test]
    fn a_right_subject_sees_what_the_mask_shows() {
        for sink_tokens in [0, 2] {
            let mut fields = ProblemFields::from(problem());
            fields.mask.sink_tokens = sink_tokens;
            let problem = Problem::new(fields).unwrap();
            let seen = Judge::default().seen(&Emulated::default(), &problem).unwrap();
            assert_eq!(seen.len(), (9 + 6) * 4);
            for row in seen {
                let both = &problem.sequences[row.sequence];
                let visible = problem.mask.visible(row.query, both.q.len, both.kv.len);
                assert_eq!(row.keys, Some(visible.parts().collect()), "{} {}", row.sequence, row.query);
            }
        }
    }

    /// Test that the values of neighbouring rows are told apart, and that a right subject reads its own.
    #[test]
    fn shifted_values_are_told() {
        let problem = problem();
        assert_eq!(Judge::default().read(&Emulated::default(), &problem), Ok(Vec::new()));
        let backend = Planted::new(Emulated::default(), *by_id("value-rows-shifted").unwrap());
        let read = Judge::default().read(&backend, &problem).unwrap();
        // Each key of the last tile has the value of the next one, and the last key that of the tile's first.
        assert!(read.iter().any(|row| row.read.2 == row.key + 1));
        for row in read {
            assert!(
                row.read.0 == row.sequence && (row.read.2 == row.key + 1 || row.read.2 < row.key),
                "{row:?}"
            );
        }
    }

    /// Test that a kernel's own mistakes are decoded pair by pair, which no schedule tells.
    #[test]
    fn a_kernels_mistake_is_decoded() {
        let problem = problem();
        for (id, moved) in [("window-one-key-long", -1), ("window-one-key-short", 1)] {
            let backend = Planted::new(Emulated::default(), *by_id(id).unwrap());
            let seen = Judge::default().seen(&backend, &problem).unwrap();
            for row in seen.iter().filter(|row| row.query > 3) {
                let start = (row.query as i64 - 3 + moved) as usize;
                let keys = row.keys.as_deref().unwrap_or_default();
                assert!(matches!(keys, [keys] if *keys == (start..row.query + 1)), "{id}, {row:?}");
            }
        }
    }
}
