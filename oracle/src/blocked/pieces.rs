//! The cut of a problem into groups, pieces and tiles, and the matrices of each.

use std::ops::Range;

use ndarray::linalg::general_mat_mul;
use ndarray::{Array2, ArrayView2, Axis, s};
use rayon::prelude::*;

use super::{SomeRows, Wanted};
use crate::envelope::Model;
use crate::envelope::dither::{copies_of, row_hash};
use crate::{InputViews, Intervals, Problem, Run, Sequence, Side, TensorName};

/// The most query rows of one matrix product. A larger number wastes work on causal diagonals, and a smaller one
/// gathers the keys too often.
const ROW_TILE: usize = 128;
/// The number of keys of one tile of the backward, and of one product of the forward. Three strips of a tile stay in
/// the second-level cache.
pub(super) const KEY_TILE: usize = 512;
/// The most elements of a strip that has all keys of its rows: 32 MiB. Some six of them are held at once.
pub(super) const STRIP_MAX: usize = 1 << 22;
/// The most keys that a tile of rows may see beyond twice those of one of its rows. Neighbours see no more than
/// [`ROW_TILE`] further keys; picked rows of a window may lie anywhere.
const APART_MAX: usize = 512;
/// The fewest query rows of a piece, those of a piece of picked rows, and the most pieces of one head.
const PIECE_ROWS_MIN: usize = 1024;
const PICKED_ROWS_MIN: usize = 16;
const PIECES_MAX: usize = 8;
/// The fewest visible pairs and rows times heads of a problem that is computed in parallel. Smaller problems run on the
/// caller's thread, because campaigns are parallel across cases.
const PARALLEL_PAIRS_MIN: u64 = 1 << 18;

/// The rows of one side of a sequence that take part: all, or picked ones. They are counted by their index.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rows<'a> {
    run: Run,
    /// The positions of picked rows, in ascending order.
    picked: Option<&'a [usize]>,
}

impl<'a> Rows<'a> {
    /// Returns all rows of a run.
    pub(super) fn all(run: Run) -> Rows<'a> {
        Rows { run, picked: None }
    }

    /// Returns the rows at some positions of a run.
    pub(super) fn picked(run: Run, positions: &'a [usize]) -> Rows<'a> {
        assert!(positions.is_sorted_by(|a, b| a < b), "picked positions ascend");
        assert!(positions.last().is_none_or(|last| *last < run.len), "picked positions are real");
        Rows { run, picked: Some(positions) }
    }

    pub(super) fn len(&self) -> usize {
        self.picked.map_or(self.run.len, <[usize]>::len)
    }

    pub(super) fn is_picked(&self) -> bool {
        self.picked.is_some()
    }

    fn position(&self, index: usize) -> usize {
        self.picked.map_or(index, |picked| picked[index])
    }

    /// Returns the row of the problem's tensors.
    pub(super) fn row(&self, index: usize) -> usize {
        self.run.row(self.position(index))
    }

    /// Returns the row of the results: picked rows have results of their own.
    pub(super) fn place(&self, index: usize) -> usize {
        if self.is_picked() { index } else { self.run.row(index) }
    }

    /// Returns the indices of the rows that have these positions.
    fn at(&self, positions: Intervals) -> Intervals {
        let Some(picked) = self.picked else { return positions };
        positions.moved(|end| picked.partition_point(|position| *position < end))
    }
}

/// The gradients that are wanted.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sides {
    /// dq.
    pub(super) q: bool,
    /// dk and dv.
    pub(super) kv: bool,
    /// dsink.
    pub(super) sink: bool,
}

/// One sequence and one KV head, with that head's query heads.
#[derive(Clone, Copy, Debug)]
pub(super) struct Group<'a> {
    pub(super) problem: &'a Problem,
    pub(super) sequence: usize,
    pub(super) kv_head: usize,
    pub(super) q: Rows<'a>,
    pub(super) kv: Rows<'a>,
}

impl<'a> Group<'a> {
    /// Returns the groups of a sequence, one for each KV head.
    pub(super) fn of(
        problem: &'a Problem,
        sequence: usize,
        [q, kv]: [Rows<'a>; 2],
    ) -> impl Iterator<Item = Group<'a>> {
        (0..problem.heads.kv).map(move |kv_head| Group { problem, sequence, kv_head, q, kv })
    }

