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
    repeated(warm_up, || graph.time())?;
    let mut times = (0..repetitions).map(|_| graph.time()).collect::<Result<Vec<f32>, _>>()?;
    times.sort_by(f32::total_cmp);
    Ok(f64::from(times[times.len() / 2]))
}

/// Mean milliseconds of a recorded graph that is repeated for a time, after a warm-up; each of at least one repetition.
fn mean_ms(graph: &Graph, warm_up: Duration, measured: Duration) -> Result<f64, KernelError> {
    repeated(warm_up, || graph.time())?;
    Ok(mean(&repeated(measured, || graph.time())?))
}

/// What each repetition took, repeated until a time on the clock is over, at least once.
fn repeated<E>(time: Duration, mut repetition: impl FnMut() -> Result<f32, E>) -> Result<Vec<f32>, E> {
    let begin = Instant::now();
    let mut times = vec![repetition()?];
    while begin.elapsed() < time {
        times.push(repetition()?);
    }
    Ok(times)
}

fn mean(times: &[f32]) -> f64 {
    times.iter().copied().map(f64::from).sum::<f64>() / times.len() as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repetitions_go_on_until_the_time_is_over() {
        let (each, time) = (Duration::from_millis(2), Duration::from_millis(40));
        let (begin, mut number) = (Instant::now(), 0.0);
        let times = repeated(time, || {
            std::thread::sleep(each);
            number += 1.0;
            Ok::<f32, String>(number)
        });
        let times = times.unwrap();
        assert!(begin.elapsed() >= time);
        assert!((1..=20).contains(&times.len()), "{times:?}");
        assert!(times.iter().zip(1..).all(|(&time, number)| time == number as f32), "{times:?}");
    }

    #[test]
    fn a_repetition_that_is_longer_than_the_time_counts() {
        assert_eq!(repeated(Duration::ZERO, || Ok::<f32, String>(7.0)), Ok(vec![7.0]));
    }

    #[test]
    fn a_repetition_that_fails_ends_it() {
        let mut times = [Ok(1.0), Err("no GPU")].into_iter();
        assert_eq!(repeated(Duration::MAX, || times.next().unwrap()), Err("no GPU"));
    }

    #[test]
    fn a_mean_counts_slow_repetitions_and_fast_ones() {
        assert_eq!(mean(&[1.0, 1.0, 1.0, 5.0]), 2.0);
    }
}
