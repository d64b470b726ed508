//! The drawing of a large pack: a few to some tens of sequences of uneven lengths, one behind the other.

use std::ops::RangeInclusive;

use seamproof_oracle::limits::ROWS_MAX;
use seamproof_oracle::{
    Alignment, Dims, Format, Heads, InputMode, Mask, Pass, Precision, Problem, ProblemFields, Run, Sequence,
    Softmax, TensorRows,
};

use crate::exact;
use crate::hash::mix;
use crate::ladder::products;
use crate::subject::Table;

/// The most tokens of a pack that can be asked for.
pub const TOKENS_MOST: usize = ROWS_MAX;
/// Numbers of sequences. Each is as likely as it is often here.
const COUNTS: [usize; 10] = [1, 1, 2, 3, 4, 6, 9, 17, 33, 65];
/// Tiles, near whose multiples half of the lengths lie.
const TILES: [usize; 4] = [64, 128, 256, 1024];
/// Bounds of windows.
const WINDOWS: [u32; 9] = [0, 1, 63, 64, 127, 255, 511, 1024, 4095];
/// Head dimensions.
const DIMS: [usize; 6] = [64, 128, 128, 128, 96, 256];
/// Numbers of KV heads, and of query heads for each.
const KV_HEADS: [usize; 5] = [1, 2, 4, 8, 16];
const GROUPS: [usize; 5] = [1, 1, 2, 4, 8];
/// Modes. In `pairs` each query has its weight on two neighbouring keys, in two rows of three at an end of what it
/// sees: a wrong pair shows in full, however long the row is.
const MODES: [InputMode; 8] = [
    InputMode::Pairs,
    InputMode::Pairs,
    InputMode::Pairs,
    InputMode::Pairs,
    InputMode::Routing,
    InputMode::Peaked,
    InputMode::Peaked,
    InputMode::Flat,
];
/// Padding of a sequence, where padding is taken.
const PADDING: [usize; 6] = [0, 0, 1, 7, 64, 129];

/// Sizes of packs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Number of tokens, queries.
    pub tokens: RangeInclusive<usize>,
    /// Number of elements of q. Heads are added or left out for that.
    pub elements: RangeInclusive<u64>,
    /// Largest number of visible pairs × query heads × head dimension.
    pub products: u64,
    /// Whether gradients are asked for, where the subject has any.
    pub backward: bool,
}

/// Whether inputs of this mode are drawn where a large run is made.
pub fn is_drawn(mode: InputMode) -> bool {
    matches!(mode, InputMode::Large) || MODES.contains(&mode)
}

/// Returns the pack of a case that a table takes; `None` where it takes nothing like it.
pub fn pack(seed: u64, case: u64, sizes: &Sizes, table: &Table) -> Option<Problem> {
    let mut draws = Draws(mix(mix(seed) ^ case));
    let drawn = drawn(&mut draws, sizes, table)?;
    let mode = drawn.mode;
    // The nearest problem in the table may have other heads.
    let asked = with_mode(within(table.asked(drawn), sizes)?, mode)?;
    let fits = table.refusal(&asked).is_none() && asked.parallel.size() == 1;
    let is_packed = |both: &Sequence| both.q.step == 1 && both.kv.step == 1;
    (fits && asked.sequences.iter().all(is_packed)).then_some(asked)
}

/// Returns a problem in a mode, or in mode `flat` where the mode is not legal in it.
fn with_mode(problem: Problem, mode: InputMode) -> Option<Problem> {
    let is_legal = exact::eligible(mode, &problem).is_ok() && !heads_overflow(&problem);
    let mode = if mode.is_exact() && !is_legal { InputMode::Flat } else { mode };
    match problem.mode == mode {
        true => Some(problem),
        false => Problem::new(ProblemFields { mode, ..problem.into() }).ok(),
    }
}

/// Whether dk of a single query head may overflow in an exact mode, whose keys are read by thousands of queries. A
/// subject that stores the heads of a group before it adds them up then adds infinities of both signs.
fn heads_overflow(problem: &Problem) -> bool {
    let gradients = problem.precision.gradients.format;
    problem.pass == Pass::Backward && problem.group() > 1 && gradients.max_finite() < 1e6
}

