//! Illegal cases: problems that a subject must refuse, and fields that validation must.

use seamproof_oracle::limits::{
    HEAD_DIM_MAX, HEADS_MAX, ROWS_MAX, SCALE_MAX, SCALE_MIN, SOFTCAP_MAX, SOFTCAP_MIN, WORLD_MAX,
};
use seamproof_oracle::sharding::span_multiple;
use seamproof_oracle::{
    Algorithm, Balance, ContextParallel, Dims, Element, Form, FormError, Format, Heads, InputMode, Pages,
    PagesError, Pass, Problem, ProblemError, ProblemFields, Run, RunLayoutError, Scaling, Sequence,
    SharedKeys, Sharing, SharingError, Side, Steps, StepsError, TensorRows,
};

use crate::subject::Needs;

/// Fields that break exactly one rule.
#[derive(Clone, Debug, PartialEq)]
pub struct Malformed {
    /// Malformed fields.
    pub fields: ProblemFields,
    /// Name of the [`ProblemError`] variant that was planted.
    pub rule: &'static str,
    /// Error that validation must give.
    pub expects: ProblemError,
}

impl Malformed {
    /// Returns every rule that is planted.
    pub fn rules() -> impl Iterator<Item = &'static str> {
        MALFORMED.iter().map(|(rule, _)| *rule)
    }

    /// Checks that [`Problem::new`] refuses the fields with the planted error; otherwise returns its answer in words.
    pub fn check(&self) -> Result<(), String> {
        match Problem::new(self.fields.clone()) {
            // The errors are compared as text, because a NaN in an error must equal itself.
            Err(got) if format!("{got:?}") == format!("{:?}", self.expects) => Ok(()),
            Err(got) => Err(format!("refused for another reason: {got}; planted: {}", self.expects)),
            Ok(_) => Err(format!("accepted; planted: {}", self.expects)),
        }
    }
}

/// Function that turns legal fields into ones that the emulated backend's table refuses. The number
/// selects a variant.
pub(super) type Unsupport = fn(&mut ProblemFields, usize);

/// Function that makes legal fields break one rule, and returns the error to expect. The number selects a variant.
pub(super) type Break = fn(&mut ProblemFields, usize) -> ProblemError;

/// Table of refused problems. Its order is a format: entries are added at the end and never removed.
pub(super) const UNSUPPORTED: [Unsupport; 10] = [
    scaled_per_tensor,
    scaled_per_block,
    fp8_everywhere,
    fp8_somewhere,
    mixed_formats,
    uncut_spans,
    undealt_heads,
    stripes_too_long,
    misshapen_segments,
    unequal_lengths,
];

/// Table of rules to break. Its order is a format: entries are added at the end and never removed. A count of
/// sequences above the bound is left out, because it would need a hundred thousand of them.
pub(super) const MALFORMED: [(&str, Break); 16] = [
    ("OutOfRange", count_out_of_range),
    ("OutOfRange", parallel_out_of_range),
    ("HeadsNotDivisible", heads_not_divisible),
    ("Run", run_without_step),
    ("Run", run_longer_than_span),
    ("Run", run_out_of_rows),
    ("Overlap", overlap),
    ("RepeatedId", repeated_id),
    ("Factor", factor),
    ("RankOutsideWorld", rank_outside_world),
    ("RepeatedRank", repeated_rank),
    ("GroupSize", group_size),
    ("Form", form_without_room),
    ("Steps", steps_without_cache),
    ("Pages", pages_not_there),
    ("Sharing", keys_not_there),
];

fn element(fields: &mut ProblemFields, which: usize) -> &mut Element {
    let p = &mut fields.precision;
    match which % 8 {
        0 => &mut p.q,
        1 => &mut p.k,
        2 => &mut p.v,
        3 => &mut p.p,
        4 => &mut p.out,
        5 => &mut p.dout,
        6 => &mut p.ds,
        _ => &mut p.gradients,
    }
}

fn fp8(detail: usize) -> Format {
    if detail.is_multiple_of(2) { Format::E4m3 } else { Format::E5m2 }
}

fn scaled_per_tensor(fields: &mut ProblemFields, detail: usize) {
    *element(fields, detail) = Element { format: fp8(detail / 8), scaling: Scaling::PerTensor };
}

