//! The drawing of a case: [`raw`] chooses the integers of a [`RawProblem`].
//!
//! A *feature mask* is drawn first: half of the features are on in a case, and only those may show. Cases thereby
//! differ far more than if each feature showed now and then in every case (swarm testing, Groce et al., ISSTA 2012).
//! Each further choice aims at the seams, which uniform draws never hit.

use arbitrary::{Arbitrary, Unstructured};
use seamproof_oracle::{Algorithm, Form};

use super::choices::Choices;
use super::fixup::{EXACT_MODES, FORMS, LAYOUTS, PAGE_SIZES, SCALES, SINKS, SOFTCAPS, STEPS};
use super::flaws::{MALFORMED, UNSUPPORTED};
use super::limits::ORDINARY_DIM_MAX;
use super::{Limits, RawProblem, RawSequence, aims};

impl<'a> Arbitrary<'a> for RawProblem {
    /// Runs the generator itself, in the quick profile.
    fn arbitrary(u: &mut Unstructured<'a>) -> arbitrary::Result<RawProblem> {
        Ok(raw(u, &Limits::quick()))
    }
}

/// Number of cases among which one is illegal.
pub(super) const ILLEGAL_ONE_IN: u32 = 20;

/// Feature of the mask, by its bit number.
#[derive(Clone, Copy)]
enum Feature {
    Empties,
    Padding,
    OtherPadding,
    Gaps,
    Slack,
    OtherKv,
    EqualSpans,
    Causal,
    Window,
    BottomRight,
    Heads,
    Groups,
    OddDims,
    OtherDimV,
    Scale,
    Softcap,
    Sink,
    Fp16,
    WeightsF32,
    ForwardOnly,
    Many,
    Giant,
    Modes,
    Parallel,
    SubGroup,
    OtherLayout,
}

#[derive(Clone, Copy)]
struct Features(u64);

impl Features {
    fn on(self, feature: Feature) -> bool {
        self.0 >> feature as u32 & 1 == 1
    }
}

/// Draws a case. It is total: it never fails, whatever the bytes and however few.
pub fn raw(u: &mut Unstructured<'_>, limits: &Limits) -> RawProblem {
    let choose = &mut Choices(u);
    let features = Features(choose.word());
    let data_seed = choose.word();
    let mut raw = RawProblem { data_seed, ..RawProblem::default() };
    flaw(choose, &mut raw);
    heads(choose, features, limits, &mut raw);
    softmax(choose, features, &mut raw);
    numbers(choose, features, limits, &mut raw);
    sequences(choose, features, limits, &mut raw);
    window(choose, features, limits, &mut raw);
    parallel(choose, features, &mut raw);
    exact(choose, &mut raw);
    aims::aim(choose, limits, &mut raw);
    form(choose, &mut raw);
    if choose.one_in(BLOCKS_ONE_IN) {
        blocks(choose, limits, &mut raw);
    }
    if raw.left > 0 && choose.one_in(SINK_TOKENS_ONE_IN) {
        let keys = keys_of_one(choose, &raw);
        raw.sink_tokens = border(choose, limits, keys);
    }
    other_layout(choose, features, &mut raw);
    if choose.one_in(STEPS_ONE_IN) {
        raw.steps = 1 + choose.below(STEPS.len() as u32);
        aims::cache(choose, limits, &mut raw);
    } else if choose.one_in(REGION_ONE_IN) {
        aims::region(choose, &mut raw);
    }
    if choose.one_in(if raw.steps > 0 { PAGED_STEPS_ONE_IN } else { PAGES_ONE_IN }) {
        pages(choose, &mut raw);
    }
    if raw.form == 0 && choose.one_in(BATCHED_ONE_IN) {
        raw.form = entry_of(Form::BatchedSegments);
    }
    if raw.steps == 0 && raw.pages == 0 && choose.one_in(SHARED_KEYS_ONE_IN) {
        aims::shared_keys(choose, limits, &mut raw);
    }
    if choose.one_in(HARD_ONE_IN) {
        aims::hard(choose, &mut raw);
    }
    if choose.one_in(LATENT_ONE_IN) {
        aims::latent(choose, limits, &mut raw);
    }
    raw
}

/// Number of cases among which one has latent heads.
pub(super) const LATENT_ONE_IN: u32 = 85;

