//! Packed sequences described by segment ids and positions: what such a description means, and the sequences of a
//! [`Problem`](crate::Problem) that say the same.
//!
//! Ids and positions are *arrays*: values in C order under a shape. Their last dimension goes along the rows of a
//! *batch row*; each index of the dimensions before it is one batch row. An id names a row's *segment* within its batch
//! row, and 0 is padding. A position is a row's place in its segment.
//!
//! A query sees a key where both lie in the same batch row, their ids are equal and not 0, and the mask's band holds of
//! their positions ([`Segments::sees`]). Nothing else is said: rows of a segment may lie anywhere in their batch row,
//! in any order.
//!
//! Arrays are *broadcast*: where the shape of one ends that of the other, it is repeated along the dimensions that it
//! lacks. This holds of the ids and the positions of a side, which `vmap` may have batched alone, and then of both
//! sides where one of them has no *extra* dimensions: none before that of its batch. Other shapes that differ are an
//! error, also where they have as many elements: extra dimensions (4) and (2, 2), or (4) and (2, 4), say nothing of
//! which belongs to which.
//!
//! The forms are those of TransformerEngine's `SequenceDescriptor`
//! (<https://github.com/NVIDIA/TransformerEngine>, `transformer_engine/jax/attention.py`).

use std::collections::{HashMap, HashSet};

use crate::dealing::DealingError;
use crate::limits::ROWS_MAX;
use crate::{Band, Run, Sequence, Side, TensorRows};

/// An array of ids or positions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Array {
    /// Numbers of elements along each dimension; at least one dimension.
    pub shape: Vec<usize>,
    /// Elements in C order.
    pub values: Vec<i32>,
}

/// Ids and positions of one side, as a caller gives them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Described {
    /// Segment ids.
    pub ids: Array,
    /// Positions; [`positions_of`] the ids where they are left out.
    pub positions: Option<Array>,
}

/// Ids and positions of both sides, broadcast to the same batch rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segments {
    /// Dimensions before the last one.
    leading: Vec<usize>,
    q: Rows,
    kv: Rows,
}

/// Rows of one side, of all batch rows one after the other.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Rows {
    /// Rows of a batch row.
    length: usize,
    ids: Vec<i32>,
    positions: Vec<i32>,
}

/// The reason why ids and positions say nothing, or nothing that sequences can say.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SegmentsError {
    /// An array whose shape does not have as many elements as there are values.
    #[error("{what} has {values} values, and its shape {shape:?} another number")]
    Values {
        /// The array.
        what: &'static str,
        /// Its shape.
        shape: Vec<usize>,
        /// The number of its values.
        values: usize,
    },
    /// An array of no dimension, which has no rows.
    #[error("{what} has no dimension; the last one goes along the rows")]
    NoDimension {
        /// The array.
        what: &'static str,
    },
    /// Ids and positions of a side that cannot be broadcast.
    #[error("{side}: the ids have shape {ids:?} and the positions {positions:?}; one must end the other")]
    Positions {
        /// The side.
        side: Side,
        /// Shape of the ids.
        ids: Vec<usize>,
        /// Shape of the positions.
        positions: Vec<usize>,
    },
    /// Sides whose leading dimensions cannot be broadcast.
    #[error(
        "q has the leading dimensions {q:?} and kv {kv:?}; use the same, or the last of them alone on one side"
    )]
    Leading {
        /// Dimensions of q before the last one.
        q: Vec<usize>,
        /// Dimensions of k and v before the last one.
        kv: Vec<usize>,
    },
    /// A segment id below 0.
    #[error("{side}: row {row} has the id {id}; use 0 for padding and more for segments")]
    Negative {
        /// The side.
        side: Side,
        /// The row.
        row: usize,
        /// The id.
        id: i32,
    },
    /// An id that comes again after rows of another one, or of none.
    #[error("{side}: the id {id} comes again in row {row}, after other rows; a sequence's rows lie together")]
    Gap {
        /// The side.
        side: Side,
        /// The first row after the gap.
        row: usize,
        /// The id.
        id: i32,
    },
    /// A position that is not the number of rows of the segment before it.
    #[error(
        "{side}: row {row} has the position {position} in place of {expected}, its place in the sequence"
    )]
    Position {
        /// The side.
        side: Side,
        /// The row.
        row: usize,
        /// Its position.
        position: i32,
        /// The position of that row of a sequence.
        expected: usize,
    },
    /// More rows than a problem may have, after broadcasting.
    #[error("{rows} rows of {side} in all batch rows together; use at most {most}")]
    TooManyRows {
        /// The side.
        side: Side,
        /// The number of rows, or of batch rows where these have none.
        rows: usize,
        /// The largest number.
        most: usize,
    },
    /// Lists of lengths of a padded batch that do not go together.
    #[error("q has {q} lengths and kv {kv}; give both for each batch row")]
    Lengths {
        /// The number of lengths of q.
        q: usize,
        /// The number of lengths of k and v.
        kv: usize,
    },
    /// More segments in a batch row than were allowed.
    #[error("batch row {batch_row} has {segments} segments; at most {most} were allowed")]
    TooMany {
        /// The batch row.
        batch_row: usize,
        /// The number of its segments, of both sides together.
        segments: usize,
        /// The largest number.
        most: usize,
    },
    /// Ids, positions or lengths of several ranks that do not go together.
    #[error(transparent)]
    Dealing(#[from] DealingError),
}

