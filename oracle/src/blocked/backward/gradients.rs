//! Gradients of a group and of its pieces, with the sums that make their bounds.

use std::ops::Range;

use ndarray::{Array2, Axis, Zip, s};

use super::super::answer::Tiers;
use super::super::pieces::{Group, QueryRange, Sides};
use crate::envelope::Model;
use crate::{Gradients, Problem, TensorName};

/// Gradients, or their bounds, of one group.
pub(in crate::blocked) struct GroupGradients {
    /// dq of each piece, in the order of [`Group::pieces`].
    pub(super) dq: Vec<(QueryRange, Array2<f64>)>,
    pub(super) dk: Array2<f64>,
    pub(super) dv: Array2<f64>,
}

/// The bounds of a group's gradients.
pub(in crate::blocked) struct GroupBounds {
    worst: GroupGradients,
    /// Those of tier T; `None` where nothing is dithered.
    dithered: Option<GroupGradients>,
}

impl GroupBounds {
    /// Writes the bounds of the group's rows to their places in the results.
    pub(in crate::blocked) fn store(&self, group: &Group<'_>, to: &mut Tiers<Gradients>) {
        self.worst.store(group, &mut to.worst);
        match &self.dithered {
            Some(dithered) => dithered.store(group, &mut to.dithered),
            None => self.worst.fill(group, &mut to.dithered, f64::INFINITY),
        }
    }
}

impl GroupGradients {
    /// Writes a number to the places of the group's rows in the results.
    fn fill(&self, group: &Group<'_>, to: &mut Gradients, value: f64) {
        for (piece, _) in self.dq.iter().filter(|(_, dq)| !dq.is_empty()) {
            let mut of_head = to.dq.index_axis_mut(Axis(1), piece.head);
            piece.rows.clone().for_each(|query| of_head.row_mut(group.q.place(query)).fill(value));
        }
        for (from, to) in [(&self.dk, &mut to.dk), (&self.dv, &mut to.dv)] {
            let mut of_head = to.index_axis_mut(Axis(1), group.kv_head);
            (0..from.nrows()).for_each(|key| of_head.row_mut(group.kv.place(key)).fill(value));
        }
    }

    /// Returns gradients of the same shapes that are 0.
    fn zeros(&self) -> GroupGradients {
        let zeros = |gradient: &Array2<f64>| Array2::zeros(gradient.raw_dim());
        GroupGradients {
            dq: self.dq.iter().map(|(piece, dq)| (piece.clone(), zeros(dq))).collect(),
            dk: zeros(&self.dk),
            dv: zeros(&self.dv),
        }
    }

    /// Writes the group's rows to their places in the results.
    pub(in crate::blocked) fn store(&self, group: &Group<'_>, to: &mut Gradients) {
        let dims = group.problem.dims;
        assert_gradient("dk", &self.dk, (group.kv.len(), dims.qk));
        assert_gradient("dv", &self.dv, (group.kv.len(), dims.v));
        for (piece, dq) in &self.dq {
            assert_gradient("dq", dq, (piece.rows.len(), dims.qk));
            let mut of_head = to.dq.index_axis_mut(Axis(1), piece.head);
            for (query, dq) in piece.rows.clone().zip(dq.outer_iter()) {
                of_head.row_mut(group.q.place(query)).assign(&dq);
            }
        }
        for (from, to) in [(&self.dk, &mut to.dk), (&self.dv, &mut to.dv)] {
            let mut of_head = to.index_axis_mut(Axis(1), group.kv_head);
            for (key, from) in from.outer_iter().enumerate() {
                of_head.row_mut(group.kv.place(key)).assign(&from);
            }
        }
    }
}

/// Asserts that a gradient has the shape of its rows, or no rows, as on a side that is not wanted. Without the check, a
/// gradient with fewer rows would be stored in part, and a single column would be repeated, both without an error.
fn assert_gradient(name: &str, gradient: &Array2<f64>, shape: (usize, usize)) {
    let (rows, columns) = gradient.dim();
    let is_unwanted = (rows, columns) == (0, shape.1);
    assert!(is_unwanted || (rows, columns) == shape, "shape of {name}: {rows} × {columns}, not {shape:?}");
}

/// The sums that make a group's bounds: coefficients times magnitudes.
pub(super) struct Errors<T> {
    /// The errors that add up.
    pub(super) linear: T,
    /// Roundings of P and dS that are noise; `None` where there is none.
    pub(super) dithered: Option<Dithered<T>>,
}

/// Sums of roundings that are noise.
pub(super) struct Dithered<T> {
    /// Their magnitudes, added up.
    pub(super) rounding: T,
    /// The sum of the squares of eight standard deviations.
    pub(super) noise: T,
}

impl<T> Dithered<T> {
    pub(super) fn of(make: impl Fn() -> T) -> Dithered<T> {
        Dithered { rounding: make(), noise: make() }
    }
}

/// The gradients that one piece adds: its own dq, and partial sums of dk and dv for the keys that it sees.
pub(super) struct PieceGradients {
    pub(super) dq: Array2<f64>,
    pub(super) keys: Range<usize>,
    pub(super) dk: Array2<f64>,
    pub(super) dv: Array2<f64>,
}

