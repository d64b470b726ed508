//! Form of sums and merges.

use seamproof_oracle::{Side, Sink, TensorName};

use super::{At, Checked, Forms};
use crate::check::plan::error::PlanFault;
use crate::schedule::plan::{Launch, Own};

impl Forms<'_> {
    pub(super) fn merge(&self, launch: &Launch, step: [Own; 2], running: [Own; 2]) -> Checked {
        self.launch(launch)?;
        self.are(step, OUT_AND_LSE, At::Ring)?;
        self.are(running, OUT_AND_LSE, At::Ring)
    }

    pub(super) fn accumulate(&self, launch: &Launch, side: Side, from: Own, to: Own) -> Checked {
        self.launch(launch)?;
        self.has_rows(from, side, At::Ring)?;
        self.alike(from, to)
    }

    pub(super) fn add(&self, side: Side, from: Own, to: Own) -> Checked {
        self.has_rows(from, side, At::Rank)?;
        self.alike(from, to)
    }

    pub(super) fn apply_sink(&self, sink: Option<Own>, results: [Own; 2]) -> Checked {
        self.sink(sink)?;
        self.are(results, OUT_AND_LSE, At::Ring)
    }

    pub(super) fn sink_gradient(&self, [sink, dout, out, lse]: [Own; 4], dsink: Own) -> Checked {
        use TensorName::{Dout, Dsink, Lse, Out};
        self.sink(Some(sink))?;
        self.are([dout, out, lse, dsink], [Dout, Out, Lse, Dsink], At::Ring)
    }

    /// Checks the sink of an operation that applies one.
    fn sink(&self, sink: Option<Own>) -> Checked {
        let of_problem = self.plan.problem().softmax.sink;
        if of_problem == Sink::None || (of_problem == Sink::Learnable) != sink.is_some() {
            return Err(PlanFault::Sink);
        }
        sink.map_or(Ok(()), |sink| self.is(sink, TensorName::Sink, At::Ring))
    }
}

const OUT_AND_LSE: [TensorName; 2] = [TensorName::Out, TensorName::Lse];
