//! Faults of keys that sequences share: a lent row gets the gradients of too few or too many sequences, or a borrower
//! sees the prefix in another place or twice.

use std::collections::BTreeMap;

use seamproof_oracle::{Problem, TensorName};

use super::edit::{rewrite, works};
use super::fault::Catcher::{Checker, Envelope, Identity, Poison};
use super::fault::{Edit, Fault};
use crate::Segment;
use crate::schedule::{ARRIVED, Operation, RowPair, Schedule, Work, part};

/// A library that trains on several answers behind one prompt whose keys they share.
const TRAINED: &str = "https://github.com/unslothai/unsloth-zoo/pull/868";
/// A library that trains on answers behind one prompt whose keys they share, over ranks.
const OVER_RANKS: &str = "https://github.com/NVIDIA-NeMo/RL/pull/4008";
/// A kernel that reads a prefix once for all sequences that share it.
const CASCADE: &str = "https://github.com/vllm-project/vllm/pull/11635";

pub(super) const FAULTS: &[Fault<Edit>] = &[
    Fault {
        id: "shared-gradient-of-the-last",
        imitates: "gradients of shared keys are written and not added: those of the last sequence stay",
        source: TRAINED,
        entries: &[],
        caught_by: &[Checker, Envelope],
        edit: |problem, schedule| {
            for work in works(schedule) {
                if let Work::Accumulate { from, to, rows } = work
                    && adds_borrowed(problem, rows)
                {
                    *work = Work::Copy { from: *from, to: *to, rows: std::mem::take(rows) };
                }
            }
        },
    },
    Fault {
        id: "shared-gradient-counted-twice",
        imitates: "a sequence adds its gradients of shared keys twice",
        source: TRAINED,
        entries: &[],
        caught_by: &[Checker, Envelope],
        edit: |problem, schedule| repeat_sums(problem, schedule, 2),
    },
    Fault {
        id: "shared-gradient-of-the-lender-alone",
        imitates: "shared keys are detached: sequences that borrow them add nothing to their gradients",
        source: TRAINED,
        entries: &[],
        caught_by: &[Checker, Envelope],
        edit: |problem, schedule| repeat_sums(problem, schedule, 0),
    },
    Fault {
        id: "shared-prefix-causal-by-row",
        imitates: "a query's place is its row, as though no prefix lay before it: it sees too few keys",
        source: CASCADE,
        entries: &[],
        caught_by: &[Checker, Envelope, Identity],
        edit: |problem, schedule| {
            borrowers(problem, schedule, |segment, keys| {
                let keys = keys as i64;
                segment.lo = segment.lo.map(|lo| lo.saturating_sub(keys));
                segment.hi = segment.hi.map(|hi| hi.saturating_sub(keys));
            });
        },
    },
    Fault {
        id: "shared-prefix-attended-twice",
        imitates: "the prefix is attended for all sequences, and again with the keys of each",
        source: CASCADE,
        entries: &[],
        caught_by: &[Checker, Envelope, Identity],
        edit: |problem, schedule| {
            borrowers(problem, schedule, |segment, keys| {
                let Some(first) = segment.kv.first() else { return };
                let again = part(*first, &(0..keys.min(first.len)));
                let keys = again.len as i64;
                segment.kv.insert(0, again);
                segment.hi = segment.hi.map(|hi| hi.saturating_add(keys));
            });
        },
    },
    Fault {
        id: "last-lent-key-lost",
        imitates: "the last shared key that a rank needs of another one is not copied to its place",
        source: OVER_RANKS,
        entries: &[],
        caught_by: &[Checker, Envelope, Poison],
        edit: |problem, schedule| {
            if problem.sharing.is_empty() {
                return;
            }
            let arrived: Vec<bool> =
                schedule.buffers.iter().map(|buffer| buffer.name.ends_with(ARRIVED)).collect();
            for work in works(schedule) {
                if let Work::Copy { from, rows, .. } = work
                    && arrived[from.0]
                {
                    rows.pop();
                }
            }
        },
    },
];

/// Whether an accumulation adds rows to others: what a borrower has of a lent row.
fn adds_borrowed(problem: &Problem, rows: &[RowPair]) -> bool {
    !problem.sharing.is_empty() && rows.iter().any(|(from, to)| from != to)
}

/// Makes each addition to lent rows so many times.
fn repeat_sums(problem: &Problem, schedule: &mut Schedule, times: usize) {
    rewrite(schedule, |_, operation: Operation| {
        let adds = matches!(&operation.work, Work::Accumulate { rows, .. } if adds_borrowed(problem, rows));
        vec![operation; if adds { times } else { 1 }]
    });
}

/// Edits the forward's segments of sequences that borrow, given the number of keys that they borrow.
fn borrowers(problem: &Problem, schedule: &mut Schedule, edit: impl Fn(&mut Segment, usize)) {
    if problem.sharing.is_empty() {
        return;
    }
    let mut sequences: BTreeMap<(usize, usize), usize> = BTreeMap::new();
    for placement in schedule.placements.iter().filter(|placement| placement.tensor == TensorName::Q) {
        let rank = schedule.buffers[placement.buffer.0].rank;
        for placed in &placement.rows {
            sequences.extend(placed.local.real_rows().map(|row| ((rank, row), placed.sequence)));
        }
    }
    for (rank, program) in schedule.ranks.iter_mut().enumerate() {
        for operation in &mut program.operations {
            let Work::Attend(attend) = &mut operation.work else { continue };
            for segment in attend.call.segments.iter_mut().filter(|segment| segment.q.len > 0) {
                let sequence = sequences.get(&(rank, segment.q.offset));
                let keys = sequence.map_or(0, |sequence| problem.sharing.borrowed(*sequence));
                if keys > 0 {
                    edit(segment, keys);
                }
            }
        }
    }
}
