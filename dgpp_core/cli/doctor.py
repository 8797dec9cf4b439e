"""``dgpp doctor``."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

import click
import msgspec

from dgpp_core.api.errors import DgppError
from dgpp_core.cli.cluster_options import Chosen, chosen, cluster_options, outside, site_alone
from dgpp_core.cli.command import GuardedCommand, count, json_option, print_json
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
    needs = _needs(what) if named else Needs(unknown=(_without(resolved.nodes[0]),))
    nodes = around.nodes(resolved.nodes, resolved.ssh_user, what.site.ssh_config)
    program = choose_program(what.site, resolved, release)
    on_each = _on_each(what, needs.checkpoint)
    seen = look(nodes, resolved.nodes, what.places, resolved, program, on_each, around)
    wanted = wanted_of(what.site, resolved, needs.memory, dict(zip(resolved.nodes, on_each, strict=True)))
    checks = [*needs.unknown, *judge(seen, wanted)]
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
    click.echo(", ".join(count(sum(c.level == level for c in checks), level) for level in ("fault", "warning")))


def _without(node: str) -> Check:
    return Check(
        node=node, what="deployment", level="warning", found="none is named: checkpoint and memory are not looked at",
        expected="one", next="name it with --config, or run `dgpp setup`",
    )  # fmt: skip


class Needs(msgspec.Struct, frozen=True, kw_only=True):
    """What the deployment needs of the hosts, as far as is known.

    Attributes:
        checkpoint: its folder on this host; empty where there is none to look at.
        memory: bytes of one rank; 0 where it is not known.
        unknown: a check for each of them that cannot be looked at.
    """

    checkpoint: str = ""
    memory: int = 0
    unknown: tuple[Check, ...] = ()


def _needs(what: Chosen) -> Needs:
    from dgpp_core.checkpoint.locate import packaged, present
    from dgpp_core.cli.serving import choose, converted_cache, plan_of
    from dgpp_core.host.loading import load_plugins

    node, unknown = what.resolved.nodes[0], []
    try:
        model = choose(load_plugins(environ=os.environ), os.environ, plugin=None, config=what.deployment,
                       checkpoint=None)  # fmt: skip
    except DgppError as error:
        return Needs(unknown=(_unknown(node, "checkpoint", error), _unknown(node, "memory plan", error)))
    spec = model.model.spec
    folder = present(spec, model.source, cache=converted_cache(os.environ), hub=model.hub)
    if folder is None:
        fetch = f"dgpp cluster fetch --config {shlex.quote(str(what.deployment))}"
        if packaged(spec, model.source):
            found, expected = "in an installed package, not converted yet", "converted, which the first start does too"
        else:
            found, expected = f"{model.source or spec.repository} is not here", "complete"
        unknown.append(Check(node=node, what="checkpoint", level="warning", found=found, expected=expected, next=fetch))
    try:
        memory = plan_of(model, 1 << 60).total
    except DgppError as error:
        memory = 0
        unknown.append(_unknown(node, "memory plan", error))
    return Needs(checkpoint=str(folder or ""), memory=memory, unknown=tuple(unknown))


def _unknown(node: str, what: str, error: DgppError) -> Check:
    return Check(
        node=node, what=what, level="warning", found=f"not looked at: {error.line()}", expected="known",
        next=error.hint or "mend what is named above",
    )  # fmt: skip


def _on_each(what: Chosen, checkpoint: str) -> list[str]:
    """The checkpoint's folder on every node."""
    from dgpp_core.cli.cluster_release import on_node

    if not checkpoint:
        return [""] * what.resolved.world
    return [
        checkpoint if rank == 0 else on_node(Path(checkpoint), "~", env)
        for rank, env in enumerate(what.resolved.node_env)
    ]
