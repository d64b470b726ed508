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

use std::borrow::Cow;
use std::ops::Range;

use ndarray::{Array3, s};
use seamproof_oracle::exact::log_sum_exp;
use seamproof_oracle::sharding::run_of;
use seamproof_oracle::{
    Algorithm, ForwardResults, Gradients, Inputs, Problem, SavedViews, Sequence, Side, TensorName,
};

use super::compare::lanes;
use super::evidence::Evidence;
use super::ranks::{self, Told};
use super::rows::{Finished, Row};
use super::stories::{LANES_MIN, other_heads};
use crate::finding::{Finding, LOOKS, Place};
use crate::subject::{RankGradients, RankOutputs};

/// Smallest share of the error's energy that one pair must explain. A pair that is the whole fault leaves only
/// roundings.
const ENERGY_MIN: f64 = 0.8;
/// Largest factor between a pair's share in the error and the size that its coefficient predicts. It is below the
/// factor of two that a gradient of half its size gives in a row of one pair.
const FACTOR_MAX: f64 = 1.25;

/// Largest share of an error's size that may be left where another KV head, or a mistake in the whole case, explains
/// it: the roundings of a 16-bit format.
pub(super) const REST_MAX: f64 = 1.0 / 16.0;

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

/// A sequence of a case, with the numbers that a suspect needs.
#[derive(Clone, Copy)]
pub(super) struct Pairs<'a> {
    problem: &'a Problem,
    inputs: &'a Inputs,
    sequence: usize,
    both: &'a Sequence,
}

