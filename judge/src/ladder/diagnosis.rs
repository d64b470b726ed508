//! Diagnosis: the pair (query, key) that a wrong row lacks, or has too much. It is a part of a finding's text, and
//! never a verdict.
//!
//! It is a matched filter. Let p be the weight of key j, or the weight that it would have. Without a visible key j, a
//! row of out moves by `−p/(1 − p)·(v_j − out)`. With a hidden key j, it moves by `+p/(1 + p)·(v_j − out)`. A row of
//! dq moves by `∓scale·dS_ij·k_j`, and a row of dv by `∓p_ij·dout_i`, with the p and dS that follow from the saved out
//! and lse. The row's error is compared with the direction of every possible pair. A pair explains the error if it
//! takes nearly all of its energy, with the sign that its visibility asks for and about the size that its coefficient
//! predicts.
//!
//! A missing pair is missing in every result that it would be part of, so the diagnosis names nothing that other
//! results contradict. Without key j the row's LSE moves by `ln(1 − p)`, and with a hidden key by `ln(1 + p)`. A
//! suspect of out must therefore agree with the LSE that the row returned. A row of dk names no pair: the pair would
//! be missing in dv too, which is examined first. A hidden pair is not named where a visible one lies in the same
//! direction and differs only in size, because the visible one's coefficient is as likely to be wrong.
//!
//! Two kinds of rows are not one key off. A row that saw no key at all shows it in its LSE, and no key is named. A
//! row that should see no key has an exact out of 0. All that it holds comes from hidden keys, and each key's weight
//! is its share of the LSE that the row returned.
//!
//! A row may be right for another KV head. Its out and its LSE are then those that the query gets with that head's
//! keys and values, or with its values alone.

use ndarray::s;
use seamproof_oracle::sharding::run_of;
use seamproof_oracle::{ForwardResults, Gradients, InputMode, Inputs, Problem, SavedViews, TensorName};

use super::compare::lanes;
use super::evidence::Evidence;
use super::pairs::{Pairs, widened};
use super::ranks::{self, Told};
use super::rows::{Finished, Row};
use super::stories::{REST_MAX, other_heads};
use crate::finding::{Finding, LOOKS, Place};
use crate::subject::{RankGradients, RankOutputs};

/// Smallest share of the error's energy that one pair must explain. A pair that is the whole fault leaves only
/// roundings.
const ENERGY_MIN: f64 = 0.8;
/// Largest factor between a pair's share in the error and the size that its coefficient predicts. It is below the
/// factor of two that a gradient of half its size gives in a row of one pair.
const FACTOR_MAX: f64 = 1.25;

/// A pair, and the error that it would explain.
struct Suspect {
    query: usize,
    /// Index of the query head.
    head: usize,
    key: usize,
    weight: f64,
    is_missed: bool,
    energy: f64,
    /// Whether everything that is known agrees with the pair, and not its direction alone.
    fits: bool,
}

/// Returns a pair that explains nothing yet, where `lse` is the row's.
fn suspected(pairs: &Pairs<'_>, (query, head, key): (usize, usize, usize), lse: f64) -> Suspect {
    let (weight, is_missed) = (pairs.weight((query, head, key), lse), pairs.sees(query, key));
    Suspect { query, head, key, weight, is_missed, energy: 0.0, fits: false }
}

/// Whether a share is about as large as predicted.
fn is_about(got: f64, predicted: f64) -> bool {
    (1.0 / FACTOR_MAX..=FACTOR_MAX).contains(&(got / predicted))
}

impl Suspect {
    /// Returns in words what the suspect's query did, where the suspect explains a row of out.
    fn of_out(&self) -> String {
        let done = if self.is_missed { "missed" } else { "saw hidden" };
        format!("{done} key {} (weight {:.1e})", self.key, self.weight)
    }

    /// Returns the suspect with its energy in an error along a direction. It fits if the error has about `predicted`
    /// times that direction.
    fn explains(self, error: &[f64], direction: impl Iterator<Item = f64>, predicted: f64) -> Suspect {
        let (mut along, mut length) = (0.0, 0.0);
        for (direction, error) in direction.zip(error) {
            along += direction * error;
            length += direction * direction;
        }
        let fits = is_about(along / length, predicted);
        Suspect { energy: along * along / length, fits, ..self }
    }

