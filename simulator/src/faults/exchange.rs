//! Faults of rings, gathers, all-to-alls and reorders: the wrong rows, the wrong heads, the wrong rank, or nothing.

use seamproof_oracle::{
    Algorithm, Alignment, Balance, ContextParallel, Problem, ProblemFields, Run, TensorName,
};

use super::edit::{attends, backwards, each_reorder, remove_last, rewrite, works};
use super::fault::Catcher::{self, Checker, Crash, Envelope, Identity, Poison, Structure};
use super::fault::{Edit, Fault};
use crate::AttentionCall;
use crate::schedule::{BufferId, Operation, Schedule, Step, Work, build, communicator, peer};

/// Catchers of messages that another rank gets. Mostly the run does not end. Where another group waits for them, its
/// rows come.
const WRONG_RANK: &[Catcher] = &[Checker, Crash, Structure, Poison, Envelope, Identity];

pub(super) const FAULTS: &[Fault<Edit>] = &[
    Fault {
        id: "dealt-in-order",
        imitates: "loader, attention and reader agree on one part of each sequence a rank where dual-chunk is asked for",
        source: "https://github.com/feifeibear/long-context-attention/issues/53",
        entries: &[],
        // The schedule is right for the rows that it places, and no proof of it fails.
        caught_by: &[Structure, Envelope],
        edit: dealt_in_order,
    },
    Fault {
        id: "ring-step-skipped",
        imitates: "the inequality that skips a ring's steps is off: the last step with work is left out",
        source: "https://github.com/zhuzilin/ring-flash-attention/commit/63b1c31",
        entries: &[97],
        caught_by: &[Checker, Envelope],
        edit: |problem, schedule| {
            if problem.parallel.algorithm == Algorithm::Ring {
                remove_last(schedule, |work| matches!(work, Work::Attend(_)));
                remove_last(schedule, |work| matches!(work, Work::Merge(_)));
            }
        },
    },
    Fault {
        id: "backward-reads-its-own-kv",
        imitates: "KV travels in local variables while each step of the backward reads what was saved at step 0",
        source: "https://github.com/huggingface/diffusers/issues/14265",
        entries: &[103],
        caught_by: &[Checker, Poison, Envelope],
        edit: |_, schedule| {
            let mut first: Option<(BufferId, [BufferId; 2])> = None;
            for attend in backwards(schedule) {
                let here = (attend.q, [attend.k, attend.v]);
                let own = first.filter(|(q, _)| *q == attend.q).unwrap_or(here);
                [attend.k, attend.v] = own.1;
                first = Some(own);
            }
        },
    },
    Fault {
        id: "kv-of-another-step",
        imitates: "the swap of the travelling KV comes too late: a step works on the keys of the step before",
        source: "https://github.com/zhuzilin/ring-flash-attention/commit/756f085",
        entries: &[100],
        caught_by: &[Checker, Envelope],
        edit: |_, schedule| {
            let mut before: Option<(BufferId, [BufferId; 2])> = None;
            for attend in attends(schedule) {
                let here = (attend.q, [attend.k, attend.v]);
                let same_rank = before.filter(|(q, _)| *q == attend.q);
                [attend.k, attend.v] = same_rank.unwrap_or(here).1;
                before = Some(here);
            }
        },
    },
    Fault {
        id: "chunks-swapped",
        imitates: "head and tail chunk of a rank's keys are taken for each other",
        source: "https://github.com/vllm-project/tpu-inference/pull/3241",
        entries: &[112],
        caught_by: &[Checker, Envelope],
        edit: |_, schedule| {
            for placement in schedule.placements.iter_mut().filter(|p| p.tensor == TensorName::K) {
                for index in 1..placement.rows.len() {
                    let [first, second] = [placement.rows[index - 1], placement.rows[index]];
                    let alike = first.sequence == second.sequence && first.local.len == second.local.len;
                    if alike && first.local.len > 0 {
                        placement.rows[index - 1].piece.start = second.piece.start;
                        placement.rows[index].piece.start = first.piece.start;
                    }
                }
            }
        },
    },
    Fault {
        id: "gathered-kv-in-rank-order",
        imitates: "gathered rows are left in load-balanced order before the mask is applied",
        source: "https://github.com/NVIDIA/TransformerEngine/pull/1282",
        entries: &[96],
        caught_by: &[Checker, Structure, Poison],
        edit: |_, schedule| {
            each_reorder(schedule, false, |rows| rows.iter_mut().for_each(|(from, to)| *to = *from));
        },
    },
    Fault {
        id: "gradients-in-sequence-order",
        imitates: "gradients are not brought back to the load-balanced order before they are scattered",
        source: "https://github.com/NVIDIA/TransformerEngine/pull/1282",
        entries: &[96],
        caught_by: &[Checker, Structure],
        edit: |_, schedule| {
            each_reorder(schedule, true, |rows| rows.iter_mut().for_each(|(from, to)| *from = *to));
        },
    },
    Fault {
        id: "sent-to-the-world-rank",
        imitates: "a peer's rank in the world is used where its place in the group is meant",
        source: "https://github.com/pytorch/pytorch/pull/187924",
        entries: &[99],
        caught_by: WRONG_RANK,
        edit: |problem, schedule| {
            each_peer(problem, schedule, |ranks, _, peer| ranks[peer % ranks.len()]);
        },
    },
    Fault {
        id: "sent-to-the-place-as-a-world-rank",
        imitates: "a peer's place in the group is used as its rank in the world: another rank gets the message, or nobody",
        source: "https://github.com/vllm-project/vllm/pull/55804",
        entries: &[],
        caught_by: WRONG_RANK,
        edit: |problem, schedule| each_peer(problem, schedule, |ranks, _, peer| place(ranks, peer)),
    },
    Fault {
        id: "group-of-consecutive-ranks",
        imitates: "groups are made of consecutive ranks where theirs are strided: two groups exchange their keys",
        source: "https://github.com/hpcaitech/ColossalAI/pull/6071",
        entries: &[],
        caught_by: WRONG_RANK,
        edit: consecutive_ranks,
    },
    Fault {
        id: "gradient-lost-on-one-step",
        imitates: "the gradient ring is one swap off: what the last step adds does not travel",
        source: "https://github.com/zhuzilin/ring-flash-attention/commit/4072701",
        entries: &[100],
        caught_by: &[Checker, Envelope],
        edit: |_, schedule| remove_last(schedule, |work| matches!(work, Work::Accumulate { .. })),
    },
    Fault {
        id: "gradient-overwritten",
        imitates: "travelling gradients alias a step's scratch: they are overwritten instead of added to",
        source: "https://github.com/zhuzilin/ring-flash-attention/commit/756f085",
        entries: &[100],
        caught_by: &[Checker, Envelope],
        edit: |_, schedule| {
            for work in works(schedule) {
                if let Work::Accumulate { from, to, rows } = work {
                    *work = Work::Copy { from: *from, to: *to, rows: std::mem::take(rows) };
                }
            }
        },
    },
    Fault {
        id: "gradients-not-reduced",
        imitates: "gradients are reduced over a group that leaves the CP ranks out",
        source: "https://github.com/deepspeedai/DeepSpeed/issues/5248",
        entries: &[113],
        caught_by: &[Checker, Envelope],
        edit: |_, schedule| {
            // A region's sums have a fault of their own.
            if schedule.sequence_parallel.is_some() {
                return;
            }
            let members = schedule.members.clone();
            rewrite(schedule, |rank, Operation { stream, work }| {
                let work = match work {
                    Work::ReduceScatter { from, to, .. } => {
                        let own = &from[members.iter().position(|member| *member == rank).unwrap_or(0)];
                        Work::Copy { from: own.buffer, to: to.buffer, rows: vec![(own.rows, to.rows)] }
                    }
                    other => other,
                };
                [Operation { stream, work }]
            });
        },
    },
    Fault {
        id: "kv-heads-by-modulo",
        imitates: "replicated KV heads are dealt round instead of in blocks: queries read another head",
        source: "https://github.com/huggingface/diffusers/issues/14316",
        entries: &[104],
        caught_by: &[Checker, Envelope],
        edit: |_, schedule| {
            each_all_to_all(schedule, |heads| {
                let count = heads.iter().map(|own| own.end).max().unwrap_or(1);
                for (member, own) in heads.iter_mut().enumerate().filter(|(_, own)| own.len() == 1) {
                    *own = member % count..member % count + 1;
                }
            });
        },
    },
    Fault {
        id: "head-blocks-swapped",
        imitates: "a flat buffer is cut along the wrong axis: two members get each other's heads",
        source: "https://github.com/NVIDIA/TransformerEngine/pull/1896",
        entries: &[107],
        caught_by: &[Checker, Envelope],
        edit: |_, schedule| each_all_to_all(schedule, |heads| heads.swap(0, 1)),
    },
    Fault {
        id: "stripes-in-order-of-positions",
        imitates: "an all-to-all brings the stripes of its ranks into one order; the ring takes them rank by rank",
        source: "https://github.com/feifeibear/long-context-attention/blob/main/yunchang/comm/extract_local.py",
        entries: &[],
        caught_by: &[Checker, Structure, Poison, Envelope],
        edit: |problem, schedule| {
            if let Some(members) = striped_group(problem) {
                each_reorder(schedule, false, |rows| {
                    let collected: Vec<Run> = rows.iter().map(|(_, to)| *to).collect();
                    rows.iter_mut().for_each(|(_, to)| *to = interleaved(*to, members, &collected));
                });
            }
        },
    },
    Fault {
        id: "stripes-compared-by-ring-alone",
        imitates: "a step's mask is chosen by places in the ring: pieces of one place see each other's diagonal",
        source: "https://github.com/NVIDIA/TransformerEngine/blob/main/transformer_engine/jax/cpp_extensions/attention.py",
        entries: &[],
        caught_by: &[Checker, Envelope],
        edit: |problem, schedule| {
            let is_causal = problem.mask.is_causal() && problem.mask.align == Alignment::TopLeft;
            if let Some(members) = striped_group(problem).filter(|_| is_causal) {
                each_diagonal(schedule, members, |call| {
                    let hidden = call.segments.iter_mut().filter(|segment| segment.hi == Some(-1));
                    hidden.for_each(|segment| segment.hi = Some(0));
                });
            }
        },
    },
    Fault {
        id: "rows-before-the-first-offset",
        imitates: "the reorder looks for the offset before rows that precede the first one: it reads at index −1",
        source: "https://github.com/NVIDIA/TransformerEngine/pull/2829",
        entries: &[19],
        caught_by: &[Checker, Crash],
        edit: |problem, schedule| {
            if problem.sequences.iter().all(|sequence| sequence.q.offset.min(sequence.kv.offset) > 0) {
                each_reorder(schedule, false, |rows| {
                    let end = rows.iter().map(|(_, to)| to.offset + to.span * to.step).max().unwrap_or(0);
                    if let Some((_, to)) = rows.first_mut().filter(|(_, to)| to.offset == 0) {
                        to.offset = end;
                    }
                });
            }
        },
    },
];

