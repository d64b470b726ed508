//! Faults of sequence-parallel regions: gathers and scatters of the wrong size or order, sums that are forgotten,
//! padding that is not kept, and rows rotated by another row's position.

use std::collections::{BTreeMap, BTreeSet};

use seamproof_oracle::{ContextParallel, Problem, ProblemFields, Run, Sequence};

use super::edit::{Passes, rewrite, segments, works};
use super::fault::Catcher::{self, Checker, Crash, Envelope, Exact, Identity, Poison, Structure};
use super::fault::{Edit, Fault};
use crate::schedule::{
    BufferId, Layer, Placement, Region, Role, Rotated, RowPair, Schedule, Work, build, hidden,
};

/// Largest region in which a fault is planted.
const RANKS_MAX: usize = 4;

/// Catchers of rows that are another row's, or that hold what they should not.
const ROWS: &[Catcher] = &[Checker, Structure, Poison, Exact, Envelope, Identity];

pub(super) const FAULTS: &[Fault<Edit>] = &[
    Fault {
        id: "gather-sized-by-real-rows",
        imitates: "the offsets that mask also size the gather before a linear layer, which expects padded rows",
        source: "https://github.com/NVIDIA/TransformerEngine/issues/2892",
        entries: &[3],
        caught_by: &[Checker, Crash],
        edit: |_, schedule| {
            let (ranks, mut cut) = (schedule.region(), Vec::new());
            each_part_by_real_rows(schedule, Exchange::Gather, |gathered, part| {
                cut.extend(gathered.iter().map(|region| (region.buffer, part * ranks)));
            });
            for (buffer, rows) in cut {
                schedule.buffers[buffer.0].rows = rows;
            }
        },
    },
    Fault {
        id: "scatter-sized-by-real-rows",
        imitates: "the output has the rows of the real lengths: the scatter after a linear layer deals too few",
        source: "https://github.com/NVIDIA/TransformerEngine/issues/2892",
        entries: &[2],
        caught_by: ROWS,
        edit: |_, schedule| {
            each_part_by_real_rows(schedule, Exchange::Scatter, |_, _| {});
        },
    },
    Fault {
        id: "scatter-of-the-neighbours-rows",
        imitates: "each rank of a region takes the rows of the next one after the linear layer",
        source: "https://github.com/NVIDIA/TransformerEngine/issues/2892",
        entries: &[],
        caught_by: ROWS,
        edit: |_, schedule| {
            scatters(schedule, Passes::Both, |_, work| {
                if let Work::ReduceScatter { from, .. } = work {
                    let one = from.len().min(1);
                    from.rotate_left(one);
                }
            });
        },
    },
    Fault {
        id: "gather-in-another-order",
        imitates: "the rows of a region's ranks are gathered in the opposite order of its ranks",
        source: "https://github.com/NVIDIA/TransformerEngine/issues/2892",
        entries: &[],
        caught_by: ROWS,
        edit: |_, schedule| {
            let inputs: BTreeSet<BufferId> = schedule
                .placements
                .iter()
                .filter(|placement| hidden(placement.tensor).is_some())
                .map(|placement| placement.buffer)
                .collect();
            for work in works(schedule) {
                if let Work::AllGather { from, to, .. } = work
                    && inputs.contains(&from.buffer)
                {
                    to.reverse();
                }
            }
        },
    },
    Fault {
        id: "scatter-without-its-sum",
        imitates: "the backward of a region cuts the gradients of hidden rows, but does not add up those of its ranks",
        source: "https://github.com/NVIDIA/TransformerEngine/issues/2892",
        entries: &[],
        caught_by: ROWS,
        edit: |_, schedule| {
            scatters(schedule, Passes::Backward, |member, work| {
                if let Work::ReduceScatter { from, to, .. } = work
                    && let Some(own) = from.get(member)
                {
                    let rows = vec![(own.rows, to.rows)];
                    *work = Work::Copy { from: own.buffer, to: to.buffer, rows };
                }
            });
        },
    },
    Fault {
        id: "padding-lost-in-a-region",
        imitates: "hidden rows of the output are packed by real lengths: padding rows do not keep their place",
        source: "https://github.com/NVIDIA/TransformerEngine/issues/2892",
        entries: &[],
        caught_by: &[Checker, Structure],
        edit: |_, schedule| {
            let real: BTreeMap<BufferId, Vec<Run>> = results(schedule).collect();
            for work in works(schedule) {
                if let Work::Copy { to, rows, .. } = work
                    && let Some(runs) = real.get(to)
                {
                    pack(rows, runs);
                }
            }
        },
    },
    Fault {
        id: "last-offset-not-rounded",
        imitates: "the token count is rounded up for the ranks of a region, the last offset is not",
        source: "https://github.com/NVIDIA/Megatron-LM/pull/2574",
        entries: &[35],
        caught_by: &[Checker, Crash],
        edit: |_, schedule| {
            let layers: Vec<(BufferId, BufferId)> = works(schedule)
                .filter_map(|work| match work {
                    Work::Linear { layer: Layer::Column, from: hidden, to: inside, .. }
                    | Work::Linear { layer: Layer::Row, from: inside, to: hidden, .. } => {
                        Some((*hidden, *inside))
                    }
                    _ => None,
                })
                .collect();
            for (hidden, inside) in layers {
                schedule.buffers[hidden.0].rows = schedule.buffers[inside.0].rows;
            }
        },
    },
    Fault {
        id: "padded-lengths-in-a-region",
        imitates: "padded offsets are passed in both roles, so that gather and linear layer fit: padding is attended",
        source: "https://github.com/NVIDIA/TransformerEngine/issues/2892",
        entries: &[4],
        caught_by: ROWS,
        edit: |_, schedule| {
            segments(schedule, |segment| {
                segment.q.len = segment.q.span;
                segment.kv.iter_mut().for_each(|run| run.len = run.span);
            });
        },
    },
    Fault {
        id: "positions-from-real-offsets",
        imitates: "a row's position is its padded row less the real offset of its sequence: wrong after the first padding",
        source: "https://github.com/NVIDIA/TransformerEngine/pull/2077",
        entries: &[27],
        caught_by: ROWS,
        edit: |problem, schedule| {
            rotations(schedule, |rows| {
                let (first, mut real) = (rows.to_vec(), 0);
                for (rotated, sequence) in rows.iter_mut().zip(sequences(problem, &first)) {
                    rotated.position = rotated.rows.offset.saturating_sub(real);
                    real += sequence.len;
                }
            });
        },
    },
    Fault {
        id: "rotation-at-real-offsets",
        imitates: "the rotation walks the real offsets of a padded layout: it turns rows of other sequences, and padding",
        source: "https://github.com/NVIDIA/Megatron-LM/commit/8e44748ee2",
        entries: &[28],
        caught_by: ROWS,
        edit: |problem, schedule| {
            rotations(schedule, |rows| {
                let (first, mut real) = (rows.to_vec(), 0);
                for (rotated, sequence) in rows.iter_mut().zip(sequences(problem, &first)) {
                    rotated.rows = Run { offset: real, step: 1, len: sequence.len, span: sequence.len };
                    real += sequence.len;
                }
            });
        },
    },
    Fault {
        id: "positions-run-on",
        imitates: "positions of the pack are counted through: no sequence after the first begins at 0",
        source: "https://github.com/epfLLM/Megatron-LLM/issues/23",
        entries: &[],
        caught_by: ROWS,
        edit: |_, schedule| {
            rotations(schedule, |rows| {
                rows.iter_mut().for_each(|rotated| rotated.position = rotated.rows.offset);
            });
        },
    },
    Fault {
        id: "rotated-twice",
        imitates: "two callers rotate the same rows",
        source: "https://github.com/labmlai/annotated_deep_learning_paper_implementations/issues/251",
        entries: &[],
        caught_by: ROWS,
        edit: |_, schedule| {
            rewrite(schedule, |_, operation| {
                let again = match &operation.work {
                    Work::Rotate { rows, inverse: false, .. } if !rows.is_empty() => Some(operation.clone()),
                    _ => None,
                };
                std::iter::once(operation).chain(again)
            });
        },
    },
    Fault {
        id: "gradients-turned-on",
        imitates: "the backward of the rotation is not its inverse: dq and dk stay turned",
        source: "https://github.com/PaddlePaddle/Paddle/pull/74716",
        entries: &[],
        caught_by: ROWS,
        edit: |_, schedule| {
            for work in works(schedule) {
                if let Work::Rotate { rows, inverse, .. } = work {
                    *inverse &= rows.is_empty();
                }
            }
        },
    },
    Fault {
        id: "positions-of-a-shard",
        imitates: "a rank's part of a sequence is rotated as though it began at position 0",
        source: "https://github.com/NVIDIA/Megatron-LM/pull/4075",
        entries: &[41],
        caught_by: ROWS,
        edit: |_, schedule| {
            rotations(schedule, |rows| {
                rows.iter_mut().for_each(|rotated| (rotated.position, rotated.step) = (0, 1));
            });
        },
    },
];

