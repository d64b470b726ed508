//! Description of what queries see. A [`Sight`] holds one query's keys, and a [`QueryGroup`] consecutive queries that
//! one text describes.
//!
//! Queries form one group when each end of each range of keys either stays or moves as the query does:
//! `queries 4..64: i sees i−3..i+1`.

use std::fmt::Write;

use super::line::Line;

/// Everything that one query sees.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Sight {
    /// Position of the query.
    pub(super) query: usize,
    /// Keys of its own sequence that it sees.
    pub(super) keys: Vec<Line>,
    /// Keys that it sees more than once.
    pub(super) twice: Vec<Line>,
    /// Other rows that it sees, in words.
    pub(super) foreign: Vec<String>,
    /// Keys that it should see, where these differ.
    pub(super) should: Option<Vec<Line>>,
}

impl Sight {
    /// Whether the query sees what it should see, and each key once.
    pub(super) fn is_right(&self) -> bool {
        let as_it_should = self.should.as_ref().is_none_or(|should| *should == self.keys);
        as_it_should && self.twice.is_empty() && self.foreign.is_empty()
    }

    fn lines(&self) -> impl Iterator<Item = &Line> {
        self.keys.iter().chain(&self.twice).chain(self.should.iter().flatten())
    }

    fn ends(&self) -> impl Iterator<Item = usize> {
        self.lines().flat_map(|line| [line.start, line.end()])
    }

    /// Whether one text can describe both, apart from the ends of ranges.
    fn alike(&self, other: &Sight) -> bool {
        let counts =
            |sight: &Sight| (sight.keys.len(), sight.twice.len(), sight.should.as_ref().map(Vec::len));
        let steps = self.lines().map(|line| line.step).eq(other.lines().map(|line| line.step));
        steps && counts(self) == counts(other) && self.foreign == other.foreign
    }
}

/// A group of consecutive queries.
#[derive(Clone, Debug)]
pub(super) struct QueryGroup {
    first: Sight,
    queries: Line,
    /// Whether each end of a range moves with the query.
    moves: Vec<bool>,
}

impl QueryGroup {
    fn new(first: Sight) -> QueryGroup {
        let moves = first.ends().map(|_| false).collect();
        QueryGroup { queries: Line::new(first.query, 1, 1), first, moves }
    }

    /// Takes the next query into the group, if one text can describe it with the others. Ends that move are written
    /// as `i + …` where `moving` is set.
    fn take(&mut self, next: &Sight, moving: bool) -> bool {
        let Some(by) = next.query.checked_sub(self.first.query).filter(|by| *by > 0) else { return false };
        let second = self.queries.len == 1;
        let step = if second { by } else { self.queries.step };
        if self.queries.start + step * self.queries.len != next.query || !self.first.alike(next) {
            return false;
        }
        let shifts = self.first.ends().zip(next.ends()).map(|(a, b)| b as i64 - a as i64);
        let moves: Option<Vec<bool>> = shifts
            .map(|shift| match shift {
                0 => Some(false),
                shift if moving && shift == by as i64 => Some(true),
                _ => None,
            })
            .collect();
        let Some(moves) = moves.filter(|moves| second || *moves == self.moves) else { return false };
        self.moves = moves;
        self.queries = Line::new(self.queries.start, step, self.queries.len + 1);
        true
    }

    /// Returns the words of the group, such as `query 2 sees 3..20, should see 4..20`.
    pub(super) fn words(&self, of: &str) -> String {
        let mut ends = self.first.ends().zip(&self.moves).map(|(end, moves)| self.end(end, *moves));
        let mut ranges = |lines: &[Line]| {
            let range = |line: &Line| {
                let (start, end) = (ends.next().unwrap_or_default(), ends.next().unwrap_or_default());
                let step = if line.step > 1 { format!(" step {}", line.step) } else { String::new() };
                format!("{start}..{end}{step}")
            };
            let ranges: Vec<String> = lines.iter().map(range).collect();
            if ranges.is_empty() { "nothing".to_owned() } else { ranges.join(", ") }
        };
        let Sight { keys, twice, foreign, should, .. } = &self.first;
        let mut sees = ranges(keys);
        if !twice.is_empty() {
            let _ = write!(sees, ", {} more than once", ranges(twice));
        }
        if !foreign.is_empty() {
            let others = foreign.join(", ");
            sees = if keys.is_empty() { others } else { format!("{sees} and {others}") };
        }
        if let Some(should) = should {
            let _ = write!(sees, ", should see {}", ranges(should));
        }
        let queries = self.queries;
        match queries.len {
            1 => format!("query {}{of} sees {sees}", queries.start),
            _ if self.moves.contains(&true) => format!("queries {queries}{of}: i sees {sees}"),
            _ => format!("queries {queries}{of} see {sees}"),
        }
    }

    fn end(&self, end: usize, moves: bool) -> String {
        match end as i64 - self.first.query as i64 {
            _ if !moves => end.to_string(),
            0 => "i".to_owned(),
            by if by < 0 => format!("i−{}", -by),
            by => format!("i+{by}"),
        }
    }
}

/// Returns the groups of sights, which are in order of queries.
pub(super) fn groups(sights: impl IntoIterator<Item = Sight>, moving: bool) -> Vec<QueryGroup> {
    let mut groups: Vec<QueryGroup> = Vec::new();
    for sight in sights {
        if !groups.last_mut().is_some_and(|group| group.take(&sight, moving)) {
            groups.push(QueryGroup::new(sight));
        }
    }
    groups
}