impl Segments {
    /// Reads ids and positions of both sides, and broadcasts them.
    pub fn new(q: &Described, kv: &Described) -> Result<Segments, SegmentsError> {
        let (q_shape, q) = Rows::of(q, Side::Q)?;
        let (kv_shape, kv) = Rows::of(kv, Side::Kv)?;
        let leading = of_both(&q_shape, &kv_shape)
            .ok_or_else(|| SegmentsError::Leading { q: q_shape.clone(), kv: kv_shape.clone() })?;
        let q = q.repeated(&leading, Side::Q)?;
        let kv = kv.repeated(&leading, Side::Kv)?;
        Ok(Segments { q, kv, leading })
    }

    /// Returns the dimensions before the last one, after broadcasting.
    pub fn leading(&self) -> &[usize] {
        &self.leading
    }

    /// Returns the number of rows of each side, of all batch rows together.
    pub fn rows(&self) -> TensorRows {
        TensorRows { q: self.q.ids.len(), kv: self.kv.ids.len() }
    }

    /// Whether the query in row `i` sees the key in row `j`, under a band of positions. Rows are counted through all
    /// batch rows.
    pub fn sees(&self, i: usize, j: usize, band: Band) -> bool {
        let same = i / self.q.length == j / self.kv.length && self.q.ids[i] == self.kv.ids[j];
        let [at, key] = [self.q.positions[i], self.kv.positions[j]].map(i64::from);
        same && self.q.ids[i] != 0
            // A caller's band may be any. What saturates lies beyond every position.
            && band.lo.is_none_or(|lo| key >= at.saturating_add(lo))
            && band.hi.is_none_or(|hi| key <= at.saturating_add(hi))
    }

    /// Returns the sequences that say the same as the ids and positions: by batch row, then in order of queries, and
    /// last those of keys alone. A segment of one side alone is a sequence without rows on the other. With a band whose
    /// diagonal begins at the first query and the first key, [`Segments::sees`] is the mask of such a problem.
    ///
    /// Sequences can say less: rows of one must lie together, with positions 0, 1, …, and a batch row has at most
    /// `most` segments.
    pub fn sequences(&self, most: usize) -> Result<Vec<Sequence>, SegmentsError> {
        let mut sequences: Vec<Sequence> = Vec::new();
        for batch_row in 0..self.leading.iter().product() {
            let q = self.q.runs(batch_row, Side::Q)?;
            let kv = self.kv.runs(batch_row, Side::Kv)?;
            let of_q: HashSet<i32> = q.iter().map(|&(id, _)| id).collect();
            let of_kv: HashMap<i32, Run> = kv.iter().copied().collect();
            let [no_q, no_kv] = [&self.q, &self.kv].map(|rows| Run::packed(batch_row * rows.length, 0, 0));
            let with_q = q.iter().map(|&(id, run)| (run, of_kv.get(&id).copied().unwrap_or(no_kv)));
            let alone = kv.iter().filter(|(id, _)| !of_q.contains(id)).map(|&(_, run)| (no_q, run));
            let pairs: Vec<(Run, Run)> = with_q.chain(alone).collect();
            if pairs.len() > most {
                return Err(SegmentsError::TooMany { batch_row, segments: pairs.len(), most });
            }
            for (q, kv) in pairs {
                sequences.push(Sequence { id: sequences.len() as u32, q, kv });
            }
        }
        Ok(sequences)
    }
}

