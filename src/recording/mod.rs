//! Recorded runs: the files of an attention call that has already happened, and their way to the judge.
//!
//! A *recording* is a directory. It holds one call of attention on all ranks of one context-parallel group: the inputs
//! and the results of each rank, as they were at the boundary of the call. `docs/recording.md` is the contract with
//! whoever writes recorders; version 1 is the one that this program reads and writes.
//!
//! ```text
//! DIR/recording.json            what ran: the manifest; written last and whole, so that its presence means complete
//! DIR/rank-0000.safetensors     tensors of the group's rank 0 in its own layout; and so on, one file a rank
//! DIR/notes.txt                 for people; never read
//! ```
//!
//! - *Manifest*: the problem, and how the files hold it ([`Manifest`]).
//! - *Rank file*: the tensors of one rank, padding rows and slack included.
//! - *Run id*: a text that all files of one run share. Files of two runs thus do not pass for one.
//! - *Placement*: which rank holds which position in which row. It follows from the problem's balance (*rule*), or
//!   stands in the rank files (*tables*).
//! - *Step* and *layer*: where in a training the call was made. They are the same in all files.
//! - *Share*: the heads that are in memory at once. [`read`] checks the files and keeps no head; [`judge`] reads them
//!   again for each share ([`Share`]).
//!
//! Files come from other programs and other machines, so reading trusts nothing. Links are not followed, no more of a
//! file is read than a limit allows, its digest is compared before anything in it is believed, and each error is one
//! line that names file and field.

mod error;
mod judged;
mod live;
mod manifest;
mod placement;
mod profile;
mod rank_file;
mod read;
mod share;
mod stored;
mod write;

pub use error::{Fault, RecordingError};
pub use judged::{asked, error_maps, judge, left_out};
pub use live::{NotLive, live_case};
pub use manifest::{
    DsinkForm, EmptyLse, FormatName, LseBase, LseForm, LseOrder, Manifest, Placement, RankEntry,
    RecordedArithmetic, RecordedProblem, RecordedSubject, Tile,
};
pub use placement::{RankTables, SideTable};
pub use profile::{NoReplay, Profiled, profiled};
pub use rank_file::{RankFile, RankPlace};
pub use read::{Recording, read};
pub use seamproof_judge::case::Sample;
pub use share::{SAMPLED_ELEMENTS_MAX, Share};
pub use stored::{case_of, read_beside, sample_of};
pub use write::{Made, check_free, write};

/// Version of the format that this program reads and writes.
pub const RECORDING_VERSION: u32 = 1;
/// Name of the manifest in a recording's directory.
pub const MANIFEST: &str = "recording.json";
/// Name of the file for people in a recording's directory.
pub const NOTES: &str = "notes.txt";
/// Size of the largest manifest, in bytes.
pub const MANIFEST_BYTES_MAX: u64 = 64 << 20;
/// Size of the largest rank file, in bytes. The tensors of the largest judged problem have half of it.
pub const RANK_BYTES_MAX: u64 = 1 << 30;
/// Size of the largest header of a rank file, in bytes.
pub const HEADER_BYTES_MAX: u64 = 16 << 20;
/// Largest number of rows that can be asked for: as many as a tensor can have.
pub const ROWS_MAX: u64 = seamproof_oracle::limits::ROWS_MAX as u64;
/// Largest number of ranks of a recording.
pub const RANKS_MAX: usize = 1024;
/// Largest number of characters of a recording's note.
pub const NOTE_MAX: usize = 4096;
/// Largest number of characters of a name, a version or a text in the metadata.
pub const TEXT_MAX: usize = 256;
/// Largest number of versions that a recording names.
pub const VERSIONS_MAX: usize = 64;

/// Returns the name of a rank's file. The number is the rank's place in the group.
pub fn rank_file_name(rank: usize) -> String {
    format!("rank-{rank:04}.safetensors")
}

/// Returns the digest of a file's bytes: BLAKE2b-256 in hex digits, which every Python has in its standard library.
fn digest(bytes: &[u8]) -> String {
    blake2b_simd::Params::new().hash_length(32).hash(bytes).to_hex().to_string()
}
