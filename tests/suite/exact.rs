//! The exact rung. It never fires on a right kernel, it sees one wrong pair among thousands of keys, and it says what
//! a query saw.

use std::collections::BTreeMap;

use ndarray::{Axis, Zip};
use rayon::prelude::*;
use seamproof::backends;
use seamproof::campaign::SHRINK_EVALUATIONS_MAX;
use seamproof::faults::stream;
use seamproof_judge::census::is_legal;
use seamproof_judge::evaluate::evaluate;
use seamproof_judge::exact::eligible;
use seamproof_judge::failure::same_failure;
use seamproof_judge::finding::{Check, Finding};
use seamproof_judge::generate::{Draw, Limits, draw};
use seamproof_judge::ladder::{Depth, Judge};
use seamproof_judge::shrink::shrink;
use seamproof_judge::subject::{Backend, Declaration, Outputs, Promises, RankOutputs, RunError};
use seamproof_judge::subjects::{Emulated, Planted};
use seamproof_judge::values;
use seamproof_judge::verdict::Verdict;
use seamproof_oracle::envelope::Partition;
use seamproof_oracle::{
    Alignment, Dims, Heads, InputMode, Inputs, Mask, Pass, Problem, ProblemFields, Run, Saved, Softmax,
    TensorName, exact,
};
use seamproof_simulator::Segment;
use seamproof_simulator::faults::{Catcher, Fault, Plant, WINDOW_OFF_BY_ONE, catalogue};
use seamproof_simulator::schedule::{Schedule, Work};

/// Returns the problems of a stream that are in an exact mode, with their index.
fn exact_cases(seed: u64, limits: &Limits, draws: u64) -> Vec<(u64, Problem)> {
    let case = |index| match draw(seed, index, limits) {
        Draw::Problem(problem) if is_legal(&problem) && eligible(problem.mode, &problem).is_ok() => {
            Some((index, problem))
        }
        _ => None,
    };
    (0..draws).filter_map(case).collect()
}

#[test]
fn the_rung_never_fires_on_a_right_kernel() {
    for (seed, limits, draws) in [(1, Limits::seams(), 5000), (2, Limits::quick(), 2500)] {
        let cases = exact_cases(seed, &limits, draws);
        assert!(cases.len() as u64 > draws / 3, "{}", cases.len());
        let alarms: Vec<String> = cases
            .par_iter()
            .filter_map(|(index, problem)| {
                let options = backends::draw_options("emulated", *index);
                let backend = backends::by_name("emulated", &options).expect("the emulated backend");
                match evaluate(backend.as_ref(), problem) {
                    Verdict::Pass(_) => None,
                    Verdict::Finding(finding) => {
                        Some(format!("{seed} {index} {:?}: {finding}", problem.mode))
                    }
                    other => Some(format!("{seed} {index} {:?}: {other:?}", problem.mode)),
                }
            })
            .collect();
        let mut modes = BTreeMap::new();
        cases.iter().for_each(|(_, problem)| *modes.entry(format!("{:?}", problem.mode)).or_insert(0) += 1);
        assert_eq!(modes.len(), InputMode::EXACT.len(), "{modes:?}");
        assert!(alarms.is_empty(), "{} alarms: {:#?}", alarms.len(), &alarms[..alarms.len().min(30)]);
    }
}

/// Returns the judge with the exact rung alone.
fn exact_judge() -> Judge {
    let mut judge = Judge::default();
    judge.rungs.retain(|rung| rung.check == Check::Exact);
    judge
}

fn examine(backend: &dyn Backend, problem: &Problem) -> Verdict {
    exact_judge().examine(backend, problem, Depth::First).verdict
}

fn found(backend: &dyn Backend, problem: &Problem) -> Finding {
    match examine(backend, problem) {
        Verdict::Finding(finding) => *finding,
        verdict => panic!("not seen: {verdict:?} in {:?}", problem.mode),
    }
}

/// A subject whose results are edited.
struct Edited<F>(F);

impl<F: Fn(&Problem, &Inputs, &mut RankOutputs) + Sync> Backend for Edited<F> {
    fn name(&self) -> &str {
        "edited"
    }

    fn declaration(&self) -> Declaration {
        Emulated::default().declaration().with_promises(Promises::default())
    }

    fn partition(&self, problem: &Problem) -> Partition {
        Emulated::default().partition(problem)
    }

    fn run(&self, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
        let mut outputs = Emulated::default().run(problem, inputs)?;
        outputs.ranks.iter_mut().for_each(|rank| (self.0)(problem, inputs, rank));
        Ok(outputs)
    }
}

