//! The exact answer computed fast, with its error envelope.
//!
//! The definitions are those of [`crate::exact`], evaluated in f64 matrix products over tiles. Pairs that the mask
//! hides are skipped. A *group* is a sequence, a KV head and that head's query heads. A *piece* is a range of query
//! rows of one query head. Pieces are independent apart from dk and dv, whose partial sums are added in a fixed order.
//! The cut into pieces depends on the problem alone, and results do not depend on the number of threads. A property
//! test compares the results with those of [`crate::exact`].

mod answer;
mod backward;
mod exponential;
mod forward;
mod pieces;

use ndarray::{Array1, Array2, Array3};

pub use answer::{Answer, Tiers};

use crate::envelope::{Model, NumericProfile};
use crate::replay::Replay;
use crate::{
    ForwardResults, Gradients, InputViews, Inputs, Pass, Problem, ProblemError, ProblemFields, Saved,
    SavedViews, Side,
};
use backward::Sides;
use pieces::{Group, Keys, groups, is_large, map, pieces};

/// The most groups whose results are held at once before they are stored. The cost of a group does not shrink with its
/// rows.
const GROUPS_HELD: usize = 1024;

/// Returns the results of the forward pass, with the envelope of `model`. `inputs` must have the problem's shapes
/// ([`Inputs::check`]).
pub fn forward<'a>(
    problem: &Problem,
    inputs: impl Into<InputViews<'a>>,
    model: Option<&Model>,
) -> Answer<ForwardResults> {
    all_forward(problem, &inputs.into(), model, None)
}

/// Returns the results of the replayed forward. out alone is replayed, and [`Tiers::worst`] is the error that it may
/// still have.
pub fn replayed_forward(
    problem: &Problem,
    inputs: &Inputs,
    model: &Model,
    replay: &Replay,
) -> Result<Answer<ForwardResults>, ProblemError> {
    let model = &replay.merges.map_or(*model, |merges| model.with_merges(merges));
    let model = &model.with_profile(problem, &replay.profile);
    if !replay.profile.scales_queries {
        return Ok(all_forward(problem, &inputs.into(), Some(model), Some(replay)));
    }
    let (scale, format) = (problem.softmax.scale, problem.precision.q.format);
    let mut fields = ProblemFields::from(problem.clone());
    fields.softmax.scale = 1.0;
    let unscaled = Problem::new(fields)?;
    let mut inputs = inputs.clone();
    inputs.q.mapv_inplace(|q| format.round_f32(q * scale));
    Ok(all_forward(&unscaled, &(&inputs).into(), Some(&model.with_scale(1.0)), Some(replay)))
}

fn all_forward(
    problem: &Problem,
    inputs: &InputViews<'_>,
    model: Option<&Model>,
    replay: Option<&Replay>,
) -> Answer<ForwardResults> {
    inputs.assert_shapes(problem, Pass::Forward);
    let empty = |lse: f64| ForwardResults {
        out: Array3::zeros(problem.out_shape()),
        lse: Array2::from_elem(problem.lse_shape(), lse),
        max_logit: Array1::from_elem(problem.heads.q, lse),
    };
    let bound = model.map(|_| Tiers { worst: empty(0.0), dithered: empty(f64::INFINITY) });
    let mut answer = Answer { exact: empty(f64::NEG_INFINITY), bound };
    let parallel = is_large(problem);
    let by_sequence = replay.map_or(Vec::new(), Replay::by_sequence);
    let replay = replay.map(|replay| (replay, by_sequence.as_slice()));
    let work = |group: Group| {
        let operands = Keys::gather(problem, inputs, &group, model);
        let pieces = map(parallel, pieces(problem, &group), |piece| {
            let result = forward::piece(problem, inputs, &group, &operands, &piece, model, replay);
            (piece, result)
        });
        (group, pieces)
    };
    let all = groups(problem);
    for (group, pieces) in all.chunks(GROUPS_HELD).flat_map(|held| map(parallel, held.to_vec(), work)) {
        let run = problem.sequences[group.sequence].q;
        for (piece, result) in pieces {
            result.exact.store(&run, &piece, &mut answer.exact);
            if let (Some(from), Some(to)) = (&result.bound, &mut answer.bound) {
                from.worst.store(&run, &piece, &mut to.worst);
                from.dithered.store(&run, &piece, &mut to.dithered);
            }
        }
    }
    answer
}

