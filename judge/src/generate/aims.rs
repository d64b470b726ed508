//! Aims: cases that go where production kernels were seen to fail, and where uniform draws hardly ever go.
//!
//! An aim changes a drawn case. It keeps what it does not need to change.

use super::choices::Choices;
use super::fixup::MODES;
use super::limits::LATENT;
use super::{Limits, RawProblem, RawSequence};
use seamproof_oracle::{Algorithm, InputMode};

/// Number of cases among which one is aimed.
const AIMED_ONE_IN: u32 = 8;

/// What changes a drawn case.
type Aim = fn(&mut Choices<'_, '_>, &Limits, &mut RawProblem);

/// An entry that stands here twice is twice as likely.
const AIMS: [Aim; 9] =
    [sunk, sunk, sunk, tile_pairs, one_query, wide_padding, many_sequences, value_dims, slack];

/// Aims a case, or leaves it as it is.
pub(super) fn aim(choose: &mut Choices<'_, '_>, limits: &Limits, raw: &mut RawProblem) {
    if choose.one_in(AIMED_ONE_IN) {
        let aim = AIMS[choose.below(AIMS.len() as u32) as usize];
        aim(choose, limits, raw);
    }
}

/// Values whose logits lie far below 0: see [`InputMode::Sunk`]. A soft cap would lift them.
fn sunk(choose: &mut Choices<'_, '_>, _: &Limits, raw: &mut RawProblem) {
    in_mode(choose, raw, InputMode::Sunk);
}

/// Modes of values that are hard for weights, gradients and results in 8 bits.
const HARD: [InputMode; 4] = [InputMode::Shadowed, InputMode::Rising, InputMode::Offset, InputMode::Zeros];

/// Values that are hard for what a kernel in FP8 quantises. A soft cap would lower their logits.
pub(super) fn hard(choose: &mut Choices<'_, '_>, raw: &mut RawProblem) {
    let mode = HARD[choose.below(HARD.len() as u32) as usize];
    in_mode(choose, raw, mode);
}

/// Gives a case a mode that is not exact, mostly without a soft cap.
fn in_mode(choose: &mut Choices<'_, '_>, raw: &mut RawProblem, mode: InputMode) {
    raw.mode = MODES.iter().position(|other| *other == mode).unwrap_or(0) as u32;
    raw.exact = 0;
    if !choose.one_in(4) {
        raw.softcap = 0;
    }
}

/// Tiles of production kernels.
const TILES: [u32; 2] = [64, 128];

/// Lengths at most one off multiples of 64 and 128, drawn for each side: `length mod 128` is often 64.
fn tile_pairs(choose: &mut Choices<'_, '_>, limits: &Limits, raw: &mut RawProblem) {
    few(choose, limits, raw, 2);
    let equal = choose.one_in(2);
    for sequence in &mut raw.sequences {
        sequence.q_len = choose.near_multiple(&TILES, limits.length_max);
        sequence.kv_len = sequence.q_len;
        if !equal {
            sequence.kv_len = choose.near_multiple(&TILES, limits.length_max);
        }
    }
}

/// One query and many keys, as in decoding.
fn one_query(choose: &mut Choices<'_, '_>, limits: &Limits, raw: &mut RawProblem) {
    few(choose, limits, raw, 3);
    for sequence in &mut raw.sequences {
        sequence.q_len = 1;
        sequence.kv_len = choose.near_multiple(&TILES, limits.length_max);
    }
}

/// Padding that makes all spans together at least twice as long as what they hold.
fn wide_padding(choose: &mut Choices<'_, '_>, limits: &Limits, raw: &mut RawProblem) {
    few(choose, limits, raw, 6);
    for sequence in &mut raw.sequences {
        let most = limits.padding_max / 2;
        (sequence.q_len, sequence.kv_len) = (sequence.q_len.min(most), sequence.kv_len.min(most));
        sequence.q_padding = sequence.q_len + choose.range(1, most);
        sequence.kv_padding = sequence.kv_len + choose.range(1, most);
    }
}

/// Numbers of sequences about those up to which kernels keep tables of fixed size, as many as a block has threads.
const SEQUENCES: [u32; 8] = [257, 511, 512, 513, 1023, 1024, 1025, 1100];

