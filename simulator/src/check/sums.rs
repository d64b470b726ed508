//! Sums: merges, accumulations and reductions collect the patches of both sides.
//!
//! Zero is the identity of sums, and (out 0, lse −∞) is the identity of merges. A sum of rows that do not belong
//! together is an error at that place. Whether the patches of a sum are exactly the visible pairs is checked later.

use std::collections::BTreeSet;
use std::ops::Range;
use std::rc::Rc;

use seamproof_oracle::{Run, TensorName};

use super::content::on_rows;
use super::error::OperationId;
use super::machine::{Machine, Site};
use super::moves::{BufferRows, Writing};
use super::symbol::{Cover, Symbol, SymbolRows, Tokens, What, append, zip};
use crate::schedule::{BufferId, Merge, MergeStyle, Reduction, Region, RowPair, Work};

const TOO_MANY: &str = "a sum has more parts than are checked";

impl Machine<'_> {
    /// Calls `each` for every cell of the operands' runs, which are equally long, with all heads. `each` returns the
    /// symbols that replace the cell's own. Form keeps the rows that an operation reads apart from those that it
    /// writes: all are written after all have been read.
    pub(super) fn cells<const N: usize>(
        &mut self,
        buffers: [BufferId; N],
        rows: impl Iterator<Item = [Run; N]> + Clone,
        mut each: impl FnMut(&mut Self, &Cell<'_, N>, [Symbol; N]) -> [Option<Symbol>; N],
    ) {
        for heads in self.bands(&buffers.map(|buffer| (buffer, 0)), self.heads(buffers[0])) {
            let mut written: [Vec<SymbolRows>; N] = std::array::from_fn(|_| Vec::new());
            for runs in rows.clone() {
                let lists: [Vec<SymbolRows>; N] =
                    std::array::from_fn(|operand| self.read_run(buffers[operand], &runs[operand], &heads));
                zip(lists.each_ref().map(Vec::as_slice), |at, len, symbols| {
                    let cell = Cell { buffers: &buffers, runs: &runs, heads: &heads, at, len };
                    let replaced = each(self, &cell, symbols);
                    for (operand, symbol) in replaced.into_iter().enumerate() {
                        let piece = symbol.map(|symbol| SymbolRows { at, len, symbol });
                        written[operand].extend(on_rows(&runs[operand], piece));
                    }
                });
            }
            for (buffer, pieces) in buffers.iter().zip(written) {
                self.contents[buffer.0].write_rows(&heads, pieces);
            }
        }
    }

    pub(super) fn accumulate(&mut self, place: OperationId, from: BufferId, to: BufferId, rows: &[RowPair]) {
        let rows = rows.iter().map(|(source, target)| [*source, *target]);
        self.cells([from, to], rows, |machine, cell, [a, b]| {
            let sum = sum(&a, &b, cell.len).unwrap_or_else(|needed| {
                machine.mismatch(&cell.site(place, TensorName::Dq, 0), &a, format!("{needed} ({b})"));
                b.clone()
            });
            [None, Some(sum)]
        });
    }

    pub(super) fn merge(&mut self, place: OperationId, merge: &Merge) {
        let Merge { style, step_out, step_lse, out, lse, rows } = merge;
        let rows = rows.iter().map(|(from, to)| [*from, *from, *to, *to]);
        self.cells([*step_out, *step_lse, *out, *lse], rows, |machine, cell, symbols| {
            let [step_out, step_lse, out, lse] = &symbols;
            let merged = match style {
                MergeStyle::Running | MergeStyle::Difference => {
                    merge_running([step_out, step_lse], [out, lse], cell.len)
                }
                MergeStyle::Statistics => merge_lse(step_lse, lse, cell.len).map(|lse| [None, Some(lse)]),
                MergeStyle::Weighted { .. } => merge_weighted([step_out, step_lse], [out, lse], cell.len),
            };
            let [out, lse] = merged.unwrap_or_else(|(operand, needed)| {
                machine.mismatch(&cell.site(place, TensorName::Out, operand), &symbols[operand], needed);
                [None, None]
            });
            [None, None, out, lse]
        });
    }

    /// Gathers the effect of a reduction on one member, which is the combination of all members' parts. Other
    /// collectives are left alone.
    pub(super) fn reduced(
        &mut self,
        places: &[OperationId],
        works: &[&Work],
        member: usize,
        writing: &mut Vec<Writing>,
    ) {
        let (to, reduction) = match works[member] {
            Work::ReduceScatter { to, .. } => (to, Reduction::Sum),
            Work::AllReduce { region, reduction, .. } => (region, *reduction),
            _ => return,
        };
        let parts: Vec<&Region> = works.iter().filter_map(|work| part(work, member)).collect();
        for (&peer, from) in places.iter().zip(&parts) {
            if !self.fits(peer, from, places[member], to) {
                return;
            }
        }
        let ends: Vec<BufferRows> = parts.iter().map(|region| self.end(region)).collect();
        let firsts: Vec<(BufferId, usize)> = ends.iter().map(|end| (end.0, end.2)).collect();
        let (target, run, first) = self.end(to);
        for band in self.bands(&firsts, to.heads.len()) {
            let total = self.combined(places, &ends, &band, reduction);
            writing.push(Writing::Rows(
                target,
                first + band.start..first + band.end,
                on_rows(&run, total).collect(),
            ));
        }
    }

    /// Returns the combination of the members' rows, one member after the other.
    fn combined(
        &mut self,
        places: &[OperationId],
        ends: &[BufferRows],
        band: &Range<usize>,
        reduction: Reduction,
    ) -> Vec<SymbolRows> {
        let mut total: Option<Vec<SymbolRows>> = None;
        for (&place, &(buffer, run, first)) in places.iter().zip(ends) {
            let heads = first + band.start..first + band.end;
            let more = self.read_run(buffer, &run, &heads);
            let Some(before) = total else {
                total = Some(more);
                continue;
            };
            let mut both = Vec::with_capacity(before.len());
            zip([&before, &more], |at, len, [so_far, symbol]| {
                let symbol = combine(&so_far, &symbol, len, reduction).unwrap_or_else(|needed| {
                    let (row, tensor) = (run.row(at), TensorName::Dk);
                    let site = Site { place: Some(place), tensor, buffer, row, heads: heads.clone() };
                    self.mismatch(&site, &symbol, format!("{needed} ({so_far})"));
                    so_far.clone()
                });
                append(&mut both, SymbolRows { at, len, symbol });
            });
            total = Some(both);
        }
        total.unwrap_or_default()
    }
}

