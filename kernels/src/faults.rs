//! Planted faults: edits of a source's text that turn a kernel into one that a real bug lived in.
//!
//! An edit replaces a text that is in its source, the header put into it, exactly once. Every edited source must compile
//! (`seamproof kernels build --faults`), so that no edit outlives the code that it is about; on a GPU each must be caught
//! where it says (`seamproof kernels check --plant all`, and `seamproof faults --gpu --score`).

mod attention;
mod backward;
mod forward;

use seamproof_simulator::faults::Catcher;

use crate::forward::{Attention, Shape};
use crate::source::{Source, sources};

/// What a fault is an example of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
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
pub enum Seen {
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

impl Seen {
    /// Whether a comparison shows it; what does not is for campaigns.
    pub fn is_compared(self) -> bool {
        !matches!(self, Seen::Rungs(_) | Seen::IllegalAddress | Seen::Deadline)
    }
}

/// Wrong numbers in real rows.
const VALUES: Seen = Seen::Rungs(&[Catcher::Exact, Catcher::Identity, Catcher::Envelope]);
/// Rows are read that nothing real is in.
const READS: Seen = Seen::Rungs(&[Catcher::Poison, Catcher::Exact, Catcher::Identity, Catcher::Envelope]);
/// The same, and what is made of them may pass for what was never written.
const SPREADS: Seen =
    Seen::Rungs(&[Catcher::Structure, Catcher::Poison, Catcher::Exact, Catcher::Identity, Catcher::Envelope]);
/// Rows are not written, or by another one's writer.
const FORGETS: Seen =
    Seen::Rungs(&[Catcher::Structure, Catcher::Exact, Catcher::Identity, Catcher::Envelope]);
/// Padding is not as the contract says.
const WRITES: Seen = Seen::Rungs(&[Catcher::Structure]);

/// An edit of a source.
#[derive(Clone, Copy, Debug)]
pub struct SourceFault {
    /// Its name.
    pub id: &'static str,
    /// What it is an example of.
    pub kind: Kind,
    /// The bug that it imitates.
    pub imitates: &'static str,
    /// The source that is compiled with it.
    pub file: &'static str,
    /// The text that is replaced; in the source or in the header.
    pub find: &'static str,
    /// What it is replaced by.
    pub replace: &'static str,
    /// What shows it.
    pub seen: Seen,
    /// With which attention kernels, where a campaign's judge shows it.
    pub attention: Attention,
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
            true => Source { text: text.clone(), ..source },
            false => source,
        };
        Some(sources().into_iter().map(of).collect())
    }
}

/// The text of a source with its headers in their places.
fn whole(file: &str) -> Option<String> {
    sources().into_iter().find(|source| source.file == file).map(|source| source.whole())
}

const TE_2596: &str = "global padded offsets on a rank's shard: \
    https://github.com/NVIDIA/TransformerEngine/pull/2596";
const TE_2829: &str = "first padded offset assumed 0, offset table read at -1: \
    https://github.com/NVIDIA/TransformerEngine/pull/2829";
const VLLM_39148: &str =
    "NaN from merging two empty states: https://github.com/vllm-project/vllm/issues/39148";
const FLASHINFER_4051: &str =
    "merge lacks the case empty and empty: https://github.com/flashinfer-ai/flashinfer/issues/4051";
const VLLM_49294: &str =
    "an empty range's undefined out merged as if valid: https://github.com/vllm-project/vllm/issues/49294";
const TE_1230: &str = "ragged offsets times heads and dim wrap in 32 bits: \
    https://github.com/NVIDIA/TransformerEngine/pull/1230";
const TE_2548: &str = "a row times a length in int: https://github.com/NVIDIA/TransformerEngine/issues/2548";
const MAGI_28: &str = "a table of ranges read one entry too far, or one too few: \
    https://github.com/SandAI-org/MagiAttention/pull/28";
const FA_A3A257C7: &str = "a store bounded by the tile's end and not by the sequence's: \
    https://github.com/Dao-AILab/flash-attention/commit/a3a257c7";
