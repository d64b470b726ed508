//! Faults of a pack that is converted into a batch of equal spans and back ([`converted`]): rows of the batch that lie
//! elsewhere, or are not brought.
//!
//! [`converted`]: crate::schedule::converted()

use seamproof_oracle::{Algorithm, Problem, Run, Side, TensorName};

use super::edit::works;
use super::fault::Catcher::{Checker, Crash, Envelope, Poison, Structure};
use super::fault::{Edit, Fault};
use crate::schedule::{Buffer, Role, RowPair, Schedule, Work};

/// The change that converts THD for unfused attention.
const UNFUSED: &str = "https://github.com/NVIDIA/TransformerEngine/pull/3063";

pub(super) const FAULTS: &[Fault<Edit>] = &[
    Fault {
        id: "batch-stride-by-real-length",
        imitates: "sequences of the batch begin at sums of real lengths, while attention steps by the longest one",
        source: UNFUSED,
        entries: &[],
        caught_by: &[Checker, Structure, Poison, Envelope],
        edit: |problem, schedule| {
            conversions(problem, schedule, |way, _, rows| {
                if way == Way::ToBatch {
                    let mut end = 0;
                    for (_, batch) in rows {
                        batch.offset = end;
                        end += batch.len;
                    }
                }
            });
        },
    },
    Fault {
        id: "pack-offsets-by-real-length",
        imitates: "results go back to sums of real lengths, as if the pack had no padding",
        source: UNFUSED,
        entries: &[],
        caught_by: &[Checker, Structure, Envelope],
        edit: |problem, schedule| {
            conversions(problem, schedule, |way, _, rows| {
                if way == Way::ToPack {
                    let mut end = 0;
                    for (_, pack) in rows {
                        pack.offset = end;
                        end += pack.len;
                    }
                }
            });
        },
    },
    Fault {
        id: "keys-converted-by-lengths-of-queries",
        imitates: "one length serves both sides: keys past the number of queries are not brought into the batch",
        source: UNFUSED,
        entries: &[],
        caught_by: &[Checker, Structure, Poison, Envelope],
        edit: |problem, schedule| {
            let lengths: Vec<(Run, usize)> = problem.sequences.iter().map(|s| (s.kv, s.q.len)).collect();
            conversions(problem, schedule, |way, side, rows| {
                if (way, side) != (Way::ToBatch, Side::Kv) {
                    return;
                }
                for (pack, batch) in rows {
                    let of = lengths.iter().find(|(kv, _)| kv.len > 0 && kv.offset == pack.offset);
                    let len = of.map_or(pack.len, |(_, queries)| pack.len.min(*queries));
                    for run in [pack, batch] {
                        (run.len, run.span) = (len, len);
                    }
                }
            });
        },
    },
    Fault {
        id: "last-row-lost-on-the-way-back",
        imitates: "a conversion back ends one row early in the longest sequence: its last query keeps the zeros",
        source: UNFUSED,
        entries: &[],
        caught_by: &[Checker, Structure, Crash, Envelope],
        edit: |problem, schedule| {
            conversions(problem, schedule, |way, _, rows| {
                if way == Way::ToPack
                    && let Some((batch, pack)) = rows.iter_mut().max_by_key(|(_, pack)| pack.len)
                {
                    for run in [batch, pack] {
                        (run.len, run.span) = (run.len - 1, run.span - 1);
                    }
                }
            });
        },
    },
];

/// Direction of a conversion.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    ToBatch,
    ToPack,
}

/// Edits the rows of each conversion of a single rank, given its direction and side.
fn conversions(problem: &Problem, schedule: &mut Schedule, edit: impl Fn(Way, Side, &mut Vec<RowPair>)) {
    if problem.parallel.algorithm != Algorithm::Single || problem.parallel.region > 1 {
        return;
    }
    let roles: Vec<Role> = schedule.buffers.iter().map(|Buffer { role, .. }| *role).collect();
    for work in works(schedule) {
        let Work::Copy { from, to, rows } = work else { continue };
        let (way, tensor) = match (roles[from.0], roles[to.0]) {
            (Role::Input(tensor), Role::Scratch) => (Way::ToBatch, tensor),
            (Role::Scratch, Role::Output(tensor)) => (Way::ToPack, tensor),
            _ => continue,
        };
        let of_keys = matches!(tensor, TensorName::K | TensorName::V | TensorName::Dk | TensorName::Dv);
        edit(way, if of_keys { Side::Kv } else { Side::Q }, rows);
    }
}
