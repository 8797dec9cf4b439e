"""Time of a sum over shared memory: ``python benchmarks/shm_bus.py [--host] [--output FILE]``.

On a GPU: two ranks as threads of one process share the card, so that their kernels run side by side. Each sum stands
in a graph between two kernels that note the time; printed are microseconds of a sum without the notes' own, for 8, 48
and 160 KB, with the native posting loop and with the interpreter's. Below them the floor: a flag from the GPU to a
native loop on the host and back, and the payload's way out to host memory and in from it at the speed of large copies.

``--host`` measures only the posting loops, without a GPU: microseconds from ready to sent, one peer.
"""
# ruff: noqa: N803

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import platform
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from dgpp_core.bus.device import kernel
from dgpp_core.bus.device.launch import meta_of
from dgpp_core.bus.forming import DEVICE_CHANNELS, DEVICE_SLOT, Terms
from dgpp_core.bus.native import NativePoster, load
from dgpp_core.bus.posting import Poster, PythonPoster
from dgpp_core.bus.shm.join import join
from dgpp_core.bus.shm.link import CopyPort
from dgpp_core.bus.slab import Geometry, Slab
from dgpp_core.bus.slab_bus import SlabBus

SIZES = (8, 48, 160)
CHAIN, REPLAYS = 50, 40
ECHO = """
#include <stdint.h>
void echo(volatile uint32_t *cells, volatile uint32_t *stop)
{
    uint32_t last = 0;
    while (!*stop) {
        const uint32_t now = __atomic_load_n(&cells[0], __ATOMIC_ACQUIRE);
        if (now != last)
            __atomic_store_n(&cells[32], last = now, __ATOMIC_RELEASE);
    }
}
"""


@triton.jit
def note(times, index):
    now = tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    tl.store(times + index, now)


@triton.jit
def ping(cells, times, rounds, limit):
    """Round trips of a flag; the time of each, in ns."""
    turn = 0
    while turn < rounds:
        begun = tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
        kernel._publish(cells.to(tl.int64), (turn + 1 + tl.zeros([], tl.int64)).to(tl.uint64))
        lane = tl.arange(0, 32)
        there = tl.where(lane == 0, 1, 0)
        cell = (cells + 32 + lane * 0).to(tl.int64)
        status = kernel._arrived(cell, turn + 1, there, (cells + 64).to(tl.int64), limit)
        tl.max(status, 0)
        ended = tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
        tl.store(times + turn, ended - begun)
        turn += 1


@triton.jit
def copy(source, target, SPAN: tl.constexpr):
    """Grid (n,): SPAN words a block, from or to host memory."""
    i = tl.program_id(0) * SPAN + tl.arange(0, SPAN)
    tl.store(target + i, tl.load(source + i, volatile=True))


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", action="store_true")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    found: dict[str, Any] = {"machine": platform.machine(), "posting_us": posting()}
    show("posting loop, us a collective", found["posting_us"])
    if not options.host:
        found["device"] = torch.cuda.get_device_name()
        found["floor"] = floor()
        show("floor", found["floor"])
        for native in (True, False):
            name = "native" if native else "interpreter"
            found[f"in_graph_us_{name}"] = in_graph(native)
            show(f"a sum in a graph, {name} loop, us", found[f"in_graph_us_{name}"])
    if options.output:
        options.output.write_text(json.dumps(found, indent=2) + "\n")


def show(title: str, rows: dict[str, dict[str, float]]) -> None:
    print(title)
    for name, row in rows.items():
        print(f"  {name:<22}" + "  ".join(f"{key} {value:.2f}" for key, value in row.items()), flush=True)


