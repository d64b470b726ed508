//! Subjects outside of this program, which a worker in any language runs: `python:FILE[:NAME]`, a subject in a Python
//! file, and `exec:COMMAND`, a program that speaks the worker protocol (`docs/protocol.md`).
//!
//! Such a subject declares itself. The first worker that opens it says what it takes and promises; from then on this
//! process holds the declaration, and the judge asks nothing outside of it. A subject that says that it refuses what
//! its table does not take is asked for that, too.

use std::collections::{BTreeMap, HashMap};
use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, LazyLock, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use seamproof_judge::case::Subject;
use seamproof_judge::profile::{self, Lock};
use seamproof_judge::subject::{Backend, Declaration, Outputs, RunError};
use seamproof_judge::subjects::{SubjectName, in_steps};
use seamproof_oracle::{Inputs, Problem};

use crate::worker::{Pool, Questions, Ready, Remote, Served, WorkerCommand};

/// Variable that names the Python interpreter of the workers.
pub const PYTHON_VARIABLE: &str = "SEAMPROOF_PYTHON";
/// Interpreters that are looked for on the search path.
const PYTHONS: [&str; 2] = ["python3", "python"];
/// Name of the Python package.
const PACKAGE: &str = "seamproof";
/// Module of the package that serves a subject.
const WORKER_MODULE: &str = "seamproof.worker";
/// Module of the package that answers questions about large runs.
const LARGE_MODULE: &str = "seamproof.large";
/// Program that looks for the package without importing it. A folder that happens to have its name is none.
const FIND_PACKAGE: &str = "import importlib.util as u; s = u.find_spec('seamproof'); \
    raise SystemExit(0 if s and s.origin else 9)";
/// Exit code by which that program says that there is none.
const NO_PACKAGE: i32 = 9;

/// Reason why a subject outside of this program cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{name}: {what}")]
pub struct OutsideError {
    /// Name of the subject.
    pub name: String,
    /// What is wrong, on one line.
    pub what: String,
    /// Further lines, such as the traceback of a file that does not load; empty where there are none.
    pub detail: String,
}

impl OutsideError {
    /// Returns an error from what a worker said. Its first line says what is wrong, unless it is the head of a
    /// traceback, whose last line does.
    fn new(name: &SubjectName, said: &str) -> OutsideError {
        let said = said.trim();
        let (what, detail) = match said.split_once('\n') {
            Some((first, _)) if first.starts_with("Traceback") => {
                said.rsplit_once('\n').map_or((said, ""), |(rest, last)| (last, rest))
            }
            Some((first, rest)) => (first, rest),
            None => (said, ""),
        };
        OutsideError { name: name.to_string(), what: what.to_owned(), detail: detail.to_owned() }
    }
}

/// Declarations of the subjects that were asked for, by name and options.
static DECLARED: LazyLock<Mutex<HashMap<String, Arc<Declared>>>> = LazyLock::new(Mutex::default);

/// Makes the subject of a name without faults at its call, behind the workers of a pool.
pub(super) fn subject(name: &SubjectName, pool: Arc<Pool>) -> Result<Outside, OutsideError> {
    let worker = command(&name.base).map_err(|what| OutsideError::new(name, &what))?;
    let declared = declared(name, &worker, &pool)?;
    let lock = lock_file(&name.base).map_or(Ok(None), |file| Lock::read(&file));
    let lock = lock.map_err(|error| OutsideError::new(name, &error.to_string()))?;
    Ok(Outside::new(name, worker, (declared, lock), pool))
}

/// Returns a worker that answers questions about large runs of a subject in a Python file.
pub(super) fn questions(name: &SubjectName, pool: &Pool) -> Result<Questions, OutsideError> {
    let wrong = |what: &str| OutsideError::new(name, what);
    let place = name.base.strip_prefix(SubjectName::PYTHON).filter(|_| name.miscalls.is_empty());
    let place =
        place.ok_or_else(|| wrong("only subjects python:FILE and python:FILE:NAME draw their own inputs"))?;
    let usual = command(&name.base).map_err(|what| wrong(&what))?;
    let declared = declared(name, &usual, pool)?;
    let worker = python_module(LARGE_MODULE, &[place]).map_err(|what| wrong(&what))?;
    let start = Duration::from_secs(declared.declaration.start_seconds.into());
    Ok(pool.questions(&worker, asked(name), start))
}

