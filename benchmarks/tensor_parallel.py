"""A model divided among the GPUs of a host, a process each: ``python benchmarks/tensor_parallel.py --world 2``.

Every rank plans and computes by itself; its collectives (``--bus``: shared memory, or NCCL's all-gather and then a fold
in order of rank) are captured in the decode graphs. Measured are the step at several streams beside each rank's own
floor, the host's part of it, what collectives add to it (traced), and whether the ranks' replies are equal to the bit.
Weights are random.
"""

from __future__ import annotations

import gc
import hashlib
import json
import multiprocessing
import socket
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click
import msgspec
import torch
from msgspec import Struct, structs
from step_trace import STEPS, added_by, decode, span_of

from dgpp_core.api import Bus
from dgpp_core.bus.forming import Terms
from dgpp_core.bus.meet import meet
from dgpp_core.bus.transports import Transport, choose
from dgpp_core.cli.synth import in_format, shortened
from dgpp_core.config.fabric import WANTED, Fabric, Wanted
from dgpp_core.config.settings import EngineSettings
from dgpp_core.host.loading import load_plugins
from dgpp_core.testing.measure import Decode, measure_decode, prompt_of, read_bandwidth
from dgpp_core.testing.subject import Memory, Subject

CONTEXT, LONGEST = 400, 500
KERNELS = {"nccl": "nccl", "shm": "exchange"}
"""Part of the name of a transport's kernels."""


class Options(Struct, frozen=True, kw_only=True):
    """What every rank is told."""

    plugin: str
    layers: int
    form: str
    device: str
    bus: Transport
    streams: tuple[int, ...]
    depths: tuple[int, ...]
    prompts: int
    length: int


class Step(Struct, frozen=True, kw_only=True):
    """One rank's step; ``collectives`` is the share that collectives add to a traced one, None without a GPU."""

    decode: Decode
    collectives: float | None


class Account(Struct, frozen=True, kw_only=True):
    """What one rank found at one draft depth; ``replies`` is a digest of all tokens."""

    rank: int
    depth: int
    steps: dict[str, Step]
    replies: str
    tokens: int
    seconds: float
    memory: Memory | None


def subject_of(options: Options, depth: int, bus: Bus, device: torch.device) -> Subject:
    """The model of this rank, with random weights."""
    model = load_plugins(environ={}).model(options.plugin)
    raw = shortened(model.spec, options.layers) if options.layers else model.spec.tiny_config
    config = model.read_config(in_format(model.spec, raw, options.form)[0])
    most = max(options.streams)
    settings = EngineSettings(
        max_concurrency=most, kv_capacity=most * 1280, mtp=depth > 0, mtp_depth=max(1, depth), prefix_cache_gib=0.0
    )
    return Subject(model, config, settings, device, bus=bus)


def account(options: Options, depth: int, bus: Bus, device: torch.device) -> Account:
    """Measure, then answer prompts of 1 to 500 tokens, all streams at once."""
    subject = subject_of(options, depth, bus, device)
    world, steps = subject.world, {}
    bandwidth = read_bandwidth(time.perf_counter, device)
    for streams in options.streams:
        found = measure_decode(
            world, time.perf_counter, streams=streams, context=CONTEXT, steps=32, runs=3, bandwidth=bandwidth
        )
        share = None
        if device.type == "cuda":
            launches = decode(world, streams)
            share = added_by(launches, KERNELS[options.bus]) / span_of(launches)
        steps[str(streams)] = Step(decode=found, collectives=share)
    started, digest, tokens = time.perf_counter(), hashlib.sha256(), 0
    for first in range(0, options.prompts, max(options.streams)):
        wave = range(first, min(options.prompts, first + max(options.streams)))
        ids = [world.submit(prompt_of(world, 1 + (97 * n) % LONGEST, n), options.length) for n in wave]
        replies = world.run()
        for request in ids:
            tokens += len(replies[request].tokens)
            digest.update(json.dumps(replies[request].tokens).encode())
    seconds = time.perf_counter() - started
    return Account(
        rank=bus.rank, depth=depth, steps=steps, replies=digest.hexdigest(), tokens=tokens, seconds=seconds,
        memory=subject.memory(),
    )  # fmt: skip


