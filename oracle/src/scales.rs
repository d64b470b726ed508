//! Scales as inputs of a problem: the descales of its input tensors, and of what a kernel quantises itself.
//!
//! A kernel in FP8 is given codes, and for each group of elements the factor that turns a code into a value. Here they
//! are inputs like any other, exact numbers of f32: `value = code · descale`, exact in f64. How a quantiser finds them
//! is a problem of its own ([`crate::quantise`]).
//!
//! A kernel may be given descales for weights, logit gradients and results too ([`OwnScales`]). It multiplies by the
//! reciprocal of the descale in f32, rounds to the format with saturation, and what it stores stands for
//! `code · descale`.

use ndarray::Array3;
use serde::{Deserialize, Serialize};

use crate::groups::Groups;
use crate::{Element, Precision, Problem, Scaling, ShapeError, Stored, TensorName};

/// The descales of one tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorScales {
    groups: Groups,
    descale: Array3<f32>,
}

impl TensorScales {
    /// Returns the descales of a tensor of the problem, whose element says which elements share one. `descale` says
    /// the number for each place of the scales' array.
    pub fn new(
        problem: &Problem,
        tensor: TensorName,
        descale: impl FnMut((usize, usize, usize)) -> f32,
    ) -> TensorScales {
        let groups = Groups::new(problem, tensor, problem.precision.of(tensor).scaling);
        let descale = Array3::from_shape_fn(groups.shape(), descale);
        TensorScales { groups, descale }
    }

    /// Returns the scales of the same groups that are all 1.
    pub fn ones(self) -> TensorScales {
        TensorScales { descale: Array3::ones(self.descale.raw_dim()), ..self }
    }

    /// Returns these scales times a factor.
    pub fn times(self, factor: f32) -> TensorScales {
        TensorScales { descale: self.descale * factor, ..self }
    }

    /// Returns the groups.
    pub fn groups(&self) -> &Groups {
        &self.groups
    }

    /// Returns the descales, in the shape of the groups.
    pub fn descale(&self) -> &Array3<f32> {
        &self.descale
    }

    /// Returns the descale of an element. The position counts the rows of its sequence, padding included.
    #[inline]
    pub fn of(&self, sequence: usize, position: usize, head: usize, lane: usize) -> f64 {
        f64::from(self.descale[self.groups.of(sequence, position, head, lane)])
    }
}

/// A quantity that a kernel quantises itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Quantity {
    /// Softmax weights.
    P,
    /// Gradients of the logits.
    Ds,
    /// The output.
    Out,
    /// The gradient of the queries.
    Dq,
    /// The gradient of the keys.
    Dk,
    /// The gradient of the values.
    Dv,
}

impl Quantity {
    /// Every quantity, in the order in which their descales are sent.
    pub const ALL: [Quantity; 6] =
        [Quantity::P, Quantity::Ds, Quantity::Out, Quantity::Dq, Quantity::Dk, Quantity::Dv];

    /// Returns the name in texts.
    pub fn name(self) -> &'static str {
        match self {
            Quantity::P => "p",
            Quantity::Ds => "ds",
            Quantity::Out => "out",
            Quantity::Dq => "dq",
            Quantity::Dk => "dk",
            Quantity::Dv => "dv",
        }
    }

    /// Returns the element of a quantity. The gradients share one.
    pub fn element(self, precision: &Precision) -> Element {
        match self {
            Quantity::P => precision.p,
            Quantity::Ds => precision.ds,
            Quantity::Out => precision.out,
            Quantity::Dq | Quantity::Dk | Quantity::Dv => precision.gradients,
        }
    }

    /// Whether a forward has it.
    pub fn is_forward(self) -> bool {
        matches!(self, Quantity::P | Quantity::Out)
    }

    /// Whether a problem of this precision gives the descale: one number for the tensor. A scaling of any other
    /// granularity is the kernel's own affair.
    pub fn is_given(self, precision: &Precision) -> bool {
        self.element(precision).scaling == Scaling::PerTensor
    }

    /// Returns the quantity of a result; `None` for one in f32.
    pub fn of(result: TensorName) -> Option<Quantity> {
        match result {
            TensorName::Out => Some(Quantity::Out),
            TensorName::Dq => Some(Quantity::Dq),
            TensorName::Dk => Some(Quantity::Dk),
            TensorName::Dv => Some(Quantity::Dv),
            _ => None,
        }
    }
}

/// The descales of what a kernel quantises itself: one number for each quantity, and 1 where none is given.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OwnScales([f32; 6]);

impl Default for OwnScales {
    fn default() -> OwnScales {
        OwnScales([1.0; 6])
    }
}

impl OwnScales {
    /// Returns the descales that `of` says for the quantities that have some.
    pub fn new(precision: &Precision, of: impl Fn(Quantity) -> f32) -> OwnScales {
        OwnScales(Quantity::ALL.map(|quantity| if quantity.is_given(precision) { of(quantity) } else { 1.0 }))
    }

    /// Returns the descale of a quantity.
    pub fn of(&self, quantity: Quantity) -> f32 {
        self.0[quantity as usize]
    }

