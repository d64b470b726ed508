//! Laws of one run: two sums that are the same double sum in another order, whatever the weights were.
//!
//! For a sequence and a KV head with its queries i and keys j, let `p_ij` be the weights and `ds_ij` the gradients of
//! the products `scale · ⟨q_i, k_j⟩`, both as they follow from the out and lse that the run saved.
//!
//! - *Euler*: `Σ_i ⟨q_i, dq_i⟩ = scale · Σ_ij ds_ij ⟨q_i, k_j⟩ = Σ_j ⟨k_j, dk_j⟩`. Nothing is asked of ds, so a soft
//!   cap, a sink and any way to make D leave it true.
//! - *Mass*: `Σ_j ⟨v_j, dv_j⟩ = Σ_ij p_ij ⟨dout_i, v_j⟩ = Σ_i ⟨dout_i, out_i⟩`. A sink only takes weight from all
//!   keys.
//!
//! **Bounds.** The envelope bounds an element of dq by `scale · Σ_j e_ij |k_jc|` and its own rounding, where
//! `e_ij ≥ 0` are the errors of `ds_ij`, and one of dk by `scale · Σ_i e_ij |q_ic|` and its own rounding. By Cauchy and
//! Schwarz the errors of query i move either sum by no more than `scale · |q_i| · max_j |k_j| · Σ_j e_ij`, and
//! [`Bounds::given`] bounds `Σ_j e_ij`. So too for dv, with errors of weights against the exact ones,
//! `|dout_i| · max_j |v_j|`; the other sum is moved by the error of an element of out times `Σ_c |dout_ic|`. An
//! element's own rounding, and what its operations lose below the normal range, count with the element's factor. The
//! sums themselves are made in f64, of inputs that were rounded to f32 where they have descales: n products lose at most
//! `2⁻²⁴ + n · 2⁻⁵²` of their magnitude.
//!
//! **Infinities.** Nothing is asked of a sequence and KV head where an input is infinite or NaN, or a result is
//! infinite: such a result may be an honest overflow, and an infinity has no part in a sum. The same holds for the
//! largest number of a format that saturates. A result that is NaN while all inputs are finite breaks the law.

use seamproof_oracle::envelope::F32_ROUNDOFF;
use seamproof_oracle::{Side, Stored};

use super::bound::{Against, Bounds};
use super::readers::{Readers, moved_by, seeing};
use super::sums::Bounded;
use crate::finding::{Place, Relation};
use crate::ladder::compare::lanes;
use crate::ladder::evidence::{Evidence, Look};
use crate::subject::TensorName;
use ndarray::Array3;
use seamproof_oracle::sharding::run_of;

/// One side of a law: `Σ ⟨input, result⟩` over rows.
#[derive(Default)]
struct Dot {
    value: f64,
    /// Most by which the results' own roundings moved the sum.
    rounding: f64,
    magnitude: f64,
    products: usize,
    /// Whether an input is infinite or NaN, or a result is infinite or may be saturated.
    is_wild: bool,
}

impl Dot {
    /// Adds the products of one row and head. The result is stored in these numbers, and its operations lose `floor` at
    /// most.
    fn add(&mut self, input: &[f32], result: &[f32], (stored, floor): (Stored, f64)) {
        for (&x, &y) in input.iter().zip(result) {
            let (x, y) = (f64::from(x), f64::from(y));
            self.is_wild |= !x.is_finite() || y.is_infinite() || stored.is_saturated(y);
            self.value += x * y;
            self.magnitude += (x * y).abs();
            self.rounding += x.abs() * (stored.moved(y) + floor);
        }
        self.products += input.len();
    }

    /// Returns the most by which the sum in f64 is off. Values that come of codes and descales are rounded to f32.
    fn loss(&self) -> f64 {
        (F32_ROUNDOFF + self.products as f64 * f64::EPSILON) * self.magnitude
    }
}

/// A law between two sums, with the tensor that a finding names.
struct Law<'a> {
    relation: Relation,
    tensor: TensorName,
    what: &'static str,
    /// Function that returns the sum over the queries, and the one over the keys.
    sides: &'a dyn Fn(&Readers<'_>) -> [Dot; 2],
    /// Function that returns the most by which the errors of one query move the difference of both sums: of the query
    /// at this position, in this head.
    moved: &'a dyn Fn(&Readers<'_>, usize, usize) -> f64,
}

