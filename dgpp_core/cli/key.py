"""``dgpp key``: make, list and remove API keys."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from dgpp_core.api.errors import ConfigError
from dgpp_core.cli.command import GuardedGroup
from dgpp_core.config.site import read_site
from dgpp_core.server.keys import Key, hashed, new_key, parse_keys, read_keys, write_keys

EPILOG = """\b
Examples:
  dgpp key make alice --file ./keys
  dgpp serve --plugin smollm2 --host 0.0.0.0 --api-key-file ./keys
"""
F = TypeVar("F", bound=Callable[..., Any])


def _epilog(*lines: str) -> str:
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def _file_option(command: F) -> F:
    text = "The file of hashed keys.  [default: DGPP_API_KEY_FILE]"
    return click.option("--file", "path", type=click.Path(dir_okay=False, path_type=Path), help=text)(command)


@click.group(cls=GuardedGroup, epilog=EPILOG)
def command() -> None:
    """Make, list and remove API keys.

    The file holds hashes: a key is shown once, when it is made. A running service reads a changed file at once.
    """


@command.command(epilog=_epilog("dgpp key make alice --file ./keys"))
@click.argument("name")
@_file_option
def make(name: str, path: Path | None) -> None:
    """Make a key for NAME, print it, and add its hash to the file."""
    file = _file(path)
    known = read_keys(file) if file.exists() else ()
    key = new_key(os.urandom)
    line = f"sha256:{hashed(key.encode()).hex()} {name}"
    (added,) = parse_keys(line, "the command line")
    if any(other.name == name for other in known):
        raise ConfigError(
            "there is a key of that name", where=str(file), found=name, hint=f"dgpp key remove {name} --file {file}"
        )
    write_keys(file, (*known, added))
    click.echo(key)
    click.echo(f"this is shown once; {file} has its hash", err=True)


@command.command("list", epilog=_epilog("dgpp key list --file ./keys"))
@_file_option
def names(path: Path | None) -> None:
    """Print the names of the keys and how their hashes begin."""
    for key in read_keys(_file(path)):
        click.echo(f"{key.name}  sha256:{key.digest.hex()[:12]}…")


@command.command(epilog=_epilog("dgpp key remove alice --file ./keys"))
@click.argument("name")
@_file_option
def remove(name: str, path: Path | None) -> None:
    """Remove the key of NAME: it is refused from then on."""
    file = _file(path)
    known = read_keys(file)
    left: tuple[Key, ...] = tuple(key for key in known if key.name != name)
    if len(left) == len(known):
        raise ConfigError("there is no key of that name", where=str(file), found=name)
    write_keys(file, left)
    click.echo(f"removed {name}")


def _file(path: Path | None) -> Path:
    found = path or Path(read_site(None, os.environ).api_key_file)
    if found == Path():
        raise ConfigError(
            "nothing says which key file",
            where="the command line",
            expected="--file FILE",
            hint="or set DGPP_API_KEY_FILE in the site file",
        )
    return found.expanduser()
