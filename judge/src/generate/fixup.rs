//! The way from any integers to a case. It is total, and makes these repairs, in order:
//!
//! 1. Sequences beyond `sequences_max` are dropped.
//! 2. Lengths, padding, gaps and slack above their bounds become the bounds.
//! 3. Head counts and dimensions of 0 become 1, and those above their bounds become the bounds. The group shrinks
//!    where its product with the KV heads is above `q_heads_max`.
//! 4. An index past a table's end starts again at its beginning.
//! 5. A case shrinks while it costs more than its budget of visible pairs · query heads · max(dqk, dv), or has more
//!    elements than `elements_max`. Equal spans become packed ones where that saves half of the elements. Then the
//!    larger head dimension loses a third. Where the heads weigh more, the KV heads halve instead, then the group,
//!    down to one head of dimension 8. A latent KV head keeps its dimensions and at least two query heads. Then the
//!    sequence of the largest span halves. Then gaps and slack go.
//! 6. With context parallelism, the group gets 1 to 16 ranks, and every span becomes a multiple of what the balance
//!    cuts it into. Where an algorithm deals heads, its parameter, or else the number of ranks, becomes the largest
//!    one, not above the one asked for, over which the heads can be dealt.
//! 7. An exact mode becomes the next of its table whose preconditions the problem meets, after its scale has become
//!    the nearest that the mode needs. The modes that count keys take any legal case.
//! 8. An index of an illegal case past its table's end means a legal case.
//! 9. Borders of documents are sorted, and those that are 0, repeated or too many are dropped.
//! 10. A region becomes the largest one, not above the one asked for, that can hold the heads; it is left out where
//!     none can.
//! 11. Steps are left out where the problem cannot be made in them.
//! 12. Pages are left out where keys and values cannot lie in them, and where they make the case too large. A prefix is
//!     shared as far as its pages are full, and in no exact mode.
//! 13. Later sequences share keys with the first that has any, as many as both have, up to those asked for. None are
//!     shared in steps, in pages and in an exact mode.
//! 14. A form becomes the first of its entry that can say the problem; where none can, or where there are steps, pages
//!     or shared keys, the plain one. For batched ids the sequences get a batch row each, unless that makes the case too
//!     large.

use std::num::NonZeroU32;

use seamproof_oracle::limits::{HEAD_DIM_MAX, HEADS_MAX, ROWS_MAX, SEQUENCES_MAX};
use seamproof_oracle::sharding::span_multiple;
use seamproof_oracle::{
    Algorithm, Alignment, BORDERS_MAX, Balance, Blocks, Borders, ContextParallel, Dims, Element, Form,
    Format, Heads, InputMode, Mask, Pages, Pass, Precision, Problem, ProblemFields, Run, ScaleValues,
    Sequence, SharedKeys, Sharing, Sink, Softmax, Steps, TensorRows,
};

use super::flaws::{MALFORMED, UNSUPPORTED};
use super::limits::{LATENT, WIDEST_BUDGET};
use super::value::slack;
use super::{Draw, Limits, Malformed, RawProblem, RawSequence};
use crate::exact;
use crate::shrink::shape::Arrangement;
use crate::subject::{Needs, broken_rule};

