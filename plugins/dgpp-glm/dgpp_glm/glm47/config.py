"""config.json of a GLM-4.7 checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from dgpp_core.api import end_tokens, read_section, refuse, require_values
from dgpp_glm.config import GlmConfig, check_mixture
from dgpp_glm.quantisation import read_quantisation


class Glm47Config(GlmConfig, frozen=True, kw_only=True):
    """Shapes and constants of the model; names as in config.json.

    Attributes:
        rotary_dim: dimensions of a head that are turned by its position.
    """

    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float


class _Json(msgspec.Struct, frozen=True, kw_only=True):
    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    first_k_dense_replace: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    max_position_embeddings: int
    rms_norm_eps: float
    n_shared_experts: int = 1
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    attention_bias: bool = False
    use_qk_norm: bool = False
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    num_nextn_predict_layers: int | None = None
    rope_theta: float | None = None
    partial_rotary_factor: float | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    eos_token_id: int | list[int] | None = None
    quantization_config: dict[str, Any] | None = None


_POSITIVE = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size", "moe_intermediate_size", "n_routed_experts", "num_experts_per_tok", "n_group", "topk_group",
    "max_position_embeddings", "rms_norm_eps", "routed_scaling_factor",
)  # fmt: skip
_ONLY: Mapping[str, object] = {
    "model_type": "glm4_moe", "attention_bias": True, "use_qk_norm": True, "hidden_act": "silu",
    "tie_word_embeddings": False, "n_shared_experts": 1, "num_nextn_predict_layers": 1,
}  # fmt: skip


def read_config(raw: Mapping[str, Any]) -> Glm47Config:
    """Check and read a config.json.

    Raises:
        ConfigError: naming the key that is missing or whose value is not supported.
    """
    c = read_section(raw, _Json, "a GLM-4.7 model")
    require_values(c, positive=_POSITIVE, only=_ONLY)
    if c.num_attention_heads % c.num_key_value_heads:
        raise refuse("num_key_value_heads", c.num_key_value_heads, f"a divisor of {c.num_attention_heads}")
    theta, rotary = _rope(c)
    config = Glm47Config(
        vocab_size=c.vocab_size,
        max_positions=c.max_position_embeddings,
        hidden_size=c.hidden_size,
        eos_ids=end_tokens(c.eos_token_id),
        num_hidden_layers=c.num_hidden_layers,
        first_k_dense_replace=c.first_k_dense_replace,
        num_attention_heads=c.num_attention_heads,
        num_key_value_heads=c.num_key_value_heads,
        head_dim=c.head_dim,
        rotary_dim=rotary,
        rope_theta=theta,
        rms_norm_eps=c.rms_norm_eps,
        intermediate_size=c.intermediate_size,
        moe_intermediate_size=c.moe_intermediate_size,
        n_routed_experts=c.n_routed_experts,
        num_experts_per_tok=c.num_experts_per_tok,
        n_group=c.n_group,
        topk_group=c.topk_group,
        norm_topk_prob=c.norm_topk_prob,
        routed_scaling_factor=c.routed_scaling_factor,
        quantisation=read_quantisation(c.quantization_config),
    )
    check_mixture(config)
    return config


def _rope(c: _Json) -> tuple[float, int]:
    """Base of the frequencies and turned dimensions, from the nested or the flat keys."""
    if c.rope_scaling and not {"rope_type", "type"} & c.rope_scaling.keys():
        raise refuse("rope_scaling", c.rope_scaling, "a section that names its rope_type, or null")
    nested = c.rope_parameters or {}
    for name, section in (("rope_parameters", nested), ("rope_scaling", c.rope_scaling or {})):
        kind = section.get("rope_type", section.get("type", "default"))
        if kind != "default":
            raise refuse(f"{name}.rope_type", kind, "'default'")
    theta = _flat_or_nested("rope_theta", c.rope_theta, nested)
    factor = _flat_or_nested("partial_rotary_factor", c.partial_rotary_factor, nested)
    if not factor <= 1:
        raise refuse("partial_rotary_factor", factor, "more than 0, at most 1")
    rotary = int(c.head_dim * factor)
    if not rotary or rotary % 2:
        raise refuse("partial_rotary_factor", factor, f"an even number of the {c.head_dim} dimensions of a head")
    return theta, rotary


def _flat_or_nested(name: str, flat: float | None, nested: Mapping[str, Any]) -> float:
    """A positive number that older configs have at the top and newer ones in ``rope_parameters``; in both, the same."""
    inner = nested.get(name)
    value = inner if flat is None else flat
    if isinstance(value, bool) or not (isinstance(value, int | float) and 0 < value < math.inf):
        raise refuse(name, value, "a positive number")
    if inner is not None and inner != value:
        raise refuse(f"rope_parameters.{name}", inner, f"{value}, as it is outside")
    return float(value)
