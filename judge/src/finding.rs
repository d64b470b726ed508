//! A finding: one broken check of one run, in the words that the judge, subjects, cases and workers share.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use seamproof_oracle::{Problem, TensorName};
use seamproof_simulator::faults::Catcher;
use serde::{Deserialize, Serialize};

/// Rung of the judge's ladder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Check {
    /// A refusal of what the subject's table takes, a run of what it refuses, or a refusal for another reason.
    Capability,
    /// Wrong shapes, guard bands, unwritten elements, or padding rows of outputs.
    Structure,
    /// Padding or slack of inputs that reached a real row.
    Poison,
    /// A result other than the one that inputs of an exact mode allow.
    Exact,
    /// Two runs that must agree and do not, or one that does not agree with itself.
    Identity,
    /// An element further from the exact answer than an honest subject can be.
    Envelope,
    /// A malformed problem that was accepted, or refused for another reason than the one planted.
    Validation,
    /// A subject that died.
    Crash,
    /// A subject that did not finish in its time.
    Timeout,
    /// A run with known results that came out differently: the process or device that ran it went bad.
    Sentinel,
}

impl Check {
    /// Every check, in the order in which reports list them: first those about the run as a whole, then those about
    /// its results. This is not the order of the ladder, on which identities come last.
    pub const ALL: [Check; 10] = [
        Check::Validation,
        Check::Capability,
        Check::Crash,
        Check::Timeout,
        Check::Sentinel,
        Check::Structure,
        Check::Poison,
        Check::Exact,
        Check::Identity,
        Check::Envelope,
    ];

    /// Returns the name in texts and files.
    pub fn name(self) -> &'static str {
        match self {
            Check::Capability => "capability",
            Check::Structure => "structure",
            Check::Poison => "poison",
            Check::Exact => "exact",
            Check::Identity => "identity",
            Check::Envelope => "envelope",
            Check::Validation => "validation",
            Check::Crash => "crash",
            Check::Timeout => "timeout",
            Check::Sentinel => "sentinel",
        }
    }

    /// Whether the check is the end of a subject that died or hung, and so gave no results.
    pub fn is_end(self) -> bool {
        matches!(self, Check::Crash | Check::Timeout)
    }

    /// What a fault that this check condemns is said to be caught by.
    pub fn catcher(self) -> Catcher {
        match self {
            Check::Capability => Catcher::Capability,
            Check::Crash | Check::Timeout | Check::Sentinel | Check::Validation => Catcher::Crash,
            Check::Structure => Catcher::Structure,
            Check::Poison => Catcher::Poison,
            Check::Exact => Catcher::Exact,
            Check::Identity => Catcher::Identity,
            Check::Envelope => Catcher::Envelope,
        }
    }
}

impl fmt::Display for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Place of an element, in the problem's terms.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Place {
    /// Index of the sequence; absent for rows that no sequence owns and for statistics of a whole head.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sequence: Option<usize>,
    /// Index of the head.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub head: Option<usize>,
    /// Position in the sequence, or row of the tensor where no sequence owns it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub row: Option<usize>,
    /// Lane of the head dimension.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lane: Option<usize>,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts =
            [("sequence", self.sequence), ("head", self.head), ("row", self.row), ("lane", self.lane)];
        let named: Vec<String> =
            parts.iter().filter_map(|(name, value)| Some(format!("{name} {}", (*value)?))).collect();
        f.write_str(&named.join(", "))
    }
}

/// Cause of a process's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Cause {
    /// A signal that the suite did not send.
    Signal(i32),
    /// An exit with this code.
    Exit(i32),
    /// An answer that the run failed, from a driver's error or the subject's own.
    Failed,
    /// An answer that memory ran out.
    OutOfMemory,
    /// Bytes that are not an answer.
    Garbage,
    /// An answer with a wrong digest.
    Digest,
    /// A passed deadline.
    Hang,
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Cause::Signal(number) => match SIGNALS.iter().find(|(known, _)| known == number) {
                Some((_, name)) => f.write_str(name),
                None => write!(f, "signal {number}"),
            },
            Cause::Exit(code) => write!(f, "exit code {code}"),
            Cause::Failed => f.write_str("failed"),
            Cause::OutOfMemory => f.write_str("out of memory"),
            Cause::Garbage => f.write_str("garbage"),
            Cause::Digest => f.write_str("wrong digest"),
            Cause::Hang => f.write_str("hung"),
        }
    }
}

/// Signals that a process may end itself by, where all systems agree on their numbers.
const SIGNALS: [(i32, &str); 6] =
    [(4, "SIGILL"), (6, "SIGABRT"), (8, "SIGFPE"), (9, "SIGKILL"), (11, "SIGSEGV"), (15, "SIGTERM")];

/// Ending of a subject's process during a run. Two crashes are the same if their endings are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ending {
    /// Cause of the end.
    pub cause: Cause,
    /// Last phase that the run reached; absent where it reached none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<Phase>,
}

impl Ending {
    /// Returns the check that this ending breaks.
    pub fn check(self) -> Check {
        if self.cause == Cause::Hang { Check::Timeout } else { Check::Crash }
    }
}

