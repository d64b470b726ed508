//! Plans with a few edits drawn at random, also ones that no single edit of an operation reaches: none is proved whose
//! unrolled schedule is refused.

use rayon::prelude::*;
use seamproof_oracle::{Problem, ProblemFields, Side};
use seamproof_simulator::check::check;
use seamproof_simulator::check::plan::prove_plan;
use seamproof_simulator::schedule::FillValue;
use seamproof_simulator::schedule::plan::{Act, Extent, Loan, Op, Own, Plan, Programs, Way};

use crate::common::Draws;
use crate::plan::{PACKS, owner, owns};

/// The number of edited plans of each pack.
const TRIED: usize = 400;
/// The most edits of one.
const EDITS_MAX: usize = 4;
/// Rows that nobody owns, before the second sequence: a multiple of every span that the packs have.
const GAP: usize = 24;

/// What becomes of an operation of a section.
#[derive(Debug)]
enum Change {
    /// Another one comes before it.
    Insert(Op),
    Remove,
    /// It names another buffer, in this place among those that it names.
    Rename(usize, Own),
    /// Its keys are those of the owner so many places behind.
    Owner(u32),
    /// The next one comes first.
    Swap,
    Stream(u8),
}

/// An edit of a section, on one rank or on all.
#[derive(Debug)]
struct Edit {
    rank: Option<usize>,
    section: usize,
    index: usize,
    change: Change,
}

impl Edit {
    fn apply(&self, plan: &Plan<'_>, ops: &mut Vec<Op>) {
        if let Change::Insert(op) = self.change {
            return ops.insert(self.index.min(ops.len()), op);
        }
        let Some(op) = ops.get_mut(self.index) else { return };
        match self.change {
            Change::Insert(_) => {}
            Change::Remove => drop(ops.remove(self.index)),
            Change::Rename(number, own) => {
                owns(&mut op.act).into_iter().skip(number).take(1).for_each(|of| *of = own);
            }
            Change::Owner(by) => {
                owner(&mut op.act).into_iter().for_each(|of| *of = (*of + by) % plan.owners() as u32);
            }
            Change::Swap => ops[self.index..].chunks_mut(2).take(1).for_each(<[Op]>::reverse),
            Change::Stream(stream) => op.stream = stream,
        }
    }
}

/// Programs of a plan with edits.
struct Edited<'p> {
    plan: &'p Plan<'p>,
    edits: Vec<Edit>,
}

impl Programs for Edited<'_> {
    fn sections(&self) -> usize {
        self.plan.sections()
    }

    fn section(&self, rank: usize, index: usize, to: &mut Vec<Op>) {
        self.plan.section(rank, index, to);
        let here = |edit: &&Edit| edit.section == index && edit.rank.is_none_or(|edited| edited == rank);
        self.edits.iter().filter(here).for_each(|edit| edit.apply(self.plan, to));
    }
}

/// Edits are drawn from these operations of one rank, section by section.
struct Drawn<'p> {
    plan: &'p Plan<'p>,
    sections: Vec<Vec<Op>>,
}

