"""cuDNN's attention through graphs of cudnn-frontend: packed by ragged offsets, with real lengths apart from them.

    seamproof run --backend python:cudnn_graph.py:attention

A graph is built for each kind of problem, which takes a second. `deterministic` asks for the same bits in every run,
`max_logit` for the largest logit of each head, `sinks` for a learnable sink, which Python reaches since cudnn-frontend
1.19. Tried with cudnn-frontend 1.18.0 over cuDNN 9.19.0 on an H100 and an H200, `sinks` with 1.20.0.
"""

import functools

import cudnn
import torch

import seamproof

TYPES = {"bf16": cudnn.data_type.BFLOAT16, "fp16": cudnn.data_type.HALF}
# Results of which an LSE is made.
PARTS = ("max", "sum_exp")
VERSIONS = {"cudnn-frontend": cudnn.__version__, "cudnn-backend": str(cudnn.backend_version())}
handles = {}


def handle():
    stream = torch.cuda.current_stream().cuda_stream
    if stream not in handles:
        handles[stream] = cudnn.create_handle()
        cudnn.set_stream(handle=handles[stream], stream=stream)
    return handles[stream]


class Graph:
    """A graph with its tensors by name."""

    def __init__(self, form):
        kind = TYPES[form]
        single = cudnn.data_type.FLOAT
        self.graph = cudnn.pygraph(
            io_data_type=kind, intermediate_data_type=single, compute_data_type=single, handle=handle()
        )
        self.tensors, self.kind, self.batch = {}, kind, 0

    def plain(self, name, shape, kind):
        strides = [functools.reduce(lambda a, b: a * b, shape[at + 1 :], 1) for at in range(len(shape))]
        return self.add(name, shape, strides, kind)

    def ragged(self, name, batch, heads, length, dim, kind=None):
        """Adds a tensor of packed rows `[rows, heads, dim]`."""
        shape, strides = [batch, heads, length, dim], [length * heads * dim, dim, heads * dim, 1]
        tensor = self.add(name, shape, strides, kind or self.kind)
        tensor.set_ragged_offset(self.offsets(name, batch))
        return tensor

    def offsets(self, name, batch):
        return self.plain(f"{name} offsets", [batch + 1, 1, 1, 1], cudnn.data_type.INT64)

    def add(self, name, shape, strides, kind, **more):
        self.tensors[name] = self.graph.tensor(name=name, dim=shape, stride=strides, data_type=kind, **more)
        return self.tensors[name]

    def result(self, name, tensor, batch, heads, length, dim, kind=None):
        tensor.set_output(True).set_dim([batch, heads, length, dim])
        tensor.set_stride([length * heads * dim, dim, heads * dim, 1]).set_data_type(kind or self.kind)
        tensor.set_ragged_offset(self.offsets(name, batch))
        self.tensors[name] = tensor

    def build(self):
        self.graph.validate()
        self.graph.build_operation_graph()
        self.graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        self.graph.check_support()
        self.graph.build_plans()
        self.bytes = self.graph.get_workspace_size()
        return self

    def run(self, values):
        # A tensor without elements has no address, and cuDNN asks for one.
        values = {name: value if value.numel() else value.new_zeros(1) for name, value in values.items()}
        space = torch.empty(max(self.bytes, 1), dtype=torch.uint8, device="cuda")
        pack = {self.tensors[name]: value for name, value in values.items() if name in self.tensors}
        self.graph.execute(pack, space, handle=handle())


def up(rows):
    """Returns a number of rows that serves many problems, as callers choose it: a graph takes a second to build."""
    return max(64, 1 << (rows - 1).bit_length()) if rows else 64


def described(p):
    """Returns what a graph depends on."""
    return (
        p.format, len(p.sequences), p.heads_q, p.heads_kv, up(p.q.max_span), up(p.kv.max_span), p.dim_qk, p.dim_v,
        p.bottom_right, p.window("cudnn"), up(p.q.rows), up(p.kv.rows),
    )  # fmt: skip


