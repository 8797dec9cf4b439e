"""``dgpp synth``."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from dgpp_core.api.errors import ConfigError
from dgpp_core.api.nearest import did_you_mean
from dgpp_core.api.spec import ModelSpec
from dgpp_core.checkpoint.headers import DTYPE_BITS
from dgpp_core.cli.command import GuardedCommand, json_option, print_json
from dgpp_core.host.loading import LoadedModel, load_plugins

LAYERS = "num_hidden_layers"
QUANTISATION = "quantization_config"
EPILOG = """\b
Examples:
  dgpp synth smollm2 --tiny ./tiny
  dgpp synth smollm2 --layers 2 --format f32 ./two-layers
  dgpp serve --plugin smollm2 --checkpoint ./tiny
"""


def shortened(spec: ModelSpec, layers: int) -> dict[str, Any]:
    """The full config with ``layers`` layers, its first ones; a list with one entry a layer is cut with them.

    Raises:
        ConfigError: the model cannot have so many.
    """
    whole, part = spec.full_config, _part(spec.full_config)
    held = whole if part is None else whole[part]
    count = _layers(whole)
    if count is None or not 1 <= layers <= count:
        raise ConfigError(
            f"{spec.name} cannot have that many layers",
            where="--layers",
            found=str(layers),
            expected=f"1..{count}" if count else f"a model whose config has {LAYERS}",
        )
    cut = {k: v[:layers] for k, v in held.items() if isinstance(v, list) and len(v) == count} | {LAYERS: layers}
    short: Mapping[str, Any] = {**whole, **cut} if part is None else {**whole, part: {**held, **cut}}
    return _renumbered(spec, {**(spec.shorten(short) if spec.shorten else short)})


def _part(config: Mapping[str, Any]) -> str | None:
    """Which object of a config speaks of the layers; None where it does so itself."""
    parts = [key for key, value in config.items() if isinstance(value, Mapping) and LAYERS in value]
    return parts[0] if parts and LAYERS not in config else None


def _layers(config: Mapping[str, Any]) -> int | None:
    part = _part(config)
    count = (config if part is None else config[part]).get(LAYERS)
    return count if isinstance(count, int) else None


def example_config(spec: ModelSpec, tiny: bool, layers: int | None) -> Mapping[str, Any]:
    """The config of the checkpoint to write: tiny, short, or the model's own."""
    if tiny and layers is not None:
        raise ConfigError("--tiny and --layers are two different models", where="the command line", expected="one")
    return spec.tiny_config if tiny else spec.full_config if layers is None else shortened(spec, layers)


def number_formats(model: LoadedModel) -> tuple[str, ...]:
    """The dtypes that tensors of the model can have where nothing is quantised."""
    tiny = {key: value for key, value in model.spec.tiny_config.items() if key != QUANTISATION}
    table = model.bindings(model.read_config(tiny))
    kinds = {kind for binding in table.tensors if binding.storage == "dense" for kind in binding.formats}
    return tuple(sorted(kinds))


def in_format(
    spec: ModelSpec, config: Mapping[str, Any], name: str, numbers: Sequence[str] = tuple(DTYPE_BITS)
) -> tuple[Mapping[str, Any], str]:
    """``config`` as that of a checkpoint in the format ``name``, and the dtype of the tensors that can have it.

    A number format gives a checkpoint that is not quantised.

    Args:
        numbers: the number formats that are allowed; see `number_formats`.

    Raises:
        ConfigError: neither a weight format of the model nor a number format that is allowed.
    """
    if name in spec.quantised:
        return _renumbered(spec, {**config, QUANTISATION: spec.quantised[name]}), "BF16"
    if name.upper() not in numbers:
        known = [*(kind.lower() for kind in numbers), *spec.quantised]
        raise ConfigError(
            f"{spec.name} has no such format", where="--format", found=name, expected=f"one of {', '.join(known)}",
            hint=did_you_mean(name, known) or "leave --format out: then it is what the model's config.json says",
        )  # fmt: skip
    return {key: value for key, value in config.items() if key != QUANTISATION}, name.upper()


def _renumbered(spec: ModelSpec, config: dict[str, Any]) -> dict[str, Any]:
    """``config`` with the rules of its quantisation for the layer after the last (a draft layer) kept for that layer.

    They name the layer by its number, which is the full model's count of layers.
    """
    count, layers = _layers(spec.full_config), _layers(config)
    if QUANTISATION not in config or count == layers:
        return config
    pattern = re.compile(rf"\blayers\.{count}\b")

    def renumber(value: Any) -> Any:
        if isinstance(value, str):
            return pattern.sub(f"layers.{layers}", value)
        if isinstance(value, Mapping):
            return {renumber(key): renumber(item) for key, item in value.items()}
        return [renumber(item) for item in value] if isinstance(value, list | tuple) else value

    return {**config, QUANTISATION: renumber(config[QUANTISATION])}


@click.command(cls=GuardedCommand, epilog=EPILOG)
@click.argument("name")
@click.argument("folder", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))
@click.option("--tiny", is_flag=True, help="A model small enough for a test, with every kind of layer.")
@click.option("--layers", type=click.IntRange(1), metavar="N", help="The real model's first N layers.")
@click.option(
    "--format", "form", metavar="F",
    help="A weight format of the model (fp8, nvfp4, ...), or the number format of all tensors that can have it: bf16, "
    "f16, f32, ...  [default: what the model's config.json says, in bf16]",
)  # fmt: skip
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0), help="Seed of the weights.")
@json_option
def command(
    name: str, folder: Path, tiny: bool, layers: int | None, form: str | None, seed: int, as_json: bool
) -> None:
    """Write a random checkpoint of a model."""
    from rich.console import Console

    from dgpp_core.checkpoint.synth import synthesise
    from dgpp_core.scheduler.messages import Loading
    from dgpp_core.server.progress import LoadingDisplay

    model = load_plugins(environ=os.environ).model(name)
    raw, dtype = example_config(model.spec, tiny, layers), "BF16"
    if form is not None:
        raw, dtype = in_format(model.spec, raw, form.lower(), number_formats(model))
    table = model.bindings(model.read_config(raw))
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError("the folder is not empty", where=str(folder), hint="name a new one, or empty it")
    with LoadingDisplay(Console(stderr=True)) as display:
        synthesise(
            model.spec,
            table,
            raw,
            folder,
            seed=seed,
            dtype=dtype,
            progress=lambda stage, done, total: display.show(Loading(stage, done, total)),
        )
    files = sorted(folder.iterdir())
    if as_json:
        print_json({"folder": folder, "files": files})
    else:
        click.echo(f"{folder}: {len(files)} files; serve it with\n  dgpp serve --plugin {name} --checkpoint {folder}")
