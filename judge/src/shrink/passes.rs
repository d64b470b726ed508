//! The passes, in the order in which they run. The first ones cut the cost of every later evaluation; fine detail
//! comes last.
//!
//! A *step* is an edit of the best problem, named by a cursor. Steps need not be legal or smaller, because the
//! machine skips those that are not. An edit that changes nothing (such as removing a soft cap where there is none)
//! therefore costs nothing. A number is *lowered* to 0, 1, 2, 3, then to the boundaries where kernels change course,
//! then by bisection.

use std::num::NonZeroU32;
use std::ops::Range;

use seamproof_oracle::{
    Algorithm, Alignment, BORDERS_MAX, Balance, Blocks, Borders, ContextParallel, Dims, Element, Form,
    Format, Heads, InputMode, Mask, PAGE_SIZE_MAX, Pages, Pass, Precision, Problem, ProblemFields,
    ScaleValues, Scaling, Sharing, Sink, Softmax, Steps,
};

use super::shape::{Arrangement, Layout};

/// Answer of a pass at one cursor.
pub(super) enum Proposal {
    /// A candidate, not yet checked.
    Try(Box<ProblemFields>),
    /// No candidate at this cursor.
    Skip,
    /// No candidate at this cursor or any later one.
    Over,
}

/// A named series of steps.
pub(super) struct ShrinkPass {
    /// Name in the table of accepted steps.
    pub(super) name: &'static str,
    /// Function that returns the step at a cursor.
    pub(super) step: fn(&Problem, usize) -> Proposal,
}

/// Every pass, in order.
pub(super) const PASSES: &[ShrinkPass] = &[
    ShrinkPass { name: "at once", step: at_once },
    ShrinkPass { name: "region", step: region },
    ShrinkPass { name: "forward only", step: forward_only },
    ShrinkPass { name: "sequences", step: sequences },
    ShrinkPass { name: "all lengths", step: all_lengths },
    ShrinkPass { name: "softmax", step: softmax },
    ShrinkPass { name: "mask", step: mask },
    ShrinkPass { name: "form", step: form },
    ShrinkPass { name: "steps", step: steps },
    ShrinkPass { name: "pages", step: pages },
    ShrinkPass { name: "sharing", step: sharing },
    ShrinkPass { name: "layout", step: layout },
    ShrinkPass { name: "heads", step: heads },
    ShrinkPass { name: "dims", step: dims },
    ShrinkPass { name: "parallel", step: parallel },
    ShrinkPass { name: "ranks", step: ranks },
    ShrinkPass { name: "values", step: values },
    ShrinkPass { name: "blocks", step: blocks },
    ShrinkPass { name: "window", step: window },
    ShrinkPass { name: "window and lengths", step: window_and_lengths },
    ShrinkPass { name: "lengths", step: lengths },
    ShrinkPass { name: "free rows", step: free_rows },
    ShrinkPass { name: "precision", step: precision },
    ShrinkPass { name: "names", step: names },
    ShrinkPass { name: "full chunks", step: full_chunks },
    ShrinkPass { name: "other values", step: other_values },
];

/// Largest number of sequences that are refined one by one. More sequences are only dropped, or all cut at once: a
/// step costs time linear in the sequences, so a pass over each of them would be quadratic.
const REFINED_MAX: usize = 64;

/// Lengths to which all sequences are cut at once.
const LENGTH_CAPS: [usize; 10] = [1, 2, 4, 8, 16, 32, 64, 128, 512, 2048];
/// Widths to which all free rows of a kind are cut at once.
const FREE_CAPS: [usize; 3] = [0, 1, 4];
/// Length of a cut that leaves most faults alive: short enough to be cheap, long enough for a diagonal and a block
/// edge.
const SMALL: usize = 4;
/// First values that a number is lowered to.
const SMALLEST: [usize; 4] = [0, 1, 2, 3];
/// Tile sizes, each with its successor, where kernels take another path.
const BOUNDARIES: [usize; 12] = [4, 5, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129];
/// Number of bisection steps, more than any bounded number here has bits.
const HALVINGS: usize = 32;
/// Number of cursors that one number takes up.
const SLOTS: usize = SMALLEST.len() + BOUNDARIES.len() + HALVINGS;

/// Returns the value to which a number is lowered at a slot; `None` where that is not lower.
fn lowered(n: usize, slot: usize) -> Option<usize> {
    let fixed = SMALLEST.iter().chain(&BOUNDARIES).nth(slot).copied();
    let value = fixed.unwrap_or_else(|| n - (n >> (slot + 1 - SMALLEST.len() - BOUNDARIES.len())));
    (value < n).then_some(value)
}

