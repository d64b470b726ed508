//! A device whose ranks run at once: each has memory of its own, and a thread of the host.
//!
//! A rank's part of a device is asked for work on *lanes*, the streams of the rank. A lane does it in order, and maybe
//! later: no call waits for the work that it asks for, but for a read by the host. Parts meet in two things alone. A
//! *sign* says that a lane has come to some point. A *parcel* holds what regions had when a lane came to some point.

use super::buffers::{Buffers, reduce};
use super::error::DeviceError;
use super::{Cpu, Device};
use crate::Real;
use crate::schedule::{Reduction, Region, Schedule, Work};
use seamproof_oracle::Format;

/// A device whose memory can be divided among ranks.
pub trait Divided: Device {
    /// Part of one rank.
    type Part<'p>: RankPart
    where
        Self: 'p;

    /// Calls `run` with the part of each member of a schedule, in order of its members. When all that was asked of them
    /// is done, they are one memory again. An error of `run` comes before one of what was asked for ([`ended`]).
    fn divide<R, E: From<DeviceError>>(
        &self,
        schedule: &Schedule,
        memory: &mut Self::Memory,
        run: impl FnOnce(&mut [Self::Part<'_>]) -> Result<R, E>,
    ) -> Result<R, E>;
}

/// Returns what ranks say themselves, or else the first error with which their work ended. A rank that gives up leaves
/// its work half done, so that an error of the work may follow from it, and says less.
pub fn ended<R, E: From<DeviceError>>(
    ran: Result<R, E>,
    ends: impl IntoIterator<Item = Result<(), DeviceError>>,
) -> Result<R, E> {
    let ran = ran?;
    ends.into_iter().collect::<Result<(), DeviceError>>()?;
    Ok(ran)
}

/// A rank's part of a device.
pub trait RankPart: Send {
    /// Sign that a lane has come to some point.
    type Sign: Send;
    /// Contents of regions, taken when a lane came to some point.
    type Parcel: Send + Sync;

    /// Executes one operation that is neither a message, a collective nor an event.
    fn execute(&mut self, lane: usize, work: &Work) -> Result<(), DeviceError>;

    /// Makes the host wait until a region can be read.
    fn host_read(&mut self, lane: usize, region: &Region) -> Result<(), DeviceError>;

    /// Writes NaN to where something will arrive.
    fn poison(&mut self, lane: usize, regions: &[&Region]) -> Result<(), DeviceError>;

    /// Returns a sign that all work of the lane so far is done.
    fn sign(&mut self, lane: usize) -> Result<Self::Sign, DeviceError>;

    /// Makes the lane wait for another rank's sign.
    fn heed(&mut self, lane: usize, sign: &Self::Sign) -> Result<(), DeviceError>;

    /// Returns the contents of regions, for this rank and for others.
    fn take(&mut self, lane: usize, regions: &[&Region]) -> Result<Self::Parcel, DeviceError>;

    /// Writes what has arrived, once the parcels are there.
    fn put(&mut self, lane: usize, arrivals: &[Arrival<'_, Self::Parcel>]) -> Result<(), DeviceError>;

    /// Makes the next work of the lane late by a time that grows with `looks`, once all that it waits for is there. A
    /// part that does everything at once may ignore this, marks and waits.
    fn delay(&mut self, _lane: usize, _looks: usize) -> Result<(), DeviceError> {
        Ok(())
    }

    /// Sets a mark behind all work of the lane so far.
    fn mark(&mut self, _lane: usize, _mark: usize) -> Result<(), DeviceError> {
        Ok(())
    }

    /// Makes the lane wait until all work before a mark of this rank is done.
    fn wait(&mut self, _lane: usize, _mark: usize) -> Result<(), DeviceError> {
        Ok(())
    }
}

/// Contents of parcels that are combined in order, and the regions of one rank that they are written to.
#[derive(Debug)]
pub struct Arrival<'a, P> {
    /// Parcels, each with the place of the contents among the regions that were taken.
    pub from: Vec<(&'a P, usize)>,
    /// Manner in which several parts are combined. A sum is rounded to the first part's format at each step.
    pub reduction: Reduction,
    /// The regions that are written. Elements are rounded to the format of each region's buffer.
    pub to: Vec<&'a Region>,
}

/// A rank's part of the CPU device. It does everything at once.
pub struct CpuPart<'p, T> {
    device: &'p Cpu<T>,
    buffers: Buffers<T>,
}

/// Contents of regions on the CPU device.
pub struct CpuParcel<T>(Vec<Taken<T>>);

/// Elements of one region, and the format of its buffer.
struct Taken<T> {
    values: Vec<T>,
    format: Format,
}

impl<T: Real> Divided for Cpu<T> {
    type Part<'p>
        = CpuPart<'p, T>
    where
        Self: 'p;

    fn divide<R, E: From<DeviceError>>(
        &self,
        schedule: &Schedule,
        memory: &mut Buffers<T>,
        run: impl FnOnce(&mut [CpuPart<'_, T>]) -> Result<R, E>,
    ) -> Result<R, E> {
        let parts = memory.split(schedule).into_iter();
        let mut parts: Vec<CpuPart<'_, T>> = parts.map(|buffers| CpuPart { device: self, buffers }).collect();
        let ran = run(&mut parts);
        memory.join(schedule, parts.into_iter().map(|part| part.buffers).collect());
        ran
    }
}

impl<T: Real> RankPart for CpuPart<'_, T> {
    type Sign = ();
    type Parcel = CpuParcel<T>;

    fn execute(&mut self, _: usize, work: &Work) -> Result<(), DeviceError> {
        self.device.execute(work, &mut self.buffers)
    }

    fn host_read(&mut self, _: usize, region: &Region) -> Result<(), DeviceError> {
        self.device.host_read(region, &mut self.buffers)
    }

    fn poison(&mut self, _: usize, regions: &[&Region]) -> Result<(), DeviceError> {
        for region in regions {
            let elements = self.buffers.read(region)?.len();
            self.buffers.write(region, &vec![T::from_f32(f32::NAN); elements])?;
        }
        Ok(())
    }

    fn sign(&mut self, _: usize) -> Result<(), DeviceError> {
        Ok(())
    }

    fn heed(&mut self, _: usize, (): &()) -> Result<(), DeviceError> {
        Ok(())
    }

    fn take(&mut self, _: usize, regions: &[&Region]) -> Result<CpuParcel<T>, DeviceError> {
        let taken = |region: &&Region| {
            let values = self.buffers.read(region)?;
            Ok(Taken { values, format: self.buffers.tensor(region.buffer).format() })
        };
        regions.iter().map(taken).collect::<Result<_, _>>().map(CpuParcel)
    }

    fn put(&mut self, _: usize, arrivals: &[Arrival<'_, CpuParcel<T>>]) -> Result<(), DeviceError> {
        for arrival in arrivals {
            let values = combined(arrival)?;
            arrival.to.iter().try_for_each(|to| self.buffers.write(to, &values))?;
        }
        Ok(())
    }
}

/// Returns the elements that an arrival writes.
fn combined<T: Real>(arrival: &Arrival<'_, CpuParcel<T>>) -> Result<Vec<T>, DeviceError> {
    let nothing = || DeviceError::Shape("nothing has arrived".into());
    let parts: Option<Vec<&Taken<T>>> =
        arrival.from.iter().map(|&(parcel, index)| parcel.0.get(index)).collect();
    let parts = parts.ok_or_else(nothing)?;
    let (first, rest) = parts.split_first().ok_or_else(nothing)?;
    let mut sum = first.values.clone();
    for part in rest {
        if part.values.len() != sum.len() {
            return Err(DeviceError::Shape("parts of different sizes are combined".into()));
        }
        reduce(&mut sum, &part.values, arrival.reduction, first.format);
    }
    Ok(sum)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ranks_own_error_comes_before_those_of_its_lanes() {
        let failed = |what: &str| DeviceError::Shape(what.into());
        let lanes = || [Ok(()), Err(failed("a lane")), Err(failed("another"))];
        assert_eq!(ended::<(), _>(Err(failed("the rank")), lanes()), Err(failed("the rank")));
        assert_eq!(ended(Ok::<_, DeviceError>(7), lanes()), Err(failed("a lane")));
        assert_eq!(ended(Ok::<_, DeviceError>(7), [Ok(())]), Ok(7));
    }
}
