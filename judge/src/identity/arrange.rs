//! Identities of memory and metadata: the place of rows, the rows between them, and the other sequences in the batch.
//!
//! On several ranks a sequence's cut follows from its span, so the spans stay as they are there. The rows put between
//! sequences are a multiple of the CP size.

use seamproof_oracle::{Algorithm, Problem, ProblemFields, Run, Sequence, TensorName, TensorRows};

use super::asked::pick;
use super::twin::{Claim, Twin, TwinOrigin, results_of, same};
use crate::finding::Relation;
use crate::ladder::evidence::{Evidence, Look};

/// Arrangement of the sequences in a tensor.
struct ExactPlan {
    /// Number of rows before the first sequence; `gap` counts those between two, and `slack` those after the last.
    first: usize,
    gap: usize,
    slack: usize,
    /// Function that returns the new span of a run.
    span: fn(&Run) -> usize,
}

/// Arrangement without rows that nobody owns, with spans as they are.
const DENSE: ExactPlan = ExactPlan { first: 0, gap: 0, slack: 0, span: |run| run.span };

impl ExactPlan {
    /// Places the sequences one after the other in memory, in the order of the list.
    fn place(&self, sequences: &mut [&mut Sequence]) -> TensorRows {
        let mut next = [self.first; 2];
        for sequence in sequences {
            for (run, next) in [&mut sequence.q, &mut sequence.kv].into_iter().zip(&mut next) {
                let span = (self.span)(run);
                *run = Run::packed(*next, run.len, span);
                *next += span + self.gap;
            }
        }
        TensorRows { q: next[0] + self.slack, kv: next[1] + self.slack }
    }

    fn place_all(&self, fields: &mut ProblemFields) {
        let mut sequences: Vec<&mut Sequence> = fields.sequences.iter_mut().collect();
        fields.rows = self.place(&mut sequences);
    }
}

fn fields(evidence: &Evidence<'_>) -> ProblemFields {
    evidence.problem.clone().into()
}

/// Returns claims about out and the statistics, and about the gradients where the subject promises their bits. dsink
/// is left out, since it is a sum over sequences whose order may change.
fn claims(evidence: &Evidence<'_>) -> Vec<Claim> {
    same(&results_of(evidence.backend.declaration().promises.deterministic_backward))
}

fn agrees(
    evidence: &Evidence<'_>,
    relation: Relation,
    fields: ProblemFields,
    source: TwinOrigin,
) -> Option<Look> {
    let twin = Twin::new(evidence, fields, source)?;
    Some(twin.agrees(evidence, relation, &claims(evidence)))
}

/// Asks the same sequences without their padding, or with padding where they have none.
pub(super) fn padding_amount(evidence: &Evidence<'_>) -> Option<Look> {
    let problem = evidence.problem;
    if problem.parallel.algorithm != Algorithm::Single {
        return None;
    }
    let mut fields = fields(evidence);
    let span = |run: &Run| if run.span > run.len { run.len } else { run.span + 3 };
    ExactPlan { span, ..DENSE }.place_all(&mut fields);
    agrees(evidence, Relation::PaddingAmount, fields, TwinOrigin::same(problem))
}

/// Asks the same sequences in the opposite order in memory, behind a first offset, with gaps and slack.
pub(super) fn placement(evidence: &Evidence<'_>) -> Option<Look> {
    let unit = evidence.problem.parallel.size();
    let mut fields = fields(evidence);
    let mut sequences: Vec<&mut Sequence> = fields.sequences.iter_mut().rev().collect();
    let rows = ExactPlan { first: unit, gap: 2 * unit, slack: unit, ..DENSE }.place(&mut sequences);
    fields.rows = rows;
    agrees(evidence, Relation::Placement, fields, TwinOrigin::same(evidence.problem))
}

