//! A [`Device`] owns a run's memory, executes local operations on it and moves regions between ranks. [`Cpu`] is the one
//! without hardware: in f32 with the roundings of a real kernel, or in f64 without any.
//!
//! A run begins with an *image* of all buffers on the host and ends with one; what lies between is the device's own. A
//! device may work behind its host: [`Device::submit`] sends off what was asked so far, [`Device::download`] waits for it.

use std::ops::{Deref, Range};
use std::sync::Arc;

use seamproof_oracle::{Format, Run};

use crate::emulated::{self, Kernel, Right, Serial, Tiled, Tiles};
use crate::schedule::{
    Attend, AttendBackward, Axes, BufferId, FillValue, Layer, Merge, MergeStyle, Reduction, Region, Rotated,
    RowPair, Schedule, Work,
};
use crate::{Damage, Real, Tensor};

/// Why an operation cannot be executed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// Rows, heads or a buffer that do not exist, or buffers that do not fit each other.
    #[error("{0}")]
    Shape(String),
    /// Something that only an executor can do.
    #[error("a device does not execute {0}")]
    NotLocal(&'static str),
    /// The device has no memory left for what was asked.
    #[error("the device is out of memory: {0}")]
    OutOfMemory(String),
    /// The device itself failed; whatever it held is lost.
    #[error("the device failed: {0}")]
    Failed(String),
}

/// All buffers of a schedule.
#[derive(Clone, Debug)]
pub struct Buffers<T> {
    tensors: Vec<Tensor<T>>,
    axes: Vec<Axes>,
    rows: Vec<usize>,
    heads: Vec<usize>,
    /// What a transfer carries, kept for the next one.
    moving: Vec<T>,
}

impl<T: Real> Buffers<T> {
    /// Unwritten buffers, one for each of the schedule's.
    pub fn unwritten(schedule: &Schedule) -> Buffers<T> {
        let buffers = &schedule.buffers;
        Buffers {
            tensors: buffers
                .iter()
                .map(|b| Tensor::unwritten(Arc::clone(&b.name), b.shape(), b.format))
                .collect(),
            axes: buffers.iter().map(|b| b.axes).collect(),
            rows: buffers.iter().map(|b| b.rows).collect(),
            heads: buffers.iter().map(|b| b.heads).collect(),
            moving: Vec::new(),
        }
    }

    /// The tensor behind a buffer.
    pub fn tensor(&self, id: BufferId) -> &Tensor<T> {
        &self.tensors[id.0]
    }

    /// The elements of a row and head; a buffer without rows has row 0.
    #[inline]
    pub fn lane(&self, id: BufferId, row: usize, head: usize) -> &[T] {
        match self.axes[id.0] {
            Axes::Rows => self.tensors[id.0].lane(row, head),
            Axes::Statistic => self.tensors[id.0].lane(head, row),
            Axes::Heads => self.tensors[id.0].lane(head, 0),
        }
    }

    /// The elements of a row and head.
    #[inline]
    pub fn lane_mut(&mut self, id: BufferId, row: usize, head: usize) -> &mut [T] {
        match self.axes[id.0] {
            Axes::Rows => self.tensors[id.0].lane_mut(row, head),
            Axes::Statistic => self.tensors[id.0].lane_mut(head, row),
            Axes::Heads => self.tensors[id.0].lane_mut(head, 0),
        }
    }

    /// The elements of a row, all heads, of a buffer whose rows are outermost.
    pub(crate) fn row_mut(&mut self, id: BufferId, row: usize) -> &mut [T] {
        self.tensors[id.0].slice_mut(row)
    }

    /// The tensor behind a buffer, for a device that brings its memory back.
    pub fn tensor_mut(&mut self, id: BufferId) -> &mut Tensor<T> {
        &mut self.tensors[id.0]
    }

    /// The tensors, in order of buffers.
    pub fn tensors(&self) -> &[Tensor<T>] {
        &self.tensors
    }

    /// What a buffer's axes mean.
    pub fn axes(&self, id: BufferId) -> Axes {
        self.axes[id.0]
    }

    /// Rows of a buffer; 0 where there is no such buffer.
    pub fn rows(&self, id: BufferId) -> usize {
        self.rows.get(id.0).copied().unwrap_or(0)
    }

    /// Heads of a buffer; 0 where there is no such buffer.
    pub fn heads(&self, id: BufferId) -> usize {
        self.heads.get(id.0).copied().unwrap_or(0)
    }

