"""A stand-in for cudnn-frontend, whose graphs need a GPU: `install` puts it where the package would be.

A graph has the nodes in FP8, with the arguments that those of 1.18 have, and computes them in plain torch on the memory
that it is given, by the shapes and strides that were declared.
"""

from __future__ import annotations

import enum
import sys
import types

import torch

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


class DataType(enum.Enum):
    FLOAT = torch.float32
    HALF = torch.float16
    BFLOAT16 = torch.bfloat16
    INT32 = torch.int32
    INT64 = torch.int64
    FP8_E4M3 = torch.float8_e4m3fn
    FP8_E5M2 = torch.float8_e5m2


class Tensor:
    """A tensor of a graph: what is declared of it, and where its memory is while the graph runs."""

    def __init__(self, dim=None, stride=None, kind=None):
        self.dim, self.stride, self.kind, self.is_output = dim, stride, kind, False

    def set_output(self, flag):
        self.is_output = flag
        return self

    def set_dim(self, dim):
        self.dim = dim
        return self

    def set_stride(self, stride):
        self.stride = stride
        return self

    def set_data_type(self, kind):
        self.kind = kind
        return self

    def bind(self, memory):
        assert memory.dtype == self.kind.value, f"{memory.dtype} is not {self.kind}"
        flat = memory.reshape(-1)
        assert flat.data_ptr() == memory.data_ptr(), "the memory is not dense"
        assert flat.numel() > sum((d - 1) * s for d, s in zip(self.dim, self.stride, strict=True))
        self.memory = torch.as_strided(flat, self.dim, self.stride)

    def value(self):
        return self.memory.float()

    def number(self):
        assert list(self.dim) == [1, 1, 1, 1]
        return self.value().item()

    def store(self, values):
        """Writes values in the tensor's format, saturating."""
        assert self.is_output
        most = LARGEST.get(self.kind.value, torch.inf)
        codes = values.clamp(-most, most).to(self.kind.value)
        if codes.element_size() == 1:
            codes, self.memory = codes.view(torch.uint8), self.memory.view(torch.uint8)
        self.memory.copy_(codes)


def rounded(values, scale, kind):
    most = LARGEST[kind.value]
    return (values * scale).clamp(-most, most).to(kind.value).float()


def hidden(q, k, causal, seq_len_q, seq_len_kv):
    """Returns which keys each query does not see, `[batch, 1, queries, keys]`."""
    (batch, _, queries, _), keys = q.dim, k.dim[2]
    i, j = torch.arange(queries)[:, None], torch.arange(keys)
    masked = (j > i) if causal else torch.zeros(queries, keys, dtype=torch.bool)
    masked = masked.expand(batch, 1, queries, keys).clone()
    if seq_len_q is not None:
        masked |= (i >= seq_len_q.memory.view(-1, 1, 1, 1)) | (j >= seq_len_kv.memory.view(-1, 1, 1, 1))
    return masked


