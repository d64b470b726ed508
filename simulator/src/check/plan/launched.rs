//! The launches of one rank: in a pass, each piece of its queries meets each piece of keys of which it sees a key once.
//!
//! Launches name pieces, and pieces have no pair in common. [`PiecePairs`](crate::schedule::plan::PiecePairs) has proved
//! of each two pieces that a launch of both shows what the mask shows of them.

use super::error::{PlanFault, Unproved};
use crate::schedule::plan::{Act, Launch, PieceId, Plan};

/// The launches of a rank's pass so far.
pub(super) struct Launched<'p> {
    plan: &'p Plan<'p>,
    rank: usize,
    /// Whether an owner's part of the keys met a part of the queries.
    met: Vec<bool>,
}

impl<'p> Launched<'p> {
    pub(super) fn new(plan: &'p Plan<'p>, rank: usize) -> Launched<'p> {
        let [q_parts, kv_parts] = plan.parts();
        let met = vec![false; plan.owners() * kv_parts * q_parts];
        Launched { plan, rank, met }
    }

    /// Notes an operation of the pass, which has pieces that there are.
    pub(super) fn run(&mut self, act: &Act, is_backward: bool) -> Result<(), PlanFault> {
        match (act, is_backward) {
            (Act::Attend { launch, .. }, false) => self.launch(*launch),
            (Act::AttendBackward { launch, .. } | Act::AttendGathered { launch, .. }, true)
                if launch.queries[1] - launch.queries[0] > 1 =>
            {
                // Two parts of the queries would write one row of the keys.
                Err(PlanFault::Launched(*launch))
            }
            (Act::AttendBackward { launch, .. } | Act::AttendGathered { launch, .. }, true) => {
                self.launch(*launch)
            }
            (Act::AttendWhole { .. }, false) | (Act::AttendBackwardWhole { .. }, true) => {
                let queries = [0, self.plan.parts()[0] as u16];
                self.launch(Launch { owner: 0, queries, keys: 0 })
            }
            (
                Act::Attend { .. }
                | Act::AttendWhole { .. }
                | Act::AttendBackward { .. }
                | Act::AttendGathered { .. }
                | Act::AttendBackwardWhole { .. },
                _,
            ) => Err(PlanFault::Unknown("a launch of the other pass")),
            _ => Ok(()),
        }
    }

    fn launch(&mut self, launch: Launch) -> Result<(), PlanFault> {
        let Launch { owner, queries: [first, end], keys } = launch;
        let [q_parts, kv_parts] = self.plan.parts();
        for part in usize::from(first)..usize::from(end) {
            let met = &mut self.met[(owner as usize * kv_parts + usize::from(keys)) * q_parts + part];
            if std::mem::replace(met, true) {
                return Err(PlanFault::Launched(launch));
            }
        }
        Ok(())
    }

    /// Ends the pass. Returns its number of pairs, over all sequences.
    pub(super) fn finish(self, pass: &'static str) -> Result<u64, Unproved> {
        let (rank, [q_parts, kv_parts], pairs) = (self.rank, self.plan.parts(), self.plan.pairs());
        let member = self.plan.place(rank);
        for (index, _) in self.met.iter().enumerate().filter(|(_, met)| !**met) {
            let of_keys = index / q_parts;
            let keys = PieceId { member: of_keys / kv_parts, part: of_keys % kv_parts };
            let queries = PieceId { member, part: index % q_parts };
            if pairs.sees(queries, keys) {
                return Err(Unproved::Missing { rank, pass, queries, keys });
            }
        }
        let shown = |part| pairs.shown(PieceId { member, part });
        Ok((0..q_parts).map(shown).sum())
    }
}
