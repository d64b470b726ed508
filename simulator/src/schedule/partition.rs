//! Effect of a schedule's steps on the envelope: the number of times that partial results are merged and partial
//! gradients are stored, and the keys that a launch shows its queries together.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use seamproof_oracle::envelope::{GradientSums, MergeBy, Merges, Partition};
use seamproof_oracle::replay::{ReplayedKeys, ReplayedLaunch, ReplayedTiles};
use seamproof_oracle::{Band, Format, Positions, Problem};

use super::program::{
    AttendBackward, BufferId, Layer, Merge, MergeStyle, Operation, Region, Role, Schedule, Section, Step,
    Work,
};
use super::stripes;
use crate::Segment;
use crate::check::{Held, HeldRows, OperationId, Reading, TracedLaunch, trace_moves};
use crate::emulated::Tiles;

/// Largest number of parts of a rank's slot that a launch tells apart: the two chunks of a dual-chunk slot.
const PARTS_MAX: usize = 2;

impl Schedule {
    /// Returns the partition of a subject that runs this schedule on kernels with these tiles. It has the largest count
    /// of any rank for each kind of rounding, and the coarsest format that any step stores.
    pub fn partition(&self, tiles: Tiles) -> Partition {
        let mut partition = Partition::single(tiles.q, tiles.kv);
        let (summands, coded) = (self.summands(), self.coded());
        for program in &self.ranks {
            let works = program.operations.iter().map(|operation| &operation.work);
            let (merges, sums) = self.roundings(works, &summands);
            let [of_out, of_gradients] = program.passes().map(|pass| self.through(pass, &coded));
            partition.merges = Merges {
                count: partition.merges.count.max(merges.count),
                step: coarser(partition.merges.step, merges.step),
                running: coarser(partition.merges.running, merges.running),
                product_rounded: partition.merges.product_rounded || merges.product_rounded,
                by: if merges.by == MergeBy::Difference { merges.by } else { partition.merges.by },
                through: coarser_of(partition.merges.through, of_out),
            };
            partition.sums = GradientSums {
                count: partition.sums.count.max(sums.count),
                format: coarser(partition.sums.format, sums.format),
                codes: partition.sums.codes.max(sums.codes),
                through: coarser_of(partition.sums.through, of_gradients),
            };
        }
        partition
    }

    /// Returns the pieces of queries and keys of each forward launch, for a replay of their roundings; `None` if the
    /// schedule does not run. A kernel that takes the keys of each run in blocks of its own says how.
    pub fn launches(&self, problem: &Problem, blocks: Option<KeyBlocks>) -> Option<Vec<ReplayedLaunch>> {
        let of_work = |work: &Work| matches!(work, Work::Attend(_));
        let in_forward =
            |at: OperationId| self.ranks[at.rank].backward.is_none_or(|backward| at.operation < backward);
        let launches = self.pieces(problem, blocks, |at, work| of_work(work) && in_forward(at))?;
        Some(launches.into_iter().flatten().collect())
    }

    /// Returns the tiles of each launch of the backward, for a replay of kernels with these tiles; `None` if the schedule
    /// does not run. The launches of keys in blocks are those of [`Schedule::launches`].
    pub fn replayed_tiles(
        &self,
        problem: &Problem,
        tiles: Tiles,
        blocks: Option<KeyBlocks>,
    ) -> Option<ReplayedTiles> {
        let is_backward = |_, work: &Work| matches!(work, Work::AttendBackward(_));
        let launches = self.pieces(problem, blocks, is_backward)?;
        Some(ReplayedTiles { launches, queries: tiles.q, keys: tiles.kv })
    }

    /// Returns the pieces of queries and keys of some launches, segment by segment.
    fn pieces(
        &self,
        problem: &Problem,
        blocks: Option<KeyBlocks>,
        is_asked: impl Fn(OperationId, &Work) -> bool,
    ) -> Option<Vec<Vec<ReplayedLaunch>>> {
        let of_launch = |launch: TracedLaunch| {
            let work = &self.ranks[launch.at.rank].operations[launch.at.operation].work;
            let segments = match work {
                _ if !is_asked(launch.at, work) => &[],
                Work::Attend(attend) => &attend.call.segments[..],
                Work::AttendBackward(attend) => &attend.call.segments,
                _ => &[],
            };
            let makes_code =
                matches!(work, Work::Attend(attend) if self.buffers[attend.out.0].format.saturates());
            let of = |reading: Reading| {
                let segment = segments.get(reading.segment)?;
                Some(launches(problem, (segment, makes_code), blocks, &reading))
            };
            launch.readings.into_iter().filter_map(of).collect::<Vec<_>>()
        };
        Some(trace_moves(problem, self).ok()?.into_iter().flat_map(of_launch).collect())
    }

