//! The shrinker on faults whose smallest repro is known.
//!
//! A *fault* here is a predicate over problems, true where a subject with that fault would fail. The starts are
//! messy: every feature may be on. Each fault is shrunk from many starts, and must end exactly on one of its known
//! minima.

// The test prints tables of evaluations and of accepted steps, to be read with `--nocapture`.
#![allow(clippy::print_stdout)]

use std::num::NonZeroU32;

use proptest::test_runner::{Config, TestCaseError, TestError, TestRunner};
use seamproof_judge::generate::{Draw, Limits, draw};
use seamproof_judge::shrink::{Shrinker, Shrunk, shrink, size};
use seamproof_judge::strategy::ProblemTree;
use seamproof_oracle::{
    Algorithm, Alignment, Balance, Blocks, Borders, ContextParallel, Dims, Element, Form, Format, Heads,
    InputMode, Mask, Pages, Pass, Precision, Problem, ProblemFields, Run, ScaleValues, Scaling, Sequence,
    SharedKeys, Sharing, Sink, Softmax, Steps, TensorRows,
};

/// Number of starts of each fault.
const STARTS: usize = 100;
/// Largest number of evaluations of a shrink; the next constant is the largest size of a repro.
const EVALUATIONS_MAX: usize = 200;
const SEQUENCES_MAX: usize = 2;
const TOKENS_MAX: usize = 8;

/// The simpler of the scaled elements in the starts.
const SCALED: Element = Element { format: Format::E4m3, scaling: Scaling::PerTensor };

/// A known fault.
struct Fault {
    name: &'static str,
    fails: fn(&Problem) -> bool,
    /// Fixed points that a start may end on.
    minima: Vec<Problem>,
}

/// Counter-based choices: SplitMix64 of a seed.
struct Choices(u64);

impl Choices {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let a = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let b = (a ^ (a >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        b ^ (b >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    fn chance(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }

    /// Returns 1 to `most` with this chance, otherwise 0.
    fn some(&mut self, percent: usize, most: usize) -> usize {
        if self.chance(percent) { 1 + self.below(most) } else { 0 }
    }

    fn of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len())]
    }
}

/// Returns a length as a campaign draws it: many are short, some at block edges, some long.
fn length(c: &mut Choices) -> usize {
    match c.below(6) {
        0 => c.below(4),
        1 => c.of(&[7, 8, 9, 15, 16, 17, 31, 33]),
        2 => c.below(70),
        _ => c.below(18),
    }
}

/// Returns runs of the given lengths, with gaps, padding, a first offset, slack, an interleaved or a shuffled order.
fn runs(c: &mut Choices, lengths: &[usize]) -> (Vec<Run>, usize) {
    let (first, slack) = (c.some(40, 9), c.some(40, 9));
    let (padded, gapped) = (c.chance(50), c.chance(40));
    let spans: Vec<usize> = lengths.iter().map(|len| len + if padded { c.some(60, 7) } else { 0 }).collect();
    if c.chance(20) {
        let step = lengths.len().max(1);
        let most = spans.iter().max().copied().unwrap_or(0);
        let run = |(lane, (&len, &span))| Run { offset: first + lane, step, len, span };
        let runs = lengths.iter().zip(&spans).enumerate().map(run).collect();
        return (runs, first + step * most.max(1) + slack);
    }
    let mut order: Vec<usize> = (0..lengths.len()).collect();
    if c.chance(30) {
        for index in (1..order.len()).rev() {
            order.swap(index, c.below(index + 1));
        }
    }
    let mut runs = vec![Run::packed(0, 0, 0); lengths.len()];
    let mut at = first;
    for index in order {
        runs[index] = Run::packed(at, lengths[index], spans[index]);
        at += spans[index] + if gapped { c.some(50, 5) } else { 0 };
    }
    (runs, at + slack)
}

fn parallel(c: &mut Choices) -> ContextParallel {
    if c.chance(60) {
        return ContextParallel::single();
    }
    let size = 1 + c.below(8);
    let world = size + c.some(40, 5);
    let mut ranks: Vec<usize> = (0..world).collect();
    ranks.rotate_left(c.below(world));
    ranks.truncate(size);
    let hierarchical = Algorithm::Hierarchical { all_to_all: if size.is_multiple_of(2) { 2 } else { 1 } };
    let algorithm = c.of(&[Algorithm::Ring, Algorithm::AllGather, Algorithm::AllToAll, hierarchical]);
    let balance = c.of(&[Balance::Contiguous, Balance::DualChunk, Balance::Striped { stripe: 3 }]);
    ContextParallel { algorithm, balance, world, ranks, region: c.of(&[1, 1, 1, 2, 4]) }
}

