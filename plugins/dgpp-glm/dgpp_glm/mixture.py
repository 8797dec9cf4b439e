"""The mixture of experts of GLM models."""

from __future__ import annotations

from dgpp_core.api import Shard
from dgpp_core.layers.feed_forward import FeedForward, Mixture
from dgpp_core.ops.experts import Experts
from dgpp_core.ops.router import Router
from dgpp_glm.config import GlmConfig


def mixture(config: GlmConfig, shard: Shard, part: str, *, shared_apart: bool = False) -> Mixture:
    """That of one layer; ``shared_apart`` as in `dgpp_glm.tables.Tables`."""
    router = Router(
        shard.weights.matrix(f"{part}.router"),
        shard.weights.take(f"{part}.router_bias"),
        config.num_experts_per_tok,
        groups=config.n_group,
        top_groups=config.topk_group,
        normalise=config.norm_topk_prob,
        scale=config.routed_scaling_factor,
    )
    count, limit = config.n_routed_experts, config.swiglu_limit
    experts = Experts.load(shard, f"{part}.experts", experts=count, shared=not shared_apart, limit=limit)
    shared = FeedForward(shard, f"{part}.shared", limit=limit) if shared_apart else None
    return Mixture(shard, router, experts, shared)