    /// Elements of a row and head.
    pub fn dim(&self, id: BufferId) -> usize {
        if self.axes[id.0] == Axes::Rows { self.tensors[id.0].shape()[2] } else { 1 }
    }

    /// Guard bands that changed.
    pub fn damage(&self) -> Vec<Damage> {
        self.tensors.iter().flat_map(Tensor::damage).collect()
    }

    /// Checks that rows and heads exist.
    pub fn check(&self, id: BufferId, rows: &[Run], heads: &Range<usize>) -> Result<(), DeviceError> {
        self.check_each(id, rows, heads)
    }

    fn check_each<'r>(
        &self,
        id: BufferId,
        rows: impl IntoIterator<Item = &'r Run>,
        heads: &Range<usize>,
    ) -> Result<(), DeviceError> {
        let Some(tensor) = self.tensors.get(id.0) else {
            return Err(DeviceError::Shape(format!("there is no buffer {}", id.0)));
        };
        if heads.end > self.heads[id.0] {
            let what = format!("{}: heads {heads:?} of {}", tensor.name(), self.heads[id.0]);
            return Err(DeviceError::Shape(what));
        }
        if self.axes[id.0] == Axes::Heads {
            return Ok(());
        }
        for run in rows {
            run.check(self.rows[id.0])
                .map_err(|error| DeviceError::Shape(format!("{}: {error}", tensor.name())))?;
        }
        Ok(())
    }

    /// The rows of a region, row 0 alone for a buffer without rows.
    fn region_rows(&self, region: &Region) -> Run {
        if self.axes[region.buffer.0] == Axes::Heads { Run::packed(0, 1, 1) } else { region.rows }
    }

    /// Elements of a region that exists.
    fn elements(&self, region: &Region) -> usize {
        self.region_rows(region).len * region.heads.len() * self.dim(region.buffer)
    }

    /// The elements of a row, all heads.
    fn width(&self, id: BufferId) -> usize {
        self.heads[id.0] * self.dim(id)
    }

    /// Where a region's elements lie, if they lie together.
    fn region_stretch(&self, region: &Region) -> Option<Range<usize>> {
        let id = region.buffer;
        (region.heads == (0..self.heads[id.0]))
            .then(|| stretch(self.axes[id.0], &region.rows, self.width(id)))
            .flatten()
    }

    /// The elements of a region, row after row.
    pub fn read(&self, region: &Region) -> Result<Vec<T>, DeviceError> {
        let mut values = Vec::new();
        self.read_into(region, &mut values)?;
        Ok(values)
    }

    /// The same behind what `values` holds.
    fn read_into(&self, region: &Region, values: &mut Vec<T>) -> Result<(), DeviceError> {
        self.check(region.buffer, &[region.rows], &region.heads)?;
        if let Some(stretch) = self.region_stretch(region) {
            values.extend_from_slice(&self.tensors[region.buffer.0].values()[stretch]);
            return Ok(());
        }
        for row in self.region_rows(region).real_rows() {
            for head in region.heads.clone() {
                values.extend_from_slice(self.lane(region.buffer, row, head));
            }
        }
        Ok(())
    }

    /// Writes the elements of a region, rounded to its buffer's format.
    pub fn write(&mut self, region: &Region, values: &[T]) -> Result<(), DeviceError> {
        self.check(region.buffer, &[region.rows], &region.heads)?;
        let elements = self.elements(region);
        if values.len() != elements {
            let than = if values.len() < elements { "shorter" } else { "longer" };
            return Err(DeviceError::Shape(format!("a message is {than} than its region")));
        }
        let format = self.tensors[region.buffer.0].format();
        if let Some(stretch) = self.region_stretch(region) {
            let to = &mut self.tensors[region.buffer.0].values_mut()[stretch];
            to.copy_from_slice(values);
            T::round_all(to, format);
            return Ok(());
        }
        let mut rest = values;
        for row in self.region_rows(region).real_rows() {
            for head in region.heads.clone() {
                let lane = self.lane_mut(region.buffer, row, head);
                let (values, after) = rest.split_at(lane.len());
                lane.copy_from_slice(values);
                T::round_all(lane, format);
                rest = after;
            }
        }
        Ok(())
    }

    /// Takes a tensor out, so that others can be read while it is written.
    fn take(&mut self, id: BufferId) -> Result<Tensor<T>, DeviceError> {
        let missing = || DeviceError::Shape(format!("there is no buffer {}", id.0));
        let tensor = self.tensors.get_mut(id.0).ok_or_else(missing)?;
        Ok(std::mem::replace(tensor, Tensor::nothing()))
    }

    fn put(&mut self, id: BufferId, tensor: Tensor<T>) {
        self.tensors[id.0] = tensor;
    }
}

