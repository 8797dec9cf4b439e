"""How ranks find each other: each writes what it is to a store that rank 0 keeps, and reads the others' lines."""

from __future__ import annotations

import contextlib
import os
import socket
from datetime import timedelta

import msgspec
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

import dgpp_core
from dgpp_core.api import EngineError
from dgpp_core.bus.roster import place_of

LINGER = 2.0
"""Seconds that rank 0 keeps the store for others that have not left yet: they may want to read what went wrong."""


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank says of itself; all but ``process`` must be the same everywhere.

    Attributes:
        process: host and process id, to tell a rank that came twice.
    """

    version: str
    world: int
    settings: str
    process: str

    @classmethod
    def here(cls, world: int, settings: str) -> Hello:
        """This process's own."""
        process = f"{socket.gethostname()} process {os.getpid()}"
        return cls(version=dgpp_core.__version__, world=world, settings=settings, process=process)


def enter(rank: int, address: str, hello: Hello, timeout: float, listener: socket.socket | None = None) -> Store:
    """The store of a world in which every rank has said the same.

    Args:
        address: ``host:port`` where rank 0 listens.
        timeout: seconds for each step.
        listener: at rank 0, a socket that listens there already; it is the store's from now on.

    Raises:
        EngineError: the address is malformed, taken or silent; a rank is missing, doubled or unlike rank 0.
    """
    store = _open(rank, address, timeout, listener)
    try:
        _compare(store, rank, hello, timeout)
    except EngineError:
        leave(store, rank, hello.world)
        raise
    except RuntimeError as error:  # torch's errors of the network
        raise EngineError("the rendezvous broke off", where=address, found=str(error).splitlines()[0]) from error
    return store


def leave(store: Store, rank: int, world: int) -> None:
    """Part from the others; rank 0, with whom the store goes, waits for them a while."""
    with contextlib.suppress(RuntimeError):
        store.set(f"left/{rank}", "")
        if rank == 0:
            store.wait([f"left/{other}" for other in range(world)], timedelta(seconds=LINGER))


def _compare(store: Store, rank: int, hello: Hello, timeout: float) -> None:
    mine = msgspec.json.encode(hello).decode()
    if (there := store.compare_set(_key(rank), "", mine).decode()) != mine:
        raise EngineError("two processes claim one rank", where=f"rank {rank}", found=f"{there} and {mine}")
    hellos = [_read(store, other, hello.world, timeout) for other in range(hello.world)]
    for other, said in enumerate(hellos):
        _require_alike(other, said, hellos[0])


def _open(rank: int, address: str, timeout: float, listener: socket.socket | None) -> TCPStore:
    place = place_of(address)
    limit = timedelta(seconds=timeout)
    try:
        return TCPStore(
            place.host, place.port, None, rank == 0, limit, wait_for_workers=False,
            master_listen_fd=listener.detach() if listener is not None else None,
        )  # fmt: skip
    except RuntimeError as error:
        what = "rank 0 cannot listen" if rank == 0 else f"rank 0 was not reached within {timeout:g} s"
        found = str(error).splitlines()[0]
        hint = "choose a free port" if rank == 0 else "check that rank 0 runs and that its address is right"
        raise EngineError(what, where=f"rank {rank}, {address}", found=found, hint=hint) from error


def _key(rank: int) -> str:
    return f"hello/{rank}"


def _read(store: Store, rank: int, world: int, timeout: float) -> Hello:
    try:
        store.wait([_key(rank)], timedelta(seconds=timeout))
    except RuntimeError as error:
        raise EngineError(
            f"rank {rank} of {world} did not come within {timeout:g} s",
            where="rendezvous",
            hint="check that it was started, and with the same address",
        ) from error
    return msgspec.json.decode(store.get(_key(rank)), type=Hello)


def _require_alike(rank: int, said: Hello, first: Hello) -> None:
    for name in ("version", "world", "settings"):
        found, expected = getattr(said, name), getattr(first, name)
        if found != expected:
            raise EngineError(
                f"ranks with another {name} cannot form a world",
                where=f"rank {rank}, {said.process}",
                found=str(found),
                expected=f"{expected}, as rank 0 has it",
            )