fn precision(c: &mut Choices) -> Precision {
    let mut precision = Precision::uniform(c.of(&[Format::Bf16, Format::Fp16]));
    if c.chance(30) {
        precision.p = Format::F32.into();
    }
    if c.chance(15) {
        let scaling = c.of(&[Scaling::PerTensor, Scaling::PerBlock { rows: 1, columns: 32 }]);
        precision.k = Element { scaling, ..SCALED };
    }
    precision
}

fn blocks(c: &mut Choices) -> Option<Blocks> {
    match c.below(4) {
        0 => NonZeroU32::new(1 + c.below(20) as u32).map(Blocks::Chunks),
        1 => {
            let (mut at, count) = (0, 1 + c.below(5));
            let mut border = || {
                at += 1 + c.below(9) as u32;
                at
            };
            let keys: Vec<u32> = (0..count).map(|_| border()).collect();
            Borders::new(&keys).ok().map(Blocks::Documents)
        }
        _ => None,
    }
}

/// Returns a problem with every feature on or off by chance.
fn messy(seed: u64) -> Problem {
    let c = &mut Choices(seed);
    let count = c.below(12) + 1;
    let lengths: Vec<(usize, usize)> = (0..count)
        .map(|_| {
            let q = length(c);
            (q, if c.chance(50) { q } else { length(c) })
        })
        .collect();
    let (q, q_rows) = runs(c, &lengths.iter().map(|pair| pair.0).collect::<Vec<_>>());
    let (kv, kv_rows) = runs(c, &lengths.iter().map(|pair| pair.1).collect::<Vec<_>>());
    let sequences = (0..).zip(q.into_iter().zip(kv));
    let kv_heads = 1 + c.below(4);
    let side = |c: &mut Choices| c.chance(50).then(|| c.below(20) as u32);
    let fields = ProblemFields {
        sequences: sequences.map(|(id, (q, kv))| Sequence { id: 7 * id + 3, q, kv }).collect(),
        rows: TensorRows { q: q_rows, kv: kv_rows },
        heads: Heads { q: kv_heads * (1 + c.below(3)), kv: kv_heads },
        dims: Dims { qk: 1 + c.below(256), v: 1 + c.below(256) },
        mask: Mask {
            left: side(c),
            right: side(c),
            align: c.of(&[Alignment::TopLeft, Alignment::BottomRight]),
            blocks: blocks(c),
            prefix: c.some(30, 9) as u32,
            sink_tokens: c.some(30, 9) as u32,
        },
        softmax: Softmax {
            scale: c.of(&[1.0, 0.125, 0.3]),
            softcap: c.chance(30).then_some(20.0),
            sink: c.of(&[Sink::None, Sink::None, Sink::OffByOne, Sink::Learnable]),
        },
        precision: precision(c),
        parallel: parallel(c),
        mode: c.of(&InputMode::ALL),
        data_seed: c.next(),
        pass: c.of(&[Pass::Forward, Pass::Backward]),
        form: c.of(&Form::ALL),
        steps: Steps::default(),
        pages: None,
        scales: c.of(&ScaleValues::ALL),
        sharing: Sharing::default(),
    };
    let fields = if c.chance(10) { stepped(c, fields.clone()) } else { fields };
    let fields = if c.chance(10) { paged(c, fields.clone()) } else { fields };
    let fields = if c.chance(10) { borrowing(c, fields.clone()) } else { fields };
    Problem::new(fields.sayable()).expect("the sampler makes legal problems")
}

/// Returns a problem on one rank whose later sequences share their first keys with the first one that has any.
fn borrowing(c: &mut Choices, fields: ProblemFields) -> ProblemFields {
    let lens: Vec<usize> = fields.sequences.iter().map(|sequence| sequence.kv.len).collect();
    let (with, most) = (lens.iter().position(|len| *len > 0).unwrap_or_default(), 1 + c.below(9));
    let borrows =
        |sequence: usize| SharedKeys { sequence, with, keys: lens[sequence].min(lens[with]).min(most) };
    let shared = (with + 1..lens.len()).map(borrows).filter(|shared| shared.keys > 0);
    ProblemFields {
        parallel: ContextParallel::single(),
        mode: InputMode::Integers,
        form: Form::CuSeqlens,
        steps: Steps::default(),
        pages: None,
        sharing: Sharing(shared.collect()),
        ..fields
    }
}

