"""``dgpp synth``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from dgpp_core.api.errors import ConfigError
from dgpp_core.api.spec import ModelSpec
from dgpp_core.checkpoint.headers import DTYPE_BITS
from dgpp_core.cli.command import GuardedCommand, json_option, print_json
from dgpp_core.host.loading import load_plugins

LAYERS = "num_hidden_layers"
EPILOG = """\b
Examples:
  dgpp synth smollm2 --tiny ./tiny
  dgpp synth smollm2 --layers 2 --format f32 ./two-layers
  dgpp serve --plugin smollm2 --checkpoint ./tiny
"""


def shortened(spec: ModelSpec, layers: int) -> dict[str, Any]:
    """The full config with its first ``layers`` layers; a list with one entry a layer is cut with them."""
    count = spec.full_config.get(LAYERS)
    if not isinstance(count, int) or not 1 <= layers <= count:
        raise ConfigError(
            f"{spec.name} cannot have that many layers",
            where="--layers",
            found=str(layers),
            expected=f"1..{count}" if isinstance(count, int) else f"a model whose config has {LAYERS}",
        )
    cut = {k: v[:layers] for k, v in spec.full_config.items() if isinstance(v, list) and len(v) == count}
    return {**spec.full_config, **cut, LAYERS: layers}


def example_config(spec: ModelSpec, tiny: bool, layers: int | None) -> Mapping[str, Any]:
    """The config of the checkpoint to write: tiny, short, or the model's own."""
    if tiny and layers is not None:
        raise ConfigError("--tiny and --layers are two different models", where="the command line", expected="one")
    return spec.tiny_config if tiny else spec.full_config if layers is None else shortened(spec, layers)


@click.command(cls=GuardedCommand, epilog=EPILOG)
@click.argument("name")
@click.argument("folder", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))
@click.option("--tiny", is_flag=True, help="A model small enough for a test, with every kind of layer.")
@click.option("--layers", type=click.IntRange(1), metavar="N", help="The real model's first N layers.")
@click.option(
    "--format", "dtype", default="bf16", show_default=True, type=click.Choice([name.lower() for name in DTYPE_BITS]),
    metavar="F", help="Number format of the tensors that can have it: bf16, f16, f32, f8_e4m3, ...",
)  # fmt: skip
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0), help="Seed of the weights.")
@json_option
def command(name: str, folder: Path, tiny: bool, layers: int | None, dtype: str, seed: int, as_json: bool) -> None:
    """Write a random checkpoint of a model."""
    from rich.console import Console

    from dgpp_core.checkpoint.synth import synthesise
    from dgpp_core.scheduler.messages import Loading
    from dgpp_core.server.progress import LoadingDisplay

    model = load_plugins(environ=os.environ).model(name)
    raw = example_config(model.spec, tiny, layers)
    table = model.bindings(model.read_config(raw))
    if not any(dtype.upper() in binding.formats for binding in table.tensors):
        kinds = sorted({kind.lower() for binding in table.tensors for kind in binding.formats})
        raise ConfigError(
            f"no tensor of {name} can be stored so",
            where="--format",
            found=dtype,
            expected=f"one of {', '.join(kinds)}",
        )
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError("the folder is not empty", where=str(folder), hint="name a new one, or empty it")
    with LoadingDisplay(Console(stderr=True)) as display:
        synthesise(
            model.spec,
            table,
            raw,
            folder,
            seed=seed,
            dtype=dtype.upper(),
            progress=lambda stage, done, total: display.show(Loading(stage, done, total)),
        )
    files = sorted(folder.iterdir())
    if as_json:
        print_json({"folder": folder, "files": files})
    else:
        click.echo(f"{folder}: {len(files)} files; serve it with\n  dgpp serve --plugin {name} --checkpoint {folder}")
