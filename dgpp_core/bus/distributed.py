"""Ranks as processes, over torch.distributed: gloo for tensors of a CPU, NCCL for those of a CUDA device.

A sum is an all-gather and a local `fold`, never the library's all-reduce: the order of that one is its own affair.

On a CPU every rank sends to every other one directly. So a peer that is gone is known by name, and ranks compare what
they are about to do before they do it. On a CUDA device the collective is a kernel on the current stream, capturable
into a graph and not checked by the host; `barrier` compares what was issued since.
"""

from __future__ import annotations

import hashlib
import re
import socket
from datetime import timedelta
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from dgpp_core.api import EngineError
from dgpp_core.bus.call import Call, another, disagreement
from dgpp_core.bus.fold import fold, require_payload
from dgpp_core.bus.rendezvous import Hello, enter, leave

TIMEOUT = 120.0
"""Seconds for forming a world and for each collective; peers may still be loading."""
_FAULT = "fault"


class DistributedBus:
    """Implements `dgpp_core.api.Bus` for this process; there can be one at a time. Made by `join`, ended by `close`.

    Any fault ends the world: this rank raises from then on, and leaves the reason where the others find it.
    """

    def __init__(self, rank: int, world: int, store: Store, device: torch.device) -> None:
        self.rank, self.world = rank, world
        self.capturable = device.type == "cuda"
        self._store, self._issued = store, 0
        self._digest, self._left = b"", False
        self._fault: EngineError | None = None

    def all_reduce(self, partial: Tensor) -> Tensor:
        """The `fold` of every rank's ``partial``.

        Raises:
            EngineError: the ranks disagree, one is gone or silent for the timeout, or the dtype cannot be summed.
        """
        require_payload(partial)
        return fold(self._gather("all_reduce", partial))

    def all_gather(self, part: Tensor, dim: int) -> Tensor:
        """Every rank's ``part``, all of one shape, concatenated along ``dim`` in order of rank; raises likewise."""
        return torch.cat(self._gather("all_gather", part, dim), dim)

    def barrier(self) -> None:
        """Wait for every rank's host, and check that all issued the same collectives on their devices.

        Raises:
            EngineError: they did not, or a rank is gone or silent.
        """
        mine = torch.frombuffer(bytearray(hashlib.blake2b(self._digest, digest_size=8).digest()), dtype=torch.uint8)
        digests = self._gather("barrier", mine)
        if wrong := [rank for rank, digest in enumerate(digests) if not torch.equal(digest, digests[0])]:
            where = ", ".join(f"rank {rank}" for rank in wrong)
            what = "the ranks issued different collectives on their devices"
            raise self._give_up(EngineError(what, where=where, found="another digest than rank 0's"))

    def check(self) -> None:
        """Raise `EngineError` if a collective has failed on this rank's host; those of NCCL end the process."""
        if self._fault is not None:
            raise another(self._fault)

    def abort(self, reason: str) -> None:
        """Whoever watches the ranks has given the world up: every collective that is begun from now on raises.

        From any thread; does not wait. What waits in the library stays there until the process ends, and the others are
        not told: the store may be that of a rank that does not answer.
        """
        self._fault = self._fault or EngineError("the world was given up", where=f"rank {self.rank}", found=reason)

    def close(self, reason: str = "") -> None:
        """Leave the world; with a ``reason``, the others are told it when they miss this rank.

        Rank 0 stays up to `LINGER` seconds longer than the others. After a fault NCCL's part is left to the end of the
        process: taking it down waits for collectives that may never end.
        """
        if reason:
            self._publish(f"rank {self.rank} failed: {reason}")
        if dist.is_initialized() and not self._left:
            self._left = True
            if not (self.capturable and (reason or self._fault)):
                dist.destroy_process_group()
            leave(self._store, self.rank, self.world)
        self._fault = self._fault or EngineError("this rank has left the world", where=f"rank {self.rank}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close(f"{type(error).__name__}: {error}".replace("\n", ";") if error and not self._fault else "")

    def _gather(self, operation: str, part: Tensor, dim: int = 0) -> list[Tensor]:
        """Every rank's part, of ``part``'s shape and dtype, in order of rank."""
        self.check()
        call = Call.of(self._issued, operation, part, dim)
        self._issued += 1
        raw = part.contiguous().view(-1).view(torch.uint8)
        on_cuda = part.device.type == "cuda"
        if on_cuda:
            self._digest = hashlib.blake2b(self._digest + str(call).encode(), digest_size=8).digest()
        else:
            self._agree(call)
        if not len(raw):
            rows = [raw] * self.world
        else:
            rows = self._device_gather(call, raw) if on_cuda else self._mesh(call, raw)
        return [row.view(part.dtype).view(part.shape) for row in rows]

    def _device_gather(self, call: Call, raw: Tensor) -> list[Tensor]:
        rows = raw.new_empty(self.world, len(raw))
        try:
            dist.all_gather_into_tensor(rows, raw)
        except RuntimeError as error:
            raise self._failed(call, _reason(error)) from error
        return list(rows.unbind())

    def _agree(self, call: Call) -> None:
        words = torch.tensor(call.encode(), dtype=torch.int64)
        told = self._mesh(call, words)
        calls = {rank: Call.decode(said.tolist()) for rank, said in enumerate(told)}
        if fault := disagreement(calls):
            raise self._give_up(fault)

    def _mesh(self, call: Call, flat: Tensor) -> list[Tensor]:
        """Send ``flat`` to every peer and receive theirs."""
        peers = [rank for rank in range(self.world) if rank != self.rank]
        rows = [flat if rank == self.rank else torch.empty_like(flat) for rank in range(self.world)]
        works: dict[int, tuple[dist.Work | None, dist.Work | None]] = {}
        peer = self.rank
        try:
            for peer in peers:
                works[peer] = dist.isend(flat, peer), dist.irecv(rows[peer], peer)
            for peer in peers:
                for work in works[peer]:
                    assert work is not None, "this process is a member of the group"
                    work.wait()
        except RuntimeError as error:
            raise self._failed(call, f"no answer from rank {peer}: {_reason(error)}") from error
        return rows

    def _failed(self, call: Call, found: str) -> EngineError:
        """The error to raise, with the first rank's account of what happened where there is one."""
        return self._give_up(
            EngineError(
                "a collective failed, and the world with it",
                where=f"rank {self.rank} of {self.world}, {call}",
                found=self._publish(found),
                expected="every rank takes part in time",
                hint="see the log of the rank that is named; then start all ranks again",
            )
        )

    def _give_up(self, fault: EngineError) -> EngineError:
        self._fault = fault
        return fault

    def _publish(self, text: str) -> str:
        """Leave ``text`` as the fault of this world, unless a rank was earlier; whatever stands there then."""
        try:
            first: bytes = self._store.compare_set(_FAULT, "", text)
        except RuntimeError:  # the store went with rank 0
            return text
        return first.decode()


def join(
    rank: int,
    world: int,
    address: str,
    *,
    device: torch.device | None = None,
    timeout: float = TIMEOUT,
    settings: str = "",
    listener: socket.socket | None = None,
) -> DistributedBus:
    """Form a world with the other ranks; all call this with the same arguments but ``rank`` and ``device``.

    Args:
        address: ``host:port`` where rank 0 listens.
        device: whose tensors will be sent, a CUDA device with its index; the CPU if none.
        timeout: seconds for each step of forming the world, and later for each collective of a CPU. On a CUDA device
            NCCL ends the process when a collective takes longer.
        settings: what ranks must have in common beside the version of dgpp; a digest, say.
        listener: at rank 0, a socket that listens at ``address`` already, so that its port can be any free one.

    Raises:
        EngineError: names the rank that is missing, doubled or of another kind, or what the network said.
    """
    device = device or torch.device("cpu")
    on_cuda = device.type == "cuda"
    if not 0 <= rank < world:
        raise EngineError("no such rank", where=f"rank {rank}", expected=f"0 to {world - 1}")
    if on_cuda and not dist.is_nccl_available():
        raise EngineError("this torch has no NCCL", where=f"rank {rank}", hint="install a CUDA build of torch")
    store = enter(rank, address, Hello.here(world, settings), timeout, listener)
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_cuda else "gloo",
            store=PrefixStore("group", store),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=timeout),
            device_id=device if on_cuda else None,
        )
    except (RuntimeError, ValueError) as error:
        where = f"rank {rank} of {world}"
        raise EngineError("the ranks could not connect to each other", where=where, found=_reason(error)) from error
    bus = DistributedBus(rank, world, store, device)
    if on_cuda:
        bus.all_gather(torch.zeros(1, device=device), 0)  # what NCCL sets up at its first use cannot be captured
    bus.barrier()
    return bus


def _reason(error: Exception) -> str:
    """The first line of a library's message, without the place in its source."""
    return re.sub(r"^\[[^\]]*\] ", "", str(error).splitlines()[0] if str(error) else type(error).__name__)
