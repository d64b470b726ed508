//! Schedules that are built once and kept.

use seamproof_judge::generate::{self, Draw, Limits};
use seamproof_judge::simulator::schedule::{MergeOrder, build, build_with};
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

/// Test of drawn groups that are a part of their world, or in an order of their own. Each rank of the group has one
/// program, and every message is between two ranks of the group: idle ranks of the world have neither. By places, the
/// schedule is that of the same group alone in the world.
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
        let members: Vec<usize> = parallel.world_ranks().collect();
        assert_eq!((&schedule.members, schedule.ranks.len()), (&members, parallel.all_of_world()));
        let fields = ProblemFields { parallel: alone, ..ProblemFields::from(problem) };
        let by_place = build(&Problem::new(fields).unwrap()).unwrap();
        for (rank, program) in schedule.ranks.iter().enumerate() {
            let Some(place) = schedule.place(rank) else {
                assert!(program.operations.is_empty(), "rank {rank} in {parallel:?}");
                continue;
            };
            let own = &by_place.ranks[place].operations;
            assert_eq!(program.operations.len(), own.len());
            for (operation, own) in program.operations.iter().zip(own) {
                let places = by_place.named(&own.work).iter().map(|place| members[*place]);
                assert!(schedule.named(&operation.work).iter().copied().eq(places), "{parallel:?}");
                messages += schedule.named(&operation.work).len();
            }
        }
        parts += usize::from(parallel.world > parallel.size());
    }
    assert!(parts >= 30 && messages >= 100, "{parts} parts of a world, {messages} messages");
}
