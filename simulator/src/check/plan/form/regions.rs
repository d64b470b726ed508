//! Form of what is around a rank's heads in a sequence-parallel region.

use seamproof_oracle::Side;

use super::{At, Checked, Forms};
use crate::check::plan::error::PlanFault;
use crate::schedule::Layer;
use crate::schedule::plan::Own;

impl Forms<'_> {
    /// Checks a gather of the shards of a region, or a scatter of their sums.
    pub(super) fn gather_hidden(&self, shard: Own, hidden: Own) -> Checked {
        self.region()?;
        let side = self.side_of(shard, At::Shard)?;
        self.has_rows(hidden, side, At::Hidden)?;
        self.same_elements(shard, hidden)
    }

    pub(super) fn linear(&self, (side, layer): (Side, Layer), from: Own, to: Own) -> Checked {
        self.region()?;
        let (hidden, own) = if layer == Layer::Column { (from, to) } else { (to, from) };
        self.has_rows(hidden, side, At::Hidden)?;
        self.has_rows(own, side, At::Rank)?;
        self.same_elements(from, to)
    }

    pub(super) fn rotate(&self, buffer: Own, side: Side) -> Checked {
        self.region()?;
        self.has_rows(buffer, side, At::Rank)
    }

    fn region(&self) -> Checked {
        match self.plan.region_ranks() {
            1 => Err(PlanFault::Unknown("an operation of a region where there is none")),
            _ => Ok(()),
        }
    }

    /// Returns a side of which a buffer has the rows.
    fn side_of(&self, own: Own, at: At) -> Result<Side, PlanFault> {
        let mut sides = [Side::Q, Side::Kv].into_iter();
        sides.find(|side| self.has_rows(own, *side, at).is_ok()).ok_or(PlanFault::Shape(own.0))
    }
}
