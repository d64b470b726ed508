//! `seamproof large`: packs of tens of thousands of tokens.

use std::collections::BTreeSet;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::exit::Exit;
use super::options::{duration, positive_duration, random_seed, seed};
use super::output::{note, print_line};
use super::run::stopped_by_signals;
use super::{CliError, worker};
use crate::backends::BackendError;
use crate::large::{Bench, Look, Times, is_pack};
use crate::paste::typed;
use crate::record::{DEFAULT_DIR, Findings, RunDir};
use seamproof_judge::case::{Case, InputSource};
use seamproof_judge::failure::Symptom;
use seamproof_judge::finding::{Check, Finding};
use seamproof_judge::hash::mix;
use seamproof_judge::large::{Sizes, TOKENS_MOST, pack};
use seamproof_judge::prose::{counted, describe};
use seamproof_judge::subjects::SubjectName;
use seamproof_judge::verdict::{Margin, Verdict};
use seamproof_oracle::Problem;

const EXAMPLES: &str = "\
Examples:
  seamproof large --backend python:torch_packed.py:flash --time 5m
  seamproof large --backend cuda:attention=tuned --time 5m
  seamproof large --backend python:kernel.py --tokens 131072 --elements 2200000000..4400000000
                                                  tensors of more than 2^31 elements
  seamproof large --backend python:kernel.py --replay case.json
  seamproof large --backend python:kernel.py --tokens 1024..2048 --cases 20
                                                  on a CPU";

/// Drawn rows of each side, where nobody says how many.
const ROWS: usize = 64;
/// Time of a hunt that names neither cases nor a time limit.
const DEFAULT_TIME: Duration = Duration::from_secs(60);

/// Options of drawing, which stored cases leave nothing to do.
const DRAWN: [&str; 7] = ["tokens", "elements", "products", "cases", "time", "seed", "forward"];
/// Fewest tokens. The canary moves results by one row, which changes nothing where there is one.
const TOKENS_LEAST: usize = 2;
/// Packs outside of the table after which a hunt that judged none ends.
const OUTSIDE_MOST: u64 = 1000;

#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(super) struct Args {
    /// The subject: python:FILE or python:FILE:NAME, judged where it runs; any other by the ordinary judge
    #[arg(long, value_name = "NAME")]
    backend: String,
    /// Tokens of a pack, or the least and the most
    #[arg(long, value_name = "N|A..B", value_parser = tokens, default_value = "16384..131072")]
    tokens: RangeInclusive<usize>,
    /// Most elements of q, or the least and the most; heads are added or left out for that [default: 2^28 in a Python
    /// file, 2^24 else]
    #[arg(long, value_name = "N|A..B", value_parser = elements)]
    elements: Option<RangeInclusive<u64>>,
    /// Most visible pairs × query heads × head dimension; heads are left out for that [default: 2^44 in a Python file, 2^36
    /// in workers, 2^30 in this process]
    #[arg(long, value_name = "N")]
    products: Option<u64>,
    /// Drawn rows of queries and of keys, besides those at borders; each in all heads
    #[arg(long, value_name = "N", default_value_t = ROWS)]
    rows: usize,
    /// End after this many packs
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    cases: Option<u64>,
    /// Begin no pack after this long [default: 60s, without --cases]
    #[arg(long, value_name = "TIME", value_parser = positive_duration)]
    time: Option<Duration>,
    /// Seed of all packs [default: random]
    #[arg(long, value_name = "S", value_parser = seed)]
    seed: Option<u64>,
    /// Judge the forward alone
    #[arg(long)]
    forward: bool,
    /// Longest time for making a finding smaller; 0s leaves all as they were drawn
    #[arg(long, value_name = "TIME", value_parser = duration, default_value = "2m")]
    shrink: Duration,
    /// Judge these stored cases instead of drawing any
    #[arg(long, value_name = "FILE", conflicts_with_all = DRAWN)]
    replay: Vec<PathBuf>,
    /// Directory of findings [default: seamproof.out]. That of an earlier campaign is renamed to DIR.1, DIR.2, …
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    #[command(flatten)]
    workers: worker::WorkerOptions,
}

/// Reads a number of tokens, or a range.
fn tokens(text: &str) -> Result<RangeInclusive<usize>, String> {
    let (least, most) = text.split_once("..").unwrap_or((text, text));
    let number = |text: &str| text.parse::<usize>().map_err(|_| format!("'{text}' is no number of tokens"));
    let (least, most) = (number(least)?, number(most)?);
    match (TOKENS_LEAST..=TOKENS_MOST).contains(&least) && (least..=TOKENS_MOST).contains(&most) {
        true => Ok(least..=most),
        false => Err(format!("use numbers from {TOKENS_LEAST} to {TOKENS_MOST}, the smaller one first")),
    }
}

