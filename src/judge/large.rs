//! Tier W of a forward that is too large for the oracle on a CPU: the exact answers come from the reference kernel on a GPU,
//! the bounds from the oracle's own model ([`RowEnvelope`]).
//!
//! A process that judges so holds a GPU; a campaign's supervisor does not, and never comes here.

use std::collections::BTreeSet;

use ndarray::Axis;
use rayon::prelude::*;
use seamproof_kernels::KernelError;
use seamproof_kernels::gpu::{Buffer, Gpu};
use seamproof_kernels::reference::{Answers, Query, Questions, Statistics, Tensors};
use seamproof_kernels::view::View as DeviceView;
use seamproof_oracle::envelope::{Model, RowEnvelope, RowSums};
use seamproof_oracle::{Format, Inputs, Problem, TensorName};

use super::compare::Worst;
use super::envelope::{error_ratios, wording};
use crate::backend::RankOutputs;
use crate::values;
use crate::verdict::{Check, Finding, Margin, Place, Tier, number};

/// Lanes of results that are asked for at once: about 3 GB of them here, and 1.6 GB on the GPU.
const LANES_MAX: usize = 1 << 27;

/// Which rows of each head are judged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rows {
    /// Every real row.
    All,
    /// So many drawn ones, and every row at an end of a sequence or where the mask begins or ceases to cut its keys.
    Sample {
        /// Drawn rows; the others come on top.
        count: usize,
        /// Draws them.
        seed: u64,
    },
}

/// A forward and how its subject sums.
#[derive(Clone, Copy)]
pub struct Forward<'a> {
    /// The problem.
    pub problem: &'a Problem,
    /// What it was run on.
    pub inputs: &'a Inputs,
    /// The results, in the problem's own layout.
    pub got: &'a RankOutputs,
    /// The subject's model.
    pub model: &'a Model,
}

/// What came out.
#[derive(Clone, Debug)]
pub struct Judged {
    /// The worst element past its bound, LSEs before outs.
    pub finding: Option<Finding>,
    /// Worst error ÷ bound.
    pub margin: Margin,
    /// Rows times heads that were judged.
    pub rows: usize,
    /// Elements among theirs that nothing is known of: their bound is infinite.
    pub unbounded: usize,
    /// Milliseconds of the reference kernel.
    pub reference_ms: f64,
}

/// Real rows of the problem, by sequence and position.
fn rows_of(problem: &Problem, rows: Rows, head: usize) -> Vec<[usize; 2]> {
    let lengths = || problem.sequences.iter().map(|sequence| sequence.q.len).enumerate();
    let all = || lengths().flat_map(|(sequence, len)| (0..len).map(move |i| [sequence, i]));
    let Rows::Sample { count, seed } = rows else { return all().collect() };
    let mut chosen: BTreeSet<[usize; 2]> = lengths()
        .flat_map(|(sequence, _)| boundaries(problem, sequence).into_iter().map(move |i| [sequence, i]))
        .collect();
    let real: Vec<[usize; 2]> = all().collect();
    if real.is_empty() {
        return real;
    }
    let draw = |index: usize| values::mix(values::mix(seed ^ values::mix(head as u64)) ^ index as u64);
    chosen.extend((0..count).map(|index| real[(draw(index) % real.len() as u64) as usize]));
    chosen.into_iter().collect()
}

/// Queries of a sequence at its ends, and on either side of where an end of their keys begins or ceases to be cut.
fn boundaries(problem: &Problem, sequence: usize) -> BTreeSet<usize> {
    let (lq, lk) = (problem.sequences[sequence].q.len, problem.sequences[sequence].kv.len);
    let mask = problem.mask;
    let shift = mask.shift(lq, lk);
    let left = mask.left.map(|left| i64::from(left) - shift);
    let right = mask.right.map(|right| -i64::from(right) - shift);
    let sides = [left, right].into_iter().flatten();
    // The key that a side points at is 0, or the last one.
    let edges = sides.flat_map(|side| [side, side + lk as i64 - 1]);
    let near = edges.chain([0, lq as i64 - 1]).flat_map(|i| [i - 1, i, i + 1]);
    near.filter(|&i| (0..lq as i64).contains(&i)).map(|i| i as usize).collect()
}

/// The inputs on the GPU.
struct OnGpu {
    q: Buffer,
    k: Buffer,
    v: Buffer,
}

