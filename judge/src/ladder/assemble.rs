//! The way from ranks' results to the problem's. Every real row is taken from the rank that owns it, by the judge's
//! own map.

use std::ops::Range;

use ndarray::{Array, Array1, Array2, Array3, s};
use seamproof_oracle::{Algorithm, Problem, Side, TensorName};

use crate::finding::{Check, Finding};
use crate::ladder::runs::whole_case;
use crate::subject::{RankGradients, RankOutputs};
use seamproof_oracle::sharding::{RankLayout, run_of};

/// Returns one set of results in the problem's own layout, in which rows that are not real hold 0. dsink is the sum
/// of the ranks' partial sums. Returns a finding where ranks disagree on what all of them hold.
pub(super) fn assemble(
    problem: &Problem,
    layouts: &[RankLayout],
    ranks: Vec<RankOutputs>,
) -> Result<RankOutputs, Box<Finding>> {
    if problem.parallel.algorithm == Algorithm::Single {
        let nobody = || Box::new(whole_case(Check::Structure, "no rank answered".into()));
        return ranks.into_iter().next().ok_or_else(nobody);
    }
    let rows = |shape: [usize; 3], side: Side, of: fn(&RankOutputs) -> Option<&Array3<f32>>| {
        let mut whole = Array3::zeros(shape);
        for (layout, rank) in layouts.iter().zip(&ranks) {
            let local = of(rank)?;
            let row = shape[1] * shape[2];
            match (whole.as_slice_mut(), local.as_slice()) {
                (Some(whole), Some(local)) => each_block(problem, layout, side, |there, here| {
                    let (there, here) =
                        (there.start * row..there.end * row, here.start * row..here.end * row);
                    whole[there].copy_from_slice(&local[here]);
                }),
                _ => each_block(problem, layout, side, |there, here| {
                    whole.slice_mut(s![there, .., ..]).assign(&local.slice(s![here, .., ..]));
                }),
            }
        }
        Some(whole)
    };
    let out = rows(problem.out_shape(), Side::Q, |rank| Some(&rank.out)).unwrap_or_default();
    let dq = rows(problem.q_shape(), Side::Q, |rank| Some(&rank.gradients.as_ref()?.dq));
    let dk = rows(problem.k_shape(), Side::Kv, |rank| Some(&rank.gradients.as_ref()?.dk));
    let dv = rows(problem.v_shape(), Side::Kv, |rank| Some(&rank.gradients.as_ref()?.dv));
    let gradients = match (dq, dk, dv) {
        (Some(dq), Some(dk), Some(dv)) => {
            Some(RankGradients { dq, dk, dv, dsink: summed_sinks(problem, &ranks) })
        }
        _ => None,
    };
    let max_logit = agreed_max_logit(&ranks)?;
    Ok(RankOutputs { out, lse: assembled_lse(problem, layouts, &ranks), max_logit, gradients })
}

/// Calls `visit(rows of the problem, rows of the rank)` for the real rows of a side, in blocks of rows that follow
/// each other in both.
fn each_block(
    problem: &Problem,
    layout: &RankLayout,
    side: Side,
    mut visit: impl FnMut(Range<usize>, Range<usize>),
) {
    for placed in &layout.side(side).runs {
        let run = run_of(&problem.sequences[placed.sequence], side);
        let follow = run.step == 1 && placed.piece.step == 1 && placed.local.step == 1;
        let size = if follow { placed.local.len.max(1) } else { 1 };
        for i in (0..placed.local.len).step_by(size) {
            let there = run.row(placed.piece.start + i * placed.piece.step);
            let here = placed.local.row(i);
            visit(there..there + size, here..here + size);
        }
    }
}

fn assembled_lse(problem: &Problem, layouts: &[RankLayout], ranks: &[RankOutputs]) -> Option<Array2<f32>> {
    let mut whole = Array2::zeros(problem.lse_shape());
    for (layout, rank) in layouts.iter().zip(ranks) {
        let local = rank.lse.as_ref()?;
        each_block(problem, layout, Side::Q, |there, here| {
            whole.slice_mut(s![.., there]).assign(&local.slice(s![.., here]));
        });
    }
    Some(whole)
}

/// Returns the sum of the ranks' dsink. It is summed in f64 in order of rank, so that the sum adds one rounding.
fn summed_sinks(problem: &Problem, ranks: &[RankOutputs]) -> Array1<f32> {
    let partial = |head: usize| {
        let of_rank = |rank: &RankOutputs| rank.gradients.as_ref().map_or(0.0, |g| f64::from(g.dsink[head]));
        ranks.iter().map(of_rank).sum::<f64>() as f32
    };
    Array::from_shape_fn(problem.learnable_sinks(), partial)
}

/// Returns max_logit, which must be the same on every rank, or the finding that it is not.
fn agreed_max_logit(ranks: &[RankOutputs]) -> Result<Option<Array1<f32>>, Box<Finding>> {
    let Some(first) = ranks.first().and_then(|rank| rank.max_logit.as_ref()) else { return Ok(None) };
    // Rank 0 agrees with itself, whatever it holds. A NaN is for the envelope to judge.
    for (index, rank) in ranks.iter().enumerate().skip(1) {
        if rank.max_logit.as_ref() != Some(first) {
            let what = format!("rank {index} holds another maximum than rank 0");
            let tensor = Some(TensorName::MaxLogit);
            return Err(Box::new(Finding { tensor, ..whole_case(Check::Structure, what) }));
        }
    }
    Ok(Some(first.clone()))
}
