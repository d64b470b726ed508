//! Comparison of the results of two runs of one problem, in every element, padding rows included.

use std::borrow::Cow;

use ndarray::{Array, Dimension};
use seamproof_oracle::Quantity;

use crate::subject::{Outputs, RankOutputs};

/// Returns the first difference between the results of a subject and its twin, in words. Zeros of either sign are
/// equal, and so are all NaN.
pub fn difference(got: &Outputs, want: &Outputs) -> Option<String> {
    first(got, want, |got, want| got == want || (got.is_nan() && want.is_nan()))
}

/// Whether two results agree in every bit.
pub fn same_bits(a: &Outputs, b: &Outputs) -> bool {
    first(a, b, |a, b| a.to_bits() == b.to_bits()).is_none()
}

fn first(got: &Outputs, want: &Outputs, same: fn(f32, f32) -> bool) -> Option<String> {
    if got.damage != want.damage {
        let bands = |outputs: &Outputs| {
            let told = outputs.damage.iter().map(|damage| format!("{} {}", damage.tensor, damage.elements));
            told.collect::<Vec<_>>().join(", ")
        };
        return Some(format!("guard bands damaged: [{}], the twin's: [{}]", bands(got), bands(want)));
    }
    if got.changed != want.changed {
        let inputs = |outputs: &Outputs| {
            let told =
                outputs.changed.iter().map(|changed| format!("{} {}", changed.tensor, changed.elements));
            told.collect::<Vec<_>>().join(", ")
        };
        return Some(format!("inputs changed: [{}], the twin's: [{}]", inputs(got), inputs(want)));
    }
    if got.ranks.len() != want.ranks.len() {
        return Some(format!("{} ranks, the twin has {}", got.ranks.len(), want.ranks.len()));
    }
    let pairs = got.ranks.iter().zip(&want.ranks).enumerate();
    pairs
        .into_iter()
        .find_map(|(rank, (got, want))| of_rank(got, want, same).map(|what| format!("rank {rank}, {what}")))
}

fn of_rank(got: &RankOutputs, want: &RankOutputs, same: fn(f32, f32) -> bool) -> Option<String> {
    let (got, want) = (tensors(got), tensors(want));
    let shapes = |tensors: &[(&'static str, Cow<'_, [f32]>)]| -> Vec<(&'static str, usize)> {
        tensors.iter().map(|(name, values)| (*name, values.len())).collect()
    };
    if shapes(&got) != shapes(&want) {
        return Some(format!("elements {:?}, the twin has {:?}", shapes(&got), shapes(&want)));
    }
    got.iter().zip(&want).find_map(|((name, got), (_, want))| {
        let differs = |(got, want): (&f32, &f32)| !same(*got, *want);
        let place = got.iter().zip(want.iter()).position(differs)?;
        let count = got.iter().zip(want.iter()).filter(|(got, want)| differs((*got, *want))).count();
        let (got, want) = (got[place], want[place]);
        Some(format!("{name}[{place}]: {got:e}, the twin has {want:e}; {count} differ"))
    })
}

/// Returns a rank's results, by name.
fn tensors(rank: &RankOutputs) -> Vec<(&'static str, Cow<'_, [f32]>)> {
    let mut all = vec![("out", values(&rank.out))];
    all.extend(rank.lse.iter().map(|lse| ("lse", values(lse))));
    all.extend(rank.max_logit.iter().map(|largest| ("max_logit", values(largest))));
    if let Some(gradients) = &rank.gradients {
        all.push(("dq", values(&gradients.dq)));
        all.push(("dk", values(&gradients.dk)));
        all.push(("dv", values(&gradients.dv)));
        all.push(("dsink", values(&gradients.dsink)));
    }
    let amaxes: Vec<f32> = Quantity::ALL.into_iter().filter_map(|of| rank.amax.of(of)).collect();
    all.push(("amax", amaxes.into()));
    all
}

/// Returns the elements in logical order. They are copied only where memory has another order.
fn values<D: Dimension>(tensor: &Array<f32, D>) -> Cow<'_, [f32]> {
    tensor.as_slice().map_or_else(|| Cow::Owned(tensor.iter().copied().collect()), Cow::Borrowed)
}

#[cfg(test)]
mod tests {
    use ndarray::{Array2, Array3};
    use seamproof_oracle::amax::Amaxes;

    use super::*;

    fn outputs(value: f32, lse: Option<f32>) -> Outputs {
        let rank = RankOutputs {
            out: Array3::from_elem((1, 1, 2), value),
            lse: lse.map(|lse| Array2::from_elem((1, 1), lse)),
            max_logit: None,
            gradients: None,
            amax: Amaxes::default(),
        };
        rank.into()
    }

    #[test]
    fn values_differ_less_often_than_bits() {
        let (zero, negative) = (outputs(0.0, Some(1.0)), outputs(-0.0, Some(1.0)));
        assert!(difference(&zero, &negative).is_none() && !same_bits(&zero, &negative));
        assert!(
            same_bits(&zero, &zero)
                && difference(&outputs(f32::NAN, None), &outputs(-f32::NAN, None)).is_none()
        );
        let said = difference(&zero, &outputs(0.0, Some(2.0))).expect("another LSE");
        assert_eq!(said, "rank 0, lse[0]: 1e0, the twin has 2e0; 1 differ");
        assert!(difference(&zero, &outputs(0.0, None)).is_some(), "a tensor less");
        assert!(difference(&zero, &Outputs { ranks: Vec::new(), ..zero.clone() }).is_some(), "a rank less");
    }
}
