//! The backward's bits: whether launches in the fixed order give the same ones, what accumulating adds, and whether
//! dq that is written at once is what sums give.
//!
//! *Steady*: one launch follows the other, and each is compared with the first on the GPU. Beside them, on streams of
//! their own, the same backward is launched in any order and memory is copied. Blocks then begin at other times in each
//! launch. Launches in any order are compared in the same way. Where sums have enough terms they must differ now and
//! then, or the comparison would see nothing.
//!
//! *Accumulated*: gradients that are added to what was there are `round(there + gradient)`. The gradient is what an
//! overwriting launch of the same order gives in f32.
//!
//! *Direct*: dq of rows that see one tile of keys has the same bits in two cases. Either that tile is all of the
//! sequence, and dq is written at once; or others follow, and dq is a sum of one term.
//!
//! Heads, the number of sequences, their lengths and the mask decide which *walks* over tiles the launcher takes in each
//! order (`backward::Walks`). A *pack* is sequences, repeated, with such heads. There is one for each choice of walks.

use std::time::{Duration, Instant};

use seamproof_kernels::attend::BackwardTensors;
use seamproof_kernels::backward::{BackwardMode, DqOrder};
use seamproof_kernels::memory::DeviceBuffer;
use seamproof_kernels::view::View;
use seamproof_kernels::{Gpu, KernelError};
use seamproof_oracle::{Format, Heads, Mask, Problem};

use super::mismatch::Mismatch;
use crate::problem::{legal, packed};
use crate::ready::{NormalNumbers, ReadyBackward};

/// The head dims: one for each size of the kernel.
pub const STEADY_DIMS: [usize; 3] = [64, 128, 256];
/// Those whose tiles have [`TILE`] keys.
const DIMS: [usize; 2] = [64, 128];
/// The masks, each with its name.
pub const STEADY_MASKS: [(&str, Mask); 4] = [
    ("causal", Mask::CAUSAL),
    ("full", Mask::FULL),
    ("window", Mask { left: Some(512), ..Mask::CAUSAL }),
    ("band", Mask { left: Some(300), right: Some(70), ..Mask::CAUSAL }),
];
/// The packs: one for each choice of walks, in the fixed order and in any, and one whose launches have the short form
/// in both.
pub const STEADY_PACKS: [SteadyPack; 5] = [GROUPED, FEW, MANY, SHORT, EVEN];
/// Several query heads to a KV head: the walk goes down in both orders.
const GROUPED: SteadyPack =
    SteadyPack { name: "grouped", heads: Heads { q: 8, kv: 2 }, times: 1, lengths: &LENGTHS };
/// One query head to a KV head, and few sequences: the walk goes up in the fixed order, and down in any.
const FEW: SteadyPack = SteadyPack { name: "few", heads: Heads { q: 4, kv: 4 }, times: 1, lengths: &LENGTHS };
/// Few sequences, repeated until there are as many heads of sequences as multiprocessors: the walk goes up in both
/// orders. A Hopper GPU has 144 multiprocessors at most
/// (<https://developer.nvidia.com/blog/nvidia-hopper-architecture-in-depth/>).
const MANY: SteadyPack = SteadyPack { times: 6, name: "many", ..FEW };
/// Short sequences, repeated as often as those of `MANY`: a launch in any order goes in the fixed one.
const SHORT: SteadyPack = SteadyPack { name: "short", lengths: &SHORT_LENGTHS, ..MANY };
/// Long sequences of about one length: in the fixed order and causal masks heads walk up and down by turns, eight and
/// eight with 64 lanes, else four and four.
const EVEN: SteadyPack =
    SteadyPack { name: "even", heads: Heads { q: 16, kv: 16 }, times: 1, lengths: &[4096, 3900] };
/// The lengths of the sequences whose launches are repeated: many tiles of keys, one tile, one row. Their mean is so
/// long that none has the short form (`backward::SHORT_ROWS`).
const LENGTHS: [usize; 7] = [300, 64, 1, 777, 2048, 513, 4096];
/// Lengths of eight tiles of keys at most, which go around in full masks.
const SHORT_LENGTHS: [usize; 7] = [300, 64, 1, 777, 1000, 513, 128];
/// Lengths of one tile of keys, to which nothing is added, and of two, whose sums have two terms: any order gives the
/// same bits.
const TWO_TILES_AT_MOST: [usize; 7] = [128, 1, 200, 77, 64, 256, 100];
/// The keys of a tile, and the rows of two tiles.
const TILE: usize = 128;
const TWO_TILES: usize = 2 * TILE;
/// The rows that a sequence owns behind its real ones.
const PADDING: usize = 16;
/// The bytes of a copy beside the launches, and the number of launches after which one is made.
const COPY_BYTES: usize = 64 << 20;
const COPY_EVERY: usize = 4;
/// The streams of the work beside the launches.
const BESIDE: [usize; 2] = [1, 2];