def rank_main(rank: int, world: int, address: str, options: Options, answer: Connection) -> None:
    """One process."""
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    with meet(options.bus, Terms(rank=rank, world=world, address=address, device=device), Fabric()) as bus:
        for depth in options.depths:
            answer.send(account(options, depth, bus, device))
            gc.collect()
            if options.device == "cuda":
                torch.cuda.empty_cache()


def run(world: int, options: Options) -> Iterator[list[Account]]:
    """The accounts of every rank, a list for each depth as it is done; ranks that fail end the run."""
    context = multiprocessing.get_context("spawn")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    pipes = [context.Pipe(duplex=False) for _ in range(world)]
    ranks = [
        context.Process(target=rank_main, args=(rank, world, address, options, theirs), daemon=True)
        for rank, (_, theirs) in enumerate(pipes)
    ]
    for process, (_, theirs) in zip(ranks, pipes, strict=True):
        process.start()
        theirs.close()
    for _ in options.depths:
        yield [ours.recv() for ours, _ in pipes]
    for process in ranks:
        process.join()


def line(accounts: list[Account], streams: str) -> str:
    """One row of the table: the slowest rank's step.

    The share of collectives is that of the rank with the least: the others' kernels wait for it, be it only because
    their trace began sooner.
    """
    steps = [account.steps[streams] for account in accounts]
    slow = max(steps, key=lambda step: step.decode.ms_per_step).decode
    shares = [step.collectives for step in steps if step.collectives is not None]
    told = f"{min(shares):9.1%}" if shares else f"{'-':>9}"
    host = "-" if slow.host_ms is None else f"{slow.host_ms:.3f}"
    floor = f"{slow.floor_ms:10.3f}{slow.share:8.0%}"
    return f"{accounts[0].depth:>6}{streams:>9}{slow.ms_per_step:>12.3f}{floor}{told}{host:>9}"


@click.command(help=__doc__)
@click.option("--world", default=2)
@click.option("--plugin", default="glm47")
@click.option("--layers", default=16, help="0 takes the model's tiny config.")
@click.option("--format", "form", default="nvfp4")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cuda")
@click.option("--bus", type=click.Choice(WANTED), default="auto")
@click.option("--streams", default="1,4,8,16")
@click.option("--depths", default="0,1", help="Draft depths.")
@click.option("--prompts", default=64)
@click.option("--length", default=256, help="Tokens of a reply.")
@click.option("--json", "target", type=click.Path(path_type=Path, dir_okay=False))
def main(
    world: int, plugin: str, layers: int, form: str, device: str, bus: Wanted, streams: str, depths: str, prompts: int,
    length: int, target: Path | None,
) -> None:  # fmt: skip
    transport = choose(Fabric(bus=bus), world=world, here=world, cuda=device == "cuda")
    options = Options(
        plugin=plugin, layers=layers, form=form, device=device, bus=transport,
        streams=tuple(map(int, streams.split(","))), depths=tuple(map(int, depths.split(","))), prompts=prompts,
        length=length,
    )  # fmt: skip
    accounts = []
    click.echo(f"{'drafts':>6}{'streams':>9}{'ms a step':>12}{'floor ms':>10}{'share':>8}{'in bus':>9}{'host ms':>9}")
    for found in run(world, options):
        accounts.append(found)
        for count in found[0].steps:
            click.echo(line(found, count))
        equal = len({each.replies for each in found}) == 1
        told = f"{found[0].tokens} tokens of {prompts} prompts, ranks {'equal' if equal else 'DIFFER'}"
        click.echo(f"depth {found[0].depth}: {told}; {found[0].seconds:.1f} s, traced steps: {STEPS}")
        if target is not None:
            versions = {
                "torch": str(torch.__version__),
                "card": torch.cuda.get_device_name() if device == "cuda" else "cpu",
            }
            report: Any = {"world": world, "options": structs.asdict(options), **versions, "accounts": accounts}
            target.write_text(json.dumps(msgspec.to_builtins(report), indent=2) + "\n")


if __name__ == "__main__":
    main()
