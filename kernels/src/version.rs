//! Versions of CUDA.

use std::fmt;

/// The oldest major version of NVRTC and of a driver that serves. Its compiler is the first that knows sm_90a.
pub const CUDA_MAJOR_MIN: i32 = 12;

/// A version of CUDA.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct CudaVersion {
    /// The 13 of 13.0.
    pub major: i32,
    /// The 0 of 13.0.
    pub minor: i32,
}

impl fmt::Display for CudaVersion {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}
