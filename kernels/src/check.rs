//! Every kernel against its twin on the CPU, bit for bit, on random cases.
//!
//! A case is an *image*: all tensors and tables of one launch in one stretch of memory, a guard band before, between and
//! after them. The image goes to the device, the kernel runs, and the whole image that comes back must equal the one that
//! the twin made: outputs, inputs, padding rows and guards alike. Every case runs twice, the rows that nobody may read
//! and the outputs filled with one poison and then with another.
//!
//! Cases aim at the seams: no sequence, empty ones, thousands, a first offset, gaps, slack, whole padding, odd lengths,
//! rows of any number of bytes on any alignment, statistics of −∞.

mod calls;
mod elements;
mod far;
mod image;
mod large;
mod levels;
mod moves;
mod passes;
mod replay;
mod steady;
mod tables;

use std::fmt;

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use seamproof_oracle::sharding::span_multiple;
use seamproof_oracle::{
    Balance, ContextParallel, Dims, Format, Heads, InputMode, Mask, Pass, Precision, Problem, ProblemFields,
    Rows, Run, Sequence, Sink, Softmax,
};
use seamproof_simulator::shard::Shard;

use crate::error::KernelError;
use crate::faults::{Seen, SourceFault};
use crate::gpu::{Buffer, Gpu};
use crate::tables::Cut;
pub use calls::check_calls;
use image::{Image, Place};
pub use large::check_large;
pub use levels::check_levels;
pub use passes::{instances, launch_instances};
pub use replay::{REPLAYED, Replayed, Tables, replayed};
pub use steady::{Pack, STEADY_DIMS, STEADY_MASKS, STEADY_PACKS, Steady, accumulated, direct, steady};

/// Bytes of an image, at most.
const IMAGE_BYTES: usize = 64 << 20;
/// The two fillings of what may not be read: bf16, fp16 and f32 NaN, and large finite numbers.
const POISONS: [u8; 2] = [0xff, 0x7b];

/// A kernel and its twin that disagree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mismatch {
    /// The operation.
    pub operation: &'static str,
    /// The case's index.
    pub case: u64,
    /// Which tensor, or guard, and where.
    pub place: String,
    /// What the case is.
    pub what: String,
    /// Bytes that differ.
    pub bytes: usize,
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let Mismatch { operation, case, place, what, bytes } = self;
        write!(f, "{operation}, case {case}: {place}; {bytes} bytes differ; {what}")
    }
}

/// Cases of one operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tally {
    /// The operation.
    pub operation: &'static str,
    /// Cases that were compared, each with two poisons.
    pub cases: u64,
    /// Cases in which the launch changed at least one byte.
    pub wrote: u64,
}

/// What a check found.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Each operation's cases.
    pub tallies: Vec<Tally>,
    /// Disagreements, [`MISMATCHES_MAX`] at most.
    pub mismatches: Vec<Mismatch>,
}

/// Disagreements that are kept.
pub const MISMATCHES_MAX: usize = 20;

/// Builds a case's image; gives what to launch on it.
type Make = fn(&mut Draw, &mut Image) -> Launch;
/// What to launch on an image that is on the device.
type Launch = Box<dyn Fn(&Gpu, &Place) -> Result<(), KernelError>>;

/// Every operation.
const OPERATIONS: [(&str, Make); 18] = [
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
];

/// Runs `cases` cases, the operations in turn, from a seed.
pub fn check(gpu: &Gpu, cases: u64, seed: u64) -> Result<Outcome, KernelError> {
    check_until(gpu, cases, seed, usize::MAX)
}

