//! The subjects that this program knows, by name.

mod called;
mod cuda;
mod cuda_fp8;
mod identity;
mod outside;
mod quantisers;

pub use called::{Called, WronglyCalled};
pub use cuda::{Cuda, CudaRunner};
pub use cuda_fp8::CudaFp8;
pub use identity::{Changes, Identity, IdentityError};
pub use outside::{Outside, OutsideError, PYTHON_VARIABLE};
pub(crate) use outside::{python_by_name, python_module, python_named};
pub(crate) use quantisers::EMULATED_QUANTISER;
pub use quantisers::{QuantiserError, quantiser};
use std::path::PathBuf;
use std::sync::Arc;

use seamproof_judge::subjects::{
    self, Beside, Emulated, Fp8, Fp8Sequence, Miscall, Miscalled, OptionError, Options, Planted, SubjectName,
    Unfused, fp8_fault, miscall,
};
use seamproof_lab::faults::SourceFault;
use seamproof_simulator::faults;

use crate::faults::Suspect;
use crate::nearest::did_you_mean;
use crate::worker::{self, OpenError, Opened, Pool, Questions, Remote, Served, mock};
use seamproof_judge::subject::Backend;

/// Name of the emulated kernel.
pub(crate) const EMULATED: &str = "emulated";

/// Names of the backends, as `--backend` takes them, each also as `NAME@worker`: the emulated kernel, the kernels on
/// a GPU, the emulated kernel with the canary's fault planted in it, the emulated kernel behind a loop over sequences,
/// and in FP8 the emulated kernel and the one on a GPU.
pub const NAMES: [&str; 6] =
    [EMULATED, "cuda", faults::WINDOW_OFF_BY_ONE.id, Unfused::NAME, Fp8::NAME, CudaFp8::NAME];

/// Reason why no backend could be made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BackendError {
    /// A name that is not in [`NAMES`].
    #[error("unknown backend '{name}'{like}; known: {known}, each also as NAME@worker; python:FILE, python:FILE:NAME and exec:COMMAND; with a fault that `seamproof faults` lists: emulated+ID in its schedule or kernel, and for every backend BACKEND~ID at its call", known = NAMES.join(", "))]
    Unknown {
        /// Name that was given.
        name: String,
        /// The name that may have been meant, in words; empty where none is like it.
        like: String,
    },
    /// A fault without the subject that it is planted in, or behind the wrong sign.
    #[error("'{name}' names a fault {place}; write {write}")]
    Fault {
        /// Name that was given.
        name: String,
        /// Place of the fault.
        place: &'static str,
        /// Right way to name the fault.
        write: String,
    },
    /// An option that the subject does not take.
    #[error(transparent)]
    Option(#[from] OptionError),
    /// A subject outside of this program that cannot be used.
    #[error(transparent)]
    Outside(#[from] OutsideError),
}

/// Makes a backend from its name and options. The name is that of a subject of this process, or of one behind the
/// worker processes of [`worker::shared`], with or without faults at its call.
pub fn by_name(name: &str, options: &Options) -> Result<Box<dyn Backend>, BackendError> {
    in_pool(name, options, worker::shared())
}

/// Makes a backend from its name and options, which runs in the workers of a pool, if it runs in any.
pub fn in_pool(name: &str, options: &Options, pool: Arc<Pool>) -> Result<Box<dyn Backend>, BackendError> {
    let mut options = options.clone();
    let named = |(option, bits)| Some((options.remove(option)?, bits));
    let Some((other, bits)) = [(BESIDE, false), (BITS_OF, true)].into_iter().find_map(named) else {
        return alone(name, options, pool);
    };
    let other: SubjectName = other.parse()?;
    let other = alone(&other.name(), other.options, Arc::clone(&pool))?;
    Ok(Box::new(Beside::new(alone(name, options, pool)?, other, bits)))
}

/// Option of any subject: the subject beside it, whose results are to agree within the bounds of both.
pub const BESIDE: &str = "beside";
/// Option of any subject: the subject beside it, whose results are to have the same bits.
pub const BITS_OF: &str = "bits_of";

/// Makes a backend with no other one beside it.
fn alone(name: &str, options: Options, pool: Arc<Pool>) -> Result<Box<dyn Backend>, BackendError> {
    let name = SubjectName::new(name, options);
    let called = name.called();
    let called: Box<dyn Backend> = if called.is_outside() {
        Box::new(outside::subject(&called, pool)?)
    } else if let Some(served) = served(&called)? {
        Box::new(Remote::new(&called.name(), served, pool))
    } else {
        in_process(&called)?
    };
    let wrongly = |called, miscall: &&'static Miscall| -> Box<dyn Backend> {
        Box::new(Miscalled::new(called, miscall))
    };
    Ok(name.miscalls.iter().fold(called, wrongly))
}

