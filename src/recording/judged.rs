//! Judgement of a recording: what the files say about each other, then what the judge says about the run.

use std::borrow::Cow;

use ndarray::{Array1, Array3, s};
use seamproof_judge::evaluate::caught;
use seamproof_judge::finding::{Check, Finding, Place, number};
use seamproof_judge::ladder::{Judge, Sampled};
use seamproof_judge::subject::{Costs, Outputs, PaddingInputs, PaddingOutputs, RankOutputs, TensorName};
use seamproof_judge::verdict::{Margin, Verdict};
use seamproof_oracle::sharding::{RankLayout, SideLayout, run_of};
use seamproof_oracle::{Inputs, Pass, Problem, Side, Sink};

use super::manifest::{DsinkForm, EmptyLse};
use super::placement::{differing, layouts_of};
use super::{RankFile, RankTables, Recording};

/// What cannot be asked of a run that is over, in words.
pub const NOT_ASKED: &str = "other values in the padding, the same run once more, exact results, relations with a second run: the run is over";

/// Returns what was asked of a recording that held, in words.
pub fn asked(recording: &Recording, sample: Option<Sample>, margin: &Margin) -> String {
    let problem = &recording.problem;
    let has_tables = recording.ranks.iter().any(|rank| rank.tables.is_some());
    let is_zero = recording.manifest.padding.outputs == PaddingOutputs::Zero;
    let parts = [
        "files and shapes",
        if has_tables { "placement against the tables" } else { "placement by the rule, without tables" },
        if problem.learnable_sinks() > 0 { "the sink on all ranks" } else { "" },
        if is_zero { "zeros in padding rows" } else { "" },
        match (sample, margin.compared) {
            (Some(_), _) => "the bounds of the drawn rows and of all borders",
            (None, 0) => "the bounds of a few rows, since the oracle is too slow for all",
            _ => "the bounds of every row",
        },
        if problem.pass == Pass::Backward { "the sums of dk and of dv" } else { "" },
    ];
    let asked: Vec<&str> = parts.into_iter().filter(|part| !part.is_empty()).collect();
    asked.join(", ")
}

/// A sample of rows to judge in place of every row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample {
    /// Number of rows to draw on each side.
    pub rows: u64,
    /// Seed of the draw.
    pub seed: u64,
}

/// Judges a recording, every row or a sample. The run is not made again.
pub fn judge(recording: &Recording, sample: Option<Sample>) -> Verdict {
    caught(|| verdict(recording, sample)).unwrap_or_else(Verdict::Infrastructure)
}

fn verdict(recording: &Recording, sample: Option<Sample>) -> Verdict {
    let layouts = match placed(recording) {
        Ok(layouts) => layouts,
        Err(finding) => return Verdict::Finding(finding),
    };
    let Recording { manifest, problem, ranks, .. } = recording;
    let of_inputs = sinks_differ(ranks).or_else(|| padding_not_finite(recording, &layouts));
    if let Some(finding) = of_inputs.or_else(|| sums_differ(recording)) {
        return finding.into();
    }
    let first = &ranks[0].outputs;
    let returned =
        [(TensorName::Lse, first.lse.is_some()), (TensorName::MaxLogit, first.max_logit.is_some())];
    let statistics = returned.into_iter().filter(|(_, returned)| *returned).map(|(name, _)| name);
    let subject = manifest.subject(problem, statistics.collect());
    let run = (&inputs(problem, &layouts, ranks), outputs(recording, &layouts));
    judge_of(sample, &layouts).examine_recorded(&subject, problem, &layouts, run).verdict
}

/// Returns the judge of recorded runs. With a sample it never asks the oracle for all rows.
fn judge_of(sample: Option<Sample>, layouts: &[RankLayout]) -> Judge {
    let judge = Judge::of_recorded();
    match sample {
        None => judge,
        Some(Sample { rows, seed }) => {
            let sampled = Some(Sampled { rows, seed, layouts: layouts.to_vec() });
            Judge { products_max: 0, sampled, ..judge }
        }
    }
}

/// Returns the layouts of the ranks, or the finding that rule and tables contradict each other.
fn placed(recording: &Recording) -> Result<Cow<'_, [RankLayout]>, Box<Finding>> {
    let Recording { problem, rule, ranks, .. } = recording;
    let tables: Vec<&RankTables> = ranks.iter().filter_map(|rank| rank.tables.as_ref()).collect();
    match rule {
        None => Ok(layouts_of(problem, tables.into_iter())?.into()),
        Some(layouts) => match differing(problem, layouts, tables.into_iter()) {
            Some(finding) => Err(Box::new(finding)),
            None => Ok(layouts.into()),
        },
    }
}

fn structural(tensor: TensorName, what: String) -> Finding {
    Finding::new(Check::Structure, Some(tensor), what)
}

/// Returns the finding about the first head of a sink that is not the same on all ranks.
fn sinks_differ(ranks: &[RankFile]) -> Option<Finding> {
    heads_differ(TensorName::Sink, ranks, |rank| Some(&rank.inputs.sink))
}

/// Returns the finding about the first head of a dsink that was summed over the ranks and is not the same on all.
fn sums_differ(recording: &Recording) -> Option<Finding> {
    if recording.manifest.dsink == DsinkForm::Partial {
        return None;
    }
    heads_differ(TensorName::Dsink, &recording.ranks, |rank| {
        rank.outputs.gradients.as_ref().map(|gradients| &gradients.dsink)
    })
}

