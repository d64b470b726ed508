//! Memory that launches work on in turn, the figures, and the packs that helper kernels are measured on.

use std::fmt;
use std::time::Duration;

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use seamproof_kernels::memory::{Area, DeviceBuffer};
use seamproof_kernels::merge::{DeviceStatistic, DeviceTensor};
use seamproof_kernels::rows::ByteRows;
use seamproof_kernels::tables::Slots;
use seamproof_kernels::{Gpu, KernelError};
use seamproof_oracle::{Format, Run};

use super::timing::median_ms;

/// The repetitions of a graph. Their median counts.
pub(super) const REPETITIONS: usize = 15;
/// The time for which a graph is repeated before anything counts.
const WARM_UP: Duration = Duration::from_millis(10);
/// The most launches of a graph.
pub(super) const LAUNCHES_MAX: usize = 24;
/// The bytes of each pool of tensors, and of statistics.
const POOL_BYTES: usize = 2 << 30;
/// The multiple that the peer's sizes are rounded up to. Its time is scaled back.
const COPY_UNIT: usize = 1 << 20;
/// The most bytes that the peer copies at once, of any kernel that moves more. Longer copies are slower.
const COPY_MAX: usize = 256 << 20;
const STATISTICS_BYTES: usize = 128 << 20;
/// The heads and the elements of a head of every case. They are those of TransformerEngine pull request 2829, whose
/// figures on an H100 are 0.0954 to 0.109 ms for the reordering and 0.0911 to 0.105 ms for the copy.
pub(super) const HEADS: usize = 16;
pub(super) const DIM: usize = 64;
pub(super) const ROW_BYTES: usize = HEADS * DIM * 2;

/// A figure of a kernel, beside a copy of as many bytes.
#[derive(Clone, Debug)]
pub(super) struct CopyRatio {
    case: String,
    kernel: String,
    bytes: usize,
    /// The microseconds of the kernel, and of a copy of as many bytes.
    time: f64,
    copy: f64,
}

impl fmt::Display for CopyRatio {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let CopyRatio { case, kernel, bytes, time, copy } = self;
        let rate = |time: f64| *bytes as f64 / time / 1e6;
        write!(
            f,
            "{case:<24} {kernel:<30} {:>9.1} MB {time:>9.2} µs {:>6.2} TB/s   copy {:>6.2} TB/s   ratio {:.3}",
            *bytes as f64 / 1e6,
            rate(*time),
            rate(*copy),
            copy / time
        )
    }
}

/// Packed sequences of a whole batch.
pub(super) struct BenchPack {
    pub(super) name: String,
    pub(super) runs: Vec<Run>,
    pub(super) rows: usize,
}

/// Tables of slots on the device.
pub(super) struct SlotBuffers {
    tables: [DeviceBuffer; 3],
    count: usize,
    rows: usize,
}

impl SlotBuffers {
    pub(super) fn new(gpu: &Gpu, runs: &[Run], rows: usize) -> Result<SlotBuffers, KernelError> {
        let table = |of: fn(&Run) -> usize| {
            gpu.upload_i32(&runs.iter().map(|run| of(run) as i32).collect::<Vec<_>>())
        };
        let tables = [table(|run| run.offset)?, table(|run| run.span)?, table(|run| run.len)?];
        Ok(SlotBuffers { tables, count: runs.len(), rows })
    }

    pub(super) fn slots(&self) -> Slots<'_> {
        let [offset, span, len] = &self.tables;
        let (offset, span, len) = (offset.area(), span.area(), len.area());
        Slots { offset, span, len, count: self.count, rows: self.rows }
    }
}

/// The memory that launches work on in turn.
pub(super) struct Pools<'a> {
    pub(super) gpu: &'a Gpu,
    from: DeviceBuffer,
    to: DeviceBuffer,
    statistics: [DeviceBuffer; 2],
}

/// Returns a part of a pool for each launch, in turn.
fn turn(pool: &DeviceBuffer, launch: usize, bytes: usize) -> Result<Area<'_>, KernelError> {
    let stride = bytes.next_multiple_of(256);
    let start = launch % (pool.area().bytes() / stride.max(1)).max(1) * stride;
    pool.area().part(start..start + bytes)
}

