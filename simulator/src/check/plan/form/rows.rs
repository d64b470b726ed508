//! Form of rows that are filled, copied or moved.

use seamproof_oracle::Side;

use super::{At, Checked, Forms};
use crate::check::plan::error::PlanFault;
use crate::schedule::Axes;
use crate::schedule::plan::{Extent, Own, Way};

impl Forms<'_> {
    pub(super) fn copy(&self, from: Own, to: Own, rows: Extent) -> Checked {
        self.extent(to, rows)?;
        self.alike(from, to)
    }

    pub(super) fn reorder(&self, (side, way): (Side, Way), from: Own, to: Own) -> Checked {
        let (ranked, collected) = if way == Way::Collect { (from, to) } else { (to, from) };
        self.has_rows(ranked, side, At::Ranked)?;
        self.has_rows(collected, side, At::Ring)?;
        self.same_elements(from, to)
    }

    /// Checks a copy of lent rows into holes, or a sum of holes to lent rows.
    pub(super) fn spread(&self, from: Own, to: Own) -> Checked {
        self.gathers()?;
        self.has_rows(from, Side::Kv, At::Ring)?;
        self.alike(from, to)
    }

    pub(super) fn extent(&self, own: Own, rows: Extent) -> Checked {
        match rows {
            Extent::Slots(side) => self.has_rows(own, side, At::Ring),
            Extent::Shard(side) => self.has_rows(own, side, At::Shard),
            Extent::LocalSlots(side) | Extent::Held(side) => self.has_rows(own, side, At::Rank),
            Extent::Values if self.of(own)?.0 == Axes::Heads => Ok(()),
            Extent::All if self.of(own)?.0 != Axes::Heads => Ok(()),
            Extent::All | Extent::Values => Err(PlanFault::Shape(own.0)),
        }
    }
}
