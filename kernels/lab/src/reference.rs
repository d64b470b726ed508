//! The exact forward of chosen query rows, in f64, on the GPU, and the sums that an envelope is formed from
//! (`reference.cu`). Production kernels are judged by it at sizes where a CPU is too slow.
//!
//! It knows neither segments nor masks: [`Questions`] name each row, the keys that it sees, and the row of each key.
//! Products and sums are f64. *Magnitudes* (`Σ e^(s − largest)·|v|`, and `a = Σ|q||k|` of a logit) are upper bounds:
//! matrix instructions in tf32 make them from factors that are rounded up. So are squares, which tier T of an
//! envelope needs, and the shares of weights that are alike ([`Dither`]).
//!
//! Errors of the exact results, with ε = 2^-53: a logit is off by `ε·(dim + 2)·scale·a`, `e^x` by 2 ulp, and a sum of
//! n terms by `n·ε` of their magnitudes.
#![allow(unsafe_code, reason = "says which types kernels receive")]

use std::ops::Range;

use seamproof_oracle::envelope::SLOTS;
use seamproof_oracle::{Problem, Softmax};

use seamproof_kernels::block::THREADS;
use seamproof_kernels::cache::Cache;
use seamproof_kernels::memory::{Area, Argument, DeviceBuffer};
use seamproof_kernels::occupancy::Block;
use seamproof_kernels::source::Source;
use seamproof_kernels::tables::ROWS_MAX;
use seamproof_kernels::view::{RawView, Table, View};
use seamproof_kernels::{Gpu, KernelError};

/// The largest head dim, whose rows shared memory holds.
const DIM_MAX: usize = 256;
/// The query rows of a block, the keys of a step and the lanes of a block's output: `ROWS`, `KEYS` and `LANES` of the
/// source.
const ROWS: usize = 64;
const KEYS: usize = 64;
const LANES: usize = 128;
/// The lanes or keys of a matrix instruction.
const STEP: usize = 8;
/// The numbers of `Statistics` and of `Dither` of the source.
const STATISTICS: usize = 5;
const DITHER: usize = 6;
/// The most that a sum of non-negative products in tf32 may lose in one matrix instruction, relative to the sum. 8
/// products and the sum so far are cut to 23 fractional bits of the largest or more, in two halves at worst, and the
/// result is cut again (MMA-Sim, arXiv 2511.10909). That is 12·2^-23; this is more.
const STEP_LOSS: f64 = 1.0 / (1 << 19) as f64;

/// A query row of one head.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Query {
    /// The row of the tensor.
    pub row: usize,
    /// The query head.
    pub head: usize,
    /// The number of the list whose keys it sees.
    pub list: usize,
    /// The keys that it sees, as indices into the list.
    pub keys: Range<usize>,
}

impl Query {
    /// Returns the query of a row of a sequence and a head. The lists begin with the keys of each sequence
    /// ([`lists_of_keys`]). A row that sees more than one interval of them gets a list of its own behind these.
    pub fn of(
        problem: &Problem,
        [sequence, i]: [usize; 2],
        head: usize,
        lists: &mut Vec<Vec<usize>>,
    ) -> Query {
        let both = &problem.sequences[sequence];
        let visible = problem.mask.visible(i, both.q.len, both.kv.len);
        let (hull, row) = (visible.hull(), both.q.row(i));
        if visible.len() == hull.len() {
            return Query { row, head, list: sequence, keys: hull };
        }
        let own = visible.map(|key| lists[sequence][key]).collect();
        lists.push(own);
        let list = lists.len() - 1;
        Query { row, head, list, keys: 0..lists[list].len() }
    }
}

/// Returns the rows of each sequence's keys. Those that it [borrows](seamproof_oracle::Sharing) are rows of their lender.
pub fn lists_of_keys(problem: &Problem) -> Vec<Vec<usize>> {
    let rows = |sequence: usize| problem.sequences[sequence].kv.real_rows();
    let keys_of = |sequence: usize| match problem.sharing.of(sequence) {
        Some(shared) => rows(shared.with).take(shared.keys).chain(rows(sequence).skip(shared.keys)).collect(),
        None => rows(sequence).collect(),
    };
    (0..problem.sequences.len()).map(keys_of).collect()
}

