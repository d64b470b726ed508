//! One legal order of all ranks' operations, with the relation of what happens before what.
//!
//! A *lane* is one stream of one rank. It runs its operations in host order. An operation is ready when it is first in
//! its lane and its condition holds:
//!
//! - A wait needs the event's last record before the wait in host order.
//! - A send or receive needs its peer. Sends and receives of one group that follow each other block only together. The
//!   k-th send from a to b meets the k-th receive of b from a, in host order.
//! - A collective needs every member's collective of the same number on its communicator, and all earlier ones done.
//!
//! Lanes run until none is ready. If any operation is left, that is a deadlock. Nothing here depends on data or time,
//! and therefore any other legal order has the same operations ready.
//!
//! A *clock* counts, for each lane, the operations that have surely ended. Operation a happens before b iff b's clock
//! at its start counts a. The operations of a group share a number and are unordered among themselves.
//!
//! Two things are not modelled: the number of messages that a network can hold (a send waits for its receive), and the
//! order of progress between lanes.

use std::collections::BTreeMap;

use super::error::{CheckError, Errors, FormError, OperationId};
use crate::schedule::{Operation, Schedule, Work};

/// Largest number of streams of one rank.
const STREAMS_MAX: usize = 64;
/// Largest number of sends and receives of one group.
const GROUP_MAX: usize = 1 << 12;
/// Largest number of counters of all clocks together.
const COUNTERS_MAX: usize = 1 << 32;

/// Operations that are executed at once. Records of events and waits for them are in none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// An operation of one rank.
    Local(OperationId),
    /// A send and its receive.
    Message(OperationId, OperationId),
    /// A collective: each member's operation, in order of members.
    Collective(Vec<OperationId>),
}

impl Action {
    /// Returns the action's operations.
    pub fn places(&self) -> impl Iterator<Item = &OperationId> {
        let (ends, members) = match self {
            Action::Local(place) => ([Some(place), None], &[][..]),
            Action::Message(send, receive) => ([Some(send), Some(receive)], &[][..]),
            Action::Collective(places) => ([None, None], &places[..]),
        };
        ends.into_iter().flatten().chain(members)
    }
}

/// Time at which an operation ran, as far as its own rank's lanes know.
#[derive(Clone, Debug, Default)]
pub(super) struct Moment {
    /// Index of the lane among the rank's lanes.
    pub(super) lane: usize,
    /// Number of the operation in the lane.
    pub(super) number: u32,
    /// Number of operations that ended before it, for each lane of the rank.
    pub(super) before: Box<[u32]>,
}

/// One legal order of the operations, and each operation's moment by rank and operation.
#[derive(Debug, Default)]
pub(super) struct Order {
    pub(super) steps: Vec<Action>,
    pub(super) moments: Vec<Vec<Moment>>,
}

/// Returns the order with all moments; `None` if the lanes do not come to their ends.
pub(super) fn order(schedule: &Schedule, errors: &mut Errors) -> Option<Order> {
    simulate(schedule, true, errors)
}

/// Returns the order without moments; `None` if the lanes do not come to their ends.
pub(super) fn steps(schedule: &Schedule, errors: &mut Errors) -> Option<Vec<Action>> {
    simulate(schedule, false, errors).map(|order| order.steps)
}

/// Returns the order without moments, as far as the lanes come; `None` if they cannot begin.
pub(super) fn steps_so_far(schedule: &Schedule, errors: &mut Errors) -> Option<Vec<Action>> {
    simulated(schedule, false, errors).map(|order| order.steps)
}

/// Simulates the lanes to their ends, with clocks on request.
fn simulate(schedule: &Schedule, clocks: bool, errors: &mut Errors) -> Option<Order> {
    let before = errors.0.len();
    simulated(schedule, clocks, errors).filter(|_| errors.0.len() == before)
}

/// Simulates the lanes as far as they come, with clocks on request. What is stuck is an error.
fn simulated(schedule: &Schedule, clocks: bool, errors: &mut Errors) -> Option<Order> {
    let before = errors.0.len();
    let lanes = lanes(schedule, clocks, errors);
    let operations: usize = schedule.ranks.iter().map(|program| program.operations.len()).sum();
    if lanes.len().saturating_mul(operations) > COUNTERS_MAX {
        let fault = FormError::TooMany {
            what: "streams times operations",
            got: operations,
            max: COUNTERS_MAX / lanes.len(),
        };
        errors.push(CheckError::Table { what: "rank", index: 0, fault });
    }
    let events = events(schedule, errors);
    groups(schedule, errors);
    if errors.0.len() > before {
        return None;
    }
    let mut run = Simulation::new(schedule, clocks, lanes, events);
    run.run();
    run.deadlocks(errors);
    Some(run.order)
}