const TE_2892: &str = "one table in the roles of real and padded offsets: \
    https://github.com/NVIDIA/TransformerEngine/issues/2892";
const TE_2186: &str = "a last chunk of nothing but padding: \
    https://github.com/NVIDIA/TransformerEngine/issues/2186";
const TE_CORRECTION: &str = "the product rounded before it is added is part of the contract: \
    https://github.com/NVIDIA/TransformerEngine, common/fused_attn/context_parallel.cu";
const TE_STRIPED: &str = "lengths from ids and offsets from positions: \
    https://github.com/NVIDIA/TransformerEngine, transformer_engine/jax/attention.py";
const PYTORCH_186142: &str =
    "illegal address, scratch sized from the wrong axis: https://github.com/pytorch/pytorch/issues/186142";

/// A catalogue: which attention kernels show its entries; and of each its id, kind, what it imitates, source, text => text,
/// what shows it.
macro_rules! faults {
    ($attention:expr; $($id:literal, $kind:ident, $imitates:expr, $file:literal, $find:literal => $replace:literal, $seen:expr;)*) => {
        &[$(SourceFault {
            id: $id, kind: Kind::$kind, imitates: $imitates, file: $file, find: $find, replace: $replace, seen: $seen,
            attention: $attention,
        }),*]
    };
}
use faults;

const SIMPLE: Attention = Attention::Simple;
/// Faults of the kernels on tensor cores show in the forward's long shape, some in that alone.
const TUNED: Attention = Attention::Of(Shape::Long);
/// Those of tiles with rows of several heads, which other shapes do not have.
const PACKED: Attention = Attention::Of(Shape::Middle);
/// Those of clusters, and of teams.
const PAIRED: Attention = Attention::Of(Shape::Paired);
const SHORT: Attention = Attention::Of(Shape::Short);

const GATHERS: &[&str] = &["all-gather segments", "all-gather backward segments"];
const HALVES: &[&str] =
    &["read half", "write half", "merge of statistics", "merge of out", "accumulation", "half statistic"];
const SEARCHES: &[&str] =
    &["copy valid", "fill padding", "reorder", "partition indices", "read half", "write half", "valid mask"];
const REAL_ROWS: &[&str] = &["copy valid", "fill padding", "valid mask"];
const MERGES: &[&str] = &["merge of statistics", "merge of out"];

/// Every planted fault of a kernel.
pub fn source_faults() -> impl Iterator<Item = &'static SourceFault> {
    let tables = [
        HELPER_FAULTS,
        attention::ATTENTION_FAULTS,
        forward::FORWARD_FAULTS,
        forward::PACKED_FAULTS,
        forward::PAIRED_FAULTS,
        forward::SHORT_FAULTS,
        backward::BACKWARD_FAULTS,
    ];
    tables.into_iter().flatten()
}

/// The planted fault of this name.
pub fn by_id(id: &str) -> Option<&'static SourceFault> {
    source_faults().find(|fault| fault.id == id)
}

