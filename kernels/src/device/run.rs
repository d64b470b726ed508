//! A run's buffers, and the launches that are recorded for it.

use std::ops::Range;

use seamproof_simulator::device::Buffers;
use seamproof_simulator::schedule::BufferId;

use super::image::Placed;
use super::lanes::Command;
use super::requests::Requests;
use super::workspace::{ALIGNMENT, RunMemory};
use crate::error::KernelError;
use crate::gpu::Gpu;

/// A run's buffers on the device, and the requests that are not launched yet.
pub struct CudaMemory {
    pub(super) image: Buffers<f32>,
    pub(super) places: Vec<Placed>,
    pub(super) bytes: usize,
    pub(super) run: u64,
    pub(super) tables: Vec<u8>,
    pub(super) scratch: usize,
    pub(super) requests: Requests,
    /// Whether `image` is what the device holds.
    pub(super) current: bool,
}

impl CudaMemory {
    /// Keeps a table for the launches. Returns its place among the tables.
    pub(super) fn table(&mut self, table: &[u8]) -> Range<usize> {
        let start = self.tables.len().next_multiple_of(ALIGNMENT);
        self.tables.resize(start, 0);
        self.tables.extend_from_slice(table);
        start..start + table.len()
    }

    /// Keeps scratch for one operation, since others may run at once. Returns its place.
    pub(super) fn scratch(&mut self, bytes: usize) -> Range<usize> {
        let start = self.scratch.next_multiple_of(ALIGNMENT);
        self.scratch = start + bytes;
        start..self.scratch
    }

    pub(super) fn record(
        &mut self,
        launch: impl Fn(&Gpu, &RunMemory) -> Result<(), KernelError> + Send + 'static,
    ) {
        self.requests.push(Command::Launch(Box::new(launch)));
        self.current = false;
    }

    /// Returns the part of a rank, which has these buffers.
    pub(super) fn of_rank(&self, image: Buffers<f32>) -> CudaMemory {
        CudaMemory {
            image,
            places: self.places.clone(),
            tables: Vec::new(),
            scratch: 0,
            requests: Requests::default(),
            ..*self
        }
    }

    /// Puts the tables of transfers among the tables, before everything is launched.
    pub(super) fn place_transfers(&mut self) {
        let mut requests = std::mem::take(&mut self.requests);
        for transfers in requests.transfers() {
            transfers.place = self.table(&transfers.table.bytes());
        }
        self.requests = requests;
    }

    pub(super) fn place(&self, id: BufferId) -> Result<Placed, KernelError> {
        self.places
            .get(id.0)
            .copied()
            .ok_or_else(|| KernelError::shape(format!("there is no buffer {}", id.0)))
    }
}
