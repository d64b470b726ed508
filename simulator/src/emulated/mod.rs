//! A FlashAttention-style tiled attention kernel on the CPU, with the roundings of a real kernel.
//!
//! Inputs are in a narrow format, and products and sums are in f32 one after the other. The softmax is online over
//! tiles of keys, and P is rounded before the product with the values. The backward recomputes P from the saved LSE,
//! takes `D = rowsum(dout · out)` from the stored out, and rounds dS. A kernel with other [`Roundings`] normalises P
//! before it rounds it, makes D as `Σ P·dP`, or stores gradients of single heads. Codes in FP8 have [`Descales`], and dS
//! in FP8 may have a power of two for each tile, which is undone when the tile's products are added. What the kernel
//! quantises may have a [`Factor`] that is given. Rows are addressed only through runs (offset, step, real length,
//! span). Padding rows are never read; they are zeroed or left, as the call says. Production kernels are compared with
//! this CPU twin. The twin is itself compared with the oracle and shares no code with it.
//!
//! A [`TiledKernel`] is a loop over tiles. Its [`Stages`] say what is done, and its [`UnitArithmetic`] says on which
//! units.

use std::fmt::Debug;
use std::marker::PhantomData;
use std::num::NonZeroUsize;
use std::ops::Range;

use seamproof_oracle::amax::Amaxes;
use seamproof_oracle::{Format, Intervals, Pass, Quantity, Sink, Softmax, TensorName};

use crate::schedule::Descales;
use crate::{AttentionCall, GuardedTensor, Real, RowPolicy, Segment};

mod amax;
mod arithmetic;
mod backward;
mod columns;
mod forward;
pub mod hopper;
mod right;
mod roundings;
mod row;
mod stages;
mod tensor_core;

use amax::Maxima;
pub use arithmetic::{HeadRows, RowSum, Serial, TileWeights, UnitArithmetic, Weights};
pub use columns::Panel;
use columns::{Columns, Operand};
pub use hopper::Hopper;
pub use roundings::{Factor, Factors, Roundings};
use row::tiles_of;
pub use row::{Finished, Online};
pub use stages::{Pair, Right, Stages};
pub use tensor_core::TensorCore;

/// Tile sizes. They are parameters, and small ones put tile edges among few tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tiles {
    /// Query rows of a tile, at least 1.
    pub q: usize,
    /// Keys of a tile, at least 1.
    pub kv: usize,
}

/// Tensors of a forward launch: q and out `[rows, heads, dim]`, lse `[heads, rows, 1]`, max_logit `[heads, 1, 1]`.
pub struct ForwardLaunch<'a, T> {
    /// Queries.
    pub q: &'a GuardedTensor<T>,
    /// Keys.
    pub k: &'a GuardedTensor<T>,
    /// Values.
    pub v: &'a GuardedTensor<T>,
    /// Learnable sink of each query head; empty without one.
    pub sink: &'a [T],
    /// Descales of the codes of each segment and query head; empty where nothing is scaled.
    pub descales: &'a [Vec<Descales>],
    /// The output.
    pub out: &'a mut GuardedTensor<T>,
    /// The log-sum-exp.
    pub lse: &'a mut GuardedTensor<T>,
    /// The largest logit of each head. The buffer is filled before, and a launch raises its values and never lowers
    /// them.
    pub max_logit: &'a mut GuardedTensor<T>,
}

/// Tensors of a backward launch.
pub struct BackwardLaunch<'a, T> {
    /// Queries.
    pub q: &'a GuardedTensor<T>,
    /// Keys.
    pub k: &'a GuardedTensor<T>,
    /// Values.
    pub v: &'a GuardedTensor<T>,
    /// Learnable sink of each query head; empty without one.
    pub sink: &'a [T],
    /// Descales of the codes of each segment and query head; empty where nothing is scaled.
    pub descales: &'a [Vec<Descales>],
    /// Gradient of the output.
    pub dout: &'a GuardedTensor<T>,
    /// The forward's output.
    pub out: &'a GuardedTensor<T>,
    /// The forward's LSE.
    pub lse: &'a GuardedTensor<T>,
    /// Gradient of the queries.
    pub dq: &'a mut GuardedTensor<T>,
    /// Gradient of the keys.
    pub dk: &'a mut GuardedTensor<T>,
    /// Gradient of the values.
    pub dv: &'a mut GuardedTensor<T>,
    /// Gradient of the learnable sink, `[heads, 1, 1]`; no heads without one.
    pub dsink: &'a mut GuardedTensor<T>,
}

