//! Values of a problem's tensors.
//!
//! Every element is a pure function of (data seed, tensor, sequence id, position, head, lane). It can be made
//! anywhere and in any order. Dropping a sequence changes no value of the others, and neither moving a sequence in
//! memory nor cutting it over ranks changes its own. Rows that are not *real* (padding of a span, rows that nobody
//! owns) are zero until [`poison`] fills them.
//!
//! # The hash
//!
//! All words are 64 bits and all arithmetic wraps. `mix` is the finaliser of SplitMix64:
//!
//! ```text
//! mix(x):       x ^= x >> 30;  x *= 0xbf58476d1ce4e5b9;  x ^= x >> 27;  x *= 0x94d049bb133111eb;  x ^= x >> 31
//! absorb(s, w): mix((s ^ w) + GOLDEN)                        GOLDEN = 0x9e3779b97f4a7c15
//! row:          s = absorb(absorb(absorb(absorb(absorb(0, data seed), tensor), sequence id), position), head)
//! lane n:       h = mix(s + (n + 1) · GOLDEN)
//! ```
//!
//! One row is thus one SplitMix64 stream. The tensors' numbers are q 0, k 1, v 2, dout 3, sink 4 (with sequence id,
//! position and lane 0). In mode `Equal` every key takes the values of position 0. The row's `Law` makes a number of
//! `h`: with integers, at most one product in f32, and the rounding to the element's format. A GPU or a script makes
//! the same bits.
//!
//! In mode `Sunk` lane 0 of q and k carries the depth of a row's logits and the other lanes are those of `Flat`: see
//! `Depths`. In modes `Shadowed` and `Rising` it carries the logit alone: see `Heights`. In mode `Shadowed` v is 0 at
//! position 0. In mode `Offset` lane 0 of k has 32 deviations more. In mode `Zeros` a tensor of a sequence holds zeros
//! where bit 0 of the hash of tensor number + 64, the sequence's id, position 0, head 0 and lane 0 is set.
//!
//! Rows of k and v that sequences share, in a page or outside of pages, hold the values of the earlier sequence. Where
//! they lie in that sequence's rows alone, the rows of the other one are a hole, which is not real.
//!
//! Elements of a scaled tensor are numbers of their bare format, drawn as if they had no scale. A scale is another
//! element's hash, in the row of tensor number + 16, the sequence's id, the number of its rows' block in the sequence,
//! and the head or group of heads; the lane is the number of the block of lanes. Where all sequences share a scale, id
//! and block are 0. The scale is `m · 2^(below(9, h) − 4)`; see [`ScaleValues`] for m, which is 1, 1.5, or one and bits 0
//! to 22 of h behind the point. Where scales are `Delayed`, q, k and v have the tensor number of q, and the scale is the
//! reciprocal of `e4m3's largest / that number with any m`.
//!
//! A kernel's own scales are drawn in the same way, from tensor number 32 on: p 32, ds 33, out 34, dq 35, dk 36, dv 37
//! (all gradients 35 where they are `Delayed`). The exponent is near that at which the quantity fills its format: see
//! `own_scales`.

use std::fmt;

use crate::exact;
use crate::hash::{Tensor, absorb, below, lane_hash, mix};
use crate::subject::PaddingInputs;
use ndarray::{Array1, Array3, ArrayViewMut, Axis, RemoveAxis, s};
use seamproof_oracle::sharding::run_of;
use seamproof_oracle::{
    Element, Format, InputMode, Inputs, OwnScales, Pass, Problem, Quantity, ScaleValues, Scales, Side,
    TensorName, TensorScales,
};

/// Mean of the sum of four uniform 16-bit words, `4 · 65535 / 2`.
const NORMAL_MEAN: i32 = 131_070;
/// Three times the variance of the sum of four uniform 16-bit words. The variance is `4 · (65536² − 1) / 12`.
const NORMAL_VARIANCE_TIMES_3: f64 = 4_294_967_295.0;

/// Standard deviation of the logits in mode `Flat`.
const FLAT_LOGITS: f64 = 0.5;
/// Standard deviation of the logits in mode `Peaked`.
const PEAKED_LOGITS: f64 = 3.0;
/// Standard deviation of the logits in mode `Large`.
const LARGE_LOGITS: f64 = 64.0;
/// Standard deviation of the logits in mode `Equal`. It is far from 0, to expose a subject that drops the maximum.
const EQUAL_LOGITS: f64 = 8.0;
/// Smallest standard deviation of q and k, whatever the scale: few values are then subnormal in fp16.
const AMPLITUDE_MIN: f64 = 1.0 / 256.0;
/// Largest standard deviation of q and k, whatever the scale. Values reach 3.5 standard deviations at most, so none
/// overflows fp16.
const AMPLITUDE_MAX: f64 = 256.0;

