"""Options and facts that the benchmarks share."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from dgpp_core.api.errors import ConfigError
from dgpp_core.api.spec import ModelConfig
from dgpp_core.cli.serving import choose, find_checkpoint
from dgpp_core.cli.synth import in_format, number_formats, shortened
from dgpp_core.host.loaded import LoadedModel
from dgpp_core.host.loading import load_plugins

F = TypeVar("F", bound=Callable[..., Any])


class Counts(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions only
    """Numbers, at least 1, in one argument: ``1,4,8``."""

    name = "N,N,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """The numbers, in the order given."""
        if isinstance(value, tuple):
            return value
        try:
            counts = tuple(int(part) for part in str(value).split(","))
        except ValueError:
            counts = ()
        if not counts or min(counts) < 1:
            self.fail(f"{value!r} is no list of numbers of at least 1", param, ctx)
        return counts


def once(values: tuple[tuple[int, ...], ...]) -> list[int]:
    """The numbers of a repeatable `Counts` option, each once and ascending."""
    return sorted({count for counts in values for count in counts})


def subject_options(command: F) -> F:
    """Which model is measured, with which weights, where."""
    options = (
        click.option("--plugin", required=True, help="The model to measure."),
        click.option("--checkpoint", help="A folder or repository with its weights."),
        click.option("--random", is_flag=True, help="Random weights made on the device, without a checkpoint."),
        click.option("--layers", type=click.IntRange(1), metavar="N", help="With --random: the first N layers."),
        click.option("--format", "form", metavar="F", help="With --random: a weight format of the model."),
        click.option("--device", default="auto", show_default=True, help="auto, cpu or cuda."),
        click.option("--runs", default=3, show_default=True, type=click.IntRange(1), help="Times it is measured."),
    )
    for option in reversed(options):
        command = option(command)
    return command


def source_of(
    plugin: str, checkpoint: str | None, random: bool, layers: int | None, form: str | None
) -> tuple[LoadedModel, Path | ModelConfig]:
    """The model, and its checkpoint or the config of one with random weights.

    Raises:
        ConfigError: options that do not go together.
    """
    if not random:
        if layers is not None or form is not None:
            name = "--layers" if layers is not None else "--format"
            raise ConfigError("a checkpoint is measured as it is", where=name, hint="add --random")
        host = load_plugins(environ=os.environ)
        chosen = choose(host, os.environ, plugin=plugin, config=None, checkpoint=checkpoint)
        return chosen.model, find_checkpoint(chosen, os.environ, offline=False)
    if checkpoint is not None:
        raise ConfigError("weights come from one place", where="--random", found="--checkpoint too", expected="one")
    model = load_plugins(environ=os.environ).model(plugin)
    raw: Mapping[str, Any] = model.spec.full_config if layers is None else shortened(model.spec, layers)
    if form is not None:
        raw = in_format(model.spec, raw, form.lower(), number_formats(model))[0]
    return model, model.read_config(raw)


def facts(plugin: str, device: str, config: ModelConfig | None, form: str | None) -> dict[str, Any]:
    """What was measured, on what, with which software, by which command."""
    import torch
    from triton import __version__ as triton_version

    from dgpp_core import __version__

    cuda = device.startswith("cuda")
    card = torch.cuda.get_device_name() if cuda else f"{torch.get_num_threads()} CPU threads"
    versions = {"dgpp": __version__, "torch": str(torch.__version__), "triton": triton_version}
    return {
        "model": plugin,
        "card": card,
        "layers": getattr(config, "num_hidden_layers", None),
        "format": form or "checkpoint",
        "versions": versions,
        "command": " ".join(["dgpp", *sys.argv[1:]]),
    }
