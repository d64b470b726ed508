//! All ranks together, in rounds: each rank goes through its program in the host's order up to its next message or
//! collective, and these must meet.

use std::mem::discriminant;

use rayon::prelude::*;
use seamproof_oracle::TensorName;

use super::error::{PlanFault, Unproved};
use super::value::{Value, Whole, joined};
use super::values::Values;
use crate::schedule::plan::{Act, Op, Own, Plan, Programs, Way};

/// A rank on its way through its program.
struct Walker<'p> {
    rank: usize,
    values: Values<'p>,
    ops: Vec<Op>,
    /// Index of the next operation in the section.
    next: usize,
    /// Number of sections that have been begun.
    begun: usize,
}

impl Walker<'_> {
    /// Runs the rank up to its next message or collective.
    fn walk(&mut self, programs: &dyn Programs) -> Result<(), Unproved> {
        loop {
            while let Some(op) = self.ops.get(self.next) {
                if is_meeting(&op.act) {
                    return Ok(());
                }
                self.values.run(&op.act).map_err(|fault| self.wrong(fault))?;
                self.next += 1;
            }
            if self.begun == programs.sections() {
                return Ok(());
            }
            self.ops.clear();
            self.next = 0;
            programs.section(self.rank, self.begun, &mut self.ops);
            self.begun += 1;
        }
    }

    fn wrong(&self, fault: PlanFault) -> Unproved {
        let (rank, section, operation) = (self.rank, self.begun.saturating_sub(1), self.next);
        Unproved::Operation { rank, section, operation, fault }
    }

    /// Returns the message or collective that the rank is at; `None` at the end.
    fn at(&self) -> Option<Act> {
        self.ops.get(self.next).map(|op| op.act)
    }
}

fn is_meeting(act: &Act) -> bool {
    matches!(
        act,
        Act::Exchange { .. }
            | Act::AllToAll { .. }
            | Act::Trade { .. }
            | Act::GatherHidden { .. }
            | Act::ScatterHidden { .. }
            | Act::AllGather { .. }
            | Act::ReduceScatter { .. }
            | Act::GatherHeads { .. }
            | Act::AllReduce { .. }
    )
}

/// Proves that all ranks meet, come to their ends, and hold the results there.
pub(super) fn check(plan: &Plan<'_>, programs: &dyn Programs) -> Result<(), Unproved> {
    let walker = |rank| {
        let values = Values::new(plan, rank);
        Walker { rank, values, ops: Vec::new(), next: 0, begun: 0 }
    };
    let mut walkers: Vec<Walker<'_>> = (0..plan.ranks()).map(walker).collect();
    loop {
        walkers.par_iter_mut().try_for_each(|walker| walker.walk(programs))?;
        if walkers.iter().all(|walker| walker.at().is_none()) {
            return walkers.iter_mut().try_for_each(|walker| finish(plan, walker));
        }
        meet(plan, &mut walkers)?;
        walkers.iter_mut().for_each(|walker| walker.next += 1);
    }
}

fn finish(plan: &Plan<'_>, walker: &mut Walker<'_>) -> Result<(), Unproved> {
    walker.values.finish().map_err(|own| Unproved::End {
        rank: walker.rank,
        buffer: plan.buffers()[usize::from(own.0)].name.to_string(),
        found: walker.values.get(own).to_string(),
    })
}

/// Runs the message or collective of every rank.
fn meet(plan: &Plan<'_>, walkers: &mut [Walker<'_>]) -> Result<(), Unproved> {
    let acts: Vec<Option<Act>> = walkers.iter().map(Walker::at).collect();
    for (rank, act) in acts.iter().enumerate() {
        met(plan, &acts, rank, act.as_ref()).map_err(|fault| walkers[rank].wrong(fault))?;
    }
    let sent: Vec<[Value; 2]> = walkers.iter_mut().map(given).collect::<Result<_, _>>()?;
    let groups: Vec<Value> = combined(plan, &acts, &sent);
    for (walker, act) in walkers.iter_mut().zip(&acts) {
        let Some(act) = act else { continue };
        let rank = walker.rank;
        received(walker, act, &sent, groups[rank]).map_err(|fault| walker.wrong(fault))?;
    }
    Ok(())
}