/// Number of cases among which one has values that are hard for FP8.
const HARD_ONE_IN: u32 = 12;

/// Number of cases in the plain form among which one asks for batched ids.
const BATCHED_ONE_IN: u32 = 8;
/// Number of cases without a cache among which one has keys that sequences share.
const SHARED_KEYS_ONE_IN: u32 = 20;

/// Returns the number that asks for a form first.
fn entry_of(form: Form) -> u32 {
    FORMS.iter().position(|forms| forms[0] == form).map_or(0, |index| index as u32 + 1)
}

/// Number of cases among which one is in a sequence-parallel region.
const REGION_ONE_IN: u32 = 20;

/// Number of cases among which one is a forward on one rank whose keys and values lie in pages.
const PAGES_ONE_IN: u32 = 30;
/// Number of cases in steps among which one has its cache in pages.
const PAGED_STEPS_ONE_IN: u32 = 2;

/// Number of page sizes, the first of the table, of which a prefix often fills a page.
const SHARED_SIZES: u32 = 5;

/// Puts keys and values into pages, mostly in any order; some share a prefix.
fn pages(choose: &mut Choices<'_, '_>, raw: &mut RawProblem) {
    (raw.algorithm, raw.backward, raw.form) = (0, 0, 0);
    raw.pages = 1 + choose.below(PAGE_SIZES.len() as u32);
    raw.page_order = if choose.one_in(4) { 0 } else { choose.word() as u32 };
    raw.free_pages = choose.below(4);
    if choose.one_in(2) {
        (raw.shared_pages, raw.exact) = (1, 0);
        raw.pages = 1 + choose.below(SHARED_SIZES);
    }
}

/// Number of cases among which one asks for documents, chunks or a prefix.
const BLOCKS_ONE_IN: u32 = 6;
/// Numbers of borders of documents.
const BORDERS: [u32; 8] = [1, 1, 2, 2, 3, 3, 5, 15];

/// Draws documents, chunks or none, and a prefix for half of them and wherever there is none. A prefix without a right
/// bound hides nothing, so the mask becomes causal where it has none.
fn blocks(choose: &mut Choices<'_, '_>, limits: &Limits, raw: &mut RawProblem) {
    let keys = keys_of_one(choose, raw);
    let kind = choose.below(3);
    match kind {
        0 => {
            let count = choose.of(&BORDERS);
            raw.borders = (0..count).map(|_| border(choose, limits, keys)).collect();
        }
        1 => raw.chunk = border(choose, limits, keys),
        _ => {}
    }
    if kind == 2 || choose.one_in(2) {
        raw.prefix = border(choose, limits, keys);
        raw.right = raw.right.max(1);
    }
}

/// Number of windows to the left among which one keeps sink tokens.
const SINK_TOKENS_ONE_IN: u32 = 3;

/// Returns the number of keys of some sequence, at least 1.
fn keys_of_one(choose: &mut Choices<'_, '_>, raw: &RawProblem) -> u32 {
    let one = choose.below(raw.sequences.len() as u32) as usize;
    raw.sequences.get(one).map_or(0, |sequence| sequence.kv_len).max(1)
}

/// Returns a key at which a block may end: a small number, one at most one off a multiple of a tile, or any.
fn border(choose: &mut Choices<'_, '_>, limits: &Limits, keys: u32) -> u32 {
    match choose.below(4) {
        0 => choose.range(1, 3),
        1 => choose.near_multiple(limits.tiles, keys).max(1),
        _ => choose.range(1, keys),
    }
}

/// Ways to draw a form: what every other one asks for, few problems can be said in.
const FORM_WAYS: u32 = 8;

/// Draws a form. Half of the cases ask for segments or for lengths, an eighth each for either word of the caller's
/// about padding, and the others for none.
fn form(choose: &mut Choices<'_, '_>, raw: &mut RawProblem) {
    raw.form = match choose.below(FORM_WAYS) {
        way if way % 2 == 1 => 1 + choose.below(2),
        2 => 3,
        6 => 4,
        _ => 0,
    };
}

/// Layouts of keys and values, beside each layout of queries (THD, BSHD, SBHD).
const BESIDE: [[u32; 3]; LAYOUTS.len()] = [[1, 2, 2], [0, 2, 2], [0, 1, 1]];

