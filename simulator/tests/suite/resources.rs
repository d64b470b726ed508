//! The law of resources: right builders keep it, and schedules that are right but too dear break it in words.

use crate::common::{Draws, problem};

use seamproof_oracle::{Algorithm, Balance, ContextParallel, Heads, Mask, Problem, ProblemFields};
use seamproof_simulator::check::{check, growth};
use seamproof_simulator::faults::{Catcher, Fault, by_id, catalogue};
use seamproof_simulator::schedule::{MergeOrder, Schedule, all_gather, build, build_with};

/// Number of random problems of each algorithm and cut.
const PROBLEMS: usize = 8;
const CUTS: [Balance; 4] =
    [Balance::DualChunk, Balance::Contiguous, Balance::Striped { stripe: 1 }, Balance::Striped { stripe: 2 }];
const ALGORITHMS: [Algorithm; 5] = [
    Algorithm::Single,
    Algorithm::Ring,
    Algorithm::AllGather,
    Algorithm::AllToAll,
    Algorithm::Hierarchical { all_to_all: 2 },
];

/// Returns a pack of two sequences over a group of 4.
fn pack(algorithm: Algorithm, mask: Mask) -> Problem {
    let fields = ProblemFields::packed(&[(16, 16), (32, 32)], 8);
    let parallel = ContextParallel::over(4, algorithm, Balance::DualChunk);
    Problem::new(ProblemFields { heads: Heads { q: 4, kv: 2 }, mask, parallel, ..fields }).unwrap()
}

/// Returns the problem with regions of some ranks.
fn inside(problem: Problem, region: usize) -> Problem {
    let mut fields = ProblemFields::from(problem);
    fields.parallel.region = region;
    Problem::new(fields).unwrap()
}

/// Returns what the law says of schedules, each error in words.
fn told(
    problem: &Problem,
    order: MergeOrder,
    schedule: impl Fn(&Problem) -> Option<Schedule>,
) -> Vec<String> {
    growth(problem, order, schedule).expect("probes have schedules").iter().map(ToString::to_string).collect()
}

fn planted(fault: &Fault, problem: &Problem) -> Vec<String> {
    told(problem, MergeOrder::Running, |probe| {
        let mut schedule = fault.schedule(probe)?;
        fault.plant(probe, &mut schedule);
        Some(schedule)
    })
}

#[test]
fn right_builders_keep_the_law() {
    let mut draws = Draws(23);
    for algorithm in ALGORITHMS {
        let mut built = 0;
        for balance in CUTS {
            for _ in 0..PROBLEMS {
                let size = if algorithm == Algorithm::Single { 1 } else { 4 };
                let problem = problem(&mut draws, algorithm, balance, size);
                for &order in MergeOrder::of(algorithm) {
                    if build_with(&problem, order).is_ok() {
                        let schedule = |probe: &Problem| build_with(probe, order).ok();
                        assert_eq!(
                            told(&problem, order, schedule),
                            Vec::<String>::new(),
                            "{:?}",
                            problem.parallel
                        );
                        built += 1;
                    }
                }
            }
        }
        assert!(built >= PROBLEMS, "{algorithm:?}: {built}");
    }
}

#[test]
fn regions_keep_the_law_around_every_algorithm() {
    for algorithm in ALGORITHMS {
        for cut in CUTS {
            for &order in MergeOrder::of(algorithm) {
                let size = if algorithm == Algorithm::Single { 1 } else { 4 };
                let parallel = ContextParallel::over(size, algorithm, cut);
                let fields = ProblemFields { parallel, ..pack(Algorithm::Ring, Mask::CAUSAL).into() };
                let problem = inside(Problem::new(fields).unwrap(), 2);
                let schedule = |probe: &Problem| build_with(probe, order).ok();
                assert_eq!(told(&problem, order, schedule), Vec::<String>::new(), "{:?}", problem.parallel);
            }
        }
    }
}

/// Test that a right schedule of another algorithm, or of another order, breaks the law of a ring: what is declared is
/// not more than what is needed.
#[test]
fn a_dearer_algorithm_breaks_the_law_of_a_ring() {
    let ring = pack(Algorithm::Ring, Mask::CAUSAL);
    let deferred = told(&ring, MergeOrder::Running, |probe| build_with(probe, MergeOrder::Deferred).ok());
    let gathered = told(&ring, MergeOrder::Running, |probe| all_gather(probe, MergeOrder::Running).ok());
    assert!(!deferred.is_empty() && !gathered.is_empty(), "{deferred:?} {gathered:?}");
    for error in deferred.into_iter().chain(gathered) {
        let of_bytes = ["peak bytes of a rank ", "bytes of a rank at its launches "];
        assert!(of_bytes.iter().any(|bytes| error.starts_with(bytes)), "{error}");
        assert!(error.ends_with("3, 6, 12 ranks); the schedule of record grows as a constant"), "{error}");
    }
}

/// Test that each fault of resources leaves a schedule right, where the checker is not to catch it, and that the law
/// names what grows, on an algorithm where it shows.
#[test]
fn a_schedule_that_is_right_and_too_dear_breaks_the_law() {
    let words = [
        ("partial-outs-kept-to-the-end", "peak bytes of a rank grow as ranks × "),
        ("keys-gathered-before-the-first-step", "peak bytes of a rank grow as ranks × "),
        ("mask-of-queries-by-keys", "peak bytes of a rank grow as tokens × "),
        ("statistic-of-each-step-kept", "peak bytes of a rank grow as ranks × "),
        ("hidden-rows-kept-to-the-end", "bytes of a rank at its launches grow as ranks of a region × "),
        ("host-read-for-each-sequence", "host reads of a rank grow as sequences × "),
        ("blocks-for-every-pair-of-sequences", "segments of a rank's launches grow as sequences × "),
    ];
    let named: Vec<&str> = words.iter().map(|(id, _)| *id).collect();
    let faults = catalogue().filter(|fault| fault.caught_by.contains(&Catcher::Resources));
    assert_eq!(faults.map(|fault| fault.id).collect::<Vec<_>>(), named);
    for mask in [Mask::FULL, Mask::CAUSAL] {
        for (id, grows) in words {
            let region = if id == "hidden-rows-kept-to-the-end" { 2 } else { 1 };
            let ring = inside(pack(Algorithm::Ring, mask), region);
            let fault = by_id(id).expect("a fault");
            let told = planted(fault, &ring);
            assert!(told.iter().any(|error| error.starts_with(grows)), "{id}: {told:?}");
            let mut schedule = build(&ring).expect("a schedule");
            assert!(fault.plant(&ring, &mut schedule), "{id} changes nothing");
            let right = !fault.caught_by.contains(&Catcher::Checker);
            let errors = check(&ring, &schedule).err();
            assert_eq!(errors.is_none(), right, "{id}: {errors:?}");
        }
    }
}
