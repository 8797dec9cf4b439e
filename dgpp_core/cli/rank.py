"""``dgpp rank``."""

from __future__ import annotations

import os
from pathlib import Path

import click
import msgspec

from dgpp_core.cli.command import GuardedCommand
from dgpp_core.cli.options import log_dir_option, model_options, offline_option
from dgpp_core.cli.serving import choose, fabric_of, find_checkpoint, log_folder
from dgpp_core.host.loading import load_plugins
from dgpp_core.server.logs import LogFormat, set_up

EPILOG = """\b
Examples:
  dgpp rank --plugin glm47 --rank 1 --world 2 --rendezvous spark-1:29971
  dgpp rank --config glm47.json --rank 1 --world 2 --rendezvous spark-1:29971 --epoch 7

\b
Rank 0 is `dgpp serve --rendezvous`. What shapes execution is taken from it; with --config, the rank is refused where
its own differs. It ends when rank 0 ends.
Exit codes: 0 in order; 1 or 2 it failed or was refused; 3 rank 0 is gone, or ended the world.
"""


@click.command(cls=GuardedCommand, epilog=EPILOG)
@click.option("--rank", type=click.IntRange(1, 63), required=True, help="Which one this is.")
@click.option("--world", type=click.IntRange(2, 64), required=True, help="Ranks in all.")
@click.option("--rendezvous", metavar="HOST:PORT", required=True, help="Where rank 0 listens.")
@click.option("--epoch", type=click.IntRange(0), default=1, show_default=True, help="As rank 0 has it.")
@model_options
@offline_option
@click.option("--no-image", is_flag=True, help="On a GPU, load the checkpoint itself and keep no resident image.")
@log_dir_option
@click.option("--log-format", type=click.Choice(["text", "json"]), default="text", help="Form of a log line.")
def command(
    rank: int,
    world: int,
    rendezvous: str,
    epoch: int,
    plugin: str | None,
    config: Path | None,
    checkpoint: str | None,
    device: str | None,
    offline: bool,
    no_image: bool,
    log_dir: str | None,
    log_format: LogFormat,
) -> None:
    """Run one rank of a world that `dgpp serve --rendezvous` leads."""
    host = load_plugins(environ=os.environ)
    chosen = choose(host, os.environ, plugin=plugin, config=config, checkpoint=checkpoint, device=device)
    resolved = chosen.resolved
    set_up(log_format, chosen.site.log_level)
    folder = find_checkpoint(chosen, os.environ, offline)
    image = not no_image and os.environ.get("DGPP_RESIDENT_CACHE") != "off"

    from dgpp_core.cluster.peer import PeerOptions, run

    options = PeerOptions(
        rank=rank,
        world=world,
        rendezvous=rendezvous,
        model=chosen.model.spec.name,
        checkpoint=str(folder),
        device=resolved.device or "auto",
        epoch=epoch,
        settings=msgspec.json.encode(resolved.engine).decode() if config is not None else "",
        image_cache=str(Path(resolved.paths.resident_cache).expanduser()) if image else "",
        log_dir=log_dir or log_folder(resolved),
        timeout=resolved.engine.rendezvous_timeout_ms / 1e3,
        fabric=fabric_of(chosen),
    )
    click.get_current_context().exit(run(options))
