"""Plain attention in float64. A repro carries this file's functions with it, so they need numpy and nothing else."""

import numpy as np


def key_intervals(queries, keys, left, right, bottom_right, documents, chunks, prefix, sink_tokens):
    """Returns the keys that each query of a sequence sees as two intervals: its sink tokens, and its window.

    An interval is the first key of each query and one past the last, which are equal where there is none. Both may
    hold the same keys. `left` and `right` bound the keys around the query's place, both inclusive; `None` is no bound.
    `documents` are the first keys of all documents but the first, `chunks` is the length of a chunk or `None`: no query
    sees a key of another. The first `prefix` keys of a document, a chunk or a whole sequence are not hidden by `right`,
    and the first `sink_tokens` not by `left`.
    """
    place = np.arange(queries) + (keys - queries if bottom_right else 0)
    far = 1 << 40
    if chunks is not None:
        start = place // chunks * chunks
        stop = start + chunks
    else:
        borders = np.array([-far, *documents, far])
        index = np.searchsorted(borders, place, side="right")
        start, stop = borders[index - 1], borders[index]
    first = start if left is None else np.maximum(start, place - left)
    beyond = np.maximum(start, 0) + prefix
    end = stop if right is None else np.minimum(stop, np.maximum(place + right + 1, beyond))
    sink_end = np.minimum(end, np.maximum(start, 0) + sink_tokens)
    ends = [[np.clip(key, 0, keys) for key in pair] for pair in ((start, sink_end), (first, end))]
    return [(np.where(first < end, first, 0), np.where(first < end, end, 0)) for first, end in ends]


def keys_seen(queries, keys, *mask):
    """Returns which keys the queries of a sequence see: booleans, `[queries, keys]`.

    `mask` has the last arguments of `key_intervals`.
    """
    intervals, at = key_intervals(queries, keys, *mask), np.arange(keys)
    sink_tokens, window = ((first[:, None] <= at) & (at < end[:, None]) for first, end in intervals)
    return sink_tokens | window


def reference(q, k, v, dout, sink, sequences, mask, scale, softcap):
    """Returns out, lse, max_logit and, where dout is given, the gradients; NaN in rows that hold no token.

    `sequences` has the rows of each sequence's queries and keys, as two slices. `mask` has the last arguments of
    `key_intervals`. `sink` is None, or one more logit for each head.
    """
    # NaN of any kind may lie in rows that hold no token.
    with np.errstate(invalid="ignore"):
        q, k, v = (x.astype(np.float64) for x in (q, k, v))
        dout = None if dout is None else dout.astype(np.float64)
    (rows, heads, _), group = q.shape, q.shape[1] // k.shape[1]
    found = {
        "out": np.full((rows, heads, v.shape[2]), np.nan),
        "lse": np.full((heads, rows), np.nan),
        "max_logit": np.full(heads, -np.inf),
    }
    if dout is not None:
        found |= {"d" + name: np.full(x.shape, np.nan) for name, x in (("q", q), ("k", k), ("v", v))}
        found["dsink"] = np.zeros(0 if sink is None else heads)
    for q_rows, k_rows in sequences:
        queries, keys = q[q_rows], k[k_rows]
        if dout is not None:
            found["dq"][q_rows], found["dk"][k_rows], found["dv"][k_rows] = 0, 0, 0
        seen = keys_seen(len(queries), len(keys), *mask)
        for head in range(heads):
            of = head // group
            logits = scale * queries[:, head] @ keys[:, of].T
            slope = np.ones_like(logits)
            if softcap is not None:
                bent = np.tanh(logits / softcap)
                logits, slope = softcap * bent, 1 - bent**2
            logits = np.where(seen, logits, -np.inf)
            found["max_logit"][head] = max(found["max_logit"][head], logits.max(initial=-np.inf))
            more = np.full((len(queries), 0 if sink is None else 1), 0.0 if sink is None else sink[head])
            every = np.concatenate([logits, more], axis=1)
            top = every.max(axis=1, initial=-np.inf, keepdims=True)
            base = np.where(np.isfinite(top), top, 0.0)
            total = np.exp(every - base).sum(axis=1, keepdims=True)
            with np.errstate(divide="ignore"):
                lse = base + np.log(total)
            weights = np.exp(logits - np.where(np.isfinite(lse), lse, 0.0))
            out = weights @ v[k_rows, of]
            found["out"][q_rows, head], found["lse"][head, q_rows] = out, lse[:, 0]
            if dout is None:
                continue
            d = dout[q_rows, head]
            delta = (d * out).sum(axis=1, keepdims=True)
            ds = weights * (d @ v[k_rows, of].T - delta) * slope
            found["dv"][k_rows, of] += weights.T @ d
            found["dq"][q_rows, head] = scale * ds @ keys[:, of]
            found["dk"][k_rows, of] += scale * ds.T @ queries[:, head]
            if sink is not None:
                found["dsink"][head] -= (np.exp(more - lse) * delta).sum()
    return found
