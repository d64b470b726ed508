//! Embedding: makes a schedule a part of a larger one, on other ranks, buffers and communicators.

use std::collections::BTreeSet;

use super::build::Builder;
use super::collect::COMPUTE;
use super::program::{Attend, AttendBackward, BufferId, Merge, Operation, Schedule, Work};

/// The places that the parts of a schedule take in a larger one.
#[derive(Clone, Copy, Debug)]
pub(super) struct Embedding {
    /// Number of ranks in the larger schedule for each rank of the embedded one.
    pub(super) ranks: usize,
    /// The one of these ranks that the embedded rank becomes.
    pub(super) member: usize,
    /// Index of the embedded schedule's first buffer.
    pub(super) buffers: usize,
    /// Index of the embedded schedule's first communicator.
    pub(super) communicators: usize,
}

impl Embedding {
    /// Returns the rank of the larger schedule that an embedded rank becomes.
    pub(super) fn rank(&self, rank: usize) -> usize {
        rank * self.ranks + self.member
    }

    /// Returns the buffer of the larger schedule that an embedded buffer becomes.
    pub(super) fn buffer(&self, buffer: BufferId) -> BufferId {
        BufferId(buffer.0 + self.buffers)
    }

    /// Returns an operation as the larger schedule has it. Events belong to a rank and stay.
    pub(super) fn work(&self, work: &Work) -> Work {
        let mut work = work.clone();
        for id in buffers(&mut work) {
            *id = self.buffer(*id);
        }
        if let Some(peer) = peer(&mut work) {
            *peer = self.rank(*peer);
        }
        if let Some(communicator) = communicator(&mut work) {
            *communicator += self.communicators;
        }
        work
    }
}

/// Adds operations of a rank of the schedule inside. Each of their streams begins after the earlier work on `COMPUTE`,
/// and `COMPUTE` goes on when they end.
pub(super) fn run(builder: &mut Builder, rank: usize, operations: impl Iterator<Item = Operation>) {
    let operations: Vec<Operation> = operations.collect();
    let streams = operations.iter().map(|operation| operation.stream);
    let others: BTreeSet<usize> = streams.filter(|&stream| stream != COMPUTE).collect();
    if !others.is_empty() {
        let begin = builder.record(rank, COMPUTE);
        others.iter().for_each(|&stream| builder.wait(rank, stream, begin));
    }
    for Operation { stream, work } in operations {
        builder.push(rank, stream, work);
    }
    for stream in others {
        let end = builder.record(rank, stream);
        builder.wait(rank, COMPUTE, end);
    }
}

/// Returns the number of event indices that a schedule uses.
pub(super) fn events(schedule: &Schedule) -> usize {
    let operations = schedule.ranks.iter().flat_map(|program| &program.operations);
    let used = operations.filter_map(|operation| match operation.work {
        Work::RecordEvent(event) => Some(event.0 + 1),
        _ => None,
    });
    used.max().unwrap_or(0)
}

/// Returns the rank to which an operation sends, or from which it receives.
pub(crate) fn peer(work: &mut Work) -> Option<&mut usize> {
    match work {
        Work::Send { to: peer, .. } | Work::Recv { from: peer, .. } => Some(peer),
        _ => None,
    }
}

/// Returns the communicator of a collective.
pub(crate) fn communicator(work: &mut Work) -> Option<&mut usize> {
    match work {
        Work::AllGather { communicator, .. }
        | Work::ReduceScatter { communicator, .. }
        | Work::AllToAll { communicator, .. }
        | Work::AllReduce { communicator, .. } => Some(communicator),
        _ => None,
    }
}

/// Returns every buffer that an operation names.
pub(super) fn buffers(work: &mut Work) -> Vec<&mut BufferId> {
    match work {
        Work::Attend(Attend { table, q, k, v, sink, out, lse, max_logit, .. }) => {
            let table = table.iter_mut().map(|table| &mut table.buffer);
            [q, k, v, out, lse, max_logit].into_iter().chain(sink).chain(table).collect()
        }
        Work::AttendBackward(AttendBackward { table, q, k, v, dout, out, lse, sink, dq, dk, dv, .. }) => {
            let sinks = sink.iter_mut().flat_map(|(sink, dsink)| [sink, dsink]);
            let table = table.iter_mut().map(|table| &mut table.buffer);
            [q, k, v, dout, out, lse, dq, dk, dv].into_iter().chain(sinks).chain(table).collect()
        }
        Work::CopyValid { from, to, table, .. } => vec![from, to, &mut table.buffer],
        Work::Merge(Merge { step_out, step_lse, out, lse, .. }) => {
            vec![step_out, step_lse, out, lse]
        }
        Work::ApplySink { sink, out, lse, .. } => [out, lse].into_iter().chain(sink).collect(),
        Work::SinkGradient { sink, dout, out, lse, dsink, .. } => vec![sink, dout, out, lse, dsink],
        Work::Accumulate { from, to, .. } | Work::Copy { from, to, .. } | Work::Linear { from, to, .. } => {
            vec![from, to]
        }
        Work::Rotate { buffer, .. }
        | Work::Fill { to: buffer, .. }
        | Work::MakeSegments { to: buffer, .. } => {
            vec![buffer]
        }
        Work::Send { regions, .. } | Work::Recv { regions, .. } => {
            regions.iter_mut().map(|region| &mut region.buffer).collect()
        }
        Work::AllGather { from: one, to: many, .. } | Work::ReduceScatter { from: many, to: one, .. } => {
            std::iter::once(one).chain(many).map(|region| &mut region.buffer).collect()
        }
        Work::AllToAll { send, recv, .. } => {
            send.iter_mut().chain(recv).map(|region| &mut region.buffer).collect()
        }
        Work::AllReduce { region, .. } | Work::HostRead(region) => vec![&mut region.buffer],
        Work::RecordEvent(_) | Work::WaitEvent(_) => Vec::new(),
    }
}
