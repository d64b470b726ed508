//! The plan of one sequence in an exact mode: its codes, the choices of its queries, its staircase, and its values.

use std::ops::Range;

use seamproof_oracle::{InputMode, Intervals, Problem, Run, Sequence, Side, Sink};

use super::{COUNT_VALUE, DEAD_LEVEL, GAP, LEVEL_MAX, ROUTED_VALUE, STAIR_VALUE, TABLE_MAX};
use crate::hash::{CHOICE, Tensor, absorb, below, lane_hash};
use seamproof_oracle::sharding::run_of;

/// Number of keys of which one is a step of the staircase.
const STRIDE: usize = 4;
/// Number of levels of the staircase: two of 0, then each up to the highest.
const LEVELS: usize = LEVEL_MAX as usize + 2;
/// Number of lanes of which one is payload.
const PAYLOAD_ONE_IN: usize = 4;

/// Whether keys have codes.
pub(crate) fn has_codes(mode: InputMode) -> bool {
    matches!(mode, InputMode::Routing | InputMode::Pairs)
}

/// Whether all logits are 0.
pub(crate) fn is_uniform(mode: InputMode) -> bool {
    matches!(mode, InputMode::UniformCount | InputMode::Endpoints)
}

/// Purpose of a lane of the head dimension.
enum Lane {
    Bias,
    /// The n-th code lane.
    Code(usize),
    Payload,
}

fn lane(index: usize) -> Lane {
    match index {
        0 => Lane::Bias,
        _ if index % PAYLOAD_ONE_IN == PAYLOAD_ONE_IN - 1 => Lane::Payload,
        _ => Lane::Code(index - 1 - index / PAYLOAD_ONE_IN),
    }
}

/// Returns the number of code lanes of a head dimension.
pub(super) fn code_lanes(dim: usize) -> usize {
    dim.saturating_sub(1 + dim / PAYLOAD_ONE_IN)
}

/// Sizes of a sequence's codes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Code {
    /// Number of code lanes.
    pub(super) lanes: usize,
    /// Number of bits in a group's number.
    pub(super) bits: usize,
    /// Amplitude A, a power of two.
    pub(super) amplitude: f64,
    /// Logit of the chosen group in units of `scale · A`.
    pub(super) steps: i64,
}

/// Returns the smallest power of two that is not below `value`, which must be positive and normal.
fn power_at_least(value: f64) -> f64 {
    let power = f64::from_bits(value.to_bits() & f64::INFINITY.to_bits());
    if power < value { 2.0 * power } else { power }
}

impl Code {
    fn new(problem: &Problem, groups: usize) -> Code {
        let lanes = code_lanes(problem.dims.qk);
        let bits = (usize::BITS - groups.saturating_sub(1).leading_zeros()) as usize;
        let repeated = lanes.checked_div(bits).unwrap_or(lanes).max(1);
        let amplitude = power_at_least(GAP / (2.0 * repeated as f64 * f64::from(problem.softmax.scale)));
        // A sink of 0 must have no weight either, so the chosen logit lies above it by the gap.
        let steps = if problem.softmax.sink == Sink::OffByOne { 2 * repeated as i64 } else { 1 };
        Code { lanes, bits, amplitude, steps }
    }

    /// Returns 1 or −1, the number that a group holds in a code lane.
    fn sign(&self, group: usize, lane: usize) -> f32 {
        let bit = lane.checked_rem(self.bits).map_or(0, |bit| group >> bit & 1);
        if bit == 0 { 1.0 } else { -1.0 }
    }

    /// Returns the number that a query holds in the bias lane, in units of A.
    pub(super) fn bias(&self) -> i64 {
        self.steps - self.lanes as i64
    }
}

/// Bounds of the magnitudes of a row's partial LSEs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PartialLse {
    /// Bound for those of keys among which one has a weight.
    pub(super) weighing: f64,
    /// Bound for all, those of keys without a weight too.
    pub(super) deepest: f64,
}

/// Plan of one sequence of a problem in an exact mode.
pub(crate) struct ExactPlan<'a> {
    /// Problem of the plan.
    pub(crate) problem: &'a Problem,
    /// Sequence of the plan.
    pub(crate) sequence: &'a Sequence,
    mode: InputMode,
    pub(super) code: Code,
    choices: u64,
}

