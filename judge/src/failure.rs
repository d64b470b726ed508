//! The rule by which two failures count as the same.
//!
//! While a case shrinks, its [`Symptom`] must stay: the same check, identity and ending of the process, on the same
//! tensor. For the envelope, the error must also stay at twice the bound or more (or at the starting ratio, where
//! that was less). This keeps a real fault from shrinking into the grey zone of a bound. After shrinking, a
//! [`FailureKey`] adds the features that the minimal case could not lose.

use std::collections::BTreeSet;
use std::fmt;

use seamproof_oracle::{Alignment, Format, InputMode, Pass, Problem, Sequence, Sink};
use serde::Serialize;

use crate::finding::{Check, Ending, Finding, Relation};
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
    // A value that is not a number has no ratio: it counts as further off than any other.
    let ratio = |finding: &Finding| finding.ratio.unwrap_or(f64::INFINITY);
    let enough = finding.check != Check::Envelope || ratio(&finding) >= ratio(start).min(SHRINK_RATIO);
    (enough && Symptom::of(&finding) == Symptom::of(start)).then_some(*finding)
}

/// The properties that two minimal failures share when they are the same.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct FailureKey {
    /// The broken check.
    pub check: Check,
    /// The broken identity, for check `identity`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub identity: Option<Relation>,
    /// Ending of the subject's process, where the failure is that ending.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ending: Option<Ending>,
    /// Name of the subject.
    pub backend: String,
    /// The wrong tensor.
    pub tensor: Option<TensorName>,
    /// Features that the minimal case could not lose.
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

    /// Whether this failure is one that a key in words names: the same apart from features, and none of those that the
    /// words name is missing here. A smaller case of it may then show the named one.
    pub fn shows(&self, words: &str) -> bool {
        let Some(rest) = words.strip_prefix(&self.without_features().to_string()) else { return false };
        let named = rest.strip_prefix(SEPARATOR);
        rest.is_empty()
            || named.is_some_and(|named| {
                named.split(BETWEEN_FEATURES).all(|feature| self.features.contains(feature))
            })
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
    let any = |test: fn(&Sequence) -> bool| problem.sequences.iter().any(test);
    let owned = |span: fn(&Sequence) -> usize| problem.sequences.iter().map(span).sum::<usize>();
    let slack = owned(|s| s.q.span) < problem.rows.q || owned(|s| s.kv.span) < problem.rows.kv;
    let mask = problem.mask;
    let all = [
        ("several sequences", problem.sequences.len() > 1),
        ("no sequence", problem.sequences.is_empty()),
        ("empty sequence", any(|s| s.q.len == 0 || s.kv.len == 0)),
        ("cross lengths", any(|s| s.q.len != s.kv.len)),
        ("padding", any(|s| s.q.len < s.q.span || s.kv.len < s.kv.span)),
        ("strided rows", any(|s| s.q.step > 1 || s.kv.step > 1)),
        ("slack", slack),
        ("left window", mask.left.is_some()),
        ("causal", mask.is_causal()),
        ("right window", mask.right.is_some_and(|right| right > 0)),
        ("bottom-right", mask.align == Alignment::BottomRight && mask != FULL_BOTTOM_RIGHT),
        ("grouped heads", problem.heads.q > problem.heads.kv),
        ("several heads", problem.heads.kv > 1),
        ("v dim differs", problem.dims.qk != problem.dims.v),
        ("softcap", problem.softmax.softcap.is_some()),
        ("sink", problem.softmax.sink != Sink::None),
        ("not bf16", problem.precision.q.format != Format::Bf16),
        ("context parallel", problem.parallel.size() > 1),
        ("real values", problem.mode != InputMode::Integers && !problem.mode.is_exact()),
        ("backward", problem.pass == Pass::Backward),
    ];
    all.into_iter().filter_map(|(name, on)| on.then_some(name)).collect()
}

/// A mask without bounds, which has no diagonal to align.
const FULL_BOTTOM_RIGHT: seamproof_oracle::Mask =
    seamproof_oracle::Mask { left: None, right: None, align: Alignment::BottomRight };

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
    fn a_failure_shows_those_that_need_no_more_features() {
        let of = |tensor, features: &[&'static str]| FailureKey {
            features: features.iter().copied().collect(),
            ..FailureKey::without_problem(&finding(Check::Structure, tensor, None), "cuda")
        };
        let known = of(TensorName::Dk, &["backward", "slack"]).to_string();
        assert!(of(TensorName::Dk, &["backward", "slack"]).shows(&known));
        assert!(of(TensorName::Dk, &["backward", "causal", "slack"]).shows(&known));
        assert!(of(TensorName::Dk, &["backward"]).shows(&of(TensorName::Dk, &[]).to_string()));
        assert!(!of(TensorName::Dk, &["backward"]).shows(&known));
        assert!(!of(TensorName::Dq, &["backward", "slack"]).shows(&known));
        // A tensor whose name begins another's, and features that begin another's.
        assert!(!of(TensorName::Dsink, &["backward"]).shows(&of(TensorName::Dv, &["backward"]).to_string()));
        assert!(!of(TensorName::Dk, &["slack"]).shows("structure · cuda · dk2"));
        assert!(!of(TensorName::Dk, &["slack"]).shows("structure · cuda · dk · sla"));
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
