//! The forward on scores far from 0, where the next number above a score is far away.
//!
//! A *climb* is a query that sees scores one after the other, each of them the next f32 above the one before, beside queries that
//! see scores of 0. They come
//! in the order in which the kernel takes blocks of keys: from the last key to the first, and in the split shape from the
//! first on. Every score is a sum of exact
//! products, and its weight is known however large the score is. V of a climb's key is 1 in a lane of its own. `out`
//! therefore holds the weights, which must be those of the definition in f64, as far as rounding to the tensors' format
//! allows.
//!
//! Levels are scores times the scale in powers of two. A kernel that folds the largest level into its exponentials
//! rounds them to f32 (<https://arxiv.org/abs/2407.08608>). What rounding leaves out of a level of 2^30 is up to 64:
//! a factor of 2^64 that has to be the same in all weights of a row.

use seamproof_kernels::attend::ForwardTensors;
use seamproof_kernels::forward::TileShape;
use seamproof_kernels::view::View;
use seamproof_kernels::{Gpu, KernelError};
use seamproof_oracle::{
    Format, Heads, Mask, Pass, Precision, Problem, ProblemFields, Run, Sequence, Softmax, TensorRows,
};

use super::codes::check_far_codes;
use super::mismatch::Mismatch;
use super::passes::shapes;
use crate::problem::{fields, legal};
use crate::ready::forward_launcher;

/// The number of a climb's keys, three of the largest blocks, and its places: in blocks of their own, of 176 keys and of
/// fewer, or all in the last block that is taken.
const PLACES: [(usize, [usize; STEPS_MAX]); 2] = [(528, [527, 300, 0]), (528, [2, 1, 0])];
/// The same for the split shape, of some of the climbs: the first two keys in blocks that one warp takes, one after the other,
/// and the third in the next piece.
const SPLIT_PLACES: (usize, [usize; STEPS_MAX]) = (1025, [0, 64, 128]);
const SPLIT_EACH: usize = 4;
const STEPS_MAX: usize = 3;
/// The lanes whose products make a score: three numbers of the smaller significand hold an f32.
const PIECES: usize = 3;
/// The rows of a sequence, of which half are quiet: they see scores of 0 alone. A thread has two rows, eight apart: where heads
/// are not packed, the one gives the other no cause to look.
const ROWS: usize = 16;
/// The rows of several heads may be packed.
const HEADS: Heads = Heads { q: 4, kv: 1 };
const DIMS: [usize; 4] = [64, 128, 256, 512];
/// The scales: that of head dim 64, and one of no head dim.
const SCALES: [f32; 2] = [0.125, 0.3];
/// The most that weights may be off by: their rounding to 8 bits, and that of exponents up to some hundreds.
const RELATIVE: f64 = 1.0 / 256.0;
const ABSOLUTE: f64 = 1.0 / 65_536.0;
/// The share that LSE and the largest logit may be off by. Both are made in f32, in a few operations.
const STATISTIC: f64 = 1.0 / 4_194_304.0;

/// The numbers of a format's climbs: the query's first lanes, the powers of two of scores, and the score of all other
/// keys.
struct Reach {
    format: Format,
    query: f32,
    exponents: std::ops::Range<i32>,
    others: f32,
}

const REACHES: [Reach; 2] = [
    Reach { format: Format::Bf16, query: 65_536.0, exponents: 10..37, others: -1_099_511_627_776.0 },
    Reach { format: Format::Fp16, query: 32_768.0, exponents: 16..30, others: -2_013_265_920.0 },
];

/// Scores that rise by one f32 each.
type Climb = Vec<f32>;

fn climbs(reach: &Reach) -> Vec<Climb> {
    let tops = reach.exponents.clone().flat_map(|exponent| {
        let power = 2.0_f32.powi(exponent);
        [power, power.next_up(), 1.375 * power, (2.0 * power).next_down()]
    });
    let of_top = |top: f32| {
        let below = [top.next_down().next_down(), top.next_down(), top];
        let rising = |steps: &[f32]| steps.to_vec();
        let falling = |steps: &[f32]| steps.iter().rev().map(|step| -step).collect();
        [rising(&below), rising(&below[1..]), falling(&below), falling(&below[1..]), rising(&[top, top])]
    };
    tops.flat_map(of_top).collect()
}

/// Returns numbers of the format whose sum is `value`, if [`PIECES`] numbers are enough.
fn pieces(value: f32, format: Format) -> [f32; PIECES] {
    let mut rest = f64::from(value);
    std::array::from_fn(|_| {
        let piece = format.decode(format.encode(rest));
        rest -= piece;
        piece as f32
    })
}

