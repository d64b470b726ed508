"""TransformerEngine's helper functions of packed rows beside their definition: `python -m seamproof.helpers`.

Each function gets drawn packs with padding and empty sequences, in bf16, fp16 and f32. What only moves rows, counts or
adds once must be the same; sums of exponentials are held to bounds by the formats' units. A line says how each function
did. The exit code is 2 where one differs, and 1 where TransformerEngine or a GPU is missing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import (
    UPDATES,
    convert_bshd_to_thd,
    convert_thd_to_bshd,
    copy_valid_tokens,
    get_partitioned_indices,
    grad_correction,
    half_rows,
    log_add,
    out_correction,
    rank_order,
    read_half_tensor,
    read_second_half_lse,
    second_half_lse_correction,
)

# The largest relative error of one rounding, and the smallest number, of each format.
UNITS = {"bfloat16": (2**-8, 2**-133), "float16": (2**-11, 2**-24), "float32": (2**-24, 2**-149)}
# What exponentials, logarithms and their arguments, of at most 8, lose in f32.
EXPONENTIAL = 2**-20


@dataclass(frozen=True)
class Compared:
    """A result, what it must be, and how far it may be from that."""

    what: str
    got: Any
    want: np.ndarray
    bound: np.ndarray | float = 0.0

    def wrong(self) -> str | None:
        """Returns words about the first element that is off."""
        got = host(self.got)
        if got.shape != self.want.shape:
            return f"{self.what}: shape {list(got.shape)}, not {list(self.want.shape)}"
        same = (got == self.want) | (np.abs(got - self.want) <= self.bound)
        if same.all():
            return None
        at = tuple(int(index) for index in np.argwhere(~same)[0])
        return f"{self.what}: {got[at]} at {list(at)}, not {self.want[at]}; {(~same).sum()} of {same.size} differ"


def host(tensor: Any) -> np.ndarray:
    """Returns a tensor's numbers."""
    return tensor.detach().cpu().double().numpy()


class Pack:
    """A drawn pack on a rank: `cu` has where sequences begin and the last ends, behind which are rows of nobody."""

    def __init__(self, torch: Any, device: str, seed: int, number: int):
        self.torch, self.device = torch, device
        self.random = np.random.default_rng([seed, number])
        self.size = int(self.random.integers(1, 5))
        self.form = list(UNITS)[number % len(UNITS)]
        halves = self.random.choice([0, 0, 1, 2, 5, 33, 100], int(self.random.integers(1, 7)))
        # A call without any row is refused by some functions.
        halves[-1] = max(halves[-1], 1)
        self.spans = 2 * halves
        self.cu = np.concatenate([[0], np.cumsum(self.spans)])
        self.rows = int(self.cu[-1]) + int(self.random.choice([0, 0, 2, 30]))
        self.heads, self.dim = int(self.random.integers(1, 4)), int(self.random.choice([8, 16, 64, 72]))

    def numbers(self, *shape: int) -> np.ndarray:
        """Returns numbers that every format has, of which sums are rounded."""
        return self.random.integers(-128, 129, shape).astype(np.float32) / 32

    def tensor(self, values: np.ndarray, form: str | None = None) -> Any:
        """Returns numbers in a format, where the functions run."""
        return self.torch.from_numpy(values.copy()).to(self.device, getattr(self.torch, form or self.form))

    def table(self, numbers: np.ndarray) -> Any:
        """Returns whole numbers as a table of i32."""
        return self.torch.from_numpy(np.asarray(numbers, np.int32)).to(self.device)

    def rounded(self, values: np.ndarray) -> np.ndarray:
        """Returns numbers rounded to the format."""
        return host(self.torch.from_numpy(values).to(getattr(self.torch, self.form)))

    def rows_of(self, *leading: int, rows: int | None = None) -> np.ndarray:
        """Returns numbers for rows of heads, of which there may be several tensors."""
        return self.numbers(*leading, self.rows if rows is None else rows, self.heads, self.dim)


# --- statistics, `[heads, rows]` or a block for each sequence


def blocked(packed: np.ndarray, cu: np.ndarray, width: int, fill: np.ndarray) -> np.ndarray:
    """Returns a statistic `[heads, rows]` as blocks `[sequences, heads, width]`, with `fill` behind each sequence."""
    blocks = fill.copy()
    for block, first, end in zip(blocks, cu[:-1], cu[1:], strict=True):
        block[:, : end - first] = packed[:, first:end]
    assert blocks.shape[2] == width
    return blocks


def unblocked(blocks: np.ndarray, cu: np.ndarray) -> np.ndarray:
    """Returns the statistic of which blocks are."""
    parts = [block[:, : end - first] for block, first, end in zip(blocks, cu[:-1], cu[1:], strict=True)]
    return np.concatenate(parts, axis=1)


@dataclass(frozen=True)
class Statistics:
    """Drawn LSEs of all rows and of a step's, as the functions take them and as `[heads, rows]`."""

    whole: np.ndarray
    step: np.ndarray
    packed: tuple[np.ndarray, np.ndarray]