/// Sequences, how often they are repeated, and their heads.
#[derive(Clone, Copy, Debug)]
pub struct SteadyPack {
    /// The name.
    pub name: &'static str,
    heads: Heads,
    times: usize,
    lengths: &'static [usize],
}

/// The result of repeated launches.
#[derive(Clone, Copy, Debug)]
pub struct Steady {
    /// The number of launches in the fixed order, and of launches in any order.
    pub launches: usize,
    /// The number of launches in the fixed order that gave other bits than the first of them.
    pub fixed: usize,
    /// The number of launches in any order that gave other bits than the first of them.
    pub any: usize,
    /// The time from the first launch to the last.
    pub time: Duration,
}

impl SteadyPack {
    /// Returns sequences of these lengths in bf16, with padding behind each.
    fn padded(self, lengths: &[usize], dim: usize, mask: Mask) -> Result<Problem, KernelError> {
        let padded: Vec<_> = lengths.iter().map(|&length| (length, length + PADDING)).collect();
        self.problem(&padded, dim, mask)
    }

    /// Returns sequences in bf16, each given by its numbers of real and of owned rows.
    fn problem(self, sequences: &[(usize, usize)], dim: usize, mask: Mask) -> Result<Problem, KernelError> {
        legal(packed(sequences.repeat(self.times), self.heads, dim, mask))
    }
}

/// A backward whose results are compared with those of its first launch.
struct Compared<'g> {
    gpu: &'g Gpu,
    how: BackwardMode,
    ready: ReadyBackward<'g>,
    first: Vec<DeviceBuffer>,
    /// The number of words that differ, for each launch.
    words: DeviceBuffer,
}

impl<'g> Compared<'g> {
    fn new(
        gpu: &'g Gpu,
        (problem, numbers): (&'g Problem, &NormalNumbers),
        how: BackwardMode,
        launches: usize,
    ) -> Result<Compared<'g>, KernelError> {
        let ready = ReadyBackward::new(gpu, problem, numbers, 1)?;
        ready.launch(how, &ready.tensors(0))?;
        let first = ready.sets[0].results.iter().map(|result| {
            let first = gpu.allocate(result.area().bytes())?;
            gpu.copy(result.area(), first.area())?;
            Ok(first)
        });
        let first = first.collect::<Result<_, KernelError>>()?;
        let words = gpu.upload_i32(&vec![0; launches])?;
        Ok(Compared { gpu, how, ready, first, words })
    }

    fn launch(&self, number: usize) -> Result<(), KernelError> {
        self.ready.launch(self.how, &self.ready.tensors(0))?;
        let count = self.words.area().part(4 * number..4 * number + 4)?;
        let both = self.ready.sets[0].results.iter().zip(&self.first);
        both.into_iter().try_for_each(|(now, first)| self.gpu.differ(now.area(), first.area(), count))
    }

    /// Returns how many launches differ from the first.
    fn differing(&self) -> Result<usize, KernelError> {
        let words = self.gpu.read(self.words.area())?;
        Ok(words.chunks_exact(4).filter(|word| word.iter().any(|&byte| byte != 0)).count())
    }
}

/// Launches a pack's backward `launches` times in each order, with one head dim and one mask.
pub fn steady(
    gpu: &Gpu,
    pack: SteadyPack,
    (dim, mask): (usize, Mask),
    launches: usize,
) -> Result<Steady, KernelError> {
    let (problem, numbers) = (pack.padded(pack.lengths, dim, mask)?, NormalNumbers::new(gpu)?);
    let fixed = Compared::new(gpu, (&problem, &numbers), BackwardMode::overwrite(DqOrder::Fixed), launches)?;
    let any =
        Compared::new(gpu, (&problem, &numbers), BackwardMode::overwrite(DqOrder::AsTheyCome), launches)?;
    let copied = [gpu.allocate(COPY_BYTES)?, gpu.allocate(COPY_BYTES)?];
    gpu.finish()?;
    let start = Instant::now();
    for number in 0..launches {
        fixed.launch(number)?;
        gpu.on(BESIDE[0], || any.launch(number))?;
        if number.is_multiple_of(COPY_EVERY) {
            gpu.on(BESIDE[1], || gpu.copy(copied[0].area(), copied[1].area()))?;
        }
    }
    for stream in BESIDE {
        gpu.wait(0, &gpu.mark(stream)?)?;
    }
    gpu.finish()?;
    let time = start.elapsed();
    Ok(Steady { launches, fixed: fixed.differing()?, any: any.differing()?, time })
}

