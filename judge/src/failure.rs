//! The rule by which two failures count as the same.
//!
//! While a case shrinks, its [`Symptom`] must stay: the same check, identity and ending of the process, on the same
//! tensor. For the envelope, the error must also stay at twice the bound or more (or at the starting ratio, where
//! that was less). This keeps a real fault from shrinking into the grey zone of a bound. An error that the subject
//! raises must stay of its type, such as `ValueError`; its message and its line may change, since they often name sizes
//! of the case. After shrinking, a [`FailureKey`] adds the features that the minimal case could not lose.

use std::collections::BTreeSet;
use std::fmt;

use seamproof_oracle::{Alignment, Blocks, Format, InputMode, Pass, Problem, Sequence, Sink};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};

use crate::finding::{Check, Ending, Finding, Relation};
use crate::generate::Malformed;
use crate::subject::TensorName;
use crate::verdict::Verdict;

/// Ratio to the bound that a candidate of check `envelope` must keep while shrinking, if the start had it.
pub const SHRINK_RATIO: f64 = 2.0;

/// The broken check, its identity and tensor, and the ending of the process where there is one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Symptom {
    check: Check,
    identity: Option<Relation>,
    ending: Option<Ending>,
    tensor: Option<TensorName>,
}

impl Symptom {
    /// Returns the symptom of a finding.
    pub fn of(finding: &Finding) -> Symptom {
        let Finding { check, identity, ending, tensor, .. } = *finding;
        Symptom { check, identity, ending, tensor }
    }

    /// Returns check, identity, ending and tensor in one word, for names of files.
    pub fn name(self) -> String {
        let ending = self
            .ending
            .map(|ending| format!("-{ending}").to_lowercase().replace(' ', "-"))
            .unwrap_or_default();
        let identity = self.identity.map(|identity| format!("-{identity}")).unwrap_or_default();
        let tensor = self.tensor.map(|tensor| format!("-{tensor}")).unwrap_or_default();
        format!("{}{identity}{ending}{tensor}", self.check)
    }
}

/// Returns the finding of a verdict, if it is the same failure as `start`.
pub fn same_failure(start: &Finding, verdict: Verdict) -> Option<Finding> {
    let Verdict::Finding(finding) = verdict else { return None };
    let enough = finding.check != Check::Envelope || ratio(&finding) >= ratio(start).min(SHRINK_RATIO);
    let is_same = Symptom::of(&finding) == Symptom::of(start) && raised(&finding) == raised(start);
    (enough && is_same).then_some(*finding)
}

/// Returns the type of the error that a subject raised, as the words of its finding begin with it; `None` where it
/// raised none, or they begin with no name.
fn raised(finding: &Finding) -> Option<&str> {
    let is_raised = finding.check == Check::Crash && finding.ending.is_none();
    let name = finding.what.split([':', '\n', ';']).next().filter(|_| is_raised)?;
    let is_name = |name: &str| name.chars().all(|letter| letter.is_alphanumeric() || "_.".contains(letter));
    (!name.is_empty() && is_name(name)).then_some(name)
}

/// Returns the error ÷ bound of a finding. A value that is not a number has no ratio: it counts as further off than any
/// other.
pub fn ratio(finding: &Finding) -> f64 {
    finding.ratio.unwrap_or(f64::INFINITY)
}

/// The properties that two minimal failures share when they are the same.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct FailureKey {
    /// The broken check.
    pub check: Check,
    /// The broken identity, for check `identity`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub identity: Option<Relation>,
    /// Ending of the subject's process, where the failure is that ending.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ending: Option<Ending>,
    /// Name of the subject.
    pub backend: String,
    /// The wrong tensor.
    pub tensor: Option<TensorName>,
    /// Features that the minimal case could not lose, or the rule that a malformed problem breaks.
    #[serde(deserialize_with = "named")]
    pub features: BTreeSet<&'static str>,
}