/// Returns what a subject declares. Its first worker is asked, and the answer kept.
fn declared(name: &SubjectName, worker: &WorkerCommand, pool: &Pool) -> Result<Arc<Declared>, OutsideError> {
    let mut all = DECLARED.lock().unwrap_or_else(PoisonError::into_inner);
    let key = name.to_string();
    if let Some(known) = all.get(&key) {
        return Ok(Arc::clone(known));
    }
    let wrong = |what: String| OutsideError::new(name, &what);
    let ready = pool.describe(worker, &asked(name)).map_err(wrong)?;
    let declared = Arc::new(Declared::read(&ready).map_err(wrong)?);
    all.insert(key, Arc::clone(&declared));
    Ok(declared)
}

/// Returns the place of a subject's lock file, beside its adapter: `kernel.lock.json` for `python:kernel.py`, and
/// `kernel.NAME.lock.json` for `python:kernel.py:NAME`. A command has no such place.
pub(super) fn lock_file(base: &str) -> Option<PathBuf> {
    let (file, name) = file_and_name(base.strip_prefix(SubjectName::PYTHON)?);
    let adapter = Path::new(file);
    Some(match name {
        "" => profile::beside(adapter),
        name => profile::beside(&adapter.with_extension(format!("{name}.py"))),
    })
}

/// Returns the file and the name in `FILE[:NAME]`. A name that is left out is empty.
fn file_and_name(place: &str) -> (&str, &str) {
    place.split_once(':').unwrap_or((place, ""))
}

/// Returns the subject as a worker is asked to open it.
fn asked(name: &SubjectName) -> Subject {
    Subject { name: name.base.clone(), options: name.options.clone() }
}

/// Returns the files that a subject outside of this program is made of, as far as its name says: the Python file and its
/// lock file, or each word of the command that is a file.
pub(super) fn files(base: &str) -> Vec<PathBuf> {
    let is_there = |path: &PathBuf| path.is_file();
    if let Some(command) = base.strip_prefix(SubjectName::EXEC) {
        let words = shlex::split(command).unwrap_or_default();
        return words.into_iter().map(PathBuf::from).filter(is_there).collect();
    }
    let Some(place) = base.strip_prefix(SubjectName::PYTHON) else { return Vec::new() };
    let adapter = PathBuf::from(file_and_name(place).0);
    [Some(adapter), lock_file(base)].into_iter().flatten().filter(is_there).collect()
}

/// Returns the command of a subject's workers.
fn command(base: &str) -> Result<WorkerCommand, String> {
    if let Some(command) = base.strip_prefix(SubjectName::EXEC) {
        let words = shlex::split(command).ok_or("a quotation mark of the command has no other")?;
        let (program, arguments) = words.split_first().ok_or("there is no command; write exec:COMMAND")?;
        let (program, arguments) = (Some(program.into()), arguments.to_vec());
        return Ok(WorkerCommand { program, arguments, environment: Vec::new() });
    }
    let place = base.strip_prefix(SubjectName::PYTHON).unwrap_or_default();
    let (file, name) = file_and_name(place);
    if file.is_empty() || name.contains(':') {
        return Err("write python:FILE or python:FILE:NAME, with options behind one more colon".into());
    }
    if !Path::new(file).is_file() {
        return Err(format!("there is no file {file}"));
    }
    python_module(WORKER_MODULE, &[place])
}

/// Returns the command that runs a module of the package, as the workers of Python subjects are run.
pub(crate) fn python_module(module: &str, arguments: &[&str]) -> Result<WorkerCommand, String> {
    let Python { program, environment } = python()?;
    let arguments = ["-m", module].iter().chain(arguments).map(|word| (*word).to_owned()).collect();
    Ok(WorkerCommand { program: Some(program), arguments, environment })
}

/// Returns the interpreter of the workers, by its name where the search path leads to it, and the variables with which
/// it finds the package.
pub(crate) fn python_by_name() -> (PathBuf, Vec<(String, OsString)>) {
    // Nothing was run by it then.
    let Ok(Python { program, environment }) = python() else { return (PYTHONS[0].into(), Vec::new()) };
    let name = program.file_name().filter(|_| on_path().as_ref() == Some(&program));
    (name.map_or_else(|| program.clone(), PathBuf::from), environment)
}

