//! Groups in a larger world: ranks are those of the world, idle ones stay idle, and two groups run side by side, each
//! with the bits that it has alone.

use crate::common::hold::{hold, inputs};
use crate::common::{Draws, problem};

use seamproof_oracle::{Algorithm, Balance, ContextParallel, Heads, Problem, ProblemFields, Run, Sequence};
use seamproof_simulator::check::{CheckError, FormError, check, check_side_by_side};
use seamproof_simulator::device::{Buffers, Cpu};
use seamproof_simulator::emulated::Tiles;
use seamproof_simulator::executor::{Counts, ExecuteError, ExecutedPasses, execute, load};
use seamproof_simulator::faults::by_id;
use seamproof_simulator::schedule::{
    MergeOrder, RankProgram, Schedule, SideBySideError, Work, build, build_with, side_by_side,
};
use seamproof_simulator::threads::execute_on_threads;
use seamproof_simulator::{GuardedTensor, Real};

/// Every algorithm of several ranks, with its cut.
const FORMS: [(Algorithm, Balance); 5] = [
    (Algorithm::Ring, Balance::DualChunk),
    (Algorithm::Ring, Balance::Striped { stripe: 1 }),
    (Algorithm::AllGather, Balance::DualChunk),
    (Algorithm::AllToAll, Balance::Contiguous),
    (Algorithm::Hierarchical { all_to_all: 2 }, Balance::DualChunk),
];

/// Returns a drawn problem of a group, whose ranks are these of a world.
fn drawn(
    draws: &mut Draws,
    (algorithm, balance): (Algorithm, Balance),
    world: usize,
    ranks: &[usize],
) -> Problem {
    of_group(&problem(draws, algorithm, balance, ranks.len()), world, ranks)
}

/// Returns the same problem of a group whose ranks are these of a world.
fn of_group(problem: &Problem, world: usize, ranks: &[usize]) -> Problem {
    let mut fields = ProblemFields::from(problem.clone());
    fields.parallel = ContextParallel { world, ranks: ranks.to_vec(), ..fields.parallel };
    Problem::new(fields).unwrap()
}

/// Returns a problem of one sequence of `len` tokens.
fn of_one_sequence(form: (Algorithm, Balance), len: usize, ranks: &[usize]) -> Problem {
    let run = Run::packed(0, len, len);
    let sequence = Sequence { id: 0, q: run, kv: run };
    let parallel =
        ContextParallel { world: 4, ranks: ranks.to_vec(), ..ContextParallel::over(2, form.0, form.1) };
    let heads = Heads { q: 2, kv: 2 };
    Problem::new(ProblemFields { parallel, heads, ..ProblemFields::of(vec![sequence], 2) }).unwrap()
}

fn device(problem: &Problem) -> Cpu<f32> {
    Cpu::new(Tiles { q: 2, kv: 3 }, problem.precision.p.format, problem.precision.ds.format)
}

/// A group: its problem, its schedule and the seed of its inputs.
type Group<'a> = (&'a Problem, &'a Schedule, u64);

/// Returns the memory of groups side by side.
fn loaded(groups: &[Group<'_>]) -> Buffers<f32> {
    let of_group = |(problem, schedule, seed): &Group<'_>| {
        load::<f32>(schedule, problem, &inputs(problem, &mut Draws(*seed)), f32::NAN)
    };
    let mut all = of_group(&groups[0]);
    groups[1..].iter().for_each(|group| all.extend(of_group(group)));
    all
}

/// Manner in which ranks run.
#[derive(Clone, Copy)]
enum How {
    InTurn(u64),
    Threads(u64),
}

const RUNS: [How; 4] = [How::InTurn(1), How::InTurn(2), How::Threads(1), How::Threads(2)];

fn run(
    schedule: &Schedule,
    memory: &mut Buffers<f32>,
    of: &Problem,
    how: How,
) -> Result<Counts, ExecuteError> {
    let both = ExecutedPasses::Both;
    match how {
        How::InTurn(seed) => {
            let mut draws = Draws(seed);
            execute(schedule, both, &device(of), memory, |ready| draws.below(ready))
        }
        How::Threads(seed) => {
            let choose = |rank: usize| {
                let mut draws = Draws(seed + rank as u64);
                move |ready: usize| draws.below(ready)
            };
            execute_on_threads(schedule, both, &device(of), memory, choose)
        }
    }
}

