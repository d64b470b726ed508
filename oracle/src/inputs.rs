//! The input tensors of a problem, and its results.
//!
//! Shapes: `[rows, heads, dim]` for q, k, v, out and their gradients; `[heads, rows]` for the LSE; `[heads]` for the
//! sink and max_logit. Rows are those of the problem's layout, padding and slack included; only real rows are read.

use std::borrow::Cow;

use ndarray::{Array1, Array2, Array3, ArrayView3, Axis, s};

use crate::sharding::run_of;
use crate::{Pass, Problem, Scales, TensorName};

/// The inputs of one problem, already rounded to their formats (every narrow format is exact in f32). Elements of a
/// scaled tensor are the numbers that its codes stand for; their values are these times their scales.
#[derive(Clone, Debug, PartialEq)]
pub struct Inputs {
    /// Queries, `[q rows, q heads, qk dim]`.
    pub q: Array3<f32>,
    /// Keys, `[kv rows, kv heads, qk dim]`.
    pub k: Array3<f32>,
    /// Values, `[kv rows, kv heads, v dim]`.
    pub v: Array3<f32>,
    /// Gradient of the output, `[q rows, q heads, v dim]`; no rows when the pass is forward only.
    pub dout: Array3<f32>,
    /// The learnable sink, `[q heads]`; empty otherwise.
    pub sink: Array1<f32>,
    /// The descales of scaled tensors.
    pub scales: Scales,
}

/// A tensor whose shape is not the problem's.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{tensor} has shape {got:?}, the problem says {expected:?}")]
pub struct ShapeError {
    /// The tensor's name.
    pub tensor: &'static str,
    /// The shape that the tensor has.
    pub got: Vec<usize>,
    /// The shape that the problem asks for.
    pub expected: Vec<usize>,
}

impl Inputs {
    /// Checks every shape against the problem.
    pub fn check(&self, problem: &Problem) -> Result<(), ShapeError> {
        let dout = match problem.pass {
            Pass::Forward => [0, problem.heads.q, problem.dims.v],
            Pass::Backward => problem.out_shape(),
        };
        let expected = [
            ("q", self.q.shape(), problem.q_shape()),
            ("k", self.k.shape(), problem.k_shape()),
            ("v", self.v.shape(), problem.v_shape()),
            ("dout", self.dout.shape(), dout),
        ];
        for (tensor, got, expected) in expected {
            if got != expected {
                return Err(ShapeError { tensor, got: got.to_vec(), expected: expected.to_vec() });
            }
        }
        let sinks = problem.learnable_sinks();
        if self.sink.len() != sinks {
            return Err(ShapeError { tensor: "sink", got: vec![self.sink.len()], expected: vec![sinks] });
        }
        self.scales.check(problem)
    }

    /// Returns the inputs as values without scales, each rounded to f32: products of codes and descales in the rows
    /// that sequences own. They bound magnitudes; the oracle itself takes the products exactly.
    pub fn values(&self, problem: &Problem) -> Cow<'_, Inputs> {
        if self.scales == Scales::default() {
            return Cow::Borrowed(self);
        }
        let mut values = Inputs { scales: Scales::default(), ..self.clone() };
        let Inputs { q, k, v, dout, .. } = &mut values;
        for (tensor, values) in Scales::TENSORS.into_iter().zip([q, k, v, dout]) {
            // A forward has no rows of dout.
            let Some(scales) = self.scales.of(tensor).filter(|_| !values.is_empty()) else { continue };
            for (index, sequence) in problem.sequences.iter().enumerate() {
                for (position, row) in run_of(sequence, tensor.side()).real_rows().enumerate() {
                    for ((head, lane), value) in values.index_axis_mut(Axis(0), row).indexed_iter_mut() {
                        *value = (f64::from(*value) * scales.of(index, position, head, lane)) as f32;
                    }
                }
            }
        }
        Cow::Owned(values)
    }
}

/// Inputs that lie in other tensors, such as some of their rows.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct InputViews<'a> {
    pub q: ArrayView3<'a, f32>,
    pub k: ArrayView3<'a, f32>,
    pub v: ArrayView3<'a, f32>,
    pub dout: ArrayView3<'a, f32>,
    pub sink: &'a Array1<f32>,
    pub scales: &'a Scales,
}

impl<'a> From<&'a Inputs> for InputViews<'a> {
    fn from(Inputs { q, k, v, dout, sink, scales }: &'a Inputs) -> InputViews<'a> {
        InputViews { q: q.view(), k: k.view(), v: v.view(), dout: dout.view(), sink, scales }
    }
}

impl InputViews<'_> {
    /// Asserts the shapes of the tensors that a pass reads. Without the check, a tensor with more rows or heads would
    /// be read in part, without an error.
    pub(crate) fn assert_shapes(&self, problem: &Problem, pass: Pass) {
        assert_eq!(self.q.shape(), problem.q_shape(), "shape of q");
        assert_eq!(self.k.shape(), problem.k_shape(), "shape of k");
        assert_eq!(self.v.shape(), problem.v_shape(), "shape of v");
        assert_eq!(self.sink.len(), problem.learnable_sinks(), "length of the sink");
        if pass == Pass::Backward {
            assert_eq!(self.dout.shape(), problem.out_shape(), "shape of dout");
        }
        assert_eq!(self.scales.check(problem), Ok(()), "scales of scaled inputs");
    }

    /// Returns the tensor of this name, which is that of an input with rows.
    pub fn of(&self, tensor: TensorName) -> ArrayView3<'_, f32> {
        match tensor {
            TensorName::K => self.k,
            TensorName::V => self.v,
            TensorName::Dout => self.dout,
            _ => self.q,
        }
    }

    /// Returns the values of one row and head: the elements times their scales. The row holds this position of this
    /// sequence.
    pub(crate) fn values(
        &self,
        tensor: TensorName,
        [sequence, position, row, head]: [usize; 4],
    ) -> impl Iterator<Item = f64> {
        let scales = self.scales.of(tensor);
        let scale = move |lane| scales.map_or(1.0, |scales| scales.of(sequence, position, head, lane));
        let lanes = self.of(tensor).slice_move(s![row, head, ..]);
        lanes.into_iter().enumerate().map(move |(lane, value)| f64::from(*value) * scale(lane))
    }
}

