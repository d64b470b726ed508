//! A folder of findings: each a case, what was found of it in words, and a test or a script to paste.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use seamproof_judge::case::Case;
use seamproof_judge::{files, prose};

use super::writing::write_whole;
use super::{At, RecordError};
use crate::replay::is_foreign;
use crate::script::{Script, is_python};

/// A folder of findings.
#[derive(Debug)]
pub struct Findings {
    pub(super) dir: PathBuf,
}

impl Findings {
    /// Makes the directory where it is missing.
    pub fn create(dir: &Path) -> Result<Findings, RecordError> {
        fs::create_dir_all(dir).at(dir, "created")?;
        Ok(Findings { dir: dir.to_owned() })
    }

    /// Returns the file of a finding.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.join(format!("{name}.json"))
    }

    /// Writes a case as a whole. It is on disk when this returns.
    pub fn record(&self, name: &str, case: &Case) -> Result<(), RecordError> {
        write_whole(&self.path(name), &case.to_json())
    }

    /// Writes the files that a reader needs beside the case: a description, and a test to paste, unless the subject is
    /// in a Python file, whose script comes later ([`Findings::tell_script`]).
    pub fn explain(&self, name: &str, case: &Case) -> Result<(), RecordError> {
        if !is_python(case) {
            write_whole(&self.test(name), &test_to_paste(name, case))?;
        }
        self.describe(name, case, None)
    }

    /// Adds a finding's script to its description.
    pub fn tell_script(&self, name: &str, case: &Case, script: &Script) -> Result<(), RecordError> {
        self.describe(name, case, Some(script))
    }

    fn describe(&self, name: &str, case: &Case, script: Option<&Script>) -> Result<(), RecordError> {
        let script = script.map_or(String::new(), |script| format!("script: {script}\n"));
        write_whole(&self.dir.join(format!("{name}.txt")), &(self.words(name, case) + &script))
    }

    /// Removes a finding that another one stands for.
    pub fn remove(&self, name: &str) -> Result<(), RecordError> {
        for extension in ["json", "rs", "txt", "py"] {
            let path = self.dir.join(format!("{name}.{extension}"));
            match fs::remove_file(&path) {
                Err(error) if error.kind() != ErrorKind::NotFound => return Err(error).at(&path, "removed"),
                _ => {}
            }
        }
        Ok(())
    }

    /// Removes the findings whose names are not wanted.
    pub fn retain(&self, is_wanted: impl Fn(&str) -> bool) -> Result<(), RecordError> {
        let paths = files::list(&self.dir).at(&self.dir, "read")?;
        let names = paths.iter().filter_map(|path| path.file_stem()?.to_str());
        names.filter(|name| !is_wanted(name)).try_for_each(|name| self.remove(name))
    }

    /// Returns the words that say how to judge a finding again: a command, or the test to paste for a foreign
    /// subject.
    pub fn replay(&self, name: &str, case: &Case) -> String {
        if is_foreign(case) {
            let (test, subject) = (self.test(name), &case.subject.name);
            let test = test.display();
            return format!(
                "paste the test {test} into the crate that has {subject:?}; seamproof itself has no such subject"
            );
        }
        crate::paste::replay_command(&self.path(name), None)
    }

    /// Returns the file of a finding's test.
    fn test(&self, name: &str) -> PathBuf {
        self.dir.join(format!("{name}.rs"))
    }

    fn words(&self, name: &str, case: &Case) -> String {
        let finding = case.found.as_ref().map(ToString::to_string).unwrap_or_default();
        let problem = prose::describe(&case.problem);
        // A command that was not seen to show anything would send its reader on a false trail.
        if case.found.as_ref().is_some_and(|found| found.unconfirmed.is_some()) {
            return format!("{problem}: {finding}\n");
        }
        format!("{problem}: {finding}\nreplay: {}\n", self.replay(name, case))
    }
}

/// Returns the case as a test. It fails as long as the fault is there, and is a regression test afterwards.
fn test_to_paste(name: &str, case: &Case) -> String {
    let json = case.to_json();
    let mut hashes = "#".to_owned();
    while json.contains(&format!("\"{hashes}")) {
        hashes.push('#');
    }
    let subject = &case.subject.name;
    let (note, judge) = match is_foreign(case) {
        false => (String::new(), REPLAYED),
        true => (
            format!(
                "///\n/// Seamproof has no subject {subject:?} of its own: paste this into the crate that has it, and make its\n\
                 /// backend where `your_backend` stands.\n"
            ),
            JUDGED_HERE,
        ),
    };
    format!(
        "/// {}.\n{note}#[test]\nfn {}() {{\n    let case = seamproof_judge::case::Case::parse(r{hashes}\"{json}\"{hashes}.as_bytes());\n\
         \x20   let case = case.expect(\"the case is valid\");\n{judge}\
         \x20   assert!(matches!(verdict, seamproof_judge::verdict::Verdict::Pass(_)), \"{{verdict}}\");\n}}\n",
        prose::describe(&case.problem),
        name.replace('-', "_"),
    )
}

/// Lines of a test to paste that judge a case on its own subject.
const REPLAYED: &str =
    "    let verdict = seamproof::replay::replay(&case).expect(\"the subject is known\");\n";
/// Lines of a test to paste that judge a case on a subject of another crate.
const JUDGED_HERE: &str =
    "    let backend = your_backend(&case.subject.options); // your `Backend`, made with these options
    let verdict = seamproof_judge::evaluate::evaluate(&backend, &case.problem);
";
