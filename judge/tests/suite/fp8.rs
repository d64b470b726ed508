//! The emulated kernel in FP8: it is right on what is drawn for its table, whatever its options, and each fault of it is
//! found.

use std::collections::HashSet;
use std::num::NonZeroUsize;

use ndarray::Array3;
use seamproof_judge::evaluate::evaluate;
use seamproof_judge::generate::{self, Draw};
use seamproof_judge::ladder::{Depth, Judge};
use seamproof_judge::prelude::*;
use seamproof_judge::subjects::{Fp8, Fp8Fault, Fp8Sequence, PlantedFp8};
use seamproof_judge::values;
use seamproof_oracle::envelope::Model;
use seamproof_oracle::{
    Algorithm, Format, Inputs, Pass, ProblemFields, Quantity, Saved, ScaleValues, Scaling, Softmax, blocked,
};
use seamproof_simulator::emulated::Tiles;
use seamproof_simulator::faults::Fault;
use seamproof_simulator::schedule::{Buffer, MergeOrder};

/// The kernel with its backward.
fn both_passes() -> Fp8 {
    Fp8 { backward: true, ..Fp8::default() }
}

/// Returns drawn problems as a subject is asked them.
fn asked(kernel: &Fp8, seed: u64, cases: u64) -> impl Iterator<Item = Problem> + use<> {
    let table = kernel.declaration().table;
    (0..cases).filter_map(move |index| match generate::draw(seed, index, &Limits::seams()) {
        Draw::Problem(problem) => {
            let asked = table.asked(problem);
            table.refusal(&asked).is_none().then_some(asked)
        }
        _ => None,
    })
}

#[test]
fn the_kernel_in_fp8_holds_on_what_is_drawn() {
    let (mut held, mut scalings, mut algorithms) = (0, HashSet::new(), HashSet::new());
    for (index, problem) in asked(&Fp8::default(), 5, 1_500).enumerate() {
        let kernel = Fp8 {
            tiles: Tiles { q: [1, 4, 16][index % 3], kv: [16, 64, 5][index / 3 % 3] },
            promoted_after: [None, NonZeroUsize::new(1), NonZeroUsize::new(4)][index / 9 % 3],
            weight_exponent: [8, 4, 0][index / 27 % 3],
            merge: MergeOrder::WEIGHTED[index / 81 % 2],
            order: index as u64,
            ..Fp8::default()
        };
        let verdict = evaluate(&kernel, &problem);
        assert!(matches!(verdict, Verdict::Pass(_)), "{kernel:?} on {problem:?}: {verdict:?}");
        scalings.insert(problem.precision.q.scaling);
        algorithms.insert(problem.parallel.algorithm.name());
        held += usize::from(problem.precision.q.scaling != Scaling::None && problem.pairs() > 0);
    }
    assert!(held > 500 && scalings.len() == 4, "{held} {scalings:?}");
    assert_eq!(algorithms.len(), Algorithm::ALL.len(), "{algorithms:?}");
}

#[test]
fn the_backward_in_fp8_holds_on_what_is_drawn() {
    let (mut held, mut douts, mut algorithms) = (0, HashSet::new(), HashSet::new());
    for (index, problem) in asked(&both_passes(), 7, 1_500).enumerate() {
        let kernel = Fp8 {
            tiles: Tiles { q: [1, 4, 16, 64][index % 4], kv: [16, 64, 5][index / 4 % 3] },
            promoted_after: [None, NonZeroUsize::new(1), NonZeroUsize::new(4)][index / 12 % 3],
            weight_exponent: [8, 4, 0][index / 36 % 3],
            merge: MergeOrder::WEIGHTED[index / 108 % 2],
            order: index as u64,
            ..both_passes()
        };
        let verdict = evaluate(&kernel, &problem);
        assert!(matches!(verdict, Verdict::Pass(_)), "{kernel:?} on {problem:?}: {verdict:?}");
        if problem.pass == Pass::Backward && problem.pairs() > 0 {
            douts.insert(problem.precision.dout);
            algorithms.insert(problem.parallel.algorithm.name());
            held += 1;
        }
    }
    assert!(held > 400 && douts.len() == 8, "{held} {douts:?}");
    assert_eq!(algorithms.len(), Algorithm::ALL.len(), "{algorithms:?}");
}

