//! The subject of a fuzz target, and the handling of its findings.

use std::collections::BTreeMap;
use std::io;
use std::panic::{PanicHookInfo, panic_any};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;

use crate::backends::{self, Cuda};
use crate::campaign::{minimise, shrink_budget};
use crate::record::Findings;
use crate::script::{self, SCRIPT_LIMIT, is_python};
use seamproof_judge::asked::Asked;
use seamproof_judge::case::{Case, Subject};
use seamproof_judge::evaluate::{evaluate, evaluate_malformed, quiet_caught_panics};
use seamproof_judge::finding::Finding;
use seamproof_judge::generate::{Limits, RawProblem};
use seamproof_judge::subject::{Backend, RunError};
use seamproof_judge::subjects::{OptionError, SubjectName};
use seamproof_judge::values;
use seamproof_judge::verdict::Verdict;

/// Variable that names a fault of the catalogue, which is planted in the emulated kernel.
pub const FAULT_VARIABLE: &str = "SEAMPROOF_FAULT";
/// Variable that names the subject, as `--backend` does; the emulated kernel without it.
pub const BACKEND_VARIABLE: &str = "SEAMPROOF_BACKEND";
/// Variable that names the folder of stored cases.
pub const FINDINGS_VARIABLE: &str = "SEAMPROOF_FINDINGS";
const DEFAULT_FINDINGS: &str = "fuzz/artifacts/findings";

/// A subject under fuzzing.
pub struct Hunter {
    subject: Subject,
    backend: Box<dyn Backend>,
    findings: PathBuf,
}

/// Words about a finding, or about an unknown fault. The last line is the command that replays the finding, where it
/// could be stored.
struct Told(String);

/// Beginning of the line with the replay command.
const REPLAY: &str = "replay: ";

/// Prepares the start of a target: panics of the subject become findings, and reach libFuzzer once these are stored.
pub fn start() {
    // libFuzzer's own hook ends the process at the first panic, caught or not. Here only a panic that is not caught
    // ends the process, and it does so in the hook: if the panic left the target, Rust would print a second trace.
    drop(std::panic::take_hook());
    let (report, target) = (std::panic::take_hook(), thread::current().id());
    std::panic::set_hook(Box::new(move |info| {
        tell(info, &report);
        if thread::current().id() == target {
            std::process::abort();
        }
    }));
    quiet_caught_panics();
}

/// Prints the words of a finding alone, as no place in this program says more about it. Any other panic goes to
/// `report`.
fn tell(info: &PanicHookInfo<'_>, report: &dyn Fn(&PanicHookInfo<'_>)) {
    let Some(Told(text)) = info.payload().downcast_ref() else { return report(info) };
    eprintln!("{text}");
    let is_last =
        |line: &&str| [REPLAY, FAULT_VARIABLE, BACKEND_VARIABLE].iter().any(|start| line.starts_with(start));
    let Some(last) = text.lines().next_back().filter(is_last) else { return };
    if let Err(error) = say_last(last) {
        eprintln!("the line above is not said again: {error}");
    }
}

/// Prints a line once this process has ended, after libFuzzer's own words, which come when it dies. A shell waits for
/// the end of its input, which comes with the end of this process.
fn say_last(line: &str) -> io::Result<()> {
    let wait = "cat >/dev/null; printf '%s\\n' \"$0\" >&2";
    let shell = Command::new("sh").args(["-c", wait, line]).stdin(Stdio::piped()).spawn()?;
    // Dropping the shell would end its input now.
    std::mem::forget(shell);
    Ok(())
}

/// Returns the folder for findings.
fn folder() -> PathBuf {
    std::env::var_os(FINDINGS_VARIABLE).map_or(DEFAULT_FINDINGS.into(), PathBuf::from)
}

impl Hunter {
    /// Returns the subject of [`BACKEND_VARIABLE`], or else the emulated kernel, with the fault of [`FAULT_VARIABLE`]
    /// if there is one. An unknown subject or fault ends the process, because a target that hunts nothing must not
    /// pass.
    pub fn from_environment() -> Hunter {
        let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        let named =
            variable(BACKEND_VARIABLE).map(|text| (BACKEND_VARIABLE, Hunter::named(&text, &folder())));
        let (variable, hunter) = named
            .unwrap_or_else(|| (FAULT_VARIABLE, Hunter::new(variable(FAULT_VARIABLE).as_deref(), &folder())));
        hunter.unwrap_or_else(|what| panic_any(Told(format!("{variable}: {what}"))))
    }

