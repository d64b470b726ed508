//! A [`Fault`]: a planted bug, with its place and the checks that must catch it.

use seamproof_oracle::Problem;

use crate::emulated::Variant;
use crate::schedule::Schedule;

/// Check that catches a fault: a proof or a count of the schedule, or a check of the judge.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Catcher {
    /// The proof of the schedule.
    Checker,
    /// The growth of the schedule's memory, launches and host reads.
    Resources,
    /// A subject that runs a problem which its table refuses, or refuses one which its table takes.
    Capability,
    /// A schedule that does not run to its end.
    Crash,
    /// Unwritten rows, broken padding contract, or writes to rows that nobody owns.
    Structure,
    /// Padding or slack that reaches a real row.
    Poison,
    /// A result that differs from the only one that exact inputs allow.
    Exact,
    /// Two runs that must agree and do not.
    Identity,
    /// A value outside its bound.
    Envelope,
}

impl Catcher {
    /// Every catcher: those that need no run, then the checks in the ladder's order.
    pub const ALL: [Catcher; 9] = [
        Catcher::Checker,
        Catcher::Resources,
        Catcher::Capability,
        Catcher::Crash,
        Catcher::Structure,
        Catcher::Poison,
        Catcher::Exact,
        Catcher::Envelope,
        Catcher::Identity,
    ];

    /// Whether it looks at a schedule and runs nothing.
    pub fn is_static(self) -> bool {
        matches!(self, Catcher::Checker | Catcher::Resources)
    }

    /// Returns the name used in texts.
    pub fn name(self) -> &'static str {
        match self {
            Catcher::Checker => "checker",
            Catcher::Resources => "resources",
            Catcher::Capability => "capability",
            Catcher::Crash => "crash",
            Catcher::Structure => "structure",
            Catcher::Poison => "poison",
            Catcher::Exact => "exact",
            Catcher::Identity => "identity",
            Catcher::Envelope => "envelope",
        }
    }
}

/// An edit of the right schedule of a problem. It leaves a schedule alone if it has no meaning there.
pub type Edit = fn(&Problem, &mut Schedule);

/// Place where a fault is planted, with the change.
#[derive(Clone, Copy, Debug)]
pub enum Plant {
    /// An edit of the schedule.
    Schedule(Edit),
    /// A kernel with some wrong stages.
    Kernel(&'static dyn Variant),
}

/// A planted bug of any catalogue. This module's catalogue has faults of schedules and kernels; others have faults of
/// calls, tables and the judge. They differ in the type of their edit.
#[derive(Clone, Copy, Debug)]
pub struct Fault<P = Plant> {
    /// Name in reports.
    pub id: &'static str,
    /// The behaviour that is wrong.
    pub imitates: &'static str,
    /// The public source of the real bug.
    pub source: &'static str,
    /// Entries in the list of real bugs; empty if the list has the bug as a defect of TransformerEngine, or not at all.
    pub entries: &'static [u16],
    /// Checks that may be the first to see the fault. At least one of them must see the fault.
    pub caught_by: &'static [Catcher],
    /// The change that plants the fault.
    pub edit: P,
}

/// The description of a fault, without its edit.
pub type FaultRecord = Fault<()>;

impl<P> Fault<P> {
    /// Returns this fault's description with another edit.
    const fn planted_by<Q>(&self, edit: Q) -> Fault<Q> {
        let Fault { id, imitates, source, entries, caught_by, .. } = *self;
        Fault { id, imitates, source, entries, caught_by, edit }
    }

    /// Returns the fault's description.
    pub const fn record(&self) -> FaultRecord {
        self.planted_by(())
    }

    /// Whether a run can show the fault. A fault that names only catchers of schedules is not tried elsewhere.
    pub fn shows_in_runs(&self) -> bool {
        !self.caught_by.iter().all(|catcher| catcher.is_static())
    }

    /// Whether the fault names this catcher. A fault that names the envelope also counts as caught by exact inputs,
    /// because an exact mode makes the same comparison without a tolerance and may meet the fault first.
    pub fn is_caught_by(&self, catcher: Catcher) -> bool {
        let sharper = catcher == Catcher::Exact && self.caught_by.contains(&Catcher::Envelope);
        sharper || self.caught_by.contains(&catcher)
    }
}

/// Equality of ids.
impl<P> PartialEq for Fault<P> {
    fn eq(&self, other: &Fault<P>) -> bool {
        self.id == other.id
    }
}

impl<P> Eq for Fault<P> {}

/// Returns the fault with this id in a catalogue.
pub fn find<'a, P>(catalogue: impl IntoIterator<Item = &'a Fault<P>>, id: &str) -> Option<&'a Fault<P>> {
    catalogue.into_iter().find(|fault| fault.id == id)
}

impl Fault<Edit> {
    /// Returns this fault as an entry of the catalogue.
    pub const fn entry(self) -> Fault {
        self.planted_by(Plant::Schedule(self.edit))
    }
}

impl Fault {
    /// Plants the fault in the right schedule of a problem. Returns whether the schedule changed; a fault of the kernel
    /// changes no schedule.
    pub fn plant(&self, problem: &Problem, schedule: &mut Schedule) -> bool {
        let Plant::Schedule(edit) = self.edit else { return false };
        let right = schedule.clone();
        edit(problem, schedule);
        *schedule != right
    }
}
