"""A sum between two cards of one host, over shared memory and NCCL: ``python benchmarks/bus_cards.py [--output FILE]``.

A process a card. First every replay of a captured sum is compared with the fold of the host, over ``--replays`` replays
of ever other numbers. Then sums of 8, 48 and 160 KB stand in a graph between two kernels that note the time; printed
are microseconds of a sum at rank 0, less what the notes take themselves.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import socket
import statistics
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click
import msgspec
import torch
from msgspec import Struct
from shm_bus import SIZES, note, spread

from dgpp_core.bus.fold import fold
from dgpp_core.bus.forming import Terms
from dgpp_core.bus.meet import RankBus, meet
from dgpp_core.bus.transports import Transport
from dgpp_core.config.fabric import Fabric

CHAIN, REPLAYS, VARIANTS, WIDTH = 50, 100, 64, 24576


class Account(Struct, frozen=True, kw_only=True):
    """What one rank found: replays, words that were not the fold's, and the spread of a sum's time by its size."""

    rank: int
    replays: int
    wrong: int
    us: dict[str, dict[str, float]]


def numbers(rank: int) -> torch.Tensor:
    """bfloat16 ``[VARIANTS, WIDTH]`` of many magnitudes, zeros of both signs and denormals among them."""
    source = torch.Generator().manual_seed(rank)
    wide = torch.randn(VARIANTS, WIDTH, generator=source) * 10.0 ** torch.randint(
        -40, 30, (VARIANTS, WIDTH), generator=source
    )
    return torch.where(torch.rand(VARIANTS, WIDTH, generator=source) < 0.05, -0.0, wide).to(torch.bfloat16)


def compared(bus: RankBus, device: torch.device, replays: int) -> int:
    """Words that differ from the fold of the host, over all replays."""
    mine = numbers(bus.rank).to(device)
    expected = fold([numbers(rank) for rank in range(bus.world)]).view(torch.int16).to(device)
    given = mine[0].clone()
    bus.all_reduce(given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        total = bus.all_reduce(given)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for turn in range(replays):
        variant = (turn * 37) % VARIANTS
        given.copy_(mine[variant])
        graph.replay()
        wrong += (total.view(torch.int16) != expected[variant]).sum()
    torch.cuda.synchronize()
    bus.check()
    return int(wrong)


def timed(bus: RankBus, device: torch.device, size: int) -> dict[str, float]:
    """Microseconds of a sum of ``size`` KB."""
    x = torch.ones(size * 512, dtype=torch.bfloat16, device=device)
    times = torch.zeros(2, CHAIN + 2, dtype=torch.int64, device=device)
    for index in (0, 1, 4, 16):
        note[(1,)](times, index)
    bus.all_reduce(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        note[(1,)](times, 0)
        for index in range(CHAIN):
            bus.all_reduce(x)
            note[(1,)](times, index + 1)
        for index in range(CHAIN):
            note[(1,)](times, CHAIN + 2 + index)
    found: list[float] = []
    for _ in range(REPLAYS):
        bus.barrier()
        graph.replay()
        torch.cuda.synchronize()
        bus.check()
        sums, alone = times.tolist()
        notes = statistics.median(b - a for a, b in itertools.pairwise(alone[:CHAIN]))
        found += [(b - a - notes) / 1e3 for a, b in itertools.pairwise(sums[1 : CHAIN + 1])]
    return spread(found)


def rank_main(rank: int, address: str, transport: Transport, replays: int, answer: Connection) -> None:
    """One process."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    with meet(transport, Terms(rank=rank, world=2, address=address, device=device), Fabric()) as bus:
        wrong = compared(bus, device, replays)
        us = {f"{size} KB": timed(bus, device, size) for size in SIZES}
        bus.barrier()
        answer.send(Account(rank=rank, replays=replays, wrong=wrong, us=us))


def run(transport: Transport, replays: int) -> list[Account]:
    """The accounts of both ranks."""
    context = multiprocessing.get_context("spawn")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    pipes = [context.Pipe(duplex=False) for _ in range(2)]
    ranks = []
    for rank, (_, theirs) in enumerate(pipes):
        ranks.append(context.Process(target=rank_main, args=(rank, address, transport, replays, theirs), daemon=True))
        ranks[-1].start()
        theirs.close()
    accounts = [ours.recv() for ours, _ in pipes]
    for process in ranks:
        process.join()
    return accounts


@click.command(help=__doc__)
@click.option("--replays", default=10_000)
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False))
def main(replays: int, output: Path | None) -> None:
    report: dict[str, Any] = {"card": torch.cuda.get_device_name(), "torch": str(torch.__version__)}
    transports: tuple[Transport, ...] = ("shm", "nccl")
    for transport in transports:
        accounts = run(transport, replays)
        report[transport] = msgspec.to_builtins(accounts)
        wrong = sum(account.wrong for account in accounts)
        click.echo(f"{transport}: {replays} replays, {wrong} words unlike the fold")
        for size, row in accounts[0].us.items():
            click.echo(f"  {size:<8}" + "  ".join(f"{key} {value:.2f}" for key, value in row.items()))
        if output is not None:
            output.write_text(json.dumps(report, indent=2) + "\n")
        if wrong:
            raise SystemExit(1)


if __name__ == "__main__":
    main()