/// Returns a forward on one rank that is made in steps.
fn stepped(c: &mut Choices, mut fields: ProblemFields) -> ProblemFields {
    for Sequence { q, kv, .. } in &mut fields.sequences {
        q.len = q.len.min(kv.len);
    }
    ProblemFields {
        mask: Mask { left: None, right: Some(0), align: Alignment::BottomRight, ..Mask::CAUSAL },
        parallel: ContextParallel::single(),
        pass: Pass::Forward,
        form: Form::CuSeqlens,
        steps: Steps(vec![1 + c.below(9), 1 + c.below(3)]),
        ..fields
    }
}

/// Returns a forward on one rank whose keys lie in pages in the opposite order, with a free page; a prefix may be
/// shared.
fn paged(c: &mut Choices, fields: ProblemFields) -> ProblemFields {
    let single = ProblemFields {
        parallel: ContextParallel::single(),
        pass: Pass::Forward,
        form: Form::CuSeqlens,
        ..fields
    };
    let keys = single.sequences.iter().map(|sequence| sequence.kv.len);
    let mut pages = Pages::in_order(1 + c.below(9), keys);
    if c.chance(50) {
        pages = pages.sharing_a_prefix(&single);
    }
    pages.count += 1;
    ProblemFields { pages: Some(pages.reversed()), ..single }
}

/// Returns the first starts on which a fault shows.
fn starts(fails: fn(&Problem) -> bool) -> impl Iterator<Item = Problem> {
    (0..).map(messy).filter(fails).take(STARTS)
}

/// Returns the simplest problem with these lengths, edited.
fn plain(lengths: &[(usize, usize)], change: impl FnOnce(&mut ProblemFields)) -> Problem {
    let (mode, pass) = (InputMode::ALL[0], Pass::Forward);
    let mut fields = ProblemFields { mode, pass, ..ProblemFields::packed(lengths, 1) };
    change(&mut fields);
    Problem::new(fields).expect("a minimum is legal")
}

fn any(problem: &Problem, test: impl Fn(&Sequence) -> bool) -> bool {
    problem.sequences.iter().any(test)
}

/// Whether the window's left edge hides a key of some sequence from a query.
fn window_cuts(problem: &Problem) -> bool {
    let Some(left) = problem.mask.left else { return false };
    any(problem, |s| {
        let last = s.q.len as i64 - 1 + problem.mask.shift(s.q.len, s.kv.len);
        s.q.len > 0 && s.kv.len > 0 && last > i64::from(left)
    })
}

fn last_block_skipped(problem: &Problem) -> bool {
    any(problem, |s| s.q.len > 0 && s.kv.len > 4 && s.kv.len % 4 == 1)
}

fn grouped_dk(problem: &Problem) -> bool {
    problem.pass == Pass::Backward && problem.group() >= 2 && problem.pairs() > 0
}

fn padding_exists(problem: &Problem) -> bool {
    any(problem, |s| s.q.span > s.q.len)
}

fn any_pair(problem: &Problem) -> bool {
    problem.pairs() > 0
}

fn more_queries_than_keys(problem: &Problem) -> bool {
    let aligned = problem.mask.align == Alignment::BottomRight;
    aligned && any(problem, |s| s.q.len > s.kv.len && s.kv.len > 0)
}

fn first_offset(problem: &Problem) -> bool {
    let first = problem.sequences.iter().map(|s| s.kv.offset).min();
    first.is_some_and(|first| first > 0) && any(problem, |s| s.kv.len > 0)
}

fn lengths_differ(problem: &Problem) -> bool {
    let lengths: std::collections::HashSet<_> = problem.sequences.iter().map(|s| s.kv.len).collect();
    lengths.len() >= 2
}

/// Whether the window ends on the sequence's last key.
fn window_meets_end(problem: &Problem) -> bool {
    let left = problem.mask.left.map_or(0, |left| left as usize);
    left >= 2 && any(problem, |s| s.q.len > 0 && left + 1 == s.kv.len)
}

