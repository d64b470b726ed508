//! The subjects that this program knows, by name.

mod built;
mod cuda;
mod difference;
mod emulated;
mod miscalled;
mod on_device;
mod planted;

use std::collections::BTreeMap;

pub use cuda::{Cuda, CudaRunner};
pub(crate) use cuda::{is_named as is_on_gpu, open as open_on_gpu};
pub use difference::difference;
pub(crate) use difference::same_bits;
pub use emulated::{Arithmetic, Emulated};
pub use miscalled::{MISCALLS, Miscall, Miscalled, miscall};
pub use planted::Planted;
use seamproof_kernels::faults::SourceFault;
use seamproof_simulator::faults;

use crate::backend::Backend;
use crate::worker::{self, Remote, Served, mock};

/// The backends, as `--backend` takes them, each also as `NAME@worker`: the emulated kernel, the kernels on a GPU, and the
/// emulated kernel with the canary's fault planted in it.
pub const NAMES: [&str; 3] = ["emulated", "cuda", faults::WINDOW_OFF_BY_ONE.id];

/// Why no backend could be made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BackendError {
    /// A name that is not in [`NAMES`].
    #[error("unknown backend '{name}'; known: {known}, and emulated+ID, emulated~ID with a fault that `seamproof faults` lists", known = NAMES.join(", "))]
    Unknown {
        /// The name.
        name: String,
    },
    /// An option that the backend does not have.
    #[error("backend {backend} has no option '{option}'; it has: {known}")]
    UnknownOption {
        /// The backend.
        backend: &'static str,
        /// The option.
        option: String,
        /// Its options.
        known: &'static str,
    },
    /// A list of options that is none.
    #[error("'{text}' is no list of options; write OPTION=VALUE,…")]
    Options {
        /// The list.
        text: String,
    },
    /// An option's value that is not usable.
    #[error("option {option} of backend {backend} is '{value}'; use {expected}")]
    OptionValue {
        /// The backend.
        backend: &'static str,
        /// The option.
        option: String,
        /// Its value.
        value: String,
        /// What it takes.
        expected: &'static str,
    },
}

/// After the name of a subject of this process: the same subject behind worker processes.
pub const AT_WORKER: &str = "@worker";

/// Makes a backend from its name and options: a subject of this process, `NAME@worker` for the same behind the worker
/// processes of [`worker::shared`], or one that runs in workers alone.
pub fn by_name(name: &str, options: &BTreeMap<String, String>) -> Result<Box<dyn Backend>, BackendError> {
    match served(name, options)? {
        Some(served) => Ok(Box::new(Remote::new(name, served, worker::shared()))),
        None => in_process(name, options),
    }
}

/// The kernels on a GPU with a fault in their sources, in workers.
pub fn on_gpu(fault: &SourceFault, subject: Cuda) -> Box<dyn Backend> {
    let name = cuda::name_of(fault);
    let served = Served::new(&name, &subject.options(), Box::new(subject), Box::new(Cuda::default()));
    // Whether the GPU is well, only kernels without the fault can say.
    let served = served.watched_by(cuda::NAME);
    Box::new(Remote::new(&name, served, worker::shared()))
}

/// What a pool needs to serve a subject; none for one that runs in this process. A subject that needs a device of its own
/// is served by its own name; its runner is an arm of [`worker::open`].
fn served(name: &str, options: &BTreeMap<String, String>) -> Result<Option<Served>, BackendError> {
    if name == mock::NAME {
        return mock::served(options).map(Some);
    }
    // A GPU belongs to a process that may die.
    let inner = if cuda::is_named(name) { Some(name) } else { name.strip_suffix(AT_WORKER) };
    let Some(inner) = inner else { return Ok(None) };
    let (declaration, sentinel) = (in_process(inner, options)?, in_process(inner, &BTreeMap::new())?);
    Ok(Some(Served::new(inner, options, declaration, sentinel)))
}

/// Makes a backend that runs in this process.
pub fn in_process(name: &str, options: &BTreeMap<String, String>) -> Result<Box<dyn Backend>, BackendError> {
    match name {
        "emulated" => Ok(Box::new(Emulated::from_options(options)?)),
        // Faults are planted where the kernels are compiled.
        name if cuda::is_named(name) => Ok(Box::new(Cuda::from_options(options)?)),
        // What was found with a planted fault must replay.
        name if name == canary().name() && options.is_empty() => Ok(canary()),
        name => planted_by_name(name, options),
    }
}

/// The emulated kernel with a fault in its schedule (`emulated+ID`) or at its call (`emulated~ID`).
fn planted_by_name(name: &str, options: &BTreeMap<String, String>) -> Result<Box<dyn Backend>, BackendError> {
    if let Some(fault) = name.strip_prefix(planted::PREFIX).and_then(faults::by_id) {
        return Ok(Box::new(Planted::new(Emulated::from_options(options)?, *fault)));
    }
    let at_call = name.strip_prefix("emulated").and_then(|name| name.strip_prefix(miscalled::SEPARATOR));
    match at_call.and_then(miscall) {
        Some(miscall) => Ok(Box::new(Miscalled::new(Emulated::from_options(options)?, miscall))),
        None => Err(BackendError::Unknown { name: name.chars().take(40).collect() }),
    }
}

/// Options for a case of a campaign, from its seed: tile sizes vary, so that every edge is met with few tokens.
pub fn draw_options(name: &str, seed: u64) -> BTreeMap<String, String> {
    match name.strip_suffix(AT_WORKER).unwrap_or(name) {
        "emulated" => emulated::draw_options(seed),
        name if cuda::is_named(name) => cuda::draw_options(seed),
        name if name.starts_with(planted::PREFIX) || name.contains(miscalled::SEPARATOR) => {
            emulated::draw_options(seed)
        }
        _ => BTreeMap::new(),
    }
}

/// A subject with options as the command line names it: `NAME`, or `NAME:OPTION=VALUE,…`.
pub fn parse(text: &str) -> Result<(String, BTreeMap<String, String>), BackendError> {
    let (name, listed) = text.split_once(':').unwrap_or((text, ""));
    let option = |item: &str| item.split_once('=').map(|(name, value)| (name.to_owned(), value.to_owned()));
    let items = listed.split(',').filter(|item| !item.is_empty());
    let options = items.map(option).collect::<Option<_>>();
    let wrong = || BackendError::Options { text: listed.chars().take(40).collect() };
    Ok((name.to_owned(), options.ok_or_else(wrong)?))
}

/// The emulated kernel with the campaign's canary planted in it.
pub fn canary() -> Box<dyn Backend> {
    Box::new(Planted::canary(Emulated::default(), faults::WINDOW_OFF_BY_ONE.entry()))
}
