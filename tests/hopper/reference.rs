//! The reference kernel on a GPU, compared with the oracle on the CPU. It needs a Hopper GPU, a driver and NVRTC, and
//! fails without them: `cargo test --release --test hopper reference -- --ignored`

use std::collections::{BTreeMap, BTreeSet};

use ndarray::Axis;
use seamproof_judge::generate::{self, Draw, Profile};
use seamproof_judge::subject::{Backend, RankOutputs};
use seamproof_judge::subjects::Emulated;
use seamproof_judge::values::{self, Poison};
use seamproof_kernels::Gpu;
use seamproof_kernels::cache::Cache;
use seamproof_kernels::view::View;
use seamproof_lab::large::{self, Rows};
use seamproof_lab::reference::{self, Answers, Query, Questions, ReferenceTensors, lists_of_keys};
use seamproof_oracle::envelope::{Accumulation, Arithmetic, Model, Partition, SLOTS};
use seamproof_oracle::{Format, Inputs, Problem, TensorName, blocked};

/// Unit roundoff of f64.
const ROUNDOFF: f64 = f64::EPSILON / 2.0;
/// Largest relative excess of magnitudes: weights and values are rounded up to tf32 (2^-10 each), and a term is added
/// for the matrix unit's truncation over the tiles of a few thousand keys (2^-19 a step).
const MAGNITUDES_MOST: f64 = 1.0 / 128.0;

fn gpu() -> Gpu {
    reference::open(0, &Cache::of_user()).unwrap_or_else(|error| panic!("{error}"))
}

/// Returns problems of all shapes with inputs whose padding is NaN, as are the holes of sequences that borrow keys.
/// The oracle reads holes, and so takes inputs without NaN.
fn problems(profile: Profile, cases: u64) -> impl Iterator<Item = (Problem, Inputs)> {
    let limits = profile.limits();
    let drawn = (0..cases).filter_map(move |case| match generate::draw(11, case, &limits) {
        Draw::Problem(problem) => Some(problem),
        _ => None,
    });
    let narrow = |format: Format| matches!(format, Format::Bf16 | Format::Fp16 | Format::F32);
    let served = drawn.filter(move |problem| {
        let precision = &problem.precision;
        [precision.q, precision.k, precision.v].iter().all(|element| narrow(element.format))
    });
    served.map(|problem| {
        let mut inputs = values::inputs(&problem);
        values::poison(&mut inputs, &problem, Poison::Nan);
        (problem, inputs)
    })
}

/// Returns every real row of every head, with its position, and the lists of keys that the rows see.
fn queries(problem: &Problem) -> (Vec<(Query, usize)>, Vec<Vec<usize>>) {
    let mut lists = lists_of_keys(problem);
    let mut queries = Vec::new();
    for head in 0..problem.heads.q {
        for (sequence, both) in problem.sequences.iter().enumerate() {
            let rows = (0..both.q.len).map(|i| (Query::of(problem, [sequence, i], head, &mut lists), i));
            queries.extend(rows);
        }
    }
    (queries, lists)
}

fn ask(
    gpu: &Gpu,
    problem: &Problem,
    inputs: &Inputs,
    (queries, lists): (&[Query], &[Vec<usize>]),
    model: &Model,
) -> Answers {
    let precision = &problem.precision;
    let put = |tensor: &ndarray::Array3<f32>, format| {
        gpu.upload_elements(tensor.as_slice().unwrap(), format).unwrap()
    };
    let (q, k, v) = (
        put(&inputs.q, precision.q.format),
        put(&inputs.k, precision.k.format),
        put(&inputs.v, precision.v.format),
    );
    let tensors = ReferenceTensors {
        q: View::rows(q.area(), problem.q_shape(), precision.q.format),
        k: View::rows(k.area(), problem.k_shape(), precision.k.format),
        v: View::rows(v.area(), problem.v_shape(), precision.v.format),
    };
    let questions = Questions::new(lists, queries).unwrap();
    let floor = model.magnitude(f64::MIN_POSITIVE);
    reference::answer(gpu, &questions, &problem.softmax, (floor, true), &tensors).unwrap()
}

