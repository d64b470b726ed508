//! Partial results folded into running ones: statistics, out, gradients, and the largest logit.
//!
//! out and gradients are `[rows, heads, dim]`, and statistics `[heads, rows]` in f32. Only real rows are touched.
//! Heads and dims are any. A dim that is a multiple of 8, with tensors on 16 bytes, runs at full speed; any other
//! runs element by element.
#![allow(unsafe_code, reason = "says which types kernels receive")]

use seamproof_oracle::Format;
use seamproof_simulator::helpers::{Half, Rest, SlotPart, Style, Update, half_rows};

use crate::block::{THREADS, WARP};
use crate::codec::element_bytes;
use crate::error::KernelError;
use crate::gpu::Launch;
use crate::memory::{Area, Argument};
use crate::rows::{ByteRows, RowKernels, check_half_rows};
use crate::tables::{ROWS_MAX, RawSlots, Slots, blocks, check_apart, on_bytes};

/// The constant `HEADS` of the source.
const STATISTIC_HEADS: usize = 8;
/// The constant `LOGIT_HEADS` of the source.
const LOGIT_HEADS: usize = 8;
/// The rows of a statistic that a thread has where they lie well, and `HEADS_OF_4` and `HALF_HEADS_OF_4` of the
/// source.
const QUAD: usize = 4;
const QUAD_HEADS: usize = 2;
const HALF_QUAD_HEADS: usize = 8;
/// The elements of a vector.
const VECTOR: usize = 8;

/// A tensor `[rows, heads, dim]`.
#[derive(Clone, Copy, Debug)]
pub struct DeviceTensor<'a> {
    /// The memory.
    pub area: Area<'a>,
    /// The number of rows.
    pub rows: usize,
    /// The number of heads.
    pub heads: usize,
    /// The elements of a row and head.
    pub dim: usize,
    /// The format: f32, bf16 or fp16.
    pub format: Format,
}

/// A statistic `[heads, rows]` in f32.
#[derive(Clone, Copy, Debug)]
pub struct DeviceStatistic<'a> {
    /// The memory.
    pub area: Area<'a>,
    /// The number of heads.
    pub heads: usize,
    /// The number of rows.
    pub rows: usize,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct RawPart {
    slots: RawSlots,
    half: i32,
    compact: i32,
    half_rows: i32,
}
#[repr(C)]
#[derive(Clone, Copy)]
struct RawShape {
    heads: i32,
    dim: i32,
    tile_rows: i32,
    tile_heads: i32,
    lanes: u32,
    per_lane: u32,
    per_head: u32,
    groups: u32,
    per_group: u32,
    step_rows: i64,
}
// SAFETY: repr(C), the fields of `Part` in merge.cu.
unsafe impl Argument for RawPart {}
// SAFETY: repr(C), the fields of `Shape` in merge.cu.
unsafe impl Argument for RawShape {}

/// Returns the number of rows that threads run over.
fn threads_over(part: SlotPart, rows: usize) -> usize {
    if let SlotPart::Whole = part { rows } else { half_rows(rows) }
}

fn raw_part(part: SlotPart, slots: &Slots) -> Result<RawPart, KernelError> {
    let (half, compact) = match part {
        SlotPart::Whole => (-1, 0),
        SlotPart::HalfInPlace(half) => (half as i32, 0),
        SlotPart::Compact(half) => (half as i32, 1),
    };
    Ok(RawPart { slots: slots.raw()?, half, compact, half_rows: half_rows(slots.rows) as i32 })
}

impl DeviceStatistic<'_> {
    /// Returns whether four rows lie on 16 bytes, in each head.
    fn in_quads(&self) -> bool {
        self.rows.is_multiple_of(QUAD) && self.area.address().is_multiple_of(16)
    }

    pub(crate) fn check(&self, name: &str, heads: usize, rows: usize) -> Result<(), KernelError> {
        let bytes = heads.checked_mul(rows).and_then(|count| count.checked_mul(4));
        if (self.heads, self.rows) != (heads, rows) || bytes != Some(self.area.bytes()) {
            let (have, is) = (self.area.bytes(), (self.heads, self.rows));
            let what = format!("{name}: {have} bytes as [{}, {}], not f32 [{heads}, {rows}]", is.0, is.1);
            return Err(KernelError::shape(what));
        }
        if heads > ROWS_MAX {
            return Err(KernelError::shape(format!("{name}: {heads} heads; at most {ROWS_MAX}")));
        }
        on_bytes(name, self.area.address(), 4)
    }
}

