//! Machine code on a GPU, and the functions in it.
//!
//! The machine code of an edit, which plants a fault, is made when one of its kernels is first launched. A file has up
//! to 13 instances, each takes seconds to compile, and a fault shows after few launches of one or two.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

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
    module: Mutex<Option<Arc<CudaModule>>>,
}

impl Code {
    /// Returns the code of a source, which is not loaded yet.
    pub(super) fn of(context: &Arc<CudaContext>, cache: &Cache, source: &Source) -> Code {
        Code {
            context: Arc::clone(context),
            cache: cache.clone(),
            source: source.clone(),
            module: Mutex::default(),
        }
    }

    /// Returns the code as it was compiled, or as it is compiled now. It is loaded once: who asks meanwhile waits.
    pub(super) fn module(&self, compiled: Option<Compiled>) -> Result<Arc<CudaModule>, KernelError> {
        let mut module = self.module.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(loaded) = &*module {
            return Ok(Arc::clone(loaded));
        }
        let compiled = compiled.map_or_else(|| Ok(self.cache.get(&self.source)?.0), Ok)?;
        nvrtc::check_registers(&compiled.log)?;
        let loaded = self.context.load_module(Ptx::from_binary(compiled.cubin));
        let loaded = loaded.map_err(failed(&format!("load {}", self.source.file)))?;
        Ok(Arc::clone(module.insert(loaded)))
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
        let function = self.code.module(None)?.load_function(&self.name).map_err(failed(&self.name))?;
        Ok(self.loaded.get_or_init(|| function))
    }
}