/// Gives keys another layout than queries. A padded batch, of which lengths alone tell, has one layout.
fn other_layout(choose: &mut Choices<'_, '_>, features: Features, raw: &mut RawProblem) {
    let wanted = features.on(Feature::EqualSpans) && features.on(Feature::OtherLayout);
    if wanted && raw.form != entry_of(Form::Lengths) {
        raw.kv_layout = 1 + choose.of(&BESIDE[raw.layout as usize]);
    }
}

/// Number of cases among which one is made in steps on a cache.
const STEPS_ONE_IN: u32 = 16;

/// Number of cases of which [`EXACT`] ask for an exact mode.
const EXACT_OF: u32 = 20;
/// Number of cases among [`EXACT_OF`] that ask for an exact mode.
const EXACT: u32 = 9;

fn exact(choose: &mut Choices<'_, '_>, raw: &mut RawProblem) {
    if choose.below(EXACT_OF) >= EXACT_OF - EXACT {
        raw.exact = 1 + choose.below(EXACT_MODES.len() as u32);
    }
}

/// Sizes of a group: 1 is legal with every algorithm, and no power of two is special.
const GROUP_SIZES: [u32; 12] = [2, 2, 2, 3, 4, 4, 4, 8, 8, 5, 6, 1];

fn parallel(choose: &mut Choices<'_, '_>, features: Features, raw: &mut RawProblem) {
    if !features.on(Feature::Parallel) {
        return;
    }
    raw.algorithm = choose.range(1, Algorithm::ALL.len() as u32 - 1);
    raw.balance = choose.below(4);
    raw.stripe = choose.range(2, 4);
    raw.ranks = choose.of(&GROUP_SIZES);
    raw.all_to_all = choose.range(1, raw.ranks);
    if features.on(Feature::SubGroup) {
        raw.others = choose.below(4);
        raw.order = choose.word() as u32;
    }
}

fn flaw(choose: &mut Choices<'_, '_>, raw: &mut RawProblem) {
    if choose.one_in(ILLEGAL_ONE_IN) {
        match choose.below(2) {
            0 => raw.unsupported = 1 + choose.below(UNSUPPORTED.len() as u32),
            _ => raw.malformed = 1 + choose.below(MALFORMED.len() as u32),
        }
        raw.detail = choose.word() as u32;
    }
}

/// Numbers of query heads of one KV head.
const GROUPS: [u32; 12] = [2, 3, 5, 8, 10, 12, 2, 3, 4, 6, 2, 3];

fn heads(choose: &mut Choices<'_, '_>, features: Features, limits: &Limits, raw: &mut RawProblem) {
    raw.kv_heads = if features.on(Feature::Heads) { choose.range(1, 4) } else { 1 };
    raw.group = if features.on(Feature::Groups) { choose.of(&GROUPS) } else { 1 };
    let dim = |choose: &mut Choices<'_, '_>| match features.on(Feature::OddDims) {
        true if choose.one_in(3) => choose.range(1, limits.head_dim_max.min(ORDINARY_DIM_MAX)),
        true => choose.of(limits.dims),
        false => choose.of(&[8, 16, 16, 32, 64]),
    };
    raw.qk_dim = dim(choose);
    raw.v_dim = if features.on(Feature::OtherDimV) { dim(choose) } else { raw.qk_dim };
}

fn softmax(choose: &mut Choices<'_, '_>, features: Features, raw: &mut RawProblem) {
    raw.scale = if features.on(Feature::Scale) { choose.entry(&SCALES) } else { 0 };
    raw.softcap = if features.on(Feature::Softcap) { choose.entry(&SOFTCAPS) } else { 0 };
    raw.sink = if features.on(Feature::Sink) { choose.below(SINKS.len() as u32) } else { 0 };
}

/// Number of simple modes (integers, flat, peaked), the modes of every other case.
const SIMPLE_MODES: u32 = 3;
/// Number of modes that any case may have; the others have an aim of their own.
const ORDINARY_MODES: u32 = 7;

