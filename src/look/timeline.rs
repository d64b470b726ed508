//! The operations of a schedule in time. Time is counted in steps and is not measured: each operation takes a fixed
//! number of them, and begins as soon as its stream and whatever it waits for allow.

use std::collections::BTreeMap;

use seamproof_simulator::check::{Action, OperationId};
use seamproof_simulator::schedule::{Schedule, Work};

/// Kind of an operation in a picture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A launch of attention.
    Launch,
    /// A message, or a collective.
    Message,
    /// Anything else that takes time.
    Other,
}

impl Kind {
    fn of(work: &Work) -> Kind {
        match work {
            Work::Attend(_) | Work::AttendBackward(_) => Kind::Launch,
            Work::Send { .. } | Work::Recv { .. } => Kind::Message,
            Work::AllGather { .. } | Work::ReduceScatter { .. } => Kind::Message,
            Work::AllToAll { .. } | Work::AllReduce { .. } => Kind::Message,
            _ => Kind::Other,
        }
    }

    /// Returns the number of steps that it takes.
    pub(super) fn steps(self) -> usize {
        match self {
            Kind::Launch => 4,
            Kind::Message => 2,
            Kind::Other => 1,
        }
    }
}

/// An operation in time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Bar {
    pub(super) at: OperationId,
    pub(super) kind: Kind,
    /// Time from which the stream waits for it to begin.
    pub(super) waits: usize,
    pub(super) start: usize,
    pub(super) end: usize,
}

/// All operations in time.
#[derive(Debug, Default)]
pub(super) struct Timeline {
    /// The operations, in order of their start.
    pub(super) bars: Vec<Bar>,
    /// Messages: the operation that sends and the one that receives, and the end of both.
    pub(super) arrows: Vec<(OperationId, OperationId, usize)>,
    /// End of the last operation.
    pub(super) end: usize,
}

/// One stream of one rank.
#[derive(Debug, Default)]
struct Lane {
    operations: Vec<usize>,
    /// Index in `operations` of the first that has not been seen.
    next: usize,
    /// Time up to which it is busy.
    busy: usize,
    /// Time at which what it did last ended: before a wait.
    idle: usize,
    /// The group of messages that it is in, with the group's begin and its first wait.
    group: Option<(usize, usize, usize)>,
}

struct Clock<'a> {
    schedule: &'a Schedule,
    lanes: BTreeMap<(usize, usize), Lane>,
    /// Times of records, by rank and operation.
    records: BTreeMap<(usize, usize), usize>,
    timeline: Timeline,
}

/// Returns the operations in time. `actions` is an order in which they may happen. Operations that are `stuck` never
/// begin; they stand behind all others.
pub(super) fn timeline(schedule: &Schedule, actions: &[Action], stuck: &[OperationId]) -> Timeline {
    let mut lanes: BTreeMap<(usize, usize), Lane> = BTreeMap::new();
    for (rank, program) in schedule.ranks.iter().enumerate() {
        for (index, operation) in program.operations.iter().enumerate() {
            lanes.entry((rank, operation.stream)).or_default().operations.push(index);
        }
    }
    let mut clock = Clock { schedule, lanes, records: BTreeMap::new(), timeline: Timeline::default() };
    for action in actions {
        clock.act(action);
    }
    let last = clock.timeline.bars.iter().map(|bar| bar.end).max().unwrap_or_default();
    for &at in stuck {
        let (waits, ready) = clock.ready(at);
        let (kind, start) = (Kind::of(clock.work(at)), last.max(ready));
        clock.timeline.bars.push(Bar { at, kind, waits, start, end: start + kind.steps() });
    }
    let mut timeline = clock.timeline;
    timeline.bars.sort_by_key(|bar| (bar.start, bar.at.rank, bar.at.operation));
    timeline.end = timeline.bars.iter().map(|bar| bar.end).max().unwrap_or_default();
    timeline
}

