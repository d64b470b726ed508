//! What is around a rank's heads in a sequence-parallel region.

use seamproof_oracle::Run;

use super::super::act::{Act, Own};
use super::works::{Works, id};
use crate::schedule::program::{Region, Work};
use crate::schedule::sequence_parallel::rotated;

impl Works<'_> {
    /// Returns the work of an operation around a rank's heads; `None` for any other.
    pub(super) fn of_region(&self, act: &Act) -> Option<Work> {
        let region = self.plan.region.as_ref()?;
        let member = self.plan.member(self.rank);
        let communicator = 1 + member;
        let work = match *act {
            Act::GatherHidden { from, to } => {
                Work::AllGather { communicator, from: self.all(from), to: self.shards(to, from) }
            }
            Act::ScatterHidden { from, to } => {
                Work::ReduceScatter { communicator, from: self.shards(from, to), to: self.all(to) }
            }
            Act::Linear { layer, side, from, to } => {
                let rows = Run::packed(0, self.plan.rows(side), self.plan.rows(side));
                let heads = region.deal.of(side, self.rank % region.ranks);
                Work::Linear { layer, heads, from: id(from), to: id(to), rows: vec![(rows, rows)] }
            }
            Act::Rotate { buffer, side, inverse } => {
                let rows = rotated(&self.plan.placed(member, side));
                Work::Rotate { buffer: id(buffer), rows, inverse }
            }
            _ => return None,
        };
        Some(work)
    }

    /// Returns the rows of each shard of a region in a buffer of all of them.
    fn shards(&self, whole: Own, shard: Own) -> Vec<Region> {
        let rows = self.all(shard).rows.len;
        (0..self.plan.region_ranks()).map(|place| self.part(whole, place, rows)).collect()
    }
}
