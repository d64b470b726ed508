//! Benchmarks of `seamproof bench`: figures with the ratio to a limit or a peer in the same run.

mod merge;

use std::io::{self, Write};
use std::time::Instant;

use ndarray::{Array1, Array2, Array3, Zip};
use rayon::prelude::*;
use seamproof_oracle::envelope::{Accumulation, Arithmetic, Model, Partition};
use seamproof_oracle::{
    Algorithm, Balance, ContextParallel, Heads, Inputs, Mask, Problem, ProblemError, ProblemFields, Run,
    Saved, Sequence, SharedKeys, Sharing, Softmax, TensorRows, blocked,
};

use seamproof_simulator::check::check;
use seamproof_simulator::check::plan::prove_plan;
use seamproof_simulator::schedule::plan::Plan;
use seamproof_simulator::schedule::{MergeOrder, build};

pub use merge::{MergeBenchError, merge};
use seamproof_judge::values;

/// Head dimension of the oracle's benchmark.
const DIM: usize = 128;
/// Number of matrix products of one pair: QKᵀ and PV forward; QKᵀ, dOVᵀ, dq, dk and dv backward.
const PRODUCTS: f64 = 7.0;
/// Number of matrix products of one pair with the envelope of dithered inputs. The envelope adds `Σ|q||k|` forward,
/// that and `Σ|dout||v|` backward, and for each of out, dq, dk and dv its sum of magnitudes, the roundings, and their
/// squares.
const PRODUCTS_WITH_ENVELOPE: f64 = PRODUCTS + 3.0 + 12.0;
/// Side of the matrices that the GEMM crate's own rate is measured on.
const GEMM_SIDE: usize = 1536;
/// Number of repetitions, of which the best one counts.
const REPETITIONS: usize = 3;

/// Returns one causal sequence of `length` in bf16.
fn problem(length: usize, heads: usize) -> Result<Problem, ProblemError> {
    Problem::new(ProblemFields {
        heads: Heads { q: heads, kv: heads },
        mask: Mask::CAUSAL,
        softmax: Softmax::scaled(0.088_388_35),
        data_seed: 1,
        ..ProblemFields::packed(&[(length, length)], DIM)
    })
}

/// Returns the seconds of the best of [`REPETITIONS`] runs.
fn best_seconds(mut work: impl FnMut()) -> f64 {
    (0..REPETITIONS)
        .map(|_| {
            let start = Instant::now();
            work();
            start.elapsed().as_secs_f64()
        })
        .fold(f64::INFINITY, f64::min)
}

/// Returns the GEMM crate's own f64 rate with every thread multiplying square matrices, in GFLOP/s.
fn gemm_rate(threads: usize) -> f64 {
    let matrix = |seed: u64| {
        Array2::from_shape_fn((GEMM_SIDE, GEMM_SIDE), |(i, j)| {
            (seamproof_judge::hash::mix(seed + (i * GEMM_SIDE + j) as u64) >> 40) as f64 / 16_777_216.0 - 0.5
        })
    };
    let (a, b) = (matrix(1), matrix(2));
    let mut results = vec![Array2::<f64>::zeros((GEMM_SIDE, GEMM_SIDE)); threads];
    let seconds = best_seconds(|| {
        results.par_iter_mut().for_each(|c| ndarray::linalg::general_mat_mul(1.0, &a, &b, 0.0, c));
    });
    threads as f64 * 2.0 * (GEMM_SIDE as f64).powi(3) / seconds / 1e9
}

/// Runs the oracle's forward and backward, with the envelope of a subject that sums serially where `envelope` is set.
fn run_oracle(problem: &Problem, inputs: &Inputs, envelope: bool) {
    let tiles = Partition::single(128, 128);
    let arithmetic = Arithmetic::flash_attention(Accumulation::F32Serial);
    let model = envelope.then(|| Model::new(problem, arithmetic, tiles));
    let forward = blocked::forward(problem, inputs, model.as_ref());
    let saved = Saved::from(&forward.exact);
    std::hint::black_box(blocked::backward(problem, inputs, &saved, model.as_ref()));
}

