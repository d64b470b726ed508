//! Operations on tables of rows: transfers of regions, merges, the sink. They are right for every table (see
//! `pairs.cu`).
//!
//! Tables are made on the host ([`RowTable`], [`TransferTable`]) and put where the GPU reads them. A launch has no
//! order among its elements, so that a table that writes something twice, or outside of its tensors, is refused.
#![allow(unsafe_code, reason = "says which types kernels receive")]

use std::ops::Range;

use seamproof_oracle::{Format, Run};
use seamproof_simulator::schedule::{MergeStyle, Reduction, RowPair};

use crate::block::{THREADS, WARP};
use crate::error::KernelError;
use crate::gpu::{Gpu, Launch};
use crate::memory::{Area, Argument};
use crate::tables::{blocks, check_apart};
use crate::view::{RawView, Table, View, is_codes, number_of_codes};

/// Rows that a block works on at once: one for each warp.
const WARPS: usize = THREADS / WARP;
/// The bytes of `Transfer` of the source.
const TRANSFER_BYTES: usize = 40;

/// Rows and heads of a tensor.
#[derive(Clone, Debug)]
pub struct DeviceRegion<'a> {
    /// The tensor.
    pub view: View<'a>,
    /// The rows; `len` of them.
    pub rows: Run,
    /// The heads.
    pub heads: Range<usize>,
}

/// The elements that are written to regions.
#[derive(Clone, Debug)]
pub enum Written<'a> {
    /// One value everywhere.
    Value(f32),
    /// The elements of one region, or of several combined in order.
    Parts(Reduction, Vec<DeviceRegion<'a>>),
}

/// The tables of transfers that are launched together. None reads what another writes.
#[derive(Clone, Debug, Default)]
pub struct TransferTable {
    transfers: Table,
    regions: Table,
    count: usize,
    region_count: usize,
    elements: usize,
    targets: Vec<Target>,
}

/// The target of a transfer: rows and heads of a view, and its first and last byte.
#[derive(Clone, Debug)]
struct Target {
    view: RawView,
    rows: Run,
    heads: Range<usize>,
    bytes: Range<u64>,
}

/// Rows of one tensor, or pairs of rows of two tensors that belong together.
#[derive(Clone, Debug, Default)]
pub struct RowTable {
    pub(crate) table: Table,
    count: usize,
    rows: usize,
    /// The rows that tensors must have: those that are read, and those that are written.
    ends: [usize; 2],
    /// The runs of rows that are written.
    written: Vec<Run>,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct RawMerge {
    pairs: u64,
    count: i32,
    heads: i32,
    rows: i64,
    dim: i32,
    style: i32,
    /// out, lse, step out, step lse.
    views: [RawView; 4],
}
#[repr(C)]
#[derive(Clone, Copy)]
struct RawSinkGradient {
    pairs: u64,
    count: i32,
    heads: i32,
    rows: i64,
    dim: i32,
    /// sink, dout, out, lse, dsink.
    views: [RawView; 5],
    /// The number of the format of dout's codes; 0 where dout is values.
    codes: i32,
    descales: u64,
}
// SAFETY: repr(C), the fields of `Merge` in pairs.cu.
unsafe impl Argument for RawMerge {}
// SAFETY: repr(C), the fields of `SinkGradient` in pairs.cu.
unsafe impl Argument for RawSinkGradient {}

impl DeviceRegion<'_> {
    /// Returns the number of lanes and the elements of each, and refuses a region outside of its tensor.
    fn lanes(&self) -> Result<[usize; 2], KernelError> {
        let [rows, heads, dim] = self.view.shape();
        let inside = self.rows.check(rows).is_ok() && self.heads.end <= heads;
        if !inside || self.heads.start > self.heads.end {
            let what = format!(
                "rows {:?}, heads {:?} lie outside of a tensor {:?}",
                self.rows,
                self.heads,
                self.view.shape()
            );
            return Err(KernelError::shape(what));
        }
        Ok([self.rows.len * self.heads.len(), dim])
    }