/// Scales other than 1/√dqk.
pub(super) const SCALES: [f32; 7] = [1.0, 0.5, 0.125, 0.0625, 0.3, 0.01, 1.7];
/// Table of soft caps.
pub(super) const SOFTCAPS: [f32; 7] = [50.0, 30.0, 20.0, 10.0, 5.0, 1.0, 0.5];
/// Table of sinks.
pub(super) const SINKS: [Sink; 3] = [Sink::None, Sink::OffByOne, Sink::Learnable];
/// Table of modes that are not exact.
pub(super) const MODES: [InputMode; 12] = [
    InputMode::Integers,
    InputMode::Flat,
    InputMode::Peaked,
    InputMode::Large,
    InputMode::HeavyTailed,
    InputMode::Equal,
    InputMode::Tiny,
    InputMode::Sunk,
    InputMode::Shadowed,
    InputMode::Rising,
    InputMode::Offset,
    InputMode::Zeros,
];
/// Table of exact modes. The modes with the strictest preconditions stand there most often.
pub(super) const EXACT_MODES: [InputMode; 8] = [
    InputMode::Pairs,
    InputMode::UniformCount,
    InputMode::Routing,
    InputMode::Staircase,
    InputMode::Pairs,
    InputMode::Endpoints,
    InputMode::Routing,
    InputMode::Pairs,
];
/// Table of layouts, from THD over BSHD to SBHD.
pub(super) const LAYOUTS: [Layout; 3] = [Layout::Packed, Layout::EqualSpans, Layout::Interleaved];
/// Table of forms other than the plain one, each followed by those that stand in for it.
pub(super) const FORMS: [&[Form]; 5] = [
    &[Form::Segments, Form::Lengths],
    &[Form::Lengths, Form::Segments],
    &[Form::NoPadBetweenSeqs, Form::PadBetweenSeqs],
    &[Form::PadBetweenSeqs],
    &[Form::BatchedSegments],
];
/// Table of ways to cut so many queries into steps. What is left after them is the last step.
pub(super) const STEPS: [fn(usize) -> Steps; 6] = [
    |queries| cut(&[queries.saturating_sub(1)]),
    |queries| cut(&[queries.saturating_sub(3), 1, 1]),
    |queries| cut(&[queries / 2]),
    |queries| cut(&[queries / 3, queries / 3]),
    |queries| cut(&[queries.saturating_sub(6), 1, 3, 1]),
    |queries| cut(&[queries]),
];

/// Returns the steps that append something.
fn cut(tokens: &[usize]) -> Steps {
    Steps(tokens.iter().copied().filter(|&tokens| tokens > 0).collect())
}

/// Table of page sizes: those of the field, the smallest, and such as are no power of two.
pub(super) const PAGE_SIZES: [usize; 12] = [16, 1, 2, 4, 3, 8, 5, 32, 7, 12, 64, 256];
/// Largest number of pages that no sequence owns.
const FREE_PAGES_MAX: usize = 3;

/// Head dimension below which no dimension is shrunk; rows shrink instead.
const DIM_KEPT: usize = 8;
/// Ratio of a head dimension to the number of query heads from which on the dimension weighs more.
const DIM_PER_HEAD: usize = 8;

/// Returns the case that the integers stand for: the nearest legal one (see the module's text), or a planted illegal
/// one.
pub fn fixup(raw: &RawProblem, limits: &Limits) -> Draw {
    let mut fields = legal_fields(raw, limits);
    if let Some((rule, plant)) = entry(&MALFORMED, raw.malformed) {
        let expects = plant(&mut fields, raw.detail as usize);
        return Draw::Malformed(Malformed { fields, rule, expects });
    }
    make_exact(&mut fields, raw.exact);
    if let Some(plant) = entry(&UNSUPPORTED, raw.unsupported) {
        plant(&mut fields, raw.detail as usize);
    }
    fields.parallel.region = region(raw.region, &fields);
    fields.steps = steps(raw.steps, &fields);
    fields.pages = pages(raw, &fields, limits);
    fields.sharing = sharing(raw.shared_keys, &fields);
    // A contradiction that was planted stays.
    if fields.form.is_plain() {
        fields = in_form(raw.form, fields, limits);
    }
    Draw::Problem(Problem::new(fields).expect("every field was made legal above"))
}

/// Returns the ranks of the fields' region: step 10 of the module's text.
fn region(asked: u32, fields: &ProblemFields) -> usize {
    let holds = |region: &usize| {
        let parallel = ContextParallel { region: *region, ..fields.parallel.clone() };
        let problem = Problem::new(ProblemFields { parallel, ..fields.clone() });
        problem.is_ok_and(|problem| broken_rule(&problem).is_none())
    };
    (2..=(asked as usize).min(REGION_MAX)).rev().find(holds).unwrap_or(1)
}

/// Returns the steps of the fields: step 11 of the module's text.
fn steps(index: u32, fields: &ProblemFields) -> Steps {
    let Some(index) = index.checked_sub(1) else { return Steps::default() };
    let longest = fields.sequences.iter().map(|sequence| sequence.q.len).max().unwrap_or(0);
    let steps = wrapped(&STEPS, index)(longest);
    if longest > 0 && steps.check(fields).is_ok() { steps } else { Steps::default() }
}

