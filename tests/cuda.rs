//! The CUDA device. What needs a Hopper GPU is ignored unless asked for, and fails without one:
//! `cargo test --release --test cuda -- --ignored`

use std::collections::BTreeMap;
use std::sync::Mutex;

use seamproof::backend::{Backend, Outputs, RunError, Wrapper, algorithm_name};
use seamproof::backends::{Cuda, CudaRunner, difference};
use seamproof::evaluate::evaluate;
use seamproof::generate::{self, Draw, Profile};
use seamproof::values::{self, Poison};
use seamproof::verdict::Verdict;
use seamproof_kernels::Gpu;
use seamproof_kernels::attend::CallTables;
use seamproof_kernels::cache::Cache;
use seamproof_kernels::source::{Source, sources};
use seamproof_oracle::{Inputs, Pass, Problem};
use seamproof_simulator::schedule::{MergeOrder, Work};

/// Random problems that the subject takes, with the subject.
fn problems(cases: u64, seed: u64) -> impl Iterator<Item = (Problem, Cuda)> {
    let limits = Profile::Seams.limits();
    let drawn = (0..cases).filter_map(move |case| match generate::draw(seed, case, &limits) {
        Draw::Problem(problem) => {
            let merge = MergeOrder::ALL[case as usize % 2];
            Some((problem, Cuda { order: case, merge, helpers: !case.is_multiple_of(3) }))
        }
        Draw::Malformed(_) => None,
    });
    drawn.filter(|(problem, subject)| subject.capabilities().refusal(problem).is_none())
}

/// No launch of any schedule names a key twice or a row outside of its tensors: the launcher takes them all.
#[test]
fn every_launch_of_a_schedule_has_tables() {
    let (mut forward, mut backward) = (0, 0);
    for (problem, subject) in problems(3000, 3) {
        let schedule = subject.schedule(&problem).unwrap();
        let rows = |id: seamproof_simulator::schedule::BufferId| schedule.buffers[id.0].rows;
        for operation in schedule.ranks.iter().flat_map(|program| &program.operations) {
            match &operation.work {
                Work::Attend(attend) => {
                    CallTables::new(&attend.call, [rows(attend.q), rows(attend.k)], false).unwrap();
                    forward += 1;
                }
                Work::AttendBackward(attend) => {
                    CallTables::new(&attend.call, [rows(attend.q), rows(attend.k)], true).unwrap();
                    backward += 1;
                }
                _ => {}
            }
        }
    }
    assert!(forward > 2000 && backward > 1000, "too little run: {forward}, {backward}");
}

#[test]
#[ignore = "needs a Hopper GPU"]
fn every_schedule_gives_the_bits_of_the_cpu_device() {
    let mut runner = CudaRunner::open(0).unwrap_or_else(|error| panic!("{error}"));
    let mut seen: BTreeMap<(&str, bool), u32> = BTreeMap::new();
    for (problem, subject) in problems(4000, 5) {
        let mut inputs = values::inputs(&problem);
        values::poison(&mut inputs, &problem, Poison::Nan);
        let want = subject.twin().run(&problem, &inputs).unwrap();
        let got = runner.run(&subject, &problem, &inputs, &mut |_| {});
        let got = got.unwrap_or_else(|error: RunError| panic!("{error}: {problem:?}"));
        if let Some(what) = difference(&got, &want) {
            panic!("{what}: {problem:?}");
        }
        let algorithm = algorithm_name(problem.parallel.algorithm);
        *seen.entry((algorithm, problem.pass == Pass::Backward)).or_default() += 1;
    }
    assert!(seen.len() == 10 && seen.values().all(|&count| count >= 50), "too little run: {seen:?}");
}

/// Cases within which a planted fault must be found.
const FAULT_CASES: u64 = 400;

