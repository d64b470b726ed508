//! The emulated kernel in FP8 in schedules: those of the kernel in bf16, with codes in q, k, v and dout.
//!
//! Codes travel as they are. The scales of tensors, heads and sequences are of the whole group, and every rank knows all
//! of them; each launch is told those of [the rows that it reads](Schedule::descale). A partial out or gradient leaves
//! its launch as values, with descales in it and in the format that the schedule says, which is f32 or that of the
//! result. Merges and sums are therefore those of bf16. With given scales it leaves as codes. These are merged and added
//! in units of the code, where no decoding rounds, and the descale comes to the result at the very end.

use std::rc::Rc;

use ndarray::{Array3, Axis};
use seamproof_oracle::amax::Amaxes;
use seamproof_oracle::groups::Groups;
use seamproof_oracle::sharding::{self, PlacedRun};
use seamproof_oracle::{
    Algorithm, Inputs, OwnScales, Pass, Problem, Quantity, Scales, Sequence, TensorName, TensorScales,
};
use seamproof_simulator::device::Cpu;
use seamproof_simulator::emulated::{Roundings, Units};
use seamproof_simulator::is_unwritten;
use seamproof_simulator::schedule::{LaunchedHead, MergeOrder, Schedule};

use super::emulated::scheduled;
use super::fp8::{Fp8, LocalPlace, Place, Recipe};
use super::fp8_given::Kept;
use super::{World, on_device};
use crate::subject::{Outputs, RankGradients, RankOutputs, RunError};

impl Fp8 {
    /// Runs a problem on the ranks that it names.
    pub(super) fn run_schedule(&self, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
        let recipe = self.recipe();
        let world = World::new(problem, |problem| {
            let mut schedule = (*scheduled(problem, self.merge)?).clone();
            descale(&mut schedule, problem, inputs, &recipe)?;
            (recipe.schedule)(&mut schedule);
            Ok(Rc::new(schedule))
        })?;
        let device = self.device(problem, inputs, &recipe);
        let mut outputs = on_device::run_world(&device, problem, inputs, &world, self.order, &mut |_| {})?;
        let written = |lse: &&mut f32| !is_unwritten(**lse);
        let all = outputs.ranks.iter_mut().filter_map(|rank| rank.lse.as_mut());
        all.flatten().filter(written).for_each(|lse| *lse += recipe.lse_shift);
        outputs.ranks.iter_mut().for_each(|rank| decode(rank, &inputs.scales.own));
        for (place, rank) in outputs.ranks.iter_mut().enumerate() {
            let all = Amaxes::new(|quantity| {
                let is_there = quantity.is_forward() || problem.pass == Pass::Backward;
                device.amaxes().of(quantity).filter(|_| is_there)
            });
            rank.amax = (recipe.amax)(Kept { problem, inputs, place, rank, all });
        }
        Ok(outputs)
    }

    fn device(&self, problem: &Problem, inputs: &Inputs, recipe: &Recipe) -> Cpu<f32> {
        let (p, ds) = (problem.precision.p.format, problem.precision.ds.format);
        let roundings = Roundings {
            weight_exponent: recipe.weight_exponent,
            scales_tiles: !self.is_given(),
            folds_scale: self.is_given(),
            factors: (recipe.factors)(&inputs.scales.own),
            keeps_amax: self.is_given(),
            rounds_ds_weights: recipe.backward.rounds_ds_weights,
            ..Roundings::new(p, ds)
        };
        let units = Units::HopperFp8(recipe.core, recipe.promoted_after);
        Cpu::with(units.variant(recipe.tiles, roundings, recipe.stages))
    }
}

/// Turns the codes of a rank's results into values. What nobody wrote stays as it is.
fn decode(rank: &mut RankOutputs, own: &OwnScales) {
    let decode = |quantity: Quantity, codes: &mut Array3<f32>| {
        let written = codes.iter_mut().filter(|code| !is_unwritten(**code));
        written.for_each(|code| *code *= own.of(quantity));
    };
    decode(Quantity::Out, &mut rank.out);
    if let Some(RankGradients { dq, dk, dv, .. }) = &mut rank.gradients {
        [(Quantity::Dq, dq), (Quantity::Dk, dk), (Quantity::Dv, dv)]
            .into_iter()
            .for_each(|(quantity, codes)| decode(quantity, codes));
    }
}

