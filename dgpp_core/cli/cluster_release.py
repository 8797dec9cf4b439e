"""``dgpp cluster pack``, ``install``, ``releases`` and ``fetch``: what has to be on the hosts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import click
import msgspec

from dgpp_core.cli.cluster_options import chosen, cluster_options, examples, outside
from dgpp_core.cli.command import GuardedCommand, count, json_option, print_json, print_table
from dgpp_core.config.site import Site, read_site
from dgpp_core.launch.agent import processes
from dgpp_core.launch.nodes import Node, call, each
from dgpp_core.launch.weights import unit_of


def _site_nodes() -> tuple[Site, list[Node]]:
    site = read_site(None, os.environ)
    return site, outside().nodes(site.nodes, site.ssh_user, site.ssh_config)


@click.command("pack", cls=GuardedCommand, epilog=examples("pack ./dist"))
@click.argument("folder", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))
def pack_command(folder: Path) -> None:
    """Write an archive of the dgpp and the plugins that run here into DIR."""
    from dgpp_core.launch.pack import pack

    click.echo(pack(folder))


@click.command("install", cls=GuardedCommand, epilog=examples("install ./dist/dgpp-0.1.0+0123456789ab.tar.gz"))
@click.argument("archive", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--no-activate", is_flag=True, help="Leave `current` as it is.")
def install_command(archive: Path, no_activate: bool) -> None:
    """Install a release on every host of the site, beside those that are there."""
    from dgpp_core.launch.install import activate, install

    site, nodes = _site_nodes()
    version = install(archive, nodes, site.release_dir, outside().say)
    if not no_activate:
        activate(version, nodes, site.release_dir)
    click.echo(version)


@click.command("releases", cls=GuardedCommand, epilog=examples("releases --verify", "releases --activate VERSION"))
@click.option("--activate", "version", metavar="VERSION", help="Make it `current` on every host, also an older one.")
@click.option("--verify", "check", is_flag=True, help="Compare every file with its manifest; exit 1 where one differs.")
@json_option
def releases_command(version: str | None, check: bool, as_json: bool) -> None:
    """List the releases of every host, check them, or choose one."""
    from dgpp_core.launch.install import activate, installed_on, verify

    site, nodes = _site_nodes()
    if version is not None:
        activate(version, nodes, site.release_dir)
    found = installed_on(nodes, site.release_dir)
    problems = verify(nodes, site.release_dir) if check else []
    if as_json:
        hosts = {node.name: msgspec.to_builtins(there) for node, there in zip(nodes, found, strict=True)}
        print_json({"hosts": hosts, "problems": problems})
    else:
        rows = [
            (node.name, name, "current" if name == there.current else "", digest[:16])
            for node, there in zip(nodes, found, strict=True)
            for name, digest in there.versions.items()
        ]
        print_table(("host", "release", "", "manifest"), rows)
        for problem in problems:
            click.echo(problem, err=True)
    if problems:
        click.get_current_context().exit(1)


@click.command(
    "fetch",
    cls=GuardedCommand,
    epilog=examples("fetch --config deploy/glm47.json", "fetch --verify"),
)
@cluster_options
@click.option("--verify", "check", is_flag=True, help="Copy nothing; exit 1 where a file differs.")
@click.option("--offline", is_flag=True, envvar="HF_HUB_OFFLINE", help="Do not download what is not here.")
def fetch_command(config: Path | None, log_dir: str | None, check: bool, offline: bool) -> None:
    """Bring a deployment's checkpoint to every host: download it once, copy it, compare it."""
    from dgpp_core.cli.serving import choose, find_checkpoint
    from dgpp_core.host.loading import load_plugins
    from dgpp_core.launch import weights

    what, around = chosen(config, log_dir), outside()
    model = choose(load_plugins(environ=os.environ), os.environ, plugin=None, config=what.deployment, checkpoint=None)
    folder = find_checkpoint(model, os.environ, offline or check)
    resolved = what.resolved
    nodes = around.nodes(resolved.nodes, resolved.ssh_user, what.site.ssh_config)
    homes = dict(zip([node.name for node in nodes], each(nodes, lambda n: call(n, processes.greet, "")), strict=True))
    targets = {
        node.name: on_node(unit_of(folder), str(homes[node.name]["home"]), resolved.node_env[rank])
        for rank, node in enumerate(nodes)
    }
    if not check:
        weights.sync(nodes[1:], folder, lambda node: targets[node.name], around.say)
        click.echo(f"{folder}: on {count(len(nodes), 'host')}")
        return
    differing = weights.verify(nodes[1:], folder, lambda node: targets[node.name])
    click.echo("\n".join(differing) or f"{folder}: the same on {count(len(nodes), 'host')}")
    if differing:
        click.get_current_context().exit(1)


def on_node(path: Path, home: str, node_env: Mapping[str, str]) -> str:
    """Where a host keeps what is at ``path`` here: a checkpoint of the Hugging Face cache in its own one, what is below
    the home folder at the same place below its own (``home``), anything else at the same path."""
    unit = unit_of(path)
    if unit.name.startswith("models--") and (own := node_env.get("HF_HUB_CACHE")):
        return f"{own}/{unit.name}/{path.relative_to(unit)}".removesuffix("/.")
    below = Path.home()
    return f"{home}/{path.relative_to(below)}" if path.is_relative_to(below) else str(path)
