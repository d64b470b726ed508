//! The unfused path for packed sequences: one call for each sequence, on its own rows alone. It makes no mask over all
//! queries and keys, so that its memory is linear in the tokens, which it counts.

use ndarray::{Array3, Axis};
use seamproof_oracle::{
    Algorithm, ContextParallel, Form, Inputs, Problem, ProblemFields, Run, Scales, Sequence, Side, Sink,
    TensorRows,
};

use super::SubjectName;
use crate::subject::{Backend, Costs, Declaration, Outputs, Promises, RankGradients, RankOutputs, RunError};
use seamproof_oracle::sharding::run_of;

/// A kernel behind a loop over the sequences.
pub struct Unfused {
    kernel: Box<dyn Backend>,
    makes_mask: bool,
    name: String,
}

impl Unfused {
    /// Name of the subject.
    pub const NAME: &str = "unfused";
    /// Id of its planted fault.
    pub const FULL_MASK: &str = "full-mask";

    /// Returns the loop over a kernel of one sequence. The kernel's fault is the path's, and in its name.
    pub fn over(kernel: impl Backend + 'static) -> Unfused {
        let fault = SubjectName::from(kernel.name()).planted;
        let name = match fault {
            Some(id) => SubjectName::planted(Unfused::NAME, &id).name(),
            None => Unfused::NAME.to_owned(),
        };
        Unfused { kernel: Box::new(kernel), makes_mask: false, name }
    }

    /// Returns the loop with its planted fault: a mask of all queries by all keys is made first, as for a fused call.
    pub fn with_full_mask(kernel: impl Backend + 'static) -> Unfused {
        let name = SubjectName::planted(Unfused::NAME, Unfused::FULL_MASK).name();
        Unfused { makes_mask: true, name, ..Unfused::over(kernel) }
    }
}

/// Bytes of an element of a tensor in the kernel's memory.
const ELEMENT: u64 = 4;

impl Backend for Unfused {
    fn name(&self) -> &str {
        &self.name
    }

    fn declaration(&self) -> Declaration {
        let mut declaration = self.kernel.declaration();
        let table = &mut declaration.table;
        table.parallel.algorithms = vec![Algorithm::Single.name()];
        table.parallel.ranks_most = 1;
        table.parallel.sub_groups = false;
        table.parallel.regions = false;
        table.forms = vec![Form::CuSeqlens];
        table.cache = false;
        table.pages = None;
        table.sharing = false;
        // The gradient of a sink is a sum over all calls.
        table.sinks = vec![Sink::None, Sink::OffByOne];
        Declaration { promises: Promises { linear_memory: true, ..declaration.promises }, ..declaration }
    }

    fn run(&self, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
        self.declaration().table.check(problem)?;
        let mut whole = cleared(problem);
        let mut largest = 0;
        for sequence in &problem.sequences {
            let alone = alone(problem, sequence)?;
            let given = Inputs {
                q: gathered(&inputs.q, sequence.q),
                k: gathered(&inputs.k, sequence.kv),
                v: gathered(&inputs.v, sequence.kv),
                dout: gathered(&inputs.dout, sequence.q),
                sink: inputs.sink.clone(),
                scales: Scales::default(),
            };
            let mut outputs = self.kernel.run(&alone, &given)?;
            let one = outputs.ranks.pop().ok_or_else(|| RunError::Crash("a call returned nothing".into()))?;
            scatter(&mut whole, one, sequence);
            largest = largest.max(ELEMENT * alone.elements());
        }
        let mask = if self.makes_mask { problem.rows.q as u64 * problem.rows.kv as u64 } else { 0 };
        let peak_bytes = Some(ELEMENT * problem.elements() + largest + mask);
        Ok(Outputs { costs: Costs { peak_bytes, ..Costs::default() }, ..whole.into() })
    }
}

/// Returns the problem of one sequence, whose rows lie together and have no padding.
pub(super) fn alone(problem: &Problem, sequence: &Sequence) -> Result<Problem, RunError> {
    let [q, kv] = [Side::Q, Side::Kv].map(|side| run_of(sequence, side).len);
    let packed = |len| Run::packed(0, len, len);
    let fields = ProblemFields {
        sequences: vec![Sequence { q: packed(q), kv: packed(kv), ..*sequence }],
        rows: TensorRows { q, kv },
        parallel: ContextParallel::single(),
        ..problem.clone().into()
    };
    Problem::new(fields).map_err(|error| RunError::Crash(error.to_string()))
}

/// Returns results in which padding rows are zero, and nothing else is written.
pub(super) fn cleared(problem: &Problem) -> RankOutputs {
    let mut whole = RankOutputs::unwritten(problem);
    whole.max_logit = Some(ndarray::Array1::from_elem(problem.heads.q, f32::NEG_INFINITY));
    for Sequence { q, kv, .. } in &problem.sequences {
        for row in q.padding_rows() {
            whole.out.index_axis_mut(Axis(0), row).fill(0.0);
            whole.lse.iter_mut().for_each(|lse| lse.column_mut(row).fill(f32::NEG_INFINITY));
            whole.gradients.iter_mut().for_each(|all| all.dq.index_axis_mut(Axis(0), row).fill(0.0));
        }
        for row in kv.padding_rows() {
            if let Some(all) = &mut whole.gradients {
                all.dk.index_axis_mut(Axis(0), row).fill(0.0);
                all.dv.index_axis_mut(Axis(0), row).fill(0.0);
            }
        }
    }
    whole
}

/// Returns the real rows of a sequence. A tensor that the pass does not have has none.
pub(super) fn gathered(tensor: &Array3<f32>, run: Run) -> Array3<f32> {
    let rows: Vec<usize> = run.real_rows().filter(|row| *row < tensor.len_of(Axis(0))).collect();
    tensor.select(Axis(0), &rows)
}

fn scatter(whole: &mut RankOutputs, one: RankOutputs, sequence: &Sequence) {
    spread(&mut whole.out, &one.out, sequence.q);
    if let (Some(whole), Some(one)) = (&mut whole.lse, &one.lse) {
        let rows = sequence.q.real_rows().enumerate();
        rows.for_each(|(from, to)| whole.column_mut(to).assign(&one.column(from)));
    }
    if let (Some(whole), Some(one)) = (&mut whole.max_logit, &one.max_logit) {
        whole.zip_mut_with(one, |max, one| *max = max.max(*one));
    }
    if let (Some(whole), Some(RankGradients { dq, dk, dv, .. })) = (&mut whole.gradients, &one.gradients) {
        spread(&mut whole.dq, dq, sequence.q);
        spread(&mut whole.dk, dk, sequence.kv);
        spread(&mut whole.dv, dv, sequence.kv);
    }
}

fn spread(whole: &mut Array3<f32>, one: &Array3<f32>, run: Run) {
    for (from, to) in run.real_rows().enumerate() {
        whole.index_axis_mut(Axis(0), to).assign(&one.index_axis(Axis(0), from));
    }
}