/// Rows that are asked about, as tables for the GPU. Neighbours of one head and list of keys share a block, so ask
/// for them one after the other.
#[derive(Clone, Debug)]
pub struct Questions {
    bytes: Vec<u8>,
    /// The beginnings of the tables of tiles and of key rows.
    tiles: usize,
    keys: usize,
    tile_count: usize,
    /// For each query, the number of keys that it sees, and of keys that its block goes through.
    seen: Vec<[usize; 2]>,
    /// The ends of the rows of queries, of the rows of keys, and of the heads.
    ends: [usize; 3],
}

/// The tensors of a launch.
#[derive(Clone, Copy, Debug)]
pub struct ReferenceTensors<'a> {
    /// The queries.
    pub q: View<'a>,
    /// The keys.
    pub k: View<'a>,
    /// The values.
    pub v: View<'a>,
}

/// Statistics of one row over the keys that it sees. `s` are logits, and weights are `e^(s − largest)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Statistics {
    /// The number of keys that it sees.
    pub keys: usize,
    /// The largest logit; −∞ where there is no key.
    pub largest: f64,
    /// The smallest logit; ∞ where there is no key.
    pub smallest: f64,
    /// The sum of weights.
    pub sum: f64,
    /// The sum of weights times `a`, or more than that.
    pub sum_a: f64,
    /// The largest `a`, or more than that.
    pub largest_a: f64,
}

/// Statistics of one row that tier T of an envelope needs in addition.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DitherStatistics {
    /// The sum `Σ (s − largest)`.
    pub sum: f64,
    /// The sum `Σ (s − largest)²`.
    pub sum_squares: f64,
    /// The share of weights other than 0 that have company in their slot ([`SLOTS`]), or the share of their squares,
    /// whichever is larger. It is not a number where there is no such weight.
    pub shared: f64,
}

/// Numbers that tier T needs in addition, query by query.
#[derive(Clone, Debug)]
pub struct Dither {
    /// The statistics of each query.
    pub statistics: Vec<DitherStatistics>,
    /// The sums of squares of weights times values, or more than that, `[queries, dim_v]`.
    pub squares: Vec<f64>,
}

/// The answers, query by query.
#[derive(Clone, Debug)]
pub struct Answers {
    /// The statistics of each query.
    pub statistics: Vec<Statistics>,
    /// The lanes of a value.
    pub dim_v: usize,
    /// The sums of weights times values, `[queries, dim_v]`.
    pub out: Vec<f64>,
    /// The sums of weights times magnitudes of values, or more than that, `[queries, dim_v]`.
    pub magnitudes: Vec<f64>,
    /// The numbers for tier T, where they were asked for.
    pub dither: Option<Dither>,
    /// The milliseconds that the kernels took.
    pub ms: f64,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct RawReference {
    views: [RawView; 3],
    /// rows, tiles, key rows, out, magnitudes, statistics, squares, dither, bits.
    tables: [u64; 9],
    scale: f64,
    softcap: f64,
    group: i32,
    dim: i32,
    dim_v: i32,
    floor: f32,
    words: i32,
}
// SAFETY: repr(C), the fields of `Reference` in reference.cu.
unsafe impl Argument for RawReference {}

impl Questions {
    /// Returns questions about query rows, which see keys of the lists. A list has the rows of its keys in order.
    pub fn new(lists: &[Vec<usize>], queries: &[Query]) -> Result<Questions, KernelError> {
        let mut starts = vec![0];
        starts.extend(lists.iter().scan(0, |end, list| {
            *end += list.len();
            Some(*end)
        }));
        let (total, mut ends) = (starts[lists.len()], [0; 3]);
        if total.max(queries.len()) > ROWS_MAX {
            let what = format!("{} queries and {total} keys; at most {ROWS_MAX}", queries.len());
            return Err(KernelError::shape(what));
        }
        let mut rows = Table::default();
        for query in queries {
            let keys = lists.get(query.list).map_or(0, Vec::len);
            if query.keys.start > query.keys.end || query.keys.end > keys || query.row >= ROWS_MAX {
                return Err(KernelError::shape(format!("{query:?} does not fit a list of {keys} keys")));
            }
            rows.i32(&[query.row, query.keys.start, query.keys.end].map(|number| number as i32));
            ends = [ends[0].max(query.row + 1), ends[1], ends[2].max(query.head + 1)];
        }
        let mut keys = Table::default();
        for &row in lists.iter().flatten() {
            if row >= ROWS_MAX {
                return Err(KernelError::shape(format!("key row {row}; at most {ROWS_MAX}")));
            }
            keys.i32(&[row as i32]);
            ends[1] = ends[1].max(row + 1);
        }
        let (tiles, tile_count, seen) = tiles(&starts, queries);
        let (tiles_at, keys_at) = (rows.bytes().len(), rows.bytes().len() + tiles.bytes().len());
        let bytes = [rows.bytes(), tiles.bytes(), keys.bytes()].concat();
        Ok(Questions { bytes, tiles: tiles_at, keys: keys_at, tile_count, seen, ends })
    }

