//! The pairs of pieces: how many (query, key) pairs the mask shows of a piece of queries and a piece of keys, and that the
//! segments of the two are exactly these pairs.
//!
//! Sequences with equal lengths and spans are of one *kind*: their segments differ in offsets of rows alone. Under a
//! mask that is a band, segments of two pieces depend on the pieces' lengths and on the *distance* from the first key to
//! the first query ([`band`](crate::schedule::band) reads nothing else). One pair of pieces of each kind, distance and lengths is
//! therefore examined; under any other mask, every pair of pieces is. An examination compares each query of the piece,
//! as the segments show it, with the mask's own definition.

use std::collections::HashMap;
use std::ops::Range;

use rayon::prelude::*;
use seamproof_oracle::sharding::{Piece, PlacedRun};
use seamproof_oracle::{Intervals, Mask, Run};

use super::super::all_gather::{one_by_one, prefix_segments};
use super::super::build::{self, Shards, Unseeing};
use super::super::stripes::PARTS;
use super::striped;
use crate::Segment;
use crate::helpers::{all_gather_segment, residue_segment, ring_segment};
use crate::shard::ShardedSide;

/// A pair of pieces whose segments are not what the mask shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "sequence {sequence}: segments of {queries:?} do not show the query at {query} what the mask does of {keys:?}"
)]
pub struct WrongSegments {
    /// The sequence.
    pub sequence: usize,
    /// The queries.
    pub queries: PieceId,
    /// The keys; all of them if absent.
    pub keys: Option<PieceId>,
    /// Position of the query, or of the first one.
    pub query: usize,
}

/// Manner in which the segments of two pieces are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lowering {
    /// For a step of a ring: what sees nothing is left out.
    Step,
    /// For whole sequences: every row of both sides is named.
    Whole,
    /// For gathered keys: the keys up to the last one that is seen, and every query.
    Prefix,
    /// The same for queries that lie apart, each alone. Of a forward, where two queries may name a key.
    Rows,
    /// For gathered keys and queries that lie apart: every n-th key, for n ranks. What sees nothing is left out.
    Residues,
    /// For a step of a ring between slots in stripes of several rows, in parts.
    Stripes(usize),
}

impl Lowering {
    /// Returns the number of parts of a slot of queries and of a slot of keys, of the longest ones.
    pub(super) fn parts(self, pieces: &Shards) -> [usize; 2] {
        let of = |side: &ShardedSide| side.parts().unwrap_or_else(|| side.stripes_most());
        match self {
            Lowering::Stripes(_) => [1, PARTS],
            Lowering::Residues => [1, pieces.kv.cp],
            _ => [of(&pieces.q), of(&pieces.kv)],
        }
    }

    /// Returns the number of owners of keys.
    fn owners(self, pieces: &Shards) -> usize {
        if self == Lowering::Residues { 1 } else { pieces.kv.cp }
    }

    /// Whether segments name every row of a piece of queries, and of keys. A table names no padding, and of gathered keys
    /// every real query.
    fn names(self, is_told: bool) -> [bool; 2] {
        match self {
            Lowering::Whole if is_told => [false; 2],
            Lowering::Step | Lowering::Stripes(_) | Lowering::Residues => [false; 2],
            Lowering::Whole => [true; 2],
            Lowering::Prefix | Lowering::Rows => [true, false],
        }
    }

    /// Returns the number of parts of a line of keys.
    fn of_line(self) -> usize {
        if matches!(self, Lowering::Stripes(_)) { PARTS } else { 1 }
    }

    fn segments(self, mask: &Mask, lengths: (usize, usize), q: &PlacedRun, kv: &PlacedRun) -> Vec<Segment> {
        let keys = (&kv.piece, kv.local);
        match self {
            Lowering::Step => build::segments(mask, lengths, q, keys, Unseeing::Dropped),
            Lowering::Whole => build::segments(mask, lengths, q, keys, Unseeing::Kept),
            Lowering::Stripes(_) => Vec::new(),
            Lowering::Prefix => prefix_segments(mask, lengths, q, (kv.local, 0, 1), Unseeing::Queries),
            Lowering::Rows => {
                let alone =
                    |q: &PlacedRun| prefix_segments(mask, lengths, q, (kv.local, 0, 1), Unseeing::Queries);
                one_by_one(q).iter().flat_map(alone).collect()
            }
            Lowering::Residues => {
                let Piece { start, step, .. } = kv.piece;
                let whole = Run { offset: kv.local.offset - start * (kv.local.step / step), ..kv.local };
                let whole = Run { step: kv.local.step / step, ..whole };
                prefix_segments(mask, lengths, q, (whole, start, step), Unseeing::Dropped)
            }
        }
    }
}

