//! The choice of the rows that are judged, and the question about them.

use std::collections::BTreeSet;
use std::ops::Range;

use seamproof_oracle::envelope::{Delta, Model};
use seamproof_oracle::{Band, Problem, Sequence, Side};
use serde::Serialize;

use super::known::Known;
use crate::hash::mix;
use seamproof_oracle::sharding::run_of;

/// Rows of the other side that a block has at least, where there are more: fewer blocks are fewer launches.
const BLOCK_ROWS: usize = 8192;
/// Sizes of tiles at whose borders rows are judged.
const TILES: [usize; 3] = [64, 128, 256];
/// Number of sequences in which all borders of tiles and masks are judged; in all others only the first and last rows.
const CLOSE: usize = 6;
/// Number of borders of tiles in the middle of a sequence that are judged.
const MIDDLE: usize = 2;
/// Constant that sets this draw apart from other uses of the data seed.
const DRAW: u64 = 0x1a46_e07a;

/// Number of drawn rows of each side, and what draws them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rows {
    /// Number of drawn rows of each side, besides those at borders.
    pub count: usize,
    /// Seed of the draw.
    pub seed: u64,
}

/// A row, by sequence and position, and the rows of the other side that it is connected to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reach {
    /// Index of the sequence.
    pub sequence: usize,
    /// Position in the sequence.
    pub position: usize,
    /// Positions of the other side, from the first to the last.
    pub others: Range<usize>,
}

/// Rows that are answered together.
#[derive(Clone, Debug, Serialize)]
pub struct Block {
    /// For each row its place in the tensor, and those of the other side's first row and of one past its last.
    rows: Vec<[usize; 3]>,
    /// Rows of the other side.
    other: [usize; 2],
}

/// Rows of a sequence in both tensors: the first, and one past the last.
#[derive(Clone, Copy, Debug, Serialize)]
struct Real {
    q: [usize; 2],
    kv: [usize; 2],
}

/// The question about a run, as the process gets it that has the subject.
#[derive(Clone, Debug, Serialize)]
pub struct Question {
    problem: Problem,
    queries: Vec<Block>,
    keys: Vec<Block>,
    sequences: Vec<Real>,
    /// Magnitude that an input other than 0 counts as at least.
    floor: f64,
    /// Whether D is `Σ P·dP`.
    weighs_dots: bool,
    /// Whether each result is moved by one row before it is judged, so that nearly every row is wrong: a canary.
    moved: bool,
    /// What is known bit for bit of every row.
    exact: Option<Known>,
    /// The rows of the blocks, in their order.
    #[serde(skip)]
    pub(super) reaches: [Vec<Reach>; 2],
}

impl Question {
    /// Returns the question about a problem whose rows follow each other.
    pub fn new(problem: &Problem, model: &Model, rows: Rows, exact: Option<Known>) -> Question {
        let [queries, keys] = [Side::Q, Side::Kv].map(|side| blocks(problem, side, rows));
        let real = |sequence: &Sequence| {
            let [q, kv] = [sequence.q, sequence.kv].map(|run| [run.offset, run.offset + run.len]);
            Real { q, kv }
        };
        Question {
            problem: problem.clone(),
            queries: queries.0,
            keys: keys.0,
            sequences: problem.sequences.iter().map(real).collect(),
            floor: model.magnitude(f64::MIN_POSITIVE),
            weighs_dots: model.delta() == Delta::WeightedDots,
            moved: false,
            exact,
            reaches: [queries.1, keys.1],
        }
    }

    /// Returns the question about the same run with its results moved by one row, which must be a finding.
    pub fn with_moved_results(self) -> Question {
        Question { moved: true, ..self }
    }
}

/// Returns the other side.
fn other(side: Side) -> Side {
    match side {
        Side::Q => Side::Kv,
        Side::Kv => Side::Q,
    }
}

/// Returns the positions of the other side from the first that a position is connected to, to the last.
fn reach(problem: &Problem, sequence: &Sequence, side: Side, position: usize) -> Range<usize> {
    let (lq, lk) = (sequence.q.len, sequence.kv.len);
    let sight = problem.mask.sight(lq, lk);
    match side {
        Side::Q => sight.keys(position).hull(),
        Side::Kv => sight.queries(position),
    }
}

/// Returns the blocks of a side's rows, and the rows themselves.
fn blocks(problem: &Problem, side: Side, rows: Rows) -> (Vec<Block>, Vec<Reach>) {
    let (mut blocks, mut all): (Vec<Block>, Vec<Reach>) = (Vec::new(), Vec::new());
    for [sequence, position] in chosen(problem, side, rows) {
        let both = &problem.sequences[sequence];
        let others = reach(problem, both, side, position);
        let (own, run) = (run_of(both, side), run_of(both, other(side)));
        let ends = match others.is_empty() {
            true => [0, 0],
            false => [others.start, others.end].map(|at| run.offset + at),
        };
        let row = [own.offset + position, ends[0], ends[1]];
        // A block grows over whole sequences until it is large enough.
        let is_new = all.last().is_none_or(|last: &Reach| last.sequence != sequence)
            && blocks.last().is_none_or(|block| block.other[1] - block.other[0] >= BLOCK_ROWS);
        if is_new {
            blocks.push(Block { rows: Vec::new(), other: [usize::MAX, 0] });
        }
        if let Some(block) = blocks.last_mut() {
            block.rows.push(row);
            if !others.is_empty() {
                block.other = [block.other[0].min(ends[0]), block.other[1].max(ends[1])];
            } else if block.other[0] == usize::MAX {
                // Some row has to be there, though nobody is connected to it.
                block.other = [0, 1];
            }
        }
        all.push(Reach { sequence, position, others });
    }
    (blocks, all)
}

