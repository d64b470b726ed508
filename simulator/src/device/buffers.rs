//! All buffers of a run on the host: their content, their rows and lanes, and reads and writes of regions.

use std::ops::Range;
use std::sync::Arc;

use seamproof_oracle::{Format, Run};

use super::error::DeviceError;
use crate::schedule::{Axes, Buffer, BufferId, Reduction, Region, RowPair, Schedule};
use crate::{Damage, GuardedTensor, Real};

/// All buffers of a schedule.
#[derive(Clone, Debug)]
pub struct Buffers<T> {
    pub(super) tensors: Vec<GuardedTensor<T>>,
    pub(super) axes: Vec<Axes>,
    rows: Vec<usize>,
    pub(super) heads: Vec<usize>,
    /// Elements that a transfer carries. The allocation is kept for the next transfer.
    pub(super) moving: Vec<T>,
}

impl<T: Real> Buffers<T> {
    /// Returns unwritten buffers, one for each buffer of the schedule.
    pub fn unwritten(schedule: &Schedule) -> Buffers<T> {
        Buffers::filled(schedule, |_| T::UNWRITTEN)
    }

    /// Returns buffers, each filled with a number.
    pub(crate) fn filled(schedule: &Schedule, value: impl Fn(&Buffer) -> T) -> Buffers<T> {
        let buffers = &schedule.buffers;
        let tensor = |b: &Buffer| GuardedTensor::filled(Arc::clone(&b.name), b.shape(), b.format, value(b));
        Buffers {
            tensors: buffers.iter().map(tensor).collect(),
            axes: buffers.iter().map(|b| b.axes).collect(),
            rows: buffers.iter().map(|b| b.rows).collect(),
            heads: buffers.iter().map(|b| b.heads).collect(),
            moving: Vec::new(),
        }
    }

    /// Adds the buffers of another schedule behind these, as [`side_by_side`](crate::schedule::side_by_side()) does.
    pub fn extend(&mut self, other: Buffers<T>) {
        self.tensors.extend(other.tensors);
        self.axes.extend(other.axes);
        self.rows.extend(other.rows);
        self.heads.extend(other.heads);
    }

    /// Takes the buffers of each member of a schedule out. In a member's part, those of others have no rows and heads.
    pub fn split(&mut self, schedule: &Schedule) -> Vec<Buffers<T>> {
        let mut of_rank = |rank: usize| {
            let own = |id: usize| schedule.buffers[id].rank == rank;
            let kept = |sizes: &[usize]| -> Vec<usize> {
                sizes.iter().enumerate().map(|(id, size)| if own(id) { *size } else { 0 }).collect()
            };
            let mut take = |id: usize| match own(id) {
                true => std::mem::replace(&mut self.tensors[id], GuardedTensor::nothing()),
                false => GuardedTensor::nothing(),
            };
            Buffers {
                tensors: (0..schedule.buffers.len()).map(&mut take).collect(),
                axes: self.axes.clone(),
                rows: kept(&self.rows),
                heads: kept(&self.heads),
                moving: Vec::new(),
            }
        };
        schedule.members.iter().map(|&rank| of_rank(rank)).collect()
    }

    /// Puts the buffers of each member back.
    pub fn join(&mut self, schedule: &Schedule, mut parts: Vec<Buffers<T>>) {
        for (id, buffer) in schedule.buffers.iter().enumerate() {
            if let Some(part) = schedule.place(buffer.rank).and_then(|place| parts.get_mut(place)) {
                self.tensors[id] = std::mem::replace(&mut part.tensors[id], GuardedTensor::nothing());
            }
        }
    }

    /// Returns the tensor behind a buffer.
    pub fn tensor(&self, id: BufferId) -> &GuardedTensor<T> {
        &self.tensors[id.0]
    }

    /// Returns the elements of a row and head. A buffer without rows has row 0.
    #[inline]
    pub fn lane(&self, id: BufferId, row: usize, head: usize) -> &[T] {
        match self.axes[id.0] {
            Axes::Rows => self.tensors[id.0].lane(row, head),
            Axes::Statistic => self.tensors[id.0].lane(head, row),
            Axes::Heads => self.tensors[id.0].lane(head, 0),
        }
    }

    /// Returns the elements of a row and head, for changes.
    #[inline]
    pub fn lane_mut(&mut self, id: BufferId, row: usize, head: usize) -> &mut [T] {
        match self.axes[id.0] {
            Axes::Rows => self.tensors[id.0].lane_mut(row, head),
            Axes::Statistic => self.tensors[id.0].lane_mut(head, row),
            Axes::Heads => self.tensors[id.0].lane_mut(head, 0),
        }
    }

