"""Whether replies depend on how they were computed, at full width: ``python benchmarks/exactness.py [--json FILE]``.

Every prompt is answered alone, cold, with its prompt in one piece and nothing drafted. Then in company, in small
chunks, from the prefix cache and with drafts. What is counted are replies that differ in any token.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

import click
import torch
from msgspec import Struct, to_builtins

from dgpp_core.cli.synth import in_format, shortened
from dgpp_core.config.settings import EngineSettings
from dgpp_core.host.loading import LoadedModel, load_plugins
from dgpp_core.testing.subject import Subject

Reply = tuple[int, ...]


class Case(Struct, frozen=True):
    """One way of computing the replies; ``differ`` of ``replies`` are not those of the first way."""

    name: str
    replies: int
    differ: int
    tokens: int
    seconds: float
    prefix_hits: int


class Runner:
    """Replies of one model under several settings; an engine is built for each setting that changes it."""

    def __init__(self, model: LoadedModel, layers: int, form: str, prompts: list[list[int]], length: int) -> None:
        self.model, self.prompts, self.length = model, prompts, length
        raw = shortened(model.spec, layers) if layers else model.spec.full_config
        self.config = model.read_config(in_format(model.spec, raw, form)[0] if form else raw)
        self.expected: list[Reply] = []
        self.cases: list[Case] = []

    def engine(self, *, mtp: bool = False, mtp_depth: int = 1, prefill_budget_tokens: int = -1) -> Subject:
        """An engine with room for 16 requests."""
        settings = EngineSettings(
            max_concurrency=16, kv_capacity=64 * 1024, mtp=mtp, mtp_depth=mtp_depth,
            prefill_budget_tokens=prefill_budget_tokens,
        )  # fmt: skip
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return Subject(self.model, self.config, settings, device)

    def replies(self, subject: Subject, together: int, use_cache: bool = False) -> list[Reply]:
        """Replies to all prompts, so many at a time."""
        found: list[Reply] = []
        for first in range(0, len(self.prompts), together):
            wave = self.prompts[first : first + together]
            ids = [subject.world.submit(prompt, self.length, use_cache=use_cache) for prompt in wave]
            replies = subject.world.run()
            found += [tuple(replies[request].tokens) for request in ids]
        return found

    def case(self, name: str, subject: Subject, together: int, use_cache: bool = False) -> None:
        """Compute, compare, remember."""
        started, hits = time.perf_counter(), subject.world.scheduler.stats().cache_hits
        found = self.replies(subject, together, use_cache)
        spent, hits = time.perf_counter() - started, subject.world.scheduler.stats().cache_hits - hits
        if not self.expected:
            self.expected = found
        differ = sum(a != b for a, b in zip(found, self.expected, strict=True))
        self.cases.append(Case(name, len(found), differ, sum(map(len, found)), round(spent, 1), hits))
        click.echo(to_builtins(self.cases[-1]))


def prompts_of(vocab: int, count: int) -> list[list[int]]:
    """Random prompts of 1 to 500 tokens."""
    source = torch.Generator().manual_seed(17)
    sizes: Sequence[int] = torch.randint(1, 500, (count,), generator=source).tolist()
    return [torch.randint(vocab, (size,), generator=source).tolist() for size in sizes]


@click.command(help=__doc__)
@click.option("--plugin", default="glm47")
@click.option("--layers", default=16)
@click.option("--format", "form", default="")
@click.option("--prompts", default=64)
@click.option("--tokens", default=256)
@click.option("--json", "path", type=click.Path(path_type=Path))
def main(plugin: str, layers: int, form: str, prompts: int, tokens: int, path: Path | None) -> None:
    model = load_plugins(environ={}).model(plugin)
    vocab = int(model.spec.full_config["vocab_size"])
    runner = Runner(model, layers, form, prompts_of(vocab, prompts), tokens)
    subject = runner.engine()
    runner.case("alone", subject, 1)
    for together in (2, 4, 8, 16):
        runner.case(f"{together} together", subject, together)
    runner.case("cold, kept for reuse", subject, 16, use_cache=True)
    runner.case("restored", subject, 16, use_cache=True)
    del subject
    torch.cuda.empty_cache()
    subject = runner.engine(prefill_budget_tokens=96)
    runner.case("chunks of 96, 8 together", subject, 8)
    for depth in (1, 3):
        del subject
        torch.cuda.empty_cache()
        subject = runner.engine(mtp=True, mtp_depth=depth)
        runner.case(f"depth {depth}, 8 together", subject, 8)
    result = {
        "model": plugin, "layers": layers, "prompts": prompts, "tokens": tokens,
        "card": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "cases": [to_builtins(case) for case in runner.cases],
    }  # fmt: skip
    if path:
        path.write_text(json.dumps(result, indent=2) + "\n")
    raise SystemExit(any(case.differ for case in runner.cases))


if __name__ == "__main__":
    main()
