//! The quantisers that this program knows, by name.

use seamproof_judge::quantise::Quantiser;
use seamproof_judge::subjects::{Options, SubjectName};
use seamproof_kernels::cache::Cache;
use seamproof_kernels::device::CodesFrom;
use seamproof_kernels::{Gpu, KernelError};
use seamproof_lab::{CudaQuantiser, faults};
use seamproof_simulator::faults::{QUANTISER_FAULTS, find};
use seamproof_simulator::quantiser::{EmulatedQuantiser, Stages};

/// Name of the emulated quantiser.
pub(crate) const EMULATED_QUANTISER: &str = "emulated";
/// Name of the kernels on a GPU.
const CUDA: &str = "cuda";
/// Option of the kernels on a GPU: the copy that codes are read back from.
const CODES: &str = "codes";

/// Reason why no quantiser could be made.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum QuantiserError {
    #[error(
        "unknown quantiser '{0}'; known: emulated, cuda, cuda:codes=turned and cuda:codes=beside, and emulated+ID and \
         cuda+ID with a planted fault"
    )]
    Unknown(String),
    #[error("there is no fault '{id}' of a quantiser; known of {of}: {known}")]
    Fault { of: &'static str, id: String, known: String },
    #[error(transparent)]
    Kernel(#[from] KernelError),
}

/// Makes a quantiser from its name.
pub fn quantiser(text: &str) -> Result<Box<dyn Quantiser>, QuantiserError> {
    let unknown = || QuantiserError::Unknown(text.to_owned());
    let name: SubjectName = text.parse().map_err(|_| unknown())?;
    let planted = name.planted.as_deref();
    match (name.base.as_str(), name.at_worker || !name.miscalls.is_empty()) {
        (EMULATED_QUANTISER, false) if name.options.is_empty() => Ok(Box::new(emulated(planted)?)),
        (CUDA, false) => {
            let from = codes_from(&name.options).ok_or_else(unknown)?;
            Ok(Box::new(on_gpu(planted, from)?))
        }
        _ => Err(unknown()),
    }
}

fn emulated(planted: Option<&str>) -> Result<EmulatedQuantiser, QuantiserError> {
    let mut stages = Stages::RIGHT;
    if let Some(id) = planted {
        let known = || QUANTISER_FAULTS.iter().map(|fault| fault.id).collect::<Vec<_>>().join(", ");
        let fault = find(QUANTISER_FAULTS, id).ok_or_else(|| no_fault(EMULATED_QUANTISER, id, known()))?;
        (fault.edit)(&mut stages);
    }
    Ok(EmulatedQuantiser { stages })
}

fn no_fault(of: &'static str, id: &str, known: String) -> QuantiserError {
    QuantiserError::Fault { of, id: id.to_owned(), known }
}

fn codes_from(options: &Options) -> Option<CodesFrom> {
    match options.iter().map(|(option, value)| (option.as_str(), value.as_str())).collect::<Vec<_>>()[..] {
        [] | [(CODES, "rows")] => Some(CodesFrom::Rows),
        [(CODES, "turned")] => Some(CodesFrom::Turned),
        [(CODES, "beside")] => Some(CodesFrom::Beside),
        _ => None,
    }
}

fn on_gpu(planted: Option<&str>, from: CodesFrom) -> Result<CudaQuantiser, QuantiserError> {
    let cache = Cache::of_user();
    let gpu = match planted {
        None => Gpu::open(0, &cache)?,
        Some(id) => {
            let of_codes = |fault: &&faults::SourceFault| fault.edit.seen == faults::Detector::Codes;
            let known = || faults::source_faults().filter(of_codes).map(|fault| fault.id).collect::<Vec<_>>();
            let fault = faults::by_id(id).filter(of_codes);
            let fault = fault.ok_or_else(|| no_fault(CUDA, id, known().join(", ")))?;
            let sources = fault.edit.sources().ok_or_else(|| no_fault(CUDA, id, known().join(", ")))?;
            Gpu::with_sources(0, &cache, &sources)?
        }
    };
    Ok(CudaQuantiser::new(&gpu, from)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_says_which_quantiser_and_which_fault() {
        assert!(quantiser("emulated").is_ok() && quantiser("emulated+amax-over-padding").is_ok());
        for wrong in
            ["", "emulate", "emulated:codes=rows", "emulated@worker", "cuda:codes=columns", "python:x.py"]
        {
            let said = quantiser(wrong).err().map(|error| error.to_string()).unwrap_or_default();
            assert!(said.starts_with("unknown quantiser"), "{wrong}: {said}");
        }
        for wrong in ["emulated+nothing", "cuda+window-off-by-one"] {
            let said = quantiser(wrong).err().map(|error| error.to_string()).unwrap_or_default();
            assert!(said.starts_with("there is no fault"), "{wrong}: {said}");
        }
    }

    #[test]
    fn codes_are_read_back_from_one_of_three_copies() {
        let of = |text: &str| codes_from(&text.parse::<SubjectName>().expect("a name").options);
        assert_eq!(of("cuda"), Some(CodesFrom::Rows));
        assert_eq!(of("cuda:codes=rows"), Some(CodesFrom::Rows));
        assert_eq!(of("cuda:codes=turned"), Some(CodesFrom::Turned));
        assert_eq!(of("cuda:codes=beside"), Some(CodesFrom::Beside));
        assert_eq!(of("cuda:rows=codes"), None);
    }
}
