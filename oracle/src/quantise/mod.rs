//! Quantising: from the values of input tensors to FP8 codes and their scales, exactly.
//!
//! A [`Quantisation`] is a problem of its own: the tensors of an attention problem, and a recipe. Its answer is known
//! bit for bit. For each group of elements ([`Groups`]):
//!
//! ```text
//! amax  = max |x| over the group's real rows                0 where it has none
//! a     = amax, or the largest or newest of a history       (the recipe)
//! σ, δ  = factors of a                                      (ScaleRule)
//! code  = Q(x · σ)        the product is rounded to f32, then to the format: nearest even, saturating
//! ```
//!
//! A code c stands for the value `c · δ`. Rows that are not real have no part in it: padding, gaps and slack may hold
//! anything, NaN included, and move no scale. Their codes are 0, so that a product with them is finite.
//!
//! Under context parallelism each rank quantises its own rows, and a group's amax is the largest over all ranks of the
//! problem. The definition therefore knows no ranks. Keys and values that travel as codes are decoded with the
//! receiver's own descale, and are right only so.
//!
//! A *delayed* recipe takes no amax of the present values at all ([`Delayed`]). Values may then be past the range, and
//! saturate: that is legal, and the codes still are these and no others.
//!
//! Values of real rows are finite. The definition says nothing of any others, and refuses them.

mod recipe;

use std::ops::Deref;

use ndarray::{Array3, ArrayView3};
use serde::{Deserialize, Serialize};

use crate::groups::Groups;
use crate::sharding::run_of;
use crate::{Element, InputViews, Pass, Problem, Scaling, TensorName};

pub use recipe::{Factors, ScaleRule};

/// The largest margin, and the negative of the smallest.
pub const MARGIN_MAX: i32 = 16;
/// The longest history.
pub const HISTORY_MAX: usize = 1 << 10;

/// The fields of a [`Quantisation`], free to edit. [`Quantisation::new`] checks them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct QuantisationFields {
    /// The problem whose inputs are quantised. Its sequences say which rows are real, its ranks who holds them, and its
    /// precision in which format the values are.
    pub problem: Problem,
    /// The tensors, of q, k, v and dout. With one scale for a tensor they share it, as q, k and v do in one slot of
    /// TransformerEngine's recipe. With any other scaling each has scales of its own.
    pub tensors: Vec<TensorName>,
    /// The format of codes, and the elements that share a scale.
    pub element: Element,
    /// The rule from an amax to factors.
    pub scale: ScaleRule,
    /// The number of powers of two that are left free above the largest value; negative to use more than the range.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub margin: i32,
    /// The history that factors are taken from; absent where they are taken from the present values.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub delayed: Option<Delayed>,
}

fn is_zero(margin: &i32) -> bool {
    *margin == 0
}

/// Factors from earlier steps, as in
/// [TransformerEngine's delayed scaling](https://github.com/NVIDIA/TransformerEngine/blob/main/transformer_engine/common/recipe/delayed_scaling.cu).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Delayed {
    /// The amax of earlier steps, the newest first.
    pub history: Vec<f32>,
    /// Which of them count.
    pub takes: Takes,
    /// The scale of the step before, which stays where the history holds no value but 0.
    pub previous: f32,
}

/// The part of a history that a delayed recipe takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Takes {
    /// The largest of all.
    Max,
    /// The newest.
    MostRecent,
}

impl Delayed {
    /// Returns the amax that the factors are made of.
    fn amax(&self) -> f32 {
        match self.takes {
            Takes::Max => self.history.iter().copied().fold(0.0, f32::max),
            Takes::MostRecent => self.history.first().copied().unwrap_or(0.0),
        }
    }

    /// Returns the history after a step with this amax. The oldest entry is dropped.
    fn after(&self, amax: f32) -> Vec<f32> {
        let kept = self.history.len().saturating_sub(1);
        std::iter::once(amax).chain(self.history[..kept].iter().copied()).collect()
    }
}

