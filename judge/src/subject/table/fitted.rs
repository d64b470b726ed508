//! The nearest problem that a table takes.
//!
//! A problem that no row refuses is its own fitted problem. Any other changes as follows, field by field, and only
//! where a row refuses it:
//!
//! - *Precision* becomes the one of the table with the most equal quantities; of several, the first.
//! - *Head dimensions* and the *group* become the nearest sizes, of two the smaller. Where both dimensions must be the
//!   same, they become the size that is nearest to both. KV heads are kept as far as the number of query heads allows.
//! - *The mask* takes the form for which the fewest bounds change; of several, the first of the table. A bound that
//!   is new reaches as far as the longest sequence. Bounds above the largest become the largest. Another alignment
//!   becomes the first one of the table. Documents, chunks, a prefix and sink tokens that are not taken
//!   are left out.
//! - *The soft cap* and the *backward pass* are left out. The *sink* becomes the first one of the table.
//! - *The group of ranks* becomes the whole world, and loses the ranks that are too many or gets those that are
//!   missing. An algorithm becomes the first one of the table that can deal the heads, and the balance the first one of
//!   the table. Where that leaves a rule of the algorithm broken, and where the table takes no algorithm of several
//!   ranks, there is one rank, or the least number of them. A region that is not taken, or cannot hold the heads, goes.
//! - *Lengths* are cut to the largest and to multiples, and sequences past the largest number are dropped. Where a
//!   sequence has keys, it gets at least the least number of them. A side that may not be empty gets one row, or that
//!   many keys. A sequence gets as many keys as queries where that is asked for, and where a query would see no key.
//!   Where there must be a sequence, there is one of one query and one key, or of the least number of keys.
//! - *Rows* that are refused go: padding, gaps, the first offset, slack. Rows that lie apart are packed, and sequences
//!   lie in their listed order. Keys lie like the queries where that is asked for. Where padding is taken, spans grow
//!   to what several ranks need; where it is refused under their algorithm alone, one rank is left. A tensor that is
//!   too large loses free rows, then padding, then its last sequences, then the ends of the others.
//! - *The form* becomes the plain one, or the first one of the table. Several ranks stay in segments and in a padded
//!   batch where padding is taken as they need it, and else one rank is left, as in batched segments. Segments own no
//!   other padding then, batched ones lie in a batch row each, and the spans of a padded batch are all
//!   as long as the longest, without other rows. Where the caller says that there is no padding, rows follow each other from row 0 on.
//! - *Steps* stay where the problem can still be made in them and the table takes all of their calls.
//! - *Pages* stay where keys and values can still lie in them, with a page for each key that has none. Of a size that
//!   is not taken they become those of the nearest, in the opposite order; where none is taken there are none.
//! - *Keys that sequences share* stay shared as far as the sequences still have them, where the table takes that.
//! - *The mode*, where it is exact and lost its preconditions, becomes the next exact one that has them.
//!
//! Values, ids, the data seed and the scale stay, but for the scale that a new mode needs. The result is inside the
//! table, and fitting it again changes nothing.

use seamproof_oracle::sharding::span_multiple;
use seamproof_oracle::{
    Algorithm, Alignment, Balance, ContextParallel, Dims, Form, Format, Heads, Mask, Pages, Pass, Precision,
    Problem, ProblemFields, Quantity, Run, ScaleValues, Sequence, Sink, TensorRows,
};

use super::refusal::has_blind_query;
use super::{BalanceKind, Lengths, MaskForm, MaskKind, Seams, SideLayout, Sizes, Table};
use crate::generate::with_legal_mode;
use crate::hash::{below, mix};
use crate::shrink::shape::{Arrangement, Layout};
use crate::shrink::{fewer_ranks, renumber};
use crate::subject::parallel::Needs;

/// Constants that set the choices of a precision, of scales and of head dims apart from other uses of the data seed.
const DRAW: u64 = 0xf0a3_27ec;
const SCALES: u64 = 0x5ca1_e5c3;
const DIMS_QK: u64 = 0xd1a5_0971;
const DIMS_V: u64 = 0xd1a5_0b3e;
/// Head dim that most draws do not exceed.
const FREQUENT_DIM: usize = 64;

