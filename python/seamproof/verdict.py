"""How a repro looks at a kernel's results. A script carries this file with it, behind its imports."""

import sys
import traceback

import numpy as np

from .reference import key_intervals, reference

# --- what a script carries begins here

BAND = 1024
# Keys of a problem of which every stretch is tried.
KEYS_MOST = 96
# The line behind the traceback of an error that the kernel raises.
RAISES = "the call raises an error"
# Memory that `guarded` gave, with its name and shape: a result between two bands of NaN.
guards = []
# Names of inputs that the kernel changed.
changed = set()


def guarded(shape, name, put):
    """Returns memory for a result, full of NaN."""
    whole = put(np.full(int(np.prod(shape)) + 2 * BAND, np.nan, np.float32))
    guards.append((name, whole, shape))
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


def is_wrong(name, got, exact, check, bound, tell_keys):
    """Prints the worst element of a result, and returns whether there is a wrong one.

    `tell_keys` is called with the row and the head of a wrong out or lse.
    """
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
        slack = 1e-6 * np.abs(np.nan_to_num(exact, posinf=0.0, neginf=0.0)) + 1e-30
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
    if name in ("out", "lse"):
        tell_keys(*at[:2])
    return True


def tell_keys(row, head, got, inputs, extra, sequences, mask, softmax):
    """Prints which rows of k a row of q seems to have seen, where one stretch of them explains its results."""
    q, k, v = (np.nan_to_num(x.astype(np.float64), nan=1e9, posinf=1e9, neginf=-1e9) for x in inputs[:3])
    scale, softcap = softmax
    query, of = q[row, head], head // (q.shape[1] // k.shape[1])
    own = [(np.arange(len(q))[a].tolist(), np.arange(len(k))[b]) for a, b in sequences]
    own = [(queries, keys) for queries, keys in own if row in queries]
    if not own or len(k) > KEYS_MOST or (np.diff(own[0][1]) != 1).any():
        return
    queries, keys = own[0]
    at = queries.index(row)
    intervals = key_intervals(len(queries), len(keys), *mask)
    (start, sink_end), (begin, end) = ((int(first[at]), int(end[at])) for first, end in intervals)
    if 0 < sink_end < begin:
        return
    if sink_end:
        begin, end = start, max(end, sink_end)
    first = int(keys[0]) if len(keys) else 0
    right_one = (first + begin, first + end)
    logits = scale * k[:, of] @ query
    if softcap is not None:
        logits = softcap * np.tanh(logits / softcap)
    results = [x for x in ("out", "lse") if x in got]
    told = np.concatenate([got[x][row, head] if x == "out" else got[x][head, [row]] for x in results])

    def error(begin, end):
        every = np.append(logits[begin:end], [] if extra is None else extra[head])
        top = every.max(initial=-np.inf)
        base = top if np.isfinite(top) else 0.0
        weights = np.exp(every - base)
        total = weights.sum()
        out = weights[: end - begin] @ v[begin:end, of] / (total or 1.0)
        lse = [base + np.log(total)]
        made = np.concatenate([out if x == "out" else lse for x in results])
        unequal = made != told
        return np.abs(made - told, where=unequal, out=np.zeros(len(made))).max(initial=0.0)

    with np.errstate(all="ignore"):
        near = min(error(*right_one) / 8, 2.0**-7 * max(1e-3, np.abs(told).max(initial=0.0)))
        stretches = (
            (a, b) for a in range(len(k) + 1) for b in range(a, len(k) + 1) if a < b or a == right_one[0]
        )
        fitting = [stretch for stretch in stretches if error(*stretch) <= near]
    if fitting and np.isfinite(told).all():
        a, b = min(fitting, key=lambda s: abs(s[0] - right_one[0]) + abs(s[1] - right_one[1]))
        print(f"  as if it saw k[{a}:{b}], where it must see k[{right_one[0]}:{right_one[1]}]")


