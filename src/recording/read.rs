//! Reading of a recording's files.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Read};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use seamproof_oracle::sharding::{RankLayout, layouts};
use seamproof_oracle::{Algorithm, Problem};

use super::placement::said;
use super::rank_file::RankPlace;
use super::{
    Fault, MANIFEST, MANIFEST_BYTES_MAX, Manifest, NOTES, Placement, RANK_BYTES_MAX, RankFile,
    RecordingError, SAMPLED_ELEMENTS_MAX, Share, rank_file_name,
};

/// A recording, as it was read: each file is whole and has the shapes that the manifest asks for. Its heads are not in
/// memory.
#[derive(Clone, Debug)]
pub struct Recording {
    /// Directory of the files.
    pub dir: PathBuf,
    /// BLAKE3 digest of the manifest, in hex digits.
    pub digest: String,
    /// What ran.
    pub manifest: Manifest,
    /// Problem of the manifest.
    pub problem: Problem,
    /// Layouts by the rule; `None` where tables place the rows.
    pub rule: Option<Vec<RankLayout>>,
    /// Files of the ranks, in group order, without any head: which tensors there are, and the tables.
    pub ranks: Vec<RankFile>,
}

/// Reads a recording.
pub fn read(dir: &Path) -> Result<Recording, RecordingError> {
    let path = dir.join(MANIFEST);
    let bytes = match read_plain(&path, MANIFEST_BYTES_MAX) {
        Err(RecordingError::Read { source, .. }) if source.kind() == ErrorKind::NotFound && dir.is_dir() => {
            return Err(RecordingError::Unfinished { path: dir.to_owned() });
        }
        Err(RecordingError::Read { .. }) if dir.is_file() => {
            return Err(RecordingError::NoDirectory { path: dir.to_owned() });
        }
        read => read?,
    };
    let (manifest, problem) = Manifest::parse(&path, &bytes)?;
    let digest = blake3::hash(&bytes).to_hex().to_string();
    check_strangers(dir, manifest.ranks.len())?;
    let of_head = problem.elements() / problem.heads.kv as u64;
    if of_head > SAMPLED_ELEMENTS_MAX {
        return Err(RecordingError::field(&path, "problem", Fault::Elements { got: of_head }));
    }
    // One rank holds the problem's own layout, whatever the placement.
    let is_ruled = manifest.placement == Placement::Rule || problem.parallel.algorithm == Algorithm::Single;
    let cut = || layouts(&problem).map_err(|error| RecordingError::field(&path, "problem", error.into()));
    let rule = if is_ruled { Some(cut()?) } else { None };
    let mut recording = Recording { dir: dir.to_owned(), digest, manifest, problem, rule, ranks: Vec::new() };
    recording.ranks = recording.read_ranks()?;
    Ok(recording)
}

impl Recording {
    fn read_ranks(&self) -> Result<Vec<RankFile>, RecordingError> {
        let mut ranks: Vec<RankFile> = Vec::with_capacity(self.manifest.ranks.len());
        let mut rows = [0; 2];
        for rank in 0..self.manifest.ranks.len() {
            let path = self.dir.join(rank_file_name(rank));
            let file = self.read_rank(rank, Share::NONE)?;
            if let Some(first) = ranks.first() {
                check_same(&path, "seamproof.step", &file.step, &first.step)?;
                check_same(&path, "seamproof.layer", &file.layer, &first.layer)?;
                check_statistics(&path, &file, first)?;
            }
            // By the rule, each rank has the rows that it should have.
            if self.rule.is_none() {
                rows[0] += file.inputs.q.shape()[0];
                rows[1] += file.inputs.k.shape()[0];
                self.check_rows(&path, rows)?;
            }
            ranks.push(file);
        }
        Ok(ranks)
    }

    /// Returns the layouts of the ranks: those of the rule, or as the tables say, which may give a position to no rank
    /// or to several.
    pub fn layouts(&self) -> Vec<RankLayout> {
        let tables = || self.ranks.iter().filter_map(|rank| rank.tables.as_ref());
        self.rule.clone().unwrap_or_else(|| said(&self.problem, tables()).collect())
    }

    /// Reads some heads of a rank's file.
    pub(super) fn read_rank(&self, rank: usize, share: Share) -> Result<RankFile, RecordingError> {
        let Recording { manifest, problem, rule, .. } = self;
        let path = &self.dir.join(rank_file_name(rank));
        let bytes = read_plain(path, RANK_BYTES_MAX)?;
        check_digest(path, &bytes, &manifest.ranks[rank].blake2b)?;
        let layout = rule.as_ref().map(|layouts| &layouts[rank]);
        RankFile::parse(path, &bytes, RankPlace { manifest, problem, rank, layout, share })
    }

