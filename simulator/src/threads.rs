//! Ranks as threads: a schedule run by a host thread for each rank, as on several devices.
//!
//! Each rank has memory of its own and goes through its streams in an order of its own, while the others do the same.
//! They meet in messages and collectives alone. What travels between them is *late* by a drawn number of *looks*: a
//! stream that waits for it looks again and again, and other streams of the rank go on between two looks. Until it has
//! arrived, the place to which it goes holds *poison* (NaN), so that work that does not wait for it shows. A message is
//! read from its sender only when its receiver has come: a sender that writes into it too early sends something else.
//!
//! No bit of a right schedule's results differs from a run by [`executor`](crate::executor): streams wait for each
//! other by events, and sums over ranks are made in order of members. Those of a wrong one depend on the machine: the
//! draws of a rank are the same each time, and the moments at which others come are not.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

use seamproof_oracle::Format;

use crate::Real;
use crate::device::{Buffers, Cpu, Device, DeviceError, reduce};
use crate::executor::{Counts, ExecuteError, ExecutedPasses, awaited, of_phase, reads};
use crate::schedule::{Reduction, Region, Schedule, Work};

/// Largest number of looks by which anything is late.
const LOOKS_MAX: usize = 6;

/// Runs a phase of `schedule` with a thread for each rank. The phases of one run share their memory. `choose` makes the
/// choices of a rank: of one of `n` things each time, and any answer below n is legal.
pub fn execute_on_threads<T: Real, C: FnMut(usize) -> usize>(
    schedule: &Schedule,
    phase: ExecutedPasses,
    device: &Cpu<T>,
    memory: &mut Buffers<T>,
    choose: impl Fn(usize) -> C + Sync,
) -> Result<Counts, ExecuteError> {
    let world = World { state: Mutex::default(), changed: Condvar::new(), ranks: schedule.ranks.len() };
    let parts = memory.split(schedule);
    let run = |(rank, memory): (usize, Buffers<T>)| {
        let panicked = format!("the thread of rank {rank} has panicked");
        let mut rank = Rank::new(schedule, phase, device, &world, (rank, memory), choose(rank));
        let ended = catch_unwind(AssertUnwindSafe(|| rank.run()));
        // The others would wait for ever for a rank that does not say that it has ended.
        world.end(ended.unwrap_or(Err(ExecuteError::Stuck(panicked))));
        (rank.memory, rank.counts)
    };
    let run = &run;
    let ranks: Vec<(Buffers<T>, Counts)> = thread::scope(|scope| {
        let start = |part| scope.spawn(move || run(part));
        let started: Vec<_> = parts.into_iter().enumerate().map(start).collect();
        started.into_iter().filter_map(|rank| rank.join().ok()).collect()
    });
    let (parts, counts): (Vec<_>, Vec<_>) = ranks.into_iter().unzip();
    memory.join(schedule, parts);
    let sum = |sum: Counts, one: Counts| Counts {
        operations: sum.operations + one.operations,
        host_reads: sum.host_reads + one.host_reads,
    };
    match world.lock().failed.take() {
        Some(error) => Err(error),
        None => Ok(counts.into_iter().fold(Counts::default(), sum)),
    }
}

/// Sending and receiving rank.
type Pair = (usize, usize);

/// What one member brings to a collective.
struct Part<T> {
    /// Elements of each region that is read.
    values: Vec<Vec<T>>,
    /// Kind of the collective, by which members agree.
    kind: (std::mem::Discriminant<Work>, Option<Reduction>),
    /// Format of the first region's buffer, in which a sum is rounded.
    format: Format,
}

/// One collective.
struct Collective<T> {
    /// Parts of the members that have come, by rank.
    parts: BTreeMap<usize, Arc<Part<T>>>,
    /// Number of members that have taken all parts.
    taken: usize,
}

/// What the ranks know of each other.
struct Shared<T> {
    /// Number of receives that each pair has posted.
    received: BTreeMap<Pair, usize>,
    /// Messages on their way, by pair and number.
    messages: BTreeMap<(Pair, usize), Vec<Vec<T>>>,
    /// Collectives that not every member has left, by communicator and number.
    collectives: BTreeMap<(usize, usize), Collective<T>>,
    /// Number of changes so far.
    changes: usize,
    /// Number of ranks that wait and have seen the last change.
    idle: usize,
    /// Number of ranks that have ended.
    ended: usize,
    failed: Option<ExecuteError>,
}

