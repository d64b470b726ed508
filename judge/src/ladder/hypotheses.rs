//! Hypotheses: mistakes of kernels and of their callers that explain a whole case at once, such as an LSE with base 2
//! or a forgotten scale. They are a part of a finding's text, and never a verdict.
//!
//! A hypothesis is an edit of the problem, of its inputs or of the expected results. The oracle computes what a
//! subject with this one mistake returns. The hypothesis is told if every element of the forward lies within the
//! envelope of that, and if some element lies outside the envelope of the right results. Where several mistakes give
//! the same results, all of them are told.

use std::borrow::Cow;
use std::cell::{Cell, OnceCell};

use ndarray::{Array, Array1, Array2, Array3, Dimension, Zip, s};
use seamproof_oracle::blocked::{self, Answer, Tiers};
use seamproof_oracle::envelope::Model;
use seamproof_oracle::sharding::run_of;
use seamproof_oracle::{
    Alignment, Element, Format, ForwardResults, Inputs, Mask, Precision, Problem, ProblemFields, Side, Sink,
    Softmax, TensorName,
};

use super::across::{ACROSS_MISTAKES, AcrossMistake, Pack};
use super::bounds::{Comparison, FORWARD, forward};
use super::descales;
use super::evidence::{Depth, Evidence, products};
use super::given::{self, Multiple};
use super::pairs::logit;
use super::runs::{fills, poisoned};
use super::sights::{DealtCase, SIGHT_MISTAKES, SightMistake};
use super::stories::REST_MAX;
use crate::finding::{LOOKS, OR, number};
use crate::subject::RankOutputs;
use crate::verdict::Margin;

/// Largest number of visible products of a case in which hypotheses are asked. Each one takes the oracle a few
/// milliseconds there.
const HYPOTHESES_PRODUCTS_MAX: u64 = 1 << 22;

/// Smallest difference between two rows in how far the LSE lies above the largest logit. Rows of equally many equal
/// keys do not tell a lost maximum from lost keys.
const SPREAD_MIN: f64 = 0.25;

/// Relative error that an edit adds to an LSE: a few operations in f32.
const EDIT_ERROR: f64 = 1.0 / (1 << 22) as f64;

/// Relative error of a 16-bit format's rounding.
const ROUNDING: f64 = 1.0 / (1 << 8) as f64;

/// Returns the largest share of the wrong elements' error, in size, that a mistake may leave. In FP8 bounds of large logits
/// are wide, and hold a mistake that is not the right one. Elsewhere they are narrow, and an error that is hardly past its
/// bound is roundings for the most part, which no mistake explains.
pub(super) fn left_max(problem: &Problem) -> f64 {
    if problem.precision.has_scales() { 0.25 } else { f64::INFINITY }
}

/// Largest multiple of what a mistake with descales leaves that another one, or a wrong scale, may leave, beside a rounding, to
/// be told as well.
const CLOSER: f64 = 4.0;

/// Whether a mistake that leaves a share of the error is told beside one that leaves the least.
pub(super) fn is_near(left: f64, least: f64) -> bool {
    left <= CLOSER * least + ROUNDING
}

/// The LSE of a row, and the largest logit of its keys.
#[derive(Clone, Copy)]
struct RowLse {
    lse: f64,
    largest: f64,
}

/// A mistake in the LSE alone.
struct LseMistake {
    words: &'static str,
    /// Function that returns the LSE of a row with this mistake.
    of: fn(RowLse) -> f64,
    /// Whether rows of different spread must be there.
    needs_spread: bool,
}

const LSE_MISTAKES: [LseMistake; 4] = [
    LseMistake {
        words: "the LSE had base 2 (× 1.4427 everywhere)",
        of: |row| row.lse / std::f64::consts::LN_2,
        needs_spread: false,
    },
    LseMistake {
        words: "a natural LSE was converted from base 2 (× 0.6931 everywhere)",
        of: |row| row.lse * std::f64::consts::LN_2,
        needs_spread: false,
    },
    LseMistake {
        words: "the LSE lacked the row's largest logit (the logarithm of Σ exp(s − max) alone)",
        of: |row| row.lse - row.largest,
        needs_spread: true,
    },
    LseMistake {
        words: "the row's largest logit stood in place of the LSE",
        of: |row| row.largest,
        needs_spread: true,
    },
];

