//! Wrong schedules under the checker: each test edits a right schedule in one place and names the error.

use seamproof_oracle::{
    Algorithm, Balance, ContextParallel, Heads, Mask, Problem, ProblemFields, Run, Sink, Softmax, TensorName,
    TensorRows,
};
use seamproof_simulator::AttentionCall;
use seamproof_simulator::check::{CheckError, CoverKind, check};
use seamproof_simulator::schedule::{
    BufferId, EventId, FillValue, MergeOrder, MergeStyle, Operation, Region, Schedule, Work, build,
    build_with,
};

/// Returns a problem with two causal sequences, 13 and 9 of 16 rows each, with a learnable sink, forward and backward.
fn problem(algorithm: Algorithm, cp: usize) -> Problem {
    let fields = ProblemFields {
        rows: TensorRows { q: 36, kv: 36 },
        heads: Heads { q: 4, kv: 4 },
        mask: Mask::CAUSAL,
        softmax: Softmax { sink: Sink::Learnable, ..Softmax::scaled(0.5) },
        parallel: ContextParallel::over(cp, algorithm, Balance::DualChunk),
        ..ProblemFields::padded(&[(13, 16), (9, 16)], 2)
    };
    Problem::new(fields).unwrap()
}

const SINGLE: (Algorithm, usize) = (Algorithm::Single, 1);
const RING: (Algorithm, usize) = (Algorithm::Ring, 4);
const ALL_GATHER: (Algorithm, usize) = (Algorithm::AllGather, 2);
const ALL_TO_ALL: (Algorithm, usize) = (Algorithm::AllToAll, 2);

/// Returns the errors of an edited schedule. A schedule without errors fails the test.
fn errors(subject: (Algorithm, usize), edit: impl FnOnce(&mut Schedule)) -> Vec<CheckError> {
    errors_of(subject, MergeOrder::Running, edit)
}

fn errors_of(
    (algorithm, cp): (Algorithm, usize),
    order: MergeOrder,
    edit: impl FnOnce(&mut Schedule),
) -> Vec<CheckError> {
    let problem = problem(algorithm, cp);
    let mut schedule = build_with(&problem, order).unwrap();
    assert!(check(&problem, &schedule).is_ok());
    edit(&mut schedule);
    check(&problem, &schedule).expect_err("an edited schedule passed")
}

/// Returns the index of the `nth` operation of a rank that `is` accepts.
fn find(schedule: &Schedule, rank: usize, nth: usize, is: fn(&Work) -> bool) -> usize {
    let operations = schedule.ranks[rank].operations.iter().enumerate();
    operations.filter(|(_, operation)| is(&operation.work)).nth(nth).expect("no such operation").0
}

fn work(schedule: &mut Schedule, rank: usize, nth: usize, is: fn(&Work) -> bool) -> &mut Work {
    let index = find(schedule, rank, nth, is);
    &mut schedule.ranks[rank].operations[index].work
}

/// Replaces an operation with one that has no effect.
fn remove(schedule: &mut Schedule, rank: usize, nth: usize, is: fn(&Work) -> bool) {
    *work(schedule, rank, nth, is) = Work::RecordEvent(EventId(usize::MAX));
}

fn repeat(schedule: &mut Schedule, rank: usize, nth: usize, is: fn(&Work) -> bool) {
    let index = find(schedule, rank, nth, is);
    let program = &mut schedule.ranks[rank];
    program.operations.insert(index, program.operations[index].clone());
    program.backward = program.backward.map(|begin| begin + usize::from(index < begin));
}

fn attends(work: &Work) -> bool {
    matches!(work, Work::Attend(_))
}

fn weighted(work: &Work) -> bool {
    matches!(work, Work::Merge(merge) if matches!(merge.style, MergeStyle::Weighted { .. }))
}

fn call(schedule: &mut Schedule, rank: usize, nth: usize) -> &mut AttentionCall {
    match work(schedule, rank, nth, attends) {
        Work::Attend(attend) => &mut attend.call,
        other => panic!("{other:?}"),
    }
}

fn any(errors: &[CheckError], is: impl Fn(&CheckError) -> bool) -> bool {
    let found = errors.iter().any(is);
    assert!(found, "{:#?}", errors.iter().map(ToString::to_string).collect::<Vec<_>>());
    found
}

