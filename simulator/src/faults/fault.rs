//! A [`Fault`]: what is planted where, and what must catch it.

use seamproof_oracle::Problem;

use crate::emulated::Variant;
use crate::schedule::Schedule;

/// What catches a fault: the symbolic checker, or a check of the judge.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Catcher {
    /// The proof of the schedule.
    Checker,
    /// What a subject's table promises is not what it runs and refuses.
    Capability,
    /// The schedule does not run to its end.
    Crash,
    /// Unwritten rows, the padding contract, rows that nobody owns.
    Structure,
    /// Padding or slack reaches a real row.
    Poison,
    /// A result other than the one that exact inputs allow.
    Exact,
    /// Two runs that must agree do not.
    Identity,
    /// A value outside its bound.
    Envelope,
}

impl Catcher {
    /// Every catcher: the proof, then the judge's ladder in its order.
    pub const ALL: [Catcher; 8] = [
        Catcher::Checker,
        Catcher::Capability,
        Catcher::Crash,
        Catcher::Structure,
        Catcher::Poison,
        Catcher::Exact,
        Catcher::Envelope,
        Catcher::Identity,
    ];

    /// The name in texts.
    pub fn name(self) -> &'static str {
        match self {
            Catcher::Checker => "checker",
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

/// An edit of the right schedule of a problem; it leaves alone what it has no meaning for.
pub type Edit = fn(&Problem, &mut Schedule);

/// Where a fault is planted.
#[derive(Clone, Copy, Debug)]
pub enum Plant {
    /// In the schedule.
    Schedule(Edit),
    /// In the kernel: stages of which some are wrong.
    Kernel(&'static dyn Variant),
}

/// A planted bug, in any of the catalogues: of schedules and kernels here, of calls, tables and the judge elsewhere. They
/// differ in what is done to plant one.
#[derive(Clone, Copy, Debug)]
pub struct Fault<P = Plant> {
    /// Its name in reports.
    pub id: &'static str,
    /// What goes wrong.
    pub imitates: &'static str,
    /// Where that happened.
    pub source: &'static str,
    /// Its entries in the list of real bugs; none where the list has it as a defect of TransformerEngine, or not at all.
    pub entries: &'static [u16],
    /// Any of these may be the first to see it; at least one must.
    pub caught_by: &'static [Catcher],
    /// What is done to plant it.
    pub edit: P,
}

/// What a fault says of itself, without what is done to plant it.
pub type FaultRecord = Fault<()>;

impl<P> Fault<P> {
    /// The same bug, planted in another way.
    const fn planted_by<Q>(&self, edit: Q) -> Fault<Q> {
        let Fault { id, imitates, source, entries, caught_by, .. } = *self;
        Fault { id, imitates, source, entries, caught_by, edit }
    }

    /// What the fault says of itself.
    pub const fn record(&self) -> FaultRecord {
        self.planted_by(())
    }

    /// Whether the fault names this catcher. Inputs of an exact mode ask what the envelope asks, without a tolerance: a
    /// fault that names the envelope may be met by them first.
    pub fn is_caught_by(&self, catcher: Catcher) -> bool {
        let sharper = catcher == Catcher::Exact && self.caught_by.contains(&Catcher::Envelope);
        sharper || self.caught_by.contains(&catcher)
    }
}

/// Faults of one id are the same.
impl<P> PartialEq for Fault<P> {
    fn eq(&self, other: &Fault<P>) -> bool {
        self.id == other.id
    }
}

impl<P> Eq for Fault<P> {}

/// The fault of this id in a catalogue.
pub fn find<'a, P>(catalogue: impl IntoIterator<Item = &'a Fault<P>>, id: &str) -> Option<&'a Fault<P>> {
    catalogue.into_iter().find(|fault| fault.id == id)
}

impl Fault<Edit> {
    /// The same as an entry of the catalogue.
    pub const fn entry(self) -> Fault {
        self.planted_by(Plant::Schedule(self.edit))
    }
}

impl Fault {
    /// Plants the fault in the right schedule of a problem; says whether that changed anything. What is wrong in the
    /// kernel changes no schedule.
    pub fn plant(&self, problem: &Problem, schedule: &mut Schedule) -> bool {
        let Plant::Schedule(edit) = self.edit else { return false };
        let right = schedule.clone();
        edit(problem, schedule);
        *schedule != right
    }
}
