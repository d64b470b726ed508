//! Faults of TransformerEngine's shipped order ([`MergeOrder::Deferred`]): tables of the wrong step, rank or lengths; and
//! of an all-gather's steps on two streams: rows and outs of the other step, and streams that do not wait.
//!
//! [`MergeOrder::Deferred`]: crate::schedule::MergeOrder::Deferred

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use seamproof_oracle::{Algorithm, Problem};

use super::edit::{remove, rewrite, works};
use super::fault::Catcher::{Checker, Envelope, Poison, Structure};
use super::fault::{Edit, Fault};
use crate::schedule::{
    BufferId, EventId, KeySource, Operation, RankProgram, Region, Schedule, SegmentSource, Work,
};

/// The context-parallel code with the steps.
const STEPS: &str = "https://github.com/NVIDIA/TransformerEngine/blob/main/transformer_engine/pytorch/attention/dot_product_attention/context_parallel.py";
/// The change that brought THD to the steps, with the kernel that copies valid rows.
const VALID_ROWS: &str = "https://github.com/NVIDIA/TransformerEngine/pull/2829";

pub(super) const FAULTS: &[Fault<Edit>] = &[
    Fault {
        id: "table-of-the-other-step",
        imitates: "a step's launch gets the running lengths of the other chunk",
        source: STEPS,
        entries: &[],
        caught_by: &[Checker, Structure, Poison, Envelope],
        edit: |_, schedule| of_the_other_step(schedule, launch_table),
    },
    Fault {
        id: "valid-rows-of-the-other-step",
        imitates: "the rows of one chunk are copied out of the out in which the other one was made",
        source: VALID_ROWS,
        entries: &[],
        caught_by: &[Checker, Structure, Poison, Envelope],
        edit: |_, schedule| of_the_other_step(schedule, copied_table),
    },
    Fault {
        id: "one-out-for-both-steps",
        imitates: "both steps' valid rows are copied from the out of the first one",
        source: VALID_ROWS,
        entries: &[],
        caught_by: &[Checker, Structure, Poison, Envelope],
        edit: |_, schedule| {
            for program in &mut schedule.ranks {
                let mut first: BTreeMap<BufferId, BufferId> = BTreeMap::new();
                for operation in &mut program.operations {
                    if let Work::CopyValid { from, to, .. } = &mut operation.work {
                        *from = *first.entry(*to).or_insert(*from);
                    }
                }
            }
        },
    },
    Fault {
        id: "table-of-floored-lengths",
        imitates: "the lengths from which tables are made are whole numbers of tokens a chunk: the rest vanishes",
        source: "https://github.com/NVIDIA/TransformerEngine/issues/1930",
        entries: &[24],
        caught_by: &[Checker, Structure, Poison, Envelope],
        edit: |_, schedule| {
            for work in works(schedule) {
                if let Work::MakeSegments { from, .. } = work {
                    let chunks = 2 * from.sides[0].cp;
                    let slots = Arc::make_mut(&mut from.sides).iter_mut().flat_map(|side| &mut side.slots);
                    slots.for_each(|slot| slot.len -= slot.len % chunks);
                }
            }
        },
    },
    Fault {
        id: "table-of-another-rank",
        imitates: "the tables of a step are made for the rank in the world, and not for its place in the group",
        source: "https://github.com/SandAI-org/MagiAttention/pull/71",
        entries: &[99],
        caught_by: &[Checker, Structure, Poison, Envelope],
        edit: |_, schedule| {
            let region = schedule.region();
            rewrite(schedule, |rank, mut operation| {
                if let Work::MakeSegments { from, .. } = &mut operation.work {
                    from.place = rank / region % from.sides[0].cp;
                }
                [operation]
            });
        },
    },
    Fault {
        id: "table-of-the-next-step",
        imitates: "a ring's step gets the running lengths of another step: its keys are taken for the next owner's",
        source: STEPS,
        entries: &[],
        caught_by: &[Checker, Structure, Poison, Envelope],
        edit: |_, schedule| {
            for work in works(schedule) {
                if let Work::MakeSegments {
                    from: SegmentSource { sides, keys: KeySource::Of(owner), .. },
                    ..
                } = work
                {
                    *owner = (*owner + 1) % sides[0].cp;
                }
            }
        },
    },
    Fault {
        id: "table-for-one-rank",
        imitates: "running lengths of whole sequences are used on a rank's shard, as though it began at position 0",
        source: "https://github.com/NVIDIA/TransformerEngine/pull/2596",
        entries: &[],
        caught_by: &[Checker, Structure, Poison, Envelope],
        edit: |_, schedule| {
            for work in works(schedule) {
                if let Work::MakeSegments {
                    from: SegmentSource { sides, place, keys: KeySource::Of(owner), .. },
                    ..
                } = work
                {
                    (*place, *owner) = (0, 0);
                    Arc::make_mut(sides).iter_mut().for_each(|side| side.cp = 1);
                }
            }
        },
    },
    Fault {
        id: "table-remade-too-late",
        imitates: "the running lengths of a step are computed behind its launch, which reads those of a step before",
        source: STEPS,
        entries: &[],
        caught_by: &[Checker, Structure, Poison, Envelope],
        edit: |_, schedule| {
            let mut made: BTreeSet<BufferId> = BTreeSet::new();
            for operations in schedule.ranks.iter_mut().map(|program| &mut program.operations) {
                for at in 1..operations.len() {
                    let Work::MakeSegments { to, .. } = operations[at - 1].work else { continue };
                    if !made.insert(to) && launch_table(&mut operations[at].work).is_some() {
                        operations.swap(at - 1, at);
                    }
                }
            }
        },
    },
    Fault {
        id: "step-before-the-gather",
        imitates: "the second stream does not wait for the first, which gathers and reorders the keys",
        source: STEPS,
        entries: &[],
        caught_by: &[Checker],
        edit: |problem, schedule| drop_waits(problem, schedule, Stream::Second, Stream::First, false),
    },
    Fault {
        id: "steps-not-joined",
        imitates: "the first stream goes on while the second one still works on its step",
        source: STEPS,
        entries: &[],
        caught_by: &[Checker],
        edit: |problem, schedule| drop_waits(problem, schedule, Stream::First, Stream::Second, false),
    },
    Fault {
        id: "gradients-added-at-once",
        imitates: "both steps add their dk and dv to the sums without waiting for each other",
        source: STEPS,
        entries: &[],
        caught_by: &[Checker],
        edit: |problem, schedule| drop_waits(problem, schedule, Stream::Second, Stream::First, true),
    },
];

