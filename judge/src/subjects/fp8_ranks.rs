//! The emulated kernel in FP8 over several ranks: the schedules of the kernel in bf16, with codes in q, k and v.
//!
//! Codes travel as they are. The scales of tensors, heads and sequences are of the whole group, and every rank knows all
//! of them; each launch is told those of [the rows that it reads](Schedule::descale). A partial out leaves its launch as
//! values, with v's descale in it and in the format that the schedule says, which is f32 or that of out. Merges are
//! therefore those of bf16.

use std::rc::Rc;

use ndarray::{Array3, Axis};
use seamproof_oracle::groups::Groups;
use seamproof_oracle::sharding::{self, PlacedRun};
use seamproof_oracle::{Inputs, Problem, Scales, TensorName, TensorScales};
use seamproof_simulator::device::Cpu;
use seamproof_simulator::emulated::{Roundings, Units};
use seamproof_simulator::is_unwritten;
use seamproof_simulator::schedule::{LaunchedHead, MergeOrder, Schedule};

use super::emulated::scheduled;
use super::fp8::{Fp8, LocalPlace, Place, Recipe};
use super::{World, on_device};
use crate::subject::{Outputs, RunError};

impl Fp8 {
    /// Runs a problem on the ranks that it names.
    pub(super) fn run_over_ranks(&self, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
        let recipe = self.recipe();
        let world = World::new(problem, |problem| {
            let mut schedule = (*scheduled(problem, self.merge)?).clone();
            descale(&mut schedule, problem, inputs, &recipe)?;
            Ok(Rc::new(schedule))
        })?;
        let device = self.device(problem, &recipe);
        let mut outputs = on_device::run_world(&device, problem, inputs, &world, self.order, &mut |_| {})?;
        let written = |lse: &&mut f32| !is_unwritten(**lse);
        let all = outputs.ranks.iter_mut().filter_map(|rank| rank.lse.as_mut());
        all.flatten().filter(written).for_each(|lse| *lse += recipe.lse_shift);
        Ok(outputs)
    }

    fn device(&self, problem: &Problem, recipe: &Recipe) -> Cpu<f32> {
        let (p, ds) = (problem.precision.p.format, problem.precision.ds.format);
        let roundings = Roundings { weight_exponent: recipe.weight_exponent, ..Roundings::new(p, ds) };
        Cpu::with(Units::HopperFp8(recipe.promoted_after).right(self.tiles, roundings))
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
    let ranks = 0..schedule.ranks.len();
    let known: Vec<Scales> = ranks.map(|rank| (recipe.known)(problem, inputs, rank)).collect();
    let of = |LaunchedHead { rank, segment, sequence, local, head }: LaunchedHead| {
        let group = problem.group();
        let local = LocalPlace { segment, head: local, kv_head: local / group };
        (recipe.descales)(&known[rank], Place { sequence, head, kv_head: head / group, local })
    };
    schedule.descale(problem, of).map_err(|errors| {
        RunError::Crash(errors.first().map_or("the schedule does not run".into(), ToString::to_string))
    })
}

/// Returns the scales that every rank knows: those of the group.
pub(super) fn of_the_group(_: &Problem, inputs: &Inputs, _: usize) -> Scales {
    inputs.scales.clone()
}

/// Returns the scales of k and v that a rank would make of its own rows alone: those of the group, times the share that
/// its own largest code has of the group's. A rank without a code other than 0 keeps the group's.
pub(super) fn of_own_rows(problem: &Problem, inputs: &Inputs, rank: usize) -> Scales {
    let member = rank / problem.parallel.region;
    let layouts = sharding::members(problem).unwrap_or_default();
    let own = layouts.into_iter().find(|layout| layout.rank == member).map_or(Vec::new(), |own| own.kv.runs);
    let all = sharding::whole(problem).kv.runs;
    let of = |tensor: TensorName, codes: &Array3<f32>| {
        let scales = inputs.scales.of(tensor)?;
        let [own, all] = [&own, &all].map(|runs| amax(problem, scales.groups(), codes, runs));
        let share = |place| if own[place] > 0.0 { own[place] / all[place] } else { 1.0 };
        Some(TensorScales::new(problem, tensor, |place| scales.descale()[place] * share(place)))
    };
    Scales { k: of(TensorName::K, &inputs.k), v: of(TensorName::V, &inputs.v), ..inputs.scales.clone() }
}

/// Returns the largest magnitude of each group's real codes of keys among placed rows.
fn amax(problem: &Problem, groups: &Groups, codes: &Array3<f32>, placed: &[PlacedRun]) -> Array3<f32> {
    let mut largest = Array3::zeros(groups.shape());
    for PlacedRun { sequence, piece, local } in placed {
        for position in (0..local.len).map(|row| piece.start + row * piece.step) {
            let row = problem.sequences[*sequence].kv.row(position);
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
        Algorithm, Balance, ContextParallel, Element, Format, Heads, Pass, Precision, ProblemFields,
        ScaleValues, Scaling,
    };

    use super::*;
    use crate::subject::Backend as _;
    use crate::subjects::same_bits;
    use crate::values;

    /// Returns three sequences with grouped heads, keys and values in this scaling.
    fn fields(scaling: Scaling, parallel: ContextParallel) -> ProblemFields {
        let packed = ProblemFields::packed(&[(24, 24), (8, 16), (16, 8)], 8);
        let code = Element { format: Format::E4m3, scaling };
        let precision = Precision { q: code, k: code, v: code, p: Format::E4m3.into(), ..packed.precision };
        let (heads, scales) = (Heads { q: 4, kv: 2 }, ScaleValues::Any);
        ProblemFields { heads, precision, scales, parallel, pass: Pass::Forward, ..packed }
    }

    #[test]
    fn on_one_rank_a_schedule_gives_the_bits_of_single_sequences_and_heads() {
        for scaling in [Scaling::PerTensor, Scaling::PerHead, Scaling::PerSequenceHead] {
            let problem = Problem::new(fields(scaling, ContextParallel::single())).expect("a problem");
            let (kernel, inputs) = (Fp8::default(), values::inputs(&problem));
            let schedule = kernel.run_over_ranks(&problem, &inputs).expect("a schedule");
            let alone = kernel.run(&problem, &inputs).expect("sequences and heads");
            assert!(same_bits(&schedule, &alone), "{scaling:?}");
        }
    }

    #[test]
    fn own_rows_have_the_groups_scale_where_they_have_its_largest_code() {
        let two = ContextParallel::over(2, Algorithm::Ring, Balance::Contiguous);
        let problem = Problem::new(fields(Scaling::PerTensor, two)).expect("a problem");
        let inputs = values::inputs(&problem);
        let group = inputs.scales.k.as_ref().expect("scales").descale()[[0, 0, 0]];
        let own =
            [0, 1].map(|rank| of_own_rows(&problem, &inputs, rank).k.expect("scales").descale()[[0, 0, 0]]);
        assert!(own.iter().all(|own| *own <= group) && own.contains(&group), "{own:?} {group}");
        let alone = Problem::new(fields(Scaling::PerTensor, ContextParallel::single())).expect("a problem");
        assert_eq!(of_own_rows(&alone, &inputs, 0), inputs.scales);
    }
}
