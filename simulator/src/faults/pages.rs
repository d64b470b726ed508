//! Faults of a reader of pages: another page, another row of a page, or rows that hold no key.
//!
//! A *block table* in memory has as many places for each sequence, row after row. Places that name no page hold 0.

use seamproof_oracle::{Pages, Problem, ProblemFields, Run, TensorRows};

use super::edit::attends;
use super::fault::Catcher::{Checker, Envelope, Poison, Structure};
use super::fault::{Edit, Fault};
use crate::AttentionCall;
use crate::schedule::Schedule;

/// Source of entries behind a sequence's own: a kernel reads past the end of its row of the table.
const PAST_THE_ROW: &str = "https://github.com/Dao-AILab/flash-attention/pull/2711";

pub(super) const FAULTS: &[Fault<Edit>] = &[
    Fault {
        id: "page-of-the-next-entry",
        imitates: "the entry of a position is that of the one behind it: a page's last row comes from the next page",
        source: PAST_THE_ROW,
        entries: &[],
        caught_by: &[Checker, Structure, Poison, Envelope],
        edit: |problem, schedule| {
            read(problem, schedule, |pages, sequence, position| {
                let page = entry(pages, sequence, (position + 1) / pages.size);
                page * pages.size + position % pages.size
            });
        },
    },
    Fault {
        id: "page-behind-a-page",
        imitates: "two pages are loaded at once, as if the second lay behind the first in the pool",
        source: "https://github.com/hw-native-sys/pypto/pull/470",
        entries: &[],
        caught_by: &[Checker, Structure, Poison, Envelope],
        edit: |problem, schedule| {
            read(problem, schedule, |pages, sequence, position| {
                let index = position / pages.size;
                let page = entry(pages, sequence, index - index % 2) + index % 2;
                page * pages.size + position % pages.size
            });
        },
    },
    Fault {
        id: "pages-of-the-next-sequence",
        imitates: "rows of the table are counted from 1: each sequence reads the pages of the one behind it",
        source: PAST_THE_ROW,
        entries: &[62],
        caught_by: &[Checker, Structure, Poison, Envelope],
        edit: |problem, schedule| {
            read(problem, schedule, |pages, sequence, position| {
                let page = entry(pages, sequence + 1, position / pages.size);
                page * pages.size + position % pages.size
            });
        },
    },
    Fault {
        id: "page-offset-of-another-size",
        imitates: "the row of a page is masked with a power of two, where pages have another number of rows",
        source: "https://github.com/Dao-AILab/flash-attention/issues/1627",
        entries: &[],
        caught_by: &[Checker, Structure, Poison, Envelope],
        edit: |problem, schedule| {
            read(problem, schedule, |pages, sequence, position| {
                let mask = pages.size.next_power_of_two() - 1;
                entry(pages, sequence, position / pages.size) * pages.size + (position & mask)
            });
        },
    },
    Fault {
        id: "page-of-one-row",
        imitates: "a cache is taken for pages of one row: the table is not asked",
        source: "https://github.com/flashinfer-ai/flashinfer/issues/1204",
        entries: &[],
        caught_by: &[Checker, Structure, Poison, Envelope],
        edit: |problem, schedule| {
            read(problem, schedule, |pages, sequence, position| {
                entry(pages, sequence, 0) * pages.size + position
            });
        },
    },
    Fault {
        id: "last-page-taken-for-full",
        imitates: "keys are counted in whole pages: rows of the last one that hold no key are read",
        source: "https://github.com/pegainfer-project/pegainfer/issues/291",
        entries: &[],
        caught_by: &[Checker, Structure, Poison],
        edit: |problem, schedule| {
            if let Some(whole) = in_whole_pages(problem) {
                read(&whole, schedule, Pages::row);
            }
        },
    },
    Fault {
        id: "page-of-an-append-unknown",
        imitates: "the table is that of the call before: a page that this call's tokens began is not in it yet",
        source: "https://github.com/vllm-project/vllm/issues/42494",
        entries: &[],
        caught_by: &[Checker, Structure, Poison, Envelope],
        edit: |problem, schedule| {
            read(problem, schedule, |pages, sequence, position| {
                let (q, kv) = (problem.sequences[sequence].q, problem.sequences[sequence].kv);
                let known = kv.len.saturating_sub(q.len).div_ceil(pages.size);
                let index = position / pages.size;
                let page = if index < known { entry(pages, sequence, index) } else { 0 };
                page * pages.size + position % pages.size
            });
        },
    },
];

/// Makes the launches of a problem in pages read each position where `row` says. A row past the pool's end is its last.
fn read(problem: &Problem, schedule: &mut Schedule, row: impl Fn(&Pages, usize, usize) -> usize) {
    let Some(pages) = &problem.pages else { return };
    let last = pages.rows().saturating_sub(1);
    let call = AttentionCall::through(problem, |sequence, position| row(pages, sequence, position).min(last));
    attends(schedule).for_each(|attend| attend.call.segments.clone_from(&call.segments));
}

/// Returns what the block table holds at a place of a sequence's row, or behind it.
fn entry(pages: &Pages, sequence: usize, index: usize) -> usize {
    let width = pages.table.iter().map(Vec::len).max().unwrap_or(0).max(1);
    let row = pages.table.get(sequence + index / width);
    row.and_then(|row| row.get(index % width)).copied().unwrap_or(0)
}

/// Returns the problem with as many keys in each sequence as its pages have rows.
fn in_whole_pages(problem: &Problem) -> Option<Problem> {
    let size = problem.pages.as_ref()?.size;
    let mut fields = ProblemFields::from(problem.clone());
    let mut end = 0;
    for sequence in &mut fields.sequences {
        let keys = sequence.kv.len.next_multiple_of(size);
        sequence.kv = Run::packed(end, keys, keys);
        end += keys;
    }
    fields.rows = TensorRows { kv: end, ..fields.rows };
    Problem::new(fields).ok()
}
