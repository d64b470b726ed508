//! Cases of merges, gradients and statistics.

use seamproof_kernels::merge::{DeviceStatistic, DeviceTensor};
use seamproof_kernels::{Gpu, KernelError, MergeKernels};
use seamproof_oracle::{Format, Run};
use seamproof_simulator::helpers::{self, Half, Numbers, SlotPart, Statistic, Style, Update, half_rows};

use super::draw::CaseDraw;
use super::image::{Field, Image, ImageLaunch, PlacedImage, SlotFields};

/// The heads and the elements of a head: elements that fit a vector, others that do not, and more heads than a tile.
pub(super) const SHAPES: [(usize, usize); 9] =
    [(1, 8), (2, 64), (3, 16), (16, 64), (1, 1), (5, 3), (2, 72), (1100, 2), (7, 128)];
/// The formats of running tensors and of steps.
const FORMATS: [(Format, Format); 5] = [
    (Format::F32, Format::F32),
    (Format::F32, Format::Bf16),
    (Format::F32, Format::Fp16),
    (Format::Bf16, Format::Bf16),
    (Format::Fp16, Format::Fp16),
];
/// The most elements of a tensor.
const ELEMENTS_MAX: usize = 1 << 17;

impl CaseDraw {
    /// Returns a number of a format: a plain or tiny one, or a zero of either sign.
    fn number(&mut self, format: Format) -> f32 {
        let plain = self.bits() as i32 as f32 / 1e6_f32;
        let value = match self.below(16) {
            0 => 0.0,
            1 => -0.0,
            2 => plain * 1e-6,
            3 => plain * 1e-30,
            _ => plain * 1e-2,
        };
        format.round_f32(value)
    }

    /// Returns a statistic's number: −∞ now and then, near ones, far ones.
    fn logarithm(&mut self) -> f32 {
        match self.below(8) {
            0 => f32::NEG_INFINITY,
            1 => (self.below(81) as f32) - 40.0,
            2 => 3.0 + self.below(1000) as f32 * 1e-7,
            _ => self.bits() as i32 as f32 / 1e8,
        }
    }

    fn part(&mut self) -> SlotPart {
        let half = self.pick(&[Half::First, Half::Second]);
        let part = self.pick(&[SlotPart::Whole, SlotPart::HalfInPlace(half), SlotPart::Compact(half)]);
        self.note(&format!("{part:?}"));
        part
    }

    fn small(&mut self) -> (Vec<Run>, usize) {
        let unit = self.pick(&[2, 2, 4, 6]);
        self.runs(unit, 1500)
    }

    /// Returns small slots, or slots of which a half has all rows of some warps, in a tensor that is read four rows
    /// at a time.
    fn small_or_long(&mut self) -> (Vec<Run>, usize) {
        if self.one_in(2) {
            return self.small();
        }
        let (runs, rows) = self.runs(72, 8192);
        (runs, rows.next_multiple_of(8))
    }

    /// Returns random numbers where `rows` say, and poison elsewhere.
    fn numbers(
        &mut self,
        rows: &[usize],
        total: usize,
        like: (usize, usize, Format),
        poison: f32,
    ) -> Numbers {
        let (heads, dim, format) = like;
        let mut values = vec![poison; total * heads * dim];
        for &row in rows {
            for value in &mut values[row * heads * dim..(row + 1) * heads * dim] {
                *value = self.number(format);
            }
        }
        Numbers { heads, dim, format, values }
    }

    fn statistic(&mut self, rows: &[usize], total: usize, heads: usize, poison: f32) -> Statistic {
        let mut values = vec![poison; total * heads];
        for head in 0..heads {
            for &row in rows {
                values[head * total + row] = self.logarithm();
            }
        }
        Statistic { rows: total, values }
    }
}

/// Returns the poison as a number of a format. Its bytes are the poison's: untouched elements come back unchanged.
fn poison_of(image: &Image, format: Format) -> f32 {
    match format {
        Format::F32 => f32::from_le_bytes([image.poison; 4]),
        _ => format.decode(u32::from(u16::from_le_bytes([image.poison; 2]))) as f32,
    }
}

/// Returns the bytes of numbers. Only poison is NaN, and is stored as the poison's bytes.
fn bytes_of(values: &[f32], format: Format, poison: u8) -> Vec<u8> {
    let bytes = |&value: &f32| match format {
        _ if value.is_nan() => vec![poison; format.bits() as usize / 8],
        Format::F32 => value.to_le_bytes().to_vec(),
        _ => (format.encode(f64::from(value)) as u16).to_le_bytes().to_vec(),
    };
    values.iter().flat_map(bytes).collect()
}