/// Returns a problem whose descales are drawn in a way that its data seed chooses, if it has any.
fn with_drawn_scales(problem: Problem) -> Problem {
    if !problem.precision.has_scales() {
        return problem;
    }
    let is_own = |quantity: &Quantity| quantity.is_given(&problem.precision);
    // The delayed recipe differs from any numbers in what a kernel quantises.
    let count = ScaleValues::ALL.len() - usize::from(!Quantity::ALL.iter().any(is_own));
    let ways = &ScaleValues::ALL[..count];
    let scales = ways[below(ways.len() as u32, mix(problem.data_seed ^ SCALES)) as usize];
    Problem::new(ProblemFields { scales, ..problem.clone().into() }).unwrap_or(problem)
}

/// What of a problem is given up, besides what single rows refuse.
#[derive(Clone, Copy, PartialEq, Eq)]
enum GivenUp {
    /// Nothing.
    Nothing,
    /// All ranks but the least number of them.
    Ranks,
    /// All ranks but the least number of them, and every row that is not real.
    FreeRows,
}

impl Table {
    /// Returns the problem that is asked in place of a drawn one: the nearest in the table. Precisions that nothing
    /// draws, such as f32 in all of its quantities, are not the nearest to any draw where the table has others too.
    /// Each of them takes its share of the data seeds instead, and each way to draw scales its own.
    pub fn asked(&self, drawn: Problem) -> Problem {
        let count = self.precisions.len() as u32;
        let chosen = self.precisions.get(below(count, mix(drawn.data_seed ^ DRAW)) as usize);
        match chosen.filter(|precision| !Table::widest().precisions.contains(precision)) {
            Some(&precision) => {
                with_drawn_scales(Table { precisions: vec![precision], ..self.clone() }.fitted(drawn))
            }
            None => self.fitted(drawn),
        }
    }

    /// Returns the nearest problem that no row of the table refuses. The module's text says what changes.
    pub fn fitted(&self, problem: Problem) -> Problem {
        if self.refusal(&problem).is_none() {
            return problem;
        }
        let attempts = [GivenUp::Nothing, GivenUp::Ranks, GivenUp::FreeRows];
        let mut fitted =
            attempts.into_iter().filter_map(|given_up| self.fit(problem.clone().into(), given_up));
        let inside = fitted.find(|fitted| self.refusal(fitted).is_none());
        with_legal_mode(inside.unwrap_or(problem))
    }

    /// Returns the problem that fits after giving something up; `None` where that is no problem.
    fn fit(&self, mut fields: ProblemFields, given_up: GivenUp) -> Option<Problem> {
        fields.precision = self.nearest_precision(&fields.precision);
        fields.dims = self.nearest_dims(fields.dims, fields.data_seed);
        fields.heads = self.nearest_heads(fields.heads);
        fields.mask = self.nearest_mask(fields.mask, &fields.sequences);
        fields.softmax.softcap = fields.softmax.softcap.filter(|_| self.softcap);
        if !self.sinks.contains(&fields.softmax.sink) {
            fields.softmax.sink = self.sinks.first().copied().unwrap_or(Sink::None);
        }
        if !self.backward {
            fields.pass = Pass::Forward;
        }
        fields.parallel = match given_up {
            GivenUp::Nothing => self.nearest_parallel(&fields.parallel, fields.heads),
            GivenUp::Ranks | GivenUp::FreeRows => self.fewest_ranks(),
        };
        let form = self.nearest_form(fields.form);
        if !form.is_dealt() {
            fields.parallel = self.fewest_ranks();
        }
        // What follows may be in no other form yet, nor in steps or pages, and shares no keys.
        fields.form = Form::CuSeqlens;
        let (steps, pages) = (std::mem::take(&mut fields.steps), fields.pages.take());
        let sharing = std::mem::take(&mut fields.sharing);
        let before = Problem::new(fields).ok()?;
        let mut shape = Arrangement::of(&before);
        self.fit_lengths(&mut shape, before.mask);
        self.fit_rows(&mut shape, &before, given_up);
        self.fit_tensors(&mut shape, form, &before.parallel);
        if self.parallel.ranks_least > 1 {
            self.fit_shares(&mut shape, &before.parallel);
        }
        let fitted = Problem::new(ProblemFields { form, ..self.written(&before, &shape) }).ok()?;
        let in_steps = Problem::new(ProblemFields { steps, ..fitted.clone().into() }).ok();
        let fitted = in_steps.filter(|problem| self.of_steps(problem).is_none()).unwrap_or(fitted);
        let in_pages = pages.and_then(|pages| self.nearest_pages(&pages, &before.sequences, &fitted));
        let in_pages = in_pages.map(|pages| ProblemFields { pages: Some(pages), ..fitted.clone().into() });
        let fitted = in_pages.and_then(|fields| Problem::new(fields).ok()).unwrap_or(fitted);
        let sharing = sharing.fitted(&before.sequences, &fitted.sequences);
        let shares = Problem::new(ProblemFields { sharing, ..fitted.clone().into() }).ok();
        Some(shares.filter(|_| self.sharing).unwrap_or(fitted))
    }

