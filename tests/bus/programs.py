"""What the processes of `test_distributed` run; a module of its own, so that a new process can import it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from dgpp_core.api import Bus, DgppError
from dgpp_core.bus.distributed import DistributedBus, join

TIMEOUT = 2.0
Program = Callable[[DistributedBus], object]


def start(rank: int, world: int, address: str, settings: str, program: Program, answer: Connection) -> None:
    """One process: join, run, and answer with the result or with the error's line."""
    torch.set_num_threads(1)
    try:
        with join(rank, world, address, timeout=TIMEOUT, settings=settings) as bus:
            answer.send(program(bus))
    except DgppError as error:
        answer.send(error.line())
    except ValueError as error:
        answer.send(f"ValueError: {error}")


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Numbers of many magnitudes, zeros of both signs among them, that depend on the rank alone."""
    source = torch.Generator().manual_seed(rank)
    spread = torch.randn(shape, generator=source) * 10.0 ** torch.randint(-9, 9, shape, generator=source)
    return torch.where(torch.rand(shape, generator=source) < 0.1, -0.0, spread).to(dtype)


def battery(bus: Bus) -> list[bytes]:
    """Bytes of many results, the same for any transport."""
    rank, results = bus.rank, list[Tensor]()
    with torch.inference_mode():
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            shapes: list[tuple[int, ...]] = [(1,), (7, 33), (0, 4), (), (300, 1024)]
            results += [bus.all_reduce(values(rank, shape, dtype)) for shape in shapes]
            results.append(bus.all_reduce(values(rank, (33, 7), dtype).t()))
            results += [bus.all_gather(values(rank, (3, 5, 2), dtype), dim) for dim in (0, 1, -1)]
        small = values(rank, (2, 9), torch.float32).clamp(0, 99)
        others = (torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn)
        results += [bus.all_gather(small.to(dtype), 1) for dtype in others]
        if rank == 0:
            time.sleep(0.05)  # the others are there first
        results.append(bus.all_reduce(values(rank, (5,), torch.float32)))
        bus.barrier()
    return [result.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for result in results]


def rank_1_dies(bus: DistributedBus) -> tuple[float, str, str]:
    """Seconds until the others know, and what they raise then and at their next attempt."""
    bus.all_reduce(torch.zeros(3))
    if bus.rank == 1:
        os._exit(9)
    return _missing(bus)


def rank_1_stops(bus: DistributedBus) -> tuple[float, str, str]:
    """The same, of a process that is there and does nothing."""
    bus.all_reduce(torch.zeros(3))
    if bus.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    return _missing(bus)


def rank_1_raises(bus: DistributedBus) -> tuple[float, str, str]:
    """The same, of a rank with a fault of its own."""
    bus.all_reduce(torch.zeros(3))
    if bus.rank == 1:
        raise ValueError("a bad weight")
    return _missing(bus)


def _missing(bus: DistributedBus) -> tuple[float, str, str]:
    lines, begun = [], time.monotonic()
    for _ in range(2):
        try:
            bus.all_reduce(torch.zeros(3))
        except DgppError as error:
            lines.append(error.line())
    first, again = lines
    return time.monotonic() - begun, first, again


def shapes_differ(bus: DistributedBus) -> None:
    """Rank 1 sends another shape."""
    bus.all_reduce(torch.zeros(3))
    bus.all_gather(torch.zeros(4, 5 if bus.rank == 1 else 6), 0)


def one_more(bus: DistributedBus) -> None:
    """Rank 0 issues a collective that the others leave out."""
    if bus.rank == 0:
        bus.barrier()
    bus.all_reduce(torch.zeros(3))
