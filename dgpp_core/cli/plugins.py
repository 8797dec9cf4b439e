"""``dgpp plugins list`` and ``dgpp plugins check``."""

from __future__ import annotations

import os

import click
import msgspec

from dgpp_core.cli.command import GuardedGroup, json_option, print_json, print_table
from dgpp_core.cli.extensions import plugin_commands
from dgpp_core.host.check import Finding, check_plugin, imported_libraries
from dgpp_core.host.loading import Plugin, PluginHost, Problem, load_plugins

EPILOG = """\b
Examples:
  dgpp plugins list
  dgpp plugins check llama
"""
LIST_EPILOG = """\b
Examples:
  dgpp plugins list
  dgpp plugins list --json
  DGPP_PLUGINS=llama dgpp plugins list
"""
CHECK_EPILOG = """\b
Examples:
  dgpp plugins check llama          # an entry point,
  dgpp plugins check dgpp-llama     # a package,
  dgpp plugins check smollm2        # or a model of it

Exit code 1 where something is wrong; a warning alone is 0.
"""
COLORS = {"ok": "green", "warning": "yellow", "error": "red"}


class Listed(msgspec.Struct, frozen=True, kw_only=True):
    """A plugin and what it offers."""

    plugin: Plugin
    models: dict[str, str]
    commands: tuple[str, ...]


class Listing(msgspec.Struct, frozen=True):
    """What ``plugins list --json`` prints."""

    plugins: tuple[Listed, ...]
    problems: tuple[Problem, ...]


def listing(host: PluginHost) -> Listing:
    """The plugins with their models and commands."""
    commands = list(plugin_commands(host))
    models = [host.model(name) for name in host.models()]
    found = tuple(
        Listed(
            plugin=plugin,
            models={model.spec.name: model.spec.title for model in models if model.plugin == plugin},
            commands=tuple(name for owner, name, _ in commands if owner == plugin),
        )
        for plugin in host.plugins
    )
    return Listing(found, host.problems)


@click.group(cls=GuardedGroup, epilog=EPILOG)
def command() -> None:
    """List and check the installed plugins."""


@command.command("list", epilog=LIST_EPILOG)
@json_option
def list_plugins(as_json: bool) -> None:
    """List plugins, their models and commands, and the plugins that cannot be used."""
    found = listing(load_plugins(environ=os.environ))
    if as_json:
        print_json(found)
        return
    rows = [
        (item.plugin.name, f"{item.plugin.distribution} {item.plugin.version}", model, title)
        for item in found.plugins
        for model, title in (item.models or {"-": "no models"}).items()
    ]
    if rows:
        print_table(("plugin", "package", "model", "title"), rows)
    elif not found.problems:
        click.echo("no plugin is installed; try `pip install dgpp-llama`")
    for item in found.plugins:
        if item.commands:
            click.echo(f"\ncommands of {item.plugin.name}: {', '.join(item.commands)}")
    for problem in found.problems:
        click.echo(f"\n{click.style('unusable:', fg='red')} {problem.error()}")


@command.command("check", epilog=CHECK_EPILOG)
@click.argument("name")
@json_option
def check(name: str, as_json: bool) -> None:
    """Check a plugin: contract, hooks, tables, imports."""
    findings = check_plugin(load_plugins(environ=os.environ), name, imported_libraries)
    if as_json:
        print_json({"findings": findings})
    else:
        for finding in findings:
            _print(finding)
    if any(finding.level == "error" for finding in findings):
        click.get_current_context().exit(1)


def _print(finding: Finding) -> None:
    mark = click.style(f"{finding.level:<7}", fg=COLORS[finding.level])
    click.echo(f"{mark}  {finding.subject}: {finding.text}")
    for name, text in finding.details.items():
        if name != "what":
            click.echo(f"           {'next step' if name == 'hint' else name}: {text}")
