//! Margins and census of a campaign.

use std::path::Path;

use serde::Serialize;

use super::json;
use crate::campaign::{Bar, Histogram, Quantiles, Start, Stored};
use crate::nightly::has_moved;
use crate::record::SUMS;
use seamproof_judge::verdict::Tier;
use seamproof_oracle::TensorName;

/// Margins and census of a campaign.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Measured {
    /// Subject and sizes of the campaign.
    pub(crate) campaign: String,
    /// Distribution of error ÷ bound over the cases that held, by tier and tensor.
    pub(crate) margins: Vec<TensorMargin>,
    /// Cases that were drawn.
    pub(crate) drawn: u64,
    /// Number of cases of each class of problems.
    pub(crate) census: Vec<ClassCount>,
}

/// Distribution of error ÷ bound of one tensor in one tier.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct TensorMargin {
    /// The tier.
    pub(crate) tier: Tier,
    /// The tensor.
    pub(crate) tensor: TensorName,
    /// Quantiles over the cases that held with an error above 0.
    #[serde(flatten)]
    pub(crate) quantiles: Quantiles,
    /// The same cases by size.
    pub(crate) bars: Vec<Bar>,
    /// The same of an earlier night.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) before: Option<Earlier>,
}

/// Distribution of error ÷ bound in an earlier night.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Earlier {
    /// The night.
    pub(crate) night: u32,
    /// Quantiles.
    #[serde(flatten)]
    pub(crate) quantiles: Quantiles,
    /// The cases by size.
    pub(crate) bars: Vec<Bar>,
    /// p99 of now ÷ p99 of then, where it moved and both counted enough cases to say so.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) moved: Option<f64>,
}

/// Cases of a class of problems.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct ClassCount {
    /// Name of the class.
    pub(crate) class: String,
    /// Number of its cases.
    pub(crate) count: u64,
    /// Share of all cases.
    pub(crate) share: f64,
    /// What was too little, in words.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) missed: Option<String>,
}

/// Returns the margins and the census of a campaign that has ended. `missed` says what was too little, `before` is the
/// folder of the same campaign in an earlier night.
pub(super) fn measured(stored: &Stored, missed: &[String], before: Option<(u32, &Path)>) -> Measured {
    let Stored { start: Start { backend, profile, .. }, sums } = stored;
    let earlier = before.and_then(|(night, dir)| Some((night, json::<Stored>(&dir.join(SUMS)).ok()?)));
    let margin = |tier: Tier, tensor: TensorName, histogram: &Histogram| {
        let quantiles = histogram.quantiles()?;
        let before = earlier.as_ref().and_then(|(night, earlier)| {
            let then = earlier.sums.margins.get(&tier)?.get(&tensor)?;
            Some(compared(&quantiles, *night, then.quantiles()?, then.bars()))
        });
        Some(TensorMargin { tier, tensor, quantiles, bars: histogram.bars(), before })
    };
    let margins = sums.margins.iter().flat_map(|(&tier, tensors)| {
        tensors.iter().map(move |(&tensor, histogram)| (tier, tensor, histogram))
    });
    let margins = margins.filter_map(|(tier, tensor, histogram)| margin(tier, tensor, histogram)).collect();
    let census = sums.census.rows().into_iter().map(|row| {
        let named = format!("{}: ", row.name);
        let missed = missed.iter().find(|what| what.starts_with(&named));
        let missed = missed.map(|what| what[named.len()..].to_owned());
        ClassCount { class: row.name, count: row.count, share: row.share, missed }
    });
    Measured {
        campaign: format!("{backend} {profile}"),
        margins,
        drawn: sums.census.total(),
        census: census.collect(),
    }
}

fn compared(now: &Quantiles, night: u32, then: Quantiles, bars: Vec<Bar>) -> Earlier {
    let is_told = now.tells(0.99) && then.tells(0.99);
    let moved = Some(now.p99 / then.p99).filter(|ratio| is_told && has_moved(*ratio));
    Earlier { night, quantiles: then, bars, moved }
}