impl Rows {
    /// Returns the leading dimensions and the rows of one side.
    fn of(side: &Described, name: Side) -> Result<(Vec<usize>, Rows), SegmentsError> {
        let ids = &side.ids;
        let length = ids.row_length("ids")?;
        if let Some(row) = ids.values.iter().position(|&id| id < 0) {
            return Err(SegmentsError::Negative { side: name, row, id: ids.values[row] });
        }
        let Some(positions) = &side.positions else {
            let rows = Rows { length, ids: ids.values.clone(), positions: positions_of(ids, None)? };
            return Ok((leading_of(&ids.shape).to_vec(), rows));
        };
        positions.row_length("positions")?;
        let shape = longer(&ids.shape, &positions.shape).ok_or_else(|| SegmentsError::Positions {
            side: name,
            ids: ids.shape.clone(),
            positions: positions.shape.clone(),
        })?;
        let leading = leading_of(&shape).to_vec();
        let count = bounded(&leading, length, name)?;
        let whole = |array: &Array| array.values.iter().copied().cycle().take(count).collect();
        Ok((leading, Rows { length, ids: whole(ids), positions: whole(positions) }))
    }

    /// Returns the rows once for each index of the leading dimensions that they lack.
    fn repeated(self, leading: &[usize], side: Side) -> Result<Rows, SegmentsError> {
        bounded(leading, 1, side)?;
        let rows = bounded(leading, self.length, side)?;
        let fill = |values: &[i32]| values.iter().copied().cycle().take(rows).collect();
        let (ids, positions) = (fill(&self.ids), fill(&self.positions));
        Ok(Rows { ids, positions, ..self })
    }

    /// Returns the segments of a batch row with their rows, in order of rows.
    fn runs(&self, batch_row: usize, side: Side) -> Result<Vec<(i32, Run)>, SegmentsError> {
        let mut runs: Vec<(i32, Run)> = Vec::new();
        let mut met = HashSet::new();
        for row in batch_row * self.length..(batch_row + 1) * self.length {
            let (id, position) = (self.ids[row], self.positions[row]);
            if id == 0 {
                continue;
            }
            if runs.last().is_none_or(|&(last, run)| last != id || run.offset + run.len != row) {
                if !met.insert(id) {
                    return Err(SegmentsError::Gap { side, row, id });
                }
                runs.push((id, Run::packed(row, 0, 0)));
            }
            if let Some((_, run)) = runs.last_mut() {
                if usize::try_from(position) != Ok(run.len) {
                    return Err(SegmentsError::Position { side, row, position, expected: run.len });
                }
                run.len += 1;
                run.span += 1;
            }
        }
        Ok(runs)
    }
}

impl Described {
    /// Returns the values of ids and positions; no positions where they are left out.
    pub(crate) fn arrays(&self) -> (&[i32], &[i32]) {
        (&self.ids.values, self.positions.as_ref().map_or(&[], |positions| &positions.values))
    }

    /// Returns the same in arrays, ids and positions, that lack the first dimensions along which they repeat where they
    /// are to. Positions count where there is an id.
    fn lacking(self, [of_ids, of_positions]: [bool; 2]) -> Described {
        let has_id: Vec<bool> = self.ids.values.iter().map(|&id| id != 0).collect();
        let positions =
            self.positions.map(|array| if of_positions { array.without_repeats(&has_id) } else { array });
        let ids = if of_ids { self.ids.without_repeats(&vec![true; has_id.len()]) } else { self.ids };
        Described { ids, positions }
    }

    /// Returns the number of dimensions before the last one, of the ids or the positions, whichever have more.
    fn extra_dimensions(&self) -> usize {
        let of_positions = self.positions.as_ref().map_or(0, |positions| positions.shape.len());
        self.ids.shape.len().max(of_positions).saturating_sub(1)
    }
}

impl Array {
    /// Returns the array without as many of its first dimensions as it repeats along, the last one kept. Values that
    /// do not count are like any others.
    fn without_repeats(self, counts: &[bool]) -> Array {
        for lacked in (1..self.shape.len()).rev() {
            let shape = &self.shape[lacked..];
            let mut one = vec![None; shape.iter().product()];
            let mut places = (0..self.values.len()).filter(|&place| counts[place]);
            let period = one.len();
            let repeats = places
                .all(|place| *one[place % period].get_or_insert(self.values[place]) == self.values[place]);
            if repeats {
                let values = one.into_iter().map(Option::unwrap_or_default).collect();
                return Array { shape: shape.to_vec(), values };
            }
        }
        self
    }

    /// Returns the number of rows of a batch row, once the values are as many as the shape says.
    fn row_length(&self, what: &'static str) -> Result<usize, SegmentsError> {
        let &last = self.shape.last().ok_or(SegmentsError::NoDimension { what })?;
        let count = self.shape.iter().try_fold(1_usize, |count, &dim| count.checked_mul(dim));
        if count != Some(self.values.len()) {
            let shape = self.shape.clone();
            return Err(SegmentsError::Values { what, shape, values: self.values.len() });
        }
        Ok(last)
    }
}

