//! Sequence-parallel regions: a right kernel holds in each, the judge's map of hidden rows is the schedule's, and a
//! failure that needs no region is shrunk to none.

use std::collections::BTreeMap;

use seamproof_judge::census::is_legal;
use seamproof_judge::evaluate::evaluate;
use seamproof_judge::finding::{Check, Finding};
use seamproof_judge::generate::{self, Draw};
use seamproof_judge::ladder::{Depth, Judge};
use seamproof_judge::prelude::*;
use seamproof_judge::shrink::shrink;
use seamproof_judge::subject::Refusal;
use seamproof_judge::subjects::{Emulated, Planted};
use seamproof_oracle::sharding::{PlacedRun, layouts};
use seamproof_oracle::{Algorithm, Balance, TensorName};
use seamproof_simulator::faults::by_id;
use seamproof_simulator::schedule::{Schedule, build};

/// Returns drawn problems in regions.
fn drawn(seed: u64) -> impl Iterator<Item = Problem> {
    (0..40_000).filter_map(move |index| match generate::draw(seed, index, &Limits::seams()) {
        Draw::Problem(problem) => Some(problem).filter(|p| p.parallel.region > 1 && is_legal(p)),
        _ => None,
    })
}

/// The pack of the issue: lengths 100, 150, 120, 130 in 112, 160, 128, 144, cut short, in a region of 4 ranks.
fn reported(parallel: ContextParallel) -> Problem {
    let fields = ProblemFields::padded(&[(10, 11), (15, 16), (12, 13), (13, 14)], 12);
    let heads = Heads { q: 8, kv: 4 };
    Problem::new(ProblemFields { heads, mask: Mask::CAUSAL, parallel, ..fields }).expect("a legal pack")
}

fn alone(region: usize) -> ContextParallel {
    ContextParallel { region, ..ContextParallel::single() }
}

fn finding(verdict: Verdict) -> Option<Finding> {
    if let Verdict::Finding(finding) = verdict { Some(*finding) } else { None }
}

#[test]
fn a_right_kernel_holds_in_every_region() {
    let judge = Judge::default();
    let (mut judged, mut several, mut replicated, mut backward) = (0, 0, 0, 0);
    for problem in drawn(5).take(150) {
        let found = judge.examine(&Emulated::default(), &problem, Depth::All).verdict;
        assert!(matches!(found, Verdict::Pass(_)), "{found}\n{problem:?}");
        judged += 1;
        several += usize::from(problem.parallel.size() > 1);
        replicated += usize::from(problem.heads.kv < problem.parallel.region);
        backward += usize::from(problem.pass == Pass::Backward);
    }
    assert!(
        judged == 150 && several > 30 && replicated > 20 && backward > 80,
        "{several} {replicated} {backward}"
    );
}

/// A placed row: its number, sequence and position, and whether it is real.
type Row = (usize, usize, usize, bool);

/// Returns each placed row, in order.
fn rows(runs: &[PlacedRun]) -> Vec<Row> {
    let of = |placed: &PlacedRun| {
        let PlacedRun { sequence, piece, local } = *placed;
        (0..local.span).map(move |i| (local.row(i), sequence, piece.start + piece.step * i, i < local.len))
    };
    let mut rows: Vec<_> = runs.iter().flat_map(of).collect();
    rows.sort_unstable();
    rows
}

/// Returns the number of rows, the first head and the placed rows of a tensor on each rank of a schedule, by place.
fn placed(schedule: &Schedule, tensor: TensorName) -> Vec<(usize, usize, Vec<Row>)> {
    let mut ranks = BTreeMap::new();
    for placement in schedule.placements.iter().filter(|placement| placement.tensor == tensor) {
        let buffer = &schedule.buffers[placement.buffer.0];
        let place = schedule.place(buffer.rank).expect("a member");
        ranks.insert(place, (buffer.rows, placement.heads.start, rows(&placement.rows)));
    }
    ranks.into_values().collect()
}