/// One stream of one rank.
#[derive(Debug)]
struct Lane {
    rank: usize,
    stream: usize,
    operations: Vec<usize>,
    next: usize,
    /// The clock; empty without clocks.
    clock: Vec<u32>,
    /// Number of sends and receives of the group in flight that have not met their peers. `joined` is the lane's clock
    /// once all have.
    pending: usize,
    joined: Vec<u32>,
}

impl Lane {
    /// Notes that `count` operations have ended. They share one number of lane `lane` on the clock.
    fn ended(&mut self, lane: usize, count: usize) {
        self.next += count;
        if let Some(own) = self.clock.get_mut(lane) {
            *own += 1;
        }
    }
}

fn lanes(schedule: &Schedule, clocks: bool, errors: &mut Errors) -> Vec<Lane> {
    let mut lanes = Vec::new();
    for (rank, program) in schedule.ranks.iter().enumerate() {
        let mut streams: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for (index, operation) in program.operations.iter().enumerate() {
            streams.entry(operation.stream).or_default().push(index);
        }
        if streams.len() > STREAMS_MAX {
            let fault = FormError::TooMany { what: "streams", got: streams.len(), max: STREAMS_MAX };
            errors.push(CheckError::Table { what: "rank", index: rank, fault });
        }
        lanes.extend(streams.into_iter().take(STREAMS_MAX).map(|(stream, operations)| Lane {
            rank,
            stream,
            operations,
            next: 0,
            clock: Vec::new(),
            pending: 0,
            joined: Vec::new(),
        }));
    }
    let width = if clocks { lanes.len() } else { 0 };
    lanes.iter_mut().for_each(|lane| lane.clock = vec![0; width]);
    lanes
}

/// Reports groups that are too large to check. A group is counted as a whole, wherever its parts are.
fn groups(schedule: &Schedule, errors: &mut Errors) {
    for (rank, program) in schedule.ranks.iter().enumerate() {
        let mut sizes = BTreeMap::new();
        for (operation, Operation { stream, work }) in program.operations.iter().enumerate() {
            let (Work::Send { group: Some(group), .. } | Work::Recv { group: Some(group), .. }) = work else {
                continue;
            };
            let size = sizes.entry((*stream, *group)).or_insert(0usize);
            *size += 1;
            if *size > GROUP_MAX {
                let fault = FormError::TooMany { what: "messages of a group", got: *size, max: GROUP_MAX };
                errors.push(CheckError::Malformed {
                    at: OperationId { rank, operation, stream: *stream },
                    fault,
                });
                return;
            }
        }
    }
}

/// A value for each operation of each rank: `[rank][operation]`.
type OfOperation<T> = Vec<Vec<T>>;

fn of_operations<T: Clone>(schedule: &Schedule, value: T) -> OfOperation<T> {
    schedule.ranks.iter().map(|program| vec![value.clone(); program.operations.len()]).collect()
}

/// Returns the record of each wait.
fn events(schedule: &Schedule, errors: &mut Errors) -> OfOperation<Option<usize>> {
    let mut waits = of_operations(schedule, None);
    for (rank, program) in schedule.ranks.iter().enumerate() {
        let mut last = BTreeMap::new();
        for (operation, Operation { stream, work }) in program.operations.iter().enumerate() {
            match work {
                Work::RecordEvent(event) => {
                    last.insert(*event, operation);
                }
                Work::WaitEvent(event) => match last.get(event) {
                    Some(&record) => waits[rank][operation] = Some(record),
                    None => {
                        let fault = FormError::Plain("waits for an event that has no record before it");
                        errors.push(CheckError::Malformed {
                            at: OperationId { rank, operation, stream: *stream },
                            fault,
                        });
                    }
                },
                _ => {}
            }
        }
    }
    waits
}

/// A collective of a communicator: the operation of each member, and the lanes that have arrived.
#[derive(Debug, Default)]
struct Meeting {
    operations: Vec<Option<usize>>,
    arrived: Vec<usize>,
}

