"""What ``dgpp setup`` asks: the deployment first, then what it leaves open."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import click
import msgspec

from dgpp_core.api.errors import ConfigError
from dgpp_core.config.settings import Deployment, read_deployment
from dgpp_core.config.site import HTTP_KEYS, Site
from dgpp_core.config.strict import read_text

EXAMPLE = ".example.json"
TEMPLATES = Path("deploy")
Ask = Callable[[str, str], str]
"""Takes a question and the answer that is there."""
QUESTIONS = {
    "DGPP_NODES": "hosts in rank order, this one first",
    "DGPP_SSH_USER": "login on the others (empty: yours)",
    "DGPP_HTTP_PORT": "port of the service",
    "DGPP_HTTP_BIND": "address it listens on (0.0.0.0: reachable from elsewhere)",
}
OPTIONS = {"DGPP_HTTP_PORT": "--http-port", "DGPP_HTTP_BIND": "--http-bind"}


class Picked(msgspec.Struct, frozen=True, kw_only=True):
    """The deployment that is set up.

    Attributes:
        path: as the site file will name it.
        template: what it has to be copied from first; None where it is there.
    """

    path: str
    template: Path | None = None
    deployment: Deployment


def pick(config: Path | None, template: Path | None, site: Site, ask: Ask | None) -> Picked:
    """The deployment that the command line names, else the answer, else the site's; nothing is copied yet.

    Args:
        ask: None asks nothing. An answer that cannot be read is told, and asked again.

    Raises:
        ConfigError: none is named, two are, or it cannot be read.
    """
    if config is not None and template is not None:
        raise ConfigError("--config and --template are two deployments", where="the command line", expected="one")
    if template is not None:
        return _of_template(template)
    if config is not None:
        return _of_file(str(config.absolute()))
    if ask is not None:
        return _asked(site.cluster_config, ask)
    if not site.cluster_config:
        raise ConfigError("nothing says which deployment", where="the command line", expected="--config or --template")
    return _of_file(site.cluster_config)


def _asked(there: str, ask: Ask) -> Picked:
    click.echo("The deployment file says which model is served, by how many ranks and with which settings (JSON).")
    if templates := sorted(TEMPLATES.glob(f"*{EXAMPLE}")):
        click.echo("Templates; one that you name is copied to NAME.json beside it:")
        for template in templates:
            click.echo(f"  {template}")
    while True:
        answer = ask("deployment file", there)
        try:
            if answer.endswith(EXAMPLE):
                return _of_template(Path(answer))
            return _of_file(answer if answer == there else str(Path(answer).expanduser().absolute()))
        except ConfigError as error:
            click.echo(str(error), err=True)


def _of_file(path: str) -> Picked:
    return Picked(path=path, deployment=read_deployment(Path(path)))


def _of_template(template: Path) -> Picked:
    copy = copy_of(template)
    if copy.exists():
        click.echo(f"{copy} is there already and is kept", err=True)
        return _of_file(str(copy))
    return Picked(path=str(copy), template=template, deployment=read_deployment(template))


def copy_of(template: Path) -> Path:
    """``NAME.json`` beside ``NAME.example.json``.

    Raises:
        ConfigError: not a template.
    """
    if not template.name.endswith(EXAMPLE):
        raise ConfigError("not a template", where="--template", found=template.name, expected=f"NAME{EXAMPLE}")
    return template.with_name(template.name.removesuffix(EXAMPLE) + ".json").absolute()


def copied(template: Path) -> Path:
    """The deployment beside a template, made of it.

    Raises:
        ConfigError: not a template, or one that cannot be read; the deployment is there already.
    """
    copy = copy_of(template)
    text = read_text(template, "template")
    try:
        with copy.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        hint = "run the command again: it is kept then"
        raise ConfigError("a deployment has come meanwhile", where=str(copy), hint=hint) from None
    return copy


def settings(given: Mapping[str, str], picked: Picked, site: Site, ask: Ask | None) -> dict[str, str]:
    """The site's keys that change, by name.

    Args:
        given: from the command line; not asked for.
        ask: None asks nothing.

    Raises:
        ConfigError: there is not a host for each rank, or something is given that the deployment goes before.
    """
    there = {
        "DGPP_CLUSTER_CONFIG": site.cluster_config, "DGPP_NODES": " ".join(site.nodes), "DGPP_SSH_USER": site.ssh_user,
        "DGPP_HTTP_PORT": str(site.http_port), "DGPP_HTTP_BIND": site.http_bind,
    }  # fmt: skip
    decided = {key: str(picked.deployment.http[name]) for key, name in HTTP_KEYS.items()
               if name in picked.deployment.http}  # fmt: skip
    for key, value in decided.items():
        if given.get(key, value) != value:
            raise ConfigError(
                f"{OPTIONS[key]} cannot act: the deployment's http.{HTTP_KEYS[key]} goes before it", where=picked.path,
                found=f"{value}, and {OPTIONS[key]} {given[key]}", expected="one of them",
                hint=f"change it in the deployment, or take it out there, or leave {OPTIONS[key]} out",
            )  # fmt: skip
    skipped = {*given, *decided}
    asked = {} if ask is None else {key: ask(QUESTIONS[key], there[key]) for key in QUESTIONS if key not in skipped}
    wanted = {"DGPP_CLUSTER_CONFIG": picked.path, **asked, **given}
    values = {key: value for key, value in wanted.items() if value and value != there.get(key)}
    world, hosts = picked.deployment.world_size, {**there, **values}["DGPP_NODES"].split()
    if len(hosts) < world:
        raise ConfigError("the deployment has more ranks than there are hosts", where="DGPP_NODES",
                          found=" ".join(hosts), expected=f"{world} hosts", hint="name them with --nodes")  # fmt: skip
    return values
