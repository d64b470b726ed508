//! Errors of a device: operations that it refuses or cannot finish.

/// Reason why an operation cannot be executed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// Rows, heads or a buffer that do not exist, or buffers that do not fit each other.
    #[error("{0}")]
    Shape(String),
    /// An operation that only an executor can do.
    #[error("a device does not execute {0}")]
    NotLocal(&'static str),
    /// The device has no memory left for the request.
    #[error("the device is out of memory: {0}")]
    OutOfMemory(String),
    /// The device has no kernel for the request, since it could not be built.
    #[error("a kernel could not be built: {0}")]
    NotBuilt(String),
    /// The device itself failed, and everything that it held is lost.
    #[error("the device failed: {0}")]
    Failed(String),
}
