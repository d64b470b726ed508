//! The table of codes: q, k and v in 8 bits, by the elements that share a scale and by the rule of the scale.

use std::io::{self, Write};

use ndarray::Axis;
use rayon::prelude::*;
use seamproof_oracle::quantise::{Quantisation, QuantisationFields, ScaleRule, quantise};
use seamproof_oracle::sharding::run_of;
use seamproof_oracle::{
    Element, Format, Heads, InputMode, Inputs, Pass, Precision, Problem, ProblemFields, Scaling, TensorName,
};

use super::{AccuracyPlan, Errors, per_cent};
use crate::power::tensors::Tensors;
use seamproof_judge::values;

/// Lengths of the sequences of a pack.
const LENGTHS: [(usize, usize); 4] = [(192, 192); 4];
/// Head dimension.
const DIM: usize = 64;

/// A way to make codes.
#[derive(Clone, Copy, Debug)]
pub struct Codes {
    /// Name in the table.
    pub name: &'static str,
    /// Format and scaling of q and k.
    pub of_logits: Element,
    /// Format and scaling of v.
    pub of_values: Element,
    /// Rule of a scale; without a scaling there is none.
    pub scale: ScaleRule,
    /// Number of powers of two that are left free above the largest value.
    pub margin: i32,
}

const fn alike(name: &'static str, format: Format, scaling: Scaling) -> Codes {
    let element = Element { format, scaling };
    Codes { name, of_logits: element, of_values: element, scale: ScaleRule::F32, margin: 0 }
}

/// Returns an element in e4m3 that shares its scale with those of a block.
const fn of_block(rows: usize, columns: usize) -> Element {
    Element { format: Format::E4m3, scaling: Scaling::PerBlock { rows, columns } }
}

const fn microscaling(name: &'static str, scale: ScaleRule) -> Codes {
    Codes { name, of_logits: of_block(1, 32), of_values: of_block(32, 1), scale, margin: 0 }
}

/// The rows of the table. The first has no codes.
pub const ROWS: [Codes; 11] = [
    alike("bf16, no codes", Format::Bf16, Scaling::None),
    alike("e4m3, a scale for each tensor", Format::E4m3, Scaling::PerTensor),
    Codes {
        scale: ScaleRule::PowerOfTwo,
        ..alike("the same, a power of two", Format::E4m3, Scaling::PerTensor)
    },
    Codes { margin: 4, ..alike("the same, an amax 16 times too large", Format::E4m3, Scaling::PerTensor) },
    Codes { margin: -1, ..alike("the same, an amax 2 times too small", Format::E4m3, Scaling::PerTensor) },
    alike("e4m3, for each sequence and head", Format::E4m3, Scaling::PerSequenceHead),
    alike("e4m3, for each row and head", Format::E4m3, Scaling::PerTokenHead),
    microscaling("MX, 32 numbers of each sum, e8m0-up", ScaleRule::E8m0Up),
    microscaling("MX, 32 numbers of each sum, e8m0-down", ScaleRule::E8m0Down),
    alike("e5m2, a scale for each tensor", Format::E5m2, Scaling::PerTensor),
    alike("e5m2, for each row and head", Format::E5m2, Scaling::PerTokenHead),
];

/// Values of a column.
#[derive(Clone, Copy, Debug)]
pub struct Column {
    /// Name in the table.
    pub name: &'static str,
    /// Mode of the values.
    pub mode: InputMode,
    /// Power of two, as exponent, by which v of each sequence is smaller than that of the sequence before.
    pub smaller: i32,
}

/// The columns of the table.
pub const COLUMNS: [Column; 4] = [
    Column { name: "flat", mode: InputMode::Flat, smaller: 0 },
    Column { name: "peaked", mode: InputMode::Peaked, smaller: 0 },
    Column { name: "an outlier lane in k", mode: InputMode::Offset, smaller: 0 },
    Column { name: "v of each sequence 16 times smaller", mode: InputMode::Flat, smaller: 4 },
];