/// Largest magnitude of q, k and dout in mode `Integers`.
const INTEGER_SMALL: u32 = 2;
/// Largest magnitude of v in mode `Integers`.
const INTEGER_VALUE: u32 = 4;
/// Number of binades that the body of mode `HeavyTailed` is spread over; the tail rises above them.
const TAIL_BODY: u32 = 8;
/// Largest exponent of q and k in mode `HeavyTailed`: |x| < 2⁶.
const TAIL_UP: u32 = 5;
/// Largest exponent of v and dout in mode `HeavyTailed`. Their products enter dS, which fp16 must hold.
const TAIL_UP_VALUE: u32 = 3;
/// Distance in mode `Tiny` from the exponent of the smallest normal number down to the smallest exponent drawn, among
/// the subnormals.
const TINY_DOWN: i32 = 2;
/// Distance in mode `Tiny` from the exponent of the smallest normal number up to the largest exponent drawn.
const TINY_UP: i32 = 3;

/// Depth in mode `Sunk` at which lane 0 of q and k would have the same magnitude.
const DEPTH_MIDDLE: f64 = 20_000.0;
/// Largest exponent of lane 0 of k in mode `Sunk`.
const DEPTH_EXPONENT_MAX: f64 = 12.0;
/// Largest magnitude of lane 0 of q in mode `Sunk`, which fp16 holds.
const DEPTH_ELEMENT_MAX: f64 = 32_768.0;

/// Logit for which lane 0 of q and k has about the same magnitude in modes `Shadowed` and `Rising`.
const HEIGHT_MIDDLE: f64 = 8.0;
/// Largest exponent of lane 0 of q in these modes.
const HEIGHT_EXPONENT_MAX: f64 = 12.0;
/// Mean of v in modes `Shadowed`, `Rising` and `Offset`, in deviations.
const VALUE_MEAN: f32 = 8.0;
/// Mean of lane 0 of k in mode `Offset`, in deviations.
const KEY_MEAN: f64 = 32.0;
/// The largest magnitude in mode `Midpoints`, a power of two times the largest numbers of e4m3 and of e5m2.
const MIDPOINT_MAX: f32 = 7.0;
/// Number of elements in mode `Midpoints` among which one has the largest magnitude.
const LARGEST_ONE_IN: u32 = 16;
/// Number of binades of mode `Midpoints`.
const MIDPOINT_BINADES: u32 = 8;

/// Rule by which a lane's hash h becomes a number, before it is rounded to its format.
#[derive(Clone, Copy)]
enum Law {
    /// Integers up to `max` in magnitude, equally likely: `below(2·max + 1, h) − max`.
    Integers { max: u32 },
    /// Near-normal numbers: `(the sum of the four 16-bit words of h − 131070) · factor`, with the product rounded to
    /// f32. The sum's variance is `(2³² − 1) / 3`.
    Normal { factor: f32 },
    /// Heavy-tailed numbers with sign and significand as in `Binades`. The exponent is `min(t, up) − below(8, h)`,
    /// where t is the number of trailing zeros of `h >> 16`: a body of eight equally likely binades, and a tail in
    /// which each binade is half as likely as the one before.
    Tail { up: u32 },
    /// Numbers in equally likely binades: `±(1 + m / 128) · 2^(first + below(count, h))`, negative where bit 0 of h
    /// is set. The integer m is bits 1 to 7 of h.
    Binades { first: i32, count: u32 },
    /// Near-normal numbers about a mean: `mean + ` a number of `Normal`, rounded to f32.
    Around { mean: f32, factor: f32 },
    /// ±7 for one element in sixteen. The others are halfway between two smaller numbers, of e4m3 where bit 1 of h is set
    /// and of e5m2 otherwise. Negative where bit 0 of h is set. See `midpoint`.
    Midpoints,
}

/// Returns a number with the sign and the significand of h, and with an exponent within f32's range.
fn scaled(hash: u64, exponent: i32) -> f32 {
    let power = f64::from_bits(((exponent + 1023) as u64) << 52);
    let magnitude = (power * (1.0 + (hash >> 1 & 127) as f64 / 128.0)) as f32;
    if hash & 1 == 0 { magnitude } else { -magnitude }
}

