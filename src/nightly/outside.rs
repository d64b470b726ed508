//! Subjects from outside that a night looks for, from `outside.toml` of a corpus: adapters of kernels that others ship.

use std::path::Path;

use serde::Deserialize;

use super::NightError;
use super::home::read_toml;

/// The list.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Outside {
    /// Names, as `--backend` takes them.
    subjects: Vec<String>,
}

/// Returns the subjects that the list `path` names.
pub(crate) fn outside_of(path: &Path) -> Result<Vec<String>, NightError> {
    Ok(read_toml::<Outside>(path)?.subjects)
}
