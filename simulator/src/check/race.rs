//! Races: two operations of a rank that touch the same rows and heads of a buffer are ordered if one of them writes.
//!
//! Operations come in one legal [`Order`]. Buffers are first checked as wholes. An operation is compared with the last
//! touch of every lane and of each kind that it conflicts with. If it comes after these touches, it comes after all
//! earlier ones too, because the operations of a lane are ordered. A buffer that passes for all its operations,
//! whatever their rows, has no race. Only the rows of other buffers are examined.
//!
//! For each interval of rows, the *shadow* keeps the last write, the reads since, and the raises since. Raises are of
//! max_logit, commute and are atomic. By the clocks, a new access must come after those that it conflicts with. Older
//! accesses need no check, because the last write was itself checked against them. Rows of runs with a step are
//! examined one by one, others as intervals.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use seamproof_oracle::Run;

use super::error::{CheckError, Errors, OperationId};
use super::order::{Action, Moment, Order};
use super::touch::{Access, TouchedRows, touches};
use crate::schedule::{BufferId, Schedule, Work};

/// Collects unordered conflicting accesses.
pub(super) fn check(schedule: &Schedule, order: &Order, errors: &mut Errors) {
    let suspects = suspects(schedule, order);
    if suspects.iter().all(|suspect| !suspect) {
        return;
    }
    let mut races = Races { schedule, order, suspects, shadows: BTreeMap::new(), met: BTreeSet::new() };
    for place in order.steps.iter().flat_map(Action::places) {
        races.operation(*place, errors);
        if errors.full() {
            return;
        }
    }
}

/// Returns for each buffer whether some conflicting touches of it, of any rows, are unordered.
fn suspects(schedule: &Schedule, order: &Order) -> Vec<bool> {
    let mut suspects = vec![false; schedule.buffers.len()];
    // The last touch of each lane and kind, for each buffer.
    let mut last: Vec<Vec<(usize, Access, OperationId)>> = vec![Vec::new(); schedule.buffers.len()];
    for &place in order.steps.iter().flat_map(Action::places) {
        let work = &schedule.ranks[place.rank].operations[place.operation].work;
        let lane = order.moment(place).lane;
        for (BufferId(buffer), kind, _) in touches(work) {
            let touched = &mut last[buffer];
            let unordered = |(_, other, first): &(usize, Access, OperationId)| {
                kind.conflicts(*other) && !order.ordered(*first, place)
            };
            suspects[buffer] = suspects[buffer] || touched.iter().any(unordered);
            match touched.iter_mut().find(|(l, k, _)| (*l, *k) == (lane, kind)) {
                Some((.., latest)) => *latest = place,
                None => touched.push((lane, kind, place)),
            }
        }
    }
    suspects
}

impl Order {
    fn moment(&self, place: OperationId) -> &Moment {
        &self.moments[place.rank][place.operation]
    }

    /// Whether `first` has surely ended before `second`, of the same rank, begins. An operation counts as ordered with
    /// itself.
    fn ordered(&self, first: OperationId, second: OperationId) -> bool {
        let (a, b) = (self.moment(first), self.moment(second));
        first.operation == second.operation || b.before.get(a.lane).is_some_and(|&ended| ended >= a.number)
    }
}

#[derive(Clone, Debug, Default)]
struct Shadow {
    write: Option<OperationId>,
    reads: Vec<OperationId>,
    raises: Vec<OperationId>,
}

/// Intervals of rows, from start to end.
type ShadowRows = BTreeMap<usize, (usize, Shadow)>;

struct Races<'a> {
    schedule: &'a Schedule,
    order: &'a Order,
    /// Whether each buffer is examined.
    suspects: Vec<bool>,
    /// Bands of heads of each buffer.
    shadows: BTreeMap<BufferId, Vec<(Range<usize>, ShadowRows)>>,
    /// Races that were reported already.
    met: BTreeSet<(OperationId, OperationId, BufferId)>,
}

