//! Options of a subject, as text.

use std::collections::BTreeMap;

/// Options of a subject by name.
pub type Options = BTreeMap<String, String>;

/// Returns options as a name holds them: `OPTION=VALUE,…`.
pub fn listed(options: &Options) -> String {
    let listed: Vec<String> = options.iter().map(|(option, value)| format!("{option}={value}")).collect();
    listed.join(",")
}

/// Reads options that are [`listed`].
pub(super) fn read(list: &str) -> Result<Options, OptionError> {
    let wrong = || OptionError::List { text: list.chars().take(TEXT_SHOWN).collect() };
    let mut options = Options::new();
    for item in list.split(',') {
        let (option, value) = item.split_once('=').ok_or_else(wrong)?;
        if options.insert(option.to_owned(), value.to_owned()).is_some() {
            return Err(OptionError::Twice { option: option.chars().take(TEXT_SHOWN).collect() });
        }
    }
    Ok(options)
}

/// Largest number of characters of a list that an error repeats.
const TEXT_SHOWN: usize = 40;

/// Reason why a subject does not take an option.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OptionError {
    /// A text that is not a list of options.
    #[error("'{text}' is no list of options; write BACKEND:OPTION=VALUE,… or BACKEND alone")]
    List {
        /// Text that was given.
        text: String,
    },
    /// An option that is in the list more than once.
    #[error("option {option} is given more than once; give it one value")]
    Twice {
        /// Name of the option.
        option: String,
    },
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
