//! Cases of sequence-parallel regions: the layer that copies heads, and rotations.

use seamproof_kernels::merge::DeviceTensor;
use seamproof_kernels::region::{HeadPart, RotationTable};
use seamproof_kernels::rows::ByteRows;
use seamproof_kernels::{Gpu, RegionKernels};
use seamproof_oracle::{Format, Run};
use seamproof_simulator::helpers;
use seamproof_simulator::schedule::{Layer, Rotated};

use super::draw::CaseDraw;
use super::elements::SHAPES;
use super::image::{Image, ImageLaunch, PlacedImage, random_bytes};

/// The bytes of a rank's heads: of one element up to more than a bulk copy moves at once.
const ROW_BYTES: [usize; 9] = [1, 2, 6, 16, 24, 80, 128, 1040, 24592];
/// The most bytes of a hidden tensor, and the most elements of a rotated one.
const HIDDEN_BYTES: usize = 1 << 20;
const ELEMENTS_MAX: usize = 1 << 17;

pub(super) fn layer(draw: &mut CaseDraw, image: &mut Image) -> ImageLaunch {
    let (row_bytes, count) = (draw.pick(&ROW_BYTES), draw.pick(&[1, 2, 3, 4, 8]));
    let of = HeadPart { index: draw.below(count), count };
    let rows = draw.below(700.min(HIDDEN_BYTES / (count * row_bytes)) + 1);
    let skews = if draw.one_in(3) { [0, 0].map(|_: usize| draw.below(17)) } else { [0, 0] };
    let kind = draw.pick(&[Layer::Column, Layer::Row]);
    draw.note(&format!("{kind:?}, {rows} rows of {row_bytes} bytes, {of:?}, skews {skews:?}"));
    let [read, written] = match kind {
        Layer::Column => [rows * count, rows],
        Layer::Row => [rows, rows * count],
    };
    let from = random_bytes(draw, read * row_bytes);
    let before = image.poisoned(written * row_bytes);
    let mut after = before.clone();
    helpers::layer(kind, (of.index, count), &from, &mut after, row_bytes);
    let from = image.input("from", skews[0], &from);
    let to = image.output("to", skews[1], &before, &after);
    Box::new(move |gpu: &Gpu, place: &PlacedImage| {
        let from = ByteRows { area: place.of(from)?, rows: read, row_bytes };
        gpu.layer(kind, of, from, ByteRows { area: place.of(to)?, rows: written, row_bytes })
    })
}

impl CaseDraw {
    fn position(&mut self) -> usize {
        let end = if self.one_in(8) { 1 << 30 } else { 600 };
        self.below(end)
    }

    /// Returns rows of several sequences with their positions, and the rows of their tensor: sequences one after the
    /// other, each in one or two pieces, or side by side.
    fn rotated(&mut self) -> (Vec<Rotated>, usize) {
        let (mut rows, mut total) = (Vec::new(), 0);
        if self.one_in(4) {
            let (beside, len) = (1 + self.below(7), self.below(40));
            rows.extend((0..beside).map(|offset| Run { offset, step: beside, len, span: len }));
            total += beside * len + self.below(3);
        } else {
            let (runs, end) = self.runs(2, 2048);
            let pieces = self.pick(&[1, 2]);
            for (run, piece) in runs.iter().flat_map(|run| (0..pieces).map(move |piece| (run, piece))) {
                let len = run.span / pieces;
                rows.push(Run::packed(run.offset + piece * len, len, len));
            }
            total += end;
        }
        let step = self.pick(&[1, 1, 2, 8]);
        (rows.into_iter().map(|rows| Rotated { rows, position: self.position(), step }).collect(), total)
    }
}

pub(super) fn rotate(draw: &mut CaseDraw, image: &mut Image) -> ImageLaunch {
    let (rotated, rows) = draw.rotated();
    let (mut heads, dim) = draw.pick(&SHAPES);
    while rows * heads * dim > ELEMENTS_MAX && heads > 1 {
        heads = heads.div_ceil(4);
    }
    let format = draw.pick(&[Format::Bf16, Format::Fp16, Format::F32, Format::E4m3]);
    let bytes = format.bits() as usize / 8;
    let skew = if draw.one_in(4) { bytes } else { 0 };
    let inverse = draw.one_in(2);
    draw.note(&format!("{} turns, {rows} rows of {heads} heads of {dim}, {format}", rotated.len()));
    let before = random_bytes(draw, rows * heads * dim * bytes);
    let mut after = before.clone();
    helpers::rotate(&rotated, inverse, [heads, dim, bytes], &mut after);
    let table = RotationTable::new(&rotated);
    let turns = image.input("turns", 0, table.bytes());
    let to = image.output("to", skew, &before, &after);
    Box::new(move |gpu: &Gpu, place: &PlacedImage| {
        let to = DeviceTensor { area: place.of(to)?, rows, heads, dim, format };
        gpu.rotate(&table, place.of(turns)?, inverse, to)
    })
}
