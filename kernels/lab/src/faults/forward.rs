//! Planted faults of the forward on tensor cores. A campaign's judge must find them.

use super::entry::{
    BugClass, Detector, FORGETS, LATENT, PACKED, PAIRED, READS, SHORT, SPREADS, SourceEdit, SourceFault,
    TE_1230, TUNED, VALUES, WIDEST, WRITES, faults,
};

/// The faults of every tile.
pub(super) const FORWARD_FAULTS: &[SourceFault] = faults! { TUNED;
    "tail-block-unmasked", WrongSeam, ("keys behind the sequence's end are seen", "https://github.com/flashinfer-ai/flashinfer/pull/5090"), "forward.cu",
        "keys_below(min(r + bounds.hi + 1, block.end) - first_key"
            => "keys_below(r + bounds.hi + 1 - first_key",
        READS;
    "tail-of-values-not-cleared", MissingGuard, ("0 · NaN of V behind the end", "https://github.com/Dao-AILab/flash-attention/issues/2374"), "forward.cu",
        "if (valid < C::KEYS) clear_tail<C>(lanes_of_values(), valid);"
            => ";",
        READS;
    "run-past-its-end", WrongSeam, ("a block takes the next sequence's keys", "https://github.com/NVIDIA/TransformerEngine/pull/2596"), "forward.cu",
        "run.first + min(key + C::KEYS, run.len)"
            => "run.first + key + C::KEYS",
        READS;
    "tile-diagonal-not-seen", WrongSeam, ("≥ for > at the right bound", "https://github.com/SandAI-org/MagiAttention/pull/117"), "forward.cu",
        "min(r + bounds.hi + 1, block.end)"
            => "min(r + bounds.hi, block.end)",
        VALUES;
    "tile-window-one-short", WrongSeam, ("a window one key short", "https://github.com/NVIDIA/TransformerEngine/pull/1212"), "forward.cu",
        "keys_below(lowest - first_key"
            => "keys_below(lowest + 1 - first_key",
        VALUES;
    "lowest-block-skipped", WrongSeam, ("the first block of keys is skipped", "https://github.com/intel/sycl-tla/pull/489"), "forward.cu",
        "low = (u32)(seen.from + hidden) / C::KEYS, high"
            => "low = (u32)(seen.from + hidden) / C::KEYS + (seen.to - seen.from > 2 * C::KEYS), high",
        VALUES;
    "tile-out-not-rescaled", Arithmetic, ("out is not rescaled", "https://arxiv.org/abs/1805.02867"), "forward.cu",
        "o[i] *= factor[i / 2 % 2];"
            => "o[i] *= 1.0f;",
        VALUES;
    "tile-sum-not-rescaled", Arithmetic, ("the row sum is not rescaled", "https://arxiv.org/abs/1805.02867"), "forward.cu",
        "rows.sum[HALF] *= factor[HALF];"
            => "",
        VALUES;
    "tile-sum-in-bf16", Arithmetic, ("the row sum in 16 bits", "https://github.com/tenstorrent/tt-metal/pull/41683"), "forward.cu",
        "            sum[i] += x;"
            => "            sum[i] = rounded<BF16>(sum[i] + x);",
        VALUES;
    "stale-maximum", Arithmetic, ("weights by the maximum before", "https://arxiv.org/abs/1805.02867"), "forward.cu",
        "rows.rest[HALF] = level.rest();"
            => "rows.rest[HALF] = level.rest(), rows.base[HALF] = old == neg_infinity() ? largest : old;",
        VALUES;
    "lse-by-the-largest-score", Arithmetic, ("weights by one shift, the LSE by another", "https://arxiv.org/abs/1805.02867"), "forward.cu",
        "IS_FP8 ? rows.largest[HALF] : rows.base[HALF]"
            => "rows.largest[HALF]",
        VALUES;
    "sum-of-kept-base-rescaled", Arithmetic, ("sums are rescaled by the largest score, weights are not", "https://arxiv.org/abs/1805.02867"), "forward.cu",
        "rows.sum[HALF] *= factor[HALF];"
            => "rows.sum[HALF] *= old == neg_infinity() ? 0.0f : exp2_of((old - largest) * scale_log2);",
        VALUES;
    "negative-scores-compared-as-integers", Arithmetic, ("a largest score that is none", "https://arxiv.org/abs/1805.02867"), "forward.cu",
        "__any_sync(FULL, over || below_0)"
            => "__any_sync(FULL, over)",
        Detector::Levels;
    "growth-of-the-first-row-unseen", Arithmetic, ("one row's maximum for another's", "https://arxiv.org/abs/1805.02867"), "forward.cu",
        "is_over<C>(first, rows.base[0], scale_log2) || is_over<C>(second, rows.base[1], scale_log2)"
            => "is_over<C>(second, rows.base[1], scale_log2)",
        Detector::Levels;
    "growth-of-the-second-row-unseen", Arithmetic, ("one row's maximum for another's", "https://arxiv.org/abs/1805.02867"), "forward.cu",
        "is_over<C>(first, rows.base[0], scale_log2) || is_over<C>(second, rows.base[1], scale_log2)"
            => "is_over<C>(first, rows.base[0], scale_log2)",
        Detector::Levels;
    "scale-off-by-a-256th", Arithmetic, ("a scale other than the caller's", "https://github.com/NVIDIA/TransformerEngine/pull/3063"), "forward.cu",
        "x = exp2_of(level.exponent_of(x));"
            => "x = exp2_of(1.00390625f * level.exponent_of(x));",
        VALUES;
    "half-of-the-lanes-scored", WrongSeam, ("the tail of the head dim is left out", "https://github.com/Dao-AILab/flash-attention/commit/6d199aa2"), "forward.cu",
        "for (int step = 0; step < LANES / STEP; ++step) {"
            => "for (int step = 0; step < LANES / STEP / 2; ++step) {",
        VALUES;
    "tile-lse-of-head-0", WrongSeam, ("lse of the wrong head", "https://github.com/Dao-AILab/flash-attention/pull/2573"), "forward.cu",
        "&& write) put(a.lse, place_of(a.lse, at, head)"
            => "&& write) put(a.lse, place_of(a.lse, at, 0)",
        SPREADS;
    "dim-of-keys-taken-for-values", WrongSeam, ("dqk taken for dv", "https://github.com/Dao-AILab/flash-attention/commit/6d199aa2"), "forward.cu",
        "if (write && 8 * (j + (int)threadIdx.x % 4) < lanes)"
            => "if (write && 8 * (j + (int)threadIdx.x % 4) < lanes - 8 * (lanes > 8))",
        FORGETS;
    "padding-rows-left", WrongSeam, ("padding of out keeps what was there", "https://github.com/NVIDIA/TransformerEngine/pull/1009"), "forward.cu",
        "write = real || (a.clear && r < tile.owned);"
            => "write = real;",
        WRITES;
    "padding-rows-computed", WrongSeam, ("padding rows hold what their queries gave", "https://github.com/NVIDIA/TransformerEngine/pull/3205"), "forward.cu",
        "const bool real = r < tile.real,"
            => "const bool real = r < tile.owned,",
        WRITES;
    "sink-forgotten-in-the-sum", Arithmetic, ("the sink is not in the sum", "https://github.com/NVIDIA/TransformerEngine/pull/3551"), "forward.cu",
        "total = sum * weight + exact_exp(sink - top);"
            => "total = sum * weight;",
        VALUES;
    "tile-sink-of-none-subtracted", MissingGuard, ("−∞ less −∞ in rows without keys", "https://github.com/vllm-project/vllm/issues/39148"), "forward.cu",
        "if (sink != neg_infinity()) {"
            => "{",
        Detector::Calls;
    "phase-forgotten", GlobalOffset, ("rows of another batch entry", "https://github.com/NVIDIA/TransformerEngine/pull/2596"), "forward.cu",
        "(i64)a.q_step * (tile.index + r) + tile.phase;"
            => "(i64)a.q_step * (tile.index + r);",
        FORGETS;
    "int32-elements-of-a-row", Int32Product, TE_1230, "forward.cu",
        "return row * view.row + head * view.head;"
            => "return (int)(row * view.row) + head * view.head;",
        Detector::Large;
    "last-tile-not-taken", LastSequence, ("the last tile is left out", "https://github.com/NVIDIA/cudnn-frontend/issues/752"), "forward.cu",
        "a.plan->tiles = tiles.of[0];"
            => "a.plan->tiles = tiles.of[0] - (tiles.of[0] > 1);",
        FORGETS;
    "second-group-reads-the-firsts-rows", WrongSeam, ("rows of the tile's other half", "https://github.com/Dao-AILab/flash-attention/pull/2573"), "forward.cu",
        "descriptor(shared.q(q_ring().stage()) + rows_at * 64 * 128, 0);"
            => "descriptor(shared.q(q_ring().stage()), 0);",
        VALUES;
    "second-group-passes-over-the-firsts-blocks", WrongSeam, ("blocks of keys are skipped", "https://github.com/intel/sycl-tla/pull/489"), "forward.cu",
        "blocks_for<C>(get_brought(tile), {limits.y + first, limits.z + first}, limits.x - first, limits.w,"
            => "blocks_for<C>(get_brought(tile), {limits.y, limits.z}, limits.x, limits.w,",
        VALUES;
    "level-of-no-key", MissingGuard, ("−∞ − −∞ in rows that have seen no key yet", "https://github.com/pytorch/pytorch/issues/103963"), "forward.cu",
        "level.base = base == neg_infinity() ? 0.0f : base;"
            => "level.base = base;",
        VALUES;
    "row-without-keys-divided", MissingGuard, ("out of a row without keys is 0 / 0", "https://github.com/pytorch/pytorch/issues/103963"), "forward.cu",
        "weight / total, !real || sum == 0.0f};"
            => "weight / total, !real};",
        FORGETS;
    "rest-of-a-level-forgotten", Arithmetic, ("large logits", "https://github.com/NVIDIA/TransformerEngine/pull/716"), "forward.cu",
        "return exp2_of(level.exponent_of(old) - rest);"
            => "return exp2_of(old * level.scale + level.shift);",
        Detector::Levels;
    "level-past-its-bound", Arithmetic, ("large logits", "https://github.com/NVIDIA/TransformerEngine/pull/716"), "forward.cu",
        "__uint_as_float(min(__float_as_uint(scale_log2), power))"
            => "scale_log2",
        Detector::Levels;
    "largest-logit-of-padding", WrongSeam, ("the largest logit of rows that are not real", "https://github.com/NVIDIA/TransformerEngine/pull/2829"), "forward.cu",
        "raise_head(a.max_logit, head, real ? largest : neg_infinity(), packed);"
            => "raise_head(a.max_logit, head, largest, packed);",
        READS;
    "keys-of-a-run-counted-from-0", WrongSeam, ("a later run's keys take the places of the first one's", "https://github.com/NVIDIA/TransformerEngine/pull/2829"), "forward.cu",
        "{run.first + key, run.first + min(key + C::KEYS, run.len), max(-key, 0)}"
            => "{key, min(key + C::KEYS, run.len), 0}",
        Detector::Calls;
    "values-of-the-first-phase", GlobalOffset, ("values of another batch entry", "https://github.com/NVIDIA/TransformerEngine/pull/2596"), "forward.cu",
        "v_phase = IS_FP8 ? 0 : run.phase;"
            => "v_phase = 0;",
        READS;
    "tile-softcap-missing", Arithmetic, ("no soft cap", "https://github.com/Dao-AILab/flash-attention/pull/2402"), "forward.cu",
        "s[i] = tanh_of(s[i] * inner);"
            => "s[i] = s[i] * inner;",
        VALUES;
    "tile-sink-tokens-hidden", WrongSeam, ("past the window, queries miss the sink tokens", "https://github.com/tomaarsen/attention_sinks/issues/17"), "forward.cu",
        "seen |= bits_from(0,"
            => "(void)bits_from(0,",
        Detector::Calls;
    "blocks-of-sink-tokens-skipped", WrongSeam, ("past the window, queries miss the sink tokens", "https://github.com/tomaarsen/attention_sinks/issues/17"), "forward.cu",
        "blocks.first = IS_GENERAL ? (first + C::KEYS - 1) / C::KEYS : 0;"
            => "blocks.first = 0;",
        Detector::Calls;
    "blocks-of-sink-tokens-before-the-windows-place", WrongSeam, ("past the window, queries miss the sink tokens", "https://github.com/tomaarsen/attention_sinks/issues/17"), "forward.cu",
        "if (blocks.low < blocks.high) blocks.first = min("
            => "blocks.first = min(",
        Detector::Calls;
    "rows-past-their-window-passed-over", WrongSeam, ("past the window, queries miss the sink tokens", "https://github.com/tomaarsen/attention_sinks/issues/17"), "forward.cu",
        "if (seen.from >= seen.to && (!IS_GENERAL || brought.len >= 0))"
            => "if (seen.from >= seen.to)",
        Detector::Calls;
    "tile-sink-tokens-past-the-diagonal", WrongSeam, ("sink tokens past the diagonal", "https://github.com/ROCm/rocm-libraries/pull/6914"), "forward.cu",
        "min(keys_below(sink_tokens - first_key, C::KEYS), right)"
            => "keys_below(sink_tokens - first_key, C::KEYS)",
        Detector::Calls;
    "lanes-past-the-head-dim", PastTheEnd, ("lanes of the next head are multiplied", "https://github.com/Dao-AILab/flash-attention/commit/6d199aa2"), "forward.cu",
        "if (j + 1 < lanes) pair |="
            => "if (j < lanes) pair |=",
        READS;
    "out-past-the-head-dim", PastTheEnd, ("lanes of the next head are written", "https://github.com/Dao-AILab/flash-attention/commit/6d199aa2"), "forward.cu",
        "if (write && lane < lanes) put("
            => "if (write && lane < (lanes + 7) / 8 * 8) put(",
        WRITES;
};

