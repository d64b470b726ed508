//! Error maps: how far each row and head lies from the exact answer, for whoever wants to see where a result is wrong.
//!
//! A map holds what the envelope's tier W compares, before it is folded into one margin or one finding. Nothing is
//! decided here.

use seamproof_oracle::Problem;
use seamproof_oracle::blocked;
use seamproof_oracle::envelope::Model;

use super::bounds::{
    BACKWARD, Comparison, FORWARD, MeasureRatios, Triple, forward_views, gradient_views, saved,
};
use super::envelope::backward_of;
use super::evidence::{Depth, Evidence, Judge, Meter};
use crate::finding::Place;
use crate::subject::{Backend, TensorName};
use crate::verdict::Verdict;

/// The lane of a row and head that lies furthest from its exact value, by error ÷ bound.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WorstLane {
    /// Place of the element. A statistic of a row has no lane, and one of a head no row.
    pub place: Place,
    /// Value of the subject.
    pub got: f64,
    /// Exact value.
    pub exact: f64,
    /// Largest honest error of tier W.
    pub bound: f64,
    /// Error ÷ bound: 0 for equal values, infinite for NaN and for an error where none is allowed.
    pub ratio: f64,
}

/// The worst lane of every real row and head of a tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct ErrorMap {
    /// The tensor.
    pub tensor: TensorName,
    /// Worst lanes, by sequence, position and head.
    pub rows: Vec<WorstLane>,
}

impl ErrorMap {
    /// Returns the worst of all elements; `None` of a tensor without real rows.
    pub fn worst(&self) -> Option<&WorstLane> {
        // The first of several that are as bad, as in a finding.
        self.rows.iter().rev().max_by(|a, b| a.ratio.total_cmp(&b.ratio))
    }

    /// Returns the rows whose worst element lies past its bound.
    pub fn past(&self) -> impl Iterator<Item = &WorstLane> {
        self.rows.iter().filter(|row| row.ratio > 1.0)
    }

    /// Whether a tensor is among these and lies past its bound somewhere.
    pub fn is_past(maps: &[ErrorMap], tensor: TensorName) -> bool {
        maps.iter().any(|map| map.tensor == tensor && map.past().next().is_some())
    }
}

impl Judge {
    /// Runs a subject, and returns the errors of its results. There are none of gradients where a result of the forward
    /// is past its bound, since the backward is judged on what the forward returned. `Err` is a verdict that leaves
    /// nothing to compare.
    pub fn error_maps(&self, backend: &dyn Backend, problem: &Problem) -> Result<Vec<ErrorMap>, Verdict> {
        self.with_evidence(backend, problem, Depth::First, &Meter::default(), maps)
    }
}

pub(super) fn maps(evidence: &Evidence<'_>) -> Vec<ErrorMap> {
    let Evidence { backend, problem, layout, inputs, first, .. } = *evidence;
    if !evidence.has_oracle() {
        return Vec::new();
    }
    let model = Model::new(problem, backend.declaration().arithmetic, evidence.partition());
    let forward = evidence.oracle(|| blocked::forward(problem, inputs, Some(&model)));
    let Some(bound) = &forward.bound else { return Vec::new() };
    let compare = Comparison { problem, layout, ratio: evidence.judge.ratio };
    let of_forward = FORWARD.into_iter().filter_map(|tensor| {
        Some(compare.map(tensor, forward_views(tensor, first, &forward.exact, &bound.worst)?))
    });
    let mut maps: Vec<ErrorMap> = of_forward.collect();
    let is_broken = maps.iter().any(|map| map.rows.iter().any(|row| row.ratio > 1.0));
    let Some(gradients) = first.gradients.as_ref().filter(|_| !is_broken) else { return maps };
    let saved = saved(first, &forward.exact.lse);
    let backward = backward_of(evidence, &model, &forward, &saved);
    let Some(bound) = &backward.bound else { return maps };
    let of_backward = BACKWARD
        .into_iter()
        .map(|tensor| compare.map(tensor, gradient_views(tensor, gradients, &backward.exact, &bound.worst)));
    maps.extend(of_backward);
    maps
}

