//! Deliberately broken copies of the emulated backend. Each is caught, and shrunk to a case that a person can read,
//! the same one on every run.

use seamproof_judge::campaign::{Campaign, CanaryOutcome};
use seamproof_judge::failure::same_failure;
use seamproof_judge::finding::{Check, Finding};
use seamproof_judge::generate::{self, Draw, Limits};
use seamproof_judge::ladder::judge;
use seamproof_judge::shrink::{Shrunk, shrink};
use seamproof_judge::subject::{Backend, Declaration, Outputs, RunError};
use seamproof_judge::subjects::{Emulated, Planted};
use seamproof_judge::verdict::Verdict;
use seamproof_oracle::sharding::layouts;
use seamproof_oracle::{Inputs, Pass, Problem, ProblemFields, Side, TensorName};
use seamproof_simulator::UNWRITTEN_BITS;
use seamproof_simulator::emulated::Tiles;
use seamproof_simulator::faults::{Catcher, Edit, Fault, WINDOW_OFF_BY_ONE};
use seamproof_simulator::schedule::Work;

/// Number of cases of one seed within which each bug must show.
const CASES_MAX: u64 = 1_000;
const EVALUATIONS_MAX: usize = 200;
const KEY_TILE: usize = 4;

/// Function that spoils the results of a right run.
type Spoil = fn(&Emulated, &Problem, &Inputs, &mut Outputs);

/// The emulated backend with spoilt results.
struct Spoilt {
    inner: Emulated,
    spoil: Spoil,
}

impl Backend for Spoilt {
    fn declaration(&self) -> Declaration {
        self.inner.declaration()
    }

    fn inner(&self) -> Option<&dyn Backend> {
        Some(&self.inner)
    }

    fn name(&self) -> &str {
        "spoilt"
    }

    fn run(&self, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
        let mut outputs = self.inner.run(problem, inputs)?;
        (self.spoil)(&self.inner, problem, inputs, &mut outputs);
        Ok(outputs)
    }
}

fn emulated() -> Emulated {
    Emulated { tiles: Tiles { q: 4, kv: KEY_TILE }, order: 7, ..Emulated::default() }
}

/// A kernel whose loop over key tiles ends one tile early when the length is 1 more than whole tiles.
const LAST_KEY_TILE_SKIPPED: Fault<Edit> = Fault {
    id: "last-key-tile-skipped",
    imitates: "the last tile is skipped when it holds one key",
    source: "https://github.com/Dao-AILab/flash-attention",
    entries: &[],
    caught_by: &[Catcher::Envelope],
    edit: |_, schedule| {
        for operation in schedule.ranks.iter_mut().flat_map(|program| &mut program.operations) {
            let call = match &mut operation.work {
                Work::Attend(attend) => &mut attend.call,
                Work::AttendBackward(attend) => &mut attend.call,
                _ => continue,
            };
            for run in call.segments.iter_mut().flat_map(|segment| &mut segment.kv) {
                if run.len % KEY_TILE == 1 {
                    run.len -= 1;
                }
            }
        }
    },
};

/// Sums dk of a group over all of its query heads but the last.
fn dk_misses_a_head(inner: &Emulated, problem: &Problem, inputs: &Inputs, outputs: &mut Outputs) {
    if problem.pass == Pass::Forward || problem.group() == 1 {
        return;
    }
    let mut without = inputs.clone();
    for head in (problem.group() - 1..problem.heads.q).step_by(problem.group()) {
        without.dout.index_axis_mut(ndarray::Axis(1), head).fill(0.0);
    }
    let partial = inner.run(problem, &without).expect("the same problem runs again");
    for (rank, partial) in outputs.ranks.iter_mut().zip(partial.ranks) {
        if let (Some(gradients), Some(partial)) = (&mut rank.gradients, partial.gradients) {
            gradients.dk = partial.dk;
        }
    }
}

fn padding_unwritten(_: &Emulated, problem: &Problem, _: &Inputs, outputs: &mut Outputs) {
    let layouts = layouts(problem).expect("it ran, so it can be cut");
    for (layout, rank) in layouts.iter().zip(&mut outputs.ranks) {
        for row in layout.q.runs.iter().flat_map(|placed| placed.local.padding_rows()) {
            rank.out.index_axis_mut(ndarray::Axis(0), row).fill(f32::from_bits(UNWRITTEN_BITS));
        }
    }
}

fn lse_in_base_two(_: &Emulated, _: &Problem, _: &Inputs, outputs: &mut Outputs) {
    for lse in outputs.ranks.iter_mut().filter_map(|rank| rank.lse.as_mut()) {
        lse.mapv_inplace(|lse| lse + std::f32::consts::LN_2);
    }
}

/// Reads one padding row of v with weight 0 in the softmax: NaN there becomes NaN here.
fn padding_times_zero(_: &Emulated, problem: &Problem, inputs: &Inputs, outputs: &mut Outputs) {
    let layouts = layouts(problem).expect("it ran, so it can be cut");
    for (layout, rank) in layouts.iter().zip(&mut outputs.ranks) {
        for placed in &layout.q.runs {
            let padding = problem.sequences[placed.sequence].kv.padding_rows().next();
            if let (Some(row), Some(padding)) = (placed.local.real_rows().last(), padding) {
                rank.out[[row, 0, 0]] += 0.0 * inputs.v[[padding, 0, 0]];
            }
        }
    }
}