fn numbers(choose: &mut Choices<'_, '_>, features: Features, limits: &Limits, raw: &mut RawProblem) {
    raw.fp16 = u32::from(features.on(Feature::Fp16));
    raw.weights_f32 = u32::from(features.on(Feature::WeightsF32) && choose.one_in(2));
    let modes = if features.on(Feature::Modes) { ORDINARY_MODES } else { SIMPLE_MODES };
    raw.mode = choose.below(modes);
    raw.backward = u32::from(!(features.on(Feature::ForwardOnly) && choose.one_in(2)));
    raw.budget = choose.below(limits.products.len() as u32);
}

/// Numbers of sequences in an ordinary case.
const COUNTS: [u32; 32] =
    [1, 2, 2, 3, 2, 3, 4, 5, 1, 3, 4, 6, 2, 3, 7, 8, 2, 4, 5, 9, 1, 12, 1, 0, 2, 3, 2, 3, 4, 2, 3, 5];
/// Numbers of sequences in a rare case: a bucket edge that kernels specialise on.
const MANY_COUNTS: [u32; 4] = [31, 32, 33, 33];
/// Numbers of chunks of a sequence that is dealt to ranks: `2·cp` for cp 2, 4 and 8.
const CHUNKS: [u32; 3] = [4, 8, 16];

fn sequences(choose: &mut Choices<'_, '_>, features: Features, limits: &Limits, raw: &mut RawProblem) {
    let many = features.on(Feature::Many) && choose.one_in(8);
    let count = if many { choose.of(&MANY_COUNTS) } else { choose.of(&COUNTS) };
    let reach = if many { 2 } else { choose.of(limits.reaches) };
    raw.sequences = lengths(choose, features, limits, count, reach);
    if features.on(Feature::Empties) {
        empties(choose, &mut raw.sequences);
    }
    if features.on(Feature::Padding) {
        padding(choose, features, &mut raw.sequences);
    }
    raw.layout = if features.on(Feature::EqualSpans) { choose.below(LAYOUTS.len() as u32) } else { 0 };
    if features.on(Feature::Gaps) {
        gaps(choose, limits, &mut raw.sequences);
    }
    if features.on(Feature::Slack) {
        raw.q_slack = choose.range(0, limits.gap_max);
        raw.kv_slack = choose.range(0, limits.gap_max);
    }
}

/// Returns a length: anywhere within `reach`, at most one off a multiple of a tile or of `2·cp`, or 0 or 1.
fn length(choose: &mut Choices<'_, '_>, limits: &Limits, reach: u32) -> u32 {
    match choose.below(10) {
        0..=3 => choose.range(1, reach),
        4..=6 => choose.near_multiple(limits.tiles, reach),
        7 | 8 => choose.near_multiple(&CHUNKS, reach),
        _ => choose.below(2),
    }
}

fn lengths(
    choose: &mut Choices<'_, '_>,
    features: Features,
    limits: &Limits,
    count: u32,
    reach: u32,
) -> Vec<RawSequence> {
    let giant = (features.on(Feature::Giant) && choose.one_in(3)).then(|| choose.below(count));
    let relation = if features.on(Feature::OtherKv) { choose.range(1, 8) } else { 0 };
    let mixed = relation != 0 && choose.one_in(3);
    (0..count)
        .map(|index| {
            let reach = match giant {
                Some(one) if one == index => reach.saturating_mul(4),
                Some(_) => 2,
                None => reach,
            };
            let q_len = match giant == Some(index) && choose.one_in(4) {
                true => limits.length_max,
                false => length(choose, limits, reach),
            };
            let relation = if mixed { choose.below(9) } else { relation };
            let (q_len, kv_len) = related(choose, limits, reach, q_len, relation);
            RawSequence { q_len, kv_len, ..RawSequence::default() }
        })
        .collect()
}

/// Returns the lengths of both sides, derived from one drawn length.
fn related(
    choose: &mut Choices<'_, '_>,
    limits: &Limits,
    reach: u32,
    length_q: u32,
    relation: u32,
) -> (u32, u32) {
    match relation {
        1 => (length_q, length(choose, limits, reach)),
        2 => (1, length_q),
        3 => (choose.range(1, 3), length_q.saturating_mul(2)),
        4 => (length_q, choose.range(1, 3)),
        5 => (length_q, if choose.one_in(2) { 0 } else { length_q }),
        6 => (if choose.one_in(2) { 0 } else { length_q }, length_q),
        7 => (length_q, length_q.saturating_add(1)),
        8 => (length_q, length_q.saturating_sub(1)),
        _ => (length_q, length_q),
    }
}