    fn both(&self) -> &'a Sequence {
        &self.problem.sequences[self.sequence]
    }

    /// Returns the rows of an input's side.
    pub(super) fn rows(&self, input: TensorName) -> &Rows<'a> {
        if input.side() == Side::Kv { &self.kv } else { &self.q }
    }

    /// Returns the group's query heads.
    pub(super) fn heads(&self) -> Range<usize> {
        let size = self.problem.group();
        self.kv_head * size..(self.kv_head + 1) * size
    }

    fn visible(&self, query: usize) -> Intervals {
        let Sequence { q, kv, .. } = self.both();
        self.problem.mask.visible(self.q.position(query), q.len, kv.len)
    }

    /// Returns the keys that a query sees.
    pub(super) fn seen(&self, query: usize) -> Intervals {
        self.kv.at(self.visible(query))
    }

    /// Returns the range of keys that the queries see, from the first key that any of them sees to the last.
    pub(super) fn seen_by_any(&self, queries: Range<usize>) -> Range<usize> {
        queries.map(|query| self.seen(query).hull()).fold(0..0, join)
    }

    /// Returns the number of keys that a query's sums may go through: of a picked query those up to the last that it
    /// sees.
    pub(super) fn keys_of(&self, query: usize) -> usize {
        if self.q.is_picked() { self.visible(query).hull().end } else { self.kv.run.len }
    }

    /// Returns the number of queries, in all heads, that a key's sums may go through: of a picked key those that see
    /// it.
    pub(super) fn queries_of(&self, key: usize) -> usize {
        let Sequence { q, kv, .. } = self.both();
        let readers = || self.problem.mask.sight(q.len, kv.len).queries(self.kv.position(key)).len();
        let queries = if self.kv.is_picked() { readers() } else { q.len };
        queries * self.problem.group()
    }

    /// Returns the number of visible pairs and of rows, a measure of the work of one head.
    fn work(&self) -> u64 {
        (0..self.q.len()).map(|query| 1 + self.seen(query).len() as u64).sum()
    }

    /// Returns every query head, each cut into pieces by the number of its rows alone.
    pub(super) fn pieces(&self) -> Vec<QueryRange> {
        let rows = self.q.len();
        let least = if self.q.is_picked() { PICKED_ROWS_MIN } else { PIECE_ROWS_MIN };
        let size = rows.div_ceil(PIECES_MAX).max(least);
        let of_head = |head| {
            (0..rows).step_by(size).map(move |start| QueryRange { head, rows: start..rows.min(start + size) })
        };
        self.heads().flat_map(of_head).collect()
    }

    /// Returns tiles of queries. A tile has at most `strip_max` elements if it has more than one row, and few keys that
    /// none of its rows sees.
    pub(super) fn row_tiles(&self, queries: Range<usize>, strip_max: usize) -> Vec<Range<usize>> {
        let mut tiles = Vec::new();
        let (mut start, mut keys, mut longest) = (queries.start, 0..0, 0);
        for query in queries.clone() {
            let seen = self.seen(query).hull();
            let (all, most) = (join(keys, seen.clone()), longest.max(seen.len()));
            let rows = query - start + 1;
            let fits = rows <= ROW_TILE && rows * all.len() <= strip_max && all.len() <= 2 * most + APART_MAX;
            if rows > 1 && !fits {
                tiles.push(start..query);
                (start, longest, keys) = (query, seen.len(), seen);
            } else {
                (longest, keys) = (most, all);
            }
        }
        tiles.extend((start < queries.end).then_some(start..queries.end));
        tiles
    }
}

/// Returns some keys as columns of a tile.
pub(super) fn clip(keys: &Intervals, columns: &Range<usize>) -> Intervals {
    keys.moved(|key| key.clamp(columns.start, columns.end) - columns.start)
}

/// Sets the numbers of a row outside some columns to 0.
pub(super) fn clear_others(row: &mut [f64], columns: &Intervals) {
    let (mut end, len) = (0, row.len());
    for part in columns.parts().chain(std::iter::once(len..len)) {
        row[end..part.start].fill(0.0);
        end = part.end;
    }
}

/// Returns the range from the first value of either range to the last.
fn join(a: Range<usize>, b: Range<usize>) -> Range<usize> {
    match (a.is_empty(), b.is_empty()) {
        (true, _) => b,
        (_, true) => a,
        _ => a.start.min(b.start)..a.end.max(b.end),
    }
}

