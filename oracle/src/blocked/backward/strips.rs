//! Errors of a tile's weights and logit gradients.
//!
//! A *strip* has a number for each row and key of a tile. Noise of roundings counts as noise where the sums that it goes
//! to are certified ([`Certificate`]), and in full elsewhere.

use multiversion::multiversion;
use ndarray::{Array2, ArrayView1, ArrayView2, Axis};

use super::tiles::{QueryTile, Statistics, Stretch};
use crate::Softmax;
use crate::envelope::dither::{Spread, fill_enough, shared_share};
use crate::envelope::{GradientPair, Model, NumericProfile, Rounding};

/// Errors of a tile's weights and logit gradients, for dv, dk and dq each.
pub(super) struct BoundStrips {
    /// The errors that add up.
    pub(super) linear: [Array2<f64>; 3],
    /// Roundings that are noise; no columns where there is none.
    pub(super) rounding: [Array2<f64>; 3],
    /// Whether there is any noise.
    pub(super) is_dithered: bool,
}

/// The certified sums over a tile.
pub(super) struct Certificate {
    /// Whether the sum over keys is certified, for each row.
    pub(super) rows: Vec<bool>,
    /// Whether the sum over queries is certified, for each column.
    pub(super) columns: Vec<bool>,
}

/// `g` of the sums that the pairs of one row take part in ([`Model::query_sum`], [`Model::key_sum`]).
#[derive(Clone, Copy)]
pub(super) struct RowSums<'a> {
    /// Those over queries, of each visible key; none where they are not wanted.
    pub(super) by_query: &'a [f64],
    /// That over keys.
    pub(super) by_key: f64,
}

impl RowSums<'_> {
    fn of(&self, column: usize) -> (f64, f64) {
        (self.by_query.get(column).copied().unwrap_or(0.0), self.by_key)
    }
}

/// The pairs of one stretch, apart from what its strips hold.
pub(super) struct Pairs<'a> {
    pub(super) softmax: &'a Softmax,
    pub(super) row: Statistics,
    /// The logits and `dP − D`.
    pub(super) kept: &'a [(f64, f64)],
}

impl Pairs<'_> {
    /// Returns the pair of a column: its weight is `p`, and its products have magnitudes that sum to `a` and `b`.
    #[inline(always)]
    pub(super) fn at(&self, column: usize, p: f64, [a, b]: [f64; 2]) -> GradientPair {
        let Statistics { lse, lse_error, d_error, ds_most, .. } = self.row;
        let (logit, x) = self.kept[column];
        let derivative = self.softmax.cap_derivative(logit);
        GradientPair { logit, lse, lse_error, p, x, derivative, a, b, d_error, ds_most }
    }
}

/// Turns the magnitudes of one stretch into errors. On entry, the strips of dv and dk hold the magnitudes of `⟨q, k⟩` and
/// of `⟨dout, v⟩`.
#[multiversion(targets("x86_64+avx2+fma"))]
pub(super) fn bound_stretch(
    model: &Model,
    pairs: &Pairs<'_>,
    sums: RowSums<'_>,
    stretch: &Stretch,
    p: &[f64],
    certificate: &Certificate,
    strips: &mut BoundStrips,
) {
    let row = certificate.rows[stretch.local];
    let columns = &certificate.columns[stretch.visible.clone()];
    let [dv, dk, dq] = strips.linear.each_mut().map(|strip| stretch.of(strip));
    if !strips.is_dithered {
        for column in 0..p.len() {
            let pair = pairs.at(column, p[column], [dv[column], dk[column]]);
            let error = model.gradient_pair(&pair, sums.of(column));
            dv[column] = error.dv + error.p.most;
            dk[column] = error.dk + error.ds.most;
            dq[column] = error.dq + error.ds.most;
        }
        return;
    }
    let [dv_rounding, dk_rounding, dq_rounding] = strips.rounding.each_mut().map(|strip| stretch.of(strip));
    let split = |linear: f64, Rounding { most, is_noise }: Rounding, certified: bool| {
        if is_noise && certified { (linear, most) } else { (linear + most, 0.0) }
    };
    for column in 0..p.len() {
        let pair = pairs.at(column, p[column], [dv[column], dk[column]]);
        let error = model.gradient_pair(&pair, sums.of(column));
        (dv[column], dv_rounding[column]) = split(error.dv, error.p, columns[column]);
        (dk[column], dk_rounding[column]) = split(error.dk, error.ds, columns[column]);
        (dq[column], dq_rounding[column]) = split(error.dq, error.ds, row);
    }
}

