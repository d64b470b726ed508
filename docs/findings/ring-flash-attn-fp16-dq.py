"""ring-flash-attn: dq of fp16 inputs is rounded to bf16 on its way.

The kernel is replaced by one whose dq is a number of fp16, so flash_attn and a GPU are not needed.
Exit code 2 where the defect shows, 0 where it does not.
"""

import sys
import types

import torch
import torch.distributed as dist

DQ = 1 + 2**-10  # the number of fp16 behind 1; bf16 has none between 1 and 1 + 2⁻⁷


def forward(q, k, v, dropout_p, softmax_scale, causal, window_size=(-1, -1), alibi_slopes=None, **more):
    return q, torch.zeros(q.shape[0], q.shape[2], q.shape[1]), None, None


def backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size=(-1, -1),
             alibi_slopes=None, deterministic=False, rng_state=None):  # fmt: skip
    for gradient in (dq, dk, dv):
        gradient.fill_(DQ)


interface = types.ModuleType("flash_attn.flash_attn_interface")
interface._flash_attn_forward = interface._flash_attn_varlen_forward = forward
interface._flash_attn_backward = interface._flash_attn_varlen_backward = backward
sys.modules |= {"flash_attn": types.ModuleType("flash_attn"), interface.__name__: interface}
bindings = types.ModuleType("ring_flash_attn.adapters")  # those of transformers, which are not needed either
bindings.substitute_hf_flash_attn = bindings.update_ring_flash_attn_params = None
sys.modules[bindings.__name__] = bindings

from ring_flash_attn import ring_flash_attn_func, zigzag_ring_flash_attn_func  # noqa: E402


def to_itself(calls):
    """A ring of one rank sends to itself, which gloo cannot."""
    for send, receive in zip(calls[::2], calls[1::2], strict=True):
        receive.tensor.copy_(send.tensor)
    return []


dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.batch_isend_irecv = to_itself
shows = False
for function in (ring_flash_attn_func, zigzag_ring_flash_attn_func):
    q, k, v = (torch.ones(1, 2, 1, 8, dtype=torch.float16, requires_grad=True) for _ in range(3))
    function(q, k, v, causal=True).sum().backward()
    got = {name: tensor.grad[0, 0, 0, 0].item() for name, tensor in (("dq", q), ("dk", k), ("dv", v))}
    print(f"{function.__name__}: the kernel returned {DQ}; {got}")
    shows |= got["dq"] != DQ
sys.exit(2 if shows else 0)
