"""The other ranks of a world, as far as the front end has to do with them: the journal's address, and the processes of
those that run on this host."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Callable

import msgspec

from dgpp_core.api.errors import ConfigError
from dgpp_core.config.addresses import Address, address_of, listening, next_step
from dgpp_core.host.child import module_command
from dgpp_core.scheduler.messages import Ranks
from dgpp_core.server.options import ServeOptions, WorldOptions

PEER = "dgpp_core.cluster.peer"
STACKS = signal.SIGUSR1
"""Makes a rank write its stacks into its fault file."""
LEAVE_S = 10.0
"""How long a rank may take to leave in order."""
DUMP_S = 1.0
"""How long one may take that is ended because the world has failed."""
DOOMED_S = 1.0
"""How long rank 0 has to say why a rank left with an error, before the front end says that it did."""

OnEnd = Callable[[str], None]


def listen_for_ranks(world: WorldOptions) -> socket.socket:
    """Where the other ranks will connect.

    Raises:
        ConfigError: the address is malformed or cannot be bound.
    """
    try:
        address = Address.parse(world.rendezvous or "127.0.0.1:0")
    except ValueError as error:
        raise ConfigError(
            "the address of the journal is malformed", where="--rendezvous", found=world.rendezvous, expected=str(error)
        ) from None
    try:
        return listening(address)
    except OSError as error:
        raise ConfigError(
            "the address of the journal cannot be used", where=str(address), found=error.strerror or str(error),
            hint=next_step(error, "--rendezvous"),
        ) from error  # fmt: skip


def ranks_of(world: WorldOptions, journal: socket.socket) -> Ranks:
    """What rank 0's engine is told; it inherits ``journal``."""
    return Ranks(
        world=world.size,
        here=world.here,
        epoch=world.epoch,
        journal_fd=journal.fileno(),
        fabric_port=world.fabric_port,
        log_dir=world.log_dir,
        timeout=world.timeout,
        fabric=world.fabric,
    )


def rank_environ() -> dict[str, str]:
    """This process's environment for a rank. Torch's store warns with a long trace of each peer that went before us;
    who went is told by the ranks themselves."""
    return {"TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ}


class LocalRank:
    """A rank's process on this host."""

    def __init__(self, rank: int, process: Process) -> None:
        self.rank, self._process = rank, process
        self._leaving = False

    async def reap(self, on_end: OnEnd) -> None:
        """Wait for its end, and report one that nobody asked for. One that failed has told rank 0 why."""
        status = await self._process.wait()
        if status >= 0:
            await asyncio.sleep(DOOMED_S)
        if not self._leaving:
            on_end(f"rank {self.rank}'s process {describe_status(status)}")

    async def leave(self, seconds: float) -> None:
        """See it end within ``seconds``; if it does not, have it write its stacks, stopped or not, and end it."""
        self._leaving = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), seconds)
        if self._process.returncode is None:
            await dump_stacks(self._process)
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        await self._process.wait()


async def dump_stacks(process: Process) -> None:
    """Have a rank write its stacks into its fault file, also one that is stopped: it goes on for that."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(STACKS)
        process.send_signal(signal.SIGCONT)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), DUMP_S)


@contextlib.asynccontextmanager
async def local_ranks(options: ServeOptions, journal: socket.socket, on_end: OnEnd) -> AsyncIterator[list[LocalRank]]:
    """Start every rank of this host but rank 0, and end those that are left with the block.

    Args:
        on_end: called with what happened when one ends of itself.
    """
    world = options.world
    started: list[LocalRank] = []
    reapers: list[asyncio.Task[None]] = []
    if world is None or world.here == 1:
        yield started
        return
    try:
        for rank in range(1, world.size):
            process = await asyncio.create_subprocess_exec(
                *module_command(PEER, _peer_options(options, world, rank, journal)),
                stdin=asyncio.subprocess.DEVNULL, start_new_session=True, env=rank_environ(),
            )  # fmt: skip
            started.append(LocalRank(rank, process))
        reapers += [asyncio.create_task(rank.reap(on_end)) for rank in started]
        yield started
    finally:
        await asyncio.gather(*(rank.leave(0.0) for rank in started))
        for reaper in reapers:
            reaper.cancel()


def _peer_options(options: ServeOptions, world: WorldOptions, rank: int, journal: socket.socket) -> str:
    """The JSON of `dgpp_core.cluster.peer.PeerOptions`; the server does not import the cluster."""
    said = {
        "rank": rank, "world": world.size, "rendezvous": str(address_of(journal)), "model": options.model,
        "checkpoint": options.checkpoint, "device": options.device, "epoch": world.epoch,
        "image_cache": options.image_cache, "here": world.here, "log_dir": world.log_dir, "timeout": world.timeout,
        "fabric": world.fabric,
    }  # fmt: skip
    return msgspec.json.encode(said).decode()


def describe_status(status: int) -> str:
    """An exit status in words: ``ended with status 3`` or ``was ended by SIGKILL``."""
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"
