//! Tier R: the values that a subject of known roundings computes, apart from f32's own errors and near-ties.
//!
//! A [`NumericProfile`] says what a subject rounds and in which order it takes the keys. [`ReplayedLaunch`]es say which
//! keys the rows of a problem meet together. The oracle then rounds the exact weights and logit gradients itself. An
//! honest result differs from the replayed value by the final rounding, by f32's errors (as in tier W), and by
//! near-ties. A *near-tie* is a weight so near to the middle of two numbers that the subject may have rounded it to the
//! other one.
//!
//! No such difference is a matter of chance. The tier holds for any input and needs no certificate of dither. A
//! near-tie counts in full, and where all weights are alike all of them may be near-ties.
//!
//! A forward's weight is rounded relative to the running maximum, which starts anew with each launch and grows tile by
//! tile. Where it is normalised first, it is rounded relative to the LSE of its launch instead, and tiles and their
//! order say nothing. A backward's weight is absolute, and its replay needs no order. Where each tile of a backward has a
//! factor of its dS, the replay needs the tiles ([`ReplayedTiles`]).

use std::iter;
use std::ops::Range;

use crate::envelope::{Joints, KeyOrder, NumericProfile};
use crate::{Band, Intervals, Positions};

/// The queries and keys of one sequence that meet in one launch. Keys that the mask hides may be listed, and are
/// skipped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplayedLaunch {
    /// The index of the sequence.
    pub sequence: usize,
    /// Query heads.
    pub heads: Range<usize>,
    /// The launch's own number of the first query.
    pub first: usize,
    /// The queries.
    pub queries: Positions,
    /// The keys, in lines.
    pub keys: Vec<ReplayedKeys>,
    /// Whether its out is rounded to a code in FP8 before it is merged.
    pub makes_code: bool,
}

/// A line of keys of a launch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplayedKeys {
    /// The launch's own number of the first key. Tiles are cut by these numbers.
    pub first: usize,
    /// The keys.
    pub line: Positions,
    /// The pairs that the launch shows, by the launch's own numbers. Another launch may show the others of the mask.
    pub band: Band,
}

impl ReplayedLaunch {
    /// Returns the launch's own number of a query of it.
    pub(crate) fn number(&self, query: usize) -> usize {
        self.first + (query - self.queries.start) / self.queries.step
    }

    /// Returns the keys that the launch shows a query, in order, each with its number; those too that the mask hides.
    pub(crate) fn shown(&self, query: usize) -> impl Iterator<Item = Met> + '_ {
        let number = self.number(query);
        self.keys.iter().flat_map(move |ReplayedKeys { first, line, band }| {
            let own = band.keys(number, first + line.len);
            (own.start.max(*first)..own.end).map(move |number| Met { number, key: line.at(number - first) })
        })
    }
}

/// A key that a query meets in a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Met {
    /// The launch's own number of the key.
    pub(crate) number: usize,
    /// The key's position.
    pub(crate) key: usize,
}

/// The visible keys of a query in one of its launches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Walked {
    /// The keys, in order.
    pub(crate) keys: Vec<Met>,
    /// Whether the launch's out is rounded to a code, [`ReplayedLaunch::makes_code`].
    pub(crate) makes_code: bool,
}

/// The tiles of a backward's launches, each of which has a factor of its dS. Tiles are cut by the launch's own numbers of
/// queries and of keys, and steps of the matrix unit are counted from their begins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplayedTiles {
    /// The pieces of each launch. Those of one launch have numbers of their own among its queries, and may share tiles.
    pub launches: Vec<Vec<ReplayedLaunch>>,
    /// The number of queries of a tile.
    pub queries: usize,
    /// The number of keys of a tile.
    pub keys: usize,
}

/// A numeric profile, and the launches that a replay follows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Replay {
    /// The subject's roundings and its order of keys.
    pub profile: NumericProfile,
    /// The forward's launches over all rows.
    pub launches: Vec<ReplayedLaunch>,
    /// The backward's tiles, where each has a factor of its dS; `None` where they are not known.
    pub tiles: Option<ReplayedTiles>,
    /// The joints of partial results, where the profile knows them better than the subject's own partition.
    pub joints: Option<Joints>,
}

impl Replay {
    /// Returns the launches in order of sequences. Those of one sequence keep their own order.
    pub(crate) fn by_sequence(&self) -> Vec<&ReplayedLaunch> {
        let mut launches: Vec<&ReplayedLaunch> = self.launches.iter().collect();
        launches.sort_by_key(|launch| launch.sequence);
        launches
    }