/// Hundreds of sequences of at most three tokens, on one rank.
fn many_sequences(choose: &mut Choices<'_, '_>, limits: &Limits, raw: &mut RawProblem) {
    if limits.sequences_max < SEQUENCES[7] {
        return;
    }
    let near = choose.of(&SEQUENCES);
    let count = if choose.one_in(2) { choose.range(SEQUENCES[0], near) } else { near };
    let equal = choose.one_in(2);
    let mut words = std::iter::repeat_with(|| choose.word()).take(count.div_ceil(16) as usize);
    let mut word = 0;
    raw.sequences = (0..count)
        .map(|index| {
            word = if index % 16 == 0 { words.next().unwrap_or(0) } else { word >> 4 };
            let (q_len, kv_len) = (word as u32 & 3, (word >> 2) as u32 & 3);
            RawSequence { q_len, kv_len: if equal { q_len } else { kv_len }, ..RawSequence::default() }
        })
        .collect();
    (raw.layout, raw.algorithm, raw.kv_heads, raw.group) = (0, 0, 1, 1);
    (raw.qk_dim, raw.v_dim) = (8, 8);
    widest(limits, raw);
}

/// Head dimensions of values for which kernels have no tile of their own.
const VALUE_DIMS: [u32; 4] = [80, 96, 112, 192];

/// Values of an unusual head dimension, often with a sink.
fn value_dims(choose: &mut Choices<'_, '_>, limits: &Limits, raw: &mut RawProblem) {
    few(choose, limits, raw, 3);
    for sequence in &mut raw.sequences {
        (sequence.q_len, sequence.kv_len) = (sequence.q_len.min(24), sequence.kv_len.min(24));
    }
    raw.v_dim = choose.of(&VALUE_DIMS);
    raw.qk_dim = choose.of(&[64, 128, 192, raw.v_dim]);
    if choose.one_in(2) {
        raw.sink = 2;
    }
}

/// A forward on one rank that can be made in steps: causal from the bottom-right corner, with a key for each query and
/// often more keys, which are in the cache at first. Sequences are few and not many sizes, so that steps are cheap.
pub(super) fn cache(choose: &mut Choices<'_, '_>, limits: &Limits, raw: &mut RawProblem) {
    (raw.algorithm, raw.backward, raw.right, raw.bottom_right) = (0, 0, 1, 1);
    raw.sequences.truncate(CACHES_MAX);
    for sequence in &mut raw.sequences {
        sequence.q_len = sequence.q_len.max(1);
        let more =
            if choose.one_in(2) { choose.below(1 + sequence.q_len.min(limits.length_max / 4)) } else { 0 };
        sequence.kv_len = sequence.q_len + more;
    }
}

/// Largest number of sequences that are made in steps.
const CACHES_MAX: usize = 16;

/// Sequences that follow one prefix, whose keys they share, on one rank or several, some in regions. Half of them are
/// causal from the bottom-right corner, with the prefix in front of their own tokens, as answers to one prompt are.
pub(super) fn shared_keys(choose: &mut Choices<'_, '_>, limits: &Limits, raw: &mut RawProblem) {
    (raw.exact, raw.form) = (0, 0);
    if choose.one_in(3) {
        raw.algorithm = 0;
    } else {
        few_ranks(choose, raw);
    }
    if raw.region == 0 && choose.one_in(4) {
        region(choose, raw);
    }
    let one = raw.sequences.first().copied().unwrap_or_default();
    raw.sequences.truncate(SHARING_MAX);
    raw.sequences.resize(raw.sequences.len().max(2 + choose.below(2) as usize), one);
    let longest = limits.length_max.max(2);
    let prefix = 1 + choose.below(SHARED_MAX.min(longest - 1));
    raw.shared_keys = prefix;
    let answers = choose.one_in(2);
    for sequence in &mut raw.sequences {
        if answers {
            let tokens = sequence.q_len.clamp(1, longest - prefix);
            (sequence.q_len, sequence.kv_len) = (tokens, prefix + tokens);
        }
        sequence.kv_len = sequence.kv_len.max(1);
    }
    if answers {
        (raw.right, raw.bottom_right) = (1, 1);
    }
}

/// A group of two ranks or more, of any algorithm.
fn few_ranks(choose: &mut Choices<'_, '_>, raw: &mut RawProblem) {
    raw.algorithm = choose.range(1, Algorithm::ALL.len() as u32 - 1);
    if raw.ranks < 2 {
        (raw.balance, raw.stripe, raw.ranks) = (choose.below(4), choose.range(2, 4), choose.range(2, 4));
    }
    raw.all_to_all = choose.range(1, raw.ranks);
}

/// Largest number of sequences that share keys, and of keys that they share.
const SHARING_MAX: usize = 8;
const SHARED_MAX: u32 = 40;

/// Ranks of a region.
const REGIONS: [u32; 4] = [2, 2, 3, 4];

