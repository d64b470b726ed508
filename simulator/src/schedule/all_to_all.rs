//! All-to-all (Ulysses): every rank sees all rows of a block of heads.
//!
//! q, k and v are exchanged so that rank r holds every row of the r-th *block* of heads, reordered into sequence order;
//! there one launch attends to whole sequences as on a single rank, and the results travel back. Query heads are cut
//! into as many blocks as there are ranks. KV heads are cut likewise, or, where there are fewer than ranks, replicated
//! on the ranks whose query heads read them, and their dk and dv are summed over the replicas. The sink and its gradient
//! are the block's own: the kernel applies them.
//!
//! | refused | why |
//! |---|---|
//! | [`BuildError::QueryHeads`] | query heads that are no multiple of the ranks |
//! | [`BuildError::KvHeads`] | KV heads that are neither a multiple nor a divisor of the ranks |
//! | [`BuildError::Shard`] | a span that the balance cannot cut, rows that lie apart |

use seamproof_oracle::{Format, Problem, Side};

use super::build::{self, BuildError, Builder, Local, Shards};
use super::collect::{COMPUTE, Exchange, HeadDeal, rank_order, resized};
use super::{Attend, AttendBackward, BufferId, FillValue, PlacedRun, Schedule, Work};
use crate::shard::Piece;
use crate::{AttentionCall, RowPolicy, Segment};

/// The all-to-all schedule; see the module's text for what is refused.
pub fn all_to_all(problem: &Problem) -> Result<Schedule, BuildError> {
    let ranks = problem.parallel.size();
    let heads = HeadDeal::new(problem.heads, ranks)?;
    let shards = Shards::new(problem)?;
    let orders = [rank_order(&shards.q, 0..ranks), rank_order(&shards.kv, 0..ranks)];
    let exchange = Exchange::new(0, ranks, heads, &shards, orders);
    let call = whole_sequences(problem, &shards);
    let mut builder = Builder::new(ranks);
    for rank in 0..ranks {
        let sinks = if problem.learnable_sinks() > 0 { heads.q(rank) } else { 0..0 };
        let local = build::local_with_sinks(&mut builder, problem, &shards, rank, sinks);
        let block = forward(&mut builder, rank, &exchange, &local, &call);
        backward(&mut builder, rank, &exchange, &local, &block, problem, &call);
    }
    Ok(builder.finish())
}

/// A rank's block of heads, all rows in sequence order.
struct Block {
    q: BufferId,
    k: BufferId,
    v: BufferId,
    out: BufferId,
    lse: BufferId,
}

/// Every sequence as one segment of the collected buffers.
fn whole_sequences(problem: &Problem, shards: &Shards) -> AttentionCall {
    let segments = problem.sequences.iter().enumerate().filter_map(|(index, sequence)| {
        let (rows, kv) = (shards.q.gathered(index), shards.kv.gathered(index));
        let whole = |span: usize| Piece { start: 0, step: 1, span, at: 0 };
        let q = PlacedRun { sequence: index, piece: whole(rows.span), local: rows };
        build::segment(&problem.mask, (sequence.q.len, sequence.kv.len), &q, &whole(kv.span), kv)
    });
    let segments: Vec<Segment> = segments.collect();
    AttentionCall { segments, softmax: problem.softmax, policy: RowPolicy::Overwrite }
}

fn forward(
    builder: &mut Builder,
    rank: usize,
    exchange: &Exchange,
    local: &Local,
    call: &AttentionCall,
) -> Block {
    let inputs = [(Side::Q, local.q), (Side::Kv, local.k), (Side::Kv, local.v)];
    let [q, k, v] = exchange.collect(builder, rank, inputs);
    let (rows, heads) = (builder.describe(q).rows, builder.describe(q).heads);
    let out = resized(builder, local.out, "out collected", rows, heads);
    let lse = resized(builder, local.lse, "lse collected", rows, heads);
    let max_logit = resized(builder, local.max_logit, "max_logit of the block", 0, heads);
    builder.fill(rank, COMPUTE, max_logit, &[], FillValue::NegInfinity);
    let attend = Attend { call: call.clone(), q, k, v, sink: local.sink, out, lse, max_logit };
    builder.push(rank, COMPUTE, Work::Attend(attend));
    exchange.deal(builder, rank, [(Side::Q, out, local.out), (Side::Q, lse, local.lse)]);
    exchange.gather_heads(builder, rank, max_logit, local.max_logit);
    Block { q, k, v, out, lse }
}

/// Nothing for a problem without a backward.
fn backward(
    builder: &mut Builder,
    rank: usize,
    exchange: &Exchange,
    local: &Local,
    block: &Block,
    problem: &Problem,
    call: &AttentionCall,
) {
    let Some(to) = local.backward else { return };
    let &Block { q, k, v, out, lse } = block;
    let [dout] = exchange.collect(builder, rank, [(Side::Q, to.dout)]);
    let format = problem.precision.gradients.format;
    let dq = builder.like(q, "dq collected", format);
    // Partial gradients are rounded once, after they are added.
    let format = if exchange.replicas() > 1 { Format::F32 } else { format };
    let dk = builder.like(k, "dk collected", format);
    let dv = builder.like(v, "dv collected", format);
    let sink = local.sink.zip(to.dsink);
    let call = call.clone();
    let work = AttendBackward { call, q, k, v, dout, out, lse, sink, dq, dk, dv };
    builder.push(rank, COMPUTE, Work::AttendBackward(work));
    exchange.deal(builder, rank, [(Side::Q, dq, to.dq), (Side::Kv, dk, to.dk), (Side::Kv, dv, to.dv)]);
}