/// A mistake in the softmax, apart from the scale. It changes nothing where the problem has no such term.
struct SoftmaxMistake {
    words: &'static str,
    edit: fn(&mut Softmax),
    /// Whether out is right, and the LSE alone is not.
    in_lse_alone: bool,
}

const SOFTMAX_MISTAKES: [SoftmaxMistake; 3] = [
    SoftmaxMistake {
        words: "the LSE was taken before the sink was added",
        edit: |softmax| softmax.sink = Sink::None,
        in_lse_alone: true,
    },
    SoftmaxMistake {
        words: "the sink was left out",
        edit: |softmax| softmax.sink = Sink::None,
        in_lse_alone: false,
    },
    SoftmaxMistake {
        words: "the soft cap was left out",
        edit: |softmax| softmax.softcap = None,
        in_lse_alone: false,
    },
];

/// A mistake in the mask, in words, and the mask with it.
pub(super) type MaskMistake = (&'static str, fn(Mask) -> Mask);

pub(super) const MASK_MISTAKES: [MaskMistake; 8] = [
    ("the mask was aligned to the top left, not to the bottom right", |mask| Mask {
        align: Alignment::TopLeft,
        ..mask
    }),
    ("the mask was aligned to the bottom right, not to the top left", |mask| Mask {
        align: Alignment::BottomRight,
        ..mask
    }),
    ("the mask was left out", |mask| Mask { align: mask.align, ..Mask::FULL }),
    ("the mask was causal", |mask| Mask { right: Some(0), ..mask }),
    ("queries saw keys of other documents or chunks", |mask| Mask { blocks: None, ..mask }),
    ("the prefix was taken as causal", |mask| Mask { prefix: 0, ..mask }),
    ("the window hid the sink tokens", |mask| Mask { sink_tokens: 0, ..mask }),
    ("sink tokens were visible past the right bound", |mask| Mask {
        prefix: mask.prefix.max(mask.sink_tokens),
        ..mask
    }),
];

/// Where a wrong scale comes from, and the function that returns it.
type WrongScale = (&'static str, fn(&Problem) -> f64);

/// Scales that are taken in place of the one that was asked for.
const SCALES: [WrongScale; 6] = [
    ("forgotten", |_| 1.0),
    ("applied twice", |problem| f64::from(problem.softmax.scale).powi(2)),
    ("1/√ of the head dimension", |problem| 1.0 / (problem.dims.qk as f64).sqrt()),
    ("1/√ of the head dimension of v", |problem| 1.0 / (problem.dims.v as f64).sqrt()),
    ("powers of 2 in place of e", |problem| f64::from(problem.softmax.scale) * std::f64::consts::LN_2),
    ("converted to base 2 twice", |problem| f64::from(problem.softmax.scale) / std::f64::consts::LN_2),
];

/// A reading of 16-bit codes in the other 16-bit format. The more frequent ones stand first.
struct Reading {
    inputs: bool,
    out: bool,
    words: fn(Format, Format) -> String,
}

const READINGS: [Reading; 3] = [
    Reading { inputs: true, out: true, words: |own, other| format!("{own} codes were read as {other}") },
    Reading {
        inputs: true,
        out: false,
        words: |own, other| {
            format!("{own} codes of q, k and v were read as {other}, and out was converted back")
        },
    },
    Reading {
        inputs: false,
        out: true,
        words: |own, other| format!("out held {other} codes, which are read as {own}"),
    },
];

/// Returns in words the mistakes that explain all results of the forward; `None` where none does, or where the case
/// is too large to ask.
pub(super) fn told(evidence: &Evidence<'_>) -> Option<String> {
    if !are_asked(evidence) {
        return None;
    }
    let right = answer(evidence, evidence.problem, evidence.inputs)?;
    if holds(evidence, evidence.problem, evidence.first, &right) {
        return None;
    }
    let values = evidence.inputs.values(evidence.problem);
    let left_by_descales = Cell::new(f64::INFINITY);
    let case = Case { evidence, right, values, largest: OnceCell::new(), left_by_descales };
    let mut told = [
        case.given(),
        case.descales(),
        case.lse(),
        case.softmax(),
        case.scale(),
        case.sight(),
        case.across(),
        case.mask(),
    ]
    .concat();
    told.extend(case.places());
    told.extend(case.reading());
    in_words(&told)
}

/// Whether hypotheses about a case are asked.
pub(super) fn are_asked(evidence: &Evidence<'_>) -> bool {
    // Scoring counts checks and reads no words.
    evidence.depth == Depth::First && products(evidence.problem) <= HYPOTHESES_PRODUCTS_MAX
}

/// Returns the words of all mistakes that explain some results; `None` where none does.
pub(super) fn in_words(mistakes: &[String]) -> Option<String> {
    (!mistakes.is_empty()).then(|| format!("{LOOKS}{}", mistakes.join(OR)))
}

/// Returns the right results of a problem, with the bounds of tier W in both tiers: a mistake may undo a dither.
fn answer(evidence: &Evidence<'_>, problem: &Problem, inputs: &Inputs) -> Option<Answer<ForwardResults>> {
    let model = Model::new(problem, evidence.backend.declaration().arithmetic, evidence.partition());
    let Answer { exact, bound } = evidence.oracle(|| blocked::forward(problem, inputs, Some(&model)));
    let worst = bound?.worst;
    Some(Answer { exact, bound: Some(Tiers { dithered: worst.clone(), worst }) })
}

/// Returns each real row of a side, with the row where it would lie without padding.
fn at_real_offsets(problem: &Problem, side: Side) -> impl Iterator<Item = (usize, usize)> {
    problem.sequences.iter().flat_map(move |sequence| run_of(sequence, side).real_rows()).zip(0..)
}

/// Returns a tensor with, in the place of each real row, what lies where that would be without padding.
fn read_at_real_offsets(problem: &Problem, tensor: &Array3<f32>, side: Side) -> Array3<f32> {
    let mut read = tensor.clone();
    for (row, real) in at_real_offsets(problem, side).take(tensor.dim().0) {
        read.slice_mut(s![row, .., ..]).assign(&tensor.slice(s![real, .., ..]));
    }
    read
}

/// Whether results lie within the bounds of an answer, in every element of the forward.
fn holds(
    evidence: &Evidence<'_>,
    problem: &Problem,
    results: &RankOutputs,
    answer: &Answer<ForwardResults>,
) -> bool {
    let compare = Comparison { problem, layout: evidence.layout, ratio: evidence.judge.ratio };
    forward(&compare, results, answer, &FORWARD, &mut Margin::default()).is_none()
}

/// A case whose results are wrong.
struct Case<'a> {
    evidence: &'a Evidence<'a>,
    right: Answer<ForwardResults>,
    /// The inputs without scales.
    values: Cow<'a, Inputs>,
    /// Largest logit of each row, once it was asked for.
    largest: OnceCell<Array2<f64>>,
    /// Least share of the error that a mistake with descales leaves; infinite where none explains the results.
    left_by_descales: Cell<f64>,
}

impl Case<'_> {
    /// Returns the results that another problem, or other inputs, would have. A problem without a learnable sink has
    /// none among its inputs.
    fn answer(&self, problem: &Problem, inputs: &Inputs) -> Option<Answer<ForwardResults>> {
        if inputs.sink.len() == problem.learnable_sinks() {
            return answer(self.evidence, problem, inputs);
        }
        let inputs = Inputs { sink: Array1::zeros(problem.learnable_sinks()), ..inputs.clone() };
        answer(self.evidence, problem, &inputs)
    }

    /// Whether an answer explains the first of two results. Nearly always both are the subject's results.
    fn explains(&self, problem: &Problem, both: [&RankOutputs; 2], answer: Answer<ForwardResults>) -> bool {
        self.unexplained(problem, both, answer).is_some()
    }

    /// Returns the share of the error that an answer leaves, if it explains the first of two results and the right one
    /// does not explain the second within the same bounds: bounds so wide explain nothing.
    fn unexplained(
        &self,
        problem: &Problem,
        [results, beside]: [&RankOutputs; 2],
        mut answer: Answer<ForwardResults>,
    ) -> Option<f64> {
        self.narrow(&mut answer);
        if !holds(self.evidence, problem, results, &answer) {
            return None;
        }
        let left = self.left([results, beside], &answer.exact);
        if left > left_max(self.evidence.problem) {
            return None;
        }
        let of_right = Answer { exact: self.right.exact.clone(), ..answer };
        (!holds(self.evidence, problem, beside, &of_right)).then_some(left)
    }

    /// Returns the share of the wrong elements' error that predicted results leave, in the tensor where it is largest. The
    /// wrong ones are those of `beside`.
    fn left(&self, [results, beside]: [&RankOutputs; 2], predicted: &ForwardResults) -> f64 {
        let Evidence { problem, .. } = *self.evidence;
        let Answer { exact: right, bound: Some(Tiers { worst: bound, .. }) } = &self.right else {
            return 0.0;
        };
        let rows = || problem.sequences.iter().flat_map(|sequence| sequence.q.real_rows());
        let heads = || 0..problem.heads.q;
        let mut out = Left::default();
        for at in rows().flat_map(|row| {
            heads().flat_map(move |head| (0..problem.dims.v).map(move |lane| [row, head, lane]))
        }) {
            out.add([results.out[at], beside.out[at]], [predicted.out[at], right.out[at]], bound.out[at]);
        }
        let mut lse = Left::default();
        if let (Some(got), Some(beside)) = (&results.lse, &beside.lse) {
            for at in rows().flat_map(|row| heads().map(move |head| [head, row])) {
                lse.add([got[at], beside[at]], [predicted.lse[at], right.lse[at]], bound.lse[at]);
            }
        }
        let mut largest = Left::default();
        if let (Some(got), Some(beside)) = (&results.max_logit, &beside.max_logit) {
            for at in heads() {
                let exact = [predicted.max_logit[at], right.max_logit[at]];
                largest.add([got[at], beside[at]], exact, bound.max_logit[at]);
            }
        }
        [out, lse, largest].iter().map(Left::share).fold(0.0, f64::max)
    }

    /// Bounds the elements whose bound says nothing, which very large logits give: nearly all of the error must be
    /// explained there.
    fn narrow(&self, answer: &mut Answer<ForwardResults>) {
        let Answer { exact, bound: Some(bound) } = answer else { return };
        let right = &self.right.exact;
        for tier in [&mut bound.worst, &mut bound.dithered] {
            narrow(&mut tier.out, &exact.out, &right.out);
            narrow(&mut tier.lse, &exact.lse, &right.lse);
            narrow(&mut tier.max_logit, &exact.max_logit, &right.max_logit);
        }
    }

    /// Whether the subject's results are right for another problem.
    fn solves(&self, problem: &Problem) -> bool {
        self.left_by(problem).is_some()
    }

    /// Returns the share of the error that is left where the subject's results are right for another problem.
    fn left_by(&self, problem: &Problem) -> Option<f64> {
        let answer = self.answer(problem, self.evidence.inputs)?;
        self.unexplained(problem, [self.evidence.first; 2], answer)
    }

    /// Returns the problem with an edited softmax; `None` where the edit changes nothing or gives no problem.
    fn edited(&self, edit: impl FnOnce(&mut Softmax)) -> Option<Problem> {
        let mut fields = ProblemFields::from(self.evidence.problem.clone());
        edit(&mut fields.softmax);
        let is_other = fields.softmax != self.evidence.problem.softmax;
        is_other.then(|| Problem::new(fields).ok())?
    }

    fn mask(&self) -> Vec<String> {
        let explains = |(_, edit): &&MaskMistake| {
            let mut fields = ProblemFields::from(self.evidence.problem.clone());
            fields.mask = edit(fields.mask);
            let is_other = fields.mask != self.evidence.problem.mask;
            is_other && Problem::new(fields).is_ok_and(|problem| self.solves(&problem))
        };
        MASK_MISTAKES.iter().filter(explains).map(|(words, _)| (*words).to_owned()).collect()
    }

    /// Returns the first mistake of programs on several ranks that explains the results.
    fn sight(&self) -> Vec<String> {
        let Evidence { problem, first, .. } = *self.evidence;
        let Some(dealt) = DealtCase::new(problem, &self.values, &self.evidence.ranks()) else {
            return Vec::new();
        };
        // The same for every mistake in a merge.
        let may_be_merged =
            first.lse.as_ref().is_none_or(|lse| dealt.may_be_merged(lse, &self.right.exact.lse));
        let explains = |mistake: &&SightMistake| {
            if !mistake.has_lse() && !may_be_merged {
                return false;
            }
            let lse = first.lse.clone().filter(|_| mistake.has_lse());
            dealt.results(mistake, &self.right.exact).is_some_and(|exact| self.are(exact, lse))
        };
        SIGHT_MISTAKES.iter().find(explains).map(|mistake| mistake.words.to_owned()).into_iter().collect()
    }

    /// Returns the first mistake about which sequence a key is of that explains the results.
    fn across(&self) -> Vec<String> {
        let Evidence { problem, first, .. } = *self.evidence;
        let Some(pack) = Pack::new(problem, &self.values) else { return Vec::new() };
        let explains =
            |mistake: &&AcrossMistake| self.are(pack.results(mistake, &self.right.exact), first.lse.clone());
        ACROSS_MISTAKES.iter().find(explains).map(|mistake| mistake.words.to_owned()).into_iter().collect()
    }

    /// Whether the subject's out, and this LSE of its, are predicted ones.
    fn are(&self, exact: ForwardResults, lse: Option<Array2<f32>>) -> bool {
        let Evidence { problem, first, .. } = *self.evidence;
        let results = RankOutputs { lse, max_logit: None, ..first.clone() };
        self.about(exact).is_some_and(|answer| self.explains(problem, [&results; 2], answer))
    }

    /// Returns results with the bounds of the right ones, and room for roundings of other sizes.
    fn about(&self, exact: ForwardResults) -> Option<Answer<ForwardResults>> {
        let mut worst = self.right.bound.as_ref()?.worst.clone();
        let widen =
            |bound: &mut f64, exact: &f64, relative: f64| *bound = 2.0 * *bound + relative * exact.abs();
        let of_out = self.evidence.problem.precision.out.format.unit_roundoff();
        Zip::from(&mut worst.out).and(&exact.out).for_each(|bound, exact| widen(bound, exact, of_out));
        Zip::from(&mut worst.lse).and(&exact.lse).for_each(|bound, exact| widen(bound, exact, EDIT_ERROR));
        Some(Answer { exact, bound: Some(Tiers { dithered: worst.clone(), worst }) })
    }

    fn lse(&self) -> Vec<String> {
        let Evidence { problem, first, .. } = *self.evidence;
        if first.lse.is_none() {
            return Vec::new();
        }
        let explains = |mistake: &&LseMistake| {
            let answer = self.with_lse(mistake);
            answer.is_some_and(|answer| self.explains(problem, [first; 2], answer))
        };
        LSE_MISTAKES.iter().filter(explains).map(|mistake| mistake.words.to_owned()).collect()
    }

    /// Returns the right results with a mistake in the LSE. A row without a sum keeps its −∞.
    fn with_lse(&self, mistake: &LseMistake) -> Option<Answer<ForwardResults>> {
        let largest = self.largest();
        if mistake.needs_spread && spread(&self.right.exact.lse, largest) < SPREAD_MIN {
            return None;
        }
        let mut answer = self.right.clone();
        let bound = answer.bound.as_mut()?;
        Zip::from(&mut answer.exact.lse).and(&mut bound.worst.lse).and(largest).for_each(
            |lse, bound, &largest| {
                if lse.is_finite() && largest.is_finite() {
                    *bound = *bound / std::f64::consts::LN_2 + EDIT_ERROR * (lse.abs() + largest.abs());
                    *lse = (mistake.of)(RowLse { lse: *lse, largest });
                }
            },
        );
        bound.dithered.lse.clone_from(&bound.worst.lse);
        Some(answer)
    }

    /// Returns the largest logit of each row; −∞ for a row that sees no key, and for one that is not real.
    fn largest(&self) -> &Array2<f64> {
        self.largest.get_or_init(|| {
            let (problem, inputs) = (self.evidence.problem, &*self.values);
            let mut largest = Array2::from_elem(problem.lse_shape(), f64::NEG_INFINITY);
            for sequence in &problem.sequences {
                for (i, row) in sequence.q.real_rows().enumerate() {
                    let keys = problem.mask.visible(i, sequence.q.len, sequence.kv.len);
                    for head in 0..problem.heads.q {
                        let of_key = |key: usize| (sequence.kv.row(key), head / problem.group());
                        let logit = |key: usize| logit(problem, inputs, (row, head), of_key(key));
                        largest[[head, row]] = keys.clone().map(logit).fold(f64::NEG_INFINITY, f64::max);
                    }
                }
            }
            largest
        })
    }

    fn softmax(&self) -> Vec<String> {
        let explains = |mistake: &&SoftmaxMistake| {
            let Some(problem) = self.edited(mistake.edit) else { return false };
            let Some(mut answer) = self.answer(&problem, self.evidence.inputs) else { return false };
            if mistake.in_lse_alone {
                let (Some(bound), Some(of_right)) = (&mut answer.bound, &self.right.bound) else {
                    return false;
                };
                answer.exact.out.clone_from(&self.right.exact.out);
                bound.worst.out.clone_from(&of_right.worst.out);
                bound.dithered.out.clone_from(&of_right.worst.out);
            }
            self.explains(&problem, [self.evidence.first; 2], answer)
        };
        SOFTMAX_MISTAKES.iter().filter(explains).map(|mistake| mistake.words.to_owned()).collect()
    }

    fn scale(&self) -> Vec<String> {
        let asked = self.evidence.problem.softmax.scale;
        let mut scales: Vec<(f32, Vec<&str>)> = Vec::new();
        for (origin, scale) in SCALES {
            let scale = scale(self.evidence.problem) as f32;
            match scales.iter_mut().find(|(other, _)| *other == scale) {
                // Nearly always both dimensions are the same, which needs no word.
                Some((_, origins)) if origins.last().is_some_and(|last| origin.starts_with(last)) => {}
                Some((_, origins)) => origins.push(origin),
                None => scales.push((scale, vec![origin])),
            }
        }
        let solves = |(scale, _): &(f32, Vec<&str>)| {
            let left =
                self.edited(|softmax| softmax.scale = *scale).and_then(|problem| self.left_by(&problem));
            left.is_some_and(|left| is_near(left, self.left_by_descales.get()))
        };
        let words = |(scale, origins): (f32, Vec<&str>)| {
            let times = short(f64::from(scale) / f64::from(asked));
            let (scale, origins) = (number(scale), origins.join(", or "));
            format!(
                "logits were {times} times as large (softmax scale {scale} in place of {}: {origins})",
                number(asked)
            )
        };
        scales.into_iter().filter(solves).map(words).collect()
    }

    /// Returns the first tensors that explain the results if their rows were read at the real offsets. What lies there
    /// may be rows of other sequences, or padding.
    fn places(&self) -> Option<String> {
        let Evidence { problem, inputs, first, backend, .. } = *self.evidence;
        let lie_there = [Side::Q, Side::Kv]
            .into_iter()
            .all(|side| at_real_offsets(problem, side).all(|(row, real)| row == real));
        if lie_there || problem.parallel.size() > 1 || problem.pages.is_some() {
            return None;
        }
        let [poison, _] = fills(backend, problem);
        let given = poisoned(inputs, problem, poison);
        let [q, k, v] = [
            read_at_real_offsets(problem, &given.q, Side::Q),
            read_at_real_offsets(problem, &given.k, Side::Kv),
            read_at_real_offsets(problem, &given.v, Side::Kv),
        ];
        let of_keys =
            |k: &Array3<f32>, v: &Array3<f32>| Inputs { k: k.clone(), v: v.clone(), ..inputs.clone() };
        let all = Inputs { q: q.clone(), ..of_keys(&k, &v) };
        let edits = [
            ("k and v were", of_keys(&k, &v)),
            ("q, k and v were", all),
            ("k was", of_keys(&k, &inputs.v)),
            ("v was", of_keys(&inputs.k, &v)),
            ("q was", Inputs { q, ..inputs.clone() }),
        ];
        let explains = |(_, edited): &&(&str, Inputs)| {
            let answer = self.answer(problem, edited);
            answer.is_some_and(|answer| self.explains(problem, [first; 2], answer))
        };
        let words = |(tensors, _): &(&str, Inputs)| {
            format!("{tensors} read at the real offsets, not at the padded ones")
        };
        edits.iter().find(explains).map(words)
    }

    /// Returns the mistakes with the given scales of what the kernel quantises that explain the results.
    fn given(&self) -> Vec<String> {
        let Evidence { problem, inputs, first, .. } = *self.evidence;
        let explaining: Vec<(f64, String)> = given::mistakes(problem, inputs, TensorName::Out)
            .into_iter()
            .filter_map(|(multiple, words)| {
                Some((self.unexplained(problem, [first; 2], self.multiplied(&multiple)?)?, words))
            })
            .collect();
        let least = explaining.iter().map(|(left, _)| *left).fold(f64::INFINITY, f64::min);
        self.left_by_descales.set(least);
        explaining.into_iter().filter(|(left, _)| is_near(*left, least)).map(|(_, words)| words).collect()
    }

    /// Returns the right results with a multiple of out; `None` where no element would tell it.
    fn multiplied(&self, multiple: &Multiple) -> Option<Answer<ForwardResults>> {
        let mut answer = self.right.clone();
        let Answer { exact, bound: Some(Tiers { worst, dithered }) } = &mut answer else { return None };
        let mut is_told = false;
        Zip::from(&mut exact.out).and(&mut worst.out).for_each(|exact, bound| {
            is_told |= multiple.is_told_by(*exact, *bound);
            [*exact, *bound] = multiple.element(*exact, *bound);
        });
        dithered.out.clone_from(&worst.out);
        is_told.then_some(answer)
    }

    /// Returns the mistakes with descales and with the format of codes. Where logits are wrong, q or k is part of it, and
    /// elsewhere v alone.
    fn descales(&self) -> Vec<String> {
        let Evidence { problem, inputs, first, layout, judge, .. } = *self.evidence;
        let compare = Comparison { problem, layout, ratio: judge.ratio };
        let logits = [TensorName::Lse, TensorName::MaxLogit];
        let is_shown = first.lse.is_some() || first.max_logit.is_some();
        let wrong = forward(&compare, first, &self.right, &logits, &mut Margin::default()).is_some();
        descales::told(problem, inputs, |mistake| {
            let has_logits = [TensorName::Q, TensorName::K].iter().any(|of| mistake.tensors.contains(of));
            let is_asked = !mistake.tensors.contains(&TensorName::Dout) && (!is_shown || has_logits == wrong);
            is_asked && self.is_descaled(mistake)
        })
    }

    /// Whether a mistake with descales explains the results. The least that any leaves is kept.
    fn is_descaled(&self, mistake: &descales::Mistake) -> bool {
        let Some(mut answer) = self.answer(&mistake.problem, &mistake.inputs) else { return false };
        if let Some(of_v) = &mistake.of_v {
            answer = self.times_of_v(answer, of_v);
        }
        let left = self.unexplained(&mistake.problem, [self.evidence.first; 2], answer);
        self.is_kept(left)
    }

    /// Whether a mistake with descales that leaves this share of the error is told: one that was found before leaves no far
    /// smaller one. The least share is kept.
    fn is_kept(&self, left: Option<f64>) -> bool {
        let Some(left) = left else { return false };
        let least = self.left_by_descales.get();
        self.left_by_descales.set(least.min(left));
        is_near(left, least)
    }

    /// Returns an answer with every out multiplied by the factor of its sequence and head.
    fn times_of_v(&self, mut answer: Answer<ForwardResults>, of_v: &Array2<f64>) -> Answer<ForwardResults> {
        let mut outs = vec![&mut answer.exact.out];
        if let Some(Tiers { worst, dithered }) = &mut answer.bound {
            outs.extend([&mut worst.out, &mut dithered.out]);
        }
        for out in outs {
            for (index, sequence) in self.evidence.problem.sequences.iter().enumerate() {
                for row in sequence.q.real_rows() {
                    for (head, factor) in of_v.row(index).iter().enumerate() {
                        out.slice_mut(s![row, head, ..]).mapv_inplace(|out| out * factor);
                    }
                }
            }
        }
        answer
    }

    /// Returns the first reading in the other format that explains the results.
    fn reading(&self) -> Option<String> {
        let precision = self.evidence.problem.precision;
        let own = precision.q.format;
        let is_one = [precision.k, precision.v, precision.out].iter().all(|of| of.format == own);
        let other = other_16_bits(own).filter(|_| is_one)?;
        let told = READINGS.iter().find(|reading| self.is_read(reading, own, other))?;
        Some((told.words)(own, other))
    }

    /// Whether a reading in the other format explains the results.
    fn is_read(&self, reading: &Reading, own: Format, other: Format) -> bool {
        let Evidence { problem, inputs, first, .. } = *self.evidence;
        let mut fields = ProblemFields::from(problem.clone());
        fields.precision = read_precision(problem.precision, reading, other);
        let Ok(problem) = Problem::new(fields) else { return false };
        let mut inputs = inputs.clone();
        if reading.inputs {
            for tensor in [&mut inputs.q, &mut inputs.k, &mut inputs.v] {
                read_as(tensor, own, other);
            }
        }
        let mut results = first.clone();
        if reading.out {
            read_as(&mut results.out, own, other);
        }
        let answer = self.answer(&problem, &inputs);
        // What was read in the other format may be right.
        answer.is_some_and(|answer| self.explains(&problem, [&results, first], answer))
    }
}

