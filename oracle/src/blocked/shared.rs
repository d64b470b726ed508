//! Gradients of keys that sequences share: the sums over the sequences, and their bounds.
//!
//! A group knows its own sequence alone, and leaves what a borrower adds to a lent row in the borrower's hole. A
//! subject adds the sequences' gradients in the format of its partial sums, or in f32, and rounds the sum once.

use std::collections::BTreeMap;

use ndarray::Array3;

use super::answer::Answer;
use crate::envelope::Model;
use crate::{Gradients, Problem, TensorName};

/// Sums dk and dv of shared keys into the lent rows. Holes are left with zeros, and with bounds of 0.
pub(super) fn sum(problem: &Problem, model: Option<&Model>, answer: &mut Answer<Gradients>) {
    let mut holes: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    problem.lent_rows().for_each(|(lent, hole)| holes.entry(lent).or_default().push(hole));
    if let Some((model, bound)) = model.zip(answer.bound.as_mut()) {
        for tier in [&mut bound.worst, &mut bound.dithered] {
            for (&lent, holes) in &holes {
                sum_bounds((model, TensorName::Dk), &answer.exact.dk, &mut tier.dk, (lent, holes));
                sum_bounds((model, TensorName::Dv), &answer.exact.dv, &mut tier.dv, (lent, holes));
            }
        }
    }
    problem.sum_shared(&mut answer.exact);
}

/// Gives a lent row the bound of its sum, from the bounds and the exact gradients of each sequence that has it.
fn sum_bounds(
    (model, gradient): (&Model, TensorName),
    exact: &Array3<f64>,
    bound: &mut Array3<f64>,
    (lent, holes): (usize, &[usize]),
) {
    let (_, heads, lanes) = exact.dim();
    for (head, lane) in (0..heads).flat_map(|head| (0..lanes).map(move |lane| (head, lane))) {
        let (mut total, mut magnitudes, mut errors) = (0.0, 0.0, 0.0);
        for &row in holes.iter().chain([&lent]) {
            let at = [row, head, lane];
            total += exact[at];
            magnitudes += exact[at].abs() + bound[at];
            errors += std::mem::take(&mut bound[at]);
        }
        bound[[lent, head, lane]] = model.shared_bound(gradient, total, (errors, magnitudes), holes.len());
    }
}
