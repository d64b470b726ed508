//! A tensor of more than 2^31 elements: every product of rows and elements must be 64 bits wide.
//!
//! Bytes and elements both pass 2^31 within the tensor. The tensor lies between stretches as long as itself: a product
//! that wraps reads or writes a wrong place, and not one outside of the memory. Halves of slots are as long as the
//! tensor, and so twice as long together.

use seamproof_kernels::memory::{Area, DeviceBuffer};
use seamproof_kernels::merge::{DeviceStatistic, DeviceTensor};
use seamproof_kernels::region::RotationTable;
use seamproof_kernels::rows::ByteRows;
use seamproof_kernels::tables::Slots;
use seamproof_kernels::{Gpu, KernelError, MergeKernels, RegionKernels, RowKernels};
use seamproof_oracle::{Format, Run};
use seamproof_simulator::helpers::{Half, Rest, SlotPart, Style, Update};
use seamproof_simulator::schedule::Rotated;

use super::far::check_far;
use super::mismatch::Mismatch;

const HEADS: usize = 16;
const DIM: usize = 64;
const ROW_BYTES: usize = HEADS * DIM * 2;
/// The rows of a little more than 2^31 elements.
const ROWS: usize = (1 << 21) + 4096;
const BYTES: usize = ROWS * ROW_BYTES;
/// The whole rows that cross the bus at once.
const CHUNK_ROWS: usize = 4096;
const CHUNK: usize = CHUNK_ROWS * ROW_BYTES;

/// The rows after which the source repeats itself. 2^20 and 2^21 are no multiples.
const PERIOD: usize = 97;

/// The bit of a bf16 that is its sign.
const SIGN: u16 = 0x8000;

/// Returns the source's rows with a sign: enough for a chunk that begins with any of them. Each row is full of one
/// finite bf16 that is not 0.
fn pattern(sign: u16) -> Vec<u8> {
    let row = |row: usize| (sign | (0x3f80 + (row % PERIOD) as u16)).to_le_bytes().repeat(ROW_BYTES / 2);
    (0..PERIOD + CHUNK_ROWS).flat_map(row).collect()
}

fn rows_from(pattern: &[u8], first: usize) -> &[u8] {
    &pattern[first % PERIOD * ROW_BYTES..][..CHUNK]
}

/// Returns the first row of a tensor that is not as the source's.
fn difference(gpu: &Gpu, operation: &'static str, got: Area) -> Result<Option<Mismatch>, KernelError> {
    difference_from(gpu, operation, got, &pattern(0))
}

/// Returns the first row of a tensor that is not as the pattern's.
fn difference_from(
    gpu: &Gpu,
    operation: &'static str,
    got: Area,
    pattern: &[u8],
) -> Result<Option<Mismatch>, KernelError> {
    for first in (0..ROWS).step_by(CHUNK_ROWS) {
        let bytes = gpu.read(got.part(first * ROW_BYTES..(first + CHUNK_ROWS) * ROW_BYTES)?)?;
        let want = rows_from(pattern, first);
        if bytes == want {
            continue;
        }
        if let Some(at) = (0..CHUNK).find(|&at| bytes[at] != want[at]) {
            let place =
                format!("row {}: {:#04x}, must be {:#04x}", first + at / ROW_BYTES, bytes[at], want[at]);
            let count = (at..CHUNK).filter(|&at| bytes[at] != want[at]).count();
            let what = format!("{ROWS} rows of {HEADS} heads of {DIM}");
            return Ok(Some(Mismatch { operation, case: 0, place, what, bytes: count }));
        }
    }
    Ok(None)
}

/// The memory of the check.
struct Memory {
    all: DeviceBuffer,
    /// The tables of 0, of the number of rows, and of twice that number.
    tables: [DeviceBuffer; 3],
    statistics: [DeviceBuffer; 2],
}

impl Memory {
    fn new(gpu: &Gpu) -> Result<Memory, KernelError> {
        let all = gpu.allocate(5 * BYTES)?;
        gpu.fill(all.area(), 0)?;
        let pattern = pattern(0);
        for first in (0..ROWS).step_by(CHUNK_ROWS) {
            let start = 2 * BYTES + first * ROW_BYTES;
            gpu.write(all.area().part(start..start + CHUNK)?, rows_from(&pattern, first))?;
        }
        let table = |number: usize| gpu.upload_i32(&[number as i32]);
        // The running statistic is that of no keys, and the step's share is the whole.
        let statistics = [gpu.allocate(HEADS * ROWS * 4)?, gpu.allocate(HEADS * ROWS * 4)?];
        for (statistic, value) in statistics.iter().zip([f32::NEG_INFINITY, 0.0]) {
            let words = value.to_le_bytes().repeat(HEADS * CHUNK_ROWS);
            for start in (0..HEADS * ROWS * 4).step_by(words.len()) {
                gpu.write(statistic.area().part(start..start + words.len())?, &words)?;
            }
        }
        Ok(Memory { all, tables: [table(0)?, table(ROWS)?, table(2 * ROWS)?], statistics })
    }