    /// Returns one rank's merges and stored sums.
    fn roundings<'a>(
        &self,
        works: impl Iterator<Item = &'a Work>,
        summands: &BTreeMap<BufferId, usize>,
    ) -> (Merges, GradientSums) {
        let Partition { mut merges, mut sums, .. } = Partition::single(1, 1);
        let group = self.members.len() / self.region();
        let parts = if self.has_edges() { stripes::PARTS } else { PARTS_MAX * PARTS_MAX };
        let hidden = |from: &[Region]| summands.get(&from.first()?.buffer).copied();
        for work in works {
            match work {
                // A deferred merge folds in the LSE and the out in two operations, and counts as one merge.
                Work::Merge(Merge { style: MergeStyle::Statistics, .. }) => {}
                Work::Merge(merge) => {
                    merges.count += 1;
                    merges.step = coarser(merges.step, self.stored(merge.step_out));
                    merges.running = coarser(merges.running, self.stored(merge.out));
                    let rounded = MergeStyle::Weighted { product_rounded: true };
                    merges.product_rounded |= merge.style == rounded;
                    if merge.style == MergeStyle::Difference {
                        merges.by = MergeBy::Difference;
                    }
                }
                Work::ApplySink { out, .. } => {
                    merges.count += 1;
                    merges.running = coarser(merges.running, self.stored(*out));
                }
                Work::Accumulate { from, to, .. } => {
                    // On each rank that its gradient visits, a row is added to at most once for each part of the
                    // queries and each part of the keys. Each time, a partial sum and the running sum are stored. A
                    // hierarchy of stripes has more parts, and visits as many fewer ranks.
                    sums.count = 2 * parts * group;
                    sums.codes = sums.codes.max(1);
                    sums.format = coarser(sums.format, coarser(self.stored(*from), self.stored(*to)));
                }
                Work::Copy { from, to, .. } if self.is_stored_again(*from, *to) => sums.codes = 2,
                // Of the summands of a hidden row, one alone is no zero where each head is on one rank.
                Work::ReduceScatter { from, .. } if hidden(from) == Some(1) => {}
                Work::ReduceScatter { from, to, .. } => {
                    sums.count += hidden(from).unwrap_or(group);
                    sums.format = coarser(sums.format, self.buffers[to.buffer.0].format);
                }
                _ => {}
            }
        }
        (merges, sums)
    }

    /// Returns the format to which storing in a buffer rounds partial results. Those in FP8 are codes already: their
    /// launch has rounded them, and storing them changes nothing.
    fn stored(&self, buffer: BufferId) -> Format {
        let format = self.buffers[buffer.0].format;
        if format.saturates() { Format::F32 } else { format }
    }

    /// Returns the buffers of which copies make codes in FP8.
    fn coded(&self) -> BTreeSet<BufferId> {
        let is_code = |buffer: BufferId| self.buffers[buffer.0].format.saturates();
        let operations = self.ranks.iter().flat_map(|program| &program.operations);
        let coded = operations.filter_map(|operation| match operation.work {
            Work::Copy { from, to, .. } if is_code(to) && !is_code(from) => Some(from),
            _ => None,
        });
        coded.collect()
    }

    /// Returns the format to which copies of a pass round what then becomes codes.
    fn through(&self, pass: &[Operation], coded: &BTreeSet<BufferId>) -> Option<Format> {
        let format = |buffer: BufferId| self.buffers[buffer.0].format;
        let rounded = pass.iter().filter_map(|operation| match operation.work {
            Work::Copy { from, to, .. } if coded.contains(&to) && format(from) != format(to) => {
                Some(format(to))
            }
            _ => None,
        });
        rounded.reduce(coarser)
    }

    /// Whether a copy rounds sums of codes in FP8 to codes that are added again.
    fn is_stored_again(&self, from: BufferId, to: BufferId) -> bool {
        let [from, to] = [from, to].map(|buffer| &self.buffers[buffer.0]);
        to.format.saturates() && !from.format.saturates() && to.role == Role::Scratch
    }

    /// Whether a launch of the backward is on the edges of stripes.
    fn has_edges(&self) -> bool {
        let mut works = self.ranks.iter().flat_map(|program| &program.operations);
        works.any(|operation| match &operation.work {
            Work::AttendBackward(AttendBackward { step, .. }) => {
                matches!(step, Step::Ring { section: Section::Edge, .. })
            }
            _ => false,
        })
    }

    /// Returns the buffers of hidden rows that row-parallel layers make, each with the number of ranks of its region
    /// that make the same heads.
    fn summands(&self) -> BTreeMap<BufferId, usize> {
        let made = self.ranks.iter().enumerate().flat_map(|(rank, program)| {
            let region = rank / self.region();
            program.operations.iter().filter_map(move |operation| match &operation.work {
                Work::Linear { layer: Layer::Row, heads, to, .. } => {
                    Some((*to, (region, self.buffers[to.0].heads, heads.start), rank))
                }
                _ => None,
            })
        });
        let made: Vec<_> = made.collect();
        let mut makers: BTreeMap<_, BTreeSet<usize>> = BTreeMap::new();
        for (_, of, rank) in &made {
            makers.entry(*of).or_default().insert(*rank);
        }
        made.into_iter().map(|(to, of, _)| (to, makers[&of].len())).collect()
    }
}