/// Writes the oracle's own answer in the problem's formats in place of the results. A value is rounded to the nearest
/// multiple of 2⁻³⁰, so that a tie that f64 misses by its last bit is a tie.
fn perfect(problem: &Problem, inputs: &Inputs, rank: &mut RankOutputs) {
    let near = |value: f64| (value * 2f64.powi(30)).round() / 2f64.powi(30);
    let exact = exact::forward(problem, inputs);
    let saved = Saved::from(&exact);
    let (out, lse) = (problem.precision.out.format, rank.lse.as_mut().expect("an LSE"));
    for sequence in &problem.sequences {
        for row in sequence.q.real_rows() {
            for head in 0..problem.heads.q {
                lse[[head, row]] = exact.lse[[head, row]] as f32;
                for lane in 0..problem.dims.v {
                    rank.out[[row, head, lane]] = out.round(near(exact.out[[row, head, lane]])) as f32;
                }
            }
        }
    }
    let Some(got) = &mut rank.gradients else { return };
    let (exact, format) = (exact::backward(problem, inputs, &saved), problem.precision.gradients.format);
    for sequence in &problem.sequences {
        for (tensor, right, run) in [
            (&mut got.dq, &exact.dq, sequence.q),
            (&mut got.dk, &exact.dk, sequence.kv),
            (&mut got.dv, &exact.dv, sequence.kv),
        ] {
            for row in run.real_rows() {
                let lanes = tensor.index_axis_mut(Axis(0), row);
                let right = right.index_axis(Axis(0), row);
                Zip::from(lanes).and(right).for_each(|got, right| *got = format.round(near(*right)) as f32);
            }
        }
    }
}

#[test]
fn the_rung_agrees_with_the_oracle() {
    let cases = exact_cases(3, &Limits::seams(), 4000);
    let single = |(_, problem): &&(u64, Problem)| problem.parallel.is_whole();
    let alarms: Vec<String> = cases
        .iter()
        .filter(single)
        .collect::<Vec<_>>()
        .into_par_iter()
        .filter_map(|(index, problem)| match examine(&Edited(perfect), problem) {
            Verdict::Finding(finding) => Some(format!("{index} {:?}: {finding}", problem.mode)),
            _ => None,
        })
        .collect();
    assert!(alarms.is_empty(), "{} alarms: {:#?}", alarms.len(), &alarms[..alarms.len().min(20)]);
}

/// Returns one sequence with one head.
fn one(mode: InputMode, lengths: [usize; 2], mask: Mask, pass: Pass) -> Problem {
    let [q, kv] = lengths;
    let scale = if mode == InputMode::Staircase { std::f32::consts::LN_2 } else { 0.125 };
    Problem::new(ProblemFields {
        dims: Dims { qk: 32, v: 16 },
        mask,
        softmax: Softmax::scaled(scale),
        mode,
        data_seed: 5,
        pass,
        ..ProblemFields::packed(&[(q, kv)], 32)
    })
    .expect("the fields are legal")
}

fn planted(edit: fn(&Problem, &mut Schedule)) -> Planted {
    let fault = Fault {
        id: "test",
        imitates: "a wrong pair of a query and a key",
        source: "https://github.com",
        entries: &[],
        caught_by: &[Catcher::Exact],
        edit: Plant::Schedule(edit),
    };
    Planted::new(Emulated::default(), fault)
}

/// Gives query 7 of each forward launch a segment of its own, which `edit` edits.
fn edit_query(schedule: &mut Schedule, edit: fn(&mut Segment)) {
    const QUERY: usize = 7;
    for operation in schedule.ranks.iter_mut().flat_map(|program| &mut program.operations) {
        let Work::Attend(attend) = &mut operation.work else { continue };
        let whole = attend.call.segments.remove(0);
        let shifted = |bound: Option<i64>, by: usize| bound.map(|bound| bound + by as i64);
        let part = |start: usize, len: usize, span: usize| Segment {
            q: Run::packed(whole.q.offset + start, len, span),
            kv: whole.kv.clone(),
            lo: shifted(whole.lo, start),
            hi: shifted(whole.hi, start),
            prefix: whole.prefix,
            sink_tokens: whole.sink_tokens,
        };
        let mut one = part(QUERY, 1, 1);
        edit(&mut one);
        let rest = (QUERY + 1, whole.q.len - QUERY - 1, whole.q.span - QUERY - 1);
        attend.call.segments.extend([part(0, QUERY, QUERY), one, part(rest.0, rest.1, rest.2)]);
    }
}

/// Drops the key at `numerator / 8` of the keys.
fn drop_key(segment: &mut Segment, numerator: usize) {
    let all = segment.kv[0];
    let key = (all.len * numerator / 8).min(all.len - 1);
    let rest = all.len - key - 1;
    segment.kv = vec![Run::packed(all.offset, key, key), Run::packed(all.offset + key + 1, rest, rest)];
}

type Edit = fn(&Problem, &mut Schedule);

