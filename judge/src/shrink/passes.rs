//! The passes, in the order in which they run: what cuts the cost of every later evaluation first, fine detail last.
//!
//! A *step* is an edit of the best problem, named by a cursor. Steps need not be legal or smaller: the machine passes
//! over those that are not, so an edit that changes nothing (a softcap removed where there is none) costs nothing.
//! A number is *lowered* to 0, 1, 2, 3, then to the boundaries where kernels change course, then by bisection.

use std::ops::Range;

use seamproof_oracle::{
    Algorithm, Alignment, Balance, ContextParallel, Dims, Element, Format, Heads, InputMode, Mask,
    Pass as Kind, Precision, Problem, ProblemFields, Scaling, Sink, Softmax,
};

use super::shape::{Layout, Shape};

/// What a pass says at one cursor.
pub(super) enum Step {
    /// A candidate, not yet checked.
    Try(Box<ProblemFields>),
    /// Nothing at this cursor.
    Skip,
    /// Nothing at this cursor or any later one.
    Over,
}

/// A named series of steps.
pub(super) struct Pass {
    /// As the table of accepted steps shows it.
    pub(super) name: &'static str,
    /// The step at a cursor.
    pub(super) step: fn(&Problem, usize) -> Step,
}

/// Every pass, in order.
pub(super) const PASSES: &[Pass] = &[
    Pass { name: "at once", step: at_once },
    Pass { name: "forward only", step: forward_only },
    Pass { name: "sequences", step: sequences },
    Pass { name: "all lengths", step: all_lengths },
    Pass { name: "softmax", step: softmax },
    Pass { name: "mask", step: mask },
    Pass { name: "layout", step: layout },
    Pass { name: "heads", step: heads },
    Pass { name: "dims", step: dims },
    Pass { name: "parallel", step: parallel },
    Pass { name: "ranks", step: ranks },
    Pass { name: "values", step: values },
    Pass { name: "window", step: window },
    Pass { name: "window and lengths", step: window_and_lengths },
    Pass { name: "lengths", step: lengths },
    Pass { name: "free rows", step: free_rows },
    Pass { name: "precision", step: precision },
    Pass { name: "names", step: names },
    Pass { name: "full chunks", step: full_chunks },
    Pass { name: "other values", step: other_values },
];

/// Most sequences that are refined one by one. While there are more they are only dropped, or cut all at once: a step
/// costs time linear in the sequences, so that a pass over each of them would be quadratic.
const REFINED_MAX: usize = 64;

/// The lengths to which all are cut at once.
const LENGTH_CAPS: [usize; 10] = [1, 2, 4, 8, 16, 32, 64, 128, 512, 2048];
/// Widths to which all free rows of a kind are cut at once.
const FREE_CAPS: [usize; 3] = [0, 1, 4];
/// A cut that leaves most faults alive: short enough to be cheap, long enough for a diagonal and a block edge.
const SMALL: usize = 4;
/// The first values that a number is lowered to.
const SMALLEST: [usize; 4] = [0, 1, 2, 3];
/// Tile sizes, each with its successor: where kernels take another path.
const BOUNDARIES: [usize; 12] = [4, 5, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129];
/// More than the bits of any bounded number here.
const HALVINGS: usize = 32;
/// Cursors that one number takes up.
const SLOTS: usize = SMALLEST.len() + BOUNDARIES.len() + HALVINGS;

/// What a number is lowered to at a slot; none where that is not lower.
fn lowered(n: usize, slot: usize) -> Option<usize> {
    let fixed = SMALLEST.iter().chain(&BOUNDARIES).nth(slot).copied();
    let value = fixed.unwrap_or_else(|| n - (n >> (slot + 1 - SMALLEST.len() - BOUNDARIES.len())));
    (value < n).then_some(value)
}

/// Reads a cursor as digits of the given bases, the last one fastest; none past the end.
fn digits<const N: usize>(mut cursor: usize, bases: [usize; N]) -> Option<[usize; N]> {
    let mut digits = [0; N];
    for (digit, base) in digits.iter_mut().zip(bases).rev() {
        *digit = cursor.checked_rem(base)?;
        cursor /= base;
    }
    (cursor == 0).then_some(digits)
}

/// Sequences that are refined one by one: all, or none where they are too many.
fn refined(best: &Problem) -> usize {
    Some(best.sequences.len()).filter(|&count| count <= REFINED_MAX).unwrap_or(0)
}

fn edit(best: &Problem, change: impl FnOnce(&mut ProblemFields)) -> Step {
    let mut fields = ProblemFields::from(best.clone());
    change(&mut fields);
    Step::Try(Box::new(fields))
}

