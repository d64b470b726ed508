//! The judge on perturbed answers: one element of an honest answer is moved, and it is known whether the judge must
//! see that.
//!
//! The exact values come from [`exact`], the oracle's plain loops, which the judge never asks. An element further
//! from its exact value than its bound must be a finding at that very element, and one within its bound must not.
//! Nothing is claimed within a thousandth of the bound, where the two forms of the oracle may round differently.

use ndarray::Array3;
use seamproof_oracle::envelope::Model;
use seamproof_oracle::{
    ContextParallel, Format, ForwardResults, Gradients, Inputs, Pass, Problem, ProblemFields, Saved, Side,
    TensorName,
};
use seamproof_oracle::{blocked, exact};

use seamproof_judge::finding::{Check, Place};
use seamproof_judge::ladder::{Depth, Judge};
use seamproof_judge::subject::{Backend, Declaration, Outputs, RankOutputs, RunError};
use seamproof_judge::subjects::Emulated;
use seamproof_judge::values::{self, Poison};
use seamproof_judge::verdict::Verdict;
use seamproof_oracle::replay::Replay;
use seamproof_oracle::sharding as layout;

/// Smallest distance of a ratio from 1 at which the judge is asked.
const NEAR: f64 = 1e-3;

/// Moves one element of an honest answer, as `[tensor, element, amount]` draw it, and asks the judge. Returns whether
/// the judge had to see that; `None` where nothing is claimed about the case.
///
/// # Panics
/// Panics where the judge sees what it must not see, or does not see what it must.
pub fn judged(problem: &Problem, draws: [u32; 3]) -> Option<bool> {
    holds(&Judge::default(), problem, draws)
}

fn holds(judge: &Judge, problem: &Problem, [tensor, element, amount]: [u32; 3]) -> Option<bool> {
    // Gradients need a backward, and statistics of a whole head one rank.
    let name = TensorName::RESULTS[tensor as usize % TensorName::RESULTS.len()];
    let problem = &asked(problem, name)?;
    let kernel = Emulated::default();
    let honest = kernel.run(problem, &poisoned(problem)).ok()?;
    let answer = Answer::new(judge, &kernel, problem, &honest)?;
    let spots = spots(problem, name, &honest.ranks)?;
    let spot = *spots.get(element as usize % spots.len().max(1))?;
    let (exact, bound) = (answer.exact(name, spot.whole), answer.bound(name, spot.whole));
    let value = moved(amount, exact, bound);
    let must_see = is_past(value, exact, bound)?;
    let subject = Moved { kernel, name, spot, value };
    let judge = Judge {
        rungs: judge.rungs.iter().copied().filter(|rung| rung.check == Check::Envelope).collect(),
        ..judge.clone()
    };
    let verdict = judge.examine(&subject, problem, Depth::First).verdict;
    let seen = match &verdict {
        Verdict::Pass(_) => false,
        Verdict::Finding(finding) => {
            assert_eq!((finding.tensor, finding.place), (Some(name), spot.place), "{finding}: {problem:?}");
            true
        }
        other => panic!("{other:?}: {problem:?}"),
    };
    let at = spot.place;
    assert_eq!(seen, must_see, "{name} at {at}: {value:e} for {exact:e} ± {bound:e}: {problem:?}");
    Some(must_see)
}

/// Returns the problem in which this tensor is judged alone. A backward is judged on the forward's results, which
/// moving them would spoil. Hidden rows of a region hold other lanes, so there is none.
fn asked(problem: &Problem, name: TensorName) -> Option<Problem> {
    let gradient = matches!(name, TensorName::Dq | TensorName::Dk | TensorName::Dv | TensorName::Dsink);
    let pass = if gradient { Pass::Backward } else { Pass::Forward };
    let parallel = ContextParallel { region: 1, ..problem.parallel.clone() };
    Problem::new(ProblemFields { pass, parallel, ..problem.clone().into() }).ok()
}

fn poisoned(problem: &Problem) -> Inputs {
    let mut inputs = values::inputs(problem);
    values::poison(&mut inputs, problem, Poison::Nan);
    inputs
}

/// The exact answer, and the bound of each of its elements.
struct Answer {
    forward: ForwardResults,
    gradients: Option<Gradients>,
    bounds: [ForwardResults; 2],
    gradient_bounds: Option<[Gradients; 2]>,
}