/// Runs groups side by side, and returns the bits of every buffer.
fn bits(groups: &[Group<'_>], how: How) -> Result<Vec<Vec<u64>>, ExecuteError> {
    let schedules: Vec<&Schedule> = groups.iter().map(|(_, schedule, _)| *schedule).collect();
    let (all, mut memory) = (side_by_side(&schedules).unwrap(), loaded(groups));
    run(&all, &mut memory, groups[0].0, how)?;
    let of_tensor = |tensor: &GuardedTensor<f32>| tensor.raw().iter().map(|value| value.bits()).collect();
    Ok(memory.tensors().iter().map(of_tensor).collect())
}

#[test]
fn a_group_names_ranks_of_the_world_and_leaves_the_others_idle() {
    let mut draws = Draws(11);
    for form in FORMS {
        for ranks in [&[1, 3][..], &[4, 2], &[3, 0, 4, 1]] {
            let problem = drawn(&mut draws, form, 5, ranks);
            for &order in MergeOrder::of(form.0) {
                let schedule = build_with(&problem, order).unwrap();
                assert_eq!((&schedule.members[..], schedule.ranks.len()), (ranks, 5));
                for (rank, program) in schedule.ranks.iter().enumerate() {
                    let is_member = ranks.contains(&rank);
                    assert!(is_member || *program == RankProgram::default(), "rank {rank} is idle");
                    for operation in &program.operations {
                        assert!(schedule.named(&operation.work).iter().all(|peer| ranks.contains(peer)));
                    }
                }
                assert!(schedule.buffers.iter().all(|buffer| ranks.contains(&buffer.rank)));
                check(&problem, &schedule).unwrap_or_else(|errors| panic!("{errors:?}"));
                hold(&problem, &schedule, &mut draws);
            }
        }
    }
}

#[test]
fn regions_of_a_sub_group_are_blocks_of_the_world() {
    let mut fields = ProblemFields::from(drawn(&mut Draws(5), FORMS[0], 3, &[2, 0]));
    fields.heads = Heads { q: 4, kv: 2 };
    fields.parallel.region = 2;
    let problem = Problem::new(fields).unwrap();
    let schedule = build(&problem).unwrap();
    assert_eq!((schedule.members.clone(), schedule.ranks.len()), (vec![4, 5, 0, 1], 6));
    check(&problem, &schedule).unwrap_or_else(|errors| panic!("{errors:?}"));
    hold(&problem, &schedule, &mut Draws(6));
}

#[test]
fn groups_side_by_side_have_the_bits_of_each_alone() {
    let mut draws = Draws(17);
    for form in FORMS {
        for _ in 0..4 {
            let one = drawn(&mut draws, form, 4, &[0, 2]);
            let other = drawn(&mut draws, (Algorithm::Ring, Balance::Contiguous), 4, &[3, 1]);
            let schedules = [&one, &other].map(|problem| build(problem).unwrap());
            check_side_by_side(&[(&one, &schedules[0]), (&other, &schedules[1])])
                .unwrap_or_else(|errors| panic!("{errors:?}"));
            let groups = [(&one, &schedules[0], 1), (&other, &schedules[1], 2)];
            let alone = groups.map(|group| bits(&[group], How::InTurn(0)).unwrap()).concat();
            for how in RUNS {
                assert!(bits(&groups, how).as_ref() == Ok(&alone), "{one:?}\n{other:?}");
            }
        }
    }
}

/// Returns the two groups `[0, 2]` and `[1, 3]` of one world on the same problem, with a fault in both.
fn planted(fault: &str, form: (Algorithm, Balance)) -> [(Problem, Schedule); 2] {
    let fault = by_id(fault).unwrap();
    [[0, 2], [1, 3]].map(|ranks| {
        let problem = of_one_sequence(form, 8, &ranks);
        let mut schedule = fault.schedule(&problem).unwrap();
        assert!(fault.plant(&problem, &mut schedule), "{ranks:?}");
        (problem, schedule)
    })
}

fn is_outside(error: &CheckError) -> bool {
    let (CheckError::Malformed { fault, .. } | CheckError::Table { fault, .. }) = error else { return false };
    matches!(fault, FormError::Outside(_))
}

/// The groups run to their ends. What each rank gets is what the right schedule of the wrong groups, `[0, 1]` and
/// `[2, 3]`, brings it: rows of the other group.
#[test]
fn what_goes_to_the_other_group_gets_there() {
    for form in [FORMS[0], FORMS[2], FORMS[3]] {
        let wrong = planted("group-of-consecutive-ranks", form);
        let right = [[0, 2], [1, 3]].map(|ranks| {
            let problem = of_one_sequence(form, 8, &ranks);
            let schedule = build(&problem).unwrap();
            (problem, schedule)
        });
        let of = |groups: &[(Problem, Schedule); 2], seeds: [u64; 2], how| {
            let [a, b] = groups;
            bits(&[(&a.0, &a.1, seeds[0]), (&b.0, &b.1, seeds[1])], how)
        };
        for how in RUNS {
            let alike = of(&wrong, [1, 1], how).unwrap();
            let other = of(&wrong, [1, 2], how).unwrap();
            assert!(Ok(&other) != of(&right, [1, 2], how).as_ref(), "{form:?}");
            // Buffers of the first group depend on the inputs of the second one.
            let own = wrong[0].1.buffers.len();
            assert!(alike[..own] != other[..own], "{form:?}");
        }
        for (problem, schedule) in &wrong {
            let errors = check(problem, schedule).unwrap_err();
            assert!(errors.iter().any(is_outside), "{errors:?}");
        }
        let both = [(&wrong[0].0, &wrong[0].1), (&wrong[1].0, &wrong[1].1)];
        assert!(check_side_by_side(&both).unwrap_err().iter().any(is_outside));
    }
}

#[test]
fn a_message_to_an_idle_rank_is_an_error_of_its_own() {
    for form in [FORMS[0], FORMS[2]] {
        let [(problem, schedule), _] = planted("group-of-consecutive-ranks", form);
        for how in RUNS {
            let idle = bits(&[(&problem, &schedule, 1)], how);
            assert!(matches!(idle, Err(ExecuteError::Idle { peer: 1 | 3, .. })), "{idle:?}");
        }
    }
}

#[test]
fn ranks_taken_for_places_are_rejected_and_do_not_end() {
    for fault in ["sent-to-the-world-rank", "sent-to-the-place-as-a-world-rank"] {
        let fault = by_id(fault).unwrap();
        for ranks in [[1, 3], [3, 1]] {
            let problem = of_one_sequence(FORMS[0], 8, &ranks);
            let mut schedule = build(&problem).unwrap();
            assert!(fault.plant(&problem, &mut schedule), "{} {ranks:?}", fault.id);
            assert!(check(&problem, &schedule).is_err(), "{} {ranks:?}", fault.id);
            for how in RUNS {
                let ended = bits(&[(&problem, &schedule, 1)], how);
                let failed = matches!(ended, Err(ExecuteError::Stuck(_) | ExecuteError::Idle { .. }));
                assert!(failed, "{} {ranks:?}: {ended:?}", fault.id);
            }
        }
    }
}

#[test]
fn groups_that_share_a_rank_do_not_run_side_by_side() {
    let [one, other] = [[0, 2], [2, 1]].map(|ranks| of_one_sequence(FORMS[0], 8, &ranks));
    let schedules = [&one, &other].map(|problem| build(problem).unwrap());
    assert_eq!(side_by_side(&[&schedules[0], &schedules[1]]), Err(SideBySideError::SharedRank(2)));
    let errors = check_side_by_side(&[(&one, &schedules[0]), (&other, &schedules[1])]).unwrap_err();
    assert!(errors[0].to_string().contains("rank 2: is in two groups"), "{errors:?}");
}

#[test]
fn groups_of_unlike_worlds_or_regions_do_not_run_side_by_side() {
    let [one, other] = [[0, 2], [1, 3]].map(|ranks| of_one_sequence(FORMS[0], 8, &ranks));
    let [right, beside] = [&one, &other].map(|problem| build(problem).unwrap());
    let (mut larger, mut in_regions) = (beside.clone(), beside);
    larger.ranks.push(RankProgram::default());
    in_regions.sequence_parallel = Some(2);
    for (beside, error, said) in [
        (larger, SideBySideError::Worlds(4, 5), "world 5: is not as large"),
        (in_regions, SideBySideError::Regions(None, Some(2)), "region 2: is not as wide"),
    ] {
        assert_eq!(side_by_side(&[&right, &beside]), Err(error));
        let errors = check_side_by_side(&[(&one, &right), (&other, &beside)]).unwrap_err();
        assert!(errors[0].to_string().contains(said), "{errors:?}");
    }
}

#[test]
fn the_checker_rejects_work_of_an_idle_rank_and_another_group() {
    let problem = of_one_sequence(FORMS[0], 8, &[1, 3]);
    let right = build(&problem).unwrap();
    let rejected = |edit: &dyn Fn(&mut Schedule)| {
        let mut schedule = right.clone();
        edit(&mut schedule);
        check(&problem, &schedule).unwrap_err()
    };
    let errors = [
        rejected(&|schedule| schedule.ranks[0] = schedule.ranks[1].clone()),
        rejected(&|schedule| schedule.buffers[0].rank = 2),
        rejected(&|schedule| schedule.communicators.push(vec![1, 2])),
        rejected(&|schedule| {
            let sends =
                schedule.ranks[1].operations.iter_mut().find_map(|operation| match &mut operation.work {
                    Work::Send { to, .. } => Some(to),
                    _ => None,
                });
            *sends.unwrap() = 0;
        }),
    ];
    assert!(errors.iter().all(|errors| is_outside(&errors[0])), "{errors:?}");
    assert!(!rejected(&|schedule| schedule.members.reverse()).is_empty());
}
