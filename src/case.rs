//! A [`Case`]: what is stored and replayed.

use std::collections::BTreeMap;

use seamproof_oracle::Problem;
use serde::{Deserialize, Serialize};

use crate::verdict::Finding;

/// The version that this program writes.
pub const CASE_VERSION: u32 = 1;

/// Where a stored case comes from, for a reader.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Story {
    /// What went wrong in the field, or why the case is kept.
    pub text: String,
    /// Public sources.
    pub sources: Vec<String>,
}

/// Which backend, and how it is set up.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Subject {
    /// The backend's name.
    pub name: String,
    /// Its options, as text; a backend refuses what it does not know.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub options: BTreeMap<String, String>,
}

/// Where the input values come from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum InputSource {
    /// From the problem's mode and data seed.
    Generated,
    /// From a safetensors file beside the case.
    Recorded {
        /// Its name.
        file: String,
        /// Its blake3 digest, in hex.
        digest: String,
    },
}

/// What is stored and replayed: one problem on one subject.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Case {
    /// Version of this format; see [`CASE_VERSION`].
    pub version: u32,
    /// Why the case is kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub story: Option<Story>,
    /// The subject that it is run on by default.
    pub subject: Subject,
    /// Seed of everything that a schedule leaves open (order of ranks' steps).
    pub schedule_seed: u64,
    /// The inputs.
    pub inputs: InputSource,
    /// The problem.
    pub problem: Problem,
    /// What was found, where the case is a finding.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub found: Option<Found>,
}

/// What a campaign found in a case.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Found {
    /// The broken check.
    pub finding: Finding,
    /// Whether the shrinker has finished with it.
    pub minimal: bool,
    /// Evaluations that the shrinker used.
    pub evaluations: usize,
}
