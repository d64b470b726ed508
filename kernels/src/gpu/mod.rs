//! A GPU: its kernels, launches, copies and times.
//!
//! Launches and copies go to one stream, in order, and do not wait for the host; [`Gpu::finish`] waits. [`Gpu::on`]
//! sends launches to other streams. After an error of the driver the context may be lost, and the process should end.
#![allow(unsafe_code, reason = "the CUDA driver is a C library")]

mod code;
mod copies;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::{CudaContext, CudaEvent, CudaFunction, CudaGraph, CudaStream, DriverError, result, sys};
use seamproof_oracle::Format;

use code::{Code, Function};

use crate::block::{SCAN_THREADS, THREADS, WARP};
use crate::cache::Cache;
use crate::codec::element_bytes;
use crate::error::KernelError;
use crate::memory::{Area, Argument};
use crate::nvrtc;
use crate::source::{Source, sources};
use crate::version::{CUDA_MAJOR_MIN, CudaVersion};

/// The compute capability that the kernels are compiled for.
const CAPABILITY: (i32, i32) = (9, 0);
/// Dynamic shared memory that a block may have without a request for more, in bytes.
const SHARED_ALWAYS: usize = 48 << 10;
/// The threads of a planning kernel where attention has few blocks ([`Gpu::in_blocks`]). With more segments, each
/// thread takes several.
pub const PLANNERS_LEAST: usize = WARP;
/// Most blocks that compare two areas.
const BLOCKS_OF_COMPARISON: usize = 256;
/// Most blocks in the first dimension of a grid.
const BLOCKS_MAX: usize = i32::MAX as usize;

/// A GPU with its kernels loaded.
#[derive(Debug)]
pub struct Gpu {
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    /// Further streams, and the number of the stream that launches go to: 0 is `stream`.
    beside: RefCell<Vec<Arc<CudaStream>>>,
    on: Cell<usize>,
    /// The most blocks of a kernel whose blocks stay for a whole launch; `None` for one on each multiprocessor.
    few: Cell<Option<NonZeroUsize>>,
    /// The kernels, which all streams of the GPU share.
    functions: Arc<BTreeMap<String, Kernel>>,
}

/// A kernel. It counts its launches, and knows whether it may be started while earlier ones run, and how much dynamic
/// shared memory its blocks may have.
#[derive(Debug)]
struct Kernel {
    function: Function,
    overlaps: bool,
    launches: AtomicU64,
    shared: Mutex<usize>,
}

/// The driver's description of a tensor in device memory, for the copy engine.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug)]
pub(crate) struct TensorMap([u64; 16]);
// SAFETY: repr(C), `TensorMap` of hopper.cuh.
unsafe impl Argument for TensorMap {}

impl TensorMap {
    /// The description in the place of a tensor that the copy engine does not bring.
    pub(crate) const NONE: TensorMap = TensorMap([0; 16]);
}

/// A tensor of 16-bit elements as the copy engine takes it: four dimensions, the innermost first, and the box that
/// one copy moves.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TiledTensor {
    pub(crate) base: u64,
    pub(crate) format: Format,
    /// The elements of each dimension.
    pub(crate) dims: [usize; 4],
    /// The elements from one entry to the next, along each dimension but the first.
    pub(crate) strides: [usize; 3],
    pub(crate) of_box: [u32; 4],
}

/// Launches that were recorded, and are repeated as one. Their buffers must live as long.
pub struct Graph<'a> {
    graph: CudaGraph,
    gpu: &'a Gpu,
}

/// Returns the largest number of blocks up to `blocks` that are whole clusters of so many; one cluster at least.
pub(crate) fn whole_clusters(blocks: usize, cluster: usize) -> usize {
    blocks.max(cluster) / cluster * cluster
}

/// Has a cell hold a value while `work` runs, and what it held before afterwards, even if `work` panics.
fn during<V: Copy, T>(cell: &Cell<V>, value: V, work: impl FnOnce() -> T) -> T {
    struct Restored<'a, V: Copy>(&'a Cell<V>, V);
    impl<V: Copy> Drop for Restored<'_, V> {
        fn drop(&mut self) {
            self.0.set(self.1);
        }
    }
    let _restored = Restored(cell, cell.replace(value));
    work()
}

fn failed(call: &str) -> impl Fn(DriverError) -> KernelError + '_ {
    move |error| match error {
        DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY) => {
            KernelError::OutOfMemory { call: call.to_owned() }
        }
        error => KernelError::Driver { call: call.to_owned(), error: error.to_string() },
    }
}

