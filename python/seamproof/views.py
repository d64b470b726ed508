"""Arrays that are not contiguous: the same elements, laid out in memory as callers of kernels lay them out.

A *view* has NaN between its elements where its rows lie apart, so that a kernel that goes by the wrong stride shows. An
adapter of a kernel that takes strides asks for one with `p.view(q, "q")`.
"""

import hashlib

import numpy as np

# What is drawn for an input: plain memory, lanes in wider rows, heads before rows, rows apart, a stride of 0.
KINDS = ("plain", "lanes", "heads", "rows", "broadcast")


def kind_of(seed: int, name: str) -> str:
    """Returns how an input lies in a problem with this seed of its values."""
    return KINDS[hashlib.blake2b(f"{seed} {name}".encode()).digest()[0] % len(KINDS)]


# --- what a script carries begins here


def laid_out(array, kind):
    """Returns an array `[rows, heads, lanes]` with the same elements, laid out in another way.

    Of an array whose rows are all alike `"broadcast"` returns one row with a stride of 0, unless each row is to have a
    gradient of its own. Any other stays as it is.
    """
    rows, heads, lanes = array.shape
    torch = hasattr(array, "new_full")
    if (
        kind == "broadcast"
        and rows
        and not (torch and array.requires_grad)
        and bool((array == array[:1]).all())
    ):
        return array[:1].expand(rows, heads, lanes) if torch else np.broadcast_to(array[:1], array.shape)
    shapes = {
        "lanes": (rows, heads, lanes + 8),
        "heads": (heads, rows, lanes),
        "rows": (2 * rows, heads, lanes),
    }
    if kind not in shapes:
        return array
    nan = float("nan")
    base = array.new_full(shapes[kind], nan) if torch else np.full(shapes[kind], nan, array.dtype)
    view = {"lanes": base[..., :lanes], "heads": base.swapaxes(0, 1), "rows": base[::2]}[kind]
    view[...] = array
    return view
