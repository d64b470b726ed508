//! A [`Device`] owns a run's memory, executes local operations on it and moves regions between ranks. [`Cpu`] is the
//! device without hardware. It computes in f32 with the roundings of a real kernel, or in f64 without roundings.
//!
//! A run begins and ends with an *image* of all buffers on the host. Between the two, the memory is the device's own. A
//! device may work behind its host: [`Device::submit`] starts the work requested so far, and [`Device::download`] waits
//! for its end.

mod buffers;
mod by_rank;
mod error;
mod operations;
mod tables;

use std::ops::Deref;

use seamproof_oracle::amax::Amaxes;
use seamproof_oracle::{Format, Run};

pub use buffers::{Buffers, reduce};
pub use by_rank::{Arrival, CpuParcel, CpuPart, Divided, RankPart, ended};
pub use error::DeviceError;

use crate::emulated::{self, Kernel, Right, Roundings, Serial, TiledKernel, Tiles};
use crate::schedule::{Attend, AttendBackward, BufferId, Reduction, Region, Work};
use crate::{GuardedTensor, Real};

/// Regions of one side of a [`Transfer`]. A message has one region and takes no list.
#[derive(Clone, Debug)]
pub enum TransferSide<'a> {
    /// One region.
    One(&'a Region),
    /// Any number of regions, in order.
    Many(Vec<&'a Region>),
}

impl<'a> Deref for TransferSide<'a> {
    type Target = [&'a Region];

    fn deref(&self) -> &[&'a Region] {
        match self {
            TransferSide::One(region) => std::slice::from_ref(region),
            TransferSide::Many(regions) => regions,
        }
    }
}

impl<'a> FromIterator<&'a Region> for TransferSide<'a> {
    fn from_iter<I: IntoIterator<Item = &'a Region>>(regions: I) -> TransferSide<'a> {
        TransferSide::Many(regions.into_iter().collect())
    }
}

/// Regions whose elements are combined in order, lane after lane, and written to other regions. One part is a copy.
#[derive(Clone, Debug)]
pub struct Transfer<'a> {
    /// The regions that are read.
    pub from: TransferSide<'a>,
    /// Manner in which several parts are combined. A sum is rounded to the first part's format at each step.
    pub reduction: Reduction,
    /// The regions that are written. Elements are rounded to the format of each region's buffer.
    pub to: TransferSide<'a>,
}

impl<'a> Transfer<'a> {
    /// Returns a copy of one region to another.
    pub fn copy(from: &'a Region, to: &'a Region) -> Transfer<'a> {
        Transfer { from: TransferSide::One(from), reduction: Reduction::Sum, to: TransferSide::One(to) }
    }
}

/// Memory, and the operations on it.
pub trait Device {
    /// Numbers in which the device computes.
    type Real: Real;
    /// Buffers of one run. A device may have room for one run at a time.
    type Memory;

    /// Returns memory with the content of the image, guard bands included.
    fn upload(&self, image: Buffers<Self::Real>) -> Result<Self::Memory, DeviceError>;

