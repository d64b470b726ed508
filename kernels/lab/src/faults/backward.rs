//! Planted faults of the backward on tensor cores. A campaign's judge must find them.

use super::entry::{
    BugClass, BugSource, Detector, FORGETS, READS, SPREADS, SourceEdit, SourceFault, TE_1230, TUNED, VALUES,
    WALKING_BY_TURNS, WIDEST, WRITES, faults,
};

/// NaN and infinities of padding rows in the gradients of real ones.
const FA_1990: BugSource =
    ("padding between sequences in the backward", "https://github.com/Dao-AILab/flash-attention/issues/1990");
/// The formula of each product of a backward.
const FORMULA: BugSource = ("a term of the gradients", "https://arxiv.org/abs/2307.08691");

/// The faults of `backward.cu`.
pub(super) const BACKWARD_FAULTS: &[SourceFault] = faults! { TUNED;
    "int32-elements-of-sums", Int32Product, TE_1230, "backward.cu",
        "float* const sums = a.sums + part * SUMS;"
            => "float* const sums = a.sums + (int)(part * SUMS);",
        Detector::Large;
    "tail-of-queries-not-cleared", MissingGuard, FA_1990, "backward.cu",
        "clear_rows(shared.q(stage), valid, ROWS);"
            => ";",
        READS;
    "tail-of-dout-not-cleared", MissingGuard, FA_1990, "backward.cu",
        "clear_rows(shared.dout(stage), valid, ROWS);"
            => ";",
        READS;
    "tail-of-keys-not-cleared", MissingGuard, FA_1990, "backward.cu",
        "clear_rows(shared.k(), tile.real, KEYS);"
            => ";",
        SPREADS;
    "keys-behind-the-end-weigh", WrongSeam, ("keys behind the sequence's end are seen", "https://github.com/flashinfer-ai/flashinfer/pull/5090"), "backward.cu",
        "r < tile.real ? min(key"
            => "true ? min(key",
        READS;
    "lse-of-the-first-rows-for-all", WrongSeam, ("lse of other rows", "https://github.com/Dao-AILab/flash-attention/pull/2573"), "backward.cu",
        "a.statistics + part * STATISTICS, shared"
            => "a.statistics + part_of(a, q_tile, head) * STATISTICS, shared",
        VALUES;
    "d-of-the-next-row", WrongSeam, ("statistics of other rows", "https://github.com/Dao-AILab/flash-attention/pull/2573"), "backward.cu",
        "statistics[ROWS + row] = d * factor;"
            => "statistics[ROWS + (row ^ 1)] = d * factor;",
        VALUES;
    "gradient-diagonal-not-seen", WrongSeam, ("≥ for > at the bound", "https://github.com/SandAI-org/MagiAttention/pull/117"), "backward.cu",
        "bound(segment.lo), bound(segment.hi),"
            => "bound(segment.lo), bound(segment.hi - 1),",
        VALUES;
    "gradient-window-one-short", WrongSeam, ("a window one key short", "https://github.com/NVIDIA/TransformerEngine/pull/1212"), "backward.cu",
        "min(key - tile.lo, last)"
            => "min(key - tile.lo - 1, last)",
        VALUES;
    "gradients-without-sink-tokens", WrongSeam, ("sink tokens have gradients from the window alone", "https://github.com/huggingface/transformers/issues/26553"), "backward.cu",
        "to = key < own.sink_tokens ? last : min(key - own.lo, last);"
            => "to = min(key - own.lo, last);",
        Detector::Calls;
    "gradients-without-a-prefix", WrongSeam, ("a prefix is causal", "https://github.com/vllm-project/vllm-gaudi/pull/1797"), "backward.cu",
        "from = key < own.prefix ? 0 : key - own.hi,"
            => "from = key - own.hi,",
        Detector::Calls;
    "walk-by-the-window-alone", WrongSeam, ("sink tokens have gradients from the window alone", "https://github.com/huggingface/transformers/issues/26553"), "backward.cu",
        "own.sink_tokens > 0 ? -FAR : own.lo,"
            => "own.lo,",
        Detector::Calls;
    "walk-by-the-diagonal-alone", WrongSeam, ("a prefix is causal", "https://github.com/vllm-project/vllm-gaudi/pull/1797"), "backward.cu",
        "own.prefix > 0 ? max(own.hi, own.prefix - 1) : own.hi,"
            => "own.hi,",
        Detector::Calls;
    "sums-of-dq-without-scale", Arithmetic, FORMULA, "backward.cu",
        "if (!IS_FP8) return a.scale;"
            => "if (!IS_FP8) return 1.0f;",
        VALUES;
    "tiles-of-dk-without-scale", Arithmetic, FORMULA, "backward.cu",
        "store(a.dk, a, keys, place, dk, a.scale, a.dim);"
            => "store(a.dk, a, keys, place, dk, 1.0f, a.dim);",
        VALUES;
    "gradient-without-d", Arithmetic, FORMULA, "backward.cu",
        "p[2 * i] * (dp[2 * i] - of.x)"
            => "p[2 * i] * dp[2 * i]",
        VALUES;
    "lse-for-d-of-later-rows", Arithmetic, FORMULA, "backward.cu",
        "get_numbers<EARLY_D, ROWS / 8>(numbers, shared.statistics(stage) + ROWS * 4);"
            => "get_numbers<EARLY_D, ROWS / 8>(numbers, shared.statistics(stage));",
        VALUES;
    "ds-not-stored-where-masked", Arithmetic, FORMULA, "backward.cu",
        "mask(p, ds, a, at, now * ROWS);\n                store_gradients(shared.ds(stage), ds);"
            => "mask(p, ds, a, at, now * ROWS);",
        READS;
    "a-groups-first-head-for-all", WrongSeam, ("KV heads by remainder", "https://github.com/FlashML-org/FreeToken/pull/177"), "backward.cu",
        "load_queries<SHORT>(a, all.again(), ring, q_tile, t, head * a.group + i, phase, index + t * ROWS);"
            => "load_queries<SHORT>(a, all.again(), ring, q_tile, t, head * a.group, phase, index + t * ROWS);",
        VALUES;
    "sums-not-cleared", Arithmetic, ("dq is added to what was there", "https://github.com/Dao-AILab/flash-attention/pull/1893"), "backward.cu",
        "add_part(shared, turn, sums, opens);"
            => "add_part(shared, turn, sums, false);",
        READS;
    "sums-of-other-keys-forgotten", Arithmetic, ("dq of the last tile of keys alone, not a sum", "https://arxiv.org/abs/2307.08691"), "backward.cu",
        "add_sums(own, dq);"
            => ";",
        VALUES;
    "sums-opened-twice", WrongSeam, ("which tile of keys adds first, by a bound that is off", "https://github.com/Dao-AILab/flash-attention/pull/2549"), "backward.cu",
        "const bool opens = left > tile.opens"
            => "const bool opens = left >= tile.opens",
        READS;
    "accumulated-for-overwritten", Arithmetic, ("gradients of the step before", "https://github.com/NVIDIA/TransformerEngine/pull/3063"), "backward.cu",
        "value, a.accumulate, dim - column);"
            => "value, true, dim - column);",
        FORGETS;
    "padding-of-gradients-left", WrongSeam, ("padding keeps what was there", "https://github.com/NVIDIA/TransformerEngine/pull/1009"), "backward.cu",
        "done.real, done.owned};"
            => "done.real, done.real};",
        WRITES;
    "padding-of-dq-left", WrongSeam, ("padding keeps what was there", "https://github.com/NVIDIA/TransformerEngine/pull/3205"), "backward.cu",
        "segment.len - first, segment.span - first};"
            => "segment.len - first, segment.len - first};",
        WRITES;
    "padding-of-direct-dq-left", WrongSeam, ("padding keeps what was there", "https://github.com/NVIDIA/TransformerEngine/pull/3205"), "backward.cu",
        "tile.rows - first, tile.q_owned - first};"
            => "tile.rows - first, tile.rows - first};",
        WRITES;
    "direct-dq-of-one-head-of-a-group", WrongSeam, ("KV heads by remainder", "https://github.com/FlashML-org/FreeToken/pull/177"), "backward.cu",
        "head = tile.head * a.group + member;"
            => "head = tile.head * a.group + 0 * member;",
        FORGETS;
    "rows-beside-direct-dq-left", WrongSeam, ("padding keeps what was there", "https://github.com/NVIDIA/TransformerEngine/pull/1009"), "backward.cu",
        "const bool seeing = sees_keys(segment, t);"
            => "const bool seeing = segment.seeing < segment.seeing_end;",
        FORGETS;
    "dim-of-keys-taken-for-dv", WrongSeam, ("dqk taken for dv", "https://github.com/Dao-AILab/flash-attention/commit/6d199aa2"), "backward.cu",
        "store(a.dv, a, keys, place, dv, 1.0f, a.dim_v);"
            => "store(a.dv, a, keys, place, dv, 1.0f, min(a.dim, a.dim_v) - 8 * (a.dim_v > 8));",
        FORGETS;
    "phase-of-queries-forgotten", GlobalOffset, ("rows of another batch entry", "https://github.com/NVIDIA/TransformerEngine/pull/2596"), "backward.cu",
        "const int phase = tile.q_phase,"
            => "const int phase = 0,",
        READS;
    "stale-stage-of-dout", WrongSeam, ("a stage's rows from the turn before", "https://github.com/Dao-AILab/flash-attention/pull/2573"), "backward.cu",
        "values(dv, p, descriptor(shared.dout(stage) + lanes_at, ROWS * 128));"
            => "values(dv, p, descriptor(shared.dout(stage ^ 1) + lanes_at, ROWS * 128));",
        READS;
    "second-group-adds-the-firsts-lanes", WrongSeam, ("half of dq twice", "https://github.com/Dao-AILab/flash-attention/pull/2573"), "backward.cu",
        "panel = group * KEYS * 128,"
            => "panel = 0 * group,",
        FORGETS;
    "described-d-of-the-next-row", WrongSeam, ("statistics of other rows", "https://github.com/Dao-AILab/flash-attention/pull/2573"), "backward.cu",
        "shared.statistics(stage) + 4 * (ROWS + r),"
            => "shared.statistics(stage) + 4 * (ROWS + (r ^ 1)),",
        VALUES;
    "described-by-another-heads-out", WrongSeam, ("statistics of the first head for all", "https://github.com/Dao-AILab/flash-attention/pull/2573"), "backward.cu",
        "ROWS, rows.head, rows.phase, rows.index);"
            => "ROWS, 0, rows.phase, rows.index);",
        VALUES;
    "shared-statistics-of-other-rows", WrongSeam, ("lse of other rows", "https://github.com/Dao-AILab/flash-attention/pull/2573"), "backward.cu",
        "a.statistics + part * STATISTICS + threadIdx.x"
            => "a.statistics + part / 2 * 2 * STATISTICS + threadIdx.x",
        VALUES;
    "rows-around-not-closed", WrongSeam, ("which tile of keys adds last, by a bound that is off", "https://github.com/Dao-AILab/flash-attention/pull/2549"), "backward.cu",
        "closes = walk.start - behind;"
            => "closes = walk.start - behind - 1;",
        FORGETS;
    "tile-softcap-slope-missing", Arithmetic, ("no derivative of the soft cap", "https://github.com/Dao-AILab/flash-attention/issues/2424"), "backward.cu",
        "weight[i] * __fmaf_rn(-t, t, 1.0f);"
            => "weight[i];",
        VALUES;
    "gradients-past-the-head-dim", PastTheEnd, ("lanes of the next head are written", "https://github.com/Dao-AILab/flash-attention/commit/6d199aa2"), "backward.cu",
        "if (i < lanes) put("
            => "put(",
        FORGETS;
};

