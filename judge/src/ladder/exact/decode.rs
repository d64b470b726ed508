//! Explanation of a wrong row: the set of keys that it shows, the sets nearest to the right one first.

use std::borrow::Cow;

use seamproof_oracle::envelope::WeightRounding;
use seamproof_oracle::{InputMode, Intervals};

use super::super::stories::{LANES_MIN, WORK_MAX, other_heads};
use super::row::{Allowed, Head, KeySet, Shown};
use crate::exact::{ExactPlan, Merging};

/// A row of results, and the place that it belongs to.
pub(super) struct Row<'a> {
    pub(super) head: &'a Head<'a>,
    pub(super) query: usize,
    pub(super) query_head: usize,
    pub(super) lse: Option<f32>,
    pub(super) out: Option<Cow<'a, [f32]>>,
    pub(super) merging: Merging,
    pub(super) weights: WeightRounding,
}

impl Row<'_> {
    /// Returns what a query that sees `keys` of a KV head shows, if it is this row.
    fn shown(&self, head: &Head<'_>, keys: &KeySet, scratch: &mut [f64]) -> Option<Shown> {
        let shown = head.row(self.query, self.query_head, keys, scratch)?;
        let allowed = Allowed::new(head.plan, &shown, self.merging, self.weights);
        let lse = self.lse.is_none_or(|lse| allowed.holds_lse(lse, shown.lse()));
        let out = |out: &Cow<'_, [f32]>| {
            out.iter().zip(&*scratch).all(|(got, right)| allowed.holds_out(*got, *right))
        };
        (lse && self.out.as_ref().is_none_or(out)).then_some(shown)
    }

    /// Whether a set of keys explains the row.
    pub(super) fn is_of(&self, keys: &KeySet) -> bool {
        self.shown(self.head, keys, &mut vec![0.0; self.head.plan.problem.dims.v]).is_some()
    }

    /// Returns the set of keys nearest to `right` that explains the row.
    fn saw(&self, right: &KeySet) -> Option<KeySet> {
        let mut left = WORK_MAX;
        self.search(right, &mut left)
    }

    /// Returns the same with at most `left` sets times lanes, and takes what was looked at from it.
    pub(super) fn search(&self, right: &KeySet, left: &mut usize) -> Option<KeySet> {
        let mut scratch = vec![0.0; self.head.plan.problem.dims.v];
        let lanes = scratch.len().max(1);
        let mut sets = sets(right, self.head.plan.keys()).take(WORK_MAX.min(*left) / lanes);
        sets.find(|keys| {
            *left -= lanes;
            self.shown(self.head, keys, &mut scratch).is_some()
        })
    }

    /// Returns the KV head other than its own whose keys in `right` explain the row, if they have a weight. A row
    /// without weights looks alike for all heads. Where keys have codes, no query can read another head.
    fn saw_head(&self, right: &KeySet) -> Option<usize> {
        let Head { plan, inputs, kv_head, .. } = *self.head;
        if crate::exact::has_codes(plan.problem.mode) {
            return None;
        }
        let mut scratch = vec![0.0; plan.problem.dims.v];
        let mut others = other_heads(plan.problem, kv_head, plan.keys() * scratch.len());
        others.find(|&other| {
            let shown = self.shown(&Head::new(plan, inputs, other), right, &mut scratch);
            shown.is_some_and(|shown| shown.active > 0)
        })
    }

    /// Returns the number of keys that the LSE counts, where all have the same weight.
    fn count(&self) -> Option<f64> {
        let mode = self.head.plan.problem.mode;
        let sink = crate::exact::sink(self.head.plan.problem).map_or(0.0, |_| 1.0);
        let lse = f64::from(self.lse.filter(|_| crate::exact::is_uniform(mode))?);
        Some(lse.exp().round() - sink).filter(|count| count.is_finite())
    }

    /// Returns the key whose value the row holds, anywhere in the problem; `None` where the row holds that of its own
    /// key.
    pub(super) fn read(&self, plans: &[ExactPlan<'_>]) -> Option<(usize, usize, usize)> {
        let out = self.out.as_ref()?;
        let mut own = self.head.plan.chosen(self.query, self.query_head);
        if own.any(|key| *self.head.value(key) == **out) {
            return None;
        }
        let kv_heads = self.head.plan.problem.heads.kv;
        let places = plans.iter().enumerate().flat_map(|(sequence, plan)| {
            (0..kv_heads).flat_map(move |head| (0..plan.keys()).map(move |key| (sequence, head, key)))
        });
        let holds = |&(sequence, head, key): &(usize, usize, usize)| {
            let plan = &plans[sequence];
            let row = plan.run(seamproof_oracle::Side::Kv).row(key);
            let inputs = self.head.inputs;
            out.iter().enumerate().all(|(lane, got)| *got == inputs.v[[row, head, lane]])
        };
        places.take(WORK_MAX / out.len().max(1)).find(holds)
    }
}