    /// Returns the visible keys of a query in each of its launches, of which each starts anew. Returns `None` where the
    /// launches do not show the query each of its keys once.
    pub(crate) fn walk(
        &self,
        launches: &[&ReplayedLaunch],
        query: usize,
        seen: &Intervals,
    ) -> Option<Vec<Walked>> {
        let of_query = launches.iter().filter(|launch| launch.queries.contains(query));
        let visible = |launch: &&ReplayedLaunch| {
            let mut keys = Vec::with_capacity(seen.len());
            // The iterator's own loop is several times as fast as taking its items one by one.
            let shown = launch.shown(query).filter(|met| seen.contains(&met.key));
            shown.for_each(|met| keys.push(met));
            Walked { keys, makes_code: launch.makes_code }
        };
        let walk: Vec<Walked> = of_query.map(visible).collect();
        let walked: usize = walk.iter().map(|launch| launch.keys.len()).sum();
        (walked == seen.len()).then_some(walk)
    }

    /// Returns the keys of a launch of [`Replay::walk`], tile by tile in the order in which the launch takes them.
    pub(crate) fn tiles<'w>(&self, keys: &'w [Met]) -> impl Iterator<Item = &'w [Met]> + use<'w> {
        let tile = self.profile.kv_tile.max(1);
        let mut tiles = keys.chunk_by(move |a, b| a.number / tile == b.number / tile);
        let is_descending = self.profile.kv_order == KeyOrder::Descending;
        iter::from_fn(move || if is_descending { tiles.next_back() } else { tiles.next() })
    }
}

/// Returns the launches that some rows of a head are in. `by_sequence` is in order of sequences.
pub(crate) fn of_head<'a>(
    by_sequence: &[&'a ReplayedLaunch],
    sequence: usize,
    head: usize,
) -> Vec<&'a ReplayedLaunch> {
    let first = by_sequence.partition_point(|launch| launch.sequence < sequence);
    let mine = by_sequence[first..].iter().take_while(|launch| launch.sequence == sequence);
    mine.filter(|launch| launch.heads.contains(&head)).copied().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: Band = Band { lo: None, hi: None };

    fn launch(queries: Positions, keys: Vec<(usize, Positions)>, band: Band) -> ReplayedLaunch {
        let keys = keys.into_iter().map(|(first, line)| ReplayedKeys { first, line, band }).collect();
        ReplayedLaunch { sequence: 0, heads: 0..1, first: 1, queries, keys, makes_code: false }
    }

    fn line(start: usize, step: usize, len: usize) -> Positions {
        Positions { start, step, len }
    }

    fn profile() -> NumericProfile {
        NumericProfile { kv_tile: 2, ..NumericProfile::of_tests() }
    }

    /// Returns the positions of the keys of a walk.
    fn keys_of(replay: &Replay, query: usize, seen: Range<usize>) -> Option<Vec<Vec<Vec<usize>>>> {
        let walk = replay.walk(&of_head(&replay.by_sequence(), 0, 0), query, &seen.into())?;
        let keys = |tile: &[Met]| tile.iter().map(|met| met.key).collect();
        Some(walk.iter().map(|launch| replay.tiles(&launch.keys).map(keys).collect()).collect())
    }

    #[test]
    fn a_walk_cuts_each_launch_at_its_own_tiles() {
        let profile = profile();
        let launches = vec![
            launch(line(0, 2, 4), vec![(0, line(0, 1, 3)), (3, line(6, 1, 2))], ALL),
            launch(line(0, 1, 8), vec![(0, line(3, 1, 3))], ALL),
        ];
        let mut replay = Replay { profile, launches, tiles: None, joints: None };
        let walk = |replay: &Replay, query, seen: Range<usize>| keys_of(replay, query, seen);
        assert_eq!(walk(&replay, 2, 1..7), Some(vec![vec![vec![1], vec![2, 6]], vec![vec![3, 4], vec![5]]]));
        assert_eq!(walk(&replay, 1, 3..6), Some(vec![vec![vec![3, 4], vec![5]]]));
        assert_eq!(walk(&replay, 1, 2..6), None, "key 2 is nowhere");
        replay.profile.kv_order = KeyOrder::Descending;
        assert_eq!(walk(&replay, 1, 3..6), Some(vec![vec![vec![5], vec![3, 4]]]));
    }

    #[test]
    fn launches_that_share_keys_show_each_by_their_bands() {
        let profile = NumericProfile { kv_tile: 4, ..profile() };
        let band = |lo, hi| Band { lo, hi };
        let of = |band| launch(line(4, 1, 4), vec![(0, line(4, 1, 4))], band);
        // The first query is number 1: query 5 is number 2 and sees keys 4 to 6 in the first launch, and 7 in the other.
        let launches = vec![of(band(None, Some(0))), of(band(Some(1), None))];
        let walk = |replay: &Replay, query| keys_of(replay, query, 4..8);
        let mut replay = Replay { profile, launches, tiles: None, joints: None };
        assert_eq!(walk(&replay, 5), Some(vec![vec![vec![4, 5, 6]], vec![vec![7]]]));
        replay.launches[1] = of(band(Some(0), None));
        assert_eq!(walk(&replay, 5), None, "key 6 is in both");
    }
}
