//! Judgement of a recording: what the files say about each other, then what the judge says about the run.

use std::borrow::Cow;

use ndarray::{Array1, Array3, s};
use seamproof_judge::case::Sample;
use seamproof_judge::evaluate::caught;
use seamproof_judge::finding::{Check, Finding, Place, number};
use seamproof_judge::ladder::{
    Assembly, ErrorMap, Judge, Sampled, padding_of_recorded, place_rows, products, rotate_rows,
};
use seamproof_judge::subject::{PaddingInputs, PaddingOutputs, RankOutputs, TensorName};
use seamproof_judge::subjects::Recorded;
use seamproof_judge::verdict::{Margin, Verdict};
use seamproof_oracle::sharding::{RankLayout, SideLayout, run_of};
use seamproof_oracle::{Inputs, Pass, Problem, Scales, Side, Sink};

use super::manifest::{DsinkForm, EmptyLse};
use super::placement::{differing, layouts_of};
use super::profile::{Profiled, of_share};
use super::share::shares;
use super::{
    Fault, RankFile, RankTables, Recording, RecordingError, SAMPLED_ELEMENTS_MAX, Share, rank_file_name,
};

/// What cannot be asked of a run that is over, in words.
const NOT_ASKED: &str = "other values in the padding, the same run once more, exact results, relations with a second run: the run is over";

/// Returns what was asked of a recording that held, in words.
pub fn asked(
    recording: &Recording,
    sample: Option<Sample>,
    profiled: Option<&Profiled>,
    margin: &Margin,
) -> String {
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
        if profiled.is_some() && margin.compared > 0 { "the roundings of the locked profile" } else { "" },
        if problem.pass == Pass::Backward { "the laws that join the gradients" } else { "" },
    ];
    let asked: Vec<&str> = parts.into_iter().filter(|part| !part.is_empty()).collect();
    asked.join(", ")
}

/// Returns what was left out of a judgement, in words.
pub fn left_out(recording: &Recording, sample: Option<Sample>, margin: Option<&Margin>) -> String {
    let is_sampled = sample.is_some() || margin.is_some_and(|margin| margin.compared == 0);
    let first = &recording.ranks[0].outputs;
    let of_keys = match recording.problem.learnable_sinks() {
        0 => "dk and dv: no LSE was recorded",
        _ => "dk, dv and dsink: no LSE was recorded",
    };
    let unowned = rows_of_nobody(&recording.problem);
    let parts = [
        (true, NOT_ASKED),
        (is_sampled, "the bounds of all other rows"),
        (is_sampled && first.max_logit.is_some(), "max_logit: it is that of all rows"),
        (is_sampled && first.gradients.is_some() && first.lse.is_none(), of_keys),
        (!unowned.is_empty(), unowned.as_str()),
    ];
    let left_out: Vec<&str> = parts.into_iter().filter(|(is_so, _)| *is_so).map(|(_, part)| part).collect();
    left_out.join("; ")
}

/// Returns how many rows no sequence owns, in words; nothing where there are none.
fn rows_of_nobody(problem: &Problem) -> String {
    let owned =
        |side: Side| problem.sequences.iter().map(|sequence| run_of(sequence, side).span).sum::<usize>();
    let left = [
        ("q", problem.rows.q.saturating_sub(owned(Side::Q))),
        ("kv", problem.rows.kv.saturating_sub(owned(Side::Kv))),
    ];
    let told = left.into_iter().filter(|(_, rows)| *rows > 0).map(|(side, rows)| format!("{rows} of {side}"));
    let told: Vec<String> = told.collect();
    if told.is_empty() {
        String::new()
    } else {
        format!("rows that no sequence owns: {}", told.join(" and "))
    }
}

/// Judges a recording, every row or a sample; in tier R too where the roundings of the run are known
/// ([`profiled`](super::profiled)). The run is not made again. The files are read once more, and one that is not the
/// same any longer is an error.
pub fn judge(
    recording: &Recording,
    sample: Option<Sample>,
    profiled: Option<&Profiled>,
) -> Result<Verdict, RecordingError> {
    caught(|| verdict(recording, sample, profiled)).unwrap_or_else(|what| Ok(Verdict::Infrastructure(what)))
}

