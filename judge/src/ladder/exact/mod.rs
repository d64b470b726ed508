//! Exact: the results that inputs of an exact mode allow, and no others ([`crate::exact`] has the modes and the
//! proof).
//!
//! The right result of each query follows from the oracle's mask, the plan of the mode and the values themselves,
//! without the oracle's answer. Where a merge or a format leaves a result inexact, that result is left to the
//! envelope. For a wrong row, the judge searches for the set of keys that would show exactly this row, beginning with
//! the sets nearest to the right one. This is what a query *saw*. Ranges are written without their end: `4..20` are
//! the keys 4 to 19.

mod decode;
mod gradients;
mod row;
mod seen;

use std::borrow::Cow;

use seamproof_oracle::envelope::WeightRounding;
use seamproof_oracle::{Side, TensorName};

use super::compare::{Worst, lanes};
use super::hypotheses;
use crate::exact::{ExactPlan, Merging, Parts, eligible, parts};
use crate::finding::{Check, Finding, Place, number};
use crate::ladder::evidence::{Evidence, Look};
use crate::verdict::Margin;
use row::{Allowed, Head, KeySet, Shown};
pub use seen::{ReadRow, SeenRow, undecodable};

/// Compares the results with those that the mode allows.
pub(super) fn look(evidence: &Evidence<'_>, _margin: &mut Margin) -> Look {
    let problem = evidence.problem;
    if eligible(problem.mode, problem).is_err() {
        return Look::Held;
    }
    let plans: Vec<ExactPlan<'_>> =
        (0..problem.sequences.len()).map(|index| ExactPlan::new(problem, index)).collect();
    let forward = Forward::new(evidence);
    let Forward { merging, parts, .. } = forward;
    match forward.check(&plans) {
        Err(finding) => Some(*finding).into(),
        Ok(is_exact) => {
            let gradients = gradients::Backward { evidence, merging, parts, out_is_exact: is_exact };
            gradients.check(&plans).into()
        }
    }
}

/// Place of a wrong element, or of a row with one.
#[derive(Clone, Copy)]
struct Wrong {
    sequence: usize,
    head: usize,
    position: usize,
    lane: Option<usize>,
}

impl Wrong {
    fn is_row_of(&self, other: &Wrong) -> bool {
        let row = |wrong: &Wrong| (wrong.sequence, wrong.head, wrong.position);
        row(self) == row(other)
    }
}

/// Number of wrong rows that are kept besides the worst, since not each of them shows a set of keys.
const ROWS_KEPT: usize = 16;

/// Comparison of the elements of one tensor.
struct Tally {
    tensor: TensorName,
    worst: Worst,
    /// Place of the worst element.
    at: Option<Wrong>,
    /// First wrong rows, each with its first wrong lane.
    rows: Vec<Wrong>,
}

impl Tally {
    fn new(tensor: TensorName) -> Tally {
        Tally { tensor, worst: Worst::new(Check::Exact, tensor, ""), at: None, rows: Vec::new() }
    }

    /// Counts an element, where `distance` is how far off it is. NaN counts as further off than any number.
    fn add(&mut self, holds: bool, distance: f64, place: impl FnOnce() -> Wrong) {
        self.worst.compared();
        if holds {
            return;
        }
        let (distance, place) = (if distance.is_nan() { f64::INFINITY } else { distance }, place());
        self.worst.failed(distance, |_| self.at = Some(place));
        if self.rows.len() < ROWS_KEPT && self.rows.last().is_none_or(|last| !last.is_row_of(&place)) {
            self.rows.push(place);
        }
    }

    /// Returns the finding about the worst element, without an explanation.
    fn finding(&self, wrong: Wrong, what: String) -> Finding {
        let Wrong { sequence, head, position, lane } = wrong;
        let place = Place { sequence: Some(sequence), head: Some(head), row: Some(position), lane };
        let finding = Finding::new(Check::Exact, Some(self.tensor), what);
        let [failed, compared] = self.worst.counts();
        Finding { place, failed, compared, ..finding }
    }
}

/// Returns one number in words, or the smallest and the largest.
fn allowed_text((least, largest): (f64, f64)) -> String {
    if least == largest { number(least) } else { format!("{} to {}", number(least), number(largest)) }
}

