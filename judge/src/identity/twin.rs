//! A twin: another problem with its inputs, whose right answer follows from the answer to the case.

use std::ops::Range;

use ndarray::{Array3, Axis};
use seamproof_oracle::{Algorithm, Inputs, Pass, Problem, ProblemFields, Quantity, Run, Scales, Side};

use super::asked::broken;
use crate::finding::Relation;
use crate::finding::{Finding, Place, number};
use crate::ladder::compare::{ResultTensor, Worst, lanes};
use crate::ladder::evidence::{Evidence, Look};
use crate::ladder::runs::{death, fills, poisoned};
use crate::ladder::structure::results;
use crate::subject::{RankOutputs, RunError, TensorName};
use seamproof_oracle::sharding::{self as layout, RankLayout, run_of};

/// Origin of the rows and heads of a twin.
#[derive(Clone, Debug)]
pub(super) struct TwinOrigin {
    /// Problem's own sequence for each sequence of the twin; `None` for one that the twin made up.
    pub(super) sequences: Vec<Option<usize>>,
    /// Position in the problem's own sequence of the first query, for each sequence of the twin.
    pub(super) skip: Vec<usize>,
    /// Problem's own query head for each query head of the twin.
    pub(super) q_heads: Vec<usize>,
    /// Problem's own KV head for each KV head of the twin.
    pub(super) kv_heads: Vec<usize>,
}

impl TwinOrigin {
    /// Returns a source that leaves everything where it was.
    pub(super) fn same(problem: &Problem) -> TwinOrigin {
        TwinOrigin {
            sequences: (0..problem.sequences.len()).map(Some).collect(),
            skip: vec![0; problem.sequences.len()],
            q_heads: (0..problem.heads.q).collect(),
            kv_heads: (0..problem.heads.kv).collect(),
        }
    }

    /// Returns a source with other sequences that leaves everything else where it was.
    pub(super) fn sequences(problem: &Problem, sequences: Vec<Option<usize>>) -> TwinOrigin {
        TwinOrigin { skip: vec![0; sequences.len()], sequences, ..TwinOrigin::same(problem) }
    }

    /// Returns the problem's own sequence and position of a row of the twin.
    fn row(&self, side: Side, sequence: usize, position: usize) -> Option<(usize, usize)> {
        let skip = if side == Side::Q { self.skip[sequence] } else { 0 };
        Some((self.sequences[sequence]?, position + skip))
    }

    fn heads(&self, side: Side) -> &[usize] {
        if side == Side::Q { &self.q_heads } else { &self.kv_heads }
    }
}

/// A claim: this tensor of the twin is the problem's own times a factor, element by element.
#[derive(Clone, Copy, Debug)]
pub(super) struct Claim {
    pub(super) tensor: TensorName,
    pub(super) factor: f32,
}

impl Claim {
    #[inline]
    fn agrees(self, got: f32, own: f32) -> bool {
        (got == self.factor * own) | (got.is_nan() & (self.factor * own).is_nan())
    }

    /// Whether the claim holds for each of some elements.
    fn holds(self, theirs: &[f32], ours: &[f32]) -> bool {
        theirs.iter().zip(ours).fold(true, |all, (&got, &own)| all & self.agrees(got, own))
    }
}

/// Function that says whether a row of the problem is asked about, from its side, sequence and position.
pub(super) type Asked<'a> = dyn Fn(Side, usize, usize) -> bool + 'a;

/// Returns claims that these tensors are the same.
pub(super) fn same(tensors: &[TensorName]) -> Vec<Claim> {
    tensors.iter().map(|&tensor| Claim { tensor, factor: 1.0 }).collect()
}

/// Returns out, lse and max_logit; with `gradients`, dq, dk and dv as well.
pub(super) fn results_of(gradients: bool) -> Vec<TensorName> {
    use TensorName::{Dk, Dq, Dv, Lse, MaxLogit, Out};
    if gradients { vec![Out, Lse, MaxLogit, Dq, Dk, Dv] } else { vec![Out, Lse, MaxLogit] }
}

/// Returns every result. The gradients, dsink among them, are included only where they have the same bits on every
/// run.
pub(super) fn everything(evidence: &Evidence<'_>) -> Vec<TensorName> {
    let deterministic = evidence.backend.declaration().promises.deterministic_backward;
    let mut tensors = results_of(deterministic);
    tensors.extend(deterministic.then_some(TensorName::Dsink));
    tensors
}

