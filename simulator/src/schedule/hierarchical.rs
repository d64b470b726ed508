//! Hierarchical: all-to-all inside groups, a ring between them (`a2a+p2p`).
//!
//! There are `A·P` ranks. Rank `g = p·A + a` is *member* a of *group* p. The members of a group exchange rows for
//! heads, and together they collect exactly the rows that one rank of a ring of P holds: chunks `p·A … p·A + A − 1` of
//! `2·A·P` are chunk p of `2·P`, and likewise their mirrors. Member a of every group then runs a ring with the a-th
//! block of heads, and the results travel back. The collected rows follow the sequence order of all ranks, read back
//! through the sequence order of the ring.
//!
//! Stripes of `w` rows of a group's members, taken in order of positions, are stripes of `A·w` rows of a ring's rank.
//! Stripes of one row are taken member by member instead: rank p of the ring has a piece for each member, and piece a
//! holds positions `p·A + a, p·A + a + A·P, …`. All pieces have this one step, so any two of them have a band, and a
//! step of the ring is a launch for each piece of the keys.
//!
//! | refused | why |
//! |---|---|
//! | [`BuildError::QueryHeads`] | query heads that are no multiple of a group's members |
//! | [`BuildError::KvHeads`] | KV heads that are neither a multiple nor a divisor of a group's members |
//! | [`BuildError::Shard`] | a span that the balance cannot cut, rows that lie apart and not side by side |

use std::ops::Range;

use seamproof_oracle::{Balance, Problem, Run};

use super::build::{self, BuildError, Builder, Local, LocalBackward, Shards};
use super::exchange::{Exchange, HeadDeal};
use super::program::{MergeOrder, RowPair, Schedule};
use super::ring::{Member, RingCore};
use crate::shard::{ShardedSide, Slot};

/// Returns the hierarchical schedule with groups of `members` ranks, a divisor of the CP size. The module's text says
/// which problems are refused.
pub fn hierarchical(problem: &Problem, members: usize, order: MergeOrder) -> Result<Schedule, BuildError> {
    let heads = HeadDeal::new(problem.heads, members)?;
    let shards = Shards::new(problem)?;
    let ranks = problem.parallel.size();
    let mut builder = Builder::new(ranks);
    let ring = Shards { q: joined(&shards.q, members), kv: joined(&shards.kv, members) };
    let exchanges = (0..ranks / members).map(|group| {
        let of_group = group * members..(group + 1) * members;
        let communicator = builder.communicator(of_group.clone().collect());
        let order = |all: &ShardedSide, ring: &ShardedSide| ring_order(all, ring, group, of_group.clone());
        let orders = [order(&shards.q, &ring.q), order(&shards.kv, &ring.kv)];
        Exchange::new(communicator, members, heads, &shards, orders)
    });
    let exchanges: Vec<Exchange> = exchanges.collect();
    let rings: Vec<usize> =
        (0..members).map(|a| builder.communicator((a..ranks).step_by(members).collect())).collect();
    let locals: Vec<Local> = (0..ranks)
        .map(|rank| {
            let sinks = heads.sinks(problem, rank % members);
            build::local_with_sinks(&mut builder, problem, &shards, rank, sinks)
        })
        .collect();
    let ring = ring.of_ring();
    let world = World { problem, members, exchanges: &exchanges, rings: &rings, shards: &ring, order };
    world.build(&mut builder, &locals);
    Ok(builder.finish())
}

/// All groups and rings of a hierarchical schedule.
struct World<'a> {
    problem: &'a Problem,
    /// Number of members of a group.
    members: usize,
    /// Exchange of each group.
    exchanges: &'a [Exchange],
    /// Communicator of the ring of each member of a group.
    rings: &'a [usize],
    /// Both sides cut over the ranks of a ring.
    shards: &'a Shards,
    /// Order in which the rings merge.
    order: MergeOrder,
}