impl<'p> Drawn<'p> {
    fn new(plan: &'p Plan<'p>) -> Drawn<'p> {
        let section = |index| {
            let mut ops = Vec::new();
            plan.section(plan.ranks() / 2, index, &mut ops);
            ops
        };
        Drawn { plan, sections: (0..plan.sections()).map(section).collect() }
    }

    fn edits(&self, draws: &mut Draws) -> Vec<Edit> {
        let rank = (draws.below(3) == 0).then(|| draws.below(self.plan.ranks()));
        if draws.below(2) == 0 {
            return self.rerouted(draws, rank);
        }
        let count = 1 + draws.below(EDITS_MAX);
        let edit = |_| {
            let (section, index) = self.place(draws);
            let change = self.change(draws, self.sections[section].get(index));
            Edit { rank, section, index, change }
        };
        (0..count).map(edit).collect()
    }

    /// Returns a section and the index of one of its operations, or its end.
    fn place(&self, draws: &mut Draws) -> (usize, usize) {
        let section = draws.below(self.sections.len());
        (section, draws.below(self.sections[section].len() + 1))
    }

    /// Returns edits of one operation, which names another buffer: this one or its own is filled before.
    fn rerouted(&self, draws: &mut Draws, rank: Option<usize>) -> Vec<Edit> {
        let (section, index) = self.place(draws);
        let op = self.sections[section].get(index);
        let change = self.rename(draws, op);
        let Some((op, Change::Rename(number, other))) = op.zip(Some(&change)) else { return Vec::new() };
        let own = owns(&mut { op.act }).into_iter().nth(*number).map(|own| *own);
        let to = [*other, own.unwrap_or(*other)][draws.below(2)];
        let act = Act::Fill { to, rows: self.extent(draws), value: value(draws) };
        let fill = Change::Insert(Op { stream: op.stream, act });
        [(index, fill), (index + 1, change)]
            .map(|(index, change)| Edit { rank, section, index, change })
            .into()
    }

    fn change(&self, draws: &mut Draws, op: Option<&Op>) -> Change {
        match draws.below(10) {
            0..=4 => Change::Insert(self.operation(draws)),
            5 => Change::Remove,
            6 | 7 => self.rename(draws, op),
            8 if draws.below(2) == 0 => Change::Owner(1),
            8 => Change::Swap,
            _ => Change::Stream(draws.below(3) as u8),
        }
    }

    /// Returns an operation that is nowhere in the plan, or is there with other buffers.
    fn operation(&self, draws: &mut Draws) -> Op {
        let section = &self.sections[draws.below(self.sections.len())];
        let mut act = match section.get(draws.below(section.len().max(1))) {
            Some(op) if draws.below(3) == 0 => op.act,
            _ => self.made(draws),
        };
        if let Change::Rename(number, own) = self.rename(draws, Some(&Op { stream: 0, act })) {
            owns(&mut act).into_iter().skip(number).take(1).for_each(|of| *of = own);
        }
        Op { stream: draws.below(3) as u8, act }
    }

    fn made(&self, draws: &mut Draws) -> Act {
        let side = [Side::Q, Side::Kv][draws.below(2)];
        let way = [Way::Collect, Way::Deal][draws.below(2)];
        let (rows, value) = (self.extent(draws), value(draws));
        let [from, to] = [(); 2].map(|()| Own(draws.below(self.plan.buffers().len()) as u16));
        match draws.below(10) {
            0..=3 => Act::Fill { to, rows, value },
            4 | 5 => Act::Copy { from, to: self.alike(draws, from), rows },
            6 => Act::AllToAll { side, way, from, to, landings: 1 },
            7 => Act::Reorder { from, to, side, way },
            8 => Act::Pack { from, to, loan: Loan::Holes },
            _ => Act::AllReduce { buffer: to },
        }
    }

    fn extent(&self, draws: &mut Draws) -> Extent {
        let side = [Side::Q, Side::Kv][draws.below(2)];
        let of_side =
            [Extent::Slots(side), Extent::LocalSlots(side), Extent::Held(side), Extent::Shard(side)];
        of_side.into_iter().chain([Extent::All, Extent::Values]).nth(draws.below(6)).unwrap()
    }

    /// Returns another buffer of one shape for one of those that an operation names.
    fn rename(&self, draws: &mut Draws, op: Option<&Op>) -> Change {
        let named = op.map(|op| owns(&mut { op.act }).into_iter().map(|own| *own).collect::<Vec<_>>());
        match named.unwrap_or_default() {
            named if named.is_empty() => Change::Swap,
            named => {
                let number = draws.below(named.len());
                Change::Rename(number, self.alike(draws, named[number]))
            }
        }
    }

    fn alike(&self, draws: &mut Draws, own: Own) -> Own {
        let buffers = self.plan.buffers();
        let shape = |index: usize| {
            (buffers[index].axes, buffers[index].rows, buffers[index].heads, buffers[index].dim)
        };
        let others: Vec<usize> =
            (0..buffers.len()).filter(|other| shape(*other) == shape(usize::from(own.0))).collect();
        Own(others[draws.below(others.len())] as u16)
    }
}

fn value(draws: &mut Draws) -> FillValue {
    [FillValue::Zero, FillValue::Zero, FillValue::NegInfinity][draws.below(3)]
}

/// Returns a problem with rows before its second sequence that nobody owns.
fn with_gap(problem: &Problem) -> Problem {
    let mut fields = ProblemFields::from(problem.clone());
    let second = &mut fields.sequences[1];
    (second.q.offset, second.kv.offset) = (second.q.offset + GAP, second.kv.offset + GAP);
    (fields.rows.q, fields.rows.kv) = (fields.rows.q + GAP, fields.rows.kv + GAP);
    Problem::new(fields).unwrap()
}

#[test]
fn of_plans_with_drawn_edits_none_is_proved_whose_schedule_is_refused() {
    let mut proved = 0;
    for (number, pack) in PACKS.iter().enumerate() {
        for problem in [pack.problem(), with_gap(&pack.problem())] {
            let plan = Plan::new(&problem, pack.order).unwrap();
            let drawn = Drawn::new(&plan);
            let tried = (0..TRIED).into_par_iter().filter(|time| {
                let edits = drawn.edits(&mut Draws((number * TRIED + time) as u64));
                let programs = Edited { plan: &plan, edits };
                if prove_plan(&plan, &programs).is_err() {
                    return false;
                }
                let unrolled = check(&problem, &plan.unroll(&programs));
                assert!(unrolled.is_ok(), "pack {number}: {:?} are proved: {unrolled:?}", programs.edits);
                true
            });
            proved += tried.count();
        }
    }
    // What is right with an edit is proved too: a fill that is written over, a copy of an input.
    assert!(proved > 0, "{proved}");
}
