//! Why a kernel cannot be built, loaded or launched.

use std::path::PathBuf;

use crate::version::{CUDA_MAJOR_MIN, CudaVersion};

/// Everything that can go wrong on the way to a result; what was asked for, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    /// There is no NVRTC.
    #[error(
        "libnvrtc was not found; install CUDA's NVRTC (or the Python package nvidia-cuda-nvrtc) and name its folder in \
         LD_LIBRARY_PATH"
    )]
    NvrtcMissing,
    /// An NVRTC that does not know sm_90a.
    #[error("NVRTC {0} is too old; sm_90a needs CUDA {CUDA_MAJOR_MIN} or later")]
    NvrtcTooOld(CudaVersion),
    /// A call of NVRTC that failed for a reason outside of the source.
    #[error("NVRTC: {call}: {error}")]
    Nvrtc {
        /// What was asked for.
        call: &'static str,
        /// What it answered.
        error: String,
    },
    /// A source that does not compile.
    #[error("{file} does not compile:\n{log}")]
    Compile {
        /// The source.
        file: String,
        /// The compiler's log, each line with file and line number.
        log: String,
    },
    /// A warning that says a kernel is not what its source says.
    #[error("{file}: the assembler undid what the source asked for:\n{lines}")]
    Undone {
        /// The source.
        file: String,
        /// The warnings.
        lines: String,
    },
    /// A log that names no kernel, so that nothing is known of the machine code.
    #[error("{file}: the assembler said nothing of any kernel; its log: {log:?}")]
    Unjudged {
        /// The source.
        file: String,
        /// The log.
        log: String,
    },
    /// Registers that do not suffice.
    #[error("{file}: {kernel} spills {bytes} bytes of registers to memory")]
    Spills {
        /// The source.
        file: String,
        /// The kernel.
        kernel: String,
        /// Bytes stored.
        bytes: u32,
    },
    /// A kernel whose launch has other registers than its warps share out: some would wait for theirs for ever.
    #[error(
        "{kernel} has {registers} registers for each of its {threads} threads and shares out {needed}: it would hang; compile \
         it with another NVRTC"
    )]
    Registers {
        /// The kernel.
        kernel: String,
        /// Threads of a block.
        threads: usize,
        /// Registers of a thread at its launch, by the assembler's account.
        registers: u32,
        /// What its source takes for granted.
        needed: u32,
    },
    /// There is no driver.
    #[error("no NVIDIA driver (libcuda) was found; this needs a machine with a Hopper GPU")]
    DriverMissing,
    /// A driver that cannot load what NVRTC makes.
    #[error("the NVIDIA driver supports CUDA {have}; CUDA {need} or later is needed")]
    DriverTooOld {
        /// The driver's version.
        have: CudaVersion,
        /// The oldest that will do.
        need: i32,
    },
    /// There is a driver and no such GPU.
    #[error("there is no GPU {ordinal}: the driver shows {count}")]
    NoGpu {
        /// The one asked for.
        ordinal: usize,
        /// GPUs that the driver shows.
        count: usize,
    },
    /// Another architecture.
    #[error(
        "{name} has compute capability {major}.{minor}; the kernels are machine code for 9.0 (H100, H200) alone and \
         run on nothing else"
    )]
    Architecture {
        /// The GPU.
        name: String,
        /// Its compute capability.
        major: i32,
        /// Its compute capability.
        minor: i32,
    },
    /// The GPU's memory does not suffice; nothing is lost.
    #[error(
        "CUDA: {call}: the GPU has no memory left for it; end what else runs there, or take smaller cases"
    )]
    OutOfMemory {
        /// What was asked for.
        call: String,
    },
    /// A driver call that failed. The context may be lost: end the process.
    #[error("CUDA: {call}: {error}")]
    Driver {
        /// What was asked for.
        call: String,
        /// What it answered.
        error: String,
    },
    /// A folder of compiled kernels that was named and cannot be written.
    #[error("{path}: {source}")]
    Cache {
        /// The folder.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// A call that a kernel does not serve.
    #[error("the kernels for tensor cores take no call with {0}; the simple kernels take it")]
    Unserved(String),
    /// Arguments that do not fit each other.
    #[error("{0}")]
    Shape(String),
}

impl KernelError {
    /// An error of arguments that do not fit each other.
    pub fn shape(what: impl Into<String>) -> KernelError {
        KernelError::Shape(what.into())
    }
}