/// Returns the version of CUDA that the driver supports.
pub fn driver_version() -> Result<CudaVersion, KernelError> {
    // SAFETY: loads a library by its name.
    if !unsafe { sys::is_culib_present() } {
        return Err(KernelError::DriverMissing);
    }
    let mut version = 0;
    // SAFETY: a valid place for a number.
    unsafe { sys::cuDriverGetVersion(&mut version) }.result().map_err(failed("driver version"))?;
    Ok(CudaVersion { major: version / 1000, minor: version % 1000 / 10 })
}

impl Kernel {
    /// Lets blocks have so many bytes of dynamic shared memory. Threads of the host may need different numbers: the
    /// largest stays.
    fn share(&self, function: &CudaFunction, bytes: usize) -> Result<(), DriverError> {
        let mut most = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        if bytes > *most {
            let size = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            function.set_attribute(size, bytes as i32)?;
            *most = bytes;
        }
        Ok(())
    }
}

/// What launches kernels.
pub trait Launch {
    /// Launches a kernel on a grid: the blocks, the rows of blocks, and the threads of a block. A grid without a block
    /// is no launch.
    fn launch(
        &self,
        kernel: &str,
        grid: (usize, usize, usize),
        arguments: &[&dyn Argument],
    ) -> Result<(), KernelError>;
}

impl Launch for Gpu {
    fn launch(
        &self,
        kernel: &str,
        grid: (usize, usize, usize),
        arguments: &[&dyn Argument],
    ) -> Result<(), KernelError> {
        self.launch_with(kernel, grid, 0, arguments)
    }
}

impl Gpu {
    /// Opens a GPU and loads the production kernels, from `cache` where it has them.
    pub fn open(ordinal: usize, cache: &Cache) -> Result<Gpu, KernelError> {
        Gpu::with_sources(ordinal, cache, &sources())
    }

    /// Opens a GPU and loads the kernels of these sources. A planted fault is an edit of a source's text, which is
    /// compiled and loaded with the first launch of one of its kernels; [`Gpu::record`] cannot do that.
    pub fn with_sources(ordinal: usize, cache: &Cache, sources: &[Source]) -> Result<Gpu, KernelError> {
        let context = open_context(ordinal)?;
        // SAFETY: streams wait for one another where they are told to, and no event need follow a buffer.
        unsafe { context.disable_event_tracking() };
        let stream = context.new_stream().map_err(failed("stream"))?;
        let mut functions = BTreeMap::new();
        for source in sources {
            // An edit renames no kernel.
            let (compiled, _) = cache.get(&source.as_built())?;
            let names: Vec<String> =
                nvrtc::resources(&compiled.log).into_iter().map(|kernel| kernel.kernel).collect();
            let code = Arc::new(Code::of(&context, cache, source));
            if !source.planted {
                code.load(compiled)?;
            }
            for name in names {
                let function = Function::of(&code, &name);
                if !source.planted {
                    function.get()?;
                }
                let (launches, shared) = (AtomicU64::new(0), Mutex::new(SHARED_ALWAYS));
                let overlaps = source.overlaps(&name);
                functions.insert(name, Kernel { function, overlaps, launches, shared });
            }
        }
        Ok(Gpu::of(context, stream, Arc::new(functions)))
    }

    fn of(
        context: Arc<CudaContext>,
        stream: Arc<CudaStream>,
        functions: Arc<BTreeMap<String, Kernel>>,
    ) -> Gpu {
        Gpu { context, stream, beside: RefCell::default(), on: Cell::new(0), few: Cell::new(None), functions }
    }

    /// Returns the same GPU with streams of its own, for another thread of the host.
    pub fn beside(&self) -> Result<Gpu, KernelError> {
        let stream = self.context.new_stream().map_err(failed("stream"))?;
        Ok(Gpu::of(self.context.clone(), stream, self.functions.clone()))
    }

    /// Sends the launches of `work` to the stream of this number; 0 is the stream of all other work. Any two streams
    /// are in order only where [`Gpu::mark`] and [`Gpu::wait`] say so.
    pub fn on<T>(
        &self,
        stream: usize,
        work: impl FnOnce() -> Result<T, KernelError>,
    ) -> Result<T, KernelError> {
        // Whoever works on a stream may be a thread that has named no context yet.
        self.bind()?;
        while self.beside.borrow().len() < stream {
            let more = self.context.new_stream().map_err(failed("stream"))?;
            self.beside.borrow_mut().push(more);
        }
        during(&self.on, stream, work)
    }