impl Column {
    /// Returns a problem without codes, and its values.
    fn problem(&self, seed: u64) -> io::Result<(Problem, Inputs)> {
        let problem = Problem::new(ProblemFields {
            heads: Heads { q: 2, kv: 2 },
            precision: Precision::uniform(Format::F32),
            mode: self.mode,
            data_seed: seed,
            pass: Pass::Forward,
            ..ProblemFields::packed(&LENGTHS, DIM)
        });
        let problem = problem.map_err(io::Error::other)?;
        let mut inputs = values::inputs(&problem);
        for (index, sequence) in problem.sequences.iter().enumerate() {
            let factor = libm::ldexpf(1.0, -self.smaller * index as i32);
            for row in sequence.kv.real_rows() {
                inputs.v.index_axis_mut(Axis(0), row).mapv_inplace(|value| factor * value);
            }
        }
        Ok((problem, inputs))
    }
}

impl Codes {
    /// Returns the error of out, where q, k and v are rounded so and nothing else is.
    pub fn error(&self, column: &Column, plan: &AccuracyPlan) -> io::Result<f64> {
        let case = |index: usize| {
            let (problem, values) = column.problem(plan.seed + index as u64)?;
            let exact = Tensors::exact(&problem, &values, false);
            let got = Tensors::exact(&problem, &self.rounded(&problem, values)?, false);
            Ok((problem, got, exact))
        };
        let cases = (0..plan.cases).into_par_iter().map(case).collect::<io::Result<Vec<_>>>()?;
        let Errors([out, ..]) = Errors::of(cases.iter().map(|(problem, got, exact)| (problem, got, exact)));
        Ok(out)
    }

    /// Returns the values that the codes stand for.
    fn rounded(&self, problem: &Problem, values: Inputs) -> io::Result<Inputs> {
        let mut rounded = values.clone();
        let Inputs { q, k, v, .. } = &mut rounded;
        let tensors = [
            (TensorName::Q, self.of_logits, q),
            (TensorName::K, self.of_logits, k),
            (TensorName::V, self.of_values, v),
        ];
        for (tensor, element, to) in tensors {
            if element.scaling == Scaling::None {
                to.mapv_inplace(|value| element.format.round(value.into()) as f32);
                continue;
            }
            let asked = Quantisation::new(QuantisationFields {
                problem: problem.clone(),
                tensors: vec![tensor],
                element,
                scale: self.scale,
                margin: self.margin,
                delayed: None,
            });
            let asked = asked.map_err(io::Error::other)?;
            let answer = quantise(&asked, &values).map_err(io::Error::other)?;
            let (groups, codes) = (asked.groups(tensor), &answer.tensors[0]);
            for (index, sequence) in problem.sequences.iter().enumerate() {
                for (position, row) in run_of(sequence, tensor.side()).real_rows().enumerate() {
                    let mut lanes = to.index_axis_mut(Axis(0), row);
                    for ((head, lane), value) in lanes.indexed_iter_mut() {
                        let descale = codes.descale[groups.of(index, position, head, lane)];
                        let code = element.format.decode(codes.codes[[row, head, lane]].into());
                        *value = (code * f64::from(descale)) as f32;
                    }
                }
            }
        }
        Ok(rounded)
    }
}

/// Prints the table.
pub(super) fn print(plan: &AccuracyPlan, to: &mut dyn Write, begin: &mut dyn FnMut(&str)) -> io::Result<()> {
    let names = COLUMNS.map(|column| column.name).join(" | ");
    writeln!(to, "| q, k and v in | {names} |\n|{}", "---|".repeat(1 + COLUMNS.len()))?;
    for row in ROWS {
        begin(row.name);
        let errors = COLUMNS.iter().map(|column| row.error(column, plan).map(per_cent));
        let errors = errors.collect::<io::Result<Vec<_>>>()?;
        writeln!(to, "| {} | {} |", row.name, errors.join(" | "))?;
        to.flush()?;
    }
    Ok(())
}
