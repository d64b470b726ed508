//! The executor, which runs any schedule on any device.
//!
//! Ranks' streams are *lanes*: lists of operations that run in order. At each point, one of the lanes that can go on is
//! chosen. A seed draws the choices and can produce every legal interleaving, and no interleaving may change a bit of
//! the result. Messages and collectives complete when all their parties have arrived. If no lane can go on and some
//! lane is not done, the schedule is stuck, and the error says where each rank stands.
//!
//! Peers are ranks of the world. The executor knows no groups: what a group sends to a rank of another one that runs
//! [beside it](crate::schedule::side_by_side()) gets there. A message to an idle rank is an error.
//!
//! The device is told the lane of each operation and the marks that it waits for. A device with streams of its own may
//! then run lanes at once. Each lane is in order, a wait waits for its record, and a transfer between lanes waits for
//! both.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use ndarray::s;
use seamproof_oracle::region::rotated_back;
use seamproof_oracle::sharding::PlacedRun;
use seamproof_oracle::{Inputs, Problem, Run, TensorName};

use crate::Real;
use crate::device::{Buffers, Device, DeviceError, Transfer, TransferSide};
use crate::schedule::{
    Axes, Buffer, BufferId, EventId, Operation, Placement, RankProgram, Reduction, Role, Schedule, Work,
    rotates,
};

/// Reason why a schedule did not run to its end.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ExecuteError {
    /// An operation failed.
    #[error("rank {rank}, operation {operation}: {error}")]
    Device {
        /// The rank of the world.
        rank: usize,
        /// The operation, by its index in the program.
        operation: usize,
        /// The device's error.
        error: DeviceError,
    },
    /// The device's memory could not be divided among ranks, or some of their work failed on the device.
    #[error("ranks at once: {0}")]
    Divided(#[from] DeviceError),
    /// A message or a collective with a rank that takes no part.
    #[error(
        "rank {rank}, operation {operation}: rank {peer} of the world runs no program; name one that takes part"
    )]
    Idle {
        /// The rank of the world.
        rank: usize,
        /// The operation, by its index in the program.
        operation: usize,
        /// The rank of the world that the operation names.
        peer: usize,
    },
    /// No lane can go on.
    #[error("stuck: {0}")]
    Stuck(String),
    /// Members of a communicator entered different collectives.
    #[error("communicator {communicator}: its members entered different collectives")]
    Mismatch {
        /// Index of the communicator.
        communicator: usize,
    },
}

/// Part of a schedule that runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExecutedPasses {
    /// Operations before [`RankProgram::backward`].
    Forward,
    /// Operations from [`RankProgram::backward`] on.
    Backward,
    /// All operations.
    Both,
}

impl ExecutedPasses {
    fn has(self, program: &RankProgram, operation: usize) -> bool {
        let begin = program.backward.unwrap_or(program.operations.len());
        match self {
            ExecutedPasses::Forward => operation < begin,
            ExecutedPasses::Backward => operation >= begin,
            ExecutedPasses::Both => true,
        }
    }
}

/// Counts of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Number of operations executed.
    pub operations: usize,
    /// Number of times that a host waited.
    pub host_reads: usize,
}

/// One stream of one rank.
#[derive(Debug)]
struct Lane {
    rank: usize,
    stream: usize,
    /// Operations, by their indices in the rank's program.
    operations: Vec<usize>,
    next: usize,
    /// Number of operations of the launched group. A collective counts as one.
    launched: usize,
    /// Number of launched operations that have not met their peers.
    waiting: usize,
    /// Whether the lane is among those that can go on.
    ready: bool,
}

impl Lane {
    /// Returns a lane without operations.
    fn new(rank: usize, stream: usize) -> Lane {
        Lane { rank, stream, operations: Vec::new(), next: 0, launched: 0, waiting: 0, ready: false }
    }
}

/// A message that waits for its peer: lane and operation.
type Posted = (usize, usize);

