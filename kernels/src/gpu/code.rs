//! Machine code on a GPU, and the functions in it.
//!
//! The machine code of an edit, which plants a fault, is made when one of its kernels is first launched. A file has up
//! to 13 instances, each takes seconds to compile, and a fault shows after few launches of one or two.

use std::sync::{Arc, OnceLock};

use cudarc::driver::{CudaContext, CudaFunction, CudaModule};
use cudarc::nvrtc::Ptx;

use super::failed;
use crate::cache::Cache;
use crate::error::KernelError;
use crate::nvrtc::{self, Compiled};
use crate::source::Source;

/// The machine code of a source, in a context.
#[derive(Debug)]
pub(super) struct Code {
    context: Arc<CudaContext>,
    cache: Cache,
    source: Source,
    /// The code, or why there is none.
    module: OnceLock<Result<Arc<CudaModule>, String>>,
}

impl Code {
    /// Returns the code of a source, which is not loaded yet.
    pub(super) fn of(context: &Arc<CudaContext>, cache: &Cache, source: &Source) -> Code {
        Code {
            context: Arc::clone(context),
            cache: cache.clone(),
            source: source.clone(),
            module: OnceLock::new(),
        }
    }

    /// Loads the code as it was compiled.
    pub(super) fn load(&self, compiled: Compiled) -> Result<(), KernelError> {
        let loaded = self.loaded(compiled)?;
        self.module.get_or_init(|| Ok(loaded));
        Ok(())
    }

    /// Returns the code. The first call compiles and loads it, others wait meanwhile, and a failure stays.
    fn module(&self) -> Result<Arc<CudaModule>, KernelError> {
        let made = || self.cache.get(&self.source).and_then(|(compiled, _)| self.loaded(compiled));
        let module = self.module.get_or_init(|| made().map_err(|error| error.to_string()));
        module.clone().map_err(KernelError::NotBuilt)
    }

    fn loaded(&self, compiled: Compiled) -> Result<Arc<CudaModule>, KernelError> {
        nvrtc::check_registers(&compiled.log)?;
        let loaded = self.context.load_module(Ptx::from_binary(compiled.cubin));
        loaded.map_err(failed(&format!("load {}", self.source.file)))
    }
}

/// A kernel's function, which is loaded once.
#[derive(Debug)]
pub(super) struct Function {
    code: Arc<Code>,
    name: String,
    loaded: OnceLock<CudaFunction>,
}

impl Function {
    /// Returns the function of this name, which is not loaded yet.
    pub(super) fn of(code: &Arc<Code>, name: &str) -> Function {
        Function { code: Arc::clone(code), name: name.to_owned(), loaded: OnceLock::new() }
    }

    /// Returns the function. The first call loads it, and before it its code.
    pub(super) fn get(&self) -> Result<&CudaFunction, KernelError> {
        if let Some(loaded) = self.loaded.get() {
            return Ok(loaded);
        }
        let function = self.code.module()?.load_function(&self.name).map_err(failed(&self.name))?;
        Ok(self.loaded.get_or_init(|| function))
    }
}
