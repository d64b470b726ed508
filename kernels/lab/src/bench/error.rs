//! Errors of benchmarks.

use std::io;

use seamproof_kernels::KernelError;

/// An error of a benchmark.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// The GPU failed.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// The figures could not be printed.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The tracks of this program cannot be read.
    #[error("bench/tracks.json: {0}")]
    Tracks(String),
    /// A gradient is no number.
    #[error(
        "{0}: a gradient is NaN or infinite, so that its figures would mean nothing; `seamproof run --backend cuda` says more"
    )]
    NotFinite(String),
    /// A name is unknown.
    #[error("there is no {what} '{name}'; known: {known}")]
    Unknown {
        /// The kind of name.
        what: &'static str,
        /// The name.
        name: String,
        /// The names that are known.
        known: String,
    },
}