/// A tensor in an image.
#[derive(Clone, Copy)]
struct TensorField {
    field: Field,
    rows: usize,
    heads: usize,
    dim: usize,
    format: Format,
}

impl TensorField {
    fn tensor<'a>(&self, place: &PlacedImage<'a>) -> Result<DeviceTensor<'a>, KernelError> {
        let TensorField { field, rows, heads, dim, format } = *self;
        Ok(DeviceTensor { area: place.of(field)?, rows, heads, dim, format })
    }

    fn statistic<'a>(&self, place: &PlacedImage<'a>) -> Result<DeviceStatistic<'a>, KernelError> {
        Ok(DeviceStatistic { area: place.of(self.field)?, heads: self.heads, rows: self.rows })
    }
}

fn put_numbers(
    image: &mut Image,
    name: &'static str,
    skew: usize,
    [before, after]: [&Numbers; 2],
    rows: usize,
) -> TensorField {
    let Numbers { heads, dim, format, .. } = *before;
    let bytes = |numbers: &Numbers| bytes_of(&numbers.values, format, image.poison);
    let (before, after) = (bytes(before), bytes(after));
    TensorField { field: image.output(name, skew, &before, &after), rows, heads, dim, format }
}

fn put_statistic(
    image: &mut Image,
    name: &'static str,
    [before, after]: [&Statistic; 2],
    heads: usize,
) -> TensorField {
    let bytes = |statistic: &Statistic| bytes_of(&statistic.values, Format::F32, image.poison);
    let contents = (bytes(before), bytes(after));
    let field = image.output(name, 0, &contents.0, &contents.1);
    TensorField { field, rows: before.rows, heads, dim: 1, format: Format::F32 }
}

/// A part of slots, with its row pairs.
struct PartRows {
    slots: SlotFields,
    runs: Vec<Run>,
    total: usize,
    part: SlotPart,
    pairs: Vec<(usize, usize)>,
    running: Vec<usize>,
    step: Vec<usize>,
}

fn rows(draw: &mut CaseDraw, image: &mut Image) -> PartRows {
    let (runs, total) = draw.small();
    let part = draw.part();
    let pairs = part.pairs(&runs);
    let (running, step) = pairs.iter().copied().unzip();
    PartRows { slots: image.slots(&runs, total), runs, total, part, pairs, running, step }
}

/// Returns heads, dim and formats of a case, and by how many bytes its tensors lie off the alignment.
fn shape(draw: &mut CaseDraw, total: usize) -> ((usize, usize), (Format, Format), usize) {
    let (mut heads, dim) = draw.pick(&SHAPES);
    while total * heads * dim > ELEMENTS_MAX && heads > 1 {
        heads = heads.div_ceil(4);
    }
    let formats = draw.pick(&FORMATS);
    let skew = if draw.one_in(4) { 4 } else { 0 };
    draw.note(&format!("{heads} heads of {dim}, {formats:?}, skew {skew}"));
    ((heads, dim), formats, skew)
}

pub(super) fn statistics(draw: &mut CaseDraw, image: &mut Image) -> ImageLaunch {
    let PartRows { slots, total, part, pairs, running, step, .. } = rows(draw, image);
    let heads = draw.pick(&[1, 3, 4, 9, 40]);
    let poison = poison_of(image, Format::F32);
    let before = draw.statistic(&running, total, heads, poison);
    let added = draw.statistic(&step, part.step_rows(total), heads, poison);
    let mut after = before.clone();
    helpers::merge_statistics(&pairs, &mut after, &added);
    let lse = put_statistic(image, "lse", [&before, &after], heads);
    let step = put_statistic(image, "step lse", [&added, &added], heads);
    Box::new(move |gpu: &Gpu, place: &PlacedImage| {
        gpu.merge_statistics(place.slots(gpu, slots)?, part, lse.statistic(place)?, step.statistic(place)?)
    })
}

/// Raises totals to the statistics that are part of them. Weights need totals that are no smaller than their parts.
fn totals(pairs: &[(usize, usize)], lse: &mut Statistic, step: &Statistic, heads: usize) {
    for head in 0..heads {
        for &(running, row) in pairs {
            let added = step.values[head * step.rows + row];
            let total = &mut lse.values[head * lse.rows + running];
            *total = total.max(added);
        }
    }
}

