//! Linear layers and rotations: their effect on the *form* of rows.
//!
//! A column-parallel layer takes hidden rows to rows of the rank's heads. A row-parallel layer takes rows of the rank's
//! heads to hidden rows that are zero in every other head. Both work row by row, and their arithmetic is opaque: a row
//! stays the row of its tensor, sequence and position, on the other side of the layer. Attention takes no row that was
//! rotated by another row's position.

use std::ops::Range;

use seamproof_oracle::TensorName;

use super::content::on_rows;
use super::error::OperationId;
use super::machine::{Machine, Site};
use super::symbol::{Form, Symbol, SymbolRows, Tokens, What};
use crate::schedule::{BufferId, Layer, Rotated, RowPair};

impl Machine<'_> {
    pub(super) fn linear(
        &mut self,
        place: OperationId,
        layer: Layer,
        heads: &Range<usize>,
        [from, to]: [BufferId; 2],
        rows: &[RowPair],
    ) {
        let [read, written] = layer.heads(heads);
        let every = 0..self.heads(to);
        self.set(to, &every, rows.iter().map(|(_, target)| (*target, Symbol::Zero)));
        for band in self.bands(&[(from, read.start)], read.len()) {
            let of = |heads: &Range<usize>| heads.start + band.start..heads.start + band.end;
            let first = (heads.start + band.start) as isize;
            let mut through = Vec::new();
            for (source, target) in rows {
                for SymbolRows { at, len, symbol } in self.read_run(from, source, &of(&read)) {
                    let (tensor, row) = (TensorName::Q, source.row(at));
                    let site = Site { place: Some(place), tensor, buffer: from, row, heads: of(&read) };
                    let symbol = self.through(&site, layer, first, symbol);
                    through.extend(on_rows(target, [SymbolRows { at, len, symbol }]));
                }
            }
            self.contents[to.0].write_rows(&of(&written), through);
        }
    }

    /// Returns the symbol of a row on the other side of a layer, whose heads begin at `head`.
    fn through(&mut self, site: &Site, layer: Layer, head: isize, symbol: Symbol) -> Symbol {
        let Symbol::Tokens(tokens) = &symbol else { return linear(symbol) };
        let hidden = layer == Layer::Column;
        // Inputs come in and results go out. No row takes two layers, because their product would be another layer.
        let (direction, needed) = match layer {
            Layer::Column => (
                matches!(tokens.what, What::Input(_)),
                "a column-parallel layer needs a hidden row of an input",
            ),
            Layer::Row => (
                matches!(tokens.what, What::Out { .. } | What::Gradient(..)),
                "a row-parallel layer needs an out or gradient of the rank's heads, not rotated",
            ),
        };
        if !direction || tokens.form != (Form { hidden, ..Form::default() }) {
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
        for heads in self.bands(&[(buffer, 0)], self.heads(buffer)) {
            let pieces = rows.iter().flat_map(|rotated| {
                let pieces = self.read_run(buffer, &rotated.rows, &heads).into_iter();
                let pieces = pieces.flat_map(|piece| turned(piece, rotated, inverse));
                on_rows(&rotated.rows, pieces).collect::<Vec<SymbolRows>>()
            });
            let pieces = pieces.collect();
            self.contents[buffer.0].write_rows(&heads, pieces);
        }
    }
}

/// Returns the symbol of a row that is not real after a layer or a rotation. Zeros stay. An LSE's −∞ becomes padding,
/// because layers and rotations do not take statistics.
fn linear(symbol: Symbol) -> Symbol {
    match symbol {
        Symbol::NegInfinity | Symbol::SinkAlone(_) => Symbol::Padding,
        other => other,
    }
}

/// Returns a piece after a rotation: one piece, or one for each row if the steps of the sequence's and the rotation's
/// positions differ.
fn turned(piece: SymbolRows, rotated: &Rotated, inverse: bool) -> Vec<SymbolRows> {
    let SymbolRows { at, len, symbol } = piece;
    let turn = |at: usize, tokens: &Tokens| {
        let by = (rotated.position + rotated.step * at) as i64 - tokens.start as i64;
        let sign = if inverse { -1 } else { 1 };
        let Form { hidden, turns, offset } = tokens.form;
        Symbol::Tokens(tokens.formed(Form { hidden, turns: turns + sign, offset: offset + sign * by }))
    };
    match &symbol {
        Symbol::Tokens(tokens) if len == 1 || tokens.step == rotated.step => {
            vec![SymbolRows { at, len, symbol: turn(at, tokens) }]
        }
        Symbol::Tokens(_) => {
            let each = (0..len).filter_map(|row| {
                let one = symbol.advance(row);
                Some(SymbolRows { at: at + row, len: 1, symbol: turn(at + row, one.tokens()?) })
            });
            each.collect()
        }
        _ => vec![SymbolRows { at, len, symbol: linear(symbol) }],
    }
}
