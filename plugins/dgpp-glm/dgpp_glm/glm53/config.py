"""config.json of a GLM-5.3 checkpoint; GLM-5.2 and 5.1 are the same architecture."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from dgpp_core.api import end_tokens, read_section, refuse, require_values
from dgpp_glm.config import LatentConfig, check_mixture
from dgpp_glm.quantisation import read_quantisation


class Glm53Config(LatentConfig, frozen=True, kw_only=True):
    """Shapes and constants of the model; names as in config.json. One that names no latent norms' epsilon has the other
    norms'.

    Attributes:
        indexed: by layer, whether it has an indexer of its own; the others use the last one's choice.
    """

    rope_theta: float
    indexed: tuple[bool, ...]

    @property
    def index_layers(self) -> tuple[int, ...]:
        """The layers with an indexer, the draft layer as the last."""
        return (*(layer for layer, own in enumerate(self.indexed) if own), self.num_hidden_layers)


class _Json(msgspec.Struct, frozen=True, kw_only=True):
    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    intermediate_size: int
    first_k_dense_replace: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    max_position_embeddings: int
    rms_norm_eps: float
    latent_norm_eps: float | None = None
    indexer_types: list[str] | None = None
    index_topk_pattern: str | list[str] | None = None
    index_topk_freq: int = 1
    index_skip_topk_offset: int = 2
    mlp_layer_types: list[str] | None = None
    moe_layer_freq: int = 1
    n_shared_experts: int = 1
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    scoring_func: str = "sigmoid"
    topk_method: str = "noaux_tc"
    attention_bias: bool = False
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    rope_interleave: bool = True
    indexer_rope_interleave: bool = True
    num_nextn_predict_layers: int | None = None
    rope_parameters: dict[str, Any] | None = None
    eos_token_id: int | list[int] | None = None
    quantization_config: dict[str, Any] | None = None


_POSITIVE = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "q_lora_rank", "kv_lora_rank",
    "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "index_n_heads", "index_head_dim", "index_topk",
    "index_topk_freq", "intermediate_size", "moe_intermediate_size", "n_routed_experts", "num_experts_per_tok",
    "n_group", "topk_group", "max_position_embeddings", "rms_norm_eps", "routed_scaling_factor",
)  # fmt: skip
_ONLY: Mapping[str, object] = {
    "model_type": "glm_moe_dsa", "attention_bias": False, "hidden_act": "silu", "tie_word_embeddings": False,
    "n_shared_experts": 1, "num_nextn_predict_layers": 1, "moe_layer_freq": 1, "scoring_func": "sigmoid",
    "topk_method": "noaux_tc", "rope_interleave": True, "indexer_rope_interleave": True,
}  # fmt: skip
_OWN = {"full": True, "F": True, "shared": False, "S": False}


def read_config(raw: Mapping[str, Any]) -> Glm53Config:
    """Check and read a config.json.

    Raises:
        ConfigError: naming the key that is missing or whose value is not supported.
    """
    c = read_section(raw, _Json, "a GLM-5.3 model")
    require_values(c, positive=_POSITIVE, only=_ONLY)
    indexed, theta = _indexed(c), _rope(c)
    config = Glm53Config(
        vocab_size=c.vocab_size,
        max_positions=c.max_position_embeddings,
        hidden_size=c.hidden_size,
        eos_ids=end_tokens(c.eos_token_id),
        num_hidden_layers=c.num_hidden_layers,
        first_k_dense_replace=c.first_k_dense_replace,
        num_attention_heads=c.num_attention_heads,
        q_lora_rank=c.q_lora_rank,
        kv_lora_rank=c.kv_lora_rank,
        qk_nope_head_dim=c.qk_nope_head_dim,
        qk_rope_head_dim=c.qk_rope_head_dim,
        v_head_dim=c.v_head_dim,
        rope_theta=theta,
        rms_norm_eps=c.rms_norm_eps,
        latent_norm_eps=_latent_eps(c),
        index_n_heads=c.index_n_heads,
        index_head_dim=c.index_head_dim,
        index_topk=c.index_topk,
        indexed=indexed,
        intermediate_size=c.intermediate_size,
        moe_intermediate_size=c.moe_intermediate_size,
        n_routed_experts=c.n_routed_experts,
        num_experts_per_tok=c.num_experts_per_tok,
        n_group=c.n_group,
        topk_group=c.topk_group,
        norm_topk_prob=c.norm_topk_prob,
        routed_scaling_factor=c.routed_scaling_factor,
        quantisation=read_quantisation(c.quantization_config, range(c.first_k_dense_replace, c.num_hidden_layers)),
    )
    check_mixture(config)
    _check_layer_types(c)
    return config


def _latent_eps(c: _Json) -> float:
    if c.latent_norm_eps is None:
        return c.rms_norm_eps
    if not 0 < c.latent_norm_eps < math.inf:
        raise refuse("latent_norm_eps", c.latent_norm_eps, "a positive number")
    return c.latent_norm_eps


def _check_layer_types(c: _Json) -> None:
    dense = c.first_k_dense_replace
    expected = ["dense"] * dense + ["sparse"] * (c.num_hidden_layers - dense)
    if c.mlp_layer_types not in (None, expected):
        raise refuse("mlp_layer_types", c.mlp_layer_types, f"{dense} dense layers and sparse ones after them")


def _indexed(c: _Json) -> tuple[bool, ...]:
    """The list, or the pattern, or the rule by period and offset; the first layer has nothing to share."""
    name, kinds = "indexer_types", c.indexer_types
    if kinds is None:
        name, kinds = "index_topk_pattern", None if c.index_topk_pattern is None else list(c.index_topk_pattern)
    if kinds is None:
        start, period = c.index_skip_topk_offset - 1, c.index_topk_freq
        return tuple(max(layer - start, 0) % period == 0 for layer in range(c.num_hidden_layers))
    if len(kinds) != c.num_hidden_layers or any(kind not in _OWN for kind in kinds) or not _OWN[kinds[0]]:
        raise refuse(name, kinds, f"{c.num_hidden_layers} of 'full' and 'shared', the first one 'full'")
    return tuple(_OWN[kind] for kind in kinds)


def _rope(c: _Json) -> float:
    section = c.rope_parameters or {}
    if (kind := section.get("rope_type", "default")) != "default":
        raise refuse("rope_parameters.rope_type", kind, "'default'")
    theta = section.get("rope_theta")
    if isinstance(theta, bool) or not (isinstance(theta, int | float) and 0 < theta < math.inf):
        raise refuse("rope_parameters.rope_theta", theta, "a positive number")
    if c.qk_rope_head_dim % 2 or c.qk_rope_head_dim > c.index_head_dim:
        raise refuse("qk_rope_head_dim", c.qk_rope_head_dim, f"an even number, at most {c.index_head_dim}")
    return float(theta)
