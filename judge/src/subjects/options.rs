//! Options of a subject, as text.

use std::collections::BTreeMap;

/// Options of a subject by name.
pub type Options = BTreeMap<String, String>;

/// `OPTION=VALUE,…`: options as a name holds them.
pub fn listed(options: &Options) -> String {
    let listed: Vec<String> = options.iter().map(|(option, value)| format!("{option}={value}")).collect();
    listed.join(",")
}

/// The options of a list such as [`listed`] makes.
pub(super) fn read(list: &str) -> Result<Options, OptionError> {
    let option = |item: &str| item.split_once('=').map(|(name, value)| (name.to_owned(), value.to_owned()));
    let wrong = || OptionError::List { text: list.chars().take(TEXT_SHOWN).collect() };
    list.split(',').map(option).collect::<Option<_>>().ok_or_else(wrong)
}

/// Letters of a list that an error repeats.
const TEXT_SHOWN: usize = 40;

/// Why a subject does not take an option.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OptionError {
    /// A list of options that is none.
    #[error("'{text}' is no list of options; write BACKEND:OPTION=VALUE,… or BACKEND alone")]
    List {
        /// The list.
        text: String,
    },
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
