//! Ranks at once on one GPU, each by a thread of the host.
//!
//! Each lane of a rank is a CUDA stream. All ranks have disjoint parts of one stretch of memory. What a rank asks for
//! is launched on the lane's stream, with its tables and scratch in memory of the rank alone. The host waits for no
//! result, though sending a table may last until the lane's own work has ended. Streams wait for marks of their own
//! rank, for signs of receivers and for parcels of other ranks, all by events. Each event is recorded before a stream is
//! told to wait for it, so that streams never wait for one another in a circle.
//!
//! A parcel is a copy. A receiver writes it to its place itself, late by the time of a kernel that only waits. Until
//! then, poison lies there.

use std::collections::BTreeMap;

use cudarc::driver::CudaEvent;
use seamproof_oracle::{Format, Run};
use seamproof_simulator::device::{self, Arrival, DeviceError, Divided, RankPart};
use seamproof_simulator::schedule::{Axes, BufferId, Reduction, Region, Schedule, Work};

use super::cuda::{CudaDevice, DeviceOptions, failed};
use super::operations::part;
use super::run::CudaMemory;
use super::workspace::{ALIGNMENT, Piece, RunMemory, Workspace};
use crate::attend::WeightFormats;
use crate::codec::element_bytes;
use crate::error::KernelError;
use crate::pairs::{DeviceRegion, Written};
use crate::view::View;

/// The cycles of a multiprocessor for which a look makes a lane late: some microseconds.
const CYCLES_OF_A_LOOK: u32 = 1 << 13;

/// A rank's part of a run: its streams, and what is recorded for them.
pub struct CudaPart<'p> {
    workspace: &'p mut Workspace,
    formats: WeightFormats,
    options: DeviceOptions,
    memory: CudaMemory,
    marks: BTreeMap<usize, CudaEvent>,
    /// Looks by which the next work is late.
    late: usize,
}

/// Contents of regions, in a rank's own memory once an event has come.
pub struct CudaParcel {
    piece: Piece,
    regions: Vec<Taken>,
    there: CudaEvent,
}

/// Where the contents of a region lie in a parcel.
#[derive(Clone, Copy)]
struct Taken {
    start: usize,
    /// Rows, heads and elements of each.
    shape: [usize; 3],
    format: Format,
}

impl Taken {
    fn bytes(&self) -> usize {
        self.shape.iter().product::<usize>() * element_bytes(self.format)
    }

    fn region<'a>(&self, piece: &'a Piece) -> Result<DeviceRegion<'a>, KernelError> {
        let area = piece.area()?.part(self.start..self.start + self.bytes())?;
        let [rows, heads, _] = self.shape;
        let view = View::rows(area, self.shape, self.format);
        Ok(DeviceRegion { view, rows: Run::packed(0, rows, rows), heads: 0..heads })
    }
}

/// Returns the buffers of regions.
fn buffers(regions: &[&Region]) -> Vec<BufferId> {
    regions.iter().map(|region| region.buffer).collect()
}

/// Returns the stream of a lane. Each GPU has a stream of its own, which is that of no lane.
fn stream(lane: usize) -> usize {
    1 + lane
}

