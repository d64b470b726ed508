//! Attention on rows that are far from where their tensors begin: products of rows and elements must be 64 bits wide.
//!
//! A few sequences lie in three *layouts*. In one they follow each other in small tensors. In another they lie in
//! tensors of more than 2^31 elements and 2^32 bytes: at the first rows, across both of these bounds, and at the last
//! rows. In the third they lie as in the first, and a *filler* of few rows and endless padding is planned before them,
//! so that their sums of dq lie behind more than 2^31 others. Kernels must write the same bits to their rows in every
//! layout. All else holds NaN before, and memory as long as a tensor lies before the first one and behind the last.
//! An address that wraps therefore reads a wrong number, or leaves rows unwritten; that of a sum, which is written and
//! read there alike, lies in a *guard* before the workspace.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use seamproof_kernels::attend::{BackwardTensors, ForwardTensors, WeightFormats};
use seamproof_kernels::backward::{BackwardMode, DqOrder};
use seamproof_kernels::forward::TileShape;
use seamproof_kernels::memory::{Area, DeviceBuffer};
use seamproof_kernels::view::View;
use seamproof_kernels::{Gpu, KernelError};
use seamproof_oracle::{Format, Heads, Pass, Run, Sink, Softmax};
use seamproof_simulator::{AttentionCall, RowPolicy, Segment};

use super::mismatch::Mismatch;
use super::passes::{Kernels, Launches};

/// The elements of a row of queries and of a row of keys, for each of [`SIZES`].
const ROW: [usize; 2] = [1024, 512];
/// The head dims, and the heads that make such rows: one pair for each instance.
const SIZES: [(usize, Heads); 4] = [
    (64, Heads { q: 16, kv: 8 }),
    (128, Heads { q: 8, kv: 4 }),
    (256, Heads { q: 4, kv: 2 }),
    (512, Heads { q: 2, kv: 1 }),
];
const BYTES: usize = 2;
/// The rows of queries and of keys in far tensors: a little more than 2^31 elements each.
const FAR_ROWS: [usize; 2] = [(1 << 21) + (1 << 11), (1 << 22) + (1 << 12)];
/// The real rows of each sequence, of queries and of keys.
const LENGTHS: [[usize; 2]; 4] = [[150, 190], [257, 257], [200, 230], [290, 300]];
const SPAN: usize = 300;
/// The real rows of the filler, of queries and of keys: more than a sequence has, so that it is planned before them.
const FILLER: usize = 600;
/// The bytes of the guard: those of 2^31 sums.
const GUARD: usize = 1 << 33;
/// The rows of a sequence before the bound that it crosses.
const BEFORE: usize = 100;
const NAN: u8 = 0xff;
const FIXED: BackwardMode = BackwardMode::overwrite(DqOrder::Fixed);
const WEIGHTS: WeightFormats = WeightFormats { p: Format::Bf16, ds: Format::Bf16 };
const LONG: Kernels = Kernels::Tuned(TileShape::Long, FIXED);
const KERNELS: [Kernels; 6] = [
    Kernels::Simple,
    LONG,
    Kernels::Tuned(TileShape::Paired, FIXED),
    Kernels::Tuned(TileShape::Middle, FIXED),
    Kernels::Tuned(TileShape::Short, FIXED),
    Kernels::Tuned(TileShape::Split, FIXED),
];
/// The tensors, which lie one behind the other, and their sides: queries are 0, keys 1.
const TENSORS: [(&str, usize); 8] =
    [("q", 0), ("k", 1), ("v", 1), ("dout", 0), ("out", 0), ("dq", 0), ("dk", 1), ("dv", 1)];
/// The first of the tensors that is a result. Those before are filled once.
const RESULTS: usize = 4;

/// The layout of the sequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Layout {
    Packed,
    Far,
    Filled,
}

impl Layout {
    /// Returns the rows of a side's tensors.
    fn rows(self, side: usize) -> usize {
        match self {
            Layout::Packed => SPAN * LENGTHS.len(),
            Layout::Far => FAR_ROWS[side],
            Layout::Filled => self.filler(side).offset + self.filler(side).span,
        }
    }

    /// Returns the filler's rows of a side. Its padding is of queries.
    fn filler(self, side: usize) -> Run {
        let first = SPAN * LENGTHS.len();
        Run::packed(first, FILLER, [FAR_ROWS[0] - first, FILLER][side])
    }

    fn bytes(self, side: usize) -> usize {
        self.rows(side) * ROW[side] * BYTES
    }

    /// Returns the sequences' rows of a side.
    fn runs(self, side: usize) -> [Run; LENGTHS.len()] {
        // This is the first row behind 2^31 bytes. Twice as far are 2^32 bytes, and 2^31 elements.
        let bound = (1 << 31) / (ROW[side] * BYTES);
        let far = [0, bound - BEFORE, 2 * bound - BEFORE, FAR_ROWS[side] - SPAN];
        std::array::from_fn(|index| {
            let first = if self == Layout::Far { far[index] } else { SPAN * index };
            Run::packed(first, LENGTHS[index][side], SPAN)
        })
    }

