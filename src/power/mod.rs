//! Power: how often a subtle fault is caught, by this judge and by the acceptance rules of the field.
//!
//! For each fault of a fixed table two *pools* of cases are made, all of them cases where the fault changes a bit of
//! the results. The judge's pool is drawn over the campaign's own mix of input modes. The other pool has the
//! near-normal inputs of the field's test suites, flat and peaked in turn, with ordinary numbers in padding rows. A
//! *draw* is [`DRAW`] cases of a pool, with repeats. It catches the fault when one of its cases does. The figure is
//! the number of [`DRAWS`] seeded draws that catch the fault: for the judge, for the tolerance rule, and for the rule
//! of twice the error of a same-precision reference ([`rules`]). The row without a fault counts false alarms.

pub mod rows;
pub mod rules;

use std::io::{self, Write};

use rayon::prelude::*;
use seamproof_oracle::{InputMode, Inputs, Pass, Problem, ProblemFields};

use rows::{MeasuredSubject, PowerRow, ROWS};
use rules::Tensors;
use seamproof_judge::evaluate::evaluate;
use seamproof_judge::exact;
use seamproof_judge::generate::{self, Draw, Limits};
use seamproof_judge::ladder::Judge;
use seamproof_judge::subject::{Backend, Outputs, RankOutputs};
use seamproof_judge::subjects::{Emulated, same_bits};
use seamproof_judge::values::{self, Poison};
use seamproof_judge::verdict::Verdict;
use seamproof_oracle::sharding as layout;

/// Number of cases in a draw.
pub const DRAW: usize = 20;
/// Number of draws in a figure.
pub const DRAWS: usize = 1000;
/// Modes of the other pool: logits of deviation ½, near those of the field's test suites, and of deviation 3, with
/// which each row depends on few keys and the field's rules see more.
const NEAR_NORMAL: [InputMode; 2] = [InputMode::Flat, InputMode::Peaked];
/// Number of candidates for one case of a pool. Those on which the fault does not show are discarded.
const CANDIDATES: usize = 8;

/// Plan of a measurement.
#[derive(Clone, Copy, Debug)]
pub struct PowerPlan {
    /// Number of cases in each pool.
    pub cases: usize,
    /// Seed that draws the cases, and the draws.
    pub seed: u64,
}

/// Cases of a pool: the mode of each, and whether it was caught.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Caught(pub Vec<(InputMode, bool)>);

impl Caught {
    /// Returns the number of cases that were caught.
    pub fn cases(&self) -> usize {
        self.0.iter().filter(|(_, caught)| *caught).count()
    }

    /// Returns the cases of one mode.
    pub fn in_mode(&self, mode: InputMode) -> Caught {
        Caught(self.0.iter().copied().filter(|(of, _)| *of == mode).collect())
    }

    /// Returns in words how many of all cases were caught.
    fn share(&self) -> String {
        format!("{} of {}", self.cases(), self.0.len())
    }

    /// Returns the number of [`DRAWS`] draws in which at least one case was caught.
    pub fn draws(&self, seed: u64) -> usize {
        let Self(pool) = self;
        let case = |draw: usize, case: usize| {
            let hash =
                seamproof_judge::hash::absorb(seamproof_judge::hash::absorb(seed, draw as u64), case as u64);
            pool.get((hash % pool.len().max(1) as u64) as usize).is_some_and(|(_, caught)| *caught)
        };
        (0..DRAWS).filter(|draw| (0..DRAW).any(|index| case(*draw, index))).count()
    }
}

/// Measurement of one row.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Measured {
    /// Cases caught by the judge, over the campaign's mix of modes.
    pub judge: Caught,
    /// Cases caught by the tolerance.
    pub tolerance: Caught,
    /// Cases caught by twice the error of the same-precision reference.
    pub twice: Caught,
}

/// Prints the table, each row as soon as it is measured; `begin` is told of each row before. Returns whether the
/// judge caught every fault in every draw, and nothing where there is no fault.
pub fn table(plan: &PowerPlan, to: &mut dyn Write, mut begin: impl FnMut(&str)) -> io::Result<bool> {
    writeln!(to, "| fault | (a) this judge | (b) atol = rtol = 2.5e-2 | (c) twice the reference's error |")?;
    writeln!(to, "|---|---|---|---|")?;
    let mut held = true;
    for row in &ROWS {
        begin(row.name);
        let measured = measure(row, plan)?;
        let Measured { judge, tolerance, twice } = &measured;
        let wanted = if matches!(row.subject, MeasuredSubject::Right) { 0 } else { DRAWS };
        held &= judge.draws(plan.seed) == wanted && judge.0.len() == plan.cases;
        let field = |caught: &Caught| {
            let [flat, peaked] = NEAR_NORMAL.map(|mode| caught.in_mode(mode).share());
            format!("{} (flat {flat}, peaked {peaked})", caught.draws(plan.seed))
        };
        let ours = format!("{} ({})", judge.draws(plan.seed), judge.share());
        writeln!(to, "| {} | {ours} | {} | {} |", row.name, field(tolerance), field(twice))?;
        to.flush()?;
    }
    writeln!(to, "\nDraws of {DRAW} cases that catch the fault, of {DRAWS}; in brackets the cases that do.")?;
    Ok(held)
}

