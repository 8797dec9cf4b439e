"""What every command of `dgpp` shares: errors in their five parts, ``--json``, exit codes."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from dgpp_core.api.errors import DgppError

CONTEXT: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": 110}

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, also for errors.")


class GuardedCommand(click.Command):
    """A command whose errors are printed without a traceback; the exit code is the error's."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        return _guarded(super().invoke, ctx, bool(ctx.params.get("as_json")))


class GuardedGroup(click.Group):
    """A group whose commands are guarded; looking one up may fail too."""

    command_class = GuardedCommand
    group_class = type

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command that the arguments name."""
        return _guarded(super().invoke, ctx, False)


def _guarded(run: Any, ctx: click.Context, as_json: bool) -> Any:
    try:
        return run(ctx)
    except (click.ClickException, click.exceptions.Exit, click.Abort, SystemExit):
        raise
    except DgppError as error:
        _debug()
        report(error, as_json)
        ctx.exit(error.exit_code)
    except BrokenPipeError:  # the reader of our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        ctx.exit(0)
    except Exception as error:
        _debug()
        report(_unforeseen(error), as_json)
        ctx.exit(DgppError.exit_code)


def _debug() -> None:
    if os.environ.get("DGPP_DEBUG") == "1":
        traceback.print_exc()


def _unforeseen(error: Exception) -> DgppError:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return DgppError(
        "an error that dgpp did not foresee",
        where=f"{last.filename}:{last.lineno}",
        found=f"{type(error).__name__}: {error}",
        hint="run again with DGPP_DEBUG=1 and report the traceback",
    )


def report(error: DgppError, as_json: bool) -> None:
    """Print an error to stderr, as text or as ``{"error": {"type": ..., "what": ...}}``."""
    if as_json:
        body = {"error": {"type": type(error).__name__, **error.parts()}}
        click.echo(msgspec.json.encode(body).decode(), err=True)
    else:
        click.echo(f"{click.style('error:', fg='red', bold=True)} {error}", err=True)


def print_json(value: Any) -> None:
    """A value, structs included, as indented JSON on stdout."""
    click.echo(msgspec.json.format(msgspec.json.encode(value, enc_hook=_plain), indent=2).decode())


def _plain(value: object) -> object:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")


def count(number: int, noun: str) -> str:
    """``1 host``, ``2 hosts``."""
    return f"{number} {noun}" + ("s" if number != 1 else "")


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Rows in aligned columns, cut off nowhere, so that they can be piped."""
    lines = [list(head), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    for line in lines:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