/// Another problem with inputs, and the origin of its rows.
pub(super) struct Twin {
    pub(super) problem: Problem,
    pub(super) inputs: Inputs,
    pub(super) source: TwinOrigin,
}

impl Twin {
    /// Multiplies the given descales of some quantities that a kernel quantises.
    pub(super) fn times_own(&mut self, quantities: &[Quantity], factor: f32) {
        let scales = &mut self.inputs.scales;
        scales.own = scales.own.times(&self.problem.precision, quantities, factor);
    }

    /// Returns the twin of these fields with the problem's own values; `None` where the subject does not take it. Its
    /// sequences keep their pages and the keys that they share, unless the fields have none.
    pub(super) fn new(
        evidence: &Evidence<'_>,
        mut fields: ProblemFields,
        source: TwinOrigin,
    ) -> Option<Twin> {
        let paged = fields.pages.take();
        fields.pages = paged.map(|pages| pages.fitted(&evidence.problem.sequences, &fields));
        fields.sharing = fields.sharing.fitted(&evidence.problem.sequences, &fields.sequences);
        let problem = inside(evidence, Problem::new(fields.sayable()).ok()?)?;
        if problem.elements() > evidence.judge.elements_max {
            return None;
        }
        let inputs = evidence.making(|| gather(evidence.problem, evidence.inputs, &problem, &source));
        Some(Twin { problem, inputs, source })
    }

    /// Returns a twin that is the problem itself, for other inputs.
    pub(super) fn of(evidence: &Evidence<'_>) -> Twin {
        let (problem, inputs) = (evidence.problem.clone(), evidence.making(|| evidence.inputs.clone()));
        Twin { source: TwinOrigin::same(&problem), problem, inputs }
    }

    /// Returns a twin that is the problem itself without the backward, for other inputs.
    pub(super) fn forward_of(evidence: &Evidence<'_>) -> Option<Twin> {
        let mut fields: ProblemFields = evidence.problem.clone().into();
        fields.pass = Pass::Forward;
        let source = TwinOrigin::same(evidence.problem);
        Twin::new(evidence, fields, source)
    }

    /// Returns the subject's answer in the twin's own layout, with poisoned padding; otherwise what is wrong with it.
    pub(super) fn answer(&self, evidence: &Evidence<'_>, relation: Relation) -> Result<RankOutputs, Look> {
        let wrong =
            |what: String| Look::from(Some(broken(relation, None, format!("in the second run: {what}"))));
        // Sequences with other values of their own share no page, and no keys.
        let apart = !self.problem.shares_equal_rows(&self.inputs);
        let apart = apart.then(|| self.problem.without_pages().unshared());
        let problem = apart.as_ref().unwrap_or(&self.problem);
        let [fill, _] = fills(evidence.backend, problem);
        let inputs = evidence.making(|| poisoned(&self.inputs, problem, fill));
        let outputs = match evidence.run(problem, &inputs) {
            Ok(outputs) => outputs,
            Err(RunError::Infrastructure(what)) => return Err(Look::Failed(what)),
            Err(error @ RunError::OutOfMemory(_)) => return Err(Look::Failed(error.to_string())),
            // A process that ended, or an error that was raised, is a failure of its own, whoever asked for the run.
            Err(error @ (RunError::Ended(_) | RunError::Sentinel(_) | RunError::Crash(_))) => {
                let finding = death(error);
                let what = format!("in the second run of {relation}: {}", finding.what);
                return Err(Look::Broken(Box::new(Finding { what, ..finding })));
            }
            Err(error) => return Err(wrong(error.to_string())),
        };
        let judge = evidence.judge;
        let layouts = (judge.layouts)(problem).map_err(|error| Look::Failed(error.to_string()))?;
        if let Some(finding) = (judge.structure)(evidence.backend, problem, &layouts, &outputs) {
            return Err(wrong(finding.to_string()));
        }
        (judge.assemble)(problem, &layouts, outputs.ranks).map_err(|finding| wrong(finding.to_string()))
    }

    /// Asks the subject, and compares its answer with the claims on every row.
    pub(super) fn agrees(&self, evidence: &Evidence<'_>, relation: Relation, claims: &[Claim]) -> Look {
        match self.answer(evidence, relation) {
            Ok(answer) => self.compare(evidence, relation, &answer, claims, None).into(),
            Err(look) => look,
        }
    }