/// Adds or compares members' values in order, rounding each sum as a collective in the buffer's format does.
pub fn reduce<T: Real>(into: &mut [T], from: &[T], reduction: Reduction, format: Format) {
    for (into, from) in into.iter_mut().zip(from) {
        *into = match reduction {
            Reduction::Sum => (*into + *from).round(format),
            Reduction::Max => into.larger(*from),
        };
    }
}

/// The regions of one side of a [`Transfer`]; of a message one, which takes no list.
#[derive(Clone, Debug)]
pub enum Parts<'a> {
    /// One.
    One(&'a Region),
    /// Any number, in order.
    Many(Vec<&'a Region>),
}

impl<'a> Deref for Parts<'a> {
    type Target = [&'a Region];

    fn deref(&self) -> &[&'a Region] {
        match self {
            Parts::One(region) => std::slice::from_ref(region),
            Parts::Many(regions) => regions,
        }
    }
}

impl<'a> FromIterator<&'a Region> for Parts<'a> {
    fn from_iter<I: IntoIterator<Item = &'a Region>>(regions: I) -> Parts<'a> {
        Parts::Many(regions.into_iter().collect())
    }
}

/// Regions whose elements, lane after lane, are combined in order and written to others. One part is a copy.
#[derive(Clone, Debug)]
pub struct Transfer<'a> {
    /// Read.
    pub from: Parts<'a>,
    /// How several parts are combined; a sum is rounded to the first part's format at each step.
    pub reduction: Reduction,
    /// Written, each rounded to its buffer's format.
    pub to: Parts<'a>,
}

impl<'a> Transfer<'a> {
    /// A copy.
    pub fn copy(from: &'a Region, to: &'a Region) -> Transfer<'a> {
        Transfer { from: Parts::One(from), reduction: Reduction::Sum, to: Parts::One(to) }
    }
}

/// Memory, and what can be done in it.
pub trait Device {
    /// The numbers that it computes in.
    type Real: Real;
    /// A run's buffers. A device may have room for one run at a time.
    type Memory;

    /// Memory that holds what the image holds, guard bands included.
    fn upload(&self, image: Buffers<Self::Real>) -> Result<Self::Memory, DeviceError>;