impl FailureKey {
    /// Returns the key of a finding on a problem.
    pub fn of(finding: &Finding, backend: &str, problem: &Problem) -> FailureKey {
        FailureKey { features: features(problem), ..FailureKey::without_problem(finding, backend) }
    }

    /// Returns the subject that a key in words names.
    pub fn subject_of(words: &str) -> Option<&str> {
        words.split(SEPARATOR).nth(1)
    }

    /// Returns the key without its features: any failure of this check on this tensor of the subject.
    pub fn without_features(&self) -> FailureKey {
        FailureKey { features: BTreeSet::new(), ..self.clone() }
    }

    /// Returns the key of a finding that no problem shows.
    pub fn without_problem(finding: &Finding, backend: &str) -> FailureKey {
        FailureKey {
            check: finding.check,
            identity: finding.identity,
            ending: finding.ending,
            backend: backend.to_owned(),
            tensor: finding.tensor,
            features: BTreeSet::new(),
        }
    }
}

/// Reads features by their names.
fn named<'de, D: Deserializer<'de>>(deserializer: D) -> Result<BTreeSet<&'static str>, D::Error> {
    let names = Vec::<String>::deserialize(deserializer)?;
    let known = || FEATURES.iter().map(|(name, _)| *name).chain(Malformed::rules());
    let named = |name: &String| {
        known().find(|known| known == name).ok_or_else(|| D::Error::custom(format!("no feature '{name}'")))
    };
    names.iter().map(named).collect()
}

/// Separator between the parts of a key in words: check (and identity), subject, ending, tensor, features.
const SEPARATOR: &str = " · ";
/// Separator between features in words.
const BETWEEN_FEATURES: &str = ", ";

impl fmt::Display for FailureKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.check)?;
        if let Some(identity) = self.identity {
            write!(f, " {identity}")?;
        }
        write!(f, "{SEPARATOR}{}", self.backend)?;
        if let Some(ending) = self.ending {
            write!(f, "{SEPARATOR}{ending}")?;
        }
        if let Some(tensor) = self.tensor {
            write!(f, "{SEPARATOR}{tensor}")?;
        }
        let features: Vec<_> = self.features.iter().copied().collect();
        if features.is_empty() { Ok(()) } else { write!(f, "{SEPARATOR}{}", features.join(BETWEEN_FEATURES)) }
    }
}

/// Returns everything about a problem that a simpler one would not have.
pub fn features(problem: &Problem) -> BTreeSet<&'static str> {
    FEATURES.into_iter().filter_map(|(name, has)| has(problem).then_some(name)).collect()
}

