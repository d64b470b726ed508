//! Races: any two operations of a rank that touch the same rows and heads of a buffer, one of them writing, are
//! ordered.
//!
//! Operations come in one legal [`Order`]. For each interval of rows the *shadow* keeps the last write, the reads since,
//! and the raises since (of max_logit, which commute and are atomic). A new access must come after those that it
//! conflicts with, by the clocks. That is enough: what the last write itself must come after was asked when it came.
//! Rows of runs with a step are looked at one by one, others as intervals.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use seamproof_oracle::Run;

use super::error::{CheckError, Errors, Place};
use super::order::{Moment, Order, Step};
use super::shape::{owned, rows_of};
use crate::AttentionCall;
use crate::schedule::{Axes, BufferId, Region, RowPair, Schedule, Work};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Read,
    Write,
    Raise,
}

/// Collects unordered conflicting accesses.
pub(super) fn check(schedule: &Schedule, order: &Order, errors: &mut Errors) {
    let mut races = Races { schedule, order, shadows: BTreeMap::new(), met: BTreeSet::new() };
    for step in &order.steps {
        match step {
            Step::Local(place) => races.operation(*place, errors),
            Step::Message(send, receive) => {
                [send, receive].into_iter().for_each(|p| races.operation(*p, errors));
            }
            Step::Collective(places) => places.iter().for_each(|place| races.operation(*place, errors)),
        }
    }
}

/// Rows and heads of a buffer that an operation touches in one way.
type Touched = BTreeMap<(BufferId, usize, usize, Kind), Vec<Run>>;

#[derive(Clone, Debug, Default)]
struct Shadow {
    write: Option<Place>,
    reads: Vec<Place>,
    raises: Vec<Place>,
}

/// Intervals of rows: start to end.
type Rows = BTreeMap<usize, (usize, Shadow)>;

struct Races<'a> {
    schedule: &'a Schedule,
    order: &'a Order,
    /// For each buffer its bands of heads.
    shadows: BTreeMap<BufferId, Vec<(Range<usize>, Rows)>>,
    /// Reported already.
    met: BTreeSet<(Place, Place, BufferId)>,
}

impl Races<'_> {
    fn operation(&mut self, place: Place, errors: &mut Errors) {
        let work = &self.schedule.ranks[place.rank].operations[place.operation].work;
        for ((buffer, first, end, kind), runs) in touched(self.schedule, work) {
            if first == end {
                continue;
            }
            for rows in intervals(runs) {
                self.access(place, buffer, first..end, rows, kind, errors);
            }
        }
    }

    fn moment(&self, place: Place) -> &Moment {
        &self.order.moments[place.rank][place.operation]
    }

    /// Whether `first` surely ended before `second` begins.
    fn ordered(&self, first: Place, second: Place) -> bool {
        let (a, b) = (self.moment(first), self.moment(second));
        first.operation == second.operation || b.before.get(a.lane).is_some_and(|&ended| ended >= a.number)
    }

    fn access(
        &mut self,
        place: Place,
        buffer: BufferId,
        heads: Range<usize>,
        rows: Range<usize>,
        kind: Kind,
        errors: &mut Errors,
    ) {
        let described = &self.schedule.buffers[buffer.0];
        let all =
            vec![(0..described.heads, BTreeMap::from([(0, (described.rows.max(1), Shadow::default()))]))];
        let mut bands = self.shadows.remove(&buffer).unwrap_or(all);
        split_heads(&mut bands, heads.start);
        split_heads(&mut bands, heads.end);
        for (band, map) in
            bands.iter_mut().filter(|(band, _)| heads.start <= band.start && band.end <= heads.end)
        {
            split_rows(map, rows.start);
            split_rows(map, rows.end);
            for (&start, (end, shadow)) in map.range_mut(rows.clone()) {
                let conflicts =
                    shadow.write.iter().chain(if kind == Kind::Read { &[] } else { &shadow.reads[..] });
                let conflicts = conflicts.chain(if kind == Kind::Raise { &[] } else { &shadow.raises[..] });
                let unordered: Vec<Place> =
                    conflicts.copied().filter(|&other| !self.ordered(other, place)).collect();
                for first in unordered {
                    if self.met.insert((first, place, buffer)) {
                        let (rows, heads) = (start..*end, band.clone());
                        let buffer = described.name.clone();
                        errors.push(CheckError::Race { first, second: place, buffer, rows, heads });
                    }
                }
                self.enter(shadow, place, kind);
            }
            if kind == Kind::Write {
                let written = Shadow { write: Some(place), ..Shadow::default() };
                let inside: Vec<usize> = map.range(rows.clone()).map(|(&start, _)| start).collect();
                inside.into_iter().for_each(|start| drop(map.remove(&start)));
                map.insert(rows.start, (rows.end, written));
            }
        }
        self.shadows.insert(buffer, bands);
    }

    /// Notes a read or a raise; an earlier one of the same lane ended before it.
    fn enter(&self, shadow: &mut Shadow, place: Place, kind: Kind) {
        let list = match kind {
            Kind::Read => &mut shadow.reads,
            Kind::Raise => &mut shadow.raises,
            Kind::Write => return,
        };
        list.retain(|&other| !self.ordered(other, place));
        list.push(place);
    }
}