/// Returns an element of mode `Midpoints`: ±7, or `±(1 + odd / 16) · 2^(2 − b)` halfway between numbers of e4m3, or
/// `±(1 + odd / 8) · 2^(2 − b)` halfway between those of e5m2. The binade b is `below(8, mix(h))`, and the odd number is
/// drawn of bits 2 to 4 of h; in the highest binade it keeps below 7.
fn midpoint(hash: u64) -> f32 {
    let binade = below(MIDPOINT_BINADES, mix(hash)) as i32;
    let (steps, drawn) = if hash & 2 == 0 { (4, hash >> 2 & 3) } else { (8, hash >> 2 & 7) };
    let below_largest = if binade == 0 { steps * 3 / 4 } else { steps };
    let fraction = (2 * (drawn % below_largest) + 1) as f32 / (2 * steps) as f32;
    let magnitude = if below(LARGEST_ONE_IN, hash) == 0 {
        MIDPOINT_MAX
    } else {
        libm::ldexpf(1.0 + fraction, 2 - binade)
    };
    if hash & 1 == 0 { magnitude } else { -magnitude }
}

fn word_sum(hash: u64) -> i32 {
    let pairs = (hash & 0x0000_ffff_0000_ffff) + (hash >> 16 & 0x0000_ffff_0000_ffff);
    (pairs as u32 + (pairs >> 32) as u32) as i32
}

/// Fills the lanes with rounded values. Each arm is compiled for its own format.
fn fill_each(row: u64, format: Format, lanes: &mut [f32], value: impl Fn(u64) -> f32) {
    match format {
        Format::Bf16 => fill_with(row, lanes, |hash| Format::Bf16.round_f32(value(hash))),
        Format::Fp16 => fill_with(row, lanes, |hash| Format::Fp16.round_f32(value(hash))),
        _ => fill_with(row, lanes, |hash| format.round_f32(value(hash))),
    }
}

fn fill_with(row: u64, lanes: &mut [f32], value: impl Fn(u64) -> f32) {
    for (lane, to) in lanes.iter_mut().enumerate() {
        *to = value(lane_hash(row, lane));
    }
}

/// Returns the factor of near-normal numbers of a deviation.
fn factor(deviation: f64) -> f32 {
    (deviation / (NORMAL_VARIANCE_TIMES_3 / 3.0).sqrt()) as f32
}

impl Law {
    fn normal(deviation: f64) -> Law {
        Law::Normal { factor: factor(deviation) }
    }

    fn around(mean: f32) -> Law {
        Law::Around { mean, factor: factor(1.0) }
    }

    /// Returns the law of v and dout.
    fn of_values(mode: InputMode, tensor: Tensor, format: Format) -> Law {
        match (mode, tensor) {
            (InputMode::Midpoints, _) => Law::Midpoints,
            (InputMode::Shadowed | InputMode::Rising | InputMode::Offset, Tensor::V) => {
                Law::around(VALUE_MEAN)
            }
            (InputMode::Integers, Tensor::V) => Law::Integers { max: INTEGER_VALUE },
            (InputMode::Integers, _) => Law::Integers { max: INTEGER_SMALL },
            (InputMode::HeavyTailed, _) => Law::Tail { up: TAIL_UP_VALUE },
            (InputMode::Tiny, _) => Law::Binades {
                first: format.exponent_min() - TINY_DOWN,
                count: (TINY_DOWN + TINY_UP + 1) as u32,
            },
            _ => Law::normal(1.0),
        }
    }

    /// Returns the law of q and k. Both get the same deviation a. A logit is `scale` times a sum of dqk products, so
    /// its deviation before the soft cap is `scale · a² · √dqk`, and a is chosen to give the deviation that the mode
    /// promises.
    fn of_logits(problem: &Problem) -> Law {
        let logits = match problem.mode {
            InputMode::Integers => return Law::Integers { max: INTEGER_SMALL },
            InputMode::HeavyTailed => return Law::Tail { up: TAIL_UP },
            InputMode::Midpoints => return Law::Midpoints,
            InputMode::Flat
            | InputMode::Tiny
            | InputMode::Sunk
            | InputMode::Shadowed
            | InputMode::Rising
            | InputMode::Offset
            | InputMode::Zeros => FLAT_LOGITS,
            InputMode::Peaked => PEAKED_LOGITS,
            InputMode::Large => LARGE_LOGITS,
            InputMode::Equal => EQUAL_LOGITS,
            // Never reached: `crate::exact` makes the values of these modes.
            InputMode::UniformCount
            | InputMode::Endpoints
            | InputMode::Routing
            | InputMode::Pairs
            | InputMode::Staircase => return Law::Integers { max: INTEGER_SMALL },
        };
        Law::normal(amplitude(problem, logits))
    }

