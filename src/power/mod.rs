//! Power: how often a subtle fault is caught, by this judge and by the acceptance rules of the field.
//!
//! For each fault of a fixed table two *pools* of cases are made, all of them cases where the fault changes a bit of
//! the results. The judge's pool is drawn over the campaign's own mix of input modes. The other pool has the
//! near-normal inputs of the field's test suites, flat and peaked in turn, with ordinary numbers in padding rows. A
//! *draw* is [`DRAW`] cases of a pool, with repeats. It catches the fault when one of its cases does. The figure is
//! the number of [`DRAWS`] seeded draws that catch the fault: for the judge, and for two rules of the field ([`rules`]).
//! The row without a fault counts false alarms. There is a table in bf16, and one in FP8.

pub mod rows;
pub mod rules;
pub mod tensors;

use std::io::{self, Write};

use rayon::prelude::*;
use seamproof_oracle::{InputMode, Inputs, Pass, Problem, ProblemFields, Scales};

use rows::{BF16_ROWS, FP8_ROWS, PowerRow};
use rules::{BF16_RULES, Compared, FP8_RULES, Rule};
use seamproof_judge::evaluate::evaluate;
use seamproof_judge::exact;
use seamproof_judge::generate::{self, Draw, Limits};
use seamproof_judge::ladder::Judge;
use seamproof_judge::subject::{Backend, Outputs, RankOutputs};
use seamproof_judge::subjects::{Emulated, same_bits};
use seamproof_judge::values::{self, Poison};
use seamproof_judge::verdict::Verdict;
use seamproof_oracle::sharding as layout;
use tensors::Tensors;

/// Number of cases in a draw.
pub const DRAW: usize = 20;
/// Number of draws in a figure.
pub const DRAWS: usize = 1000;
/// Modes of the other pool: logits of deviation ½, near those of the field's test suites, and of deviation 3, with
/// which each row depends on few keys and the field's rules see more.
const NEAR_NORMAL: [InputMode; 2] = [InputMode::Flat, InputMode::Peaked];
/// Number of candidates for one case of a pool. Those on which the fault does not show are discarded.
const CANDIDATES: usize = 8;

/// A table of faults, and the rules of the field beside the judge.
#[derive(Clone, Copy, Debug)]
pub struct PowerTable {
    /// The rows.
    pub rows: &'static [PowerRow],
    /// The rules.
    pub rules: [Rule; 2],
}

/// Faults of the kernel in bf16.
pub const BF16: PowerTable = PowerTable { rows: &BF16_ROWS, rules: BF16_RULES };
/// Faults of the kernel in FP8.
pub const FP8: PowerTable = PowerTable { rows: &FP8_ROWS, rules: FP8_RULES };

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
    /// Cases caught by each rule of the table.
    pub rules: [Caught; 2],
}

/// Prints the table, each row as soon as it is measured; `begin` is told of each row before. Returns whether the
/// judge caught every fault in every draw, and nothing where there is no fault.
pub fn print(
    table: &PowerTable,
    plan: &PowerPlan,
    to: &mut dyn Write,
    begin: &mut dyn FnMut(&str),
) -> io::Result<bool> {
    let [first, second] = table.rules.map(|rule| rule.name);
    writeln!(to, "| fault | (a) this judge | (b) {first} | (c) {second} |")?;
    writeln!(to, "|---|---|---|---|")?;
    let mut held = true;
    for row in table.rows {
        begin(row.name);
        let Measured { judge, rules } = measure(row, &table.rules, plan)?;
        let wanted = if row.subject.is_right() { 0 } else { DRAWS };
        held &= judge.draws(plan.seed) == wanted && judge.0.len() == plan.cases;
        let field = |caught: &Caught| {
            let [flat, peaked] = NEAR_NORMAL.map(|mode| caught.in_mode(mode).share());
            format!("{} (flat {flat}, peaked {peaked})", caught.draws(plan.seed))
        };
        let ours = format!("{} ({})", judge.draws(plan.seed), judge.share());
        writeln!(to, "| {} | {ours} | {} | {} |", row.name, field(&rules[0]), field(&rules[1]))?;
        to.flush()?;
    }
    writeln!(to, "\nDraws of {DRAW} cases that catch the fault, of {DRAWS}; in brackets the cases that do.")?;
    Ok(held)
}