/// Returns the place of a rank of the world in a group that it is in.
fn place(ranks: &[usize], rank: usize) -> usize {
    ranks.iter().position(|member| *member == rank).unwrap_or(0)
}

/// Replaces the peer of each message, given the group's ranks of the world, the own one and the peer. In regions, each
/// of these is a region, in which sender and receiver have the same place.
fn each_peer(problem: &Problem, schedule: &mut Schedule, mistaken: impl Fn(&[usize], usize, usize) -> usize) {
    let ContextParallel { ranks, region, .. } = &problem.parallel;
    rewrite(schedule, |rank, mut operation| {
        if let Some(peer) = peer(&mut operation.work) {
            *peer = mistaken(ranks, rank / region, *peer / region) * region + *peer % region;
        }
        [operation]
    });
}

/// Makes each rank exchange messages, and gather and reduce over the whole group, with the ranks of its block: as many
/// consecutive ranks of the world as the group has. It takes its place in the block for that in the group.
fn consecutive_ranks(problem: &Problem, schedule: &mut Schedule) {
    let ContextParallel { ranks, region, .. } = &problem.parallel;
    let size = ranks.len();
    each_peer(problem, schedule, |ranks, own, peer| {
        let ahead = place(ranks, peer) + size - place(ranks, own);
        own / size * size + (own + ahead) % size
    });
    let mut communicators = std::mem::take(&mut schedule.communicators);
    rewrite(schedule, |rank, mut operation| {
        if let Some(communicator) = communicator(&mut operation.work)
            && is_of_all_regions(&communicators[*communicator], problem)
        {
            let first = rank / region / size * size;
            let block: Vec<usize> = (first..first + size).map(|own| own * region + rank % region).collect();
            *communicator = communicators.iter().position(|known| *known == block).unwrap_or_else(|| {
                communicators.push(block);
                communicators.len() - 1
            });
        }
        [operation]
    });
    schedule.communicators = communicators;
}