/// Sums over the wrong elements of a tensor: the squares of their errors, and of what a mistake leaves of these.
#[derive(Default)]
pub(super) struct Left {
    error: f64,
    left: f64,
}

impl Left {
    /// Adds an element if it is wrong: what was returned, and that which is beside the right one, what is predicted and what
    /// is right, and the bound of the right one. An element that is not a number tells nothing.
    pub(super) fn add(&mut self, [got, beside]: [f32; 2], [predicted, right]: [f64; 2], bound: f64) {
        let [left, error] = [f64::from(got) - predicted, f64::from(beside) - right];
        if error.abs() > bound && error.is_finite() && left.is_finite() {
            self.error += error * error;
            self.left += left * left;
        }
    }

    /// Returns the share of the error that is left, in size; 0 where nothing is wrong.
    pub(super) fn share(&self) -> f64 {
        if self.error > 0.0 { (self.left / self.error).sqrt() } else { 0.0 }
    }
}

/// Replaces each bound that is wider than every value of its tensor.
fn narrow<D: Dimension>(bound: &mut Array<f64, D>, exact: &Array<f64, D>, right: &Array<f64, D>) {
    let sizes = exact.iter().chain(right).map(|value| value.abs()).filter(|size| size.is_finite());
    let largest = sizes.fold(0.0, f64::max);
    Zip::from(bound).and(exact).and(right).for_each(|bound, exact, right| {
        if bound.is_nan() || *bound > largest {
            *bound = REST_MAX * (exact - right).abs() + ROUNDING * exact.abs();
        }
    });
}

