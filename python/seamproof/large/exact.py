"""Every row of a large run in the modes `pairs` and `routing`, whose right results are known bit for bit.

A query gives each of its one or two active keys the weight 1/n, and no other key any (`judge/src/exact`). So out, dq,
and what a query adds to dk and dv are made of one or two keys. The exact answer costs as much as reading the tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..problem import Problem
from .ops import NumpyOps
from .values import BIAS, LARGEST, PAYLOAD, Choices, Plan


@dataclass
class Tally:
    """Elements of one tensor that were compared, and the worst of the first piece with a wrong one."""

    compared: int = 0
    failed: int = 0
    place: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, ops: NumpyOps, compared: tuple[Any, Any, Any], asked: Any, first: tuple[int, int]) -> None:
        """Compares elements with the exact ones `[rows, heads, …]` and the most that each may be off.

        The first element lies in this row and head of the tensor.
        """
        got, exact, most = compared
        error = abs(got - exact)
        wrong = asked & ~(error <= most)
        self.compared += int(asked.sum())
        failed = int(wrong.sum())
        if failed and not self.failed:
            error = ops.where(ops.isnan(error), ops.zeros(1) + np.inf, ops.f64(error))
            error = ops.host(ops.where(wrong, error, ops.zeros(1) - 1))
            at = np.unravel_index(int(error.argmax()), error.shape)
            self.place = [int(at[0]) + first[0], int(at[1]) + first[1], *(int(each) for each in at[2:])]
            self.values = [float(ops.host(each[at])) for each in (got, exact)]
        self.failed += failed

    def told(self) -> dict[str, Any]:
        """Returns the tally as the program reads it. A value that is no number of JSON is a text."""
        values = [value if np.isfinite(value) else str(value) for value in self.values]
        return {"compared": self.compared, "failed": self.failed, "place": self.place, "values": values}


@dataclass(frozen=True)
class Given:
    """What some queries give to their keys, `[queries, heads]`: two rows of keys each, the second of weight 0 or ½."""

    rows: tuple[Any, Any]
    weights: tuple[Any, Any]
    # Whether a query is one, and sees any key.
    sees: Any
    # The sequence of each query.
    sequences: Any


class Exact:
    """The comparison of one run with the exact results of its mode.

    `known` says which results are exact, how far an LSE of one key and of two may be off, and how many units of a sum
    can be held exactly.
    """

    def __init__(self, problem: Problem, ops: NumpyOps, tensors: dict[str, Any], known: dict[str, Any]):
        self.p, self.ops, self.tensors, self.known = problem, ops, tensors, known
        self.choices = Choices(problem, ops)
        self.plans = [Plan(problem, index) for index in range(len(problem.sequences))]
        self.logits = self._of_sequences(plan.logit for plan in self.plans)
        self.units = self._of_sequences(problem.scale * plan.amplitude for plan in self.plans)
        self.biases = self._of_sequences(abs(plan.bias) for plan in self.plans)
        names = ["lse"] if "lse" in tensors else []
        names += ["out"] if known["out"] else []
        names += ["dv"] if known["dv"] else []
        names += ["dk", "dq"] if known["gradients"] else []
        self.tallies = {name: Tally() for name in names}

    def _of_sequences(self, numbers: Any) -> Any:
        return self.ops.numbers(list(numbers))

    def _sequences(self, side: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns the sequence and the position of each row of a side; −1 and 0 of rows that hold no token."""
        of = self.p.q if side == "q" else self.p.kv
        sequences, positions = np.full(of.rows, -1, np.int64), np.zeros(of.rows, np.int64)
        for index, run in enumerate(of.runs):
            sequences[run.real_rows()], positions[run.real_rows()] = index, np.arange(run.len)
        return sequences, positions

    def compared(self) -> dict[str, Any]:
        """Compares every row, and returns the tallies."""
        if self.p.sequences:
            size = max(1, self.ops.most // max(1, self.p.kv.rows * max(self.p.dim_qk, self.p.dim_v)))
            for start in range(0, self.p.heads_kv, size):
                self._heads(slice(start, min(self.p.heads_kv, start + size)))
        return {name: tally.told() for name, tally in self.tallies.items()}

    def _heads(self, heads: slice) -> None:
        """Compares the rows of a few KV heads and their query heads."""
        ops, p, count = self.ops, self.p, heads.stop - heads.start
        keys, sums = p.kv.rows * count, {}
        if "dv" in self.tallies:
            sums |= {"dv": ops.zeros(keys, p.dim_v), "weights": ops.zeros(keys)}
        if "dk" in self.tallies:
            sums |= {"dk": ops.zeros(keys, p.dim_qk), "ds": ops.zeros(keys)}
        size = max(1, ops.most // 4 // (count * p.group * max(p.dim_qk, p.dim_v)))
        sequences, positions = self._sequences("q")
        for start in range(0, p.q.rows, size):
            rows = slice(start, min(p.q.rows, start + size))
            self._queries(heads, rows, self.given(heads, sequences[rows], positions[rows]), sums)
        if not sums:
            return
        of = self._sequences("kv")[0]
        real, of = ops.integers(of >= 0) > 0, ops.integers(of.clip(0))
        asked = sums["weights"] < self.known["units"] / 2
        asked = (asked & repeated(real, count))[:, None] & (sums["dv"] == sums["dv"])
        self._keys("dv", heads, sums["dv"], asked)
        if "dk" in sums:
            # The largest magnitude of a query's lanes in units of the amplitude. Sums are multiples of a quarter of it.
            kinds = ops.integers(self.plans[0].kinds)
            bias = repeated(self.biases[of], count)[:, None]
            lanes = ops.where(kinds == BIAS, bias, ops.f64(kinds != PAYLOAD))
            asked = sums["ds"][:, None] * lanes < self.known["units"] / 4
            self._keys("dk", heads, sums["dk"], asked & repeated(real, count)[:, None])

    def given(self, heads: slice, sequences: np.ndarray, positions: np.ndarray) -> Given:
        """Returns what queries give to the keys that they choose and see."""
        ops, p = self.ops, self.p
        of = slice(heads.start * p.group, heads.stop * p.group)
        real = ops.integers(sequences >= 0) > 0
        sequences, positions = ops.integers(sequences.clip(0)), ops.integers(positions)
        groups, sees = (each[:, of] for each in self.choices.chosen(sequences, positions))
        first, end = (each[:, None] for each in self.choices.visible(sequences, positions))
        one = other = groups
        if self.choices.pairs:
            low = 2 * groups - self.choices.offsets[sequences][:, self.choices.group_of[of]]
            one = ops.where(low > first, low, first + low * 0)
            other = ops.where(low + 1 < end - 1, low + 1, end - 1 + low * 0)
        sees = sees & real[:, None]
        begins = ops.integers([each.kv.offset for each in p.sequences])[sequences][:, None]
        rows = tuple(ops.where(sees, key + begins, groups * 0) for key in (one, other))
        both, weight = ops.f32(one != other), ops.f32(sees)
        return Given(rows, (weight * (1 - both / 2), weight * both / 2), sees, sequences)

    def _rows(self, name: str, rows: slice, heads: slice) -> Any:
        """Returns query-side rows of a few KV heads, `[queries, heads, …]`."""
        of = slice(heads.start * self.p.group, heads.stop * self.p.group)
        return self.tensors["lse"][of, rows].T if name == "lse" else self.tensors[name][rows, of]

    def _queries(self, heads: slice, rows: slice, given: Given, sums: dict[str, Any]) -> None:
        ops, p, count = self.ops, self.p, heads.stop - heads.start

        def tally(name: str, exact: Any, most: Any, asked: Any) -> None:
            got = ops.f64(self._rows(name, rows, heads))
            place = (rows.start, heads.start * p.group)
            self.tallies[name].add(ops, (got, ops.f64(exact), most), asked, place)

        if "lse" in self.tallies:
            two, zero = given.weights[1] > 0, ops.zeros(1)
            exact = self.logits[given.sequences][:, None] + ops.where(two, zero + np.log(2.0), zero)
            most = ops.where(two, zero + self.known["lse"][1], zero + self.known["lse"][0])
            tally("lse", exact, most, given.sees)
        # The KV head of each query head, in this piece.
        of = ops.integers(np.arange(count * p.group) // p.group)

        def keys(name: str) -> tuple[Any, Any]:
            flat = self.tensors[name][:, heads].reshape(-1, p.shape(name)[2])
            return tuple(ops.f32(flat[row * count + of]) for row in given.rows)

        values, weights = keys("v"), [weight[..., None] for weight in given.weights]
        # Rows that hold no token are zeros here, and so is what is right for them.
        if "out" in self.tallies:
            exact = weights[0] * values[0] + weights[1] * values[1]
            tally("out", exact, ops.zeros(1), exact == exact)
        if not sums:
            return
        dout = ops.f32(self._rows("dout", rows, heads))
        places = [(row * count + of).reshape(-1) for row in given.rows]
        for place, weight in zip(places, given.weights, strict=True):
            ops.add_at(sums["dv"], place, ops.f64(dout * weight[..., None]).reshape(-1, p.dim_v))
            ops.add_at(sums["weights"], place, ops.f64(weight).reshape(-1))
        if "dk" not in sums:
            return
        dots = [(dout * value).sum(-1) for value in values]
        d = given.weights[0] * dots[0] + given.weights[1] * dots[1]
        ds = [weight * (dot - d) for weight, dot in zip(given.weights, dots, strict=True)]
        k, q = keys("k"), ops.f64(self._rows("q", rows, heads))
        exact = p.scale * ops.f64(ds[0][..., None] * k[0] + ds[1][..., None] * k[1])
        tally("dq", self._rounded("dq", exact), ops.zeros(1), abs(exact) < LARGEST[p.form("dq")])
        for place, each in zip(places, ds, strict=True):
            ops.add_at(sums["dk"], place, (p.scale * ops.f64(each)[..., None] * q).reshape(-1, p.dim_qk))
            ops.add_at(sums["ds"], place, ops.f64(abs(each)).reshape(-1))

    def _keys(self, name: str, heads: slice, exact: Any, asked: Any) -> None:
        """Compares a gradient of keys where its terms add up to few enough units."""
        shape = (self.p.kv.rows, heads.stop - heads.start, exact.shape[-1])
        got, exact = self.ops.f64(self.tensors[name][:, heads]), exact.reshape(shape)
        # A sum that overflows is left to the rows that are judged by their bounds.
        asked = asked.reshape(shape) & (abs(exact) < LARGEST[self.p.form(name)])
        compared = (got, self._rounded(name, exact), self.ops.zeros(1))
        self.tallies[name].add(self.ops, compared, asked, (0, heads.start))

    def _rounded(self, name: str, exact: Any) -> Any:
        """Returns exact sums rounded to the format of a gradient. Those that are compared are numbers of f32."""
        form = self.p.form(name)
        return self.ops.f64(self.ops.stored(exact.clip(-LARGEST[form], LARGEST[form]), form))


def repeated(array: Any, count: int) -> Any:
    """Returns an array of rows with each row as often as there are heads."""
    return array[:, None][:, [0] * count].reshape(-1)
