"""Judging nodes: each check says what it looked at, what it found, what was expected and what to do. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from ipaddress import IPv6Address
from typing import Literal

import msgspec

from dgpp_core.api.errors import EngineError
from dgpp_core.bus.verbs.ports import Gid, choose
from dgpp_core.launch.facts import Facts, RdmaDevice, Seen

GIB = 1 << 30
LOG_BYTES = 1 * GIB
SKEW_S = 1.0
SWAP_USED = 1 * GIB
RDMA_MTU = 4200
"""Below it a port carries 2,048 bytes a packet and not 4,096."""
MEMLOCK = 1 * GIB

Level = Literal["ok", "warning", "fault"]


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the report."""

    node: str
    what: str
    level: Level
    found: str
    expected: str = ""
    next: str = ""


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What the nodes are to be fit for.

    Attributes:
        checkpoints: by node, the folder that was looked at; empty for none.
        memory: bytes that a rank needs; 0 where it is not known.
        devices, gid_indices: RDMA devices, by node, as the site names them; none takes all active ones.
        rdma: whether there has to be RDMA.
    """

    checkpoints: dict[str, str] = {}
    memory: int = 0
    devices: dict[str, tuple[str, ...]] = {}
    gid_indices: dict[str, tuple[int, ...]] = {}
    rdma: bool = False


def judge(nodes: Sequence[Seen], wanted: Wanted) -> list[Check]:
    """Every check of every node, rank 0's first, then what nodes must have in common."""
    found = [check for seen in nodes for check in _node(seen, wanted)]
    there = [seen for seen in nodes if seen.facts is not None]
    return [*found, *_together(there)]


Parts = tuple[str, bool, str, str, str, Level]
"""A check without its node: what, whether it is good, found, expected, next step, and its level if it is not good."""


def _node(seen: Seen, wanted: Wanted) -> Iterator[Check]:
    for what, good, found, expected, hint, level in _parts(seen, wanted):
        yield Check(
            node=seen.node, what=what, level="ok" if good else level, found=found, expected=expected,
            next="" if good else hint,
        )  # fmt: skip


def _parts(seen: Seen, wanted: Wanted) -> Iterator[Parts]:
    facts = seen.facts
    if facts is None:
        yield "reach", False, seen.problem, "a login without a password, python3 3.9 or newer", seen.hint, "fault"
        return
    yield "reach", True, f"{facts.system}, Python {facts.python}", "", "", "ok"
    yield from _programs(facts, wanted.checkpoints.get(seen.node, ""))
    yield from _memory(facts, wanted.memory)
    yield from _folders(facts)
    yield from _network(facts)
    yield "GPU", True, "; ".join(facts.gpus) or "none: ranks compute on the CPU", "", "", "ok"
    yield from _rdma_system(facts, wanted)
    yield from _rdma(seen.node, facts, wanted)


def _programs(facts: Facts, checkpoint: str) -> Iterator[Parts]:
    software = facts.program
    told = f"dgpp {software.dgpp_core}, torch {software.libraries.get('torch')}, Python {software.python}"
    hint = "install it for DGPP_PYTHON, or run `dgpp cluster install`"
    yield "software", not software.problem, software.problem or told, "dgpp runs", hint, "fault"
    if facts.checkpoint or checkpoint:
        found = facts.checkpoint or checkpoint
        yield "checkpoint", not facts.checkpoint, found, "complete", "dgpp cluster fetch", "fault"


def _folders(facts: Facts) -> Iterator[Parts]:
    hint = "make room, change its owner, or name another in the site file"
    for name, folder in facts.folders.items():
        found = f"{name}: {folder.free / GIB:.1f} GiB free" + ("" if folder.writable else ", cannot be written to")
        good = folder.writable and folder.free >= LOG_BYTES
        yield "folder", good, found, "writable, 1 GiB free", hint, "fault"


def _network(facts: Facts) -> Iterator[Parts]:
    found = f"{', '.join(map(str, facts.taken))} taken" if facts.taken else "free"
    hint = "stop what listens there (see `dgpp cluster status`), or choose others in the site file"
    yield "ports", not facts.taken, found, "free", hint, "warning"
    for node, way in facts.ways.items():
        speed = f"{way.speed / 1000:g} Gbit/s" if way.speed else "speed not said"
        found = f"{node} by {way.address} on {way.interface or '?'}, MTU {way.mtu}, {speed}"
        good = bool(way.address) and not way.address.startswith("127.")
        hint = "name nodes by addresses in DGPP_NODES, or mend /etc/hosts"
        expected = "a way that is not this host's own"
        yield "network", good, found if way.address else f"no way to {node}", expected, hint, "fault"


def _rdma_system(facts: Facts, wanted: Wanted) -> Iterator[Parts]:
    if not (facts.rdma or wanted.rdma):
        return
    level: Level = "fault" if wanted.rdma else "warning"
    soft, hard = facts.memlock
    found, expected = f"{_limit(soft)}, at most {_limit(hard)}", "unlimited, or at least 1 GiB"
    hint = "raise it in /etc/security/limits.conf and log in again"
    yield "memlock", soft == -1 or soft >= MEMLOCK, found, expected, hint, level
    hint = "apt install rdma-core libibverbs1 python3-pyverbs"
    yield "libibverbs", facts.verbs, "installed" if facts.verbs else "missing", "installed", hint, level


