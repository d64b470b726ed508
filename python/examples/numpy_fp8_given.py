"""Attention in numpy in FP8 with given scales, in the sequence of cuDNN's FP8 graphs and of TransformerEngine's delayed
recipe: weights, logit gradients and results are multiplied by scales that the caller gives, and rounded to FP8. Both
passes return the largest magnitudes of what they quantise. It needs `ml_dtypes`, whose types codes have.

    seamproof run --backend python:python/examples/numpy_fp8_given.py:attention
"""

import ml_dtypes
import numpy as np

import seamproof

TYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}


class Quantiser:
    """Quantises what a kernel makes of a problem, and keeps the largest magnitudes."""

    def __init__(self, p):
        self.p, self.amax = p, {}

    def codes(self, name, values):
        """Returns the codes of values in the format of a quantity: nearest, ties to even, saturating."""
        kind = TYPES[self.p.form(name)]
        scale = np.float32(1) / self.p.descales[name][0, 0, 0]
        largest = np.float32(ml_dtypes.finfo(kind).max)
        with np.errstate(over="ignore"):
            return np.clip(values * scale, -largest, largest).astype(kind)

    def keep(self, name, values):
        most = np.abs(values).max(initial=np.float32(0))
        self.amax[name] = max(self.amax.get(name, np.float32(0)), most)

    def store(self, name, values):
        """Returns the codes of a result, whose largest magnitude counts."""
        self.keep(name, values)
        return self.codes(name, values)

    def numbers(self, name, values):
        """Returns the same as numbers, not yet multiplied by the descale."""
        return self.codes(name, values).astype(np.float32)


def forward(p, quantised, q, k, v, visible, descale):
    """Returns the codes of out and the LSE of one head of a sequence."""
    logits = np.where(visible, np.float32(p.scale) * descale["q"] * descale["k"] * (q @ k.T), -np.inf)
    top = logits.max(axis=1, initial=-np.inf)
    weights = np.exp(logits - np.where(np.isfinite(top), top, 0)[:, None]).astype(np.float32)
    total = weights.sum(axis=1)
    some = total > 0
    out = np.zeros((len(q), v.shape[1]), np.float32)
    weighted = quantised.numbers("p", weights[some]) @ v
    out[some] = weighted * descale["p"] / total[some, None] * descale["v"]
    quantised.keep("p", 1 / total[some])
    lse = np.full(len(q), -np.inf, np.float32)
    lse[some] = top[some] + np.log(total[some])
    return quantised.store("out", out), lse


def backward(p, quantised, q, k, v, dout, out, lse, visible, descale):
    """Returns dq, and the shares of one query head in dk and dv, not yet quantised."""
    logits = np.float32(p.scale) * descale["q"] * descale["k"] * (q @ k.T)
    weights = np.exp(np.where(visible, logits - np.where(np.isfinite(lse), lse, 0)[:, None], -np.inf))
    d = (dout * out).sum(axis=1) * descale["dout"] * descale["out"]
    ds = weights * (dout @ v.T * descale["dout"] * descale["v"] - d[:, None]) * np.float32(p.scale)
    quantised.keep("ds", ds)
    ds, weights = quantised.numbers("ds", ds), quantised.numbers("p", weights)
    dq = ds @ k * descale["ds"] * descale["k"]
    dk = ds.T @ q * descale["ds"] * descale["q"]
    return dq, dk, weights.T @ dout * descale["p"] * descale["dout"]


CODES = "e4m3/tensor"
# dout and dS in e5m2, as recipes with a hybrid format have them.
HYBRID = "e5m2/tensor"


def precision(dout, gradients):
    return dict.fromkeys(("q", "k", "v", "p", "out"), CODES) | {
        "dout": dout,
        "ds": dout,
        "gradients": gradients,
    }


@seamproof.subject(
    arrays="numpy",
    formats=[CODES],
    table={"precisions": [precision(CODES, CODES), precision(HYBRID, HYBRID), precision(CODES, HYBRID)]},
    masks=seamproof.bottom_right(windows=True),
    layout=seamproof.packed(padding=True, gaps=True, first_offset=True, slack=True),
    padding_inputs="anything",
    arithmetic={
        "accumulation": "f32-serial",
        "weights": "before-normalisation",
        "delta": "stored-out",
        "group_sums": "f32",
        "ds_weights": "unrounded",
        "ds_fold": "before",
    },
)
def attention(p, q, k, v, dout=None, sink=None):
    quantised = Quantiser(p)
    descale = {name: given[0, 0, 0] for name, given in p.descales.items()}
    result = seamproof.Result(p.empty("out"), lse=p.empty("lse"))
    gradients = [p.empty(name) for name in ("dq", "dk", "dv")] if p.backward else []
    result.dq, result.dk, result.dv = gradients or [None] * 3
    inputs = {"q": q, "k": k, "v": v, "dout": dout}
    inputs = {name: codes.astype(np.float32) for name, codes in inputs.items() if codes is not None}
    for sequence, (queries, keys) in enumerate(zip(p.q.runs, p.kv.runs, strict=True)):
        at, of_keys = queries.real_rows(), keys.real_rows()
        visible = p.visible(sequence)
        for kv_head in range(p.heads_kv):
            k_head, v_head = (inputs[name][of_keys, kv_head] for name in "kv")
            dk, dv = np.zeros_like(k_head), np.zeros_like(v_head)
            for head in range(kv_head * p.group, (kv_head + 1) * p.group):
                q_head = inputs["q"][at, head]
                out, lse = forward(p, quantised, q_head, k_head, v_head, visible, descale)
                result.out[at, head], result.lse[head, at] = out, lse
                if p.backward:
                    of_dout, of_out = inputs["dout"][at, head], out.astype(np.float32)
                    of_q, of_k, of_v = backward(
                        p, quantised, q_head, k_head, v_head, of_dout, of_out, lse, visible, descale
                    )
                    result.dq[at, head] = quantised.store("dq", of_q)
                    dk, dv = dk + of_k, dv + of_v
            if p.backward:
                result.dk[of_keys, kv_head] = quantised.store("dk", dk)
                result.dv[of_keys, kv_head] = quantised.store("dv", dv)
    names = ("p", "out", "ds", "dq", "dk", "dv") if p.backward else ("p", "out")
    result.amax = {name: quantised.amax.get(name, np.float32(0)) for name in names}
    return result


def test_attention():
    seamproof.check(attention, budget="20s")
