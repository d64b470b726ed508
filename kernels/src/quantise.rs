//! Quantising on a GPU: largest magnitudes, factors, and codes, in rows and turned (see `quantise.cu` and `turned.cu`).
//!
//! The definition is [`seamproof_oracle::quantise`], and the kernels give its bits. A rank launches [`largest`], takes the
//! larger of its magnitudes and those of every other rank, launches [`factors`], and then [`encode`] or [`encode_turned`].
//! Tensors that share a scale share its memory. A group that has one row over all ranks needs no other rank, and
//! [`encode_rows`] makes all of it at once.
//!
//! [`largest`]: QuantiseKernels::largest
//! [`factors`]: QuantiseKernels::factors
//! [`encode`]: QuantiseKernels::encode
//! [`encode_turned`]: QuantiseKernels::encode_turned
//! [`encode_rows`]: QuantiseKernels::encode_rows
#![allow(unsafe_code, reason = "says which types kernels receive")]

use seamproof_oracle::Format;
use seamproof_oracle::groups::Groups;
use seamproof_oracle::quantise::{HISTORY_MAX, MARGIN_MAX, ScaleRule, Takes};
use seamproof_oracle::sharding::SideLayout;

use crate::block::{THREADS, WARP};
use crate::codec::element_bytes;
use crate::error::KernelError;
use crate::gpu::Launch;
use crate::memory::{Area, Argument};
use crate::tables::{ROWS_MAX, blocks, check_apart, hold_i32, on_bytes};
use crate::turned::{RawTurned, TurnedShape, VECTOR};
use crate::view::View;

/// The rows that a thread asks for at once: `IN_FLIGHT` of the source.
const IN_FLIGHT: usize = 4;
/// The times that a thread asks while it looks for magnitudes: a block sends its largest once for all of them.
const ASKS: usize = 4;

/// The elements of a tensor that share a scale.
#[derive(Clone, Copy, Debug)]
pub struct GroupTable<'a> {
    /// The row group of each row, `[rows]` i32; −1 of a row that is not real.
    pub row_group: Area<'a>,
    /// The number of row groups, head groups and lane groups: the shape of the scales.
    pub shape: [usize; 3],
    /// The heads of a group.
    pub heads_each: usize,
    /// The lanes of a group.
    pub lanes_each: usize,
}

/// A rule from magnitudes to factors ([`ScaleRule`]).
#[derive(Clone, Copy, Debug)]
pub struct DeviceRecipe<'a> {
    /// The format of codes.
    pub format: Format,
    /// The rule.
    pub scale: ScaleRule,
    /// The number of powers of two that are left free above the largest value.
    pub margin: i32,
    /// The history that factors are taken from; absent where they are taken from the present values.
    pub delayed: Option<DeviceHistory<'a>>,
}

/// Magnitudes of earlier steps on the device.
#[derive(Clone, Copy, Debug)]
pub struct DeviceHistory<'a> {
    /// The magnitudes, the newest first, `f32` each.
    pub history: Area<'a>,
    /// The memory of the next step's, which has as many.
    pub next: Area<'a>,
    /// Which of them count.
    pub takes: Takes,
    /// The scale of the step before, which stays where the history holds no value but 0.
    pub previous: f32,
}

/// The struct `Grouped` of the sources.
#[repr(C)]
#[derive(Clone, Copy)]
struct RawGrouped {
    values: u64,
    row_group: u64,
    rows: u32,
    heads: u32,
    dim: u32,
    heads_each: u32,
    lanes_each: u32,
    row_groups: u32,
    head_groups: u32,
    lane_groups: u32,
}
// SAFETY: repr(C), the fields of `Grouped` in quantise.cuh.
unsafe impl Argument for RawGrouped {}

