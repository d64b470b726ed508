//! One rank that converts packed sequences (THD) into a batch of equal spans (BSHD), attends there and converts back, as
//! TransformerEngine's unfused attention does.
//!
//! In the *batch*, sequence i has the rows from i · span on, where span is the longest real length of its side. Real
//! rows alone are converted. Results of rows that a sequence owns begin as zeros (an LSE as −∞), and those of real rows
//! are copied over them; other rows stay as they are. The backward reads the out and the LSE of the batch.
//!
//! Source: `UnfusedDotProductAttention` and `ConvertTHDtoBSHD` of <https://github.com/NVIDIA/TransformerEngine>.

use seamproof_oracle::{Form, Problem, ProblemFields, Run, Sequence, Side, Steps, TensorRows};

use super::build::{self, BuildError, Builder, Local, LocalBackward};
use super::program::{Buffer, BufferId, FillValue, Role, RowPair, Schedule};
use super::single::{self, STREAM, single};
use crate::AttentionCall;

/// Largest number of times that the batch may have as many rows as the pack. One long sequence among many short ones
/// would make memory grow with the square of their number.
const LARGER_AT_MOST: usize = 4;

/// Returns the schedule with conversions, or that of [`single`] where rows of a sequence lie apart, in pages or in
/// another sequence, where there is no sequence, and where the batch would be too large.
pub fn converted(problem: &Problem) -> Result<Schedule, BuildError> {
    let Some(batch) = batch(problem) else { return single(problem) };
    let (mut builder, local) = single::begin(problem);
    let conversion = Conversion { problem, batch: &batch };
    let inside = conversion.begin(&mut builder, &local);
    let call = AttentionCall::whole(&batch);
    single::attend(&mut builder, &call, &inside);
    let (zero, none) = (FillValue::Zero, FillValue::NegInfinity);
    conversion
        .end(&mut builder, &[(Side::Q, inside.out, local.out, zero), (Side::Q, inside.lse, local.lse, none)]);
    if let Some(to) = local.backward {
        builder.begin_backward();
        let gradients = conversion.begin_backward(&mut builder, &inside, &to);
        single::attend_backward(&mut builder, &call, &inside, &gradients);
        let results = [
            (Side::Q, gradients.dq, to.dq, zero),
            (Side::Kv, gradients.dk, to.dk, zero),
            (Side::Kv, gradients.dv, to.dv, zero),
        ];
        conversion.end(&mut builder, &results);
    }
    Ok(single::finish(problem, builder))
}

/// Returns the problem as a batch; `None` where it is not converted.
fn batch(problem: &Problem) -> Option<Problem> {
    let sequences = &problem.sequences;
    let together = sequences.iter().all(|sequence| sequence.q.step == 1 && sequence.kv.step == 1);
    let alone = problem.pages.is_none() && problem.sharing.is_empty();
    if !alone || sequences.is_empty() || !together {
        return None;
    }
    let longest = |run: fn(&Sequence) -> Run| sequences.iter().map(|sequence| run(sequence).len).max();
    let (q, kv) = (longest(|sequence| sequence.q)?, longest(|sequence| sequence.kv)?);
    let rows = TensorRows { q: q * sequences.len(), kv: kv * sequences.len() };
    if rows.q > LARGER_AT_MOST * problem.rows.q || rows.kv > LARGER_AT_MOST * problem.rows.kv {
        return None;
    }
    let place = |(index, sequence): (usize, &Sequence)| Sequence {
        q: Run::packed(index * q, sequence.q.len, q),
        kv: Run::packed(index * kv, sequence.kv.len, kv),
        ..*sequence
    };
    let sequences = sequences.iter().enumerate().map(place).collect();
    let (form, steps) = (Form::CuSeqlens, Steps::default());
    Problem::new(ProblemFields { sequences, rows, form, steps, ..problem.clone().into() }).ok()
}

/// The way from the pack to the batch and back.
struct Conversion<'a> {
    problem: &'a Problem,
    batch: &'a Problem,
}

impl Conversion<'_> {
    /// Converts the inputs, and returns the buffers of the batch with room for the results.
    fn begin(&self, builder: &mut Builder, local: &Local) -> Local {
        let q = self.converted_input(builder, Side::Q, local.q);
        let k = self.converted_input(builder, Side::Kv, local.k);
        let v = self.converted_input(builder, Side::Kv, local.v);
        let out = self.room(builder, Side::Q, local.out);
        let lse = self.room(builder, Side::Q, local.lse);
        Local { q, k, v, out, lse, backward: None, ..*local }
    }

    /// Converts dout, and returns the backward buffers of the batch with room for the gradients.
    fn begin_backward(&self, builder: &mut Builder, inside: &Local, to: &LocalBackward) -> LocalBackward {
        let dout = self.converted_input(builder, Side::Q, to.dout);
        let format = builder.describe(to.dq).format;
        let dq = builder.like(inside.q, "dq in BSHD", format);
        let dk = builder.like(inside.k, "dk in BSHD", format);
        let dv = builder.like(inside.v, "dv in BSHD", format);
        LocalBackward { dout, dq, dk, dv, dsink: to.dsink }
    }

    /// Converts results back, each from the batch's buffer to the pack's. Rows that a sequence owns begin as a value.
    fn end(&self, builder: &mut Builder, results: &[(Side, BufferId, BufferId, FillValue)]) {
        for &(side, from, to, value) in results {
            let owned = self.runs(self.problem, side).filter(|run| run.span > 0);
            let slots: Vec<Run> = owned.map(|run| Run { len: run.span, ..run }).collect();
            builder.fill(0, STREAM, to, &slots, value);
            let rows: Vec<RowPair> = self.pairs(side).map(|(pack, batch)| (batch, pack)).collect();
            builder.copy(0, STREAM, from, to, &rows);
        }
    }

    fn converted_input(&self, builder: &mut Builder, side: Side, from: BufferId) -> BufferId {
        let to = self.room(builder, side, from);
        let rows: Vec<RowPair> = self.pairs(side).collect();
        builder.copy(0, STREAM, from, to, &rows);
        to
    }

    /// Adds a buffer with the batch's rows of a side, otherwise like another.
    fn room(&self, builder: &mut Builder, side: Side, like: BufferId) -> BufferId {
        let model = builder.describe(like).clone();
        let rows = if side == Side::Q { self.batch.rows.q } else { self.batch.rows.kv };
        let name = format!("{} in BSHD", model.name);
        builder.buffer(Buffer { name: name.into(), rows, role: Role::Scratch, ..model })
    }

    /// Returns the real rows of each sequence, in the pack and in the batch.
    fn pairs(&self, side: Side) -> impl Iterator<Item = RowPair> {
        let both = self.runs(self.problem, side).zip(self.runs(self.batch, side));
        let real = |run: Run| build::part(run, &(0..run.len));
        both.filter(|(pack, _)| pack.len > 0).map(move |(pack, batch)| (real(pack), real(batch)))
    }

    fn runs<'a>(&self, problem: &'a Problem, side: Side) -> impl Iterator<Item = Run> + use<'a> {
        problem.sequences.iter().map(move |sequence| if side == Side::Q { sequence.q } else { sequence.kv })
    }
}