impl Comparison<'_> {
    /// Returns the worst lane of every real row and head.
    fn map(&self, tensor: TensorName, (got, exact, bound): Triple<'_>) -> ErrorMap {
        let (ratio, overflows): (MeasureRatios, _) = (self.ratio, self.overflows(tensor));
        let mut rows = Vec::new();
        got.real(self.layout, |row, head, place| {
            let right = exact.lane(row, head).into_iter().zip(bound.lane(row, head));
            let lanes = got.lane(row, head).into_iter().zip(right).enumerate();
            let measured = lanes.map(|(lane, (&value, (&exact, &bound)))| {
                let mut measured = [0.0];
                ratio(&[value], &[exact], &[bound], overflows, &mut measured);
                let place = got.lane_place(place, lane);
                WorstLane { place, got: f64::from(value), exact, bound, ratio: measured[0] }
            });
            // A NaN has an infinite ratio, so that no ratio is one.
            rows.extend(measured.reduce(|worst, lane| if lane.ratio > worst.ratio { lane } else { worst }));
        });
        ErrorMap { tensor, rows }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::Check;
    use crate::subjects::{Emulated, Planted};
    use crate::verdict::Tier;
    use seamproof_oracle::{Mask, Pass, ProblemFields};
    use seamproof_simulator::faults::WINDOW_OFF_BY_ONE;

    fn problem(mask: Mask) -> Problem {
        let fields = ProblemFields { mask, ..ProblemFields::padded(&[(7, 9), (0, 4), (5, 5)], 8) };
        Problem::new(fields).unwrap()
    }

    /// Test that a map's worst ratio is the margin that the judge tells, tensor by tensor.
    #[test]
    fn the_worst_of_a_map_is_the_margin() {
        let (problem, backend) = (problem(Mask::CAUSAL), Emulated::default());
        let Verdict::Pass(margin) = super::super::judge(&backend, &problem) else { panic!("it holds") };
        let maps = Judge::default().error_maps(&backend, &problem).unwrap();
        let told = margin.tier(Tier::W).named();
        assert_eq!(problem.pass, Pass::Backward);
        for map in &maps {
            let (_, ratio) = told.iter().find(|(tensor, _)| *tensor == map.tensor).unwrap();
            assert_eq!(map.worst().map_or(0.0, |worst| worst.ratio), *ratio, "{}", map.tensor);
        }
        let rows = |name| maps.iter().find(|map| map.tensor == name).unwrap().rows.len();
        let heads = problem.heads;
        assert_eq!(rows(TensorName::Out), problem.tokens() * heads.q);
        assert_eq!(rows(TensorName::Dk), (7 + 5) * heads.kv);
    }

    /// Test that the worst element of a broken forward is the one that the finding names, and that gradients of it are
    /// not told.
    #[test]
    fn a_broken_forward_has_its_finding_in_the_map() {
        let problem = problem(Mask { left: Some(2), ..Mask::CAUSAL });
        let backend = Planted::canary(Emulated::default(), WINDOW_OFF_BY_ONE.entry());
        let Verdict::Finding(finding) = super::super::judge(&backend, &problem) else {
            panic!("it is caught")
        };
        assert_eq!((finding.check, finding.tensor), (Check::Envelope, Some(TensorName::Lse)));
        let maps = Judge::default().error_maps(&backend, &problem).unwrap();
        assert_eq!(maps.iter().map(|map| map.tensor).collect::<Vec<_>>(), FORWARD);
        let worst = maps[0].worst().unwrap();
        assert_eq!((worst.place, Some(worst.ratio)), (finding.place, finding.ratio));
        assert_eq!(maps[0].rows.iter().filter(|row| row.ratio > 1.0).count(), finding.failed);
    }
}
