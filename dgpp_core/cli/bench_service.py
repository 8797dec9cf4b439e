"""``dgpp bench serve`` and ``boot``: a service as its clients and its operator see it."""

from __future__ import annotations

import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import click

from dgpp_core.api.errors import EngineError
from dgpp_core.cli.client import Client
from dgpp_core.cli.command import GuardedCommand, json_option, print_json
from dgpp_core.cli.options import api_key_option

EPILOG = """\b
Examples:
  dgpp bench serve --url http://127.0.0.1:18080 --streams 8
  dgpp bench boot --plugin smollm2 --runs 2
  dgpp bench boot --plugin smollm2 -- --kv-capacity 4096
"""
_READY = "READY"


@click.command(cls=GuardedCommand, epilog=EPILOG)
@click.option("--url", default="http://127.0.0.1:18080", show_default=True, help="The running service.")
@click.option("--streams", default=8, type=click.IntRange(1), show_default=True)
@click.option("--max-tokens", default=64, type=click.IntRange(1), show_default=True)
@api_key_option
@json_option
def serve(url: str, streams: int, max_tokens: int, api_key: str, as_json: bool) -> None:
    """Stream replies from a running service, all at once: chunks a second and time to the first."""
    client = Client(url, key=api_key)
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
    line = [sys.executable, "-m", "dgpp_core.cli", "serve", "--plugin", plugin, "--device", device]
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
