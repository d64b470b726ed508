//! The attention kernels, symbolically: a segment becomes patches of (query, key) positions.
//!
//! A segment's rows are read as pieces of real queries and of real keys, all of one sequence. Every pair of pieces is a
//! patch. The patch's band is the segment's band, moved to the pieces. Heads are cut until, within a cut, every buffer
//! has one symbol for each row, and query heads are whole groups of heads or lie within one group. All results of a
//! launch are written after all its inputs have been read; the checks of form keep the two apart.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::rc::Rc;

use seamproof_oracle::{Run, Sink, TensorName};

use super::content::on_rows;
use super::cover::{FAR, Patch, range_of};
use super::error::{CheckError, FormError, OperationId};
use super::machine::{Machine, Site, ranges};
use super::moves::Writing;
use super::sink::row_patch;
use super::symbol::{Cover, Form, PATCHES_MAX, Symbol, SymbolRows, Tokens, What, zip};
use crate::schedule::{Attend, AttendBackward, BufferId, Schedule};
use crate::{AttentionCall, RowPolicy, Segment};

/// Rows of a segment, from row `at` on, that make one piece.
#[derive(Clone)]
struct SegmentRows {
    buffer: BufferId,
    at: usize,
    len: usize,
    tokens: Tokens,
}

impl SegmentRows {
    /// Returns the rows before a local row and those from it on.
    fn cut(self, row: usize) -> impl Iterator<Item = SegmentRows> {
        let before = row.saturating_sub(self.at).min(self.len);
        let mut rest = SegmentRows { at: self.at + before, len: self.len - before, ..self.clone() };
        rest.tokens.start += rest.tokens.step * before;
        [SegmentRows { len: before, ..self }, rest].into_iter().filter(|rows| rows.len > 0)
    }
}

/// Heads that a launch treats alike.
pub(super) struct LaunchHeads {
    pub(super) q: Range<usize>,
    pub(super) kv: Range<usize>,
}

/// Contributions to keys, by KV heads and by row of the segment's keys.
type KeyParts = BTreeMap<(usize, usize, usize), (usize, Tokens, Vec<Patch>)>;