    /// Returns the subject of a name, with or without options.
    pub fn named(text: &str, findings: &Path) -> Result<Hunter, String> {
        let name: SubjectName = text.parse().map_err(|error: OptionError| error.to_string())?;
        let backend = backends::by_name(&name.name(), &name.options).map_err(|error| error.to_string())?;
        Ok(Hunter { subject: name.into(), backend, findings: findings.to_owned() })
    }

    /// Returns the emulated kernel, with this fault in its schedule, its arithmetic or at its call.
    pub fn new(fault: Option<&str>, findings: &Path) -> Result<Hunter, String> {
        let names = match fault {
            None => vec!["emulated".to_owned()],
            Some(id) => vec![format!("emulated+{id}"), format!("emulated~{id}")],
        };
        let options = BTreeMap::new();
        let found = names.into_iter().find_map(|name| Some((backends::by_name(&name, &options).ok()?, name)));
        let (backend, name) = found.ok_or_else(|| {
            let id = fault.unwrap_or_default();
            format!("no fault of the emulated kernel is called '{id}'; `seamproof faults --list` names all")
        })?;
        Ok(Hunter { subject: Subject { name, options }, backend, findings: findings.to_owned() })
    }

    /// Returns the kernels on this process's first GPU. Without a GPU the process ends at the first case.
    pub fn on_gpu() -> Hunter {
        let subject = Subject { name: "cuda".to_owned(), options: BTreeMap::new() };
        Hunter { subject, backend: Box::new(Cuda::default()), findings: folder() }
    }

    /// Returns what the subject is asked in place of a value.
    fn asked(&self, raw: &RawProblem) -> Asked {
        Asked::of(raw, &Limits::fuzz(), &self.backend.declaration())
    }

    /// Judges the case that a value makes, and first compares every element with the result of the GPU's twin on the
    /// CPU.
    ///
    /// # Panics
    /// Panics as [`Hunter::case`] does, and where an element differs.
    pub fn differential(&self, raw: &RawProblem) {
        if let Asked::Problem(problem) | Asked::Probe(problem) = self.asked(raw) {
            let subject = Cuda::default().with_twins_bits(&problem);
            let inputs = values::inputs(&problem);
            let both = (subject.run(&problem, &inputs), subject.twin().run(&problem, &inputs));
            let differs = match &both {
                (Ok(got), Ok(want)) => seamproof_judge::subjects::difference(got, want),
                (Err(RunError::Refused(got)), Err(RunError::Refused(want))) if got == want => None,
                (got, want) => {
                    let said = |result: &Result<_, RunError>| {
                        result.as_ref().err().map_or("ran".to_owned(), ToString::to_string)
                    };
                    Some(format!("the subject: {}; its twin: {}", said(got), said(want)))
                }
            };
            let case = || Case::new(self.subject.clone(), problem.data_seed, problem.clone()).to_json();
            assert_eq!(differs, None, "{}", case());
        }
        self.case(raw);
    }

    /// Judges the case that a value makes.
    ///
    /// # Panics
    /// Panics on a finding, whose shrunk case is then on disk, and where the judge itself fails.
    pub fn case(&self, raw: &RawProblem) {
        match self.asked(raw) {
            Asked::Problem(problem) | Asked::Probe(problem) => {
                match evaluate(self.backend.as_ref(), &problem) {
                    Verdict::Finding(finding) => {
                        let case = Case::new(self.subject.clone(), problem.data_seed, problem);
                        panic_any(Told(self.store(&case, &finding)))
                    }
                    Verdict::Infrastructure(what) => panic!("{what}: {problem:?}"),
                    Verdict::RefusedMalformed(rule) => panic!("a problem was taken for malformed: {rule}"),
                    Verdict::Pass(_) | Verdict::Refused(_) | Verdict::TooLarge(_) => {}
                }
            }
            Asked::Malformed(malformed) => {
                let verdict = evaluate_malformed(&malformed);
                assert!(matches!(verdict, Verdict::RefusedMalformed(_)), "{verdict:?} of {malformed:?}");
            }
        }
    }