    /// Limits attention on tensor cores to `most` blocks a launch while `work` runs, or to one cluster where that has
    /// more, and plans with [`PLANNERS_LEAST`] threads. Blocks stay for a whole launch: in few, even a small call gives
    /// each several tiles, and a plan has more segments than threads. Results are the same bits, but for dq that is
    /// summed as it comes, and for gradients where tiles of keys would go around (`backward.cu`).
    pub fn in_blocks<T>(&self, most: Option<NonZeroUsize>, work: impl FnOnce() -> T) -> T {
        during(&self.few, most, work)
    }

    /// Returns the blocks of a kernel whose blocks stay for a whole launch: whole clusters of so many, one at least.
    pub(crate) fn staying_blocks(&self, cluster: usize) -> Result<usize, KernelError> {
        Ok(whole_clusters(self.resident_blocks(1)?, cluster))
    }

    /// Returns the blocks of a kernel whose blocks stay for a whole launch, of which a multiprocessor holds `each`.
    pub(crate) fn resident_blocks(&self, each: usize) -> Result<usize, KernelError> {
        let all = each * self.multiprocessors()?;
        Ok(self.few.get().map_or(all, |few| few.get().min(all)))
    }

    /// Returns the threads of a planning kernel.
    pub(crate) fn planners(&self) -> usize {
        if self.few.get().is_some() { PLANNERS_LEAST } else { SCAN_THREADS }
    }

    /// Makes the calls of this thread this GPU's: the driver uses the last context that a thread named.
    fn bind(&self) -> Result<(), KernelError> {
        self.context.bind_to_thread().map_err(failed("context"))
    }

    /// Returns the stream that launches go to.
    fn current(&self) -> Arc<CudaStream> {
        match self.on.get() {
            0 => self.stream.clone(),
            beside => self.beside.borrow()[beside - 1].clone(),
        }
    }

    /// Lets cycles of a multiprocessor pass before the next launch.
    pub(crate) fn hold_up(&self, cycles: u32) -> Result<(), KernelError> {
        self.launch("hold_up", (1, 1, WARP), &[&cycles])
    }

    /// Adds to a 32-bit count the number of words in which two areas of one length differ.
    pub fn differ(&self, a: Area, b: Area, count: Area) -> Result<(), KernelError> {
        let words = a.bytes() / 4;
        if a.bytes() != b.bytes() || !a.bytes().is_multiple_of(4) || count.bytes() != 4 {
            return Err(KernelError::shape(
                "a comparison needs two areas of one length in words, and a count",
            ));
        }
        let blocks = words.div_ceil(THREADS).min(BLOCKS_OF_COMPARISON);
        let [a, b, count] = [a, b, count].map(|area| area.address());
        self.launch("differ", (blocks, 1, THREADS), &[&a, &b, &(words as u64), &count])
    }

    /// Returns a mark behind everything that was launched on a stream.
    pub fn mark(&self, stream: usize) -> Result<CudaEvent, KernelError> {
        self.on(stream, || self.current().record_event(None).map_err(failed("event")))
    }

    /// Makes later launches on a stream wait for a mark.
    pub fn wait(&self, stream: usize, mark: &CudaEvent) -> Result<(), KernelError> {
        self.on(stream, || self.current().wait(mark).map_err(failed("wait for an event")))
    }

    /// Returns the name of the GPU.
    pub fn name(&self) -> Result<String, KernelError> {
        self.context.name().map_err(failed("name"))
    }

    /// Returns the name and the UUID, as `nvidia-smi -L` shows it. No other GPU has that UUID.
    pub fn identity(&self) -> Result<String, KernelError> {
        let bytes = self.context.uuid().map_err(failed("UUID"))?.bytes;
        let hex: String = bytes.iter().map(|&byte| format!("{:02x}", byte as u8)).collect();
        let [a, b, c, d, e] = [0..8, 8..12, 12..16, 16..20, 20..32].map(|part| &hex[part]);
        Ok(format!("{} GPU-{a}-{b}-{c}-{d}-{e}", self.name()?))
    }

    /// Returns the number of multiprocessors.
    pub fn multiprocessors(&self) -> Result<usize, KernelError> {
        self.attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
    }