struct Draws(u64);

impl Draws {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(1);
        mix(mix(self.0))
    }

    fn below(&mut self, most: usize) -> usize {
        (self.next() % most.max(1) as u64) as usize
    }

    fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }

    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
}

fn drawn(draws: &mut Draws, sizes: &Sizes, table: &Table) -> Option<Problem> {
    let (least, most) = (*sizes.tokens.start() as f64, *sizes.tokens.end() as f64);
    let tokens = (least * libm::pow(most / least, draws.unit())) as usize;
    let count = draws.pick(&COUNTS).min(tokens.div_ceil(64));
    let lengths = lengths(draws, tokens, count, table);
    let (sequences, rows) = laid_out(draws, &lengths, table);
    let mode = draws.pick(&MODES);
    let dim = table.dims.qk.nearest(draws.pick(&DIMS));
    let scale = exact::fit_scale(mode, (1.0 / (dim as f64).sqrt()) as f32);
    let (format, group) = (draws.pick(&[Format::Bf16, Format::Fp16, Format::Bf16]), draws.pick(&GROUPS));
    // Groups of heads in an exact mode are for the format that does not overflow ([`heads_overflow`]).
    let format = if mode.is_exact() && group > 1 { Format::Bf16 } else { format };
    let softcap = (table.softcap && !mode.is_exact() && draws.below(4) == 0).then_some(30.0);
    let mask = mask(draws);
    let kv = draws.pick(&KV_HEADS);
    let fields = ProblemFields {
        rows,
        heads: Heads { q: kv * group, kv },
        dims: Dims { qk: dim, v: dim },
        mask,
        softmax: Softmax { softcap, sink: draws.pick(&table.sinks), ..Softmax::scaled(scale) },
        precision: Precision::uniform(format),
        pass: if sizes.backward { Pass::Backward } else { Pass::Forward },
        mode,
        data_seed: draws.next(),
        ..ProblemFields::of(sequences, dim)
    };
    within(Problem::new(fields).ok()?, sizes)
}

/// Returns a problem with as many heads as are asked; `None` where no number of them fits.
fn within(mut problem: Problem, sizes: &Sizes) -> Option<Problem> {
    let is_small = |problem: &Problem| {
        let width = problem.dims.qk.max(problem.dims.v) * problem.heads.q;
        (problem.rows.q * width) as u64 <= *sizes.elements.end() && products(problem) <= sizes.products
    };
    let lanes = (problem.rows.q * problem.group() * problem.dims.qk).max(1);
    let least = (*sizes.elements.start()).div_ceil(lanes as u64) as usize;
    if least > problem.heads.kv {
        let heads = Heads { q: least * problem.group(), kv: least };
        problem = Problem::new(ProblemFields { heads, ..problem.into() }).ok()?;
        return is_small(&problem).then_some(problem);
    }
    while !is_small(&problem) {
        let mut fields = ProblemFields::from(problem);
        fields.heads = match fields.heads {
            Heads { q: 1, .. } => return None,
            Heads { q, kv } if kv > 1 => Heads { q: q / 2, kv: kv / 2 },
            Heads { q, kv } => Heads { q: q / 2, kv },
        };
        problem = Problem::new(fields).ok()?;
    }
    let elements = problem.q_shape().iter().product::<usize>() as u64;
    (elements >= *sizes.elements.start()).then_some(problem)
}

fn mask(draws: &mut Draws) -> Mask {
    let align = draws.pick(&[Alignment::TopLeft, Alignment::BottomRight]);
    let (left, right) = (draws.pick(&WINDOWS), draws.pick(&WINDOWS));
    let bounds = [
        (None, Some(0)),
        (None, Some(0)),
        (None, None),
        (Some(left), Some(0)),
        (Some(left), Some(right)),
        (Some(left), None),
        (None, Some(right)),
    ];
    let (left, right) = draws.pick(&bounds);
    Mask::window(left, right, align)
}