    /// Whether any problem of the table can have keys that sequences share: of two sequences, in the plain form.
    pub(super) fn fits_sharing(&self) -> bool {
        self.sharing && self.lengths.sequences_most > 1 && self.forms.contains(&Form::CuSeqlens)
    }

    /// Returns the pages of a problem's sequences `before` they were fitted, in a size of the table.
    fn nearest_pages(&self, pages: &Pages, before: &[Sequence], fitted: &Problem) -> Option<Pages> {
        let sizes = self.pages.as_ref()?;
        if sizes.contains(pages.size) {
            return Some(pages.fitted(before, fitted));
        }
        let keys = fitted.sequences.iter().map(|sequence| sequence.kv.len);
        Some(Pages::in_order(sizes.nearest(pages.size), keys).reversed())
    }

    /// Returns the precision of the table with the most equal quantities.
    pub(super) fn nearest_precision(&self, precision: &Precision) -> Precision {
        let unlike = |other: &&Precision| {
            let both = precision.elements().into_iter().zip(other.elements());
            both.filter(|(own, other)| own != other).count()
        };
        self.precisions.iter().min_by_key(unlike).copied().unwrap_or(Precision::uniform(Format::F32))
    }

    /// Returns a form of the table: the problem's own, or the plain one, or the first.
    fn nearest_form(&self, form: Form) -> Form {
        let taken = |form: &Form| self.fits(*form);
        [form, Form::CuSeqlens].into_iter().chain(self.forms.iter().copied()).find(taken).unwrap_or(form)
    }

    /// Whether any problem of the table can be brought into a form. Lengths that differ need padding, and several ranks
    /// share any length with padding alone.
    pub(super) fn fits(&self, form: Form) -> bool {
        let one_rank = self.parallel.ranks_least == 1 && self.parallel.takes(Algorithm::Single);
        let fits = match form {
            Form::CuSeqlens | Form::PadBetweenSeqs => true,
            Form::Segments | Form::NoPadBetweenSeqs => one_rank,
            Form::BatchedSegments => one_rank && self.frees_rows(),
            Form::Lengths => one_rank && self.takes_padding(Algorithm::Single, SideLayout::Bshd),
            Form::MisshapenSegments | Form::UnequalLengths => false,
        };
        self.forms.contains(&form) && fits
    }

    /// Whether any problem of the table can be made in steps: several calls need padding, since the cache is not yet
    /// full.
    pub(super) fn fits_steps(&self) -> bool {
        let causal = [MaskForm::Causal, MaskForm::CausalWindow];
        self.cache
            && causal.iter().any(|form| self.masks.forms.contains(form))
            && self.masks.alignments.contains(&Alignment::BottomRight)
            && self.parallel.takes(Algorithm::Single)
            && self.forms.contains(&Form::CuSeqlens)
            && SideLayout::ALL.iter().all(|layout| self.takes_padding(Algorithm::Single, *layout))
            && !self.lengths.equal
    }

    /// Whether any problem of the table can be in a region of up to 4 ranks, which needs the plain form, and heads for
    /// each of them.
    pub(super) fn fits_regions(&self) -> bool {
        let (most, mut groups) = (self.heads.most, self.heads.groups.iter());
        let dealt = |group: usize| (2..=4).any(|ranks| group.is_multiple_of(ranks));
        let heads = groups.any(|group| 2 * group <= most || group <= most && dealt(group));
        self.parallel.regions && heads && self.forms.contains(&Form::CuSeqlens)
    }