fn chunks_of_two_rows(problem: &Problem) -> bool {
    let chunks = 2 * problem.parallel.size();
    let dual = problem.parallel.balance == Balance::DualChunk;
    dual && chunks > 2 && any(problem, |s| s.kv.len > chunks)
}

/// Whether both middle chunks of some sequence are full, with several keys or with values that tell a key from the
/// next.
fn full_chunks(problem: &Problem) -> bool {
    let cp = problem.parallel.size();
    let full = |s: &Sequence| {
        let chunk = s.kv.span / (2 * cp);
        let told_apart = !problem.mode.is_exact() || chunk > 1;
        s.kv.span == 2 * cp * chunk && chunk > 0 && told_apart && s.kv.len >= (cp + 1) * chunk
    };
    problem.parallel.balance == Balance::DualChunk && any(problem, full)
}

fn wide_head(problem: &Problem) -> bool {
    problem.dims.v > 75 && any_pair(problem)
}

fn stride(problem: &Problem) -> bool {
    any(problem, |s| s.q.step > 1 && s.q.len > 1)
}

fn deep_padding(problem: &Problem) -> bool {
    any(problem, |s| s.kv.span - s.kv.len >= 5)
}

/// Whether there are rows between two packed sequences of q that nobody owns.
fn gap(problem: &Problem) -> bool {
    let first = problem.sequences.iter().map(|s| s.q.offset).min();
    let end = problem.sequences.iter().filter_map(|s| s.q.end()).max();
    let owned: usize = problem.sequences.iter().map(|s| s.q.span).sum();
    let packed = problem.sequences.iter().all(|s| s.q.step == 1);
    packed && first.zip(end).is_some_and(|(first, end)| end - first > owned)
}

fn shuffled(problem: &Problem) -> bool {
    let real: Vec<_> = problem.sequences.iter().filter(|s| s.q.len > 0).collect();
    real.windows(2).any(|pair| pair[0].q.offset > pair[1].q.offset)
}

fn weights_kept(problem: &Problem) -> bool {
    problem.precision.p.format == Format::F32 && any_pair(problem)
}

fn scaled_keys(problem: &Problem) -> bool {
    problem.precision.k.scaling != Scaling::None && any_pair(problem)
}

/// Whether the seed and an id are odd, as for a fault that only some values show.
fn odd_names(problem: &Problem) -> bool {
    problem.data_seed % 2 == 1 && any(problem, |s| s.id % 2 == 1 && s.kv.len > 0)
}

/// Whether a later call appends behind what an earlier one cached.
fn second_call(problem: &Problem) -> bool {
    problem.calls().len() > 1
}

/// Whether a key lies in another page than the one before it, and not in the page behind that in the pool.
fn page_apart(problem: &Problem) -> bool {
    let apart = |pages: &Pages| {
        let mut keys = problem.sequences.iter().map(|sequence| sequence.kv.len).enumerate();
        keys.any(|(sequence, keys)| pages.runs(sequence, 0..keys).len() > 1)
    };
    problem.pages.as_ref().is_some_and(apart)
}

/// Whether a sequence borrows a key, and one has more than four.
fn borrowed_beside_many(problem: &Problem) -> bool {
    !problem.sharing.is_empty() && problem.sequences.iter().any(|sequence| sequence.kv.len > 4)
}

fn learnable_sink_under_softcap(problem: &Problem) -> bool {
    problem.softmax.sink == Sink::Learnable && problem.softmax.softcap.is_some() && any_pair(problem)
}

fn far_second_document(problem: &Problem) -> bool {
    let Some(Blocks::Documents(borders)) = problem.mask.blocks else { return false };
    borders.keys().get(1).is_some_and(|border| *border > 4)
}

fn sink_tokens_beside_a_window(problem: &Problem) -> bool {
    problem.mask.left.is_some() && problem.mask.sink_tokens > 1
}

fn chunks_behind_a_prefix(problem: &Problem) -> bool {
    let Some(Blocks::Chunks(keys)) = problem.mask.blocks else { return false };
    keys.get() > 4 && problem.mask.prefix > 1
}

