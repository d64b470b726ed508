//! Judgement of a run that is over: its inputs and its results are there, and its subject is not.
//!
//! What needs another run is not asked: other poison, the same run once more, and nearly all identities. The inputs
//! are no longer ours to choose, so no exact result is known either. The padding, the envelope, and the identities
//! between results of one run are left.

use std::time::Instant;

use seamproof_oracle::sharding as layout;
use seamproof_oracle::{Inputs, Problem};

use super::evidence::{Depth, Evidence, Judge, Meter, Rung, Told};
use super::{ErrorMap, Examination, envelope, errors};
use crate::finding::Check;
use crate::identity;
use crate::subject::{Backend, RankOutputs};
use crate::verdict::{Margin, Verdict};

impl Judge {
    /// Returns the judge of runs that are over.
    pub fn of_recorded() -> Judge {
        let single = identity::TABLE.iter().filter(|identity| identity.runs == 0);
        Judge {
            identities: single.map(|identity| identity.relation).collect(),
            rungs: vec![
                Rung { check: Check::Envelope, look: envelope::look },
                Rung { check: Check::Identity, look: identity::look },
            ],
            ..Judge::default()
        }
    }

    /// Judges the results of a run that is over, as [`Assembly`](super::Assembly) gives them. The inputs are in the
    /// problem's own layout, and their padding rows hold zeros. The subject is asked for its declaration and for how
    /// it cuts its sums, and never runs.
    pub fn examine_recorded(
        &self,
        backend: &dyn Backend,
        problem: &Problem,
        inputs: &Inputs,
        results: &RankOutputs,
    ) -> Examination {
        let (start, meter) = (Instant::now(), Meter::default());
        let verdict = self.recorded(backend, problem, inputs, results, &meter);
        Examination { verdict, further: Vec::new(), cost: meter.cost(start.elapsed()) }
    }

    fn recorded(
        &self,
        backend: &dyn Backend,
        problem: &Problem,
        inputs: &Inputs,
        results: &RankOutputs,
        meter: &Meter,
    ) -> Verdict {
        if let Some(reason) = self.too_large(problem) {
            return Verdict::TooLarge(reason);
        }
        if let Err(error) = inputs.check(problem) {
            return Verdict::Infrastructure(error.to_string());
        }
        self.with_results((backend, problem), inputs, results, meter, |evidence| {
            let (mut margin, mut findings) = (Box::<Margin>::default(), Vec::new());
            match self.climb(evidence, &mut findings, &mut margin) {
                Some(what) => Verdict::Infrastructure(what),
                None => findings.pop().map_or(Verdict::Pass(margin), Verdict::from),
            }
        })
    }

    /// Returns the errors of the results of a run that is over, as [`Judge::error_maps`] does of one that it makes. The
    /// inputs are those of [`Judge::examine_recorded`]. There are none where the oracle cannot afford all rows.
    pub fn recorded_error_maps(
        &self,
        backend: &dyn Backend,
        problem: &Problem,
        inputs: &Inputs,
        results: &RankOutputs,
    ) -> Vec<ErrorMap> {
        if self.too_large(problem).is_some() || inputs.check(problem).is_err() {
            return Vec::new();
        }
        self.with_results((backend, problem), inputs, results, &Meter::default(), errors::maps)
    }

    /// Examines results that are there already.
    fn with_results<T>(
        &self,
        (backend, problem): (&dyn Backend, &Problem),
        inputs: &Inputs,
        results: &RankOutputs,
        meter: &Meter,
        examine: impl FnOnce(&Evidence<'_>) -> T,
    ) -> T {
        let (layout, told) = (layout::whole(problem), Told::default());
        examine(&Evidence {
            backend,
            problem,
            layout: &layout,
            inputs,
            first: results,
            second: results,
            judge: self,
            depth: Depth::First,
            meter,
            told: &told,
        })
    }
}
