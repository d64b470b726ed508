//! Entries of the catalogue.

use seamproof_kernels::backward::Walks;
use seamproof_kernels::forward::{AttentionKernels, Instance, TileShape};
use seamproof_kernels::forward_fp8::Fp8Shape;
use seamproof_kernels::source::{Source, sources};
use seamproof_simulator::faults::{Catcher, Fault};

/// A class of bugs.
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

/// A check that shows a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Detector {
    /// The comparison with the twin, bit for bit, in one of these operations.
    Bits(&'static [&'static str]),
    /// The judge of a campaign, by one of these rungs.
    Rungs(&'static [Catcher]),
    /// The comparison on a tensor of more than 2^31 elements.
    Large,
    /// The comparison of the forward on scores far from 0.
    Levels,
    /// The comparison on attention calls that no schedule makes.
    Calls,
    /// The judge of quantisers.
    Codes,
    /// The driver, which reports an access outside of all memory.
    IllegalAddress,
    /// A deadline, since the kernel does not end.
    Deadline,
}

impl Detector {
    /// Returns whether a comparison shows the fault. Campaigns show the others.
    pub fn is_compared(self) -> bool {
        !matches!(self, Detector::Rungs(_) | Detector::IllegalAddress | Detector::Deadline)
    }

    /// Returns the rungs of a campaign's judge that show the fault.
    pub(super) const fn rungs(self) -> &'static [Catcher] {
        if let Detector::Rungs(rungs) = self { rungs } else { &[] }
    }
}

/// The rungs that see wrong numbers in real rows.
pub(super) const VALUES: Detector = Detector::Rungs(&[Catcher::Exact, Catcher::Identity, Catcher::Envelope]);
/// The rungs that see rows read in which nothing is real.
pub(super) const READS: Detector =
    Detector::Rungs(&[Catcher::Poison, Catcher::Exact, Catcher::Identity, Catcher::Envelope]);
/// The rungs that see such reads where their results may pass for what was never written.
pub(super) const SPREADS: Detector = Detector::Rungs(&[
    Catcher::Structure,
    Catcher::Poison,
    Catcher::Exact,
    Catcher::Identity,
    Catcher::Envelope,
]);
/// The rungs that see rows that nobody writes, or that another row's writer writes.
pub(super) const FORGETS: Detector =
    Detector::Rungs(&[Catcher::Structure, Catcher::Exact, Catcher::Identity, Catcher::Envelope]);
/// The rung that sees padding other than the contract's.
pub(super) const WRITES: Detector = Detector::Rungs(&[Catcher::Structure]);

/// A planted fault of a kernel.
pub type SourceFault = Fault<SourceEdit>;

/// A bug and its public source.
pub(super) type BugSource = (&'static str, &'static str);

/// Kernels that a campaign launches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Launched {
    /// Attention in 16 bits, and the helpers around it.
    Attention(AttentionKernels),
    /// The same, with one block for each launch of attention on tensor cores.
    InOneBlock(AttentionKernels),
    /// Attention with head dims over 128, up to 256.
    Widest,
    /// The forward with head dims over 256.
    Latent,
    /// The backward's long form with over 64 lanes, its tiles of keys walking over query rows as named.
    Walking(Walks),
    /// The forward in FP8.
    Fp8(Fp8Shape),
    /// The same in one block.
    Fp8InOneBlock(Fp8Shape),
    /// The forward in FP8 in its long shape with head dims from 65 to 128, over rows of three blocks of keys or more.
    Fp8LongRows,
    /// The forward and the backward in FP8.
    Fp8Backward,
}

/// An edit of a source's text that plants a fault.
#[derive(Clone, Copy, Debug)]
pub struct SourceEdit {
    /// The class that the fault is an example of.
    pub kind: BugClass,
    /// The source that is compiled with the edit.
    pub file: &'static str,
    /// The text that is replaced, in the source or in a header of it.
    pub find: &'static str,
    /// The text that replaces it.
    pub replace: &'static str,
    /// The check that shows the fault.
    pub seen: Detector,
    /// The kernels with which a campaign's judge shows it.
    pub launched: Launched,
}

impl SourceEdit {
    /// Returns how often the text is in the source.
    pub fn matches(&self) -> usize {
        whole(self.file).map_or(0, |text| text.matches(self.find).count())
    }

    /// Returns every instance of the edited file, with its headers put in; `None` where the text is not there exactly
    /// once.
    pub fn edited(&self) -> Option<Vec<Source>> {
        Some(self.sources()?.into_iter().filter(|source| source.file == self.file).collect())
    }

