//! Ranks as threads: a schedule run by a host thread for each rank that is not idle, as on several devices.
//!
//! Each rank has a [part](RankPart) of the device with memory of its own, and goes through its streams in an order of
//! its own, while the others do the same. They meet in messages and collectives alone. What travels between them is
//! *late* by a drawn number of *looks*: a stream that waits for it looks again and again, and other streams of the rank
//! go on between two looks. On a device that works behind its host, a stream is late by a time for each look as well,
//! and so is some of its other work. Until something has arrived, the place to which it goes holds *poison* (NaN), so
//! that work that does not wait for it shows. A message is read from its sender only when its receiver has come: a
//! sender that writes into it too early sends something else.
//!
//! No bit of a right schedule's results differs from a run by [`executor`](crate::executor): streams wait for each
//! other by events, and sums over ranks are made in order of members. Those of a wrong one depend on the machine: the
//! draws of a rank are the same each time, and the moments at which others come are not.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

use crate::device::{Arrival, DeviceError, Divided, RankPart, Transfer};
use crate::executor::{
    Counts, ExecuteError, ExecutedPasses, awaited, check_peers, collective, launched_together, message,
    of_phase, reads,
};
use crate::schedule::{Region, Schedule, Work};

/// Largest number of looks by which anything is late.
const LOOKS_MAX: usize = 6;
/// Share of local work that is late, one in so many.
const LATE: usize = 4;

