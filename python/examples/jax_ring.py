"""A ring of ranks in JAX with dual-chunk balance, all ranks in one process; gradients by automatic differentiation.

    seamproof run --backend python:python/examples/jax_ring.py

With `fault=order` the second chunks of the ranks are taken to lie in ascending order. With `fault=late` the last rank
does not wait for its last block. With `fault=ids` sequences are not kept apart. What the ranks hold is stacked,
`[ranks, rows, heads, dim]`, as `shard_map` has it. JAX compiles for each shape, so ranks have few numbers of rows.
"""

import jax
import jax.numpy as jnp
import numpy as np

import seamproof

FAULT = seamproof.options().get("fault")
ROWS = (16, 48)
# Most of the time goes into compiling, and a small problem does not need to be fast.
jax.config.update("jax_disable_most_optimizations", True)


def visible(of_queries, of_keys):
    """Returns which keys of a block the queries of a rank see, `[queries, keys]`: both are ids and positions."""
    (ids_q, at_q), (ids_k, at_k) = of_queries, of_keys
    of_one = (ids_k > 0) if FAULT == "ids" else (ids_k == ids_q[:, None])
    return of_one & (ids_q > 0)[:, None] & (at_q[:, None] >= at_k)


def of_rank(rank, q, k, v, of_queries, of_keys, scale):
    """Returns out and LSE of a rank's queries: blocks come in the order of a ring, and each is merged as it comes."""
    size, group = len(k), q.shape[2] // k.shape[2]
    top = jnp.full((q.shape[2], q.shape[1]), -1e30)
    total, sums = jnp.zeros_like(top), jnp.zeros((*top.shape, v.shape[3]))
    for step in range(size - (FAULT == "late" and rank == size - 1)):
        block = (rank - step) % size
        seen = visible(of_queries[:, rank], of_keys[:, block])
        scores = scale * jnp.einsum("ihd,jhd->hij", q[rank], k[block].repeat(group, 1))
        scores = jnp.where(seen, scores, -1e30)
        # Gradients do not go through the largest score. A block may have no key that a query sees.
        higher = jnp.maximum(top, jax.lax.stop_gradient(scores.max(2)))
        weights = jnp.where(seen, jnp.exp(scores - higher[..., None]), 0)
        shrunk = jnp.exp(top - higher)
        total = total * shrunk + weights.sum(2)
        sums = sums * shrunk[..., None] + jnp.einsum("hij,jhd->hid", weights, v[block].repeat(group, 1))
        top = higher
    some = jnp.where(total > 0, total, 1)
    return (sums / some[..., None]).transpose(1, 0, 2), top + jnp.log(some)


@jax.jit
def ring(q, k, v, dout, of_queries, of_keys, scale):
    """Returns out, LSE and gradients of what all ranks hold."""

    def attend(q, k, v):
        found = [of_rank(rank, q, k, v, of_queries, of_keys, scale) for rank in range(len(q))]
        return tuple(jnp.stack(parts) for parts in zip(*found, strict=True))

    (out, lse), pullback = jax.vjp(attend, q, k, v)
    return out, lse.transpose(0, 2, 1), *pullback((dout, jnp.zeros_like(lse)))


def stacked(dealt, side, tensor):
    """Returns what each rank holds of a tensor, one rank beside the other: 0 where no sequence owns a row."""
    longest = max(len(rows[side]) for rows in dealt)
    whole = np.zeros((len(dealt), next(rows for rows in ROWS if rows >= longest), *tensor.shape[1:]), tensor.dtype)
    for of_rank, rows in zip(whole, dealt, strict=True):
        owned = np.flatnonzero(rows[side] >= 0)
        of_rank[owned] = tensor[rows[side][owned]]
    return whole


def apart(whole, dealt, side, into):
    """Puts what each rank has into the rows of the problem."""
    for part, rows in zip(np.asarray(whole), dealt, strict=True):
        owned = np.flatnonzero(rows[side] >= 0)
        into[rows[side][owned]] = part[owned]
    return into


def swapped(rows):
    """Returns the rows of each rank, where second chunks are taken for those of the rank from the other end."""
    halves = [np.split(of_rank, 2) for of_rank in rows]
    return [np.concatenate([first, halves[-1 - rank][1]]) for rank, (first, _) in enumerate(halves)]


@seamproof.subject(
    arrays="numpy",
    formats=["f32"],
    d=[8],
    d_v=[8],
    groups=[1, 2],
    heads_most=2,
    padding_inputs="anything",
    layout=seamproof.packed(padding=True, slack=False),
    masks=seamproof.bottom_right(windows=False),
    table={
        "masks": {"forms": ["causal"]},
        "lengths": {"equal": True, "no_sequences": False, "most": 16, "rows_most": 2 * ROWS[-1]},
        "parallel": {"algorithms": ["ring"], "balances": ["dual-chunk"], "ranks_least": 2, "ranks_most": 4},
    },
)
def attention(p, q, k, v, dout=None, sink=None):
    dealt = p.dealt()
    told = list(zip(*map(swapped, zip(*dealt, strict=True)), strict=True)) if FAULT == "order" else dealt
    signs = p.segments_of((np.arange(p.q.rows), np.arange(p.kv.rows)))
    of_queries, of_keys = (
        np.stack([stacked(told, at, np.asarray(signs[f"{name}_{side}"])) for name in ("segment_ids", "positions")])
        for at, side in enumerate(("q", "kv"))
    )
    dout = np.zeros(p.shape("out"), np.float32) if dout is None else dout
    # Padding may hold anything, and 0 · NaN is not 0.
    real = [np.asarray(signs[name])[:, None, None] > 0 for name in ("segment_ids_q", "segment_ids_kv")]
    q, k, v, dout = (np.where(real[side], x, 0) for x, side in ((q, 0), (k, 1), (v, 1), (dout, 0)))
    tensors = [stacked(dealt, side, x) for x, side in ((q, 0), (k, 1), (v, 1), (dout, 0))]
    out, lse, dq, dk, dv = ring(*tensors, of_queries, of_keys, np.float32(p.scale))
    result = seamproof.Result(apart(out, dealt, 0, p.empty("out")), lse=apart(lse, dealt, 0, p.empty("lse").T).T)
    if p.backward:
        result.dq, result.dk, result.dv = (
            apart(x, dealt, side, p.empty(name)) for x, side, name in ((dq, 0, "dq"), (dk, 1, "dk"), (dv, 1, "dv"))
        )
    return result
