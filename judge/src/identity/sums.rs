//! Bounded identities: known sums, and the same problem on one rank.

use std::cell::LazyCell;

use ndarray::Array3;
use seamproof_oracle::envelope::F32_ROUNDOFF;
use seamproof_oracle::{ContextParallel, Format, ProblemFields, Quantity, Side, Sink, Stored, TensorScales};

use super::bound::{Against, Bounds};
use super::gradients::{self, Runs};
use super::norms::norm;
use super::readers::{Readers, moved_by, seeing};
use super::twin::{Twin, TwinOrigin};
use crate::finding::Relation;
use crate::finding::{Finding, Place};
use crate::ladder::compare::{Worst, lanes, times_bound};
use crate::ladder::evidence::{Evidence, Look};
use crate::subject::{RankGradients, RankOutputs, TensorName};
use seamproof_oracle::sharding::run_of;

/// Collector of elements that are further from their right value than their bound.
pub(super) struct Bounded {
    worst: Worst,
}

impl Bounded {
    pub(super) fn new(relation: Relation, tensor: TensorName, what: &str) -> Bounded {
        Bounded { worst: Worst::of_relation(relation, tensor, what) }
    }

    /// Compares one element. Where nothing is bounded, an infinity also holds.
    pub(super) fn compare(&mut self, place: Place, got: f64, expected: f64, bound: f64) {
        self.worst.compared();
        let error = (got - expected).abs();
        if got == expected || (error == f64::INFINITY && bound == f64::INFINITY) {
            return;
        }
        let ratio = times_bound(error, bound);
        if ratio > 1.0 {
            self.worst.past_bound(place, ratio, [got, expected], Some(bound));
        }
    }

    pub(super) fn finding(self) -> Option<Finding> {
        self.worst.finding()
    }
}

/// Calls `visit(sequence, position, head)` for every real query row of the case.
fn each_query(evidence: &Evidence<'_>, mut visit: impl FnMut(usize, usize, usize)) {
    for (index, sequence) in evidence.problem.sequences.iter().enumerate() {
        for position in 0..sequence.q.len {
            (0..evidence.problem.heads.q).for_each(|head| visit(index, position, head));
        }
    }
}

fn query_place(sequence: usize, row: usize, head: usize) -> Place {
    Place { sequence: Some(sequence), head: Some(head), row: Some(row), lane: None }
}

/// Asks the same problem on one rank. lse and out agree within both errors, and so do dq, dk and dv. A rank's share
/// of dsink is left to the envelope.
pub(super) fn one_rank(evidence: &Evidence<'_>) -> Option<Look> {
    let relation = Relation::OneRank;
    if evidence.problem.parallel.is_whole() {
        return None;
    }
    let mut fields: ProblemFields = evidence.problem.clone().into();
    fields.parallel = ContextParallel::single();
    let twin = Twin::new(evidence, fields, TwinOrigin::same(evidence.problem))?;
    let what = [
        "further from the result of one rank than both roundings explain",
        "further from the gradient of one rank than the errors of both runs explain",
    ];
    within_both(evidence, relation, &twin, what)
}

