"""``dgpp bench``: what a step costs here, beside what it must cost."""

from __future__ import annotations

import click

from dgpp_core.cli import bench_engine, bench_service
from dgpp_core.cli.command import GuardedGroup

EPILOG = """\b
Examples:
  dgpp bench decode --plugin smollm2
  dgpp bench decode --plugin smollm2 --streams 1,8 --json
  dgpp bench decode --plugin smollm2 --random --layers 4
  dgpp bench prefill --plugin smollm2 --tokens 512,2000
  dgpp bench boot --plugin smollm2
  dgpp bench serve --url http://127.0.0.1:18080 --streams 8
  dgpp bench serve --fake --streams 32 --max-tokens 200 --runs 5
"""


@click.group(cls=GuardedGroup, epilog=EPILOG)
def command() -> None:
    """Measure decode, prefill or a running service."""


for _command in (bench_engine.decode, bench_engine.prefill, bench_service.boot, bench_service.serve):
    command.add_command(_command)
