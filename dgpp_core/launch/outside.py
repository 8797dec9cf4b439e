"""What the launcher takes from outside, as arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from dgpp_core.launch.nodes import Node


class Outside(msgspec.Struct, frozen=True, kw_only=True):
    """Time, nodes, the environment, and somebody to talk to.

    Attributes:
        clock: seconds, monotonic.
        time: Unix time in seconds.
        nodes: from names in rank order, a login and a configuration file of ``ssh``, the nodes.
        say: takes a line for whoever watches.
    """

    clock: Callable[[], float]
    time: Callable[[], float]
    sleep: Callable[[float], None]
    nodes: Callable[[Sequence[str], str, str], list[Node]]
    environ: Mapping[str, str]
    say: Callable[[str], None]
