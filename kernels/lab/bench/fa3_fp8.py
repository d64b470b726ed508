"""FlashAttention-3 in FP8, as vLLM ships it, as a peer of `seamproof bench attention --pass forward-fp8 --peer`.

usage: fa3_fp8.py EXTENSION [FILE]
  EXTENSION  the file _vllm_fa3_C.abi3.so of vLLM
  FILE       requests, one JSON line a cell; standard input if not given

https://github.com/vllm-project/flash-attention
"""

import itertools
import sys

import torch

from timed import milliseconds, serve, shapes, table

torch.ops.load_library(sys.argv[1])
operator = torch.ops._vllm_fa3_C.fwd


def called(given):
    """Calls the operator, whose arguments are positional, with what is given by name."""
    arguments = []
    for argument in operator.default._schema.arguments:
        if argument.name in given:
            arguments.append(given[argument.name])
        elif argument.has_default_value():
            arguments.append(argument.default_value)
        else:
            arguments.append(DEFAULTS.get(argument.name))
    return operator(*arguments)


# Of arguments without a default, those that are no None.
DEFAULTS = {"is_rotary_interleaved": False, "num_splits": 1, "sm_margin": 0, "cp_world_size": 1, "cp_rank": 0}


def forwards(request):
    """A launch for each set of tensors from N(0, 1), padding too, with a descale for each sequence and KV head."""
    lengths, heads_kv = request["lengths"], request["heads"][1]
    offsets = table([0, *itertools.accumulate(request["padded"])])
    window = request["window"]
    descale = torch.ones(len(lengths), heads_kv, device="cuda")
    told = {
        "cu_seqlens_q": offsets, "cu_seqlens_k": offsets,
        "seqused_q": table(lengths), "seqused_k": table(lengths),
        "max_seqlen_q": max(lengths), "max_seqlen_k": max(lengths),
        "softmax_scale": request["dim"] ** -0.5, "is_causal": request["causal"] and window is None,
        "window_size_left": -1 if window is None else window, "window_size_right": 0 if window is not None else -1,
        "softcap": 0.0, "q_descale": descale, "k_descale": descale, "v_descale": descale,
    }  # fmt: skip

    def one():
        q, k, v = (torch.randn(shape, device="cuda").to(torch.float8_e4m3fn) for shape in shapes(request)[:3])
        out = torch.empty(q.shape, device="cuda", dtype=torch.bfloat16)
        return lambda: called({"q": q, "k": k, "v": v, "out": out, **told})

    return [one() for _ in range(request["sets"])]


if __name__ == "__main__":
    serve(lambda request: {"ms": milliseconds(request, forwards(request))}, sys.argv[2:])
