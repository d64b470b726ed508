//! The way from the layout in which a subject returns its LSE to `[heads, rows]`, and back.

use ndarray::Array2;
use seamproof_oracle::sharding::{RankLayout, layouts};
use seamproof_oracle::{LseLayout, Problem};
use seamproof_simulator::UNWRITTEN_BITS;

use super::{Backend, Outputs, RankOutputs, RunError};

/// Returns results with the LSE of each rank as `[heads, rows]`, whatever layout the subject declares. Rows that have
/// no place in its layout are unwritten. An LSE of another shape than the layout has is an error of the subject.
pub fn in_rows(backend: &dyn Backend, problem: &Problem, outputs: Outputs) -> Result<Outputs, RunError> {
    let layout = backend.declaration().table.lse;
    each_rank(layout, problem, outputs, |lse, of| {
        let (got, asked) = (lse.shape(), of.shape());
        if got != asked {
            let what = format!("lse has shape {got:?}, and its layout {asked:?}");
            return Err(RunError::Crash(what));
        }
        let mut rows = Array2::from_elem([of.heads, of.places.len()], f32::from_bits(UNWRITTEN_BITS));
        of.each_place(|head, row, [line, column]| rows[[head, row]] = lse[[line, column]]);
        Ok(rows)
    })
}

/// Returns results with the LSE of each rank in a layout, as a kernel with padded rows writes it. What lies behind the
/// rows is NaN.
pub fn in_layout(layout: LseLayout, problem: &Problem, outputs: Outputs) -> Result<Outputs, RunError> {
    each_rank(layout, problem, outputs, |lse, of| {
        let mut padded = Array2::from_elem(of.shape(), f32::NAN);
        of.each_place(|head, row, [line, column]| padded[[line, column]] = lse[[head, row]]);
        Ok(padded)
    })
}

/// The LSE of one rank in a layout.
struct OfRank {
    layout: LseLayout,
    rank: RankLayout,
    heads: usize,
    sequences: usize,
    places: Vec<Option<(usize, usize)>>,
}

impl OfRank {
    fn shape(&self) -> [usize; 2] {
        self.layout.shape(self.rank.statistics_rows(), self.heads, self.sequences)
    }

    /// Calls `visit(head, row, [line, column])` for every row that has a place.
    fn each_place(&self, mut visit: impl FnMut(usize, usize, [usize; 2])) {
        for (row, place) in self.places.iter().enumerate() {
            let Some((block, column)) = *place else { continue };
            (0..self.heads).for_each(|head| visit(head, row, [block * self.heads + head, column]));
        }
    }
}

/// Changes the LSE of every rank, where the layout is not the plain one and the ranks are those of the problem.
fn each_rank(
    layout: LseLayout,
    problem: &Problem,
    mut outputs: Outputs,
    change: impl Fn(Array2<f32>, &OfRank) -> Result<Array2<f32>, RunError>,
) -> Result<Outputs, RunError> {
    if layout.is_plain() {
        return Ok(outputs);
    }
    let Ok(ranks) = layouts(problem) else { return Ok(outputs) };
    for (RankOutputs { lse, .. }, rank) in outputs.ranks.iter_mut().zip(ranks) {
        let (heads, sequences) = (rank.statistics_heads(problem.heads.q).len(), problem.sequences.len());
        let places = layout.places(rank.statistics_rows(), sequences);
        let of = OfRank { layout, rank, heads, sequences, places };
        *lse = lse.take().map(|lse| change(lse, &of)).transpose()?;
    }
    Ok(outputs)
}