    /// Returns the highest clock of the multiprocessors, in MHz.
    pub fn clock_mhz(&self) -> Result<usize, KernelError> {
        Ok(self.attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_CLOCK_RATE)? / 1000)
    }

    fn attribute(&self, attribute: sys::CUdevice_attribute) -> Result<usize, KernelError> {
        Ok(self.context.attribute(attribute).map_err(failed("attribute"))? as usize)
    }

    /// Returns a description for the copy engine. Rows of boxes are swizzled in 128 bytes; what lies outside the
    /// tensor reads as zero.
    pub(crate) fn tensor_map(&self, tiled: &TiledTensor) -> Result<TensorMap, KernelError> {
        let format = match tiled.format {
            Format::Bf16 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            Format::Fp16 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
            Format::E4m3 | Format::E5m2 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT8,
            other => {
                return Err(KernelError::shape(format!(
                    "there is no tensor map of {other}; only of bf16, fp16, e4m3 and e5m2"
                )));
            }
        };
        let dims = tiled.dims.map(|count| count.max(1) as u64);
        let strides = tiled.strides.map(|elements| (element_bytes(tiled.format) * elements) as u64);
        let mut map = sys::CUtensorMap { opaque: [0; 16] };
        // SAFETY: the arrays have as many numbers as there are dimensions, and the map is valid memory. Nothing is
        // read from the tensor.
        let encoded = unsafe {
            sys::cuTensorMapEncodeTiled(
                &raw mut map,
                format,
                4,
                tiled.base as *mut c_void,
                dims.as_ptr(),
                strides.as_ptr(),
                tiled.of_box.as_ptr(),
                [1; 4].as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
                sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        encoded.result().map_err(failed("describe a tensor"))?;
        Ok(TensorMap(map.opaque))
    }

    /// Waits for everything that was launched on the stream of this number. Errors of kernels show here.
    pub(crate) fn finish_on(&self, stream: usize) -> Result<(), KernelError> {
        self.on(stream, || self.wait_out(&self.current()))
    }

    /// Waits for everything that was launched on all of its own streams. Errors of kernels show here.
    pub(crate) fn finish_all(&self) -> Result<(), KernelError> {
        let streams = 0..=self.beside.borrow().len();
        { streams }.try_for_each(|stream| self.finish_on(stream))
    }

    /// Waits for everything that was launched. Errors of kernels show here.
    pub fn finish(&self) -> Result<(), KernelError> {
        self.wait_out(&self.stream)
    }

    /// Waits until a stream is done. The driver's own wait spins; where workers are more than cores, that keeps a core
    /// from a worker that has something to do, so that this one gives it away between two looks.
    fn wait_out(&self, stream: &CudaStream) -> Result<(), KernelError> {
        self.bind()?;
        loop {
            // SAFETY: the stream is alive.
            match unsafe { sys::cuStreamQuery(stream.cu_stream()) } {
                sys::CUresult::CUDA_ERROR_NOT_READY => std::thread::yield_now(),
                done => return done.result().map_err(failed("finish")),
            }
        }
    }

    /// Launches a kernel with so many bytes of dynamic shared memory for each block.
    pub(crate) fn launch_with(
        &self,
        kernel: &str,
        (blocks, rows_of_blocks, threads): (usize, usize, usize),
        shared: usize,
        arguments: &[&dyn Argument],
    ) -> Result<(), KernelError> {
        if blocks == 0 || rows_of_blocks == 0 {
            return Ok(());
        }
        if blocks > BLOCKS_MAX || rows_of_blocks > usize::from(u16::MAX) {
            return Err(KernelError::shape(format!("{kernel}: {blocks} × {rows_of_blocks} blocks")));
        }
        let found = self.functions.get(kernel);
        let found = found.ok_or_else(|| KernelError::shape(format!("there is no kernel {kernel}")))?;
        let mut pointers: Vec<*mut c_void> = arguments
            .iter()
            .map(|argument| std::ptr::from_ref(*argument).cast::<c_void>().cast_mut())
            .collect();
        let mut attribute = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue {
                programmaticStreamSerializationAllowed: found.overlaps.into(),
            },
        };
        let stream = self.current();
        let config = sys::CUlaunchConfig {
            gridDimX: blocks as u32,
            gridDimY: rows_of_blocks as u32,
            gridDimZ: 1,
            blockDimX: threads as u32,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shared as u32,
            hStream: stream.cu_stream(),
            attrs: &raw mut attribute,
            numAttrs: 1,
        };
        self.bind()?;
        let function = found.function.get()?;
        found.share(function, shared).map_err(failed(kernel))?;
        let (function, none) = (function.cu_function(), std::ptr::null_mut());
        // SAFETY: the launchers check sizes against the kernels' contracts. Kernels on slots compare rows with the
        // tensors' themselves. Tables of attention calls have been checked; a caller who overwrites one answers for
        // it. A kernel that may be started early waits for earlier launches before it touches anything; the split shape's
        // reads tables before, which were written before its planning kernel began.
        let launched = unsafe { sys::cuLaunchKernelEx(&config, function, pointers.as_mut_ptr(), none) };
        launched.result().map_err(failed(kernel))?;
        found.launches.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Launches a kernel of a source that is not this crate's, with so many bytes of dynamic shared memory.
    ///
    /// # Safety
    ///
    /// The arguments are those that the kernel takes, in its order. What they point to is alive until the launch has
    /// ended, and the kernel reads and writes nothing else.
    pub unsafe fn launch_foreign(
        &self,
        kernel: &str,
        grid: (usize, usize, usize),
        shared: usize,
        arguments: &[&dyn Argument],
    ) -> Result<(), KernelError> {
        self.launch_with(kernel, grid, shared, arguments)
    }

    /// Returns how often each kernel was launched or recorded, by name.
    pub fn launches(&self) -> impl Iterator<Item = (&str, u64)> {
        self.functions.iter().map(|(name, kernel)| (name.as_str(), kernel.launches.load(Ordering::Relaxed)))
    }

    /// Launches some work again and again. Returns the milliseconds on the device from the end of each repetition to that
    /// of the next.
    pub fn times(
        &self,
        repetitions: usize,
        work: impl Fn() -> Result<(), KernelError>,
    ) -> Result<Vec<f32>, KernelError> {
        let flags = Some(sys::CUevent_flags::CU_EVENT_DEFAULT);
        let event = || self.current().record_event(flags).map_err(failed("event"));
        let mut events = vec![event()?];
        for _ in 0..repetitions {
            work()?;
            events.push(event()?);
        }
        events.windows(2).map(|pair| pair[0].elapsed_ms(&pair[1]).map_err(failed("time"))).collect()
    }

    /// Records the launches of `work` as one thing to repeat.
    pub fn record(&self, work: impl FnOnce() -> Result<(), KernelError>) -> Result<Graph<'_>, KernelError> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        self.stream.begin_capture(mode).map_err(failed("record"))?;
        let worked = work();
        let graph = self.stream.end_capture(sys::CUgraphInstantiate_flags(0)).map_err(failed("record"));
        worked?;
        let nothing = || KernelError::shape("nothing was launched while recording");
        Ok(Graph { graph: graph?.ok_or_else(nothing)?, gpu: self })
    }
}

