//! Tables of packed sequences on the device, and how sequences are cut over ranks.

#![allow(unsafe_code, reason = "says which types kernels receive")]

use seamproof_oracle::Balance;

use crate::error::KernelError;
use crate::memory::{Area, Argument};

/// Most rows of a tensor: rows are numbered in 32 bits.
pub const ROWS_MAX: usize = i32::MAX as usize;

/// The slots of packed sequences. The device has three i32 for each: its first row, the rows that it owns, and the
/// real ones among them.
///
/// No launcher can check the contract without waiting for the device. Slots are in order of rows and do not overlap
/// (`offset + span ≤` the next offset), `0 ≤ len ≤ span`, and all lie in the tensor. Empty slots, gaps, a first
/// offset and rows behind the last slot are ordinary. Tables that break the contract give wrong rows, and never an
/// access outside of the tensors.
#[derive(Clone, Copy, Debug)]
pub struct Slots<'a> {
    /// The first rows, `[count]` i32.
    pub offset: Area<'a>,
    /// The owned rows, padding included, `[count]` i32.
    pub span: Area<'a>,
    /// The real rows, `[count]` i32.
    pub len: Area<'a>,
    /// The number of sequences.
    pub count: usize,
    /// The rows of the tensor.
    pub rows: usize,
}

/// The slots of packed sequences in tables of i64, as callers have them whose offsets are 64 bits wide.
/// [`narrow`](crate::TableKernels::narrow) makes [`Slots`] of them, which all launches take.
#[derive(Clone, Copy, Debug)]
pub struct WideSlots<'a> {
    /// The first rows, `[count]` i64.
    pub offset: Area<'a>,
    /// The owned rows, padding included, `[count]` i64.
    pub span: Area<'a>,
    /// The real rows, `[count]` i64.
    pub len: Area<'a>,
    /// The number of sequences.
    pub count: usize,
    /// The rows of the tensor.
    pub rows: usize,
}

/// The struct `WideSlots` of the sources.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct RawWideSlots {
    offset: u64,
    span: u64,
    len: u64,
    count: i32,
}
// SAFETY: repr(C), the fields of `WideSlots` in metadata.cu.
unsafe impl Argument for RawWideSlots {}

impl<'a> WideSlots<'a> {
    /// Returns the three tables, with names for messages.
    pub(crate) fn tables(&self) -> [(&'static str, Area<'a>); 3] {
        [("wide offset", self.offset), ("wide span", self.span), ("wide len", self.len)]
    }

    /// Returns what the kernel receives, and the tables of i32 in `room`, which has 12 bytes for each slot.
    pub(crate) fn narrowed<'r>(&self, room: Area<'r>) -> Result<(RawWideSlots, Slots<'r>), KernelError> {
        let WideSlots { offset, span, len, count, rows } = *self;
        for (name, table) in self.tables() {
            holds(name, table, count, ("i64", 8))?;
        }
        holds_i32("room", room, count.saturating_mul(3))?;
        check_apart(&[("room", room)], &self.tables())?;
        let table = |index: usize| room.part(index * count * 4..(index + 1) * count * 4);
        let slots = Slots { offset: table(0)?, span: table(1)?, len: table(2)?, count, rows };
        slots.raw()?;
        let [offset, span, len] = [offset, span, len].map(|table| table.address());
        Ok((RawWideSlots { offset, span, len, count: count as i32 }, slots))
    }
}

/// The struct `Slots` of the sources.
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

/// The struct `Cut` of the sources.
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
    /// Returns the three tables, with names for messages.
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

/// Refuses what is no table of `count` i32.
pub(crate) fn holds_i32(name: &str, table: Area, count: usize) -> Result<(), KernelError> {
    holds(name, table, count, ("i32", 4))
}

/// Refuses what is no table of `count` numbers of a kind, each of so many bytes.
fn holds(name: &str, table: Area, count: usize, (kind, bytes): (&str, usize)) -> Result<(), KernelError> {
    if count > ROWS_MAX || table.bytes() != count * bytes {
        let what = format!("{name}: {} bytes, not a table of {count} {kind}", table.bytes());
        return Err(KernelError::shape(what));
    }
    on_bytes(name, table.address(), bytes)
}

/// Refuses an address that is not aligned to so many bytes.
pub(crate) fn on_bytes(name: &str, address: u64, bytes: usize) -> Result<(), KernelError> {
    if address.is_multiple_of(bytes as u64) {
        return Ok(());
    }
    Err(KernelError::shape(format!("{name}: at {address:#x}, which is not aligned to {bytes} bytes")))
}

/// Refuses tables of which one does not have `count` i32.
pub(crate) fn hold_i32(tables: &[(&str, Area)], count: usize) -> Result<(), KernelError> {
    tables.iter().try_for_each(|&(name, table)| holds_i32(name, table, count))
}

/// Refuses a launch that writes where it reads, or in two tensors at once: threads run in no order.
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

/// A cut of sequences over ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// The number of ranks.
    pub cp: usize,
    /// The way in which a sequence is cut.
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
            return Err(KernelError::shape(format!("a cut over {} ranks by stripes of {stripe}", self.cp)));
        }
        Ok(RawCut { cp: self.cp as i32, balance, stripe: stripe as i32 })
    }

    /// Returns the number of ranks, the number of the balance in the sources, and the stripe.
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

/// Returns the number of blocks that cover `items`, `each` in a block.
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
