//! The end of the symbolic execution: every result is whole, in its place, and owned once.

use std::ops::Range;

use seamproof_oracle::sharding::{self, run_of};
use seamproof_oracle::{Pass, Positions, Run, Sequence, Side, TensorName};

use super::cover::{FAR, Patch, Wanted, prove};
use super::error::{CheckError, CoverKind, Needed, OperationId};
use super::machine::{Machine, Site, ranges};
use super::shape::{side, tensor_heads};
use super::stretch::Stretch;
use super::symbol::{Cover, Form, Symbol, SymbolRows, Tokens, What, zip};
use crate::schedule::{BufferId, Placement, Role};

impl Machine<'_> {
    /// Checks every result. Returns the number of pairs that outs cover, counted for each head.
    pub(super) fn finish(&mut self) -> u64 {
        let schedule = self.schedule;
        let mut pairs = 0;
        for placement in &schedule.placements {
            if let Role::Output(tensor) = schedule.buffers[placement.buffer.0].role {
                match side(tensor) {
                    Some(_) => {
                        let covered = self.rows_finished(placement);
                        pairs += if tensor == TensorName::Out { covered } else { 0 };
                        self.rest_untouched(placement);
                    }
                    None if tensor == TensorName::MaxLogit => self.max_logit(placement),
                    None => {}
                }
            }
        }
        for &tensor in self.results() {
            self.owned_once(tensor);
        }
        if self.problem.pass == Pass::Backward && self.problem.learnable_sinks() > 0 {
            self.sink_gradients();
        }
        pairs
    }

    fn results(&self) -> &'static [TensorName] {
        use TensorName::{Dk, Dq, Dv, Lse, Out};
        if self.problem.pass == Pass::Backward { &[Out, Lse, Dq, Dk, Dv] } else { &[Out, Lse] }
    }

    fn result_bands(&self, buffer: BufferId) -> Vec<Range<usize>> {
        ranges(self.contents[buffer.0].cuts(), self.heads(buffer))
    }

    /// Checks that real rows are whole and padding rows are zero (−∞ for LSE). Returns the number of pairs.
    fn rows_finished(&mut self, placement: &Placement) -> u64 {
        let Placement { tensor, buffer, .. } = *placement;
        let mut pairs = 0;
        for heads in self.result_bands(buffer) {
            for placed in &placement.rows {
                let (start, step) = (placed.piece.start, placed.piece.step);
                let head = (placement.heads.start + heads.start) as isize;
                let (what, form) = (What::Input(tensor), Form::default());
                let symbol =
                    Symbol::Tokens(Tokens { what, form, sequence: placed.sequence, head, start, step });
                let expected = [SymbolRows { at: 0, len: placed.local.len, symbol }];
                let found = self.read_run(buffer, &placed.local, &heads);
                if placed.local.len > 0 {
                    zip([&expected, &found], |at, len, symbols| {
                        let row = placed.local.row(at);
                        let site = Site { place: None, tensor, buffer, row, heads: heads.clone() };
                        if let Some(rows) = symbols[0].tokens() {
                            pairs += self.finished(&site, rows, len, &symbols[1]) * heads.len() as u64;
                        }
                    });
                }
                self.padding_finished(placement, &placed.local, &heads);
            }
        }
        pairs
    }

    fn padding_finished(&mut self, placement: &Placement, run: &Run, heads: &Range<usize>) {
        let Placement { tensor, buffer, .. } = *placement;
        let rest = run.span - run.len;
        let padding = Run { offset: run.offset + run.step * run.len, step: run.step, len: rest, span: rest };
        let empty = if tensor == TensorName::Lse { Symbol::NegInfinity } else { Symbol::Zero };
        for piece in self.read(buffer, &[padding], heads) {
            if piece.symbol != empty {
                let site =
                    Site { place: None, tensor, buffer, row: padding.row(piece.at), heads: heads.clone() };
                self.mismatch(&site, &piece.symbol, format!("padding rows of a result are {empty}"));
            }
        }
    }

    /// Checks that rows that no sequence owns were never written. A problem asks for no fill of these rows, and a fill
    /// is as wrong there as any other write. Scratch may be filled.
    fn rest_untouched(&mut self, placement: &Placement) {
        let Placement { tensor, buffer, .. } = *placement;
        let rows = self.schedule.buffers[buffer.0].rows;
        let mut owned: Vec<Range<usize>> = Vec::new();
        for run in placement.rows.iter().map(|placed| placed.local) {
            match run.step {
                1 => owned.push(run.offset..run.offset + run.span),
                _ => owned.extend((0..run.span).map(|index| run.row(index)).map(|row| row..row + 1)),
            }
        }
        owned.retain(|rows| !rows.is_empty());
        owned.push(rows..rows);
        owned.sort_unstable_by_key(|rows| rows.start);
        for heads in self.result_bands(buffer) {
            let mut end = 0;
            for range in &owned {
                let gap = range.start.saturating_sub(end);
                for piece in self.read(buffer, &[Run::packed(end, gap, gap)], &heads) {
                    if piece.symbol != Symbol::Uninitialised {
                        let site =
                            Site { place: None, tensor, buffer, row: end + piece.at, heads: heads.clone() };
                        self.mismatch(
                            &site,
                            &piece.symbol,
                            "no sequence owns these rows: nothing writes them".into(),
                        );
                    }
                }
                end = end.max(range.end);
            }
        }
    }

    /// Checks that max_logit is the maximum over every launch of the placed heads.
    fn max_logit(&mut self, placement: &Placement) {
        let Placement { tensor, buffer, .. } = *placement;
        let bands = self.result_bands(buffer);
        for heads in bands {
            let symbol = self.value(buffer, &heads);
            let first = placement.heads.start + heads.start;
            let mine = first..first + heads.len();
            let needed = |(_, launched): &&(OperationId, Range<usize>)| {
                launched.start < mine.end && mine.start < launched.end
            };
            let launches: Vec<OperationId> =
                self.launches.iter().filter(needed).map(|(place, _)| *place).collect();
            let missing = match &symbol {
                Symbol::NegInfinity => launches.first().copied(),
                Symbol::Tokens(Tokens { what: What::Largest(held), head, .. }) if *head == first as isize => {
                    launches.into_iter().find(|place| !held.contains(place))
                }
                _ => {
                    let site = Site { place: None, tensor, buffer, row: 0, heads };
                    self.mismatch(&site, &symbol, format!("max_logit of heads from {first} on is needed"));
                    continue;
                }
            };
            if let Some(place) = missing {
                let site = Site { place: None, tensor, buffer, row: 0, heads };
                self.mismatch(&site, &symbol, format!("the maximum must include the launch of {place}"));
            }
        }
    }

    /// Checks that every head of every real row of a result is placed exactly once. Rows that a sequence borrows are
    /// its lender's.
    fn owned_once(&mut self, tensor: TensorName) {
        let schedule = self.schedule;
        let placements: Vec<&Placement> =
            schedule.placements.iter().filter(|placed| placed.tensor == tensor).collect();
        let cuts = placements.iter().flat_map(|placed| [placed.heads.start, placed.heads.end]);
        for heads in ranges(cuts, tensor_heads(self.problem, tensor)) {
            let mut lines: Vec<Vec<Patch>> = self.problem.sequences.iter().map(|_| Vec::new()).collect();
            for placed in placements.iter().filter(|placed| placed.heads.contains(&heads.start)) {
                for run in placed.rows.iter().filter(|run| run.local.len > 0) {
                    let cols = Positions { start: run.piece.start, step: run.piece.step, len: run.local.len };
                    lines[run.sequence].push(whole(run.sequence, cols));
                }
            }
            for (sequence, lines) in lines.iter().enumerate() {
                let side = side(tensor).unwrap_or(Side::Q);
                let len = run_of(&self.problem.sequences[sequence], side).len;
                let rows = sharding::hole(self.problem, side, sequence)..len;
                if let Err(hole) =
                    prove(Positions::first(1), &Wanted { lo: -FAR, hi: FAR, cols: rows }, lines)
                {
                    let (kind, positions, heads) = (hole_kind(hole.kind), hole.pairs.first, heads.clone());
                    self.errors.push(CheckError::Ownership { tensor, sequence, heads, positions, kind });
                }
            }
        }
    }

    /// Checks that over all ranks, every query row that sees a key is in dsink exactly once.
    fn sink_gradients(&mut self) {
        let schedule = self.schedule;
        let mut parts: Vec<(Range<usize>, Cover)> = Vec::new();
        for placement in schedule.placements.iter().filter(|placed| placed.tensor == TensorName::Dsink) {
            let Placement { tensor, buffer, .. } = *placement;
            for heads in self.result_bands(buffer) {
                let first = placement.heads.start + heads.start;
                let symbol = self.value(buffer, &heads);
                match symbol.tokens() {
                    Some(Tokens { what: What::SinkGradient(cover), head, .. }) if *head == first as isize => {
                        parts.push((first..first + heads.len(), cover.clone()));
                    }
                    _ if symbol == Symbol::Zero => {}
                    _ => {
                        let site = Site { place: None, tensor, buffer, row: 0, heads };
                        self.mismatch(&site, &symbol, format!("dsink of heads from {first} on is needed"));
                    }
                }
            }
        }
        let cuts: Vec<usize> = parts.iter().flat_map(|(heads, _)| [heads.start, heads.end]).collect();
        for heads in ranges(cuts.into_iter(), self.problem.heads.q) {
            let mine = parts.iter().filter(|(range, _)| range.contains(&heads.start));
            let mut rows: Vec<Vec<Patch>> = self.problem.sequences.iter().map(|_| Vec::new()).collect();
            for patch in mine.flat_map(|(_, cover)| cover.patches()) {
                rows[patch.sequence].push(patch);
            }
            for (sequence, patches) in rows.iter().enumerate() {
                self.sink_rows(sequence, &heads, patches);
            }
        }
    }

    fn sink_rows(&mut self, sequence: usize, heads: &Range<usize>, patches: &[Patch]) {
        let Sequence { q, kv, .. } = self.problem.sequences[sequence];
        let seeing = self.problem.mask.sight(q.len, kv.len).seeing();
        // Rows that see no key add nothing, and it does not matter how often they are counted.
        let patches: Vec<Patch> = patches.iter().filter_map(|patch| clip(patch, &seeing)).collect();
        let wanted = Wanted { lo: -FAR, hi: FAR, cols: 0..seeing.len() };
        if let Err(hole) = prove(Positions::first(1), &wanted, &patches) {
            let [first, last] = [hole.pairs.first, hole.pairs.last].map(|cols| cols.moved(seeing.start));
            self.errors.push(CheckError::Cover {
                at: Needed::AllRanks,
                tensor: TensorName::Dsink,
                sequence,
                heads: heads.clone(),
                pairs: Stretch { first, last, ..hole.pairs },
                kind: hole.kind,
                launch: hole.launch,
            });
        }
    }
}

/// Returns the columns of a patch inside a range, counted from the start of the range.
fn clip(patch: &Patch, to: &Range<usize>) -> Option<Patch> {
    let mut part = patch.within(to)?;
    part.cols.start -= to.start;
    Some(part)
}

fn whole(sequence: usize, cols: Positions) -> Patch {
    let place = OperationId { rank: 0, operation: 0, stream: 0 };
    Patch { place, sequence, group: 0..1, rows: Positions::first(1), cols, lo: -FAR, hi: FAR }
}

/// Returns the kind of a hole in ownership: an invisible pair there means a row that is owned twice.
fn hole_kind(kind: CoverKind) -> CoverKind {
    if kind == CoverKind::Invisible { CoverKind::Twice } else { kind }
}