/// The struct `Recipe` of the source.
#[repr(C)]
#[derive(Clone, Copy)]
struct RawRecipe {
    largest: f32,
    exponent: i32,
    rule: i32,
    otherwise: f32,
    history: u64,
    next: u64,
    entries: i32,
    newest: i32,
}
// SAFETY: repr(C), the fields of `Recipe` in quantise.cu.
unsafe impl Argument for RawRecipe {}

/// Returns the row group of each row of a rank's tensor, −1 for a row that is not real.
pub fn row_groups(groups: &Groups, side: &SideLayout) -> Vec<i32> {
    let mut of_row = vec![-1; side.rows];
    for placed in &side.runs {
        for i in 0..placed.local.len {
            let position = placed.piece.start + i * placed.piece.step;
            of_row[placed.local.row(i)] = groups.of(placed.sequence, position, 0, 0)[0] as i32;
        }
    }
    of_row
}

/// The struct `Factors` of the source.
#[repr(C)]
#[derive(Clone, Copy)]
struct RawFactors([u64; 3]);
// SAFETY: repr(C), the fields of `Factors` in quantise.cu: three addresses.
unsafe impl Argument for RawFactors {}

impl GroupTable<'_> {
    /// Returns the number of groups.
    pub fn count(&self) -> usize {
        self.shape.iter().product()
    }

    fn raw(&self, values: &View) -> Result<RawGrouped, KernelError> {
        let ([rows, heads, dim], GroupTable { shape, heads_each, lanes_each, .. }) = (values.shape(), *self);
        hold_i32(&[("the row groups", self.row_group)], rows)?;
        let covers = |groups: usize, each: usize, all: usize| each > 0 && groups == blocks(all, each);
        let groups = shape.iter().try_fold(1_usize, |all, &groups| all.checked_mul(groups));
        let fits = groups.is_some_and(|groups| groups <= ROWS_MAX);
        if !fits || !covers(shape[1], heads_each, heads) || !covers(shape[2], lanes_each, dim) {
            let what = format!(
                "{shape:?} groups of {heads_each} heads and {lanes_each} lanes, of {heads} heads and {dim} lanes"
            );
            return Err(KernelError::shape(what));
        }
        let [rows, heads, dim] = [rows, heads, dim].map(|number| number as u32);
        let [row_groups, head_groups, lane_groups] = shape.map(|number| number as u32);
        Ok(RawGrouped {
            values: values.raw("the values")?.base,
            row_group: self.row_group.address(),
            rows,
            heads,
            dim,
            heads_each: heads_each as u32,
            lanes_each: lanes_each as u32,
            row_groups,
            head_groups,
            lane_groups,
        })
    }

    fn holds(&self, name: &str, factors: Area) -> Result<(), KernelError> {
        hold_f32(name, factors, self.count())
    }

    /// Returns the elements of 16 bytes where vectors of them lie in one group, and otherwise 1; and the name of such a
    /// kernel.
    fn vector(&self, values: &View) -> (usize, &'static str) {
        let (each, [_, _, dim]) = (VECTOR / element_bytes(values.format()), values.shape());
        let whole = dim.is_multiple_of(each) && self.has_whole(each) && values.is_on_vectors();
        if whole { (each, "vectors") } else { (1, "elements") }
    }

    /// Returns the neighbouring threads that have all of a group in a row, where each has 16 bytes, and they are a power of
    /// two from [`IN_FLIGHT`] to a warp; otherwise `None`.
    pub fn threads_of_row(&self, values: &View) -> Option<usize> {
        let (each, vectors) = self.vector(values);
        let [_, _, dim] = values.shape();
        let lanes = if self.shape[2] == 1 { dim } else { self.lanes_each };
        let threads = lanes / each;
        let is_whole = vectors == "vectors" && self.heads_each == 1 && dim.is_multiple_of(lanes);
        (is_whole && threads.is_power_of_two() && (IN_FLIGHT..=WARP).contains(&threads)).then_some(threads)
    }

    /// Returns whether so many lanes from a multiple of them lie in one group.
    fn has_whole(&self, lanes: usize) -> bool {
        self.shape[2] == 1 || self.lanes_each.is_multiple_of(lanes)
    }
}

