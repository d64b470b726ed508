//! Progress of long work: a bar on a terminal, a plain line now and then elsewhere.

use std::collections::VecDeque;
use std::io::IsTerminal;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

use super::output::{note, print_line, show_bar};
use crate::campaign::{Control, Plan};
use crate::nightly::Watch;
use seamproof_judge::prose::counted;

/// Time between two redraws of the bar.
const REDRAW: Duration = Duration::from_millis(200);
/// Shortest time between two plain lines.
const LINE: Duration = Duration::from_secs(5);
/// Plain lines of a long run: the time between two is this fraction of the time so far, so that a night's log stays
/// short.
const LINES: u32 = 20;
/// Time over which the present rate is taken.
const RECENT: Duration = Duration::from_secs(5);
/// Share of the work that must be done before the time left is told.
const SHARE_MIN: f64 = 0.02;

/// How far the work is.
struct Done {
    /// What is done, in words.
    what: String,
    cases: u64,
    failed: u64,
    /// Time of the cases so far.
    elapsed: Duration,
    /// Share of all that is to do; `None` where nobody knows.
    share: Option<f64>,
}

/// Does `work`, a campaign, while a thread of its own shows its counts.
pub(super) fn shown<T>(plan: &Plan, control: &Control, work: impl FnOnce() -> T) -> T {
    let done = |elapsed: Duration| {
        let done = of_control("", control, elapsed);
        Done { share: share(plan, done.cases, elapsed), ..done }
    };
    followed(&done, |_| work())
}

/// Does `work`, the search for the canary, while a thread of its own shows its counts.
pub(super) fn of_canary<T>(control: &Control, work: impl FnOnce() -> T) -> T {
    followed(&|elapsed| of_control("canary: ", control, elapsed), |_| work())
}

/// Does `work`, which judges as many draws as these, while a thread of its own shows its counts.
pub(super) fn of_draws<T>(control: &Control, all: u64, work: impl FnOnce() -> T) -> T {
    let done = |elapsed: Duration| {
        let done = of_control("", control, elapsed);
        Done { share: Some(done.cases as f64 / all.max(1) as f64), ..done }
    };
    followed(&done, |_| work())
}

/// Does `work`, a night, which says its lines by what it is given, while a thread of its own shows its counts.
pub(super) fn of_night<T>(watch: &Watch, work: impl FnOnce(&dyn Fn(&str)) -> T) -> T {
    let done = |_| {
        let now = watch.progress();
        let what = format!("{}: ", now.what);
        Done { what, cases: now.cases, failed: now.failed, elapsed: now.elapsed, share: None }
    };
    followed(&done, work)
}

fn of_control(what: &str, control: &Control, elapsed: Duration) -> Done {
    let [cases, failed] = [&control.cases, &control.failed].map(|count| count.load(Ordering::Relaxed));
    Done { what: what.to_owned(), cases, failed, elapsed, share: None }
}

fn followed<T>(done: &(dyn Fn(Duration) -> Done + Sync), work: impl FnOnce(&dyn Fn(&str)) -> T) -> T {
    let bar = std::io::stderr().is_terminal().then(|| bar(done(Duration::ZERO).share.is_none()));
    show_bar(bar.clone());
    let (end, wait) = mpsc::channel::<()>();
    let result = thread::scope(|scope| {
        scope.spawn(move || follow(done, bar.as_ref(), &wait));
        let result = work(&|line: &str| print_line(line));
        drop(end);
        result
    });
    show_bar(None);
    result
}

fn follow(done: &dyn Fn(Duration) -> Done, bar: Option<&ProgressBar>, wait: &mpsc::Receiver<()>) {
    let start = Instant::now();
    let mut recent = Recent::default();
    let pause = || match bar {
        Some(_) => REDRAW,
        None => LINE.max(start.elapsed() / LINES),
    };
    while let Err(RecvTimeoutError::Timeout) = wait.recv_timeout(pause()) {
        let done = done(start.elapsed());
        let words = words(&done, recent.rate(start.elapsed(), done.cases));
        match bar {
            Some(bar) => {
                bar.set_position((done.share.unwrap_or(0.0) * STEPS as f64) as u64);
                bar.set_message(words);
            }
            None => note(&format_args!("progress {words} · {:.0} s", start.elapsed().as_secs_f64())),
        }
    }
    if let Some(bar) = bar {
        bar.finish_and_clear();
    }
}

