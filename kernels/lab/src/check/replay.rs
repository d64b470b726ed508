//! A recorded forward and backward, replayed with other tables at the same addresses.
//!
//! *Dealings* deal one number of owned rows to one number of sequences. Their tables have one size, and differ in real
//! lengths, in owned rows, in first rows and in bounds. The launches of one dealing are recorded as a graph. Before
//! each replay, the tables of another dealing are written where the recorded ones were. A replay must write, bit for
//! bit and in every row, what launches that were made for its dealing write, by the same kernels and with the choices
//! of the recorded call. [`REPLAYED`] lists the recorded passes: everything that a call can say, and that a launch can
//! be told.
//!
//! Where dq is summed in any order, rows see keys of two tiles at most: a sum of two terms is one number in either
//! order.

use seamproof_kernels::backward::{BackwardMode, DqOrder};
use seamproof_kernels::forward::TileShape;
use seamproof_kernels::{Gpu, KernelError};
use seamproof_oracle::{
    Alignment, Format, Heads, Mask, Precision, Problem, ProblemFields, Run, Sequence, Sink, Softmax,
    TensorRows,
};
use seamproof_simulator::{AttentionCall, RowPolicy};

use super::mismatch::Mismatch;
use super::passes::{Kernels, ReadyPasses};
use crate::problem::{fields, legal};
use crate::ready::NormalNumbers;

/// The tables that are written before a replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplayTables {
    /// The tables of the dealing.
    Rewritten,
    /// No tables. This is a planted fault, which must be seen.
    Stale,
}

/// The rows of every tensor, times the step of its rows. Rows behind the last sequence, and before and between some,
/// are nobody's.
const ROWS: usize = 3000;
/// The first row, the real and the owned rows of each sequence, dealing by dealing.
type Dealings = [[(usize, usize, usize); 5]; 5];
/// Dealings of queries and of keys. The first dealing is recorded. The others are: as
/// long as there is room; shorter or empty; nearly all rows one sequence's, from a first row on; none real. The
/// queries of one dealing have the keys of the next.
const DEALINGS: Dealings = [
    [(0, 100, 700), (700, 37, 600), (1300, 1, 500), (1800, 400, 900), (2700, 64, 100)],
    [(0, 700, 700), (700, 600, 600), (1300, 500, 500), (1800, 900, 900), (2700, 100, 100)],
    [(0, 0, 700), (700, 3, 600), (1300, 0, 500), (1800, 129, 900), (2700, 0, 100)],
    [(0, 0, 0), (150, 2500, 2600), (2760, 1, 1), (2770, 0, 0), (2801, 190, 199)],
    [(20, 0, 1400), (1500, 0, 1400), (2900, 0, 0), (2900, 0, 0), (2900, 0, 0)],
];
/// Dealings of queries, like [`DEALINGS`]. They are so few that each block of the split shape plans for itself, with the keys of
/// [`FEW_KEYS`]. The six queries of one sequence are two tiles.
const FEW_QUERIES: Dealings = [
    [(0, 1, 2), (2, 1, 2), (4, 1, 1), (5, 1, 2), (7, 1, 1)],
    [(0, 2, 2), (2, 2, 2), (4, 1, 1), (5, 2, 2), (7, 1, 1)],
    [(0, 0, 2), (2, 1, 2), (4, 0, 1), (5, 2, 2), (7, 0, 1)],
    [(0, 0, 0), (1, 6, 6), (7, 0, 0), (7, 0, 0), (8, 2, 2)],
    [(3, 0, 8), (11, 0, 0), (11, 0, 0), (11, 0, 0), (11, 0, 0)],
];
/// The dealings of their keys.
const FEW_KEYS: Dealings = [
    [(0, 100, 300), (300, 37, 200), (500, 1, 150), (650, 180, 250), (900, 64, 100)],
    [(0, 300, 300), (300, 200, 200), (500, 150, 150), (650, 250, 250), (900, 100, 100)],
    [(0, 0, 300), (300, 3, 200), (500, 0, 150), (650, 129, 250), (900, 0, 100)],
    [(0, 0, 0), (50, 850, 900), (960, 1, 1), (970, 0, 0), (981, 90, 99)],
    [(20, 0, 500), (600, 430, 500), (1100, 0, 0), (1100, 0, 0), (1100, 0, 0)],
];
/// The order of the replays: every dealing, the recorded one again after another.
const REPLAYS: [usize; 6] = [1, 2, 3, 4, 0, 1];
/// The shapes of the simple kernels.
const NO_SHAPES: &[TileShape] = &[];
/// The heads: walks of the backward go down with groups, and up without.
const GROUPED: Heads = Heads { q: 8, kv: 2 };
const APART: Heads = Heads { q: 4, kv: 4 };
const BAND: Mask = Mask { left: Some(300), right: Some(70), align: Alignment::BottomRight, ..Mask::FULL };
/// A mask whose rows see keys of two tiles of 128 at most.
const NARROW: Mask = Mask { left: Some(100), ..Mask::CAUSAL };
const FIXED: BackwardMode = BackwardMode::overwrite(DqOrder::Fixed);

