//! Errors of building, loading and launching kernels.

use std::path::PathBuf;

use crate::version::{CUDA_MAJOR_MIN, CudaVersion};

/// An error on the way to a result. Its text says what was asked for, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    /// NVRTC is not installed.
    #[error(
        "libnvrtc was not found; install CUDA's NVRTC (or the Python package nvidia-cuda-nvrtc) and name its folder in \
         LD_LIBRARY_PATH"
    )]
    NvrtcMissing,
    /// This NVRTC does not know sm_90a.
    #[error("NVRTC {0} is too old; sm_90a needs CUDA {CUDA_MAJOR_MIN} or later")]
    NvrtcTooOld(CudaVersion),
    /// A call of NVRTC failed, for a reason outside of the source.
    #[error("NVRTC: {call}: {error}")]
    Nvrtc {
        /// The call.
        call: &'static str,
        /// The answer.
        error: String,
    },
    /// A source does not compile.
    #[error("{file} does not compile:\n{log}")]
    Compile {
        /// The source.
        file: String,
        /// The compiler's log. Each line names a file and a line number.
        log: String,
    },
    /// The assembler warned that a kernel is not what its source says.
    #[error("{file}: the assembler undid what the source asked for:\n{lines}")]
    Undone {
        /// The source.
        file: String,
        /// The warnings.
        lines: String,
    },
    /// The log names no kernel, so that nothing is known of the machine code.
    #[error("{file}: the assembler's log names no kernel: {log:?}")]
    Unjudged {
        /// The source.
        file: String,
        /// The log.
        log: String,
    },
    /// A kernel has too few registers.
    #[error("{file}: {kernel} spills {bytes} bytes of registers to memory")]
    Spills {
        /// The source.
        file: String,
        /// The kernel.
        kernel: String,
        /// The bytes that are stored to memory.
        bytes: u32,
    },
    /// A kernel is launched with other registers than its warps share out. Some warps would wait for theirs for ever.
    #[error(
        "{kernel} has {registers} registers for each of its {threads} threads and shares out {needed}: it would hang; compile \
         it with another NVRTC"
    )]
    Registers {
        /// The kernel.
        kernel: String,
        /// The threads of a block.
        threads: usize,
        /// The registers of a thread at its launch, according to the assembler.
        registers: u32,
        /// The registers that its source relies on.
        needed: u32,
    },
    /// An edited source was not built when one of its kernels was launched. Nothing was launched.
    #[error("{0}")]
    NotBuilt(String),
    /// The driver is not installed.
    #[error("no NVIDIA driver (libcuda) was found; this needs a machine with a Hopper GPU")]
    DriverMissing,
    /// The driver cannot load what NVRTC makes.
    #[error("the NVIDIA driver supports CUDA {have}; CUDA {need} or later is needed")]
    DriverTooOld {
        /// The version that the driver supports.
        have: CudaVersion,
        /// The oldest major version that serves.
        need: i32,
    },
    /// The driver shows no GPU of this number.
    #[error("there is no GPU {ordinal}: the driver shows {count}")]
    NoGpu {
        /// The number that was asked for.
        ordinal: usize,
        /// The number of GPUs that the driver shows.
        count: usize,
    },
    /// The GPU has another architecture.
    #[error(
        "{name} has compute capability {major}.{minor}; the kernels are machine code for 9.0 (H100, H200) and \
         run on nothing else"
    )]
    Architecture {
        /// The GPU.
        name: String,
        /// The major number of its compute capability.
        major: i32,
        /// The minor number of its compute capability.
        minor: i32,
    },
    /// The GPU has no memory left. Nothing is lost.
    #[error("CUDA: {call}: the GPU has no memory left; end other processes on it, or take smaller cases")]
    OutOfMemory {
        /// The call.
        call: String,
    },
    /// A call of the driver failed. The context may be lost: end the process.
    #[error("CUDA: {call}: {error}")]
    Driver {
        /// The call.
        call: String,
        /// The answer.
        error: String,
    },
    /// The folder for compiled kernels was named, and cannot be written.
    #[error("{path}: {source}")]
    Cache {
        /// The folder.
        path: PathBuf,
        /// The reason.
        source: std::io::Error,
    },
    /// The kernels on tensor cores do not take this call.
    #[error("the kernels for tensor cores take no call with {0}; the simple kernels take it")]
    Unserved(String),
    /// Arguments do not fit each other.
    #[error("{0}")]
    Shape(String),
}

impl KernelError {
    /// Returns the error for arguments that do not fit each other.
    pub fn shape(what: impl Into<String>) -> KernelError {
        KernelError::Shape(what.into())
    }
}
