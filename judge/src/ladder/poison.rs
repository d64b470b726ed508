//! Poison: the contents of padding and slack rows of the inputs must not change one bit of a real row.
//!
//! A subject that sums gradients in any order gives other bits on every run. In its gradients, padding must not make
//! a NaN. The envelope sees any other change that padding makes in them, because it examines both runs of such a
//! subject.
//!
//! Whether padding is to blame, a third run tells: one with the first run's very inputs. Where it differs from the
//! first as well, the subject gives other bits on every run, and the finding says so. Elsewhere it says what mistake
//! explains the first run, if one does.

use super::compare::{ResultTensor, Worst, same_bits};
use super::hypotheses;
use super::structure::results;
use crate::finding::{Check, Finding, number};
use crate::identity::rerun;
use crate::ladder::evidence::{Evidence, Look};
use crate::subject::{RankOutputs, TensorName};
use crate::verdict::Margin;
use seamproof_oracle::sharding::RankLayout;

/// Asks whether the two runs of the evidence agree.
pub(super) fn look(evidence: &Evidence<'_>, _: &mut Margin) -> Look {
    let deterministic = evidence.backend.declaration().promises.deterministic_backward;
    let mut found = check(evidence.layout, evidence.first, evidence.second, deterministic);
    if let Some(finding) = &mut found {
        if matches!(rerun(evidence), Some(Look::Broken(_))) {
            finding.what = format!("{AGAIN}, or {}", finding.what);
        } else if let Some(mistake) = hypotheses::told(evidence) {
            finding.what = format!("{}; {mistake}", finding.what);
        }
    }
    found.into()
}

/// What is said of a subject whose results change without another padding.
const AGAIN: &str = "the same inputs once more give other bits, as in a race";

/// Returns the first tensor in which two runs with different poison differ.
fn check(
    layout: &RankLayout,
    first: &RankOutputs,
    second: &RankOutputs,
    deterministic: bool,
) -> Option<Finding> {
    results(first).into_iter().zip(results(second)).find_map(|((tensor, a), (_, b))| {
        if agree(layout, &a, &b) {
            return None;
        }
        let same: fn(f32, f32) -> bool = match deterministic || !is_gradient(tensor) {
            true => |a, b| a.to_bits() == b.to_bits(),
            false => |a, b| a.is_nan() == b.is_nan(),
        };
        let what = "a real row depends on what padding rows of the inputs hold";
        let mut worst = Worst::new(Check::Poison, tensor, what);
        a.real(layout, |row, head, place| {
            let lanes = a.lane(row, head).into_iter().zip(b.lane(row, head));
            for (lane, (&with, &without)) in lanes.enumerate() {
                worst.compared();
                if !same(with, without) {
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

fn is_gradient(tensor: TensorName) -> bool {
    matches!(tensor, TensorName::Dq | TensorName::Dk | TensorName::Dv | TensorName::Dsink)
}

/// Whether every real element has the same bits in both tensors; false where a tensor is not stored row by row.
fn agree(layout: &RankLayout, a: &ResultTensor<'_, f32>, b: &ResultTensor<'_, f32>) -> bool {
    let (Some(first), Some(second)) = (a.flat(), b.flat()) else { return false };
    a.every_stretch(layout, |at| same_bits(&first[at.clone()], &second[at]))
}