    /// Returns these descales with another one of a quantity, where a problem of this precision gives it.
    pub fn with(self, precision: &Precision, quantity: Quantity, descale: f32) -> OwnScales {
        OwnScales::new(precision, |other| if other == quantity { descale } else { self.of(other) })
    }

    /// Returns these descales with those of some quantities multiplied, where a problem of this precision gives them.
    pub fn times(self, precision: &Precision, quantities: &[Quantity], factor: f32) -> OwnScales {
        OwnScales::new(precision, |quantity| {
            self.of(quantity) * if quantities.contains(&quantity) { factor } else { 1.0 }
        })
    }
}

/// The descales of a problem's inputs, absent for a tensor whose element has no scaling, and of what a kernel
/// quantises.
#[derive(Clone, Debug, Default, PartialEq)]
#[allow(missing_docs)]
pub struct Scales {
    pub q: Option<TensorScales>,
    pub k: Option<TensorScales>,
    pub v: Option<TensorScales>,
    pub dout: Option<TensorScales>,
    pub own: OwnScales,
}

impl Scales {
    /// The inputs that may have scales.
    pub const TENSORS: [TensorName; 4] = [TensorName::Q, TensorName::K, TensorName::V, TensorName::Dout];

    /// Returns the descales that `of` says for each scaled input, by its name and the place of the scale.
    pub fn new(problem: &Problem, of: impl Fn(TensorName, &Groups, [usize; 3]) -> f32) -> Scales {
        let tensor = |tensor: TensorName| {
            let scaling = problem.precision.of(tensor).scaling;
            let groups = Groups::new(problem, tensor, scaling);
            let all = || {
                TensorScales::new(problem, tensor, |(row, head, lane)| of(tensor, &groups, [row, head, lane]))
            };
            (scaling != Scaling::None).then(all)
        };
        let [q, k, v, dout] = Scales::TENSORS.map(tensor);
        Scales { q, k, v, dout, own: OwnScales::default() }
    }

    /// Returns these descales with others of what a kernel quantises.
    pub fn with_own(self, own: OwnScales) -> Scales {
        Scales { own, ..self }
    }

    /// Returns the numbers in which a result of the problem is stored. They say nothing of the way there.
    pub fn stored(&self, problem: &Problem, result: TensorName) -> Stored {
        let descale = Quantity::of(result).map_or(1.0, |quantity| self.own.of(quantity));
        Stored { format: problem.precision.of(result).format, descale: descale.into(), through: None }
    }

    /// Returns the descales of an input.
    pub fn of(&self, tensor: TensorName) -> Option<&TensorScales> {
        match tensor {
            TensorName::Q => self.q.as_ref(),
            TensorName::K => self.k.as_ref(),
            TensorName::V => self.v.as_ref(),
            TensorName::Dout => self.dout.as_ref(),
            _ => None,
        }
    }

    /// Returns these descales with others of an input.
    pub fn with(self, tensor: TensorName, scales: TensorScales) -> Scales {
        let scales = Some(scales);
        match tensor {
            TensorName::Q => Scales { q: scales, ..self },
            TensorName::K => Scales { k: scales, ..self },
            TensorName::V => Scales { v: scales, ..self },
            TensorName::Dout => Scales { dout: scales, ..self },
            _ => self,
        }
    }

    /// Checks that the scaled inputs of the problem have scales in the problem's groups, and no other input has any.
    pub fn check(&self, problem: &Problem) -> Result<(), ShapeError> {
        for tensor in Scales::TENSORS {
            let scaling = problem.precision.of(tensor).scaling;
            let expected = (scaling != Scaling::None).then(|| Groups::new(problem, tensor, scaling));
            let got = self.of(tensor).map(TensorScales::groups);
            if got != expected.as_ref() {
                let shape =
                    |groups: Option<&Groups>| groups.map_or(Vec::new(), |groups| groups.shape().to_vec());
                let (got, expected) = (shape(got), shape(expected.as_ref()));
                return Err(ShapeError { tensor: "scales", got, expected });
            }
        }
        Ok(())
    }
}

/// The way in which a problem's descales are drawn.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ScaleValues {
    /// Powers of two, which are numbers of E8M0 too. Every exact mode stays exact.
    #[default]
    PowersOfTwo,
    /// Three times a power of two. A missing scale is then never hidden by a power of two elsewhere.
    ThreeTimesPowers,
    /// Any number of f32 in some binades around 1.
    Any,
    /// Those of TransformerEngine's delayed recipe: a scale is the format's largest number over an amax of earlier steps,
    /// so that values may saturate. q, k and v share one, and so do dq, dk and dv. That of weights is for an amax of 1,
    /// or 1 itself, as in a first step.
    Delayed,
}

impl ScaleValues {
    /// Every way.
    pub const ALL: [ScaleValues; 4] =
        [ScaleValues::PowersOfTwo, ScaleValues::ThreeTimesPowers, ScaleValues::Any, ScaleValues::Delayed];

    /// Whether it is the default.
    pub fn is_default(&self) -> bool {
        *self == ScaleValues::default()
    }
}