/// Returns what is typed before a command so that it finds the interpreter that was named for this program; nothing
/// where the search path leads to the same.
pub(crate) fn python_named() -> Option<(&'static str, PathBuf)> {
    let named = env::var_os(PYTHON_VARIABLE).filter(|program| !program.is_empty()).map(PathBuf::from)?;
    // A virtual environment's interpreters are links beside each other to one program, which lies elsewhere.
    let is_same = |found: PathBuf| {
        found.parent() == named.parent() && found.canonicalize().ok() == named.canonicalize().ok()
    };
    (!on_path().is_some_and(is_same)).then_some((PYTHON_VARIABLE, named))
}

/// A Python interpreter that finds this project's package.
#[derive(Clone, Debug)]
struct Python {
    program: PathBuf,
    environment: Vec<(String, OsString)>,
}

/// Returns the interpreter of the workers, which is looked for once.
fn python() -> Result<Python, String> {
    static FOUND: OnceLock<Result<Python, String>> = OnceLock::new();
    FOUND.get_or_init(find_python).clone()
}

fn find_python() -> Result<Python, String> {
    let named = env::var_os(PYTHON_VARIABLE).filter(|program| !program.is_empty()).map(PathBuf::from);
    let program = match &named {
        Some(program) => program.clone(),
        None => on_path().ok_or_else(|| {
            format!(
                "there is no Python: neither {} is on the PATH; name one with {PYTHON_VARIABLE}",
                PYTHONS.join(" nor ")
            )
        })?,
    };
    let shown = program.display();
    if has_package(&program, None)? {
        return Ok(Python { program, environment: Vec::new() });
    }
    let Some(folder) = checkout() else {
        return Err(format!(
            "{shown} has no package {PACKAGE}: install it there (pip install {PACKAGE}), or name another interpreter with \
             {PYTHON_VARIABLE}"
        ));
    };
    // An empty list has one path, which stands for the working directory.
    let before = env::var_os("PYTHONPATH").filter(|before| !before.is_empty());
    let before = before.iter().flat_map(|before| env::split_paths(before));
    let path = env::join_paths(std::iter::once(folder.clone()).chain(before))
        .map_err(|error| format!("{}: {error}", folder.display()))?;
    match has_package(&program, Some(&path))? {
        true => Ok(Python { program, environment: vec![("PYTHONPATH".into(), path)] }),
        false => Err(format!("{shown} does not find the package {PACKAGE} in {}", folder.display())),
    }
}

/// Returns the first interpreter on the search path.
fn on_path() -> Option<PathBuf> {
    let path = env::var_os("PATH")?;
    let found = |name: &&str| env::split_paths(&path).map(|dir| dir.join(name)).find(|file| file.is_file());
    PYTHONS.iter().find_map(found)
}

/// Whether an interpreter finds the package; an error where it does not even run.
fn has_package(program: &Path, path: Option<&OsString>) -> Result<bool, String> {
    let shown = program.display();
    let mut command = Command::new(program);
    command.args(["-c", FIND_PACKAGE]).stdin(Stdio::null());
    if let Some(path) = path {
        command.env("PYTHONPATH", path);
    }
    let output = command.output().map_err(|error| format!("{shown} cannot be started: {error}"))?;
    match output.status.code() {
        Some(0) => Ok(true),
        Some(NO_PACKAGE) => Ok(false),
        _ => {
            let said = String::from_utf8_lossy(&output.stderr);
            Err(format!("{shown} is no Python that runs ({}): {}", output.status, said.trim()))
        }
    }
}

/// Returns the folder of the package in the checkout that this program lies in.
fn checkout() -> Option<PathBuf> {
    let running = env::current_exe().ok()?;
    let folders = running.ancestors().skip(1).map(|dir| dir.join("python"));
    folders.into_iter().find(|folder| folder.join(PACKAGE).join("__init__.py").is_file())
}

/// What a subject says about itself.
#[derive(Clone, Debug)]
pub(super) struct Declared {
    declaration: Declaration,
    /// Versions of what runs, as its worker told them.
    versions: BTreeMap<String, String>,
}

impl Declared {
    /// Reads the declaration in a worker's answer.
    pub(super) fn read(ready: &Ready) -> Result<Declared, String> {
        let Some(value) = &ready.declared else {
            return Err("its worker declares nothing; the answer to Open needs the field declared".into());
        };
        let declaration = Declaration::from_json(&value.to_string()).map_err(|error| error.to_string())?;
        Ok(Declared { declaration, versions: ready.versions.clone() })
    }
}

