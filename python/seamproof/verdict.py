"""How a repro looks at a kernel's results. A script carries this file with it, behind its imports."""

import sys
import traceback

import numpy as np

from .reference import reference

# --- what a script carries begins here

BAND = 1024
# Memory that `guarded` gave, with its name: a result between two bands of NaN.
guards = []
# Names of inputs that the kernel changed.
changed = set()


def guarded(shape, name, put):
    """Returns memory for a result, full of NaN."""
    whole = put(np.full(int(np.prod(shape)) + 2 * BAND, np.nan, np.float32))
    guards.append((name, whole))
    return whole[BAND : len(whole) - BAND].reshape(shape)


def watch(before, after):
    """Notes which inputs a call changed."""
    changed.update(name for name in before if not np.array_equal(before[name], after[name], equal_nan=True))


def fields(returned):
    """Returns what a kernel returned, by name."""
    if hasattr(returned, "out"):
        return {name: x for name, x in vars(returned).items() if x is not None}
    returned = returned if isinstance(returned, (tuple, list)) else (returned,)
    return dict(zip(("out", "lse"), returned[:2]))  # noqa: B905


def differing(got, exact, slack):
    """Returns which elements are further from the exact ones than `slack`; NaN is far from everything."""
    with np.errstate(invalid="ignore"):
        near = (np.abs(got - exact) <= slack) | (got == exact)
    return ~near & ~np.isnan(exact)


def is_wrong(name, got, exact, check, bound):
    """Prints the worst element of a result, and returns whether there is a wrong one."""
    if name == "lse":
        got, exact = got.T, exact.T
    # A kernel may leave out the rows behind the last sequence.
    exact = exact[: len(got)] if np.isnan(exact[len(got) :]).all() else exact
    if got.shape != exact.shape:
        print(f"{name} has shape {got.shape}, not {exact.shape}")
        return True
    slack = bound
    if check not in ("exact", "envelope"):
        # Another check found it, which gives no bound: only what is wrong by much counts.
        slack = 2.0**-6 * np.abs(exact[np.isfinite(exact)]).max(initial=1e-3)
    elif bound == 0:
        slack = 1e-6 * np.abs(exact) + 1e-30
    wrong = differing(got, exact, slack)
    if not wrong.any():
        return False
    with np.errstate(invalid="ignore"):
        error = np.where(wrong, np.nan_to_num(np.abs(got - exact), nan=np.inf), -1.0)
    at = tuple(int(i) for i in np.unravel_index(error.argmax(), error.shape))
    row = (
        f"row {at[0]}, head {at[1]}" + (f", lane {at[2]}" if len(at) > 2 else "")
        if len(at) > 1
        else f"head {at[0]}"
    )
    print(f"{name}: {int(wrong.sum())} of {wrong.size} elements are wrong, the worst in {row}:")
    print(f"  got    {got[at]}")
    print(f"  exact  {exact[at]}" + (f" ± {bound}" if bound else ""))
    return True


def outside_is_written(get):
    """Returns whether a kernel wrote in front of or behind the memory that it was given."""
    found = False
    for name, whole in guards:
        bands = np.concatenate([get(whole)[:BAND], get(whole)[-BAND:]])
        if not np.isnan(bands).all():
            print(f"{int((~np.isnan(bands)).sum())} elements were written outside {name}")
            found = True
    return found


def differs(one, other, rows_q, rows_k, what):
    """Returns whether two runs differ in rows that hold tokens."""
    found = False
    for name in one:
        if name in ("max_logit", "dsink"):
            continue
        rows = rows_k if name in ("dk", "dv") else rows_q
        pair = [x[name].T if name == "lse" else x[name] for x in (one, other)]
        pair = [x[rows[: len(x)]] for x in pair]
        if not np.array_equal(*pair, equal_nan=True):
            print(f"{name} {what}")
            found |= name in ("out", "lse") or "again" not in what
    return found


def verdict(call, get, inputs, extra, sequences, mask, softmax, finding):
    """Prints what is wrong with a kernel, and returns whether the failure shows."""
    tensor, check, bound = finding
    try:
        got = call(*inputs)
    except Exception:
        traceback.print_exc(file=sys.stdout)
        print("the call raises an error")
        return check == "crash"
    q, k, v, dout, sink = inputs
    exact = reference(q, k, v, dout, extra, sequences, *mask, *softmax)
    names = [tensor] if tensor in got else [name for name in got if name in exact]
    wrong = [is_wrong(name, got[name], exact[name], check, bound) for name in names]
    shows = any(wrong)
    shows |= outside_is_written(get)
    if changed:
        print(f"the call changes its inputs: {', '.join(sorted(changed))}")
        shows = True
    rows_q, rows_k = np.zeros(len(q), bool), np.zeros(len(k), bool)
    for of_q, of_k in sequences:
        rows_q[of_q], rows_k[of_k] = True, True
    if check != "envelope":
        shows |= differs(got, call(*inputs), rows_q, rows_k, "differs when the same call is made again")
    if not shows and check in ("poison", "identity", "structure"):
        clean = [
            np.where(rows[:, None, None], x, 0).astype(x.dtype)
            for x, rows in ((q, rows_q), (k, rows_k), (v, rows_k))
        ]
        clean.append(None if dout is None else np.where(rows_q[:, None, None], dout, 0).astype(dout.dtype))
        other = call(*clean, sink)
        shows |= differs(got, other, rows_q, rows_k, "changes where rows that hold no token change")
    return shows