impl DeviceRecipe<'_> {
    fn raw(&self) -> Result<RawRecipe, KernelError> {
        let DeviceRecipe { format, scale, margin, delayed } = *self;
        let rule = match scale {
            ScaleRule::F32 => 0,
            ScaleRule::PowerOfTwo => 1,
            ScaleRule::E8m0Up => 2,
            ScaleRule::E8m0Down => 3,
        };
        if margin.abs() > MARGIN_MAX {
            return Err(KernelError::shape(format!(
                "a margin of {margin}; use −{MARGIN_MAX} to {MARGIN_MAX}"
            )));
        }
        let entries = delayed.map_or(0, |delayed| delayed.history.bytes() / 4);
        if let Some(DeviceHistory { history, next, .. }) = delayed {
            hold_f32("the history", history, entries)?;
            hold_f32("the next history", next, entries)?;
            if !(1..=HISTORY_MAX).contains(&entries) {
                let what = format!("a history of {entries} entries; use 1 to {HISTORY_MAX}");
                return Err(KernelError::shape(what));
            }
        }
        Ok(RawRecipe {
            largest: format.max_finite() as f32 * 2.0_f32.powi(-margin),
            exponent: format.exponent_max() - margin,
            rule,
            otherwise: delayed.map_or(1.0, |delayed| delayed.previous),
            history: delayed.map_or(0, |delayed| delayed.history.address()),
            next: delayed.map_or(0, |delayed| delayed.next.address()),
            entries: entries as i32,
            newest: i32::from(delayed.is_some_and(|delayed| delayed.takes == Takes::MostRecent)),
        })
    }
}

/// Refuses what does not hold so many numbers of f32.
fn hold_f32(name: &str, area: Area, count: usize) -> Result<(), KernelError> {
    hold_i32(&[(name, area)], count)
}

/// Returns whether codes of a format are of e5m2, and refuses any format but those of FP8.
fn is_e5m2(format: Format) -> Result<i32, KernelError> {
    match format {
        Format::E4m3 => Ok(0),
        Format::E5m2 => Ok(1),
        other => Err(KernelError::shape(format!("codes in {other}; use e4m3 or e5m2"))),
    }
}

/// Returns the name of a format in kernels' names.
fn format_name(format: Format) -> Result<&'static str, KernelError> {
    match format {
        Format::F32 => Ok("f32"),
        Format::Bf16 => Ok("bf16"),
        Format::Fp16 => Ok("fp16"),
        other => Err(KernelError::shape(format!("values in {other}; use f32, bf16 or fp16"))),
    }
}

/// A grid over the columns and rows of a tensor, with the rows of a tile.
fn tiles([rows, heads, dim]: [usize; 3], each: usize, asks: usize) -> ((usize, usize, usize), u32) {
    let across = heads * dim / each;
    let rows_at_once = THREADS / across.clamp(1, THREADS);
    let tile_rows = rows_at_once * IN_FLIGHT * asks;
    let columns = if rows == 0 { 0 } else { blocks(across, THREADS) };
    ((blocks(rows, tile_rows), columns, THREADS), tile_rows as u32)
}

/// The launches of this module. Values are f32, bf16 or fp16, and tensors lie in one stretch.
pub trait QuantiseKernels: Launch {
    /// Raises magnitudes to the largest of each group. They must be zero before the first tensor of a group.
    fn largest(&self, values: &View, groups: &GroupTable, amax: Area) -> Result<(), KernelError> {
        let raw = groups.raw(values)?;
        groups.holds("amax", amax)?;
        check_apart(&[("amax", amax)], &[values.named("the values"), ("the row groups", groups.row_group)])?;
        let (each, vectors) = groups.vector(values);
        let name = format!("largest_{}_{vectors}", format_name(values.format())?);
        let (grid, tile_rows) = tiles(values.shape(), each, ASKS);
        self.launch(&name, grid, &[&raw, &amax.address(), &tile_rows])
    }