/// Measures one row. An error says that its subject or its problems cannot be made, which is a fault of the table.
pub fn measure(row: &PowerRow, plan: &PowerPlan) -> io::Result<Measured> {
    let subject = row.subject.backend().map_err(io::Error::other)?;
    let Some((first, _)) = row.shapes.split_first() else { return Ok(Measured::default()) };
    first.problem(0, InputMode::Flat).map_err(io::Error::other)?;
    let case = |index: usize, mode: InputMode| {
        let problem = row.shapes[index % row.shapes.len()].problem(plan.seed + index as u64, mode);
        problem.ok().map(|problem| Case { problem, subject: subject.as_ref(), row })
    };
    let modes = campaign_modes(plan);
    let judge = pool(plan, |index| case(index, modes[index])?.judged());
    let field = pool(plan, |index| case(index, NEAR_NORMAL[index / row.shapes.len() % 2])?.by_rules());
    let column = |rule: usize| Caught(field.iter().map(|(mode, caught)| (*mode, caught[rule])).collect());
    Ok(Measured { judge: Caught(judge), tolerance: column(0), twice: column(1) })
}

/// Returns the first cases whose candidates are usable.
fn pool<T: Send>(plan: &PowerPlan, candidate: impl Fn(usize) -> Option<T> + Sync) -> Vec<T> {
    let mut found = Vec::new();
    for round in 0..CANDIDATES {
        if found.len() < plan.cases {
            let indices = round * plan.cases..(round + 1) * plan.cases;
            found.par_extend(indices.into_par_iter().filter_map(&candidate));
        }
    }
    found.truncate(plan.cases);
    found
}

/// Returns the modes of a campaign's cases.
fn campaign_modes(plan: &PowerPlan) -> Vec<InputMode> {
    let (limits, table) = (Limits::quick(), Emulated::default().declaration().table);
    let mode = |index: u64| match generate::draw(plan.seed, index, &limits) {
        Draw::Problem(problem) if table.refusal(&problem).is_none() => Some(problem.mode),
        _ => None,
    };
    (0..).filter_map(mode).take(CANDIDATES * plan.cases).collect()
}

/// A problem and the subject that runs it.
struct Case<'a> {
    problem: Problem,
    subject: &'a dyn Backend,
    row: &'a PowerRow,
}

impl Case<'_> {
    /// Whether the judge finds the fault; `None` where the mode does not suit this shape, or the fault does not show.
    fn judged(&self) -> Option<(InputMode, bool)> {
        let mode = self.problem.mode;
        if mode.is_exact() && exact::eligible(mode, &self.problem).is_err() {
            return None;
        }
        let mut inputs = values::inputs(&self.problem);
        values::poison(&mut inputs, &self.problem, Poison::Nan);
        self.outputs(&inputs)?;
        Some((mode, matches!(evaluate(self.subject, &self.problem), Verdict::Finding(_))))
    }

    /// Whether each of the two rules of the field rejects the results.
    fn by_rules(&self) -> Option<(InputMode, [bool; 2])> {
        let (problem, inputs) = (&self.problem, ordinary(&self.problem)?);
        let got = self.outputs(&inputs)?;
        let Some(got) = got.and_then(|outputs| whole(problem, outputs)) else {
            return Some((problem.mode, [true; 2]));
        };
        let got = Tensors::of(&got);
        let gradients = problem.pass == Pass::Backward;
        let exact = Tensors::exact(problem, &inputs, gradients);
        let same = rules::same_precision(problem, &inputs, gradients);
        let accepted = [
            rules::within_tolerance(&got, &exact, problem),
            rules::within_twice_reference(&got, &same, &exact, problem),
        ];
        Some((problem.mode, accepted.map(|accepted| !accepted)))
    }

    /// Returns the subject's results on the inputs, `Some(None)` where it does not run; `None` where there is a fault
    /// and it changes nothing.
    fn outputs(&self, inputs: &Inputs) -> Option<Option<Outputs>> {
        let got = self.subject.run(&self.problem, inputs).ok();
        if matches!(self.row.subject, MeasuredSubject::Right) {
            return Some(got);
        }
        let right = MeasuredSubject::right().run(&self.problem, inputs).ok()?;
        let shows = got.as_ref().is_none_or(|got| !same_bits(&right, got));
        shows.then_some(got)
    }
}

/// Returns the inputs with ordinary numbers in padding rows: those that the sequences would hold if they were that
/// long.
fn ordinary(problem: &Problem) -> Option<Inputs> {
    let mut fields: ProblemFields = problem.clone().into();
    for sequence in &mut fields.sequences {
        (sequence.q.len, sequence.kv.len) = (sequence.q.span, sequence.kv.span);
    }
    Problem::new(fields).ok().map(|longer| values::inputs(&longer))
}

/// Returns the ranks' results in the problem's own layout.
fn whole(problem: &Problem, outputs: Outputs) -> Option<RankOutputs> {
    let layouts = layout::layouts(problem).ok()?;
    (Judge::default().assemble)(problem, &layouts, outputs.ranks).ok()
}
