//! The contents of buffers: [`Symbol`]s on intervals of rows, for *bands* of heads.
//!
//! The rows of a band are a sorted list of [`SymbolRows`] without a gap. Lists are shared: a move of every row of some
//! heads takes the list without a copy, and a list is copied only when one of its owners writes. A shared list serves
//! heads of different numbers. A band therefore has a *shift*: head h of the buffer is head `h + head + shift` of the
//! tensor of a symbol of its list.

use std::cell::Cell;
use std::ops::Range;
use std::rc::Rc;

use seamproof_oracle::Run;

use super::symbol::{Symbol, SymbolRows, append};

/// Largest number of pieces that are written one by one. More are written in one pass over the list.
const SINGLY_MAX: usize = 4;

/// Heads whose rows are alike.
#[derive(Clone, Debug)]
pub(super) struct HeadBand {
    heads: Range<usize>,
    shift: isize,
    /// Pieces in order, without a gap: every row of the buffer is in one piece.
    pieces: Rc<Vec<SymbolRows>>,
    /// Index of the piece at which the last read ended. The next read mostly goes on there.
    last_read: Cell<usize>,
}

impl HeadBand {
    /// Returns the band of some of its heads, which become the heads from `first` on.
    fn moved(&self, heads: &Range<usize>, first: usize) -> HeadBand {
        let shift = self.shift + heads.start as isize - first as isize;
        HeadBand { heads: first..first + heads.len(), shift, ..self.clone() }
    }

    /// Writes pieces with rows of the buffer, sorted and disjoint, over the old ones.
    fn write(&mut self, mut written: Vec<SymbolRows>, first: usize, rows: usize) {
        for piece in &mut written {
            let symbol = std::mem::replace(&mut piece.symbol, Symbol::Zero);
            piece.symbol = symbol.shift_heads(first as isize + self.shift);
        }
        if written.len() <= SINGLY_MAX {
            let pieces = Rc::make_mut(&mut self.pieces);
            written.into_iter().for_each(|piece| put(pieces, piece));
            return;
        }
        if let Some(places) = fits(&self.pieces, &written) {
            let pieces = Rc::make_mut(&mut self.pieces);
            places.iter().zip(written).for_each(|(&place, piece)| pieces[place] = piece);
            join(pieces, &places);
            return;
        }
        let whole = written.iter().map(|piece| piece.len).sum::<usize>() == rows;
        let old = if whole { Rc::default() } else { std::mem::take(&mut self.pieces) };
        self.pieces = Rc::new(overlay(Rc::unwrap_or_clone(old), written));
    }
}

/// Content of one buffer.
#[derive(Clone, Debug)]
pub(super) struct Content {
    rows: usize,
    /// Bands in order of heads, without a gap.
    bands: Vec<HeadBand>,
}

impl Content {
    pub(super) fn new(rows: usize, heads: usize, symbol: Symbol) -> Content {
        let pieces = if rows > 0 { vec![SymbolRows { at: 0, len: rows, symbol }] } else { Vec::new() };
        let band = HeadBand { heads: 0..heads, shift: 0, pieces: Rc::new(pieces), last_read: Cell::new(0) };
        Content { rows, bands: vec![band] }
    }

    /// Returns the heads at which bands begin or end.
    pub(super) fn cuts(&self) -> impl Iterator<Item = usize> {
        self.bands.iter().map(|band| band.heads.start)
    }

    /// Whether a run is every row of the buffer, in order.
    pub(super) fn is_whole(&self, run: &Run) -> bool {
        run.offset == 0 && run.step == 1 && run.len == self.rows
    }

    /// Returns the rows of runs, one after the other, for heads of one band. Head 0 of the symbols is `heads.start`.
    pub(super) fn read(&self, runs: &[Run], heads: &Range<usize>) -> Vec<SymbolRows> {
        let mut pieces = Vec::new();
        if let Some(band) = self.bands.get(self.band_at(heads.start)) {
            let (mut at, mut next) = (0, band.last_read.get());
            for run in runs {
                next = read(&band.pieces, run, (at, next), &mut pieces);
                at += run.len;
            }
            band.last_read.set(next);
            for piece in &mut pieces {
                let symbol = std::mem::replace(&mut piece.symbol, Symbol::Zero);
                piece.symbol = symbol.shift_heads(-(heads.start as isize + band.shift));
            }
        }
        pieces
    }