fn heads_differ(
    tensor: TensorName,
    ranks: &[RankFile],
    of: impl Fn(&RankFile) -> Option<&Array1<f32>>,
) -> Option<Finding> {
    let first = of(ranks.first()?)?;
    ranks.iter().enumerate().find_map(|(rank, file)| {
        let own = of(file)?;
        let mut wrong = (0..first.len()).filter(|&head| own[head].to_bits() != first[head].to_bits());
        let head = wrong.next()?;
        let what = format!("rank {rank} holds another {tensor} than rank 0");
        let place = Place { head: Some(head), ..Place::default() };
        let [got, expected] = [own, first].map(|values| Some(number(values[head])));
        let (failed, compared) = (1 + wrong.count(), first.len());
        Some(Finding { place, got, expected, failed, compared, ..structural(tensor, what) })
    })
}

/// Returns the finding about a padding row of an input that holds no finite number, where the subject asks for such.
fn padding_not_finite(recording: &Recording, layouts: &[RankLayout]) -> Option<Finding> {
    if recording.manifest.padding.inputs == PaddingInputs::Anything {
        return None;
    }
    recording.ranks.iter().zip(layouts).enumerate().find_map(|(rank, (file, layout))| {
        let Inputs { q, k, v, dout, .. } = &file.inputs;
        let mut tensors = vec![(TensorName::Q, q, Side::Q), (TensorName::K, k, Side::Kv), (TensorName::V, v, Side::Kv)];
        if recording.problem.pass == Pass::Backward {
            tensors.push((TensorName::Dout, dout, Side::Q));
        }
        tensors.into_iter().find_map(|(tensor, values, side)| {
            let place = not_finite(layout.side(side), values)?;
            let what = format!(
                "on rank {rank}: a padding row of an input is not finite, and padding.inputs asks for finite numbers"
            );
            Some(Finding { place, ..structural(tensor, what) })
        })
    })
}

/// Returns the place of the first padding row that holds something other than finite numbers.
fn not_finite(layout: &SideLayout, values: &Array3<f32>) -> Option<Place> {
    layout.runs.iter().find_map(|placed| {
        let mut padding = (placed.local.len..).zip(placed.local.padding_rows());
        let is_finite = |row: usize| values.slice(s![row, .., ..]).iter().all(|value| value.is_finite());
        let (i, _) = padding.find(|(_, row)| !is_finite(*row))?;
        let position = placed.piece.start + i * placed.piece.step;
        Some(Place { sequence: Some(placed.sequence), row: Some(position), ..Place::default() })
    })
}

/// Returns the inputs in the problem's own layout. Rows that are not real hold zeros.
fn inputs(problem: &Problem, layouts: &[RankLayout], ranks: &[RankFile]) -> Inputs {
    let rows = |shape: [usize; 3], side: Side, of: fn(&Inputs) -> &Array3<f32>| {
        let mut whole = Array3::zeros(shape);
        for (layout, file) in layouts.iter().zip(ranks) {
            let local = of(&file.inputs);
            for placed in &layout.side(side).runs {
                let run = run_of(&problem.sequences[placed.sequence], side);
                for (i, here) in placed.local.real_rows().enumerate() {
                    let there = run.row(placed.piece.start + i * placed.piece.step);
                    whole.slice_mut(s![there, .., ..]).assign(&local.slice(s![here, .., ..]));
                }
            }
        }
        whole
    };
    Inputs {
        q: rows(problem.q_shape(), Side::Q, |inputs| &inputs.q),
        k: rows(problem.k_shape(), Side::Kv, |inputs| &inputs.k),
        v: rows(problem.v_shape(), Side::Kv, |inputs| &inputs.v),
        dout: match problem.pass {
            Pass::Forward => Array3::zeros((0, problem.heads.q, problem.dims.v)),
            Pass::Backward => rows(problem.out_shape(), Side::Q, |inputs| &inputs.dout),
        },
        sink: ranks[0].inputs.sink.clone(),
    }
}

/// Returns the results in the form that the judge takes: −∞ as the LSE of a row that sees nothing, and dsink as parts
/// that add up to the gradient.
fn outputs(recording: &Recording, layouts: &[RankLayout]) -> Outputs {
    let Recording { manifest, problem, ranks, .. } = recording;
    let mut outputs: Vec<RankOutputs> = ranks.iter().map(|rank| rank.outputs.clone()).collect();
    for (layout, rank) in layouts.iter().zip(&mut outputs) {
        settle_empty(problem, layout, manifest.lse.empty, rank);
    }
    if manifest.dsink == DsinkForm::Reduced {
        let others = outputs.iter_mut().skip(1).filter_map(|rank| rank.gradients.as_mut());
        others.for_each(|gradients| gradients.dsink.fill(0.0));
    }
    Outputs { ranks: outputs, damage: Vec::new(), changed: Vec::new(), costs: Costs::default() }
}

/// Writes −∞ into the LSE of rows that see nothing, where another value stands for that.
fn settle_empty(problem: &Problem, layout: &RankLayout, empty: EmptyLse, rank: &mut RankOutputs) {
    let Some(lse) = &mut rank.lse else { return };
    let stands_for_empty = |value: f32| match empty {
        EmptyLse::MinusInfinity => false,
        EmptyLse::PlusInfinity => value == f32::INFINITY,
        EmptyLse::Unspecified => true,
    };
    for placed in &layout.q.runs {
        let both = problem.sequences[placed.sequence];
        for i in 0..placed.local.span {
            let position = placed.piece.start + i * placed.piece.step;
            let sees_nothing = i >= placed.local.len
                || problem.softmax.sink == Sink::None
                    && problem.mask.visible(position, both.q.len, both.kv.len).is_empty();
            if sees_nothing {
                let mut row = lse.column_mut(placed.local.row(i));
                row.mapv_inplace(|value| if stands_for_empty(value) { f32::NEG_INFINITY } else { value });
            }
        }
    }
}