/// Returns the largest error ÷ bound of one problem's rows, the number of rows whose share of alike weights is known,
/// and the number of all rows.
///
/// The bounds are those of two computations in f64, with unit roundoff ε. A logit is off by `ε·(dim + 2)·scale·a`
/// and, capped or not, by some ulp of its own. A weight is off, relative to itself, by the errors of its logit and of
/// the largest logit, 4ε of the difference, and 2 ulp of `e^x`. A sum is off by a rounding for each key, and by two
/// and an `e^x` for each tile of 64 keys.
fn compare(gpu: &Gpu, problem: &Problem, inputs: &Inputs) -> ([f64; 2], [usize; 2]) {
    let arithmetic = Arithmetic::flash_attention(Accumulation::WgmmaTruncating);
    let model = Model::new(problem, arithmetic, Partition::single(64, 64));
    let (asked, lists) = queries(problem);
    let (queries, positions): (Vec<Query>, Vec<usize>) = asked.into_iter().unzip();
    let answers = ask(gpu, problem, inputs, (&queries, &lists), &model);
    let exact = blocked::forward(problem, &values::inputs(problem), None).exact;
    let scale = f64::from(problem.softmax.scale);
    let (mut worst, mut known) = ([0.0f64; 2], 0);
    for (index, query) in queries.iter().enumerate() {
        let row = answers.statistics[index];
        let sink = problem.sink(query.head, &inputs.sink);
        let context = || format!("{query:?} (position {}) of {problem:?}: {row:?}", positions[index]);
        assert_eq!(row.keys, query.keys.len(), "{}", context());
        let largest = sink.map_or(row.largest, |sink| sink.max(row.largest));
        let share = if row.keys == 0 { 0.0 } else { libm::exp(row.largest - largest) };
        let sum = row.sum * share + sink.map_or(0.0, |sink| libm::exp(sink - largest));
        let lse = if largest == f64::NEG_INFINITY { largest } else { largest + libm::log(sum) };
        let right = exact.lse[[query.head, query.row]];
        let most = if row.keys == 0 { 0.0 } else { row.largest.abs().max(row.smallest.abs()) };
        let logit = ROUNDOFF * ((problem.dims.qk + 2) as f64 * scale * row.largest_a + 6.0 * most);
        let roundings = row.keys + 6 * row.keys.div_ceil(64) + 12;
        let range = if row.keys == 0 { 0.0 } else { row.largest - row.smallest };
        let relative = 2.0 * (2.0 * logit + ROUNDOFF * (4.0 * range + roundings as f64));
        let allowed = relative + 2.0 * logit + 8.0 * ROUNDOFF * (1.0 + right.abs() + largest.abs());
        assert!(lse == right || (lse - right).abs() <= allowed, "lse {lse} {right}: {}", context());
        worst[0] = worst[0].max(if lse == right { 0.0 } else { (lse - right).abs() / allowed });
        for lane in 0..problem.dims.v {
            let at = index * problem.dims.v + lane;
            let turned = if row.keys == 0 { 0.0 } else { share / sum };
            let (out, right) = (answers.out[at] * turned, exact.out[[query.row, query.head, lane]]);
            let allowed = 2.0 * relative * answers.magnitudes[at] * turned;
            let error = (out - right).abs();
            assert!(error <= allowed, "out[{lane}] {out} {right} ± {allowed:e}: {}", context());
            worst[1] = worst[1].max(if error == 0.0 { 0.0 } else { error / allowed });
        }
        known +=
            usize::from(sums_hold(problem, inputs, &model, (query, &lists[query.list]), &answers, index));
    }
    (worst, [known, queries.len()])
}

