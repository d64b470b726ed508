//! Accuracy: what each choice of FP8 costs, and whether the judge sees it in a kernel that does not declare it.
//!
//! The *error* of a result is the root mean square of its errors over all elements of real rows, relative to that of the
//! exact result; each sequence counts alike. There are two tables. In that of [`codes`], q, k and v are rounded to codes,
//! and attention on them is exact. In those of [`arithmetic`], codes are given, and the emulated kernel computes on them:
//! its error holds nothing of what was lost when codes were made.

pub mod arithmetic;
pub mod codes;

use std::io::{self, Write};

use seamproof_oracle::Problem;

use crate::power::tensors::Tensors;

/// Number of results that have an error: out, dq, dk and dv.
const RESULTS: usize = 4;

/// Plan of a measurement.
#[derive(Clone, Copy, Debug)]
pub struct AccuracyPlan {
    /// Number of problems for each figure.
    pub cases: usize,
    /// Seed of the first problem.
    pub seed: u64,
}

/// Errors of out, dq, dk and dv; 0 for what a pass does not have.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Errors(pub [f64; RESULTS]);

impl Errors {
    /// Returns the errors over several problems, of the results of each and the exact ones.
    pub fn of<'a>(cases: impl IntoIterator<Item = (&'a Problem, &'a Tensors, &'a Tensors)>) -> Errors {
        let (mut sums, mut count) = ([0.0; RESULTS], 0.0);
        for (problem, got, exact) in cases {
            let mut squares = vec![[[0.0; 2]; RESULTS]; problem.sequences.len()];
            got.each(exact, problem, |[tensor, sequence], got, right| {
                let [error, size] = &mut squares[sequence][tensor];
                *error += (got - right).powi(2);
                *size += right.powi(2);
            });
            for of_sequence in squares {
                let relative = of_sequence.map(|[error, size]| if size > 0.0 { error / size } else { 0.0 });
                sums.iter_mut().zip(relative).for_each(|(sum, relative)| *sum += relative);
                count += 1.0;
            }
        }
        Errors(sums.map(|sum: f64| (sum / f64::max(count, 1.0)).sqrt()))
    }
}

/// Prints the tables, each row as soon as it is measured; `begin` is told of each row before.
pub fn print(plan: &AccuracyPlan, to: &mut dyn Write, begin: &mut dyn FnMut(&str)) -> io::Result<()> {
    let AccuracyPlan { cases, seed } = plan;
    writeln!(
        to,
        "Root mean squares of errors, divided by those of exact results; {cases} of each kind of problem, seed {seed}.\n\
         docs/fp8-seen.md explains the words.\n"
    )?;
    writeln!(to, "Codes of q, k and v; attention on them is exact\n")?;
    codes::print(plan, to, begin)?;
    writeln!(to, "\nArithmetic of a forward on given codes\n")?;
    arithmetic::FORWARD.print(plan, to, begin)?;
    writeln!(to, "\nArithmetic of a backward on given codes\n")?;
    arithmetic::BACKWARD.print(plan, to, begin)
}

/// Returns an error in per cent, with two digits that count.
fn per_cent(error: f64) -> String {
    let per_cent = 100.0 * error;
    let digits = (1.0 - libm::floor(libm::log10(per_cent.max(1e-3)))).max(0.0) as usize;
    format!("{per_cent:.digits$} %")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_digits_count() {
        let told = [0.0, 0.000_123_4, 0.012_34, 0.1234, 0.678, 1.5].map(per_cent);
        assert_eq!(told, ["0.0000 %", "0.012 %", "1.2 %", "12 %", "68 %", "150 %"]);
    }
}
