//! A pack that mixes one long sequence with many short ones, beside the sum of the times of its parts.

use std::io::Write;

use seamproof_kernels::Gpu;
use seamproof_kernels::backward::DqOrder;
use seamproof_kernels::forward::AttentionKernels;

use super::attention::forward_ms;
use super::backward::backward_ms;
use super::error::BenchError;
use super::tracks::{BenchCell, Column, cells, tracks};
use crate::problem::{legal, packed};
use crate::ready::NormalNumbers;

/// The long sequence, which is a track too, and the short ones.
const LONG: usize = 16_384;
const LONG_TRACK: &str = "one_16384";
const SHORT: (usize, usize) = (1000, 64);
/// The aim: the most that the pack should take of the sum of its parts.
const AIM: f64 = 1.05;

/// A pass of a pack, in milliseconds.
type Timed<'a> = &'a dyn Fn(&BenchCell) -> Result<f64, BenchError>;

/// Prints for each pass and named column, or for all columns, the milliseconds of the pack and of its parts, and their ratio.
pub fn mixed(gpu: &Gpu, columns: &[String], to: &mut dyn Write) -> Result<(), BenchError> {
    let cells = cells(&tracks()?, [&[LONG_TRACK.to_owned()], columns])?;
    let numbers = NormalNumbers::new(gpu)?;
    writeln!(
        to,
        "{}: one sequence of {LONG} with {} of {}; aim of pack ÷ sum of parts: {AIM} at most",
        gpu.name()?,
        SHORT.0,
        SHORT.1
    )?;
    for BenchCell { column, .. } in cells {
        let forward = |cell: &BenchCell| forward_ms(gpu, cell, AttentionKernels::Tuned, &numbers);
        line(to, column, "forward", &forward)?;
        for order in DqOrder::ALL {
            let backward = |cell: &BenchCell| backward_ms(gpu, cell, order, &numbers);
            line(to, column, &format!("backward, {}", order.name()), &backward)?;
        }
    }
    Ok(())
}

fn line(to: &mut dyn Write, column: Column, pass: &str, timed: Timed) -> Result<(), BenchError> {
    let (long, short) = (vec![LONG], vec![SHORT.1; SHORT.0]);
    let both = [&long[..], &short].concat();
    let ms = |lengths: &[usize]| {
        let pairs = lengths.iter().map(|&length| (length, length));
        let problem = legal(packed(pairs, column.heads, column.dim, column.mask))?;
        timed(&BenchCell { track: "mixed".to_owned(), column, problem })
    };
    let (long, short, both) = (ms(&long)?, ms(&short)?, ms(&both)?);
    writeln!(
        to,
        "{:<12} {pass:<16} pack {both:>8.4} ms   parts {long:>8.4} + {short:.4} ms   ratio {:.3}",
        column.name,
        both / (long + short)
    )?;
    Ok(to.flush()?)
}
