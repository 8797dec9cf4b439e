"""Which RDMA devices all nodes have in common."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from dgpp_core.launch.agent import inspect_node
from dgpp_core.launch.facts import RdmaDevice
from dgpp_core.launch.nodes import Node, call, each

MOST = 2


def choose_lanes(nodes: Sequence[Node]) -> tuple[tuple[str, ...], str]:
    """At most two devices that are active on every node, in order of name; and what to tell of it.

    Raises:
        LaunchError: a node cannot be reached.
    """
    found = each(nodes, lambda node: msgspec.convert(call(node, inspect_node.rdma), list[RdmaDevice]))
    return common_lanes({node.name: devices for node, devices in zip(nodes, found, strict=True)})


def common_lanes(devices: dict[str, list[RdmaDevice]]) -> tuple[tuple[str, ...], str]:
    """As `choose_lanes`, from the devices of each node."""
    active = {node: sorted(device.name for device in there if device.active) for node, there in devices.items()}
    shown = "; ".join(f"{node}: {' '.join(names) or 'none'}" for node, names in active.items())
    common = tuple(sorted(set.intersection(*(set(names) for names in active.values()))))[:MOST] if active else ()
    if common:
        return common, f"RDMA by {' '.join(common)}"
    if any(active.values()):
        return (), f"no RDMA device is active on every node ({shown}): name each node's own in DGPP_NODE_OVERRIDES"
    return (), "no node has an active RDMA device: ranks will use TCP"