/// Runs a naive reference: whole score matrices in f64, the mask as −∞, one matrix product a line.
fn run_dense(problem: &Problem, inputs: &Inputs) {
    let head_of =
        |tensor: &Array3<f32>, head: usize| tensor.index_axis(ndarray::Axis(1), head).mapv(f64::from);
    (0..problem.heads.q).into_par_iter().for_each(|head| {
        let (q, k) = (head_of(&inputs.q, head), head_of(&inputs.k, head));
        let (v, dout) = (head_of(&inputs.v, head), head_of(&inputs.dout, head));
        let scale = f64::from(problem.softmax.scale);
        let mut p = q.dot(&k.t()) * scale;
        for ((i, j), score) in p.indexed_iter_mut() {
            if j > i {
                *score = f64::NEG_INFINITY;
            }
        }
        for mut row in p.rows_mut() {
            let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            row.mapv_inplace(|score| (score - max).exp());
            let sum = row.sum();
            row.mapv_inplace(|weight| weight / sum);
        }
        let out = p.dot(&v);
        let dv = p.t().dot(&dout);
        let d: Array1<f64> = (&dout * &out).sum_axis(ndarray::Axis(1));
        let mut ds = dout.dot(&v.t());
        for ((mut ds, p), d) in ds.rows_mut().into_iter().zip(p.rows()).zip(&d) {
            Zip::from(&mut ds).and(&p).for_each(|ds, p| *ds = p * (*ds - d) * scale);
        }
        std::hint::black_box((out, dv, ds.dot(&k), ds.t().dot(&q)));
    });
}

/// Prints the blocked oracle's rate beside the GEMM crate's own and a dense reference's time.
///
/// A FLOP counts only where a visible pair needs it, so work on hidden pairs lowers the fraction. With the envelope,
/// the products over magnitudes count too, since they are executed.
pub fn oracle(lengths: &[usize], to: &mut dyn Write) -> io::Result<()> {
    let threads = rayon::current_num_threads();
    let gemm = gemm_rate(threads);
    writeln!(
        to,
        "bench oracle: f64, causal, d {DIM}, {threads} heads on {threads} threads, forward + backward"
    )?;
    writeln!(to, "limit: the GEMM crate's own rate, {GEMM_SIDE}³ on every thread: {gemm:.1} GFLOP/s")?;
    writeln!(
        to,
        "{:>7} {:>10} {:>9} {:>9} {:>10} {:>9} {:>9} {:>9} {:>9}",
        "length", "oracle s", "GFLOP/s", "of GEMM", "+bounds s", "GFLOP/s", "of GEMM", "dense s", "× faster"
    )?;
    for &length in lengths {
        let problem = problem(length, threads).map_err(io::Error::other)?;
        let inputs = values::inputs(&problem);
        let pair_flops = problem.pairs() as f64 * threads as f64 * 2.0 * DIM as f64 / 1e9;
        let plain = best_seconds(|| run_oracle(&problem, &inputs, false));
        let bounded = best_seconds(|| run_oracle(&problem, &inputs, true));
        let dense = best_seconds(|| run_dense(&problem, &inputs));
        let (rate, bounded_rate) =
            (PRODUCTS * pair_flops / plain, PRODUCTS_WITH_ENVELOPE * pair_flops / bounded);
        writeln!(
            to,
            "{length:>7} {plain:>10.3} {rate:>9.1} {:>9.2} {bounded:>10.3} {bounded_rate:>9.1} {:>9.2} {dense:>9.3} {:>9.2}",
            rate / gemm,
            bounded_rate / gemm,
            dense / plain
        )?;
    }
    Ok(())
}

/// Number of tokens of the pack that schedules are proved on.
const PROVED_TOKENS: usize = 1 << 20;

/// One causal pack over ranks, forward and backward.
#[derive(Clone, Copy)]
struct Pack {
    name: &'static str,
    algorithm: Algorithm,
    balance: Balance,
    sequences: usize,
    /// Number of ranks in all; there are as many heads.
    ranks: usize,
    /// Number of ranks of a sequence-parallel region around each rank of the group; 1 for no region.
    region: usize,
    /// Rows of padding that each sequence has more than the one before.
    unlike: usize,
    /// Order in which a plan's rings merge.
    order: MergeOrder,
    /// Whether every other sequence borrows half of its keys of the first one.
    shares: bool,
}

/// Most seconds and GiB that a proof of [`PROVED_TOKENS`] may take on two cores.
const LIMITS: (f64, f64) = (10.0, 2.0);
/// Number of ranks for which plans are proved.
const PLANNED_RANKS: usize = 1024;

impl Pack {
    /// Returns a pack of [`PROVED_TOKENS`] in 64 sequences on 64 ranks.
    fn new(name: &'static str, algorithm: Algorithm, balance: Balance) -> Pack {
        Pack {
            name,
            algorithm,
            balance,
            sequences: 64,
            ranks: 64,
            region: 1,
            unlike: 0,
            order: MergeOrder::Running,
            shares: false,
        }
    }

