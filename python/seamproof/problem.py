"""A problem as a kernel sees it: lengths, offsets, masks as several libraries write them, memory for results."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from . import segments
from .arrays import GUARD, Numpy
from .copies import Copies
from .dealing import Parallel
from .errors import DeclarationError
from .formats import is_unwritten
from .pages import Pages, pooled
from .reference import key_intervals, keys_seen
from .runs import Run
from .views import kind_of, laid_out

WINDOW_STYLES = ("fa", "fa4", "te", "cudnn", "jax", "jax-cudnn")


@dataclass(frozen=True)
class Side:
    """One side of all sequences, queries or keys; the arrays are i32 of the subject's library, on its device."""

    runs: tuple[Run, ...]
    rows: int
    library: Numpy = field(repr=False, compare=False)
    # First positions of each sequence whose rows are a hole: keys that it borrows. Empty where there are none.
    holes: tuple[int, ...] = ()

    @functools.cached_property
    def lengths(self) -> Any:
        """Real rows of each sequence: `[sequences]`, as `seqused_q`."""
        return self.library.integers([run.len for run in self.runs])

    @functools.cached_property
    def offsets(self) -> Any:
        """Sums of the real lengths before each sequence, and their total: `[sequences + 1]`.

        They are where rows lie only in a layout without padding, gaps and a first offset, as `cu_seqlens` there.
        """
        return self.library.integers(self.sums)

    @property
    def sums(self) -> list[int]:
        """`offsets` as a list of Python."""
        return list(itertools.accumulate((run.len for run in self.runs), initial=0))

    @functools.cached_property
    def padded_offsets(self) -> Any:
        """First row of each sequence, and the end of the last: `[sequences + 1]`, as a padded `cu_seqlens`."""
        return self.library.integers(self.padded)

    @property
    def padded(self) -> list[int]:
        """`padded_offsets` as a list of Python."""
        if any(run.step != 1 for run in self.runs):
            raise ValueError("rows of a sequence lie apart (SBHD), so offsets do not say where: use runs")
        ends = [run.offset for run in self.runs] + [self.runs[-1].end if self.runs else 0]
        if ends != sorted(ends):
            raise ValueError("keys lie in another order than queries, so offsets do not say where: use runs")
        return ends

    @property
    def max_length(self) -> int:
        """The longest real length; 0 without sequences."""
        return max((run.len for run in self.runs), default=0)

    @property
    def max_span(self) -> int:
        """The longest span, padding included; 0 without sequences."""
        return max((run.span for run in self.runs), default=0)

    def owned(self) -> np.ndarray:
        """Returns which rows a sequence owns, as booleans of numpy."""
        return self._marked(Run.owned_rows)

    def real(self) -> np.ndarray:
        """Returns which rows hold a token, as booleans of numpy."""
        return self._marked(Run.real_rows)

    def _marked(self, rows_of: Any) -> np.ndarray:
        marked = np.zeros(self.rows, bool)
        for run, hole in itertools.zip_longest(self.runs, self.holes, fillvalue=0):
            marked[np.arange(self.rows)[rows_of(run)][hole:]] = True
        return marked


@dataclass(frozen=True)
class SharedKeys:
    """A sequence whose first keys and values are those of another one, in whose rows they lie."""

    # Indices of both in `Problem.sequences`.
    sequence: int
    lender: int
    keys: int


@dataclass(frozen=True)
class Sequence:
    """One sequence: its identity, its queries, its keys."""

    id: int
    q: Run
    kv: Run


# What a kernel quantises itself: weights, logit gradients, results. In frames, descales and amaxes have this order.
QUANTISED = ("p", "ds", "out", "dq", "dk", "dv")


def _block(scaling: str) -> tuple[int, int]:
    """Returns the rows and the lanes that share a descale; one row with each other scaling of rows."""
    rows, _, lanes = scaling.removeprefix("block").partition("x")
    return (int(rows), int(lanes)) if lanes else (1, 1)


@dataclass(frozen=True)
class Guarded:
    """A result that the adapter took from `Problem.empty`: its memory lies between two guard bands."""

    whole: Any
    inner: Any
    form: str