/// Returns the positions that ids alone mean: the rows of each segment count from 0. `order` has, where the rows of
/// each batch row were reordered to balance ranks, the place of each before that; a segment counts in that order then.
pub fn positions_of(ids: &Array, order: Option<&[usize]>) -> Result<Vec<i32>, SegmentsError> {
    let length = ids.row_length("ids")?;
    let mut positions = vec![0; ids.values.len()];
    for first in (0..ids.values.len()).step_by(length.max(1)) {
        let mut rows: Vec<usize> = (0..length).collect();
        if let Some(order) = order {
            rows.sort_by_key(|&row| order.get(row).copied().unwrap_or(usize::MAX));
        }
        let mut met = HashMap::new();
        for row in rows {
            let id = ids.values[first + row];
            let count = met.entry(id).or_insert(0);
            if id != 0 {
                positions[first + row] = *count;
                *count += 1;
            }
        }
    }
    Ok(positions)
}

/// Returns the length of each batch row of a padded batch (BSHD), whose real rows come first and are one segment.
pub fn lengths_of(ids: &Array, side: Side) -> Result<Vec<usize>, SegmentsError> {
    let length = ids.row_length("ids")?;
    let mut lengths = Vec::new();
    if length == 0 {
        return Ok(vec![0; bounded(leading_of(&ids.shape), 1, side)?]);
    }
    for (batch_row, row_ids) in ids.values.chunks(length).enumerate() {
        let len = row_ids.iter().take_while(|&&id| id != 0 && id == row_ids[0]).count();
        if let Some(at) = row_ids[len..].iter().position(|&id| id != 0) {
            let row = batch_row * length + len + at;
            return Err(SegmentsError::Gap { side, row, id: ids.values[row] });
        }
        lengths.push(len);
    }
    Ok(lengths)
}

/// Returns ids and positions of q and of kv that say the sequences: ids count the sequences of a batch row from 1, and
/// rows that hold no token have the id 0 and the position 0. There are as many batch rows as sequences allow, none of
/// which lies in two. An array whose batch rows are all the same lacks that dimension, as under `vmap` of the others
/// alone.
pub fn described(sequences: &[Sequence], rows: TensorRows) -> [Described; 2] {
    let count = batch_rows(sequences, rows);
    let leading = if count > 1 { vec![count] } else { Vec::new() };
    let [q, kv] = numbered(sequences, rows, &leading);
    let (short, kv) = (q.clone().lacking([true; 2]), kv.lacking([true; 2]));
    // Some array has to say how many batch rows there are.
    let ids = if kv.ids.shape.len() == 1 { q.ids } else { short.ids };
    [Described { ids, ..short }, kv]
}

/// Returns ids and positions that say the sequences, as [`described`], under several leading dimensions: the prime
/// factors of the number of batch rows, as under `vmap` of `vmap`. There are four arrays: ids and positions of q, and
/// those of kv. An array whose bit of `lacking` is set, the first array's bit being the lowest, lacks the first
/// dimensions along which it repeats, as far as it can be broadcast again.
pub fn batched(sequences: &[Sequence], rows: TensorRows, lacking: u64) -> [Described; 2] {
    let leading = factors(batch_rows(sequences, rows));
    let whole = numbered(sequences, rows, &leading);
    let lacks = |side: usize| [0, 1].map(|array| lacking >> (2 * side + array) & 1 == 1);
    let [q, kv] = whole.clone();
    let mut sides = [q.lacking(lacks(0)), kv.lacking(lacks(1))];
    for side in 0..2 {
        let [own, other] = [side, 1 - side].map(|side| sides[side].extra_dimensions());
        // A side is broadcast from a batch dimension at most, and to all dimensions of the other.
        if own < leading.len() && (own > 1 || other < leading.len()) {
            sides[side].ids = whole[side].ids.clone();
        }
    }
    sides
}

/// Returns ids that say nothing: extra dimensions of both sides, before a batch of one row, that differ. They are (n) of
/// q, the number of batch rows. Where n is a product those of kv are (a, n / a): as many elements, and nothing says which
/// belong to which. Where it is a prime they are (m), another number that divides the rows of kv. `None` where there is
/// no such number.
pub fn misshapen(sequences: &[Sequence], rows: TensorRows) -> Option<[Described; 2]> {
    let count = batch_rows(sequences, rows);
    let of_kv = contradicting(count, rows.kv)?;
    let [q, kv] = numbered(sequences, rows, &[count]);
    let shaped = |side: Described, extra: &[usize], rows: usize| {
        let shape = [extra, &[1, rows / extra.iter().product::<usize>()]].concat();
        Described { ids: Array { shape, ..side.ids }, positions: None }
    };
    Some([shaped(q, &[count], rows.q), shaped(kv, &of_kv, rows.kv)])
}

