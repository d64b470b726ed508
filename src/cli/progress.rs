//! Progress of long work: a bar on a terminal, a plain line now and then elsewhere.

use std::io::IsTerminal;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

use super::output::note;
use crate::campaign::{Control, Plan};

/// Between two redraws of the bar.
const REDRAW: Duration = Duration::from_millis(200);
/// Between two plain lines.
const LINE: Duration = Duration::from_secs(5);

/// Does `work` while a thread of its own shows the counts.
pub(super) fn shown<T>(plan: &Plan, control: &Control, work: impl FnOnce() -> T) -> T {
    let (done, wait) = mpsc::channel::<()>();
    thread::scope(|scope| {
        scope.spawn(move || watch(plan, control, &wait));
        let result = work();
        drop(done);
        result
    })
}

fn watch(plan: &Plan, control: &Control, wait: &mpsc::Receiver<()>) {
    let bar = std::io::stderr().is_terminal().then(|| bar(plan));
    let start = Instant::now();
    let pause = if bar.is_some() { REDRAW } else { LINE };
    while let Err(RecvTimeoutError::Timeout) = wait.recv_timeout(pause) {
        let elapsed = start.elapsed();
        let (cases, failed) = (control.cases.load(Ordering::Relaxed), control.failed.load(Ordering::Relaxed));
        let rate = cases as f64 / elapsed.as_secs_f64();
        let counts = format!("{cases} cases · {failed} failed · {rate:.0} cases/s");
        match &bar {
            Some(bar) => {
                bar.set_position(share(plan, cases, elapsed));
                bar.set_message(counts);
            }
            None => note(&format_args!("progress {counts} · {:.0} s", elapsed.as_secs_f64())),
        }
    }
    if let Some(bar) = bar {
        bar.finish_and_clear();
    }
}

/// Steps of a full bar.
const STEPS: u64 = 1000;

fn bar(plan: &Plan) -> ProgressBar {
    let endless = plan.cases.is_none() && plan.time.is_none();
    let template = if endless { "{spinner} {elapsed} {msg}" } else { "{bar:40} {elapsed} {msg}" };
    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(STEPS).with_style(style)
}

/// How much of the plan is done, by cases or by time, whichever ends it first.
fn share(plan: &Plan, cases: u64, elapsed: Duration) -> u64 {
    let of_cases = plan.turns().map(|turns| cases as f64 / turns.max(1) as f64);
    let of_time = plan.time.map(|time| elapsed.as_secs_f64() / time.as_secs_f64().max(f64::MIN_POSITIVE));
    let done = of_cases.unwrap_or(0.0).max(of_time.unwrap_or(0.0)).min(1.0);
    (done * STEPS as f64) as u64
}