/// The faults of walks that go up and down by turns.
pub(super) const WALK_FAULTS: &[SourceFault] = faults! { WALKING_BY_TURNS;
    "opened-by-walks-up-alone", WrongSeam, ("which tile of keys adds first, by a bound that is off", "https://github.com/Dao-AILab/flash-attention/pull/2549"), "backward.cu",
        "const int opens = goes_up<SHORT>(a, tile.head) ? tile.end - high : low - tile.first;"
            => "const int opens = tile.end - high;",
        READS;
};

/// The faults of consumers that share keys.
pub(super) const WIDEST_FAULTS: &[SourceFault] = faults! { WIDEST;
    "both-consumers-make-the-firsts-lanes", WrongSeam, ("head dims are taken that the kernel cannot do", "https://github.com/NVIDIA/cudnn-frontend/issues/981"), "backward.cu",
        "lanes_at = SHARES_KEYS ? group * 2 * ROWS * 128 : 0;"
            => "lanes_at = 0;",
        VALUES;
    "turned-dq-of-a-panel-twice", WrongSeam, ("half of dq twice", "https://github.com/Dao-AILab/flash-attention/pull/2573"), "backward.cu",
        "const u32 k = shared.k() + 2 * panel,"
            => "const u32 k = shared.k() + panel,",
        VALUES;
    "turned-dq-of-the-next-rows", WrongSeam, ("statistics of other rows", "https://github.com/Dao-AILab/flash-attention/pull/2573"), "backward.cu",
        "put_one(at + (i / 4 * 8 + row % 4 * 2 + i % 2) * 64"
            => "put_one(at + (i / 4 * 8 + row % 4 * 2 + (i + 1) % 2) * 64",
        FORGETS;
};