pub(super) fn merge_out(draw: &mut CaseDraw, image: &mut Image) -> ImageLaunch {
    let PartRows { slots, total, part, pairs, running, step, .. } = rows(draw, image);
    let ((heads, dim), formats, skew) = shape(draw, total);
    let rounded = draw.one_in(2);
    let style = draw.pick(&[Style::Running, Style::Weighted { product_rounded: rounded }]);
    draw.note(&format!("{style:?}"));
    let poisons = [Format::F32, formats.0, formats.1].map(|format| poison_of(image, format));
    let step_rows = part.step_rows(total);
    let out = draw.numbers(&running, total, (heads, dim, formats.0), poisons[1]);
    let mut step_out = draw.numbers(&step, step_rows, (heads, dim, formats.1), poisons[2]);
    let mut lse = draw.statistic(&running, total, heads, poisons[0]);
    let step_lse = draw.statistic(&step, step_rows, heads, poisons[0]);
    if style != Style::Running {
        totals(&pairs, &mut lse, &step_lse, heads);
    }
    // The out of an empty row may be anything.
    for (head, &row) in (0..heads).flat_map(|head| step.iter().map(move |row| (head, row))) {
        if step_lse.values[head * step_rows + row] == f32::NEG_INFINITY {
            let first = (row * heads + head) * dim;
            step_out.values[first..first + dim].fill(poisons[2]);
        }
    }
    let (mut out_after, mut lse_after) = (out.clone(), lse.clone());
    helpers::merge_out(&pairs, style, (&mut out_after, &mut lse_after), (&step_out, &step_lse));
    let out = put_numbers(image, "out", skew, [&out, &out_after], total);
    let step_out = put_numbers(image, "step out", skew, [&step_out, &step_out], step_rows);
    let lse = put_statistic(image, "lse", [&lse, &lse_after], heads);
    let step_lse = put_statistic(image, "step lse", [&step_lse, &step_lse], heads);
    Box::new(move |gpu: &Gpu, place: &PlacedImage| {
        let running = (out.tensor(place)?, lse.statistic(place)?);
        let step = (step_out.tensor(place)?, step_lse.statistic(place)?);
        gpu.merge_out(place.slots(gpu, slots)?, (part, style), running, step)
    })
}

pub(super) fn accumulate(draw: &mut CaseDraw, image: &mut Image) -> ImageLaunch {
    let PartRows { slots, runs, total, part, running, step, .. } = rows(draw, image);
    let ((heads, dim), formats, skew) = shape(draw, total);
    let updates = [(); 2].map(|()| draw.pick(&[Update::Leave, Update::Copy, Update::Add, Update::Add]));
    draw.note(&format!("{updates:?}"));
    let poisons = [formats.0, formats.1].map(|format| poison_of(image, format));
    let step_rows = part.step_rows(total);
    let before = draw.numbers(&running, total, (heads, dim, formats.0), poisons[0]);
    let added = draw.numbers(&step, step_rows, (heads, dim, formats.1), poisons[1]);
    let mut after = before.clone();
    helpers::accumulate(&runs, part, updates, &mut after, &added);
    let sum = put_numbers(image, "sum", skew, [&before, &after], total);
    let step = put_numbers(image, "step", skew, [&added, &added], step_rows);
    Box::new(move |gpu: &Gpu, place: &PlacedImage| {
        gpu.accumulate(place.slots(gpu, slots)?, part, updates, sum.tensor(place)?, step.tensor(place)?)
    })
}