/// Checks that sums that form bounds are no lower than the exact ones and hardly higher, and that the share of alike
/// weights is the exact one. Returns whether that share is known to the last weight.
fn sums_hold(
    problem: &Problem,
    inputs: &Inputs,
    model: &Model,
    (query, rows): (&Query, &[usize]),
    answers: &Answers,
    index: usize,
) -> bool {
    let row = answers.statistics[index];
    let kv_head = query.head / problem.group();
    let q = inputs.q.index_axis(Axis(0), query.row).index_axis_move(Axis(0), query.head);
    let dot = |key: usize, of: &dyn Fn(f64) -> f64| -> f64 {
        let k = inputs.k.index_axis(Axis(0), key).index_axis_move(Axis(0), kv_head);
        q.iter().zip(k).map(|(&q, &k)| of(f64::from(q)) * of(f64::from(k))).sum()
    };
    let scale = f64::from(problem.softmax.scale);
    let (mut sum_a, mut largest_a, mut lanes) = (0.0, 0.0f64, vec![[0.0; 2]; problem.dims.v]);
    let (mut logs, mut weights) = ([0.0; 2], Vec::new());
    for &key in &rows[query.keys.clone()] {
        let log = problem.softmax.cap(scale * dot(key, &|x| x)) - row.largest;
        let weight = libm::exp(log);
        logs = [logs[0] + log, logs[1] + log * log];
        weights.push(weight);
        let a = dot(key, &|x| model.magnitude(x));
        (sum_a, largest_a) = (sum_a + weight * a, largest_a.max(a));
        let v = inputs.v.index_axis(Axis(0), key).index_axis_move(Axis(0), kv_head);
        for ([sum, squares], &v) in lanes.iter_mut().zip(v) {
            *sum += weight * f64::from(v).abs();
            *squares += (weight * f64::from(v)).powi(2);
        }
    }
    let lost = 2.0 * (row.keys + 64) as f64 * f64::from(f32::MIN_POSITIVE);
    let holds =
        |got: f64, right: f64| got >= right * (1.0 - 1e-9) && got <= right * (1.0 + MAGNITUDES_MOST) + lost;
    assert!(holds(row.sum_a, sum_a), "{} {sum_a}: {query:?} of {problem:?}", row.sum_a);
    assert!(holds(row.largest_a, largest_a), "{} {largest_a}: {query:?} of {problem:?}", row.largest_a);
    let dither = answers.dither.as_ref().expect("it was asked for");
    for (lane, [right, squared]) in lanes.into_iter().enumerate() {
        let at = index * problem.dims.v + lane;
        let (got, squares) = (answers.magnitudes[at], dither.squares[at]);
        assert!(holds(got, right), "magnitude {lane}: {got} {right}: {query:?} of {problem:?}");
        assert!(holds(squares, squared), "squares {lane}: {squares} {squared}: {query:?} of {problem:?}");
    }
    let of_row = dither.statistics[index];
    let near = |got: f64, right: f64| (got - right).abs() <= 1e-9 * (1.0 + right.abs());
    assert!(near(of_row.sum, logs[0]) && near(of_row.sum_squares, logs[1]), "{of_row:?} {logs:?}");
    let most = if row.keys == 0 { 0.0 } else { row.largest.abs().max(row.smallest.abs()) };
    let logit = ROUNDOFF * ((problem.dims.qk + 2) as f64 * scale * row.largest_a + 6.0 * most);
    let [least, most] = shared(&weights, 4.0 * (logit + ROUNDOFF * (2.0 * most + 4.0)));
    let holds = of_row.shared >= least - 1e-9 && of_row.shared <= most + 1e-9;
    assert!(least.is_nan() || holds, "{of_row:?}: {least} to {most}: {query:?} of {problem:?}");
    least == most
}

/// Returns the smallest and the largest share of weights that have company in their slot, where each weight may be
/// off by `error` of itself. The share counts weights or their squares, whichever gives more. The two results are
/// equal unless a weight lies too near to the end of a slot.
fn shared(weights: &[f64], error: f64) -> [f64; 2] {
    let slot = |weight: f64| {
        let significand = weight.to_bits() >> 20 & u64::from(u32::MAX);
        (significand * (SLOTS * weights.len()) as u64) >> 32
    };
    let counted: Vec<(f64, BTreeSet<u64>)> = weights
        .iter()
        .filter(|weight| **weight != 0.0)
        .map(|&weight| (weight, [weight * (1.0 - error), weight * (1.0 + error)].map(slot).into()))
        .collect();
    let (mut sure, mut possible) = (BTreeMap::<u64, usize>::new(), BTreeMap::<u64, usize>::new());
    for (_, slots) in &counted {
        for &slot in slots {
            *possible.entry(slot).or_default() += 1;
            *sure.entry(slot).or_default() += usize::from(slots.len() == 1);
        }
    }
    let of = |alike: &dyn Fn(&BTreeSet<u64>) -> bool, counts: fn(f64) -> f64| {
        let (mut all, mut some) = (0.0, 0.0);
        for (weight, slots) in &counted {
            all += counts(*weight);
            some += if alike(slots) { counts(*weight) } else { 0.0 };
        }
        some / all
    };
    let share =
        |alike: &dyn Fn(&BTreeSet<u64>) -> bool| of(alike, |_| 1.0).max(of(alike, |weight| weight * weight));
    let least = share(&|slots| slots.len() == 1 && slots.iter().all(|slot| sure[slot] > 1));
    [least, share(&|slots| slots.iter().any(|slot| possible[slot] > 1))]
}