impl fmt::Display for Ending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.after {
            Some(phase) => write!(f, "{} after {phase}", self.cause),
            None => write!(f, "{} before the run was received", self.cause),
        }
    }
}

/// One broken check, with its worst element.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Finding {
    /// Broken check.
    pub check: Check,
    /// Relation that does not hold, for check [`Check::Identity`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub identity: Option<Relation>,
    /// Ending of the subject's process, for checks [`Check::Crash`] and [`Check::Timeout`] of a subject that has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ending: Option<Ending>,
    /// Wrong tensor; absent where the case as a whole is wrong.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tensor: Option<TensorName>,
    /// Place of the worst element.
    pub place: Place,
    /// Description of the error, in words.
    pub what: String,
    /// Value of the subject, as text, because JSON has no number for NaN and infinities.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub got: Option<String>,
    /// Right value, as text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expected: Option<String>,
    /// Largest honest error.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bound: Option<f64>,
    /// Error ÷ bound of the worst element; absent where there is no bound or the value is not a number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ratio: Option<f64>,
    /// Number of elements that failed.
    pub failed: usize,
    /// Number of elements that were compared.
    pub compared: usize,
    /// Runs that must come before this one for the failure to show. They are part of the case, not of the finding.
    #[serde(skip)]
    pub before: Vec<Earlier>,
}

/// Beginning of the words for a mistake that would explain a finding.
pub const LOOKS: &str = "looks as if ";
/// What stands between the words for several mistakes that would.
pub(crate) const OR: &str = ", or as if ";

/// Returns the mistakes that a finding's words name, each once.
fn mistakes(words: &str) -> BTreeSet<&str> {
    let told = words.split(LOOKS).skip(1).map(|told| told.split([';', '\n']).next().unwrap_or_default());
    told.flat_map(|told| told.split(OR)).map(|mistake| mistake.trim_end_matches('.')).collect()
}

/// Returns the mistakes that would explain several findings, given the words of each, and how many: those that explain most
/// come first. One mistake is often met as many findings, of which a smallest case may leave the choice between several.
pub fn common_mistakes<'a>(words: impl IntoIterator<Item = &'a str>) -> Vec<(&'a str, usize)> {
    let mut counts = BTreeMap::<&str, usize>::new();
    for mistake in words.into_iter().flat_map(mistakes) {
        *counts.entry(mistake).or_default() += 1;
    }
    let mut common: Vec<_> = counts.into_iter().filter(|(_, count)| *count > 1).collect();
    common.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    common
}

/// Sizes of a number that are written without an exponent.
const PLAIN: std::ops::Range<f64> = 1e-4..1e6;

/// Returns a value of a tensor as text: all of its digits, and an exponent where plain decimals would have many
/// zeros.
pub fn number<T: Copy + Into<f64> + fmt::Display + fmt::LowerExp>(value: T) -> String {
    let size = value.into().abs();
    let plain = size == 0.0 || !size.is_finite() || PLAIN.contains(&size);
    if plain { value.to_string() } else { format!("{value:e}") }
}

impl Finding {
    /// Returns a finding with only its check, its tensor and a description.
    pub fn new(check: Check, tensor: Option<TensorName>, what: String) -> Finding {
        Finding {
            check,
            identity: None,
            ending: None,
            tensor,
            place: Place::default(),
            what,
            got: None,
            expected: None,
            bound: None,
            ratio: None,
            failed: 0,
            compared: 0,
            before: Vec::new(),
        }
    }
}

impl Finding {
    /// Returns the finding without infinite ratios and bounds, which JSON cannot hold.
    pub fn storable(mut self) -> Finding {
        self.ratio = self.ratio.filter(|ratio| ratio.is_finite());
        self.bound = self.bound.filter(|bound| bound.is_finite());
        self
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.check)?;
        if let Some(identity) = self.identity {
            write!(f, " {identity}")?;
        }
        if let Some(tensor) = self.tensor {
            write!(f, " · {tensor}")?;
        }
        let place = self.place.to_string();
        if !place.is_empty() {
            write!(f, " · {place}")?;
        }
        write!(f, ": {}", self.what)?;
        if let (Some(got), Some(expected)) = (&self.got, &self.expected) {
            write!(f, "; got {got}, expected {expected}")?;
        }
        if let Some(bound) = self.bound {
            write!(f, " ± {bound:.3e}")?;
        }
        if let Some(ratio) = self.ratio {
            write!(f, " ({ratio:.3} × the bound)")?;
        }
        if self.compared > 0 {
            write!(f, "; {} of {} elements wrong", self.failed, self.compared)?;
        }
        Ok(())
    }
}

/// Name of an identity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[allow(missing_docs)]
pub enum Relation {
    PaddingAmount,
    Placement,
    SequenceOrder,
    Alone,
    EmptySequence,
    ClosingOffsets,
    OneRank,
    UnitValues,
    SumOfDv,
    SumOfDk,
    LinearInV,
    LinearInDout,
    ScaleFolding,
    Negation,
    RepeatedKvHeads,
    HeadOrder,
    WideWindow,
    MaskForm,
    NarrowerWindow,
    Prefix,
    Influence,
    Cotangent,
    Rerun,
    History,
    Euler,
    Mass,
    OtherForm,
    OneCall,
    Beside,
    Memory,
    OutOfPages,
}

