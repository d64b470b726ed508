//! A recorded forward and backward, replayed with other tables at the same addresses.
//!
//! *Dealings* of one number of owned rows to one number of sequences make tables of one size: they differ in real lengths, in
//! owned rows, in first rows and in bounds. The launches of one dealing are recorded as a graph; before each replay the tables
//! of another are written where the recorded ones were. What a replay writes must be, bit for bit and in every row, what
//! launches that were made for its dealing write, in the same shape and in the fixed order.

use seamproof_oracle::{Alignment, Heads, Mask, Problem, Rows, Run, Sequence};
use seamproof_simulator::AttentionCall;

use super::{Mismatch, problem};
use crate::attend::CallTables;
use crate::backward::{How, Order, Update};
use crate::error::KernelError;
use crate::forward::Shape;
use crate::gpu::{Buffer, Gpu};
use crate::ready::{FORMATS, Gradients, Numbers};

/// Whether tables are written before a replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tables {
    /// Those of its lengths.
    Rewritten,
    /// None: a planted fault, which must be seen.
    Stale,
}

/// Rows of every tensor; those behind the last sequence, and before and between some, are nobody's.
const ROWS: usize = 3000;
/// Of each sequence the first row, the real and the owned rows. The first is recorded. Then: as long as there is room; shorter
/// or empty; nearly all rows one sequence's, from a first row on; none real. Queries of one dealing have the keys of the next.
const DEALINGS: [[(usize, usize, usize); 5]; 5] = [
    [(0, 100, 700), (700, 37, 600), (1300, 1, 500), (1800, 400, 900), (2700, 64, 100)],
    [(0, 700, 700), (700, 600, 600), (1300, 500, 500), (1800, 900, 900), (2700, 100, 100)],
    [(0, 0, 700), (700, 3, 600), (1300, 0, 500), (1800, 129, 900), (2700, 0, 100)],
    [(0, 0, 0), (150, 2500, 2600), (2760, 1, 1), (2770, 0, 0), (2801, 190, 199)],
    [(20, 0, 1400), (1500, 0, 1400), (2900, 0, 0), (2900, 0, 0), (2900, 0, 0)],
];
/// The order of the replays: every dealing, the recorded one again after another.
const REPLAYS: [usize; 6] = [1, 2, 3, 4, 0, 1];
const SHAPES: [Shape; 4] = [Shape::Long, Shape::Paired, Shape::Middle, Shape::Short];
const DIMS: [usize; 2] = [64, 128];
/// Walks of the backward go down with groups and up without.
const HEADS: [Heads; 2] = [Heads { q: 8, kv: 2 }, Heads { q: 4, kv: 4 }];
const MASKS: [(&str, Mask); 2] = [
    ("causal", Mask::CAUSAL),
    ("band", Mask { left: Some(300), right: Some(70), align: Alignment::BottomRight }),
];
const FIXED: How = How { order: Order::Fixed, update: Update::Overwrite };
/// What lies in results before a launch.
const BEFORE: u8 = 0xa5;

fn runs(dealing: usize) -> impl Iterator<Item = Run> {
    DEALINGS[dealing % DEALINGS.len()].into_iter().map(|(first, len, span)| Run::packed(first, len, span))
}

fn dealt(dealing: usize, heads: Heads, dim: usize, mask: Mask) -> Result<Problem, KernelError> {
    let both = runs(dealing).zip(runs(dealing + 1));
    let sequences = both.zip(0..).map(|((q, kv), id)| Sequence { id, q, kv }).collect();
    problem(sequences, Rows { q: ROWS, kv: ROWS }, heads, dim, mask)
}

/// A forward and a backward on tensors of their own, and what they are launched with.
struct Launches<'g> {
    gpu: &'g Gpu,
    problem: &'g Problem,
    shape: Shape,
    tensors: Gradients,
    call: CallTables,
    tables: Buffer,
    plan: Buffer,
    workspace: Buffer,
}