/// Rows that are a single piece on every operand.
pub(super) struct Cell<'c, const N: usize> {
    buffers: &'c [BufferId; N],
    runs: &'c [Run; N],
    pub(super) heads: &'c Range<usize>,
    /// The first row, counted within the runs.
    at: usize,
    pub(super) len: usize,
}

impl<const N: usize> Cell<'_, N> {
    /// Returns the site of the cell's rows on one operand.
    pub(super) fn site(&self, place: OperationId, tensor: TensorName, operand: usize) -> Site {
        let (buffer, row) = (self.buffers[operand], self.runs[operand].row(self.at));
        Site { place: Some(place), tensor, buffer, row, heads: self.heads.clone() }
    }
}

/// Returns the region that a reduction takes from a member for member `index`.
fn part(work: &Work, index: usize) -> Option<&Region> {
    match work {
        Work::ReduceScatter { from, .. } => from.get(index),
        Work::AllReduce { region, .. } => Some(region),
        _ => None,
    }
}

type Combined = Result<Symbol, &'static str>;

fn combine(a: &Symbol, b: &Symbol, len: usize, reduction: Reduction) -> Combined {
    match reduction {
        Reduction::Sum => sum(b, a, len),
        Reduction::Max => max(a, b),
    }
}

/// Returns the sum of rows, which must be partial gradients of the same rows.
fn sum(a: &Symbol, b: &Symbol, len: usize) -> Combined {
    let (Symbol::Tokens(x), Symbol::Tokens(y)) = (a, b) else {
        return match (a, b) {
            (Symbol::Zero, other) | (other, Symbol::Zero) => Ok(other.clone()),
            (Symbol::Tokens(_), _) | (_, Symbol::Tokens(_)) => {
                Err("a real row and one that is not are added")
            }
            _ => Ok(Symbol::Padding),
        };
    };
    if !x.same_rows(y, len) {
        return Err("rows of other positions, or heads, are added");
    }
    if x.form != y.form {
        return Err("a row before a linear layer or a rotation and one after it are added");
    }
    match (&x.what, &y.what) {
        (What::Gradient(a, p), What::Gradient(b, q)) if a == b => {
            let both = q.plus(p).ok_or(TOO_MANY)?;
            Ok(y.with(What::Gradient(*a, both)))
        }
        (What::SinkGradient(p), What::SinkGradient(q)) => {
            Ok(y.with(What::SinkGradient(q.plus(p).ok_or(TOO_MANY)?)))
        }
        _ => Err("partial gradients of one tensor are needed"),
    }
}

fn max(a: &Symbol, b: &Symbol) -> Combined {
    match (a, b) {
        (Symbol::NegInfinity, other) | (other, Symbol::NegInfinity) => Ok(other.clone()),
        (Symbol::Tokens(x), Symbol::Tokens(y)) if x.head == y.head => match (&x.what, &y.what) {
            (What::Largest(p), What::Largest(q)) if Rc::ptr_eq(p, q) => Ok(a.clone()),
            (What::Largest(p), What::Largest(q)) => {
                let both: BTreeSet<OperationId> = p.union(q).copied().collect();
                Ok(x.with(What::Largest(Rc::new(both))))
            }
            _ => Err("largest logits are needed"),
        },
        _ => Err("largest logits of the same heads are needed"),
    }
}

