//! Draw: the rows of a case that are examined where the oracle is too expensive for all of them ([`super::sample`]).
//!
//! On each side, [`ROWS_MAX`] rows are drawn, or fewer where [`PRODUCTS_MAX`] pays for fewer. Half of them are the
//! first or the last row of their sequence that sees something or is seen, since that is where kernels go wrong. As
//! many rows again are drawn that see nothing, or that nobody sees; these cost nothing. Of a recorded run so many are
//! drawn as are asked for, and all borders besides ([`Sampled`]).

use std::collections::BTreeSet;
use std::ops::Range;

use seamproof_oracle::sharding::{self as layout, PlacedRun, RankLayout};
use seamproof_oracle::{Balance, Intervals, Problem, Sequence, Side};

use crate::hash::mix;

/// Largest number of visible pairs × query heads × head dimension for the drawn rows of a side. It takes some seconds
/// on two cores.
const PRODUCTS_MAX: u64 = 1 << 29;
/// Largest number of rows drawn on a side.
const ROWS_MAX: u64 = 32;
/// Constant that sets this draw of rows apart from other uses of the data seed.
const DRAW: u64 = 0x5a3b_1e5e;

fn ends(first: Option<usize>, last: Option<usize>) -> Range<usize> {
    first.zip(last).map_or(0..0, |(first, last)| first..last + 1)
}

/// Returns the drawn rows of a side, by sequence and position.
pub(super) fn drawn(problem: &Problem, side: Side) -> Vec<[usize; 2]> {
    let longest = problem.sequences.iter().map(|both| both.q.len.max(both.kv.len)).max().unwrap_or(0);
    let row = (longest * problem.heads.q * problem.dims.qk.max(problem.dims.v)).max(1) as u64;
    let count = (PRODUCTS_MAX / row).clamp(1, ROWS_MAX);
    let seed = mix(mix(problem.data_seed ^ DRAW) + side as u64);
    let (mut seams, mut connected, mut others) = (Vec::new(), Vec::new(), Vec::new());
    for (index, sequence) in problem.sequences.iter().enumerate() {
        let within = connected_rows(problem, sequence, side);
        seams.extend(
            within.clone().next().into_iter().chain(within.clone().skip(1).last()).map(|row| [index, row]),
        );
        for position in 0..layout::run_of(sequence, side).len {
            let rows = if within.contains(&position) { &mut connected } else { &mut others };
            rows.push([index, position]);
        }
    }
    let half = count.div_ceil(2);
    let rows = [(seams, half), (connected, half), (others, count)];
    let drawn: BTreeSet<_> = rows.iter().flat_map(|(rows, count)| draw(rows, *count, seed)).collect();
    drawn.into_iter().collect()
}

/// A sample that is asked for: so many rows of each side, and those at the borders.
#[derive(Clone, Copy, Debug)]
pub struct Sampled {
    /// Number of rows to draw on each side.
    pub rows: u64,
    /// Seed of the draw.
    pub seed: u64,
}

impl Sampled {
    /// Returns the borders of chunks inside of a piece, as rows of it: the middle chunks of a sequence follow each
    /// other on the last rank.
    fn chunk_borders(
        &self,
        problem: &Problem,
        placed: &PlacedRun,
        side: Side,
    ) -> impl Iterator<Item = usize> + use<> {
        let span = layout::run_of(&problem.sequences[placed.sequence], side).span;
        let chunk = match problem.parallel.balance {
            Balance::DualChunk => span / (2 * problem.parallel.size()),
            Balance::Contiguous | Balance::Striped { .. } => 0,
        };
        let (start, len) = (placed.piece.start, placed.local.len);
        (1..len).filter(move |row| chunk > 0 && (start + row).is_multiple_of(chunk))
    }

    /// Returns the drawn rows of a side by sequence and position, and with them the first and the last row of each
    /// sequence, of what it is connected to, of each piece of it that a rank holds, and of each chunk.
    pub(super) fn rows(&self, problem: &Problem, side: Side, layouts: &[RankLayout]) -> Vec<[usize; 2]> {
        let lengths = problem.sequences.iter().map(|both| layout::run_of(both, side).len).enumerate();
        let all: Vec<_> = lengths.flat_map(|(index, len)| (0..len).map(move |row| [index, row])).collect();
        let mut rows = draw(&all, self.rows, mix(mix(self.seed ^ DRAW) + side as u64));
        for (index, both) in problem.sequences.iter().enumerate() {
            let within = connected_rows(problem, both, side);
            let all = std::iter::once(0..layout::run_of(both, side).len);
            for Range { start, end } in all.chain(within.parts()) {
                rows.extend((start < end).then(|| [[index, start], [index, end - 1]]).into_iter().flatten());
            }
        }
        for placed in layouts.iter().flat_map(|layout| &layout.side(side).runs) {
            let position = |i: usize| [placed.sequence, placed.piece.start + i * placed.piece.step];
            if let Some(last) = placed.local.len.checked_sub(1) {
                rows.extend([position(0), position(last)]);
            }
            let inner = self.chunk_borders(problem, placed, side);
            rows.extend(inner.flat_map(|border| [position(border - 1), position(border)]));
        }
        rows.into_iter().collect()
    }
}