    /// What the memory holds, after all that was asked for.
    fn download<'m>(&self, memory: &'m mut Self::Memory) -> Result<&'m Buffers<Self::Real>, DeviceError>;

    /// Begins all that was asked for, without waiting for it.
    fn submit(&self, memory: &mut Self::Memory) -> Result<(), DeviceError>;

    /// Executes one operation that is neither a message, a collective nor an event.
    fn execute(&self, work: &Work, memory: &mut Self::Memory) -> Result<(), DeviceError>;

    /// Carries out transfers; all of them read before any writes.
    fn transfer(&self, transfers: &[Transfer<'_>], memory: &mut Self::Memory) -> Result<(), DeviceError>;

    /// A number, finite or not, into every element of rows, all heads: what a harness leaves where nobody may look.
    fn poison(
        &self,
        to: BufferId,
        rows: &[Run],
        value: f32,
        memory: &mut Self::Memory,
    ) -> Result<(), DeviceError>;

    /// The host waits until a region can be read.
    fn host_read(&self, region: &Region, memory: &mut Self::Memory) -> Result<(), DeviceError>;

    /// What is asked for from here on is of this *lane*, a stream of a rank; before the first one it is of none. A device
    /// that does everything in the order in which it is asked need not know of lanes.
    fn lane(&self, _lane: usize, _memory: &mut Self::Memory) {}

    /// A mark behind all that the lane was asked for. A number that is used again is of the last mark.
    fn mark(&self, _mark: usize, _memory: &mut Self::Memory) {}

    /// The lane goes on when all before the mark is done.
    fn wait(&self, _mark: usize, _memory: &mut Self::Memory) {}
}

/// The CPU device.
pub struct Cpu<T> {
    kernel: Box<dyn Kernel<T>>,
}

impl<T: Real> Cpu<T> {
    /// A device with the right kernel in serial arithmetic, of the given tiles and roundings of P and dS.
    pub fn new(tiles: Tiles, p: Format, ds: Format) -> Cpu<T> {
        Cpu::with(Box::new(Tiled::new(tiles, p, ds, Serial, &Right)))
    }

    /// A device with this kernel.
    pub fn with(kernel: Box<dyn Kernel<T>>) -> Cpu<T> {
        Cpu { kernel }
    }

    fn attend(&self, attend: &Attend, buffers: &mut Buffers<T>) -> Result<(), DeviceError> {
        let (q_rows, kv_rows) = (buffers.rows(attend.q), buffers.rows(attend.k));
        attend.call.check(q_rows, kv_rows).map_err(|error| DeviceError::Shape(error.to_string()))?;
        let mut out = buffers.take(attend.out)?;
        let mut lse = buffers.take(attend.lse)?;
        let mut max_logit = buffers.take(attend.max_logit)?;
        let forward = emulated::Forward {
            q: buffers.tensor(attend.q),
            k: buffers.tensor(attend.k),
            v: buffers.tensor(attend.v),
            sink: attend.sink.map_or(&[], |sink| buffers.tensor(sink).values()),
            out: &mut out,
            lse: &mut lse,
            max_logit: &mut max_logit,
        };
        self.kernel.forward(&attend.call, forward);
        buffers.put(attend.out, out);
        buffers.put(attend.lse, lse);
        buffers.put(attend.max_logit, max_logit);
        Ok(())
    }

    fn attend_backward(&self, attend: &AttendBackward, buffers: &mut Buffers<T>) -> Result<(), DeviceError> {
        let (q_rows, kv_rows) = (buffers.rows(attend.q), buffers.rows(attend.k));
        attend.call.check(q_rows, kv_rows).map_err(|error| DeviceError::Shape(error.to_string()))?;
        let mut dq = buffers.take(attend.dq)?;
        let mut dk = buffers.take(attend.dk)?;
        let mut dv = buffers.take(attend.dv)?;
        let mut dsink = match attend.sink {
            Some((_, dsink)) => buffers.take(dsink)?,
            None => Tensor::nothing(),
        };
        let backward = emulated::Backward {
            q: buffers.tensor(attend.q),
            k: buffers.tensor(attend.k),
            v: buffers.tensor(attend.v),
            sink: attend.sink.map_or(&[], |(sink, _)| buffers.tensor(sink).values()),
            dout: buffers.tensor(attend.dout),
            out: buffers.tensor(attend.out),
            lse: buffers.tensor(attend.lse),
            dq: &mut dq,
            dk: &mut dk,
            dv: &mut dv,
            dsink: &mut dsink,
        };
        self.kernel.backward(&attend.call, backward);
        buffers.put(attend.dq, dq);
        buffers.put(attend.dk, dk);
        buffers.put(attend.dv, dv);
        if let Some((_, id)) = attend.sink {
            buffers.put(id, dsink);
        }
        Ok(())
    }
}

impl<T: Real> Device for Cpu<T> {
    type Real = T;
    type Memory = Buffers<T>;

    fn upload(&self, image: Buffers<T>) -> Result<Buffers<T>, DeviceError> {
        Ok(image)
    }

    fn download<'m>(&self, buffers: &'m mut Buffers<T>) -> Result<&'m Buffers<T>, DeviceError> {
        Ok(buffers)
    }

    fn submit(&self, _: &mut Buffers<T>) -> Result<(), DeviceError> {
        Ok(())
    }

    fn transfer(&self, transfers: &[Transfer<'_>], buffers: &mut Buffers<T>) -> Result<(), DeviceError> {
        let mut values = std::mem::take(&mut buffers.moving);
        values.clear();
        for transfer in transfers {
            combine(transfer, buffers, &mut values)?;
        }
        let mut rest = &values[..];
        for transfer in transfers {
            let (moved, after) = rest.split_at(buffers.elements(transfer.from[0]));
            transfer.to.iter().try_for_each(|to| buffers.write(to, moved))?;
            rest = after;
        }
        buffers.moving = values;
        Ok(())
    }

    fn poison(
        &self,
        to: BufferId,
        rows: &[Run],
        value: f32,
        buffers: &mut Buffers<T>,
    ) -> Result<(), DeviceError> {
        fill_with(to, rows, T::from_f32(value), buffers)
    }

    fn host_read(&self, region: &Region, buffers: &mut Buffers<T>) -> Result<(), DeviceError> {
        buffers.read(region).map(drop)
    }

    fn execute(&self, work: &Work, buffers: &mut Buffers<T>) -> Result<(), DeviceError> {
        match work {
            Work::Attend(attend) => self.attend(attend, buffers),
            Work::AttendBackward(attend) => self.attend_backward(attend, buffers),
            Work::Merge(merge) => self::merge(merge, buffers),
            Work::ApplySink { sink, out, lse, rows } => apply_sink(*sink, *out, *lse, rows, buffers),
            Work::SinkGradient { sink, dout, out, lse, dsink, rows } => {
                sink_gradient([*sink, *dout, *out, *lse, *dsink], rows, buffers)
            }
            Work::Accumulate { from, to, rows } => each_lane(*from, *to, rows, buffers, |to, from| {
                to.iter_mut().zip(from).for_each(|(to, from)| *to += *from);
            }),
            Work::Copy { from, to, rows } => each_lane(*from, *to, rows, buffers, <[T]>::copy_from_slice),
            Work::Linear { layer, heads, from, to, rows } => {
                linear(*layer, heads, (*from, *to), rows, buffers)
            }
            Work::Rotate { buffer, rows, inverse } => rotate(*buffer, rows, *inverse, buffers),
            Work::Fill { to, rows, value } => fill(*to, rows, *value, buffers),
            Work::Send { .. } | Work::Recv { .. } => Err(DeviceError::NotLocal("messages")),
            Work::AllGather { .. }
            | Work::ReduceScatter { .. }
            | Work::AllToAll { .. }
            | Work::AllReduce { .. } => Err(DeviceError::NotLocal("collectives")),
            Work::RecordEvent(_) | Work::WaitEvent(_) | Work::HostRead(_) => {
                Err(DeviceError::NotLocal("events"))
            }
        }
    }
}

