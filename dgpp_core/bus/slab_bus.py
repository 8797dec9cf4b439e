"""The bus over slabs: tensors in, tensors out, whatever moves the bytes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Protocol, Self

import torch
from torch import Tensor

from dgpp_core.api import EngineError
from dgpp_core.bus.call import Call, another, disagreement
from dgpp_core.bus.exchange import Exchange
from dgpp_core.bus.fold import fold, require_payload
from dgpp_core.bus.link import Link
from dgpp_core.bus.roster import Roster
from dgpp_core.bus.slab import Bytes

LEAVING = 2.0
"""Seconds that a rank takes to send what is still ready when it leaves."""


class DeviceCollectives(Protocol):
    """Collectives on tensors of a GPU; see `dgpp_core.bus.device`."""

    def all_reduce(self, call: Call, partial: Tensor) -> Tensor:
        """The fold, launched on the current stream."""
        ...

    def all_gather(self, call: Call, part: Tensor) -> list[Tensor]:
        """Every rank's part, launched on the current stream."""
        ...

    def fault(self) -> EngineError | None:
        """What a kernel gave up on, if one did."""
        ...

    def abort(self, missing: int) -> None:
        """Let kernels that wait for one of these ranks (bits) leave."""
        ...

    def finish(self) -> None:
        """Wait for the device, then end the posting loop when all is sent."""
        ...

    def close(self) -> None:
        """Give the memory back."""
        ...


class SlabBus:
    """Implements `dgpp_core.api.Bus` for this process. Ended by `close`, also as a context.

    Collectives of host tensors are checked before they are done: ranks that differ are named with what each issued.
    Those of a device are checked by the kernels and reported by the next call, `check` or `barrier`. Any fault ends the
    world: this rank raises from then on, and the others are told.
    """

    def __init__(self, roster: Roster, link: Link, *, timeout: float, device: DeviceCollectives | None = None) -> None:
        self.rank, self.world, self.capturable = roster.rank, roster.world, device is not None
        self._roster, self._link, self._device = roster, link, device
        self._exchange = Exchange(link.slab, self.rank, link.poster(native=False), roster, timeout=timeout)
        self._issued, self._left = 0, False
        self._fault: EngineError | None = None
        roster.watch(self._missed)
        self._missed()

    def all_reduce(self, partial: Tensor) -> Tensor:
        """The `fold` of every rank's ``partial``.

        Raises:
            EngineError: the ranks disagree, one is gone or silent for the timeout, or the dtype cannot be summed.
        """
        require_payload(partial)
        call, device = self._begin("all_reduce", partial)
        if device is not None:
            return device.all_reduce(call, partial)
        self._agree(call)
        if not partial.numel():
            return torch.empty_like(partial, memory_format=torch.contiguous_format)

        def folded(parts: Sequence[Bytes]) -> Bytes:
            total = fold([torch.from_numpy(part).view(partial.dtype) for part in parts])
            return total.view(torch.uint8).numpy()

        with self._guarded(call):
            total = self._exchange.all_reduce(_bytes(partial), folded)
        return torch.from_numpy(total).view(partial.dtype).view(partial.shape)

    def all_gather(self, part: Tensor, dim: int) -> Tensor:
        """Every rank's ``part``, all of one shape, concatenated along ``dim`` in order of rank; raises likewise."""
        call, device = self._begin("all_gather", part, dim)
        if device is not None:
            return torch.cat(device.all_gather(call, part), dim)
        self._agree(call)
        rows = [part] * self.world
        if part.numel():
            with self._guarded(call):
                gathered = self._exchange.all_gather(_bytes(part))
            rows = [torch.from_numpy(row).view(part.dtype).view(part.shape) for row in gathered]
        return torch.cat(rows, dim)

    def barrier(self) -> None:
        """Wait for every rank's host.

        Raises:
            EngineError: a rank issued something else, is gone or silent, or a collective on a device failed.
        """
        call, _ = self._begin("barrier", torch.empty(0))
        self._agree(call)

    def check(self) -> None:
        """Raise `EngineError` if a collective failed, be it in a kernel, or another rank did. Takes no time."""
        if self._fault is None and (fault := self._roster.fault()):
            self._fault = fault  # also where a kernel gave up because of it
        if self._fault is None and self._device is not None and (fault := self._device.fault()):
            self._give_up(fault)
        if self._fault is not None:
            raise another(self._fault)

    def abort(self, reason: str) -> None:
        """Whoever watches the ranks has given the world up: what waits leaves at once, kernels too, on every rank.

        From any thread; does not wait. Every rank raises from then on and names the ``reason``.
        """
        self._roster.give_up(EngineError("the world was given up", where=f"rank {self.rank}", found=reason))

    def close(self, reason: str = "") -> None:
        """Leave the world; with a ``reason``, the others are told it. What was sent still arrives."""
        if self._left:
            return
        self._left = True
        if reason:
            self._roster.publish(reason)
        with contextlib.suppress(EngineError):
            if not reason and self._fault is None:
                self._exchange.finish(LEAVING)
        if self._device is not None:
            self._device.finish()
        self._roster.close(self._link.linger if not reason and self._fault is None else 0.0)
        if self._device is not None:
            self._device.close()
        self._link.close()
        self._fault = self._fault or EngineError("this rank has left the world", where=f"rank {self.rank}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close(f"{type(error).__name__}: {error}".replace("\n", ";") if error and not self._fault else "")

    def _begin(self, operation: str, part: Tensor, dim: int = 0) -> tuple[Call, DeviceCollectives | None]:
        self.check()
        call = Call.of(self._issued, operation, part, dim)
        self._issued += 1
        if part.device.type == "cpu":
            return call, None
        if self._device is None:
            raise EngineError("this world was formed without a device", found=str(part.device), expected="cpu")
        return call, self._device

    def _agree(self, call: Call) -> None:
        words = torch.tensor(call.encode(), dtype=torch.int64).view(torch.uint8).numpy()
        with self._guarded(call):
            told = self._exchange.all_gather(words)
        calls = {rank: Call.decode(torch.from_numpy(said).view(torch.int64).tolist()) for rank, said in enumerate(told)}
        if fault := disagreement(calls):
            self._fault = fault
            raise another(fault)

    @contextlib.contextmanager
    def _guarded(self, call: Call) -> Iterator[None]:
        try:
            yield
        except EngineError as error:
            fault = EngineError(
                "a collective failed, and the world with it",
                where=f"rank {self.rank} of {self.world}, {call}",
                found=error.line(),
                expected="every rank takes part in time",
                hint="see the log of the rank that is named; then start all ranks again",
            )
            self._give_up(fault)
            raise fault from error

    def _give_up(self, fault: EngineError) -> None:
        """Keep the first fault and tell the others, unless they told this rank."""
        self._fault = self._fault or fault
        if self._roster.fault() is None:
            self._roster.publish(fault.line())
        if self._device is not None:
            self._device.abort((1 << self.world) - 1)

    def _missed(self) -> None:
        if self._device is not None and (missing := self._roster.missing()):
            self._device.abort(missing)


def _bytes(tensor: Tensor) -> Bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