/// Returns the number of groups in a sequence of `keys` keys. The first pair may begin one before the first key.
pub(super) fn groups(mode: InputMode, keys: usize) -> usize {
    if mode == InputMode::Pairs { keys / 2 + 1 } else { keys }
}

impl<'a> ExactPlan<'a> {
    /// Returns the plan of a sequence in the problem's own mode.
    pub(crate) fn new(problem: &'a Problem, index: usize) -> ExactPlan<'a> {
        ExactPlan::of(problem.mode, problem, &problem.sequences[index])
    }

    /// Returns the plan of a sequence in another mode.
    pub(crate) fn of(mode: InputMode, problem: &'a Problem, sequence: &'a Sequence) -> ExactPlan<'a> {
        let code = Code::new(problem, groups(mode, sequence.kv.len));
        let choices = absorb(absorb(0, problem.data_seed), CHOICE);
        ExactPlan { problem, sequence, mode, code, choices: absorb(choices, u64::from(sequence.id)) }
    }

    /// Returns the rows of one side.
    pub(crate) fn run(&self, side: Side) -> Run {
        run_of(self.sequence, side)
    }

    /// Returns the number of keys.
    pub(crate) fn keys(&self) -> usize {
        self.sequence.kv.len
    }

    /// Returns the number of queries.
    pub(crate) fn queries(&self) -> usize {
        self.sequence.q.len
    }

    /// Returns the keys that the mask lets a query see.
    pub(crate) fn visible(&self, query: usize) -> Intervals {
        self.problem.mask.visible(query, self.queries(), self.keys())
    }

    /// Returns the logit of weight 1 in `routing` and `pairs`: a product of powers of two, an integer and the scale.
    pub(crate) fn code_logit(&self) -> f64 {
        f64::from(self.problem.softmax.scale) * self.code.amplitude * self.code.steps as f64
    }

    /// Returns the bounds of a row's partial LSEs. `logit` is the largest logit of the row, and `keys` the number of
    /// its keys.
    pub(crate) fn partial_lse(&self, logit: f64, keys: usize) -> PartialLse {
        let scale = f64::from(self.problem.softmax.scale);
        let lowest = match self.mode {
            _ if is_uniform(self.mode) => 0.0,
            InputMode::Staircase => scale * f64::from(DEAD_LEVEL),
            _ => self.code_logit() - 2.0 * scale * self.code.amplitude * self.code.lanes as f64,
        };
        let count = (keys as f64 + 1.0).ln();
        let weighing = logit.abs() + count;
        PartialLse { weighing, deepest: weighing.max(lowest.abs() + count) }
    }

    /// Returns the unit of q's lanes.
    pub(crate) fn amplitude(&self) -> f64 {
        self.code.amplitude
    }

    /// Returns a draw of the sequence, such as one for a lane of a KV head.
    fn draw(&self, kind: u64, place: usize, lane: usize) -> u64 {
        lane_hash(absorb(absorb(self.choices, kind), place as u64), lane)
    }

    fn flip(&self, kv_head: usize, lane: usize) -> f32 {
        if self.draw(0, kv_head, lane) >> 63 == 0 { 1.0 } else { -1.0 }
    }

    /// Returns by how many keys the first pair begins before the first key: 0 or 1.
    fn offset(&self, kv_head: usize) -> usize {
        (self.draw(1, kv_head, 0) >> 63) as usize
    }

    fn group(&self, kv_head: usize, key: usize) -> usize {
        if self.mode == InputMode::Pairs { (key + self.offset(kv_head)) / 2 } else { key }
    }

    /// Returns the keys of the group that a query of a head chooses; none where it sees no key.
    pub(crate) fn chosen(&self, query: usize, head: usize) -> Range<usize> {
        let kv_head = head / self.problem.group();
        let Some(group) = self.chosen_group(query, head) else { return 0..0 };
        match self.mode {
            InputMode::Pairs => {
                let end = 2 * group + 2 - self.offset(kv_head);
                end.saturating_sub(2)..end.min(self.keys())
            }
            _ => group..group + 1,
        }
    }

    fn chosen_group(&self, query: usize, head: usize) -> Option<usize> {
        let mut visible = self.visible(query);
        let hash = self.draw(2, query, head);
        let key = match (visible.len(), hash % 3) {
            (_, 0) => visible.next(),
            (_, 1) => visible.next_back(),
            (count, _) => visible.nth(below(count as u32, hash) as usize),
        };
        Some(self.group(head / self.problem.group(), key?))
    }