impl<'g> Launches<'g> {
    fn new(
        gpu: &'g Gpu,
        problem: &'g Problem,
        shape: Shape,
        numbers: &Numbers,
    ) -> Result<Launches<'g>, KernelError> {
        let call = CallTables::new(&AttentionCall::whole(problem), [problem.rows.q, problem.rows.kv], true)?;
        let (tables, plan) = (gpu.upload(&call.bytes)?, gpu.allocate(call.plan_bytes())?);
        let bytes = call.workspace_bytes(problem.heads.q, [problem.dims.qk, problem.dims.v]);
        let (workspace, tensors) = (gpu.allocate(bytes)?, Gradients::new(gpu, problem, numbers)?);
        Ok(Launches { gpu, problem, shape, tensors, call, tables, plan, workspace })
    }

    fn launch(&self) -> Result<(), KernelError> {
        let Launches { gpu, problem, shape, call, .. } = self;
        let (forward, backward) = (self.tensors.forward.forward(problem), self.tensors.backward(problem));
        let [tables, plan, workspace] = [&self.tables, &self.plan, &self.workspace].map(Buffer::area);
        gpu.forward(call, [tables, plan], FORMATS, *shape, &forward)?;
        gpu.backward(call, [tables, workspace], FORMATS, FIXED, &backward)
    }

    /// What `launch` writes, on results that nothing was in.
    fn results(
        &self,
        launch: impl FnOnce() -> Result<(), KernelError>,
    ) -> Result<Vec<(&'static str, Vec<u8>)>, KernelError> {
        let lowest = f32::NEG_INFINITY.to_le_bytes().repeat(self.problem.heads.q);
        for (name, area) in self.tensors.results() {
            let before = if name == "max_logit" { lowest.clone() } else { vec![BEFORE; area.bytes()] };
            self.gpu.write(area, &before)?;
        }
        launch()?;
        let read = self.tensors.results().into_iter().map(|(name, area)| Ok((name, self.gpu.read(area)?)));
        read.collect()
    }
}

/// Replays of graphs in every shape, of both head dims, with groups and without, and with two masks; no further than to the
/// first graph that is wrong.
pub fn replayed(gpu: &Gpu, tables: Tables) -> Result<Vec<Mismatch>, KernelError> {
    let numbers = Numbers::new(gpu)?;
    for dim in DIMS {
        for heads in HEADS {
            for (name, mask) in MASKS {
                let problems = (0..DEALINGS.len()).map(|dealing| dealt(dealing, heads, dim, mask));
                let problems: Vec<Problem> = problems.collect::<Result<_, _>>()?;
                for shape in SHAPES {
                    let what =
                        format!("{shape:?}, head dim {dim}, {} heads on {}, {name}", heads.q, heads.kv);
                    let replays = Replays { gpu, problems: &problems, shape, numbers: &numbers, tables };
                    let found = replays.wrong(&what)?;
                    if !found.is_empty() {
                        return Ok(found);
                    }
                }
            }
        }
    }
    Ok(Vec::new())
}

/// A recorded graph's replays.
struct Replays<'a> {
    gpu: &'a Gpu,
    problems: &'a [Problem],
    shape: Shape,
    numbers: &'a Numbers,
    tables: Tables,
}

impl Replays<'_> {
    fn wrong(&self, what: &str) -> Result<Vec<Mismatch>, KernelError> {
        let gpu = self.gpu;
        let new = |problem| Launches::new(gpu, problem, self.shape, self.numbers);
        let recorded = new(&self.problems[0])?;
        let graph = gpu.record(|| recorded.launch())?;
        let mut found = Vec::new();
        for (case, dealing) in REPLAYS.into_iter().enumerate() {
            let fresh = new(&self.problems[dealing])?;
            let want = fresh.results(|| fresh.launch())?;
            if self.tables == Tables::Rewritten {
                gpu.write(recorded.tables.area(), &fresh.call.bytes)?;
            }
            let got = recorded.results(|| graph.launch())?;
            for ((name, got), (_, want)) in got.into_iter().zip(want).filter(|(got, want)| got != want) {
                let differing: Vec<usize> = (0..want.len()).filter(|&at| got[at] != want[at]).collect();
                found.push(Mismatch {
                    operation: "a replayed graph",
                    case: case as u64,
                    place: format!("{name}, byte {}", differing.first().unwrap_or(&0)),
                    what: format!("dealing {dealing}, {what}"),
                    bytes: differing.len(),
                });
            }
        }
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A graph's launches depend on the owned rows and on the number of sequences and runs, which are the same in all.
    #[test]
    fn dealings_have_tables_of_one_size_that_differ() {
        for (name, mask) in MASKS {
            let tables = |dealing| {
                let problem = dealt(dealing, HEADS[0], 64, mask).expect("a problem");
                CallTables::new(&AttentionCall::whole(&problem), [ROWS; 2], true)
                    .expect("its runs lie in the rows")
            };
            let all: Vec<CallTables> = (0..DEALINGS.len()).map(tables).collect();
            for (dealing, call) in all.iter().enumerate() {
                assert_eq!(call.owned, all[0].owned, "{name}, {dealing}");
                assert_eq!(call.bytes.len(), all[0].bytes.len(), "{name}, {dealing}");
                assert!(all[..dealing].iter().all(|other| other.bytes != call.bytes), "{name}, {dealing}");
            }
        }
    }
}
