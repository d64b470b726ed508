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
# The code of such an element in e4m3 and e5m2: a negative NaN in both. A conversion makes positive ones.
UNWRITTEN_8 = 0xFF

FORMATS = ("f32", "bf16", "fp16")
# Formats of one byte.
FP8 = ("e4m3", "e5m2")
# The unit roundoff of each format: half the distance from 1 to the next number.
UNIT = {"f32": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11}


def _e4m3() -> np.ndarray:
    """Returns the numbers of all 256 codes of e4m3, as its specification by OCP has them: 448 at most, no infinity."""
    code = np.arange(256)
    exponent, fraction = code >> 3 & 15, (code & 7).astype(np.float64)
    magnitude = np.where(exponent == 0, fraction / 8 * 2.0**-6, (1 + fraction / 8) * 2.0 ** (exponent - 7))
    magnitude[code & 0x7F == 0x7F] = np.nan
    return np.where(code >> 7 == 1, -magnitude, magnitude).astype(np.float32)


_E4M3 = _e4m3()
# The codes of finite numbers that are not negative; they rise with their numbers.
_E4M3_ORDER = np.arange(0x7F)


def narrow(values: np.ndarray, form: str) -> np.ndarray:
    """Returns f32 values that are numbers of a narrower format as that format's codes, of 16 bits or of 8."""
    if form == "e5m2":
        # The upper half of fp16. A NaN whose payload lies in the lower half would be an infinity.
        codes = (narrow(values, "fp16") >> 8).astype(np.uint8)
        codes[np.isnan(values)] |= 0x02
        return codes
    if form == "e4m3":
        places = _E4M3[_E4M3_ORDER].searchsorted(np.abs(values))
        codes = _E4M3_ORDER[np.minimum(places, len(_E4M3_ORDER) - 1)].astype(np.uint8)
        codes[np.isnan(values)] = 0x7F
        return codes | np.signbit(values).astype(np.uint8) << 7
    if form == "bf16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    if form == "fp16":
        # A large number in a padding row may overflow here; `same` then says that it is none of the format.
        with np.errstate(over="ignore", invalid="ignore"):
            return values.astype(np.float16).view(np.uint16)
    raise ValueError(f"{form!r} is no narrow format; use bf16, fp16, e4m3 or e5m2")


def widen(codes: np.ndarray, form: str) -> np.ndarray:
    """Returns codes of a narrower format as f32. The code of an unwritten element becomes its f32 bits."""
    if form in FP8:
        numbers = _E4M3[codes] if form == "e4m3" else widen(codes.astype(np.uint16) << 8, "fp16")
        bits = numbers.view(np.uint32)
        bits[codes == UNWRITTEN_8] = UNWRITTEN
        return bits.view(np.float32)
    if form == "bf16":
        bits = codes.astype(np.uint32) << 16
    elif form == "fp16":
        with np.errstate(invalid="ignore"):
            bits = codes.view(np.float16).astype(np.float32).view(np.uint32)
    else:
        raise ValueError(f"{form!r} is no narrow format; use bf16, fp16, e4m3 or e5m2")
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
