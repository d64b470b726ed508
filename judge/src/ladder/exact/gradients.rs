//! The backward of `routing` and `pairs`, bit for bit, and the queries that a key received from.
//!
//! A query with n keys of weight (1 or 2) gives each of them `P = 1/n` and `dS = P · (dP − D)`. Its other keys have
//! `P = 0`. A sum is compared where its terms, in units of the smallest, add up to less than the format of partial
//! sums can hold. Each partial sum is then exact in any order, and the result is one rounding of the exact sum. With
//! P kept in f32, dv also has the weights' error.

use std::ops::Range;

use seamproof_oracle::{Format, Side, TensorName};

use super::super::compare::lanes;
use super::{Tally, Wrong, allowed_text};
use crate::exact::{ExactPlan, Merging, Parts, backward_weight_error};
use crate::finding::{Check, Finding, Place, number};
use crate::ladder::evidence::Evidence;
use crate::subject::RankGradients;

/// Number of units from which on f32 cannot hold every multiple of the unit.
const F32_UNITS: f64 = (1 << 24) as f64;

pub(super) struct Backward<'a> {
    pub(super) evidence: &'a Evidence<'a>,
    pub(super) merging: Merging,
    pub(super) parts: Parts,
    /// Whether the subject's own out is the exact one, and thus D exact too.
    pub(super) out_is_exact: bool,
}

/// A sum of exact terms.
#[derive(Clone, Copy, Default)]
struct Sum {
    value: f64,
    magnitude: f64,
}

impl Sum {
    fn add(&mut self, term: f64) {
        self.value += term;
        self.magnitude += term.abs();
    }
}

/// The gradients that one query gives to its keys.
struct Given {
    keys: Range<usize>,
    weight: f64,
    /// Logit gradient dS of each key.
    ds: Vec<f64>,
}

/// Sums of one KV head's keys, each `[keys, dim]`, row after row.
struct KeySums {
    dk: Vec<Sum>,
    dv: Vec<Sum>,
}