    /// Whether the move of the LSE agrees with the suspect, to the rounding of an LSE of this size.
    fn agrees(&self, moved: f64, lse: f64) -> bool {
        let predicted = libm::log1p(if self.is_missed { -self.weight } else { self.weight });
        is_about(moved, predicted)
            || (moved - predicted).abs() <= f64::from(f32::EPSILON) * lse.abs().max(1.0)
    }
}

/// Returns the suspect that explains an error best, if one does. A hidden pair is left out where a visible one lies
/// in its direction.
fn best(error: &[f64], suspects: impl Iterator<Item = Suspect>) -> Option<Suspect> {
    let whole: f64 = error.iter().map(|x| x * x).sum();
    let (mut best, mut is_seen) = (None::<Suspect>, false);
    for suspect in suspects.filter(|suspect| suspect.energy > ENERGY_MIN * whole) {
        is_seen |= suspect.is_missed;
        if suspect.fits && best.as_ref().is_none_or(|best| best.energy < suspect.energy) {
            best = Some(suspect);
        }
    }
    best.filter(|best| best.is_missed || !is_seen)
}

/// Returns the right lanes of a row of a gradient that a pair may explain.
pub(super) fn right_lanes(
    exact: &Gradients,
    tensor: Option<TensorName>,
    row: usize,
    head: usize,
) -> Vec<f64> {
    let exact = match tensor {
        Some(TensorName::Dq) => &exact.dq,
        Some(TensorName::Dk) => &exact.dk,
        _ => &exact.dv,
    };
    exact.slice(s![row, head, ..]).to_vec()
}

/// Returns the difference between a row and the right one.
fn error(got: &[f32], right: &[f64]) -> Vec<f64> {
    got.iter().zip(right).map(|(got, right)| f64::from(*got) - right).collect()
}

/// The right results of one row: its out and its LSE.
pub(super) struct RightRow {
    out: Vec<f64>,
    lse: f64,
}

impl RightRow {
    /// Returns those of a row of some results.
    pub(super) fn of(exact: &ForwardResults, row: usize, head: usize) -> RightRow {
        RightRow { out: exact.out.slice(s![row, head, ..]).to_vec(), lse: exact.lse[[head, row]] }
    }
}

/// Adds to a finding about a row of out or lse what the row seems to have made of its keys: that it lost or gained one,
/// that it lost all, or that those of a rank were wrong. `right` returns the right results of a row of the problem's
/// tensors and a head.
pub(super) fn explain(
    evidence: &Evidence<'_>,
    right: impl Fn(usize, usize) -> RightRow,
    finding: &mut Finding,
) {
    let Evidence { problem, first: rank, .. } = *evidence;
    let Place { sequence: Some(sequence), head: Some(head), row: Some(query), .. } = finding.place else {
        return;
    };
    if !matches!(finding.tensor, Some(TensorName::Out | TensorName::Lse)) {
        return;
    }
    let Some(both) = problem.sequences.get(sequence) else { return };
    let inputs = &*evidence.inputs.values(problem);
    let visible = problem.mask.visible(query, both.q.len, both.kv.len);
    let words = |saw: String| format!("query {query} of sequence {sequence} {saw}");
    let told = if !visible.is_empty() && saw_nothing(problem, inputs, rank, (both.q.row(query), head)) {
        Some(words(format!("saw no key, should see keys {visible}")))
    } else {
        let Some(pairs) = Pairs::new(problem, inputs, sequence, problem.dims.v) else { return };
        let right = right(both.q.row(query), head);
        head_of_out(&pairs, rank, &right, (query, head)).map(words).or_else(|| {
            let error = error(&lanes(&rank.out, both.q.row(query), head), &right.out);
            let suspect = suspect_of_out(&pairs, rank, &right, (query, head), &error);
            let of_ranks = rank_of_out(evidence, &pairs, (query, head));
            likelier(suspect, of_ranks, &error, |suspect| words(suspect.of_out()))
        })
    };
    if let Some(told) = told {
        finding.what += &format!(": {LOOKS}{told}");
    }
}

/// Returns in words the explanation that leaves less of an error: one pair, or the rows of a rank.
fn likelier(
    suspect: Option<Suspect>,
    of_ranks: Option<Told>,
    error: &[f64],
    words: impl FnOnce(Suspect) -> String,
) -> Option<String> {
    let whole: f64 = error.iter().map(|x| x * x).sum();
    let left = |suspect: &Suspect| (1.0 - suspect.energy / whole).max(0.0).sqrt();
    match (suspect, of_ranks) {
        (Some(suspect), Some(told)) if left(&suspect) <= told.rest => Some(words(suspect)),
        (_, Some(told)) => Some(told.words),
        (suspect, None) => suspect.map(words),
    }
}

