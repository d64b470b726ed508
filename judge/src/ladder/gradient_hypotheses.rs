//! Hypotheses about a backward: mistakes that explain a whole wrong gradient at once, such as a forgotten scale, or
//! rows that lie where real offsets would put them. They are a part of a finding's text, and never a verdict.
//!
//! A hypothesis is an edit of the exact gradient, or of what it is made of. It is told if every element of the wrong
//! gradient lies within the envelope of what the mistake gives, and if the right gradient does not. Where several
//! mistakes give the same results, all of them are told.

use std::f64::consts::LN_2;

use ndarray::{Array3, Axis, Zip, s};
use seamproof_oracle::blocked::{self, Answer};
use seamproof_oracle::envelope::{Arithmetic, Delta, Model};
use seamproof_oracle::sharding::run_of;
use seamproof_oracle::{Gradients, Inputs, Problem, ProblemFields, Quantity, Run, Saved, TensorName};

use super::descales;
use super::evidence::Evidence;
use super::given::{self, Multiple};
use super::hypotheses::{Left, MASK_MISTAKES, MaskMistake, are_asked, in_words, is_near, left_max, short};
use crate::subject::RankGradients;

/// Smallest number of elements that must differ from 0 beyond their bounds, for a factor to be told: one that a mistake
/// gives, one that few elements may have by chance, and any other.
const ELEMENTS_MIN: [usize; 3] = [2, 4, 8];
/// Multiple of its bound that such an element has at least.
const WEIGHT: f64 = 16.0;
/// Smallest difference from 1 of a factor that has no name.
const FACTOR_MIN: f64 = 0.01;
/// Relative error that a factor adds: a few operations in f32.
const EDIT_ERROR: f64 = 1.0 / (1 << 20) as f64;
/// Largest distance by which rows are moved.
const ROWS_MAX: isize = 2;
/// Smallest number of rows that must have come from another place, for a distance to be told.
const MOVED_MIN: usize = 3;

/// A gradient that a mistake gives, and its bounds. Where nothing is known of an element, the bound is infinite.
struct Mistaken {
    exact: Array3<f64>,
    bound: Array3<f64>,
}

/// A wrong gradient, and the right ones.
pub(super) struct Wrong<'a> {
    /// The gradients of the subject.
    pub(super) got: &'a RankGradients,
    /// The wrong one.
    pub(super) tensor: TensorName,
    /// The right ones.
    pub(super) right: &'a Answer<Gradients>,
    /// What the backward was given.
    pub(super) saved: &'a Saved,
    /// The model of the bounds.
    pub(super) model: &'a Model,
}

/// Returns in words the mistakes that explain a gradient; `None` where none does, or where the case is too large to
/// ask.
pub(super) fn told(evidence: &Evidence<'_>, wrong: &Wrong<'_>) -> Option<String> {
    if !are_asked(evidence) {
        return None;
    }
    let right = wrong.of(&wrong.right.exact, &wrong.right.bound.as_ref()?.worst)?;
    let got = wrong.of_subject()?;
    let runs = evidence.problem.sequences.iter().map(|both| run_of(both, wrong.tensor.side())).collect();
    let case = Case { evidence, wrong, got, right, runs };
    let (factors, least) = case.factors();
    let named = [factors, case.descales(least)].concat();
    let factor = if named.is_empty() { case.other_factor() } else { None };
    let mut told = [named, case.others(), case.moves(), case.heads(), case.masks()].concat();
    told.extend(factor);
    told.extend(case.remainder());
    told.extend(case.delta());
    in_words(&told)
}

impl<'a> Wrong<'a> {
    /// Returns the wrong tensor of the subject; `None` for one that no hypothesis is about.
    fn of_subject(&self) -> Option<&'a Array3<f32>> {
        match self.tensor {
            TensorName::Dq => Some(&self.got.dq),
            TensorName::Dk => Some(&self.got.dk),
            TensorName::Dv => Some(&self.got.dv),
            _ => None,
        }
    }

    /// Returns the wrong tensor of some gradients, with its bounds.
    fn of(&self, exact: &Gradients, bound: &Gradients) -> Option<Mistaken> {
        let of = |gradients: &Gradients| match self.tensor {
            TensorName::Dq => Some(gradients.dq.clone()),
            TensorName::Dk => Some(gradients.dk.clone()),
            TensorName::Dv => Some(gradients.dv.clone()),
            _ => None,
        };
        Some(Mistaken { exact: of(exact)?, bound: of(bound)? })
    }
}

