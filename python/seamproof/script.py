"""The script of a stored case: `python -m seamproof.script CASE.json`.

`seamproof run` and its like start it for what they find in a subject `python:FILE[:NAME]`. It writes `CASE.py`, which
shows the finding without this package, runs it, and says what became of it as one line of JSON: `written`, and
`doubt`, which is null where the script was seen to show the failure.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from . import repro
from .frames import duplicated_standard_streams
from .loading import load
from .session import describe


def made(case: Path, seconds: float) -> repro.Made:
    """Writes the script of a stored case, whose subject is loaded as a worker loads it."""
    stored = json.loads(case.read_text())
    subject = stored["subject"]
    scheme, _, target = subject["name"].partition(":")
    why = repro.hopeless(stored)
    if scheme != "python":
        why = f"the case's subject is in no Python file: {subject['name']}"
    if why is not None:
        return repro.Made(False, f"there is none: {why}")
    return repro.of_case(load(target, subject.get("options", {}), {}), case, seconds)


def main(arguments: list[str] | None = None) -> int:
    """Writes one script, and returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m seamproof.script", description=__doc__.splitlines()[0])
    parser.add_argument("case", type=Path, metavar="CASE.json")
    parser.add_argument(
        "--limit", type=float, default=repro.SECONDS, metavar="SECONDS", help="time for it, its runs included"
    )
    given = parser.parse_args(arguments)
    # What the subject's file prints is no answer.
    _, writer = duplicated_standard_streams()
    try:
        answer = made(given.case, given.limit)
    except Exception as error:
        answer = repro.Made(False, f"there is none: {describe(error).partition(chr(10))[0]}")
    os.write(writer, (json.dumps(vars(answer)) + "\n").encode())
    return 0


if __name__ == "__main__":
    code = main()
    # A library's own clean-up may hang on a device in error.
    os._exit(code)
