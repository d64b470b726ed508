"""cuDNN's backward: dq and dk are wrong where heads of q and k have more than 192 lanes and those of v at most 128.

Exit code 2 where the defect shows, 0 where it does not.
"""

import sys

import cudnn
import torch

HALF, SINGLE = cudnn.data_type.BFLOAT16, cudnn.data_type.FLOAT
handle = cudnn.create_handle()


def run(graph, pack):
    graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    space = torch.zeros(max(graph.get_workspace_size(), 1), dtype=torch.uint8, device="cuda")
    graph.execute(pack, space, handle=handle)
    torch.cuda.synchronize()


def new_graph():
    return cudnn.pygraph(
        io_data_type=HALF, intermediate_data_type=SINGLE, compute_data_type=SINGLE, handle=handle
    )


def gradients(q, k, v, dout, scale):
    """Returns dq and dk of dense attention without a mask; tensors are [batch, heads, rows, lanes]."""
    graph = new_graph()
    given = [graph.tensor_like(x) for x in (q, k, v)]
    out, lse = graph.sdpa(q=given[0], k=given[1], v=given[2], generate_stats=True, attn_scale=scale)
    results = [torch.empty_like(dout), torch.empty(*q.shape[:3], 1, device="cuda")]
    for tensor, result, kind in zip((out, lse), results, (HALF, SINGLE), strict=True):
        tensor.set_output(True).set_dim(list(result.shape)).set_stride(list(result.stride()))
        tensor.set_data_type(kind)
    run(graph, dict(zip((*given, out, lse), (q, k, v, *results), strict=True)))

    graph = new_graph()
    given = [graph.tensor_like(x) for x in (q, k, v, results[0], dout, results[1])]
    names = ("q", "k", "v", "o", "dO", "stats")
    found = graph.sdpa_backward(**dict(zip(names, given, strict=True)), attn_scale=scale)
    grads = [torch.full_like(x, 7.0) for x in (q, k, v)]
    for tensor, result in zip(found, grads, strict=True):
        tensor.set_output(True).set_dim(list(result.shape)).set_stride(list(result.stride()))
        tensor.set_data_type(HALF)
    run(graph, dict(zip((*given, *found), (q, k, v, results[0], dout, results[1], *grads), strict=True)))
    return grads


torch.manual_seed(0)
shows = False
for rows in (64, 128):
    for lanes, lanes_v in ((128, 64), (192, 128), (256, 256), (200, 128), (256, 128), (224, 112), (256, 192)):
        shapes = (lanes, lanes, lanes_v, lanes_v)
        q, k, v, dout = (
            torch.randn(1, 1, rows, d, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for d in shapes
        )
        scale = lanes**-0.5
        try:
            dq, dk, dv = gradients(q.detach(), k.detach(), v.detach(), dout.detach(), scale)
        except cudnn.cudnnGraphNotSupportedError:
            print(f"{rows} rows, {lanes}/{lanes_v} lanes: refused")
            continue
        right = torch.softmax(q.double() @ k.double().mT * scale, -1) @ v.double()
        exact = torch.autograd.grad(right, (q, k, v), dout.double())
        wrong = {}
        for name, got, want in zip(("dq", "dk", "dv"), (dq, dk, dv), exact, strict=True):
            wrong[name] = int(((got.double() - want.double()).abs() > 0.05 + 0.05 * want.abs()).sum())
        first = int((dk == 7.0).all((0, 1, 2)).sum())
        print(
            f"{rows} rows, {lanes}/{lanes_v} lanes: wrong elements {wrong}; lanes of dk never written: {first}"
        )
        shows |= any(wrong.values())
sys.exit(2 if shows else 0)
