"""What holding replies to schemas costs those that are held, and those that run beside them.

    python benchmarks/grammar_cost.py --plugin smollm2 --out FILE

``held`` decodes eight streams in each of two engines of one model, free in the one and held in the other, and takes a
step of either by turns: what else runs on the machine meets both alike. The figure is the median of the pairs' ratios
(goal: at most 1.03), of time that passed and of work that all threads did; the second counts where others use the
machine. ``beside`` asks a service: the gaps between the chunks of one plain stream while four others run, free or each
with a schema of its own that nobody has sent before (goal: median and 95th percentile at most 2 times those beside free
ones).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import openai
import torch

from dgpp_core.cli.serving import choose, find_checkpoint
from dgpp_core.config.settings import EngineSettings
from dgpp_core.engine.engine import Engine
from dgpp_core.host.loading import load_plugins
from dgpp_core.scheduler.sizing import limits_from
from dgpp_core.testing.reports import report_json
from dgpp_core.testing.services import serve_command, started
from dgpp_core.testing.world import World
from dgpp_core.text.grammar import sources
from dgpp_core.text.grammar.spec import Grammar
from dgpp_core.text.grammar.vocabulary import Vocabulary
from dgpp_core.text.stack import load_text

STREAMS, STEPS, WARM, PROMPT = 8, 24, 6, 24


def schema(number: int) -> dict[str, Any]:
    """A list that is long enough to be written for as long as it is measured; ``number`` makes it a new one."""
    person = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "age": {"type": "integer", "minimum": 0, "maximum": 200 + number},
            "mail": {"type": "string", "format": "email"},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    return {"type": "array", "items": person, "minItems": 100}


def held(plugin: str, folder: Path, rounds: int) -> dict[str, Any]:
    """Milliseconds a step of eight streams, free and held, and the ratio of the pairs."""
    model = load_plugins(environ=os.environ).model(plugin)
    settings = EngineSettings(max_concurrency=STREAMS, kv_capacity=STREAMS * 256, prefix_cache_gib=0.0)
    first = World.from_checkpoint(model, folder, settings, lag=1)
    worlds = {"free": first, "held": _beside(first, settings)}
    text = load_text(folder, None, config_eos=())
    end = text.defaults.eos_ids[0]
    vocabulary = Vocabulary.of(text.tokenizer, worlds["held"].engine.vocab_size, end)
    for world in worlds.values():
        world.engine.offer_grammars(vocabulary)
    grammar = Grammar(source=sources.json_schema(schema(0)), ends=(end,))
    vocabulary.parser(grammar.source)
    wall: dict[str, list[float]] = {"free": [], "held": []}
    work: dict[str, list[float]] = {"free": [], "held": []}
    for number in range(rounds):
        requests = {"free": _begin(worlds["free"], None, number), "held": _begin(worlds["held"], grammar, number)}
        for step in range(STEPS):
            for kind in ("free", "held") if step % 2 else ("held", "free"):
                started, worked = time.perf_counter(), time.process_time()
                worlds[kind].tick()
                wall[kind].append((time.perf_counter() - started) * 1e3)
                work[kind].append((time.process_time() - worked) * 1e3)
        for kind, world in worlds.items():
            ended = [request for request in requests[kind] if world.replies[request].reason]
            assert not ended, "a stream ended while it was measured"
            world.tick(cancels=requests[kind])
            world.run()
    return {
        "streams": STREAMS,
        "threads": torch.get_num_threads(),
        "pairs": len(wall["free"]),
        "step_ms": {kind: statistics.median(times) for kind, times in wall.items()},
        "step_cpu_ms": {kind: statistics.median(times) for kind, times in work.items()},
        "ratio": _ratio(wall),
        "cpu_ratio": _ratio(work),
    }


def _beside(world: World, settings: EngineSettings) -> World:
    """Another engine with the same weights: how they lie in memory would tell two copies apart."""
    one = world.engine
    engine = Engine(
        one.model, None, one.state.groups, one.geometry, vocab_size=one.vocab_size, depth=0, device=one.device
    )
    return World(engine, limits_from(one.geometry, settings, one.needs_snapshot), lag=1)


def _ratio(times: dict[str, list[float]]) -> dict[str, float]:
    """The median over the pairs of held over free, and between which its 95 % confidence interval lies."""
    ratios = sorted(one / other for one, other in zip(times["held"], times["free"], strict=True))
    count = len(ratios)
    reach = 0.98 * count**0.5  # ranks of a median's interval: binomial, count / 2 +- 1.96 * sqrt(count) / 2
    low, high = max(0, int(count / 2 - reach)), min(count - 1, int(count / 2 + reach))
    return {"median": statistics.median(ratios), "low": ratios[low], "high": ratios[high]}


def _begin(world: World, grammar: Grammar | None, number: int) -> list[int]:
    """Eight streams that have written a few tokens."""
    starts = [101 * (number * STREAMS + row) for row in range(STREAMS)]
    prompts = [[(7 + 31 * at + start) % 40_000 for at in range(PROMPT)] for start in starts]
    requests = [world.submit(prompt, PROMPT + STEPS + 40, use_cache=False, grammar=grammar) for prompt in prompts]
    while not all(world.replies[request].tokens for request in requests):
        world.tick()
    for _ in range(WARM):
        world.tick()
    return requests


async def beside(url: str, rounds: int) -> dict[str, Any]:
    """Gaps of a plain stream in milliseconds, beside four free streams and beside four with schemas."""
    client = openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=600)
    model = (await client.models.list()).data[0].id
    gaps: dict[str, list[float]] = {"free": [], "held": []}
    for number in range(rounds):
        for kind in ("free", "held") if number % 2 else ("held", "free"):
            gaps[kind] += await _gaps(client, model, kind, number)
    quantiles = {kind: [float(value) for value in np.quantile(found, [0.5, 0.95, 1.0])] for kind, found in gaps.items()}
    ratios = [one / other for one, other in zip(quantiles["held"], quantiles["free"], strict=True)]
    return {
        "gaps_ms": quantiles,
        "ratio": dict(zip(("p50", "p95", "max"), ratios, strict=True)),
        "gaps": len(gaps["held"]),
    }


async def _gaps(client: openai.AsyncOpenAI, model: str, kind: str, number: int) -> list[float]:
    plain = asyncio.ensure_future(_arrivals(client, model, "Tell a long story.", 70, None))
    await asyncio.sleep(0.3)
    others = [
        _arrivals(client, model, f"List {at} people.", 40, schema(1 + 4 * number + at) if kind == "held" else None)
        for at in range(4)
    ]
    await asyncio.gather(*others)
    times = await plain
    return [(after - before) * 1e3 for before, after in itertools.pairwise(times[1:])]


async def _arrivals(
    client: openai.AsyncOpenAI, model: str, ask: str, tokens: int, form: dict[str, Any] | None
) -> list[float]:
    """When each chunk came."""
    more: Any = {}
    if form is not None:
        more["response_format"] = {
            "type": "json_schema", "json_schema": {"name": "people", "strict": True, "schema": form},
        }  # fmt: skip
    stream = await client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": ask}], max_tokens=tokens, stream=True, **more,
        extra_body={"ignore_eos": form is None, "prefix_cache": False},
    )  # fmt: skip
    return [time.perf_counter() async for _ in stream]


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plugin", default="smollm2")
    parser.add_argument("--checkpoint")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--beside-rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    host = load_plugins(environ=os.environ)
    chosen = choose(host, os.environ, plugin=options.plugin, config=None, checkpoint=options.checkpoint)
    folder = find_checkpoint(chosen, os.environ, offline=False)
    report: dict[str, Any] = {}
    report["held"] = held(options.plugin, folder, options.rounds)
    with started(serve_command(options.plugin, "--checkpoint", str(folder))) as service:
        report["beside"] = asyncio.run(beside(service.url, options.beside_rounds))
    print(report_json(sys.argv, report, options.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
