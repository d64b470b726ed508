//! STUB of the command line's branch: the real judge is a colleague's. Drop this file when merging.
#![allow(missing_docs)]

use seamproof_oracle::Problem;

use crate::backend::{Backend, RunError};
use crate::generate::Malformed;
use crate::verdict::{Check, Finding, Margin, Place, Verdict};

fn finding(check: Check, what: String) -> Verdict {
    Verdict::Finding(Box::new(Finding {
        check,
        tensor: None,
        place: Place::default(),
        what,
        got: None,
        expected: None,
        bound: None,
        ratio: None,
        failed: 0,
        compared: 0,
    }))
}

pub fn judge(backend: &dyn Backend, problem: &Problem) -> Verdict {
    let inputs = seamproof_oracle::Inputs {
        q: ndarray::Array3::zeros(problem.q_shape()),
        k: ndarray::Array3::zeros(problem.k_shape()),
        v: ndarray::Array3::zeros(problem.v_shape()),
        dout: ndarray::Array3::zeros([0, problem.heads.q, problem.dims.v]),
        sink: ndarray::Array1::zeros(problem.learnable_sinks()),
    };
    match backend.run(problem, &inputs) {
        Ok(_) => Verdict::Pass(Margin { out: 0.25, lse: 0.5, ..Margin::default() }),
        Err(RunError::Refused(refusal)) => Verdict::Refused(refusal),
        Err(RunError::Crash(what)) => finding(Check::Crash, what),
        Err(RunError::Infrastructure(what)) => Verdict::Infrastructure(what),
    }
}

pub fn judge_malformed(malformed: &Malformed) -> Verdict {
    match Problem::new(malformed.fields.clone()) {
        Ok(_) => finding(Check::Validation, format!("{} was accepted", malformed.rule)),
        Err(_) => Verdict::Pass(Margin::default()),
    }
}
