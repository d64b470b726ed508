//! What an entry of the catalogue is.

use seamproof_kernels::forward::{AttentionKernels, TileShape};
use seamproof_kernels::source::{Source, sources};
use seamproof_simulator::faults::Catcher;

/// What a fault is an example of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum BugClass {
    /// Offsets of the whole batch where a rank's are meant, or the other way round.
    GlobalOffset,
    /// −∞ treated as a number like others.
    MissingGuard,
    /// The first sequence taken to begin at row 0.
    FirstOffset,
    /// A product of rows and elements in 32 bits.
    Int32Product,
    /// The last sequence left out.
    LastSequence,
    /// A store behind the end.
    PastTheEnd,
    /// One table used in the role of another, or a seam between pieces missed.
    WrongSeam,
    /// A result rounded or combined otherwise than promised.
    Arithmetic,
}

/// What shows a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Detector {
    /// The comparison with the twin, bit for bit, in one of these operations.
    Bits(&'static [&'static str]),
    /// A campaign's judge, by one of these rungs.
    Rungs(&'static [Catcher]),
    /// The comparison on a tensor of more than 2^31 elements.
    Large,
    /// The forward on scores far from 0.
    Levels,
    /// The comparison on attention calls that no schedule makes.
    Calls,
    /// The driver: an access to an address that is nobody's.
    IllegalAddress,
    /// A deadline: the kernel does not end.
    Deadline,
}

impl Detector {
    /// Whether a comparison shows it; what does not is for campaigns.
    pub fn is_compared(self) -> bool {
        !matches!(self, Detector::Rungs(_) | Detector::IllegalAddress | Detector::Deadline)
    }
}

/// Wrong numbers in real rows.
pub(super) const VALUES: Detector = Detector::Rungs(&[Catcher::Exact, Catcher::Identity, Catcher::Envelope]);
/// Rows are read that nothing real is in.
pub(super) const READS: Detector =
    Detector::Rungs(&[Catcher::Poison, Catcher::Exact, Catcher::Identity, Catcher::Envelope]);
/// The same, and what is made of them may pass for what was never written.
pub(super) const SPREADS: Detector = Detector::Rungs(&[
    Catcher::Structure,
    Catcher::Poison,
    Catcher::Exact,
    Catcher::Identity,
    Catcher::Envelope,
]);
/// Rows are not written, or by another one's writer.
pub(super) const FORGETS: Detector =
    Detector::Rungs(&[Catcher::Structure, Catcher::Exact, Catcher::Identity, Catcher::Envelope]);
/// Padding is not as the contract says.
pub(super) const WRITES: Detector = Detector::Rungs(&[Catcher::Structure]);

/// An edit of a source.
#[derive(Clone, Copy, Debug)]
pub struct SourceFault {
    /// Its name.
    pub id: &'static str,
    /// What it is an example of.
    pub kind: BugClass,
    /// The bug that it imitates.
    pub imitates: &'static str,
    /// The source that is compiled with it.
    pub file: &'static str,
    /// The text that is replaced; in the source or in the header.
    pub find: &'static str,
    /// What it is replaced by.
    pub replace: &'static str,
    /// What shows it.
    pub seen: Detector,
    /// With which attention kernels, where a campaign's judge shows it.
    pub attention: AttentionKernels,
}

impl SourceFault {
    /// How often the text is in the source.
    pub fn matches(&self) -> usize {
        whole(self.file).map_or(0, |text| text.matches(self.find).count())
    }

    /// Every instance of the edited file, the header in it; none where the text is not there exactly once.
    pub fn edited(&self) -> Option<Vec<Source>> {
        Some(self.sources()?.into_iter().filter(|source| source.file == self.file).collect())
    }

    /// Every source, this file edited; none as in [`SourceFault::edited`].
    pub fn sources(&self) -> Option<Vec<Source>> {
        let text = whole(self.file).filter(|text| text.matches(self.find).count() == 1)?;
        let text = text.replace(self.find, self.replace);
        let of = |source: Source| match source.file == self.file {
            true => source.with_text(text.clone()),
            false => source,
        };
        Some(sources().into_iter().map(of).collect())
    }
}

/// The text of a source with its headers in their places.
pub(super) fn whole(file: &str) -> Option<String> {
    sources().into_iter().find(|source| source.file == file).map(|source| source.whole())
}

/// The bug that several catalogues imitate.
pub(super) const TE_1230: &str = "ragged offsets times heads and dim wrap in 32 bits: \
    https://github.com/NVIDIA/TransformerEngine/pull/1230";

/// A catalogue: which attention kernels show its entries; and of each its id, kind, what it imitates, source, text => text,
/// what shows it.
macro_rules! faults {
    ($attention:expr; $($id:literal, $kind:ident, $imitates:expr, $file:literal, $find:literal => $replace:literal, $seen:expr;)*) => {
        &[$(SourceFault {
            id: $id, kind: BugClass::$kind, imitates: $imitates, file: $file, find: $find, replace: $replace, seen: $seen,
            attention: $attention,
        }),*]
    };
}
pub(super) use faults;

pub(super) const SIMPLE: AttentionKernels = AttentionKernels::Simple;
/// Faults of the kernels on tensor cores show in the forward's long shape, some in that alone.
pub(super) const TUNED: AttentionKernels = AttentionKernels::Of(TileShape::Long);
/// Those of tiles with rows of several heads, which other shapes do not have.
pub(super) const PACKED: AttentionKernels = AttentionKernels::Of(TileShape::Middle);
/// Those of clusters, and of teams.
pub(super) const PAIRED: AttentionKernels = AttentionKernels::Of(TileShape::Paired);
pub(super) const SHORT: AttentionKernels = AttentionKernels::Of(TileShape::Short);
