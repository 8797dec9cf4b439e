"""Many kinds of requests for a long time, of which nearly a third are left by their clients.

    python benchmarks/soak.py --minutes 20 --plugin smollm2 --out FILE
    python benchmarks/soak.py --minutes 3 --tiny

It starts a service of its own, prints a report as JSON, and ends with 1 if a request failed, a counter is not back to
zero, or memory grew by more than --growth MiB a minute over the second half. ``--tiny`` serves a tiny model with random
weights that calls tools.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
import time
from pathlib import Path

import httpx
import msgspec

from dgpp_core.testing.reports import report_json
from dgpp_core.testing.services import RunningService, serve_command, started
from dgpp_core.testing.soak import Report, Soak
from dgpp_core.testing.tiny_service import tiny_service


def service_of(options: argparse.Namespace) -> contextlib.AbstractContextManager[RunningService]:
    """What is to be asked."""
    size = ("--kv-capacity", str(options.kv_capacity), "--max-concurrency", "8")
    return tiny_service("glm47", *size) if options.tiny else started(serve_command(options.plugin, *size))


async def soak(service: RunningService, options: argparse.Namespace) -> Report:
    """Run it."""
    model = httpx.get(service.url + "/v1/models").json()["data"][0]
    run = Soak(
        service,
        model["id"],
        time.monotonic,
        random.Random(options.seed),
        tools=model["tools"]["available"],
        prompt_words=options.prompt_words,
    )
    return await run.run(options.minutes * 60, options.clients)


def main() -> int:
    """Run, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--plugin", default="smollm2")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--prompt-words", type=int, default=600)
    parser.add_argument("--kv-capacity", type=int, default=16384)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--growth", type=float, default=2.0, help="MiB a minute that are noise")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with service_of(options) as service:
        report = asyncio.run(soak(service, options))
    print(report_json(sys.argv, msgspec.to_builtins(report), options.out))
    bad = report.errors or any(report.counters.values()) or report.growth_mib_per_minute > options.growth
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
