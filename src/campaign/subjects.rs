//! Subjects of campaigns, whose options are drawn for each case.

use std::sync::Arc;

use super::asked;
use super::plan::Plan;
use crate::backends::{self, BackendError, Identity, IdentityError};
use crate::worker::{self, Pool};
use seamproof_judge::asked::Asked;
use seamproof_judge::campaign::canary_call;
use seamproof_judge::finding::Finding;
use seamproof_judge::subject::{Backend, Declaration};
pub use seamproof_judge::subjects::Options;
use seamproof_judge::subjects::{Miscall, SubjectName};
use seamproof_oracle::Problem;

/// Source of the subject of each case.
pub trait Subjects: Sync {
    /// Returns the name that stored cases carry.
    fn name(&self) -> &str;

    /// Returns the options of a case, a function of the seed alone.
    fn options(&self, seed: u64) -> Options;

    /// Returns the subject with these options.
    fn backend(&self, options: &Options) -> Result<Box<dyn Backend + '_>, BackendError>;

    /// Returns the source of fresh processes with the subject; `None` where it runs in this one, or where there is no
    /// other.
    fn fresh(&self) -> Option<Fresh> {
        None
    }

    /// Returns the name of the known failure that a failing case shows as it was drawn; `None` where it is to be looked
    /// at. A campaign counts known ones, and neither confirms nor shrinks them.
    fn known(&self, _finding: &Finding, _problem: &Problem) -> Option<&str> {
        None
    }

    /// Returns the declaration of the subject with these options.
    fn declaration(&self, options: &Options) -> Result<Declaration, BackendError> {
        self.backend(options).map(|backend| backend.declaration())
    }
}

/// Subject that the command line knows by name.
#[derive(Clone, Debug)]
pub struct Registered {
    name: String,
    /// Options that are the same for every case. The others are drawn.
    fixed: Options,
}

impl Registered {
    /// Returns the subject that `NAME` or `NAME:OPTION=VALUE,…` names, if there is one and it can be made.
    pub fn new(text: &str) -> Result<Registered, BackendError> {
        let name: SubjectName = text.parse()?;
        Registered::with(name.name(), name.options)
    }

    /// Returns the subject of this name with these options fixed.
    pub fn with(name: String, fixed: Options) -> Result<Registered, BackendError> {
        let subject = Registered { name, fixed };
        subject.backend(&subject.options(0))?;
        Ok(subject)
    }

    /// Returns the subject with other fixed options.
    pub fn among(self, fixed: impl FnOnce(Options) -> Options) -> Result<Registered, BackendError> {
        Registered::with(self.name, fixed(self.fixed))
    }

    /// Returns the options that are the same for every case.
    pub fn fixed(&self) -> &Options {
        &self.fixed
    }

    /// Returns the subject with the fault that its canary looks for; `None` where no wrong call shows on what it takes.
    /// The emulated kernel has its fault planted. Any other subject is called wrongly, in the first way that changes
    /// the exact answer of a problem that it takes.
    pub fn canary(&self, plan: &Plan) -> Result<Option<Wrong<'static>>, BackendError> {
        if backends::is_emulated(&self.name) {
            return Ok(Some(Wrong::planted()));
        }
        let Some(call) = wrong_call(plan, self)? else { return Ok(None) };
        let wrong = SubjectName::new(&self.name, self.fixed.clone()).called_wrongly(call);
        let wrong = Box::new(Registered::with(wrong.name(), wrong.options)?);
        Ok(Some(Wrong { wrong, right: Box::new(self.clone()), call: Some(call) }))
    }

    /// Returns the builds, versions and files behind the subject's name.
    pub fn identity(&self) -> Result<Identity, IdentityError> {
        Identity::of(&self.name, &self.fixed)
    }

    /// Prepares everything that the subject's runs need, or says why that is not possible.
    pub fn ready(&self) -> Result<(), String> {
        let backend = self.backend(&self.options(0)).map_err(|error| error.to_string())?;
        backend.ready()
    }
}

/// A subject with the fault of a canary, and the one that the fault was put into.
pub struct Wrong<'a> {
    /// The subject with the fault.
    pub wrong: Box<dyn Subjects + 'a>,
    /// The subject without it.
    pub right: Box<dyn Subjects + 'a>,
    /// The fault, where it is one at the call; `None` where it is in the kernel.
    pub call: Option<&'static Miscall>,
}