/// Returns the pages of the fields: step 12 of the module's text.
fn pages(raw: &RawProblem, fields: &ProblemFields, limits: &Limits) -> Option<Pages> {
    let size = wrapped(&PAGE_SIZES, raw.pages.checked_sub(1)?);
    let mut pages = Pages::in_order(size, fields.sequences.iter().map(|sequence| sequence.kv.len));
    if raw.shared_pages & 1 == 1 {
        pages = pages.sharing_a_prefix(fields);
    }
    let drawn = |number: usize| crate::hash::mix(u64::from(raw.page_order) << 32 | number as u64);
    let shuffled = raw.page_order != 0;
    for (sequence, row) in pages.table.iter_mut().enumerate() {
        if shuffled && drawn(sequence).is_multiple_of(4) {
            row.push(pages.count);
            pages.count += 1;
        }
    }
    pages.count += raw.free_pages as usize % (FREE_PAGES_MAX + 1);
    if shuffled {
        let mut names: Vec<usize> = (0..pages.count).collect();
        names.sort_by_key(|&page| drawn(page));
        pages = pages.renamed(&names);
    }
    let paged = Problem::new(ProblemFields { pages: Some(pages), ..fields.clone() }).ok()?;
    Some(paged).filter(|paged| paged.elements() <= limits.elements_max)?.pages.clone()
}

/// Returns the keys that sequences share: step 13 of the module's text.
fn sharing(asked: u32, fields: &ProblemFields) -> Sharing {
    let lens: Vec<usize> = fields.sequences.iter().map(|sequence| sequence.kv.len).collect();
    let Some(with) = lens.iter().position(|len| *len > 0) else { return Sharing::default() };
    let keys = |sequence: usize| lens[sequence].min(lens[with]).min(asked as usize);
    let borrows = |sequence: usize| SharedKeys { sequence, with, keys: keys(sequence) };
    let shared = (with + 1..lens.len()).map(borrows).filter(|shared| shared.keys > 0);
    let sharing = Sharing(shared.collect());
    if sharing.check(fields).is_ok() { sharing } else { Sharing::default() }
}

/// Returns the fields in their form: step 14 of the module's text.
fn in_form(form: u32, fields: ProblemFields, limits: &Limits) -> ProblemFields {
    let is_plain = !fields.steps.is_empty() || fields.pages.is_some() || !fields.sharing.is_empty();
    let Some(entry) = form.checked_sub(1).filter(|_| !is_plain) else { return fields };
    let forms = wrapped(&FORMS, entry);
    if *forms == [Form::BatchedSegments] {
        return in_batch_rows(&fields, limits).unwrap_or(fields);
    }
    let form = forms.iter().copied().find(|form| form.check(&fields).is_ok()).unwrap_or_default();
    ProblemFields { form, ..fields }
}

/// Returns the fields as batched ids say them, with a batch row for each sequence; `None` where they cannot.
fn in_batch_rows(fields: &ProblemFields, limits: &Limits) -> Option<ProblemFields> {
    let mut batch = ProblemFields { form: Form::BatchedSegments, ..fields.clone() };
    Arrangement::of(&Problem::new(fields.clone()).ok()?).write(&mut batch);
    let batch = Problem::new(batch).ok()?;
    let free = [slack(&batch, |s| s.q, batch.rows.q), slack(&batch, |s| s.kv, batch.rows.kv)];
    let is_small = free.into_iter().all(|rows| rows as usize <= limits.slack_max as usize);
    (is_small && batch.elements() <= limits.elements_max).then(|| batch.into())
}

/// Gives the fields an exact mode: step 7 of the module's text.
fn make_exact(fields: &mut ProblemFields, exact: u32) {
    let Some(first) = exact.checked_sub(1) else { return };
    for index in 0..EXACT_MODES.len() as u32 {
        let mode = wrapped(&EXACT_MODES, first.wrapping_add(index));
        let scale = exact::fit_scale(mode, fields.softmax.scale);
        let softmax = Softmax { scale, ..fields.softmax };
        let Ok(problem) = Problem::new(ProblemFields { mode, softmax, ..fields.clone() }) else { return };
        if exact::eligible(mode, &problem).is_ok() {
            *fields = problem.into();
            return;
        }
    }
}

