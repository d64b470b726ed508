"""Plain attention in float64. A repro carries this file's functions with it, so they need numpy and nothing else."""

import numpy as np


def reference(q, k, v, dout, sink, sequences, left, right, bottom_right, scale, softcap):
    """Returns out, lse, max_logit and, where dout is given, the gradients; NaN in rows that hold no token.

    `sequences` has the rows of each sequence's queries and keys, as two slices. `left` and `right` bound the keys that
    a query sees, both inclusive; `None` is no bound. `sink` is None, or one more logit for each head.
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
        i, j = np.arange(len(queries))[:, None], np.arange(len(keys))[None, :]
        distance = j - i - (len(keys) - len(queries) if bottom_right else 0)
        seen = np.ones(distance.shape, bool)
        if left is not None:
            seen &= distance >= -left
        if right is not None:
            seen &= distance <= right
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
