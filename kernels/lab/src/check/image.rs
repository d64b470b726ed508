//! The memory of one launch, as it is before and as it must be after.

use std::ops::Range;

use seamproof_kernels::memory::Area;
use seamproof_kernels::tables::{Slots, WideSlots};
use seamproof_kernels::{Gpu, KernelError, TableKernels};
use seamproof_oracle::Run;
use seamproof_simulator::helpers;

use super::draw::CaseDraw;

/// The least bytes of a guard band.
const GUARD_BYTES: usize = 96;
/// The guards at even and odd words: −0.0, which adding zero turns into +0.0, and a signalling NaN, which any
/// arithmetic makes quiet.
const GUARD: [u32; 2] = [0x8000_0000, 0x7fa5_5a11];
/// The alignment of fields before a skew is added.
const ALIGNMENT: usize = 64;

/// A tensor or table in an image.
#[derive(Clone, Copy, Debug)]
pub(super) struct Field(usize);

/// The memory of a launch.
pub(super) struct Image {
    pub(super) before: Vec<u8>,
    pub(super) after: Vec<u8>,
    pub(super) fields: Vec<(&'static str, Range<usize>)>,
    pub(super) poison: u8,
    /// Whether tables of slots are of i64, which the launch narrows first.
    pub(super) wide: bool,
}

impl Image {
    pub(super) fn new(poison: u8) -> Image {
        Image { before: Vec::new(), after: Vec::new(), fields: Vec::new(), poison, wide: false }
    }

    /// Adds guards up to the next place for a field, `skew` bytes off the alignment.
    fn guard(&mut self, skew: usize) {
        let start = self.before.len();
        let end = (start + GUARD_BYTES).next_multiple_of(ALIGNMENT) + skew;
        let band = (start..end).map(|place| GUARD[place / 4 % 2].to_le_bytes()[place % 4]);
        self.before.extend(band);
        self.after.extend_from_slice(&self.before[start..end]);
    }

    /// Adds a field that the launch must turn from one content into another.
    pub(super) fn output(&mut self, name: &'static str, skew: usize, before: &[u8], after: &[u8]) -> Field {
        debug_assert_eq!(before.len(), after.len());
        self.guard(skew);
        let start = self.before.len();
        self.before.extend_from_slice(before);
        self.after.extend_from_slice(after);
        self.fields.push((name, start..start + before.len()));
        Field(self.fields.len() - 1)
    }

    /// Adds a field that the launch may not change.
    pub(super) fn input(&mut self, name: &'static str, skew: usize, contents: &[u8]) -> Field {
        self.output(name, skew, contents, contents)
    }

    pub(super) fn table(&mut self, name: &'static str, numbers: impl Iterator<Item = usize>) -> Field {
        let bytes: Vec<u8> = numbers.flat_map(|number| (number as i32).to_le_bytes()).collect();
        self.input(name, 0, &bytes)
    }

    /// Adds the tables of slots.
    pub(super) fn slots(&mut self, runs: &[Run], rows: usize) -> SlotFields {
        let columns: [fn(&Run) -> usize; 3] = [|run| run.offset, |run| run.span, |run| run.len];
        let names = ["offset", "span", "len"];
        let count = runs.len();
        if !self.wide {
            let of = |index: usize| (names[index], runs.iter().map(columns[index]));
            let tables = [0, 1, 2].map(of).map(|(name, numbers)| self.table(name, numbers));
            return SlotFields { tables, room: None, count, rows };
        }
        let numbers = columns.map(|of| runs.iter().map(|run| of(run) as i64).collect::<Vec<i64>>());
        let (tables, room) = self.wide_tables(numbers.each_ref().map(Vec::as_slice));
        SlotFields { tables, room: Some(room), count, rows }
    }

    /// Adds three tables of i64, and the place to which they are narrowed.
    pub(super) fn wide_tables(&mut self, numbers: [&[i64]; 3]) -> ([Field; 3], Field) {
        let names = ["wide offset", "wide span", "wide len"];
        let bytes = |numbers: &[i64]| -> Vec<u8> { numbers.iter().flat_map(|n| n.to_le_bytes()).collect() };
        let tables = [0, 1, 2].map(|index| self.input(names[index], 0, &bytes(numbers[index])));
        let narrowed = numbers.into_iter().flat_map(helpers::narrowed);
        let after: Vec<u8> = narrowed.flat_map(i32::to_le_bytes).collect();
        let before = self.poisoned(after.len());
        (tables, self.output("room", 0, &before, &after))
    }

    /// Returns `bytes` of poison.
    pub(super) fn poisoned(&self, bytes: usize) -> Vec<u8> {
        vec![self.poison; bytes]
    }

    /// Adds guards after the last field.
    pub(super) fn close(&mut self) {
        self.guard(0);
    }

    /// Returns, in words, the first byte that is not as it must be, and how many there are.
    pub(super) fn difference(&self, got: &[u8]) -> Option<(String, usize)> {
        let differs = |&place: &usize| got[place] != self.after[place];
        let first = (0..got.len()).find(differs)?;
        let count = (first..got.len()).filter(differs).count();
        let (name, at) = match self.fields.iter().find(|(_, range)| range.contains(&first)) {
            Some((name, range)) => (*name, first - range.start),
            None => ("guard", first),
        };
        let (got, want, was) = (got[first], self.after[first], self.before[first]);
        Some((format!("{name} byte {at}: {got:#04x}, must be {want:#04x}, was {was:#04x}"), count))
    }
}

/// Returns random bytes.
pub(super) fn random_bytes(draw: &mut CaseDraw, count: usize) -> Vec<u8> {
    let words = (0..count.div_ceil(4)).flat_map(|_| draw.bits().to_le_bytes());
    let mut bytes: Vec<u8> = words.collect();
    bytes.truncate(count);
    bytes
}

/// An image on the device.
pub(super) struct PlacedImage<'a> {
    pub(super) area: Area<'a>,
    pub(super) fields: &'a [(&'static str, Range<usize>)],
}

impl<'a> PlacedImage<'a> {
    pub(super) fn of(&self, field: Field) -> Result<Area<'a>, KernelError> {
        self.area.part(self.fields[field.0].1.clone())
    }

    /// Returns the slots, whose tables are narrowed by a launch where they are wide.
    pub(super) fn slots(&self, gpu: &Gpu, fields: SlotFields) -> Result<Slots<'a>, KernelError> {
        let SlotFields { tables: [offset, span, len], room, count, rows } = fields;
        let (offset, span, len) = (self.of(offset)?, self.of(span)?, self.of(len)?);
        match room {
            None => Ok(Slots { offset, span, len, count, rows }),
            Some(room) => gpu.narrow(WideSlots { offset, span, len, count, rows }, self.of(room)?),
        }
    }
}

/// The launch of a case, on an image that is on the device.
pub(super) type ImageLaunch = Box<dyn Fn(&Gpu, &PlacedImage) -> Result<(), KernelError>>;

/// The tables of slots in an image.
#[derive(Clone, Copy, Debug)]
pub(super) struct SlotFields {
    pub(super) tables: [Field; 3],
    /// The place of the narrowed tables, where the tables are of i64.
    pub(super) room: Option<Field>,
    pub(super) count: usize,
    pub(super) rows: usize,
}