struct Running<'a, D: Device> {
    schedule: &'a Schedule,
    device: &'a D,
    lanes: Vec<Lane>,
    /// Lanes of each rank, which follow each other.
    of_rank: Vec<Range<usize>>,
    /// Number of each rank's first operation, counted over all ranks.
    first_number: Vec<usize>,
    /// Lanes that can go on, in order.
    ready: Vec<usize>,
    done: Vec<Vec<bool>>,
    /// Record for which each operation waits, by rank: the event's last record before the wait in host order. `None`
    /// for operations that wait for no record.
    awaited: Vec<Vec<Option<usize>>>,
    /// Host reads that are still ahead of each rank.
    reads: Vec<VecDeque<usize>>,
    sends: BTreeMap<(usize, usize), VecDeque<Posted>>,
    recvs: BTreeMap<(usize, usize), VecDeque<Posted>>,
    collectives: BTreeMap<usize, Vec<Posted>>,
    counts: Counts,
}

/// Runs a phase of `schedule` on `device`. The phases of one run share their memory. `choose` picks one of the `n`
/// lanes that can go on, and any answer below n is legal.
pub fn execute<D: Device>(
    schedule: &Schedule,
    phase: ExecutedPasses,
    device: &D,
    memory: &mut D::Memory,
    mut choose: impl FnMut(usize) -> usize,
) -> Result<Counts, ExecuteError> {
    let lanes = lanes(schedule, phase);
    let first = |rank: usize| lanes.partition_point(|lane| lane.rank < rank);
    let mut run = Running {
        schedule,
        device,
        of_rank: (0..schedule.ranks.len()).map(|rank| first(rank)..first(rank + 1)).collect(),
        first_number: first_numbers(schedule),
        ready: Vec::with_capacity(lanes.len()),
        lanes,
        done: schedule.ranks.iter().map(|program| vec![false; program.operations.len()]).collect(),
        awaited: schedule.ranks.iter().map(|program| awaited(program, phase)).collect(),
        reads: schedule.ranks.iter().map(|program| reads(program, phase)).collect(),
        sends: BTreeMap::new(),
        recvs: BTreeMap::new(),
        collectives: BTreeMap::new(),
        counts: Counts::default(),
    };
    (0..run.lanes.len()).for_each(|lane| run.look_at(lane));
    while !run.ready.is_empty() {
        let ready = run.ready.len();
        run.advance(run.ready[choose(ready).min(ready - 1)], memory)?;
    }
    if run.lanes.iter().any(|lane| lane.next < lane.operations.len()) {
        return Err(ExecuteError::Stuck(run.where_lanes_stand()));
    }
    Ok(run.counts)
}

fn first_numbers(schedule: &Schedule) -> Vec<usize> {
    let numbers = schedule.ranks.iter().scan(0, |next, program| {
        let first = *next;
        *next += program.operations.len();
        Some(first)
    });
    numbers.collect()
}

/// Returns the lane of every rank and stream, with its operations.
fn lanes(schedule: &Schedule, phase: ExecutedPasses) -> Vec<Lane> {
    let mut lanes: Vec<Lane> = Vec::new();
    for (rank, program) in schedule.ranks.iter().enumerate() {
        let first = lanes.len();
        for (index, Operation { stream, .. }) in of_phase(program, phase) {
            let known = lanes[first..].iter().position(|lane| lane.stream == *stream);
            let place = known.map_or(lanes.len(), |known| first + known);
            if known.is_none() {
                lanes.push(Lane::new(rank, *stream));
            }
            lanes[place].operations.push(index);
        }
    }
    lanes
}

/// Returns a phase's operations, with their indices in the program.
pub(crate) fn of_phase(
    program: &RankProgram,
    phase: ExecutedPasses,
) -> impl Iterator<Item = (usize, &Operation)> {
    program.operations.iter().enumerate().filter(move |(index, _)| phase.has(program, *index))
}

/// Returns the record for each wait: the event's last record before the wait in host order.
pub(crate) fn awaited(program: &RankProgram, phase: ExecutedPasses) -> Vec<Option<usize>> {
    let mut records: Vec<(EventId, usize)> = Vec::new();
    let mut awaited = vec![None; program.operations.len()];
    for (index, operation) in of_phase(program, phase) {
        match operation.work {
            Work::RecordEvent(event) => records.push((event, index)),
            // The record is mostly one of the last.
            Work::WaitEvent(event) => {
                let last = records.iter().rfind(|(recorded, _)| *recorded == event);
                awaited[index] = last.map(|(_, record)| *record);
            }
            _ => {}
        }
    }
    awaited
}

pub(crate) fn reads(program: &RankProgram, phase: ExecutedPasses) -> VecDeque<usize> {
    of_phase(program, phase)
        .filter(|(_, operation)| matches!(operation.work, Work::HostRead(_)))
        .map(|(index, _)| index)
        .collect()
}

