"""Damaged and random requests by the ten thousand against a front end without a model.

    python benchmarks/fuzz.py --cases 20000 --bodies 20000 --http 20000 --out FILE

``cases`` are made by schemathesis from the OpenAPI document, over all routes; ``bodies`` are valid ones with changes;
``http`` are requests with damaged or split bytes. It ends with 1 at the first answer that is not as it must be: a 5xx,
a hang, an answer that the document does not describe, a stream that an official client does not read.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dgpp_core.testing.fake_service import MARKERS, TOOL_TEMPLATE, fake_service
from dgpp_core.testing.fake_worker import FakeReply, FakeScript
from dgpp_core.testing.fuzz import StreamReaders, await_idle, fuzz_bodies, fuzz_http, tool_script
from dgpp_core.testing.openapi_cases import run_cases, runs
from dgpp_core.testing.reports import report_json
from dgpp_core.testing.services import RunningService
from dgpp_core.testing.tool_replies import dialect

SHARES = {"/v1/completions": 3, "/tokenize": 2, "/detokenize": 2}
"""How many of the cases a route gets for one that any other gets: small bodies are quickly made."""


@contextlib.contextmanager
def service(*, tools: bool) -> Iterator[RunningService]:
    """A front end over a fake engine; with ``tools`` one that has calls and grammars."""
    if tools:
        with fake_service(tool_script(), markers=(*MARKERS, *dialect("glm").markers), template=TOOL_TEMPLATE) as found:
            yield found
    else:
        with fake_service(FakeScript(replies=(FakeReply(text="Red, yellow and blue."),))) as found:
            yield found


def openapi(count: int, seed: int) -> dict[str, Any]:
    """At least ``count`` cases of all operations and modes, and their answers by status.

    There are only so many different requests to a route that takes no body, so the others make up for those.
    """
    kinds = runs()
    found: dict[str, Counter[int]] = {" ".join(kind): Counter() for kind in kinds}
    with service(tools=False) as running, StreamReaders(running.url) as readers:
        while (left := count - sum(statuses.total() for statuses in found.values())) > 0:
            whole = sum(SHARES.get(path, 1) for path, _, _ in kinds)
            for kind in kinds:
                share = -(-left * SHARES.get(kind[0], 1) // whole)
                found[" ".join(kind)] += run_cases(running.url, *kind, share, seed, readers.read)
            kinds = [kind for kind in kinds if kind[1] == "post"]
            seed += 1
        await_idle(running.url)
    return {name: _text(statuses) for name, statuses in found.items()}


def _text(statuses: Counter[int]) -> dict[str, int]:
    return {str(status): count for status, count in sorted(statuses.items())}


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("cases", "bodies", "http"):
        parser.add_argument(f"--{name}", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    report: dict[str, Any] = {}
    start = time.monotonic()
    if options.cases:
        report["cases"] = openapi(options.cases, options.seed)
        report["cases_total"] = sum(sum(statuses.values()) for statuses in report["cases"].values())
    for tools in (False, True):
        kind = "with tools" if tools else "without tools"
        with service(tools=tools) as running:
            if options.bodies:
                rng = random.Random(options.seed)
                statuses = fuzz_bodies(running.url, options.bodies // 2, rng, tools=tools)
                report[f"bodies {kind}"] = _text(statuses)
            if options.http:
                report[f"http {kind}"] = dict(
                    fuzz_http(running.url, options.http // 2, random.Random(options.seed)).most_common()
                )
    report["seconds"] = round(time.monotonic() - start)
    print(report_json(sys.argv, report, options.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