    fn fill(self, row: u64, format: Format, lanes: &mut [f32]) {
        match self {
            Law::Midpoints => fill_each(row, format, lanes, midpoint),
            Law::Around { mean, factor } => {
                fill_each(row, format, lanes, |hash| mean + (word_sum(hash) - NORMAL_MEAN) as f32 * factor);
            }
            Law::Integers { max } => fill_each(row, format, lanes, |hash| {
                (i64::from(below(2 * max + 1, hash)) - i64::from(max)) as f32
            }),
            Law::Normal { factor } => {
                fill_each(row, format, lanes, |hash| (word_sum(hash) - NORMAL_MEAN) as f32 * factor);
            }
            Law::Tail { up } => fill_each(row, format, lanes, |hash| {
                let tail = (hash >> 16).trailing_zeros().min(up) as i32;
                scaled(hash, tail - below(TAIL_BODY, hash) as i32)
            }),
            Law::Binades { first, count } => {
                fill_each(row, format, lanes, |hash| scaled(hash, first + below(count, hash) as i32));
            }
        }
    }
}

/// Lane 0 of q and k in mode `Sunk`. Every key has the same power of two there, and a query has what makes
/// `scale · q · k` its depth: so all logits of a row are as deep, and differ as the other lanes make them differ.
struct Depths {
    scale: f64,
    /// The keys' element.
    key: f64,
}

impl Depths {
    /// Returns the lanes of a problem, of like magnitude for q and k.
    fn of(problem: &Problem) -> Depths {
        let scale = f64::from(problem.softmax.scale);
        let exponent = libm::round(libm::log2(DEPTH_MIDDLE / scale) / 2.0).clamp(0.0, DEPTH_EXPONENT_MAX);
        Depths { scale, key: f64::from(1 << exponent as u32) }
    }

    /// Returns the element of a query. Three rows of four lie below 0. Three of eight are some way past 1,000, two past
    /// 50,000: there a finite stand-in for minus infinity is larger than every logit.
    fn query(&self, format: Format, hash: u64) -> f32 {
        let part = f64::from((hash >> 8) as u16) / 65_536.0;
        let depth = match below(8, hash) {
            0 | 1 => 90.0 + 512.0 * part,
            2..=4 => 1_000.0 + 512.0 * part,
            5 | 6 => 50_000.0 + 4_096.0 * part,
            _ => 200_000.0 / f64::from(1 << below(11, mix(hash))),
        };
        let sign = if hash & 3 == 0 { 1.0 } else { -1.0 };
        let element = (depth / (self.scale * self.key)).min(DEPTH_ELEMENT_MAX);
        format.round_f32((sign * element) as f32)
    }

    /// Writes lane 0 of the real rows.
    fn write(&self, problem: &Problem, q: &mut Array3<f32>, k: &mut Array3<f32>) {
        let of_tensor = absorb(absorb(0, problem.data_seed), Tensor::Q as u64);
        for sequence in &problem.sequences {
            let of_sequence = absorb(of_tensor, u64::from(sequence.id));
            for (position, row) in sequence.q.real_rows().enumerate() {
                let of_row = absorb(of_sequence, position as u64);
                for head in 0..problem.heads.q {
                    let hash = lane_hash(absorb(of_row, head as u64), problem.dims.qk);
                    q[[row, head, 0]] = self.query(problem.precision.q.format, hash);
                }
            }
            for row in sequence.kv.real_rows() {
                k.slice_mut(s![row, .., 0]).fill(problem.precision.k.format.round_f32(self.key as f32));
            }
        }
    }
}

/// Returns the deviation of q and k whose logits have this one.
fn amplitude(problem: &Problem, logits: f64) -> f64 {
    let spread = f64::from(problem.softmax.scale) * (problem.dims.qk as f64).sqrt();
    (logits / spread).sqrt().clamp(AMPLITUDE_MIN, AMPLITUDE_MAX)
}