/// Returns what befell a wrong row of out on its way between ranks, if such a mistake explains it.
fn rank_of_out(evidence: &Evidence<'_>, pairs: &Pairs<'_>, (query, head): (usize, usize)) -> Option<Told> {
    let of = |query: usize| {
        let row = pairs.both.q.row(query);
        let lanes = widened(&lanes(&evidence.first.out, row, head)).collect();
        let lse = evidence.first.lse.as_ref().map(|lse| f64::from(lse[[head, row]]));
        Row::of_out(*pairs, head, query, Finished { lanes, lse })
    };
    ranks::told(pairs, &evidence.ranks(), &of(query)?, of)
}

/// Returns in words the other KV head for which a row of out is right, if there is one.
fn head_of_out(
    pairs: &Pairs<'_>,
    rank: &RankOutputs,
    right: &RightRow,
    (query, head): (usize, usize),
) -> Option<String> {
    let row = pairs.both.q.row(query);
    let got = lanes(&rank.out, row, head);
    let distance = |right: &[f64]| error(&got, right).iter().map(|error| error * error).sum::<f64>().sqrt();
    let most = REST_MAX * distance(&right.out);
    let is_of = |heads: &[usize; 2]| {
        let (lse, share, out) = pairs.attended(query, head, *heads);
        let moved = rank.lse.as_ref().map_or(0.0, |of_row| f64::from(of_row[[head, row]]) - lse);
        // A row that belongs almost wholly to the sink looks alike for all heads.
        distance(&out) < most && moved.abs() < REST_MAX && share > REST_MAX
    };
    let own = head / pairs.problem.group();
    let dims = pairs.problem.dims;
    let others = other_heads(pairs.problem, own, pairs.both.kv.len * (dims.qk + dims.v));
    let mut read = others.flat_map(|other| [[other, other], [own, other]]);
    read.find(is_of).map(|[of_keys, other]| {
        let what = if of_keys == own { "values" } else { "keys and values" };
        format!("took the {what} of KV head {other}, should take those of KV head {own}")
    })
}

/// Whether a row is that of a query without keys: its LSE is −∞, or its LSE is the sink's and its out is 0.
fn saw_nothing(problem: &Problem, inputs: &Inputs, rank: &RankOutputs, (row, head): (usize, usize)) -> bool {
    let sink = problem.sink(head, &inputs.sink);
    let of_none = Some(sink.map_or(f32::NEG_INFINITY, |sink| sink as f32));
    let lse = rank.lse.as_ref().map(|lse| lse[[head, row]]);
    let is_zero = || lanes(&rank.out, row, head).iter().all(|out| *out == 0.0);
    lse == Some(f32::NEG_INFINITY) || (lse.is_none() || lse == of_none) && is_zero()
}

/// Returns the key that explains the error of a row of out best, if one does.
fn suspect_of_out(
    pairs: &Pairs<'_>,
    rank: &RankOutputs,
    right: &RightRow,
    (query, head): (usize, usize),
    error: &[f64],
) -> Option<Suspect> {
    let row = pairs.both.q.row(query);
    let is_empty = right.lse == f64::NEG_INFINITY;
    let lse = match &rank.lse {
        Some(lse) if is_empty => f64::from(lse[[head, row]]),
        _ => right.lse,
    };
    let moved = rank.lse.as_ref().filter(|_| !is_empty).map(|got| f64::from(got[[head, row]]) - lse);
    let suspects = (0..pairs.both.kv.len).map(|key| {
        let suspect = suspected(pairs, (query, head, key), lse);
        let weight = suspect.weight;
        let predicted = match (suspect.is_missed, is_empty) {
            (true, _) => -weight / (1.0 - weight),
            (false, false) => weight / (1.0 + weight),
            (false, true) => weight,
        };
        let value = pairs.of_key(&pairs.inputs.v, key, head);
        let direction = widened(&value).zip(&right.out).map(|(v, out)| v - out);
        let suspect = suspect.explains(error, direction, predicted);
        let fits = suspect.fits && moved.is_none_or(|moved| suspect.agrees(moved, lse));
        Suspect { fits, ..suspect }
    });
    best(error, suspects)
}