/// Returns the rows of a side that are judged, by sequence and position, in the order of the sequences.
fn chosen(problem: &Problem, side: Side, rows: Rows) -> BTreeSet<[usize; 2]> {
    let lengths: Vec<usize> = problem.sequences.iter().map(|both| run_of(both, side).len).collect();
    let seed = mix(mix(rows.seed ^ DRAW).wrapping_add(side as u64));
    let mut draw = (0u64..).map(|n| mix(seed.wrapping_add(n)));
    let mut pick = |below: usize| (draw.next().unwrap_or(0) % below.max(1) as u64) as usize;
    let longest = (0..lengths.len()).max_by_key(|&index| lengths[index]);
    let ends = [0, lengths.len().saturating_sub(1)];
    let mut close: BTreeSet<usize> = longest.into_iter().chain(ends).collect();
    close.extend((0..CLOSE).map(|_| pick(lengths.len())));
    let mut chosen = BTreeSet::new();
    for (index, &len) in lengths.iter().enumerate() {
        let mut at: BTreeSet<i64> = [0, len as i64 - 1].into();
        if close.contains(&index) {
            let borders: Vec<i64> = TILES
                .iter()
                .flat_map(|&tile| {
                    let tiles = len.div_ceil(tile);
                    let drawn = (0..MIDDLE).map(|_| pick(tiles) * tile).collect::<Vec<_>>();
                    [tile, tiles.saturating_sub(1) * tile].into_iter().chain(drawn)
                })
                .map(|border| border as i64)
                .collect();
            let edges = borders.into_iter().chain(edges(problem, index, side)).chain([0, len as i64]);
            at.extend(edges.flat_map(|edge| [edge - 1, edge]));
        }
        let inside = at.into_iter().filter(|at| (0..len as i64).contains(at));
        chosen.extend(inside.map(|at| [index, at as usize]));
    }
    let total: usize = lengths.iter().sum();
    for _ in 0..rows.count.min(total) {
        let mut at = pick(total);
        let index = lengths.iter().position(|&len| {
            let inside = at < len;
            at -= if inside { 0 } else { len };
            inside
        });
        chosen.extend(index.map(|index| [index, at]));
    }
    chosen
}

/// Returns the positions at which the mask begins or ceases to cut an end of the other side; none for a mask that is no
/// band, of which no large run is drawn.
fn edges(problem: &Problem, sequence: usize, side: Side) -> Vec<i64> {
    let (lq, lk) = (problem.sequences[sequence].q.len, problem.sequences[sequence].kv.len);
    let Some(band) = problem.mask.band(lq, lk) else { return Vec::new() };
    let (Band { lo, hi }, others) = match side {
        Side::Q => (band.transposed(), lk),
        Side::Kv => (band, lq),
    };
    let sides = [lo, hi].into_iter().flatten();
    sides.flat_map(|side| [side, side + 1, side + others as i64 - 1, side + others as i64]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generate::{self, Draw, Profile};
    use seamproof_oracle::envelope::{Arithmetic, Partition};

    fn problems() -> impl Iterator<Item = Problem> {
        let limits = Profile::Quick.limits();
        (0..200).filter_map(move |case| match generate::draw(3, case, &limits) {
            Draw::Problem(problem) => Some(problem),
            Draw::Malformed(_) => None,
        })
    }

    #[test]
    fn a_row_is_connected_to_what_the_mask_connects() {
        for problem in problems() {
            let model = Model::new(&problem, Arithmetic::default(), Partition::single(1, 1));
            let question = Question::new(&problem, &model, Rows { count: 5, seed: 1 }, None);
            let [queries, keys] = &question.reaches;
            for Reach { sequence, position, others } in queries {
                let both = problem.sequences[*sequence];
                let seen = problem.mask.visible(*position, both.q.len, both.kv.len);
                assert_eq!(seen.hull(), *others, "{problem:?}");
            }
            for Reach { sequence, position, others } in keys {
                let both = problem.sequences[*sequence];
                let reads = |i: &usize| problem.mask.visible(*i, both.q.len, both.kv.len).contains(position);
                let readers: Vec<usize> = (0..both.q.len).filter(reads).collect();
                assert_eq!(readers, others.clone().collect::<Vec<_>>(), "{problem:?}");
            }
        }
    }

    #[test]
    fn every_end_of_every_sequence_is_judged_and_lies_in_a_block() {
        for problem in problems() {
            let model = Model::new(&problem, Arithmetic::default(), Partition::single(1, 1));
            let question = Question::new(&problem, &model, Rows { count: 0, seed: 1 }, None);
            let [queries, _] = &question.reaches;
            for (index, both) in problem.sequences.iter().enumerate() {
                for end in [0, both.q.len.saturating_sub(1)].into_iter().filter(|end| *end < both.q.len) {
                    let is_end = |reach: &Reach| (reach.sequence, reach.position) == (index, end);
                    assert!(queries.iter().any(is_end), "{problem:?}");
                }
            }
            let rows = question.queries.iter().chain(&question.keys);
            for (block, [_, first, end]) in
                rows.flat_map(|block| block.rows.iter().map(move |row| (block, row)))
            {
                let [start, stop] = block.other;
                assert!(first == end || (start <= *first && *end <= stop), "{block:?}");
            }
        }
    }
}