    /// Returns the region as a target. Its rows and heads must be in the tensor.
    fn target(&self) -> Result<Target, KernelError> {
        let (view, [_, _, dim]) = (self.view.raw_moved("region")?, self.view.shape());
        let element = u64::from(self.view.format().bits() / 8);
        let at = |row: usize, head: usize| view.row as u64 * row as u64 + view.head as u64 * head as u64;
        let first = at(self.rows.offset, self.heads.start);
        let last = at(end_of(self.rows) - 1, self.heads.end - 1) + dim as u64;
        let bytes = view.base + first * element..view.base + last * element;
        Ok(Target { view, rows: self.rows, heads: self.heads.clone(), bytes })
    }
}

/// Returns the row behind the last real one.
pub(crate) fn end_of(rows: Run) -> usize {
    if rows.len == 0 { 0 } else { rows.offset + rows.step * (rows.len - 1) + 1 }
}

/// Returns whether two runs have a real row in common.
fn meet(a: Run, b: Run) -> bool {
    let (short, long) = if a.len < b.len { (a, b) } else { (b, a) };
    let Run { offset, step, len, .. } = long;
    // The step of a run of one row means nothing.
    let step = step.max(1);
    let shared =
        |row: usize| row >= offset && (row - offset).is_multiple_of(step) && (row - offset) / step < len;
    (0..short.len).any(|i| shared(short.offset + short.step * i))
}

/// Returns two runs that have a real row in common.
fn meeting(mut runs: Vec<Run>) -> Option<[Run; 2]> {
    runs.sort_by_key(|run| run.offset);
    let of = |(index, &run): (usize, &Run)| {
        let near = runs[index + 1..].iter().take_while(|other| other.offset < end_of(run));
        near.copied().find(|&other| meet(run, other)).map(|other| [run, other])
    };
    runs.iter().enumerate().find_map(of)
}

/// Refuses runs of which two have a real row in common: no thread waits for another.
pub(crate) fn check_once(written: &[Run]) -> Result<(), KernelError> {
    match meeting(written.to_vec()) {
        Some([a, b]) => Err(KernelError::shape(format!("rows {a:?} and {b:?} are written by one launch"))),
        None => Ok(()),
    }
}

impl Target {
    /// Returns whether an element is in both. Different views count as overlapping wherever their bytes meet.
    fn overlaps(&self, other: &Target) -> bool {
        if self.bytes.end <= other.bytes.start || other.bytes.end <= self.bytes.start {
            return false;
        }
        if self.view != other.view {
            return true;
        }
        let heads = self.heads.start < other.heads.end && other.heads.start < self.heads.end;
        heads && meet(self.rows, other.rows)
    }
}