    fn problem(&self) -> Result<Problem, ProblemError> {
        let Pack { algorithm, balance, ranks, unlike, .. } = *self;
        let span = PROVED_TOKENS / self.sequences;
        // Every sequence ends in padding, so that real and owned rows differ.
        let of = |id: usize| Run::packed(id * span, span - 5 - unlike * id, span);
        let sequences = (0..self.sequences).map(|id| Sequence { id: id as u32, q: of(id), kv: of(id) });
        let borrowed = |sequence| SharedKeys { sequence, with: 0, keys: span / 2 };
        let borrowers = (1..self.sequences).step_by(2).filter(|_| self.shares);
        let sharing = Sharing(borrowers.map(borrowed).collect());
        let world = ranks / self.region;
        let parallel =
            ContextParallel { region: self.region, ..ContextParallel::over(world, algorithm, balance) };
        Problem::new(ProblemFields {
            sequences: sequences.collect(),
            rows: TensorRows { q: PROVED_TOKENS, kv: PROVED_TOKENS },
            heads: Heads { q: ranks, kv: ranks },
            parallel,
            sharing,
            ..problem(1, 1)?.into()
        })
    }

    /// Builds and proves the pack's schedule, and writes one line of the table.
    fn prove(&self, to: &mut dyn Write) -> io::Result<()> {
        let Pack { name, sequences, ranks, .. } = *self;
        let problem = self.problem().map_err(io::Error::other)?;
        forget_peak();
        let start = Instant::now();
        let schedule = build(&problem).map_err(io::Error::other)?;
        let built = start.elapsed().as_secs_f64();
        let result = check(&problem, &schedule);
        let proved = start.elapsed().as_secs_f64() - built;
        let operations = match result {
            Ok(proof) => proof.operations.to_string(),
            Err(errors) => format!("{} WRONG", errors.len()),
        };
        let peak = peak_memory().map_or("?".into(), |gib| format!("{gib:.2}"));
        writeln!(
            to,
            "{name:<32} {sequences:>9} {ranks:>5} {built:>9.2} {proved:>9.2} {operations:>11} {peak:>9}"
        )
    }
}

impl Pack {
    /// Makes and proves the pack's plan, and writes one line of the table of plans.
    fn prove_plan(&self, to: &mut dyn Write) -> io::Result<()> {
        let Pack { name, ranks, .. } = *self;
        let problem = self.problem().map_err(io::Error::other)?;
        forget_peak();
        let start = Instant::now();
        let plan = Plan::new(&problem, self.order).map_err(io::Error::other)?;
        let proof = prove_plan(&plan, &plan);
        let seconds = start.elapsed().as_secs_f64();
        let operations =
            proof.map_or_else(|error| format!("WRONG: {error}"), |proof| proof.operations.to_string());
        let of_time = seconds / LIMITS.0;
        let (peak, of_peak) = peak_memory().map_or_else(
            || ("?".into(), "?".into()),
            |gib| (format!("{gib:.2}"), format!("{:.2}", gib / LIMITS.1)),
        );
        writeln!(
            to,
            "{name:<40} {ranks:>5} {seconds:>9.2} {of_time:>9.2} {peak:>9} {of_peak:>9} {operations:>11}"
        )
    }
}