fn verdict(
    recording: &Recording,
    sample: Option<Sample>,
    profiled: Option<&Profiled>,
) -> Result<Verdict, RecordingError> {
    let layouts = match placed(recording) {
        Ok(layouts) => layouts,
        Err(finding) => return Ok(Verdict::Finding(finding)),
    };
    let mut margin: Option<Box<Margin>> = None;
    for share in shares(&recording.problem) {
        match judge_share(recording, &layouts, (sample, profiled), share)? {
            Verdict::Pass(own) => match &mut margin {
                Some(margin) => margin.join(&own),
                None => margin = Some(own),
            },
            Verdict::Finding(finding) => {
                let finding = share.whole(&recording.problem, *finding);
                return Ok(with_rank(&layouts, finding).into());
            }
            other => return Ok(other),
        }
    }
    Ok(Verdict::Pass(margin.unwrap_or_default()))
}

/// Products of visible pairs, heads and lanes of the largest recording whose errors are mapped.
const MAPPED_PRODUCTS_MAX: u64 = 1 << 26;

/// Returns the errors of a recording's results, row by row; nothing of a large one, of one that is judged in parts, and
/// of one whose files contradict each other.
pub fn error_maps(recording: &Recording) -> Vec<ErrorMap> {
    let maps = || -> Option<Vec<ErrorMap>> {
        let problem = &recording.problem;
        let mut shares = shares(problem).into_iter();
        let (share, None) = (shares.next()?, shares.next()) else { return None };
        if products(problem) > MAPPED_PRODUCTS_MAX {
            return None;
        }
        let layouts = placed(recording).ok()?;
        let subject = subject_of(recording, problem);
        let (inputs, results) = gathered(recording, (problem, &layouts), &subject, share).ok()?.ok()?;
        Some(Judge::of_recorded().recorded_error_maps(&subject, problem, &inputs, &results))
    };
    caught(|| maps().unwrap_or_default()).unwrap_or_default()
}

/// Returns the subject of a recorded run, with the statistics that it returned.
fn subject_of(recording: &Recording, problem: &Problem) -> Recorded {
    let first = &recording.ranks[0].outputs;
    let returned =
        [(TensorName::Lse, first.lse.is_some()), (TensorName::MaxLogit, first.max_logit.is_some())];
    let statistics = returned.into_iter().filter(|(_, returned)| *returned).map(|(name, _)| name);
    recording.manifest.subject(problem, statistics.collect())
}

/// Adds to a finding about a row which rank holds it, where there are several and the finding names none.
fn with_rank(layouts: &[RankLayout], finding: Finding) -> Finding {
    let Place { sequence: Some(sequence), row: Some(position), .. } = finding.place else { return finding };
    let side = finding.tensor.map_or(Side::Q, TensorName::side);
    let holder = layouts.iter().enumerate().find_map(|(rank, layout)| {
        let rows = match (finding.tensor, finding.place.head) {
            (Some(TensorName::Lse), Some(head)) if !layout.has_statistics(head) => return None,
            (Some(TensorName::Lse), _) => layout.statistics_rows(),
            _ => layout.side(side),
        };
        let mut own = rows.runs.iter().filter(|placed| placed.sequence == sequence);
        own.find_map(|placed| {
            let step = placed.piece.step.max(1);
            let i = position.checked_sub(placed.piece.start).filter(|off| off.is_multiple_of(step))? / step;
            (i < placed.local.span).then(|| (rank, placed.local.row(i)))
        })
    });
    match holder {
        Some((rank, row)) if layouts.len() > 1 && !names_rank(&finding.what) => {
            Finding { what: format!("{} (rank {rank} holds it, in its row {row})", finding.what), ..finding }
        }
        _ => finding,
    }
}

/// Whether a finding begins with the rank that it is about.
fn names_rank(what: &str) -> bool {
    what.starts_with("on rank ") || what.starts_with("rank ")
}