/// Counts of the last seconds.
#[derive(Default)]
struct Recent(VecDeque<(Duration, u64)>);

impl Recent {
    /// Adds a count, and returns the rate of the last [`RECENT`]; `None` before there are two counts.
    fn rate(&mut self, now: Duration, cases: u64) -> Option<f64> {
        // The counts begin anew with each part of a night.
        if self.0.back().is_some_and(|&(_, before)| before > cases) {
            self.0.clear();
        }
        while self.0.get(1).is_some_and(|&(at, _)| now.saturating_sub(at) >= RECENT) {
            self.0.pop_front();
        }
        self.0.push_back((now, cases));
        let &(from, before) = self.0.front()?;
        let seconds = now.saturating_sub(from).as_secs_f64();
        (seconds > 0.0).then(|| (cases - before) as f64 / seconds)
    }
}

/// Returns the counts in words: the rate of the last seconds, the mean, and the time left where it is known.
fn words(done: &Done, recent: Option<f64>) -> String {
    let Done { what, cases, failed, elapsed, share } = done;
    let seconds = elapsed.as_secs_f64();
    let mean = *cases as f64 / seconds.max(f64::MIN_POSITIVE);
    let rate = match recent {
        Some(recent) => format!("{} cases/s, mean {}", per_second(recent), per_second(mean)),
        None => format!("{} cases/s", per_second(mean)),
    };
    let left = match *share {
        Some(share) if share >= 1.0 => " · finishing the cases in flight".to_owned(),
        Some(share) if share >= SHARE_MIN => format!(" · {:.0} s left", seconds * (1.0 - share) / share),
        _ => String::new(),
    };
    format!("{what}{} · {failed} failed · {rate}{left}", counted(*cases, "case"))
}

/// Returns a rate with the digits that say something: large cases take seconds each.
fn per_second(rate: f64) -> String {
    if rate < 10.0 { format!("{rate:.1}") } else { format!("{rate:.0}") }
}

/// Steps of a full bar.
const STEPS: u64 = 1000;

fn bar(endless: bool) -> ProgressBar {
    let template = if endless { "{spinner} {elapsed} {msg}" } else { "{bar:20} {elapsed} {msg}" };
    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(STEPS).with_style(style)
}

/// Returns how much of the plan is done, by cases or by time, whichever ends it first; `None` where neither does.
fn share(plan: &Plan, cases: u64, elapsed: Duration) -> Option<f64> {
    let of_cases = plan.turns().map(|turns| cases as f64 / turns.max(1) as f64);
    let of_time = plan.time.map(|time| elapsed.as_secs_f64() / time.as_secs_f64().max(f64::MIN_POSITIVE));
    let done = of_cases.into_iter().chain(of_time).fold(0.0, f64::max).min(1.0);
    (of_cases.is_some() || of_time.is_some()).then_some(done)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_of_the_last_seconds_forgets_what_was_before() {
        let at = Duration::from_secs;
        let mut recent = Recent::default();
        assert_eq!(recent.rate(at(0), 0), None);
        assert_eq!(recent.rate(at(1), 100), Some(100.0));
        for second in 2..=20 {
            recent.rate(at(second), 100);
        }
        assert_eq!(recent.rate(at(21), 100), Some(0.0));
        // A new part of a night counts from zero.
        assert_eq!(recent.rate(at(22), 3), None);
    }

    #[test]
    fn both_rates_and_the_time_left_are_told() {
        let done = Done {
            what: String::new(),
            cases: 100,
            failed: 1,
            elapsed: Duration::from_secs(10),
            share: Some(0.25),
        };
        assert_eq!(words(&done, Some(20.4)), "100 cases · 1 failed · 20 cases/s, mean 10 · 30 s left");
        let over = Done { what: String::new(), share: Some(1.0), ..done };
        let told = words(&over, Some(0.0));
        assert_eq!(told, "100 cases · 1 failed · 0.0 cases/s, mean 10 · finishing the cases in flight");
        let endless = Done { share: None, what: "canary: ".to_owned(), ..over };
        assert_eq!(words(&endless, None), "canary: 100 cases · 1 failed · 10 cases/s");
    }
}
