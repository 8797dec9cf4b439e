"""What ranks run that are processes of their own; a module of its own, so that a new process can import it."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dgpp_core.api import Bus, DgppError
from dgpp_core.bus.distributed import DistributedBus, join
from dgpp_core.bus.fold import fold
from dgpp_core.bus.forming import Layout, Terms
from dgpp_core.bus.shm.join import join as join_shm
from dgpp_core.bus.slab_bus import SlabBus
from dgpp_core.config.settings import EngineSettings
from dgpp_core.host.loading import load_plugins
from dgpp_core.sampling.params import GREEDY, SamplingParams
from dgpp_core.testing.world import Reply, World

SETTINGS = EngineSettings(max_concurrency=4, kv_capacity=1024, block_tokens=16, prefill_budget_tokens=32)
TIMEOUT = 2.0
Program = Callable[[Any], object]
SMALL = Layout(host_slot=64 * 1024)
"""So that tests of a megabyte take several segments."""


def run(
    program: Program,
    world: int,
    *,
    context: ForkServerContext | SpawnContext,
    ranks: Sequence[int] = (),
    settings: Sequence[str] = (),
    silent: int = -1,
    device: str = "cpu",
    timeout: float = TIMEOUT,
    transport: str = "torch",
) -> list[Any]:
    """The answers of processes that are ``ranks`` of a world, all of it by default; None for the silent one."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    running = []
    for number, rank in enumerate(ranks or range(world)):
        answer, theirs = context.Pipe(duplex=False)
        joining = {"settings": settings[number] if settings else "", "timeout": timeout, "transport": transport}
        process = context.Process(target=start, args=(rank, world, address, device, joining, program, theirs))
        process.start()
        theirs.close()
        running.append((process, rank, answer))
    try:
        return [None if rank == silent else _receive(answer, timeout) for _, rank, answer in running]
    finally:
        for process, _, _ in running:
            process.kill()
            process.join()


def _receive(answer: Connection, timeout: float) -> Any:
    assert answer.poll(30 + 2 * timeout), "a rank hangs"
    return answer.recv()


def start(rank: int, world: int, address: str, device: str, joining: Any, program: Program, answer: Connection) -> None:
    """One process: join, run, and answer with the result or with the error's line."""
    torch.set_num_threads(1)
    place = torch.device("cpu")
    if device == "cuda":  # ranks may share one
        place = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(place)
    try:
        with connect(rank, world, address, place, **joining) as bus:
            answer.send(program(bus))
    except DgppError as error:
        answer.send(error.line())
    except ValueError as error:
        answer.send(f"ValueError: {error}")


def connect(
    rank: int, world: int, address: str, device: torch.device, *, settings: str, timeout: float, transport: str
) -> DistributedBus | SlabBus:
    """Join over a transport: ``torch``, or ``shm`` with kernels where there is a device."""
    if transport == "torch":
        return join(rank, world, address, device=device, timeout=timeout, settings=settings)
    gpu = device if device.type == "cuda" else None
    return join_shm(
        Terms(rank=rank, world=world, address=address, device=gpu, timeout=timeout, settings=settings, layout=SMALL)
    )


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Numbers of many magnitudes, zeros of both signs among them, that depend on the rank alone."""
    source = torch.Generator().manual_seed(rank)
    spread = torch.randn(shape, generator=source) * 10.0 ** torch.randint(-9, 9, shape, generator=source)
    return torch.where(torch.rand(shape, generator=source) < 0.1, -0.0, spread).to(dtype)


def battery(bus: Bus, device: str = "cpu") -> list[bytes]:
    """Bytes of many results, the same for any transport."""
    rank, results = bus.rank, list[Tensor]()

    def mine(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return values(rank, shape, dtype).to(device)

    with torch.inference_mode():
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            shapes: list[tuple[int, ...]] = [(1,), (7, 33), (0, 4), (), (300, 1024)]
            results += [bus.all_reduce(mine(shape, dtype)) for shape in shapes]
            results.append(bus.all_reduce(mine((33, 7), dtype).t()))
            results += [bus.all_gather(mine((3, 5, 2), dtype), dim) for dim in (0, 1, -1)]
        small = mine((2, 9), torch.float32).clamp(0, 99)
        others = (torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn)
        results += [bus.all_gather(small.to(dtype), 1) for dtype in others]
        if rank == 0:
            time.sleep(0.05)  # the others are there first
        results.append(bus.all_reduce(mine((5,), torch.float32)))
        bus.barrier()
    assert all(result.is_contiguous() for result in results), "a layout of its own may change what follows"
    return [result.contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes() for result in results]


def replies(folder: Path, device: str, static: bool | None, bus: Bus) -> list[Reply]:
    """Four requests of different lengths, two of them seeded, served at once by a model that the ranks share."""
    world = _world(folder, device, static, bus)
    for number, length in enumerate((50, 3, 17, 32)):
        tokens = [(7 * i + number) % 512 for i in range(length)]
        params = SamplingParams(temperature=0.8, top_p=0.9, seed=number) if number % 2 else GREEDY
        world.submit(tokens, 16, params=params, logprobs=5)
    return [world.run()[request] for request in range(4)]


def _world(folder: Path, device: str, static: bool | None, bus: Bus) -> World:
    model = load_plugins(environ={}).model("smollm2")
    place = f"cuda:{torch.cuda.current_device()}" if device == "cuda" else device
    return World.from_checkpoint(model, folder, SETTINGS, device=place, bus=bus, static=static)


def steps_lose_rank_1(folder: Path, device: str, bus: SlabBus) -> tuple[float, str]:
    """Rank 1 stops between two steps from static buffers; seconds until another rank's step raises, and what."""
    world = _world(folder, device, True, bus)
    world.submit(range(1, 20), 500)
    for _ in range(8):
        world.tick()
    if bus.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    if bus.rank == 0:
        threading.Timer(0.3, bus.abort, ["rank 1 is silent"]).start()
    begun, tokens = time.monotonic(), len(world.replies[0].tokens)
    try:
        world.run()
    except DgppError as error:
        more = len(world.replies[0].tokens) - tokens - 1  # a step's token is delivered when the next one begins
        return time.monotonic() - begun, error.line() if not more else f"{more} tokens without rank 1"
    return time.monotonic() - begun, "it went on without rank 1"