/// Gives fields whose exact mode lost its preconditions the next mode of the table that has them, with the scale that
/// the mode needs; without such a mode, flat values. Fields in any other mode stay as they are.
pub(crate) fn with_legal_mode(problem: Problem) -> Problem {
    let lost = problem.mode.is_exact() && exact::eligible(problem.mode, &problem).is_err();
    if !lost {
        return problem;
    }
    let own = EXACT_MODES.iter().position(|mode| *mode == problem.mode).unwrap_or(0);
    let mut fields = ProblemFields { mode: InputMode::Flat, ..problem.clone().into() };
    make_exact(&mut fields, own as u32 + 1);
    Problem::new(fields).unwrap_or(problem)
}

/// Returns entry `index − 1`; `None` for 0 and past the end.
fn entry<T: Copy>(table: &[T], index: u32) -> Option<T> {
    table.get((index as usize).checked_sub(1)?).copied()
}

fn wrapped<T: Copy>(table: &[T], index: u32) -> T {
    table[index as usize % table.len()]
}

fn legal_fields(raw: &RawProblem, limits: &Limits) -> ProblemFields {
    let mut shape = Shape::clamped(raw, limits);
    let budget = match limits.products {
        [] => 0,
        _ if raw.budget == WIDEST_BUDGET => limits.products_max(),
        products => wrapped(products, raw.budget),
    };
    // A tensor has no more rows than elements, so this also keeps the rows within a problem's own bound.
    shape.fit(budget, limits.elements_max.min(ROWS_MAX as u64));
    let (sequences, rows) = shape.runs();
    ProblemFields {
        sequences,
        rows,
        heads: shape.heads(),
        dims: shape.dims,
        mask: shape.mask,
        softmax: softmax(raw, shape.dims.qk),
        precision: precision(raw),
        parallel: shape.parallel.clone(),
        mode: wrapped(&MODES, raw.mode),
        data_seed: raw.data_seed,
        pass: if raw.backward & 1 == 1 { Pass::Backward } else { Pass::Forward },
        scales: ScaleValues::default(),
        form: Form::CuSeqlens,
        steps: Steps::default(),
        pages: None,
        sharing: Sharing::default(),
    }
}

fn softmax(raw: &RawProblem, qk_dim: usize) -> Softmax {
    let scale = match raw.scale.checked_sub(1) {
        None => (1.0 / (qk_dim as f64).sqrt()) as f32,
        Some(index) => wrapped(&SCALES, index),
    };
    let softcap = raw.softcap.checked_sub(1).map(|index| wrapped(&SOFTCAPS, index));
    Softmax { scale, softcap, sink: wrapped(&SINKS, raw.sink) }
}

fn precision(raw: &RawProblem) -> Precision {
    let io = Precision::uniform(if raw.fp16 & 1 == 1 { Format::Fp16 } else { Format::Bf16 });
    let p = if raw.weights_f32 & 1 == 1 { Element::from(Format::F32) } else { io.p };
    Precision { p, ..io }
}

fn mask(raw: &RawProblem) -> Mask {
    let align = if raw.bottom_right & 1 == 1 { Alignment::BottomRight } else { Alignment::TopLeft };
    let (left, right) = (raw.left.checked_sub(1), raw.right.checked_sub(1));
    let chunks = || NonZeroU32::new(raw.chunk).map(Blocks::Chunks);
    let blocks = documents(&raw.borders).or_else(chunks);
    Mask { left, right, align, blocks, prefix: raw.prefix, sink_tokens: raw.sink_tokens }
}

/// Returns the documents that the integers stand for: step 9 of the module's text.
fn documents(borders: &[u32]) -> Option<Blocks> {
    let mut borders: Vec<u32> = borders.iter().copied().filter(|border| *border > 0).collect();
    borders.sort_unstable();
    borders.dedup();
    borders.truncate(BORDERS_MAX);
    Borders::new(&borders).ok().map(Blocks::Documents)
}

