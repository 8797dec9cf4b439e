"""What the commands of ``dgpp cluster`` share: the deployment that is meant, and the world outside."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec

from dgpp_core.api.errors import ConfigError, LaunchError
from dgpp_core.config.resolve import Resolved, resolve
from dgpp_core.config.settings import Deployment, parse_deployment
from dgpp_core.config.site import Site, read_site
from dgpp_core.config.strict import parse_json, read_text
from dgpp_core.launch.nodes import make_nodes
from dgpp_core.launch.outside import Outside
from dgpp_core.launch.world import LOCK, Places, places

F = TypeVar("F", bound=Callable[..., Any])


def examples(*lines: str) -> str:
    """The end of a command's help."""
    return "\b\nExamples:\n" + "\n".join(f"  dgpp cluster {line}" for line in lines)


class Chosen(msgspec.Struct, frozen=True, kw_only=True):
    """A deployment as the command line names it; paths of ``resolved`` are its own (``places``)."""

    site: Site
    resolved: Resolved
    deployment: Path
    text: str
    places: Places


def cluster_options(command: F) -> F:
    """``--config`` and ``--log-dir``."""
    config = click.option(
        "--config", type=click.Path(dir_okay=False, path_type=Path), help="A deployment file.  [default: the site's]"
    )
    log = click.option("--log-dir", metavar="DIR", help="Rank 0's files.  [default: DGPP_LOG_DIR/deployments/ID]")
    return config(log(command))


def chosen(config: Path | None, log_dir: str | None, environ: Mapping[str, str] = os.environ) -> Chosen:
    """The deployment that is named, or the site's.

    Args:
        environ: where the site's file is named, and what goes before it.

    Raises:
        ConfigError: none is named, or a file is wrong.
    """
    site = read_site(None, environ)
    if config is None and not site.cluster_config:
        raise ConfigError("nothing says which deployment", where="the command line", expected="--config FILE",
                          hint="or set DGPP_CLUSTER_CONFIG in the site file")  # fmt: skip
    path = Path(os.path.abspath(config or site.cluster_config))
    text = read_text(path, "deployment file")
    resolved = resolve(parse_deployment(parse_json(text, str(path)), str(path)), site, {})
    return _placed(site, resolved, path, text, log_dir)


def _placed(site: Site, resolved: Resolved, path: Path, text: str, log_dir: str | None) -> Chosen:
    found = places(resolved, path, log_dir)
    where = msgspec.structs.replace(resolved.paths, log_dir=str(found.log), stage_dir=found.stage)
    return Chosen(
        site=site, resolved=msgspec.structs.replace(resolved, paths=where), deployment=path, text=text, places=found
    )


def site_alone(log_dir: str | None) -> Chosen:
    """All hosts of the site, without a deployment."""
    site = read_site(None, os.environ)
    path = Path("deployment.json").absolute()
    resolved = resolve(Deployment(model="none", world_size=len(site.nodes)), site, {})
    return _placed(site, resolved, path, "", log_dir)


def outside() -> Outside:
    """This process's."""
    return Outside(
        clock=time.monotonic, time=time.time, sleep=time.sleep, nodes=make_nodes, environ=os.environ,
        say=lambda line: click.echo(line, err=True),
    )  # fmt: skip


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Alone with a deployment.

    Raises:
        LaunchError: another launcher works on it.
    """
    from filelock import FileLock, Timeout

    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / LOCK, timeout=0):
            yield
    except Timeout:
        raise LaunchError(
            "another launcher works on this deployment", where=str(folder / LOCK), hint="wait until it is done"
        ) from None