/// Makes a run of sequences empty, on both sides or on one: at the head, in the middle, at the tail or throughout; or
/// none.
fn empties(choose: &mut Choices<'_, '_>, sequences: &mut [RawSequence]) {
    let count = sequences.len() as u32;
    let run = choose.range(1, count / 2).min(count.saturating_sub(1));
    let (start, run) = match choose.below(16) {
        0..=3 => (0, run),
        4..=7 => (count - run, run),
        8..=11 => (count / 3, run),
        12 => (0, count),
        _ => return,
    };
    let sides = choose.below(4);
    for sequence in sequences.iter_mut().skip(start as usize).take(run as usize) {
        if sides != 2 {
            sequence.q_len = 0;
        }
        if sides != 3 {
            sequence.kv_len = 0;
        }
    }
}

/// Draws the padding of each sequence.
fn padding(choose: &mut Choices<'_, '_>, features: Features, sequences: &mut [RawSequence]) {
    let style = [choose.below(5), choose.below(5)];
    let chunks = choose.of(&CHUNKS);
    let place = choose.below(4);
    let last = sequences.len().saturating_sub(1);
    for (index, sequence) in sequences.iter_mut().enumerate() {
        let here = match place {
            0 | 1 => true,
            2 => index == last,
            _ => index != last,
        };
        if here {
            sequence.q_padding = rows_of_padding(choose, style[0], chunks, sequence.q_len);
            sequence.kv_padding = match features.on(Feature::OtherPadding) {
                true => rows_of_padding(choose, style[1], chunks, sequence.kv_len),
                false => rows_of_padding(choose, style[0], chunks, sequence.kv_len),
            };
        }
    }
}

/// Returns padding that makes the span a whole number of chunks: as little as possible, at least the last chunk, or
/// at least the last two. Other draws give a few rows, of no such form.
fn rows_of_padding(choose: &mut Choices<'_, '_>, style: u32, chunks: u32, len: u32) -> u32 {
    let real_chunks = match style {
        0 => chunks,
        1 => return choose.range(1, 3),
        2 | 3 => chunks - 1,
        _ => chunks - 2,
    };
    let chunk = len.div_ceil(real_chunks).max(1);
    chunk.saturating_mul(chunks).saturating_sub(len)
}

/// Draws rows that nobody owns: before the first sequence, and in some cases between the others.
fn gaps(choose: &mut Choices<'_, '_>, limits: &Limits, sequences: &mut [RawSequence]) {
    let between = choose.one_in(2);
    for (index, sequence) in sequences.iter_mut().enumerate() {
        if index == 0 || between && choose.one_in(2) {
            sequence.q_gap = choose.range(0, limits.gap_max);
            sequence.kv_gap = choose.range(0, limits.gap_max);
        }
    }
}

fn window(choose: &mut Choices<'_, '_>, features: Features, limits: &Limits, raw: &mut RawProblem) {
    raw.bottom_right = u32::from(features.on(Feature::BottomRight));
    if features.on(Feature::Causal) {
        raw.right = 1;
    }
    if features.on(Feature::Window) && !choose.one_in(3) {
        raw.left = edge(choose, limits, &raw.sequences);
        raw.right = if features.on(Feature::Causal) { 1 } else { edge(choose, limits, &raw.sequences) };
    }
}

/// Returns one side of a window in the raw form: 0, 1 or 2 keys, about a multiple of a tile, about a sequence's
/// length, almost the largest number, or unbounded.
fn edge(choose: &mut Choices<'_, '_>, limits: &Limits, sequences: &[RawSequence]) -> u32 {
    let one = choose.below(sequences.len() as u32) as usize;
    let length = sequences.get(one).map_or(0, |sequence| sequence.kv_len);
    let keys = match choose.below(10) {
        0..=2 => choose.below(3),
        3 | 4 => choose.near_multiple(limits.tiles, length.max(1)),
        5 => length.saturating_add(choose.below(3)).saturating_sub(1),
        6 => u32::MAX - 1 - choose.below(2),
        _ => return 0,
    };
    keys.saturating_add(1)
}
