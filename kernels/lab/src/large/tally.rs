//! Large forwards compared with their bounds, row by row.

use crate::reference::{Answers, Statistics};
use ndarray::Axis;
use rayon::prelude::*;
use seamproof_oracle::envelope::{DitherSums, RowEnvelope, RowSums};
use seamproof_oracle::{Format, Problem, TensorName};

use super::{Asked, Forward, JudgedRows, OfKeys};
use seamproof_judge::finding::{Check, Place};
use seamproof_judge::ladder::bounds::{error_ratios, wording};
use seamproof_judge::ladder::compare::Worst;
use seamproof_judge::verdict::{Margin, Tier};

/// The parts of a row that are compared, in the order in which they are reported. The LSE is the sharpest observable of
/// mask and scale.
const PARTS: [(TensorName, Tier); 4] = [
    (TensorName::Lse, Tier::W),
    (TensorName::Lse, Tier::T),
    (TensorName::Out, Tier::W),
    (TensorName::Out, Tier::T),
];

/// One element, compared with its bound.
#[derive(Clone, Copy, Debug, Default)]
struct Compared {
    got: f32,
    exact: f64,
    bound: f64,
    ratio: f64,
}

impl Compared {
    fn new(got: f32, exact: f64, bound: f64, overflows: Option<Format>) -> Compared {
        let mut ratio = [0.0];
        error_ratios(&[got], &[exact], &[bound], overflows, &mut ratio);
        Compared { got, exact, bound, ratio: ratio[0] }
    }
}

/// One of a row's [`PARTS`]: its worst element, and counts of its elements.
#[derive(Clone, Copy, Debug, Default)]
struct PartOfRow {
    worst: Compared,
    lane: usize,
    elements: usize,
    failed: usize,
    unbounded: usize,
}

impl PartOfRow {
    fn add(&mut self, lane: usize, compared: Compared) {
        self.elements += 1;
        self.unbounded += usize::from(compared.bound == f64::INFINITY);
        self.failed += usize::from(compared.ratio > 1.0);
        if compared.ratio > self.worst.ratio {
            (self.worst, self.lane) = (compared, lane);
        }
    }
}

/// The result of judging one row.
struct OfRow {
    parts: [PartOfRow; PARTS.len()],
    max_logit_error: f64,
}

/// The results of all rows.
pub(super) struct Tally {
    worst: [Worst; PARTS.len()],
    judged: JudgedRows,
    /// The largest logit of each head.
    largest: Vec<Largest>,
    /// The number of real rows of a head.
    real: usize,
}

/// The largest logit of some rows of a head.
#[derive(Clone, Copy, Debug)]
struct Largest {
    rows: usize,
    /// The exact largest logit.
    exact: f64,
    /// The largest error among the largest logits of these rows.
    error: f64,
    /// The exact largest logit of one row, and its error. The row is the one where the difference of the two is
    /// largest: the head's largest logit is no less than the difference.
    least: [f64; 2],
}

impl Default for Largest {
    fn default() -> Largest {
        let none = f64::NEG_INFINITY;
        Largest { rows: 0, exact: none, error: 0.0, least: [none, 0.0] }
    }
}

impl Largest {
    fn add(&mut self, exact: f64, error: f64) {
        self.rows += 1;
        self.exact = self.exact.max(exact);
        self.error = self.error.max(error);
        let [least, its_error] = self.least;
        if exact - error > least - its_error {
            self.least = [exact, error];
        }
    }

    /// Returns the comparison of a head's result, where the head has `rows` rows. Where all of them were judged, the
    /// result may be off by the error at most. Where some were not, the result must be no less than that of the judged
    /// ones, since it may be another row's. An infinite result is no row's.
    fn compared(&self, got: f32, rows: usize) -> Compared {
        let all = self.rows == rows;
        let [exact, error] = if all { [self.exact, self.error] } else { self.least };
        if !all && got.is_finite() && f64::from(got) > exact {
            return Compared { got, exact, bound: error, ratio: 0.0 };
        }
        Compared::new(got, exact, error, None)
    }
}

