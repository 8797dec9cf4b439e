"""Starting a world: files to every node, a process a rank, and waiting until rank 0 says READY."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from dgpp_core.api.errors import ConfigError, LaunchError
from dgpp_core.config.addresses import Address, everywhere, reachable
from dgpp_core.config.resolve import Resolved
from dgpp_core.config.rules import RULES
from dgpp_core.config.site import Site
from dgpp_core.launch.agent import processes
from dgpp_core.launch.agent.processes import MARK
from dgpp_core.launch.doctor import look, require_fit, wanted_of
from dgpp_core.launch.look import conditions, log_tail, nodes_of
from dgpp_core.launch.nodes import Node, call, each
from dgpp_core.launch.outside import Outside
from dgpp_core.launch.stop import stop
from dgpp_core.launch.world import (
    DEPLOYMENT,
    EPOCH,
    RESOLVED,
    WORLD,
    Member,
    Places,
    Program,
    World,
    deployment_id,
    expand,
    rank_environ,
    rank_line,
    site_of,
)

READY_S = 600.0
POLL_S = 0.5
KEPT = 40
"""Logs and fault files of earlier starts that stay in a folder."""
LAST_LINES = 12


class Greeting(msgspec.Struct, frozen=True, kw_only=True):
    """What `processes.greet` says."""

    home: str
    python: str
    time: float
    address: str
    interface: str


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be started.

    Attributes:
        deployment: the file; ``text`` is what it says.
        preflight: look at the nodes first.
    """

    deployment: Path
    text: str
    site: Site
    resolved: Resolved
    places: Places
    program: Program
    preflight: bool = True


def greet_all(nodes: Sequence[Node], names: Sequence[str]) -> list[Greeting]:
    """Who the nodes are, and by which interface each reaches rank 0, and rank 0 the next.

    Raises:
        LaunchError: one cannot be reached, or rank 0's name means something else on it than rank 0.
    """
    towards = [names[1] if len(names) > 1 else "", *[names[0]] * (len(names) - 1)]
    found = each(list(zip(nodes, towards, strict=True)), lambda pair: call(pair[0], processes.greet, pair[1]))
    greetings = [msgspec.convert(said, Greeting) for said in found]
    for name, other, said in zip(names, towards, greetings, strict=True):
        if other and (said.address.startswith("127.") or said.address == "::1"):
            raise LaunchError(
                "a node takes the name of another for its own", where=name, found=f"{other} is {said.address} there",
                hint="name nodes by addresses in DGPP_NODES, or mend /etc/hosts",
            )  # fmt: skip
    return greetings


def members_of(launch: Launch, greetings: Sequence[Greeting]) -> tuple[Member, ...]:
    """The ranks, each with its folder."""
    stage = launch.places.stage
    return tuple(
        Member(rank=rank, node=node, folder=expand(stage, said.home) if rank else str(launch.places.log))
        for rank, (node, said) in enumerate(zip(launch.resolved.nodes, greetings, strict=True))
    )


def require_here(node: str) -> None:
    """Refuse a launcher that does not run on rank 0's host.

    Raises:
        ConfigError: the first node is another host.
    """
    if not processes.is_here(node):
        raise ConfigError(
            "the launcher runs on rank 0's host", where="DGPP_NODES", found=f"{node}, which is no address of this host",
            expected="this host first", hint="run it there, or check that the name resolves",
        )  # fmt: skip


def require_free(nodes: Sequence[Node], members: Sequence[Member]) -> None:
    """Refuse to start where a recorded rank is alive, or cannot be asked.

    Raises:
        LaunchError: names the ranks.
    """
    found = conditions(nodes, members)
    alive = [f"{member}: process {seen.pid}" for member, seen in zip(members, found, strict=True) if seen.alive]
    unknown = [
        f"{member}: {seen.problem}" for member, seen in zip(members, found, strict=True) if seen.state == "unknown"
    ]
    if alive or unknown:
        raise LaunchError(
            "ranks of this deployment run already" if alive else "a node cannot be asked what runs on it",
            found="; ".join(alive + unknown), hint="`dgpp cluster down`, or `up --replace`" if alive else "",
        )  # fmt: skip


def next_epoch(folder: Path) -> int:
    """A number that no start of this deployment has had; written down before it is used.

    Raises:
        LaunchError: the counter is damaged: a number used twice would let ranks of an old start in.
    """
    try:
        last = int((folder / EPOCH).read_text())
    except FileNotFoundError:
        last = 0
    except ValueError as error:
        raise LaunchError(
            "the counter of starts is damaged", where=str(folder / EPOCH), found=str(error), expected="a number",
            hint="write one there that is higher than any epoch in this folder's file names",
        ) from None  # fmt: skip
    processes.write(str(folder), EPOCH, f"{last + 1}\n")
    return last + 1