impl<T> Default for Shared<T> {
    fn default() -> Shared<T> {
        Shared {
            received: BTreeMap::new(),
            messages: BTreeMap::new(),
            collectives: BTreeMap::new(),
            changes: 0,
            idle: 0,
            ended: 0,
            failed: None,
        }
    }
}

impl<T> Shared<T> {
    fn change(&mut self) {
        self.changes += 1;
        self.idle = 0;
    }
}

struct World<T> {
    state: Mutex<Shared<T>>,
    changed: Condvar,
    ranks: usize,
}

impl<T> World<T> {
    fn lock(&self) -> MutexGuard<'_, Shared<T>> {
        // A rank that panicked has ended: its state is only read.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes what the ranks know, and wakes those that wait.
    fn tell(&self, change: impl FnOnce(&mut Shared<T>)) {
        let mut state = self.lock();
        change(&mut state);
        state.change();
        drop(state);
        self.changed.notify_all();
    }

    /// Notes that a rank has ended, with its error if it has one.
    fn end(&self, ended: Result<(), ExecuteError>) {
        self.tell(|state| {
            state.ended += 1;
            state.failed = state.failed.take().or(ended.err());
        });
    }

    /// Waits for a change after `seen`. Returns false if none will come, or some rank has failed.
    fn wait(&self, seen: usize, stand: impl FnOnce() -> String) -> bool {
        let mut state = self.lock();
        if state.changes == seen {
            state.idle += 1;
            if state.idle + state.ended == self.ranks {
                state.failed = state.failed.take().or(Some(ExecuteError::Stuck(stand())));
                state.change();
                self.changed.notify_all();
                return false;
            }
        }
        while state.changes == seen && state.failed.is_none() {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.failed.is_none()
    }
}

/// An operation that has been launched and waits for other ranks.
#[derive(Clone, Copy)]
struct Pending {
    operation: usize,
    /// The message of a pair, or the collective of a communicator, by its number.
    meets: Meets,
    /// Number of looks by which it is late.
    looks: usize,
}

#[derive(Clone, Copy)]
enum Meets {
    Sends(Pair, usize),
    Receives(Pair, usize),
    Joins(usize, usize),
}

/// One stream of a rank.
struct Lane {
    operations: Vec<usize>,
    next: usize,
    /// Launched operations, which end together with `launched` others.
    pending: Vec<Pending>,
    launched: usize,
}

struct Rank<'a, T: Real, C> {
    schedule: &'a Schedule,
    device: &'a Cpu<T>,
    world: &'a World<T>,
    rank: usize,
    memory: Buffers<T>,
    lanes: Vec<Lane>,
    done: Vec<bool>,
    awaited: Vec<Option<usize>>,
    host_reads: Vec<usize>,
    sent: BTreeMap<Pair, usize>,
    entered: BTreeMap<usize, usize>,
    choose: C,
    counts: Counts,
}

