"""Scripts of findings on several ranks: they run with torch alone, as threads and under `torchrun`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from supervisor import problem
from test_scripts import made

pytest.importorskip("torch")

# Attention of a causal sequence, over keys that come from all ranks by `keys_of`.
PROGRAM = """
import torch
import torch.distributed as dist

import seamproof
import seamproof.cp


def attention(local, blocks):
    p, positions = local.problem, torch.from_numpy(local.problem.parallel.positions(local.spans[0]))
    own = positions[local.rank][:, None]
    scores = [
        (torch.einsum("ihd,jhd->hij", local.q.double(), k.double()) * p.scale).masked_fill(
            own < positions[source][None], -torch.inf
        )
        for source, k, _ in blocks
    ]
    scores, values = torch.cat(scores, 2), torch.cat([v.double() for *_, v in blocks])
    lse = scores.logsumexp(2)
    out = torch.einsum("hij,jhd->ihd", torch.exp(scores - lse[..., None]), values)
    return seamproof.Result(out.to(local.q.dtype), lse=lse.float())


{blocks_of}

@seamproof.subject(
    arrays="torch", device="cpu", formats=["f32"], backward=False, masks=seamproof.bottom_right(windows=False),
    layout=seamproof.packed(padding=True, slack=False), groups=[1],
    table={{
        "masks": {{"forms": ["causal"]}}, "lengths": {{"equal": True, "no_sequences": False}},
        "parallel": {{"algorithms": ["{algorithm}"], "balances": ["contiguous", "dual-chunk"], "ranks_most": 4}},
    }},
)
def kernel(p, q, k, v, dout=None, sink=None):
    def program(local):
        group = local.group()
        return local.joined([attention(part, blocks_of(part, group)) for part in local.sequences()])

    return seamproof.cp.attend(p, program, q, k, v)
"""
RING = """
LOST = 1


def swap(group, rank, size, tensors):
    into = [torch.empty_like(tensor) for tensor in tensors]
    operations = [dist.P2POp(dist.isend, tensor.contiguous(), (rank + 1) % size, group) for tensor in tensors]
    operations += [dist.P2POp(dist.irecv, tensor, (rank - 1) % size, group) for tensor in into]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return into


def blocks_of(local, group):
    block, blocks = [local.k, local.v], []
    for step in range(local.size):
        blocks.append(((local.rank - step) % local.size, *block))
        if step + LOST + 1 < local.size:
            block = swap(group, local.rank, local.size, block)
    return blocks
"""
GATHERED = """
LOST = 1


def blocks_of(local, group):
    blocks = []
    for tensor in (local.k, local.v):
        into = [torch.empty_like(tensor) for _ in range(local.size)]
        dist.all_gather(into, tensor.contiguous(), group=group)
        blocks.append(into)
    return [(rank, blocks[0][rank], blocks[1][rank - LOST]) for rank in range(local.size)]
"""


# A file beside the program, which asks this package for options when it is loaded.
BESIDE = "import seamproof\n\nLOST = 1\nif seamproof.options():\n    LOST = 0\n"


def stored(folder: Path, algorithm: str, blocks_of: str) -> Path:
    """Writes a kernel and a case that it fails, and returns the case."""
    kernel = folder / "kernel.py"
    (folder / "beside.py").write_text(BESIDE)
    kernel.write_text(PROGRAM.format(algorithm=algorithm, blocks_of=blocks_of))
    parallel = {"algorithm": algorithm, "balance": "dual-chunk", "world": 2, "ranks": [0, 1]}
    case = {
        "version": 1,
        "subject": {"name": f"python:{kernel}:kernel"},
        "found": {"finding": {"check": "envelope", "tensor": "out", "what": "words", "bound": 1e-4}},
        "problem": problem([(7, 7)], heads=(2, 2), dims=(8, 8), right=0, padding=1) | {"parallel": parallel},
    }
    file = folder / "case.json"
    file.write_text(json.dumps(case))
    return file


@pytest.mark.parametrize(
    ("algorithm", "blocks_of"),
    [
        ("ring", RING),
        ("all-gather", GATHERED),
        ("ring", RING.replace("LOST = 1", "import beside\n\nLOST = beside.LOST")),
    ],
    ids=["messages", "a-collective", "a-file-beside"],
)
def test_a_script_of_several_ranks_needs_torch_alone(fake_program, tmp_path, algorithm, blocks_of):
    case = stored(tmp_path, algorithm, blocks_of)
    assert made(case) == {"written": True, "shows": True, "doubt": None}
    script = case.with_suffix(".py")
    text = script.read_text()
    assert "import seamproof" not in text and "from seamproof" not in text
    threads = [sys.executable, "-I", str(script)]
    processes = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)]
    for command in (threads, processes):
        done = subprocess.run(command, capture_output=True, text=True, env={"PATH": "/nowhere"})
        assert done.returncode == 1 and "the failure shows" in done.stdout, done.stdout + done.stderr
    script.write_text(text.replace("LOST = 1", "LOST = 0"))
    for command in (threads, processes):
        done = subprocess.run(command, capture_output=True, text=True, env={"PATH": "/nowhere"})
        assert done.returncode == 0, done.stdout + done.stderr
