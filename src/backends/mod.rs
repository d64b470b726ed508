//! The subjects that this program knows, by name.

mod cuda;

use std::collections::BTreeMap;

pub use cuda::{Cuda, CudaRunner};
use seamproof_judge::subjects::{
    self, Emulated, Miscalled, OptionError, PLANTED_PREFIX, Planted, at_call, called, miscall,
};
use seamproof_lab::faults::SourceFault;
use seamproof_simulator::faults;

use crate::worker::{self, OpenError, Opened, Remote, Served, mock};
use seamproof_judge::subject::Backend;

/// Names of the backends, as `--backend` takes them, each also as `NAME@worker`: the emulated kernel, the kernels on
/// a GPU, and the emulated kernel with the canary's fault planted in it.
pub const NAMES: [&str; 3] = ["emulated", "cuda", faults::WINDOW_OFF_BY_ONE.id];

/// Reason why no backend could be made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BackendError {
    /// A name that is not in [`NAMES`].
    #[error("unknown backend '{name}'; known: {known}, each also as NAME@worker; with a fault that `seamproof faults` lists: emulated+ID in its schedule or kernel, and for every backend BACKEND~ID at its call", known = NAMES.join(", "))]
    Unknown {
        /// Name that was given.
        name: String,
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
    /// A text that is not a list of options.
    #[error("'{text}' is no list of options; write BACKEND:OPTION=VALUE,… or BACKEND alone")]
    Options {
        /// Text that was given.
        text: String,
    },
}

/// Ending of a subject's name that puts the subject of this process behind worker processes.
pub const AT_WORKER: &str = "@worker";

/// Makes a backend from its name and options. The name is that of a subject of this process, of one that runs in
/// workers alone, `NAME@worker` for a subject of this process behind the worker processes of [`worker::shared`], or
/// `BACKEND~ID` for any of these with a fault at its call.
pub fn by_name(name: &str, options: &BTreeMap<String, String>) -> Result<Box<dyn Backend>, BackendError> {
    if let Some((subject, miscall)) = at_call(name) {
        return Ok(Box::new(Miscalled::new(by_name(subject, options)?, miscall)));
    }
    match served(name, options)? {
        Some(served) => Ok(Box::new(Remote::new(name, served, worker::shared()))),
        None => in_process(name, options),
    }
}

/// Returns the kernels on a GPU with a fault in their sources, in workers.
pub fn on_gpu(fault: &SourceFault, subject: Cuda) -> Box<dyn Backend> {
    let name = cuda::name_of(fault);
    let served = Served::new(&name, &subject.options(), Box::new(subject), Box::new(Cuda::default()));
    // Only kernels without the fault can say whether the GPU works.
    let served = served.watched_by(cuda::NAME);
    Box::new(Remote::new(&name, served, worker::shared()))
}

/// Returns what a pool needs to serve a subject; `None` for one that runs in this process. A subject that needs a
/// device of its own is served by its own name, and its runner is an arm of [`open`].
fn served(name: &str, options: &BTreeMap<String, String>) -> Result<Option<Served>, BackendError> {
    if name == mock::NAME {
        return Ok(Some(mock::served(options)?));
    }
    // A GPU belongs to a process that may die, so its subject runs in a worker.
    let inner = if cuda::is_named(name) { Some(name) } else { name.strip_suffix(AT_WORKER) };
    let Some(inner) = inner else { return Ok(None) };
    let (declaration, sentinel) = (in_process(inner, options)?, in_process(inner, &BTreeMap::new())?);
    Ok(Some(Served::new(inner, options, declaration, sentinel)))
}

/// Opens the runner of a subject inside a worker: on a GPU, or in the worker's own process.
pub fn open(name: &str, options: &BTreeMap<String, String>, device: usize) -> Result<Opened, OpenError> {
    if cuda::is_named(name) {
        return cuda::open(name, options, device);
    }
    in_process(name, options).map(Opened::on_core).map_err(|error| OpenError(error.to_string()))
}

/// Makes a backend that runs in this process.
pub fn in_process(name: &str, options: &BTreeMap<String, String>) -> Result<Box<dyn Backend>, BackendError> {
    match name {
        "emulated" => Ok(Box::new(Emulated::from_options(options)?)),
        // The faults are planted where the kernels are compiled, not here.
        name if cuda::is_named(name) => Ok(Box::new(Cuda::from_options(options)?)),
        // A finding with the planted canary must replay.
        name if name == canary().name() && options.is_empty() => Ok(canary()),
        name => planted_by_name(name, options),
    }
}

