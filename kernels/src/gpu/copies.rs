//! Memory of a GPU: what is allocated, written, read, copied and filled.

use cudarc::driver::result;
use seamproof_oracle::Format;

use super::{Gpu, failed};
use crate::codec::{element_bytes, format_number, load, store};
use crate::error::KernelError;
use crate::memory::{Area, DeviceBuffer, Staging};

impl Gpu {
    /// Allocates memory. Its contents are undefined.
    pub fn allocate(&self, bytes: usize) -> Result<DeviceBuffer, KernelError> {
        self.bind()?;
        DeviceBuffer::allocate(&self.context, bytes).map_err(failed(&format!("allocate {bytes} bytes")))
    }

    /// Allocates memory with these contents.
    pub fn upload(&self, contents: &[u8]) -> Result<DeviceBuffer, KernelError> {
        let buffer = self.allocate(contents.len())?;
        self.write(buffer.area(), contents)?;
        Ok(buffer)
    }

    /// Allocates memory with these elements in bf16, fp16 or f32, which must hold them.
    pub fn upload_elements(&self, elements: &[f32], format: Format) -> Result<DeviceBuffer, KernelError> {
        self.upload(&stored(elements, format)?)
    }

    /// Allocates memory with these numbers.
    pub fn upload_i32(&self, numbers: &[i32]) -> Result<DeviceBuffer, KernelError> {
        let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        self.upload(&bytes)
    }

    /// Overwrites an area, after everything that was launched.
    pub fn write(&self, to: Area, contents: &[u8]) -> Result<(), KernelError> {
        if to.bytes() != contents.len() {
            let what = format!("{} bytes for an area of {}", contents.len(), to.bytes());
            return Err(KernelError::shape(what));
        }
        self.bind()?;
        // The copy goes to the launches' stream. The driver's synchronous copy returns before the bytes are there,
        // and launches of other streams do not wait for them.
        // SAFETY: the area is that long, its buffer is alive, and so are the contents until the stream is done.
        unsafe { result::memcpy_htod_async(to.address(), contents, self.stream.cu_stream()) }
            .map_err(failed("copy to the device"))?;
        self.finish()
    }

    /// Overwrites the beginning of an area, after everything that was launched on the stream that launches go to,
    /// without waiting: when the call returns, the driver has taken the pageable contents over.
    pub(crate) fn send(&self, to: Area, contents: &[u8]) -> Result<(), KernelError> {
        let to = to.part(0..contents.len())?;
        if contents.is_empty() {
            return Ok(());
        }
        let stream = self.current();
        self.bind()?;
        // SAFETY: the area is that long and its buffer is alive. Pageable contents are staged before the call
        // returns.
        unsafe { result::memcpy_htod_async(to.address(), contents, stream.cu_stream()) }
            .map_err(failed("copy to the device"))
    }

    /// Allocates page-locked host memory of zeros.
    pub(crate) fn staging(&self, bytes: usize) -> Result<Staging, KernelError> {
        self.bind()?;
        Staging::allocate(&self.context, bytes).map_err(failed("allocate host memory"))
    }

    /// Returns the first bytes of staging memory, after all copies from and to it.
    pub(crate) fn staged<'s>(
        &self,
        staging: &'s mut Staging,
        bytes: usize,
    ) -> Result<&'s mut [u8], KernelError> {
        self.finish()?;
        staging.first(bytes)
    }

    /// Copies the first bytes of staging memory to the beginning of an area, without waiting.
    pub(crate) fn send_staged(
        &self,
        to: Area,
        staging: &mut Staging,
        bytes: usize,
    ) -> Result<(), KernelError> {
        let to = to.part(0..bytes)?;
        let contents = self.staged(staging, bytes)?;
        self.bind()?;
        // SAFETY: the area is that long and its buffer is alive. Staging memory is neither touched nor freed before
        // the stream is done.
        unsafe { result::memcpy_htod_async(to.address(), contents, self.stream.cu_stream()) }
            .map_err(failed("copy to the device"))
    }

    /// Copies the beginning of an area to staging memory, after everything that was launched, and waits for it.
    pub(crate) fn receive_staged<'s>(
        &self,
        from: Area,
        staging: &'s mut Staging,
        bytes: usize,
    ) -> Result<&'s [u8], KernelError> {
        let from = from.part(0..bytes)?;
        let contents = staging.first(bytes)?;
        self.bind()?;
        // SAFETY: the area is that long, its buffer is alive, and so is the host memory until the stream is done.
        unsafe { result::memcpy_dtoh_async(contents, from.address(), self.stream.cu_stream()) }
            .map_err(failed("copy from the device"))?;
        self.finish()?;
        Ok(contents)
    }

    /// Overwrites an area with these elements, as [`Gpu::upload_elements`] stores them.
    pub fn write_elements(&self, to: Area, elements: &[f32], format: Format) -> Result<(), KernelError> {
        self.write(to, &stored(elements, format)?)
    }

    /// Returns the elements of an area in bf16, fp16 or f32.
    pub fn read_elements(&self, from: Area, format: Format) -> Result<Vec<f32>, KernelError> {
        format_number("elements", format)?;
        let mut elements = vec![0.0; from.bytes() / element_bytes(format)];
        load(format, &self.read(from)?, &mut elements);
        Ok(elements)
    }

    /// Returns the contents of an area, after everything that was launched.
    pub fn read(&self, from: Area) -> Result<Vec<u8>, KernelError> {
        let mut bytes = vec![0_u8; from.bytes()];
        self.bind()?;
        // SAFETY: the area is that long, its buffer is alive, and so is the host memory until the stream is done.
        unsafe { result::memcpy_dtoh_async(&mut bytes, from.address(), self.stream.cu_stream()) }
            .map_err(failed("copy from the device"))?;
        self.finish()?;
        Ok(bytes)
    }

    /// Copies an area by the driver's own means, without waiting.
    pub fn copy(&self, from: Area, to: Area) -> Result<(), KernelError> {
        if from.bytes() != to.bytes() || from.overlaps(to) {
            return Err(KernelError::shape("a copy needs two areas of one length that lie apart"));
        }
        let stream = self.current();
        self.bind()?;
        // SAFETY: both areas are that long, and their buffers are alive.
        unsafe { result::memcpy_dtod_async(to.address(), from.address(), from.bytes(), stream.cu_stream()) }
            .map_err(failed("copy"))
    }

    /// Fills an area with a byte, without waiting.
    pub fn fill(&self, to: Area, byte: u8) -> Result<(), KernelError> {
        if to.bytes() == 0 {
            return Ok(());
        }
        self.bind()?;
        // SAFETY: the area is that long, and its buffer is alive.
        unsafe { result::memset_d8_async(to.address(), byte, to.bytes(), self.current().cu_stream()) }
            .map_err(failed("fill"))
    }
}

/// Returns elements as kernels read them.
fn stored(elements: &[f32], format: Format) -> Result<Vec<u8>, KernelError> {
    format_number("elements", format)?;
    let mut bytes = vec![0; elements.len() * element_bytes(format)];
    store(format, elements, &mut bytes);
    Ok(bytes)
}