/// The sequence with given scales holds in both passes and in every algorithm, and some of its results are at the end of
/// their range.
#[test]
fn the_sequence_with_given_scales_holds_on_what_is_drawn() {
    let given = Fp8 { sequence: Fp8Sequence::Cudnn, backward: true, ..Fp8::default() };
    let (mut held, mut saturated) = (0, [0; 2]);
    let (mut ways, mut formats, mut algorithms) = (HashSet::new(), HashSet::new(), HashSet::new());
    for (index, problem) in asked(&given, 9, 1_200).enumerate() {
        let kernel = Fp8 {
            tiles: Tiles { q: [1, 4, 16, 64][index % 4], kv: [16, 64, 5][index / 4 % 3] },
            promoted_after: [None, NonZeroUsize::new(1), NonZeroUsize::new(4)][index / 12 % 3],
            merge: MergeOrder::WEIGHTED[index / 36 % 2],
            order: index as u64,
            ..given
        };
        let verdict = evaluate(&kernel, &problem);
        assert!(matches!(verdict, Verdict::Pass(_)), "{kernel:?} on {problem:?}: {verdict:?}");
        if problem.pass == Pass::Backward && problem.pairs() > 0 {
            ways.insert(problem.scales);
            algorithms.insert(problem.parallel.algorithm.name());
            formats.insert((problem.precision.dout, problem.precision.gradients));
            let inputs = values::inputs(&problem);
            let rank = kernel.run(&problem, &inputs).expect("what the table takes").ranks.remove(0);
            assert!(Quantity::ALL.iter().all(|quantity| rank.amax.of(*quantity).is_some()));
            let any = |tensor, values: &Array3<f32>| {
                let stored = inputs.scales.stored(&problem, tensor);
                usize::from(values.iter().any(|value| stored.is_saturated((*value).into())))
            };
            saturated[0] += any(TensorName::Out, &rank.out);
            saturated[1] += any(TensorName::Dk, &rank.gradients.expect("gradients").dk);
            held += 1;
        }
    }
    assert!(held > 400 && ways.len() == 4 && formats.len() == 3, "{held} {ways:?} {formats:?}");
    assert_eq!(algorithms.len(), Algorithm::ALL.len(), "{algorithms:?}");
    assert!(saturated.iter().all(|cases| (held / 20..held / 2).contains(cases)), "{saturated:?} of {held}");
}

/// Returns the kernel with given scales in both passes and in TransformerEngine's schedules.
fn shipped(index: usize) -> Fp8 {
    Fp8 {
        sequence: Fp8Sequence::Cudnn,
        merge: MergeOrder::Deferred,
        tiles: Tiles { q: [1, 4, 16, 64][index % 4], kv: [16, 64, 5][index / 4 % 3] },
        promoted_after: [None, NonZeroUsize::new(1), NonZeroUsize::new(4)][index / 12 % 3],
        order: index as u64,
        ..both_passes()
    }
}

/// Returns drawn problems over several ranks whose results are sums, half of them with scales of earlier steps.
fn of_several_ranks(seed: u64, cases: u64) -> impl Iterator<Item = Problem> {
    let is_summed =
        |problem: &Problem| problem.parallel.size() > 1 && problem.parallel.algorithm != Algorithm::AllToAll;
    let scaled = |(index, problem): (usize, Problem)| {
        let scales = if index % 2 == 0 { ScaleValues::Delayed } else { problem.scales };
        Problem::new(ProblemFields { scales, ..problem.into() }).expect("a problem")
    };
    asked(&shipped(0), seed, cases).filter(is_summed).enumerate().map(scaled)
}

#[test]
fn the_shipped_schedules_with_given_scales_hold() {
    let (mut algorithms, mut backward) = (HashSet::new(), 0);
    for (index, problem) in of_several_ranks(13, 3_000).enumerate() {
        let kernel = shipped(index);
        let verdict = evaluate(&kernel, &problem);
        assert!(matches!(verdict, Verdict::Pass(_)), "{kernel:?} on {problem:?}: {verdict:?}");
        algorithms.insert(problem.parallel.algorithm.name());
        backward += usize::from(problem.pass == Pass::Backward && problem.pairs() > 0);
    }
    assert!(backward > 300 && algorithms.len() == 3, "{backward} {algorithms:?}");
}

/// A kernel that leaves out the rounding of sums to bf16.
static SUMS_NOT_ROUNDED: Fp8Fault = Fault {
    id: "sums-not-rounded",
    imitates: "codes are made of sums in f32",
    source: "",
    entries: &[],
    caught_by: &[],
    edit: |recipe| {
        recipe.schedule = |schedule| {
            let is_rounded = |buffer: &&mut Buffer| buffer.name.ends_with(", rounded");
            schedule.buffers.iter_mut().filter(is_rounded).for_each(|buffer| buffer.format = Format::F32);
        };
    },
};