fn split_heads(bands: &mut Vec<(Range<usize>, Rows)>, head: usize) {
    if let Some(at) = bands.iter().position(|(band, _)| band.start < head && head < band.end) {
        let (band, rows) = bands[at].clone();
        bands[at].0.end = head;
        bands.insert(at + 1, (head..band.end, rows));
    }
}

fn split_rows(map: &mut Rows, row: usize) {
    if let Some((_, (end, shadow))) = map.range_mut(..row).next_back()
        && *end > row
    {
        let tail = (std::mem::replace(end, row), shadow.clone());
        map.insert(row, tail);
    }
}

/// The rows of runs (their first `len`), as few intervals as they make.
fn intervals(runs: Vec<Run>) -> Vec<Range<usize>> {
    let mut rows: Vec<Range<usize>> = Vec::with_capacity(runs.len());
    for run in runs {
        match run.step {
            1 => rows.push(run.offset..run.offset + run.len),
            _ => rows.extend(run.real_rows().map(|row| row..row + 1)),
        }
    }
    rows.retain(|range| !range.is_empty());
    rows.sort_unstable_by_key(|range| range.start);
    rows.dedup_by(|later, earlier| {
        let joins = later.start <= earlier.end;
        if joins {
            earlier.end = earlier.end.max(later.end);
        }
        joins
    });
    rows
}