fn scaled_per_block(fields: &mut ProblemFields, detail: usize) {
    let (rows, columns) = [(1, 32), (128, 128), (1, 128), (1, 16)][detail / 16 % 4];
    *element(fields, detail) =
        Element { format: fp8(detail / 8), scaling: Scaling::PerBlock { rows, columns } };
}

fn fp8_everywhere(fields: &mut ProblemFields, detail: usize) {
    for which in 0..8 {
        element(fields, which).format = fp8(detail);
    }
}

fn fp8_somewhere(fields: &mut ProblemFields, detail: usize) {
    element(fields, detail).format = fp8(detail / 8);
}

/// Puts one quantity into the other 16-bit format. P is left out, because its format may differ from the others'.
fn mixed_formats(fields: &mut ProblemFields, detail: usize) {
    let other = if fields.precision.q.format == Format::Bf16 { Format::Fp16 } else { Format::Bf16 };
    let which = if detail % 8 == 3 { 0 } else { detail };
    element(fields, which).format = other;
}

fn parallel(algorithm: Algorithm, balance: Balance, size: usize) -> ContextParallel {
    ContextParallel::over(size, algorithm, balance)
}

/// Chooses a group whose size does not divide some span; where there is none, stripes that are too long.
fn uncut_spans(fields: &mut ProblemFields, detail: usize) {
    let algorithms = algorithms(false);
    let (algorithm, detail_left) = (algorithms[detail % algorithms.len()], detail / algorithms.len());
    let balance = [Balance::Contiguous, Balance::DualChunk, Balance::Striped { stripe: 1 }][detail_left % 3];
    let uncut = |size: &usize| {
        let unit = span_multiple(balance, *size);
        fields.sequences.iter().any(|s| [s.q, s.kv].iter().any(|run| !run.span.is_multiple_of(unit)))
    };
    match (2..=8).find(uncut) {
        Some(size) => fields.parallel = parallel(algorithm, balance, size),
        None => stripes_too_long(fields, detail),
    }
}

/// Deals heads to more ranks than there are query heads.
fn undealt_heads(fields: &mut ProblemFields, detail: usize) {
    let (size, algorithms) = (fields.heads.q + 1, algorithms(true));
    let algorithm = algorithms[detail % algorithms.len()].with_parameter(size);
    fields.parallel = parallel(algorithm, Balance::DualChunk, size);
}

/// Returns the algorithms of several ranks that deal heads to these, or those that do not.
fn algorithms(deal_heads: bool) -> Vec<Algorithm> {
    let deals = |algorithm: &Algorithm| Needs::of(algorithm.with_parameter(2), 2).dealt_to == 2;
    Algorithm::of_several_ranks().filter(|algorithm| deals(algorithm) == deal_heads).collect()
}

/// Asks for stripes that are longer than every span. Where all spans are 0, which any stripes cut, it deals heads to too
/// many ranks.
fn stripes_too_long(fields: &mut ProblemFields, detail: usize) {
    let longest = fields.sequences.iter().map(|sequence| sequence.q.span.max(sequence.kv.span)).max();
    let Some(longest @ 1..) = longest else { return undealt_heads(fields, detail) };
    let algorithms = algorithms(false);
    let stripe = longest + 1 + detail / algorithms.len() % 3;
    fields.parallel = parallel(algorithms[detail % algorithms.len()], Balance::Striped { stripe }, 2);
}

/// Gives ids whose extra dimensions differ: of products though they have as many elements, of primes in their number.
fn misshapen_segments(fields: &mut ProblemFields, detail: usize) {
    let count = [4, 6, 8, 9, 2, 3, 5][detail % 7];
    hold_alone(fields, &vec![(1 + detail / 7 % 3, 2 + detail / 21 % 3); count]);
    one_small_head(fields);
    fields.form = Form::MisshapenSegments;
}

/// Gives lengths of a padded batch, one fewer for keys than for queries.
fn unequal_lengths(fields: &mut ProblemFields, detail: usize) {
    let count = 1 + detail % 5;
    hold_alone(fields, &vec![(1 + detail / 5 % 3, 1 + detail / 15 % 3); count]);
    one_small_head(fields);
    fields.form = Form::UnequalLengths;
}

/// Leaves one head of dimension 8, so that new sequences make no case too large.
fn one_small_head(fields: &mut ProblemFields) {
    fields.heads = Heads { q: 1, kv: 1 };
    fields.dims = Dims { qk: 8, v: 8 };
}

