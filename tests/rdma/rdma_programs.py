"""What runs in the guests: ``NAME WORLD NODE``. Without torch, which takes half a minute to import there."""

from __future__ import annotations

import os
import resource
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from slabs import chain, part

from dgpp_core.api.errors import EngineError
from dgpp_core.bus.exchange import Exchange
from dgpp_core.bus.link import connect
from dgpp_core.bus.native import load
from dgpp_core.bus.roster import enter, hello
from dgpp_core.bus.slab import Geometry
from dgpp_core.bus.verbs.device import pyverbs
from dgpp_core.bus.verbs.link import VerbsLink
from dgpp_core.bus.verbs.ports import rails

LENGTHS = (1, 2048, 5001)
"""Numbers of a vector; a slot holds 2,048."""
SLOT = 4096
LATE = 128 * 1024
"""A slot of which half goes at once."""
ADDRESS = "10.77.0.1:18515"
OUT = Path("/run/out")


@contextmanager
def member(
    rank: int,
    world: int,
    *,
    timeout: float = 60.0,
    settings: str = "",
    slot: int = SLOT,
    lanes: int = 1,
    native: bool | None = None,
    pace: float | None = None,
) -> Iterator[Exchange]:
    """One rank's exchange in a formed world; left in order, also after a fault.

    Args:
        native: without pyverbs; by default, every other rank is.
        pace: 10^9 bits a second that a peer is sent.
    """
    library = load("verbs") if (rank % 2 == 0 if native is None else native) else None
    link = VerbsLink(rank, rails() * lanes, Geometry(world=world, channels=1, slot_bytes=slot), library, pace)
    try:
        roster = enter(hello(rank, world, f"verbs {slot}", settings), ADDRESS, timeout)
        try:
            connect(roster, link)
            roster.watch(lambda: None)
            exchange = Exchange(link.slab, rank, link.poster(native=False), roster, timeout=timeout)
            yield exchange
            exchange.finish(5.0)
            roster.close(link.linger)
        except EngineError as error:
            roster.publish(error.line())
            roster.close()
            raise
    finally:
        link.close()


def sums(exchange: Exchange) -> list[bytes]:
    """Every length, in one hop and in two, ranks late by turns; then gathers of the same."""
    found = []
    for turn, count in enumerate(LENGTHS):
        mine = part(exchange.rank, count, count)
        for segmented in (False, True):
            time.sleep(0.05 * ((exchange.rank + turn) % exchange.world))
            found.append(exchange.all_reduce(mine, chain, segmented=segmented).tobytes())
        found.append(b"".join(row.tobytes() for row in exchange.all_gather(mine)))
    return found


def battery(rank: int, world: int) -> None:
    """Leave the results of `sums`, and the addresses that there were, for the host to compare."""
    with member(rank, world) as exchange:
        found = sums(exchange)
    (OUT / "results").write_bytes(msgspec.msgpack.encode(found))
    print(f"gid {rails()[0].gid.index} {rails()[0].gid.address}")


def late(rank: int, world: int) -> None:
    """Rank 0 has its peers' second piece half a second before its own is due, and then turns its loop no more."""
    with member(rank, world, timeout=10.0, slot=LATE, pace=0.001) as exchange:
        time.sleep(0.0 if rank else 1.0)
        found = [int(row.sum()) for row in exchange.all_gather(np.full(LATE + 4096, rank, np.uint8))]
        end = time.monotonic() + 15.0
        while not rank and time.monotonic() < end:
            if all(exchange._watch.fault(peer) for peer in range(1, world)):  # they have left
                break
            time.sleep(0.05)
    (OUT / "late").write_bytes(msgspec.msgpack.encode(found))


def battery_and_a_loss(rank: int, world: int) -> None:
    """`late` and `battery`; then rank 1's machine loses its process, and the others say what they saw and when."""
    late(rank, world)
    try:
        with member(rank, world) as exchange:
            (OUT / "results").write_bytes(msgspec.msgpack.encode(sums(exchange)))
            if rank == 1:
                os._exit(0)
            begun = time.monotonic()
            exchange.all_gather(np.zeros(100, np.uint8))
            exchange.all_gather(np.zeros(100, np.uint8))
    except EngineError as error:
        print(f"raised after {time.monotonic() - begun:.1f} s: {error.line()}")


def refusals(rank: int, world: int) -> None:
    """What can be tried on one machine, each with processes of their own; leaves what each rank raised."""
    for name in ("device", "pd", "mr", "cq", "qp", "addr", "wr", "pyverbs_error"):
        pyverbs(name)  # an unprivileged child cannot read the folder they come from
    for case in (geometry, settings, lanes, silence, native_silence, locked, nothing_there):
        pids = []
        for number in range(2):
            if not (pid := os.fork()):
                _child(case, number)
            pids.append(pid)
        for pid in pids:
            os.waitpid(pid, 0)


def _child(case: Callable[[int], Any], rank: int) -> None:
    with (OUT / f"{case.__name__} {rank}").open("w") as answer:  # two processes' lines on one console mix
        try:
            answer.write(str(case(rank)))
        except EngineError as error:
            answer.write(error.line())
        except BaseException:
            answer.write(traceback.format_exc())
    os._exit(0)


def geometry(rank: int) -> None:
    """Slots of another size."""
    with member(rank, 2, slot=64 + 64 * rank):
        pass


def settings(rank: int) -> None:
    """Another digest of settings."""
    with member(rank, 2, settings=str(rank)):
        pass


def lanes(rank: int) -> None:
    """Rank 1 has two devices (the same one twice)."""
    with member(rank, 2, lanes=1 + rank):
        pass


def silence(rank: int, native: bool = False) -> str:
    """Rank 1 closes its connections without a word: the device notices what the roster does not know of."""
    with member(rank, 2, timeout=20.0, native=native and rank == 0) as exchange:
        exchange.all_gather(np.zeros(8, np.uint8))
        if rank == 1:
            exchange.finish(5.0)
            time.sleep(0.2)
            exchange._poster._port._devices[0].close()  # type: ignore[attr-defined]
            time.sleep(4)
            os._exit(0)
        time.sleep(1)
        exchange.all_gather(np.zeros(8, np.uint8))
    return "nothing"


def native_silence(rank: int) -> str:
    """The same, noticed without pyverbs."""
    return silence(rank, native=True)


def locked(rank: int) -> None:
    """A user without privileges and with little memory that may be locked; rank 0 without pyverbs."""
    library = load("verbs") if rank == 0 else None
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
    os.setuid(65534)
    VerbsLink(rank, rails(), Geometry(world=2, channels=16, slot_bytes=16384), library)


def nothing_there(rank: int) -> None:
    """A device that is not there, and an index that is none."""
    if rank == 0:
        rails(["mlx5_0"])
    rails(["rxe0"], [200])


if __name__ == "__main__":
    globals()[sys.argv[1]](int(sys.argv[3]), int(sys.argv[2]))
