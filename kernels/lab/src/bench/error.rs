//! What a benchmark can fail at.

use std::io;

use seamproof_kernels::KernelError;

/// What a benchmark can fail at.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// The GPU.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// The place that figures are printed to.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The tracks of this program.
    #[error("bench/tracks.json: {0}")]
    Tracks(String),
    /// Gradients that are no numbers.
    #[error(
        "{0}: a gradient is NaN or infinite, so that its figures would mean nothing; run `seamproof run --backend cuda`"
    )]
    NotFinite(String),
    /// A name that is of nothing.
    #[error("there is no {what} '{name}'; known: {known}")]
    Unknown {
        /// Of what.
        what: &'static str,
        /// The name.
        name: String,
        /// The names that are.
        known: String,
    },
}