impl Answer {
    fn new(judge: &Judge, kernel: &Emulated, problem: &Problem, honest: &Outputs) -> Option<Answer> {
        let inputs = values::inputs(problem);
        let model = Model::new(problem, kernel.declaration().arithmetic, kernel.partition(problem));
        let bounds = blocked::forward(problem, &inputs, Some(&model)).bound?;
        let mut answer = Answer {
            forward: exact::forward(problem, &inputs),
            gradients: None,
            bounds: [bounds.worst, bounds.dithered],
            gradient_bounds: None,
        };
        if problem.pass == Pass::Backward {
            let layouts = layout::layouts(problem).ok()?;
            let whole = (judge.assemble)(problem, &layouts, honest.ranks.clone()).ok()?;
            let saved = Saved { out: whole.out.mapv(f64::from), lse: whole.lse?.mapv(f64::from) };
            let bounds = blocked::backward(problem, &inputs, &saved, Some(&model)).bound?;
            answer.gradients = Some(exact::backward(problem, &inputs, &saved));
            answer.gradient_bounds = Some([bounds.worst, bounds.dithered]);
        }
        Some(answer)
    }

    fn exact(&self, name: TensorName, at: [usize; 3]) -> f64 {
        element(name, at, &self.forward, self.gradients.as_ref())
    }

    /// Returns the bound of the tighter tier.
    fn bound(&self, name: TensorName, at: [usize; 3]) -> f64 {
        let tier = |tier: usize| {
            let gradients = self.gradient_bounds.as_ref().map(|bounds| &bounds[tier]);
            element(name, at, &self.bounds[tier], gradients)
        };
        tier(0).min(tier(1))
    }
}

/// Returns an element by row, head and lane; NaN for absent gradients.
fn element(
    name: TensorName,
    [row, head, lane]: [usize; 3],
    f: &ForwardResults,
    g: Option<&Gradients>,
) -> f64 {
    let of = |pick: fn(&Gradients) -> &Array3<f64>| g.map_or(f64::NAN, |g| pick(g)[[row, head, lane]]);
    match name {
        TensorName::Lse => f.lse[[head, row]],
        TensorName::MaxLogit => f.max_logit[head],
        TensorName::Dq => of(|g| &g.dq),
        TensorName::Dk => of(|g| &g.dk),
        TensorName::Dv => of(|g| &g.dv),
        TensorName::Dsink => g.map_or(f64::NAN, |g| g.dsink[head]),
        _ => f.out[[row, head, lane]],
    }
}

/// A real element: its rank, its row, head and lane there and in the problem's own layout, and its place.
#[derive(Clone, Copy)]
struct Spot {
    rank: usize,
    local: [usize; 3],
    whole: [usize; 3],
    place: Place,
}

/// Returns every real element of a tensor; `None` for a statistic of whole heads on several ranks, which has no
/// owner.
fn spots(problem: &Problem, name: TensorName, ranks: &[RankOutputs]) -> Option<Vec<Spot>> {
    let (heads, dims) = (problem.heads, problem.dims);
    let (side, heads, lanes) = match name {
        TensorName::MaxLogit => return (ranks.len() == 1).then(|| head_spots(heads.q)),
        TensorName::Dsink => return (ranks.len() == 1).then(|| head_spots(problem.learnable_sinks())),
        TensorName::Lse => (Side::Q, heads.q, 1),
        TensorName::Dq => (Side::Q, heads.q, dims.qk),
        TensorName::Dk => (Side::Kv, heads.kv, dims.qk),
        TensorName::Dv => (Side::Kv, heads.kv, dims.v),
        _ => (Side::Q, heads.q, dims.v),
    };
    let mut spots = Vec::new();
    for (rank, layout) in layout::layouts(problem).ok()?.iter().enumerate() {
        for placed in &layout.side(side).runs {
            let run = layout::run_of(&problem.sequences[placed.sequence], side);
            for (i, row) in placed.local.real_rows().enumerate() {
                let position = placed.piece.start + i * placed.piece.step;
                for (head, lane) in (0..heads).flat_map(|head| (0..lanes).map(move |lane| (head, lane))) {
                    let place = Place {
                        sequence: Some(placed.sequence),
                        head: Some(head),
                        row: Some(position),
                        lane: (name != TensorName::Lse).then_some(lane),
                    };
                    let whole = [run.row(position), head, lane];
                    spots.push(Spot { rank, local: [row, head, lane], whole, place });
                }
            }
        }
    }
    Some(spots)
}

fn head_spots(heads: usize) -> Vec<Spot> {
    let spot = |head| Spot {
        rank: 0,
        local: [0, head, 0],
        whole: [0, head, 0],
        place: Place { head: Some(head), ..Place::default() },
    };
    (0..heads).map(spot).collect()
}

