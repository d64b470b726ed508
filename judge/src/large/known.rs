//! What inputs of the modes `pairs` and `routing` allow in every row, bit for bit.
//!
//! The comparison is made where the subject runs. It leaves out sums whose terms may add up to more units than partial
//! sums can hold. Results in f32 are left to the rows that are judged by their bounds.

use seamproof_oracle::envelope::{Arithmetic, Partition};
use seamproof_oracle::{Format, Problem};
use serde::Serialize;

use crate::exact::{self, ExactPlan, Merging, Parts, has_codes, lse_error};

/// Number of units from which on f32 cannot hold every multiple of the unit.
const F32_UNITS: f64 = (1 << 24) as f64;

/// Results that are known in every row.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Known {
    out: bool,
    dv: bool,
    gradients: bool,
    /// Largest error of an LSE of one key with a weight, and of two.
    lse: [f64; 2],
    /// Number of units that a partial sum of a gradient can hold.
    units: f64,
}

impl Known {
    /// Returns what is known of a problem on a subject with this arithmetic; `None` where that is nothing.
    pub fn of(problem: &Problem, arithmetic: &Arithmetic, partition: Partition) -> Option<Known> {
        let mode = problem.mode;
        if !has_codes(mode) || exact::eligible(mode, problem).is_err() {
            return None;
        }
        let merging = Merging::from(partition).with_heads(arithmetic, problem);
        let Parts { out, gradients, dv, .. } = exact::parts(mode, problem, merging, arithmetic);
        let is_narrow = |format: Format| format != Format::F32;
        let precision = &problem.precision;
        let has_16_bits = is_narrow(precision.p.format) && is_narrow(precision.gradients.format);
        let lse = [1, 2].map(|active| {
            let of_sequence = |sequence| {
                let plan = ExactPlan::new(problem, sequence);
                let logit = plan.code_logit();
                let partial = plan.partial_lse(logit, plan.keys());
                lse_error(mode, logit, logit + (active as f64).ln(), active, partial, merging)
            };
            (0..problem.sequences.len()).map(of_sequence).fold(0.0, f64::max)
        });
        let narrow = 2f64.powi(precision.gradients.format.precision_bits());
        Some(Known {
            out: out && is_narrow(precision.out.format) && !merging.differs(),
            dv: dv && has_16_bits,
            gradients: gradients && has_16_bits,
            lse,
            units: if merging.narrow_sums { narrow } else { F32_UNITS },
        })
    }
}
