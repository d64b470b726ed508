//! The tables of an attention call: its segments, and the runs of their keys, as kernels read them.

use seamproof_oracle::{Run, Softmax};
use seamproof_simulator::{AttentionCall, RowPolicy, Segment};

use super::{CallSummary, DIM_MAX, WeightFormats};
use crate::codec::format_number;
use crate::error::KernelError;
use crate::memory::Area;
use crate::pages::BlockTable;
use crate::tables::ROWS_MAX;
use crate::view::{Table, View};

/// The number that stands for an unbounded side of a band. No row is so far away.
const UNBOUNDED: i64 = 1 << 40;
/// The bytes of `Segment` of the source.
pub(crate) const SEGMENT_BYTES: usize = 11 * 8;
/// The bytes of `KeyRun` of the source.
const RUN_BYTES: usize = 6 * 8;

/// The tables of a call, to be put where a GPU reads them.
#[derive(Clone, Debug)]
pub struct CallTables {
    pub(crate) bytes: Vec<u8>,
    pub(crate) segments: usize,
    /// The segments behind them that say which queries see a key. There are none where the others say it.
    pub(crate) bands_of_keys: usize,
    /// Whether a segment has sink tokens.
    pub(crate) sink_tokens: bool,
    /// The runs of keys that the call owns. Those of a prefix's queries lie behind them.
    pub(crate) runs: usize,
    /// The rows of the tensors of queries and of keys.
    pub(crate) rows: [usize; 2],
    /// The rows of queries and of keys that the call owns.
    pub(crate) owned: [usize; 2],
    pub(crate) softmax: Softmax,
    pub(crate) policy: RowPolicy,
    pub(crate) summary: CallSummary,
    /// The block table, behind all others, through which keys and values are found.
    pub(crate) pages: Option<BlockTable>,
    /// The segments with a prefix, which are no bands, behind all that are.
    undivided: Option<Undivided>,
}

/// Segments that may have a prefix, and their runs, in a call's tables.
#[derive(Clone, Copy, Debug)]
struct Undivided {
    /// The bytes of the tables before them.
    before: usize,
    segments: usize,
    runs: usize,
}

/// Segments and their runs of keys, where a GPU reads them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RawSegments {
    pub(crate) segments: u64,
    pub(crate) runs: u64,
    pub(crate) segment_count: usize,
    pub(crate) run_count: usize,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct RawCall {
    segments: u64,
    runs: u64,
    segment_count: i32,
    run_count: i32,
    q_rows: i64,
    kv_rows: i64,
    heads: i32,
    group: i32,
    dim: i32,
    dim_v: i32,
    scale: f32,
    softcap: f32,
    p_format: i32,
    ds_format: i32,
    clear: i32,
}

/// Makes some 8-byte words of each row of a table 0.
fn clear_words(table: &mut [u8], row_bytes: usize, words: &[usize]) {
    for row in table.chunks_exact_mut(row_bytes) {
        words.iter().for_each(|word| row[8 * word..8 * word + 8].fill(0));
    }
}

impl CallTables {
    /// Returns the tables.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Returns the numbers of segments and of runs of keys.
    pub fn counts(&self) -> [usize; 2] {
        [self.segments, self.runs]
    }

    /// Returns the rows of queries and of keys that the call owns.
    pub fn owned(&self) -> [usize; 2] {
        self.owned
    }

    /// Returns what the host knows of the call besides its tables.
    pub fn summary(&self) -> &CallSummary {
        &self.summary
    }

    /// Returns the mean number of query rows of the segments that own any. Tables may have places for more sequences
    /// than there are.
    pub(crate) fn mean_rows(&self) -> usize {
        self.owned[0] / self.summary.filled.max(1)
    }

    /// Makes every choice by lengths and masks, such as the form of a kernel, as it is made for another call with as
    /// many owned rows.
    pub fn choose_as(&mut self, other: &CallTables) {
        let CallSummary { step, reach, .. } = self.summary;
        self.summary = CallSummary { step, reach, ..other.summary };
    }

