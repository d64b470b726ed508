//! A [`Line`] is a list of positions, or rows, at equal steps. This module also has sorted lists of lines; `a..b` is
//! without b.

use std::fmt;
use std::ops::Range;

/// Values `start, start + step, …`, `len` of them. The step is 1 where there are fewer than two.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Line {
    pub(super) start: usize,
    pub(super) step: usize,
    pub(super) len: usize,
}

impl Line {
    pub(super) fn new(start: usize, step: usize, len: usize) -> Line {
        Line { start, step: if len > 1 { step } else { 1 }, len }
    }

    pub(super) fn range(range: Range<usize>) -> Line {
        Line::new(range.start, 1, range.len())
    }

    pub(super) fn at(&self, index: usize) -> usize {
        self.start + self.step * index
    }

    pub(super) fn end(&self) -> usize {
        if self.len == 0 { self.start } else { self.at(self.len - 1) + 1 }
    }

    pub(super) fn contains(&self, value: usize) -> bool {
        (self.start..self.end()).contains(&value) && (value - self.start).is_multiple_of(self.step)
    }

    /// Returns the part of the line within a range.
    pub(super) fn within(&self, range: &Range<usize>) -> Line {
        let first = range.start.saturating_sub(self.start).div_ceil(self.step).min(self.len);
        let last = range.end.saturating_sub(self.start).div_ceil(self.step).clamp(first, self.len);
        Line::new(self.at(first), self.step, last - first)
    }

    /// Whether any value is on both lines.
    pub(super) fn meets(&self, other: &Line) -> bool {
        let shared = self.within(&(other.start..other.end()));
        // Residues repeat after `other.step` values, so no more of them need a look.
        (0..shared.len.min(other.step)).any(|index| other.contains(shared.at(index)))
    }

    pub(super) fn values(self) -> impl Iterator<Item = usize> {
        (0..self.len).map(move |index| self.at(index))
    }
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}..{}", self.start, self.end())?;
        if self.step > 1 { write!(f, " step {}", self.step) } else { Ok(()) }
    }
}

/// Returns the lines sorted, without empty ones, and with consecutive ones joined.
pub(super) fn tidy(mut lines: Vec<Line>) -> Vec<Line> {
    lines.retain(|line| line.len > 0);
    lines.sort_unstable();
    let mut joined: Vec<Line> = Vec::with_capacity(lines.len());
    for line in lines {
        match joined.last_mut() {
            Some(last) if last.step == line.step && last.at(last.len) == line.start => last.len += line.len,
            _ => joined.push(line),
        }
    }
    joined
}

/// Returns the values that are on any of the lines, as ranges, and those that are on several.
pub(super) fn union(lines: &[Line]) -> [Vec<Line>; 2] {
    let ranges = lines.iter().flat_map(|line| {
        let (apart, whole) = if line.step > 1 { (Some(*line), None) } else { (None, Some(*line)) };
        let single = apart.into_iter().flat_map(Line::values).map(|value| (value, value + 1));
        single.chain(whole.map(|line| (line.start, line.end())))
    });
    let mut ends: Vec<(usize, isize)> = ranges.flat_map(|(start, end)| [(start, 1), (end, -1)]).collect();
    ends.sort_unstable();
    let (mut any, mut several) = (Vec::new(), Vec::new());
    let mut depth = 0;
    for pair in ends.windows(2) {
        depth += pair[0].1;
        let line = Line::range(pair[0].0..pair[1].0);
        if depth > 0 {
            any.push(line);
        }
        if depth > 1 {
            several.push(line);
        }
    }
    [tidy(any), tidy(several)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn within_and_meets_are_what_they_say() {
        for (start, step, len) in
            (0..4).flat_map(|s| (1..4).flat_map(move |d| (0..5).map(move |n| (s, d, n))))
        {
            let line = Line::new(start, step, len);
            let values: Vec<usize> = line.values().collect();
            for (from, to) in (0..9).flat_map(|a| (a..12).map(move |b| (a, b))) {
                let inside: Vec<usize> = line.within(&(from..to)).values().collect();
                let expected: Vec<usize> =
                    values.iter().copied().filter(|v| (from..to).contains(v)).collect();
                assert_eq!(inside, expected, "{line:?} in {from}..{to}");
                for other in [Line::new(from, 1, to - from), Line::new(from, 3, to - from)] {
                    let shared = other.values().any(|value| values.contains(&value));
                    assert_eq!(line.meets(&other), shared, "{line:?} {other:?}");
                }
            }
        }
    }

    #[test]
    fn a_union_counts_what_is_there_twice() {
        let lines = [Line::new(0, 2, 3), Line::new(1, 2, 2), Line::new(4, 1, 3)];
        assert_eq!(union(&lines), [vec![Line::new(0, 1, 7)], vec![Line::new(4, 1, 1)]]);
        assert_eq!(union(&[]), [vec![], vec![]]);
    }
}