/// Code that a launch runs.
pub trait Kernel<T: Real>: Sync {
    /// Runs the forward.
    fn forward(&self, call: &AttentionCall, tensors: ForwardLaunch<'_, T>);
    /// Runs the backward.
    fn backward(&self, call: &AttentionCall, tensors: BackwardLaunch<'_, T>);
    /// Folds a step's row of out and its LSE into the running ones by a difference
    /// ([`MergeStyle::Difference`](crate::schedule::MergeStyle::Difference)). Both LSEs are finite. The running out is
    /// rounded to `format`.
    fn merge_by_difference(&self, running: (&mut [T], &mut T), step: (&[T], T), format: Format);
    /// Returns the factor that turns the launches' codes of out into values; 1 where they are values.
    fn descale_of_out(&self) -> T {
        T::ONE
    }
    /// Returns the largest magnitudes of what the launches so far have quantised, if the kernel keeps them
    /// ([`Roundings::keeps_amax`]).
    fn amaxes(&self) -> Amaxes {
        Amaxes::default()
    }
}

/// Stages that run on either arithmetic in f32: those of the right kernel, or of another that differs in some.
pub trait Variant: Stages<f32, Serial> + Stages<f32, Hopper> + Debug {}

impl<S: Stages<f32, Serial> + Stages<f32, Hopper> + Debug> Variant for S {}

/// The units of a kernel in f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Units {
    /// [`Serial`].
    F32,
    /// [`Hopper`] arithmetic in 16-bit factors. The number draws its order of dq.
    Hopper(u64),
    /// [`Hopper`] arithmetic in FP8 on this unit, promoted after so many steps, with tiles of dq in the order of the keys.
    HopperFp8(TensorCore, Option<NonZeroUsize>),
}

impl Units {
    /// Returns the right kernel on these units.
    pub fn right(self, tiles: Tiles, roundings: Roundings) -> Box<dyn Kernel<f32>> {
        self.kernel_of(tiles, roundings, &Right)
    }

    /// Returns a kernel with other stages on these units.
    pub fn variant(
        self,
        tiles: Tiles,
        roundings: Roundings,
        stages: &'static dyn Variant,
    ) -> Box<dyn Kernel<f32>> {
        self.kernel_of(tiles, roundings, stages)
    }

    /// Returns a kernel on these units. Only this crate names the stages' type, so no other crate compiles the kernel
    /// once more.
    fn kernel_of<S>(self, tiles: Tiles, roundings: Roundings, stages: &'static S) -> Box<dyn Kernel<f32>>
    where
        S: Stages<f32, Serial> + Stages<f32, Hopper> + ?Sized,
    {
        match self {
            Units::F32 => Box::new(TiledKernel::new(tiles, roundings, Serial, stages)),
            Units::Hopper(order) => Box::new(TiledKernel::new(tiles, roundings, Hopper::wide(order), stages)),
            Units::HopperFp8(core, promoted_after) => {
                let units = Hopper { order: None, core, promoted_after };
                Box::new(TiledKernel::new(tiles, roundings, units, stages))
            }
        }
    }
}

/// The tiled kernel: a loop over tiles of queries and keys.
#[derive(Debug)]
pub struct TiledKernel<'a, T, A, S: ?Sized> {
    tiles: Tiles,
    roundings: Roundings,
    units: A,
    stages: &'a S,
    maxima: Maxima,
    real: PhantomData<fn() -> T>,
}

/// A query head of a segment.
struct ScaledHead {
    head: usize,
    /// The softmax, whose scale takes the descales of q and k as factors.
    softmax: Softmax,
    /// The scale without them.
    bare_scale: f32,
    /// The descales, if the codes have any.
    descales: Option<Descales>,
}

impl ScaledHead {
    /// Returns a head of a segment.
    fn new(head: usize, softmax: Softmax, of_segments: &[Vec<Descales>], segment: usize) -> ScaledHead {
        let descales = of_segments.get(segment).and_then(|of_heads| of_heads.get(head)).copied();
        let scale = descales.map_or(softmax.scale, |Descales { q, k, .. }| softmax.scale * q * k);
        ScaledHead { head, softmax: Softmax { scale, ..softmax }, bare_scale: softmax.scale, descales }
    }