/// One side of one sequence.
#[derive(Clone, Copy)]
struct Piece {
    len: usize,
    padding: usize,
    gap: usize,
    /// Divisor of the span.
    unit: usize,
}

impl Piece {
    fn halve(&mut self) {
        (self.len, self.padding) = (self.len / 2, self.padding / 2);
    }

    fn span(&self) -> usize {
        (self.len + self.padding).next_multiple_of(self.unit)
    }
}

/// Layout of the spans of one side.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Layout {
    Packed,
    EqualSpans,
    Interleaved,
}

impl Layout {
    fn runs(self, pieces: &[Piece]) -> Vec<Run> {
        match self {
            Layout::Packed => packed(pieces),
            Layout::EqualSpans | Layout::Interleaved => equal(pieces, self == Layout::Interleaved),
        }
    }

    /// Returns the rows of the tensor up to the last span's end.
    fn rows(self, pieces: &[Piece]) -> usize {
        match self {
            Layout::Packed => pieces.iter().map(|piece| piece.gap + piece.span()).sum(),
            Layout::EqualSpans | Layout::Interleaved => base(pieces) + pieces.len() * longest(pieces),
        }
    }
}

/// Layouts of both sides.
#[derive(Clone, Copy, PartialEq)]
struct Layouts {
    q: Layout,
    kv: Layout,
}

impl Layouts {
    const PACKED: Layouts = Layouts { q: Layout::Packed, kv: Layout::Packed };

    fn asked(raw: &RawProblem) -> Layouts {
        let q = wrapped(&LAYOUTS, raw.layout);
        Layouts { q, kv: raw.kv_layout.checked_sub(1).map_or(q, |index| wrapped(&LAYOUTS, index)) }
    }
}

fn packed(pieces: &[Piece]) -> Vec<Run> {
    let mut end = 0;
    let runs = pieces.iter().map(|piece| {
        let offset = end + piece.gap;
        end = offset + piece.span();
        Run::packed(offset, piece.len, piece.span())
    });
    runs.collect()
}

/// Returns the longest span.
fn longest(pieces: &[Piece]) -> usize {
    pieces.iter().map(Piece::span).max().unwrap_or(0)
}

/// Returns the first sequence's gap.
fn base(pieces: &[Piece]) -> usize {
    pieces.first().map_or(0, |piece| piece.gap)
}

/// Returns spans that are all as long as the longest. The first sequence's gap lies before all of them; the others'
/// gaps are dropped.
fn equal(pieces: &[Piece], interleaved: bool) -> Vec<Run> {
    let (base, span) = (base(pieces), longest(pieces));
    let run = |(index, piece): (usize, &Piece)| match (interleaved, span) {
        (true, 1..) => Run { offset: base + index, step: pieces.len(), len: piece.len, span },
        _ => Run::packed(base + index * span, piece.len, span),
    };
    pieces.iter().enumerate().map(run).collect()
}

/// Everything that a case's cost depends on.
struct Shape {
    q: Vec<Piece>,
    kv: Vec<Piece>,
    slack: TensorRows,
    layouts: Layouts,
    kv_heads: usize,
    group: usize,
    dims: Dims,
    mask: Mask,
    passes: u64,
    /// Group that was asked for.
    asked: ContextParallel,
    /// Group that fits the heads.
    parallel: ContextParallel,
}

/// Largest number of ranks in a group.
const RANKS_MAX: usize = 16;
/// Largest number of ranks of a region.
const REGION_MAX: usize = 4;
/// Largest number of ranks of a world that are not in the group.
const OTHERS_MAX: usize = 8;
/// Largest number of rows in a stripe.
const STRIPE_MAX: usize = 8;

