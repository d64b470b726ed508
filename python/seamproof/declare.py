"""What a subject declares: the JSON of the protocol's declaration, from a few words."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

from .errors import DeclarationError
from .formats import FORMATS, FP8

FORMS = ("full", "causal", "left-window", "right-window", "causal-window", "two-sided")
WINDOWS = FORMS[2:]
KINDS = ("documents", "chunks", "prefix", "sink-tokens")
ALIGNMENTS = ("top-left", "bottom-right")
GIVEN = (
    "cu_seqlens",
    "segments",
    "lengths",
    "pad_between_seqs",
    "no_pad_between_seqs",
    "batched_segments",
)
SINKS = ("none", "off-by-one", "learnable")
PROMISES = (
    "deterministic_backward",
    "sequences_alone",
    "heads_alone",
    "groups_alone",
    "rows_alone",
    "linear_memory",
)
# What may be said of each part of `partials`.
PARTIALS = {"merge": ("f32", "io"), "merge_by": ("weights", "difference"), "wire": ("f32", "io")}
ARITHMETIC = (
    "accumulation",
    "weights",
    "delta",
    "group_sums",
    "soft_cap",
    "ds_weights",
    "weight_exponent",
    "ds_scale",
    "ds_fold",
)

Sizes = int | Iterable[int] | Mapping[str, int]


def multiples(of: int, to: int, start: int | None = None) -> dict[str, int]:
    """Returns the head dimensions `start`, `start + of`, … up to `to`; `start` is `of` where it is left out."""
    return {"from": of if start is None else start, "to": to, "multiple": of}


def bottom_right(
    windows: bool | str | Iterable[str] = True, most: int | None = None, kinds: str | Iterable[str] = ()
) -> dict[str, Any]:
    """Returns masks whose diagonal ends at the last query and the last key, as FlashAttention's.

    `windows` is `True` for all, `False` for full and causal masks alone, or says which: names of forms, such as
    `"causal-window"`. `most` is the largest bound of a window, 2³² − 1 where it is left out. `kinds` are what masks
    have besides bounds, any of `"documents"`, `"chunks"`, `"prefix"` and `"sink-tokens"`, also together.
    """
    named = _known(_list(kinds), KINDS, "kinds")
    more = {"kinds": named} if named else {}
    return {"forms": _forms(windows), "alignments": ["bottom-right"], **_given(window_most=most), **more}


def top_left(
    windows: bool | str | Iterable[str] = True, most: int | None = None, kinds: str | Iterable[str] = ()
) -> dict[str, Any]:
    """Returns masks whose diagonal begins at the first query and the first key; arguments as in `bottom_right`."""
    return {**bottom_right(windows, most, kinds), "alignments": ["top-left"]}


def both_alignments(
    windows: bool | str | Iterable[str] = True, most: int | None = None, kinds: str | Iterable[str] = ()
) -> dict[str, Any]:
    """Returns masks of either alignment; arguments as in `bottom_right`."""
    return {**bottom_right(windows, most, kinds), "alignments": list(ALIGNMENTS)}


def packed(
    padding: bool = False, slack: bool = True, gaps: bool = False, first_offset: bool = False, equal: bool = False
) -> dict[str, bool]:
    """Returns the layout of packed sequences (THD).

    `padding` are rows that a sequence owns past its real ones, `gaps` rows between two sequences that neither owns,
    `slack` rows after the last one; with `first_offset` the first sequence may begin after row 0. With `equal`, q and kv
    lie in the same rows, so that one `cu_seqlens` and one `cu_seqlens_padded` say both; `lengths` need `"equal": True`.
    """
    rows = {"padding": padding, "gaps": gaps, "first_offset": first_offset, "slack": slack, "steps": False}
    return rows | ({"equal": True} if equal else {})


def declaration(
    *,
    formats: Iterable[str] = ("bf16",),
    p: str = "io",
    ds: str = "io",
    out: str = "io",
    dout: str = "io",
    gradients: str = "io",
    d: Sizes | None = None,
    d_v: Sizes | None = None,
    d_equal: bool = False,
    groups: Sizes | None = None,
    heads_most: int | None = None,
    masks: Mapping[str, Any] | None = None,
    lengths: Mapping[str, Any] | None = None,
    layout: Mapping[str, bool] | None = None,
    forms: Iterable[str] = ("cu_seqlens",),
    cache: bool = False,
    pages: Sizes | None = None,
    sharing: bool = False,
    softcap: bool = False,
    sinks: Iterable[str] = ("none",),
    backward: bool = True,
    statistics: Iterable[str] = ("lse",),
    padding_inputs: str = "finite",
    padding_outputs: str = "unspecified",
    promises: Iterable[str] = (),
    arithmetic: Mapping[str, Any] | None = None,
    partials: Mapping[str, str] | None = None,
    refuses: bool = False,
    start_seconds: int | None = None,
    table: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Returns a declaration as the protocol writes it.

    `formats` are those of q, k, v and the results. One in FP8 has a scaling behind it, as in `"e4m3/sequence-group"`:
    q, k and v are then codes with descales (`Problem.descales`), P is in the same format, and results are in bf16.

    `p`, `ds`, `out`, `dout` and `gradients` are a format, or `"io"` for that of q, which is bf16 for all but `p` where
    q is in FP8. In FP8 too, `dout` has a scaling behind its format, as q has, and `out` and `gradients` have `/tensor`:
    they are then quantised with a descale that is given. So are `p` and `ds` with `/tensor`.

    `forms` are those in which the subject reads a problem: `"cu_seqlens"` beside lengths, `"segments"` for ids and
    positions, `"batched_segments"` for these under leading dimensions, `"lengths"` for a padded batch, and
    `"pad_between_seqs"` and `"no_pad_between_seqs"` for `"cu_seqlens"` with the caller's word for padding. `cache`
    says that the judge may call it step by step on a KV cache, each time with fewer queries than keys. `pages` are
    the sizes of pages in which it takes k and v. `sharing` says that it takes sequences that share their first keys
    (`Problem.sharing`). `table` adds rows of the table as the protocol names them, or replaces them.
    """
    dims = {"equal": d_equal, **_given(qk=_sizes(d), v=_sizes(d_v))}
    rows: dict[str, Any] = {
        "precisions": [
            _precision(form, p=p, ds=ds, out=out, dout=dout, gradients=gradients)
            for form in _formats(formats)
        ],
        "dims": dims,
        "heads": _given(groups=_sizes(groups), most=heads_most),
        "masks": dict(masks or {}),
        "lengths": dict(lengths or {}),
        "layout": dict(layout or packed()),
        "forms": _known(forms, GIVEN, "forms"),
        "cache": cache,
        **_given(pages=_sizes(pages)),
        **({"sharing": True} if sharing else {}),
        "softcap": softcap,
        "sinks": _known(sinks, SINKS, "sinks"),
        "backward": backward,
        "statistics": _known(statistics, ("lse", "max_logit"), "statistics"),
    }
    declared = {
        "table": _merged(rows, table or {}),
        "padding": {
            "inputs": _known([padding_inputs], ("anything", "finite"), "padding_inputs")[0],
            "outputs": _known([padding_outputs], ("zero", "untouched", "unspecified"), "padding_outputs")[0],
        },
        "promises": dict.fromkeys(_known(promises, PROMISES, "promises"), True),
        "arithmetic": {
            name: (arithmetic or {})[name] for name in _known(arithmetic or (), ARITHMETIC, "arithmetic")
        },
        "partials": _partials(partials or {}),
        "refuses": refuses,
    }
    if declared["table"].get("parallel", {}).get("regions"):
        raise DeclarationError(
            "table.parallel.regions: a subject in Python is not told of hidden rows; leave it out"
        )
    return declared | _given(start_seconds=start_seconds)