impl DeviceTensor<'_> {
    pub(crate) fn check(&self, name: &str, rows: usize) -> Result<(), KernelError> {
        let element = element_bytes(self.format);
        let bytes = [rows, self.heads, self.dim, element].into_iter().try_fold(1_usize, usize::checked_mul);
        if self.rows != rows || bytes != Some(self.area.bytes()) || self.dim == 0 {
            let DeviceTensor { rows: have, heads, dim, .. } = self;
            let what =
                format!("{name}: [{have}, {heads}, {dim}] in {} bytes, not {rows} rows", self.area.bytes());
            return Err(KernelError::shape(what));
        }
        if self.heads.saturating_mul(self.dim) > ROWS_MAX {
            let what = format!("{name}: {} heads of {}; at most {ROWS_MAX} lanes", self.heads, self.dim);
            return Err(KernelError::shape(what));
        }
        on_bytes(name, self.area.address(), element)
    }

    pub(crate) fn as_rows(&self) -> ByteRows<'_> {
        let row_bytes = self.heads * self.dim * element_bytes(self.format);
        ByteRows { area: self.area, rows: self.rows, row_bytes }
    }

    fn vector(&self) -> bool {
        self.dim.is_multiple_of(VECTOR) && self.area.address().is_multiple_of(16)
    }
}

/// Returns what a launch reads: these tensors, and the tables of slots.
fn reads<'a, 'n>(slots: &Slots<'a>, tensors: &[(&'n str, Area<'a>)]) -> Vec<(&'n str, Area<'a>)> {
    slots.tables().into_iter().chain(tensors.iter().copied()).collect()
}

/// Checks a running tensor and a step's. Returns the end of their kernels' names, and the elements of a vector.
fn check_steps(
    slots: &Slots,
    part: SlotPart,
    running: DeviceTensor,
    step: DeviceTensor,
) -> Result<(String, usize), KernelError> {
    running.check("running", slots.rows)?;
    step.check("step", part.step_rows(slots.rows))?;
    if (running.heads, running.dim) != (step.heads, step.dim) {
        return Err(KernelError::shape("a step needs the heads and dim of the running tensor"));
    }
    let known = match (running.format, step.format) {
        (Format::F32, Format::F32 | Format::Bf16 | Format::Fp16) => true,
        (running, step) => running == step && matches!(running, Format::Bf16 | Format::Fp16),
    };
    if !known {
        let what = format!(
            "{} added to {}; the running format is f32, or bf16 or fp16 and the step's",
            step.format.name(),
            running.format.name()
        );
        return Err(KernelError::shape(what));
    }
    let width = if running.vector() && step.vector() { VECTOR } else { 1 };
    Ok((format!("{}_{}_{width}", running.format.name(), step.format.name()), width))
}

/// The tiles of warps: the vectors of one row that lanes have in flight at once.
struct Tiling {
    vectors: usize,
}

impl Tiling {
    const MERGE: Tiling = Tiling { vectors: 64 };
    const SUM_IN_F32: Tiling = Tiling { vectors: 32 };

    /// Returns the shape of tiles. `lanes` vectors make a row of a head, and each lane of a warp has one such pair.
    fn shape(&self, heads: usize, dim: usize, step_rows: usize, lanes: usize) -> RawShape {
        let pairs = (self.vectors / lanes).clamp(1, WARP);
        let tile_heads = pairs.min(heads.max(1));
        let groups = blocks(heads, tile_heads).max(1) as u32;
        RawShape {
            heads: heads as i32,
            dim: dim as i32,
            tile_rows: (pairs / tile_heads) as i32,
            tile_heads: tile_heads as i32,
            lanes: lanes as u32,
            // This is exact below 2^31 / lanes, and a tile of several pairs stays far under that. A tile of one pair
            // divides nothing.
            per_lane: if pairs > 1 { (1_u32 << 31).div_ceil(lanes as u32) } else { 0 },
            per_head: (1_u32 << 16).div_ceil(tile_heads as u32),
            groups,
            per_group: u32::MAX / groups,
            step_rows: step_rows as i64,
        }
    }
}

/// The launches of this module.
pub trait MergeKernels: RowKernels {
    /// Folds a step's statistic into the running one: `ln(e^a + e^b)`, with −∞ as the identity.
    fn merge_statistics(
        &self,
        slots: Slots,
        part: SlotPart,
        lse: DeviceStatistic,
        step: DeviceStatistic,
    ) -> Result<(), KernelError> {
        lse.check("lse", lse.heads, slots.rows)?;
        step.check("step", lse.heads, part.step_rows(slots.rows))?;
        check_apart(&[("lse", lse.area)], &reads(&slots, &[("step", step.area)]))?;
        let arguments: [&dyn Argument; 5] = [
            &raw_part(part, &slots)?,
            &lse.area.address(),
            &step.area.address(),
            &(lse.heads as i32),
            &(step.rows as i64),
        ];
        let vector = matches!(part, SlotPart::Whole) && lse.in_quads() && step.in_quads();
        let (each, heads) = if vector { (QUAD, QUAD_HEADS) } else { (1, STATISTIC_HEADS) };
        let rows = threads_over(part, slots.rows);
        let grid = (blocks(rows, THREADS * each), blocks(lse.heads, heads), THREADS);
        self.launch(&format!("merge_statistics_{each}"), grid, &arguments)
    }