    /// Returns every row of some heads as bands for [`Content::replace`], from head `first` on.
    pub(super) fn bands(&self, heads: &Range<usize>, first: usize) -> Vec<HeadBand> {
        let inside = self.bands[self.band_at(heads.start)..].iter();
        let clipped = inside.take_while(|band| band.heads.start < heads.end).map(|band| {
            let mine = band.heads.start.max(heads.start)..band.heads.end.min(heads.end);
            band.moved(&mine, first + mine.start - heads.start)
        });
        clipped.filter(|band| !band.heads.is_empty()).collect()
    }

    /// Replaces every row of some heads with the rows of the bands.
    pub(super) fn replace(&mut self, bands: Vec<HeadBand>) {
        let (Some(first), Some(last)) = (bands.first(), bands.last()) else { return };
        let inside = self.inside(&(first.heads.start..last.heads.end));
        self.bands.splice(inside, bands);
    }

    /// Writes pieces that name rows of the buffer, in any order. The pieces are disjoint, because no operation writes a
    /// row twice.
    pub(super) fn write_rows(&mut self, heads: &Range<usize>, mut pieces: Vec<SymbolRows>) {
        pieces.retain(|piece| piece.len > 0);
        if heads.is_empty() || pieces.is_empty() {
            return;
        }
        pieces.sort_by_key(|piece| piece.at);
        if pieces.windows(2).any(|pair| pair[0].end() > pair[1].at) {
            pieces.into_iter().for_each(|piece| self.write_rows(heads, vec![piece]));
            return;
        }
        let inside = self.inside(heads);
        let Some((last, others)) = self.bands[inside].split_last_mut() else { return };
        for band in others {
            band.write(pieces.clone(), heads.start, self.rows);
        }
        last.write(pieces, heads.start, self.rows);
    }

    /// Returns the index of a head's band.
    fn band_at(&self, head: usize) -> usize {
        self.bands.partition_point(|band| band.heads.end <= head)
    }

    /// Returns the bands of some heads, and first splits the bands that reach beyond these heads.
    fn inside(&mut self, heads: &Range<usize>) -> Range<usize> {
        self.split(heads.start);
        self.split(heads.end);
        self.band_at(heads.start)..self.bands.partition_point(|band| band.heads.start < heads.end)
    }

    fn split(&mut self, head: usize) {
        let at = self.band_at(head);
        if let Some(band) = self.bands.get_mut(at).filter(|band| band.heads.start < head) {
            let later = HeadBand { heads: head..band.heads.end, ..band.clone() };
            band.heads.end = head;
            self.bands.insert(at + 1, later);
        }
    }
}

/// Returns pieces that count rows within a run as pieces that count rows of the buffer.
pub(super) fn on_rows(
    run: &Run,
    pieces: impl IntoIterator<Item = SymbolRows>,
) -> impl Iterator<Item = SymbolRows> {
    let Run { offset, step, .. } = *run;
    pieces.into_iter().flat_map(move |SymbolRows { at, len, symbol }| {
        // Rows that lie apart are one piece each.
        let (count, size) = if step == 1 { (len.min(1), len) } else { (len, 1) };
        (0..count).map(move |index| SymbolRows {
            at: offset + step * (at + index),
            len: size,
            symbol: symbol.advance(index),
        })
    })
}

/// Appends the rows of a run, whose row 0 becomes row `at`. The search begins at piece `next`. Returns the piece at
/// which it ended.
fn read(pieces: &[SymbolRows], run: &Run, (at, mut next): (usize, usize), to: &mut Vec<SymbolRows>) -> usize {
    let mut index = 0;
    while index < run.len {
        let row = run.offset + run.step * index;
        next = piece_of(pieces, row, next);
        let Some(piece) = pieces.get(next) else { return next };
        let rows = ((piece.end() - row - 1) / run.step + 1).min(run.len - index);
        let symbol = piece.symbol.advance(row - piece.at).every(run.step);
        append(to, SymbolRows { at: at + index, len: rows, symbol });
        index += rows;
    }
    next
}

