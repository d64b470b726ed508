//! Cases of rows moved whole.

use seamproof_kernels::rows::ByteRows;
use seamproof_kernels::{Gpu, KernelError, RowKernels};
use seamproof_oracle::Run;
use seamproof_simulator::helpers::{self, BatchLayout, Direction, Half, Rest};

use super::draw::CaseDraw;
use super::image::{Field, Image, ImageLaunch, PlacedImage, SlotFields, random_bytes};

/// The bytes of rows: of one element up to many heads, and odd ones.
const ROW_BYTES: [usize; 14] = [1, 2, 3, 4, 6, 8, 16, 24, 32, 80, 128, 256, 1040, 4112];
/// The most bytes of a tensor. With more, copying them would take the rest of a case's time.
const TENSOR_BYTES: usize = 1 << 20;

/// The bytes of a row in a case, and by how many bytes both tensors lie off the alignment.
struct Width {
    row_bytes: usize,
    skews: [usize; 2],
}

impl CaseDraw {
    fn width(&mut self, rows: usize) -> Width {
        let mut row_bytes = self.pick(&ROW_BYTES);
        if rows * row_bytes > TENSOR_BYTES {
            row_bytes = self.pick(&[1, 2, 16]);
        }
        let skews = if self.one_in(3) { [0, 0].map(|_: usize| self.below(17)) } else { [0, 0] };
        self.note(&format!("rows of {row_bytes} bytes, skews {skews:?}"));
        Width { row_bytes, skews }
    }

    fn rest(&mut self) -> Rest {
        let byte = self.pick(&[0, 0, 0xff, 0x5a]);
        let rest = self.pick(&[Rest::Leave, Rest::Fill(byte)]);
        self.note(&format!("{rest:?}"));
        rest
    }

    fn half(&mut self) -> Half {
        let half = self.pick(&[Half::First, Half::Second]);
        self.note(&format!("{half:?}"));
        half
    }
}

/// Returns rows that are random where they are read, and poison elsewhere.
fn source(
    draw: &mut CaseDraw,
    image: &Image,
    pairs: &[(usize, usize)],
    rows: usize,
    row_bytes: usize,
) -> Vec<u8> {
    let mut bytes = image.poisoned(rows * row_bytes);
    for &(row, _) in pairs {
        bytes[row * row_bytes..(row + 1) * row_bytes].copy_from_slice(&random_bytes(draw, row_bytes));
    }
    bytes
}

/// Returns the source and the target of a case. The target holds what the twin leaves.
fn tensors(
    draw: &mut CaseDraw,
    image: &mut Image,
    pairs: &[(usize, usize)],
    [from_rows, to_rows]: [usize; 2],
    rest: Rest,
) -> [(Field, usize, usize); 2] {
    let Width { row_bytes, skews } = draw.width(from_rows.max(to_rows));
    let from = source(draw, image, pairs, from_rows, row_bytes);
    let before = image.poisoned(to_rows * row_bytes);
    let mut after = before.clone();
    helpers::move_rows(pairs, &from, &mut after, row_bytes, rest);
    let from = image.input("from", skews[0], &from);
    let to = image.output("to", skews[1], &before, &after);
    [(from, from_rows, row_bytes), (to, to_rows, row_bytes)]
}

fn rows<'a>(
    place: &PlacedImage<'a>,
    (field, rows, row_bytes): (Field, usize, usize),
) -> Result<ByteRows<'a>, KernelError> {
    Ok(ByteRows { area: place.of(field)?, rows, row_bytes })
}

/// Returns whole slots, for operations that know no ranks.
fn plain(draw: &mut CaseDraw, image: &mut Image) -> (Vec<Run>, usize, SlotFields) {
    let unit = draw.pick(&[1, 2, 2, 4, 16]);
    let (runs, total) = draw.runs(unit, 8192);
    let fields = image.slots(&runs, total);
    (runs, total, fields)
}

pub(super) fn reorder(draw: &mut CaseDraw, image: &mut Image) -> ImageLaunch {
    let cut = draw.cut();
    let shard = draw.shard(cut);
    let runs: Vec<Run> = shard.slots.iter().map(|slot| Run::packed(slot.offset, 0, slot.span)).collect();
    let slots = image.slots(&runs, shard.rows);
    let order = draw.pick(&[Direction::ToRanks, Direction::ToSequences]);
    draw.note(&format!("{order:?}"));
    let there = helpers::rank_order(&shard).into_iter().enumerate();
    let pairs: Vec<_> = match order {
        Direction::ToSequences => there.collect(),
        Direction::ToRanks => there.map(|(row, there)| (there, row)).collect(),
    };
    let rows_all = shard.rows * shard.cp;
    let [from, to] = tensors(draw, image, &pairs, [rows_all, rows_all], Rest::Leave);
    Box::new(move |gpu: &Gpu, place: &PlacedImage| {
        gpu.reorder(place.slots(gpu, slots)?, cut, order, rows(place, from)?, rows(place, to)?)
    })
}

