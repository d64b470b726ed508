//! The exact cover: that launches show each row of a piece exactly the columns that the mask shows it, each once.
//!
//! A [`Patch`] is what one segment of one launch attends: rows `rows.start + rows.step·i`, columns
//! `cols.start + cols.step·j`, the pair (i, j) iff `i + lo ≤ j ≤ i + hi`. Rows are query positions and columns key
//! positions, or, [transposed](Patch::transposed), the other way round.
//!
//! The claim is proved without looking at pairs. For row t of the piece every patch shows one interval of its columns
//! whose ends are linear in t, except where they are clamped to the patch; so does the mask. Between the rows where a
//! clamp sets in or an interval becomes empty (*breaks*) everything is linear. There the intervals, sorted, form a
//! *chain*: the first begins where the mask's begins, each next one where the last ended, the last ends where the
//! mask's ends. Two linear functions that agree at both ends of a stretch agree on all of it: a chain that holds, in
//! one order, at the first and the last row of a stretch holds between them too. Columns of step M are M such
//! problems, one for each residue.
//!
//! Where steps of rows and columns do not divide each other nothing is linear; such rows are looked at one by one, up
//! to [`IRREGULAR_MAX`] of them.

use std::ops::Range;

use super::error::{CoverKind, Place};

/// `start, start + step, …`, `len` of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Line {
    pub(super) start: usize,
    pub(super) step: usize,
    pub(super) len: usize,
}

impl Line {
    /// 0, 1, …
    pub(super) fn first(len: usize) -> Line {
        Line { start: 0, step: 1, len }
    }

    pub(super) fn at(&self, index: usize) -> usize {
        self.start + self.step * index
    }
}

/// Stands for an absent bound: beyond every position, far from overflow.
pub(super) const FAR: i64 = 1 << 40;
/// Rows that one proof looks at singly, each residue counted.
const IRREGULAR_MAX: usize = 1 << 22;
/// Largest step of columns.
const STEP_MAX: usize = 1 << 13;

/// What one segment of one launch attends.
#[derive(Clone, Debug)]
pub(super) struct Patch {
    /// The launch.
    pub(super) place: Place,
    pub(super) sequence: usize,
    /// The query heads among those of their KV head.
    pub(super) group: Range<usize>,
    pub(super) rows: Line,
    pub(super) cols: Line,
    pub(super) lo: i64,
    pub(super) hi: i64,
}

impl Patch {
    pub(super) fn transposed(&self) -> Patch {
        Patch { rows: self.cols, cols: self.rows, lo: -self.hi, hi: -self.lo, ..self.clone() }
    }

    /// All that a proof depends on: everything but the place, which only errors name.
    pub(super) fn numbers(&self) -> [u64; 11] {
        let Patch { sequence, group, rows, cols, lo, hi, .. } = self;
        let lines = [rows.start, rows.step, rows.len, cols.start, cols.step, cols.len].map(|n| n as u64);
        let [a, b, c, d, e, f] = lines;
        let (first, end) = (group.start as u64, group.end as u64);
        [*sequence as u64, first, end, a, b, c, d, e, f, *lo as u64, *hi as u64]
    }

    /// Whether both show the same pairs, in the same words.
    pub(super) fn alike(&self, other: &Patch) -> bool {
        self.numbers() == other.numbers()
    }

    /// Whether no pair is in it.
    pub(super) fn is_empty(&self) -> bool {
        let (rows, cols) = (self.rows.len as i64, self.cols.len as i64);
        rows == 0 || cols == 0 || self.lo.max(1 - rows) > self.hi.min(cols - 1)
    }
}

/// What the mask shows: row p sees columns `p + lo ..= p + hi` below `cols`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wanted {
    pub(super) lo: i64,
    pub(super) hi: i64,
    pub(super) cols: usize,
}

/// Where the cover is not exact.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Hole {
    pub(super) kind: CoverKind,
    pub(super) rows: Range<usize>,
    pub(super) cols: Range<usize>,
    pub(super) launch: Option<Place>,
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
    /// First and last column of row t.
    fn ends(&self, t: i64) -> Option<(i64, i64)> {
        let first = (self.lo + self.slope * t).max(0);
        let last = (self.hi + self.slope * t).min(self.len - 1);
        (first <= last).then(|| (self.start + self.step * first, self.start + self.step * last))
    }

    /// The rows below `n` at which a clamp sets in or ends.
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

/// Proves that `patches` show the rows `rows` exactly what is wanted; the pairs, or the first place where they do not.
pub(super) fn prove(rows: Line, wanted: Wanted, patches: &[Patch]) -> Result<u64, Hole> {
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
        let all = rows.start..rows.at(rows.len - 1) + 1;
        return Err(Hole { kind: CoverKind::Irregular, rows: all, cols: 0..wanted.cols, launch: None });
    }
    if regular {
        return residues(rows, wanted, patches, step);
    }
    let mut pairs = 0;
    for t in 0..rows.len {
        pairs += residues(Line { start: rows.at(t), step: 1, len: 1 }, wanted, patches, 1)?;
    }
    Ok(pairs)
}

