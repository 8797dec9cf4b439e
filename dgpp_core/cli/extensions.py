"""Commands that plugins add to `dgpp`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import click

from dgpp_core.api.errors import PluginError
from dgpp_core.cli.command import GuardedGroup
from dgpp_core.host.loading import Plugin, PluginHost, load_plugins


def plugin_commands(host: PluginHost) -> Iterator[tuple[Plugin, str, click.Command]]:
    """Every command of every plugin, with its name."""
    for hooks in host.hooks("dgpp_commands"):
        group = GuardedGroup()
        hooks.commands(group)
        for name, command in group.commands.items():
            yield hooks.plugin, name, command


def plugin_command(name: str, environ: Mapping[str, str]) -> click.Command | None:
    """The command ``name`` of a plugin.

    Raises:
        PluginError: two plugins have one of that name.
    """
    found = [
        (plugin, command) for plugin, own, command in plugin_commands(load_plugins(environ=environ)) if own == name
    ]
    if len(found) > 1:
        raise PluginError(
            f"several plugins have a command {name!r}",
            found=" and ".join(plugin.identity() for plugin, _ in found),
            expected="one",
            hint=f"choose one with DGPP_PLUGINS={' or '.join(plugin.name for plugin, _ in found)}",
        )
    return found[0][1] if found else None