/// The elements that a transfer writes, behind what `values` holds.
fn combine<T: Real>(
    transfer: &Transfer<'_>,
    buffers: &Buffers<T>,
    values: &mut Vec<T>,
) -> Result<(), DeviceError> {
    let nothing = || DeviceError::Shape("a transfer of nothing".into());
    let (first, rest) = transfer.from.split_first().ok_or_else(nothing)?;
    let begin = values.len();
    buffers.read_into(first, values)?;
    let end = values.len();
    let format = buffers.tensor(first.buffer).format();
    for part in rest {
        buffers.read_into(part, values)?;
        if values.len() - end != end - begin {
            return Err(DeviceError::Shape("parts of different sizes are combined".into()));
        }
        let (sum, part) = values[begin..].split_at_mut(end - begin);
        reduce(sum, part, transfer.reduction, format);
        values.truncate(end);
    }
    Ok(())
}

/// Where the real rows of a run lie, all heads, if they lie together; `width` elements are a row.
fn stretch(axes: Axes, rows: &Run, width: usize) -> Option<Range<usize>> {
    (axes == Axes::Rows && rows.step == 1).then(|| rows.offset * width..(rows.offset + rows.len) * width)
}

impl<T: Real> Buffers<T> {
    /// Checks that rows exist.
    pub fn check_rows(&self, id: BufferId, rows: &[Run]) -> Result<(), DeviceError> {
        self.check(id, rows, &(0..self.heads(id)))
    }

    /// Checks that both sides of row pairs exist, in buffers apart, that pairs are of equal length, and that the buffers
    /// have the same heads and lanes.
    pub fn check_pairs(&self, from: BufferId, to: BufferId, rows: &[RowPair]) -> Result<(), DeviceError> {
        self.check_each(from, rows.iter().map(|(read, _)| read), &(0..self.heads(from)))?;
        self.check_each(to, rows.iter().map(|(_, written)| written), &(0..self.heads(to)))?;
        if from == to {
            return Err(DeviceError::Shape("an operation reads the buffer that it writes".into()));
        }
        let same = self.heads(from) == self.heads(to) && self.dim(from) == self.dim(to);
        if !same || rows.iter().any(|(read, written)| read.len != written.len) {
            let (from, to) = (self.tensor(from).name(), self.tensor(to).name());
            return Err(DeviceError::Shape(format!("{from} and {to} do not fit each other")));
        }
        Ok(())
    }
}

