//! Comparison of the real rows of a result, and the collector of the worst element.
//!
//! Nearly every tensor holds, so each check examines *stretches* first: real elements that follow each other in
//! memory, compared as slices. Only where something does not hold, the elements are visited one by one for the
//! finding.

use std::borrow::Cow;
use std::ops::Range;

use ndarray::{Array3, ArrayView1, ArrayView2, ArrayView3, Axis, s};
use seamproof_oracle::{Run, Side, TensorName};

use crate::finding::{Check, Finding, Place, Relation, number};
use seamproof_oracle::sharding::{RankLayout, SideLayout};

/// A result tensor, in any of the shapes that results have.
#[derive(Clone, Copy)]
pub(crate) enum ResultTensor<'a, T> {
    /// Tensor `[rows, heads, dim]` on one side of the problem.
    Rows(ArrayView3<'a, T>, Side),
    /// Statistic `[heads, rows]` on the query side.
    Statistic(ArrayView2<'a, T>),
    /// Statistic `[heads]`.
    Heads(ArrayView1<'a, T>),
}

impl<'a, T: Copy> ResultTensor<'a, T> {
    /// Returns the side whose rows the tensor has.
    pub(crate) fn side(&self) -> Side {
        if let ResultTensor::Rows(_, side) = self { *side } else { Side::Q }
    }

    /// Returns the rows of a layout that the tensor has.
    fn rows_of<'l>(&self, layout: &'l RankLayout) -> &'l SideLayout {
        match self {
            ResultTensor::Rows(_, side) => layout.side(*side),
            ResultTensor::Statistic(_) | ResultTensor::Heads(_) => layout.statistics_rows(),
        }
    }

    /// Returns the number of heads, and the number of lanes of a row.
    pub(crate) fn extent(&self) -> (usize, usize) {
        match self {
            ResultTensor::Rows(array, _) => (array.shape()[1], array.shape()[2]),
            ResultTensor::Statistic(array) => (array.shape()[0], 1),
            ResultTensor::Heads(array) => (array.len(), 1),
        }
    }

    /// Returns all lanes of a row and head. A view of heads has one row.
    pub(crate) fn lane(&self, row: usize, head: usize) -> ArrayView1<'a, T> {
        match *self {
            ResultTensor::Rows(array, _) => {
                array.index_axis_move(Axis(0), row).index_axis_move(Axis(0), head)
            }
            ResultTensor::Statistic(array) => array.index_axis_move(Axis(0), head).slice_move(s![row..=row]),
            ResultTensor::Heads(array) => array.slice_move(s![head..=head]),
        }
    }

    /// Calls `visit(row, head, place)` for every real row and head of a layout. [`ResultTensor::lane`] gives the lanes.
    pub(crate) fn real(&self, layout: &RankLayout, mut visit: impl FnMut(usize, usize, Place)) {
        let (heads, _) = self.extent();
        let first = if let ResultTensor::Rows(..) = self { 0 } else { layout.statistics_heads(heads).start };
        if let ResultTensor::Heads(_) = self {
            for head in 0..heads {
                visit(0, head, Place { head: Some(first + head), ..Place::default() });
            }
            return;
        }
        for placed in &self.rows_of(layout).runs {
            for (i, row) in placed.local.real_rows().enumerate() {
                for head in 0..heads {
                    let place = Place {
                        sequence: Some(placed.sequence),
                        head: Some(first + head),
                        row: Some(placed.piece.start + i * placed.piece.step),
                        lane: None,
                    };
                    visit(row, head, place);
                }
            }
        }
    }

    /// Returns all elements in order, where the tensor is stored in that order.
    pub(crate) fn flat(&self) -> Option<&'a [T]> {
        match self {
            ResultTensor::Rows(array, _) => array.to_slice(),
            ResultTensor::Statistic(array) => array.to_slice(),
            ResultTensor::Heads(array) => array.to_slice(),
        }
    }

    /// Whether every stretch of a layout holds. Stretches are ranges of [`ResultTensor::flat`].
    pub(crate) fn every_stretch(
        &self,
        layout: &RankLayout,
        mut holds: impl FnMut(Range<usize>) -> bool,
    ) -> bool {
        let mut runs = self.rows_of(layout).runs.iter().flat_map(|placed| blocks(&placed.local));
        match self {
            ResultTensor::Heads(array) => holds(0..array.len()),
            ResultTensor::Rows(array, _) => {
                let row = array.shape()[1] * array.shape()[2];
                runs.all(|rows| holds(rows.start * row..rows.end * row))
            }
            ResultTensor::Statistic(array) => {
                let rows = array.shape()[1];
                runs.all(|run| {
                    (0..array.shape()[0]).all(|head| holds(head * rows + run.start..head * rows + run.end))
                })
            }
        }
    }

    /// Whether every element of a row holds. A view of heads has no such elements.
    pub(crate) fn every_of_row(&self, row: usize, holds: impl Fn(T) -> bool) -> bool {
        let every = |all: bool, value: &T| all & holds(*value);
        match self {
            ResultTensor::Rows(array, _) => {
                let row = array.index_axis(Axis(0), row);
                // The comparison of a slice compiles to vector code.
                match row.to_slice() {
                    Some(row) => row.iter().fold(true, every),
                    None => row.iter().fold(true, every),
                }
            }
            ResultTensor::Statistic(array) => array.column(row).iter().fold(true, every),
            ResultTensor::Heads(_) => true,
        }
    }

    /// Returns the place of a lane, where lanes mean anything.
    pub(crate) fn lane_place(&self, place: Place, lane: usize) -> Place {
        if let ResultTensor::Rows(..) = self { Place { lane: Some(lane), ..place } } else { place }
    }
}