fn reshape(best: &Problem, change: impl FnOnce(&mut Shape)) -> Step {
    let mut shape = Shape::of(best);
    change(&mut shape);
    edit(best, |fields| shape.write(fields))
}

fn pick(best: &Problem, cursor: usize, edits: &[fn(&mut ProblemFields)]) -> Step {
    edits.get(cursor).map_or(Step::Over, |change| edit(best, change))
}

/// Everything simple (0); then small, with what faults hang on left as it is: the first sequence without seams (1),
/// the first sequence (2), all of them (3).
fn at_once(best: &Problem, cursor: usize) -> Step {
    if cursor > 3 {
        return Step::Over;
    }
    let mut shape = Shape::of(best);
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
    fields.mask = Mask::FULL;
    fields.softmax = Softmax { scale: 1.0, softcap: None, sink: Sink::None };
    fields.parallel = ContextParallel::single();
}

fn forward_only(best: &Problem, cursor: usize) -> Step {
    pick(best, cursor, &[|fields| fields.pass = Kind::Forward])
}

/// The first sequences alone; then chunks dropped: halves, quarters, …, and one by one where they are few.
fn sequences(best: &Problem, cursor: usize) -> Step {
    /// Sequences that are tried alone: most faults show in any of them. Where there is but one, the second leaves
    /// none.
    const ALONE: usize = 2;
    if cursor < ALONE {
        return reshape(best, |shape| shape.retain(|index| index == cursor));
    }
    match chunk(best.sequences.len(), cursor - ALONE) {
        None => Step::Over,
        Some(dropped) => reshape(best, |shape| shape.retain(|index| !dropped.contains(&index))),
    }
}

/// The n-th chunk of `0..count` cut into halves, quarters, … of at most [`REFINED_MAX`] chunks.
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

fn all_lengths(best: &Problem, cursor: usize) -> Step {
    match LENGTH_CAPS.get(cursor) {
        None => Step::Over,
        Some(&most) => reshape(best, |shape| shape.cap_lengths(most)),
    }
}

