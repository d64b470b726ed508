//! The local operations of the CPU device, one lane at a time: sums and copies of rows, hidden rows, rotations, fills,
//! merges of partial results, and the sink.

use std::ops::Range;

use seamproof_oracle::region::{rotated, rotated_back};
use seamproof_oracle::{Format, Run};

use super::buffers::{Buffers, stretch};
use super::error::DeviceError;
use crate::emulated::Kernel;
use crate::schedule::{Axes, BufferId, Descales, FillValue, Layer, Merge, MergeStyle, Rotated, RowPair};
use crate::{GuardedTensor, Real};

/// Combines lanes with others. Each result is rounded to the format in which it is stored.
pub(super) fn each_lane<T: Real>(
    from: BufferId,
    to: BufferId,
    rows: &[RowPair],
    buffers: &mut Buffers<T>,
    combine: impl Fn(&mut [T], &[T]),
) -> Result<(), DeviceError> {
    buffers.check_pairs(from, to, rows)?;
    let mut target = buffers.take(to)?;
    let (format, axes) = (target.format(), buffers.axes[to.0]);
    // Both sides have the same heads and lanes.
    let width = buffers.width(from);
    for (read, written) in rows {
        let together = stretch(buffers.axes[from.0], read, width).zip(stretch(axes, written, width));
        if let Some((read, written)) = together {
            let elements = &mut target.values_mut()[written];
            combine(elements, &buffers.tensors[from.0].values()[read]);
            T::round_all(elements, format);
            continue;
        }
        for (source, row) in read.real_rows().zip(written.real_rows()) {
            for head in 0..buffers.heads[from.0] {
                let lane = lane_of(&mut target, axes, row, head);
                combine(lane, buffers.lane(from, source, head));
                T::round_all(lane, format);
            }
        }
    }
    buffers.put(to, target);
    Ok(())
}

/// Returns the elements of a row and head of a tensor that was taken out of its buffers.
fn lane_of<T: Real>(tensor: &mut GuardedTensor<T>, axes: Axes, row: usize, head: usize) -> &mut [T] {
    match axes {
        Axes::Rows => tensor.lane_mut(row, head),
        Axes::Statistic => tensor.lane_mut(head, row),
        Axes::Heads => tensor.lane_mut(head, 0),
    }
}

/// Copies the rank's heads out of hidden rows, or into hidden rows with zeros in the other heads.
pub(super) fn linear<T: Real>(
    layer: Layer,
    heads: &Range<usize>,
    (from, to): (BufferId, BufferId),
    rows: &[RowPair],
    buffers: &mut Buffers<T>,
) -> Result<(), DeviceError> {
    let [read, written] = layer.heads(heads);
    let (sources, targets): (Vec<Run>, Vec<Run>) = rows.iter().copied().unzip();
    buffers.check(from, &sources, &read)?;
    buffers.check(to, &targets, &written)?;
    let format = buffers.tensor(to).format();
    if layer == Layer::Row {
        fill(to, &targets, FillValue::Zero, buffers)?;
    }
    for (source, target) in rows {
        for (source, target) in source.real_rows().zip(target.real_rows()) {
            for (head, to_head) in read.clone().zip(written.clone()) {
                let lane = buffers.lane(from, source, head).to_vec();
                for (to, from) in buffers.lane_mut(to, target, to_head).iter_mut().zip(lane) {
                    *to = from.round(format);
                }
            }
        }
    }
    Ok(())
}

/// Rotates rows in place, as [`crate::schedule::Work::Rotate`] says.
pub(super) fn rotate<T: Real>(
    id: BufferId,
    rows: &[Rotated],
    inverse: bool,
    buffers: &mut Buffers<T>,
) -> Result<(), DeviceError> {
    let runs: Vec<Run> = rows.iter().map(|rotated| rotated.rows).collect();
    buffers.check_rows(id, &runs)?;
    let turn: fn(&[T], usize) -> Vec<T> = if inverse { rotated_back } else { rotated };
    for Rotated { rows, position, step } in rows {
        for (i, row) in rows.real_rows().enumerate() {
            for head in 0..buffers.heads(id) {
                let lane = buffers.lane_mut(id, row, head);
                let turned = turn(lane, position + step * i);
                lane.copy_from_slice(&turned);
            }
        }
    }
    Ok(())
}

pub(super) fn fill<T: Real>(
    to: BufferId,
    rows: &[Run],
    value: FillValue,
    buffers: &mut Buffers<T>,
) -> Result<(), DeviceError> {
    let value = match value {
        FillValue::Zero => T::ZERO,
        FillValue::NegInfinity => T::NEG_INFINITY,
    };
    fill_with(to, rows, value, buffers)
}

pub(super) fn fill_with<T: Real>(
    to: BufferId,
    rows: &[Run],
    value: T,
    buffers: &mut Buffers<T>,
) -> Result<(), DeviceError> {
    buffers.check_rows(to, rows)?;
    let one = [Run::packed(0, 1, 1)];
    let rows = if buffers.axes[to.0] == Axes::Heads { &one } else { rows };
    for run in rows {
        if let Some(stretch) = stretch(buffers.axes[to.0], run, buffers.width(to)) {
            buffers.tensors[to.0].values_mut()[stretch].fill(value);
            continue;
        }
        for row in run.real_rows() {
            for head in 0..buffers.heads(to) {
                buffers.lane_mut(to, row, head).fill(value);
            }
        }
    }
    Ok(())
}

