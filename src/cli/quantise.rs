//! `seamproof quantise`: judges a quantiser on drawn problems, or on stored ones.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use seamproof_judge::case::{CASE_VERSION, CaseError};
use seamproof_judge::files;
use seamproof_judge::finding::{Check, Finding};
use seamproof_judge::generate::Limits;
use seamproof_judge::ladder::ELEMENTS_MAX;
use seamproof_judge::prose;
use seamproof_judge::quantise::{Judged, QuantisationCase, Quantiser, draw, judge, shrink};
use seamproof_oracle::TensorName;
use seamproof_oracle::quantise::Quantisation;

use super::CliError;
use super::exit::Exit;
use super::options::{random_seed, seed};
use super::output::{complain, print_line};
use super::progress;
use super::run::stopped_by_signals;
use crate::backends::{EMULATED_QUANTISER, quantiser};
use crate::campaign::Control;
use crate::paste::{quantise_command, typed};
use crate::record::{make_dir, write_whole};

/// Longest file that is read.
const BYTES_MAX: u64 = 1 << 24;
/// Most findings that are shrunk and kept, each of a check and tensor of its own.
const KEPT_MAX: usize = 4;

const EXAMPLES: &str = "\
Examples:
  seamproof quantise                                    the emulated quantiser on drawn problems
  seamproof quantise --backend cuda --cases 20000       the kernels, which need a Hopper GPU
  seamproof quantise --backend cuda:codes=turned        their turned copies
  seamproof quantise --backend emulated+amax-over-padding
                                                        a planted fault, found and made small
  seamproof quantise corpus/quantisations               stored ones";

#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(super) struct Args {
    /// Stored quantisations or directories of them, instead of drawn ones
    #[arg(value_name = "FILE|DIR", conflicts_with_all = ["cases", "seed"])]
    paths: Vec<PathBuf>,
    /// Quantiser: emulated, or cuda with codes=rows, turned or beside; each also with +ID, a planted fault [default: a
    /// stored one's own, or emulated]
    #[arg(long, value_name = "NAME")]
    backend: Option<String>,
    /// Number of drawn quantisations
    #[arg(long, value_name = "N", default_value_t = 4000, value_parser = clap::value_parser!(u64).range(1..))]
    cases: u64,
    /// Seed of the draws; random where it is left out
    #[arg(long, value_parser = seed)]
    seed: Option<u64>,
    /// Directory for findings of drawn ones, each made small
    #[arg(long, value_name = "DIR", default_value = "seamproof.out-quantise", conflicts_with = "paths")]
    out: PathBuf,
}

/// Answer to a quantisation.
enum Asked {
    Held,
    Wrong(Box<Finding>),
    /// It was not asked, for this reason: ranks cannot share its rows, a value is not finite, or it is too large.
    Not(String),
}

/// Counts of quantisations by outcome.
#[derive(Default)]
struct Tally {
    right: usize,
    failed: usize,
    crashed: usize,
    malformed: usize,
    unasked: usize,
    unreadable: usize,
    /// What was kept: its check and its tensor.
    kept: Vec<(Check, Option<TensorName>)>,
}

pub(super) fn run(args: &Args) -> Result<Exit, CliError> {
    match args.paths.is_empty() {
        true => drawn(args, args.backend.as_deref().unwrap_or(EMULATED_QUANTISER)),
        false => stored(args),
    }
}

fn drawn(args: &Args, name: &str) -> Result<Exit, CliError> {
    let (subject, seed, control) =
        (quantiser(name)?, args.seed.unwrap_or_else(random_seed), stopped_by_signals()?);
    // A folder that cannot be written must not lose a finding later.
    make_dir(&args.out)?;
    print_line(&format_args!("quantise  {name} · seed {seed:#x}"));
    let mut tally = Tally::default();
    let done = progress::of_draws(&control, args.cases, || {
        tally.judge_drawn(args, (name, subject.as_ref()), seed, &control)
    })?;
    print_line(&tally.summary());
    if done < args.cases {
        print_line(&format_args!("stopped   after {done} of {}", args.cases));
    }
    Ok(tally.exit(done == args.cases))
}

/// Quantisers by their names, each made when it is first asked for.
#[derive(Default)]
struct Quantisers(BTreeMap<String, Box<dyn Quantiser>>);

impl Quantisers {
    fn of(&mut self, name: &str) -> Result<&dyn Quantiser, CliError> {
        let Quantisers(made) = self;
        let made = match made.entry(name.to_owned()) {
            Entry::Occupied(made) => made.into_mut(),
            Entry::Vacant(room) => room.insert(quantiser(name)?),
        };
        Ok(&**made)
    }
}

fn stored(args: &Args) -> Result<Exit, CliError> {
    let (mut tally, control, files) = (Tally::default(), stopped_by_signals()?, files_of(&args.paths)?);
    let (mut subjects, mut done) = (Quantisers::default(), 0);
    if let Some(name) = &args.backend {
        subjects.of(name)?;
    }
    for path in files.iter().take_while(|_| !control.stopped()) {
        done += 1;
        // What one file lacks is no reason to leave out the others.
        match tally.judge_stored(path, args.backend.as_deref(), &mut subjects) {
            Ok(line) => print_line(&line),
            Err(error) => {
                complain(&error);
                tally.unreadable += 1;
            }
        }
    }
    print_line(&tally.summary());
    // Whoever names a file wants it judged.
    Ok(tally.exit(done == files.len() && tally.unasked == 0))
}

