//! Planted faults of the attention kernels and of the kernels on tables of rows. A campaign's judge must find them.

use super::entry::{
    BugClass, Detector, FORGETS, READS, SIMPLE, SourceEdit, SourceFault, TE_1230, VALUES, WRITES, faults,
};

/// The faults of `attend.cu` and `pairs.cu`.
pub(super) const ATTENTION_FAULTS: &[SourceFault] = faults! { SIMPLE;
    "diagonal-not-seen", WrongSeam, ("≥ for > at the right bound", "https://github.com/SandAI-org/MagiAttention/pull/117"), "attend.cu",
        "min(index + segment.hi + 1, segment.keys)"
            => "min(index + segment.hi, segment.keys)",
        VALUES;
    "kernel-window-one-short", WrongSeam, ("a window one key short", "https://github.com/NVIDIA/TransformerEngine/pull/1212"), "attend.cu",
        "max(index + segment.lo, (i64)0)"
            => "max(index + segment.lo + 1, (i64)0)",
        VALUES;
    "first-key-block-skipped", WrongSeam, ("the first block of keys is skipped", "https://github.com/intel/sycl-tla/pull/489"), "attend.cu",
        "max(tile, query.first / 32 * 32);"
            => "max(tile, query.first / 32 * 32 + (query.end > 32 ? 32 : 0));",
        VALUES;
    "sums-not-rescaled", Arithmetic, ("sums are not rescaled", "https://arxiv.org/abs/1805.02867"), "attend.cu",
        "const float factor = exact_exp(largest - tile_max);"
            => "const float factor = 1.0f;",
        VALUES;
    "masked-keys-scored", WrongSeam, ("the last tile's maximum is taken over masked keys", "https://github.com/flashinfer-ai/flashinfer/pull/5090"), "attend.cu",
        "key < query.sink_tokens || (key >= query.first && key < query.end);"
            => "key < query.segment.keys;",
        READS;
    "kv-head-by-remainder", WrongSeam, ("KV heads by remainder", "https://github.com/FlashML-org/FreeToken/pull/177"), "attend.cu",
        "kv_head = head / call.group;\n    const Query query = query_at(call, owned);\n    const i64 out"
            => "kv_head = head % (call.heads / call.group);\n    const Query query = query_at(call, owned);\n    const i64 out",
        VALUES;
    "dim-of-values-taken-for-keys", WrongSeam, ("dv taken for dqk", "https://github.com/Dao-AILab/flash-attention/commit/6d199aa2"), "attend.cu",
        "1.0f / sum, a.out, out, call.dim_v)"
            => "1.0f / sum, a.out, out, min(call.dim, call.dim_v))",
        FORGETS;
    "lse-of-head-0", WrongSeam, ("lse of the wrong head", "https://github.com/Dao-AILab/flash-attention/pull/2573"), "attend.cu",
        "if (lane == 0) put(a.lse, lse, sum"
            => "if (lane == 0) put(a.lse, place_of(a.lse, query.row, 0), sum",
        FORGETS;
    "row-sum-in-bf16", Arithmetic, ("the row sum in 16 bits", "https://github.com/tenstorrent/tt-metal/pull/41683"), "attend.cu",
        "sum += __shfl_sync(FULL, weight, j);"
            => "sum = rounded_to(BF16, sum + __shfl_sync(FULL, weight, j));",
        VALUES;
    "kernel-out-padding-left", WrongSeam, ("padding of out keeps what was there", "https://github.com/NVIDIA/TransformerEngine/pull/1009"), "attend.cu",
        "        put_zeros(a.out, out, call.dim_v);\n"
            => "",
        WRITES;
    "empty-row-out", MissingGuard, ("out of an empty row", "https://github.com/vllm-project/vllm/issues/49294"), "attend.cu",
        "sum == 0.0f ? 0.0f : 1.0f / sum"
            => "1.0f / sum",
        VALUES;
    "sink-not-counted", Arithmetic, ("the sink is not counted", "https://github.com/NVIDIA/TransformerEngine/pull/3551"), "attend.cu",
        "if (sink != neg_infinity()) sum += exact_exp(sink - largest);"
            => "",
        VALUES;
    "int32-elements-of-attention", Int32Product, TE_1230, "attend.cu",
        "return row * view.row + head * view.head;"
            => "return (int)(row * view.row) + head * view.head;",
        Detector::Large;
    "sink-of-none-subtracted", MissingGuard, ("−∞ less −∞ in rows without keys", "https://github.com/vllm-project/vllm/issues/39148"), "attend.cu",
        "if (sink != neg_infinity()) sum"
            => "sum",
        Detector::Calls;
    "max-logit-of-first-row", LastSequence, ("the largest logit of the first row alone", "https://github.com/NVIDIA/TransformerEngine/pull/2829"), "attend.cu",
        "if (lane == 0 && largest > neg_infinity())"
            => "if (lane == 0 && largest > neg_infinity() && query.index == 0)",
        VALUES;
    "softcap-missing", Arithmetic, ("no soft cap", "https://github.com/Dao-AILab/flash-attention/pull/2402"), "attend.cu",
        "call.softcap == 0.0f ? scaled : call.softcap * exact_tanh(scaled / call.softcap)"
            => "scaled",
        VALUES;
    "dq-without-scale", Arithmetic, ("dq without the scale", "https://github.com/Dao-AILab/flash-attention/issues/2651"), "attend.cu",
        "put_row(acc, call.scale, a.dq"
            => "put_row(acc, 1.0f, a.dq",
        VALUES;
    "dk-without-scale", Arithmetic, ("dk without the scale", "https://github.com/Dao-AILab/flash-attention/issues/2651"), "attend.cu",
        "put_row(dk_sum, call.scale"
            => "put_row(dk_sum, 1.0f",
        VALUES;
    "dv-with-scale", Arithmetic, ("dv with the scale", "https://github.com/Dao-AILab/flash-attention/issues/2651"), "attend.cu",
        "put_row(dv_sum, 1.0f"
            => "put_row(dv_sum, call.scale",
        VALUES;
    "kernel-gqa-head-lost", LastSequence, ("one head of a group is lost", "https://github.com/XunhaoLai/native-sparse-attention-triton/issues/27"), "attend.cu",
        "head < (kv_head + 1) * call.group;"
            => "head < (kv_head + 1) * call.group - (call.group > 1);",
        VALUES;
    "queries-begin-one-late", WrongSeam, ("queries of a key begin one late", "https://github.com/Dao-AILab/flash-attention/issues/2623"), "attend.cu",
        "const i64 first = max(key - segment.hi, (i64)0)"
            => "const i64 first = max(key - segment.hi + 1, (i64)0)",
        VALUES;
    "queries-end-one-early", LastSequence, ("queries of a key end one early", "https://github.com/Dao-AILab/flash-attention/issues/2623"), "attend.cu",
        "min(key - segment.lo + 1, segment.q_len)"
            => "min(key - segment.lo, segment.q_len)",
        VALUES;
    "kernel-d-missing", Arithmetic, ("D left out of dq", "https://github.com/huggingface/picotron/issues/37"), "attend.cu",
        "const float d = row_dot("
            => "const float d = 0.0f * row_dot(",
        VALUES;
    "last-tile-of-dq-skipped", LastSequence, ("the last tile of dq is skipped", "https://github.com/intel/sycl-tla/pull/489"), "attend.cu",
        "for (i64 tile = 0; tile < keys; tile += 32)"
            => "for (i64 tile = 0; tile + 31 < keys; tile += 32)",
        VALUES;
    "backward-lse-of-head-0", WrongSeam, ("lse of the first head for all", "https://github.com/Dao-AILab/flash-attention/pull/2573"), "attend.cu",
        "get(a.lse, place_of(a.lse, q_row, head))"
            => "get(a.lse, place_of(a.lse, q_row, 0))",
        VALUES;
    "kernel-softcap-derivative-missing", Arithmetic, ("no derivative of the soft cap", "https://github.com/Dao-AILab/flash-attention/issues/2424"), "attend.cu",
        "return plain * (1.0f - ratio * ratio);"
            => "return plain;",
        VALUES;
    "dout-of-another-head", WrongSeam, ("dv from another head's dout", "https://github.com/lvyufeng/PocketLLM/pull/240"), "attend.cu",
        "place_of(a.dout, from, head)"
            => "place_of(a.dout, from, kv_head)",
        VALUES;
    "kernel-dk-padding-left", WrongSeam, ("padding of dk keeps what was there", "https://github.com/NVIDIA/TransformerEngine/pull/2596"), "attend.cu",
        "        put_zeros(a.dk, dk, call.dim);\n"
            => "",
        WRITES;
    "kernel-dq-padding-left", WrongSeam, ("padding of dq keeps what was there", "https://github.com/NVIDIA/TransformerEngine/pull/2596"), "attend.cu",
        "if (call.clear) put_zeros(a.dq, dq, call.dim);"
            => "",
        WRITES;
    "d-of-first-segment", FirstOffset, ("D of another segment", "https://github.com/Dao-AILab/flash-attention/commit/9ee0ff1d"), "attend.cu",
        "segment.first_row + index]"
            => "index]",
        VALUES;
    "bands-of-keys-by-the-last-of-queries", WrongSeam, ("keys of a prefix take the band of queries", "https://github.com/vllm-project/vllm-gaudi/pull/1797"), "attend.cu",
        "call.segments[run.segment];"
            => "call.segments[min(run.segment, (i64)call.segment_count - 1)];",
        Detector::Calls;
    "first-key-of-a-run-forgotten", FirstOffset, ("keys of a second run are counted from 0", "https://github.com/bigscience-workshop/Megatron-DeepSpeed/pull/167"), "attend.cu",
        "const i64 key = run.first_key + in_run;"
            => "const i64 key = in_run;",
        Detector::Calls;
    "tiles-from-the-window-on", WrongSeam, ("past the window, queries miss the sink tokens", "https://github.com/tomaarsen/attention_sinks/issues/17"), "attend.cu",
        "return tile < query.sink_tokens ? tile : max(tile"
            => "return max(tile",
        Detector::Calls;
    "sink-tokens-of-a-window-twice", WrongSeam, ("sink tokens are walked before the window, and again where they lie in it", "https://github.com/sgl-project/sglang/pull/12504"), "attend.cu",
        "const bool apart = sink_tokens < first;"
            => "const bool apart = true;",
        Detector::Calls;
    "keys-without-sink-tokens", WrongSeam, ("sink tokens have gradients from the window alone", "https://github.com/huggingface/transformers/issues/26553"), "attend.cu",
        "key < segment.sink_tokens ? segment.q_len : min(key"
            => "min(key",
        Detector::Calls;
    "block-table-of-the-segment-before", WrongSeam, ("a block table is read past its row", "https://github.com/Dao-AILab/flash-attention/pull/2711"), "attend.cu",
        "table.pages[(i64)segment * table.width"
            => "table.pages[(i64)max(segment - 1, 0) * table.width",
        Detector::Calls;
    "page-row-by-a-mask", WrongSeam, ("rows of a page are masked, as if their number were a power of two", "https://github.com/Dao-AILab/flash-attention/issues/1627"), "attend.cu",
        "return page * table.size + position % table.size;"
            => "return page * table.size + (position & (table.size - 1));",
        Detector::Calls;
    "one-page-for-a-tile", WrongSeam, ("keys are loaded together, as if they lay in one page", "https://github.com/hw-native-sys/pypto/pull/470"), "attend.cu",
        "table.width + position / table.size];"
            => "table.width + (position - position % 32) / table.size];",
        Detector::Calls;
    "position-of-the-first-key-forgotten", FirstOffset, ("a segment's first key is taken for its sequence's", "https://github.com/Dao-AILab/flash-attention/commit/9ee0ff1d"), "attend.cu",
        "const i64 position = table.first[segment] + key;"
            => "const i64 position = key;",
        Detector::Calls;
    "merge-forgets", Arithmetic, ("a merge forgets what was there", "https://github.com/NVIDIA/cudnn-frontend/issues/752"), "pairs.cu",
        "const float keep = a.style == RUNNING ? exact_share(old, total) : 1.0f"
            => "const float keep = a.style == RUNNING ? 0.0f : 1.0f",
        VALUES;
    "third-part-lost", LastSequence, ("parts after the second are lost", "https://github.com/NVIDIA/cudnn-frontend/issues/752"), "pairs.cu",
        "i < transfer.parts; ++i"
            => "i < min(transfer.parts, 2); ++i",
        VALUES;
    "sink-leaves-out", Arithmetic, ("the sink leaves out as it was", "https://github.com/NVIDIA/TransformerEngine/pull/3551"), "pairs.cu",
        "const float total = exact_log_add(old, sink), keep = exact_share(old, total);"
            => "const float total = exact_log_add(old, sink), keep = 1.0f;",
        VALUES;
    "attend-wild-address", PastTheEnd, ("an illegal address, scratch sized from the wrong axis", "https://github.com/pytorch/pytorch/issues/186142"), "attend.cu",
        "const i64 out = place_of(a.out, query.row, head),"
            => "const i64 out = place_of(a.out, query.row, head) + (1ll << 46),",
        Detector::IllegalAddress;
    "attend-endless", WrongSeam, ("a loop that does not go on", "https://github.com/SandAI-org/MagiAttention/pull/28"), "attend.cu",
        "tile = tile_from(query, tile + 32))"
            => "tile = tile_from(query, tile + 32 * (query.index != 3)))",
        Detector::Deadline;
};