    /// Returns the tables of a call on tensors of so many rows. A call of a backward pass may name each key only
    /// once.
    ///
    /// Kernels know bands, beside which a band's first keys may be sink tokens. A prefix becomes two bands
    /// ([`AttentionCall::bands`]). In a backward the keys have bands of their own, which name each key once
    /// ([`Segment::bands_of_keys`]), and the segments are there as they are, too: the backward on tensor cores knows a
    /// prefix.
    pub fn new(
        call: &AttentionCall,
        [q_rows, kv_rows]: [usize; 2],
        backward: bool,
    ) -> Result<CallTables, KernelError> {
        if q_rows.max(kv_rows) > ROWS_MAX {
            return Err(KernelError::shape(format!("{q_rows} and {kv_rows} rows; at most {ROWS_MAX}")));
        }
        call.check(q_rows, kv_rows).map_err(|error| KernelError::shape(error.to_string()))?;
        if backward {
            check_keys_once(call, kv_rows)?;
        }
        let bands = call.bands();
        let of_keys = if backward { bands_of_keys(call) } else { Vec::new() };
        let (mut runs, mut behind) = (Runs::default(), Table::default());
        for (index, (first_row, band)) in of_keys.iter().enumerate() {
            push_segment(&mut behind, band, *first_row, &mut runs, bands.segments.len() + index);
        }
        let named_once = (!of_keys.is_empty()).then_some((runs.count, runs.owned));
        let (mut segments, mut q_owned) = (Table::default(), 0);
        for (index, band) in bands.segments.iter().enumerate() {
            push_segment(&mut segments, band, q_owned, &mut runs, index);
            q_owned += band.q.span;
        }
        let (count, kv_owned) = named_once.unwrap_or((runs.count, runs.owned));
        let mut bytes = [segments.0, behind.0, runs.table.0].concat();
        let undivided = (!of_keys.is_empty()).then(|| push_undivided(call, &mut bytes));
        Ok(CallTables {
            bytes,
            segments: bands.segments.len(),
            bands_of_keys: of_keys.len(),
            sink_tokens: call.segments.iter().any(|segment| segment.sink_tokens > 0),
            runs: count,
            rows: [q_rows, kv_rows],
            owned: [q_owned, kv_owned],
            softmax: call.softmax,
            policy: call.policy,
            summary: CallSummary::of(call, &bands),
            pages: None,
            undivided,
        })
    }

    /// Returns the tables with a block table for pages of `size` rows, through which [`attend`](crate::Gpu::attend)
    /// then finds keys and values. `call` is the one that these tables are of. Keys that lie otherwise are refused.
    pub fn in_pages(mut self, call: &AttentionCall, size: usize) -> Result<CallTables, KernelError> {
        let (pages, mut table) = BlockTable::of(&call.bands(), size, self.bytes.len())?;
        self.bytes.append(&mut table);
        self.pages = Some(pages);
        Ok(self)
    }

    /// Takes the lengths and bounds out of the tables, for a device that makes them itself
    /// ([`fill_call`](crate::TableKernels::fill_call), which takes bands without sink tokens). A launch on tables that
    /// nobody filled then sees nothing.
    pub fn leave_to_device(&mut self) {
        let behind = self.segments_bytes();
        let (segments, runs) = self.bytes.split_at_mut(behind);
        // Offset, real rows, keys and both bounds.
        clear_words(segments, SEGMENT_BYTES, &[0, 2, 4, 5, 6]);
        // Offset and real rows.
        clear_words(runs, RUN_BYTES, &[0, 2]);
    }

    /// Returns the bytes of all segments, behind which the runs lie.
    fn segments_bytes(&self) -> usize {
        (self.segments + self.bands_of_keys) * SEGMENT_BYTES
    }

