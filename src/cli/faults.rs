//! `seamproof faults`: plants the catalogue's faults and reports what catches them.

use std::collections::BTreeSet;
use std::slice;

use seamproof_simulator::faults::{ABSENT, Fault, by_id, catalogue};

use super::CliError;
use super::exit::Exit;
use super::output::print_line;
use crate::backends::{MISCALLS, Miscall, miscall};
use crate::faults::{CASES_MAX, CallScore, First, Score, TABLE_FAULTS, score_all, score_calls};
use crate::judge::faults as judge_faults;

/// Seeds of a score unless told otherwise.
const SEEDS: u64 = 5;

const EXAMPLES: &str = "\
Examples:
  seamproof faults                                the list: what each fault imitates, and where that happened
  seamproof faults --score                        plant each; what catches it, how soon, how small the repro is
  seamproof faults --score --only merge-twice --seeds 1";

#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(super) struct Args {
    /// List the faults, and the real bugs that are not among them (the default)
    #[arg(long, conflicts_with = "score")]
    list: bool,
    /// Plant each fault and look for it with the checker and with the judge
    #[arg(long)]
    score: bool,
    /// One fault
    #[arg(long, value_name = "ID")]
    only: Option<String>,
    /// Streams of problems of which the median is taken
    #[arg(long, value_name = "N", default_value_t = SEEDS, value_parser = clap::value_parser!(u64).range(1..))]
    seeds: u64,
}

pub(super) fn run(args: &Args) -> Result<Exit, CliError> {
    let (faults, miscalls): (Vec<&'static Fault>, &'static [Miscall]) = match &args.only {
        None => (catalogue().collect(), &MISCALLS),
        Some(id) => match (by_id(id), miscall(id)) {
            (Some(fault), _) => (vec![fault], &[]),
            (None, Some(miscall)) => (Vec::new(), slice::from_ref(miscall)),
            (None, None) => return Err(CliError::Usage(format!("--only: there is no fault '{id}'"))),
        },
    };
    if !args.score {
        list(&faults, miscalls, args.only.is_none());
        return Ok(Exit::Held);
    }
    let scores = score_all(&faults, args.seeds);
    scores.iter().for_each(print_score);
    let mut held = faults.is_empty() || summarise(&scores) == Exit::Held;
    held &= print_calls(&score_calls(miscalls, args.seeds));
    if args.only.is_none() {
        held &= print_judge_faults()?;
    }
    Ok(if held { Exit::Held } else { Exit::Finding })
}

/// The table of faults at the call; whether all were caught.
fn print_calls(scores: &[CallScore]) -> bool {
    for score in scores {
        let rungs: Vec<&str> = score.rungs.iter().map(|rung| rung.name()).collect();
        print_line(&format_args!(
            "{} {:<34} {:<40} {}",
            mark(score.caught()),
            score.miscall.id,
            found(&score.firsts),
            rungs.join(", ")
        ));
    }
    let missed = scores.iter().filter(|score| !score.caught()).count();
    if !scores.is_empty() {
        print_line(&format_args!("faults at the call {} · missed {missed}", scores.len()));
    }
    missed == 0
}

/// The table of faults in the judge: a fault is caught by the probes that the faulty judge lets pass.
fn print_judge_faults() -> Result<bool, CliError> {
    let scores = judge_faults::score().map_err(CliError::Usage)?;
    for score in &scores {
        let caught = mark(!score.missed.is_empty());
        print_line(&format_args!("{caught} {:<34} lets pass: {}", score.fault.id, score.missed.join("; ")));
    }
    let missed = scores.iter().filter(|score| score.missed.is_empty()).count();
    print_line(&format_args!("faults in the judge {} · missed {missed}", scores.len()));
    Ok(missed == 0)
}

fn mark(caught: bool) -> &'static str {
    if caught { "caught" } else { "MISSED" }
}

/// What found a fault, and cases and seconds to it in the median.
fn found(firsts: &[First]) -> String {
    let Some((cases, seconds)) = Score::median(firsts) else { return "-".to_owned() };
    let by: BTreeSet<String> = firsts.iter().map(First::by).collect();
    let by: Vec<String> = by.into_iter().collect();
    format!("{} {cases}/{seconds:.3}s", by.join(", "))
}

fn list(faults: &[&Fault], miscalls: &[Miscall], all: bool) {
    for fault in faults {
        print_line(&format_args!("{:<34} {}\n{:<34} {}", fault.id, fault.imitates, "", fault.source));
    }
    for fault in TABLE_FAULTS.iter().filter(|_| all) {
        print_line(&format_args!("{:<34} {}\n{:<34} {}", fault.id, fault.imitates, "", fault.source));
    }
    for miscall in miscalls {
        print_line(&format_args!("{:<34} {}\n{:<34} {}", miscall.id, miscall.imitates, "", miscall.source));
    }
    for fault in judge_faults::FAULTS.iter().filter(|_| all) {
        print_line(&format_args!("{:<34} {}\n{:<34} {}", fault.id, fault.imitates, "", fault.source));
    }
    for absent in ABSENT.iter().filter(|_| all) {
        let entries: Vec<String> = absent.entries.iter().map(ToString::to_string).collect();
        print_line(&format_args!("not here   {}: {}", entries.join(" "), absent.reason));
    }
}

fn print_score(score: &Score) {
    let repro = score.repro.map_or("-".to_owned(), |repro| {
        format!("{} seq, {} tokens, cp {}", repro.sequences, repro.tokens, repro.cp)
    });
    let mark = mark(score.caught());
    print_line(&format_args!(
        "{mark} {:<34} {:<22} {:<28} {repro}",
        score.fault.id,
        found(&score.checker),
        found(&score.campaign)
    ));
    if let Some(first) = score.checker.first() {
        print_line(&format_args!("       {}", first.what));
    }
}

fn summarise(scores: &[Score]) -> Exit {
    let count = |has: &dyn Fn(&Score) -> bool| scores.iter().filter(|score| has(score)).count();
    let missed: Vec<&str> =
        scores.iter().filter(|score| !score.caught()).map(|score| score.fault.id).collect();
    let (checker, campaign) = (count(&|s| !s.checker.is_empty()), count(&|s| !s.campaign.is_empty()));
    let firsts = scores.iter().filter_map(|score| {
        let both = [Score::median(&score.checker), Score::median(&score.campaign)];
        both.into_iter().flatten().map(|(_, seconds)| seconds).min_by(f64::total_cmp)
    });
    let mut seconds: Vec<f64> = firsts.collect();
    seconds.sort_unstable_by(f64::total_cmp);
    let median = seconds.get(seconds.len() / 2).copied().unwrap_or(f64::NAN);
    print_line(&format_args!(
        "faults {} · checker {checker} · campaign {campaign} · missed {} · median {median:.3} s to the first finding, at \
         most {CASES_MAX} cases each",
        scores.len(),
        missed.len()
    ));
    if missed.is_empty() {
        Exit::Held
    } else {
        print_line(&format_args!("missed: {}", missed.join(" ")));
        Exit::Finding
    }
}
