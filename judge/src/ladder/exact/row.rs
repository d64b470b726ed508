//! The right result of a query, for any set of keys that it might have seen.

use std::borrow::Cow;
use std::ops::Range;

use seamproof_oracle::envelope::WeightRounding;
use seamproof_oracle::{Format, Inputs, Intervals, Side};

use super::super::compare::lanes;
use crate::exact::{self, DEAD_LEVEL, ExactPlan, Merging, has_codes, is_uniform};

/// A set of keys: intervals, and perhaps one flipped key, which is in the set if it is not in them, and the other way
/// round.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct KeySet {
    pub(super) intervals: Intervals,
    pub(super) flipped: Option<usize>,
}

impl KeySet {
    pub(super) fn all(intervals: impl Into<Intervals>) -> KeySet {
        KeySet { intervals: intervals.into(), flipped: None }
    }

    fn contains(&self, key: usize) -> bool {
        self.intervals.contains(&key) != (self.flipped == Some(key))
    }

    /// Returns the key of the set that is in no interval.
    fn outside(&self) -> Option<usize> {
        self.flipped.filter(|key| !self.intervals.contains(key))
    }

    /// Returns the keys of the intervals that are in the set as ranges that are not empty, in order.
    fn inside(&self) -> impl Iterator<Item = Range<usize>> {
        let parts = self.intervals.parts().flat_map(|part| {
            let lost = self.flipped.filter(|key| part.contains(key));
            [part.start..lost.unwrap_or(part.end), lost.map_or(part.end, |key| key + 1)..part.end]
        });
        parts.filter(|part| !part.is_empty())
    }

    /// Returns the keys as ranges that are not empty, in order.
    pub(super) fn ranges(&self) -> Vec<Range<usize>> {
        let outside = self.outside().map(|key| key..key + 1);
        let mut parts: Vec<Range<usize>> = self.inside().chain(outside).collect();
        parts.sort_unstable_by_key(|part| part.start);
        parts
    }

    pub(super) fn len(&self) -> usize {
        self.inside().map(|part| part.len()).sum::<usize>() + usize::from(self.outside().is_some())
    }
}

impl std::fmt::Display for KeySet {
    /// Writes ranges, without their end.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut seen: Vec<String> =
            self.inside().map(|part| format!("{}..{}", part.start, part.end)).collect();
        seen.extend(self.outside().map(|key| key.to_string()));
        if seen.is_empty() {
            return f.write_str("no key");
        }
        write!(f, "keys {}", seen.join(" and "))
    }
}

/// Statistics of a row of weights, besides its output.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Shown {
    /// Largest logit, the sink included.
    pub(super) logit: f64,
    /// Largest logit of a key; −∞ without keys.
    pub(super) key_logit: f64,
    /// Sum of the weights relative to the largest; 0 for a row without keys and sink.
    pub(super) sum: f64,
    /// Number of keys that have a weight.
    pub(super) active: usize,
    /// Number of keys in all.
    pub(super) keys: usize,
}

impl Shown {
    /// Returns the LSE.
    pub(super) fn lse(&self) -> f64 {
        if self.sum == 0.0 { f64::NEG_INFINITY } else { self.logit + self.sum.ln() }
    }
}

/// Sums over the first keys of a sequence, for one weighting of them.
struct Sums {
    /// Weighted sums of values `[keys + 1, dv]`, row after row.
    values: Vec<f64>,
    weights: Vec<f64>,
    counts: Vec<usize>,
}

/// One KV head of a sequence.
pub(super) struct Head<'a> {
    pub(super) plan: &'a ExactPlan<'a>,
    pub(super) inputs: &'a Inputs,
    pub(super) kv_head: usize,
    levels: Vec<i32>,
    /// Sums in which every key counts 1.
    plain: Option<Sums>,
    /// Sums in which keys of the staircase count `2^level`, and the others nothing.
    stairs: Option<Sums>,
    sink: Option<f64>,
}