impl<D: Device> Running<'_, D> {
    fn head(&self, lane: usize) -> Option<(usize, usize)> {
        let lane = &self.lanes[lane];
        Some((lane.rank, *lane.operations.get(lane.next)?))
    }

    fn work(&self, rank: usize, operation: usize) -> &Work {
        &self.schedule.ranks[rank].operations[operation].work
    }

    /// Updates which lanes of a rank can go on. This depends on what the rank itself has done and waits for. It is
    /// called when a record or a host read is done, because other lanes may wait for these.
    fn look_at_rank(&mut self, rank: usize) {
        self.of_rank[rank].clone().for_each(|lane| self.look_at(lane));
    }

    /// Updates whether a lane can go on. It is called when the lane has come to its next operation, or waits.
    fn look_at(&mut self, lane: usize) {
        let ready = self.can_go_on(lane);
        if std::mem::replace(&mut self.lanes[lane].ready, ready) == ready {
            return;
        }
        match self.ready.binary_search(&lane) {
            Ok(place) => drop(self.ready.remove(place)),
            Err(place) => self.ready.insert(place, lane),
        }
    }

    fn can_go_on(&self, lane: usize) -> bool {
        let Some((rank, operation)) = self.head(lane) else { return false };
        if self.lanes[lane].waiting > 0 || self.host_waits(rank, operation) {
            return false;
        }
        match self.work(rank, operation) {
            Work::WaitEvent(_) => self.recorded(rank, operation),
            _ => true,
        }
    }

    /// Whether the host has not issued the operation yet, because it waits for an earlier read.
    fn host_waits(&self, rank: usize, operation: usize) -> bool {
        self.reads[rank].front().is_some_and(|&read| read < operation)
    }

    /// Whether the record for a wait has been reached. A wait without a record does nothing.
    fn recorded(&self, rank: usize, wait: usize) -> bool {
        self.awaited[rank][wait].is_none_or(|record| self.done[rank][record])
    }

    fn advance(&mut self, lane: usize, memory: &mut D::Memory) -> Result<(), ExecuteError> {
        let Some((rank, operation)) = self.head(lane) else { return Ok(()) };
        let failed = |error| ExecuteError::Device { rank, operation, error };
        match self.work(rank, operation) {
            Work::Send { .. } | Work::Recv { .. } => self.launch_group(lane, memory),
            Work::AllGather { communicator, .. }
            | Work::ReduceScatter { communicator, .. }
            | Work::AllToAll { communicator, .. }
            | Work::AllReduce { communicator, .. } => {
                let communicator = *communicator;
                self.enter(lane, operation, communicator, memory)
            }
            Work::RecordEvent(_) => {
                self.mark(lane, operation, memory);
                self.finish(lane, 1);
                self.look_at_rank(rank);
                Ok(())
            }
            Work::WaitEvent(_) => {
                if let Some(record) = self.awaited[rank][operation] {
                    self.wait(lane, (lane, record), memory);
                }
                self.finish(lane, 1);
                Ok(())
            }
            Work::HostRead(region) => {
                self.device.host_read(region, memory).map_err(failed)?;
                self.counts.host_reads += 1;
                self.reads[rank].pop_front();
                self.finish(lane, 1);
                self.look_at_rank(rank);
                Ok(())
            }
            local => {
                self.device.lane(lane, memory);
                self.device.execute(local, memory).map_err(failed)?;
                self.finish(lane, 1);
                Ok(())
            }
        }
    }

    /// Returns the number of the mark behind an operation of a lane's rank.
    fn number(&self, (lane, operation): Posted) -> usize {
        self.first_number[self.lanes[lane].rank] + operation
    }

    /// Sets a mark behind an operation, for the progress of its lane.
    fn mark(&self, lane: usize, operation: usize, memory: &mut D::Memory) {
        self.device.lane(lane, memory);
        self.device.mark(self.number((lane, operation)), memory);
    }

    /// Makes a lane wait for a mark.
    fn wait(&self, lane: usize, mark: Posted, memory: &mut D::Memory) {
        self.device.lane(lane, memory);
        self.device.wait(self.number(mark), memory);
    }

    /// Carries out transfers between lanes that have marked their arrival. The transfers run on the first lane once all
    /// have arrived. The other lanes go on when they are done.
    fn transfer(
        &self,
        posted: &[Posted],
        transfers: &[Transfer<'_>],
        memory: &mut D::Memory,
    ) -> Result<(), ExecuteError> {
        let [(lane, operation), others @ ..] = posted else { return Ok(()) };
        others.iter().for_each(|&other| self.wait(*lane, other, memory));
        self.device.lane(*lane, memory);
        self.device.transfer(transfers, memory).map_err(|error| ExecuteError::Device {
            rank: self.lanes[*lane].rank,
            operation: *operation,
            error,
        })?;
        self.mark(*lane, *operation, memory);
        others.iter().for_each(|&(other, _)| self.wait(other, posted[0], memory));
        Ok(())
    }

    /// Marks the lane's next `count` operations as done.
    fn finish(&mut self, lane: usize, count: usize) {
        let Lane { rank, operations, next, waiting, .. } = &mut self.lanes[lane];
        for &operation in &operations[*next..*next + count] {
            self.done[*rank][operation] = true;
        }
        *next += count;
        *waiting = 0;
        self.counts.operations += count;
        self.look_at(lane);
    }

    /// Returns the number of messages that are launched together, from the lane's head on.
    fn launched(&self, lane: usize) -> usize {
        let Lane { rank, operations, next, .. } = &self.lanes[lane];
        launched_together(operations[*next..].iter().map(|&operation| self.work(*rank, operation)))
    }

    /// Blocks a lane until the operations that it posted have met their peers.
    fn block(&mut self, lane: usize, posted: usize) {
        (self.lanes[lane].launched, self.lanes[lane].waiting) = (posted, posted);
        self.look_at(lane);
    }

    fn launch_group(&mut self, lane: usize, memory: &mut D::Memory) -> Result<(), ExecuteError> {
        let (rank, next, launched) = (self.lanes[lane].rank, self.lanes[lane].next, self.launched(lane));
        self.block(lane, launched);
        for index in next..next + launched {
            let operation = self.lanes[lane].operations[index];
            check_peers(self.schedule, rank, operation)?;
            let (pair, queue) = match self.work(rank, operation) {
                Work::Send { to, .. } => ((rank, *to), &mut self.sends),
                Work::Recv { from, .. } => ((*from, rank), &mut self.recvs),
                _ => continue,
            };
            queue.entry(pair).or_default().push_back((lane, operation));
            self.mark(lane, operation, memory);
        }
        for index in next..next + launched {
            match self.work(rank, self.lanes[lane].operations[index]) {
                Work::Send { to, .. } => self.meet((rank, *to), memory)?,
                Work::Recv { from, .. } => self.meet((*from, rank), memory)?,
                _ => {}
            }
        }
        Ok(())
    }

    /// Hands over messages between a pair of ranks while both sides are present.
    fn meet(&mut self, pair: (usize, usize), memory: &mut D::Memory) -> Result<(), ExecuteError> {
        while let (Some(&send), Some(&recv)) =
            (self.sends.get(&pair).and_then(VecDeque::front), self.recvs.get(&pair).and_then(VecDeque::front))
        {
            let transfers = message(self.work(pair.0, send.1), self.work(pair.1, recv.1))
                .map_err(|error| ExecuteError::Device { rank: pair.1, operation: recv.1, error })?;
            self.transfer(&[recv, send], &transfers, memory)?;
            self.sends.get_mut(&pair).map(VecDeque::pop_front);
            self.recvs.get_mut(&pair).map(VecDeque::pop_front);
            for (lane, _) in [send, recv] {
                self.lanes[lane].waiting -= 1;
                if self.lanes[lane].waiting == 0 {
                    self.finish(lane, self.lanes[lane].launched);
                }
            }
        }
        Ok(())
    }

    fn enter(
        &mut self,
        lane: usize,
        operation: usize,
        communicator: usize,
        memory: &mut D::Memory,
    ) -> Result<(), ExecuteError> {
        let schedule = self.schedule;
        check_peers(schedule, self.lanes[lane].rank, operation)?;
        let Some(members) = schedule.communicators.get(communicator) else {
            return Err(ExecuteError::Mismatch { communicator });
        };
        self.block(lane, 1);
        self.mark(lane, operation, memory);
        let posted = self.collectives.entry(communicator).or_default();
        posted.push((lane, operation));
        if posted.len() < members.len() {
            return Ok(());
        }
        let posted = std::mem::take(posted);
        let of_member =
            |member: &usize| posted.iter().copied().find(|(lane, _)| self.lanes[*lane].rank == *member);
        let ordered: Vec<Posted> = members.iter().filter_map(of_member).collect();
        if ordered.len() != members.len() {
            return Err(ExecuteError::Mismatch { communicator });
        }
        let works: Vec<&Work> =
            ordered.iter().map(|&(lane, operation)| self.work(self.lanes[lane].rank, operation)).collect();
        let transfers = collective(&works).ok_or(ExecuteError::Mismatch { communicator })?;
        self.transfer(&ordered, &transfers, memory)?;
        for (lane, _) in ordered {
            self.finish(lane, 1);
        }
        Ok(())
    }

    fn where_lanes_stand(&self) -> String {
        let stuck = (0..self.lanes.len()).filter_map(|lane| {
            let (rank, operation) = self.head(lane)?;
            let kind = match self.work(rank, operation) {
                Work::Send { to, .. } => format!("sends to {to}"),
                Work::Recv { from, .. } => format!("receives from {from}"),
                Work::WaitEvent(event) => format!("waits for event {}", event.0),
                _ => "waits in a collective".into(),
            };
            Some(format!("rank {rank} {kind} (operation {operation})"))
        });
        stuck.collect::<Vec<_>>().join("; ")
    }
}