impl<'a> Pools<'a> {
    pub(super) fn new(gpu: &'a Gpu) -> Result<Pools<'a>, KernelError> {
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        // Two numbers of bf16 from 0.5 to 2, of either sign. Random bits would have infinities and NaN, whose scales
        // are made in other ways than those of numbers.
        let two = |_| (rng.next_u32() & 0x80ff_80ff | 0x3f00_3f00).to_le_bytes();
        let block: Vec<u8> = (0..2 << 20).flat_map(two).collect();
        // The numbers are of the size of logarithms.
        let number = |_| (rng.next_u32() as f32 / 4e8).to_le_bytes();
        let numbers: Vec<u8> = (0..2 << 20).flat_map(number).collect();
        let pool = |bytes: usize, block: &[u8]| {
            let buffer = gpu.allocate(bytes)?;
            let first = gpu.upload(block)?;
            for start in (0..bytes).step_by(block.len()) {
                gpu.copy(first.area(), buffer.area().part(start..start + block.len())?)?;
            }
            gpu.finish()?;
            Ok::<DeviceBuffer, KernelError>(buffer)
        };
        let statistics = [pool(STATISTICS_BYTES, &numbers)?, pool(STATISTICS_BYTES, &numbers)?];
        Ok(Pools { gpu, from: pool(POOL_BYTES, &block)?, to: pool(POOL_BYTES, &block)?, statistics })
    }

    /// Returns the median microseconds of one launch, of `launches` recorded ones.
    pub(super) fn measure(
        &self,
        launches: usize,
        work: impl Fn(usize) -> Result<(), KernelError>,
    ) -> Result<f64, KernelError> {
        let graph = self.gpu.record(|| (0..launches).try_for_each(&work))?;
        Ok(median_ms(&graph, WARM_UP, REPETITIONS)? * 1e3 / launches as f64)
    }

    /// Measures a kernel that moves `bytes`, and the copy that moves as many. The larger of the kernel's tensors has
    /// `tensor` bytes.
    pub(super) fn line(
        &self,
        (case, kernel): (&str, &str),
        (bytes, tensor): (usize, usize),
        work: impl Fn(usize) -> Result<(), KernelError>,
    ) -> Result<CopyRatio, KernelError> {
        let launches = (POOL_BYTES / tensor.max(1)).clamp(2, LAUNCHES_MAX);
        let time = self.measure(launches, work)?;
        // The driver's copy is slower where sizes or addresses are no multiples of large powers of two.
        let half =
            (bytes / 2).next_multiple_of(if bytes > COPY_UNIT { COPY_UNIT } else { 512 }).min(COPY_MAX);
        let copy = self.measure((POOL_BYTES / half).clamp(2, LAUNCHES_MAX), |launch| {
            self.gpu.copy(turn(&self.from, launch, half)?, turn(&self.to, launch, half)?)
        })?;
        let copy = copy * bytes as f64 / (2 * half) as f64;
        Ok(CopyRatio { case: case.to_owned(), kernel: kernel.to_owned(), bytes, time, copy })
    }

    /// Returns so many bytes for a launch, to be read or to be written.
    pub(super) fn part(&self, written: bool, launch: usize, bytes: usize) -> Result<Area<'_>, KernelError> {
        turn(if written { &self.to } else { &self.from }, launch, bytes)
    }

    pub(super) fn rows(&self, launch: usize, rows: usize) -> Result<ByteRows<'_>, KernelError> {
        ByteRows { area: turn(&self.from, launch, rows * ROW_BYTES)?, rows, row_bytes: ROW_BYTES }
            .in_vectors("rows")
    }

    pub(super) fn rows_to(&self, launch: usize, rows: usize) -> Result<ByteRows<'_>, KernelError> {
        ByteRows { area: turn(&self.to, launch, rows * ROW_BYTES)?, rows, row_bytes: ROW_BYTES }
            .in_vectors("rows")
    }

    pub(super) fn tensor(
        &self,
        running: bool,
        launch: usize,
        rows: usize,
        format: Format,
    ) -> Result<DeviceTensor<'_>, KernelError> {
        let bytes = rows * HEADS * DIM * format.bits() as usize / 8;
        let pool = if running { &self.to } else { &self.from };
        Ok(DeviceTensor { area: turn(pool, launch, bytes)?, rows, heads: HEADS, dim: DIM, format })
    }

    pub(super) fn statistic(
        &self,
        which: usize,
        launch: usize,
        heads: usize,
        rows: usize,
    ) -> Result<DeviceStatistic<'_>, KernelError> {
        Ok(DeviceStatistic { area: turn(&self.statistics[which], launch, heads * rows * 4)?, heads, rows })
    }
}

/// Returns `count` sequences of `length` rows. With `ragged` they have any length up to twice that, padded to a
/// multiple of 16, with a first offset, gaps and slack.
pub(super) fn pack(name: &str, count: usize, length: usize, ragged: bool) -> BenchPack {
    let mut rng = ChaCha8Rng::seed_from_u64(2);
    let mut below = |end: usize| (rng.next_u64() % end as u64) as usize;
    let (mut runs, mut end) = (Vec::new(), if ragged { 16 } else { 0 });
    for _ in 0..count {
        let len = if ragged { 1 + below(2 * length) } else { length };
        let span = len.next_multiple_of(16);
        runs.push(Run { offset: end, step: 1, len, span });
        end += span + if ragged { 16 * below(3) } else { 0 };
    }
    let slack = if ragged { 160 } else { 0 };
    BenchPack { name: name.to_owned(), runs, rows: end + slack }
}