impl<'a> Head<'a> {
    pub(super) fn new(plan: &'a ExactPlan<'a>, inputs: &'a Inputs, kv_head: usize) -> Head<'a> {
        let mode = plan.problem.mode;
        let levels: Vec<i32> = match has_codes(mode) || is_uniform(mode) {
            true => Vec::new(),
            false => (0..plan.keys()).map(|key| plan.level(kv_head, key)).collect(),
        };
        let sink = exact::sink(plan.problem).map(f64::from);
        let mut head = Head { plan, inputs, kv_head, levels, plain: None, stairs: None, sink };
        head.plain = (!has_codes(mode)).then(|| head.sums(|_| 1.0));
        let weight = |key: usize| if head.is_step(key) { head.weight(key) } else { 0.0 };
        head.stairs = (!head.levels.is_empty()).then(|| head.sums(weight));
        head
    }

    fn is_step(&self, key: usize) -> bool {
        self.levels.get(key).is_some_and(|level| *level != DEAD_LEVEL)
    }

    /// Returns the weight of a step, `2^level`.
    fn weight(&self, key: usize) -> f64 {
        self.levels.get(key).map_or(1.0, |level| 2f64.powi(*level))
    }

    pub(super) fn value(&self, key: usize) -> Cow<'a, [f32]> {
        lanes(&self.inputs.v, self.plan.run(Side::Kv).row(key), self.kv_head)
    }

    fn sums(&self, weight: impl Fn(usize) -> f64) -> Sums {
        let dim = self.plan.problem.dims.v;
        let mut sums = Sums { values: vec![0.0; dim], weights: vec![0.0], counts: vec![0] };
        for key in 0..self.plan.keys() {
            let weight = weight(key);
            sums.weights.push(sums.weights[key] + weight);
            sums.counts.push(sums.counts[key] + usize::from(weight != 0.0));
            for (lane, value) in self.value(key).iter().enumerate() {
                sums.values.push(sums.values[key * dim + lane] + weight * f64::from(*value));
            }
        }
        sums
    }

    /// Returns what a query of a head shows that sees `keys`, and writes its output to `out`; `None` where nothing
    /// exact can be said.
    pub(super) fn row(&self, query: usize, head: usize, keys: &KeySet, out: &mut [f64]) -> Option<Shown> {
        out.fill(0.0);
        let count = keys.len();
        let empty = Shown {
            logit: self.sink.unwrap_or(f64::NEG_INFINITY),
            key_logit: f64::NEG_INFINITY,
            sum: if self.sink.is_some() { 1.0 } else { 0.0 },
            active: 0,
            keys: count,
        };
        match (count, &self.plain, &self.stairs) {
            (0, ..) => Some(empty),
            (_, None, _) => self.coded(query, head, keys, out),
            (_, Some(plain), None) => Some(self.uniform(plain, keys, out)),
            (_, Some(plain), Some(stairs)) => Some(self.stairs(plain, stairs, keys, empty, out)),
        }
    }

    fn coded(&self, query: usize, head: usize, keys: &KeySet, out: &mut [f64]) -> Option<Shown> {
        let chosen = self.plan.chosen(query, head);
        let active = chosen.clone().filter(|key| keys.contains(*key)).count();
        if active == 0 {
            return None;
        }
        for key in chosen.filter(|key| keys.contains(*key)) {
            for (out, value) in out.iter_mut().zip(&*self.value(key)) {
                *out += f64::from(*value) / active as f64;
            }
        }
        let logit = self.plan.code_logit();
        Some(Shown { logit, key_logit: logit, sum: active as f64, active, keys: keys.len() })
    }

    fn uniform(&self, plain: &Sums, keys: &KeySet, out: &mut [f64]) -> Shown {
        let count = keys.len();
        let sum = count as f64 + if self.sink.is_some() { 1.0 } else { 0.0 };
        self.gather(plain, keys, |_| 1.0, sum, out);
        Shown { logit: 0.0, key_logit: 0.0, sum, active: count, keys: count }
    }