/// A range of the queries of one head.
#[derive(Clone, Debug)]
pub(super) struct QueryRange {
    pub(super) head: usize,
    pub(super) rows: Range<usize>,
}

/// The keys of one group. Their numbers are widened tile by tile, since those of a long sequence do not fit into
/// memory.
pub(super) struct Keys<'a, 'i> {
    group: Group<'a>,
    inputs: &'a InputViews<'i>,
    /// The number of copies of each key; empty where no envelope is asked for.
    pub(super) copies: Vec<f64>,
}

impl<'a, 'i> Keys<'a, 'i> {
    pub(super) fn new(group: Group<'a>, inputs: &'a InputViews<'i>, model: Option<&Model>) -> Keys<'a, 'i> {
        let hash = |key| lanes_hash(inputs, TensorName::K, &group, key, group.kv_head);
        let keys = if model.is_some() { 0..group.kv.len() } else { 0..0 };
        Keys { group, inputs, copies: copies_of(keys.map(hash)) }
    }

    /// Returns the number of lanes of a value.
    pub(super) fn dim_v(&self) -> usize {
        self.group.problem.dims.v
    }

    /// Returns some keys as a matrix.
    pub(super) fn k(&self, columns: Range<usize>) -> Array2<f64> {
        gather(self.inputs, TensorName::K, &self.group, columns, self.group.kv_head)
    }

    /// Returns some values as a matrix.
    pub(super) fn v(&self, columns: Range<usize>) -> Array2<f64> {
        gather(self.inputs, TensorName::V, &self.group, columns, self.group.kv_head)
    }
}

/// Returns a number that rows with equal values share.
pub(super) fn lanes_hash(
    inputs: &InputViews<'_>,
    tensor: TensorName,
    group: &Group<'_>,
    index: usize,
    head: usize,
) -> u64 {
    row_hash(values(inputs, tensor, group, index, head))
}

/// What of a problem is computed: groups, the rows that their results have, and which gradients are wanted.
pub(super) struct Cut<'a> {
    pub(super) problem: &'a Problem,
    pub(super) groups: Vec<Group<'a>>,
    /// The numbers of rows of the results of q and of kv.
    pub(super) rows: [usize; 2],
    pub(super) sides: Sides,
}

impl<'a> Cut<'a> {
    /// Returns all of a problem.
    pub(super) fn whole(problem: &'a Problem) -> Cut<'a> {
        let of = |index| {
            Group::of(
                problem,
                index,
                [problem.sequences[index].q, problem.sequences[index].kv].map(Rows::all),
            )
        };
        Cut {
            problem,
            groups: (0..problem.sequences.len()).flat_map(of).collect(),
            rows: [problem.rows.q, problem.rows.kv],
            sides: Sides { q: true, kv: true, sink: true },
        }
    }

    /// Returns what some gradients are made of.
    pub(super) fn of(problem: &'a Problem, wanted: Wanted<'a>) -> Cut<'a> {
        let none = Sides { q: false, kv: false, sink: false };
        let of = |sequence: usize, q: Option<&'a [usize]>, kv: Option<&'a [usize]>| {
            let rows =
                |run, picked: Option<_>| picked.map_or(Rows::all(run), |picked| Rows::picked(run, picked));
            let both = &problem.sequences[sequence];
            Group::of(problem, sequence, [rows(both.q, q), rows(both.kv, kv)])
        };
        let (groups, rows, sides) = match wanted {
            Wanted::Queries(SomeRows { sequence, positions }) => {
                let groups = of(sequence, Some(positions), None).collect();
                (groups, [positions.len(), 0], Sides { q: true, ..none })
            }
            Wanted::Keys(SomeRows { sequence, positions }) => {
                let groups = of(sequence, None, Some(positions)).collect();
                (groups, [0, positions.len()], Sides { kv: true, ..none })
            }
            // D and the LSE of a query say how much of the sink it has, without any key.
            Wanted::Sinks => {
                let all = (0..problem.sequences.len()).flat_map(|sequence| of(sequence, None, Some(&[])));
                (all.collect(), [0, 0], Sides { sink: true, ..none })
            }
        };
        Cut { problem, groups, rows, sides }
    }

    /// Whether there is enough work for several threads.
    pub(super) fn is_large(&self) -> bool {
        // All KV heads of a sequence have as much.
        let first = self.groups.iter().filter(|group| group.kv_head == 0);
        first.map(Group::work).sum::<u64>().saturating_mul(self.problem.heads.q as u64) >= PARALLEL_PAIRS_MIN
    }
}

