//! A declaration in JSON, as `docs/protocol.md` gives it.

use seamproof_oracle::envelope::Arithmetic;
use serde::{Deserialize, Serialize};

use super::{Declaration, PaddingContract, Partials, Promises, START_SECONDS, Table, TableError};

/// Largest number of seconds that opening a subject may take.
const START_SECONDS_MAX: u16 = 900;

/// Reason why a text is no declaration.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the declaration's {0}")]
pub struct DeclarationError(String);

/// A declaration whose rows were not yet checked against each other.
#[derive(Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Declared {
    table: Table,
    padding: PaddingContract,
    promises: Promises,
    arithmetic: Arithmetic,
    partials: Partials,
    refuses: bool,
    start_seconds: u16,
}

impl Default for Declared {
    fn default() -> Declared {
        Declared {
            table: Table::default(),
            padding: PaddingContract::default(),
            promises: Promises::default(),
            arithmetic: Arithmetic::default(),
            partials: Partials::default(),
            refuses: false,
            start_seconds: START_SECONDS,
        }
    }
}

/// Reason why rows of a declaration do not go together.
#[derive(Debug, thiserror::Error)]
pub(super) enum DeclaredError {
    #[error(transparent)]
    Table(#[from] TableError),
    #[error("start_seconds: {0} is out of range; use 1 to {START_SECONDS_MAX}")]
    StartSeconds(u16),
}

impl TryFrom<Declared> for Declaration {
    type Error = DeclaredError;

    fn try_from(declared: Declared) -> Result<Declaration, DeclaredError> {
        let Declared { table, padding, promises, arithmetic, partials, refuses, start_seconds } = declared;
        if !(1..=START_SECONDS_MAX).contains(&start_seconds) {
            return Err(DeclaredError::StartSeconds(start_seconds));
        }
        let table = table.validated()?;
        Ok(Declaration { table, padding, promises, arithmetic, partials, refuses, start_seconds })
    }
}

impl From<Declaration> for Declared {
    fn from(declaration: Declaration) -> Declared {
        let Declaration { table, padding, promises, arithmetic, partials, refuses, start_seconds } =
            declaration;
        Declared { table, padding, promises, arithmetic, partials, refuses, start_seconds }
    }
}

impl Declaration {
    /// Reads a declaration. An error names the field that is wrong by its path, and says what to do.
    pub fn from_json(text: &str) -> Result<Declaration, DeclarationError> {
        let mut deserializer = serde_json::Deserializer::from_str(text);
        let read: Result<Declared, _> = serde_path_to_error::deserialize(&mut deserializer);
        let declared = read.map_err(|error| {
            let at = error.path().to_string();
            DeclarationError(format!("{}: {}", if at == "." { "text" } else { &at }, error.inner()))
        })?;
        deserializer.end().map_err(|error| DeclarationError(format!("text: {error}")))?;
        Declaration::try_from(declared).map_err(|error| DeclarationError(error.to_string()))
    }
}
