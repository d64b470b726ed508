//! Launches of attention with their segments, and the rows that they write.

use seamproof_oracle::{Run, Side};

use super::super::act::{Launch, Launches, Own};
use super::works::{Works, id};
use crate::schedule::all_gather;
use crate::schedule::all_to_all::whole_sequences;
use crate::schedule::build;
use crate::schedule::program::{
    Attend, AttendBackward, BufferId, KeySource, MergeOrder, Region, RowPair, Step, Work,
};
use crate::schedule::ring::{RingCore, owned};
use crate::schedule::tables::Told;
use crate::{AttentionCall, RowPolicy};

impl Works<'_> {
    pub(super) fn make_segments(&self, to: Own, owner: u32) -> Option<Work> {
        let from = self.plan.source(self.rank, self.keys_of(to, owner))?;
        Some(Work::MakeSegments { to: id(to), from })
    }

    pub(super) fn attend(
        &self,
        launch: &Launch,
        table: Option<Own>,
        inputs: [Own; 3],
        results: [Own; 3],
    ) -> Work {
        attend(self.told(launch, table), inputs, None, results)
    }

    pub(super) fn attend_step(
        &self,
        launch: &Launch,
        table: Option<Own>,
        (inputs, sink): ([Own; 3], Option<Own>),
        results: [Own; 3],
    ) -> Work {
        attend(self.plan.step_call(self.rank, launch, (false, table)), inputs, sink, results)
    }

    pub(super) fn attend_whole(
        &self,
        table: Option<Own>,
        (inputs, sink): ([Own; 3], Option<Own>),
        results: [Own; 3],
    ) -> Work {
        attend(self.whole_call(table), inputs, sink, results)
    }

    pub(super) fn attend_backward(
        &self,
        launch: &Launch,
        table: Option<Own>,
        inputs: [Own; 6],
        results: [Own; 3],
    ) -> Work {
        attend_backward(self.told(launch, table), inputs, None, results)
    }

    pub(super) fn attend_backward_each(
        &self,
        launches: &Launches,
        (table, inputs): (Option<Own>, [Own; 6]),
        results: [Own; 3],
        sums: [Own; 3],
    ) -> Vec<Work> {
        let each = self.plan.each_launch(self.plan.place(self.rank), launches);
        each.flat_map(|launch| self.one_of_each(&launch, (table, inputs), results, sums)).collect()
    }

    /// Returns one of the launches of [`Act::AttendBackwardEach`](super::super::Act::AttendBackwardEach), and the sums behind
    /// it. An all-gather adds dq last.
    fn one_of_each(
        &self,
        launch: &Launch,
        (table, inputs): (Option<Own>, [Own; 6]),
        results: [Own; 3],
        sums: [Own; 3],
    ) -> [Work; 4] {
        let attend = self.attend_backward(launch, table, inputs, results);
        let sum = |of: usize| {
            let side = if of == 0 { Side::Q } else { Side::Kv };
            self.accumulate(launch, side, results[of], sums[of])
        };
        let [first, second, third] = if self.plan.gathers() { [1, 2, 0] } else { [0, 1, 2] }.map(sum);
        [attend, first, second, third]
    }

    pub(super) fn attend_backward_whole(
        &self,
        table: Option<Own>,
        inputs: [Own; 6],
        sink: Option<[Own; 2]>,
        results: [Own; 3],
    ) -> Work {
        attend_backward(self.whole_call(table), inputs, sink, results)
    }

    pub(super) fn attend_gathered(&self, launch: &Launch, inputs: [Own; 6], results: [Own; 3]) -> Work {
        attend_backward((self.call(launch), None), inputs, None, results)
    }

    pub(super) fn copy_valid(&self, launch: &Launch, table: Option<Own>, from: Own, to: Own) -> Work {
        let (from, to, rows) = (id(from), id(to), self.plan.valid(self.rank, launch, false));
        match self.plan.step_call(self.rank, launch, (false, table)).1 {
            Some(table) => Work::CopyValid { from, to, table, rows },
            None => Work::Copy { from, to, rows },
        }
    }

    pub(super) fn core(&self) -> RingCore<'_> {
        let (mask, softmax) = (self.plan.problem.mask, self.plan.problem.softmax);
        let (shards, order) = (&self.plan.pieces, MergeOrder::Running);
        RingCore { mask, softmax, shards, members: &[], communicator: 0, order }
    }

    /// Returns the call of a launch, and the rows of its table that say it.
    fn told(&self, launch: &Launch, table: Option<Own>) -> (AttentionCall, Option<Region>) {
        if self.plan.has_steps() {
            return self.plan.step_call(self.rank, launch, (self.plan.is_apart(), table));
        }
        let keys = KeySource::Of(launch.owner as usize);
        let (Some(from), Some(table)) = (self.plan.source(self.rank, keys), table) else {
            return (self.call(launch), None);
        };
        let told = Told::new(id(table), &from);
        let Launch { queries: [first, end], keys, .. } = *launch;
        let (call, rows) = self.core().told_launch(&told, first.into()..end.into(), keys.into());
        (call, Some(rows))
    }

    /// Returns the keys of which a table says the segments.
    fn keys_of(&self, table: Own, owner: u32) -> KeySource {
        match (self.plan.has_steps(), Some(table) == self.plan.step_table(false)) {
            (false, _) => KeySource::Of(owner as usize),
            (true, true) => KeySource::Gathered,
            (true, false) => KeySource::Residues,
        }
    }

    /// Returns the call of a launch.
    fn call(&self, launch: &Launch) -> AttentionCall {
        let Launch { owner, queries: [first, end], keys } = *launch;
        if let Some(from) = self.plan.source(self.rank, KeySource::Of(owner as usize)) {
            let told = Told::new(BufferId(0), &from);
            return self.core().told_launch(&told, first.into()..end.into(), keys.into()).0;
        }
        if self.plan.gathers() {
            let calls = all_gather::calls(&self.plan.own, &self.plan.shards, self.plan.member(self.rank));
            return all_gather::call_of(calls, usize::from(if self.plan.is_apart() { keys } else { first }));
        }
        let ends = (self.plan.place(self.rank), owner as usize);
        let segments = self.core().all_segments(ends, first.into()..end.into(), keys.into());
        self.core().partial(segments)
    }

    /// Returns the rows of a side that a launch writes.
    pub(super) fn written(&self, launch: &Launch, side: Side) -> Vec<RowPair> {
        if self.plan.has_steps() {
            let all = Run::packed(0, self.plan.ranked_rows(side), self.plan.ranked_rows(side));
            return match side {
                Side::Q => self.plan.valid(self.rank, launch, self.plan.is_apart()),
                Side::Kv => vec![(all, all)],
            };
        }
        let call = self.call(launch);
        match side {
            Side::Kv if self.plan.gathers() => {
                let keys = call.segments.iter().flat_map(|segment| segment.kv.iter().copied());
                build::same_rows(&keys.filter(|run| run.len > 0).collect::<Vec<_>>())
            }
            Side::Q if self.plan.gathers() => {
                let queries = call.segments.iter().map(|segment| Run { len: segment.q.span, ..segment.q });
                build::same_rows(&queries.collect::<Vec<_>>())
            }
            Side::Q => owned(call.segments.iter().map(|segment| segment.q)),
            Side::Kv => owned(call.segments.iter().flat_map(|segment| segment.kv.iter().copied())),
        }
    }

    /// Returns the call of a launch on all queries of a rank, and the rows of its table that say it.
    fn whole_call(&self, table: Option<Own>) -> (AttentionCall, Option<Region>) {
        let whole = match self.plan.gathers() {
            true => all_gather::calls(&self.plan.own, &self.plan.shards, self.plan.member(self.rank)).0,
            false => whole_sequences(&self.plan.own, &self.plan.shards),
        };
        let Some((from, table)) = self.plan.told.as_ref().zip(table) else { return (whole, None) };
        let told = Told::new(id(table), from);
        let (segments, policy) = (told.segments(0..1), RowPolicy::Leave);
        (AttentionCall { segments, policy, ..whole }, Some(told.region(0..1)))
    }
}

/// Returns a launch of the forward kernel.
fn attend(
    (call, table): (AttentionCall, Option<Region>),
    inputs: [Own; 3],
    sink: Option<Own>,
    results: [Own; 3],
) -> Work {
    let ([q, k, v], [out, lse, max_logit]) = (inputs.map(id), results.map(id));
    let (step, sink, descales) = (Step::default(), sink.map(id), Vec::new());
    Work::Attend(Attend { step, call, table, descales, q, k, v, sink, out, lse, max_logit })
}

/// Returns a launch of the backward kernel.
fn attend_backward(
    (call, table): (AttentionCall, Option<Region>),
    inputs: [Own; 6],
    sink: Option<[Own; 2]>,
    results: [Own; 3],
) -> Work {
    let ([q, k, v, dout, out, lse], [dq, dk, dv]) = (inputs.map(id), results.map(id));
    let sink = sink.map(|[sink, dsink]| (id(sink), id(dsink)));
    let (step, descales) = (Step::default(), Vec::new());
    Work::AttendBackward(AttendBackward {
        step,
        call,
        table,
        descales,
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
    })
}