fn softmax(best: &Problem, cursor: usize) -> Step {
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

fn mask(best: &Problem, cursor: usize) -> Step {
    pick(
        best,
        cursor,
        &[
            |fields| fields.mask = Mask::FULL,
            |fields| fields.mask = Mask::CAUSAL,
            |fields| fields.mask = Mask { left: None, right: Some(0), ..fields.mask },
            |fields| fields.mask.left = None,
            |fields| fields.mask.right = None,
            |fields| fields.mask.align = Alignment::TopLeft,
        ],
    )
}

/// Whole kinds of seams: all of them, each kind alone; both sides, then each side alone.
fn layout(best: &Problem, cursor: usize) -> Step {
    const ORDER: [fn(&mut Layout); 3] = [Layout::plain, Layout::pack, Layout::sort];
    const FREE: [fn(&mut Layout, usize); 5] =
        [Layout::cap_all, Layout::cap_padding, Layout::cap_gaps, Layout::cap_first, Layout::cap_slack];
    let steps = ORDER.len() + FREE.len() * FREE_CAPS.len();
    let Some([sides, step]) = digits(cursor, [3, steps]) else { return Step::Over };
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

/// Both sides (0), q (1) or kv (2).
fn on(shape: &mut Shape, sides: usize) -> impl Iterator<Item = &mut Layout> {
    shape.sides().into_iter().enumerate().filter_map(move |(index, side)| {
        let chosen = sides == 0 || sides == index + 1;
        chosen.then_some(side)
    })
}

/// KV heads and the group (query heads of each) are lowered, so that every ratio stays legal.
fn heads(best: &Problem, cursor: usize) -> Step {
    let (kv, group) = (best.heads.kv, best.group());
    let Some([which, slot]) = digits(cursor, [3, SLOTS]) else { return Step::Over };
    let Some((kv, group)) = lower_pair((kv, group), which, slot) else { return Step::Skip };
    edit(best, |fields| fields.heads = Heads { q: kv * group, kv })
}

fn dims(best: &Problem, cursor: usize) -> Step {
    let Dims { qk, v } = best.dims;
    let Some([which, slot]) = digits(cursor, [3, SLOTS]) else { return Step::Over };
    let Some((qk, v)) = lower_pair((qk, v), which, slot) else { return Step::Skip };
    edit(best, |fields| fields.dims = Dims { qk, v })
}

/// Both cut to what the larger is lowered to (0), or the first (1) or the second (2) lowered alone.
fn lower_pair((a, b): (usize, usize), which: usize, slot: usize) -> Option<(usize, usize)> {
    match which {
        0 => lowered(a.max(b), slot).map(|most| (a.min(most), b.min(most))),
        1 => lowered(a, slot).map(|a| (a, b)),
        _ => lowered(b, slot).map(|b| (a, b)),
    }
}

/// The algorithm, the balance, and the world around the group.
fn parallel(best: &Problem, cursor: usize) -> Step {
    const FIRST: [fn(&mut ProblemFields); 5] = [
        |fields| fields.parallel = ContextParallel::single(),
        |fields| renumber(&mut fields.parallel),
        |fields| fields.parallel.balance = Balance::Contiguous,
        |fields| fields.parallel.balance = Balance::DualChunk,
        |fields| fields.parallel.balance = Balance::Striped { stripe: 1 },
    ];
    let Some(cursor) = cursor.checked_sub(FIRST.len()) else { return pick(best, cursor, &FIRST) };
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

/// The group becomes the whole world, in order.
fn renumber(parallel: &mut ContextParallel) {
    parallel.world = parallel.size();
    parallel.ranks = (0..parallel.size()).collect();
}

/// Fewer ranks, renumbered or with their numbers kept; then a smaller world; then narrower stripes.
fn ranks(best: &Problem, cursor: usize) -> Step {
    let Some([which, slot]) = digits(cursor, [4, SLOTS]) else { return Step::Over };
    let parallel = &best.parallel;
    let number = match (which, parallel.balance) {
        (0 | 1, _) => parallel.size(),
        (2, _) => parallel.world,
        (_, Balance::Striped { stripe }) => stripe,
        _ => 0,
    };
    let Some(value) = lowered(number, slot) else { return Step::Skip };
    edit(best, |fields| match which {
        0 => {
            fewer_ranks(&mut fields.parallel, value);
            renumber(&mut fields.parallel);
        }
        1 => fewer_ranks(&mut fields.parallel, value),
        2 => fields.parallel.world = value,
        _ => fields.parallel.balance = Balance::Striped { stripe: value },
    })
}

/// The first `size` ranks; the algorithm's parameter shrinks until it divides that.
fn fewer_ranks(parallel: &mut ContextParallel, size: usize) {
    parallel.ranks.truncate(size);
    let mut numbers = (1..=parallel.algorithm.parameter().unwrap_or(1)).rev();
    let divisor = numbers.find(|&number| size.is_multiple_of(number)).unwrap_or(1);
    parallel.algorithm = parallel.algorithm.with_parameter(divisor);
}

/// How numbers are made and stored: all plain at once, then the mode and the scale.
fn values(best: &Problem, cursor: usize) -> Step {
    match cursor {
        0 => edit(best, |fields| {
            fields.softmax.scale = 1.0;
            plain_values(fields);
        }),
        1 => edit(best, |fields| fields.softmax.scale = 1.0),
        _ => match InputMode::ALL.get(cursor - 2) {
            None => Step::Over,
            Some(&mode) => edit(best, |fields| fields.mode = mode),
        },
    }
}

fn plain_values(fields: &mut ProblemFields) {
    fields.precision = Precision::uniform(Format::Bf16);
    // What was found in an exact mode is seldom wrong in the same words outside of one.
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

/// The width of the left side and of the right one.
fn window(best: &Problem, cursor: usize) -> Step {
    let Some([right, slot]) = digits(cursor, [2, SLOTS]) else { return Step::Over };
    let width = if right == 1 { best.mask.right } else { best.mask.left };
    let Some(width) = width.and_then(|width| lowered_u32(width, slot)) else { return Step::Skip };
    edit(best, |fields| match right {
        0 => fields.mask.left = Some(width),
        _ => fields.mask.right = Some(width),
    })
}

fn lowered_u32(n: u32, slot: usize) -> Option<u32> {
    lowered(n as usize, slot).and_then(|value| u32::try_from(value).ok())
}

/// A fault at the place where the window's edge meets the sequence's end: widths and lengths go down by one amount,
/// but no length to 0.
fn window_and_lengths(best: &Problem, cursor: usize) -> Step {
    let Some([right, slot]) = digits(cursor, [2, SLOTS]) else { return Step::Over };
    let width = if right == 1 { best.mask.right } else { best.mask.left };
    let Some((width, lower)) = width.and_then(|width| Some((width, lowered_u32(width, slot)?))) else {
        return Step::Skip;
    };
    let amount = width - lower;
    let mut shape = Shape::of(best);
    for piece in shape.sides().into_iter().flat_map(|side| &mut side.pieces) {
        piece.len = piece.len.saturating_sub(amount as usize).max(piece.len.min(1));
    }
    edit(best, |fields| {
        shape.write(fields);
        let sides = [&mut fields.mask.left, &mut fields.mask.right];
        sides.into_iter().flatten().for_each(|side| *side = side.saturating_sub(amount));
    })
}

/// One sequence's lengths: both cut to the same, both by the same (the diagonal of a bottom-right mask stays), q
/// alone, kv alone. After the slots of every number come `2·cp` and its successor, where chunks get their second
/// row.
fn lengths(best: &Problem, cursor: usize) -> Step {
    let refined = refined(best);
    let Some([index, which, slot]) = digits(cursor, [refined, 4, SLOTS + 2]) else { return Step::Over };
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
    let Some((q, kv)) = lengths else { return Step::Skip };
    reshape(best, |shape| {
        shape.q.pieces[index].len = q;
        shape.kv.pieces[index].len = kv;
    })
}

/// Each number of free rows by itself: per side the first offset, the slack, each sequence's padding and gap.
fn free_rows(best: &Problem, cursor: usize) -> Step {
    let refined = refined(best);
    let Some([number, side, slot]) = digits(cursor, [2 + 2 * refined, 2, SLOTS]) else { return Step::Over };
    let mut shape = Shape::of(best);
    let number = free_number(shape.sides()[side], number);
    let Some(value) = lowered(*number, slot) else { return Step::Skip };
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

/// Everything bf16, everything in q's format, what is in q's format bf16, nothing scaled; then each element like q,
/// unscaled, and with one scale.
fn precision(best: &Problem, cursor: usize) -> Step {
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
    let Some([index, change]) = digits(cursor - WHOLE.len(), [ELEMENTS, EACH.len()]) else {
        return Step::Over;
    };
    edit(best, |fields| {
        let q = fields.precision.q;
        let element = &mut *elements(&mut fields.precision)[index];
        *element = EACH[change](*element, q);
    })
}

/// Elements of a [`Precision`].
const ELEMENTS: usize = 8;

fn elements(precision: &mut Precision) -> [&mut Element; ELEMENTS] {
    let Precision { q, k, v, p, out, dout, ds, gradients } = precision;
    [q, k, v, p, out, dout, ds, gradients]
}

/// The data seed, and the ids that name the sequences' values: all in order, then each by itself.
fn names(best: &Problem, cursor: usize) -> Step {
    /// Seeds and ids that a reader would pick: below this.
    const SIMPLE: usize = 4;
    match cursor {
        ..SIMPLE => edit(best, |fields| fields.data_seed = cursor as u64),
        SIMPLE => edit(best, number_sequences),
        _ => match digits(cursor - SIMPLE - 1, [refined(best), SIMPLE]) {
            None => Step::Over,
            Some([index, id]) => edit(best, |fields| fields.sequences[index].id = id as u32),
        },
    }
}

/// A fault in how chunks are dealt may need full ones, so that neither ranks nor lengths go down alone, and values that
/// tell one key from the next: few ranks, every sequence of so many rows in a chunk, and the values as they are or
/// integers.
fn full_chunks(best: &Problem, cursor: usize) -> Step {
    const RANKS_MAX: usize = 2;
    const ROWS_MAX: usize = 2;
    let Some([ranks, rows, integers]) = digits(cursor, [RANKS_MAX, ROWS_MAX, 2]) else { return Step::Over };
    let (ranks, rows) = (ranks + 1, rows + 1);
    if best.parallel.algorithm == Algorithm::Single || ranks > best.parallel.size() {
        return Step::Skip;
    }
    let mut shape = Shape::of(best);
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

/// A fault of arithmetic does not show on all values, and may hide exactly where the geometry gets small: the steps
/// that make the largest difference to a reader once more, with other values. Not for what is small already.
fn other_values(best: &Problem, cursor: usize) -> Step {
    /// Other seeds for each step.
    const SEEDS: usize = 2;
    let real: usize = best.sequences.iter().map(|sequence| sequence.q.len + sequence.kv.len).sum();
    let geometry = match best.sequences.len() {
        2.. => sequences,
        _ if real > SMALL => lengths,
        _ => return Step::Over,
    };
    let step = geometry(best, cursor / SEEDS);
    let seed = 1 + (cursor % SEEDS) as u64;
    let Step::Try(mut fields) = step else { return step };
    fields.data_seed = best.data_seed.wrapping_add(seed);
    Step::Try(fields)
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