/// Replays one stretch: rounds its weights and logit gradients, and turns magnitudes into the errors that are left. On
/// entry, the strips of dv and dk hold what those of [`bound_stretch`] do.
#[multiversion(targets("x86_64+avx2+fma"))]
pub(super) fn replay_stretch(
    model: &Model,
    profile: &NumericProfile,
    pairs: &Pairs<'_>,
    sums: RowSums<'_>,
    stretch: &Stretch,
    of_row: [&mut Array2<f64>; 2],
    strips: &mut BoundStrips,
) {
    let [dv, dk, dq] = strips.linear.each_mut().map(|strip| stretch.of(strip));
    let [p, ds] = of_row.map(|strip| stretch.of(strip));
    for column in 0..p.len() {
        let pair = pairs.at(column, p[column], [dv[column], dk[column]]);
        let replayed = model.replayed_gradient_pair(profile, &pair, sums.of(column));
        (p[column], ds[column]) = (replayed.p, replayed.ds);
        (dv[column], dk[column], dq[column]) = (replayed.dv, replayed.dk, replayed.dq);
    }
}

/// Returns the squares of a matrix's elements, each row times its number of copies. A row counts once where copies were
/// not counted.
pub(super) fn squares(factor: &ArrayView2<'_, f64>, copies: &[f64]) -> Array2<f64> {
    assert!(copies.is_empty() || copies.len() == factor.nrows(), "a count for each row, or none at all");
    let mut squares = factor.mapv(|x| x * x);
    for (mut row, copies) in squares.outer_iter_mut().zip(copies) {
        row *= *copies;
    }
    squares
}

/// The most rows, or columns, of a tile whose weights are compared with each other.
const SAMPLES: usize = 8;

impl Certificate {
    /// Returns the certificate of a tile. Spread is measured for every sum. Weights that are alike are alike
    /// everywhere, by a law of the data and not of one row: the mean over samples is compared with the limit. Copies of
    /// one query or key are counted one by one elsewhere.
    pub(super) fn new(
        tile: &QueryTile,
        seen: &[Stretch],
        kept: &[Vec<(f64, f64)>],
        p: &Array2<f64>,
    ) -> Certificate {
        let mut columns = vec![Spread::default(); p.ncols()];
        let mut rows = vec![Spread::default(); p.nrows()];
        for (Stretch { local, visible }, kept) in seen.iter().zip(kept) {
            let lse = tile.statistics[*local].lse;
            for (column, (logit, _)) in visible.clone().zip(kept) {
                columns[column].add(logit - lse);
                rows[*local].add(*logit);
            }
        }
        let fill = |axis: Axis| {
            let step = p.len_of(axis).div_ceil(SAMPLES).max(1);
            let seen = |line: ArrayView1<'_, f64>| line.iter().copied().filter(|p| *p != 0.0).collect();
            let lines: Vec<Vec<f64>> = p.axis_iter(axis).step_by(step).map(seen).collect();
            let shares = lines.iter().filter(|line| !line.is_empty()).map(|line| shared_share(line));
            let (count, sum) = shares.fold((0.0, 0.0), |(count, sum), share| (count + 1.0, sum + share));
            fill_enough(sum / count)
        };
        let certified = |sums: &[Spread], axis: Axis| {
            let wide: Vec<bool> = sums.iter().map(Spread::is_wide).collect();
            if wide.contains(&true) && fill(axis) { wide } else { vec![false; sums.len()] }
        };
        Certificate { rows: certified(&rows, Axis(0)), columns: certified(&columns, Axis(1)) }
    }
}

impl BoundStrips {
    /// Returns strips of magnitudes, which become errors row by row.
    pub(super) fn new([a, b]: [Array2<f64>; 2], certificate: &Certificate) -> BoundStrips {
        let is_dithered = certificate.rows.contains(&true) || certificate.columns.contains(&true);
        let zeros = || Array2::zeros(a.raw_dim());
        let noise = || if is_dithered { zeros() } else { Array2::zeros((a.nrows(), 0)) };
        let (rounding, c) = ([noise(), noise(), noise()], zeros());
        BoundStrips { rounding, linear: [a, b, c], is_dithered }
    }
}