    /// Returns the nearest head dims. Where all are larger than most that are drawn, the nearest to nearly every draw would be
    /// the least: the data seed draws them instead.
    fn nearest_dims(&self, Dims { qk, v }: Dims, data_seed: u64) -> Dims {
        let (taken, inside) = (&self.dims, self.dims.qk.contains(qk) && self.dims.v.contains(v));
        let size = |sizes: &Sizes, drawn: usize, seed: u64| match sizes.least() {
            least if drawn < least && least > FREQUENT_DIM => sizes.any(mix(data_seed ^ seed)),
            _ => sizes.nearest(drawn),
        };
        if !taken.equal {
            return Dims { qk: size(&taken.qk, qk, DIMS_QK), v: size(&taken.v, v, DIMS_V) };
        }
        if inside && qk == v {
            return Dims { qk, v };
        }
        let both = taken.qk.iter().filter(|size| taken.v.contains(*size));
        let nearest = both.min_by_key(|size| size.abs_diff(qk) + size.abs_diff(v)).unwrap_or(qk);
        Dims { qk: nearest, v: nearest }
    }

    fn nearest_heads(&self, heads: Heads) -> Heads {
        let (drawn, most) = (heads.q / heads.kv, self.heads.most);
        let fitting = self.heads.groups.iter().filter(|group| *group <= most);
        let group = fitting.min_by_key(|group| group.abs_diff(drawn)).unwrap_or(drawn);
        let kv = heads.kv.min((most / group).max(1));
        Heads { q: kv * group, kv }
    }

    fn nearest_mask(&self, mask: Mask, sequences: &[Sequence]) -> Mask {
        let taken = &self.masks;
        let align = match taken.alignments.first() {
            Some(&first) if !taken.alignments.contains(&mask.align) => first,
            _ => mask.align,
        };
        let longest = sequences.iter().map(|s| s.q.len + s.kv.len).max().unwrap_or(0);
        let far = u32::try_from(longest.max(1)).unwrap_or(u32::MAX);
        let most = |bound: Option<u32>| bound.map(|bound| bound.min(taken.window_most));
        let forms = taken.forms.iter().map(|form| {
            let (left, right) = form.bounds(&mask, far);
            Mask::window(left, right, align)
        });
        let changed =
            |other: &Mask| usize::from(mask.left != other.left) + usize::from(mask.right != other.right);
        let nearest = forms.min_by_key(changed).unwrap_or(mask);
        let (left, right) = (most(nearest.left), most(nearest.right));
        let taken = |kind: MaskKind| taken.kinds.contains(&kind);
        let blocks = mask.blocks.filter(|_| MaskKind::of(&mask).next().is_some_and(taken));
        let kept = |kind: MaskKind, count: u32| if taken(kind) { count } else { 0 };
        let prefix = kept(MaskKind::Prefix, mask.prefix);
        let sink_tokens = kept(MaskKind::SinkTokens, mask.sink_tokens);
        Mask { left, right, align, blocks, prefix, sink_tokens }
    }

    /// Returns the group with the rows of the table, which may still break a rule of its algorithm.
    fn nearest_parallel(&self, parallel: &ContextParallel, heads: Heads) -> ContextParallel {
        let (taken, mut fitted) = (&self.parallel, parallel.clone());
        let is_part = fitted.world != fitted.size();
        if fitted.size() > taken.ranks_most {
            fewer_ranks(&mut fitted, taken.ranks_most);
        }
        if fitted.size() < taken.ranks_least {
            fitted.ranks = (0..taken.ranks_least).collect();
            fewer_ranks(&mut fitted, taken.ranks_least);
            renumber(&mut fitted);
        }
        let is_cut = fitted.size() < parallel.size();
        if is_part && !taken.sub_groups || is_cut && !is_part {
            renumber(&mut fitted);
        }
        if !taken.takes(fitted.algorithm) {
            let size = fitted.size();
            let mut others = Algorithm::of_several_ranks().filter(|_| size > 1);
            let fits = |other: &Algorithm| {
                taken.takes(*other) && Needs::of(*other, size).broken_by_heads(heads).is_none()
            };
            let Some(other) = others.find(fits) else { return self.fewest_ranks() };
            fitted.algorithm = other;
        }
        if fitted.algorithm != Algorithm::Single {
            fitted.balance = self.nearest_balance(&fitted);
        }
        if fitted.world > taken.world_most {
            let idle = taken.world_most - fitted.size();
            leave_idle(&mut fitted, idle);
        }
        if !taken.order {
            fitted.ranks.sort_unstable();
        }
        if !taken.regions || heads.dealt(fitted.region).is_none() {
            fitted.region = 1;
        }
        fitted
    }

