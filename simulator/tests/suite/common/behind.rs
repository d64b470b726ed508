//! A device that works far behind its host, as streams of a GPU may: ranks' threads have all ended when it begins. Each
//! lane is then in order, and waits for marks, signs and parcels alone.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};

use seamproof_oracle::Run;
use seamproof_simulator::device::{
    Arrival, Buffers, Cpu, CpuParcel, CpuPart, Device, DeviceError, Divided, RankPart, Transfer, ended,
};
use seamproof_simulator::schedule::{BufferId, Reduction, Region, Schedule, Work};

use super::Draws;

/// The device. The seed draws which lane proceeds.
pub(crate) struct Behind {
    pub(crate) cpu: Cpu<f32>,
    pub(crate) seed: u64,
    /// Whether anything is written to where something will arrive.
    pub(crate) poisons: bool,
}

/// What a rank has asked for, in order, by lane.
pub(crate) struct Part<'p> {
    device: &'p Behind,
    /// Number of events and parcels of all ranks.
    made: &'p AtomicUsize,
    asked: Vec<(usize, Asked)>,
    marks: BTreeMap<usize, usize>,
}

/// A parcel that will be there once an event has come.
pub(crate) struct Parcel {
    number: usize,
    there: usize,
}

enum Asked {
    Work(Box<Work>),
    Poison(Vec<Region>),
    Event(usize),
    Wait(usize),
    Take(usize, Vec<Region>),
    Put(Vec<Put>),
}

/// An arrival: parcels by their numbers.
struct Put {
    from: Vec<(usize, usize)>,
    reduction: Reduction,
    to: Vec<Region>,
}

fn owned(regions: &[&Region]) -> Vec<Region> {
    regions.iter().map(|&region| region.clone()).collect()
}

impl Part<'_> {
    fn ask(&mut self, lane: usize, asked: Asked) {
        self.asked.push((lane, asked));
    }

    fn event(&mut self, lane: usize) -> usize {
        let event = self.made.fetch_add(1, Ordering::Relaxed);
        self.ask(lane, Asked::Event(event));
        event
    }
}

impl RankPart for Part<'_> {
    type Sign = usize;
    type Parcel = Parcel;

    fn execute(&mut self, lane: usize, work: &Work) -> Result<(), DeviceError> {
        self.ask(lane, Asked::Work(Box::new(work.clone())));
        Ok(())
    }

    fn host_read(&mut self, _: usize, _: &Region) -> Result<(), DeviceError> {
        Err(DeviceError::Failed("nothing is there before all ranks have ended".into()))
    }

    fn poison(&mut self, lane: usize, regions: &[&Region]) -> Result<(), DeviceError> {
        if self.device.poisons {
            self.ask(lane, Asked::Poison(owned(regions)));
        }
        Ok(())
    }

    fn sign(&mut self, lane: usize) -> Result<usize, DeviceError> {
        Ok(self.event(lane))
    }

    fn heed(&mut self, lane: usize, sign: &usize) -> Result<(), DeviceError> {
        self.ask(lane, Asked::Wait(*sign));
        Ok(())
    }

    fn take(&mut self, lane: usize, regions: &[&Region]) -> Result<Parcel, DeviceError> {
        let number = self.made.fetch_add(1, Ordering::Relaxed);
        self.ask(lane, Asked::Take(number, owned(regions)));
        Ok(Parcel { number, there: self.event(lane) })
    }

    fn put(&mut self, lane: usize, arrivals: &[Arrival<'_, Parcel>]) -> Result<(), DeviceError> {
        let parcels = arrivals.iter().flat_map(|arrival| &arrival.from);
        parcels.for_each(|(parcel, _)| self.ask(lane, Asked::Wait(parcel.there)));
        let put = |arrival: &Arrival<'_, Parcel>| Put {
            from: arrival.from.iter().map(|(parcel, index)| (parcel.number, *index)).collect(),
            reduction: arrival.reduction,
            to: owned(&arrival.to),
        };
        self.ask(lane, Asked::Put(arrivals.iter().map(put).collect()));
        Ok(())
    }

    fn mark(&mut self, lane: usize, mark: usize) -> Result<(), DeviceError> {
        let event = self.event(lane);
        self.marks.insert(mark, event);
        Ok(())
    }

    fn wait(&mut self, lane: usize, mark: usize) -> Result<(), DeviceError> {
        self.ask(lane, Asked::Wait(self.marks[&mark]));
        Ok(())
    }
}

/// Lanes of all ranks, and what has come so far.
struct Lanes {
    lanes: BTreeMap<(usize, usize), VecDeque<Asked>>,
    events: BTreeSet<usize>,
    parcels: BTreeMap<usize, CpuParcel<f32>>,
}

