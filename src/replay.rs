//! Replay of stored cases on the subjects that they name.

use seamproof_judge::case::{Case, InputSource, Subject};
use seamproof_judge::evaluate::{caught, evaluate};
use seamproof_judge::finding::Earlier;
use seamproof_judge::subject::{Backend, Outputs, RunError, lse};
use seamproof_judge::subjects::SubjectName;
use seamproof_judge::values;
use seamproof_judge::verdict::Verdict;
use seamproof_oracle::{Inputs, Problem};

use crate::backends::{self, BackendError};

/// Reason why a stored case cannot be evaluated.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// A case whose inputs are in a file.
    #[error(
        "inputs: they are those of the recording {file}, whose run is over; replay judges it, and explain shows it"
    )]
    Recorded {
        /// Name of the file.
        file: String,
    },
    /// A subject that cannot be made.
    #[error("subject: {0}")]
    Subject(#[from] BackendError),
}

/// Returns the subject of a stored case, ready to run.
pub fn subject_of(case: &Case) -> Result<Box<dyn Backend>, ReplayError> {
    if let InputSource::Recorded { file, .. } = &case.inputs {
        return Err(ReplayError::Recorded { file: file.clone() });
    }
    let Subject { name, options } = &case.subject;
    Ok(backends::by_name(name, options)?)
}

/// Whether this program cannot make the subject of a stored case. The subject is then another crate's, and only that
/// crate can judge the case on it.
pub fn is_foreign(case: &Case) -> bool {
    use BackendError::{Fault, Unknown};
    // Whether a subject outside of this program can be made is not asked: its workers would start.
    !SubjectName::from(&case.subject).is_outside()
        && matches!(subject_of(case), Err(ReplayError::Subject(Unknown { .. } | Fault { .. })))
}

/// Judges a stored case on its subject, after the runs that the case needs before it.
pub fn replay(case: &Case) -> Result<Verdict, ReplayError> {
    replay_as(case, subject_of(case)?.as_ref(), &case.problem)
}

/// Judges a problem in a case's place, on this subject, after the runs that the case needs before it.
pub fn replay_as(case: &Case, backend: &dyn Backend, problem: &Problem) -> Result<Verdict, ReplayError> {
    run_before(case)?;
    Ok(evaluate(backend, problem))
}

/// Runs a stored case once on this subject and these inputs, after the runs that the case needs before it. The LSE is
/// `[heads, rows]`, whatever layout the subject declares.
pub fn run_once(
    case: &Case,
    backend: &dyn Backend,
    inputs: &Inputs,
) -> Result<Result<Outputs, RunError>, ReplayError> {
    run_before(case)?;
    let run = || backend.run(&case.problem, inputs).and_then(|ran| lse::in_rows(backend, &case.problem, ran));
    let ran = caught(run);
    Ok(ran.unwrap_or_else(|what| Err(RunError::Infrastructure(what))))
}

/// Makes the runs that a case needs before it, on its subject. A thread goes back to the worker that it had, so the
/// case meets what these runs left behind; their own results do not count. For a subject with a fault at its call,
/// the stored runs are the wrong calls themselves, so they are made on the subject that is called.
fn run_before(case: &Case) -> Result<(), ReplayError> {
    for Earlier { options, problem } in &case.before {
        let called = SubjectName::from(&case.subject).called();
        let backend = backends::by_name(&called.name(), options)?;
        run_earlier(backend.as_ref(), problem);
    }
    Ok(())
}

/// Makes a run that comes before a case, for what it leaves behind. Its own results do not count.
pub(crate) fn run_earlier(backend: &dyn Backend, problem: &Problem) {
    let _ = caught(|| backend.run(problem, &values::inputs(problem)));
}
