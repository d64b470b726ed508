"""Stands in for the program in tests of `seamproof.check`: draws three problems and judges out and lse."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from supervisor import (
    FAILED,
    OPEN,
    PHASE,
    RUN,
    expected,
    frame,
    inputs,
    outputs,
    problem,
    run_body,
    split_frame,
)


def ask(kind: int, sequence: int, body: bytes) -> tuple[int, bytes]:
    """Asks the caller, and returns its answer."""
    sys.stdout.buffer.write(frame(kind, sequence, body))
    sys.stdout.buffer.flush()
    while True:
        kind, _, body = split_frame(sys.stdin.buffer.read)
        if kind != PHASE:
            return kind, body


def judged(sequence: int, raw: dict) -> dict | None:
    """Runs a problem; returns a finding, if there is one."""
    values = inputs(raw)
    kind, body = ask(RUN, sequence, run_body(raw, values))
    if kind == FAILED:
        return {"check": "crash", "what": next(iter(json.loads(body).values()))}
    got, right = outputs(body), expected(raw, values)
    for name in [name for name in ("lse", "out", "dq", "dk", "dv", "dsink") if name in got]:
        near = (
            np.isclose(got[name], right[name], atol=1e-5) | (got[name] == right[name]) | np.isnan(right[name])
        )
        if not near.all():
            at = tuple(int(i) for i in np.argwhere(~near)[0])
            told = {"got": str(got[name][at]), "expected": str(right[name][at]), "bound": 1e-6}
            return {"check": "envelope", "tensor": name, "what": f"{name} is wrong", **told}
    return None


def drawn_again(file: str) -> int:
    """Writes the numbers of a case as `seamproof inputs` does."""
    case = json.loads(Path(file).read_text())
    found = case["found"]["finding"]
    words = {"problem": "a problem", "finding": f"{found['check']} · {found['what']}"}
    sys.stdout.buffer.write(json.dumps(words).encode() + b"\n")
    for sequence, fill in ((1, np.nan), (2, 448.0)):
        values = {name: np.nan_to_num(x, nan=fill) for name, x in inputs(case["problem"]).items()}
        sys.stdout.buffer.write(frame(RUN, sequence, run_body(case["problem"], values)))
    return 0


def main() -> int:
    """Serves as `seamproof serve` does; `FAKE` says what becomes of it."""
    words = sys.argv[1:]
    if words[0] == "inputs":
        return drawn_again(words[1])
    options = dict(zip(words[1::2], words[2::2], strict=True))
    mode = os.environ.get("FAKE", "judge")
    if mode == "usage":
        print("error: unexpected argument", file=sys.stderr)
        return 1
    request = {"name": options["--name"], "options": {}, "device": 0}
    _, body = ask(OPEN, 1, json.dumps(request).encode())
    table = json.loads(body)["declared"]["table"]
    form, backward = table["precisions"][0]["q"], table["backward"]
    common = {"form": form, "backward": backward}
    drawn = [problem([(2, 3), (1, 2)], **common), problem([(3, 3)], right=0, **common)]
    drawn.append(problem([(3, 4)], left=1, right=0, **common))
    if "--replay" in options:
        drawn = [json.loads(Path(options["--replay"]).read_text())["problem"]]
    findings = []
    for sequence, raw in enumerate(drawn, 2):
        found = judged(sequence, raw)
        if found is not None:
            case = {
                "version": 1,
                "subject": {"name": options["--name"]},
                "problem": raw,
                "found": {"finding": found},
            }
            findings.append(
                {"what": f"{found['check']} · {found['what']}", "problem": "a problem", "case": case}
            )
    outcome = "finding" if findings else {"judge": "held"}.get(mode, mode)
    code = {"held": 0, "finding": 2, "too-little-run": 4, "canary-missed": 5}.get(outcome, 70)
    summary = {
        "version": 1,
        "outcome": outcome,
        "exit": code,
        "seed": options.get("--seed", "0x1"),
        "cases": 3,
    }
    summary |= {
        "held": 3 - len(findings),
        "findings": findings,
        "missed": ["too few windows"],
        "trouble": ["trouble"],
    }
    summary |= {"ended": None, "text": "text", "options": options}
    Path(options["--json"]).write_text(json.dumps(summary))
    return code


sys.exit(main())