    /// Copies one half of a statistic, padding included, to the layout of halves. `rest` is written where no slot
    /// owns a row.
    fn read_half_statistic(
        &self,
        slots: Slots,
        half: Half,
        whole: DeviceStatistic,
        halves: DeviceStatistic,
        rest: Option<f32>,
    ) -> Result<(), KernelError> {
        half_statistic(self, slots, half, [whole, halves], (0, rest))
    }

    /// Copies the layout of halves back to one half of a statistic.
    fn write_half_statistic(
        &self,
        slots: Slots,
        half: Half,
        halves: DeviceStatistic,
        whole: DeviceStatistic,
    ) -> Result<(), KernelError> {
        half_statistic(self, slots, half, [whole, halves], (1, None))
    }

    /// Folds a step's out into the running one. [`Style::Running`] also updates the running statistic.
    fn merge_out(
        &self,
        slots: Slots,
        (part, style): (SlotPart, Style),
        (out, lse): (DeviceTensor, DeviceStatistic),
        (step_out, step_lse): (DeviceTensor, DeviceStatistic),
    ) -> Result<(), KernelError> {
        let (formats, width) = check_steps(&slots, part, out, step_out)?;
        lse.check("lse", out.heads, slots.rows)?;
        step_lse.check("step lse", out.heads, step_out.rows)?;
        let (running, step) = ([("out", out.area), ("lse", lse.area)], ("step lse", step_lse.area));
        check_apart(&running, &reads(&slots, &[("step out", step_out.area), step]))?;
        let (name, warps) = match style {
            Style::Running => ("running", Warps::Below),
            Style::Weighted { product_rounded: false } => ("weighted", Warps::InOrder),
            Style::Weighted { product_rounded: true } => ("weighted_rounded", Warps::InOrder),
        };
        let shape = Tiling::MERGE.shape(out.heads, out.dim, step_out.rows, out.dim / width);
        let arguments: [&dyn Argument; 6] = [
            &raw_part(part, &slots)?,
            &shape,
            &out.area.address(),
            &step_out.area.address(),
            &lse.area.address(),
            &step_lse.area.address(),
        ];
        self.launch(&format!("merge_{name}_{formats}"), grid(warps, &shape, part, &slots)?, &arguments)
    }

    /// Copies or adds a step's gradient, each half of every slot by itself. A step of one half leaves the other half
    /// alone, whatever its update is.
    fn accumulate(
        &self,
        slots: Slots,
        part: SlotPart,
        [first, second]: [Update; 2],
        sum: DeviceTensor,
        step: DeviceTensor,
    ) -> Result<(), KernelError> {
        let (formats, width) = check_steps(&slots, part, sum, step)?;
        if matches!(part, SlotPart::Whole)
            && [first, second] == [Update::Copy; 2]
            && sum.format == step.format
        {
            return self.copy_valid(slots, step.as_rows(), sum.as_rows(), Rest::Leave);
        }
        check_apart(&[("sum", sum.area)], &reads(&slots, &[("step", step.area)]))?;
        let tiling = if sum.format == Format::F32 { Tiling::SUM_IN_F32 } else { Tiling::MERGE };
        let shape = tiling.shape(sum.heads, sum.dim, step.rows, sum.dim / width);
        let arguments: [&dyn Argument; 6] = [
            &raw_part(part, &slots)?,
            &shape,
            &(first as i32),
            &(second as i32),
            &sum.area.address(),
            &step.area.address(),
        ];
        self.launch(&format!("accumulate_{formats}"), grid(Warps::InOrder, &shape, part, &slots)?, &arguments)
    }

