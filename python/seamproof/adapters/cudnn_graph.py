"""cuDNN's attention through graphs of cudnn-frontend: packed by ragged offsets, with real lengths apart from them.

    seamproof run --backend python:cudnn_graph.py:attention

A graph is built for each kind of problem, which takes a second. `deterministic` asks for the same bits in every run,
`max_logit` for the largest logit of each head, `sinks` for a learnable sink, which Python reaches since cudnn-frontend
1.19. Tried with cudnn-frontend 1.18.0 over cuDNN 9.19.0 on an H100 and an H200, `sinks` with 1.20.0.

`fp8` is the forward in FP8 of each sequence by itself, with given scales, and `fp8_batch` that of a padded batch, as
Hopper has no packed one. `fp8_both` and `fp8_batch_both` have the backward beside it, `fp8_deterministic` asks it for
the same bits, and `fp8_grouped` takes grouped heads. Their rows are copied into memory of a multiple of 128 rows, as
callers have it. `fp8_any_rows` leaves them where they are, and `fp8_wide_values` has any number of lanes of v: cuDNN
takes both, and fails. They are written after the node's sources
(https://github.com/NVIDIA/cudnn-frontend/blob/v1.18.0/python/pygraph/sdpa.cpp).
"""

import functools

import cudnn
import torch

import seamproof

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TYPES = {
    "bf16": cudnn.data_type.BFLOAT16, "fp16": cudnn.data_type.HALF, "e4m3": cudnn.data_type.FP8_E4M3,
    "e5m2": cudnn.data_type.FP8_E5M2,
}  # fmt: skip
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
        space = torch.empty(max(self.bytes, 1), dtype=torch.uint8, device=DEVICE)
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
    most = [torch.full((p.heads_q, 1), -float("inf"), device=DEVICE)]
    for index, run in enumerate(p.q.runs):
        largest, sums = (values[name][index, :, : run.len, 0] for name in PARTS)
        result.lse[run.real_rows()] = (largest + sums.log()).T
        most.append(largest)
    result.max_logit = torch.cat(most, 1).amax(1)


def attend(p, q, k, v, dout, sink=None, deterministic=False, max_logit=False):
    batch, key = len(p.sequences), (*described(p), sink is not None)
    values = {
        "q": q, "k": k, "v": v, "out": p.empty("out"), "scale": torch.full((1, 1, 1, 1), p.scale),
        "lse": torch.full((p.q.rows, p.heads_q, 1), float("nan"), device=DEVICE),
        "lengths q": p.q.lengths.view(batch, 1, 1, 1), "lengths kv": p.kv.lengths.view(batch, 1, 1, 1),
    }  # fmt: skip
    for name in PARTS if max_logit else ():
        values[name] = torch.full((batch, p.heads_q, up(p.q.max_span), 1), float("nan"), device=DEVICE)
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
        values["dSink"] = torch.full((1, p.heads_q, 1, 1), float("nan"), device=DEVICE)
        built(backward_graph, *key, deterministic).run(values)
        result.dq, result.dk, result.dv = values["dq"], values["dk"], values["dv"]
        if sink is not None:
            result.dsink = values["dSink"].view(-1)
    return result


