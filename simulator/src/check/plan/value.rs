//! Values: what all rows of a buffer hold that matter, in the words of the field. `values` says what becomes of them.

use std::fmt;

use seamproof_oracle::{Side, TensorName};

use crate::schedule::plan::{Extent, Launch, Loan};

/// What buffers hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Value {
    /// Nothing yet.
    Nothing,
    /// A result with rows that nobody may write, which only a copy of the others writes.
    Closed,
    /// A result of which launches write the parts in turn: the first `parts` of them.
    Written { tensor: TensorName, parts: u16 },
    /// A sum over a rank's own launches, in rank order.
    RankedSum(Whole),
    /// Something that was taken.
    Taken,
    /// Zeros.
    Zero(Extent),
    /// −∞.
    NegInfinity(Extent),
    /// A rank's shard of a hidden input.
    Hidden(TensorName),
    /// The shards of a region.
    AllHidden(TensorName),
    /// An input of a rank's heads that is not rotated yet.
    Straight(TensorName),
    /// A whole result that is rotated back.
    Turned(Whole),
    /// A summand of hidden rows of a result.
    Summand(Whole),
    /// A rank's shard of a result.
    Scattered(Whole),
    /// A rank's own input, as it is dealt.
    Local(TensorName),
    /// An input of every member of an exchange, one after the other, of the rank's heads.
    Ranked(TensorName),
    /// An input without the keys that sequences borrow.
    Holed(TensorName),
    /// Rows of one side of a rank's loans, and whether they have arrived.
    Loaned { of: Whole, loan: Loan, arrived: bool },
    /// A whole gradient of keys, with what borrowers add to lent ones.
    Repaid(Whole),
    /// An input of a ring's member.
    Input(TensorName, u32),
    /// The contribution of a launch.
    Part(TensorName, Launch),
    /// The LSE of a launch that is in the running one, and still weighs the launch's out.
    Counted(Launch),
    /// The table of a rank's launches on an owner's keys.
    Table(u32),
    /// The LSE of all launches of a ring's member, without the sink. It takes no more.
    Final,
    /// A sum of contributions to a ring's member, with or without the sink.
    Sum { tensor: TensorName, of: u32, sunk: bool },
    /// The largest logit of the launches so far, over this rank or over the ring.
    Largest { over_ring: bool },
    /// A whole result of a ring's member, or of a rank where it is placed.
    Done(Whole),
    /// The same, which has been given on and is still read.
    Given(Whole),
    /// The same on its way back, of every member of an exchange.
    RankedResult(Whole),
    /// The same from members of an exchange: of those that are the `first`-th to hold a KV head, and `count - 1` more.
    Landed { of: Whole, first: u16, count: u16 },
}

/// A whole result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Whole {
    Of(TensorName),
    /// Zeros, to which nothing was to be added.
    Zero(Side),
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::Nothing => f.write_str("nothing yet"),
            Value::Closed => f.write_str("nothing yet, and rows that nobody may write"),
            Value::Written { tensor, parts } => write!(f, "the first {parts} parts of {tensor}"),
            Value::RankedSum(whole) => write!(f, "a rank's sum of {whole} in rank order"),
            Value::Taken => f.write_str("what was taken from it"),
            Value::Zero(_) => f.write_str("zeros"),
            Value::NegInfinity(_) => f.write_str("-inf"),
            Value::Local(tensor) => write!(f, "{tensor} as it is dealt"),
            Value::Ranked(tensor) => write!(f, "{tensor} in rank order"),
            Value::Input(tensor, of) => write!(f, "{tensor} of member {of}"),
            Value::Part(tensor, launch) => write!(f, "{tensor} of {launch:?}"),
            Value::Hidden(tensor) => write!(f, "a shard of {tensor}"),
            Value::AllHidden(tensor) => write!(f, "the shards of {tensor}"),
            Value::Straight(tensor) => write!(f, "{tensor}, not rotated"),
            Value::Turned(whole) => write!(f, "{whole}, rotated back"),
            Value::Summand(whole) => write!(f, "a summand of {whole}"),
            Value::Scattered(whole) => write!(f, "a shard of {whole}"),
            Value::Holed(tensor) => write!(f, "{tensor} without the keys that sequences borrow"),
            Value::Loaned { of, loan, arrived } => {
                let arrived = if *arrived { "that have arrived" } else { "to be sent" };
                write!(f, "rows of {of} {arrived}, {loan:?}")
            }
            Value::Repaid(whole) => write!(f, "{whole} of lenders and borrowers"),
            Value::Counted(launch) => write!(f, "the counted lse of {launch:?}"),
            Value::Table(of) => write!(f, "a table of the keys of member {of}"),
            Value::Final => f.write_str("the lse of all launches, without the sink"),
            Value::Sum { tensor, of, sunk } => {
                write!(f, "a sum of {tensor} for member {of}{}", if *sunk { " with the sink" } else { "" })
            }
            Value::Largest { over_ring: false } => f.write_str("the largest logit of some launches"),
            Value::Largest { over_ring: true } => f.write_str("the largest logit of the ring"),
            Value::Done(whole) => write!(f, "{whole}"),
            Value::Given(whole) => write!(f, "{whole}, given on"),
            Value::RankedResult(whole) => write!(f, "{whole} in rank order"),
            Value::Landed { of, first, count } => write!(f, "{of} of landing {first} and {count} in all"),
        }
    }
}

impl fmt::Display for Whole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Whole::Of(tensor) => write!(f, "the whole {tensor}"),
            Whole::Zero(_) => f.write_str("zeros as a result"),
        }
    }
}

impl Value {
    /// Whether the value is lost if it is overwritten or left behind.
    pub(super) fn must_be_taken(self) -> bool {
        matches!(
            self,
            Value::Part(..)
                | Value::Sum { .. }
                | Value::Final
                | Value::Repaid(_)
                | Value::Turned(_)
                | Value::Summand(_)
                | Value::Scattered(_)
                | Value::Loaned { arrived: true, .. }
                | Value::RankedResult(_)
                | Value::RankedSum(_)
                | Value::Written { .. }
                | Value::Largest { .. }
                | Value::Landed { .. }
                | Value::Done(_)
        )
    }

    /// Whether the value may be overwritten.
    pub(super) fn may_go(self) -> bool {
        !self.must_be_taken() && !matches!(self, Value::Given(_) | Value::Table(_) | Value::Closed)
    }
}

/// Returns the side of a tensor with rows.
pub(super) fn side(tensor: TensorName) -> Side {
    crate::check::shape::side(tensor).unwrap_or(Side::Q)
}

/// Returns the sum of two results, if they are of one tensor. Zeros are a part of anything of their side.
pub(super) fn joined(one: Whole, other: Whole) -> Option<Whole> {
    match (one, other) {
        (Whole::Zero(a), other) | (other, Whole::Zero(a)) if other.side() == a => Some(other),
        _ => (one == other).then_some(one),
    }
}

impl Whole {
    pub(super) fn side(self) -> Side {
        match self {
            Whole::Of(tensor) => side(tensor),
            Whole::Zero(side) => side,
        }
    }

    /// Whether the result has rows of lanes, and is no statistic.
    pub(super) fn has_lanes(self) -> bool {
        use TensorName::{Dk, Dq, Dv, Out};
        matches!(self, Whole::Zero(_) | Whole::Of(Out | Dq | Dk | Dv))
    }
}