def narrowed(declared: Mapping[str, Any], narrowing: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a declaration that takes less, for a check of a part.

    Known words are `masks` (`"full"`, `"causal"`, `"window"` or names of forms), `kinds`, `formats`, `d`, `d_v`,
    `backward`, `softcap`, `sinks`, `alignments`, `length_most`, `sequences_most`, `rows_most`, and `table` with rows
    of the protocol.
    """
    declared = copy.deepcopy(dict(declared))
    table = declared["table"]
    for word, value in narrowing.items():
        if word == "masks":
            asked = [form for name in _list(value) for form in (WINDOWS if name == "window" else [name])]
            _known(asked, FORMS, "masks")
            table["masks"]["forms"] = _part(table["masks"].get("forms", FORMS), asked, "masks")
        elif word == "kinds":
            table["masks"]["kinds"] = _part(table["masks"].get("kinds", ()), _list(value), word)
        elif word == "alignments":
            table["masks"]["alignments"] = _part(
                table["masks"].get("alignments", ALIGNMENTS), _list(value), word
            )
        elif word == "formats":
            kept = _part([precision["q"] for precision in table["precisions"]], _list(value), word)
            table["precisions"] = [row for row in table["precisions"] if row["q"] in kept]
        elif word in ("d", "d_v"):
            table["dims"]["qk" if word == "d" else "v"] = _sizes(value)
        elif word == "sinks":
            table["sinks"] = _part(table["sinks"], _list(value), word)
        elif word in ("backward", "softcap"):
            if value and not table[word]:
                raise DeclarationError(f"{word}={value!r}: the subject declares that it has none")
            table[word] = bool(value)
        elif word in ("length_most", "sequences_most", "rows_most"):
            table["lengths"]["most" if word == "length_most" else word] = int(value)
        elif word == "table":
            declared["table"] = table = _merged(table, value)
        else:
            raise DeclarationError(
                f"a check cannot be narrowed by {word!r}; use masks, kinds, alignments, formats, d, d_v, sinks, "
                "backward, softcap, length_most, sequences_most, rows_most or table"
            )
    return declared


def _formats(formats: Iterable[str]) -> list[str]:
    """Returns formats, of which those in FP8 name a scaling: `e4m3/sequence-group`."""
    listed = _list(formats)
    for form in listed:
        if form in FP8:
            raise DeclarationError(f"formats: {form!r} names no scaling; write '{form}/sequence-group' or another one")
    scaled = [form for form in listed if "/" in form]
    _known([form.partition("/")[0] for form in scaled], FP8, "formats with a scaling")
    _known([form for form in listed if "/" not in form], FORMATS, "formats")
    return listed


def _precision(form: str, **words: str) -> dict[str, str]:
    """Returns the formats of all quantities. With q, k and v in FP8, P is in FP8 too, and results are in bf16."""
    narrow, _, scaling = form.partition("/")
    results = "bf16" if scaling else form
    own = {name: narrow if name == "p" else results for name in words}
    chosen = {name: own[name] if word == "io" else _element(word, name) for name, word in words.items()}
    return dict.fromkeys(("q", "k", "v"), form) | chosen


def _element(word: str, name: str) -> str:
    """Returns a format that a quantity may have: one of 16 bits or more, or one of 8 with a scaling.

    P and dS may have one of 8 without: their scale is then the kernel's own. A descale of theirs or of a result is one
    number for the tensor.
    """
    scaling = word.partition("/")[2] if name == "dout" else ""
    kinds = ["/" + (scaling or "tensor"), *([""] if name in ("p", "ds") else [])]
    known = [*FORMATS, *(narrow + kind for narrow in FP8 for kind in kinds)]
    return _known([word], known, name)[0]


def _partials(partials: Mapping[str, str]) -> dict[str, str]:
    names = _known(partials, PARTIALS, "partials")
    return {name: _known([partials[name]], PARTIALS[name], f"partials.{name}")[0] for name in names}


def _forms(windows: bool | str | Iterable[str]) -> list[str]:
    if windows is True:
        return list(FORMS)
    asked = [] if windows is False else _known(_list(windows), WINDOWS, "windows")
    return [*FORMS[:2], *asked]


def _sizes(sizes: Sizes | None) -> list[int] | dict[str, int] | None:
    if sizes is None or isinstance(sizes, Mapping):
        return None if sizes is None else dict(sizes)
    return [sizes] if isinstance(sizes, int) else [int(size) for size in sizes]


def _list(value: Any) -> list[Any]:
    return [value] if isinstance(value, str) else list(value)


def _known(words: Iterable[str], known: Iterable[str], name: str) -> list[str]:
    known = list(known)
    words = _list(words)
    for word in words:
        if word not in known:
            raise DeclarationError(f"{name}: {word!r} is not known; use {', '.join(map(repr, known))}")
    return words


def _part(declared: Iterable[str], asked: list[str], name: str) -> list[str]:
    declared = list(declared)
    kept = [word for word in declared if word in asked]
    if not kept:
        raise DeclarationError(f"{name}: the subject takes {declared}, and none of {asked}")
    return kept


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _merged(base: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for name, value in more.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(name), Mapping)
        merged[name] = _merged(merged[name], value) if both else value
    return merged