/// Judges some heads of a recording.
fn judge_share(
    recording: &Recording,
    layouts: &[RankLayout],
    (sample, profiled): (Option<Sample>, Option<&Profiled>),
    share: Share,
) -> Result<Verdict, RecordingError> {
    let part = share.problem(&recording.problem);
    let problem = match part {
        Ok(problem) => problem,
        Err(error) => return Ok(Verdict::Infrastructure(format!("some heads are no problem: {error}"))),
    };
    let judge = judge_of(sample, layouts);
    if problem.elements() > judge.elements_max {
        let what = format!(
            "it has {} tensor elements for each KV head; judge some rows with --rows",
            problem.elements()
        );
        return Ok(Verdict::TooLarge(what));
    }
    let mut subject = subject_of(recording, &problem);
    if let Some(Profiled { replay, partition }) = profiled {
        (subject.replay, subject.partition) = (Some(of_share(replay, recording, share)), *partition);
    }
    match gathered(recording, (&problem, layouts), &subject, share)? {
        Err(finding) => Ok(Verdict::Finding(finding)),
        Ok((inputs, results)) => Ok(judge.examine_recorded(&subject, &problem, &inputs, &results).verdict),
    }
}

/// Returns the inputs and the results of some heads in the problem's own layout, gathered rank by rank, or the finding
/// about what the ranks' files say of each other and of their padding.
fn gathered(
    recording: &Recording,
    (problem, layouts): (&Problem, &[RankLayout]),
    subject: &Recorded,
    share: Share,
) -> Result<Result<(Inputs, RankOutputs), Box<Finding>>, RecordingError> {
    let (mut inputs, mut assembly) = (no_inputs(problem), Assembly::new(problem));
    let mut replicas: Option<Replicas> = None;
    for (rank, layout) in layouts.iter().enumerate() {
        let mut file = recording.read_rank(rank, share)?;
        check_finite(recording, rank, &file, layout)?;
        let own = Replicas::of(recording, &file);
        let broken = replicas
            .as_ref()
            .and_then(|first| first.differing(&own, rank))
            .or_else(|| padding_not_finite(recording, rank, &file, layout))
            .or_else(|| {
                padding_of_recorded(subject, layout, &file.outputs)
                    .map(|finding| on_rank(rank, finding, recording))
            });
        if let Some(finding) = broken {
            return Ok(Err(Box::new(finding)));
        }
        settle(recording, (problem, layout), rank, &mut file.outputs);
        if let Err(finding) = assembly.add(layout, &file.outputs) {
            return Ok(Err(finding));
        }
        place_inputs(problem, layout, &file.inputs, &mut inputs);
        replicas.get_or_insert(own);
    }
    // Rows that a sequence borrows lie on no rank.
    problem.repeat_shared(&mut inputs.k, &mut inputs.v);
    Ok(Ok((inputs, assembly.results())))
}

/// Returns the finding about a rank, which it names where there are several.
fn on_rank(rank: usize, finding: Finding, recording: &Recording) -> Finding {
    match recording.ranks.len() {
        1 => finding,
        _ => Finding { what: format!("on rank {rank}: {}", finding.what), ..finding },
    }
}