    /// Returns the descale of the codes with which the sums of a gradient are made.
    fn of_gradient(&self, gradient: TensorName) -> f32 {
        self.descales.map_or(1.0, |Descales { q, k, dout, .. }| match gradient {
            TensorName::Dq => k,
            TensorName::Dk => q,
            _ => dout,
        })
    }
}

/// A segment with the rows from which its operands are loaded.
struct Placed<'a> {
    segment: &'a Segment,
    q: Vec<usize>,
    dout: Vec<usize>,
    k: Vec<usize>,
    v: Vec<usize>,
    /// The local keys that each local query sees.
    seen: Vec<Intervals>,
    /// Tiles of queries, each with the tiles of keys that some query of it sees. They are the same for every head.
    tiles: Vec<(Range<usize>, Vec<Range<usize>>)>,
}

impl<T: Real, A: UnitArithmetic<T>, S: Stages<T, A> + ?Sized> Kernel<T> for TiledKernel<'_, T, A, S> {
    fn forward(&self, call: &AttentionCall, mut tensors: ForwardLaunch<'_, T>) {
        let heads = tensors.q.shape()[1];
        let mut buffers = forward::Buffers::new();
        for (index, segment) in call.segments.iter().enumerate() {
            let placed = self.place(Pass::Forward, segment);
            let mut keys = Columns::new();
            for head in 0..heads {
                keys.turn_to(self.stages.kv_head(head, heads / tensors.k.shape()[1]));
                let scaled = ScaledHead::new(head, call.softmax, tensors.descales, index);
                for tile in &placed.tiles {
                    self.forward_tile(&placed, &scaled, tile, &mut keys, &mut tensors, &mut buffers);
                }
            }
            if call.policy == RowPolicy::Overwrite {
                self.clear_forward(segment, heads, &mut tensors);
            }
        }
    }

    fn backward(&self, call: &AttentionCall, mut tensors: BackwardLaunch<'_, T>) {
        let (heads, kv_heads) = (tensors.q.shape()[1], tensors.k.shape()[1]);
        tensors.dsink.values_mut().fill(T::ZERO);
        let mut buffers = backward::Buffers::new(&self.roundings);
        for (index, segment) in call.segments.iter().enumerate() {
            let placed = self.place(Pass::Backward, segment);
            for kv_head in 0..kv_heads {
                self.backward_segment(call, (index, &placed), kv_head, &mut tensors, &mut buffers);
            }
            if call.policy == RowPolicy::Overwrite {
                self.clear_backward(segment, (heads, kv_heads), &mut tensors);
            }
        }
    }

    fn merge_by_difference(
        &self,
        (out, lse): (&mut [T], &mut T),
        (step, step_lse): (&[T], T),
        format: Format,
    ) {
        let share = self.stages.difference_share(*lse, step_lse);
        for (out, &step) in out.iter_mut().zip(step) {
            *out = self.stages.difference(*out, step, share).round(format);
        }
        *lse = self.stages.difference_lse(*lse, step_lse);
    }

    fn descale_of_out(&self) -> T {
        T::from_f32(self.roundings.factors.out.descale)
    }

    fn amaxes(&self) -> Amaxes {
        if self.roundings.keeps_amax { self.maxima.told() } else { Amaxes::default() }
    }
}

