"""cuDNN's packed forward never writes out and the LSE where a sequence has no keys.

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


def random(rows, lanes):
    return torch.randn(rows, 1, lanes, device="cuda", dtype=torch.bfloat16)


shows = False
for lengths in ({"q": [1], "k": [0]}, {"q": [3, 5], "k": [0, 5]}, {"q": [5, 3], "k": [5, 0]}):
    graph = Graph(lengths)
    rows, keys = sum(lengths["q"]), max(1, sum(lengths["k"]))
    q, k, v = random(rows, 64), random(keys, 64), random(keys, 64)
    out, lse = torch.full_like(q, 7.0), torch.full((rows, 1, 1), 7.0, device="cuda")
    tensors = {"q": graph.packed(q, "q"), "k": graph.packed(k, "k"), "v": graph.packed(v, "k")}
    results = graph.graph.sdpa(**tensors, generate_stats=True, attn_scale=0.125, **graph.mask())
    graph.packed(out, "q", results[0])
    graph.packed(lse, "q", results[1])
    graph.run()
    unwritten = (out == 7.0).all(2)[:, 0].tolist()
    print(f"{lengths}: rows of out never written: {[row for row, is_it in enumerate(unwritten) if is_it]}")
    print(f"  lse: {lse.flatten().tolist()}")
    shows |= any(unwritten)
sys.exit(2 if shows else 0)
