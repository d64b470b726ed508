//! Tier R for a recording: the roundings of the subject that ran, where its numeric profile is locked. What ran is the
//! word of whoever judges, since a name in a file says nothing about what ran under it.

use seamproof_judge::subject::Backend;
use seamproof_oracle::Side;
use seamproof_oracle::envelope::Partition;
use seamproof_oracle::replay::{Replay, ReplayedLaunch, ReplayedTiles};

use super::{Recording, Share};

/// Reason why the roundings of a recorded run are not replayed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoReplay {
    /// A subject without a profile.
    #[error("no profile is locked for {0}; `seamproof calibrate` with --lock makes one")]
    NoProfile(String),
    /// A profile for other versions than those that ran.
    #[error("the profile holds for {name} {locked}, and the recording was made by {recorded}")]
    Versions {
        /// What the version is of.
        name: String,
        /// Version of the profile.
        locked: String,
        /// Version of the recording, in words.
        recorded: String,
    },
    /// A subject that does not say how it computes the problem.
    #[error("{0} does not tell its launches of this problem, or not all choices of its arithmetic")]
    Untold(String),
}

/// How a recorded run computed, by the word of whoever judges.
#[derive(Clone, Debug)]
pub struct Profiled {
    /// Roundings of the run.
    pub replay: Replay,
    /// Cuts of its sums, which the manifest tells less closely.
    pub partition: Partition,
}

/// Returns how a recorded run computed if this subject made it. The versions of the profile must be those that the
/// recording names: of a subject of this program, the program's own.
pub fn profiled(recording: &Recording, subject: &dyn Backend) -> Result<Profiled, NoReplay> {
    let (name, problem) = (subject.name().to_owned(), &recording.problem);
    let lock = subject.lock().ok_or_else(|| NoReplay::NoProfile(name.clone()))?;
    let mut locked = lock.versions.clone();
    if locked.is_empty() {
        locked.insert("seamproof".into(), env!("CARGO_PKG_VERSION").into());
    }
    let recorded = &recording.manifest.subject.versions;
    if let Some((name, locked)) = locked.into_iter().find(|(name, locked)| recorded.get(name) != Some(locked))
    {
        let recorded = recorded.get(&name).map_or("a version that it does not name".into(), String::clone);
        return Err(NoReplay::Versions { name, locked, recorded });
    }
    let (arithmetic, partition) = (subject.declaration().arithmetic, subject.partition(problem));
    let (launches, tiles) = (|| subject.launches(problem), || subject.tiles(problem));
    let replay = lock.replay(problem, &arithmetic, partition, launches, tiles);
    Ok(Profiled { replay: replay.ok_or(NoReplay::Untold(name))?, partition })
}

/// Returns what is replayed of some heads.
pub(super) fn of_share(replay: &Replay, recording: &Recording, share: Share) -> Replay {
    let own = share.heads(&recording.problem, Side::Q);
    let cut = |launch: &ReplayedLaunch| {
        let heads = launch.heads.start.max(own.start)..launch.heads.end.min(own.end);
        let is_there = heads.start < heads.end;
        is_there.then(|| ReplayedLaunch {
            heads: heads.start - own.start..heads.end - own.start,
            ..launch.clone()
        })
    };
    let all = |launches: &[ReplayedLaunch]| launches.iter().filter_map(cut).collect::<Vec<_>>();
    let of_tiles = |tiles: &ReplayedTiles| {
        let launches = tiles.launches.iter().map(|launch| all(launch)).collect();
        ReplayedTiles { launches, ..*tiles }
    };
    let tiles = replay.tiles.as_ref().map(of_tiles);
    Replay { launches: all(&replay.launches), tiles, ..replay.clone() }
}