    /// Returns the number of bands that queries have: one for each segment, and two for one with a prefix.
    pub fn bands_of_queries(&self) -> usize {
        self.segments
    }

    /// Whether keys have bands of their own: in the tables of a backward with a prefix.
    pub fn has_bands_of_keys(&self) -> bool {
        self.bands_of_keys > 0
    }

    /// Whether keys stay visible beside a window.
    pub fn has_sink_tokens(&self) -> bool {
        self.sink_tokens
    }

    /// Returns the bands, and the runs that the call owns.
    pub(crate) fn bands(&self, tables: Area) -> RawSegments {
        RawSegments {
            segments: tables.address(),
            runs: tables.address() + self.segments_bytes() as u64,
            segment_count: self.segments,
            run_count: self.runs,
        }
    }

    /// Returns the segments for a kernel that knows a prefix: the bands, if there is none.
    pub(crate) fn undivided(&self, tables: Area) -> RawSegments {
        let Some(Undivided { before, segments, runs }) = self.undivided else { return self.bands(tables) };
        let first = tables.address() + before as u64;
        RawSegments {
            segments: first,
            runs: first + (segments * SEGMENT_BYTES) as u64,
            segment_count: segments,
            run_count: runs,
        }
    }

    /// Returns the bytes of scratch that a backward launch needs.
    pub fn scratch_bytes(&self, heads: usize) -> usize {
        heads * self.owned[0] * 4
    }

    pub(crate) fn raw(
        &self,
        tables: Area,
        [q, k, v]: [&View; 3],
        formats: WeightFormats,
    ) -> Result<RawCall, KernelError> {
        let ([_, heads, dim], [_, kv_heads, k_dim], [_, v_heads, dim_v]) = (q.shape(), k.shape(), v.shape());
        if tables.bytes() != self.bytes.len() || !tables.address().is_multiple_of(8) {
            return Err(KernelError::shape(format!("{} bytes are not the call's tables", tables.bytes())));
        }
        if heads == 0 || kv_heads == 0 || kv_heads != v_heads || heads % kv_heads != 0 || k_dim != dim {
            let what =
                format!("q {:?}, k {:?} and v {:?} do not fit each other", q.shape(), k.shape(), v.shape());
            return Err(KernelError::shape(what));
        }
        let rows = [q, k, v].map(|view| view.shape()[0]);
        if rows != [self.rows[0], self.rows[1], self.rows[1]] {
            let what = format!("q, k and v of {rows:?} rows; the call is for {:?}", self.rows);
            return Err(KernelError::shape(what));
        }
        if dim == 0 || dim_v == 0 || dim.max(dim_v) > DIM_MAX {
            return Err(KernelError::shape(format!(
                "head dims {dim} and {dim_v}; each must be 1 to {DIM_MAX}"
            )));
        }
        let RawSegments { segments, runs, segment_count, run_count } = self.bands(tables);
        Ok(RawCall {
            segments,
            runs,
            segment_count: segment_count as i32,
            run_count: run_count as i32,
            q_rows: self.owned[0] as i64,
            kv_rows: self.owned[1] as i64,
            heads: heads as i32,
            group: (heads / kv_heads) as i32,
            dim: dim as i32,
            dim_v: dim_v as i32,
            scale: self.softmax.scale,
            softcap: self.softmax.softcap.unwrap_or(0.0),
            p_format: format_number("P", formats.p)?,
            ds_format: format_number("dS", formats.ds)?,
            clear: i32::from(self.policy == RowPolicy::Overwrite),
        })
    }
}

/// Returns bands that share no key, each with the owned query rows before its first one; none where the call's segments
/// are such bands.
fn bands_of_keys(call: &AttentionCall) -> Vec<(usize, Segment)> {
    if !call.segments.iter().any(Segment::is_widened) {
        return Vec::new();
    }
    let mut owned = 0;
    let of_segment = |segment: &Segment| {
        let first_row = owned;
        owned += segment.q.span;
        segment.bands_of_keys().into_iter().map(move |band| (first_row, band))
    };
    call.segments.iter().flat_map(of_segment).collect()
}

