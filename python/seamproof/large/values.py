"""The inputs of a problem, drawn where they are used: the numbers that `seamproof inputs` gives, bit for bit.

The module `judge/src/values.rs` states the hash and its laws, `judge/src/exact` the two modes whose keys have codes.
Words of 64 bits are kept in signed integers, whose sums and products wrap in numpy and in torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..problem import Problem, Run
from .ops import NumpyOps

GOLDEN = 0x9E3779B97F4A7C15
FACTORS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
TENSORS = {"q": 0, "k": 1, "v": 2, "dout": 3, "sink": 4}
CHOICE = 5
NORMAL_MEAN, NORMAL_DEVIATION = 131_070, math.sqrt(4_294_967_295.0 / 3.0)
# The standard deviation of the logits in each mode of near-normal numbers.
NORMAL = {"flat": 0.5, "peaked": 3.0, "large": 64.0}
CODED = ("pairs", "routing")
MODES = (*NORMAL, *CODED)
GAP, DEAD_SINK, PAYLOAD_ONE_IN = 120.0, -256.0, 4
LARGEST = {"bf16": 3.3895313892515355e38, "fp16": 65504.0, "f32": 3.4028234663852886e38}


def signed(word: int) -> int:
    """Returns the signed integer with the bits of a word."""
    word &= (1 << 64) - 1
    return word - (1 << 64) if word >> 63 else word


def shifted(word: Any, by: int) -> Any:
    """Returns a word shifted to the right, with zeros from the left."""
    return (word >> by) & ((1 << (64 - by)) - 1)


def mix(word: Any) -> Any:
    """Returns the finaliser of SplitMix64."""
    word = (word ^ shifted(word, 30)) * signed(FACTORS[0])
    word = (word ^ shifted(word, 27)) * signed(FACTORS[1])
    return word ^ shifted(word, 31)


def absorb(state: Any, word: Any) -> Any:
    """Returns the state after one more word."""
    return mix((state ^ word) + signed(GOLDEN))


def below(most: Any, word: Any) -> Any:
    """Returns a number below another one, from the upper half of a word."""
    return (shifted(word, 32) * most) >> 32


def modulo_3(word: Any) -> Any:
    """Returns the remainder of a word, which is not signed, divided by 3."""
    return (shifted(word, 1) % 3 * 2 + (word & 1)) % 3


@dataclass(frozen=True)
class Draw:
    """The hash of a problem's elements."""

    ops: NumpyOps
    seed: int

    def word(self, *words: int) -> Any:
        """Returns the state after these words, as an array of one."""
        # On the host, where a few words are a matter of no launch.
        state = np.zeros(1, np.int64)
        for word in (self.seed, *words):
            state = absorb(state, np.array([signed(word)]))
        return self.ops.integers(state)

    def lanes(self, rows: Any, count: int) -> Any:
        """Returns the hashes of the first lanes of rows, along a new axis."""
        steps = self.ops.integers([signed(GOLDEN * (lane + 1)) for lane in range(count)])
        return mix(rows[..., None] + steps)

    def rows(self, state: Any, positions: Any, heads: int) -> Any:
        """Returns the states of rows `[positions, heads]`."""
        return absorb(absorb(state, positions)[:, None], self.ops.integers(range(heads)))


def deviation(problem: Problem, mode: str, tensor: str) -> float:
    """Returns the standard deviation of a tensor's near-normal numbers."""
    if tensor in ("v", "dout"):
        return 1.0
    spread = problem.scale * math.sqrt(problem.dim_qk)
    return min(max(math.sqrt(NORMAL[mode] / spread), 1 / 256), 256.0)


def word_sum(word: Any) -> Any:
    """Returns the sum of the four 16-bit parts of a word."""
    parts = (shifted(word, at) if at else word for at in (0, 16, 32, 48))
    return sum(part & 0xFFFF for part in parts)


