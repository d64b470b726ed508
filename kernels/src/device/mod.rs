//! The CUDA [`Device`]: a schedule's buffers in one stretch of device memory, all ranks on one GPU.
//!
//! Buffers have their true storage formats, guard bands around each and the unwritten pattern in every fresh element (see
//! [`image`]). Nothing waits for the GPU before results are asked for: operations are *recorded*, with their tables in one
//! array, and [`Device::submit`] sends the tables and launches everything in order, on one stream or on those of the
//! schedule (see [`lanes`]). So a run is an upload, its launches and a download, however small its operations are; memory
//! is kept from run to run.
//!
//! Where an operation has the form that a kernel for packed slots takes, that kernel runs; else a kernel on tables of rows
//! that takes everything. [`Workspace::counts`] says which went which way.

mod image;
mod lanes;
mod operations;
mod production;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;

use seamproof_oracle::Run;
use seamproof_simulator::device::{Buffers, Device, DeviceError, Transfer};
use seamproof_simulator::schedule::{BufferId, Region, Work};

use crate::attend::WeightFormats;
use crate::backward::Order;
use crate::error::KernelError;
use crate::forward::Attention;
use crate::gpu::{Area, Buffer, Gpu, Staging};
use image::Placed;
pub(crate) use image::{load, store};
use lanes::Command;
pub use operations::{on_tensor_cores, shapes};

/// What tables begin at multiples of.
const ALIGNMENT: usize = 16;

/// A GPU with memory for one run at a time.
#[derive(Debug)]
pub struct Workspace {
    gpu: Gpu,
    memory: Stretch,
    tables: Stretch,
    scratch: Stretch,
    /// Which run the memory is of.
    run: Cell<u64>,
    staging: RefCell<Option<Staging>>,
    counts: RefCell<BTreeMap<&'static str, u64>>,
}

/// Device memory that grows and is kept.
#[derive(Debug, Default)]
struct Stretch(RefCell<Option<Buffer>>);

/// The device, for problems of these roundings.
#[derive(Clone, Copy, Debug)]
pub struct CudaDevice<'w> {
    workspace: &'w Workspace,
    formats: WeightFormats,
    ways: Ways,
}

/// How a run goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ways {
    /// Whether kernels for packed slots run where they can; else every operation but attention goes to the kernels on
    /// tables of rows.
    pub helpers: bool,
    /// Which kernels run forwards and backwards.
    pub attention: Attention,
    /// In which order backwards on tensor cores sum dq.
    pub dq: Order,
    /// Streams that the schedule's streams run on; 1 for one after the other, in the order in which they are asked for.
    pub streams: usize,
}

/// A run's buffers on the device, and what was asked for and is not launched yet.
pub struct CudaMemory {
    image: Buffers<f32>,
    places: Vec<Placed>,
    bytes: usize,
    run: u64,
    tables: Vec<u8>,
    scratch: usize,
    commands: Vec<Command>,
    /// Whether `image` is what the device holds.
    current: bool,
}

/// Where a run's memory lies.
struct Frame<'a> {
    memory: Area<'a>,
    tables: Area<'a>,
    scratch: Area<'a>,
}

impl Stretch {
    /// Makes room, at least twice as much as there was; what was there is lost if it must grow.
    fn reserve(&self, gpu: &Gpu, bytes: usize) -> Result<(), KernelError> {
        let mut buffer = self.0.borrow_mut();
        let have = buffer.as_ref().map_or(0, |buffer| buffer.area().bytes());
        if buffer.is_none() || have < bytes {
            // Freed first: the two need not fit together.
            *buffer = None;
            *buffer = Some(gpu.allocate(bytes.max(2 * have).max(1 << 20))?);
        }
        Ok(())
    }

    fn with<T>(&self, work: impl FnOnce(Area) -> Result<T, KernelError>) -> Result<T, KernelError> {
        match &*self.0.borrow() {
            Some(buffer) => work(buffer.area()),
            None => Err(KernelError::shape("no memory was reserved")),
        }
    }
}

impl Workspace {
    /// A workspace on a GPU.
    pub fn new(gpu: Gpu) -> Workspace {
        Workspace {
            gpu,
            memory: Stretch::default(),
            tables: Stretch::default(),
            scratch: Stretch::default(),
            run: Cell::new(0),
            staging: RefCell::default(),
            counts: RefCell::default(),
        }
    }