/// Combines lanes with others; what comes of it is rounded to the format that it is stored in.
fn each_lane<T: Real>(
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

/// The elements of a row and head of a tensor that was taken out of its buffers.
fn lane_of<T: Real>(tensor: &mut Tensor<T>, axes: Axes, row: usize, head: usize) -> &mut [T] {
    match axes {
        Axes::Rows => tensor.lane_mut(row, head),
        Axes::Statistic => tensor.lane_mut(head, row),
        Axes::Heads => tensor.lane_mut(head, 0),
    }
}

/// Copies the rank's heads out of hidden rows, or into them and zeros to their other heads.
fn linear<T: Real>(
    layer: Layer,
    heads: &Range<usize>,
    (from, to): (BufferId, BufferId),
    rows: &[RowPair],
    buffers: &mut Buffers<T>,
) -> Result<(), DeviceError> {
    let own = 0..heads.len();
    let (read, written) = match layer {
        Layer::Column => (heads.clone(), own),
        Layer::Row => (own, heads.clone()),
    };
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

/// The base of rotary frequencies.
const ROTARY_BASE: f64 = 10_000.0;

/// See [`Work::Rotate`].
fn rotate<T: Real>(
    id: BufferId,
    rows: &[Rotated],
    inverse: bool,
    buffers: &mut Buffers<T>,
) -> Result<(), DeviceError> {
    let runs: Vec<Run> = rows.iter().map(|rotated| rotated.rows).collect();
    buffers.check_rows(id, &runs)?;
    let format = buffers.tensor(id).format();
    for Rotated { rows, position, step } in rows {
        for (i, row) in rows.real_rows().enumerate() {
            let position = (position + step * i) as f64;
            for head in 0..buffers.heads(id) {
                turn(buffers.lane_mut(id, row, head), if inverse { -position } else { position }, format);
            }
        }
    }
    Ok(())
}

/// One row of one head.
fn turn<T: Real>(lane: &mut [T], position: f64, format: Format) {
    let half = lane.len() / 2;
    for j in 0..half {
        let frequency = libm::pow(ROTARY_BASE, -(j as f64) / half as f64);
        let (sin, cos) = libm::sincos(position * frequency);
        let (sin, cos) = (T::from_f64(sin), T::from_f64(cos));
        let (a, b) = (lane[j], lane[j + half]);
        lane[j] = (a * cos - b * sin).round(format);
        lane[j + half] = (a * sin + b * cos).round(format);
    }
}

fn fill<T: Real>(
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

fn fill_with<T: Real>(
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

/// `ln(e^a + e^b)`; −∞ and −∞ make −∞, so that empty statistics are the identity.
pub(crate) fn log_add<T: Real>(a: T, b: T) -> T {
    let largest = a.larger(b);
    if largest == T::NEG_INFINITY {
        return T::NEG_INFINITY;
    }
    largest + ((a - largest).exp() + (b - largest).exp()).ln()
}

/// `e^(a − total)`, 0 for an empty a.
pub(crate) fn share<T: Real>(a: T, total: T) -> T {
    if a == T::NEG_INFINITY { T::ZERO } else { (a - total).exp() }
}

fn merge<T: Real>(merge: &Merge, buffers: &mut Buffers<T>) -> Result<(), DeviceError> {
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

/// What a merge makes of two statistics: the new one, and what both outs are multiplied by.
struct Weights<T> {
    total: T,
    keep: T,
    add: T,
}

fn weights<T: Real>(style: MergeStyle, old: T, new: T) -> Weights<T> {
    match style {
        MergeStyle::Running => {
            let total = log_add(old, new);
            Weights { total, keep: share(old, total), add: share(new, total) }
        }
        MergeStyle::Statistics => Weights { total: log_add(old, new), keep: T::ONE, add: T::ZERO },
        MergeStyle::Weighted { .. } => Weights { total: old, keep: T::ONE, add: share(new, old) },
    }
}

fn apply_sink<T: Real>(
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

fn sink_gradient<T: Real>(
    [sink, dout, out, lse, dsink]: [BufferId; 5],
    rows: &[Run],
    buffers: &mut Buffers<T>,
) -> Result<(), DeviceError> {
    for id in [dout, out, lse] {
        buffers.check_rows(id, rows)?;
    }
    for head in 0..buffers.heads(dsink) {
        let mut sum = T::ZERO;
        for row in rows.iter().flat_map(Run::real_rows) {
            let lse = buffers.lane(lse, row, head)[0];
            if lse != T::NEG_INFINITY {
                let lanes = buffers.lane(dout, row, head).iter().zip(buffers.lane(out, row, head));
                let d = lanes.fold(T::ZERO, |sum, (a, b)| sum + *a * *b);
                sum -= (buffers.lane(sink, 0, head)[0] - lse).exp() * d;
            }
        }
        buffers.lane_mut(dsink, 0, head)[0] = sum;
    }
    Ok(())
}
