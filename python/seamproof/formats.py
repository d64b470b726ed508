"""Number formats, and the sentinel that marks what a kernel never wrote.

Tensors travel as f32, whose values include those of every narrower format. So the way from f32 to a tensor's format
and back changes no bit.
"""

from __future__ import annotations

import numpy as np

# The f32 bits of an element that was never written; a NaN.
UNWRITTEN = 0x7FE5EA11
# Their upper half: the code of such an element in bf16 and fp16, a NaN in both.
UNWRITTEN_16 = 0x7FE5

FORMATS = ("f32", "bf16", "fp16")
# The unit roundoff of each format: half the distance from 1 to the next number.
UNIT = {"f32": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11}


def narrow(values: np.ndarray, form: str) -> np.ndarray:
    """Returns f32 values that are numbers of a 16-bit format as that format's codes."""
    if form == "bf16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    if form == "fp16":
        # A large number in a padding row may overflow here; `same` then says that it is none of the format.
        with np.errstate(over="ignore", invalid="ignore"):
            return values.astype(np.float16).view(np.uint16)
    raise ValueError(f"{form!r} is no 16-bit format; use bf16 or fp16")


def widen(codes: np.ndarray, form: str) -> np.ndarray:
    """Returns codes of a 16-bit format as f32. The code of an unwritten element becomes its f32 bits."""
    if form == "bf16":
        bits = codes.astype(np.uint32) << 16
    elif form == "fp16":
        with np.errstate(invalid="ignore"):
            bits = codes.view(np.float16).astype(np.float32).view(np.uint32)
    else:
        raise ValueError(f"{form!r} is no 16-bit format; use bf16 or fp16")
    bits[codes == UNWRITTEN_16] = UNWRITTEN
    return bits.view(np.float32)


def same(one: np.ndarray, other: np.ndarray) -> bool:
    """Returns whether two f32 arrays have the same bits; any NaN is the same as any other."""
    if one.shape != other.shape:
        return False
    if np.array_equal(one.view(np.uint32), other.view(np.uint32)):
        return True
    differ = one.view(np.uint32) != other.view(np.uint32)
    return bool(np.all(np.isnan(one[differ]) & np.isnan(other[differ])))


def unwritten(shape: tuple[int, ...]) -> np.ndarray:
    """Returns an f32 array in which nothing was written yet."""
    return np.full(shape, UNWRITTEN, np.uint32).view(np.float32)


def is_unwritten(values: np.ndarray) -> np.ndarray:
    """Returns which elements of an f32 array were never written."""
    return values.view(np.uint32) == UNWRITTEN
