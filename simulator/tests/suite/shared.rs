//! Keys that sequences share: every schedule that takes them is exact and proved, and every fault of a prefix that is
//! shared is seen.

use crate::common::hold::hold;
use crate::common::{Draws, problem, shared, side_by_side};

use seamproof_oracle::{
    Algorithm, Alignment, Balance, ContextParallel, Heads, Mask, Problem, ProblemFields, Run, SharedKeys,
    Sharing,
};
use seamproof_simulator::AttentionCall;
use seamproof_simulator::check::check;
use seamproof_simulator::faults;
use seamproof_simulator::schedule::{MergeOrder, build, build_with};

/// Returns a prompt of five tokens with its first answer, and two answers more, all causal. The prompt's keys are
/// shared.
fn answers(algorithm: Algorithm, cp: usize) -> Problem {
    let mask = Mask { align: Alignment::BottomRight, ..Mask::CAUSAL };
    let lengths = [(7, 8), (3, 8), (2, 7)];
    let mut fields = ProblemFields::packed(&lengths, 8);
    let mut end = [0, 0];
    for sequence in &mut fields.sequences {
        for (run, end) in [&mut sequence.q, &mut sequence.kv].into_iter().zip(&mut end) {
            *run = Run::packed(*end, run.len, run.len.next_multiple_of(8));
            *end += run.span;
        }
    }
    (fields.rows.q, fields.rows.kv) = (end[0], end[1]);
    let parallel = ContextParallel::over(cp, algorithm, Balance::DualChunk);
    let borrows = |sequence| SharedKeys { sequence, with: 0, keys: 5 };
    let sharing = Sharing(vec![borrows(1), borrows(2)]);
    let heads = Heads { q: 4, kv: 2 };
    Problem::new(ProblemFields { mask, parallel, sharing, heads, ..fields }).unwrap()
}

#[test]
fn schedules_of_shared_keys_are_exact_and_proved() {
    let (mut draws, mut held) = (Draws(7), 0);
    let balances = [
        Balance::Contiguous,
        Balance::DualChunk,
        Balance::Striped { stripe: 1 },
        Balance::Striped { stripe: 2 },
    ];
    let groups = [
        (Algorithm::Single, 1),
        (Algorithm::AllGather, 2),
        (Algorithm::AllGather, 3),
        (Algorithm::AllGather, 4),
        (Algorithm::Ring, 2),
        (Algorithm::Ring, 3),
        (Algorithm::AllToAll, 2),
        (Algorithm::AllToAll, 4),
        (Algorithm::Hierarchical { all_to_all: 2 }, 4),
    ];
    for ((algorithm, cp), balance) in groups.into_iter().flat_map(|of| balances.map(|balance| (of, balance)))
    {
        for _ in 0..15 {
            let plain = problem(&mut draws, algorithm, balance, cp);
            let beside = side_by_side(&mut draws, &plain);
            for problem in
                [plain, beside].iter().filter_map(|problem| shared(problem, &mut draws)).collect::<Vec<_>>()
            {
                for &order in MergeOrder::of(algorithm) {
                    let schedule = build_with(&problem, order).unwrap();
                    check(&problem, &schedule).unwrap_or_else(|errors| panic!("{errors:?}\n{problem:?}"));
                    hold(&problem, &schedule, &mut draws);
                    held += 1;
                }
            }
        }
    }
    assert!(held > 300, "{held}");
}

#[test]
fn shared_keys_go_through_regions() {
    let mut draws = Draws(11);
    for (algorithm, cp) in [
        (Algorithm::Single, 1),
        (Algorithm::AllGather, 2),
        (Algorithm::Ring, 2),
        (Algorithm::AllToAll, 2),
        (Algorithm::Hierarchical { all_to_all: 2 }, 4),
    ] {
        let mut fields = ProblemFields::from(answers(algorithm, cp));
        fields.heads = Heads { q: 8, kv: 4 };
        for region in [2, 4] {
            fields.parallel =
                ContextParallel { region, ..ContextParallel::over(cp, algorithm, Balance::DualChunk) };
            let problem = Problem::new(fields.clone()).unwrap();
            for &order in MergeOrder::of(algorithm) {
                let schedule = build_with(&problem, order).unwrap();
                check(&problem, &schedule).unwrap_or_else(|errors| panic!("{errors:?}\n{problem:?}"));
                hold(&problem, &schedule, &mut draws);
            }
        }
    }
}

#[test]
fn borrowed_keys_are_read_in_the_rows_of_their_lender() {
    let call = AttentionCall::whole(&answers(Algorithm::Single, 1));
    let runs: Vec<Vec<Run>> = call.segments.iter().map(|segment| segment.kv.clone()).collect();
    let prefix = Run::packed(0, 5, 5);
    assert_eq!(
        runs,
        [
            vec![Run::packed(0, 8, 8)],
            vec![prefix, Run::packed(13, 3, 3)],
            vec![prefix, Run::packed(21, 2, 3)]
        ]
    );
}

#[test]
fn a_wrong_reader_of_shared_keys_is_rejected() {
    let ids = [
        "shared-gradient-of-the-last",
        "shared-gradient-counted-twice",
        "shared-gradient-of-the-lender-alone",
        "shared-prefix-causal-by-row",
        "shared-prefix-attended-twice",
        "last-lent-key-lost",
    ];
    let groups = [
        (Algorithm::Single, 1),
        (Algorithm::AllGather, 2),
        (Algorithm::Ring, 2),
        (Algorithm::AllToAll, 2),
        (Algorithm::Hierarchical { all_to_all: 2 }, 4),
    ];
    for (algorithm, cp) in groups {
        for id in ids {
            let (fault, problem) = (faults::by_id(id).unwrap(), answers(algorithm, cp));
            let mut schedule = build(&problem).unwrap();
            assert!(check(&problem, &schedule).is_ok());
            let lends = !matches!(algorithm, Algorithm::Single | Algorithm::AllGather);
            if id == "last-lent-key-lost" && !lends {
                assert!(!fault.plant(&problem, &mut schedule), "{algorithm:?}");
                continue;
            }
            assert!(fault.plant(&problem, &mut schedule), "{id}");
            assert!(check(&problem, &schedule).is_err(), "{id}");
            // Without shared keys there is nothing to get wrong.
            let plain = problem.unshared();
            assert!(!fault.plant(&plain, &mut build(&plain).unwrap()), "{id}");
        }
    }
}