/// Returns the gradients from the given `saved` out and lse, with the envelope of `model`.
pub fn backward(
    problem: &Problem,
    inputs: &Inputs,
    saved: &Saved,
    model: Option<&Model>,
) -> Answer<Gradients> {
    all_backward(problem, &inputs.into(), (saved.into(), None), Sides::BOTH, model, None)
}

/// Returns dsink and the gradients of one side: dq, or dk and dv. Without a side it returns dsink alone. All other
/// gradients, and their bounds, have no rows. Where D may be `Σ P·dP` ([`Model::weighs_dots`]), it is that of the problem's own
/// keys, and dq, dk and dsink hold for a problem with all keys of its queries.
pub fn backward_of<'a>(
    problem: &Problem,
    inputs: impl Into<InputViews<'a>>,
    (saved, lse_error): (SavedViews<'_>, Option<&Array2<f64>>),
    side: Option<Side>,
    model: &Model,
) -> Answer<Gradients> {
    let sides = Sides { q: side == Some(Side::Q), kv: side == Some(Side::Kv) };
    all_backward(problem, &inputs.into(), (saved, lse_error), sides, Some(model), None)
}

/// Returns the gradients for a subject that hides its LSE. `saved.lse` is the exact one, and the subject's own may be
/// `lse_error` away, `[q heads, q rows]`.
pub fn backward_of_hidden_lse(
    problem: &Problem,
    inputs: &Inputs,
    saved: &Saved,
    lse_error: &Array2<f64>,
    model: &Model,
) -> Answer<Gradients> {
    all_backward(problem, &inputs.into(), (saved.into(), Some(lse_error)), Sides::BOTH, Some(model), None)
}

/// Returns the gradients of the replayed backward, or `None` where queries are scaled first: their gradients take
/// another way.
pub fn replayed_backward(
    problem: &Problem,
    inputs: &Inputs,
    saved: &Saved,
    model: &Model,
    profile: &NumericProfile,
) -> Option<Answer<Gradients>> {
    let model = &model.with_profile(problem, profile);
    let replay = || {
        all_backward(problem, &inputs.into(), (saved.into(), None), Sides::BOTH, Some(model), Some(profile))
    };
    (!profile.scales_queries).then(replay)
}

fn all_backward(
    problem: &Problem,
    inputs: &InputViews<'_>,
    saved: (SavedViews<'_>, Option<&Array2<f64>>),
    sides: Sides,
    model: Option<&Model>,
    replay: Option<&NumericProfile>,
) -> Answer<Gradients> {
    inputs.assert_shapes(problem, Pass::Backward);
    saved.0.assert_shapes(problem);
    if let Some(errors) = saved.1 {
        assert_eq!(errors.shape(), problem.lse_shape(), "shape of the errors of the lse");
    }
    let wanted = |is_wanted: bool, [rows, heads, dim]: [usize; 3]| {
        Array3::zeros([if is_wanted { rows } else { 0 }, heads, dim])
    };
    let empty = || Gradients {
        dq: wanted(sides.q, problem.q_shape()),
        dk: wanted(sides.kv, problem.k_shape()),
        dv: wanted(sides.kv, problem.v_shape()),
        dsink: Array1::zeros(problem.learnable_sinks()),
    };
    let bound = model.map(|_| Tiers { worst: empty(), dithered: empty() });
    let mut answer = Answer { exact: empty(), bound };
    let mut sinks = vec![backward::SinkSum::default(); problem.heads.q];
    let parallel = is_large(problem);
    let work = |group: Group| {
        let result =
            backward::group(problem, inputs, (&saved.0, saved.1), &group, sides, model, replay, parallel);
        (group, result)
    };
    let all = groups(problem);
    for (group, result) in all.chunks(GROUPS_HELD).flat_map(|held| map(parallel, held.to_vec(), work)) {
        result.exact.store(problem, &group, &mut answer.exact);
        if let (Some(from), Some(to)) = (&result.bound, &mut answer.bound) {
            from.worst.store(problem, &group, &mut to.worst);
            from.dithered.store(problem, &group, &mut to.dithered);
        }
        for (head, sink) in result.sinks {
            sinks[head].add(&sink);
        }
    }
    for head in 0..problem.learnable_sinks() {
        answer.exact.dsink[head] = -sinks[head].value;
        if let (Some(bound), Some(model)) = (&mut answer.bound, model) {
            let sum = model.sink_bound(sinks[head].terms, sinks[head].errors, sinks[head].rows);
            bound.worst.dsink[head] = sum;
            bound.dithered.dsink[head] = f64::INFINITY;
        }
    }
    answer
}
