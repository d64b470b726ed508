//! The exhaustive small space. Most faults that show at all show in some problem of two short sequences.

use seamproof_oracle::{
    Alignment, ContextParallel, Dims, Form, Format, Heads, InputMode, Mask, Pass, Precision, Problem,
    ProblemFields, Run, ScaleValues, Sequence, Sharing, Sink, Softmax, Steps, TensorRows,
};

/// Largest number of real rows on one side of a sequence.
const LENGTH_MAX: usize = 2;
/// Largest number of padding rows of a sequence, the same on both sides.
const PADDING_MAX: usize = 1;
/// Number of shapes of one sequence.
const SHAPES: usize = (LENGTH_MAX + 1) * (LENGTH_MAX + 1) * (PADDING_MAX + 1);
/// Number of packs of no sequence, of one and of two.
const PACKS: usize = 1 + SHAPES + SHAPES * SHAPES;

const fn mask(left: Option<u32>, right: Option<u32>, align: Alignment) -> Mask {
    Mask::window(left, right, align)
}

const MASKS: [Mask; 10] = [
    Mask::FULL,
    Mask::CAUSAL,
    mask(None, Some(0), Alignment::BottomRight),
    mask(Some(0), Some(0), Alignment::TopLeft),
    mask(Some(0), Some(0), Alignment::BottomRight),
    mask(Some(1), Some(0), Alignment::TopLeft),
    mask(Some(1), Some(0), Alignment::BottomRight),
    mask(Some(0), None, Alignment::BottomRight),
    mask(Some(0), Some(1), Alignment::TopLeft),
    mask(Some(1), Some(1), Alignment::BottomRight),
];

const HEADS: [Heads; 2] = [Heads { q: 1, kv: 1 }, Heads { q: 2, kv: 1 }];
const SINKS: [Sink; 2] = [Sink::None, Sink::Learnable];
const DIMS: Dims = Dims { qk: 2, v: 3 };

/// Returns every combination of at most two sequences (0 to 2 queries, 0 to 2 keys, 0 or 1 padding row), ten masks,
/// one or two query heads on one KV head, with or without a learnable sink; forward and backward. Integer and flat
/// values alternate.
pub fn tiny() -> impl Iterator<Item = Problem> {
    (0..PACKS * MASKS.len() * HEADS.len() * SINKS.len()).filter_map(|index| Problem::new(fields(index)).ok())
}

/// Returns the fields that a number stands for. The digits of the number are the choices.
fn fields(index: usize) -> ProblemFields {
    let mut rest = index;
    let mut digit = |base: usize| {
        let digit = rest % base;
        rest /= base;
        digit
    };
    let (sink, heads, mask) = (digit(SINKS.len()), digit(HEADS.len()), digit(MASKS.len()));
    let (sequences, rows) = pack(digit(PACKS));
    ProblemFields {
        sequences,
        rows,
        heads: HEADS[heads],
        dims: DIMS,
        mask: MASKS[mask],
        softmax: Softmax { scale: 0.5, softcap: None, sink: SINKS[sink] },
        precision: Precision::uniform(Format::Bf16),
        parallel: ContextParallel::single(),
        mode: [InputMode::Integers, InputMode::Flat][(sink + heads) % 2],
        data_seed: index as u64,
        pass: Pass::Backward,
        scales: ScaleValues::default(),
        form: Form::CuSeqlens,
        steps: Steps::default(),
        pages: None,
        sharing: Sharing::default(),
    }
}

fn pack(number: usize) -> (Vec<Sequence>, TensorRows) {
    let shapes = match number {
        0 => vec![],
        n if n <= SHAPES => vec![n - 1],
        n => vec![(n - 1 - SHAPES) / SHAPES, (n - 1 - SHAPES) % SHAPES],
    };
    let mut rows = TensorRows { q: 0, kv: 0 };
    let mut sequences = Vec::with_capacity(shapes.len());
    for (id, shape) in (0..).zip(shapes) {
        let (padding, lengths) = (shape % (PADDING_MAX + 1), shape / (PADDING_MAX + 1));
        let (q, kv) = (lengths % (LENGTH_MAX + 1), lengths / (LENGTH_MAX + 1));
        let (q, kv) = (Run::packed(rows.q, q, q + padding), Run::packed(rows.kv, kv, kv + padding));
        rows = TensorRows { q: rows.q + q.span, kv: rows.kv + kv.span };
        sequences.push(Sequence { id, q, kv });
    }
    (sequences, rows)
}
