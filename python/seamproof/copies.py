"""Copies of arrays: what a kernel was given, and what a caller who waits for the current stream alone finds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Copies:
    """Copies of arrays by name, or by another key."""

    arrays: dict[Any, Any]

    def differing(self, other: Copies) -> list[str]:
        """Returns the names of the arrays that differ in a bit from those of another set of copies."""
        pairs = ((name, _bits(array), _bits(other.arrays[name])) for name, array in self.arrays.items())
        return [name for name, one, two in pairs if bool((one != two).any())]


@dataclass(frozen=True)
class TorchCopies(Copies):
    """Copies of torch's arrays, which lie one behind the other: they are made, compared and moved at once."""

    bytes: Any

    @classmethod
    def of(cls, torch: Any, arrays: Mapping[Any, Any]) -> TorchCopies:
        """Returns copies, made as the arrays are when the current stream comes to them."""
        # Wide elements first, so that each array begins at a multiple of its elements' size.
        named = sorted(arrays.items(), key=lambda item: -item[1].element_size())
        # The stride of a single element may be anything, and only 1 can be viewed as bytes.
        flat = [array.detach().contiguous().reshape(-1) for _, array in named]
        flat = [array.as_strided(array.shape, (1,)).view(torch.uint8) for array in flat]
        whole = torch.cat(flat) if flat else None
        return cls._split(whole, [(name, array.dtype, array.shape, array.nbytes) for name, array in named])

    @classmethod
    def _split(cls, whole: Any, places: Iterable[tuple[Any, Any, Any, int]]) -> TorchCopies:
        arrays, at = {}, 0
        for name, dtype, shape, size in places:
            arrays[name] = whole[at : at + size].view(dtype).reshape(shape)
            at += size
        return cls(arrays, whole)

    def moved(self, torch: Any, whole: np.ndarray) -> dict[Any, Any]:
        """Returns the arrays out of their bytes on the host."""
        places = [(name, array.dtype, array.shape, array.nbytes) for name, array in self.arrays.items()]
        # A view needs bytes that begin at a multiple of its elements' size, and a stride of 1, which torch does not
        # give an array of numpy without elements.
        whole = torch.from_numpy(whole.copy()).as_strided(whole.shape, (1,))
        return self._split(whole, places).arrays

    def differing(self, other: Copies) -> list[str]:
        def codes(array: Any) -> Any:
            return array.reshape(-1).view(self.bytes.dtype)

        pairs = ((name, codes(array), codes(other.arrays[name])) for name, array in self.arrays.items())
        return [name for name, one, two in pairs if bool((one != two).any())]


def _bits(array: Any) -> Any:
    """Returns the elements of an array of numpy or CuPy as integers, so that NaN are compared too."""
    return array.ravel().view(f"u{array.dtype.itemsize}")
