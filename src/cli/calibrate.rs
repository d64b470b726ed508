//! `seamproof calibrate`: finds a subject's numeric profile.

use std::path::PathBuf;

use super::CliError;
use super::exit::Exit;
use super::options::seed;
use super::output::{print, print_line};
use crate::backends;
use crate::campaign::{Registered, Subjects};
use seamproof_judge::calibrate::{CASES, Calibration, CalibrationOutcome, DOUBT_MAX, lock_cases_min};
use seamproof_judge::profile::Lock;
use seamproof_judge::prose::counted;
use seamproof_judge::subject::{Backend, RunError};

const EXAMPLES: &str = "\
Examples:
  seamproof calibrate emulated                                         the table alone
  seamproof calibrate emulated --lock judge/profiles/emulated.json    and the file, to be committed
  seamproof calibrate emulated --check                                 whether the locked profile still holds
  seamproof calibrate emulated:kv_tile=32                              the table of these options; nothing to lock
  seamproof calibrate emulated-fp8:sequence=cudnn --check              the profile of this sequence: each has its own
  seamproof calibrate python:kernel.py --lock                          and kernel.lock.json beside it";

#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(super) struct Args {
    /// The subject, NAME or NAME:OPTION=VALUE,…
    #[arg(value_name = "BACKEND")]
    backend: String,
    /// Number of dithered cases to run; --lock needs at least 98, as fewer may not tell a wrong profile from the right
    /// one
    #[arg(long, value_name = "N", default_value_t = CASES, value_parser = clap::value_parser!(u64).range(1..))]
    cases: u64,
    /// Seed of all cases: a number, 0x and hex digits, or a whole commit hash
    #[arg(long, value_name = "S", value_parser = seed, default_value = "1")]
    seed: u64,
    /// Write the profile to this file, if it is unique; without FILE, to the lock file beside a Python subject's
    /// adapter
    #[arg(long, value_name = "FILE", num_args = 0..=1, conflicts_with = "check")]
    lock: Option<Option<PathBuf>>,
    /// Compare with the locked profile
    #[arg(long)]
    check: bool,
}

pub(super) fn run(args: &Args) -> Result<Exit, CliError> {
    // Wrong arguments are told before anything runs.
    let subject =
        Registered::new(&args.backend).map_err(|error| CliError::Usage(format!("BACKEND: {error}")))?;
    let name = subject.name();
    let profile = backends::profile_name(name, subject.fixed());
    let Some(profile) = profile.or_else(|| (args.lock.is_none() && !args.check).then(|| name.to_owned()))
    else {
        return Err(CliError::Usage(format!(
            "--lock and --check: a profile is of {name} whatever its options; name {name} alone, not '{}'",
            args.backend
        )));
    };
    let make = |index: u64| {
        let options = backends::with_one_profile(name, subject.fixed(), subject.options(index));
        backends::by_name(name, &options)
    };
    let file = match args.lock.clone() {
        Some(None) => Some(backends::lock_file(name).ok_or_else(|| {
            CliError::Usage(format!(
                "--lock: {name} has no adapter that a lock file could lie beside; name a FILE"
            ))
        })?),
        Some(file) => file,
        None => None,
    };
    let least = lock_cases_min();
    if args.lock.is_some() && args.cases < least {
        return Err(CliError::Usage(format!(
            "--lock: {} may leave a wrong profile; give --cases at least {least}",
            counted(args.cases, "case")
        )));
    }
    let instance = |index: u64| make(index).map_err(|error| RunError::Infrastructure(error.to_string()));
    let calibration = Calibration::run(instance, args.cases, args.seed)
        .map_err(|error| CliError::Usage(format!("{}: {error}", args.backend)))?;
    print(&calibration);
    let outcome = calibration.outcome(&profile, args.seed);
    match &outcome {
        CalibrationOutcome::Unique(_) => print_line("profile   one candidate explains every case"),
        CalibrationOutcome::None => {
            print_line("profile   no candidate explains every case: tiers W and T only");
        }
        CalibrationOutcome::Refused(why) => print_line(&format_args!("profile   none: {why}")),
        CalibrationOutcome::Several(several) => print_line(&format_args!(
            "profile   {several} candidates explain every case: these cases do not tell them apart, and more may not either"
        )),
    }
    match (&file, outcome) {
        (Some(_), CalibrationOutcome::Unique(_)) if calibration.doubt() > DOUBT_MAX => {
            print_line(&format_args!(
                "locked    nothing: the chance that another candidate is left is {:.0e}, and {DOUBT_MAX:.0e} is taken; \
                 give more --cases",
                calibration.doubt()
            ));
            Ok(Exit::TooLittle)
        }
        (Some(file), CalibrationOutcome::Unique(lock)) if lock.cases >= least => {
            write(file, &lock).map(|()| Exit::Held)
        }
        (Some(_), CalibrationOutcome::Unique(lock)) => {
            print_line(&format_args!(
                "locked    nothing: {} of {} cases were judged, {least} is enough; give more --cases",
                lock.cases, args.cases
            ));
            Ok(Exit::TooLittle)
        }
        (Some(_), _) => Ok(Exit::TooLittle),
        (None, outcome) if args.check => {
            let subject = make(0).map_err(|error| CliError::Usage(format!("BACKEND: {error}")))?;
            Ok(check(&*subject, &outcome, !calibration.backward.is_empty()))
        }
        (None, _) => Ok(Exit::Held),
    }
}

fn write(file: &PathBuf, lock: &Lock) -> Result<(), CliError> {
    let failed = |source| CliError::Lock { file: file.display().to_string(), source };
    std::fs::write(file, lock.text()).map_err(failed)?;
    print_line(&format_args!("locked    {}", file.display()));
    Ok(())
}

/// Whether what was found is what is locked, whatever the cases that found it. A forward alone says nothing of tiles'
/// factors.
fn check(backend: &dyn Backend, outcome: &CalibrationOutcome, has_backward: bool) -> Exit {
    let Some(lock) = backend.lock() else {
        let name = backend.name();
        print_line(&format_args!("check     no profile of {name} is locked: there is nothing to hold it to"));
        return Exit::TooLittle;
    };
    if lock.versions != backend.versions() {
        print_line(&format_args!(
            "check     locked for other versions: {:?}, and {:?} run; tier R is silent",
            lock.versions,
            backend.versions()
        ));
    }
    let same = |found: &Lock, lock: &Lock| {
        let (seed, cases, versions) = (lock.seed, lock.cases, lock.versions.clone());
        // The name of a file depends on where it is named from.
        let tile_factor = if has_backward { found.tile_factor } else { lock.tile_factor };
        Lock { seed, cases, versions, backend: lock.backend.clone(), tile_factor, ..found.clone() } == *lock
    };
    let held = matches!(outcome, CalibrationOutcome::Unique(found) if same(found, &lock));
    print_line(if held {
        "check     as locked"
    } else {
        "check     numerics changed since the profile was locked"
    });
    if held { Exit::Held } else { Exit::Finding }
}