/// Reads a cursor as digits of the given bases, the last one fastest; `None` past the end.
fn digits<const N: usize>(mut cursor: usize, bases: [usize; N]) -> Option<[usize; N]> {
    let mut digits = [0; N];
    for (digit, base) in digits.iter_mut().zip(bases).rev() {
        *digit = cursor.checked_rem(base)?;
        cursor /= base;
    }
    (cursor == 0).then_some(digits)
}

/// Returns the number of sequences that are refined one by one: all, or none where they are too many.
fn refined(best: &Problem) -> usize {
    Some(best.sequences.len()).filter(|&count| count <= REFINED_MAX).unwrap_or(0)
}

fn edit(best: &Problem, change: impl FnOnce(&mut ProblemFields)) -> Proposal {
    let mut fields = ProblemFields::from(best.clone());
    change(&mut fields);
    keep_pages(best, &mut fields);
    keep_sharing(best, &mut fields);
    Proposal::Try(Box::new(fields))
}

/// Gives other sequences than the best problem's the pages that they had there, and parts shared pages that other
/// fields do not fill alike.
fn keep_pages(best: &Problem, fields: &mut ProblemFields) {
    let Some(pages) = fields.pages.take() else { return };
    let fits = fields.sequences == best.sequences && pages.check(fields).is_ok();
    fields.pages = Some(if fits { pages } else { pages.fitted(&best.sequences, fields) });
}

/// Keeps the keys that sequences of the best problem share, as far as other fields can. As many sequences are the same
/// ones, whatever their ids.
fn keep_sharing(best: &Problem, fields: &mut ProblemFields) {
    let fits = |fields: &ProblemFields| fields.sharing.check(fields).is_ok();
    if fields.sequences.len() == best.sequences.len() && fits(fields) {
        return;
    }
    fields.sharing = fields.sharing.fitted(&best.sequences, &fields.sequences);
    if !fits(fields) {
        fields.sharing = Sharing::default();
    }
}

fn reshape(best: &Problem, change: impl FnOnce(&mut Arrangement)) -> Proposal {
    let mut shape = Arrangement::of(best);
    change(&mut shape);
    edit(best, |fields| shape.write(fields))
}

/// Edits the group. Rows that are dealt in segments or in lengths are laid out for the new one.
fn regroup(best: &Problem, change: impl FnOnce(&mut ProblemFields)) -> Proposal {
    edit(best, |fields| {
        change(fields);
        if !fields.form.gives_offsets() {
            Arrangement::of(best).write(fields);
        }
    })
}

fn pick(best: &Problem, cursor: usize, edits: &[fn(&mut ProblemFields)]) -> Proposal {
    edits.get(cursor).map_or(Proposal::Over, |change| edit(best, change))
}

/// Makes several things simple at once. Cursor 0 makes everything simple. The others make the problem small and leave
/// alone what faults depend on: cursor 1 keeps the first sequence without seams, cursor 2 the first sequence, cursor
/// 3 all sequences.
fn at_once(best: &Problem, cursor: usize) -> Proposal {
    if cursor > 3 {
        return Proposal::Over;
    }
    let mut shape = Arrangement::of(best);
    shape.cap_lengths(if cursor == 0 { 1 } else { SMALL });
    if cursor <= 2 {
        shape.retain(|index| index == 0);
    }
    if cursor <= 1 {
        shape.plain();
    }
    edit(best, |fields| {
        shape.write(fields);
        one_head(fields);
        if cursor == 0 {
            plain_features(fields);
            plain_values(fields);
        }
    })
}

fn one_head(fields: &mut ProblemFields) {
    fields.heads = Heads { q: 1, kv: 1 };
    fields.dims = Dims { qk: 1, v: 1 };
}

fn plain_features(fields: &mut ProblemFields) {
    fields.form = Form::CuSeqlens;
    fields.steps = Steps::default();
    fields.pages = None;
    fields.sharing = Sharing::default();
    fields.mask = Mask::FULL;
    fields.softmax = Softmax { scale: 1.0, softcap: None, sink: Sink::None };
    fields.parallel = ContextParallel::single();
}