/// Reads a largest number of elements, or a range.
fn elements(text: &str) -> Result<RangeInclusive<u64>, String> {
    let (least, most) = text.split_once("..").unwrap_or(("0", text));
    let number = |text: &str| text.parse::<u64>().map_err(|_| format!("'{text}' is no number of elements"));
    let (least, most) = (number(least)?, number(most)?);
    if least <= most { Ok(least..=most) } else { Err("write the smaller number first".to_owned()) }
}

pub(super) fn run(args: &Args) -> Result<Exit, CliError> {
    args.workers.configure();
    let name: SubjectName = args.backend.parse().map_err(BackendError::from)?;
    let stored = args.replay.iter().map(|file| stored(file)).collect::<Result<Vec<Problem>, CliError>>()?;
    let bench = Bench::new(&name, args.rows)?;
    bench.backend().ready().map_err(|what| CliError::Start { name: args.backend.clone(), what })?;
    let control = stopped_by_signals()?;
    let dir = RunDir::create(args.out.as_deref().unwrap_or(DEFAULT_DIR.as_ref()))?;
    let mut hunt = Hunt {
        bench,
        backend: args.backend.clone(),
        findings: dir.findings()?,
        rows: args.rows,
        is_stopped: &|| control.stopped(),
        shrink: args.shrink,
        seen: BTreeSet::new(),
        tally: Tally::default(),
    };
    let ended = if stored.is_empty() { hunt.draw(args) } else { hunt.replay(&stored) };
    print_line(&hunt.tally);
    if hunt.tally.is_interrupted {
        print_line("too little run: interrupted");
    }
    ended.map(|()| hunt.tally.exit())
}

/// Returns the problem of a stored case.
fn stored(file: &Path) -> Result<Problem, CliError> {
    let case = Case::load(file)?;
    let is_drawn = is_pack(&case.problem) && case.inputs == InputSource::Generated;
    if is_drawn && case.before.is_empty() {
        return Ok(case.problem);
    }
    let what = match is_drawn {
        true => "a case that needs other runs before it; use `seamproof replay`",
        false => {
            "no pack of one rank whose inputs can be drawn where the subject runs; use `seamproof replay`"
        }
    };
    Err(CliError::Usage(format!("{}: {what}", file.display())))
}

/// A hunt in progress.
struct Hunt<'a> {
    bench: Bench,
    /// The subject as it was named, with its options.
    backend: String,
    findings: Findings,
    /// Number of drawn rows of each side.
    rows: usize,
    is_stopped: &'a dyn Fn() -> bool,
    /// Longest time for making a finding smaller.
    shrink: Duration,
    /// Symptoms that were made smaller.
    seen: BTreeSet<Symptom>,
    tally: Tally,
}

