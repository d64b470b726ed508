//! Reasons why a recording cannot be read or written. Each is one line that names the file and the field.

use std::io;
use std::path::{Path, PathBuf};

use seamproof_oracle::ProblemError;
use seamproof_oracle::sharding::ShardingError;

use super::{MANIFEST, NOTES, RECORDING_VERSION, SAMPLED_ELEMENTS_MAX};
use crate::record::RecordError;

/// Largest number of characters that an error quotes from a file.
const QUOTED_MAX: usize = 300;

/// Reason why a recording cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum RecordingError {
    /// A file or directory that the system does not give.
    #[error("{}: cannot be read: {source}", path.display())]
    Read {
        /// Path of the file or directory.
        path: PathBuf,
        /// Error of the file system.
        source: io::Error,
    },
    /// A file in the place of a directory.
    #[error("{}: is a file; name the directory that {MANIFEST} lies in", path.display())]
    NoDirectory {
        /// Path of the file.
        path: PathBuf,
    },
    /// A directory that has no manifest.
    #[error("{}: holds no {MANIFEST}, which a recorder writes last: this is no recording, or it was never finished", path.display())]
    Unfinished {
        /// Path of the directory.
        path: PathBuf,
    },
    /// A file that belongs to no recording.
    #[error("{}: does not belong to the recording; only {MANIFEST}, the rank files and {NOTES} may lie there", path.display())]
    Stranger {
        /// Path of the file.
        path: PathBuf,
    },
    /// A place that is taken.
    #[error("{}: is not an empty directory; name a new one, or an empty one, with --out", path.display())]
    Taken {
        /// Path of the directory.
        path: PathBuf,
    },
    /// A wrong field.
    #[error("{}: {field}: {fault}", path.display())]
    Field {
        /// Path of the file.
        path: PathBuf,
        /// Path of a field in the manifest, name of a tensor, or key of the metadata.
        field: String,
        /// What is wrong with it.
        fault: Box<Fault>,
    },
    /// A file that could not be written.
    #[error(transparent)]
    Write(#[from] RecordError),
}

/// What is wrong with a field of a recording, and what to do about it.
#[derive(Debug, thiserror::Error)]
pub enum Fault {
    /// A file that is no regular one.
    #[error("is {0}; put the file itself into the recording")]
    NoFile(&'static str),
    /// A file over its limit.
    #[error("is larger than {0} bytes, the limit of this file")]
    TooLarge(u64),
    /// Text that is no such JSON.
    #[error("{0}")]
    Json(String),
    /// A version that this program does not read.
    #[error("{0} is not supported; this program reads version {RECORDING_VERSION}")]
    Version(u64),
    /// A text over its limit.
    #[error("has {got} characters; write at most {most}")]
    Long {
        /// Number of characters.
        got: usize,
        /// Largest number of characters.
        most: usize,
    },
    /// A list or a map of a wrong length, or a tensor with too many rows.
    #[error("has {got} entries; {expected}")]
    Count {
        /// Number of entries or rows.
        got: usize,
        /// What it must have.
        expected: String,
    },
    /// A value that must be another one.
    #[error("is {got:?}, but {whose} {expected:?}; {advice}")]
    Differs {
        /// Value in the field.
        got: String,
        /// Where the right value is from, as in "recording.json says".
        whose: &'static str,
        /// Right value.
        expected: String,
        /// What to do.
        advice: &'static str,
    },
    /// A format or a scaling that is not read yet.
    #[error("{0} is not read yet; record in bf16, fp16 or f32 without scales")]
    Unscaled(String),
    /// Tables for ranks of a region.
    #[error("is tables; no table says which rows the statistics of a region's rank have, so write rule")]
    RegionTables,
    /// Fields that make no problem.
    #[error("{0}")]
    Problem(#[from] ProblemError),
    /// A problem that cannot be cut over its ranks.
    #[error("{0}")]
    Sharding(#[from] ShardingError),
    /// A problem that is larger than the judge takes.
    #[error(
        "has {got} tensor elements for each KV head; at most {SAMPLED_ELEMENTS_MAX} are judged: record fewer sequences"
    )]
    Elements {
        /// Number of elements.
        got: u64,
    },
    /// A file that is no safetensors file.
    #[error("is no safetensors header of this file: {0}; record the run again")]
    Header(String),
    /// Something required that is not there.
    #[error("is missing; {0}")]
    Missing(&'static str),
    /// A tensor or key that the format does not know, or that this recording must not have.
    #[error("is not expected; {0}")]
    Unexpected(&'static str),
    /// A tensor of a wrong shape.
    #[error("has shape {got:?}; recording.json asks for {expected:?}")]
    Shape {
        /// Shape of the tensor.
        got: Vec<usize>,
        /// Shape that it must have.
        expected: Vec<usize>,
    },
    /// A tensor of a wrong type.
    #[error("has dtype {got}; recording.json asks for {expected}")]
    Dtype {
        /// Type of the tensor.
        got: String,
        /// Types that it may have.
        expected: String,
    },
    /// A real row that holds no number, from which no answer follows.
    #[error(
        "holds {got} in row {row}, which is row {position} of sequence {sequence}: it was there before attention, and \
         no result of such a row can be judged; record the last step before it"
    )]
    NotFinite {
        /// Row of the rank's tensor.
        row: usize,
        /// Sequence of the row.
        sequence: usize,
        /// Place of the row in its sequence.
        position: usize,
        /// What it holds.
        got: f32,
    },
    /// An entry of a table that names no row.
    #[error("entry {row} is {got}; {expected}")]
    Entry {
        /// Row of the entry.
        row: usize,
        /// Value of the entry.
        got: i32,
        /// Values that it may have.
        expected: String,
    },
}

impl RecordingError {
    /// Returns the error about a field of a file.
    pub(super) fn field(path: &Path, field: impl ToString, fault: Fault) -> RecordingError {
        RecordingError::Field { path: path.to_owned(), field: quoted(field), fault: Box::new(fault) }
    }
}

/// Returns the beginning of a text from a file, on one line. It may be as long as the file.
pub(super) fn quoted(text: impl ToString) -> String {
    let plain = |letter: char| if letter.is_control() { ' ' } else { letter };
    text.to_string().chars().take(QUOTED_MAX).map(plain).collect()
}