impl Machine<'_> {
    /// Returns the query heads of a launch with their KV heads, cut into heads that the launch treats alike.
    pub(super) fn launch_heads(&self, q_side: &[BufferId], kv_side: &[BufferId]) -> Vec<LaunchHeads> {
        let (heads, kv_heads) = (self.heads(q_side[0]), self.heads(kv_side[0]));
        let group = heads / kv_heads;
        let cuts = q_side.iter().flat_map(|buffer| self.contents[buffer.0].cuts());
        let kv_cuts = kv_side.iter().flat_map(|buffer| self.contents[buffer.0].cuts());
        let cuts: Vec<usize> = cuts.chain(kv_cuts.map(|cut| cut * group)).collect();
        // A cut inside a group separates this group from the others.
        let around = cuts.iter().flat_map(|&cut| [cut / group * group, cut.next_multiple_of(group), cut]);
        let cut = |q: Range<usize>| LaunchHeads { kv: q.start / group..q.end.div_ceil(group), q };
        ranges(around, heads).into_iter().map(cut).collect()
    }

    pub(super) fn attend(&mut self, place: OperationId, attend: &Attend) {
        let Attend { call, q, k, v, sink, out, lse, max_logit, .. } = attend;
        let sinks = usize::from(call.softmax.sink != Sink::None);
        if sinks > 0 {
            self.applies_sink(place, call, *sink);
        }
        let side = [*q, *out, *lse, *max_logit];
        let side: Vec<BufferId> = side.into_iter().chain(*sink).collect();
        let mut writing = Vec::new();
        for heads in self.launch_heads(&side, &[*k, *v]) {
            let own = if sinks > 0 { self.sink_head(place, *sink, &heads.q) } else { None };
            let mut first = None;
            for segment in &call.segments {
                let site = Site {
                    place: Some(place),
                    tensor: TensorName::Q,
                    buffer: *q,
                    row: 0,
                    heads: heads.q.clone(),
                };
                let queries = self.inputs(&site, &segment.q);
                let keys = self.keys(place, segment, [*k, *v], &heads);
                for piece in &queries {
                    first = first.or(Some(piece.tokens.head));
                    if own.is_some_and(|head| head != piece.tokens.head) {
                        let symbol = Symbol::Tokens(piece.tokens.clone());
                        self.mismatch(&site, &symbol, "the sink is of other heads".into());
                    }
                }
                let patches = self.patches(place, segment, &queries, &keys, &heads);
                for (piece, patches) in queries.iter().zip(patches) {
                    let cover = Cover::new(patches, sinks);
                    let what = What::Out { parts: cover.clone(), against: cover.clone() };
                    let (at, len, tokens) = (piece.at, piece.len, piece.tokens.formed(Form::default()));
                    let lse_symbol = tokens.with(What::Lse(cover));
                    for (buffer, symbol) in [(*out, tokens.with(what)), (*lse, lse_symbol)] {
                        writing.push(rows_to(buffer, &segment.q, &heads.q, SymbolRows { at, len, symbol }));
                    }
                }
                let results = [(*out, Symbol::Zero), (*lse, Symbol::NegInfinity)];
                writing.extend(padding(call, &segment.q, &heads.q, results));
            }
            if let Some(first) = first {
                self.raise(place, *max_logit, &heads.q, first);
            }
        }
        self.commit(writing);
    }

    fn applies_sink(&mut self, place: OperationId, call: &AttentionCall, sink: Option<BufferId>) {
        self.check_sink(place, sink);
        if call.softmax.sink != self.problem.softmax.sink {
            let fault = FormError::Plain("the launch's sink is not the problem's");
            self.errors.push(CheckError::Malformed { at: place, fault });
        }
    }

    /// Returns the rows of a run as pieces of the site's tensor. A piece of anything else is an error and left out.
    fn inputs(&mut self, site: &Site, run: &Run) -> Vec<SegmentRows> {
        let pieces = self.read_run(site.buffer, run, &site.heads);
        let rows = pieces.into_iter().filter_map(|SymbolRows { at, len, symbol }| {
            let site = Site { row: run.row(at), ..site.clone() };
            Some(SegmentRows { buffer: site.buffer, at, len, tokens: self.expect_input(&site, &symbol)? })
        });
        rows.collect()
    }

    /// Returns the keys of a segment: K and V of the same rows. No piece is partly in the prefix, and none has some
    /// sink tokens and other keys.
    fn keys(
        &mut self,
        place: OperationId,
        segment: &Segment,
        buffers: [BufferId; 2],
        heads: &LaunchHeads,
    ) -> Vec<SegmentRows> {
        let lists = buffers.map(|buffer| self.read(buffer, &segment.kv, &heads.kv));
        let mut rows: Vec<SegmentRows> = Vec::new();
        zip(lists.each_ref().map(Vec::as_slice), |at, len, symbols| {
            let names = [TensorName::K, TensorName::V];
            let sites = [0, 1].map(|index| Site {
                place: Some(place),
                tensor: names[index],
                buffer: buffers[index],
                row: row_of(&segment.kv, at),
                heads: heads.kv.clone(),
            });
            let k = self.expect_input(&sites[0], &symbols[0]);
            let v = self.expect_input(&sites[1], &symbols[1]);
            let (Some(k), Some(v)) = (k, v) else { return };
            if !k.same_rows(&v, len) {
                self.mismatch(&sites[1], &symbols[1], format!("the values of {} are needed", symbols[0]));
            }
            rows.push(SegmentRows { buffer: buffers[0], at, len, tokens: k });
        });
        let cut = |rows: SegmentRows| rows.cut(segment.prefix).flat_map(|rows| rows.cut(segment.sink_tokens));
        rows.into_iter().flat_map(cut).collect()
    }

    /// Returns the patches of each piece of queries. No other pair of the segment is visible.
    fn patches(
        &mut self,
        place: OperationId,
        segment: &Segment,
        queries: &[SegmentRows],
        keys: &[SegmentRows],
        heads: &LaunchHeads,
    ) -> Vec<Vec<Patch>> {
        let pairs = queries.len().saturating_mul(keys.len());
        if pairs > PATCHES_MAX {
            let fault =
                FormError::TooMany { what: "pairs of pieces of a segment", got: pairs, max: PATCHES_MAX };
            self.errors.push(CheckError::Malformed { at: place, fault });
            return queries.iter().map(|_| Vec::new()).collect();
        }
        let (lo, hi) =
            (segment.lo.unwrap_or(-FAR).clamp(-FAR, FAR), segment.hi.unwrap_or(FAR).clamp(-FAR, FAR));
        let mut patches = Vec::with_capacity(queries.len());
        for q in queries {
            let mut mine = Vec::with_capacity(keys.len());
            for k in keys {
                let offset = q.at as i64 - k.at as i64;
                let own = self.shared(q, k);
                let k = own.as_ref().unwrap_or(k);
                let Some(group) = self.paired_heads(place, segment, q, k, heads) else { continue };
                let patch = Patch {
                    place,
                    sequence: q.tokens.sequence,
                    group,
                    rows: q.tokens.line(q.len),
                    cols: k.tokens.line(k.len),
                    lo: if k.at < segment.sink_tokens { -FAR } else { lo + offset },
                    hi: if k.at < segment.prefix { FAR } else { hi + offset },
                };
                if !patch.is_empty() {
                    mine.push(patch);
                }
            }
            patches.push(mine);
        }
        patches
    }

    /// Returns another sequence's keys as the queries' own, if both share them.
    fn shared(&self, q: &SegmentRows, k: &SegmentRows) -> Option<SegmentRows> {
        let (sequence, of, line) = (q.tokens.sequence, k.tokens.sequence, k.tokens.line(k.len));
        let shared = self.shares(sequence, of, range_of(&line));
        shared.then(|| SegmentRows { tokens: Tokens { sequence, ..k.tokens.clone() }, ..k.clone() })
    }

    /// Checks that queries and keys are of one sequence and of heads that belong together. Returns the query heads
    /// within their group.
    fn paired_heads(
        &mut self,
        place: OperationId,
        segment: &Segment,
        q: &SegmentRows,
        k: &SegmentRows,
        heads: &LaunchHeads,
    ) -> Option<Range<usize>> {
        let group = self.problem.group() as isize;
        let (first, count, kv) = (q.tokens.head, heads.q.len() as isize, k.tokens.head);
        let apart = if heads.kv.len() == 1 {
            first.div_euclid(group) != kv || (first + count - 1).div_euclid(group) != kv
        } else {
            count != group * heads.kv.len() as isize || first != kv * group
        };
        if k.tokens.sequence != q.tokens.sequence || apart {
            let needed = if apart {
                format!("query heads from {first} on need keys of heads from {} on", first.div_euclid(group))
            } else {
                format!("the segment's queries are of sequence {}", q.tokens.sequence)
            };
            let site = Site {
                place: Some(place),
                tensor: TensorName::K,
                buffer: k.buffer,
                row: row_of(&segment.kv, k.at),
                heads: heads.kv.clone(),
            };
            self.mismatch(&site, &Symbol::Tokens(k.tokens.clone()), needed);
            return None;
        }
        let within = first.rem_euclid(group) as usize;
        Some(if heads.kv.len() == 1 { within..within + heads.q.len() } else { 0..group as usize })
    }

    fn raise(&mut self, place: OperationId, max_logit: BufferId, heads: &Range<usize>, first: isize) {
        let symbol = self.value(max_logit, heads);
        let mut launches = match &symbol {
            Symbol::NegInfinity => Rc::new(BTreeSet::new()),
            Symbol::Tokens(Tokens { what: What::Largest(launches), head, .. }) if *head == first => {
                launches.clone()
            }
            _ => {
                let site = Site {
                    place: Some(place),
                    tensor: TensorName::MaxLogit,
                    buffer: max_logit,
                    row: 0,
                    heads: heads.clone(),
                };
                self.mismatch(
                    &site,
                    &symbol,
                    "it must have been filled with -inf, and be of the launch's heads".into(),
                );
                Rc::new(BTreeSet::new())
            }
        };
        // The set must have one owner, or every launch would copy it.
        drop(symbol);
        self.set_value(max_logit, heads, Symbol::NegInfinity);
        Rc::make_mut(&mut launches).insert(place);
        let start = first.max(0) as usize;
        self.launches.push((place, start..start + heads.len()));
        let what = What::Largest(launches);
        let form = Form::default();
        let symbol = Symbol::Tokens(Tokens { what, form, sequence: 0, head: first, start: 0, step: 1 });
        self.set_value(max_logit, heads, symbol);
    }

    pub(super) fn attend_backward(&mut self, place: OperationId, attend: &AttendBackward) {
        let AttendBackward { call, q, k, v, dout, out, lse, sink, dq, dk, dv, .. } = attend;
        if let Some((sink, _)) = sink {
            self.check_sink(place, Some(*sink));
        }
        let mut side = vec![*q, *dout, *out, *lse, *dq];
        side.extend(sink.iter().flat_map(|(sink, dsink)| [*sink, *dsink]));
        let mut writing = Vec::new();
        let mut parts: Vec<KeyParts> = call.segments.iter().map(|_| KeyParts::new()).collect();
        for heads in self.launch_heads(&side, &[*k, *v, *dk, *dv]) {
            let mut seen = Vec::new();
            let head = sink.and_then(|(sink, _)| self.sink_head(place, Some(sink), &heads.q));
            for (segment, parts) in call.segments.iter().zip(&mut parts) {
                let queries = self.queries(place, segment, [*q, *dout, *out, *lse], &heads);
                let keys = self.keys(place, segment, [*k, *v], &heads);
                let patches = self.patches(place, segment, &queries, &keys, &heads);
                collect_keys(parts, &keys, &patches, &heads);
                for (piece, patches) in queries.iter().zip(patches) {
                    let symbol = piece.tokens.with(What::Gradient(TensorName::Dq, Cover::new(patches, 0)));
                    let rows = SymbolRows { at: piece.at, len: piece.len, symbol };
                    writing.push(rows_to(*dq, &segment.q, &heads.q, rows));
                    seen.push(row_patch(place, &piece.tokens, piece.len));
                    if head.is_some_and(|head| head != piece.tokens.head) {
                        let fault = FormError::Plain("the sink is of other heads than the queries");
                        self.errors.push(CheckError::Malformed { at: place, fault });
                    }
                }
                writing.extend(padding(call, &segment.q, &heads.q, [(*dq, Symbol::Zero)]));
            }
            if let Some((_, dsink)) = sink {
                self.write_sink_gradient(*dsink, &heads.q, head, seen);
            }
        }
        for (segment, parts) in call.segments.iter().zip(parts) {
            write_keys(self.schedule, segment, [*dk, *dv], parts, &mut writing);
            let heads = 0..self.heads(*dk);
            for run in &segment.kv {
                writing.extend(padding(call, run, &heads, [*dk, *dv].map(|buffer| (buffer, Symbol::Zero))));
            }
        }
        self.commit(writing);
    }

    /// Returns the queries of a backward segment: q and dout of the same rows. Their out and LSE are checked to be
    /// whole.
    fn queries(
        &mut self,
        place: OperationId,
        segment: &Segment,
        buffers: [BufferId; 4],
        heads: &LaunchHeads,
    ) -> Vec<SegmentRows> {
        let names = [TensorName::Q, TensorName::Dout, TensorName::Out, TensorName::Lse];
        let lists = buffers.map(|buffer| self.read_run(buffer, &segment.q, &heads.q));
        let mut rows = Vec::new();
        zip(lists.each_ref().map(Vec::as_slice), |at, len, symbols| {
            let site = |index: usize| Site {
                place: Some(place),
                tensor: names[index],
                buffer: buffers[index],
                row: segment.q.row(at),
                heads: heads.q.clone(),
            };
            let (q, dout) =
                (self.expect_input(&site(0), &symbols[0]), self.expect_input(&site(1), &symbols[1]));
            let (Some(tokens), Some(dout)) = (q, dout) else { return };
            if !tokens.same_rows(&dout, len) {
                self.mismatch(&site(1), &symbols[1], format!("the dout of {} is needed", symbols[0]));
            }
            self.finished(&site(2), &tokens, len, &symbols[2]);
            self.finished(&site(3), &tokens, len, &symbols[3]);
            append(&mut rows, SegmentRows { buffer: buffers[0], at, len, tokens });
        });
        rows
    }
}