/// Source edits of the attention kernels and of those on tables, each of which a seam shows: what is wrong, the source, a
/// text that is in it exactly once, and what stands there instead.
const FAULTS: [(&str, &str, &str, &str); 31] = [
    (
        "the diagonal is not seen",
        "attend.cu",
        "min(index + segment.hi + 1, segment.keys)",
        "min(index + segment.hi, segment.keys)",
    ),
    (
        "a window one key short",
        "attend.cu",
        "max(index + segment.lo, (i64)0)",
        "max(index + segment.lo + 1, (i64)0)",
    ),
    (
        "the first block of keys is skipped",
        "attend.cu",
        "query.first / 32 * 32; tile",
        "query.first / 32 * 32 + (query.end > 32 ? 32 : 0); tile",
    ),
    (
        "sums are not rescaled",
        "attend.cu",
        "const float factor = exact_exp(largest - tile_max);",
        "const float factor = 1.0f;",
    ),
    (
        "the last tile's maximum is taken over masked keys",
        "attend.cu",
        "key >= query.first && key < query.end;",
        "key < query.segment.keys;",
    ),
    (
        "KV heads by remainder",
        "attend.cu",
        "kv_head = head / call.group;\n    const Query query = query_at(call, owned);\n    const i64 out",
        "kv_head = head % (call.heads / call.group);\n    const Query query = query_at(call, owned);\n    const i64 out",
    ),
    (
        "dv taken for dqk",
        "attend.cu",
        "1.0f / sum, a.out, out, call.dim_v)",
        "1.0f / sum, a.out, out, min(call.dim, call.dim_v))",
    ),
    (
        "lse of the wrong head",
        "attend.cu",
        "if (lane == 0) put(a.lse, lse, sum",
        "if (lane == 0) put(a.lse, place_of(a.lse, query.row, 0), sum",
    ),
    (
        "the row sum in 16 bits",
        "attend.cu",
        "sum += __shfl_sync(FULL, weight, j);",
        "sum = rounded_to(BF16, sum + __shfl_sync(FULL, weight, j));",
    ),
    ("padding of out keeps what was there", "attend.cu", "        put_zeros(a.out, out, call.dim_v);\n", ""),
    ("out of an empty row", "attend.cu", "sum == 0.0f ? 0.0f : 1.0f / sum", "1.0f / sum"),
    ("the sink is not counted", "attend.cu", "        sum += exact_exp(sink - largest);\n", ""),
    (
        "the largest logit of the first row alone",
        "attend.cu",
        "if (lane == 0 && largest > neg_infinity())",
        "if (lane == 0 && largest > neg_infinity() && query.index == 0)",
    ),
    (
        "no soft cap",
        "attend.cu",
        "call.softcap == 0.0f ? scaled : call.softcap * exact_tanh(scaled / call.softcap)",
        "scaled",
    ),
    ("dq without the scale", "attend.cu", "put_row(acc, call.scale, a.dq", "put_row(acc, 1.0f, a.dq"),
    ("dk without the scale", "attend.cu", "put_row(dk_sum, call.scale", "put_row(dk_sum, 1.0f"),
    ("dv with the scale", "attend.cu", "put_row(dv_sum, 1.0f", "put_row(dv_sum, call.scale"),
    (
        "one head of a group is lost",
        "attend.cu",
        "head < (kv_head + 1) * call.group;",
        "head < (kv_head + 1) * call.group - (call.group > 1);",
    ),
    (
        "queries of a key begin one late",
        "attend.cu",
        "const i64 first = max(key - segment.hi, (i64)0)",
        "const i64 first = max(key - segment.hi + 1, (i64)0)",
    ),
    (
        "queries of a key end one early",
        "attend.cu",
        "min(key - segment.lo + 1, segment.q_len)",
        "min(key - segment.lo, segment.q_len)",
    ),
    ("D left out of dq", "attend.cu", "const float d = row_dot(", "const float d = 0.0f * row_dot("),
    (
        "the last tile of dq is skipped",
        "attend.cu",
        "for (i64 tile = query.first; tile < query.end; tile += 32)",
        "for (i64 tile = query.first; tile + 31 < query.end; tile += 32)",
    ),
    (
        "lse of the first head for all",
        "attend.cu",
        "get(a.lse, place_of(a.lse, q_row, head))",
        "get(a.lse, place_of(a.lse, q_row, 0))",
    ),
    ("no derivative of the soft cap", "attend.cu", "return plain * (1.0f - ratio * ratio);", "return plain;"),
    (
        "dv from another head's dout",
        "attend.cu",
        "place_of(a.dout, from, head)",
        "place_of(a.dout, from, kv_head)",
    ),
    ("padding of dk keeps what was there", "attend.cu", "        put_zeros(a.dk, dk, call.dim);\n", ""),
    ("padding of dq keeps what was there", "attend.cu", "if (call.clear) put_zeros(a.dq, dq, call.dim);", ""),
    ("D of another segment", "attend.cu", "segment.first_row + index]", "index]"),
    (
        "a merge forgets what was there",
        "pairs.cu",
        "const float keep = a.style == RUNNING ? share(old, total) : 1.0f",
        "const float keep = a.style == RUNNING ? 0.0f : 1.0f",
    ),
    (
        "parts after the second are lost",
        "pairs.cu",
        "i < transfer.parts; ++i",
        "i < min(transfer.parts, 2); ++i",
    ),
    (
        "the sink leaves out as it was",
        "pairs.cu",
        "const float total = log_add(old, sink), keep = share(old, total);",
        "const float total = log_add(old, sink), keep = 1.0f;",
    ),
];

