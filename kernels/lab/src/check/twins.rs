//! Every kernel against its twin on the CPU, bit for bit, on random cases.
//!
//! A case is an *image*: all tensors and tables of one launch in one stretch of memory, with guard bands before,
//! between and after them. The image goes to the device, and the kernel runs. The whole image that comes back must
//! equal the one that the twin made: outputs, inputs, padding rows and guards alike. Every case runs twice. The
//! outputs, and the rows that nobody may read, are filled with one poison and then with another.
//!
//! Cases aim at the seams: no sequence, empty ones, thousands, a first offset, gaps, slack, whole padding, odd lengths,
//! rows of any number of bytes on any alignment, statistics of −∞. In every third case of an operation the tables of
//! slots are of i64, and are narrowed before the launch.

use seamproof_kernels::memory::DeviceBuffer;
use seamproof_kernels::{Gpu, KernelError};

use super::draw::CaseDraw;
use super::image::{Image, ImageLaunch, PlacedImage};
use super::mismatch::Mismatch;
use super::{elements, moves, regions, tables};

/// The most bytes of an image.
const IMAGE_BYTES: usize = 64 << 20;
/// The two fillings of what may not be read: NaN of bf16, fp16 and f32, and large finite numbers.
const POISONS: [u8; 2] = [0xff, 0x7b];

/// The cases of one operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OperationTally {
    /// The operation.
    pub operation: &'static str,
    /// The cases that were compared, each with two poisons.
    pub cases: u64,
    /// The cases in which the launch changed at least one byte.
    pub wrote: u64,
}

/// The result of a check.
#[derive(Clone, Debug, Default)]
pub struct CheckOutcome {
    /// The cases of each operation.
    pub tallies: Vec<OperationTally>,
    /// The disagreements, [`MISMATCHES_MAX`] at most.
    pub mismatches: Vec<Mismatch>,
}

/// The most disagreements that are kept.
pub const MISMATCHES_MAX: usize = 20;

/// A function that builds a case's image and returns the case's launch.
type MakeCase = fn(&mut CaseDraw, &mut Image) -> ImageLaunch;

/// The operations, each with the cases that it is checked on.
const OPERATIONS: [(&str, MakeCase); 24] = [
    ("reorder", moves::reorder),
    ("copy valid", moves::copy_valid),
    ("fill padding", moves::fill_padding),
    ("read half", moves::read_half),
    ("write half", moves::write_half),
    ("valid mask", moves::valid_mask),
    ("partition indices", tables::partition_indices),
    ("rank slots", tables::rank_slots),
    ("cu_seqlens on rank", tables::cu_seqlens),
    ("ring segments", tables::ring_segments),
    ("all-gather segments", tables::all_gather_segments),
    ("segment runs", tables::runs),
    ("merge of statistics", elements::statistics),
    ("merge of out", elements::merge_out),
    ("accumulation", elements::accumulate),
    ("half statistic", elements::half_statistic),
    ("largest logit", elements::max_logit),
    ("all-gather backward segments", tables::all_gather_backward_segments),
    ("segment sequences", tables::sequences),
    ("convert", moves::convert),
    ("narrow tables", tables::narrow),
    ("told call", tables::told_call),
    ("layer", regions::layer),
    ("rotation", regions::rotate),
];
/// The number of an operation's cases among which one has tables of i64.
const WIDE_ONE_IN: u64 = 3;

/// Runs `cases` cases from a seed, the operations in turn.
pub fn check(gpu: &Gpu, cases: u64, seed: u64) -> Result<CheckOutcome, KernelError> {
    check_until(gpu, cases, seed, usize::MAX)
}

/// Runs cases like [`check`], and stops after `enough` disagreements.
pub fn check_until(gpu: &Gpu, cases: u64, seed: u64, enough: usize) -> Result<CheckOutcome, KernelError> {
    let arena = gpu.allocate(IMAGE_BYTES)?;
    let mut outcome = CheckOutcome {
        tallies: OPERATIONS
            .iter()
            .map(|&(operation, _)| OperationTally { operation, cases: 0, wrote: 0 })
            .collect(),
        mismatches: Vec::new(),
    };
    for case in 0..cases {
        let index = (case % OPERATIONS.len() as u64) as usize;
        let (operation, make) = OPERATIONS[index];
        let (mut wrote, mut found) = (false, None);
        for poison in POISONS {
            let (changed, mismatch) = run(gpu, &arena, make, (seed, case), poison)?;
            wrote |= changed;
            found = found.or(mismatch);
        }
        outcome.tallies[index].cases += 1;
        outcome.tallies[index].wrote += u64::from(wrote);
        if let Some((place, what, bytes)) = found.filter(|_| outcome.mismatches.len() < MISMATCHES_MAX) {
            outcome.mismatches.push(Mismatch { operation, case, place, what, bytes });
        }
        if outcome.mismatches.len() >= enough {
            break;
        }
    }
    Ok(outcome)
}

/// A difference: its place, the case, and the number of bytes.
type Difference = (String, String, usize);

/// Runs one case with one poison. Returns whether anything was to be written, and the difference.
fn run(
    gpu: &Gpu,
    arena: &DeviceBuffer,
    make: MakeCase,
    (seed, case): (u64, u64),
    poison: u8,
) -> Result<(bool, Option<Difference>), KernelError> {
    let mut image = Image::new(poison);
    image.wide = (case / OPERATIONS.len() as u64) % WIDE_ONE_IN == WIDE_ONE_IN - 1;
    let mut draw = CaseDraw::new(seed, case);
    let launch = make(&mut draw, &mut image);
    image.close();
    let area = arena.area().part(0..image.before.len())?;
    gpu.write(area, &image.before)?;
    launch(gpu, &PlacedImage { area, fields: &image.fields })?;
    let got = gpu.read(area)?;
    let difference = image.difference(&got).map(|(place, bytes)| (place, draw.what.clone(), bytes));
    Ok((image.before != image.after, difference))
}