/// Leaves out the region, or makes it smaller; then also with the fewest heads that the smaller one can hold.
fn region(best: &Problem, cursor: usize) -> Proposal {
    let Some([heads, less]) = digits(cursor, [2, REGIONS.len()]) else { return Proposal::Over };
    let (own, region) = (best.parallel.region, REGIONS[less]);
    if own == 1 || region > own || heads == 0 && region == own {
        return Proposal::Skip;
    }
    edit(best, |fields| {
        fields.parallel.region = region;
        if heads == 1 {
            fields.heads = Heads { q: region, kv: 1 };
        }
    })
}

/// Ranks of a region that are tried in place of its own.
const REGIONS: [usize; 3] = [1, 2, 4];

fn forward_only(best: &Problem, cursor: usize) -> Proposal {
    pick(best, cursor, &[|fields| fields.pass = Pass::Forward])
}

/// Keeps one of the first sequences alone; then drops chunks of sequences: halves, quarters, …, and single ones where
/// they are few.
fn sequences(best: &Problem, cursor: usize) -> Proposal {
    /// Number of sequences that are tried alone, since most faults show in any of them. Where there is only one, the
    /// second try leaves no sequence.
    const ALONE: usize = 2;
    if cursor < ALONE {
        return reshape(best, |shape| shape.retain(|index| index == cursor));
    }
    match chunk(best.sequences.len(), cursor - ALONE) {
        None => Proposal::Over,
        Some(dropped) => reshape(best, |shape| shape.retain(|index| !dropped.contains(&index))),
    }
}

/// Returns the n-th chunk of `0..count`, cut into halves, quarters, … of at most [`REFINED_MAX`] chunks.
fn chunk(count: usize, mut n: usize) -> Option<Range<usize>> {
    let mut width = count;
    while width > 1 {
        width = width.div_ceil(2);
        let chunks = count.div_ceil(width);
        if chunks > REFINED_MAX {
            return None;
        }
        if n < chunks {
            return Some(n * width..(n + 1) * width);
        }
        n -= chunks;
    }
    None
}

fn all_lengths(best: &Problem, cursor: usize) -> Proposal {
    match LENGTH_CAPS.get(cursor) {
        None => Proposal::Over,
        Some(&most) => reshape(best, |shape| shape.cap_lengths(most)),
    }
}

fn softmax(best: &Problem, cursor: usize) -> Proposal {
    pick(
        best,
        cursor,
        &[
            |fields| fields.softmax = Softmax { scale: 1.0, softcap: None, sink: Sink::None },
            |fields| fields.softmax = Softmax { softcap: None, sink: Sink::None, ..fields.softmax },
            |fields| fields.softmax.softcap = None,
            |fields| fields.softmax.sink = Sink::None,
            |fields| fields.softmax.softcap = fields.softmax.softcap.map(|_| 1.0),
            |fields| fields.softmax.sink = Sink::OffByOne,
        ],
    )
}

fn mask(best: &Problem, cursor: usize) -> Proposal {
    pick(
        best,
        cursor,
        &[
            |fields| fields.mask = Mask::FULL,
            |fields| fields.mask = Mask::CAUSAL,
            |fields| {
                let Mask { left, right, align, .. } = fields.mask;
                fields.mask = Mask::window(left, right, align);
            },
            |fields| fields.mask.blocks = None,
            |fields| fields.mask.prefix = 0,
            |fields| fields.mask.sink_tokens = 0,
            |fields| fields.mask = Mask { left: None, right: Some(0), ..fields.mask },
            |fields| fields.mask.left = None,
            |fields| fields.mask.right = None,
            |fields| fields.mask.align = Alignment::TopLeft,
        ],
    )
}

fn form(best: &Problem, cursor: usize) -> Proposal {
    pick(best, cursor, &[|fields| fields.form = Form::CuSeqlens])
}

/// Makes all calls one, without a cache. Then tries one call alone, on what is in the cache before it: in one call
/// without a cache, and as one step. Then drops a step, and lowers its tokens.
fn steps(best: &Problem, cursor: usize) -> Proposal {
    if best.steps.is_empty() {
        return Proposal::Over;
    }
    let Some(cursor) = cursor.checked_sub(1) else {
        return Proposal::Try(Box::new(best.at_once().into()));
    };
    let calls = best.calls();
    if let Some(call) = calls.get(cursor / 2) {
        let mut fields = ProblemFields::from(call.problem.clone());
        if cursor.is_multiple_of(2) {
            return Proposal::Try(Box::new(fields));
        }
        fields.steps = Steps(call.appends.iter().map(|append| append.tokens).max().into_iter().collect());
        return Proposal::Try(Box::new(fields));
    }
    let count = best.steps.0.len();
    let Some([index, slot]) = digits(cursor - 2 * calls.len(), [count, SLOTS]) else { return Proposal::Over };
    let Some(tokens) = lowered(best.steps.0[index], slot) else { return Proposal::Skip };
    edit(best, |fields| match tokens {
        0 => drop(fields.steps.0.remove(index)),
        _ => fields.steps.0[index] = tokens,
    })
}

