"""Where a decode step's time goes on a GPU: ``python benchmarks/step_trace.py [--streams 1,8] [--bf16-weights bf12]``.

Steady steps of a model with random weights are traced by the CUDA profiler, graphs included. Printed are each kernel's
launches a step, its mean time, its share, and how long the device did nothing. Kernels of a chain overlap (programmatic
dependent launch), so times may add up to more than the step.
"""

from __future__ import annotations

from collections import defaultdict

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

STEPS, WARM, CONTEXT = 8, 24, 400


class Launch(Struct, frozen=True):
    """One kernel on the device, in microseconds."""

    name: str
    start: float
    end: float


def traced(subject: Subject, streams: int) -> list[Launch]:
    """The kernels of `STEPS` steps with ``streams`` requests past their prefill, in order of their start."""
    world = subject.world
    most = (WARM + STEPS + 8) * (world.engine.depth + 1)
    requests = [world.submit(prompt_of(world, CONTEXT - WARM, n), most, use_cache=False) for n in range(streams)]
    while world.scheduler.stats().active < streams:
        world.tick()
    for _ in range(WARM):
        world.tick()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(STEPS):
            world.tick()
        torch.cuda.synchronize()
    world.tick(cancels=requests)
    world.run()
    events = [event for event in found.events() or () if event.device_type == DeviceType.CUDA]
    launches = [Launch(event.name, event.time_range.start, event.time_range.end) for event in events]
    return sorted(launches, key=lambda launch: launch.start)


def idle(launches: list[Launch]) -> float:
    """Microseconds in which no kernel ran between the first and the last."""
    end, total = launches[0].end, 0.0
    for launch in launches[1:]:
        total += max(0.0, launch.start - end)
        end = max(end, launch.end)
    return total


def table(launches: list[Launch]) -> str:
    """The kernels by their time a step."""
    kinds: dict[str, list[float]] = defaultdict(list)
    for launch in launches:
        kinds[launch.name].append(launch.end - launch.start)
    span = (max(launch.end for launch in launches) - launches[0].start) / STEPS
    rows = [f"{'kernel':<58}{'a step':>8}{'µs':>9}{'µs a step':>11}{'share':>7}"]
    for name, times in sorted(kinds.items(), key=lambda kind: -sum(kind[1])):
        each = sum(times) / STEPS
        rows.append(
            f"{name[:56]:<58}{len(times) / STEPS:>8.1f}{sum(times) / len(times):>9.2f}{each:>11.1f}{each / span:>7.1%}"
        )
    rows.append(f"a step {span:.1f} µs, of which the device was idle {idle(launches) / STEPS:.1f} µs")
    return "\n".join(rows)


@click.command(help=__doc__)
@click.option("--plugin", default="glm47")
@click.option("--layers", default=16)
@click.option("--format", "form", default="nvfp4")
@click.option("--streams", default="1,8")
@click.option("--mtp-depth", default=0)
@click.option("--bf16-weights", type=click.Choice(["checkpoint", "bf12"]), default="checkpoint")
def main(plugin: str, layers: int, form: str, streams: str, mtp_depth: int, bf16_weights: str) -> None:
    model = load_plugins(environ={}).model(plugin)
    raw = in_format(model.spec, shortened(model.spec, layers), form)[0]
    counts = [int(count) for count in streams.split(",")]
    settings = EngineSettings(
        max_concurrency=max(counts), kv_capacity=max(counts) * 1024, mtp=mtp_depth > 0, mtp_depth=max(1, mtp_depth),
        bf16_weights="bf12" if bf16_weights == "bf12" else "checkpoint",
    )  # fmt: skip
    subject = Subject(model, model.read_config(raw), settings, torch.device("cuda"))
    for count in counts:
        click.echo(f"{count} streams\n{table(traced(subject, count))}\n")


if __name__ == "__main__":
    main()
