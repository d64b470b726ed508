//! The faults whose detection is measured, each with the shape of its cases.
//!
//! Shapes are fixed. The values of the inputs, their mode, and the place where a fault strikes are drawn. Sizes are
//! those that the field's test suites use, or as small as keeps the fault as subtle.

use seamproof_oracle::{
    Algorithm, Balance, ContextParallel, Heads, InputMode, Mask, Pass, Problem, ProblemError, ProblemFields,
    Run, Sequence, Softmax, TensorName,
};
use seamproof_simulator::Segment;
use seamproof_simulator::emulated::{Right, Stages, Tiles, UnitArithmetic};
use seamproof_simulator::faults::{Catcher, Edit, Fault, Plant};
use seamproof_simulator::schedule::{MergeStyle, Schedule, Work};

use crate::backends::{self, BackendError};
use seamproof_judge::exact;
use seamproof_judge::subject::Backend;
use seamproof_judge::subjects::{Emulated, Fp8, Planted};

/// Number of query rows, and of key rows, in a tile.
const TILE: usize = 64;
/// Number of keys among which [`ONE_KEY`] loses one.
const MANY_KEYS: usize = 4096;
/// Number of real keys of the padded sequence, as TransformerEngine's context-parallel suite has at its size.
const PADDED_KEYS: usize = 3301;
/// Number of padding keys that leak.
const LEAKED: usize = 3;

/// Shape of a case: sequences of one kind.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Number of sequences.
    pub sequences: usize,
    /// Number of real queries.
    pub queries: usize,
    /// Number of real keys.
    pub keys: usize,
    /// Number of padding rows behind the keys.
    pub padding: usize,
    /// Number of query heads, and of KV heads.
    pub heads: usize,
    /// Number of lanes of a head. The scale is one over its root, or the nearest that the mode takes.
    pub dim: usize,
    /// Mask of the case.
    pub mask: Mask,
    /// Pass of the case.
    pub pass: Pass,
    /// Number of ranks of a ring; 1 for no ring.
    pub ranks: usize,
}

impl Shape {
    const fn forward(queries: usize, keys: usize, mask: Mask) -> Shape {
        Shape {
            sequences: 1,
            queries,
            keys,
            padding: 0,
            heads: 1,
            dim: 16,
            mask,
            pass: Pass::Forward,
            ranks: 1,
        }
    }

    const fn backward(length: usize) -> Shape {
        Shape { heads: 2, pass: Pass::Backward, ..Shape::forward(length, length, Mask::CAUSAL) }
    }

    /// Returns the problem of this shape with the values of a mode and a seed.
    pub fn problem(&self, seed: u64, mode: InputMode) -> Result<Problem, ProblemError> {
        let sequence = |index: usize| {
            let span = self.keys + self.padding;
            let kv = Run::packed(index * span, self.keys, span);
            let q = Run::packed(index * self.queries, self.queries, self.queries);
            Sequence { id: index as u32, q, kv }
        };
        Problem::new(ProblemFields {
            heads: Heads { q: self.heads, kv: self.heads },
            mask: self.mask,
            softmax: Softmax::scaled(exact::fit_scale(mode, 1.0 / (self.dim as f32).sqrt())),
            parallel: self.parallel(),
            mode,
            data_seed: seed,
            pass: self.pass,
            ..ProblemFields::of((0..self.sequences).map(sequence).collect(), self.dim)
        })
    }

    fn parallel(&self) -> ContextParallel {
        match self.ranks {
            1 => ContextParallel::single(),
            ranks => ContextParallel::over(ranks, Algorithm::Ring, Balance::DualChunk),
        }
    }
}

