//! The verdict on a large run: its rows, element by element, and its laws.

use ndarray::ArrayD;
use seamproof_oracle::envelope::{Extremes, Model, RowEnvelope, RowSums};
use seamproof_oracle::{Format, Pass, Problem, Sink, TensorName};

use super::answer::{Answer, AnswerError, Named};
use super::rows::{Question, Reach};
use super::run::{Run, place_in};
use super::{exactly, laws};
use crate::finding::{Check, Finding, Place};
use crate::ladder::bounds::{error_ratios, wording};
use crate::ladder::compare::Worst;
use crate::ladder::runs::capability_verdict;
use crate::ladder::structure::guard_finding;
use crate::subject::RunError;
use crate::verdict::{Margin, Tier, Verdict};

/// Words for results that are no number.
const NO_NUMBER: &str = "a result is no number, though every input is an ordinary one";

/// Judgement of a large run.
#[derive(Clone, Debug)]
pub struct Judged {
    /// The first finding.
    pub finding: Option<Finding>,
    /// The largest error ÷ bound of each tensor, in tier W.
    pub margin: Margin,
    /// Number of rows times heads that were judged, queries and keys.
    pub rows: [usize; 2],
    /// Number of elements whose bound is infinite: nothing is known of them.
    pub unbounded: usize,
    /// Whether dk was judged row by row.
    pub has_dk: bool,
    /// Number of elements that are known bit for bit, and were compared with that.
    pub exact: usize,
}

/// Judges an answer.
pub fn judge(
    problem: &Problem,
    model: &Model,
    question: &Question,
    answer: &Answer,
) -> Result<Judged, AnswerError> {
    let run = Run { problem, model, question, answer };
    let mut tally = Tally::new(problem);
    let queries = tally.queries(run)?;
    let keys = tally.keys(run)?;
    let found =
        match changed(answer).or(no_number(run)?).or_else(|| answer.head.damage.first().map(guard_finding)) {
            Some(finding) => Some(finding),
            None => exactly::wrong(problem, answer)?,
        };
    let found = found.or_else(|| tally.worst.into_iter().find_map(Worst::finding));
    let finding = match found {
        Some(finding) => Some(finding),
        None => laws::broken(run)?,
    };
    Ok(Judged {
        finding,
        margin: tally.margin,
        rows: [queries, keys],
        unbounded: tally.unbounded,
        has_dk: keys > 0 && !model.weighs_dots(),
        exact: answer.head.exact.values().fold(0, |all, each| all.saturating_add(each.compared)),
    })
}

/// Returns the verdict on a run without an answer.
pub fn silence(error: RunError) -> Verdict {
    capability_verdict(Err(error), None)
}

/// Results that are compared, in the order in which they are reported. The LSE is the sharpest observable of mask and
/// scale.
const TENSORS: [TensorName; 5] =
    [TensorName::Lse, TensorName::Out, TensorName::Dv, TensorName::Dk, TensorName::Dq];

struct Tally {
    worst: [Worst; TENSORS.len()],
    margin: Margin,
    unbounded: usize,
    out: Format,
    gradients: Format,
}

impl Tally {
    fn new(problem: &Problem) -> Tally {
        Tally {
            worst: TENSORS.map(|tensor| Worst::new(Check::Envelope, tensor, wording(Tier::W))),
            margin: Margin::default(),
            unbounded: 0,
            out: problem.precision.out.format,
            gradients: problem.precision.gradients.format,
        }
    }

    /// Compares one element.
    fn compare(&mut self, tensor: TensorName, place: Place, [got, exact, bound]: [f64; 3]) {
        let format = match tensor {
            TensorName::Lse => None,
            TensorName::Out => Some(self.out),
            _ => Some(self.gradients),
        };
        let mut ratio = [0.0];
        error_ratios(&[got as f32], &[exact], &[bound], format, &mut ratio);
        let [ratio] = ratio;
        self.unbounded += usize::from(bound == f64::INFINITY);
        if let Some(margin) = self.margin.worst_case.of_mut(tensor) {
            *margin = margin.max(ratio);
        }
        let Some(at) = TENSORS.iter().position(|other| *other == tensor) else { return };
        self.worst[at].compared();
        if ratio > 1.0 {
            let bound = bound.is_finite().then_some(bound);
            self.worst[at].past_bound(place, ratio, [got, exact], bound);
        }
    }