/// Checks that every rank that an operation is to meet takes part.
pub(crate) fn check_peers(schedule: &Schedule, rank: usize, operation: usize) -> Result<(), ExecuteError> {
    let named = schedule.named(&schedule.ranks[rank].operations[operation].work);
    match named.iter().find(|peer| schedule.place(**peer).is_none()) {
        Some(&peer) => Err(ExecuteError::Idle { rank, operation, peer }),
        None => Ok(()),
    }
}

/// Returns the number of messages that are launched together, from the first of a stream's works on. Any other work
/// is launched alone.
pub(crate) fn launched_together<'a>(mut works: impl Iterator<Item = &'a Work>) -> usize {
    let group_of = |work: &Work| match work {
        Work::Send { group, .. } | Work::Recv { group, .. } => *group,
        _ => None,
    };
    match works.next().and_then(group_of) {
        Some(group) => 1 + works.take_while(|work| group_of(work) == Some(group)).count(),
        None => 1,
    }
}

/// Returns the transfers of a message.
pub(crate) fn message<'a>(send: &'a Work, recv: &'a Work) -> Result<Vec<Transfer<'a>>, DeviceError> {
    match (send, recv) {
        (Work::Send { regions: from, .. }, Work::Recv { regions: to, .. }) if from.len() == to.len() => {
            Ok(from.iter().zip(to).map(|(from, to)| Transfer::copy(from, to)).collect())
        }
        _ => Err(DeviceError::Shape("a message and its receiver have different regions".into())),
    }
}