/// Asks the same sequences in the opposite order.
pub(super) fn order(evidence: &Evidence<'_>) -> Option<Look> {
    let mut fields = fields(evidence);
    let count = fields.sequences.len();
    fields.sequences.reverse();
    DENSE.place_all(&mut fields);
    let source = TwinOrigin::sequences(evidence.problem, (0..count).rev().map(Some).collect());
    (count > 1).then(|| agrees(evidence, Relation::SequenceOrder, fields, source))?
}

/// Asks one sequence by itself.
pub(super) fn alone(evidence: &Evidence<'_>) -> Option<Look> {
    use TensorName::{Dk, Dq, Dv, Lse, Out};
    let mut fields = fields(evidence);
    let count = fields.sequences.len();
    if count < 2 {
        return None;
    }
    let chosen = pick(evidence, Relation::Alone, count);
    fields.sequences = vec![fields.sequences[chosen]];
    DENSE.place_all(&mut fields);
    let twin = Twin::new(evidence, fields, TwinOrigin::sequences(evidence.problem, vec![Some(chosen)]))?;
    let gradients = evidence.backend.declaration().promises.deterministic_backward;
    let tensors = if gradients { vec![Out, Lse, Dq, Dk, Dv] } else { vec![Out, Lse] };
    Some(twin.agrees(evidence, Relation::Alone, &same(&tensors)))
}

/// Returns the ids that no sequence has.
fn free_ids(problem: &Problem) -> impl Iterator<Item = u32> {
    let taken: std::collections::HashSet<u32> =
        problem.sequences.iter().map(|sequence| sequence.id).collect();
    (0..=u32::MAX).filter(move |id| !taken.contains(id))
}

/// Asks the same sequences and three more without a pair of query and key: one of padding alone in front, one with a
/// query and no key in the middle, one with a key and no query at the end.
pub(super) fn empty_sequence(evidence: &Evidence<'_>) -> Option<Look> {
    let problem = evidence.problem;
    let unit = span_unit(problem)?;
    let run = |len: usize| Run::packed(0, len, unit);
    let lengths = [(0, 0), (1, 0), (0, 1)];
    let mut new = free_ids(problem).zip(lengths).map(|(id, (q, kv))| Sequence { id, q: run(q), kv: run(kv) });
    let mut fields = fields(evidence);
    let mut from: Vec<Option<usize>> = (0..fields.sequences.len()).map(Some).collect();
    for at in [0, fields.sequences.len() / 2 + 1, fields.sequences.len() + 2] {
        fields.sequences.insert(at.min(fields.sequences.len()), new.next()?);
        from.insert(at.min(from.len()), None);
    }
    DENSE.place_all(&mut fields);
    agrees(evidence, Relation::EmptySequence, fields, TwinOrigin::sequences(problem, from))
}

/// Returns the smallest span that can hold a row on any number of ranks.
fn span_unit(problem: &Problem) -> Option<usize> {
    let parallel = &problem.parallel;
    match parallel.algorithm {
        Algorithm::Single => Some(1),
        _ => {
            let unit = seamproof_oracle::sharding::span_multiple(parallel.balance, parallel.size());
            // Long stripes would make the new sequence the largest of all.
            (unit <= 64).then_some(unit)
        }
    }
}

/// Asks the same sequences and two more without rows at the end, so that the last offset stands there three times.
pub(super) fn closing_offsets(evidence: &Evidence<'_>) -> Option<Look> {
    let problem = evidence.problem;
    let end = |run: fn(&Sequence) -> Run| {
        problem.sequences.iter().filter_map(|sequence| run(sequence).end()).max().unwrap_or(0)
    };
    let (q, kv) = (Run::packed(end(|s| s.q), 0, 0), Run::packed(end(|s| s.kv), 0, 0));
    let mut fields = fields(evidence);
    let mut from: Vec<Option<usize>> = (0..fields.sequences.len()).map(Some).collect();
    for id in free_ids(problem).take(2) {
        fields.sequences.push(Sequence { id, q, kv });
        from.push(None);
    }
    agrees(evidence, Relation::ClosingOffsets, fields, TwinOrigin::sequences(problem, from))
}