impl OnGpu {
    fn new(gpu: &Gpu, problem: &Problem, inputs: &Inputs) -> Result<OnGpu, KernelError> {
        let precision = &problem.precision;
        let put = |tensor: &ndarray::Array3<f32>, format| {
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

    fn tensors(&self, problem: &Problem) -> Tensors<'_> {
        let precision = &problem.precision;
        Tensors {
            q: DeviceView::rows(self.q.area(), problem.q_shape(), precision.q.format),
            k: DeviceView::rows(self.k.area(), problem.k_shape(), precision.k.format),
            v: DeviceView::rows(self.v.area(), problem.v_shape(), precision.v.format),
        }
    }
}

/// Judges rows of a forward. The inputs' rows that are not real may hold anything.
pub fn forward(gpu: &Gpu, forward: &Forward<'_>, rows: Rows) -> Result<Judged, KernelError> {
    let Forward { problem, inputs, model, .. } = *forward;
    let memory = OnGpu::new(gpu, problem, inputs)?;
    // What the smallest input counts as is what every one counts as at least.
    let floor = model.magnitude(f64::MIN_POSITIVE);
    let lists: Vec<Vec<usize>> =
        problem.sequences.iter().map(|sequence| sequence.kv.real_rows().collect()).collect();
    let values = largest_values(problem, inputs);
    let mut tally = Tally::new(problem, rows == Rows::All);
    let queries = (0..problem.heads.q).flat_map(|head| {
        rows_of(problem, rows, head).into_iter().map(move |[sequence, i]| Asked { sequence, head, i })
    });
    let queries: Vec<Asked> = queries.collect();
    for part in queries.chunks((LANES_MAX / problem.dims.v).max(1)) {
        let asked: Vec<Query> = part.iter().map(|asked| asked.query(problem)).collect();
        let questions = Questions::new(&lists, &asked)?;
        let answers = gpu.reference(&questions, &problem.softmax, floor, &memory.tensors(problem))?;
        tally.add(forward, part, &answers, &values);
    }
    Ok(tally.finish(forward))
}

/// One row that is asked about.
#[derive(Clone, Copy, Debug)]
struct Asked {
    sequence: usize,
    head: usize,
    i: usize,
}

impl Asked {
    fn query(&self, problem: &Problem) -> Query {
        let sequence = &problem.sequences[self.sequence];
        let keys = problem.mask.visible(self.i, sequence.q.len, sequence.kv.len);
        Query { row: sequence.q.row(self.i), head: self.head, list: self.sequence, keys }
    }

    fn place(&self, lane: Option<usize>) -> Place {
        Place { sequence: Some(self.sequence), head: Some(self.head), row: Some(self.i), lane }
    }
}

/// The largest magnitude of a value, of each sequence and KV head.
fn largest_values(problem: &Problem, inputs: &Inputs) -> Vec<Vec<f64>> {
    let of_head = |rows: &[usize], head: usize| {
        let values = inputs.v.index_axis(Axis(1), head);
        let largest = |row: &usize| values.row(*row).iter().fold(0.0f32, |most, v| most.max(v.abs()));
        rows.iter().map(largest).fold(0.0f32, f32::max)
    };
    let of_sequence = |sequence: &seamproof_oracle::Sequence| {
        let rows: Vec<usize> = sequence.kv.real_rows().collect();
        (0..problem.heads.kv).map(|head| f64::from(of_head(&rows, head))).collect()
    };
    problem.sequences.par_iter().map(of_sequence).collect()
}

/// One row, judged: error ÷ bound, and the lane of the largest.
struct RowRatios {
    lse: Compared,
    out: Compared,
    lane: usize,
    unbounded: usize,
    failed: usize,
    max_logit_error: f64,
}

/// One element.
#[derive(Clone, Copy, Debug, Default)]
struct Compared {
    got: f32,
    exact: f64,
    bound: f64,
    ratio: f64,
}

impl Compared {
    fn new(got: f32, (exact, bound): (f64, f64), overflows: Option<Format>) -> Compared {
        let mut ratio = [0.0];
        error_ratios(&[got], &[exact], &[bound], overflows, &mut ratio);
        Compared { got, exact, bound, ratio: ratio[0] }
    }
}

/// What is gathered over all rows.
struct Tally {
    lse: Worst,
    out: Worst,
    judged: Judged,
    /// Of each head the largest logit and what it may be off by, where every row is looked at.
    max_logit: Option<Vec<[f64; 2]>>,
}

impl Tally {
    fn new(problem: &Problem, all: bool) -> Tally {
        let worst = |tensor| Worst::new(Check::Envelope, tensor, wording(Tier::W));
        let judged =
            Judged { finding: None, margin: Margin::default(), rows: 0, unbounded: 0, reference_ms: 0.0 };
        Tally {
            lse: worst(TensorName::Lse),
            out: worst(TensorName::Out),
            judged,
            max_logit: all.then(|| vec![[f64::NEG_INFINITY, 0.0]; problem.heads.q]),
        }
    }