pub(super) fn map<T: Send, R: Send>(
    parallel: bool,
    items: Vec<T>,
    work: impl Fn(T) -> R + Sync + Send,
) -> Vec<R> {
    if parallel { items.into_par_iter().map(work).collect() } else { items.into_iter().map(work).collect() }
}

/// Returns the values of some rows of one head of an input as a matrix `[rows, dim]`.
pub(super) fn gather(
    inputs: &InputViews<'_>,
    tensor: TensorName,
    group: &Group<'_>,
    indices: Range<usize>,
    head: usize,
) -> Array2<f64> {
    let (all, rows, scaled) = (inputs.of(tensor), group.rows(tensor), inputs.scales.of(tensor).is_some());
    let (count, dim) = (indices.len(), all.shape()[2]);
    let mut matrix = Vec::with_capacity(count * dim);
    let of_head = all.index_axis(Axis(1), head);
    for index in indices {
        let row = of_head.row(rows.row(index));
        match row.to_slice() {
            _ if scaled => matrix.extend(values(inputs, tensor, group, index, head)),
            // Lanes that follow each other are widened several at a time.
            Some(lanes) => matrix.extend(lanes.iter().map(|&value| f64::from(value))),
            None => matrix.extend(row.iter().map(|&value| f64::from(value))),
        }
    }
    Array2::from_shape_vec((count, dim), matrix).expect("every row has the tensor's lanes")
}

/// Returns the values of one row and head of an input.
fn values(
    inputs: &InputViews<'_>,
    tensor: TensorName,
    group: &Group<'_>,
    index: usize,
    head: usize,
) -> impl Iterator<Item = f64> {
    let rows = group.rows(tensor);
    inputs.values(tensor, [group.sequence, rows.position(index), rows.row(index), head])
}

/// Returns `a · bᵀ`, stored row by row.
pub(super) fn product_transposed(a: &ArrayView2<'_, f64>, b: &ArrayView2<'_, f64>) -> Array2<f64> {
    let mut product = Array2::zeros((a.nrows(), b.nrows()));
    general_mat_mul(1.0, a, &b.t(), 0.0, &mut product);
    product
}

/// Returns `a · bᵀ`, where b is made of tiles of rows, one after the other.
pub(super) fn products_of_tiles(
    a: &Array2<f64>,
    rows: Range<usize>,
    tile_of: impl Fn(Range<usize>) -> Array2<f64>,
) -> Array2<f64> {
    let mut products = Array2::zeros((a.nrows(), rows.len()));
    for tile in tiles(rows.clone(), KEY_TILE) {
        let mut to = products.slice_mut(s![.., tile.start - rows.start..tile.end - rows.start]);
        general_mat_mul(1.0, a, &tile_of(tile).t(), 0.0, &mut to);
    }
    products
}

/// Adds `a · b` to a matrix, where b is the tile of rows `tile`, and a has a column for each of `rows`.
pub(super) fn add_product(
    to: &mut Array2<f64>,
    a: &Array2<f64>,
    b: &Array2<f64>,
    (tile, rows): (&Range<usize>, &Range<usize>),
) {
    let columns = a.slice(s![.., tile.start - rows.start..tile.end - rows.start]);
    general_mat_mul(1.0, &columns, b, 1.0, to);
}

/// Returns a row of a matrix that is stored row by row, as every product here is.
pub(super) fn row_of(matrix: &Array2<f64>, row: usize) -> &[f64] {
    let columns = matrix.ncols();
    &matrix.as_slice().expect("a product is stored row by row")[row * columns..(row + 1) * columns]
}

/// Returns a row of a matrix that is stored row by row, to write.
pub(super) fn row_mut(matrix: &mut Array2<f64>, row: usize) -> &mut [f64] {
    let columns = matrix.ncols();
    &mut matrix.as_slice_mut().expect("a product is stored row by row")[row * columns..(row + 1) * columns]
}

