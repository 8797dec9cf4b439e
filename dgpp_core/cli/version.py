"""``dgpp version``."""

from __future__ import annotations

import importlib.metadata
import platform

import click
import msgspec

from dgpp_core import __version__
from dgpp_core.api.hooks import API_VERSION
from dgpp_core.cli.command import GuardedCommand, json_option, print_json, print_table
from dgpp_core.host.loading import describe as describe_plugin
from dgpp_core.host.loading import installed

LIBRARIES = ("torch", "triton", "litestar", "msgspec", "safetensors", "tokenizers")


class Versions(msgspec.Struct, frozen=True):
    """What is installed; an absent library is None. Nothing is imported to find out."""

    dgpp_core: str
    contract: int
    python: str
    platform: str
    plugins: dict[str, str]
    libraries: dict[str, str | None]


def versions() -> Versions:
    """The versions of this installation."""
    plugins = [describe_plugin(point) for point in installed()]
    return Versions(
        dgpp_core=__version__,
        contract=API_VERSION,
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        plugins={plugin.distribution or plugin.name: plugin.version for plugin in plugins},
        libraries={name: _version(name) for name in LIBRARIES},
    )


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


EPILOG = """\b
Examples:
  dgpp version
  dgpp version --json
"""


@click.command(cls=GuardedCommand, epilog=EPILOG)
@json_option
def command(as_json: bool) -> None:
    """Print the versions of dgpp, its plugins and its libraries."""
    found = versions()
    if as_json:
        print_json(found)
        return
    rows = [("dgpp-core", found.dgpp_core), ("plugin contract", str(found.contract)), ("python", found.python)]
    rows += [("platform", found.platform), *found.plugins.items()]
    rows += [(name, version or "not installed") for name, version in found.libraries.items()]
    print_table(("name", "version"), rows)