struct Simulation<'a> {
    schedule: &'a Schedule,
    lanes: Vec<Lane>,
    /// First lane of each rank.
    first_lane: Vec<usize>,
    waits: OfOperation<Option<usize>>,
    /// Whether some wait needs the record.
    needed: OfOperation<bool>,
    /// Clocks of needed records that are done.
    recorded: OfOperation<Option<Vec<u32>>>,
    /// Lanes that wait for a record.
    waiting: BTreeMap<(usize, usize), Vec<usize>>,
    /// Rank and operation of the other end of a send or receive.
    peers: OfOperation<Option<(usize, usize)>>,
    /// Lanes of sends and receives that are posted and have not met their peers.
    posted: OfOperation<Option<usize>>,
    /// Collectives of each communicator, and the number of those that are done.
    meetings: Vec<(Vec<Meeting>, usize)>,
    /// Communicator and number of a collective.
    numbers: OfOperation<Option<(usize, usize)>>,
    ready: Vec<usize>,
    order: Order,
}

impl<'a> Simulation<'a> {
    fn new(
        schedule: &'a Schedule,
        clocks: bool,
        lanes: Vec<Lane>,
        waits: OfOperation<Option<usize>>,
    ) -> Simulation<'a> {
        let ranks = schedule.ranks.len();
        let first_lane = (0..=ranks).map(|rank| lanes.partition_point(|lane| lane.rank < rank)).collect();
        let mut needed = of_operations(schedule, false);
        for (needed, waits) in needed.iter_mut().zip(&waits) {
            waits.iter().flatten().for_each(|&record| needed[record] = true);
        }
        let (meetings, numbers) = meetings(schedule);
        let ready = (0..lanes.len()).rev().collect();
        let moments = if clocks { of_operations(schedule, Moment::default()) } else { Vec::new() };
        Simulation {
            schedule,
            first_lane,
            waits,
            needed,
            recorded: of_operations(schedule, None),
            waiting: BTreeMap::new(),
            peers: peers(schedule),
            posted: of_operations(schedule, None),
            meetings,
            numbers,
            ready,
            lanes,
            order: Order { steps: Vec::new(), moments },
        }
    }

    fn run(&mut self) {
        while let Some(lane) = self.ready.pop() {
            while self.advance(lane) {}
        }
    }

    fn work(&self, rank: usize, operation: usize) -> &'a Work {
        &self.schedule.ranks[rank].operations[operation].work
    }

    fn place(&self, rank: usize, operation: usize) -> OperationId {
        OperationId { rank, operation, stream: self.schedule.ranks[rank].operations[operation].stream }
    }

    /// Runs the first operation of a lane, or lets it wait. Returns whether the lane may go on.
    fn advance(&mut self, lane: usize) -> bool {
        let Lane { rank, next, .. } = self.lanes[lane];
        let Some(&operation) = self.lanes[lane].operations.get(next) else { return false };
        match self.work(rank, operation) {
            Work::RecordEvent(_) => {
                self.finish(lane, operation);
                if self.needed[rank][operation] {
                    self.recorded[rank][operation] = Some(self.lanes[lane].clock.clone());
                }
                self.ready.extend(self.waiting.remove(&(rank, operation)).unwrap_or_default());
                true
            }
            Work::WaitEvent(_) => self.wait(lane, rank, operation),
            Work::Send { .. } | Work::Recv { .. } => {
                self.post(lane);
                false
            }
            Work::AllGather { .. }
            | Work::ReduceScatter { .. }
            | Work::AllToAll { .. }
            | Work::AllReduce { .. } => {
                self.arrive(lane, rank, operation);
                false
            }
            _ => {
                self.order.steps.push(Action::Local(self.place(rank, operation)));
                self.finish(lane, operation);
                true
            }
        }
    }

    fn wait(&mut self, lane: usize, rank: usize, operation: usize) -> bool {
        let Some(record) = self.waits[rank][operation] else { return false };
        let Some(clock) = &self.recorded[rank][record] else {
            self.waiting.entry((rank, record)).or_default().push(lane);
            return false;
        };
        join(&mut self.lanes[lane].clock, clock);
        self.finish(lane, operation);
        true
    }

    /// Notes the moment of an operation that starts now, if moments are requested.
    fn start(&mut self, lane: usize, operation: usize) {
        let Lane { rank, clock, .. } = &self.lanes[lane];
        let (first, end) = (self.first_lane[*rank], self.first_lane[rank + 1]);
        if let Some(moments) = self.order.moments.get_mut(*rank) {
            let (number, before) = (clock[lane] + 1, clock[first..end].into());
            moments[operation] = Moment { lane: lane - first, number, before };
        }
    }

    /// Starts and ends an operation now.
    fn finish(&mut self, lane: usize, operation: usize) {
        self.start(lane, operation);
        self.lanes[lane].ended(lane, 1);
    }

    /// Returns the operations of the group that begins at the lane's next one.
    fn group<'l>(&self, lane: &'l Lane) -> &'l [usize] {
        let group = |&operation: &usize| match self.work(lane.rank, operation) {
            Work::Send { group, .. } | Work::Recv { group, .. } => *group,
            _ => None,
        };
        let rest = &lane.operations[lane.next..];
        let Some(first) = rest.first().and_then(group) else { return &rest[..1] };
        let end = rest.iter().position(|operation| group(operation) != Some(first));
        &rest[..end.unwrap_or(rest.len())]
    }

    /// Posts a group of sends and receives. Those whose peers are posted meet them.
    fn post(&mut self, lane: usize) {
        let group = self.group(&self.lanes[lane]).to_vec();
        let rank = self.lanes[lane].rank;
        self.lanes[lane].pending = group.len();
        self.lanes[lane].joined = self.lanes[lane].clock.clone();
        for &operation in &group {
            self.start(lane, operation);
            self.posted[rank][operation] = Some(lane);
        }
        for operation in group {
            let Some(peer) = self.peers[rank][operation] else { continue };
            if let Some(other) = self.posted[peer.0][peer.1] {
                self.meet((lane, rank, operation), (other, peer.0, peer.1));
            }
        }
    }

    fn meet(&mut self, a: (usize, usize, usize), b: (usize, usize, usize)) {
        let (here, there) = (self.place(a.1, a.2), self.place(b.1, b.2));
        let sends = matches!(self.work(a.1, a.2), Work::Send { .. });
        self.order.steps.push(if sends {
            Action::Message(here, there)
        } else {
            Action::Message(there, here)
        });
        for ((lane, rank, operation), other) in [(a, b.0), (b, a.0)] {
            self.posted[rank][operation] = None;
            let clock = std::mem::take(&mut self.lanes[other].clock);
            join(&mut self.lanes[lane].joined, &clock);
            self.lanes[other].clock = clock;
        }
        for lane in [a.0, b.0] {
            self.lanes[lane].pending -= 1;
            if self.lanes[lane].pending == 0 {
                let group = self.group(&self.lanes[lane]).len();
                let lane_state = &mut self.lanes[lane];
                lane_state.clock = std::mem::take(&mut lane_state.joined);
                lane_state.ended(lane, group);
                self.ready.push(lane);
            }
        }
    }

    /// Notes that a member has reached a collective. The collective takes place once all members have and the earlier
    /// ones are done.
    fn arrive(&mut self, lane: usize, rank: usize, operation: usize) {
        let Some((communicator, number)) = self.numbers[rank][operation] else { return };
        self.start(lane, operation);
        self.meetings[communicator].0[number].arrived.push(lane);
        loop {
            let (meetings, done) = &mut self.meetings[communicator];
            let Some(meeting) = meetings.get_mut(*done) else { return };
            if meeting.arrived.len() < meeting.operations.len() {
                return;
            }
            *done += 1;
            let arrived = std::mem::take(&mut meeting.arrived);
            let operations = std::mem::take(&mut meeting.operations);
            let members = &self.schedule.communicators[communicator];
            let places = members.iter().zip(operations);
            let places = places.filter_map(|(&rank, operation)| Some(self.place(rank, operation?))).collect();
            self.order.steps.push(Action::Collective(places));
            let mut clock = self.lanes[lane].clock.clone();
            arrived.iter().for_each(|&lane| join(&mut clock, &self.lanes[lane].clock));
            for lane in arrived {
                self.lanes[lane].clock.clone_from(&clock);
                self.lanes[lane].ended(lane, 1);
                self.ready.push(lane);
            }
        }
    }

    fn deadlocks(&self, errors: &mut Errors) {
        for lane in self.lanes.iter().filter(|lane| lane.next < lane.operations.len()) {
            let group = self.group(lane);
            let blocked =
                group.iter().copied().find(|&operation| self.posted[lane.rank][operation].is_some());
            let operation = blocked.unwrap_or(group[0]);
            let at = OperationId { rank: lane.rank, operation, stream: lane.stream };
            errors.push(CheckError::Deadlock { at, on: self.reason(lane.rank, operation) });
        }
    }

    /// Returns a description of the thing for which an operation waits.
    fn reason(&self, rank: usize, operation: usize) -> String {
        match self.work(rank, operation) {
            Work::WaitEvent(event) => {
                let record = self.waits[rank][operation].unwrap_or(operation);
                format!("event {}, to be recorded by {}", event.0, self.place(rank, record))
            }
            Work::Send { to: peer, .. } | Work::Recv { from: peer, .. } => {
                let end =
                    if matches!(self.work(rank, operation), Work::Send { .. }) { "receive" } else { "send" };
                match self.peers[rank][operation] {
                    Some((peer, operation)) => format!("the {end} of {}", self.place(peer, operation)),
                    None => format!("a {end} of rank {peer}, which has none"),
                }
            }
            _ => self.missing_members(rank, operation),
        }
    }

    fn missing_members(&self, rank: usize, operation: usize) -> String {
        let Some((communicator, number)) = self.numbers[rank][operation] else {
            return "nothing".into();
        };
        let (meetings, done) = &self.meetings[communicator];
        if number > *done {
            return format!("collective {done} of communicator {communicator} to be done first");
        }
        let here: Vec<usize> = meetings[number].arrived.iter().map(|&lane| self.lanes[lane].rank).collect();
        let members = self.schedule.communicators[communicator].iter();
        let missing: Vec<usize> = members.copied().filter(|member| !here.contains(member)).take(8).collect();
        format!("collective {number} of communicator {communicator} to be entered by ranks {missing:?}")
    }
}

