//! Symbolic execution: each operation as a function of [`Symbol`]s.
//!
//! Reading rows that hold nothing fit is an error where it happens; what follows takes the fit rows as they were, so
//! that one mistake is one error. Copies, messages and collectives move symbols, whatever they are. Zero is the identity
//! of sums, (out 0, lse −∞) that of merges. Sums and merges only collect the patches of both sides; whether these are
//! exactly the visible pairs is proved where a result must be whole ([`Machine::finished`]): by the backward, and at
//! the end.

use std::collections::{BTreeSet, HashMap};
use std::ops::Range;
use std::rc::Rc;

use seamproof_oracle::{Problem, Run, Sink, TensorName};

use super::content::{Content, Cover, Form, PATCHES_MAX, Piece, Symbol, Tokens, What, zip};
use super::cover::{FAR, Line, Patch, Wanted, prove};
use super::error::{CheckError, CoverKind, Errors, Fault, Place};
use super::linear::{form_inside, form_outside};
use super::order::Step;
use super::shape::{rows_of, side};
use crate::schedule::{
    Axes, BufferId, FillValue, Merge, MergeStyle, Reduction, Region, Role, Schedule, Work,
};
use seamproof_oracle::Side;

/// Every buffer's content, and what goes wrong.
pub(super) struct Machine<'a> {
    pub(super) problem: &'a Problem,
    pub(super) schedule: &'a Schedule,
    pub(super) contents: Vec<Content>,
    pub(super) errors: Errors,
    /// Launches of attention, with the query heads that they computed, for max_logit.
    pub(super) launches: Vec<(Place, Range<usize>)>,
    /// Covers that are proved of rows: pairs, or none if they are not exact.
    proved: HashMap<Claim, (Cover, Option<u64>)>,
}

/// Rows that hold something else than they should: of an operation, or of a result.
#[derive(Clone, Debug)]
pub(super) struct Site {
    pub(super) place: Option<Place>,
    pub(super) tensor: TensorName,
    pub(super) buffer: BufferId,
    pub(super) row: usize,
    pub(super) heads: Range<usize>,
}

/// A cover, whether its rows are keys, and the rows' first position, step and number.
type Claim = (usize, bool, usize, usize, usize);

/// Pieces to be written to a run of a buffer.
type Writing = (BufferId, Run, Range<usize>, Vec<Piece>);

