"""A ring of ranks in one process, recorded: a small stand-in for context-parallel training on many GPUs.

    python recorded_ring.py DIR [RANK]

Each rank is a thread with a part of one causal sequence. Keys and values travel round the ring, and in the backward
their gradients with them. RANK does not wait for the last swap: it takes its dk and dv from a buffer in which the other
ranks' parts have not arrived.
"""

import queue
import sys
import threading

import numpy as np

import seamproof

RANKS, ROWS, HEADS, LANES = 8, 16, 2, 16
SCALE = LANES**-0.5


class Ring:
    """A group for the recorder, and the links from each rank to the next."""

    def __init__(self):
        self.ranks, self.links = tuple(range(RANKS)), [queue.Queue() for _ in range(RANKS)]
        self._local, self._barrier, self._values = threading.local(), threading.Barrier(RANKS), [None] * RANKS

    @property
    def rank(self):
        return self._local.rank

    def swap(self, block):
        """Sends a block to the next rank, and returns the one that comes from the rank before."""
        self.links[(self.rank + 1) % RANKS].put(block)
        return self.links[self.rank].get()

    def gather(self, value):
        self._values[self.rank] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        return values

    def run(self, work):
        def on_rank(rank):
            self._local.rank = rank
            work(rank)

        threads = [threading.Thread(target=on_rank, args=(rank,)) for rank in self.ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def logits(q, k, own, source):
    """Scaled products of the rank's queries with the keys of a rank; −∞ where the mask hides a pair."""
    products = SCALE * np.einsum("ihd,jhd->hij", q, k)
    seen = np.arange(ROWS)[:, None] + own * ROWS >= np.arange(ROWS) + source * ROWS
    return np.where(seen, products, -np.inf)


def forward(ring, q, k, v):
    block, parts = (k, v), []
    for step in range(RANKS):
        source = (ring.rank - step) % RANKS
        if source <= ring.rank:
            parts.append((logits(q, block[0], ring.rank, source), block[1]))
        block = ring.swap(block)
    scores = np.concatenate([score for score, _ in parts], axis=2)
    largest = scores.max(2, keepdims=True)
    lse = largest + np.log(np.exp(scores - largest).sum(2, keepdims=True))
    out = np.einsum("hij,jhd->ihd", np.exp(scores - lse), np.concatenate([v for _, v in parts]))
    return out.astype(np.float32), lse


def backward(ring, late, q, k, v, out, lse, dout):
    delta = np.einsum("ihd,ihd->hi", dout, out)[:, :, None]
    dq, block = np.zeros(q.shape), (k, v, np.zeros(k.shape), np.zeros(v.shape))
    for step in range(RANKS):
        source, (k, v, dk, dv) = (ring.rank - step) % RANKS, block
        if source <= ring.rank:
            p = np.exp(logits(q, k, ring.rank, source) - lse)
            ds = p * (np.einsum("ihd,jhd->hij", dout, v) - delta)
            dq += SCALE * np.einsum("hij,jhd->ihd", ds, k)
            dk = dk + SCALE * np.einsum("hij,ihd->jhd", ds, q)
            dv = dv + np.einsum("hij,ihd->jhd", p, dout)
        if step == 0:
            stale = (dk, dv)
        block = ring.swap((k, v, dk, dv))
    dk, dv = stale if ring.rank == late else block[2:]
    return [gradient.astype(np.float32) for gradient in (dq, dk, dv)]


def main(directory, late=None):
    ring = Ring()

    def train(rank):
        generator = np.random.default_rng(rank)
        q, k, v, dout = (generator.standard_normal((ROWS, HEADS, LANES)).astype(np.float32) for _ in range(4))
        with seamproof.record(
            directory, group=ring, causal=True, lse="ht", name="a ring of threads"
        ) as record:

            def attention(q, k, v):
                out, lse = forward(ring, q, k, v)
                return out, lse[:, :, 0].astype(np.float32), lse

            out, _, lse = record(attention)(q, k, v)
            dq, dk, dv = backward(ring, late, q, k, v, out, lse, dout)
            record.gradients(dout=dout, dq=dq, dk=dk, dv=dv)

    ring.run(train)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
