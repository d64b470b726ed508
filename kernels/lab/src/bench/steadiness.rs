//! Steadiness of attention: how far the slowest launches of many are from the median, and how long the first one takes.
//!
//! Launches follow one another on one stream with an event between each two, and no wait of the host. Each time counts
//! what the GPU does from one event to the next, and its waiting where the host asks too slowly. The GPU has been busy for
//! a while before (`timing`).

use std::io::Write;
use std::time::{Duration, Instant};

use seamproof_kernels::backward::{BackwardMode, DqOrder};
use seamproof_kernels::{Gpu, KernelError};

use super::error::BenchError;
use super::timing::repeated;
use super::tracks::{BenchCell, cells, tracks};
use crate::ready::{ForwardBuffers, NormalNumbers, ReadyBackward, forward_launcher};

/// The aim: the most that the 99th percentile should be of the median.
const AIM: f64 = 1.05;
/// The time of launches before any counts: until the power controller's first dip is over, and a swing more.
const WARM_UP: Duration = Duration::from_millis(2500);
/// The launches between two looks at the clock.
const BETWEEN_LOOKS: usize = 16;

/// Prints the median and the 99th percentile of so many launches of each pass on each cell, and their ratio. Says how
/// long the first launch took from `opened` on, when the program asked for the GPU.
pub fn steadiness(
    gpu: &Gpu,
    opened: Instant,
    (launches, [rows, columns]): (usize, [&[String]; 2]),
    to: &mut dyn Write,
) -> Result<(), BenchError> {
    let cells = cells(&tracks()?, [rows, columns])?;
    let numbers = NormalNumbers::new(gpu)?;
    writeln!(to, "{}; {launches} launches of each pass; aim of p99 ÷ median: {AIM} at most", gpu.name()?)?;
    for (index, cell) in cells.iter().enumerate() {
        let problem = &cell.problem;
        let buffers = ForwardBuffers::new(gpu, problem, &numbers)?;
        let forward = forward_launcher(gpu, problem, None)?;
        let launch = || forward(&buffers.forward(problem));
        if index == 0 {
            launch()?;
            gpu.finish()?;
            writeln!(to, "first launch {:.2} s after the GPU was asked for", opened.elapsed().as_secs_f64())?;
        }
        line(to, cell, "forward", &times(gpu, launches, launch)?)?;
        let ready = ReadyBackward::new(gpu, problem, &numbers, 1)?;
        for order in DqOrder::ALL {
            let launch = || ready.launch(BackwardMode::overwrite(order), &ready.tensors(0));
            line(to, cell, &format!("backward, {}", order.name()), &times(gpu, launches, launch)?)?;
        }
    }
    Ok(())
}

/// Returns the milliseconds of each of some launches, after a warm-up.
fn times(
    gpu: &Gpu,
    launches: usize,
    launch: impl Fn() -> Result<(), KernelError>,
) -> Result<Vec<f32>, KernelError> {
    repeated(WARM_UP, || {
        (0..BETWEEN_LOOKS).try_for_each(|_| launch())?;
        gpu.finish().map(|()| 0.0)
    })?;
    gpu.times(launches, launch)
}

fn line(to: &mut dyn Write, cell: &BenchCell, pass: &str, times: &[f32]) -> Result<(), BenchError> {
    let [median, late, most] = [0.5, 0.99, 1.0].map(|share| quantile(times, share));
    let BenchCell { track, column, .. } = cell;
    writeln!(
        to,
        "{track:<12} {:<12} {pass:<16} median {median:>8.4} ms   p99 {late:>8.4} ms, ratio {:.3}   longest {most:>8.4} ms",
        column.name,
        late / median
    )?;
    Ok(to.flush()?)
}

/// Returns the number below which this share of some numbers is, or the nearest of them.
fn quantile(numbers: &[f32], share: f64) -> f64 {
    let mut sorted = numbers.to_vec();
    sorted.sort_by(f32::total_cmp);
    let place = (share * sorted.len() as f64).ceil() as usize;
    sorted.get(place.clamp(1, sorted.len().max(1)) - 1).copied().map_or(f64::NAN, f64::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quantile_is_a_number_that_so_many_are_not_above() {
        let numbers: Vec<f32> = (1..=200).rev().map(|n| n as f32).collect();
        assert_eq!([0.0, 0.5, 0.99, 1.0].map(|share| quantile(&numbers, share)), [1.0, 100.0, 198.0, 200.0]);
        assert_eq!(quantile(&[3.0], 0.5), 3.0);
        assert!(quantile(&[], 0.5).is_nan());
    }
}
