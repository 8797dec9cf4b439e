"""``dgpp cluster``: worlds on several hosts."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import click

from dgpp_core.api.errors import ConfigError, LaunchError
from dgpp_core.cli import cluster_release
from dgpp_core.cli.cluster_options import chosen, cluster_options, examples, locked, outside
from dgpp_core.cli.command import GuardedGroup, json_option, print_json, print_table
from dgpp_core.cli.serving import warn_of_hidden_keys
from dgpp_core.config.site import read_site
from dgpp_core.launch.agent import processes
from dgpp_core.launch.look import Status, log_tail, nodes_of, recorded, status
from dgpp_core.launch.nodes import call
from dgpp_core.launch.programs import choose_program
from dgpp_core.launch.start import READY_S, Launch, require_here, start_or_replace
from dgpp_core.launch.stop import DRAIN_S, stop
from dgpp_core.launch.world import World, log_root, read_world

EPILOG = """\b
Examples:
  dgpp cluster up --config deploy/glm47.json
  dgpp cluster status
  dgpp cluster logs --config deploy/glm47.json --rank 1
  dgpp cluster down --config deploy/glm47.json
  dgpp cluster pack ./dist
  dgpp cluster fetch --config deploy/glm47.json

\b
Run it on rank 0's host. The hosts, logins and ports are those of the site file (.env, or DGPP_ENV_FILE); the other
hosts are reached over SSH without a password. `dgpp doctor` says whether they are fit.
"""


@click.group(cls=GuardedGroup, epilog=EPILOG)
def command() -> None:
    """Start, stop and watch a model on several hosts."""


@command.command(epilog=examples("up --config deploy/glm47.json", "up --replace --release current"))
@cluster_options
@click.option("--replace", is_flag=True, help="Stop what runs of this deployment first.")
@click.option("--release", metavar="VERSION", help="An installed release, or `current`.  [default: the deployment's]")
@click.option("--skip-preflight", is_flag=True, help="Start without looking at the nodes first.")
@click.option("--timeout", type=click.FloatRange(1), default=READY_S, show_default=True, help="Seconds until READY.")
def up(config: Path | None, log_dir: str | None, replace: bool, release: str | None, skip_preflight: bool,
       timeout: float) -> None:  # fmt: skip
    """Start every rank, and wait until the world serves."""
    what, around = chosen(config, log_dir), outside()
    warn_of_hidden_keys(what.resolved, what.site, {})
    require_here(what.resolved.nodes[0])
    launch = Launch(
        deployment=what.deployment, text=what.text, site=what.site, resolved=what.resolved, places=what.places,
        program=choose_program(what.site, what.resolved, release), preflight=not skip_preflight,
    )  # fmt: skip
    with locked(what.places.log), _interruptible():
        previous = read_world(what.places.log)
        world = start_or_replace(launch, around, previous, replace=replace, limit=timeout)
    click.echo(f"READY {world.url}/v1 (epoch {world.epoch}, {len(world.members)} ranks)")
    click.echo(f"  stop it with: dgpp cluster down --config {what.deployment}")


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM ends the start as Ctrl-C does: with what it has started."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@command.command(epilog=examples("down --config deploy/glm47.json", "down --all"))
@cluster_options
@click.option("--all", "everything", is_flag=True, help="Every deployment that this host leads.")
@click.option("--drain", type=click.FloatRange(0), default=DRAIN_S, show_default=True, help="Seconds for rank 0.")
def down(config: Path | None, log_dir: str | None, everything: bool, drain: float) -> None:
    """Stop a world; in order where it can be, for certain in any case."""
    around = outside()
    for folder, world in _worlds(config, log_dir, everything):
        with locked(folder):
            stop(world, around, drain)
        click.echo(f"{world.deployment}: down")


@command.command("status", epilog=examples("status", "status --config deploy/glm47.json --json"))
@cluster_options
@click.option("--all", "everything", is_flag=True, help="Those that are down, too.")
@json_option
def status_command(config: Path | None, log_dir: str | None, everything: bool, as_json: bool) -> None:
    """Print how the ranks are; exit 1 where a world is up in part."""
    one = config is not None
    found = [status(world, outside()) for _, world in _worlds(config, log_dir, everything or not one)]
    if not one and not everything:
        found = [seen for seen in found if not seen.down]
    if as_json:
        print_json(found)
    else:
        _print_status(found)
    if any(not seen.good and not (seen.down and not one) for seen in found):
        click.get_current_context().exit(1)


def _print_status(found: list[Status]) -> None:
    if not found:
        click.echo("nothing runs; start a world with `dgpp cluster up`")
    for seen in found:
        click.echo(f"{seen.deployment}, epoch {seen.epoch}, {seen.url}: {seen.health}")
        rows = [(str(rank.rank), rank.node, rank.state, str(rank.pid), rank.last[:160]) for rank in seen.ranks]
        print_table(("rank", "node", "state", "process", "last line"), rows)


def _worlds(config: Path | None, log_dir: str | None, everything: bool) -> list[tuple[Path, World]]:
    """The worlds that have records: the named deployment's, or all."""
    if everything:
        if config is not None or log_dir is not None:
            raise ConfigError("--all is every deployment", where="the command line", expected="--all alone")
        return recorded(log_root(read_site(None, os.environ).log_dir))
    folder = chosen(config, log_dir).places.log
    world = read_world(folder)
    if world is None:
        click.echo(f"nothing was started from it: {folder} has no record", err=True)
    return [(folder, world)] if world is not None else []