/// Asks a twin with the problem's own rows: lse and out agree within both errors, and so do dq, dk and dv. `what` says
/// what is wrong with results and with gradients.
pub(super) fn within_both(
    evidence: &Evidence<'_>,
    relation: Relation,
    twin: &Twin,
    what: [&'static str; 2],
) -> Option<Look> {
    within_errors_of([evidence, evidence], relation, twin, what)
}

/// Asks as [`within_both`] does. The subject of the second evidence runs the twin. A twin whose rows had to move,
/// because padding is refused under its algorithm, is not asked.
pub(super) fn within_errors_of(
    [evidence, theirs]: [&Evidence<'_>; 2],
    relation: Relation,
    twin: &Twin,
    what: [&'static str; 2],
) -> Option<Look> {
    if twin.problem.sequences != evidence.problem.sequences {
        evidence.told.outside.set(true);
        return None;
    }
    let answer = match twin.answer(theirs, relation) {
        Ok(answer) => answer,
        Err(look) => return Some(look),
    };
    let here = Bounds::new(evidence, evidence.problem, evidence.inputs);
    let there = Bounds::new(theirs, &twin.problem, &twin.inputs);
    let (mut lse, mut out) =
        (Bounded::new(relation, TensorName::Lse, what[0]), Bounded::new(relation, TensorName::Out, what[0]));
    each_query(evidence, |sequence, position, head| {
        let place = query_place(sequence, position, head);
        let (a, b) = (here.row(sequence, position, head), there.row(sequence, position, head));
        let row = evidence.problem.sequences[sequence].q.row(position);
        if let (Some(got), Some(one)) = (&evidence.first.lse, &answer.lse) {
            lse.compare(place, got[[head, row]].into(), one[[head, row]].into(), a.lse + b.lse);
        }
        for lane in 0..evidence.problem.dims.v {
            let at = [row, head, lane];
            let place = Place { lane: Some(lane), ..place };
            out.compare(place, evidence.first.out[at].into(), answer.out[at].into(), a.out + b.out);
        }
    });
    let gradients = || {
        let (own, one) = (evidence.first.gradients.as_ref()?, answer.gradients.as_ref()?);
        let [_, what] = what;
        let (bounds, against) = ([&here, &there], Against::Exact);
        let floor = gradients::floor(bounds);
        Runs { evidence, relation, what, bounds, kv_heads: 1, against, floor }.compare(own, one)
    };
    Some(lse.finding().or_else(|| out.finding()).or_else(gradients).into())
}

/// Descale of an out near 1, far from both ends of the range of any format.
const OUT_OF_ONES: f32 = 1.0 / 64.0;

/// Asks about values that are all 1. Out is then 1, or what the sink leaves of it, or 0 where no key is seen.
pub(super) fn unit_values(evidence: &Evidence<'_>) -> Option<Look> {
    let relation = Relation::UnitValues;
    let mut twin = Twin::forward_of(evidence)?;
    twin.inputs.v.fill(1.0);
    let scales = &mut twin.inputs.scales;
    scales.v = scales.v.take().map(TensorScales::ones);
    scales.own = scales.own.with(&twin.problem.precision, Quantity::Out, OUT_OF_ONES);
    let answer = match twin.answer(evidence, relation) {
        Ok(answer) => answer,
        Err(look) => return Some(look),
    };
    let problem = evidence.problem;
    if answer.lse.is_none() && problem.softmax.sink != Sink::None {
        return None;
    }
    let bounds = Bounds::new(evidence, &twin.problem, &twin.inputs);
    let mut out = Bounded::new(relation, TensorName::Out, "not what weights that add up to 1 make of ones");
    each_query(evidence, |sequence, position, head| {
        let both = &problem.sequences[sequence];
        let (row, place) = (both.q.row(position), query_place(sequence, position, head));
        let (expected, bound) = if problem.mask.visible(position, both.q.len, both.kv.len).is_empty() {
            (0.0, 0.0)
        } else {
            let error = bounds.row(sequence, position, head);
            let lse = answer.lse.as_ref().map_or(0.0, |lse| f64::from(lse[[head, row]]));
            let mass = problem.sink(head, &twin.inputs.sink).map_or(0.0, |sink| libm::exp(sink - lse));
            let of_sink = if mass == 0.0 { 0.0 } else { mass * libm::expm1(error.lse) };
            (1.0 - mass, error.out + of_sink)
        };
        for lane in 0..problem.dims.v {
            let got = f64::from(answer.out[[row, head, lane]]);
            out.compare(Place { lane: Some(lane), ..place }, got, expected, bound);
        }
    });
    Some(out.finding().into())
}

/// Adds a row of a gradient to the sums of its lanes, and the most that rounding may have moved it to the sums of
/// roundings.
fn add_row(totals: &mut [(f64, f64)], stored: Stored, row: &[f32], floor: f64) {
    // Each arm is compiled for its own format.
    match stored.format {
        Format::Bf16 => add_row_of(totals, row, |value| Stored::from(Format::Bf16).moved(value) + floor),
        Format::Fp16 => add_row_of(totals, row, |value| Stored::from(Format::Fp16).moved(value) + floor),
        _ => add_row_of(totals, row, |value| stored.moved(value) + floor),
    }
}

#[inline(always)]
fn add_row_of(totals: &mut [(f64, f64)], row: &[f32], most: impl Fn(f64) -> f64) {
    for ((total, rounding), &value) in totals.iter_mut().zip(row) {
        let value = f64::from(value);
        *total += value;
        *rounding += most(value);
    }
}

/// Function that returns a number for each lane of a gradient, from the queries that add to it.
type Lanes<'a> = &'a dyn Fn(&Readers<'_>) -> Vec<f64>;

/// Compares, for each sequence and KV head, the sums of a gradient's rows with their right values, lane by lane. The
/// error may be as large as their own roundings and a further bound. That bound is expensive, so it is computed only
/// where roundings do not explain a sum. The largest magnitude that an element may have before it is rounded is
/// expensive as well, and computed only where an element is infinite.
fn sums(
    evidence: &Evidence<'_>,
    (relation, tensor): (Relation, TensorName),
    (gradient, stored, floor): (&Array3<f32>, Stored, f64),
    expected: impl Fn(&Readers<'_>) -> Vec<f64>,
    [bound, largest]: [Lanes<'_>; 2],
) -> Look {
    let problem = evidence.problem;
    let mut worst = Bounded::new(relation, tensor, "the rows do not add up to what they must");
    for (index, sequence) in problem.sequences.iter().enumerate().filter(|(_, s)| s.kv.len > 0) {
        let queries = seeing(evidence, index);
        for head in 0..problem.heads.kv {
            let readers =
                Readers { sequence: index, kv_head: head, queries: &queries, group: problem.group() };
            let expected = expected(&readers);
            let mut totals = vec![(0.0, 0.0); gradient.shape()[2]];
            for row in run_of(sequence, Side::Kv).real_rows() {
                add_row(&mut totals, stored, &lanes(gradient, row, head), floor);
            }
            let near = totals.iter().zip(&expected).all(|((total, r), sum)| (total - sum).abs() <= *r);
            let further = if near { vec![0.0; expected.len()] } else { bound(&readers) };
            let largest = LazyCell::new(|| largest(&readers));
            for (lane, (total, rounding)) in totals.into_iter().enumerate() {
                let of_rows = || {
                    run_of(sequence, Side::Kv).real_rows().map(|row| f64::from(gradient[[row, head, lane]]))
                };
                let infinite = !total.is_finite() && of_rows().all(|value| !value.is_nan());
                let cut = infinite || of_rows().any(|value| stored.is_saturated(value));
                if cut && largest[lane] + further[lane] >= stored.most() {
                    // An infinity in a row may be right, and the sum of two is a NaN, so nothing can be said here. Nor
                    // can it where a row is cut to the largest number.
                    worst.worst.held(1);
                    continue;
                }
                let bound = if expected[lane].abs() + further[lane] >= stored.most() {
                    f64::INFINITY
                } else {
                    further[lane] + rounding * (1.0 + 4.0 * F32_ROUNDOFF)
                };
                let place = Place { sequence: Some(index), head: Some(head), row: None, lane: Some(lane) };
                worst.compare(place, total, expected[lane], bound);
            }
        }
    }
    worst.finding().into()
}

fn gradients<'a>(evidence: &Evidence<'a>) -> Option<(&'a RankGradients, &'a RankOutputs)> {
    evidence.first.gradients.as_ref().map(|gradients| (gradients, evidence.first))
}

/// Asks for the sum of the rows of dv. It is the sum of the rows of dout whose queries see a key, because each
/// query's weights add up to 1 (without a sink).
pub(super) fn sum_of_dv(evidence: &Evidence<'_>) -> Option<Look> {
    let (gradients, _) = gradients(evidence)?;
    if evidence.problem.softmax.sink != Sink::None {
        return None;
    }
    let bounds = Bounds::of_law(evidence)?;
    let dout = |readers: &Readers<'_>, position: usize, head: usize| {
        let row = evidence.problem.sequences[readers.sequence].q.row(position);
        lanes(&bounds.inputs.dout, row, head)
    };
    let expected = |readers: &Readers<'_>| {
        let mut sum = vec![0.0; evidence.problem.dims.v];
        readers.each(|position, head| {
            let dout = dout(readers, position, head);
            sum.iter_mut().zip(&*dout).for_each(|(sum, &dout)| *sum += f64::from(dout));
        });
        sum
    };
    let bound = |readers: &Readers<'_>| {
        let mut bound = vec![0.0; evidence.problem.dims.v];
        readers.each(|position, head| {
            let error = bounds.weights_in_dv(readers.sequence, position, head);
            for (bound, &dout) in bound.iter_mut().zip(&*dout(readers, position, head)) {
                *bound += moved_by(bounds.model.magnitude(dout.into()), error);
            }
        });
        bound
    };
    // No weight is larger than 1.
    let largest = |readers: &Readers<'_>| {
        let mut sum = vec![0.0; evidence.problem.dims.v];
        readers.each(|position, head| {
            let dout = dout(readers, position, head);
            sum.iter_mut().zip(&*dout).for_each(|(sum, &dout)| *sum += f64::from(dout.abs()));
        });
        sum
    };
    let of = (Relation::SumOfDv, TensorName::Dv);
    let results = (&gradients.dv, bounds.model.stored(TensorName::Dv), bounds.gradient_floor());
    Some(sums(evidence, of, results, expected, [&bound, &largest]))
}

/// Asks for the sum of the rows of dk. It is 0, because one vector added to all keys moves every logit of a row alike
/// (without a soft cap or a sink).
pub(super) fn sum_of_dk(evidence: &Evidence<'_>) -> Option<Look> {
    let (gradients, rank) = gradients(evidence)?;
    let problem = evidence.problem;
    if problem.softmax.sink != Sink::None || problem.softmax.softcap.is_some() {
        return None;
    }
    // D of an out that is cut to the largest number is not that of the weights.
    let of_out = evidence.inputs.scales.stored(problem, TensorName::Out);
    if of_out.format.saturates() && rank.out.iter().any(|&out| of_out.is_saturated(out.into())) {
        return None;
    }
    let bounds = Bounds::of_law(evidence)?;
    let inputs = &*bounds.inputs;
    let expected = |_: &Readers<'_>| vec![0.0; problem.dims.qk];
    let bound = |readers: &Readers<'_>| {
        let mut bound = vec![0.0; problem.dims.qk];
        readers.each(|position, head| {
            let row = problem.sequences[readers.sequence].q.row(position);
            let dout = lanes(&inputs.dout, row, head).iter().map(|&x| f64::from(x.abs())).sum();
            let norms = (norm(&inputs.dout, row, head), dout, norm(&rank.out, row, head));
            let residue = bounds.residue_in_dk(readers.sequence, position, head, norms);
            let residue = residue * f64::from(problem.softmax.scale) * (1.0 + 8.0 * F32_ROUNDOFF);
            for (bound, &q) in bound.iter_mut().zip(&*lanes(&inputs.q, row, head)) {
                *bound += moved_by(bounds.model.magnitude(q.into()), residue);
            }
        });
        bound
    };
    // |dS| is at most |dout| · (|v| + |out|), and out is a mean of rows of v.
    let largest = |readers: &Readers<'_>| {
        let keys = run_of(&problem.sequences[readers.sequence], Side::Kv).real_rows();
        let values = keys.map(|row| norm(&inputs.v, row, readers.kv_head)).fold(0.0, f64::max);
        let mut sum = vec![0.0; problem.dims.qk];
        readers.each(|position, head| {
            let row = problem.sequences[readers.sequence].q.row(position);
            let most = f64::from(problem.softmax.scale) * norm(&inputs.dout, row, head) * 2.0 * values;
            for (sum, &q) in sum.iter_mut().zip(&*lanes(&inputs.q, row, head)) {
                *sum += f64::from(q.abs()) * most;
            }
        });
        sum
    };
    let of = (Relation::SumOfDk, TensorName::Dk);
    let results = (&gradients.dk, bounds.model.stored(TensorName::Dk), bounds.gradient_floor());
    Some(sums(evidence, of, results, expected, [&bound, &largest]))
}
