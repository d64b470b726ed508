//! Schedules that are built once and kept.

use std::collections::BTreeSet;

use seamproof_judge::generate::{self, Draw, Limits};
use seamproof_judge::simulator::schedule::{MergeOrder, Schedule, Work, build, build_with};
use seamproof_judge::subjects::built;
use seamproof_oracle::{ContextParallel, Problem, ProblemFields};

/// Test that the answer is the builder's, whatever was asked before.
#[test]
fn the_schedule_is_always_the_problems_own() {
    for index in 0..200 {
        let Draw::Problem(problem) = generate::draw(11, index, &Limits::fuzz()) else { continue };
        use MergeOrder::{Deferred, Running};
        for order in [Running, Deferred, Deferred, Running, Deferred, Running, Running] {
            let got = built(&problem, order).map(|schedule| (*schedule).clone());
            assert_eq!(got, build_with(&problem, order));
        }
    }
}

/// Returns the world ranks between which a schedule has messages: the ends of every send and receive, and the members
/// of every communicator that is used. Operations name places in the group, and the group says which rank is where. The
/// ranks of a region are where its member is.
fn world_ranks_of_messages(problem: &Problem, schedule: &Schedule) -> BTreeSet<(usize, usize)> {
    let (world, region) = (&problem.parallel.ranks, problem.parallel.region);
    let mut ends = BTreeSet::new();
    for (place, program) in schedule.ranks.iter().enumerate() {
        for operation in &program.operations {
            let peers = match &operation.work {
                Work::Send { to: peer, .. } | Work::Recv { from: peer, .. } => vec![*peer],
                Work::AllGather { communicator, .. }
                | Work::ReduceScatter { communicator, .. }
                | Work::AllToAll { communicator, .. }
                | Work::AllReduce { communicator, .. } => schedule.communicators[*communicator].clone(),
                _ => Vec::new(),
            };
            ends.extend(peers.into_iter().map(|peer| (world[place / region], world[peer / region])));
        }
    }
    ends
}

/// Test of drawn groups that are a part of their world, or in an order of their own. Each rank of the group has one
/// program, and every message is between two ranks of the group: idle ranks of the world have neither. The schedule is
/// that of the same group alone in the world, so no program depends on the numbers of its ranks.
#[test]
fn idle_ranks_of_the_world_have_no_operation_and_no_message() {
    let (mut parts, mut messages) = (0, 0);
    for index in 0..400 {
        let Draw::Problem(problem) = generate::draw(12, index, &Limits::seams()) else { continue };
        let parallel = problem.parallel.clone();
        let whole = ContextParallel::over(parallel.size(), parallel.algorithm, parallel.balance);
        let alone = ContextParallel { region: parallel.region, ..whole };
        if parallel == alone {
            continue;
        }
        let Ok(schedule) = build(&problem) else { continue };
        let members: BTreeSet<usize> = parallel.ranks.iter().copied().collect();
        assert_eq!(schedule.ranks.len(), members.len() * parallel.region);
        for (from, to) in world_ranks_of_messages(&problem, &schedule) {
            assert!(members.contains(&from) && members.contains(&to), "{from} to {to} in {parallel:?}");
            messages += 1;
        }
        let fields = ProblemFields { parallel: alone, ..ProblemFields::from(problem) };
        assert_eq!(build(&Problem::new(fields).unwrap()).as_ref(), Ok(&schedule));
        parts += usize::from(parallel.world > parallel.size());
    }
    assert!(parts >= 30 && messages >= 100, "{parts} parts of a world, {messages} messages");
}