/// Sequences of one kind.
///
/// A pair of pieces has a *cell*: the place of the queries and that of the keys, added. Pieces that are examined together
/// have one cell.
#[derive(Clone, Debug)]
struct Kind {
    /// Number of sequences.
    count: usize,
    /// Number of parts of a slot of queries.
    parts: usize,
    /// Places of pieces by member and part: all parts of a member follow each other.
    queries: Vec<isize>,
    keys: Vec<isize>,
    /// Numbers of pairs, by cell.
    counts: Vec<u64>,
    /// Pairs that the mask shows each piece of queries.
    shown: Vec<u64>,
}

/// A piece of a side, by ring member and part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PieceId {
    /// The ring's member.
    pub member: usize,
    /// The part of the member's slot.
    pub part: usize,
}

/// The pairs of all pieces of a problem, as a ring's members hold them.
#[derive(Clone, Debug)]
pub struct PiecePairs {
    /// Number of parts of a slot of queries and of a slot of keys.
    parts: [usize; 2],
    kinds: Vec<Kind>,
    /// Number of pieces of the keys.
    pieces: usize,
    /// Whether some query of a piece sees a key of a piece, by the pieces' indices.
    seen: Vec<bool>,
}

impl PiecePairs {
    /// Examines all pairs of pieces.
    pub(super) fn new(
        mask: &Mask,
        shards: &Shards,
        (lowering, is_told): (Lowering, bool),
    ) -> Result<PiecePairs, WrongSegments> {
        let parts = lowering.parts(shards);
        let mut counted: HashMap<[usize; 4], (usize, usize)> = HashMap::new();
        for (sequence, (q, kv)) in shards.q.slots.iter().zip(&shards.kv.slots).enumerate() {
            counted.entry([q.len, q.span, kv.len, kv.span]).or_insert((sequence, 0)).1 += 1;
        }
        let mut firsts: Vec<(usize, usize)> = counted.into_values().collect();
        firsts.sort_unstable();
        let kinds = firsts
            .into_par_iter()
            .map(|(sequence, count)| Kinship { mask, shards, lowering, is_told, sequence }.kind(count));
        let kinds: Vec<Kind> = kinds.collect::<Result<_, _>>()?;
        let pieces = lowering.owners(shards) * parts[1];
        let sees = |place: usize| {
            let (q, kv) = (place / pieces, place % pieces);
            let queries = PieceId { member: q / parts[0], part: q % parts[0] };
            kinds.iter().any(|kind| kind.pairs(queries, kv) > 0)
        };
        let seen = (0..shards.q.cp * parts[0] * pieces).into_par_iter().map(sees).collect();
        Ok(PiecePairs { parts, kinds, pieces, seen })
    }

    /// Returns the number of parts of a slot of queries and of a slot of keys, of the longest ones.
    pub fn parts(&self) -> [usize; 2] {
        self.parts
    }

    /// Whether some query of a piece sees a key of a piece, in any sequence.
    pub fn sees(&self, queries: PieceId, keys: PieceId) -> bool {
        self.seen(queries, keys.member).get(keys.part).copied().unwrap_or(false)
    }

    /// Returns for each part of an owner's keys whether some query of a piece sees one of its keys, in any sequence.
    pub fn seen(&self, queries: PieceId, owner: usize) -> &[bool] {
        let [q_parts, kv_parts] = self.parts;
        let (q, first) = (queries.member * q_parts + queries.part, owner * kv_parts);
        let is_there = queries.part < q_parts && first < self.pieces;
        let start = q * self.pieces + first;
        self.seen.get(start..start + kv_parts).filter(|_| is_there).unwrap_or(&[])
    }

    /// Returns the number of pairs that the mask shows a piece of queries, over all sequences.
    pub fn shown(&self, queries: PieceId) -> u64 {
        let of_kind = |kind: &Kind| kind.shown.get(kind.index(queries)?).copied();
        let of = |kind: &Kind| kind.count as u64 * of_kind(kind).unwrap_or(0);
        self.kinds.iter().map(of).sum()
    }
}

