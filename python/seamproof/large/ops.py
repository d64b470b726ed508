"""The few operations on arrays that numpy and torch name differently. Everything else is common to both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..arrays import Numpy, numpy_dtype

# Elements of a temporary array, at most: a gigabyte of f64 on a device, and what stays in a CPU's caches.
DEVICE_MOST, HOST_MOST = 1 << 27, 1 << 20


class NumpyOps:
    """numpy, for the arrays of every library but torch."""

    most = HOST_MOST

    def __init__(self, library: Numpy):
        self.library = library

    def full(self, shape: Sequence[int], form: str, value: float) -> Any:
        """Returns an array of a format that is full of a number."""
        return np.full(shape, value, numpy_dtype(form))

    def given(self, array: Any, form: str) -> Any:
        """Returns a filled array as the kernel gets it."""
        return array if self.library.name == "numpy" else self.library.put(array.astype(np.float32), form)

    def read(self, array: Any, form: str, what: str) -> Any:
        """Returns a kernel's array of a format as one that can be computed with."""
        return self.library.get(array, form, what)

    def integers(self, values: Any) -> Any:
        """Returns integers of 64 bits."""
        return np.asarray(values, np.int64)

    def numbers(self, values: Sequence[float]) -> Any:
        """Returns numbers in f64."""
        return np.asarray(values, np.float64)

    def zeros(self, *shape: int) -> Any:
        return np.zeros(shape)

    def stored(self, values: Any, form: str) -> Any:
        """Returns f32 values rounded to a format."""
        return values.astype(numpy_dtype(form))

    def f32(self, array: Any) -> Any:
        return array.astype(np.float32)

    def f64(self, array: Any) -> Any:
        return array.astype(np.float64)

    def largest(self, array: Any, axis: int) -> Any:
        return array.max(axis)

    def where(self, condition: Any, one: Any, other: Any) -> Any:
        return np.where(condition, one, other)

    def cleared(self, array: Any, rows: Sequence[slice], axis: int) -> Any:
        """Returns an array with zeros in rows along an axis. It is the same one where that can be written to."""
        if rows and not array.flags.writeable:
            array = array.copy()
        for part in rows:
            array[(slice(None),) * axis + (part,)] = 0
        return array

    def lengthened(self, array: Any, count: int) -> Any:
        """Returns an array with so many further rows, of NaN."""
        return np.concatenate([array, np.full((count, *array.shape[1:]), np.nan, array.dtype)])

    def moved(self, array: Any, axis: int) -> Any:
        """Returns an array whose elements are moved by one along an axis."""
        return np.roll(array, 1, axis)

    def exp(self, array: Any) -> Any:
        with np.errstate(over="ignore", invalid="ignore"):
            return np.exp(array)

    def tanh(self, array: Any) -> Any:
        return np.tanh(array)

    def total(self, array: Any) -> Any:
        """Returns the sum along the last axis in f64."""
        return array.sum(-1, dtype=np.float64)

    def joined(self, arrays: Sequence[Any]) -> Any:
        """Returns arrays one behind the other along the last axis."""
        return np.concatenate(arrays, -1)

    def add_at(self, sums: Any, places: Any, terms: Any) -> None:
        """Adds terms to rows of sums, of which some may be named more than once."""
        np.add.at(sums, places, terms)

    def isfinite(self, array: Any) -> Any:
        return np.isfinite(array)

    def bits(self, array: Any) -> int:
        """Returns a sum over the bits of a tensor, which shows whether somebody wrote to it."""
        return int(array.view(f"i{array.dtype.itemsize}").sum(dtype=np.int64))

    def isnan(self, array: Any) -> Any:
        return np.isnan(array)

    def stack(self, arrays: Sequence[Any], axis: int) -> Any:
        return np.stack(arrays, axis)

    def top(self, scores: Any, count: int) -> Any:
        """Returns the places of the largest numbers along the last axis."""
        return np.argsort(-scores, axis=-1, kind="stable")[..., :count]

    def take(self, array: Any, places: Any) -> Any:
        """Returns the elements at places along the last axis."""
        return np.take_along_axis(array, places, -1)

    def host(self, array: Any) -> np.ndarray:
        """Returns an array as f64 of numpy."""
        return np.asarray(array, np.float64)


