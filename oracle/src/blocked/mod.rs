//! The exact answer computed fast, with its error envelope.
//!
//! The definitions are those of [`crate::exact`], evaluated in f64 matrix products over tiles. Pairs that the mask
//! hides are skipped. A *group* is a sequence, a KV head and that head's query heads. A *piece* is a range of query
//! rows of one query head. Pieces are independent apart from dk and dv, whose partial sums are added in a fixed order.
//! Some rows of a sequence may be asked for alone ([`forward_of`], [`backward_of`]): the other side of their groups is
//! whole, and they are computed in the same way. Keys are widened to f64 tile by tile, since those of a long sequence
//! do not fit into memory. The cut into pieces depends on the problem and on the rows alone, and results do not depend
//! on the number of threads. Property tests compare the results with those of [`crate::exact`], and those of rows with
//! the whole's.

mod answer;
mod backward;
mod exponential;
mod forward;
mod pieces;
mod shared;
mod unit;

use ndarray::{Array1, Array2, Array3};

pub use answer::{Answer, Tiers};

use crate::amax::Range;
use crate::envelope::Model;
use crate::exact::{saturate, saturate_gradients};
use crate::replay::Replay;
use crate::{
    ForwardResults, Gradients, InputViews, Inputs, Pass, Problem, ProblemError, ProblemFields, Quantity,
    Saved, SavedErrors, SavedViews, TensorName,
};
use backward::Backward;
use backward::unit::Followed;
use pieces::{Cut, Group, Keys, map};

/// The most groups whose results are held at once before they are stored. The cost of a group does not shrink with its
/// rows.
const GROUPS_HELD: usize = 1024;

/// Some rows of one sequence, on one of its sides.
#[derive(Clone, Copy, Debug)]
pub struct SomeRows<'a> {
    /// The index of the sequence.
    pub sequence: usize,
    /// The positions of the rows, in ascending order.
    pub positions: &'a [usize],
}

/// The gradients that are asked for.
#[derive(Clone, Copy, Debug)]
pub enum Wanted<'a> {
    /// dq of some queries.
    Queries(SomeRows<'a>),
    /// dk and dv of some keys.
    Keys(SomeRows<'a>),
    /// dsink.
    Sinks,
}

/// Returns the results of the forward pass, with the envelope of `model`. `inputs` must have the problem's shapes
/// ([`Inputs::check`]).
pub fn forward<'a>(
    problem: &Problem,
    inputs: impl Into<InputViews<'a>>,
    model: Option<&Model>,
) -> Answer<ForwardResults> {
    single(all_forward(&Cut::whole(problem), &inputs.into(), &[View::of(model)]))
}

/// Returns the results of the forward pass with the envelope of `model`, and those of [`replayed_forward`] where both have
/// the same logits, which are computed once. A replay has other logits where it scales queries first, and where it
/// replays sums of products.
pub fn forward_and_replayed(
    problem: &Problem,
    inputs: &Inputs,
    model: &Model,
    replay: &Replay,
) -> (Answer<ForwardResults>, Option<Answer<ForwardResults>>) {
    let of_replay = model_of_replay(problem, model, replay);
    if replay.profile.scales_queries || of_replay.promotion().is_some() {
        return (forward(problem, inputs, Some(model)), None);
    }
    let views = [View::of(Some(model)), View { model: Some(of_replay), replay: Some(replay) }];
    let [exact, replayed] = all_forward(&Cut::whole(problem), &inputs.into(), &views);
    (exact, Some(replayed))
}

/// Returns the results of some queries, with the envelope of `model`. The results have a row for each of them, and
/// max_logit is that of these rows. The cost is that of the keys that the queries see.
pub fn forward_of<'a>(
    problem: &Problem,
    inputs: impl Into<InputViews<'a>>,
    queries: SomeRows<'_>,
    model: &Model,
) -> Answer<ForwardResults> {
    single(all_forward(&Cut::of(problem, Wanted::Queries(queries)), &inputs.into(), &[View::of(Some(model))]))
}