    /// Returns the balance of a group if it can stay, its kind with stripes of one row if that can, or else the first
    /// balance of the table.
    fn nearest_balance(&self, parallel: &ContextParallel) -> Balance {
        let (taken, kind) = (&self.parallel, BalanceKind::of(parallel.balance));
        if !taken.balances.contains(&kind) {
            return taken.balances.first().map_or(parallel.balance, |first| first.simplest());
        }
        let stays = taken.takes_stripes(parallel.algorithm, parallel.balance);
        if stays { parallel.balance } else { kind.simplest() }
    }

    /// Returns the smallest group: one rank with the plain call, or else the first algorithm of the table that takes
    /// any heads and any lengths in a group of that size.
    fn fewest_ranks(&self) -> ContextParallel {
        let (taken, size) = (&self.parallel, self.parallel.ranks_least);
        let all = std::iter::once(Algorithm::Single).chain(Algorithm::of_several_ranks());
        let fits = |other: &Algorithm| size == 1 || self.shares_anything(*other);
        let first = all.filter(fits).find(|algorithm| taken.takes(*algorithm));
        ContextParallel::over(size, first.unwrap_or(Algorithm::Single), taken.smallest_balance())
    }

    /// Whether several ranks of an algorithm take any heads, and any lengths of packed rows by means of padding.
    pub(super) fn shares_anything(&self, algorithm: Algorithm) -> bool {
        let padded = |layout| self.takes_padding(algorithm, layout);
        matches!(algorithm, Algorithm::Ring | Algorithm::AllGather)
            && padded(SideLayout::Thd)
            && padded(SideLayout::Bshd)
    }

    fn fit_lengths(&self, shape: &mut Arrangement, mask: Mask) {
        let taken = &self.lengths;
        shape.retain(|index| index < taken.sequences_most);
        if shape.ids.is_empty() && !taken.no_sequences {
            shape.add_one();
        }
        shape.cap_lengths(taken.most);
        let empty_q = taken.empty_q && (taken.empty_kv || !taken.equal);
        let (unit_q, unit_kv) = taken.units();
        let least_kv = taken.least_kv.next_multiple_of(unit_kv);
        for (q, kv) in shape.q.pieces.iter_mut().zip(&mut shape.kv.pieces) {
            q.len -= q.len % unit_q;
            kv.len -= kv.len % unit_kv;
            let least_q = if taken.equal { least_kv } else { unit_q };
            if q.len > 0 || !empty_q {
                q.hold(least_q);
            }
            if kv.len > 0 {
                kv.hold(least_kv);
            }
            if taken.equal && q.len != kv.len {
                (kv.len, kv.pad) = (q.len, q.pad);
            }
            if kv.len == 0 && !taken.empty_kv {
                kv.hold(least_kv);
            }
            // More keys than queries leave no query blind.
            if !taken.blind_queries && has_blind_query(mask, q.len, kv.len) {
                (kv.len, kv.pad) = (q.len, q.pad);
                kv.hold(least_kv);
            }
        }
    }

    fn fit_rows(&self, shape: &mut Arrangement, problem: &Problem, given_up: GivenUp) {
        let (taken, parallel) = (&self.layout, &problem.parallel);
        if taken.equal {
            // Lengths are the same by now, and what follows does the same to both sides.
            shape.kv = shape.q.clone();
        }
        let cut = parallel.algorithm != Algorithm::Single;
        for side in shape.sides() {
            if !taken.padding {
                side.cap_padding(0);
            }
            if !taken.gaps {
                side.cap_gaps(0);
            }
            if !taken.first_offset {
                side.cap_first(0);
            }
            if !taken.slack {
                side.cap_slack(0);
            }
            if !taken.steps || !taken.gaps && side.leaves_rows_between() {
                side.pack();
            }
            if !taken.order {
                side.sort();
            }
            if given_up == GivenUp::FreeRows {
                side.plain();
            }
            self.fit_padding(side, parallel.algorithm);
            if cut && taken.padding {
                side.round_spans(span_multiple(parallel.balance, parallel.size()));
            }
        }
    }

    /// Cuts the padding of a side whose layout has none under the algorithm. Rows between lanes that are left may be
    /// refused as well; the side is packed then.
    fn fit_padding(&self, side: &mut Layout, algorithm: Algorithm) {
        let (runs, _) = side.runs();
        if !self.takes_padding(algorithm, SideLayout::of(&runs)) {
            side.cap_padding(0);
            if !self.layout.gaps && side.leaves_rows_between() {
                side.pack();
            }
        }
    }

