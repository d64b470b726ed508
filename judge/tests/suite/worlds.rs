//! Groups in a larger world: the right kernel beside a second group, and schedules whose messages leave their group.

use seamproof_judge::generate::{self, Draw};
use seamproof_judge::prelude::*;
use seamproof_judge::subjects::{Emulated, Planted, Ranks, same_bits};
use seamproof_judge::values;
use seamproof_oracle::{Algorithm, Balance};
use seamproof_simulator::faults::by_id;

/// Returns a causal pack over ranks of a world.
fn pack(algorithm: Algorithm, world: usize, ranks: &[usize]) -> Problem {
    let fields = ProblemFields::padded(&[(10, 12), (15, 16), (8, 8)], 12);
    let balance = Balance::DualChunk;
    let parallel =
        ContextParallel { world, ranks: ranks.to_vec(), ..ContextParallel::over(2, algorithm, balance) };
    let heads = Heads { q: 4, kv: 2 };
    Problem::new(ProblemFields { heads, mask: Mask::CAUSAL, parallel, ..fields }).expect("a legal pack")
}

fn planted(id: &str, ranks: Ranks) -> Planted {
    Planted::new(Emulated { ranks, ..Emulated::default() }, *by_id(id).expect("a fault"))
}

#[test]
fn another_group_beside_it_and_idle_ranks_change_no_bit() {
    let mut several = 0;
    for index in 0..400 {
        let Draw::Problem(problem) = generate::draw(21, index, &Limits::fuzz()) else { continue };
        let alone = ContextParallel { region: problem.parallel.region, ..whole(&problem) };
        if problem.parallel.neighbour().is_none() || !problem.steps.is_empty() {
            continue;
        }
        let subject = Emulated::default();
        let inputs = values::inputs(&problem);
        let same = Problem::new(ProblemFields { parallel: alone, ..problem.clone().into() }).unwrap();
        let (Ok(own), Ok(expected)) = (subject.run(&problem, &inputs), subject.run(&same, &inputs)) else {
            continue;
        };
        assert!(same_bits(&own, &expected), "{problem:?}");
        several += 1;
    }
    assert!(several >= 10, "{several}");
}

/// Returns the problem's group as a world of its own.
fn whole(problem: &Problem) -> ContextParallel {
    let ContextParallel { algorithm, balance, .. } = problem.parallel;
    ContextParallel::over(problem.parallel.size(), algorithm, balance)
}

/// In a world of 4, the ranks 0 and 2 exchange rows with 1 and 3, which run the same program. All come to their ends.
#[test]
fn rows_of_the_other_group_are_wrong_numbers() {
    for algorithm in [Algorithm::Ring, Algorithm::AllGather, Algorithm::AllToAll] {
        for ranks in Ranks::ALL {
            let problem = pack(algorithm, 4, &[0, 2]);
            let right = Emulated { ranks, ..Emulated::default() };
            assert!(matches!(judge(&right, &problem), Verdict::Pass(_)), "{algorithm:?}");
            let verdict = judge(&planted("group-of-consecutive-ranks", ranks), &problem);
            assert!(matches!(verdict, Verdict::Finding(_)), "{algorithm:?}: {verdict}");
        }
    }
}

#[test]
fn a_message_to_an_idle_rank_is_a_crash_that_names_it() {
    for ranks in Ranks::ALL {
        let problem = pack(Algorithm::Ring, 3, &[0, 2]);
        assert!(matches!(judge(&Emulated { ranks, ..Emulated::default() }, &problem), Verdict::Pass(_)));
        let verdict = judge(&planted("group-of-consecutive-ranks", ranks), &problem).to_string();
        assert!(verdict.contains("of the world runs no program"), "{verdict}");
    }
}

#[test]
fn a_rank_taken_for_a_place_and_a_place_for_a_rank_are_found() {
    for id in ["sent-to-the-world-rank", "sent-to-the-place-as-a-world-rank"] {
        for (world, group) in [(4, [1, 3]), (4, [0, 2]), (3, [1, 2])] {
            let problem = pack(Algorithm::Ring, world, &group);
            let verdict = judge(&planted(id, Ranks::InTurn), &problem);
            assert!(!matches!(verdict, Verdict::Pass(_) | Verdict::Refused(_)), "{id} {group:?}: {verdict}");
        }
    }
}