/// Modes `Shadowed` and `Rising`: lane 0 of q is a power of two, its other lanes are 0, and lane 0 of a key is what makes
/// the logit its height. Both are divided by the descale that they have, so that heights are the same in FP8. A height is
/// as near as the formats' numbers are: within 7 % in e4m3.
///
/// A KV head of a sequence has the hash of the sequence's position 0 in k, lane dqk. With u as bits 8 to 23 of it over
/// 2¹⁶, the first key of `Shadowed` is `9 + 6·u` binades of a weight high, and keys of `Rising` are `2 + 1.7·u` high from
/// position `4 << below(5, h)` on. All others have the height 0.
struct Heights<'a> {
    problem: &'a Problem,
    scales: &'a Scales,
    /// The queries' value.
    query: f64,
}

impl Heights<'_> {
    fn of<'a>(problem: &'a Problem, scales: &'a Scales) -> Heights<'a> {
        let exponent = libm::round(libm::log2(HEIGHT_MIDDLE / f64::from(problem.softmax.scale)) / 2.0);
        let exponent = exponent.clamp(-HEIGHT_EXPONENT_MAX, HEIGHT_EXPONENT_MAX);
        Heights { problem, scales, query: libm::exp2(exponent) }
    }

    /// Returns the height of a key.
    fn height(&self, hash: u64, position: usize) -> f64 {
        let part = f64::from((hash >> 8) as u16) / 65_536.0;
        let (is_high, binades) = match self.problem.mode {
            InputMode::Shadowed => (position == 0, 9.0 + 6.0 * part),
            _ => (position >= 4 << below(5, hash), 2.0 + 1.7 * part),
        };
        if is_high { binades * std::f64::consts::LN_2 } else { 0.0 }
    }

    /// Returns the code that stands for a value in a tensor's place, or the value itself.
    fn code(&self, tensor: TensorName, [sequence, position, head]: [usize; 3], value: f64) -> f32 {
        let descale = self.scales.of(tensor).map_or(1.0, |scales| scales.of(sequence, position, head, 0));
        let format = self.problem.precision.of(tensor).format;
        let most = format.max_finite().min(DEPTH_ELEMENT_MAX);
        format.round_f32((value / descale).min(most) as f32)
    }

    /// Writes the queries and lane 0 of the keys, in real rows.
    fn write(&self, q: &mut Array3<f32>, k: &mut Array3<f32>) {
        let Heights { problem, query, .. } = self;
        let of_tensor = absorb(absorb(0, problem.data_seed), Tensor::K as u64);
        for (index, sequence) in problem.sequences.iter().enumerate() {
            let of_first = absorb(absorb(of_tensor, u64::from(sequence.id)), 0);
            for (position, row) in sequence.q.real_rows().enumerate() {
                for head in 0..problem.heads.q {
                    q.slice_mut(s![row, head, ..]).fill(0.0);
                    q[[row, head, 0]] = self.code(TensorName::Q, [index, position, head], *query);
                }
            }
            for (position, row) in sequence.kv.real_rows().enumerate() {
                for head in 0..problem.heads.kv {
                    let hash = lane_hash(absorb(of_first, head as u64), problem.dims.qk);
                    let value = self.height(hash, position) / (f64::from(problem.softmax.scale) * query);
                    k[[row, head, 0]] = self.code(TensorName::K, [index, position, head], value);
                }
            }
        }
    }
}

/// Adds the mean of lane 0 of the keys in mode `Offset`, in real rows.
fn offset_keys(problem: &Problem, k: &mut Array3<f32>) {
    let mean = (KEY_MEAN * amplitude(problem, FLAT_LOGITS)) as f32;
    let format = problem.precision.k.format;
    for row in problem.sequences.iter().flat_map(|sequence| sequence.kv.real_rows()) {
        k.slice_mut(s![row, .., 0]).mapv_inplace(|value| format.round_f32(value + mean));
    }
}

/// Distance from a tensor's number to that of its zeros in the hash.
const ZEROS: u64 = 64;

/// Writes zeros into some tensors of some sequences in mode `Zeros`.
fn write_zeros(problem: &Problem, tensors: [(Tensor, Side, &mut Array3<f32>); 4]) {
    for (tensor, side, values) in tensors {
        let of_tensor = absorb(absorb(0, problem.data_seed), ZEROS + tensor as u64);
        for sequence in &problem.sequences {
            let of_sequence = absorb(absorb(of_tensor, u64::from(sequence.id)), 0);
            let is_zero = lane_hash(absorb(of_sequence, 0), 0) & 1 == 1;
            if is_zero && !values.is_empty() {
                run_of(sequence, side)
                    .real_rows()
                    .for_each(|row| values.slice_mut(s![row, .., ..]).fill(0.0));
            }
        }
    }
}