/// A feature by the words of keys, with the test whether a problem has it.
pub type Feature = (&'static str, fn(&Problem) -> bool);

/// Every feature.
pub const FEATURES: [Feature; 25] = [
    ("several sequences", |p| p.sequences.len() > 1),
    ("no sequence", |p| p.sequences.is_empty()),
    ("empty sequence", |p| p.sequences.iter().any(|s| s.q.len == 0 || s.kv.len == 0)),
    ("cross lengths", |p| p.sequences.iter().any(|s| s.q.len != s.kv.len)),
    ("padding", |p| p.sequences.iter().any(|s| s.q.len < s.q.span || s.kv.len < s.kv.span)),
    ("strided rows", |p| p.sequences.iter().any(|s| s.q.step > 1 || s.kv.step > 1)),
    ("slack", |p| owned(p, |s| s.q.span) < p.rows.q || owned(p, |s| s.kv.span) < p.rows.kv),
    ("left window", |p| p.mask.left.is_some()),
    ("causal", |p| p.mask.right == Some(0)),
    ("right window", |p| p.mask.right.is_some_and(|right| right > 0)),
    ("bottom-right", |p| p.mask.align == Alignment::BottomRight && p.mask != FULL_BOTTOM_RIGHT),
    ("documents", |p| matches!(p.mask.blocks, Some(Blocks::Documents(_)))),
    ("chunks", |p| matches!(p.mask.blocks, Some(Blocks::Chunks(_)))),
    ("prefix", |p| p.mask.prefix > 0),
    ("sink tokens", |p| p.mask.sink_tokens > 0),
    ("grouped heads", |p| p.heads.q > p.heads.kv),
    ("several heads", |p| p.heads.kv > 1),
    ("v dim differs", |p| p.dims.qk != p.dims.v),
    ("softcap", |p| p.softmax.softcap.is_some()),
    ("sink", |p| p.softmax.sink != Sink::None),
    ("not bf16", |p| p.precision.q.format != Format::Bf16),
    ("context parallel", |p| p.parallel.size() > 1),
    ("region", |p| p.parallel.region > 1),
    ("real values", |p| p.mode != InputMode::Integers && !p.mode.is_exact()),
    ("backward", |p| p.pass == Pass::Backward),
];

/// Returns the rows that sequences own.
fn owned(problem: &Problem, span: fn(&Sequence) -> usize) -> usize {
    problem.sequences.iter().map(span).sum()
}

/// A mask without bounds, which has no diagonal to align.
const FULL_BOTTOM_RIGHT: seamproof_oracle::Mask =
    seamproof_oracle::Mask { align: Alignment::BottomRight, ..seamproof_oracle::Mask::FULL };

#[cfg(test)]
mod tests {
    use super::*;

    fn finding(check: Check, tensor: TensorName, ratio: Option<f64>) -> Finding {
        Finding { ratio, failed: 1, compared: 1, ..Finding::new(check, Some(tensor), String::new()) }
    }

    fn same(start: &Finding, got: &Finding) -> bool {
        same_failure(start, Verdict::Finding(Box::new(got.clone()))).is_some()
    }

    #[test]
    fn the_same_failure_is_the_same_check_on_the_same_tensor_far_enough_over_its_bound() {
        let start = finding(Check::Envelope, TensorName::Out, Some(5.0));
        assert!(same(&start, &finding(Check::Envelope, TensorName::Out, Some(2.0))));
        assert!(same(&start, &finding(Check::Envelope, TensorName::Out, None)));
        assert!(!same(&start, &finding(Check::Envelope, TensorName::Out, Some(1.9))));
        assert!(!same(&start, &finding(Check::Envelope, TensorName::Dq, Some(5.0))));
        assert!(!same(&start, &finding(Check::Poison, TensorName::Out, Some(5.0))));
        let near = finding(Check::Envelope, TensorName::Out, Some(1.1));
        assert!(same(&near, &near));
        assert_eq!(same_failure(&start, Verdict::Pass(Box::default())), None);
        let nan = finding(Check::Envelope, TensorName::Out, None);
        assert!(!same(&nan, &near));
    }

    #[test]
    fn an_error_that_is_raised_stays_of_its_type() {
        let of = |what: &str| Finding::new(Check::Crash, None, what.to_owned());
        let start = of("ValueError: 3 rows\n  kernel.py:6 in attention: raise ValueError(rows)");
        assert!(same(&start, &of("ValueError: 1 rows; and again in a fresh worker")));
        assert!(same(&start, &of("ValueError")) && !same(&start, &of("TypeError: 3 rows")));
        assert!(same(&of("the driver failed: 7"), &of("the stream failed: 8")), "they name no type");
        let ended = |what: &str| Finding {
            ending: Some(Ending { cause: crate::finding::Cause::Failed, after: None }),
            ..of(what)
        };
        assert!(same(&ended("ValueError: 3 rows"), &ended("TypeError: 3 rows")), "the ending tells");
    }

    #[test]
    fn another_identity_is_another_failure() {
        let of = |relation| Finding {
            identity: Some(relation),
            ..finding(Check::Identity, TensorName::Out, None)
        };
        assert!(same(&of(Relation::Alone), &of(Relation::Alone)));
        assert!(!same(&of(Relation::Alone), &of(Relation::Rerun)));
        assert_eq!(Symptom::of(&of(Relation::Alone)).name(), "identity-alone-out");
    }
}