    /// Returns the elements of a row, all heads, of a buffer whose rows are outermost.
    pub(crate) fn row_mut(&mut self, id: BufferId, row: usize) -> &mut [T] {
        self.tensors[id.0].slice_mut(row)
    }

    /// Returns the tensor behind a buffer, for a device that brings its memory back.
    pub fn tensor_mut(&mut self, id: BufferId) -> &mut GuardedTensor<T> {
        &mut self.tensors[id.0]
    }

    /// Returns the tensors, in order of buffers.
    pub fn tensors(&self) -> &[GuardedTensor<T>] {
        &self.tensors
    }

    /// Returns the meaning of a buffer's axes.
    pub fn axes(&self, id: BufferId) -> Axes {
        self.axes[id.0]
    }

    /// Returns the number of rows of a buffer; 0 if there is no such buffer.
    pub fn rows(&self, id: BufferId) -> usize {
        self.rows.get(id.0).copied().unwrap_or(0)
    }

    /// Returns the number of heads of a buffer; 0 if there is no such buffer.
    pub fn heads(&self, id: BufferId) -> usize {
        self.heads.get(id.0).copied().unwrap_or(0)
    }

    /// Returns the number of elements of a row and head.
    pub fn dim(&self, id: BufferId) -> usize {
        if self.axes[id.0] == Axes::Rows { self.tensors[id.0].shape()[2] } else { 1 }
    }

    /// Returns the guard bands that changed.
    pub fn damage(&self) -> Vec<Damage> {
        self.tensors.iter().flat_map(GuardedTensor::damage).collect()
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

    /// Returns the rows of a region, or row 0 alone for a buffer without rows.
    fn region_rows(&self, region: &Region) -> Run {
        if self.axes[region.buffer.0] == Axes::Heads { Run::packed(0, 1, 1) } else { region.rows }
    }

    /// Returns the number of elements of a region that exists.
    pub(super) fn elements(&self, region: &Region) -> usize {
        self.region_rows(region).len * region.heads.len() * self.dim(region.buffer)
    }

    /// Returns the number of elements of a row, all heads.
    pub(super) fn width(&self, id: BufferId) -> usize {
        self.heads[id.0] * self.dim(id)
    }

    /// Returns the range of a region's elements, if they lie together.
    fn region_stretch(&self, region: &Region) -> Option<Range<usize>> {
        let id = region.buffer;
        (region.heads == (0..self.heads[id.0]))
            .then(|| stretch(self.axes[id.0], &region.rows, self.width(id)))
            .flatten()
    }

    /// Returns the elements of a region, row after row.
    pub fn read(&self, region: &Region) -> Result<Vec<T>, DeviceError> {
        let mut values = Vec::new();
        self.read_into(region, &mut values)?;
        Ok(values)
    }

    /// Appends the elements of a region, row after row, to `values`.
    pub(super) fn read_into(&self, region: &Region, values: &mut Vec<T>) -> Result<(), DeviceError> {
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

    /// Takes a tensor out. Others can then be read while it is written.
    pub(super) fn take(&mut self, id: BufferId) -> Result<GuardedTensor<T>, DeviceError> {
        let missing = || DeviceError::Shape(format!("there is no buffer {}", id.0));
        let tensor = self.tensors.get_mut(id.0).ok_or_else(missing)?;
        Ok(std::mem::replace(tensor, GuardedTensor::nothing()))
    }

    pub(super) fn put(&mut self, id: BufferId, tensor: GuardedTensor<T>) {
        self.tensors[id.0] = tensor;
    }

    /// Checks that rows exist.
    pub fn check_rows(&self, id: BufferId, rows: &[Run]) -> Result<(), DeviceError> {
        self.check(id, rows, &(0..self.heads(id)))
    }

    /// Checks row pairs: both sides exist and are in different buffers, pairs are of equal length, and the buffers have
    /// the same heads and lanes.
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

/// Returns the range of a run's real rows, all heads, if they lie together. A row has `width` elements.
pub(super) fn stretch(axes: Axes, rows: &Run, width: usize) -> Option<Range<usize>> {
    (axes == Axes::Rows && rows.step == 1).then(|| rows.offset * width..(rows.offset + rows.len) * width)
}

/// Adds or compares members' values in order. Each sum is rounded like that of a collective in the buffer's format.
pub fn reduce<T: Real>(into: &mut [T], from: &[T], reduction: Reduction, format: Format) {
    let both = into.len().min(from.len());
    let into = &mut into[..both];
    let pairs = into.iter_mut().zip(from);
    match reduction {
        Reduction::Sum => {
            pairs.for_each(|(into, from)| *into += *from);
            T::round_all(into, format);
        }
        Reduction::Max => pairs.for_each(|(into, from)| *into = into.larger(*from)),
    }
}