/// Returns the results of the replayed forward: out and the LSE. [`Tiers::worst`] is the error that they may still have.
/// Sums of a matrix unit in FP8 are replayed too, where the subject declares them.
pub fn replayed_forward(
    problem: &Problem,
    inputs: &Inputs,
    model: &Model,
    replay: &Replay,
) -> Result<Answer<ForwardResults>, ProblemError> {
    let model = model_of_replay(problem, model, replay);
    if !replay.profile.scales_queries {
        let view = View { model: Some(model), replay: Some(replay) };
        return Ok(single(all_forward(&Cut::whole(problem), &inputs.into(), &[view])));
    }
    let (scale, format) = (problem.softmax.scale, problem.precision.q.format);
    let mut fields = ProblemFields::from(problem.clone());
    fields.softmax.scale = 1.0;
    let unscaled = Problem::new(fields)?;
    let mut inputs = inputs.clone();
    inputs.q.mapv_inplace(|q| format.round_f32(q * scale));
    let view = View { model: Some(model.with_scale(1.0)), replay: Some(replay) };
    Ok(single(all_forward(&Cut::whole(&unscaled), &(&inputs).into(), &[view])))
}

/// Returns the model of a replayed forward.
fn model_of_replay(problem: &Problem, model: &Model, replay: &Replay) -> Model {
    let model = replay.joints.map_or(*model, |joints| model.with_joints(joints));
    let model = model.with_profile(problem, &replay.profile).replaying_partial_outs();
    if replay.profile.scales_queries { model } else { model.replaying_sums(problem) }
}

/// Results that are asked for: the exact ones or those of a replay, with their bounds if there is a model.
#[derive(Clone, Copy)]
struct View<'a> {
    model: Option<Model>,
    replay: Option<&'a Replay>,
}

impl View<'_> {
    fn of(model: Option<&Model>) -> View<'static> {
        View { model: model.copied(), replay: None }
    }
}

fn single<T>([answer]: [T; 1]) -> T {
    answer
}

/// Returns the answer of each view. They have the same logits, so a view that replays sums of products is alone, and one
/// with a replay is the last.
fn all_forward<const N: usize>(
    cut: &Cut<'_>,
    inputs: &InputViews<'_>,
    views: &[View<'_>; N],
) -> [Answer<ForwardResults>; N] {
    let (problem, [rows, _]) = (cut.problem, cut.rows);
    inputs.assert_shapes(problem, Pass::Forward);
    let empty = |lse: f64| ForwardResults {
        out: Array3::zeros([rows, problem.heads.q, problem.dims.v]),
        lse: Array2::from_elem([problem.heads.q, rows], lse),
        max_logit: Array1::from_elem(problem.heads.q, lse),
    };
    let by_sequence = views.each_ref().map(|view| view.replay.map_or(Vec::new(), Replay::by_sequence));
    let views: [forward::View<'_>; N] = std::array::from_fn(|index| forward::View {
        model: views[index].model.map(|model| model.with_scales(inputs.scales)),
        replay: views[index].replay.map(|replay| (replay, by_sequence[index].as_slice())),
    });
    let mut answers = views.each_ref().map(|view| {
        let tiers = |_: &Model| Tiers { worst: empty(0.0), dithered: empty(f64::INFINITY) };
        Answer { exact: empty(f64::NEG_INFINITY), bound: view.model.as_ref().map(tiers) }
    });
    let parallel = cut.is_large();
    // Nothing is dithered where roundings are replayed.
    let dithering = views.iter().find(|view| view.replay.is_none()).and_then(|view| view.model.as_ref());
    let work = |group: Group<'_>| {
        let keys = Keys::new(group, inputs, dithering);
        map(parallel, group.pieces(), |piece| {
            let results = forward::piece(inputs, (&group, &keys), &piece, &views);
            (piece, results)
        })
    };
    for held in cut.groups.chunks(GROUPS_HELD) {
        for (group, pieces) in held.iter().zip(map(parallel, held.to_vec(), work)) {
            for (piece, results) in pieces {
                for (result, answer) in results.iter().zip(&mut answers) {
                    result.exact.store(group, &piece, &mut answer.exact);
                    if let (Some(from), Some(to)) = (&result.bound, &mut answer.bound) {
                        from.worst.store(group, &piece, &mut to.worst);
                        from.dithered.store(group, &piece, &mut to.dithered);
                    }
                }
            }
        }
    }
    for answer in &mut answers {
        saturate(&mut answer.exact.out, inputs.scales.stored(problem, TensorName::Out));
    }
    answers
}