impl Hunt<'_> {
    fn draw(&mut self, args: &Args) -> Result<(), CliError> {
        let seed = args.seed.unwrap_or_else(random_seed);
        let time = args.time.or(args.cases.is_none().then_some(DEFAULT_TIME));
        print_line(&format_args!("seed      {seed:#x}"));
        let sizes = Sizes {
            tokens: args.tokens.clone(),
            elements: args.elements.clone().unwrap_or(0..=self.bench.elements()),
            products: args.products.unwrap_or(self.bench.products()),
            backward: !args.forward,
        };
        let table = self.bench.backend().declaration().table;
        let start = Instant::now();
        for case in 0..args.cases.unwrap_or(u64::MAX) {
            if self.tally.canaries.iter().any(|canary| canary.is_missed(LOOKS_MAX))
                || time.is_some_and(|time| start.elapsed() >= time)
                || self.is_interrupted()
            {
                break;
            }
            match pack(seed, case, &sizes, &table) {
                Some(problem) => self.judge(&format!("case {case}"), &problem)?,
                None => self.tally.outside += 1,
            }
            if self.tally.judged == 0 && self.tally.outside == OUTSIDE_MOST {
                print_line(&format_args!(
                    "too little run: {OUTSIDE_MOST} packs are outside of the subject's table or too large; name other --tokens or --elements"
                ));
                break;
            }
        }
        Ok(())
    }

    /// Whether a signal ends the hunt before its time.
    fn is_interrupted(&mut self) -> bool {
        self.tally.is_interrupted = (self.is_stopped)();
        self.tally.is_interrupted
    }

    /// Judges a pack that holds once more, with its results moved by one row. Until that was a finding once, the packs
    /// that hold prove nothing. Packs whose every row is known are judged in another way, and have a canary of their
    /// own.
    fn look_for_canary(&mut self, problem: &Problem, is_exact: bool) -> Result<(), CliError> {
        let canary = &mut self.tally.canaries[usize::from(is_exact)];
        if canary.is_found || canary.looks == LOOKS_MAX {
            return Ok(());
        }
        canary.looks += 1;
        let look = self.bench.canary(problem);
        if (self.is_stopped)() {
            return Ok(());
        }
        match (&look, look.finding()) {
            // A run without results is the subject's own failure, and so is what no moved row explains.
            (Look::Silent(_), Some(finding)) => return self.found(problem, finding),
            (Look::Decided(..), Some(finding)) if finding.check == Check::Structure => {
                return self.found(problem, finding);
            }
            (_, Some(finding)) => {
                canary.is_found = true;
                print_line(&format_args!("canary    found: results moved by one row: {finding}"));
            }
            (_, None) if canary.looks == LOOKS_MAX => {
                print_line("canary    missed: results that were moved by one row hold");
            }
            (_, None) => {}
        }
        Ok(())
    }

    fn replay(&mut self, stored: &[Problem]) -> Result<(), CliError> {
        for (index, problem) in stored.iter().enumerate() {
            if self.is_interrupted() {
                break;
            }
            self.judge(&format!("file {index}"), problem)?;
        }
        Ok(())
    }

    fn judge(&mut self, name: &str, problem: &Problem) -> Result<(), CliError> {
        let look = self.bench.look(problem);
        // Workers are stopped with the hunt.
        let says_nothing =
            matches!(look, Look::Silent(_)) || look.finding().is_some_and(|f| f.check.is_end());
        if says_nothing && self.is_interrupted() {
            print_line(&format_args!("{name:<9} {} · interrupted", describe(problem)));
            return Ok(());
        }
        print_line(&format_args!("{name:<9} {} · {}", describe(problem), words(&look)));
        match &look {
            Look::Judged(_, times) | Look::Decided(_, times) => {
                self.tally.judged += 1;
                self.tally.kernel += times.kernel;
                self.tally.judging += times.judging;
            }
            Look::Silent(Verdict::Finding(_)) => self.tally.judged += 1,
            Look::Silent(Verdict::Refused(_) | Verdict::TooLarge(_)) => self.tally.outside += 1,
            Look::Silent(_) => self.tally.internal += 1,
        }
        match (&look, look.finding()) {
            (_, Some(finding)) => self.found(problem, finding),
            (Look::Judged(judged, _), None) => self.look_for_canary(problem, judged.exact > 0),
            (Look::Decided(..), None) => self.look_for_canary(problem, problem.mode.is_exact()),
            (Look::Silent(_), None) => Ok(()),
        }
    }

    /// Stores a finding: as it was drawn, and the smallest case that was found from there.
    fn found(&mut self, problem: &Problem, finding: &Finding) -> Result<(), CliError> {
        self.tally.found += 1;
        self.tally.ended += usize::from(finding.check.is_end());
        print_line(&format_args!("  finding {finding}"));
        let symptom = Symptom::of(finding);
        if !self.seen.insert(symptom) {
            return Ok(());
        }
        let name = format!("{}-{:08x}", symptom.name(), mix(problem.data_seed) as u32);
        let large = format!("large-{name}");
        self.findings.record(&large, &self.bench.case(problem, finding))?;
        print_line(&format_args!("  again   {}", self.again(&large)));
        if self.shrink == Duration::ZERO {
            return Ok(());
        }
        let (start, shrink, is_stopped) = (Instant::now(), self.shrink, self.is_stopped);
        let is_over = || is_stopped() || start.elapsed() >= shrink;
        let mut last = String::new();
        let mut step = |smaller: &Problem| {
            let words = describe(smaller);
            if words != last {
                note(&format_args!("  step    {words}"));
                last = words;
            }
        };
        let (case, is_ordinary) = self.bench.smallest(problem, finding, &is_over, &mut step);
        self.findings.record(&name, &case)?;
        print_line(&format_args!("  small   {}", describe(&case.problem)));
        if let Some(found) = &case.found {
            print_line(&format_args!("          {found}"));
        }
        let replay = match is_ordinary {
            true => typed(&self.findings.replay(&name, &case)),
            false => format!("{} (the ordinary judge does not show it)", self.again(&name)),
        };
        print_line(&format_args!("  replay  {replay}"));
        Ok(())
    }

    /// Returns the command that judges a stored pack again, with the same rows.
    fn again(&self, name: &str) -> String {
        let (backend, file) = (&self.backend, self.findings.path(name));
        let rows = if self.rows == ROWS { String::new() } else { format!(" --rows {}", self.rows) };
        typed(&format!("seamproof large --backend {backend}{rows} --replay {}", file.display()))
    }
}

/// Number of packs in which a canary is looked for.
const LOOKS_MAX: u64 = 3;