/// Takes keys and values out of the pages. Then makes pages small with as few keys as need as many of them, or large.
/// Puts them in order, parts what is shared, and drops pages that hold no key or that no sequence owns, all of these or
/// one.
fn pages(best: &Problem, cursor: usize) -> Proposal {
    const SMALL: usize = 4;
    const SIZES: [usize; 6] = [PAGE_SIZE_MAX, 64, 16, 8, 4, 2];
    const SIMPLER: [fn(Pages, Pages) -> Pages; 5] = [
        |_, in_order| in_order,
        |_, in_order| in_order.reversed(),
        |pages, _| pages.parted().without_free(),
        |pages, _| pages.without_free(),
        |mut pages, in_order| {
            let filled = pages.table.iter_mut().zip(&in_order.table);
            filled.for_each(|(row, needed)| row.truncate(needed.len()));
            pages.without_free()
        },
    ];
    let Some(pages) = &best.pages else { return Proposal::Over };
    let in_order = |size| Pages::in_order(size, best.sequences.iter().map(|sequence| sequence.kv.len));
    let Some(cursor) = cursor.checked_sub(1) else { return edit(best, |fields| fields.pages = None) };
    let Some(cursor) = cursor.checked_sub(SMALL) else { return small_pages(best, pages, 1 + cursor) };
    let simpler = match (SIZES.get(cursor / 2), SIMPLER.get(cursor.wrapping_sub(2 * SIZES.len()))) {
        (Some(&size), _) if size <= pages.size => return Proposal::Skip,
        (Some(&size), _) if cursor.is_multiple_of(2) => in_order(size),
        (Some(&size), _) => in_order(size).reversed(),
        (_, Some(simpler)) => simpler(pages.clone(), in_order(pages.size)),
        _ => match pages.free().get(cursor - 2 * SIZES.len() - SIMPLER.len()) {
            Some(&free) if cursor < REFINED_MAX => pages.clone().without(&[free]),
            _ => return Proposal::Over,
        },
    };
    edit(best, |fields| fields.pages = Some(simpler))
}

/// Gives all sequences keys of their own, then one of them; then shares fewer keys.
fn sharing(best: &Problem, cursor: usize) -> Proposal {
    let count = best.sharing.0.len();
    if count == 0 {
        return Proposal::Over;
    }
    let Some(cursor) = cursor.checked_sub(1) else { return edit(best, |fields| fields.sharing.0.clear()) };
    let Some([index, slot]) = digits(cursor, [count, SLOTS]) else { return Proposal::Over };
    let Some(keys) = lowered(best.sharing.0[index].keys, slot) else { return Proposal::Skip };
    edit(best, |fields| match keys {
        0 => drop(fields.sharing.0.remove(index)),
        _ => fields.sharing.0[index].keys = keys,
    })
}

/// Makes pages as small as `size`. Each sequence keeps its pages with one key in the last, and no more queries than
/// keys.
fn small_pages(best: &Problem, pages: &Pages, size: usize) -> Proposal {
    if size >= pages.size {
        return Proposal::Skip;
    }
    let mut shape = Arrangement::of(best);
    for (q, kv) in shape.q.pieces.iter_mut().zip(&mut shape.kv.pieces) {
        kv.len = kv.len.div_ceil(pages.size).checked_sub(1).map_or(0, |full| full * size + 1);
        q.len = q.len.min(kv.len);
    }
    let mut fields = ProblemFields::from(best.clone());
    shape.write(&mut fields);
    fields.pages = Some(Pages { size, ..pages.clone() }.of_full(&fields));
    Proposal::Try(Box::new(fields))
}

