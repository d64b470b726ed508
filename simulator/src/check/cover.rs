//! The exact cover: a proof that launches show each row of a piece exactly the columns that the mask shows it, each
//! once.
//!
//! A [`Patch`] is the set of pairs that one segment of one launch attends. It has rows `rows.start + rows.step·i` and
//! columns `cols.start + cols.step·j`, and the pair (i, j) is in it iff `i + lo ≤ j ≤ i + hi`. Rows are query positions
//! and columns are key positions; [transposed](Patch::transposed), they change places.
//!
//! A mask may show a row two intervals of columns. Rows and columns are therefore cut into [regions](Region), in each
//! of which the mask shows a row one interval, and each region is proved by itself.
//!
//! The proof does not look at pairs. For row t of the piece, every patch shows one interval of its columns. The ends of
//! the interval are linear in t, except where they are clamped to the patch. The mask, too, shows such an interval.
//! *Breaks* are the rows at which a clamp sets in or an interval becomes empty. On a stretch of rows between breaks,
//! everything is linear. There the sorted intervals form a *chain*: the first begins where the mask's interval begins,
//! each next one begins where the last one ended, and the last ends where the mask's ends. Two linear functions that
//! agree at both ends of a stretch agree on all of it. A chain that holds, in one order, at the first and the last row
//! of a stretch therefore holds between them too. Columns of step M are M such problems, one for each residue.
//!
//! A chain that breaks in the same place and way at both ends of a stretch breaks the same way between them, at columns
//! whose ends are linear as well. A whole [`Stretch`] of rows is then named, with the wrong columns of each row.
//!
//! If the steps of rows and columns do not divide each other, nothing is linear. Such rows are examined one by one, up
//! to [`IRREGULAR_MAX`] of them.

use std::ops::Range;

use seamproof_oracle::{Band, Positions, Sight, Tile};

use super::error::{CoverKind, OperationId};
use super::stretch::Stretch;

/// Stand-in for an absent bound: beyond every position, and far from overflow.
pub(super) const FAR: i64 = 1 << 40;
/// Largest number of rows that one proof examines singly, with each residue counted.
const IRREGULAR_MAX: usize = 1 << 22;
/// Largest step of columns.
const STEP_MAX: usize = 1 << 13;

/// Set of pairs that one segment of one launch attends.
#[derive(Clone, Debug)]
pub(super) struct Patch {
    /// The launch.
    pub(super) place: OperationId,
    pub(super) sequence: usize,
    /// Query heads, counted among those of their KV head.
    pub(super) group: Range<usize>,
    pub(super) rows: Positions,
    pub(super) cols: Positions,
    pub(super) lo: i64,
    pub(super) hi: i64,
}

impl Patch {
    pub(super) fn transposed(&self) -> Patch {
        Patch { rows: self.cols, cols: self.rows, lo: -self.hi, hi: -self.lo, ..self.clone() }
    }

    /// Returns everything on which a proof depends: all but the place, which only errors name.
    pub(super) fn numbers(&self) -> [u64; 11] {
        let Patch { sequence, group, rows, cols, lo, hi, .. } = self;
        let lines = [rows.start, rows.step, rows.len, cols.start, cols.step, cols.len].map(|n| n as u64);
        let [a, b, c, d, e, f] = lines;
        let (first, end) = (group.start as u64, group.end as u64);
        [*sequence as u64, first, end, a, b, c, d, e, f, *lo as u64, *hi as u64]
    }

    /// Whether both show the same pairs and are written with the same numbers.
    pub(super) fn alike(&self, other: &Patch) -> bool {
        self.numbers() == other.numbers()
    }

    /// Returns the part of the patch whose columns lie in a range; `None` if it has none there.
    pub(super) fn within(&self, cols: &Range<usize>) -> Option<Patch> {
        let part = self.cols.within(cols);
        let skipped = ((part.start - self.cols.start) / self.cols.step) as i64;
        let (lo, hi) = (self.lo - skipped, self.hi - skipped);
        (part.len > 0).then(|| Patch { cols: part, lo, hi, ..self.clone() })
    }

    /// Whether the patch contains no pair.
    pub(super) fn is_empty(&self) -> bool {
        let (rows, cols) = (self.rows.len as i64, self.cols.len as i64);
        rows == 0 || cols == 0 || self.lo.max(1 - rows) > self.hi.min(cols - 1)
    }
}

