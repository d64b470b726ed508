//! Stages of the right kernel that do more than ask the units. A kernel that differs in another stage calls them: as
//! bodies of [`Stages`]'s provided methods they would be compiled once for every kernel, and there are eighty.
//!
//! [`Stages`]: super::Stages

use std::ops::{Range, RangeInclusive};

use seamproof_oracle::{Format, Intervals, Run, Softmax, TensorName};

use super::arithmetic::{HeadRows, TileWeights, UnitArithmetic};
use super::row::{Finished, Online, tiles_of};
use crate::{GuardedTensor, Real, Segment};

#[inline(never)]
pub(super) fn rows(tensor: TensorName, segment: &Segment) -> Vec<usize> {
    match tensor {
        TensorName::K | TensorName::V => segment.kv.iter().flat_map(Run::real_rows).collect(),
        _ => segment.q.real_rows().collect(),
    }
}

#[inline(never)]
pub(super) fn tiles(
    visible: &dyn Fn(usize) -> Intervals,
    rows: &Range<usize>,
    keys: usize,
    size: usize,
) -> Vec<Range<usize>> {
    // Changes of the number of parts that meet a tile, from each tile to the next.
    let count = keys.div_ceil(size);
    let mut changes = vec![0isize; count + 1];
    for part in rows.clone().flat_map(|i| visible(i).parts()) {
        changes[(part.start / size).min(count)] += 1;
        changes[part.end.div_ceil(size).min(count)] -= 1;
    }
    let meets = changes.into_iter().scan(0, |meeting, change| {
        *meeting += change;
        Some(*meeting > 0)
    });
    tiles_of(0..keys, size).zip(meets).filter_map(|(tile, meets)| meets.then_some(tile)).collect()
}

#[inline(never)]
pub(super) fn grow<T: Real, A: UnitArithmetic<T>>(
    units: &A,
    softmax: &Softmax,
    state: &mut Online<T>,
    max: T,
) {
    if max > state.max {
        let factor = units.rescale(softmax, state.max, max);
        state.sum.iter_mut().for_each(|sum| *sum *= factor);
        state.acc.iter_mut().for_each(|acc| *acc *= factor);
        state.max = max;
    }
}

/// Returns `σ(x) = 1 / (1 + e^−x)`.
pub(super) fn sigmoid<T: Real>(x: T) -> T {
    T::ONE / (T::ONE + (T::ZERO - x).exp())
}

/// Returns `ln σ(x) = min(x, 0) − ln(1 + e^−|x|)`.
pub(super) fn log_sigmoid<T: Real>(x: T) -> T {
    let magnitude = x.larger(T::ZERO - x);
    let below = T::ZERO - T::ZERO.larger(T::ZERO - x);
    below - (T::ONE + (T::ZERO - magnitude).exp()).ln()
}

#[inline(never)]
pub(super) fn out<T: Real>(row: &Finished<T>, format: Format, to: &mut [T]) {
    let Finished { sum, acc, .. } = row;
    let inverse = if *sum == T::ZERO { T::ZERO } else { T::ONE / *sum };
    to.iter_mut().zip(acc).for_each(|(to, acc)| *to = *acc * inverse);
    T::round_all(to, format);
}

#[inline(never)]
pub(super) fn lse<T: Real>(row: &Finished<T>) -> T {
    let Finished { max, sum, .. } = row;
    if *sum == T::ZERO { T::NEG_INFINITY } else { *max + sum.ln() }
}

#[inline(never)]
pub(super) fn row_dots<T: Real, A: UnitArithmetic<T>>(
    units: &A,
    dout: HeadRows<'_, T>,
    out: HeadRows<'_, T>,
) -> Vec<T> {
    dout.lanes().zip(out.lanes()).map(|(dout, out)| units.row_dot(dout, out)).collect()
}

/// Exponents of a tile's factor, so that neither the factor nor its reciprocal is subnormal.
const FACTOR_EXPONENTS: RangeInclusive<i32> = -126..=126;

/// Returns the largest power of two that brings no number past the largest of a format; 1 for zeros.
#[inline(never)]
pub(super) fn tile_factor<T: Real>(values: &[T], format: Format) -> T {
    let amax = values.iter().fold(0.0, |most: f64, value| most.max(value.to_f64().abs()));
    if amax == 0.0 || !amax.is_finite() {
        return T::ONE;
    }
    let exponent = libm::ilogb(format.max_finite()) - libm::ilogb(amax);
    let is_past = libm::ldexp(amax, exponent) > format.max_finite();
    let exponent = (exponent - i32::from(is_past)).clamp(*FACTOR_EXPONENTS.start(), *FACTOR_EXPONENTS.end());
    T::from_f64(libm::ldexp(1.0, exponent))
}

#[inline(never)]
pub(super) fn saved_lse<T: Real>(lse: &GuardedTensor<T>, head: usize, rows: &[usize]) -> Vec<T> {
    rows.iter().map(|&row| lse.lane(head, row)[0]).collect()
}

#[inline(never)]
pub(super) fn add_dq<T: Real, A: UnitArithmetic<T>>(
    units: &A,
    to: &mut [T],
    ds: &TileWeights<T>,
    keys: HeadRows<'_, T>,
) {
    for (i, to) in to.chunks_exact_mut(keys.tensor.shape()[2]).enumerate() {
        units.add_tile(to, ds.weights(i), keys.slice(ds.seen[i].clone()));
    }
}

/// Adds a tile's share of dk or dv.
#[inline(never)]
pub(super) fn add_columns<T: Real, A: UnitArithmetic<T>>(
    units: &A,
    to: &mut [T],
    weights: &TileWeights<T>,
    rows: HeadRows<'_, T>,
) {
    units.add_columns(to, weights, rows);
}

#[inline(never)]
pub(super) fn store<T: Real>(factor: T, sums: &[T], index: usize, format: Format, to: &mut [T]) {
    let dim = to.len();
    let sums = &sums[index * dim..(index + 1) * dim];
    to.iter_mut().zip(sums).for_each(|(to, sum)| *to = factor * *sum);
    T::round_all(to, format);
}

#[inline(never)]
pub(super) fn padding(run: &Run) -> Vec<usize> {
    run.padding_rows().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tiles_factor_is_the_largest_power_of_two_that_fits() {
        for format in [Format::E4m3, Format::E5m2] {
            let most = format.max_finite();
            for amax in [1e-30f32, 0.011, 1.0, 1.75, 1.7500001, 448.0, 449.0, 57_344.0, 3e30] {
                let factor = f64::from(tile_factor(&[0.0, -amax, amax / 3.0], format));
                let (mantissa, _) = libm::frexp(factor);
                assert_eq!(mantissa, 0.5, "{factor}");
                let largest = f64::from(amax) * factor;
                assert!(largest <= most && 2.0 * largest > most, "{format}: {amax} times {factor}");
            }
            assert_eq!(tile_factor(&[0.0f32; 3], format), 1.0);
            let [tiny, huge] = [f32::from_bits(1), f32::MAX].map(|amax| tile_factor(&[amax], format));
            assert!(tiny.is_normal() && (1.0 / tiny).is_normal(), "{tiny}");
            assert!(huge.is_normal() && (1.0 / huge).is_normal(), "{huge}");
        }
    }
}
