//! The judge's verdict on one case.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::finding::{Finding, Relation};
use crate::subject::{Refusal, TensorName};

/// The envelope's tiers, from the weakest assumption to the tightest bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Tier {
    /// Worst case, for any input.
    W,
    /// Bound for inputs that are certified as dithered, where roundings may cancel.
    T,
    /// Bound for a subject whose numeric profile is locked: its roundings are replayed.
    R,
}

impl Tier {
    /// Every tier, in order.
    pub const ALL: [Tier; 3] = [Tier::W, Tier::T, Tier::R];
}

impl fmt::Display for Tier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// Worst error ÷ bound of each tensor in one tier; 0 where nothing was compared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct Ratios {
    pub lse: f64,
    pub out: f64,
    pub max_logit: f64,
    pub dq: f64,
    pub dk: f64,
    pub dv: f64,
    pub dsink: f64,
}

/// Distance of a passing case from its bounds, tier by tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Margin {
    /// Ratios in tier W.
    pub worst_case: Ratios,
    /// Ratios in tier T, over the elements where it is tighter than W.
    pub dithered: Ratios,
    /// Ratios in tier R.
    pub replayed: Ratios,
    /// Number of tensors that the envelope compared in full; 0 where the oracle is too expensive and a sample of rows
    /// was compared.
    #[serde(default)]
    pub compared: usize,
    /// Identities that were not asked, because their second problem lies outside the subject's table.
    #[serde(default)]
    pub not_asked: Relations,
}

/// A set of relations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Relations(u32);

impl Relations {
    /// Adds a relation.
    pub fn insert(&mut self, relation: Relation) {
        self.0 |= 1 << relation as u32;
    }

    /// Returns the relations, in order.
    pub fn iter(self) -> impl Iterator<Item = Relation> {
        Relation::ALL.into_iter().filter(move |relation| self.0 >> *relation as u32 & 1 == 1)
    }
}

impl Margin {
    /// Returns the ratios of one tier.
    pub fn tier(&self, tier: Tier) -> &Ratios {
        match tier {
            Tier::W => &self.worst_case,
            Tier::T => &self.dithered,
            Tier::R => &self.replayed,
        }
    }

    /// Returns the ratios of one tier, to change them.
    pub fn tier_mut(&mut self, tier: Tier) -> &mut Ratios {
        match tier {
            Tier::W => &mut self.worst_case,
            Tier::T => &mut self.dithered,
            Tier::R => &mut self.replayed,
        }
    }

    /// Takes in the margin of another part of the same case: the larger ratios, and what both parts compared.
    pub fn join(&mut self, other: &Margin) {
        for tier in Tier::ALL {
            for (tensor, ratio) in other.tier(tier).named() {
                if let Some(own) = self.tier_mut(tier).of_mut(tensor) {
                    *own = own.max(ratio);
                }
            }
        }
        self.compared = self.compared.min(other.compared);
        other.not_asked.iter().for_each(|relation| self.not_asked.insert(relation));
    }

    /// Returns the largest ratio of any tensor in any tier.
    pub fn worst(&self) -> f64 {
        Tier::ALL.iter().map(|tier| self.tier(*tier).worst()).fold(0.0, f64::max)
    }
}

impl Ratios {
    /// Returns the ratio of a tensor, to change it.
    pub fn of_mut(&mut self, tensor: TensorName) -> Option<&mut f64> {
        match tensor {
            TensorName::Lse => Some(&mut self.lse),
            TensorName::Out => Some(&mut self.out),
            TensorName::MaxLogit => Some(&mut self.max_logit),
            TensorName::Dq => Some(&mut self.dq),
            TensorName::Dk => Some(&mut self.dk),
            TensorName::Dv => Some(&mut self.dv),
            TensorName::Dsink => Some(&mut self.dsink),
            _ => None,
        }
    }

    /// Returns the ratio of each tensor, with the tensor's name.
    pub fn named(&self) -> [(TensorName, f64); 7] {
        [
            (TensorName::Lse, self.lse),
            (TensorName::Out, self.out),
            (TensorName::MaxLogit, self.max_logit),
            (TensorName::Dq, self.dq),
            (TensorName::Dk, self.dk),
            (TensorName::Dv, self.dv),
            (TensorName::Dsink, self.dsink),
        ]
    }

    /// Returns the largest of these ratios.
    pub fn worst(&self) -> f64 {
        self.named().iter().map(|(_, margin)| *margin).fold(0.0, f64::max)
    }
}

/// Time that a case took, by part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cost {
    /// Time for drawing inputs and filling their padding.
    pub inputs: Duration,
    /// Time in the subject: its runs, and its answers about its sums and launches.
    pub subject: Duration,
    /// Time in the oracle: exact values and their bounds.
    pub oracle: Duration,
    /// Time in the judge itself, which is everything else: layouts, structure, comparisons, identities.
    pub judge: Duration,
}

impl std::ops::AddAssign for Cost {
    fn add_assign(&mut self, other: Cost) {
        self.inputs += other.inputs;
        self.subject += other.subject;
        self.oracle += other.oracle;
        self.judge += other.judge;
    }
}

/// The judge's verdict on one case.
#[derive(Clone, Debug, PartialEq)]
pub enum Verdict {
    /// Every check held.
    Pass(Box<Margin>),
    /// Malformed fields, refused by the rule that they break.
    RefusedMalformed(&'static str),
    /// A refusal, exactly as the table says.
    Refused(Refusal),
    /// A broken check. A crash of the subject is a finding of check `Check::Crash`, a hang one of
    /// `Check::Timeout`.
    Finding(Box<Finding>),
    /// A case larger than the judge takes. Nothing was run.
    TooLarge(String),
    /// A failure of the harness, not of the subject.
    Infrastructure(String),
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Verdict::Pass(_) => write!(f, "every check holds"),
            Verdict::RefusedMalformed(rule) => write!(f, "refused as malformed: {rule}"),
            Verdict::Refused(refusal) => write!(f, "refused: {refusal}"),
            Verdict::Finding(finding) => write!(f, "{finding}"),
            Verdict::TooLarge(what) | Verdict::Infrastructure(what) => write!(f, "{what}"),
        }
    }
}

impl From<Finding> for Verdict {
    fn from(finding: Finding) -> Verdict {
        Verdict::Finding(Box::new(finding))
    }
}