    fn to(&self) -> Result<Area<'_>, KernelError> {
        self.all.area().part(BYTES..2 * BYTES)
    }

    fn from(&self) -> Result<Area<'_>, KernelError> {
        self.all.area().part(2 * BYTES..3 * BYTES)
    }

    /// Returns one slot of all rows, without padding.
    fn slots(&self) -> Slots<'_> {
        let [first, rows, _] = self.tables.each_ref().map(DeviceBuffer::area);
        Slots { offset: first, span: rows, len: rows, count: 1, rows: ROWS }
    }

    /// Returns one slot of twice the rows of [`Memory::slots`].
    fn slots_of_halves(&self) -> Slots<'_> {
        let [first, _, rows] = self.tables.each_ref().map(DeviceBuffer::area);
        Slots { offset: first, span: rows, len: rows, count: 1, rows: 2 * ROWS }
    }

    /// Returns both tensors as one.
    fn whole(&self) -> Result<Area<'_>, KernelError> {
        self.all.area().part(BYTES..3 * BYTES)
    }

    fn halves(&self) -> Result<Area<'_>, KernelError> {
        self.all.area().part(3 * BYTES..4 * BYTES)
    }

    fn statistic(&self, which: usize) -> DeviceStatistic<'_> {
        DeviceStatistic { area: self.statistics[which].area(), heads: HEADS, rows: ROWS }
    }
}

fn tensor(area: Area) -> DeviceTensor {
    DeviceTensor { area, rows: ROWS, heads: HEADS, dim: DIM, format: Format::Bf16 }
}

/// Copies, adds and merges a tensor of more than 2^31 elements into nothing, rotates it, moves halves of a tensor of
/// twice the size, and compares all results. Then it runs attention on rows that are as far apart. It needs 44 GB of
/// the GPU's memory.
pub fn check_large(gpu: &Gpu) -> Result<Vec<Mismatch>, KernelError> {
    let mut found = check_helpers(gpu)?;
    // A fault that was found here would be found in attention again.
    if found.is_empty() {
        found = check_far(gpu)?;
    }
    Ok(found)
}

fn check_helpers(gpu: &Gpu) -> Result<Vec<Mismatch>, KernelError> {
    let memory = Memory::new(gpu)?;
    let (from, to, slots) = (memory.from()?, memory.to()?, memory.slots());
    let rows = |area| ByteRows { area, rows: ROWS, row_bytes: ROW_BYTES };
    let mut found = Vec::new();
    gpu.copy_valid(slots, rows(from), rows(to), Rest::Leave)?;
    found.extend(difference(gpu, "copy valid", to)?);
    gpu.fill(to, 0)?;
    gpu.accumulate(slots, SlotPart::Whole, [Update::Add; 2], tensor(to), tensor(from))?;
    found.extend(difference(gpu, "accumulation", to)?);
    found.extend(check_rotation(gpu, to)?);
    gpu.fill(to, 0)?;
    let (running, step) = ((tensor(to), memory.statistic(0)), (tensor(from), memory.statistic(1)));
    gpu.merge_out(slots, (SlotPart::Whole, Style::Running), running, step)?;
    found.extend(difference(gpu, "merge of out", to)?);
    found.extend(check_halves(gpu, &memory)?);
    Ok(found)
}

/// Rotates a tensor of the source's rows by its head dim, which turns every sign.
fn check_rotation(gpu: &Gpu, to: Area) -> Result<Option<Mismatch>, KernelError> {
    let rows = Run::packed(0, ROWS, ROWS);
    let turns = RotationTable::new(&[Rotated { rows, position: DIM, step: 0 }]);
    let table = gpu.upload(turns.bytes())?;
    gpu.rotate(&turns, table.area(), false, tensor(to))?;
    difference_from(gpu, "rotation", to, &pattern(SIGN))
}

/// Reads both halves of a slot, each the source's rows, and writes them back.
fn check_halves(gpu: &Gpu, memory: &Memory) -> Result<Vec<Mismatch>, KernelError> {
    let (first, second, slots) = (memory.to()?, memory.from()?, memory.slots_of_halves());
    gpu.copy(second, first)?;
    let whole = ByteRows { area: memory.whole()?, rows: 2 * ROWS, row_bytes: ROW_BYTES };
    let halves = ByteRows { area: memory.halves()?, rows: ROWS, row_bytes: ROW_BYTES };
    let mut found = Vec::new();
    for half in [Half::First, Half::Second] {
        gpu.fill(halves.area, 0)?;
        gpu.read_half(slots, half, whole, halves, Rest::Leave)?;
        found.extend(difference(gpu, "read half", halves.area)?);
    }
    gpu.fill(whole.area, 0)?;
    for (half, area) in [(Half::First, first), (Half::Second, second)] {
        gpu.write_half(slots, half, halves, whole)?;
        found.extend(difference(gpu, "write half", area)?);
    }
    Ok(found)
}
