//! A schedule that was followed from launch to launch: which pairs of query and key its launches are asked to show, as
//! plain data for pictures.

use std::ops::Range;

use seamproof_judge::ladder::SeenRow;
use seamproof_oracle::{Pass, Problem};
use seamproof_simulator::check::{OperationId, TracedLaunch, trace};
use seamproof_simulator::schedule::{Operation, Schedule};

use super::line::{Line, tidy};
use super::seen::{Sighting, Sums, cost_of, differences, queries};
use super::sight::{Sight, groups};
use super::{operation, pass_of, segments, step};

/// Largest cost of the pairs of all launches that are pictured one by one.
const LAUNCHES_COST_MAX: usize = 1 << 18;

/// A schedule and its launches.
pub(crate) struct Followed<'a> {
    problem: &'a Problem,
    schedule: &'a Schedule,
    launches: Vec<TracedLaunch>,
}

/// Keys that one query is shown, beside what the mask shows it.
pub(crate) struct Sum {
    /// Position of the query.
    pub(crate) query: usize,
    /// Keys that are shown, each once.
    pub(crate) seen: Vec<Range<usize>>,
    /// Keys that are shown more than once.
    pub(crate) twice: Vec<Range<usize>>,
    /// Rows of other sequences, of padding or of nothing that are shown, in words.
    pub(crate) foreign: Vec<String>,
    /// Whether it is known what is shown. What launches are asked to show always is.
    pub(crate) is_clear: bool,
}

/// Sums of one band of heads over one sequence.
pub(crate) struct BandSums {
    /// Heads of the band.
    pub(crate) heads: Range<usize>,
    /// Whether every query sees what the mask shows.
    pub(crate) right: bool,
    /// The queries of the sequence, in order.
    pub(crate) queries: Vec<Sum>,
}

impl<'a> Followed<'a> {
    /// Returns the schedule, followed; `None` where it does not run.
    pub(crate) fn new(problem: &'a Problem, schedule: &'a Schedule) -> Option<Followed<'a>> {
        Some(Followed { problem, schedule, launches: trace(problem, schedule).ok()? })
    }

    /// Returns for some sequences what the launches of a pass show, for each band of heads; `None` where there is too
    /// much to compare.
    pub(crate) fn sums(&self, pass: Pass, sequences: &[usize]) -> Option<Vec<Vec<BandSums>>> {
        let launches = self
            .launches
            .iter()
            .filter(|launch| pass_of(self.schedule, launch.at.rank, launch.at.operation) == pass);
        let sightings: Vec<Sighting> = launches.flat_map(|launch| self.sightings(launch)).collect();
        let sums = Sums::of(self.problem, &sightings)?;
        Some(sequences.iter().map(|&sequence| self.of_sequence(&sums, sequence)).collect())
    }

    /// Returns in words the queries to which the launches of a pass show something else than the mask does; none where
    /// there is too much to compare.
    pub(crate) fn differences(&self, pass: Pass) -> Vec<String> {
        let launches = self
            .launches
            .iter()
            .filter(|launch| pass_of(self.schedule, launch.at.rank, launch.at.operation) == pass);
        let sightings: Vec<Sighting> = launches.flat_map(|launch| self.sightings(launch)).collect();
        differences(self.problem, &sightings).unwrap_or_default()
    }

    fn of_sequence(&self, sums: &Sums, sequence: usize) -> Vec<BandSums> {
        let queries = self.problem.sequences.get(sequence).map_or(0, |both| both.q.len);
        let of_band = |heads: Range<usize>| {
            let mut right = true;
            let of_query = |query| {
                let sight = sums.sight((sequence, query), &heads);
                right &= sight.is_right();
                let [seen, twice] = [&sight.keys, &sight.twice].map(|lines| ranges(lines));
                Sum { query, seen, twice, foreign: sight.foreign, is_clear: true }
            };
            let queries = (0..queries).map(of_query).collect();
            BandSums { heads, right, queries }
        };
        sums.bands().map(of_band).collect()
    }

    /// Returns the launches in order of ranks and operations, each with what it is; none where pictures of all would
    /// take too long.
    pub(crate) fn launches(&self) -> Vec<(OperationId, String)> {
        let cost = self.launches.iter().flat_map(|launch| self.sightings(launch)).map(|one| cost_of(&one));
        if cost.fold(0, usize::saturating_add) > LAUNCHES_COST_MAX {
            return Vec::new();
        }
        let mut named: Vec<_> =
            self.launches.iter().map(|launch| (launch.at, words(self.schedule, launch.at))).collect();
        named.sort_by_key(|(at, _)| (at.rank, at.operation));
        named
    }

    /// Returns what one launch shows the queries of a sequence: a query, and keys of its own.
    pub(crate) fn shown(&self, at: OperationId, sequence: usize) -> Vec<(usize, Range<usize>)> {
        let launch = self.launches.iter().find(|launch| launch.at == at);
        let sightings: Vec<Sighting> = launch.into_iter().flat_map(|launch| self.sightings(launch)).collect();
        let mut pairs = Vec::new();
        for sighting in &sightings {
            for piece in queries(sighting.reading).filter(|piece| piece.sequence == sequence) {
                for index in 0..piece.positions.len {
                    let (keys, _) = sighting.seen(&piece, index);
                    let query = piece.positions.at(index);
                    pairs.extend(ranges(&keys).into_iter().map(|keys| (query, keys)));
                }
            }
        }
        pairs
    }

    fn sightings<'b>(&'b self, launch: &'b TracedLaunch) -> Vec<Sighting<'b>> {
        let work = operation_at(self.schedule, launch.at).map(|operation| &operation.work);
        let segments = work.map_or(&[][..], segments);
        let of_reading = launch.readings.iter().filter_map(|reading| {
            let segment = segments.get(reading.segment)?;
            Some(Sighting { problem: self.problem, segment, reading })
        });
        of_reading.collect()
    }
}