#[test]
fn shares_of_alike_weights_are_known_but_at_the_ends_of_slots() {
    // The slots are 1/256 of a binade: 1.3 and 2.6 share one, and 1.501 lies 1e-4 from an end of its own.
    let weights = [1.3, 2.6, 1.501, 1.7];
    let alike = |counts: fn(f64) -> f64| {
        (counts(1.3) + counts(2.6)) / weights.iter().copied().map(counts).sum::<f64>()
    };
    let right = alike(|_| 1.0).max(alike(|weight| weight * weight));
    assert_eq!(shared(&weights, 1e-12), [right; 2]);
    assert_eq!(shared(&[1.0, 4.0, 0.3], 1e-12)[0], 0.0, "at an end");
    assert_eq!(shared(&[1.0, 4.0, 0.3], 0.0), [17.0 / 17.09; 2]);
    assert!(shared(&[0.0; 3], 1e-12)[0].is_nan());
}

#[test]
#[ignore = "needs a Hopper GPU"]
fn the_reference_is_the_oracle() {
    let (gpu, mut worst, mut rows, mut cases) = (gpu(), [0.0f64; 2], [0; 2], 0);
    let all = problems(Profile::Quick, 400).chain(problems(Profile::Seams, 400));
    for (problem, inputs) in all {
        let (of_case, of_rows) = compare(&gpu, &problem, &inputs);
        worst = [worst[0].max(of_case[0]), worst[1].max(of_case[1])];
        rows = [rows[0] + of_rows[0], rows[1] + of_rows[1]];
        cases += 1;
    }
    assert!(cases >= 700, "too little run: {cases}");
    assert!(10 * rows[0] > rows[1], "shares of alike weights are known of {} rows of {}", rows[0], rows[1]);
    eprintln!("{cases} problems: errors of lse and out are {worst:?} of their bounds");
}

/// Returns the largest error ÷ bound of out in tier T, by the oracle on the CPU.
fn dithered_ratio(problem: &Problem, got: &RankOutputs, model: &Model) -> f64 {
    let answer = blocked::forward(problem, &values::inputs(problem), Some(model));
    let bound = answer.bound.unwrap().dithered.out;
    let mut worst = 0.0f64;
    for (query, _) in queries(problem).0 {
        for lane in 0..problem.dims.v {
            let place = [query.row, query.head, lane];
            let error = (f64::from(got.out[place]) - answer.exact.out[place]).abs();
            worst = worst.max(if error == 0.0 { 0.0 } else { error / bound[place] });
        }
    }
    worst
}