/// New symbols of a merge's running out and LSE, or the index of the wrong operand of the four and the need.
type Merged = Result<[Option<Symbol>; 2], (usize, String)>;

/// Returns the rows and the cover of an out and its LSE: `Some(None)` for the identity, `None` if the two do not fit.
fn partial<'s>(out: &'s Symbol, lse: &'s Symbol, len: usize) -> Option<Option<(&'s Tokens, &'s Cover)>> {
    if let (Symbol::Zero, Symbol::NegInfinity) = (out, lse) {
        return Some(None);
    }
    let (a, b) = (out.tokens()?, lse.tokens()?);
    match (&a.what, &b.what) {
        (What::Out { parts, against }, What::Lse(cover))
            if parts == against && parts == cover && a.same_form(b, len) =>
        {
            Some(Some((a, cover)))
        }
        _ => None,
    }
}

fn real(symbols: &[&Symbol]) -> bool {
    symbols.iter().any(|symbol| symbol.tokens().is_some())
}

fn merge_running(step: [&Symbol; 2], running: [&Symbol; 2], len: usize) -> Merged {
    let (from, to) = (partial(step[0], step[1], len), partial(running[0], running[1], len));
    let poison =
        || if real(&running) { [None, None] } else { [Some(Symbol::Padding), Some(Symbol::Padding)] };
    match (from, to) {
        (Some(None), Some(_)) => Ok([None, None]),
        (Some(Some((_, cover))), _) | (_, Some(Some((_, cover)))) if cover.sinks > 0 => {
            Err((0, "steps are merged before the sink is applied, not after".into()))
        }
        (Some(Some(_)), Some(None)) => Ok([Some(step[0].clone()), Some(step[1].clone())]),
        (Some(Some((a, p))), Some(Some((b, q)))) if a.same_form(b, len) => {
            let both = q.plus(p).ok_or((0, TOO_MANY.to_owned()))?;
            let out = What::Out { parts: both.clone(), against: both.clone() };
            Ok([Some(b.with(out)), Some(b.with(What::Lse(both)))])
        }
        (Some(Some(_)), Some(Some((b, _)))) => {
            Err((0, format!("the running result is of sequence {}, position {}", b.sequence, b.start)))
        }
        (None, _) if real(&step) || real(&running) => {
            Err((0, format!("a step's out and its lse ({}) are needed", step[1])))
        }
        (_, None) if real(&step) || real(&running) => {
            Err((2, format!("a running out and its lse ({}) are needed", running[1])))
        }
        _ => Ok(poison()),
    }
}

fn merge_lse(step: &Symbol, running: &Symbol, len: usize) -> Result<Symbol, (usize, String)> {
    match (step, running) {
        (Symbol::NegInfinity, other) | (other, Symbol::NegInfinity) => Ok(other.clone()),
        (Symbol::Tokens(a), Symbol::Tokens(b)) if a.same_form(b, len) => match (&a.what, &b.what) {
            (What::Lse(p), What::Lse(q)) => {
                let both = q.plus(p).ok_or((1, TOO_MANY.to_owned()))?;
                Ok(b.with(What::Lse(both)))
            }
            _ => Err((1, "two partial lse are needed".into())),
        },
        _ if real(&[step, running]) => Err((1, "partial lse of the same rows are needed".into())),
        _ => Ok(Symbol::Padding),
    }
}

fn merge_weighted(step: [&Symbol; 2], running: [&Symbol; 2], len: usize) -> Merged {
    let needed = |text: &str| Err((2, text.to_owned()));
    let Some(part) = partial(step[0], step[1], len) else {
        let real = real(&step) || real(&running);
        return if real {
            Err((0, "a step's out and its lse are needed".into()))
        } else {
            Ok([Some(Symbol::Padding), None])
        };
    };
    let Some((tokens, cover)) = part else { return Ok([None, None]) };
    let Some((last, What::Lse(whole))) = running[1].tokens().map(|last| (last, &last.what)) else {
        return Err((3, "the final lse is needed".into()));
    };
    if !last.same_form(tokens, len) {
        return Err((3, "the final lse of the step's rows is needed".into()));
    }
    let parts = match running[0] {
        Symbol::Zero => cover.clone(),
        Symbol::Tokens(out @ Tokens { what: What::Out { parts, against }, .. })
            if against == whole && out.same_form(last, len) =>
        {
            parts.plus(cover).ok_or((0, TOO_MANY.to_owned()))?
        }
        _ => return needed("outs weighted against the same lse, or zeros, are needed"),
    };
    Ok([Some(tokens.with(What::Out { parts, against: whole.clone() })), None])
}
