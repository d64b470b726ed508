//! `seamproof faults`: plants the catalogue's faults and reports what catches them.

use std::collections::BTreeSet;
use std::path::PathBuf;

use seamproof_simulator::faults::{ABSENT, Catcher, FaultRecord};

use super::CliError;
use super::exit::Exit;
use super::open::open_page;
use super::output::print_line;
use super::worker;
use crate::campaign::{Registered, Subjects};
use crate::faults::{
    CASES_MAX, Effort, First, MEDIAN_CASES_MAX, NotRun, RungScore, Score, Scored, Suspect, reason, score_all,
};
use crate::look::power_page;
use crate::nearest::did_you_mean;
use crate::paste::typed;
use crate::record::{is_stdout, write_whole};
use seamproof_judge::ladder::faults::{self as judge_faults, FAULTS as JUDGE_FAULTS, JudgeFault, JudgeScore};
use seamproof_judge::prose::counted;
use seamproof_judge::subjects::{SubjectName, listed};

/// Default number of streams of a score.
const SEEDS: u64 = 5;
/// Most faults seen by one rung alone that are named.
const NAMED_MAX: usize = 10;

const EXAMPLES: &str = "\
Examples:
  seamproof faults                                the list: what each fault imitates, and where that happened
  seamproof faults --score                        plant each; what catches it, how soon, how small the repro is; what
                                                  each rung of the judge caught, and what only it caught
  seamproof faults --score --quick                one stream of problems, one case for all rungs, no repro
  seamproof faults --score --quick --html power.html
                                                  the same as a page: a matrix of faults and rungs
  seamproof faults --score --only merge-twice,softcap-missing --seeds 1
  seamproof faults --gpu --score --quick --workers 16
                                                  the faults in kernels, on a Hopper GPU
  seamproof faults --score --quick --backend cuda
                                                  the faults at the call, on the kernels of a Hopper GPU as they are:
                                                  called wrongly, they answer with their own rounding
  seamproof faults --score --backend emulated@worker:arithmetic=hopper --only call-scale-off

With --backend only the faults at the call (call-…) are scored, on that backend. Faults in schedules, stages of a kernel and
tables are planted in the emulated kernel, where these are data; faults in kernel sources are scored with --gpu;
and the judge's own faults know no backend. A problem counts where the fault changes the exact answer in its formats, and
where nothing is found without the fault. Options that BACKEND does not fix are drawn for each fault and seed; sizes are
those of `seamproof run`.

The score's exit code is 0 where every fault is caught by a rung that it names and, of the whole catalogue, the median of
cases to the first finding is at most 20; 70 where some could not be run and no other was missed; otherwise 2.";

#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(super) struct Args {
    /// List the faults, and the known bugs that are not among them (the default)
    #[arg(long, conflicts_with = "score")]
    list: bool,
    /// Plant each fault and look for it with the checker and with every rung of the judge
    #[arg(long)]
    score: bool,
    /// One stream of problems for each fault, and no repro
    #[arg(long, requires = "score", conflicts_with = "seeds")]
    quick: bool,
    /// List or score these faults alone, separated by commas
    #[arg(long, value_name = "ID", value_delimiter = ',')]
    only: Vec<String>,
    /// Take the faults in kernels for a GPU instead of the others; scoring them needs a GPU
    #[arg(long)]
    gpu: bool,
    /// Score the faults at the call on this backend, NAME or NAME:OPTION=VALUE,…, instead of the whole catalogue
    #[arg(long, value_name = "BACKEND", requires = "score", conflicts_with = "gpu")]
    backend: Option<String>,
    /// Write the score as a page too: which rung catches what, as a matrix
    #[arg(long, value_name = "FILE", requires = "score")]
    html: Option<PathBuf>,
    /// Open the page in a browser
    #[arg(long, requires = "html")]
    open: bool,
    /// Streams of problems of which the median is taken
    #[arg(long, value_name = "N", default_value_t = SEEDS, value_parser = clap::value_parser!(u64).range(1..))]
    seeds: u64,
    #[command(flatten)]
    workers: worker::WorkerOptions,
}