/// A region with heads that its ranks can hold: the case's own for each of them, or one KV head on all of them.
pub(super) fn region(choose: &mut Choices<'_, '_>, raw: &mut RawProblem) {
    raw.region = choose.of(&REGIONS);
    if choose.one_in(3) {
        (raw.kv_heads, raw.group) = (1, raw.group.max(1).saturating_mul(raw.region));
    } else {
        raw.kv_heads = raw.kv_heads.max(1).saturating_mul(raw.region);
    }
}

/// One row or many after the last sequence.
fn slack(choose: &mut Choices<'_, '_>, limits: &Limits, raw: &mut RawProblem) {
    let many = limits.slack_max;
    raw.layout = 0;
    raw.q_slack = choose.of(&[1, many / 4, many / 2, many]);
    raw.kv_slack = choose.of(&[1, many / 4, many / 2, many]);
}

/// Keeps the first sequences and few heads, so that what an aim asks for is within the budget.
fn few(choose: &mut Choices<'_, '_>, limits: &Limits, raw: &mut RawProblem, sequences: u32) {
    let count = choose.range(1, sequences) as usize;
    raw.sequences.resize(
        count.min(raw.sequences.len().max(1)),
        RawSequence { q_len: 5, kv_len: 5, ..RawSequence::default() },
    );
    (raw.kv_heads, raw.group) = (1, raw.group.clamp(1, 2));
    (raw.qk_dim, raw.v_dim) = (raw.qk_dim.min(64), raw.v_dim.min(64));
    widest(limits, raw);
}

/// Numbers of query heads of a latent head.
const LATENT_GROUPS: [u32; 6] = [2, 4, 8, 12, 16, 3];

/// One latent KV head that all query heads share. Half of these cases are forwards of at most three queries a sequence,
/// as in decoding. Each side gets half of the rows that the elements leave.
pub(super) fn latent(choose: &mut Choices<'_, '_>, limits: &Limits, raw: &mut RawProblem) {
    if (limits.head_dim_max as usize) < LATENT.qk {
        return;
    }
    few(choose, limits, raw, 2);
    (raw.qk_dim, raw.v_dim) = (LATENT.qk as u32, LATENT.v as u32);
    let decodes = choose.one_in(2);
    raw.backward &= u32::from(!decodes);
    let rows = latent_rows(limits, raw);
    // Spans are multiples of what ranks and stripes cut them into, and so must leave room for few of them.
    (raw.ranks, raw.stripe) = (raw.ranks.min((rows / 16).max(2)), raw.stripe.min(rows / 16));
    let of_kv = rows / 2 / raw.sequences.len() as u32;
    raw.group = choose.of(&LATENT_GROUPS).min(of_kv).min(limits.q_heads_max);
    let of_q = of_kv / raw.group.max(1);
    let longest = if decodes { choose.range(1, 3).min(of_q) } else { of_q };
    let pairs = latent_pairs(limits, raw);
    for sequence in &mut raw.sequences {
        sequence.kv_len = sequence.kv_len.min(of_kv);
        sequence.q_len = sequence.q_len.min(longest).min(pairs / sequence.kv_len.max(1));
    }
    hold_rows(raw, [of_q, of_kv]);
}

/// Keeps padding within a sequence's rows of each side, whose lengths are, and gaps and slack within a few.
fn hold_rows(raw: &mut RawProblem, [of_q, of_kv]: [u32; 2]) {
    let gap = of_q / 4;
    for sequence in &mut raw.sequences {
        sequence.q_padding = sequence.q_padding.min(of_q - sequence.q_len);
        sequence.kv_padding = sequence.kv_padding.min(of_kv - sequence.kv_len);
        (sequence.q_gap, sequence.kv_gap) = (sequence.q_gap.min(gap), sequence.kv_gap.min(gap));
    }
    (raw.q_slack, raw.kv_slack) = (raw.q_slack.min(gap), raw.kv_slack.min(gap));
}

/// Returns the visible pairs of one sequence that the widest budget leaves.
fn latent_pairs(limits: &Limits, raw: &RawProblem) -> u32 {
    let width = LATENT.qk * raw.group.max(1) as usize * raw.sequences.len();
    (limits.products_max() / width as u64).min(u64::from(u32::MAX)) as u32
}

/// Returns the rows of one latent head that a case's elements leave.
fn latent_rows(limits: &Limits, raw: &RawProblem) -> u32 {
    let passes = 1 + u64::from(raw.backward & 1);
    (limits.elements_max / passes / (LATENT.qk + LATENT.v) as u64).min(u64::from(u32::MAX)) as u32
}

/// Gives a case the largest budget.
fn widest(limits: &Limits, raw: &mut RawProblem) {
    let largest = limits.products.iter().enumerate().max_by_key(|(_, products)| **products);
    raw.budget = largest.map_or(0, |(index, _)| index as u32);
}
