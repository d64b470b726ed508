//! The laws of one run, from whole sums of each sequence and KV head: Euler's and that of mass
//! ([`crate::identity`]'s `laws` state both, and their bounds).
//!
//! Problems with a sink are not asked, since the bounds here leave it out.
//!
//! Here the errors of all queries of a sequence are bounded at once. Norms are the largest of the sequence, a logit is
//! at most `scale·|q||k|`, and the errors of a query's weights add up to `c·(1 + λ)`, where c is the coefficient of p
//! in the pair's error ([`Majorant`](seamproof_oracle::envelope::Majorant)) and λ the bound of its LSE.

use seamproof_oracle::envelope::{Extremes, Majorant, RowEnvelope, RowSums};
use seamproof_oracle::{Format, Sink, TensorName};

use super::answer::{AnswerError, Named};
use super::run::Run;
use crate::finding::{Check, Finding, Place, Relation, number};

/// Relative loss of the sums, in f64 and of products whose magnitudes are rounded up in f32.
const SLACK: f64 = 1.0 / (1 << 12) as f64;

/// One side of a law: a sum of products of inputs with results.
struct Dot {
    value: f64,
    /// Sum of the products' magnitudes.
    terms: f64,
    /// Sum of the inputs' magnitudes.
    inputs: f64,
}

impl Dot {
    /// Returns the most by which the results' own roundings move the sum. Operations of a result lose `floor` at most.
    fn rounding(&self, format: Format, floor: f64) -> f64 {
        1.01 * (format.unit_roundoff() * self.terms + (format.tiny_half() + floor) * self.inputs)
    }
}

/// Bounds of all queries of a sequence and KV head.
struct Bounds {
    /// Bound of an LSE, and the error of a row's mass that follows.
    mass: f64,
    /// Bound of an element of out.
    out: f64,
    dv: Majorant,
    dk: Majorant,
    /// The largest number of keys that a query sees.
    keys: usize,
}

/// Returns the first law that is broken.
pub(super) fn broken(run: Run<'_>) -> Result<Option<Finding>, AnswerError> {
    let sizes = [run.problem.sequences.len(), run.problem.heads.kv];
    let Some(sums) = run.answer.named("law", "law", sizes)? else { return Ok(None) };
    if run.problem.softmax.sink != Sink::None {
        return Ok(None);
    }
    let places = (0..sizes[0]).flat_map(|sequence| (0..sizes[1]).map(move |head| (sequence, head)));
    let mut places = places.filter(|(sequence, _)| {
        let both = &run.problem.sequences[*sequence];
        both.q.len > 0 && both.kv.len > 0
    });
    Ok(places.find_map(|(sequence, head)| {
        let law = Law { run, sums: &sums, sequence, head };
        let bounds = law.bounds();
        law.euler(&bounds).or_else(|| law.mass(&bounds))
    }))
}

struct Law<'a> {
    run: Run<'a>,
    sums: &'a Named<'a>,
    sequence: usize,
    head: usize,
}