/// Returns the judge of recorded runs. With a sample it never asks the oracle for all rows.
fn judge_of(sample: Option<Sample>, layouts: &[RankLayout]) -> Judge {
    let judge = Judge { placed: Some(layouts.to_vec()), ..Judge::of_recorded() };
    match sample {
        None => judge,
        Some(Sample { rows, seed }) => {
            let sampled = Some(Sampled { rows, seed });
            Judge { products_max: 0, elements_max: SAMPLED_ELEMENTS_MAX, sampled, ..judge }
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

/// What all ranks hold alike: the sink, and a dsink that was summed over them.
struct Replicas(Vec<(TensorName, Array1<f32>)>);

impl Replicas {
    fn of(recording: &Recording, file: &RankFile) -> Replicas {
        let mut all = vec![(TensorName::Sink, file.inputs.sink.clone())];
        let reduced =
            file.outputs.gradients.as_ref().filter(|_| recording.manifest.dsink == DsinkForm::Reduced);
        all.extend(reduced.map(|gradients| (TensorName::Dsink, gradients.dsink.clone())));
        Replicas(all)
    }

    /// Returns the finding about the first head for which a rank holds something other than rank 0.
    fn differing(&self, own: &Replicas, rank: usize) -> Option<Finding> {
        self.0.iter().zip(&own.0).find_map(|((tensor, first), (_, own))| {
            let mut wrong = (0..first.len()).filter(|&head| own[head].to_bits() != first[head].to_bits());
            let head = wrong.next()?;
            let what = format!("rank {rank} holds another {tensor} than rank 0");
            let place = Place { head: Some(head), ..Place::default() };
            let [got, expected] = [own, first].map(|values| Some(number(values[head])));
            let (failed, compared) = (1 + wrong.count(), first.len());
            Some(Finding { place, got, expected, failed, compared, ..structural(*tensor, what) })
        })
    }
}

/// Returns the inputs of rows, each with its side.
fn tensors_of<'a>(recording: &Recording, file: &'a RankFile) -> Vec<(TensorName, &'a Array3<f32>, Side)> {
    let Inputs { q, k, v, dout, .. } = &file.inputs;
    let mut tensors =
        vec![(TensorName::Q, q, Side::Q), (TensorName::K, k, Side::Kv), (TensorName::V, v, Side::Kv)];
    if recording.problem.pass == Pass::Backward {
        tensors.push((TensorName::Dout, dout, Side::Q));
    }
    tensors
}

/// Returns an error about the first real row of an input that holds something other than finite numbers. What attention
/// makes of it says nothing of attention.
fn check_finite(
    recording: &Recording,
    rank: usize,
    file: &RankFile,
    layout: &RankLayout,
) -> Result<(), RecordingError> {
    let found = tensors_of(recording, file).into_iter().find_map(|(tensor, values, side)| {
        Some((tensor, not_finite(layout.side(side), values, Rows::Real)?))
    });
    let Some((tensor, (row, place, got))) = found else { return Ok(()) };
    let (sequence, position) = (place.sequence.unwrap_or_default(), place.row.unwrap_or_default());
    let path = recording.dir.join(rank_file_name(rank));
    Err(RecordingError::field(&path, tensor.name(), Fault::NotFinite { row, sequence, position, got }))
}

/// Returns the finding about a padding row of an input that holds no finite number, where the subject asks for such.
fn padding_not_finite(
    recording: &Recording,
    rank: usize,
    file: &RankFile,
    layout: &RankLayout,
) -> Option<Finding> {
    if recording.manifest.padding.inputs == PaddingInputs::Anything {
        return None;
    }
    tensors_of(recording, file).into_iter().find_map(|(tensor, values, side)| {
        let (_, place, _) = not_finite(layout.side(side), values, Rows::Padding)?;
        let what = format!(
            "on rank {rank}: a padding row of an input is not finite, and padding.inputs asks for finite numbers"
        );
        Some(Finding { place, ..structural(tensor, what) })
    })
}

/// Rows that sequences own.
#[derive(Clone, Copy, PartialEq)]
enum Rows {
    Real,
    Padding,
}

/// Returns the first of these rows that holds something other than finite numbers, its place, and what it holds.
fn not_finite(layout: &SideLayout, values: &Array3<f32>, rows: Rows) -> Option<(usize, Place, f32)> {
    layout.runs.iter().find_map(|placed| {
        let owned = placed.local.real_rows().chain(placed.local.padding_rows()).enumerate();
        let mut asked = owned.filter(|(i, _)| (*i < placed.local.len) == (rows == Rows::Real));
        asked.find_map(|(i, row)| {
            let got = values.slice(s![row, .., ..]).iter().copied().find(|value| !value.is_finite())?;
            let position = placed.piece.start + i * placed.piece.step;
            Some((
                row,
                Place { sequence: Some(placed.sequence), row: Some(position), ..Place::default() },
                got,
            ))
        })
    })
}

/// Returns inputs of zeros in the problem's own layout.
fn no_inputs(problem: &Problem) -> Inputs {
    Inputs {
        q: Array3::zeros(problem.q_shape()),
        k: Array3::zeros(problem.k_shape()),
        v: Array3::zeros(problem.v_shape()),
        dout: match problem.pass {
            Pass::Forward => Array3::zeros((0, problem.heads.q, problem.dims.v)),
            Pass::Backward => Array3::zeros(problem.out_shape()),
        },
        sink: Array1::zeros(problem.learnable_sinks()),
        scales: Scales::default(),
    }
}

/// Copies a rank's inputs to their places. Rows that are not real stay zero. Hidden rows become those at attention.
fn place_inputs(problem: &Problem, layout: &RankLayout, local: &Inputs, whole: &mut Inputs) {
    place_rows(problem, (layout, Side::Q), &local.q, &mut whole.q);
    place_rows(problem, (layout, Side::Kv), &local.k, &mut whole.k);
    place_rows(problem, (layout, Side::Kv), &local.v, &mut whole.v);
    if problem.parallel.region > 1 {
        rotate_rows(problem, (layout, Side::Q), &mut whole.q);
        rotate_rows(problem, (layout, Side::Kv), &mut whole.k);
    }
    if problem.pass == Pass::Backward {
        place_rows(problem, (layout, Side::Q), &local.dout, &mut whole.dout);
    }
    whole.sink.assign(&local.sink);
}

/// Brings a rank's results into the form that the judge takes: −∞ as the LSE of a row that sees nothing, and dsink as
/// parts that add up to the gradient.
fn settle(
    recording: &Recording,
    (problem, layout): (&Problem, &RankLayout),
    rank: usize,
    outputs: &mut RankOutputs,
) {
    settle_empty(problem, layout, recording.manifest.lse.empty, outputs);
    let reduced = outputs.gradients.as_mut().filter(|_| recording.manifest.dsink == DsinkForm::Reduced);
    if let (Some(gradients), true) = (reduced, rank > 0) {
        gradients.dsink.fill(0.0);
    }
}

/// Writes −∞ into the LSE of rows that see nothing, where another value stands for that.
fn settle_empty(problem: &Problem, layout: &RankLayout, empty: EmptyLse, rank: &mut RankOutputs) {
    let Some(lse) = &mut rank.lse else { return };
    let stands_for_empty = |value: f32| match empty {
        EmptyLse::MinusInfinity => false,
        EmptyLse::PlusInfinity => value == f32::INFINITY,
        EmptyLse::Unspecified => true,
    };
    for placed in &layout.statistics_rows().runs {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recording::{Made, read, write};
    use seamproof_judge::subject::Backend;
    use seamproof_judge::subjects::{Emulated, draw_options};
    use seamproof_judge::values;
    use seamproof_oracle::{Algorithm, Balance, ContextParallel, Heads, Mask, ProblemFields};

    /// Returns the problem of a ring with two KV heads.
    fn ring() -> Problem {
        let fields = ProblemFields {
            heads: Heads { q: 4, kv: 2 },
            mask: Mask::CAUSAL,
            pass: Pass::Backward,
            parallel: ContextParallel::over(2, Algorithm::Ring, Balance::DualChunk),
            ..ProblemFields::padded(&[(21, 24), (3, 4)], 8)
        };
        Problem::new(fields).expect("a problem")
    }

    #[test]
    fn each_head_is_judged_by_itself_and_a_wrong_one_is_named_as_it_is_in_the_whole() {
        let problem = ring();
        let subject = Emulated::from_options(&draw_options(0)).expect("drawn options are taken");
        let (inputs, head) = (values::inputs(&problem), 3);
        for wrong in [false, true] {
            let place = tempfile::tempdir().expect("a temporary directory");
            let mut outputs = subject.run(&problem, &inputs).expect("it runs");
            if wrong {
                outputs.ranks[1].out[[0, head, 2]] += 8.0;
            }
            let made = Made {
                backend: &subject,
                name: "ring".into(),
                problem: &problem,
                inputs: &inputs,
                outputs,
                tables: false,
            };
            write(place.path(), made).expect("it is written");
            let recording = read(place.path()).expect("it is read");
            let layouts = placed(&recording).expect("placed by the rule");
            let judged = [0, 1].map(|first| {
                let share = Share { first, count: 1 };
                let verdict =
                    judge_share(&recording, &layouts, (None, None), share).expect("the files are the same");
                match verdict {
                    Verdict::Finding(finding) => share.whole(&problem, *finding).into(),
                    verdict => verdict,
                }
            });
            assert!(matches!(judged[0], Verdict::Pass(_)), "{}", judged[0]);
            match &judged[1] {
                Verdict::Pass(_) => assert!(!wrong),
                Verdict::Finding(finding) => {
                    assert!(wrong && finding.tensor == Some(TensorName::Out), "{finding}");
                    assert_eq!(finding.place.head, Some(head));
                }
                verdict => panic!("{verdict}"),
            }
        }
    }
}
