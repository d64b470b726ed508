//! The size of a problem: the total order in which every accepted step goes down.

use seamproof_oracle::{
    Alignment, Balance, Blocks, ContextParallel, Element, Form, Format, InputMode, Mask, PAGE_SIZE_MAX,
    Pages, Pass, Problem, ScaleValues, Scaling, Sink, Softmax, Steps,
};

use super::shape::Arrangement;

/// Size of a problem. Sizes are compared field by field in the order below, which begins with what costs a reader
/// (and a run) most. All fields are natural numbers, so there is no endless descent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Size {
    /// Pass: 1 with the backward, 0 without.
    pub backward: u64,
    /// Number of sequences.
    pub sequences: u64,
    /// Number of real rows of q and of kv in all sequences.
    pub tokens: u64,
    /// Mask: bounded sides (left counts 2, right counts 1), sum of their widths, bottom-right alignment.
    pub mask: [u64; 5],
    /// Softmax: soft cap (1 for a cap of 1, 2 for another), sink (off-by-one 1, learnable 2), a scale other than 1.
    pub softmax: [u64; 3],
    /// Layout: sides with a stride, pieces out of their listed order, rows that are not real, sum of offsets.
    pub layout: [u64; 4],
    /// Place of the form in [`Form::ALL`].
    pub form: u64,
    /// Steps: their number, and the sum of their tokens.
    pub steps: [u64; 2],
    /// Pages: 1 for any, shared prefixes, rows by which a page is smaller than the largest, number of pages, places of
    /// the table that are not the pages in order.
    pub pages: [u64; 5],
    /// Sequences that borrow keys of others, and the sum of these keys.
    pub sharing: [u64; 2],
    /// Number of query heads, number of KV heads.
    pub heads: [u64; 2],
    /// Head dimensions of qk and v: their sum, their difference.
    pub dims: [u64; 2],
    /// Ranks of the sequence-parallel region.
    pub region: u64,
    /// Context parallelism: size of the group, world, number and parameter of the algorithm, balance with its
    /// stripe, sum of the ranks, ranks that differ from their place in the group.
    pub parallel: [u64; 7],
    /// Precision: elements unlike q's, scalings (per tensor 1, any other 2), distance of formats from bf16, each summed
    /// over the elements; place of the scales' values in [`ScaleValues::ALL`].
    pub precision: [u64; 4],
    /// Place of the mode in [`InputMode::ALL`].
    pub mode: u64,
    /// Sequence ids: their sum, ids that differ from their sequence's index.
    pub ids: [u64; 2],
    /// Data seed.
    pub seed: u64,
}

/// Returns the size of a problem.
pub fn size(problem: &Problem) -> Size {
    let real: usize = problem.sequences.iter().map(|sequence| sequence.q.len + sequence.kv.len).sum();
    Size {
        backward: u64::from(problem.pass == Pass::Backward),
        sequences: problem.sequences.len() as u64,
        tokens: real as u64,
        mask: mask(&problem.mask),
        softmax: softmax(&problem.softmax),
        layout: layout(problem, real),
        form: position(&Form::ALL, &problem.form),
        steps: steps(&problem.steps),
        pages: problem.pages.as_ref().map_or([0; 5], pages),
        sharing: [problem.sharing.0.len(), problem.sharing.0.iter().map(|shared| shared.keys).sum()]
            .map(|n| n as u64),
        heads: [problem.heads.q as u64, problem.heads.kv as u64],
        dims: [(problem.dims.qk + problem.dims.v) as u64, problem.dims.qk.abs_diff(problem.dims.v) as u64],
        region: problem.parallel.region as u64,
        parallel: parallel(&problem.parallel),
        precision: precision(problem),
        mode: position(&InputMode::ALL, &problem.mode),
        ids: sum_and_displaced(problem.sequences.iter().map(|sequence| sequence.id as usize)),
        seed: problem.data_seed,
    }
}

fn steps(Steps(tokens): &Steps) -> [u64; 2] {
    let sum = tokens.iter().fold(0u64, |sum, &tokens| sum.saturating_add(tokens as u64));
    [tokens.len() as u64, sum]
}