/// Measures one row. An error says that its subject or its problems cannot be made, which is a fault of the table.
pub fn measure(row: &PowerRow, rules: &[Rule; 2], plan: &PowerPlan) -> io::Result<Measured> {
    let [subject, right] = row.subjects().map_err(io::Error::other)?;
    let Some((first, _)) = row.shapes.split_first() else { return Ok(Measured::default()) };
    first.problem(0, InputMode::Flat).map_err(io::Error::other)?;
    let table = right.declaration().table;
    let case = |index: usize, mode: InputMode| {
        let problem = row.shapes[index % row.shapes.len()].problem(plan.seed + index as u64, mode).ok()?;
        let (problem, is_right) = (table.fitted(problem), row.subject.is_right());
        Some(Case { problem, subject: subject.as_ref(), right: right.as_ref(), is_right })
    };
    let modes = campaign_modes(plan);
    let judge = pool(plan, |index| case(index, modes[index])?.judged());
    let field = pool(plan, |index| case(index, NEAR_NORMAL[index / row.shapes.len() % 2])?.by_rules(rules));
    let column = |rule: usize| Caught(field.iter().map(|(mode, caught)| (*mode, caught[rule])).collect());
    Ok(Measured { judge: Caught(judge), rules: [0, 1].map(column) })
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
    /// The subject without a fault.
    right: &'a dyn Backend,
    is_right: bool,
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
    fn by_rules(&self, rules: &[Rule; 2]) -> Option<(InputMode, [bool; 2])> {
        let (problem, inputs) = (&self.problem, ordinary(&self.problem)?);
        let got = self.outputs(&inputs)?;
        let Some(got) = got.and_then(|outputs| whole(problem, outputs)) else {
            return Some((problem.mode, [true; 2]));
        };
        let got = Tensors::of(&got);
        let exact = Tensors::exact(problem, &inputs, problem.pass == Pass::Backward);
        let compared = Compared { got: &got, exact: &exact, problem, inputs: &inputs };
        Some((problem.mode, rules.map(|rule| !(rule.accepts)(&compared))))
    }

    /// Returns the subject's results on the inputs, `Some(None)` where it does not run; `None` where there is a fault
    /// and it changes nothing.
    fn outputs(&self, inputs: &Inputs) -> Option<Option<Outputs>> {
        let got = self.subject.run(&self.problem, inputs).ok();
        if self.is_right {
            return Some(got);
        }
        let right = self.right.run(&self.problem, inputs).ok()?;
        let shows = got.as_ref().is_none_or(|got| !same_bits(&right, got));
        shows.then_some(got)
    }
}

/// Returns the inputs with ordinary numbers in padding rows: those that the sequences would hold if they were that
/// long. Codes have descales from ½ to 2, as tolerances for values near 1 need.
fn ordinary(problem: &Problem) -> Option<Inputs> {
    let mut fields: ProblemFields = problem.clone().into();
    for sequence in &mut fields.sequences {
        (sequence.q.len, sequence.kv.len) = (sequence.q.span, sequence.kv.span);
    }
    let inputs = values::inputs(&Problem::new(fields).ok()?);
    let near_one = |descale: f32| {
        let (significand, exponent) = libm::frexpf(descale);
        if exponent % 2 == 0 { significand } else { 2.0 * significand }
    };
    let scales = Scales::new(problem, |tensor, _, place| {
        inputs.scales.of(tensor).map_or(1.0, |scales| near_one(scales.descale()[place]))
    });
    Some(Inputs { scales, ..inputs })
}

/// Returns the ranks' results in the problem's own layout.
pub(crate) fn whole(problem: &Problem, outputs: Outputs) -> Option<RankOutputs> {
    let layouts = layout::layouts(problem).ok()?;
    (Judge::default().assemble)(problem, &layouts, outputs.ranks).ok()
}