impl<'a> Pairs<'a> {
    /// Returns the pairs of a sequence; `None` where rows of so few lanes tell nothing.
    fn new(problem: &'a Problem, inputs: &'a Inputs, sequence: usize, dim: usize) -> Option<Pairs<'a>> {
        let both = problem.sequences.get(sequence).filter(|_| dim >= LANES_MIN)?;
        Some(Pairs { problem, inputs, sequence, both })
    }

    pub(super) fn inputs(&self) -> &'a Inputs {
        self.inputs
    }

    /// Returns the index of the sequence.
    pub(super) fn sequence(&self) -> usize {
        self.sequence
    }

    /// Returns the number of real rows of a side.
    pub(super) fn len(&self, side: Side) -> usize {
        run_of(self.both, side).len
    }

    /// Returns the number of members of the group, each of which may be a region of several ranks.
    pub(super) fn members(&self) -> usize {
        self.problem.parallel.size()
    }

    /// Whether keys and values travel from rank to rank.
    pub(super) fn travel(&self) -> bool {
        matches!(self.problem.parallel.algorithm, Algorithm::Ring | Algorithm::Hierarchical { .. })
    }

    /// Whether sequences of the problem share keys.
    pub(super) fn is_shared(&self) -> bool {
        !self.problem.sharing.is_empty()
    }

    pub(super) fn group(&self) -> usize {
        self.problem.group()
    }

    /// Returns the query heads of a KV head.
    pub(super) fn heads(&self, kv_head: usize) -> Range<usize> {
        kv_head * self.problem.group()..(kv_head + 1) * self.problem.group()
    }

    pub(super) fn of_query<'t>(&self, tensor: &'t Array3<f32>, query: usize, head: usize) -> Cow<'t, [f32]> {
        lanes(tensor, self.both.q.row(query), head)
    }

    pub(super) fn of_key<'t>(&self, tensor: &'t Array3<f32>, key: usize, head: usize) -> Cow<'t, [f32]> {
        lanes(tensor, self.both.kv.row(key), head / self.problem.group())
    }

    pub(super) fn sees(&self, query: usize, key: usize) -> bool {
        self.problem.mask.visible(query, self.both.q.len, self.both.kv.len).contains(&key)
    }

    fn logit(&self, query: usize, head: usize, key: usize) -> f64 {
        self.logit_of(query, head, key, head / self.problem.group())
    }

    /// Returns the logit with a key of any KV head.
    fn logit_of(&self, query: usize, head: usize, key: usize, kv_head: usize) -> f64 {
        let Inputs { q, k, .. } = self.inputs;
        let product = dot(&self.of_query(q, query, head), &lanes(k, self.both.kv.row(key), kv_head));
        self.problem.softmax.cap(f64::from(self.problem.softmax.scale) * product)
    }

    /// Returns LSE, the keys' share of the weights, and out of a query, with the visible keys of one KV head and the
    /// values of another.
    fn attended(&self, query: usize, head: usize, [of_keys, of_values]: [usize; 2]) -> (f64, f64, Vec<f64>) {
        let keys = self.problem.mask.visible(query, self.both.q.len, self.both.kv.len);
        let logit = |key: usize| self.logit_of(query, head, key, of_keys);
        let logits: Vec<f64> = keys.clone().map(logit).collect();
        let lse = log_sum_exp(&logits, self.problem.sink(head, &self.inputs.sink));
        let (mut share, mut out) = (0.0, vec![0.0; self.problem.dims.v]);
        for (key, logit) in keys.zip(&logits) {
            let weight = libm::exp(logit - lse);
            share += weight;
            let value = lanes(&self.inputs.v, self.both.kv.row(key), of_values);
            out.iter_mut().zip(widened(&value)).for_each(|(out, v)| *out += weight * v);
        }
        (lse, share, out)
    }

    /// Returns the right LSE of a query.
    pub(super) fn lse(&self, query: usize, head: usize) -> f64 {
        let keys = self.problem.mask.visible(query, self.both.q.len, self.both.kv.len);
        let logits: Vec<f64> = keys.clone().map(|key| self.logit(query, head, key)).collect();
        log_sum_exp(&logits, self.problem.sink(head, &self.inputs.sink))
    }

    /// Returns the LSE that a backward begins with.
    pub(super) fn saved_lse(&self, query: usize, head: usize, saved: &SavedViews<'_>) -> f64 {
        saved.lse[[head, self.both.q.row(query)]]
    }

    /// Returns the weight of the pair of a query, for a head, and a key.
    pub(super) fn weight(&self, (query, head, key): (usize, usize, usize), lse: f64) -> f64 {
        libm::exp(self.logit(query, head, key) - lse)
    }

    /// Returns the weight of the sink, 0 where there is none.
    pub(super) fn sink_weight(&self, head: usize, lse: f64) -> f64 {
        self.problem.sink(head, &self.inputs.sink).map_or(0.0, |sink| libm::exp(sink - lse))
    }

    /// Returns a pair that explains nothing yet, where `lse` is the row's.
    fn suspect(&self, query: usize, head: usize, key: usize, lse: f64) -> Suspect {
        let weight = self.weight((query, head, key), lse);
        Suspect { query, head, key, weight, is_missed: self.sees(query, key), energy: 0.0, fits: false }
    }

    /// Returns `scale · dS` of the pair of a query, for a head, and a key, from the saved out.
    pub(super) fn logit_gradient(&self, pair: (usize, usize, usize), saved: &SavedViews<'_>) -> f64 {
        let (query, head, key) = pair;
        let weight = self.weight(pair, self.saved_lse(query, head, saved));
        let dout = self.of_query(&self.inputs.dout, query, head);
        let out = saved.out.lanes(self.both.q.row(query), head);
        let d: f64 = dout.iter().zip(&out).map(|(dout, out)| f64::from(*dout) * out).sum();
        let softmax = &self.problem.softmax;
        let derivative = softmax.cap_derivative(self.logit(query, head, key));
        let dp = dot(&dout, &self.of_key(&self.inputs.v, key, head));
        f64::from(softmax.scale) * weight * (dp - d) * derivative
    }
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

pub(super) fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
}

pub(super) fn widened(row: &[f32]) -> impl Iterator<Item = f64> {
    row.iter().map(|x| f64::from(*x))
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
    let Evidence { problem, inputs, first: rank, .. } = *evidence;
    let Place { sequence: Some(sequence), head: Some(head), row: Some(query), .. } = finding.place else {
        return;
    };
    if !matches!(finding.tensor, Some(TensorName::Out | TensorName::Lse)) {
        return;
    }
    let Some(both) = problem.sequences.get(sequence) else { return };
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
        let suspect = pairs.suspect(query, head, key, lse);
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
pub(super) fn explain_gradient<'a>(
    evidence: &Evidence<'a>,
    got: &RankGradients,
    (saved, right): (SavedViews<'a>, impl Fn(usize, usize) -> Vec<f64>),
    finding: &mut Finding,
) {
    let Evidence { problem, inputs, .. } = *evidence;
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
    let Some(pairs) = Pairs::new(problem, inputs, sequence, got.dim().2) else { return };
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
        let suspect = pairs.suspect(query, head, key, pairs.saved_lse(query, head, saved));
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
