"""A ring of ranks in numpy, which are processes; forward and backward.

    seamproof run --backend "exec:python3 -m seamproof.launched --ranks 4 python/examples/numpy_ring.py"

With `fault=block` a block is taken for that of another rank. With `fault=late` the first rank, whose keys all others see,
keeps the gradients of its keys before they have come home. With `fault=silent` the last rank does not send on, with `fault=die` it ends, with
`fault=hang` it computes for ever.
"""

import os

import numpy as np

import seamproof
import seamproof.cp

FAULT = seamproof.options().get("fault")


def logits(local, q, k, block):
    """Returns scaled products with the keys of a block, [heads, queries, keys]: −∞ where a key is hidden."""
    products = local.problem.scale * np.einsum("ihd,jhd->hij", q, k)
    queries = local.rank * len(q) + np.arange(len(q))
    return np.where(queries[:, None] >= block * len(k) + np.arange(len(k)), products, -np.inf)


def blocks(local, *tensors):
    """Yields the number of each block in turn and its tensors, which go on with what they were changed to."""
    group, held = local.group(), list(tensors)
    is_last = local.rank == local.size - 1 > 0
    for step in range(local.size):
        block = local.rank - step + (FAULT == "block" and step > 0)
        yield block % local.size, held
        if step and is_last and FAULT in FAILURES:
            FAILURES[FAULT]()
        if not (is_last and FAULT == "silent"):
            group.send(held, (local.rank + 1) % local.size)
        held = group.receive((local.rank - 1) % local.size)
    # Round the whole ring, so that a block is where it began.
    yield local.rank, held


def die():
    os._exit(7)


def hang():
    while True:
        pass


FAILURES = {"die": die, "hang": hang}


def widened(local, tensor):
    """Returns keys or values as f64, for each query head."""
    return tensor.astype(np.float64).repeat(local.problem.group, 1)


def narrowed(local, gradient):
    """Returns the sum over the query heads of each KV head."""
    rows, heads, lanes = gradient.shape
    return gradient.reshape(rows, heads // local.problem.group, local.problem.group, lanes).sum(2)


def ring(local):
    """Returns the results of the rank's rows of one sequence."""
    q, k, v = local.q.astype(np.float64), widened(local, local.k), widened(local, local.v)
    top = np.full((q.shape[1], len(q), 1), -np.inf)
    total, sums = np.zeros_like(top), np.zeros((q.shape[1], len(q), v.shape[2]))
    for step, (block, (keys, values)) in enumerate(blocks(local, k, v)):
        if step == local.size:
            break
        scores = logits(local, q, keys, block)
        higher = np.maximum(top, scores.max(2, keepdims=True))
        # No row is without a key before the ring has come to one.
        safe = np.where(np.isinf(higher), 0, higher)
        weights, shrunk = np.exp(scores - safe), np.exp(top - safe)
        total = total * shrunk + weights.sum(2, keepdims=True)
        sums, top = sums * shrunk + np.einsum("hij,jhd->hid", weights, values), higher
    out, lse = (sums / total).transpose(1, 0, 2), top + np.log(total)
    result = seamproof.Result(out.astype(np.float32), lse=lse[..., 0].astype(np.float32))
    if local.dout is not None:
        backward(local, result, q, k, v, out, lse)
    return result


def backward(local, result, q, k, v, out, lse):
    """Puts the gradients into a result. Those of keys travel with their block."""
    dout, scale = local.dout.astype(np.float64), local.problem.scale
    delta = np.einsum("ihd,ihd->hi", dout, out)[:, :, None]
    dq = np.zeros_like(q)
    for step, (block, held) in enumerate(blocks(local, k, v, np.zeros_like(k), np.zeros_like(v))):
        keys, values, dk, dv = held
        if step == local.size:
            break
        weights = np.exp(logits(local, q, keys, block) - lse)
        ds = weights * (np.einsum("ihd,jhd->hij", dout, values) - delta)
        dq += scale * np.einsum("hij,jhd->ihd", ds, keys)
        held[2] = dk + scale * np.einsum("hij,ihd->jhd", ds, q)
        held[3] = dv + np.einsum("hij,ihd->jhd", weights, dout)
        if FAULT == "late" and local.rank == 0 and step == 0:
            kept = held[2:]
    if FAULT == "late" and local.rank == 0:
        dk, dv = kept
    gradients = (dq, narrowed(local, dk), narrowed(local, dv))
    result.dq, result.dk, result.dv = (gradient.astype(np.float32) for gradient in gradients)


@seamproof.subject(
    arrays="numpy", formats=["f32"], padding_inputs="anything",
    layout=seamproof.packed(padding=True, slack=False), masks=seamproof.bottom_right(windows=False),
    table={
        "masks": {"forms": ["causal"]}, "lengths": {"equal": True, "no_sequences": False},
        "parallel": {"algorithms": ["ring"], "balances": ["contiguous"], "sub_groups": True},
    },
)  # fmt: skip
def attention(p, q, k, v, dout=None, sink=None):
    def program(local):
        return local.joined([ring(part) for part in local.sequences()])

    return seamproof.cp.attend(p, program, q, k, v, dout)
