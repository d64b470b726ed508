//! Times of launches.
//!
//! The time of a launch depends on what the GPU did before. Seen on an H200 with a limit of 700 W: after a rest it
//! draws 740 to 750 W at 1770 MHz for about 0.75 s. Then its power controller steps in, and at 0.85 s a launch of
//! 1.22 ms takes 1.52. From then on the clock swings around the limit, 1620 to 1755 MHz with a period of about 0.8 s:
//! a launch is up to 3 % faster or slower, less and less over seconds.
//!
//! So nothing counts before the first dip is over, and then whole swings count. Their mean is what a long run gets; a
//! short look, or a median, picks a phase. Otherwise whichever is measured after a rest, ours or the peer's, seems
//! faster than the one that follows another's load.

use std::time::{Duration, Instant};

use seamproof_kernels::gpu::Graph;
use seamproof_kernels::{Gpu, KernelError};

/// The way in which a figure is taken.
#[derive(Clone, Copy, Debug)]
pub(super) struct Timing {
    /// The sets of tensors that launches take in turn.
    pub(super) sets: usize,
    /// The launches of a repetition.
    pub(super) launches: usize,
    /// The time of repetitions before anything counts, at least one. A GPU that rested runs faster than its power
    /// limit allows.
    pub(super) warm_up: Duration,
    /// The time of the repetitions whose mean counts, at least one.
    pub(super) measured: Duration,
}

/// The warm-up lasts until the power controller's first dip is over. Then three of its swings are measured.
pub(super) const TIMING: Timing = Timing {
    sets: 2,
    launches: 8,
    warm_up: Duration::from_millis(1500),
    measured: Duration::from_millis(2400),
};
/// The milliseconds from which a launch is in a graph only once for each set. The gaps between such launches do not
/// matter, and a longer graph would end long after the time is over.
const SLOW_MS: f64 = 20.0;

/// Returns the mean milliseconds of a launch, which is told the set of tensors whose turn it is.
pub(super) fn time(gpu: &Gpu, launch: impl Fn(usize) -> Result<(), KernelError>) -> Result<f64, KernelError> {
    let graph =
        |launches: usize| gpu.record(|| (0..launches).try_for_each(|number| launch(number % TIMING.sets)));
    let slow = f64::from(graph(TIMING.sets)?.time()?) > SLOW_MS * TIMING.sets as f64;
    let launches = if slow { TIMING.sets } else { TIMING.launches };
    Ok(mean_ms(&graph(launches)?, TIMING.warm_up, TIMING.measured)? / launches as f64)
}

/// Returns the median milliseconds of a recorded graph, after a warm-up of at least one repetition.
pub(super) fn median_ms(graph: &Graph, warm_up: Duration, repetitions: usize) -> Result<f64, KernelError> {
    repeated(warm_up, || graph.time())?;
    let mut times = (0..repetitions).map(|_| graph.time()).collect::<Result<Vec<f32>, _>>()?;
    times.sort_by(f32::total_cmp);
    Ok(f64::from(times[times.len() / 2]))
}

/// Returns the mean milliseconds of a recorded graph that is repeated for a time, after a warm-up. Both have at least
/// one repetition.
fn mean_ms(graph: &Graph, warm_up: Duration, measured: Duration) -> Result<f64, KernelError> {
    repeated(warm_up, || graph.time())?;
    Ok(mean(&repeated(measured, || graph.time())?))
}

/// Returns the time of each repetition, repeated until a time on the clock is over, at least once.
pub(super) fn repeated<E>(
    time: Duration,
    mut repetition: impl FnMut() -> Result<f32, E>,
) -> Result<Vec<f32>, E> {
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
