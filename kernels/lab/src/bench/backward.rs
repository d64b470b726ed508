//! Speed of the backward on tensor cores, in both orders of dq's sums, and the memory that it takes.
//!
//! A figure counts all launches. out and lse are those of the forward on tensor cores. Before a peer's time counts,
//! its gradients are compared with ours: both begin with the same numbers, and the peer is handed the gradients of
//! the first rows.

use std::path::PathBuf;

use seamproof_kernels::Gpu;
use seamproof_kernels::backward::{BackwardMode, DqOrder};
use seamproof_kernels::memory::DeviceBuffer;
use tempfile::TempDir;

use super::error::BenchError;
use super::figures::{Figure, Figures};
use super::peer::BackwardRequest;
use super::timing::{TIMING, time};
use super::tracks::BenchCell;
use crate::ready::{NormalNumbers, ReadyBackward};

/// The first rows, whose gradients a peer's are compared with.
const COMPARED_ROWS: usize = 8192;
/// The operations of a backward for each of the forward's: five products for two.
pub(super) const PRODUCTS: f64 = 2.5;

/// Prints the figures of every cell.
pub(super) fn backward(gpu: &Gpu, cells: &[BenchCell], figures: &mut Figures) -> Result<(), BenchError> {
    let numbers = NormalNumbers::new(gpu)?;
    let handed = figures.has_peer().then(|| Handed::new(gpu, &numbers)).transpose()?;
    for cell in cells {
        let ready = ReadyBackward::new(gpu, &cell.problem, &numbers, TIMING.sets)?;
        for order in DqOrder::ALL {
            let how = BackwardMode::overwrite(order);
            let ms = time(gpu, |set| ready.launch(how, &ready.tensors(set)))?;
            let gradients = gradients(gpu, cell, &ready)?;
            let request =
                handed.as_ref().map(|handed| handed.over(&gradients, order == DqOrder::Fixed)).transpose()?;
            let figure = Figure { mode: order.name(), operations: PRODUCTS * cell.operations(), ms };
            figures.line(cell, figure, (TIMING, request.as_ref()))?;
        }
        let (bytes, rows) = (ready.workspace.area().bytes(), cell.problem.rows.q);
        let (megabytes, each) = (bytes as f64 / 1e6, bytes as f64 / rows as f64);
        figures.say(&format!(
            "{:<25} memory beside the tensors: {megabytes:.1} MB, {each:.0} bytes a row",
            ""
        ))?;
    }
    Ok(())
}

/// Returns the mean milliseconds of a cell's backward.
pub(super) fn backward_ms(
    gpu: &Gpu,
    cell: &BenchCell,
    order: DqOrder,
    numbers: &NormalNumbers,
) -> Result<f64, BenchError> {
    let ready = ReadyBackward::new(gpu, &cell.problem, numbers, TIMING.sets)?;
    Ok(time(gpu, |set| ready.launch(BackwardMode::overwrite(order), &ready.tensors(set)))?)
}

/// Returns dq, dk and dv of the compared rows, one after the other, as the last launch left them.
fn gradients(gpu: &Gpu, cell: &BenchCell, ready: &ReadyBackward) -> Result<Vec<u8>, BenchError> {
    let rows = cell.problem.rows.q;
    let first = |tensor: &DeviceBuffer| {
        let bytes = tensor.area().bytes() / rows * rows.min(COMPARED_ROWS);
        gpu.read(tensor.area().part(0..bytes)?)
    };
    let results = ready.sets[0].results.iter();
    let gradients = results.map(first).collect::<Result<Vec<_>, _>>()?.concat();
    // A bf16 with all bits of its exponent set is NaN or infinite.
    let number = |bits: &[u8]| u16::from_le_bytes([bits[0], bits[1]]) & 0x7f80 != 0x7f80;
    match gradients.chunks_exact(2).all(number) {
        true => Ok(gradients),
        false => Err(BenchError::NotFinite(format!("{} {}", cell.track, cell.column.name))),
    }
}

/// The files that a peer reads.
struct Handed {
    folder: TempDir,
    numbers: PathBuf,
}

impl Handed {
    fn new(gpu: &Gpu, numbers: &NormalNumbers) -> Result<Handed, BenchError> {
        let folder = tempfile::tempdir()?;
        let file = folder.path().join("numbers");
        std::fs::write(&file, numbers.bytes(gpu)?)?;
        Ok(Handed { folder, numbers: file })
    }

    /// Returns the request to a peer whose gradients must be these.
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
