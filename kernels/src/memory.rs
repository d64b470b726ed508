//! Memory of a GPU, and host memory that a GPU copies from and to.
#![allow(unsafe_code, reason = "memory of the CUDA driver")]

use std::ffi::c_void;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::{CudaContext, DriverError, result};

use crate::error::KernelError;

/// A type of kernel arguments.
///
/// # Safety
///
/// The type is `repr(C)` or a primitive, and its bytes mean the same in the kernel.
pub unsafe trait Argument {}
// SAFETY: primitives.
unsafe impl Argument for u32 {}
// SAFETY: primitives.
unsafe impl Argument for i32 {}
// SAFETY: primitives.
unsafe impl Argument for i64 {}
// SAFETY: addresses are 64-bit numbers on the device too.
unsafe impl Argument for u64 {}

/// Memory of a GPU, freed with its owner.
#[derive(Debug)]
pub struct DeviceBuffer {
    address: u64,
    bytes: usize,
    context: Arc<CudaContext>,
}

/// Page-locked host memory, which the device copies from and to by itself.
#[derive(Debug)]
pub(crate) struct Staging {
    address: *mut u8,
    bytes: usize,
    context: Arc<CudaContext>,
}

// SAFETY: nobody else has this host memory, and any thread may use it.
unsafe impl Send for Staging {}

/// A part of a [`DeviceBuffer`].
#[derive(Clone, Copy, Debug)]
pub struct Area<'a> {
    address: u64,
    bytes: usize,
    buffer: PhantomData<&'a DeviceBuffer>,
}

impl DeviceBuffer {
    /// Allocates memory in a context that is bound to this thread. Its contents are undefined.
    pub(crate) fn allocate(context: &Arc<CudaContext>, bytes: usize) -> Result<DeviceBuffer, DriverError> {
        // SAFETY: apart from kernels under test, nobody reads the memory before it is written. An allocation is never
        // empty.
        let address = unsafe { result::malloc_sync(bytes.max(1)) }?;
        Ok(DeviceBuffer { address, bytes, context: context.clone() })
    }

    /// Returns the whole buffer.
    pub fn area(&self) -> Area<'_> {
        Area { address: self.address, bytes: self.bytes, buffer: PhantomData }
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        // SAFETY: the memory was allocated once and is freed once, and the driver waits for the kernels that use it.
        // A failure is one of an earlier launch, and shows at the next call.
        let _ = self.context.bind_to_thread().and_then(|()| unsafe { result::free_sync(self.address) });
    }
}

impl Staging {
    /// Allocates zeros in a context that is bound to this thread.
    pub(crate) fn allocate(context: &Arc<CudaContext>, bytes: usize) -> Result<Staging, DriverError> {
        // SAFETY: an allocation is never empty, and is written before it is read.
        let address = unsafe {
            let address = result::malloc_host(bytes.max(1), 0)?.cast::<u8>();
            address.write_bytes(0, bytes);
            address
        };
        Ok(Staging { address, bytes, context: context.clone() })
    }

    /// Returns the length in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the first bytes, for copies. While they are borrowed, no copy of the device may run that the caller
    /// did not start.
    pub(crate) fn first(&mut self, bytes: usize) -> Result<&mut [u8], KernelError> {
        if bytes > self.bytes {
            return Err(KernelError::shape(format!("{bytes} bytes staged in {}", self.bytes)));
        }
        // SAFETY: the memory is that long and holds numbers, and nobody else has it.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.address, bytes) })
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        // SAFETY: the memory was allocated once and is freed once, after all copies. Nobody could act on a failure.
        let _ = self
            .context
            .bind_to_thread()
            .and_then(|()| self.context.synchronize())
            .and_then(|()| unsafe { result::free_host(self.address.cast::<c_void>()) });
    }
}

impl<'a> Area<'a> {
    /// Returns an area of no buffer, for tests of code that never touches the memory.
    #[cfg(test)]
    pub(crate) fn nowhere(address: u64, bytes: usize) -> Area<'a> {
        Area { address, bytes, buffer: PhantomData }
    }

    /// Returns the length in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns a range of its bytes.
    pub fn part(self, bytes: Range<usize>) -> Result<Area<'a>, KernelError> {
        if bytes.start > bytes.end || bytes.end > self.bytes {
            return Err(KernelError::shape(format!(
                "bytes {bytes:?} lie outside of an area of {}",
                self.bytes
            )));
        }
        Ok(Area { address: self.address + bytes.start as u64, bytes: bytes.len(), ..self })
    }

    /// Returns the address on the device.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Returns whether two areas share a byte.
    pub(crate) fn overlaps(&self, other: Area) -> bool {
        let (mine, theirs) = (self.address + self.bytes as u64, other.address + other.bytes as u64);
        self.bytes > 0 && other.bytes > 0 && self.address < theirs && other.address < mine
    }
}
