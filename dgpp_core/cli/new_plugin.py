"""``dgpp new-plugin``: write the package of a plugin that works."""

from __future__ import annotations

import keyword
import re
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

import click

from dgpp_core.api.errors import ConfigError
from dgpp_core.cli.command import GuardedCommand, json_option, print_json

EPILOG = """\b
Examples:
  dgpp new-plugin acme                     # writes ./dgpp-acme
  dgpp new-plugin acme --dir ~/plugins
  pip install -e dgpp-acme && dgpp plugins check acme
"""
TEMPLATE_SUFFIX = ".txt"


def substitutions(name: str) -> dict[str, str]:
    """What the placeholders of the templates become for the plugin ``name``, written with dashes."""
    words = name.split("-")
    return {"@NAME@": name, "@MODULE@": "_".join(words), "@CLASS@": "".join(word.capitalize() for word in words)}


def check_name(name: str) -> str:
    """``name`` without the prefix ``dgpp-``; `ConfigError` unless it can name a package and a module."""
    short = name.removeprefix("dgpp-")
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", short) or keyword.iskeyword(short) or short == "core":
        raise ConfigError(
            "this cannot be the name of a plugin",
            where="NAME",
            found=name,
            expected="lower-case letters and digits, starting with a letter, with single dashes between",
            hint="for example `dgpp new-plugin acme`",
        )
    return short


def write_plugin(name: str, folder: Path) -> list[Path]:
    """Write the package into ``folder``/dgpp-NAME; returns the files.

    Raises:
        ConfigError: a bad name, or the package's folder exists and is not empty.
    """
    name = check_name(name)
    root = folder / f"dgpp-{name}"
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise ConfigError(
            "the folder of the new plugin is taken",
            where=str(root),
            expected="no such folder",
            hint="choose another --dir",
        )
    written = []
    source = resources.files("dgpp_core.cli") / "templates" / "plugin"
    for parts, text in sorted(_files(source)):
        path = root.joinpath(*(_filled(part, name) for part in parts))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_filled(text, name), encoding="utf-8")
        written.append(path)
    return written


def _files(folder: Traversable, parts: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], str]]:
    found: list[tuple[tuple[str, ...], str]] = []
    for entry in folder.iterdir():
        if entry.is_dir():
            found += _files(entry, (*parts, entry.name))
        elif entry.name.endswith(TEMPLATE_SUFFIX):
            found.append(((*parts, entry.name.removesuffix(TEMPLATE_SUFFIX)), entry.read_text(encoding="utf-8")))
    return found


def _filled(text: str, name: str) -> str:
    for placeholder, value in substitutions(name).items():
        text = text.replace(placeholder, value)
    return text


@click.command(cls=GuardedCommand, epilog=EPILOG)
@click.argument("name")
@click.option(
    "--dir", "folder", default=".", type=click.Path(file_okay=False, path_type=Path), help="Where to write dgpp-NAME."
)
@json_option
def command(name: str, folder: Path, as_json: bool) -> None:
    """Write the package of a new plugin.

    It holds a small model of its own with every kind of state, a drafter, an encoder of images and tests, and serves
    as it is.
    """
    files = write_plugin(name, folder)
    if as_json:
        print_json({"files": files})
        return
    for path in files:
        click.echo(path)
    short = check_name(name)
    root = folder / f"dgpp-{short}"
    click.echo(
        f"\nNext:\n  pip install -e '{root}[dev]'\n  dgpp plugins check {short}\n"
        f"  dgpp synth {short} --tiny {short}-tiny && dgpp serve --plugin {short} --checkpoint {short}-tiny\n"
        f"  pytest {root}"
    )
