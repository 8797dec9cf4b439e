"""Gated feed-forwards, one or a mixture of experts, that read a normed residual stream and add to it.

Every rank holds a slice of each, so that all route alike.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dgpp_core.api.model import Shard
from dgpp_core.layers.stream import Stream, all_ranks, divided_parts, divided_sum
from dgpp_core.ops.experts import Experts, combine, combine_norm
from dgpp_core.ops.linear import Linear
from dgpp_core.ops.mlp import GateUp
from dgpp_core.ops.router import Router, Routing


class FeedForward:
    """A gated feed-forward of its own, or a shared expert: ``part``.gate_up and .down.

    Args:
        limit: of what it gates, as in `dgpp_core.ops.activation.swiglu`.
    """

    def __init__(self, shard: Shard, part: str, *, limit: float | None = None) -> None:
        self.bus = shard.bus
        self.gate_up = GateUp.load(shard, f"{part}.gate_up", limit=limit)
        self.down = Linear.load(shard, f"{part}.down")

    def given(self, x: Tensor, decode: bool) -> Tensor:
        """What this rank's slice makes of ``[R, hidden]``, float32; ``decode`` as in `dgpp_core.ops.linear`."""
        return self.down.wide(self.gate_up(x, decode), decode)

    def output(self, x: Tensor, decode: bool) -> Tensor:
        """What all ranks make of it, float32 ``[R, hidden]``."""
        return divided_sum(self.down, self.bus, self.gate_up(x, decode), decode)

    def __call__(self, x: Tensor, stream: Stream, norm: Tensor, decode: bool) -> Tensor:
        """Add it to the stream; the new stream under ``norm``."""
        return stream.add(divided_parts(self.down, self.bus, self.gate_up(x, decode), decode), norm)


class Mixture:
    """Routed experts, with a shared one or without.

    Args:
        experts: ``shared``: a shared expert may be the last of them.
        shared: the shared expert where it is a parameter of its own.
    """

    def __init__(self, shard: Shard, router: Router, experts: Experts, shared: FeedForward | None = None) -> None:
        self.bus, self.router, self.experts, self.shared = shard.bus, router, experts, shared

    def output(self, x: Tensor, decode: bool) -> Tensor:
        """As `FeedForward`."""
        total = combine(*self._given(x, decode))
        return total if self.bus.world == 1 else all_ranks(self.bus, total.to(x.dtype))

    def __call__(self, x: Tensor, stream: Stream, norm: Tensor, decode: bool) -> Tensor:
        """As `FeedForward`."""
        given, routing = self._given(x, decode)
        if self.bus.world == 1:
            return combine_norm(stream.residual, given, routing, norm, stream.eps, stream.dtype)
        return stream.add(all_ranks(self.bus, combine(given, routing).to(x.dtype)).unsqueeze(0), norm)

    def _given(self, x: Tensor, decode: bool) -> tuple[Tensor, Routing]:
        """What each expert gives, as `Experts` has it."""
        routing = self.router(x, decode)
        given = self.experts(x, routing, decode)
        return (given if self.shared is None else torch.cat((given, self.shared.given(x, decode)))), routing
