//! Whether row pairs have the form that a kernel for packed slots takes.

use seamproof_oracle::{Format, Run};
use seamproof_simulator::schedule::{Axes, RowPair};

use super::image::Placed;
use crate::view::Table;

/// Slots in tables of the device, with `count` of them in each of offset, span and length.
#[derive(Clone, Debug)]
pub(super) struct SlotTables {
    pub(super) table: Table,
    pub(super) count: usize,
}

/// The slots whose real rows the pairs are: the same rows on both sides, consecutive, in order after sorting.
pub(super) fn slots(rows: &[RowPair]) -> Option<SlotTables> {
    let mut runs: Vec<Run> = Vec::new();
    for (from, to) in rows.iter().filter(|(from, _)| from.len > 0) {
        if (from.offset, from.step) != (to.offset, to.step) || from.step != 1 {
            return None;
        }
        runs.push(Run::packed(from.offset, from.len, from.len));
    }
    runs.sort_by_key(|run| run.offset);
    let apart = runs.windows(2).all(|pair| pair[0].offset + pair[0].len <= pair[1].offset);
    if runs.is_empty() || !apart {
        return None;
    }
    let mut table = Table::default();
    let columns: [fn(&Run) -> usize; 3] = [|run| run.offset, |run| run.span, |run| run.len];
    for column in columns {
        runs.iter().for_each(|run| table.i32(&[column(run) as i32]));
    }
    Some(SlotTables { table, count: runs.len() })
}

/// Tensors of one shape in formats that the kernels add up.
pub(super) fn adds(to: &Placed, step: &Placed) -> bool {
    let formats = match (to.format, step.format) {
        (Format::F32, _) => true,
        (to, step) => to == step,
    };
    formats && alike(to, step)
}

/// Tensors of rows of one shape.
pub(super) fn alike(a: &Placed, b: &Placed) -> bool {
    a.axes == Axes::Rows && b.axes == Axes::Rows && (a.rows, a.heads, a.dim) == (b.rows, b.heads, b.dim)
}