/// Pairs that the mask shows: row p sees those of `p + lo ..= p + hi` that are in `cols`.
#[derive(Clone, Debug)]
pub(super) struct Wanted {
    pub(super) lo: i64,
    pub(super) hi: i64,
    pub(super) cols: Range<usize>,
}

impl Wanted {
    /// Returns the pairs of a band.
    fn new(band: Band, cols: Range<usize>) -> Wanted {
        Wanted { lo: band.lo.unwrap_or(-FAR), hi: band.hi.unwrap_or(FAR), cols }
    }
}

/// Rows and columns, and what the mask shows these rows of these columns.
#[derive(Clone, Debug)]
pub(super) struct Region {
    rows: Range<usize>,
    cols: Range<usize>,
    wanted: Wanted,
}

impl Region {
    /// Returns what the mask shows these queries, for queries that follow each other. Every column is in a region of
    /// each query.
    pub(super) fn of_queries(sight: &Sight, queries: Range<usize>) -> Vec<Region> {
        let mut regions: Vec<Region> = Vec::new();
        for tile in sight.tiles(queries, 0..0).filter(|tile| !tile.queries.is_empty()) {
            let (first, mut start) = (regions.len(), 0);
            for (keys, band) in tile.bands() {
                let cols = start..keys.end;
                start = keys.end;
                regions.push(Region { rows: tile.queries.clone(), cols, wanted: Wanted::new(band, keys) });
            }
            if regions.len() == first {
                let wanted = Wanted::new(tile.band, tile.keys);
                regions.push(Region { rows: tile.queries, cols: 0..0, wanted });
            }
            regions.last_mut().expect("every tile has a region").cols.end = usize::MAX;
        }
        regions
    }

    /// Returns the queries that the mask shows these keys, for keys that follow each other.
    pub(super) fn of_keys(sight: &Sight, keys: Range<usize>) -> Vec<Region> {
        let of = |tile: Tile| {
            let queries = tile.queries.clone();
            tile.bands().map(move |(rows, band)| Region {
                rows,
                cols: 0..usize::MAX,
                wanted: Wanted::new(band.transposed(), queries.clone()),
            })
        };
        sight.tiles(0..0, keys).flat_map(of).collect()
    }
}

/// Place where the cover is not exact.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Hole {
    pub(super) kind: CoverKind,
    pub(super) pairs: Stretch,
    pub(super) launch: Option<OperationId>,
}

/// Break of the chain of one row.
struct Flaw {
    form: Form,
    /// Columns of the break, at the step of the chain.
    cols: Range<i64>,
}

/// Place and manner of a break: everything of a [`Flaw`] that is not linear.
#[derive(PartialEq)]
struct Form {
    kind: CoverKind,
    /// Patch whose strip is wrong; `None` where a column is missing.
    patch: Option<usize>,
    /// Patches of the whole chain in order. The break is at the strip with index `nth`.
    order: Vec<usize>,
    nth: usize,
    /// Whether the columns end at the end of another strip than the one at the break.
    is_cut: bool,
}

/// One patch, or the mask, on the rows `t` of a piece: columns `start + step·u` for
/// `max(0, lo + slope·t) ≤ u ≤ min(len − 1, hi + slope·t)`.
#[derive(Clone, Copy, Debug)]
struct Strip {
    lo: i64,
    hi: i64,
    slope: i64,
    len: i64,
    start: i64,
    step: i64,
    patch: usize,
}

impl Strip {
    /// Returns the first and the last column of row t; `None` if the row has none.
    fn ends(&self, t: i64) -> Option<(i64, i64)> {
        let first = (self.lo + self.slope * t).max(0);
        let last = (self.hi + self.slope * t).min(self.len - 1);
        (first <= last).then(|| (self.start + self.step * first, self.start + self.step * last))
    }

    /// Adds the rows below `n` at which a clamp sets in or ends.
    fn breaks(&self, n: i64, to: &mut Vec<i64>) {
        if self.slope == 0 {
            return;
        }
        // The first t with bound + slope·t ≥ level.
        let crossing = |bound: i64, level: i64| {
            (level - bound).div_euclid(self.slope) + i64::from((level - bound).rem_euclid(self.slope) != 0)
        };
        let at = [
            crossing(self.lo, 0),
            crossing(self.lo, self.len),
            crossing(self.hi, 0),
            crossing(self.hi, self.len - 1),
        ];
        to.extend(at.into_iter().filter(|t| (1..n).contains(t)));
    }
}