/// Returns a worker that answers questions about large runs of a subject.
pub fn questions(name: &SubjectName) -> Result<Questions, OutsideError> {
    outside::questions(name, &worker::shared())
}

/// Returns the kernels on a GPU with a fault in their sources, in workers.
pub fn on_gpu(fault: &SourceFault, subject: Cuda) -> Box<dyn Backend> {
    let options = subject.options();
    planted_on_gpu(cuda::NAME, fault, &options, [Box::new(subject), Box::new(Cuda::default())])
}

/// Returns the forward in FP8 on a GPU with a fault in its sources, in workers.
pub fn fp8_on_gpu(fault: &SourceFault, subject: CudaFp8) -> Box<dyn Backend> {
    let options = subject.options();
    planted_on_gpu(CudaFp8::NAME, fault, &options, [Box::new(subject), Box::new(CudaFp8::default())])
}

fn planted_on_gpu(
    base: &str,
    fault: &SourceFault,
    options: &Options,
    [declaration, sentinel]: [Box<dyn Backend>; 2],
) -> Box<dyn Backend> {
    let name = SubjectName::planted(base, fault.id).name();
    // Only kernels without the fault can say whether the GPU works.
    let served = Served::new(&name, options, declaration, sentinel).watched_by(base);
    Box::new(Remote::new(&name, served, worker::shared()))
}

/// Returns what a pool needs to serve a subject; `None` for one that runs in this process. A subject that needs a
/// device of its own is served by its own name, and its runner is an arm of [`open`].
fn served(name: &SubjectName) -> Result<Option<Served>, BackendError> {
    if name.name() == mock::NAME {
        return Ok(Some(mock::served(&name.options)?));
    }
    // A GPU belongs to a process that may die, so its subject runs in a worker.
    if !name.at_worker && !is_on_gpu(name) {
        return Ok(None);
    }
    let inner = SubjectName { at_worker: false, ..name.clone() };
    let by_default = SubjectName { options: Options::new(), ..inner.clone() };
    let (declaration, sentinel) = (in_process(&inner)?, in_process(&by_default)?);
    Ok(Some(Served::new(&inner.name(), &inner.options, declaration, sentinel)))
}

/// Opens the runner of a subject inside a worker: on a GPU, or in the worker's own process.
pub fn open(name: &str, options: &Options, device: usize) -> Result<Opened, OpenError> {
    let name = SubjectName::new(name, options.clone());
    if cuda::is_named(&name) {
        return cuda::open(&name, device);
    }
    if cuda_fp8::is_named(&name) {
        return cuda_fp8::open(&name, device);
    }
    in_process(&name).map(Opened::on_core).map_err(|error| OpenError(error.to_string()))
}

/// Makes a backend that runs in this process.
fn in_process(name: &SubjectName) -> Result<Box<dyn Backend>, BackendError> {
    let SubjectName { base, planted, at_worker, miscalls, options } = name;
    if *at_worker || !miscalls.is_empty() {
        return Err(unknown(name));
    }
    match (base.as_str(), planted.as_deref().map(faults::by_id)) {
        // The faults are planted where the kernels are compiled, not here.
        _ if cuda::is_named(name) => Ok(Box::new(Cuda::from_options(options)?)),
        _ if cuda_fp8::is_named(name) => Ok(Box::new(CudaFp8::from_options(options)?)),
        (EMULATED, None) => Ok(Box::new(Emulated::from_options(options)?)),
        (Unfused::NAME, None) => Ok(Box::new(Unfused::over(Emulated::from_options(options)?))),
        (Unfused::NAME, Some(None)) if planted.as_deref() == Some(Unfused::FULL_MASK) => {
            Ok(Box::new(Unfused::with_full_mask(Emulated::from_options(options)?)))
        }
        (Unfused::NAME, Some(Some(fault))) => {
            Ok(Box::new(Unfused::over(Planted::new(Emulated::from_options(options)?, *fault))))
        }
        (Fp8::NAME, None) => Ok(Box::new(Fp8::from_options(options)?)),
        (Fp8::NAME, Some(None)) => {
            let fault = planted.as_deref().and_then(fp8_fault).ok_or_else(|| unknown(name))?;
            Ok(Box::new(Fp8::from_options(options)?.planted(fault)))
        }
        (EMULATED, Some(Some(fault))) => Ok(Box::new(Planted::new(Emulated::from_options(options)?, *fault))),
        // A finding with the planted canary must replay.
        (id, None) if id == faults::WINDOW_OFF_BY_ONE.id && options.is_empty() => Ok(canary()),
        _ => Err(unknown(name)),
    }
}

