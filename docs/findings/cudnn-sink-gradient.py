"""cuDNN's packed backward: the gradient of a sink is made of other memory, for most numbers of lanes.

Needs cudnn-frontend 1.19 or later, whose `sdpa` takes a sink from Python, and none that refuses it.
Exit code 2 where the defect shows, 0 where it does not.
"""

import sys

import cudnn
import torch

HALF, SINGLE = cudnn.data_type.BFLOAT16, cudnn.data_type.FLOAT
handle = cudnn.create_handle()


class Graph:
    """A graph of packed tensors [rows, heads, lanes], with their values; `lengths` are those of the sequences."""

    def __init__(self, lengths):
        self.graph = cudnn.pygraph(
            io_data_type=HALF, intermediate_data_type=SINGLE, compute_data_type=SINGLE, handle=handle
        )
        self.lengths, self.values = lengths, {}

    def plain(self, value, kind=SINGLE):
        tensor = self.graph.tensor(dim=list(value.shape), stride=list(value.stride()), data_type=kind)
        self.values[tensor] = value
        return tensor

    def packed(self, value, side, tensor=None):
        """Adds an input, or with `tensor` a result."""
        lengths, (_, heads, lanes) = self.lengths[side], value.shape
        shape, strides = [len(lengths), heads, 64, lanes], [64 * heads * lanes, lanes, heads * lanes, 1]
        kind = SINGLE if value.dtype == torch.float32 else HALF
        if tensor is None:
            tensor = self.graph.tensor(dim=shape, stride=strides, data_type=kind)
        else:
            tensor.set_output(True).set_dim(shape).set_stride(strides).set_data_type(kind)
        rows = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], device="cuda")
        tensor.set_ragged_offset(self.plain((rows * heads * lanes).view(-1, 1, 1, 1), cudnn.data_type.INT64))
        self.values[tensor] = value
        return tensor

    def mask(self):
        rows = [
            torch.tensor(self.lengths[side], dtype=torch.int32, device="cuda").view(-1, 1, 1, 1)
            for side in "qk"
        ]
        lengths = [self.plain(each, cudnn.data_type.INT32) for each in rows]
        return {"use_padding_mask": True, "seq_len_q": lengths[0], "seq_len_kv": lengths[1]}

    def run(self):
        self.graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        space = torch.zeros(max(self.graph.get_workspace_size(), 1), dtype=torch.uint8, device="cuda")
        self.graph.execute(self.values, space, handle=handle)
        torch.cuda.synchronize()


def random(lanes):
    return torch.randn(sum(LENGTHS), 1, lanes, device="cuda", dtype=torch.bfloat16)


def gradient(q, k, v, dout, sink):
    """Returns the gradient of the sink as cuDNN sees it."""
    graph = Graph({"q": LENGTHS, "k": LENGTHS})
    out, lse = torch.empty_like(v), torch.empty(len(q), 1, 1, device="cuda")
    tensors = {"q": graph.packed(q, "q"), "k": graph.packed(k, "k"), "v": graph.packed(v, "k")}
    more = {"attn_scale": SCALE, "sink_token": graph.plain(sink), **graph.mask()}
    results = graph.graph.sdpa(**tensors, generate_stats=True, **more)
    graph.packed(out, "q", results[0])
    graph.packed(lse, "q", results[1])
    graph.run()

    graph = Graph({"q": LENGTHS, "k": LENGTHS})
    given = {
        "q": (q, "q"),
        "k": (k, "k"),
        "v": (v, "k"),
        "o": (out, "q"),
        "dO": (dout, "q"),
        "stats": (lse, "q"),
    }
    tensors = {name: graph.packed(*value) for name, value in given.items()}
    dsink = torch.full_like(sink, 7.0)
    more = {
        "attn_scale": SCALE,
        "sink_token": graph.plain(sink),
        "dSink_token": graph.plain(dsink),
        **graph.mask(),
    }
    more["dSink_token"].set_output(True)
    sizes = {"max_total_seq_len_q": 64, "max_total_seq_len_kv": 64}
    results = graph.graph.sdpa_backward(**tensors, **more, **sizes)
    for tensor, value, side in zip(results, (q, k, v), "qkk", strict=True):
        graph.packed(torch.empty_like(value), side, tensor)
    graph.run()
    return dsink.item()


def exact(q, k, v, dout, sink):
    total, first = 0.0, 0
    for rows in LENGTHS:
        each = [x[first : first + rows, 0].double() for x in (q, k, v, dout)]
        logits = torch.cat([each[0] @ each[1].T * SCALE, sink.double().view(1, 1).expand(rows, 1)], 1)
        weights = torch.softmax(logits, 1)
        total -= (weights[:, -1] * ((weights[:, :-1] @ each[2]) * each[3]).sum(1)).sum().item()
        first += rows
    return total


torch.manual_seed(0)
LENGTHS, SCALE, shows = [5, 9], 0.125, False
for lanes in (16, 64, 80, 96, 128):
    given = [random(lanes) for _ in range(4)] + [torch.full((1, 1, 1, 1), 0.5, device="cuda")]
    got, want = gradient(*given), exact(*given)
    print(f"{lanes} lanes: gradient of the sink {got:.4f}, exact {want:.4f}")
    shows |= not abs(got - want) < 0.05 + 0.05 * abs(want)
sys.exit(2 if shows else 0)