    /// Returns the number of queries.
    pub fn queries(&self) -> usize {
        self.seen.len()
    }
}

/// Returns the table of tiles, with the most keys first, their number, and [`Questions::seen`].
fn tiles(starts: &[usize], queries: &[Query]) -> (Table, usize, Vec<[usize; 2]>) {
    let mut tiles: Vec<[usize; 6]> = Vec::new();
    let mut seen = Vec::with_capacity(queries.len());
    let mut first = 0;
    for same in queries.chunk_by(|a, b| (a.head, a.list) == (b.head, b.list)) {
        for part in same.chunks(ROWS) {
            let see = || part.iter().map(|query| &query.keys).filter(|keys| !keys.is_empty());
            let begin = see().map(|keys| keys.start).min().unwrap_or(0);
            let end = see().map(|keys| keys.end).max().unwrap_or(0);
            tiles.push([part[0].head, first, part.len(), begin, end, starts[part[0].list]]);
            seen.extend(part.iter().map(|query| [query.keys.len(), end - begin]));
            first += part.len();
        }
    }
    tiles.sort_by_key(|&[_, first, _, begin, end, _]| (std::cmp::Reverse(end - begin), first));
    let mut table = Table::default();
    tiles.iter().for_each(|tile| table.i32(&tile.map(|number| number as i32)));
    (table, tiles.len(), seen)
}

/// Returns the factor that makes a sum of so many steps no lower than the exact one.
fn made_up(steps: usize) -> f64 {
    (1.0 - STEP_LOSS).powi(-(steps.min(i32::MAX as usize) as i32))
}

/// Results on the device. Those for tier T are empty where they are not wanted.
struct Results {
    out: DeviceBuffer,
    magnitudes: DeviceBuffer,
    statistics: DeviceBuffer,
    squares: DeviceBuffer,
    dither: DeviceBuffer,
    bits: DeviceBuffer,
    /// The 4-byte words of a row's bits.
    words: usize,
}

impl Results {
    fn new(gpu: &Gpu, questions: &Questions, dim_v: usize, dither: bool) -> Result<Results, KernelError> {
        let count = questions.queries();
        let dithered = if dither { count } else { 0 };
        let keys = questions.seen.iter().map(|&[keys, _]| keys).max().unwrap_or(0);
        let words = 2 * (keys * SLOTS).div_ceil(32);
        Ok(Results {
            out: gpu.allocate(count * dim_v * 8)?,
            magnitudes: gpu.allocate(count * dim_v * 4)?,
            statistics: gpu.allocate(count * STATISTICS * 8)?,
            squares: gpu.allocate(dithered * dim_v * 4)?,
            dither: gpu.allocate(dithered * DITHER * 8)?,
            bits: gpu.allocate(dithered * words * 4)?,
            words,
        })
    }

