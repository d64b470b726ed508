//! The envelope's tiers. They hold on a right kernel, each sees what the weaker ones miss, and a profile tells
//! subjects apart.

use ndarray::{Array2, Array3, ArrayView1, s};
use seamproof_judge::calibrate::{BackwardFacts, Calibration, CalibrationOutcome, ForwardFacts, Unlockable};
use seamproof_judge::finding::{Check, Finding};
use seamproof_judge::generate::{self, Draw, Limits};
use seamproof_judge::ladder::judge;
use seamproof_judge::profile;
use seamproof_judge::subject::{Backend, Declaration, Outputs, RankGradients, RunError};
use seamproof_judge::subjects::{Emulated, draw_options};
use seamproof_judge::values;
use seamproof_judge::verdict::{Tier, Verdict};
use seamproof_oracle::blocked::Answer;
use seamproof_oracle::envelope::{KeyOrder, Model, NumericProfile};
use seamproof_oracle::replay::{Replay, ReplayedLaunch};
use seamproof_oracle::{
    Element, Format, ForwardResults, Heads, InputMode, Inputs, Mask, Pass, Problem, ProblemFields, Run,
    TensorName, blocked,
};
use seamproof_simulator::emulated::Tiles;
use seamproof_simulator::schedule::MergeOrder;

/// Number of lanes of a head.
const DIM: usize = 64;
/// Largest relative error of rounding to bf16: half a cell.
const SMALL: f32 = 1.0 / 256.0;

/// Returns one bf16 sequence without a mask.
fn fields(queries: usize, keys: usize) -> ProblemFields {
    ProblemFields { data_seed: 11, ..ProblemFields::packed(&[(queries, keys)], DIM) }
}

fn problem(queries: usize, keys: usize) -> Problem {
    Problem::new(fields(queries, keys)).expect("the fields are legal")
}

fn edited(problem: &Problem, edit: impl FnOnce(&mut ProblemFields)) -> Problem {
    let mut fields = ProblemFields::from(problem.clone());
    edit(&mut fields);
    Problem::new(fields).expect("the edited fields are legal")
}

type Change = fn(&Emulated, &Problem, &Inputs) -> Result<Outputs, RunError>;

/// The emulated kernel with other numerics, under the emulated kernel's declaration.
struct Changed {
    inner: Emulated,
    run: Change,
    hides_lse: bool,
    hides_launches: bool,
}

impl Changed {
    fn new(run: Change) -> Changed {
        Changed {
            inner: Emulated { tiles: Tiles { q: 4, kv: 8 }, ..Emulated::default() },
            run,
            hides_lse: false,
            hides_launches: false,
        }
    }
}

fn merges_running(kernel: &Emulated, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
    Emulated { merge: MergeOrder::Running, ..*kernel }.run(problem, inputs)
}

fn merges_deferred(kernel: &Emulated, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
    Emulated { merge: MergeOrder::Deferred, ..*kernel }.run(problem, inputs)
}

impl Backend for Changed {
    fn declaration(&self) -> Declaration {
        let mut declaration = self.inner.declaration();
        let statistics = &mut declaration.table.statistics;
        statistics.retain(|statistic| !(self.hides_lse && *statistic == TensorName::Lse));
        declaration
    }

    fn inner(&self) -> Option<&dyn Backend> {
        Some(&self.inner)
    }

    fn name(&self) -> &str {
        "changed"
    }

    fn launches(&self, problem: &Problem) -> Option<Vec<ReplayedLaunch>> {
        self.inner.launches(problem).filter(|_| !self.hides_launches)
    }

    fn replay(&self, problem: &Problem) -> Option<Replay> {
        self.inner.replay(problem)
    }

    fn run(&self, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
        let mut outputs = (self.run)(&self.inner, problem, inputs)?;
        if self.hides_lse {
            outputs.ranks.iter_mut().for_each(|rank| rank.lse = None);
        }
        Ok(outputs)
    }
}

/// Runs a kernel that keeps P in f32.
fn unrounded_weights(kernel: &Emulated, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
    kernel.run(&edited(problem, |fields| fields.precision.p = Element::from(Format::F32)), inputs)
}

/// Runs a kernel with tiles of 16 keys, whatever was declared.
fn other_tiles(kernel: &Emulated, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
    Emulated { tiles: Tiles { q: 4, kv: 16 }, ..*kernel }.run(problem, inputs)
}