/// The same, and no further than to `enough` disagreements.
pub fn check_until(gpu: &Gpu, cases: u64, seed: u64, enough: usize) -> Result<Outcome, KernelError> {
    let arena = gpu.allocate(IMAGE_BYTES)?;
    let mut outcome = Outcome {
        tallies: OPERATIONS.iter().map(|&(operation, _)| Tally { operation, cases: 0, wrote: 0 }).collect(),
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

/// Calls that a planted fault is looked for with: each is launched in many ways, and the CPU's part takes a tenth of a second.
const CALLS_MAX: u64 = 200;

/// Looks for a planted fault with the comparison that is to show it, on `cases` random cases or calls where it is one of
/// those: the first disagreement, and whether it is one that the fault names. `None` of a fault that no comparison shows.
pub fn seen(
    gpu: &Gpu,
    fault: &SourceFault,
    cases: u64,
    seed: u64,
) -> Result<Option<(bool, Option<Mismatch>)>, KernelError> {
    let found = match fault.seen {
        Seen::Bits(_) => check_until(gpu, cases, seed, 1)?.mismatches,
        Seen::Large => check_large(gpu)?,
        Seen::Levels => check_levels(gpu)?,
        Seen::Calls => check_calls(gpu, cases.min(CALLS_MAX), seed, 1)?,
        Seen::Rungs(_) | Seen::IllegalAddress | Seen::Deadline => return Ok(None),
    };
    let first = found.into_iter().next();
    let named = first.as_ref().is_some_and(|first| match fault.seen {
        Seen::Bits(operations) => operations.contains(&first.operation),
        _ => true,
    });
    Ok(Some((named, first)))
}

/// Where a case differs, what it is, and in how many bytes.
type Difference = (String, String, usize);

/// One case with one poison: whether anything was to be written, and the difference.
fn run(
    gpu: &Gpu,
    arena: &Buffer,
    make: Make,
    (seed, case): (u64, u64),
    poison: u8,
) -> Result<(bool, Option<Difference>), KernelError> {
    let mut image = Image::new(poison);
    let mut draw = Draw::new(seed, case);
    let launch = make(&mut draw, &mut image);
    image.close();
    let area = arena.area().part(0..image.before.len())?;
    gpu.write(area, &image.before)?;
    launch(gpu, &Place { area, fields: &image.fields })?;
    let got = gpu.read(area)?;
    let difference = image.difference(&got).map(|(place, bytes)| (place, draw.what.clone(), bytes));
    Ok((image.before != image.after, difference))
}

/// A pass with its backward, in bf16, of one head dim.
fn fields(sequences: Vec<Sequence>, rows: Rows, heads: Heads, dim: usize, mask: Mask) -> ProblemFields {
    let scale = 1.0 / (dim as f32).sqrt();
    ProblemFields {
        sequences,
        rows,
        heads,
        dims: Dims { qk: dim, v: dim },
        mask,
        softmax: Softmax { scale, softcap: None, sink: Sink::None },
        precision: Precision::uniform(Format::Bf16),
        parallel: ContextParallel::single(),
        mode: InputMode::Flat,
        data_seed: 1,
        pass: Pass::Backward,
    }
}

fn legal(fields: ProblemFields) -> Result<Problem, KernelError> {
    Problem::new(fields).map_err(|error| KernelError::shape(error.to_string()))
}

/// A case's choices, and what they were.
pub(crate) struct Draw {
    rng: ChaCha8Rng,
    what: String,
}

impl Draw {
    fn new(seed: u64, case: u64) -> Draw {
        let mut key = [0; 16];
        key[..8].copy_from_slice(&seed.to_le_bytes());
        key[8..].copy_from_slice(&case.to_le_bytes());
        Draw { rng: ChaCha8Rng::from_seed(*blake3::hash(&key).as_bytes()), what: String::new() }
    }

    fn bits(&mut self) -> u32 {
        self.rng.next_u32()
    }

    /// A number below `end`.
    fn below(&mut self, end: usize) -> usize {
        (self.rng.next_u64() % end.max(1) as u64) as usize
    }

    fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }

    fn note(&mut self, what: &str) {
        self.what.push_str(what);
        self.what.push_str("; ");
    }

    /// How a batch is cut.
    fn cut(&mut self, any_stripe: bool) -> Cut {
        let cp = self.pick(&[1, 1, 2, 2, 3, 4, 8, 5]);
        let stripe = if any_stripe { self.pick(&[1, 1, 2, 3, 16]) } else { 1 };
        let balance = self.pick(&[
            Balance::Contiguous,
            Balance::DualChunk,
            Balance::DualChunk,
            Balance::Striped { stripe },
        ]);
        self.note(&format!("{balance:?} over {cp}"));
        Cut { cp, balance }
    }

    /// Runs in order of rows whose spans are multiples of `unit`, and the rows of their tensor.
    fn runs(&mut self, unit: usize, rows_max: usize) -> (Vec<Run>, usize) {
        let count = match self.below(10) {
            0 => 0,
            1 => 1,
            2 => 100 + self.below(1000),
            _ => 1 + self.below(9),
        };
        let gaps = self.one_in(3);
        let mut end = if self.one_in(3) { self.below(3 * unit + 2) } else { 0 };
        let mut runs = Vec::new();
        for _ in 0..count {
            let units = self.pick(&[0, 1, 1, 2, 3, 7, 40]);
            let span = unit * if units == 40 { self.below(40) } else { units };
            let span = if end + span > rows_max { 0 } else { span };
            let len = match self.below(6) {
                0 => 0,
                1 => span.min(1),
                2 | 3 => span,
                _ => self.below(span + 1),
            };
            runs.push(Run { offset: end, step: 1, len, span });
            end += span + if gaps { self.below(2 * unit + 1) } else { 0 };
        }
        let rows = end + if self.one_in(2) { self.below(2 * unit + 3) } else { 0 };
        let (real, spans): (usize, usize) =
            runs.iter().fold((0, 0), |(real, spans), run| (real + run.len, spans + run.span));
        self.note(&format!("{count} sequences, {real} real of {spans} owned of {rows} rows"));
        (runs, rows)
    }

    /// A batch cut over ranks.
    fn shard(&mut self, cut: Cut) -> Shard {
        let unit = span_multiple(cut.balance, cut.cp);
        let (runs, rows) = self.runs(unit, 4096);
        Shard::of_runs(&runs, rows, cut.cp, cut.balance)
    }
}
