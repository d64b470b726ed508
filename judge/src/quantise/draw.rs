//! Drawn quantisations: problems of the one generator, each with a recipe.

use seamproof_oracle::quantise::{Delayed, Quantisation, QuantisationFields, ScaleRule, Takes};
use seamproof_oracle::{
    Element, Format, InputMode, Pass, Precision, Problem, ProblemFields, Scaling, TensorName,
};

use crate::generate::{self, Draw, Limits};
use crate::hash::{absorb, below};

/// Scalings that are drawn. Blocks are small beside the drawn lengths, or those of MX and of block scaling.
const SCALINGS: [Scaling; 10] = [
    Scaling::PerTensor,
    Scaling::PerHead,
    Scaling::PerSequenceHead,
    Scaling::PerSequenceGroup,
    Scaling::PerTokenHead,
    Scaling::PerBlock { rows: 1, columns: 32 },
    Scaling::PerBlock { rows: 32, columns: 1 },
    Scaling::PerBlock { rows: 4, columns: 3 },
    Scaling::PerBlock { rows: 2, columns: 8 },
    Scaling::PerBlock { rows: 128, columns: 128 },
];

/// Tensors that are quantised together: alone, keys with values, and the three of an attention's input.
const TENSORS: [&[TensorName]; 6] = [
    &[TensorName::Q, TensorName::K, TensorName::V],
    &[TensorName::K, TensorName::V],
    &[TensorName::Q],
    &[TensorName::K],
    &[TensorName::V],
    &[TensorName::Dout],
];

/// Constant that sets these draws apart from other uses of a seed.
const DRAW: u64 = 0x9a27_1537;
/// Number of quantisations among which one has values halfway between codes.
const MIDPOINTS_ONE_IN: usize = 8;
/// Length of the longest drawn history, small enough that each entry matters.
const HISTORY: u32 = 5;

/// Draws from a hash that goes on.
struct Words(u64);

impl Words {
    fn below(&mut self, n: usize) -> usize {
        self.0 = absorb(self.0, 0);
        below(n as u32, self.0) as usize
    }

    fn of<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }
}

/// Returns quantisation `index` of a campaign's `seed`; `None` where the generator drew a malformed problem.
///
/// Values are in the problem's formats, or in f32 in a quarter of the cases, and in mode `Midpoints` in an eighth. One case
/// in four is delayed.
pub fn draw(seed: u64, index: u64, limits: &Limits) -> Option<Quantisation> {
    let Draw::Problem(problem) = generate::draw(seed, index, limits) else { return None };
    let mut words = Words(absorb(absorb(DRAW, seed), index));
    let problem = plain(problem, words.below(4) == 0, words.below(MIDPOINTS_ONE_IN) == 0)?;
    let dout = problem.pass == Pass::Backward;
    let tensors = words.of(&TENSORS[..if dout { TENSORS.len() } else { TENSORS.len() - 1 }]);
    let format = words.of(&[Format::E4m3, Format::E5m2]);
    let delayed = words.below(4) == 0;
    let scaling = if delayed { Scaling::PerTensor } else { words.of(&SCALINGS) };
    let rules = if delayed { &ScaleRule::ALL[..2] } else { &ScaleRule::ALL[..] };
    let fields = QuantisationFields {
        tensors: tensors.to_vec(),
        element: Element { format, scaling },
        scale: words.of(rules),
        margin: words.of(&[0, 0, 0, 1, 3, -1]),
        delayed: delayed.then(|| history(&mut words)),
        problem,
    };
    Quantisation::new(fields).ok()
}

/// Returns the problem without what a quantiser does not know: steps, pages, shared keys, and at times a 16-bit format.
fn plain(problem: Problem, in_f32: bool, at_midpoints: bool) -> Option<Problem> {
    let mut fields = ProblemFields::from(problem.unshared().at_once().without_pages());
    if at_midpoints {
        fields.mode = InputMode::Midpoints;
    }
    if in_f32 {
        fields.precision = Precision::uniform(Format::F32);
    }
    Problem::new(fields.sayable()).ok()
}

/// Returns a history of values around 1, some of them 0.
fn history(words: &mut Words) -> Delayed {
    let amax = |words: &mut Words| match words.below(4) {
        0 => 0.0,
        _ => libm::ldexpf(1.0 + words.below(128) as f32 / 128.0, words.below(9) as i32 - 4),
    };
    let entries = 1 + words.below(HISTORY as usize);
    Delayed {
        history: (0..entries).map(|_| amax(words)).collect(),
        takes: words.of(&[Takes::Max, Takes::MostRecent]),
        previous: libm::ldexpf(1.0, words.below(9) as i32),
    }
}

/// Returns a quantisation with some fields changed; `None` where it is none then.
pub(super) fn edited(
    asked: &Quantisation,
    edit: impl FnOnce(&mut QuantisationFields),
) -> Option<Quantisation> {
    let mut fields = QuantisationFields::from(asked.clone());
    edit(&mut fields);
    Quantisation::new(fields).ok()
}
