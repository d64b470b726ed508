//! One rank: one launch forward and one backward.
//!
//! The rank's layout is the problem's own, and any layout is taken: gaps, strides, first offset, slack. Keys and values
//! in pages are a pool, which the launch reads through the table. Keys that sequences share are read where they lie.
//! The backward takes them spread ([`super::shared`]), since a launch writes each row of dK and dV once. The kernel
//! itself applies the sink.

use seamproof_oracle::sharding::{Piece, PlacedRun, held, run_of};
use seamproof_oracle::{Format, Pages, Problem, Side};

use super::build::{self, BuildError, Builder, Local, LocalBackward, Shards};
use super::program::{Attend, AttendBackward, Axes, FillValue, Placement, Schedule, Step, Work};
use super::shared::SharedRows;
use crate::AttentionCall;
use crate::shard::{ShardedSide, Slot};

/// The stream of all operations.
pub(super) const STREAM: usize = 0;

/// Returns the single-rank schedule.
pub fn single(problem: &Problem) -> Result<Schedule, BuildError> {
    let (mut builder, local) = begin(problem);
    let call = AttentionCall::whole(problem);
    attend(&mut builder, &call, &local);
    if let Some(to) = local.backward {
        builder.begin_backward();
        match SharedRows::of(problem, |sequence| problem.sequences[sequence].kv) {
            None => attend_backward(&mut builder, &call, &local, &to),
            Some(shared) => backward_of_shared(&mut builder, problem, &shared, &local, &to),
        }
    }
    Ok(finish(problem, builder))
}

/// Begins a schedule of one rank with its inputs and results.
pub(super) fn begin(problem: &Problem) -> (Builder, Local) {
    let mut builder = Builder::new(1);
    let kv_rows = problem.pages.as_ref().map_or(problem.rows.kv, Pages::rows);
    let shards = Shards { q: whole(problem, problem.rows.q), kv: whole(problem, kv_rows) };
    let local = build::local(&mut builder, problem, &shards, 0);
    (builder, local)
}

/// Pushes the forward launch.
pub(super) fn attend(builder: &mut Builder, call: &AttentionCall, local: &Local) {
    let Local { q, k, v, sink, out, lse, max_logit, .. } = *local;
    builder.fill(0, STREAM, max_logit, &[], FillValue::NegInfinity);
    let (step, call, table, descales) = (Step::Only, call.clone(), None, Vec::new());
    let attend = Attend { step, call, table, descales, q, k, v, sink, out, lse, max_logit };
    builder.push(0, STREAM, Work::Attend(attend));
}

/// Pushes the backward launch.
pub(super) fn attend_backward(
    builder: &mut Builder,
    call: &AttentionCall,
    local: &Local,
    to: &LocalBackward,
) {
    let Local { q, k, v, out, lse, .. } = *local;
    let LocalBackward { dout, dq, dk, dv, dsink } = *to;
    let (step, call, table, sink) = (Step::Only, call.clone(), None, local.sink.zip(dsink));
    let attend =
        AttendBackward { step, call, table, descales: Vec::new(), q, k, v, dout, out, lse, sink, dq, dk, dv };
    builder.push(0, STREAM, Work::AttendBackward(attend));
}

/// Ends a schedule of one rank, whose inputs and results lie as the problem's own.
pub(super) fn finish(problem: &Problem, builder: Builder) -> Schedule {
    let mut schedule = builder.finish();
    for placement in &mut schedule.placements {
        placement.rows = place_whole(problem, placement, &schedule.buffers[placement.buffer.0].axes);
    }
    schedule
}

/// Pushes the launch of the backward on spread keys, and the sums of what it writes.
fn backward_of_shared(
    builder: &mut Builder,
    problem: &Problem,
    shared: &SharedRows,
    local: &Local,
    to: &LocalBackward,
) {
    let at = (0, STREAM);
    let [k, v] = [local.k, local.v].map(|from| shared.spread(builder, at, from));
    let [dk, dv] = [(k, "dk"), (v, "dv")]
        .map(|(like, name)| builder.like(like, &format!("{name} of every sequence"), Format::F32));
    let call = AttentionCall::whole(&problem.unshared());
    attend_backward(builder, &call, &Local { k, v, ..*local }, &LocalBackward { dk, dv, ..*to });
    for (from, to) in [(dk, to.dk), (dv, to.dv)] {
        let sums = shared.gather(builder, at, from);
        builder.copy(0, STREAM, sums, to, shared.held());
    }
}

/// Returns a shard that holds only the rank's number of rows. The problem's own layout says where they lie.
fn whole(problem: &Problem, rows: usize) -> ShardedSide {
    let balance = problem.parallel.balance;
    ShardedSide { cp: 1, balance, members: 1, rows, slots: Vec::<Slot>::new(), lanes: None }
}

fn place_whole(problem: &Problem, placement: &Placement, axes: &Axes) -> Vec<PlacedRun> {
    use seamproof_oracle::TensorName::{Dk, Dv, K, V};
    if *axes == Axes::Heads {
        return Vec::new();
    }
    let sequences = problem.sequences.iter().enumerate();
    if let (Some(pages), K | V) = (&problem.pages, placement.tensor) {
        return place_in_pages(problem, pages);
    }
    let side = if matches!(placement.tensor, K | V | Dk | Dv) { Side::Kv } else { Side::Q };
    let placed = sequences.map(|(sequence, both)| {
        let local = run_of(both, side);
        let piece = Piece { start: 0, step: 1, span: local.span, at: 0 };
        PlacedRun { sequence, piece, local }
    });
    held(problem, side, placed)
}

/// Returns the rows of the pool that hold keys. Those of a shared page are the earlier sequence's.
fn place_in_pages(problem: &Problem, pages: &Pages) -> Vec<PlacedRun> {
    let mut placed = Vec::new();
    for (sequence, (both, borrowed)) in problem.sequences.iter().zip(pages.borrowed()).enumerate() {
        let mut start = borrowed * pages.size;
        for local in pages.runs(sequence, start..both.kv.len) {
            placed.push(PlacedRun {
                sequence,
                piece: Piece { start, step: 1, span: local.span, at: 0 },
                local,
            });
            start += local.len;
        }
    }
    placed
}
