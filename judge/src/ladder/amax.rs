//! Amaxes: the largest magnitudes of what a subject has quantised, as far as it shows them, are within the ranges of right
//! ones. A row that is not real has no part in them.

use seamproof_oracle::amax::{AmaxOracle, Amaxes, Range};
use seamproof_oracle::{ForwardResults, Quantity, TensorName};

use super::bounds::saved;
use super::compare::Worst;
use super::evidence::{Evidence, Look};
use crate::finding::{Check, Place};

/// Examines the amaxes of a forward, and those of a backward at the out and LSE that the subject returned.
pub(super) fn look(evidence: &Evidence<'_>, exact: &ForwardResults) -> Look {
    let Evidence { backend, problem, inputs, first, .. } = *evidence;
    if first.amax.is_empty() {
        return Look::Held;
    }
    let arithmetic = backend.declaration().arithmetic;
    let oracle = match AmaxOracle::new(problem, inputs, arithmetic, evidence.partition()) {
        Ok(oracle) => oracle,
        Err(error) => return Look::Failed(format!("results that nothing rounds are no problem: {error}")),
    };
    let mut ranges = evidence.oracle(|| oracle.forward());
    if first.gradients.is_some() && first.lse.is_some() {
        let saved = saved(first, &exact.lse);
        ranges.extend(evidence.oracle(|| oracle.backward(&saved)));
    }
    let mut found = ranges.into_iter().filter_map(|(quantity, range)| compared(&first.amax, quantity, range));
    found.next().and_then(Worst::finding).into()
}

/// Returns what is wrong with the amax of a quantity; `None` where it is right, or not shown.
fn compared(told: &Amaxes, quantity: Quantity, Range { exact, least, most }: Range) -> Option<Worst> {
    let got = f64::from(told.of(quantity)?);
    // The largest of numbers in f32 has the rounding of none.
    if (least..=most).contains(&got) {
        return None;
    }
    let bound = (most - exact).max(exact - least);
    let what = format!("the amax of {} is not that of the real rows", quantity.name());
    let mut worst = Worst::new(Check::Envelope, tensor(quantity), &what);
    worst.compared();
    let ratio =
        if got.is_nan() { f64::INFINITY } else { ((got - exact).abs() / bound).max(1.0 + f64::EPSILON) };
    worst.past_bound(Place::default(), ratio, [got, exact], Some(bound));
    Some(worst)
}

/// Returns the result that a finding about an amax names.
fn tensor(quantity: Quantity) -> TensorName {
    match quantity {
        Quantity::P => TensorName::Lse,
        Quantity::Out => TensorName::Out,
        Quantity::Dq | Quantity::Ds => TensorName::Dq,
        Quantity::Dk => TensorName::Dk,
        Quantity::Dv => TensorName::Dv,
    }
}