fn faults() -> Vec<Fault> {
    let fault = |name, fails, minima: &[Problem]| Fault { name, fails, minima: minima.to_vec() };
    let left = |left, align| {
        move |f: &mut ProblemFields| f.mask = Mask { left: Some(left), right: None, align, ..Mask::FULL }
    };
    let gqa = |f: &mut ProblemFields| (f.pass, f.heads.q) = (Pass::Backward, 2);
    let in_steps = |f: &mut ProblemFields| {
        f.mask = Mask { align: Alignment::BottomRight, ..Mask::CAUSAL };
        f.steps = Steps(vec![1]);
    };
    let borrowing = |f: &mut ProblemFields| {
        // No exact mode draws shared keys.
        f.mode = *InputMode::ALL.iter().find(|mode| !mode.is_exact()).expect("a mode");
        f.sharing = Sharing(vec![SharedKeys { sequence: 1, with: 0, keys: 1 }]);
    };
    let in_pages = |f: &mut ProblemFields| f.pages = Some(Pages::in_order(1, [2]).reversed());
    let chunked = |f: &mut ProblemFields| {
        let (algorithm, balance) = (Algorithm::Ring, Balance::DualChunk);
        f.parallel = ContextParallel::over(2, algorithm, balance);
    };
    vec![
        fault(
            "window cuts a key",
            window_cuts,
            &[
                plain(&[(2, 1)], left(0, Alignment::TopLeft)),
                plain(&[(1, 2)], left(0, Alignment::BottomRight)),
            ],
        ),
        fault("second call", second_call, &[plain(&[(2, 2)], in_steps)]),
        fault(
            "borrowed beside many",
            borrowed_beside_many,
            &[plain(&[(0, 5), (0, 1)], borrowing), plain(&[(0, 1), (0, 5)], borrowing)],
        ),
        fault("page apart", page_apart, &[plain(&[(0, 2)], in_pages)]),
        fault("last block skipped", last_block_skipped, &[plain(&[(1, 5)], |_| {})]),
        fault("dk of a group", grouped_dk, &[plain(&[(1, 1)], gqa)]),
        fault(
            "padding rows exist",
            padding_exists,
            &[plain(&[(0, 0)], |f| (f.sequences[0].q.span, f.rows.q) = (1, 1))],
        ),
        fault("any pair", any_pair, &[plain(&[(1, 1)], |_| {})]),
        fault(
            "more queries than keys",
            more_queries_than_keys,
            &[plain(&[(2, 1)], |f| f.mask.align = Alignment::BottomRight)],
        ),
        fault(
            "first offset",
            first_offset,
            &[plain(&[(0, 1)], |f| (f.sequences[0].kv.offset, f.rows.kv) = (1, 2))],
        ),
        fault(
            "lengths differ",
            lengths_differ,
            &[plain(&[(0, 0), (0, 1)], |_| {}), plain(&[(0, 1), (0, 0)], |_| {})],
        ),
        fault("window meets the end", window_meets_end, &[plain(&[(1, 3)], left(2, Alignment::TopLeft))]),
        fault("chunks of two rows", chunks_of_two_rows, &[plain(&[(0, 5)], chunked)]),
        fault(
            "full chunks",
            full_chunks,
            &[plain(&[(0, 2)], |f| {
                (f.parallel.algorithm, f.parallel.balance) = (Algorithm::Ring, Balance::DualChunk);
                f.mode = InputMode::Integers;
            })],
        ),
        fault(
            "far second document",
            far_second_document,
            &[plain(&[], |f| f.mask.blocks = Borders::new(&[1, 5]).ok().map(Blocks::Documents))],
        ),
        fault(
            "chunks behind a prefix",
            chunks_behind_a_prefix,
            &[plain(&[], |f| {
                (f.mask.blocks, f.mask.prefix) = (NonZeroU32::new(5).map(Blocks::Chunks), 2);
            })],
        ),
        fault(
            "sink tokens beside a window",
            sink_tokens_beside_a_window,
            &[plain(&[], |f| (f.mask.left, f.mask.sink_tokens) = (Some(0), 2))],
        ),
        fault("wide head", wide_head, &[plain(&[(1, 1)], |f| f.dims.v = 76)]),
        fault("stride", stride, &[plain(&[(2, 0)], |f| (f.sequences[0].q.step, f.rows.q) = (2, 3))]),
        fault(
            "deep padding",
            deep_padding,
            &[plain(&[(0, 0)], |f| (f.sequences[0].kv.span, f.rows.kv) = (5, 5))],
        ),
        fault("gap", gap, &[plain(&[(0, 0), (0, 0)], |f| (f.sequences[1].q.offset, f.rows.q) = (1, 1))]),
        fault(
            "shuffled",
            shuffled,
            &[plain(&[(1, 0), (1, 0)], |f| (f.sequences[0].q.offset, f.sequences[1].q.offset) = (1, 0))],
        ),
        fault("weights kept", weights_kept, &[plain(&[(1, 1)], |f| f.precision.p = Format::F32.into())]),
        fault("scaled keys", scaled_keys, &[plain(&[(1, 1)], |f| f.precision.k = SCALED)]),
        fault("odd names", odd_names, &[plain(&[(0, 1)], |f| (f.data_seed, f.sequences[0].id) = (1, 1))]),
        fault(
            "learnable sink under softcap",
            learnable_sink_under_softcap,
            &[plain(&[(1, 1)], |f| (f.softmax.softcap, f.softmax.sink) = (Some(1.0), Sink::Learnable))],
        ),
    ]
}

