//! Trial: one run of a subject, and how well a profile explains it.

use ndarray::Array2;
use seamproof_oracle::blocked;
use seamproof_oracle::envelope::{GroupSums, Joints, KeyOrder, Model, NumericProfile};
use seamproof_oracle::replay::{Replay, ReplayedLaunch, ReplayedTiles};
use seamproof_oracle::{Inputs, Problem, Saved};
use seamproof_simulator::schedule::MergeOrder;

use super::bounds::Comparison;
use super::{assemble, bounds};
use crate::ladder::runs::poisoned;
use crate::profile;
use crate::subject::{Backend, RankOutputs, RunError};
use crate::values::{self, Poison};
use crate::verdict::{Margin, Tier};
use seamproof_oracle::sharding::{self as layout, RankLayout};

/// Results of a subject on one problem, with everything that a replay of them needs.
pub struct Trial {
    problem: Problem,
    layout: RankLayout,
    inputs: Inputs,
    results: RankOutputs,
    model: Model,
    launches: Vec<ReplayedLaunch>,
    tiles: Option<ReplayedTiles>,
    declared_tile: usize,
    declared_joints: Joints,
    saved: Option<Saved>,
}

impl Trial {
    /// Runs the subject; `None` where it tells nothing about its launches, or where the run gives no whole result.
    pub fn run(backend: &dyn Backend, problem: &Problem) -> Result<Option<Trial>, RunError> {
        let Some(launches) = backend.launches(problem) else { return Ok(None) };
        let inputs = values::inputs(problem);
        let outputs = super::run(backend, problem, &poisoned(&inputs, problem, Poison::Large))?;
        let Ok(layouts) = layout::layouts(problem) else { return Ok(None) };
        let partition = backend.partition(problem);
        let Ok(results) = assemble::assemble(problem, &layouts, outputs.ranks) else { return Ok(None) };
        let layout = layout::whole(problem);
        let hidden = Array2::zeros(problem.lse_shape());
        let saved = results.lse.is_some().then(|| bounds::saved(&results, &hidden));
        Ok(Some(Trial {
            model: Model::new(problem, backend.declaration().arithmetic, partition),
            declared_tile: partition.kv_tile,
            declared_joints: partition.joints(),
            problem: problem.clone(),
            layout,
            inputs,
            results,
            launches,
            tiles: backend.tiles(problem),
            saved,
        }))
    }

    /// Whether the subject shows no LSE.
    pub fn hides_lse(&self) -> bool {
        self.saved.is_none()
    }

    /// Returns the keys of a tile, as the instance that ran declares them.
    pub fn declared_tile(&self) -> usize {
        self.declared_tile
    }

    /// Returns a profile that rounds the same on this problem, and is one for all that do. Where all keys of every
    /// launch are in one tile, neither its size nor the order of tiles makes a difference. Where each query head has a
    /// KV head of its own, no gradients of single heads are added.
    pub fn in_effect(&self, profile: NumericProfile) -> NumericProfile {
        let ends =
            self.launches.iter().flat_map(|launch| &launch.keys).map(|keys| keys.first + keys.line.len);
        let keys = ends.max().unwrap_or_default().max(1);
        let (kv_tile, kv_order) = match profile.kv_tile >= keys {
            true => (keys, KeyOrder::Ascending),
            false => (profile.kv_tile, profile.kv_order),
        };
        let group_sums = if self.problem.group() == 1 { GroupSums::F32 } else { profile.group_sums };
        NumericProfile { kv_tile, kv_order, group_sums, ..profile }
    }

    /// Returns how partial results are joined in this order, where that differs from what the instance that ran
    /// declares.
    pub fn other_joints(&self, order: MergeOrder) -> Option<Joints> {
        profile::joints(&self.problem, order).filter(|joints| *joints != self.declared_joints)
    }

    /// Returns the error ÷ bound of out where the roundings of `profile` are replayed, with these joints or the
    /// declared ones.
    pub fn out(&self, profile: NumericProfile, joints: Option<Joints>) -> f64 {
        let replay = Replay { profile, launches: self.launches.clone(), tiles: None, joints };
        let mut margin = Margin::default();
        match blocked::replayed_forward(&self.problem, &self.inputs, &self.model, &replay) {
            Ok(answer) => bounds::replayed_forward(&self.comparison(), &self.results, &answer, &mut margin),
            Err(_) => return f64::INFINITY,
        };
        margin.tier(Tier::R).worst()
    }

    /// Returns the error ÷ bound of dq, dk and dv where the roundings of `profile` are replayed, with these joints or
    /// the declared ones; `None` without gradients, an LSE, or a way to replay them.
    pub fn gradients(&self, profile: NumericProfile, joints: Option<Joints>) -> Option<f64> {
        let gradients = self.results.gradients.as_ref()?;
        let replay = Replay { profile, launches: Vec::new(), tiles: self.tiles.clone(), joints };
        let saved = self.saved.as_ref()?;
        let answer: blocked::Answer<_> =
            blocked::replayed_backward(&self.problem, &self.inputs, saved, &self.model, &replay)?;
        let mut margin = Margin::default();
        bounds::replayed_gradients(&self.comparison(), gradients, &answer, &mut margin);
        Some(margin.tier(Tier::R).worst())
    }

    fn comparison(&self) -> Comparison<'_> {
        Comparison { problem: &self.problem, layout: &self.layout, ratio: bounds::error_ratios }
    }
}
