//! How fast the backward is on tensor cores, in both orders of dq's sums, with the memory that it takes.
//!
//! A figure counts all four launches. out and lse are those of the forward on tensor cores. Before a peer's time counts,
//! its gradients are compared with ours: both begin with the same numbers, and the peer is handed the gradients of the
//! first rows.

use std::path::PathBuf;

use seamproof_simulator::AttentionCall;
use tempfile::TempDir;

use super::attention::{FORMATS, TIMING, forward_launcher, time};
use super::figures::{Figure, Figures};
use super::peer::BackwardRequest;
use super::tensors::{Gradients, Numbers};
use super::tracks::Cell;
use super::{BenchError, Kernel};
use crate::attend::CallTables;
use crate::backward::{How, Order, Update};
use crate::error::KernelError;
use crate::gpu::{Buffer, Gpu};

/// Rows, from the first on, of which a peer's gradients are compared with ours.
const COMPARED_ROWS: usize = 8192;
/// A backward's operations for each of the forward's: five products for two.
const PRODUCTS: f64 = 2.5;
/// Both orders, and whether the peer is asked for one that gives the same bits each time.
const MODES: [(Order, &str, bool); 2] = [(Order::AsTheyCome, "any", false), (Order::Fixed, "fixed", true)];

/// Prints the figures of every cell.
pub(super) fn backward(gpu: &Gpu, cells: &[Cell], figures: &mut Figures) -> Result<(), BenchError> {
    let numbers = Numbers::new(gpu)?;
    let handed = figures.has_peer().then(|| Handed::new(gpu, &numbers)).transpose()?;
    for cell in cells {
        let ready = Ready::new(gpu, cell, &numbers)?;
        for (order, mode, deterministic) in MODES {
            let ms = time(gpu, |set| ready.launch(order, set))?;
            let gradients = ready.gradients()?;
            let request = handed.as_ref().map(|handed| handed.over(&gradients, deterministic)).transpose()?;
            let figure = Figure { mode, operations: PRODUCTS * cell.operations(), ms };
            figures.line(cell, figure, (TIMING, request.as_ref()))?;
        }
        let (bytes, rows) = (ready.workspace.area().bytes(), cell.problem.rows.q);
        let (megabytes, each) = (bytes as f64 / 1e6, bytes as f64 / rows as f64);
        figures.say(&format!("{:<25} memory besides: {megabytes:.1} MB, {each:.0} bytes a row", ""))?;
    }
    Ok(())
}

/// A cell's call and tensors on the GPU.
struct Ready<'g> {
    gpu: &'g Gpu,
    cell: &'g Cell,
    call: CallTables,
    tables: Buffer,
    workspace: Buffer,
    sets: Vec<Gradients>,
}

impl<'g> Ready<'g> {
    /// Runs the forward too.
    fn new(gpu: &'g Gpu, cell: &'g Cell, numbers: &Numbers) -> Result<Ready<'g>, KernelError> {
        let problem = &cell.problem;
        let (whole, rows) = (AttentionCall::whole(problem), [problem.rows.q, problem.rows.kv]);
        let call = CallTables::new(&whole, rows, true)?;
        let tables = gpu.upload(&call.bytes)?;
        let bytes = call.workspace_bytes(problem.heads.q, [problem.dims.qk, problem.dims.v]);
        let workspace = gpu.allocate(bytes)?;
        let sets = (0..TIMING.sets).map(|_| Gradients::new(gpu, cell, numbers));
        let sets: Vec<_> = sets.collect::<Result<_, _>>()?;
        let forward = forward_launcher(gpu, Kernel::Tuned, cell)?;
        sets.iter().try_for_each(|set| forward(&set.forward.forward(cell)))?;
        gpu.finish()?;
        Ok(Ready { gpu, cell, call, tables, workspace, sets })
    }

    fn launch(&self, order: Order, set: usize) -> Result<(), KernelError> {
        let (areas, how) =
            ([self.tables.area(), self.workspace.area()], How { order, update: Update::Overwrite });
        self.gpu.backward(&self.call, areas, FORMATS, how, &self.sets[set].backward(self.cell))
    }

    /// dq, dk and dv of the compared rows, one after the other, as they were computed last.
    fn gradients(&self) -> Result<Vec<u8>, BenchError> {
        let rows = self.cell.problem.rows.q;
        let first = |tensor: &Buffer| {
            let bytes = tensor.area().bytes() / rows * rows.min(COMPARED_ROWS);
            self.gpu.read(tensor.area().part(0..bytes)?)
        };
        let gradients = self.sets[0].results.iter().map(first).collect::<Result<Vec<_>, _>>()?.concat();
        // A bf16 with all bits of its exponent set is NaN or infinite.
        let finite =
            gradients.chunks_exact(2).all(|bits| u16::from_le_bytes([bits[0], bits[1]]) & 0x7f80 != 0x7f80);
        match finite {
            true => Ok(gradients),
            false => Err(BenchError::NotFinite(format!("{} {}", self.cell.track, self.cell.column.name))),
        }
    }
}

/// Files that a peer reads.
struct Handed {
    folder: TempDir,
    numbers: PathBuf,
}

impl Handed {
    fn new(gpu: &Gpu, numbers: &Numbers) -> Result<Handed, BenchError> {
        let folder = tempfile::tempdir()?;
        let file = folder.path().join("numbers");
        std::fs::write(&file, numbers.bytes(gpu)?)?;
        Ok(Handed { folder, numbers: file })
    }

    /// What a peer is asked for whose gradients must be these.
    fn over(&self, gradients: &[u8], deterministic: bool) -> Result<BackwardRequest, BenchError> {
        let file = self.folder.path().join("gradients");
        std::fs::write(&file, gradients)?;
        Ok(BackwardRequest {
            deterministic,
            numbers: self.numbers.clone(),
            gradients: file,
            rows: COMPARED_ROWS,
        })
    }
}
