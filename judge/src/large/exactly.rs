//! The finding about a row that inputs of the modes `pairs` and `routing` do not allow ([`Known`](super::Known)).

use seamproof_oracle::{Problem, TensorName};
use serde_json::Value;

use super::answer::{Answer, AnswerError, Compared};
use super::run::place_in;
use crate::finding::{Check, Finding, number};

/// Returns the finding about the first result with a wrong row.
pub(super) fn wrong(problem: &Problem, answer: &Answer) -> Result<Option<Finding>, AnswerError> {
    let order = [TensorName::Lse, TensorName::Out, TensorName::Dv, TensorName::Dk, TensorName::Dq];
    let all = order.iter().filter_map(|tensor| Some((*tensor, answer.head.exact.get(&tensor.to_string())?)));
    let Some((tensor, compared)) = all.into_iter().find(|(_, compared)| compared.failed > 0) else {
        return Ok(None);
    };
    let Compared { compared, failed, place, values } = compared;
    let [got, expected] = values.as_slice() else {
        return Err(AnswerError(format!("the values {values:?} of {tensor}")));
    };
    let what = "not what inputs of this mode allow; every row is known bit for bit".to_owned();
    Ok(Some(Finding {
        place: place_in(problem, tensor, place)?,
        got: Some(text(got)),
        expected: Some(text(expected)),
        failed: *failed,
        compared: *compared,
        ..Finding::new(Check::Exact, Some(tensor), what)
    }))
}

fn text(value: &Value) -> String {
    value.as_f64().map_or_else(|| value.as_str().unwrap_or("no value").chars().take(40).collect(), number)
}