    /// Returns the first claim that does not hold, on the problem's rows for which
    /// `asked(side, sequence, position)` is true, or on all rows.
    pub(super) fn compare(
        &self,
        evidence: &Evidence<'_>,
        relation: Relation,
        answer: &RankOutputs,
        claims: &[Claim],
        asked: Option<&Asked<'_>>,
    ) -> Option<Finding> {
        let layout = layout::whole(&self.problem);
        let own = results(evidence.first);
        results(answer).into_iter().find_map(|(tensor, there)| {
            let claim = claims.iter().find(|claim| claim.tensor == tensor)?;
            let (_, here) = own.iter().find(|(name, _)| *name == tensor)?;
            self.tensor(evidence, relation, *claim, (*here, there, &layout), asked)
        })
    }

    /// Whether the claim holds everywhere. As many rows are compared at once as lie together in both tensors. The
    /// answer is false where it is not known, as where heads changed places.
    fn every_stretch(
        &self,
        evidence: &Evidence<'_>,
        claim: Claim,
        (here, there, layout): (ResultTensor<'_, f32>, ResultTensor<'_, f32>, &RankLayout),
    ) -> bool {
        let (Some(ours), Some(theirs)) = (here.flat(), there.flat()) else { return false };
        let side = here.side();
        let in_place = |heads: &[usize]| heads.iter().enumerate().all(|(to, from)| to == *from);
        if matches!(here, ResultTensor::Heads(_))
            || here.extent() != there.extent()
            || !(in_place(&self.source.q_heads) && in_place(&self.source.kv_heads))
        {
            return false;
        }
        layout.side(side).runs.iter().all(|placed| {
            let to = placed.local;
            let Some((own, skip)) = self.source.row(side, placed.sequence, 0) else { return true };
            let from = run_of(&evidence.problem.sequences[own], side);
            let rows = if to.step == 1 && from.step == 1 { to.len.max(1) } else { 1 };
            (0..to.len).step_by(rows).all(|i| {
                let both = ranges(there, to.row(i), rows).zip(ranges(here, from.row(skip + i), rows));
                { both }.all(|(to, from)| claim.holds(&theirs[to], &ours[from]))
            })
        })
    }

    fn tensor(
        &self,
        evidence: &Evidence<'_>,
        relation: Relation,
        claim: Claim,
        (here, there, layout): (ResultTensor<'_, f32>, ResultTensor<'_, f32>, &RankLayout),
        asked: Option<&Asked<'_>>,
    ) -> Option<Finding> {
        if asked.is_none() && self.every_stretch(evidence, claim, (here, there, layout)) {
            return None;
        }
        let side = here.side();
        let kv = matches!(claim.tensor, TensorName::Dk | TensorName::Dv);
        let heads = self.source.heads(if kv { Side::Kv } else { Side::Q });
        let what = "a second run's result (got) is not what follows from the case's own (expected)";
        let mut worst = Worst::of_relation(relation, claim.tensor, what);
        there.real(layout, |row, head, place| {
            let mut own = Place { head: Some(heads[head]), ..Place::default() };
            let mut own_row = 0;
            if let (Some(sequence), Some(position)) = (place.sequence, place.row) {
                let Some((sequence, position)) = self.source.row(side, sequence, position) else { return };
                if asked.is_some_and(|asked| !asked(side, sequence, position)) {
                    return;
                }
                own = Place { sequence: Some(sequence), row: Some(position), ..own };
                own_row = run_of(&evidence.problem.sequences[sequence], side).row(position);
            }
            let (theirs, ours) = (there.lane(row, head), here.lane(own_row, heads[head]));
            if let (Some(theirs), Some(ours)) = (theirs.to_slice(), ours.to_slice())
                && claim.holds(theirs, ours)
            {
                worst.held(theirs.len());
                return;
            }
            for (lane, (&got, &own_value)) in theirs.into_iter().zip(ours).enumerate() {
                let expected = claim.factor * own_value;
                worst.compared();
                if !claim.agrees(got, own_value) {
                    worst.failed(0.0, |finding| {
                        finding.place = here.lane_place(own, lane);
                        finding.got = Some(number(got));
                        finding.expected = Some(number(expected));
                    });
                }
            }
        });
        worst.finding()
    }
}

