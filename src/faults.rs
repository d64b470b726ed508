//! Scores of the catalogue of planted faults: what catches each fault, how soon, and how small the repro becomes.
//!
//! A fault is tried on a seeded *stream* of the generator's problems. The stream has the problems on which the fault
//! shows: it changes their schedule, or their result where it is in the kernel, or their exact answer where it is at
//! the call, or the answer of its table. The *cases* of a fault are the problems of the stream up to the first that is
//! caught. The checker examines the edited schedule, and its resources are counted as they grow. The campaign judges
//! the emulated kernel that runs it, or any backend where the fault is at the call. A problem on which that backend
//! fails even without the fault is no case. The repro is shrunk as a campaign's findings are. Every rung of the judge
//! then examines the first cases of some seeds, to find which rungs saw the fault, and which rung alone did.

mod rungs;
mod score;
mod suspect;
mod table;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use seamproof_oracle::Problem;
use seamproof_simulator::check::{GrowthError, check, growth};
use seamproof_simulator::faults::{Catcher, Fault, Plant};
use seamproof_simulator::schedule::Schedule;

use seamproof_judge::subject::Backend;
use seamproof_judge::subjects::{Emulated, Planted, same_bits};
use seamproof_judge::values::{self, Poison};

pub use rungs::{RungScore, reason};
pub use score::{
    Effort, First, MEDIAN_CASES_MAX, NotRun, Repro, Score, Scored, by_campaign, score, score_all,
};
pub use suspect::{Call, Suspect, call_stream};
pub use table::{TABLE_FAULTS, TableFault, Tabled, Tables};

/// Largest number of problems that are drawn for one fault and seed.
pub const DRAWN_MAX: u64 = 20_000;
/// Largest number of problems that are proved or judged for one fault and seed.
pub const CASES_MAX: usize = 1_000;
/// Largest number of problems whose growth is looked at for one fault and seed. It depends on the algorithm and the
/// balance alone, and few problems have them all.
const GROWN_MAX: usize = 3;

/// Returns the schedule of a problem with the fault in it; `None` where there is no schedule or the fault changes
/// nothing.
pub fn planted(fault: &Fault, problem: &Problem) -> Option<Schedule> {
    let mut schedule = fault.schedule(problem)?;
    let applies = match fault.edit {
        Plant::Schedule(_) => fault.plant(problem, &mut schedule),
        Plant::Kernel(_) => changes_result(fault, problem),
    };
    applies.then_some(schedule)
}

/// Whether a fault in the kernel changes a bit of the emulated subject's results on a problem, with poisoned padding.
fn changes_result(fault: &Fault, problem: &Problem) -> bool {
    let mut inputs = values::inputs(problem);
    values::poison(&mut inputs, problem, Poison::Nan);
    let right = Emulated { merge: fault.order(), ..Emulated::default() };
    let run = |subject: &dyn Backend| {
        catch_unwind(AssertUnwindSafe(|| subject.run(problem, &inputs))).ok().and_then(Result::ok)
    };
    let (right, wrong) = (run(&right), run(&Planted::new(right, *fault)));
    match (right, wrong) {
        (Some(right), Some(wrong)) => !same_bits(&right, &wrong),
        (right, wrong) => right.is_some() != wrong.is_some(),
    }
}

/// Returns the problems of a seed's stream on which the fault shows, with their edited schedules.
pub fn stream(fault: &Fault, seed: u64) -> impl Iterator<Item = (Problem, Schedule)> {
    let subject = Emulated::default().declaration().table;
    let asked = suspect::problems(seed).map(|problem| fault.asked(problem));
    let drawn = asked.filter(move |problem| subject.refusal(problem).is_none());
    drawn.filter_map(|problem| planted(fault, &problem).map(|schedule| (problem, schedule))).take(CASES_MAX)
}

/// Returns what a look at the edited schedule of a problem says against it: the checker's first error, or the first
/// resource that grows too fast. The judge's rungs look at no schedule and say nothing.
fn rejection(by: Catcher, fault: &Fault, problem: &Problem, schedule: &Schedule) -> Option<String> {
    match by {
        Catcher::Checker => Some(check(problem, schedule).err()?.first()?.to_string()),
        Catcher::Resources => Some(excess(fault, problem)?.to_string()),
        _ => None,
    }
}

/// Returns the first resource that grows too fast with the fault.
fn excess(fault: &Fault, problem: &Problem) -> Option<GrowthError> {
    let edited = |probe: &Problem| {
        let mut schedule = fault.schedule(probe)?;
        fault.plant(probe, &mut schedule);
        Some(schedule)
    };
    growth(problem, fault.order(), edited)?.into_iter().next()
}

/// Returns the first problem of a seed's stream whose edited schedule the checker rejects.
pub fn by_checker(fault: &Fault, seed: u64) -> Option<First> {
    first(Catcher::Checker, fault, stream(fault, seed))
}

/// Returns the first problem of a seed's stream whose edited schedule takes resources that grow too fast.
pub fn by_resources(fault: &Fault, seed: u64) -> Option<First> {
    first(Catcher::Resources, fault, stream(fault, seed).take(GROWN_MAX))
}

/// Returns the first of some problems whose edited schedule is rejected.
fn first(by: Catcher, fault: &Fault, problems: impl Iterator<Item = (Problem, Schedule)>) -> Option<First> {
    let start = Instant::now();
    problems.enumerate().find_map(|(index, (problem, schedule))| {
        let what = rejection(by, fault, &problem, &schedule)?;
        let (cases, seconds) = (index + 1, start.elapsed().as_secs_f64());
        Some(First { by, tensor: None, what, cases, seconds, problem, flawed: 0 })
    })
}