/// The reason why fields make no [`Quantisation`].
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)]
pub enum QuantisationError {
    #[error(
        "element {0} has no scaling or more than 8 bits; use e4m3 or e5m2 with a scaling, as in e4m3/tensor"
    )]
    Element(Element),
    #[error("tensors has {0} {1} times; name each of q, k, v and dout at most once, and one at least")]
    Tensors(TensorName, usize),
    #[error("tensors is empty; name one of q, k, v and dout at least")]
    NoTensors,
    #[error("the problem has shared keys, steps or pages; give each sequence rows of its own, in one call")]
    Rows,
    #[error("tensors has dout, but the problem has no backward; set pass to backward")]
    NoDout,
    #[error("margin is {0}; use −16 to 16")]
    Margin(i32),
    #[error(
        "a history goes with scaling tensor and scale f32 or power-of-two; element is {0}, and scale {1}"
    )]
    DelayedScaling(Element, ScaleRule),
    #[error("delayed.history has {0} entries; use 1 to 1024")]
    History(usize),
    #[error("delayed.{0} holds {1:e}; amax are finite and not negative, and a scale is more than 0")]
    DelayedValue(&'static str, f32),
}

/// A valid quantisation. To change one, edit a copy of its fields.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "QuantisationFields", into = "QuantisationFields")]
pub struct Quantisation(QuantisationFields);

impl Deref for Quantisation {
    type Target = QuantisationFields;

    fn deref(&self) -> &QuantisationFields {
        &self.0
    }
}

impl From<Quantisation> for QuantisationFields {
    fn from(Quantisation(fields): Quantisation) -> QuantisationFields {
        fields
    }
}

impl TryFrom<QuantisationFields> for Quantisation {
    type Error = QuantisationError;

    fn try_from(fields: QuantisationFields) -> Result<Quantisation, QuantisationError> {
        Quantisation::new(fields)
    }
}

impl Quantisation {
    /// Checks the fields. The error names the first fault that is found.
    pub fn new(fields: QuantisationFields) -> Result<Quantisation, QuantisationError> {
        let QuantisationFields { problem, tensors, element, scale, margin, delayed } = &fields;
        if element.format.bits() > 8 || element.scaling == Scaling::None {
            return Err(QuantisationError::Element(*element));
        }
        if tensors.is_empty() {
            return Err(QuantisationError::NoTensors);
        }
        if !problem.sharing.is_empty() || !problem.steps.is_empty() || problem.pages.is_some() {
            return Err(QuantisationError::Rows);
        }
        for tensor in tensors {
            let times = tensors.iter().filter(|other| *other == tensor).count();
            let inputs = [TensorName::Q, TensorName::K, TensorName::V, TensorName::Dout];
            if times > 1 || !inputs.contains(tensor) {
                return Err(QuantisationError::Tensors(*tensor, times));
            }
        }
        if tensors.contains(&TensorName::Dout) && problem.pass == Pass::Forward {
            return Err(QuantisationError::NoDout);
        }
        if margin.abs() > MARGIN_MAX {
            return Err(QuantisationError::Margin(*margin));
        }
        match delayed {
            Some(_) if element.scaling != Scaling::PerTensor || scale.is_e8m0() => {
                return Err(QuantisationError::DelayedScaling(*element, *scale));
            }
            Some(delayed) => delayed.check()?,
            None => {}
        }
        Ok(Quantisation(fields))
    }

    /// Returns the groups of one of the tensors.
    pub fn groups(&self, tensor: TensorName) -> Groups {
        Groups::new(&self.problem, tensor, self.element.scaling)
    }

    /// Whether the codes of a sequence's first tokens stay as they are when later tokens change: no scale is taken of
    /// present values in several rows. Attention on such codes can be causal to the bit.
    pub fn keeps_prefixes(&self) -> bool {
        self.element.scaling.has_single_rows() || self.delayed.is_some()
    }

    /// Whether the tensors share their scale.
    pub fn shares_scale(&self) -> bool {
        self.element.scaling == Scaling::PerTensor
    }
}

impl Delayed {
    fn check(&self) -> Result<(), QuantisationError> {
        if !(1..=HISTORY_MAX).contains(&self.history.len()) {
            return Err(QuantisationError::History(self.history.len()));
        }
        let amax = |amax: &&f32| !(0.0..=f32::MAX).contains(*amax);
        if let Some(wrong) = self.history.iter().find(amax) {
            return Err(QuantisationError::DelayedValue("history", *wrong));
        }
        if !(f32::MIN_POSITIVE..=f32::MAX).contains(&self.previous) {
            return Err(QuantisationError::DelayedValue("previous", self.previous));
        }
        Ok(())
    }
}