    /// Cuts tensors to the largest number of rows, and brings the rows into a form.
    fn fit_tensors(&self, shape: &mut Arrangement, form: Form, parallel: &ContextParallel) {
        let most = self.lengths.rows_most;
        let too_large = |side: &Layout| side.rows() > most;
        for side in shape.sides() {
            if too_large(side) {
                side.cap_gaps(0);
                side.cap_first(0);
                side.cap_slack(0);
                side.pack();
            }
            if too_large(side) {
                side.cap_padding(0);
            }
        }
        shape.bring_into(form, parallel);
        while shape.ids.len() > 1 && shape.sides().into_iter().any(|side| too_large(side)) {
            let last = shape.ids.len() - 1;
            shape.retain(|index| index < last);
            shape.cut_padding_of(form, parallel);
        }
        if shape.sides().into_iter().any(|side| too_large(side)) {
            shape.cap_lengths(most - most % self.lengths.unit());
            shape.cut_padding_of(form, parallel);
        }
    }

    /// Gives each sequence a span that the ranks can share, in tensors of the largest number of rows.
    fn fit_shares(&self, shape: &mut Arrangement, parallel: &ContextParallel) {
        let multiple = span_multiple(parallel.balance, parallel.size());
        let most = self.lengths.rows_most;
        shape.sides().into_iter().for_each(|side| side.round_spans(multiple));
        let is_too_large = |shape: &mut Arrangement| shape.sides().into_iter().any(|side| side.rows() > most);
        while shape.ids.len() > 1 && is_too_large(shape) {
            let last = shape.ids.len() - 1;
            shape.retain(|index| index < last);
        }
        if is_too_large(shape) {
            let lengths =
                Lengths { multiple_q: multiple, multiple_kv: self.lengths.unit(), ..self.lengths.clone() };
            shape.cap_lengths(most - most % lengths.unit());
            for side in shape.sides() {
                side.plain();
                side.round_spans(multiple);
            }
        }
    }

    /// Returns the problem's fields with this arrangement. A side of which nothing changed stays as it is.
    fn written(&self, problem: &Problem, shape: &Arrangement) -> ProblemFields {
        let (own, mut fields) = (Arrangement::of(problem), ProblemFields::from(problem.clone()));
        let side = |own_side: &Layout, new: &Layout, run: fn(&Sequence) -> Run, rows: usize| {
            let runs: Vec<Run> = problem.sequences.iter().map(run).collect();
            let refused = Seams::of_side(&runs, rows).refused(&self.layout).next().is_some();
            if own_side == new && !refused { (runs, rows) } else { new.runs() }
        };
        let (q, q_rows) = side(&own.q, &shape.q, |sequence| sequence.q, problem.rows.q);
        let (kv, kv_rows) = match self.layout.equal {
            true => (q.clone(), q_rows),
            false => side(&own.kv, &shape.kv, |sequence| sequence.kv, problem.rows.kv),
        };
        let runs = q.into_iter().zip(kv);
        fields.sequences = shape.ids.iter().zip(runs).map(|(&id, (q, kv))| Sequence { id, q, kv }).collect();
        fields.rows = TensorRows { q: q_rows, kv: kv_rows };
        fields
    }
}

/// Leaves this many of the ranks that are not in the group, the first ones, and numbers all that stay anew.
fn leave_idle(parallel: &mut ContextParallel, idle: usize) {
    let is_idle = |rank: &usize| !parallel.ranks.contains(rank);
    let mut kept: Vec<usize> = (0..parallel.world).filter(is_idle).take(idle).collect();
    kept.extend(&parallel.ranks);
    kept.sort_unstable();
    let number = |rank: &usize| kept.binary_search(rank).unwrap_or_default();
    parallel.ranks = parallel.ranks.iter().map(number).collect();
    parallel.world = kept.len();
}

impl MaskForm {
    /// Returns the bounds of this form that are nearest to those of a mask. A bound that the mask has not reaches
    /// `far` keys.
    fn bounds(self, mask: &Mask, far: u32) -> (Option<u32>, Option<u32>) {
        let left = Some(mask.left.unwrap_or(far));
        let right = Some(mask.right.filter(|right| *right > 0).unwrap_or(far));
        match self {
            MaskForm::Full => (None, None),
            MaskForm::Causal => (None, Some(0)),
            MaskForm::LeftWindow => (left, None),
            MaskForm::RightWindow => (None, right),
            MaskForm::CausalWindow => (left, Some(0)),
            MaskForm::TwoSided => (left, right),
        }
    }
}