/// Adds to a finding about a row of a gradient what it seems to have made of the rows of the other side: the pair that
/// it lacks or has too much, where it is one of dq or dv, or the rank whose rows were wrong. `right` returns the right
/// lanes of a row of the problem's tensors and a head.
pub(super) fn explain_gradient(
    evidence: &Evidence<'_>,
    got: &RankGradients,
    (saved, right): (SavedViews<'_>, impl Fn(usize, usize) -> Vec<f64>),
    finding: &mut Finding,
) {
    let problem = evidence.problem;
    let (Some(tensor), Place { sequence: Some(sequence), head: Some(head), row: Some(row), .. }) =
        (finding.tensor, finding.place)
    else {
        return;
    };
    let got = match tensor {
        TensorName::Dq => &got.dq,
        TensorName::Dk => &got.dk,
        TensorName::Dv => &got.dv,
        _ => return,
    };
    let values = evidence.inputs.values(problem);
    let (inputs, saved) = (&*values, saved.view());
    // dk has the lanes of the queries, which differ from 0 in one alone where that carries the logit.
    let one_lane = matches!(problem.mode, InputMode::Shadowed | InputMode::Rising);
    let dim = if one_lane && tensor == TensorName::Dk { 1 } else { got.dim().2 };
    let Some(pairs) = Pairs::new(problem, inputs, sequence, dim) else { return };
    let run = run_of(pairs.both, tensor.side());
    let error = error(&lanes(got, run.row(row), head), &right(run.row(row), head));
    let suspect = suspect_of_gradient(&pairs, &saved, tensor, (row, head), &error);
    let of = |row: usize| {
        let got = widened(&lanes(got, run.row(row), head)).collect();
        Some(Row::of_gradient(pairs, (tensor, head, row), saved, got))
    };
    let of_ranks = of(row).and_then(|wrong| ranks::told(&pairs, &evidence.ranks(), &wrong, of));
    let words = |suspect| in_the_backward(&suspect, tensor, sequence);
    if let Some(told) = likelier(suspect, of_ranks, &error, words) {
        finding.what += &format!(": {LOOKS}{told}");
    }
}

/// Returns in words what the pair of a gradient's row lacks or has too much.
fn in_the_backward(suspect: &Suspect, tensor: TensorName, sequence: usize) -> String {
    let Suspect { query, head, key, weight, is_missed, .. } = *suspect;
    let of_head = format!("query {query} of head {head}");
    let took = match (tensor, is_missed) {
        (TensorName::Dq, true) => format!("query {query} of sequence {sequence} missed key {key}"),
        (TensorName::Dq, false) => format!("query {query} of sequence {sequence} saw hidden key {key}"),
        (_, true) => format!("key {key} of sequence {sequence} received nothing from {of_head}"),
        (_, false) => format!("key {key} of sequence {sequence} received from hidden {of_head}"),
    };
    format!("in the backward {took} (weight {weight:.1e})")
}

/// Returns the pair that explains the error of a row of a gradient best, if one does.
fn suspect_of_gradient(
    pairs: &Pairs<'_>,
    saved: &SavedViews<'_>,
    tensor: TensorName,
    (row, head): (usize, usize),
    error: &[f64],
) -> Option<Suspect> {
    let Inputs { k, dout, .. } = pairs.inputs;
    let of = |(query, head, key): (usize, usize, usize)| {
        let suspect = suspected(pairs, (query, head, key), pairs.saved_lse(query, head, saved));
        let (direction, coefficient) = match tensor {
            TensorName::Dq => (pairs.of_key(k, key, head), pairs.logit_gradient((query, head, key), saved)),
            _ => (pairs.of_query(dout, query, head), suspect.weight),
        };
        let predicted = if suspect.is_missed { -coefficient } else { coefficient };
        suspect.explains(error, widened(&direction), predicted)
    };
    match tensor {
        // The pair would be missing in dv too, which is examined first.
        TensorName::Dk => None,
        TensorName::Dq => best(error, (0..pairs.both.kv.len).map(|key| of((row, head, key)))),
        _ => {
            let queries = (0..pairs.both.q.len).flat_map(|i| pairs.heads(head).map(move |h| (i, h, row)));
            best(error, queries.map(of))
        }
    }
}
