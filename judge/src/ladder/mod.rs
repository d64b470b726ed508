//! The judge: it decides whether a subject is right on one problem.
//!
//! It asks a ladder of checks, the cheapest and sharpest first. The first one that breaks is the finding.
//!
//! - *Capability*: the subject refuses what its table refuses, for such a row, and nothing else.
//! - *Structure*: shapes and guard bands are right, every real row is written, padding rows are as the subject's
//!   contract says, and rows that nobody owns are untouched.
//! - *Poison*: two runs differ only in what padding and slack rows of the inputs hold. They agree in every bit of
//!   every real row. Gradients for which a subject promises no bits agree in which elements are NaN.
//! - *Exact*: inputs of an exact mode allow one result. For a wrong one, the check names the set of keys that it
//!   shows.
//! - *Envelope*: each element lies within the largest honest error of the exact answer, the LSE first. The backward
//!   is judged on the out and lse that the subject itself returned. Where the oracle is too expensive for the case, a
//!   sample of its rows is judged.
//! - *Identity*: relations hold between results of the subject alone ([`identity`]). They come last because most of
//!   them run the subject again.

mod across;
mod amax;
mod assemble;
pub mod bounds;
pub mod compare;
mod dealt;
mod descales;
mod diagnosis;
mod draw;
mod envelope;
mod errors;
pub mod evidence;
mod exact;
pub mod faults;
mod given;
mod gradient_hypotheses;
mod hypotheses;
mod pairs;
mod poison;
mod ranks;
mod recorded;
mod rows;
pub(crate) mod runs;
mod sample;
mod sights;
mod stories;
pub(crate) mod structure;
mod trial;

use std::time::Instant;

use seamproof_oracle::{Inputs, Problem};
use seamproof_simulator::schedule::check_size;

use crate::finding::{Check, Finding};
use crate::generate::Malformed;
use crate::identity;
use crate::subject::{Backend, Outputs, RankOutputs, RunError};
use crate::values;
use crate::verdict::{Cost, Margin, Verdict};
pub use assemble::{Assembly, place_rows, rotate_rows};
pub use bounds::MeasureRatios;
pub use draw::Sampled;
pub use errors::{ErrorMap, WorstLane};
pub use evidence::{Depth, ELEMENTS_MAX, Evidence, Judge, PRODUCTS_MAX, Rung, products};
use evidence::{Look, Meter, Told};
pub use exact::{ReadRow, SeenRow, undecodable};
use runs::{capability_verdict, expected_refusals, fills, poisoned, run, whole_case};
use seamproof_oracle::sharding as layout;
pub use structure::padding_of_recorded;
pub use trial::Trial;

impl Default for Judge {
    fn default() -> Judge {
        Judge {
            layouts: layout::layouts,
            structure: structure::check,
            assemble: assemble::assemble,
            ratio: bounds::error_ratios,
            products_max: PRODUCTS_MAX,
            placed: None,
            sampled: None,
            elements_max: ELEMENTS_MAX,
            identities: identity::TABLE.iter().map(|identity| identity.relation).collect(),
            rungs: vec![
                Rung { check: Check::Poison, look: poison::look },
                Rung { check: Check::Exact, look: exact::look },
                Rung { check: Check::Envelope, look: envelope::look },
                Rung { check: Check::Identity, look: identity::look },
            ],
        }
    }
}

/// Everything that a judge found out about a case.
#[derive(Clone, Debug, PartialEq)]
pub struct Examination {
    /// Verdict: the first finding, or that there is none.
    pub verdict: Verdict,
    /// Findings of the further rungs, after the first one ([`Depth::All`]).
    pub further: Vec<Finding>,
    /// Time spent in each part.
    pub cost: Cost,
}

/// Judges `backend` on `problem`, with the inputs that the problem's mode and data seed give.
///
/// ```
/// use seamproof_judge::prelude::*;
/// use seamproof_judge::subjects::Emulated;
///
/// // Two packed sequences of 5 and 3 queries, the second without keys, in heads of 8 lanes.
/// let fields = ProblemFields { mask: Mask::CAUSAL, ..ProblemFields::packed(&[(5, 7), (3, 0)], 8) };
/// let problem = Problem::new(fields)?;
/// let verdict = judge(&Emulated::default(), &problem);
/// assert!(matches!(verdict, Verdict::Pass(_)), "{verdict}");
/// # Ok::<(), seamproof_judge::oracle::ProblemError>(())
/// ```
pub fn judge(backend: &dyn Backend, problem: &Problem) -> Verdict {
    examine(backend, problem).verdict
}

/// Judges `backend` on `problem`, and returns the time spent in each part as well.
pub fn examine(backend: &dyn Backend, problem: &Problem) -> Examination {
    Judge::default().examine(backend, problem, Depth::First)
}

impl Judge {
    /// Runs the subject under two poisons and asks each rung.
    pub fn examine(&self, backend: &dyn Backend, problem: &Problem, depth: Depth) -> Examination {
        let (start, meter) = (Instant::now(), Meter::default());
        let mut findings = Vec::new();
        let verdict = self.ladder(backend, problem, depth, &meter, &mut findings);
        let mut findings = findings.into_iter();
        let verdict =
            verdict.unwrap_or_else(|margin| findings.next().map_or(Verdict::Pass(margin), Verdict::from));
        Examination { verdict, further: findings.collect(), cost: meter.cost(start.elapsed()) }
    }