impl World<'_> {
    fn build(&self, builder: &mut Builder, locals: &[Local]) {
        let mut blocks: Vec<Local> =
            locals.iter().enumerate().map(|(g, local)| self.exchange(g).begin(builder, g, local)).collect();
        self.on_rings(&blocks, |ring| ring.forward(builder));
        for (g, (block, local)) in blocks.iter().zip(locals).enumerate() {
            self.exchange(g).end(builder, g, block, local);
        }
        let results: Vec<LocalBackward> = locals.iter().filter_map(|local| local.backward).collect();
        if results.is_empty() {
            return;
        }
        builder.begin_backward();
        let mut gradients = Vec::new();
        for (g, (block, to)) in blocks.iter_mut().zip(&results).enumerate() {
            let collected = self.exchange(g).begin_backward(builder, g, block, to);
            *block = Local { backward: Some(collected), ..*block };
            gradients.push(collected);
        }
        self.on_rings(&blocks, |ring| ring.backward(builder));
        for (g, (from, to)) in gradients.iter().zip(&results).enumerate() {
            self.exchange(g).end_backward(builder, g, from, to);
        }
    }

    /// Returns the exchange of a rank's group.
    fn exchange(&self, rank: usize) -> &Exchange {
        &self.exchanges[rank / self.members]
    }

    /// Calls `act` on the ring of every block of heads.
    fn on_rings(&self, blocks: &[Local], mut act: impl FnMut(&RingCore<'_>)) {
        for (a, &communicator) in self.rings.iter().enumerate() {
            let of_ring = blocks.iter().enumerate().skip(a).step_by(self.members);
            let members: Vec<Member> = of_ring.map(|(rank, &local)| Member { rank, local }).collect();
            let (mask, softmax) = (self.problem.mask, self.problem.softmax);
            let (shards, order) = (self.shards, self.order);
            act(&RingCore { mask, softmax, shards, members: &members, communicator, order });
        }
    }
}

/// Returns a shard over groups of `members` ranks, each of which holds the rows of its members together.
pub(super) fn joined(shard: &ShardedSide, members: usize) -> ShardedSide {
    let slot = |slot: &Slot| Slot { offset: slot.offset * members, span: slot.span * members, len: slot.len };
    let (balance, taken_apart) = match shard.balance {
        Balance::Striped { stripe: 1 } => (shard.balance, members),
        Balance::Striped { stripe } => (Balance::Striped { stripe: stripe * members }, 1),
        _ => (shard.balance, 1),
    };
    ShardedSide {
        cp: shard.cp / members,
        balance,
        members: shard.members * taken_apart,
        rows: shard.rows * members,
        slots: shard.slots.iter().map(slot).collect(),
        lanes: shard.lanes.map(|lanes| lanes.whole(members)),
    }
}

/// Returns row pairs from the rows of a group's members, one after the other, to the rows on the group's rank of a
/// ring.
pub(super) fn ring_order(
    all: &ShardedSide,
    ring: &ShardedSide,
    group: usize,
    members: Range<usize>,
) -> Vec<RowPair> {
    // Runs of sequence order, which both cuts share, each with its first row on the ring's rank. A run of a member lies
    // in one of them, or is one of them where they are stripes.
    let mut runs: Vec<(Run, usize)> =
        ring.moves(group).into_iter().map(|(here, there)| (there, here.offset)).collect();
    runs.sort_by_key(|(there, _)| there.offset);
    let on_ring = |run: Run| {
        let holder = runs.partition_point(|(there, _)| there.offset <= run.offset).checked_sub(1)?;
        let (there, here) = runs[holder];
        Some(ring.on_rank(Run { offset: here + run.offset - there.offset, step: 1, ..run }))
    };
    let of_member = |(member, rank): (usize, usize)| {
        let pairs = all.moves(rank).into_iter();
        pairs.map(move |(here, run)| {
            let here = all.on_rank(here);
            (Run { offset: member * all.rows + here.offset, ..here }, run)
        })
    };
    let pairs = members.enumerate().flat_map(of_member);
    pairs.filter_map(|(from, run)| Some((from, on_ring(run)?))).collect()
}

#[cfg(test)]
mod tests {
    use seamproof_oracle::Balance;

    use super::*;

    #[test]
    fn a_group_holds_what_a_rank_of_a_ring_would() {
        for (groups, members) in (1..=4).flat_map(|p| (1..=4).map(move |a| (p, a))) {
            let stripes = [1, 2].map(|stripe| Balance::Striped { stripe });
            for balance in [Balance::Contiguous, Balance::DualChunk].into_iter().chain(stripes) {
                let ranks = groups * members;
                let slot = |offset, span| Slot { offset, span, len: span * ranks };
                let slots = vec![slot(7, 2), slot(1, 0), slot(2, 4)];
                let all = ShardedSide { cp: ranks, balance, members: 1, rows: 11, slots, lanes: None };
                let ring = joined(&all, members);
                for group in 0..groups {
                    let of_group = group * members..(group + 1) * members;
                    let there = ring.partition_indices(group);
                    let mut seen = vec![false; ring.rows];
                    for (from, to) in ring_order(&all, &ring, group, of_group.clone()) {
                        for (from, to) in from.real_rows().zip(to.real_rows()) {
                            let (member, row) = (from / all.rows, from % all.rows);
                            let position = all.partition_indices(of_group.start + member)[row];
                            assert_eq!(there[to], position, "{all:?} group {group} of {members}");
                            assert!(!std::mem::replace(&mut seen[to], true));
                        }
                    }
                    assert!(seen.into_iter().all(|seen| seen));
                }
            }
        }
    }
}
