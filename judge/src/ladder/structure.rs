//! Structure: shapes, guard bands, unwritten elements and the padding contract of outputs.

use seamproof_oracle::{Pass, Problem, Run, Side};
use seamproof_simulator::{Damage, is_unwritten};

use super::compare::{ResultTensor, Worst};
use crate::finding::{Check, Finding, Place, number};
use crate::subject::{Backend, ChangedInput, Outputs, PaddingOutputs, RankOutputs, TensorName};
use seamproof_oracle::sharding::{RankLayout, SideLayout};

/// Returns every result of a rank with its name, without those that the subject hides.
pub(crate) fn results(rank: &RankOutputs) -> Vec<(TensorName, ResultTensor<'_, f32>)> {
    let mut results = vec![(TensorName::Out, ResultTensor::Rows(rank.out.view(), Side::Q))];
    results.extend(rank.lse.iter().map(|lse| (TensorName::Lse, ResultTensor::Statistic(lse.view()))));
    results.extend(rank.max_logit.iter().map(|max| (TensorName::MaxLogit, ResultTensor::Heads(max.view()))));
    if let Some(gradients) = &rank.gradients {
        results.push((TensorName::Dq, ResultTensor::Rows(gradients.dq.view(), Side::Q)));
        results.push((TensorName::Dk, ResultTensor::Rows(gradients.dk.view(), Side::Kv)));
        results.push((TensorName::Dv, ResultTensor::Rows(gradients.dv.view(), Side::Kv)));
        results.push((TensorName::Dsink, ResultTensor::Heads(gradients.dsink.view())));
    }
    results
}

/// Returns the first structural fault of a run.
pub(crate) fn check(
    backend: &dyn Backend,
    problem: &Problem,
    layouts: &[RankLayout],
    outputs: &Outputs,
) -> Option<Finding> {
    let contract = backend.declaration().padding.outputs;
    wrong_form(backend, problem, layouts, outputs).or_else(|| {
        on_each_rank(layouts, outputs, |layout, rank| {
            let [q, kv, statistics] = [&layout.q, &layout.kv, layout.statistics_rows()].map(outside);
            results(rank).into_iter().find_map(|(tensor, view)| {
                let (padding, unowned) = match view {
                    ResultTensor::Statistic(_) => &statistics,
                    _ if view.side() == Side::Q => &q,
                    _ => &kv,
                };
                unwritten(layout, tensor, &view)
                    .or_else(|| broken(padding, contract, PADDING_BROKEN, tensor, &view))
                    .or_else(|| broken(unowned, PaddingOutputs::Untouched, UNOWNED_WRITTEN, tensor, &view))
            })
        })
    })
}

/// Returns the first padding row of a rank that is not zero, where a run that is over promised zeros. Nobody knows what
/// its results held before it, so rows that were to be left as they were are not examined.
pub fn padding_of_recorded(
    backend: &dyn Backend,
    layout: &RankLayout,
    rank: &RankOutputs,
) -> Option<Finding> {
    if backend.declaration().padding.outputs != PaddingOutputs::Zero {
        return None;
    }
    let [q, kv, statistics] = [&layout.q, &layout.kv, layout.statistics_rows()].map(|rows| outside(rows).0);
    results(rank).into_iter().find_map(|(tensor, view)| {
        let padding = match view {
            ResultTensor::Statistic(_) => &statistics,
            _ if view.side() == Side::Q => &q,
            _ => &kv,
        };
        broken(padding, PaddingOutputs::Zero, PADDING_BROKEN, tensor, &view)
    })
}

/// Returns the first fault that no row's contents show: ranks, statistics and shapes, what was written outside, and
/// inputs that were changed.
fn wrong_form(
    backend: &dyn Backend,
    problem: &Problem,
    layouts: &[RankLayout],
    outputs: &Outputs,
) -> Option<Finding> {
    if outputs.ranks.len() != layouts.len() {
        let what = format!("{} ranks answered; the problem has {}", outputs.ranks.len(), layouts.len());
        return Some(super::whole_case(Check::Structure, what));
    }
    let statistics = backend.declaration().table.statistics;
    let wrong = on_each_rank(layouts, outputs, |layout, rank| {
        wrong_statistics(&statistics, rank).or_else(|| wrong_shape(problem, layout, rank))
    });
    wrong
        .or_else(|| outputs.damage.first().map(guard_finding))
        .or_else(|| outputs.changed.first().map(|changed| changed_finding(problem, layouts, changed)))
}

