"""FlashAttention-4 as a peer of `seamproof bench attention --peer`: times its forward on one cell after the other.

usage: fa4.py [SITE [FILE]]
  SITE  a folder with the packages torch and flash_attn.cute (flash-attn-4), where they are not installed
  FILE  requests, one JSON line a cell; standard input if not given

A request and its answer are described in src/bench/peer.rs. https://github.com/Dao-AILab/flash-attention
"""

import itertools
import json
import site
import statistics
import sys
import warnings

if len(sys.argv) > 1:
    sys.path.insert(0, sys.argv[1])
    site.addsitedir(sys.argv[1])
warnings.filterwarnings("ignore")

import torch
from flash_attn.cute import flash_attn_varlen_func

# Cycles of a GPU that waits while the host asks for launches: some milliseconds, so that no launch waits for the host.
WAIT_CYCLES = 20_000_000


def table(numbers):
    return torch.tensor(numbers, dtype=torch.int32, device="cuda")


def tensors(request):
    """q, k, v from N(0, 1), padding too. They ask for gradients, so that the forward keeps its LSE, as ours does."""
    rows = sum(request["padded"])
    heads_q, heads_kv = request["heads"]
    shapes = [(rows, heads, request["dim"]) for heads in (heads_q, heads_kv, heads_kv)]
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for shape in shapes]


def forward(request):
    """A function that launches the forward on a set of tensors."""
    lengths = request["lengths"]
    offsets = table([0, *itertools.accumulate(request["padded"])])
    arguments = dict(
        cu_seqlens_q=offsets,
        cu_seqlens_k=offsets,
        seqused_q=table(lengths),
        seqused_k=table(lengths),
        max_seqlen_q=max(lengths),
        max_seqlen_k=max(lengths),
        causal=request["causal"],
        window_size=(None, None) if request["window"] is None else (request["window"], 0),
    )
    return lambda q, k, v: flash_attn_varlen_func(q, k, v, **arguments)


def milliseconds(request):
    sets = [tensors(request) for _ in range(request["sets"])]
    launch = forward(request)
    launches, times = request["launches"], []
    for _ in range(request["warm_up"] + request["repetitions"]):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(WAIT_CYCLES)
        begin.record()
        for number in range(launches):
            launch(*sets[number % len(sets)])
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / launches)
    return statistics.median(times[request["warm_up"] :])


def main():
    requests = open(sys.argv[2]) if len(sys.argv) > 2 else sys.stdin
    torch.manual_seed(0)
    for line in requests:
        request = json.loads(line)
        answer = {"track": request["track"], "column": request["column"]}
        try:
            with torch.no_grad():
                answer["ms"] = milliseconds(request)
        except Exception as error:  # whatever it is, the next cell may do better
            answer["error"] = f"{type(error).__name__}: {error}"[:200].replace("\n", " ")
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