/// Removes whole kinds of seams: all of them, then each kind alone; on both sides, then on each side alone.
fn layout(best: &Problem, cursor: usize) -> Proposal {
    const ORDER: [fn(&mut Layout); 3] = [Layout::plain, Layout::pack, Layout::sort];
    const FREE: [fn(&mut Layout, usize); 5] =
        [Layout::cap_all, Layout::cap_padding, Layout::cap_gaps, Layout::cap_first, Layout::cap_slack];
    let steps = ORDER.len() + FREE.len() * FREE_CAPS.len();
    let Some([sides, step]) = digits(cursor, [3, steps]) else { return Proposal::Over };
    reshape(best, |shape| {
        for side in on(shape, sides) {
            match ORDER.get(step) {
                Some(change) => change(side),
                None => {
                    let free = step - ORDER.len();
                    FREE[free % FREE.len()](side, FREE_CAPS[free / FREE.len()]);
                }
            }
        }
    })
}

/// Returns both sides (0), q (1) or kv (2).
fn on(shape: &mut Arrangement, sides: usize) -> impl Iterator<Item = &mut Layout> {
    shape.sides().into_iter().enumerate().filter_map(move |(index, side)| {
        let chosen = sides == 0 || sides == index + 1;
        chosen.then_some(side)
    })
}

/// Lowers the KV heads and the group (the query heads of each KV head), so that every ratio stays legal.
fn heads(best: &Problem, cursor: usize) -> Proposal {
    let (kv, group) = (best.heads.kv, best.group());
    let Some([which, slot]) = digits(cursor, [3, SLOTS]) else { return Proposal::Over };
    let Some((kv, group)) = lower_pair((kv, group), which, slot) else { return Proposal::Skip };
    edit(best, |fields| fields.heads = Heads { q: kv * group, kv })
}

fn dims(best: &Problem, cursor: usize) -> Proposal {
    let Dims { qk, v } = best.dims;
    let Some([which, slot]) = digits(cursor, [3, SLOTS]) else { return Proposal::Over };
    let Some((qk, v)) = lower_pair((qk, v), which, slot) else { return Proposal::Skip };
    edit(best, |fields| fields.dims = Dims { qk, v })
}

/// Cuts both numbers to the value that the larger one is lowered to (0), or lowers the first (1) or the second (2)
/// alone.
fn lower_pair((a, b): (usize, usize), which: usize, slot: usize) -> Option<(usize, usize)> {
    match which {
        0 => lowered(a.max(b), slot).map(|most| (a.min(most), b.min(most))),
        1 => lowered(a, slot).map(|a| (a, b)),
        _ => lowered(b, slot).map(|b| (a, b)),
    }
}

/// Simplifies the algorithm, the balance, and the world around the group.
fn parallel(best: &Problem, cursor: usize) -> Proposal {
    const FIRST: [fn(&mut ProblemFields); 5] = [
        |fields| fields.parallel = ContextParallel::single(),
        |fields| renumber(&mut fields.parallel),
        |fields| fields.parallel.balance = Balance::Contiguous,
        |fields| fields.parallel.balance = Balance::DualChunk,
        |fields| fields.parallel.balance = Balance::Striped { stripe: 1 },
    ];
    let Some(cursor) = cursor.checked_sub(FIRST.len()) else { return regroup(best, FIRST[cursor]) };
    let small = |algorithm: Algorithm| SMALL_PARAMETERS.map(|number| algorithm.with_parameter(number));
    let mut algorithms: Vec<Algorithm> = Algorithm::of_several_ranks().flat_map(small).collect();
    algorithms.dedup();
    match algorithms.get(cursor) {
        Some(algorithm) => edit(best, |fields| fields.parallel.algorithm = *algorithm),
        None => pick(best, cursor - algorithms.len(), &[|fields| fields.parallel.ranks.sort_unstable()]),
    }
}

/// Parameters of an algorithm that are tried in place of its own.
const SMALL_PARAMETERS: [usize; 2] = [1, 2];

/// Makes the group the whole world, in order.
pub(crate) fn renumber(parallel: &mut ContextParallel) {
    parallel.world = parallel.size();
    parallel.ranks = (0..parallel.size()).collect();
}

/// Lowers the number of ranks, renumbered or with their numbers kept; then the world; then the width of stripes.
fn ranks(best: &Problem, cursor: usize) -> Proposal {
    let Some([which, slot]) = digits(cursor, [4, SLOTS]) else { return Proposal::Over };
    let parallel = &best.parallel;
    let number = match (which, parallel.balance) {
        (0 | 1, _) => parallel.size(),
        (2, _) => parallel.world,
        (_, Balance::Striped { stripe }) => stripe,
        _ => 0,
    };
    let Some(value) = lowered(number, slot) else { return Proposal::Skip };
    regroup(best, |fields| match which {
        0 => {
            fewer_ranks(&mut fields.parallel, value);
            renumber(&mut fields.parallel);
        }
        1 => fewer_ranks(&mut fields.parallel, value),
        2 => fields.parallel.world = value,
        _ => fields.parallel.balance = Balance::Striped { stripe: value },
    })
}

