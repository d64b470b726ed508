//! Form of launches of attention, and of what belongs to one: its table, and the copy of its valid rows.

use seamproof_oracle::{Side, Sink, TensorName};

use super::{At, Checked, Forms};
use crate::check::plan::error::PlanFault;
use crate::schedule::plan::{Launch, Launches, Own};

impl Forms<'_> {
    pub(super) fn make_segments(&self, to: Own, owner: u32) -> Checked {
        self.table(Some(to))?;
        match (owner as usize) < self.plan.owners() {
            true => Ok(()),
            false => Err(PlanFault::Unknown("a table of keys that nobody owns")),
        }
    }

    pub(super) fn attend(
        &self,
        launch: &Launch,
        table: Option<Own>,
        inputs: [Own; 3],
        results: [Own; 3],
    ) -> Checked {
        self.ring_launch(launch, table)?;
        self.forward(inputs, results)
    }

    pub(super) fn attend_step(
        &self,
        launch: &Launch,
        table: Option<Own>,
        (inputs, sink): ([Own; 3], Option<Own>),
        results: [Own; 3],
    ) -> Checked {
        self.step(launch, table, false)?;
        self.kernel_sink(sink)?;
        self.forward(inputs, results)
    }

    pub(super) fn attend_whole(
        &self,
        table: Option<Own>,
        (inputs, sink): ([Own; 3], Option<Own>),
        results: [Own; 3],
    ) -> Checked {
        self.whole()?;
        if self.plan.has_steps() {
            return Err(PlanFault::Unknown("one launch of a forward in steps"));
        }
        self.table(table)?;
        self.kernel_sink(sink)?;
        self.forward(inputs, results)
    }

    pub(super) fn attend_backward(
        &self,
        launch: &Launch,
        table: Option<Own>,
        inputs: [Own; 6],
        results: [Own; 3],
    ) -> Checked {
        match self.plan.has_steps() {
            true => self.step(launch, table, true)?,
            false => self.ring_launch(launch, table)?,
        }
        self.backward(inputs, results)
    }

    pub(super) fn attend_backward_each(
        &self,
        launches: &Launches,
        (table, inputs): (Option<Own>, [Own; 6]),
        results: [Own; 3],
        sums: [Own; 3],
    ) -> Checked {
        self.each(launches)?;
        self.table(table)?;
        self.backward(inputs, results)?;
        results.into_iter().zip(sums).try_for_each(|(from, to)| self.alike(from, to))
    }

    pub(super) fn attend_backward_whole(
        &self,
        table: Option<Own>,
        inputs: [Own; 6],
        sink: Option<[Own; 2]>,
        results: [Own; 3],
    ) -> Checked {
        self.whole()?;
        self.table(table)?;
        if self.plan.gathers() {
            return Err(PlanFault::Unknown("one launch of a backward on gathered keys"));
        }
        self.kernel_sink(sink.map(|[sink, _]| sink))?;
        sink.map_or(Ok(()), |[_, dsink]| self.is(dsink, TensorName::Dsink, At::Ring))?;
        self.backward(inputs, results)
    }

    pub(super) fn attend_gathered(&self, launch: &Launch, inputs: [Own; 6], results: [Own; 3]) -> Checked {
        self.gathers()?;
        if self.plan.has_steps() {
            return Err(PlanFault::Unknown("a launch that writes dq itself, in a backward in steps"));
        }
        if self.plan.is_apart() {
            return Err(PlanFault::Unknown("a launch that writes dq itself, of queries that lie apart"));
        }
        self.launch(launch)?;
        self.backward(inputs, results)
    }

    pub(super) fn copy_valid(&self, launch: &Launch, table: Option<Own>, from: Own, to: Own) -> Checked {
        self.step(launch, table, false)?;
        self.has_rows(from, Side::Q, At::Ring)?;
        self.alike(from, to)
    }

    /// Checks the pieces and the table of a launch of a ring.
    fn ring_launch(&self, launch: &Launch, table: Option<Own>) -> Checked {
        self.ring()?;
        self.table(table)?;
        self.launch(launch)
    }

    fn ring(&self) -> Checked {
        match self.plan.is_whole() {
            true => Err(PlanFault::Unknown("a step of a ring in another algorithm")),
            false => Ok(()),
        }
    }

    /// Checks launches, of which each has one part of the queries and one of the keys.
    fn each(&self, launches: &Launches) -> Checked {
        let Launches { owner, queries, keys: [first, end] } = *launches;
        if !self.plan.is_apart() || self.plan.has_steps() {
            self.ring()?;
        }
        if first >= end {
            return Err(PlanFault::Pieces(Launch { owner, queries, keys: first }));
        }
        [first, end - 1].into_iter().try_for_each(|keys| self.launch(&Launch { owner, queries, keys }))
    }

    fn forward(&self, inputs: [Own; 3], results: [Own; 3]) -> Checked {
        use TensorName::{K, Lse, MaxLogit, Out, Q, V};
        self.are(inputs, [Q, K, V], At::Ring)?;
        self.are(results, [Out, Lse, MaxLogit], At::Ring)
    }

    fn backward(&self, inputs: [Own; 6], results: [Own; 3]) -> Checked {
        use TensorName::{Dk, Dout, Dq, Dv, K, Lse, Out, Q, V};
        self.are(inputs, [Q, K, V, Dout, Out, Lse], At::Ring)?;
        self.are(results, [Dq, Dk, Dv], At::Ring)
    }

    /// Checks that launches of this plan attend whole sequences.
    fn whole(&self) -> Checked {
        match self.plan.is_whole() {
            true => Ok(()),
            false => Err(PlanFault::Unknown("a launch on whole sequences in a ring")),
        }
    }

    /// Checks that a launch reads a table where this plan has tables, and only there.
    fn table(&self, table: Option<Own>) -> Checked {
        match table {
            Some(own) if !self.plan.is_table(own) => Err(PlanFault::Shape(own.0)),
            None if self.plan.has_tables() => Err(PlanFault::Unknown("a launch without a table")),
            _ => Ok(()),
        }
    }

    /// Checks a step on gathered keys, or what it leaves: it has one part of the queries and the pass's table.
    fn step(&self, launch: &Launch, table: Option<Own>, is_backward: bool) -> Checked {
        if !self.plan.has_steps() {
            return Err(PlanFault::Unknown("a step on gathered keys in another algorithm"));
        }
        self.launch(launch)?;
        let Launch { queries: [first, end], keys, .. } = *launch;
        let is_there = usize::from(keys) < self.plan.pairs(is_backward).parts()[1];
        match (is_there && end - first == 1, table == self.plan.step_table(is_backward)) {
            (true, true) => Ok(()),
            (true, false) => Err(PlanFault::Shape(table.map_or(0, |own| own.0))),
            (false, _) => Err(PlanFault::Pieces(*launch)),
        }
    }

    /// Checks the sink of a kernel, which knows by itself of one that is not learnable.
    fn kernel_sink(&self, sink: Option<Own>) -> Checked {
        let is_learnable = self.plan.problem().softmax.sink == Sink::Learnable;
        if is_learnable != sink.is_some() {
            return Err(PlanFault::Sink);
        }
        sink.map_or(Ok(()), |sink| self.is(sink, TensorName::Sink, At::Ring))
    }
}
