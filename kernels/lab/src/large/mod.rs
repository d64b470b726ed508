//! The envelope of a forward that is too large for the oracle on a CPU. The exact answers come from the reference
//! kernel on a GPU, and the bounds from the oracle's own model ([`seamproof_oracle::envelope::RowEnvelope`]). Every
//! judged row has the bounds of tier W, and the rows of a sample have those of tier T too. The largest logit of a head
//! is that of its rows. Where only some of the rows are judged, it is no less than theirs.
//!
//! A process that calls this module holds a GPU. A campaign's supervisor holds none, and never calls this module.

mod related;
mod rows;
mod tally;

use crate::reference::{self, Query, Questions, ReferenceTensors, lists_of_keys};
use ndarray::{Array3, Axis};
use rayon::prelude::*;
use seamproof_kernels::memory::DeviceBuffer;
use seamproof_kernels::view::View;
use seamproof_kernels::{Gpu, KernelError};
use seamproof_oracle::envelope::{Model, SLOTS, largest_multiplicity};
use seamproof_oracle::{Format, Inputs, Problem};

pub use related::{RELATIONS, Related, related};
use rows::rows_of;
use seamproof_judge::finding::{Finding, Place};
use seamproof_judge::subject::RankOutputs;
use seamproof_judge::verdict::Margin;
use tally::Tally;

/// The most lanes of results that are asked for at once. They take about 3 GB here, and 1.6 GB on the GPU.
const LANES_MAX: usize = 1 << 27;
/// The most bytes on the GPU that the tables of slots of a sample's rows may take at once: those of 8,192 rows of
/// 65,536 keys.
const SLOT_BYTES_MAX: usize = 1 << 33;
/// The bytes of a row's table of slots for each key: two bits for each slot.
const SLOT_BYTES: usize = 2 * SLOTS / 8;

/// The rows of each head that are judged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rows {
    /// Every real row.
    All,
    /// A number of drawn rows, and every row at an end of a sequence or where the mask begins or ceases to cut its
    /// keys.
    Sample {
        /// The number of drawn rows; the others are judged as well.
        count: usize,
        /// The seed that draws the rows.
        seed: u64,
    },
}

/// A forward and how its subject sums.
#[derive(Clone, Copy)]
pub struct Forward<'a> {
    /// The problem.
    pub problem: &'a Problem,
    /// The inputs of the run.
    pub inputs: &'a Inputs,
    /// The results, in the problem's own layout.
    pub got: &'a RankOutputs,
    /// The subject's model.
    pub model: &'a Model,
}

/// The result of judging rows.
#[derive(Clone, Debug)]
pub struct JudgedRows {
    /// The worst element past its bound, LSEs before outs.
    pub finding: Option<Finding>,
    /// The largest error ÷ bound.
    pub margin: Margin,
    /// The number of rows times heads that were judged.
    pub rows: usize,
    /// The number of elements whose bound is infinite: nothing is known of them.
    pub unbounded: usize,
    /// The time of the reference kernel in milliseconds.
    pub reference_ms: f64,
}

/// The inputs on the GPU.
struct OnGpu {
    q: DeviceBuffer,
    k: DeviceBuffer,
    v: DeviceBuffer,
}

impl OnGpu {
    fn new(gpu: &Gpu, problem: &Problem, inputs: &Inputs) -> Result<OnGpu, KernelError> {
        let precision = &problem.precision;
        let put = |tensor: &Array3<f32>, format: Format| {
            let elements =
                tensor.as_slice().ok_or(KernelError::Shape("inputs that are not row by row".into()))?;
            gpu.upload_elements(elements, format)
        };
        Ok(OnGpu {
            q: put(&inputs.q, precision.q.format)?,
            k: put(&inputs.k, precision.k.format)?,
            v: put(&inputs.v, precision.v.format)?,
        })
    }

    fn tensors(&self, problem: &Problem) -> ReferenceTensors<'_> {
        let precision = &problem.precision;
        ReferenceTensors {
            q: View::rows(self.q.area(), problem.q_shape(), precision.q.format),
            k: View::rows(self.k.area(), problem.k_shape(), precision.k.format),
            v: View::rows(self.v.area(), problem.v_shape(), precision.v.format),
        }
    }
}