/// Test that the rounding of sums to bf16 changes codes, and that no check sees where it is left out: a bound that holds
/// two roundings holds one.
#[test]
fn a_sum_that_is_not_rounded_to_bf16_has_other_codes_and_is_not_seen() {
    let mut shown = 0;
    for problem in of_several_ranks(14, 1_500) {
        let wrong = shipped(0).planted(PlantedFp8::GivenBackward(&SUMS_NOT_ROUNDED));
        let verdict = evaluate(&wrong, &problem);
        assert!(matches!(verdict, Verdict::Pass(_)), "{problem:?}: {verdict:?}");
        shown += usize::from(wrong.shows(&problem));
    }
    assert!(shown > 20, "{shown}");
}

/// Test that a group's sum which is past the range is no finding where no head's own gradient is. It was one in 1 of
/// 40,000 drawn cases, whose data seed asks for copies of the KV head.
#[test]
fn a_sum_of_heads_that_saturates_is_right() {
    let kernel = Fp8 { sequence: Fp8Sequence::Cudnn, ..both_passes() };
    let mut fields = ProblemFields {
        heads: Heads { q: 3, kv: 1 },
        dims: Dims { qk: 1, v: 16 },
        softmax: Softmax::scaled(1.0),
        precision: kernel.declaration().table.precisions[0],
        mode: InputMode::UniformCount,
        data_seed: 9_752_106_428_923_585_640,
        ..ProblemFields::packed(&[(1, 1)], 1)
    };
    fields.sequences[0].id = 2;
    let problem = Problem::new(fields).expect("a problem");
    let inputs = values::inputs(&problem);
    let gradients = kernel.run(&problem, &inputs).expect("what the table takes").ranks.remove(0).gradients;
    let stored = inputs.scales.stored(&problem, TensorName::Dv);
    assert!(gradients.expect("gradients").dv.iter().any(|dv| stored.is_saturated((*dv).into())));
    let verdict = evaluate(&kernel, &problem);
    assert!(matches!(verdict, Verdict::Pass(_)), "{verdict:?}");
}

/// A judge that samples the rows of every case is silent on the backward too, whose largest dS it bounds by norms.
#[test]
fn a_sample_is_silent_on_the_backward_in_fp8() {
    let judge = Judge { products_max: 0, ..Judge::default() };
    let mut judged = 0;
    for sequence in Fp8Sequence::ALL {
        let kernel = Fp8 { sequence, ..both_passes() };
        for problem in asked(&kernel, 8, 600).filter(|problem| problem.pass == Pass::Backward) {
            let verdict = judge.examine(&kernel, &problem, Depth::First).verdict;
            assert!(matches!(verdict, Verdict::Pass(_)), "{problem:?}: {verdict:?}");
            judged += 1;
        }
    }
    assert!(judged > 400, "{judged}");
}

/// Returns the largest error ÷ bound of dv, under the bounds of a kernel that promotes its sums.
fn worst_of_dv(kernel: &Fp8, problem: &Problem, inputs: &Inputs) -> f64 {
    let outputs = kernel.run(problem, inputs).expect("what the table takes").ranks.remove(0);
    let saved = Saved { out: outputs.out.mapv(f64::from), lse: outputs.lse.expect("an lse").mapv(f64::from) };
    let promoted = both_passes();
    let model = Model::new(problem, promoted.declaration().arithmetic, promoted.partition(problem));
    let answer = blocked::backward(problem, inputs, &saved, Some(&model));
    let (dv, bound) = (outputs.gradients.expect("gradients").dv, answer.bound.expect("bounds").worst.dv);
    let elements = dv.iter().zip(answer.exact.dv.iter().zip(&bound));
    elements.map(|(got, (exact, bound))| (f64::from(*got) - exact).abs() / bound).fold(0.0, f64::max)
}

/// Where every dout has one sign, a sum over many queries that is never promoted stops growing, past its bound. No
/// drawn dout is so, and a campaign does not see it.
#[test]
fn a_sum_over_queries_that_is_not_promoted_passes_its_bound() {
    let softmax = Softmax::scaled(0.001);
    let fields = ProblemFields { softmax, ..ProblemFields::packed(&[(16_384, 3)], 16) };
    let table = both_passes().declaration().table;
    let problem = table.fitted(Problem::new(fields).expect("a problem"));
    let mut inputs = values::inputs(&problem);
    inputs.dout.mapv_inplace(f32::abs);
    let kernels = [both_passes(), Fp8 { promoted_after: None, ..both_passes() }];
    let [promoted, never] = kernels.map(|kernel| worst_of_dv(&kernel, &problem, &inputs));
    assert!(promoted < 1.0 && never > 1.5, "{promoted} {never}");
}

#[test]
fn each_fault_of_the_kernel_in_fp8_is_found() {
    for fault in PlantedFp8::all() {
        let wrong = Fp8::default().planted(fault);
        let mut problems = asked(&wrong, 6, 3_000);
        let found = problems.any(|problem| matches!(evaluate(&wrong, &problem), Verdict::Finding(_)));
        assert!(found, "{}", fault.record().id);
    }
}
