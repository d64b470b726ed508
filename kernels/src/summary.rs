//! What the host knows of a call besides its tables: by its lengths and masks kernels are chosen, and by its steps what the
//! copy engine is told.

use seamproof_oracle::Run;
use seamproof_simulator::{AttentionCall, Segment};

use crate::forward::SHORT_ROWS;

/// Numbers of a call's segments and runs that the host keeps, for the copy engine and for the choice of a launch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CallSummary {
    /// The step of every run of queries and of keys; `None` where runs differ.
    pub step: [Option<usize>; 2],
    /// The steps from a run's phase to the row behind its last owned one, at most. Lengths may grow up to it where a
    /// graph is replayed.
    pub reach: [usize; 2],
    /// The number of segments that own query rows.
    pub filled: usize,
    /// The most query rows that a segment owns.
    pub longest: usize,
    /// The query rows that short segments own, with head dims up to 64 and over.
    pub short_rows: [usize; 2],
    /// The most keys of a segment.
    pub keys: usize,
    /// The most keys that a row sees, by its segment's keys and bounds.
    pub seen: usize,
    /// The most keys that a segment's first row sees, by its keys and its right bound.
    pub first_seen: usize,
    /// Whether every row sees all keys of its segment.
    pub all_seen: bool,
}

impl CallSummary {
    /// Returns the numbers of a call and of its bands. Steps are those of the call's own runs: a band of one row has none.
    pub(crate) fn of(call: &AttentionCall, bands: &AttentionCall) -> CallSummary {
        let queries: Vec<Run> = call.segments.iter().map(|segment| segment.q).collect();
        let keys: Vec<Run> = call.segments.iter().flat_map(|segment| segment.kv.iter().copied()).collect();
        let filled = bands.segments.iter().filter(|band| band.q.span > 0).count();
        let spans = || bands.segments.iter().map(|band| band.q.span);
        let short_rows = SHORT_ROWS.map(|most| spans().filter(|span| *span <= most).sum());
        let longest = spans().max().unwrap_or(0);
        let sides = [queries, keys].map(|runs| {
            // The step of a run of one row means nothing.
            let mut steps = runs.iter().filter(|run| run.span > 1).map(|run| run.step);
            let first = steps.next().unwrap_or(1);
            let reach = runs.iter().filter(|run| run.span > 0).map(|run| run.offset / first + run.span).max();
            (steps.all(|step| step == first).then_some(first), reach.unwrap_or(0))
        });
        let keys = bands.segments.iter().map(Segment::keys).max().unwrap_or(0);
        let seen = bands.segments.iter().map(keys_seen).max().unwrap_or(0);
        let first_seen = bands.segments.iter().map(keys_of_first_row).max().unwrap_or(0);
        let (step, reach) = (sides.map(|side| side.0), sides.map(|side| side.1));
        let all_seen = bands.segments.iter().all(sees_all);
        CallSummary { step, reach, filled, longest, short_rows, keys, seen, first_seen, all_seen }
    }
}

/// Returns the most keys that a row of a segment sees.
fn keys_seen(segment: &Segment) -> usize {
    let width =
        segment.lo.zip(segment.hi).map(|(lo, hi)| hi.saturating_sub(lo).saturating_add(1).max(0) as usize);
    segment.keys().min(width.map_or(usize::MAX, |width| width.saturating_add(segment.sink_tokens)))
}

/// Returns the most keys that a segment's first row sees.
fn keys_of_first_row(segment: &Segment) -> usize {
    let end = segment.hi.map(|hi| hi.saturating_add(1).max(0) as usize);
    segment.keys().min(end.unwrap_or(usize::MAX))
}

/// Returns whether every row of a segment sees all its keys.
fn sees_all(segment: &Segment) -> bool {
    let (rows, keys) = (segment.q.len as i64, segment.keys() as i64);
    let sink_tokens = segment.sink_tokens as i64;
    let from_first =
        sink_tokens >= keys || segment.lo.is_none_or(|lo| lo.saturating_add(rows - 1) <= sink_tokens);
    let to_last = segment.hi.is_none_or(|hi| hi >= keys - 1);
    rows == 0 || (from_first && to_last)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Test that what the host knows of a call counts sink tokens among the keys that rows see.
    #[test]
    fn a_summary_counts_sink_tokens() {
        let rows = Run::packed(0, 20, 20);
        let summary = |sink_tokens| {
            let segment = Segment { q: rows, kv: vec![rows], lo: Some(-3), hi: None, prefix: 0, sink_tokens };
            let narrow = Segment { hi: Some(0), ..segment.clone() };
            assert!(keys_seen(&narrow) == 20.min(4 + sink_tokens), "{sink_tokens} sink tokens");
            // The last row, the farthest from the first keys.
            assert_eq!(sees_all(&segment), segment.visible(19).len() == 20, "{sink_tokens} sink tokens");
            sees_all(&segment)
        };
        assert_eq!([0, 15, 16, 20, 21].map(summary), [false, false, true, true, true]);
    }
}
