//! Sums and merges with the rows that they fold.

use seamproof_oracle::Side;

use super::super::act::{Extent, Launch, Own};
use super::works::{Works, id};
use crate::schedule::build;
use crate::schedule::program::{Merge, MergeStyle, Work};

impl Works<'_> {
    pub(super) fn merge(
        &self,
        style: MergeStyle,
        launch: &Launch,
        step: [Own; 2],
        running: [Own; 2],
    ) -> Work {
        let ([step_out, step_lse], [out, lse]) = (step.map(id), running.map(id));
        let rows = self.written(launch, Side::Q);
        Work::Merge(Merge { style, step_out, step_lse, out, lse, rows })
    }

    pub(super) fn accumulate(&self, launch: &Launch, side: Side, from: Own, to: Own) -> Work {
        Work::Accumulate { from: id(from), to: id(to), rows: self.written(launch, side) }
    }

    pub(super) fn add(&self, side: Side, from: Own, to: Own) -> Work {
        let rows = build::same_rows(&self.extent(to, Extent::LocalSlots(side)));
        Work::Accumulate { from: id(from), to: id(to), rows }
    }

    pub(super) fn apply_sink(&self, sink: Option<Own>, results: [Own; 2]) -> Work {
        let ([out, lse], rows) = (results.map(id), self.core().real_queries(self.plan.place(self.rank)));
        Work::ApplySink { sink: sink.map(id), out, lse, rows }
    }

    pub(super) fn sink_gradient(&self, inputs: [Own; 4], dsink: Own) -> Work {
        let ([sink, dout, out, lse], dsink) = (inputs.map(id), id(dsink));
        let rows = self.core().real_queries(self.plan.place(self.rank));
        Work::SinkGradient { sink, dout, out, lse, dsink, rows, descales: Vec::new() }
    }
}