/// Returns `ln(e^a + e^b)`. Two −∞ give −∞: empty statistics are the identity.
pub(crate) fn log_add<T: Real>(a: T, b: T) -> T {
    let largest = a.larger(b);
    if largest == T::NEG_INFINITY {
        return T::NEG_INFINITY;
    }
    largest + ((a - largest).exp() + (b - largest).exp()).ln()
}

/// Returns `e^(a − total)`; 0 for an empty a.
pub(crate) fn share<T: Real>(a: T, total: T) -> T {
    if a == T::NEG_INFINITY { T::ZERO } else { (a - total).exp() }
}

pub(super) fn merge<T: Real>(
    merge: &Merge,
    kernel: &dyn Kernel<T>,
    buffers: &mut Buffers<T>,
) -> Result<(), DeviceError> {
    buffers.check_pairs(merge.step_out, merge.out, &merge.rows)?;
    buffers.check_pairs(merge.step_lse, merge.lse, &merge.rows)?;
    let heads = 0..buffers.heads(merge.out);
    let mut out = buffers.take(merge.out)?;
    let mut lse = buffers.take(merge.lse)?;
    let format = out.format();
    for (step, running) in &merge.rows {
        for (source, target) in step.real_rows().zip(running.real_rows()) {
            for head in heads.clone() {
                let old = &mut lse.lane_mut(head, target)[0];
                let new = buffers.lane(merge.step_lse, source, head)[0];
                let is_empty = *old == T::NEG_INFINITY || new == T::NEG_INFINITY;
                if merge.style == MergeStyle::Difference && !is_empty {
                    let step = buffers.lane(merge.step_out, source, head);
                    kernel.merge_by_difference((out.lane_mut(target, head), old), (step, new), format);
                    continue;
                }
                let Weights { total, keep, add } = weights(merge.style, *old, new);
                *old = total;
                if merge.style == MergeStyle::Statistics {
                    continue;
                }
                let rounded = merge.style == MergeStyle::Weighted { product_rounded: true };
                let product = if rounded { format } else { Format::F32 };
                let step = buffers.lane(merge.step_out, source, head);
                for (out, &step) in out.lane_mut(target, head).iter_mut().zip(step) {
                    *out = (*out * keep + (step * add).round(product)).round(format);
                }
            }
        }
    }
    buffers.put(merge.out, out);
    buffers.put(merge.lse, lse);
    Ok(())
}

/// Merge of two statistics: the new one, and the factors of the two outs.
struct Weights<T> {
    total: T,
    keep: T,
    add: T,
}

fn weights<T: Real>(style: MergeStyle, old: T, new: T) -> Weights<T> {
    match style {
        // By a difference, only the identity is merged here.
        MergeStyle::Running | MergeStyle::Difference => {
            let total = log_add(old, new);
            Weights { total, keep: share(old, total), add: share(new, total) }
        }
        MergeStyle::Statistics => Weights { total: log_add(old, new), keep: T::ONE, add: T::ZERO },
        MergeStyle::Weighted { .. } => Weights { total: old, keep: T::ONE, add: share(new, old) },
    }
}

pub(super) fn apply_sink<T: Real>(
    sink: Option<BufferId>,
    out: BufferId,
    lse: BufferId,
    rows: &[Run],
    buffers: &mut Buffers<T>,
) -> Result<(), DeviceError> {
    buffers.check_rows(out, rows)?;
    buffers.check_rows(lse, rows)?;
    let format = buffers.tensor(out).format();
    for row in rows.iter().flat_map(Run::real_rows) {
        for head in 0..buffers.heads(out) {
            let sink = sink.map_or(T::ZERO, |sink| buffers.lane(sink, 0, head)[0]);
            let old = buffers.lane(lse, row, head)[0];
            let total = log_add(old, sink);
            let keep = share(old, total);
            buffers.lane_mut(lse, row, head)[0] = total;
            buffers.lane_mut(out, row, head).iter_mut().for_each(|out| *out = (*out * keep).round(format));
        }
    }
    Ok(())
}

pub(super) fn sink_gradient<T: Real>(
    [sink, dout, out, lse, dsink]: [BufferId; 5],
    rows: &[Run],
    descales: &[Vec<Descales>],
    descale_of_out: T,
    buffers: &mut Buffers<T>,
) -> Result<(), DeviceError> {
    for id in [dout, out, lse] {
        buffers.check_rows(id, rows)?;
    }
    for head in 0..buffers.heads(dsink) {
        let mut sum = T::ZERO;
        for (index, run) in rows.iter().enumerate() {
            let of_head = descales.get(index).and_then(|of_heads| of_heads.get(head));
            let descale = of_head.map_or(T::ONE, |of_head| T::from_f32(of_head.dout)) * descale_of_out;
            for row in run.real_rows() {
                let lse = buffers.lane(lse, row, head)[0];
                if lse != T::NEG_INFINITY {
                    let lanes = buffers.lane(dout, row, head).iter().zip(buffers.lane(out, row, head));
                    let d = lanes.fold(T::ZERO, |sum, (a, b)| sum + *a * *b) * descale;
                    sum -= (buffers.lane(sink, 0, head)[0] - lse).exp() * d;
                }
            }
        }
        buffers.lane_mut(dsink, 0, head)[0] = sum;
    }
    Ok(())
}
