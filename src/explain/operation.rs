//! Description of operations other than launches, in one line each.

use seamproof_oracle::Run;
use seamproof_simulator::schedule::{
    Axes, BufferId, FillValue, KeySource, Layer, Merge, MergeStyle, Reduction, Region, Rotated, RowPair,
    Schedule, SegmentSource, Work,
};

use super::line::{Line, tidy};
use super::listed;

/// Largest number of ranges of rows that one operation names.
const ROWS_SHOWN: usize = 8;

/// Returns in words what an operation does.
pub(super) fn words(schedule: &Schedule, work: &Work) -> String {
    let name = |id: &BufferId| name(schedule, *id);
    let regions = |regions: &[Region]| listed(regions.iter().map(|one| region(schedule, one)), ROWS_SHOWN);
    match work {
        Work::Attend(_) => "attends".to_owned(),
        Work::AttendBackward(_) => "attends, backward".to_owned(),
        Work::Merge(merge) => merged(schedule, merge),
        Work::ApplySink { out, lse, rows: runs, .. } => {
            format!("applies the sink to {} and {}, rows {}", name(out), name(lse), rows(runs))
        }
        Work::SinkGradient { dsink, rows: runs, .. } => {
            format!("writes {} from rows {}", name(dsink), rows(runs))
        }
        Work::Accumulate { from, to, rows } => {
            format!("adds {} to {}, {}", name(from), name(to), pairs(rows))
        }
        Work::Copy { from, to, rows } => format!("copies {} to {}, {}", name(from), name(to), pairs(rows)),
        Work::MakeSegments { to, from } => {
            format!("makes {} from the lengths of sequences, {}", name(to), ends(from))
        }
        Work::CopyValid { from, to, table, .. } => {
            let table = region(schedule, table);
            format!("copies the valid rows that {table} says from {} to {}", name(from), name(to))
        }
        Work::Linear { layer, heads, from, to, rows } => {
            let layer = if *layer == Layer::Column { "column-parallel" } else { "row-parallel" };
            let (heads, rows) = (Line::range(heads.clone()), pairs(rows));
            format!("{layer} layer of heads {heads}: {} to {}, {rows}", name(from), name(to))
        }
        Work::Rotate { buffer, rows, inverse } => {
            let back = if *inverse { " back" } else { "" };
            format!("rotates {}{back}, {}", name(buffer), listed(rows.iter().map(rotated), ROWS_SHOWN))
        }
        Work::Fill { to, rows: runs, value } => {
            let value = if *value == FillValue::Zero { "0" } else { "−∞" };
            let by_head = schedule.buffers.get(to.0).is_some_and(|buffer| buffer.axes == Axes::Heads);
            let place = if by_head { "every head".to_owned() } else { format!("rows {}", rows(runs)) };
            format!("fills {} with {value}, {place}", name(to))
        }
        Work::Send { to, regions: from, .. } => format!("sends {} to rank {to}", regions(from)),
        Work::Recv { from, regions: to, .. } => format!("receives {} from rank {from}", regions(to)),
        Work::AllGather { communicator, from, to } => {
            let from = region(schedule, from);
            format!("all-gathers {from} into {} over {}", regions(to), members(schedule, *communicator))
        }
        Work::ReduceScatter { communicator, from, to } => {
            let to = region(schedule, to);
            format!("reduce-scatters {} into {to} over {}", regions(from), members(schedule, *communicator))
        }
        Work::AllToAll { communicator, send, recv } => {
            let (send, recv) = (regions(send), regions(recv));
            format!("all-to-alls {send} into {recv} over {}", members(schedule, *communicator))
        }
        Work::AllReduce { communicator, region: one, reduction } => {
            let what = if *reduction == Reduction::Sum { "sum" } else { "maximum" };
            format!("takes the {what} of {} over {}", region(schedule, one), members(schedule, *communicator))
        }
        Work::RecordEvent(event) => format!("records event {}", event.0),
        Work::WaitEvent(event) => format!("waits for event {}", event.0),
        Work::HostRead(one) => format!("the host reads {}", region(schedule, one)),
    }
}

/// Returns whose queries and keys a table is about.
fn ends(from: &SegmentSource) -> String {
    match from.keys {
        _ if from.sides[0].cp == 1 => "which are whole".to_owned(),
        KeySource::Gathered => format!("for the queries of place {} and all keys", from.place),
        KeySource::Residues => format!("for the queries of place {} and every cp-th key", from.place),
        KeySource::Of(owner) => {
            format!("for the queries of place {} and the keys of place {owner}", from.place)
        }
    }
}

fn merged(schedule: &Schedule, merge: &Merge) -> String {
    let Merge { style, step_out, step_lse, out, lse, rows } = merge;
    let [step_out, step_lse, out, lse] = [step_out, step_lse, out, lse].map(|id| name(schedule, *id));
    let rows = pairs(rows);
    match style {
        MergeStyle::Running => format!("merges {step_out} and {step_lse} into {out} and {lse}, {rows}"),
        MergeStyle::Difference => {
            format!("merges {step_out} and {step_lse} into {out} and {lse} by a difference, {rows}")
        }
        MergeStyle::Statistics => format!("merges {step_lse} into {lse}, {rows}"),
        MergeStyle::Weighted { .. } => format!("adds {step_out}, weighted by {lse}, to {out}, {rows}"),
    }
}

/// Returns a buffer's name, quoted where it is more than a word.
pub(super) fn name(schedule: &Schedule, id: BufferId) -> String {
    let name = schedule.buffers.get(id.0).map_or("", |buffer| &buffer.name);
    if name.contains(' ') { format!("“{name}”") } else { name.to_owned() }
}

fn members(schedule: &Schedule, communicator: usize) -> String {
    let members = schedule.communicators.get(communicator).map_or(&[][..], Vec::as_slice);
    format!("ranks {}", listed(members, ROWS_SHOWN))
}

fn region(schedule: &Schedule, region: &Region) -> String {
    let Region { buffer, rows: run, heads } = region;
    let all = schedule.buffers.get(buffer.0);
    let rows = match all.is_some_and(|buffer| buffer.axes == Axes::Heads) {
        true => String::new(),
        false => format!(" rows {}", rows(std::slice::from_ref(run))),
    };
    let heads = match all.is_some_and(|buffer| *heads == (0..buffer.heads)) {
        true => String::new(),
        false => format!(" heads {}..{}", heads.start, heads.end),
    };
    format!("{}{rows}{heads}", name(schedule, *buffer))
}

fn lines(runs: impl Iterator<Item = Run>) -> Vec<Line> {
    tidy(runs.map(|run| Line::new(run.offset, run.step, run.len)).collect())
}

/// Returns the real rows of runs, in words.
pub(super) fn rows(runs: &[Run]) -> String {
    listed(lines(runs.iter().copied()), ROWS_SHOWN)
}

fn rotated(rotated: &Rotated) -> String {
    let Rotated { rows: run, position, step } = *rotated;
    let positions = Line::new(position, step, run.len);
    format!("rows {} by positions {positions}", rows(&[run]))
}

fn pairs(pairs: &[RowPair]) -> String {
    let (from, to) = (lines(pairs.iter().map(|pair| pair.0)), lines(pairs.iter().map(|pair| pair.1)));
    let same = pairs.iter().all(|(from, to)| from == to);
    let moved =
        if from == to { ", reordered".to_owned() } else { format!(" to rows {}", listed(to, ROWS_SHOWN)) };
    let from = listed(from, ROWS_SHOWN);
    if same { format!("rows {from}") } else { format!("rows {from}{moved}") }
}
