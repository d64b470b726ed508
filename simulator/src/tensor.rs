//! Buffers with guard bands.
//!
//! A [`GuardedTensor`] holds `[n0, n1, n2]` elements of one format as [`Real`] numbers. f32 is exact for every narrow
//! format. A *guard band* lies before and after the elements, and no kernel may change it. A tensor starts *unwritten*:
//! every element holds one NaN pattern, which shows an element that a kernel forgot. An index one row outside the
//! tensor does not panic. It lands in a guard band, where the write is found.

use std::ops::Range;
use std::sync::Arc;

use ndarray::{Array, Array2, Array3, ArrayView, Dimension};
use seamproof_oracle::Format;
use serde::{Deserialize, Serialize};

use crate::Real;

/// Fewest elements of one guard band.
const GUARD_ELEMENTS_MIN: usize = 64;

/// Place of a guard band.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "bool", into = "bool")]
pub enum Guard {
    /// Before the first element: `true` in JSON.
    Before,
    /// After the last element.
    After,
}

impl From<bool> for Guard {
    fn from(before: bool) -> Guard {
        if before { Guard::Before } else { Guard::After }
    }
}

impl From<Guard> for bool {
    fn from(guard: Guard) -> bool {
        guard == Guard::Before
    }
}

/// Guard elements of one band that changed, which shows a write outside the tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Damage {
    /// The tensor's name.
    pub tensor: String,
    /// Band that changed.
    #[serde(rename = "before")]
    pub guard: Guard,
    /// Distance in elements from the tensor's edge; 0 touches the edge.
    pub distance: usize,
    /// Number of changed elements in the band.
    pub elements: usize,
}

/// A tensor of `[n0, n1, n2]` elements between guard bands, row-major.
#[derive(Clone, Debug)]
pub struct GuardedTensor<T = f32> {
    name: Arc<str>,
    shape: [usize; 3],
    format: Format,
    guard: usize,
    data: Vec<T>,
}

#[inline]
fn guard_pattern<T: Real>(index: usize) -> T {
    T::GUARD[index % 2]
}

impl<T: Real> GuardedTensor<T> {
    /// Returns an unwritten tensor. Each guard band is at least one whole `[n1, n2]` slice.
    pub fn unwritten(name: impl Into<Arc<str>>, shape: [usize; 3], format: Format) -> GuardedTensor<T> {
        GuardedTensor::filled(name, shape, format, T::UNWRITTEN)
    }

    /// Returns a tensor of one number.
    pub(crate) fn filled(
        name: impl Into<Arc<str>>,
        shape: [usize; 3],
        format: Format,
        value: T,
    ) -> GuardedTensor<T> {
        let guard = GUARD_ELEMENTS_MIN.max(shape[1] * shape[2]);
        let len: usize = shape.iter().product();
        let mut data = vec![value; 2 * guard + len];
        for band in [0..guard, guard + len..2 * guard + len] {
            let pair = [band.start, band.start + 1].map(guard_pattern::<T>);
            let (pairs, last) = data[band].as_chunks_mut::<2>();
            pairs.fill(pair);
            last.fill(pair[0]);
        }
        GuardedTensor { name: name.into(), shape, format, guard, data }
    }

    /// Returns a tensor without elements and guard bands. It stands in for a tensor that was taken out.
    pub fn nothing() -> GuardedTensor<T> {
        GuardedTensor { name: Arc::default(), shape: [0; 3], format: Format::F32, guard: 0, data: Vec::new() }
    }

    /// Returns a tensor with the elements of `array`, which has one to three axes. Missing axes are added at the end
    /// with length 1.
    pub fn from_array<D: Dimension>(
        name: &str,
        array: ArrayView<'_, f32, D>,
        format: Format,
    ) -> GuardedTensor<T> {
        let mut shape = [1; 3];
        shape[..array.ndim()].copy_from_slice(array.shape());
        let mut tensor = GuardedTensor::unwritten(name, shape, format);
        for (to, from) in tensor.values_mut().iter_mut().zip(array.iter()) {
            *to = T::from_f32(*from);
        }
        tensor
    }

    /// Returns the tensor's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the shape `[n0, n1, n2]`.
    #[inline]
    pub fn shape(&self) -> [usize; 3] {
        self.shape
    }

    /// Returns the storage format.
    #[inline]
    pub fn format(&self) -> Format {
        self.format
    }

    /// Returns the elements without the guard bands.
    #[inline]
    pub fn values(&self) -> &[T] {
        &self.data[self.guard..self.data.len() - self.guard]
    }

