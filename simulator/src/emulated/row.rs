//! State of a query row while keys come and after the last one, and tiles of rows.
//!
//! The state is that of an online softmax: the largest score, and the sums of weights and of weighted values relative
//! to it.

use std::ops::Range;

use super::arithmetic::{RowSum, UnitArithmetic};
use crate::Real;

/// Running state of one query row.
#[derive(Clone, Debug)]
pub struct Online<T> {
    /// The largest score so far; −∞ before the first.
    pub max: T,
    /// `Σ e^(logit − max)` so far.
    pub sum: RowSum<T>,
    /// `Σ e^(logit − max) · value` so far.
    pub acc: Vec<T>,
}

impl<T: Real> Online<T> {
    /// Returns the state before the first key, for values of `dim` lanes. `acc` is used again, whatever it holds.
    pub(super) fn new(dim: usize, mut acc: Vec<T>) -> Online<T> {
        acc.clear();
        acc.resize(dim, T::ZERO);
        Online { max: T::NEG_INFINITY, sum: [T::ZERO; 4], acc }
    }
}

/// State of one query row after all its keys.
#[derive(Clone, Debug)]
pub struct Finished<T> {
    /// The largest logit, the sink included.
    pub max: T,
    /// `Σ e^(logit − max)`, the sink included.
    pub sum: T,
    /// `Σ e^(logit − max) · value`.
    pub acc: Vec<T>,
}

impl<T: Real> Finished<T> {
    /// Adds the sink, after the sums are scaled for it. A sink of −∞ weighs nothing. This includes a row without keys,
    /// in which −∞ − −∞ would be no number.
    #[inline(never)]
    pub fn add_sink<A: UnitArithmetic<T>>(&mut self, units: &A, sink: T) {
        if sink == T::NEG_INFINITY {
            return;
        }
        if sink > self.max {
            let factor = units.exp(self.max - sink);
            self.sum *= factor;
            self.acc.iter_mut().for_each(|acc| *acc *= factor);
            self.max = sink;
        }
        self.sum += units.exp(sink - self.max);
    }
}

/// Returns pieces of `range`, each of at most `size`.
pub(super) fn tiles_of(range: Range<usize>, size: usize) -> impl Iterator<Item = Range<usize>> {
    let end = range.end;
    range.step_by(size.max(1)).map(move |start| start..end.min(start + size.max(1)))
}
