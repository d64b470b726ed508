//! Identities of the mask: the same visible keys in another form, a window one key narrower, a prefix of the
//! sequence.

use seamproof_oracle::{Algorithm, Alignment, Mask, Problem, ProblemFields, Side, TensorName};

use super::asked::pick;
use super::bound::{Bounds, moved_lse};
use super::sums::Bounded;
use super::twin::{Twin, TwinOrigin, everything, same};
use crate::finding::Relation;
use crate::finding::{Finding, Place};
use crate::ladder::evidence::{Evidence, Look};

/// Whether every query of the problem sees the same keys under both masks.
fn same_sight(problem: &Problem, a: &Mask, b: &Mask) -> bool {
    problem.sequences.iter().all(|sequence| {
        let (lq, lk) = (sequence.q.len, sequence.kv.len);
        (0..lq).all(|i| a.visible(i, lq, lk) == b.visible(i, lq, lk))
    })
}

fn with_mask(evidence: &Evidence<'_>, mask: Mask) -> Option<Twin> {
    let mut fields: ProblemFields = evidence.problem.clone().into();
    fields.mask = mask;
    Twin::new(evidence, fields, TwinOrigin::same(evidence.problem))
}

/// Asks for all results under another form of the same visible keys: the first that the subject takes.
fn agrees(
    evidence: &Evidence<'_>,
    relation: Relation,
    forms: impl IntoIterator<Item = Mask>,
) -> Option<Look> {
    let twin = forms.into_iter().find_map(|mask| with_mask(evidence, mask))?;
    Some(twin.agrees(evidence, relation, &same(&everything(evidence))))
}

/// Asks the same problem with each absent window bound at the distance of the longest sequence or more; with one of
/// them alone where the subject does not take both.
pub(super) fn wide_window(evidence: &Evidence<'_>) -> Option<Look> {
    let mask = evidence.problem.mask;
    if mask.left.is_some() && mask.right.is_some() {
        return None;
    }
    let longest = evidence.problem.sequences.iter().map(|s| s.q.len + s.kv.len).max()?;
    let far = u32::try_from(longest).ok()?;
    let (left, right) = (mask.left.or(Some(far)), mask.right.or(Some(far)));
    let wide = [Mask { left, right, ..mask }, Mask { left, ..mask }, Mask { right, ..mask }];
    agrees(evidence, Relation::WideWindow, wide.into_iter().filter(|wide| *wide != mask))
}

/// Asks the first other form of the same visible keys: without a bound that hides nothing, from the other corner, or
/// without sink tokens that the window does not hide.
pub(super) fn other_form(evidence: &Evidence<'_>) -> Option<Look> {
    let (problem, mask) = (evidence.problem, evidence.problem.mask);
    let align = match mask.align {
        Alignment::TopLeft => Alignment::BottomRight,
        Alignment::BottomRight => Alignment::TopLeft,
    };
    let bare = Mask { sink_tokens: 0, ..mask };
    let forms = [Mask { left: None, ..mask }, Mask { right: None, ..mask }, Mask { align, ..mask }, bare];
    let same = forms.into_iter().filter(|form| *form != mask && same_sight(problem, form, &mask));
    agrees(evidence, Relation::MaskForm, same)
}

/// Returns the mask with one key less on one side; `None` where no query would see less.
fn narrower(problem: &Problem) -> Option<Mask> {
    let mask = problem.mask;
    let tighter = match (mask.left, mask.right) {
        (Some(left), _) if left > 0 => Mask { left: Some(left - 1), ..mask },
        (_, Some(right)) if right > 0 => Mask { right: Some(right - 1), ..mask },
        (Some(_), _) => return None,
        (None, _) => Mask { left: Some(reach(problem)?.checked_sub(1)?), ..mask },
    };
    (!same_sight(problem, &tighter, &mask)).then_some(tighter)
}

/// Returns the largest distance to the left of its diagonal at which any query sees a key.
fn reach(problem: &Problem) -> Option<u32> {
    let reaches = problem.sequences.iter().flat_map(|sequence| {
        let (lq, lk) = (sequence.q.len, sequence.kv.len);
        let shift = problem.mask.shift(lq, lk);
        let seen =
            (0..lq).map(move |i| (i, problem.mask.visible(i, lq, lk))).filter(|(_, keys)| !keys.is_empty());
        seen.map(move |(i, keys)| i as i64 + shift - keys.hull().start as i64)
    });
    u32::try_from(reaches.max()?).ok()
}

/// Queries of each sequence that see less under the narrower mask, and keys that any of them saw.
struct Touched {
    queries: Vec<Vec<bool>>,
    keys: Vec<Vec<bool>>,
}

impl Touched {
    fn new(problem: &Problem, narrow: &Mask) -> Touched {
        let mut touched = Touched { queries: Vec::new(), keys: Vec::new() };
        for sequence in &problem.sequences {
            let (lq, lk) = (sequence.q.len, sequence.kv.len);
            let changes = |i: &usize| problem.mask.visible(*i, lq, lk) != narrow.visible(*i, lq, lk);
            // The edges are the starts and ends of the intervals that touched queries saw.
            let mut edges = vec![0i64; lk + 1];
            for keys in (0..lq).filter(changes).flat_map(|i| problem.mask.visible(i, lq, lk).parts()) {
                edges[keys.start] += 1;
                edges[keys.end] -= 1;
            }
            let mut open = 0;
            let covered = edges[..lk].iter().map(|edge| {
                open += edge;
                open > 0
            });
            touched.keys.push(covered.collect());
            touched.queries.push((0..lq).map(|i| changes(&i)).collect());
        }
        touched
    }