    fn answers(
        &self,
        gpu: &Gpu,
        questions: &Questions,
        [dim, dim_v]: [usize; 2],
        dither: bool,
        ms: f64,
    ) -> Result<Answers, KernelError> {
        let numbers = |buffer: &DeviceBuffer| Ok::<Vec<f64>, KernelError>(f64s(&gpu.read(buffer.area())?));
        let of_a = made_up(dim.div_ceil(STEP));
        let statistic = |(of, &[keys, _]): (&[f64], &[usize; 2])| Statistics {
            keys,
            largest: of[0],
            smallest: of[1],
            sum: of[2],
            sum_a: of[3] * of_a,
            largest_a: of[4] * of_a,
        };
        let all = numbers(&self.statistics)?;
        let dither = match dither {
            true => Some(Dither {
                statistics: dither_statistics(&gpu.read(self.dither.area())?),
                squares: rounded_up(questions, dim_v, &gpu.read(self.squares.area())?),
            }),
            false => None,
        };
        Ok(Answers {
            statistics: all.chunks_exact(STATISTICS).zip(&questions.seen).map(statistic).collect(),
            dim_v,
            out: numbers(&self.out)?,
            magnitudes: rounded_up(questions, dim_v, &gpu.read(self.magnitudes.area())?),
            dither,
            ms,
        })
    }
}

/// Returns the source of the reference kernels, which no production launch needs.
pub fn source() -> Source {
    let text = include_str!("../cuda/reference.cu").to_owned();
    // Products and sums are contracted where the compiler sees fit: results are bounded, and need equal nothing.
    Source { file: "reference.cu", text, options: &[], planted: false }
}

/// Opens a GPU with the reference kernels alone.
pub fn open(ordinal: usize, cache: &Cache) -> Result<Gpu, KernelError> {
    Gpu::with_sources(ordinal, cache, &[source()])
}

/// Returns the answers to questions about the forward of `tensors`, on a GPU that has the reference kernels; with
/// `dither` those for tier T too. An input other than 0 counts as at least `floor` in a magnitude. The sink does not
/// count here.
///
/// The GPU needs `12·dim_v + 40` bytes a query; with `dither` it needs `4·dim_v + 48` more, and 16 for each key that
/// the longest row sees.
pub fn answer(
    gpu: &Gpu,
    questions: &Questions,
    softmax: &Softmax,
    (floor, dither): (f64, bool),
    tensors: &ReferenceTensors,
) -> Result<Answers, KernelError> {
    let ReferenceTensors { q, k, v } = tensors;
    check(questions, tensors)?;
    let ([_, heads, dim], [_, kv_heads, dim_v]) = (q.shape(), v.shape());
    let tables = gpu.upload(&questions.bytes)?;
    let results = Results::new(gpu, questions, dim_v, dither)?;
    let begin = |area: Area, at: usize| area.address() + at as u64;
    let arguments = RawReference {
        views: [q.raw("q")?, k.raw("k")?, v.raw("v")?],
        tables: [
            begin(tables.area(), 0),
            begin(tables.area(), questions.tiles),
            begin(tables.area(), questions.keys),
            begin(results.out.area(), 0),
            begin(results.magnitudes.area(), 0),
            begin(results.statistics.area(), 0),
            begin(results.squares.area(), 0),
            begin(results.dither.area(), 0),
            begin(results.bits.area(), 0),
        ],
        scale: f64::from(softmax.scale),
        softcap: softmax.softcap.map_or(0.0, f64::from),
        group: (heads / kv_heads) as i32,
        dim: dim as i32,
        dim_v: dim_v as i32,
        floor: floor as f32,
        words: results.words as i32,
    };
    let grid = (questions.tile_count, dim_v.div_ceil(LANES), THREADS);
    // SAFETY: `RawReference` is what both kernels take. `check` holds the tables to the tensors, and the results are
    // as long as the tables ask.
    let launch = |kernel: &str| unsafe { gpu.launch_foreign(kernel, grid, shared_bytes(dim), &[&arguments]) };
    let work = || {
        launch("reference")?;
        if dither {
            gpu.fill(results.bits.area(), 0)?;
            launch("reference_dither")?;
        }
        Ok(())
    };
    let ms = if questions.tile_count == 0 { 0.0 } else { gpu.record(work)?.time()? };
    results.answers(gpu, questions, [dim, dim_v], dither, f64::from(ms))
}
fn dither_statistics(bytes: &[u8]) -> Vec<DitherStatistics> {
    let words = bytes.as_chunks::<8>().0;
    let statistic = |of: &[[u8; 8]]| {
        let of = |index: usize| f64::from_le_bytes(of[index]);
        let [weights, energy, alike, alike_energy] = [2, 3, 4, 5].map(of);
        let shared = (alike / weights).max(alike_energy / energy);
        DitherStatistics { sum: of(0), sum_squares: of(1), shared }
    };
    words.chunks_exact(DITHER).map(statistic).collect()
}

/// Returns sums of products over the keys of blocks, made up for what the matrix unit loses.
fn rounded_up(questions: &Questions, dim_v: usize, bytes: &[u8]) -> Vec<f64> {
    let mut sums: Vec<f64> =
        bytes.as_chunks().0.iter().map(|&bytes| f64::from(f32::from_le_bytes(bytes))).collect();
    for (of_row, &[_, walked]) in sums.chunks_mut(dim_v).zip(&questions.seen) {
        let factor = made_up(walked.div_ceil(KEYS) * (KEYS / STEP));
        // A product below the smallest normal number may be lost.
        let lost = walked as f64 * f64::from(f32::MIN_POSITIVE);
        of_row.iter_mut().for_each(|sum| *sum = *sum * factor + lost);
    }
    sums
}

fn f64s(bytes: &[u8]) -> Vec<f64> {
    bytes.as_chunks().0.iter().map(|&bytes| f64::from_le_bytes(bytes)).collect()
}

/// Returns the block of a reference kernel with the largest head dim; `None` for any other kernel.
pub(crate) fn block_of(kernel: &str) -> Option<Block> {
    kernel.starts_with("reference").then(|| Block { threads: THREADS, shared: shared_bytes(DIM_MAX) })
}

/// Returns the dynamic shared memory of a block, as the source lays it out.
fn shared_bytes(dim: usize) -> usize {
    let of_keys = KEYS + 4;
    let inputs = (ROWS + KEYS) * (dim.next_multiple_of(STEP) + 4) * 4;
    ROWS * of_keys * (8 + 4) + KEYS * (LANES + 8) * 4 + inputs
}

fn check(questions: &Questions, ReferenceTensors { q, k, v }: &ReferenceTensors) -> Result<(), KernelError> {
    let ([q_rows, heads, dim], [kv_rows, kv_heads, k_dim], [v_rows, v_heads, dim_v]) =
        (q.shape(), k.shape(), v.shape());
    let fit = kv_heads > 0 && kv_heads == v_heads && heads % kv_heads == 0 && kv_rows == v_rows;
    if dim.max(dim_v) > DIM_MAX {
        let what = format!("head dims {dim} and {dim_v}; the reference takes up to {DIM_MAX}");
        return Err(KernelError::shape(what));
    }
    if !fit || k_dim != dim || dim == 0 || dim_v == 0 {
        let what =
            format!("q {:?}, k {:?} and v {:?} do not fit each other", q.shape(), k.shape(), v.shape());
        return Err(KernelError::shape(what));
    }
    let [q_end, kv_end, heads_end] = questions.ends;
    if q_end > q_rows || kv_end > kv_rows || heads_end > heads {
        let what = format!("the tensors lack row {q_end}, {kv_end} or head {heads_end}, counted from 1");
        return Err(KernelError::shape(what));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn questions_that_fit_no_list_are_refused() {
        let query = |list: usize, keys: Range<usize>| Query { row: 0, head: 0, list, keys };
        let refused = |query: Query| Questions::new(&[vec![5, 6]], &[query]).is_err();
        assert!(!refused(query(0, 0..2)) && !refused(query(0, 2..2)) && !refused(query(1, 0..0)));
        assert!(refused(query(0, 0..3)) && refused(query(0, Range { start: 2, end: 1 })));
        assert!(refused(query(1, 0..1)) && refused(Query { row: ROWS_MAX, ..query(0, 0..1) }));
    }

    #[test]
    fn neighbours_share_tiles_and_the_longest_come_first() {
        let query = |row: usize, head: usize, end: usize| Query { row, head, list: head, keys: end - 1..end };
        let queries: Vec<Query> = (0..70).map(|row| query(row, 0, 100)).chain([query(3, 1, 7)]).collect();
        let longer = Query { keys: 0..7, ..query(4, 1, 7) };
        let questions = Questions::new(
            &[(0..100).collect(), (0..7).collect()],
            &[queries.as_slice(), &[longer]].concat(),
        )
        .unwrap();
        assert_eq!((questions.tile_count, questions.queries()), (3, 72));
        let table: Vec<i32> = questions.bytes[questions.tiles..questions.keys]
            .as_chunks()
            .0
            .iter()
            .map(|&bytes| i32::from_le_bytes(bytes))
            .collect();
        let expected: [[i32; 6]; 3] = [[1, 70, 2, 0, 7, 100], [0, 0, 64, 99, 100, 0], [0, 64, 6, 99, 100, 0]];
        assert_eq!(table, expected.concat());
        assert_eq!(questions.seen[70..], [[1, 7], [7, 7]]);
        assert_eq!(questions.ends, [70, 100, 2]);
    }
}