/// Returns the moved value: NaN, an infinity, zero, the other sign, or a value 1/16 to 16 bounds off on either side.
fn moved(amount: u32, exact: f64, bound: f64) -> f32 {
    let sign = if amount & 8 == 0 { 1.0 } else { -1.0 };
    let value = match amount & 7 {
        0 => f64::NAN,
        1 => f64::INFINITY * sign,
        2 => 0.0,
        3 => -exact,
        _ => exact + sign * bound * libm::exp2(f64::from(amount >> 16) / 8192.0 - 4.0),
    };
    value as f32
}

/// Whether a value must be seen; `None` too near the bound, and for an infinity that may stand for an overflow. A
/// zero is right for a value that every format rounds to zero. Weights below f64's normal range leave no bound there,
/// and the judge takes them for zero.
fn is_past(value: f32, exact: f64, bound: f64) -> Option<bool> {
    let got = f64::from(value);
    if got == exact || got == 0.0 && exact.abs() <= Format::F32.tiny_half() {
        return Some(false);
    }
    if value.is_infinite() && exact.is_finite() {
        return None;
    }
    let ratio = (got - exact).abs() / bound;
    match ratio.is_nan() {
        true => Some(true),
        false => ((ratio - 1.0).abs() > NEAR).then_some(ratio > 1.0),
    }
}

/// The emulated kernel with one element of its results moved.
struct Moved {
    kernel: Emulated,
    name: TensorName,
    spot: Spot,
    value: f32,
}

impl Backend for Moved {
    fn name(&self) -> &str {
        self.kernel.name()
    }

    fn declaration(&self) -> Declaration {
        self.kernel.declaration()
    }

    fn inner(&self) -> Option<&dyn Backend> {
        Some(&self.kernel)
    }

    /// Returns no replay, because the locked roundings are the honest kernel's.
    fn replay(&self, _problem: &Problem) -> Option<Replay> {
        None
    }

    fn run(&self, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
        let mut outputs = self.kernel.run(problem, inputs)?;
        let Spot { rank, local: [row, head, lane], .. } = self.spot;
        let RankOutputs { out, lse, max_logit, gradients, .. } = &mut outputs.ranks[rank];
        let gradients = gradients.as_mut();
        let place = match self.name {
            TensorName::Lse => lse.as_mut().map(|lse| &mut lse[[head, row]]),
            TensorName::MaxLogit => max_logit.as_mut().map(|max| &mut max[head]),
            TensorName::Dq => gradients.map(|g| &mut g.dq[[row, head, lane]]),
            TensorName::Dk => gradients.map(|g| &mut g.dk[[row, head, lane]]),
            TensorName::Dv => gradients.map(|g| &mut g.dv[[row, head, lane]]),
            TensorName::Dsink => gradients.map(|g| &mut g.dsink[head]),
            _ => Some(&mut out[[row, head, lane]]),
        };
        if let Some(place) = place {
            *place = self.value;
        }
        Ok(outputs)
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;
    use seamproof_judge::generate::{self, Draw, Limits};
    use seamproof_judge::ladder::faults::FAULTS;
    use seamproof_simulator::faults::find;

    /// Returns for each drawn case whether the judge had to see it, or that the judge failed.
    fn asked_of(judge: &Judge) -> Vec<Result<bool, ()>> {
        let case = |index: u64| {
            let Draw::Problem(problem) = generate::draw(4, index, &Limits::fuzz()) else { return None };
            let draw = |purpose: u64| seamproof_judge::hash::mix(index.wrapping_mul(3) ^ purpose) as u32;
            let ask = || holds(judge, &problem, [draw(1 << 40), draw(1 << 41), draw(1 << 42)]);
            catch_unwind(AssertUnwindSafe(ask)).map_err(|_| ()).transpose()
        };
        (0..600).filter_map(case).collect()
    }

    #[test]
    fn the_judge_sees_what_is_past_a_bound_and_nothing_else() {
        let asked = asked_of(&Judge::default());
        let count = |wanted| asked.iter().filter(|&&got| got == wanted).count();
        assert_eq!(count(Err(())), 0);
        assert!(count(Ok(true)) > 100 && count(Ok(false)) > 100, "{asked:?}");
    }

    #[test]
    fn a_judge_that_looks_away_is_found_out() {
        for id in ["judge-nan-equals", "judge-zero-accepted", "judge-bound-times-100", "judge-sign-ignored"] {
            let mut judge = Judge::default();
            let fault = find(&FAULTS, id).expect("the fault is in the list");
            (fault.edit)(&mut judge);
            assert!(asked_of(&judge).contains(&Err(())), "{id}");
        }
    }
}
