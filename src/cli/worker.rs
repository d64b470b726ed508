//! `seamproof worker`: the subject's process; and the options of commands that start some.

use std::time::Duration;

use super::exit::Exit;
use super::options::positive_duration;
use crate::backends;
use crate::worker::{self, Deadlines, Settings, mock};

#[derive(clap::Args, Debug)]
pub(super) struct Args {
    /// Run the subject that fails as its options say
    #[arg(long)]
    mock: bool,
}

pub(super) fn run(args: &Args) -> Exit {
    Exit::Worker(if args.mock { mock::live() } else { worker::live(backends::open) })
}

/// Most workers that may be asked for.
const WORKERS_MAX: u32 = 1024;

/// Options of subjects behind worker processes.
#[derive(clap::Args, Debug, Default)]
pub(super) struct WorkerOptions {
    /// Worker processes of a subject that runs in some, all on the first device [default: one on each device]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(WORKERS_MAX)))]
    workers: Option<u32>,
    /// Longest time for each phase of a run in a worker [default: one or two minutes]
    #[arg(long, value_name = "TIME", value_parser = positive_duration)]
    deadline: Option<Duration>,
    /// Longest time for the start of a worker [default: 2m, or as long as the subject declares]
    #[arg(long, value_name = "TIME", value_parser = positive_duration)]
    start_deadline: Option<Duration>,
    /// Write what subjects in workers print to stderr, as it comes
    #[arg(long)]
    prints: bool,
}

impl WorkerOptions {
    /// Sets up the workers of this process, before the first one is asked for.
    pub(super) fn configure(&self) {
        let usual = Settings::default();
        let start = self.start_deadline.unwrap_or(usual.deadlines.start);
        let deadlines = match self.deadline {
            Some(phase) => Deadlines::new(start, phase),
            None => Deadlines { start, ..usual.deadlines },
        };
        let workers = self.workers.map(|count| count as usize);
        // A command does this once, before anything runs.
        let is_start_fixed = self.start_deadline.is_some();
        let shows_prints = self.prints;
        worker::configure(Settings { workers, deadlines, is_start_fixed, shows_prints, ..usual });
    }
}