/// Returns the effect of writing rows of a run.
fn rows_to(buffer: BufferId, run: &Run, heads: &Range<usize>, piece: SymbolRows) -> Writing {
    Writing::Rows(buffer, heads.clone(), on_rows(run, [piece]).collect())
}

/// Returns the effect of the call's policy on padding rows.
fn padding<const N: usize>(
    call: &AttentionCall,
    run: &Run,
    heads: &Range<usize>,
    to: [(BufferId, Symbol); N],
) -> impl Iterator<Item = Writing> {
    let (run, heads, rest) = (*run, heads.clone(), run.span - run.len);
    let written = rest > 0 && call.policy == RowPolicy::Overwrite;
    to.into_iter().filter(move |_| written).map(move |(buffer, symbol)| {
        rows_to(buffer, &run, &heads, SymbolRows { at: run.len, len: rest, symbol })
    })
}

/// Adds dk and dv of a segment's keys to `writing`, each in the form in which attention makes this gradient.
fn write_keys(
    schedule: &Schedule,
    segment: &Segment,
    buffers: [BufferId; 2],
    parts: KeyParts,
    writing: &mut Vec<Writing>,
) {
    let names = [TensorName::Dk, TensorName::Dv];
    for ((first, end, at), (len, tokens, patches)) in parts {
        let cover = Cover::new(patches, 0);
        for (run, within, index, rows) in split(&segment.kv, at, len) {
            for (buffer, name) in buffers.into_iter().zip(names) {
                let tokens = tokens.formed(Form::inside(schedule, name));
                let symbol = tokens.with(What::Gradient(name, cover.clone())).advance(within);
                let piece = SymbolRows { at: index, len: rows, symbol };
                writing.push(rows_to(buffer, &run, &(first..end), piece));
            }
        }
    }
}

