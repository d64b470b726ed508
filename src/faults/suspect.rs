//! A fault of any kind: the subject that has it, and the problems on which it shows.

use std::iter;

use seamproof_kernels::faults::{Seen, SourceFault, source_faults};
use seamproof_kernels::forward::{self, Attention, Shape};
use seamproof_oracle::{Pass, Problem};
use seamproof_simulator::faults::{self, Catcher, Fault, Plant};

use super::table::{TABLE_FAULTS, TableFault, Tabled};
use super::{CASES_MAX, DRAWN_MAX, stream};
use crate::backend::Backend;
use crate::backends::{self, Cuda, Emulated, MISCALLS, Miscall, Miscalled, Planted};
use crate::generate::{self, Draw, Limits};
use crate::values;

/// A fault that the judge is to find in a subject.
#[derive(Clone, Copy, Debug)]
pub enum Suspect {
    /// In the schedule or in the kernel.
    Planted(&'static Fault),
    /// At the call.
    Call(&'static Miscall),
    /// In the capability table.
    Table(&'static TableFault),
    /// In the source of a kernel for a GPU.
    Source(&'static SourceFault),
}

impl From<&'static Fault> for Suspect {
    fn from(fault: &'static Fault) -> Suspect {
        Suspect::Planted(fault)
    }
}

impl From<&'static Miscall> for Suspect {
    fn from(miscall: &'static Miscall) -> Suspect {
        Suspect::Call(miscall)
    }
}

impl From<&'static TableFault> for Suspect {
    fn from(fault: &'static TableFault) -> Suspect {
        Suspect::Table(fault)
    }
}

impl Suspect {
    /// Every fault in a subject: of schedules, of the kernel, of tables, at the call.
    pub fn all() -> impl Iterator<Item = Suspect> {
        let planted = faults::catalogue().map(Suspect::from);
        planted.chain(TABLE_FAULTS.iter().map(Suspect::from)).chain(MISCALLS.iter().map(Suspect::from))
    }

    /// Every fault in the kernels for a GPU that a campaign's judge is to find.
    pub fn on_gpu() -> impl Iterator<Item = Suspect> {
        source_faults().filter(|fault| matches!(fault.seen, Seen::Rungs(_))).map(Suspect::Source)
    }

    /// The fault of this id.
    pub fn by_id(id: &str) -> Option<Suspect> {
        Suspect::all().chain(Suspect::on_gpu()).find(|suspect| suspect.id() == id)
    }

    /// Its name in reports.
    pub fn id(&self) -> &'static str {
        match self {
            Suspect::Planted(fault) => fault.id,
            Suspect::Call(miscall) => miscall.id,
            Suspect::Table(fault) => fault.id,
            Suspect::Source(fault) => fault.id,
        }
    }

