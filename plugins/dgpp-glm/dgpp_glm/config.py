"""What config.json files of GLM models have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dgpp_core.api import ModelConfig, refuse
from dgpp_glm.quantisation import Quantisation

MOST_EXPERTS = 1 << 17
"""Of all layers together: each takes three entries of the binding table. GLM-4.7 counts 14,720."""


class GlmConfig(ModelConfig, frozen=True, kw_only=True):
    """Shapes and constants of a decoder with a mixture of experts; names as in config.json.

    Attributes:
        swiglu_limit: of what feed-forwards gate, as in `dgpp_core.ops.activation.swiglu`.
        quantisation: how the checkpoint stores its matrices.
    """

    num_hidden_layers: int
    first_k_dense_replace: int
    rms_norm_eps: float
    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    swiglu_limit: float | None = None
    quantisation: Quantisation


class LatentConfig(GlmConfig, frozen=True, kw_only=True):
    """The same of a model with latent attention, whose rows choose their keys; names as in config.json.

    Attributes:
        latent_norm_eps: of the norms of query and key/value latents.
    """

    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    latent_norm_eps: float
    index_n_heads: int
    index_head_dim: int
    index_topk: int


def fewer_dense(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """See `dgpp_core.api.ModelSpec.shorten`: no more layers without experts than there are layers."""
    dense = min(config["first_k_dense_replace"], config["num_hidden_layers"])
    return {**config, "first_k_dense_replace": dense}


def check_mixture(c: GlmConfig) -> None:
    """Refuse counts of layers and experts that do not belong together.

    Raises:
        ConfigError: naming the key.
    """
    if not 0 <= c.first_k_dense_replace <= c.num_hidden_layers:
        raise refuse("first_k_dense_replace", c.first_k_dense_replace, f"0 to {c.num_hidden_layers}")
    if c.num_hidden_layers * c.n_routed_experts > MOST_EXPERTS:
        raise refuse("n_routed_experts", c.n_routed_experts, f"at most {MOST_EXPERTS} in {c.num_hidden_layers} layers")
    if c.n_routed_experts % c.n_group:
        raise refuse("n_group", c.n_group, f"a divisor of {c.n_routed_experts}")
    if c.topk_group > c.n_group:
        raise refuse("topk_group", c.topk_group, f"at most {c.n_group}")
    eligible = c.n_routed_experts // c.n_group * c.topk_group
    if c.num_experts_per_tok > eligible:
        raise refuse("num_experts_per_tok", c.num_experts_per_tok, f"at most {eligible}")