/// Returns the gradients from the given `saved` out and lse, with the envelope of `model`.
pub fn backward(
    problem: &Problem,
    inputs: &Inputs,
    saved: &Saved,
    model: Option<&Model>,
) -> Answer<Gradients> {
    let (inputs, saved) = (&inputs.into(), &saved.into());
    whole_backward(problem, &Backward { model, ..Backward::new(inputs, saved) })
}

/// Returns some gradients, with the envelope of `model`. Those of rows have a row for each that is asked for, and all
/// others have none. The cost is that of the keys that the queries see, or of the queries that see the keys. They are
/// of one sequence alone: those of keys that it shares are not summed.
///
/// D of a query may be `Σ P·dP` ([`Model::weighs_dots`]). For dq it is made of the query's keys. For other gradients
/// that would take all keys of every query, so the errors must say how far it may be from `Σ dout·out`. Where tiles
/// have factors of dS ([`Model::scales_tiles`]), the errors must say how large it may be.
pub fn backward_of<'a>(
    problem: &Problem,
    inputs: impl Into<InputViews<'a>>,
    (saved, errors): (SavedViews<'_>, SavedErrors<'_>),
    wanted: Wanted<'_>,
    model: &Model,
) -> Answer<Gradients> {
    let is_known = matches!(wanted, Wanted::Queries(_)) || !model.weighs_dots();
    assert!(is_known || errors.delta.is_some(), "errors of D, which may be a sum over all keys");
    assert!(!model.scales_tiles() || errors.ds_most.is_some(), "the largest dS of tiles that are not whole");
    let (inputs, saved) = (&inputs.into(), &saved);
    let backward = Backward { errors, model: Some(model), ..Backward::new(inputs, saved) };
    let mut answer = all_backward(&Cut::of(problem, wanted), &backward);
    saturate_gradients(&mut answer.exact, problem, inputs.scales);
    answer
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
    let (inputs, saved) = (&inputs.into(), &saved.into());
    let errors = SavedErrors { lse: Some(lse_error), ..SavedErrors::default() };
    let backward = Backward { errors, model: Some(model), ..Backward::new(inputs, saved) };
    whole_backward(problem, &backward)
}

/// Returns the gradients of the replayed backward, with the joints of partial gradients where they are not the model's;
/// or `None` where queries are scaled first: those gradients take another way. Where dS has factors, given ones or those of
/// tiles, it is `None` unless the replay knows the tiles, and the rule of their own factors, and sums are those of a matrix
/// unit in FP8.
pub fn replayed_backward(
    problem: &Problem,
    inputs: &Inputs,
    saved: &Saved,
    model: &Model,
    Replay { profile, tiles, joints, .. }: &Replay,
) -> Option<Answer<Gradients>> {
    let model = joints.map_or(*model, |joints| model.with_joints(joints)).with_profile(problem, profile);
    let (inputs, saved) = (&inputs.into(), &saved.into());
    let of_replay = Backward { replay: Some(profile), ..Backward::new(inputs, saved) };
    if profile.scales_queries || model.scales_tiles() != profile.tile_factor.is_some() {
        return None;
    }
    let is_given = [Quantity::P, Quantity::Ds].iter().any(|of| of.is_given(&problem.precision));
    if profile.tile_factor.is_none() && !is_given {
        return Some(whole_backward(problem, &Backward { model: Some(&model), ..of_replay }));
    }
    let (model, rule) = model.replaying_gradients(problem, profile)?;
    let followed = Followed { tiles: tiles.as_ref()?, rule, profile, promotion: model.promotion()? };
    let backward = Backward { model: Some(&model), followed: Some(followed), ..of_replay };
    Some(whole_backward(problem, &backward))
}