impl TransferTable {
    /// Adds a transfer, unless its regions are empty.
    pub fn push(&mut self, written: &Written, to: &[DeviceRegion]) -> Result<(), KernelError> {
        let (operation, value, from): (i32, f32, &[DeviceRegion]) = match written {
            Written::Value(value) => (2, *value, &[]),
            Written::Parts(Reduction::Sum, parts) => (0, 0.0, parts),
            Written::Parts(Reduction::Max, parts) => (1, 0.0, parts),
        };
        let mut sizes = from.iter().chain(to).map(DeviceRegion::lanes);
        let first = sizes.next().unwrap_or(Ok([0, 0]))?;
        for size in sizes {
            if size? != first {
                return Err(KernelError::shape("regions of a transfer have different sizes"));
            }
        }
        let [lanes, dim] = first;
        if lanes == 0 || dim == 0 || to.is_empty() {
            return Ok(());
        }
        if to.iter().any(|part| part.view.format() != to[0].view.format()) {
            let formats: Vec<String> = to.iter().map(|part| part.view.format().to_string()).collect();
            return Err(KernelError::shape(format!(
                "a transfer to {}; its targets need one format",
                formats.join(" and ")
            )));
        }
        let formats = || from.iter().chain(to).map(|part| part.view.format());
        let alike =
            [Format::E4m3, Format::E5m2].into_iter().any(|codes| formats().all(|format| format == codes));
        if !(from.len() <= 1 && alike) && formats().any(is_codes) {
            let what = "codes of FP8 are copied and filled; nothing converts them or adds them up";
            return Err(KernelError::shape(what));
        }
        for part in to {
            self.targets.push(part.target()?);
        }
        self.transfers.rows(&[self.elements]);
        let counts = [dim, self.region_count, from.len(), self.region_count + from.len(), to.len()];
        self.transfers.i32(&counts.map(|count| count as i32));
        // The struct's size is a multiple of its alignment.
        self.transfers.i32(&[operation, value.to_bits() as i32, 0]);
        for part in from.iter().chain(to) {
            self.regions.view(part.view.raw_moved("region")?);
            self.regions.rows(&[part.rows.offset, part.rows.step]);
            self.regions.i32(&[part.heads.start as i32, part.heads.len() as i32]);
        }
        self.count += 1;
        self.region_count += from.len() + to.len();
        self.elements += lanes * dim;
        Ok(())
    }

    /// Refuses a table that writes an element twice: no thread waits for another.
    fn check_targets(&self) -> Result<(), KernelError> {
        let mut sorted: Vec<&Target> = self.targets.iter().collect();
        sorted.sort_by_key(|target| target.bytes.start);
        for (index, target) in sorted.iter().enumerate() {
            let near = sorted[index + 1..].iter().take_while(|other| other.bytes.start < target.bytes.end);
            if let Some(other) = near.into_iter().find(|other| target.overlaps(other)) {
                let what = format!(
                    "rows {:?}, heads {:?} and rows {:?}, heads {:?} overlap and are written by one launch",
                    target.rows, target.heads, other.rows, other.heads
                );
                return Err(KernelError::shape(what));
            }
        }
        Ok(())
    }

    /// Returns whether there is nothing to do.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        [self.transfers.0.as_slice(), &self.regions.0].concat()
    }
}

impl RowTable {
    /// Returns a table of pairs of rows.
    pub fn pairs(pairs: &[RowPair]) -> RowTable {
        let mut rows = RowTable::default();
        for (from, to) in pairs.iter().filter(|(from, _)| from.len > 0) {
            rows.table.rows(&[from.offset, from.step, to.offset, to.step, rows.rows]);
            rows.count += 1;
            rows.rows += from.len;
            rows.written.push(Run { len: from.len, ..*to });
            for (end, run) in rows.ends.iter_mut().zip([from, to]) {
                *end = end_of(Run { len: from.len, ..*run }).max(*end);
            }
        }
        rows
    }

    /// Returns a table of rows of one tensor.
    pub fn rows(rows: &[Run]) -> RowTable {
        let same: Vec<RowPair> = rows.iter().map(|&run| (run, run)).collect();
        RowTable::pairs(&same)
    }

    fn check(&self, tables: Area) -> Result<(), KernelError> {
        if tables.bytes() == self.table.0.len() && tables.address().is_multiple_of(8) {
            return Ok(());
        }
        Err(KernelError::shape(format!("{} bytes are not the table of rows", tables.bytes())))
    }

    /// Refuses tensors that do not have the table's rows: those that are read, and those that are written.
    fn check_rows(&self, from: &[&View], to: &[&View]) -> Result<(), KernelError> {
        for (end, views) in self.ends.into_iter().zip([from, to]) {
            if let Some(view) = views.iter().find(|view| view.shape()[0] < end) {
                let have = view.shape()[0];
                return Err(KernelError::shape(format!(
                    "the table has rows up to {end}, and a tensor {have} of them"
                )));
            }
        }
        Ok(())
    }
}

