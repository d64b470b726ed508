//! Poison: what padding and slack rows of the inputs hold must not change one bit of a real row.
//!
//! The gradients of a subject that does not promise the same bits for the same inputs
//! ([`Promises::deterministic_backward`](crate::backend::Promises)) are compared in whether they are finite: what is not
//! finite and enters a sum shows so under one of the poisons. A finite number that enters one is left to the envelope, as is
//! everything else about such sums.

use super::compare::{View, Worst, same_bits};
use super::structure::results;
use super::{Evidence, Look};
use crate::backend::{RankOutputs, TensorName};
use crate::layout::RankLayout;
use crate::verdict::{Check, Finding, Margin, number};

/// What two runs must have in common in a tensor's real elements.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Common {
    /// Every bit.
    Bits,
    /// Whether they are finite.
    Finiteness,
}

impl Common {
    fn of(tensor: TensorName, has_fixed_gradients: bool) -> Common {
        use TensorName::{Dk, Dq, Dsink, Dv};
        match tensor {
            Dq | Dk | Dv | Dsink if !has_fixed_gradients => Common::Finiteness,
            _ => Common::Bits,
        }
    }

    fn holds(self, a: f32, b: f32) -> bool {
        match self {
            Common::Bits => a.to_bits() == b.to_bits(),
            Common::Finiteness => a.is_finite() == b.is_finite(),
        }
    }
}

/// The rung.
pub(super) fn look(evidence: &Evidence<'_>, _: &mut Margin) -> Look {
    let has_fixed_gradients = evidence.backend.promises().deterministic_backward;
    check(evidence.layout, evidence.first, evidence.second, has_fixed_gradients).into()
}

/// The first tensor in which two runs with different poison differ.
fn check(
    layout: &RankLayout,
    first: &RankOutputs,
    second: &RankOutputs,
    has_fixed_gradients: bool,
) -> Option<Finding> {
    results(first).into_iter().zip(results(second)).find_map(|((tensor, a), (_, b))| {
        let common = Common::of(tensor, has_fixed_gradients);
        if common == Common::Bits && agree(layout, &a, &b) {
            return None;
        }
        let what = "a real row depends on what padding rows of the inputs hold";
        let mut worst = Worst::new(Check::Poison, tensor, what);
        a.real(layout, |row, head, place| {
            let lanes = a.lane(row, head).into_iter().zip(b.lane(row, head));
            for (lane, (&with, &without)) in lanes.enumerate() {
                worst.compared();
                if !common.holds(with, without) {
                    worst.failed(0.0, |finding| {
                        finding.place = a.lane_place(place, lane);
                        finding.got = Some(number(with));
                        finding.expected = Some(format!("{} as under other poison", number(without)));
                    });
                }
            }
        });
        worst.finding()
    })
}

/// Whether every real element has the same bits in both; not known of tensors that are not stored row by row.
fn agree(layout: &RankLayout, a: &View<'_, f32>, b: &View<'_, f32>) -> bool {
    let (Some(first), Some(second)) = (a.flat(), b.flat()) else { return false };
    a.every_stretch(layout, |at| same_bits(&first[at.clone()], &second[at]))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use seamproof_oracle::{InputMode, Inputs, Pass, Problem};
    use seamproof_simulator::is_unwritten;

    use super::*;
    use crate::backend::{Backend, Outputs, Promises, RunError, Wrapper};
    use crate::backends::Emulated;
    use crate::generate::{self, Draw, Limits};
    use crate::judge::judge;
    use crate::verdict::Verdict;

    /// The emulated kernel, whose dq comes out otherwise in every second run.
    struct Unsteady {
        inner: Emulated,
        promises: Promises,
        other: fn(f32) -> f32,
        runs: AtomicUsize,
    }

    impl Wrapper for Unsteady {
        fn inner(&self) -> &dyn Backend {
            &self.inner
        }

        fn promises(&self) -> Promises {
            self.promises
        }

        fn run(&self, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
            let mut outputs = self.inner.run(problem, inputs)?;
            if self.runs.fetch_add(1, Ordering::Relaxed) % 2 == 1 {
                let gradients = outputs.ranks.iter_mut().filter_map(|rank| rank.gradients.as_mut());
                let other = |x: f32| if x == 0.0 || is_unwritten(x) { x } else { (self.other)(x) };
                gradients.for_each(|gradients| gradients.dq.mapv_inplace(other));
            }
            Ok(outputs)
        }
    }

    /// Judges of problems whose dq is not zero, with the subject made anew for each.
    fn verdicts(promises: Promises, other: fn(f32) -> f32) -> Vec<Verdict> {
        let problems = (0..).filter_map(|index| match generate::draw(9, index, &Limits::quick()) {
            Draw::Problem(problem) => Some(problem),
            Draw::Malformed(_) => None,
        });
        let judged = |problem: &Problem| {
            problem.pass == Pass::Backward
                && problem.mode == InputMode::Flat
                && problem.pairs() > 8
                && Emulated::default().capabilities().refusal(problem).is_none()
        };
        let subject = || Unsteady { inner: Emulated::default(), promises, other, runs: AtomicUsize::new(0) };
        problems.filter(judged).take(12).map(|problem| judge(&subject(), &problem)).collect()
    }

    fn is_of_poison(verdict: &Verdict) -> bool {
        matches!(verdict, Verdict::Finding(finding) if finding.check == Check::Poison)
    }

    #[test]
    fn bits_of_gradients_may_differ_where_they_are_not_promised() {
        let open = Promises { deterministic_backward: false, ..Promises::ALL };
        let next = |x: f32| f32::from_bits(x.to_bits() + 1);
        for verdict in verdicts(open, next) {
            assert!(matches!(verdict, Verdict::Pass(_)), "{verdict:?}");
        }
        assert!(verdicts(Promises::ALL, next).iter().all(is_of_poison), "promised bits differ");
        assert!(verdicts(open, |_| f32::NAN).iter().all(is_of_poison), "a NaN is no order of sums");
    }
}
