"""One process of a subject whose ranks are processes; rank 0 speaks the worker protocol on its standard streams.

With `--ranks N` this process is rank 0, and starts the others. Without it a launcher such as torchrun has started all,
and says in `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT` which one this is. All run on one host.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing import AuthenticationError, Pipe
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

from ..errors import SeamproofError
from ..frames import duplicated_standard_streams
from ..session import Session
from ..worker import SPOILT, end_late, watch
from . import seat
from .channels import LeadChannel, RankChannel
from .hub import Hub
from .opening import opened
from .seat import Seat

LOCALHOST = "127.0.0.1"
# Variable that tells the other ranks where rank 0 listens, and the key.
HUB = "SEAMPROOF_HUB"
KEY_BYTES = 16
# Returns how a rank has ended, in words; `None` where that is not known.
Exits = Callable[[int], str | None]


def main() -> int:
    """Serves as one rank; returns the exit code."""
    given = _arguments()
    reader, writer = duplicated_standard_streams()
    faulthandler.enable(file=2)
    try:
        if given.ranks is not None:
            return _lead(given, given.ranks, LeadChannel(reader, writer), reader, _started)
        rank, size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
        if rank == 0:
            return _lead(given, size, LeadChannel(reader, writer), reader, _announced)
        # The pipes are rank 0's, and end when it does.
        os.close(reader)
        os.close(writer)
        return _follow(given, rank, size)
    except (SeamproofError, KeyError) as error:
        words = f"no {error} in the environment: say --ranks N" if isinstance(error, KeyError) else error
        print(f"seamproof.launched: {words}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        return 0  # The supervisor has gone.


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m seamproof.launched", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("target", metavar="FILE[:NAME][:OPTION=VALUE,…]")
    parser.add_argument("--ranks", type=int, metavar="N", help="start N processes on this host")
    parser.add_argument(
        "--patience", type=float, default=45.0, metavar="SECONDS",
        help="how long a run may go on without a message or an end of a rank (45)",
    )  # fmt: skip
    return parser.parse_args()


def _lead(
    given: argparse.Namespace,
    size: int,
    channel: LeadChannel,
    reader: int,
    reach: Callable[[argparse.Namespace, int, str], Exits],
) -> int:
    """Serves as rank 0. `reach` tells the others where it listens."""
    key = secrets.token_bytes(KEY_BYTES)
    with Listener((LOCALHOST, 0), authkey=key) as listener:
        exits = reach(given, size, f"{listener.address[1]}:{key.hex()}")
        own, end = Pipe()
        connections = [end, *_accepted(listener, size, exits)]
    place = channel.seat = Seat(0, size, own)
    hub = Hub(connections, given.patience, exits, channel.crash)
    watch(reader, end_late)
    return _serve(place, Session(channel, lambda request: opened(given.target, place, request, hub)))


def _follow(given: argparse.Namespace, rank: int, size: int) -> int:
    """Serves as another rank."""
    port, key = (os.environ.get(HUB) or _store().get(HUB).decode()).split(":")
    connection = Client((LOCALHOST, int(port)), authkey=bytes.fromhex(key))
    connection.send(rank)
    place = Seat(rank, size, connection)
    session = Session(RankChannel(place), lambda request: opened(given.target, place, request))
    return _serve(place, session)


def _serve(place: Seat, session: Session) -> int:
    seat.take(place)
    session.serve()
    return SPOILT if session.spoilt else 0


def _accepted(listener: Listener, size: int, exits: Exits) -> list[Connection]:
    """Returns the connections of the ranks from 1 on, in order; raises where one ends before it comes."""
    found: dict[int, Connection] = {}
    is_whole = threading.Event()

    def accept() -> None:
        while len(found) < size - 1:
            # Whoever has not the key is nobody's rank.
            with contextlib.suppress(AuthenticationError, EOFError, OSError):
                connection = listener.accept()
                found[connection.recv()] = connection
        is_whole.set()

    threading.Thread(target=accept, daemon=True).start()
    while not is_whole.wait(0.1):
        ended = ((rank, exits(rank)) for rank in range(1, size) if rank not in found)
        for rank, words in ended:
            if words:
                raise SeamproofError(f"rank {rank} {words} before it was ready")
    return [found[rank] for rank in range(1, size)]


def _started(given: argparse.Namespace, size: int, hub: str) -> Exits:
    """Starts the other ranks."""
    command = [sys.executable, "-m", "seamproof.launched", given.target]
    common = {"OMP_NUM_THREADS": "1"} | os.environ | {HUB: hub, "WORLD_SIZE": str(size)}
    processes = {
        rank: subprocess.Popen(command, env=common | {"RANK": str(rank)}, stdin=subprocess.DEVNULL, stdout=2)
        for rank in range(1, size)
    }

    def exits(rank: int) -> str | None:
        code = processes[rank].poll() if rank else None
        if code is None:
            return None
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    return exits


def _announced(given: argparse.Namespace, size: int, hub: str) -> Exits:
    """Tells the ranks that a launcher has started. Only the launcher knows how one of them ends."""
    _store().set(HUB, hub)
    return lambda rank: None


def _store() -> Any:
    """Returns the store of torch's launcher."""
    from torch.distributed import rendezvous

    store, _, _ = next(iter(rendezvous("env://")))
    _kept.append(store)
    return store


# What must live as long as the process.
_kept: list[Any] = []

if __name__ == "__main__":
    code = main()
    with contextlib.suppress(Exception):
        sys.stderr.flush()
    # A library's own clean-up may hang on a device in error.
    os._exit(code)
