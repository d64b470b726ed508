//! Progress of long work: a bar on a terminal, a plain line now and then elsewhere.

use std::io::IsTerminal;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

use super::output::{note, print_line};
use crate::campaign::{Control, Plan};
use crate::nightly::Watch;
use seamproof_judge::prose::counted;

/// Between two redraws of the bar.
const REDRAW: Duration = Duration::from_millis(200);
/// Between two plain lines, at least.
const LINE: Duration = Duration::from_secs(5);
/// Plain lines of a long run: one for so much of the time so far, so that a night's log stays short.
const LINES: u32 = 20;

/// How far the work is.
struct Done {
    /// In words.
    words: String,
    /// The share of all that is to do; none where nobody knows.
    share: Option<f64>,
}

/// Does `work` while a thread of its own shows the counts.
pub(super) fn shown<T>(plan: &Plan, control: &Control, work: impl FnOnce() -> T) -> T {
    let done = |elapsed: Duration| {
        let (cases, failed) = (control.cases.load(Ordering::Relaxed), control.failed.load(Ordering::Relaxed));
        Done { words: counts(cases, failed, elapsed), share: share(plan, cases, elapsed) }
    };
    followed(&done, |_| work())
}

/// The same of a night, whose `work` says its lines by what it is given.
pub(super) fn of_night<T>(watch: &Watch, work: impl FnOnce(&dyn Fn(&str)) -> T) -> T {
    let done = |_| {
        let now = watch.progress();
        Done { words: format!("{}: {}", now.what, counts(now.cases, now.failed, now.elapsed)), share: None }
    };
    followed(&done, work)
}

fn counts(cases: u64, failed: u64, elapsed: Duration) -> String {
    let rate = cases as f64 / elapsed.as_secs_f64().max(f64::MIN_POSITIVE);
    format!("{} · {failed} failed · {rate:.0} cases/s", counted(cases, "case"))
}

fn followed<T>(done: &(dyn Fn(Duration) -> Done + Sync), work: impl FnOnce(&dyn Fn(&str)) -> T) -> T {
    let bar = std::io::stderr().is_terminal().then(|| bar(done(Duration::ZERO).share.is_none()));
    let (end, wait) = mpsc::channel::<()>();
    thread::scope(|scope| {
        let of_thread = bar.clone();
        scope.spawn(move || follow(done, of_thread, &wait));
        let result = work(&|line: &str| match &bar {
            Some(bar) => bar.suspend(|| print_line(line)),
            None => print_line(line),
        });
        drop(end);
        result
    })
}

fn follow(done: &dyn Fn(Duration) -> Done, bar: Option<ProgressBar>, wait: &mpsc::Receiver<()>) {
    let start = Instant::now();
    let pause = |bar: &Option<ProgressBar>| match bar {
        Some(_) => REDRAW,
        None => LINE.max(start.elapsed() / LINES),
    };
    while let Err(RecvTimeoutError::Timeout) = wait.recv_timeout(pause(&bar)) {
        let elapsed = start.elapsed();
        let Done { words, share } = done(elapsed);
        match &bar {
            Some(bar) => {
                bar.set_position((share.unwrap_or(0.0) * STEPS as f64) as u64);
                bar.set_message(words);
            }
            None => note(&format_args!("progress {words} · {:.0} s", elapsed.as_secs_f64())),
        }
    }
    if let Some(bar) = bar {
        bar.finish_and_clear();
    }
}

/// Steps of a full bar.
const STEPS: u64 = 1000;

fn bar(endless: bool) -> ProgressBar {
    let template = if endless { "{spinner} {elapsed} {msg}" } else { "{bar:40} {elapsed} {msg}" };
    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(STEPS).with_style(style)
}

/// How much of the plan is done, by cases or by time, whichever ends it first; none where neither does.
fn share(plan: &Plan, cases: u64, elapsed: Duration) -> Option<f64> {
    let of_cases = plan.turns().map(|turns| cases as f64 / turns.max(1) as f64);
    let of_time = plan.time.map(|time| elapsed.as_secs_f64() / time.as_secs_f64().max(f64::MIN_POSITIVE));
    let done = of_cases.into_iter().chain(of_time).fold(0.0, f64::max).min(1.0);
    (of_cases.is_some() || of_time.is_some()).then_some(done)
}