impl Backward<'_> {
    /// Checks the gradients of every run that is examined. Exact gradients are the same in any order of their sums,
    /// so each run must show them.
    pub(super) fn check(&self, plans: &[ExactPlan<'_>]) -> Option<Finding> {
        self.evidence.gradient_runs().into_iter().find_map(|got| self.run(plans, got))
    }

    fn run(&self, plans: &[ExactPlan<'_>], got: &RankGradients) -> Option<Finding> {
        if self.parts.zero_dk {
            return self.zero_dk(plans, got);
        }
        if !self.parts.dv || !self.out_is_exact {
            return None;
        }
        let mut tallies = [TensorName::Dv, TensorName::Dk, TensorName::Dq].map(Tally::new);
        for (sequence, plan) in plans.iter().enumerate() {
            for kv_head in 0..self.evidence.problem.heads.kv {
                self.head(plan, sequence, kv_head, got, &mut tallies);
            }
        }
        let known = if self.parts.gradients { &tallies[..] } else { &tallies[..1] };
        let found = known.iter().find_map(|tally| Some((tally, tally.at?)));
        found.map(|(tally, wrong)| self.finding(plans, got, tally, wrong)).or_else(|| sinks(got))
    }

    /// Checks that dk is 0: all queries are 0, and so is `dk = Σ dS · q`.
    fn zero_dk(&self, plans: &[ExactPlan<'_>], got: &RankGradients) -> Option<Finding> {
        let mut tally = Tally::new(TensorName::Dk);
        for (sequence, plan) in plans.iter().enumerate() {
            for (position, row) in plan.run(Side::Kv).real_rows().enumerate() {
                for head in 0..self.evidence.problem.heads.kv {
                    for (lane, got) in lanes(&got.dk, row, head).iter().enumerate() {
                        let place = Wrong { sequence, head, position, lane: Some(lane) };
                        tally.add(*got == 0.0, f64::from(got.abs()), || place);
                    }
                }
            }
        }
        let wrong = tally.at?;
        let what = format!("sequence {}, key {}: not 0, but every query is", wrong.sequence, wrong.position);
        Some(tally.finding(wrong, what))
    }

    fn head(
        &self,
        plan: &ExactPlan<'_>,
        sequence: usize,
        kv_head: usize,
        got: &RankGradients,
        tallies: &mut [Tally; 3],
    ) {
        let (problem, inputs) = (self.evidence.problem, self.evidence.inputs);
        let (qk, v) = (problem.dims.qk, problem.dims.v);
        let scale = f64::from(problem.softmax.scale);
        let zeros = |dim: usize| vec![Sum::default(); plan.keys() * dim];
        let mut sums = KeySums { dk: zeros(qk), dv: zeros(v) };
        let mut dq = vec![Sum::default(); qk];
        for head in kv_head * problem.group()..(kv_head + 1) * problem.group() {
            for position in 0..plan.queries() {
                dq.fill(Sum::default());
                let row = plan.run(Side::Q).row(position);
                if let Some(given) = self.given(plan, position, head) {
                    let (q, dout) = (lanes(&inputs.q, row, head), lanes(&inputs.dout, row, head));
                    for (key, ds) in given.keys.clone().zip(&given.ds) {
                        let k = lanes(&inputs.k, plan.run(Side::Kv).row(key), kv_head);
                        add(&mut dq, &k, scale * ds);
                        add(&mut sums.dk[key * qk..(key + 1) * qk], &q, scale * ds);
                        add(&mut sums.dv[key * v..(key + 1) * v], &dout, given.weight);
                    }
                }
                let place = Wrong { sequence, head, position, lane: None };
                self.row(&lanes(&got.dq, row, head), &dq, (scale / 4.0, 0.0), place, &mut tallies[2]);
            }
        }
        let p_error = self.p_error(plan);
        for (position, row) in plan.run(Side::Kv).real_rows().enumerate() {
            let place = Wrong { sequence, head: kv_head, position, lane: None };
            let dv = &sums.dv[position * v..(position + 1) * v];
            self.row(&lanes(&got.dv, row, kv_head), dv, (0.5, p_error), place, &mut tallies[0]);
            let dk = &sums.dk[position * qk..(position + 1) * qk];
            let unit = scale * plan.amplitude() / 4.0;
            self.row(&lanes(&got.dk, row, kv_head), dk, (unit, 0.0), place, &mut tallies[1]);
        }
    }

    /// Returns the relative error of P where it is not rounded.
    fn p_error(&self, plan: &ExactPlan<'_>) -> f64 {
        match self.evidence.problem.precision.p.format {
            Format::F32 => {
                let (mode, logit) = (self.evidence.problem.mode, plan.code_logit());
                backward_weight_error(mode, logit, plan.partial_lse(logit, plan.keys()), self.merging)
            }
            _ => 0.0,
        }
    }

    /// Returns what a query of a head gives to its keys; `None` where it sees no key.
    fn given(&self, plan: &ExactPlan<'_>, position: usize, head: usize) -> Option<Given> {
        let inputs = self.evidence.inputs;
        let chosen = plan.chosen(position, head);
        // Two keys that follow each other are never in two intervals.
        let keys = plan.visible(position).moved(|key| key.clamp(chosen.start, chosen.end)).hull();
        if keys.is_empty() {
            return None;
        }
        let weight = 1.0 / keys.len() as f64;
        let dout = lanes(&inputs.dout, plan.run(Side::Q).row(position), head);
        let kv_head = head / self.evidence.problem.group();
        let dp: Vec<f64> = keys
            .clone()
            .map(|key| dot(&dout, &lanes(&inputs.v, plan.run(Side::Kv).row(key), kv_head)))
            .collect();
        let d = dp.iter().sum::<f64>() * weight;
        Some(Given { keys, weight, ds: dp.iter().map(|dp| weight * (dp - d)).collect() })
    }

    /// Returns the number of units that a partial sum can hold.
    fn units(&self) -> f64 {
        let narrow = 2f64.powi(self.evidence.problem.precision.gradients.format.precision_bits());
        if self.merging.narrow_sums { narrow } else { F32_UNITS }
    }

    /// Returns the smallest and the largest right value.
    fn allowed(&self, sum: &Sum, error: f64) -> (f64, f64) {
        let (format, error) = (self.evidence.problem.precision.gradients.format, error * sum.magnitude);
        (format.round(sum.value - error), format.round(sum.value + error))
    }

    fn row(&self, got: &[f32], sums: &[Sum], (unit, error): (f64, f64), place: Wrong, tally: &mut Tally) {
        let most = self.units() * unit;
        if error == 0.0
            && let Some(compared) = rounded(got, sums, most, self.evidence.problem.precision.gradients.format)
        {
            tally.worst.held(compared);
            return;
        }
        for (lane, (got, sum)) in got.iter().zip(sums).enumerate() {
            // A sum of unrounded weights, merged in 16 bits, has a further error, so it is not compared.
            if sum.magnitude < most && !(error > 0.0 && self.merging.narrow_sums) {
                let value = f64::from(*got);
                let (least, largest) = self.allowed(sum, error);
                let holds = (least..=largest).contains(&value);
                tally.add(holds, (value - sum.value).abs(), || Wrong { lane: Some(lane), ..place });
            }
        }
    }

    fn finding(&self, plans: &[ExactPlan<'_>], got: &RankGradients, tally: &Tally, wrong: Wrong) -> Finding {
        let plan = &plans[wrong.sequence];
        let side = if tally.tensor == TensorName::Dq { Side::Q } else { Side::Kv };
        let row = plan.run(side).row(wrong.position);
        let array = match tally.tensor {
            TensorName::Dq => &got.dq,
            TensorName::Dk => &got.dk,
            _ => &got.dv,
        };
        let got = lanes(array, row, wrong.head);
        let sums = self.terms(plan, tally.tensor, wrong);
        let story = match side {
            Side::Q => gathered(&sums, &got, self.evidence.problem.precision.gradients.format),
            Side::Kv => received(plan, &sums, &got, self.evidence.problem.precision.gradients.format),
        };
        let name = if side == Side::Q { "query" } else { "key" };
        let what = format!("sequence {}, {name} {}: {story}", wrong.sequence, wrong.position);
        let lane = wrong.lane.unwrap_or(0);
        let mut sum = Sum::default();
        sums.iter().filter(|term| term.seen).for_each(|term| sum.add(term.lanes[lane]));
        let error = if tally.tensor == TensorName::Dv { self.p_error(plan) } else { 0.0 };
        Finding {
            got: Some(number(got[lane])),
            expected: Some(allowed_text(self.allowed(&sum, error))),
            ..tally.finding(wrong, what)
        }
    }

    /// Returns what each query could give to a key (dk, dv), or each key to a query (dq).
    fn terms(&self, plan: &ExactPlan<'_>, tensor: TensorName, wrong: Wrong) -> Vec<Term> {
        let (problem, inputs) = (self.evidence.problem, self.evidence.inputs);
        let scale = f64::from(problem.softmax.scale);
        let scaled = |row: &[f32], factor: f64| row.iter().map(|x| f64::from(*x) * factor).collect();
        if tensor == TensorName::Dq {
            let Some(given) = self.given(plan, wrong.position, wrong.head) else { return Vec::new() };
            let kv_head = wrong.head / problem.group();
            let term = |(key, ds): (usize, &f64)| {
                let k = lanes(&inputs.k, plan.run(Side::Kv).row(key), kv_head);
                Term { place: key, seen: true, lanes: scaled(&k, scale * ds) }
            };
            return given.keys.clone().zip(&given.ds).map(term).collect();
        }
        let heads = wrong.head * problem.group()..(wrong.head + 1) * problem.group();
        let queries = (0..plan.queries()).flat_map(|query| heads.clone().map(move |head| (query, head)));
        let term = |(query, head): (usize, usize)| {
            let given = self.given(plan, query, head)?;
            let key = wrong.position;
            if !plan.chosen(query, head).contains(&key) {
                return None;
            }
            let row = plan.run(Side::Q).row(query);
            let dout = lanes(&inputs.dout, row, head);
            let seen = given.keys.contains(&key);
            let lanes = if tensor == TensorName::Dv {
                scaled(&dout, given.weight)
            } else {
                let value = |key: usize| lanes(&inputs.v, plan.run(Side::Kv).row(key), wrong.head);
                let d: f64 = given.keys.clone().map(|key| dot(&dout, &value(key)) * given.weight).sum();
                let ds = given.weight * (dot(&dout, &value(key)) - d);
                scaled(&lanes(&inputs.q, row, head), scale * ds)
            };
            Some(Term { place: query, seen, lanes })
        };
        queries.filter_map(term).collect()
    }
}

/// Returns the number of elements to compare, if each of them is the rounded sum.
fn rounded(got: &[f32], sums: &[Sum], most: f64, format: Format) -> Option<usize> {
    // Each arm is compiled for its own format.
    match format {
        Format::Bf16 => rounded_to(got, sums, most, Format::Bf16),
        Format::Fp16 => rounded_to(got, sums, most, Format::Fp16),
        _ => rounded_to(got, sums, most, format),
    }
}

#[inline(always)]
fn rounded_to(got: &[f32], sums: &[Sum], most: f64, format: Format) -> Option<usize> {
    let elements = got.iter().zip(sums);
    let (compared, hold) = elements.fold((0, true), |(compared, hold), (got, sum)| {
        let is_asked = sum.magnitude < most;
        let holds = !is_asked | (f64::from(*got) == format.round(sum.value));
        (compared + usize::from(is_asked), hold & holds)
    });
    hold.then_some(compared)
}

fn add(sums: &mut [Sum], row: &[f32], factor: f64) {
    sums.iter_mut().zip(row).for_each(|(sum, x)| sum.add(factor * f64::from(*x)));
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
}

/// A query's or key's part in a gradient, and whether the mask lets it in.
struct Term {
    place: usize,
    seen: bool,
    lanes: Vec<f64>,
}

/// Whether a row is the sum of the terms that `taken` selects.
fn is_sum(terms: &[Term], got: &[f32], format: Format, taken: impl Fn(&Term) -> bool) -> bool {
    got.iter().enumerate().all(|(lane, got)| {
        let sum: f64 = terms.iter().filter(|term| taken(term)).map(|term| term.lanes[lane]).sum();
        format.round(sum) == f64::from(*got)
    })
}

/// Returns in words the keys that a query's dq was gathered from.
fn gathered(terms: &[Term], got: &[f32], format: Format) -> String {
    let right: Vec<usize> = terms.iter().map(|term| term.place).collect();
    for missing in &right {
        if is_sum(terms, got, format, |term| term.place != *missing) {
            let left: Vec<usize> = right.iter().copied().filter(|key| key != missing).collect();
            return format!("gathered from keys {left:?}, should be from {right:?}");
        }
    }
    format!("not what keys {right:?} give")
}

/// Returns in words the queries that a key received from.
fn received(plan: &ExactPlan<'_>, terms: &[Term], got: &[f32], format: Format) -> String {
    let right = span(terms.iter().filter(|term| term.seen));
    let inside = |range: &Range<usize>, term: &Term| range.contains(&term.place);
    let moved = (1..=plan.queries()).flat_map(|by| {
        [
            right.start.saturating_sub(by)..right.end,
            right.start + by..right.end,
            right.start..right.end.saturating_sub(by),
            right.start..right.end + by,
        ]
    });
    let within = |range: &Range<usize>| range.start <= range.end && range.end <= plan.queries();
    let mut moved = moved.filter(within).take(STORIES_MAX);
    let should = format!("should be from {}", queries_text(&right));
    if let Some(range) = moved.find(|range| is_sum(terms, got, format, |term| inside(range, term))) {
        return format!("received from {}, {should}", queries_text(&range));
    }
    let one = |query: usize| move |term: &Term| term.seen != (term.place == query);
    let single = terms.iter().map(|term| term.place).take(STORIES_MAX);
    match { single }.find(|query| is_sum(terms, got, format, one(*query))) {
        Some(query) if right.contains(&query) => format!("received nothing from query {query}, {should}"),
        Some(query) => format!("received from query {query} too, {should}"),
        None => format!("no set of queries gives this; {should}"),
    }
}

/// Largest number of sets of queries among which an explanation is sought.
const STORIES_MAX: usize = 4096;

/// Returns the range from the first query to the last.
fn span<'a>(terms: impl Iterator<Item = &'a Term> + Clone) -> Range<usize> {
    let first = terms.clone().map(|term| term.place).min().unwrap_or(0);
    first..terms.map(|term| term.place + 1).max().unwrap_or(first)
}

fn queries_text(range: &Range<usize>) -> String {
    if range.is_empty() { "no query".into() } else { format!("queries {}..{}", range.start, range.end) }
}

/// Checks that a sink without weight has no gradient.
fn sinks(got: &RankGradients) -> Option<Finding> {
    let wrong = |head: &usize| got.dsink[*head] != 0.0;
    let head = (0..got.dsink.len()).find(wrong)?;
    Some(Finding {
        place: Place { head: Some(head), ..Place::default() },
        got: Some(number(got.dsink[head])),
        expected: Some(number(0.0)),
        failed: (0..got.dsink.len()).filter(wrong).count(),
        compared: got.dsink.len(),
        ..Finding::new(Check::Exact, Some(TensorName::Dsink), "not 0, but the sink has no weight".into())
    })
}