impl<'a, T: Real, C: FnMut(usize) -> usize> Rank<'a, T, C> {
    fn new(
        schedule: &'a Schedule,
        phase: ExecutedPasses,
        device: &'a Cpu<T>,
        world: &'a World<T>,
        (rank, memory): (usize, Buffers<T>),
        choose: C,
    ) -> Rank<'a, T, C> {
        let program = &schedule.ranks[rank];
        let mut streams: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for (index, operation) in of_phase(program, phase) {
            streams.entry(operation.stream).or_default().push(index);
        }
        let lane = |operations| Lane { operations, next: 0, pending: Vec::new(), launched: 0 };
        Rank {
            schedule,
            device,
            world,
            rank,
            memory,
            lanes: streams.into_values().map(lane).collect(),
            done: vec![false; program.operations.len()],
            awaited: awaited(program, phase),
            host_reads: reads(program, phase).into(),
            sent: BTreeMap::new(),
            entered: BTreeMap::new(),
            choose,
            counts: Counts::default(),
        }
    }

    /// Runs the rank's program to its end.
    fn run(&mut self) -> Result<(), ExecuteError> {
        loop {
            let seen = {
                let state = self.world.lock();
                if state.failed.is_some() {
                    return Ok(());
                }
                state.changes
            };
            let ready: Vec<usize> = (0..self.lanes.len()).filter(|&lane| self.can_go_on(lane)).collect();
            if !ready.is_empty() {
                let chosen = (self.choose)(ready.len()).min(ready.len() - 1);
                self.advance(ready[chosen])?;
                continue;
            }
            let ended = self.lanes.iter().all(|lane| lane.next == lane.operations.len());
            if ended || !self.world.wait(seen, || self.stand()) {
                return Ok(());
            }
        }
    }

    fn work(&self, operation: usize) -> &'a Work {
        &self.schedule.ranks[self.rank].operations[operation].work
    }

    fn head(&self, lane: usize) -> Option<usize> {
        let lane = &self.lanes[lane];
        lane.operations.get(lane.next).copied()
    }

    fn can_go_on(&self, lane: usize) -> bool {
        let Some(operation) = self.head(lane) else { return false };
        if !self.lanes[lane].pending.is_empty() {
            let state = self.world.lock();
            return self.lanes[lane].pending.iter().any(|pending| self.has_come(pending, &state));
        }
        let host_waits = self.host_reads.iter().any(|&read| read < operation && !self.done[read]);
        let recorded = || self.awaited[operation].is_none_or(|record| self.done[record]);
        !host_waits && (!matches!(self.work(operation), Work::WaitEvent(_)) || recorded())
    }

    /// Whether the others have done what a launched operation waits for.
    fn has_come(&self, pending: &Pending, state: &Shared<T>) -> bool {
        match pending.meets {
            Meets::Sends(pair, number) => state.received.get(&pair).is_some_and(|count| *count > number),
            Meets::Receives(pair, number) => state.messages.contains_key(&(pair, number)),
            Meets::Joins(communicator, number) => {
                let members = self.schedule.communicators.get(communicator).map_or(0, Vec::len);
                let collective = state.collectives.get(&(communicator, number));
                collective.is_some_and(|collective| collective.parts.len() == members)
            }
        }
    }

    fn advance(&mut self, lane: usize) -> Result<(), ExecuteError> {
        let Some(operation) = self.head(lane) else { return Ok(()) };
        if !self.lanes[lane].pending.is_empty() {
            return self.meet(lane);
        }
        match self.work(operation) {
            Work::Send { .. } | Work::Recv { .. } => self.launch_group(lane),
            Work::AllGather { .. }
            | Work::ReduceScatter { .. }
            | Work::AllToAll { .. }
            | Work::AllReduce { .. } => self.enter(lane, operation),
            Work::RecordEvent(_) | Work::WaitEvent(_) => {
                self.finish(lane, 1);
                Ok(())
            }
            Work::HostRead(region) => {
                self.device.host_read(region, &mut self.memory).map_err(self.failed(operation))?;
                self.counts.host_reads += 1;
                self.finish(lane, 1);
                Ok(())
            }
            local => {
                self.device.execute(local, &mut self.memory).map_err(self.failed(operation))?;
                self.finish(lane, 1);
                Ok(())
            }
        }
    }

    fn failed(&self, operation: usize) -> impl Fn(DeviceError) -> ExecuteError + use<T, C> {
        let rank = self.rank;
        move |error| ExecuteError::Device { rank, operation, error }
    }

    fn finish(&mut self, lane: usize, count: usize) {
        let Lane { operations, next, .. } = &mut self.lanes[lane];
        operations[*next..*next + count].iter().for_each(|&operation| self.done[operation] = true);
        *next += count;
        self.counts.operations += count;
    }

    /// Returns the number of messages that are launched together, from the lane's head on.
    fn group(&self, lane: usize) -> usize {
        let group_of = |operation: usize| match self.work(operation) {
            Work::Send { group, .. } | Work::Recv { group, .. } => *group,
            _ => None,
        };
        let rest = &self.lanes[lane].operations[self.lanes[lane].next..];
        match rest.first().and_then(|&first| group_of(first)) {
            Some(group) => rest.iter().take_while(|&&operation| group_of(operation) == Some(group)).count(),
            None => 1,
        }
    }

    fn launch_group(&mut self, lane: usize) -> Result<(), ExecuteError> {
        let (next, launched) = (self.lanes[lane].next, self.group(lane));
        for index in next..next + launched {
            let operation = self.lanes[lane].operations[index];
            let meets = match self.work(operation) {
                Work::Send { to, .. } => {
                    let (pair, count) = ((self.rank, *to), self.sent.entry((self.rank, *to)).or_default());
                    *count += 1;
                    Meets::Sends(pair, *count - 1)
                }
                Work::Recv { from, regions, .. } => {
                    self.poison(regions).map_err(self.failed(operation))?;
                    let (pair, mut number) = ((*from, self.rank), 0);
                    self.world.tell(|state| {
                        let count = state.received.entry(pair).or_default();
                        number = *count;
                        *count += 1;
                    });
                    Meets::Receives(pair, number)
                }
                _ => continue,
            };
            self.launch(lane, operation, meets);
        }
        self.lanes[lane].launched = launched;
        Ok(())
    }

    /// Keeps an operation that waits for other ranks.
    fn launch(&mut self, lane: usize, operation: usize, meets: Meets) {
        let looks = (self.choose)(LOOKS_MAX + 1).min(LOOKS_MAX);
        self.lanes[lane].pending.push(Pending { operation, meets, looks });
    }

    /// Writes NaN to where something will arrive.
    fn poison(&mut self, regions: &[Region]) -> Result<(), DeviceError> {
        for region in regions {
            let elements = self.memory.read(region)?.len();
            self.memory.write(region, &vec![T::from_f32(f32::NAN); elements])?;
        }
        Ok(())
    }

    fn enter(&mut self, lane: usize, operation: usize) -> Result<(), ExecuteError> {
        let work = self.work(operation);
        let (communicator, read, written, reduction) = match work {
            Work::AllGather { communicator, from, to } => {
                (communicator, vec![from.clone()], to.clone(), None)
            }
            Work::ReduceScatter { communicator, from, to } => {
                (communicator, from.clone(), vec![to.clone()], Some(Reduction::Sum))
            }
            Work::AllToAll { communicator, send, recv } => (communicator, send.clone(), recv.clone(), None),
            Work::AllReduce { communicator, region, reduction } => {
                (communicator, vec![region.clone()], vec![region.clone()], Some(*reduction))
            }
            _ => return Ok(()),
        };
        let failed = self.failed(operation);
        let values = read.iter().map(|region| self.memory.read(region)).collect::<Result<_, _>>();
        let format = read.first().map(|first| self.memory.tensor(first.buffer).format());
        let nothing = || failed(DeviceError::Shape("a collective of nothing".into()));
        let part = Part {
            values: values.map_err(&failed)?,
            kind: (std::mem::discriminant(work), reduction),
            format: format.ok_or_else(nothing)?,
        };
        self.poison(&written).map_err(&failed)?;
        let count = self.entered.entry(*communicator).or_default();
        let number = *count;
        *count += 1;
        self.world.tell(|state| {
            let nobody = || Collective { parts: BTreeMap::new(), taken: 0 };
            let collective = state.collectives.entry((*communicator, number)).or_insert_with(nobody);
            collective.parts.insert(self.rank, Arc::new(part));
        });
        self.launch(lane, operation, Meets::Joins(*communicator, number));
        self.lanes[lane].launched = 1;
        Ok(())
    }

    /// Looks at one launched operation that others have come to. It ends unless it is late.
    fn meet(&mut self, lane: usize) -> Result<(), ExecuteError> {
        let come: Vec<usize> = {
            let state = self.world.lock();
            let pending = self.lanes[lane].pending.iter().enumerate();
            pending.filter(|(_, pending)| self.has_come(pending, &state)).map(|(index, _)| index).collect()
        };
        let chosen = (self.choose)(come.len()).min(come.len().saturating_sub(1));
        let Some(&index) = come.get(chosen) else { return Ok(()) };
        let pending = &mut self.lanes[lane].pending[index];
        if pending.looks > 0 {
            pending.looks -= 1;
            thread::yield_now();
            return Ok(());
        }
        let Pending { operation, meets, .. } = self.lanes[lane].pending.remove(index);
        match (self.work(operation), meets) {
            (Work::Send { regions, .. }, Meets::Sends(pair, number)) => {
                let values = regions.iter().map(|region| self.memory.read(region)).collect::<Result<_, _>>();
                let values = values.map_err(self.failed(operation))?;
                self.world.tell(|state| drop(state.messages.insert((pair, number), values)));
            }
            (Work::Recv { regions, .. }, Meets::Receives(pair, number)) => {
                let values = self.world.lock().messages.remove(&(pair, number)).unwrap_or_default();
                if values.len() != regions.len() {
                    let what = "a message and its receiver have different regions";
                    return Err(self.failed(operation)(DeviceError::Shape(what.into())));
                }
                for (region, values) in regions.iter().zip(&values) {
                    self.memory.write(region, values).map_err(self.failed(operation))?;
                }
            }
            (work, Meets::Joins(communicator, number)) => {
                let parts = self.take(communicator, number)?;
                self.combine(operation, work, communicator, &parts)?;
            }
            _ => {}
        }
        if self.lanes[lane].pending.is_empty() {
            let launched = self.lanes[lane].launched;
            self.finish(lane, launched);
        }
        Ok(())
    }

    /// Returns the parts of a collective, in order of members. The last member removes them.
    fn take(&self, communicator: usize, number: usize) -> Result<Vec<Arc<Part<T>>>, ExecuteError> {
        let mismatch = || ExecuteError::Mismatch { communicator };
        let members = self.schedule.communicators.get(communicator).ok_or_else(mismatch)?;
        let key = (communicator, number);
        let mut state = self.world.lock();
        let collective = state.collectives.get_mut(&key).ok_or_else(mismatch)?;
        let of_member = |member: &usize| collective.parts.get(member).cloned();
        let parts: Vec<Arc<Part<T>>> =
            members.iter().map(of_member).collect::<Option<_>>().ok_or_else(mismatch)?;
        collective.taken += 1;
        if collective.taken == members.len() {
            state.collectives.remove(&key);
        }
        match parts.iter().all(|part| part.kind == parts[0].kind) {
            true => Ok(parts),
            false => Err(mismatch()),
        }
    }

    /// Writes this member's results of a collective.
    fn combine(
        &mut self,
        operation: usize,
        work: &Work,
        communicator: usize,
        parts: &[Arc<Part<T>>],
    ) -> Result<(), ExecuteError> {
        let mismatch = || ExecuteError::Mismatch { communicator };
        let mine = self.schedule.communicators[communicator].iter().position(|member| *member == self.rank);
        let mine = mine.ok_or_else(mismatch)?;
        let written: Vec<(&Region, Vec<T>)> = match work {
            Work::AllGather { to, .. } => {
                to.iter().zip(parts).map(|(to, part)| (to, part.values[0].clone())).collect()
            }
            Work::AllToAll { recv, .. } => {
                let of = |part: &Arc<Part<T>>| part.values.get(mine).cloned();
                let values: Option<Vec<Vec<T>>> = parts.iter().map(of).collect();
                recv.iter().zip(values.ok_or_else(mismatch)?).collect()
            }
            Work::ReduceScatter { to, .. } => {
                vec![(to, reduced(parts, mine, Reduction::Sum).ok_or_else(mismatch)?)]
            }
            Work::AllReduce { region, reduction, .. } => {
                vec![(region, reduced(parts, 0, *reduction).ok_or_else(mismatch)?)]
            }
            _ => Vec::new(),
        };
        for (region, values) in written {
            self.memory.write(region, &values).map_err(self.failed(operation))?;
        }
        Ok(())
    }

    /// Returns where the rank stands, for a run that is stuck.
    fn stand(&self) -> String {
        let at = |lane: usize| self.head(lane).map(|operation| format!("operation {operation}"));
        let lanes: Vec<String> = (0..self.lanes.len()).filter_map(at).collect();
        format!("rank {} waits at {}", self.rank, lanes.join(", "))
    }
}

/// Returns the combination of all members' regions of one index, in order of members; `None` if their sizes differ.
fn reduced<T: Real>(parts: &[Arc<Part<T>>], index: usize, reduction: Reduction) -> Option<Vec<T>> {
    let (first, rest) = parts.split_first()?;
    let mut sum = first.values.get(index)?.clone();
    for part in rest {
        let values = part.values.get(index).filter(|values| values.len() == sum.len())?;
        reduce(&mut sum, values, reduction, first.format);
    }
    Some(sum)
}