/// Returns the shrink on which a batch, proptest and the loop must agree.
fn loop_of(start: &Problem, fails: fn(&Problem) -> bool) -> Shrunk {
    let shrunk = shrink(start, usize::MAX, fails);
    assert!(shrunk.complete);
    shrunk
}

fn print_line(name: &str, counts: &mut [usize]) {
    counts.sort_unstable();
    println!("{name:<30} {:>7} {:>6}", counts[counts.len() / 2], counts[counts.len() - 1]);
}

#[test]
fn every_fault_ends_on_its_minimum_in_few_evaluations() {
    let mut accepted = Vec::new();
    println!("{:<30} {:>7} {:>6}", "evaluations", "median", "worst");
    for Fault { name, fails, minima } in faults() {
        let mut evaluations = Vec::new();
        for start in starts(fails) {
            let shrunk = loop_of(&start, fails);
            assert!(minima.contains(&shrunk.problem), "{name}: {start:?}\nended on {:?}", shrunk.problem);
            assert!(shrunk.evaluations < EVALUATIONS_MAX, "{name}: {start:?}");
            assert_eq!(shrunk, loop_of(&start, fails), "{name}: two runs differ");
            evaluations.push(shrunk.evaluations);
            accepted.push(shrunk.accepted);
        }
        assert_eq!(evaluations.len(), STARTS, "{name}: the sampler never shows it");
        print_line(name, &mut evaluations);
    }
    println!("\naccepted steps by pass");
    for (index, (pass, _)) in accepted[0].iter().enumerate() {
        let steps: usize = accepted.iter().map(|table| table[index].1).sum();
        println!("{pass:<30} {steps:>7}");
        assert!(steps > 0, "pass {pass} is of no use");
    }
}

#[test]
fn a_result_is_a_fixed_point() {
    for Fault { name, fails, .. } in faults() {
        for start in starts(fails).take(STARTS / 4) {
            let mut again = Shrinker::new(loop_of(&start, fails).problem);
            while let Some(candidate) = again.propose() {
                assert!(!fails(candidate), "{name}: {candidate:?} is smaller");
            }
        }
    }
}

#[test]
fn size_goes_down_with_every_accepted_step_and_nothing_is_judged_twice() {
    for Fault { name, fails, .. } in faults() {
        for start in starts(fails).take(STARTS / 4) {
            let mut judged = vec![start.clone()];
            let mut best = size(&start);
            shrink(&start, usize::MAX, |candidate| {
                assert!(size(candidate) < best, "{name}");
                assert!(!judged.contains(candidate), "{name}");
                judged.push(candidate.clone());
                let failed = fails(candidate);
                if failed {
                    best = size(candidate);
                }
                failed
            });
        }
    }
}

/// Test of a numeric fault that does not show on every geometry. The path is rougher, but the promise is the same.
#[test]
fn a_fault_that_hides_by_chance_is_still_small_and_cheap() {
    fn fails(problem: &Problem) -> bool {
        let digest = blake3::hash(format!("{problem:?}").as_bytes());
        window_cuts(problem) && any_pair(problem) && !digest.as_bytes()[0].is_multiple_of(3)
    }
    let mut evaluations: Vec<usize> = starts(fails).map(|start| small_in_few(&start, fails)).collect();
    print_line("hidden in a third", &mut evaluations);
}

