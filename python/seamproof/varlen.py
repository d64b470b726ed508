"""Functions of FlashAttention's signature for packed sequences, as subjects."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .declare import SINKS, Sizes, bottom_right, declaration, multiples, packed
from .errors import DeclarationError, MaximumTooSmall
from .lse import LseForm
from .problem import Problem, Side, contiguous
from .subject import Result, Subject, as_result, autograd, missing_words, of_scope

# The names that libraries give to each argument; the first is FlashAttention's.
ALIASES = {
    "cu_seqlens_q": ("cu_seqlens_q", "cu_seq_q"),
    "cu_seqlens_k": ("cu_seqlens_k", "cu_seqlens_kv", "cu_seq_k"),
    "cu_seqlens_q_padded": ("cu_seqlens_q_padded",),
    "cu_seqlens_k_padded": ("cu_seqlens_k_padded", "cu_seqlens_kv_padded"),
    "pad_between_seqs": ("pad_between_seqs",),
    "max_seqlen_q": ("max_seqlen_q", "max_q"),
    "max_seqlen_k": ("max_seqlen_k", "max_seqlen_kv", "max_k"),
    "softmax_scale": ("softmax_scale", "scale", "sm_scale"),
    "causal": ("causal", "is_causal"),
    "window_size": ("window_size", "window"),
    "softcap": ("softcap", "logits_soft_cap"),
    "sink": ("learnable_sink", "sinks", "sink", "s_aux"),
    "seqused_q": ("seqused_q",),
    "seqused_k": ("seqused_k", "seqused_kv"),
    "page_table": ("page_table", "block_table"),
    "return_lse": ("return_lse", "return_softmax_lse", "return_attn_probs"),
}
# Libraries of this signature pass windows as i32, and add positions to them. A bound beyond is no question to a kernel.
WINDOW_MOST = 2**30
NEEDED = ("cu_seqlens_q", "cu_seqlens_k", "softmax_scale")
# What TransformerEngine's signature has beside FlashAttention's.
PADDED = ("cu_seqlens_q_padded", "cu_seqlens_k_padded")
# What the function is given with `seqused=True` alone.
OF_PADDING = ("seqused_q", "seqused_k", *PADDED)
SAID = ("cu_seqlens", "pad_between_seqs", "no_pad_between_seqs")


@dataclass(frozen=True)
class Signature:
    """Which arguments a function takes, by our word and by its own; and how it writes a window without bounds."""

    names: dict[str, str]
    unbounded: int | None
    # Our words of arguments without a default.
    required: frozenset[str] = frozenset()

    def has(self, word: str) -> bool:
        """Returns whether the function takes an argument."""
        return word in self.names

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Signature:
        """Returns the signature of a function; of one that does not tell it, FlashAttention's."""
        try:
            parameters = inspect.signature(function).parameters
        except (TypeError, ValueError):
            beside = ("sink", *PADDED, "pad_between_seqs", "page_table")
            return cls({word: names[0] for word, names in ALIASES.items() if word not in beside}, -1)
        names = {}
        for word, aliases in ALIASES.items():
            own = next((alias for alias in aliases if alias in parameters), None)
            if own is not None:
                names[word] = own
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            for word in (*NEEDED, "max_seqlen_q", "max_seqlen_k", "causal", "window_size"):
                names.setdefault(word, ALIASES[word][0])
        default = (
            parameters[names["window_size"]].default if names.get("window_size") in parameters else (-1, -1)
        )
        missing = [ALIASES[word][0] for word in NEEDED if word not in names]
        if missing:
            raise DeclarationError(
                f"{getattr(function, '__name__', 'the function')} has no argument {', '.join(missing)}: "
                "flash_varlen calls functions of FlashAttention's signature; use seamproof.subject for others"
            )
        if len([word for word in PADDED if word in names]) == 1:
            raise DeclarationError(
                f"{getattr(function, '__name__', 'the function')} has padded offsets of one side alone; it needs "
                "cu_seqlens_q_padded and cu_seqlens_kv_padded, or neither"
            )
        required = {
            word
            for word, own in names.items()
            if own in parameters and parameters[own].default is inspect.Parameter.empty
        }
        return cls(names, None if default in (None, (None, None), [None, None]) else -1, frozenset(required))

    def hold_padding(self, seqused: bool) -> None:
        """Raises where the function cannot be called without what only padding between sequences gives it."""
        asked = [self.names[word] for word in OF_PADDING if word in self.required]
        if asked and not seqused:
            raise DeclarationError(
                f"the function asks for {', '.join(asked)}, which sequences with padding have: say seqused=True, or give "
                "these arguments a default"
            )