declared = functools.partial(
    seamproof.subject, arrays="torch", device=DEVICE, formats=["bf16", "fp16"], d=seamproof.multiples(8, to=256),
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


# --- in FP8, with given scales

CODES, HYBRID = "e4m3/tensor", "e5m2/tensor"
# The quantities of which a graph returns the largest magnitude, by the names that its results have here.
FORWARD_AMAX, BACKWARD_AMAX = ("p", "out"), ("dq", "dk", "dv", "ds")


class Fp8Graph(Graph):
    """A graph of codes: a batch of sequences that are equally long in memory, of one head after the other."""

    def number(self, name):
        return self.plain(name, [1, 1, 1, 1], cudnn.data_type.FLOAT)

    def numbers(self, **names):
        """Returns the arguments that are one number each, by the names of their tensors."""
        return {argument: self.number(name) for argument, name in names.items()}

    def rows(self, name, batch, heads, length, dim, kind):
        return self.add(name, *of_rows(batch, heads, length, dim), kind)

    def result(self, name, tensor, dim, stride, kind):
        tensor.set_output(True).set_dim(dim).set_stride(stride).set_data_type(kind)
        self.tensors[name] = tensor

    def largest(self, names, tensors):
        for name, tensor in zip(names, tensors, strict=True):
            self.result(f"amax {name}", tensor, [1, 1, 1, 1], [1, 1, 1, 1], cudnn.data_type.FLOAT)


def of_rows(batch, heads, length, dim):
    """Returns the shape and the strides of rows `[batch, length, heads, dim]`, with heads before rows."""
    return [batch, heads, length, dim], [length * heads * dim, dim, heads * dim, 1]


def of_statistics(batch, heads, length):
    return [batch, heads, length, 1], [heads * length, length, 1, 1]


def of_fp8_mask(graph, batch, causal, padded):
    scale = graph.add("scale", [1, 1, 1, 1], [1, 1, 1, 1], cudnn.data_type.FLOAT, is_pass_by_value=True)
    given = {"attn_scale": scale, "use_causal_mask": causal, "use_padding_mask": padded}
    for name in ("q", "kv") if padded else ():
        given[f"seq_len_{name}"] = graph.plain(f"lengths {name}", [batch, 1, 1, 1], cudnn.data_type.INT32)
    return given


@functools.lru_cache(maxsize=512)
def fp8_forward_graph(forms, batch, heads, kv_heads, length_q, length_kv, dim, dim_v, causal, padded):
    graph, kinds = Fp8Graph("e4m3"), {name: TYPES[form] for name, form in forms}
    o, stats, *amax = graph.graph.sdpa_fp8(
        q=graph.rows("q", batch, heads, length_q, dim, kinds["q"]),
        k=graph.rows("k", batch, kv_heads, length_kv, dim, kinds["k"]),
        v=graph.rows("v", batch, kv_heads, length_kv, dim_v, kinds["v"]),
        **graph.numbers(
            descale_q="descale q", descale_k="descale k", descale_v="descale v", descale_s="descale p",
            scale_s="scale p", scale_o="scale out",
        ),
        generate_stats=True, **of_fp8_mask(graph, batch, causal, padded),
    )  # fmt: skip
    graph.result("out", o, *of_rows(batch, heads, length_q, dim_v), kinds["out"])
    graph.result("lse", stats, *of_statistics(batch, heads, length_q), cudnn.data_type.FLOAT)
    graph.largest(FORWARD_AMAX, amax)
    return graph.build()


@functools.lru_cache(maxsize=512)
def fp8_backward_graph(
    forms, batch, heads, kv_heads, length_q, length_kv, dim, dim_v, causal, padded, deterministic
):
    graph, kinds = Fp8Graph("e4m3"), {name: TYPES[form] for name, form in forms}
    shape = of_statistics(batch, heads, length_q)
    dq, dk, dv, *amax = graph.graph.sdpa_fp8_backward(
        q=graph.rows("q", batch, heads, length_q, dim, kinds["q"]),
        k=graph.rows("k", batch, kv_heads, length_kv, dim, kinds["k"]),
        v=graph.rows("v", batch, kv_heads, length_kv, dim_v, kinds["v"]),
        o=graph.rows("out", batch, heads, length_q, dim_v, kinds["out"]),
        dO=graph.rows("dout", batch, heads, length_q, dim_v, kinds["dout"]),
        stats=graph.add("lse", *shape, cudnn.data_type.FLOAT),
        **graph.numbers(
            descale_q="descale q", descale_k="descale k", descale_v="descale v", descale_o="descale out",
            descale_dO="descale dout", descale_s="descale p", descale_dP="descale ds", scale_s="scale p",
            scale_dQ="scale dq", scale_dK="scale dk", scale_dV="scale dv", scale_dP="scale ds",
        ),
        use_deterministic_algorithm=deterministic, **of_fp8_mask(graph, batch, causal, padded),
    )  # fmt: skip
    graph.result("dq", dq, *of_rows(batch, heads, length_q, dim), kinds["dq"])
    graph.result("dk", dk, *of_rows(batch, kv_heads, length_kv, dim), kinds["dk"])
    graph.result("dv", dv, *of_rows(batch, kv_heads, length_kv, dim_v), kinds["dv"])
    graph.largest(BACKWARD_AMAX, amax)
    return graph.build()


class Fp8Call:
    """The results of a problem, which one graph or several fill."""

    def __init__(self, p, tensors):
        self.p, self.tensors = p, tensors
        self.names = ["out", "dq", "dk", "dv"] if p.backward else ["out"]
        self.results = {name: p.empty(name) for name in self.names}
        self.lse = torch.full(p.shape("lse"), -torch.inf, device=DEVICE)
        self.amax = {name: torch.zeros(1, device=DEVICE) for name in FORWARD_AMAX}
        if p.backward:
            self.amax |= {name: torch.zeros(1, device=DEVICE) for name in BACKWARD_AMAX}
        self.numbers = {f"descale {name}": given for name, given in p.descales.items()}
        self.numbers |= {f"scale {name}": 1 / p.descales[name] for name in p.given_descales()}
        self.numbers["scale"] = torch.full((1, 1, 1, 1), p.scale)
        self.forms = tuple((name, p.form(name)) for name in tensors | self.results)

    def run(self, q, kv, batch, multiple, deterministic=False, lengths=None):
        """Calls the graphs for some rows of queries and of keys, which are those of so many sequences, on a multiple of
        so many rows. `lengths` are the real ones."""
        p, rows = self.p, {"q": q, "k": kv, "v": kv, "out": q, "dout": q, "dq": q, "dk": kv, "dv": kv}
        own = {name: tensor[rows[name]] for name, tensor in (self.tensors | self.results).items()}
        wide = {name: in_multiples(tensor, batch, multiple) for name, tensor in own.items()}
        length_q, length_kv = len(wide["q"]) // batch, len(wide["k"]) // batch
        key = (self.forms, batch, p.heads_q, p.heads_kv, length_q, length_kv, p.dim_qk, p.dim_v, p.causal)
        values = wide | self.numbers | (lengths or {})
        values["lse"] = torch.full((batch, p.heads_q, length_q, 1), float("nan"), device=DEVICE)
        self.call(built(fp8_forward_graph, *key, lengths is not None), values, FORWARD_AMAX)
        lse = values["lse"][:, :, : len(own["q"]) // batch, 0]
        self.lse[:, q] = lse.transpose(0, 1).reshape(p.heads_q, -1)
        if p.backward:
            graph = built(fp8_backward_graph, *key, lengths is not None, deterministic)
            self.call(graph, values, BACKWARD_AMAX)
        for name in self.names:
            if wide[name] is not own[name]:
                first = batched(wide[name], batch)[:, : len(own[name]) // batch]
                batched(own[name], batch).copy_(first)

    def call(self, graph, values, names):
        largest = {f"amax {name}": torch.zeros(1, 1, 1, 1, device=DEVICE) for name in names}
        graph.run(values | largest)
        for name in names:
            self.amax[name] = torch.maximum(self.amax[name], largest[f"amax {name}"].view(1))

    def result(self):
        gradients = {name: self.results[name] for name in self.names[1:]}
        return seamproof.Result(self.results["out"], lse=self.lse, amax=self.amax, **gradients)


def batched(tensor, batch):
    """Returns the bytes of rows of codes as `[batch, rows, heads, dim]`."""
    return tensor.view(torch.uint8).view(batch, -1, *tensor.shape[1:])


def in_multiples(tensor, batch, multiple):
    """Returns rows of codes in memory of a multiple of so many rows for each sequence, with zeros behind them; the
    tensor itself where its rows are as many."""
    rows = len(tensor) // batch
    more = -rows % multiple
    if not more:
        return tensor
    wide = torch.nn.functional.pad(batched(tensor, batch), (0, 0, 0, 0, 0, more))
    return wide.reshape(-1, *tensor.shape[1:]).view(tensor.dtype)


def inputs_of(q, k, v, dout):
    return {"q": q, "k": k, "v": v} | ({} if dout is None else {"dout": dout})


# Rows of memory that every kernel takes. Callers have as many.
MULTIPLE = 128


def length_of(name, run):
    return {f"lengths {name}": torch.full((1, 1, 1, 1), run.len, dtype=torch.int32, device=DEVICE)}


def one_by_one(p, q, k, v, dout=None, deterministic=False, multiple=MULTIPLE):
    """Attention of each sequence by itself. Without a multiple of rows no graph has padding."""
    call = Fp8Call(p, inputs_of(q, k, v, dout))
    for queries, keys in zip(p.q.runs, p.kv.runs, strict=True):
        if queries.len and keys.len:
            lengths = length_of("q", queries) | length_of("kv", keys) if multiple > 1 else None
            call.run(queries.real_rows(), keys.real_rows(), 1, multiple, deterministic, lengths)
            continue
        of_rows = {"out": queries, "dq": queries, "dk": keys, "dv": keys}
        for name, tensor in call.results.items():
            tensor.view(torch.uint8)[of_rows[name].real_rows()] = 0
    return call.result()


def as_batch(p, q, k, v, dout=None, deterministic=False):
    """Attention of a padded batch, with real lengths beside it."""
    call, batch = Fp8Call(p, inputs_of(q, k, v, dout)), len(p.sequences)
    lengths = {"lengths q": p.q.lengths.view(-1, 1, 1, 1), "lengths kv": p.kv.lengths.view(-1, 1, 1, 1)}
    call.run(slice(None), slice(None), batch, MULTIPLE, deterministic, lengths)
    return call.result()


def precision(dout, gradients):
    return dict.fromkeys(("q", "k", "v", "p", "out"), CODES) | {
        "dout": dout,
        "ds": dout,
        "gradients": gradients,
    }


# Sums are never promoted, as far as is known: the weakest bound holds for any kernel.
fp8_declared = functools.partial(
    seamproof.subject, arrays="torch", device=DEVICE, formats=[CODES], p=CODES, out=CODES,
    masks=seamproof.top_left(windows=False), lengths={"no_sequences": False},
    arithmetic={
        "accumulation": {"wgmma-fp8": {}}, "weights": "before-normalisation", "delta": "stored-out",
        "group_sums": "f32", "ds_weights": "unrounded", "ds_fold": "before",
    },
    start_seconds=300, versions=VERSIONS,
)  # fmt: skip
PACKED = {"layout": seamproof.packed(padding=True, slack=True, gaps=True, first_offset=True)}
BATCHED = {
    "layout": seamproof.packed(padding=True, slack=False), "forms": ["lengths"],
    "lengths": {"no_sequences": False, "empty_q": False, "empty_kv": False},
}  # fmt: skip
FORWARD = {
    "d": seamproof.multiples(16, to=256), "d_v": seamproof.multiples(16, to=256), "backward": False,
}  # fmt: skip
SQUARE = FORWARD | {"d_equal": True}
# On Hopper the backward has this head dim alone.
BOTH = {
    "d": [128], "d_v": [128], "d_equal": True,
    "table": {"precisions": [precision(CODES, CODES), precision(HYBRID, HYBRID), precision(CODES, HYBRID)]},
}  # fmt: skip


@fp8_declared(**PACKED, **SQUARE)
def fp8(p, q, k, v, dout=None, sink=None):
    return one_by_one(p, q, k, v)


@fp8_declared(**PACKED, **FORWARD)
def fp8_wide_values(p, q, k, v, dout=None, sink=None):
    return one_by_one(p, q, k, v)


@fp8_declared(**BATCHED, **SQUARE)
def fp8_batch(p, q, k, v, dout=None, sink=None):
    return as_batch(p, q, k, v)


@fp8_declared(**PACKED, **BOTH, groups=[1])
def fp8_both(p, q, k, v, dout=None, sink=None):
    return one_by_one(p, q, k, v, dout)


@fp8_declared(**PACKED, **BOTH, groups=[1])
def fp8_any_rows(p, q, k, v, dout=None, sink=None):
    return one_by_one(p, q, k, v, dout, multiple=1)


@fp8_declared(**PACKED, **BOTH, groups=[1], promises=["deterministic_backward"])
def fp8_deterministic(p, q, k, v, dout=None, sink=None):
    return one_by_one(p, q, k, v, dout, deterministic=True)


@fp8_declared(**PACKED, **BOTH)
def fp8_grouped(p, q, k, v, dout=None, sink=None):
    return one_by_one(p, q, k, v, dout)


@fp8_declared(**BATCHED, **BOTH, groups=[1])
def fp8_batch_both(p, q, k, v, dout=None, sink=None):
    return as_batch(p, q, k, v, dout)
