//! Recorded requests, launched on streams.
//!
//! A *lane* is a stream of a rank. On one stream each buffer is touched in the order in which that was asked for, and
//! the executor chooses that order. On several, lanes share the GPU's streams in turn. They wait for one another
//! where the schedule says so and nowhere else: a buffer that a schedule forgets to wait for may not be written yet,
//! or may be overwritten. Some launches are held up, so that lanes run at once however short their kernels are.

use std::collections::BTreeMap;
use std::ops::Range;

use cudarc::driver::CudaEvent;

use super::workspace::RunMemory;
use crate::error::KernelError;
use crate::gpu::Gpu;
use crate::pairs::TransferTable;

/// The launches of a request.
pub(super) type RecordedLaunch = Box<dyn Fn(&Gpu, &RunMemory) -> Result<(), KernelError> + Send>;

/// Recorded transfers, and the place of their table among the tables, which is known once all are there.
#[derive(Default)]
pub(super) struct RecordedTransfers {
    pub(super) table: TransferTable,
    pub(super) place: Range<usize>,
}

/// A recorded request.
pub(super) enum Command {
    /// Launches of the lane that was named last.
    Launch(RecordedLaunch),
    /// Transfers of the lane that was named last, which are launched as one.
    Transfers(RecordedTransfers),
    /// A change to this lane.
    Lane(usize),
    /// A mark of the lane.
    Mark(usize),
    /// A wait of the lane for a mark.
    Wait(usize),
}

impl Command {
    /// Launches what the command asks for, on the GPU's current stream.
    pub(super) fn launch(&self, gpu: &Gpu, frame: &RunMemory) -> Result<(), KernelError> {
        match self {
            Command::Launch(launch) => launch(gpu, frame),
            Command::Transfers(RecordedTransfers { table, .. }) if table.is_empty() => Ok(()),
            Command::Transfers(RecordedTransfers { table, place }) => {
                gpu.transfer(table, frame.tables.part(place.clone())?)
            }
            Command::Lane(_) | Command::Mark(_) | Command::Wait(_) => Ok(()),
        }
    }
}

/// The share of launches that are held up, one in so many, and the end of the drawn number of cycles.
const HELD_UP: u64 = 4;
const CYCLES_MAX: u64 = 1 << 16;

/// Launches everything on so many streams. Requests of no lane go to the GPU's own stream. Later work waits for all.
pub(super) fn launch(
    gpu: &Gpu,
    frame: &RunMemory,
    streams: usize,
    commands: &[Command],
) -> Result<(), KernelError> {
    let mut lanes = Lanes { gpu, streams, stream: MAIN, used: Vec::new(), marks: BTreeMap::new() };
    let commands = commands.iter().enumerate();
    let launched =
        { commands }.try_for_each(|(index, command)| lanes.take(command, spread(index as u64), frame));
    // Launches before an error have to end before their memory is written again.
    lanes.join().and(launched)
}

/// The GPU's own stream.
const MAIN: usize = 0;

struct Lanes<'g> {
    gpu: &'g Gpu,
    streams: usize,
    /// The stream of the lane that was named last.
    stream: usize,
    /// The streams that lanes have had.
    used: Vec<usize>,
    marks: BTreeMap<usize, CudaEvent>,
}

impl Lanes<'_> {
    fn take(&mut self, command: &Command, draw: u64, frame: &RunMemory) -> Result<(), KernelError> {
        match command {
            Command::Launch(_) | Command::Transfers(_) => {
                let gpu = self.gpu;
                gpu.on(self.stream, || {
                    if self.stream != MAIN && draw.is_multiple_of(HELD_UP) {
                        gpu.hold_up((draw / HELD_UP % CYCLES_MAX) as u32)?;
                    }
                    command.launch(gpu, frame)
                })
            }
            _ if self.streams <= 1 => Ok(()),
            Command::Lane(lane) => self.enter(1 + lane % self.streams),
            Command::Mark(mark) => self.gpu.mark(self.stream).map(|event| {
                self.marks.insert(*mark, event);
            }),
            // A mark that was never made is of work that has ended.
            Command::Wait(mark) => {
                self.marks.get(mark).map_or(Ok(()), |event| self.gpu.wait(self.stream, event))
            }
        }
    }

    /// Enters a lane's stream, which begins after everything that is of no lane.
    fn enter(&mut self, stream: usize) -> Result<(), KernelError> {
        self.stream = stream;
        if self.used.contains(&stream) {
            return Ok(());
        }
        self.used.push(stream);
        self.gpu.wait(stream, &self.gpu.mark(MAIN)?)
    }

    fn join(&self) -> Result<(), KernelError> {
        self.used.iter().try_for_each(|&stream| self.gpu.wait(MAIN, &self.gpu.mark(stream)?))
    }
}

/// Returns a number with its bits spread (the finaliser of SplitMix64, <https://prng.di.unimi.it/splitmix64.c>).
fn spread(number: u64) -> u64 {
    let a = number.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let b = (a ^ (a >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let c = (b ^ (b >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    c ^ (c >> 31)
}