/// The faults of tiles with rows of several heads.
pub(super) const PACKED_FAULTS: &[SourceFault] = faults! { PACKED;
    "packed-rows-of-one-head", WrongSeam, ("head indexing and storage of packed heads", "https://github.com/HKUSTDial/flash-sparse-attention/pull/224"), "forward.cu",
        "const int head = tile.head + (row + 8 * HALF & (1 << packed) - 1);"
            => "const int head = tile.head;",
        FORGETS;
    "packed-rows-masked-as-rows", WrongSeam, ("rows and packed rows confused in the mask", "https://github.com/Dao-AILab/flash-attention/pull/2528"), "forward.cu",
        "const int r = row + 8 * half >> packed;"
            => "const int r = row + 8 * half;",
        VALUES;
    "largest-logit-of-the-pack", WrongSeam, ("one head's statistic in the place of another's", "https://github.com/Dao-AILab/flash-attention/pull/2573"), "forward.cu",
        "if (step >= 4 << packed) value = fmaxf(value, other);"
            => "value = fmaxf(value, other);",
        VALUES;
};

/// The faults of two blocks of threads that share keys.
pub(super) const PAIRED_FAULTS: &[SourceFault] = faults! { PAIRED;
    "half-of-the-keys-asked-for-twice", WrongSeam, ("an offset applied by one loader and not by the other", "https://github.com/Dao-AILab/flash-attention/pull/2368"), "forward.cu",
        "const int first = cluster_rank() * PART;"
            => "const int first = 0;",
        READS;
    "second-block-takes-the-firsts-rows", WrongSeam, ("rows of the tile's other half", "https://github.com/Dao-AILab/flash-attention/pull/2573"), "forward.cu",
        "(C::CLUSTER > 1 ? cluster_rank() * C::ROWS : 0);"
            => "0;",
        Detector::Calls;
    "second-word-of-a-mask-not-shifted", WrongSeam, ("keys behind the sequence's end are seen", "https://github.com/flashinfer-ai/flashinfer/pull/5090"), "forward.cu",
        "bits_from(first, max(right - word - first, 0))"
            => "bits_from(first, max(right - first, 0))",
        READS;
};