def start(launch: Launch, outside: Outside, *, limit: float = READY_S) -> World:
    """Start every rank and wait until the world serves. A start that fails ends what it started, and nothing else.

    Args:
        limit: seconds until READY.

    Raises:
        LaunchError: a node cannot be used, a rank has ended, or it takes too long; has the end of the rank's log.
    """
    resolved = launch.resolved
    nodes = outside.nodes(resolved.nodes, resolved.ssh_user, launch.site.ssh_config)
    greetings = greet_all(nodes, resolved.nodes)
    members = members_of(launch, greetings)
    require_free(nodes, members)
    if launch.preflight:
        outside.say("looking at the nodes")
        names = [""] * len(nodes)
        seen = look(nodes, resolved.nodes, launch.places, resolved, launch.program, names, outside)
        require_fit(seen, wanted_of(launch.site, resolved, 0))
    folder = launch.places.log
    world = World(
        deployment=str(launch.deployment.absolute()), epoch=next_epoch(folder), started=outside.time(),
        program=launch.program, url=_url(resolved), ssh_user=resolved.ssh_user, ssh_config=launch.site.ssh_config,
        members=members,
    )  # fmt: skip
    processes.write(str(folder), RESOLVED, msgspec.json.format(msgspec.json.encode(resolved)).decode())
    processes.write(str(folder), WORLD, msgspec.json.encode(world).decode())
    try:
        _start_ranks(launch, world, nodes, greetings, outside)
        _wait_ready(world, nodes, outside, limit)
    except BaseException:
        outside.say("the start has failed: its ranks are ended")
        try:
            stop(world, outside, drain=5.0)
        except LaunchError as error:  # what failed first is what is raised
            outside.say(str(error))
        raise
    return world


def _url(resolved: Resolved) -> str:
    return f"http://{Address(reachable(resolved.http.bind_host), resolved.http.port)}"


def _start_ranks(
    launch: Launch, world: World, nodes: Sequence[Node], greetings: Sequence[Greeting], outside: Outside
) -> None:
    resolved, at = launch.resolved, everywhere(launch.resolved.nodes[0])
    without = [*RULES, MARK]

    def start_rank(rank: int) -> None:
        node, said, member = nodes[rank], greetings[rank], world.members[rank]
        environ = {
            **rank_environ(outside.environ, member, said.interface), **world.program.environ(said.home),
            MARK: f"{deployment_id(launch.deployment)}.{world.epoch}.{rank}",
        }  # fmt: skip
        line = [*world.program.line(said.home), *rank_line(resolved, member, world.epoch, at)]
        files = {DEPLOYMENT: launch.text, member.site: site_of(launch.site, resolved, rank)}
        log = member.log(world.epoch)
        pid = call(node, processes.start, member.folder, member.record, log, line, environ, without, files, KEPT)
        outside.say(f"{member}: started, process {pid}, log {member.folder}/{log}")

    each(range(resolved.world), start_rank)


def _wait_ready(world: World, nodes: Sequence[Node], outside: Outside, limit: float) -> None:
    """Follow every rank's log until rank 0's says READY."""
    end, offsets = outside.clock() + limit, [0] * len(nodes)

    def follow(rank: int) -> list[str]:
        node, member = nodes[rank], world.members[rank]
        more = call(
            node, processes.follow, member.folder, member.record, member.log(world.epoch), offsets[rank], 1 << 20
        )
        offsets[rank] = more["offset"]
        lines: list[str] = more["text"].splitlines()
        ready = any(line.startswith("READY ") for line in lines)
        if more["state"] in ("none", "gone") and not ready:
            raise _ended(node, member, world.epoch)
        for line in lines:
            outside.say(f"{member}: {line}")
        return lines

    while True:
        said = each(range(len(nodes)), follow)
        if any(line.startswith("READY ") for line in said[0]):
            return
        if outside.clock() > end:
            raise LaunchError(
                f"the world is not ready after {limit:g} s", where=world.deployment,
                hint="see the logs with `dgpp cluster logs`; --timeout allows more",
            )  # fmt: skip
        outside.sleep(POLL_S)


def _ended(node: Node, member: Member, epoch: int) -> LaunchError:
    last = "\n    ".join(log_tail(node, member, epoch).strip().splitlines()[-LAST_LINES:])
    return LaunchError(
        f"{member} has ended before the world was ready", where=f"{member.node}:{member.folder}/{member.log(epoch)}",
        found=last or "nothing in its log", expected="READY",
    )  # fmt: skip


def start_or_replace(launch: Launch, outside: Outside, previous: World | None, *, replace: bool, limit: float) -> World:
    """As `start`, having stopped ``previous`` where ``replace`` says so.

    Raises:
        LaunchError: as `start`; or the stop was not confirmed.
    """
    if replace and previous is not None:
        stop(previous, outside)
    if previous is not None and not replace:
        require_free(nodes_of(previous, outside), previous.members)
    return start(launch, outside, limit=limit)
