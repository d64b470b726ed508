//! Linear layers and rotations: what they make of the *form* of rows.
//!
//! A column-parallel layer takes hidden rows to rows of the rank's heads, a row-parallel one takes those to hidden rows
//! that are zero in every other head. Both work row by row, and what they compute is opaque: a row stays the row of its
//! tensor, sequence and position, on the other side of the layer. A rotation by the position of another row leaves a row
//! that no attention takes.

use std::ops::Range;

use seamproof_oracle::TensorName;

use super::content::{Form, Piece, Symbol, Tokens};
use super::error::Place;
use super::execute::{Machine, Site, ranges};
use crate::schedule::{BufferId, Layer, Rotated, RowPair, Schedule, hidden, rotates};

/// In which form a schedule's inputs and results are placed.
pub(super) fn form_outside(schedule: &Schedule, tensor: TensorName) -> Form {
    Form { hidden: schedule.sequence_parallel.is_some() && hidden(tensor).is_some(), ..Form::default() }
}

/// In which form attention takes a tensor, or makes the gradient of it.
pub(super) fn form_inside(schedule: &Schedule, tensor: TensorName) -> Form {
    let turns = i64::from(schedule.sequence_parallel.is_some() && rotates(tensor));
    Form { turns, ..Form::default() }
}

impl Machine<'_> {
    pub(super) fn linear(
        &mut self,
        place: Place,
        layer: Layer,
        heads: &Range<usize>,
        (from, to): (BufferId, BufferId),
        rows: &[RowPair],
    ) {
        let own = 0..heads.len();
        let (read, written) = match layer {
            Layer::Column => (heads, &own),
            Layer::Row => (&own, heads),
        };
        let every = 0..self.heads(to);
        for (source, target) in rows {
            self.set(to, target, 0, target.len, &every, Symbol::Zero);
            for band in self.bands_of(from, read) {
                let of = |heads: &Range<usize>| heads.start + band.start..heads.start + band.end;
                for Piece { at, len, symbol } in self.read(from, std::slice::from_ref(source), &of(read)) {
                    let (tensor, row) = (TensorName::Q, source.row(at));
                    let site = Site { place: Some(place), tensor, buffer: from, row, heads: of(read) };
                    let first = (heads.start + band.start) as isize;
                    let symbol = self.through(&site, layer, first, symbol);
                    self.set(to, target, at, len, &of(written), symbol);
                }
            }
        }
    }

    /// A range of a buffer's heads, counted from its first, cut where a band ends.
    fn bands_of(&self, buffer: BufferId, heads: &Range<usize>) -> Vec<Range<usize>> {
        let cuts = self.contents[buffer.0].cuts().filter_map(|cut| cut.checked_sub(heads.start));
        ranges(cuts, heads.len())
    }

    /// A row on the other side of a layer of heads from `head` on.
    fn through(&mut self, site: &Site, layer: Layer, head: isize, symbol: Symbol) -> Symbol {
        let Symbol::Tokens(tokens) = &symbol else { return symbol };
        let hidden = layer == Layer::Column;
        if tokens.form != (Form { hidden, ..Form::default() }) {
            let needed = match layer {
                Layer::Column => "a column-parallel layer needs a hidden row",
                Layer::Row => "a row-parallel layer needs a row of the rank's heads, not rotated",
            };
            self.mismatch(site, &symbol, needed.into());
        }
        if tokens.head != head {
            self.mismatch(
                site,
                &symbol,
                format!("the layer is of heads from {head} on, the row from {}", tokens.head),
            );
        }
        Symbol::Tokens(tokens.formed(Form { hidden: !hidden, ..Form::default() }))
    }

    pub(super) fn rotate(&mut self, buffer: BufferId, rows: &[Rotated], inverse: bool) {
        let all = 0..self.heads(buffer);
        for rotated in rows {
            for heads in self.bands_of(buffer, &all) {
                for piece in self.read(buffer, std::slice::from_ref(&rotated.rows), &heads) {
                    for piece in turned(piece, rotated, inverse) {
                        self.contents[buffer.0].write(&rotated.rows, &heads, &piece);
                    }
                }
            }
        }
    }
}

/// A piece after a rotation: one, or one a row where positions in the sequence and positions of the rotation drift apart.
fn turned(piece: Piece, rotated: &Rotated, inverse: bool) -> Vec<Piece> {
    let Piece { at, len, symbol } = piece;
    let turn = |at: usize, tokens: &Tokens| {
        let by = (rotated.position + rotated.step * at) as i64 - tokens.start as i64;
        let sign = if inverse { -1 } else { 1 };
        let Form { hidden, turns, offset } = tokens.form;
        Symbol::Tokens(tokens.formed(Form { hidden, turns: turns + sign, offset: offset + sign * by }))
    };
    match &symbol {
        Symbol::Tokens(tokens) if len == 1 || tokens.step == rotated.step => {
            vec![Piece { at, len, symbol: turn(at, tokens) }]
        }
        Symbol::Tokens(_) => {
            let each = (0..len).filter_map(|row| {
                let one = symbol.advance(row);
                Some(Piece { at: at + row, len: 1, symbol: turn(at + row, one.tokens()?) })
            });
            each.collect()
        }
        _ => vec![Piece { at, len, symbol }],
    }
}
