//! The tables of arithmetic: what a kernel does with given codes, and what comes of it.
//!
//! Descales are powers of two, so that a kernel in bf16 takes the same values: it is the first row. The second is the
//! [emulated kernel](Fp8) with the sequence of FlashAttention-3 and a backward of its own, and most others are edits of
//! it. Where scales of what a kernel quantises are given, they are those of a delayed recipe whose amaxes are right.
//!
//! A choice is *seen* in a case where a kernel that makes it fails, although it declares that of the second row. It is
//! counted without a locked profile, as for a new subject, and with one.

use std::io::{self, Write};
use std::num::NonZeroUsize;

use rayon::prelude::*;
use seamproof_oracle::{
    Format, InputMode, Inputs, OwnScales, Pass, Precision, Problem, ProblemFields, Quantity, Scales,
    TensorScales,
};
use seamproof_simulator::emulated::Tiles;

use super::{AccuracyPlan, Errors, per_cent};
use crate::power::tensors::Tensors;
use crate::power::whole;
use seamproof_judge::evaluate::evaluate;
use seamproof_judge::profile::Lock;
use seamproof_judge::subject::{Backend, Declaration, Outputs, RunError};
use seamproof_judge::subjects::{Arithmetic, Emulated, Fp8, Fp8Sequence, fp8_fault};
use seamproof_judge::values;
use seamproof_judge::verdict::Verdict;

/// Logits of deviation ½, and of deviation 3.
const FLAT: (&str, InputMode) = ("flat", InputMode::Flat);
const PEAKED: (&str, InputMode) = ("peaked", InputMode::Peaked);
/// Head dimension.
const DIM: usize = 64;
/// Tiles of the kernels.
const TILES: Tiles = Tiles { q: 64, kv: 64 };
/// Number of runs after which given scales are those of right amaxes: what a run quantises first moves what it quantises
/// later.
const STEPS: usize = 3;

/// A kernel that makes a choice.
#[derive(Clone, Copy, Debug)]
pub enum Choice {
    /// The emulated kernel in bf16.
    Bf16,
    /// The emulated kernel in FP8, edited.
    Edited(fn(Fp8) -> Fp8),
    /// The same with a fault of its catalogue, which stands for a choice here.
    Fault(&'static str),
    /// The same with cuDNN's sequence: the descale of weights, and the place of its formats in the kernel's table.
    Given(f32, usize),
}

/// A table of a pass.
#[derive(Clone, Copy, Debug)]
pub struct Table {
    /// The pass.
    pub pass: Pass,
    /// Number of queries, and of keys.
    pub lengths: (usize, usize),
    /// Names and modes of the problems.
    pub modes: &'static [(&'static str, InputMode)],
    /// Names of the results with columns, and their places among out, dq, dk and dv.
    pub results: &'static [(&'static str, usize)],
    /// Rows: names and choices.
    pub rows: &'static [(&'static str, Choice)],
}

/// Choices of a forward.
pub const FORWARD: Table = Table {
    pass: Pass::Forward,
    lengths: (32, 4096),
    modes: &[FLAT, PEAKED, ("of one sign", InputMode::Offset), ("shadowed", InputMode::Shadowed)],
    results: &[("out", 0)],
    rows: &[
        ("bf16", Choice::Bf16),
        ("FP8: weights times 2⁸, sums promoted after 4 steps (128 keys)", Choice::Edited(|kernel| kernel)),
        ("sums promoted after each step", Choice::Edited(|kernel| promoted(kernel, 1))),
        ("sums promoted after 16 steps (512 keys)", Choice::Edited(|kernel| promoted(kernel, 16))),
        ("sums never promoted", Choice::Edited(|kernel| promoted(kernel, 0))),
        ("weights times 2⁴", Choice::Edited(|kernel| Fp8 { weight_exponent: 4, ..kernel })),
        ("weights as they are", Choice::Edited(|kernel| Fp8 { weight_exponent: 0, ..kernel })),
        ("weights cut towards zero", Choice::Fault("weights-cut-off")),
        ("weights rounded to fp16, then to e4m3", Choice::Fault("weights-rounded-twice")),
        ("row sum of rounded weights", Choice::Fault("row-sum-of-rounded-weights")),
        ("out in e4m3; weights times 448", Choice::Given(1.0 / 448.0, 0)),
        ("out in e4m3; weights as they are", Choice::Given(1.0, 0)),
    ],
};