impl<'a> Machine<'a> {
    /// Inputs as they are placed, everything else uninitialised.
    pub(super) fn new(problem: &'a Problem, schedule: &'a Schedule, errors: Errors) -> Machine<'a> {
        let contents = schedule.buffers.iter().map(|buffer| {
            let rows = if buffer.axes == Axes::Heads { 1 } else { buffer.rows };
            let input = matches!(buffer.role, Role::Input(_));
            Content::new(rows, buffer.heads, if input { Symbol::Padding } else { Symbol::Uninitialised })
        });
        let contents = contents.collect();
        let mut machine =
            Machine { problem, schedule, contents, errors, launches: Vec::new(), proved: HashMap::new() };
        for placement in &schedule.placements {
            if let Role::Input(tensor) = schedule.buffers[placement.buffer.0].role {
                machine.place_input(tensor, placement);
            }
        }
        machine
    }

    fn place_input(&mut self, tensor: TensorName, placement: &crate::schedule::Placement) {
        let content = &mut self.contents[placement.buffer.0];
        let heads = 0..placement.heads.len();
        let tokens = Tokens {
            what: What::Input(tensor),
            form: form_outside(self.schedule, tensor),
            sequence: 0,
            head: placement.heads.start as isize,
            start: 0,
            step: 1,
        };
        if side(tensor).is_none() {
            content.write(
                &Run::packed(0, 1, 1),
                &heads,
                &Piece { at: 0, len: 1, symbol: Symbol::Tokens(tokens) },
            );
            return;
        }
        for placed in &placement.rows {
            let (start, step) = (placed.piece.start, placed.piece.step);
            let symbol = Symbol::Tokens(Tokens { sequence: placed.sequence, start, step, ..tokens.clone() });
            content.write(&placed.local, &heads, &Piece { at: 0, len: placed.local.len, symbol });
        }
    }

    pub(super) fn step(&mut self, step: &Step) {
        match step {
            Step::Local(place) => self.local(*place),
            Step::Message(send, receive) => self.message(*send, *receive),
            Step::Collective(places) => self.collective(places),
        }
    }

    pub(super) fn work(&self, place: Place) -> &'a Work {
        &self.schedule.ranks[place.rank].operations[place.operation].work
    }

    fn local(&mut self, place: Place) {
        match self.work(place) {
            Work::Attend(attend) => self.attend(place, attend),
            Work::AttendBackward(attend) => self.attend_backward(place, attend),
            Work::Merge(merge) => self.merge(place, merge),
            Work::ApplySink { sink, out, lse, rows } => self.apply_sink(place, *sink, [*out, *lse], rows),
            Work::SinkGradient { sink, dout, out, lse, dsink, rows } => {
                self.sink_gradient(place, [*sink, *dout, *out, *lse], *dsink, rows);
            }
            Work::Accumulate { from, to, rows } => {
                for (source, target) in rows {
                    let operands = [(*from, *source), (*to, *target)];
                    self.cells(&operands, |machine, heads, at, len, symbols| {
                        let [a, b] = &symbols[..] else { return Vec::new() };
                        let sum = sum(a, b, len).unwrap_or_else(|needed| {
                            let site = Site {
                                place: Some(place),
                                tensor: TensorName::Dq,
                                buffer: *from,
                                row: source.row(at),
                                heads,
                            };
                            machine.mismatch(&site, a, format!("{needed} ({b})"));
                            b.clone()
                        });
                        vec![(1, sum)]
                    });
                }
            }
            Work::Copy { from, to, rows } => {
                for (source, target) in rows {
                    self.transfer((*from, *source, 0), (*to, *target, 0), self.heads(*from));
                }
            }
            Work::Linear { layer, heads, from, to, rows } => {
                self.linear(place, *layer, heads, (*from, *to), rows);
            }
            Work::Rotate { buffer, rows, inverse } => self.rotate(*buffer, rows, *inverse),
            Work::Fill { to, rows, value } => self.fill(*to, rows, *value),
            _ => {}
        }
    }

    pub(super) fn heads(&self, buffer: BufferId) -> usize {
        self.schedule.buffers[buffer.0].heads
    }

    pub(super) fn read(&self, buffer: BufferId, runs: &[Run], heads: &Range<usize>) -> Vec<Piece> {
        self.contents[buffer.0].read(runs, heads)
    }

    pub(super) fn write(&mut self, buffer: BufferId, run: &Run, heads: &Range<usize>, pieces: &[Piece]) {
        for piece in pieces {
            self.contents[buffer.0].write(run, heads, piece);
        }
    }

    /// The same symbol on the first `len` rows of a run from row `at`, for heads.
    pub(super) fn set(
        &mut self,
        buffer: BufferId,
        run: &Run,
        at: usize,
        len: usize,
        heads: &Range<usize>,
        symbol: Symbol,
    ) {
        self.contents[buffer.0].write(run, heads, &Piece { at, len, symbol });
    }

    /// `0..len` cut wherever a band of one of the buffers, from some head on, ends.
    fn bands(&self, buffers: &[(BufferId, usize)], len: usize) -> Vec<Range<usize>> {
        let cuts = buffers.iter().flat_map(|(buffer, first)| {
            self.contents[buffer.0].cuts().filter_map(move |cut| cut.checked_sub(*first))
        });
        ranges(cuts, len)
    }

    fn fill(&mut self, to: BufferId, rows: &[Run], value: FillValue) {
        let symbol = match value {
            FillValue::Zero => Symbol::Zero,
            FillValue::NegInfinity => Symbol::NegInfinity,
        };
        let heads = 0..self.heads(to);
        let one = [Run::packed(0, 1, 1)];
        let rows = if self.schedule.buffers[to.0].axes == Axes::Heads { &one } else { rows };
        for run in rows {
            self.set(to, run, 0, run.len, &heads, symbol.clone());
        }
    }

    /// For every cell of equally long runs, all heads, the symbols that replace those of some operands.
    fn cells(
        &mut self,
        operands: &[(BufferId, Run)],
        mut each: impl FnMut(&mut Self, Range<usize>, usize, usize, Vec<Symbol>) -> Vec<(usize, Symbol)>,
    ) {
        let Some(&(first, _)) = operands.first() else { return };
        let buffers: Vec<(BufferId, usize)> = operands.iter().map(|(buffer, _)| (*buffer, 0)).collect();
        for heads in self.bands(&buffers, self.heads(first)) {
            let lists: Vec<Vec<Piece>> = operands
                .iter()
                .map(|(buffer, run)| self.read(*buffer, std::slice::from_ref(run), &heads))
                .collect();
            zip(&lists, |at, len, symbols| {
                for (operand, symbol) in each(self, heads.clone(), at, len, symbols) {
                    let (buffer, run) = operands[operand];
                    self.set(buffer, &run, at, len, &heads, symbol);
                }
            });
        }
    }

    fn gathered(
        &self,
        (from, run, first): (BufferId, Run, usize),
        to: (BufferId, Run, usize),
        heads: usize,
    ) -> Vec<Writing> {
        let bands = self.bands(&[(from, first)], heads);
        let moved = bands.into_iter().map(|band| {
            let source = first + band.start..first + band.end;
            let target = to.2 + band.start..to.2 + band.end;
            (to.0, to.1, target, self.read(from, std::slice::from_ref(&run), &source))
        });
        moved.collect()
    }

    fn commit(&mut self, writing: Vec<Writing>) {
        for (buffer, run, heads, pieces) in writing {
            self.write(buffer, &run, &heads, &pieces);
        }
    }

    fn transfer(&mut self, from: (BufferId, Run, usize), to: (BufferId, Run, usize), heads: usize) {
        let writing = self.gathered(from, to, heads);
        self.commit(writing);
    }

    fn end(&self, region: &Region) -> (BufferId, Run, usize) {
        (region.buffer, rows_of(&self.schedule.buffers[region.buffer.0], region), region.heads.start)
    }

    /// Whether a region can be moved to another.
    fn fits(&mut self, at: Place, from: &Region, peer: Place, to: &Region) -> bool {
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

    fn message(&mut self, send: Place, receive: Place) {
        let (Work::Send { regions: from, .. }, Work::Recv { regions: to, .. }) =
            (self.work(send), self.work(receive))
        else {
            return;
        };
        if from.len() != to.len() {
            self.errors.push(CheckError::Disagree { at: send, peer: receive, what: "the number of regions" });
        }
        for (from, to) in from.iter().zip(to) {
            if self.fits(send, from, receive, to) {
                self.transfer(self.end(from), self.end(to), from.heads.len());
            }
        }
    }

    fn collective(&mut self, places: &[Place]) {
        let works: Vec<&'a Work> = places.iter().map(|place| self.work(*place)).collect();
        let kind = std::mem::discriminant(works[0]);
        if let Some(other) = works.iter().position(|work| std::mem::discriminant(*work) != kind) {
            let (at, peer) = (places[0], places[other]);
            self.errors.push(CheckError::Disagree { at, peer, what: "which collective this is" });
            return;
        }
        let mut writing = Vec::new();
        for (member, (&place, work)) in places.iter().zip(&works).enumerate() {
            match work {
                Work::AllGather { from, .. } => {
                    for (&peer, other) in places.iter().zip(&works) {
                        let Work::AllGather { to, .. } = other else { continue };
                        if self.fits(place, from, peer, &to[member]) {
                            writing.extend(self.gathered(
                                self.end(from),
                                self.end(&to[member]),
                                from.heads.len(),
                            ));
                        }
                    }
                }
                Work::AllToAll { send, .. } => {
                    for ((&peer, other), from) in places.iter().zip(&works).zip(send) {
                        let Work::AllToAll { recv, .. } = other else { continue };
                        if self.fits(place, from, peer, &recv[member]) {
                            writing.extend(self.gathered(
                                self.end(from),
                                self.end(&recv[member]),
                                from.heads.len(),
                            ));
                        }
                    }
                }
                Work::ReduceScatter { to, .. } => {
                    let parts: Vec<&Region> = works.iter().filter_map(|work| part(work, member)).collect();
                    writing.extend(self.reduced(places, &parts, place, to, Reduction::Sum));
                }
                Work::AllReduce { region, reduction, .. } => {
                    let parts: Vec<&Region> = works.iter().filter_map(|work| part(work, member)).collect();
                    writing.extend(self.reduced(places, &parts, place, region, *reduction));
                }
                _ => {}
            }
        }
        self.commit(writing);
    }

    /// The combination of the members' regions, as written to `to`.
    fn reduced(
        &mut self,
        places: &[Place],
        parts: &[&Region],
        place: Place,
        to: &Region,
        reduction: Reduction,
    ) -> Vec<Writing> {
        for (&peer, from) in places.iter().zip(parts) {
            if !self.fits(peer, from, place, to) {
                return Vec::new();
            }
        }
        let ends: Vec<(BufferId, Run, usize)> = parts.iter().map(|region| self.end(region)).collect();
        let firsts: Vec<(BufferId, usize)> =
            ends.iter().map(|(buffer, _, first)| (*buffer, *first)).collect();
        let mut writing = Vec::new();
        let (target, run, first) = self.end(to);
        for band in self.bands(&firsts, to.heads.len()) {
            let lists: Vec<Vec<Piece>> = ends
                .iter()
                .map(|(buffer, run, first)| {
                    self.read(*buffer, std::slice::from_ref(run), &(first + band.start..first + band.end))
                })
                .collect();
            let mut pieces = Vec::new();
            zip(&lists, |at, len, symbols| {
                let mut total = symbols[0].clone();
                for (index, symbol) in symbols.iter().enumerate().skip(1) {
                    match combine(&total, symbol, len, reduction) {
                        Ok(combined) => total = combined,
                        Err(needed) => {
                            let (buffer, run, first) = ends[index];
                            let heads = first + band.start..first + band.end;
                            let tensor = TensorName::Dk;
                            let site =
                                Site { place: Some(places[index]), tensor, buffer, row: run.row(at), heads };
                            self.mismatch(&site, symbol, format!("{needed} ({total})"));
                        }
                    }
                }
                pieces.push(Piece { at, len, symbol: total });
            });
            writing.push((target, run, first + band.start..first + band.end, pieces));
        }
        writing
    }

    pub(super) fn mismatch(&mut self, site: &Site, found: &Symbol, needed: String) {
        let buffer = &self.schedule.buffers[site.buffer.0];
        let (name, found, heads) = (buffer.name.clone(), found.to_string(), site.heads.clone());
        self.errors.push(match site.place {
            Some(at) => CheckError::Content { at, buffer: name, row: site.row, heads, found, needed },
            None => {
                let (tensor, rank, rows) = (site.tensor, buffer.rank, site.row..site.row + 1);
                CheckError::Result { tensor, rank, buffer: name, rows, heads, found, needed }
            }
        });
    }

    fn merge(&mut self, place: Place, merge: &Merge) {
        for (from, to) in &merge.rows {
            let operands =
                [(merge.step_out, *from), (merge.step_lse, *from), (merge.out, *to), (merge.lse, *to)];
            self.cells(&operands, |machine, heads, at, len, symbols| {
                let [step_out, step_lse, out, lse] = &symbols[..] else { return Vec::new() };
                let merged = match merge.style {
                    MergeStyle::Running => merge_running([step_out, step_lse], [out, lse], len),
                    MergeStyle::Statistics => merge_lse(step_lse, lse, len).map(|lse| vec![(3, lse)]),
                    MergeStyle::Weighted { .. } => merge_weighted([step_out, step_lse], [out, lse], len),
                };
                merged.unwrap_or_else(|(operand, needed)| {
                    let (buffer, run) = operands[operand];
                    let tensor = TensorName::Out;
                    let site = Site { place: Some(place), tensor, buffer, row: run.row(at), heads };
                    machine.mismatch(&site, &symbols[operand], needed);
                    Vec::new()
                })
            });
        }
    }

    /// The sink's own symbol for heads: that it is an input, and its first head.
    pub(super) fn sink_head(
        &mut self,
        place: Place,
        sink: Option<BufferId>,
        heads: &Range<usize>,
    ) -> Option<isize> {
        let buffer = sink?;
        let pieces = self.read(buffer, &[Run::packed(0, 1, 1)], heads);
        let symbol = pieces.first().map_or(Symbol::Uninitialised, |piece| piece.symbol.clone());
        if let Some(Tokens { what: What::Input(TensorName::Sink), head, .. }) = symbol.tokens() {
            return Some(*head);
        }
        let site =
            Site { place: Some(place), tensor: TensorName::Sink, buffer, row: 0, heads: heads.clone() };
        self.mismatch(&site, &symbol, "the sink is needed".into());
        None
    }

    /// Whether an operation that applies a sink is given the problem's.
    pub(super) fn sink_is_right(&mut self, place: Place, sink: Option<BufferId>) {
        let kind = self.problem.softmax.sink;
        if kind == Sink::None || (kind == Sink::Learnable) != sink.is_some() {
            let fault = Fault::Plain("applies a sink that is not the problem's");
            self.errors.push(CheckError::Malformed { at: place, fault });
        }
    }

    fn apply_sink(&mut self, place: Place, sink: Option<BufferId>, [out, lse]: [BufferId; 2], rows: &[Run]) {
        self.sink_is_right(place, sink);
        let sinks: Vec<Range<usize>> =
            sink.map_or(Vec::new(), |sink| self.bands(&[(sink, 0)], self.heads(sink)));
        for run in rows {
            self.cells(&[(out, *run), (lse, *run)], |machine, heads, at, _, symbols| {
                let mut own = None;
                for band in sinks.iter().filter(|band| band.start < heads.end && heads.start < band.end) {
                    let head = machine.sink_head(place, sink, band);
                    own = head.map(|head| head + heads.start as isize - band.start as isize);
                }
                let applied = with_sink(&symbols, own);
                if applied.is_empty() {
                    let tensor = TensorName::Out;
                    let site = Site { place: Some(place), tensor, buffer: out, row: run.row(at), heads };
                    let needed =
                        format!("the sink needs an out and its lse ({}), of its own heads", symbols[1]);
                    machine.mismatch(&site, &symbols[0], needed);
                }
                applied
            });
        }
    }

    fn sink_gradient(
        &mut self,
        place: Place,
        [sink, dout, out, lse]: [BufferId; 4],
        dsink: BufferId,
        rows: &[Run],
    ) {
        self.sink_is_right(place, Some(sink));
        let operands = [(sink, 0), (dout, 0), (out, 0), (lse, 0), (dsink, 0)];
        for heads in self.bands(&operands, self.heads(out)) {
            let mut patches = Vec::new();
            let head = self.sink_head(place, Some(sink), &heads);
            for run in rows {
                let lists =
                    [dout, out, lse].map(|buffer| self.read(buffer, std::slice::from_ref(run), &heads));
                zip(&lists, |at, len, symbols| {
                    let site = |buffer, tensor| Site {
                        place: Some(place),
                        tensor,
                        buffer,
                        row: run.row(at),
                        heads: heads.clone(),
                    };
                    let Some(tokens) = self.input(&site(dout, TensorName::Dout), &symbols[0]) else { return };
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
        self.set(dsink, &Run::packed(0, 1, 1), 0, 1, heads, symbol);
    }

    /// The tokens of a symbol that must be the site's tensor, an input, as attention takes it.
    pub(super) fn input(&mut self, site: &Site, symbol: &Symbol) -> Option<Tokens> {
        let form = form_inside(self.schedule, site.tensor);
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

    /// That a symbol is the whole out or lse of the given rows: every visible pair once, the sink once.
    pub(super) fn finished(&mut self, site: &Site, rows: &Tokens, len: usize, symbol: &Symbol) -> u64 {
        let sinks = usize::from(self.problem.softmax.sink != Sink::None);
        let empty = Cover::new(Vec::new(), sinks);
        let form =
            if site.place.is_none() { form_outside(self.schedule, site.tensor) } else { Form::default() };
        let alone = if self.problem.softmax.sink == Sink::Learnable { Some(rows.head) } else { None };
        let covers = match (site.tensor, symbol) {
            (TensorName::Out, Symbol::Zero) => vec![empty],
            (TensorName::Lse, Symbol::NegInfinity) if sinks == 0 => vec![empty],
            (TensorName::Lse, Symbol::SinkAlone(head)) if sinks == 1 && *head == alone => vec![empty],
            (_, Symbol::Tokens(tokens)) if tokens.form != form => Vec::new(),
            (tensor, Symbol::Tokens(tokens)) if tokens.same_rows(rows, len) => match (tensor, &tokens.what) {
                (TensorName::Out, What::Out { parts, against }) if parts == against => vec![parts.clone()],
                (TensorName::Out, What::Out { parts, against }) => vec![parts.clone(), against.clone()],
                (TensorName::Lse, What::Lse(cover)) => vec![cover.clone()],
                (_, What::Gradient(name, cover)) if *name == tensor => vec![cover.clone()],
                _ => Vec::new(),
            },
            (TensorName::Dq | TensorName::Dk | TensorName::Dv, Symbol::Zero) => {
                vec![Cover::new(Vec::new(), 0)]
            }
            _ => Vec::new(),
        };
        let mut pairs = 0;
        let expected = if matches!(site.tensor, TensorName::Out | TensorName::Lse) { sinks } else { 0 };
        if let Some(cover) = covers.iter().find(|cover| cover.sinks != expected) {
            let needed =
                format!("{} needs the sink {expected} times, and has it {} times", site.tensor, cover.sinks);
            self.mismatch(site, symbol, needed);
        } else if covers.is_empty() {
            let needed = format!(
                "{} of sequence {}, position {}, head {} is needed",
                site.tensor, rows.sequence, rows.start, rows.head
            );
            self.mismatch(site, symbol, needed);
        } else {
            for cover in covers {
                pairs = self.proved(site, rows, len, &cover);
            }
        }
        pairs
    }

    /// That a cover is exactly what the mask shows; remembered.
    fn proved(&mut self, site: &Site, rows: &Tokens, len: usize, cover: &Cover) -> u64 {
        let keys = side(site.tensor) == Some(Side::Kv);
        let line = rows.line(len);
        let key = (cover.address(), keys, line.start, line.step, line.len);
        if let Some((_, pairs)) = self.proved.get(&key) {
            return pairs.unwrap_or(0);
        }
        let mask = self.problem.mask;
        let sequence = &self.problem.sequences[rows.sequence];
        let (lq, lk) = (sequence.q.len, sequence.kv.len);
        let shift = mask.shift(lq, lk);
        let lo = mask.left.map_or(-FAR, |left| shift - i64::from(left));
        let hi = mask.right.map_or(FAR, |right| shift + i64::from(right));
        let mut patches = cover.patches();
        let mut wanted = Wanted { lo, hi, cols: lk };
        let mut groups = vec![0];
        if keys {
            patches = patches.iter().map(Patch::transposed).collect();
            wanted = Wanted { lo: -hi, hi: -lo, cols: lq };
            groups.extend(patches.iter().flat_map(|patch| [patch.group.start, patch.group.end]));
            groups.retain(|&head| head < self.problem.group());
            groups.sort_unstable();
            groups.dedup();
        }
        let mut pairs = Some(0);
        for head in groups {
            let uniform = !keys || patches.iter().all(|patch| patch.group.contains(&head));
            let proof = if uniform {
                prove(line, wanted, &patches)
            } else {
                let mine: Vec<Patch> =
                    patches.iter().filter(|patch| patch.group.contains(&head)).cloned().collect();
                prove(line, wanted, &mine)
            };
            match proof {
                Ok(more) => pairs = pairs.map(|pairs: u64| pairs + more),
                Err(hole) => {
                    pairs = None;
                    let at = match site.place {
                        Some(place) => place.to_string(),
                        None => format!("result on rank {}", self.schedule.buffers[site.buffer.0].rank),
                    };
                    let heads = rows.head.max(0) as usize..rows.head.max(0) as usize + site.heads.len();
                    self.errors.push(CheckError::Cover {
                        at,
                        tensor: site.tensor,
                        sequence: rows.sequence,
                        heads,
                        rows: hole.rows,
                        others: hole.cols,
                        kind: hole.kind,
                        launch: hole.launch,
                    });
                }
            }
        }
        self.proved.insert(key, (cover.clone(), pairs));
        pairs.unwrap_or(0)
    }
}

/// `0..len`, cut.
pub(super) fn ranges(cuts: impl Iterator<Item = usize>, len: usize) -> Vec<Range<usize>> {
    let mut cuts: Vec<usize> = cuts.filter(|cut| *cut < len).chain([0, len]).collect();
    cuts.sort_unstable();
    cuts.dedup();
    cuts.windows(2).map(|ends| ends[0]..ends[1]).collect()
}

/// One query row set as columns, for dsink.
fn columns(place: Place, sequence: usize, cols: Line) -> Patch {
    Patch { place, sequence, group: 0..1, rows: Line::first(1), cols, lo: -FAR, hi: FAR }
}

pub(super) fn row_patch(place: Place, tokens: &Tokens, len: usize) -> Patch {
    columns(place, tokens.sequence, tokens.line(len))
}

/// What a collective takes from a member for member `index`.
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

/// Adds rows: partial gradients of the same rows.
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
            let both = q.plus(p).ok_or("a sum has more parts than are checked")?;
            Ok(y.with(What::Gradient(*a, both)))
        }
        (What::SinkGradient(p), What::SinkGradient(q)) => {
            Ok(y.with(What::SinkGradient(q.plus(p).ok_or("a sum has more parts than are checked")?)))
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
                let both: BTreeSet<Place> = p.union(q).copied().collect();
                Ok(x.with(What::Largest(Rc::new(both))))
            }
            _ => Err("largest logits are needed"),
        },
        _ => Err("largest logits of the same heads are needed"),
    }
}

/// New symbols of a merge's operands, or the operand that is wrong.
type Merged = Result<Vec<(usize, Symbol)>, (usize, String)>;

/// An out and its LSE: whose rows and which pairs, or `None` for the identity.
fn partial<'s>(out: &'s Symbol, lse: &'s Symbol, len: usize) -> Option<Option<(&'s Tokens, &'s Cover)>> {
    if let (Symbol::Zero, Symbol::NegInfinity) = (out, lse) {
        return Some(None);
    }
    let (a, b) = (out.tokens()?, lse.tokens()?);
    match (&a.what, &b.what) {
        (What::Out { parts, against }, What::Lse(cover))
            if parts == against && parts == cover && a.form == b.form && a.same_rows(b, len) =>
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
        || if real(&running) { Vec::new() } else { vec![(2, Symbol::Padding), (3, Symbol::Padding)] };
    match (from, to) {
        (Some(None), Some(_)) => Ok(Vec::new()),
        (Some(Some((_, cover))), _) | (_, Some(Some((_, cover)))) if cover.sinks > 0 => {
            Err((0, "steps are merged before the sink is applied, not after".into()))
        }
        (Some(Some(_)), Some(None)) => Ok(vec![(2, step[0].clone()), (3, step[1].clone())]),
        (Some(Some((a, p))), Some(Some((b, q)))) if a.same_rows(b, len) => {
            let both = q.plus(p).ok_or((0, "a sum has more parts than are checked".to_owned()))?;
            let out = What::Out { parts: both.clone(), against: both.clone() };
            Ok(vec![(2, b.with(out)), (3, b.with(What::Lse(both)))])
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
        (Symbol::Tokens(a), Symbol::Tokens(b)) if a.same_rows(b, len) => match (&a.what, &b.what) {
            (What::Lse(p), What::Lse(q)) => {
                let both = q.plus(p).ok_or((1, "a sum has more parts than are checked".to_owned()))?;
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
            Ok(vec![(2, Symbol::Padding)])
        };
    };
    let Some((tokens, cover)) = part else { return Ok(Vec::new()) };
    let Some((last, What::Lse(whole))) = running[1].tokens().map(|last| (last, &last.what)) else {
        return Err((3, "the final lse is needed".into()));
    };
    if !last.same_rows(tokens, len) {
        return Err((3, "the final lse of the step's rows is needed".into()));
    }
    let parts = match running[0] {
        Symbol::Zero => cover.clone(),
        Symbol::Tokens(out @ Tokens { what: What::Out { parts, against }, .. })
            if against == whole && out.form == last.form && out.same_rows(last, len) =>
        {
            parts.plus(cover).ok_or((0, "a sum has more parts than are checked".to_owned()))?
        }
        _ => return needed("outs weighted against the same lse, or zeros, are needed"),
    };
    Ok(vec![(2, tokens.with(What::Out { parts, against: whole.clone() }))])
}

/// An out and its LSE with the sink of a head in them; nothing if they are not fit for it.
fn with_sink(symbols: &[Symbol], head: Option<isize>) -> Vec<(usize, Symbol)> {
    match symbols {
        [Symbol::Zero, Symbol::NegInfinity] => vec![(1, Symbol::SinkAlone(head))],
        [Symbol::Padding | Symbol::Uninitialised, _] => vec![(0, Symbol::Padding), (1, Symbol::Padding)],
        [Symbol::Tokens(out), Symbol::Tokens(lse)]
            if out.form == lse.form && head.is_none_or(|head| head == out.head) =>
        {
            match (&out.what, &lse.what) {
                (What::Out { parts, against }, What::Lse(cover)) => {
                    let what = What::Out { parts: parts.with_sink(), against: against.with_sink() };
                    vec![(0, out.with(what)), (1, lse.with(What::Lse(cover.with_sink())))]
                }
                _ => Vec::new(),
            }
        }
        _ => Vec::new(),
    }
}

/// Bounds how many patches a launch makes of one segment.
pub(super) fn too_many(queries: usize, keys: usize) -> bool {
    queries.saturating_mul(keys) > PATCHES_MAX
}

/// Kinds of holes in ownership, as they read there.
pub(super) fn hole_kind(kind: CoverKind) -> CoverKind {
    if kind == CoverKind::Invisible { CoverKind::Twice } else { kind }
}