#[test]
fn the_judges_map_of_a_region_is_the_schedules() {
    for problem in drawn(6).take(100) {
        let (schedule, layouts) =
            (build(&problem).expect("it is built"), layouts(&problem).expect("it is cut"));
        for (tensor, side) in [(TensorName::Out, Side::Q), (TensorName::V, Side::Kv)] {
            let map = layouts.iter().map(|rank| rank.side(side)).map(|side| (side.rows, 0, rows(&side.runs)));
            assert_eq!(map.collect::<Vec<_>>(), placed(&schedule, tensor), "{problem:?}");
        }
        let map = layouts.iter().map(|rank| {
            let (side, heads) = (rank.statistics_rows(), rank.statistics_heads(problem.heads.q));
            (side.rows, heads.start, rows(&side.runs))
        });
        assert_eq!(map.collect::<Vec<_>>(), placed(&schedule, TensorName::Lse), "{problem:?}");
    }
}

#[test]
fn what_a_region_cannot_hold_is_refused_by_its_rule() {
    let mut fields = ProblemFields::from(reported(alone(4)));
    let refusal = |fields: &ProblemFields| {
        let problem = Problem::new(fields.clone()).expect("a problem");
        match evaluate(&Emulated::default(), &problem) {
            Verdict::Refused(refusal) => refusal.to_string(),
            verdict => panic!("{verdict}"),
        }
    };
    fields.heads = Heads { q: 6, kv: 2 };
    assert!(refusal(&fields).contains("query heads are not a multiple"), "{}", refusal(&fields));
    fields.heads = Heads { q: 12, kv: 3 };
    assert!(refusal(&fields).contains("kv heads are neither"), "{}", refusal(&fields));
    let mut declared = Emulated::default().declaration();
    declared.table.parallel.regions = false;
    assert_eq!(declared.table.refusal(&reported(alone(4))), Some(Refusal::Region));
    assert_eq!(declared.table.fitted(reported(alone(4))), reported(ContextParallel::single()));
    let ring = ContextParallel::over(2, Algorithm::Ring, Balance::Contiguous);
    let fields = ProblemFields { parallel: ContextParallel { region: 5000, ..ring }, ..fields };
    let error = Problem::new(fields).expect_err("too many ranks").to_string();
    assert!(error.contains("parallel.region is 5000; use 1 to 2048"), "{error}");
}

/// Test that the judge sees each wrong region on the reported pack, and what sees it first. Positions that are too
/// large by one number on both sides are not among them: products of rotated rows depend on differences alone.
#[test]
fn a_wrong_region_is_found_on_the_reported_pack() {
    let faults = [
        ("gather-sized-by-real-rows", Check::Crash),
        ("scatter-sized-by-real-rows", Check::Structure),
        ("scatter-of-the-neighbours-rows", Check::Structure),
        ("gather-in-another-order", Check::Poison),
        ("scatter-without-its-sum", Check::Envelope),
        ("padding-lost-in-a-region", Check::Structure),
        ("padded-lengths-in-a-region", Check::Structure),
        ("rotation-at-real-offsets", Check::Envelope),
    ];
    for (id, check) in faults {
        let wrong = Planted::new(Emulated::default(), *by_id(id).expect(id));
        let problem = reported(alone(4));
        let found = finding(evaluate(&wrong, &problem)).expect(id);
        assert_eq!(found.check, check, "{id}: {found}");
        let small = shrink(&problem, 2_000, |problem| {
            finding(evaluate(&wrong, problem)).is_some_and(|other| other.check == check)
        });
        // Padding that is attended shows without a region too.
        let region = if id == "padded-lengths-in-a-region" { 1 } else { 2 };
        let small = small.problem;
        assert_eq!((small.parallel.region, small.parallel.size()), (region, 1), "{id}: {small:?}");
        assert!(small.sequences.len() <= 2 && small.tokens() <= 4, "{id}: {small:?}");
    }
}

#[test]
fn a_failure_that_needs_no_region_is_shrunk_to_none() {
    let wrong = Planted::new(Emulated::default(), *by_id("window-off-by-one").expect("a fault"));
    let fails = |problem: &Problem| finding(evaluate(&wrong, problem)).is_some();
    let found = drawn(7).find(fails).expect("a window in a region");
    let small = shrink(&found, 2_000, fails).problem;
    assert_eq!(small.parallel, ContextParallel::single(), "{small:?}");
}