/// Proves that `patches` show `rows` exactly what the mask shows them, where `regions` hold every row and column.
/// Returns the number of pairs, or the first place of a difference.
pub(super) fn prove_all(rows: Positions, regions: &[Region], patches: &[Patch]) -> Result<u64, Hole> {
    if let [all] = regions {
        return prove(rows, &all.wanted, patches);
    }
    let range = range_of(&rows);
    if let Some(patch) = patches.iter().find(|patch| patch.rows.within(&range).len == 0) {
        return Err(outside(rows, patch));
    }
    let mut pairs = 0;
    for Region { rows: range, cols, wanted } in regions {
        let rows = rows.within(range);
        for part in parts(rows, patches) {
            let mine = patches.iter().filter(|patch| patch.rows.within(&part).len > 0);
            let mine: Vec<Patch> = mine.filter_map(|patch| patch.within(cols)).collect();
            pairs += prove(rows.within(&part), wanted, &mine)?;
        }
    }
    Ok(pairs)
}

/// Returns the range from the first position to the last.
pub(super) fn range_of(line: &Positions) -> Range<usize> {
    line.start..line.len.checked_sub(1).map_or(line.start, |last| line.at(last) + 1)
}

/// Returns the ranges of positions between the ends of the patches, from the first of `rows` to the last.
fn parts(rows: Positions, patches: &[Patch]) -> Vec<Range<usize>> {
    let Range { start, end } = range_of(&rows);
    let inside = |at: &usize| (start + 1..end).contains(at);
    let ends = patches.iter().map(|patch| range_of(&patch.rows)).flat_map(|range| [range.start, range.end]);
    let mut cuts: Vec<usize> = ends.filter(inside).chain([start, end]).collect();
    cuts.sort_unstable();
    cuts.dedup();
    cuts.windows(2).map(|ends| ends[0]..ends[1]).collect()
}

/// Proves that `patches` show `rows` exactly the wanted columns. Returns the number of pairs, or the first place of a
/// difference.
pub(super) fn prove(rows: Positions, wanted: &Wanted, patches: &[Patch]) -> Result<u64, Hole> {
    if rows.len == 0 {
        return Ok(0);
    }
    let step =
        patches.iter().filter(|patch| patch.cols.len > 1).map(|patch| patch.cols.step).max().unwrap_or(1);
    let regular = patches.iter().all(|patch| patch.cols.len <= 1 || patch.cols.step == step)
        && (rows.len == 1 || rows.step.is_multiple_of(step) || step == 1 || constant(rows, wanted));
    let columns = patches.iter().fold(1, |sum: usize, patch| sum.saturating_add(patch.cols.len));
    let cost = if regular { step } else { rows.len.saturating_mul(columns) };
    if step > STEP_MAX || cost > IRREGULAR_MAX {
        let pairs = Stretch::alike(rows, Positions::first(wanted.cols.len()).moved(wanted.cols.start));
        return Err(Hole { kind: CoverKind::Irregular, pairs, launch: None });
    }
    if regular {
        return residues(rows, wanted, patches, step);
    }
    let mut pairs = 0;
    for t in 0..rows.len {
        pairs += residues(Positions { start: rows.at(t), step: 1, len: 1 }, wanted, patches, 1)?;
    }
    Ok(pairs)
}

/// Whether every row of the piece sees every column or none.
fn constant(rows: Positions, wanted: &Wanted) -> bool {
    let (first, last) = (rows.start as i64, rows.at(rows.len - 1) as i64);
    last + wanted.lo <= wanted.cols.start as i64 && first + wanted.hi >= wanted.cols.end as i64 - 1
}

/// Proves the claim of [`prove`] for columns of one step. If the piece is one row, columns may have any step: patches
/// of another step than `step` are split into single columns.
fn residues(rows: Positions, wanted: &Wanted, patches: &[Patch], step: usize) -> Result<u64, Hole> {
    let mut strips: Vec<(usize, Strip)> = Vec::with_capacity(patches.len());
    for (index, patch) in patches.iter().enumerate() {
        let Some(strip) = strip(rows, patch, index, step) else {
            return Err(outside(rows, patch));
        };
        if patch.cols.len > 1 && patch.cols.step != step {
            strips.extend(singles(strip));
        } else {
            strips.push((patch.cols.start % step, strip));
        }
    }
    strips.sort_by_key(|(residue, strip)| (*residue, strip.start));
    let (mut pairs, mut rest) = (0, strips.as_slice());
    for residue in 0..step {
        let count = rest.iter().take_while(|(r, _)| *r == residue).count();
        let (mine, others) = rest.split_at(count);
        rest = others;
        let strips: Vec<Strip> = mine.iter().map(|(_, strip)| *strip).collect();
        pairs +=
            Chain { rows, wanted: wanted_strip(rows, wanted, residue, step), strips, patches }.prove()?;
    }
    Ok(pairs)
}

