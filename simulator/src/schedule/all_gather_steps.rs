//! All-gather in steps, as TransformerEngine ships it.
//!
//! A *step* takes one piece of every slot: for a dual-chunk cut, step 0 takes the rank's first chunks and step 1 its
//! second ones. Steps run on two streams in turn, behind the gather and everything else that the main stream did
//! before. Each stream has an out of its own, as large as the rank's, of which a step writes its real rows. They are
//! then copied into the result, which was filled with zeros: rows of other steps and padding are left alone. Backward,
//! dq goes the same way. dk and dv are as large as all gathered keys. A step's are filled with zeros before its launch
//! and added to the sums behind it, one step after the other. All of these are kept in the formats of the results. Sums
//! of codes in FP8 are in bf16, the [nominal](build::NOMINAL) format, on every rank and over all ranks.
//!
//! Where sequences follow each other in memory and the mask is a band, a *table* says the segments of every step. It is
//! made on the device from the lengths of whole sequences, and both the launches and the copies of valid rows read their
//! rows there. Other problems have the same steps with their segments in the calls. Stripes of 1 are one step forward,
//! and backward one for each residue, by a table of their own.
//!
//! Source: `AttnFuncWithCPAndKVAllGather` of
//! <https://github.com/NVIDIA/TransformerEngine/blob/main/transformer_engine/pytorch/attention/dot_product_attention/context_parallel.py>.

use seamproof_oracle::{Format, Run};

use super::all_gather::Rank;
use super::build::{self, Local, LocalBackward};
use super::collect::COMPUTE;
use super::program::{
    Attend, AttendBackward, BufferId, EventId, FillValue, KeySource, Region, RowPair, SegmentSource, Step,
    Work,
};
use super::tables::{self, Told};
use crate::{AttentionCall, RowPolicy, Segment};

/// The streams of steps, in turn.
const STREAMS: [usize; 2] = [COMPUTE, 1];

/// Segments of a step, and the rows of the table that say them.
struct StepSegments {
    segments: Vec<Segment>,
    table: Option<Region>,
}

impl StepSegments {
    /// Returns the real queries.
    fn valid(&self) -> Vec<RowPair> {
        let runs = self.segments.iter().map(|segment| Run { span: segment.q.len, ..segment.q });
        build::same_rows(&runs.collect::<Vec<_>>())
    }
}