/// Source of one tensor's values.
struct Source {
    tensor: Tensor,
    law: Law,
    format: Format,
    /// Whether every position holds the values of position 0.
    constant: bool,
}

impl Source {
    /// Returns the tensor of `shape`, with the values of each sequence's real rows and zeros elsewhere.
    fn array(&self, problem: &Problem, side: Side, shape: [usize; 3]) -> Array3<f32> {
        let mut array = Array3::zeros(shape);
        let [_, heads, dim] = shape;
        let values = array.as_slice_mut().unwrap_or_default();
        let of_tensor = absorb(absorb(0, problem.data_seed), self.tensor as u64);
        for sequence in &problem.sequences {
            let of_sequence = absorb(of_tensor, u64::from(sequence.id));
            for (position, row) in run_of(sequence, side).real_rows().enumerate() {
                let of_row = absorb(of_sequence, if self.constant { 0 } else { position as u64 });
                let lanes = &mut values[row * heads * dim..(row + 1) * heads * dim];
                for (head, lanes) in lanes.chunks_exact_mut(dim).enumerate() {
                    self.law.fill(absorb(of_row, head as u64), self.format, lanes);
                }
            }
        }
        array
    }
}

/// Returns the inputs of a problem: real rows drawn as its mode says, all other rows zero.
pub fn inputs(problem: &Problem) -> Inputs {
    if problem.mode.is_exact() {
        return exact::inputs(problem);
    }
    let (mode, precision) = (problem.mode, &problem.precision);
    let source = |tensor: Tensor, element: Element| Source {
        tensor,
        law: match tensor {
            Tensor::V | Tensor::Dout => Law::of_values(mode, tensor, element.format),
            Tensor::Q | Tensor::K | Tensor::Sink => Law::of_logits(problem),
        },
        format: element.format,
        constant: mode == InputMode::Equal && matches!(tensor, Tensor::K),
    };
    let dout = source(Tensor::Dout, precision.dout);
    let mut q = source(Tensor::Q, precision.q).array(problem, Side::Q, problem.q_shape());
    let mut k = source(Tensor::K, precision.k).array(problem, Side::Kv, problem.k_shape());
    let scales = scales(problem);
    match mode {
        InputMode::Sunk => Depths::of(problem).write(problem, &mut q, &mut k),
        InputMode::Shadowed | InputMode::Rising => Heights::of(problem, &scales).write(&mut q, &mut k),
        InputMode::Offset => offset_keys(problem, &mut k),
        _ => {}
    }
    let mut v = source(Tensor::V, precision.v).array(problem, Side::Kv, problem.v_shape());
    if mode == InputMode::Shadowed {
        let first = problem.sequences.iter().filter_map(|sequence| sequence.kv.real_rows().next());
        first.for_each(|row| v.slice_mut(s![row, .., ..]).fill(0.0));
    }
    let mut dout = match problem.pass {
        Pass::Forward => Array3::zeros([0, problem.heads.q, problem.dims.v]),
        Pass::Backward => dout.array(problem, Side::Q, problem.out_shape()),
    };
    if mode == InputMode::Zeros {
        let q = (Tensor::Q, Side::Q, &mut q);
        let dout = (Tensor::Dout, Side::Q, &mut dout);
        write_zeros(problem, [q, (Tensor::K, Side::Kv, &mut k), (Tensor::V, Side::Kv, &mut v), dout]);
    }
    problem.repeat_shared(&mut k, &mut v);
    Inputs { q, k, v, dout, sink: sinks(problem), scales }
}

/// Distance from a tensor's number to that of its scales in the hash.
const SCALES: u64 = 16;

/// Returns the descales of a problem's scaled inputs, and of what a kernel quantises.
pub fn scales(problem: &Problem) -> Scales {
    let of_inputs = of_inputs(problem);
    let own = own_scales(problem, &of_inputs);
    of_inputs.with_own(own)
}

fn of_inputs(problem: &Problem) -> Scales {
    let shared = problem.scales == ScaleValues::Delayed;
    Scales::new(problem, |tensor, groups, [rows, head, lanes]| {
        let (id, block) = groups
            .sequence_of(rows)
            .map_or((0, 0), |(sequence, block)| (u64::from(problem.sequences[sequence].id), block as u64));
        let number = match tensor {
            TensorName::Dout => Tensor::Dout,
            TensorName::K if !shared => Tensor::K,
            TensorName::V if !shared => Tensor::V,
            _ => Tensor::Q,
        };
        let of_tensor = absorb(absorb(0, problem.data_seed), SCALES + number as u64);
        let hash = lane_hash(absorb(absorb(absorb(of_tensor, id), block), head as u64), lanes);
        descale(problem, Format::E4m3, below(9, hash) as i32 - 4, hash)
    })
}