fn join(clock: &mut [u32], other: &[u32]) {
    for (mine, theirs) in clock.iter_mut().zip(other) {
        *mine = (*mine).max(*theirs);
    }
}

/// Returns the peer of each send and receive. The k-th send from a to b and the k-th receive of b from a are peers.
fn peers(schedule: &Schedule) -> OfOperation<Option<(usize, usize)>> {
    let mut ends: BTreeMap<(usize, usize), [Vec<usize>; 2]> = BTreeMap::new();
    for (rank, program) in schedule.ranks.iter().enumerate() {
        for (operation, step) in program.operations.iter().enumerate() {
            match step.work {
                Work::Send { to, .. } => ends.entry((rank, to)).or_default()[0].push(operation),
                Work::Recv { from, .. } => ends.entry((from, rank)).or_default()[1].push(operation),
                _ => {}
            }
        }
    }
    let mut peers = of_operations(schedule, None);
    for ((from, to), [sends, receives]) in ends {
        for (send, receive) in sends.into_iter().zip(receives) {
            peers[from][send] = Some((to, receive));
            peers[to][receive] = Some((from, send));
        }
    }
    peers
}

type Numbers = OfOperation<Option<(usize, usize)>>;

fn meetings(schedule: &Schedule) -> (Vec<(Vec<Meeting>, usize)>, Numbers) {
    let mut meetings: Vec<(Vec<Meeting>, usize)> =
        schedule.communicators.iter().map(|_| (Vec::new(), 0)).collect();
    let mut numbers = of_operations(schedule, None);
    let mut seats = BTreeMap::new();
    for (communicator, members) in schedule.communicators.iter().enumerate() {
        seats.extend(members.iter().enumerate().map(|(seat, &rank)| ((communicator, rank), seat)));
    }
    for (rank, program) in schedule.ranks.iter().enumerate() {
        let mut counts = BTreeMap::new();
        for (operation, step) in program.operations.iter().enumerate() {
            let Some(communicator) = step.work.communicator() else { continue };
            let Some(&seat) = seats.get(&(communicator, rank)) else { continue };
            let number = counts.entry(communicator).or_insert(0);
            let members = schedule.communicators[communicator].len();
            let list = &mut meetings[communicator].0;
            if list.len() == *number {
                list.push(Meeting { operations: vec![None; members], arrived: Vec::new() });
            }
            list[*number].operations[seat] = Some(operation);
            numbers[rank][operation] = Some((communicator, *number));
            *number += 1;
        }
    }
    (meetings, numbers)
}