    /// Stores the finding, and returns its words with the command that replays it.
    fn store(&self, case: &Case, finding: &Finding) -> String {
        let budget = shrink_budget(finding.check);
        let small = minimise(case, finding, self.backend.as_ref(), budget, &|| false, |_| {}).case;
        let name = format!("{}-{}", finding.check, small.id());
        let stored = Findings::create(&self.findings).and_then(|findings| {
            findings.record(&name, &small)?;
            findings.explain(&name, &small)?;
            // A signal ends this process, and what writes the script ends with it.
            let script =
                is_python(&small).then(|| script::write(&findings.path(&name), SCRIPT_LIMIT, &|| false));
            if let Some(script) = &script {
                findings.tell_script(&name, &small, script)?;
            }
            Ok((findings.replay(&name, &small), script))
        });
        match stored {
            Ok((command, script)) => {
                let script = script.map_or(String::new(), |script| format!("script: {script}\n"));
                format!("{finding}\n{script}{REPLAY}{command}")
            }
            Err(error) => format!("{finding}\nnot stored: {error}\n{}", small.to_json()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use seamproof_judge::generate::draw_raw;

    /// Test that a fault gives a panic that says how to replay the stored case, which fails again and is small.
    #[test]
    fn a_finding_is_stored_and_replays() {
        let folder = tempfile::tempdir().unwrap();
        let hunter = Hunter::new(Some("window-off-by-one"), folder.path()).unwrap();
        let hunt = |index: u64| {
            let raw = draw_raw(1, index, &Limits::fuzz());
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| hunter.case(&raw))).err()
        };
        let panic = (0..400).find_map(hunt).expect("the fault shows in some cases");
        let Told(said) = panic.downcast_ref::<Told>().unwrap();
        let path = said.split("seamproof replay ").nth(1).unwrap().trim();
        let case = Case::load(Path::new(path)).unwrap();
        assert!(case.problem.tokens() <= 12, "{} tokens", case.problem.tokens());
        assert!(matches!(crate::replay::replay(&case), Ok(Verdict::Finding(_))));
    }

    /// Test that a subject behind a worker is hunted, and that one which is not there is told.
    #[test]
    fn a_subject_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let named = |text: &str| Hunter::named(text, folder.path());
        named("emulated~call-scale-off:q_tile=4,kv_tile=4").expect("a subject");
        for (wrong, words) in
            [("emulate", "unknown backend"), ("emulated:tile", "no list"), ("exec:", "no command")]
        {
            assert!(named(wrong).err().expect("it is none").contains(words), "{wrong}");
        }
    }

    const FOLDER: &str = "SEAMPROOF_HUNT_TEST_FINDINGS";

    #[test]
    #[ignore = "the child of the test below, not a test of its own"]
    fn child() {
        let Some(folder) = std::env::var_os(FOLDER) else { return };
        start();
        let hunter = Hunter::new(Some("window-off-by-one"), Path::new(&folder)).unwrap();
        (0..400).for_each(|index| hunter.case(&draw_raw(1, index, &Limits::fuzz())));
    }

    /// Test that the replay command is the last line that a target prints, whatever a fuzzer prints when its process
    /// dies. The panic that tells a finding prints no trace.
    #[test]
    fn the_last_line_of_a_target_that_finds_something_replays_it() {
        let folder = tempfile::tempdir().unwrap();
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["fuzz::hunt::tests::child", "--exact", "--ignored", "--nocapture"]);
        let output = child.env(FOLDER, folder.path()).env("RUST_BACKTRACE", "1").output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        let last = said.lines().next_back().unwrap_or_default();
        let path = last.strip_prefix("replay: seamproof replay ").unwrap_or_else(|| panic!("{said}"));
        assert!(Case::load(Path::new(path)).is_ok() && !output.status.success(), "{said}");
        assert_eq!(said.lines().filter(|line| *line == last).count(), 2, "at once, and once more: {said}");
        assert!(!said.contains("panicked") && !said.contains("stack backtrace"), "{said}");
    }

    #[test]
    #[ignore = "the child of the test below, not a test of its own"]
    fn child_of_an_unknown_fault() {
        start();
        if std::env::var_os(FAULT_VARIABLE).is_some() {
            Hunter::from_environment();
        }
    }

    #[test]
    fn the_last_line_of_a_target_names_a_fault_that_is_none() {
        let mut child = Command::new(std::env::current_exe().unwrap());
        let name = "fuzz::hunt::tests::child_of_an_unknown_fault";
        child.args([name, "--exact", "--ignored", "--nocapture"]).env(FAULT_VARIABLE, "no-such-fault");
        let output = child.output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        let last = said.lines().next_back().unwrap_or_default();
        assert!(last.starts_with("SEAMPROOF_FAULT: ") && last.contains("'no-such-fault'"), "{said}");
        let lines = said.lines().filter(|line| *line == last).count();
        assert!(lines == 2 && !output.status.success(), "{said}");
    }

    #[test]
    fn the_right_kernel_holds_and_an_unknown_fault_is_no_subject() {
        let hunter = Hunter::new(None, Path::new("unused")).unwrap();
        (0..60).for_each(|index| hunter.case(&draw_raw(2, index, &Limits::fuzz())));
        assert!(Hunter::new(Some("no-such-fault"), Path::new("unused")).is_err());
    }
}
