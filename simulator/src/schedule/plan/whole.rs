//! The plan of one launch on whole sequences, as [`super::super::all_to_all`] has it between its exchanges.

use super::act::{Act, Extent, Op, Own};
use super::own;
use crate::schedule::FillValue;
use crate::schedule::build::Local;

const COMPUTE: u8 = 0;

/// Buffers of a block of heads.
#[derive(Debug)]
pub(super) struct WholePlan {
    inputs: [Own; 3],
    sink: Option<Own>,
    /// Out, LSE and max_logit.
    results: [Own; 3],
    /// dout, the gradients of q, k and v, and that of the sink.
    backward: Option<(Own, [Own; 3], Option<Own>)>,
}

impl WholePlan {
    pub(super) fn forward(local: &Local) -> WholePlan {
        let Local { q, k, v, sink, out, lse, max_logit, .. } = *local;
        let (inputs, results) = ([q, k, v].map(own), [out, lse, max_logit].map(own));
        WholePlan { inputs, sink: sink.map(own), results, backward: None }
    }

    pub(super) fn with_backward(self, local: &Local) -> WholePlan {
        let backward =
            local.backward.map(|to| (own(to.dout), [to.dq, to.dk, to.dv].map(own), to.dsink.map(own)));
        WholePlan { backward, ..self }
    }

    pub(super) fn push_forward(&self, to: &mut Vec<Op>) {
        let WholePlan { inputs, sink, results, .. } = *self;
        let fill = Act::Fill { to: results[2], rows: Extent::Values, value: FillValue::NegInfinity };
        let launch = Act::AttendWhole { inputs, sink, results };
        to.extend([fill, launch].map(|act| Op { stream: COMPUTE, act }));
    }

    pub(super) fn push_backward(&self, to: &mut Vec<Op>) {
        let Some((dout, results, dsink)) = self.backward else { return };
        let ([q, k, v], [out, lse, _]) = (self.inputs, self.results);
        let sink = self.sink.zip(dsink).map(|(sink, dsink)| [sink, dsink]);
        let act = Act::AttendBackwardWhole { inputs: [q, k, v, dout, out, lse], sink, results };
        to.push(Op { stream: COMPUTE, act });
    }
}
