"""``dgpp bench serve`` and ``boot``: a service as its clients and its operator see it."""

from __future__ import annotations

import contextlib
import os
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

import click

from dgpp_core.api.errors import ConfigError, EngineError
from dgpp_core.cli.client import Client
from dgpp_core.cli.command import GuardedCommand, json_option, print_json
from dgpp_core.cli.options import api_key_option
from dgpp_core.host.child import module_command

EPILOG = """\b
Examples:
  dgpp bench serve --url http://127.0.0.1:18080 --streams 8
  dgpp bench serve --fake --streams 32 --max-tokens 200 --runs 5
  dgpp bench boot --plugin smollm2 --runs 2
  dgpp bench boot --plugin smollm2 -- --kv-capacity 4096
"""
_READY = "READY"


@click.command(cls=GuardedCommand, epilog=EPILOG)
@click.option("--url", default="http://127.0.0.1:18080", show_default=True, help="The running service.")
@click.option("--fake", is_flag=True, help="A service of its own, over an engine without a model.")
@click.option("--step-ms", default=0.0, type=click.FloatRange(0), help="With --fake: time of the engine's steps.")
@click.option("--streams", default=8, type=click.IntRange(1), show_default=True)
@click.option("--max-tokens", default=64, type=click.IntRange(1), show_default=True)
@click.option("--runs", default=1, type=click.IntRange(1), show_default=True, help="Times it is measured.")
@api_key_option
@json_option
def serve(
    url: str, fake: bool, step_ms: float, streams: int, max_tokens: int, runs: int, api_key: str, as_json: bool
) -> None:
    """Stream replies from a running service, all at once: chunks a second and time to the first.

    With --fake a token costs the engine next to nothing: what is measured is the service itself.
    """
    if step_ms and not fake:
        raise ConfigError("a real engine's steps take the time they take", where="--step-ms", hint="add --fake")
    with _fake(streams, max_tokens, step_ms) if fake else contextlib.nullcontext(url) as base:
        model = Client(base, key=api_key).model()
        figures = [_measure(base, model, streams, max_tokens, api_key) for _ in range(runs)]
    best = max(figures, key=lambda run: run["chunks_per_second"])
    report = {"url": "fake" if fake else url, "load_average": os.getloadavg()[0], "serve": best, "runs": figures}
    lines = [
        f"{streams} streams  {run['chunks']} chunks in {run['writes']} writes  {run['chunks_per_second']:.0f} chunks/s"
        f"  first after {run['first_ms']:.0f} ms (median)"
        for run in figures
    ]
    _print(report, as_json, lines)


@contextlib.contextmanager
def _fake(streams: int, tokens: int, step_ms: float) -> Iterator[str]:
    """The address of a service whose engine gives all streams one token a step."""
    from dgpp_core.testing.fake_service import fake_service
    from dgpp_core.testing.fake_worker import FakeReply, FakeScript

    reply = FakeReply(text=" yellow" * tokens)
    script = FakeScript(replies=(reply,), slots=streams, step_ms=step_ms, context_tokens=tokens + 256)
    with fake_service(script, max_connections=streams + 8) as service:
        yield service.url


def _measure(url: str, model: str, streams: int, max_tokens: int, key: str) -> dict[str, Any]:
    """Figures of one run."""
    from dgpp_core.testing.streams import read_streams

    prompts = [f"Count upwards from {number}." for number in range(streams)]
    common = {"model": model, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    bodies = [common | {"messages": [{"role": "user", "content": prompt}]} for prompt in prompts]
    path = urlsplit(url).path.rstrip("/").removesuffix("/v1") + "/v1/chat/completions"
    found = read_streams(url, path, bodies, time.perf_counter, key=key)
    return {
        "streams": streams,
        "chunks": found.chunks,
        "writes": found.reads,
        "seconds": found.seconds,
        "chunks_per_second": found.chunks / found.seconds,
        "first_ms": statistics.median(stream.first_s for stream in found.streams) * 1e3,
    }


@click.command(cls=GuardedCommand, epilog=EPILOG)
@click.option("--plugin", required=True, help="The model to start.")
@click.option("--checkpoint", help="A folder or repository with its weights.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu or cuda.")
@click.argument("serve_options", nargs=-1, type=click.UNPROCESSED)
@click.option("--runs", default=1, type=click.IntRange(1), show_default=True, help="Starts; the last one counts.")
@json_option
def boot(
    plugin: str, checkpoint: str | None, device: str, serve_options: tuple[str, ...], runs: int, as_json: bool
) -> None:
    """Seconds from the start of `dgpp serve` to READY. The first start may still fill caches.

    Options of `dgpp serve` may follow after --.
    """
    line = module_command("dgpp_core.cli", "serve", "--plugin", plugin, "--device", device)
    if checkpoint is not None:
        line += ["--checkpoint", checkpoint]
    with socket.create_server(("127.0.0.1", 0)) as probe:
        line += ["--port", str(probe.getsockname()[1]), *serve_options]
    seconds = [_boot(line) for _ in range(runs)]
    report = {"model": plugin, "boot_s": seconds[-1], "boots_s": seconds}
    _print(report, as_json, [f"ready after {took:.1f} s" for took in seconds])


def _boot(line: list[str]) -> float:
    """Seconds until a service says where it listens; it is ended then."""
    start = time.perf_counter()
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            assert process.stdout is not None
            while (said := process.stdout.readline()) and _READY not in said:
                pass
            took = time.perf_counter() - start
        finally:
            process.terminate()
            process.wait()
        if not said:
            log.seek(0)
            raise EngineError("the service ended before it was ready", found=log.read()[-2000:])
    return took


def _print(report: Mapping[str, Any], as_json: bool, lines: list[str]) -> None:
    if as_json:
        print_json(report)
        return
    for line in lines:
        click.echo(line)