/// Passes that are recorded, with all their choices.
#[derive(Clone, Copy, Debug)]
pub struct Replayed {
    /// The name.
    pub name: &'static str,
    /// The dealings of queries and of keys.
    dealings: [&'static Dealings; 2],
    /// The shapes of forwards on tensor cores. If there is none, both passes run on the simple kernels.
    shapes: &'static [TileShape],
    /// The mode of backwards on tensor cores.
    how: BackwardMode,
    dims: &'static [usize],
    heads: &'static [Heads],
    masks: &'static [Mask],
    format: Format,
    /// The rows from one row of a sequence to the next. Sequences begin in each of the rows between, in turn.
    step: usize,
    /// Whether keys lie in two runs, the first keys behind the others.
    two_runs: bool,
    softcap: Option<f32>,
    sink: Sink,
    policy: RowPolicy,
}

/// An ordinary call.
const PLAIN: Replayed = Replayed {
    name: "plain",
    dealings: [&DEALINGS; 2],
    shapes: &TileShape::ALL,
    how: FIXED,
    dims: &[64, 128],
    heads: &[GROUPED],
    masks: &[BAND],
    format: Format::Bf16,
    step: 1,
    two_runs: false,
    softcap: None,
    sink: Sink::None,
    policy: RowPolicy::Overwrite,
};
/// A call that says everything besides a mask at once.
const EVERYTHING: Replayed = Replayed {
    name: "everything",
    how: BackwardMode::accumulate(DqOrder::Fixed),
    format: Format::Fp16,
    step: 3,
    two_runs: true,
    sink: Sink::Learnable,
    policy: RowPolicy::Leave,
    ..PLAIN
};

/// The passes that are recorded and replayed.
pub const REPLAYED: [Replayed; 16] = [
    Replayed { heads: &[GROUPED, APART], masks: &[Mask::CAUSAL, Mask::FULL, BAND], ..PLAIN },
    Replayed { name: "fp16", format: Format::Fp16, ..PLAIN },
    Replayed { name: "interleaved rows", step: 2, ..PLAIN },
    Replayed { name: "two runs of keys", two_runs: true, ..PLAIN },
    Replayed { name: "a learnable sink", sink: Sink::Learnable, ..PLAIN },
    Replayed { name: "a sink of 0", shapes: &[TileShape::Middle], sink: Sink::OffByOne, ..PLAIN },
    Replayed { name: "padding is left", policy: RowPolicy::Leave, ..PLAIN },
    Replayed {
        name: "gradients are added",
        shapes: &[TileShape::Long],
        how: BackwardMode::accumulate(DqOrder::Fixed),
        heads: &[GROUPED, APART],
        ..PLAIN
    },
    Replayed {
        name: "dq in any order",
        shapes: &[TileShape::Long],
        how: BackwardMode::overwrite(DqOrder::AsTheyCome),
        heads: &[GROUPED, APART],
        masks: &[NARROW],
        ..PLAIN
    },
    Replayed {
        name: "few rows, which blocks plan",
        dealings: [&FEW_QUERIES, &FEW_KEYS],
        shapes: &[TileShape::Split],
        ..PLAIN
    },
    EVERYTHING,
    Replayed { name: "a soft cap, and rows by threads", dims: &[20, 128], softcap: Some(2.0), ..EVERYTHING },
    Replayed { name: "wide heads", shapes: &[TileShape::Long], dims: &[256, 130], ..EVERYTHING },
    Replayed { name: "wider heads", shapes: &[TileShape::Long], dims: &[576, 300], ..PLAIN },
    Replayed { name: "the simple kernels", shapes: NO_SHAPES, dims: &[132, 136], ..PLAIN },
    Replayed {
        name: "everything on the simple kernels",
        shapes: NO_SHAPES,
        dims: &[132, 136],
        softcap: Some(2.0),
        ..EVERYTHING
    },
];

/// A graph: passes that are recorded, with one of each of their choices.
#[derive(Clone, Copy, Debug)]
struct Choice {
    of: Replayed,
    kernels: Kernels,
    dim: usize,
    heads: Heads,
    mask: Mask,
}

impl Replayed {
    /// Returns every choice.
    fn choices(self) -> impl Iterator<Item = Choice> {
        let tuned = self.shapes.iter().map(move |&shape| Kernels::Tuned(shape, self.how));
        let kernels: Vec<Kernels> =
            if self.shapes.is_empty() { vec![Kernels::Simple] } else { tuned.collect() };
        let heads = self.dims.iter().flat_map(move |&dim| self.heads.iter().map(move |&heads| (dim, heads)));
        let masks =
            heads.flat_map(move |(dim, heads)| self.masks.iter().map(move |&mask| (dim, heads, mask)));
        masks.flat_map(move |(dim, heads, mask)| {
            let of = move |kernels| Choice { of: self, kernels, dim, heads, mask };
            kernels.clone().into_iter().map(of)
        })
    }

