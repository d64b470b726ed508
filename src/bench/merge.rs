//! Benchmark of joining shards: what it costs where a campaign grows and what it found does not.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use super::{forget_peak, peak_memory};
use crate::backends::BackendError;
use crate::campaign::{
    self, CASE_EVENTS_MAX, Canary, CaseEvent, Control, Event, Logs, MergeError, Observer, Part, Plan,
    Registered, Shard, ShardError, Sinks, Start, Stored, Subjects, Summary, Sums,
};
use crate::record::{RecordError, RunDir};
use seamproof_judge::generate::Profile;

/// Subject of the campaigns. It fails in one case of six.
const SUBJECT: &str = "window-off-by-one";
/// Number of cases that are run. All other cases of a campaign are said to have held.
const RUN: u64 = 2000;
/// Number of shards of a campaign.
const SHARDS: u64 = 64;
/// Numbers of cases of the campaigns.
const CASES: [u64; 3] = [100_000, 1_000_000, 10_000_000];
/// Most seconds for each event of a case, which is read twice and written once.
const EVENT_SECONDS: f64 = 20e-6;
/// Most seconds for each failing case, which is drawn again and may go to the disk.
const FAILURE_SECONDS: f64 = 5e-3;
/// Most seconds for each shard, whose sums are read and added.
const SHARD_SECONDS: f64 = 20e-3;
/// Most memory of the program by itself, in MiB.
const PROGRAM_MIB: f64 = 64.0;
/// Most memory for each shard, in MiB: its distributions, of 8 KiB each, its census, and the line that is read.
const SHARD_MIB: f64 = 1.0;

