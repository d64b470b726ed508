//! The mask: for each query one interval of visible keys.
//!
//! With `lq` real queries and `lk` real keys of a sequence, let `shift = 0` ([`Alignment::TopLeft`]) or
//! `shift = lk − lq` ([`Alignment::BottomRight`]). Key `j` is visible to query `i` iff `0 ≤ j < lk` and
//! `i + shift − left ≤ j ≤ i + shift + right`. Both bounds are inclusive and either may be absent (unbounded).
//! A causal mask is `right = 0`. Only real lengths enter: padding is never visible and never moves the diagonal.

use std::ops::Range;

use serde::{Deserialize, Serialize};

/// Which corner of the query × key rectangle the diagonal runs through.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Alignment {
    /// Query 0 sits on key 0.
    TopLeft,
    /// The last real query sits on the last real key, for each sequence by itself.
    BottomRight,
}

/// One interval of visible keys per query; see the module's text for the exact rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mask {
    /// Keys visible to the left of the diagonal, the diagonal not counted; absent means unbounded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub left: Option<u32>,
    /// Keys visible to the right of the diagonal; absent means unbounded, 0 means causal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub right: Option<u32>,
    /// Where the diagonal lies when query and key lengths differ.
    pub align: Alignment,
}

impl Mask {
    /// Every real key is visible.
    pub const FULL: Mask = Mask { left: None, right: None, align: Alignment::TopLeft };
    /// Causal with query 0 on key 0.
    pub const CAUSAL: Mask = Mask { left: None, right: Some(0), align: Alignment::TopLeft };

    /// How far the diagonal is moved to the right for a sequence of `lq` queries and `lk` keys.
    pub fn shift(&self, lq: usize, lk: usize) -> i64 {
        match self.align {
            Alignment::TopLeft => 0,
            Alignment::BottomRight => lk as i64 - lq as i64,
        }
    }

    /// The keys that query `i` sees, in a sequence of `lq` queries and `lk` keys; empty ranges are `0..0`.
    pub fn visible(&self, i: usize, lq: usize, lk: usize) -> Range<usize> {
        let diagonal = i as i64 + self.shift(lq, lk);
        let first = self.left.map_or(0, |left| diagonal - i64::from(left)).max(0);
        let last = self.right.map_or(i64::MAX, |right| diagonal + i64::from(right)).min(lk as i64 - 1);
        if first > last { 0..0 } else { first as usize..last as usize + 1 }
    }

    /// Visible (query, key) pairs of a sequence of `lq` queries and `lk` keys.
    pub fn pairs(&self, lq: usize, lk: usize) -> u64 {
        (0..lq).map(|i| self.visible(i, lq, lk).len() as u64).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The rule of the module's text, pair by pair, in the most literal form.
    fn sees(mask: &Mask, i: i64, j: i64, lq: i64, lk: i64) -> bool {
        let shift = if mask.align == Alignment::BottomRight { lk - lq } else { 0 };
        let above = mask.left.is_none_or(|left| i + shift - i64::from(left) <= j);
        let below = mask.right.is_none_or(|right| j <= i + shift + i64::from(right));
        (0..lk).contains(&j) && above && below
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