/// Keeps the first `size` ranks. The algorithm's parameter shrinks until it divides that number.
pub(crate) fn fewer_ranks(parallel: &mut ContextParallel, size: usize) {
    parallel.ranks.truncate(size);
    let mut numbers = (1..=parallel.algorithm.parameter().unwrap_or(1)).rev();
    let divisor = numbers.find(|&number| size.is_multiple_of(number)).unwrap_or(1);
    parallel.algorithm = parallel.algorithm.with_parameter(divisor);
}

/// Simplifies the values and their storage: all plain at once, then the scale and the mode.
fn values(best: &Problem, cursor: usize) -> Proposal {
    match cursor {
        0 => edit(best, |fields| {
            fields.softmax.scale = 1.0;
            plain_values(fields);
        }),
        1 => edit(best, |fields| fields.softmax.scale = 1.0),
        _ => match InputMode::ALL.get(cursor - 2) {
            None => Proposal::Over,
            Some(&mode) => edit(best, |fields| fields.mode = mode),
        },
    }
}

fn plain_values(fields: &mut ProblemFields) {
    fields.precision = Precision::uniform(Format::Bf16);
    // A failure in an exact mode seldom fails in the same words outside of one.
    if !fields.mode.is_exact() {
        fields.mode = InputMode::Integers;
    }
    fields.data_seed = 0;
    number_sequences(fields);
}

fn number_sequences(fields: &mut ProblemFields) {
    for (id, sequence) in (0..).zip(&mut fields.sequences) {
        sequence.id = id;
    }
}

/// Lowers the width of the window's left side, then of its right side.
fn window(best: &Problem, cursor: usize) -> Proposal {
    let Some([right, slot]) = digits(cursor, [2, SLOTS]) else { return Proposal::Over };
    let width = if right == 1 { best.mask.right } else { best.mask.left };
    let Some(width) = width.and_then(|width| lowered_u32(width, slot)) else { return Proposal::Skip };
    edit(best, |fields| match right {
        0 => fields.mask.left = Some(width),
        _ => fields.mask.right = Some(width),
    })
}

/// Drops a border of documents, or lowers it; lowers the length of chunks, the prefix and the number of sink tokens.
fn blocks(best: &Problem, cursor: usize) -> Proposal {
    let Some([which, slot]) = digits(cursor, [BORDERS_MAX + 2, SLOTS + 1]) else { return Proposal::Over };
    let lower = |n: u32| slot.checked_sub(1).and_then(|slot| lowered_u32(n, slot));
    let blocks = match (which, best.mask.blocks) {
        (0, _) => {
            let Some(prefix) = lower(best.mask.prefix) else { return Proposal::Skip };
            return edit(best, |fields| fields.mask.prefix = prefix);
        }
        (1, _) => {
            let Some(sink_tokens) = lower(best.mask.sink_tokens) else { return Proposal::Skip };
            return edit(best, |fields| fields.mask.sink_tokens = sink_tokens);
        }
        (2, Some(Blocks::Chunks(keys))) => lower(keys.get()).and_then(NonZeroU32::new).map(Blocks::Chunks),
        (_, Some(Blocks::Documents(borders))) => {
            let mut keys = borders.keys().to_vec();
            match keys.get_mut(which - 2) {
                Some(_) if slot == 0 => drop(keys.remove(which - 2)),
                Some(key) => *key = lower(*key).unwrap_or(*key),
                None => return Proposal::Skip,
            }
            Borders::new(&keys).ok().map(Blocks::Documents)
        }
        _ => None,
    };
    let Some(blocks) = blocks else { return Proposal::Skip };
    edit(best, |fields| fields.mask.blocks = Some(blocks))
}

fn lowered_u32(n: u32, slot: usize) -> Option<u32> {
    lowered(n as usize, slot).and_then(|value| u32::try_from(value).ok())
}