impl Tally {
    pub(super) fn new(problem: &Problem) -> Tally {
        let judged =
            JudgedRows { finding: None, margin: Margin::default(), rows: 0, unbounded: 0, reference_ms: 0.0 };
        Tally {
            worst: PARTS.map(|(tensor, tier)| Worst::new(Check::Envelope, tensor, wording(tier))),
            judged,
            largest: vec![Largest::default(); problem.heads.q],
            real: problem.sequences.iter().map(|sequence| sequence.q.len).sum(),
        }
    }

    pub(super) fn add(
        &mut self,
        forward: &Forward<'_>,
        asked: &[Asked],
        answers: &Answers,
        of_keys: &[Vec<OfKeys>],
    ) {
        let judge = |(index, asked)| judge_row(forward, asked, answers, index, of_keys);
        let rows: Vec<OfRow> = asked.par_iter().enumerate().map(judge).collect();
        self.judged.reference_ms += answers.ms;
        self.judged.rows += rows.len();
        for ((asked, row), statistics) in asked.iter().zip(&rows).zip(&answers.statistics) {
            for (index, (part, (tensor, tier))) in row.parts.iter().zip(PARTS).enumerate() {
                if let Some(margin) = self.judged.margin.tier_mut(tier).of_mut(tensor) {
                    *margin = margin.max(part.worst.ratio);
                }
                self.judged.unbounded += part.unbounded;
                let lane = (tensor == TensorName::Out).then_some(part.lane);
                count(&mut self.worst[index], part, asked.place(lane));
            }
            self.largest[asked.head].add(statistics.largest, row.max_logit_error);
        }
    }

    pub(super) fn finish(mut self, forward: &Forward<'_>) -> JudgedRows {
        let tensors = 1 + usize::from(forward.got.lse.is_some());
        let max_logit = forward.got.max_logit.as_ref();
        self.judged.margin.compared = tensors + usize::from(max_logit.is_some());
        let mut worst = Worst::new(Check::Envelope, TensorName::MaxLogit, wording(Tier::W));
        let heads = max_logit.into_iter().flat_map(|got| got.iter().zip(&self.largest));
        for (head, (&got, largest)) in heads.enumerate() {
            let mut part = PartOfRow::default();
            part.add(0, largest.compared(got, self.real));
            let margin = &mut self.judged.margin.worst_case.max_logit;
            *margin = margin.max(part.worst.ratio);
            count(&mut worst, &part, Place { head: Some(head), ..Place::default() });
        }
        let finding = self.worst.into_iter().chain([worst]).find_map(Worst::finding);
        JudgedRows { finding, ..self.judged }
    }
}

/// Counts a part's elements, the worst of which lies at `place`.
fn count(worst: &mut Worst, part: &PartOfRow, place: Place) {
    let Compared { got, exact, bound, ratio } = part.worst;
    worst.held(part.elements);
    for _ in 0..part.failed {
        worst.past_bound(place, ratio, [f64::from(got), exact], bound.is_finite().then_some(bound));
    }
}

/// Returns the envelope of a row, with tier T where the answers have the sums for tier T.
fn envelope<'a>(
    forward: &Forward<'a>,
    asked: &Asked,
    answers: &Answers,
    index: usize,
    of_keys: &[Vec<OfKeys>],
) -> RowEnvelope<'a> {
    let Forward { problem, inputs, model, .. } = *forward;
    let OfKeys { value_max, copies } = of_keys[asked.sequence][asked.head / problem.group()];
    let Statistics { keys, largest, smallest, sum, sum_a, largest_a } = answers.statistics[index];
    let sink = problem.sink(asked.head, &inputs.sink);
    let sums = RowSums { keys, largest, smallest, sum, sum_a, largest_a, sink, value_max };
    let envelope = RowEnvelope::new(model, &sums);
    let Some(dither) = &answers.dither else { return envelope };
    let dither = dither.statistics[index];
    envelope.with_dither(&DitherSums {
        sum: dither.sum,
        sum_squares: dither.sum_squares,
        shared: dither.shared,
        copies,
    })
}