/// Puts packed sequences of these lengths in place of all others, on one rank.
fn hold_alone(fields: &mut ProblemFields, lengths: &[(usize, usize)]) {
    let packed = ProblemFields::packed(lengths, 8);
    (fields.sequences, fields.rows) = (packed.sequences, packed.rows);
    fields.parallel = ContextParallel::single();
}

/// Fields, their smallest and largest legal values, and values outside them.
const COUNTS: [(&str, usize, usize, usize); 9] = [
    ("rows.q", 0, ROWS_MAX, ROWS_MAX + 1),
    ("rows.kv", 0, ROWS_MAX, usize::MAX),
    ("heads.q", 1, HEADS_MAX, 0),
    ("heads.q", 1, HEADS_MAX, HEADS_MAX + 1),
    ("heads.kv", 1, HEADS_MAX, 0),
    ("dims.qk", 1, HEAD_DIM_MAX, 0),
    ("dims.qk", 1, HEAD_DIM_MAX, HEAD_DIM_MAX + 1),
    ("dims.v", 1, HEAD_DIM_MAX, 0),
    ("dims.v", 1, HEAD_DIM_MAX, HEAD_DIM_MAX + 1),
];

fn count_out_of_range(fields: &mut ProblemFields, detail: usize) -> ProblemError {
    let (field, min, max, got) = COUNTS[detail % COUNTS.len()];
    let slot = match field {
        "rows.q" => &mut fields.rows.q,
        "rows.kv" => &mut fields.rows.kv,
        "heads.q" => &mut fields.heads.q,
        "heads.kv" => &mut fields.heads.kv,
        "dims.qk" => &mut fields.dims.qk,
        _ => &mut fields.dims.v,
    };
    *slot = got;
    ProblemError::OutOfRange { field, got, min, max }
}

fn parallel_out_of_range(fields: &mut ProblemFields, detail: usize) -> ProblemError {
    fields.parallel = ContextParallel::single();
    let parallel = &mut fields.parallel;
    let (field, got, max) = match detail % 5 {
        0 => ("parallel.world", 0, WORLD_MAX),
        1 => ("parallel.world", WORLD_MAX + 1, WORLD_MAX),
        2 => ("the size of parallel.ranks", 0, 1),
        3 => ("the size of parallel.ranks", 2, 1),
        _ => ("parallel.balance.striped.stripe", 0, ROWS_MAX),
    };
    match field {
        "parallel.world" => parallel.world = got,
        "the size of parallel.ranks" => parallel.ranks = (0..got).collect(),
        _ => parallel.balance = Balance::Striped { stripe: got },
    }
    ProblemError::OutOfRange { field, got, min: 1, max }
}

/// Asks for one KV head more than query heads, which no number of query heads is a multiple of.
fn heads_not_divisible(fields: &mut ProblemFields, _: usize) -> ProblemError {
    fields.heads.kv = fields.heads.q + 1;
    ProblemError::HeadsNotDivisible { q: fields.heads.q, kv: fields.heads.kv }
}

fn fresh_id(fields: &ProblemFields) -> u32 {
    fields.sequences.iter().map(|sequence| sequence.id + 1).max().unwrap_or(0)
}

/// Adds a sequence at the end, whose run on one side is `run`; the other side is empty.
fn add_sequence(fields: &mut ProblemFields, id: u32, side: Side, run: Run) {
    let empty = Run::packed(0, 0, 0);
    let (q, kv) = if side == Side::Q { (run, empty) } else { (empty, run) };
    fields.sequences.push(Sequence { id, q, kv });
}

/// Breaks the run of one side of one sequence (of a new empty one, where there is none).
fn break_run(
    fields: &mut ProblemFields,
    detail: usize,
    edit: impl FnOnce(&mut Run, usize) -> RunLayoutError,
) -> ProblemError {
    let side = if detail.is_multiple_of(2) { Side::Q } else { Side::Kv };
    if fields.sequences.is_empty() {
        add_sequence(fields, 0, side, Run::packed(0, 0, 0));
    }
    let index = detail / 2 % fields.sequences.len();
    let (rows, sequence) = (fields.rows, &mut fields.sequences[index]);
    let (run, rows) = if side == Side::Q { (&mut sequence.q, rows.q) } else { (&mut sequence.kv, rows.kv) };
    ProblemError::Run { index, side, error: edit(run, rows) }
}

