//! Problems with steps, run call by call on a cache that the caller keeps.
//!
//! The cache lies where the problem's keys and values lie. Before each call the caller writes the rows of the tokens
//! that the call appends. Rows that are not yet written hold what the subject's padding contract allows at its worst.
//! Each call is an ordinary problem of the subject, and its results go to their rows of the whole.

use ndarray::{Array1, Array2, Array3, Axis};
use seamproof_oracle::{Append, Call, Inputs, Problem, ProblemFields, Run, Scales, TensorName};

use super::miscall::told;
use crate::ladder::runs::fills;
use crate::subject::{Backend, Costs, Outputs, PaddingOutputs, RankOutputs, RunError};
use crate::values::poison_rows;

/// What a caller does before each call. The first argument of both is the number of the call.
#[derive(Clone, Copy)]
pub(super) struct Caller {
    /// Returns the position in the cache at which a token of an append is written, by its number; `None` for one that
    /// is written only after the call.
    pub(super) place: fn(usize, &Append, usize) -> Option<usize>,
    /// Changes what the kernel is told.
    pub(super) tells: fn(usize, &mut ProblemFields),
}

/// The right caller: each token comes behind the cached ones, and the kernel is told what the call is.
pub(super) const RIGHT: Caller =
    Caller { place: |_, append, token| Some(append.cached + token), tells: |_, _| {} };

/// Runs a problem with steps on a subject, which sees each call as a problem of its own. A subject whose table takes
/// the row `cache` calls this in its [`Backend::run`], unless it keeps a cache of its own.
///
/// A problem without steps is no such call: no row of its results is written.
pub fn in_steps(backend: &dyn Backend, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
    called(backend, problem, inputs, RIGHT)
}

/// Runs a problem with steps as a caller makes them.
pub(super) fn called(
    backend: &dyn Backend,
    problem: &Problem,
    inputs: &Inputs,
    caller: Caller,
) -> Result<Outputs, RunError> {
    let mut cache = Cache::before(backend, problem, inputs);
    let mut whole = Whole::of(backend, problem);
    for (number, call) in problem.calls().iter().enumerate() {
        let places = Places { problem, call, at: &|append, token| (caller.place)(number, append, token) };
        cache.append(inputs, &places, false);
        let given = cache.given(problem, inputs, call);
        let outputs = told(backend, &call.problem, &given, |fields| (caller.tells)(number, fields))?;
        whole
            .take(problem, call, outputs)
            .map_err(|what| RunError::Crash(format!("call {number}: {what}")))?;
        cache.append(inputs, &places, true);
    }
    Ok(whole.outputs)
}

/// The rows of a call's tokens: where they come from, and where they are written.
struct Places<'a> {
    problem: &'a Problem,
    call: &'a Call,
    at: &'a dyn Fn(&Append, usize) -> Option<usize>,
}

impl Places<'_> {
    /// Returns pairs of a token's own row and the row that is written: those before the call, or those after it.
    fn rows(&self, after: bool) -> impl Iterator<Item = (usize, usize)> + '_ {
        let tokens = self.call.appends.iter().flat_map(|append| (0..append.tokens).map(move |i| (append, i)));
        tokens.filter_map(move |(append, token)| {
            let kv = self.problem.sequences[append.sequence].kv;
            let (own, place) = (append.cached + token, (self.at)(append, token));
            let place = if after { Some(own).filter(|_| place.is_none()) } else { place };
            place.filter(|place| *place < kv.span).map(|place| (kv.row(own), kv.row(place)))
        })
    }
}

/// The caller's keys and values.
struct Cache {
    k: Array3<f32>,
    v: Array3<f32>,
}

impl Cache {
    /// Returns the cache before the first call: the keys that a sequence has beyond its queries are there.
    fn before(backend: &dyn Backend, problem: &Problem, inputs: &Inputs) -> Cache {
        let mut written = vec![true; problem.rows.kv];
        for sequence in &problem.sequences {
            let appended = sequence.kv.len - sequence.q.len..sequence.kv.len;
            appended.for_each(|position| written[sequence.kv.row(position)] = false);
        }
        let [fill, _] = fills(backend, problem);
        let unwritten = |tensor: &Array3<f32>| {
            let mut tensor = tensor.clone();
            poison_rows(tensor.view_mut(), Axis(0), &written, fill);
            tensor
        };
        Cache { k: unwritten(&inputs.k), v: unwritten(&inputs.v) }
    }

    fn append(&mut self, inputs: &Inputs, places: &Places<'_>, after: bool) {
        for (from, to) in places.rows(after) {
            for (cache, tensor) in [(&mut self.k, &inputs.k), (&mut self.v, &inputs.v)] {
                cache.index_axis_mut(Axis(0), to).assign(&tensor.index_axis(Axis(0), from));
            }
        }
    }

