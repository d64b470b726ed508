"""The worker process: `python -m seamproof.worker FILE[:NAME] [--options JSON]`.

`seamproof run --backend python:FILE[:NAME]` starts it; it is not for people. It loads FILE, takes the subject NAME from
it (or the only one that there is), and answers requests on its standard streams until they end.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable

from .errors import SeamproofError
from .frames import Channel, duplicated_standard_streams
from .loading import load
from .session import Session

# A fault of the subject's device that no further run can outlive.
SPOILT = 70
# How long a run may go on after nobody waits for it any more.
GRACE_SECONDS = 5


def watch(reader: int, end: Callable[[], None]) -> None:
    """Calls `end` once the other end of a pipe is gone, whatever the kernel does."""
    if not hasattr(select, "poll"):
        return

    def wait() -> None:
        poll = select.poll()
        poll.register(reader, 0)  # Only the end is reported; data waits for the main thread.
        poll.poll()
        end()

    threading.Thread(target=wait, daemon=True).start()


def end_late() -> None:
    """Ends this process after a while."""
    time.sleep(GRACE_SECONDS)
    os._exit(1)


def main(arguments: list[str] | None = None) -> int:
    """Serves one subject; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m seamproof.worker", description=__doc__.splitlines()[0])
    parser.add_argument("target", metavar="FILE[:NAME]")
    parser.add_argument(
        "--options", default="{}", type=json.loads, metavar="JSON", help="options of the subject"
    )
    given = parser.parse_args(arguments)
    return serve(
        "worker", lambda channel: Session(channel, lambda request: load(given.target, given.options, request))
    )


def serve(program: str, session_of: Callable[[Channel], Session]) -> int:
    """Serves on the standard streams; returns the exit code."""
    reader, writer = duplicated_standard_streams()
    session = session_of(Channel.over(reader, writer))
    watch(reader, end_late)
    faulthandler.enable(file=2)
    if hasattr(signal, "SIGUSR1"):
        # The supervisor sends it past a deadline: where a kernel hangs is then in the finding.
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=False)
    try:
        session.serve()
    except SeamproofError as error:
        print(f"seamproof.{program}: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        return 0  # The supervisor has gone.
    return SPOILT if session.spoilt else 0


if __name__ == "__main__":
    code = main()
    with contextlib.suppress(Exception):
        sys.stderr.flush()
    # A library's own clean-up may hang on a device in error.
    os._exit(code)