    /// What goes wrong.
    pub fn imitates(&self) -> &'static str {
        match self {
            Suspect::Planted(fault) => fault.imitates,
            Suspect::Call(miscall) => miscall.imitates,
            Suspect::Table(fault) => fault.imitates,
            Suspect::Source(fault) => fault.imitates,
        }
    }

    /// Where that happened.
    pub fn source(&self) -> &'static str {
        match self {
            Suspect::Planted(fault) => fault.source,
            Suspect::Call(miscall) => miscall.source,
            Suspect::Table(fault) => fault.source,
            Suspect::Source(fault) => fault.file,
        }
    }

    /// Whether the fault names this rung as one that may be the first to see it.
    pub fn is_caught_by(&self, rung: Catcher) -> bool {
        match self {
            Suspect::Planted(fault) => fault.is_caught_by(rung),
            Suspect::Call(miscall) => miscall.caught_by.contains(&rung),
            Suspect::Table(_) => rung == Catcher::Capability,
            Suspect::Source(fault) => matches!(fault.seen, Seen::Rungs(rungs) if rungs.contains(&rung)),
        }
    }

    /// Whether there is a schedule with the fault in it, which the checker can look at.
    pub(super) fn edited(&self) -> Option<&'static Fault> {
        match self {
            Suspect::Planted(fault) if matches!(fault.edit, Plant::Schedule(_)) => Some(*fault),
            _ => None,
        }
    }

    /// Whether a run can show the fault; what only the proof can see is not looked for elsewhere.
    pub(super) fn runs(&self) -> bool {
        !matches!(self, Suspect::Planted(fault) if fault.caught_by == [Catcher::Checker])
    }

    /// The emulated kernel with the fault, its streams in an order drawn from the seed.
    pub fn subject(&self, seed: u64) -> Box<dyn Backend> {
        match self {
            Suspect::Planted(fault) => Box::new(Planted::new(emulated(seed), **fault)),
            Suspect::Call(miscall) => Box::new(miscalled(miscall, seed)),
            Suspect::Table(fault) => Box::new(Tabled::new(fault)),
            Suspect::Source(fault) => {
                // Every fault of the tensor cores' kernel shows in its long shape, some in that alone.
                let attention = match is_tuned(fault) {
                    true => Attention::Of(Shape::Long),
                    false => Attention::Simple,
                };
                backends::on_gpu(fault, Cuda { order: seed, helpers: false, attention, ..Cuda::default() })
            }
        }
    }

    /// The problems of a seed's stream on which the fault shows: on the others it is equivalent.
    pub fn stream(&self, seed: u64) -> Box<dyn Iterator<Item = Problem>> {
        match *self {
            Suspect::Planted(fault) => Box::new(stream(fault, seed).map(|(problem, _)| problem)),
            Suspect::Call(miscall) => Box::new(call_stream(miscalled(miscall, seed), seed)),
            Suspect::Table(fault) => {
                let subject = Tabled::new(fault);
                Box::new(problems(seed).filter(move |problem| subject.shows(problem)).take(CASES_MAX))
            }
            // Whether it shows, only a GPU could say.
            Suspect::Source(fault) => {
                let taken = Cuda::default().capabilities();
                let taken = move |problem: &Problem| taken.refusal(problem).is_none();
                match is_tuned(fault) {
                    // Sequences of more than a block of keys, on problems that go to tensor cores.
                    true => {
                        let drawn = drawn(seed, Limits::quick()).filter(on_tensor_cores);
                        let drawn = drawn.filter(move |problem| comes_to(fault, problem));
                        Box::new(drawn.filter(taken).take(CASES_MAX))
                    }
                    false => Box::new(problems(seed).filter(taken).take(CASES_MAX)),
                }
            }
        }
    }
}

fn emulated(seed: u64) -> Emulated {
    Emulated { order: seed, ..Emulated::default() }
}

/// Whether a fault is one of attention on tensor cores.
fn is_tuned(fault: &SourceFault) -> bool {
    ["forward.cu", "backward.cu"].contains(&fault.file)
}

/// Whether a problem comes to the pass that a fault of a source is in.
fn comes_to(fault: &SourceFault, problem: &Problem) -> bool {
    fault.file != "backward.cu" || problem.pass == Pass::Backward
}

/// Whether attention on tensor cores takes a problem, as far as the problem alone says.
fn on_tensor_cores(problem: &Problem) -> bool {
    let dims = [problem.dims.qk, problem.dims.v];
    dims.into_iter().all(|dim| dim.is_multiple_of(8) && dim <= forward::DIM_MAX)
        && problem.precision.p.format == problem.precision.q.format
        && problem.softmax.softcap.is_none()
}

/// The legal problems that a seed draws.
pub(super) fn problems(seed: u64) -> impl Iterator<Item = Problem> {
    drawn(seed, Limits::seams())
}

/// The same within other limits.
fn drawn(seed: u64, limits: Limits) -> impl Iterator<Item = Problem> {
    let mut indices = 0..DRAWN_MAX;
    iter::from_fn(move || {
        indices.find_map(|index| match generate::draw(seed, index, &limits) {
            Draw::Problem(problem) => Some(problem),
            Draw::Malformed(_) => None,
        })
    })
}

/// The emulated kernel, called wrongly.
pub fn miscalled(miscall: &'static Miscall, seed: u64) -> Miscalled<Emulated> {
    Miscalled::new(emulated(seed), miscall)
}

/// The problems of a seed's stream on which the fault changes a bit: on the others it is equivalent.
pub fn call_stream(subject: Miscalled<Emulated>, seed: u64) -> impl Iterator<Item = Problem> {
    let taken = subject.capabilities();
    let drawn = problems(seed).filter(move |problem| taken.refusal(problem).is_none());
    drawn.filter(move |problem| subject.shows(problem, &values::inputs(problem))).take(CASES_MAX)
}
