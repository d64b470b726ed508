//! The sink: its application and its gradient.

use std::ops::Range;

use seamproof_oracle::{Positions, Run, Sink, TensorName};

use super::cover::{FAR, Patch};
use super::error::{CheckError, FormError, OperationId};
use super::machine::{Machine, Site};
use super::symbol::{Cover, Form, Symbol, Tokens, What, zip};
use crate::schedule::BufferId;

impl Machine<'_> {
    /// Returns the first head of the sink in a buffer's heads, and reports an error if they do not hold that input.
    pub(super) fn sink_head(
        &mut self,
        place: OperationId,
        sink: Option<BufferId>,
        heads: &Range<usize>,
    ) -> Option<isize> {
        let buffer = sink?;
        let symbol = self.value(buffer, heads);
        if let Some(Tokens { what: What::Input(TensorName::Sink), head, .. }) = symbol.tokens() {
            return Some(*head);
        }
        let site =
            Site { place: Some(place), tensor: TensorName::Sink, buffer, row: 0, heads: heads.clone() };
        self.mismatch(&site, &symbol, "the sink is needed".into());
        None
    }

    /// Reports an error if an operation applies another sink than the problem's.
    pub(super) fn check_sink(&mut self, place: OperationId, sink: Option<BufferId>) {
        let kind = self.problem.softmax.sink;
        if kind == Sink::None || (kind == Sink::Learnable) != sink.is_some() {
            let fault = FormError::Plain("applies a sink that is not the problem's");
            self.errors.push(CheckError::Malformed { at: place, fault });
        }
    }

    pub(super) fn apply_sink(
        &mut self,
        place: OperationId,
        sink: Option<BufferId>,
        [out, lse]: [BufferId; 2],
        rows: &[Run],
    ) {
        self.check_sink(place, sink);
        let sinks: Vec<Range<usize>> =
            sink.map_or(Vec::new(), |sink| self.bands(&[(sink, 0)], self.heads(sink)));
        self.cells([out, lse], rows.iter().map(|run| [*run, *run]), |machine, cell, symbols| {
            let (first, end) = (cell.heads.start, cell.heads.end);
            let overlapping = sinks.iter().filter(|band| band.start < end && first < band.end);
            let own: Vec<Option<isize>> = overlapping
                .map(|band| {
                    let head = machine.sink_head(place, sink, band);
                    head.map(|head| head + first as isize - band.start as isize)
                })
                .collect();
            let alike = own.windows(2).all(|pair| pair[0] == pair[1]);
            let head = own.first().copied().flatten();
            let applied = if alike { with_sink(&symbols, cell.len, head) } else { None };
            applied.unwrap_or_else(|| {
                let needed = format!("the sink needs an out and its lse ({}), of its own heads", symbols[1]);
                machine.mismatch(&cell.site(place, TensorName::Out, 0), &symbols[0], needed);
                [None, None]
            })
        });
    }

    pub(super) fn sink_gradient(
        &mut self,
        place: OperationId,
        [sink, dout, out, lse]: [BufferId; 4],
        dsink: BufferId,
        rows: &[Run],
    ) {
        self.check_sink(place, Some(sink));
        let operands = [(sink, 0), (dout, 0), (out, 0), (lse, 0), (dsink, 0)];
        for heads in self.bands(&operands, self.heads(out)) {
            let mut patches = Vec::new();
            let head = self.sink_head(place, Some(sink), &heads);
            for run in rows {
                let lists = [dout, out, lse].map(|buffer| self.read_run(buffer, run, &heads));
                zip(lists.each_ref().map(Vec::as_slice), |at, len, symbols| {
                    let site = |buffer, tensor| Site {
                        place: Some(place),
                        tensor,
                        buffer,
                        row: run.row(at),
                        heads: heads.clone(),
                    };
                    let Some(tokens) = self.expect_input(&site(dout, TensorName::Dout), &symbols[0]) else {
                        return;
                    };
                    if head != Some(tokens.head) {
                        self.mismatch(
                            &site(dout, TensorName::Dout),
                            &symbols[0],
                            "the sink is of other heads".into(),
                        );
                    }
                    self.finished(&site(out, TensorName::Out), &tokens, len, &symbols[1]);
                    self.finished(&site(lse, TensorName::Lse), &tokens, len, &symbols[2]);
                    patches.push(row_patch(place, &tokens, len));
                });
            }
            self.write_sink_gradient(dsink, &heads, head, patches);
        }
    }

    pub(super) fn write_sink_gradient(
        &mut self,
        dsink: BufferId,
        heads: &Range<usize>,
        head: Option<isize>,
        patches: Vec<Patch>,
    ) {
        let what = What::SinkGradient(Cover::new(patches, 0));
        let (form, head) = (Form::default(), head.unwrap_or(0));
        let symbol = Symbol::Tokens(Tokens { what, form, sequence: 0, head, start: 0, step: 1 });
        self.set_value(dsink, heads, symbol);
    }
}

/// Returns a patch that has a set of query rows as columns, for dsink.
fn columns(place: OperationId, sequence: usize, cols: Positions) -> Patch {
    Patch { place, sequence, group: 0..1, rows: Positions::first(1), cols, lo: -FAR, hi: FAR }
}

pub(super) fn row_patch(place: OperationId, tokens: &Tokens, len: usize) -> Patch {
    columns(place, tokens.sequence, tokens.line(len))
}

/// Returns an out and its LSE with the sink of a head; `None` if the two are not fit for a sink.
fn with_sink(symbols: &[Symbol; 2], len: usize, head: Option<isize>) -> Option<[Option<Symbol>; 2]> {
    match symbols {
        [Symbol::Zero, Symbol::NegInfinity] => Some([None, Some(Symbol::SinkAlone(head))]),
        [Symbol::Padding | Symbol::Uninitialised, _] => Some([Some(Symbol::Padding), Some(Symbol::Padding)]),
        [Symbol::Tokens(out), Symbol::Tokens(lse)]
            if out.same_form(lse, len) && head.is_none_or(|head| head == out.head) =>
        {
            let (What::Out { parts, against }, What::Lse(cover)) = (&out.what, &lse.what) else {
                return None;
            };
            // The sink changes this LSE, and with it the weights of the out, which must be against this LSE.
            (against == cover).then(|| {
                let what = What::Out { parts: parts.with_sink(), against: against.with_sink() };
                [Some(out.with(what)), Some(lse.with(What::Lse(cover.with_sink())))]
            })
        }
        _ => None,
    }
}
