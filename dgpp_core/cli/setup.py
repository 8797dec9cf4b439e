"""``dgpp setup``: from hosts to a world that can be started, by questions or by options."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path

import click

from dgpp_core.api.errors import ConfigError
from dgpp_core.cli import cluster, cluster_release, doctor
from dgpp_core.cli.cluster_options import chosen, outside
from dgpp_core.cli.command import GuardedCommand
from dgpp_core.config.settings import read_deployment
from dgpp_core.config.site import ENV_FILE, Site, read_site
from dgpp_core.config.strict import read_text
from dgpp_core.launch.lanes import choose_lanes
from dgpp_core.launch.sitefile import edited, require_unexported, save

EPILOG = """\b
Examples:
  dgpp setup                                                # asks
  dgpp setup --yes --config deploy/glm47.json --nodes "192.168.100.1 192.168.100.2"
  dgpp setup --check
  dgpp setup --yes --offline --start

\b
It may be run again at any time. The site file keeps every line that is not changed; a deployment is never overwritten.
"""
EXAMPLE = ".example.json"
Ask = Callable[[str, str], str]


@click.command(cls=GuardedCommand, epilog=EPILOG)
@click.option("--config", type=click.Path(dir_okay=False, path_type=Path), help="The deployment.")
@click.option("--template", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="Copy the deployment from this NAME.example.json to NAME.json beside it.")  # fmt: skip
@click.option("--nodes", metavar="HOSTS", help="In rank order, this one first.")
@click.option("--ssh-user", metavar="NAME", help="Login on the others.")
@click.option("--http-port", type=click.IntRange(1, 65535), help="Where rank 0 serves.")
@click.option("--http-bind", metavar="IPV4", help="Where rank 0 serves.")
@click.option("--hub-cache", metavar="DIR", help="The Hugging Face cache, on every host.")
@click.option("--roce", metavar="auto|none|DEVICES", default="auto", show_default=True,
              help="RDMA devices: those that every host has, none, or these.")  # fmt: skip
@click.option("--yes", is_flag=True, help="Ask nothing: what is not given stays as it is.")
@click.option("--check", is_flag=True, help="Only look, as `dgpp doctor` does, and compare the checkpoints.")
@click.option("--offline", is_flag=True, envvar="HF_HUB_OFFLINE", help="Download nothing; copy what is here.")
@click.option("--start", is_flag=True, help="Start the world at the end.")
def command(
    config: Path | None, template: Path | None, nodes: str | None, ssh_user: str | None, http_port: int | None,
    http_bind: str | None, hub_cache: str | None, roce: str, yes: bool, check: bool, offline: bool, start: bool,
) -> None:  # fmt: skip
    """Set up a site: settings, RDMA devices, checkpoint."""
    context = click.get_current_context()
    if check:
        if start or template:
            raise ConfigError("--check changes and starts nothing", where="the command line", expected="--check alone")
        context.invoke(doctor.command, config=config)
        context.invoke(cluster_release.fetch_command, config=config, check=True, offline=True)
        return
    given = {
        "DGPP_CLUSTER_CONFIG": str(_deployment(config, template) or ""), "DGPP_NODES": nodes or "",
        "DGPP_SSH_USER": ssh_user or "", "DGPP_HTTP_PORT": str(http_port or ""), "DGPP_HTTP_BIND": http_bind or "",
        "HF_HUB_CACHE": hub_cache or "",
    }  # fmt: skip
    file = Path(os.environ.get(ENV_FILE) or ".env")
    values = settings({key: value for key, value in given.items() if value}, _site(file), None if yes else _prompt)
    _write(file, values)
    _write(file, _lanes(roce))
    deployment = Path(chosen(None, None).deployment)
    context.invoke(cluster_release.fetch_command, config=None, check=False, offline=offline)
    context.invoke(doctor.command, config=None, no_exchange=False)
    for verb in ("up", "status", "down"):
        click.echo(f"  dgpp cluster {verb} --config {shlex.quote(str(deployment))}")
    if start:
        context.invoke(cluster.up, config=None)


def settings(given: Mapping[str, str], site: Site, ask: Ask | None) -> dict[str, str]:
    """The site's keys that change, by name.

    Args:
        given: from the command line; not asked for.
        ask: takes a question and the answer that is there; None asks nothing.

    Raises:
        ConfigError: there is no deployment, or not a host for each of its ranks.
    """
    there = {
        "DGPP_CLUSTER_CONFIG": site.cluster_config, "DGPP_NODES": " ".join(site.nodes), "DGPP_SSH_USER": site.ssh_user,
        "DGPP_HTTP_PORT": str(site.http_port), "DGPP_HTTP_BIND": site.http_bind,
    }  # fmt: skip
    questions = {
        "DGPP_CLUSTER_CONFIG": "deployment file", "DGPP_NODES": "hosts in rank order, this one first",
        "DGPP_SSH_USER": "login on the others (empty: yours)", "DGPP_HTTP_PORT": "port of the service",
        "DGPP_HTTP_BIND": "address it listens on (0.0.0.0: reachable from elsewhere)",
    }  # fmt: skip
    asked = {} if ask is None else {key: ask(questions[key], there[key]) for key in questions if key not in given}
    values = {key: value for key, value in {**asked, **given}.items() if value and value != there.get(key)}
    final = {**there, **values}
    if not final["DGPP_CLUSTER_CONFIG"]:
        raise ConfigError("nothing says which deployment", where="the command line", expected="--config or --template")
    world, hosts = read_deployment(Path(final["DGPP_CLUSTER_CONFIG"])).world_size, final["DGPP_NODES"].split()
    if len(hosts) < world:
        raise ConfigError("the deployment has more ranks than there are hosts", where="DGPP_NODES",
                          found=" ".join(hosts), expected=f"{world} hosts", hint="name them with --nodes")  # fmt: skip
    return values


def _prompt(question: str, there: str) -> str:
    answer: str = click.prompt(question, default=there, show_default=bool(there))
    return answer.strip()


def _deployment(config: Path | None, template: Path | None) -> Path | None:
    """The deployment to use; a template is copied unless its copy is there already."""
    if config is not None and template is not None:
        raise ConfigError("--config and --template are two deployments", where="the command line", expected="one")
    if template is not None:
        return copied(template)
    return None if config is None else config.absolute()


def copied(template: Path) -> Path:
    """The deployment ``NAME.json`` beside ``NAME.example.json``, made of it unless it is there.

    Raises:
        ConfigError: not a template, or one that is malformed.
    """
    if not template.name.endswith(EXAMPLE):
        raise ConfigError("not a template", where="--template", found=template.name, expected=f"NAME{EXAMPLE}")
    copy = template.with_name(template.name.removesuffix(EXAMPLE) + ".json").absolute()
    read_deployment(template)
    try:
        with copy.open("x", encoding="utf-8") as file:
            file.write(read_text(template, "template"))
    except FileExistsError:
        click.echo(f"{copy} is there already and is kept", err=True)
    return copy


def _site(file: Path) -> Site:
    return read_site(file if file.exists() else None, {key: v for key, v in os.environ.items() if key != ENV_FILE})


def _write(file: Path, values: Mapping[str, str]) -> None:
    if not values:
        return
    require_unexported(values, os.environ)
    before = read_text(file, "site file") if file.exists() else ""
    save(file, edited(before, values))
    click.echo(f"{file}: {', '.join(values)}", err=True)


def _lanes(roce: str) -> dict[str, str]:
    """The RDMA devices to write into the site file; none where the site names some already."""
    what, around = chosen(None, None), outside()
    if roce == "none" or (roce == "auto" and (what.site.roce_devices or what.resolved.world == 1)):
        return {}
    if roce != "auto":
        return {"DGPP_ROCE_DEVICES": roce}
    resolved = what.resolved
    nodes = around.nodes(resolved.nodes, resolved.ssh_user, what.site.ssh_config)
    found, told = choose_lanes(nodes)
    click.echo(told, err=True)
    return {"DGPP_ROCE_DEVICES": " ".join(found)} if found else {}