impl Races<'_> {
    fn operation(&mut self, place: OperationId, errors: &mut Errors) {
        let work = &self.schedule.ranks[place.rank].operations[place.operation].work;
        for ((buffer, first, end, kind), runs) in self.touched(work) {
            if first == end {
                continue;
            }
            for rows in intervals(runs) {
                self.access(place, buffer, first..end, rows, kind, errors);
            }
        }
    }

    /// Returns the rows of suspect buffers that an operation touches, by buffer, heads and kind.
    fn touched(&self, work: &Work) -> BTreeMap<(BufferId, usize, usize, Access), Vec<Run>> {
        let mut touched: BTreeMap<_, Vec<Run>> = BTreeMap::new();
        for (id, kind, rows) in touches(work).into_iter().filter(|(id, ..)| self.suspects[id.0]) {
            let buffer = &self.schedule.buffers[id.0];
            let (first, end) = match rows {
                TouchedRows::Region(region) => (region.heads.start, region.heads.end),
                _ => (0, buffer.heads),
            };
            touched.entry((id, first, end, kind)).or_default().extend(rows.runs(buffer));
        }
        touched
    }

    fn access(
        &mut self,
        place: OperationId,
        buffer: BufferId,
        heads: Range<usize>,
        rows: Range<usize>,
        kind: Access,
        errors: &mut Errors,
    ) {
        let described = &self.schedule.buffers[buffer.0];
        let bands = self.shadows.entry(buffer).or_insert_with(|| {
            let all = BTreeMap::from([(0, (described.rows.max(1), Shadow::default()))]);
            vec![(0..described.heads, all)]
        });
        split_heads(bands, heads.start);
        split_heads(bands, heads.end);
        let inside = bands.iter_mut().filter(|(band, _)| heads.start <= band.start && band.end <= heads.end);
        for (band, map) in inside {
            split_rows(map, rows.start);
            split_rows(map, rows.end);
            for (&start, (end, shadow)) in map.range_mut(rows.clone()) {
                let before = shadow.before(kind).filter(|&other| !self.order.ordered(other, place));
                for first in before {
                    if self.met.insert((first, place, buffer)) {
                        let (rows, heads) = (start..*end, band.clone());
                        let buffer = described.name.to_string();
                        errors.push(CheckError::Race { first, second: place, buffer, rows, heads });
                    }
                }
                shadow.enter(self.order, place, kind);
            }
            if kind == Access::Write {
                unite(map, &rows);
            }
        }
    }
}

impl Shadow {
    /// Returns the operations that an access must come after.
    fn before(&self, kind: Access) -> impl Iterator<Item = OperationId> {
        let of = |list, other| if kind.conflicts(other) { list } else { &[][..] };
        let (reads, raises) = (of(&self.reads[..], Access::Read), of(&self.raises[..], Access::Raise));
        self.write.into_iter().chain(reads.iter().chain(raises).copied())
    }

    /// Notes an access. A write replaces all earlier accesses. A read or a raise replaces earlier ones of its kind that
    /// ended before it.
    fn enter(&mut self, order: &Order, place: OperationId, kind: Access) {
        let list = match kind {
            Access::Read => &mut self.reads,
            Access::Raise => &mut self.raises,
            Access::Write => {
                *self = Shadow { write: Some(place), ..Shadow::default() };
                return;
            }
        };
        list.retain(|&other| !order.ordered(other, place));
        list.push(place);
    }
}

/// Joins the intervals inside `rows`, after a write to all of them. The ends of `rows` are ends of intervals.
fn unite(map: &mut ShadowRows, rows: &Range<usize>) {
    while let Some((&next, _)) = map.range(rows.start + 1..rows.end).next() {
        map.remove(&next);
    }
    if let Some((end, _)) = map.get_mut(&rows.start) {
        *end = rows.end;
    }
}

fn split_heads(bands: &mut Vec<(Range<usize>, ShadowRows)>, head: usize) {
    if let Some(at) = bands.iter().position(|(band, _)| band.start < head && head < band.end) {
        let (band, rows) = bands[at].clone();
        bands[at].0.end = head;
        bands.insert(at + 1, (head..band.end, rows));
    }
}

fn split_rows(map: &mut ShadowRows, row: usize) {
    if let Some((_, (end, shadow))) = map.range_mut(..row).next_back()
        && *end > row
    {
        let tail = (std::mem::replace(end, row), shadow.clone());
        map.insert(row, tail);
    }
}

/// Returns the rows of runs (their first `len`) as the fewest intervals.
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
