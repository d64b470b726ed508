//! The choice of the rows of a large forward that are judged.

use std::collections::BTreeSet;

use seamproof_oracle::{Band, Problem};

use super::Rows;

/// Returns the real rows of the problem that are judged for a head, by sequence and position.
pub(super) fn rows_of(problem: &Problem, rows: Rows, head: usize) -> Vec<[usize; 2]> {
    let lengths = || problem.sequences.iter().map(|sequence| sequence.q.len).enumerate();
    let all = || lengths().flat_map(|(sequence, len)| (0..len).map(move |i| [sequence, i]));
    let Rows::Sample { count, seed } = rows else { return all().collect() };
    let mut chosen: BTreeSet<[usize; 2]> = lengths()
        .flat_map(|(sequence, _)| boundaries(problem, sequence).into_iter().map(move |i| [sequence, i]))
        .collect();
    let real: Vec<[usize; 2]> = all().collect();
    if real.is_empty() {
        return real;
    }
    let draw = |index: usize| {
        seamproof_judge::hash::mix(
            seamproof_judge::hash::mix(seed ^ seamproof_judge::hash::mix(head as u64)) ^ index as u64,
        )
    };
    chosen.extend((0..count).map(|index| real[(draw(index) % real.len() as u64) as usize]));
    chosen.into_iter().collect()
}

/// Returns the queries at the ends of a sequence, and those on either side of where the mask begins or ceases to cut an
/// end of their keys.
fn boundaries(problem: &Problem, sequence: usize) -> BTreeSet<usize> {
    let (lq, lk) = (problem.sequences[sequence].q.len, problem.sequences[sequence].kv.len);
    let Some(band) = problem.mask.band(lq, lk) else { return changes(problem, lq, lk) };
    let Band { lo, hi } = band.transposed();
    let sides = [lo, hi].into_iter().flatten();
    // The key that a side points at is 0, or the last one.
    let edges = sides.flat_map(|side| [side, side + lk as i64 - 1]);
    let near = edges.chain([0, lq as i64 - 1]).flat_map(|i| [i - 1, i, i + 1]);
    near.filter(|&i| (0..lq as i64).contains(&i)).map(|i| i as usize).collect()
}

/// Returns the boundaries of a mask that is no band, by looking at every query.
fn changes(problem: &Problem, lq: usize, lk: usize) -> BTreeSet<usize> {
    let cut = |i: usize| {
        let keys = problem.mask.visible(i, lq, lk).hull();
        (keys.is_empty(), keys.start == 0, keys.end == lk)
    };
    let near = (1..lq).filter(|&i| cut(i - 1) != cut(i)).flat_map(|i| [i - 1, i]);
    near.chain([0, lq.saturating_sub(1)]).filter(|&i| i < lq).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use seamproof_judge::generate::{self, Draw, Profile};

    /// Whether a query is a boundary by its meaning: the first or the last query, or one of two neighbours of which one
    /// has an end of its keys at an end of the sequence and the other has not.
    fn is_boundary(problem: &Problem, sequence: usize, i: usize) -> bool {
        let (lq, lk) = (problem.sequences[sequence].q.len, problem.sequences[sequence].kv.len);
        let cut = |i: usize| {
            let keys = problem.mask.visible(i, lq, lk).hull();
            (keys.is_empty(), keys.start == 0, keys.end == lk)
        };
        let neighbours = [i.checked_sub(1), (i + 1 < lq).then_some(i + 1)];
        i == 0 || i + 1 == lq || neighbours.into_iter().flatten().any(|other| cut(other) != cut(i))
    }

    #[test]
    fn a_sample_has_every_boundary_and_no_row_twice() {
        let limits = Profile::Quick.limits();
        let mut boundaries_seen = 0;
        for case in 0..300 {
            let Draw::Problem(problem) = generate::draw(5, case, &limits) else { continue };
            let sample = rows_of(&problem, Rows::Sample { count: 3, seed: 9 }, 0);
            assert!(sample.is_sorted_by(|a, b| a < b), "{problem:?}");
            let all = rows_of(&problem, Rows::All, 0);
            for row in all {
                if is_boundary(&problem, row[0], row[1]) {
                    assert!(sample.contains(&row), "{row:?} of {problem:?}");
                    boundaries_seen += 1;
                }
            }
        }
        assert!(boundaries_seen > 1000, "{boundaries_seen}");
    }
}