/// Returns the lanes of a row and head: a slice of the tensor where it is stored row by row, otherwise a copy. Nearly
/// all subjects store it so.
#[inline]
pub(crate) fn lanes<T: Clone>(tensor: &Array3<T>, row: usize, head: usize) -> Cow<'_, [T]> {
    let [_, heads, dim] = tensor.dim().into();
    match tensor.as_slice() {
        Some(all) => Cow::Borrowed(&all[(row * heads + head) * dim..][..dim]),
        None => Cow::Owned(tensor.slice(s![row, head, ..]).to_vec()),
    }
}

/// Returns the real rows of a run, as ranges of rows that follow each other.
pub(crate) fn blocks(run: &Run) -> impl Iterator<Item = Range<usize>> + use<> {
    let run = *run;
    let (count, size) = if run.step == 1 { (run.len.min(1), run.len) } else { (run.len, 1) };
    (0..count).map(move |i| run.row(i)..run.row(i) + size)
}

/// Returns the ratio of an error to its bound. A NaN counts as further off than anything, and so does any error where
/// none is allowed. A comparison that NaN slips through is bug 210 of the field (cubecl 1070).
#[inline(always)]
pub(crate) fn times_bound(error: f64, bound: f64) -> f64 {
    let ratio = error / bound;
    if ratio.is_nan() { f64::INFINITY } else { ratio }
}

/// Whether two slices hold the same bits.
pub(crate) fn same_bits(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0, |apart, (a, b)| apart | (a.to_bits() ^ b.to_bits())) == 0
}

/// Collector that counts elements and keeps the worst failing one.
pub struct Worst {
    finding: Finding,
    rank: f64,
}

impl Worst {
    /// Returns a collector that has seen nothing.
    pub fn new(check: Check, tensor: TensorName, what: &str) -> Worst {
        let finding = Finding::new(check, Some(tensor), what.into());
        Worst { finding, rank: f64::NEG_INFINITY }
    }

    /// Returns an empty collector of what breaks a relation.
    pub(crate) fn of_relation(relation: Relation, tensor: TensorName, what: &str) -> Worst {
        let mut worst = Worst::new(Check::Identity, tensor, what);
        worst.finding.identity = Some(relation);
        worst
    }

    /// Counts one element that was compared.
    pub fn compared(&mut self) {
        self.finding.compared += 1;
    }

    /// Counts elements that were compared and hold.
    pub fn held(&mut self, elements: usize) {
        self.finding.compared += elements;
    }

    /// Counts a failing element. The one of the highest `rank` is reported, and the first of equal ones.
    pub fn failed(&mut self, rank: f64, describe: impl FnOnce(&mut Finding)) {
        self.finding.failed += 1;
        if self.finding.failed == 1 || rank > self.rank {
            self.rank = rank;
            describe(&mut self.finding);
        }
    }

    /// Counts an element that is `ratio` times its bound off. The largest ratio is the worst.
    pub fn past_bound(&mut self, place: Place, ratio: f64, [got, expected]: [f64; 2], bound: Option<f64>) {
        self.failed(ratio, |finding| {
            finding.place = place;
            finding.got = Some(number(got));
            finding.expected = Some(number(expected));
            finding.bound = bound;
            finding.ratio = ratio.is_finite().then_some(ratio);
        });
    }

    /// Returns the numbers of elements that failed and that were compared.
    pub(crate) fn counts(&self) -> [usize; 2] {
        [self.finding.failed, self.finding.compared]
    }

    /// Returns the finding, if anything failed.
    pub fn finding(self) -> Option<Finding> {
        (self.finding.failed > 0).then_some(self.finding)
    }
}