def spread(values: list[float]) -> dict[str, float]:
    """Minimum, median and the upper tail."""
    ordered = sorted(values)
    at = {f"p{q}": ordered[min(len(ordered) - 1, len(ordered) * q // 100)] for q in (50, 90, 99)}
    return {"min": round(ordered[0], 2), **{key: round(value, 2) for key, value in at.items()}}


def posting() -> dict[str, dict[str, float]]:
    """From ready to sent, with one peer."""
    geometry = Geometry(world=2, channels=DEVICE_CHANNELS, slot_bytes=DEVICE_SLOT)
    rows = {}
    makers: dict[str, Callable[[Slab, list[Slab]], Poster]] = {
        "native": lambda slab, both: NativePoster(slab, 0, both, load()),
        "interpreter": lambda slab, both: PythonPoster(slab, 0, CopyPort(slab, both)),
    }
    for name, make in makers.items():
        both = [Slab(geometry, mmap.mmap(-1, geometry.size)) for _ in range(2)]
        poster = make(both[0], both)
        for size in SIZES:
            rows[f"{name}, {size} KB"] = spread(_post(poster, both[0], size * 1024))
    return rows


def _post(poster: Poster, slab: Slab, size: int) -> list[float]:
    slot, times = slab.geometry.slot_bytes, []
    payload = np.ones(slot, np.uint8)
    first = int(slab.ready[:2].max()) & 0xFFFFFFFF
    for generation in range(first + 1, first + 1002):
        channels = [(c, min(slot, size - c * slot)) for c in range(-(-size // slot))]
        for channel, count in channels:
            slab.put(slab.geometry.row(channel, generation), payload[:count], 0, generation, 0)
        for channel, _ in channels:
            slab.publish(channel, generation, 0)
        started = time.perf_counter()
        poster.advance()
        times.append((time.perf_counter() - started) * 1e6)
    return times[1:]


def floor() -> dict[str, dict[str, float]]:
    """A flag's round trip, and the way of each payload out to host memory and in again."""
    cells = torch.zeros(4096, dtype=torch.int32).pin_memory()
    times = torch.zeros(2000, dtype=torch.int64, device="cuda")
    stop = ctypes.c_uint32(0)
    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder) / "echo.c", Path(folder) / "echo.so"
        source.write_text(ECHO)
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", str(made), str(source)], check=True)
        library = ctypes.CDLL(str(made))
    thread = threading.Thread(target=library.echo, args=(ctypes.c_void_p(cells.data_ptr()), ctypes.byref(stop)))
    thread.start()
    ping[(1,)](cells, times, len(times), 10**9, num_warps=1)
    torch.cuda.synchronize()
    stop.value = 1
    thread.join()
    rows = {"flag round trip, us": spread([t / 1e3 for t in times[100:].tolist()])}
    speeds = _copy_speeds()
    for size in SIZES:
        rows[f"{size} KB out and in, us"] = {k: round(size * 1024 / v / 1e3, 2) for k, v in speeds.items()}
    rows["speed, GB/s"] = {key: round(value, 1) for key, value in speeds.items()}
    return rows


def _copy_speeds() -> dict[str, float]:
    words = 16 << 20
    host, there = torch.zeros(words, dtype=torch.int32).pin_memory(), torch.zeros(words, dtype=torch.int32).cuda()
    speeds = {}
    for name, (source, target) in {"out": (there, host), "in": (host, there)}.items():
        best = 0.0
        for _ in range(5):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            copy[(words // 4096,)](source, target, 4096, num_warps=16)
            end.record()
            torch.cuda.synchronize()
            best = max(best, words * 4 / start.elapsed_time(end) / 1e6)
        speeds[name] = best
    return speeds


def in_graph(native: bool) -> dict[str, dict[str, float]]:
    """Two ranks as threads; rank 0's times."""
    address = f"127.0.0.1:{_free_port()}"
    device = torch.device("cuda", torch.cuda.current_device())
    meeting, capturing = threading.Barrier(2), threading.Lock()

    def rank(number: int) -> dict[str, dict[str, float]]:
        terms = Terms(rank=number, world=2, address=address, device=device, timeout=20.0, native=native)
        with join(terms) as bus, torch.cuda.stream(torch.cuda.Stream(device)):
            _warm(bus)
            rows = {f"{size} KB": spread(_measure(bus, size, meeting, capturing)) for size in SIZES}
            bus.barrier()
            return rows

    with ThreadPoolExecutor(2) as threads:
        return next(iter(threads.map(rank, range(2))))


def _warm(bus: SlabBus) -> None:
    """Load every binary while no kernel of the other rank waits: loading may wait for the device.

    A state that says that a kernel gave up makes one leave at once.
    """
    collectives: Any = bus._device
    geometry = collectives._geometry
    state = torch.ones_like(collectives._state)
    meta = meta_of(geometry, bus.rank, torch.bfloat16, reduce=True, striped=False)
    for size in SIZES:
        x = torch.zeros(size * 256, dtype=torch.int32, device=state.device)
        kernel.exchange[(1,)](x, x, collectives._words, state, len(x), 1, 1, **meta)
    note[(1,)](torch.zeros(1, dtype=torch.int64, device=state.device), 0)
    note[(1,)](torch.zeros(4, dtype=torch.int64, device=state.device), 1)
    note[(1,)](torch.zeros(16, dtype=torch.int64, device=state.device), 2)
    torch.cuda.synchronize()
    bus.barrier()


def _once_idle(bus: SlabBus, graph: torch.cuda.CUDAGraph) -> None:
    """A first replay, of kernels that leave at once: it may have to wait until the other rank's have ended."""
    collectives: Any = bus._device
    gave_up = collectives._state[-1:]
    gave_up.fill_(1)
    graph.replay()
    torch.cuda.current_stream().synchronize()
    gave_up.fill_(0)
    torch.cuda.current_stream().synchronize()
    bus.barrier()


def _measure(bus: SlabBus, size: int, meeting: threading.Barrier, capturing: threading.Lock) -> list[float]:
    x = torch.ones(size * 512, dtype=torch.bfloat16, device="cuda")
    times = torch.zeros(2, CHAIN + 2, dtype=torch.int64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    torch.cuda.current_stream().synchronize()
    meeting.wait()
    with capturing, torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
        note[(1,)](times, 0)
        for index in range(CHAIN):
            bus.all_reduce(x)
            note[(1,)](times, index + 1)
        for index in range(CHAIN):
            note[(1,)](times, CHAIN + 2 + index)
    _once_idle(bus, graph)
    found = []
    for _ in range(REPLAYS):
        meeting.wait()
        graph.replay()
        torch.cuda.current_stream().synchronize()
        bus.check()
        noted = times.tolist()
        alone = statistics.median(b - a for a, b in zip(noted[1][:CHAIN], noted[1][1:CHAIN], strict=False))
        spans = [b - a - alone for a, b in zip(noted[0][: CHAIN + 1], noted[0][1 : CHAIN + 1], strict=False)]
        found += [span / 1e3 for span in spans[1:]]
    return found


def _free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


if __name__ == "__main__":
    main()
