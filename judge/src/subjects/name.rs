//! The name of a subject: read once, and written in one way.

use std::fmt;
use std::str::FromStr;

use super::miscall::Miscall;
use super::miscalls::miscall;
use super::options::{OptionError, Options, listed, read};
use crate::case::Subject;

/// Before the id of a fault in the subject's schedule or kernels.
const PLANTED: char = '+';
/// Behind the name of a subject that runs in worker processes.
const AT_WORKER: &str = "@worker";
/// Before the id of a fault at the call.
const CALLED: char = '~';

/// `BASE[+ID][@worker][~ID…][:OPTION=VALUE,…]`; faults at the call may stand behind the options instead.
///
/// A subject *outside* of this project is `python:FILE[:NAME][~ID…][:OPTION=VALUE,…]` or `exec:COMMAND[~ID…]`. It
/// always runs in worker processes, and a fault can be planted only at its call, so `+` and `@worker` mean nothing in a
/// path or a command. The options of a command are its own.
///
/// Reading is total but for the options: what follows no part of this form is in the base, as the whole name of a
/// subject that nobody knows is, and writing gives back what was read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SubjectName {
    /// The subject without a fault, in this process.
    pub base: String,
    /// The id of the fault in its schedule or its kernels.
    pub planted: Option<String>,
    /// Whether it runs in worker processes.
    pub at_worker: bool,
    /// The faults at its call; each one is at the call of the subject with those before it.
    pub miscalls: Vec<&'static Miscall>,
    /// The options that are named.
    pub options: Options,
}

impl SubjectName {
    /// Beginning of the name of a subject in a Python file.
    pub const PYTHON: &str = "python:";
    /// Beginning of the name of a subject that a command serves.
    pub const EXEC: &str = "exec:";

    /// The name of a subject, which has no options in it, and options.
    pub fn new(name: &str, options: Options) -> SubjectName {
        let (name, miscalls) = without_miscalls(name);
        if is_outside(name) {
            return SubjectName { base: name.to_owned(), miscalls, options, ..SubjectName::default() };
        }
        let (name, at_worker) = name.strip_suffix(AT_WORKER).map_or((name, false), |name| (name, true));
        let (base, planted) = match name.split_once(PLANTED) {
            Some((base, id)) => (base, Some(id.to_owned())),
            None => (name, None),
        };
        SubjectName { base: base.to_owned(), planted, at_worker, miscalls, options }
    }

    /// Whether the subject is outside of this project.
    pub fn is_outside(&self) -> bool {
        is_outside(&self.base)
    }

    /// Whether the subject is in a Python file.
    pub fn is_python(&self) -> bool {
        self.base.starts_with(SubjectName::PYTHON)
    }

    /// The subject with a fault in its schedule or its kernels.
    pub fn planted(base: &str, id: &str) -> SubjectName {
        SubjectName { base: base.to_owned(), planted: Some(id.to_owned()), ..SubjectName::default() }
    }

    /// The subject with one more fault at its call.
    pub fn called_wrongly(mut self, miscall: &'static Miscall) -> SubjectName {
        self.miscalls.push(miscall);
        self
    }

    /// The subject that is called, without the faults at its call.
    pub fn called(&self) -> SubjectName {
        SubjectName { miscalls: Vec::new(), ..self.clone() }
    }

    /// The name without the options, as stored cases and reports have it.
    pub fn name(&self) -> String {
        let mut name = self.base.clone();
        if let Some(id) = &self.planted {
            name.push(PLANTED);
            name += id;
        }
        if self.at_worker {
            name += AT_WORKER;
        }
        for miscall in &self.miscalls {
            name.push(CALLED);
            name += miscall.id;
        }
        name
    }

    /// What stands behind the last sign of a fault in the name, whether it is the id of one or not, and what before it.
    /// The whole name stands behind none.
    pub fn last_id(&self) -> (String, String) {
        let name = self.name();
        let signs = [PLANTED, CALLED];
        match name.rsplit_once(signs) {
            Some((before, id)) => (before.trim_end_matches(signs).to_owned(), id.to_owned()),
            None => (String::new(), name),
        }
    }
}

/// Whether a name begins as that of a subject outside of this project.
fn is_outside(name: &str) -> bool {
    name.starts_with(SubjectName::PYTHON) || name.starts_with(SubjectName::EXEC)
}

/// A text in its name and its list of options, where it has one.
fn split(text: &str) -> (&str, Option<&str>) {
    if text.starts_with(SubjectName::EXEC) {
        return (text, None);
    }
    let Some(place) = text.strip_prefix(SubjectName::PYTHON) else {
        return text.split_once(':').map_or((text, None), |(name, list)| (name, Some(list)));
    };
    // The file is always there, and behind it the last part is the list if it holds an option.
    match place.rsplit_once(':') {
        Some((name, list)) if list.contains('=') => {
            (&text[..SubjectName::PYTHON.len() + name.len()], Some(list))
        }
        _ => (text, None),
    }
}

/// A text without the faults at a call that it ends with, and these in their order.
fn without_miscalls(text: &str) -> (&str, Vec<&'static Miscall>) {
    let last = text.rsplit_once(CALLED).and_then(|(before, id)| Some((before, miscall(id)?)));
    let Some((before, miscall)) = last else { return (text, Vec::new()) };
    let (text, mut miscalls) = without_miscalls(before);
    miscalls.push(miscall);
    (text, miscalls)
}

/// A name that has no options in it.
impl From<&str> for SubjectName {
    fn from(name: &str) -> SubjectName {
        SubjectName::new(name, Options::new())
    }
}

impl From<&Subject> for SubjectName {
    fn from(subject: &Subject) -> SubjectName {
        SubjectName::new(&subject.name, subject.options.clone())
    }
}

impl From<SubjectName> for Subject {
    fn from(name: SubjectName) -> Subject {
        Subject { name: name.name(), options: name.options }
    }
}

/// As a person names a subject, options included.
impl FromStr for SubjectName {
    type Err = OptionError;

    fn from_str(text: &str) -> Result<SubjectName, OptionError> {
        let (name, Some(list)) = split(text) else { return Ok(SubjectName::from(text)) };
        let (list, miscalls) = without_miscalls(list);
        let mut name = SubjectName::new(name, read(list)?);
        name.miscalls.extend(miscalls);
        Ok(name)
    }
}

impl fmt::Display for SubjectName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name())?;
        if self.options.is_empty() { Ok(()) } else { write!(f, ":{}", listed(&self.options)) }
    }
}