impl Clock<'_> {
    fn work(&self, at: OperationId) -> &Work {
        &self.schedule.ranks[at.rank].operations[at.operation].work
    }

    fn act(&mut self, action: &Action) {
        let places: Vec<OperationId> = action.places().copied().collect();
        let ready: Vec<(usize, usize)> = places.iter().map(|place| self.ready(*place)).collect();
        let start = ready.iter().map(|(_, ready)| *ready).max().unwrap_or_default();
        let mut end = start;
        for (&at, &(waits, ready)) in places.iter().zip(&ready) {
            let kind = Kind::of(self.work(at));
            end = start + kind.steps();
            self.timeline.bars.push(Bar { at, kind, waits, start, end });
            self.end(at, [waits, ready], end);
        }
        if let Action::Message(send, receive) = action {
            self.timeline.arrows.push((*send, *receive, end));
        }
    }

    /// Returns the time from which an operation's stream is idle, and that from which the operation may begin.
    fn ready(&mut self, at: OperationId) -> (usize, usize) {
        self.catch_up(at.rank, at.stream, at.operation);
        let group = group(self.work(at));
        let lane = self.lane(at.rank, at.stream);
        match lane.group.filter(|(of, _, _)| group == Some(*of)) {
            Some((_, begin, idle)) => (idle, begin),
            None => (lane.idle, lane.busy),
        }
    }

    fn end(&mut self, at: OperationId, [waits, ready]: [usize; 2], end: usize) {
        let group = group(self.work(at));
        let lane = self.lane(at.rank, at.stream);
        lane.group = group.map(|group| (group, ready, waits));
        lane.busy = lane.busy.max(end);
        lane.idle = lane.busy;
        let done = lane.operations.partition_point(|operation| *operation <= at.operation);
        lane.next = lane.next.max(done);
    }

    /// Goes through the records and waits of a stream that come before an operation. Its other operations have been
    /// seen already, since the order allows it.
    fn catch_up(&mut self, rank: usize, stream: usize, before: usize) {
        loop {
            let lane = self.lane(rank, stream);
            let Some(&operation) = lane.operations.get(lane.next).filter(|next| **next < before) else {
                return;
            };
            lane.next += 1;
            let busy = lane.busy;
            let until = match &self.schedule.ranks[rank].operations[operation].work {
                Work::RecordEvent(_) => {
                    self.records.insert((rank, operation), busy);
                    busy
                }
                Work::WaitEvent(_) => self.recorded(rank, operation),
                _ => busy,
            };
            let lane = self.lane(rank, stream);
            lane.busy = lane.busy.max(until);
        }
    }

    /// Returns the time of the record that a wait is for.
    fn recorded(&mut self, rank: usize, wait: usize) -> usize {
        let operations = &self.schedule.ranks[rank].operations;
        let Work::WaitEvent(event) = operations[wait].work else { return 0 };
        let record =
            operations[..wait].iter().rposition(|operation| operation.work == Work::RecordEvent(event));
        let Some(record) = record else { return 0 };
        let stream = operations[record].stream;
        self.catch_up(rank, stream, record + 1);
        self.records.get(&(rank, record)).copied().unwrap_or_default()
    }

    fn lane(&mut self, rank: usize, stream: usize) -> &mut Lane {
        self.lanes.entry((rank, stream)).or_default()
    }
}