/// Edits that drop a pair (the first key, one in the middle, the last), or add one at the left bound.
const DROPS: [Edit; 3] = [
    |_, schedule| edit_query(schedule, |segment| drop_key(segment, 0)),
    |_, schedule| edit_query(schedule, |segment| drop_key(segment, 3)),
    |_, schedule| edit_query(schedule, |segment| drop_key(segment, 8)),
];
const LEAK: Edit = |_, schedule| edit_query(schedule, |segment| segment.lo = segment.lo.map(|lo| lo - 1));

const WINDOW: Mask = Mask { left: Some(1000), right: Some(0), align: Alignment::BottomRight, ..Mask::FULL };

/// Whether the fault changes anything that the subject returns.
fn changes(subject: &Planted, problem: &Problem) -> bool {
    let inputs = values::inputs(problem);
    let run = |backend: &dyn Backend| backend.run(problem, &inputs).expect("it runs").ranks;
    let [wrong, right] = [run(subject), run(&Emulated::default())];
    wrong.iter().zip(&right).any(|(a, b)| a.out != b.out || a.lse != b.lse)
}

#[test]
fn one_wrong_pair_among_thousands_of_keys_is_seen() {
    for mode in [InputMode::UniformCount, InputMode::Endpoints, InputMode::Pairs] {
        let mut seen = 0;
        for (keys, data_seed) in [(4096, 0), (4096, 1), (4096, 2), (8192, 3), (8192, 4), (8192, 5)] {
            for (edit, mask) in DROPS.map(|drop| (drop, Mask::FULL)).into_iter().chain([(LEAK, WINDOW)]) {
                let problem = one(mode, [16, keys], mask, Pass::Forward);
                let problem = Problem::new(ProblemFields { data_seed, ..problem.into() }).expect("legal");
                let subject = planted(edit);
                if changes(&subject, &problem) {
                    let finding = found(&subject, &problem);
                    assert!(finding.what.contains("query 7"), "{finding}");
                    seen += 1;
                }
            }
        }
        // Every pair shows where all keys weigh the same; in `pairs`, only the chosen keys show.
        assert!(seen == 24 || mode == InputMode::Pairs && seen >= 3, "{mode:?}: {seen}");
    }
}

#[test]
fn the_finding_says_which_keys_a_query_saw() {
    let window = Mask { left: Some(3), right: Some(0), align: Alignment::TopLeft, ..Mask::FULL };
    for mode in [InputMode::UniformCount, InputMode::Endpoints, InputMode::Pairs] {
        let problem = one(mode, [12, 12], window, Pass::Forward);
        let finding = found(&Planted::new(Emulated::default(), WINDOW_OFF_BY_ONE.entry()), &problem);
        let query = finding.place.row.expect("a row");
        let expected = format!(
            "sequence 0, query {query}: saw keys {}..{end}, should see keys {}..{end}",
            query - 2,
            query - 3,
            end = query + 1
        );
        assert_eq!(finding.what, expected);
    }
    let long = one(InputMode::UniformCount, [16, 4096], Mask::FULL, Pass::Forward);
    let finding = found(&planted(DROPS[1]), &long);
    let expected = "sequence 0, query 7: saw keys 0..1536 and 1537..4096, should see keys 0..4096";
    assert_eq!(finding.what, expected);
}

#[test]
fn the_finding_says_which_row_a_query_read() {
    let problem = one(InputMode::Routing, [12, 12], Mask::FULL, Pass::Forward);
    let stray = |_: &Problem, inputs: &Inputs, rank: &mut RankOutputs| {
        let chosen =
            (0..12).find(|key| (0..16).all(|lane| inputs.v[[*key, 0, lane]] == rank.out[[4, 0, lane]]));
        let other = (chosen.expect("a key") + 3) % 12;
        (0..16).for_each(|lane| rank.out[[4, 0, lane]] = inputs.v[[other, 0, lane]]);
    };
    let finding = found(&Edited(stray), &problem);
    assert_eq!(finding.tensor, Some(TensorName::Out));
    let what = &finding.what;
    assert!(
        what.starts_with("sequence 0, query 4: read key ") && what.contains("; should read keys "),
        "{what}"
    );
}