def statistics(pack: Pack, is_packed: bool, halves: bool) -> Statistics:
    """Returns LSEs; those of a step are of second halves alone, or of all rows."""
    cu = pack.cu // 2 if halves else pack.cu
    if is_packed:
        step = pack.numbers(pack.heads, (pack.rows // 2 if halves else pack.rows) + 3 * int(halves))
        return Statistics(whole := pack.numbers(pack.heads, pack.rows), step, (whole, step))
    width = int(pack.spans.max()) + 2
    whole = pack.numbers(len(pack.spans), pack.heads, width)
    step = pack.numbers(len(pack.spans), pack.heads, width // 2 if halves else width)
    return Statistics(whole, step, (unblocked(whole, pack.cu), unblocked(step, cu)))


def again(pack: Pack, of: Statistics, packed: np.ndarray, cu: np.ndarray) -> np.ndarray:
    """Returns a statistic `[heads, rows]` as the functions have it; rows of nobody stay."""
    if of.whole.ndim == 2:
        return packed
    return blocked(packed, cu, of.whole.shape[2], of.whole)


# --- the functions

Check = Callable[[Any, Pack], Iterator[Compared]]
CHECKS: dict[str, Check] = {}


def of(name: str) -> Callable[[Check], Check]:
    """Registers the check of a function."""

    def registered(check: Check) -> Check:
        CHECKS[name] = check
        return check

    return registered


@of("thd_get_partitioned_indices")
def partitioned_indices(library: Any, pack: Pack) -> Iterator[Compared]:
    cu = pack.cu * pack.size
    for rank in range(pack.size):
        got = library.thd_get_partitioned_indices(pack.table(cu), int(cu[-1]), pack.size, rank)
        yield Compared(f"rank {rank}", got, get_partitioned_indices(cu, pack.size, rank).astype(np.float64))


@of("thd_sequence_order_to_cp_rank_order")
def to_ranks(library: Any, pack: Pack) -> Iterator[Compared]:
    cu = pack.cu * pack.size
    x = pack.rows_of(rows=int(cu[-1]))
    got = library.thd_sequence_order_to_cp_rank_order(pack.tensor(x), pack.table(cu), pack.size, len(x))
    yield Compared("rows", got, x[rank_order(cu, pack.size)])


@of("thd_cp_rank_order_to_sequence_order")
def to_sequences(library: Any, pack: Pack) -> Iterator[Compared]:
    cu = pack.cu * pack.size
    x = pack.rows_of(rows=int(cu[-1]))
    got = library.thd_cp_rank_order_to_sequence_order(pack.tensor(x), pack.table(cu), pack.size, len(x))
    yield Compared("rows", got, x[rank_order(cu, pack.size).argsort()])


@of("thd_copy_valid_tokens_from_per_split_to_rank_local")
def copied(library: Any, pack: Pack) -> Iterator[Compared]:
    places = pack.cu.copy()
    if pack.random.random() < 0.5:
        # Those of a later step begin behind row 0.
        places[:-1] += pack.spans // 2
    lengths = pack.random.integers(0, np.diff(places) + 1)
    real = np.concatenate([[0], np.cumsum(lengths)])
    out, step = pack.rows_of(), pack.rows_of()
    got = pack.tensor(out)
    library.thd_copy_valid_tokens_from_per_split_to_rank_local(
        got, pack.tensor(step), pack.table(places), pack.table(real)
    )
    yield Compared("out", got, copy_valid_tokens(out, step, places, real))


@of("thd_read_half_tensor")
def half(library: Any, pack: Pack) -> Iterator[Compared]:
    for leading in ((), (2,)):
        x = pack.rows_of(*leading)
        for number in (0, 1):
            got = library.thd_read_half_tensor(pack.tensor(x), pack.table(pack.cu), number)
            # What lies behind the last half is nobody's.
            owned = got[..., : int(pack.cu[-1]) // 2, :, :]
            yield Compared(f"half {number} of {list(x.shape)}", owned, read_half_tensor(x, pack.cu, number))


@of("thd_second_half_lse_correction")
def second_half(library: Any, pack: Pack) -> Iterator[Compared]:
    for is_packed in (True, False):
        lse = statistics(pack, is_packed, halves=True)
        got = pack.tensor(lse.whole, "float32")
        library.thd_second_half_lse_correction(
            got, pack.tensor(lse.step, "float32"), pack.table(pack.cu), is_packed
        )
        want = again(pack, lse, second_half_lse_correction(*lse.packed, pack.cu), pack.cu)
        changed = want != lse.whole
        bound = np.where(changed, EXPONENTIAL * np.maximum(np.abs(want), 1), 0)
        yield Compared("packed" if is_packed else "in blocks", got, want, bound)


@of("thd_read_second_half_lse")
def read_second(library: Any, pack: Pack) -> Iterator[Compared]:
    for is_packed in (True, False):
        lse = statistics(pack, is_packed, halves=True)
        width = lse.step.shape[-1]
        got = library.thd_read_second_half_lse(
            pack.tensor(lse.whole, "float32"), pack.table(pack.cu), is_packed, width
        )
        half = read_second_half_lse(lse.packed[0], pack.cu, max(width, int(pack.cu[-1]) // 2))
        want = half if is_packed else blocked(half, pack.cu // 2, width, np.zeros_like(lse.step))
        yield Compared("packed" if is_packed else "in blocks", got, want)


@of("thd_out_correction")
def corrected(library: Any, pack: Pack) -> Iterator[Compared]:
    unit, smallest = UNITS[pack.form]
    for is_packed in (True, False):
        for second in (False, True):
            lse = statistics(pack, is_packed, halves=second)
            out, step = pack.rows_of(), pack.rows_of(rows=pack.rows // (1 + second))
            old, step_lse = lse.packed
            rows = half_rows(pack.cu, 1) if second else np.arange(int(pack.cu[-1]))
            new = old.copy()
            new[:, rows] = log_add(old[:, rows], step_lse[:, : len(rows)])
            got = pack.tensor(out)
            statistic = [
                pack.tensor(x, "float32") for x in (lse.whole, again(pack, lse, new, pack.cu), lse.step)
            ]
            library.thd_out_correction(
                got, pack.tensor(step), *statistic, pack.table(pack.cu), second, is_packed
            )
            want, size = out_correction(out, step, old, new, step_lse, pack.cu, second)
            # Both parts and their sum may be rounded.
            bound = (3 * unit + EXPONENTIAL) * size + 3 * smallest * (size > 0)
            what = f"{'packed' if is_packed else 'in blocks'}, {'second halves' if second else 'all rows'}"
            yield Compared(what, got, want, bound)


@of("thd_grad_correction")
def gradients(library: Any, pack: Pack) -> Iterator[Compared]:
    for first, second in UPDATES:
        is_half = not {"none", "zero"}.isdisjoint((first, second))
        for leading in ((), (2,)):
            grad = pack.rows_of(*leading)
            step = pack.rows_of(*leading, rows=pack.rows // 2 if is_half else pack.rows)
            got = pack.tensor(grad)
            library.thd_grad_correction(got, pack.tensor(step), pack.table(pack.cu), first, second)
            want = pack.rounded(grad_correction(grad, step, pack.cu, first, second))
            yield Compared(f"{first} and {second} of {list(grad.shape)}", got, want)


@of("convert_thd_to_bshd")
def to_blocks(library: Any, pack: Pack) -> Iterator[Compared]:
    x, positions = pack.rows_of(), int(pack.spans.max()) + 1
    got = library.convert_thd_to_bshd(pack.tensor(x), pack.table(pack.cu), len(pack.spans), positions)
    yield Compared("blocks", got, convert_thd_to_bshd(x, pack.cu, positions))


@of("convert_bshd_to_thd")
def from_blocks(library: Any, pack: Pack) -> Iterator[Compared]:
    blocks = pack.numbers(len(pack.spans), int(pack.spans.max()) + 1, pack.heads, pack.dim)
    got = library.convert_bshd_to_thd(pack.tensor(blocks), pack.table(pack.cu), pack.rows)
    yield Compared("rows", got, convert_bshd_to_thd(blocks, pack.cu, pack.rows))


def beside(library: Any, torch: Any, device: str, cases: int, seed: int) -> int:
    """Holds a library's functions to their definition, and returns the exit code."""
    differs = False
    for name, check in CHECKS.items():
        if not hasattr(library, name):
            print(f"{name:<52} is not in this version")
            continue
        wrong, results = [], 0
        for number in range(cases):
            pack = Pack(torch, device, seed, number)
            try:
                for compared in check(library, pack):
                    results += 1
                    said = compared.wrong()
                    wrong += [f"case {number}, {pack.form}, cu {pack.cu.tolist()}: {said}"] if said else []
            except (RuntimeError, TypeError) as error:
                wrong.append(f"case {number}, {pack.form}, cu {pack.cu.tolist()}: {error}")
                if "CUDA error" in str(error):
                    break
        print(f"{name:<52} {cases} packs, {results} results, {len(wrong)} differ")
        for line in wrong[:3]:
            print(f"  {line}")
        differs |= bool(wrong)
    return 2 if differs else 0


def main(arguments: list[str] | None = None) -> int:
    """Runs the comparison where TransformerEngine and a GPU are."""
    parser = argparse.ArgumentParser(prog="python -m seamproof.helpers", description=__doc__.split("\n\n")[0])
    parser.add_argument("--cases", type=int, default=100, help="packs that each function gets (100)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the packs (1)")
    given = parser.parse_args(arguments)
    try:
        import torch
        import transformer_engine
        import transformer_engine.pytorch
        import transformer_engine_torch as library
    except ImportError as error:
        print(f"TransformerEngine for torch is not installed: {error}", file=sys.stderr)
        return 1
    if not torch.cuda.is_available():
        print("TransformerEngine's functions need a GPU, and torch finds none", file=sys.stderr)
        return 1
    print(
        f"TransformerEngine {transformer_engine.__version__}, {torch.cuda.get_device_name()}, seed {given.seed}"
    )
    return beside(library, torch, "cuda", given.cases, given.seed)


if __name__ == "__main__":
    sys.exit(main())