    /// Returns the level of a key of the staircase.
    pub(crate) fn level(&self, kv_head: usize, key: usize) -> i32 {
        let block = key / STRIDE;
        let step = (self.draw(3, kv_head, block) >> 62) as usize;
        if key % STRIDE != step {
            return DEAD_LEVEL;
        }
        let level = (block % LEVELS).saturating_sub(1) as i32;
        let descends = self.draw(4, kv_head, 0) >> 63 == 1;
        if descends { LEVEL_MAX - level } else { level }
    }

    /// Returns the lane that holds levels.
    fn level_lane(&self, kv_head: usize) -> usize {
        below(self.problem.dims.qk as u32, self.draw(5, kv_head, 0)) as usize
    }

    /// Returns the hash state of an element's row.
    fn row(&self, tensor: Tensor, position: usize, head: usize) -> u64 {
        let of_tensor = absorb(absorb(0, self.problem.data_seed), tensor as u64);
        absorb(absorb(absorb(of_tensor, u64::from(self.sequence.id)), position as u64), head as u64)
    }

    fn integers(row: u64, max: u32, lanes: &mut [f32]) {
        for (lane, to) in lanes.iter_mut().enumerate() {
            *to = below(2 * max + 1, lane_hash(row, lane)) as f32 - max as f32;
        }
    }

    pub(super) fn fill_q(&self, query: usize, head: usize, lanes: &mut [f32]) {
        lanes.fill(0.0);
        let kv_head = head / self.problem.group();
        match self.mode {
            InputMode::Staircase => lanes[self.level_lane(kv_head)] = 1.0,
            mode if has_codes(mode) => {
                let Some(group) = self.chosen_group(query, head) else { return };
                let amplitude = self.code.amplitude as f32;
                for (index, to) in lanes.iter_mut().enumerate() {
                    *to = amplitude
                        * match lane(index) {
                            Lane::Bias => self.code.bias() as f32,
                            Lane::Code(n) => self.code.sign(group, n) * self.flip(kv_head, index),
                            Lane::Payload => 0.0,
                        };
                }
            }
            _ => {}
        }
    }

    pub(super) fn fill_k(&self, key: usize, kv_head: usize, lanes: &mut [f32]) {
        let row = self.row(Tensor::K, key, kv_head);
        if !has_codes(self.mode) {
            ExactPlan::integers(row, 2, lanes);
            if self.mode == InputMode::Staircase {
                lanes[self.level_lane(kv_head)] = self.level(kv_head, key) as f32;
            }
            return;
        }
        let group = self.group(kv_head, key);
        for (index, to) in lanes.iter_mut().enumerate() {
            *to = match lane(index) {
                Lane::Bias => 1.0,
                Lane::Code(n) => self.code.sign(group, n) * self.flip(kv_head, index),
                Lane::Payload => below(3, lane_hash(row, index)) as f32 - 1.0,
            };
        }
    }

    pub(super) fn fill_v(&self, key: usize, kv_head: usize, lanes: &mut [f32]) {
        let row = self.row(Tensor::V, key, kv_head);
        let natural = |max: u32, lanes: &mut [f32]| {
            for (lane, to) in lanes.iter_mut().enumerate() {
                *to = below(max + 1, lane_hash(row, lane)) as f32;
            }
        };
        match self.mode {
            InputMode::UniformCount => ExactPlan::integers(row, COUNT_VALUE, lanes),
            InputMode::Routing => ExactPlan::integers(row, ROUTED_VALUE, lanes),
            InputMode::Pairs => natural(1, lanes),
            InputMode::Staircase => natural(STAIR_VALUE, lanes),
            _ => {
                let next = self.row(Tensor::V, key + 1, kv_head);
                let entry = |row: u64, lane: usize| below(TABLE_MAX + 1, lane_hash(row, lane)) as f32;
                for (lane, to) in lanes.iter_mut().enumerate() {
                    *to = entry(next, lane) - entry(row, lane);
                }
            }
        }
    }

    pub(super) fn fill_dout(&self, query: usize, head: usize, lanes: &mut [f32]) {
        let max = if has_codes(self.mode) { 1 } else { 2 };
        ExactPlan::integers(self.row(Tensor::Dout, query, head), max, lanes);
    }
}