/// Returns a statistic as kernels take it, and refuses one that is not f32 of these heads.
fn statistic(name: &str, view: &View, heads: usize) -> Result<RawView, KernelError> {
    let [_, have, dim] = view.shape();
    if have != heads || dim != 1 || view.format() != Format::F32 {
        let what = format!("{name}: {:?} in {}, not f32 of {heads} heads", view.shape(), view.format());
        return Err(KernelError::shape(what));
    }
    view.raw(name)
}

fn tensor(name: &str, view: &View, heads: usize, dim: usize) -> Result<RawView, KernelError> {
    shaped(name, view, heads, dim)?.raw(name)
}

/// Returns a tensor, or refuses it where it has not these heads and head dim.
fn shaped<'v, 'a>(
    name: &str,
    view: &'v View<'a>,
    heads: usize,
    dim: usize,
) -> Result<&'v View<'a>, KernelError> {
    let [_, have_heads, have_dim] = view.shape();
    if (have_heads, have_dim) == (heads, dim) {
        return Ok(view);
    }
    Err(KernelError::shape(format!("{name}: {:?}, not {heads} heads of {dim}", view.shape())))
}

impl Gpu {
    /// Carries out transfers. `tables` holds them.
    pub fn transfer(&self, table: &TransferTable, tables: Area) -> Result<(), KernelError> {
        table.check_targets()?;
        let transfers = table.count * TRANSFER_BYTES;
        if tables.bytes() != transfers + table.regions.0.len() || !tables.address().is_multiple_of(8) {
            return Err(KernelError::shape(format!("{} bytes are not the transfers", tables.bytes())));
        }
        let arguments: [&dyn Argument; 4] = [
            &tables.address(),
            &(table.count as i32),
            &(tables.address() + transfers as u64),
            &(table.elements as i64),
        ];
        self.launch("transfer_elements", (blocks(table.elements, THREADS), 1, THREADS), &arguments)
    }

    /// Folds a step's out and LSE into the running ones, for pairs of rows of the step and of the running tensors.
    pub fn merge_pairs(
        &self,
        rows: &RowTable,
        tables: Area,
        style: MergeStyle,
        [out, lse]: [&View; 2],
        [step_out, step_lse]: [&View; 2],
    ) -> Result<(), KernelError> {
        rows.check(tables)?;
        check_once(&rows.written)?;
        rows.check_rows(&[step_out, step_lse], &[out, lse])?;
        let read = [step_out.named("step out"), step_lse.named("step lse"), ("the table", tables)];
        check_apart(&[out.named("out"), lse.named("lse")], &read)?;
        let [_, heads, dim] = out.shape();
        let style = match style {
            MergeStyle::Running => 0,
            MergeStyle::Statistics => 1,
            MergeStyle::Weighted { product_rounded: false } => 2,
            MergeStyle::Weighted { product_rounded: true } => 3,
            MergeStyle::Difference => {
                return Err(KernelError::shape("no kernel merges by a difference; merge by weights"));
            }
        };
        let views = [
            out.raw("out")?,
            statistic("lse", lse, heads)?,
            tensor("step out", step_out, heads, dim)?,
            statistic("step lse", step_lse, heads)?,
        ];
        self.rows_of_merge("merge_pairs", rows, tables, (heads, dim, style), views)
    }

    /// Adds the sink's term to final statistics. Without a sink the term is that of 0.
    pub fn apply_sink(
        &self,
        rows: &RowTable,
        tables: Area,
        sink: Option<&View>,
        [out, lse]: [&View; 2],
    ) -> Result<(), KernelError> {
        rows.check(tables)?;
        check_once(&rows.written)?;
        rows.check_rows(&[], &[out, lse])?;
        let mut read = vec![("the table", tables)];
        read.extend(sink.map(|sink| sink.named("sink")));
        check_apart(&[out.named("out"), lse.named("lse")], &read)?;
        let [_, heads, dim] = out.shape();
        let lse = statistic("lse", lse, heads)?;
        let learnable = sink.map(|sink| statistic("sink", sink, heads)).transpose()?;
        let views = [out.raw("out")?, lse, lse, learnable.unwrap_or(lse)];
        let style = i32::from(learnable.is_some());
        self.rows_of_merge("apply_sink", rows, tables, (heads, dim, style), views)
    }

