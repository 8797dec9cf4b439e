"""The table of docs/deployments.md: ``python docs/deployments.py`` plans every template of deploy/ and rewrites it.

A test plans the same and compares.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import msgspec

from dgpp_core.api import PlanError
from dgpp_core.cli.serving import choose, plan_of
from dgpp_core.engine.plan import Plan
from dgpp_core.host.loading import PluginHost, load_plugins

PAGE = Path(__file__).parent / "deployments.md"
DEPLOY = Path(__file__).parents[1] / "deploy"
SPARK_BYTES = 116 << 30
"""What a DGX Spark with 128 GB has free once its system runs: 115 to 117 GiB."""

_TABLE = re.compile(r"(<!-- planned -->\n).*?(<!-- end -->)", re.DOTALL)


class Planned(msgspec.Struct, frozen=True):
    """A template and its plan, or the reason why there is none."""

    name: str
    world: int
    slots: int
    tokens: int
    plan: Plan | None
    refusal: str = ""

    @property
    def verdict(self) -> str:
        """Whether it can be served, and what is in the way."""
        if self.plan is None:
            return f"refused: {self.refusal}"
        if self.plan.fits:
            return "fits"
        if self.plan.largest_kv_capacity:
            return f"does not fit; {self.plan.largest_kv_capacity} tokens would"
        largest = sorted(self.plan.lines, key=lambda line: -line.bytes)[:2]
        return "does not fit: " + ", ".join(f"{line.name} {_gib(line.bytes)} GiB" for line in largest)


def templates() -> list[Path]:
    """All of them, by name."""
    return sorted(DEPLOY.glob("*.example.json"))


def planned(file: Path, host: PluginHost, world: int | None = None) -> Planned:
    """The plan of a template on Sparks; ``world``: other ranks than it names."""
    chosen = choose(host, {}, plugin=None, config=file, checkpoint=None, anywhere=True, world=world, device="cuda")
    engine, ranks = chosen.resolved.engine, chosen.resolved.world
    name = file.name.removeprefix("cluster_").removesuffix(".example.json")
    try:
        plan = plan_of(chosen, SPARK_BYTES)
    except PlanError as error:
        return Planned(name, ranks, engine.max_concurrency, engine.kv_capacity, None, error.what)
    return Planned(name, ranks, engine.max_concurrency, engine.kv_capacity, plan)


def table(rows: Iterable[Planned]) -> str:
    """The page's table."""
    lines = [
        "| template | ranks | requests | tokens in the pool | weights, GiB | state, GiB | in all, GiB | plan |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        sizes = ("-",) * 3 if row.plan is None else _sizes(row.plan)
        cells = (f"`{row.name}`", row.world, row.slots, row.tokens, *sizes, row.verdict)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def page(text: str, rows: Iterable[Planned]) -> str:
    """``text`` with its table made new."""
    return _TABLE.sub(lambda match: match[1] + table(rows) + match[2], text)


def _sizes(plan: Plan) -> tuple[str, ...]:
    weights = sum(line.bytes for line in plan.lines if line.name.startswith("weights"))
    state = sum(line.bytes for line in plan.lines if line.name.startswith(("state", "prefix snapshots")))
    return _gib(weights), _gib(state), _gib(plan.total)


def _gib(count: int) -> str:
    return f"{count / 2**30:.0f}"


if __name__ == "__main__":
    plugins = load_plugins(environ={})
    made = [planned(file, plugins) for file in templates()]
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), made), encoding="utf-8")
