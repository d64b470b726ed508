//! The way from ranks' results to the problem's. Every real row is taken from the rank that owns it, by the judge's
//! own map.

use std::ops::Range;

use ndarray::{Array1, Array2, Array3, s};
use seamproof_oracle::{Algorithm, Pass, Problem, Side, TensorName};

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
    let mut assembly = Assembly::new(problem);
    layouts.iter().zip(&ranks).try_for_each(|(layout, rank)| assembly.add(layout, rank))?;
    Ok(assembly.results())
}

/// Results in the problem's own layout, to which one rank after the other is added.
pub struct Assembly<'a> {
    problem: &'a Problem,
    whole: RankOutputs,
    /// Sum of the ranks' dsink. It is kept in f64, so that the sum adds one rounding.
    dsink: Array1<f64>,
    ranks: usize,
}

impl<'a> Assembly<'a> {
    /// Returns the results of no rank: zeros.
    pub fn new(problem: &'a Problem) -> Assembly<'a> {
        let gradients = || RankGradients {
            dq: Array3::zeros(problem.q_shape()),
            dk: Array3::zeros(problem.k_shape()),
            dv: Array3::zeros(problem.v_shape()),
            dsink: Array1::zeros(problem.learnable_sinks()),
        };
        let whole = RankOutputs {
            out: Array3::zeros(problem.out_shape()),
            lse: Some(Array2::zeros(problem.lse_shape())),
            max_logit: None,
            gradients: (problem.pass == Pass::Backward).then(gradients),
        };
        Assembly { problem, whole, dsink: Array1::zeros(problem.learnable_sinks()), ranks: 0 }
    }

    /// Adds the results of the next rank, or returns the finding that it disagrees with the first one.
    pub fn add(&mut self, layout: &RankLayout, rank: &RankOutputs) -> Result<(), Box<Finding>> {
        let (problem, whole) = (self.problem, &mut self.whole);
        place_rows(problem, (layout, Side::Q), &rank.out, &mut whole.out);
        match (&mut whole.lse, &rank.lse) {
            (Some(whole), Some(local)) => each_block(problem, layout, Side::Q, |there, here| {
                whole.slice_mut(s![.., there]).assign(&local.slice(s![.., here]));
            }),
            (lse, _) => *lse = None,
        }
        match (&mut whole.gradients, &rank.gradients) {
            (Some(whole), Some(local)) => {
                place_rows(problem, (layout, Side::Q), &local.dq, &mut whole.dq);
                place_rows(problem, (layout, Side::Kv), &local.dk, &mut whole.dk);
                place_rows(problem, (layout, Side::Kv), &local.dv, &mut whole.dv);
                self.dsink.zip_mut_with(&local.dsink, |sum, part| *sum += f64::from(*part));
            }
            (gradients, _) => *gradients = None,
        }
        let index = self.ranks;
        self.ranks += 1;
        if index == 0 {
            // Rank 0 agrees with itself, whatever it holds. A NaN is for the envelope to judge.
            whole.max_logit.clone_from(&rank.max_logit);
        } else if whole.max_logit.is_some() && rank.max_logit != whole.max_logit {
            let what = format!("rank {index} holds another maximum than rank 0");
            let tensor = Some(TensorName::MaxLogit);
            return Err(Box::new(Finding { tensor, ..whole_case(Check::Structure, what) }));
        }
        Ok(())
    }

    /// Returns the results of the ranks that were added.
    pub fn results(mut self) -> RankOutputs {
        if let Some(gradients) = &mut self.whole.gradients {
            gradients.dsink = self.dsink.mapv(|sum| sum as f32);
        }
        self.whole
    }
}

/// Copies the real rows of a rank's tensor to their places in the problem's.
pub fn place_rows(
    problem: &Problem,
    (layout, side): (&RankLayout, Side),
    local: &Array3<f32>,
    whole: &mut Array3<f32>,
) {
    let row = local.shape()[1] * local.shape()[2];
    match (whole.as_slice_mut(), local.as_slice()) {
        (Some(whole), Some(local)) => each_block(problem, layout, side, |there, here| {
            let (there, here) = (there.start * row..there.end * row, here.start * row..here.end * row);
            whole[there].copy_from_slice(&local[here]);
        }),
        _ => each_block(problem, layout, side, |there, here| {
            whole.slice_mut(s![there, .., ..]).assign(&local.slice(s![here, .., ..]));
        }),
    }
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
