"""``dgpp resolve``."""

from __future__ import annotations

import os
from pathlib import Path

import click

from dgpp_core.cli.command import GuardedCommand, json_option, print_json
from dgpp_core.cli.options import bus_option, capacity_options, model_options, service_options, world_option
from dgpp_core.cli.serving import settle, warn_of_hidden_keys, warn_of_idle_keys
from dgpp_core.host.loading import load_plugins

EPILOG = """\b
Examples:
  dgpp resolve --plugin smollm2
  dgpp resolve --config smollm2.json --kv-capacity 65536

The output is JSON with or without --json. Nothing is loaded and no other machine is asked.
"""


@click.command(cls=GuardedCommand, epilog=EPILOG)
@model_options
@world_option
@bus_option
@json_option
@service_options
@capacity_options
def command(plugin: str | None, config: Path | None, checkpoint: str | None, as_json: bool, **flags: object) -> None:
    """Print the deployment as it would run."""
    host = load_plugins(environ=os.environ)
    resolved, site = settle(
        host, os.environ, plugin=plugin, config=config, checkpoint=checkpoint, anywhere=False, **flags
    )
    warn_of_idle_keys(resolved)
    warn_of_hidden_keys(resolved, site, flags)
    print_json(resolved)