    /// Returns the elements without the guard bands, for changes.
    #[inline]
    pub fn values_mut(&mut self) -> &mut [T] {
        let end = self.data.len() - self.guard;
        &mut self.data[self.guard..end]
    }

    /// Returns the elements with the guard bands around them, for a device that holds both.
    pub fn raw(&self) -> &[T] {
        &self.data
    }

    /// Returns the elements with the guard bands around them, for changes.
    pub fn raw_mut(&mut self) -> &mut [T] {
        &mut self.data
    }

    /// Returns the number of elements of one guard band.
    pub fn guard(&self) -> usize {
        self.guard
    }

    #[inline]
    fn start(&self, i0: usize, i1: usize) -> usize {
        self.guard + (i0 * self.shape[1] + i1) * self.shape[2]
    }

    /// Returns the `n2` elements at `[i0, i1]`.
    #[inline]
    pub fn lane(&self, i0: usize, i1: usize) -> &[T] {
        let start = self.start(i0, i1);
        &self.data[start..start + self.shape[2]]
    }

    /// Returns the `n1 · n2` elements at `[i0]`, for changes.
    #[inline]
    pub(crate) fn slice_mut(&mut self, i0: usize) -> &mut [T] {
        let start = self.start(i0, 0);
        let len = self.shape[1] * self.shape[2];
        &mut self.data[start..start + len]
    }

    /// Returns the `n2` elements at `[i0, i1]`, for changes.
    #[inline]
    pub fn lane_mut(&mut self, i0: usize, i1: usize) -> &mut [T] {
        let start = self.start(i0, i1);
        let n2 = self.shape[2];
        &mut self.data[start..start + n2]
    }

    /// Returns the guard elements that changed, in one report for each band.
    pub fn damage(&self) -> Vec<Damage> {
        let end = self.data.len() - self.guard;
        let changed = |index: &usize| self.data[*index].bits() != guard_pattern::<T>(*index).bits();
        let whole = |band: Range<usize>| {
            let [even, odd] = [0, 1].map(|place| guard_pattern::<T>(band.start + place).bits());
            let mut pairs = self.data[band].chunks_exact(2);
            let all =
                (&mut pairs).fold(true, |all, pair| all & (pair[0].bits() == even) & (pair[1].bits() == odd));
            all && pairs.remainder().iter().all(|last| last.bits() == even)
        };
        if whole(0..self.guard) && whole(end..self.data.len()) {
            return Vec::new();
        }
        let before: Vec<usize> =
            (0..self.guard).filter(changed).map(|index| self.guard - 1 - index).collect();
        let after: Vec<usize> = (end..self.data.len()).filter(changed).map(|index| index - end).collect();
        [(Guard::Before, before), (Guard::After, after)]
            .into_iter()
            .filter_map(|(guard, found)| {
                let distance = *found.iter().min()?;
                Some(Damage { tensor: self.name.to_string(), guard, distance, elements: found.len() })
            })
            .collect()
    }

    /// Returns the elements as `[n0, n1, n2]`.
    pub fn to_array3(&self) -> Array3<T> {
        Array::from_shape_vec(self.shape, self.values().to_vec()).expect("the shape is the tensor's own")
    }

    /// Returns the elements as `[n0, n1 · n2]`.
    pub fn to_array2(&self) -> Array2<T> {
        let [n0, n1, n2] = self.shape;
        Array::from_shape_vec([n0, n1 * n2], self.values().to_vec()).expect("the shape is the tensor's own")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::is_unwritten;

    #[test]
    fn a_fresh_tensor_is_unwritten_and_undamaged() {
        let tensor = GuardedTensor::<f32>::unwritten("out", [3, 2, 4], Format::Bf16);
        assert!(tensor.values().iter().all(|&value| is_unwritten(value)));
        assert_eq!(tensor.damage(), []);
    }

    #[test]
    fn a_write_one_row_outside_is_seen_even_when_it_adds_zero() {
        let mut tensor = GuardedTensor::<f32>::unwritten("out", [3, 2, 4], Format::Bf16);
        for value in tensor.lane_mut(3, 0) {
            *value += 0.0;
        }
        let damage = tensor.damage();
        assert_eq!(damage.len(), 1);
        assert_eq!((damage[0].guard, damage[0].distance), (Guard::After, 0));
        assert_eq!(damage[0].elements, 4, "−0.0 and the signalling NaNs all change");
    }
}