/// Runs a kernel that scales queries and rounds them first.
fn scaled_queries(kernel: &Emulated, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
    let mut inputs = inputs.clone();
    let format = problem.precision.q.format;
    inputs.q.mapv_inplace(|q| format.round_f32(q * problem.softmax.scale));
    kernel.run(&edited(problem, |fields| fields.softmax.scale = 1.0), &inputs)
}

fn unchanged(kernel: &Emulated, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
    kernel.run(problem, inputs)
}

/// Runs a kernel whose dk is half of what it should be.
fn halved_dk(kernel: &Emulated, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
    let mut outputs = kernel.run(problem, inputs)?;
    for gradients in outputs.ranks.iter_mut().filter_map(|rank| rank.gradients.as_mut()) {
        gradients.dk.mapv_inplace(|dk| dk / 2.0);
    }
    Ok(outputs)
}

/// Runs a kernel whose query 2 misses key 5: it is run alone, without that key.
fn misses_a_key(kernel: &Emulated, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
    let mut outputs = kernel.run(problem, inputs)?;
    let keys = problem.rows.kv;
    let without = edited(problem, |fields| {
        fields.rows.kv = keys - 1;
        fields.sequences[0].kv = Run::packed(0, keys - 1, keys - 1);
    });
    let drop = |tensor: &Array3<f32>| {
        Array3::from_shape_fn([keys - 1, tensor.shape()[1], tensor.shape()[2]], |(row, head, lane)| {
            tensor[[row + usize::from(row >= 5), head, lane]]
        })
    };
    let inputs = Inputs { k: drop(&inputs.k), v: drop(&inputs.v), ..inputs.clone() };
    let wrong = kernel.run(&without, &inputs)?;
    let (to, from) = (&mut outputs.ranks[0], &wrong.ranks[0]);
    to.out.index_axis_mut(ndarray::Axis(0), 2).assign(&from.out.index_axis(ndarray::Axis(0), 2));
    if let (Some(to), Some(from)) = (&mut to.lse, &from.lse) {
        to.column_mut(2).assign(&from.column(2));
    }
    Ok(outputs)
}

fn finding(backend: &dyn Backend, problem: &Problem) -> Finding {
    match judge(backend, problem) {
        Verdict::Finding(finding) => *finding,
        verdict => panic!("{verdict:?}"),
    }
}

#[test]
fn every_tier_holds_on_a_right_kernel_and_speaks() {
    let (mut judged, mut worst) = (0, [0.0f64; 3]);
    for index in 0..250 {
        let Draw::Problem(problem) = generate::draw(21, index, &Limits::quick()) else { continue };
        let options = draw_options(index);
        let backend = Emulated::from_options(&options).expect("drawn options are legal");
        match judge(&backend, &problem) {
            Verdict::Pass(margin) => {
                judged += 1;
                for (worst, tier) in worst.iter_mut().zip(Tier::ALL) {
                    *worst = worst.max(margin.tier(tier).worst());
                }
            }
            Verdict::Refused(_) => {}
            verdict => panic!("case {index}: {verdict:?}"),
        }
    }
    assert!(judged > 200, "only {judged} cases");
    assert!(worst.iter().all(|worst| (0.5..=1.0).contains(worst)), "{worst:?}");
}

/// Largest error ÷ bound in each tier.
struct Seen {
    worst: f64,
    dithered: f64,
    replayed: f64,
}

fn largest<'a>(
    got: impl Iterator<Item = &'a f32>,
    exact: impl Iterator<Item = &'a f64>,
    bound: impl Iterator<Item = &'a f64>,
) -> f64 {
    got.zip(exact)
        .zip(bound)
        .map(|((got, exact), bound)| (f64::from(*got) - exact).abs() / bound)
        .fold(0.0, f64::max)
}

/// Returns the errors of an out and an LSE in the tiers of the emulated kernel.
fn seen(kernel: &Emulated, problem: &Problem, out: &Array3<f32>, lse: &Array2<f32>) -> (Seen, Seen) {
    let inputs = values::inputs(problem);
    let model = Model::new(problem, kernel.declaration().arithmetic, kernel.partition(problem));
    let answer = blocked::forward(problem, &inputs, Some(&model));
    let bound = answer.bound.expect("a model gives bounds");
    let replay = kernel.replay(problem).expect("the emulated profile is locked");
    let replayed =
        blocked::replayed_forward(problem, &inputs, &model, &replay).expect("the problem is legal");
    let left = replayed.bound.expect("a model gives bounds").worst;
    let of = |bound: &ForwardResults| largest(out.iter(), answer.exact.out.iter(), bound.out.iter());
    let of_lse = |bound: &ForwardResults| largest(lse.iter(), answer.exact.lse.iter(), bound.lse.iter());
    let replayed = largest(out.iter(), replayed.exact.out.iter(), left.out.iter());
    (
        Seen { worst: of(&bound.worst), dithered: of(&bound.dithered), replayed },
        Seen { worst: of_lse(&bound.worst), dithered: of_lse(&bound.dithered), replayed: 0.0 },
    )
}