def rank_1_dies(bus: Bus) -> tuple[float, str, str]:
    """Seconds until the others know, and what they raise then and at their next attempt."""
    bus.all_reduce(torch.zeros(3))
    if bus.rank == 1:
        os._exit(9)
    return _missing(bus)


def rank_1_stops(bus: Bus) -> tuple[float, str, str]:
    """The same, of a process that is there and does nothing."""
    bus.all_reduce(torch.zeros(3))
    if bus.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    return _missing(bus)


def rank_1_stops_and_is_given_up(bus: SlabBus) -> tuple[float, str, str]:
    """The same, with somebody at rank 0 who watches the others."""
    bus.all_reduce(torch.zeros(3))
    if bus.rank == 0:
        threading.Timer(0.3, bus.abort, ["rank 1 is silent"]).start()
    return rank_1_stops(bus)


def rank_1_raises(bus: Bus) -> tuple[float, str, str]:
    """The same, of a rank with a fault of its own."""
    bus.all_reduce(torch.zeros(3))
    if bus.rank == 1:
        raise ValueError("a bad weight")
    return _missing(bus)


def _missing(bus: Bus) -> tuple[float, str, str]:
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


def captured(turns: int, bus: Bus) -> str:
    """A chain of collectives replayed from a graph between eager ones; says where they differ, or nothing."""
    device = torch.device("cuda", torch.cuda.current_device())
    given = torch.zeros(8, 5120, dtype=torch.bfloat16, device=device)

    def chain(x: Tensor) -> tuple[Tensor, Tensor]:
        total = bus.all_reduce(x)
        return total, bus.all_gather(bus.all_reduce(total.float() * 0.5)[:, :16], 1)

    graph = torch.cuda.CUDAGraph()
    chain(given)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        results = chain(given)
    for turn in range(turns):
        given.copy_(values(10 * turn + bus.rank, (8, 5120), torch.bfloat16))
        graph.replay()
        replayed = [result.clone() for result in results]
        for name, mine, eager in zip(("sum", "gather"), replayed, chain(given), strict=True):
            if not torch.equal(mine.view(torch.uint8), eager.view(torch.uint8)):
                return f"turn {turn}, {name}"
    bus.barrier()
    return ""


def device_calls_differ(bus: Bus) -> None:
    """What the ranks send has the same size, so nothing but the comparison afterwards can tell."""
    part = torch.ones(4, device=torch.device("cuda", torch.cuda.current_device()))
    if bus.rank:
        bus.all_gather(part, 0)
    else:
        bus.all_reduce(part)
    bus.barrier()


def sums_against_the_fold(bus: Bus) -> str:
    """Sums of every kind on a device against the host's fold of the same parts; says where they differ, or nothing."""
    device = torch.device("cuda", torch.cuda.current_device())
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for count in (1, 2, 3, 4095, 8192, 24576, 131072, 131073, 2_000_001):
            parts = [values(100 * count + rank, (count,), dtype) for rank in range(bus.world)]
            expected, found = fold(parts), bus.all_reduce(parts[bus.rank].to(device)).cpu()
            number = ~expected.isnan()
            size = torch.int32 if dtype == torch.float32 else torch.int16
            if not torch.equal(found.view(size)[number], expected.view(size)[number]):
                return f"{dtype}, {count}"
            if not torch.equal(found.isnan(), ~number):
                return f"{dtype}, {count}: a NaN"
    bus.barrier()
    return ""


def rank_1_leaves_a_kernel_waiting(how: str, bus: Any) -> tuple[float, str]:
    """Seconds until a rank whose kernel waits for rank 1 knows, and what it raises then.

    Rank 1 ``dies``, ``stops``, or stops and ``is given up`` by who watches it.
    """
    part = torch.ones(8, 5120, dtype=torch.bfloat16, device=torch.device("cuda", torch.cuda.current_device()))
    bus.all_reduce(part)
    torch.cuda.synchronize()
    bus.barrier()
    if bus.rank == 1:
        if how == "dies":
            os._exit(9)
        os.kill(os.getpid(), signal.SIGSTOP)
    begun = time.monotonic()
    if how == "is given up":
        threading.Timer(0.3, bus.abort, ["rank 1 is silent"]).start()
    bus.all_reduce(part)
    torch.cuda.synchronize()
    try:
        bus.check()
    except DgppError as error:
        return time.monotonic() - begun, error.line()
    return time.monotonic() - begun, ""
