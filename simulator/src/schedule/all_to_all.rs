//! All-to-all (Ulysses): every rank sees all rows of a block of heads.
//!
//! q, k and v are exchanged, and rank r then holds every row of the r-th *block* of heads, reordered into sequence
//! order. One launch attends to whole sequences, as on a single rank, and the results travel back. There are as many
//! blocks of query heads as ranks. KV heads are cut likewise. If there are fewer KV heads than ranks, each is
//! replicated on the ranks whose query heads read it, and its dk and dv are summed over the replicas. The sink and its
//! gradient belong to the block: the kernel applies them.
//!
//! | refused | why |
//! |---|---|
//! | [`BuildError::QueryHeads`] | query heads that are no multiple of the ranks |
//! | [`BuildError::KvHeads`] | KV heads that are neither a multiple nor a divisor of the ranks |
//! | [`BuildError::Shard`] | a span that the balance cannot cut, rows that lie apart and not side by side |

use seamproof_oracle::Problem;
use seamproof_oracle::sharding::{Piece, PlacedRun};

use super::build::{self, BuildError, Builder, Local, LocalBackward, Shards, Unseeing};
use super::collect::{COMPUTE, rank_order};
use super::exchange::{Exchange, HeadDeal};
use super::program::{Attend, AttendBackward, FillValue, Schedule, Step, Work};
use crate::{AttentionCall, RowPolicy, Segment};

/// Returns the all-to-all schedule. The module's text says which problems are refused.
pub fn all_to_all(problem: &Problem) -> Result<Schedule, BuildError> {
    let ranks = problem.parallel.size();
    let heads = HeadDeal::new(problem.heads, ranks)?;
    let shards = Shards::new(problem)?;
    let orders = [rank_order(&shards.q, 0..ranks), rank_order(&shards.kv, 0..ranks)];
    let exchange = Exchange::new(0, ranks, heads, &shards, orders);
    let call = whole_sequences(problem, &shards);
    let mut builder = Builder::new(ranks);
    let mut blocks = Vec::new();
    for rank in 0..ranks {
        let local = build::local_with_sinks(&mut builder, problem, &shards, rank, heads.sinks(problem, rank));
        let block = exchange.begin(&mut builder, rank, &local);
        forward(&mut builder, rank, &block, &call);
        exchange.end(&mut builder, rank, &block, &local);
        blocks.extend(local.backward.map(|to| (rank, block, to)));
    }
    if !blocks.is_empty() {
        builder.begin_backward();
    }
    for (rank, block, to) in blocks {
        let gradients = exchange.begin_backward(&mut builder, rank, &block, &to);
        backward(&mut builder, rank, &block, &gradients, &call);
        exchange.end_backward(&mut builder, rank, &gradients, &to);
    }
    Ok(builder.finish())
}

/// Returns every sequence as one segment of the collected buffers.
fn whole_sequences(problem: &Problem, shards: &Shards) -> AttentionCall {
    let segments = problem.sequences.iter().enumerate().flat_map(|(index, sequence)| {
        let (rows, kv) = (shards.q.gathered(index), shards.kv.gathered(index));
        let whole = |span: usize| Piece { start: 0, step: 1, span, at: 0 };
        let q = PlacedRun { sequence: index, piece: whole(rows.span), local: rows };
        let lengths = (sequence.q.len, sequence.kv.len);
        build::segments(&problem.mask, lengths, &q, (&whole(kv.span), kv), Unseeing::Kept)
    });
    let segments: Vec<Segment> = segments.collect();
    AttentionCall { segments, softmax: problem.softmax, policy: RowPolicy::Overwrite }
}

fn forward(builder: &mut Builder, rank: usize, block: &Local, call: &AttentionCall) {
    let &Local { q, k, v, sink, out, lse, max_logit, .. } = block;
    builder.fill(rank, COMPUTE, max_logit, &[], FillValue::NegInfinity);
    let (step, call) = (Step::Only, call.clone());
    let attend = Attend { step, call, table: None, q, k, v, sink, out, lse, max_logit };
    builder.push(rank, COMPUTE, Work::Attend(attend));
}

fn backward(builder: &mut Builder, rank: usize, block: &Local, to: &LocalBackward, call: &AttentionCall) {
    let &Local { q, k, v, out, lse, .. } = block;
    let &LocalBackward { dout, dq, dk, dv, dsink } = to;
    let (step, call, sink) = (Step::Only, call.clone(), block.sink.zip(dsink));
    let work = AttendBackward { step, call, table: None, q, k, v, dout, out, lse, sink, dq, dk, dv };
    builder.push(rank, COMPUTE, Work::AttendBackward(work));
}