/// Returns the bits of an answer: exact values, then the bounds of both tiers.
fn bits(answer: &Answer<ForwardResults>) -> Vec<u64> {
    let bound = answer.bound.as_ref().expect("a model gives bounds");
    let of = |results: &ForwardResults| {
        let ForwardResults { out, lse, max_logit } = results;
        out.iter().chain(lse).chain(max_logit).map(|value| value.to_bits()).collect::<Vec<u64>>()
    };
    [&answer.exact, &bound.worst, &bound.dithered].map(of).concat()
}

/// Test that a forward and its replay are the same made together and apart, for drawn problems and options.
#[test]
fn a_forward_and_its_replay_from_the_same_logits_are_those_made_apart() {
    let (mut together, mut apart) = (0, 0);
    for index in 0..400 {
        let Draw::Problem(problem) = generate::draw(23, index, &Limits::fuzz()) else { continue };
        let kernel = Emulated::from_options(&draw_options(index)).expect("drawn options are legal");
        let Some(replay) = kernel.replay(&problem) else { continue };
        let inputs = values::inputs(&problem);
        let model = Model::new(&problem, kernel.declaration().arithmetic, kernel.partition(&problem));
        let orders = [KeyOrder::Ascending, KeyOrder::Descending].into_iter().zip([false, index % 8 == 0]);
        for (kv_order, scales_queries) in orders {
            let profile = NumericProfile { kv_order, scales_queries, ..replay.profile };
            let replay = Replay { profile, ..replay.clone() };
            let (exact, replayed) = blocked::forward_and_replayed(&problem, &inputs, &model, &replay);
            assert_eq!(bits(&exact), bits(&blocked::forward(&problem, &inputs, Some(&model))), "{index}");
            assert_eq!(replayed.is_none(), scales_queries, "{index}");
            let Some(replayed) = replayed else {
                apart += 1;
                continue;
            };
            let alone = blocked::replayed_forward(&problem, &inputs, &model, &replay);
            assert_eq!(bits(&replayed), bits(&alone.expect("the problem is legal")), "{index}");
            together += 1;
        }
    }
    assert!(together > 300 && apart > 10, "{together} together, {apart} apart");
}

/// Returns the emulated kernel's out and LSE.
fn results(kernel: &Emulated, problem: &Problem) -> (Array3<f32>, Array2<f32>) {
    let outputs = kernel.run(problem, &values::inputs(problem)).expect("the kernel runs");
    let rank = outputs.ranks.into_iter().next().expect("one rank answers");
    (rank.out, rank.lse.expect("the kernel shows its LSE"))
}

#[test]
fn a_scaled_output_is_inside_the_worst_case_and_outside_the_replay() {
    let kernel = Emulated { tiles: Tiles { q: 16, kv: 64 }, ..Emulated::default() };
    let problem = edited(&problem(32, 1024), |fields| fields.pass = Pass::Forward);
    let (out, lse) = results(&kernel, &problem);
    let (right, right_lse) = seen(&kernel, &problem, &out, &lse);
    let all = [right.worst, right.dithered, right.replayed, right_lse.worst, right_lse.dithered];
    assert!(all.iter().all(|ratio| *ratio <= 1.0), "{all:?}");
    assert!(
        right.dithered > 2.0 * right.worst && right.replayed > 2.0 * right.worst,
        "sharper by a factor of 2"
    );

    let scaled = out.mapv(|out| Format::Bf16.round_f32(out * (1.0 + SMALL)));
    let (off, _) = seen(&kernel, &problem, &scaled, &lse);
    let Seen { worst, dithered, replayed } = off;
    assert!(worst <= 1.0 && replayed > 1.0, "W {worst}, T {dithered}, R {replayed}");
}