/// Returns a problem in a region: the largest one, up to [`RANKS_MAX`], that holds the heads. A problem that is in one
/// stays there, and so does one whose heads no region holds. A form, or steps, that a region cannot have are left out.
pub(super) fn around(problem: Problem) -> Problem {
    let regions = if problem.parallel.region > 1 { 0..0 } else { 2..RANKS_MAX + 1 };
    let inside = regions.rev().find_map(|region| {
        let parallel = ContextParallel { region, ..problem.parallel.clone() };
        let fields = ProblemFields { parallel, ..problem.clone().into() };
        Problem::new(fields.sayable()).ok().filter(|inside| build(inside).is_ok())
    });
    inside.unwrap_or(problem)
}

/// Edits the scatters of hidden rows, each with the member of its region that it belongs to.
fn scatters(schedule: &mut Schedule, passes: Passes, mut edit: impl FnMut(usize, &mut Work)) {
    let (ranks, hidden) = (schedule.region(), hidden_rows(schedule));
    for (rank, program) in schedule.ranks.iter_mut().enumerate() {
        let begin = program.backward.unwrap_or(program.operations.len());
        for (index, operation) in program.operations.iter_mut().enumerate() {
            let of_region = match &operation.work {
                Work::ReduceScatter { from, .. } => from.iter().all(|part| hidden.contains(&part.buffer)),
                _ => false,
            };
            if of_region && (passes == Passes::Both || index >= begin) {
                edit(rank % ranks, &mut operation.work);
            }
        }
    }
}