/// Those of the kernels for packed slots.
const HELPER_FAULTS: &[SourceFault] = faults! { SIMPLE;
    "global-base-of-ranks-row", GlobalOffset, TE_2596, "rows.cu",
        "const i64 base = offset * cut.cp;" => "const i64 base = offset;",
        Seen::Bits(&["reorder", "partition indices"]);
    "global-offset-in-ranks-table", GlobalOffset, TE_2596, "metadata.cu",
        "offset[s] = (int)(rows + before + gap);" => "offset[s] = batch.offset[s];",
        Seen::Bits(&["rank slots"]);
    "local-offset-of-gathered-keys", GlobalOffset, TE_2596, "metadata.cu",
        "segment.kv_offset = kv.offset[s] * cp;" => "segment.kv_offset = kv.offset[s];",
        Seen::Bits(GATHERS);
    "a-residue-too-far", WrongSeam, MAGI_28, "metadata.cu",
        "+ (keys > 0 ? residue : 0);" => "+ residue;",
        Seen::Bits(&["all-gather backward segments"]);
    "band-of-residues-unscaled", WrongSeam, TE_STRIPED, "metadata.cu",
        "queries, {residue, cp, keys, 0}, segment);" => "queries, {0, cp, keys, 0}, segment);",
        Seen::Bits(&["all-gather backward segments"]);
    "two-empty-statistics", MissingGuard, VLLM_39148, "merge.cu",
        "const float difference = a == b ? 0.0f : a - b;" => "const float difference = a - b;",
        Seen::Bits(MERGES);
    "share-of-an-empty-total", MissingGuard, FLASHINFER_4051, "merge.cu",
        "return a == neg_infinity() ? 0.0f : exponential(a - total);" => "return exponential(a - total);",
        Seen::Bits(&["merge of out"]);
    "empty-out-times-zero", MissingGuard, VLLM_49294, "merge.cu",
        "kept.word[i] = weight == 0.0f ? 0 : packed.word[i];" => "kept.word[i] = packed.word[i];",
        Seen::Bits(&["merge of out"]);
    "first-offset-0-in-reorder", FirstOffset, TE_2829, "rows.cu",
        "const i64 x = row - offset;" => "const i64 x = row - (slot.index == 0 ? 0 : offset);",
        Seen::Bits(&["reorder", "partition indices"]);
    "first-offset-0-in-halves", FirstOffset, TE_2829, "rows.cu",
        "const u32 in_half = half_row - (offset >> 1)"
            => "const u32 in_half = half_row - (slot.index == 0 ? 0 : offset >> 1)",
        Seen::Bits(&["read half", "write half"]);
    "offset-table-at-minus-1", FirstOffset, TE_2829, "rows.cu",
        "return s < 0 ? Slot{-1, 0, 0, 0} : slot_at(slots, s);" => "return slot_at(slots, s);",
        Seen::Bits(&["reorder"]);
    "int32-bytes-of-rows", Int32Product, TE_2548, "rows.cu",
        "\"l\"(from + move.from * row_bytes + column)" => "\"l\"(from + (int)((u32)move.from * row_bytes) + column)",
        Seen::Large;
    "int32-elements-of-a-step", Int32Product, TE_1230, "merge.cu",
        "step_first = first;" => "step_first = (int)first;",
        Seen::Large;
    "last-sequence-not-found", LastSequence, MAGI_28, "rows.cu",
        "if (s >= slots.count) return {s, NOWHERE, 0, 0};" => "if (s + 1 >= slots.count) return {s, NOWHERE, 0, 0};",
        Seen::Bits(SEARCHES);
    "guessed-window-behind-the-row", WrongSeam, MAGI_28, "rows.cu",
        "if ((before != 0 || base == 0) && (before != ALL_LANES || base + 32 >= slots.count)) return guess;"
            => "if (before != ALL_LANES || base + 32 >= slots.count) return guess;",
        Seen::Bits(SEARCHES);
    "next-slot-of-four-rows-missed", LastSequence, MAGI_28, "merge.cu",
        "if (begin + slot.span >= EACH || slot.index + 1 >= slots.count) break;" => "break;",
        Seen::Bits(&["merge of statistics", "largest logit"]);
    "last-half-left-out", LastSequence, MAGI_28, "merge.cu",
        "if (slot.index < 0 || in_half >= chunk" => "if (slot.index + 1 == slots.count || in_half >= chunk",
        Seen::Bits(&["merge of statistics", "merge of out", "accumulation", "half statistic"]);
    "last-run-unfinished", LastSequence, MAGI_28, "metadata.cu",
        "if (run < *count) {" => "if (run + 1 < *count) {",
        Seen::Bits(&["segment runs"]);
    "mask-past-the-end", PastTheEnd, FA_A3A257C7, "rows.cu",
        "if (first + i < slots.rows) mask[first + i] = real >> i & 1;"
            => "if (first + i <= slots.rows) mask[first + i] = real >> i & 1;",
        Seen::Bits(&["valid mask"]);
    "cu-seqlens-past-the-end", PastTheEnd, FA_A3A257C7, "metadata.cu",
        "if (s < slots.count) cu_seqlens[s + 1]" => "if (s <= slots.count) cu_seqlens[s + 1]",
        Seen::Bits(&["cu_seqlens on rank"]);
    "rows-past-the-end", PastTheEnd, FA_A3A257C7, "rows.cu",
        "if (lane >= tile_rows || row >= rows)" => "if (lane >= tile_rows || row > rows)",
        Seen::Bits(&["reorder", "copy valid", "fill padding", "read half"]);
    "heads-past-the-last", PastTheEnd, FA_A3A257C7, "merge.cu",
        "if (h < count) store_words<EACH>(to, values[h], (1u << EACH) - 1);"
            => "store_words<EACH>(to, values[h], (1u << EACH) - 1);",
        Seen::Bits(&["half statistic"]);
    "a-stripe-too-many", PastTheEnd, MAGI_28, "metadata.cu",
        "index >= q.span[s] / stripe" => "index > q.span[s] / stripe",
        Seen::Bits(GATHERS);
    "a-run-without-room", PastTheEnd, FA_A3A257C7, "metadata.cu",
        "if (run < 0 || run >= runs.room) continue;" => "if (run < 0 || run > runs.room) continue;",
        Seen::Bits(&["segment runs"]);
    "real-length-halved", WrongSeam, TE_2892, "merge.cu",
        "chunk = slot.span >> 1;" => "chunk = slot.len >> 1;",
        Seen::Bits(HALVES);
    "padding-is-real", WrongSeam, TE_2892, "rows.cu",
        "return (i64)row - slot.offset < slot.len;" => "return (i64)row - slot.offset < slot.span;",
        Seen::Bits(REAL_ROWS);
    "second-chunk-of-the-first-rank", WrongSeam, TE_2186, "metadata.cu",
        "id = part ? 2 * cp - 1 - rank : rank;" => "id = part ? 2 * cp - rank - (rank > 0) : rank;",
        Seen::Bits(&[
            "rank slots", "cu_seqlens on rank", "ring segments", "all-gather segments", "all-gather backward segments"
        ]);
    "positions-end-no-run", WrongSeam, TE_STRIPED, "metadata.cu",
        "\n        && (u32)ids.position[left] + 1u == (u32)ids.position[left + 1];" => ";",
        Seen::Bits(&["segment runs"]);
    "product-not-rounded", Arithmetic, TE_CORRECTION, "merge.cu",
        "(STYLE == WEIGHTED_ROUNDED ? rounded<ACC>(product) : product)" => "product",
        Seen::Bits(&["merge of out"]);
    "wild-address", PastTheEnd, PYTORCH_186142, "rows.cu",
        "if (first >= slots.rows) return;" => "if (first >= slots.rows) return;\n    mask += 1ll << 46;",
        Seen::IllegalAddress;
    "endless-search", WrongSeam, "a search that does not close in: \
        https://github.com/SandAI-org/MagiAttention/pull/28", "rows.cu",
        "else high = middle;" => "else high = middle + 1;",
        Seen::Deadline;
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_edit_is_about_one_text_that_is_there() {
        for fault in source_faults() {
            assert_eq!(fault.matches(), 1, "{}: {:?} in {}", fault.id, fault.find, fault.file);
            let edited = fault.edited().and_then(|edited| Some(edited.first()?.text.clone()));
            assert_ne!(edited, whole(fault.file), "{}", fault.id);
        }
    }

    #[test]
    fn names_are_unique_and_every_kind_has_an_example() {
        let mut ids: Vec<_> = source_faults().map(|fault| fault.id).collect();
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids.len(), source_faults().count());
        let mut kinds: Vec<_> = source_faults().map(|fault| fault.kind).collect();
        kinds.sort_unstable();
        kinds.dedup();
        assert_eq!(kinds.len(), 8);
        assert!(source_faults().all(|fault| fault.imitates.contains("https://")));
    }
}
