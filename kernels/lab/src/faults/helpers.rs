//! Planted faults of the kernels for packed slots. The comparison with the twins must find them.

use super::entry::{BugClass, BugSource, Detector, SIMPLE, SourceEdit, SourceFault, TE_1230, faults};

const TE_2596: BugSource =
    ("global padded offsets on a rank's shard", "https://github.com/NVIDIA/TransformerEngine/pull/2596");
const TE_2829: BugSource = (
    "first padded offset assumed 0, offset table read at -1",
    "https://github.com/NVIDIA/TransformerEngine/pull/2829",
);
const VLLM_39148: BugSource =
    ("NaN from merging two empty states", "https://github.com/vllm-project/vllm/issues/39148");
const FLASHINFER_4051: BugSource =
    ("merge lacks the case empty and empty", "https://github.com/flashinfer-ai/flashinfer/issues/4051");
const VLLM_49294: BugSource = (
    "an empty range's undefined out merged as if valid",
    "https://github.com/vllm-project/vllm/issues/49294",
);
const TE_2548: BugSource =
    ("a row times a length in int", "https://github.com/NVIDIA/TransformerEngine/issues/2548");
const MAGI_28: BugSource = (
    "a table of ranges read one entry too far, or one too few",
    "https://github.com/SandAI-org/MagiAttention/pull/28",
);
const FA_A3A257C7: BugSource = (
    "a store bounded by the tile's end and not by the sequence's",
    "https://github.com/Dao-AILab/flash-attention/commit/a3a257c7",
);
const TE_2892: BugSource = (
    "one table in the roles of real and padded offsets",
    "https://github.com/NVIDIA/TransformerEngine/issues/2892",
);
const LUCIDRAINS_11: BugSource = (
    "a ring right with one stripe for each rank alone",
    "https://github.com/lucidrains/ring-attention-pytorch/issues/11",
);
const TE_2186: BugSource =
    ("a last chunk of nothing but padding", "https://github.com/NVIDIA/TransformerEngine/issues/2186");
const TE_2692: BugSource = (
    "ids that vmap has batched beside positions that it has not",
    "https://github.com/NVIDIA/TransformerEngine/pull/2692",
);
const TE_CORRECTION: BugSource = (
    "the product rounded before it is added is part of the contract",
    "https://github.com/NVIDIA/TransformerEngine/blob/main/transformer_engine/common/fused_attn/context_parallel.cu",
);
const TE_STRIPED: BugSource = (
    "lengths from ids and offsets from positions",
    "https://github.com/NVIDIA/TransformerEngine/blob/main/transformer_engine/jax/attention.py",
);
const TE_3063: BugSource = (
    "rows lost or misplaced on the way from THD over BSHD to SBHD",
    "https://github.com/NVIDIA/TransformerEngine/pull/3063",
);
const PYTORCH_186142: BugSource = (
    "illegal address, scratch sized from the wrong axis",
    "https://github.com/pytorch/pytorch/issues/186142",
);

const MEGATRON_LLM_23: BugSource =
    ("positions of the pack counted through", "https://github.com/epfLLM/Megatron-LLM/issues/23");
const MEGATRON_4075: BugSource = (
    "a rank's part of a sequence rotated as though it began at position 0",
    "https://github.com/NVIDIA/Megatron-LM/pull/4075",
);
const PADDLE_74716: BugSource =
    ("a rotation's backward with the forward's sign", "https://github.com/PaddlePaddle/Paddle/pull/74716");

const GATHERS: &[&str] = &["all-gather segments", "all-gather backward segments"];
const HALVES: &[&str] =
    &["read half", "write half", "merge of statistics", "merge of out", "accumulation", "half statistic"];
const SEARCHES: &[&str] = &[
    "copy valid",
    "fill padding",
    "reorder",
    "partition indices",
    "read half",
    "write half",
    "valid mask",
    "convert",
];
const REAL_ROWS: &[&str] = &["copy valid", "fill padding", "valid mask"];
const SEGMENTS: &[&str] = &["segment runs", "segment sequences"];
const MERGES: &[&str] = &["merge of statistics", "merge of out"];