#[test]
fn one_key_of_4096_is_inside_the_worst_case_and_outside_the_sharper_tiers() {
    let kernel = Emulated { tiles: Tiles { q: 16, kv: 64 }, ..Emulated::default() };
    let problem = edited(&problem(32, 4096), |fields| fields.pass = Pass::Forward);
    let one_less = edited(&problem, |fields| {
        fields.rows.kv = 4095;
        fields.sequences[0].kv = Run::packed(0, 4095, 4095);
    });
    let (out, lse) = results(&kernel, &one_less);
    let (off, off_lse) = seen(&kernel, &problem, &out, &lse);
    assert!(
        off.worst <= 1.0 && off.replayed > 1.0,
        "W {}, T {}, R {}",
        off.worst,
        off.dithered,
        off.replayed
    );
    assert!(off_lse.dithered > 1.0, "by the LSE: W {}, T {}", off_lse.worst, off_lse.dithered);
}

#[test]
fn inputs_that_repeat_have_no_dithered_tier() {
    let kernel = Emulated::default();
    for mode in [InputMode::Equal, InputMode::Integers] {
        let problem = edited(&problem(40, 300), |fields| fields.mode = mode);
        let model = Model::new(&problem, kernel.declaration().arithmetic, kernel.partition(&problem));
        let inputs = values::inputs(&problem);
        let forward = blocked::forward(&problem, &inputs, Some(&model));
        let bound = forward.bound.expect("a model gives bounds").dithered;
        assert!(bound.out.iter().chain(&bound.lse).all(|bound| *bound == f64::INFINITY), "{mode:?}");
        if mode == InputMode::Integers {
            let backward = blocked::backward(&problem, &inputs, &(&forward.exact).into(), Some(&model));
            let bound = backward.bound.expect("a model gives bounds").dithered;
            // For dk and dv, each row's own LSE moves the weights of a key apart.
            assert!(bound.dq.iter().all(|bound| *bound == f64::INFINITY));
        }
    }
}

#[test]
fn calibration_finds_the_emulated_kernel_s_own_profile() {
    let make = |index: u64| {
        let kernel = Emulated::from_options(&draw_options(index)).expect("drawn options are legal");
        Ok(Box::new(kernel) as Box<dyn Backend>)
    };
    let calibration = Calibration::run(make, 30, 3).expect("the kernel runs");
    let lock = profile::locked("emulated").expect("the emulated profile is locked");
    let CalibrationOutcome::Unique(found) = calibration.outcome("emulated", lock.seed) else {
        panic!("{calibration}")
    };
    assert_eq!(profile::Lock { cases: lock.cases, ..*found }, lock);
}

/// Test that a size of tiles which every instance declares is no second candidate beside "as declared". The CUDA
/// kernels that give the emulated one's bits take tiles of 32 keys always, and could not be locked.
#[test]
fn a_tile_that_is_always_the_declared_one_is_one_candidate() {
    let make = |_: u64| {
        let kernel = Emulated { tiles: Tiles { q: 16, kv: 16 }, ..Emulated::default() };
        Ok(Box::new(kernel) as Box<dyn Backend>)
    };
    let calibration = Calibration::run(make, 30, 4).expect("the kernel runs");
    let CalibrationOutcome::Unique(lock) = calibration.outcome("emulated", 4) else {
        panic!("{calibration}")
    };
    assert!(lock.rounds_weights && lock.kv_tile.is_none());
    assert!(!calibration.to_string().contains("yes         no          16 "), "{calibration}");
}

#[test]
fn calibration_tells_other_numerics_apart() {
    let calibrate = |run: Change| {
        Calibration::run(|_| Ok(Box::new(Changed::new(run)) as Box<dyn Backend>), 20, 4)
            .expect("the kernel runs")
    };
    let CalibrationOutcome::Unique(lock) = calibrate(unrounded_weights).outcome("changed", 4) else {
        panic!("f32 weights")
    };
    assert!(!lock.rounds_weights && lock.kv_tile.is_none());
    let CalibrationOutcome::Unique(lock) = calibrate(other_tiles).outcome("changed", 4) else {
        panic!("tiles of 16")
    };
    assert!(lock.rounds_weights && lock.kv_tile == Some(16));
    let calibration = calibrate(scaled_queries);
    assert_eq!(calibration.outcome("changed", 4), CalibrationOutcome::Refused(Unlockable::ScaledQueries));
    let fits: Vec<&ForwardFacts> =
        calibration.forward.iter().filter(|(_, score)| score.explains()).map(|(facts, _)| facts).collect();
    assert!(
        !fits.is_empty() && fits.iter().all(|facts| facts.scales_queries && facts.kv_tile.is_none()),
        "{fits:?}"
    );
}

