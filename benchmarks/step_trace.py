"""Where a step's time goes on a GPU: ``python benchmarks/step_trace.py [--streams 1,8] [--prefill 8192]``.

Steady decode steps of a model with random weights, or the prefill of one prompt, are traced by the CUDA profiler,
graphs included. Printed are each kernel's launches, its mean time, what it adds, and how long the device did nothing.
Kernels of a chain overlap (programmatic dependent launch), so times add up to more than the step; what a launch adds is
the time from the end of all before it to its own end, and this adds up to the step. A kind is a kernel after another:
the layers' products differ by that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import click
import torch
from msgspec import Struct
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from dgpp_core.cli.synth import in_format, shortened
from dgpp_core.config.settings import EngineSettings
from dgpp_core.host.loading import load_plugins
from dgpp_core.testing.measure import prompt_of
from dgpp_core.testing.subject import Subject
from dgpp_core.testing.world import World

STEPS, WARM, CONTEXT = 8, 24, 400


class Launch(Struct, frozen=True):
    """One kernel on the device, in microseconds."""

    name: str
    start: float
    end: float


def traced(run: Callable[[], object]) -> list[Launch]:
    """The kernels of ``run``, in order of their start."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        run()
        torch.cuda.synchronize()
    events = [event for event in found.events() or () if event.device_type == DeviceType.CUDA]
    launches = [Launch(event.name, event.time_range.start, event.time_range.end) for event in events]
    return sorted(launches, key=lambda launch: launch.start)


def decode(world: World, streams: int) -> list[Launch]:
    """`STEPS` steps with ``streams`` requests past their prefill."""
    most = (WARM + STEPS + 8) * (world.engine.depth + 1)
    requests = [world.submit(prompt_of(world, CONTEXT - WARM, n), most, use_cache=False) for n in range(streams)]
    while world.scheduler.stats().active < streams:
        world.tick()
    for _ in range(WARM):
        world.tick()

    def steps() -> None:
        for _ in range(STEPS):
            world.tick()

    launches = traced(steps)
    world.tick(cancels=requests)
    world.run()
    return launches


def prefill(world: World, tokens: int) -> list[Launch]:
    """The second of two prompts of ``tokens`` tokens, to its first token."""
    launches: list[Launch] = []
    for number in range(2):
        world.submit(prompt_of(world, tokens, number), 1, use_cache=False)
        launches = traced(world.run)
    return launches


def idle(launches: list[Launch]) -> float:
    """Microseconds in which no kernel ran between the first and the last."""
    end, total = launches[0].end, 0.0
    for launch in launches[1:]:
        total += max(0.0, launch.start - end)
        end = max(end, launch.end)
    return total


def span_of(launches: list[Launch]) -> float:
    """Microseconds from the first launch's start to the last end."""
    return max(launch.end for launch in launches) - launches[0].start


def added_by(launches: list[Launch], part: str) -> float:
    """Microseconds that kernels with ``part`` in their name add: from the end of all before each to its own end."""
    end, total = launches[0].start, 0.0
    for launch in launches:
        if part in launch.name:
            total += max(0.0, launch.end - end)
        end = max(end, launch.end)
    return total


def table(launches: list[Launch], steps: int) -> str:
    """The kernels by what they add to one of ``steps`` steps."""
    kinds: dict[str, list[Launch]] = defaultdict(list)
    added: dict[str, float] = defaultdict(float)
    end, before = launches[0].start, "the step before"
    for launch in launches:
        kind = f"{launch.name[:30]:<31}after {before[:24]}"
        kinds[kind].append(launch)
        added[kind] += max(0.0, launch.end - end)
        end, before = max(end, launch.end), launch.name
    span = span_of(launches) / steps
    rows = [f"{'kernel':<62}{'a step':>8}{'µs':>8}{'adds µs':>9}{'µs a step':>11}{'share':>7}"]
    for kind, sum_added in sorted(added.items(), key=lambda pair: -pair[1]):
        times = [launch.end - launch.start for launch in kinds[kind]]
        rows.append(
            f"{kind:<62}{len(times) / steps:>8.1f}{sum(times) / len(times):>8.2f}{sum_added / len(times):>9.2f}"
            f"{sum_added / steps:>11.1f}{sum_added / steps / span:>7.1%}"
        )
    rows.append(f"a step {span:.1f} µs, of which the device was idle {idle(launches) / steps:.1f} µs")
    return "\n".join(rows)


@click.command(help=__doc__)
@click.option("--plugin", default="glm47")
@click.option("--layers", default=16)
@click.option("--format", "form", default="nvfp4")
@click.option("--streams", default="1,8")
@click.option("--prefill", "tokens", type=int, help="Trace the prefill of so many tokens instead.")
@click.option("--chunk", default=-1, help="Prompt tokens a tick; 0 is all of them.")
@click.option("--mtp-depth", default=0)
@click.option("--bf16-weights", type=click.Choice(["checkpoint", "bf12"]), default="checkpoint")
def main(
    plugin: str, layers: int, form: str, streams: str, tokens: int | None, chunk: int, mtp_depth: int, bf16_weights: str
) -> None:
    model = load_plugins(environ={}).model(plugin)
    raw = in_format(model.spec, shortened(model.spec, layers), form)[0]
    counts = [int(count) for count in streams.split(",")]
    settings = EngineSettings(
        max_concurrency=max(counts),
        kv_capacity=max(max(counts) * 1024, (tokens or 0) + 256),
        mtp=mtp_depth > 0,
        mtp_depth=max(1, mtp_depth),
        prefill_budget_tokens=chunk,
        bf16_weights="bf12" if bf16_weights == "bf12" else "checkpoint",
    )
    subject = Subject(model, model.read_config(raw), settings, torch.device("cuda"))
    world = subject.world
    if tokens is not None:
        click.echo(f"prefill of {tokens} tokens\n{table(prefill(world, tokens), 1)}")
        return
    for count in counts:
        click.echo(f"{count} streams\n{table(decode(world, count), STEPS)}\n")


if __name__ == "__main__":
    main()