/// Returns the transfers of one collective, given each member's part in order of members; `None` if the parts do not
/// belong together.
pub(crate) fn collective<'a>(works: &[&'a Work]) -> Option<Vec<Transfer<'a>>> {
    match works[0] {
        Work::AllGather { .. } => {
            let gathered = |(member, work): (usize, &&'a Work)| {
                let Work::AllGather { from, .. } = work else { return None };
                let of_peer = |peer: &&'a Work| match peer {
                    Work::AllGather { to, .. } => to.get(member),
                    _ => None,
                };
                let to = works.iter().map(of_peer).collect::<Option<_>>()?;
                Some(Transfer { from: TransferSide::One(from), reduction: Reduction::Sum, to })
            };
            works.iter().enumerate().map(gathered).collect()
        }
        Work::AllToAll { .. } => {
            let pairs = (0..works.len()).flat_map(|i| (0..works.len()).map(move |j| (i, j)));
            let exchanged = |(i, j): (usize, usize)| match (works[i], works[j]) {
                (Work::AllToAll { send, .. }, Work::AllToAll { recv, .. }) => {
                    Some(Transfer::copy(send.get(j)?, recv.get(i)?))
                }
                _ => None,
            };
            pairs.map(exchanged).collect()
        }
        Work::ReduceScatter { .. } => {
            let summed = |(i, work): (usize, &&'a Work)| {
                let Work::ReduceScatter { to, .. } = work else { return None };
                let of_peer = |peer: &&'a Work| match peer {
                    Work::ReduceScatter { from, .. } => from.get(i),
                    _ => None,
                };
                let from = works.iter().map(of_peer).collect::<Option<_>>()?;
                Some(Transfer { from, reduction: Reduction::Sum, to: TransferSide::One(to) })
            };
            works.iter().enumerate().map(summed).collect()
        }
        Work::AllReduce { reduction, .. } => {
            let of_member = |work: &&'a Work| match work {
                Work::AllReduce { region, reduction: other, .. } if other == reduction => Some(region),
                _ => None,
            };
            let regions: TransferSide = works.iter().map(of_member).collect::<Option<_>>()?;
            Some(vec![Transfer { from: regions.clone(), reduction: *reduction, to: regions }])
        }
        _ => None,
    }
}