/// Returns a descale near `2^exponent` of codes of a format, as the problem draws them.
fn descale(problem: &Problem, format: Format, exponent: i32, hash: u64) -> f32 {
    let any = || f32::from_bits(1f32.to_bits() | hash as u32 & 0x7f_ffff);
    let power = libm::ldexpf(1.0, exponent);
    match problem.scales {
        ScaleValues::PowersOfTwo => power,
        ScaleValues::ThreeTimesPowers => 1.5 * power,
        ScaleValues::Any => any() * power,
        // The amax of earlier steps is what the format's largest number stands for, and the scale is what is stored.
        ScaleValues::Delayed => {
            let most = format.max_finite() as f32;
            let amax = any() * power * most;
            1.0 / (most / amax)
        }
    }
}

/// Distance from a quantity's number to that of its scale in the hash.
const OWN_SCALES: u64 = 32;
/// Number of exponents among which the descale of weights is drawn, from 0 downwards. Those below −8 saturate.
const WEIGHT_EXPONENTS: u32 = 11;
/// Number of exponents among which the descale of any other quantity is drawn. The lowest saturate for ordinary values,
/// and the highest leave most of the format's range below them empty.
const EXPONENTS: u32 = 9;

/// Returns the descales of what a kernel quantises. Values of q, k, v and dout are near their descales, and products of
/// them near products of these.
fn own_scales(problem: &Problem, inputs: &Scales) -> OwnScales {
    let exponent = |scales: &Option<TensorScales>| {
        let first = scales.as_ref().and_then(|scales| scales.descale().first().copied());
        libm::ilogb(f64::from(first.unwrap_or(1.0)))
    };
    let [q, k, v, dout] = [&inputs.q, &inputs.k, &inputs.v, &inputs.dout].map(exponent);
    let ds = dout + v + libm::ilogb(f64::from(problem.softmax.scale));
    let is_delayed = problem.scales == ScaleValues::Delayed;
    OwnScales::new(&problem.precision, |quantity| {
        let number = match quantity {
            Quantity::Dk | Quantity::Dv if is_delayed => Quantity::Dq,
            own => own,
        };
        let of_quantity = absorb(absorb(0, problem.data_seed), OWN_SCALES + number as u64);
        let hash = lane_hash(absorb(absorb(absorb(of_quantity, 0), 0), 0), 0);
        let format = quantity.element(&problem.precision).format;
        let near = match number {
            Quantity::P if is_delayed && hash.is_multiple_of(4) => return 1.0,
            Quantity::P if is_delayed => return 1.0 / format.max_finite() as f32,
            Quantity::P => return descale(problem, format, -(below(WEIGHT_EXPONENTS, hash) as i32), hash),
            Quantity::Ds => ds,
            Quantity::Out => v,
            Quantity::Dq => ds + k,
            Quantity::Dk => ds + q,
            Quantity::Dv => dout,
        };
        let lowest = near - format.exponent_max() - 1;
        descale(problem, format, lowest + below(EXPONENTS, hash) as i32, hash)
    })
}

/// Returns the sink of each head, `(h >> 40) / 2²² − 2` in f32, exactly: 24 bits of the hash spread over [−2, 2).
fn sinks(problem: &Problem) -> Array1<f32> {
    let of_tensor = absorb(absorb(0, problem.data_seed), Tensor::Sink as u64);
    let of_position = absorb(absorb(of_tensor, 0), 0);
    Array1::from_shape_fn(problem.learnable_sinks(), |head| {
        let hash = lane_hash(absorb(of_position, head as u64), 0);
        (hash >> 40) as f32 / 4_194_304.0 - 2.0
    })
}

/// Returns for each row of the query-side tensors whether it holds a real token of a sequence.
pub fn real_q_rows(problem: &Problem) -> Vec<bool> {
    real_rows(problem, Side::Q, problem.rows.q)
}

/// Returns for each row of the key-side tensors whether it holds a real token of a sequence. Holes of sequences that
/// borrow keys do not.
pub fn real_kv_rows(problem: &Problem) -> Vec<bool> {
    real_rows(problem, Side::Kv, problem.rows.kv)
}