    /// Returns the call of every sequence, with a diagonal that ends in the corner.
    fn call(self, dim: usize) -> AttentionCall {
        let mut both: Vec<(Run, Run)> = self.runs(0).into_iter().zip(self.runs(1)).collect();
        if self == Layout::Filled {
            both.push((self.filler(0), self.filler(1)));
        }
        let segment = |(q, kv): (Run, Run)| {
            let hi = kv.len as i64 - q.len as i64;
            Segment { q, kv: vec![kv], lo: None, hi: Some(hi), prefix: 0, sink_tokens: 0 }
        };
        let softmax = Softmax { scale: 1.0 / (dim as f32).sqrt(), softcap: None, sink: Sink::None };
        AttentionCall {
            segments: both.into_iter().map(segment).collect(),
            softmax,
            policy: RowPolicy::Overwrite,
        }
    }
}

/// Returns numbers between -2 and 2 in bf16.
fn numbers(seed: u64, count: usize) -> Vec<u8> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut number = || f64::from(rng.next_u32() >> 16) / f64::from(1 << 14) - 2.0;
    (0..count).flat_map(|_| (Format::Bf16.encode(number()) as u16).to_le_bytes()).collect()
}

/// Parts of the results: the name of a tensor, its sequence, and what is there.
type Parts<T> = Vec<(&'static str, usize, T)>;

/// The tensors of a layout.
struct Memory<'g> {
    gpu: &'g Gpu,
    layout: Layout,
    all: DeviceBuffer,
    /// The LSE `[heads, rows]`, for the most heads.
    lse: DeviceBuffer,
    max_logit: DeviceBuffer,
}

impl<'g> Memory<'g> {
    fn new(gpu: &'g Gpu, layout: Layout) -> Result<Memory<'g>, KernelError> {
        let bytes: usize = TENSORS.iter().map(|&(_, side)| layout.bytes(side)).sum();
        let heads = SIZES[0].1.q;
        let memory = Memory {
            gpu,
            layout,
            all: gpu.allocate(bytes + 2 * layout.bytes(0))?,
            lse: gpu.allocate(heads * layout.rows(0) * 4)?,
            max_logit: gpu.allocate(heads * 4)?,
        };
        gpu.fill(memory.all.area(), NAN)?;
        gpu.fill(memory.lse.area(), NAN)?;
        for (tensor, (_, side)) in TENSORS.into_iter().enumerate().take(RESULTS) {
            for (index, run) in layout.runs(side).into_iter().enumerate() {
                let seed = (tensor * LENGTHS.len() + index) as u64;
                let real = memory.rows(tensor, run.offset, run.len)?;
                gpu.write(real, &numbers(seed, run.len * ROW[side]))?;
            }
        }
        Ok(memory)
    }

    /// Returns a tensor. Before the first one lies as much other memory as its own.
    fn tensor(&self, tensor: usize) -> Result<Area<'_>, KernelError> {
        let before: usize = TENSORS[..tensor].iter().map(|&(_, side)| self.layout.bytes(side)).sum();
        let start = self.layout.bytes(0) + before;
        self.all.area().part(start..start + self.layout.bytes(TENSORS[tensor].1))
    }

    fn rows(&self, tensor: usize, first: usize, count: usize) -> Result<Area<'_>, KernelError> {
        let row = ROW[TENSORS[tensor].1] * BYTES;
        self.tensor(tensor)?.part(first * row..(first + count) * row)
    }

    /// Returns every area that a forward and a backward with `heads` query heads write.
    fn results(&self, heads: usize) -> Result<Parts<Area<'_>>, KernelError> {
        let mut areas = Vec::new();
        for (tensor, (name, side)) in TENSORS.into_iter().enumerate().skip(RESULTS) {
            for (index, run) in self.layout.runs(side).into_iter().enumerate() {
                areas.push((name, index, self.rows(tensor, run.offset, run.span)?));
            }
        }
        for (index, run) in self.layout.runs(0).into_iter().enumerate() {
            for head in 0..heads {
                let first = 4 * (head * self.layout.rows(0) + run.offset);
                areas.push(("lse", index, self.lse.area().part(first..first + 4 * run.span)?));
            }
        }
        Ok(areas)
    }

    /// Returns what the kernels write to the sequences' rows.
    fn written(&self, (dim, heads): (usize, Heads), kernels: Kernels) -> Result<Parts<Vec<u8>>, KernelError> {
        let Memory { gpu, layout, .. } = *self;
        for (_, _, area) in self.results(heads.q)? {
            gpu.write(area, &vec![NAN; area.bytes()])?;
        }
        let max_logit = self.max_logit.area().part(0..4 * heads.q)?;
        gpu.write(max_logit, &f32::NEG_INFINITY.to_le_bytes().repeat(heads.q))?;

        let rows = [layout.rows(0), layout.rows(1)];
        let view = |tensor: usize| {
            let side = TENSORS[tensor].1;
            let shape = [rows[side], [heads.q, heads.kv][side], dim];
            Ok::<_, KernelError>(View::rows(self.tensor(tensor)?, shape, Format::Bf16))
        };
        let (q, k, v, dout, out) = (view(0)?, view(1)?, view(2)?, view(3)?, view(4)?);
        let lse = self.lse.area().part(0..4 * heads.q * rows[0])?;
        let lse = View::statistic(lse, [heads.q, rows[0]], Format::F32);
        let of_heads = View::heads(max_logit, heads.q, Format::F32);
        let forward = ForwardTensors { q, k, v, sink: None, out, lse, max_logit: of_heads };
        let backward = BackwardTensors { q, k, v, dout, out, lse, dq: view(5)?, dk: view(6)?, dv: view(7)? };
        let sizes = (rows, [heads.q, heads.kv], [dim; 2]);
        let guard = if layout == Layout::Filled { GUARD } else { 0 };
        let how = (kernels, WEIGHTS, Pass::Backward);
        let launches = Launches::guarded(gpu, &layout.call(dim), sizes, how, guard)?;
        launches.launch(gpu, (&forward, &backward))?;

        let mut written = Vec::new();
        for (name, index, area) in self.results(heads.q)? {
            written.push((name, index, gpu.read(area)?));
        }
        written.push(("max_logit", 0, gpu.read(max_logit)?));
        written.push(("the guard", 0, vec![u8::from(launches.is_guard_whole(gpu)?)]));
        Ok(written)
    }
}

