//! Planted faults of kernels, looked for with the comparisons that must show them.

use rayon::prelude::*;
use seamproof_kernels::cache::Cache;
use seamproof_kernels::source::Source;
use seamproof_kernels::{Gpu, KernelError};

use super::calls::check_calls;
use super::large::check_large;
use super::levels::check_levels;
use super::mismatch::Mismatch;
use super::quantise::check_quantise;
use super::twins::check_until;
use crate::faults::{Detector, SourceFault};

/// The most calls that a planted fault is looked for with. Each is launched in many ways, and the CPU's part takes a
/// tenth of a second.
const CALLS_MAX: u64 = 200;

/// Compiles edited sources of faults, several at a time, into a cache in which whoever opens a GPU with them finds
/// them: one after the other they take minutes. Of each it compiles the instance that the fault is in; others are
/// compiled when they are launched. A source that does not compile fails again there.
pub fn prepare(faults: &[&SourceFault], cache: &Cache) {
    let edited: Vec<Source> = faults.iter().filter_map(|fault| fault.edit.instance()).collect();
    edited.par_iter().for_each(|source| drop(cache.get(source)));
}

/// Looks for a planted fault with the comparison that must show it. A comparison that draws cases or calls draws at
/// most `cases` of them. Returns the first disagreement, and whether it is one that the fault names, or `None` for a
/// fault that no comparison here shows.
pub fn seen(
    gpu: &Gpu,
    fault: &SourceFault,
    cases: u64,
    seed: u64,
) -> Result<Option<(bool, Option<Mismatch>)>, KernelError> {
    let found = match fault.edit.seen {
        Detector::Bits(_) => check_until(gpu, cases, seed, 1)?.mismatches,
        Detector::Large => check_large(gpu)?,
        Detector::Levels => check_levels(gpu)?,
        Detector::Calls => check_calls(gpu, cases.min(CALLS_MAX), seed, 1)?,
        Detector::Codes => check_quantise(gpu, cases, seed, 1)?,
        Detector::Rungs(_) | Detector::IllegalAddress | Detector::Deadline => return Ok(None),
    };
    let first = found.into_iter().next();
    let named = first.as_ref().is_some_and(|first| match fault.edit.seen {
        Detector::Bits(operations) => operations.contains(&first.operation),
        _ => true,
    });
    Ok(Some((named, first)))
}