fn read(path: &Path) -> Result<QuantisationCase, CliError> {
    let bytes =
        files::read(path, BYTES_MAX).map_err(|source| CaseError::Read { path: path.to_owned(), source })?;
    let parsed = QuantisationCase::parse(&bytes);
    Ok(parsed.map_err(|source| CaseError::Parse { path: path.to_owned(), source })?)
}

fn files_of(paths: &[PathBuf]) -> Result<Vec<PathBuf>, CliError> {
    let mut all = Vec::new();
    for path in paths {
        if path.is_dir() {
            let listed =
                files::list(path).map_err(|source| CaseError::Read { path: path.clone(), source })?;
            let found: Vec<PathBuf> = listed.into_iter().filter(|path| files::is_json(path)).collect();
            if found.is_empty() {
                let what = format!("{}: holds no *.json; name a directory of quantisations", path.display());
                return Err(CliError::Usage(what));
            }
            all.extend(found);
        } else {
            all.push(path.clone());
        }
    }
    Ok(all)
}

impl Tally {
    /// Judges drawn quantisations, and returns how many were drawn before the end or a request to stop.
    fn judge_drawn(
        &mut self,
        args: &Args,
        (name, subject): (&str, &dyn Quantiser),
        seed: u64,
        control: &Control,
    ) -> Result<u64, CliError> {
        let limits = Limits::quick();
        for index in 0..args.cases {
            if control.stopped() {
                return Ok(index);
            }
            match draw(seed, index, &limits) {
                None => self.malformed += 1,
                Some(asked) => {
                    if let Asked::Wrong(finding) = self.judge(subject, &asked) {
                        control.failed.fetch_add(1, Ordering::Relaxed);
                        self.keep(args, (name, subject), (seed, index, &asked), *finding)?;
                    }
                }
            }
            control.cases.fetch_add(1, Ordering::Relaxed);
        }
        Ok(args.cases)
    }

    /// Judges a stored quantisation on the named quantiser, or else its own. Returns what is to be said of it.
    fn judge_stored(
        &mut self,
        path: &Path,
        name: Option<&str>,
        subjects: &mut Quantisers,
    ) -> Result<String, CliError> {
        let case = read(path)?;
        let subject = subjects.of(name.or(case.backend.as_deref()).unwrap_or(EMULATED_QUANTISER))?;
        let answer = self.judge(subject, &case.quantisation);
        let (path, words) = (path.display(), prose::describe(&case.quantisation.problem));
        Ok(match answer {
            Asked::Held => format!("held      {path} · {words}"),
            Asked::Not(reason) => format!("not asked {path} · {reason} · {words}"),
            Asked::Wrong(finding) => format!("FAIL      {path} · {finding} · {words}"),
        })
    }

    /// Judges a quantisation, and counts the answer.
    fn judge(&mut self, subject: &dyn Quantiser, asked: &Quantisation) -> Asked {
        let reason = match judge(subject, asked) {
            Judged::Right => {
                self.right += 1;
                return Asked::Held;
            }
            Judged::Wrong(finding) => {
                *(if finding.check.is_end() { &mut self.crashed } else { &mut self.failed }) += 1;
                return Asked::Wrong(finding);
            }
            Judged::Uncut(error) => error.to_string(),
            Judged::NotFinite(error) => error.to_string(),
            Judged::TooLarge(elements) => {
                format!("the problem has {elements} tensor elements; at most {ELEMENTS_MAX} are judged")
            }
        };
        self.unasked += 1;
        Asked::Not(reason)
    }

    /// Shrinks the first finding of each check and tensor, and writes it.
    fn keep(
        &mut self,
        args: &Args,
        (name, subject): (&str, &dyn Quantiser),
        (seed, index, asked): (u64, u64, &Quantisation),
        finding: Finding,
    ) -> Result<(), CliError> {
        let what = (finding.check, finding.tensor);
        if self.kept.len() >= KEPT_MAX || self.kept.contains(&what) {
            return Ok(());
        }
        print_line(&format_args!("FAIL      case {index}: {finding}"));
        self.kept.push(what);
        let (small, finding) = shrink(subject, asked, finding);
        let file = args.out.join(format!("quantise-{seed:016x}-{index}.json"));
        let backend = Some(name.to_owned());
        let case = QuantisationCase { version: CASE_VERSION, story: None, backend, quantisation: small };
        write_whole(&file, &case.to_json())?;
        print_line(&format_args!("smallest  {} · {finding}", prose::describe(&case.quantisation.problem)));
        print_line(&format_args!("recipe    {}", prose::describe_recipe(&case.quantisation)));
        print_line(&format_args!("again:    {}", typed(&quantise_command(&file))));
        if self.kept.len() == KEPT_MAX {
            print_line("others    of further checks and tensors are counted, and not kept");
        }
        Ok(())
    }

    fn summary(&self) -> String {
        let Tally { right, failed, crashed, malformed, unasked, unreadable, .. } = self;
        format!(
            "cases     held {right} · failed {failed} · crashed {crashed} · malformed {malformed} · not asked {unasked} \
             · unreadable {unreadable}"
        )
    }

    fn exit(&self, whole: bool) -> Exit {
        match self {
            Tally { failed: 1.., .. } => Exit::Finding,
            Tally { crashed: 1.., .. } => Exit::Crash,
            Tally { unreadable: 1.., .. } => Exit::Input,
            Tally { right: 0, .. } => Exit::TooLittle,
            _ if !whole => Exit::TooLittle,
            _ => Exit::Held,
        }
    }
}