/// Returns the mask's strip on the columns of one residue.
fn wanted_strip(rows: Positions, wanted: &Wanted, residue: usize, step: usize) -> Strip {
    let m = step as i64;
    let start = wanted.cols.start as i64 + (residue as i64 - wanted.cols.start as i64).rem_euclid(m);
    let origin = rows.start as i64 - start;
    let len = (wanted.cols.end as i64 - start + m - 1).div_euclid(m).max(0);
    let (mut lo, mut hi) = (-(-(origin + wanted.lo)).div_euclid(m), (origin + wanted.hi).div_euclid(m));
    let mut slope = if rows.len == 1 { 0 } else { (rows.step / step) as i64 };
    if rows.len > 1 && step > 1 && constant(rows, wanted) {
        (lo, hi, slope) = (-FAR, FAR, 0);
    }
    Strip { lo, hi, slope, len, start, step: m, patch: usize::MAX }
}

/// Returns the strip of a patch on the rows of a piece; `None` if the piece has rows that the patch lacks.
fn strip(rows: Positions, patch: &Patch, index: usize, step: usize) -> Option<Strip> {
    let first = rows.start.checked_sub(patch.rows.start)?;
    let (mut base, mut slope) = (0, 0);
    if patch.rows.len > 1 || first > 0 {
        if !first.is_multiple_of(patch.rows.step)
            || rows.len > 1 && !rows.step.is_multiple_of(patch.rows.step)
        {
            return None;
        }
        base = (first / patch.rows.step) as i64;
        slope = if rows.len > 1 { (rows.step / patch.rows.step) as i64 } else { 0 };
    }
    let last = base + slope * (rows.len as i64 - 1);
    if last >= patch.rows.len as i64 || rows.len > 1 && slope == 0 {
        return None;
    }
    let cols = patch.cols;
    let width = if cols.len > 1 { cols.step } else { step };
    let (lo, hi) = (patch.lo + base, patch.hi + base);
    Some(Strip {
        lo,
        hi,
        slope,
        len: cols.len as i64,
        start: cols.start as i64,
        step: width as i64,
        patch: index,
    })
}

/// Returns the columns of one row as single strips.
fn singles(strip: Strip) -> impl Iterator<Item = (usize, Strip)> {
    let ends = strip.ends(0);
    let columns = ends.into_iter().flat_map(move |(first, last)| (first..=last).step_by(strip.step as usize));
    columns.map(move |start| {
        (0, Strip { lo: -FAR, hi: FAR, slope: 0, len: 1, start, step: 1, patch: strip.patch })
    })
}

fn outside(rows: Positions, patch: &Patch) -> Hole {
    Hole { kind: CoverKind::Irregular, pairs: Stretch::alike(rows, patch.cols), launch: Some(patch.place) }
}

/// Strips of one residue, compared with the mask's strip.
struct Chain<'a> {
    rows: Positions,
    wanted: Strip,
    strips: Vec<Strip>,
    patches: &'a [Patch],
}

