//! What was asked of the device, on its streams.
//!
//! A *lane* is a stream of a rank. On one stream everything is launched in the order in which it was asked for, and that
//! order is the executor's choice. On several, lanes have streams of the GPU, in turn where there are more lanes, and wait
//! for one another where the schedule says so and nowhere else: what a schedule forgets to wait for may not be there yet,
//! or not any more. Some launches are held up, so that lanes run at once however short their kernels are.

use std::collections::BTreeMap;

use cudarc::driver::CudaEvent;

use super::workspace::Frame;
use crate::error::KernelError;
use crate::gpu::Gpu;

/// Launches.
pub(super) type Launch = Box<dyn Fn(&Gpu, &Frame) -> Result<(), KernelError>>;

/// A recorded request.
pub(super) enum Command {
    /// Launches of the lane that was named last.
    Launch(Launch),
    /// What follows is this lane's.
    Lane(usize),
    /// A mark of the lane.
    Mark(usize),
    /// The lane waits for a mark.
    Wait(usize),
}

/// One launch in so many is held up by a drawn number of cycles below the most.
const HELD_UP: u64 = 4;
const CYCLES_MAX: u64 = 1 << 16;

/// Launches everything on so many streams, of which the GPU's own has what is of no lane. What comes after waits for all.
pub(super) fn launch(
    gpu: &Gpu,
    frame: &Frame,
    streams: usize,
    commands: &[Command],
) -> Result<(), KernelError> {
    let mut lanes = Lanes { gpu, streams, stream: MAIN, used: Vec::new(), marks: BTreeMap::new() };
    let commands = commands.iter().enumerate();
    let launched =
        { commands }.try_for_each(|(index, command)| lanes.take(command, spread(index as u64), frame));
    // What was launched before an error has to end before its memory is written again.
    lanes.join().and(launched)
}

/// The GPU's own stream.
const MAIN: usize = 0;

struct Lanes<'g> {
    gpu: &'g Gpu,
    streams: usize,
    /// The stream of the lane that was named last.
    stream: usize,
    /// Streams that lanes have had.
    used: Vec<usize>,
    marks: BTreeMap<usize, CudaEvent>,
}

impl Lanes<'_> {
    fn take(&mut self, command: &Command, draw: u64, frame: &Frame) -> Result<(), KernelError> {
        match command {
            Command::Launch(launch) => {
                let gpu = self.gpu;
                gpu.on(self.stream, || {
                    if self.stream != MAIN && draw.is_multiple_of(HELD_UP) {
                        gpu.hold_up((draw / HELD_UP % CYCLES_MAX) as u32)?;
                    }
                    launch(gpu, frame)
                })
            }
            _ if self.streams <= 1 => Ok(()),
            Command::Lane(lane) => self.enter(1 + lane % self.streams),
            Command::Mark(mark) => self.gpu.mark(self.stream).map(|event| {
                self.marks.insert(*mark, event);
            }),
            // A mark that was never made is of what has ended.
            Command::Wait(mark) => {
                self.marks.get(mark).map_or(Ok(()), |event| self.gpu.wait(self.stream, event))
            }
        }
    }

    /// A lane begins after all that is of no lane.
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

/// A number's bits, spread (the finaliser of SplitMix64, <https://prng.di.unimi.it/splitmix64.c>).
fn spread(number: u64) -> u64 {
    let a = number.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let b = (a ^ (a >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let c = (b ^ (b >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    c ^ (c >> 31)
}
