"""What a recorded call must not do: the judge knows no dropout, no additive bias and no masks of one's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import DeclarationError

INPUTS = ("q", "k", "v")
# Arguments and attributes of attention that the judge does not know, by the word for them.
OUTSIDE = {
    "dropout": ("dropout", "dropout_p", "attention_dropout", "attn_dropout"),
    "an additive bias": ("bias", "attn_bias", "core_attention_bias", "attention_bias", "score_mod"),
    "ALiBi": ("alibi_slopes", "alibi"),
    "masks by element (declare the mask, by causal= and window=)": (
        "attn_mask",
        "attention_mask",
        "mask",
        "key_padding_mask",
        "block_mask",
        "mask_mod",
    ),
}

BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
COLLECTED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def check_arguments(named: Mapping[str, Any]) -> None:
    """Refuses arguments that are set and that the judge does not know."""
    for word, names in OUTSIDE.items():
        for name in names:
            value = named.get(name)
            if value is not None and not (isinstance(value, bool | int | float) and not value):
                raise DeclarationError(
                    f"{name} is set: the judge does not know {word}, so nothing is recorded; turn it off"
                )


def check_attributes(module: Any) -> None:
    """Refuses a module that is set up to drop weights."""
    if getattr(module, "training", False):
        for name in OUTSIDE["dropout"]:
            value = getattr(module, name, None)
            rate = getattr(value, "p", value)
            if isinstance(rate, int | float):
                check_arguments({name: rate})


def by_name(
    function: Callable[..., Any], arguments: Sequence[Any], named: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the arguments of a call by their names, with the defaults of those that are not passed.

    Where a function does not tell the names of its parameters, arguments past q, k and v must be passed by name: any
    of them could be a dropout or a mask.
    """
    if len(arguments) < len(INPUTS):
        raise DeclarationError("pass q, k and v as the first three arguments of the recorded call")
    # A module of torch takes anything, and hands it to its `forward`.
    function = getattr(function, "forward", function)
    try:
        signature = inspect.signature(function)
        bound = signature.bind(*arguments, **named)
    except (TypeError, ValueError):
        parameters, values = {}, {}
    else:
        bound.apply_defaults()
        parameters, values = signature.parameters, bound.arguments
    told = [name for name, parameter in parameters.items() if parameter.kind in BY_POSITION]
    past = len(arguments) - max(len(told), len(INPUTS))
    if past > 0:
        raise DeclarationError(
            f"{past} of the call's arguments past q, k and v are passed by position, and {_name(function)} does not "
            "tell their names: any could be a dropout, a bias or a mask; pass them by name"
        )
    return {
        **{name: value for name, value in values.items() if parameters[name].kind not in COLLECTED},
        **named,
    }


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)