impl Relation {
    /// Every relation, in order.
    pub const ALL: [Relation; 31] = [
        Relation::PaddingAmount,
        Relation::Placement,
        Relation::SequenceOrder,
        Relation::Alone,
        Relation::EmptySequence,
        Relation::ClosingOffsets,
        Relation::OneRank,
        Relation::UnitValues,
        Relation::SumOfDv,
        Relation::SumOfDk,
        Relation::LinearInV,
        Relation::LinearInDout,
        Relation::ScaleFolding,
        Relation::Negation,
        Relation::RepeatedKvHeads,
        Relation::HeadOrder,
        Relation::WideWindow,
        Relation::MaskForm,
        Relation::NarrowerWindow,
        Relation::Prefix,
        Relation::Influence,
        Relation::Cotangent,
        Relation::Rerun,
        Relation::History,
        Relation::Euler,
        Relation::Mass,
        Relation::OtherForm,
        Relation::OneCall,
        Relation::Beside,
        Relation::Memory,
        Relation::OutOfPages,
    ];

    /// Returns the name in texts and files.
    pub fn name(self) -> &'static str {
        match self {
            Relation::PaddingAmount => "padding-amount",
            Relation::Placement => "placement",
            Relation::SequenceOrder => "sequence-order",
            Relation::Alone => "alone",
            Relation::EmptySequence => "empty-sequence",
            Relation::ClosingOffsets => "closing-offsets",
            Relation::OneRank => "one-rank",
            Relation::UnitValues => "unit-values",
            Relation::SumOfDv => "sum-of-dv",
            Relation::SumOfDk => "sum-of-dk",
            Relation::LinearInV => "linear-in-v",
            Relation::LinearInDout => "linear-in-dout",
            Relation::ScaleFolding => "scale-folding",
            Relation::Negation => "negation",
            Relation::RepeatedKvHeads => "repeated-kv-heads",
            Relation::HeadOrder => "head-order",
            Relation::WideWindow => "wide-window",
            Relation::MaskForm => "mask-form",
            Relation::NarrowerWindow => "narrower-window",
            Relation::Prefix => "prefix",
            Relation::Influence => "influence",
            Relation::Cotangent => "cotangent",
            Relation::Rerun => "rerun",
            Relation::History => "history",
            Relation::Euler => "euler",
            Relation::Mass => "mass",
            Relation::OtherForm => "other-form",
            Relation::OneCall => "one-call",
            Relation::Beside => "beside",
            Relation::Memory => "memory",
            Relation::OutOfPages => "out-of-pages",
        }
    }
}

impl fmt::Display for Relation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Progress of a run. The last phase that was reached says where a dead worker stood.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// The worker has the whole request.
    Received,
    /// The inputs are on the device.
    Uploaded,
    /// A kernel is built for this shape. It may come several times, once for each kernel.
    Compiling,
    /// All launches are made; the rest of the run waits for the device.
    Launched,
    /// The results are back.
    Done,
}

impl Phase {
    /// Every phase, in order.
    pub const ALL: [Phase; 5] =
        [Phase::Received, Phase::Uploaded, Phase::Compiling, Phase::Launched, Phase::Done];

    /// Returns the name in texts and files.
    pub fn name(self) -> &'static str {
        match self {
            Phase::Received => "received",
            Phase::Uploaded => "uploaded",
            Phase::Compiling => "compiling",
            Phase::Launched => "launched",
            Phase::Done => "done",
        }
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A run that a failure needs before it, in the same process.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Earlier {
    /// Options of the case's subject in this run.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub options: BTreeMap<String, String>,
    /// Problem of the run, with generated inputs.
    pub problem: Problem,
}

#[cfg(test)]
mod tests {
    use super::{common_mistakes, number};

    #[test]
    fn a_number_keeps_its_digits_and_no_row_of_zeros() {
        assert_eq!(number(0.1_f32), "0.1");
        assert_eq!(number(-2.281_285_762_786_865_2), "-2.2812857627868652");
        assert_eq!(number(0.0), "0");
        assert_eq!(number(1e-4), "0.0001");
        assert_eq!(number(-1.5e-30_f32), "-1.5e-30");
        assert_eq!(number(f32::MIN), "-3.4028235e38");
        assert_eq!([number(f32::NAN), number(f64::NEG_INFINITY)], ["NaN", "-inf"]);
    }

    #[test]
    fn a_mistake_is_common_where_several_findings_look_like_it() {
        let left_out =
            "envelope · lse: off: looks as if the mask was aligned, or as if the mask was left out; got 1";
        let before = "exact · out: off; before shrinking: looks as if the mask was left out";
        let twice = "dq: looks as if x; before shrinking: looks as if x";
        let all = [left_out, before, "crash: it died", twice, left_out];
        assert_eq!(common_mistakes(all), [("the mask was left out", 3), ("the mask was aligned", 2)]);
        assert_eq!(common_mistakes([left_out, twice]), [], "each finding counts once");
    }
}