/// Returns the numbers of queries and keys of each sequence.
fn lengths(draws: &mut Draws, tokens: usize, count: usize, table: &Table) -> Vec<[usize; 2]> {
    let shares: Vec<f64> = (0..count).map(|_| 0.05 + draws.unit()).collect();
    let total: f64 = shares.iter().sum();
    let apart = !table.lengths.equal && draws.below(3) == 0;
    let mut near_tile = |len: usize| {
        let tile = draws.pick(&TILES);
        match draws.below(2) {
            0 => (len.div_ceil(tile) * tile + draws.below(3)).saturating_sub(1).max(1),
            _ => len.max(1),
        }
    };
    let mut lengths: Vec<[usize; 2]> =
        shares.iter().map(|share| [near_tile((share / total * tokens as f64) as usize); 2]).collect();
    for [queries, keys] in lengths.iter_mut().filter(|_| apart) {
        let more = draws.pick(&[1, 63, 64, 129, 1000]);
        match draws.below(3) {
            0 => *keys += more,
            1 => *queries = queries.saturating_sub(more).max(1),
            _ => {}
        }
    }
    if count > 3 && draws.below(2) == 0 {
        let at = draws.below(count);
        lengths[at] = [1, 1];
    }
    if count > 3 && table.lengths.empty_q && table.lengths.empty_kv && draws.below(2) == 0 {
        let at = draws.below(count);
        lengths[at] = [0, 0];
    }
    lengths
}

/// Returns the sequences one behind the other, with padding where some is taken, and the rows of the tensors.
fn laid_out(draws: &mut Draws, lengths: &[[usize; 2]], table: &Table) -> (Vec<Sequence>, TensorRows) {
    let is_padded = table.layout.padding && draws.below(2) == 0;
    let mut ends = [0, 0];
    let mut sequences = Vec::new();
    for (id, len) in lengths.iter().enumerate() {
        let runs = [0, 1].map(|side| {
            let padding = if is_padded { draws.pick(&PADDING) } else { 0 };
            let run = Run::packed(ends[side], len[side], len[side] + padding);
            ends[side] += run.span;
            run
        });
        sequences.push(Sequence { id: id as u32, q: runs[0], kv: runs[1] });
    }
    let slack = if table.layout.slack { draws.pick(&[0, 0, 1, 100]) } else { 0 };
    (sequences, TensorRows { q: ends[0] + slack, kv: ends[1] + slack })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes() -> Sizes {
        Sizes { tokens: 1 << 14..=1 << 17, elements: 0..=1 << 28, products: 1 << 44, backward: true }
    }

    #[test]
    fn heads_are_added_until_offsets_need_more_than_32_bits() {
        let sizes = Sizes { elements: (1 << 31) + 1..=1 << 33, products: 1 << 50, ..sizes() };
        let packs = (0..100).filter_map(|case| pack(7, case, &sizes, &Table::default()));
        let elements: Vec<usize> = packs.map(|problem| problem.q_shape().iter().product()).collect();
        assert!(elements.len() > 50 && elements.iter().all(|count| *count > 1 << 31), "{elements:?}");
    }

    #[test]
    fn packs_are_as_large_as_is_asked_and_differ() {
        let table = Table::default();
        let packs: Vec<Problem> = (0..300).filter_map(|case| pack(7, case, &sizes(), &table)).collect();
        assert!(packs.len() > 250, "{}", packs.len());
        for problem in &packs {
            let tokens = problem.sequences.iter().map(|both| both.q.len).sum::<usize>();
            // Half of the lengths are moved to a tile's border, and some lose queries.
            assert!((1 << 13..1 << 18).contains(&tokens), "{tokens} tokens");
            assert!(is_drawn(problem.mode) && products(problem) <= 1 << 44);
            assert!(!problem.mode.is_exact() || exact::eligible(problem.mode, problem).is_ok());
        }
        let count = |is: &dyn Fn(&Problem) -> bool| packs.iter().filter(|problem| is(problem)).count();
        assert!(count(&|problem| problem.mode == InputMode::Pairs) > 60);
        assert!(count(&|problem| problem.sequences.len() == 1) > 20);
        assert!(count(&|problem| problem.group() > 1) > 60);
        assert!(count(&|problem| problem.mask.left.is_some()) > 60);
        assert_eq!(pack(7, 3, &sizes(), &table), pack(7, 3, &sizes(), &table));
        assert_ne!(pack(7, 3, &sizes(), &table), pack(8, 3, &sizes(), &table));
    }
}