impl Divided for CudaDevice<'_> {
    type Part<'p>
        = CudaPart<'p>
    where
        Self: 'p;

    fn divide<R, E: From<DeviceError>>(
        &self,
        schedule: &Schedule,
        memory: &mut CudaMemory,
        run: impl FnOnce(&mut [CudaPart<'_>]) -> Result<R, E>,
    ) -> Result<R, E> {
        // The ranks' streams begin after all that was asked for before.
        self.launch(memory).and_then(|()| self.workspace.gpu.finish()).map_err(failed)?;
        self.workspace.reserve_ranks(schedule.members.len()).map_err(failed)?;
        let mut ranks = self.workspace.ranks.borrow_mut();
        let images = memory.image.split(schedule);
        let mut parts: Vec<CudaPart<'_>> = { ranks.iter_mut().zip(images) }
            .map(|(workspace, image)| {
                workspace.memory.share(&self.workspace.memory);
                let (formats, options, memory) = (self.formats, self.options, memory.of_rank(image));
                CudaPart { workspace, formats, options, memory, marks: BTreeMap::new(), late: 0 }
            })
            .collect();
        let ran = run(&mut parts);
        // All of them end, whatever one says.
        let ended: Vec<_> = parts.iter().map(|part| part.workspace.gpu.finish_all()).collect();
        memory.image.join(schedule, parts.into_iter().map(|part| part.memory.image).collect());
        memory.current = false;
        for rank in ranks.iter() {
            rank.memory.let_go();
            rank.arena.borrow_mut().clear();
            self.workspace.count_with(rank);
        }
        device::ended(ran, ended.into_iter().map(|ended| ended.map_err(failed)))
    }
}

impl CudaPart<'_> {
    /// Launches what is recorded on a lane.
    fn ask(
        &mut self,
        lane: usize,
        record: impl FnOnce(&CudaDevice<'_>, &mut CudaMemory) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        record(&self.workspace.device(self.formats, self.options), &mut self.memory)?;
        self.launch(lane).map_err(failed)
    }

    fn launch(&mut self, lane: usize) -> Result<(), KernelError> {
        self.memory.place_transfers();
        let Workspace { gpu, memory, arena, .. } = &*self.workspace;
        let tables = std::mem::take(&mut self.memory.tables);
        let scratch = std::mem::take(&mut self.memory.scratch);
        let requests = std::mem::take(&mut self.memory.requests);
        let late = std::mem::take(&mut self.late);
        let [for_tables, for_scratch] = {
            let mut arena = arena.borrow_mut();
            [arena.piece(gpu, tables.len())?, arena.piece(gpu, scratch)?]
        };
        memory.with(|memory| {
            let frame = RunMemory { memory, tables: for_tables.area()?, scratch: for_scratch.area()? };
            gpu.on(stream(lane), || {
                gpu.send(frame.tables, &tables)?;
                if late > 0 {
                    gpu.hold_up(late as u32 * CYCLES_OF_A_LOOK)?;
                }
                gpu.in_blocks(self.options.blocks, || {
                    requests.commands().iter().try_for_each(|command| command.launch(gpu, &frame))
                })
            })
        })
    }

    /// Checks that regions are there, and returns where a parcel holds their contents.
    fn packed(&self, regions: &[&Region]) -> Result<Vec<Taken>, DeviceError> {
        let mut end = 0;
        let packed = |region: &&Region| {
            self.memory.image.check(region.buffer, &[region.rows], &region.heads)?;
            let place = self.memory.place(region.buffer).map_err(failed)?;
            let rows = if place.axes == Axes::Heads { 1 } else { region.rows.len };
            let shape = [rows, region.heads.len(), place.dim];
            let taken = Taken { start: end, shape, format: place.format };
            end = (end + taken.bytes()).next_multiple_of(ALIGNMENT);
            Ok(taken)
        };
        regions.iter().map(packed).collect()
    }
}

impl RankPart for CudaPart<'_> {
    type Sign = CudaEvent;
    type Parcel = CudaParcel;

    fn execute(&mut self, lane: usize, work: &Work) -> Result<(), DeviceError> {
        self.ask(lane, |device, memory| device.record_work(work, memory))
    }

    fn host_read(&mut self, lane: usize, region: &Region) -> Result<(), DeviceError> {
        self.memory.image.check(region.buffer, &[region.rows], &region.heads)?;
        self.workspace.gpu.finish_on(stream(lane)).map_err(failed)
    }

    fn poison(&mut self, lane: usize, regions: &[&Region]) -> Result<(), DeviceError> {
        self.packed(regions)?;
        self.ask(lane, |device, memory| {
            let places = memory.places.clone();
            device.with_transfers(memory, &buffers(regions), |table, area| {
                regions.iter().try_for_each(|region| {
                    let place = &places[region.buffer.0];
                    let to = part(place, region.rows, region.heads.clone(), area)?;
                    table.push(&Written::Value(f32::NAN), &[to])
                })
            })
        })
    }

    fn sign(&mut self, lane: usize) -> Result<CudaEvent, DeviceError> {
        self.workspace.gpu.mark(stream(lane)).map_err(failed)
    }

    fn heed(&mut self, lane: usize, sign: &CudaEvent) -> Result<(), DeviceError> {
        self.workspace.gpu.wait(stream(lane), sign).map_err(failed)
    }

    fn take(&mut self, lane: usize, regions: &[&Region]) -> Result<CudaParcel, DeviceError> {
        let taken = self.packed(regions)?;
        let bytes = taken.last().map_or(0, |last| last.start + last.bytes());
        let Workspace { gpu, arena, .. } = &*self.workspace;
        let piece = arena.borrow_mut().piece(gpu, bytes).map_err(failed)?;
        self.ask(lane, |device, memory| {
            let places = memory.places.clone();
            device.with_transfers(memory, &buffers(regions), |table, area| {
                regions.iter().zip(&taken).try_for_each(|(region, taken)| {
                    let place = &places[region.buffer.0];
                    let from = part(place, region.rows, region.heads.clone(), area)?;
                    table.push(&Written::Parts(Reduction::Sum, vec![from]), &[taken.region(&piece)?])
                })
            })
        })?;
        Ok(CudaParcel { there: self.sign(lane)?, piece, regions: taken })
    }

    fn put(&mut self, lane: usize, arrivals: &[Arrival<'_, CudaParcel>]) -> Result<(), DeviceError> {
        for (parcel, _) in arrivals.iter().flat_map(|arrival| &arrival.from) {
            self.heed(lane, &parcel.there)?;
        }
        let targets: Vec<&Region> = arrivals.iter().flat_map(|arrival| &arrival.to).copied().collect();
        self.packed(&targets)?;
        self.ask(lane, |device, memory| {
            let places = memory.places.clone();
            device.with_transfers(memory, &buffers(&targets), |table, area| {
                arrivals.iter().try_for_each(|arrival| {
                    let from = arrival.from.iter().map(|&(parcel, index)| {
                        let taken = parcel.regions.get(index);
                        taken.ok_or_else(|| KernelError::shape("nothing has arrived"))?.region(&parcel.piece)
                    });
                    let from = Written::Parts(arrival.reduction, from.collect::<Result<_, _>>()?);
                    let to = arrival.to.iter().map(|region| {
                        part(&places[region.buffer.0], region.rows, region.heads.clone(), area)
                    });
                    table.push(&from, &to.collect::<Result<Vec<_>, _>>()?)
                })
            })
        })
    }

    fn delay(&mut self, _: usize, looks: usize) -> Result<(), DeviceError> {
        self.late = looks;
        Ok(())
    }

    fn mark(&mut self, lane: usize, mark: usize) -> Result<(), DeviceError> {
        let event = self.sign(lane)?;
        self.marks.insert(mark, event);
        Ok(())
    }

    fn wait(&mut self, lane: usize, mark: usize) -> Result<(), DeviceError> {
        let gpu = &self.workspace.gpu;
        self.marks.get(&mark).map_or(Ok(()), |event| gpu.wait(stream(lane), event)).map_err(failed)
    }
}
