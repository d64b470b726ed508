//! Scripts of findings of Python subjects.
//!
//! A script shows a finding with the library under test and numpy or torch alone, so that it can be pasted into an
//! issue of that library. The Python package writes it and runs it at once (`python -m seamproof.script`), in the
//! interpreter and the environment of the subject's workers; it has the case's numbers from `seamproof inputs`.
//! Whatever goes wrong there is told beside the finding, and is no error of whoever found it.

use std::ffi::OsString;
use std::fmt::{self, Display, Formatter};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::backends::{python_by_name, python_module};
use crate::paste::{quoted, typed};
use crate::worker::message::cut;
use crate::worker::{WorkerCommand, errand};
use seamproof_judge::case::Case;
use seamproof_judge::subjects::SubjectName;

/// Module of the package that writes scripts.
const MODULE: &str = "seamproof.script";
/// Name of the program.
const PROGRAM: &str = "seamproof";
/// Variable by which the package finds this program.
const PROGRAM_VARIABLE: &str = "SEAMPROOF";
/// Longest time that the writing of a script takes, with its runs: libraries are imported twice, kernels compiled.
pub const SCRIPT_LIMIT: Duration = Duration::from_secs(120);
/// Time that the package leaves to this program's own limit, so that it can say what was too slow.
const MARGIN: Duration = Duration::from_secs(5);

/// Script of a finding.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Script {
    /// Path of the script; absent where there is none.
    pub path: Option<String>,
    /// Whether the script was run and showed the failure.
    pub shows: bool,
    /// What makes it doubtful, or why there is none.
    pub doubt: Option<String>,
}

/// Answer of the package.
#[derive(Deserialize)]
struct Answer {
    /// Whether there is a script.
    written: bool,
    /// Whether it was run and showed the failure.
    shows: bool,
    /// What is to be said about it, or why there is none.
    doubt: Option<String>,
}

impl Script {
    /// Returns what stands in the place of a script, and why.
    pub fn none(why: impl Display) -> Script {
        Script { path: None, shows: false, doubt: Some(cut(format!("there is none: {why}"))) }
    }

    /// Returns the command that runs the script, where there is one.
    pub fn command(&self) -> Option<String> {
        self.path.as_deref().map(|path| format!("{} {}", python_typed().0, quoted(path)))
    }
}

impl Display for Script {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match (self.command(), &self.doubt) {
            (Some(command), None) => f.write_str(&command),
            (Some(command), Some(doubt)) => write!(f, "{command} ({doubt})"),
            (None, doubt) => f.write_str(doubt.as_deref().unwrap_or("there is none")),
        }
    }
}

/// Whether a case's subject is in a Python file.
pub fn is_python(case: &Case) -> bool {
    SubjectName::from(&case.subject).is_python()
}

/// Returns the place of a stored case's script.
pub fn beside(case: &Path) -> PathBuf {
    case.with_extension("py")
}

/// Returns the interpreter of the workers as one types it, and what is typed before it so that it finds the package.
fn python_typed() -> (String, String) {
    let (program, environment) = python_by_name();
    let typed = |(name, value): (String, OsString)| format!("{name}={} ", quoted(&value.to_string_lossy()));
    (quoted(&program.display().to_string()), environment.into_iter().map(typed).collect())
}

/// Returns the command with which a person has the script of a stored case written.
pub fn by_hand(case: &Path) -> String {
    let (python, environment) = python_typed();
    let program = match typed(PROGRAM) {
        // The package finds it on the search path as well.
        program if program == PROGRAM => String::new(),
        program => format!("{PROGRAM_VARIABLE}={program} "),
    };
    format!("{environment}{program}{python} -m {MODULE} {}", quoted(&case.display().to_string()))
}

/// Writes the script of a stored case of a Python subject beside it, and runs it, within `limit` and until `stop` says
/// so.
pub fn write(case: &Path, limit: Duration, stop: &dyn Fn() -> bool) -> Script {
    let path = beside(case);
    let before = path.exists();
    let answer = match command(case, limit) {
        Ok(command) => errand(&command, limit, stop).map_err(|error| error.to_string()),
        Err(what) => Err(what),
    };
    let read = |said: String| serde_json::from_str(&said).map_err(|_| format!("it said {said:?}"));
    let shown = path.display().to_string();
    match answer.and_then(read) {
        Ok(Answer { written, shows, doubt }) => {
            Script { path: written.then_some(shown), shows: written && shows, doubt: doubt.map(cut) }
        }
        // It may have been ended while the script ran.
        Err(what) if !before && path.exists() => {
            let doubt = format!("not seen to show the failure: python -m {MODULE}: {what}");
            Script { path: Some(shown), shows: false, doubt: Some(cut(doubt)) }
        }
        Err(what) => Script::none(format_args!("python -m {MODULE}: {what}")),
    }
}

/// Returns the command that writes and runs a script.
fn command(case: &Path, limit: Duration) -> Result<WorkerCommand, String> {
    let own = limit.saturating_sub(MARGIN).max(limit / 2).as_secs_f64().to_string();
    let case = case.display().to_string();
    let mut command = python_module(MODULE, &["--leashed", "--limit", &own, "--", &case])?;
    command.environment.push((PROGRAM_VARIABLE.to_owned(), own_program().into()));
    Ok(command)
}

/// Returns a path to this program itself, not to the file that may have taken its place by now.
fn own_program() -> PathBuf {
    let running = PathBuf::from(format!("/proc/{}/exe", std::process::id()));
    if running.exists() { running } else { std::env::current_exe().unwrap_or_default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_script_is_told_with_its_doubt() {
        let path = Some("a b.py".to_owned());
        let shows = Script { path: path.clone(), shows: true, doubt: None };
        let python = python_typed().0;
        assert_eq!(shows.to_string(), format!("{python} 'a b.py'"));
        let doubtful = Script { path, shows: false, doubt: Some("it holds".to_owned()) };
        assert_eq!(doubtful.to_string(), format!("{python} 'a b.py' (it holds)"));
        assert_eq!(Script::none("no time").to_string(), "there is none: no time");
    }
}
