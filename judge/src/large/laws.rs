//! The laws of one run, from whole sums of each sequence and KV head: Euler's and that of mass
//! ([`crate::identity`]'s `laws` state both, and their bounds).
//!
//! Problems with a sink are not asked, since the bounds here leave it out.
//!
//! Here the errors of all queries of a sequence are bounded at once. Norms are the largest of the sequence, a logit is at
//! most `scale·|q||k|`, and the errors of a query's weights add up to `c·(1 + λ)`, where c is the coefficient of p in the
//! pair's error ([`Majorant`](seamproof_oracle::envelope::Majorant)) and λ the bound of its LSE.

use seamproof_oracle::envelope::{Extremes, Majorant, RowEnvelope, RowSums};
use seamproof_oracle::{Format, Sink, TensorName};

use super::answer::{AnswerError, Named};
use super::verdict::Run;
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
        let width = band.lo.zip(band.hi).map_or(both.kv.len, |(lo, hi)| (hi - lo + 1).max(0) as usize);
        let (keys, queries) = (width.min(both.kv.len), both.q.len.min(width.max(1)) * problem.group());
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
        let sums = model.gradient_sums(if band.lo.is_some() && band.hi.is_some() { queries } else { both.q.len * problem.group() }, keys);
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

    /// Asks for `Σ ⟨q, dq⟩ = Σ ⟨k, dk⟩`.
    fn euler(&self, bounds: &Bounds) -> Option<Finding> {
        let Run { problem, model, .. } = self.run;
        let format = problem.precision.gradients.format;
        let floor = model.gradient_bound(0.0, 0.0, bounds.keys.max(problem.sequences[self.sequence].q.len));
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
        let Run { problem, model, .. } = self.run;
        let floor = model.gradient_bound(0.0, 0.0, bounds.keys.max(problem.sequences[self.sequence].q.len));
        let (queries, keys) = (self.dot("dout.out"), self.dot("v.dv"));
        let own = queries.rounding(problem.precision.out.format, 0.0)
            + keys.rounding(problem.precision.gradients.format, floor);
        let Majorant { p, one, .. } = bounds.dv;
        let of_weights = p * (1.0 + bounds.mass) + bounds.keys as f64 * one + bounds.mass;
        let moved = of_weights * self.get("dout") * self.get("most v") + bounds.out * queries.inputs;
        self.compared(
            (Relation::Mass, TensorName::Dv, "the products of v and dv do not add up to those of dout and out"),
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
        // What is no number was found before, and an infinite bound says nothing.
        if !(ratio > 1.0) {
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
