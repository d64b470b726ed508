//! The [`Machine`] of the symbolic execution: the content of every buffer, and the errors found in it.

use std::collections::BTreeMap;
use std::ops::Range;

use seamproof_oracle::sharding::PlacedRun;
use seamproof_oracle::{Problem, Run, TensorName};

use super::content::{Content, on_rows};
use super::error::{CheckError, Errors, FormError, OperationId};
use super::proved::ProvedCovers;
use super::shape::side;
use super::symbol::{Form, Symbol, SymbolRows, Tokens, What};
use crate::Segment;
use crate::schedule::{Axes, BufferId, Placement, Region, Role, Schedule, Work};

/// State of the symbolic execution: every buffer's content, and the errors so far.
pub(super) struct Machine<'a> {
    pub(super) problem: &'a Problem,
    pub(super) schedule: &'a Schedule,
    pub(super) contents: Vec<Content>,
    pub(super) errors: Errors,
    /// Launches of attention with the query heads that they computed, for max_logit.
    pub(super) launches: Vec<(OperationId, Range<usize>)>,
    /// Covers for which a proof has been tried.
    pub(super) proved: ProvedCovers,
    /// Segments of the tables that have been made.
    pub(super) tables: BTreeMap<BufferId, Vec<Segment>>,
}

/// Rows of an operation or of a result, as an error about their content names them.
#[derive(Clone, Debug)]
pub(super) struct Site {
    pub(super) place: Option<OperationId>,
    pub(super) tensor: TensorName,
    pub(super) buffer: BufferId,
    pub(super) row: usize,
    pub(super) heads: Range<usize>,
}

