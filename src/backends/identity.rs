//! Identity of a subject: the builds, versions and files behind its name and options. A campaign that was cut off goes on
//! only where all of these are what they were, as its first cases were otherwise run by another subject.

use std::collections::BTreeMap;
use std::env;
use std::fmt::{self, Display, Formatter};
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::{BESIDE, BITS_OF, BackendError, alone, is_on_gpu, outside};
use crate::worker::{self, own_program};
use seamproof_judge::subjects::{Options, SubjectName};
use seamproof_kernels::source::{Source, sources};

/// Number of digits of a hash.
const DIGITS: usize = 16;
/// Version that a subject may tell and that is left out: a scheduler may put a shard back on another device.
const DEVICE: &str = "device";

/// Error of a subject whose identity cannot be told.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// A file that cannot be read.
    #[error("{}: cannot be read: {source}", path.display())]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// Error of the file system.
        source: io::Error,
    },
    /// A subject that cannot be made.
    #[error(transparent)]
    Backend(#[from] BackendError),
}

/// Versions and hashes of what a subject consists of, by name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Identity(BTreeMap<String, String>);

impl Identity {
    /// Returns the identity of the subject of this name with these options, and of the one beside it. This program is
    /// part of it: it judges, and holds the subjects that are its own.
    pub(crate) fn of(name: &str, options: &Options) -> Result<Identity, IdentityError> {
        let program = format!("{} {}", env!("CARGO_PKG_VERSION"), hash_of(&own_program())?);
        let (mut parts, mut own) = (BTreeMap::new(), options.clone());
        let beside: Vec<String> = [BESIDE, BITS_OF].iter().filter_map(|option| own.remove(*option)).collect();
        parts.extend(parts_of(&SubjectName::new(name, own))?);
        for other in beside {
            let named = parts_of(&other.parse().map_err(BackendError::from)?)?;
            parts.extend(named.into_iter().map(|(part, value)| (format!("{part} of {other}"), value)));
        }
        // A subject may name a version as it likes, but not this one.
        parts.insert("seamproof".to_owned(), program);
        Ok(Identity(parts))
    }

    /// Returns what is another thing now than it was; `None` where everything is the same.
    pub(crate) fn changes(&self, now: &Identity) -> Option<Changes> {
        let both = |name: &String| (name.clone(), self.0.get(name).cloned(), now.0.get(name).cloned());
        let names = self.0.keys().chain(now.0.keys().filter(|name| !self.0.contains_key(*name)));
        let changes: Vec<Change> = names.map(both).filter(|(_, was, is)| was != is).collect();
        (!changes.is_empty()).then_some(Changes(changes))
    }
}

/// A part's name, what it was, and what it is.
type Change = (String, Option<String>, Option<String>);

/// Parts of a subject that are not what they were, in words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Changes(Vec<Change>);

impl Display for Changes {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        for (at, (name, was, is)) in self.0.iter().enumerate() {
            let joint = if at == 0 { "" } else { ", " };
            let was = was.as_ref().map_or("not recorded", String::as_str);
            write!(f, "{joint}{name} was {was} and is {}", is.as_ref().map_or("not there", String::as_str))?;
        }
        Ok(())
    }
}

/// Returns the parts of one subject.
fn parts_of(name: &SubjectName) -> Result<BTreeMap<String, String>, IdentityError> {
    let mut parts = alone(&name.name(), name.options.clone(), worker::shared())?.versions();
    parts.remove(DEVICE);
    if is_on_gpu(&name.called()) {
        parts.insert("kernels".to_owned(), hash_of_kernels());
    }
    for file in outside::files(&name.base) {
        parts.insert(file.display().to_string(), hash_of(&file)?);
    }
    Ok(parts)
}

/// Returns the hash of the sources of the kernels on a GPU.
fn hash_of_kernels() -> String {
    let all: Vec<String> = sources().iter().map(Source::digest).collect();
    shortened(blake3::hash(all.concat().as_bytes()))
}

fn hash_of(path: &Path) -> Result<String, IdentityError> {
    let mut hasher = blake3::Hasher::new();
    let read = File::open(path).and_then(|file| hasher.update_reader(file).map(drop));
    read.map_err(|source| IdentityError::Read { path: path.to_owned(), source })?;
    Ok(shortened(hasher.finalize()))
}

fn shortened(hash: blake3::Hash) -> String {
    hash.to_hex()[..DIGITS].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity(parts: &[(&str, &str)]) -> Identity {
        Identity(parts.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect())
    }

    #[test]
    fn a_change_says_what_was_and_what_is() {
        let was = identity(&[("a", "1"), ("b", "2"), ("c", "3")]);
        assert_eq!(was.changes(&was.clone()), None);
        let changes = was.changes(&identity(&[("a", "1"), ("b", "5"), ("d", "4")])).expect("it differs");
        let told = "b was 2 and is 5, c was 3 and is not there, d was not recorded and is 4";
        assert_eq!(changes.to_string(), told);
    }

    #[test]
    fn kernels_and_a_subject_beside_are_parts() {
        let options = Options::from([(BESIDE.to_owned(), "cuda".to_owned())]);
        let parts = |options: &Options| -> Vec<String> {
            let identity = Identity::of("cuda~call-scale-off", options).expect("it is told");
            identity.0.into_keys().collect()
        };
        assert_eq!(parts(&Options::new()), ["kernels", "seamproof"]);
        assert_eq!(parts(&options), ["kernels", "kernels of cuda", "seamproof"]);
    }
}