/// Choices of a backward.
pub const BACKWARD: Table = Table {
    pass: Pass::Backward,
    lengths: (512, 512),
    modes: &[FLAT, PEAKED, ("steep", InputMode::Large)],
    results: &[("dq", 1), ("dv", 3)],
    rows: &[
        ("bf16", Choice::Bf16),
        (
            "FP8: a factor for each tile of dS, which is made of unrounded weights",
            Choice::Edited(|kernel| kernel),
        ),
        ("sums never promoted", Choice::Edited(|kernel| promoted(kernel, 0))),
        ("dS of rounded weights", Choice::Fault("rounded-weights-in-ds")),
        ("results and dS in e4m3 with given scales", Choice::Given(1.0 / 448.0, 0)),
        ("gradients, dS and dout in e5m2", Choice::Given(1.0 / 448.0, 1)),
        ("gradients in e5m2", Choice::Given(1.0 / 448.0, 2)),
    ],
};

/// Returns the kernel with sums that are promoted after some steps; 0 is never.
fn promoted(kernel: Fp8, steps: usize) -> Fp8 {
    Fp8 { promoted_after: NonZeroUsize::new(steps), ..kernel }
}

/// What was measured of a choice.
#[derive(Clone, Debug, PartialEq)]
pub struct Measured {
    /// Errors in each mode.
    pub errors: Vec<Errors>,
    /// Number of cases in which the judge sees a kernel that does not declare the choice, without a locked profile and
    /// with one; `None` where the choice is of another kernel.
    pub seen: Option<[usize; 2]>,
}

/// A problem and what came of it.
struct Case {
    problem: Problem,
    got: Tensors,
    exact: Tensors,
    seen: Option<[bool; 2]>,
}

impl Table {
    /// Prints the table, each row as soon as it is measured.
    pub(super) fn print(
        &self,
        plan: &AccuracyPlan,
        to: &mut dyn Write,
        begin: &mut dyn FnMut(&str),
    ) -> io::Result<()> {
        let columns: Vec<(usize, usize)> = self
            .results
            .iter()
            .flat_map(|(_, result)| (0..self.modes.len()).map(|mode| (*result, mode)))
            .collect();
        let names = self
            .results
            .iter()
            .flat_map(|(name, _)| self.modes.iter().map(move |(mode, _)| format!("{name}, {mode}")));
        writeln!(to, "| choice | {} | seen | with a lock |", names.collect::<Vec<_>>().join(" | "))?;
        writeln!(to, "|{}", "---|".repeat(columns.len() + 3))?;
        for (name, choice) in self.rows {
            begin(name);
            let Measured { errors, seen } = self.measure(*choice, plan)?;
            let errors = columns.iter().map(|&(result, mode)| per_cent(errors[mode].0[result]));
            let of_all = |seen| format!("{seen} of {}", plan.cases * self.modes.len());
            let seen = seen.map_or([const { String::new() }; 2], |seen| seen.map(of_all));
            writeln!(to, "| {name} | {} | {} |", errors.collect::<Vec<_>>().join(" | "), seen.join(" | "))?;
            to.flush()?;
        }
        Ok(())
    }

    /// Measures a choice. An error says that its kernel or its problems cannot be made, which is a fault of the table.
    pub fn measure(&self, choice: Choice, plan: &AccuracyPlan) -> io::Result<Measured> {
        let kernel = choice.kernel(self.pass)?;
        let all: Vec<(usize, u64)> = (0..self.modes.len())
            .flat_map(|mode| (0..plan.cases).map(move |case| (mode, plan.seed + case as u64)))
            .collect();
        let case = |&(mode, seed): &(usize, u64)| self.case(&kernel, self.modes[mode].1, seed);
        let cases = all.par_iter().map(case).collect::<io::Result<Vec<Case>>>()?;
        let errors = (0..self.modes.len()).map(|mode| {
            let of_mode = &cases[mode * plan.cases..(mode + 1) * plan.cases];
            Errors::of(of_mode.iter().map(|case| (&case.problem, &case.got, &case.exact)))
        });
        let errors = errors.collect();
        let count =
            |lock: usize| cases.iter().filter(|case| case.seen.is_some_and(|seen| seen[lock])).count();
        let seen = cases.iter().all(|case| case.seen.is_some()).then(|| [count(0), count(1)]);
        Ok(Measured { errors, seen })
    }

