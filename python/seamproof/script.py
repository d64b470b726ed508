"""The script of a stored case: `python -m seamproof.script CASE.json`.

`seamproof run` and its like start it for what they find in a subject `python:FILE[:NAME]`. It writes `CASE.py`, which
shows the finding without this package, runs it, and says what became of it as one line of JSON: `written`,
`shows`, which is true where the script was seen to show the failure, and `doubt`, which is null where nothing is to be
said about it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from pathlib import Path

from . import repro
from .frames import duplicated_standard_streams
from .loading import load
from .session import describe
from .worker import watch


def made(case: Path, limits: repro.Limits) -> repro.Made:
    """Writes the script of a stored case, whose subject is loaded as a worker loads it."""
    stored = json.loads(case.read_text())
    subject = stored["subject"]
    scheme, _, target = subject["name"].partition(":")
    why = repro.hopeless(stored)
    if scheme != "python":
        why = f"the case's subject is in no Python file: {subject['name']}"
    if why is not None:
        return repro.none(why)
    return repro.of_case(load(target, subject.get("options", {}), {}), case, limits)


def _end_group() -> None:
    """Ends this process and the script that it runs."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def main(arguments: list[str] | None = None) -> int:
    """Writes one script, and returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m seamproof.script", description=__doc__.splitlines()[0])
    parser.add_argument("case", type=Path, metavar="CASE.json")
    parser.add_argument(
        "--limit", type=float, default=repro.SECONDS, metavar="SECONDS", help="time for it, its runs included"
    )
    parser.add_argument(
        "--leashed",
        action="store_true",
        help="end with the standard input; whoever starts this ends the group that it leads",
    )
    given = parser.parse_args(arguments)
    # The subject's file may take long to load.
    limits = repro.Limits(time.monotonic() + given.limit, given.leashed)
    # What the subject's file prints is no answer.
    reader, writer = duplicated_standard_streams()
    if given.leashed:
        watch(reader, _end_group)
    try:
        answer = made(given.case, limits)
    except Exception as error:
        answer = repro.none(describe(error).partition("\n")[0])
    os.write(writer, (json.dumps(vars(answer)) + "\n").encode())
    return 0


if __name__ == "__main__":
    code = main()
    # A library's own clean-up may hang on a device in error.
    os._exit(code)