/// The table of runs of keys.
#[derive(Default)]
struct Runs {
    table: Table,
    count: usize,
    /// The rows of all runs.
    owned: usize,
}

impl Runs {
    /// Adds the runs of the segment of this number.
    fn push(&mut self, kv: &[Run], segment: usize) {
        let mut first_key = 0;
        for run in kv {
            self.table.rows(&[run.offset, run.step, run.len, self.owned, first_key, segment]);
            self.owned += run.span;
            first_key += run.len;
        }
        self.count += kv.len();
    }
}

/// Adds a call's segments as they are, and their runs, to the bytes of its tables.
fn push_undivided(call: &AttentionCall, bytes: &mut Vec<u8>) -> Undivided {
    let (mut segments, mut runs, mut q_owned) = (Table::default(), Runs::default(), 0);
    for (index, segment) in call.segments.iter().enumerate() {
        push_segment(&mut segments, segment, q_owned, &mut runs, index);
        q_owned += segment.q.span;
    }
    let undivided = Undivided { before: bytes.len(), segments: call.segments.len(), runs: runs.count };
    bytes.append(&mut segments.0);
    bytes.append(&mut runs.table.0);
    undivided
}

/// Adds a segment to a table of them, and its runs to theirs. It has the number `index`, and owns query rows from
/// `first_row` on.
fn push_segment(segments: &mut Table, segment: &Segment, first_row: usize, runs: &mut Runs, index: usize) {
    let bound = |side: Option<i64>, none: i64| side.unwrap_or(none).clamp(-UNBOUNDED, UNBOUNDED);
    let Segment { q, kv, lo, hi, prefix, sink_tokens } = segment;
    let keys = segment.keys();
    segments.rows(&[q.offset, q.step, q.len, first_row, keys]);
    segments.i64(&[bound(*lo, -UNBOUNDED), bound(*hi, UNBOUNDED)]);
    segments.rows(&[*sink_tokens.min(&keys), runs.count, kv.len(), *prefix.min(&keys)]);
    runs.push(kv, index);
}

