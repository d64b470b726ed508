"""cuDNN's packed backward: dq and dk are wrong where q and k have more than 192 lanes, and v at most 128.

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


def gradients(q, k, v, dout, scale):
    """Returns dq, dk and dv of packed attention without a mask."""
    graph = Graph({"q": LENGTHS, "k": LENGTHS})
    out, lse = torch.empty_like(dout), torch.empty(len(q), q.shape[1], 1, device="cuda")
    tensors = {"q": graph.packed(q, "q"), "k": graph.packed(k, "k"), "v": graph.packed(v, "k")}
    results = graph.graph.sdpa(**tensors, generate_stats=True, attn_scale=scale, **graph.mask())
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
    sizes = {"max_total_seq_len_q": 64, "max_total_seq_len_kv": 64}
    results = graph.graph.sdpa_backward(**tensors, attn_scale=scale, **graph.mask(), **sizes)
    found = [torch.full_like(value, 7.0) for value in (q, k, v)]
    for tensor, value, side in zip(results, found, "qkk", strict=True):
        graph.packed(value, side, tensor)
    graph.run()
    return found


def exact(q, k, v, dout, scale):
    q, k, v = (x.double().requires_grad_() for x in (q, k, v))
    outs, first = [], 0
    for rows in LENGTHS:
        each = [x[first : first + rows].transpose(0, 1) for x in (q, k, v)]
        outs.append((torch.softmax(each[0] @ each[1].mT * scale, -1) @ each[2]).transpose(0, 1))
        first += rows
    return torch.autograd.grad(torch.cat(outs), (q, k, v), dout.double())


torch.manual_seed(0)
LENGTHS, shows = [5, 9], False
for lanes, lanes_v in (
    (128, 64),
    (136, 64),
    (192, 128),
    (256, 256),
    (200, 72),
    (200, 128),
    (256, 128),
    (256, 192),
):
    given = [
        torch.randn(sum(LENGTHS), 1, d, device="cuda", dtype=torch.bfloat16)
        for d in (lanes, lanes, lanes_v, lanes_v)
    ]
    try:
        got = gradients(*given, lanes**-0.5)
    except cudnn.cudnnGraphNotSupportedError:
        print(f"{lanes}/{lanes_v} lanes: refused")
        continue
    wrong = {}
    for name, found, want in zip(("dq", "dk", "dv"), got, exact(*given, lanes**-0.5), strict=True):
        wrong[name] = int(((found.double() - want).abs() > 0.05 + 0.05 * want.abs()).sum())
    unwritten = int((got[1] == 7.0).all(0).sum())
    print(f"{lanes}/{lanes_v} lanes: wrong elements {wrong}; lanes of dk never written: {unwritten}")
    shows |= any(wrong.values())
sys.exit(2 if shows else 0)