impl Law<'_> {
    /// Asks the law of each sequence and KV head. The errors of the queries are expensive, so they are computed only
    /// where the results' own roundings do not explain a difference.
    fn look(&self, evidence: &Evidence<'_>) -> Look {
        let problem = evidence.problem;
        let mut bounded = Bounded::new(self.relation, self.tensor, self.what);
        for sequence in 0..problem.sequences.len() {
            let queries = seeing(evidence, sequence);
            for kv_head in 0..problem.heads.kv {
                let readers = Readers { sequence, kv_head, queries: &queries, group: problem.group() };
                let [of_queries, of_keys] = (self.sides)(&readers);
                if of_queries.is_wild || of_keys.is_wild {
                    continue;
                }
                let own = of_queries.rounding + of_keys.rounding + of_queries.loss() + of_keys.loss();
                let mut bound = own;
                if (of_keys.value - of_queries.value).abs() > own {
                    readers.each(|position, head| bound += (self.moved)(&readers, position, head));
                }
                let place = Place { sequence: Some(sequence), head: Some(kv_head), ..Place::default() };
                bounded.compare(place, of_keys.value, of_queries.value, bound * (1.0 + SLACK));
            }
        }
        bounded.finding().into()
    }
}

/// Relative loss of adding up a bound, which is generous: a bound has fewer than 2⁴⁰ terms.
const SLACK: f64 = 1.0 / (1 << 12) as f64;

/// Returns `Σ ⟨input, result⟩` over the real rows of a side, for the heads of a KV head.
fn dot(
    evidence: &Evidence<'_>,
    readers: &Readers<'_>,
    side: Side,
    [input, result]: [&Array3<f32>; 2],
    rounding: (Stored, f64),
) -> Dot {
    let size = if side == Side::Q { readers.group } else { 1 };
    let mut dot = Dot::default();
    for row in run_of(&evidence.problem.sequences[readers.sequence], side).real_rows() {
        for head in readers.kv_head * size..(readers.kv_head + 1) * size {
            dot.add(&lanes(input, row, head), &lanes(result, row, head), rounding);
        }
    }
    dot
}

/// Asks for `Σ ⟨q, dq⟩ = Σ ⟨k, dk⟩`.
pub(super) fn euler(evidence: &Evidence<'_>) -> Option<Look> {
    let gradients = evidence.first.gradients.as_ref()?;
    let problem = evidence.problem;
    let bounds = Bounds::of_law(evidence)?;
    let inputs = &*bounds.inputs;
    let floor = bounds.gradient_floor();
    let [of_dq, of_dk] =
        [TensorName::Dq, TensorName::Dk].map(|gradient| (bounds.model.stored(gradient), floor));
    let law = Law {
        relation: Relation::Euler,
        tensor: TensorName::Dk,
        what: "the products of k and dk do not add up to those of q and dq",
        sides: &|readers| {
            [
                dot(evidence, readers, Side::Q, [&inputs.q, &gradients.dq], of_dq),
                dot(evidence, readers, Side::Kv, [&inputs.k, &gradients.dk], of_dk),
            ]
        },
        moved: &|readers, position, head| {
            let out = &evidence.first.out;
            let given = bounds.given(readers.sequence, position, head, out, Against::Saved);
            let [qk, _] = bounds.products(readers.sequence, position, head);
            moved_by(2.0 * f64::from(problem.softmax.scale) * qk, given.logit_gradients)
        },
    };
    Some(law.look(evidence))
}

/// Asks for `Σ ⟨v, dv⟩ = Σ ⟨dout, out⟩`.
pub(super) fn mass(evidence: &Evidence<'_>) -> Option<Look> {
    let gradients = evidence.first.gradients.as_ref()?;
    let (problem, out) = (evidence.problem, &evidence.first.out);
    let bounds = Bounds::of_law(evidence)?;
    let inputs = &*bounds.inputs;
    let stored = |result| bounds.model.stored(result);
    let (of_dv, of_out) = ((stored(TensorName::Dv), bounds.gradient_floor()), (stored(TensorName::Out), 0.0));
    let law = Law {
        relation: Relation::Mass,
        tensor: TensorName::Dv,
        what: "the products of v and dv do not add up to those of dout and out",
        sides: &|readers| {
            [
                dot(evidence, readers, Side::Q, [&inputs.dout, out], of_out),
                dot(evidence, readers, Side::Kv, [&inputs.v, &gradients.dv], of_dv),
            ]
        },
        moved: &|readers, position, head| {
            let given = bounds.given(readers.sequence, position, head, out, Against::Exact);
            let [_, dout_v] = bounds.products(readers.sequence, position, head);
            let row = problem.sequences[readers.sequence].q.row(position);
            let dout: f64 = lanes(&inputs.dout, row, head).iter().map(|x| f64::from(x.abs())).sum();
            let out = bounds.row(readers.sequence, position, head).out;
            moved_by(dout_v, given.weights) + moved_by(dout, out)
        },
    };
    Some(law.look(evidence))
}