impl PieceGradients {
    pub(super) fn new(problem: &Problem, sides: Sides, rows: usize, keys: Range<usize>) -> PieceGradients {
        let (rows, keys) = (if sides.q { rows } else { 0 }, if sides.kv { keys } else { 0..0 });
        PieceGradients {
            dq: Array2::zeros((rows, problem.dims.qk)),
            dk: Array2::zeros((keys.len(), problem.dims.qk)),
            dv: Array2::zeros((keys.len(), problem.dims.v)),
            keys,
        }
    }

    /// Returns gradients of the same shapes that are 0.
    pub(super) fn zeros(&self) -> PieceGradients {
        let zeros = |gradient: &Array2<f64>| Array2::zeros(gradient.raw_dim());
        PieceGradients {
            dq: zeros(&self.dq),
            keys: self.keys.clone(),
            dk: zeros(&self.dk),
            dv: zeros(&self.dv),
        }
    }
}

impl Errors<GroupGradients> {
    pub(super) fn add(&mut self, piece: &QueryRange, from: Errors<PieceGradients>) {
        if self.dithered.is_none() && from.dithered.is_some() {
            self.dithered = Some(Dithered::of(|| self.linear.zeros()));
        }
        if let Some(to) = &mut self.dithered {
            // Every piece has a dq of its own, one of zeros where it has no noise.
            let Dithered { rounding, noise } =
                from.dithered.unwrap_or_else(|| Dithered::of(|| from.linear.zeros()));
            to.rounding.add(piece, rounding);
            to.noise.add(piece, noise);
        }
        self.linear.add(piece, from.linear);
    }
}

impl GroupGradients {
    pub(super) fn add(&mut self, piece: &QueryRange, from: PieceGradients) {
        let mut dk = self.dk.slice_mut(s![from.keys.clone(), ..]);
        // A sum with a single row or column would repeat that row or column.
        assert_eq!(dk.dim(), from.dk.dim(), "shape of a piece's dk");
        dk += &from.dk;
        let mut dv = self.dv.slice_mut(s![from.keys, ..]);
        assert_eq!(dv.dim(), from.dv.dim(), "shape of a piece's dv");
        dv += &from.dv;
        self.dq.push((piece.clone(), from.dq));
    }

    /// Returns every matrix, in the same order for any gradients of one group.
    fn matrices(&mut self) -> impl Iterator<Item = &mut Array2<f64>> {
        [&mut self.dk, &mut self.dv].into_iter().chain(self.dq.iter_mut().map(|(_, dq)| dq))
    }
}

/// Turns summed errors into both tiers' bounds.
pub(super) fn bounds(
    group: &Group<'_>,
    model: &Model,
    exact: &GroupGradients,
    errors: Errors<GroupGradients>,
) -> GroupBounds {
    let Errors { linear: mut worst, dithered } = errors;
    let mut dithered = dithered.map(|Dithered { mut rounding, noise: mut dithered }| {
        let pieces = [&worst, &rounding, &dithered].map(|errors| errors.dq.len());
        assert_eq!(pieces, [exact.dq.len(); 3], "pieces with errors of dq");
        let sums = worst.matrices().zip(rounding.matrices()).zip(dithered.matrices());
        for ((linear, rounding), noise) in sums {
            Zip::from(noise).and(&mut *linear).and(&*rounding).for_each(|noise, linear, &rounding| {
                *noise = if rounding == 0.0 { f64::INFINITY } else { *linear + noise.sqrt().min(rounding) };
                *linear += rounding;
            });
        }
        dithered
    });
    for bound in [Some(&mut worst), dithered.as_mut()].into_iter().flatten() {
        finish_bounds(group, model, exact, bound);
    }
    GroupBounds { worst, dithered }
}

/// Adds underflow and the final rounding, which needs the whole sum.
fn finish_bounds(group: &Group<'_>, model: &Model, exact: &GroupGradients, bound: &mut GroupGradients) {
    use TensorName::{Dk, Dq, Dv};
    let finish =
        |name: TensorName, bound: &mut Array2<f64>, exact: &Array2<f64>, terms: &dyn Fn(usize) -> usize| {
            assert_eq!(bound.dim(), exact.dim(), "shape of a gradient's bounds");
            for (row, (mut bound, exact)) in bound.outer_iter_mut().zip(exact.outer_iter()).enumerate() {
                let of_row = model.gradient_row(name, terms(row));
                bound.zip_mut_with(&exact, |bound, exact| {
                    // Nothing widens an infinity.
                    if *bound != 0.0 && *bound != f64::INFINITY {
                        *bound = of_row.bound(*exact, *bound);
                    }
                });
            }
        };
    finish(Dk, &mut bound.dk, &exact.dk, &|key| group.queries_of(key));
    finish(Dv, &mut bound.dv, &exact.dv, &|key| group.queries_of(key));
    for ((piece, bound), (_, exact)) in bound.dq.iter_mut().zip(&exact.dq) {
        finish(Dq, bound, exact, &|row| group.keys_of(piece.rows.start + row));
    }
}
