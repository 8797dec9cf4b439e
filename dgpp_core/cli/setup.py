"""``dgpp setup``: from hosts to a world that can be started, by questions or by options."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

import click

from dgpp_core.api.errors import ConfigError
from dgpp_core.cli import cluster, cluster_release, doctor
from dgpp_core.cli.cluster_options import Chosen, chosen, outside
from dgpp_core.cli.command import GuardedCommand
from dgpp_core.cli.questions import Picked, copied, pick, settings
from dgpp_core.cli.serving import warn_of_hidden_keys
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


@click.command(cls=GuardedCommand, epilog=EPILOG)
@click.option("--config", type=click.Path(dir_okay=False, path_type=Path), help="The deployment.")
@click.option("--template", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="Copy the deployment from this NAME.example.json to NAME.json beside it.")  # fmt: skip
@click.option("--nodes", metavar="HOSTS", help="In rank order, this one first.")
@click.option("--ssh-user", metavar="NAME", help="Login on the others.")
@click.option("--http-port", type=click.IntRange(1, 65535), help="Where rank 0 serves.")
@click.option("--http-bind", metavar="ADDRESS", help="Where rank 0 serves.")
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
        if config is None and not read_site(None, os.environ).cluster_config:
            return  # the doctor has said that none is named
        context.invoke(cluster_release.fetch_command, config=config, check=True, offline=True)
        return
    if not (yes or sys.stdin.isatty()):
        raise ConfigError("no terminal: use --yes", where="standard input", hint="give the answers as options")
    file = Path(os.environ.get(ENV_FILE) or ".env")
    site, ask = _site(file), None if yes else _prompt
    picked = pick(config, template, site, ask)
    given = {
        "DGPP_NODES": nodes or "", "DGPP_SSH_USER": ssh_user or "", "DGPP_HTTP_PORT": str(http_port or ""),
        "DGPP_HTTP_BIND": http_bind or "", "HF_HUB_CACHE": hub_cache or "",
    }  # fmt: skip
    values = settings({key: value for key, value in given.items() if value}, picked, site, ask)
    _write(file, values, picked, roce)
    what = chosen(None, None)
    warn_of_hidden_keys(what.resolved, what.site, {})
    try:
        context.invoke(cluster_release.fetch_command, config=None, check=False, offline=offline)
        context.invoke(doctor.command, config=None, no_exchange=False)
    except BaseException:
        click.echo(f"{file} and {what.deployment} are in place; `dgpp setup --yes` goes on from there", err=True)
        raise
    click.echo("\nStart the world, see how it is, stop it:")
    for verb in ("up", "status", "down"):
        click.echo(f"  dgpp cluster {verb} --config {shlex.quote(str(what.deployment))}")
    if start:
        context.invoke(cluster.up, config=None)


def _site(file: Path) -> Site:
    return read_site(file if file.exists() else None, {key: v for key, v in os.environ.items() if key != ENV_FILE})


def _edited(file: Path, values: Mapping[str, str]) -> str:
    """The site file's text with ``values``; nothing is written, so that a refusal leaves nothing behind."""
    require_unexported(values, os.environ)
    return edited(read_text(file, "site file") if file.exists() else "", values)


def _write(file: Path, values: Mapping[str, str], picked: Picked, roce: str) -> None:
    """Deployment and site file, both or neither: the hosts are asked for their devices on drafts of them."""
    draft = file.with_name(f".{file.name}.draft-{os.getpid()}")
    text = _edited(file, values)
    with contextlib.ExitStack() as undo, contextlib.ExitStack() as end:
        if picked.template is not None:
            undo.callback(copied(picked.template).unlink)
        end.callback(draft.unlink, missing_ok=True)
        save(draft, text)
        lanes = _lanes(roce, chosen(None, None, {**os.environ, ENV_FILE: str(draft)}))
        if found := {**values, **lanes}:
            save(file, _edited(file, found))
            click.echo(f"{file}: {', '.join(found)}", err=True)
        undo.pop_all()


def _prompt(question: str, there: str) -> str:
    answer: str = click.prompt(question, default=there, show_default=bool(there))
    return answer.strip()


def _lanes(roce: str, what: Chosen) -> dict[str, str]:
    """The RDMA devices to write into the site file; none where the site names some already."""
    if roce == "none" or (roce == "auto" and (what.site.roce_devices or what.resolved.world == 1)):
        return {}
    if roce != "auto":
        return {"DGPP_ROCE_DEVICES": roce}
    resolved = what.resolved
    nodes = outside().nodes(resolved.nodes, resolved.ssh_user, what.site.ssh_config)
    found, told = choose_lanes(nodes)
    click.echo(told, err=True)
    return {"DGPP_ROCE_DEVICES": " ".join(found)} if found else {}