/// Returns the range of the largest magnitude of dS, without the softmax's scale, of a subject with this model.
pub fn largest_logit_gradient(problem: &Problem, inputs: &Inputs, saved: &Saved, model: &Model) -> Range {
    let model = model.with_scales(&inputs.scales);
    let (inputs, saved) = (&inputs.into(), &saved.into());
    let backward = Backward { model: Some(&model), ..Backward::new(inputs, saved) };
    let cut = Cut::whole(problem);
    let ranges =
        map(cut.is_large(), cut.groups.clone(), |group| backward.largest_gradient(&group, cut.sides));
    ranges.into_iter().fold(Range::default(), Range::or)
}

/// Returns the gradients of all rows, those of shared keys summed over the sequences.
fn whole_backward(problem: &Problem, backward: &Backward<'_, '_, '_>) -> Answer<Gradients> {
    let mut answer = all_backward(&Cut::whole(problem), backward);
    let model = backward.model.map(|model| model.with_scales(backward.inputs.scales));
    shared::sum(problem, model.as_ref(), &mut answer);
    saturate_gradients(&mut answer.exact, problem, backward.inputs.scales);
    answer
}

fn all_backward(cut: &Cut<'_>, backward: &Backward<'_, '_, '_>) -> Answer<Gradients> {
    let model = &backward.model.map(|model| model.with_scales(backward.inputs.scales));
    let (problem, model) = (cut.problem, model.as_ref());
    let backward = &Backward { model, ..*backward };
    backward.inputs.assert_shapes(problem, Pass::Backward);
    backward.saved.assert_shapes(problem);
    backward.errors.assert_shapes(problem);
    let sinks = if cut.sides.sink { problem.learnable_sinks() } else { 0 };
    let [q, kv] = cut.rows;
    let empty = || Gradients {
        dq: Array3::zeros([q, problem.heads.q, problem.dims.qk]),
        dk: Array3::zeros([kv, problem.heads.kv, problem.dims.qk]),
        dv: Array3::zeros([kv, problem.heads.kv, problem.dims.v]),
        dsink: Array1::zeros(sinks),
    };
    let bound = model.map(|_| Tiers { worst: empty(), dithered: empty() });
    let mut answer = Answer { exact: empty(), bound };
    let mut sums = vec![backward::SinkSum::default(); problem.heads.q];
    let parallel = cut.is_large();
    let work = |group: Group<'_>| backward.group(&group, cut.sides, parallel);
    for held in cut.groups.chunks(GROUPS_HELD) {
        for (group, result) in held.iter().zip(map(parallel, held.to_vec(), work)) {
            result.exact.store(group, &mut answer.exact);
            if let (Some(from), Some(to)) = (&result.bound, &mut answer.bound) {
                from.store(group, to);
            }
            for (head, sink) in result.sinks {
                sums[head].add(&sink);
            }
        }
    }
    for (head, sum) in sums.iter().take(sinks).enumerate() {
        answer.exact.dsink[head] = -sum.value;
        if let (Some(bound), Some(model)) = (&mut answer.bound, model) {
            bound.worst.dsink[head] = model.sink_bound(sum.terms, sum.errors, sum.rows);
            bound.dithered.dsink[head] = f64::INFINITY;
        }
    }
    answer
}
