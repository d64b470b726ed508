"""cuDNN's forward in FP8: an illegal memory access where v has more than 128 lanes and q and k have at most 128.

Exit code 2 where the defect shows, 0 where it does not.
"""

import subprocess
import sys

import cudnn
import torch

CODE, SINGLE, ROWS = cudnn.data_type.FP8_E4M3, cudnn.data_type.FLOAT, 32


def forward(lanes, lanes_v):
    """Returns the relative error of out, of one sequence and one head without a mask."""
    torch.manual_seed(0)
    handle = cudnn.create_handle()
    graph = cudnn.pygraph(
        io_data_type=CODE, intermediate_data_type=SINGLE, compute_data_type=SINGLE, handle=handle
    )
    values = {}

    def given(value, kind):
        tensor = graph.tensor(dim=list(value.shape), stride=list(value.stride()), data_type=kind)
        values[tensor] = value
        return tensor

    def result(tensor, value, kind):
        tensor.set_output(True).set_dim(list(value.shape)).set_stride(list(value.stride())).set_data_type(
            kind
        )
        values[tensor] = value

    q, k, v = (
        torch.randn(1, 1, ROWS, d, device="cuda").to(torch.float8_e4m3fn) for d in (lanes, lanes, lanes_v)
    )
    numbers = {
        "descale_q": 1,
        "descale_k": 1,
        "descale_v": 1,
        "descale_s": 1 / 256,
        "scale_s": 256,
        "scale_o": 64,
    }
    numbers = {
        name: given(torch.full((1, 1, 1, 1), float(x), device="cuda"), SINGLE) for name, x in numbers.items()
    }
    scale, out = lanes**-0.5, torch.zeros_like(v)
    tensor, stats, *amax = graph.sdpa_fp8(
        q=given(q, CODE), k=given(k, CODE), v=given(v, CODE), attn_scale=scale, generate_stats=True, **numbers
    )
    result(tensor, out, CODE)
    result(stats, torch.zeros(1, 1, ROWS, 1, device="cuda"), SINGLE)
    for each in amax:
        result(each, torch.zeros(1, 1, 1, 1, device="cuda"), SINGLE)
    graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    space = torch.zeros(max(graph.get_workspace_size(), 1), dtype=torch.uint8, device="cuda")
    graph.execute(values, space, handle=handle)
    torch.cuda.synchronize()
    want = torch.softmax(q.double() @ k.double().mT * scale, -1) @ v.double()
    return float((out.double() / 64 - want).norm() / want.norm())


if len(sys.argv) == 3:
    print(f"out is off by {forward(int(sys.argv[1]), int(sys.argv[2])):.3f} of its norm")
    sys.exit(0)
shows = False
for shape in (
    (64, 64),
    (64, 128),
    (128, 64),
    (256, 256),
    (256, 128),
    (64, 144),
    (64, 224),
    (128, 192),
    (16, 160),
):
    # After an illegal access nothing runs any more in a process.
    run = subprocess.run([sys.executable, __file__, *map(str, shape)], capture_output=True, text=True)
    said = (run.stdout + run.stderr).strip().splitlines() or ["nothing was said"]
    error = next((line for line in said if "Error" in line), said[-1])
    print(f"{shape[0]}/{shape[1]} lanes: {error[:120] if run.returncode else said[0]}")
    shows |= "illegal memory access" in run.stderr
sys.exit(2 if shows else 0)