    /// Compares the rows of queries, and returns their number times heads.
    fn queries(&mut self, run: Run<'_>) -> Result<usize, AnswerError> {
        let Run { problem, question, answer, .. } = run;
        let [reaches, _] = &question.reaches;
        let (rows, heads) = (reaches.len(), problem.heads.q);
        let asked = |numbers: usize| [Some(rows), Some(heads), None, Some(numbers)];
        let statistics = answer.named("query statistics", "query", [rows, heads])?;
        let (Some(statistics), Some(out)) = (statistics, answer.array("query out", &asked(4))?) else {
            return missing("rows of queries", rows);
        };
        let dq = answer.array("query dq", &asked(6))?;
        for (row, reach) in reaches.iter().enumerate() {
            for head in 0..heads {
                let at = At { row, head, reach };
                self.forward(run, &statistics, &at, out);
                if let Some(dq) = dq {
                    self.dq(run, &statistics, &at, dq);
                }
            }
        }
        Ok(rows * heads)
    }

    fn forward(&mut self, run: Run<'_>, statistics: &Named<'_>, at: &At<'_>, out: &ArrayD<f64>) {
        let of = |name: &str| statistics.get(at.row, at.head, name);
        let [sum, a] = [of("sum"), of("a")];
        let keys = at.reach.others.len();
        let none = keys == 0;
        let sums = RowSums {
            keys,
            largest: if none { f64::NEG_INFINITY } else { of("largest") },
            smallest: if none { f64::INFINITY } else { of("smallest") },
            sum,
            sum_a: sum * a,
            largest_a: a,
            sink: sink(run.problem, statistics, at),
            value_max: of("value"),
        };
        let envelope = RowEnvelope::new(run.model, &sums);
        let lse = of("lse");
        if statistics.has("lse") {
            let (exact, bound) = envelope.lse();
            self.compare(TensorName::Lse, at.place(None), [lse, exact, bound]);
        }
        for lane in 0..out.shape()[2] {
            let [number, numerator, magnitudes, got] = at.numbers(out, lane);
            let (exact, bound) = envelope.out(numerator, magnitudes);
            self.compare(TensorName::Out, at.place(Some(number)), [got, exact, bound]);
        }
    }

    fn dq(&mut self, run: Run<'_>, statistics: &Named<'_>, at: &At<'_>, dq: &ArrayD<f64>) {
        let (problem, model) = (run.problem, run.model);
        let of = |name: &str| statistics.get(at.row, at.head, name);
        let keys = at.reach.others.len();
        let [lse, largest, smallest, b] = ["lse", "largest", "smallest", "b"].map(of);
        let far = |from: f64| (largest - from).abs().max((smallest - from).abs());
        let mut extremes = Extremes {
            logit: far(0.0),
            lse: lse.abs(),
            distance: far(lse),
            a: of("a"),
            b,
            x: b,
            d_error: 0.0,
        };
        let stored_error = model.out_dot_error(of("terms"), of("l1") * model.last_rounding(of("out")));
        let dots_error = model.dots_error(&extremes, keys, [of("dots_abs"), of("mass")]);
        let (d, d_error) = model.row_delta((of("d"), stored_error), Some((of("dots"), dots_error)));
        (extremes.x, extremes.d_error) = (b + d.abs(), d_error);
        let sums = model.gradient_sums(problem.group(), keys);
        let majorant = model.gradient_majorants(&extremes, sums).dq;
        for lane in 0..dq.shape()[2] {
            let [number, exact, px, p, one, got] = at.numbers(dq, lane);
            let errors = majorant.of([px, p, one]);
            self.compare(
                TensorName::Dq,
                at.place(Some(number)),
                [got, exact, bound((model, TensorName::Dq), exact, errors, keys)],
            );
        }
    }

