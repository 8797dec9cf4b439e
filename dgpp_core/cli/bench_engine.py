"""``dgpp bench decode`` and ``prefill``: the real step through scheduler, engine and sampler, in this process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
import msgspec

from dgpp_core.api.errors import ConfigError
from dgpp_core.cli.bench_options import Counts, facts, once, source_of, subject_options
from dgpp_core.cli.command import GuardedCommand, json_option, print_json
from dgpp_core.config.settings import EngineSettings
from dgpp_core.config.strict import convert

if TYPE_CHECKING:
    from dgpp_core.testing.subject import Memory, Subject

SLACK = 128
"""Tokens a stream beside those that are measured: what its last block and the steps in flight may take."""
EPILOG = """\b
Examples:
  dgpp bench decode --plugin smollm2 --streams 1,4,8
  dgpp bench decode --plugin smollm2 --random --layers 4 --context 400 --json
  dgpp bench prefill --plugin smollm2 --tokens 512,2000
"""


def _subject(settings: EngineSettings, device: str, accept: float | None, **chosen: Any) -> tuple[Subject, Any]:
    """What is measured, and its config where the weights are random."""
    from dgpp_core.engine.factory import pick_device
    from dgpp_core.testing.forced_drafts import ForcedAcceptance
    from dgpp_core.testing.subject import Subject

    model, source = source_of(**chosen)
    settings = convert(msgspec.to_builtins(settings), EngineSettings, "what is to be measured")
    _require_drafts(settings, accept, model.spec.draft_depth)
    judge = None if accept is None else ForcedAcceptance(accept)
    return Subject(model, source, settings, pick_device(device), judge=judge), source


def _require_drafts(settings: EngineSettings, accept: float | None, most: int) -> None:
    """Refuse drafts that a model with at most ``most`` would not make, which would be measured as if it did."""
    if settings.mtp and settings.mtp_depth > most:
        expected = f"at most {most}" if most else "a model that drafts"
        raise ConfigError(
            "the model does not draft so many", where="--mtp-depth", found=str(settings.mtp_depth), expected=expected
        )
    if accept is not None and not settings.mtp:
        raise ConfigError("no drafts are made that could stand", where="--accept-rate", hint="add --mtp-depth")


def _report(subject: Subject, source: Any, plugin: str, form: str | None) -> dict[str, Any]:
    config = None if isinstance(source, Path) else source
    return facts(plugin, str(subject.device), config, form)


@click.command(cls=GuardedCommand, epilog=EPILOG)
@subject_options
@click.option("--streams", "streams_given", multiple=True, type=Counts(), default=("1,4,8",), show_default=True)
@click.option(
    "--context",
    "--prompt",
    default=400,
    type=click.IntRange(1),
    show_default=True,
    help="Tokens of a stream, halfway through the measurement.",
)
@click.option("--steps", default=64, type=click.IntRange(1), show_default=True, help="Steps a run.")
@click.option("--mtp-depth", default=0, type=click.IntRange(0, 5), show_default=True, help="Tokens drafted a step.")
@click.option(
    "--accept-rate",
    type=click.FloatRange(0, 1),
    help="Let drafts stand at this rate, whatever they are: for timing, the text is then noise.",
)
@click.option(
    "--bf16-weights",
    type=click.Choice(["checkpoint", "bf12"]),
    default="checkpoint",
    show_default=True,
    help="Form of the BF16 matrices on a GPU.",
)
@click.option("--no-graphs", is_flag=True, help="Without captured graphs.")
@json_option
def decode(
    plugin: str, checkpoint: str | None, random: bool, layers: int | None, form: str | None, device: str, runs: int,
    streams_given: tuple[tuple[int, ...], ...], context: int, steps: int, mtp_depth: int, accept_rate: float | None,
    bf16_weights: Literal["checkpoint", "bf12"], no_graphs: bool, as_json: bool,
) -> None:  # fmt: skip
    """Milliseconds a decode step, with the bytes it must read and the floor they set."""
    from dgpp_core.testing.measure import measure_decode, most_generated, read_bandwidth

    counts = once(streams_given)
    tokens = context + most_generated(steps, runs, mtp_depth) + SLACK
    settings = EngineSettings(
        max_concurrency=max(counts), kv_capacity=max(counts) * tokens, prefix_cache_gib=0.0, mtp=mtp_depth > 0,
        mtp_depth=max(1, mtp_depth), decode_graph=not no_graphs, prefill_budget_tokens=0,
        bf16_weights=bf16_weights,
    )  # fmt: skip
    subject, source = _subject(
        settings, device, accept_rate, plugin=plugin, checkpoint=checkpoint, random=random, layers=layers, form=form
    )
    bandwidth = read_bandwidth(time.perf_counter, subject.device)
    before = len(subject.compiles.names)
    rows = {
        str(count): measure_decode(
            subject.world, time.perf_counter, streams=count, context=context, steps=steps, runs=runs,
            bandwidth=bandwidth,
        )
        for count in counts
    }  # fmt: skip
    memory = subject.memory()
    report = _report(subject, source, plugin, form) | {
        "read_bandwidth_gb_s": bandwidth / 1e9,
        "bf16_weights": bf16_weights,
        "mtp_depth": mtp_depth,
        "accept_rate": accept_rate,
        "kernels_compiled": len(subject.compiles.names) - before,
        "memory": msgspec.to_builtins(memory),
        "decode": msgspec.to_builtins(rows),
    }
    if as_json:
        print_json(report)
        return
    table = [
        (name, f"{row.ms_per_step:.3f}", f"{row.tokens_per_second:.1f}", f"{row.bytes / 1e6:.1f}", f"{row.experts:.1f}",
         f"{row.floor_ms:.3f}", f"{row.share:.0%}", "-" if row.host_ms is None else f"{row.host_ms:.3f}")
        for name, row in rows.items()
    ]  # fmt: skip
    head = (
        "streams",
        "ms a step",
        "tokens/s",
        "MB a step",
        "experts a layer",
        "floor ms",
        "floor of the step",
        "host ms",
    )
    _print(head, table, report, memory)


@click.command(cls=GuardedCommand, epilog=EPILOG)
@subject_options
@click.option(
    "--tokens",
    "tokens_given",
    multiple=True,
    type=Counts(),
    default=("2000",),
    show_default=True,
    help="Prompt lengths.",
)
@click.option("--chunk", default=0, type=click.IntRange(0), show_default=True, help="Tokens a tick; 0 is all.")
@json_option
def prefill(
    plugin: str, checkpoint: str | None, random: bool, layers: int | None, form: str | None, device: str, runs: int,
    tokens_given: tuple[tuple[int, ...], ...], chunk: int, as_json: bool,
) -> None:  # fmt: skip
    """Time to the first token of a prompt, cold and with its prefix cached."""
    from dgpp_core.testing.measure import measure_prefill

    lengths = once(tokens_given)
    settings = EngineSettings(
        max_concurrency=2, kv_capacity=2 * (max(lengths) + SLACK), mtp=False, prefill_budget_tokens=chunk
    )
    subject, source = _subject(
        settings, device, None, plugin=plugin, checkpoint=checkpoint, random=random, layers=layers, form=form
    )
    rows = {str(n): measure_prefill(subject.world, time.perf_counter, tokens=n, runs=runs) for n in lengths}
    memory = subject.memory()
    report = _report(subject, source, plugin, form) | {
        "chunk": chunk, "memory": msgspec.to_builtins(memory), "prefill": msgspec.to_builtins(rows),
    }  # fmt: skip
    if as_json:
        print_json(report)
        return
    table = [
        (
            name,
            f"{row.ms:.1f}",
            f"{row.launch_ms:.1f}",
            f"{row.cached_ms:.1f}",
            f"{row.cached_launch_ms:.1f}",
            str(row.cached_tokens),
            f"{row.ratio:.1%}",
        )
        for name, row in rows.items()
    ]
    head = ("tokens", "cold ms", "host", "cached ms", "host", "tokens cached", "cached over cold")
    _print(head, table, report, memory)


def _print(head: Sequence[str], rows: Sequence[Sequence[str]], report: dict[str, Any], memory: Memory | None) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{report['model']} on {report['card']}")
    for name in head:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*row)
    console = Console(width=120)
    console.print(table)
    if "read_bandwidth_gb_s" in report:
        late = report["kernels_compiled"]
        console.print(f"read bandwidth {report['read_bandwidth_gb_s']:.0f} GB/s, {late} kernels compiled late")
    if memory is not None:
        gib = 1 << 30
        console.print(
            f"memory: planned {memory.planned / gib:.2f} GiB, device {memory.device_used / gib:.2f}, "
            f"torch peak {memory.peak_reserved / gib:.2f} ({memory.peak_tensors / gib:.2f} in tensors)"
        )