pub(super) fn run(args: &Args) -> Result<Exit, CliError> {
    if args.html.as_deref().is_some_and(is_stdout) {
        return Err(CliError::Usage("--html: standard output has the score; name a file".to_owned()));
    }
    args.workers.configure();
    let (suspects, judged) = chosen(args)?;
    if !args.score {
        list(&suspects, &judged, args.only.is_empty() && !args.gpu);
        return Ok(Exit::Held);
    }
    // A fault that cannot be run must not count as one that was missed. All that need a device are of one kind, and those
    // that were named beside others are the last.
    for suspect in [suspects.first(), suspects.last()].into_iter().flatten() {
        let subject = suspect.subject(0)?;
        let start = |what| CliError::Start { name: SubjectName::from(subject.name()).called().name(), what };
        subject.ready().map_err(start)?;
    }
    let effort = if args.quick { Effort::QUICK } else { Effort::whole(args.seeds) };
    let scored = Scored {
        judge: judge_faults::score(&judged).map_err(CliError::Usage)?,
        subjects: score_all(&suspects, effort),
    };
    scored.subjects.iter().for_each(print_score);
    scored.judge.iter().for_each(print_judge_score);
    if args.only.is_empty() && !args.gpu {
        print_rungs(&scored);
    }
    let exit = summarise(&scored, args.only.is_empty());
    if let Some(out) = &args.html {
        write_whole(out, &power_page(&scored))?;
        print_line(&format_args!("page: {}", out.display()));
        if args.open {
            open_page(out);
        }
    }
    Ok(exit)
}

/// Returns the faults in subjects and in the judge that are asked for.
fn chosen(args: &Args) -> Result<(Vec<Suspect>, Vec<JudgeFault>), CliError> {
    let (mut suspects, mut judged): (Vec<Suspect>, Vec<JudgeFault>) = match &args.backend {
        Some(backend) => (Suspect::at_calls_of(right(backend)?).collect(), Vec::new()),
        None if args.gpu => (Suspect::on_gpu().collect(), Vec::new()),
        None => (Suspect::all().collect(), JUDGE_FAULTS.to_vec()),
    };
    if args.only.is_empty() {
        return Ok((suspects, judged));
    }
    let ids: Vec<&str> =
        suspects.iter().map(Suspect::id).chain(judged.iter().map(|fault| fault.id)).collect();
    let mut more = Vec::new();
    for id in args.only.iter().filter(|id| !ids.contains(&id.as_str())) {
        let unlisted: Vec<Suspect> = match &args.backend {
            None => Suspect::by_id(id).into_iter().collect(),
            Some(_) => Vec::new(),
        };
        if unlisted.is_empty() {
            let kind = if args.backend.is_some() { "fault at the call" } else { "fault" };
            let known = format!("`{}` lists them", typed("seamproof faults"));
            let like = did_you_mean(id, ids.iter().copied());
            return Err(CliError::NoFault { option: "--only", kind, id: id.clone(), like, known });
        }
        more.extend(unlisted);
    }
    suspects.retain(|suspect| args.only.iter().any(|id| id == suspect.id()));
    judged.retain(|fault| args.only.iter().any(|id| id == fault.id));
    suspects.extend(more);
    Ok((suspects, judged))
}

/// Returns the named subject, which is to be called wrongly.
fn right(backend: &str) -> Result<Registered, CliError> {
    let subject = Registered::new(backend)?;
    match SubjectName::from(subject.name()).called().name() {
        name if name == subject.name() => Ok(subject),
        name => Err(CliError::Usage(format!(
            "--backend: {} is called wrongly already; name {name}, and one fault with --only",
            subject.name()
        ))),
    }
}

fn list(suspects: &[Suspect], judged: &[JudgeFault], all: bool) {
    let records = suspects.iter().map(Suspect::record).chain(judged.iter().map(JudgeFault::record));
    for FaultRecord { id, imitates, source, .. } in records {
        print_line(&format_args!("{id:<34} {imitates}\n{:<34} {source}", ""));
    }
    if all {
        print_line("\nNot planted, by number in docs/known-bugs.md:");
        for absent in ABSENT {
            let entries: Vec<String> = absent.entries.iter().map(ToString::to_string).collect();
            print_line(&format_args!("{:<34} {}", entries.join(" "), absent.reason));
        }
    }
}

/// Returns the outcome of a fault in a word.
fn mark_of(score: &Score) -> &'static str {
    match score.not_run {
        Some(NotRun::Excluded(_)) => "excluded",
        Some(NotRun::Failed(_)) => "NOT RUN",
        None => mark(score.caught()),
    }
}

fn mark(caught: bool) -> &'static str {
    if caught { "caught" } else { "MISSED" }
}

/// Returns what found a fault, with the median cases and seconds that it took.
fn found(firsts: &[First]) -> String {
    let Some((cases, seconds)) = Score::median(firsts) else { return "-".to_owned() };
    let by: BTreeSet<String> = firsts.iter().map(First::by).collect();
    let by: Vec<String> = by.into_iter().collect();
    format!("{} {cases}/{seconds:.3}s", by.join(", "))
}

