//! A stored quantisation: a file like a case's, with a quantisation in place of the problem.

use seamproof_oracle::quantise::Quantisation;
use serde::{Deserialize, Serialize};

use crate::case::{ParseError, Story, parse_versioned};

/// A quantisation that is kept, with its reason. Its version is that of a case.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct QuantisationCase {
    /// Version of the format, [`CASE_VERSION`](crate::case::CASE_VERSION).
    pub version: u32,
    /// Reason why it is kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub story: Option<Story>,
    /// Name of the quantiser that is judged by default, with its options and a planted fault, where one is told.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backend: Option<String>,
    /// The quantisation, with generated values.
    pub quantisation: Quantisation,
}

impl QuantisationCase {
    /// Reads a case from bytes.
    pub fn parse(bytes: &[u8]) -> Result<QuantisationCase, ParseError> {
        parse_versioned(bytes)
    }

    /// Returns the case as readable JSON. Equal cases give equal bytes on every machine.
    pub fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).expect("a case has text keys and finite numbers") + "\n"
    }
}
