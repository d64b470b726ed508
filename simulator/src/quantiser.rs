//! [`EmulatedQuantiser`]: a quantising kernel on every rank, stage by stage.
//!
//! Each rank finds the largest magnitudes of its own real rows. An all-reduce gives every rank those of the group.
//! Each rank then makes the factors, and the codes of its rows. Magnitudes are compared as integers and powers of two
//! are cut out of the bits, as kernels do. The definition is [`seamproof_oracle::quantise`].

use ndarray::Array3;
use seamproof_oracle::groups::Groups;
use seamproof_oracle::quantise::{Delayed, Factors, Quantisation, ScaleRule, Takes};
use seamproof_oracle::sharding::{RankLayout, SideLayout};
use seamproof_oracle::{Format, Run, TensorName};

/// The tensors of one rank.
#[derive(Clone, Debug, PartialEq)]
pub struct RankValues {
    /// The rows of the rank.
    pub layout: RankLayout,
    /// The tensors in the order of the quantisation, `[rows, heads, lanes]` with the rank's rows. Rows that are not
    /// real may hold anything.
    pub tensors: Vec<Array3<f32>>,
}

/// What one rank makes of one tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct RankCodes {
    /// The codes, `[rows, heads, lanes]` with the rank's rows.
    pub codes: Array3<u8>,
    /// The largest magnitude of each group over all ranks, in the shape of the tensor's [`Groups`]. Groups of rows that
    /// the rank does not hold are not read.
    pub amax: Array3<f32>,
    /// The descale of each group, in the same shape.
    pub descale: Array3<f32>,
}

/// What one rank makes of all tensors.
#[derive(Clone, Debug, PartialEq)]
pub struct RankQuantised {
    /// The answer for each tensor, in the order of the quantisation.
    pub tensors: Vec<RankCodes>,
    /// The history for the next step, of a delayed recipe.
    pub history: Option<Vec<f32>>,
}

/// One rank's part of one tensor.
#[derive(Clone, Debug)]
pub struct Shard<'a> {
    /// The quantisation.
    pub asked: &'a Quantisation,
    /// The name of the tensor.
    pub tensor: TensorName,
    /// The groups of the whole tensor.
    pub groups: Groups,
    /// The rows of the rank.
    pub side: &'a SideLayout,
    /// The values in these rows.
    pub values: &'a Array3<f32>,
}

/// An element of a shard: its sequence, its position there, its head and its lane.
pub type Place = [usize; 4];

