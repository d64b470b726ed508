//! The tables of packed sequences on the device, and how sequences are cut over ranks.

#![allow(unsafe_code, reason = "says which types kernels receive")]

use seamproof_oracle::Balance;

use crate::error::KernelError;
use crate::memory::{Area, Argument};

/// Most rows of a tensor: rows are numbered in 32 bits.
pub const ROWS_MAX: usize = i32::MAX as usize;

/// The slots of packed sequences: for each the first row, the rows that it owns and the real ones among them, as i32
/// on the device.
///
/// The contract, which no launcher can check without waiting for the device: slots are in order of rows and do not
/// overlap (`offset + span ≤` the next offset), `0 ≤ len ≤ span`, and all lie in the tensor. Empty slots, gaps, a first
/// offset and rows behind the last slot are ordinary. Tables that break it give wrong rows and never an access outside
/// of the tensors.
#[derive(Clone, Copy, Debug)]
pub struct Slots<'a> {
    /// First rows, `[count]` i32.
    pub offset: Area<'a>,
    /// Rows, padding included, `[count]` i32.
    pub span: Area<'a>,
    /// Real rows, `[count]` i32.
    pub len: Area<'a>,
    /// Sequences.
    pub count: usize,
    /// Rows of the tensor.
    pub rows: usize,
}

/// `Slots` of the sources.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct RawSlots {
    offset: u64,
    span: u64,
    len: u64,
    count: i32,
    rows: i32,
    per_row: f32,
}
// SAFETY: repr(C), the fields of `Slots` in common.cuh.
unsafe impl Argument for RawSlots {}

/// `Cut` of the sources.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct RawCut {
    cp: i32,
    balance: i32,
    stripe: i32,
}
// SAFETY: repr(C), the fields of `Cut` in rows.cu.
unsafe impl Argument for RawCut {}

impl<'a> Slots<'a> {
    /// The three tables, with names.
    pub(crate) fn tables(&self) -> [(&'static str, Area<'a>); 3] {
        [("offset", self.offset), ("span", self.span), ("len", self.len)]
    }

    pub(crate) fn raw(&self) -> Result<RawSlots, KernelError> {
        for (name, table) in self.tables() {
            holds_i32(name, table, self.count)?;
        }
        if self.rows > ROWS_MAX {
            return Err(KernelError::shape(format!("{} rows; at most {ROWS_MAX}", self.rows)));
        }
        Ok(RawSlots {
            offset: self.offset.address(),
            span: self.span.address(),
            len: self.len.address(),
            count: self.count as i32,
            rows: self.rows as i32,
            per_row: self.count as f32 / self.rows.max(1) as f32,
        })
    }
}

/// A table of `count` i32.
pub(crate) fn holds_i32(name: &str, table: Area, count: usize) -> Result<(), KernelError> {
    if count > ROWS_MAX || table.bytes() != count * 4 || !table.address().is_multiple_of(4) {
        let what = format!("{name}: {} bytes are no table of {count} i32", table.bytes());
        return Err(KernelError::shape(what));
    }
    Ok(())
}

/// Tables of `count` i32 each.
pub(crate) fn hold_i32(tables: &[(&str, Area)], count: usize) -> Result<(), KernelError> {
    tables.iter().try_for_each(|&(name, table)| holds_i32(name, table, count))
}

/// What a launch writes lies apart from what it reads, and from what else it writes: threads are in no order.
pub(crate) fn check_apart(written: &[(&str, Area)], read: &[(&str, Area)]) -> Result<(), KernelError> {
    for (index, (name, area)) in written.iter().enumerate() {
        let others = written[index + 1..].iter().chain(read);
        if let Some((other, _)) = others.into_iter().find(|(_, other)| area.overlaps(*other)) {
            return Err(KernelError::shape(format!(
                "{name} is written where {other} lies; they must lie apart"
            )));
        }
    }
    Ok(())
}

/// How sequences are cut over ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// Ranks.
    pub cp: usize,
    /// How a sequence is cut.
    pub balance: Balance,
}

/// Most ranks of a group.
const CP_MAX: usize = 1 << 16;

impl Cut {
    pub(crate) fn raw(&self) -> Result<RawCut, KernelError> {
        let (balance, stripe) = match self.balance {
            Balance::Contiguous => (0, 1),
            Balance::DualChunk => (1, 1),
            Balance::Striped { stripe } => (2, stripe),
        };
        if self.cp == 0 || self.cp > CP_MAX || stripe == 0 || stripe > ROWS_MAX {
            return Err(KernelError::shape(format!("cuts over {} ranks by stripes of {stripe}", self.cp)));
        }
        Ok(RawCut { cp: self.cp as i32, balance, stripe: stripe as i32 })
    }

    /// The numbers of contiguous, dual-chunk and striped cuts, and the stripe.
    pub(crate) fn numbers(&self) -> Result<[i32; 3], KernelError> {
        let RawCut { cp, balance, stripe } = self.raw()?;
        Ok([cp, balance, stripe])
    }

    pub(crate) fn check_rank(&self, rank: usize) -> Result<i32, KernelError> {
        if rank >= self.cp {
            return Err(KernelError::shape(format!("rank {rank} of {}", self.cp)));
        }
        Ok(rank as i32)
    }
}

/// The blocks that cover `items`, `each` in a block.
pub(crate) fn blocks(items: usize, each: usize) -> usize {
    items.div_ceil(each)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_lies_apart_from_everything() {
        let [a, b, c] = [(64, 64), (128, 64), (120, 16)].map(|(at, bytes)| Area::nowhere(at, bytes));
        let nothing = Area::nowhere(80, 0);
        let said = |written: &[(&str, Area)], read: &[(&str, Area)]| {
            check_apart(written, read).err().map(|error| error.to_string()).unwrap_or_default()
        };
        assert_eq!(said(&[("a", a), ("b", b)], &[("nothing", nothing)]), "");
        assert_eq!(said(&[("a", a)], &[("b", b), ("b", b)]), "", "what is read may be read twice");
        assert!(said(&[("a", a), ("b", b)], &[("c", c)]).contains("a is written where c lies"));
        assert!(said(&[("b", b), ("c", c)], &[]).contains("b is written where c lies"));
        assert!(said(&[("b", b)], &[("a", a), ("table", b)]).contains("b is written where table lies"));
    }

    #[test]
    fn tables_and_cuts_past_32_bits_are_refused() {
        let table = Area::nowhere(0, 8);
        let slots = Slots { offset: table, span: table, len: table, count: 2, rows: ROWS_MAX };
        assert!(slots.raw().is_ok());
        for wrong in [
            Slots { rows: ROWS_MAX + 1, ..slots },
            Slots { count: usize::MAX, ..slots },
            Slots { count: 3, ..slots },
            Slots { len: Area::nowhere(2, 8), ..slots },
        ] {
            assert!(wrong.raw().is_err(), "{wrong:?}");
        }
        let cut = Cut { cp: CP_MAX, balance: Balance::Striped { stripe: ROWS_MAX } };
        assert!(cut.raw().is_ok());
        let stripes =
            [0, ROWS_MAX + 1, usize::MAX].map(|stripe| Cut { balance: Balance::Striped { stripe }, ..cut });
        let ranks = [0, CP_MAX + 1, usize::MAX].map(|cp| Cut { cp, ..cut });
        assert!(stripes.into_iter().chain(ranks).all(|wrong| wrong.raw().is_err()));
        assert!(cut.check_rank(CP_MAX).is_err() && cut.check_rank(CP_MAX - 1).is_ok());
    }
}
