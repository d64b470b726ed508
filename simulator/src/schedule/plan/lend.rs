//! The plan of keys that sequences share, around a plan in which each sequence has keys of its own. It has the same
//! operations as [`super::super::lending`], which says why they are right.

use seamproof_oracle::{Problem, TensorName};

use super::act::{Act, Extent, Loan, Mark, Op, Own};
use super::barrier::Barrier;
use super::{Around, own};
use crate::schedule::BufferId;
use crate::schedule::build::{Builder, Local, Shards};
use crate::schedule::lending::{ARRIVED, Desk, desks};
use crate::schedule::program::{Buffer, Role};

const COMPUTE: u8 = 0;
const COMMUNICATION: u8 = 2;

/// Marks of the loans of a tensor: rows are ready to be sent, and have arrived.
const MARKS_OF_TENSOR: u32 = 2;

/// A tensor of the plan inside that is no input or result of the plan around it.
#[derive(Debug)]
struct Inside {
    name: TensorName,
    inside: Own,
    outside: Own,
    /// The rows that are sent and those that arrive, with the marks of both; none for dq.
    loans: Option<([Own; 2], [Mark; 2])>,
}

/// Loans around a plan.
#[derive(Debug)]
pub(super) struct LendPlan {
    /// K and V, and then gradients.
    tensors: Vec<Inside>,
    /// What each rank lends and borrows.
    pub(super) desks: Vec<Desk>,
    /// Around the plan inside in each pass.
    barriers: [Barrier; 2],
}

impl LendPlan {
    /// Makes the buffers in the order in which the builder makes them. `events` and `streams` are those of the plan inside.
    pub(super) fn new(
        builder: &mut Builder,
        problem: &Problem,
        (shards, local): (&Shards, &Local),
        (events, streams): (usize, &[u8]),
    ) -> LendPlan {
        let backward = local.backward.into_iter();
        let gradients = backward
            .flat_map(|to| [(TensorName::Dq, to.dq), (TensorName::Dk, to.dk), (TensorName::Dv, to.dv)]);
        let all = [(TensorName::K, local.k), (TensorName::V, local.v)].into_iter().chain(gradients);
        let outside = all.map(|(name, inside)| {
            let format = problem.precision.of(name).format;
            let buffer = builder.describe(inside).clone();
            (name, inside, builder.buffer(Buffer { format, ..buffer }))
        });
        let outside: Vec<_> = outside.collect();
        for (_, inside, _) in &outside {
            let buffer = builder.describe_mut(*inside);
            (buffer.role, buffer.name) = (Role::Scratch, format!("{} inside", buffer.name).into());
        }
        let mut next = events as u32;
        let tensors = outside.into_iter().map(|(name, inside, outside)| {
            let from = if is_input(name) { outside } else { inside };
            let marks = [Mark(next), Mark(next + 1)];
            let loans = (name != TensorName::Dq).then(|| (loaned(builder, from), marks));
            next += MARKS_OF_TENSOR;
            Inside { name, inside: own(inside), outside: own(outside), loans }
        });
        let tensors = tensors.collect();
        let barriers = [0, 1].map(|_| Barrier::new(&mut next, streams));
        LendPlan { tensors, desks: desks(problem, &shards.kv), barriers }
    }

    /// Returns the buffer of an input or result around the plan that has this one inside.
    pub(super) fn outside(&self, inside: BufferId) -> BufferId {
        let found = self.tensors.iter().find(|tensor| usize::from(tensor.inside.0) == inside.0);
        found.map_or(inside, |tensor| BufferId(tensor.outside.0.into()))
    }

    /// Returns the number of marks, those of the plan inside among them.
    pub(super) fn events(&self) -> usize {
        self.barriers[1].end as usize
    }

    /// Returns whether a buffer has lent rows or holes, if it has one of them.
    pub(super) fn loan(&self, own: Own) -> Option<Loan> {
        self.tensors.iter().find_map(|tensor| {
            let ([sent, arrived], _) = tensor.loans?;
            let way = Loan::sent(tensor.name);
            [(sent, way), (arrived, way.other())].into_iter().find(|(of, _)| *of == own).map(|(_, loan)| loan)
        })
    }
}

impl Around for LendPlan {
    /// Fills holes of the keys, in the forward: a backward reads the same ones.
    fn before(&self, is_backward: bool, ops: &mut Vec<Op>) {
        for tensor in self.tensors.iter().filter(|tensor| !is_backward && is_input(tensor.name)) {
            let (from, to) = (tensor.outside, tensor.inside);
            push(ops, Act::Copy { from, to, rows: Extent::All });
            if let Some(from) = tensor.trade(ops, from) {
                push(ops, Act::Unpack { from, to });
            }
        }
        self.barriers[usize::from(is_backward)].begin(ops);
    }

    /// Repays gradients of the keys, in the backward.
    fn behind(&self, is_backward: bool, ops: &mut Vec<Op>) {
        self.barriers[usize::from(is_backward)].end(ops);
        for tensor in self.tensors.iter().filter(|tensor| is_backward && !is_input(tensor.name)) {
            let (from, to) = (tensor.inside, tensor.outside);
            if let Some(landed) = tensor.trade(ops, from) {
                push(ops, Act::Repay { from: landed, to: from });
            }
            push(ops, Act::Copy { from, to, rows: Extent::Held(tensor.name.side()) });
        }
    }
}

impl Inside {
    /// Sends rows of a buffer to the other side of their loans. Returns the buffer in which such rows arrive.
    fn trade(&self, ops: &mut Vec<Op>, from: Own) -> Option<Own> {
        let ([sent, arrived], [ready, ended]) = self.loans?;
        let loan = Loan::sent(self.name);
        push(ops, Act::Pack { from, to: sent, loan });
        push(ops, Act::Record(ready));
        let trade = Act::Trade { loan, from: sent, to: arrived };
        let acts = [Act::Wait(ready), trade, Act::Record(ended)];
        ops.extend(acts.map(|act| Op { stream: COMMUNICATION, act }));
        push(ops, Act::Wait(ended));
        Some(arrived)
    }
}

impl Loan {
    /// Returns the rows of a tensor that are sent: lent keys go to holes, and gradients of holes to lent keys.
    fn sent(name: TensorName) -> Loan {
        if is_input(name) { Loan::Lent } else { Loan::Holes }
    }

    /// Returns the other side of a loan.
    pub fn other(self) -> Loan {
        match self {
            Loan::Lent => Loan::Holes,
            Loan::Holes => Loan::Lent,
        }
    }
}

fn is_input(name: TensorName) -> bool {
    matches!(name, TensorName::K | TensorName::V)
}

fn push(ops: &mut Vec<Op>, act: Act) {
    ops.push(Op { stream: COMPUTE, act });
}

/// Makes the buffers of rows that are sent and that arrive. Each rank has its own numbers of rows, and a plan none.
fn loaned(builder: &mut Builder, from: BufferId) -> [Own; 2] {
    let Buffer { name, heads, dim, format, .. } = builder.describe(from).clone();
    ["sent", ARRIVED].map(|what| {
        own(builder.scratch(0, &format!("{name} of shared keys, {what}"), [0, heads, dim], format))
    })
}