/// What an operation touches.
fn touched(schedule: &Schedule, work: &Work) -> Touched {
    let mut touched = Access { schedule, touched: Touched::new() };
    match work {
        Work::Attend(a) => {
            let (q, kv, queries, _) = call_rows(&a.call);
            touched.rows(a.q, &q, Kind::Read);
            [a.k, a.v].into_iter().for_each(|id| touched.rows(id, &kv, Kind::Read));
            [a.out, a.lse].into_iter().for_each(|id| touched.rows(id, &queries, Kind::Write));
            a.sink.into_iter().for_each(|id| touched.rows(id, &[], Kind::Read));
            touched.rows(a.max_logit, &[], Kind::Raise);
        }
        Work::AttendBackward(a) => {
            let (q, kv, queries, keys) = call_rows(&a.call);
            [a.q, a.dout, a.out, a.lse].into_iter().for_each(|id| touched.rows(id, &q, Kind::Read));
            [a.k, a.v].into_iter().for_each(|id| touched.rows(id, &kv, Kind::Read));
            touched.rows(a.dq, &queries, Kind::Write);
            [a.dk, a.dv].into_iter().for_each(|id| touched.rows(id, &keys, Kind::Write));
            if let Some((sink, dsink)) = a.sink {
                touched.rows(sink, &[], Kind::Read);
                touched.rows(dsink, &[], Kind::Write);
            }
        }
        Work::Merge(m) => {
            let (from, to) = sides(&m.rows);
            [m.step_out, m.step_lse].into_iter().for_each(|id| touched.rows(id, &from, Kind::Read));
            [m.out, m.lse].into_iter().for_each(|id| touched.rows(id, &to, Kind::Write));
        }
        Work::ApplySink { sink, out, lse, rows } => {
            sink.iter().for_each(|&id| touched.rows(id, &[], Kind::Read));
            [out, lse].into_iter().for_each(|&id| touched.rows(id, rows, Kind::Write));
        }
        Work::SinkGradient { sink, dout, out, lse, dsink, rows } => {
            touched.rows(*sink, &[], Kind::Read);
            [dout, out, lse].into_iter().for_each(|&id| touched.rows(id, rows, Kind::Read));
            touched.rows(*dsink, &[], Kind::Write);
        }
        Work::Accumulate { from, to, rows }
        | Work::Copy { from, to, rows }
        | Work::Linear { from, to, rows, .. } => {
            let (read, written) = sides(rows);
            touched.rows(*from, &read, Kind::Read);
            touched.rows(*to, &written, Kind::Write);
        }
        Work::Rotate { buffer, rows, .. } => {
            let rows: Vec<Run> = rows.iter().map(|rotated| rotated.rows).collect();
            touched.rows(*buffer, &rows, Kind::Write);
        }
        Work::Fill { to, rows, .. } => touched.rows(*to, rows, Kind::Write),
        Work::Send { regions, .. } => touched.regions(regions, Kind::Read),
        Work::Recv { regions, .. } => touched.regions(regions, Kind::Write),
        Work::AllGather { from, to, .. } => {
            touched.regions(std::slice::from_ref(from), Kind::Read);
            touched.regions(to, Kind::Write);
        }
        Work::ReduceScatter { from, to, .. } => {
            touched.regions(from, Kind::Read);
            touched.regions(std::slice::from_ref(to), Kind::Write);
        }
        Work::AllToAll { send, recv, .. } => {
            touched.regions(send, Kind::Read);
            touched.regions(recv, Kind::Write);
        }
        Work::AllReduce { region, .. } | Work::HostRead(region) => {
            touched.regions(std::slice::from_ref(region), Kind::Write);
        }
        Work::RecordEvent(_) | Work::WaitEvent(_) => {}
    }
    touched.touched
}

struct Access<'a> {
    schedule: &'a Schedule,
    touched: Touched,
}

impl Access<'_> {
    /// Every head; every value of a buffer without rows.
    fn rows(&mut self, id: BufferId, runs: &[Run], kind: Kind) {
        let buffer = &self.schedule.buffers[id.0];
        let list = self.touched.entry((id, 0, buffer.heads, kind)).or_default();
        match buffer.axes {
            Axes::Heads => list.push(Run::packed(0, 1, 1)),
            _ => list.extend_from_slice(runs),
        }
    }

    fn regions(&mut self, regions: &[Region], kind: Kind) {
        for region in regions {
            let run = rows_of(&self.schedule.buffers[region.buffer.0], region);
            let key = (region.buffer, region.heads.start, region.heads.end, kind);
            self.touched.entry(key).or_default().push(run);
        }
    }
}

fn sides(pairs: &[RowPair]) -> (Vec<Run>, Vec<Run>) {
    pairs.iter().copied().unzip()
}

/// Queries and keys that a call reads, queries and keys that it owns.
fn call_rows(call: &AttentionCall) -> (Vec<Run>, Vec<Run>, Vec<Run>, Vec<Run>) {
    let writes = |run: &Run| Run { len: owned(call, run), ..*run };
    let q: Vec<Run> = call.segments.iter().map(|segment| segment.q).collect();
    let kv: Vec<Run> = call.segments.iter().flat_map(|segment| segment.kv.iter().copied()).collect();
    let (queries, keys) = (q.iter().map(writes).collect(), kv.iter().map(writes).collect());
    (q, kv, queries, keys)
}