fn dsink_of_the_wrong_sign(_: &Emulated, _: &Problem, _: &Inputs, outputs: &mut Outputs) {
    for gradients in outputs.ranks.iter_mut().filter_map(|rank| rank.gradients.as_mut()) {
        gradients.dsink.mapv_inplace(|sum| -sum);
    }
}

/// Returns the max_logit of another problem.
fn max_logit_of(
    inner: &Emulated,
    problem: &Problem,
    inputs: &Inputs,
    outputs: &mut Outputs,
    edit: fn(&mut ProblemFields),
) {
    let mut fields: ProblemFields = problem.clone().into();
    edit(&mut fields);
    let other = Problem::new(fields.sayable()).expect("a simpler problem is legal");
    let other = inner.run(&other, inputs).expect("a simpler problem runs");
    for (rank, other) in outputs.ranks.iter_mut().zip(other.ranks) {
        rank.max_logit = other.max_logit;
    }
}

fn max_logit_before_the_softcap(inner: &Emulated, problem: &Problem, inputs: &Inputs, outputs: &mut Outputs) {
    max_logit_of(inner, problem, inputs, outputs, |fields| fields.softmax.softcap = None);
}

fn max_logit_of_the_first_sequence(
    inner: &Emulated,
    problem: &Problem,
    inputs: &Inputs,
    outputs: &mut Outputs,
) {
    max_logit_of(inner, problem, inputs, outputs, |fields| fields.sequences.truncate(1));
}

/// Clears a row of out that no sequence owns.
fn slack_cleared(_: &Emulated, problem: &Problem, _: &Inputs, outputs: &mut Outputs) {
    let layouts = layouts(problem).expect("it ran, so it can be cut");
    for (layout, rank) in layouts.iter().zip(&mut outputs.ranks) {
        let side = layout.side(Side::Q);
        let owned = |row| {
            let mut runs = side.runs.iter().map(|placed| placed.local);
            runs.any(|run| run.real_rows().chain(run.padding_rows()).any(|own| own == row))
        };
        if let Some(row) = (0..side.rows).rev().find(|&row| !owned(row)) {
            rank.out.index_axis_mut(ndarray::Axis(0), row).fill(0.0);
        }
    }
}

/// Leaves something tiny in a padding row of dk, as a sum does that begins before the zeros are written.
fn gradient_in_padding(_: &Emulated, problem: &Problem, _: &Inputs, outputs: &mut Outputs) {
    let layouts = layouts(problem).expect("it ran, so it can be cut");
    for (layout, rank) in layouts.iter().zip(&mut outputs.ranks) {
        let Some(gradients) = &mut rank.gradients else { continue };
        for row in layout.kv.runs.iter().filter_map(|placed| placed.local.padding_rows().last()) {
            gradients.dk[[row, 0, 0]] = f32::MIN_POSITIVE;
        }
    }
}

/// Reports 0 as the LSE of rows that see no key, as if one key of logit 0 were there.
fn empty_rows_with_lse_0(_: &Emulated, problem: &Problem, _: &Inputs, outputs: &mut Outputs) {
    let layouts = layouts(problem).expect("it ran, so it can be cut");
    for (layout, rank) in layouts.iter().zip(&mut outputs.ranks) {
        let Some(lse) = &mut rank.lse else { continue };
        let rows = &layout.statistics_rows().runs;
        for row in rows.iter().flat_map(|placed| placed.local.real_rows()) {
            lse.column_mut(row).mapv_inplace(|lse| if lse == f32::NEG_INFINITY { 0.0 } else { lse });
        }
    }
}

/// Returns the first case of campaign `seed` that the backend fails.
fn first_failure(backend: &dyn Backend, seed: u64) -> Option<(Problem, Finding)> {
    let limits = Limits::quick();
    (0..CASES_MAX).find_map(|index| match generate::draw(seed, index, &limits) {
        Draw::Malformed(_) => None,
        Draw::Problem(problem) => match judge(backend, &problem) {
            Verdict::Finding(finding) => Some((problem, *finding)),
            _ => None,
        },
    })
}

fn minimise(backend: &dyn Backend, start: &Problem, finding: &Finding) -> Shrunk {
    shrink(start, EVALUATIONS_MAX, |candidate| same_failure(finding, judge(backend, candidate)).is_some())
}

/// Returns the number of sequences, and of real rows of q and kv together.
fn extent(problem: &Problem) -> (usize, usize) {
    let rows = problem.sequences.iter().map(|sequence| sequence.q.len + sequence.kv.len).sum();
    (problem.sequences.len(), rows)
}