fn malformed(errors: &[CheckError]) {
    any(errors, |error| matches!(error, CheckError::Malformed { .. } | CheckError::Table { .. }));
}

fn covers(errors: &[CheckError], expected: CoverKind, of: TensorName) {
    any(
        errors,
        |error| matches!(error, CheckError::Cover { kind, tensor, .. } if *kind == expected && *tensor == of),
    );
}

fn content(errors: &[CheckError], what: &str) {
    any(errors, |error| matches!(error, CheckError::Content { found, .. } if found.contains(what)));
}

#[test]
fn a_query_row_in_two_segments() {
    malformed(&errors(SINGLE, |schedule| {
        let call = call(schedule, 0, 0);
        call.segments.push(call.segments[0].clone());
    }));
}

#[test]
fn a_band_that_is_one_key_off() {
    for subject in [SINGLE, RING, ALL_GATHER, ALL_TO_ALL] {
        for (by, kind) in [(1, CoverKind::Invisible), (-1, CoverKind::Missing)] {
            let errors = errors(subject, |schedule| {
                let segment = &mut call(schedule, 0, 0).segments[0];
                segment.hi = segment.hi.map(|hi| hi + by);
            });
            covers(&errors, kind, TensorName::Out);
        }
    }
    covers(
        &errors(ALL_GATHER, |schedule| call(schedule, 1, 0).segments[1].lo = Some(0)),
        CoverKind::Missing,
        TensorName::Out,
    );
}

#[test]
fn a_key_run_one_row_too_long() {
    for subject in [SINGLE, ALL_TO_ALL] {
        let errors = errors(subject, |schedule| call(schedule, 0, 0).segments[1].kv[0].len += 1);
        content(&errors, "padding");
    }
}

#[test]
fn keys_of_another_sequence() {
    for subject in [SINGLE, ALL_GATHER, ALL_TO_ALL] {
        let errors = errors(subject, |schedule| {
            let segments = &mut call(schedule, 0, 0).segments;
            let other = segments.len() / 2;
            segments[0].kv = segments[other].kv.clone();
        });
        content(&errors, "k of sequence 1");
    }
}

#[test]
fn a_merge_that_is_missing_or_doubled() {
    let merges = |work: &Work| matches!(work, Work::Merge(_));
    for nth in 0..3 {
        let missing = errors(RING, |schedule| remove(schedule, 3, nth, merges));
        covers(&missing, CoverKind::Missing, TensorName::Out);
        let twice = errors(RING, |schedule| repeat(schedule, 3, nth, merges));
        covers(&twice, CoverKind::Twice, TensorName::Out);
    }
}

#[test]
fn a_deferred_merge_that_is_missing_or_doubled_or_early() {
    let deferred = |edit: &dyn Fn(&mut Schedule)| errors_of(RING, MergeOrder::Deferred, edit);
    let statistics =
        |work: &Work| matches!(work, Work::Merge(merge) if merge.style == MergeStyle::Statistics);
    for nth in 0..3 {
        let missing = deferred(&|schedule| remove(schedule, 3, nth, weighted));
        covers(&missing, CoverKind::Missing, TensorName::Out);
        let twice = deferred(&|schedule| repeat(schedule, 3, nth, weighted));
        covers(&twice, CoverKind::Twice, TensorName::Out);
        let unknown = deferred(&|schedule| remove(schedule, 3, nth, statistics));
        covers(&unknown, CoverKind::Missing, TensorName::Out);
    }
    // An out is weighted by an LSE to which more steps are added later.
    let early = deferred(&|schedule| {
        let (last, first) = (find(schedule, 3, 3, statistics), find(schedule, 3, 0, weighted));
        let operation = schedule.ranks[3].operations.remove(first);
        schedule.ranks[3].operations.insert(last, operation);
    });
    content(&early, "out");
}

