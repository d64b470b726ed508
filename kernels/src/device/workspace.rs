//! Memory that is kept from run to run.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;

use crate::error::KernelError;
use crate::gpu::Gpu;
use crate::memory::{Area, DeviceBuffer, Staging};

/// A GPU with memory for one run at a time.
#[derive(Debug)]
pub struct Workspace {
    pub(super) gpu: Gpu,
    pub(super) memory: GrowingBuffer,
    pub(super) tables: GrowingBuffer,
    pub(super) scratch: GrowingBuffer,
    /// The number of the run that the memory is of.
    pub(super) run: Cell<u64>,
    staging: RefCell<Option<Staging>>,
    counts: RefCell<BTreeMap<&'static str, u64>>,
}

/// Device memory that grows and is kept.
#[derive(Debug, Default)]
pub(super) struct GrowingBuffer(RefCell<Option<DeviceBuffer>>);

/// The memory of a run.
pub(super) struct RunMemory<'a> {
    pub(super) memory: Area<'a>,
    pub(super) tables: Area<'a>,
    pub(super) scratch: Area<'a>,
}

impl GrowingBuffer {
    /// Makes room, at least twice as much as there was. If the memory must grow, its contents are lost.
    pub(super) fn reserve(&self, gpu: &Gpu, bytes: usize) -> Result<(), KernelError> {
        let mut buffer = self.0.borrow_mut();
        let have = buffer.as_ref().map_or(0, |buffer| buffer.area().bytes());
        if buffer.is_none() || have < bytes {
            // The old memory is freed first: the two need not fit together.
            *buffer = None;
            *buffer = Some(gpu.allocate(bytes.max(2 * have).max(1 << 20))?);
        }
        Ok(())
    }

    pub(super) fn with<T>(
        &self,
        work: impl FnOnce(Area) -> Result<T, KernelError>,
    ) -> Result<T, KernelError> {
        match &*self.0.borrow() {
            Some(buffer) => work(buffer.area()),
            None => Err(KernelError::shape("no memory was reserved")),
        }
    }
}

impl Workspace {
    /// Returns a workspace on a GPU.
    pub fn new(gpu: Gpu) -> Workspace {
        Workspace {
            gpu,
            memory: GrowingBuffer::default(),
            tables: GrowingBuffer::default(),
            scratch: GrowingBuffer::default(),
            run: Cell::new(0),
            staging: RefCell::default(),
            counts: RefCell::default(),
        }
    }

    /// Returns the GPU's name.
    pub fn name(&self) -> Result<String, KernelError> {
        self.gpu.name()
    }

    /// Returns the GPU's name and UUID.
    pub fn identity(&self) -> Result<String, KernelError> {
        self.gpu.identity()
    }

    /// Returns how many operations of each kind went to which kernel.
    pub fn counts(&self) -> BTreeMap<&'static str, u64> {
        self.counts.borrow().clone()
    }

    pub(super) fn count(&self, way: &'static str) {
        *self.counts.borrow_mut().entry(way).or_default() += 1;
    }

    /// Lends staging memory of at least so many bytes.
    pub(super) fn with_staging<T>(
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

    pub(super) fn frame<T>(
        &self,
        work: impl FnOnce(&RunMemory) -> Result<T, KernelError>,
    ) -> Result<T, KernelError> {
        let all = |memory: Area| {
            self.tables
                .with(|tables| self.scratch.with(|scratch| work(&RunMemory { memory, tables, scratch })))
        };
        self.memory.with(all)
    }
}
