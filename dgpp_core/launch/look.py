"""How the ranks of a world are: their processes, the service, their logs."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from dgpp_core.api.errors import LaunchError
from dgpp_core.launch.agent import processes
from dgpp_core.launch.nodes import Node, call, each
from dgpp_core.launch.outside import Outside
from dgpp_core.launch.world import Member, World, read_world

HEALTH_S = 5.0
TAIL_BYTES = 64 << 10


class Condition(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's process.

    Attributes:
        state: ``none`` was started, or ``unknown`` where its node does not answer.
        pid: 0 for none.
        others: processes that it has started.
        problem: why it is unknown.
    """

    state: Literal["none", "running", "stopped", "gone", "unknown"]
    pid: int = 0
    others: tuple[int, ...] = ()
    problem: str = ""

    @property
    def there(self) -> bool:
        """Whether the rank's own process is there."""
        return self.state in ("running", "stopped")

    @property
    def alive(self) -> bool:
        """Whether the rank, or a part of it, is there."""
        return self.there or bool(self.others)


class RankStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A line of ``dgpp cluster status``."""

    rank: int
    node: str
    state: str
    pid: int
    last: str


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """A world's status.

    Attributes:
        health: of the service: ``ok``, what it says instead, or ``no answer``.
    """

    deployment: str
    epoch: int
    url: str
    health: str
    ranks: tuple[RankStatus, ...]

    @property
    def good(self) -> bool:
        """Whether it serves with every rank."""
        return self.health == "ok" and all(rank.state == "running" for rank in self.ranks)

    @property
    def down(self) -> bool:
        """Whether nothing of it runs."""
        return all(rank.state in ("none", "gone") for rank in self.ranks)


def nodes_of(world: World, outside: Outside) -> list[Node]:
    """The nodes of its ranks."""
    return outside.nodes([member.node for member in world.members], world.ssh_user, world.ssh_config)


def condition(node: Node, member: Member) -> Condition:
    """How a rank's process is; a node that does not answer is no error."""
    try:
        return msgspec.convert(call(node, processes.state, member.folder, member.record), Condition)
    except LaunchError as error:
        return Condition(state="unknown", problem=error.line())


def conditions(nodes: Sequence[Node], members: Sequence[Member]) -> list[Condition]:
    """As `condition`, of all at the same time."""
    return each(list(zip(nodes, members, strict=True)), lambda pair: condition(*pair))


def log_tail(node: Node, member: Member, epoch: int, most: int = TAIL_BYTES) -> str:
    """The end of a rank's log, at most ``most`` bytes; empty where there is none or its node does not answer."""
    try:
        return str(call(node, processes.read_from, member.folder, member.log(epoch), 0, most)["text"])
    except LaunchError:
        return ""


def status(world: World, outside: Outside) -> Status:
    """How a world is."""
    nodes = nodes_of(world, outside)
    found = conditions(nodes, world.members)
    tails = each(list(zip(nodes, world.members, strict=True)), lambda pair: log_tail(*pair, world.epoch, 4096))
    ranks = tuple(
        RankStatus(
            rank=member.rank, node=member.node, state=seen.state, pid=seen.pid,
            last=seen.problem or (tail.strip().splitlines() or [""])[-1],
        )
        for member, seen, tail in zip(world.members, found, tails, strict=True)
    )  # fmt: skip
    return Status(deployment=world.deployment, epoch=world.epoch, url=world.url, health=health(world.url), ranks=ranks)


def health(url: str) -> str:
    """What the service at ``url`` says of itself."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url + "/health", timeout=HEALTH_S):
            return "ok"
    except urllib.error.HTTPError as error:
        return f"{error.code}: {error.read(2000).decode('utf-8', 'replace').strip()}"
    except OSError:
        return "no answer"


def recorded(root: Path) -> list[tuple[Path, World]]:
    """Every world that has a record below ``root``, with the folder of it."""
    found = [(folder, read_world(folder)) for folder in sorted(root.iterdir())] if root.is_dir() else []
    return [(folder, world) for folder, world in found if world is not None]