    /// Returns the inputs of a call.
    fn given(&self, problem: &Problem, inputs: &Inputs, call: &Call) -> Inputs {
        let mut q = Array3::zeros(call.problem.q_shape());
        for (own, row) in rows(problem, call) {
            q.index_axis_mut(Axis(0), row).assign(&inputs.q.index_axis(Axis(0), own));
        }
        Inputs {
            q,
            k: self.k.clone(),
            v: self.v.clone(),
            dout: inputs.dout.clone(),
            sink: inputs.sink.clone(),
            scales: Scales::default(),
        }
    }
}

/// Returns the rows of a call's queries: in the whole problem, and in the call.
fn rows<'a>(problem: &'a Problem, call: &'a Call) -> impl Iterator<Item = (usize, usize)> + 'a {
    call.appends.iter().zip(&call.problem.sequences).flat_map(move |(append, sequence)| {
        let whole: Run = problem.sequences[append.sequence].q;
        (0..append.tokens).map(move |token| (whole.row(append.first + token), sequence.q.row(token)))
    })
}

/// The results of all calls together.
struct Whole {
    outputs: Outputs,
}

impl Whole {
    /// Returns results before the first call. Padding rows are as the subject's contract says, since no call has any.
    fn of(backend: &dyn Backend, problem: &Problem) -> Whole {
        let declaration = backend.declaration();
        let returned = |name| declaration.table.statistics.contains(&name);
        let mut rank = RankOutputs::unwritten(problem);
        rank.lse = rank.lse.filter(|_| returned(TensorName::Lse));
        rank.max_logit =
            returned(TensorName::MaxLogit).then(|| Array1::from_elem(problem.heads.q, f32::NEG_INFINITY));
        if declaration.padding.outputs == PaddingOutputs::Zero {
            for row in problem.sequences.iter().flat_map(|sequence| sequence.q.padding_rows()) {
                rank.out.index_axis_mut(Axis(0), row).fill(0.0);
                rank.lse.iter_mut().for_each(|lse| lse.column_mut(row).fill(f32::NEG_INFINITY));
            }
        }
        Whole { outputs: rank.into() }
    }

    /// Takes the results of a call; otherwise says what is wrong with their number or shape.
    fn take(&mut self, problem: &Problem, call: &Call, outputs: Outputs) -> Result<(), String> {
        let [one] = <[RankOutputs; 1]>::try_from(outputs.ranks)
            .map_err(|ranks| format!("{} ranks returned results, not 1", ranks.len()))?;
        let rank = &mut self.outputs.ranks[0];
        if one.out.shape() != call.problem.out_shape() {
            return Err(format!("out has shape {:?}, not {:?}", one.out.shape(), call.problem.out_shape()));
        }
        for (own, row) in rows(problem, call) {
            rank.out.index_axis_mut(Axis(0), own).assign(&one.out.index_axis(Axis(0), row));
        }
        statistic(&mut rank.lse, one.lse, call.problem.lse_shape(), |whole: &mut Array2<f32>, one| {
            rows(problem, call).for_each(|(own, row)| whole.column_mut(own).assign(&one.column(row)));
        })?;
        statistic(
            &mut rank.max_logit,
            one.max_logit,
            [call.problem.heads.q],
            |whole: &mut Array1<f32>, one| {
                // A NaN of any call stays.
                whole.zip_mut_with(one, |max, one| {
                    *max = if max.is_nan() || *max >= *one { *max } else { *one };
                });
            },
        )?;
        self.outputs.damage.extend(outputs.damage);
        self.outputs.changed.extend(outputs.changed);
        self.outputs.costs = together(self.outputs.costs, outputs.costs);
        Ok(())
    }
}

/// Takes a statistic of one call. Where a call returns none, the whole has none.
fn statistic<D: ndarray::Dimension, const N: usize>(
    whole: &mut Option<ndarray::Array<f32, D>>,
    one: Option<ndarray::Array<f32, D>>,
    shape: [usize; N],
    take: impl FnOnce(&mut ndarray::Array<f32, D>, &ndarray::Array<f32, D>),
) -> Result<(), String> {
    match (whole.as_mut(), one) {
        (Some(_), Some(one)) if one.shape() != shape => {
            Err(format!("a statistic has shape {:?}, not {shape:?}", one.shape()))
        }
        (Some(whole), Some(one)) => {
            take(whole, &one);
            Ok(())
        }
        _ => {
            *whole = None;
            Ok(())
        }
    }
}

/// Returns the costs of calls one after the other.
fn together(a: Costs, b: Costs) -> Costs {
    let both = |a: Option<u64>, b: Option<u64>, join: fn(u64, u64) -> u64| match (a, b) {
        (Some(a), Some(b)) => Some(join(a, b)),
        (one, other) => one.or(other),
    };
    Costs {
        peak_bytes: both(a.peak_bytes, b.peak_bytes, u64::max),
        launches: both(a.launches, b.launches, u64::saturating_add),
        host_synchronisations: both(a.host_synchronisations, b.host_synchronisations, u64::saturating_add),
    }
}