    /// Compares the rows of keys, and returns their number times heads.
    fn keys(&mut self, run: Run<'_>) -> Result<usize, AnswerError> {
        let Run { problem, model, question, answer } = run;
        let [_, reaches] = &question.reaches;
        let (rows, heads) = (reaches.len(), problem.heads.kv);
        let asked = |numbers: usize| [Some(rows), Some(heads), None, Some(numbers)];
        let statistics = answer.named("key statistics", "key", [rows, heads])?;
        let (Some(statistics), Some(dv), Some(dk)) =
            (statistics, answer.array("key dv", &asked(5))?, answer.array("key dk", &asked(6))?)
        else {
            // Without an LSE there is nothing that the gradients of a row could be made of.
            let names = answer.head.names.get("query");
            let has_lse = names.is_some_and(|names| names.iter().any(|name| name == "lse"));
            let asked = problem.pass == Pass::Backward && has_lse;
            return missing("rows of keys", if asked { rows } else { 0 });
        };
        for (row, reach) in reaches.iter().enumerate() {
            for head in 0..heads {
                let at = At { row, head, reach };
                let of = |name: &str| statistics.get(row, head, name);
                let pairs = of("pairs") as usize;
                let logit = f64::from(problem.softmax.scale) * of("a");
                let extremes = Extremes {
                    logit,
                    lse: of("lse"),
                    distance: logit + of("lse"),
                    a: of("a"),
                    b: of("b"),
                    x: of("b") + of("d"),
                    d_error: model.out_dot_error(of("terms"), of("l1") * model.last_rounding(of("out"))),
                };
                let majorants = model.gradient_majorants(&extremes, model.gradient_sums(pairs, 1));
                for lane in 0..dv.shape()[2] {
                    let [number, exact, p, one, got] = at.numbers(dv, lane);
                    let bound = bound((model, TensorName::Dv), exact, majorants.dv.of([0.0, p, one]), pairs);
                    self.compare(TensorName::Dv, at.place(Some(number)), [got, exact, bound]);
                }
                // A D of Σ P·dP would take all keys of every query.
                for lane in 0..if model.weighs_dots() { 0 } else { dk.shape()[2] } {
                    let [number, exact, px, p, one, got] = at.numbers(dk, lane);
                    let bound = bound((model, TensorName::Dk), exact, majorants.dk.of([px, p, one]), pairs);
                    self.compare(TensorName::Dk, at.place(Some(number)), [got, exact, bound]);
                }
            }
        }
        Ok(rows * heads)
    }
}

/// Returns the bound of an element of a gradient; 0 where nothing is summed.
fn bound((model, gradient): (&Model, TensorName), exact: f64, errors: f64, terms: usize) -> f64 {
    match errors {
        0.0 | f64::INFINITY => errors,
        _ => model.gradient_row(gradient, terms).bound(exact, errors),
    }
}

fn missing(what: &str, rows: usize) -> Result<usize, AnswerError> {
    match rows {
        0 => Ok(0),
        _ => Err(AnswerError(format!("the answer has no {what}"))),
    }
}

/// A row of an answer and a head.
struct At<'a> {
    row: usize,
    head: usize,
    reach: &'a Reach,
}

impl At<'_> {
    fn place(&self, lane: Option<f64>) -> Place {
        Place {
            sequence: Some(self.reach.sequence),
            head: Some(self.head),
            row: Some(self.reach.position),
            lane: lane.map(|lane| lane as usize),
        }
    }

    fn numbers<const N: usize>(&self, array: &ArrayD<f64>, lane: usize) -> [f64; N] {
        std::array::from_fn(|number| array[[self.row, self.head, lane, number]])
    }
}

/// Returns the sink of a row, where there is one.
fn sink(problem: &Problem, statistics: &Named<'_>, at: &At<'_>) -> Option<f64> {
    match problem.softmax.sink {
        Sink::None => None,
        Sink::OffByOne => Some(0.0),
        Sink::Learnable => Some(statistics.get(at.row, at.head, "sink")),
    }
}

/// Returns the finding about results that are no number.
fn no_number(run: Run<'_>) -> Result<Option<Finding>, AnswerError> {
    let all = &run.answer.head.no_numbers;
    let found = TENSORS.iter().find_map(|tensor| Some((*tensor, all.get(&tensor.to_string())?)));
    let Some((tensor, numbers)) = found else { return Ok(None) };
    let Some((&count, place)) = numbers.split_first() else {
        return Err(AnswerError(format!("the place of a number in {tensor}")));
    };
    // A statistic's heads come before its rows.
    let place = match (tensor, place) {
        (TensorName::Lse, &[head, row]) => vec![row, head],
        (_, place) => place.to_vec(),
    };
    let place = place_in(run.problem, tensor, &place)?;
    let finding = Finding::new(Check::Envelope, Some(tensor), NO_NUMBER.to_owned());
    Ok(Some(Finding { place, failed: count, compared: count, ..finding }))
}

/// Returns the finding about an input that the subject wrote to. It comes first, since all others go by the inputs.
fn changed(answer: &Answer) -> Option<Finding> {
    let &tensor = answer.head.changed.first()?;
    let what = format!("the kernel changed its input {tensor}");
    Some(Finding::new(Check::Structure, Some(tensor), what))
}
