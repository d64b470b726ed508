//! What became of a case: whether it held, was refused or failed, and what a failing case left on disk.

use super::event::{CaseEvent, Shrunk};
use super::groups::Groups;
use super::ways::Ways;
use crate::record::RecordError;
use seamproof_judge::case::Case;
use seamproof_judge::exercise::Exercise;
use seamproof_judge::finding::Finding;
use seamproof_judge::subject::Recall;
use seamproof_judge::verdict::{Cost, Margin};

/// What became of one case.
pub(super) struct Outcome {
    pub(super) index: u64,
    pub(super) tokens: u64,
    pub(super) products: u64,
    /// Elements of the results.
    pub(super) elements: u64,
    /// Work, by which the campaign's budget foretells times.
    pub(super) work: u64,
    pub(super) cost: Cost,
    /// The ways that a judged case went.
    pub(super) ways: Ways,
    /// The judged case's algorithm and ranks.
    pub(super) groups: Groups,
    /// What a judged case showed of the subject's table.
    pub(super) exercise: Exercise,
    pub(super) judged: Judged,
}

/// A case's verdict.
pub(super) enum Judged {
    Held(Box<Margin>),
    /// By a row of the table.
    Refused(&'static str),
    /// A malformed problem, refused by the rule that it breaks.
    Malformed(&'static str),
    /// A malformed problem that was not refused by its rule.
    Accepted(&'static str, Box<Finding>),
    Failed(Box<Failed>),
    /// In a search for the canary, a failure that is the subject's own.
    Own(Box<Failed>),
    Infrastructure(String),
    /// Nothing, as the program was asked to end and did not wait for the run.
    Abandoned,
}

/// A failing case, on disk as it was drawn.
pub(super) struct Failed {
    pub(super) name: String,
    pub(super) case: Case,
    pub(super) finding: Finding,
    /// What the process had run that ran the case, where the subject is in one.
    pub(super) recall: Option<Recall>,
    pub(super) recorded: Recorded,
}

/// What of a failing case is known.
pub(super) enum Recorded {
    /// It was judged now, and put on disk.
    Now(Result<(), RecordError>),
    /// A part of the campaign judged it: the finding says no more than its symptom, and this is what the part shrunk it
    /// to.
    Earlier(Option<Box<Shrunk>>),
    /// The same, and it was put on disk here, before the campaign was cut off.
    Before(Option<Box<Shrunk>>),
}

impl Outcome {
    /// Returns whether its failure is to be looked at, which may take minutes.
    pub(super) fn is_failure(&self) -> bool {
        matches!(self.judged, Judged::Failed(_) | Judged::Own(_))
    }

    /// Returns the outcome of a case that no subject computed anything for.
    pub(super) fn untouched(index: u64, judged: Judged) -> Outcome {
        let (ways, groups, exercise) = (Ways::default(), Groups::default(), Exercise::default());
        let (tokens, products, elements, work, cost) = (0, 0, 0, 0, Cost::default());
        Outcome { index, tokens, products, elements, work, cost, ways, groups, exercise, judged }
    }

    /// Returns the event that tells of it.
    pub(super) fn event(&self) -> CaseEvent<'_> {
        let event = CaseEvent { index: self.index, ..CaseEvent::default() };
        let finding = |finding: &Finding| CaseEvent {
            verdict: "finding",
            check: Some(finding.check),
            identity: finding.identity,
            ending: finding.ending,
            tensor: finding.tensor,
            ..event
        };
        match &self.judged {
            Judged::Held(margin) => CaseEvent { verdict: "held", margin: Some(margin.worst()), ..event },
            Judged::Refused(row) => CaseEvent { verdict: "refused", reason: Some(row), ..event },
            Judged::Malformed(rule) => CaseEvent { verdict: "malformed", reason: Some(rule), ..event },
            Judged::Infrastructure(what) => {
                CaseEvent { verdict: "infrastructure", reason: Some(what), ..event }
            }
            Judged::Accepted(_, broken) => finding(broken),
            Judged::Failed(failed) | Judged::Own(failed) => finding(&failed.finding),
            Judged::Abandoned => event,
        }
    }
}

impl Judged {
    pub(super) fn internal(what: &impl ToString) -> Judged {
        Judged::Infrastructure(what.to_string())
    }
}