/// Returns the largest difference between rows in how far the LSE lies above the largest logit.
fn spread(lse: &Array2<f64>, largest: &Array2<f64>) -> f64 {
    let above = lse.iter().zip(largest).map(|(lse, largest)| lse - largest).filter(|above| above.is_finite());
    let (least, most) = above
        .fold((f64::INFINITY, f64::NEG_INFINITY), |(least, most), above| (least.min(above), most.max(above)));
    most - least
}

fn other_16_bits(format: Format) -> Option<Format> {
    match format {
        Format::Bf16 => Some(Format::Fp16),
        Format::Fp16 => Some(Format::Bf16),
        _ => None,
    }
}

/// Returns the formats in which a subject with a wrong reading computes. Where out alone is right, it was rounded to
/// one format after the other, and bf16 is the coarser one.
fn read_precision(precision: Precision, reading: &Reading, other: Format) -> Precision {
    let other = Element::from(other);
    let out = if reading.out { other } else { Element::from(Format::Bf16) };
    let read = Precision { out, ..precision };
    if !reading.inputs {
        return read;
    }
    let p = if other_16_bits(precision.p.format).is_some() { other } else { precision.p };
    Precision { q: other, k: other, v: other, p, ..read }
}

/// Reads the codes of a tensor's numbers in another format.
fn read_as(tensor: &mut Array3<f32>, own: Format, other: Format) {
    tensor.mapv_inplace(|value| other.decode(own.encode(f64::from(value))) as f32);
}

/// Returns a number with four digits.
pub(super) fn short(value: f64) -> String {
    let digits = 3 - value.abs().log10().floor() as i32;
    let unit = 10f64.powi(digits);
    number((value * unit).round() / unit)
}