/// Runs both passes on every kernel of attention, far from where tensors or sums begin and near. Returns the first
/// difference of each. It needs 44 GB of the GPU's memory.
pub(super) fn check_far(gpu: &Gpu) -> Result<Vec<Mismatch>, KernelError> {
    let packed = Memory::new(gpu, Layout::Packed)?;
    let mut found = Vec::new();
    for (layout, kernels, operation) in [
        (Layout::Far, &KERNELS[..], "attention far from its base"),
        // The backward is the same behind every forward on tensor cores.
        (Layout::Filled, &[LONG], "attention with sums far from their base"),
    ] {
        let memory = Memory::new(gpu, layout)?;
        for (size, &kernels) in SIZES.into_iter().flat_map(|size| kernels.iter().map(move |k| (size, k))) {
            let (got, want) = (memory.written(size, kernels)?, packed.written(size, kernels)?);
            let different = got.iter().zip(&want).find(|((_, _, got), (_, _, want))| got != want);
            found.extend(different.map(|((name, index, got), (_, _, want))| Mismatch {
                operation,
                case: found.len() as u64,
                place: format!("{name} of sequence {index}"),
                what: format!("{kernels:?}, head dim {}", size.0),
                bytes: got.iter().zip(want).filter(|(got, want)| got != want).count(),
            }));
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use seamproof_kernels::attend::CallTables;
    use seamproof_kernels::forward::{self, ForwardOperands};

    #[test]
    fn far_rows_lie_on_both_sides_of_every_bound() {
        for side in [0, 1] {
            let bytes = |row: usize| row * ROW[side] * BYTES;
            let runs = Layout::Far.runs(side);
            for (run, bound) in runs[1..3].iter().zip([1 << 31, 1_usize << 32]) {
                assert!(bytes(run.offset) < bound && bytes(run.offset + run.len) > bound, "{run:?}");
            }
            assert_eq!(runs[0].offset, 0);
            assert_eq!(runs[3].end(), Some(FAR_ROWS[side]));
            assert!(Layout::Far.rows(side) * ROW[side] > 1 << 31);
            assert!(runs[2].offset + runs[2].span <= runs[3].offset);
        }
        assert_eq!(Layout::Far.bytes(0), Layout::Far.bytes(1), "what wraps lands in a neighbour");
        for (dim, heads) in SIZES {
            assert_eq!([heads.q * dim, heads.kv * dim], ROW);
        }
    }

    /// A tile's sums are 8192 numbers, of 128 rows, 64 or 32. Backwards with more lanes have none.
    #[test]
    fn sums_of_sequences_behind_the_filler_are_past_the_bound() {
        for (dim, heads) in SIZES.into_iter().filter(|&(dim, _)| dim <= 256) {
            let tiles = Layout::Filled.filler(0).span / (8192 / dim);
            assert!(tiles * heads.q * 8192 > 1 << 31);
        }
        assert!(LENGTHS.into_iter().all(|[q, _]| q / 128 < FILLER / 128), "it is planned first");
    }

    #[test]
    fn both_layouts_are_the_same_call_that_tensor_cores_take() {
        for (dim, _) in SIZES {
            let [far, packed] = [Layout::Far, Layout::Packed].map(|layout| {
                let rows = [layout.rows(0), layout.rows(1)];
                CallTables::new(&layout.call(dim), rows, true).expect("its runs lie in the rows")
            });
            assert_eq!((far.owned(), far.counts()), (packed.owned(), packed.counts()));
            let formats = [Format::Bf16; 3];
            let operands = ForwardOperands { formats, out: Format::Bf16, p: Format::Bf16, dims: [dim; 2] };
            assert_eq!(forward::refusal(&far, &operands), None);
        }
    }
}