    fn stairs(&self, plain: &Sums, stairs: &Sums, keys: &KeySet, empty: Shown, out: &mut [f64]) -> Shown {
        let scale = f64::from(self.plan.problem.softmax.scale);
        let level = |key: usize| Some(self.levels[key]).filter(|_| keys.contains(key));
        let top = keys.intervals.clone().chain(keys.flipped).filter_map(level).max().unwrap_or(DEAD_LEVEL);
        let key_logit = scale * f64::from(top);
        if top == DEAD_LEVEL {
            if self.sink.is_some() {
                return Shown { key_logit, ..empty };
            }
            let count = keys.len();
            self.gather(plain, keys, |_| 1.0, count as f64, out);
            return Shown { logit: key_logit, key_logit, sum: count as f64, active: count, keys: count };
        }
        // A sink acts as a key of level 0 without a value.
        let logit = self.sink.map_or(key_logit, |sink| sink.max(key_logit));
        let flipped = keys.flipped.filter(|key| self.is_step(*key));
        let sign = |key: usize| if keys.contains(key) { 1.0 } else { -1.0 };
        let parts = || keys.intervals.parts();
        let weights = parts().map(|part| stairs.weights[part.end] - stairs.weights[part.start]).sum::<f64>()
            + flipped.map_or(0.0, |key| sign(key) * self.weight(key));
        let total = weights + if self.sink.is_some() { 1.0 } else { 0.0 };
        let weight = |key: usize| if self.is_step(key) { self.weight(key) } else { 0.0 };
        self.gather(stairs, keys, weight, total, out);
        let active =
            parts().map(|part| stairs.counts[part.end] - stairs.counts[part.start]).sum::<usize>() + 1;
        Shown { logit, key_logit, sum: total / 2f64.powi(top.max(0)), active, keys: keys.len() }
    }

    /// Writes `Σ weight · v / total` over the keys to `out`.
    fn gather(&self, sums: &Sums, keys: &KeySet, weight: impl Fn(usize) -> f64, total: f64, out: &mut [f64]) {
        let dim = out.len();
        out.fill(0.0);
        for part in keys.intervals.parts() {
            let (first, end) = (part.start * dim, part.end * dim);
            let sums = sums.values[end..end + dim].iter().zip(&sums.values[first..first + dim]);
            out.iter_mut().zip(sums).for_each(|(out, (end, first))| *out += end - first);
        }
        if let Some(key) = keys.flipped {
            let factor = if keys.contains(key) { weight(key) } else { -weight(key) };
            out.iter_mut().zip(&*self.value(key)).for_each(|(out, v)| *out += factor * f64::from(*v));
        }
        out.iter_mut().for_each(|out| *out /= total);
    }
}

/// Right results of one row: an interval around each exact value.
#[derive(Clone, Copy, Debug)]
pub(super) struct Allowed {
    /// Smallest and largest factor between the right out and the exact one: that of weights that were rounded after
    /// they were normalised.
    factor: (f64, f64),
    /// Allowed relative error of an element of out.
    relative: f64,
    /// Allowed absolute error of an element of out, besides the relative one.
    absolute: f64,
    format: Format,
    /// Allowed absolute error of the LSE.
    lse: f64,
}

impl Allowed {
    pub(super) fn new(
        plan: &ExactPlan<'_>,
        shown: &Shown,
        merging: Merging,
        weights: WeightRounding,
    ) -> Allowed {
        let (mode, format) = (plan.problem.mode, plan.problem.precision.out.format);
        let Shown { logit, active, keys, .. } = *shown;
        if shown.sum == 0.0 {
            return Allowed { factor: (1.0, 1.0), relative: 0.0, absolute: 0.0, format, lse: 0.0 };
        }
        let partial = plan.partial_lse(logit, keys);
        let (relative, merged) = exact::out_error(mode, logit, active, partial, merging);
        let largest = f64::from(exact::COUNT_VALUE.max(exact::TABLE_MAX));
        let (relative, absolute) =
            if is_uniform(mode) { (relative, merged * largest) } else { (relative + merged, 0.0) };
        let (factor, added) = match weights {
            WeightRounding::BeforeNormalisation => ((1.0, 1.0), 0.0),
            _ => exact::normalised(mode, plan.problem, (shown.sum, logit, active), largest),
        };
        Allowed {
            factor,
            relative,
            absolute: absolute + added + exact::difference_error(mode, merging),
            format,
            lse: exact::lse_error(mode, logit, shown.lse(), active, partial, merging),
        }
    }

    /// Returns the smallest and the largest right element of out.
    pub(super) fn out(&self, exact: f64) -> (f64, f64) {
        let ends = [exact * self.factor.0, exact * self.factor.1];
        let (least, largest) = (ends[0].min(ends[1]), ends[0].max(ends[1]));
        let error = self.relative * least.abs().max(largest.abs()) + self.absolute;
        (self.format.round(least - error), self.format.round(largest + error))
    }

    pub(super) fn holds_out(&self, got: f32, exact: f64) -> bool {
        let (least, largest) = self.out(exact);
        (least..=largest).contains(&f64::from(got))
    }

    pub(super) fn holds_lse(&self, got: f32, exact: f64) -> bool {
        let got = f64::from(got);
        got == exact || (got - exact).abs() <= self.lse
    }
}