def of_heads(tensor, heads):
    return tensor.value().repeat_interleave(heads // tensor.dim[1], 1)


class Graph:
    def __init__(self, io_data_type, intermediate_data_type, compute_data_type, handle):
        self.inputs, self.outputs, self.node = [], [], None

    def tensor(self, name, dim, stride, data_type, is_pass_by_value=False):
        self.inputs.append(Tensor(dim, stride, data_type))
        return self.inputs[-1]

    def added(self, node, count):
        self.node, self.outputs = node, [Tensor() for _ in range(count)]
        return self.outputs

    def sdpa_fp8(
        self, q, k, v, descale_q, descale_k, descale_v, descale_s, scale_s, scale_o, attn_scale=None,
        use_padding_mask=False, seq_len_q=None, seq_len_kv=None, use_causal_mask=False, generate_stats=None,
    ):  # fmt: skip
        assert generate_stats and use_padding_mask == (seq_len_q is not None)

        def node(o, stats, amax_s, amax_o):
            heads = q.dim[1]
            scale = attn_scale.number() * descale_q.number() * descale_k.number()
            logits = scale * q.value() @ of_heads(k, heads).transpose(2, 3)
            logits = logits.masked_fill(hidden(q, k, use_causal_mask, seq_len_q, seq_len_kv), -torch.inf)
            top = logits.amax(3, keepdim=True)
            weights = torch.exp(logits - top).nan_to_num(0)
            total = weights.sum(3, keepdim=True)
            some = total > 0
            out = rounded(weights, scale_s.number(), q.kind) @ of_heads(v, heads)
            out = torch.where(some, out * descale_s.number() / total * descale_v.number(), 0)
            stats.store(torch.where(some, top + torch.log(total), -torch.inf))
            o.store(out * scale_o.number())
            amax_s.store(torch.where(some, 1 / total, 0).amax().view(1, 1, 1, 1))
            amax_o.store(out.abs().amax().view(1, 1, 1, 1))

        return self.added(node, 4)

    def sdpa_fp8_backward(
        self, q, k, v, o, dO, stats, descale_q, descale_k, descale_v, descale_o, descale_dO, descale_s, descale_dP,
        scale_s, scale_dQ, scale_dK, scale_dV, scale_dP, attn_scale=None, use_padding_mask=False, seq_len_q=None,
        seq_len_kv=None, use_causal_mask=False, use_deterministic_algorithm=False,
    ):  # fmt: skip
        def node(dq, dk, dv, amax_dq, amax_dk, amax_dv, amax_dp):
            heads, number = q.dim[1], Tensor.number
            keys, values = of_heads(k, heads), of_heads(v, heads)
            masked = hidden(q, k, use_causal_mask, seq_len_q, seq_len_kv)
            dout, scale = dO.value().masked_fill(masked.all(3, keepdim=True), 0), number(attn_scale)
            logits = scale * number(descale_q) * number(descale_k) * q.value() @ keys.transpose(2, 3)
            weights = torch.exp((logits - stats.value()).masked_fill(masked, -torch.inf)).nan_to_num(0)
            d = (dout * o.value()).sum(3, keepdim=True) * number(descale_dO) * number(descale_o)
            dp = dout @ values.transpose(2, 3) * number(descale_dO) * number(descale_v)
            ds = (weights * (dp - d) * scale).masked_fill(masked, 0)
            codes = rounded(ds, number(scale_dP), dO.kind)
            weights = rounded(weights, number(scale_s), q.kind)
            shares = {
                (dq, amax_dq, scale_dQ): codes @ keys * number(descale_dP) * number(descale_k),
                (dk, amax_dk, scale_dK): codes.transpose(2, 3)
                @ q.value()
                * number(descale_dP)
                * number(descale_q),
                (dv, amax_dv, scale_dV): weights.transpose(2, 3)
                @ dout
                * number(descale_s)
                * number(descale_dO),
            }
            for (gradient, amax, scale), share in shares.items():
                total = share.unflatten(1, (gradient.dim[1], -1)).sum(2)
                gradient.store(total * number(scale))
                amax.store(total.abs().amax().view(1, 1, 1, 1))
            amax_dp.store(ds.abs().amax().view(1, 1, 1, 1))

        return self.added(node, 7)

    def validate(self):
        assert all(tensor.is_output and tensor.dim and tensor.kind for tensor in self.outputs)

    def build_operation_graph(self):
        pass

    def create_execution_plans(self, heuristics):
        pass

    def check_support(self):
        pass

    def build_plans(self):
        pass

    def get_workspace_size(self):
        return 0

    def execute(self, pack, space, handle):
        assert set(pack) == set(self.inputs + self.outputs)
        for tensor, memory in pack.items():
            tensor.bind(memory)
        self.node(*self.outputs)


def install(monkeypatch):
    module = types.ModuleType("cudnn")
    module.data_type, module.pygraph = DataType, Graph
    module.heur_mode = types.SimpleNamespace(A=0, FALLBACK=1)
    module.cudnnGraphNotSupportedError = type("cudnnGraphNotSupportedError", (Exception,), {})
    module.__version__, module.backend_version = "1.18.0", lambda: 91900
    monkeypatch.setitem(sys.modules, "cudnn", module)