/// Returns a reading's pieces of queries, each with the keys of its own sequence and heads. A launch may make codes.
fn launches(
    problem: &Problem,
    (segment, makes_code): (&Segment, bool),
    blocks: Option<KeyBlocks>,
    reading: &Reading,
) -> Vec<ReplayedLaunch> {
    let positions = |held: &Held| match &held.holds {
        HeldRows::Positions { sequence, start, step, heads } => {
            let line = Positions { start: *start, step: *step, len: held.len };
            Some((*sequence, heads.clone(), (held.at, line)))
        }
        HeldRows::Other(_) => None,
    };
    let keys: Vec<_> = reading.keys.iter().filter_map(positions).collect();
    let of_queries = |(sequence, heads, (first, queries)): (usize, Range<usize>, (usize, Positions))| {
        let needed = heads.start / problem.group()..heads.end.div_ceil(problem.group());
        let own = keys.iter().filter(|(of, kv_heads, _)| *of == sequence && *kv_heads == needed);
        let lines = own.flat_map(|(.., keys)| lines(segment, *keys));
        let keys = match blocks {
            None => lines.collect(),
            Some(blocks) => lines.flat_map(|line| blocks.numbered(segment, line)).collect(),
        };
        ReplayedLaunch { sequence, heads, first, queries, keys, makes_code }
    };
    reading.queries.iter().filter_map(positions).map(of_queries).collect()
}

/// Blocks in which a kernel takes the keys of each run. The first begins with a group of rows of the tensor, in which
/// the keys before the run are hidden.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyBlocks {
    /// Rows of a block; at least 1.
    pub rows: usize,
    /// Rows of a group; at least 1.
    pub group: usize,
}

impl KeyBlocks {
    /// Returns keys with the numbers that they have in these blocks, cut where runs end. The first block of a run begins
    /// behind the last one of the run before.
    fn numbered(self, segment: &Segment, keys: ReplayedKeys) -> Vec<ReplayedKeys> {
        let (mut at, mut begin, mut parts) = (0, 0, Vec::new());
        for run in &segment.kv {
            let hidden = run.offset % self.group;
            let own = keys.first.max(at)..(keys.first + keys.line.len).min(at + run.len);
            if !own.is_empty() {
                let shift = begin + hidden - at;
                let moved = |bound: Option<i64>| bound.map(|bound| bound + shift as i64);
                let start = keys.line.at(own.start - keys.first);
                parts.push(ReplayedKeys {
                    first: own.start + shift,
                    line: Positions { start, len: own.len(), ..keys.line },
                    band: Band { lo: moved(keys.band.lo), hi: moved(keys.band.hi) },
                });
            }
            at += run.len;
            begin += (hidden + run.len).next_multiple_of(self.rows);
        }
        parts
    }
}

/// Returns a line of a segment's keys, cut so that each part has one band.
fn lines(segment: &Segment, (at, line): (usize, Positions)) -> Vec<ReplayedKeys> {
    let inside = |end: usize| end.clamp(at, at + line.len);
    let (prefix, sink_tokens) = (inside(segment.prefix), inside(segment.sink_tokens));
    let ends = [at, prefix.min(sink_tokens), prefix.max(sink_tokens), at + line.len];
    let part = |ends: &[usize]| {
        let first = ends[0];
        let band = Band {
            lo: segment.lo.filter(|_| first >= segment.sink_tokens),
            hi: segment.hi.filter(|_| first >= segment.prefix),
        };
        let part = Positions { start: line.at(first - at), len: ends[1] - first, ..line };
        (part.len > 0).then_some(ReplayedKeys { first, line: part, band })
    };
    ends.windows(2).filter_map(part).collect()
}

fn coarser_of(a: Option<Format>, b: Option<Format>) -> Option<Format> {
    a.into_iter().chain(b).reduce(coarser)
}

fn coarser(a: Format, b: Format) -> Format {
    if b.precision_bits() < a.precision_bits() { b } else { a }
}

#[cfg(test)]
mod tests {
    use seamproof_oracle::Run;

    use super::*;

    /// Test of two runs of a segment in blocks of 32 rows that begin with a group of 16: the first has 4 hidden rows and
    /// 50 keys, which are two blocks, and the second begins a third one.
    #[test]
    fn keys_of_runs_are_numbered_in_blocks_of_their_own() {
        let packed = |offset, len| Run::packed(offset, len, len);
        let segment = Segment {
            q: packed(0, 70),
            kv: vec![packed(20, 50), packed(96, 20)],
            lo: None,
            hi: Some(0),
            prefix: 0,
            sink_tokens: 0,
        };
        let line = Positions { start: 100, step: 1, len: 70 };
        let blocks = KeyBlocks { rows: 32, group: 16 };
        let parts: Vec<_> =
            lines(&segment, (0, line)).into_iter().flat_map(|keys| blocks.numbered(&segment, keys)).collect();
        let part = |first, start, len, hi| ReplayedKeys {
            first,
            line: Positions { start, step: 1, len },
            band: Band { lo: None, hi: Some(hi) },
        };
        assert_eq!(parts, [part(4, 100, 50, 4), part(64, 150, 20, 14)]);
        // The last query sees the last key.
        assert_eq!(parts[1].band.keys(69, 84), 0..84);
    }
}