fn pages(pages: &Pages) -> [u64; 5] {
    let [_, displaced] = sum_and_displaced(pages.table.iter().flatten().copied());
    let smaller = PAGE_SIZE_MAX.saturating_sub(pages.size);
    [1, pages.shared.len() as u64, smaller as u64, pages.count as u64, displaced]
}

fn mask(mask: &Mask) -> [u64; 5] {
    let (parts, sum) = match mask.blocks {
        None => (0, 0),
        Some(Blocks::Chunks(keys)) => (1, u64::from(keys.get())),
        Some(Blocks::Documents(borders)) => {
            (1 + borders.keys().len() as u64, borders.keys().iter().copied().map(u64::from).sum())
        }
    };
    let kinds = parts + u64::from(mask.prefix > 0) + u64::from(mask.sink_tokens > 0);
    let bounded = 2 * u64::from(mask.left.is_some()) + u64::from(mask.right.is_some());
    let widths = u64::from(mask.left.unwrap_or(0)) + u64::from(mask.right.unwrap_or(0));
    let firsts = u64::from(mask.prefix) + u64::from(mask.sink_tokens);
    [kinds, bounded, widths, sum + firsts, u64::from(mask.align == Alignment::BottomRight)]
}

fn softmax(softmax: &Softmax) -> [u64; 3] {
    let sink = match softmax.sink {
        Sink::None => 0,
        Sink::OffByOne => 1,
        Sink::Learnable => 2,
    };
    [softmax.softcap.map_or(0, |cap| 1 + u64::from(cap != 1.0)), sink, u64::from(softmax.scale != 1.0)]
}

fn layout(problem: &Problem, real: usize) -> [u64; 4] {
    let mut shape = Arrangement::of(problem);
    let strided = shape.sides().iter().filter(|side| side.interleaved).count();
    let displaced: usize = shape
        .sides()
        .iter()
        .map(|side| side.pieces.iter().enumerate().filter(|(index, piece)| piece.place != *index).count())
        .sum();
    let offsets: usize =
        problem.sequences.iter().map(|sequence| sequence.q.offset + sequence.kv.offset).sum();
    let empty = problem.rows.q + problem.rows.kv - real;
    [strided, displaced, empty, offsets].map(|n| n as u64)
}

fn parallel(parallel: &ContextParallel) -> [u64; 7] {
    let (algorithm, parameter) = (parallel.algorithm.number(), parallel.algorithm.parameter().unwrap_or(0));
    let balance = match parallel.balance {
        Balance::Contiguous => 0,
        Balance::DualChunk => 1,
        Balance::Striped { stripe } => 1 + stripe,
    };
    let [ranks, displaced] = sum_and_displaced(parallel.ranks.iter().copied());
    let [size, world, algorithm, parameter, balance] =
        [parallel.size(), parallel.world, algorithm, parameter, balance].map(|n| n as u64);
    [size, world, algorithm, parameter, balance, ranks, displaced]
}

fn sum_and_displaced(numbers: impl Iterator<Item = usize> + Clone) -> [u64; 2] {
    let displaced = numbers.clone().enumerate().filter(|(index, number)| index != number).count();
    [numbers.map(|number| number as u64).sum(), displaced as u64]
}

fn precision(problem: &Problem) -> [u64; 4] {
    let precision = &problem.precision;
    let sum = |cost: &dyn Fn(Element) -> u64| precision.elements().iter().map(|(_, e)| cost(*e)).sum();
    let scaling = |element: Element| match element.scaling {
        Scaling::None => 0,
        Scaling::PerTensor => 1,
        _ => 2,
    };
    let [unlike, scalings, formats] =
        [sum(&|e| u64::from(e != precision.q)), sum(&scaling), sum(&|e| strangeness(e.format))];
    [unlike, scalings, formats, position(&ScaleValues::ALL, &problem.scales)]
}

fn strangeness(format: Format) -> u64 {
    position(&[Format::Bf16, Format::Fp16, Format::F32, Format::E4m3, Format::E5m2], &format)
}

fn position<T: PartialEq>(all: &[T], one: &T) -> u64 {
    all.iter().position(|other| other == one).unwrap_or(all.len()) as u64
}