#[test]
fn calibration_says_why_a_subject_cannot_be_locked() {
    let outcome = |hides_lse: bool, hides_launches: bool| {
        let subject = move || Changed { hides_lse, hides_launches, ..Changed::new(unchanged) };
        let calibration = Calibration::run(|_| Ok(Box::new(subject()) as Box<dyn Backend>), 10, 4);
        calibration.expect("the kernel runs").outcome("changed", 4)
    };
    assert_eq!(outcome(true, false), CalibrationOutcome::Refused(Unlockable::HiddenLse));
    assert_eq!(outcome(false, true), CalibrationOutcome::Refused(Unlockable::NoLaunches));
    let nothing = Calibration { refused: 3, ..Calibration::default() };
    assert_eq!(nothing.outcome("changed", 4), CalibrationOutcome::Refused(Unlockable::NoCase(3)));
}

#[test]
fn calibration_finds_merges_that_are_not_as_declared() {
    let outcome = |declared: MergeOrder, run: Change| {
        let subject = move || {
            let mut subject = Changed::new(run);
            subject.inner.merge = declared;
            subject
        };
        let calibration = Calibration::run(|_| Ok(Box::new(subject()) as Box<dyn Backend>), 30, 1);
        let calibration = calibration.expect("the kernel runs");
        let CalibrationOutcome::Unique(lock) = calibration.outcome("changed", 1) else {
            panic!("{calibration}");
        };
        let declared = |facts: &BackwardFacts| facts.merge.is_none();
        let sums = calibration.backward.iter().any(|(facts, score)| declared(facts) && score.explains());
        (lock.merge, sums)
    };
    // An all-gather adds up gradients in their own format in one order, and in f32 in the other: the declared sums then
    // explain no gradients.
    assert_eq!(outcome(MergeOrder::Running, merges_deferred), (Some(MergeOrder::Deferred), false));
    assert_eq!(outcome(MergeOrder::Deferred, merges_running), (Some(MergeOrder::Running), true));
    assert_eq!(outcome(MergeOrder::Running, merges_running), (None, true), "as declared");
}

#[test]
fn numerics_that_change_after_the_lock_are_a_finding() {
    let problem = problem(24, 96);
    assert!(matches!(judge(&Changed::new(unchanged), &problem), Verdict::Pass(_)));
    for run in [unrounded_weights as Change, other_tiles] {
        let finding = finding(&Changed::new(run), &problem);
        assert!(finding.check == Check::Envelope && finding.what.contains("numerics changed"), "{finding}");
    }
}

#[test]
fn a_hidden_lse_leaves_the_backward_judged_end_to_end() {
    let hidden = |run: Change| Changed { hides_lse: true, ..Changed::new(run) };
    let problem = problem(24, 96);
    let Verdict::Pass(margin) = judge(&hidden(unchanged), &problem) else { panic!("a right kernel") };
    assert!(margin.worst_case.dk > 0.1 && margin.worst_case.lse == 0.0);
    assert_eq!(finding(&hidden(halved_dk), &problem).tensor, Some(TensorName::Dk));
}

#[test]
fn a_finding_names_the_key_that_a_query_missed() {
    let finding = finding(&Changed::new(misses_a_key), &problem(24, 96));
    assert_eq!(finding.tensor, Some(TensorName::Lse));
    assert!(finding.what.contains("query 2 of sequence 0 missed key 5 (weight "), "{finding}");
}

/// Query head of the pair that the backward loses, of two that share a KV head.
const LOST_HEAD: usize = 1;

/// Returns the gradients of the right run, and of one in which query 2 of [`LOST_HEAD`] gives nothing to any key.
fn with_and_without(
    kernel: &Emulated,
    problem: &Problem,
    inputs: &Inputs,
) -> Result<(Outputs, RankGradients), RunError> {
    let outputs = kernel.run(problem, inputs)?;
    let mut silent = inputs.clone();
    silent.dout.slice_mut(s![2, LOST_HEAD, ..]).fill(0.0);
    let without = kernel.run(problem, &silent)?.ranks.remove(0).gradients;
    Ok((outputs, without.ok_or(RunError::Infrastructure("no gradients".into()))?))
}

