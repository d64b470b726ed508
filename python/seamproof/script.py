"""The script of a stored case: `python -m seamproof.script CASE.json`.

`seamproof run` and its like start it for what they find in a subject `python:FILE[:NAME]`. It writes `CASE.py`, which
shows the finding without this package, runs it, and says what became of it as one line of JSON: `written`,
`shows`, which is true where the script was seen to show the failure, and `doubt`, which is null where nothing is to be
said about it. Where no script is written, standard error says why too, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from . import repro
from .frames import duplicated_standard_streams
from .loading import load
from .session import describe
from .source import NoSource
from .subject import Subject
from .worker import watch


# What to do where a command serves a Python file, each rank in a process of its own.
_ELSEWHERE = (
    "; a program of torch has a script where its ranks may be threads: seamproof shrink CASE.json --backend python:FILE"
    " --out OTHER.json"
)


def loaded(stored: dict[str, Any]) -> Subject:
    """Returns the subject that a stored case names, loaded as a worker loads it."""
    scheme, _, target = stored["name"].partition(":")
    if scheme != "python":
        what = _ELSEWHERE if "seamproof.launched" in target else ""
        raise NoSource(f"the case's subject is in no Python file: {stored['name']}{what}")
    return load(target, stored.get("options", {}), {})


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
        answer = repro.of_case(given.case, loaded, limits)
    except Exception as error:
        answer = repro.none(describe(error).partition("\n")[0])
    os.write(writer, (json.dumps(vars(answer)) + "\n").encode())
    if not answer.written:
        print(f"python -m seamproof.script: {given.case}: {answer.doubt}", file=sys.stderr, flush=True)
    return 0 if answer.written else 1


if __name__ == "__main__":
    code = main()
    # A library's own clean-up may hang on a device in error.
    os._exit(code)