impl<'a> Machine<'a> {
    /// Returns the machine at the beginning: inputs as they are placed, everything else uninitialised.
    pub(super) fn new(problem: &'a Problem, schedule: &'a Schedule, errors: Errors) -> Machine<'a> {
        let contents = schedule.buffers.iter().map(|buffer| {
            let rows = if buffer.axes == Axes::Heads { 1 } else { buffer.rows };
            let input = matches!(buffer.role, Role::Input(_));
            Content::new(rows, buffer.heads, if input { Symbol::Padding } else { Symbol::Uninitialised })
        });
        let contents = contents.collect();
        let (launches, proved) = (Vec::new(), ProvedCovers::default());
        let tables = BTreeMap::new();
        let mut machine = Machine { problem, schedule, contents, errors, launches, proved, tables };
        for placement in &schedule.placements {
            if let Role::Input(tensor) = schedule.buffers[placement.buffer.0].role {
                machine.place_input(tensor, placement);
            }
        }
        machine
    }

    fn place_input(&mut self, tensor: TensorName, placement: &Placement) {
        let heads = 0..placement.heads.len();
        let (what, form) = (What::Input(tensor), Form::outside(self.schedule, tensor));
        let head = placement.heads.start as isize;
        let tokens = Tokens { what, form, sequence: 0, head, start: 0, step: 1 };
        if side(tensor).is_none() {
            self.set_value(placement.buffer, &heads, Symbol::Tokens(tokens));
            return;
        }
        let rows = placement.rows.iter().map(|&PlacedRun { sequence, piece, local }| {
            let (start, step) = (piece.start, piece.step);
            (local, Symbol::Tokens(Tokens { sequence, start, step, ..tokens.clone() }))
        });
        self.set(placement.buffer, &heads, rows);
    }

    /// Checks that rows of a table say what is expected of each segment.
    pub(super) fn expect_table<T: PartialEq>(
        &mut self,
        at: OperationId,
        table: &Region,
        expected: &[T],
        of: impl Fn(&Segment) -> T,
    ) {
        let rows = table.rows.offset..table.rows.offset + table.rows.len;
        let said = self.tables.get(&table.buffer).and_then(|made| made.get(rows));
        let fault = match said {
            None => FormError::Plain("a table is read before it is made"),
            Some(said) if said.iter().map(of).zip(expected).any(|(said, expected)| said != *expected) => {
                FormError::Plain("the table says other rows than are expected")
            }
            Some(_) => return,
        };
        self.errors.push(CheckError::Malformed { at, fault });
    }

    /// Whether two sequences have the same keys at these positions, which they share.
    pub(super) fn shares(&self, one: usize, other: usize, positions: Range<usize>) -> bool {
        one != other && self.problem.share(one, other, positions)
    }

    pub(super) fn work(&self, place: OperationId) -> &'a Work {
        &self.schedule.ranks[place.rank].operations[place.operation].work
    }

    /// Drops the content of buffers that no later operation touches, except results.
    pub(super) fn forget(&mut self, buffers: &[BufferId]) {
        for buffer in buffers {
            if !matches!(self.schedule.buffers[buffer.0].role, Role::Output(_)) {
                self.contents[buffer.0] = Content::new(0, 0, Symbol::Uninitialised);
            }
        }
    }

    pub(super) fn heads(&self, buffer: BufferId) -> usize {
        self.schedule.buffers[buffer.0].heads
    }

    pub(super) fn read(&self, buffer: BufferId, runs: &[Run], heads: &Range<usize>) -> Vec<SymbolRows> {
        self.contents[buffer.0].read(runs, heads)
    }

    pub(super) fn read_run(&self, buffer: BufferId, run: &Run, heads: &Range<usize>) -> Vec<SymbolRows> {
        self.read(buffer, std::slice::from_ref(run), heads)
    }

    /// Returns the symbol of a buffer without rows for heads of one band.
    pub(super) fn value(&self, buffer: BufferId, heads: &Range<usize>) -> Symbol {
        let pieces = self.read_run(buffer, &Run::packed(0, 1, 1), heads);
        pieces.into_iter().next().map_or(Symbol::Uninitialised, |piece| piece.symbol)
    }

    /// Sets the symbol of a buffer without rows for some heads.
    pub(super) fn set_value(&mut self, buffer: BufferId, heads: &Range<usize>, symbol: Symbol) {
        self.set(buffer, heads, [(Run::packed(0, 1, 1), symbol)]);
    }

    /// Sets the symbol of each run's real rows for some heads. The runs are disjoint and written at once, because
    /// writing them singly would move the later pieces each time.
    pub(super) fn set(
        &mut self,
        buffer: BufferId,
        heads: &Range<usize>,
        rows: impl IntoIterator<Item = (Run, Symbol)>,
    ) {
        let mut pieces = Vec::new();
        for (run, symbol) in rows {
            pieces.extend(on_rows(&run, [SymbolRows { at: 0, len: run.len, symbol }]));
        }
        self.contents[buffer.0].write_rows(heads, pieces);
    }

    /// Returns `0..len`, cut wherever a band of one of the buffers ends. Heads count from the one given with each
    /// buffer.
    pub(super) fn bands(&self, buffers: &[(BufferId, usize)], len: usize) -> Vec<Range<usize>> {
        let cuts = buffers.iter().flat_map(|(buffer, first)| {
            self.contents[buffer.0].cuts().filter_map(move |cut| cut.checked_sub(*first))
        });
        ranges(cuts, len)
    }

    pub(super) fn mismatch(&mut self, site: &Site, found: &Symbol, needed: String) {
        let buffer = &self.schedule.buffers[site.buffer.0];
        let (name, found, heads) = (buffer.name.to_string(), found.to_string(), site.heads.clone());
        self.errors.push(match site.place {
            Some(at) => CheckError::Content { at, buffer: name, row: site.row, heads, found, needed },
            None => {
                let (tensor, rank, rows) = (site.tensor, buffer.rank, site.row..site.row + 1);
                CheckError::Result { tensor, rank, buffer: name, rows, heads, found, needed }
            }
        });
    }

    /// Returns the tokens of a symbol. The symbol must be the input of the site's tensor, in the form that attention
    /// takes.
    pub(super) fn expect_input(&mut self, site: &Site, symbol: &Symbol) -> Option<Tokens> {
        let form = Form::inside(self.schedule, site.tensor);
        match symbol.tokens() {
            Some(tokens) if tokens.what == What::Input(site.tensor) && tokens.form == form => {
                Some(tokens.clone())
            }
            _ => {
                let rotated = if form.turns > 0 { ", rotated by its position," } else { "" };
                self.mismatch(site, symbol, format!("a real row of {}{rotated} is needed", site.tensor));
                None
            }
        }
    }
}

/// Returns `0..len`, cut at the given numbers.
pub(super) fn ranges(cuts: impl Iterator<Item = usize>, len: usize) -> Vec<Range<usize>> {
    let mut cuts: Vec<usize> = cuts.filter(|cut| *cut < len).chain([0, len]).collect();
    cuts.sort_unstable();
    cuts.dedup();
    cuts.windows(2).map(|ends| ends[0]..ends[1]).collect()
}