/// Fills the input buffers with the ranks' parts of `inputs`. Padding rows get the problem's own padding, and rows that
/// no sequence owns get `slack`. Hidden rows of q and k are the problem's own, rotated back.
pub fn load<T: Real>(schedule: &Schedule, problem: &Problem, inputs: &Inputs, slack: f32) -> Buffers<T> {
    let is_input = |buffer: &Buffer| matches!(buffer.role, Role::Input(_));
    let mut buffers = Buffers::filled(schedule, |buffer| {
        let has_slack = is_input(buffer) && buffer.axes != Axes::Heads;
        if has_slack { T::from_f32(slack) } else { T::UNWRITTEN }
    });
    for placement in &schedule.placements {
        let buffer = &schedule.buffers[placement.buffer.0];
        if !is_input(buffer) {
            continue;
        }
        if buffer.axes == Axes::Heads {
            for (head, &sink) in (0..buffer.heads).zip(inputs.sink.iter().skip(placement.heads.start)) {
                buffers.lane_mut(placement.buffer, 0, head)[0] = T::from_f32(sink);
            }
            continue;
        }
        load_rows(problem, inputs, placement, buffer.heads, &mut buffers);
        if schedule.sequence_parallel.is_some() && rotates(placement.tensor) {
            rotate_back(placement, buffer.heads, &mut buffers);
        }
    }
    buffers
}

fn load_rows<T: Real>(
    problem: &Problem,
    inputs: &Inputs,
    placement: &Placement,
    heads: usize,
    buffers: &mut Buffers<T>,
) {
    let (source, key_side) = match placement.tensor {
        TensorName::Q => (&inputs.q, false),
        TensorName::K => (&inputs.k, true),
        TensorName::V => (&inputs.v, true),
        _ => (&inputs.dout, false),
    };
    let held = placement.heads.start..placement.heads.start + heads;
    for placed in &placement.rows {
        let sequence = &problem.sequences[placed.sequence];
        let global: Run = if key_side { sequence.kv } else { sequence.q };
        for i in 0..placed.piece.span {
            let position = placed.piece.start + i * placed.piece.step;
            let elements = source.slice(s![global.row(position), held.clone(), ..]);
            let to = buffers.row_mut(placement.buffer, placed.local.row(i));
            let write = |(to, element): (&mut T, &f32)| *to = T::from_f32(*element);
            match elements.to_slice() {
                // Elements that follow each other are copied several at a time.
                Some(elements) => to.iter_mut().zip(elements).for_each(write),
                None => to.iter_mut().zip(elements).for_each(write),
            }
        }
    }
}

fn rotate_back<T: Real>(placement: &Placement, heads: usize, buffers: &mut Buffers<T>) {
    for PlacedRun { piece, local, .. } in &placement.rows {
        for (i, head) in (0..piece.span).flat_map(|i| (0..heads).map(move |head| (i, head))) {
            let lanes = buffers.lane_mut(placement.buffer, local.row(i), head);
            let hidden = rotated_back(lanes, piece.start + i * piece.step);
            lanes.copy_from_slice(&hidden);
        }
    }
}

/// Returns the buffer that holds a rank's part of a result.
pub fn output(schedule: &Schedule, rank: usize, tensor: TensorName) -> Option<BufferId> {
    let held = |placement: &&Placement| {
        placement.tensor == tensor && schedule.buffers[placement.buffer.0].rank == rank
    };
    schedule.placements.iter().find(held).map(|placement| placement.buffer)
}