/// Returns the rows of the table that a launch reads.
fn launch_table(work: &mut Work) -> Option<&mut Region> {
    match work {
        Work::Attend(attend) => attend.table.as_mut(),
        Work::AttendBackward(attend) => attend.table.as_mut(),
        _ => None,
    }
}

/// Returns the rows of the table that a copy reads.
fn copied_table(work: &mut Work) -> Option<&mut Region> {
    if let Work::CopyValid { table, .. } = work { Some(table) } else { None }
}

/// Gives each table that `pick` finds the rows of another step, if there is one.
fn of_the_other_step(schedule: &mut Schedule, pick: fn(&mut Work) -> Option<&mut Region>) {
    let tables = of_steps(schedule);
    for table in works(schedule).filter_map(pick) {
        let steps = tables.get(&table.buffer).into_iter().flatten();
        let other = steps.filter(|(first, _)| **first != table.rows.offset).map(|(_, other)| other).next();
        *table = other.unwrap_or(table).clone();
    }
}

/// Returns the rows that each step reads of a table, by their first row.
fn of_steps(schedule: &mut Schedule) -> BTreeMap<BufferId, BTreeMap<usize, Region>> {
    let mut tables: BTreeMap<BufferId, BTreeMap<usize, Region>> = BTreeMap::new();
    for table in works(schedule).filter_map(launch_table) {
        tables.entry(table.buffer).or_default().insert(table.rows.offset, table.clone());
    }
    tables
}

/// Stream of steps.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stream {
    First = 0,
    Second = 1,
}

/// Removes the waits of one stream for another. They are either the first waits of a pass, before the stream's own
/// work, or later ones.
fn drop_waits(problem: &Problem, schedule: &mut Schedule, waiting: Stream, awaited: Stream, later: bool) {
    if problem.parallel.algorithm != Algorithm::AllGather {
        return;
    }
    let dropped: Vec<Vec<EventId>> =
        schedule.ranks.iter().map(|program| waits(program, waiting, awaited, later)).collect();
    remove(schedule, |rank, Operation { stream, work }| match work {
        Work::WaitEvent(event) => *stream == waiting as usize && dropped[rank].contains(event),
        _ => false,
    });
}

/// Returns the events of one stream for which another one waits.
fn waits(program: &RankProgram, waiting: Stream, awaited: Stream, later: bool) -> Vec<EventId> {
    let (mut recorded, mut works, mut events) = (Vec::new(), 0, Vec::new());
    for (index, Operation { stream, work }) in program.operations.iter().enumerate() {
        works = if program.backward == Some(index) { 0 } else { works };
        match work {
            Work::RecordEvent(event) if *stream == awaited as usize => recorded.push(*event),
            Work::WaitEvent(event) if *stream == waiting as usize => {
                let first = waiting == Stream::First || works == 0;
                events.extend(recorded.contains(event).then_some(*event).filter(|_| first != later));
            }
            _ => works += usize::from(*stream == waiting as usize),
        }
    }
    events
}
