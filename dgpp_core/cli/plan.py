"""``dgpp plan``."""

from __future__ import annotations

import os
from pathlib import Path

import click

from dgpp_core.cli.command import GuardedCommand, json_option, print_json
from dgpp_core.cli.options import capacity_options, model_options, world_option
from dgpp_core.cli.serving import choose, plan_of, warn_of_idle_keys
from dgpp_core.host.loading import load_plugins

EPILOG = """\b
Examples:
  dgpp plan --plugin smollm2
  dgpp plan --plugin smollm2 --max-concurrency 64 --kv-capacity 262144
  dgpp plan --plugin smollm2 --device cuda --available 128000000000   # a machine that is not here
  dgpp plan --config smollm2.json --json
  dgpp plan --config deploy/cluster_glm-4.7_nvfp4_w4.example.json --device cuda --available 124554051584

A deployment of several ranks is planned for one of them, wherever they will run.

Exit code 1 where the plan does not fit. Nothing is loaded or allocated: config.json is enough.
"""


@click.command(cls=GuardedCommand, epilog=EPILOG)
@model_options
@world_option
@click.option("--available", type=click.IntRange(1), metavar="BYTES", help="Memory there is.  [default: as measured]")
@json_option
@capacity_options
def command(
    plugin: str | None, config: Path | None, checkpoint: str | None, available: int | None, as_json: bool,
    **flags: object,
) -> None:  # fmt: skip
    """Print the memory plan of a model; exit 1 when it does not fit."""
    host = load_plugins(environ=os.environ)
    chosen = choose(host, os.environ, plugin=plugin, config=config, checkpoint=checkpoint, anywhere=True, **flags)
    warn_of_idle_keys(chosen.resolved)
    plan = plan_of(chosen, available)
    if as_json:
        print_json(plan.to_json())
    else:
        click.echo(plan.table())
    plan.require()
