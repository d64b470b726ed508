"""A run: the rows of one sequence on one side."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Run:
    """Rows of one sequence on one side: `offset, offset + step, …`; `len` real ones, `span` owned ones."""

    offset: int
    len: int
    span: int
    step: int = 1

    @property
    def end(self) -> int:
        """One past the last owned row."""
        return self.offset + (self.step * (self.span - 1) + 1 if self.span else 0)

    def real_rows(self) -> slice:
        """Returns the rows that hold tokens."""
        return slice(self.offset, self.offset + self.step * self.len, self.step)

    def owned_rows(self) -> slice:
        """Returns the rows that the sequence owns, its padding included."""
        return slice(self.offset, self.offset + self.step * self.span, self.step)