    fn add(&mut self, forward: &Forward<'_>, asked: &[Asked], answers: &Answers, values: &[Vec<f64>]) {
        let rows: Vec<RowRatios> = asked
            .par_iter()
            .enumerate()
            .map(|(index, asked)| judge_row(forward, asked, answers, index, values))
            .collect();
        self.judged.reference_ms += answers.ms;
        self.judged.rows += rows.len();
        let margin = &mut self.judged.margin.worst_case;
        for ((asked, row), statistics) in asked.iter().zip(&rows).zip(&answers.statistics) {
            margin.lse = margin.lse.max(row.lse.ratio);
            margin.out = margin.out.max(row.out.ratio);
            self.judged.unbounded += row.unbounded;
            if forward.got.lse.is_some() {
                count(&mut self.lse, &row.lse, 1, usize::from(row.lse.ratio > 1.0), asked.place(None));
            }
            count(&mut self.out, &row.out, answers.dim_v, row.failed, asked.place(Some(row.lane)));
            if let Some(of_head) = &mut self.max_logit {
                let [largest, error] = &mut of_head[asked.head];
                *largest = largest.max(statistics.largest);
                *error = error.max(row.max_logit_error);
            }
        }
    }

    fn finish(mut self, forward: &Forward<'_>) -> Judged {
        let tensors = 1 + usize::from(forward.got.lse.is_some());
        let max_logit = forward.got.max_logit.as_ref().zip(self.max_logit.as_ref());
        self.judged.margin.compared = tensors + usize::from(max_logit.is_some());
        let mut worst = Worst::new(Check::Envelope, TensorName::MaxLogit, wording(Tier::W));
        for (head, (&got, &[exact, bound])) in
            max_logit.into_iter().flat_map(|(a, b)| a.iter().zip(b)).enumerate()
        {
            let compared = Compared::new(got, (exact, bound), None);
            let margin = &mut self.judged.margin.worst_case.max_logit;
            *margin = margin.max(compared.ratio);
            let place = Place { head: Some(head), ..Place::default() };
            count(&mut worst, &compared, 1, usize::from(compared.ratio > 1.0), place);
        }
        // The LSE is the sharpest observable of mask and scale.
        let finding = self.lse.finding().or_else(|| self.out.finding()).or_else(|| worst.finding());
        Judged { finding, ..self.judged }
    }
}

/// Counts elements, `failed` of which fail, the given one worst.
fn count(worst: &mut Worst, compared: &Compared, elements: usize, failed: usize, place: Place) {
    worst.held(elements);
    let &Compared { got, exact, bound, ratio } = compared;
    for _ in 0..failed {
        worst.failed(ratio, |finding| {
            finding.place = place;
            finding.got = Some(number(f64::from(got)));
            finding.expected = Some(number(exact));
            finding.bound = bound.is_finite().then_some(bound);
            finding.ratio = ratio.is_finite().then_some(ratio);
        });
    }
}

fn judge_row(
    forward: &Forward<'_>,
    asked: &Asked,
    answers: &Answers,
    index: usize,
    values: &[Vec<f64>],
) -> RowRatios {
    let Forward { problem, inputs, got, model } = *forward;
    let &Asked { sequence, head, i } = asked;
    let Statistics { keys, largest, smallest, sum, sum_a, largest_a } = answers.statistics[index];
    let sink = problem.sink(head, inputs.sink.as_slice().unwrap_or(&[]));
    let value_max = values[sequence][head / problem.group()];
    let sums = RowSums { keys, largest, smallest, sum, sum_a, largest_a, sink, value_max };
    let envelope = RowEnvelope::new(model, &sums);
    let row = problem.sequences[sequence].q.row(i);

    let mut ratios = RowRatios {
        lse: Compared::default(),
        out: Compared::default(),
        lane: 0,
        unbounded: 0,
        failed: 0,
        max_logit_error: envelope.max_logit_error(),
    };
    if let Some(lse) = &got.lse {
        ratios.lse = Compared::new(lse[[head, row]], envelope.lse(), None);
        ratios.unbounded += usize::from(ratios.lse.bound == f64::INFINITY);
    }
    let lanes = index * answers.dim_v..(index + 1) * answers.dim_v;
    let sums = answers.out[lanes.clone()].iter().zip(&answers.magnitudes[lanes]);
    let lanes = got.out.index_axis(Axis(0), row).index_axis_move(Axis(0), head);
    let format = Some(problem.precision.out.format);
    for (lane, (&got, (&numerator, &magnitudes))) in lanes.iter().zip(sums).enumerate() {
        let compared = Compared::new(got, envelope.out(numerator, magnitudes), format);
        ratios.unbounded += usize::from(compared.bound == f64::INFINITY);
        ratios.failed += usize::from(compared.ratio > 1.0);
        if compared.ratio > ratios.out.ratio {
            (ratios.out, ratios.lane) = (compared, lane);
        }
    }
    ratios
}