/// Returns the index of a row's piece. It tries `guess` and the next piece before it searches.
fn piece_of(pieces: &[SymbolRows], row: usize, guess: usize) -> usize {
    let holds = |place: &usize| pieces.get(*place).is_some_and(|piece| piece.at <= row && row < piece.end());
    let near = [guess, guess + 1].into_iter().find(holds);
    near.unwrap_or_else(|| pieces.partition_point(|piece| piece.end() <= row))
}

/// Writes one piece over the old ones.
fn put(pieces: &mut Vec<SymbolRows>, piece: SymbolRows) {
    let mut first = pieces.partition_point(|other| other.end() <= piece.at);
    let Some(there) = pieces.get_mut(first) else { return };
    if there.at == piece.at && there.len == piece.len {
        there.symbol = piece.symbol;
    } else {
        let end = first + pieces[first..].partition_point(|other| other.at < piece.end());
        let before = (pieces[first].at < piece.at).then(|| pieces[first].until(piece.at));
        let after = (pieces[end - 1].end() > piece.end()).then(|| pieces[end - 1].from(piece.end()));
        let index = first + usize::from(before.is_some());
        pieces.splice(first..end, before.into_iter().chain([piece]).chain(after));
        first = index;
    }
    join(pieces, &[first]);
}

/// Returns the indices of old pieces that have exactly the rows of the new ones, which are sorted; `None` if a new
/// piece has other rows.
fn fits(old: &[SymbolRows], new: &[SymbolRows]) -> Option<Vec<usize>> {
    let mut next = 0;
    let place = |piece: &SymbolRows| {
        next += old[next..].partition_point(|other| other.at < piece.at);
        old.get(next).filter(|other| (other.at, other.len) == (piece.at, piece.len)).map(|_| next)
    };
    new.iter().map(place).collect()
}

/// Joins the pieces at some places, in order, with their neighbours where the two make one piece. A piece that joins
/// the one before it is emptied, and the empty ones are removed together at the end, because removing them singly would
/// move the later pieces each time.
fn join(pieces: &mut Vec<SymbolRows>, places: &[usize]) {
    let mut joined = None;
    for index in places.iter().rev().flat_map(|&place| [Some(place), place.checked_sub(1)]).flatten() {
        if let Some([piece, next]) = pieces.get_mut(index..index + 2)
            && next.len > 0
            && piece.join(next)
        {
            next.len = 0;
            joined = Some(index);
        }
    }
    if let Some(first) = joined {
        pieces.extract_if(first.., |piece| piece.len == 0).for_each(drop);
    }
}

/// Returns the old pieces overlaid with the new ones, which are sorted and disjoint.
fn overlay(old: Vec<SymbolRows>, new: Vec<SymbolRows>) -> Vec<SymbolRows> {
    let mut pieces = Vec::with_capacity(old.len() + new.len());
    let mut old = old.into_iter();
    let mut rest = old.next();
    for piece in new {
        while let Some(under) = rest.take_if(|under| under.at < piece.at) {
            if under.end() > piece.at {
                append(&mut pieces, under.until(piece.at));
                rest = Some(under.from(piece.at));
                break;
            }
            append(&mut pieces, under);
            rest = old.next();
        }
        while let Some(under) = rest.take_if(|under| under.at < piece.end()) {
            if under.end() > piece.end() {
                rest = Some(under.from(piece.end()));
                break;
            }
            rest = old.next();
        }
        append(&mut pieces, piece);
    }
    if let Some(rest) = rest {
        append(&mut pieces, rest);
    }
    pieces.extend(old);
    pieces.shrink_to_fit();
    pieces
}

#[cfg(test)]
mod tests {
    use seamproof_oracle::TensorName;

