//! Schedules of problems in FP8: codes travel as codes, results never do, and every launch is told of the sequence and
//! heads that it reads.

use seamproof_oracle::{
    Algorithm, Balance, ContextParallel, Element, Format, Heads, Precision, Problem, ProblemFields, Scaling,
};
use seamproof_simulator::schedule::{
    Attend, BufferId, Descales, LaunchedHead, Merge, MergeOrder, Schedule, Work, build_with,
};

const HEADS: Heads = Heads { q: 8, kv: 2 };

/// Returns three sequences over four ranks.
fn problem(algorithm: Algorithm, balance: Balance) -> Problem {
    let packed = ProblemFields::packed(&[(16, 16), (8, 24), (32, 8)], 8);
    let code = Element { format: Format::E4m3, scaling: Scaling::PerSequenceHead };
    let precision =
        Precision { q: code, k: code, v: code, p: Format::E4m3.into(), ..Precision::uniform(Format::Bf16) };
    let parallel = ContextParallel::over(4, algorithm, balance);
    Problem::new(ProblemFields { heads: HEADS, precision, parallel, ..packed }).expect("a problem")
}

/// Returns every algorithm, balance and order of merges on four ranks.
fn all() -> impl Iterator<Item = (Problem, Schedule)> {
    let algorithms = [
        Algorithm::Ring,
        Algorithm::AllGather,
        Algorithm::AllToAll,
        Algorithm::Hierarchical { all_to_all: 2 },
    ];
    let balances = [Balance::Contiguous, Balance::DualChunk, Balance::Striped { stripe: 2 }];
    let problems =
        algorithms.into_iter().flat_map(move |algorithm| balances.map(|balance| problem(algorithm, balance)));
    problems.flat_map(|problem| {
        MergeOrder::WEIGHTED.map(|order| (problem.clone(), build_with(&problem, order).expect("a schedule")))
    })
}

fn works(schedule: &Schedule) -> impl Iterator<Item = &Work> {
    schedule.ranks.iter().flat_map(|rank| &rank.operations).map(|operation| &operation.work)
}

/// Returns the factors whose numbers name the sequence, the head of the problem and that of the launch.
fn named(LaunchedHead { sequence, local, head, .. }: LaunchedHead) -> Descales {
    Descales { q: sequence as f32, k: head as f32, v: local as f32, dout: 1.0 }
}

#[test]
fn codes_travel_and_results_are_never_in_fp8() {
    for (problem, schedule) in all() {
        let format = |id: &BufferId| schedule.buffers[id.0].format;
        for work in works(&schedule) {
            match work {
                Work::Attend(Attend { q, k, v, out, .. }) => {
                    assert!([q, k, v].into_iter().all(|id| format(id) == Format::E4m3), "{problem:?}");
                    assert!([Format::F32, Format::Bf16].contains(&format(out)), "{problem:?}");
                }
                Work::Merge(Merge { step_out, out, .. }) => {
                    let outs = [step_out, out].map(format);
                    assert!(outs.iter().all(|format| [Format::F32, Format::Bf16].contains(format)));
                }
                _ => {}
            }
        }
    }
}

#[test]
fn every_launch_is_told_of_the_sequence_and_heads_that_it_reads() {
    for (problem, mut schedule) in all() {
        schedule.descale(&problem, named).expect("the schedule runs");
        let block = match problem.parallel.algorithm {
            Algorithm::AllToAll => HEADS.q / 4,
            Algorithm::Hierarchical { all_to_all } => HEADS.q / all_to_all,
            _ => HEADS.q,
        };
        let mut seen = [0; 3];
        for (rank, program) in schedule.ranks.iter().enumerate() {
            for operation in &program.operations {
                let Work::Attend(Attend { call, descales, .. }) = &operation.work else { continue };
                assert_eq!(descales.len(), call.segments.len());
                let told = call.segments.iter().zip(descales).filter(|(segment, _)| segment.q.len > 0);
                for (segment, of_heads) in told {
                    assert_eq!(of_heads.len(), block, "{problem:?}");
                    let first = rank * block % HEADS.q;
                    for (local, Descales { q, k, v, .. }) in of_heads.iter().enumerate() {
                        assert_eq!((*k, *v), ((first + local) as f32, local as f32), "{problem:?}");
                        assert_eq!(*q, of_heads[0].q);
                    }
                    seen[of_heads[0].q as usize] += segment.q.len;
                }
            }
        }
        // Each query meets its keys in one launch at least, on each rank that has a block of its heads.
        let least = problem.sequences.iter().map(|sequence| sequence.q.len * HEADS.q / block);
        assert!(seen.into_iter().zip(least).all(|(seen, least)| seen >= least), "{seen:?} {problem:?}");
    }
}
