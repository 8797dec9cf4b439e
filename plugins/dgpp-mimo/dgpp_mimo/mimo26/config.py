"""config.json of a MiMo-V2.6 checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from dgpp_core.api import ModelConfig, end_tokens, read_section, refuse, require_values
from dgpp_mimo.quantisation import Quantisation, read_quantisation


class Heads(msgspec.Struct, frozen=True, kw_only=True):
    """Shapes of one kind of attention.

    Attributes:
        count, kv: query heads and key/value heads.
        width, value_width: of a query or key, and of a value.
        rotary_dim: the first dimensions of queries and keys, turned by the position.
        theta: base of the frequencies.
    """

    count: int
    kv: int
    width: int
    value_width: int
    rotary_dim: int
    theta: float

    @property
    def rows(self) -> int:
        """Output rows of the fused projection."""
        return self.count * self.width + self.kv * (self.width + self.value_width)


class Mimo26Config(ModelConfig, frozen=True, kw_only=True):
    """Shapes and constants of the model.

    Attributes:
        windowed: for each layer whether it attends to a window, else to everything before it.
        sparse: for each layer whether it has experts, else a dense feed-forward.
        whole, window: heads of the two kinds.
        chunks: runs of whole heads that the fused projection's rows are stored in; each is queries, keys and values.
        window_rows: rows that a window layer's row attends to, itself included.
        value_scale: applied to every value.
        quantisation: how the checkpoint stores its matrices.
    """

    windowed: tuple[bool, ...]
    sparse: tuple[bool, ...]
    whole: Heads
    window: Heads
    chunks: int
    window_rows: int
    value_scale: float
    layernorm_epsilon: float
    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    quantisation: Quantisation


class _Json(msgspec.Struct, frozen=True, kw_only=True):
    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    hybrid_layer_pattern: list[int]
    moe_layer_freq: list[int]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    v_head_dim: int
    swa_num_attention_heads: int
    swa_num_key_value_heads: int
    swa_head_dim: int
    swa_v_head_dim: int
    rope_theta: float
    swa_rope_theta: float
    partial_rotary_factor: float
    sliding_window: int
    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    layernorm_epsilon: float
    max_position_embeddings: int
    attention_value_scale: float
    num_nextn_predict_layers: int
    sliding_window_size: int | None = None
    attention_chunk_size: int | None = None
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    add_swa_attention_sink_bias: bool = False
    add_full_attention_sink_bias: bool = False
    attention_projection_layout: str = "split"
    attention_bias: bool = False
    hidden_act: str = "silu"
    n_shared_experts: int | None = None
    scoring_func: str = "sigmoid"
    topk_method: str = "noaux_tc"
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float | None = None
    tie_word_embeddings: bool = False
    eos_token_id: int | list[int] | None = None
    quantization_config: dict[str, Any] | None = None


_POSITIVE = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "v_head_dim", "swa_num_attention_heads", "swa_num_key_value_heads", "swa_head_dim", "swa_v_head_dim", "rope_theta",
    "swa_rope_theta", "partial_rotary_factor", "sliding_window", "intermediate_size", "moe_intermediate_size",
    "n_routed_experts", "num_experts_per_tok", "layernorm_epsilon", "max_position_embeddings", "attention_value_scale",
)  # fmt: skip
MOST_EXPERTS = 1 << 17
"""Of all layers together: each takes three entries of the binding table. MiMo-V2.6-Flash counts 12,032."""

BLOCKS = 3
"""Draft blocks of a release."""

_ONLY: Mapping[str, tuple[object, ...]] = {
    "model_type": ("mimo_v2",), "add_swa_attention_sink_bias": (True,), "add_full_attention_sink_bias": (False,),
    "attention_projection_layout": ("fused_qkv",), "attention_bias": (False,), "hidden_act": ("silu",),
    "n_shared_experts": (None, 0), "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "n_group": (1,),
    "topk_group": (1,), "norm_topk_prob": (True,), "routed_scaling_factor": (None, 1.0), "rope_scaling": (None,),
    "tie_word_embeddings": (False,), "num_nextn_predict_layers": (BLOCKS,),
}  # fmt: skip


def read_config(raw: Mapping[str, Any]) -> Mimo26Config:
    """Check and read a config.json.

    Raises:
        ConfigError: naming the key that is missing or whose value is not supported.
    """
    c = read_section(raw, _Json, "a MiMo-V2.6 model")
    _check(c)
    return Mimo26Config(
        vocab_size=c.vocab_size,
        max_positions=c.max_position_embeddings,
        hidden_size=c.hidden_size,
        eos_ids=end_tokens(c.eos_token_id),
        windowed=tuple(map(bool, c.hybrid_layer_pattern)),
        sparse=tuple(map(bool, c.moe_layer_freq)),
        whole=_heads(c, "", c.rope_theta),
        window=_heads(c, "swa_", c.swa_rope_theta),
        chunks=c.num_key_value_heads,
        window_rows=c.sliding_window,
        value_scale=c.attention_value_scale,
        layernorm_epsilon=c.layernorm_epsilon,
        intermediate_size=c.intermediate_size,
        moe_intermediate_size=c.moe_intermediate_size,
        n_routed_experts=c.n_routed_experts,
        num_experts_per_tok=c.num_experts_per_tok,
        quantisation=read_quantisation(c.quantization_config),
    )


def _check(c: _Json) -> None:
    require_values(c, positive=_POSITIVE)
    for name, only in _ONLY.items():
        if (value := getattr(c, name)) not in only:
            raise refuse(name, value, " or ".join(map(repr, only)))
    for name in ("hybrid_layer_pattern", "moe_layer_freq"):
        flags = getattr(c, name)
        if len(flags) != c.num_hidden_layers or not set(flags) <= {0, 1}:
            raise refuse(name, flags, f"{c.num_hidden_layers} entries, each 0 or 1")
    if 0 not in c.hybrid_layer_pattern:
        raise refuse("hybrid_layer_pattern", c.hybrid_layer_pattern, "a layer of global attention, 0")
    for name in ("sliding_window_size", "attention_chunk_size"):
        if (value := getattr(c, name)) not in (None, c.sliding_window):
            raise refuse(name, value, f"{c.sliding_window}, as sliding_window is")
    if c.num_experts_per_tok > c.n_routed_experts:
        raise refuse("num_experts_per_tok", c.num_experts_per_tok, f"at most {c.n_routed_experts}")
    if c.num_hidden_layers * c.n_routed_experts > MOST_EXPERTS:
        raise refuse("n_routed_experts", c.n_routed_experts, f"at most {MOST_EXPERTS} in {c.num_hidden_layers} layers")
    nested = c.rope_parameters or {}
    for name in ("rope_type", "type"):
        if (kind := nested.get(name, "default")) != "default":
            raise refuse(f"rope_parameters.{name}", kind, "'default'")
    for name in ("rope_theta", "partial_rotary_factor"):
        if (value := nested.get(name, getattr(c, name))) != getattr(c, name):
            raise refuse(f"rope_parameters.{name}", value, f"{getattr(c, name)}, as it is outside")


def _heads(c: _Json, kind: str, theta: float) -> Heads:
    """Heads of a kind, ``swa_`` or none; both must come in as many runs as there are global key/value heads."""
    chunks = c.num_key_value_heads
    count, kv = getattr(c, f"{kind}num_attention_heads"), getattr(c, f"{kind}num_key_value_heads")
    if count % kv:
        raise refuse(f"{kind}num_key_value_heads", kv, f"a divisor of {count}")
    if kv % chunks:
        raise refuse(f"{kind}num_key_value_heads", kv, f"a multiple of num_key_value_heads, {chunks}")
    width = getattr(c, f"{kind}head_dim")
    rotary = int(width * c.partial_rotary_factor)
    if not 0 < rotary <= width or rotary % 2:
        raise refuse("partial_rotary_factor", c.partial_rotary_factor, f"an even number of a head's {width} dimensions")
    value_width = getattr(c, f"{kind}v_head_dim")
    return Heads(count=count, kv=kv, width=width, value_width=value_width, rotary_dim=rotary, theta=theta)