fn print_score(score: &Score) {
    let repro = score.repro.map_or("-".to_owned(), |repro| {
        format!("{} seq, {} tokens, cp {}", repro.sequences, repro.tokens, repro.cp)
    });
    print_line(&format_args!(
        "{} {:<34} {:<22} {:<28} {repro:<26} seen by {}",
        mark_of(score),
        score.suspect.id(),
        found(&score.schedule),
        found(&score.campaign),
        names(&score.rungs)
    ));
    if let Some(first) = score.schedule.first() {
        print_line(&format_args!("       {}", first.what));
    }
    if let Some(why) = &score.not_run {
        print_line(&format_args!("       {why}"));
    }
    if let Some(options) = score.suspect.options(0).filter(|_| !score.caught() && !score.is_excluded()) {
        print_line(&format_args!("       on seed 0 with {}", listed(&options)));
    }
    let flawed: usize = score.campaign.iter().map(|first| first.flawed).sum();
    if flawed > 0 {
        print_line(&format_args!(
            "       not counted: {} on which the subject is wrong without the fault, too",
            counted(flawed, "case")
        ));
    }
}

fn names<'a>(rungs: impl IntoIterator<Item = &'a Catcher>) -> String {
    let names: Vec<&str> = rungs.into_iter().map(|rung| rung.name()).collect();
    names.join(", ")
}

/// Prints the score of a fault in the judge, which is caught by probes that the faulty judge lets pass.
fn print_judge_score(score: &JudgeScore) {
    let passed: Vec<String> = score.missed.iter().map(|(what, rung)| format!("{what} ({rung})")).collect();
    print_line(&format_args!(
        "{} {:<34} blinds {}; lets pass: {}",
        mark(score.caught()),
        score.fault.id,
        names(score.fault.caught_by),
        passed.join("; ")
    ));
}

/// Prints what each rung saw of the faults in subjects, and why a rung is kept that alone saw none.
fn print_rungs(scored: &Scored) {
    let blinding =
        |rung: Catcher| scored.judge.iter().filter(|score| score.fault.caught_by.contains(&rung)).count();
    print_line(&format_args!("\n{:<12}{:>6}{:>7}{:>7}{:>8}", "rung", "saw", "first", "alone", "blinded"));
    for RungScore { rung, saw, first, alone } in RungScore::table(&scored.subjects) {
        let said = match alone.len() {
            0 => format!("kept because it {}", reason(rung)),
            1..=NAMED_MAX => alone.join(" "),
            _ => String::new(),
        };
        let counts = format!("{saw:>6}{first:>7}{:>7}{:>8}", alone.len(), blinding(rung));
        print_line(format!("{:<12}{counts}  {said}", rung.name()).trim_end());
    }
    print_line(
        "saw: it condemned an examined case; alone: no other rung did; blinded: faults in the judge that disable it\n",
    );
}

fn summarise(scored: &Scored, whole: bool) -> Exit {
    let (missed, not_run) = (scored.missed(), scored.not_run());
    let median = scored.median_cases().map_or("-".to_owned(), |cases| cases.to_string());
    let slow = scored.subjects.iter().filter_map(Score::cases).max();
    print_line(&format_args!(
        "faults in subjects {} · in the judge {} · missed {} · cases to the first finding: median {median}, most {} (of at \
         most {CASES_MAX})",
        scored.subjects.len(),
        scored.judge.len(),
        missed.len(),
        slow.map_or("-".to_owned(), |cases| cases.to_string()),
    ));
    if !missed.is_empty() {
        print_line(&format_args!("missed: {}", missed.join(" ")));
    }
    if !not_run.is_empty() {
        print_line(&format_args!("could not be run: {}", not_run.join(" ")));
    }
    let excluded = scored.excluded();
    if !excluded.is_empty() {
        print_line(&format_args!("excluded by the table: {}", excluded.join(" ")));
    }
    let held = if whole { scored.holds() } else { missed.is_empty() && not_run.is_empty() };
    if held && whole {
        let too = if scored.judge.is_empty() { "" } else { ", those of the judge too" };
        let of = if excluded.is_empty() { "every fault" } else { "every other fault" };
        print_line(&format_args!(
            "{of} is caught by a rung that it names{too}; median cases to the first finding at most \
             {MEDIAN_CASES_MAX}: held"
        ));
    }
    match (held, missed.is_empty(), not_run.is_empty()) {
        (true, ..) => Exit::Held,
        (false, true, false) => Exit::Internal,
        // Every fault is excluded: nothing was looked for.
        (false, true, true) if scored.median_cases().is_none() => Exit::TooLittle,
        _ => Exit::Finding,
    }
}
