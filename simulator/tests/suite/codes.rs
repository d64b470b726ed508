//! Schedules of results in FP8: launches make codes, and what is rounded between a sum and its codes.

use std::collections::{BTreeSet, HashSet};
use std::iter;

use seamproof_oracle::{
    Algorithm, Balance, ContextParallel, Format, Heads, Problem, ProblemFields, Run, TensorName,
};
use seamproof_simulator::device::{Buffers, Cpu, Device};
use seamproof_simulator::emulated::Tiles;
use seamproof_simulator::schedule::{
    Attend, AttendBackward, Axes, Buffer, BufferId, MergeOrder, RankProgram, Role, Schedule, Work, build_with,
};

const OUT: Format = Format::E4m3;
const GRADIENT: Format = Format::E5m2;
const BF16: Format = Format::Bf16;
const TILES: Tiles = Tiles { q: 4, kv: 4 };
const ALGORITHMS: [Algorithm; 4] =
    [Algorithm::Ring, Algorithm::AllGather, Algorithm::AllToAll, Algorithm::Hierarchical { all_to_all: 2 }];

/// Returns the schedule of two sequences over four ranks, whose results are in FP8.
fn schedule(algorithm: Algorithm, order: MergeOrder) -> Schedule {
    let mut fields = ProblemFields::packed(&[(16, 16), (32, 32)], 8);
    (fields.precision.out, fields.precision.gradients) = (OUT.into(), GRADIENT.into());
    let parallel = ContextParallel::over(4, algorithm, Balance::DualChunk);
    let problem = Problem::new(ProblemFields { heads: Heads { q: 4, kv: 4 }, parallel, ..fields }).unwrap();
    build_with(&problem, order).unwrap()
}

fn works(schedule: &Schedule) -> impl Iterator<Item = &Work> {
    schedule.ranks.iter().flat_map(|rank| &rank.operations).map(|operation| &operation.work)
}

/// Returns the buffers between which a work adds or copies rows.
fn moved(work: &Work) -> Option<[BufferId; 2]> {
    match work {
        Work::Accumulate { from, to, .. }
        | Work::Copy { from, to, .. }
        | Work::CopyValid { from, to, .. } => Some([*from, *to]),
        Work::Merge(merge) => Some([merge.step_out, merge.out]),
        Work::ReduceScatter { from, to, .. } => Some([from[0].buffer, to.buffer]),
        _ => None,
    }
}

/// Returns the formats of rows that come to a result, each behind the one that it comes to, from the result on.
fn formats_on_the_way(schedule: &Schedule, result: TensorName) -> HashSet<Vec<Format>> {
    let is_result = |buffer: &Buffer| buffer.role == Role::Output(result);
    let ends = (0..schedule.buffers.len()).map(BufferId).filter(|id| is_result(&schedule.buffers[id.0]));
    ends.flat_map(|end| ways(schedule, &[end])).collect()
}

/// Returns the formats on each way to the last of some buffers, which begin with the result.
fn ways(schedule: &Schedule, way: &[BufferId]) -> Vec<Vec<Format>> {
    let at = way[way.len() - 1];
    let into_this = works(schedule).filter_map(moved).filter(|[from, to]| *to == at && !way.contains(from));
    let before: BTreeSet<BufferId> = into_this.map(|[from, _]| from).collect();
    if before.is_empty() {
        let mut formats: Vec<Format> = way.iter().map(|id| schedule.buffers[id.0].format).collect();
        formats.dedup();
        return vec![formats];
    }
    before.into_iter().flat_map(|from| ways(schedule, &[way, &[from]].concat())).collect()
}

fn only(formats: &[Format]) -> HashSet<Vec<Format>> {
    iter::once(formats.to_vec()).collect()
}

#[test]
fn launches_make_codes_of_partial_results_too() {
    for (algorithm, order) in
        ALGORITHMS.into_iter().flat_map(|of| MergeOrder::WEIGHTED.map(|order| (of, order)))
    {
        let schedule = schedule(algorithm, order);
        let format = |id: &BufferId| schedule.buffers[id.0].format;
        for work in works(&schedule) {
            match work {
                Work::Attend(Attend { out, .. }) => assert_eq!(format(out), OUT, "{algorithm:?} {order:?}"),
                Work::AttendBackward(AttendBackward { dq, dk, dv, .. }) => {
                    assert_eq!([dq, dk, dv].map(format), [GRADIENT; 3], "{algorithm:?} {order:?}");
                }
                _ => {}
            }
        }
    }
}

