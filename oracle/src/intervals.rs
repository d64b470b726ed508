//! Numbers in at most two intervals: the keys that a query sees.

use std::fmt;
use std::ops::Range;

/// Numbers in at most two intervals, in ascending order. As an iterator it yields them, like a range.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Intervals {
    /// The intervals. They do not touch, and one that is empty is `0..0` and last.
    parts: [Range<usize>; 2],
}

impl Intervals {
    /// Returns the numbers of two ranges, of which the first begins no later than the second if neither is empty.
    pub fn new(first: Range<usize>, second: Range<usize>) -> Intervals {
        let parts = match (first.is_empty(), second.is_empty()) {
            (true, true) => [0..0, 0..0],
            (false, true) => [first, 0..0],
            (true, false) => [second, 0..0],
            _ if second.start <= first.end => [first.start..first.end.max(second.end), 0..0],
            _ => [first, second],
        };
        Intervals { parts }
    }

    /// Returns the intervals that have numbers, in order.
    pub fn parts(&self) -> impl DoubleEndedIterator<Item = Range<usize>> + use<> {
        self.parts.clone().into_iter().filter(|part| !part.is_empty())
    }

    /// Returns the range from the first number to the last. It is `0..0` where there is none.
    pub fn hull(&self) -> Range<usize> {
        let [first, second] = &self.parts;
        first.start..if second.is_empty() { first.end } else { second.end }
    }

    /// Returns the numbers between two intervals; `0..0` where there is one or none.
    pub fn gap(&self) -> Range<usize> {
        let [first, second] = &self.parts;
        if second.is_empty() { 0..0 } else { first.end..second.start }
    }

    /// Whether there are no numbers.
    pub fn is_empty(&self) -> bool {
        self.parts[0].is_empty()
    }

    /// Whether a number is among these.
    pub fn contains(&self, number: &usize) -> bool {
        self.parts.iter().any(|part| part.contains(number))
    }

    /// Returns these intervals with each end moved to where `to` takes it. A larger end must not be taken to a smaller
    /// one.
    pub fn moved(&self, to: impl Fn(usize) -> usize) -> Intervals {
        let [first, second] =
            self.parts.clone().map(|part| if part.is_empty() { 0..0 } else { to(part.start)..to(part.end) });
        Intervals::new(first, second)
    }
}

impl fmt::Display for Intervals {
    /// Writes the intervals without their ends: `0..2 and 5..9`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts: Vec<String> = self.parts().map(|part| format!("{part:?}")).collect();
        f.write_str(&parts.join(" and "))
    }
}

impl From<Range<usize>> for Intervals {
    fn from(range: Range<usize>) -> Intervals {
        Intervals::new(range, 0..0)
    }
}

impl Iterator for Intervals {
    type Item = usize;

    fn next(&mut self) -> Option<usize> {
        let next = self.parts[0].next();
        if self.parts[0].is_empty() {
            self.parts = [std::mem::take(&mut self.parts[1]), 0..0];
        }
        next
    }

    fn nth(&mut self, n: usize) -> Option<usize> {
        let first = self.parts[0].len();
        if n < first {
            self.parts[0].start += n;
            return self.next();
        }
        self.parts = [std::mem::take(&mut self.parts[1]), 0..0];
        let next = self.parts[0].nth(n - first);
        *self = Intervals::from(self.parts[0].clone());
        next
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let len = self.parts.iter().map(Range::len).sum();
        (len, Some(len))
    }

    /// Goes through each interval by itself, which is several times as fast as asking for one number after the other.
    fn fold<B, F: FnMut(B, usize) -> B>(self, init: B, mut f: F) -> B {
        self.parts.into_iter().fold(init, |all, part| part.fold(all, &mut f))
    }
}

impl DoubleEndedIterator for Intervals {
    fn next_back(&mut self) -> Option<usize> {
        let last = usize::from(!self.parts[1].is_empty());
        let next = self.parts[last].next_back();
        if self.parts[last].is_empty() {
            self.parts[last] = 0..0;
        }
        next
    }
}

impl ExactSizeIterator for Intervals {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_yield_their_numbers_from_both_ends() {
        let ranges = || (0..5usize).flat_map(|start| (start..6usize).map(move |end| start..end));
        for (first, second) in ranges().flat_map(|first| ranges().map(move |second| (first.clone(), second)))
        {
            if !first.is_empty() && !second.is_empty() && first.start > second.start {
                continue;
            }
            let numbers: Vec<usize> = (0..6).filter(|n| first.contains(n) || second.contains(n)).collect();
            let all = Intervals::new(first, second);
            assert!(
                all.clone().eq(numbers.iter().copied())
                    && all.clone().rev().eq(numbers.iter().rev().copied())
            );
            let mut folded = Vec::new();
            all.clone().for_each(|n| folded.push(n));
            assert_eq!(folded, numbers);
            assert_eq!((all.len(), all.is_empty()), (numbers.len(), numbers.is_empty()));
            assert!((0..7).all(|n| all.clone().nth(n) == numbers.get(n).copied()), "{all:?}");
            assert!((0..7).all(|n| all.contains(&n) == numbers.contains(&n)), "{all:?}");
            assert!(all.hull().filter(|n| !all.gap().contains(n)).eq(numbers.iter().copied()), "{all:?}");
            let halves: Vec<usize> =
                numbers.iter().copied().filter(|n| (2..5).contains(n)).map(|n| n - 2).collect();
            assert!(all.moved(|n| n.clamp(2, 5) - 2).eq(halves), "{all:?}");
            let mut rest = all.clone();
            rest.next();
            rest.next_back();
            let inner = numbers.get(1..numbers.len().saturating_sub(1)).unwrap_or_default();
            assert!(rest.clone().eq(inner.iter().copied()) && rest.is_empty() == inner.is_empty(), "{all:?}");
        }
    }
}