/// Returns the number of GPUs that the driver shows.
pub fn count() -> Result<usize, KernelError> {
    let have = driver_version()?;
    if have.major < CUDA_MAJOR_MIN {
        return Err(KernelError::DriverTooOld { have, need: CUDA_MAJOR_MIN });
    }
    match result::init().and_then(|()| CudaContext::device_count()) {
        Ok(count) => Ok(count as usize),
        Err(DriverError(sys::CUresult::CUDA_ERROR_NO_DEVICE)) => Ok(0),
        Err(error) => Err(failed("initialise")(error)),
    }
}

fn open_context(ordinal: usize) -> Result<Arc<CudaContext>, KernelError> {
    let count = count()?;
    if ordinal >= count {
        return Err(KernelError::NoGpu { ordinal, count });
    }
    let context = CudaContext::new(ordinal).map_err(failed("context"))?;
    let (major, minor) = context.compute_capability().map_err(failed("compute capability"))?;
    if (major, minor) != CAPABILITY {
        let name = context.name().map_err(failed("name"))?;
        return Err(KernelError::Architecture { name, major, minor });
    }
    Ok(context)
}

impl Graph<'_> {
    /// Repeats the launches once.
    pub fn launch(&self) -> Result<(), KernelError> {
        self.graph.launch().map_err(failed("repeat"))
    }

    /// Returns the milliseconds of one repetition on the device.
    pub fn time(&self) -> Result<f32, KernelError> {
        let flags = Some(sys::CUevent_flags::CU_EVENT_DEFAULT);
        let start = self.gpu.stream.record_event(flags).map_err(failed("event"))?;
        self.launch()?;
        let end = self.gpu.stream.record_event(flags).map_err(failed("event"))?;
        start.elapsed_ms(&end).map_err(failed("time"))
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;

    #[test]
    fn a_cell_holds_a_value_for_a_while_even_where_work_panics() {
        let cell = Cell::new(1);
        assert_eq!((during(&cell, 2, || cell.get()), cell.get()), (2, 1));
        let panicked = catch_unwind(AssertUnwindSafe(|| during(&cell, 3, || panic!("work"))));
        assert!(panicked.is_err());
        assert_eq!(cell.get(), 1);
    }
}
