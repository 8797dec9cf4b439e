"""The command that this package adds to ``dgpp``."""

from __future__ import annotations

import json
from pathlib import Path

import click

from dgpp_core.api import CheckpointError
from dgpp_deepseek.deepseek41.config import read_config
from dgpp_deepseek.deepseek41.token_classes import write_classes


@click.command("engram-classes")
@click.argument("checkpoint", type=click.Path(exists=True, file_okay=False, path_type=Path))
def engram_classes(checkpoint: Path) -> None:
    """Make the classes of tokens that DeepSeek-V4.1's n-gram tables go by, once for a CHECKPOINT folder."""
    path = checkpoint / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError("cannot read config.json", where=str(path), found=str(error)) from error
    config = read_config(raw)
    click.echo(write_classes(checkpoint, config.vocab_size, config.token_classes))