fn operation_at(schedule: &Schedule, at: OperationId) -> Option<&Operation> {
    schedule.ranks.get(at.rank)?.operations.get(at.operation)
}

/// Returns an operation in words.
pub(crate) fn words(schedule: &Schedule, at: OperationId) -> String {
    let Some(Operation { work, .. }) = operation_at(schedule, at) else { return String::new() };
    let pass = if pass_of(schedule, at.rank, at.operation) == Pass::Forward { "forward" } else { "backward" };
    match step(work) {
        None => operation::words(schedule, work),
        Some(step) => match step.to_string() {
            step if step.is_empty() => format!("{pass} launch"),
            step => format!("{pass} launch, {step}"),
        },
    }
}

/// Returns in words the queries of a head that saw something else than the mask shows. Those of which nobody knows what
/// they saw are left out.
pub(crate) fn seen_differences(problem: &Problem, seen: &[SeenRow]) -> Vec<String> {
    let mut rows: Vec<&SeenRow> = seen.iter().collect();
    rows.sort_by_key(|row| (row.sequence, row.head, row.query));
    let of_head = |rows: &[&SeenRow]| {
        let (sequence, head) = rows.first().map_or((0, 0), |row| (row.sequence, row.head));
        let both = &problem.sequences[sequence];
        let lines = |keys: &[Range<usize>]| tidy(keys.iter().cloned().map(Line::range).collect());
        let sights = rows.iter().filter_map(|row| {
            let visible = problem.mask.visible(row.query, both.q.len, both.kv.len);
            let [keys, should] = [row.keys.clone()?, visible.parts().collect()].map(|keys| lines(&keys));
            let sight = Sight {
                query: row.query,
                keys,
                twice: Vec::new(),
                foreign: Vec::new(),
                should: Some(should),
            };
            (!sight.is_right()).then_some(sight)
        });
        let of = format!(" of sequence {sequence}, head {head}");
        groups(sights, true).iter().map(|group| group.words(&of)).collect::<Vec<_>>()
    };
    rows.chunk_by(|a, b| (a.sequence, a.head) == (b.sequence, b.head)).flat_map(of_head).collect()
}

/// Returns lines as ranges.
fn ranges(lines: &[Line]) -> Vec<Range<usize>> {
    // A line without steps is one range, and any other a range for each of its values.
    let of_line = |line: &Line| {
        let (count, len) = if line.step == 1 { (1, line.len) } else { (line.len, 1) };
        let line = *line;
        (0..count).map(move |index| line.at(index)..line.at(index) + len)
    };
    lines.iter().flat_map(of_line).collect()
}
