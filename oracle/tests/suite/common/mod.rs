//! Random problems for the oracle's own tests. The campaign's generator lies above this crate. The generator here is
//! small, and aims at what can go wrong inside the oracle: empty rows and sequences, gaps, odd head ratios, sinks and
//! caps.

use ndarray::{Array1, Array3};
use seamproof_oracle::{
    Alignment, Dims, Heads, Inputs, Mask, Pass, Problem, ProblemFields, Run, Scales, Scaling, Sequence, Sink,
    Softmax, TensorRows,
};

/// The generator splitmix64.
pub(crate) struct Draws(pub(crate) u64);

impl Draws {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    pub(crate) fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }

    /// Returns a multiple of 2^-6 in [-2, 2]. It is exact in f32, bf16 and fp16, and its sum with 2^-12 is exact in
    /// f32.
    pub(crate) fn value(&mut self) -> f32 {
        (self.below(257) as f32 - 128.0) / 64.0
    }
}

/// Returns packed sequences of one head, whose logits are the products themselves.
pub(crate) fn plain(lengths: &[(usize, usize)], dim: usize) -> ProblemFields {
    ProblemFields { softmax: Softmax::scaled(1.0), ..ProblemFields::packed(lengths, dim) }
}

/// Returns inputs that are multiples of 2^-6. Rows that are not real hold NaN, which nothing may read.
pub(crate) fn inputs(problem: &Problem, draws: &mut Draws) -> Inputs {
    let mut tensor = |shape: [usize; 3], side: fn(&Sequence) -> Run| {
        let mut array = Array3::from_elem(shape, f32::NAN);
        for row in problem.sequences.iter().flat_map(|sequence| side(sequence).real_rows()) {
            array.index_axis_mut(ndarray::Axis(0), row).mapv_inplace(|_| draws.value());
        }
        array
    };
    let (q, k) = (tensor(problem.q_shape(), |s| s.q), tensor(problem.k_shape(), |s| s.kv));
    let (v, dout) = (tensor(problem.v_shape(), |s| s.kv), tensor(problem.out_shape(), |s| s.q));
    let dout = if problem.pass == Pass::Backward {
        dout
    } else {
        Array3::zeros([0, dout.shape()[1], dout.shape()[2]])
    };
    let sink = Array1::from_shape_fn(problem.learnable_sinks(), |_| draws.value());
    Inputs { q, k, v, dout, sink, scales: Scales::default() }
}

/// Returns a random problem with its inputs. `length_max` bounds each sequence.
pub(crate) fn random(seed: u64, length_max: usize) -> (Problem, Inputs) {
    let mut draws = Draws(seed);
    let count = draws.below(4);
    let mut rows = TensorRows { q: draws.below(3), kv: draws.below(3) };
    let mut sequences = Vec::new();
    for id in 0..count {
        let mut run = |end: &mut usize| {
            let len = if draws.below(5) == 0 { draws.below(2) } else { draws.below(length_max + 1) };
            let run = Run::packed(*end + draws.below(2), len, len + draws.below(4));
            *end = run.offset + run.span;
            run
        };
        sequences.push(Sequence { id: id as u32, q: run(&mut rows.q), kv: run(&mut rows.kv) });
    }
    rows.q += draws.below(3);
    rows.kv += draws.below(3);
    let kv = 1 + draws.below(3);
    let side = |draws: &mut Draws| match draws.below(3) {
        0 => None,
        1 => Some(draws.below(3) as u32),
        _ => Some(draws.below(2 * length_max + 1) as u32),
    };
    let mask = Mask {
        left: side(&mut draws),
        right: side(&mut draws),
        align: draws.pick(&[Alignment::TopLeft, Alignment::BottomRight]),
        sink_tokens: draws.pick(&[0, 0, 1, 3]),
        ..Mask::FULL
    };
    let softmax = Softmax {
        scale: draws.pick(&[1.0, 0.125, 0.3, 4.0]),
        softcap: draws.pick(&[None, None, Some(5.0), Some(0.5)]),
        sink: draws.pick(&[Sink::None, Sink::OffByOne, Sink::Learnable]),
    };
    let fields = ProblemFields {
        rows,
        heads: Heads { q: kv * (1 + draws.below(3)), kv },
        dims: Dims { qk: 1 + draws.below(9), v: 1 + draws.below(9) },
        mask,
        softmax,
        ..ProblemFields::of(sequences, 1)
    };
    let problem = Problem::new(fields).expect("the builder makes valid problems");
    let inputs = inputs(&problem, &mut draws);
    inputs.check(&problem).expect("the builder makes matching inputs");
    (problem, inputs)
}

/// Returns inputs of the problem with scales of other groups in every tensor: three times powers of two.
pub(crate) fn scaled(problem: &Problem, inputs: Inputs, draws: &mut Draws) -> (Problem, Inputs) {
    const SCALINGS: [Scaling; 6] = [
        Scaling::PerTensor,
        Scaling::PerHead,
        Scaling::PerSequenceHead,
        Scaling::PerSequenceGroup,
        Scaling::PerTokenHead,
        Scaling::PerBlock { rows: 2, columns: 3 },
    ];
    let mut fields = ProblemFields::from(problem.clone());
    let precision = &mut fields.precision;
    for element in [&mut precision.q, &mut precision.k, &mut precision.v, &mut precision.dout] {
        element.scaling = draws.pick(&SCALINGS);
    }
    let problem = Problem::new(fields).expect("scalings change no shape");
    let seed = draws.next();
    let scales = Scales::new(&problem, |tensor, _, [rows, head, lanes]| {
        let mut of = Draws(seed ^ (rows * 31 + head * 7 + lanes) as u64 ^ (tensor as u64) << 32);
        of.pick(&[0.1875, 0.375, 0.75, 1.5])
    });
    let inputs = Inputs { scales, ..inputs };
    inputs.check(&problem).expect("scales for every scaled input");
    (problem, inputs)
}
