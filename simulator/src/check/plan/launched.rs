//! The launches of one rank: none is there twice in a pass, and together they show its queries what the mask does.
//!
//! Launches name pieces, and pieces have no pair in common. What a set of different launches shows is therefore a part of
//! what the mask shows ([`PiecePairs`](crate::schedule::plan::PiecePairs) has proved this of each two pieces), and it is
//! all of it if the numbers of pairs are equal.

use super::error::{PlanFault, Unproved};
use crate::schedule::plan::{Act, Launch, PieceId, Plan};

/// The launches of a rank's pass so far.
pub(super) struct Launched<'p> {
    plan: &'p Plan<'p>,
    rank: usize,
    /// Whether an owner's part of the keys met a part of the queries.
    met: Vec<bool>,
    /// Pairs of each kind of sequences.
    pairs: Vec<u64>,
}

impl<'p> Launched<'p> {
    pub(super) fn new(plan: &'p Plan<'p>, rank: usize) -> Launched<'p> {
        let met = vec![false; plan.places() * plan.parts() * plan.parts()];
        Launched { plan, rank, met, pairs: vec![0; plan.pairs().kinds().count()] }
    }

    /// Notes an operation of the pass, which has pieces that there are.
    pub(super) fn run(&mut self, act: &Act, is_backward: bool) -> Result<(), PlanFault> {
        match (act, is_backward) {
            (Act::Attend { launch, .. }, false) => self.launch(*launch),
            (Act::AttendBackward { launch, .. }, true) if launch.queries[1] - launch.queries[0] > 1 => {
                // Two parts of the queries would write one row of the keys.
                Err(PlanFault::Launched(*launch))
            }
            (Act::AttendBackward { launch, .. }, true) => self.launch(*launch),
            (Act::Attend { .. } | Act::AttendBackward { .. }, _) => {
                Err(PlanFault::Unknown("a launch of the other pass"))
            }
            _ => Ok(()),
        }
    }

    fn launch(&mut self, launch: Launch) -> Result<(), PlanFault> {
        let Launch { owner, queries: [first, end], keys } = launch;
        let (parts, member) = (self.plan.parts(), self.plan.place(self.rank));
        let of = PieceId { member: owner as usize, part: keys.into() };
        for part in first.into()..end.into() {
            let met = &mut self.met[(of.member * parts + of.part) * parts + part];
            if std::mem::replace(met, true) {
                return Err(PlanFault::Launched(launch));
            }
            for (kind, pairs) in self.pairs.iter_mut().enumerate() {
                *pairs += self.plan.pairs().of(kind, PieceId { member, part }, of);
            }
        }
        Ok(())
    }

    /// Ends the pass. Returns its number of pairs, over all sequences.
    pub(super) fn finish(self, pass: &'static str) -> Result<u64, Unproved> {
        let (rank, member) = (self.rank, self.plan.place(self.rank));
        let mut total = 0;
        for (kind, (sequence, count)) in self.plan.pairs().kinds().enumerate() {
            let shown = |part| self.plan.pairs().shown(kind, PieceId { member, part });
            let (got, expected) = (self.pairs[kind], (0..self.plan.parts()).map(shown).sum());
            if got != expected {
                return Err(Unproved::Pairs { rank, pass, sequence, got, expected });
            }
            total += got * count as u64;
        }
        Ok(total)
    }
}
