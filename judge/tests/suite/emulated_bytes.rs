//! The bytes of the emulated kernel's results. They are the same on every machine, and after every change that does
//! not intend to change its numbers. The problems are written out here, so that they do not change with the
//! generator.

use seamproof_judge::subject::{Backend, Outputs};
use seamproof_judge::subjects::{Arithmetic, Emulated};
use seamproof_judge::values::{self, Poison};
use seamproof_oracle::{
    Algorithm, Alignment, Balance, ContextParallel, Dims, Format, Heads, InputMode, Mask, Precision, Problem,
    ProblemFields, Run, Sequence, Sink, Softmax, TensorRows,
};
use seamproof_simulator::emulated::Tiles;

/// Returns three sequences of 37, 0 and 90 real rows, padded, after a slack of 3 rows; causal, two query heads a KV
/// head, backward.
fn fields() -> ProblemFields {
    let runs =
        [(3, 37, 40), (43, 0, 8), (51, 90, 96)].map(|(offset, len, span)| Run::packed(offset, len, span));
    let sequences = (0..).zip(runs).map(|(id, run)| Sequence { id, q: run, kv: run });
    ProblemFields {
        rows: TensorRows { q: 150, kv: 150 },
        heads: Heads { q: 4, kv: 2 },
        mask: Mask::CAUSAL,
        softmax: Softmax::scaled(0.2),
        data_seed: 7,
        ..ProblemFields::of(sequences.collect(), 24)
    }
}

/// Returns the fields on ranks. The spans are multiples of twice the number of ranks.
fn on(algorithm: Algorithm, balance: Balance, ranks: Vec<usize>) -> ProblemFields {
    let parallel = ContextParallel { algorithm, balance, world: 4, ranks, region: 1 };
    ProblemFields { parallel, ..fields() }
}

/// Returns fields with fewer keys than queries in one sequence and more in the other.
fn crossed() -> ProblemFields {
    let run = |offset, len, span| Run::packed(offset, len, span);
    let sequences = vec![
        Sequence { id: 0, q: run(0, 50, 50), kv: run(0, 33, 40) },
        Sequence { id: 1, q: run(50, 1, 4), kv: run(40, 77, 77) },
    ];
    ProblemFields { sequences, rows: TensorRows { q: 54, kv: 120 }, ..fields() }
}

/// Returns one problem for each thing that the kernel's arithmetic depends on.
fn problems() -> Vec<Problem> {
    let softmax =
        |softcap, sink| ProblemFields { softmax: Softmax { scale: 0.3, softcap, sink }, ..fields() };
    let window = |left, right, align| ProblemFields { mask: Mask::window(left, right, align), ..crossed() };
    let values = |format, mode| ProblemFields { precision: Precision::uniform(format), mode, ..fields() };
    let all = [
        fields(),
        window(Some(10), Some(2), Alignment::TopLeft),
        window(None, Some(0), Alignment::BottomRight),
        window(Some(5), None, Alignment::BottomRight),
        softmax(Some(2.0), Sink::None),
        softmax(None, Sink::Learnable),
        softmax(Some(0.5), Sink::OffByOne),
        values(Format::Fp16, InputMode::Peaked),
        values(Format::Bf16, InputMode::HeavyTailed),
        values(Format::Fp16, InputMode::Large),
        ProblemFields { dims: Dims { qk: 17, v: 40 }, heads: Heads { q: 6, kv: 1 }, ..fields() },
        on(Algorithm::Ring, Balance::DualChunk, vec![0, 1, 2, 3]),
        on(Algorithm::Ring, Balance::Striped { stripe: 1 }, vec![2, 0]),
        on(Algorithm::AllGather, Balance::DualChunk, vec![3, 1]),
        on(Algorithm::AllToAll, Balance::Contiguous, vec![0, 1]),
    ];
    all.into_iter().map(|fields| Problem::new(fields).expect("a problem")).collect()
}

fn absorb(hasher: &mut blake3::Hasher, outputs: &Outputs) {
    let mut add = |values: &mut dyn Iterator<Item = &f32>| {
        values.for_each(|value| {
            hasher.update(&value.to_bits().to_le_bytes());
        });
    };
    for rank in &outputs.ranks {
        add(&mut rank.out.iter());
        add(&mut rank.lse.iter().flatten());
        add(&mut rank.max_logit.iter().flatten());
        if let Some(gradients) = &rank.gradients {
            add(&mut gradients.dq.iter().chain(&gradients.dk).chain(&gradients.dv).chain(&gradients.dsink));
        }
    }
}

/// Returns the digest of everything that the subject returns on the problems, with poisoned padding.
fn digest(arithmetic: Arithmetic) -> String {
    let mut hasher = blake3::Hasher::new();
    for (index, problem) in problems().iter().enumerate() {
        let mut inputs = values::inputs(problem);
        values::poison(&mut inputs, problem, Poison::Nan);
        for tiles in [Tiles { q: 4, kv: 4 }, Tiles { q: 1, kv: 16 }, Tiles { q: 64, kv: 1 }] {
            let subject = Emulated { tiles, order: index as u64, arithmetic, ..Emulated::default() };
            absorb(&mut hasher, &subject.run(problem, &inputs).expect("a run"));
        }
    }
    hasher.finalize().to_hex()[..16].to_owned()
}

#[test]
fn serial_f32_gives_the_bytes_that_it_gave() {
    assert_eq!(digest(Arithmetic::F32), "3183c7690856ee7c");
}

#[test]
fn the_tensor_core_model_gives_the_bytes_that_it_gave() {
    assert_eq!(digest(Arithmetic::Hopper), "cf641ac0ef68f812");
}