impl Lanes {
    fn ready(&self) -> Vec<(usize, usize)> {
        let can = |asked: &Asked| !matches!(asked, Asked::Wait(event) if !self.events.contains(event));
        let heads = self.lanes.iter().filter_map(|(lane, queue)| Some((*lane, queue.front()?)));
        heads.filter(|(_, asked)| can(asked)).map(|(lane, _)| lane).collect()
    }

    fn carry_out(&mut self, part: &mut CpuPart<'_, f32>, asked: Asked) -> Result<(), DeviceError> {
        match asked {
            Asked::Work(work) => part.execute(0, &work),
            Asked::Poison(regions) => part.poison(0, &regions.iter().collect::<Vec<_>>()),
            Asked::Take(number, regions) => {
                let parcel = part.take(0, &regions.iter().collect::<Vec<_>>())?;
                self.parcels.insert(number, parcel);
                Ok(())
            }
            Asked::Put(puts) => {
                let parcel = |&(number, index): &(usize, usize)| (&self.parcels[&number], index);
                let mut arrival = |put: &Put| -> Result<(), DeviceError> {
                    let (from, to) = (put.from.iter().map(parcel).collect(), put.to.iter().collect());
                    part.put(0, &[Arrival { from, reduction: put.reduction, to }])
                };
                puts.iter().try_for_each(&mut arrival)
            }
            Asked::Event(event) => {
                self.events.insert(event);
                Ok(())
            }
            Asked::Wait(_) => Ok(()),
        }
    }

    fn drain(&mut self, parts: &mut [CpuPart<'_, f32>], seed: u64) -> Result<(), DeviceError> {
        let mut draws = Draws(seed);
        loop {
            let ready = self.ready();
            if ready.is_empty() {
                break;
            }
            let lane = draws.pick(&ready);
            let asked = self.lanes.get_mut(&lane).and_then(VecDeque::pop_front);
            asked.map_or(Ok(()), |asked| self.carry_out(&mut parts[lane.0], asked))?;
        }
        assert!(self.lanes.values().all(VecDeque::is_empty), "lanes wait for one another in a circle");
        Ok(())
    }
}

impl Divided for Behind {
    type Part<'p> = Part<'p>;

    fn divide<R, E: From<DeviceError>>(
        &self,
        schedule: &Schedule,
        memory: &mut Buffers<f32>,
        run: impl FnOnce(&mut [Part<'_>]) -> Result<R, E>,
    ) -> Result<R, E> {
        let made = AtomicUsize::new(0);
        let part = |_| Part { device: self, made: &made, asked: Vec::new(), marks: BTreeMap::new() };
        let mut parts: Vec<Part<'_>> = (0..schedule.ranks.len()).map(part).collect();
        let ran = run(&mut parts);
        let mut lanes: BTreeMap<(usize, usize), VecDeque<Asked>> = BTreeMap::new();
        for (rank, part) in parts.into_iter().enumerate() {
            for (lane, asked) in part.asked {
                lanes.entry((rank, lane)).or_default().push_back(asked);
            }
        }
        let mut lanes = Lanes { lanes, events: BTreeSet::new(), parcels: BTreeMap::new() };
        ended(ran, [self.cpu.divide(schedule, memory, |parts| lanes.drain(parts, self.seed))])
    }
}

impl Device for Behind {
    type Real = f32;
    type Memory = Buffers<f32>;

    fn upload(&self, image: Buffers<f32>) -> Result<Buffers<f32>, DeviceError> {
        self.cpu.upload(image)
    }

    fn download<'m>(&self, memory: &'m mut Buffers<f32>) -> Result<&'m Buffers<f32>, DeviceError> {
        self.cpu.download(memory)
    }

    fn submit(&self, memory: &mut Buffers<f32>) -> Result<(), DeviceError> {
        self.cpu.submit(memory)
    }

    fn execute(&self, work: &Work, memory: &mut Buffers<f32>) -> Result<(), DeviceError> {
        self.cpu.execute(work, memory)
    }

    fn transfer(&self, transfers: &[Transfer<'_>], memory: &mut Buffers<f32>) -> Result<(), DeviceError> {
        self.cpu.transfer(transfers, memory)
    }

    fn poison(
        &self,
        to: BufferId,
        rows: &[Run],
        value: f32,
        memory: &mut Buffers<f32>,
    ) -> Result<(), DeviceError> {
        Device::poison(&self.cpu, to, rows, value, memory)
    }

    fn host_read(&self, region: &Region, memory: &mut Buffers<f32>) -> Result<(), DeviceError> {
        Device::host_read(&self.cpu, region, memory)
    }
}