    fn runs(self, side: usize, dealing: usize) -> impl Iterator<Item = Run> {
        let of = self.dealings[side][dealing % DEALINGS.len()].into_iter().enumerate();
        of.map(move |(index, (first, len, span))| Run {
            offset: self.step * first + index % self.step,
            step: self.step,
            len,
            span,
        })
    }
}

/// Returns a run in two, the rows behind first. Each has its share of the real rows.
fn halves(run: Run) -> Vec<Run> {
    let span = run.span / 2;
    let len = run.len * span / run.span.max(1);
    let behind =
        Run { offset: run.offset + run.step * span, len: run.len - len, span: run.span - span, ..run };
    vec![behind, Run { len, span, ..run }]
}

impl Choice {
    /// Returns a dealing's problem and call.
    fn dealt(&self, dealing: usize) -> Result<(Problem, AttentionCall), KernelError> {
        let Choice { of, dim, heads, mask, .. } = *self;
        let both = of.runs(0, dealing).zip(of.runs(1, dealing + 1));
        let sequences = both.zip(0..).map(|((q, kv), id)| Sequence { id, q, kv }).collect();
        let rows = ROWS * of.step;
        let plain = fields(sequences, TensorRows { q: rows, kv: rows }, heads, dim, mask);
        let problem = legal(ProblemFields {
            softmax: Softmax { softcap: of.softcap, sink: of.sink, ..plain.softmax },
            precision: Precision::uniform(of.format),
            ..plain
        })?;
        let mut call = AttentionCall { policy: of.policy, ..AttentionCall::whole(&problem) };
        if of.two_runs {
            for segment in &mut call.segments {
                segment.kv = segment.kv.iter().copied().flat_map(halves).collect();
            }
        }
        Ok((problem, call))
    }

    /// Returns what is wrong with replays of its graph.
    fn wrong(
        &self,
        gpu: &Gpu,
        numbers: &NormalNumbers,
        tables: ReplayTables,
    ) -> Result<Vec<Mismatch>, KernelError> {
        let dealt: Vec<(Problem, AttentionCall)> =
            (0..DEALINGS.len()).map(|dealing| self.dealt(dealing)).collect::<Result<_, _>>()?;
        let new = |dealing: usize| {
            let (problem, call) = &dealt[dealing];
            ReadyPasses::new(gpu, (problem, call), self.kernels, numbers)
        };
        let recorded = new(0)?;
        let graph = gpu.record(|| recorded.launch())?;
        let mut found = Vec::new();
        for (case, dealing) in REPLAYS.into_iter().enumerate() {
            let mut fresh = new(dealing)?;
            fresh.launches.call.choose_as(&recorded.launches.call);
            let want = fresh.results(|| fresh.launch())?;
            if tables == ReplayTables::Rewritten {
                gpu.write(recorded.launches.tables.area(), fresh.launches.call.bytes())?;
            }
            let got = recorded.results(|| graph.launch())?;
            for ((name, got), (_, want)) in got.into_iter().zip(want).filter(|(got, want)| got != want) {
                let differing: Vec<usize> = (0..want.len()).filter(|&at| got[at] != want[at]).collect();
                found.push(Mismatch {
                    operation: "a replayed graph",
                    case: case as u64,
                    place: format!("{name}, byte {}", differing.first().unwrap_or(&0)),
                    what: format!("dealing {dealing}, {self}"),
                    bytes: differing.len(),
                });
            }
        }
        Ok(found)
    }
}

impl std::fmt::Display for Choice {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        let Choice { of, kernels, dim, heads, mask } = self;
        write!(f, "{}: {kernels:?}, head dim {dim}, {} heads on {}, {mask:?}", of.name, heads.q, heads.kv)
    }
}

