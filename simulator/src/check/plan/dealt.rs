//! The rows of a plan: every position of a sequence is with one rank, slots lie apart, and an exchange brings the rows of
//! its members to the places where the ring has their positions.
//!
//! Rows are looked at one by one, each once.

use std::ops::Range;

use rayon::prelude::*;
use seamproof_oracle::sharding::PlacedRun;
use seamproof_oracle::{Run, Side, TensorName};

use super::error::Unproved;
use crate::schedule::plan::Plan;
use crate::shard::ShardedSide;

/// Content of a row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Row {
    /// A row that no sequence owns.
    #[default]
    Nobody,
    /// A row of a sequence's slot that no piece has.
    Slot(usize),
    /// Padding of a sequence.
    Padding(usize),
    /// A position of a sequence.
    Real(usize, usize),
}

/// Proves the claims of this file.
pub(super) fn check(plan: &Plan<'_>) -> Result<(), Unproved> {
    for side in [Side::Q, Side::Kv] {
        let [shards, pieces] = plan.cuts(side);
        for cut in [shards, pieces] {
            slots_apart(cut, side)?;
        }
        dealt_once(plan, side)?;
        // One list of a group's rows at a time.
        (0..pieces.cp).into_par_iter().try_for_each(|place| collected(plan, side, place))?;
    }
    (0..plan.members()).try_for_each(|member| heads(plan, member))?;
    (0..plan.region_ranks()).try_for_each(|place| region_heads(plan, place))
}

pub(super) fn tensor(side: Side) -> TensorName {
    if side == Side::Q { TensorName::Q } else { TensorName::K }
}

/// Checks that slots are inside a rank's tensor and have no row in common.
fn slots_apart(cut: &ShardedSide, side: Side) -> Result<(), Unproved> {
    let mut owned = vec![false; cut.rows];
    let rows = (0..cut.slots.len()).map(|sequence| cut.slot(sequence)).flat_map(|run| run.real_rows());
    for row in rows {
        match owned.get_mut(row) {
            Some(owned) if !*owned => *owned = true,
            _ => return Err(Unproved::Slots(tensor(side))),
        }
    }
    Ok(())
}

/// Checks that every position of every sequence is in one row of one rank.
fn dealt_once(plan: &Plan<'_>, side: Side) -> Result<(), Unproved> {
    let [shards, _] = plan.cuts(side);
    let mut times: Vec<Vec<u8>> = shards.slots.iter().map(|slot| vec![0; slot.len]).collect();
    for rank in 0..plan.size() {
        for PlacedRun { sequence, piece, local } in shards.placed(rank) {
            for index in 0..local.len {
                let position = piece.start + piece.step * index;
                if let Some(times) = times[sequence].get_mut(position) {
                    *times = times.saturating_add(1);
                }
            }
        }
    }
    for (sequence, times) in times.iter().enumerate() {
        if let Some(position) = times.iter().position(|times| *times != 1) {
            let (tensor, times) = (tensor(side), times[position].into());
            return Err(Unproved::Dealt { sequence, position, tensor, times });
        }
    }
    Ok(())
}

/// Returns the content of each row of a rank's tensor, or the row of a piece that is outside its slot or in another piece.
pub(super) fn rows(cut: &ShardedSide, rank: usize) -> Result<Vec<Row>, usize> {
    let mut rows = vec![Row::Nobody; cut.rows];
    for sequence in 0..cut.slots.len() {
        cut.slot(sequence).real_rows().for_each(|row| rows[row] = Row::Slot(sequence));
    }
    for PlacedRun { sequence, piece, local } in cut.placed(rank) {
        for index in 0..local.span {
            let row = local.row(index);
            let Some(there) = rows.get_mut(row).filter(|there| **there == Row::Slot(sequence)) else {
                return Err(row);
            };
            let position = piece.start + piece.step * index;
            *there = if index < local.len { Row::Real(sequence, position) } else { Row::Padding(sequence) };
        }
    }
    Ok(rows)
}