/// Judges rows of a forward. The inputs' rows that are not real may hold anything.
pub fn forward(gpu: &Gpu, forward: &Forward<'_>, rows: Rows) -> Result<JudgedRows, KernelError> {
    let Forward { problem, inputs, model, .. } = *forward;
    let memory = OnGpu::new(gpu, problem, inputs)?;
    // Every input that is not 0 counts as at least what the smallest one counts as.
    let floor = model.magnitude(f64::MIN_POSITIVE);
    let mut lists = lists_of_keys(problem);
    let (all, of_keys) = (rows == Rows::All, of_keys(problem, inputs, &lists));
    let at_once =
        if all { rows_of_lanes(problem) } else { rows_of_slots(problem).min(rows_of_lanes(problem)) };
    let mut tally = Tally::new(problem);
    let queries = (0..problem.heads.q).flat_map(|head| {
        rows_of(problem, rows, head).into_iter().map(move |[sequence, i]| Asked { sequence, head, i })
    });
    let queries: Vec<Asked> = queries.collect();
    for part in queries.chunks(at_once) {
        // Lists of rows of the part before are behind those of the sequences.
        lists.truncate(problem.sequences.len());
        let query = |asked: &Asked| Query::of(problem, [asked.sequence, asked.i], asked.head, &mut lists);
        let asked: Vec<Query> = part.iter().map(query).collect();
        let questions = Questions::new(&lists, &asked)?;
        let tensors = memory.tensors(problem);
        let answers = reference::answer(gpu, &questions, &problem.softmax, (floor, !all), &tensors)?;
        tally.add(forward, part, &answers, &of_keys);
    }
    Ok(tally.finish(forward))
}

/// Returns the number of rows whose lanes may be asked for at once.
fn rows_of_lanes(problem: &Problem) -> usize {
    (LANES_MAX / problem.dims.v).max(1)
}

/// Returns the number of a sample's rows whose tables of slots may lie on the GPU at once.
fn rows_of_slots(problem: &Problem) -> usize {
    let keys = problem.sequences.iter().map(|sequence| sequence.kv.len).max().unwrap_or(0);
    (SLOT_BYTES_MAX / (SLOT_BYTES * keys.max(1))).max(1)
}

/// One row that is asked about.
#[derive(Clone, Copy, Debug)]
struct Asked {
    sequence: usize,
    head: usize,
    i: usize,
}

impl Asked {
    fn place(&self, lane: Option<usize>) -> Place {
        Place { sequence: Some(self.sequence), head: Some(self.head), row: Some(self.i), lane }
    }
}

/// The facts about all keys of a sequence and KV head that a bound needs.
#[derive(Clone, Copy, Debug)]
struct OfKeys {
    /// The largest magnitude of a value.
    value_max: f64,
    /// The number of copies of the most repeated key.
    copies: f64,
}

/// Returns the facts about the keys of each sequence, whose rows are a list, KV head by KV head.
fn of_keys(problem: &Problem, inputs: &Inputs, lists: &[Vec<usize>]) -> Vec<Vec<OfKeys>> {
    let of_head = |rows: &[usize], head: usize| {
        let of_head = |tensor: &Array3<f32>| tensor.index_axis(Axis(1), head).select(Axis(0), rows);
        let value_max = of_head(&inputs.v).iter().fold(0.0f32, |most, v| most.max(v.abs()));
        let copies = largest_multiplicity(&of_head(&inputs.k).mapv(f64::from).view());
        OfKeys { value_max: f64::from(value_max), copies }
    };
    let heads = 0..problem.heads.kv;
    let of_list = |rows: &Vec<usize>| heads.clone().into_par_iter().map(|head| of_head(rows, head)).collect();
    lists.par_iter().map(of_list).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use seamproof_judge::generate::{self, Draw, Profile};
    use seamproof_oracle::{ProblemFields, Run};

    #[test]
    fn tables_of_slots_fit_however_many_keys_there_are() {
        let problems = (0..50).filter_map(|case| match generate::draw(5, case, &Profile::Quick.limits()) {
            Draw::Problem(problem) if !problem.sequences.is_empty() && problem.pages.is_none() => {
                Some(problem)
            }
            _ => None,
        });
        let mut fields: ProblemFields = { problems }.next().expect("a problem").into();
        let mut rows = |keys: usize| {
            fields.rows.kv = keys;
            fields.sequences.truncate(1);
            fields.sequences[0].kv = Run::packed(0, keys, keys);
            rows_of_slots(&Problem::new(fields.clone()).expect("one long sequence"))
        };
        assert_eq!([0, 1 << 16, 1 << 20].map(&mut rows), [1 << 29, 1 << 13, 1 << 9]);
    }
}