/// Replays the graphs of one of [`REPLAYED`]. Returns what is wrong with the first graph that is wrong.
pub fn replayed(gpu: &Gpu, replayed: Replayed, tables: ReplayTables) -> Result<Vec<Mismatch>, KernelError> {
    let numbers = NormalNumbers::of(gpu, replayed.format)?;
    for choice in replayed.choices() {
        let found = choice.wrong(gpu, &numbers, tables)?;
        if !found.is_empty() {
            return Ok(found);
        }
    }
    Ok(Vec::new())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::problem::dims;
    use seamproof_kernels::attend::CallTables;
    use seamproof_kernels::backward::{self, BackwardOperands};
    use seamproof_kernels::forward::{self, DIM_MAX, ForwardOperands};

    fn operands(problem: &Problem) -> BackwardOperands {
        let format = problem.precision.q.format;
        let dims = dims(problem);
        BackwardOperands {
            forward: ForwardOperands { formats: [format; 3], out: format, p: format, dims },
            ds: format,
            dout: format,
            gradients: [format; 3],
        }
    }

    /// The launches of a graph depend on the owned rows, on their step, and on the number of sequences and runs,
    /// which are the same in all dealings. They go to the kernels that are meant.
    #[test]
    fn dealings_have_tables_of_one_size_that_differ() {
        for choice in REPLAYED.into_iter().flat_map(Replayed::choices) {
            let dealt: Vec<_> =
                (0..DEALINGS.len()).map(|dealing| choice.dealt(dealing).expect("a problem")).collect();
            let tables = |(problem, call): &(Problem, AttentionCall)| {
                CallTables::new(call, [problem.rows.q, problem.rows.kv], true)
                    .expect("its runs lie in the rows")
            };
            let all: Vec<CallTables> = dealt.iter().map(tables).collect();
            let first = &all[0];
            for (dealing, call) in all.iter().enumerate() {
                assert_eq!(call.counts(), first.counts(), "{choice}, {dealing}");
                assert_eq!(call.owned(), first.owned(), "{choice}, {dealing}");
                assert_eq!(call.summary().step, [Some(choice.of.step); 2], "{choice}, {dealing}");
                assert_eq!(call.bytes().len(), first.bytes().len(), "{choice}, {dealing}");
                assert!(
                    all[..dealing].iter().all(|other| other.bytes() != call.bytes()),
                    "{choice}, {dealing}"
                );
                let operands = operands(&dealt[dealing].0);
                let refused = match choice.dim {
                    ..=DIM_MAX => backward::refusal(call, &operands),
                    _ => forward::refusal(call, &operands.forward),
                };
                assert_eq!(refused, None, "{choice}, {dealing}");
            }
        }
    }

    #[test]
    fn only_the_few_rows_are_split_by_blocks() {
        for choice in REPLAYED.into_iter().flat_map(Replayed::choices) {
            let (problem, call) = choice.dealt(0).expect("a problem");
            let call =
                CallTables::new(&call, [problem.rows.q, problem.rows.kv], true).expect("runs in the rows");
            let few = choice.of.dealings[0] == &FEW_QUERIES;
            assert_eq!(call.is_split_by_blocks([choice.heads.q, choice.heads.kv]), few, "{choice}");
        }
    }

    #[test]
    fn two_runs_have_the_rows_of_one_with_padding_behind_each() {
        let run = Run { offset: 3, step: 2, len: 37, span: 101 };
        let both = halves(run);
        assert!(both.iter().all(|run| run.len < run.span));
        let mut rows: Vec<usize> =
            both.iter().flat_map(|run| run.real_rows().chain(run.padding_rows())).collect();
        rows.sort_unstable();
        assert_eq!(rows, run.real_rows().chain(run.padding_rows()).collect::<Vec<_>>());
        assert_eq!(both.iter().map(|run| run.len).sum::<usize>(), run.len);
        for (len, span) in [(0, 0), (1, 1), (0, 1), (5, 5), (2, 3)] {
            let both = halves(Run::packed(0, len, span));
            assert!(both.iter().all(|run| run.len <= run.span), "{both:?}");
        }
    }

    /// Rows whose dq is summed in any order see two tiles at most, and a sum has two terms at most.
    #[test]
    fn rows_of_sums_in_any_order_see_two_tiles() {
        for choice in REPLAYED.into_iter().flat_map(Replayed::choices) {
            if choice.of.how.order == DqOrder::Fixed {
                continue;
            }
            for dealing in 0..DEALINGS.len() {
                let (problem, _) = choice.dealt(dealing).expect("a problem");
                for sequence in &problem.sequences {
                    for i in 0..sequence.q.len {
                        let keys = problem.mask.visible(i, sequence.q.len, sequence.kv.len).hull();
                        let tiles =
                            if keys.is_empty() { 0 } else { (keys.end - 1) / 128 - keys.start / 128 + 1 };
                        assert!(tiles <= 2, "{choice}: {keys:?}");
                    }
                }
            }
        }
    }
}
