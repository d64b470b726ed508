//! How fast the kernels are, each against a peer in the same run.

mod attention;
mod backward;
mod figures;
mod peer;
mod pools;
mod thd;
mod tracks;

use std::io;
use std::time::{Duration, Instant};

pub use attention::{Attention, Subject, attention, problems};
pub use thd::thd;

use crate::error::KernelError;
use crate::gpu::Graph;

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

/// Median milliseconds of a recorded graph, after a warm-up of at least one repetition.
fn median_ms(graph: &Graph, warm_up: Duration, repetitions: usize) -> Result<f64, KernelError> {
    let begin = Instant::now();
    while {
        graph.time()?;
        begin.elapsed() < warm_up
    } {}
    let mut times = (0..repetitions).map(|_| graph.time()).collect::<Result<Vec<f32>, _>>()?;
    times.sort_by(f32::total_cmp);
    Ok(f64::from(times[times.len() / 2]))
}
