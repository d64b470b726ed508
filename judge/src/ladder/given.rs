//! Mistakes with the descales of what a kernel quantises itself, where a problem gives them: a scale or a descale that is
//! not applied, or that of another result. Each makes a result a multiple of the right one, in the numbers of its format.

use seamproof_oracle::{Inputs, Problem, Quantity, Stored, TensorName};

use super::hypotheses::short;

/// Relative error that a factor adds: a few operations in f32.
const EDIT_ERROR: f64 = 1.0 / (1 << 20) as f64;

/// A result that is a multiple of the right one.
#[derive(Clone, Copy, Debug)]
pub(super) struct Multiple {
    pub(super) factor: f64,
    /// The numbers of the right result, and those of the multiple.
    stored: [Stored; 2],
}

impl Multiple {
    /// Returns the multiple of a result that has a given scale; `None` of any other.
    pub(super) fn of_code(
        problem: &Problem,
        inputs: &Inputs,
        tensor: TensorName,
        factor: f64,
    ) -> Option<Multiple> {
        Quantity::of(tensor).filter(|quantity| quantity.is_given(&problem.precision))?;
        let stored = inputs.scales.stored(problem, tensor);
        Some(Multiple { factor, stored: [stored; 2] })
    }

    /// Returns what becomes of an element, and its bound. A right element at the end of its range may stand for any number
    /// past it.
    pub(super) fn element(&self, exact: f64, bound: f64) -> [f64; 2] {
        let [right, stored] = self.stored;
        let value = stored.saturated(exact * self.factor);
        let farthest = if right.is_saturated(exact) { stored.most().copysign(value) } else { value };
        let middle = (value + farthest) / 2.0;
        let before = (farthest - middle).abs() + self.factor.abs() * bound + EDIT_ERROR * value.abs();
        [middle, before + stored.half_spacing(middle.abs() + before)]
    }

    /// Whether an element of the right result tells the factor: the multiple is out of its bound, and neither is cut off.
    pub(super) fn is_told_by(&self, exact: f64, bound: f64) -> bool {
        let [right, stored] = self.stored;
        let value = exact * self.factor;
        let is_cut = right.is_saturated(exact) || stored.is_saturated(stored.saturated(value));
        (value - exact).abs() > bound && !is_cut
    }
}

/// Returns the multiples that mistakes with given descales make of a result, with the words for each.
pub(super) fn mistakes(problem: &Problem, inputs: &Inputs, tensor: TensorName) -> Vec<(Multiple, String)> {
    let Some(own) = Quantity::of(tensor) else { return Vec::new() };
    let descale = |quantity: Quantity| {
        let is_given = quantity.is_given(&problem.precision);
        is_given.then(|| f64::from(inputs.scales.own.of(quantity)))
    };
    let mut all = Vec::new();
    let mut add = |factor: f64, words: String, of_codes: bool| {
        let multiple = Multiple::of_code(problem, inputs, tensor, factor);
        if let Some(mut multiple) = multiple.filter(|_| factor != 1.0) {
            if of_codes {
                multiple.stored[1].descale = 1.0;
            }
            all.push((multiple, format!("{words} (× {} everywhere)", short(factor))));
        }
    };
    for quantity in made_of(own) {
        if let Some(descale) = descale(quantity) {
            add(1.0 / descale, format!("{tensor} lacked the descale of {}", quantity.name()), false);
            add(descale, format!("{tensor} lacked the scale of {}", quantity.name()), false);
        }
    }
    if let Some(of_own) = descale(own) {
        add(of_own, format!("{tensor} lacked its scale"), false);
        add(1.0 / of_own, format!("{tensor} held its codes, without their descale"), true);
        let gradients = [Quantity::Dq, Quantity::Dk, Quantity::Dv];
        for other in gradients.into_iter().filter(|other| gradients.contains(&own) && *other != own) {
            if let Some(of_other) = descale(other) {
                add(of_own / of_other, format!("{tensor} had the scale of {}", other.name()), false);
            }
        }
    }
    all
}

/// Returns the quantities whose codes are in the sums of a result.
fn made_of(result: Quantity) -> Vec<Quantity> {
    match result {
        Quantity::Out | Quantity::Dv => vec![Quantity::P],
        Quantity::Dq | Quantity::Dk => vec![Quantity::Ds],
        Quantity::P | Quantity::Ds => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use seamproof_oracle::Format;

    use super::*;

    #[test]
    fn a_multiple_is_cut_to_its_range_and_rounded_to_its_codes() {
        let stored = Stored { format: Format::E4m3, descale: 0.5, through: None };
        let multiple = Multiple { factor: 4.0, stored: [stored; 2] };
        let [value, bound] = multiple.element(3.0, 0.125);
        assert_eq!(value, 12.0);
        assert!((0.5 + 0.5..0.5 + 0.6).contains(&bound), "{bound}");
        // 224 is the largest number of both.
        assert_eq!(multiple.element(100.0, 0.0)[0], 224.0);
        assert!(multiple.is_told_by(3.0, 8.9) && !multiple.is_told_by(3.0, 9.0));
        assert!(!multiple.is_told_by(100.0, 0.0));
        // What was cut may have been anything past the range.
        let less = Multiple { factor: 0.25, stored: [stored; 2] };
        let [value, bound] = less.element(-224.0, 0.0);
        assert!(value - bound <= -224.0 && value + bound >= -56.0, "{value} ± {bound}");
        assert!(!less.is_told_by(-224.0, 0.0));
    }
}