/// The results of the forward pass. Rows that are not real hold 0 (out) and −∞ (lse).
#[derive(Clone, Debug, PartialEq)]
pub struct ForwardResults {
    /// The output, `[q rows, q heads, v dim]`.
    pub out: Array3<f64>,
    /// The natural-log log-sum-exp, the sink included, `[q heads, q rows]`; −∞ for a row that sees no key and no sink.
    pub lse: Array2<f64>,
    /// The largest logit over visible pairs before the sink, `[q heads]`; −∞ where there is none.
    pub max_logit: Array1<f64>,
}

/// The results of the backward pass. Rows that are not real hold 0.
#[derive(Clone, Debug, PartialEq)]
pub struct Gradients {
    /// The gradient of q, `[q rows, q heads, qk dim]`.
    pub dq: Array3<f64>,
    /// The gradient of k, `[kv rows, kv heads, qk dim]`, summed over the group's query heads.
    pub dk: Array3<f64>,
    /// The gradient of v, `[kv rows, kv heads, v dim]`, summed over the group's query heads.
    pub dv: Array3<f64>,
    /// The gradient of the learnable sink, `[q heads]`; empty otherwise.
    pub dsink: Array1<f64>,
}

/// The forward's results that a backward pass reads: the exact ones, or a subject's.
#[derive(Clone, Debug, PartialEq)]
pub struct Saved {
    /// The output, `[q rows, q heads, v dim]`.
    pub out: Array3<f64>,
    /// The LSE, `[q heads, q rows]`.
    pub lse: Array2<f64>,
}

/// A saved out and lse that lie in other tensors, such as some of their rows.
#[derive(Clone, Copy, Debug)]
pub struct SavedViews<'a> {
    /// The output.
    pub out: SavedOut<'a>,
    /// The LSE.
    pub lse: &'a Array2<f64>,
}

impl SavedViews<'_> {
    /// Returns the same views for a shorter time.
    pub fn view(&self) -> SavedViews<'_> {
        let out = match &self.out {
            SavedOut::Exact(out) => SavedOut::Exact(out.view()),
            SavedOut::Stored(out) => SavedOut::Stored(out.view()),
        };
        SavedViews { out, lse: self.lse }
    }
}

/// A saved output: exact, or as a subject stored it. The stored one of a long case is not widened as a whole.
#[derive(Clone, Copy, Debug)]
pub enum SavedOut<'a> {
    /// In f64.
    Exact(ArrayView3<'a, f64>),
    /// As it was stored.
    Stored(ArrayView3<'a, f32>),
}

/// The most by which a subject's own values may differ from the saved ones, `[q heads, q rows]` each. An absent one is
/// 0 everywhere.
#[derive(Clone, Copy, Debug, Default)]
pub struct SavedErrors<'a> {
    /// The error of the LSE, where the saved one is not the subject's own.
    pub lse: Option<&'a Array2<f64>>,
    /// The distance between the subject's D and `Σ dout·out` of the saved out. It counts where the keys of a row are
    /// not all there, so that `Σ P·dP` is not known.
    pub delta: Option<&'a Array2<f64>>,
    /// The largest magnitude of dS in any tile that the row has a part of, errors included, or more. It counts where
    /// the pairs of a tile are not all there, and a model needs it
    /// ([`Model::scales_tiles`](crate::envelope::Model::scales_tiles)).
    pub ds_most: Option<&'a Array2<f64>>,
}

impl SavedErrors<'_> {
    /// Asserts that all have the problem's shape.
    pub(crate) fn assert_shapes(&self, problem: &Problem) {
        for (errors, name) in [(self.lse, "the lse"), (self.delta, "D"), (self.ds_most, "dS")] {
            let shape = errors.map_or(problem.lse_shape(), |errors| errors.dim().into());
            assert_eq!(shape, problem.lse_shape(), "shape of the errors of {name}");
        }
    }
}

impl SavedOut<'_> {
    /// Returns the lanes of a row and head.
    pub fn lanes(&self, row: usize, head: usize) -> Array1<f64> {
        match self {
            SavedOut::Exact(out) => out.slice(s![row, head, ..]).to_owned(),
            SavedOut::Stored(out) => out.slice(s![row, head, ..]).mapv(f64::from),
        }
    }
}

impl<'a> From<&'a Saved> for SavedViews<'a> {
    fn from(Saved { out, lse }: &'a Saved) -> SavedViews<'a> {
        SavedViews { out: SavedOut::Exact(out.view()), lse }
    }
}

impl SavedViews<'_> {
    /// Asserts that both tensors have the problem's shapes.
    pub(crate) fn assert_shapes(&self, problem: &Problem) {
        let out = match self.out {
            SavedOut::Exact(out) => out.dim(),
            SavedOut::Stored(out) => out.dim(),
        };
        assert_eq!(<[usize; 3]>::from(out), problem.out_shape(), "shape of the saved out");
        assert_eq!(self.lse.shape(), problem.lse_shape(), "shape of the saved lse");
    }
}

impl From<&ForwardResults> for Saved {
    fn from(forward: &ForwardResults) -> Saved {
        Saved { out: forward.out.clone(), lse: forward.lse.clone() }
    }
}
