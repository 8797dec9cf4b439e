"""``dgpp bench``: what a step costs here, beside what it must cost."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from dgpp_core.cli.client import Client
from dgpp_core.cli.command import GuardedGroup, json_option, print_json
from dgpp_core.cli.serving import choose, find_checkpoint, plan_of
from dgpp_core.host.loading import load_plugins

if TYPE_CHECKING:
    from dgpp_core.testing.world import World

EPILOG = """\b
Examples:
  dgpp bench decode --plugin smollm2
  dgpp bench decode --plugin smollm2 --streams 1 --streams 8 --json
  dgpp bench prefill --plugin smollm2 --tokens 2000
  dgpp bench serve --url http://127.0.0.1:18080 --streams 8
"""

plugin_option = click.option("--plugin", required=True, help="The model to measure.")
checkpoint_option = click.option("--checkpoint", help="A folder or repository with its weights.")
device_option = click.option("--device", default="auto", show_default=True, help="auto, cpu or cuda.")


@click.group(cls=GuardedGroup, epilog=EPILOG)
def command() -> None:
    """Measure decode, prefill or a running service."""


def _world(plugin: str, checkpoint: str | None, device: str, context: int, streams: int) -> tuple[World, int, str]:
    """A world to measure, the weight bytes that a step reads, and the device's name."""
    from dgpp_core.config.settings import EngineSettings
    from dgpp_core.engine.factory import pick_device
    from dgpp_core.testing.world import World

    chosen = choose(load_plugins(environ=os.environ), os.environ, plugin=plugin, config=None, checkpoint=checkpoint)
    folder: Path = find_checkpoint(chosen, os.environ, offline=False)
    settings = EngineSettings(max_concurrency=streams, kv_capacity=streams * (context + 128))
    where = pick_device(device)
    # An embedding is looked up row by row; every other weight is read once a step.
    lines = plan_of(chosen, available=0).lines
    read = sum(x.bytes for x in lines if x.name.startswith("weights") and not x.name.endswith("embedding"))
    return World.from_checkpoint(chosen.model, folder, settings, device=str(where)), read, str(where)


def _facts(model: str, device: str) -> dict[str, Any]:
    import torch

    from dgpp_core import __version__

    card = torch.cuda.get_device_name() if device.startswith("cuda") else f"{torch.get_num_threads()} CPU threads"
    return {"model": model, "card": card, "versions": {"dgpp": __version__, "torch": str(torch.__version__)}}


@command.command(epilog=EPILOG)
@plugin_option
@checkpoint_option
@device_option
@click.option("--streams", multiple=True, type=click.IntRange(1), default=(1, 4, 8), show_default=True)
@click.option("--prompt", default=128, type=click.IntRange(1), show_default=True, help="Prompt tokens a stream.")
@click.option("--steps", default=48, type=click.IntRange(1), show_default=True)
@json_option
def decode(
    plugin: str, checkpoint: str | None, device: str, streams: tuple[int, ...], prompt: int, steps: int, as_json: bool
) -> None:
    """Milliseconds a decode step, with the bytes it must read and the floor they set."""
    from dgpp_core.testing.measure import measure_decode, read_bandwidth

    world, weights, where = _world(plugin, checkpoint, device, prompt + steps, max(streams))
    bandwidth = read_bandwidth(time.perf_counter, world.engine.device)
    rows = [
        measure_decode(
            world, time.perf_counter, streams=n, prompt=prompt, steps=steps, weight_bytes=weights, bandwidth=bandwidth
        )
        for n in streams
    ]
    report = _facts(plugin, where) | {
        "read_bandwidth_gb_s": bandwidth / 1e9,
        "decode": {str(row.streams): msgspec.to_builtins(row) for row in rows},
    }
    _print(report, as_json, [
        f"{row.streams:>3} stream(s)  {row.ms_per_step:8.2f} ms a step  {row.tokens_per_second:8.1f} tokens/s  "
        f"{row.bytes / 1e6:8.1f} MB  floor {row.floor_ms:6.2f} ms, {row.share:4.0%} of the step" for row in rows
    ])  # fmt: skip


@command.command(epilog=EPILOG)
@plugin_option
@checkpoint_option
@device_option
@click.option("--tokens", default=2000, type=click.IntRange(2), show_default=True, help="Prompt length.")
@json_option
def prefill(plugin: str, checkpoint: str | None, device: str, tokens: int, as_json: bool) -> None:
    """Time to the first token of a prompt, cold and with its prefix cached."""
    from dgpp_core.testing.measure import measure_prefill

    world, _, where = _world(plugin, checkpoint, device, tokens, 2)
    world.reply([3] * 64, 2)
    vocab = world.engine.vocab_size
    result = measure_prefill(world, time.perf_counter, [(11 + 17 * i * i) % vocab for i in range(tokens)])
    ratio = result.cached_ms / result.cold_ms
    report = _facts(plugin, where) | {"prefill": {str(tokens): msgspec.to_builtins(result) | {"ratio": ratio}}}
    cached = f"with {result.cached_tokens} cached {result.cached_ms:.1f} ms"
    line = f"{tokens} tokens  cold {result.cold_ms:.1f} ms  {cached}  {ratio:.1%}"
    _print(report, as_json, [line])


@command.command(epilog=EPILOG)
@click.option("--url", default="http://127.0.0.1:18080", show_default=True, help="The running service.")
@click.option("--streams", default=8, type=click.IntRange(1), show_default=True)
@click.option("--max-tokens", default=64, type=click.IntRange(1), show_default=True)
@json_option
def serve(url: str, streams: int, max_tokens: int, as_json: bool) -> None:
    """Stream replies from a running service, all at once: chunks a second and time to the first."""
    client = Client(url)
    model = client.model()

    def one(number: int) -> tuple[float, int]:
        """Seconds to the first chunk, and how many came."""
        prompt = {"role": "user", "content": f"Count upwards from {number}."}
        start, first, chunks = time.perf_counter(), 0.0, 0
        for _ in client.stream({"model": model, "messages": [prompt], "max_tokens": max_tokens, "ignore_eos": True}):
            first = first or time.perf_counter() - start
            chunks += 1
        return first, chunks

    start = time.perf_counter()
    with ThreadPoolExecutor(streams) as pool:
        results = list(pool.map(one, range(streams)))
    seconds, chunks = time.perf_counter() - start, sum(count for _, count in results)
    first = statistics.median(first for first, _ in results) * 1e3
    figures = {"streams": streams, "chunks": chunks, "chunks_per_second": chunks / seconds, "first_ms": first}
    line = f"{streams} streams  {chunks} chunks  {chunks / seconds:.0f} chunks/s  first after {first:.0f} ms (median)"
    _print({"url": url, "serve": figures}, as_json, [line])


def _print(report: Mapping[str, Any], as_json: bool, lines: list[str]) -> None:
    if as_json:
        print_json(report)
        return
    for line in lines:
        click.echo(line)