pub(super) fn half_statistic(draw: &mut CaseDraw, image: &mut Image) -> ImageLaunch {
    let (runs, total) = draw.small_or_long();
    let slots = image.slots(&runs, total);
    let (heads, half) = (draw.pick(&[1, 3, 4, 9]), draw.pick(&[Half::First, Half::Second]));
    let (write, rest) = (draw.one_in(2), draw.one_in(2).then_some(f32::NEG_INFINITY));
    draw.note(&format!("{heads} heads, {half:?}, write {write}, rest {rest:?}"));
    let pairs = helpers::half_pairs(&runs, half);
    let (rows, halves): (Vec<usize>, Vec<usize>) = pairs.iter().copied().unzip();
    let poison = poison_of(image, Format::F32);
    let read = if write { &halves } else { &rows };
    let totals = [total, half_rows(total)];
    let from = draw.statistic(read, totals[usize::from(write)], heads, poison);
    let to_rows = totals[usize::from(!write)];
    let before = Statistic { rows: to_rows, values: vec![poison; to_rows * heads] };
    let filled = if write { poison } else { rest.unwrap_or(poison) };
    let mut after = Statistic { rows: to_rows, values: vec![filled; to_rows * heads] };
    for (head, (row, half_row)) in (0..heads).flat_map(|head| pairs.iter().map(move |pair| (head, *pair))) {
        let (source, target) = if write { (half_row, row) } else { (row, half_row) };
        after.values[head * to_rows + target] = from.values[head * from.rows + source];
    }
    // Only rows that a slot owns are free of poison. Where the rest of a half is filled, there is no poison either.
    let from = put_statistic(image, "from", [&from, &from], heads);
    let to = put_statistic(image, "to", [&before, &after], heads);
    Box::new(move |gpu: &Gpu, place: &PlacedImage| {
        let (slots, from, to) = (place.slots(gpu, slots)?, from.statistic(place)?, to.statistic(place)?);
        if write {
            gpu.write_half_statistic(slots, half, from, to)
        } else {
            gpu.read_half_statistic(slots, half, from, to, rest)
        }
    })
}

pub(super) fn max_logit(draw: &mut CaseDraw, image: &mut Image) -> ImageLaunch {
    let (runs, total) = draw.runs(1, 8192);
    let slots = image.slots(&runs, total);
    let (heads, fresh) = (draw.pick(&[1, 3, 8, 13]), draw.one_in(2));
    let real: Vec<usize> = runs.iter().flat_map(Run::real_rows).collect();
    let poison = poison_of(image, Format::F32);
    let mut rows_max = draw.statistic(&real, total, heads, poison);
    if draw.one_in(3) {
        // Statistics are zeros of both signs.
        let real = rows_max.values.iter_mut().filter(|value| value.to_bits() != poison.to_bits());
        real.for_each(|value| *value = if *value > 0.0 { 0.0 } else { -0.0 });
    }
    let before: Vec<f32> =
        if fresh { vec![poison; heads] } else { (0..heads).map(|_| draw.logarithm()).collect() };
    let mut largest = helpers::max_logit(&runs, &rows_max);
    largest.resize(heads, f32::NEG_INFINITY);
    let larger = |(&new, &old): (&f32, &f32)| {
        if fresh || new.total_cmp(&old).is_gt() { new } else { old }
    };
    let after: Vec<f32> = largest.iter().zip(&before).map(larger).collect();
    let rows_max = put_statistic(image, "row maxima", [&rows_max, &rows_max], heads);
    let bytes = |values: &[f32]| bytes_of(values, Format::F32, image.poison);
    let (before, after) = (bytes(&before), bytes(&after));
    let largest = image.output("largest", 0, &before, &after);
    Box::new(move |gpu: &Gpu, place: &PlacedImage| {
        gpu.max_logit(place.slots(gpu, slots)?, rows_max.statistic(place)?, place.of(largest)?, fresh)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The half rows of a warp that has four rows a lane, and the rows of a line of memory.
    const WARP_ROWS: usize = 128;
    const LINE_ROWS: usize = 32;

    /// Returns the first rows of whole warps whose half rows are one piece of a half, on 16 bytes.
    fn pieces(runs: &[Run], half: usize) -> Vec<usize> {
        let of_run = |run: &Run| {
            let (offset, first, chunk) = (run.offset, run.offset / 2, run.span / 2);
            let begins = (first.next_multiple_of(WARP_ROWS)..first + chunk).step_by(WARP_ROWS);
            let whole = begins.filter(move |begin| begin + WARP_ROWS <= first + chunk);
            whole.map(move |begin| offset + half * chunk + begin - first).filter(|row| row % 4 == 0)
        };
        runs.iter().flat_map(of_run).collect()
    }

    /// Half statistics have warps of one piece. They lie in one place of a line of memory on one side, and in another
    /// on the other.
    #[test]
    fn half_statistics_have_warps_of_one_piece() {
        let (mut of_one_piece, mut turned) = (0, 0);
        for case in 0..100 {
            let (runs, rows) = CaseDraw::new(2, case).small_or_long();
            let pieces =
                if rows % 8 == 0 { [pieces(&runs, 0), pieces(&runs, 1)].concat() } else { Vec::new() };
            of_one_piece += usize::from(!pieces.is_empty());
            turned += usize::from(pieces.iter().any(|row| row % LINE_ROWS != 0));
        }
        assert!(of_one_piece > 20 && turned > 20, "too little is drawn: {of_one_piece}, {turned}");
    }
}
