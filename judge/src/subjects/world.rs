//! The schedules that run in a problem's world: that of its own group, and that of a second group beside it.
//!
//! Where the world has room for another group of the same size, its
//! [neighbour](seamproof_oracle::ContextParallel::neighbour), the devices run one there at the same time. It has the
//! same problem and other inputs, the negatives of the group's own, and nobody reads its results. A message that leaves
//! its group thereby gets somewhere, and brings wrong numbers. Ranks of neither group are idle.

use std::rc::Rc;

use seamproof_oracle::{Inputs, Problem, ProblemFields};
use seamproof_simulator::device::Buffers;
use seamproof_simulator::executor::load;
use seamproof_simulator::schedule::{Schedule, side_by_side};

use crate::subject::RunError;

/// Schedules of one world that run at once.
#[derive(Clone, Debug)]
pub struct World {
    /// The schedule of the problem's own group.
    pub own: Rc<Schedule>,
    beside: Option<Beside>,
}

/// A second group.
#[derive(Clone, Debug)]
struct Beside {
    problem: Problem,
    schedule: Rc<Schedule>,
    /// Both groups. Buffers of the problem's own keep their ids.
    both: Schedule,
}

impl World {
    /// Returns the schedules that `schedule` makes of the problem and of its neighbour's.
    pub fn new(
        problem: &Problem,
        schedule: impl Fn(&Problem) -> Result<Rc<Schedule>, RunError>,
    ) -> Result<World, RunError> {
        let own = schedule(problem)?;
        let beside = match neighbour(problem) {
            None => None,
            Some(problem) => {
                let schedule = schedule(&problem)?;
                let both = side_by_side(&[&own, &schedule]);
                let both = both.map_err(|error| RunError::Infrastructure(error.to_string()))?;
                Some(Beside { problem, schedule, both })
            }
        };
        Ok(World { own, beside })
    }

    /// Returns the schedule that an executor runs: of all groups.
    pub(super) fn all(&self) -> &Schedule {
        self.beside.as_ref().map_or(&self.own, |beside| &beside.both)
    }

    /// Returns the memory of all groups before the run. Rows that no sequence owns hold `slack`.
    pub(super) fn load(&self, problem: &Problem, inputs: &Inputs, slack: f32) -> Buffers<f32> {
        let mut buffers = load(&self.own, problem, inputs, slack);
        if let Some(Beside { problem, schedule, .. }) = &self.beside {
            buffers.extend(load(schedule, problem, &negatives(inputs), slack));
        }
        buffers
    }
}

/// Returns the problem on the neighbour's ranks; `None` where the world has no room for it.
fn neighbour(problem: &Problem) -> Option<Problem> {
    let parallel = problem.parallel.neighbour()?;
    Problem::new(ProblemFields { parallel, ..problem.clone().into() }).ok()
}

/// Returns inputs of other values, as exact as these: the negatives of all but the sinks, which are parameters.
fn negatives(Inputs { q, k, v, dout, sink, scales }: &Inputs) -> Inputs {
    let [q, k, v, dout] = [q, k, v, dout].map(|tensor| tensor.mapv(|value| -value));
    Inputs { q, k, v, dout, sink: sink.clone(), scales: scales.clone() }
}