class TorchOps(NumpyOps):
    """torch, on the device of the kernel."""

    def __init__(self, library: Any):
        super().__init__(library)
        self.torch, self.device = library.torch, library.device
        self.most = DEVICE_MOST if library.asynchronous else HOST_MOST

    def full(self, shape: Sequence[int], form: str, value: float) -> Any:
        return self.torch.full(tuple(shape), value, dtype=self.library.dtype(form), device=self.device)

    def given(self, array: Any, form: str) -> Any:
        return array

    def read(self, array: Any, form: str, what: str) -> Any:
        if not self.torch.is_tensor(array):
            raise TypeError(f"{what} is a {type(array).__name__}, not a tensor of torch")
        # As everywhere, f64 is taken for f32 and rounded to it.
        dtype, f64 = self.library.dtype(form), self.torch.float64
        if array.dtype != dtype and not (form == "f32" and array.dtype == f64):
            raise TypeError(f"{what} came back as {array.dtype}, but this problem asks for {form}")
        return array.detach().to(self.device, dtype)

    def integers(self, values: Any) -> Any:
        return self.torch.as_tensor(np.asarray(values, np.int64), device=self.device)

    def numbers(self, values: Sequence[float]) -> Any:
        return self.torch.as_tensor(np.asarray(values, np.float64), device=self.device)

    def zeros(self, *shape: int) -> Any:
        return self.torch.zeros(shape, dtype=self.torch.float64, device=self.device)

    def stored(self, values: Any, form: str) -> Any:
        return values.to(self.library.dtype(form))

    def f32(self, array: Any) -> Any:
        return array.to(self.torch.float32)

    def f64(self, array: Any) -> Any:
        return array.to(self.torch.float64)

    def largest(self, array: Any, axis: int) -> Any:
        return array.amax(axis)

    def where(self, condition: Any, one: Any, other: Any) -> Any:
        return self.torch.where(condition, one, other)

    def cleared(self, array: Any, rows: Sequence[slice], axis: int) -> Any:
        # Results of `torch.inference_mode`, and those whose rows are one in memory, cannot be written to.
        if rows and (array.is_inference() or 0 in array.stride()):
            array = array.clone()
        for part in rows:
            array[(slice(None),) * axis + (part,)] = 0
        return array

    def lengthened(self, array: Any, count: int) -> Any:
        return self.torch.cat([array, array.new_full((count, *array.shape[1:]), np.nan)])

    def moved(self, array: Any, axis: int) -> Any:
        return self.torch.roll(array, 1, axis)

    def exp(self, array: Any) -> Any:
        return self.torch.exp(array)

    def tanh(self, array: Any) -> Any:
        return self.torch.tanh(array)

    def total(self, array: Any) -> Any:
        return array.sum(-1, dtype=self.torch.float64)

    def joined(self, arrays: Sequence[Any]) -> Any:
        return self.torch.cat(list(arrays), -1)

    def add_at(self, sums: Any, places: Any, terms: Any) -> None:
        sums.index_add_(0, places, terms)

    def isfinite(self, array: Any) -> Any:
        return self.torch.isfinite(array)

    def bits(self, array: Any) -> int:
        kind = {2: self.torch.int16, 4: self.torch.int32}[array.element_size()]
        return int(array.view(kind).sum(dtype=self.torch.int64))

    def isnan(self, array: Any) -> Any:
        return self.torch.isnan(array)

    def stack(self, arrays: Sequence[Any], axis: int) -> Any:
        return self.torch.stack(list(arrays), axis)

    def top(self, scores: Any, count: int) -> Any:
        return self.torch.topk(scores, min(count, scores.shape[-1]), dim=-1).indices

    def take(self, array: Any, places: Any) -> Any:
        return self.torch.gather(array, -1, places)

    def host(self, array: Any) -> np.ndarray:
        return array.to(self.torch.float64).cpu().numpy()


def ops(library: Numpy) -> NumpyOps:
    """Returns the operations on a library's arrays."""
    return TorchOps(library) if library.name == "torch" else NumpyOps(library)