/// Appends rows, joined to the last ones where out or LSE is cut but q is not.
fn append(rows: &mut Vec<SegmentRows>, next: SegmentRows) {
    if let Some(last) = rows.last_mut()
        && last.tokens.sequence == next.tokens.sequence
        && last.tokens.head == next.tokens.head
        && last.len > 1
        && (next.len == 1 || next.tokens.step == last.tokens.step)
        && last.tokens.start + last.tokens.step * last.len == next.tokens.start
    {
        last.len += next.len;
        return;
    }
    rows.push(next);
}

/// Adds to every piece of keys the patches of all pieces of queries that meet these keys.
fn collect_keys(parts: &mut KeyParts, keys: &[SegmentRows], patches: &[Vec<Patch>], heads: &LaunchHeads) {
    for key in keys {
        let line = key.tokens.line(key.len);
        let entry = parts.entry((heads.kv.start, heads.kv.end, key.at));
        let (_, _, mine) = entry.or_insert_with(|| (key.len, key.tokens.clone(), Vec::new()));
        mine.extend(patches.iter().flatten().filter(|patch| patch.cols == line).cloned());
    }
}

/// Returns `len` local keys from `at` on as rows of single runs: run, offset within the keys, first row of the run,
/// number of rows.
fn split(runs: &[Run], at: usize, len: usize) -> Vec<(Run, usize, usize, usize)> {
    let (mut first, mut found) = (0, Vec::new());
    for run in runs {
        let (start, end) = (at.max(first), (at + len).min(first + run.len));
        if start < end {
            found.push((*run, start - at, start - first, end - start));
        }
        first += run.len;
    }
    found
}

/// Returns the buffer's row of local key `at`.
fn row_of(runs: &[Run], at: usize) -> usize {
    split(runs, at, 1).first().map_or(0, |(run, _, index, _)| run.row(*index))
}
