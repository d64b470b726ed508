//! The plan of one launch on whole sequences, as [`super::super::all_to_all`] has it between its exchanges.

use seamproof_oracle::Side;

use super::act::{Act, Extent, Op, Own};
use super::own;
use crate::schedule::build::{Builder, Local};
use crate::schedule::{FillValue, SegmentSource, tables};

const COMPUTE: u8 = 0;

/// Buffers of a block of heads.
#[derive(Debug)]
pub(super) struct WholePlan {
    /// The table of both launches, where they read one. They then leave padding as it is: it has been filled.
    pub(super) table: Option<Own>,
    inputs: [Own; 3],
    sink: Option<Own>,
    /// Out, LSE and max_logit.
    results: [Own; 3],
    /// dout, the gradients of q, k and v, and that of the sink.
    backward: Option<(Own, [Own; 3], Option<Own>)>,
}

impl WholePlan {
    pub(super) fn forward(builder: &mut Builder, local: &Local, told: Option<&SegmentSource>) -> WholePlan {
        let table = told.map(|from| own(tables::buffer(builder, 0, "segments of whole sequences", from)));
        let Local { q, k, v, sink, out, lse, max_logit, .. } = *local;
        let (inputs, results) = ([q, k, v].map(own), [out, lse, max_logit].map(own));
        WholePlan { table, inputs, sink: sink.map(own), results, backward: None }
    }

    pub(super) fn with_backward(self, local: &Local) -> WholePlan {
        let backward =
            local.backward.map(|to| (own(to.dout), [to.dq, to.dk, to.dv].map(own), to.dsink.map(own)));
        WholePlan { backward, ..self }
    }

    pub(super) fn push_forward(&self, to: &mut Vec<Op>) {
        let WholePlan { table, inputs, sink, results, .. } = *self;
        let mut push = |act| to.push(Op { stream: COMPUTE, act });
        let [out, lse, max_logit] = results;
        let slots = Extent::Slots(Side::Q);
        if let Some(to) = table {
            push(Act::MakeSegments { to, owner: 0 });
            push(Act::Fill { to: out, rows: slots, value: FillValue::Zero });
            push(Act::Fill { to: lse, rows: slots, value: FillValue::NegInfinity });
        }
        push(Act::Fill { to: max_logit, rows: Extent::Values, value: FillValue::NegInfinity });
        push(Act::AttendWhole { table, inputs, sink, results });
    }

    pub(super) fn push_backward(&self, to: &mut Vec<Op>) {
        let Some((dout, results, dsink)) = self.backward else { return };
        let ([q, k, v], [out, lse, _]) = (self.inputs, self.results);
        let sink = self.sink.zip(dsink).map(|(sink, dsink)| [sink, dsink]);
        let mut push = |act| to.push(Op { stream: COMPUTE, act });
        if self.table.is_some() {
            for (to, side) in results.into_iter().zip([Side::Q, Side::Kv, Side::Kv]) {
                push(Act::Fill { to, rows: Extent::Slots(side), value: FillValue::Zero });
            }
        }
        let (table, inputs) = (self.table, [q, k, v, dout, out, lse]);
        push(Act::AttendBackwardWhole { table, inputs, sink, results });
    }
}