#[test]
fn the_finding_says_which_head_a_query_saw() {
    for mode in [InputMode::UniformCount, InputMode::Endpoints, InputMode::Staircase] {
        let mut fields: ProblemFields = one(mode, [12, 12], Mask::CAUSAL, Pass::Forward).into();
        fields.heads = Heads { q: 4, kv: 2 };
        let problem = Problem::new(fields).expect("a legal problem");
        // Results as they look when query heads map to KV heads by modulo: the two heads in the middle have each
        // other's results.
        let by_modulo = |_: &Problem, _: &Inputs, rank: &mut RankOutputs| {
            for row in 0..12 {
                let lse = rank.lse.as_mut().expect("an LSE");
                lse.swap([1, row], [2, row]);
                (0..16).for_each(|lane| rank.out.swap([row, 1, lane], [row, 2, lane]));
            }
        };
        let finding = found(&Edited(by_modulo), &problem);
        let query = finding.place.row.expect("a row");
        let (own, other) = match finding.place.head {
            Some(1) => (0, 1),
            _ => (1, 0),
        };
        let expected = format!(
            "sequence 0, query {query}: saw keys 0..{} of KV head {other}; should see those of its own, KV head {own}",
            query + 1
        );
        assert_eq!(finding.what, expected, "{mode:?}");
    }
}

#[test]
fn the_finding_says_which_queries_a_key_received_from() {
    let window = Mask { left: Some(3), right: Some(0), align: Alignment::TopLeft, ..Mask::FULL };
    let narrow: Edit = |_, schedule| {
        for operation in schedule.ranks.iter_mut().flat_map(|program| &mut program.operations) {
            if let Work::AttendBackward(attend) = &mut operation.work {
                attend.call.segments.iter_mut().for_each(|one| one.lo = one.lo.map(|lo| lo + 1));
            }
        }
    };
    for mode in [InputMode::Routing, InputMode::Pairs] {
        let problem = one(mode, [24, 24], window, Pass::Backward);
        let finding = found(&planted(narrow), &problem);
        assert_eq!(finding.tensor, Some(TensorName::Dv), "{finding}");
        let key = finding.place.row.expect("a row");
        // The query `key + 3` is the last that may see the key.
        let story = format!("..{}", key + 4);
        let what = &finding.what;
        assert!(what.contains("received from") && what.ends_with(&story), "{what}");
    }
}

/// Faults that the envelope catches, but no exact mode, because the modes do not contain what these faults change.
const NOT_EXACT: [&str; 13] = [
    // No keys are shared in an exact mode.
    "shared-gradient-of-the-last",
    "shared-gradient-counted-twice",
    "shared-gradient-of-the-lender-alone",
    "shared-prefix-causal-by-row",
    "shared-prefix-attended-twice",
    "last-lent-key-lost",
    // Any format holds the partial sums of an exact mode.
    "gradient-sums-in-16-bit",
    // An exact mode has no soft cap where logits are not 0.
    "softcap-missing",
    // The sink has no weight where gradients are exact.
    "dsink-zero",
    "dsink-counted-on-every-rank",
    "softcap-missing-in-backward",
    // The fault is too rare: no examined case is in an exact mode and shows it.
    "striped-offsets-miss-a-run",
    // Rows that no copy reaches are seen before any values.
    "pack-offsets-by-real-length",
];

#[test]
fn faults_of_masks_rows_and_merges_are_seen_by_the_exact_rung() {
    let missed: Vec<&str> = catalogue()
        .collect::<Vec<_>>()
        .into_par_iter()
        .filter(|fault| matches!(fault.edit, Plant::Schedule(_)))
        .filter(|fault| fault.caught_by.contains(&Catcher::Envelope))
        .filter(|fault| {
            let subject = Planted::new(Emulated::default(), **fault);
            let exact = stream(fault, 1).map(|(problem, _)| problem).filter(|p| eligible(p.mode, p).is_ok());
            !exact.take(100).any(|problem| {
                matches!(examine(&subject, &problem), Verdict::Finding(f) if f.check == Check::Exact)
            })
        })
        .map(|fault| fault.id)
        .collect();
    assert_eq!(missed, NOT_EXACT);
}

#[test]
fn an_exact_finding_shrinks_to_a_small_one_of_the_same_check() {
    let window = Mask { left: Some(3), right: Some(0), align: Alignment::BottomRight, ..Mask::FULL };
    for mode in [InputMode::UniformCount, InputMode::Pairs] {
        let start = one(mode, [20, 24], window, Pass::Backward);
        let subject = Planted::new(Emulated::default(), WINDOW_OFF_BY_ONE.entry());
        let Verdict::Finding(finding) = evaluate(&subject, &start) else { panic!("{mode:?}: not seen") };
        assert_eq!(finding.check, Check::Exact);
        let small = shrink(&start, SHRINK_EVALUATIONS_MAX, |candidate| {
            same_failure(&finding, evaluate(&subject, candidate)).is_some()
        });
        let Verdict::Finding(last) = evaluate(&subject, &small.problem) else { panic!("{mode:?}: lost") };
        assert_eq!((last.check, last.tensor), (Check::Exact, finding.tensor));
        assert!(small.complete && small.problem.tokens() <= 2, "{:?}", small.problem);
        assert_eq!(small.problem.mode, InputMode::UniformCount);
    }
}
