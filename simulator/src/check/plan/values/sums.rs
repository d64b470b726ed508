//! Sums of contributions: merges of the forward, gradients, and the sink.

use seamproof_oracle::{Side, TensorName};

use super::{Run, Values, begins};
use crate::check::plan::error::PlanFault;
use crate::check::plan::value::{Value, Whole, joined, side};
use crate::schedule::MergeStyle;
use crate::schedule::plan::{Launch, Own};

impl Values<'_> {
    pub(super) fn merge(
        &mut self,
        style: MergeStyle,
        launch: Launch,
        step: [Own; 2],
        running: [Own; 2],
    ) -> Run {
        match style {
            MergeStyle::Statistics => self.merge_statistics(launch, step[1], running[1]),
            MergeStyle::Weighted { .. } => self.merge_weighted(launch, step, running),
            MergeStyle::Running | MergeStyle::Difference => {
                let tensors = [TensorName::Out, TensorName::Lse].into_iter();
                tensors.zip(step.into_iter().zip(running)).try_for_each(|(tensor, (from, to))| {
                    self.take(from, tensor, launch)?;
                    self.add(to, tensor, self.place)
                })
            }
        }
    }

    /// Merges the LSE of a launch alone.
    fn merge_statistics(&mut self, launch: Launch, from: Own, to: Own) -> Run {
        self.take(from, TensorName::Lse, launch)?;
        self.put(from, Value::Counted(launch));
        self.add(to, TensorName::Lse, self.place)
    }

    /// Adds the out of a launch, whose LSE has been merged, with its weight in the running LSE.
    fn merge_weighted(&mut self, launch: Launch, [from, weight]: [Own; 2], [to, lse]: [Own; 2]) -> Run {
        self.expect(weight, Value::Counted(launch))?;
        self.close(lse)?;
        self.take(from, TensorName::Out, launch)?;
        self.add(to, TensorName::Out, self.place)
    }

    pub(super) fn accumulate(&mut self, launch: Launch, of: Side, from: Own, to: Own) -> Run {
        let Value::Part(tensor @ (TensorName::Dq | TensorName::Dk | TensorName::Dv), _) = self.get(from)
        else {
            return Err(self.holds(from, "a gradient of a launch"));
        };
        if side(tensor) != of {
            return Err(self.holds(from, "a gradient of the other side"));
        }
        self.take(from, tensor, launch)?;
        self.add(to, tensor, if tensor == TensorName::Dq { self.place } else { launch.owner })
    }

    /// Adds the partial sums of other members that hold the same KV heads.
    pub(super) fn add_landing(&mut self, of_side: Side, from: Own, to: Own) -> Run {
        if of_side == Side::Q {
            return Err(PlanFault::Unknown("a sum of landings of the queries"));
        }
        let (Value::Landed { of, first, count: 1 }, Value::Landed { of: sum, first: 0, count }) =
            (self.get(from), self.get(to))
        else {
            return Err(self.holds(from, "a landing, and more landings in the sum,"));
        };
        let is_gradient =
            |whole| matches!(whole, Whole::Of(TensorName::Dk | TensorName::Dv) | Whole::Zero(Side::Kv));
        match joined(of, sum).filter(|_| first == count && is_gradient(of) && is_gradient(sum)) {
            Some(joined) => {
                self.put(from, Value::Taken);
                self.put(to, Value::Landed { of: joined, first: 0, count: count + 1 });
                Ok(())
            }
            None => Err(self.holds(from, "the next landing of the same gradient")),
        }
    }

    pub(super) fn apply_sink(&mut self, sink: Option<Own>, results: [Own; 2]) -> Run {
        self.sink(sink)?;
        for (tensor, own) in [TensorName::Out, TensorName::Lse].into_iter().zip(results) {
            if (tensor, self.get(own)) != (TensorName::Lse, Value::Final) {
                self.add(own, tensor, self.place)?;
            }
            self.put(own, Value::Sum { tensor, of: self.place, sunk: true });
        }
        Ok(())
    }

    pub(super) fn sink_gradient(&mut self, [sink, dout, out, lse]: [Own; 4], dsink: Own) -> Run {
        self.sink(Some(sink))?;
        self.forward_results([dout, out, lse])?;
        self.write(dsink, Value::Done(Whole::Of(TensorName::Dsink)))
    }

    /// Adds something to a sum without the sink, or begins one.
    fn add(&mut self, to: Own, tensor: TensorName, of: u32) -> Run {
        let sum = Value::Sum { tensor, of, sunk: false };
        let is_there = match self.get(to) {
            Value::Zero(rows) => tensor != TensorName::Lse && begins(rows, side(tensor)),
            Value::NegInfinity(rows) => tensor == TensorName::Lse && begins(rows, Side::Q),
            held => held == sum,
        };
        if !is_there {
            return Err(self.holds(to, sum));
        }
        self.put(to, sum);
        Ok(())
    }

    /// Makes a running LSE take no more.
    fn close(&mut self, lse: Own) -> Run {
        let sum = Value::Sum { tensor: TensorName::Lse, of: self.place, sunk: false };
        if self.get(lse) != Value::Final {
            self.expect(lse, sum)?;
        }
        self.put(lse, Value::Final);
        Ok(())
    }
}