    /// Returns an instance of the edited file that the fault is in; `None` where the text is not there exactly once.
    pub fn instance(&self) -> Option<Source> {
        let mut edited = self.edited()?.into_iter();
        let mut of = |instance: Instance| {
            let dim = format!("-DDIM={}", instance.dim());
            edited.find(|source| source.options.contains(&dim.as_str()))
        };
        match self.launched {
            Launched::Widest => of(Instance::Widest),
            Launched::Latent => of(Instance::Latent),
            Launched::Fp8LongRows => edited.rfind(|source| source.options.contains(&"-DDIM=128")),
            // Instances in FP8 are the last ones of a file. The last of all has every path.
            Launched::Fp8(_) | Launched::Fp8InOneBlock(_) | Launched::Fp8Backward => edited.next_back(),
            _ => edited.next(),
        }
    }

    /// Returns every source, with this file edited; `None` where the text is not there exactly once.
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

/// Returns the text of a source with its headers put in.
pub(super) fn whole(file: &str) -> Option<String> {
    sources().into_iter().find(|source| source.file == file).map(|source| source.whole())
}

/// A bug that several catalogues imitate.
pub(super) const TE_1230: BugSource = (
    "ragged offsets times heads and dim wrap in 32 bits",
    "https://github.com/NVIDIA/TransformerEngine/pull/1230",
);

/// Makes a catalogue. It takes the kernels that show its entries. Each entry has an id, a class, what it
/// imitates with its public source, a file, `text => text`, and the check that shows it.
macro_rules! faults {
    ($launched:expr; $($id:literal, $kind:ident, $imitates:expr, $file:literal, $find:literal => $replace:literal, $seen:expr;)*) => {
        &[$(SourceFault {
            id: $id,
            imitates: $imitates.0,
            source: $imitates.1,
            entries: &[],
            caught_by: $seen.rungs(),
            edit: SourceEdit {
                kind: BugClass::$kind, file: $file, find: $find, replace: $replace, seen: $seen, launched: $launched,
            },
        }),*]
    };
}
pub(super) use faults;

pub(super) const SIMPLE: Launched = Launched::Attention(AttentionKernels::Simple);
/// Faults of the kernels on tensor cores show in the forward's long shape, some in that alone.
pub(super) const TUNED: Launched = Launched::Attention(AttentionKernels::Of(TileShape::Long));
/// Faults of lanes past the 128th show where there are such.
pub(super) const WIDEST: Launched = Launched::Widest;
pub(super) const LATENT: Launched = Launched::Latent;
/// Faults of tiles with rows of several heads show in the middle shape, as in the long one.
pub(super) const PACKED: Launched = Launched::Attention(AttentionKernels::Of(TileShape::Middle));
/// Faults of clusters show in the paired shape, and faults of teams in the short one.
pub(super) const PAIRED: Launched = Launched::Attention(AttentionKernels::Of(TileShape::Paired));
pub(super) const SHORT: Launched = Launched::Attention(AttentionKernels::Of(TileShape::Short));
/// Faults of pieces of keys show in the split shape.
pub(super) const SPLIT: Launched = Launched::Attention(AttentionKernels::Of(TileShape::Split));
/// Faults of how a pack is divided show where its short and its long sequences have a launch each.
pub(super) const MIXED: Launched = Launched::Attention(AttentionKernels::Of(TileShape::Mixed));
/// Faults of a block's later tiles, and of a planner's later segments, show where there is one block.
pub(super) const FEW_BLOCKS: Launched = Launched::InOneBlock(AttentionKernels::Of(TileShape::Long));
/// Faults of a walk's later turns show in walks that go one way, and faults of the ways in which heads walk where they
/// differ.
pub(super) const WALKING: Launched = Launched::Walking(Walks::Down);
pub(super) const WALKING_BY_TURNS: Launched = Launched::Walking(Walks::ByTurns);
/// Faults of what a team in FP8 takes along to its next tile show where one block has all.
pub(super) const FEW_BLOCKS_IN_FP8: Launched = Launched::Fp8InOneBlock(Fp8Shape::Short);
/// Faults of the backward in FP8 show behind a forward in any shape.
pub(super) const BACKWARD_IN_FP8: Launched = Launched::Fp8Backward;
/// Faults of the forward in FP8 show in its long shape.
pub(super) const IN_FP8: Launched = Launched::Fp8(Fp8Shape::Long);
/// Faults of how a block is added to the sum of others show where there are three.
pub(super) const LONG_ROWS_IN_FP8: Launched = Launched::Fp8LongRows;
