"""The helper functions of context parallelism over packed rows (THD), by their definition, in numpy.

Sequences lie one behind the other: `cu` has where each begins and the last ends, padding included. Rows behind the
last belong to nobody. The *halves* of a sequence are its two chunks on a rank, of equally many rows; the layout of
halves has one half of each sequence, one behind the other. Names are those of TransformerEngine's functions without
`thd_`, which `python -m seamproof.helpers` holds to these.
"""

from __future__ import annotations

import itertools

import numpy as np

# What may be done to a half of a gradient, by TransformerEngine's words.
UPDATES = (
    ("add", "none"), ("copy", "none"), ("none", "add"), ("none", "copy"),
    ("add", "copy"), ("copy", "add"), ("copy", "zero"), ("zero", "copy"),
)  # fmt: skip


def get_partitioned_indices(cu: np.ndarray, size: int, rank: int) -> np.ndarray:
    """Returns the row, of the whole pack, of each of a rank's rows: chunks `rank` and `2·size − 1 − rank`."""
    rows = [np.zeros(0, np.int64)]
    for first, end in itertools.pairwise(np.asarray(cu).tolist()):
        chunks = np.arange(first, end).reshape(2 * size, -1)
        rows += [chunks[rank], chunks[2 * size - 1 - rank]]
    return np.concatenate(rows)


def rank_order(cu: np.ndarray, size: int) -> np.ndarray:
    """Returns the row, in the order of sequences, of each row in the order of ranks."""
    return np.concatenate([get_partitioned_indices(cu, size, rank) for rank in range(size)])


def half_rows(cu: np.ndarray, half: int) -> np.ndarray:
    """Returns the row of each row of a half, 0 or 1, in the layout of halves."""
    rows = [np.zeros(0, np.int64)]
    for first, end in itertools.pairwise(np.asarray(cu).tolist()):
        rows.append(np.arange(first, end).reshape(2, -1)[half])
    return np.concatenate(rows)


def read_half_tensor(tensor: np.ndarray, cu: np.ndarray, half: int) -> np.ndarray:
    """Returns the rows of a half; rows are the third dimension from behind."""
    return np.take(tensor, half_rows(cu, half), axis=-3)


def log_add(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns ln(e^a + e^b) in f32; −∞ adds nothing."""
    return np.logaddexp(a.astype(np.float64), b.astype(np.float64)).astype(np.float32)


def second_half_lse_correction(lse: np.ndarray, step: np.ndarray, cu: np.ndarray) -> np.ndarray:
    """Returns an LSE `[heads, rows]` whose second halves have those of a step, in the layout of halves, added."""
    rows, merged = half_rows(cu, 1), lse.copy()
    merged[:, rows] = log_add(lse[:, rows], step[:, : len(rows)])
    return merged


def read_second_half_lse(lse: np.ndarray, cu: np.ndarray, width: int) -> np.ndarray:
    """Returns the second halves of an LSE, and 0 behind them."""
    rows = half_rows(cu, 1)
    half = np.zeros((len(lse), width), np.float32)
    half[:, : len(rows)] = lse[:, rows]
    return half


def out_correction(
    out: np.ndarray,
    step: np.ndarray,
    old_lse: np.ndarray,
    lse: np.ndarray,
    step_lse: np.ndarray,
    cu: np.ndarray,
    second: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns an out `[rows, heads, dim]` into which a step is merged, and the size of what was added up, in f64.

    Each part has its share of the new LSE. `second` says that the step has second halves alone.
    """
    rows = half_rows(cu, 1) if second else np.arange(int(cu[-1]))

    def shares(of: np.ndarray) -> np.ndarray:
        return np.exp(of.astype(np.float64) - lse[:, rows].astype(np.float64)).T[:, :, None]

    merged, size = out.astype(np.float64), np.zeros(out.shape)
    parts = (merged[rows] * shares(old_lse[:, rows]), step[: len(rows)] * shares(step_lse[:, : len(rows)]))
    merged[rows], size[rows] = sum(parts), sum(map(np.abs, parts))
    return merged, size


def grad_correction(
    grad: np.ndarray, step: np.ndarray, cu: np.ndarray, first: str, second: str
) -> np.ndarray:
    """Returns a gradient in f32 whose halves are updated, each by one word of `UPDATES`.

    The step has the rows of all, and with `"none"` or `"zero"` the other half alone, in the layout of halves.
    """
    updated = grad.astype(np.float32)
    is_half = not {"none", "zero"}.isdisjoint((first, second))
    for half, update in enumerate((first, second)):
        rows = half_rows(cu, half)
        own = step.astype(np.float32)[..., : len(rows), :, :] if is_half else np.take(step, rows, axis=-3)
        if update == "add":
            updated[..., rows, :, :] += own
        elif update != "none":
            updated[..., rows, :, :] = own if update == "copy" else 0
    return updated


def copy_valid_tokens(
    out: np.ndarray, step: np.ndarray, places: np.ndarray, lengths: np.ndarray
) -> np.ndarray:
    """Returns `out` with the real rows of a step: as many from each place as `lengths`, running sums, say."""
    rows = [np.zeros(0, np.int64)]
    rows += [at + np.arange(count) for at, count in zip(places[:-1], np.diff(lengths), strict=True)]
    merged, real = out.copy(), np.concatenate(rows)
    merged[real] = step[real]
    return merged


def convert_thd_to_bshd(tensor: np.ndarray, cu: np.ndarray, positions: int) -> np.ndarray:
    """Returns a block of `positions` rows for each sequence, with 0 behind its own."""
    blocks = np.zeros((len(cu) - 1, positions, *tensor.shape[1:]), tensor.dtype)
    for block, (first, end) in zip(blocks, itertools.pairwise(np.asarray(cu).tolist()), strict=True):
        block[: end - first] = tensor[first:end]
    return blocks


def convert_bshd_to_thd(blocks: np.ndarray, cu: np.ndarray, rows: int) -> np.ndarray:
    """Returns the rows of all blocks as a pack of `rows` rows, with 0 behind the last sequence."""
    tensor = np.zeros((rows, *blocks.shape[2:]), blocks.dtype)
    for block, (first, end) in zip(blocks, itertools.pairwise(np.asarray(cu).tolist()), strict=True):
        tensor[first:end] = block[: end - first]
    return tensor
