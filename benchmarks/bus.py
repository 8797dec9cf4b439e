"""Time of a sum over ranks on one host: ``python benchmarks/bus.py --world 2 [--device cpu]``.

Microseconds of one `all_reduce` of bfloat16 rows of GLM-4.7 (5,120 wide), called as it comes and, on CUDA, in a graph
of a hundred; beside it the library's own sum, which is the speed that the fixed order is paid with.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from dgpp_core.bus.distributed import DistributedBus, join

HIDDEN = 5120
ROWS = (1, 4, 16, 64, 512, 2048)
CHAIN = 100


def main() -> None:
    """Start the ranks; rank 0 prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    context = multiprocessing.get_context("spawn")
    ranks = [
        context.Process(target=measure, args=(rank, options.world, address, options.device))
        for rank in range(options.world)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    if failed := [rank for rank, process in enumerate(ranks) if process.exitcode]:
        raise SystemExit(f"rank {failed[0]} ended with status {ranks[failed[0]].exitcode}")


def measure(rank: int, world: int, address: str, device: str) -> None:
    """One rank's part of every case."""
    place = torch.device("cuda", rank) if device == "cuda" else torch.device("cpu")
    if device == "cuda":
        torch.cuda.set_device(place)
    with join(rank, world, address, device=place) as bus:
        if rank == 0:
            print(f"{world} ranks, {device}: microseconds a sum")
            print(f"{'rows':>5} {'KB':>9} {'eager':>9} {'graph':>9} {'library':>9} {'in graph':>9}")
        for rows in ROWS:
            _case(bus, torch.ones(rows, HIDDEN, dtype=torch.bfloat16, device=place))


def _case(bus: DistributedBus, x: Tensor) -> None:
    def library() -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    times: list[float] = []
    for work in (lambda: bus.all_reduce(x), library):
        times += _microseconds(bus, x.device, work)
    if bus.rank == 0:
        print(f"{len(x):>5} {x.nbytes / 1e3:>9.1f} " + " ".join(f"{value:>9.1f}" for value in times), flush=True)


def _microseconds(bus: DistributedBus, device: torch.device, work: Callable[[], Tensor]) -> list[float]:
    """Called as it comes, and in a graph; NaN for the latter on a CPU."""

    def chain() -> None:
        for _ in range(CHAIN):
            work()

    eager = _median(bus, device, chain)
    if device.type == "cpu":
        return [eager, float("nan")]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    return [eager, _median(bus, device, graph.replay)]


def _median(bus: DistributedBus, device: torch.device, chain: Callable[[], None]) -> float:
    times = []
    for _ in range(7):
        bus.barrier()
        started = time.perf_counter()
        chain()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times[2:]) / CHAIN * 1e6


if __name__ == "__main__":
    main()