/// Returns the algorithm, the cut and the group that the integers stand for.
fn parallel(raw: &RawProblem) -> ContextParallel {
    let ranks = (raw.ranks as usize).clamp(1, RANKS_MAX);
    let balance = match raw.balance % 4 {
        0 => Balance::Contiguous,
        1 => Balance::DualChunk,
        2 => Balance::Striped { stripe: 1 },
        _ => Balance::Striped { stripe: (raw.stripe as usize).clamp(2, STRIPE_MAX) },
    };
    let algorithm = wrapped(&Algorithm::ALL, raw.algorithm);
    if algorithm == Algorithm::Single {
        return ContextParallel::single();
    }
    let algorithm = algorithm.with_parameter((raw.all_to_all as usize).clamp(1, ranks));
    let world = ranks + (raw.others as usize).min(OTHERS_MAX);
    ContextParallel { algorithm, balance, world, ranks: members(raw.order, world, ranks), region: 1 }
}

/// Returns the group's members: the first ranks of the world, or a shuffled choice of them.
fn members(order: u32, world: usize, ranks: usize) -> Vec<usize> {
    let mut all: Vec<usize> = (0..world).collect();
    if order != 0 {
        all.sort_by_key(|&rank| crate::hash::mix(u64::from(order) << 32 | rank as u64));
    }
    all.truncate(ranks);
    all
}

impl Shape {
    /// Makes the group fit the heads and the spans fit the group.
    fn fit_parallel(&mut self) {
        self.parallel = self.asked.clone();
        let (heads, algorithm, size) = (self.heads(), self.parallel.algorithm, self.parallel.size());
        if algorithm == Algorithm::Single {
            return;
        }
        let deals = |algorithm, size| Needs::of(algorithm, size).broken_by_heads(heads).is_none();
        let largest = |most: usize, fits: &dyn Fn(usize) -> bool| {
            (1..=most).rev().find(|&number| fits(number)).unwrap_or(1)
        };
        match algorithm.parameter() {
            None => self.parallel.ranks.truncate(largest(size, &|size| deals(algorithm, size))),
            Some(parameter) => {
                let with = |number| algorithm.with_parameter(number);
                let fits = |number| size.is_multiple_of(number) && deals(with(number), size);
                self.parallel.algorithm = with(largest(parameter, &fits));
            }
        }
        let unit = span_multiple(self.parallel.balance, self.parallel.size());
        self.q.iter_mut().chain(&mut self.kv).for_each(|piece| piece.unit = unit);
    }

    fn clamped(raw: &RawProblem, limits: &Limits) -> Shape {
        let piece = |len: u32, padding: u32, gap: u32| Piece {
            len: len.min(limits.length_max) as usize,
            padding: padding.min(limits.padding_max) as usize,
            gap: gap.min(limits.gap_max) as usize,
            unit: 1,
        };
        let kept =
            &raw.sequences[..raw.sequences.len().min(limits.sequences_max as usize).min(SEQUENCES_MAX)];
        let q = |s: &RawSequence| piece(s.q_len, s.q_padding, s.q_gap);
        let kv = |s: &RawSequence| piece(s.kv_len, s.kv_padding, s.kv_gap);
        let slack = |rows: u32| rows.min(limits.slack_max) as usize;
        let one_to = |value: u32, max: u32| value.min(max).max(1) as usize;
        let heads_max = limits.q_heads_max.min(HEADS_MAX as u32);
        let dim = |value: u32| one_to(value, limits.head_dim_max.min(HEAD_DIM_MAX as u32));
        let kv_heads = one_to(raw.kv_heads, heads_max);
        Shape {
            q: kept.iter().map(q).collect(),
            kv: kept.iter().map(kv).collect(),
            slack: TensorRows { q: slack(raw.q_slack), kv: slack(raw.kv_slack) },
            layouts: Layouts::asked(raw),
            kv_heads,
            group: one_to(raw.group, heads_max / kv_heads as u32),
            dims: Dims { qk: dim(raw.qk_dim), v: dim(raw.v_dim) },
            mask: mask(raw),
            passes: if raw.backward & 1 == 1 { 2 } else { 1 },
            asked: parallel(raw),
            parallel: ContextParallel::single(),
        }
    }

    fn heads(&self) -> Heads {
        Heads { q: self.kv_heads * self.group, kv: self.kv_heads }
    }

    /// Returns the number of visible pairs of a sequence.
    fn pairs(&self, sequence: usize) -> u64 {
        self.mask.pairs(self.q[sequence].len, self.kv[sequence].len)
    }