impl Law<'_> {
    fn get(&self, name: &str) -> f64 {
        self.sums.get(self.sequence, self.head, name)
    }

    fn dot(&self, name: &str) -> Dot {
        let of = |part: &str| self.get(&format!("{name} {part}"));
        Dot { value: of("sum"), terms: of("terms"), inputs: of("l1") }
    }

    fn bounds(&self) -> Bounds {
        let Run { problem, model, .. } = self.run;
        let both = problem.sequences[self.sequence];
        let band = problem.mask.band(both.q.len, both.kv.len);
        let ends = band.and_then(|band| band.lo.zip(band.hi));
        let width = ends.map_or(usize::MAX, |(lo, hi)| (hi - lo + 1).max(0) as usize);
        let (keys, queries) = (both.kv.len.min(width), both.q.len.min(width) * problem.group());
        let [q, k, v, dout] = ["most q", "most k", "most v", "most dout"].map(|name| self.get(name));
        let (a, scale) = (q * k, f64::from(problem.softmax.scale));
        let logit = scale * a;
        let b = dout * v;
        let roundings = self.get("most l1") * model.last_rounding(self.get("most out"));
        let extremes = Extremes {
            logit,
            lse: self.get("most lse"),
            distance: logit + self.get("most lse"),
            a,
            b,
            x: b + self.get("most d"),
            d_error: model.out_dot_error(self.get("most terms"), roundings),
        };
        let sums = model.gradient_sums(queries, keys);
        let majorants = model.gradient_majorants(&extremes, sums);
        // Floors are largest beside a small sum, and the LSE's own rounding beside a large one.
        let row = |sum: f64| {
            let sums = RowSums {
                keys,
                largest: logit,
                smallest: -logit,
                sum,
                sum_a: sum * a,
                largest_a: a,
                sink: None,
                value_max: v,
            };
            let envelope = RowEnvelope::new(model, &sums);
            (envelope.lse().1, envelope.out(sum * self.get("most out"), sum * v).1)
        };
        let [(lse, out), (other_lse, other_out)] = [1.0, keys as f64].map(row);
        let mass = model.mass_error(lse.max(other_lse));
        Bounds { mass, out: out.max(other_out), dv: majorants.dv, dk: majorants.dk, keys }
    }

    /// Returns the most that the operations of an element of a gradient may lose below the normal range.
    fn floor(&self, bounds: &Bounds) -> f64 {
        let Run { problem, model, .. } = self.run;
        let terms = bounds.keys.max(problem.sequences[self.sequence].q.len);
        model.gradient_row(TensorName::Dk, terms).bound(0.0, 0.0)
    }

    /// Asks for `Σ ⟨q, dq⟩ = Σ ⟨k, dk⟩`.
    fn euler(&self, bounds: &Bounds) -> Option<Finding> {
        let Run { problem, .. } = self.run;
        let format = problem.precision.gradients.format;
        let floor = self.floor(bounds);
        let (queries, keys) = (self.dot("q.dq"), self.dot("k.dk"));
        let own = queries.rounding(format, floor) + keys.rounding(format, floor);
        let Majorant { px, p, one } = bounds.dk;
        let (k, v) = (self.get("most k"), self.get("most v"));
        let x = v * self.get("q·dout") + self.get("q·d");
        let norms = self.get("q");
        let weights = (px * x + p * norms) * (1.0 + bounds.mass) + bounds.keys as f64 * one * norms;
        let moved = 2.0 * f64::from(problem.softmax.scale) * k * weights;
        self.compared(
            (Relation::Euler, TensorName::Dk, "the products of k and dk do not add up to those of q and dq"),
            [keys.value, queries.value],
            (own + moved) * (1.0 + SLACK) + SLACK / 1e6 * (queries.terms + keys.terms),
        )
    }

    /// Asks for `Σ ⟨v, dv⟩ = Σ ⟨dout, out⟩`.
    fn mass(&self, bounds: &Bounds) -> Option<Finding> {
        let Run { problem, .. } = self.run;
        let floor = self.floor(bounds);
        let (queries, keys) = (self.dot("dout.out"), self.dot("v.dv"));
        let own = queries.rounding(problem.precision.out.format, 0.0)
            + keys.rounding(problem.precision.gradients.format, floor);
        let Majorant { p, one, .. } = bounds.dv;
        let of_weights = p * (1.0 + bounds.mass) + bounds.keys as f64 * one + bounds.mass;
        let moved = of_weights * self.get("dout") * self.get("most v") + bounds.out * queries.inputs;
        self.compared(
            (
                Relation::Mass,
                TensorName::Dv,
                "the products of v and dv do not add up to those of dout and out",
            ),
            [keys.value, queries.value],
            (own + moved) * (1.0 + SLACK) + SLACK / 1e6 * (queries.terms + keys.terms),
        )
    }

    fn compared(
        &self,
        (relation, tensor, what): (Relation, TensorName, &str),
        [got, expected]: [f64; 2],
        bound: f64,
    ) -> Option<Finding> {
        let ratio = (got - expected).abs() / bound;
        // A sum that is no number comes of elements that are none, or of overflows, which other checks look at.
        if ratio.is_nan() || ratio <= 1.0 {
            return None;
        }
        let finding = Finding::new(Check::Identity, Some(tensor), what.to_owned());
        Some(Finding {
            identity: Some(relation),
            place: Place { sequence: Some(self.sequence), head: Some(self.head), ..Place::default() },
            got: Some(number(got)),
            expected: Some(number(expected)),
            bound: bound.is_finite().then_some(bound),
            ratio: ratio.is_finite().then_some(ratio),
            failed: 1,
            compared: 1,
            ..finding
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::large::answer::{Answer, Head};
    use crate::large::rows::{Question, Rows};
    use seamproof_oracle::envelope::{Arithmetic, Model, Partition};
    use seamproof_oracle::{Mask, Problem, ProblemFields};

    /// Returns what the laws say of one sequence whose sums are these: of queries and of keys.
    fn found(euler: [f64; 2], mass: [f64; 2]) -> Option<Finding> {
        let fields = ProblemFields { mask: Mask::CAUSAL, ..ProblemFields::packed(&[(64, 64)], 64) };
        let problem = Problem::new(fields).expect("a problem");
        let model = Model::new(&problem, Arithmetic::default(), Partition::single(64, 64));
        let question = Question::new(&problem, &model, Rows { count: 0, seed: 1 }, None);
        let sums = [("q.dq", euler[0]), ("k.dk", euler[1]), ("dout.out", mass[0]), ("v.dv", mass[1])];
        let parts = |(name, sum): (&str, f64)| {
            [("sum", sum), ("terms", 100.0), ("l1", 3000.0)].map(|(part, of)| (format!("{name} {part}"), of))
        };
        let norms = [("q·dout", 4000.0), ("q·d", 100.0), ("q", 500.0), ("dout", 500.0)];
        let most = [("q", 8.0), ("k", 8.0), ("v", 8.0), ("dout", 8.0), ("d", 3.0), ("lse", 6.0)];
        let most = most.into_iter().chain([("terms", 5.0), ("l1", 60.0), ("out", 2.0)]);
        let numbers: Vec<(String, f64)> = sums
            .into_iter()
            .flat_map(parts)
            .chain(norms.map(|(name, number)| (name.to_owned(), number)))
            .chain(most.map(|(name, number)| (format!("most {name}"), number)))
            .collect();
        let list: Vec<&str> = numbers.iter().map(|(name, _)| name.as_str()).collect();
        let head = serde_json::json!({
            "names": { "law": list },
            "no_numbers": {},
            "exact": {},
            "damage": [], "changed": [],
            "seconds": { "inputs": 0.0, "warm": 0.0, "kernel": 0.0, "judge": 0.0 },
            "arrays": [["law", [1, 1, list.len()]]],
        });
        let head: Head = serde_json::from_value(head).expect("a head");
        let bytes: Vec<u8> = numbers.iter().flat_map(|(_, number)| number.to_le_bytes()).collect();
        let answer = Answer::read(head, &bytes).expect("an answer");
        let run = Run { problem: &problem, model: &model, question: &question, answer: &answer };
        broken(run).expect("a fitting answer")
    }

    #[test]
    fn a_law_that_rounding_does_not_explain_is_broken() {
        assert_eq!(found([5.0, 5.2], [7.0, 6.9]), None);
        let euler = found([5.0, 5e3], [7.0, 7.0]).expect("a finding");
        assert_eq!((euler.identity, euler.tensor), (Some(Relation::Euler), Some(TensorName::Dk)));
        let mass = found([5.0, 5.0], [7.0, -900.0]).expect("a finding");
        assert_eq!((mass.identity, mass.tensor), (Some(Relation::Mass), Some(TensorName::Dv)));
        assert!(mass.ratio.is_some_and(|ratio| ratio > 1.0), "{mass}");
    }
}
