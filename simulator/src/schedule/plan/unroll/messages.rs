//! Messages and collectives with the regions that they carry.

use seamproof_oracle::Side;

use super::super::act::{Own, Way};
use super::works::Works;
use crate::schedule::program::{Reduction, Region, Work};

impl Works<'_> {
    /// Returns a send and a receive of one group.
    pub(super) fn exchange(
        &self,
        (to, sent): (u32, [Own; 2]),
        (from, received): (u32, [Own; 2]),
        group: usize,
    ) -> [Work; 2] {
        let regions = |buffers: [Own; 2]| buffers.map(|own| self.all(own)).to_vec();
        [
            Work::Send { to: to as usize, group: Some(group), regions: regions(sent) },
            Work::Recv { from: from as usize, group: Some(group), regions: regions(received) },
        ]
    }

    pub(super) fn all_to_all(&self, (side, way): (Side, Way), from: Own, to: Own, landings: u16) -> Work {
        let (members, rows) = (0..self.plan.members, self.plan.rows(side));
        let part = |own, member| self.part(own, member, rows);
        let of_heads = |own, member| Region { heads: self.plan.heads.of(side, member), ..self.all(own) };
        let landings = usize::from(landings.max(1));
        let landing = |member: usize| Own(to.0.saturating_add((member % landings) as u16));
        let (send, recv) = match way {
            Way::Collect => (
                members.clone().map(|member| of_heads(from, member)).collect(),
                members.map(|member| part(to, member)).collect(),
            ),
            Way::Deal => (
                members.clone().map(|member| part(from, member)).collect(),
                members.map(|member| of_heads(landing(member), member)).collect(),
            ),
        };
        Work::AllToAll { communicator: self.plan.exchange_communicator(self.rank), send, recv }
    }

    pub(super) fn all_gather(&self, from: Own, to: Own) -> Work {
        Work::AllGather { communicator: 0, from: self.all(from), to: self.of_ranks(to) }
    }

    pub(super) fn reduce_scatter(&self, from: Own, to: Own) -> Work {
        Work::ReduceScatter { communicator: 0, from: self.of_ranks(from), to: self.all(to) }
    }

    /// Returns the keys of each rank in a buffer in rank order.
    fn of_ranks(&self, own: Own) -> Vec<Region> {
        let rows = self.plan.rows(Side::Kv);
        (0..self.plan.size()).map(|member| self.part(own, member, rows)).collect()
    }

    pub(super) fn gather_heads(&self, from: Own, to: Own) -> Work {
        let of = |member| Region { heads: self.plan.heads.of(Side::Q, member), ..self.all(to) };
        let to = (0..self.plan.members).map(of).collect();
        let communicator = self.plan.exchange_communicator(self.rank);
        Work::AllGather { communicator, from: self.all(from), to }
    }

    pub(super) fn all_reduce(&self, buffer: Own) -> Work {
        let (communicator, region) = (self.plan.ring_communicator(self.rank), self.all(buffer));
        Work::AllReduce { communicator, region, reduction: Reduction::Max }
    }
}