@dataclass(frozen=True)
class Problem:
    """One attention problem: the `problem` of a case file, and what wrappers of kernels want of it.

    Query i of a sequence sees key j iff `i + shift − left ≤ j ≤ i + shift + right`, both bounds inclusive, where
    `shift` is 0 (top-left) or `real keys − real queries` (bottom-right). `None` is no bound. A subject that declares
    such masks also gets `documents`, the first keys of all documents of a sequence but the first, `chunks`, the length
    of a chunk, `prefix` and `sink_tokens`: i + shift and j are of one document or chunk, and the first keys of each,
    or of the sequence, are not hidden: `prefix` of them by `right`, and `sink_tokens` of them by `left`.
    """

    sequences: tuple[Sequence, ...]
    q: Side
    kv: Side
    heads_q: int
    heads_kv: int
    dim_qk: int
    dim_v: int
    left: int | None
    right: int | None
    documents: tuple[int, ...]
    chunks: int | None
    prefix: int
    sink_tokens: int
    align: str
    scale: float
    softcap: float | None
    sink: str
    precision: dict[str, str]
    backward: bool
    parallel: Parallel
    raw: dict[str, Any] = field(repr=False, compare=False)
    library: Numpy = field(repr=False, compare=False)
    # The form that the subject is given, one of `declare.GIVEN`, or a contradiction that it has to refuse.
    given: str = "cu_seqlens"
    # The pages in which keys and values lie; `None` where they lie as `kv` says.
    pages: Pages | None = None
    # The sequences that borrow their first keys of others.
    sharing: tuple[SharedKeys, ...] = ()
    # The number of each sequence in the problem's own list.
    listed: tuple[int, ...] = field(default=(), repr=False, compare=False)
    # Factors that turn codes into values, of each input that has a scaling, and of each quantity in `QUANTISED` that is
    # to be quantised with a given one: f32 arrays of the library, as `descale_shape` says.
    descales: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    # Those of results, as numbers.
    result_descales: dict[str, np.float32] = field(default_factory=dict, repr=False, compare=False)
    guarded: list[tuple[str, Guarded]] = field(default_factory=list, repr=False, compare=False)

    @classmethod
    def from_json(cls, raw: dict[str, Any], library: Numpy | None = None) -> Problem:
        """Returns the problem of a case file's JSON, its sequences in the order in which their rows lie."""
        library = library or Numpy()
        pairs = raw["sequences"]
        listed = [Sequence(pair["id"], Run(**pair["q"]), Run(**pair["kv"])) for pair in pairs]
        sequences = in_memory_order(listed)
        mask, softmax = raw["mask"], raw["softmax"]
        order = tuple(listed.index(sequence) for sequence in sequences)
        place = [sequences.index(sequence) for sequence in listed]
        sharing = tuple(
            SharedKeys(place[of["sequence"]], place[of["with"]], of["keys"]) for of in raw.get("sharing", ())
        )
        borrowed = {of.sequence: of.keys for of in sharing}
        holes = tuple(borrowed.get(at, 0) for at in range(len(sequences))) if sharing else ()
        return cls(
            sequences=sequences,
            q=Side(tuple(sequence.q for sequence in sequences), raw["rows"]["q"], library),
            kv=Side(tuple(sequence.kv for sequence in sequences), raw["rows"]["kv"], library, holes),
            heads_q=raw["heads"]["q"],
            heads_kv=raw["heads"]["kv"],
            dim_qk=raw["dims"]["qk"],
            dim_v=raw["dims"]["v"],
            left=mask.get("left"),
            right=mask.get("right"),
            documents=tuple(mask.get("blocks", {}).get("documents", ())),
            chunks=mask.get("blocks", {}).get("chunks"),
            prefix=mask.get("prefix", 0),
            sink_tokens=mask.get("sink_tokens", 0),
            align=mask["align"],
            scale=_f32(softmax["scale"]),
            softcap=None if softmax.get("softcap") is None else _f32(softmax["softcap"]),
            sink=softmax["sink"],
            precision=raw["precision"],
            backward=raw["pass"] == "backward",
            parallel=Parallel.from_json(raw["parallel"]),
            raw=raw,
            library=library,
            given=raw.get("form", "cu_seqlens"),
            pages=Pages.of(raw.get("pages"), order),
            sharing=sharing,
            listed=order,
        )

    def key_rows(self, sequence: int) -> np.ndarray:
        """Returns the rows of k and v that hold a sequence's keys: those that it borrows in its lender's rows.

        dk and dv of a row are the sums over all sequences that have it. Rows that a sequence has for borrowed keys are
        a hole: they hold what padding holds, and nothing is written there.
        """
        every = np.arange(self.kv.rows)
        rows = every[self.kv.runs[sequence].real_rows()].copy()
        for of in self.sharing:
            if of.sequence == sequence:
                rows[: of.keys] = every[self.kv.runs[of.lender].real_rows()][: of.keys]
        return rows

    @functools.cached_property
    def block_table(self) -> Any:
        """Pages of each sequence, i32: `[sequences, most pages]`, 0 behind its last one; `None` without pages."""
        return None if self.pages is None else self.library.integers(self.pages.block_table())

    def in_pages(self, inputs: dict[str, np.ndarray], hole: float) -> dict[str, np.ndarray]:
        """Returns inputs with k and v in the problem's pages, if it has any, as `[pages, size, heads, dim]`."""
        if self.pages is None:
            return inputs
        rows = [run.real_rows() for run in self.kv.runs]
        of = (rows, self.pages.size, self.pages.count, self.pages.table, hole)
        return inputs | {name: pooled(inputs[name], *of) for name in ("k", "v")}

    @property
    def segment_ids_q(self) -> Any:
        """Segment ids of the rows of q, i32: `[rows]`. Sequences count from 1; 0 is a row that holds no token.

        Batched ids have the dimensions `leading` before the rows of a batch row, unless they lack some of the first
        ones, along which they are then broadcast. Sequences count from 1 in each batch row.
        """
        return self._segments["segment_ids_q"]

    @property
    def segment_ids_kv(self) -> Any:
        """Segment ids of the rows of k and v."""
        return self._segments["segment_ids_kv"]

    @property
    def positions_q(self) -> Any:
        """Positions of the rows of q in their sequences, i32, as the ids; 0 in a row that holds no token.

        Of batched ids and positions each may lack dimensions that the other has. Where there is no id, positions that
        lack some have a number without meaning.
        """
        return self._segments["positions_q"]

    @property
    def positions_kv(self) -> Any:
        """Positions of the rows of k and v."""
        return self._segments["positions_kv"]

    @functools.cached_property
    def leading(self) -> tuple[int, ...]:
        """Dimensions of batched ids before the rows of a batch row; none where ids are not batched."""
        if self.given != "batched_segments":
            return ()
        return segments.factors(segments.batch_rows(self.sequences, (self.q.rows, self.kv.rows)))

    @functools.cached_property
    def _segments(self) -> dict[str, Any]:
        """Ids and positions, by name, as the problem's form gives them."""
        rows = (self.q.rows, self.kv.rows)
        if self.given == "batched_segments":
            arrays = segments.batched(self.sequences, rows, self.raw["data_seed"])
        elif self.given == "misshapen_segments":
            arrays = segments.misshapen(self.sequences, rows)
        else:
            arrays = segments.flat(self.sequences, rows)
        integers = self.library.integers
        return {
            name: integers(array.reshape(-1).tolist()).reshape(array.shape) for name, array in arrays.items()
        }

    def segments_of(self, rows: tuple[np.ndarray, np.ndarray]) -> dict[str, Any]:
        """Returns ids and positions of some rows of q and of k and v, by name, as `segment_ids_q`; 0 for the row −1.

        Those of the rows of a rank (`dealt`) are what it is given under context parallelism: ids and positions are
        dealt like the tokens, and a position keeps its value; it does not begin again on each rank.
        """
        whole = segments.flat(self.sequences, (self.q.rows, self.kv.rows))
        sides = (0, 0, 1, 1)
        return {
            name: self.library.integers(np.append(whole[name], 0)[rows[side]].tolist())
            for name, side in zip(segments.NAMES, sides, strict=True)
        }

    @property
    def lengths(self) -> tuple[Any, Any]:
        """Real rows of each sequence, of q and of kv. In a padded batch each owns `max_span` rows of a side.

        Under context parallelism each rank is given them as they are: they are those of the whole batch.
        """
        missing = 1 if self.given == "unequal_lengths" else 0
        return self.q.lengths, self.kv.lengths[: len(self.kv.runs) - missing]

    @property
    def padding_masks(self) -> tuple[Any, Any]:
        """Booleans `[sequences, 1, 1, max_span]` of q and of kv: whether a row of a padded batch is padding.

        Megatron-LM and TransformerEngine give attention such masks of a batch.
        """

        def mask(side: Side, lengths: Any) -> Any:
            return (self.library.integers(range(side.max_span)) >= lengths[:, None])[:, None, None, :]

        q, kv = self.lengths
        return mask(self.q, q), mask(self.kv, kv)

    @property
    def pad_between_seqs(self) -> bool | None:
        """The caller's word for padding between sequences, TransformerEngine's name; `None` where nothing is said.

        `True` allows rows of sequences to lie elsewhere than `offsets` say, and demands nothing. With `False`
        `padded_offsets` are `offsets`.
        """
        return {"pad_between_seqs": True, "no_pad_between_seqs": False}.get(self.given)

    @property
    def causal(self) -> bool:
        """Whether no query sees past its diagonal."""
        return self.right == 0 and not self.prefix

    @property
    def mask(self) -> tuple[Any, ...]:
        """The mask: `left`, `right`, `bottom_right`, `documents`, `chunks`, `prefix`, `sink_tokens`."""
        bounds = (self.left, self.right, self.bottom_right)
        return (*bounds, self.documents, self.chunks, self.prefix, self.sink_tokens)

    @property
    def bottom_right(self) -> bool:
        """Whether the diagonal ends at each sequence's last query and last key."""
        return self.align == "bottom-right"

    @property
    def group(self) -> int:
        """Query heads for each KV head."""
        return self.heads_q // self.heads_kv

    @property
    def format(self) -> str:
        """Format of q."""
        return self.form("q")

    def window(self, style: str) -> Any:
        """Returns the mask's bounds as a library writes them; they say nothing of documents, chunks and a prefix.

        | style | returns |
        |---|---|
        | `"fa"`, `"te"` | `(left, right)`, both inclusive, −1 for no bound: FlashAttention 2 and 3, TransformerEngine |
        | `"fa4"` | `(left, right)` with `None` for no bound: FlashAttention 4 |
        | `"cudnn"` | `(left + 1, right)` with `None` for no bound: bounds of the diagonal band, the left counts it |
        | `"jax"` | `(left, right)`, the longest length for no bound, and `None` without any: `local_window_size` |
        | `"jax-cudnn"` | `left + 1`, and `None` for no bound: `sliding_window_length`, which is causal |
        """
        left, right = self.left, self.right
        if style in ("fa", "te"):
            return (-1 if left is None else left, -1 if right is None else right)
        if style == "fa4":
            return (left, right)
        if style == "cudnn":
            return (None if left is None else left + 1, right)
        if style == "jax":
            far = max(self.q.max_span, self.kv.max_span)
            return (
                None
                if left is right is None
                else (far if left is None else left, far if right is None else right)
            )
        if style == "jax-cudnn":
            return None if left is None else left + 1
        raise ValueError(f"window style {style!r} is not known; use one of {', '.join(WINDOW_STYLES)}")

    def shift(self, sequence: int) -> int:
        """Returns how far the diagonal of a sequence is moved to the right."""
        of = self.sequences[sequence]
        return of.kv.len - of.q.len if self.bottom_right else 0

    def visible(self, sequence: int) -> np.ndarray:
        """Returns which keys the queries of a sequence see: booleans of numpy, `[real queries, real keys]`."""
        of = self.sequences[sequence]
        return keys_seen(of.q.len, of.kv.len, *self.mask)

    def blind_rows(self) -> np.ndarray:
        """Returns which rows of q hold a query that sees no key, as booleans of numpy."""
        blind = np.zeros(self.q.rows, bool)
        for of, run in zip(self.sequences, self.q.runs, strict=True):
            intervals = key_intervals(of.q.len, of.kv.len, *self.mask)
            blind[run.real_rows()] = np.all([first == end for first, end in intervals], axis=0)
        return blind

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of an input or a result: `q`, `out`, `lse`, `dk` and so on."""
        q, kv, heads, kv_heads = self.q.rows, self.kv.rows, self.heads_q, self.heads_kv
        shapes = {
            "q": (q, heads, self.dim_qk),
            "k": (kv, kv_heads, self.dim_qk),
            "v": (kv, kv_heads, self.dim_v),
            "out": (q, heads, self.dim_v),
            "lse": (heads, q),
            "max_logit": (heads,),
            "sink": (heads if self.sink == "learnable" else 0,),
        }
        shapes |= {"d" + name: shapes[name] for name in ("q", "k", "v", "out", "sink")}
        if name not in shapes:
            raise ValueError(f"there is no tensor {name!r}; use one of {', '.join(shapes)}")
        return shapes[name]

    def form(self, name: str) -> str:
        """Returns the format of an input or a result, or of `"p"` or `"ds"`."""
        if name in ("lse", "max_logit", "sink", "dsink"):
            return "f32"
        return self._element(name).partition("/")[0]

    def _element(self, name: str) -> str:
        return self.precision["gradients" if name in ("dq", "dk", "dv") else name]

    def scaling(self, name: str) -> str | None:
        """Returns which elements of an input share a descale: `tensor`, `head`, `sequence-head`, …; `None` for none.

        So for a result, `"p"` and `"ds"`, where `tensor` alone is a descale that is given.
        """
        return self._element(name).partition("/")[2] or None

    def given_descales(self) -> list[str]:
        """Returns the quantities that are to be quantised with a given descale, in the order of `QUANTISED`."""
        return [name for name in QUANTISED if self.scaling(name) == "tensor"]

    def descale_shape(self, name: str) -> tuple[int, int, int] | None:
        """Returns the shape of an input's descales: groups of rows, heads, groups of lanes; `None` without scaling.

        A quantity that is to be quantised with a given descale has one, in the shape of `tensor`.

        | scaling | shape |
        |---|---|
        | `tensor` | `[1, 1, 1]` |
        | `head` | `[1, heads, 1]` |
        | `sequence-head`, `sequence-group` | `[sequences, heads, 1]`, the second with KV heads |
        | `token-head` | `[owned rows, heads, 1]`, sequence after sequence |
        | `blockRxC` | `[blocks of R owned rows, heads, blocks of C lanes]`; a sequence begins a new block |
        """
        scaling = self.scaling(name)
        if name in QUANTISED:
            return (1, 1, 1) if scaling == "tensor" else None
        if scaling is None:
            return None
        _, heads, lanes = self.shape(name)
        groups = self._groups_of_rows(name)
        rows = 1 if groups is None else sum(groups)
        if scaling.startswith("block"):
            return rows, heads, -(-lanes // _block(scaling)[1])
        return rows, {"tensor": 1, "sequence-group": self.heads_kv}.get(scaling, heads), 1

    def _groups_of_rows(self, name: str) -> list[int] | None:
        """Returns the groups of rows of each sequence that have descales of their own; `None` where all share them."""
        scaling = self.scaling(name)
        if scaling in ("tensor", "head"):
            return None
        spans = [run.span for run in (self.kv if name in ("k", "v") else self.q).runs]
        if scaling.startswith("sequence"):
            return [1] * len(spans)
        rows, _ = _block(scaling)
        return [-(-span // rows) for span in spans]

    def with_descales(self, descales: dict[str, np.ndarray]) -> Problem:
        """Returns the problem with descales, which are numpy's and follow the sequences as the problem lists them."""
        of_results = (name for name in ("out", "dq", "dk", "dv") if name in descales)
        return dataclasses.replace(
            self,
            descales={name: self._placed(name, descales[name]) for name in descales},
            result_descales={name: np.float32(descales[name][0, 0, 0]) for name in of_results},
        )

    def _placed(self, name: str, values: np.ndarray) -> Any:
        """Returns descales in the order in which the rows of the sequences lie."""
        groups = None if name in QUANTISED else self._groups_of_rows(name)
        if groups:
            counts = [groups[self.listed.index(number)] for number in range(len(groups))]
            parts = np.split(values, np.cumsum(counts)[:-1])
            values = np.concatenate([parts[number] for number in self.listed])
        return self.library.put(values, "f32")

    def dealt(self) -> list[tuple[np.ndarray, np.ndarray]] | None:
        """Returns which rows of the queries and of the keys each rank holds; `None` in a plain call."""
        if self.parallel.is_single:
            return None
        sides = (self.parallel.dealt(side.runs, side.rows) for side in (self.q, self.kv))
        return list(zip(*sides, strict=True))

    def results(self) -> list[tuple[int, str]]:
        """Returns the number of elements and the format of each result that has rows."""
        names = ("out", "lse", *(("dq", "dk", "dv") if self.backward else ()))
        return [(math.prod(self.shape(name)), self.form(name)) for name in names]

    def empty(self, name: str = "out") -> Any:
        """Returns memory for a result (`out`, `lse`, `dq`, `dk`, `dv`), full of the sentinel, between guard bands.

        What the kernel forgets to write, what it writes into rows that no sequence owns, and what it writes before or
        behind the tensor is then seen. Return the very array.
        """
        shape, form = self.shape(name), self.form(name)
        if not self.library.mutable:
            raise DeclarationError(f"arrays of {self.library.name} cannot be written to: return new ones")
        elements = math.prod(shape)
        whole = self.library.unwritten(elements + 2 * GUARD, form)
        inner = whole[GUARD : GUARD + elements].reshape(shape)
        self.guarded.append((name, Guarded(whole, inner, form)))
        return inner

    def view(self, array: Any, name: str) -> Any:
        """Returns an input of numpy or torch with the same elements, laid out in memory as is drawn for the problem.

        `name` is `"q"`, `"k"`, `"v"` or `"dout"`. It is for kernels that take strides: rows or lanes may lie apart,
        heads may come before rows, and rows that are all alike may be one with a stride of 0. A pool of pages stays as
        it is.
        """
        if array.ndim != 3:
            return array
        return laid_out(array, kind_of(self.raw["data_seed"], name))

    def empty_out(self) -> Any:
        """Returns memory for out, as `empty("out")`."""
        return self.empty("out")

    def took(self, array: Any) -> bool:
        """Returns whether an array is memory that `empty` gave."""
        return any(array is guarded.inner for _, guarded in self.guarded)

    def bands(self) -> dict[tuple[int, bool], Any]:
        """Returns the guard bands around memory that `empty` gave, by its number and whether they lie before it."""
        return {
            (number, before): guarded.whole[:GUARD] if before else guarded.whole[-GUARD:]
            for number, (_, guarded) in enumerate(self.guarded)
            for before in (True, False)
        }

    def intact_bands(self) -> Copies:
        """Returns copies of guard bands that nothing was written into, one for each of `bands`."""
        return self.library.intact_bands(tuple(guarded.form for _, guarded in self.guarded))

    def damage(self, bands: dict[tuple[int, bool], Any] | None = None) -> list[dict[str, Any]]:
        """Returns the guard bands that the kernel wrote into, as the protocol writes them, in the order of `empty`."""
        found, bands = [], bands or self.bands()
        for number, before in self.bands():
            name, guarded = self.guarded[number]
            band = bands[number, before]
            changed = np.flatnonzero(~is_unwritten(self.library.get(band, guarded.form, name)))
            if changed.size:
                distance = GUARD - 1 - changed[-1] if before else changed[0]
                found.append(
                    {
                        "tensor": name,
                        "before": before,
                        "distance": int(distance),
                        "elements": int(changed.size),
                    }
                )
        return found


def in_memory_order(sequences: list[Sequence]) -> tuple[Sequence, ...]:
    """Returns sequences in the order in which their rows lie; offsets can say no other."""

    def before(one: Sequence, other: Sequence) -> bool:
        return one.q.end <= other.q.offset and one.kv.end <= other.kv.offset

    def place(sequence: Sequence) -> tuple[int, ...]:
        return (sequence.q.offset, sequence.q.end, sequence.kv.offset, sequence.kv.end)

    ordered = all(before(one, other) for one, other in itertools.pairwise(sequences))
    return tuple(sequences if ordered else sorted(sequences, key=place))


def _f32(value: float) -> float:
    """Returns the f32 that a number of JSON stands for: its shortest decimal form is not the number itself."""
    return float(np.float32(value))


def contiguous(runs: Items[Run]) -> bool:
    """Returns whether runs lie one behind the other from row 0 on, without padding and gaps."""
    end = 0
    for run in runs:
        if run.offset != end or run.len != run.span or (run.step != 1 and run.span > 1):
            return False
        end = run.end
    return True