/// Canary of one way of judging.
#[derive(Clone, Copy, Default)]
struct Canary {
    /// Number of packs in which it was looked for.
    looks: u64,
    is_found: bool,
}

impl Canary {
    /// Whether it was looked for so often, and not found.
    fn is_missed(&self, looks: u64) -> bool {
        self.looks >= looks && !self.is_found
    }
}

/// Counts of a hunt.
#[derive(Default)]
struct Tally {
    judged: u64,
    /// Packs that the table does not take, or that are too large for the judge.
    outside: u64,
    internal: u64,
    is_interrupted: bool,
    found: usize,
    /// Findings that are the end of a process.
    ended: usize,
    kernel: Duration,
    judging: Duration,
    /// The canary of packs that are judged by bounds alone, and that of packs whose every row is known.
    canaries: [Canary; 2],
}

impl Tally {
    fn exit(&self) -> Exit {
        match self {
            Tally { found, ended, .. } if found > ended => Exit::Finding,
            Tally { ended: 1.., .. } => Exit::Crash,
            Tally { internal: 1.., .. } => Exit::Internal,
            Tally { judged: 0, .. } | Tally { is_interrupted: true, .. } => Exit::TooLittle,
            Tally { canaries, .. } if canaries.iter().any(|canary| canary.is_missed(1)) => Exit::CanaryMissed,
            _ => Exit::Held,
        }
    }
}

impl std::fmt::Display for Tally {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let ratio = self.judging.as_secs_f64() / self.kernel.as_secs_f64().max(1e-9);
        write!(
            f,
            "{} judged, {}, {} outside of the table or too large, {} not judged · kernel {:.3} s, judging {:.3} s: {ratio:.1} times",
            counted(self.judged, "pack"),
            counted(self.found as u64, "finding"),
            self.outside,
            self.internal,
            self.kernel.as_secs_f64(),
            self.judging.as_secs_f64(),
        )
    }
}

/// Returns what a look at a pack showed, in words.
fn words(look: &Look) -> String {
    let (judged, times) = match look {
        Look::Judged(judged, times) => (judged, times),
        Look::Decided(Ok(margin), times) => return words_of_ordinary(margin, times),
        Look::Decided(Err(finding), _) => return format!("FINDING · {}", finding.check),
        Look::Silent(verdict) => return verdict.to_string(),
    };
    let state = if judged.finding.is_some() { "FINDING" } else { "held" };
    let shown = ratios(&judged.margin);
    let dk = if judged.has_dk || judged.rows[1] == 0 { "" } else { ", dk by laws alone" };
    let exact = match judged.exact {
        0 => String::new(),
        elements => format!(" · {elements:.1e} elements exact", elements = elements as f64),
    };
    format!(
        "{state} · {} + {} rows · {shown}{dk}{exact} · {} unbounded · inputs {:.1} ms · kernel {:.2} ms · judging {:.1} ms, \
         {:.1} of them there: {:.1} times",
        judged.rows[0],
        judged.rows[1],
        judged.unbounded,
        milliseconds(times.inputs),
        milliseconds(times.kernel),
        milliseconds(times.judging),
        milliseconds(times.there),
        times.ratio(),
    )
}

/// Returns what the ordinary judge showed of a pack that holds.
fn words_of_ordinary(margin: &Margin, times: &Times) -> String {
    let rows = if margin.compared > 0 { "every row" } else { "some rows" };
    format!(
        "held · {rows} · {} · inputs {:.0} ms · runs {:.0} ms · judging {:.0} ms: {:.1} times",
        ratios(margin),
        milliseconds(times.inputs),
        milliseconds(times.kernel),
        milliseconds(times.judging),
        times.ratio(),
    )
}

/// Returns the largest error ÷ bound of each tensor, in tier W.
fn ratios(margin: &Margin) -> String {
    let named = margin.worst_case.named().into_iter().filter(|(_, ratio)| *ratio > 0.0);
    let worst = named.map(|(tensor, ratio)| match ratio {
        0.001..1e4 => format!("{tensor} {ratio:.3}"),
        _ => format!("{tensor} {ratio:.0e}"),
    });
    worst.collect::<Vec<_>>().join(" ")
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_a_number_or_a_range() {
        assert_eq!(tokens("2048"), Ok(2048..=2048));
        assert_eq!(tokens("16384..131072"), Ok(16384..=131_072));
        for wrong in ["", "0", "1", "5..3", "2..", "x", "1..99999999999"] {
            assert!(tokens(wrong).is_err(), "{wrong}");
        }
        assert_eq!(elements("4096"), Ok(0..=4096));
        assert_eq!(elements("5..6"), Ok(5..=6));
        assert!(elements("6..5").is_err() && elements("-1").is_err());
    }
}