/// Returns the weights of a climb by the definition, in f64, and the logarithm of their sum.
fn weights(climb: &Climb, scale: f32) -> (Vec<f64>, f64) {
    let top = climb.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let exponentials =
        climb.iter().map(|score| ((f64::from(*score) - f64::from(top)) * f64::from(scale)).exp());
    let sum: f64 = exponentials.clone().sum();
    (exponentials.map(|weight| weight / sum).collect(), sum.ln())
}

/// Sequences with a climb each.
struct Pack<'a> {
    reach: &'a Reach,
    climbs: &'a [Climb],
    keys: usize,
    places: [usize; STEPS_MAX],
    dim: usize,
    scale: f32,
}

impl Pack<'_> {
    fn problem(&self) -> Result<Problem, KernelError> {
        let sequence = |index| Sequence {
            id: index as u32,
            q: Run::packed(index * ROWS, ROWS, ROWS),
            kv: Run::packed(index * self.keys, self.keys, self.keys),
        };
        let sequences = (0..self.climbs.len()).map(sequence).collect();
        let rows = TensorRows { q: self.climbs.len() * ROWS, kv: self.climbs.len() * self.keys };
        let plain = fields(sequences, rows, HEADS, self.dim, Mask::FULL);
        legal(ProblemFields {
            softmax: Softmax { scale: self.scale, ..plain.softmax },
            precision: Precision::uniform(self.reach.format),
            pass: Pass::Forward,
            ..plain
        })
    }

    fn queries(&self) -> Vec<f32> {
        let rows = |lanes: usize| {
            let row = (0..self.dim).map(|lane| if lane < lanes { self.reach.query } else { 0.0 });
            row.collect::<Vec<f32>>().repeat(ROWS / 2 * HEADS.q)
        };
        let sequence =
            |index| if climbs_first(index) { [rows(PIECES), rows(0)] } else { [rows(0), rows(PIECES)] };
        (0..self.climbs.len()).flat_map(|index| sequence(index).concat()).collect()
    }

    fn keys(&self) -> Vec<f32> {
        let mut keys = vec![0.0; self.climbs.len() * self.keys * self.dim];
        keys.chunks_exact_mut(self.dim).for_each(|key| key[0] = self.reach.others / self.reach.query);
        for (sequence, climb) in self.climbs.iter().enumerate() {
            for (score, place) in climb.iter().zip(self.places) {
                let key = &mut keys[(sequence * self.keys + place) * self.dim..][..PIECES];
                key.copy_from_slice(&pieces(score / self.reach.query, self.reach.format));
            }
        }
        keys
    }

    /// Returns the lane in which the value of a step is 1: lanes of all parts of a row.
    fn lane_of(&self, step: usize) -> usize {
        step * (self.dim / STEPS_MAX)
    }

    fn values(&self) -> Vec<f32> {
        let mut values = vec![0.0; self.climbs.len() * self.keys * self.dim];
        for (sequence, climb) in self.climbs.iter().enumerate() {
            for (step, place) in (0..climb.len()).zip(self.places) {
                values[(sequence * self.keys + place) * self.dim + self.lane_of(step)] = 1.0;
            }
        }
        values
    }

    /// Returns the first climb whose results are wrong.
    fn wrong(&self, gpu: &Gpu, shape: TileShape) -> Result<Option<Mismatch>, KernelError> {
        let (problem, format) = (self.problem()?, self.reach.format);
        let [q, k, v] =
            [self.queries(), self.keys(), self.values()].map(|tensor| gpu.upload_elements(&tensor, format));
        let (q, k, v) = (q?, k?, v?);
        let room = |shape: &[usize]| gpu.allocate(shape.iter().product::<usize>() * 4);
        let (out, lse) = (room(&problem.out_shape())?, room(&problem.lse_shape())?);
        let max_logit = gpu.upload(&f32::NEG_INFINITY.to_le_bytes().repeat(HEADS.q))?;
        let tensors = ForwardTensors {
            q: View::rows(q.area(), problem.q_shape(), format),
            k: View::rows(k.area(), problem.k_shape(), format),
            v: View::rows(v.area(), problem.v_shape(), format),
            sink: None,
            out: View::rows(out.area(), problem.out_shape(), Format::F32),
            lse: View::statistic(lse.area(), problem.lse_shape(), Format::F32),
            max_logit: View::heads(max_logit.area(), HEADS.q, Format::F32),
        };
        forward_launcher(gpu, &problem, Some(shape))?(&tensors)?;
        let [out, lse, largest] =
            [&out, &lse, &max_logit].map(|result| gpu.read_elements(result.area(), Format::F32));
        let (out, lse, largest) = (out?, lse?, largest?);
        let quiet = Wanted::of(&vec![0.0; self.keys], self.scale);
        let found = self.climbs.iter().enumerate().find_map(|(sequence, climb)| {
            let climbing = Wanted::of(climb, self.scale);
            let mut rows = (0..ROWS).flat_map(|row| (0..HEADS.q).map(move |head| (row, head)));
            rows.find_map(|(row, head)| {
                let climbs = (row < ROWS / 2) == climbs_first(sequence);
                let row = sequence * ROWS + row;
                let lanes = &out[(row * HEADS.q + head) * self.dim..][..self.dim];
                let weights: Vec<f32> = (0..climb.len()).map(|step| lanes[self.lane_of(step)]).collect();
                let wanted = if climbs { &climbing } else { &quiet };
                wanted.fault(&weights, lse[head * self.climbs.len() * ROWS + row])
            })
        });
        Ok(found.or_else(|| self.wrong_largest(&largest)).map(|place| Mismatch {
            operation: "scores far from 0",
            case: 0,
            place,
            what: format!("{shape:?}, head dim {}, {format}, scale {}", self.dim, self.scale),
            bytes: 4,
        }))
    }

    /// Returns what is wrong with the largest logits, which are the same in all heads, and at least 0.
    fn wrong_largest(&self, largest: &[f32]) -> Option<String> {
        let top = self.climbs.iter().flatten().copied().fold(0.0, f32::max);
        let want = f64::from(top) * f64::from(self.scale);
        let is_wrong = |got: &&f32| !near(**got, want, STATISTIC * want.abs());
        largest.iter().find(is_wrong).map(|_| format!("largest logits {largest:?}, must be {want}"))
    }
}

