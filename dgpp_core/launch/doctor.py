"""Looking at every node, and one exchange among them. Starts nothing that stays, and writes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from dgpp_core.api.errors import LaunchError
from dgpp_core.config.addresses import Address
from dgpp_core.config.resolve import Resolved
from dgpp_core.config.site import Site
from dgpp_core.launch.agent import inspect_node, processes
from dgpp_core.launch.checks import Check, Wanted, judge
from dgpp_core.launch.exchange_terms import ExchangeOptions, Timing, Transport, expected_us
from dgpp_core.launch.facts import Facts, Seen
from dgpp_core.launch.nodes import Node, call, call_for, each, run
from dgpp_core.launch.outside import Outside
from dgpp_core.launch.world import Places, Program, expand, network_environ

LOOK_S = 40.0
EXCHANGE_S = 120.0


def look(
    nodes: Sequence[Node], names: Sequence[str], places: Places, resolved: Resolved, program: Program,
    checkpoints: Sequence[str], outside: Outside,
) -> list[Seen]:  # fmt: skip
    """Facts of every node; one that does not answer is no error.

    Args:
        checkpoints: a folder on each node, or empty.
    """

    def one(rank: int) -> Seen:
        node = nodes[rank]
        others = [name for name in names if name != names[rank]] if rank == 0 else [names[0]]
        folders = [str(places.log) if rank == 0 else places.stage, resolved.paths.resident_cache]
        ports = [resolved.ports.http, resolved.ports.journal, resolved.ports.fabric] if rank == 0 else []
        try:
            before = outside.time()
            said = call(node, processes.greet, "")
            after, home = outside.time(), str(said["home"])
            raw = call_for(
                LOOK_S, node, inspect_node.facts, folders, ports, others, program.line(home), program.environ(home),
                checkpoints[rank],
            )  # fmt: skip
        except LaunchError as error:
            return Seen(node=node.name, problem=f"{error.what}: {error.found}", hint=error.hint)
        facts = msgspec.convert(raw, Facts)
        return Seen(node=node.name, facts=facts, time=said["time"], before=before, after=after)

    return each(range(len(nodes)), one)


def wanted_of(site: Site, resolved: Resolved, memory: int, checkpoints: Mapping[str, str] | None = None) -> Wanted:
    """What the site names, by node.

    Args:
        checkpoints: as of `Wanted`.
    """
    devices = {name: tuple(env.get("DGPP_ROCE_DEVICES", "").split()) for name, env in _by_node(resolved)}
    indices = {
        name: tuple(int(word) for word in env.get("DGPP_ROCE_GID_INDICES", "").split())
        for name, env in _by_node(resolved)
    }
    return Wanted(
        checkpoints=dict(checkpoints or {}),
        memory=memory,
        devices=devices,
        gid_indices=indices,
        rdma=site.bus == "verbs" or bool(site.roce_devices),
    )


def _by_node(resolved: Resolved) -> list[tuple[str, dict[str, str]]]:
    return [(name, dict(env)) for name, env in zip(resolved.nodes, resolved.node_env, strict=True)]


def require_fit(seen: Sequence[Seen], wanted: Wanted) -> None:
    """Refuse to start on nodes that keep a world from serving.

    Raises:
        LaunchError: names every fault, and what to do.
    """
    bad = [check for check in judge(seen, wanted) if check.level == "fault" or (check.what == "ports" and check.next)]
    if bad:
        raise LaunchError(
            "the nodes are not fit for this world",
            found="; ".join(f"{check.node}: {check.what}: {check.found}" for check in bad),
            expected="; ".join(dict.fromkeys(check.expected for check in bad if check.expected)),
            hint="; ".join(dict.fromkeys(check.next for check in bad if check.next)),
        )


def exchange(
    nodes: Sequence[Node], seen: Sequence[Seen], site: Site, resolved: Resolved, program: Program, outside: Outside
) -> list[Check]:
    """Sums over all nodes at the sizes of decoding, each compared with its right value and its expected time.

    Over RDMA where the site asks for it or names its devices, else over TCP.
    """
    transport: Transport = "verbs" if site.bus == "verbs" or (site.bus == "auto" and site.roce_devices) else "gloo"
    facts = [each_seen.facts for each_seen in seen if each_seen.facts is not None]
    if any(one.taken for one in facts) or any(one.program.problem for one in facts) or len(facts) < len(nodes):
        return [Check(
            node="all", what="exchange", level="warning", found="not tried",
            expected="free ports, and dgpp on every node",
            next="see the lines above; a world that runs keeps its ports",
        )]  # fmt: skip

    def one(rank: int) -> str | LaunchError:
        try:
            return _run_rank(rank, nodes[rank], facts[rank], site, resolved, program, transport, outside)
        except LaunchError as error:
            return error

    said = each(range(len(nodes)), one)
    if faults := [
        f"{node.name}: {what.found}" for node, what in zip(nodes, said, strict=True) if not isinstance(what, str)
    ]:
        return [Check(
            node="all", what="exchange", level="fault", found="; ".join(faults), expected="right sums in time",
            next=f"see whether a firewall is between the nodes: port {resolved.ports.fabric} and those above 1024",
        )]  # fmt: skip
    return timings(msgspec.json.decode(str(said[0]), type=list[Timing]), len(nodes), _gbps(facts, transport), transport)


def timings(found: Sequence[Timing], world: int, gbps: float, transport: Transport) -> list[Check]:
    """A line a size."""
    checks = []
    for timing in found:
        limit = expected_us(timing.bytes, world, gbps, transport)
        good = timing.median <= limit
        checks.append(Check(
            node="all", what=f"exchange of {timing.bytes >> 10} KiB", level="ok" if good else "warning",
            found=f"{timing.median:.0f} us, at worst {timing.worst:.0f} us, over {transport}",
            expected=f"at most {limit:.0f} us at {gbps:g} Gbit/s",
            next="" if good else "see MTU and link speed above, and what else uses the network and the CPU",
        ))  # fmt: skip
    return checks


def _gbps(facts: Sequence[Facts], transport: Transport) -> float:
    """The slowest node's rate; 1 where it is not said."""
    if transport == "verbs":
        rates = [sum(device.gbps for device in one.rdma if device.active) for one in facts]
    else:
        rates = [way.speed / 1e3 for one in facts for way in one.ways.values()]
    return min([rate for rate in rates if rate] or [1.0])


def _run_rank(
    rank: int, node: Node, facts: Facts, site: Site, resolved: Resolved, program: Program, transport: Transport,
    outside: Outside,
) -> str:  # fmt: skip
    home = str(call(node, processes.greet, "")["home"])
    env = resolved.node_env[rank]
    options = ExchangeOptions(
        rank=rank, world=len(resolved.nodes), rendezvous=str(Address(resolved.nodes[0], resolved.ports.fabric)),
        transport=transport, devices=tuple(env.get("DGPP_ROCE_DEVICES", "").split()),
        gid_indices=tuple(int(word) for word in env.get("DGPP_ROCE_GID_INDICES", "").split()),
    )  # fmt: skip
    interface = next((way.interface for way in facts.ways.values()), "")
    environ = {**network_environ(outside.environ, interface), **program.environ(home)}
    line = [
        "env", *(f"{name}={value}" for name, value in environ.items()), expand(program.python, home), "-P", "-m",
        "dgpp_core.launch.exchange", msgspec.json.encode(options).decode(),
    ]  # fmt: skip
    return run(node, line, seconds=EXCHANGE_S).decode()