fn run_without_step(fields: &mut ProblemFields, detail: usize) -> ProblemError {
    break_run(fields, detail, |run, _| {
        run.step = 0;
        RunLayoutError::StepZero
    })
}

fn run_longer_than_span(fields: &mut ProblemFields, detail: usize) -> ProblemError {
    break_run(fields, detail, |run, _| {
        run.len = run.span + 1;
        RunLayoutError::LenOverSpan { len: run.len, span: run.span }
    })
}

/// Moves a run one row too far, or so far that the row's number overflows.
fn run_out_of_rows(fields: &mut ProblemFields, detail: usize) -> ProblemError {
    break_run(fields, detail, |run, rows| {
        run.offset = if detail % 8 < 6 { rows + 1 } else { usize::MAX };
        RunLayoutError::OutOfRows { offset: run.offset, step: run.step, span: run.span, rows }
    })
}

/// Adds two sequences that own the same new row.
fn overlap(fields: &mut ProblemFields, detail: usize) -> ProblemError {
    let side = if detail.is_multiple_of(2) { Side::Q } else { Side::Kv };
    let rows = if side == Side::Q { &mut fields.rows.q } else { &mut fields.rows.kv };
    let row = *rows;
    *rows += 1;
    let id = fresh_id(fields);
    add_sequence(fields, id, side, Run::packed(row, detail / 2 % 2, 1));
    add_sequence(fields, id + 1, side, Run::packed(row, detail / 4 % 2, 1));
    ProblemError::Overlap { index: fields.sequences.len() - 1, side, row }
}

/// Adds an empty sequence with the id of another one.
fn repeated_id(fields: &mut ProblemFields, detail: usize) -> ProblemError {
    let empty = Run::packed(0, 0, 0);
    if fields.sequences.is_empty() {
        add_sequence(fields, 0, Side::Q, empty);
    }
    let id = fields.sequences[detail % fields.sequences.len()].id;
    add_sequence(fields, id, Side::Q, empty);
    ProblemError::RepeatedId { index: fields.sequences.len() - 1, id }
}

/// Factors that are not positive normal numbers. The last one is the largest subnormal.
const FACTORS: [f32; 7] =
    [0.0, -0.0, -1.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, f32::from_bits(0x007f_ffff)];

fn factor(fields: &mut ProblemFields, detail: usize) -> ProblemError {
    let got = FACTORS[detail / 2 % FACTORS.len()];
    if detail.is_multiple_of(2) {
        fields.softmax.scale = got;
        return ProblemError::Factor { field: "scale", got, min: SCALE_MIN, max: SCALE_MAX };
    }
    fields.softmax.softcap = Some(got);
    ProblemError::Factor { field: "softcap", got, min: SOFTCAP_MIN, max: SOFTCAP_MAX }
}

fn rank_outside_world(fields: &mut ProblemFields, detail: usize) -> ProblemError {
    let world = 2 + detail % 7;
    let rank = if (detail / 7).is_multiple_of(2) { world } else { usize::MAX };
    fields.parallel = ContextParallel {
        ranks: vec![world - 1, 0],
        ..parallel(Algorithm::Ring, Balance::Contiguous, world)
    };
    fields.parallel.ranks[1] = rank;
    ProblemError::RankOutsideWorld { index: 1, rank, world }
}

fn repeated_rank(fields: &mut ProblemFields, detail: usize) -> ProblemError {
    let world = 2 + detail % 7;
    fields.parallel = ContextParallel {
        ranks: vec![world - 1, 0],
        ..parallel(Algorithm::Ring, Balance::Contiguous, world)
    };
    let rank = fields.parallel.ranks[0];
    fields.parallel.ranks[1] = rank;
    ProblemError::RepeatedRank { rank }
}

fn group_size(fields: &mut ProblemFields, detail: usize) -> ProblemError {
    let size = 2 + detail / 3 % 3;
    let (algorithm, rule) = match detail % 3 {
        0 => (Algorithm::Single, "the single-rank algorithm takes exactly 1"),
        which => {
            let all_to_all = if which == 1 { 0 } else { size + 1 };
            (Algorithm::Hierarchical { all_to_all }, "hierarchical.all_to_all must divide the CP size")
        }
    };
    fields.parallel = parallel(algorithm, Balance::Contiguous, size);
    ProblemError::GroupSize { size, rule }
}