struct Forward<'a> {
    evidence: &'a Evidence<'a>,
    merging: Merging,
    weights: WeightRounding,
    parts: Parts,
}

impl<'a> Forward<'a> {
    fn new(evidence: &'a Evidence<'a>) -> Forward<'a> {
        let problem = evidence.problem;
        let arithmetic = evidence.backend.declaration().arithmetic;
        let merging = Merging::from(evidence.partition()).with_heads(&arithmetic, problem);
        let parts = parts(problem.mode, problem, merging, &arithmetic);
        Forward { evidence, merging, weights: arithmetic.weights, parts }
    }

    /// Checks LSE, out and max_logit. Returns whether every out is the exact value itself.
    fn check(&self, plans: &[ExactPlan<'_>]) -> Result<bool, Box<Finding>> {
        let problem = self.evidence.problem;
        let (mut lse, mut out) = (Tally::new(TensorName::Lse), Tally::new(TensorName::Out));
        let mut largest = vec![f64::NEG_INFINITY; problem.heads.q];
        let mut is_exact = true;
        let mut right = vec![0.0; problem.dims.v];
        for (sequence, plan) in plans.iter().enumerate() {
            for kv_head in 0..problem.heads.kv {
                let of_head = Head::new(plan, self.evidence.inputs, kv_head);
                for head in kv_head * problem.group()..(kv_head + 1) * problem.group() {
                    for position in 0..plan.queries() {
                        let keys = KeySet::all(plan.visible(position));
                        let Some(shown) = of_head.row(position, head, &keys, &mut right) else { continue };
                        largest[head] = largest[head].max(shown.key_logit);
                        let place = Wrong { sequence, head, position, lane: None };
                        self.lse(plan, place, &shown, &mut lse);
                        is_exact &= self.out(plan, place, &shown, &right, &mut out);
                    }
                }
            }
        }
        for tally in [lse, out] {
            if let Some(wrong) = tally.at {
                return Err(Box::new(self.finding(plans, &tally, wrong)));
            }
        }
        self.max_logit(&largest).map_or(Ok(is_exact), Err)
    }

    fn lse(&self, plan: &ExactPlan<'_>, place: Wrong, shown: &Shown, tally: &mut Tally) {
        if let Some(got) = self.got_lse(plan, place) {
            let allowed = self.allowed(plan, shown);
            let exact = shown.lse();
            tally.add(allowed.holds_lse(got, exact), (f64::from(got) - exact).abs(), || place);
        }
    }

    /// Compares a row of out. Returns whether it is the exact one.
    fn out(
        &self,
        plan: &ExactPlan<'_>,
        place: Wrong,
        shown: &Shown,
        right: &[f64],
        tally: &mut Tally,
    ) -> bool {
        if !self.parts.out {
            return false;
        }
        let row = self.got_out(plan, place);
        let is_plain = self.weights == WeightRounding::BeforeNormalisation;
        if is_plain && row.iter().zip(right).fold(true, |all, (got, right)| all & (f64::from(*got) == *right))
        {
            tally.worst.held(row.len());
            return true;
        }
        let allowed = self.allowed(plan, shown);
        let mut is_exact = true;
        for (lane, (got, right)) in row.iter().zip(right).enumerate() {
            let value = f64::from(*got);
            is_exact &= value == *right;
            let holds = is_plain && value == *right || allowed.holds_out(*got, *right);
            tally.add(holds, (value - right).abs(), || Wrong { lane: Some(lane), ..place });
        }
        is_exact
    }

    fn allowed(&self, plan: &ExactPlan<'_>, shown: &Shown) -> Allowed {
        Allowed::new(plan, shown, self.merging, self.weights)
    }

    fn got_lse(&self, plan: &ExactPlan<'_>, place: Wrong) -> Option<f32> {
        let row = plan.run(Side::Q).row(place.position);
        self.evidence.first.lse.as_ref().map(|lse| lse[[place.head, row]])
    }

    fn got_out(&self, plan: &ExactPlan<'_>, place: Wrong) -> Cow<'_, [f32]> {
        lanes(&self.evidence.first.out, plan.run(Side::Q).row(place.position), place.head)
    }

    /// Returns what a wrong row shows, in words, and whether that explains it.
    fn story(&self, plans: &[ExactPlan<'_>], wrong: Wrong) -> (String, bool) {
        let plan = &plans[wrong.sequence];
        let of_head = self.head(plan, wrong.head);
        let row = self.row(plan, &of_head, wrong);
        decode::story(&row, plans, &KeySet::all(plan.visible(wrong.position)))
    }

    /// Returns the KV head of a query head.
    fn head<'p>(&'p self, plan: &'p ExactPlan<'p>, head: usize) -> Head<'p> {
        Head::new(plan, self.evidence.inputs, head / self.evidence.problem.group())
    }

    /// Returns a row of the results.
    fn row<'p>(&'p self, plan: &ExactPlan<'_>, head: &'p Head<'p>, place: Wrong) -> decode::Row<'p> {
        decode::Row {
            head,
            query: place.position,
            query_head: place.head,
            lse: self.got_lse(plan, place),
            out: self.parts.out.then(|| self.got_out(plan, place)),
            merging: self.merging,
            weights: self.weights,
        }
    }

    /// Returns the finding about the worst row, or about the first that a set of keys explains where none explains
    /// the worst one. Where none explains any, a mistake that explains the whole case is told.
    fn finding(&self, plans: &[ExactPlan<'_>], tally: &Tally, worst: Wrong) -> Finding {
        let stories = [worst].into_iter().chain(tally.rows.iter().copied());
        let mut told = stories.map(|wrong| (wrong, self.story(plans, wrong)));
        let (wrong, saw) = match told.find(|(_, (_, is_set))| *is_set) {
            Some((wrong, (saw, _))) => (wrong, saw),
            None => {
                let of_case = hypotheses::told(self.evidence);
                (worst, of_case.unwrap_or_else(|| self.story(plans, worst).0))
            }
        };
        let what = format!("sequence {}, query {}: {saw}", wrong.sequence, wrong.position);
        let (got, expected) = self.values(&plans[wrong.sequence], wrong);
        Finding { got, expected, ..tally.finding(wrong, what) }
    }

    /// Returns the subject's value of an element, and the right one.
    fn values(&self, plan: &ExactPlan<'_>, wrong: Wrong) -> (Option<String>, Option<String>) {
        let problem = self.evidence.problem;
        let of_head = Head::new(plan, self.evidence.inputs, wrong.head / problem.group());
        let mut right = vec![0.0; problem.dims.v];
        let keys = KeySet::all(plan.visible(wrong.position));
        let shown = of_head.row(wrong.position, wrong.head, &keys, &mut right);
        let Some(shown) = shown else { return (None, None) };
        match wrong.lane {
            None => (self.got_lse(plan, wrong).map(number), Some(number(shown.lse()))),
            Some(lane) => {
                let allowed = self.allowed(plan, &shown).out(right[lane]);
                (Some(number(self.got_out(plan, wrong)[lane])), Some(allowed_text(allowed)))
            }
        }
    }

    /// Checks the largest logit of each head: a level's or a code's, times the scale.
    fn max_logit(&self, largest: &[f64]) -> Option<Box<Finding>> {
        /// Relative error of the product with the scale, in any form of the product.
        const PRODUCT: f64 = 1.0 / (1 << 21) as f64;
        let got = self.evidence.first.max_logit.as_ref()?;
        let holds = |got: f64, right: f64| got == right || (got - right).abs() <= PRODUCT * right.abs();
        let wrong = |head: &usize| !holds(f64::from(got[*head]), largest[*head]);
        let failed = (0..largest.len()).filter(wrong).count();
        let head = (0..largest.len()).find(wrong)?;
        let what = "not the largest logit of the keys that the head's queries see".to_owned();
        Some(Box::new(Finding {
            place: Place { head: Some(head), ..Place::default() },
            got: Some(number(got[head])),
            expected: Some(number(largest[head])),
            failed,
            compared: largest.len(),
            ..Finding::new(Check::Exact, Some(TensorName::MaxLogit), what)
        }))
    }
}