/// Returns the emulated kernel with a fault in its schedule or its stages (`emulated+ID`).
fn planted_by_name(name: &str, options: &BTreeMap<String, String>) -> Result<Box<dyn Backend>, BackendError> {
    match name.strip_prefix(PLANTED_PREFIX).and_then(faults::by_id) {
        Some(fault) => Ok(Box::new(Planted::new(Emulated::from_options(options)?, *fault))),
        None => Err(unknown(name)),
    }
}

/// Returns why a name is no subject's. Where a fault's id ends the name, the error says how that fault is named.
fn unknown(name: &str) -> BackendError {
    let shown = || name.chars().take(NAME_SHOWN).collect::<String>();
    let id = name.rsplit(['+', '~']).next().unwrap_or(name);
    match (miscall(id), faults::by_id(id)) {
        (Some(fault), _) => {
            let subject =
                name.strip_suffix(id).map(|rest| rest.trim_end_matches(['+', '~'])).unwrap_or_default();
            let subject = if NAMES.contains(&subject) { subject } else { "emulated" };
            let write = format!("{subject}~{}, or any other BACKEND~{}", fault.id, fault.id);
            BackendError::Fault { name: shown(), place: "at the call", write }
        }
        (None, Some(fault)) => {
            let write = format!("{}{}", PLANTED_PREFIX, fault.id);
            BackendError::Fault { name: shown(), place: "of the emulated kernel or its schedule", write }
        }
        _ => BackendError::Unknown { name: shown() },
    }
}

/// Largest number of characters of a name that an error repeats.
const NAME_SHOWN: usize = 40;

/// Returns in words what is wrong with the subject of this name although none of its schedules shows it: faults in
/// its kernels and at its call.
pub fn unscheduled(name: &str) -> Vec<String> {
    if let Some((subject, fault)) = at_call(name) {
        let mut all = unscheduled(subject);
        all.push(format!("the fault at the call: {}", fault.imitates));
        return all;
    }
    let name = name.strip_suffix(AT_WORKER).unwrap_or(name);
    let in_kernel = |fault: &&faults::Fault| matches!(fault.edit, faults::Plant::Kernel(_));
    let emulated = name.strip_prefix(PLANTED_PREFIX).and_then(faults::by_id).filter(in_kernel);
    let imitates = emulated.map(|fault| fault.imitates).or_else(|| cuda::imitated(name));
    imitates.map(|imitates| format!("the fault in its kernels: {imitates}")).into_iter().collect()
}

/// Returns options for a case of a campaign, from its seed. Tile sizes vary, so that every edge is met with few
/// tokens.
pub fn draw_options(name: &str, seed: u64) -> BTreeMap<String, String> {
    let name = called(name);
    match name.strip_suffix(AT_WORKER).unwrap_or(name) {
        "emulated" => subjects::draw_options(seed),
        name if cuda::is_named(name) => cuda::draw_options(seed),
        name if name.starts_with(PLANTED_PREFIX) => subjects::draw_options(seed),
        _ => BTreeMap::new(),
    }
}

/// Reads a subject with options as the command line names it: `NAME`, or `NAME:OPTION=VALUE,…`. A fault at its call
/// stands behind the name or behind the options.
pub fn parse(text: &str) -> Result<(String, BTreeMap<String, String>), BackendError> {
    let Some((name, listed)) = text.split_once(':') else { return Ok((text.to_owned(), BTreeMap::new())) };
    let options = called(listed);
    let fault = &listed[options.len()..];
    let option = |item: &str| item.split_once('=').map(|(name, value)| (name.to_owned(), value.to_owned()));
    let wrong = || BackendError::Options { text: options.chars().take(40).collect() };
    let options = options.split(',').map(option).collect::<Option<_>>().ok_or_else(wrong)?;
    Ok((format!("{name}{fault}"), options))
}

/// Returns the emulated kernel with the campaign's canary planted in it.
pub fn canary() -> Box<dyn Backend> {
    Box::new(Planted::canary(Emulated::default(), faults::WINDOW_OFF_BY_ONE.entry()))
}