@command.command(epilog=examples("logs --config deploy/glm47.json --rank 1 --lines 200"))
@cluster_options
@click.option("--rank", type=click.IntRange(0), help="Only this one's.")
@click.option("--lines", type=click.IntRange(1), default=40, show_default=True, help="Of each.")
def logs(config: Path | None, log_dir: str | None, rank: int | None, lines: int) -> None:
    """Print the end of every rank's log, and of its fault file where it has ended with one."""
    for _, world in _worlds(config, log_dir, False):
        for node, member in zip(nodes_of(world, outside()), world.members, strict=True):
            if rank not in (None, member.rank):
                continue
            click.echo(f"== {member}: {member.folder}/{member.log(world.epoch)}")
            click.echo("\n".join(log_tail(node, member, world.epoch).splitlines()[-lines:]))
            fault = f"rank-{member.rank}.epoch-{world.epoch}.txt"
            said = str(call(node, processes.read_from, member.folder, fault, 0, 64 << 10)["text"])
            if "\nended " in said:
                click.echo(f"== {member}: {member.folder}/{fault}")
                click.echo("\n".join(said.splitlines()[:lines]))


@command.command("signal", epilog=examples("signal --config deploy/glm47.json --rank 1 --signal USR1"))
@cluster_options
@click.option("--rank", type=click.IntRange(0), required=True, help="Which.")
@click.option("--signal", "name", type=click.Choice(["INT", "TERM", "KILL", "USR1"]), required=True,
              help="USR1 makes a rank write its stacks.")  # fmt: skip
def signal_command(config: Path | None, log_dir: str | None, rank: int, name: str) -> None:
    """Send a signal to one recorded rank."""
    for _, world in _worlds(config, log_dir, False):
        if rank >= len(world.members):
            raise ConfigError("there is no such rank", where="--rank", found=str(rank))
        node, member = nodes_of(world, outside())[rank], world.members[rank]
        told = call(
            node, processes.tell, member.folder, member.record, int(signal.Signals[f"SIG{name}"]), name == "USR1"
        )
        if not told:
            raise LaunchError("the rank is gone", where=str(member), hint="see `dgpp cluster status`")
        click.echo(f"{member}: SIG{name} to {', '.join(map(str, told))}")


@command.command("resolve", epilog=examples("resolve --config deploy/glm47.json"))
@cluster_options
@json_option
def resolve_command(config: Path | None, log_dir: str | None, as_json: bool) -> None:
    """Print the deployment as it would run; no node is asked."""
    print_json(chosen(config, log_dir).resolved)


@command.command("paths", epilog=examples("paths --config deploy/glm47.json --json"))
@cluster_options
@json_option
def paths_command(config: Path | None, log_dir: str | None, as_json: bool) -> None:
    """Print where a deployment's files are."""
    what = chosen(config, log_dir)
    found = {"log": str(what.places.log), "stage": what.places.stage, "releases": what.resolved.paths.release_dir}
    if as_json:
        print_json(found)
    else:
        print_table(("what", "where"), list(found.items()))


for _command in (cluster_release.pack_command, cluster_release.install_command, cluster_release.releases_command,
                 cluster_release.fetch_command):  # fmt: skip
    command.add_command(_command)