fn judge_row(
    forward: &Forward<'_>,
    asked: &Asked,
    answers: &Answers,
    index: usize,
    of_keys: &[Vec<OfKeys>],
) -> OfRow {
    let Forward { problem, got, .. } = *forward;
    let envelope = envelope(forward, asked, answers, index, of_keys);
    let row = problem.sequences[asked.sequence].q.row(asked.i);
    let [mut lse, mut dithered_lse, mut out, mut dithered_out] = [PartOfRow::default(); PARTS.len()];

    if let Some(all) = &got.lse {
        let (got, (exact, bound)) = (all[[asked.head, row]], envelope.lse());
        lse.add(0, Compared::new(got, exact, bound, None));
        let bound = envelope.dithered_lse();
        if bound.is_finite() {
            dithered_lse.add(0, Compared::new(got, exact, bound, None));
        }
    }
    let format = Some(problem.precision.out.format);
    let lanes = got.out.index_axis(Axis(0), row).index_axis_move(Axis(0), asked.head);
    let squares = answers.dither.as_ref().map(|dither| &dither.squares);
    for (lane, &got) in lanes.iter().enumerate() {
        let at = index * answers.dim_v + lane;
        let (numerator, magnitudes) = (answers.out[at], answers.magnitudes[at]);
        let (exact, bound) = envelope.out(numerator, magnitudes);
        out.add(lane, Compared::new(got, exact, bound, format));
        let dithered = |squares: &Vec<f64>| envelope.dithered_out(numerator, magnitudes, squares[at]);
        let bound = squares.map_or(f64::INFINITY, dithered);
        if bound.is_finite() {
            dithered_out.add(lane, Compared::new(got, exact, bound, format));
        }
    }
    OfRow { parts: [lse, dithered_lse, out, dithered_out], max_logit_error: envelope.max_logit_error() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ratio(rows: &[(f64, f64)], got: f32, all: bool) -> f64 {
        let mut largest = Largest::default();
        rows.iter().for_each(|&(exact, error)| largest.add(exact, error));
        largest.compared(got, rows.len() + usize::from(!all)).ratio
    }

    #[test]
    fn a_largest_logit_is_that_of_all_rows_and_no_less_than_that_of_some() {
        let rows = [(1.0, 0.125), (3.0, 0.25), (2.0, 0.5)];
        for (got, of_all, of_some) in [
            (3.0, 0.0, 0.0),
            (2.75, 0.5, 1.0),
            (2.5, 1.0, 2.0),
            (2.25, 1.5, 3.0),
            (3.5, 1.0, 0.0),
            (9.0, 12.0, 0.0),
        ] {
            assert_eq!(ratio(&rows, got, true), of_all, "{got}");
            assert_eq!(ratio(&rows, got, false), of_some, "{got}");
        }
        for all in [true, false] {
            for got in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                assert_eq!(ratio(&rows, got, all), f64::INFINITY, "{got}");
            }
            assert_eq!(ratio(&[], f32::NEG_INFINITY, all), 0.0, "no key is seen");
        }
        assert_eq!(ratio(&[], 5.0, true), f64::INFINITY);
        assert_eq!(ratio(&[], 5.0, false), 0.0, "other rows may see keys");
        // The row with the larger logit may be the one whose error is larger.
        assert_eq!(ratio(&[(3.0, 2.0), (2.5, 0.25)], 2.0, false), 2.0);
        assert_eq!(ratio(&[(f64::NEG_INFINITY, 0.0), (1.0, 0.0)], 0.5, false), f64::INFINITY);
    }
}