/// Runs a phase of `schedule` with a thread for each of its members. The phases of one run share their memory. `choose`
/// makes the choices of a rank of the world: of one of `n` things each time, and any answer below n is legal.
pub fn execute_on_threads<D: Divided, C: FnMut(usize) -> usize>(
    schedule: &Schedule,
    phase: ExecutedPasses,
    device: &D,
    memory: &mut D::Memory,
    choose: impl Fn(usize) -> C + Sync,
) -> Result<Counts, ExecuteError> {
    let run = |parts: &mut [D::Part<'_>]| run_ranks(schedule, phase, parts, choose);
    device.divide(schedule, memory, run)
}

/// Runs a thread for each member's part.
fn run_ranks<P: RankPart, C: FnMut(usize) -> usize>(
    schedule: &Schedule,
    phase: ExecutedPasses,
    parts: &mut [P],
    choose: impl Fn(usize) -> C + Sync,
) -> Result<Counts, ExecuteError> {
    let world = World { state: Mutex::default(), changed: Condvar::new(), ranks: schedule.members.len() };
    let run = |rank: usize, part: &mut P| {
        let panicked = format!("the thread of rank {rank} has panicked");
        let mut counts = Counts::default();
        let ended = catch_unwind(AssertUnwindSafe(|| {
            let mut rank = Rank::new(schedule, phase, &world, (rank, part), choose(rank));
            let ended = rank.run();
            counts = rank.counts;
            ended
        }));
        // The others would wait for ever for a rank that does not say that it has ended.
        world.end(ended.unwrap_or(Err(ExecuteError::Stuck(panicked))));
        counts
    };
    let run = &run;
    let counts: Vec<Counts> = thread::scope(|scope| {
        let start = |(&rank, part)| scope.spawn(move || run(rank, part));
        let started: Vec<_> = schedule.members.iter().zip(parts).map(start).collect();
        started.into_iter().filter_map(|rank| rank.join().ok()).collect()
    });
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

/// What one rank gives others, with its operation.
struct Given<P: RankPart> {
    operation: usize,
    parcel: P::Parcel,
}

/// One collective.
struct Collective<P: RankPart> {
    /// Parts of the members that have come, by rank.
    parts: BTreeMap<usize, Arc<Given<P>>>,
    /// Number of members that have taken all parts.
    taken: usize,
}

/// What the ranks know of each other.
struct Shared<P: RankPart> {
    /// Signs of receivers that have come, by pair and number of the message.
    receivers: BTreeMap<(Pair, usize), P::Sign>,
    /// Messages on their way, by pair and number.
    messages: BTreeMap<(Pair, usize), Given<P>>,
    /// Collectives that not every member has left, by communicator and number.
    collectives: BTreeMap<(usize, usize), Collective<P>>,
    /// Number of changes so far.
    changes: usize,
    /// Number of ranks that wait and have seen the last change.
    idle: usize,
    /// Number of ranks that have ended.
    ended: usize,
    failed: Option<ExecuteError>,
}

impl<P: RankPart> Default for Shared<P> {
    fn default() -> Shared<P> {
        Shared {
            receivers: BTreeMap::new(),
            messages: BTreeMap::new(),
            collectives: BTreeMap::new(),
            changes: 0,
            idle: 0,
            ended: 0,
            failed: None,
        }
    }
}

impl<P: RankPart> Shared<P> {
    fn change(&mut self) {
        self.changes += 1;
        self.idle = 0;
    }
}

struct World<P: RankPart> {
    state: Mutex<Shared<P>>,
    changed: Condvar,
    ranks: usize,
}

impl<P: RankPart> World<P> {
    fn lock(&self) -> MutexGuard<'_, Shared<P>> {
        // A rank that panicked has ended: its state is only read.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes what the ranks know, and wakes those that wait.
    fn tell(&self, change: impl FnOnce(&mut Shared<P>)) {
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
    /// Number of looks by which it is late, and of those that are left.
    late: usize,
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

struct Rank<'a, P: RankPart, C> {
    schedule: &'a Schedule,
    world: &'a World<P>,
    rank: usize,
    part: &'a mut P,
    lanes: Vec<Lane>,
    done: Vec<bool>,
    awaited: Vec<Option<usize>>,
    host_reads: Vec<usize>,
    /// Number of messages to each rank, and of those that were awaited from each.
    sent: BTreeMap<usize, usize>,
    awaited_from: BTreeMap<usize, usize>,
    entered: BTreeMap<usize, usize>,
    choose: C,
    counts: Counts,
}

impl<'a, P: RankPart, C: FnMut(usize) -> usize> Rank<'a, P, C> {
    fn new(
        schedule: &'a Schedule,
        phase: ExecutedPasses,
        world: &'a World<P>,
        (rank, part): (usize, &'a mut P),
        choose: C,
    ) -> Rank<'a, P, C> {
        let program = &schedule.ranks[rank];
        let mut streams: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for (index, operation) in of_phase(program, phase) {
            streams.entry(operation.stream).or_default().push(index);
        }
        let lane = |operations| Lane { operations, next: 0, pending: Vec::new(), launched: 0 };
        Rank {
            schedule,
            world,
            rank,
            part,
            lanes: streams.into_values().map(lane).collect(),
            done: vec![false; program.operations.len()],
            awaited: awaited(program, phase),
            host_reads: reads(program, phase).into(),
            sent: BTreeMap::new(),
            awaited_from: BTreeMap::new(),
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
                let chosen = self.draw(ready.len());
                self.advance(ready[chosen])?;
                continue;
            }
            let ended = self.lanes.iter().all(|lane| lane.next == lane.operations.len());
            if ended || !self.world.wait(seen, || self.stand()) {
                return Ok(());
            }
        }
    }

    /// Returns a number below `count`.
    fn draw(&mut self, count: usize) -> usize {
        (self.choose)(count).min(count - 1)
    }

    fn work(&self, operation: usize) -> &'a Work {
        work_of(self.schedule, self.rank, operation)
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
    fn has_come(&self, pending: &Pending, state: &Shared<P>) -> bool {
        match pending.meets {
            Meets::Sends(pair, number) => state.receivers.contains_key(&(pair, number)),
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
        let work = self.work(operation);
        match work {
            Work::Send { .. } | Work::Recv { .. } => return self.launch_group(lane),
            Work::AllGather { .. }
            | Work::ReduceScatter { .. }
            | Work::AllToAll { .. }
            | Work::AllReduce { .. } => return self.enter(lane, operation),
            Work::RecordEvent(_) => self.part.mark(lane, operation),
            Work::WaitEvent(_) => {
                self.awaited[operation].map_or(Ok(()), |record| self.part.wait(lane, record))
            }
            Work::HostRead(region) => {
                self.counts.host_reads += 1;
                self.part.host_read(lane, region)
            }
            local => {
                let late = if self.draw(LATE) == 0 { self.draw(LOOKS_MAX + 1) } else { 0 };
                self.part.delay(lane, late).and_then(|()| self.part.execute(lane, local))
            }
        }
        .map_err(self.failed(operation))?;
        self.finish(lane, 1);
        Ok(())
    }

    fn failed(&self, operation: usize) -> impl Fn(DeviceError) -> ExecuteError + use<P, C> {
        let rank = self.rank;
        move |error| ExecuteError::Device { rank, operation, error }
    }

    fn finish(&mut self, lane: usize, count: usize) {
        let Lane { operations, next, .. } = &mut self.lanes[lane];
        operations[*next..*next + count].iter().for_each(|&operation| self.done[operation] = true);
        *next += count;
        self.counts.operations += count;
    }

    fn launch_group(&mut self, lane: usize) -> Result<(), ExecuteError> {
        let Lane { operations, next, .. } = &self.lanes[lane];
        let works = operations[*next..].iter().map(|&operation| self.work(operation));
        let group = operations[*next..*next + launched_together(works)].to_vec();
        for &operation in &group {
            check_peers(self.schedule, self.rank, operation)?;
            let meets = match self.work(operation) {
                Work::Send { to, .. } => Meets::Sends((self.rank, *to), next_of(&mut self.sent, *to)),
                Work::Recv { from, regions, .. } => {
                    let (pair, number) = ((*from, self.rank), next_of(&mut self.awaited_from, *from));
                    let poisoned = self.part.poison(lane, &regions.iter().collect::<Vec<_>>());
                    let sign =
                        poisoned.and_then(|()| self.part.sign(lane)).map_err(self.failed(operation))?;
                    self.world.tell(|state| drop(state.receivers.insert((pair, number), sign)));
                    Meets::Receives(pair, number)
                }
                _ => continue,
            };
            self.launch(lane, operation, meets);
        }
        self.lanes[lane].launched = group.len();
        Ok(())
    }

    /// Keeps an operation that waits for other ranks.
    fn launch(&mut self, lane: usize, operation: usize, meets: Meets) {
        let looks = self.draw(LOOKS_MAX + 1);
        self.lanes[lane].pending.push(Pending { operation, meets, late: looks, looks });
    }

    fn enter(&mut self, lane: usize, operation: usize) -> Result<(), ExecuteError> {
        let Some(Exchanged { communicator, read, written }) = exchanged(self.work(operation)) else {
            return Ok(());
        };
        check_peers(self.schedule, self.rank, operation)?;
        let failed = self.failed(operation);
        let parcel = self.part.take(lane, &read).map_err(&failed)?;
        self.part.poison(lane, &written).map_err(&failed)?;
        let number = next_of(&mut self.entered, communicator);
        let given = Arc::new(Given { operation, parcel });
        self.world.tell(|state| {
            let nobody = || Collective { parts: BTreeMap::new(), taken: 0 };
            let collective = state.collectives.entry((communicator, number)).or_insert_with(nobody);
            collective.parts.insert(self.rank, given);
        });
        self.launch(lane, operation, Meets::Joins(communicator, number));
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
        if come.is_empty() {
            return Ok(());
        }
        let index = come[self.draw(come.len())];
        let pending = &mut self.lanes[lane].pending[index];
        if pending.looks > 0 {
            pending.looks -= 1;
            thread::yield_now();
            return Ok(());
        }
        let pending = self.lanes[lane].pending.remove(index);
        match pending.meets {
            Meets::Sends(pair, number) => self.send(lane, pending, (pair, number))?,
            Meets::Receives(pair, number) => self.receive(lane, pending, (pair, number))?,
            Meets::Joins(communicator, number) => {
                let parts = self.take(communicator, number)?;
                self.combine(lane, pending, communicator, &parts)?;
            }
        }
        if self.lanes[lane].pending.is_empty() {
            let launched = self.lanes[lane].launched;
            self.finish(lane, launched);
        }
        Ok(())
    }

    /// Gives a message to a receiver that has come.
    fn send(&mut self, lane: usize, pending: Pending, key: (Pair, usize)) -> Result<(), ExecuteError> {
        let Pending { operation, late, .. } = pending;
        let (Work::Send { regions, .. }, Some(sign)) =
            (self.work(operation), self.world.lock().receivers.remove(&key))
        else {
            return Ok(());
        };
        let regions: Vec<&Region> = regions.iter().collect();
        let parcel = self.part.heed(lane, &sign).and_then(|()| self.part.delay(lane, late));
        let parcel = parcel.and_then(|()| self.part.take(lane, &regions)).map_err(self.failed(operation))?;
        self.world.tell(|state| drop(state.messages.insert(key, Given { operation, parcel })));
        Ok(())
    }

    /// Takes a message that is there.
    fn receive(&mut self, lane: usize, pending: Pending, key: (Pair, usize)) -> Result<(), ExecuteError> {
        let Pending { operation, late, .. } = pending;
        let Some(given) = self.world.lock().messages.remove(&key) else { return Ok(()) };
        let (sender, _) = key.0;
        let transfers = message(work_of(self.schedule, sender, given.operation), self.work(operation));
        let transfers = transfers.map_err(self.failed(operation))?;
        let arrival = |(index, transfer): (usize, &Transfer<'a>)| Arrival {
            from: vec![(&given.parcel, index)],
            reduction: transfer.reduction,
            to: transfer.to.to_vec(),
        };
        let arrivals: Vec<_> = transfers.iter().enumerate().map(arrival).collect();
        self.put(lane, operation, late, &arrivals)
    }

    fn put(
        &mut self,
        lane: usize,
        operation: usize,
        late: usize,
        arrivals: &[Arrival<'_, P::Parcel>],
    ) -> Result<(), ExecuteError> {
        let put = self.part.delay(lane, late).and_then(|()| self.part.put(lane, arrivals));
        put.map_err(self.failed(operation))
    }

    /// Returns the parts of a collective, in order of members. The last member removes them.
    fn take(&self, communicator: usize, number: usize) -> Result<Vec<Arc<Given<P>>>, ExecuteError> {
        let mismatch = || ExecuteError::Mismatch { communicator };
        let members = self.schedule.communicators.get(communicator).ok_or_else(mismatch)?;
        let key = (communicator, number);
        let mut state = self.world.lock();
        let collective = state.collectives.get_mut(&key).ok_or_else(mismatch)?;
        let of_member = |member: &usize| collective.parts.get(member).cloned();
        let parts: Option<Vec<Arc<Given<P>>>> = members.iter().map(of_member).collect();
        collective.taken += 1;
        if collective.taken == members.len() {
            state.collectives.remove(&key);
        }
        parts.ok_or_else(mismatch)
    }

    /// Writes this member's results of a collective.
    fn combine(
        &mut self,
        lane: usize,
        pending: Pending,
        communicator: usize,
        parts: &[Arc<Given<P>>],
    ) -> Result<(), ExecuteError> {
        let mismatch = || ExecuteError::Mismatch { communicator };
        let Pending { operation, late, .. } = pending;
        let members = &self.schedule.communicators[communicator];
        let work_of =
            |(member, part): (&usize, &Arc<Given<P>>)| work_of(self.schedule, *member, part.operation);
        let works: Vec<&Work> = members.iter().zip(parts).map(work_of).collect();
        let transfers = collective(&works).ok_or_else(mismatch)?;
        let brought: Vec<(&P::Parcel, Vec<&Region>)> = { parts.iter().zip(&works) }
            .map(|(part, work)| (&part.parcel, exchanged(work).map_or(Vec::new(), |with| with.read)))
            .collect();
        // Each region of a transfer is one that some member's work names.
        let taken = |region: &&Region| {
            brought.iter().find_map(|(parcel, regions)| Some((*parcel, place_of(regions, region)?)))
        };
        let own = exchanged(self.work(operation)).map_or(Vec::new(), |with| with.written);
        let mine = |transfer: &Transfer<'a>| -> Option<Arrival<'_, P::Parcel>> {
            let to: Vec<&Region> =
                transfer.to.iter().copied().filter(|region| place_of(&own, region).is_some()).collect();
            let from = transfer.from.iter().map(taken).collect::<Option<_>>()?;
            Some(Arrival { from, reduction: transfer.reduction, to })
        };
        let arrivals = transfers.iter().map(mine).collect::<Option<Vec<_>>>().ok_or_else(mismatch)?;
        let arrivals: Vec<_> = arrivals.into_iter().filter(|arrival| !arrival.to.is_empty()).collect();
        self.put(lane, operation, late, &arrivals)
    }

    /// Returns where the rank stands, for a run that is stuck.
    fn stand(&self) -> String {
        let at = |lane: usize| self.head(lane).map(|operation| format!("operation {operation}"));
        let lanes: Vec<String> = (0..self.lanes.len()).filter_map(at).collect();
        format!("rank {} waits at {}", self.rank, lanes.join(", "))
    }
}

fn work_of(schedule: &Schedule, rank: usize, operation: usize) -> &Work {
    &schedule.ranks[rank].operations[operation].work
}

/// Returns how often a key was counted before, and counts it.
fn next_of<K: Ord>(counts: &mut BTreeMap<K, usize>, key: K) -> usize {
    let count = counts.entry(key).or_default();
    *count += 1;
    *count - 1
}

/// Returns the place of this very region in a list.
fn place_of(regions: &[&Region], region: &Region) -> Option<usize> {
    regions.iter().position(|other| std::ptr::eq(*other, region))
}

/// What one member does in a collective.
struct Exchanged<'a> {
    communicator: usize,
    read: Vec<&'a Region>,
    written: Vec<&'a Region>,
}

/// Returns what a member does in a collective; `None` for any other work.
fn exchanged(work: &Work) -> Option<Exchanged<'_>> {
    let (communicator, read, written) = match work {
        Work::AllGather { communicator, from, to } => (communicator, vec![from], to.iter().collect()),
        Work::ReduceScatter { communicator, from, to } => (communicator, from.iter().collect(), vec![to]),
        Work::AllToAll { communicator, send, recv } => {
            (communicator, send.iter().collect(), recv.iter().collect())
        }
        Work::AllReduce { communicator, region, .. } => (communicator, vec![region], vec![region]),
        _ => return None,
    };
    Some(Exchanged { communicator: *communicator, read, written })
}
