//! Scales as inputs of a problem: the descales of its input tensors.
//!
//! A kernel in FP8 is given codes, and for each group of elements the factor that turns a code into a value. Here they
//! are inputs like any other, exact numbers of f32: `value = code · descale`, exact in f64. How a quantiser finds them
//! is a problem of its own ([`crate::quantise`]).

use ndarray::Array3;
use serde::{Deserialize, Serialize};

use crate::groups::Groups;
use crate::{Problem, Scaling, ShapeError, TensorName};

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

/// The descales of a problem's inputs; absent for a tensor whose element has no scaling.
#[derive(Clone, Debug, Default, PartialEq)]
#[allow(missing_docs)]
pub struct Scales {
    pub q: Option<TensorScales>,
    pub k: Option<TensorScales>,
    pub v: Option<TensorScales>,
    pub dout: Option<TensorScales>,
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
        Scales { q, k, v, dout }
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
}

impl ScaleValues {
    /// Every way.
    pub const ALL: [ScaleValues; 3] =
        [ScaleValues::PowersOfTwo, ScaleValues::ThreeTimesPowers, ScaleValues::Any];

    /// Whether it is the default.
    pub fn is_default(&self) -> bool {
        *self == ScaleValues::default()
    }
}
