//! The law of a kernel's memory: it grows no faster than the tokens do.

use seamproof_oracle::{Form, InputMode, Problem, ProblemFields, Sharing, Steps};

use super::asked::broken;
use crate::finding::Relation;
use crate::ladder::evidence::{Evidence, Look};
use crate::subject::RunError;
use crate::values;

/// Tokens of the runs, each twice as many as before.
const TOKENS: [usize; 3] = [64, 128, 256];

/// Asks one sequence of growing length, with everything else as the case has it. The peak bytes that the subject
/// reports never more than double. A subject that reports none is not asked.
pub(super) fn memory(evidence: &Evidence<'_>) -> Option<Look> {
    let mut amounts = Vec::new();
    for tokens in TOKENS {
        let probe = probe(evidence.problem, tokens)?;
        if evidence.backend.declaration().table.refusal(&probe).is_some() {
            evidence.told.outside.set(true);
            return None;
        }
        let inputs = evidence.making(|| values::inputs(&probe));
        match evidence.run(&probe, &inputs) {
            Ok(outputs) => amounts.push(outputs.costs.peak_bytes?),
            Err(RunError::Infrastructure(what)) => return Some(Look::Failed(what)),
            Err(error) => {
                let what = format!("in a run of {tokens} tokens: {error}");
                return Some(Look::Broken(Box::new(broken(Relation::Memory, None, what))));
            }
        }
    }
    let grows = amounts.windows(2).any(|pair| pair[1] > pair[0].saturating_mul(2));
    let finding = grows.then(|| {
        let what = format!("peak bytes grow faster than tokens do: {amounts:?} at {TOKENS:?} tokens");
        broken(Relation::Memory, None, what)
    });
    Some(finding.into())
}

/// Returns one sequence of so many tokens in the place of the problem's own; `None` on several ranks.
fn probe(problem: &Problem, tokens: usize) -> Option<Problem> {
    if !problem.parallel.is_whole() {
        return None;
    }
    let alone = ProblemFields::packed(&[(tokens, tokens)], 1);
    let fields = ProblemFields {
        sequences: alone.sequences,
        rows: alone.rows,
        mode: InputMode::Flat,
        form: Form::CuSeqlens,
        steps: Steps::default(),
        pages: None,
        sharing: Sharing::default(),
        ..problem.clone().into()
    };
    Problem::new(fields).ok()
}
