//! The subjects that this program knows, by name.

mod cuda;

pub use cuda::{Cuda, CudaRunner};
pub(crate) use cuda::{is_named as is_on_gpu, open as open_on_gpu};
use seamproof_judge::subjects::{
    self, Emulated, Miscalled, OptionError, Options, Planted, SubjectName, miscall,
};
use seamproof_kernels::faults::SourceFault;
use seamproof_simulator::faults;

use crate::worker::{self, Remote, Served, mock};
use seamproof_judge::subject::Backend;

/// The backends, as `--backend` takes them, each also as `NAME@worker`: the emulated kernel, the kernels on a GPU, and the
/// emulated kernel with the canary's fault planted in it.
pub const NAMES: [&str; 3] = ["emulated", "cuda", faults::WINDOW_OFF_BY_ONE.id];

/// Why no backend could be made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BackendError {
    /// A name that is not in [`NAMES`].
    #[error("unknown backend '{name}'; known: {known}, each also as NAME@worker; with a fault that `seamproof faults` lists: emulated+ID in its schedule or kernel, and for every backend BACKEND~ID at its call", known = NAMES.join(", "))]
    Unknown {
        /// The name.
        name: String,
    },
    /// A fault without the subject that it is planted in, or behind the wrong sign.
    #[error("'{name}' names a fault {place}; write {write}")]
    Fault {
        /// The name.
        name: String,
        /// Where the fault is.
        place: &'static str,
        /// How it is named.
        write: String,
    },
    /// An option that the subject does not take.
    #[error(transparent)]
    Option(#[from] OptionError),
}

/// Makes a backend from its name and options: a subject of this process, or one behind the worker processes of
/// [`worker::shared`], called rightly or wrongly.
pub fn by_name(name: &str, options: &Options) -> Result<Box<dyn Backend>, BackendError> {
    let name = SubjectName::new(name, options.clone());
    let called = name.called();
    let called: Box<dyn Backend> = match served(&called)? {
        Some(served) => Box::new(Remote::new(&called.name(), served, worker::shared())),
        None => in_process(&called)?,
    };
    let wrongly = |called, &miscall| -> Box<dyn Backend> { Box::new(Miscalled::new(called, miscall)) };
    Ok(name.miscalls.iter().fold(called, wrongly))
}

/// The kernels on a GPU with a fault in their sources, in workers.
pub fn on_gpu(fault: &SourceFault, subject: Cuda) -> Box<dyn Backend> {
    let name = SubjectName::planted(cuda::NAME, fault.id).name();
    let served = Served::new(&name, &subject.options(), Box::new(subject), Box::new(Cuda::default()));
    // Whether the GPU is well, only kernels without the fault can say.
    let served = served.watched_by(cuda::NAME);
    Box::new(Remote::new(&name, served, worker::shared()))
}

/// What a pool needs to serve a subject; none for one that runs in this process. A subject that needs a device of its own
/// is served by its own name; its runner is an arm of [`worker::open`].
fn served(name: &SubjectName) -> Result<Option<Served>, BackendError> {
    if name.name() == mock::NAME {
        return Ok(Some(mock::served(&name.options)?));
    }
    // A GPU belongs to a process that may die.
    if !name.at_worker && !cuda::is_named(name) {
        return Ok(None);
    }
    let inner = SubjectName { at_worker: false, ..name.clone() };
    let by_default = SubjectName { options: Options::new(), ..inner.clone() };
    let (declaration, sentinel) = (in_process(&inner)?, in_process(&by_default)?);
    Ok(Some(Served::new(&inner.name(), &inner.options, declaration, sentinel)))
}

/// Makes a backend that runs in this process.
pub(crate) fn in_process(name: &SubjectName) -> Result<Box<dyn Backend>, BackendError> {
    let SubjectName { base, planted, at_worker, miscalls, options } = name;
    if *at_worker || !miscalls.is_empty() {
        return Err(unknown(name));
    }
    match (base.as_str(), planted.as_deref().map(faults::by_id)) {
        // Faults are planted where the kernels are compiled.
        _ if cuda::is_named(name) => Ok(Box::new(Cuda::from_options(options)?)),
        ("emulated", None) => Ok(Box::new(Emulated::from_options(options)?)),
        ("emulated", Some(Some(fault))) => {
            Ok(Box::new(Planted::new(Emulated::from_options(options)?, *fault)))
        }
        // What was found with a planted fault must replay.
        (id, None) if id == faults::WINDOW_OFF_BY_ONE.id && options.is_empty() => Ok(canary()),
        _ => Err(unknown(name)),
    }
}

/// Why a name is no subject's; how a fault is named, where its id ends the name.
fn unknown(name: &SubjectName) -> BackendError {
    let shown = || name.name().chars().take(NAME_SHOWN).collect::<String>();
    let (subject, id) = name.last_id();
    match (miscall(&id), faults::by_id(&id)) {
        (Some(fault), _) => {
            let subject = if NAMES.contains(&subject.as_str()) { &subject } else { "emulated" };
            let write = format!("{subject}~{}, or any other BACKEND~{}", fault.id, fault.id);
            BackendError::Fault { name: shown(), place: "at the call", write }
        }
        (None, Some(fault)) => {
            let write = SubjectName::planted("emulated", fault.id).name();
            BackendError::Fault { name: shown(), place: "of the emulated kernel or its schedule", write }
        }
        _ => BackendError::Unknown { name: shown() },
    }
}

/// Letters of a name that an error repeats.
const NAME_SHOWN: usize = 40;

/// What is wrong in the subject of this name although none of its schedules shows it, in words: faults in its kernels and
/// at its call.
pub fn unscheduled(name: &str) -> Vec<String> {
    let name = SubjectName::from(name);
    let in_kernel = |fault: &&faults::Fault| matches!(fault.edit, faults::Plant::Kernel(_));
    let emulated = name.planted.as_deref().filter(|_| name.base == "emulated").and_then(faults::by_id);
    let imitates = emulated.filter(in_kernel).map(|fault| fault.imitates).or_else(|| cuda::imitated(&name));
    let in_kernel = imitates.map(|imitates| format!("the fault in its kernels: {imitates}"));
    let at_call = name.miscalls.iter().map(|fault| format!("the fault at the call: {}", fault.imitates));
    in_kernel.into_iter().chain(at_call).collect()
}

/// Options for a case of a campaign, from its seed: tile sizes vary, so that every edge is met with few tokens.
pub fn draw_options(name: &str, seed: u64) -> Options {
    let name = SubjectName::from(name);
    match (name.base.as_str(), cuda::is_named(&name)) {
        ("emulated", _) => subjects::draw_options(seed),
        (_, true) => cuda::draw_options(seed),
        _ => Options::new(),
    }
}

/// The emulated kernel with the campaign's canary planted in it.
pub fn canary() -> Box<dyn Backend> {
    Box::new(Planted::canary(Emulated::default(), faults::WINDOW_OFF_BY_ONE.entry()))
}
