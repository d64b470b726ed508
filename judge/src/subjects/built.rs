//! A problem's schedule, kept until the thread has asked for two others. A judged case asks for one schedule before
//! each of its runs and for the partition of its sums, and for the schedule of its forward when its launches are
//! asked for. Building a schedule takes a tenth of a small case's time.

use std::cell::RefCell;
use std::rc::Rc;

use seamproof_oracle::Problem;
use seamproof_simulator::schedule::{BuildError, MergeOrder, Schedule, build_with};

struct Built {
    problem: Problem,
    order: MergeOrder,
    schedule: Rc<Schedule>,
}

thread_local! {
    /// Schedules that were asked for, the last one first.
    static LAST: RefCell<[Option<Built>; 2]> = const { RefCell::new([None, None]) };
}

/// Returns the schedule that [`build_with`] makes.
pub fn built(problem: &Problem, order: MergeOrder) -> Result<Rc<Schedule>, BuildError> {
    LAST.with_borrow_mut(|last| {
        let is_asked = |built: &Built| built.order == order && built.problem == *problem;
        let place = last.iter().position(|built| built.as_ref().is_some_and(is_asked));
        let found = place.and_then(|place| last[place].take());
        let built = match found {
            Some(built) => built,
            None => {
                let schedule = Rc::new(build_with(problem, order)?);
                Built { problem: problem.clone(), order, schedule }
            }
        };
        let schedule = Rc::clone(&built.schedule);
        last[..=place.unwrap_or(1)].rotate_right(1);
        last[0] = Some(built);
        Ok(schedule)
    })
}