/// Whether a communicator has one rank of each region of the group.
fn is_of_all_regions(communicator: &[usize], problem: &Problem) -> bool {
    let ContextParallel { ranks, region, .. } = &problem.parallel;
    communicator.iter().map(|rank| rank / region).eq(ranks.iter().copied())
}

/// Replaces the whole schedule, with its placements, by that of a builder that was given the wrong cut.
fn dealt_in_order(problem: &Problem, schedule: &mut Schedule) {
    let mut fields = ProblemFields::from(problem.clone());
    fields.parallel.balance = Balance::Contiguous;
    let other = Problem::new(fields).ok().and_then(|other| build(&other).ok());
    if problem.parallel.balance == Balance::DualChunk && problem.parallel.size() > 1 {
        other.into_iter().for_each(|other| *schedule = other);
    }
}

/// Edits the heads that each all-to-all sends to its members, if it sends them different heads.
fn each_all_to_all(schedule: &mut Schedule, edit: impl Fn(&mut [std::ops::Range<usize>])) {
    for work in works(schedule) {
        if let Work::AllToAll { send, .. } = work {
            let mut heads: Vec<_> = send.iter().map(|region| region.heads.clone()).collect();
            if heads.iter().any(|other| *other != heads[0]) {
                edit(&mut heads);
                send.iter_mut().zip(heads).for_each(|(region, heads)| region.heads = heads);
            }
        }
    }
}