/// Chooses a form that cannot say the fields: several ranks, rows outside of a batch of none, or padding of which the
/// caller says that it is not there.
fn form_without_room(fields: &mut ProblemFields, detail: usize) -> ProblemError {
    if detail % 4 == 2 {
        return padding_denied(fields, detail);
    }
    if detail.is_multiple_of(2) {
        fields.form = Form::BatchedSegments;
        fields.parallel = parallel(Algorithm::Ring, Balance::Contiguous, 2);
        return ProblemError::Form { form: fields.form, error: FormError::Algorithm { algorithm: "ring" } };
    }
    fields.form = Form::Lengths;
    fields.parallel = ContextParallel::single();
    fields.sequences.clear();
    fields.rows.q = 1 + detail / 2 % 3;
    let error = FormError::Rows { side: Side::Q, rows: fields.rows.q, expected: 0 };
    ProblemError::Form { form: fields.form, error }
}

/// Gives one sequence rows of padding that the caller denies.
fn padding_denied(fields: &mut ProblemFields, detail: usize) -> ProblemError {
    let (len, rows) = (1 + detail / 4 % 3, 1 + detail / 12 % 2);
    let [full, padded] = [len, len + rows].map(|span| Run::packed(0, len, span));
    fields.form = Form::NoPadBetweenSeqs;
    fields.parallel = ContextParallel::single();
    fields.sequences = vec![Sequence { id: 0, q: full, kv: padded }];
    fields.rows = TensorRows { q: len, kv: len + rows };
    let error = FormError::Run { index: 0, side: Side::Kv, got: padded, expected: full };
    ProblemError::Form { form: fields.form, error }
}

/// Asks for steps that append nothing, or under a mask that does not follow a cache.
fn steps_without_cache(fields: &mut ProblemFields, detail: usize) -> ProblemError {
    if detail.is_multiple_of(2) {
        fields.steps = Steps(vec![1, 0]);
        return ProblemError::Steps { error: StepsError::Nothing { index: 1 } };
    }
    fields.steps = Steps(vec![1 + detail / 2 % 3]);
    fields.mask.right = Some(1);
    ProblemError::Steps { error: StepsError::Mask }
}

/// Asks for pages that the pool does not have, that two sequences own, or of which there are too few.
fn pages_not_there(fields: &mut ProblemFields, detail: usize) -> ProblemError {
    let keys = 1 + detail / 3 % 5;
    hold_alone(fields, &[(1, keys), (1, keys)]);
    fields.pass = Pass::Forward;
    let mut pages = Pages::in_order(1, [keys, keys]);
    let error = match detail % 3 {
        0 => {
            pages.table[1][0] = pages.count;
            PagesError::OutOfRange { sequence: 1, index: 0, page: pages.count, count: pages.count }
        }
        1 => {
            pages.table[1][keys - 1] = 0;
            PagesError::Owned { page: 0, first: 0, second: 1 }
        }
        _ => {
            pages.table[0].pop();
            PagesError::Short { sequence: 0, pages: keys - 1, keys, needed: keys }
        }
    };
    fields.pages = Some(pages);
    ProblemError::Pages { error }
}

/// Asks for shared keys that one of the two sequences does not have, with a later sequence, or of one that borrows.
fn keys_not_there(fields: &mut ProblemFields, detail: usize) -> ProblemError {
    let keys = 1 + detail / 3 % 5;
    let packed = ProblemFields::packed(&[(1, keys), (1, keys + 1), (1, keys)], 8);
    (fields.sequences, fields.rows) = (packed.sequences, packed.rows);
    (fields.parallel, fields.mode) = (ContextParallel::single(), InputMode::Flat);
    let shares = |sequence, with, keys| SharedKeys { sequence, with, keys };
    let (shared, error) = match detail % 3 {
        0 => (vec![shares(1, 0, keys + 1)], SharingError::Keys { sequence: 1, keys: keys + 1, most: keys }),
        1 => (vec![shares(1, 1, keys)], SharingError::Order { sequence: 1, with: 1 }),
        _ => (vec![shares(1, 0, 1), shares(2, 1, 1)], SharingError::Lender { sequence: 2, with: 1 }),
    };
    fields.sharing = Sharing(shared);
    ProblemError::Sharing { error }
}