/// A subject outside of this program, behind its workers.
pub struct Outside {
    remote: Remote,
    declared: Arc<Declared>,
    lock: Option<Lock>,
}

impl Outside {
    fn new(
        name: &SubjectName,
        worker: WorkerCommand,
        (declared, lock): (Arc<Declared>, Option<Lock>),
        pool: Arc<Pool>,
    ) -> Outside {
        let declaration = || Box::new(Itself { name: name.base.clone(), declared: Arc::clone(&declared) });
        let subject = Arc::new(asked(name));
        let served = Served {
            declaration: declaration(),
            sentinel: Arc::clone(&subject),
            sentinel_declaration: declaration(),
            subject,
            worker,
            start: Some(Duration::from_secs(declared.declaration.start_seconds.into())),
        };
        Outside { remote: Remote::new(&name.base, served, pool), declared, lock }
    }
}

impl Backend for Outside {
    fn name(&self) -> &str {
        self.remote.name()
    }

    fn declaration(&self) -> Declaration {
        self.declared.declaration.clone()
    }

    fn inner(&self) -> Option<&dyn Backend> {
        Some(&self.remote)
    }

    fn versions(&self) -> BTreeMap<String, String> {
        self.declared.versions.clone()
    }

    fn lock(&self) -> Option<Lock> {
        self.lock.clone()
    }

    fn run(&self, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
        self.declared.asked(self, problem, inputs, || self.remote.run(problem, inputs))
    }
}

impl Declared {
    /// Returns the subject's answer to a problem. What its table does not take is refused here, unless the subject
    /// says that it refuses it itself. The cache of a problem in steps is kept here, so that the process sees each call
    /// as a problem of its own.
    pub(super) fn asked(
        &self,
        subject: &dyn Backend,
        problem: &Problem,
        inputs: &Inputs,
        run: impl FnOnce() -> Result<Outputs, RunError>,
    ) -> Result<Outputs, RunError> {
        match self.declaration.table.refusal(problem) {
            Some(refusal) if !self.declaration.refuses => Err(refusal.into()),
            None if !problem.steps.is_empty() => in_steps(subject, problem, inputs),
            _ => run(),
        }
    }
}

/// The declaration of a subject, which runs elsewhere.
pub(super) struct Itself {
    pub(super) name: String,
    pub(super) declared: Arc<Declared>,
}

impl Backend for Itself {
    fn name(&self) -> &str {
        &self.name
    }

    fn declaration(&self) -> Declaration {
        self.declared.declaration.clone()
    }

    fn run(&self, _: &Problem, _: &Inputs) -> Result<Outputs, RunError> {
        Err(RunError::Infrastructure(format!("{} runs in a worker alone", self.name)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(said: &str) -> OutsideError {
        OutsideError::new(&"exec:x".parse().expect("a name"), said)
    }

    #[test]
    fn an_error_is_a_line_and_its_traceback_stands_behind_it() {
        let traceback =
            "Traceback (most recent call last):\n  File \"k.py\", line 1\nModuleNotFoundError: no x";
        let told = error(traceback);
        assert_eq!(told.to_string(), "exec:x: ModuleNotFoundError: no x");
        assert_eq!(told.detail, "Traceback (most recent call last):\n  File \"k.py\", line 1");
        let told = error("two subjects\nname one of a, b\n");
        assert_eq!((told.what.as_str(), told.detail.as_str()), ("two subjects", "name one of a, b"));
        assert_eq!(error("one line").detail, "");
    }

    #[test]
    fn a_lock_file_lies_beside_the_adapter() {
        let place = |base: &str| lock_file(base).map(|file| file.display().to_string());
        assert_eq!(place("python:a/kernel.py").as_deref(), Some("a/kernel.lock.json"));
        assert_eq!(place("python:a/kernel.py:short").as_deref(), Some("a/kernel.short.lock.json"));
        assert_eq!(place("exec:./kernel"), None);
    }

    #[test]
    fn a_command_is_split_as_a_shell_splits_it() {
        let WorkerCommand { program, arguments, .. } =
            command("exec:./w --name 'a b' x:y=z").expect("a command");
        assert_eq!(program, Some("./w".into()));
        assert_eq!(arguments, ["--name", "a b", "x:y=z"]);
        for wrong in
            ["exec:", "exec:  ", "exec:a 'b", "python:", "python::x", "python:a:b:c", "python:no/such.py"]
        {
            assert!(command(wrong).is_err(), "{wrong}");
        }
    }
}
