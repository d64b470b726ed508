//! [`CudaQuantiser`]: the quantiser on a GPU, as the judge takes it.

use std::sync::{Mutex, PoisonError};

use seamproof_judge::quantise::Quantiser;
use seamproof_kernels::device::{CodesFrom, Workspace};
use seamproof_kernels::{Gpu, KernelError};
use seamproof_oracle::quantise::Quantisation;
use seamproof_simulator::quantiser::{RankQuantised, RankValues};

/// The kernels that quantise, all ranks on one GPU.
#[derive(Debug)]
pub struct CudaQuantiser {
    workspace: Mutex<Workspace>,
    from: CodesFrom,
}

impl CudaQuantiser {
    /// Returns the quantiser whose codes are read back from this copy.
    pub fn new(gpu: &Gpu, from: CodesFrom) -> Result<CudaQuantiser, KernelError> {
        Ok(CudaQuantiser { workspace: Mutex::new(Workspace::new(gpu.beside()?)), from })
    }
}

impl Quantiser for CudaQuantiser {
    fn name(&self) -> &str {
        match self.from {
            CodesFrom::Rows => "cuda",
            CodesFrom::Turned => "cuda:codes=turned",
            CodesFrom::Beside => "cuda:codes=beside",
        }
    }

    fn run(&self, asked: &Quantisation, ranks: &[RankValues]) -> Result<Vec<RankQuantised>, String> {
        let workspace = self.workspace.lock().unwrap_or_else(PoisonError::into_inner);
        workspace.quantise(asked, ranks, self.from).map_err(|error| error.to_string())
    }
}