pub(super) fn copy_valid(draw: &mut CaseDraw, image: &mut Image) -> ImageLaunch {
    let (runs, total, slots) = plain(draw, image);
    let rest = draw.rest();
    let pairs: Vec<_> = runs.iter().flat_map(Run::real_rows).map(|row| (row, row)).collect();
    let [from, to] = tensors(draw, image, &pairs, [total, total], rest);
    Box::new(move |gpu: &Gpu, place: &PlacedImage| {
        gpu.copy_valid(place.slots(gpu, slots)?, rows(place, from)?, rows(place, to)?, rest)
    })
}

pub(super) fn convert(draw: &mut CaseDraw, image: &mut Image) -> ImageLaunch {
    let (runs, total, slots) = plain(draw, image);
    let longest = runs.iter().map(|run| run.len).max().unwrap_or(0);
    // Some batches have no room for the longest sequence.
    let positions = draw.pick(&[longest, longest, longest + 3, longest / 2]);
    let layouts = [draw.pick(&BatchLayout::ALL), draw.pick(&BatchLayout::ALL)];
    let rest = draw.rest();
    draw.note(&format!("{layouts:?}, {positions} positions"));
    let pairs = helpers::converted_pairs(&runs, positions, layouts);
    let sizes = layouts.map(|layout| match layout {
        BatchLayout::Thd => total,
        BatchLayout::Bshd | BatchLayout::Sbhd => runs.len() * positions,
    });
    let [from, to] = tensors(draw, image, &pairs, sizes, rest);
    Box::new(move |gpu: &Gpu, place: &PlacedImage| {
        let tensors = [rows(place, from)?, rows(place, to)?];
        gpu.convert(place.slots(gpu, slots)?, positions, layouts, tensors, rest)
    })
}

pub(super) fn fill_padding(draw: &mut CaseDraw, image: &mut Image) -> ImageLaunch {
    let (runs, total, slots) = plain(draw, image);
    let Width { row_bytes, skews } = draw.width(total);
    let byte = draw.pick(&[0, 0xff, 0x5a]);
    let before = random_bytes(draw, total * row_bytes);
    let mut after = before.clone();
    helpers::fill_padding(&runs, &mut after, row_bytes, byte);
    let to = (image.output("to", skews[0], &before, &after), total, row_bytes);
    Box::new(move |gpu: &Gpu, place: &PlacedImage| {
        gpu.fill_padding(place.slots(gpu, slots)?, rows(place, to)?, byte)
    })
}

pub(super) fn read_half(draw: &mut CaseDraw, image: &mut Image) -> ImageLaunch {
    let (runs, total, slots) = plain(draw, image);
    let (half, rest) = (draw.half(), draw.rest());
    let pairs = helpers::half_pairs(&runs, half);
    let [from, to] = tensors(draw, image, &pairs, [total, helpers::half_rows(total)], rest);
    Box::new(move |gpu: &Gpu, place: &PlacedImage| {
        gpu.read_half(place.slots(gpu, slots)?, half, rows(place, from)?, rows(place, to)?, rest)
    })
}

pub(super) fn write_half(draw: &mut CaseDraw, image: &mut Image) -> ImageLaunch {
    let (runs, total, slots) = plain(draw, image);
    let half = draw.half();
    let pairs: Vec<_> = helpers::half_pairs(&runs, half).into_iter().map(|(row, half)| (half, row)).collect();
    let [from, to] = tensors(draw, image, &pairs, [helpers::half_rows(total), total], Rest::Leave);
    Box::new(move |gpu: &Gpu, place: &PlacedImage| {
        gpu.write_half(place.slots(gpu, slots)?, half, rows(place, from)?, rows(place, to)?)
    })
}

pub(super) fn valid_mask(draw: &mut CaseDraw, image: &mut Image) -> ImageLaunch {
    let (runs, total, slots) = plain(draw, image);
    let after: Vec<u8> = helpers::valid_mask(&runs, total).into_iter().map(u8::from).collect();
    let (skew, before) = (draw.pick(&[0, 0, 1, 7]), image.poisoned(total));
    let mask = image.output("mask", skew, &before, &after);
    Box::new(move |gpu: &Gpu, place: &PlacedImage| gpu.valid_mask(place.slots(gpu, slots)?, place.of(mask)?))
}