/// Returns extra dimensions that contradict a number of batch rows, in so many rows (see [`misshapen`]).
fn contradicting(count: usize, rows: usize) -> Option<Vec<usize>> {
    let first = *factors(count).first()?;
    if first < count {
        return Some(vec![first, count / first]);
    }
    let another = (2..=rows).find(|&other| other != count && rows.is_multiple_of(other))?;
    Some(vec![another])
}

/// Returns the prime factors of a number, the smallest first; none of 0 and of 1.
fn factors(mut number: usize) -> Vec<usize> {
    let mut found = Vec::new();
    for factor in 2.. {
        while number > 1 && number.is_multiple_of(factor) {
            found.push(factor);
            number /= factor;
        }
        if number <= 1 {
            break;
        }
    }
    found
}

/// Returns ids and positions of both sides, as [`described`], in arrays that have all of these leading dimensions.
pub(crate) fn numbered(sequences: &[Sequence], rows: TensorRows, leading: &[usize]) -> [Described; 2] {
    let count: usize = leading.iter().product();
    let lengths = [rows.q / count, rows.kv / count];
    let mut numbers = vec![0; count];
    let mut sides = [rows.q, rows.kv].map(|rows| (vec![0; rows], vec![0; rows]));
    for sequence in sequences {
        let Some(batch_row) = ends_of(sequence, lengths).next() else { continue };
        numbers[batch_row] += 1;
        for ((ids, positions), run) in sides.iter_mut().zip([sequence.q, sequence.kv]) {
            for (position, row) in (0..).zip(run.real_rows()) {
                (ids[row], positions[row]) = (numbers[batch_row], position);
            }
        }
    }
    let [(q_ids, q_positions), (kv_ids, kv_positions)] = sides;
    let side = |ids, positions, length: usize| {
        let array = |values| Array { shape: [leading, &[length]].concat(), values };
        Described { ids: array(ids), positions: Some(array(positions)) }
    };
    [side(q_ids, q_positions, lengths[0]), side(kv_ids, kv_positions, lengths[1])]
}

/// Returns the largest number of batch rows into which the rows of both sides divide so that no sequence lies in two;
/// at most one for each sequence, and at least 1.
pub(crate) fn batch_rows(sequences: &[Sequence], rows: TensorRows) -> usize {
    let fits = |count: &usize| {
        let lengths = [rows.q / count, rows.kv / count];
        let in_one = |sequence: &Sequence| {
            let mut ends = ends_of(sequence, lengths);
            let first = ends.next();
            ends.all(|batch_row| Some(batch_row) == first)
        };
        rows.q.is_multiple_of(*count) && rows.kv.is_multiple_of(*count) && sequences.iter().all(in_one)
    };
    (1..=sequences.len()).rev().find(fits).unwrap_or(1)
}

/// Returns the batch rows of a sequence's first and last real row on each side, for batch rows of these lengths.
fn ends_of(sequence: &Sequence, lengths: [usize; 2]) -> impl Iterator<Item = usize> {
    let sides = [sequence.q, sequence.kv].into_iter().zip(lengths).filter(|(run, _)| run.len > 0);
    sides.flat_map(|(run, length)| [0, run.len - 1].map(|position| run.row(position) / length))
}

fn leading_of(shape: &[usize]) -> &[usize] {
    &shape[..shape.len() - 1]
}

/// Returns the leading dimensions of both sides, where one that has a batch dimension at most is broadcast.
fn of_both(q: &[usize], kv: &[usize]) -> Option<Vec<usize>> {
    longer(q, kv).filter(|_| q == kv || q.len().min(kv.len()) <= 1)
}

/// Returns the longer of two shapes, if the shorter one ends it.
fn longer(a: &[usize], b: &[usize]) -> Option<Vec<usize>> {
    let (long, short) = if a.len() < b.len() { (b, a) } else { (a, b) };
    long.ends_with(short).then(|| long.to_vec())
}

/// Returns the number of rows of batch rows of `length`, which a problem's tensor may have.
fn bounded(leading: &[usize], length: usize, side: Side) -> Result<usize, SegmentsError> {
    let rows = leading.iter().try_fold(length, |rows, &dim| rows.checked_mul(dim)).unwrap_or(usize::MAX);
    if rows > ROWS_MAX {
        return Err(SegmentsError::TooManyRows { side, rows, most: ROWS_MAX });
    }
    Ok(rows)
}