/// Returns pieces of `range` of at most `size`.
pub(super) fn tiles(range: Range<usize>, size: usize) -> impl Iterator<Item = Range<usize>> {
    let end = range.end;
    range.step_by(size).map(move |start| start..end.min(start + size))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Alignment, Mask, ProblemFields};

    fn problems() -> impl Iterator<Item = Problem> {
        let sides = [None, Some(0), Some(2), Some(40)];
        let masks = sides.into_iter().flat_map(move |left| sides.map(|right| (left, right)));
        let aligned = masks.flat_map(|(left, right)| {
            [Alignment::TopLeft, Alignment::BottomRight].map(|align| Mask::window(left, right, align))
        });
        let masks = aligned.flat_map(|mask| [0, 5].map(|sink_tokens| Mask { sink_tokens, ..mask }));
        masks.flat_map(|mask| {
            [(700, 700), (9, 30), (30, 9)].map(|lengths| {
                let fields = ProblemFields { mask, ..ProblemFields::packed(&[lengths], 1) };
                Problem::new(fields).expect("a problem")
            })
        })
    }

    #[test]
    fn picked_rows_see_and_are_seen_as_they_are_in_the_whole() {
        for problem in problems() {
            let both = problem.sequences[0];
            let visible = |i: usize| problem.mask.visible(i, both.q.len, both.kv.len);
            let [q, kv] = [both.q.len, both.kv.len].map(|len| (0..len).step_by(7).collect::<Vec<_>>());
            let rows = |positions| SomeRows { sequence: 0, positions };
            let of_queries = &Cut::of(&problem, Wanted::Queries(rows(&q))).groups[0];
            for (index, &i) in q.iter().enumerate() {
                assert_eq!(of_queries.seen(index), visible(i), "query {i} of {problem:?}");
                assert_eq!(of_queries.keys_of(index), visible(i).hull().end);
            }
            let of_keys = &Cut::of(&problem, Wanted::Keys(rows(&kv))).groups[0];
            for i in 0..both.q.len {
                let seen = of_keys.seen(i).map(|index| kv[index]);
                assert!(seen.eq(kv.iter().copied().filter(|key| visible(i).contains(key))), "query {i}");
            }
            for (index, &key) in kv.iter().enumerate() {
                let readers = (0..both.q.len).filter(|&i| visible(i).contains(&key)).count();
                assert_eq!(of_keys.queries_of(index), readers, "key {key} of {problem:?}");
            }
        }
    }

    #[test]
    fn tiles_of_rows_are_no_larger_than_strips_may_be_and_leave_no_row_out() {
        for problem in problems() {
            let all: Vec<usize> = (0..problem.sequences[0].q.len).collect();
            let apart: Vec<usize> = all.iter().copied().step_by(60).collect();
            for positions in [&all, &apart] {
                let rows = SomeRows { sequence: 0, positions };
                let group = &Cut::of(&problem, Wanted::Queries(rows)).groups[0];
                for strip_max in [1, 5000, usize::MAX] {
                    let tiles = group.row_tiles(0..positions.len(), strip_max);
                    assert!(tiles.iter().flat_map(Clone::clone).eq(0..positions.len()), "{tiles:?}");
                    for tile in tiles.iter().filter(|tile| tile.len() > 1) {
                        let keys = group.seen_by_any(tile.clone()).len();
                        assert!(tile.len() <= ROW_TILE && tile.len() * keys <= strip_max, "{tile:?}");
                    }
                    // Neighbours lie in tiles that are full.
                    let full = positions.len().div_ceil(ROW_TILE);
                    let are_neighbours = positions.len() == all.len();
                    assert!(strip_max < usize::MAX || !are_neighbours || tiles.len() == full, "{tiles:?}");
                }
            }
        }
    }

    #[test]
    fn rows_of_a_window_that_lie_apart_are_not_in_one_tile() {
        let mask = Mask { left: Some(9), ..Mask::CAUSAL };
        let fields = ProblemFields { mask, ..ProblemFields::packed(&[(100_000, 100_000)], 1) };
        let problem = Problem::new(fields).expect("a problem");
        let rows = SomeRows { sequence: 0, positions: &[0, 1, 50_000, 50_001, 99_999] };
        let group = &Cut::of(&problem, Wanted::Queries(rows)).groups[0];
        assert_eq!(group.row_tiles(0..5, usize::MAX), [0..2, 2..4, 4..5]);
    }

    #[test]
    #[should_panic = "picked positions ascend"]
    fn positions_out_of_order_are_refused() {
        Rows::picked(Run::packed(0, 9, 9), &[1, 1]);
    }

    #[test]
    #[should_panic = "picked positions are real"]
    fn positions_of_padding_are_refused() {
        Rows::picked(Run::packed(0, 9, 12), &[1, 9]);
    }
}