    fn rows_of_merge(
        &self,
        kernel: &str,
        rows: &RowTable,
        tables: Area,
        (heads, dim, style): (usize, usize, i32),
        views: [RawView; 4],
    ) -> Result<(), KernelError> {
        let arguments = RawMerge {
            pairs: tables.address(),
            count: rows.count as i32,
            heads: heads as i32,
            rows: rows.rows as i64,
            dim: dim as i32,
            style,
            views,
        };
        self.launch(kernel, (blocks(rows.rows * heads, WARPS), 1, THREADS), &[&arguments])
    }

    /// Overwrites the gradient of the sink over rows, for each head: `dsink = −Σ exp(sink − lse) · ⟨dout, out⟩`.
    /// `descales` are f32 of each pair of the table and head, where dout is in codes.
    pub fn sink_gradient(
        &self,
        rows: &RowTable,
        tables: Area,
        descales: Option<Area>,
        [sink, dsink]: [&View; 2],
        [dout, out, lse]: [&View; 3],
    ) -> Result<(), KernelError> {
        rows.check(tables)?;
        rows.check_rows(&[dout, out, lse], &[])?;
        let of_rows = [dout.named("dout"), out.named("out"), lse.named("lse")];
        check_apart(
            &[dsink.named("dsink")],
            &[&of_rows[..], &[sink.named("sink"), ("the table", tables)]].concat(),
        )?;
        let [_, heads, dim] = out.shape();
        let views = [
            statistic("sink", sink, heads)?,
            shaped("dout", dout, heads, dim)?.raw_moved("dout")?,
            out.raw("out")?,
            statistic("lse", lse, heads)?,
            statistic("dsink", dsink, heads)?,
        ];
        let codes = number_of_codes(dout.format());
        let needed = if codes == 0 { None } else { Some(4 * rows.count * heads) };
        if needed != descales.map(|area| area.bytes()) {
            return Err(KernelError::shape(format!(
                "descales of dout in {}, not {needed:?} bytes",
                dout.format()
            )));
        }
        let arguments = RawSinkGradient {
            pairs: tables.address(),
            count: rows.count as i32,
            heads: heads as i32,
            rows: rows.rows as i64,
            dim: dim as i32,
            views,
            codes,
            descales: descales.map_or(0, |area| area.address()),
        };
        self.launch("sink_gradient", (heads, 1, WARP), &[&arguments])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packed(offset: usize, len: usize) -> Run {
        Run::packed(offset, len, len)
    }

    fn tensor(address: u64, [rows, heads, dim]: [usize; 3], format: Format) -> View<'static> {
        let bytes = rows * heads * dim * format.bits() as usize / 8;
        View::rows(Area::nowhere(address, bytes), [rows, heads, dim], format)
    }