def of_mask(graph, batch, bottom_right, window):
    lengths = [
        graph.plain(name, [batch, 1, 1, 1], cudnn.data_type.INT32) for name in ("lengths q", "lengths kv")
    ]
    align = cudnn.diagonal_alignment.BOTTOM_RIGHT if bottom_right else cudnn.diagonal_alignment.TOP_LEFT
    scale = graph.add("scale", [1, 1, 1, 1], [1, 1, 1, 1], cudnn.data_type.FLOAT, is_pass_by_value=True)
    return {
        "attn_scale": scale, "use_padding_mask": True, "seq_len_q": lengths[0], "seq_len_kv": lengths[1],
        "diagonal_alignment": align, "diagonal_band_left_bound": window[0], "diagonal_band_right_bound": window[1],
    }  # fmt: skip


def of_sink(graph, name, heads, sink):
    shape = [1, heads, 1, 1]
    return {f"{name}_token": graph.plain(name, shape, cudnn.data_type.FLOAT)} if sink else {}


@functools.lru_cache(maxsize=512)
def forward_graph(
    form, batch, heads, kv_heads, q_most, kv_most, dim, dim_v, bottom_right, window, rows_q, rows_kv, sink, max_logit,
):  # fmt: skip
    graph = Graph(form)
    q = graph.ragged("q", batch, heads, q_most, dim)
    k = graph.ragged("k", batch, kv_heads, kv_most, dim)
    v = graph.ragged("v", batch, kv_heads, kv_most, dim_v)
    more = of_mask(graph, batch, bottom_right, window) | of_sink(graph, "sink", heads, sink)
    for name in PARTS if max_logit else ():
        rows = graph.plain(name, [batch, heads, q_most, 1], cudnn.data_type.FLOAT)
        more[f"score_{name}"] = rows.set_output(True)
    # cuDNN gives either the LSE or the two parts that it is made of.
    out, lse = graph.graph.sdpa(q=q, k=k, v=v, generate_stats=not max_logit, **more)
    graph.result("out", out, batch, heads, q_most, dim_v)
    if not max_logit:
        graph.result("lse", lse, batch, heads, q_most, 1, cudnn.data_type.FLOAT)
    return graph.build()


@functools.lru_cache(maxsize=512)
def backward_graph(
    form, batch, heads, kv_heads, q_most, kv_most, dim, dim_v, bottom_right, window, rows_q, rows_kv, sink,
    deterministic,
):  # fmt: skip
    graph = Graph(form)
    q = graph.ragged("q", batch, heads, q_most, dim)
    k = graph.ragged("k", batch, kv_heads, kv_most, dim)
    v = graph.ragged("v", batch, kv_heads, kv_most, dim_v)
    out = graph.ragged("out", batch, heads, q_most, dim_v)
    dout = graph.ragged("dout", batch, heads, q_most, dim_v)
    lse = graph.ragged("lse", batch, heads, q_most, 1, cudnn.data_type.FLOAT)
    more = of_mask(graph, batch, bottom_right, window) | of_sink(graph, "sink", heads, sink)
    more |= of_sink(graph, "dSink", heads, sink)
    if sink:
        more["dSink_token"].set_output(True)
    dq, dk, dv = graph.graph.sdpa_backward(
        q=q, k=k, v=v, o=out, dO=dout, stats=lse, max_total_seq_len_q=rows_q, max_total_seq_len_kv=rows_kv,
        use_deterministic_algorithm=deterministic, **more,
    )  # fmt: skip
    graph.result("dq", dq, batch, heads, q_most, dim)
    graph.result("dk", dk, batch, kv_heads, kv_most, dim)
    graph.result("dv", dv, batch, kv_heads, kv_most, dim_v)
    return graph.build()


