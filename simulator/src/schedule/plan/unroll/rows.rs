//! Rows that are filled, copied or moved.

use seamproof_oracle::{Run, Side};

use super::super::act::{Extent, Own, Way};
use super::owned_rows;
use super::works::{Works, id};
use crate::schedule::build;
use crate::schedule::collect::inverse;
use crate::schedule::program::{FillValue, Work};

impl Works<'_> {
    pub(super) fn fill(&self, to: Own, rows: Extent, value: FillValue) -> Work {
        Work::Fill { to: id(to), rows: self.extent(to, rows), value }
    }

    pub(super) fn copy(&self, from: Own, to: Own, rows: Extent) -> Work {
        let rows = build::same_rows(&self.extent(to, rows));
        Work::Copy { from: id(from), to: id(to), rows }
    }

    pub(super) fn reorder(&self, from: Own, to: Own, side: Side, way: Way) -> Work {
        let pairs = self.plan.collected(self.plan.member(self.rank), side);
        let rows = if way == Way::Collect { pairs } else { inverse(&pairs) };
        Work::Copy { from: id(from), to: id(to), rows }
    }

    pub(super) fn extent(&self, own: Own, extent: Extent) -> Vec<Run> {
        match extent {
            Extent::Slots(side) => build::slots(self.plan.pieces.of(side)),
            Extent::LocalSlots(side) => build::slots(self.plan.shards.of(side)),
            Extent::Held(side) => self.plan.held(self.plan.member(self.rank), side),
            Extent::Shard(side) => owned_rows(self.plan.shard(self.rank, side)),
            Extent::All => vec![self.all(own).rows],
            Extent::Values => Vec::new(),
        }
    }
}