/// A case with a wrong gradient.
struct Case<'a> {
    evidence: &'a Evidence<'a>,
    wrong: &'a Wrong<'a>,
    got: &'a Array3<f32>,
    right: Mistaken,
    /// The runs of the gradient's rows, by sequence.
    runs: Vec<Run>,
}

impl Case<'_> {
    fn problem(&self) -> &Problem {
        self.evidence.problem
    }

    /// Returns the places of all elements of real rows.
    fn places(&self) -> impl Iterator<Item = [usize; 3]> {
        let (_, heads, lanes) = self.right.exact.dim();
        let of_row =
            move |row: usize| (0..heads).flat_map(move |head| (0..lanes).map(move |lane| [row, head, lane]));
        self.runs.iter().flat_map(Run::real_rows).flat_map(of_row)
    }

    /// Whether a mistake explains the gradient. Bounds so wide that the right one would do as well explain nothing.
    fn explains(&self, mistaken: &Mistaken) -> bool {
        self.unexplained(mistaken).is_some()
    }

    /// Returns the share of the error that a mistake leaves, if it explains the gradient.
    fn unexplained(&self, Mistaken { exact, bound }: &Mistaken) -> Option<f64> {
        if !self.holds(exact, bound) || self.holds(&self.right.exact, bound) {
            return None;
        }
        let left = self.left(exact, bound);
        (left <= left_max(self.problem())).then_some(left)
    }

    /// Returns the share that a mistake leaves of the error of the elements that are wrong, and of which it says anything.
    fn left(&self, exact: &Array3<f64>, bound: &Array3<f64>) -> f64 {
        let mut left = Left::default();
        for at in self.places().filter(|at| bound[*at] < f64::INFINITY) {
            left.add([self.got[at]; 2], [exact[at], self.right.exact[at]], self.right.bound[at]);
        }
        left.share()
    }

    /// Whether each element lies within its bound of a value.
    fn holds(&self, exact: &Array3<f64>, bound: &Array3<f64>) -> bool {
        self.places().all(|at| {
            let error = (f64::from(self.got[at]) - exact[at]).abs();
            bound[at] == f64::INFINITY || error <= bound[at]
        })
    }

    /// Returns the number of elements that differ from 0 far beyond their bounds.
    fn heavy(&self, Mistaken { exact, bound }: &Mistaken) -> usize {
        self.places().filter(|at| exact[*at].abs() > WEIGHT * bound[*at]).count()
    }

    /// Returns the gradient with all elements multiplied.
    fn times(&self, factor: f64) -> Mistaken {
        if let Some(multiple) = self.multiple(factor) {
            return self.multiplied(&multiple);
        }
        let Mistaken { exact, bound } = &self.right;
        let of = |bound: &f64, exact: &f64| factor.abs() * (bound + EDIT_ERROR * exact.abs());
        Mistaken { exact: exact * factor, bound: Zip::from(bound).and(exact).map_collect(of) }
    }

    /// Returns the multiple of the gradient, where it has a given scale.
    fn multiple(&self, factor: f64) -> Option<Multiple> {
        Multiple::of_code(self.problem(), self.evidence.inputs, self.wrong.tensor, factor)
    }

    /// Returns a multiple of a gradient that has a given scale.
    fn multiplied(&self, multiple: &Multiple) -> Mistaken {
        let mut mistaken = Mistaken { exact: self.right.exact.clone(), bound: self.right.bound.clone() };
        let Mistaken { exact, bound } = &mut mistaken;
        Zip::from(exact).and(bound).for_each(|exact, bound| {
            [*exact, *bound] = multiple.element(*exact, *bound);
        });
        mistaken
    }

    /// Returns the factors that mistakes give and by which all elements are off, and the least share of the error that one of
    /// them leaves where the gradient has a given scale.
    fn factors(&self) -> (Vec<String>, f64) {
        if self.multiple(1.0).is_some() {
            return self.factors_of_codes();
        }
        let heavy = self.heavy(&self.right);
        let named = |(factor, words): (f64, String)| {
            let least = ELEMENTS_MIN[usize::from(factor == 0.0 || factor.abs() == 1.0)];
            let asks = heavy >= least && (factor - 1.0).abs() > EDIT_ERROR;
            (asks && self.explains(&self.times(factor))).then_some(words)
        };
        (self.named_factors().into_iter().filter_map(named).collect(), f64::INFINITY)
    }

    /// Returns the same of a gradient that has a given scale. Its few digits hold factors that are near to each other, so that
    /// those which leave hardly more than the best are told.
    fn factors_of_codes(&self) -> (Vec<String>, f64) {
        let Mistaken { exact, bound } = &self.right;
        let multiples = self.named_factors().into_iter();
        let named = multiples.filter_map(|(factor, words)| Some((self.multiple(factor)?, words)));
        let given = given::mistakes(self.problem(), self.evidence.inputs, self.wrong.tensor);
        let explaining: Vec<(f64, String)> = named
            .chain(given)
            .filter_map(|(multiple, words)| {
                let asks = self.places().any(|at| multiple.is_told_by(exact[at], bound[at]));
                Some((asks.then(|| self.unexplained(&self.multiplied(&multiple)))??, words))
            })
            .collect();
        let least = explaining.iter().map(|(left, _)| *left).fold(f64::INFINITY, f64::min);
        let told = explaining.into_iter().filter(|(left, _)| is_near(*left, least)).map(|(_, words)| words);
        (told.collect(), least)
    }

    /// Returns any other factor by which all elements are off.
    fn other_factor(&self) -> Option<String> {
        let (tensor, factor) = (self.wrong.tensor, self.fitted());
        let is_other = factor.is_finite() && (factor - 1.0).abs() > FACTOR_MIN && factor.abs() > FACTOR_MIN;
        let asks = is_other && self.heavy(&self.right) >= ELEMENTS_MIN[2];
        let words = || format!("{tensor} was about {factor:.2} times what it should be everywhere");
        (asks && self.explains(&self.times(factor))).then(words)
    }

    /// Returns the mistakes with descales and with the format of codes that leave hardly more of the error than the least
    /// share. dv has no part of v.
    fn descales(&self, least: f64) -> Vec<String> {
        let told = descales::told(self.problem(), self.evidence.inputs, |mistake| {
            let is_of_v = mistake.tensors == [TensorName::V];
            if mistake.of_v.is_some() || is_of_v && self.wrong.tensor == TensorName::Dv {
                return false;
            }
            let of_backward = self.of_backward(&mistake.problem, &mistake.inputs, self.wrong.saved);
            let left = of_backward.and_then(|descaled| self.unexplained(&descaled));
            left.is_some_and(|left| is_near(left, least))
        });
        told.into_iter().map(|words| format!("in the backward {words}")).collect()
    }

    /// Returns factors that mistakes give, with the words for each.
    fn named_factors(&self) -> Vec<(f64, String)> {
        let (tensor, scale) = (self.wrong.tensor, f64::from(self.problem().softmax.scale));
        let times = |factor: f64| format!("(× {} everywhere)", short(factor));
        let mut named = vec![
            (0.0, format!("{tensor} was 0 everywhere")),
            (-1.0, format!("{tensor} had the other sign everywhere")),
        ];
        if tensor != TensorName::Dv && scale.is_normal() {
            let of_two = 1.0 / LN_2;
            named.extend([
                (1.0 / scale, format!("{tensor} lacked the softmax scale {}", times(1.0 / scale))),
                (scale, format!("{tensor} had the softmax scale twice {}", times(scale))),
                (of_two, format!("{tensor} had the scale of powers of 2 in place of e {}", times(of_two))),
                (LN_2, format!("{tensor} was converted to powers of e twice {}", times(LN_2))),
            ]);
        }
        let (group, ranks) = (self.problem().group(), self.problem().parallel.size());
        let mut mean = |of: &str, count: usize| {
            let factor = 1.0 / count as f64;
            named.push((
                factor,
                format!("the mean of {of} stood in {tensor}, not their sum {}", times(factor)),
            ));
        };
        if tensor != TensorName::Dq {
            match group == ranks {
                true => mean("a group's query heads, or of all ranks' parts,", group),
                false => {
                    mean("a group's query heads", group);
                    mean("all ranks' parts", ranks);
                }
            }
        }
        named
    }

    /// Returns the factor that fits all real elements best.
    fn fitted(&self) -> f64 {
        let (mut along, mut length) = (0.0, 0.0);
        for at in self.places() {
            along += f64::from(self.got[at]) * self.right.exact[at];
            length += self.right.exact[at] * self.right.exact[at];
        }
        along / length
    }

    /// Returns the other gradients that stand in the place of this one.
    fn others(&self) -> Vec<String> {
        let (tensor, right) = (self.wrong.tensor, self.wrong.right);
        let stands = |other: &TensorName| {
            let wrong = Wrong { tensor: *other, ..*self.wrong };
            let other = right.bound.as_ref().and_then(|bound| wrong.of(&right.exact, &bound.worst));
            other.is_some_and(|other| {
                let fits = other.exact.dim() == self.right.exact.dim();
                fits && self.heavy(&other) >= ELEMENTS_MIN[1] && self.explains(&other)
            })
        };
        let others =
            [TensorName::Dq, TensorName::Dk, TensorName::Dv].into_iter().filter(|other| *other != tensor);
        others.filter(stands).map(|other| format!("{other} stood in {tensor}")).collect()
    }

    /// Returns the places at which rows lie in place of their own.
    fn moves(&self) -> Vec<String> {
        let tensor = self.wrong.tensor;
        let begin = |end: &mut usize, run: &Run| {
            *end += run.len;
            Some(*end - run.len)
        };
        let real: Vec<usize> = self.runs.iter().scan(0, begin).collect();
        let at_real = |index: usize, _: Run, i: usize| Some(real[index] + i);
        let mut told = Vec::new();
        if self.explains(&self.moved(at_real)) {
            told.push(format!("{tensor} was written at the real offsets, not at the padded ones"));
        }
        for by in (-ROWS_MAX..=ROWS_MAX).filter(|by| *by != 0) {
            let shifted = |_: usize, run: Run, i: usize| {
                let to = i.checked_add_signed(by).filter(|to| *to < run.len)?;
                Some(run.row(to))
            };
            let known = |run: &Run| run.len.saturating_sub(by.unsigned_abs());
            let moves = self.runs.iter().map(known).sum::<usize>() >= MOVED_MIN;
            if moves && self.explains(&self.moved(shifted)) {
                let side = if by < 0 { "early" } else { "late" };
                let rows = if by.abs() == 1 { "row" } else { "rows" };
                told.push(format!("each row of {tensor} lay {} {rows} too {side}", by.abs()));
            }
        }
        told
    }

    /// Returns the gradient with every real row in another place; of rows that none comes to, nothing is known.
    fn moved(&self, place: impl Fn(usize, Run, usize) -> Option<usize>) -> Mistaken {
        let Mistaken { exact, bound } = &self.right;
        let unknown = Array3::from_elem(bound.dim(), f64::INFINITY);
        let mut moved = Mistaken { exact: Array3::zeros(exact.dim()), bound: unknown };
        for (index, run) in self.runs.iter().copied().enumerate() {
            for i in 0..run.len {
                let Some(to) = place(index, run, i).filter(|to| *to < exact.dim().0) else { continue };
                moved.exact.slice_mut(s![to, .., ..]).assign(&exact.slice(s![run.row(i), .., ..]));
                moved.bound.slice_mut(s![to, .., ..]).assign(&bound.slice(s![run.row(i), .., ..]));
            }
        }
        moved
    }

    /// Returns the gradient of an edited backward.
    fn of_backward(&self, problem: &Problem, inputs: &Inputs, saved: &Saved) -> Option<Mistaken> {
        self.bounded(problem, inputs, saved, self.wrong.model)
    }

    /// Returns the gradient of an edited backward, with the bounds of this model.
    fn bounded(&self, problem: &Problem, inputs: &Inputs, saved: &Saved, model: &Model) -> Option<Mistaken> {
        let Answer { exact, bound } =
            self.evidence.oracle(|| blocked::backward(problem, inputs, saved, Some(model)));
        self.wrong.of(&exact, &bound?.worst)
    }

    /// Returns the query heads of a group that counted alone.
    fn heads(&self) -> Vec<String> {
        let (problem, tensor) = (self.problem(), self.wrong.tensor);
        if problem.group() == 1 || tensor == TensorName::Dq {
            return Vec::new();
        }
        let alone = |(place, _): &(usize, &str)| {
            let mut inputs = self.evidence.inputs.clone();
            for head in (0..problem.heads.q).filter(|head| head % problem.group() != *place) {
                inputs.dout.slice_mut(s![.., head, ..]).fill(0.0);
            }
            self.of_backward(problem, &inputs, self.wrong.saved).is_some_and(|alone| self.explains(&alone))
        };
        let words = |(_, which)| format!("the {which} query head of each group counted alone in {tensor}");
        [(0, "first"), (problem.group() - 1, "last")].into_iter().filter(alone).map(words).collect()
    }

    /// Returns whether query heads read KV heads by the remainder of their numbers, not by groups.
    fn remainder(&self) -> Option<String> {
        let (problem, inputs, saved) = (self.problem(), self.evidence.inputs, self.wrong.saved);
        let kv_heads = problem.heads.kv;
        let is_scaled =
            [TensorName::Q, TensorName::Dout].iter().any(|tensor| inputs.scales.of(*tensor).is_some());
        if problem.group() == 1 || kv_heads == 1 || is_scaled {
            return None;
        }
        // The heads that read each KV head one after the other, as groups have them.
        let order: Vec<usize> =
            (0..kv_heads).flat_map(|kv| (kv..problem.heads.q).step_by(kv_heads)).collect();
        let of_rows = |array: &Array3<f32>| array.select(Axis(1), &order);
        let sink =
            if inputs.sink.is_empty() { inputs.sink.clone() } else { inputs.sink.select(Axis(0), &order) };
        let regrouped = Inputs { q: of_rows(&inputs.q), dout: of_rows(&inputs.dout), sink, ..inputs.clone() };
        let saved = Saved { out: saved.out.select(Axis(1), &order), lse: saved.lse.select(Axis(0), &order) };
        let mut mistaken = self.of_backward(problem, &regrouped, &saved)?;
        if self.wrong.tensor == TensorName::Dq {
            let mut place = vec![0; order.len()];
            order.iter().enumerate().for_each(|(at, head)| place[*head] = at);
            let Mistaken { exact, bound } = mistaken;
            mistaken =
                Mistaken { exact: exact.select(Axis(1), &place), bound: bound.select(Axis(1), &place) };
        }
        let words = || format!("in the backward query head h read KV head h mod {kv_heads}");
        self.explains(&mistaken).then(words)
    }

    /// Returns the masks that the backward had in place of its own.
    fn masks(&self) -> Vec<String> {
        let explains = |(_, edit): &&MaskMistake| {
            let mut fields = ProblemFields::from(self.problem().clone());
            fields.mask = edit(fields.mask);
            let is_other = fields.mask != self.problem().mask;
            let of = |problem: Problem| self.of_backward(&problem, self.evidence.inputs, self.wrong.saved);
            is_other && Problem::new(fields).ok().and_then(of).is_some_and(|masked| self.explains(&masked))
        };
        let words = |(words, _): &MaskMistake| format!("in the backward {words}");
        MASK_MISTAKES.iter().filter(explains).map(words).collect()
    }

    /// Returns whether the rows' products of dout and out were left out, or made of something else.
    fn delta(&self) -> Option<String> {
        if self.wrong.tensor == TensorName::Dv {
            return None;
        }
        let Saved { out, lse } = self.wrong.saved;
        // Bounds of any other source of D would hold the right one.
        let arithmetic = self.evidence.backend.declaration().arithmetic;
        let arithmetic = Arithmetic { delta: Delta::StoredOut, ..arithmetic };
        let model = Model::new(self.problem(), arithmetic, self.evidence.partition());
        let of_times = |factor: f64| {
            let saved = Saved { out: out * factor, lse: lse.clone() };
            let other = self.bounded(self.problem(), self.evidence.inputs, &saved, &model);
            other.is_some_and(|other| self.explains(&other))
        };
        if of_times(0.0) {
            return Some("rowsum(dout ∘ out) was left out of dS".to_owned());
        }
        let descale = f64::from(self.evidence.inputs.scales.own.of(Quantity::Out));
        let words = || "rowsum(dout ∘ out) was made of the codes of out, without their descale".to_owned();
        (descale != 1.0 && of_times(1.0 / descale)).then(words)
    }
}