/// Returns the number of ranks of an all-to-all, if stripes are dealt to several such groups of several ranks.
fn striped_group(problem: &Problem) -> Option<usize> {
    match (problem.parallel.algorithm, problem.parallel.balance) {
        (Algorithm::Hierarchical { all_to_all }, Balance::Striped { .. }) if all_to_all > 1 => {
            Some(all_to_all)
        }
        _ => None,
    }
}

/// Edits the launches of rings' steps in which a group of `members` ranks works on keys of its own.
fn each_diagonal(schedule: &mut Schedule, members: usize, mut edit: impl FnMut(&mut AttentionCall)) {
    let ranks = members * schedule.region();
    for (place, &rank) in schedule.members.iter().enumerate() {
        let program = &mut schedule.ranks[rank];
        for operation in &mut program.operations {
            let (step, call) = match &mut operation.work {
                Work::Attend(attend) => (attend.step, &mut attend.call),
                Work::AttendBackward(attend) => (attend.step, &mut attend.call),
                _ => continue,
            };
            if matches!(step, Step::Ring { owner, .. } if owner == place / ranks) {
                edit(call);
            }
        }
    }
}

/// Returns where the rows of one of `members` runs of a slot lie if the runs take turns row by row. The runs follow
/// each other in `collected`.
fn interleaved(run: Run, members: usize, collected: &[Run]) -> Run {
    let place = collected.iter().filter(|other| other.offset < run.offset).count() % members;
    match run.offset.checked_sub(place * run.span) {
        Some(first) if run.step == 1 => Run { offset: first + place, step: members, ..run },
        _ => run,
    }
}