    /// Checks that the ranks up to this one have no more rows together than the problem.
    fn check_rows(&self, path: &Path, [q, kv]: [usize; 2]) -> Result<(), RecordingError> {
        let most = self.problem.rows;
        match [("q", q, most.q), ("k", kv, most.kv)].into_iter().find(|(_, got, most)| got > most) {
            None => Ok(()),
            Some((field, got, most)) => {
                let expected = format!("problem.rows says that all ranks together have {most}");
                Err(RecordingError::field(path, field, Fault::Count { got, expected }))
            }
        }
    }
}

/// Refuses files that belong to no recording of this many ranks. Of a full directory only the beginning is listed.
fn check_strangers(dir: &Path, ranks: usize) -> Result<(), RecordingError> {
    let unread = |source| RecordingError::Read { path: dir.to_owned(), source };
    let mut known: BTreeSet<String> = (0..ranks).map(rank_file_name).collect();
    known.extend([MANIFEST.to_owned(), NOTES.to_owned()]);
    for entry in fs::read_dir(dir).map_err(unread)? {
        let name = entry.map_err(unread)?.file_name();
        if !name.to_str().is_some_and(|name| known.contains(name)) {
            return Err(RecordingError::Stranger { path: dir.join(name) });
        }
    }
    Ok(())
}

fn check_digest(path: &Path, bytes: &[u8], expected: &str) -> Result<(), RecordingError> {
    let got = super::digest(bytes);
    if got == expected {
        return Ok(());
    }
    let fault = Fault::Differs {
        got,
        whose: "recording.json says",
        expected: super::error::quoted(expected),
        advice: "the file is torn or was changed; record the run again",
    };
    Err(RecordingError::field(path, "blake2b", fault))
}

/// Checks that a text of the metadata is the one of rank 0.
fn check_same(path: &Path, field: &str, got: &str, first: &str) -> Result<(), RecordingError> {
    if got == first {
        return Ok(());
    }
    let fault = Fault::Differs {
        got: got.to_owned(),
        whose: "rank 0 says",
        expected: first.to_owned(),
        advice: "the files are not of one call; record it again",
    };
    Err(RecordingError::field(path, field, fault))
}

/// Checks that a rank has the statistics and the tables that rank 0 has.
fn check_statistics(path: &Path, file: &RankFile, first: &RankFile) -> Result<(), RecordingError> {
    let there = |file: &RankFile| {
        [
            ("lse", file.outputs.lse.is_some()),
            ("max_logit", file.outputs.max_logit.is_some()),
            ("q.sequence", file.tables.is_some()),
        ]
    };
    let differs = there(file).into_iter().zip(there(first)).find(|(own, first)| own.1 != first.1);
    let Some(((field, is_there), _)) = differs else { return Ok(()) };
    let fault = match is_there {
        true => Fault::Unexpected("rank 0 has none; write it on all ranks or on none"),
        false => Fault::Missing("rank 0 has it; write it on all ranks or on none"),
    };
    Err(RecordingError::field(path, field, fault))
}

/// Reads a regular file of at most `limit` bytes. A link is not followed, and a pipe is not waited for.
fn read_plain(path: &Path, limit: u64) -> Result<Vec<u8>, RecordingError> {
    let wrong = |fault| RecordingError::field(path, "file", fault);
    let unread = |source| RecordingError::Read { path: path.to_owned(), source };
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = match rustix::fs::open(path, flags, Mode::empty()) {
        Ok(file) => File::from(file),
        Err(Errno::NOENT) if path.file_name().is_some_and(|name| name != MANIFEST) => {
            return Err(wrong(Fault::Missing(
                "recording.json lists it; copy all files, or record the run again",
            )));
        }
        Err(Errno::LOOP) => return Err(wrong(Fault::NoFile("a symbolic link"))),
        Err(error) => return Err(unread(io::Error::from(error))),
    };
    let found = file.metadata().map_err(unread)?;
    if !found.is_file() {
        return Err(wrong(Fault::NoFile("no regular file")));
    }
    // The limit is checked while reading too, because a file may grow.
    let mut bytes = Vec::new();
    if found.len() <= limit {
        file.take(limit + 1).read_to_end(&mut bytes).map_err(unread)?;
    }
    match found.len().max(bytes.len() as u64) {
        size if size > limit => Err(wrong(Fault::TooLarge(limit))),
        _ => Ok(bytes),
    }
}