impl Wrong<'_> {
    /// Returns the emulated kernel with its planted fault, whatever a campaign's own subject is.
    pub fn planted() -> Wrong<'static> {
        let right = Registered { name: backends::EMULATED.to_owned(), fixed: Options::new() };
        Wrong { wrong: Box::new(PlantedSubjects::default()), right: Box::new(right), call: None }
    }
}

/// Returns the first wrong call that changes the exact answer of a problem of the plan which the subject takes.
pub fn wrong_call(plan: &Plan, subjects: &dyn Subjects) -> Result<Option<&'static Miscall>, BackendError> {
    let (plan, subject) = (plan.of_canary(), subjects.backend(&subjects.options(0))?);
    let inside = |index| asked(&plan, subjects, index).ok().and_then(Asked::inside);
    Ok(canary_call(subject.as_ref(), inside))
}

impl Subjects for Registered {
    fn name(&self) -> &str {
        &self.name
    }

    fn options(&self, seed: u64) -> Options {
        let mut options = backends::draw_options(&self.name, seed);
        options.extend(self.fixed.clone());
        options
    }

    fn backend(&self, options: &Options) -> Result<Box<dyn Backend + '_>, BackendError> {
        backends::by_name(&self.name, options)
    }

    fn fresh(&self) -> Option<Fresh> {
        let is_hosted = self.backend(&self.options(0)).is_ok_and(|backend| backend.host().is_some());
        is_hosted.then(|| Fresh(self.name.clone()))
    }
}

/// Source of fresh processes with a subject of this name.
#[derive(Clone, Debug)]
pub struct Fresh(String);

impl Fresh {
    /// Returns a process that starts with its first run.
    pub(super) fn process(&self) -> FreshProcess {
        FreshProcess { name: self.0.clone(), pool: Arc::new(worker::shared().aside()) }
    }

    /// Returns a process that is replaced where it ends, without a second look at the end.
    pub(super) fn hasty(&self) -> FreshProcess {
        FreshProcess { name: self.0.clone(), pool: Arc::new(worker::shared().aside().hasty()) }
    }
}

/// A process with a subject, which ends with this value.
#[derive(Debug)]
pub(super) struct FreshProcess {
    name: String,
    pool: Arc<Pool>,
}

impl FreshProcess {
    /// Returns the subject with these options.
    pub(super) fn backend(&self, options: &Options) -> Result<Box<dyn Backend>, BackendError> {
        backends::in_pool(&self.name, options, Arc::clone(&self.pool))
    }

    /// Returns the subject without the faults at its call: earlier runs are stored as it was called.
    pub(super) fn called(&self, options: &Options) -> Result<Box<dyn Backend>, BackendError> {
        let called = SubjectName::from(self.name.as_str()).called();
        backends::in_pool(&called.name(), options, Arc::clone(&self.pool))
    }
}

/// Subject of the emulated kernel's canary: the kernel with a planted fault.
#[derive(Clone, Debug)]
pub struct PlantedSubjects(String);

impl Default for PlantedSubjects {
    fn default() -> PlantedSubjects {
        PlantedSubjects(backends::canary().name().to_owned())
    }
}

impl Subjects for PlantedSubjects {
    fn name(&self) -> &str {
        &self.0
    }

    fn options(&self, _seed: u64) -> Options {
        Options::new()
    }

    fn backend(&self, _options: &Options) -> Result<Box<dyn Backend + '_>, BackendError> {
        Ok(backends::canary())
    }
}

#[cfg(test)]
mod tests {
    use super::super::Shard;
    use super::*;
    use seamproof_judge::generate::Profile;

    /// Test that the emulated kernel has its own fault, and that any other subject is called wrongly: with its own
    /// options, and by a name that replays.
    #[test]
    fn the_canary_of_a_subject_is_its_own() {
        let plan = Plan {
            seed: 1,
            profile: Profile::Large,
            cases: Some(1),
            time: None,
            shard: Shard::WHOLE,
            jobs: 1,
        };
        let wrong = |name: &str| {
            let subject = Registered::new(name).expect("a subject");
            subject.canary(&plan).expect("it can be made").expect("a wrong call shows").wrong
        };
        for name in ["emulated", "emulated@worker", "emulated:merge=deferred"] {
            assert_eq!(wrong(name).name(), "window-off-by-one", "{name}");
        }
        let called = wrong("cuda:attention=simple");
        assert_eq!(called.name(), "cuda~call-window-narrower");
        assert_eq!(called.options(7).get("attention").map(String::as_str), Some("simple"));
    }
}