/// Prints how long it takes to prove the plan of each algorithm that has one.
fn prove_plans(to: &mut dyn Write) -> io::Result<()> {
    let (stripes, dual) = (Balance::Striped { stripe: 1 }, Balance::DualChunk);
    let hierarchical = |all_to_all| Algorithm::Hierarchical { all_to_all };
    let over =
        |name, algorithm, balance| Pack { ranks: PLANNED_RANKS, ..Pack::new(name, algorithm, balance) };
    let deferred = |pack, name| Pack { order: MergeOrder::Deferred, name, ..pack };
    let regions = |pack, name| Pack { region: 8, name, ..pack };
    let shared = |pack, name| Pack { shares: true, name, ..pack };
    let ring = over("ring, dual-chunk", Algorithm::Ring, dual);
    let lines = [
        ring,
        Pack { name: "ring, dual-chunk, unlike sequences", unlike: 31, ..ring },
        over("ring, contiguous", Algorithm::Ring, Balance::Contiguous),
        over("ring, stripes of 1", Algorithm::Ring, stripes),
        over("ring, stripes of 4", Algorithm::Ring, Balance::Striped { stripe: 4 }),
        over("hierarchical 8 × 128, dual-chunk", hierarchical(8), dual),
        over("hierarchical 8 × 128, stripes of 1", hierarchical(8), stripes),
        over("all-to-all, dual-chunk", Algorithm::AllToAll, dual),
        over("all-gather, dual-chunk", Algorithm::AllGather, dual),
        over("all-gather, contiguous", Algorithm::AllGather, Balance::Contiguous),
        over("all-gather, stripes of 1", Algorithm::AllGather, stripes),
        over("all-gather, stripes of 4", Algorithm::AllGather, Balance::Striped { stripe: 4 }),
        over("hierarchical 128 × 8, stripes of 1", hierarchical(128), stripes),
        deferred(ring, "ring, dual-chunk, deferred"),
        Pack { unlike: 31, ..deferred(ring, "ring, dual-chunk, unlike, deferred") },
        deferred(over("", Algorithm::Ring, Balance::Striped { stripe: 4 }), "ring, stripes of 4, deferred"),
        deferred(over("", hierarchical(128), stripes), "hierarchical 128 × 8, of 1, deferred"),
        deferred(over("", Algorithm::AllToAll, dual), "all-to-all, dual-chunk, deferred"),
        deferred(over("", Algorithm::AllGather, dual), "all-gather, dual-chunk, deferred"),
        deferred(over("", Algorithm::AllGather, stripes), "all-gather, stripes of 1, deferred"),
        deferred(
            over("", Algorithm::AllGather, Balance::Striped { stripe: 4 }),
            "all-gather, stripes of 4, deferred",
        ),
        shared(ring, "ring, dual-chunk, shared keys"),
        shared(over("", Algorithm::Ring, stripes), "ring, stripes of 1, shared keys"),
        shared(over("", hierarchical(8), dual), "hierarchical 8 × 128, shared keys"),
        shared(over("", Algorithm::AllToAll, dual), "all-to-all, dual-chunk, shared keys"),
        shared(over("", Algorithm::AllGather, dual), "all-gather, dual-chunk, shared keys"),
        regions(ring, "ring of 128, regions of 8"),
        regions(over("", Algorithm::AllGather, stripes), "all-gather over 128, of 1, regions of 8"),
        regions(shared(ring, ""), "ring of 128, shared keys, regions of 8"),
    ];
    writeln!(to, "plans, whole pieces")?;
    writeln!(
        to,
        "{:<40} {:>5} {:>9} {:>9} {:>9} {:>9} {:>11}",
        "algorithm", "ranks", "prove s", "of limit", "peak GiB", "of limit", "operations"
    )?;
    lines.iter().try_for_each(|pack| pack.prove_plan(to))
}

/// Returns the peak memory of this process since [`forget_peak`], in GiB, where the system tells it.
fn peak_memory() -> Option<f64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kib: f64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib / f64::from(1 << 20))
}

/// Begins a new peak at the memory that the process holds now (proc_pid_clear_refs(5)). Where that is not possible,
/// the peak stays that of the process so far.
fn forget_peak() {
    let _unsupported = std::fs::write("/proc/self/clear_refs", "5");
}

/// Prints how long it takes to prove each algorithm's plan of a million tokens, and to build and prove its schedule, and
/// how that grows with ranks and sequences.
///
/// An all-gather over stripes of one row is not in the table. Each of its queries is a segment of its own, and each
/// launch writes keys that lie apart. Its rows are therefore proved one by one, and its cost grows with tokens times
/// ranks.
pub fn prove(to: &mut dyn Write) -> io::Result<()> {
    let stripes = |stripe: usize| Balance::Striped { stripe };
    let dual = Balance::DualChunk;
    let hierarchical = Algorithm::Hierarchical { all_to_all: 8 };
    let striped = Pack::new("all-gather, stripes of 128", Algorithm::AllGather, stripes(128));
    let ring = Pack::new("ring, dual-chunk", Algorithm::Ring, dual);
    let lines = [
        striped,
        Pack { sequences: 16, ..striped },
        Pack { ranks: 16, ..striped },
        Pack::new("all-gather, dual-chunk", Algorithm::AllGather, dual),
        Pack::new("ring, stripes of 1", Algorithm::Ring, stripes(1)),
        ring,
        Pack { sequences: 16, ..ring },
        Pack { ranks: 16, ..ring },
        Pack::new("hierarchical 8 × 8, dual-chunk", hierarchical, dual),
        Pack::new("all-to-all, dual-chunk", Algorithm::AllToAll, dual),
        Pack { region: 8, ..Pack::new("ring of 8, regions of 8", Algorithm::Ring, dual) },
    ];
    let (time, peak) = LIMITS;
    writeln!(
        to,
        "bench prove: {PROVED_TOKENS} tokens, causal, forward + backward; limits: {time} s and {peak} GiB each"
    )?;
    // An allocator keeps what the schedules take.
    prove_plans(to)?;
    writeln!(to, "schedules, unrolled")?;
    writeln!(
        to,
        "{:<32} {:>9} {:>5} {:>9} {:>9} {:>11} {:>9}",
        "algorithm", "sequences", "ranks", "build s", "prove s", "operations", "peak GiB"
    )?;
    lines.iter().try_for_each(|pack| pack.prove(to))?;
    writeln!(
        to,
        "not measured: all-gather, stripes of 1; its rows are proved one by one, too many at a million tokens"
    )
}