/// Reason why nothing could be measured.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each holds another error, which says it")]
pub enum MergeBenchError {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error(transparent)]
    Record(#[from] RecordError),
    #[error(transparent)]
    Merge(#[from] MergeError),
    #[error(transparent)]
    Backend(#[from] BackendError),
    #[error(transparent)]
    Shard(#[from] ShardError),
}

/// Prints how long it takes to join the shards of small and of large campaigns, and how much memory. Returns whether
/// the sums are right and the limits hold.
pub fn merge(to: &mut dyn Write) -> Result<bool, MergeBenchError> {
    measured(RUN, CASES, to)
}

fn measured<const N: usize>(
    count: u64,
    campaigns: [u64; N],
    to: &mut dyn Write,
) -> Result<bool, MergeBenchError> {
    let place = tempfile::tempdir()?;
    let subjects = Registered::new(SUBJECT)?;
    let run = Run::new(&subjects, count, place.path())?;
    let events = EVENT_SECONDS * CASE_EVENTS_MAX as f64;
    let limit = events + FAILURE_SECONDS * run.failing as f64 + SHARD_SECONDS * SHARDS as f64;
    let most = PROGRAM_MIB + SHARD_MIB * SHARDS as f64;
    writeln!(
        to,
        "bench merge: {SHARDS} shards of {SUBJECT}; {count} cases were run, all others are said to have held\n\
         limits: {limit:.2} s (20 µs for each of {CASE_EVENTS_MAX} events, 5 ms for each failing case, 20 ms for each \
         shard); {most:.0} MiB (64, and 1 for each shard)\n\
         not measured: the search for the canary, and shrinking, which the shards have done\n\
         {:>9} {:>8} {:>9} {:>11} {:>8} {:>9} {:>8} {:>9} {:>9} {:>8}",
        "cases",
        "failing",
        "findings",
        "shards MiB",
        "merge s",
        "of limit",
        "of first",
        "peak MiB",
        "of limit",
        "of first"
    )?;
    let mut first = None;
    let mut holds = true;
    for cases in campaigns {
        let dir = place.path().join(cases.to_string());
        let (shards, bytes) = run.cut(cases, &dir)?;
        forget_peak();
        let start = Instant::now();
        let summary = joined(&subjects, &shards, &plan(cases, Shard::WHOLE), &dir.join("whole"))?;
        let seconds = start.elapsed().as_secs_f64();
        let peak = peak_memory().map_or(f64::NAN, |gib| gib * 1024.0);
        let (first_seconds, first_peak) = *first.get_or_insert((seconds, peak));
        let is_right = summary.cases == cases && summary.failed_count() == run.failing;
        holds &= is_right && seconds <= limit && (peak.is_nan() || peak <= most);
        writeln!(
            to,
            "{cases:>9} {:>8} {:>9} {:>11.1} {seconds:>8.2} {:>9.2} {:>8.2} {peak:>9.0} {:>9.2} {:>8.2}{}",
            summary.failed_count(),
            summary.distinct.len(),
            bytes as f64 / f64::from(1 << 20),
            seconds / limit,
            seconds / first_seconds,
            peak / most,
            peak / first_peak,
            if is_right { "" } else { "  WRONG" },
        )?;
    }
    Ok(holds)
}

fn plan(cases: u64, shard: Shard) -> Plan {
    let jobs = std::thread::available_parallelism().map_or(1, usize::from);
    Plan { seed: 1, profile: Profile::Quick, cases: Some(cases), time: None, shard, jobs }
}

/// Reads shards and joins them into a directory, as `seamproof merge` does.
fn joined(
    subjects: &Registered,
    shards: &[PathBuf],
    plan: &Plan,
    out: &Path,
) -> Result<Summary, MergeBenchError> {
    let parts = shards.iter().map(|shard| Part::read(shard)).collect::<Result<Vec<_>, _>>()?;
    campaign::campaign_of(&parts)?;
    let (dir, start) = (RunDir::create(out)?, start_of(plan, subjects));
    let (findings, control) = (dir.findings()?, Control::default());
    let logs = Logs::new(vec![dir.events()?], &control);
    logs.event(&Event::Start(&start));
    let sinks = Sinks { findings: &findings, observer: &logs, control: &control };
    let summary = campaign::merge(plan, subjects, &parts, Vec::new(), &sinks)?;
    campaign::conclude(&dir, &start, &Canary::default(), Some(&summary), &logs)?;
    Ok(summary)
}

fn start_of(plan: &Plan, subjects: &Registered) -> Start {
    Start::of(plan, subjects.name(), subjects.fixed())
}

/// The first cases of every campaign, as they were run.
struct Run<'a> {
    subjects: &'a Registered,
    sums: Sums,
    /// Events of each case.
    events: Vec<Vec<serde_json::Value>>,
    /// Number of failing cases.
    failing: u64,
}

impl Run<'_> {
    fn new<'a>(subjects: &'a Registered, count: u64, place: &Path) -> Result<Run<'a>, MergeBenchError> {
        let dir = RunDir::create(&place.join("run"))?;
        let (findings, kept, control) = (dir.findings()?, Kept::default(), Control::default());
        let sinks = Sinks { findings: &findings, observer: &kept, control: &control };
        let summary = campaign::run(&plan(count, Shard::WHOLE), subjects, &sinks);
        let events = kept.0.into_inner().unwrap_or_else(PoisonError::into_inner);
        Ok(Run { subjects, sums: summary.sums(), events, failing: summary.failed_count() })
    }

    /// Writes the shards of a campaign. Returns their directories, and the size of their logs and sums in bytes.
    fn cut(&self, cases: u64, place: &Path) -> Result<(Vec<PathBuf>, u64), MergeBenchError> {
        let (mut shards, mut bytes) = (Vec::new(), 0);
        for index in 0..SHARDS {
            let plan = plan(cases, format!("{index}/{SHARDS}").parse()?);
            let dir = RunDir::create(&place.join(format!("shard-{index}")))?;
            let failing = self.write_events(&plan, index, &dir)?;
            let count = plan.turns().unwrap_or_default();
            // What the table refuses is among what held here.
            let (refused, malformed) = Default::default();
            let sums = Sums { cases: count, held: count - failing, refused, malformed, ..self.sums.clone() };
            let stored = Stored { start: start_of(&plan, self.subjects), sums };
            dir.sum(&stored)?;
            bytes += dir.events_size()? + serde_json::to_vec(&stored).map_err(io::Error::from)?.len() as u64;
            shards.push(dir.path().to_owned());
        }
        Ok((shards, bytes))
    }

    /// Writes a shard's event log. Returns the number of its failing cases.
    fn write_events(&self, plan: &Plan, first: u64, dir: &RunDir) -> Result<u64, MergeBenchError> {
        let mut log = dir.events()?;
        log.write(&Event::Start(&start_of(plan, self.subjects)))?;
        let mut failing = 0;
        let cases = plan.cases.unwrap_or_default().min(CASE_EVENTS_MAX);
        for index in (first..cases).step_by(SHARDS as usize) {
            let Some(events) = self.events.get(index as usize) else {
                let event = CaseEvent { index, verdict: "held", margin: Some(0.5), ..CaseEvent::default() };
                log.write(&Event::Case(event))?;
                continue;
            };
            failing += u64::from(events.iter().any(|event| event["verdict"] == "finding"));
            events.iter().try_for_each(|event| log.write(event))?;
        }
        Ok(failing)
    }
}

/// Observer that keeps what was told of each case.
#[derive(Default)]
struct Kept(Mutex<Vec<Vec<serde_json::Value>>>);

impl Observer for Kept {
    fn event(&self, event: &Event) {
        let mut cases = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match event {
            Event::Case(_) => cases.push(Vec::new()),
            Event::Shrunk(_) => {}
            _ => return,
        }
        let told = serde_json::to_value(event).unwrap_or_default();
        cases.iter_mut().last().into_iter().for_each(|case| case.push(told.clone()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Test that the joined shards come to the cases and failures that were put into them.
    #[test]
    fn what_is_joined_is_right() {
        let mut said = Vec::new();
        measured(60, [600, 6000], &mut said).expect("shards are joined");
        let said = String::from_utf8(said).expect("the table is text");
        let rows: Vec<&str> = said.lines().skip(4).collect();
        assert!(!said.contains("WRONG") && rows.len() == 2, "{said}");
        let failing = |row: &str| row.split_whitespace().nth(1).and_then(|n| n.parse::<u64>().ok());
        assert!(failing(rows[0]) > Some(0) && failing(rows[0]) == failing(rows[1]), "{said}");
    }
}