/// What a row of scores becomes by the definition.
struct Wanted {
    scores: Climb,
    weights: Vec<f64>,
    lse: f64,
}

impl Wanted {
    fn of(scores: &Climb, scale: f32) -> Wanted {
        let (weights, logarithm) = weights(scores, scale);
        let top = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        Wanted { scores: scores.clone(), weights, lse: f64::from(top) * f64::from(scale) + logarithm }
    }

    /// Returns what is wrong with a row's first weights, or with its LSE.
    fn fault(&self, row: &[f32], lse: f32) -> Option<String> {
        let scores = &self.scores[..row.len()];
        let is_near = |(got, want): (&f32, &f64)| near(*got, *want, RELATIVE * want + ABSOLUTE);
        if !row.iter().zip(&self.weights).all(is_near) {
            return Some(format!(
                "scores {scores:?}: weights {row:?}, must be {:?}",
                &self.weights[..row.len()]
            ));
        }
        let allowed = STATISTIC * self.lse.abs() + ABSOLUTE;
        (!near(lse, self.lse, allowed)).then(|| format!("scores {scores:?}: LSE {lse}, must be {}", self.lse))
    }
}

/// Returns whether the first half of a sequence's rows climbs, and not the second.
fn climbs_first(sequence: usize) -> bool {
    sequence % 2 == 1
}

/// Returns whether two numbers are near. NaN is near nothing.
fn near(got: f32, want: f64, allowed: f64) -> bool {
    (f64::from(got) - want).abs() <= allowed
}

/// Checks climbs in every shape, of all head dims and both formats, and codes at far levels. Returns one of each that is
/// wrong.
pub fn check_levels(gpu: &Gpu) -> Result<Vec<Mismatch>, KernelError> {
    let mut found = check_far_codes(gpu)?;
    for reach in &REACHES {
        let climbs = climbs(reach);
        for dim in DIMS {
            for scale in SCALES {
                for (keys, places) in PLACES {
                    let pack = Pack { reach, climbs: &climbs, keys, places, dim, scale };
                    for &shape in shapes(dim) {
                        found.extend(pack.wrong(gpu, shape)?);
                    }
                }
                let climbs: Vec<Climb> = climbs.iter().step_by(SPLIT_EACH).cloned().collect();
                let (keys, places) = SPLIT_PLACES;
                let pack = Pack { reach, climbs: &climbs, keys, places, dim, scale };
                found.extend(pack.wrong(gpu, TileShape::Split)?);
            }
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_score_is_the_sum_of_its_pieces() {
        for reach in &REACHES {
            for score in climbs(reach).into_iter().flatten() {
                let pieces = pieces(score / reach.query, reach.format);
                let sum: f64 = pieces.iter().map(|piece| f64::from(*piece) * f64::from(reach.query)).sum();
                assert_eq!(sum, f64::from(score), "{pieces:?}");
                assert!(score > 0.75 * reach.others, "{score}");
            }
            let other = f64::from(reach.others / reach.query);
            assert_eq!(reach.format.decode(reach.format.encode(other)), other);
        }
    }

    #[test]
    fn weights_are_those_of_the_definition() {
        let (weights, logarithm) = weights(&vec![2.0, 2.0], 0.125);
        assert_eq!((weights, logarithm), (vec![0.5, 0.5], 2.0_f64.ln()));
    }
}