def built(graph, *arguments):
    try:
        return graph(*arguments)
    except cudnn.cudnnGraphNotSupportedError as error:
        raise seamproof.Refused(str(error)[:200]) from error


SIDES = {
    "q": "q", "k": "kv", "v": "kv", "out": "q", "lse": "q", "dout": "q", "dq": "q", "dk": "kv", "dv": "kv",
}  # fmt: skip


def of_parts(p, result, values):
    """Adds the LSE and the largest logit of each head, from the two parts of real rows; others may be unwritten."""
    most = [torch.full((p.heads_q, 1), -float("inf"), device="cuda")]
    for index, run in enumerate(p.q.runs):
        largest, sums = (values[name][index, :, : run.len, 0] for name in PARTS)
        result.lse[run.real_rows()] = (largest + sums.log()).T
        most.append(largest)
    result.max_logit = torch.cat(most, 1).amax(1)


def attend(p, q, k, v, dout, sink=None, deterministic=False, max_logit=False):
    batch, key = len(p.sequences), (*described(p), sink is not None)
    values = {
        "q": q, "k": k, "v": v, "out": p.empty("out"), "scale": torch.full((1, 1, 1, 1), p.scale),
        "lse": torch.full((p.q.rows, p.heads_q, 1), float("nan"), device="cuda"),
        "lengths q": p.q.lengths.view(batch, 1, 1, 1), "lengths kv": p.kv.lengths.view(batch, 1, 1, 1),
    }  # fmt: skip
    for name in PARTS if max_logit else ():
        values[name] = torch.full((batch, p.heads_q, up(p.q.max_span), 1), float("nan"), device="cuda")
    if sink is not None:
        values["sink"] = sink.view(1, -1, 1, 1)
    if dout is not None:
        values |= {"dout": dout, "dq": p.empty("dq"), "dk": p.empty("dk"), "dv": p.empty("dv")}
    rows = {"q": p.q.padded_offsets.long(), "kv": p.kv.padded_offsets.long()}
    for name in [name for name in SIDES if name in values]:
        _, heads, dim = values[name].shape
        values[f"{name} offsets"] = (rows[SIDES[name]] * heads * dim).view(batch + 1, 1, 1, 1)
    built(forward_graph, *key, max_logit).run(values)
    result = seamproof.Result(values["out"], lse=values["lse"][:, :, 0])
    if max_logit:
        of_parts(p, result, values)
    if dout is not None:
        values["dSink"] = torch.full((1, p.heads_q, 1, 1), float("nan"), device="cuda")
        built(backward_graph, *key, deterministic).run(values)
        result.dq, result.dk, result.dv = values["dq"], values["dk"], values["dv"]
        if sink is not None:
            result.dsink = values["dSink"].view(-1)
    return result


declared = functools.partial(
    seamproof.subject, arrays="torch", device="cuda", formats=["bf16", "fp16"], d=seamproof.multiples(8, to=256),
    d_v=seamproof.multiples(8, to=256), masks=seamproof.both_alignments(windows=True, most=1 << 30),
    layout=seamproof.packed(padding=True, slack=True, gaps=True, first_offset=True),
    lengths={"no_sequences": False}, lse=seamproof.lse(order="th"),
    # The backward's node is given the stored out, which it needs for D alone.
    arithmetic={"delta": "stored-out"}, start_seconds=300, versions=VERSIONS,
)  # fmt: skip


@declared()
def attention(p, q, k, v, dout=None, sink=None):
    return attend(p, q, k, v, dout)


@declared()
def deterministic(p, q, k, v, dout=None, sink=None):
    return attend(p, q, k, v, dout, deterministic=True)


@declared(statistics=["lse", "max_logit"])
def max_logit(p, q, k, v, dout=None, sink=None):
    return attend(p, q, k, v, dout, max_logit=True)


@declared(sinks=["learnable"])
def sinks(p, q, k, v, dout=None, sink=None):
    return attend(p, q, k, v, dout, sink)
