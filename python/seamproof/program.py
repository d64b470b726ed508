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
import tempfile
from pathlib import Path
from typing import IO, Any

from .errors import ProgramMissing

_NAME = "seamproof.exe" if os.name == "nt" else "seamproof"
# Number of bytes that are kept of what a command says, from its end.
_SAID_MOST = 64 << 10


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


def python() -> str:
    """Returns this interpreter as one types it: its name where the PATH leads to it, or else its path."""
    path = Path(sys.executable)
    found = shutil.which(path.name)
    # A virtual environment's interpreter is a link to another, which has other libraries.
    return path.name if found and Path(found).absolute() == path else quoted([str(path)])


def named_python() -> str:
    """Returns what is typed before a command of the program so that it runs this interpreter; nothing where it would."""
    path = Path(sys.executable).absolute()
    found = shutil.which("python3") or shutil.which("python")
    is_same = found and Path(found).absolute().parent == path.parent and Path(found).resolve() == path.resolve()
    return "" if is_same else f"SEAMPROOF_PYTHON={quoted([str(path)])} "


def relative(path: str | Path) -> str:
    """Returns a path from the working directory where it lies below it, and the whole path elsewhere."""
    path = Path(path).resolve()
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def run_in_group(
    command: list[str], environment: dict[str, str], seconds: float, leashed: bool = False
) -> tuple[int, str, str]:
    """Runs a command, and returns its exit code and the ends of its output and its errors.

    All that it started ends with it. If this process is `leashed`, whoever started it ends its whole group, so that the
    command stays in the group.
    """
    apart = not leashed and hasattr(os, "killpg")
    # What the command started may keep a pipe open after its end, and a file does not wait for that.
    with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as complained:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=complained,
            env=environment,
            start_new_session=apart,
        )
        try:
            code = process.wait(timeout=seconds)
            return code, _tail(said), _tail(complained)
        finally:
            if apart:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
            end(process)


def _tail(file: IO[bytes]) -> str:
    """Returns the end of what a file holds."""
    start = max(0, file.seek(0, os.SEEK_END) - _SAID_MOST)
    file.seek(start)
    return file.read(_SAID_MOST).decode(errors="replace")


def end(process: subprocess.Popen[Any]) -> None:
    """Ends a process that is still there."""
    if process.poll() is None:
        process.kill()
    process.wait()