    /// Folds the row maxima of real rows into the largest logit of each head. With `fresh` it starts from −∞, and not
    /// from what `largest` holds.
    fn max_logit(
        &self,
        slots: Slots,
        rows_max: DeviceStatistic,
        largest: Area,
        fresh: bool,
    ) -> Result<(), KernelError> {
        rows_max.check("row maxima", rows_max.heads, slots.rows)?;
        DeviceStatistic { area: largest, heads: rows_max.heads, rows: 1 }.check(
            "largest",
            rows_max.heads,
            1,
        )?;
        check_apart(&[("largest", largest)], &reads(&slots, &[("row maxima", rows_max.area)]))?;
        let raw = slots.raw()?;
        if fresh {
            let (count, pattern) = (rows_max.heads as i64, f32::NEG_INFINITY.to_bits());
            let grid = (blocks(rows_max.heads, THREADS), 1, THREADS);
            self.launch("fill_words", grid, &[&largest.address(), &count, &pattern])?;
        }
        let each = if rows_max.in_quads() { QUAD } else { 1 };
        let arguments: [&dyn Argument; 4] =
            [&raw, &rows_max.area.address(), &(rows_max.heads as i32), &largest.address()];
        let grid = (blocks(slots.rows, THREADS * each), blocks(rows_max.heads, LOGIT_HEADS), THREADS);
        self.launch(&format!("max_logit_{each}"), grid, &arguments)
    }
}

impl<L: Launch + ?Sized> MergeKernels for L {}

fn half_statistic<L: Launch + ?Sized>(
    gpu: &L,
    slots: Slots,
    half: Half,
    [whole, halves]: [DeviceStatistic; 2],
    (write, rest): (i32, Option<f32>),
) -> Result<(), KernelError> {
    whole.check("whole", whole.heads, slots.rows)?;
    halves.check("halves", whole.heads, half_rows(slots.rows))?;
    check_half_rows(halves.rows)?;
    let (whole_area, halves_area) = (("whole", whole.area), ("halves", halves.area));
    let (to, from) = if write == 1 { (whole_area, halves_area) } else { (halves_area, whole_area) };
    check_apart(&[to], &reads(&slots, &[from]))?;
    let arguments: [&dyn Argument; 7] = [
        &raw_part(SlotPart::Compact(half), &slots)?,
        &whole.area.address(),
        &halves.area.address(),
        &(whole.heads as i32),
        &write,
        &i32::from(rest.is_some()),
        &rest.unwrap_or_default().to_bits(),
    ];
    let vector = whole.in_quads() && halves.in_quads();
    let (each, heads) = if vector { (QUAD, HALF_QUAD_HEADS) } else { (1, STATISTIC_HEADS) };
    let grid = (blocks(halves.rows, THREADS * each), blocks(whole.heads, heads), THREADS);
    gpu.launch(&format!("half_statistics_{each}"), grid, &arguments)
}

/// The places of a block's warps relative to one another: `BELOW` of the source.
#[derive(Clone, Copy)]
enum Warps {
    /// The warps' tiles are in the order of memory.
    InOrder,
    /// The warps have the same heads, of rows one below the other.
    Below,
}

/// Returns the grid, with a warp for each tile, and refuses so many tiles that the source's division of their numbers
/// is wrong.
fn grid(
    warps: Warps,
    shape: &RawShape,
    part: SlotPart,
    slots: &Slots,
) -> Result<(usize, usize, usize), KernelError> {
    let (rows, tile_rows) = (threads_over(part, slots.rows), shape.tile_rows as usize);
    let groups = blocks(shape.heads as usize, shape.tile_heads as usize);
    let (tiles, block) = match warps {
        Warps::InOrder => (blocks(rows, tile_rows) * groups, THREADS / WARP),
        Warps::Below => (blocks(rows, tile_rows * THREADS / WARP) * groups, 1),
    };
    if tiles > i32::MAX as usize - THREADS {
        return Err(KernelError::shape(format!("{tiles} tiles of rows and heads; at most {}", i32::MAX)));
    }
    Ok((blocks(tiles, block), 1, THREADS))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// These are the divisions of `owned_by_lane` in the source, for every number of heads of a tile and of tiles of
    /// a row.
    #[test]
    fn tiles_and_lanes_are_divided_without_a_division() {
        for (heads, vectors) in (1..=300).flat_map(|heads| [1, 8, 64, 256].map(|vectors| (heads, vectors))) {
            let shape = Tiling { vectors }.shape(heads, 64, 1, 8);
            for lane in 0..WARP as u32 {
                assert_eq!((lane * shape.per_head) >> 16, lane / shape.tile_heads as u32);
            }
            let groups = u64::from(shape.groups);
            assert_eq!(groups as usize, heads.div_ceil(shape.tile_heads as usize));
            let near = (0..40).flat_map(|i| [i, i * groups, i * groups + groups - 1]);
            let far = near.clone().map(|i| i32::MAX as u64 - i);
            for warp in near.chain(far) {
                let tile = (warp * u64::from(shape.per_group)) >> 32;
                let tile = if warp - tile * groups >= groups { tile + 1 } else { tile };
                assert_eq!(tile, warp / groups, "{warp} of {groups}");
            }
        }
    }
}
