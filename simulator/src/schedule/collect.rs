//! What builders with collectives share: streams, regions, and rank order and sequence order as row pairs.

use std::ops::Range;

use seamproof_oracle::Run;

use super::build::Builder;
use super::program::{BufferId, Region, RowPair};
use crate::shard::ShardedSide;

/// The stream of kernels and copies.
pub(super) const COMPUTE: usize = 0;
/// The stream of collectives.
pub(super) const COMMUNICATION: usize = 2;

/// Every row and head of a buffer.
pub(super) fn all(builder: &Builder, buffer: BufferId) -> Region {
    part(builder, buffer, 0, builder.describe(buffer).rows)
}

/// Every head of a buffer without rows.
pub(super) fn every_head(builder: &Builder, buffer: BufferId) -> Region {
    part(builder, buffer, 0, 0)
}

/// The `index`-th `rows` rows of a buffer, every head.
pub(super) fn part(builder: &Builder, buffer: BufferId, index: usize, rows: usize) -> Region {
    let heads = 0..builder.describe(buffer).heads;
    Region { buffer, rows: Run::packed(index * rows, rows, rows), heads }
}

/// The rows of `members` one after the other, and their rows in sequence order.
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

/// The way back.
pub(super) fn inverse(pairs: &[RowPair]) -> Vec<RowPair> {
    pairs.iter().map(|&(from, to)| (to, from)).collect()
}