def outside_is_written(get, owned_q, owned_k):
    """Returns whether a kernel wrote outside of the memory that it was given, or into rows that no sequence owns."""
    told = []
    for name, whole, shape in guards:
        values = get(whole)
        inner = values[BAND:-BAND].reshape(shape)
        rows = (inner.T if name == "lse" else inner)[~(owned_k if name in ("dk", "dv") else owned_q)]
        bands = np.concatenate([values[:BAND], values[-BAND:]])
        for place, elements in (("outside its memory", bands), ("in rows that no sequence owns", rows)):
            if not np.isnan(elements).all():
                told.append(f"{name}: {int((~np.isnan(elements)).sum())} elements were written {place}")
    # The kernel was called more than once.
    print("".join(f"{words}\n" for words in dict.fromkeys(told)), end="")
    return bool(told)


def padding_is_broken(got, padding_q, padding_k, contract):
    """Returns whether results hold something else than they must in padding: zeros, or what was there before."""
    found = False
    for name in got:
        if contract == "unspecified" or name in ("max_logit", "dsink"):
            continue
        values = got[name].T if name == "lse" else got[name]
        values = values[(padding_k if name in ("dk", "dv") else padding_q)[: len(values)]]
        neutral = -np.inf if name == "lse" else 0
        wrong = ~np.isnan(values) if contract == "untouched" else values != neutral
        if wrong.any():
            told = "was written to" if contract == "untouched" else f"is not {neutral}"
            print(f"{name} {told} in padding rows: {int(wrong.sum())} elements, such as {values[wrong][0]}")
            found = True
    return found


def differing_results(one, other, rows_q, rows_k, bits=None):
    """Returns the results that differ between two runs in rows that hold tokens, each with the first such element.

    Of results that `bits` does not name, only whether an element is NaN is compared.
    """
    found = {}
    for name in one:
        if name in ("max_logit", "dsink"):
            continue
        rows = rows_k if name in ("dk", "dv") else rows_q
        first, second = (x[name].T if name == "lse" else x[name] for x in (one, other))
        first, second = (
            np.where(rows[: len(x)].reshape(-1, *[1] * (x.ndim - 1)), x, 0) for x in (first, second)
        )
        unequal = np.isnan(first) != np.isnan(second)
        if bits is None or name in bits:
            unequal |= (first != second) & ~np.isnan(first)
        if unequal.any():
            at = tuple(int(i) for i in np.argwhere(unequal)[0])
            found[name] = f"row {at[0]}: {first[at]} and {second[at]}"
    return found


def marked(count, slices):
    """Returns which rows are in one of these slices."""
    rows = np.zeros(count, bool)
    for at in slices:
        rows[at] = True
    return rows


def verdict(call, get, inputs, other, extra, rows, mask, softmax, finding):
    """Prints what is wrong with a kernel, and returns whether the failure shows."""
    tensor, check, bound, raised = finding
    try:
        got = call(*inputs)
        again = call(*inputs) if check != "envelope" else got
        under_other = got if other is None else call(*other)
    except (Exception, SystemExit) as error:
        traceback.print_exc(file=sys.stdout)
        print(RAISES)
        return check in ("crash", "capability") and raised in (None, type(error).__name__)
    q, k, v, dout, _ = inputs
    sequences, owned, contract = rows
    rows_q, rows_k = (marked(len(x), [s[at] for s in sequences]) for at, x in enumerate((q, k)))
    owned_q, owned_k = (marked(len(x), [s[at] for s in owned]) for at, x in enumerate((q, k)))
    exact = reference(q, k, v, dout, extra, sequences, mask, *softmax)
    names = [tensor] if tensor in got else [name for name in got if name in exact]

    def tell(row, head):
        tell_keys(row, head, got, inputs, extra, sequences, mask, softmax)

    wrong = [is_wrong(name, got[name], exact[name], check, bound, tell) for name in names]
    shows = any(wrong)
    shows |= outside_is_written(get, owned_q, owned_k)
    if changed:
        print(f"the call changes its inputs: {', '.join(sorted(changed))}")
        shows = True
    if check == "structure":
        shows |= padding_is_broken(got, owned_q & ~rows_q, owned_k & ~rows_k, contract)
    # Gradients may be summed in any order.
    unsteady = differing_results(got, again, rows_q, rows_k)
    for name, where in unsteady.items():
        print(f"{name} differs when the same call is made again, in {where}")
        shows |= name in ("out", "lse")
    steady = [name for name in got if name not in unsteady]
    for name, where in differing_results(got, under_other, rows_q, rows_k, steady).items():
        print(f"{name} changes where rows that hold no token change, in {where}")
        shows = True
    return shows