class Inputs:
    """The inputs of a problem in one of `MODES`. Rows without a token are full of `padding`."""

    def __init__(self, problem: Problem, ops: NumpyOps, padding: float = 0.0):
        self.problem, self.ops, self.padding = problem, ops, padding
        self.mode = problem.raw["mode"]
        if self.mode not in MODES:
            raise ValueError(f"inputs of mode {self.mode} are not drawn here; use one of {', '.join(MODES)}")
        self.draw = Draw(ops, problem.raw["data_seed"])
        self.choices = Choices(problem, ops) if self.mode in CODED else None

    def all(self) -> dict[str, Any]:
        """Returns the tensors by name; dout in a backward alone."""
        names = ("q", "k", "v", "dout") if self.problem.backward else ("q", "k", "v")
        return {name: self.tensor(name) for name in names} | {"sink": self.sink()}

    def tensor(self, name: str) -> Any:
        p, ops, form = self.problem, self.ops, self.problem.form(name)
        shape = p.shape(name)
        array = ops.full(shape, form, self.padding)
        size = max(1, ops.most // 8 // max(1, shape[1] * shape[2]))
        for index, sequence in enumerate(p.sequences):
            run = sequence.q if name in ("q", "dout") else sequence.kv
            law = self.law(name, index)
            for start in range(0, run.len, size):
                end = min(run.len, start + size)
                values = law(ops.integers(np.arange(start, end)))
                array[rows_of(run, start, end)] = ops.stored(values, form)
        return ops.given(array, form)

    def sink(self) -> Any:
        """Returns the sinks as f32 of the library; none where they are not learnable."""
        p = self.problem
        if p.sink != "learnable":
            values = np.zeros(0, np.float32)
        elif self.mode in CODED:
            values = np.full(p.heads_q, DEAD_SINK, np.float32)
        else:
            rows = absorb(self.draw.word(TENSORS["sink"], 0, 0), self.ops.integers(range(p.heads_q)))
            words = shifted(self.draw.lanes(rows, 1)[:, 0], 40)
            values = (self.ops.host(words) / 4_194_304.0 - 2.0).astype(np.float32)
        return p.library.put(values, "f32")

    def law(self, name: str, index: int) -> Any:
        """Returns the function that gives the f32 values of positions of a sequence, `[positions, heads, lanes]`."""
        p, sequence = self.problem, self.problem.sequences[index]
        heads, lanes = p.shape(name)[1:]
        state = self.draw.word(TENSORS[name], sequence.id)
        if self.mode in CODED:
            coded = Coded(self, index)
            return lambda positions: coded.fill(name, self.draw.rows(state, positions, heads), positions)
        factor = float(np.float32(deviation(p, self.mode, name) / NORMAL_DEVIATION))

        def normal(positions: Any) -> Any:
            words = self.draw.lanes(self.draw.rows(state, positions, heads), lanes)
            return self.ops.f32(word_sum(words) - NORMAL_MEAN) * factor

        return normal


class Choices:
    """What queries choose in the modes `pairs` and `routing`, for rows of any sequences at once."""

    def __init__(self, problem: Problem, ops: NumpyOps):
        self.problem, self.ops = problem, ops
        self.pairs = problem.raw["mode"] == "pairs"
        of, group = problem.sequences, problem.group
        self.states = absorb(
            Draw(ops, problem.raw["data_seed"]).word(CHOICE), ops.integers([each.id for each in of])
        )
        self.keys = ops.integers([each.kv.len for each in of])
        self.shifts = ops.integers([problem.shift(index) for index in range(len(of))])
        self.kv_heads = ops.integers(range(problem.heads_kv))
        self.heads = ops.integers(range(problem.heads_q))
        self.group_of = self.heads // group
        # By how many keys the first pair begins before the first key, `[sequences, kv heads]`.
        every = ops.integers(range(len(of)))
        self.offsets = shifted(self.drawn(every[:, None], 1, self.kv_heads, 0), 63) * int(self.pairs)

    def drawn(self, sequences: Any, kind: int, places: Any, lane: Any) -> Any:
        """Returns draws of sequences, for places and lanes that broadcast."""
        state = absorb(absorb(self.states[sequences], self.ops.integers([kind])), places)
        return mix(state + (lane + 1) * signed(GOLDEN))

    def visible(self, sequences: Any, queries: Any) -> tuple[Any, Any]:
        """Returns the first key that each query sees, and one past the last; equal where it sees none."""
        p, ops, keys = self.problem, self.ops, self.keys[sequences]
        if p.documents or p.chunks is not None or p.prefix or p.sink_tokens:
            raise ValueError(
                "a large run takes bounds alone, and the mask has documents, chunks, a prefix or sink tokens"
            )
        at, zero = queries + self.shifts[sequences], queries * 0
        first = zero if p.left is None else (at - p.left).clip(0)
        end = (
            keys if p.right is None else ops.where(at + p.right + 1 < keys, (at + p.right + 1).clip(0), keys)
        )
        none = first >= end
        return ops.where(none, zero, first), ops.where(none, zero, end)

    def groups(self, sequences: Any, keys: Any) -> Any:
        """Returns the groups of keys, `[keys, kv heads]`."""
        return (keys[:, None] + self.offsets[sequences]) >> int(self.pairs)

    def chosen(self, sequences: Any, queries: Any) -> tuple[Any, Any]:
        """Returns the group that each query of each head chooses, `[queries, heads]`, and whether it sees any key."""
        first, end = (bound[:, None] for bound in self.visible(sequences, queries))
        words = self.drawn(sequences[:, None], 2, queries[:, None], self.heads)
        way, zero = modulo_3(words), words * 0
        inner = first + below(end - first, words)
        key = self.ops.where(way == 0, first + zero, self.ops.where(way == 1, end - 1 + zero, inner))
        groups = (key + self.offsets[sequences][:, self.group_of]) >> int(self.pairs)
        return groups, (first < end) & (zero == 0)


class Plan:
    """The codes of a sequence's keys in the modes `pairs` and `routing`, and the amplitude of its queries."""

    def __init__(self, problem: Problem, index: int):
        keys, dim = problem.sequences[index].kv.len, problem.dim_qk
        groups = keys // 2 + 1 if problem.raw["mode"] == "pairs" else keys
        self.kinds = np.array([kind_of_lane(lane) for lane in range(dim)], np.int64)
        self.lanes = max(0, dim - (1 + dim // PAYLOAD_ONE_IN))
        self.bits = max(0, groups - 1).bit_length()
        repeated = max(1, self.lanes // self.bits if self.bits else self.lanes)
        self.amplitude = power_at_least(GAP / (2.0 * repeated * problem.scale))
        # The logit of the chosen group, and the bias of a query, in units of the amplitude.
        self.steps = 2 * repeated if problem.sink == "off-by-one" else 1
        self.bias = self.steps - self.lanes
        self.logit = problem.scale * self.amplitude * self.steps


class Coded:
    """The values of one sequence in the modes `pairs` and `routing`."""

    def __init__(self, inputs: Inputs, index: int):
        self.problem, self.ops, self.draw = inputs.problem, inputs.ops, inputs.draw
        self.choices, self.index, self.plan = inputs.choices, index, Plan(inputs.problem, index)
        self.kinds = self.ops.integers(self.plan.kinds)
        lanes = self.ops.integers(range(self.problem.dim_qk))
        # The signs of code lanes, `[kv heads, lanes]`; 0 in the others.
        words = self.choices.drawn(self._sequences(lanes[:1]), 0, self.choices.kv_heads[:, None], lanes)
        self.flips = (1 - 2 * shifted(words, 63)) * self.ops.integers(self.plan.kinds >= 0)

    def _sequences(self, positions: Any) -> Any:
        return positions * 0 + self.index

    def _codes(self, groups: Any) -> Any:
        """Returns the signs of codes along a new axis of lanes, in which each bit is repeated."""
        if not self.plan.bits:
            return groups[..., None] * 0 + self.kinds * 0 + 1
        return 1 - 2 * ((groups[..., None] >> (self.kinds.clip(0) % self.plan.bits)) & 1)

    def fill(self, name: str, rows: Any, positions: Any) -> Any:
        """Returns the f32 values of rows, as their tensor has them."""
        lanes, form = self.problem.shape(name)[2], self.problem.form(name)
        if name == "q":
            values = self._queries(positions)
        elif name == "k":
            values = self._keys(rows, positions)
        else:
            words = self.draw.lanes(rows, lanes)
            if name == "dout":
                values = below(3, words) - 1
            else:
                values = below(2, words) if self.choices.pairs else below(255, words) - 127
        most = LARGEST[form]
        return self.ops.f32(values).clip(-most, most)

    def _queries(self, queries: Any) -> Any:
        groups, sees = self.choices.chosen(self._sequences(queries), queries)
        units = self._codes(groups) * self.flips[self.choices.group_of]
        units = units + (self.kinds == BIAS) * self.plan.bias
        return self.ops.f32(units * sees[..., None]) * self.plan.amplitude

    def _keys(self, rows: Any, keys: Any) -> Any:
        units = self._codes(self.choices.groups(self._sequences(keys), keys)) * self.flips
        payload = (below(3, self.draw.lanes(rows, self.problem.dim_qk)) - 1) * (self.kinds == PAYLOAD)
        return units + payload + (self.kinds == BIAS)


BIAS, PAYLOAD = -1, -2


def kind_of_lane(lane: int) -> int:
    """Returns what a lane of a key with a code holds: `BIAS`, `PAYLOAD`, or the number of a code lane."""
    if lane == 0:
        return BIAS
    if lane % PAYLOAD_ONE_IN == PAYLOAD_ONE_IN - 1:
        return PAYLOAD
    return lane - 1 - lane // PAYLOAD_ONE_IN


def power_at_least(value: float) -> float:
    """Returns the smallest power of two that is not below a positive number."""
    mantissa, exponent = math.frexp(value)
    return math.ldexp(1.0, exponent - 1 if mantissa == 0.5 else exponent)


def rows_of(run: Run, start: int, end: int) -> slice:
    """Returns the rows of positions of a run."""
    return slice(run.offset + run.step * start, run.offset + run.step * (end - 1) + 1, run.step)