    fn part(view: &View<'static>, rows: Run, heads: Range<usize>) -> DeviceRegion<'static> {
        DeviceRegion { view: *view, rows, heads }
    }

    /// Checks a table of fills as a launch does.
    fn fills(parts: &[DeviceRegion]) -> Result<(), KernelError> {
        let mut table = TransferTable::default();
        for part in parts {
            table.push(&Written::Value(0.0), std::slice::from_ref(part))?;
        }
        table.check_targets()
    }

    #[test]
    fn targets_that_overlap_are_refused_and_no_others() {
        let view = tensor(256, [12, 4, 8], Format::F32);
        let strided = |offset, step, len| Run { offset, step, len, span: len };
        let apart = [
            [part(&view, packed(0, 5), 0..4), part(&view, packed(5, 7), 0..4)],
            [part(&view, packed(0, 12), 0..2), part(&view, packed(0, 12), 2..4)],
            [part(&view, strided(0, 2, 6), 0..4), part(&view, strided(1, 2, 6), 0..4)],
            [part(&view, strided(0, 3, 4), 0..4), part(&view, strided(2, 6, 2), 0..4)],
        ];
        for parts in apart {
            assert!(fills(&parts).is_ok(), "{parts:?}");
        }
        let other = tensor(256 + 12 * 4 * 8 * 4 - 4, [1, 1, 1], Format::F32);
        let meeting = [
            [part(&view, packed(0, 6), 0..4), part(&view, packed(5, 7), 0..4)],
            [part(&view, packed(0, 12), 0..3), part(&view, packed(3, 1), 2..4)],
            [part(&view, strided(0, 2, 6), 0..4), part(&view, strided(1, 3, 4), 0..4)],
            [part(&view, packed(0, 12), 0..4), part(&other, packed(0, 1), 0..1)],
        ];
        for parts in meeting {
            let said = fills(&parts).expect_err("it is taken").to_string();
            assert!(said.contains("overlap"), "{said}");
        }
    }

    #[test]
    fn targets_of_two_formats_are_refused_and_parts_of_two_are_summed() {
        let (f32, bf16) = (tensor(0, [4, 2, 8], Format::F32), tensor(1024, [4, 2, 8], Format::Bf16));
        let all = |view| part(view, packed(0, 4), 0..2);
        let mut table = TransferTable::default();
        let copy = Written::Parts(Reduction::Sum, vec![all(&f32)]);
        let said = table.push(&copy, &[all(&f32), all(&bf16)]).expect_err("it is taken").to_string();
        assert!(said.contains("one format"), "{said}");
        let sum = Written::Parts(Reduction::Sum, vec![all(&f32), all(&bf16)]);
        table.push(&sum, &[all(&f32)]).expect("a sum");
    }

    #[test]
    fn rows_that_a_tensor_lacks_are_refused() {
        let (short, long) = (tensor(0, [6, 1, 8], Format::F32), tensor(4096, [9, 1, 8], Format::F32));
        let strided = Run { offset: 2, step: 3, len: 3, span: 3 };
        let table = RowTable::pairs(&[(packed(0, 3), strided), (packed(3, 0), packed(90, 0))]);
        assert!(table.check_rows(&[&short], &[&long]).is_ok());
        let said = table.check_rows(&[&long], &[&short]).expect_err("it is taken").to_string();
        assert!(said.contains("up to 9") && said.contains("6 of them"), "{said}");
        assert!(RowTable::rows(&[packed(4, 3)]).check_rows(&[&short], &[]).is_err());
    }

    /// The rows are compared one by one. No two runs of small offsets, steps and lengths may be judged otherwise.
    #[test]
    fn runs_meet_where_they_have_a_row_in_common() {
        let runs = || {
            (0..5).flat_map(|offset| (1..4).flat_map(move |step| (0..4).map(move |len| (offset, step, len))))
        };
        let run = |(offset, step, len)| Run { offset, step, len, span: len };
        for (a, b) in runs().flat_map(|a| runs().map(move |b| (run(a), run(b)))) {
            let common = a.real_rows().any(|row| b.real_rows().any(|other| row == other));
            assert_eq!(meet(a, b), common, "{a:?} {b:?}");
            assert_eq!(meeting(vec![b, packed(100, 2), a]).is_some(), common, "{a:?} {b:?}");
        }
        let pairs = [(packed(0, 2), packed(4, 2)), (packed(2, 2), packed(5, 2))];
        assert!(check_once(&RowTable::pairs(&pairs[..1]).written).is_ok());
        let said = check_once(&RowTable::pairs(&pairs).written).unwrap_err().to_string();
        assert!(said.contains("are written by one launch"), "{said}");
    }
}
