//! The sentinel: a fixed problem, fitted to the subject's table, that a worker runs now and then between the others.
//! The judge has found its results right once; from then on they must keep the same bits. Where they change, the worker
//! or its device has gone bad, and every run since the last good sentinel is doubtful.
//!
//! It is a forward pass, because the bits of a forward follow from its inputs for every subject, whatever the subject
//! promises.

use std::sync::Mutex;

use seamproof_oracle::{
    Format, Heads, InputMode, Inputs, Mask, Pass, Precision, Problem, ProblemError, ProblemFields, Softmax,
};

use super::message;
use super::session::Session;
use seamproof_judge::ladder::{Depth, Judge};
use seamproof_judge::subject::{Backend, Declaration, Outputs, RunError, Table};
use seamproof_judge::values;
use seamproof_judge::verdict::Verdict;

/// Lengths of the sentinel's sequences.
const LENGTHS: [usize; 3] = [65, 3, 60];
/// Data seed of the sentinel, by which a reader of a log knows it.
pub const SENTINEL_SEED: u64 = 0x5e17_1e1d;

/// Returns the fixed problem, or the nearest one that a table takes.
pub fn problem(table: &Table) -> Result<Problem, ProblemError> {
    let fixed = Problem::new(ProblemFields {
        heads: Heads { q: 2, kv: 1 },
        mask: Mask::CAUSAL,
        softmax: Softmax::scaled(0.125),
        precision: Precision { p: Format::F32.into(), ..Precision::uniform(Format::Bf16) },
        mode: InputMode::Peaked,
        data_seed: SENTINEL_SEED,
        pass: Pass::Forward,
        ..ProblemFields::packed(&LENGTHS.map(|len| (len, len)), 64)
    });
    fixed.map(|fixed| table.fitted(fixed))
}

/// Returns the body of the request that runs the sentinel of a subject.
pub(super) fn body(declaration: &dyn Backend) -> Result<Vec<u8>, ProblemError> {
    let problem = problem(&declaration.declaration().table)?;
    Ok(message::encode_run(&problem, &values::inputs(&problem)))
}

/// Returns the digest that is compared.
pub(super) fn digest(outputs: &Outputs) -> [u8; blake3::OUT_LEN] {
    *blake3::hash(&message::encode_outputs(outputs)).as_bytes()
}

/// Whether the judge finds the results of a fresh worker right, without the relations that ask for further runs;
/// `None` where there are no results.
pub(super) fn is_right(declaration: &dyn Backend, session: &mut Session) -> Option<bool> {
    let direct = Direct { declaration, session: Mutex::new(session) };
    let judge = Judge { identities: Vec::new(), ..Judge::default() };
    let table = declaration.declaration().table;
    let judged = problem(&table).map(|problem| judge.examine(&direct, &problem, Depth::First).verdict);
    match judged {
        Ok(Verdict::Pass(_)) => Some(true),
        Ok(Verdict::Finding(finding)) if !finding.check.is_end() => Some(false),
        Ok(Verdict::Refused(_)) => Some(false),
        _ => None,
    }
}

/// Returns the digest of the sentinel's results on a worker that has the subject open.
pub(super) fn run(declaration: &dyn Backend, session: &mut Session) -> Option<[u8; blake3::OUT_LEN]> {
    let outputs = session.run(&body(declaration).ok()?).ok()?.ok()?;
    Some(digest(&outputs))
}

/// A worker as a backend.
struct Direct<'a> {
    declaration: &'a dyn Backend,
    session: Mutex<&'a mut Session>,
}

impl Backend for Direct<'_> {
    fn name(&self) -> &str {
        self.declaration.name()
    }

    fn declaration(&self) -> Declaration {
        self.declaration.declaration()
    }

    fn inner(&self) -> Option<&dyn Backend> {
        Some(self.declaration)
    }

    fn run(&self, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
        let Ok(mut session) = self.session.lock() else {
            return Err(RunError::Infrastructure("a run of the sentinel panicked".into()));
        };
        let run = session.run(&message::encode_run(problem, inputs));
        run.unwrap_or_else(|death| Err(RunError::Crash(death.said)))
    }
}
