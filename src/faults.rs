//! Scoring the catalogue of planted faults: what catches each, how soon, and how small the repro becomes.
//!
//! A fault is met on a seeded *stream* of the generator's problems, those whose schedule it changes, or whose result where
//! it is in the kernel, or whose exact answer where it is at the call, or for which its capability table says something
//! else. Its *cases* are the problems of the stream up to the first that is caught. The checker looks at the edited
//! schedule, the campaign judges the emulated kernel that runs it, or, where the fault is at the call, any backend; what
//! that one shows without the fault, too, is no case. The repro is shrunk as a campaign's findings are. Then every rung of
//! the judge looks at the first cases of some seeds: what saw the fault, and what alone did.

mod rungs;
mod score;
mod suspect;
mod table;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use seamproof_oracle::Problem;
use seamproof_simulator::check::check;
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
pub use table::{TABLE_FAULTS, TableFault, Tabled};

/// Problems that are drawn for one fault and seed.
pub const DRAWN_MAX: u64 = 20_000;
/// Problems that are proved or judged for one fault and seed.
pub const CASES_MAX: usize = 1_000;

/// The schedule of a problem with the fault in it; none where there is no schedule or the fault changes nothing.
pub fn planted(fault: &Fault, problem: &Problem) -> Option<Schedule> {
    let mut schedule = fault.schedule(problem)?;
    let applies = match fault.edit {
        Plant::Schedule(_) => fault.plant(problem, &mut schedule),
        Plant::Kernel(_) => changes_result(fault, problem),
    };
    applies.then_some(schedule)
}

/// Whether a fault in the kernel changes a bit of what the emulated subject makes of a problem, padding poisoned.
fn changes_result(fault: &Fault, problem: &Problem) -> bool {
    let mut inputs = values::inputs(problem);
    values::poison(&mut inputs, problem, Poison::Nan);
    let right = Emulated::default();
    let run = |subject: &dyn Backend| {
        catch_unwind(AssertUnwindSafe(|| subject.run(problem, &inputs))).ok().and_then(Result::ok)
    };
    let (right, wrong) = (run(&right), run(&Planted::new(right, *fault)));
    match (right, wrong) {
        (Some(right), Some(wrong)) => !same_bits(&right, &wrong),
        (right, wrong) => right.is_some() != wrong.is_some(),
    }
}

/// The problems of a seed's stream that the fault applies to, with their edited schedules.
pub fn stream(fault: &Fault, seed: u64) -> impl Iterator<Item = (Problem, Schedule)> {
    let subject = Emulated::default().declaration().capabilities;
    let drawn = suspect::problems(seed).filter(move |problem| subject.refusal(problem).is_none());
    drawn.filter_map(|problem| planted(fault, &problem).map(|schedule| (problem, schedule))).take(CASES_MAX)
}

/// What the checker says first of an edited schedule.
fn rejection(problem: &Problem, schedule: &Schedule) -> Option<String> {
    check(problem, schedule).err().and_then(|errors| errors.first().map(ToString::to_string))
}

/// The first problem of a seed's stream whose edited schedule the checker rejects.
pub fn by_checker(fault: &Fault, seed: u64) -> Option<First> {
    let start = Instant::now();
    stream(fault, seed).enumerate().find_map(|(index, (problem, schedule))| {
        let what = rejection(&problem, &schedule)?;
        let (cases, seconds) = (index + 1, start.elapsed().as_secs_f64());
        Some(First { by: Catcher::Checker, tensor: None, what, cases, seconds, problem, flawed: 0 })
    })
}
