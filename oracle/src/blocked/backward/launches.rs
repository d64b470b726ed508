//! Launches of a backward whose dS has a factor for each tile: the pairs of each tile that a query head has.

use std::collections::BTreeMap;

use super::super::pieces::Group;
use crate::replay::{Met, ReplayedLaunch, ReplayedTiles};

/// A query or a key of a tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    /// The number of its row among those of the tile. Steps of the matrix unit are counted from 0.
    pub(super) place: usize,
    /// The index of its row in the group.
    pub(super) index: usize,
}

/// One tile of a launch: its queries, its keys, and which of them meet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Tile {
    /// The queries that see a key of the tile, in order.
    pub(super) rows: Vec<Place>,
    /// The keys that some query sees, in order.
    pub(super) columns: Vec<Place>,
    /// The columns that each row sees.
    pub(super) seen: Vec<Vec<usize>>,
}

/// Calls `visit` with each tile of a query head, in the order in which its launches take them. Returns whether each query
/// meets as many keys as it sees.
pub(super) fn each_tile(
    tiles: &ReplayedTiles,
    (group, head): (&Group<'_>, usize),
    mut visit: impl FnMut(&Tile),
) -> bool {
    let mut met = vec![0; group.q.len()];
    for launch in &tiles.launches {
        let own = |piece: &&ReplayedLaunch| piece.sequence == group.sequence && piece.heads.contains(&head);
        let pieces: Vec<&ReplayedLaunch> = launch.iter().filter(own).collect();
        for queries in query_tiles(&pieces, tiles.queries, group.q.len()) {
            let mut of_keys = BTreeMap::new();
            for &(place, piece, query) in &queries {
                let seen = group.seen(query);
                let shown = piece.shown(query).filter(|shown| seen.contains(&shown.key));
                let row = Place { place, index: query };
                shown.for_each(|shown| add(&mut of_keys, tiles.keys.max(1), row, shown, &mut met));
            }
            of_keys.into_values().for_each(|pairs| visit(&Tile::of(&pairs)));
        }
    }
    met.into_iter().enumerate().all(|(query, met)| met == group.seen(query).len())
}

/// The pairs of one tile, query by query: each query with its keys.
type Pairs = Vec<(Place, Vec<Place>)>;

/// Adds a pair to the tile that its key lies in.
fn add(
    of_keys: &mut BTreeMap<usize, Pairs>,
    size: usize,
    row: Place,
    Met { number, key }: Met,
    met: &mut [usize],
) {
    met[row.index] += 1;
    let pairs = of_keys.entry(number / size).or_default();
    if pairs.last().is_none_or(|(last, _)| *last != row) {
        pairs.push((row, Vec::new()));
    }
    if let Some((_, keys)) = pairs.last_mut() {
        keys.push(Place { place: number % size, index: key });
    }
}

/// Returns the queries of a launch's pieces, tile by tile: each with its place in the tile, and its piece. The sequence has
/// `count` queries.
fn query_tiles<'a>(
    pieces: &[&'a ReplayedLaunch],
    size: usize,
    count: usize,
) -> impl Iterator<Item = Vec<(usize, &'a ReplayedLaunch, usize)>> {
    let size = size.max(1);
    let mut tiles: BTreeMap<usize, Vec<_>> = BTreeMap::new();
    for piece in pieces {
        let queries = (0..piece.queries.len).map(|index| piece.queries.at(index));
        for query in queries.filter(|query| *query < count) {
            let number = piece.number(query);
            tiles.entry(number / size).or_default().push((number % size, *piece, query));
        }
    }
    tiles.values_mut().for_each(|queries| queries.sort_by_key(|(place, ..)| *place));
    tiles.into_values()
}

impl Tile {
    fn of(pairs: &Pairs) -> Tile {
        let mut columns: Vec<Place> = pairs.iter().flat_map(|(_, keys)| keys).copied().collect();
        columns.sort_unstable_by_key(|key| key.place);
        columns.dedup();
        let mut column_of = vec![0; columns.last().map_or(0, |last| last.place + 1)];
        columns.iter().enumerate().for_each(|(column, key)| column_of[key.place] = column);
        let seen = |(_, keys): &(Place, Vec<Place>)| {
            let mut seen: Vec<usize> = keys.iter().map(|key| column_of[key.place]).collect();
            seen.sort_unstable();
            seen
        };
        Tile {
            rows: pairs.iter().map(|(row, _)| *row).collect(),
            seen: pairs.iter().map(seen).collect(),
            columns,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::pieces::Rows;
    use super::*;
    use crate::replay::ReplayedKeys;
    use crate::{Band, Mask, Positions, Problem, ProblemFields};

    fn line(start: usize, step: usize, len: usize) -> Positions {
        Positions { start, step, len }
    }

    /// Returns a piece of a launch without a mask of its own.
    fn piece(first: usize, queries: Positions, keys: Positions) -> ReplayedLaunch {
        let keys = vec![ReplayedKeys { first: 0, line: keys, band: Band { lo: None, hi: None } }];
        ReplayedLaunch { sequence: 0, heads: 0..1, first, queries, keys, makes_code: false }
    }

    /// The queries of a tile, its keys, and the number of its pairs.
    type Seen = (Vec<usize>, Vec<usize>, usize);

    /// Returns the tiles of a causal sequence of four queries and keys, and whether all pairs are there.
    fn tiles_of(launches: Vec<Vec<ReplayedLaunch>>) -> (Vec<Seen>, bool) {
        let fields = ProblemFields { mask: Mask::CAUSAL, ..ProblemFields::packed(&[(4, 4)], 1) };
        let problem = Problem::new(fields).expect("a problem");
        let both = problem.sequences[0];
        let group = Group::of(&problem, 0, [both.q, both.kv].map(Rows::all)).next().expect("a head");
        let (tiles, mut seen) = (ReplayedTiles { launches, queries: 2, keys: 2 }, Vec::new());
        let indices = |places: &[Place]| places.iter().map(|place| place.index).collect();
        let is_whole = each_tile(&tiles, (&group, 0), |tile| {
            let pairs = tile.seen.iter().map(Vec::len).sum();
            seen.push((indices(&tile.rows), indices(&tile.columns), pairs));
        });
        (seen, is_whole)
    }

    #[test]
    fn tiles_are_cut_by_the_numbers_of_their_launch() {
        let whole = vec![vec![piece(0, line(0, 1, 4), line(0, 1, 4))]];
        let right =
            vec![(vec![0, 1], vec![0, 1], 3), (vec![2, 3], vec![0, 1], 4), (vec![2, 3], vec![2, 3], 3)];
        assert_eq!(tiles_of(whole), (right, true));
        // Two pieces of one launch share tiles: queries 0, 1 and 3 have the numbers 0, 1 and 2.
        let all = line(0, 1, 4);
        let first = vec![piece(0, line(0, 1, 2), all), piece(2, line(3, 1, 1), all)];
        let both = vec![first, vec![piece(0, line(2, 1, 1), all)]];
        let (tiles, is_whole) = tiles_of(both);
        assert!(is_whole && tiles.len() == 5, "{tiles:?}");
        assert_eq!(tiles[0], (vec![0, 1], vec![0, 1], 3));
        assert_eq!(tiles[3], (vec![2], vec![0, 1], 2));
    }

    #[test]
    fn pairs_that_no_launch_has_are_told() {
        assert!(!tiles_of(Vec::new()).1);
        assert!(!tiles_of(vec![vec![piece(0, line(0, 1, 4), line(0, 1, 3))]]).1, "key 3 is nowhere");
        // What lies past the sequence is no query of it.
        assert!(tiles_of(vec![vec![piece(0, line(0, 1, 9), line(0, 1, 9))]]).1);
    }
}