/// Returns the schedule of a problem in FP8, whose launches are told the descales of its inputs.
pub fn descaled(problem: &Problem, inputs: &Inputs, merge: MergeOrder) -> Result<Rc<Schedule>, RunError> {
    let mut schedule = (*scheduled(problem, merge)?).clone();
    descale(&mut schedule, problem, inputs, &Fp8::default().recipe())?;
    Ok(Rc::new(schedule))
}

/// Tells each launch of a schedule its descales.
fn descale(
    schedule: &mut Schedule,
    problem: &Problem,
    inputs: &Inputs,
    recipe: &Recipe,
) -> Result<(), RunError> {
    let ranks = schedule.ranks.len();
    let known = [recipe.known, recipe.backward.known]
        .map(|known| (0..ranks).map(|rank| known(problem, inputs, rank)).collect::<Vec<Scales>>());
    let of = |LaunchedHead { pass, rank, segment, sequence, local, head }: LaunchedHead| {
        let group = problem.group();
        let local = LocalPlace { segment, head: local, kv_head: local / group };
        let place = Place { sequence, head, kv_head: head / group, local };
        match pass {
            Pass::Forward => (recipe.descales)(&known[0][rank], place),
            Pass::Backward => (recipe.backward.descales)(&known[1][rank], place),
        }
    };
    schedule.descale(problem, of).map_err(|errors| {
        RunError::Crash(errors.first().map_or("the schedule does not run".into(), ToString::to_string))
    })
}

/// Returns the scales that every rank knows: those of the group.
pub(super) fn of_the_group(_: &Problem, inputs: &Inputs, _: usize) -> Scales {
    inputs.scales.clone()
}

/// Returns the scales of k and v that a rank would make of its own rows alone.
pub(super) fn of_own_rows(problem: &Problem, inputs: &Inputs, rank: usize) -> Scales {
    kv_of_members(problem, inputs, &|member| member == own_member(problem, rank))
}

/// Returns the scales of k and v that the ranks of one all-to-all of a hierarchy would make of their rows alone; those of
/// the group in any other algorithm.
pub(super) fn of_the_all_to_all(problem: &Problem, inputs: &Inputs, rank: usize) -> Scales {
    match problem.parallel.algorithm {
        Algorithm::Hierarchical { all_to_all } => {
            let place = |member| problem.parallel.ranks.iter().position(|rank| *rank == member);
            let group = |member| place(member).map(|place| place / all_to_all);
            let own = group(own_member(problem, rank));
            kv_of_members(problem, inputs, &|member| group(member) == own)
        }
        _ => inputs.scales.clone(),
    }
}

/// Returns the member of the group that a rank of the world is, or is a part of.
fn own_member(problem: &Problem, rank: usize) -> usize {
    rank / problem.parallel.region
}

/// Returns the scales of k and v that some members would make of their rows alone.
fn kv_of_members(problem: &Problem, inputs: &Inputs, is_one: &dyn Fn(usize) -> bool) -> Scales {
    let of = |tensor, codes| of_members(problem, inputs, is_one, tensor, codes);
    Scales { k: of(TensorName::K, &inputs.k), v: of(TensorName::V, &inputs.v), ..inputs.scales.clone() }
}

/// Returns the scales of dout that a rank would make of its own rows alone.
pub(super) fn dout_of_own_rows(problem: &Problem, inputs: &Inputs, rank: usize) -> Scales {
    let is_own = |member| member == own_member(problem, rank);
    let dout = of_members(problem, inputs, &is_own, TensorName::Dout, &inputs.dout);
    Scales { dout, ..inputs.scales.clone() }
}

