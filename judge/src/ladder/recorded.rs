//! Judgement of a run that is over: its inputs and its results are there, and its subject is not.
//!
//! What needs another run is not asked: other poison, the same run once more, and nearly all identities. The inputs
//! are no longer ours to choose, so no exact result is known either. Structure, the envelope, and the identities
//! between results of one run are left.

use std::time::Instant;

use seamproof_oracle::sharding::{self as layout, RankLayout};
use seamproof_oracle::{Inputs, Problem};

use super::evidence::{Depth, Evidence, Judge, Meter, Rung, Told};
use super::{Examination, envelope, structure};
use crate::finding::{Check, Finding};
use crate::identity;
use crate::subject::{Backend, Outputs};
use crate::verdict::{Margin, Verdict};

impl Judge {
    /// Returns the judge of runs that are over.
    pub fn of_recorded() -> Judge {
        let single = identity::TABLE.iter().filter(|identity| identity.runs == 0);
        Judge {
            structure: structure::check_recorded,
            identities: single.map(|identity| identity.relation).collect(),
            rungs: vec![
                Rung { check: Check::Envelope, look: envelope::look },
                Rung { check: Check::Identity, look: identity::look },
            ],
            ..Judge::default()
        }
    }

    /// Judges the results of a run that is over, which ranks with these layouts returned. The inputs are in the
    /// problem's own layout, and their padding rows hold zeros. The subject is asked for its declaration and for how
    /// it cuts its sums, and never runs.
    pub fn examine_recorded(
        &self,
        backend: &dyn Backend,
        problem: &Problem,
        layouts: &[RankLayout],
        (inputs, outputs): (&Inputs, Outputs),
    ) -> Examination {
        let (start, meter) = (Instant::now(), Meter::default());
        let mut findings = Vec::new();
        let verdict = self.recorded(backend, problem, layouts, (inputs, outputs), (&meter, &mut findings));
        let verdict = verdict.unwrap_or_else(|verdict| verdict);
        Examination { verdict, further: Vec::new(), cost: meter.cost(start.elapsed()) }
    }

    /// Asks what can be asked. `Err` is a verdict that ends the case early.
    fn recorded(
        &self,
        backend: &dyn Backend,
        problem: &Problem,
        layouts: &[RankLayout],
        (inputs, outputs): (&Inputs, Outputs),
        (meter, findings): (&Meter, &mut Vec<Finding>),
    ) -> Result<Verdict, Verdict> {
        if let Some(reason) = self.too_large(problem) {
            return Err(Verdict::TooLarge(reason));
        }
        inputs.check(problem).map_err(|error| Verdict::Infrastructure(error.to_string()))?;
        if let Some(finding) = (self.structure)(backend, problem, layouts, &outputs) {
            return Err(finding.into());
        }
        let results = (self.assemble)(problem, layouts, outputs.ranks);
        let results = results.map_err(|finding| Verdict::from(*finding))?;
        let (layout, told) = (layout::whole(problem), Told::default());
        let evidence = Evidence {
            backend,
            problem,
            layout: &layout,
            inputs,
            first: &results,
            second: &results,
            judge: self,
            depth: Depth::First,
            meter,
            told: &told,
        };
        let mut margin = Box::<Margin>::default();
        if let Some(what) = self.climb(&evidence, findings, &mut margin) {
            return Err(Verdict::Infrastructure(what));
        }
        Ok(findings.pop().map_or(Verdict::Pass(margin), Verdict::from))
    }
}