def flash_varlen(
    function: Callable[..., Any] | None = None,
    /,
    *,
    arrays: str | None = None,
    formats: Iterable[str] | None = None,
    backward: bool | Callable[..., Any] | None = None,
    device: str | None = None,
    seqused: bool = False,
    slack: bool = True,
    windows: bool | str | Iterable[str] | None = None,
    softcap: bool | None = None,
    sinks: Iterable[str] | bool | None = None,
    lse: LseForm | bool = True,
    d: Sizes | None = None,
    d_v: Sizes | None = None,
    d_equal: bool | None = None,
    no_sequences: bool = False,
    name: str | None = None,
    compiles: bool | None = None,
    versions: dict[str, str] | None = None,
    arguments: Mapping[str, Any] | None = None,
    **declared: Any,
) -> Any:
    """Declares a function of FlashAttention's signature for packed sequences as a subject.

    The function is called with q `[Tq, Hq, D]`, k `[Tk, Hkv, D]`, v `[Tk, Hkv, Dv]` and by name `cu_seqlens_q`,
    `cu_seqlens_k`, `max_seqlen_q`, `max_seqlen_k`, `softmax_scale`, `causal`, `window_size` and what else its
    signature has. Masks are aligned to the bottom right, windows are inclusive on both sides. It returns out
    `[Tq, Hq, Dv]` and lse `[Hq, Tq]`, a natural logarithm. A row that sees no key has 0 in out and −∞ in lse.

    `arrays`: `"numpy"`, `"torch"`, `"jax"` or `"cupy"`; by default what the function's file imports.
    `formats`: by default f32 for numpy, and bf16 and fp16 for the others.
    `backward`: `True` for automatic differentiation (torch, JAX: the default), `False`, or a function
    `(dout, q, k, v, out, lse, **same arguments)` that returns `(dq, dk, dv)`.
    `seqused`: sequences may have padding; the function gets `seqused_q` and `seqused_k` beside padded `cu_seqlens`, or
    padded offsets beside real ones where it takes `cu_seqlens_q_padded` and `cu_seqlens_kv_padded`.
    `max_seqlen_q` and `max_seqlen_k` are the largest real lengths then too, as callers pass them. A function with
    `pad_between_seqs` is called without that word (`None`), and with it wherever it is true to say so.
    `slack`: tensors may be longer than the last of `cu_seqlens`.
    `pages`: page sizes of k and v in pages, for a function with `page_table` or `block_table`. It then gets real
    lengths as `seqused_k` and no `cu_seqlens_k`; without `seqused_k` it gets sums of real lengths there.
    `windows`, `softcap`, `sinks`: by default what the signature has.
    `lse`: its form, or `False` where only out is returned.
    `arguments`: further arguments for every call. Largest lengths among them that a sequence exceeds are a
    `MaximumTooSmall`.
    Everything else is an argument of `declare.declaration`.
    """
    scope = sys._getframe(1).f_globals

    def declare(function: Callable[..., Any]) -> Subject:
        signature = Signature.of(function)
        if declared.get("pages") is None:
            signature.hold_padding(seqused)
        library = arrays or of_scope(function, scope)
        if declared.get("pages") is not None and not signature.has("page_table"):
            raise DeclarationError(
                f"pages={declared['pages']}: the function has no argument {' or '.join(ALIASES['page_table'])}"
            )
        gradient = library in ("torch", "jax") if backward is None else backward
        masks = signature.has("window_size") if windows is None else windows
        taken = _sinks(signature, sinks)
        on_gpu = library in ("torch", "cupy") and _on_gpu(library, device)
        table = dict(declared.get("table", {}))
        table["lengths"] = {"no_sequences": no_sequences, **table.get("lengths", {})}
        forms = bottom_right(masks, most=WINDOW_MOST)
        if not signature.has("causal"):
            forms["forms"] = [
                form for form in forms["forms"] if form != "causal" or signature.has("window_size")
            ]
        kernel = Varlen(function, signature, seqused, gradient, lse is not False, dict(arguments or {}))
        return Subject(
            function=function,
            call=kernel,
            name=name or getattr(function, "__name__", "kernel"),
            library_name=library,
            device=device,
            declared=declaration(
                **{
                    "formats": formats or (["f32"] if library == "numpy" else ["bf16", "fp16"]),
                    "d": d or (multiples(8, to=256) if on_gpu else None),
                    "d_v": d_v or (multiples(8, to=256) if on_gpu else None),
                    "d_equal": on_gpu if d_equal is None else d_equal,
                    "masks": forms,
                    "layout": packed(padding=seqused, slack=slack),
                    "softcap": signature.has("softcap") if softcap is None else softcap,
                    "sinks": taken,
                    "backward": bool(gradient),
                    "statistics": ["lse"] if lse is not False else [],
                    "forms": SAID if signature.has("pad_between_seqs") else SAID[:1],
                    **declared,
                    "table": table,
                }
            ),
            lse=lse if isinstance(lse, LseForm) else LseForm(),
            compiles=library != "numpy" if compiles is None else compiles,
            versions=versions or {},
            scope=scope,
        )

    return declare if function is None else declare(function)


