//! Options of a subject, as text.

use std::collections::BTreeMap;

/// Options of a subject by name.
pub type Options = BTreeMap<String, String>;

/// Why a subject does not take an option.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OptionError {
    /// The subject has no such option.
    #[error("backend {backend} has no option '{option}'; it has: {known}")]
    Unknown {
        /// The subject.
        backend: &'static str,
        /// The option.
        option: String,
        /// The options that it has.
        known: &'static str,
    },
    /// The option's value is not usable.
    #[error("option {option} of backend {backend} is '{value}'; use {expected}")]
    Value {
        /// The subject.
        backend: &'static str,
        /// The option.
        option: String,
        /// Its value.
        value: String,
        /// The values that it takes.
        expected: &'static str,
    },
}