/// Test on problems that a campaign draws, whose parameters differ from those of the minima above.
#[test]
fn drawn_cases_end_small_in_few_evaluations() {
    const DRAWN: u64 = 1000;
    let limits = Limits::quick();
    let drawn = (0..DRAWN).map(|index| draw(1, index, &limits));
    let problems: Vec<Problem> = drawn
        .filter_map(|draw| match draw {
            Draw::Problem(problem) => Some(problem),
            Draw::Malformed(_) => None,
        })
        .collect();
    println!("{:<30} {:>7} {:>6}", "evaluations of drawn cases", "median", "worst");
    for Fault { name, fails, .. } in faults() {
        let starts = problems.iter().filter(|problem| fails(problem)).take(STARTS);
        let mut evaluations: Vec<usize> = starts.map(|start| small_in_few(start, fails)).collect();
        if !evaluations.is_empty() {
            print_line(name, &mut evaluations);
        }
    }
}

fn small_in_few(start: &Problem, fails: fn(&Problem) -> bool) -> usize {
    let Shrunk { problem, evaluations, .. } = loop_of(start, fails);
    let tokens: usize = problem.sequences.iter().map(|s| s.q.len + s.kv.len).sum();
    assert!(problem.sequences.len() <= SEQUENCES_MAX, "{problem:?}");
    assert!(tokens <= TOKENS_MAX, "{tokens} tokens: {problem:?}");
    assert!(evaluations < EVALUATIONS_MAX, "{evaluations}: {start:?}");
    evaluations
}

#[test]
fn batches_walk_the_same_path() {
    println!("{:<30} {:>7} {:>6}", "rounds of batches", "median", "worst");
    for most in [1, 4, 16] {
        let mut rounds_of_all = Vec::new();
        for Fault { name, fails, .. } in faults() {
            for start in starts(fails).take(STARTS / 4) {
                let (mut shrinker, mut rounds) = (Shrinker::new(start.clone()), 0);
                loop {
                    let batch = shrinker.propose_batch(most);
                    if batch.is_empty() {
                        break;
                    }
                    rounds += 1;
                    match batch.iter().position(fails) {
                        Some(index) => shrinker.accept(index),
                        None => shrinker.reject(),
                    }
                }
                let shrunk = loop_of(&start, fails);
                assert_eq!(
                    (shrinker.best(), shrinker.accepted()),
                    (&shrunk.problem, shrunk.accepted),
                    "{name}"
                );
                rounds_of_all.push(rounds);
            }
        }
        print_line(&format!("of {most}"), &mut rounds_of_all);
    }
}

#[test]
fn proptest_reaches_the_same_minima_in_as_many_evaluations() {
    let config = Config { failure_persistence: None, max_shrink_iters: u32::MAX, ..Config::default() };
    for Fault { name, fails, .. } in faults() {
        for start in starts(fails).take(STARTS / 4) {
            let evaluations = std::cell::Cell::new(0);
            let test = |problem: Problem| {
                evaluations.set(evaluations.get() + 1);
                if fails(&problem) { Err(TestCaseError::fail(name)) } else { Ok(()) }
            };
            let result = TestRunner::new(config.clone()).run_one(ProblemTree::new(start.clone()), test);
            let Err(TestError::Fail(_, smallest)) = result else { panic!("{name}: {result:?}") };
            let shrunk = loop_of(&start, fails);
            assert_eq!(smallest, shrunk.problem, "{name}");
            // Proptest also judges the start.
            assert_eq!(evaluations.get(), shrunk.evaluations + 1, "{name}");
        }
    }
}

#[test]
fn a_budget_is_kept_and_said() {
    let start = starts(window_cuts).next().expect("a start");
    let cut = shrink(&start, 5, window_cuts);
    assert_eq!((cut.evaluations, cut.complete), (5, false));
    assert!(window_cuts(&cut.problem));
    let enough = loop_of(&start, window_cuts).evaluations;
    assert!(shrink(&start, enough, window_cuts).complete);
    assert!(!shrink(&start, enough - 1, window_cuts).complete);
}

#[test]
fn a_start_that_nothing_simplifies_comes_back() {
    let start = messy(1);
    let shrunk = loop_of(&start, |_| false);
    assert_eq!(shrunk.problem, start);
    let none = loop_of(&start, |_| true);
    assert_eq!(none.problem, plain(&[], |_| {}));
}