impl Chain<'_> {
    fn prove(&self) -> Result<u64, Hole> {
        let n = self.rows.len as i64;
        let mut breaks = vec![0, n];
        self.wanted.breaks(n, &mut breaks);
        self.strips.iter().for_each(|strip| strip.breaks(n, &mut breaks));
        breaks.sort_unstable();
        breaks.dedup();
        breaks.windows(2).map(|ends| self.stretch(ends[0], ends[1] - 1)).sum()
    }

    /// Returns the number of pairs in the rows `first..=last`, which lie between two breaks.
    fn stretch(&self, first: i64, last: i64) -> Result<u64, Hole> {
        let (order, width) = self.at(first).map_err(|flaw| self.hole(&flaw, first, last))?;
        if first == last {
            return Ok(width);
        }
        match self.at(last) {
            // The widths of a stretch are linear too.
            Ok((there, other)) if order == there => Ok((width + other) * (last - first + 1) as u64 / 2),
            _ => {
                let middle = first + (last - first) / 2;
                Ok(self.stretch(first, middle)? + self.stretch(middle + 1, last)?)
            }
        }
    }

    /// Returns the order of the chain at row t and its number of pairs, or the break.
    fn at(&self, t: i64) -> Result<(Vec<usize>, u64), Flaw> {
        let shown = self.strips.iter().filter_map(|strip| strip.ends(t).map(|ends| (ends, strip.patch)));
        let mut shown: Vec<((i64, i64), usize)> = shown.collect();
        shown.sort_unstable();
        let order = shown.iter().map(|(_, patch)| *patch).collect();
        match self.flaw(t, &shown) {
            Some((nth, kind, cols, is_cut)) => {
                let patch =
                    if kind == CoverKind::Missing { None } else { shown.get(nth).map(|(_, patch)| *patch) };
                Err(Flaw { form: Form { kind, patch, order, nth, is_cut }, cols })
            }
            None => {
                let width =
                    self.wanted.ends(t).map_or(0, |(first, last)| (last - first) / self.wanted.step + 1);
                Ok((order, width as u64))
            }
        }
    }

    /// Returns the first place where the strips at row t differ from the mask.
    fn flaw(&self, t: i64, shown: &[((i64, i64), usize)]) -> Option<(usize, CoverKind, Range<i64>, bool)> {
        let Some((start, stop)) = self.wanted.ends(t) else {
            let ((first, end), _) = shown.first()?;
            return Some((0, CoverKind::Invisible, *first..end + 1, false));
        };
        let (mut next, step) = (start, self.wanted.step);
        for (nth, &((first, end), _)) in shown.iter().enumerate() {
            if first < next {
                let kind = if first >= start { CoverKind::Twice } else { CoverKind::Invisible };
                return Some((nth, kind, first..(end + 1).min(next), end + 1 > next));
            }
            if first > next && next <= stop {
                return Some((nth, CoverKind::Missing, next..first.min(stop + 1), first > stop + 1));
            }
            if end > stop {
                return Some((
                    nth,
                    CoverKind::Invisible,
                    first.max(stop + step)..end + 1,
                    first < stop + step,
                ));
            }
            next = end + step;
        }
        (next <= stop).then(|| (shown.len(), CoverKind::Missing, next..stop + 1, false))
    }

    /// Returns the hole of a flaw at row `first`. The hole reaches up to `last` if the flaw there has the same form.
    fn hole(&self, flaw: &Flaw, first: i64, last: i64) -> Hole {
        let cols = |flaw: &Flaw| within(flaw.cols.clone(), self.wanted.step);
        let same = self.at(last).err().filter(|there| there.form == flaw.form);
        match same {
            Some(there) => {
                let rows = Positions {
                    start: self.rows.at(first as usize),
                    len: (last - first + 1) as usize,
                    ..self.rows
                };
                let launch =
                    flaw.form.patch.and_then(|patch| self.patches.get(patch)).map(|patch| patch.place);
                let pairs = Stretch { rows, first: cols(flaw), last: cols(&there) };
                Hole { kind: flaw.form.kind, pairs, launch }
            }
            None => self.hole(flaw, first, first + (last - first) / 2),
        }
    }
}

