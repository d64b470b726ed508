//! The parts that builders with collectives share: streams, regions, and the row pairs between rank order and sequence
//! order.

use std::ops::Range;

use seamproof_oracle::Run;

use super::build::Builder;
use super::program::{BufferId, Region, RowPair};
use crate::shard::ShardedSide;

/// The stream of kernels and copies.
pub(super) const COMPUTE: usize = 0;
/// The stream of collectives.
pub(super) const COMMUNICATION: usize = 2;

/// Returns the region of every row and head of a buffer.
pub(super) fn all(builder: &Builder, buffer: BufferId) -> Region {
    part(builder, buffer, 0, builder.describe(buffer).rows)
}

/// Returns the region of every head of a buffer without rows.
pub(super) fn every_head(builder: &Builder, buffer: BufferId) -> Region {
    part(builder, buffer, 0, 0)
}

/// Returns the region of the `index`-th `rows` rows of a buffer, with every head.
pub(super) fn part(builder: &Builder, buffer: BufferId, index: usize, rows: usize) -> Region {
    let heads = 0..builder.describe(buffer).heads;
    Region { buffer, rows: Run::packed(index * rows, rows, rows), heads }
}

/// Returns row pairs from rank order, where the rows of `members` follow each other, to sequence order.
pub(super) fn rank_order(shard: &ShardedSide, members: Range<usize>) -> Vec<RowPair> {
    let first = members.start;
    members
        .flat_map(|rank| {
            let before = (rank - first) * shard.rows;
            let pairs = shard.reorder(rank).into_iter();
            pairs.map(move |(here, there)| (Run { offset: before + here.offset, ..here }, there))
        })
        .collect()
}

/// Returns the pairs with their two sides exchanged.
pub(super) fn inverse(pairs: &[RowPair]) -> Vec<RowPair> {
    pairs.iter().map(|&(from, to)| (to, from)).collect()
}