/// Returns why a name is no subject's. Where a fault's id ends the name, the error says how that fault is named.
fn unknown(name: &SubjectName) -> BackendError {
    let shown = || name.name().chars().take(NAME_SHOWN).collect::<String>();
    let (subject, id) = name.last_id();
    match (miscall(&id), faults::by_id(&id)) {
        (Some(fault), _) => {
            let subject = if NAMES.contains(&subject.as_str()) { &subject } else { EMULATED };
            let write = format!("{subject}~{}, or any other BACKEND~{}", fault.id, fault.id);
            BackendError::Fault { name: shown(), place: "at the call", write }
        }
        (None, Some(fault)) => {
            let write = SubjectName::planted(EMULATED, fault.id).name();
            BackendError::Fault { name: shown(), place: "of the emulated kernel or its schedule", write }
        }
        _ if subject.is_empty() => BackendError::Unknown { name: shown(), like: did_you_mean(&id, NAMES) },
        _ => {
            let like = did_you_mean(&id, Suspect::all().map(|suspect| suspect.id()));
            BackendError::Unknown { name: shown(), like }
        }
    }
}

/// Largest number of characters of a name that an error repeats.
const NAME_SHOWN: usize = 40;

/// Returns in words what is wrong with the subject of this name although none of its schedules shows it: faults in
/// its kernels and at its call.
pub fn unscheduled(name: &str) -> Vec<String> {
    let name = SubjectName::from(name);
    let in_kernel = |fault: &&faults::Fault| matches!(fault.edit, faults::Plant::Kernel(_));
    let emulated = name.planted.as_deref().filter(|_| name.base == EMULATED).and_then(faults::by_id);
    let imitates = emulated.filter(in_kernel).map(|fault| fault.imitates).or_else(|| cuda::imitated(&name));
    let in_kernel = imitates.map(|imitates| format!("the fault in its kernels: {imitates}"));
    let at_call = name.miscalls.iter().map(|fault| format!("the fault at the call: {}", fault.imitates));
    in_kernel.into_iter().chain(at_call).collect()
}

/// Returns the place of the lock file of a subject outside of this program, where it has an adapter.
pub fn lock_file(name: &str) -> Option<PathBuf> {
    outside::lock_file(name)
}

/// Whether a subject runs on the emulated kernel, in this process or in workers, right or with a fault.
pub(crate) fn is_emulated(name: &str) -> bool {
    let base = SubjectName::from(name).base;
    base == EMULATED || base == mock::NAME || base == faults::WINDOW_OFF_BY_ONE.id
}

/// Whether a subject's kernels run on a GPU.
fn is_on_gpu(name: &SubjectName) -> bool {
    cuda::is_named(name) || cuda_fp8::is_named(name)
}

/// Whether a subject runs in this process, on its CPU.
pub(crate) fn is_in_process(name: &SubjectName) -> bool {
    let needs_another = name.at_worker || name.is_outside() || is_on_gpu(name);
    !needs_another && name.base != mock::NAME
}

/// Returns options for a case of a campaign, from its seed. Tile sizes vary, so that every edge is met with few
/// tokens.
pub fn draw_options(name: &str, seed: u64) -> Options {
    let name = SubjectName::from(name);
    match (name.base.as_str(), cuda::is_named(&name)) {
        (EMULATED, _) => subjects::draw_options(seed),
        (Fp8::NAME, _) => Fp8::draw_options(seed),
        (CudaFp8::NAME, _) => CudaFp8::draw_options(seed),
        (_, true) => cuda::draw_options(seed),
        _ => Options::new(),
    }
}

/// Option of which each value has a numeric profile of its own.
const PROFILED: &str = "sequence";

/// Returns the name of the numeric profile of a subject with these fixed options; `None` where a profile holds for others
/// too.
pub fn profile_name(name: &str, fixed: &Options) -> Option<String> {
    let SubjectName { base, planted, .. } = SubjectName::from(name);
    match (base == Fp8::NAME && planted.is_none(), fixed.get(PROFILED)) {
        (true, Some(_)) if fixed.len() == 1 => {
            Some(Fp8::from_options(fixed).ok()?.sequence.profile().to_owned())
        }
        _ => fixed.is_empty().then(|| name.to_owned()),
    }
}

/// Returns a case's options, of instances that have one profile: what is not fixed of the option that names a profile is
/// that of the subject's name alone.
pub fn with_one_profile(name: &str, fixed: &Options, mut options: Options) -> Options {
    let base = SubjectName::from(name).base;
    if base == Fp8::NAME && !fixed.contains_key(PROFILED) {
        options.insert(PROFILED.to_owned(), Fp8Sequence::default().name().to_owned());
    }
    options
}

/// Returns the emulated kernel with the campaign's canary planted in it.
pub fn canary() -> Box<dyn Backend> {
    Box::new(Planted::canary(Emulated::default(), faults::WINDOW_OFF_BY_ONE.entry()))
}