/// Lowers the window's widths and all lengths by one amount, but no length to 0. This helps with a fault where the
/// window's edge meets the sequence's end.
fn window_and_lengths(best: &Problem, cursor: usize) -> Proposal {
    let Some([right, slot]) = digits(cursor, [2, SLOTS]) else { return Proposal::Over };
    let width = if right == 1 { best.mask.right } else { best.mask.left };
    let Some((width, lower)) = width.and_then(|width| Some((width, lowered_u32(width, slot)?))) else {
        return Proposal::Skip;
    };
    let amount = width - lower;
    let mut shape = Arrangement::of(best);
    for piece in shape.sides().into_iter().flat_map(|side| &mut side.pieces) {
        piece.len = piece.len.saturating_sub(amount as usize).max(piece.len.min(1));
    }
    edit(best, |fields| {
        shape.write(fields);
        let sides = [&mut fields.mask.left, &mut fields.mask.right];
        sides.into_iter().flatten().for_each(|side| *side = side.saturating_sub(amount));
    })
}

/// Lowers one sequence's lengths: both cut to the same value, both by the same amount (the diagonal of a bottom-right
/// mask stays), q alone, or kv alone. After the slots of every number come `2·cp` and its successor, where chunks get
/// their second row.
fn lengths(best: &Problem, cursor: usize) -> Proposal {
    let refined = refined(best);
    let Some([index, which, slot]) = digits(cursor, [refined, 4, SLOTS + 2]) else { return Proposal::Over };
    let (q, kv) = (best.sequences[index].q.len, best.sequences[index].kv.len);
    let lower = |n: usize| match slot.checked_sub(SLOTS) {
        None => lowered(n, slot),
        Some(more) => Some(2 * best.parallel.size() + more).filter(|&value| value < n),
    };
    let lengths = match which {
        0 => lower(q.max(kv)).map(|most| (q.min(most), kv.min(most))),
        1 => lower(q.min(kv)).map(|least| (q - (q.min(kv) - least), kv - (q.min(kv) - least))),
        2 => lower(q).map(|q| (q, kv)),
        _ => lower(kv).map(|kv| (q, kv)),
    };
    let Some((q, kv)) = lengths else { return Proposal::Skip };
    reshape(best, |shape| {
        shape.q.pieces[index].len = q;
        shape.kv.pieces[index].len = kv;
    })
}

/// Lowers each number of free rows by itself: on each side the first offset, the slack, and each sequence's padding
/// and gap.
fn free_rows(best: &Problem, cursor: usize) -> Proposal {
    let refined = refined(best);
    let Some([number, side, slot]) = digits(cursor, [2 + 2 * refined, 2, SLOTS]) else {
        return Proposal::Over;
    };
    let mut shape = Arrangement::of(best);
    let number = free_number(shape.sides()[side], number);
    let Some(value) = lowered(*number, slot) else { return Proposal::Skip };
    *number = value;
    edit(best, |fields| shape.write(fields))
}

fn free_number(layout: &mut Layout, number: usize) -> &mut usize {
    match (number / 2, number % 2) {
        (0, 0) => &mut layout.first,
        (0, _) => &mut layout.slack,
        (piece, 0) => &mut layout.pieces[piece - 1].pad,
        (piece, _) => &mut layout.pieces[piece - 1].gap,
    }
}

/// Simplifies the formats: all bf16, all like q's, those like q's to bf16, nothing scaled. Then each element becomes
/// like q, or unscaled, or scaled with one factor. At last scales become powers of two.
fn precision(best: &Problem, cursor: usize) -> Proposal {
    const WHOLE: [fn(&mut Precision); 4] = [
        |precision| *precision = Precision::uniform(Format::Bf16),
        |precision| *precision = Precision::uniform(precision.q.format),
        |precision| {
            let q = precision.q;
            let alike = elements(precision).into_iter().filter(|element| **element == q);
            alike.for_each(|element| element.format = Format::Bf16);
        },
        |precision| elements(precision).into_iter().for_each(|element| element.scaling = Scaling::None),
    ];
    if let Some(change) = WHOLE.get(cursor) {
        return edit(best, |fields| change(&mut fields.precision));
    }
    const EACH: [fn(Element, Element) -> Element; 3] = [
        |_, q| q,
        |element, _| Element { scaling: Scaling::None, ..element },
        |element, _| Element { scaling: Scaling::PerTensor, ..element },
    ];
    let each = cursor - WHOLE.len();
    if each == ELEMENTS * EACH.len() {
        return edit(best, |fields| fields.scales = ScaleValues::default());
    }
    let Some([index, change]) = digits(each, [ELEMENTS, EACH.len()]) else {
        return Proposal::Over;
    };
    edit(best, |fields| {
        let q = fields.precision.q;
        let element = &mut *elements(&mut fields.precision)[index];
        *element = EACH[change](*element, q);
    })
}

