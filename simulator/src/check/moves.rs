//! Moves: copies, fills, messages and collectives carry symbols of any kind.
//!
//! All moved symbols are gathered before anything is written. A move of every row of a buffer to every row of another
//! shares the list of pieces ([`Content::replace`](super::content::Content::replace)).

use std::mem::discriminant;
use std::ops::Range;

use seamproof_oracle::Run;

use super::content::{HeadBand, on_rows};
use super::error::{CheckError, OperationId};
use super::machine::Machine;
use super::symbol::{Symbol, SymbolRows};
use super::touch::rows_of;
use crate::schedule::{Axes, BufferId, FillValue, Region, RowPair, Work};

/// Rows of a buffer from some head on.
pub(super) type BufferRows = (BufferId, Run, usize);

/// Symbols to write to some heads of a buffer: whole bands, or pieces that name its rows.
pub(super) enum Writing {
    Whole(BufferId, Vec<HeadBand>),
    Rows(BufferId, Range<usize>, Vec<SymbolRows>),
}

impl Machine<'_> {
    pub(super) fn fill(&mut self, to: BufferId, rows: &[Run], value: FillValue) {
        let symbol = match value {
            FillValue::Zero => Symbol::Zero,
            FillValue::NegInfinity => Symbol::NegInfinity,
        };
        let heads = 0..self.heads(to);
        if self.schedule.buffers[to.0].axes == Axes::Heads {
            self.set_value(to, &heads, symbol);
        } else {
            self.set(to, &heads, rows.iter().map(|run| (*run, symbol.clone())));
        }
    }

    pub(super) fn copy(&mut self, from: BufferId, to: BufferId, rows: &[RowPair]) {
        let heads = self.heads(from);
        let mut writing = Vec::new();
        for (source, target) in joined(rows) {
            self.gather((from, source, 0), (to, target, 0), heads, &mut writing);
        }
        self.commit(writing);
    }

    /// Adds to `writing` the effect of moving some heads of rows to others.
    fn gather(&self, from: BufferRows, to: BufferRows, heads: usize, writing: &mut Vec<Writing>) {
        let (source, target) = (&self.contents[from.0.0], &self.contents[to.0.0]);
        if source.is_whole(&from.1) && target.is_whole(&to.1) {
            writing.push(Writing::Whole(to.0, source.bands(&(from.2..from.2 + heads), to.2)));
            return;
        }
        for band in self.bands(&[(from.0, from.2)], heads) {
            let pieces = self.read_run(from.0, &from.1, &(from.2 + band.start..from.2 + band.end));
            let heads = to.2 + band.start..to.2 + band.end;
            writing.push(Writing::Rows(to.0, heads, on_rows(&to.1, pieces).collect()));
        }
    }

    /// Writes everything. All symbols for the same heads of a buffer are written at once.
    pub(super) fn commit(&mut self, mut writing: Vec<Writing>) {
        let key = |writing: &Writing| match writing {
            Writing::Whole(buffer, _) => (*buffer, 0, 0),
            Writing::Rows(buffer, heads, _) => (*buffer, heads.start, heads.end),
        };
        writing.sort_by_key(key);
        let mut next = writing.into_iter().peekable();
        while let Some(first) = next.next() {
            let mine = key(&first);
            match first {
                Writing::Whole(buffer, bands) => self.contents[buffer.0].replace(bands),
                Writing::Rows(buffer, heads, mut pieces) => {
                    while let Some(Writing::Rows(.., more)) = next.next_if(|other| key(other) == mine) {
                        pieces.extend(more);
                    }
                    self.contents[buffer.0].write_rows(&heads, pieces);
                }
            }
        }
    }

    pub(super) fn end(&self, region: &Region) -> BufferRows {
        (region.buffer, rows_of(&self.schedule.buffers[region.buffer.0], region), region.heads.start)
    }

    /// Whether a region can be moved to another.
    pub(super) fn fits(&mut self, at: OperationId, from: &Region, peer: OperationId, to: &Region) -> bool {
        let shape = |region: &Region| {
            let buffer = &self.schedule.buffers[region.buffer.0];
            (rows_of(buffer, region).len, region.heads.len(), buffer.dim, buffer.axes)
        };
        let fits = shape(from) == shape(to);
        if !fits {
            self.errors.push(CheckError::Disagree { at, peer, what: "rows, heads or elements of a region" });
        }
        fits
    }

    /// Moves a region to another, if it fits.
    fn region(
        &mut self,
        (at, from): (OperationId, &Region),
        (peer, to): (OperationId, &Region),
        writing: &mut Vec<Writing>,
    ) {
        if self.fits(at, from, peer, to) {
            self.gather(self.end(from), self.end(to), from.heads.len(), writing);
        }
    }

    pub(super) fn message(&mut self, send: OperationId, receive: OperationId) {
        let (Work::Send { regions: from, .. }, Work::Recv { regions: to, .. }) =
            (self.work(send), self.work(receive))
        else {
            return;
        };
        if from.len() != to.len() {
            self.errors.push(CheckError::Disagree { at: send, peer: receive, what: "the number of regions" });
        }
        let mut writing = Vec::new();
        for (from, to) in from.iter().zip(to) {
            self.region((send, from), (receive, to), &mut writing);
        }
        self.commit(writing);
    }

    pub(super) fn collective(&mut self, places: &[OperationId]) {
        let works: Vec<&Work> = places.iter().map(|place| self.work(*place)).collect();
        if let Some(other) = works.iter().position(|work| discriminant(*work) != discriminant(works[0])) {
            let (at, peer) = (places[0], places[other]);
            self.errors.push(CheckError::Disagree { at, peer, what: "which collective this is" });
            return;
        }
        let mut writing = Vec::new();
        for (member, (&place, work)) in places.iter().zip(&works).enumerate() {
            for (target, (&peer, other)) in places.iter().zip(&works).enumerate() {
                match (work, other) {
                    (Work::AllGather { from, .. }, Work::AllGather { to, .. }) => {
                        self.region((place, from), (peer, &to[member]), &mut writing);
                    }
                    (Work::AllToAll { send, .. }, Work::AllToAll { recv, .. }) => {
                        self.region((place, &send[target]), (peer, &recv[member]), &mut writing);
                    }
                    _ => {}
                }
            }
            self.reduced(places, &works, member, &mut writing);
        }
        self.commit(writing);
    }
}

/// Returns row pairs in which pairs that follow each other on both sides are joined.
fn joined(rows: &[RowPair]) -> Vec<RowPair> {
    let mut joined: Vec<RowPair> = Vec::with_capacity(rows.len());
    let follows = |earlier: &Run, later: &Run| {
        earlier.step == 1 && later.step == 1 && earlier.offset + earlier.len == later.offset
    };
    for pair in rows.iter().filter(|(from, _)| from.len > 0) {
        match joined.last_mut() {
            Some((from, to)) if follows(from, &pair.0) && follows(to, &pair.1) => {
                *from = Run::packed(from.offset, from.len + pair.0.len, from.len + pair.0.len);
                *to = Run::packed(to.offset, from.len, from.len);
            }
            _ => joined.push(*pair),
        }
    }
    joined
}
