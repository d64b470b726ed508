//! The keys that the queries of launches see, as positions, and their comparison with the mask.

use std::collections::BTreeMap;
use std::ops::Range;

use seamproof_oracle::{Intervals, Mask, Problem};
use seamproof_simulator::Segment;
use seamproof_simulator::check::{Held, HeldRows, Reading};

use super::line::{Line, tidy, union};
use super::sight::{QueryGroup, Sight, groups};

/// Largest number of pieces of keys, each counted for each query, that are compared with the mask query by query.
const COMPARED_MAX: usize = 1 << 20;

/// A piece of a reading's queries: positions of one sequence, for some heads.
pub(super) struct Queries {
    pub(super) at: usize,
    pub(super) sequence: usize,
    pub(super) positions: Line,
    pub(super) heads: Range<usize>,
}

/// Returns the pieces of a reading's query rows that hold queries.
pub(super) fn queries(reading: &Reading) -> impl Iterator<Item = Queries> {
    reading.queries.iter().filter_map(|held| match &held.holds {
        HeldRows::Positions { sequence, start, step, heads } => Some(Queries {
            at: held.at,
            sequence: *sequence,
            positions: Line::new(*start, *step, held.len),
            heads: heads.clone(),
        }),
        HeldRows::Other(_) => None,
    })
}

/// A reading of a segment, with the problem and the segment.
#[derive(Clone, Copy)]
pub(super) struct Sighting<'a> {
    pub(super) problem: &'a Problem,
    pub(super) segment: &'a Segment,
    pub(super) reading: &'a Reading,
}

impl Sighting<'_> {
    /// Returns the keys that belong to the queries' sequence and heads.
    pub(super) fn own_keys(&self, queries: &Queries) -> Vec<Line> {
        let keys = self.reading.keys.iter().filter_map(|held| self.own(queries, held, 0..held.len));
        tidy(keys.collect())
    }

    /// Returns what query `index` of a piece sees. It should see what the mask shows it of `own`, the keys from
    /// [`Sighting::own_keys`].
    pub(super) fn sight(&self, queries: &Queries, index: usize, own: &[Line]) -> Sight {
        let query = queries.positions.at(index);
        let (keys, foreign) = self.seen(queries, index);
        let shown = shown(self.problem, queries.sequence, query);
        let should = shown.parts().flat_map(|part| own.iter().map(move |line| line.within(&part)));
        let should = tidy(should.collect());
        let should = (should != keys || !foreign.is_empty()).then_some(should);
        Sight { query, keys, twice: Vec::new(), foreign, should }
    }

    /// Returns the keys that query `index` of a piece sees, and in words whatever else it sees.
    pub(super) fn seen(&self, queries: &Queries, index: usize) -> (Vec<Line>, Vec<String>) {
        let visible = self.segment.visible(queries.at + index);
        let (mut keys, mut foreign) = (Vec::new(), Vec::new());
        for held in &self.reading.keys {
            for rows in clip(held, &visible).parts() {
                match self.own(queries, held, rows.clone()) {
                    Some(line) => keys.push(line),
                    None => foreign.push(stranger(held, rows)),
                }
            }
        }
        (tidy(keys), foreign)
    }

    /// Returns rows of a piece of keys as positions of the queries' own sequence and heads.
    fn own(&self, queries: &Queries, held: &Held, rows: Range<usize>) -> Option<Line> {
        let HeldRows::Positions { sequence, start, step, heads } = &held.holds else { return None };
        let group = self.problem.group();
        let needed = queries.heads.start / group..queries.heads.end.div_ceil(group);
        let own = *sequence == queries.sequence && *heads == needed;
        own.then(|| Line::new(start + step * rows.start, *step, rows.len()))
    }
}

/// Returns the local rows of a piece that are visible, counted from its own first row.
fn clip(held: &Held, visible: &Intervals) -> Intervals {
    visible.moved(|at| at.saturating_sub(held.at).min(held.len))
}

/// Returns in words a piece of keys that does not belong to the queries.
fn stranger(held: &Held, rows: Range<usize>) -> String {
    match &held.holds {
        HeldRows::Positions { sequence, start, step, heads } => {
            let line = Line::new(start + step * rows.start, *step, rows.len());
            format!("{line} of sequence {sequence}, kv heads {}..{}", heads.start, heads.end)
        }
        HeldRows::Other(what) => format!("{} rows of {what}", rows.len()),
    }
}