/// Draws `count` of these rows, or all where there are no more.
fn draw(rows: &[[usize; 2]], count: u64, seed: u64) -> BTreeSet<[usize; 2]> {
    let all = rows.len() as u64;
    let index = |n: u64| if all <= count { n } else { mix(seed.wrapping_add(n)) % all };
    (0..count.min(all)).map(|n| rows[index(n) as usize]).collect()
}

/// Returns the queries of a sequence that see a key, or the keys that a query sees. By the definition of the mask, the
/// queries are neighbours, and so are the keys after the first query's sink tokens.
fn connected_rows(problem: &Problem, sequence: &Sequence, side: Side) -> Intervals {
    let (lq, lk) = (sequence.q.len, sequence.kv.len);
    let seen = |i: usize| problem.mask.visible(i, lq, lk);
    let sees = |i: &usize| !seen(*i).is_empty();
    let queries = ends((0..lq).find(sees), (0..lq).rfind(sees));
    match side {
        Side::Q => queries.into(),
        Side::Kv if queries.is_empty() => Intervals::default(),
        Side::Kv => {
            let (first, last) = (seen(queries.start), seen(queries.end - 1).hull().end);
            first.moved(|end| if end == first.hull().end { last } else { end })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generate::{self, Draw, Profile};
    use seamproof_oracle::{Algorithm, ContextParallel, Mask, ProblemFields};

    fn problems() -> impl Iterator<Item = Problem> {
        let limits = Profile::Quick.limits();
        (0..300).filter_map(move |case| match generate::draw(11, case, &limits) {
            Draw::Problem(problem) => Some(problem),
            Draw::Malformed(_) => None,
        })
    }

    #[test]
    fn a_sample_that_is_asked_for_has_the_borders_of_every_rank() {
        let fields = ProblemFields {
            mask: Mask::CAUSAL,
            parallel: ContextParallel::over(2, Algorithm::Ring, Balance::DualChunk),
            ..ProblemFields::padded(&[(50, 64), (3, 4)], 8)
        };
        let problem = Problem::new(fields).expect("a problem");
        let layouts = layout::layouts(&problem).expect("it can be cut");
        let of = |rows, seed| Sampled { rows, seed }.rows(&problem, Side::Q, &layouts);
        // The middle chunks follow each other on their rank, in one piece with a border inside.
        let borders = [0, 15, 16, 31, 32, 47, 48, 49].map(|row| [0, row]);
        let all = [&borders[..], &[[1, 0], [1, 1], [1, 2]]].concat();
        assert_eq!(of(0, 1), all);
        let more = of(20, 1);
        assert!(all.iter().all(|row| more.contains(row)) && more.len() > all.len() + 5, "{more:?}");
        assert_ne!(more, of(20, 2), "the seed draws the rows");
        assert_eq!(of(60, 1).len(), 53, "all rows");
    }

    #[test]
    fn rows_are_drawn_that_are_connected_and_that_are_not() {
        let (mut connected, mut others, mut most) = (0, 0, 0);
        for problem in problems() {
            for side in [Side::Q, Side::Kv] {
                let rows = drawn(&problem, side);
                most = most.max(rows.len());
                for [index, position] in rows {
                    let both = problem.sequences[index];
                    let sees = |i: usize| problem.mask.visible(i, both.q.len, both.kv.len);
                    let is_connected = match side {
                        Side::Q => !sees(position).is_empty(),
                        Side::Kv => (0..both.q.len).any(|i| sees(i).contains(&position)),
                    };
                    assert_eq!(is_connected, connected_rows(&problem, &both, side).contains(&position));
                    *(if is_connected { &mut connected } else { &mut others }) += 1;
                }
            }
        }
        assert!(connected > 1_000 && others > 300, "{connected} {others}");
        assert!(most > ROWS_MAX as usize && most <= 2 * ROWS_MAX as usize, "{most}");
    }
}