/// The answer for one tensor. Amax, scales and descales have the shape of its [`Groups`].
#[derive(Clone, Debug, PartialEq)]
pub struct Quantised {
    /// The codes, of the tensor's shape.
    pub codes: Array3<u8>,
    /// The largest magnitude of each group.
    pub amax: Array3<f32>,
    /// σ of each group.
    pub scale: Array3<f32>,
    /// δ of each group.
    pub descale: Array3<f32>,
}

/// The whole answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    /// The answer for each tensor, in the order of the quantisation.
    pub tensors: Vec<Quantised>,
    /// The history for the next step, of a delayed recipe.
    pub history: Option<Vec<f32>>,
}

/// A real value that is not finite.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[error("{tensor} holds {value} in row {row}, head {head}, lane {lane}; values of real rows must be finite")]
pub struct NotFinite {
    /// The tensor.
    pub tensor: TensorName,
    /// The row.
    pub row: usize,
    /// The head.
    pub head: usize,
    /// The lane.
    pub lane: usize,
    /// The value.
    pub value: f32,
}

/// Returns the answer for the inputs of the problem. Their shapes must be the problem's ([`Inputs::check`](crate::Inputs::check)).
pub fn quantise<'a>(asked: &Quantisation, inputs: impl Into<InputViews<'a>>) -> Result<Answer, NotFinite> {
    let inputs = &inputs.into();
    let mut largest: Vec<Array3<f32>> = Vec::new();
    for &tensor in &asked.tensors {
        largest.push(amax(asked, tensor, inputs.of(tensor))?);
    }
    if asked.shares_scale() {
        let shared = largest.iter().flatten().copied().fold(0.0, f32::max);
        largest.iter_mut().for_each(|amax| amax.fill(shared));
    }
    let history = asked.delayed.as_ref().map(|delayed| delayed.after(largest[0][[0, 0, 0]]));
    let of_tensor = |(&tensor, amax)| quantised(asked, tensor, inputs.of(tensor), amax);
    Ok(Answer { tensors: asked.tensors.iter().zip(largest).map(of_tensor).collect(), history })
}

/// Visits the elements of real rows, sequence after sequence: the place of each in its tensor, and that of its group.
fn for_each_real(asked: &Quantisation, tensor: TensorName, mut visit: impl FnMut([usize; 3], [usize; 3])) {
    let (groups, [_, heads, lanes]) = (asked.groups(tensor), asked.problem.shape_of(tensor));
    for (sequence, both) in asked.problem.sequences.iter().enumerate() {
        for (position, row) in run_of(both, tensor.side()).real_rows().enumerate() {
            for (head, lane) in (0..heads).flat_map(|head| (0..lanes).map(move |lane| (head, lane))) {
                visit([row, head, lane], groups.of(sequence, position, head, lane));
            }
        }
    }
}

/// Returns the largest magnitude of each group.
fn amax(
    asked: &Quantisation,
    tensor: TensorName,
    values: ArrayView3<'_, f32>,
) -> Result<Array3<f32>, NotFinite> {
    let (mut amax, mut wrong) = (Array3::zeros(asked.groups(tensor).shape()), None);
    for_each_real(asked, tensor, |at, group| {
        let value = values[at];
        if !value.is_finite() && wrong.is_none() {
            let [row, head, lane] = at;
            wrong = Some(NotFinite { tensor, row, head, lane, value });
        }
        amax[group] = value.abs().max(amax[group]);
    });
    wrong.map_or(Ok(amax), Err)
}

/// Returns the answer for a tensor whose groups have these largest magnitudes.
fn quantised(
    asked: &Quantisation,
    tensor: TensorName,
    values: ArrayView3<'_, f32>,
    amax: Array3<f32>,
) -> Quantised {
    let format = asked.element.format;
    let factors = amax.mapv(|amax| {
        let delayed = asked.delayed.as_ref();
        let otherwise = delayed.map_or(Factors::ONE, |delayed| Factors::of_scale(delayed.previous));
        let taken = delayed.map_or(amax, Delayed::amax);
        asked.scale.factors(format, asked.margin, taken, otherwise)
    });
    let mut codes = Array3::zeros(values.raw_dim());
    for_each_real(asked, tensor, |at, group| {
        codes[at] = format.encode(f64::from(values[at] * factors[group].scale)) as u8;
    });
    Quantised { codes, amax, scale: factors.mapv(|of| of.scale), descale: factors.mapv(|of| of.descale) }
}
