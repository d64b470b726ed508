//! Options of a subject, as text.

use std::collections::BTreeMap;

/// Options of a subject by name.
pub type Options = BTreeMap<String, String>;

/// Reason why a subject does not take an option.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OptionError {
    /// An option that the subject does not have.
    #[error("backend {backend} has no option '{option}'; it has: {known}")]
    Unknown {
        /// Name of the subject.
        backend: &'static str,
        /// Name of the option.
        option: String,
        /// Options that the subject has.
        known: &'static str,
    },
    /// An option with an unusable value.
    #[error("option {option} of backend {backend} is '{value}'; use {expected}")]
    Value {
        /// Name of the subject.
        backend: &'static str,
        /// Name of the option.
        option: String,
        /// Value of the option.
        value: String,
        /// Values that the option takes.
        expected: &'static str,
    },
}