/// Returns the first finding of any rank. It names the rank where there are several.
fn on_each_rank(
    layouts: &[RankLayout],
    outputs: &Outputs,
    look: impl Fn(&RankLayout, &RankOutputs) -> Option<Finding>,
) -> Option<Finding> {
    layouts.iter().zip(&outputs.ranks).find_map(|(layout, outputs)| {
        let finding = look(layout, outputs)?;
        Some(match layouts.len() {
            1 => finding,
            _ => Finding { what: format!("on rank {}: {}", layout.rank, finding.what), ..finding },
        })
    })
}

/// Returns the finding about a statistic that is declared but not returned, or returned but not declared.
fn wrong_statistics(declared: &[TensorName], rank: &RankOutputs) -> Option<Finding> {
    let returned = [(TensorName::Lse, rank.lse.is_some()), (TensorName::MaxLogit, rank.max_logit.is_some())];
    let (tensor, is_returned) =
        returned.into_iter().find(|(tensor, returned)| declared.contains(tensor) != *returned)?;
    let what = if is_returned { "is returned, but not declared" } else { "is declared, but not returned" };
    Some(Finding { tensor: Some(tensor), ..super::whole_case(Check::Structure, what.into()) })
}

fn wrong_shape(problem: &Problem, layout: &RankLayout, rank: &RankOutputs) -> Option<Finding> {
    let (q, kv) = (layout.q.rows, layout.kv.rows);
    let (heads, dims) = (problem.heads, problem.dims);
    let [own, statistics] = [layout.statistics_heads(heads.q).len(), layout.statistics_rows().rows];
    let mut shapes = vec![(TensorName::Out, rank.out.shape(), vec![q, heads.q, dims.v])];
    shapes.extend(rank.lse.iter().map(|array| (TensorName::Lse, array.shape(), vec![own, statistics])));
    shapes.extend(rank.max_logit.iter().map(|array| (TensorName::MaxLogit, array.shape(), vec![own])));
    if let Some(gradients) = &rank.gradients {
        shapes.push((TensorName::Dq, gradients.dq.shape(), vec![q, heads.q, dims.qk]));
        shapes.push((TensorName::Dk, gradients.dk.shape(), vec![kv, heads.kv, dims.qk]));
        shapes.push((TensorName::Dv, gradients.dv.shape(), vec![kv, heads.kv, dims.v]));
        shapes.push((TensorName::Dsink, gradients.dsink.shape(), vec![problem.learnable_sinks()]));
    }
    let whole = |tensor, what| Finding { tensor, ..super::whole_case(Check::Structure, what) };
    for (tensor, got, expected) in shapes {
        if got != expected {
            return Some(whole(Some(tensor), format!("has shape {got:?}, not {expected:?}")));
        }
    }
    let asked = problem.pass == Pass::Backward;
    (asked != rank.gradients.is_some()).then(|| {
        let what = if asked { "no gradients came back" } else { "gradients came back from a forward pass" };
        whole(None, what.into())
    })
}

pub(crate) fn guard_finding(damage: &Damage) -> Finding {
    let Damage { tensor, guard, distance, elements } = damage;
    let side = format!("{guard:?}").to_lowercase();
    let what = format!(
        "{elements} elements written outside {tensor}, {distance} elements {side} its edge at nearest"
    );
    super::whole_case(Check::Structure, what)
}

/// Returns the finding about an input that the subject wrote into. The index is one of the problem's own layout, which
/// one rank alone has.
fn changed_finding(problem: &Problem, layouts: &[RankLayout], changed: &ChangedInput) -> Finding {
    let &ChangedInput { tensor, ref first, elements } = changed;
    let place = match (first[..].as_ref(), layouts) {
        (&[row, head, lane], [layout]) => {
            let side = if matches!(tensor, TensorName::K | TensorName::V) { &layout.kv } else { &layout.q };
            let place = place_of_row(side, row);
            Place { head: Some(head), lane: Some(lane), ..place }
        }
        (&[head], _) => Place { head: Some(head), ..Place::default() },
        _ => Place::default(),
    };
    let compared = match tensor {
        TensorName::Q => problem.q_shape().iter().product(),
        TensorName::K => problem.k_shape().iter().product(),
        TensorName::V => problem.v_shape().iter().product(),
        TensorName::Dout => problem.out_shape().iter().product(),
        _ => problem.learnable_sinks(),
    };
    let what = format!("the kernel changed its input {tensor}, here first");
    Finding { place, failed: elements, compared, ..Finding::new(Check::Structure, Some(tensor), what) }
}