/// Test that the emulated kernel holds, and that one element past its bound is found in its place.
#[test]
#[ignore = "needs a Hopper GPU"]
fn a_forward_is_judged_by_the_reference() {
    let (gpu, subject, mut judged, mut dithered) = (gpu(), Emulated::default(), 0, [0; 2]);
    let mut lowered = 0;
    for (problem, inputs) in problems(Profile::Quick, 200) {
        let Ok(outputs) = subject.run(&problem, &inputs) else { continue };
        let [got] = outputs.ranks.as_slice() else { continue };
        let model = Model::new(&problem, subject.declaration().arithmetic, subject.partition(&problem));
        let judge = |got, rows| {
            let forward = large::Forward { problem: &problem, inputs: &inputs, got, model: &model };
            large::forward(&gpu, &forward, rows).unwrap()
        };
        let (right, real) = (judge(got, Rows::All), queries(&problem).0.len());
        assert!(right.finding.is_none(), "{} on {problem:?}", right.finding.unwrap());
        assert_eq!(right.rows, real);
        let sample = judge(got, Rows::Sample { count: 5, seed: 3 });
        assert!(sample.finding.is_none() && sample.rows <= real && sample.rows >= real.min(problem.heads.q));
        // A bound allows for what each step of keys may lose. A block of rows goes over the keys of all of them.
        let [some, every] = [&sample, &right].map(|judged| judged.margin.worst_case.out);
        assert!(some <= every * (1.0 + 1e-3), "{some} of some rows, {every} of all: {problem:?}");
        let all = judge(got, Rows::Sample { count: 8 * real / problem.heads.q, seed: 4 });
        assert!(all.finding.is_none(), "{} on {problem:?}", all.finding.unwrap());
        let ratio = all.margin.dithered.out;
        let most = dithered_ratio(&problem, got, &model);
        assert!(ratio <= most * (1.0 + 1e-6), "{ratio} {most}: {problem:?}");
        dithered = [dithered[0] + usize::from(ratio > 0.0), dithered[1] + usize::from(most > 0.0)];
        let Some(sequence) = problem.sequences.iter().position(|sequence| sequence.q.len > 0) else {
            continue;
        };
        let run = problem.sequences[sequence].q;
        let place = [run.row(run.len - 1), problem.heads.q - 1, problem.dims.v - 1];
        let mut wrong = got.clone();
        wrong.out[place] = f32::NAN;
        let finding = judge(&wrong, Rows::All).finding.expect("a NaN is past every bound");
        assert_eq!((finding.tensor, finding.failed), (Some(TensorName::Out), 1));
        assert_eq!((finding.place.sequence, finding.place.row), (Some(sequence), Some(run.len - 1)));
        assert_eq!((finding.place.head, finding.place.lane), (Some(place[1]), Some(place[2])));
        judged += 1;
        // A sample may miss every row of the last head that sees a key.
        let mut wrong = got.clone();
        let Some(largest) = wrong.max_logit.as_mut().and_then(|largest| largest.last_mut()) else { continue };
        *largest = f32::MIN;
        for rows in [Rows::All, Rows::Sample { count: 5, seed: 3 }] {
            let finding = judge(&wrong, rows).finding;
            assert!(finding.as_ref().is_none_or(|finding| finding.tensor == Some(TensorName::MaxLogit)));
            lowered += usize::from(finding.is_some());
        }
    }
    assert!(judged >= 60, "too little run: {judged}");
    assert!(lowered > judged, "largest logits that are too small: {lowered} of {}", 2 * judged);
    // A sample may miss the few rows that are dithered.
    assert!(dithered[0] >= 5 && 10 * dithered[0] >= 9 * dithered[1], "{dithered:?}");
}

/// Test that each row's keys are those that the mask shows it, one interval or two, and that none is padding or lies in
/// the hole of a sequence that borrows keys.
#[test]
fn a_query_has_the_keys_that_its_row_sees() {
    let (mut alone, mut borrowed, mut all) = (0, 0, 0);
    for (problem, inputs) in problems(Profile::Quick, 300) {
        let (queries, lists) = queries(&problem);
        let mut rows = queries.iter();
        for _ in 0..problem.heads.q {
            for (sequence, both) in problem.sequences.iter().enumerate() {
                for i in 0..both.q.len {
                    let (query, at) = rows.next().expect("a query for each row");
                    let keys = problem.mask.visible(i, both.q.len, both.kv.len);
                    let row_of = |key: usize| match problem.sharing.of(sequence) {
                        Some(shared) if key < shared.keys => problem.sequences[shared.with].kv.row(key),
                        _ => both.kv.row(key),
                    };
                    let right: Vec<usize> = keys.map(row_of).collect();
                    assert_eq!((*at, query.row), (i, both.q.row(i)));
                    assert_eq!(lists[query.list][query.keys.clone()], right, "{problem:?}");
                    assert!(right.iter().all(|row| !inputs.k[[*row, 0, 0]].is_nan()), "{problem:?}");
                    borrowed += usize::from(problem.sharing.of(sequence).is_some());
                    alone += usize::from(query.list >= problem.sequences.len());
                    all += 1;
                }
            }
        }
    }
    assert!(alone > 100 && all > 10 * alone, "{alone} of {all} rows see two intervals");
    assert!(borrowed > 100, "{borrowed} of {all} rows see keys of another sequence");
}