/// Checks that this check (on this tensor, where one is named) catches the backend with every seed. The shrunk case
/// has at most 2 sequences and 8 rows of q and kv together. Nothing simpler fails, few evaluations are needed, and a
/// second run gives the same case.
fn caught_and_shrunk(backend: &dyn Backend, check: Check, tensor: Option<TensorName>) {
    let name = backend.name();
    for seed in 1..=5 {
        let (problem, finding) =
            first_failure(backend, seed).unwrap_or_else(|| panic!("{name}: seed {seed}: not caught"));
        // Inputs of an exact mode ask what the envelope asks, without a tolerance.
        let sharper = check == Check::Envelope && finding.check == Check::Exact;
        assert!(finding.check == check || sharper, "{name}: seed {seed}: {finding}");
        assert!(tensor.is_none() || finding.tensor == tensor, "{name}: seed {seed}: {finding}");
        let shrunk = minimise(backend, &problem, &finding);
        let (sequences, rows) = extent(&shrunk.problem);
        let how = format!(
            "{name}: seed {seed}: {sequences} sequences, {rows} rows after {} evaluations",
            shrunk.evaluations
        );
        assert!(shrunk.complete && shrunk.evaluations < EVALUATIONS_MAX, "{how}");
        assert!(sequences <= 2 && rows <= 8, "{how}");
        let again =
            first_failure(backend, seed).map(|(problem, finding)| minimise(backend, &problem, &finding));
        assert_eq!(again, Some(shrunk), "{name}: another result on the second run");
    }
}

#[test]
fn a_window_off_by_one_is_caught() {
    let backend = Planted::new(emulated(), WINDOW_OFF_BY_ONE.entry());
    caught_and_shrunk(&backend, Check::Envelope, None);
}

#[test]
fn a_skipped_last_key_tile_is_caught() {
    let backend = Planted::new(emulated(), LAST_KEY_TILE_SKIPPED.entry());
    caught_and_shrunk(&backend, Check::Envelope, None);
}

#[test]
fn a_query_head_missing_from_dk_is_caught() {
    let backend = Spoilt { inner: emulated(), spoil: dk_misses_a_head };
    caught_and_shrunk(&backend, Check::Envelope, None);
}

#[test]
fn unwritten_padding_rows_are_caught() {
    let backend = Spoilt { inner: emulated(), spoil: padding_unwritten };
    caught_and_shrunk(&backend, Check::Structure, None);
}

#[test]
fn an_lse_off_by_ln_2_is_caught() {
    let backend = Spoilt { inner: emulated(), spoil: lse_in_base_two };
    caught_and_shrunk(&backend, Check::Envelope, None);
}

#[test]
fn a_padding_row_times_0_is_caught() {
    let backend = Spoilt { inner: emulated(), spoil: padding_times_zero };
    caught_and_shrunk(&backend, Check::Poison, Some(TensorName::Out));
}

#[test]
fn a_dsink_of_the_wrong_sign_is_caught() {
    let backend = Spoilt { inner: emulated(), spoil: dsink_of_the_wrong_sign };
    caught_and_shrunk(&backend, Check::Envelope, Some(TensorName::Dsink));
}

#[test]
fn a_max_logit_before_the_softcap_is_caught() {
    let backend = Spoilt { inner: emulated(), spoil: max_logit_before_the_softcap };
    caught_and_shrunk(&backend, Check::Envelope, Some(TensorName::MaxLogit));
}

#[test]
fn a_max_logit_of_the_first_sequence_alone_is_caught() {
    let backend = Spoilt { inner: emulated(), spoil: max_logit_of_the_first_sequence };
    caught_and_shrunk(&backend, Check::Envelope, Some(TensorName::MaxLogit));
}

#[test]
fn a_written_row_that_nobody_owns_is_caught() {
    let backend = Spoilt { inner: emulated(), spoil: slack_cleared };
    caught_and_shrunk(&backend, Check::Structure, Some(TensorName::Out));
}

#[test]
fn a_gradient_in_a_padding_row_is_caught() {
    let backend = Spoilt { inner: emulated(), spoil: gradient_in_padding };
    caught_and_shrunk(&backend, Check::Structure, Some(TensorName::Dk));
}

#[test]
fn an_empty_row_with_an_lse_of_0_is_caught() {
    let backend = Spoilt { inner: emulated(), spoil: empty_rows_with_lse_0 };
    caught_and_shrunk(&backend, Check::Envelope, Some(TensorName::Lse));
}

#[test]
fn the_right_backend_is_not_caught() {
    assert_eq!(first_failure(&emulated(), 1), None);
}

/// Test that a failure which the right call has as well is no canary, and that the campaign shows it.
#[test]
fn a_canary_is_not_told_of_a_subject_that_is_wrong_everywhere() {
    let spoil: Spoil = |_, _, _, outputs| {
        outputs.ranks.iter_mut().for_each(|rank| rank.out.mapv_inplace(|value| value + 8.0));
    };
    let summary = Campaign::quick(20).run(&Spoilt { inner: emulated(), spoil });
    assert!(matches!(summary.canary, CanaryOutcome::NotTold { own: 4, .. }), "{summary}");
    assert!(!summary.failures.is_empty() && !summary.holds(), "{summary}");
}