/// Number of elements of a [`Precision`].
const ELEMENTS: usize = 8;

fn elements(precision: &mut Precision) -> [&mut Element; ELEMENTS] {
    let Precision { q, k, v, p, out, dout, ds, gradients } = precision;
    [q, k, v, p, out, dout, ds, gradients]
}

/// Simplifies the data seed, and the ids that name the sequences' values: all in order, then each by itself.
fn names(best: &Problem, cursor: usize) -> Proposal {
    /// Bound below which lie the seeds and ids that a reader would pick.
    const SIMPLE: usize = 4;
    match cursor {
        ..SIMPLE => edit(best, |fields| fields.data_seed = cursor as u64),
        SIMPLE => edit(best, number_sequences),
        _ => match digits(cursor - SIMPLE - 1, [refined(best), SIMPLE]) {
            None => Proposal::Over,
            Some([index, id]) => edit(best, |fields| fields.sequences[index].id = id as u32),
        },
    }
}

/// Fills all chunks at once. A fault in the dealing of chunks may need full ones, so that neither ranks nor lengths
/// can go down alone, and it may need values that tell one key from the next. The step takes few ranks, gives every
/// sequence a fixed number of rows in each chunk, and keeps the values or makes them integers.
fn full_chunks(best: &Problem, cursor: usize) -> Proposal {
    const RANKS_MAX: usize = 2;
    const ROWS_MAX: usize = 2;
    let Some([ranks, rows, integers]) = digits(cursor, [RANKS_MAX, ROWS_MAX, 2]) else {
        return Proposal::Over;
    };
    let (ranks, rows) = (ranks + 1, rows + 1);
    if best.parallel.algorithm == Algorithm::Single || ranks > best.parallel.size() {
        return Proposal::Skip;
    }
    let mut shape = Arrangement::of(best);
    shape.own(2 * ranks * rows);
    edit(best, |fields| {
        shape.write(fields);
        fewer_ranks(&mut fields.parallel, ranks);
        renumber(&mut fields.parallel);
        if integers == 1 {
            fields.mode = InputMode::Integers;
        }
    })
}

/// Repeats the steps that make the largest difference to a reader, with other values. An arithmetic fault does not
/// show on all values, and may hide exactly where the geometry gets small. Problems that are small already are left
/// alone.
fn other_values(best: &Problem, cursor: usize) -> Proposal {
    /// Number of other seeds for each step.
    const SEEDS: usize = 2;
    let real: usize = best.sequences.iter().map(|sequence| sequence.q.len + sequence.kv.len).sum();
    let geometry = match best.sequences.len() {
        2.. => sequences,
        _ if real > SMALL => lengths,
        _ => return Proposal::Over,
    };
    let step = geometry(best, cursor / SEEDS);
    let seed = 1 + (cursor % SEEDS) as u64;
    let Proposal::Try(mut fields) = step else { return step };
    fields.data_seed = best.data_seed.wrapping_add(seed);
    Proposal::Try(fields)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_can_be_lowered_by_one_and_to_nothing() {
        for n in 1..2000 {
            let values: Vec<_> = (0..SLOTS).filter_map(|slot| lowered(n, slot)).collect();
            assert!(values.contains(&0), "{n}");
            assert!(values.contains(&(n - 1)), "{n}");
            assert!(values.iter().all(|value| *value < n), "{n}");
        }
        assert!((0..SLOTS).all(|slot| lowered(0, slot).is_none()));
    }

    #[test]
    fn chunks_go_down_to_single_sequences() {
        let all: Vec<_> = (0..).map_while(|n| chunk(4, n)).collect();
        assert_eq!(all, [0..2, 2..4, 0..1, 1..2, 2..3, 3..4]);
        assert_eq!(chunk(1, 0), None);
        assert_eq!((0..).map_while(|n| chunk(1 << 16, n)).count(), 2 + 4 + 8 + 16 + 32 + 64);
    }

    #[test]
    fn digits_count_through_every_combination_once() {
        let all: Vec<_> = (0..7).map_while(|cursor| digits(cursor, [2, 3])).collect();
        assert_eq!(all, [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]);
        assert_eq!(digits(0, [0, 3]), None);
    }
}