fn group(work: &Work) -> Option<usize> {
    match work {
        Work::Send { group, .. } | Work::Recv { group, .. } => *group,
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use seamproof_oracle::{Algorithm, Balance, ContextParallel, Heads, Mask, Problem, ProblemFields};
    use seamproof_simulator::check::actions;
    use seamproof_simulator::schedule::build;

    fn problem(algorithm: Algorithm, ranks: usize) -> Problem {
        let fields = ProblemFields {
            mask: Mask::CAUSAL,
            heads: Heads { q: 4, kv: 4 },
            parallel: ContextParallel::over(ranks, algorithm, Balance::DualChunk),
            ..ProblemFields::padded(&[(29, 32), (8, 16)], 4)
        };
        Problem::new(fields).unwrap()
    }

    fn drawn(algorithm: Algorithm, ranks: usize) -> (Schedule, Timeline) {
        let problem = problem(algorithm, ranks);
        let schedule = build(&problem).unwrap();
        let (done, stuck) = actions(&problem, &schedule).unwrap();
        assert!(stuck.is_empty());
        let timeline = timeline(&schedule, &done, &stuck);
        (schedule, timeline)
    }

    /// Test that a schedule which stops is drawn to where it stops, and that what never begins stands behind it.
    #[test]
    fn what_never_begins_stands_at_the_end() {
        let problem = problem(Algorithm::Ring, 4);
        let mut schedule = build(&problem).unwrap();
        let works = schedule.ranks[0].operations.iter_mut().map(|operation| &mut operation.work);
        let to =
            works.filter_map(|work| if let Work::Send { to, .. } = work { Some(to) } else { None }).next();
        *to.expect("a ring sends") = 2;
        let (done, stuck) = actions(&problem, &schedule).unwrap();
        let timeline = timeline(&schedule, &done, &stuck);
        let (late, early): (Vec<&Bar>, Vec<&Bar>) =
            timeline.bars.iter().partition(|bar| stuck.contains(&bar.at));
        assert!(late.len() > 1 && late.len() == stuck.len() && !early.is_empty());
        let last = early.iter().map(|bar| bar.end).max();
        assert!(late.iter().all(|bar| Some(bar.start) >= last), "{late:?}");
    }

    /// Test that every operation that takes time has a bar, that no stream does two things at once, that both ends of a
    /// message are at one time, and that no operation begins before what its stream waits for was recorded.
    #[test]
    fn time_keeps_the_order_of_the_schedule() {
        let hierarchical = Algorithm::Hierarchical { all_to_all: 2 };
        let all = [
            (Algorithm::Single, 1),
            (Algorithm::Ring, 4),
            (Algorithm::AllGather, 4),
            (Algorithm::AllToAll, 4),
        ];
        for (algorithm, ranks) in all.into_iter().chain([(hierarchical, 4)]) {
            let (schedule, timeline) = drawn(algorithm, ranks);
            let bars: BTreeMap<(usize, usize), &Bar> =
                timeline.bars.iter().map(|bar| ((bar.at.rank, bar.at.operation), bar)).collect();
            for (rank, program) in schedule.ranks.iter().enumerate() {
                let (mut lanes, mut recorded) = (BTreeMap::new(), BTreeMap::new());
                for (index, operation) in program.operations.iter().enumerate() {
                    let (busy, of): &mut (usize, Option<usize>) = lanes.entry(operation.stream).or_default();
                    match &operation.work {
                        Work::RecordEvent(event) => drop(recorded.insert(*event, *busy)),
                        Work::WaitEvent(event) => *busy = (*busy).max(recorded[event]),
                        work => {
                            let bar = bars[&(rank, index)];
                            let together = group(work).is_some() && group(work) == *of;
                            assert!(together || bar.start >= *busy, "{algorithm:?} {bar:?} before {busy}");
                            assert!(bar.waits <= bar.start && bar.start < bar.end, "{bar:?}");
                            (*busy, *of) = ((*busy).max(bar.end), group(work));
                        }
                    }
                }
            }
            let timed = |program: &seamproof_simulator::schedule::RankProgram| {
                let takes_time = |work: &Work| !matches!(work, Work::RecordEvent(_) | Work::WaitEvent(_));
                program.operations.iter().filter(|operation| takes_time(&operation.work)).count()
            };
            assert_eq!(timeline.bars.len(), schedule.ranks.iter().map(timed).sum::<usize>());
            for (send, receive, end) in &timeline.arrows {
                for at in [send, receive] {
                    assert_eq!(bars[&(at.rank, at.operation)].end, *end, "{algorithm:?}");
                }
            }
        }
    }
}