/// Returns `range.start, range.start + step, …` below the range's end, without negative ones.
fn within(range: Range<i64>, step: i64) -> Positions {
    let start = range.start.max(0);
    let len = (range.end - start + step - 1).div_euclid(step).max(0);
    Positions { start: start as usize, step: step as usize, len: len as usize }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COLS: usize = 24;

    /// Returns right patches: they show rows of a step the mask's columns, with two patches for each residue.
    fn right(rows: Positions, wanted: &Wanted) -> Vec<Patch> {
        let place = OperationId { rank: 0, operation: 0, stream: 0 };
        let step = rows.step as i64;
        let patch = |start: usize, len: usize| {
            let off = rows.start as i64 - start as i64;
            let lo = -(-(wanted.lo + off)).div_euclid(step);
            let hi = (wanted.hi + off).div_euclid(step);
            let cols = Positions { start, step: rows.step, len };
            Patch {
                place,
                sequence: 0,
                group: 0..1,
                rows: Positions { start: rows.start, ..rows },
                cols,
                lo,
                hi,
            }
        };
        let len = COLS / rows.step;
        (0..rows.step)
            .flat_map(|at| [patch(at, len / 2), patch(at + len / 2 * rows.step, len - len / 2)])
            .collect()
    }

    /// Returns the number of times that patches show a pair of positions.
    fn count(patches: &[Patch], row: usize, col: usize) -> usize {
        let index =
            |line: &Positions, at: usize| (0..line.len).find(|&index| line.at(index) == at).map(|i| i as i64);
        let shows = |patch: &&Patch| match (index(&patch.rows, row), index(&patch.cols, col)) {
            (Some(i), Some(j)) => (i + patch.lo..=i + patch.hi).contains(&j),
            _ => false,
        };
        patches.iter().filter(shows).count()
    }

    /// Returns every pair that a hole names.
    fn pairs(stretch: &Stretch) -> Vec<(usize, usize)> {
        let Stretch { rows, first, last } = stretch;
        let at = |from: usize, to: usize, t: usize| {
            (from as i64 + (to as i64 - from as i64) * t as i64 / (rows.len as i64 - 1).max(1)) as usize
        };
        let cols = |t| Positions {
            start: at(first.start, last.start, t),
            len: at(first.len, last.len, t),
            ..*first
        };
        (0..rows.len)
            .flat_map(|t| (0..cols(t).len).map(move |u| (t, u)))
            .map(|(t, u)| (rows.at(t), cols(t).at(u)))
            .collect()
    }

    /// A hole names a stretch of rows only if its statement is true of each row, whatever one patch does wrong.
    #[test]
    fn a_hole_is_true_of_every_row_that_it_names() {
        let (mut bands, mut steps) = (0, 0);
        for (step, start, left, right_bound) in
            [(1, 0, 3, 0), (1, 2, 5, 2), (2, 1, 4, 1), (3, 0, 7, 3), (1, 4, FAR, 0), (2, 0, 2, FAR)]
        {
            let rows = Positions { start, step, len: (COLS - start).div_ceil(step) };
            let wanted = Wanted { lo: -left, hi: right_bound, cols: 0..COLS };
            let patches = right(rows, &wanted);
            assert!(prove(rows, &wanted, &patches).is_ok(), "{rows} with {wanted:?}");
            for nth in 0..patches.len() {
                for (lo, hi, len) in [(1, 0, 0), (-1, 0, 0), (0, 1, 0), (0, -2, 0), (0, 0, 1), (0, 0, 2)] {
                    let mut wrong = patches.clone();
                    wrong[nth].lo += lo;
                    wrong[nth].hi += hi;
                    wrong[nth].cols.len -= len;
                    let Err(hole) = prove(rows, &wanted, &wrong) else { continue };
                    let named = pairs(&hole.pairs);
                    assert!(!named.is_empty(), "{hole:?}");
                    for (row, col) in named {
                        let off = col as i64 - row as i64;
                        let is_wanted = (wanted.lo..=wanted.hi).contains(&off) && col < COLS;
                        let is = match (is_wanted, count(&wrong, row, col)) {
                            (true, 0) => CoverKind::Missing,
                            (false, 1..) => CoverKind::Invisible,
                            (true, 2..) => CoverKind::Twice,
                            _ => panic!("row {row} and column {col} are right: {} {}", hole.pairs, hole.kind),
                        };
                        assert_eq!(is, hole.kind, "row {row}, column {col}: {}", hole.pairs);
                    }
                    bands += usize::from(hole.pairs.first.start != hole.pairs.last.start);
                    steps += usize::from(hole.pairs.rows.len > 1 && step > 1);
                }
            }
        }
        assert!(bands > 20 && steps > 10, "{bands} bands, {steps} with steps");
    }

    #[test]
    fn a_band_reads_from_its_first_row_to_its_last() {
        let wanted = Wanted { lo: -3, hi: 0, cols: 0..COLS };
        let rows = Positions::first(COLS);
        let mut patches = right(rows, &wanted);
        patches.iter_mut().for_each(|patch| patch.lo += 1);
        let hole = prove(rows, &wanted, &patches).expect_err("the window is short");
        let said = format!("{} {}", hole.pairs, hole.kind);
        assert_eq!(
            said,
            "positions 3..11: pairs with positions 0..1 of the first to 7..8 of the last are missing"
        );
        let stepped = Stretch::alike(Positions { start: 1, step: 2, len: 3 }, Positions::first(2));
        assert_eq!(stepped.to_string(), "positions 1..6 step 2: pairs with positions 0..2");
    }
}