    /// Raises magnitudes to those of another rank where these are larger.
    fn take_larger(&self, amax: Area, other: Area) -> Result<(), KernelError> {
        let count = other.bytes() / 4;
        hold_f32("amax", amax, count)?;
        hold_f32("amax of another rank", other, count)?;
        check_apart(&[("amax", amax)], &[("amax of another rank", other)])?;
        let grid = (blocks(count, THREADS), 1, THREADS);
        self.launch("larger_magnitudes", grid, &[&amax.address(), &other.address(), &(count as u32)])
    }

    /// Makes the scales and descales of magnitudes, and the next history of a delayed recipe.
    fn factors(
        &self,
        recipe: &DeviceRecipe,
        amax: Area,
        scale: Area,
        descale: Area,
    ) -> Result<(), KernelError> {
        let (raw, count) = (recipe.raw()?, amax.bytes() / 4);
        [("amax", amax), ("scale", scale), ("descale", descale)]
            .into_iter()
            .try_for_each(|(name, area)| hold_f32(name, area, count))?;
        let (mut written, mut read) = (vec![("scale", scale), ("descale", descale)], vec![("amax", amax)]);
        if let Some(DeviceHistory { history, next, .. }) = recipe.delayed {
            if count != 1 {
                return Err(KernelError::shape(format!("{count} groups; a delayed recipe has one")));
            }
            written.push(("the next history", next));
            read.push(("the history", history));
        }
        check_apart(&written, &read)?;
        let grid = (blocks(count, THREADS), 1, THREADS);
        let addresses = [amax, scale, descale].map(|area| area.address());
        let [amax, scale, descale] = &addresses;
        self.launch("factors_of_magnitudes", grid, &[&raw, amax, scale, descale, &(count as u32)])
    }

    /// Writes the codes of all rows; those of rows that are not real are 0.
    fn encode(
        &self,
        values: &View,
        groups: &GroupTable,
        scale: Area,
        codes: &View,
    ) -> Result<(), KernelError> {
        let raw = groups.raw(values)?;
        let e5m2 = check_codes(values, groups, scale, codes)?;
        let (each, vectors) = match codes.is_on_vectors() {
            true => groups.vector(values),
            false => (1, "elements"),
        };
        let name = format!("encode_{}_{vectors}", format_name(values.format())?);
        let (grid, tile_rows) = tiles(values.shape(), each, 1);
        let codes = codes.named("the codes").1.address();
        self.launch(&name, grid, &[&raw, &scale.address(), &codes, &tile_rows, &e5m2])
    }

    /// Writes magnitudes, scales and descales at once, and the codes where `codes` has room for them: from a multiple of
    /// 16 bytes on. Each row group has one row, and [`GroupTable::threads_of_row`] knows its threads. A table that gives a
    /// group two rows makes wrong factors, never an access outside. The factors of a group that has no row stay as they
    /// are, and codes of rows that are not real are 0. A delayed recipe is refused.
    fn encode_rows(
        &self,
        values: &View,
        groups: &GroupTable,
        recipe: &DeviceRecipe,
        factors: [Area; 3],
        codes: Option<&View>,
    ) -> Result<(), KernelError> {
        let (raw, [amax, scale, descale]) = (groups.raw(values)?, factors);
        let e5m2 = codes_beside(recipe.format, values, groups, scale, codes)?;
        let Some(together) = groups.threads_of_row(values) else {
            let what = "values that are read once need groups of 4 to 32 vectors of 16 bytes in a row, a power of two";
            return Err(KernelError::shape(what));
        };
        if recipe.delayed.is_some() {
            return Err(KernelError::shape("a delayed recipe for values that are read once"));
        }
        let named = [("amax", amax), ("scale", scale), ("descale", descale)];
        named.into_iter().try_for_each(|(name, area)| groups.holds(name, area))?;
        let codes = codes.map(|codes| codes.named("the codes"));
        codes.map_or(Ok(()), |(name, area)| on_bytes(name, area.address(), VECTOR))?;
        let written: Vec<_> = named.into_iter().chain(codes).collect();
        check_apart(&written, &[values.named("the values"), ("the row groups", groups.row_group)])?;
        let (grid, tile_rows) = tiles(values.shape(), VECTOR / element_bytes(values.format()), 1);
        let to = RawFactors(factors.map(|area| area.address()));
        let (codes, together) = (codes.map_or(0, |(_, area)| area.address()), together as u32);
        let name = format!("encode_rows_{}", format_name(values.format())?);
        self.launch(&name, grid, &[&raw, &recipe.raw()?, &to, &codes, &tile_rows, &together, &e5m2])
    }