/// Returns the buffers that row-parallel layers write.
fn hidden_rows(schedule: &Schedule) -> BTreeSet<BufferId> {
    let works = schedule.ranks.iter().flat_map(|program| &program.operations);
    let written = works.filter_map(|operation| match operation.work {
        Work::Linear { layer: Layer::Row, to, .. } => Some(to),
        _ => None,
    });
    written.collect()
}

/// Returns the runs of every result that is placed outside of a region.
fn results(schedule: &Schedule) -> impl Iterator<Item = (BufferId, Vec<Run>)> + '_ {
    let outside = schedule.placements.iter().filter(|placement| hidden(placement.tensor).is_some());
    let runs = |placement: &Placement| placement.rows.iter().map(|placed| placed.local).collect();
    outside
        .filter(|placement| matches!(schedule.buffers[placement.buffer.0].role, Role::Output(_)))
        .map(move |placement| (placement.buffer, runs(placement)))
}

/// Makes a copy of whole runs one of their real rows alone, which then follow each other.
fn pack(rows: &mut [RowPair], runs: &[Run]) {
    let mut end = rows.first().map_or(0, |(_, to)| to.offset);
    for (from, to) in rows {
        let real = runs.iter().find(|run| run.offset == to.offset).map_or(to.len, |run| run.len);
        (from.len, from.span) = (real, real);
        *to = Run { offset: end, len: real, span: real, ..*to };
        end += real * to.step;
    }
}

/// Edits the rows of every rotation, forward and back.
fn rotations(schedule: &mut Schedule, mut edit: impl FnMut(&mut Vec<Rotated>)) {
    for work in works(schedule) {
        if let Work::Rotate { rows, .. } = work {
            edit(rows);
        }
    }
}

/// Returns the sequences, on one rank, whose rows are rotated; none if the rows are parts of sequences.
fn sequences(problem: &Problem, rows: &[Rotated]) -> Vec<Run> {
    let sides = [|sequence: &Sequence| sequence.q, |sequence: &Sequence| sequence.kv];
    let whole = sides.into_iter().find_map(|side| {
        let runs: Vec<Run> = problem.sequences.iter().map(side).filter(|run| run.span > 0).collect();
        let place = |run: &Run| (run.offset, run.step, run.span);
        let same = runs.iter().map(place).eq(rows.iter().map(|rotated| place(&rotated.rows)));
        same.then_some(runs)
    });
    whole.filter(|_| problem.parallel.size() == 1).unwrap_or_default()
}

/// Collective of a region.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Exchange {
    Gather,
    Scatter,
}

/// Shrinks exchanges to shards of real rows, where these are shorter than the shards of padded rows. Calls `tell` with
/// the regions of the whole side and with the rows of a shard.
fn each_part_by_real_rows(schedule: &mut Schedule, which: Exchange, mut tell: impl FnMut(&[Region], usize)) {
    let (ranks, real) = (schedule.region(), real_rows(schedule));
    for work in works(schedule) {
        let (shard, whole, kind) = match work {
            Work::AllGather { from, to, .. } => (from, to, Exchange::Gather),
            Work::ReduceScatter { from, to, .. } => (to, from, Exchange::Scatter),
            _ => continue,
        };
        let part = real.get(&shard.buffer).map(|rows| rows.div_ceil(ranks));
        if let Some(part) = part.filter(|&part| kind == which && part < shard.rows.len) {
            shard.rows = Run::packed(0, part, part);
            for (index, region) in whole.iter_mut().enumerate() {
                region.rows = Run::packed(index * part, part, part);
            }
            tell(whole, part);
        }
    }
}

/// Returns the real rows of the region of each shard, and of each buffer from which a result's shard is copied.
fn real_rows(schedule: &Schedule) -> BTreeMap<BufferId, usize> {
    let region = |placement: &Placement| {
        (schedule.buffers[placement.buffer.0].rank / schedule.region(), placement.tensor)
    };
    let mut real = BTreeMap::new();
    for placement in &schedule.placements {
        let rows: usize = placement.rows.iter().map(|placed| placed.local.len).sum();
        *real.entry(region(placement)).or_insert(0) += rows;
    }
    let mut of_buffer: BTreeMap<BufferId, usize> =
        schedule.placements.iter().map(|placement| (placement.buffer, real[&region(placement)])).collect();
    for operation in schedule.ranks.iter().flat_map(|program| &program.operations) {
        if let Work::Copy { from, to, .. } = &operation.work
            && let Some(&rows) = of_buffer.get(to)
        {
            of_buffer.insert(*from, rows);
        }
    }
    of_buffer
}