    /// Asks the rungs, from the first run on. `Ok` is a verdict that ends the case, whatever was found before.
    fn ladder(
        &self,
        backend: &dyn Backend,
        problem: &Problem,
        depth: Depth,
        meter: &Meter,
        findings: &mut Vec<Finding>,
    ) -> Result<Verdict, Box<Margin>> {
        let mut margin = Box::<Margin>::default();
        let climb = |evidence: &Evidence<'_>| self.climb(evidence, findings, &mut margin);
        match self.with_evidence(backend, problem, depth, meter, climb) {
            Ok(Some(what)) => Ok(Verdict::Infrastructure(what)),
            Ok(None) => Err(margin),
            Err(verdict) => Ok(verdict),
        }
    }

    /// Runs the subject under two poisons, and examines what it returned. `Err` is a verdict that leaves nothing to
    /// examine.
    fn with_evidence<T>(
        &self,
        backend: &dyn Backend,
        problem: &Problem,
        depth: Depth,
        meter: &Meter,
        examine: impl FnOnce(&Evidence<'_>) -> T,
    ) -> Result<T, Verdict> {
        let too_many_ranks = || check_size(problem).err().map(|error| error.to_string());
        if let Some(reason) = self.too_large(problem).or_else(too_many_ranks) {
            return Err(Verdict::TooLarge(reason));
        }
        let inputs = meter.inputs(|| values::inputs(problem));
        let runs = Judge::runs(backend, problem, &inputs, meter)?;
        let [first, second] = self.whole(backend, problem, runs)?;
        let layout = layout::whole(problem);
        let told = Told::default();
        let evidence = Evidence {
            backend,
            problem,
            layout: &layout,
            inputs: &inputs,
            first: &first,
            second: &second,
            judge: self,
            depth,
            meter,
            told: &told,
        };
        Ok(examine(&evidence))
    }

    /// Asks rung after rung, and gathers their findings. A rung that fails to look ends the case if nothing was found
    /// before.
    fn climb(
        &self,
        evidence: &Evidence<'_>,
        findings: &mut Vec<Finding>,
        margin: &mut Margin,
    ) -> Option<String> {
        for rung in &self.rungs {
            match (rung.look)(evidence, margin) {
                Look::Held => {}
                Look::Broken(finding) => findings.push(*finding),
                Look::Failed(what) if findings.is_empty() => return Some(what),
                Look::Failed(_) => {}
            }
            if evidence.depth == Depth::First && !findings.is_empty() {
                break;
            }
        }
        None
    }

    fn too_large(&self, problem: &Problem) -> Option<String> {
        let (elements, most) = (problem.elements(), self.elements_max);
        (elements > most)
            .then(|| format!("the case has {elements} tensor elements; at most {most} are judged"))
    }

    /// Returns the results of two runs in the problem's own layout, or the finding about their structure. Unwritten
    /// results, and those of another shape, cannot be examined further.
    fn whole(
        &self,
        backend: &dyn Backend,
        problem: &Problem,
        runs: [Outputs; 2],
    ) -> Result<[RankOutputs; 2], Verdict> {
        let layouts = (self.layouts)(problem).map_err(|error| {
            Verdict::Infrastructure(format!("the subject ran what cannot be cut: {error}"))
        })?;
        let broken = runs.iter().find_map(|outputs| (self.structure)(backend, problem, &layouts, outputs));
        if let Some(finding) = broken {
            return Err(Verdict::from(finding));
        }
        let [first, second] = runs.map(|outputs| {
            (self.assemble)(problem, &layouts, outputs.ranks).map_err(|finding| Verdict::from(*finding))
        });
        Ok([first?, second?])
    }

    /// Returns the two runs under different poison, or the verdict where there is nothing to compare.
    fn runs(
        backend: &dyn Backend,
        problem: &Problem,
        inputs: &Inputs,
        meter: &Meter,
    ) -> Result<[Outputs; 2], Verdict> {
        let fills = fills(backend, problem);
        let expected = expected_refusals(backend, problem);
        if let (Some(refusal), false) = (expected.first(), backend.declaration().refuses) {
            // The subject refuses nothing by itself, so that it must not see the problem.
            return Err(Verdict::Refused(refusal.clone()));
        }
        let mut poisoned = meter.inputs(|| poisoned(inputs, problem, fills[0]));
        let first = meter.subject(|| run(backend, problem, &poisoned));
        let first = match first {
            Ok(outputs) if expected.is_empty() => outputs,
            Err(RunError::Refused(got)) if expected.contains(&got) => return Err(Verdict::Refused(got)),
            result => return Err(capability_verdict(result, expected.into_iter().next())),
        };
        meter.inputs(|| values::poison(&mut poisoned, problem, fills[1]));
        match meter.subject(|| run(backend, problem, &poisoned)) {
            Ok(second) => Ok([first, second]),
            Err(error) => Err(capability_verdict(Err(error), None)),
        }
    }
}

/// Judges the validation: fields with one broken rule must be refused by exactly that rule.
pub fn judge_malformed(malformed: &Malformed) -> Verdict {
    match malformed.check() {
        Ok(()) => Verdict::RefusedMalformed(malformed.rule),
        Err(what) => {
            let what = format!("a problem that breaks the rule {} was {what}", malformed.rule);
            whole_case(Check::Validation, what).into()
        }
    }
}