    /// Writes the turned copy of the codes ([`TurnedShape`]), and the codes in rows too where `rows` has room for them.
    /// Head dims and groups of lanes are multiples of 16, and all tensors begin on 16 bytes.
    fn encode_turned(
        &self,
        values: &View,
        groups: &GroupTable,
        scale: Area,
        (format, turned): (Format, Area),
        rows: Option<&View>,
    ) -> Result<(), KernelError> {
        let raw = groups.raw(values)?;
        let e5m2 = codes_beside(format, values, groups, scale, rows)?;
        groups.holds("scale", scale)?;
        let to = RawTurned::new(values.shape(), turned)?;
        if !groups.has_whole(VECTOR) {
            let what =
                format!("groups of {} lanes in a turned copy; use a multiple of {VECTOR}", groups.lanes_each);
            return Err(KernelError::shape(what));
        }
        let in_rows = rows.map(|codes| codes.named("the codes"));
        for (name, area) in [values.named("the values")].into_iter().chain(in_rows) {
            on_bytes(name, area.address(), VECTOR)?;
        }
        let written: Vec<_> = [("the turned copy", turned)].into_iter().chain(in_rows).collect();
        let read = [values.named("the values"), ("scale", scale), ("the row groups", groups.row_group)];
        check_apart(&written, &read)?;
        let codes = in_rows.map_or(0, |(_, area)| area.address());
        let name = format!("encode_turned_{}", format_name(values.format())?);
        let grid = TurnedShape::of(values.shape()).grid();
        self.launch(&name, grid, &[&to, &raw, &scale.address(), &codes, &e5m2])
    }
}

impl<L: Launch + ?Sized> QuantiseKernels for L {}

/// Returns whether a format is e5m2, and refuses codes in rows that are of another one.
fn codes_beside(
    format: Format,
    values: &View,
    groups: &GroupTable,
    scale: Area,
    codes: Option<&View>,
) -> Result<i32, KernelError> {
    match codes {
        Some(codes) if codes.format() != format => {
            Err(KernelError::shape(format!("codes in {} beside {format}", codes.format())))
        }
        Some(codes) => check_codes(values, groups, scale, codes),
        None => is_e5m2(format),
    }
}

/// Refuses codes of another shape than the values, and memory that is written where it is read.
fn check_codes(values: &View, groups: &GroupTable, scale: Area, codes: &View) -> Result<i32, KernelError> {
    let e5m2 = is_e5m2(codes.format())?;
    groups.holds("scale", scale)?;
    codes.check("the codes")?;
    if codes.shape() != values.shape() {
        let what = format!("codes of {:?} for values of {:?}", codes.shape(), values.shape());
        return Err(KernelError::shape(what));
    }
    let read = [values.named("the values"), ("scale", scale), ("the row groups", groups.row_group)];
    check_apart(&[codes.named("the codes")], &read)?;
    Ok(e5m2)
}
