//! A run in question, and places in it.

use seamproof_oracle::envelope::Model;
use seamproof_oracle::{Problem, Sequence, TensorName};

use super::answer::{Answer, AnswerError};
use super::rows::Question;
use crate::finding::Place;

/// A run in question.
#[derive(Clone, Copy)]
pub(super) struct Run<'a> {
    pub(super) problem: &'a Problem,
    pub(super) model: &'a Model,
    pub(super) question: &'a Question,
    pub(super) answer: &'a Answer,
}

/// Returns a row, a head and perhaps a lane of a tensor as a place in the problem's terms.
pub(super) fn place_in(problem: &Problem, tensor: TensorName, place: &[usize]) -> Result<Place, AnswerError> {
    let &[row, head, ref lane @ ..] = place else {
        return Err(AnswerError(format!("the place {place:?} in {tensor}")));
    };
    let is_key = matches!(tensor, TensorName::Dk | TensorName::Dv);
    let run = |both: &Sequence| if is_key { both.kv } else { both.q };
    let owns = |both: &Sequence| (run(both).offset..run(both).offset + run(both).len).contains(&row);
    let sequence = problem.sequences.iter().position(owns);
    let first = sequence.map_or(0, |sequence| run(&problem.sequences[sequence]).offset);
    Ok(Place { sequence, head: Some(head), row: Some(row - first), lane: lane.first().copied() })
}