/// The faults of teams that share a block of threads.
pub(super) const SHORT_FAULTS: &[SourceFault] = faults! { SHORT;
    "tile-kv-head-by-remainder", WrongSeam, ("KV heads by remainder", "https://github.com/FlashML-org/FreeToken/pull/177"), "forward.cu",
        "kv_head = pack / a.group;"
            => "kv_head = pack % (a.heads / a.group);",
        VALUES;
    "teams-counted-as-one", WrongSeam, ("more threads than rows", "https://github.com/Dao-AILab/flash-attention/commit/eeca63a7"), "forward.cu",
        "const int row = in_rows / 32 * 16"
            => "const int row = (C::TEAMS == 1 ? in_rows : threadIdx.x) / 32 * 16",
        SPREADS;
};

/// The faults of groups that share rows.
pub(super) const LATENT_FAULTS: &[SourceFault] = faults! { LATENT;
    "both-groups-have-the-first-lanes", WrongSeam, ("the second half of the lanes repeats the first", "https://github.com/Dao-AILab/flash-attention/issues/2651"), "forward.cu",
        "lanes_at = SHARES_ROWS ? group : 0;"
            => "lanes_at = 0;",
        FORGETS;
    "tail-of-the-second-groups-values-not-cleared", MissingGuard, ("0 · NaN of V behind the end", "https://github.com/Dao-AILab/flash-attention/issues/2374"), "forward.cu",
        "clear_tail<C>(lanes_of_values(), valid)"
            => "clear_tail<C>(shared.v(v_ring().stage()), valid)",
        READS;
    "second-group-masks-later-rows", WrongSeam, ("rows of the tile's other half", "https://github.com/Dao-AILab/flash-attention/pull/2573"), "forward.cu",
        "block, in_rows, packed_log2<C>(a));"
            => "block, thread, packed_log2<C>(a));",
        VALUES;
    "last-panel-of-keys-not-multiplied", WrongSeam, ("scores are made of the first lanes alone", "https://github.com/triton-lang/triton/issues/621"), "forward.cu",
        "for (int step = 0; step < LANES / STEP; ++step) {"
            => "for (int step = 0; step < (LANES < 512 ? LANES : 512) / STEP; ++step) {",
        VALUES;
};

/// The faults of lanes past the 128th.
pub(super) const WIDEST_FAULTS: &[SourceFault] = faults! { WIDEST;
    "lanes-past-128-not-multiplied", WrongSeam, ("head dims are taken that the kernel cannot do", "https://github.com/NVIDIA/cudnn-frontend/issues/981"), "forward.cu",
        "for (int step = 0; step < LANES / STEP; ++step) {"
            => "for (int step = 0; step < (LANES < 128 ? LANES : 128) / STEP; ++step) {",
        VALUES;
    "lanes-past-128-not-brought", WrongSeam, ("the kernel for head dims of 256 misreads views", "https://github.com/Dao-AILab/flash-attention/issues/2541"), "forward.cu",
        "? from.dim - 8 * eighth : 0;"
            => "? min(from.dim, 128) - 8 * eighth : 0;",
        VALUES;
    "tail-of-wide-values-not-cleared", MissingGuard, ("0 · NaN of V behind the end", "https://github.com/Dao-AILab/flash-attention/issues/2374"), "forward.cu",
        "const int count = (C::KEYS - valid) * PANELS_OF_O * 8;"
            => "const int count = (C::KEYS - valid) * min(PANELS_OF_O, 2) * 8;",
        READS;
};
