//! The launches of one rank: in a pass, each piece of its queries meets each piece of keys of which it sees a key once.
//!
//! Launches name pieces, and pieces have no pair in common. [`PiecePairs`](crate::schedule::plan::PiecePairs) has proved
//! of each two pieces that a launch of both shows what the mask shows of them.

use super::error::{PlanFault, Unproved};
use crate::schedule::plan::{Act, Launch, PieceId, PiecePairs, Plan};

/// The launches of a rank's pass so far.
pub(super) struct Launched<'p> {
    plan: &'p Plan<'p>,
    pairs: &'p PiecePairs,
    rank: usize,
    is_backward: bool,
    /// Whether a part of the queries met an owner's part of the keys. The part of the keys varies fastest.
    met: Vec<bool>,
}

impl<'p> Launched<'p> {
    pub(super) fn new(plan: &'p Plan<'p>, rank: usize, is_backward: bool) -> Launched<'p> {
        let pairs = plan.pairs(is_backward);
        let [q_parts, kv_parts] = pairs.parts();
        let met = vec![false; q_parts * plan.owners() * kv_parts];
        Launched { plan, pairs, rank, is_backward, met }
    }

    /// Notes an operation of the pass, which has pieces that there are.
    pub(super) fn run(&mut self, act: &Act) -> Result<(), PlanFault> {
        match (act, self.is_backward) {
            (Act::Attend { launch, .. } | Act::AttendStep { launch, .. }, false) => self.launch(*launch),
            (Act::AttendBackward { launch, .. } | Act::AttendGathered { launch, .. }, true)
                if launch.queries[1] - launch.queries[0] > 1 =>
            {
                // Two parts of the queries would write one row of the keys.
                Err(PlanFault::Launched(*launch))
            }
            (Act::AttendBackward { launch, .. } | Act::AttendGathered { launch, .. }, true) => {
                self.launch(*launch)
            }
            (Act::AttendBackwardEach { launches, .. }, true) => {
                let plan = self.plan;
                let mut each = plan.each_launch(plan.place(self.rank), launches);
                each.try_for_each(|launch| self.launch(launch))
            }
            (Act::AttendWhole { .. }, false) | (Act::AttendBackwardWhole { .. }, true) => {
                let queries = [0, self.pairs.parts()[0] as u16];
                self.launch(Launch { owner: 0, queries, keys: 0 })
            }
            (
                Act::Attend { .. }
                | Act::AttendStep { .. }
                | Act::AttendWhole { .. }
                | Act::AttendBackward { .. }
                | Act::AttendBackwardEach { .. }
                | Act::AttendGathered { .. }
                | Act::AttendBackwardWhole { .. },
                _,
            ) => Err(PlanFault::Unknown("a launch of the other pass")),
            _ => Ok(()),
        }
    }

    fn launch(&mut self, launch: Launch) -> Result<(), PlanFault> {
        let Launch { owner, queries: [first, end], keys } = launch;
        let (kv_parts, owners) = (self.pairs.parts()[1], self.plan.owners());
        for part in usize::from(first)..usize::from(end) {
            let met = &mut self.met[(part * owners + owner as usize) * kv_parts + usize::from(keys)];
            if std::mem::replace(met, true) {
                return Err(PlanFault::Launched(launch));
            }
        }
        Ok(())
    }

    /// Ends the pass. Returns its number of pairs, over all sequences.
    pub(super) fn finish(self) -> Result<u64, Unproved> {
        let (rank, [q_parts, kv_parts], pairs) = (self.rank, self.pairs.parts(), self.pairs);
        let (member, pass) = (self.plan.place(rank), if self.is_backward { "backward" } else { "forward" });
        for (index, met) in self.met.chunks(kv_parts.max(1)).enumerate() {
            let (part, owner) = (index / self.plan.owners(), index % self.plan.owners());
            let queries = PieceId { member, part };
            let missing = pairs.seen(queries, owner).iter().zip(met).position(|(seen, met)| *seen && !met);
            if let Some(part) = missing {
                return Err(Unproved::Missing { rank, pass, queries, keys: PieceId { member: owner, part } });
            }
        }
        let shown = |part| pairs.shown(PieceId { member, part });
        Ok((0..q_parts).map(shown).sum())
    }
}
