"""The `seamproof` program: where it is, and how its commands are written."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from .errors import ProgramMissing

_NAME = "seamproof.exe" if os.name == "nt" else "seamproof"


def find() -> str:
    """Returns the path of the program: `$SEAMPROOF`, or that of this Python's environment, or one on the PATH."""
    given = os.environ.get("SEAMPROOF")
    if given:
        if not Path(given).is_file():
            raise ProgramMissing(f"$SEAMPROOF names {given}, where there is no file")
        return given
    for folder in (Path(sys.executable).parent, Path(sysconfig.get_path("scripts"))):
        if (folder / _NAME).is_file():
            return str(folder / _NAME)
    found = shutil.which(_NAME)
    if found is None:
        raise ProgramMissing(
            "the program `seamproof` is neither in this Python's environment nor on the PATH: install the wheel, or "
            "build the program with `cargo install --path .` and name its file in $SEAMPROOF"
        )
    return found


def quoted(words: list[str]) -> str:
    """Returns a command as one types it into a shell."""
    return shlex.join(words)


def typed() -> str:
    """Returns the program as one types it: its name where the PATH leads to it, or else its path."""
    path, on_path = find(), shutil.which(_NAME)
    return _NAME if on_path and Path(on_path).resolve() == Path(path).resolve() else path


def relative(path: str | Path) -> str:
    """Returns a path from the working directory where it lies below it, and the whole path elsewhere."""
    path = Path(path).resolve()
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def run_in_group(command: list[str], environment: dict[str, str], seconds: float) -> tuple[int, str, str]:
    """Runs a command, and returns its exit code, its output and its errors. All that it started ends with it."""
    # Whoever runs the leader of a group ends the whole group, so that this process leaves its own together.
    apart = hasattr(os, "killpg") and os.getpgrp() != os.getpid()
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        text=True,
        errors="replace",
        start_new_session=apart,
    )
    try:
        said, complained = process.communicate(timeout=seconds)
        return process.returncode, said, complained
    finally:
        if apart:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        end(process)


def end(process: subprocess.Popen[Any]) -> None:
    """Ends a process that is still there."""
    if process.poll() is None:
        process.kill()
    process.wait()