/// Returns the ranks of a collective: the first one, how far each is from the next, and their number. In regions, the group
/// has each collective of its own once for each rank of one.
fn peers(plan: &Plan<'_>, rank: usize, act: &Act) -> impl Iterator<Item = usize> + use<> {
    let (region, members) = (plan.region_ranks(), plan.members());
    let of_place = region * members;
    let [first, step, count] = match act {
        Act::GatherHidden { .. } | Act::ScatterHidden { .. } => [rank - rank % region, 1, region],
        Act::Trade { .. } | Act::AllGather { .. } | Act::ReduceScatter { .. } => {
            [rank % region, region, plan.size()]
        }
        Act::AllReduce { .. } => [rank % of_place, of_place, plan.places()],
        _ => [rank - rank % of_place + rank % region, region, members],
    };
    (0..count).map(move |index| first + index * step)
}

/// Whether two operations are the same collective, with any buffers.
fn are_alike(one: &Act, other: &Act) -> bool {
    match (one, other) {
        (
            Act::AllToAll { side, way, landings, .. },
            Act::AllToAll { side: of, way: other, landings: count, .. },
        ) => (side, way, landings) == (of, other, count),
        (Act::Trade { loan, .. }, Act::Trade { loan: of, .. }) => loan == of,
        _ => discriminant(one) == discriminant(other),
    }
}

/// Checks that the ranks that a rank waits for wait for it.
fn met(plan: &Plan<'_>, acts: &[Option<Act>], rank: usize, act: Option<&Act>) -> Result<(), PlanFault> {
    let Some(act) = act else { return Err(PlanFault::Alone(rank)) };
    let Act::Exchange { to, from, .. } = *act else {
        let is_here = |other: &usize| acts[*other].is_some_and(|other| are_alike(act, &other));
        let alone = peers(plan, rank, act).find(|other| !is_here(other));
        return alone.map_or(Ok(()), |other| Err(PlanFault::Alone(other)));
    };
    // A rank of another ring has other heads.
    let rings = plan.members() * plan.region_ranks();
    let is_other = |peer: &u32| *peer as usize % rings != rank % rings;
    if let Some(peer) = [to, from].into_iter().find(is_other) {
        return Err(PlanFault::Stranger(peer as usize));
    }
    let peer = |rank: u32| acts.get(rank as usize).copied().flatten();
    let is_received = matches!(peer(to), Some(Act::Exchange { from, .. }) if from as usize == rank);
    let is_sent = matches!(peer(from), Some(Act::Exchange { to, .. }) if to as usize == rank);
    let alone = |peer: u32| Err(PlanFault::Alone(peer as usize));
    match (is_received && to as usize != rank, is_sent && from as usize != rank) {
        (false, _) => alone(to),
        (_, false) => alone(from),
        _ => Ok(()),
    }
}

/// Returns what a rank gives to its message or collective.
fn given(walker: &mut Walker<'_>) -> Result<[Value; 2], Unproved> {
    let taken = match walker.at() {
        Some(Act::Exchange { sent: [one, two], .. }) => {
            walker.values.send(one).and_then(|one| Ok([one, walker.values.send(two)?]))
        }
        Some(Act::AllToAll { side, way, from, .. }) => {
            walker.values.give(from, side, way).map(|value| [value, Value::Nothing])
        }
        Some(Act::GatherHidden { from, .. }) => {
            walker.values.hidden(from).map(|value| [value, Value::Nothing])
        }
        Some(Act::ScatterHidden { from, .. }) => {
            walker.values.summand(from).map(|value| [value, Value::Nothing])
        }
        Some(Act::Trade { loan, from, .. }) => {
            walker.values.lent(from, loan).map(|value| [value, Value::Nothing])
        }
        Some(Act::AllGather { from, .. }) => {
            walker.values.gathered(from).map(|value| [value, Value::Nothing])
        }
        Some(Act::ReduceScatter { from, .. }) => {
            walker.values.scattered(from).map(|value| [value, Value::Nothing])
        }
        Some(Act::AllReduce { buffer }) => walker.values.largest(buffer, false).map(|()| [Value::Nothing; 2]),
        Some(Act::GatherHeads { from, .. }) => walker.values.take_largest(from).map(|()| [Value::Nothing; 2]),
        _ => Ok([Value::Nothing; 2]),
    };
    taken.map_err(|fault| walker.wrong(fault))
}