/// The packs whose gradients are accumulated, with walks up and down in both orders. In any order, sums have two terms
/// at most, and so one value.
const ACCUMULATED: [(SteadyPack, DqOrder, &[usize]); 6] = [
    (GROUPED, DqOrder::Fixed, &LENGTHS),
    (FEW, DqOrder::Fixed, &LENGTHS),
    (FEW, DqOrder::Fixed, &SHORT_LENGTHS),
    (GROUPED, DqOrder::AsTheyCome, &TWO_TILES_AT_MOST),
    (FEW, DqOrder::AsTheyCome, &TWO_TILES_AT_MOST),
    (MANY, DqOrder::AsTheyCome, &TWO_TILES_AT_MOST),
];

/// Checks gradients that are accumulated, of both head dims, both orders that are asked for, walks up and down, formats
/// of the sum, and every mask.
pub fn accumulated(gpu: &Gpu) -> Result<Vec<Mismatch>, KernelError> {
    let numbers = NormalNumbers::new(gpu)?;
    let mut found = Vec::new();
    for dim in DIMS {
        for (name, mask) in STEADY_MASKS {
            for (pack, order, lengths) in ACCUMULATED {
                let problem = pack.padded(lengths, dim, mask)?;
                let ready = ReadyBackward::new(gpu, &problem, &numbers, 1)?;
                for format in [Format::F32, Format::Bf16] {
                    let what = format!("head dim {dim}, {name}, {}, {order:?}, {format}", pack.name);
                    let wrong = Accumulated { gpu, ready: &ready, order, format }.wrong(&problem)?;
                    let case = found.len() as u64;
                    found.extend(wrong.into_iter().map(|(place, bytes)| Mismatch {
                        operation: "backward, accumulated",
                        case,
                        place,
                        what: what.clone(),
                        bytes,
                    }));
                }
            }
        }
    }
    Ok(found)
}

/// Checks dq of rows that see one tile of keys and write dq at once, in both orders. It is compared with dq of the same
/// rows where their tile sees a second one and dq is a sum. Both head dims, both formats, and walks up and
/// down are checked. In walks down, one tile has the short form and two have not: D must have the same bits in both.
pub fn direct(gpu: &Gpu) -> Result<Vec<Mismatch>, KernelError> {
    let numbers = NormalNumbers::new(gpu)?;
    let mut found = Vec::new();
    for dim in DIMS {
        for pack in STEADY_PACKS {
            found.extend(direct_of(gpu, &numbers, pack, dim)?);
        }
    }
    Ok(found)
}

fn direct_of(
    gpu: &Gpu,
    numbers: &NormalNumbers,
    pack: SteadyPack,
    dim: usize,
) -> Result<Vec<Mismatch>, KernelError> {
    // The last row of the first tile sees a key of the second. Two tiles then open and close the sums of its tile of
    // rows.
    let mask = Mask { right: Some(1), ..Mask::CAUSAL };
    let problem = |length| pack.problem(&[(length, TWO_TILES); LENGTHS.len()], dim, mask);
    let (one, two) = (problem(TILE)?, problem(TWO_TILES)?);
    let (direct, summed) =
        (ReadyBackward::new(gpu, &one, numbers, 1)?, ReadyBackward::new(gpu, &two, numbers, 1)?);
    let row = pack.heads.q * dim;
    let mut found = Vec::new();
    for format in [Format::F32, Format::Bf16] {
        // Both backwards read one forward.
        let dq = |ready: &ReadyBackward, order| {
            let how = BackwardMode::overwrite(order);
            let zeros = shapes(&two).map(|shape| vec![0.0; shape.iter().product()]);
            gradients(gpu, ready, &summed, how, format, zeros).map(|[dq, ..]| dq)
        };
        let sums = dq(&summed, DqOrder::Fixed)?;
        for order in DqOrder::ALL {
            let got = dq(&direct, order)?;
            let sequences = got.chunks(TWO_TILES * row).zip(sums.chunks(TWO_TILES * row));
            let pairs = sequences.flat_map(|(got, sums)| got.iter().zip(sums).take((TILE - 1) * row));
            // The comparison is of numbers: 0 and -0 are equal.
            let wrong = pairs.filter(|(direct, sum)| direct != sum).count();
            let mismatch = Mismatch {
                operation: "backward, direct",
                case: found.len() as u64,
                place: "dq".to_owned(),
                what: format!("head dim {dim}, {}, {order:?}, {format}", pack.name),
                bytes: wrong * format.bits() as usize / 8,
            };
            found.extend((wrong > 0).then_some(mismatch));
        }
    }
    Ok(found)
}

/// Returns the shapes of q, k and v.
fn shapes(problem: &Problem) -> [[usize; 3]; 3] {
    [problem.q_shape(), problem.k_shape(), problem.v_shape()]
}

/// A backward that is added to sums.
struct Accumulated<'a> {
    gpu: &'a Gpu,
    ready: &'a ReadyBackward<'a>,
    order: DqOrder,
    format: Format,
}

