//! Launches of attention: each finds its table, the queries of its rank and the keys of an owner, and leaves its
//! contributions.

use seamproof_oracle::{Side, TensorName};

use super::{Run, Values};
use crate::check::plan::error::PlanFault;
use crate::check::plan::value::{Value, Whole, side};
use crate::schedule::plan::{Extent, Launch, Launches, Own};

impl Values<'_> {
    pub(super) fn make_segments(&mut self, to: Own, owner: u32) -> Run {
        match self.get(to) {
            Value::Nothing | Value::Table(_) => {
                self.put(to, Value::Table(owner));
                Ok(())
            }
            _ => Err(self.holds(to, "a table")),
        }
    }

    pub(super) fn attend(
        &mut self,
        launch: Launch,
        table: Option<Own>,
        inputs: [Own; 3],
        [out, lse, max_logit]: [Own; 3],
    ) -> Run {
        self.table(table, launch.owner)?;
        self.inputs(inputs, launch.owner)?;
        self.raise(max_logit)?;
        self.write(out, Value::Part(TensorName::Out, launch))?;
        self.write(lse, Value::Part(TensorName::Lse, launch))
    }

    pub(super) fn attend_step(
        &mut self,
        launch: Launch,
        table: Option<Own>,
        (inputs, sink): ([Own; 3], Option<Own>),
        [out, lse, max_logit]: [Own; 3],
    ) -> Run {
        self.table(table, launch.owner)?;
        self.inputs(inputs, launch.owner)?;
        self.sink(sink)?;
        self.raise(max_logit)?;
        self.write(out, Value::Part(TensorName::Out, launch))?;
        let before = Value::NegInfinity(Extent::Slots(Side::Q));
        self.write_part(lse, TensorName::Lse, launch.queries[0], before)
    }

    pub(super) fn attend_whole(
        &mut self,
        table: Option<Own>,
        (inputs, sink): ([Own; 3], Option<Own>),
        [out, lse, max_logit]: [Own; 3],
    ) -> Run {
        self.table(table, 0)?;
        if table.is_some() {
            self.expect(out, Value::Zero(Extent::Slots(Side::Q)))?;
            self.expect(lse, Value::NegInfinity(Extent::Slots(Side::Q)))?;
        }
        self.inputs(inputs, self.owner)?;
        self.sink(sink)?;
        self.raise(max_logit)?;
        self.write(out, Value::Done(Whole::Of(TensorName::Out)))?;
        self.write(lse, Value::Done(Whole::Of(TensorName::Lse)))
    }

    pub(super) fn attend_backward(
        &mut self,
        launch: Launch,
        table: Option<Own>,
        inputs: [Own; 6],
        results: [Own; 3],
    ) -> Run {
        self.table(table, launch.owner)?;
        self.backward_inputs(inputs, launch.owner)?;
        if self.plan.has_steps() {
            results[1..].iter().try_for_each(|to| self.expect(*to, Value::Zero(Extent::All)))?;
        }
        let mut gradients = GRADIENTS.into_iter().zip(results);
        gradients.try_for_each(|(tensor, to)| self.write(to, Value::Part(tensor, launch)))
    }

    pub(super) fn attend_backward_each(
        &mut self,
        launches: &Launches,
        (table, inputs): (Option<Own>, [Own; 6]),
        results: [Own; 3],
        sums: [Own; 3],
    ) -> Run {
        // A second launch finds and leaves what the first one leaves: results that were taken, and sums.
        let first = self.plan.each_launch(self.place as usize, launches).next();
        let Some(launch) = first else { return Ok(()) };
        self.attend_backward(launch, table, inputs, results)?;
        let mut gradients = GRADIENTS.into_iter().zip(results.into_iter().zip(sums));
        gradients.try_for_each(|(tensor, (from, to))| self.accumulate(launch, side(tensor), from, to))
    }

    pub(super) fn attend_backward_whole(
        &mut self,
        table: Option<Own>,
        inputs: [Own; 6],
        sink: Option<[Own; 2]>,
        results: [Own; 3],
    ) -> Run {
        self.table(table, 0)?;
        self.backward_inputs(inputs, self.owner)?;
        if let Some([sink, dsink]) = sink {
            self.sink(Some(sink))?;
            self.write(dsink, Value::Done(Whole::Of(TensorName::Dsink)))?;
        }
        GRADIENTS.into_iter().zip(results).try_for_each(|(tensor, to)| {
            if table.is_some() {
                self.expect(to, Value::Zero(Extent::Slots(side(tensor))))?;
            }
            self.write(to, Value::Done(Whole::Of(tensor)))
        })
    }

    pub(super) fn attend_gathered(
        &mut self,
        launch: Launch,
        inputs: [Own; 6],
        [dq, dk, dv]: [Own; 3],
    ) -> Run {
        self.backward_inputs(inputs, launch.owner)?;
        self.write_part(dq, TensorName::Dq, launch.queries[0], Value::Nothing)?;
        self.write(dk, Value::Part(TensorName::Dk, launch))?;
        self.write(dv, Value::Part(TensorName::Dv, launch))
    }

    pub(super) fn copy_valid(&mut self, launch: Launch, table: Option<Own>, from: Own, to: Own) -> Run {
        self.table(table, launch.owner)?;
        let is_out = self.get(from) == Value::Part(TensorName::Out, launch);
        let tensor = if is_out { TensorName::Out } else { TensorName::Dq };
        if tensor == TensorName::Dq && self.plan.is_apart() {
            return Err(PlanFault::Unknown("a copy of dq of a launch that is one of several"));
        }
        self.take(from, tensor, launch)?;
        self.write_part(to, tensor, launch.queries[0], Value::Zero(Extent::Slots(Side::Q)))
    }

    /// Checks the table of a launch on an owner's keys, if it reads one.
    fn table(&self, table: Option<Own>, owner: u32) -> Run {
        table.map_or(Ok(()), |table| self.expect(table, Value::Table(owner)))
    }

    /// Checks that a launch reads the queries of its rank and the keys of an owner.
    fn inputs(&self, [q, k, v]: [Own; 3], owner: u32) -> Run {
        self.expect(q, Value::Input(TensorName::Q, self.place))?;
        self.expect(k, Value::Input(TensorName::K, owner))?;
        self.expect(v, Value::Input(TensorName::V, owner))
    }

    /// Checks that a launch of a backward reads what one of the forward reads, and the results of the forward.
    fn backward_inputs(&mut self, [q, k, v, dout, out, lse]: [Own; 6], owner: u32) -> Run {
        self.inputs([q, k, v], owner)?;
        self.forward_results([dout, out, lse])
    }

    /// Notes a launch in a statistic.
    fn raise(&mut self, max_logit: Own) -> Run {
        match self.get(max_logit) {
            Value::NegInfinity(Extent::Values) | Value::Largest { over_ring: false } => {}
            _ => return Err(self.holds(max_logit, "-inf, or the largest logit of other launches,")),
        }
        self.put(max_logit, Value::Largest { over_ring: false });
        Ok(())
    }
}

/// The gradients of a launch.
const GRADIENTS: [TensorName; 3] = [TensorName::Dq, TensorName::Dk, TensorName::Dv];
