//! Block tables: which pages hold the keys and values of a forward, as the kernel `attend_pages` of `attend.cu` reads
//! them.
//!
//! The pool of pages is the tensor of keys, or of values, itself: page p has its rows from `p * size` on. A table has a
//! row of places for each segment of the call. Places that name no page hold 0.
#![allow(unsafe_code, reason = "says which types kernels receive")]

use seamproof_oracle::Run;
use seamproof_simulator::{AttentionCall, Segment};

use crate::error::KernelError;
use crate::memory::{Area, Argument};
use crate::tables::ROWS_MAX;
use crate::view::Table;

/// The place of a block table among a call's tables.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockTable {
    /// The byte at which it begins.
    at: usize,
    segments: usize,
    /// The places of a segment.
    width: usize,
    /// The rows of a page.
    size: usize,
}

/// The struct `BlockTable` of the source.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct RawBlockTable {
    pages: u64,
    first: u64,
    width: i32,
    size: i32,
}
// SAFETY: repr(C), the fields of `BlockTable` in attend.cu.
unsafe impl Argument for RawBlockTable {}

impl BlockTable {
    /// Returns the block table of a call for pages of `size` rows, and its numbers, i32 in bytes, which lie at `at` among
    /// the call's tables. Keys that lie otherwise are refused.
    pub(crate) fn of(
        call: &AttentionCall,
        size: usize,
        at: usize,
    ) -> Result<(BlockTable, Vec<u8>), KernelError> {
        if size == 0 || size > ROWS_MAX {
            return Err(KernelError::shape(format!("pages of {size} rows; each must have 1 to {ROWS_MAX}")));
        }
        let found: Vec<(usize, Vec<usize>)> = call
            .segments
            .iter()
            .enumerate()
            .map(|(index, segment)| pages_of(segment, size).ok_or_else(|| in_none(index, size)))
            .collect::<Result<_, _>>()?;
        let (segments, width) =
            (found.len(), found.iter().map(|(_, pages)| pages.len()).max().unwrap_or(0).max(1));
        if segments.checked_mul(width).is_none_or(|places| places > ROWS_MAX) {
            let what = format!("{segments} segments of up to {width} pages; at most {ROWS_MAX} places");
            return Err(KernelError::shape(what));
        }
        let mut table = Table::default();
        found.iter().for_each(|(first, _)| table.i32(&[*first as i32]));
        for (_, pages) in &found {
            let places = pages.iter().map(|&page| page as i32).chain(std::iter::repeat(0)).take(width);
            places.for_each(|page| table.i32(&[page]));
        }
        Ok((BlockTable { at, segments, width, size }, table.0))
    }

    /// Returns what the kernel receives, given where the call's tables lie.
    pub(crate) fn raw(&self, tables: Area) -> RawBlockTable {
        let first = tables.address() + self.at as u64;
        RawBlockTable {
            pages: first + 4 * self.segments as u64,
            first,
            width: self.width as i32,
            size: self.size as i32,
        }
    }
}

fn in_none(segment: usize, size: usize) -> KernelError {
    KernelError::shape(format!("the keys of segment {segment} do not lie in pages of {size} rows"))
}

/// Returns the position of a segment's first key in its first page, and the segment's pages; `None` where its keys do
/// not lie in pages of this size.
fn pages_of(segment: &Segment, size: usize) -> Option<(usize, Vec<usize>)> {
    let mut rows = segment.kv.iter().flat_map(Run::real_rows).peekable();
    let first = rows.peek().map_or(0, |row| row % size);
    let mut pages = Vec::new();
    for (position, row) in (first..).zip(rows) {
        if position / size == pages.len() {
            pages.push(row / size);
        }
        if (pages.last(), row % size) != (Some(&(row / size)), position % size) {
            return None;
        }
    }
    Some((first, pages))
}

#[cfg(test)]
mod tests {
    use seamproof_oracle::{Sink, Softmax, runs_of};
    use seamproof_simulator::RowPolicy;

    use super::*;

    /// Returns a call whose segments have their keys in these rows.
    fn call(keys: &[&[usize]]) -> AttentionCall {
        let segment = |(index, rows): (usize, &&[usize])| {
            let kv = runs_of(rows.iter().copied());
            Segment { q: Run::packed(index, 1, 1), kv, lo: None, hi: None, prefix: 0, sink_tokens: 0 }
        };
        let softmax = Softmax { scale: 1.0, softcap: None, sink: Sink::None };
        let segments = keys.iter().enumerate().map(segment).collect();
        AttentionCall { segments, softmax, policy: RowPolicy::Overwrite }
    }

    fn in_pages(keys: &[&[usize]], size: usize) -> Result<Vec<i32>, String> {
        let (_, bytes) = BlockTable::of(&call(keys), size, 0).map_err(|error| error.to_string())?;
        let numbers = bytes.chunks_exact(4);
        Ok(numbers.map(|bytes| i32::from_le_bytes(bytes.try_into().expect("4 bytes"))).collect())
    }

    #[test]
    fn a_table_names_the_pages_of_each_segment() {
        // Page 3, page 1 and one row of page 2; nothing; from the second row of page 0 on.
        let keys: [&[usize]; 3] = [&[12, 13, 14, 15, 4, 5, 6, 7, 8], &[], &[1, 2, 3, 16]];
        assert_eq!(in_pages(&keys, 4), Ok(vec![0, 0, 1, 3, 1, 2, 0, 0, 0, 0, 4, 0]));
        assert_eq!(in_pages(&[], 4), Ok(vec![]));
        assert_eq!(in_pages(&[&[]], 4), Ok(vec![0, 0]), "a table has a place for each segment");
        // Pages of one row take any order.
        assert_eq!(in_pages(&[&[5, 3, 4]], 1), Ok(vec![0, 5, 3, 4]));
    }

    #[test]
    fn keys_that_lie_otherwise_are_refused() {
        let what = "the keys of segment 1 do not lie in pages of 4 rows";
        for wrong in [&[0, 1, 2, 4][..], &[0, 2], &[0, 1, 2, 3, 5], &[3, 5]] {
            let said = in_pages(&[&[0], wrong], 4).expect_err("keys in no pages");
            assert!(said.contains(what), "{said}: {wrong:?}");
        }
        assert!(in_pages(&[&[0]], 0).expect_err("no page").contains("pages of 0 rows"));
    }
}