    fn case(&self, kernel: &Chosen, mode: InputMode, seed: u64) -> io::Result<Case> {
        let of = |precision: Precision| {
            Problem::new(ProblemFields {
                pass: self.pass,
                mode,
                data_seed: seed,
                precision,
                ..ProblemFields::packed(&[self.lengths], DIM)
            })
            .map_err(io::Error::other)
        };
        let problem = of(kernel.fp8.declaration().table.precisions[kernel.formats])?;
        let inputs = kernel.inputs(&problem)?;
        let values = inputs.values(&problem);
        let exact =
            Tensors::exact(&of(Precision::uniform(Format::F32))?, &values, self.pass == Pass::Backward);
        let got = match &kernel.bf16 {
            Some(bf16) => results(bf16, &of(Precision::uniform(Format::Bf16))?, &values)?,
            None => results(&kernel.fp8, &problem, &inputs)?,
        };
        let seen = kernel.says.as_ref().map(|says| {
            [false, true].map(|locked| {
                let subject = Undeclared { runs: &kernel.fp8, says, locked };
                matches!(evaluate(&subject, &problem), Verdict::Finding(_))
            })
        });
        Ok(Case { problem, got, exact, seen })
    }
}

/// The kernels of a choice.
struct Chosen {
    fp8: Fp8,
    /// The place of its formats among those that it takes.
    formats: usize,
    /// The kernel in bf16 that takes its place, on the same values.
    bf16: Option<Emulated>,
    /// The kernel of which it is an edit.
    says: Option<Fp8>,
    /// The descale of weights, where scales are given.
    weights: Option<f32>,
}

impl Choice {
    fn kernel(self, pass: Pass) -> io::Result<Chosen> {
        let says = Fp8 { tiles: TILES, backward: pass == Pass::Backward, ..Fp8::default() };
        let own = Chosen { fp8: says, formats: 0, bf16: None, says: None, weights: None };
        Ok(match self {
            Choice::Bf16 => Chosen {
                bf16: Some(Emulated { tiles: TILES, arithmetic: Arithmetic::Hopper, ..Emulated::default() }),
                ..own
            },
            Choice::Edited(edit) => Chosen { fp8: edit(says), says: Some(says), ..own },
            Choice::Fault(id) => {
                let unknown = || io::Error::other(format!("no fault {id} of the kernel in FP8"));
                let fault = fp8_fault(id).ok_or_else(unknown)?;
                Chosen { fp8: says.planted(fault), says: Some(says), ..own }
            }
            Choice::Given(weights, formats) => {
                let fp8 = Fp8 { sequence: Fp8Sequence::Cudnn, ..says };
                Chosen { fp8, formats, weights: Some(weights), ..own }
            }
        })
    }
}

impl Chosen {
    /// Returns the inputs of a problem. Given scales are made of the amaxes that the kernel returned.
    fn inputs(&self, problem: &Problem) -> io::Result<Inputs> {
        let mut inputs = values::inputs(problem);
        // Drawn descales make logits steeper or flatter, unless the mode takes them into account.
        if problem.mode != InputMode::Shadowed {
            let Scales { q, k, v, dout, own } = inputs.scales;
            let [q, k, v, dout] = [q, k, v, dout].map(|scales| scales.map(TensorScales::ones));
            inputs.scales = Scales { q, k, v, dout, own };
        }
        let Some(weights) = self.weights else { return Ok(inputs) };
        for _ in 0..STEPS {
            let amaxes = run(&self.fp8, problem, &inputs)?.ranks[0].amax;
            let own = OwnScales::new(&problem.precision, |quantity| match quantity {
                Quantity::P => weights,
                other => {
                    let most = other.element(&problem.precision).format.max_finite() as f32;
                    1.0 / (most / amaxes.of(other).filter(|amax| *amax > 0.0).unwrap_or(most))
                }
            });
            inputs = Inputs { scales: Scales::with_own(inputs.scales.clone(), own), ..inputs };
        }
        Ok(inputs)
    }
}

fn run(kernel: &dyn Backend, problem: &Problem, inputs: &Inputs) -> io::Result<Outputs> {
    kernel.run(problem, inputs).map_err(io::Error::other)
}

/// Returns a kernel's results.
fn results(kernel: &dyn Backend, problem: &Problem, inputs: &Inputs) -> io::Result<Tensors> {
    let none = || io::Error::other("results of another shape than the problem's");
    Ok(Tensors::of(&whole(problem, run(kernel, problem, inputs)?).ok_or_else(none)?))
}

/// A kernel that says of itself what holds for another one.
struct Undeclared<'a> {
    runs: &'a Fp8,
    says: &'a Fp8,
    /// Whether it has the other one's locked profile.
    locked: bool,
}

impl Backend for Undeclared<'_> {
    fn name(&self) -> &str {
        self.says.name()
    }

    fn declaration(&self) -> Declaration {
        self.says.declaration()
    }

    fn inner(&self) -> Option<&dyn Backend> {
        Some(self.says)
    }

    fn lock(&self) -> Option<Lock> {
        self.says.lock().filter(|_| self.locked)
    }

    fn run(&self, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
        self.runs.run(problem, inputs)
    }
}