/// Checks that rows which an exchange collects come from where its members have these rows. Without an exchange, a ring's
/// member has a rank's own rows.
fn collected(plan: &Plan<'_>, side: Side, place: usize) -> Result<(), Unproved> {
    let [shards, pieces] = plan.cuts(side);
    let is_gathered = plan.gathers() && side == Side::Kv;
    let (rank, members) = match is_gathered {
        true => (0, plan.size()),
        false => (place * plan.members(), plan.members()),
    };
    let wrong = |row, fault| Unproved::Row { rank, tensor: tensor(side), row, fault };
    let of = |cut, rank| rows(cut, rank).map_err(|row| wrong(row, "is of a piece and not of its slot alone"));
    let from: Vec<Vec<Row>> =
        (0..members).map(|member| of(shards, rank + member)).collect::<Result<_, _>>()?;
    let (from, wanted) = (from.concat(), of(pieces, place)?);
    let pairs = match plan.has_exchange() || is_gathered {
        true => plan.collected(rank, side),
        false => vec![(Run::packed(0, from.len(), from.len()), Run::packed(0, wanted.len(), wanted.len()))],
    };
    let mut seen = [vec![false; from.len()], vec![false; wanted.len()]];
    for (source, target) in pairs {
        for (a, b) in source.real_rows().zip(target.real_rows()) {
            let (Some(found), Some(needed)) = (from.get(a), wanted.get(b)) else {
                return Err(wrong(b, "is outside"));
            };
            if found != needed {
                return Err(wrong(b, "does not get the position that it must hold"));
            }
            if std::mem::replace(&mut seen[0][a], true) || std::mem::replace(&mut seen[1][b], true) {
                return Err(wrong(b, "is moved twice"));
            }
        }
        if source.len != target.len {
            return Err(wrong(target.offset, "and those behind it are not as many as those they come from"));
        }
    }
    let missed = |row: &Row, seen: &bool| *row != Row::Nobody && !seen;
    let lost = [(&from, &seen[0]), (&wanted, &seen[1])];
    match lost
        .iter()
        .find_map(|(rows, seen)| rows.iter().zip(*seen).position(|(row, seen)| missed(row, seen)))
    {
        Some(row) => Err(wrong(row, "is not moved")),
        None => Ok(()),
    }
}

/// Blocks of heads of a side: that of a member, of the member before it, of the last member, all heads, and the number of
/// members that have each head.
struct Blocks {
    own: Range<usize>,
    before: Option<Range<usize>>,
    last: Range<usize>,
    all: usize,
    replicas: usize,
}

impl Blocks {
    /// Whether a member's block is the first one, or follows the one before or is the same where heads are replicated.
    fn follow(&self, member: usize) -> bool {
        let is_replica = !member.is_multiple_of(self.replicas);
        self.last.end == self.all
            && match &self.before {
                None => self.own.start == 0,
                Some(before) if is_replica => self.own == *before,
                Some(before) => self.own.start == before.end,
            }
    }
}

/// Checks that members have blocks of heads that are all heads, and that query heads read the KV heads of their block.
fn heads(plan: &Plan<'_>, member: usize) -> Result<(), Unproved> {
    let blocks = [Side::Q, Side::Kv].map(|side| Blocks {
        own: plan.heads_of(side, member),
        before: member.checked_sub(1).map(|before| plan.heads_of(side, before)),
        last: plan.heads_of(side, plan.members() - 1),
        all: plan.all_heads(side),
        replicas: plan.replicas(side),
    });
    let fits = [Side::Q, Side::Kv].map(|side| plan.block_heads(side));
    dealt_heads(blocks, member, plan.own().group(), fits)
}

/// Checks the same of the ranks of a region.
fn region_heads(plan: &Plan<'_>, place: usize) -> Result<(), Unproved> {
    let [problem, of] = [plan.problem().heads, plan.own().heads];
    let heads = |side, place| plan.region_heads(side, place).unwrap_or(0..plan.all_heads(side));
    let blocks = [(Side::Q, problem.q), (Side::Kv, problem.kv)].map(|(side, all)| Blocks {
        own: heads(side, place),
        before: place.checked_sub(1).map(|before| heads(side, before)),
        last: heads(side, plan.region_ranks() - 1),
        all,
        replicas: plan.region_replicas(side),
    });
    dealt_heads(blocks, place, plan.problem().group(), [of.q, of.kv])
}

fn dealt_heads(blocks: [Blocks; 2], member: usize, group: usize, fits: [usize; 2]) -> Result<(), Unproved> {
    let [q, kv] = [&blocks[0].own, &blocks[1].own];
    let of_group = q.len().checked_div(kv.len()).unwrap_or(0);
    // Query head h of the block reads KV head h / of_group of the block.
    let reads = (0..q.len()).all(|head| (q.start + head) / group == kv.start + head / of_group.max(1));
    let follow = blocks.iter().all(|blocks| blocks.follow(member));
    match reads && [q.len(), kv.len()] == fits && follow && !q.is_empty() {
        true => Ok(()),
        false => Err(Unproved::Heads(member)),
    }
}