/// Returns the scales of a tensor that some members would make of their rows alone: those of the group, times the share
/// that their largest code has of the group's. Members without a code other than 0 keep the group's.
fn of_members(
    problem: &Problem,
    inputs: &Inputs,
    is_one: &dyn Fn(usize) -> bool,
    tensor: TensorName,
    codes: &Array3<f32>,
) -> Option<TensorScales> {
    let scales = inputs.scales.of(tensor)?;
    // A forward has no rows of dout.
    if codes.is_empty() {
        return Some(scales.clone());
    }
    let layouts = sharding::members(problem).unwrap_or_default();
    let rows = |layout: sharding::RankLayout| match tensor {
        TensorName::K | TensorName::V => layout.kv.runs,
        _ => layout.q.runs,
    };
    let own = layouts.into_iter().filter(|layout| is_one(layout.rank)).flat_map(rows).collect::<Vec<_>>();
    let all = rows(sharding::whole(problem));
    let [own, all] = [own, all].map(|placed| amax(problem, tensor, scales.groups(), codes, &placed));
    let share = |place| if own[place] > 0.0 { own[place] / all[place] } else { 1.0 };
    Some(TensorScales::new(problem, tensor, |place| scales.descale()[place] * share(place)))
}

/// Returns the largest magnitude of each group's real codes among placed rows of a tensor.
fn amax(
    problem: &Problem,
    tensor: TensorName,
    groups: &Groups,
    codes: &Array3<f32>,
    placed: &[PlacedRun],
) -> Array3<f32> {
    let side = |sequence: &Sequence| match tensor {
        TensorName::K | TensorName::V => sequence.kv,
        _ => sequence.q,
    };
    let mut largest = Array3::zeros(groups.shape());
    for PlacedRun { sequence, piece, local } in placed {
        for position in (0..local.len).map(|row| piece.start + row * piece.step) {
            let row = side(&problem.sequences[*sequence]).row(position);
            for ((head, lane), code) in codes.index_axis(Axis(0), row).indexed_iter() {
                let amax: &mut f32 = &mut largest[groups.of(*sequence, position, head, lane)];
                *amax = amax.max(code.abs());
            }
        }
    }
    largest
}

#[cfg(test)]
mod tests {
    use seamproof_oracle::{
        Algorithm, Balance, ContextParallel, Element, Format, Heads, Precision, ProblemFields, ScaleValues,
        Scaling,
    };

    use super::*;
    use crate::values;

    /// Returns three sequences with grouped heads and one scale a tensor.
    fn problem(parallel: ContextParallel) -> Problem {
        let packed = ProblemFields::packed(&[(24, 24), (8, 16), (16, 8)], 8);
        let code = Element { format: Format::E4m3, scaling: Scaling::PerTensor };
        let p = Format::E4m3.into();
        let precision = Precision { q: code, k: code, v: code, dout: code, p, ds: p, ..packed.precision };
        let (heads, scales) = (Heads { q: 4, kv: 2 }, ScaleValues::Any);
        Problem::new(ProblemFields { heads, precision, scales, parallel, ..packed }).expect("a problem")
    }

    /// Test that a forward, which has no rows of dout, keeps the group's scales.
    #[test]
    fn a_forward_has_no_own_scale_of_dout() {
        let forward = problem(ContextParallel::single()).forward();
        let inputs = values::inputs(&forward);
        assert_eq!(dout_of_own_rows(&forward, &inputs, 0), inputs.scales);
    }

    #[test]
    fn own_rows_have_the_groups_scale_where_they_have_its_largest_code() {
        let two = problem(ContextParallel::over(2, Algorithm::Ring, Balance::Contiguous));
        let inputs = values::inputs(&two);
        let descale = |scales: &Scales, tensor| scales.of(tensor).expect("scales").descale()[[0, 0, 0]];
        let of_ranks =
            [(TensorName::K, of_own_rows as fn(&_, &_, _) -> _), (TensorName::Dout, dout_of_own_rows)];
        for (tensor, of_rank) in of_ranks {
            let group = descale(&inputs.scales, tensor);
            let own = [0, 1].map(|rank| descale(&of_rank(&two, &inputs, rank), tensor));
            assert!(own.iter().all(|own| *own <= group) && own.contains(&group), "{tensor}: {own:?} {group}");
            assert_eq!(of_rank(&problem(ContextParallel::single()), &inputs, 0), inputs.scales);
        }
    }
}
