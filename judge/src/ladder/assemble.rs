//! The way from ranks' results to the problem's. Every real row is taken from the rank that owns it, by the judge's
//! own map. Hidden rows of dq and dk become those at attention.

use std::ops::Range;

use ndarray::{Array1, Array2, Array3, Axis, s};
use seamproof_oracle::amax::Amaxes;
use seamproof_oracle::region::rotated;
use seamproof_oracle::{Pass, Problem, Quantity, Run, Side, TensorName};

use crate::finding::{Check, Finding};
use crate::ladder::runs::whole_case;
use crate::subject::{RankGradients, RankOutputs};
use seamproof_oracle::sharding::{RankLayout, SideLayout, run_of};

/// Returns one set of results in the problem's own layout, in which rows that are not real hold 0. dsink is the sum
/// of the ranks' partial sums. Returns a finding where ranks disagree on what all of them hold.
pub(super) fn assemble(
    problem: &Problem,
    layouts: &[RankLayout],
    ranks: Vec<RankOutputs>,
) -> Result<RankOutputs, Box<Finding>> {
    if problem.parallel.is_whole() {
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
            amax: Amaxes::default(),
        };
        Assembly { problem, whole, dsink: Array1::zeros(problem.learnable_sinks()), ranks: 0 }
    }

    /// Adds the results of the next rank, or returns the finding that it disagrees with the first one.
    pub fn add(&mut self, layout: &RankLayout, rank: &RankOutputs) -> Result<(), Box<Finding>> {
        let (problem, whole) = (self.problem, &mut self.whole);
        place_rows(problem, (layout, Side::Q), &rank.out, &mut whole.out);
        match (&mut whole.lse, &rank.lse) {
            (Some(whole), Some(local)) => {
                let (rows, heads) = (layout.statistics_rows(), layout.statistics_heads(problem.heads.q));
                each_block(problem, (rows, Side::Q), |there, here| {
                    whole.slice_mut(s![heads.clone(), there]).assign(&local.slice(s![.., here]));
                });
            }
            (lse, _) => *lse = None,
        }
        match (&mut whole.gradients, &rank.gradients) {
            (Some(whole), Some(local)) => {
                place_rows(problem, (layout, Side::Q), &local.dq, &mut whole.dq);
                place_rows(problem, (layout, Side::Kv), &local.dk, &mut whole.dk);
                if problem.parallel.region > 1 {
                    rotate_rows(problem, (layout, Side::Q), &mut whole.dq);
                    rotate_rows(problem, (layout, Side::Kv), &mut whole.dk);
                }
                place_rows(problem, (layout, Side::Kv), &local.dv, &mut whole.dv);
                self.dsink.zip_mut_with(&local.dsink, |sum, part| *sum += f64::from(*part));
            }
            (gradients, _) => *gradients = None,
        }
        self.maxima(layout, rank)?;
        self.amaxes(rank)?;
        self.ranks += 1;
        Ok(())
    }

    /// Adds the maxima of the next rank, or returns the finding that they disagree with those of the first rank that
    /// has them: with several ranks, rank 0 or its neighbour in the region.
    fn maxima(&mut self, layout: &RankLayout, rank: &RankOutputs) -> Result<(), Box<Finding>> {
        let (index, region) = (self.ranks, self.problem.parallel.region);
        let heads = layout.statistics_heads(self.problem.heads.q);
        if index == 0 {
            let none = || Array1::from_elem(self.problem.heads.q, f32::NEG_INFINITY);
            self.whole.max_logit = rank.max_logit.as_ref().map(|_| none());
        }
        let (Some(whole), Some(local)) = (&mut self.whole.max_logit, &rank.max_logit) else {
            return if self.whole.max_logit.is_none() { Ok(()) } else { Err(self.other_maximum()) };
        };
        if index < region {
            // The first rank with a head agrees with itself, whatever it holds. A NaN is for the envelope to judge.
            whole.slice_mut(s![heads]).assign(local);
        } else if whole.slice(s![heads]) != local.view() {
            return Err(self.other_maximum());
        }
        Ok(())
    }

    /// Takes the amaxes of the first rank, or returns the finding that those of a later rank are others.
    fn amaxes(&mut self, rank: &RankOutputs) -> Result<(), Box<Finding>> {
        if self.ranks == 0 {
            self.whole.amax = rank.amax;
        }
        let bits = |amax: &Amaxes, quantity| amax.of(quantity).map(f32::to_bits);
        let is_other = |quantity: &Quantity| bits(&self.whole.amax, *quantity) != bits(&rank.amax, *quantity);
        let Some(quantity) = Quantity::ALL.into_iter().find(is_other) else { return Ok(()) };
        let own = self.problem.parallel.world_rank(self.ranks);
        let first = self.problem.parallel.world_rank(0);
        let what = format!("rank {own} holds another amax of {} than rank {first}", quantity.name());
        Err(Box::new(whole_case(Check::Structure, what)))
    }

    fn other_maximum(&self) -> Box<Finding> {
        let [own, first] = [self.ranks, self.ranks % self.problem.parallel.region]
            .map(|place| self.problem.parallel.world_rank(place));
        let what = format!("rank {own} holds another maximum than rank {first}");
        Box::new(Finding { tensor: Some(TensorName::MaxLogit), ..whole_case(Check::Structure, what) })
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
        (Some(whole), Some(local)) => each_block(problem, (layout.side(side), side), |there, here| {
            let (there, here) = (there.start * row..there.end * row, here.start * row..here.end * row);
            whole[there].copy_from_slice(&local[here]);
        }),
        _ => each_block(problem, (layout.side(side), side), |there, here| {
            whole.slice_mut(s![there, .., ..]).assign(&local.slice(s![here, .., ..]));
        }),
    }
}

/// Rotates the real rows of a rank, in their places in the problem's tensor, by their positions.
pub fn rotate_rows(problem: &Problem, (layout, side): (&RankLayout, Side), whole: &mut Array3<f32>) {
    for placed in &layout.side(side).runs {
        let run: Run = run_of(&problem.sequences[placed.sequence], side);
        for position in (0..placed.local.len).map(|i| placed.piece.start + i * placed.piece.step) {
            for mut lanes in whole.index_axis_mut(Axis(0), run.row(position)).outer_iter_mut() {
                let turned = rotated(&lanes.to_vec(), position);
                lanes.iter_mut().zip(turned).for_each(|(lane, value)| *lane = value);
            }
        }
    }
}

/// Calls `visit(rows of the problem, rows of the rank)` for the real rows of a side, in blocks of rows that follow
/// each other in both.
fn each_block(
    problem: &Problem,
    (rows, side): (&SideLayout, Side),
    mut visit: impl FnMut(Range<usize>, Range<usize>),
) {
    for placed in &rows.runs {
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