    /// The device for problems whose P and dS are rounded so.
    pub fn device(&self, formats: WeightFormats, ways: Ways) -> CudaDevice<'_> {
        CudaDevice { workspace: self, formats, ways }
    }

    /// The GPU's name.
    pub fn name(&self) -> Result<String, KernelError> {
        self.gpu.name()
    }

    /// The GPU's name and UUID.
    pub fn identity(&self) -> Result<String, KernelError> {
        self.gpu.identity()
    }

    /// How many operations of each kind went to which kernel.
    pub fn counts(&self) -> BTreeMap<&'static str, u64> {
        self.counts.borrow().clone()
    }

    fn count(&self, way: &'static str) {
        *self.counts.borrow_mut().entry(way).or_default() += 1;
    }

    /// Staging memory of at least so many bytes.
    fn with_staging<T>(
        &self,
        bytes: usize,
        work: impl FnOnce(&mut Staging) -> Result<T, KernelError>,
    ) -> Result<T, KernelError> {
        let mut staging = self.staging.borrow_mut();
        let have = staging.as_ref().map_or(0, Staging::bytes);
        if have < bytes {
            *staging = None;
        }
        match &mut *staging {
            Some(staging) => work(staging),
            none => work(none.insert(self.gpu.staging(bytes.max(2 * have).max(1 << 20))?)),
        }
    }

    fn frame<T>(&self, work: impl FnOnce(&Frame) -> Result<T, KernelError>) -> Result<T, KernelError> {
        let all = |memory: Area| {
            self.tables.with(|tables| self.scratch.with(|scratch| work(&Frame { memory, tables, scratch })))
        };
        self.memory.with(all)
    }
}

fn failed(error: KernelError) -> DeviceError {
    match error {
        KernelError::Shape(what) => DeviceError::Shape(what),
        error @ KernelError::OutOfMemory { .. } => DeviceError::OutOfMemory(error.to_string()),
        error => DeviceError::Failed(error.to_string()),
    }
}

impl CudaMemory {
    /// Keeps a table for the launches; where it will lie among the tables.
    fn table(&mut self, table: &[u8]) -> std::ops::Range<usize> {
        let start = self.tables.len().next_multiple_of(ALIGNMENT);
        self.tables.resize(start, 0);
        self.tables.extend_from_slice(table);
        start..start + table.len()
    }

    /// Keeps scratch for one operation: others may run at once.
    fn scratch(&mut self, bytes: usize) -> std::ops::Range<usize> {
        let start = self.scratch.next_multiple_of(ALIGNMENT);
        self.scratch = start + bytes;
        start..self.scratch
    }

    fn record(&mut self, launch: impl Fn(&Gpu, &Frame) -> Result<(), KernelError> + 'static) {
        self.commands.push(Command::Launch(Box::new(launch)));
        self.current = false;
    }

    fn place(&self, id: BufferId) -> Result<Placed, KernelError> {
        self.places
            .get(id.0)
            .copied()
            .ok_or_else(|| KernelError::shape(format!("there is no buffer {}", id.0)))
    }
}

impl CudaDevice<'_> {
    fn check_run(&self, memory: &CudaMemory) -> Result<(), KernelError> {
        if memory.run == self.workspace.run.get() {
            return Ok(());
        }
        Err(KernelError::shape("the memory of an earlier run; the workspace has room for one"))
    }

    fn send_image(&self, memory: &CudaMemory) -> Result<(), KernelError> {
        let gpu = &self.workspace.gpu;
        self.workspace.memory.reserve(gpu, memory.bytes)?;
        self.workspace.with_staging(memory.bytes, |staging| {
            let bytes = gpu.staged(staging, memory.bytes)?;
            for (place, tensor) in memory.places.iter().zip(memory.image.tensors()) {
                image::encode(place, tensor.raw(), bytes);
            }
            self.workspace.memory.with(|area| gpu.send_staged(area, staging, memory.bytes))
        })
    }

    fn launch(&self, memory: &mut CudaMemory) -> Result<(), KernelError> {
        self.check_run(memory)?;
        let Workspace { gpu, tables, scratch, .. } = self.workspace;
        tables.reserve(gpu, memory.tables.len())?;
        scratch.reserve(gpu, memory.scratch)?;
        self.workspace.frame(|frame| {
            gpu.send(frame.tables, &memory.tables)?;
            lanes::launch(gpu, frame, self.ways.streams, &memory.commands)
        })?;
        memory.tables.clear();
        memory.scratch = 0;
        memory.commands.clear();
        Ok(())
    }

    fn receive_image(&self, memory: &mut CudaMemory) -> Result<(), KernelError> {
        let gpu = &self.workspace.gpu;
        self.workspace.with_staging(memory.bytes, |staging| {
            let receive = |area: Area| {
                let bytes = gpu.receive_staged(area, staging, memory.bytes)?;
                for (index, place) in memory.places.iter().enumerate() {
                    image::decode(place, bytes, memory.image.tensor_mut(BufferId(index)).raw_mut());
                }
                Ok(())
            };
            self.workspace.memory.with(receive)
        })?;
        memory.current = true;
        Ok(())
    }
}

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
            commands: Vec::new(),
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
        memory.commands.push(Command::Lane(lane));
    }

    fn mark(&self, mark: usize, memory: &mut CudaMemory) {
        memory.commands.push(Command::Mark(mark));
    }

    fn wait(&self, mark: usize, memory: &mut CudaMemory) {
        memory.commands.push(Command::Wait(mark));
    }
}
