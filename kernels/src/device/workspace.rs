//! Memory that is kept from run to run.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

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
    /// What each rank has that runs by a thread of its own.
    pub(super) ranks: RefCell<Vec<Workspace>>,
    pub(super) arena: RefCell<Arena>,
}

/// Device memory that grows and is kept.
#[derive(Debug, Default)]
pub(super) struct GrowingBuffer(RefCell<Option<Arc<DeviceBuffer>>>);

/// Device memory that is given out in pieces, which stay as they are until all of it is cleared.
#[derive(Debug, Default)]
pub(super) struct Arena {
    chunks: Vec<Arc<DeviceBuffer>>,
    /// The chunk that pieces come from, and its bytes that are given out.
    chunk: usize,
    used: usize,
}

/// A piece of an [`Arena`].
#[derive(Clone, Debug)]
pub(super) struct Piece {
    chunk: Arc<DeviceBuffer>,
    bytes: Range<usize>,
}

/// The multiple on which tables, scratch and pieces begin.
pub(super) const ALIGNMENT: usize = 16;

/// The bytes of an arena's smallest chunk.
const CHUNK: usize = 4 << 20;

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
            *buffer = Some(Arc::new(gpu.allocate(bytes.max(2 * have).max(1 << 20))?));
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

impl GrowingBuffer {
    /// Has the memory of another one, until it is let go of.
    pub(super) fn share(&self, other: &GrowingBuffer) {
        self.0.replace(other.0.borrow().clone());
    }

    /// Lets go of memory that is shared.
    pub(super) fn let_go(&self) {
        self.0.replace(None);
    }
}

impl Arena {
    /// Takes all pieces back, and keeps one chunk. No work that uses a piece may be under way.
    pub(super) fn clear(&mut self) {
        self.chunks.truncate(1);
        (self.chunk, self.used) = (0, 0);
    }

    /// Gives out so many bytes. Their contents are undefined.
    pub(super) fn piece(&mut self, gpu: &Gpu, bytes: usize) -> Result<Piece, KernelError> {
        loop {
            let Some(chunk) = self.chunks.get(self.chunk) else {
                self.chunks.push(Arc::new(gpu.allocate(bytes.max(CHUNK))?));
                continue;
            };
            let (start, end) = (self.used, self.used + bytes);
            if end <= chunk.area().bytes() {
                self.used = end.next_multiple_of(ALIGNMENT);
                return Ok(Piece { chunk: chunk.clone(), bytes: start..end });
            }
            (self.chunk, self.used) = (self.chunk + 1, 0);
        }
    }
}

impl Piece {
    /// Returns the memory.
    pub(super) fn area(&self) -> Result<Area<'_>, KernelError> {
        self.chunk.area().part(self.bytes.clone())
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
            ranks: RefCell::default(),
            arena: RefCell::default(),
        }
    }

    /// Makes workspaces for so many ranks, on the same GPU with streams of their own.
    pub(super) fn reserve_ranks(&self, ranks: usize) -> Result<(), KernelError> {
        let mut reserved = self.ranks.borrow_mut();
        while reserved.len() < ranks {
            reserved.push(Workspace::new(self.gpu.beside()?));
        }
        Ok(())
    }

    /// Returns the GPU's name.
    pub fn name(&self) -> Result<String, KernelError> {
        self.gpu.name()
    }

    /// Returns the GPU's name and UUID.
    pub fn identity(&self) -> Result<String, KernelError> {
        self.gpu.identity()
    }

    /// Returns how many launches the GPU was asked for.
    pub fn launches(&self) -> u64 {
        self.gpu.launches().map(|(_, count)| count).sum()
    }

    /// Returns how many operations of each kind went to which kernel.
    pub fn counts(&self) -> BTreeMap<&'static str, u64> {
        self.counts.borrow().clone()
    }

    pub(super) fn count(&self, way: &'static str) {
        *self.counts.borrow_mut().entry(way).or_default() += 1;
    }

    /// Takes over the counts of another workspace.
    pub(super) fn count_with(&self, other: &Workspace) {
        let mut counts = self.counts.borrow_mut();
        for (way, count) in other.counts.take() {
            *counts.entry(way).or_default() += count;
        }
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