/// Stages of a quantiser, each a function. A faulty quantiser has another function in one place.
#[derive(Clone, Copy, Debug)]
pub struct Stages {
    /// Returns the largest magnitude before the first row.
    pub start: fn(&Shard<'_>) -> f32,
    /// Returns the number of rows of a run whose magnitudes count.
    pub counted: fn(&Run) -> usize,
    /// Returns the magnitude of a value.
    pub magnitude: fn(f32) -> f32,
    /// Returns the group of an element.
    pub group: fn(&Shard<'_>, Place) -> [usize; 3],
    /// Reduces the largest magnitudes of all ranks for one rank.
    pub reduce: fn(rank: usize, ranks: &[Array3<f32>]) -> Array3<f32>,
    /// Reduces the largest magnitudes of tensors that share a scale.
    pub share: fn(&[f32]) -> f32,
    /// Returns the amax that a delayed recipe takes of its history and of the present one.
    pub taken: fn(&Delayed, f32) -> f32,
    /// Returns the history after a step with this amax.
    pub after: fn(&Delayed, f32) -> Vec<f32>,
    /// Returns the factors for an amax.
    pub factors: fn(&Quantisation, f32) -> Factors,
    /// Returns the code of a value.
    pub code: fn(Format, f32, Factors) -> u32,
    /// Returns the number of rows of a run that get codes of their values. Other rows get zeros.
    pub encoded: fn(&Run) -> usize,
}

impl Stages {
    /// The right quantiser.
    pub const RIGHT: Stages = Stages {
        start: |_| 0.0,
        counted: |run| run.len,
        magnitude: f32::abs,
        group: |shard, [sequence, position, head, lane]| shard.groups.of(sequence, position, head, lane),
        reduce: |_, ranks| largest(ranks),
        share: |tensors| tensors.iter().copied().fold(0.0, larger),
        taken,
        after,
        factors,
        code: |format, value, factors| format.encode(f64::from(value * factors.scale)),
        encoded: |run| run.len,
    };
}

/// Returns the larger of two numbers that are not negative, by their bits.
pub fn larger(a: f32, b: f32) -> f32 {
    f32::from_bits(a.to_bits().max(b.to_bits()))
}

/// Returns the largest magnitudes of some ranks.
pub fn largest(ranks: &[Array3<f32>]) -> Array3<f32> {
    let mut reduced = Array3::zeros(ranks.first().map_or([0; 3], |first| first.dim().into()));
    for rank in ranks {
        reduced.zip_mut_with(rank, |reduced, rank| *reduced = larger(*reduced, *rank));
    }
    reduced
}

fn taken(delayed: &Delayed, _: f32) -> f32 {
    match delayed.takes {
        Takes::MostRecent => delayed.history[0],
        Takes::Max => delayed.history.iter().copied().fold(0.0, larger),
    }
}

fn after(delayed: &Delayed, amax: f32) -> Vec<f32> {
    let mut history = delayed.history.clone();
    history.rotate_right(1);
    history[0] = amax;
    history
}

/// Returns the factors as kernels make them: a quotient in f32, and powers of two cut out of its bits.
pub fn factors(asked: &Quantisation, amax: f32) -> Factors {
    let largest = asked.element.format.max_finite() as f32 * power(-asked.margin);
    let before = asked.delayed.as_ref().map_or(1.0, |delayed| delayed.previous);
    let quotient = (largest / amax).min(f32::MAX);
    let scale = match asked.scale {
        ScaleRule::F32 | ScaleRule::PowerOfTwo if amax == 0.0 => before,
        ScaleRule::F32 => quotient,
        ScaleRule::PowerOfTwo | ScaleRule::E8m0Up => power_below(quotient),
        ScaleRule::E8m0Down if amax == 0.0 => power_below(f32::MAX),
        ScaleRule::E8m0Down => {
            let exponent = exponent(amax) - asked.element.format.exponent_max() + asked.margin;
            let exponent = exponent.clamp(-127, 127);
            return Factors { scale: power(-exponent), descale: power(exponent) };
        }
    };
    Factors::of_scale(scale)
}

fn power(exponent: i32) -> f32 {
    libm::ldexpf(1.0, exponent)
}

/// Returns the power of two at the bottom of a number's binade; 2^−127 below f32's normal range.
fn power_below(number: f32) -> f32 {
    if number.is_normal() { f32::from_bits(number.to_bits() & 0x7f80_0000) } else { power(-127) }
}

/// Returns the exponent of a number above 0.
fn exponent(number: f32) -> i32 {
    let bits = number.to_bits();
    if number.is_normal() { (bits >> 23) as i32 - 127 } else { 31 - bits.leading_zeros() as i32 - 149 }
}

impl Shard<'_> {
    /// Visits the elements of so many rows of each run: the place in the tensor, and the place in the problem.
    fn each(&self, rows: fn(&Run) -> usize, mut visit: impl FnMut([usize; 3], Place)) {
        let (_, heads, lanes) = self.values.dim();
        for placed in &self.side.runs {
            for i in 0..rows(&placed.local) {
                let (row, position) = (placed.local.row(i), placed.piece.start + i * placed.piece.step);
                for (head, lane) in (0..heads).flat_map(|head| (0..lanes).map(move |lane| (head, lane))) {
                    visit([row, head, lane], [placed.sequence, position, head, lane]);
                }
            }
        }
    }

    fn amax(&self, stages: &Stages) -> Array3<f32> {
        let mut amax = Array3::from_elem(self.groups.shape(), (stages.start)(self));
        self.each(stages.counted, |at, place| {
            let largest = &mut amax[(stages.group)(self, place)];
            *largest = larger(*largest, (stages.magnitude)(self.values[at]));
        });
        amax
    }

    fn codes(&self, stages: &Stages, factors: &Array3<Factors>) -> Array3<u8> {
        let (format, mut codes) = (self.asked.element.format, Array3::zeros(self.values.raw_dim()));
        self.each(stages.encoded, |at, place| {
            let factors = factors[(stages.group)(self, place)];
            codes[at] = (stages.code)(format, self.values[at], factors) as u8;
        });
        codes
    }
}

/// A quantiser that runs these stages.
#[derive(Clone, Copy, Debug)]
pub struct EmulatedQuantiser {
    /// The stages.
    pub stages: Stages,
}

impl Default for EmulatedQuantiser {
    fn default() -> EmulatedQuantiser {
        EmulatedQuantiser { stages: Stages::RIGHT }
    }
}

impl EmulatedQuantiser {
    /// Returns what every rank makes of its tensors.
    pub fn run(&self, asked: &Quantisation, ranks: &[RankValues]) -> Vec<RankQuantised> {
        let stages = &self.stages;
        let shards: Vec<Vec<Shard<'_>>> = ranks.iter().map(|rank| shards(asked, rank)).collect();
        let amax: Vec<Vec<Array3<f32>>> = (0..asked.tensors.len())
            .map(|tensor| shards.iter().map(|rank| rank[tensor].amax(stages)).collect())
            .collect();
        let of_rank = |(rank, shards): (usize, &Vec<Shard<'_>>)| {
            let mut amax: Vec<Array3<f32>> =
                amax.iter().map(|of_ranks| (stages.reduce)(rank, of_ranks)).collect();
            if asked.shares_scale() {
                let each: Vec<f32> = amax.iter().map(|amax| amax[[0, 0, 0]]).collect();
                amax.iter_mut().for_each(|amax| amax.fill((stages.share)(&each)));
            }
            self.finish(asked, shards, amax)
        };
        shards.iter().enumerate().map(of_rank).collect()
    }

    /// Returns what a rank makes of its shards, whose groups have these largest magnitudes.
    fn finish(&self, asked: &Quantisation, shards: &[Shard<'_>], amax: Vec<Array3<f32>>) -> RankQuantised {
        let stages = &self.stages;
        let delayed = asked.delayed.as_ref();
        let history = delayed.map(|delayed| (stages.after)(delayed, amax[0][[0, 0, 0]]));
        let of_shard = |(shard, amax): (&Shard<'_>, Array3<f32>)| {
            let taken = |amax: &f32| delayed.map_or(*amax, |delayed| (stages.taken)(delayed, *amax));
            let factors = amax.map(|amax| (stages.factors)(asked, taken(amax)));
            let codes = shard.codes(stages, &factors);
            RankCodes { codes, amax, descale: factors.map(|factors| factors.descale) }
        };
        RankQuantised { tensors: shards.iter().zip(amax).map(of_shard).collect(), history }
    }
}

fn shards<'a>(asked: &'a Quantisation, rank: &'a RankValues) -> Vec<Shard<'a>> {
    let of = |(&tensor, values): (&TensorName, &'a Array3<f32>)| Shard {
        asked,
        tensor,
        groups: asked.groups(tensor),
        side: rank.layout.side(tensor.side()),
        values,
    };
    asked.tensors.iter().zip(&rank.tensors).map(of).collect()
}
