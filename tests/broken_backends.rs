//! Deliberately broken copies of the emulated backend: each is caught, and shrunk to a case that a person can read,
//! the same one on every run.

use seamproof::backend::{
    Backend, Capabilities, Outputs, PaddingContract, PaddingInputs, PaddingOutputs, RunError,
};
use seamproof::backends::{Emulated, Planted};
use seamproof::campaign::same_failure;
use seamproof::generate::{self, Draw, Limits};
use seamproof::judge::judge;
use seamproof::layout::layouts;
use seamproof::shrink::{Shrunk, shrink};
use seamproof::verdict::{Check, Finding, Verdict};
use seamproof_oracle::envelope::{Accumulation, Partition};
use seamproof_oracle::{Inputs, Pass, Problem};
use seamproof_simulator::UNWRITTEN_BITS;
use seamproof_simulator::emulated::Tiles;
use seamproof_simulator::faults::{Catcher, Fault, WINDOW_OFF_BY_ONE};
use seamproof_simulator::schedule::Work;

/// Cases of one seed within which each bug must show.
const CASES_MAX: u64 = 1_000;
const EVALUATIONS_MAX: usize = 200;
const KEY_TILE: usize = 4;

/// What is done to the results of a right run.
type Spoil = fn(&Emulated, &Problem, &Inputs, &mut Outputs);

/// The emulated backend with spoilt results.
struct Spoilt {
    inner: Emulated,
    spoil: Spoil,
}

impl Backend for Spoilt {
    fn name(&self) -> &str {
        "spoilt"
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn padding(&self) -> PaddingContract {
        PaddingContract { inputs: PaddingInputs::Anything, outputs: PaddingOutputs::Zero }
    }

    fn accumulation(&self) -> Accumulation {
        self.inner.accumulation()
    }

    fn partition(&self, problem: &Problem) -> Partition {
        self.inner.partition(problem)
    }

    fn run(&self, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
        let mut outputs = self.inner.run(problem, inputs)?;
        (self.spoil)(&self.inner, problem, inputs, &mut outputs);
        Ok(outputs)
    }
}

fn emulated() -> Emulated {
    Emulated { tiles: Tiles { q: 4, kv: KEY_TILE }, order: 7 }
}

/// A kernel whose loop over key tiles ends one tile early when the length is 1 more than whole tiles.
const LAST_KEY_TILE_SKIPPED: Fault = Fault {
    id: "last-key-tile-skipped",
    imitates: "the last tile is skipped when it holds one key",
    source: "https://github.com/Dao-AILab/flash-attention",
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

/// dk of a group is summed over all of its query heads but the last.
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

/// The first case of campaign `seed` that the backend fails.
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

/// Sequences, and real rows of q and kv together.
fn extent(problem: &Problem) -> (usize, usize) {
    let rows = problem.sequences.iter().map(|sequence| sequence.q.len + sequence.kv.len).sum();
    (problem.sequences.len(), rows)
}

fn caught_and_shrunk(backend: &dyn Backend, checks: &[Check]) {
    let name = backend.name();
    for seed in 1..=5 {
        let (problem, finding) =
            first_failure(backend, seed).unwrap_or_else(|| panic!("{name}: seed {seed}: not caught"));
        assert!(checks.contains(&finding.check), "{name}: seed {seed}: {finding}");
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
    let backend = Planted::new(emulated(), WINDOW_OFF_BY_ONE);
    caught_and_shrunk(&backend, &[Check::Envelope]);
}

#[test]
fn a_skipped_last_key_tile_is_caught() {
    let backend = Planted::new(emulated(), LAST_KEY_TILE_SKIPPED);
    caught_and_shrunk(&backend, &[Check::Envelope]);
}

#[test]
fn a_query_head_missing_from_dk_is_caught() {
    let backend = Spoilt { inner: emulated(), spoil: dk_misses_a_head };
    caught_and_shrunk(&backend, &[Check::Envelope]);
}

#[test]
fn unwritten_padding_rows_are_caught() {
    let backend = Spoilt { inner: emulated(), spoil: padding_unwritten };
    caught_and_shrunk(&backend, &[Check::Structure]);
}

#[test]
fn an_lse_off_by_ln_2_is_caught() {
    let backend = Spoilt { inner: emulated(), spoil: lse_in_base_two };
    caught_and_shrunk(&backend, &[Check::Envelope]);
}

#[test]
fn the_right_backend_is_not_caught() {
    assert_eq!(first_failure(&emulated(), 1), None);
}
