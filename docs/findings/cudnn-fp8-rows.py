"""cuDNN's backward in FP8: half of dq is zeros behind the last multiple of 16 rows of queries.

Exit code 2 where the defect shows, 0 where it does not.
"""

import sys

import cudnn
import torch

CODE, SINGLE, LANES = cudnn.data_type.FP8_E4M3, cudnn.data_type.FLOAT, 128
handle = cudnn.create_handle()


class CodesGraph:
    """A graph of one sequence and one head, with the values of its tensors."""

    def __init__(self):
        self.graph = cudnn.pygraph(
            io_data_type=CODE, intermediate_data_type=SINGLE, compute_data_type=SINGLE, handle=handle
        )
        self.values = {}

    def given(self, value, kind):
        tensor = self.graph.tensor(dim=list(value.shape), stride=list(value.stride()), data_type=kind)
        self.values[tensor] = value
        return tensor

    def numbers(self, **values):
        return {
            name: self.given(torch.full((1, 1, 1, 1), float(x), device="cuda"), SINGLE)
            for name, x in values.items()
        }

    def result(self, tensor, value, kind):
        tensor.set_output(True).set_dim(list(value.shape)).set_stride(list(value.stride())).set_data_type(
            kind
        )
        self.values[tensor] = value

    def run(self):
        self.graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        space = torch.zeros(max(self.graph.get_workspace_size(), 1), dtype=torch.uint8, device="cuda")
        self.graph.execute(self.values, space, handle=handle)
        torch.cuda.synchronize()


def codes(rows):
    return torch.randn(1, 1, rows, LANES, device="cuda").to(torch.float8_e4m3fn)


def dq_of(q, k, v, dout, scale):
    """Returns dq, with all descales 1 but those of weights and of out."""
    empty = {name: torch.zeros_like(value) for name, value in (("out", q), ("dq", q), ("dk", k), ("dv", v))}
    lse = torch.zeros(*q.shape[:3], 1, device="cuda")
    forward = CodesGraph()
    out, stats, *amax = forward.graph.sdpa_fp8(
        q=forward.given(q, CODE), k=forward.given(k, CODE), v=forward.given(v, CODE),
        **forward.numbers(descale_q=1, descale_k=1, descale_v=1, descale_s=1 / 256, scale_s=256, scale_o=64),
        attn_scale=scale, generate_stats=True,
    )  # fmt: skip
    forward.result(out, empty["out"], CODE)
    forward.result(stats, lse, SINGLE)
    largest = torch.zeros(1, 1, 1, 1, device="cuda")
    for each in amax:
        forward.result(each, largest.clone(), SINGLE)
    forward.run()
    backward = CodesGraph()
    results = backward.graph.sdpa_fp8_backward(
        q=backward.given(q, CODE), k=backward.given(k, CODE), v=backward.given(v, CODE),
        o=backward.given(empty["out"], CODE), dO=backward.given(dout, CODE), stats=backward.given(lse, SINGLE),
        **backward.numbers(
            descale_q=1, descale_k=1, descale_v=1, descale_o=1 / 64, descale_dO=1, descale_s=1 / 256,
            descale_dP=1 / 16, scale_s=256, scale_dQ=8, scale_dK=8, scale_dV=8, scale_dP=16,
        ),
        attn_scale=scale,
    )  # fmt: skip
    for name, each in zip(("dq", "dk", "dv"), results[:3], strict=True):
        backward.result(each, empty[name], CODE)
    for each in results[3:]:
        backward.result(each, largest.clone(), SINGLE)
    backward.run()
    return empty["dq"].double() / 8


torch.manual_seed(0)
shows = False
for rows in (2, 8, 16, 24, 32, 100, 112, 128):
    q, k, v, dout = (codes(rows) for _ in range(4))
    scale = LANES**-0.5
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    weights = torch.softmax(exact[0] @ exact[1].mT * scale, -1)
    (want,) = torch.autograd.grad(weights @ exact[2], exact[:1], dout.double())
    got = dq_of(q, k, v, dout, scale)
    last = got[0, 0, rows // 16 * 16 :]
    zeros = (
        f"; {float((last == 0).double().mean()):.0%} of the last {len(last)} rows are zeros"
        if len(last)
        else ""
    )
    error = float((got - want).norm() / want.norm())
    print(f"{rows} rows: dq is off by {error:.3f} of its norm{zeros}")
    shows |= not error < 0.2
sys.exit(2 if shows else 0)
