"""Exact rows of a large run in f64, and the sums that their bounds are made of.

Nothing here knows a mask or a bound. A question names rows, and for each the rows of the other side that it is
connected to. The answers go to `seamproof large`, which has the bounds (`oracle/src/envelope`). A *magnitude* counts an
input other than 0 as `floor` at least.

Of a row's lanes only `LANES` go back: those whose error is largest beside the magnitudes that their bounds grow with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..problem import Problem
from .ops import NumpyOps

LANES = 8
# What norms in f32 are multiplied by, so that they are no less than the exact ones: sums of 256 squares.
UP = 1 + 2.0**-10


@dataclass(frozen=True)
class Block:
    """Rows of one side, and for each the first row of the other side that it is connected to, and one past the last.

    All of those lie in `other`.
    """

    rows: Any
    first: Any
    end: Any
    other: slice

    @classmethod
    def of(cls, raw: dict[str, Any], ops: NumpyOps) -> Block:
        rows = np.array(raw["rows"], np.int64).reshape(-1, 3)
        return cls(*(ops.integers(rows[:, at]) for at in range(3)), slice(*raw["other"]))

    def seen(self, ops: NumpyOps) -> Any:
        """Returns which rows of the other side each row is connected to."""
        other = ops.integers(np.arange(self.other.start, self.other.stop))
        return (other >= self.first[:, None]) & (other < self.end[:, None])


class Sums:
    """The sums of one run: its inputs, its results, and the question's floor of magnitudes."""

    def __init__(
        self,
        problem: Problem,
        ops: NumpyOps,
        tensors: dict[str, Any],
        sinks: Any,
        floor: float,
        weighs_dots: bool,
    ):
        self.p, self.ops = problem, ops
        self.tensors = {name: self._real(name, array) for name, array in tensors.items() if array is not None}
        # The sink of each head, one for all heads, or `None`.
        self.sinks = None if sinks is None else ops.zeros(problem.heads_q) + sinks
        self.floor, self.weighs_dots = floor, weighs_dots
        self.has_lse = "lse" in self.tensors
        self.backward = problem.backward and self.has_lse
        # What the numbers along the last axis of statistics are.
        self.names: dict[str, list[str]] = {}
        # Of each query and head `[rows, query heads]`: D of the stored out, the sum of the magnitudes of its terms,
        # the sum of |dout|, the largest |out|, the norms of q and dout, and the LSE.
        self.queries = self._of_queries()
        self.keys = {name: self._norms(name) for name in ("k", "v")}

    # --- whole tensors

    def _real(self, name: str, array: Any) -> Any:
        """Returns a tensor with zeros in all rows that hold no token, where anything may lie. The run is over."""
        side = self.p.kv if name in ("k", "v", "dk", "dv") else self.p.q
        ends = np.flatnonzero(np.diff(np.concatenate([[False], ~side.real(), [False]]).astype(np.int8)))
        others = [slice(*both) for both in ends.reshape(-1, 2).tolist()]
        return self.ops.cleared(array, others, 1 if name == "lse" else 0)

    def _wide(self, name: str) -> Any:
        """Returns the type in which products of a tensor with another of its format are exact."""
        return self.ops.f64 if self.p.form(name) == "f32" else self.ops.f32

    def _pieces(self, name: str) -> list[slice]:
        rows, heads, lanes = self.p.shape(name)
        size = max(1, self.ops.most // max(1, heads * lanes))
        return [slice(start, min(rows, start + size)) for start in range(0, rows, size)]

    def _norms(self, name: str) -> Any:
        """Returns the Euclidean norms of rows' magnitudes `[rows, heads]`, or a little more."""

        def norm(rows: slice) -> Any:
            wide = self._wide(name)(self.tensors[name][rows])
            return self.ops.total(self._magnitudes(wide) ** 2)

        return self._whole(name, norm) ** 0.5 * UP

    def _whole(self, name: str, of: Any) -> Any:
        """Returns what a function gives for pieces of a tensor's rows, as f64 `[rows, heads]`."""
        found = self.ops.zeros(*self.p.shape(name)[:2])
        for rows in self._pieces(name):
            found[rows] = self.ops.f64(of(rows))
        return found

    def _products(self, one: str, other: str) -> tuple[Any, Any, Any]:
        """Returns the sums over lanes of products of two tensors, of their magnitudes, and of those of the first.

        Products of 16-bit numbers are exact in f32, where they neither overflow nor vanish.
        """
        parts = [self.ops.zeros(*self.p.shape(one)[:2]) for _ in range(3)]
        for rows in self._pieces(one):
            wide = self.ops.f64 if "f32" in (self.p.form(one), self.p.form(other)) else self.ops.f32
            x = wide(self.tensors[one][rows])
            product = x * wide(self.tensors[other][rows])
            for part, each in zip(parts, (product, abs(product), abs(x)), strict=True):
                part[rows] = self.ops.total(each)
        return tuple(parts)

    def _of_queries(self) -> dict[str, Any]:
        if not self.p.backward:
            return {}
        d, terms, l1 = self._products("dout", "out")
        largest = self._whole(
            "out", lambda rows: self.ops.largest(abs(self.ops.f32(self.tensors["out"][rows])), -1)
        )
        found = {
            "d": d,
            "terms": terms,
            "l1": l1,
            "out": largest,
            "q": self._norms("q"),
            "dout": self._norms("dout"),
        }
        if self.has_lse:
            found["lse"] = self.tensors["lse"].T
        return found

    def _magnitudes(self, array: Any) -> Any:
        magnitudes = abs(array)
        return self.ops.where(magnitudes > 0, magnitudes.clip(self.floor), magnitudes)

    # --- rows of queries

    def _head_pieces(self, elements: int) -> list[slice]:
        """Returns pieces of the KV heads, so that `elements` for each of them fit into a temporary array."""
        size = max(1, self.ops.most // max(1, elements))
        heads = self.p.heads_kv
        return [slice(start, min(heads, start + size)) for start in range(0, heads, size)]

    def _queries_of(self, array: Any, rows: Any, heads: slice) -> Any:
        """Returns query-side rows `[rows, query heads, …]` of KV heads as `[kv heads, rows · group, …]`, in f64."""
        group, count = self.p.group, heads.stop - heads.start
        part = self.ops.f64(array[rows, heads.start * group : heads.stop * group])
        part = part.reshape(part.shape[0], count, group, *part.shape[2:]).swapaxes(0, 1)
        return part.reshape(count, -1, *part.shape[3:])

    def _keys_of(self, array: Any, rows: Any, heads: slice) -> Any:
        """Returns key-side rows `[rows, kv heads, …]` as `[kv heads, rows, …]`, in f64."""
        return self.ops.f64(array[rows, heads]).swapaxes(0, 1)

    def _logits(self, products: Any) -> tuple[Any, Any]:
        """Returns logits, and the soft cap's derivative (1 without one)."""
        logits, cap = self.p.scale * products, self.p.softcap
        if cap is None:
            return logits, 1.0
        bent = self.ops.tanh(logits / cap)
        return cap * bent, 1 - bent**2

    def of_queries(self, block: Block) -> dict[str, np.ndarray]:
        """Returns the answers about rows of queries, `[rows, query heads, …]`: statistics, and lanes of out and dq."""
        width = max(len(block.rows) * self.p.group, self.p.dim_qk, self.p.dim_v)
        pieces = []
        for heads in self._head_pieces(width * (block.other.stop - block.other.start)):
            count = heads.stop - heads.start
            for name, array in self._of_query_heads(block, heads).items():
                array = self.ops.host(array).reshape(count, -1, self.p.group, *array.shape[2:]).swapaxes(0, 1)
                pieces.append((name, array.reshape(array.shape[0], -1, *array.shape[3:])))
        return joined(pieces)

    def _of_query_heads(self, block: Block, heads: slice) -> dict[str, Any]:
        ops, p, of = self.ops, self.p, self.tensors
        seen = block.seen(ops)
        seen = ops.stack([seen] * p.group, 1).reshape(-1, seen.shape[1])
        q = self._queries_of(of["q"], block.rows, heads)
        k, v = (self._keys_of(of[name], block.other, heads) for name in "kv")
        k_abs, v_abs = self._magnitudes(k), self._magnitudes(v)
        zero, low = ops.zeros(1), ops.zeros(1) - np.inf
        a = ops.largest(ops.where(seen, self._magnitudes(q) @ k_abs.swapaxes(1, 2), zero), -1)
        logits, slope = self._logits(q @ k.swapaxes(1, 2))
        largest = ops.largest(ops.where(seen, logits, low), -1)
        smallest = -ops.largest(ops.where(seen, -logits, low), -1)
        base = ops.where(ops.isfinite(largest), largest, zero)
        weights = ops.exp(ops.where(seen, logits - base[..., None], low))
        total, numerators, magnitudes = weights.sum(-1), weights @ v, weights @ v_abs
        got = self._queries_of(of["out"], block.rows, heads)
        statistics = {"largest": largest, "smallest": smallest, "sum": total, "a": a}
        whole = total
        if self.sinks is not None:
            sinks = self.sinks[None] + ops.zeros(len(block.rows), 1)
            statistics["sink"] = self._queries_of(sinks, slice(None), heads)
            whole = total + ops.exp(statistics["sink"] - base)
        error = got - numerators / ops.where(whole > 0, whole, whole + 1)[..., None]
        found = {"out": self._standing_out(error, magnitudes, [numerators, magnitudes, got])}
        value = ops.largest(ops.largest(v_abs, -1), -1)[:, None]
        statistics["value"] = value + total * 0
        if self.has_lse:
            statistics["lse"] = self._queries_of(of["lse"].T, block.rows, heads)
        if self.backward:
            rows = {name: self._queries_of(array, block.rows, heads) for name, array in self.queries.items()}
            lse = statistics["lse"][..., None]
            sees = seen & (lse > -np.inf)
            p_ij = ops.exp(ops.where(sees, logits - lse, low))
            dots = self._queries_of(of["dout"], block.rows, heads) @ v.swapaxes(1, 2)
            weighted = p_ij * dots
            most = ops.largest(self._keys_of(self.keys["v"], block.other, heads), -1)[:, None]
            statistics |= rows | {"dots": weighted.sum(-1), "dots_abs": abs(weighted).sum(-1)}
            statistics |= {"mass": p_ij.sum(-1), "b": rows["dout"] * most}
            x = dots - (statistics["dots"] if self.weighs_dots else rows["d"])[..., None]
            exact, got = p.scale * ((p_ij * x * slope) @ k), self._queries_of(of["dq"], block.rows, heads)
            coefficients = (p_ij * abs(x), p_ij, ops.f64(sees))
            px, ps, one = (p.scale * (each @ k_abs) for each in coefficients)
            found["dq"] = self._standing_out(got - exact, px + ps / 1024, [exact, px, ps, one, got])
        return found | self._stacked("query", statistics)

    def _stacked(self, side: str, statistics: dict[str, Any]) -> dict[str, Any]:
        """Returns statistics along a last axis, and keeps their names."""
        self.names[side] = list(statistics)
        return {"statistics": self.ops.stack([self.ops.f64(each) for each in statistics.values()], -1)}

    def _standing_out(self, error: Any, magnitudes: Any, parts: list[Any]) -> Any:
        """Returns the lanes that stand out: their numbers, and these parts of them, along a last axis."""
        ops = self.ops
        score = abs(error) / (magnitudes + 1e-30)
        score = ops.where(ops.isnan(score), ops.zeros(1) + np.inf, score)
        lanes = ops.top(score, LANES)
        return ops.stack([ops.f64(lanes), *(ops.take(part, lanes) for part in parts)], -1)

    # --- rows of keys

    def of_keys(self, block: Block) -> dict[str, np.ndarray]:
        """Returns the answers about rows of keys, `[rows, kv heads, …]`: statistics, and lanes of dk and dv."""
        width = max(len(block.rows), self.p.dim_qk, self.p.dim_v) * self.p.group
        pieces = self._head_pieces(width * (block.other.stop - block.other.start))
        found = [self._of_key_heads(block, heads) for heads in pieces]
        pieces = [
            (name, self.ops.host(array).swapaxes(0, 1)) for part in found for name, array in part.items()
        ]
        return joined(pieces)

    def _of_key_heads(self, block: Block, heads: slice) -> dict[str, Any]:
        ops, p, of = self.ops, self.p, self.tensors
        seen = block.seen(ops)
        # A row's group of heads is one behind the other, as `_queries_of` has them.
        seen = ops.stack([seen] * p.group, -1).reshape(seen.shape[0], -1)
        k, v = (self._keys_of(of[name], block.rows, heads) for name in "kv")
        q, dout = (self._queries_of(of[name], block.other, heads) for name in ("q", "dout"))
        rows = {name: self._queries_of(array, block.other, heads) for name, array in self.queries.items()}
        q_abs, dout_abs = self._magnitudes(q), self._magnitudes(dout)
        zero, low = ops.zeros(1), ops.zeros(1) - np.inf
        a = ops.largest(ops.where(seen, self._magnitudes(k) @ q_abs.swapaxes(1, 2), zero), -1)
        logits, slope = self._logits(k @ q.swapaxes(1, 2))
        lse = rows["lse"][:, None]
        sees = seen & (lse > -np.inf)
        p_ij = ops.exp(ops.where(sees, logits - lse, low))
        x = v @ dout.swapaxes(1, 2) - rows["d"][:, None]
        reads = ops.f64(sees)
        exact, ps, got = p_ij @ dout, p_ij @ dout_abs, self._keys_of(of["dv"], block.rows, heads)
        found = {"dv": self._standing_out(got - exact, ps, [exact, ps, reads @ dout_abs, got])}
        exact, got = p.scale * ((p_ij * x * slope) @ q), self._keys_of(of["dk"], block.rows, heads)
        px, ps, one = (p.scale * (each @ q_abs) for each in (p_ij * abs(x), p_ij, reads))
        found["dk"] = self._standing_out(got - exact, px + ps / 1024, [exact, px, ps, one, got])
        statistics = {"pairs": reads.sum(-1), "a": a}
        for name, each in rows.items():
            each = ops.where(ops.isfinite(each), abs(each), zero)
            statistics[name] = ops.largest(each, -1)[:, None] + a * 0
        norms = self._keys_of(self.keys["v"], block.rows, heads)
        return found | self._stacked("key", statistics | {"b": statistics["dout"] * norms})

    # --- laws

    def laws(self, sequences: list[dict[str, Any]]) -> np.ndarray:
        """Returns the sums of each sequence and KV head, `[sequences, kv heads, sums]`."""
        ops, p, of = self.ops, self.p, self.queries
        zero = ops.zeros(1)
        sums = {"q.dq": self._products("q", "dq"), "dout.out": (of["d"], of["terms"], of["l1"])}
        by_query = named(sums)
        by_query |= {
            "q·dout": of["q"] * of["dout"],
            "q·d": of["q"] * abs(of["d"]),
            "q": of["q"],
            "dout": of["dout"],
        }
        most = {name: ops.where(ops.isfinite(ops.f64(of[name])), abs(ops.f64(of[name])), zero) for name in of}
        sums = {"k.dk": self._products("k", "dk"), "v.dv": self._products("v", "dv")}
        by_key = named(sums)

        def of_group(arrays: dict[str, Any]) -> Any:
            grouped = (ops.f64(each).reshape(-1, p.heads_kv, p.group) for each in arrays.values())
            return ops.stack(list(grouped), -1)

        added, largest = of_group(by_query).sum(2), ops.largest(of_group(most), 2)
        keys = ops.stack(list(by_key.values()), -1)
        norms = ops.stack([self.keys["k"], self.keys["v"]], -1)
        self.names["law"] = [*by_query, *(f"most {name}" for name in most), *by_key, "most k", "most v"]
        found, nothing = [], ops.zeros(p.heads_kv, len(self.names["law"]))
        for sequence in sequences:
            q, kv = slice(*sequence["q"]), slice(*sequence["kv"])
            if q.start == q.stop or kv.start == kv.stop:
                found.append(nothing)
                continue
            parts = (added[q].sum(0), ops.largest(largest[q], 0), keys[kv].sum(0), ops.largest(norms[kv], 0))
            found.append(ops.joined(parts))
        return ops.host(ops.stack(found, 0) if found else nothing[None][:0])

    def no_numbers(self, name: str, real: list[list[int]]) -> list[int] | None:
        """Returns the number of real elements of a result that are no number, and the place of the first."""
        array = self.tensors[name]
        if not bool(no_number(self.ops, name, array).any()):
            return None
        count, place = 0, None
        for start, end in real:
            wrong = no_number(self.ops, name, array[:, start:end] if name == "lse" else array[start:end])
            found = int(wrong.sum())
            if found and place is None:
                # A whole tensor may be wrong, and is too large for the host.
                first = int(self.ops.host(wrong.reshape(wrong.shape[0], -1).any(-1)).argmax())
                place = [first, *np.argwhere(self.ops.host(wrong[first]))[0].tolist()]
                place[1 if name == "lse" else 0] += start
            count += found
        return None if place is None else [count, *place]


def no_number(ops: NumpyOps, name: str, array: Any) -> Any:
    """Returns which elements are NaN. In out, a mean of values, an infinity is wrong too; gradients overflow."""
    return ~ops.isfinite(array) if name == "out" else ops.isnan(array)


def named(sums: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Returns the parts of sums of products by their names."""
    parts = ("sum", "terms", "l1")
    return {
        f"{name} {part}": array for name, of in sums.items() for part, array in zip(parts, of, strict=True)
    }


def joined(pieces: list[tuple[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Returns answers about pieces of the heads as one, by name."""
    names = dict.fromkeys(name for name, _ in pieces)
    return {name: np.concatenate([array for other, array in pieces if other == name], 1) for name in names}
