//! The device itself, its options, and how a run's memory goes to the GPU and back.

use std::num::NonZeroUsize;

use seamproof_simulator::device::DeviceError;
use seamproof_simulator::schedule::BufferId;

use super::run::CudaMemory;
use super::workspace::Workspace;
use super::{image, lanes};
use crate::attend::WeightFormats;
use crate::backward::{DqOrder, Walks};
use crate::error::KernelError;
use crate::forward::AttentionKernels;
use crate::forward_fp8::Fp8Shape;
use crate::memory::Area;

/// The device, for problems with these formats of P and dS.
#[derive(Clone, Copy, Debug)]
pub struct CudaDevice<'w> {
    pub(super) workspace: &'w Workspace,
    pub(super) formats: WeightFormats,
    pub(super) options: DeviceOptions,
}

/// The options of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceOptions {
    /// Whether kernels for packed slots run where they can. If not, every operation but attention goes to the kernels
    /// on tables of rows.
    pub helpers: bool,
    /// The kernels that run forwards and backwards.
    pub attention: AttentionKernels,
    /// The shape of forwards in FP8; `None` for the one that fits each call.
    pub codes: Option<Fp8Shape>,
    /// The order in which backwards on tensor cores sum dq.
    pub dq: DqOrder,
    /// The walks of backwards on tensor cores, all in the long form; `None` for the form and the walks that fit.
    pub walks: Option<Walks>,
    /// The number of streams that the schedule's streams run on. With 1 they run one after the other, in the order in
    /// which each buffer is to be touched.
    pub streams: usize,
    /// The most blocks of attention on tensor cores ([`Gpu::in_blocks`](crate::Gpu::in_blocks)).
    pub blocks: Option<NonZeroUsize>,
    /// The rows of a page, where keys and values lie in pages. The simple kernel then reads through a block table, and
    /// the kernels on tensor cores through runs of rows.
    pub page: Option<usize>,
}

impl Workspace {
    /// Returns the device for problems with these formats of P and dS.
    pub fn device(&self, formats: WeightFormats, options: DeviceOptions) -> CudaDevice<'_> {
        CudaDevice { workspace: self, formats, options }
    }
}

pub(super) fn failed(error: KernelError) -> DeviceError {
    match error {
        KernelError::Shape(what) => DeviceError::Shape(what),
        error @ KernelError::OutOfMemory { .. } => DeviceError::OutOfMemory(error.to_string()),
        KernelError::NotBuilt(what) => DeviceError::NotBuilt(what),
        error => DeviceError::Failed(error.to_string()),
    }
}

impl CudaDevice<'_> {
    fn check_run(&self, memory: &CudaMemory) -> Result<(), KernelError> {
        if memory.run == self.workspace.run.get() {
            return Ok(());
        }
        Err(KernelError::shape("the memory of an earlier run; the workspace has room for one"))
    }

    pub(super) fn send_image(&self, memory: &CudaMemory) -> Result<(), KernelError> {
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

    pub(super) fn launch(&self, memory: &mut CudaMemory) -> Result<(), KernelError> {
        self.check_run(memory)?;
        memory.place_transfers();
        let Workspace { gpu, tables, scratch, .. } = self.workspace;
        tables.reserve(gpu, memory.tables.len())?;
        scratch.reserve(gpu, memory.scratch)?;
        self.workspace.frame(|frame| {
            gpu.send(frame.tables, &memory.tables)?;
            gpu.in_blocks(self.options.blocks, || {
                lanes::launch(gpu, frame, self.options.streams, memory.requests.commands())
            })
        })?;
        memory.tables.clear();
        memory.scratch = 0;
        memory.requests.clear();
        Ok(())
    }

    pub(super) fn receive_image(&self, memory: &mut CudaMemory) -> Result<(), KernelError> {
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