    /// Returns the memory's content after all requested work.
    fn download<'m>(&self, memory: &'m mut Self::Memory) -> Result<&'m Buffers<Self::Real>, DeviceError>;

    /// Starts all requested work and does not wait for its end.
    fn submit(&self, memory: &mut Self::Memory) -> Result<(), DeviceError>;

    /// Executes one operation that is neither a message, a collective nor an event.
    fn execute(&self, work: &Work, memory: &mut Self::Memory) -> Result<(), DeviceError>;

    /// Carries out transfers. All of them read before any writes.
    fn transfer(&self, transfers: &[Transfer<'_>], memory: &mut Self::Memory) -> Result<(), DeviceError>;

    /// Writes a number, finite or not, to every element of rows, all heads. A harness puts it where nobody may look.
    fn poison(
        &self,
        to: BufferId,
        rows: &[Run],
        value: f32,
        memory: &mut Self::Memory,
    ) -> Result<(), DeviceError>;

    /// Makes the host wait until a region can be read.
    fn host_read(&self, region: &Region, memory: &mut Self::Memory) -> Result<(), DeviceError>;

    /// Assigns the following work to this *lane*, a stream of a rank. Work before the first call belongs to no lane. A
    /// device that does everything in the requested order may ignore lanes.
    fn lane(&self, _lane: usize, _memory: &mut Self::Memory) {}

    /// Sets a mark behind all work of the lane so far. A number that is used again means its last mark.
    fn mark(&self, _mark: usize, _memory: &mut Self::Memory) {}

    /// Makes the lane wait until all work before the mark is done.
    fn wait(&self, _mark: usize, _memory: &mut Self::Memory) {}
}

/// The CPU device.
pub struct Cpu<T> {
    kernel: Box<dyn Kernel<T>>,
}

impl<T: Real> Cpu<T> {
    /// Returns a device with the right kernel in serial arithmetic, with the given tiles and roundings of P and dS.
    pub fn new(tiles: Tiles, p: Format, ds: Format) -> Cpu<T> {
        Cpu::with(Box::new(TiledKernel::new(tiles, Roundings::new(p, ds), Serial, &Right)))
    }

    /// Returns a device with this kernel.
    pub fn with(kernel: Box<dyn Kernel<T>>) -> Cpu<T> {
        Cpu { kernel }
    }

    /// Returns the largest magnitudes of what the kernel has quantised so far, on all ranks.
    pub fn amaxes(&self) -> Amaxes {
        self.kernel.amaxes()
    }

    fn attend(&self, attend: &Attend, buffers: &mut Buffers<T>) -> Result<(), DeviceError> {
        let (q_rows, kv_rows) = (buffers.rows(attend.q), buffers.rows(attend.k));
        let call = tables::told(&attend.call, attend.table.as_ref(), buffers)?;
        call.check(q_rows, kv_rows).map_err(|error| DeviceError::Shape(error.to_string()))?;
        let mut out = buffers.take(attend.out)?;
        let mut lse = buffers.take(attend.lse)?;
        let mut max_logit = buffers.take(attend.max_logit)?;
        let forward = emulated::ForwardLaunch {
            q: buffers.tensor(attend.q),
            k: buffers.tensor(attend.k),
            v: buffers.tensor(attend.v),
            sink: attend.sink.map_or(&[], |sink| buffers.tensor(sink).values()),
            descales: &attend.descales,
            out: &mut out,
            lse: &mut lse,
            max_logit: &mut max_logit,
        };
        self.kernel.forward(&call, forward);
        buffers.put(attend.out, out);
        buffers.put(attend.lse, lse);
        buffers.put(attend.max_logit, max_logit);
        Ok(())
    }

    fn attend_backward(&self, attend: &AttendBackward, buffers: &mut Buffers<T>) -> Result<(), DeviceError> {
        let (q_rows, kv_rows) = (buffers.rows(attend.q), buffers.rows(attend.k));
        let call = tables::told(&attend.call, attend.table.as_ref(), buffers)?;
        call.check(q_rows, kv_rows).map_err(|error| DeviceError::Shape(error.to_string()))?;
        let mut dq = buffers.take(attend.dq)?;
        let mut dk = buffers.take(attend.dk)?;
        let mut dv = buffers.take(attend.dv)?;
        let mut dsink = match attend.sink {
            Some((_, dsink)) => buffers.take(dsink)?,
            None => GuardedTensor::nothing(),
        };
        let backward = emulated::BackwardLaunch {
            q: buffers.tensor(attend.q),
            k: buffers.tensor(attend.k),
            v: buffers.tensor(attend.v),
            sink: attend.sink.map_or(&[], |(sink, _)| buffers.tensor(sink).values()),
            descales: &attend.descales,
            dout: buffers.tensor(attend.dout),
            out: buffers.tensor(attend.out),
            lse: buffers.tensor(attend.lse),
            dq: &mut dq,
            dk: &mut dk,
            dv: &mut dv,
            dsink: &mut dsink,
        };
        self.kernel.backward(&call, backward);
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
        operations::fill_with(to, rows, T::from_f32(value), buffers)
    }

    fn host_read(&self, region: &Region, buffers: &mut Buffers<T>) -> Result<(), DeviceError> {
        buffers.read(region).map(drop)
    }

    fn execute(&self, work: &Work, buffers: &mut Buffers<T>) -> Result<(), DeviceError> {
        match work {
            Work::Attend(attend) => self.attend(attend, buffers),
            Work::AttendBackward(attend) => self.attend_backward(attend, buffers),
            Work::Merge(merge) => operations::merge(merge, &*self.kernel, buffers),
            Work::ApplySink { sink, out, lse, rows } => {
                operations::apply_sink(*sink, *out, *lse, rows, buffers)
            }
            Work::SinkGradient { sink, dout, out, lse, dsink, rows, descales } => {
                let of_out = self.kernel.descale_of_out();
                operations::sink_gradient([*sink, *dout, *out, *lse, *dsink], rows, descales, of_out, buffers)
            }
            Work::Accumulate { from, to, rows } => {
                operations::each_lane(*from, *to, rows, buffers, |to, from| {
                    to.iter_mut().zip(from).for_each(|(to, from)| *to += *from);
                })
            }
            Work::Copy { from, to, rows } => {
                operations::each_lane(*from, *to, rows, buffers, <[T]>::copy_from_slice)
            }
            Work::MakeSegments { to, from } => tables::make(*to, from, buffers),
            Work::CopyValid { from, to, table, .. } => {
                let valid = tables::read(table, buffers)?;
                let rows: Vec<_> = valid.iter().map(|segment| (segment.q, segment.q)).collect();
                operations::each_lane(*from, *to, &rows, buffers, <[T]>::copy_from_slice)
            }
            Work::Linear { layer, heads, from, to, rows } => {
                operations::linear(*layer, heads, (*from, *to), rows, buffers)
            }
            Work::Rotate { buffer, rows, inverse } => operations::rotate(*buffer, rows, *inverse, buffers),
            Work::Fill { to, rows, value } => operations::fill(*to, rows, *value, buffers),
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

/// Appends the elements that a transfer writes to `values`.
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