/// Subject of a row.
#[derive(Clone, Copy, Debug)]
pub enum MeasuredSubject {
    /// The right kernel.
    Right,
    /// A subject by its name on the command line.
    Named(&'static str),
    /// The emulated kernel with a fault of this table.
    Planted(Fault),
    /// The kernel in FP8 with what follows its name; right without any.
    Fp8(&'static str),
}

impl MeasuredSubject {
    /// Whether there is no fault.
    pub fn is_right(self) -> bool {
        matches!(self, MeasuredSubject::Right | MeasuredSubject::Fp8(""))
    }

    /// Returns the right kernel in bf16.
    pub fn right() -> Emulated {
        Emulated { tiles: Tiles { q: TILE, kv: TILE }, ..Emulated::default() }
    }

    /// Returns the subject, ready to run.
    fn backend(self, pass: Pass) -> Result<Box<dyn Backend>, BackendError> {
        let tiles = ["q_tile", "kv_tile"].map(|name| (name.to_owned(), TILE.to_string()));
        match self {
            MeasuredSubject::Right => Ok(Box::new(MeasuredSubject::right())),
            MeasuredSubject::Named(name) => backends::by_name(name, &tiles.into()),
            MeasuredSubject::Planted(fault) => Ok(Box::new(Planted::new(MeasuredSubject::right(), fault))),
            MeasuredSubject::Fp8(fault) => {
                let pass = if pass == Pass::Backward { "both" } else { "forward" };
                let options = tiles.into_iter().chain([("pass".to_owned(), pass.to_owned())]);
                backends::by_name(&format!("{}{fault}", Fp8::NAME), &options.collect())
            }
        }
    }
}

/// One fault of the table.
#[derive(Clone, Copy, Debug)]
pub struct PowerRow {
    /// Name in the table.
    pub name: &'static str,
    /// Shapes that cases take in turn.
    pub shapes: &'static [Shape],
    /// Subject that is measured.
    pub subject: MeasuredSubject,
}

impl PowerRow {
    /// Returns the subject, and the right one of which it is an edit.
    pub fn subjects(&self) -> Result<[Box<dyn Backend>; 2], BackendError> {
        let is_backward = |shape: &Shape| shape.pass == Pass::Backward;
        let pass = if self.shapes.iter().any(is_backward) { Pass::Backward } else { Pass::Forward };
        let right = match self.subject {
            MeasuredSubject::Fp8(_) => MeasuredSubject::Fp8(""),
            _ => MeasuredSubject::Right,
        };
        Ok([self.subject.backend(pass)?, right.backend(pass)?])
    }
}

const FULL: Mask = Mask { left: None, right: None, ..Mask::CAUSAL };
const ONE_KEY: Shape = Shape::forward(64, MANY_KEYS, FULL);
const WINDOW: Shape = Shape::forward(1024, 1024, Mask { left: Some(512), ..Mask::CAUSAL });
const PADDED: Shape = Shape { padding: LEAKED, ..Shape::forward(128, PADDED_KEYS, FULL) };
const SQUARE: Shape = Shape::forward(1024, 1024, FULL);
const CAUSAL: Shape = Shape::forward(256, 256, Mask::CAUSAL);
const RING: Shape = Shape { ranks: 4, ..Shape::forward(512, 512, Mask::CAUSAL) };
const GRADIENTS: Shape = Shape::backward(256);

/// The rows in bf16. The last one has no fault.
pub const BF16_ROWS: [PowerRow; 12] = [
    PowerRow {
        name: "one key of 4096 masked, for one query",
        shapes: &[ONE_KEY],
        subject: planted("one-key-of-one-query", one_key_of_one_query),
    },
    PowerRow {
        name: "one key of 4096 masked, for every query",
        shapes: &[ONE_KEY],
        subject: planted("one-key-of-every-query", one_key_of_every_query),
    },
    PowerRow {
        name: "window 512 → 511",
        shapes: &[WINDOW],
        subject: MeasuredSubject::Named("emulated+window-off-by-one"),
    },
    PowerRow {
        name: "3 padding keys leak into 3301",
        shapes: &[PADDED],
        subject: planted("three-padding-keys", three_padding_keys),
    },
    PowerRow {
        name: "an eighth of the keys lost for the last eighth of the queries",
        shapes: &[SQUARE],
        subject: planted("an-eighth-lost", an_eighth_lost),
    },
    PowerRow {
        name: "scale off by 2⁻⁸",
        shapes: &[CAUSAL],
        subject: MeasuredSubject::Named("emulated+scale-slightly-off"),
    },
    PowerRow {
        name: "LSE correction of one ring step missing",
        shapes: &[RING],
        subject: planted("one-step-uncorrected", one_step_uncorrected),
    },
    PowerRow {
        name: "dk of one head halved",
        shapes: &[GRADIENTS],
        subject: MeasuredSubject::Named("emulated~call-dk-of-a-head-halved"),
    },
    PowerRow {
        name: "dS without scale",
        shapes: &[GRADIENTS],
        subject: MeasuredSubject::Named("emulated+ds-without-scale"),
    },
    PowerRow {
        name: "one V row read from its neighbour",
        shapes: &[SQUARE],
        subject: MeasuredSubject::Planted(own("one-value-row-shifted", Plant::Kernel(&OneValueRowShifted))),
    },
    PowerRow {
        name: "accumulator keeps 2⁻⁸ of another row",
        shapes: &[CAUSAL],
        subject: MeasuredSubject::Named("emulated+stale-accumulator"),
    },
    PowerRow {
        name: "no fault",
        shapes: &[ONE_KEY, WINDOW, PADDED, SQUARE, CAUSAL, RING, GRADIENTS],
        subject: MeasuredSubject::Right,
    },
];

/// Keys of rows that are long for the kernel in FP8.
const LONG: Shape = Shape { heads: 1, dim: 32, ..Shape::forward(8, 4096, FULL) };
const PACK: Shape = Shape { sequences: 3, heads: 2, dim: 64, ..Shape::forward(96, 96, Mask::CAUSAL) };
const PADDED_PACK: Shape = Shape { padding: LEAKED, mask: FULL, ..PACK };
const WINDOWED_PACK: Shape = Shape { mask: Mask { left: Some(32), ..Mask::CAUSAL }, ..PACK };
const PACK_GRADIENTS: Shape = Shape { pass: Pass::Backward, ..PACK };

const fn fp8(name: &'static str, shapes: &'static [Shape], fault: &'static str) -> PowerRow {
    PowerRow { name, shapes, subject: MeasuredSubject::Fp8(fault) }
}

/// The rows in FP8. The last one has no fault.
pub const FP8_ROWS: [PowerRow; 14] = [
    fp8("window 32 → 31", &[WINDOWED_PACK], "~call-window-narrower"),
    fp8("one padding key seen", &[PADDED_PACK], "~call-padding-key-seen"),
    fp8("scale off by 2⁻⁸", &[PACK], "~call-scale-off"),
    fp8("scale of v ignored", &[PACK], "+v-descale-ignored"),
    fp8("every sequence has the scales of the first", &[PACK], "+descale-of-the-first-sequence"),
    fp8("weights not multiplied by 2⁸", &[LONG], "+weights-not-multiplied"),
    fp8("weights cut off", &[PACK], "+weights-cut-off"),
    fp8("weights rounded to fp16, then to e4m3", &[LONG], "+weights-rounded-twice"),
    fp8("row sum of rounded weights", &[PACK], "+row-sum-of-rounded-weights"),
    fp8("sums never promoted, 4,096 keys", &[LONG], "+sums-not-promoted"),
    fp8("scale of dout ignored", &[PACK_GRADIENTS], "+dout-descale-ignored"),
    fp8("factor of a tile's dS from one row", &[PACK_GRADIENTS], "+ds-factor-of-one-row"),
    fp8("dq has the scale of q, dk that of k", &[PACK_GRADIENTS], "+q-and-k-descales-exchanged-behind"),
    fp8("no fault", &[PACK, PADDED_PACK, WINDOWED_PACK, LONG, PACK_GRADIENTS], ""),
];

/// Source of the tests that let faults of this kind pass.
const SOURCE: &str =
    "https://github.com/NVIDIA/TransformerEngine/blob/main/tests/pytorch/attention/run_attention_with_cp.py";

const fn own(id: &'static str, edit: Plant) -> Fault {
    let caught_by = &[Catcher::Exact, Catcher::Identity, Catcher::Envelope];
    Fault { id, imitates: "see the table's row", source: SOURCE, entries: &[], caught_by, edit }
}

const fn planted(id: &'static str, edit: Edit) -> MeasuredSubject {
    MeasuredSubject::Planted(own(id, Plant::Schedule(edit)))
}

/// Edits the segments of each forward launch, all of which are under a full mask.
fn edit_segments(schedule: &mut Schedule, edit: impl Fn(Segment) -> Vec<Segment>) {
    let operations = schedule.ranks.iter_mut().flat_map(|program| &mut program.operations);
    for operation in operations {
        if let Work::Attend(attend) = &mut operation.work {
            attend.call.segments =
                std::mem::take(&mut attend.call.segments).into_iter().flat_map(&edit).collect();
        }
    }
}

/// Returns the first `at` rows of a run, and the others with its padding.
fn cut(run: Run, at: usize) -> [Run; 2] {
    let at = at.min(run.len);
    let after = Run { offset: run.row(at), len: run.len - at, span: run.span - at, ..run };
    [Run { len: at, span: at, ..run }, after]
}

/// Returns a segment's first `at` queries, and the others.
fn cut_queries(segment: Segment, at: usize) -> [Segment; 2] {
    let [before, after] = cut(segment.q, at);
    [Segment { q: before, ..segment.clone() }, Segment { q: after, ..segment }]
}

/// Returns a segment without one key.
fn without_key(segment: Segment, key: usize) -> Segment {
    let runs = segment.kv.iter().flat_map(|run| {
        let [before, rest] = cut(*run, key);
        [before, cut(rest, 1)[1]]
    });
    Segment { kv: runs.collect(), ..segment }
}

/// Returns a place below `n` drawn from the problem's seed.
fn place(problem: &Problem, tensor: TensorName, n: usize) -> usize {
    (seamproof_judge::hash::mix(problem.data_seed ^ (tensor as u64) << 32) % n.max(1) as u64) as usize
}

fn one_key_of_every_query(problem: &Problem, schedule: &mut Schedule) {
    edit_segments(schedule, |segment| {
        let key = place(problem, TensorName::K, segment.keys());
        vec![without_key(segment, key)]
    });
}

fn one_key_of_one_query(problem: &Problem, schedule: &mut Schedule) {
    edit_segments(schedule, |segment| {
        let key = place(problem, TensorName::K, segment.keys());
        let query = place(problem, TensorName::Q, segment.q.len);
        let [before, rest] = cut_queries(segment, query);
        let [one, after] = cut_queries(rest, 1);
        vec![before, without_key(one, key), after]
    });
}

fn three_padding_keys(_: &Problem, schedule: &mut Schedule) {
    edit_segments(schedule, |mut segment| {
        segment.kv.iter_mut().for_each(|run| run.len = run.span.min(run.len + LEAKED));
        vec![segment]
    });
}

fn an_eighth_lost(_: &Problem, schedule: &mut Schedule) {
    edit_segments(schedule, |segment| {
        let last = segment.q.len - segment.q.len / 8;
        let [before, mut after] = cut_queries(segment, last);
        after.kv.iter_mut().for_each(|run| run.len -= run.len / 8);
        vec![before, after]
    });
}

/// Spoils the last merge of the last rank: it weighs the step's out by an LSE that does not include the step.
fn one_step_uncorrected(_: &Problem, schedule: &mut Schedule) {
    let works = schedule.ranks.iter_mut().flat_map(|program| &mut program.operations);
    let merges = works.filter_map(|operation| match &mut operation.work {
        Work::Merge(merge) => Some(merge),
        _ => None,
    });
    if let Some(merge) = merges.last() {
        merge.style = MergeStyle::Weighted { product_rounded: false };
    }
}

/// Stages in which the middle value row is the one before it.
#[derive(Debug)]
struct OneValueRowShifted;

impl<A: UnitArithmetic<f32>> Stages<f32, A> for OneValueRowShifted {
    fn rows(&self, pass: Pass, tensor: TensorName, segment: &Segment) -> Vec<usize> {
        let mut rows = Stages::<f32, A>::rows(&Right, pass, tensor, segment);
        let middle = rows.len() / 2;
        if tensor == TensorName::V && middle > 0 {
            rows[middle] = rows[middle - 1];
        }
        rows
    }
}