/// Returns the twin's problem, or the nearest one that the subject takes, where the relation survives that. Otherwise
/// notes that the identity cannot be asked.
fn inside(evidence: &Evidence<'_>, problem: Problem) -> Option<Problem> {
    let table = evidence.backend.declaration().table;
    if table.refusal(&problem).is_none() {
        return Some(problem);
    }
    let fitted = table.fitted(problem.clone());
    let survives = only_rows_moved(&problem, &fitted) && fitted != *evidence.problem;
    if !survives {
        evidence.told.outside.set(true);
    }
    survives.then_some(fitted)
}

/// Whether two problems differ in nothing but the places of their rows. On several ranks a sequence's cut follows from
/// its span, which stays then.
fn only_rows_moved(one: &Problem, other: &Problem) -> bool {
    let cut = one.parallel.algorithm != Algorithm::Single;
    let same_run = |a: Run, b: Run| a.len == b.len && (!cut || a.span == b.span);
    let mut pairs = one.sequences.iter().zip(&other.sequences);
    let placed = ProblemFields {
        sequences: other.sequences.clone(),
        rows: other.rows,
        ..ProblemFields::from(one.clone())
    };
    one.sequences.len() == other.sequences.len()
        && pairs.all(|(a, b)| a.id == b.id && same_run(a.q, b.q) && same_run(a.kv, b.kv))
        && placed == ProblemFields::from(other.clone())
}

/// Returns the elements of consecutive rows of a tensor, as ranges of [`ResultTensor::flat`].
fn ranges(view: ResultTensor<'_, f32>, row: usize, rows: usize) -> impl Iterator<Item = Range<usize>> {
    let (heads, dim) = view.extent();
    let (count, first, step, size) = match view {
        ResultTensor::Statistic(array) => (heads, row, array.shape()[1], rows),
        _ => (1, row * heads * dim, 0, rows * heads * dim),
    };
    (0..count).map(move |i| first + i * step..first + i * step + size)
}

/// Returns the twin's inputs, copied from the problem's.
fn gather(base: &Problem, inputs: &Inputs, twin: &Problem, source: &TwinOrigin) -> Inputs {
    let copy = |from: &Array3<f32>, side: Side, shape: [usize; 3]| {
        let mut to = Array3::zeros(shape);
        for (index, sequence) in twin.sequences.iter().enumerate() {
            for (position, row) in run_of(sequence, side).real_rows().enumerate() {
                let Some((own, position)) = source.row(side, index, position) else { continue };
                let own = run_of(&base.sequences[own], side).row(position);
                let mut to = to.index_axis_mut(Axis(0), row);
                for (mut to, &from_head) in to.outer_iter_mut().zip(source.heads(side)) {
                    to.iter_mut().zip(&*lanes(from, own, from_head)).for_each(|(to, from)| *to = *from);
                }
            }
        }
        to
    };
    Inputs {
        q: copy(&inputs.q, Side::Q, twin.q_shape()),
        k: copy(&inputs.k, Side::Kv, twin.k_shape()),
        v: copy(&inputs.v, Side::Kv, twin.v_shape()),
        dout: match twin.pass {
            Pass::Forward => Array3::zeros([0, twin.heads.q, twin.dims.v]),
            Pass::Backward => copy(&inputs.dout, Side::Q, twin.out_shape()),
        },
        sink: if inputs.sink.is_empty() {
            inputs.sink.clone()
        } else {
            source.q_heads.iter().map(|&head| inputs.sink[head]).collect()
        },
        scales: scales(&inputs.scales, twin, source),
    }
}

/// Returns the twin's descales: each is that of the problem's own element from which one of its elements comes. A
/// sequence that the twin made up has no element of the problem, and its descales are 1. What a kernel quantises has the
/// problem's own.
fn scales(own: &Scales, twin: &Problem, source: &TwinOrigin) -> Scales {
    let of_inputs = Scales::new(twin, |tensor, groups, place| {
        let (sequence, [position, head, lane]) = groups.element(place);
        let side = tensor.side();
        let from = match sequence {
            Some(sequence) => source.row(side, sequence, position),
            None => Some((0, position)),
        };
        let own = own.of(tensor).zip(from);
        own.map_or(1.0, |(scales, (sequence, position))| {
            scales.of(sequence, position, source.heads(side)[head], lane) as f32
        })
    });
    of_inputs.with_own(own.own)
}