    fn at(&self, side: Side, sequence: usize, position: usize) -> bool {
        match side {
            Side::Q => self.queries[sequence][position],
            Side::Kv => self.keys[sequence][position],
        }
    }
}

/// Asks about a window one key narrower. The rows that see what they saw keep their bits; those that lose a key lose
/// its weight.
pub(super) fn narrower_window(evidence: &Evidence<'_>) -> Option<Look> {
    use TensorName::{Dk, Dq, Dv, Lse, Out};
    let relation = Relation::NarrowerWindow;
    let mask = narrower(evidence.problem)?;
    let twin = with_mask(evidence, mask)?;
    let answer = match twin.answer(evidence, relation) {
        Ok(answer) => answer,
        Err(look) => return Some(look),
    };
    let touched = Touched::new(evidence.problem, &mask);
    let gradients = evidence.backend.declaration().promises.deterministic_backward;
    let tensors = if gradients { vec![Out, Lse, Dq, Dk, Dv] } else { vec![Out, Lse] };
    let kept = |side, sequence, position| !touched.at(side, sequence, position);
    let changed = twin.compare(evidence, relation, &answer, &same(&tensors), Some(&kept));
    let lse = || lost_weights(evidence, &twin, answer.lse.as_ref()?, &touched);
    Some(changed.or_else(lse).into())
}

/// Checks that the LSE of each touched row is lower by the weight of the keys that it lost.
fn lost_weights(
    evidence: &Evidence<'_>,
    twin: &Twin,
    after: &ndarray::Array2<f32>,
    touched: &Touched,
) -> Option<Finding> {
    let (problem, before) = (evidence.problem, evidence.first.lse.as_ref()?);
    let here = Bounds::new(evidence, problem, evidence.inputs);
    let there = Bounds::new(evidence, &twin.problem, &twin.inputs);
    let what = "a window one key narrower does not take that key's weight from the row";
    let mut worst = Bounded::new(Relation::NarrowerWindow, TensorName::Lse, what);
    for (index, sequence) in problem.sequences.iter().enumerate() {
        let (lq, lk) = (sequence.q.len, sequence.kv.len);
        for i in (0..lq).filter(|&i| touched.queries[index][i]) {
            let left = twin.problem.mask.visible(i, lq, lk);
            let lost: Vec<usize> =
                problem.mask.visible(i, lq, lk).filter(|key| !left.contains(key)).collect();
            for head in 0..problem.heads.q {
                let row = sequence.q.row(i);
                let lse = f64::from(before[[head, row]]);
                let weight = |key: &usize| libm::exp(here.logit(index, i, *key, head).0 - lse);
                let share = -lost.iter().map(weight).sum::<f64>();
                let (a, b) = (here.row(index, i, head).lse, there.row(index, i, head).lse);
                let place = Place { sequence: Some(index), head: Some(head), row: Some(i), lane: None };
                if let Some((moved, error)) = moved_lse(share, a) {
                    let got = f64::from(after[[head, row]]);
                    worst.compare(place, got, lse + moved, a + b + error);
                }
            }
        }
    }
    worst.finding()
}

/// Asks the first queries with the keys that they can see, or, where the diagonal ends in the corner, the last
/// queries with all keys. The out, lse and dq of these rows are those of the whole problem.
pub(super) fn prefix(evidence: &Evidence<'_>) -> Option<Look> {
    let problem = evidence.problem;
    let longest =
        problem.sequences.iter().map(|sequence| sequence.q.len).max().filter(|&longest| longest > 1)?;
    let kept = 1 + pick(evidence, Relation::Prefix, longest - 1);
    let mut fields: ProblemFields = problem.clone().into();
    let mut source = TwinOrigin::same(problem);
    match problem.mask.align {
        Alignment::TopLeft => {
            for sequence in &mut fields.sequences {
                let (lq, lk) = (sequence.q.len, sequence.kv.len);
                sequence.q.len = lq.min(kept);
                sequence.kv.len = problem.mask.sight(lq, lk).end(kept - 1);
            }
        }
        // The rows move to the front of their span. This form is not asked on several ranks, which cut the span.
        Alignment::BottomRight if problem.parallel.algorithm == Algorithm::Single => {
            for (sequence, skip) in fields.sequences.iter_mut().zip(&mut source.skip) {
                *skip = sequence.q.len.saturating_sub(kept);
                sequence.q.len -= *skip;
            }
        }
        Alignment::BottomRight => return None,
    }
    let mut tensors = vec![TensorName::Out, TensorName::Lse];
    tensors.extend(evidence.backend.declaration().promises.deterministic_backward.then_some(TensorName::Dq));
    let twin = Twin::new(evidence, fields, source)?;
    Some(twin.agrees(evidence, Relation::Prefix, &same(&tensors)))
}