fn place_of_row(side: &SideLayout, row: usize) -> Place {
    let of_run = side.runs.iter().find_map(|placed| {
        let i = placed.local.real_rows().position(|real| real == row)?;
        Some((placed.sequence, placed.piece.start + i * placed.piece.step))
    });
    Outside { row, owner: of_run }.place()
}

fn unwritten(layout: &RankLayout, tensor: TensorName, view: &ResultTensor<'_, f32>) -> Option<Finding> {
    let is_written = |lanes: &[f32]| !lanes.iter().fold(false, |any, &value| any | is_unwritten(value));
    if view.flat().is_some_and(|values| view.every_stretch(layout, |at| is_written(&values[at]))) {
        return None;
    }
    let mut worst = Worst::new(Check::Structure, tensor, "a real row was never written");
    view.real(layout, |row, head, place| {
        for (lane, &value) in view.lane(row, head).iter().enumerate() {
            worst.compared();
            if is_unwritten(value) {
                worst.failed(0.0, |finding| finding.place = view.lane_place(place, lane));
            }
        }
    });
    worst.finding()
}

/// Words for an owned row past the real ones.
pub(crate) const PADDING_BROKEN: &str = "a padding row breaks the contract";
/// Words for a row that no sequence owns, which no contract covers.
pub(crate) const UNOWNED_WRITTEN: &str =
    "no sequence owns this row: it was written and must be left as it was";

/// A row that holds no real token.
struct Outside {
    row: usize,
    /// Sequence that owns the row, and the row's position in it; `None` where nobody owns it.
    owner: Option<(usize, usize)>,
}

impl Outside {
    fn place(&self) -> Place {
        let own = |(sequence, position)| Place {
            sequence: Some(sequence),
            row: Some(position),
            ..Place::default()
        };
        self.owner.map_or(Place { row: Some(self.row), ..Place::default() }, own)
    }
}

/// Returns the owned rows of a side past the real ones, and the rows that no sequence owns.
fn outside(side: &SideLayout) -> (Vec<Outside>, Vec<Outside>) {
    let real: usize = side.runs.iter().map(|placed| placed.local.len).sum();
    let mut padding = Vec::with_capacity(side.rows.saturating_sub(real));
    let mut owned = vec![false; side.rows];
    for placed in &side.runs {
        placed.local.real_rows().for_each(|row| owned[row] = true);
        for (i, row) in (placed.local.len..).zip(Run::padding_rows(&placed.local)) {
            owned[row] = true;
            let position = placed.piece.start + i * placed.piece.step;
            padding.push(Outside { row, owner: Some((placed.sequence, position)) });
        }
    }
    let unowned = (0..side.rows).filter(|&row| !owned[row]).map(|row| Outside { row, owner: None });
    (padding, unowned.collect())
}

/// Returns the finding about those of these rows that do not hold what they should.
fn broken(
    rows: &[Outside],
    contract: PaddingOutputs,
    what: &str,
    tensor: TensorName,
    view: &ResultTensor<'_, f32>,
) -> Option<Finding> {
    if matches!(view, ResultTensor::Heads(_)) {
        return None;
    }
    let neutral = if tensor == TensorName::Lse { f32::NEG_INFINITY } else { 0.0 };
    let holds = |got: f32| match contract {
        PaddingOutputs::Zero => got == neutral,
        PaddingOutputs::Untouched => is_unwritten(got),
        PaddingOutputs::Unspecified => true,
    };
    // Each contract has its own comparison, without a choice for each element.
    let row_holds = |outside: &Outside| match contract {
        PaddingOutputs::Zero => view.every_of_row(outside.row, |got| got == neutral),
        PaddingOutputs::Untouched => view.every_of_row(outside.row, is_unwritten),
        PaddingOutputs::Unspecified => true,
    };
    if rows.iter().all(row_holds) {
        return None;
    }
    let mut worst = Worst::new(Check::Structure, tensor, what);
    for outside in rows {
        for head in 0..view.extent().0 {
            for (lane, &got) in view.lane(outside.row, head).iter().enumerate() {
                worst.compared();
                if holds(got) {
                    continue;
                }
                worst.failed(0.0, |finding| {
                    finding.place = view.lane_place(Place { head: Some(head), ..outside.place() }, lane);
                    finding.got = Some(if is_unwritten(got) { "unwritten".into() } else { number(got) });
                    let is_zero = contract == PaddingOutputs::Zero;
                    finding.expected = Some(if is_zero { number(neutral) } else { "untouched".into() });
                });
            }
        }
    }
    worst.finding()
}