fn dot(a: ArrayView1<'_, f32>, b: ArrayView1<'_, f32>) -> f32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Runs a kernel in which key 5 receives no dv from query 2.
fn dv_loses_a_pair(kernel: &Emulated, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
    let (mut outputs, without) = with_and_without(kernel, problem, inputs)?;
    let gradients = outputs.ranks[0].gradients.as_mut().expect("a backward pass");
    gradients.dv.slice_mut(s![5, .., ..]).assign(&without.dv.slice(s![5, .., ..]));
    Ok(outputs)
}

/// Runs a kernel in which key 5 receives no dk from query 2.
fn dk_loses_a_pair(kernel: &Emulated, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
    let (mut outputs, without) = with_and_without(kernel, problem, inputs)?;
    let gradients = outputs.ranks[0].gradients.as_mut().expect("a backward pass");
    gradients.dk.slice_mut(s![5, .., ..]).assign(&without.dk.slice(s![5, .., ..]));
    Ok(outputs)
}

/// Runs a kernel in which query 2 gathers no dq from key 5. The key receives `scale · dS · q` from that query, which
/// gives `scale · dS`.
fn dq_loses_a_pair(kernel: &Emulated, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
    let (mut outputs, without) = with_and_without(kernel, problem, inputs)?;
    let gradients = outputs.ranks[0].gradients.as_mut().expect("a backward pass");
    let given = &gradients.dk.slice(s![5, 0, ..]) - &without.dk.slice(s![5, 0, ..]);
    let q = inputs.q.slice(s![2, LOST_HEAD, ..]);
    let coefficient = dot(given.view(), q) / dot(q, q);
    let format = problem.precision.gradients.format;
    let mut dq = gradients.dq.slice_mut(s![2, LOST_HEAD, ..]);
    dq.zip_mut_with(&inputs.k.slice(s![5, 0, ..]), |dq, k| *dq = format.round_f32(*dq - coefficient * k));
    Ok(outputs)
}

/// Runs a kernel in which key 20, which query 2 does not see, receives dv from it.
fn dv_gains_a_pair(kernel: &Emulated, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
    let mut outputs = kernel.run(problem, inputs)?;
    let lse = outputs.ranks[0].lse.as_ref().expect("the kernel shows it")[[LOST_HEAD, 2]];
    let product = dot(inputs.q.slice(s![2, LOST_HEAD, ..]), inputs.k.slice(s![20, 0, ..]));
    let weight = (problem.softmax.scale * product - lse).exp();
    let format = problem.precision.gradients.format;
    let gradients = outputs.ranks[0].gradients.as_mut().expect("a backward pass");
    let mut dv = gradients.dv.slice_mut(s![20, 0, ..]);
    let dout = inputs.dout.slice(s![2, LOST_HEAD, ..]);
    dv.zip_mut_with(&dout, |dv, dout| *dv = format.round_f32(*dv + weight * dout));
    Ok(outputs)
}

#[test]
fn a_finding_names_the_pair_that_the_backward_lost_or_gained() {
    let grouped = |mask: Mask| {
        edited(&problem(24, 24), |fields| {
            fields.heads = Heads { q: 2, kv: 1 };
            fields.mask = mask;
        })
    };
    let (full, causal) = (grouped(Mask::FULL), grouped(Mask { right: Some(0), ..Mask::FULL }));
    let lost = "key 5 of sequence 0 received nothing from query 2 of head 1 (weight ";
    let missed = "query 2 of sequence 0 missed key 5 (weight ";
    let gained = "key 20 of sequence 0 received from hidden query 2 of head 1 (weight ";
    // A pair that is missing in dk alone is not named, because it would be missing in dv too.
    let cases: [(Change, &Problem, TensorName, Option<&str>); 4] = [
        (dv_loses_a_pair, &full, TensorName::Dv, Some(lost)),
        (dk_loses_a_pair, &full, TensorName::Dk, None),
        (dq_loses_a_pair, &full, TensorName::Dq, Some(missed)),
        (dv_gains_a_pair, &causal, TensorName::Dv, Some(gained)),
    ];
    for (run, problem, tensor, text) in cases {
        let finding = finding(&Changed::new(run), problem);
        assert_eq!(finding.tensor, Some(tensor), "{finding}");
        match text {
            Some(text) => assert!(finding.what.contains(text), "{finding}"),
            None => assert!(!finding.what.contains("query"), "{finding}"),
        }
    }
}
