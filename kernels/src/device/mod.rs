//! The CUDA [`Device`]: a schedule's buffers in one stretch of device memory, all ranks on one GPU.
//!
//! Buffers have their true storage formats, with guard bands around each and the unwritten pattern in every fresh
//! element (see [`image`]). Nothing waits for the GPU before results are asked for. Operations are *recorded*, with
//! their tables in one array. [`Device::submit`] sends the tables and launches everything, on one stream or on those of
//! the schedule (see [`lanes`]). Transfers may be launched with earlier ones (see [`requests`]). So a run is an upload, its launches and a download, however small its
//! operations are. Memory is kept from run to run.
//!
//! Where an operation has the form that a kernel for packed slots takes, that kernel runs (see [`packed`]). Otherwise
//! a kernel on tables of rows runs, which takes everything. [`Workspace::counts`] says which operations went which
//! way.
//!
//! Ranks can also run at once, each by a thread of the host on streams of its own (see [`ranks`]). What one asks for is
//! then launched at once.

mod choice;
mod cuda;
mod fp8;
mod image;
mod lanes;
mod operations;
mod packed;
mod quantise;
mod ranks;
mod requests;
mod run;
mod stretch;
mod workspace;

use seamproof_oracle::Run;
use seamproof_simulator::device::{Buffers, Device, DeviceError, Transfer};
use seamproof_simulator::schedule::{BufferId, Region, Work};

pub use choice::{TileLaunch, shapes, tile_launches, tile_launches_fp8};
use cuda::failed;
pub use cuda::{CudaDevice, DeviceOptions};
use lanes::Command;
pub use quantise::CodesFrom;
pub use ranks::{CudaParcel, CudaPart};
use requests::Requests;
pub use run::CudaMemory;
pub use workspace::Workspace;

impl Device for CudaDevice<'_> {
    type Real = f32;
    type Memory = CudaMemory;

    fn upload(&self, image: Buffers<f32>) -> Result<CudaMemory, DeviceError> {
        let (places, bytes) = image::place(&image).map_err(failed)?;
        let run = self.workspace.run.get() + 1;
        self.workspace.run.set(run);
        let memory = CudaMemory {
            image,
            places,
            bytes,
            run,
            tables: Vec::new(),
            scratch: 0,
            requests: Requests::default(),
            current: true,
        };
        self.send_image(&memory).map_err(failed)?;
        Ok(memory)
    }

    fn download<'m>(&self, memory: &'m mut CudaMemory) -> Result<&'m Buffers<f32>, DeviceError> {
        if !memory.current {
            self.launch(memory).and_then(|()| self.receive_image(memory)).map_err(failed)?;
        }
        Ok(&memory.image)
    }

    fn submit(&self, memory: &mut CudaMemory) -> Result<(), DeviceError> {
        self.launch(memory).map_err(failed)
    }

    fn execute(&self, work: &Work, memory: &mut CudaMemory) -> Result<(), DeviceError> {
        self.record_work(work, memory)
    }

    fn transfer(&self, transfers: &[Transfer<'_>], memory: &mut CudaMemory) -> Result<(), DeviceError> {
        self.record_transfers(transfers, memory)
    }

    fn poison(
        &self,
        to: BufferId,
        rows: &[Run],
        value: f32,
        memory: &mut CudaMemory,
    ) -> Result<(), DeviceError> {
        self.record_fill(to, rows, value, memory)
    }

    fn host_read(&self, region: &Region, memory: &mut CudaMemory) -> Result<(), DeviceError> {
        self.download(memory)?.read(region).map(drop)
    }

    fn lane(&self, lane: usize, memory: &mut CudaMemory) {
        memory.requests.push(Command::Lane(lane));
    }

    fn mark(&self, mark: usize, memory: &mut CudaMemory) {
        memory.requests.push(Command::Mark(mark));
    }

    fn wait(&self, mark: usize, memory: &mut CudaMemory) {
        memory.requests.push(Command::Wait(mark));
    }
}