impl Rank<'_> {
    /// Pushes the forward. Returns the table, which the backward reads too.
    pub(super) fn forward_in_steps(&mut self, [k, v]: [BufferId; 2]) -> Option<BufferId> {
        let Local { q, sink, out, lse, max_logit, .. } = self.local;
        let slots = build::slots(&self.shards.q);
        let table =
            self.source(KeySource::Gathered).map(|from| self.make_table("segments of all steps", from));
        self.builder.fill(self.rank, COMPUTE, out, &slots, FillValue::Zero);
        self.builder.fill(self.rank, COMPUTE, lse, &slots, FillValue::NegInfinity);
        self.builder.fill(self.rank, COMPUTE, max_logit, &[], FillValue::NegInfinity);
        let whole = || vec![self.forward_segments()];
        let steps = self.steps(table, KeySource::Gathered, || {
            if self.apart() { whole() } else { self.backward_launches() }
        });
        let of = steps.len();
        let outs = self.of_streams(of, (out, self.builder.describe(out).format), "out");
        self.fork(of);
        let mut ends = Vec::new();
        for (index, step) in steps.into_iter().enumerate() {
            let (stream, from) = (STREAMS[index % 2], outs[index % 2]);
            let (valid, table) = (step.valid(), step.table.clone());
            let (call, step) = (self.step_call(step.segments), Step::Launch { index, of });
            let attend = Attend {
                step,
                call,
                table: table.clone(),
                descales: Vec::new(),
                q,
                k,
                v,
                sink,
                out: from,
                lse,
                max_logit,
            };
            self.builder.push(self.rank, stream, Work::Attend(attend));
            self.copy_valid(stream, [from, out], table, valid);
            ends.push((stream, self.builder.record(self.rank, stream)));
        }
        self.join(&ends);
        self.reduce_max_logit();
        table
    }

    /// Pushes the backward, with the segments of the forward's table, or of residues.
    pub(super) fn backward_in_steps(
        &mut self,
        to: &LocalBackward,
        kv: [BufferId; 2],
        table: Option<BufferId>,
    ) {
        self.sink_gradient(to);
        let slots = build::slots(&self.shards.q);
        self.builder.fill(self.rank, COMPUTE, to.dq, &slots, FillValue::Zero);
        let (keys, table) = match self.apart() {
            true => {
                let residues = self.source(KeySource::Residues);
                (KeySource::Residues, residues.map(|from| self.make_table("segments of all residues", from)))
            }
            false => (KeySource::Gathered, table),
        };
        let steps = self.steps(table, keys, || self.backward_launches());
        let all = [Run::packed(0, self.order_rows(), self.order_rows())];
        let sums = [(self.local.k, to.dk, "dk"), (self.local.v, to.dv, "dv")].map(|(local, to, name)| {
            let format = self.builder.describe(to).format;
            let sum = self.full(local, &format!("{name} of all steps"), build::gathered(format));
            self.builder.fill(self.rank, COMPUTE, sum, &all, FillValue::Zero);
            (sum, self.of_streams(steps.len(), (sum, format), name))
        });
        let of_dq = (to.dq, self.builder.describe(to.dq).format);
        let dqs = self.of_streams(steps.len(), of_dq, "dq");
        let dq_sum = self.dq_sum(to.dq);
        self.fork(steps.len());
        let (of, mut turn) = (steps.len(), None);
        for (index, step) in steps.into_iter().enumerate() {
            let stream = STREAMS[index % 2];
            let [dq, dk, dv] = [&dqs, &sums[0].1, &sums[1].1].map(|of_streams| of_streams[index % 2]);
            for gradient in [dk, dv] {
                self.builder.fill(self.rank, stream, gradient, &all, FillValue::Zero);
            }
            let (valid, table) = (step.valid(), step.table);
            let (call, step) = (self.step_call(step.segments), Step::Launch { index, of });
            let (Local { q, out, lse, .. }, dout, [k, v]) = (self.local, to.dout, kv);
            let launch = AttendBackward {
                descales: Vec::new(),
                step,
                call,
                table: table.clone(),
                q,
                k,
                v,
                dout,
                out,
                lse,
                sink: None,
                dq,
                dk,
                dv,
            };
            self.builder.push(self.rank, stream, Work::AttendBackward(launch));
            let rows = build::same_rows(&all);
            let mut added = vec![(dk, sums[0].0, rows.clone()), (dv, sums[1].0, rows)];
            match self.apart() {
                true => added.push((dq, dq_sum, valid)),
                false => self.copy_valid(stream, [dq, to.dq], table, valid),
            }
            if let Some((_, before)) = turn {
                self.builder.wait(self.rank, stream, before);
            }
            for (from, to, rows) in added {
                self.builder.push(self.rank, stream, Work::Accumulate { from, to, rows });
            }
            turn = Some((stream, self.builder.record(self.rank, stream)));
        }
        self.join(turn.as_slice());
        if dq_sum != to.dq {
            self.builder.copy(self.rank, COMPUTE, dq_sum, to.dq, &build::same_rows(&slots));
        }
        self.scatter([(sums[0].0, to.dk), (sums[1].0, to.dv)]);
    }

    /// Returns the buffer in which steps add up dq: the result itself where they add nothing, or where its format is that
    /// of sums.
    fn dq_sum(&mut self, dq: BufferId) -> BufferId {
        if !self.apart() {
            return dq;
        }
        let sum = self.builder.sum_of(dq, ("dq of all steps", build::NOMINAL));
        if sum != dq {
            self.builder.fill(self.rank, COMPUTE, sum, &build::slots(&self.shards.q), FillValue::Zero);
        }
        sum
    }

    fn copy_valid(
        &mut self,
        stream: usize,
        [from, to]: [BufferId; 2],
        table: Option<Region>,
        rows: Vec<RowPair>,
    ) {
        let work = match table {
            Some(table) => Work::CopyValid { from, to, table, rows },
            None => Work::Copy { from, to, rows },
        };
        self.builder.push(self.rank, stream, work);
    }

    /// Returns a call that leaves padding alone.
    fn step_call(&self, segments: Vec<Segment>) -> AttentionCall {
        AttentionCall { policy: RowPolicy::Leave, ..self.call(segments) }
    }

    /// Returns the lengths of which a table can be made; `None` if no table says these segments.
    fn source(&self, keys: KeySource) -> Option<SegmentSource> {
        SegmentSource::told(self.problem.mask, self.shards, self.rank, keys)
    }

    fn make_table(&mut self, name: &str, from: SegmentSource) -> BufferId {
        let table = tables::buffer(self.builder, self.rank, name, &from);
        tables::make(self.builder, (self.rank, COMPUTE), table, from);
        table
    }

    /// Returns the steps: those of the table, or the given ones where there is none. Of queries that lie apart, each a
    /// piece of the table, all are one step.
    fn steps(
        &self,
        table: Option<BufferId>,
        keys: KeySource,
        others: impl Fn() -> Vec<Vec<Segment>>,
    ) -> Vec<StepSegments> {
        let Some((table, source)) = table.zip(self.source(keys)) else {
            let untold = |segments| StepSegments { segments, table: None };
            return others().into_iter().map(untold).collect();
        };
        let told = Told::new(table, &source);
        let of_step = if self.apart() && keys == KeySource::Gathered { told.pieces() } else { 1 };
        let step = |first: usize| {
            let pieces = first..first + of_step;
            StepSegments { segments: told.segments(pieces.clone()), table: Some(told.region(pieces)) }
        };
        (0..told.pieces()).step_by(of_step.max(1)).map(step).collect()
    }

    /// Returns a buffer like `model` in a format for each stream that has a step.
    fn of_streams(&mut self, steps: usize, (model, format): (BufferId, Format), name: &str) -> Vec<BufferId> {
        let one = |stream| self.builder.like(model, &format!("{name} of a step, stream {stream}"), format);
        (0..STREAMS.len().min(steps)).map(one).collect()
    }

    /// Lets the other stream begin behind the main one.
    fn fork(&mut self, steps: usize) {
        if steps > 1 {
            let ready = self.builder.record(self.rank, COMPUTE);
            self.builder.wait(self.rank, STREAMS[1], ready);
        }
    }

    /// Makes the main stream wait for the ends of others.
    fn join(&mut self, ends: &[(usize, EventId)]) {
        let of_others = ends.iter().rfind(|(stream, _)| *stream != COMPUTE);
        if let Some((_, end)) = of_others {
            self.builder.wait(self.rank, COMPUTE, *end);
        }
    }
}