/// Inserts copies of rows 0 and 1 before an operation.
fn copy_before(schedule: &mut Schedule, rank: usize, at: usize, copies: &[(BufferId, BufferId, [usize; 2])]) {
    let program = &mut schedule.ranks[rank];
    let stream = program.operations[at].stream;
    for &(from, to, rows) in copies.iter().rev() {
        let row = |row| Run::packed(row, 1, 1);
        let rows = vec![(row(0), row(rows[0])), (row(1), row(rows[1]))];
        program.operations.insert(at, Operation { stream, work: Work::Copy { from, to, rows } });
    }
    program.backward = program.backward.map(|begin| begin + copies.len());
}

/// Exchanges rows 0 and 1 of a buffer before an operation.
fn swap_before(schedule: &mut Schedule, rank: usize, at: usize, buffer: BufferId, scratch: BufferId) {
    copy_before(schedule, rank, at, &[(buffer, scratch, [1, 0]), (scratch, buffer, [0, 1])]);
}

/// Returns the out and LSE of a rank's first step, which nobody reads after the merge, and the out and LSE into which
/// they are merged.
fn merged(schedule: &Schedule, rank: usize, is: fn(&Work) -> bool) -> [BufferId; 4] {
    let index = find(schedule, rank, 0, is);
    match &schedule.ranks[rank].operations[index].work {
        Work::Merge(merge) => [merge.step_out, merge.step_lse, merge.out, merge.lse],
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_step_that_is_weighed_into_the_out_of_another_row() {
    // The rows have one cover, and the step and its final LSE are of the right row.
    let wrong = errors_of(RING, MergeOrder::Deferred, |schedule| {
        let [scratch, _, out, _] = merged(schedule, 3, weighted);
        let second = find(schedule, 3, 1, weighted);
        swap_before(schedule, 3, second, out, scratch);
    });
    any(
        &wrong,
        |error| matches!(error, CheckError::Content { at, needed, .. } if at.rank == 3 && needed.contains("outs weighted against the same lse")),
    );
}

#[test]
fn a_sink_that_is_applied_by_the_lse_of_other_rows_or_pairs() {
    let applies = |work: &Work| matches!(work, Work::ApplySink { .. });
    let refused = |wrong: &[CheckError]| {
        any(
            wrong,
            |error| matches!(error, CheckError::Content { at, needed, .. } if at.rank == 3 && needed.contains("the sink needs an out and its lse")),
        );
    };
    // The rows are exchanged and exchanged back: at the end every row is in its place.
    refused(&errors(RING, |schedule| {
        let [_, scratch, _, lse] = merged(schedule, 3, |work| matches!(work, Work::Merge(_)));
        let index = find(schedule, 3, 0, applies);
        swap_before(schedule, 3, index + 1, lse, scratch);
        swap_before(schedule, 3, index, lse, scratch);
    }));
    refused(&errors(RING, |schedule| {
        let [_, step, _, lse] = merged(schedule, 3, |work| matches!(work, Work::Merge(_)));
        let index = find(schedule, 3, 0, applies);
        copy_before(schedule, 3, index, &[(step, lse, [0, 1])]);
    }));
}

#[test]
fn a_sink_of_other_heads_in_one_band() {
    let wrong = errors(RING, |schedule| {
        let sink = |schedule: &Schedule, rank: usize| {
            let mut placed = schedule.placements.iter().filter(|placed| placed.tensor == TensorName::Sink);
            placed.find(|placed| schedule.buffers[placed.buffer.0].rank == rank).unwrap().buffer
        };
        let region = |rank, head| Region {
            buffer: sink(schedule, rank),
            rows: Run::packed(0, 0, 0),
            heads: head..head + 1,
        };
        let (send, receive) = (vec![region(0, 1)], vec![region(1, 0)]);
        for (rank, work) in [
            (0, Work::Send { to: 1, group: None, regions: send }),
            (1, Work::Recv { from: 0, group: None, regions: receive }),
        ] {
            schedule.ranks[rank].operations.insert(0, Operation { stream: 0, work });
            schedule.ranks[rank].backward = schedule.ranks[rank].backward.map(|begin| begin + 1);
        }
    });
    any(
        &wrong,
        |error| matches!(error, CheckError::Content { at, needed, .. } if at.rank == 1 && needed.contains("of its own heads")),
    );
}

#[test]
fn an_event_that_is_not_waited_for() {
    let waits = |work: &Work| matches!(work, Work::WaitEvent(_));
    for subject in [ALL_GATHER, ALL_TO_ALL] {
        let races = errors(subject, |schedule| remove(schedule, 1, 0, waits));
        any(&races, |error| matches!(error, CheckError::Race { first, .. } if first.rank == 1));
    }
    // On the ring, some waits are implied by others, but most are not.
    let problem = problem(RING.0, RING.1);
    let schedule = build(&problem).unwrap();
    let count = schedule.ranks[1].operations.iter().filter(|operation| waits(&operation.work)).count();
    let races = (0..count).filter(|&nth| {
        let mut edited = schedule.clone();
        remove(&mut edited, 1, nth, waits);
        check(&problem, &edited)
            .is_err_and(|errors| errors.iter().any(|error| matches!(error, CheckError::Race { .. })))
    });
    let races = races.count();
    assert!(races * 3 > count * 2, "{races} of {count}");
}

#[test]
fn an_event_that_nobody_records() {
    malformed(&errors(RING, |schedule| {
        *work(schedule, 0, 0, |work| matches!(work, Work::WaitEvent(_))) = Work::WaitEvent(EventId(77_777));
    }));
}

#[test]
fn a_message_that_goes_astray() {
    let deadlock = |errors: &[CheckError]| any(errors, |error| matches!(error, CheckError::Deadlock { .. }));
    deadlock(&errors(RING, |schedule| {
        if let Work::Send { to, .. } = work(schedule, 0, 0, |work| matches!(work, Work::Send { .. })) {
            *to = 2;
        }
    }));
    deadlock(&errors(RING, |schedule| remove(schedule, 2, 1, |work| matches!(work, Work::Recv { .. }))));
}

#[test]
fn receives_before_sends_on_every_rank() {
    let deadlocks = errors(RING, |schedule| {
        for rank in 0..4 {
            let send = find(schedule, rank, 0, |work| matches!(work, Work::Send { .. }));
            let operations = &mut schedule.ranks[rank].operations;
            operations.swap(send, send + 1);
            for Operation { work, .. } in &mut operations[send..send + 2] {
                if let Work::Send { group, .. } | Work::Recv { group, .. } = work {
                    *group = None;
                }
            }
        }
    });
    assert!(deadlocks.iter().all(|error| matches!(error, CheckError::Deadlock { .. })));
    let waits = deadlocks.iter().map(ToString::to_string).collect::<String>();
    assert!(waits.contains("waits for the send of rank"), "{waits}");
}

#[test]
fn rows_ranks_and_buffers_out_of_range() {
    let huge = Run { offset: usize::MAX, step: usize::MAX, len: usize::MAX, span: usize::MAX };
    malformed(&errors(SINGLE, |schedule| call(schedule, 0, 0).segments[0].q.offset = 30));
    malformed(&errors(SINGLE, |schedule| call(schedule, 0, 0).segments[0].kv[0] = huge));
    malformed(&errors(RING, |schedule| {
        let to = BufferId(usize::MAX);
        *work(schedule, 0, 0, attends) = Work::Fill { to, rows: vec![huge], value: FillValue::Zero };
    }));
    malformed(&errors(RING, |schedule| {
        let regions: Vec<Region> = Vec::new();
        *work(schedule, 0, 0, attends) = Work::Send { to: usize::MAX, group: None, regions };
    }));
    malformed(&errors(RING, |schedule| schedule.buffers[3].rank = 9));
    malformed(&errors(RING, |schedule| schedule.communicators[0].push(0)));
    malformed(&errors(RING, |schedule| schedule.placements[0].rows[0].sequence = 5));
    malformed(&errors(RING, |schedule| drop(schedule.ranks.pop())));
    malformed(&errors(RING, |schedule| schedule.placements[0].heads = 2..9));
}

#[test]
fn a_sink_twice_or_never() {
    let sinks = |work: &Work| matches!(work, Work::ApplySink { .. });
    content(&errors(RING, |schedule| repeat(schedule, 1, 0, sinks)), "out");
    content(&errors(RING, |schedule| remove(schedule, 1, 0, sinks)), "out");
    let never = errors(ALL_GATHER, |schedule| call(schedule, 0, 0).softmax.sink = Sink::None);
    content(&never, "out");
    let forgotten =
        errors(RING, |schedule| remove(schedule, 1, 0, |work| matches!(work, Work::SinkGradient { .. })));
    any(&forgotten, |error| matches!(error, CheckError::Result { tensor: TensorName::Dsink, .. }));
}

#[test]
fn a_gradient_twice_or_dropped() {
    let adds = |work: &Work| matches!(work, Work::Accumulate { .. });
    for (subject, nth) in [(RING, 0), (RING, 1), (RING, 2), (RING, 5), (ALL_GATHER, 1)] {
        for (kind, edit) in [
            (CoverKind::Twice, repeat as fn(&mut Schedule, usize, usize, fn(&Work) -> bool)),
            (CoverKind::Missing, remove),
        ] {
            let wrong = errors(subject, |schedule| edit(schedule, 1, nth, adds));
            any(&wrong, |error| matches!(error, CheckError::Cover { kind: found, .. } if *found == kind));
        }
    }
}

#[test]
fn rows_that_were_never_written() {
    let copies = |work: &Work| matches!(work, Work::Copy { .. });
    content(&errors(ALL_GATHER, |schedule| remove(schedule, 0, 0, copies)), "nothing yet");
    let unfilled =
        errors(ALL_GATHER, |schedule| remove(schedule, 0, 0, |work| matches!(work, Work::Fill { .. })));
    content(&unfilled, "nothing yet");
}

#[test]
fn a_fill_of_result_rows_that_no_sequence_owns() {
    // The row lies past the rank's two slots.
    for (subject, row) in [(SINGLE, 33), (RING, 8), (ALL_GATHER, 17), (ALL_TO_ALL, 16)] {
        for (tensor, value) in [
            (TensorName::Out, FillValue::Zero),
            (TensorName::Lse, FillValue::NegInfinity),
            (TensorName::Dk, FillValue::Zero),
        ] {
            let filled = errors(subject, |schedule| {
                let placed = schedule.placements.iter().find(|placement| placement.tensor == tensor).unwrap();
                let work = Work::Fill { to: placed.buffer, rows: vec![Run::packed(row, 1, 1)], value };
                schedule.ranks[0].operations.push(Operation { stream: 0, work });
            });
            any(
                &filled,
                |error| matches!(error, CheckError::Result { tensor: of, rows, .. } if *of == tensor && rows.contains(&row)),
            );
        }
    }
}

#[test]
fn padding_on_a_real_row() {
    for subject in [SINGLE, RING, ALL_GATHER, ALL_TO_ALL] {
        let cp = subject.1;
        let poisoned = errors(subject, |schedule| {
            let k = schedule
                .placements
                .iter()
                .find(|placement| placement.tensor == TensorName::K)
                .unwrap()
                .buffer;
            let one = |row| Run::packed(row, 1, 1);
            let rows = vec![(one(36 / cp - 1), one(1))];
            let work = Work::Copy { from: k, to: k, rows };
            schedule.ranks[0].operations.insert(0, Operation { stream: 0, work });
            schedule.ranks[0].backward = schedule.ranks[0].backward.map(|begin| begin + 1);
        });
        content(&poisoned, "padding");
    }
}

#[test]
fn rows_copied_to_the_wrong_place() {
    let wrong = errors(ALL_GATHER, |schedule| {
        if let Work::Copy { rows, .. } = work(schedule, 0, 0, |work| matches!(work, Work::Copy { .. })) {
            (rows[0].0, rows[1].0) = (rows[1].0, rows[0].0);
        }
    });
    content(&wrong, "v of sequence");
}

#[test]
fn collectives_in_another_order() {
    let gathers = |work: &Work| matches!(work, Work::AllGather { .. });
    let swapped = errors(ALL_GATHER, |schedule| {
        let [k, v] = [0, 1].map(|nth| find(schedule, 1, nth, gathers));
        schedule.ranks[1].operations.swap(k, v);
    });
    assert!(!swapped.is_empty());
    let other = errors(ALL_GATHER, |schedule| {
        let first = find(schedule, 1, 0, gathers);
        let max = find(schedule, 1, 0, |work| matches!(work, Work::AllReduce { .. }));
        schedule.ranks[1].operations.swap(first, max);
    });
    any(&other, |error| matches!(error, CheckError::Disagree { .. }));
    let absent = errors(ALL_GATHER, |schedule| remove(schedule, 1, 0, gathers));
    any(&absent, |error| matches!(error, CheckError::Deadlock { .. } | CheckError::Disagree { .. }));
}

#[test]
fn results_in_the_wrong_place() {
    let moved = errors(RING, |schedule| {
        let out =
            schedule.placements.iter_mut().find(|placement| placement.tensor == TensorName::Dk).unwrap();
        out.rows[0].piece.start += 1;
    });
    any(&moved, |error| matches!(error, CheckError::Result { tensor: TensorName::Dk, .. }));
    let lost = errors(RING, |schedule| {
        let lse =
            schedule.placements.iter_mut().find(|placement| placement.tensor == TensorName::Lse).unwrap();
        lse.rows.remove(0);
    });
    any(&lost, |error| {
        matches!(error, CheckError::Ownership { tensor: TensorName::Lse, .. })
            || matches!(error, CheckError::Result { .. })
    });
    let unreduced = errors(RING, |schedule| {
        for rank in 0..4 {
            remove(schedule, rank, 0, |work| matches!(work, Work::AllReduce { .. }));
        }
    });
    any(&unreduced, |error| matches!(error, CheckError::Result { tensor: TensorName::MaxLogit, .. }));
}

#[test]
fn a_launch_that_writes_what_it_reads() {
    malformed(&errors(SINGLE, |schedule| {
        let Work::Attend(attend) = work(schedule, 0, 0, attends) else { panic!() };
        attend.out = attend.q;
    }));
    malformed(&errors(SINGLE, |schedule| {
        let is = |work: &Work| matches!(work, Work::AttendBackward(_));
        let Work::AttendBackward(attend) = work(schedule, 0, 0, is) else { panic!() };
        attend.dv = attend.dk;
    }));
}

#[test]
fn a_host_that_reads() {
    malformed(&errors(SINGLE, |schedule| {
        let region = Region { buffer: BufferId(0), rows: Run::packed(0, 1, 1), heads: 0..1 };
        schedule.ranks[0].operations.push(Operation { stream: 0, work: Work::HostRead(region) });
    }));
}

#[test]
fn a_million_operations_end() {
    let problem = problem(Algorithm::Single, 1);
    let schedule = build(&problem).unwrap();
    for (work, streams) in [
        (Work::RecordEvent(EventId(0)), 1),
        (Work::RecordEvent(EventId(0)), usize::MAX),
        (schedule.ranks[0].operations[1].work.clone(), 1),
        (
            Work::Fill {
                to: BufferId(0),
                rows: vec![Run { offset: 0, step: 2, len: 18, span: 18 }],
                value: FillValue::Zero,
            },
            3,
        ),
    ] {
        let mut edited = schedule.clone();
        let many = (0..1_000_000).map(|index| Operation { stream: index % streams, work: work.clone() });
        edited.ranks[0].operations.splice(1..1, many);
        let _ = check(&problem, &edited);
    }
    // Repeated sums of a result with a copy of itself double its terms each time.
    let mut edited = schedule.clone();
    let Work::Attend(attend) = &schedule.ranks[0].operations[1].work else { panic!() };
    let dq = schedule.placements.iter().find(|placement| placement.tensor == TensorName::Dq).unwrap().buffer;
    edited.buffers.push(edited.buffers[dq.0].clone());
    let double = BufferId(edited.buffers.len() - 1);
    edited.buffers[double.0].role = seamproof_simulator::schedule::Role::Scratch;
    let rows = vec![(attend.call.segments[0].q, attend.call.segments[0].q)];
    for (from, to) in std::iter::repeat_n([(dq, double), (double, dq)], 50_000).flatten() {
        let copy = Work::Copy { from, to, rows: rows.clone() };
        let add = Work::Accumulate { from, to, rows: rows.clone() };
        edited.ranks[0].operations.extend([copy, add].map(|work| Operation { stream: 0, work }));
    }
    assert!(check(&problem, &edited).is_err());
}
