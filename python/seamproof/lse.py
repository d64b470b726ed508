"""Forms of the LSE, and the one place where they are converted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .errors import DeclarationError
from .formats import is_unwritten, unwritten

if TYPE_CHECKING:
    from .problem import Problem

ORDERS = {
    "ht": "[heads, rows]",
    "th": "[rows, heads]",
    "bhs": "[sequences, heads, at least the longest length]",
}


@dataclass(frozen=True)
class LseForm:
    """How a kernel returns the logarithm of each row's sum.

    `base` is `"e"` or `"2"`. `order` is `"ht"` for `[heads, rows]`, `"th"` for `[rows, heads]`, or `"bhs"` for
    `[sequences, heads, positions]`. `empty` is what a row without keys has: `"-inf"` or `"+inf"`. Rows, or positions,
    are padded to a multiple of `multiple`, as cuDNN and FlashAttention pad them to one of 128; what the padding holds
    says nothing.
    """

    base: str = "e"
    order: str = "ht"
    empty: str = "-inf"
    multiple: int = 1

    def __post_init__(self) -> None:
        if self.multiple < 1:
            raise DeclarationError(f"lse: multiple={self.multiple} is out of range; use 1 or more")
        for field, known in (("base", ("e", "2")), ("order", tuple(ORDERS)), ("empty", ("-inf", "+inf"))):
            if getattr(self, field) not in known:
                raise DeclarationError(
                    f"lse: {field}={getattr(self, field)!r} is not known; use one of {known}"
                )

    def standard(self, values: np.ndarray, problem: Problem) -> np.ndarray:
        """Returns the statistic as the judge reads it: natural, f32, `[heads, rows]`, −∞ for a row without keys."""
        values = self._by_head(values, problem)
        if self.base == "2":
            missing = is_unwritten(values)
            natural = (values.astype(np.float64) * np.log(2.0)).astype(np.float32)
            values = np.where(missing, values, natural)
        if self.empty == "+inf" and problem.sink == "none":
            # Anywhere else a +∞ stays, and is a finding.
            rows = problem.blind_rows()
            blind = values[:, rows]
            values = values.copy()
            values[:, rows] = np.where(np.isposinf(blind), -np.inf, blind)
        return np.ascontiguousarray(values, np.float32)

    def _by_head(self, values: np.ndarray, problem: Problem) -> np.ndarray:
        heads, rows = problem.heads_q, problem.q.rows
        if self.order == "bhs":
            return self._from_batch(values, problem)
        if self.order == "th":
            values = values.T if values.ndim == 2 else values
        if self.multiple > 1:
            self._hold_shape(values, (heads, -(-rows // self.multiple) * self.multiple))
            return values[:, :rows]
        if values.ndim == 2 and values.shape[0] == heads and values.shape[1] < rows:
            # The kernel returned no slack.
            whole = unwritten((heads, rows))
            whole[:, : values.shape[1]] = values
            return whole
        return values

    def _hold_shape(self, values: np.ndarray, expected: tuple[int, int]) -> None:
        """Raises where an LSE by heads does not have the padded rows that are declared."""
        if values.shape != expected:
            got, asked = (values.T.shape, expected[::-1]) if self.order == "th" else (values.shape, expected)
            raise ValueError(f"lse has shape {got}; rows in multiples of {self.multiple} ask for {asked}")

    def _from_batch(self, values: np.ndarray, problem: Problem) -> np.ndarray:
        expected = (len(problem.sequences), problem.heads_q, problem.q.max_length)
        if values.ndim != 3 or values.shape[:2] != expected[:2] or values.shape[2] < expected[2]:
            raise ValueError(f"lse has shape {values.shape}; order='bhs' asks for at least {expected}")
        if values.shape[2] % self.multiple:
            raise ValueError(f"lse has shape {values.shape}; the last must be a multiple of {self.multiple}")
        whole = unwritten((problem.heads_q, problem.q.rows))
        for index, run in enumerate(problem.q.runs):
            whole[:, run.real_rows()] = values[index, :, : run.len]
        return whole


def lse(base: str = "e", order: str = "ht", empty: str = "-inf", multiple: int = 1) -> LseForm:
    """Returns the form in which a kernel returns the LSE; see `LseForm`."""
    return LseForm(base, order, empty, multiple)