/// Whether every row of the piece sees every column or none.
fn constant(rows: Line, wanted: Wanted) -> bool {
    let (first, last) = (rows.start as i64, rows.at(rows.len - 1) as i64);
    last + wanted.lo <= 0 && first + wanted.hi >= wanted.cols as i64 - 1
}

/// [`prove`] for columns of one step (or, if the piece is one row, of any: then columns are looked at one by one where
/// their step is not `step`).
fn residues(rows: Line, wanted: Wanted, patches: &[Patch], step: usize) -> Result<u64, Hole> {
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

/// The mask on the columns of one residue.
fn wanted_strip(rows: Line, wanted: Wanted, residue: usize, step: usize) -> Strip {
    let (m, origin) = (step as i64, rows.start as i64 - residue as i64);
    let len = (wanted.cols as i64 - residue as i64 + m - 1).div_euclid(m).max(0);
    let (mut lo, mut hi) = (-(-(origin + wanted.lo)).div_euclid(m), (origin + wanted.hi).div_euclid(m));
    let mut slope = if rows.len == 1 { 0 } else { (rows.step / step) as i64 };
    if rows.len > 1 && step > 1 && constant(rows, wanted) {
        (lo, hi, slope) = (-FAR, FAR, 0);
    }
    Strip { lo, hi, slope, len, start: residue as i64, step: m, patch: usize::MAX }
}

/// A patch on the rows of a piece; `None` where the piece has rows that the patch has not.
fn strip(rows: Line, patch: &Patch, index: usize, step: usize) -> Option<Strip> {
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

/// The columns of one row one by one.
fn singles(strip: Strip) -> impl Iterator<Item = (usize, Strip)> {
    let ends = strip.ends(0);
    let columns = ends.into_iter().flat_map(move |(first, last)| (first..=last).step_by(strip.step as usize));
    columns.map(move |start| {
        (0, Strip { lo: -FAR, hi: FAR, slope: 0, len: 1, start, step: 1, patch: strip.patch })
    })
}

fn outside(rows: Line, patch: &Patch) -> Hole {
    let all = rows.start..rows.at(rows.len - 1) + 1;
    let cols = patch.cols.start..patch.cols.at(patch.cols.len.max(1) - 1) + 1;
    Hole { kind: CoverKind::Irregular, rows: all, cols, launch: Some(patch.place) }
}

/// The strips of one residue against the mask's.
struct Chain<'a> {
    rows: Line,
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

    /// The pairs of the rows `first..=last`, between two breaks.
    fn stretch(&self, first: i64, last: i64) -> Result<u64, Hole> {
        let (order, width) = self.at(first, last)?;
        if first == last {
            return Ok(width);
        }
        let (there, other) = self.at(last, last)?;
        if order == there {
            // The widths of a stretch are linear too.
            return Ok((width + other) * (last - first + 1) as u64 / 2);
        }
        let middle = first + (last - first) / 2;
        Ok(self.stretch(first, middle)? + self.stretch(middle + 1, last)?)
    }

    /// The order of the chain at row t, and its pairs; `last` bounds the rows that an error names.
    fn at(&self, t: i64, last: i64) -> Result<(Vec<usize>, u64), Hole> {
        let shown = self.strips.iter().filter_map(|strip| strip.ends(t).map(|ends| (ends, strip.patch)));
        let mut shown: Vec<((i64, i64), usize)> = shown.collect();
        shown.sort_unstable();
        let step = self.wanted.step;
        let ends = self.wanted.ends(t);
        let (mut next, stop) = ends.unwrap_or((0, -step));
        for &((first, end), patch) in &shown {
            if ends.is_none() {
                return Err(self.hole(CoverKind::Invisible, (t, last), first..end + 1, Some(patch)));
            }
            if first < next {
                let twice = first >= ends.map_or(0, |(start, _)| start);
                let kind = if twice { CoverKind::Twice } else { CoverKind::Invisible };
                return Err(self.hole(kind, (t, last), first..(end + 1).min(next), Some(patch)));
            }
            if first > next && next <= stop {
                return Err(self.hole(CoverKind::Missing, (t, last), next..first.min(stop + 1), None));
            }
            if end > stop {
                return Err(self.hole(
                    CoverKind::Invisible,
                    (t, last),
                    first.max(stop + 1)..end + 1,
                    Some(patch),
                ));
            }
            next = end + step;
        }
        if next <= stop {
            return Err(self.hole(CoverKind::Missing, (t, last), next..stop + 1, None));
        }
        let width = ends.map_or(0, |(first, last)| (last - first) / step + 1);
        Ok((shown.into_iter().map(|(_, patch)| patch).collect(), width as u64))
    }

    fn hole(&self, kind: CoverKind, (t, last): (i64, i64), cols: Range<i64>, patch: Option<usize>) -> Hole {
        let rows = self.rows.at(t as usize)..self.rows.at(last as usize) + 1;
        let launch = patch.and_then(|patch| self.patches.get(patch)).map(|patch| patch.place);
        Hole { kind, rows, cols: cols.start.max(0) as usize..cols.end.max(0) as usize, launch }
    }
}
