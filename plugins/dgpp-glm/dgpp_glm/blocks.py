"""What the decoder layers of GLM models have in common: the stream that runs through them, and their feed-forwards."""

from __future__ import annotations

import torch
from torch import Tensor

from dgpp_core.api import Bus, Shard
from dgpp_core.ops.experts import Experts, combine, combine_norm
from dgpp_core.ops.linear import Linear
from dgpp_core.ops.mlp import GateUp
from dgpp_core.ops.residual import residual_norm
from dgpp_core.ops.router import Router, Routing
from dgpp_glm.config import GlmConfig


class Stream:
    """The residual stream of a step.

    Args:
        residual: float32 ``[R, hidden]``; updated in place.
        dtype: of what sublayers read.
    """

    def __init__(self, residual: Tensor, eps: float, dtype: torch.dtype) -> None:
        self.residual, self.eps, self.dtype = residual, eps, dtype

    def add(self, parts: Tensor, norm: Tensor) -> Tensor:
        """Add parts ``[S, R, hidden]`` in order; the new stream under ``norm``."""
        return residual_norm(self.residual, parts, norm, self.eps, self.dtype)


def _folded(bus: Bus, partial: Tensor) -> Tensor:
    """The sum of all ranks' ``[R, hidden]`` as the one part of it."""
    return bus.all_reduce(partial).float().unsqueeze(0)


def parts(linear: Linear, bus: Bus, x: Tensor, decode: bool) -> Tensor:
    """What a product whose inputs are divided among the ranks adds to the stream, ``[S, R, hidden]``."""
    return linear.partials(x, decode) if bus.world == 1 else _folded(bus, linear(x, decode))


def whole(linear: Linear, bus: Bus, x: Tensor, decode: bool) -> Tensor:
    """The same in one piece, float32 ``[R, hidden]``."""
    return linear.wide(x, decode) if bus.world == 1 else _folded(bus, linear(x, decode))[0]


class FeedForward:
    """A gated feed-forward: that of the first layers, or a shared expert. ``limit``: of what it gates."""

    def __init__(self, shard: Shard, part: str, *, limit: float | None = None) -> None:
        self.bus = shard.bus
        self.gate_up = GateUp.load(shard, f"{part}.gate_up", limit=limit)
        self.down = Linear.load(shard, f"{part}.down")

    def given(self, x: Tensor, decode: bool) -> Tensor:
        """What it makes of ``[R, hidden]`` with this rank's part of it, float32."""
        return self.down.wide(self.gate_up(x, decode), decode)

    def output(self, x: Tensor, decode: bool) -> Tensor:
        """What all ranks make of it, float32 ``[R, hidden]``."""
        return whole(self.down, self.bus, self.gate_up(x, decode), decode)

    def __call__(self, x: Tensor, stream: Stream, norm: Tensor, decode: bool) -> Tensor:
        """Add it to the stream; the new stream under ``norm``."""
        return stream.add(parts(self.down, self.bus, self.gate_up(x, decode), decode), norm)


class Mixture:
    """Routed experts and the shared one. Every rank holds a slice of each, so that all route alike.

    Args:
        shared_apart: as in `dgpp_glm.tables.Tables`.
    """

    def __init__(self, config: GlmConfig, shard: Shard, part: str, *, shared_apart: bool = False) -> None:
        self.bus = shard.bus
        self.router = Router(
            shard.weights.matrix(f"{part}.router"),
            shard.weights.take(f"{part}.router_bias"),
            config.num_experts_per_tok,
            groups=config.n_group,
            top_groups=config.topk_group,
            normalise=config.norm_topk_prob,
            scale=config.routed_scaling_factor,
        )
        limit = config.swiglu_limit
        self.experts = Experts.load(
            shard, f"{part}.experts", experts=config.n_routed_experts, shared=not shared_apart, limit=limit
        )
        self.shared = FeedForward(shard, f"{part}.shared", limit=limit) if shared_apart else None

    def _given(self, x: Tensor, decode: bool) -> tuple[Tensor, Routing]:
        routing = self.router(x, decode)
        given = self.experts(x, routing, decode)
        if self.shared is not None:
            given = torch.cat((given, self.shared.given(x, decode)))
        return given, routing

    def output(self, x: Tensor, decode: bool) -> Tensor:
        """As `FeedForward`."""
        total = combine(*self._given(x, decode))
        return total if self.bus.world == 1 else _folded(self.bus, total.to(x.dtype))[0]

    def __call__(self, x: Tensor, stream: Stream, norm: Tensor, decode: bool) -> Tensor:
        """As `FeedForward`."""
        given, routing = self._given(x, decode)
        if self.bus.world == 1:
            return combine_norm(stream.residual, given, routing, norm, stream.eps, stream.dtype)
        return stream.add(_folded(self.bus, combine(given, routing).to(x.dtype)), norm)