/// Refuses a key row that two runs own: two writers would race for its gradients.
fn check_keys_once(call: &AttentionCall, kv_rows: usize) -> Result<(), KernelError> {
    let mut owned = vec![false; kv_rows];
    let runs = call.segments.iter().flat_map(|segment| &segment.kv);
    for row in runs.flat_map(|run: &Run| run.real_rows().chain(run.padding_rows())) {
        if std::mem::replace(&mut owned[row], true) {
            return Err(KernelError::shape(format!("key row {row} is in two runs of one backward launch")));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use seamproof_oracle::Sink;

    use super::*;

    /// Returns the numbers of a table of 8-byte words, row by row.
    fn rows_of(bytes: &[u8], row_bytes: usize) -> Vec<Vec<i64>> {
        let number = |word: &[u8]| i64::from_le_bytes(word.try_into().expect("8 bytes"));
        bytes.chunks_exact(row_bytes).map(|row| row.chunks_exact(8).map(number).collect()).collect()
    }

    #[test]
    fn a_prefix_is_two_bands_of_queries_and_in_a_backward_two_of_keys_with_its_sink_tokens() {
        let (q, kv) = (Run::packed(3, 5, 6), vec![Run::packed(0, 4, 4), Run::packed(8, 3, 5)]);
        let first = Segment {
            q: Run::packed(0, 2, 3),
            kv: Vec::new(),
            lo: None,
            hi: None,
            prefix: 0,
            sink_tokens: 0,
        };
        let prefixed = Segment { q, kv, lo: Some(-9), hi: Some(1), prefix: 5, sink_tokens: 6 };
        let softmax = Softmax { scale: 1.0, softcap: None, sink: Sink::None };
        let call = AttentionCall { segments: vec![first, prefixed], softmax, policy: RowPolicy::Overwrite };
        let segments = |tables: &CallTables| rows_of(&tables.bytes[..tables.segments_bytes()], SEGMENT_BYTES);
        let runs = |tables: &CallTables| rows_of(&tables.bytes[tables.segments_bytes()..], RUN_BYTES);
        let far = UNBOUNDED;

        let forward = CallTables::new(&call, [9, 13], false).expect("legal");
        // Offset, step, real rows, first owned row, keys, lo, hi, sink tokens, first run, runs and prefix. Three queries
        // end before key 4.
        let of_queries = [
            vec![0, 1, 2, 0, 0, -far, far, 0, 0, 0, 0],
            vec![3, 1, 3, 3, 5, -9, far, 5, 0, 2, 0],
            vec![6, 1, 2, 6, 7, -6, 4, 6, 2, 2, 0],
        ];
        assert_eq!(segments(&forward), of_queries);
        assert_eq!((forward.counts(), forward.owned[0]), ([3, 4], 9));
        assert!(!forward.has_bands_of_keys() && forward.has_sink_tokens());

        let backward = CallTables::new(&call, [9, 13], true).expect("each key is named once");
        let of_keys = [
            vec![0, 1, 2, 0, 0, -far, far, 0, 0, 0, 0],
            vec![3, 1, 5, 3, 5, -9, far, 5, 0, 2, 0],
            vec![3, 1, 5, 3, 2, -14, -4, 1, 2, 1, 0],
        ];
        let behind: Vec<Vec<i64>> = of_queries
            .iter()
            .map(|row| [&row[..8], &[row[8] + 3, row[9], row[10]]].concat())
            .chain(of_keys)
            .collect();
        assert_eq!(segments(&backward), behind);
        let undivided = backward.undivided.expect("segments with a prefix");
        let as_they_are = backward.bytes.split_at(undivided.before).1;
        let (whole, of_whole) = as_they_are.split_at(undivided.segments * SEGMENT_BYTES);
        let prefixed = vec![3, 1, 5, 3, 7, -9, 1, 6, 0, 2, 5];
        assert_eq!(rows_of(whole, SEGMENT_BYTES), [vec![0, 1, 2, 0, 0, -far, far, 0, 0, 0, 0], prefixed]);
        assert_eq!(rows_of(of_whole, RUN_BYTES), [vec![0, 1, 4, 0, 0, 1], vec![8, 1, 3, 4, 4, 1]]);
        assert_eq!((backward.counts(), backward.owned), ([3, 3], [9, 9]));
        // Offset, step, real rows, first owned row, first key and segment; each key once, then those of the queries.
        let once = [vec![0, 1, 4, 0, 0, 4], vec![8, 1, 1, 4, 4, 4], vec![9, 1, 2, 5, 0, 5]];
        assert_eq!(&runs(&backward)[..3], once);
        let of_bands = undivided.before - backward.segments_bytes();
        assert_eq!(of_bands, (3 + 4) * RUN_BYTES);
    }

    /// Test that a prefix which leaves bands of one row does not hide from the host how far rows lie apart.
    #[test]
    fn the_step_of_rows_is_not_that_of_their_bands() {
        let [q, kv] = [2, 3].map(|step| Run { offset: 0, step, len: 2, span: 2 });
        let segment = Segment { q, kv: vec![kv], lo: None, hi: Some(0), prefix: 2, sink_tokens: 0 };
        assert!(segment.bands().iter().all(|band| band.q.span == 1));
        let softmax = Softmax { scale: 1.0, softcap: None, sink: Sink::None };
        let call = AttentionCall { segments: vec![segment], softmax, policy: RowPolicy::Overwrite };
        let steps = CallTables::new(&call, [3, 4], true).expect("legal").summary().step;
        assert_eq!(steps, [Some(2), Some(3)]);
    }
}