impl Kind {
    /// Returns the index of a piece of queries; `None` where a slot has no such part.
    fn index(&self, PieceId { member, part }: PieceId) -> Option<usize> {
        (part < self.parts).then_some(member * self.parts + part)
    }

    /// Returns a number of pairs. A kind without queries or keys has no pieces.
    fn pairs(&self, queries: PieceId, kv: usize) -> u64 {
        let queries = self.index(queries).and_then(|index| self.queries.get(index));
        let (Some(queries), Some(keys)) = (queries, self.keys.get(kv)) else { return 0 };
        self.counts.get((queries + keys) as usize).copied().unwrap_or(0)
    }
}

/// Rows that are examined together: a piece, or a slot in stripes of several rows.
struct Line {
    id: PieceId,
    start: usize,
    /// Positions of the real rows, in order.
    positions: Vec<usize>,
    /// The piece, if it is one.
    placed: Option<PlacedRun>,
}

/// A sequence whose pieces are examined.
struct Kinship<'a> {
    mask: &'a Mask,
    shards: &'a Shards,
    lowering: Lowering,
    /// Whether a table says the segments.
    is_told: bool,
    sequence: usize,
}

impl Kinship<'_> {
    fn kind(&self, count: usize) -> Result<Kind, WrongSegments> {
        let (lq, lk) = self.lengths();
        let queries = self.lines(&self.shards.q);
        let keys = match self.lowering {
            Lowering::Residues => self.residues(),
            _ => self.lines(&self.shards.kv),
        };
        let shown = |line: &Line| {
            let of = |position: &usize| self.mask.visible(*position, lq, lk).len() as u64;
            line.positions.iter().map(of).sum()
        };
        let shown = queries.iter().map(shown).collect();
        let [q_places, kv_places] = match self.mask.is_band() {
            true => self.by_distance(&queries, &keys),
            false => {
                let of_keys = keys.len() * self.lowering.of_line();
                let rows = (0..queries.len()).map(|q| (q * of_keys) as isize).collect();
                [rows, (0..of_keys as isize).collect()]
            }
        };
        let last = |places: &[isize]| places.iter().max().copied().unwrap_or(0);
        let cells = last(&q_places) + last(&kv_places) + 1;
        let counts = vec![UNSEEN; cells as usize];
        let parts = queries.len() / self.shards.q.cp;
        let mut kind = Kind { count, parts, queries: q_places, keys: kv_places, counts, shown };
        self.examine(&mut kind, &queries, &keys)?;
        Ok(kind)
    }

    /// Returns the places of lines for which equal cells are equal distances, lengths and parts of a line.
    fn by_distance(&self, queries: &[Line], keys: &[Line]) -> [Vec<isize>; 2] {
        let all = || queries.iter().chain(keys);
        let mut lens: Vec<usize> = all().map(|line| line.positions.len()).collect();
        lens.sort_unstable();
        lens.dedup();
        let unit = all().map(|line| line.start).fold(0, gcd).max(1);
        let most = all().map(|line| line.start / unit).max().unwrap_or(0) as isize;
        // Distances are from −most to most.
        let (width, parts) = (2 * most + 1, self.lowering.of_line());
        let len = |line: &Line| lens.partition_point(|len| *len < line.positions.len());
        let start = |line: &Line| (line.start / unit) as isize;
        let of_keys = (lens.len() * parts) as isize;
        let query = |line: &Line| len(line) as isize * of_keys * width + start(line) + most;
        let key = |(line, part): (&Line, usize)| (len(line) * parts + part) as isize * width - start(line);
        let parts_of = |line| (0..parts).map(move |part| (line, part));
        [queries.iter().map(query).collect(), keys.iter().flat_map(parts_of).map(key).collect()]
    }

    fn lengths(&self) -> (usize, usize) {
        (self.shards.q.slots[self.sequence].len, self.shards.kv.slots[self.sequence].len)
    }

    /// Returns the lines of the sequence, by member and part; none of an empty slot.
    fn lines(&self, side: &ShardedSide) -> Vec<Line> {
        let sequence = self.sequence;
        let slot = |member: usize, width: usize| Line {
            id: PieceId { member, part: 0 },
            start: member * width,
            positions: striped::positions(side, sequence, member),
            placed: None,
        };
        let piece = |member: usize, (part, piece): (usize, Piece)| {
            let local = side.local(sequence, &piece);
            let positions = (0..local.len).map(|row| piece.start + piece.step * row).collect();
            let placed = Some(PlacedRun { sequence, piece, local });
            Line { id: PieceId { member, part }, start: piece.start, positions, placed }
        };
        match self.lowering {
            _ if side.slots[sequence].span == 0 => Vec::new(),
            Lowering::Stripes(width) => (0..side.cp).map(|member| slot(member, width)).collect(),
            _ => {
                let of = |member| side.pieces(sequence, member).enumerate().map(move |part| (member, part));
                (0..side.cp).flat_map(of).map(|(member, part)| piece(member, part)).collect()
            }
        }
    }

    /// Returns every n-th gathered key as a line, for n ranks; none of a sequence without rows.
    fn residues(&self) -> Vec<Line> {
        let (side, sequence) = (&self.shards.kv, self.sequence);
        let (gathered, step) = (side.gathered(sequence), side.cp);
        let residue = |part: usize| {
            let span = side.slots[sequence].span;
            let len = gathered.len.saturating_sub(part).div_ceil(step);
            let offset = gathered.offset + gathered.step * part;
            let local = Run { offset, step: gathered.step * step, len, span };
            let piece = Piece { start: part, step, span, at: 0 };
            let positions = (0..len).map(|row| part + step * row).collect();
            let placed = Some(PlacedRun { sequence, piece, local });
            Line { id: PieceId { member: 0, part }, start: part, positions, placed }
        };
        let count = if side.slots[sequence].span == 0 { 0 } else { step };
        (0..count).map(residue).collect()
    }

    /// Fills the numbers of pairs. Those of each piece of queries must add up to what the mask shows it, where some stand for
    /// other distances than were examined, too.
    fn examine(&self, kind: &mut Kind, queries: &[Line], keys: &[Line]) -> Result<(), WrongSegments> {
        let (parts, counts) = (self.lowering.of_line(), &mut kind.counts);
        for ((line, place), shown) in queries.iter().zip(&kind.queries).zip(&kind.shown) {
            let mut total = 0;
            for (of, places) in keys.iter().zip(kind.keys.chunks(parts)) {
                if counts[(place + places[0]) as usize] == UNSEEN {
                    let made =
                        self.pairs(line, of).map_err(|query| wrong(line, Some(of), query, self.sequence))?;
                    for (of, pairs) in places.iter().zip(made) {
                        counts[(place + of) as usize] = pairs;
                    }
                }
                total += places.iter().map(|of| counts[(place + of) as usize]).sum::<u64>();
            }
            if total != *shown {
                return Err(wrong(line, None, line.start, self.sequence));
            }
        }
        Ok(())
    }

    /// Returns the number of pairs of each part of two lines, or the position of a query that is shown something else than
    /// the mask shows it.
    fn pairs(&self, queries: &Line, keys: &Line) -> Result<[u64; PARTS], usize> {
        if let (Some(q), Some(kv)) = (&queries.placed, &keys.placed) {
            let made = self.segments(q, kv).ok_or(queries.start)?;
            let only = pairs(self.mask, self.lengths(), q, kv, (self.lowering, self.is_told), &made)?;
            return Ok([only, 0, 0, 0, 0, 0, 0]);
        }
        let Lowering::Stripes(width) = self.lowering else { return Err(queries.start) };
        let slots = striped::Slots {
            mask: self.mask,
            shards: self.shards,
            sequence: self.sequence,
            positions: [&queries.positions, &keys.positions],
            members: [queries.id.member, keys.id.member],
            width,
            is_told: self.is_told,
        };
        slots.pairs()
    }

    /// Returns the segments of two pieces; `None` if no table says them and one should.
    fn segments(&self, q: &PlacedRun, kv: &PlacedRun) -> Option<Vec<Segment>> {
        if !self.is_told {
            return Some(self.lowering.segments(self.mask, self.lengths(), q, kv));
        }
        let (mask, sides, sequence) = (self.mask, [&self.shards.q, &self.shards.kv], self.sequence);
        let row = match self.lowering {
            Lowering::Prefix => all_gather_segment(mask, sides, sequence, &q.piece)?,
            Lowering::Rows => {
                let alone = one_by_one(q);
                let row = |q: &PlacedRun| all_gather_segment(mask, sides, sequence, &q.piece);
                return alone.iter().map(|q| Some(row(q)?.segment())).collect();
            }
            Lowering::Residues => residue_segment(mask, sides, sequence, &q.piece, kv.piece.start)?,
            _ => ring_segment(mask, sides, sequence, (q.piece, kv.piece))?,
        };
        Some(vec![row.segment()])
    }
}