    fn rows(&self) -> TensorRows {
        TensorRows {
            q: self.layouts.q.rows(&self.q) + self.slack.q,
            kv: self.layouts.kv.rows(&self.kv) + self.slack.kv,
        }
    }

    /// Returns the number of elements, as `Problem::elements` counts them.
    fn elements(&self) -> u64 {
        let TensorRows { q, kv } = self.rows();
        let rows = q * self.heads().q + kv * self.kv_heads;
        self.passes * rows as u64 * (self.dims.qk + self.dims.v) as u64
    }

    /// Shrinks until both costs are within their bounds.
    fn fit(&mut self, products_max: u64, elements_max: u64) {
        let mut pairs: u64 = (0..self.q.len()).map(|sequence| self.pairs(sequence)).sum();
        loop {
            self.fit_parallel();
            let products = pairs * self.heads().q as u64 * self.dims.qk.max(self.dims.v) as u64;
            if products <= products_max && self.elements() <= elements_max {
                return;
            }
            if !self.pack(elements_max) && !self.shrink_heads() {
                pairs = self.shrink_rows(pairs);
            }
        }
    }

    /// Packs equal spans if there are too many elements and packing saves half of them. Returns whether it did.
    fn pack(&mut self, elements_max: u64) -> bool {
        let spread = self.elements();
        if self.layouts == Layouts::PACKED || spread <= elements_max {
            return false;
        }
        let layouts = std::mem::replace(&mut self.layouts, Layouts::PACKED);
        let saves_half = 2 * self.elements() <= spread;
        if !saves_half {
            self.layouts = layouts;
        }
        saves_half
    }

    /// Whether several query heads share one latent KV head.
    fn is_latent(&self) -> bool {
        self.dims == LATENT && self.kv_heads == 1 && self.group > 1
    }

    /// Makes one step of heads or dimensions; returns false when they are as small as they get.
    fn shrink_heads(&mut self) -> bool {
        if self.is_latent() {
            return self.shrink_latent();
        }
        let (largest, q_heads) = (self.dims.qk.max(self.dims.v), self.heads().q);
        if largest > DIM_KEPT && (q_heads == 1 || largest >= DIM_PER_HEAD * q_heads) {
            let smaller = largest * 2 / 3;
            // Kernels like multiples of 8, so a dimension that is one stays one.
            let rounded = if largest.is_multiple_of(8) { smaller / 8 * 8 } else { smaller };
            let smaller = rounded.max(DIM_KEPT);
            self.dims = Dims { qk: self.dims.qk.min(smaller), v: self.dims.v.min(smaller) };
        } else if self.kv_heads > 1 {
            self.kv_heads /= 2;
        } else if self.group > 1 {
            self.group /= 2;
        } else {
            return false;
        }
        true
    }

    /// Halves the query heads of a latent head while several are left; returns whether it did.
    fn shrink_latent(&mut self) -> bool {
        let halves = self.group > 3;
        if halves {
            self.group /= 2;
        }
        halves
    }

    /// Halves the sequence with the largest span. Once all spans are empty, drops the rows that nobody owns. Returns the
    /// number of visible pairs, which were `pairs`.
    fn shrink_rows(&mut self, pairs: u64) -> u64 {
        let span = |index: &usize| self.q[*index].span() + self.kv[*index].span();
        match (0..self.q.len()).max_by_key(span) {
            Some(index) if span(&index) > 0 => {
                let before = self.pairs(index);
                self.q[index].halve();
                self.kv[index].halve();
                pairs - before + self.pairs(index)
            }
            _ => {
                self.slack = TensorRows { q: 0, kv: 0 };
                self.q.iter_mut().chain(&mut self.kv).for_each(|piece| piece.gap = 0);
                pairs
            }
        }
    }

    fn runs(&self) -> (Vec<Sequence>, TensorRows) {
        let (q_runs, kv_runs) = (self.layouts.q.runs(&self.q), self.layouts.kv.runs(&self.kv));
        let sequence = |(id, (q, kv)): (u32, (Run, Run))| Sequence { id, q, kv };
        ((0..).zip(q_runs.into_iter().zip(kv_runs)).map(sequence).collect(), self.rows())
    }
}