impl Accumulated<'_> {
    /// Returns where sums are not what they must be: the first place in each gradient, and how many bytes.
    fn wrong(&self, problem: &Problem) -> Result<Vec<(String, usize)>, KernelError> {
        let Accumulated { gpu, ready, order, format } = *self;
        let shapes = shapes(problem);
        let zeros = shapes.map(|shape| vec![0.0; shape.iter().product()]);
        // The walk must be the same, since dk and dv are sums in its order.
        let overwrite = BackwardMode::overwrite(order);
        let overwritten = gradients(gpu, ready, ready, overwrite, Format::F32, zeros)?;
        let there = shapes.map(|shape| {
            let numbers = 0..shape.iter().product::<usize>();
            numbers.map(|index| format.round_f32(index as f32 % 253.0 / 16.0 - 8.0)).collect::<Vec<f32>>()
        });
        let accumulate = BackwardMode::accumulate(order);
        let sums = gradients(gpu, ready, ready, accumulate, format, there.clone())?;
        let mut real = vec![false; problem.rows.q];
        problem.sequences.iter().flat_map(|sequence| sequence.q.real_rows()).for_each(|row| real[row] = true);
        let mut found = Vec::new();
        for (index, name) in ["dq", "dk", "dv"].into_iter().enumerate() {
            let row = shapes[index][1] * shapes[index][2];
            let wrong: Vec<usize> = (0..there[index].len())
                .filter(|&at| {
                    let (before, gradient) = (there[index][at], overwritten[index][at]);
                    let sum = if real[at / row] { format.round_f32(before + gradient) } else { before };
                    sums[index][at] != sum
                })
                .collect();
            if let Some(&at) = wrong.first() {
                let (before, gradient, sum) = (there[index][at], overwritten[index][at], sums[index][at]);
                let place = format!("{name}, row {}: {before} + {gradient} became {sum}", at / row);
                found.push((place, wrong.len() * format.bits() as usize / 8));
            }
        }
        Ok(found)
    }
}

/// Returns dq, dk and dv of a launch into tensors that held the numbers `there`. The launch reads the results of
/// `forward`, which may be another pass than its own.
fn gradients(
    gpu: &Gpu,
    ready: &ReadyBackward,
    forward: &ReadyBackward,
    how: BackwardMode,
    format: Format,
    there: [Vec<f32>; 3],
) -> Result<[Vec<f32>; 3], KernelError> {
    let [dq, dk, dv] = there.map(|numbers| gpu.upload_elements(&numbers, format));
    let buffers = [dq?, dk?, dv?];
    let tensors = forward.tensors(0);
    let shapes = [tensors.q.shape(), tensors.k.shape(), tensors.v.shape()];
    let view = |index: usize| View::rows(buffers[index].area(), shapes[index], format);
    ready.launch(how, &BackwardTensors { dq: view(0), dk: view(1), dv: view(2), ..tensors })?;
    let [dq, dk, dv] = [0, 1, 2].map(|index| gpu.read_elements(buffers[index].area(), format));
    Ok([dq?, dk?, dv?])
}

#[cfg(test)]
mod tests {
    use seamproof_kernels::attend::CallTables;
    use seamproof_kernels::backward::{SHORT_ROWS, Walks};
    use seamproof_simulator::AttentionCall;

    use super::*;

    /// The walks are those that comments name, on an H100 for PCIe and on a Hopper GPU with all its multiprocessors.
    #[test]
    fn packs_take_every_walk_in_every_order() {
        assert!(LENGTHS.iter().sum::<usize>() > SHORT_ROWS * LENGTHS.len());
        assert!(SHORT_LENGTHS.iter().sum::<usize>() < SHORT_ROWS * SHORT_LENGTHS.len());
        for multiprocessors in [114, 144] {
            let walks = |pack: SteadyPack, lengths: &[usize]| {
                let Heads { q, kv } = pack.heads;
                let problem = pack.padded(lengths, 64, Mask::CAUSAL).expect("a legal problem");
                let rows = [problem.rows.q, problem.rows.kv];
                let tables = CallTables::new(&AttentionCall::whole(&problem), rows, true).expect("tables");
                DqOrder::ALL.map(|order| Walks::fitting(order, &tables, [q / kv, kv], multiprocessors, true))
            };
            for lengths in [LENGTHS, SHORT_LENGTHS, TWO_TILES_AT_MOST] {
                assert_eq!(walks(GROUPED, &lengths), [Walks::Down; 2]);
                assert_eq!(walks(FEW, &lengths), [Walks::Up, Walks::Down]);
                assert_eq!(walks(MANY, &lengths), [Walks::Up; 2]);
            }
            assert_eq!(walks(EVEN, EVEN.lengths), [Walks::ByTurns, Walks::Down]);
        }
    }
}