/// Returns the keys that the mask shows a query.
fn shown(problem: &Problem, sequence: usize, query: usize) -> Intervals {
    let mask: &Mask = &problem.mask;
    let lengths = problem.sequences.get(sequence).map_or((0, 0), |both| (both.q.len, both.kv.len));
    mask.visible(query, lengths.0, lengths.1)
}

/// Keys that one reading shows one query.
struct Share {
    heads: Range<usize>,
    keys: Vec<Line>,
    foreign: Vec<String>,
}

/// Everything that launches show the queries of a problem, summed over the launches.
pub(super) struct Sums<'a> {
    problem: &'a Problem,
    shares: BTreeMap<(usize, usize), Vec<Share>>,
    cuts: Vec<usize>,
}

impl<'a> Sums<'a> {
    /// Returns the sums; `None` where there is too much to compare.
    pub(super) fn of(problem: &'a Problem, sightings: &[Sighting]) -> Option<Sums<'a>> {
        let cost = sightings.iter().map(cost_of).fold(problem.tokens(), usize::saturating_add);
        if cost > COMPARED_MAX {
            return None;
        }
        let mut sums = Sums { problem, shares: BTreeMap::new(), cuts: vec![0, problem.heads.q] };
        for sighting in sightings {
            for queries in queries(sighting.reading) {
                sums.take(sighting, &queries);
            }
        }
        sums.cuts.sort_unstable();
        sums.cuts.dedup();
        Some(sums)
    }

    fn take(&mut self, sighting: &Sighting, queries: &Queries) {
        self.cuts.extend([queries.heads.start, queries.heads.end]);
        for index in 0..queries.positions.len {
            let query = queries.positions.at(index);
            let (keys, foreign) = sighting.seen(queries, index);
            let share = Share { heads: queries.heads.clone(), keys, foreign };
            self.shares.entry((queries.sequence, query)).or_default().push(share);
        }
    }

    /// Returns the bands of heads whose rows are alike.
    pub(super) fn bands(&self) -> impl Iterator<Item = Range<usize>> {
        self.cuts.windows(2).map(|ends| ends[0]..ends[1])
    }

    /// Returns what a query of a sequence sees, for heads of one band, beside what it should see.
    pub(super) fn sight(&self, (sequence, query): (usize, usize), heads: &Range<usize>) -> Sight {
        let shares = self.shares.get(&(sequence, query)).map_or(&[][..], Vec::as_slice);
        let mine =
            || shares.iter().filter(|share| share.heads.start <= heads.start && heads.end <= share.heads.end);
        let lines: Vec<Line> = mine().flat_map(|share| share.keys.iter().copied()).collect();
        let foreign: Vec<String> = mine().flat_map(|share| share.foreign.iter().cloned()).collect();
        let [keys, twice] = union(&lines);
        let should = tidy(shown(self.problem, sequence, query).parts().map(Line::range).collect());
        Sight { query, keys, twice, foreign, should: Some(should) }
    }
}

/// Returns in words the queries whose sum over all launches differs from what the mask shows; `None` where there is
/// too much to compare.
pub(super) fn differences(problem: &Problem, sightings: &[Sighting]) -> Option<Vec<String>> {
    let sums = Sums::of(problem, sightings)?;
    let mut found = Vec::new();
    for (sequence, both) in problem.sequences.iter().enumerate() {
        for heads in sums.bands() {
            let whole = heads == (0..problem.heads.q);
            let band = if whole { String::new() } else { format!(", heads {}..{}", heads.start, heads.end) };
            let sights = (0..both.q.len).map(|query| sums.sight((sequence, query), &heads));
            let of = format!(" of sequence {sequence}{band}");
            let wrong = groups(sights.filter(|sight| !sight.is_right()), true);
            found.extend(wrong.iter().map(|group: &QueryGroup| group.words(&of)));
        }
    }
    Some(found)
}

/// Returns the cost of a comparison: lines, and single keys of lines with steps, times queries.
pub(super) fn cost_of(sighting: &Sighting) -> usize {
    let of_key = |held: &Held| match held.holds {
        HeldRows::Positions { step: 2.., .. } => held.len,
        _ => 1,
    };
    let keys: usize = sighting.reading.keys.iter().map(of_key).sum();
    let of_queries = |queries: Queries| keys.saturating_mul(queries.positions.len);
    queries(sighting.reading).map(of_queries).fold(0, usize::saturating_add)
}
