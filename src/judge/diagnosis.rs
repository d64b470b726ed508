//! Diagnosis: which key a wrong row missed, or saw too much. It is a part of a finding's text, and never a verdict.
//!
//! A matched filter: without key j of weight p, a row of out moves by `−p/(1 − p)·(v_j − out)`; with a key too many, by
//! `+p/(1 + p)·(v_j − out)`, where p is what its weight would be. The row's error is compared with every key's
//! direction; one key explains it if it takes more than half of its energy, with the sign that its visibility asks for
//! and about the size that its weight predicts.

use seamproof_oracle::{Forward, Inputs, Problem, TensorName};

use crate::backend::RankOutputs;
use crate::verdict::{Finding, Place};

/// Least share of the error's energy that one key explains.
const ENERGY_MIN: f64 = 0.5;
/// Largest factor between a key's share in the error and what its weight predicts.
const FACTOR_MAX: f64 = 2.0;

/// Fewest lanes of a value: in fewer dimensions any error is near some key's direction.
const LANES_MIN: usize = 8;

/// A key, and what it would explain.
struct Suspect {
    key: usize,
    weight: f64,
    is_missed: bool,
    energy: f64,
}

/// Adds to a finding about a row of out or lse which key was dropped or leaked, if it looks like one.
pub(super) fn explain(
    problem: &Problem,
    inputs: &Inputs,
    rank: &RankOutputs,
    exact: &Forward,
    finding: &mut Finding,
) {
    if !matches!(finding.tensor, Some(TensorName::Out | TensorName::Lse)) {
        return;
    }
    let Place { sequence: Some(sequence), head: Some(head), row: Some(query), .. } = finding.place else {
        return;
    };
    if let Some(suspect) = suspect(problem, inputs, rank, exact, (sequence, head, query)) {
        let done = if suspect.is_missed { "missed" } else { "saw hidden" };
        let Suspect { key, weight, .. } = suspect;
        finding.what += &format!(
            ": looks as if query {query} of sequence {sequence} {done} key {key} (weight {weight:.1e})"
        );
    }
}

/// The key that explains the error of a row best, if one does.
fn suspect(
    problem: &Problem,
    inputs: &Inputs,
    rank: &RankOutputs,
    exact: &Forward,
    (sequence, head, query): (usize, usize, usize),
) -> Option<Suspect> {
    let both = problem.sequences.get(sequence).filter(|_| problem.dims.v >= LANES_MIN)?;
    let (row, kv_head) = (both.q.row(query), head / problem.group());
    let right: Vec<f64> = (0..problem.dims.v).map(|lane| exact.out[[row, head, lane]]).collect();
    let error: Vec<f64> = right
        .iter()
        .enumerate()
        .map(|(lane, right)| f64::from(rank.out[[row, head, lane]]) - right)
        .collect();
    let whole: f64 = error.iter().map(|x| x * x).sum();
    let visible = problem.mask.visible(query, both.q.len, both.kv.len);
    let candidates = (0..both.kv.len).filter_map(|key| {
        let at = both.kv.row(key);
        let product: f64 = (0..problem.dims.qk)
            .map(|lane| f64::from(inputs.q[[row, head, lane]]) * f64::from(inputs.k[[at, kv_head, lane]]))
            .sum();
        let logit = problem.softmax.cap(f64::from(problem.softmax.scale) * product);
        let weight = libm::exp(logit - exact.lse[[head, row]]);
        let is_missed = visible.contains(&key);
        let predicted = if is_missed { -weight / (1.0 - weight) } else { weight / (1.0 + weight) };
        let direction =
            right.iter().enumerate().map(|(lane, o)| f64::from(inputs.v[[at, kv_head, lane]]) - o);
        let (mut along, mut length) = (0.0, 0.0);
        for (direction, error) in direction.zip(&error) {
            along += direction * error;
            length += direction * direction;
        }
        let factor = along / length / predicted;
        let fits = (1.0 / FACTOR_MAX..=FACTOR_MAX).contains(&factor);
        fits.then_some(Suspect { key, weight, is_missed, energy: along * along / length })
    });
    let best = candidates.max_by(|a, b| a.energy.total_cmp(&b.energy))?;
    (best.energy > ENERGY_MIN * whole).then_some(best)
}