/// Test that a ring adds in f32 and rounds the sum to bf16 before it becomes codes. Those of dk and dv that go to other
/// members are codes of a step, which nothing rounds in between.
#[test]
fn a_shipped_ring_rounds_its_sums_to_bf16_before_they_become_codes() {
    let ring = schedule(Algorithm::Ring, MergeOrder::Deferred);
    let way = |code: Format| only(&[code, BF16, Format::F32, code]);
    assert_eq!(formats_on_the_way(&ring, TensorName::Out), way(OUT));
    assert_eq!(formats_on_the_way(&ring, TensorName::Dq), way(GRADIENT));
    // An exchange between members is no work on rows: the way ends at what arrives.
    assert_eq!(formats_on_the_way(&ring, TensorName::Dk), way(GRADIENT));
    let of_step = works(&ring).filter_map(moved).filter(|[from, to]| {
        let [from, to] = [from, to].map(|id| &ring.buffers[id.0]);
        from.format == Format::F32 && to.format == GRADIENT
    });
    assert_eq!(of_step.count(), 4 * 4 * 2);
    let partition = ring.partition(TILES);
    assert_eq!([partition.merges.through, partition.sums.through], [Some(BF16); 2]);
    assert_eq!([partition.merges.running, partition.sums.format], [Format::F32; 2]);
}

#[test]
fn a_ring_in_running_order_makes_codes_of_sums_in_f32() {
    let ring = schedule(Algorithm::Ring, MergeOrder::Running);
    for (result, code) in [(TensorName::Out, OUT), (TensorName::Dq, GRADIENT)] {
        assert_eq!(formats_on_the_way(&ring, result), only(&[code, Format::F32, code]));
    }
    let partition = ring.partition(TILES);
    assert_eq!([partition.merges.through, partition.sums.through], [None; 2]);
}

/// Test that a hierarchy, whose rings are inside of exchanges, has the same two roundings.
#[test]
fn a_shipped_hierarchy_has_the_roundings_of_its_rings() {
    let schedule = schedule(Algorithm::Hierarchical { all_to_all: 2 }, MergeOrder::Deferred);
    let partition = schedule.partition(TILES);
    assert_eq!([partition.merges.through, partition.sums.through], [Some(BF16); 2]);
}

/// Test that an all-gather copies codes of out and dq, and that its sums of dk and dv are bf16 wherever they are.
#[test]
fn a_shipped_all_gather_adds_in_bf16() {
    let gathered = schedule(Algorithm::AllGather, MergeOrder::Deferred);
    assert_eq!(formats_on_the_way(&gathered, TensorName::Out), only(&[OUT]));
    assert_eq!(formats_on_the_way(&gathered, TensorName::Dq), only(&[GRADIENT]));
    for result in [TensorName::Dk, TensorName::Dv] {
        assert_eq!(formats_on_the_way(&gathered, result), only(&[GRADIENT, BF16, GRADIENT]));
    }
    let partition = gathered.partition(TILES);
    assert_eq!([partition.merges.through, partition.sums.through], [None; 2]);
    assert_eq!((partition.merges.count, partition.sums.format, partition.sums.codes), (0, BF16, 1));
}

#[test]
fn an_all_to_all_rounds_nothing_behind_its_launch() {
    for order in MergeOrder::WEIGHTED {
        let schedule = schedule(Algorithm::AllToAll, order);
        let between_formats = works(&schedule)
            .filter_map(moved)
            .any(|[from, to]| schedule.buffers[from.0].format != schedule.buffers[to.0].format);
        assert!(!between_formats);
        let partition = schedule.partition(TILES);
        assert_eq!([partition.merges.through, partition.sums.through], [None; 2]);
    }
}

/// Test of a number just above the middle of two codes, which bf16 brings to the middle: its code is the even one below,
/// and without bf16 the one above.
#[test]
fn a_sum_that_is_rounded_twice_may_have_the_other_code() {
    let buffer = |name: &str, format: Format| Buffer {
        name: name.into(),
        rank: 0,
        axes: Axes::Rows,
        rows: 1,
        heads: 1,
        dim: 4,
        format,
        role: Role::Scratch,
    };
    let buffers = [("sum", Format::F32), ("rounded", BF16), ("codes", OUT), ("codes of the sum", OUT)];
    let schedule = Schedule {
        buffers: buffers.map(|(name, format)| buffer(name, format)).to_vec(),
        ranks: vec![RankProgram::default()],
        members: vec![0],
        communicators: Vec::new(),
        placements: Vec::new(),
        sequence_parallel: None,
    };
    let device = Cpu::<f32>::new(TILES, Format::F32, Format::F32);
    let mut memory = Buffers::unwritten(&schedule);
    let above = 1.0625 + 1.0 / 1024.0;
    memory.lane_mut(BufferId(0), 0, 0).copy_from_slice(&[above, -above, 1.0625, 448.9]);
    let row = Run::packed(0, 1, 1);
    for (from, to) in [(0, 1), (1, 2), (0, 3)] {
        let copy = Work::Copy { from: BufferId(from), to: BufferId(to), rows: vec![(row, row)] };
        device.execute(&copy, &mut memory).unwrap();
    }
    assert_eq!(memory.lane(BufferId(2), 0, 0), [1.0, -1.0, 1.0, 448.0]);
    assert_eq!(memory.lane(BufferId(3), 0, 0), [1.125, -1.125, 1.0, 448.0]);
}