/// Returns sets of keys of a sequence other than `right`: moved edges of the window (nearer ones first), each interval
/// alone, one key flipped, no key, and all intervals.
fn sets(right: &KeySet, count: usize) -> impl Iterator<Item = KeySet> {
    let mut parts = right.intervals.parts();
    let window = parts.next_back().unwrap_or(0..0);
    let before = parts.next().unwrap_or(0..0);
    let ((start, end), intervals) = ((window.start, window.end), right.intervals.clone());
    let alone =
        [window, before.clone()].into_iter().filter(|_| !right.intervals.gap().is_empty()).map(KeySet::all);
    let moved = (1..=count).flat_map(move |by| {
        let edges = [
            (start.checked_sub(by), Some(end)),
            (start.checked_add(by), Some(end)),
            (Some(start), end.checked_sub(by)),
            (Some(start), end.checked_add(by)),
            (start.checked_sub(by), end.checked_sub(by)),
            (start.checked_add(by), end.checked_add(by)),
        ];
        let before = before.clone();
        let range = move |(start, end): (Option<usize>, Option<usize>)| {
            let (start, end) = (start?, end?);
            let fits = start < end && end <= count && before.start <= start;
            fits.then(|| KeySet::all(Intervals::new(before.clone(), start..end)))
        };
        edges.into_iter().filter_map(range).collect::<Vec<_>>()
    });
    let single = (0..count).map(move |key| KeySet { intervals: intervals.clone(), flipped: Some(key) });
    let any = (0..count).flat_map(move |start| (start + 1..=count).map(move |end| KeySet::all(start..end)));
    moved.chain(alone).chain(single).chain([KeySet::all(0..0)]).chain(any)
}

/// Returns in words what a wrong row shows and what it should show, and whether another head, some set of keys, or
/// another key explains it.
pub(super) fn story(row: &Row<'_>, plans: &[ExactPlan<'_>], right: &KeySet) -> (String, bool) {
    let own = row.head.kv_head;
    // A row of one number or a few matches some head's by chance.
    let is_wide = row.head.plan.problem.dims.v >= LANES_MIN;
    let of_head = || {
        let (other, saw) = (row.saw_head(right)?, if is_wide { "saw" } else { "as if it saw" });
        Some(format!("{saw} {right} of KV head {other}; should see those of its own, KV head {own}"))
    };
    let of_keys = || Some(format!("saw {}, should see {right}", row.saw(right)?));
    let seen = if is_wide { of_head().or_else(of_keys) } else { of_keys().or_else(of_head) };
    if let Some(seen) = seen {
        return (seen, true);
    }
    let mode = row.head.plan.problem.mode;
    let chosen = KeySet::all(row.head.plan.chosen(row.query, row.query_head));
    if mode == InputMode::Routing
        && let Some((sequence, head, key)) = row.read(plans)
    {
        let read = format!("key {key} of sequence {sequence}, KV head {head}");
        return (format!("read {read}; should read {chosen} of its own, KV head {own}"), true);
    }
    let what = match row.count() {
        Some(count) if count != right.len() as f64 => {
            format!("saw {count} keys, should see {} ({right})", right.len())
        }
        _ if crate::exact::has_codes(mode) => {
            format!("no set of keys shows this; should see {right} and read {chosen}")
        }
        _ => format!("no set of keys shows this; should see {right}"),
    };
    (what, false)
}
