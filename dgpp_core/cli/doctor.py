"""``dgpp doctor``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import click

from dgpp_core.api.errors import DgppError
from dgpp_core.cli.cluster_options import Chosen, chosen, cluster_options, outside, site_alone
from dgpp_core.cli.command import GuardedCommand, json_option, print_json
from dgpp_core.config.site import read_site
from dgpp_core.launch.checks import Check, judge
from dgpp_core.launch.doctor import exchange, look, wanted_of
from dgpp_core.launch.programs import choose_program

EPILOG = """\b
Examples:
  dgpp doctor
  dgpp doctor --config deploy/glm47.json --json
  dgpp doctor --no-exchange          # while a world runs

\b
Nothing is changed, and nothing stays. Exit code 1 where something keeps a world from serving; a warning does not.
"""


@click.command(cls=GuardedCommand, epilog=EPILOG)
@cluster_options
@click.option("--release", metavar="VERSION", help="The release to look at.  [default: the deployment's]")
@click.option("--no-exchange", is_flag=True, help="Exchange nothing among the hosts.")
@json_option
def command(config: Path | None, log_dir: str | None, release: str | None, no_exchange: bool, as_json: bool) -> None:
    """Say whether the hosts of the site are fit to serve."""
    named = config is not None or bool(read_site(None, os.environ).cluster_config)
    what, around = chosen(config, log_dir) if named else site_alone(log_dir), outside()
    resolved = what.resolved
    checkpoint, memory = _needs(what) if named else ("", 0)
    nodes = around.nodes(resolved.nodes, resolved.ssh_user, what.site.ssh_config)
    program = choose_program(what.site, resolved, release)
    seen = look(nodes, resolved.nodes, what.places, resolved, program, _on_each(what, checkpoint), around)
    checks = judge(seen, wanted_of(what.site, resolved, memory))
    if len(nodes) > 1 and not no_exchange:
        checks += exchange(nodes, seen, what.site, resolved, program, around)
    if as_json:
        print_json(checks)
    else:
        _print(checks)
    if any(check.level == "fault" for check in checks):
        click.get_current_context().exit(1)


def _print(checks: Sequence[Check]) -> None:
    words = {"ok": "ok", "warning": "WARN", "fault": "FAULT"}
    wide, what = (max(len(getattr(check, name)) for check in checks) for name in ("node", "what"))
    for check in checks:
        expected = f" (expected: {check.expected})" if check.expected and not check.next else ""
        click.echo(f"{words[check.level]:5}  {check.node:{wide}}  {check.what:{what}}  {check.found}{expected}")
        if check.next:
            click.echo(f"       expected: {check.expected}\n       next step: {check.next}")
    faults, warnings = (sum(check.level == level for check in checks) for level in ("fault", "warning"))
    click.echo(f"{faults} faults, {warnings} warnings")


def _needs(what: Chosen) -> tuple[str, int]:
    """Where the deployment's checkpoint is on this host, and how many bytes a rank will need, as far as is known."""
    from dgpp_core.cli.serving import checkpoint_folder, choose, plan_of
    from dgpp_core.host.loading import load_plugins

    try:
        model = choose(load_plugins(environ=os.environ), os.environ, plugin=None, config=what.deployment,
                       checkpoint=None)  # fmt: skip
        folder = str(checkpoint_folder(model.source or model.model.spec.repository, model.hub))
    except DgppError as error:
        click.echo(f"warning: {error.line()}", err=True)
        return "", 0
    try:
        return folder, plan_of(model, 1 << 60).total
    except DgppError as error:
        click.echo(f"warning: how much memory is needed is not known: {error.line()}", err=True)
        return folder, 0


def _on_each(what: Chosen, checkpoint: str) -> list[str]:
    """The checkpoint's folder on every node."""
    from dgpp_core.cli.cluster_release import on_node

    if not checkpoint:
        return [""] * what.resolved.world
    return [
        checkpoint if rank == 0 else on_node(Path(checkpoint), "~", env)
        for rank, env in enumerate(what.resolved.node_env)
    ]