fn real_rows(problem: &Problem, side: Side, rows: usize) -> Vec<bool> {
    let mut real = vec![false; rows];
    for (index, sequence) in problem.sequences.iter().enumerate() {
        let hole = if side == Side::Kv { problem.sharing.borrowed(index) } else { 0 };
        run_of(sequence, side).real_rows().skip(hole).for_each(|row| real[row] = true);
    }
    real
}

/// Values that fill rows without a real token. Neighbouring elements differ, in sign or in more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Poison {
    /// Zeros of both signs: the mildest poison, which a careful caller leaves there.
    Zero,
    /// Finite values, exact in every format, that dwarf ordinary logits: a padding key that is seen wins the softmax.
    /// They are no larger than that, so a subject that asks for finite padding may multiply them.
    Large,
    /// Infinities of both signs; NaN in a format that conversions give none.
    Infinity,
    /// NaNs of both signs, quiet and signalling, with payloads that fit 7 bits.
    Nan,
}

impl fmt::Display for Poison {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(match self {
            Poison::Zero => "zeros",
            Poison::Large => "large numbers",
            Poison::Infinity => "infinities",
            Poison::Nan => "NaN",
        })
    }
}

impl Poison {
    /// Every poison, the mildest first.
    pub const ALL: [Poison; 4] = [Poison::Zero, Poison::Large, Poison::Infinity, Poison::Nan];

    /// Returns the strongest poison that a case is given: infinities in one case of four, otherwise NaN. A maximum
    /// that ignores NaN still takes an infinity.
    pub fn strongest(problem: &Problem) -> Poison {
        /// Constant that sets this draw apart from other uses of the data seed.
        const DRAW: u64 = 0x9015_0201;
        if mix(problem.data_seed ^ DRAW).is_multiple_of(4) { Poison::Infinity } else { Poison::Nan }
    }

    /// Returns the poison that a format holds: NaN for infinities where conversions make none.
    fn of_format(self, format: Format) -> Poison {
        if self == Poison::Infinity && format.saturates() { Poison::Nan } else { self }
    }

    /// Returns the two fills that a padding contract allows, the stronger one first: the judge runs a case under both.
    pub fn fills(allowed: PaddingInputs, problem: &Problem) -> [Poison; 2] {
        match allowed {
            PaddingInputs::Anything => [Poison::strongest(problem), Poison::Large],
            PaddingInputs::Finite => [Poison::Large, Poison::Zero],
        }
    }

    /// Returns the element for a hash.
    fn element(self, hash: u64) -> f32 {
        let magnitude = match self {
            Poison::Zero => 0,
            // The values 256, 320, 384, 448 have two bits of mantissa, and 448 is the largest number of e4m3.
            Poison::Large => 0x4380_0000 | (hash as u32 & 3) << 21,
            Poison::Infinity => 0x7f80_0000,
            // At least one bit of the payload is set, since the value would otherwise be an infinity. The low half is
            // clear, as in a bf16.
            Poison::Nan => 0x7f81_0000 | (hash as u32 & 127) << 16,
        };
        f32::from_bits(magnitude | (hash >> 63 << 31) as u32)
    }
}

/// Fills every row of q, k, v and dout that holds no real token: padding of spans, gaps, slack on both ends.
///
/// The arrays must have the problem's shapes; rows beyond the problem's own count as not real.
pub fn poison(inputs: &mut Inputs, problem: &Problem, poison: Poison) {
    let (q, kv) = (real_q_rows(problem), real_kv_rows(problem));
    let Inputs { q: of_q, k, v, dout, .. } = inputs;
    for (name, tensor, real) in [
        (TensorName::Q, of_q, &q),
        (TensorName::Dout, dout, &q),
        (TensorName::K, k, &kv),
        (TensorName::V, v, &kv),
    ] {
        let poison = poison.of_format(problem.precision.of(name).format);
        poison_rows(tensor.view_mut(), Axis(0), real, poison);
    }
}

/// Fills the slices of a tensor along `rows` that are not real, as for the saved out (`Axis(0)`) and lse (`Axis(1)`)
/// between a forward and a backward pass.
pub fn poison_rows<D: RemoveAxis>(
    mut tensor: ArrayViewMut<'_, f32, D>,
    rows: Axis,
    real: &[bool],
    poison: Poison,
) {
    for (row, mut slice) in tensor.axis_iter_mut(rows).enumerate() {
        if !real.get(row).copied().unwrap_or(false) {
            for (index, value) in slice.iter_mut().enumerate() {
                *value = poison.element(lane_hash(row as u64, index));
            }
        }
    }
}