fn edited(file: &str, from: &str, to: &str) -> Vec<Source> {
    let mut sources = sources();
    for source in sources.iter_mut().filter(|source| source.file == file) {
        assert_eq!(source.text.matches(from).count(), 1, "{from} in {file}");
        source.text = source.text.replace(from, to);
    }
    sources
}

#[test]
fn every_fault_edits_a_source() {
    for (_, file, from, to) in FAULTS {
        assert_ne!(edited(file, from, to), sources());
    }
}

/// The subject on a GPU with other kernels.
struct Edited<'a> {
    subject: Cuda,
    runner: &'a Mutex<CudaRunner>,
}

impl Wrapper for Edited<'_> {
    fn inner(&self) -> &dyn Backend {
        &self.subject
    }

    fn run(&self, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
        self.runner.lock().unwrap().run(&self.subject, problem, inputs, &mut |_| {})
    }
}

/// Fills the cache with every edited source, on all cores.
fn compile_all() {
    std::thread::scope(|scope| {
        for (_, file, from, to) in FAULTS {
            scope.spawn(move || {
                for source in edited(file, from, to).iter().filter(|source| source.file == file) {
                    Cache::of_user().fill(source).unwrap_or_else(|error| panic!("{error}"));
                }
            });
        }
    });
}

/// Each fault is found by the judge, and the case and rung are printed.
#[test]
#[ignore = "needs a Hopper GPU"]
fn a_fault_in_a_kernel_is_found() {
    let mut missed = Vec::new();
    compile_all();
    for (fault, file, from, to) in FAULTS {
        let gpu = Gpu::with_sources(0, &Cache::of_user(), &edited(file, from, to));
        let runner = Mutex::new(CudaRunner::on(gpu.unwrap_or_else(|error| panic!("{fault}: {error}"))));
        let found = problems(FAULT_CASES, 11).enumerate().find_map(|(case, (problem, subject))| {
            // Kernels on tables, so that edits of them are met in every case.
            let subject = Cuda { helpers: false, ..subject };
            match evaluate(&Edited { subject, runner: &runner }, &problem) {
                Verdict::Finding(finding) => Some((case, finding)),
                _ => None,
            }
        });
        match found {
            Some((case, finding)) => eprintln!("{fault}: case {case}, {finding}"),
            None => missed.push(fault),
        }
    }
    assert!(missed.is_empty(), "missed: {missed:?}");
}