@dataclass(frozen=True)
class Varlen:
    """Calls a function of FlashAttention's signature for a problem."""

    function: Callable[..., Any]
    signature: Signature
    seqused: bool
    backward: bool | Callable[..., Any]
    returns_lse: bool
    more: dict[str, Any]

    def __call__(self, p: Problem, q: Any, k: Any, v: Any, dout: Any = None, sink: Any = None) -> Result:
        arguments = self.arguments(p)
        if sink is not None:
            arguments[self.signature.names["sink"]] = sink
        result = as_result(self.function(q, k, v, **arguments))
        if not self.returns_lse:
            result.lse = None
        if dout is None or result.dq is not None:
            return result
        if self.backward is True:
            result.grads = autograd
        else:
            self.hold_forward(p, result)
            gradients = self.backward(dout, q, k, v, result.out, result.lse, **arguments)
            if not isinstance(gradients, (tuple, list)) or len(gradients) not in (3, 4):
                count = f"{len(gradients)} values" if isinstance(gradients, (tuple, list)) else "one value"
                raise TypeError(f"the backward returned {count}; return dq, dk, dv, and dsink where there is one")
            result.dq, result.dk, result.dv, *rest = gradients
            result.dsink = rest[0] if rest else None
        return result

    def hold_forward(self, p: Problem, result: Result) -> None:
        """Raises where the forward's results are none that its backward can read, rather than let that one fail."""
        if self.returns_lse and result.lse is None:
            raise DeclarationError(missing_words("lse", p))
        shape, rows = getattr(result.out, "shape", None), p.shape("out")
        # Rows of slack may be left out.
        if shape is None or tuple(shape[1:]) != rows[1:] or len(shape) != len(rows) or shape[0] > rows[0]:
            words = f"has shape {list(shape)}" if shape is not None else f"is a {type(result.out).__name__}"
            raise TypeError(f"out {words}, not {list(rows)}: the backward was not called")

    def arguments(self, p: Problem) -> dict[str, Any]:
        """Returns the arguments of the call that have a name, by the function's own names."""
        lists = {word: p.library.integers(numbers) for word, numbers in self.lists(p).items()}
        values = self.values(p) | lists
        own = {own: values[word] for word, own in self.signature.names.items() if word in values} | self.more
        for word, side in (("max_seqlen_q", p.q), ("max_seqlen_k", p.kv)):
            name = self.signature.names.get(word, word)
            MaximumTooSmall.check(name, own.get(name), (run.len for run in side.runs))
        return own

    def lists(self, p: Problem) -> dict[str, list[Any]]:
        """Returns the arguments that are lists of integers, by our words: offsets, real lengths, pages."""
        lists = self.offsets_and_lengths(p)
        if p.pages is None:
            return lists
        if self.signature.has("seqused_k"):
            del lists["cu_seqlens_k"]
            lists["seqused_k"] = [run.len for run in p.kv.runs]
        else:
            lists["cu_seqlens_k"] = p.kv.sums
        return lists | {"page_table": p.pages.block_table()}

    def offsets_and_lengths(self, p: Problem) -> dict[str, list[int]]:
        """Returns what says where rows lie that are in no pages."""
        sides = {"q": p.q, "k": p.kv}
        lists = {f"cu_seqlens_{to}": self.offsets(side) for to, side in sides.items()}
        if self.seqused and self.signature.has("cu_seqlens_q_padded"):
            padded = {f"{word}_padded": offsets for word, offsets in lists.items()}
            return {f"cu_seqlens_{to}": side.sums for to, side in sides.items()} | padded
        if self.seqused:
            lists |= {f"seqused_{to}": [run.len for run in side.runs] for to, side in sides.items()}
        return lists

    def values(self, p: Problem) -> dict[str, Any]:
        """Returns the arguments that are no lists, by our words."""
        values = {
            "cu_seqlens_k": None,
            "max_seqlen_q": p.q.max_length,
            "max_seqlen_k": p.kv.max_length,
            "pad_between_seqs": p.pad_between_seqs,
            "softmax_scale": p.scale,
            "causal": p.causal,
            "window_size": self.window(p),
            "return_lse": self.returns_lse,
        }
        if p.softcap is not None:
            values["softcap"] = p.softcap
        return values

    def window(self, p: Problem) -> tuple[int | None, int | None]:
        """Returns the window as FlashAttention's callers write it; `causal` alone says that there is nothing right."""
        none = self.signature.unbounded
        if p.causal and p.left is None and self.signature.has("causal"):
            return (none, none)
        return (none if p.left is None else p.left, none if p.right is None else p.right)

    def offsets(self, side: Side) -> list[int]:
        """Returns where the rows of one side's sequences begin, and where those of the last end."""
        runs = side.runs
        if not self.seqused and not contiguous(runs):
            raise DeclarationError(
                "the sequences of this problem have padding, gaps or another order of keys than of queries, which "
                "cu_seqlens cannot say: the table of a flash_varlen subject must not take them"
            )
        return [run.offset for run in runs] + [runs[-1].end if runs else 0]


def _sinks(signature: Signature, sinks: Iterable[str] | bool | None) -> list[str]:
    if sinks is None or sinks is True:
        sinks = ["none", "learnable"] if signature.has("sink") else ["none"]
    taken = ["none"] if sinks is False else list(sinks)
    if "learnable" in taken and not signature.has("sink"):
        raise DeclarationError(f"sinks={taken}: the function has no argument {', '.join(ALIASES['sink'])}")
    if "off-by-one" in taken:
        raise DeclarationError(
            f'sinks={taken}: FlashAttention\'s signature has no "off-by-one"; use {SINKS[2]!r}'
        )
    return taken


def _on_gpu(library: str, device: str | None) -> bool:
    if device is not None:
        return device != "cpu"
    if library == "cupy":
        return True
    import torch

    return torch.cuda.is_available()