    use super::super::symbol::{Form, Tokens, What};
    use super::*;

    const ROWS: usize = 24;
    const HEADS: usize = 4;

    /// Position and head of the tensor in each row and head.
    type Model = Vec<[Option<(usize, isize)>; HEADS]>;

    fn tokens(start: usize, step: usize, head: isize) -> Symbol {
        let (what, form) = (What::Input(TensorName::Q), Form::default());
        Symbol::Tokens(Tokens { what, form, sequence: 0, head, start, step })
    }

    /// Compares reads of single rows and reads of long runs with the model.
    fn agree(content: &Content, model: &Model) {
        for head in 0..HEADS {
            let seen = |run: &Run| -> Vec<Option<(usize, isize)>> {
                let pieces = content.read(std::slice::from_ref(run), &(head..head + 1));
                let rows =
                    pieces.iter().flat_map(|piece| (0..piece.len).map(|row| piece.symbol.advance(row)));
                rows.map(|symbol| symbol.tokens().map(|tokens| (tokens.start, tokens.head))).collect()
            };
            let expected: Vec<_> = model.iter().map(|row| row[head]).collect();
            assert_eq!(seen(&Run::packed(0, ROWS, ROWS)), expected);
            let apart = Run { offset: 1, step: 3, len: 7, span: 7 };
            assert_eq!(seen(&apart), apart.real_rows().map(|row| expected[row]).collect::<Vec<_>>());
        }
        for band in &content.bands {
            let ends: Vec<usize> = band.pieces.iter().map(SymbolRows::end).collect();
            let begins: Vec<usize> = band.pieces.iter().map(|piece| piece.at).collect();
            assert_eq!((begins[0], &begins[1..], ends.last()), (0, &ends[..ends.len() - 1], Some(&ROWS)));
        }
    }

    /// Returns a number below `end` and advances the generator.
    fn draw(state: &mut u64, end: usize) -> usize {
        *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (*state >> 33) as usize % end
    }

    #[test]
    fn lists_hold_what_a_table_holds() {
        let mut state = 1;
        for _ in 0..200 {
            let mut content = [(); 2].map(|()| Content::new(ROWS, HEADS, Symbol::Uninitialised));
            let mut model: [Model; 2] = [(); 2].map(|()| vec![[None; HEADS]; ROWS]);
            for _ in 0..24 {
                let which = draw(&mut state, 2);
                let first = draw(&mut state, HEADS);
                let heads = first..first + 1 + draw(&mut state, HEADS - first);
                if draw(&mut state, 4) == 0 {
                    // All rows of the other content's heads from `from` on.
                    let from = draw(&mut state, HEADS - heads.len() + 1);
                    let bands = content[1 - which].bands(&(from..from + heads.len()), heads.start);
                    content[which].replace(bands);
                    for row in 0..ROWS {
                        for (index, head) in heads.clone().enumerate() {
                            model[which][row][head] = model[1 - which][row][from + index];
                        }
                    }
                } else {
                    let step = 1 + draw(&mut state, 2);
                    let len = 1 + draw(&mut state, 10);
                    let run = Run { offset: draw(&mut state, 4), step, len, span: len };
                    // Pieces of different sizes cover both ways of writing: singly, and in one pass.
                    let size = 1 + draw(&mut state, 4);
                    let start = draw(&mut state, 3) * 10;
                    let pieces = (0..len).step_by(size).map(|at| {
                        let symbol = tokens(start + at, 1, 7);
                        SymbolRows { at, len: size.min(len - at), symbol }
                    });
                    content[which].write_rows(&heads, on_rows(&run, pieces).collect());
                    for (index, row) in run.real_rows().enumerate() {
                        for head in heads.clone() {
                            // The first written head is the tensor's head 7.
                            let of_tensor = 7 + (head - heads.start) as isize;
                            model[which][row][head] = Some((start + index, of_tensor));
                        }
                    }
                }
                content.iter().zip(&model).for_each(|(content, model)| agree(content, model));
            }
        }
    }
}