/// Returns for each rank what its collective brings: what all members of its group give, where zeros are a part of
/// anything. Members that give different things bring nothing.
fn combined(plan: &Plan<'_>, acts: &[Option<Act>], sent: &[[Value; 2]]) -> Vec<Value> {
    let brings =
        |act: &&Act| !matches!(act, Act::Exchange { .. } | Act::AllReduce { .. } | Act::GatherHeads { .. });
    let of_rank = |(rank, act): (usize, &Option<Act>)| {
        let act = act.as_ref().filter(brings)?;
        let all = peers(plan, rank, act).map(|peer| sent[peer][0]);
        all.reduce(|a, b| both(a, b).unwrap_or(Value::Nothing))
    };
    acts.iter().enumerate().map(|act| of_rank(act).unwrap_or(Value::Nothing)).collect()
}

/// Returns what two members give together.
fn both(a: Value, b: Value) -> Option<Value> {
    match (a, b) {
        (Value::RankedResult(a), Value::RankedResult(b)) => joined(a, b).map(Value::RankedResult),
        (Value::RankedSum(a), Value::RankedSum(b)) => joined(a, b).map(Value::RankedSum),
        (Value::Summand(a), Value::Summand(b)) => joined(a, b).map(Value::Summand),
        (Value::Loaned { of: a, loan, arrived }, Value::Loaned { of: b, loan: other, .. })
            if loan == other =>
        {
            joined(a, b).map(|of| Value::Loaned { of, loan, arrived })
        }
        _ => (a == b).then_some(a),
    }
}

/// Writes what a rank gets.
fn received(walker: &mut Walker<'_>, act: &Act, sent: &[[Value; 2]], group: Value) -> Result<(), PlanFault> {
    let values = &mut walker.values;
    match *act {
        Act::Exchange { from, received, .. } => {
            let arrived = sent[from as usize];
            received.into_iter().zip(arrived).try_for_each(|(own, value)| values.write(own, value))
        }
        Act::AllToAll { way: Way::Collect, to, .. } => match group {
            Value::Local(tensor) => values.write(to, Value::Ranked(tensor)),
            _ => Err(PlanFault::Unknown("an all-to-all of different tensors")),
        },
        Act::AllToAll { way: Way::Deal, to, landings, .. } => match group {
            Value::RankedResult(of) => (0..landings).try_for_each(|first| {
                values.write(Own(to.0.saturating_add(first)), Value::Landed { of, first, count: 1 })
            }),
            _ => Err(PlanFault::Unknown("an all-to-all of different results")),
        },
        Act::GatherHidden { to, .. } => match group {
            Value::Hidden(tensor) => values.write(to, Value::AllHidden(tensor)),
            _ => Err(PlanFault::Unknown("a gather of different hidden tensors")),
        },
        Act::ScatterHidden { to, .. } => match group {
            Value::Summand(whole) => values.write(to, Value::Scattered(whole)),
            _ => Err(PlanFault::Unknown("a sum of different hidden results")),
        },
        Act::Trade { to, .. } => match group {
            Value::Loaned { of, loan, .. } => {
                values.write(to, Value::Loaned { of, loan: loan.other(), arrived: true })
            }
            _ => Err(PlanFault::Unknown("an exchange of loans of different tensors")),
        },
        Act::AllGather { to, .. } => match group {
            Value::Local(tensor) => values.write(to, Value::Ranked(tensor)),
            _ => Err(PlanFault::Unknown("a gather of different tensors")),
        },
        Act::ReduceScatter { to, .. } => match group {
            Value::RankedSum(of) => values.write(to, Value::Landed { of, first: 0, count: 1 }),
            _ => Err(PlanFault::Unknown("a sum of different gradients")),
        },
        Act::AllReduce { buffer } => {
            values.reduced(buffer);
            Ok(())
        }
        Act::GatherHeads { to, .. } => values.write(to, Value::Done(Whole::Of(TensorName::MaxLogit))),
        _ => Ok(()),
    }
}