/// The faults of `rows.cu`, `rotation.cu`, `merge.cu` and `metadata.cu`.
pub(super) const HELPER_FAULTS: &[SourceFault] = faults! { SIMPLE;
    "global-base-of-ranks-row", GlobalOffset, TE_2596, "rows.cu",
        "const i64 base = offset * cut.cp;" => "const i64 base = offset;",
        Detector::Bits(&["reorder", "partition indices"]);
    "global-offset-in-ranks-table", GlobalOffset, TE_2596, "metadata.cu",
        "offset[s] = (int)(rows + before + gap);" => "offset[s] = batch.offset[s];",
        Detector::Bits(&["rank slots"]);
    "local-offset-of-gathered-keys", GlobalOffset, TE_2596, "metadata.cu",
        "segment.kv_offset = kv.offset[s] * cp;" => "segment.kv_offset = kv.offset[s];",
        Detector::Bits(GATHERS);
    "a-residue-too-far", WrongSeam, MAGI_28, "metadata.cu",
        "+ (keys > 0 ? residue : 0);" => "+ residue;",
        Detector::Bits(&["all-gather backward segments"]);
    "band-of-residues-unscaled", WrongSeam, TE_STRIPED, "metadata.cu",
        "queries, {residue, cp, keys, 0}, segment);" => "queries, {0, cp, keys, 0}, segment);",
        Detector::Bits(&["all-gather backward segments"]);
    "ring-pieces-exchanged", WrongSeam, MAGI_28, "metadata.cu",
        "q_part = (int)(i / q.count % parts), kv_part = (int)(i / q.count / parts);"
            => "kv_part = (int)(i / q.count % parts), q_part = (int)(i / q.count / parts);",
        Detector::Bits(&["ring segments"]);
    "ring-keys-of-the-own-rank", WrongSeam, MAGI_28, "metadata.cu",
        "const Piece keys = piece_in_ring(balance, cp, members, owner, kv_part, kv.span[s]);"
            => "const Piece keys = piece_in_ring(balance, cp, members, rank, kv_part, kv.span[s]);",
        Detector::Bits(&["ring segments"]);
    "members-of-a-ring-in-turn", WrongSeam, MAGI_28, "metadata.cu",
        "return {(i64)rank * members + part, (i64)cp * members, own, part * own};"
            => "return {rank + (i64)part * cp, (i64)cp * members, own, part * own};",
        Detector::Bits(&["ring segments"]);
    "absent-stripes-at-the-first-row", WrongSeam, TE_2829, "metadata.cu",
        "segments[i] = {q.offset[s] + q.span[s], 0, 0, 0, 0, 0};" => "segments[i] = {0, 0, 0, 0, 0, 0};",
        Detector::Bits(GATHERS);
    "edge-on-the-own-stripe", WrongSeam, LUCIDRAINS_11, "metadata.cu",
        "key = own + edge.distance;" => "key = own;",
        Detector::Bits(&["ring segments"]);
    "edge-without-the-other-bound", WrongSeam, LUCIDRAINS_11, "metadata.cu",
        "if (piece > most && mask.right >= 0) edge.last = min(edge.last, last);" => "",
        Detector::Bits(&["ring segments"]);
    "band-beside-the-edge", WrongSeam, LUCIDRAINS_11, "metadata.cu",
        "const i64 last = distance * width + min(inside, 0ll);" => "const i64 last = distance * width + inside;",
        Detector::Bits(&["ring segments"]);
    "keys-of-a-told-call-unsaid", WrongSeam, MAGI_28, "metadata.cu",
        "runs[i].len = segment.kv_len;" => "runs[i].len = segment.q_len;",
        Detector::Bits(&["told call"]);
    "told-call-one-segment-on", LastSequence, MAGI_28, "metadata.cu",
        "const Segment segment = from[i];" => "const Segment segment = from[i + 1 < count ? i + 1 : i];",
        Detector::Bits(&["told call"]);
    "two-empty-statistics", MissingGuard, VLLM_39148, "merge.cu",
        "const float difference = a == b ? 0.0f : a - b;" => "const float difference = a - b;",
        Detector::Bits(MERGES);
    "share-of-an-empty-total", MissingGuard, FLASHINFER_4051, "merge.cu",
        "return a == neg_infinity() ? 0.0f : exponential(a - total);" => "return exponential(a - total);",
        Detector::Bits(&["merge of out"]);
    "empty-out-times-zero", MissingGuard, VLLM_49294, "merge.cu",
        "kept.word[i] = weight == 0.0f ? 0 : packed.word[i];" => "kept.word[i] = packed.word[i];",
        Detector::Bits(&["merge of out"]);
    "first-offset-0-in-reorder", FirstOffset, TE_2829, "rows.cu",
        "const i64 x = row - offset;" => "const i64 x = row - (slot.index == 0 ? 0 : offset);",
        Detector::Bits(&["reorder", "partition indices"]);
    "first-offset-0-in-halves", FirstOffset, TE_2829, "rows.cu",
        "const u32 in_half = half_row - (offset >> 1)"
            => "const u32 in_half = half_row - (slot.index == 0 ? 0 : offset >> 1)",
        Detector::Bits(&["read half", "write half"]);
    "offset-table-at-minus-1", FirstOffset, TE_2829, "rows.cu",
        "return s < 0 ? Slot{-1, 0, 0, 0} : slot_at(slots, s);" => "return slot_at(slots, s);",
        Detector::Bits(&["reorder"]);
    "lanes-before-the-first-slot", FirstOffset, TE_2829, "rows.cu",
        "if (count > 0) found = {base + lane, offset, span, len};" => "found = {base + lane, offset, span, len};",
        Detector::Bits(SEARCHES);
    "first-offset-0-in-the-valid-mask", FirstOffset, TE_2829, "rows.cu",
        "const u32 real = real_rows<EACH>(slots, first, guessed"
            => "const u32 real = real_rows<EACH>(slots, first + (slots.count > 0 ? slots.offset[0] : 0), guessed",
        Detector::Bits(&["valid mask"]);
    "first-offset-0-in-the-largest-logit", FirstOffset, TE_2829, "merge.cu",
        "const u32 real = real_rows<EACH>(slots, row, guess);"
            => "const u32 real = real_rows<EACH>(slots, row + (slots.count > 0 ? slots.offset[0] : 0), guess);",
        Detector::Bits(&["largest logit"]);
    "int32-bytes-of-rows", Int32Product, TE_2548, "rows.cu",
        "\"l\"(from + move.from * row_bytes + column)" => "\"l\"(from + (int)((u32)move.from * row_bytes) + column)",
        Detector::Large;
    "int32-elements-of-a-step", Int32Product, TE_1230, "merge.cu",
        "step_first = first;" => "step_first = (int)first;",
        Detector::Large;
    "last-sequence-not-found", LastSequence, MAGI_28, "rows.cu",
        "if (s >= slots.count) return {s, NOWHERE, 0, 0};" => "if (s + 1 >= slots.count) return {s, NOWHERE, 0, 0};",
        Detector::Bits(SEARCHES);
    "guessed-window-behind-the-row", WrongSeam, MAGI_28, "rows.cu",
        "if ((before != 0 || base == 0) && (before != ALL_LANES || base + 32 >= slots.count)) return guess;"
            => "if (before != ALL_LANES || base + 32 >= slots.count) return guess;",
        Detector::Bits(SEARCHES);
    "next-slot-of-four-rows-missed", LastSequence, MAGI_28, "merge.cu",
        "if (begin + slot.span >= EACH || slot.index + 1 >= slots.count) break;" => "break;",
        Detector::Bits(&["merge of statistics", "largest logit"]);
    "last-half-left-out", LastSequence, MAGI_28, "merge.cu",
        "if (slot.index < 0 || in_half >= chunk" => "if (slot.index + 1 == slots.count || in_half >= chunk",
        Detector::Bits(&["merge of statistics", "merge of out", "accumulation", "half statistic"]);
    "last-run-unfinished", LastSequence, MAGI_28, "metadata.cu",
        "if (run < *count) {" => "if (run + 1 < *count) {",
        Detector::Bits(SEGMENTS);
    "mask-past-the-end", PastTheEnd, FA_A3A257C7, "rows.cu",
        "if (first + i < slots.rows) mask[first + i] = real >> i & 1;"
            => "if (first + i <= slots.rows) mask[first + i] = real >> i & 1;",
        Detector::Bits(&["valid mask"]);
    "cu-seqlens-past-the-end", PastTheEnd, FA_A3A257C7, "metadata.cu",
        "if (s < slots.count) cu_seqlens[s + 1]" => "if (s <= slots.count) cu_seqlens[s + 1]",
        Detector::Bits(&["cu_seqlens on rank"]);
    "rows-past-the-end", PastTheEnd, FA_A3A257C7, "rows.cu",
        "if (lane >= tile_rows || row >= rows)" => "if (lane >= tile_rows || row > rows)",
        Detector::Bits(&["reorder", "copy valid", "fill padding", "read half", "convert", "layer"]);
    "heads-past-the-last", PastTheEnd, FA_A3A257C7, "merge.cu",
        "if (h < count) store_words<EACH>(to, values[h], (1u << EACH) - 1);"
            => "store_words<EACH>(to, values[h], (1u << EACH) - 1);",
        Detector::Bits(&["half statistic"]);
    "a-stripe-too-many", PastTheEnd, MAGI_28, "metadata.cu",
        "index >= q.span[s] / stripe" => "index > q.span[s] / stripe",
        Detector::Bits(GATHERS);
    "a-run-without-room", PastTheEnd, FA_A3A257C7, "metadata.cu",
        "if (run < 0 || run >= runs.room) continue;" => "if (run < 0 || run > runs.room) continue;",
        Detector::Bits(SEGMENTS);
    "real-length-halved", WrongSeam, TE_2892, "merge.cu",
        "chunk = slot.span >> 1;" => "chunk = slot.len >> 1;",
        Detector::Bits(HALVES);
    "padding-is-real", WrongSeam, TE_2892, "rows.cu",
        "return (i64)row - slot.offset < slot.len;" => "return (i64)row - slot.offset < slot.span;",
        Detector::Bits(REAL_ROWS);
    "second-chunk-of-the-first-rank", WrongSeam, TE_2186, "metadata.cu",
        "id = part ? 2 * cp - 1 - rank : rank;" => "id = part ? 2 * cp - rank - (rank > 0) : rank;",
        Detector::Bits(&[
            "rank slots", "cu_seqlens on rank", "ring segments", "all-gather segments", "all-gather backward segments"
        ]);
    "positions-end-no-run", WrongSeam, TE_STRIPED, "metadata.cu",
        "\n        && (!ids.position || (u32)position_of(ids, left) + 1u == (u32)position_of(ids, left + 1));" => ";",
        Detector::Bits(SEGMENTS);
    "shared-ids-of-the-first-rows", WrongSeam, TE_2692, "metadata.cu",
        "row < ids.id_rows ? row : row % ids.id_rows" => "row < ids.id_rows ? row : ids.id_rows - 1",
        Detector::Bits(&["segment sequences"]);
    "shared-positions-of-the-last-row", WrongSeam, TE_2692, "metadata.cu",
        "row < ids.position_rows ? row : row % ids.position_rows" => "row < ids.position_rows ? row : ids.position_rows - 1",
        Detector::Bits(&["segment sequences"]);
    "runs-paired-by-number", WrongSeam, TE_2692, "metadata.cu",
        "run_of(kv, q.runs.id[q.begin + s])" => "kv.begin + s < kv.end ? kv.begin + s : -1",
        Detector::Bits(&["segment sequences"]);
    "keys-alone-not-looked-for", LastSequence, TE_2692, "metadata.cu",
        "if (alone) put_sequence(to, count + before," => "if (alone && before < 0) put_sequence(to, count + before,",
        Detector::Bits(&["segment sequences"]);
    "sequence-without-room", PastTheEnd, FA_A3A257C7, "metadata.cu",
        "if (s >= to.most) return;" => "if (s > to.most) return;",
        Detector::Bits(&["segment sequences"]);
    "repeated-id-taken", WrongSeam, TE_2692, "metadata.cu",
        " || run_of(side, id) != i;" => ";",
        Detector::Bits(&["segment sequences"]);
    "last-row-lost-in-a-conversion", LastSequence, TE_3063, "rows.cu",
        "position < min(slot.len, positions);" => "position < min(slot.len, positions) - 1;",
        Detector::Bits(&["convert"]);
    "padding-converted", WrongSeam, TE_3063, "rows.cu",
        "position < min(slot.len, positions);" => "position < min(slot.span, positions);",
        Detector::Bits(&["convert"]);
    "sbhd-taken-for-bshd", WrongSeam, TE_3063, "rows.cu",
        ": position * slots.count + slot.index;" => ": (i64)slot.index * positions + position;",
        Detector::Bits(&["convert"]);
    "conversion-from-row-0", FirstOffset, TE_3063, "rows.cu",
        "from == THD  ? slot.offset + position" => "from == THD  ? (slot.index == 0 ? 0 : slot.offset) + position",
        Detector::Bits(&["convert"]);
    "low-bits-of-wide-tables", Int32Product, TE_1230, "metadata.cu",
        "to[at] = (int)min(max(number, -0x80000000ll), 0x7fffffffll);" => "to[at] = (int)number;",
        Detector::Bits(&["narrow tables"]);
    "wide-tables-read-as-narrow", Int32Product, TE_1230, "metadata.cu",
        "const i64 number = (table == 0 ? wide.offset : table == 1 ? wide.span : wide.len)[s];"
            => "const i64 number = ((const int*)(table == 0 ? wide.offset : table == 1 ? wide.span : wide.len))[s];",
        Detector::Bits(&["narrow tables"]);
    "spans-for-lengths-of-wide-tables", WrongSeam, TE_2892, "metadata.cu",
        "table == 1 ? wide.span : wide.len)[s];" => "wide.span)[s];",
        Detector::Bits(&["narrow tables"]);
    "product-not-rounded", Arithmetic, TE_CORRECTION, "merge.cu",
        "(STYLE == WEIGHTED_ROUNDED ? rounded<ACC>(product) : product)" => "product",
        Detector::Bits(&["merge of out"]);
    "wild-address", PastTheEnd, PYTORCH_186142, "rows.cu",
        "if (first >= slots.rows) return;" => "if (first >= slots.rows) return;\n    mask += 1ll << 46;",
        Detector::IllegalAddress;
    "heads-of-the-next-rank", GlobalOffset, TE_2892, "rows.cu",
        "return {row * parts + part, row};" => "return {row * parts + (part + 1) % parts, row};",
        Detector::Bits(&["layer"]);
    "own-heads-in-every-part", WrongSeam, TE_2892, "rows.cu",
        "row - whole * parts == part ? whole : NONE" => "whole",
        Detector::Bits(&["layer"]);
    "positions-by-rows", WrongSeam, MEGATRON_LLM_23, "rotation.cu",
        "(turn.position + turn.position_step * i)" => "(turn.position_step * row)",
        Detector::Bits(&["rotation"]);
    "positions-from-0", GlobalOffset, MEGATRON_4075, "rotation.cu",
        "(turn.position + turn.position_step * i)" => "(turn.position_step * i)",
        Detector::Bits(&["rotation"]);
    "gradient-turned-on", Arithmetic, PADDLE_74716, "rotation.cu",
        "a.inverse || by == 0 ? by" => "by == 0 ? by",
        Detector::Bits(&["rotation"]);
    "lanes-keep-their-sign", Arithmetic, PADDLE_74716, "rotation.cu",
        "(Code)(row[at - codes] ^ signs)" => "row[at - codes]",
        Detector::Bits(&["rotation"]);
    "turned-by-whole-words", WrongSeam, MAGI_28, "rotation.cu",
        "shift = byte % 4 * 8;" => "shift = 0;",
        Detector::Bits(&["rotation"]);
    "last-turn-not-found", LastSequence, MAGI_28, "rotation.cu",
        "near_end = min(a.count," => "near_end = min(a.count - 1,",
        Detector::Bits(&["rotation"]);
    "int32-elements-of-a-rotation", Int32Product, TE_1230, "rotation.cu",
        "(row * a.heads + head) * of_item;" => "(int)((u32)(row * a.heads + head) * a.dim) / (int)EACH;",
        Detector::Large;
    "endless-search", WrongSeam, ("a search that does not close in", "https://github.com/SandAI-org/MagiAttention/pull/28"), "rows.cu",
        "else high = middle;" => "else high = middle + 1;",
        Detector::Deadline;
    "codes-turned-with-signs-of-pairs", Arithmetic, ("rows of one byte are handled as rows of two", "https://github.com/NVIDIA/TransformerEngine/pull/1574"), "rotation.cu",
        "BYTES == 1 ? 0x80808080u : BYTES == 2"
            => "BYTES <= 2",
        Detector::Bits(&["rotation"]);
};