def _memory(facts: Facts, needed: int) -> Iterator[Parts]:
    memory = facts.memory
    found = (
        f"{memory.available / GIB:.1f} GiB available of {memory.total / GIB:.1f} "
        f"({memory.cached / GIB:.1f} GiB of page cache can be had back)"
    )
    expected = f"at least {needed / GIB:.1f} GiB available" if needed else ""
    yield "memory", memory.available >= needed, found, expected, "stop what uses memory, or lower kv_capacity", "fault"
    used = memory.swap - memory.swap_free
    hint = "see what was swapped out: its first use will be slow"
    yield "swap", used < SWAP_USED, f"{used / GIB:.1f} GiB used", "less than 1 GiB used", hint, "warning"


def _limit(value: int) -> str:
    return "unlimited" if value == -1 else f"{value / GIB:.2f} GiB"


def _rdma(node: str, facts: Facts, wanted: Wanted) -> Iterator[Parts]:
    named = wanted.devices.get(node, ())
    by_name = {device.name: device for device in facts.rdma}
    if not facts.rdma:
        needed = wanted.rdma or bool(named)
        hint = "load the driver, or leave DGPP_ROCE_DEVICES empty"
        found = "no RDMA device" if needed else "no RDMA device, and none is asked for"
        yield "RDMA", not needed, found, "one" if needed else "", hint, "fault"
        return
    chosen = list(named) or [device.name for device in facts.rdma if device.active]
    if not chosen:
        found = "; ".join(f"{device.name}: {_state(device)}" for device in facts.rdma)
        yield (
            "RDMA",
            False,
            found,
            "an active Ethernet port",
            "plug the cable in",
            "fault" if wanted.rdma else "warning",
        )
    indices = wanted.gid_indices.get(node, ())
    for at, name in enumerate(chosen):
        device = by_name.get(name)
        if device is None:
            yield "RDMA", False, f"no {name}, but {', '.join(by_name)}", name, "see DGPP_ROCE_DEVICES", "fault"
            continue
        yield _usable(device, indices[at] if at < len(indices) else None)
        if device.mtu:
            yield (
                "RDMA MTU", device.mtu >= RDMA_MTU, f"{name}: {device.mtu}", f"at least {RDMA_MTU} (jumbo frames)",
                f"ip link set its interface mtu 9000, on every node and the switch ({name})", "warning",
            )  # fmt: skip


def _state(device: RdmaDevice) -> str:
    return f"{device.state or 'no state'}, {device.layer or 'no link layer'}"


def _usable(device: RdmaDevice, index: int | None) -> Parts:
    """A device's state, rate and address, the latter chosen as a rank would."""
    table = [Gid(gid.index, gid.kind, IPv6Address(gid.address)) for gid in device.gids]
    if not device.active:
        return (
            "RDMA",
            False,
            f"{device.name}: {_state(device)}",
            "an active Ethernet port",
            "plug the cable in",
            "fault",
        )
    try:
        gid = choose(device.name, table, index)
    except EngineError as error:
        return "RDMA GID", False, f"{device.name}: {error.found}", error.expected, error.hint, "fault"
    numbers = [entry.index for entry in device.gids]
    holes = sorted(set(range(max(numbers) + 1)) - set(numbers))
    note = f", holes at {', '.join(map(str, holes))}" if holes else ""
    shown = gid.address.ipv4_mapped or gid.address
    found = f"{device.name}: {device.gbps:g} Gbit/s, GID {gid.index} ({gid.kind}, {shown}){note}"
    hint = "give the network card an IPv4 address: a link-local one loses packets between some nodes"
    return "RDMA", not gid.address.is_link_local, found, "RoCE v2, not link-local", hint, "warning"


def _together(nodes: Sequence[Seen]) -> Iterator[Check]:
    """What must be equal, or close, among the nodes that answered."""
    if len(nodes) < 2:
        return
    everyone = "all"
    software = {seen.node: _software(seen) for seen in nodes}
    yield _same("same software", everyone, software, "install the same release everywhere: `dgpp cluster install`")
    rates = {seen.node: _rates(seen) for seen in nodes}
    yield _same("same RDMA", everyone, rates, "name devices in the same order: DGPP_ROCE_DEVICES", "warning")
    mtus = {
        seen.node: ", ".join(sorted({str(way.mtu) for way in seen.facts.ways.values()})) for seen in nodes if seen.facts
    }
    yield _same("same MTU", everyone, mtus, "set one MTU on every interface and the switch")
    for seen in nodes:
        skew, unsure = seen.time - (seen.before + seen.after) / 2, (seen.after - seen.before) / 2
        good = abs(skew) <= SKEW_S + unsure
        yield Check(
            node=seen.node, what="clock", level="ok" if good else "warning",
            found=f"{skew:+.2f} s from rank 0's, give or take {unsure:.2f} s", expected=f"within {SKEW_S:g} s",
            next="" if good else "timedatectl set-ntp true: logs of several hosts are compared by time",
        )  # fmt: skip


def _software(seen: Seen) -> str:
    assert seen.facts is not None, "it answered"
    found = seen.facts.program
    parts = {"dgpp": found.dgpp_core, **found.plugins, **{k: v for k, v in found.libraries.items() if v}}
    return found.problem or ", ".join(f"{name} {version}" for name, version in sorted(parts.items()))


def _rates(seen: Seen) -> str:
    assert seen.facts is not None, "it answered"
    return ", ".join(f"{device.gbps:g} Gbit/s" for device in seen.facts.rdma if device.active) or "none"


def _same(what: str, node: str, values: dict[str, str], hint: str, level: Level = "fault") -> Check:
    first = next(iter(values.values()))
    others = [f"{name}: {value}" for name, value in values.items() if value != first]
    good = not others
    return Check(
        node=node, what=what, level="ok" if good else level, found=first if good else "; ".join(others),
        expected="" if good else f"as on rank 0: {first}", next="" if good else hint,
    )  # fmt: skip
