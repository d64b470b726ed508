//! The mask: a band of visible pairs for each sequence, and with the band one interval of visible keys for each query.
//!
//! With `lq` real queries and `lk` real keys of a sequence, let `shift = 0` ([`Alignment::TopLeft`]) or
//! `shift = lk − lq` ([`Alignment::BottomRight`]). Key `j` is visible to query `i` iff `0 ≤ j < lk` and
//! `shift − left ≤ j − i ≤ shift + right`. Both bounds are inclusive and either may be absent (unbounded).
//! A causal mask is `right = 0`. Only real lengths enter: padding is never visible and never moves the diagonal.
//!
//! [`Mask::band`] alone states this rule, for one sequence. All other code calls [`Mask::band`] or [`Mask::visible`] to
//! learn what is visible.

use std::ops::Range;

use serde::{Deserialize, Serialize};

/// The corner of the query × key rectangle that the diagonal runs through.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Alignment {
    /// Query 0 sits on key 0.
    TopLeft,
    /// The last real query sits on the last real key, in each sequence by itself.
    BottomRight,
}

/// A mask: one interval of visible keys for each query, by the rule in the module's text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mask {
    /// Keys visible to the left of the diagonal, the diagonal not counted; absent means unbounded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub left: Option<u32>,
    /// Keys visible to the right of the diagonal; absent means unbounded, 0 means causal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub right: Option<u32>,
    /// The place of the diagonal where query and key lengths differ.
    pub align: Alignment,
}

/// The pairs of a query `i` and a key `j` of one sequence with `lo ≤ j − i ≤ hi`; an absent bound holds for every pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Band {
    /// The least `j − i`.
    pub lo: Option<i64>,
    /// The largest `j − i`.
    pub hi: Option<i64>,
}

impl Band {
    /// Returns the band with queries and keys exchanged.
    pub fn transposed(self) -> Band {
        Band { lo: self.hi.map(|hi| -hi), hi: self.lo.map(|lo| -lo) }
    }

    /// Returns the end, among `keys` keys, of those that do not lie to the right of the band in row `i`.
    pub fn end(self, i: usize, keys: usize) -> usize {
        self.hi.map_or(keys, |hi| (i as i64 + hi + 1).clamp(0, keys as i64) as usize)
    }

    /// Returns the keys that query `i` sees in a sequence of `keys` keys. Empty ranges are `0..0`.
    pub fn keys(self, i: usize, keys: usize) -> Range<usize> {
        let first = self.lo.map_or(0, |lo| (i as i64 + lo).max(0) as usize);
        let end = self.end(i, keys);
        if first < end { first..end } else { 0..0 }
    }

    /// Returns the queries that see any key, in a sequence of `queries` queries and `keys` keys. Empty ranges are
    /// `0..0`.
    pub fn seeing(self, queries: usize, keys: usize) -> Range<usize> {
        let none = keys == 0 || self.lo.zip(self.hi).is_some_and(|(lo, hi)| lo > hi);
        let first = self.hi.map_or(0, |hi| (-hi).max(0) as usize);
        let end = self.transposed().end(keys.saturating_sub(1), queries);
        if none || first >= end { 0..0 } else { first..end }
    }
}

impl Mask {
    /// The mask that shows every real key.
    pub const FULL: Mask = Mask { left: None, right: None, align: Alignment::TopLeft };
    /// The causal mask with query 0 on key 0.
    pub const CAUSAL: Mask = Mask { left: None, right: Some(0), align: Alignment::TopLeft };

    /// Returns how far the diagonal is moved to the right, for a sequence of `lq` queries and `lk` keys.
    pub fn shift(&self, lq: usize, lk: usize) -> i64 {
        match self.align {
            Alignment::TopLeft => 0,
            Alignment::BottomRight => lk as i64 - lq as i64,
        }
    }

    /// Whether the keys that a query sees end at the diagonal.
    pub fn is_causal(&self) -> bool {
        self.right == Some(0)
    }

    /// Returns the visible pairs of a sequence of `lq` queries and `lk` keys.
    pub fn band(&self, lq: usize, lk: usize) -> Band {
        let shift = self.shift(lq, lk);
        Band {
            lo: self.left.map(|left| shift - i64::from(left)),
            hi: self.right.map(|right| shift + i64::from(right)),
        }
    }

    /// Returns the keys that query `i` sees in a sequence of `lq` queries and `lk` keys. Empty ranges are `0..0`.
    pub fn visible(&self, i: usize, lq: usize, lk: usize) -> Range<usize> {
        self.band(lq, lk).keys(i, lk)
    }

    /// Returns the number of visible (query, key) pairs of a sequence of `lq` queries and `lk` keys.
    pub fn pairs(&self, lq: usize, lk: usize) -> u64 {
        (0..lq).map(|i| self.visible(i, lq, lk).len() as u64).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether query `i` sees key `j`, by the rule of the module's text in its most literal form.
    fn sees(mask: &Mask, i: i64, j: i64, lq: i64, lk: i64) -> bool {
        let shift = if mask.align == Alignment::BottomRight { lk - lq } else { 0 };
        let above = mask.left.is_none_or(|left| i + shift - i64::from(left) <= j);
        let below = mask.right.is_none_or(|right| j <= i + shift + i64::from(right));
        (0..lk).contains(&j) && above && below
    }

    #[test]
    fn queries_that_see_a_key_are_the_rule_for_every_small_band() {
        let bounds = || std::iter::once(None).chain((-6..=6).map(Some));
        for band in bounds().flat_map(|lo| bounds().map(move |hi| Band { lo, hi })) {
            let Band { lo, hi } = band;
            let sees = |i: usize, j: usize| {
                let distance = j as i64 - i as i64;
                lo.is_none_or(|lo| lo <= distance) && hi.is_none_or(|hi| distance <= hi)
            };
            for (lq, lk) in (0..5usize).flat_map(|a| (0..5usize).map(move |b| (a, b))) {
                for j in 0..lk {
                    let queries = (0..lq).filter(|&i| sees(i, j));
                    assert!(band.transposed().keys(j, lq).eq(queries), "{band:?} lq {lq} lk {lk} key {j}");
                }
                let seeing = (0..lq).filter(|&i| (0..lk).any(|j| sees(i, j)));
                assert!(band.seeing(lq, lk).eq(seeing), "{band:?} lq {lq} lk {lk}");
            }
        }
    }

    #[test]
    fn the_interval_is_the_rule_for_every_small_case() {
        let sides = [None, Some(0), Some(1), Some(2), Some(5), Some(u32::MAX)];
        for align in [Alignment::TopLeft, Alignment::BottomRight] {
            for (left, right) in sides.into_iter().flat_map(|l| sides.map(|r| (l, r))) {
                let mask = Mask { left, right, align };
                for (lq, lk) in (0..7usize).flat_map(|a| (0..7usize).map(move |b| (a, b))) {
                    for i in 0..lq {
                        let seen: Vec<_> = mask.visible(i, lq, lk).collect();
                        let rule: Vec<_> = (0..lk)
                            .filter(|&j| sees(&mask, i as i64, j as i64, lq as i64, lk as i64))
                            .collect();
                        assert_eq!(seen, rule, "{mask:?} lq {lq} lk {lk} query {i}");
                    }
                }
            }
        }
    }
}
