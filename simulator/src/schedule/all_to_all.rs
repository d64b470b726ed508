//! All-to-all (Ulysses): every rank sees all rows of a block of heads.
//!
//! q, k and v are exchanged, and rank r then holds every row of the r-th *block* of heads, reordered into sequence
//! order. One launch attends to whole sequences, as on a single rank, and the results travel back. There are as many
//! blocks of query heads as ranks. KV heads are cut likewise. If there are fewer KV heads than ranks, each is
//! replicated on the ranks whose query heads read it, and its dk and dv are summed over the replicas. The sink and its
//! gradient belong to the block: the kernel applies them.
//!
//! In TransformerEngine's shipped order ([`MergeOrder::Deferred`]), the launches read their segments in a table of
//! whole sequences, where one can say them ([`super::tables`]). They then leave padding as it is: it has been filled.
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
use super::program::{
    Attend, AttendBackward, BufferId, FillValue, KeySource, MergeOrder, Region, Schedule, SegmentSource,
    Step, Work,
};
use super::tables::{self, Told};
use crate::shard::ShardedSide;
use crate::{AttentionCall, RowPolicy, Segment};

/// Returns the all-to-all schedule. The module's text says which problems are refused.
pub fn all_to_all(problem: &Problem, order: MergeOrder) -> Result<Schedule, BuildError> {
    let ranks = problem.parallel.size();
    let heads = HeadDeal::new(problem.heads, ranks)?;
    let shards = Shards::new(problem)?;
    let orders = [rank_order(&shards.q, 0..ranks), rank_order(&shards.kv, 0..ranks)];
    let exchange = Exchange::new(0, ranks, heads, &shards, orders);
    let collected = Collected::new(problem, &shards, order);
    let mut builder = Builder::new(ranks);
    let mut blocks = Vec::new();
    for rank in 0..ranks {
        let local = build::local_with_sinks(&mut builder, problem, &shards, rank, heads.sinks(problem, rank));
        let block = exchange.begin(&mut builder, rank, &local);
        let table = collected.forward(&mut builder, rank, &block);
        exchange.end(&mut builder, rank, &block, &local);
        blocks.extend(local.backward.map(|to| (rank, block, to, table)));
    }
    if !blocks.is_empty() {
        builder.begin_backward();
    }
    for (rank, block, to, table) in blocks {
        let gradients = exchange.begin_backward(&mut builder, rank, &block, &to);
        collected.backward(&mut builder, rank, (&block, table), &gradients);
        exchange.end_backward(&mut builder, rank, &gradients, &to);
    }
    Ok(builder.finish())
}

/// Returns every sequence as one segment of the collected buffers.
pub(super) fn whole_sequences(problem: &Problem, shards: &Shards) -> AttentionCall {
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

/// Whole sequences in the collected buffers of a rank.
struct Collected {
    /// The call of both passes.
    call: AttentionCall,
    /// Both sides, cut over one rank.
    shards: Shards,
    /// What the table of the call is made from, if launches read one.
    told: Option<SegmentSource>,
}

impl Collected {
    fn new(problem: &Problem, shards: &Shards, order: MergeOrder) -> Collected {
        let whole = tables::whole_sequences(shards);
        let told = SegmentSource::told(problem.mask, &whole, 0, KeySource::Of(0))
            .filter(|_| order == MergeOrder::Deferred);
        let call = whole_sequences(problem, shards);
        Collected { call, shards: whole, told }
    }

    /// Returns the call of a launch, with the rows of the table that say it.
    fn call(&self, table: Option<BufferId>) -> (AttentionCall, Option<Region>) {
        let Some((table, source)) = table.zip(self.told.as_ref()) else { return (self.call.clone(), None) };
        let told = Told::new(table, source);
        let (segments, policy) = (told.segments(0..1), RowPolicy::Leave);
        (AttentionCall { segments, policy, ..self.call }, Some(told.region(0..1)))
    }

    /// Fills rows of all slots, which launches with a table leave as they are where nothing is real.
    fn fill(&self, builder: &mut Builder, rank: usize, to: BufferId, side: &ShardedSide, value: FillValue) {
        if self.told.is_some() {
            builder.fill(rank, COMPUTE, to, &build::slots(side), value);
        }
    }

    /// Pushes the forward. Returns the table, which the backward reads too.
    fn forward(&self, builder: &mut Builder, rank: usize, block: &Local) -> Option<BufferId> {
        let &Local { q, k, v, sink, out, lse, max_logit, .. } = block;
        let table = self.told.as_ref().map(|source| {
            let table = tables::buffer(builder, rank, "segments of whole sequences", source);
            tables::make(builder, (rank, COMPUTE), table, source.clone());
            table
        });
        self.fill(builder, rank, out, &self.shards.q, FillValue::Zero);
        self.fill(builder, rank, lse, &self.shards.q, FillValue::NegInfinity);
        builder.fill(rank, COMPUTE, max_logit, &[], FillValue::NegInfinity);
        let (step, (call, told)) = (Step::Only, self.call(table));
        let attend =
            Attend { step, call, table: told, descales: Vec::new(), q, k, v, sink, out, lse, max_logit };
        builder.push(rank, COMPUTE, Work::Attend(attend));
        table
    }

    fn backward(
        &self,
        builder: &mut Builder,
        rank: usize,
        (block, table): (&Local, Option<BufferId>),
        to: &LocalBackward,
    ) {
        let &Local { q, k, v, out, lse, .. } = block;
        let &LocalBackward { dout, dq, dk, dv, dsink } = to;
        let Shards { q: queries, kv: keys } = &self.shards;
        for (gradient, side) in [(dq, queries), (dk, keys), (dv, keys)] {
            self.fill(builder, rank, gradient, side, FillValue::Zero);
        }
        let (step, (call, table), sink) = (Step::Only, self.call(table), block.sink.zip(dsink));
        let work = AttendBackward {
            step,
            call,
            table,
            descales: Vec::new(),
            q,
            k,
            v,
            dout,
            out,
            lse,
            sink,
            dq,
            dk,
            dv,
        };
        builder.push(rank, COMPUTE, Work::AttendBackward(work));
    }
}