impl<'a, T: Real, A: UnitArithmetic<T>, S: Stages<T, A> + ?Sized> TiledKernel<'a, T, A, S> {
    /// Returns a kernel with the given tiles and roundings.
    pub fn new(tiles: Tiles, roundings: Roundings, units: A, stages: &'a S) -> TiledKernel<'a, T, A, S> {
        TiledKernel { tiles, roundings, units, stages, maxima: Maxima::default(), real: PhantomData }
    }

    fn place<'s>(&self, pass: Pass, segment: &'s Segment) -> Placed<'s> {
        let rows = |tensor| self.stages.rows(pass, tensor, segment);
        let k = rows(TensorName::K);
        let seen = |i| self.stages.visible(pass, segment, i).moved(|key| key.min(k.len()));
        let with_keys = |rows: Range<usize>| {
            let keys = self.stages.tiles(pass, segment, &rows, k.len(), self.tiles.kv);
            (rows, keys)
        };
        Placed {
            segment,
            tiles: tiles_of(0..segment.q.len, self.tiles.q).map(with_keys).collect(),
            seen: (0..segment.q.len).map(seen).collect(),
            q: rows(TensorName::Q),
            dout: rows(TensorName::Dout),
            v: rows(TensorName::V),
            k,
        }
    }

    /// Writes the products of a query's row, or of dout's, with the keys that it sees. Those of some neighbours are written,
    /// too.
    fn products(
        &self,
        (pass, formats): (Pass, [Format; 2]),
        a: &[T],
        (columns, operand): (&mut Columns<T>, &Operand<'_, T>),
        seen: &Intervals,
        to: &mut [T],
    ) {
        for part in seen.parts() {
            columns.each(operand, &part, to, |panel, to| {
                self.stages.products(&self.units, pass, formats, a, panel, to);
            });
        }
    }

    /// Turns products into scores.
    fn score(&self, pass: Pass, softmax: &Softmax, products: &mut [T]) {
        self.stages.scores(&self.units, pass, softmax, products);
        if self.roundings.coarse_cap && softmax.softcap.is_some() {
            products.iter_mut().for_each(|score| *score = with_eleven_bits(*score));
        }
    }

    /// Multiplies and rounds weights, as they enter a product.
    fn round_weights(&self, pass: Pass, weights: &mut [T]) {
        let scale = self.weight_scale();
        if scale != T::ONE {
            weights.iter_mut().for_each(|weight| *weight *= scale);
        }
        self.stages.round(pass, weights, self.roundings.p);
    }

    /// Returns the number with which weights are multiplied before they are rounded.
    fn weight_scale(&self) -> T {
        let Roundings { weight_exponent, factors, .. } = self.roundings;
        T::from_f32(factors.p.scale * f32::from(weight_exponent).exp2())
    }

    /// Returns the number that turns sums of rounded weights back.
    fn weight_descale(&self) -> T {
        let Roundings { weight_exponent, factors, .. } = self.roundings;
        T::from_f32(factors.p.descale / f32::from(weight_exponent).exp2())
    }

    /// Counts magnitudes of a quantity before they are quantised.
    fn count(&self, quantity: Quantity, values: &[T]) {
        if self.roundings.keeps_amax {
            self.maxima.count(quantity, values);
        }
    }

    fn clear_forward(&self, segment: &Segment, heads: usize, tensors: &mut ForwardLaunch<'_, T>) {
        for row in self.stages.padding(TensorName::Out, &segment.q) {
            (0..heads).for_each(|head| tensors.out.lane_mut(row, head).fill(T::ZERO));
        }
        for row in self.stages.padding(TensorName::Lse, &segment.q) {
            (0..heads).for_each(|head| tensors.lse.lane_mut(head, row).fill(T::NEG_INFINITY));
        }
    }

    fn clear_backward(
        &self,
        segment: &Segment,
        (heads, kv_heads): (usize, usize),
        tensors: &mut BackwardLaunch<'_, T>,
    ) {
        for row in self.stages.padding(TensorName::Dq, &segment.q) {
            (0..heads).for_each(|head| tensors.dq.lane_mut(row, head).fill(T::ZERO));
        }
        for run in &segment.kv {
            for row in self.stages.padding(TensorName::Dk, run) {
                (0..kv_heads).for_each(|head| tensors.dk.lane_mut(row, head).fill(T::ZERO));
            }
            for row in self.stages.padding(TensorName::Dv, run) {
                (0..kv_heads).for_each(|head| tensors.dv.lane_mut(row, head).fill(T::ZERO));
            }
        }
    }
}

/// Returns an f32 rounded to 11 bits, which changes it by 2^-11 of its magnitude at most. (Veltkamp's splitting.)
fn with_eleven_bits<T: Real>(value: T) -> T {
    let large = T::from_f32(8193.0) * value;
    large - (large - value)
}

/// Returns `keys` as columns of the tile `columns`.
fn clip(keys: &Intervals, columns: &Range<usize>) -> Intervals {
    keys.moved(|key| key.clamp(columns.start, columns.end) - columns.start)
}

fn sink<T: Real>(kind: Sink, learnable: &[T], head: usize) -> Option<T> {
    match kind {
        Sink::None => None,
        Sink::OffByOne => Some(T::ZERO),
        Sink::Learnable => learnable.get(head).copied(),
    }
}