fn wrong(queries: &Line, keys: Option<&Line>, query: usize, sequence: usize) -> WrongSegments {
    WrongSegments { sequence, queries: queries.id, keys: keys.map(|line| line.id), query }
}

/// Stands for a pair of pieces that has not been examined.
const UNSEEN: u64 = u64::MAX;

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Returns the number of pairs of two pieces of a sequence, or the position of a query for which their segments are not
/// what the mask shows. Segments name rows of their pieces alone, each at most once, and padding as padding. They name all
/// the rows that the lowering says.
fn pairs(
    mask: &Mask,
    (lq, lk): (usize, usize),
    q: &PlacedRun,
    kv: &PlacedRun,
    (lowering, is_told): (Lowering, bool),
    made: &[Segment],
) -> Result<u64, usize> {
    let (mut next, mut next_key, mut named) = (0, 0, [0; 2]);
    let mut shown: Vec<(Range<usize>, usize, &Segment)> = Vec::with_capacity(made.len());
    for segment in made {
        let [keys] = &segment.kv[..] else { return Err(q.piece.start) };
        let (rows, of) = (indices(&q.local, &segment.q, next), indices(&kv.local, keys, next_key));
        let next_of = |end: usize| if lowering == Lowering::Rows { 0 } else { end };
        let (Some(rows), Some(of)) = (rows, of) else { return Err(q.piece.start) };
        (next, next_key) = (rows.start + segment.q.span, next_of(of.start + keys.span));
        named = [named[0] + segment.q.span, named[1] + keys.span];
        shown.push((rows, of.start, segment));
    }
    let queries = if is_told { q.local.len } else { q.local.span };
    let (all, named_all) = ([queries, kv.local.span], lowering.names(is_told));
    let are_named = (0..2).all(|side| !named_all[side] || named[side] == all[side]);
    if !are_named {
        return Err(q.piece.start);
    }
    let (mut total, mut shown) = (0, shown.into_iter().peekable());
    for index in 0..q.local.len {
        let position = q.piece.start + q.piece.step * index;
        let wanted = on_piece(&mask.visible(position, lq, lk), &kv.piece, kv.local.len);
        while shown.next_if(|(rows, ..)| rows.end <= index).is_some() {}
        let got = match shown.peek().filter(|(rows, ..)| rows.contains(&index)) {
            Some((rows, first, segment)) => segment.visible(index - rows.start).moved(|key| key + first),
            None => Intervals::default(),
        };
        if got != wanted {
            return Err(position);
        }
        total += wanted.len() as u64;
    }
    Ok(total)
}

/// Returns which real rows of a piece's run a part of it names; `None` if it names others, or one before `from`.
pub(super) fn indices(run: &Run, part: &Run, from: usize) -> Option<Range<usize>> {
    if part.span == 0 {
        return Some(from..from);
    }
    let start = part.offset.checked_sub(run.offset)?;
    let first = start / run.step;
    let is_inside = start.is_multiple_of(run.step) && part.step == run.step && first >= from;
    let is_padding = part.span == part.len || first + part.len == run.len;
    let fits = first + part.len <= run.len && first + part.span <= run.span;
    (is_inside && is_padding && fits).then_some(first..first + part.len)
}

/// Returns the indices of a piece's real rows, of which there are `len`, whose positions are among some.
fn on_piece(positions: &Intervals, piece: &Piece, len: usize) -> Intervals {
    let index = |position: usize| position.saturating_sub(piece.start).div_ceil(piece.step).min(len);
    let mut parts = positions.parts().map(|part| index(part.start)..index(part.end));
    Intervals::new(parts.next().unwrap_or(0..0), parts.next().unwrap_or(0..0))
}
