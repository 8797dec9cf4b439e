"""config.json of a GLM-5.3-Flash checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from dgpp_core.api import end_tokens, read_section, refuse, require_values
from dgpp_glm.config import LatentConfig, check_mixture
from dgpp_glm.glm53_flash.quantisation import read_storages
from dgpp_glm.glm53_flash.vision import Encoding, read_encoding

SPARSE = ("deepseek_sparse_attention", "indexed_attention")
"""Spellings of one layer type."""
LINEAR = "linear_attention"


class FlashConfig(LatentConfig, frozen=True, kw_only=True):
    """Shapes and constants of the model; names as in config.json where there is one.

    Attributes:
        sparse: for each layer, whether it is latent attention; otherwise it is delta attention.
        index_kpool: tokens of an index block.
        linear_heads, linear_width, linear_taps: of delta attention: heads, width of one, taps of the convolution.
        linear_lowest: logarithm of its strongest decay.
        hc_mult: residual streams.
        encoding: the images' encoder; None without one.
    """

    sparse: tuple[bool, ...]
    index_kpool: int
    linear_heads: int
    linear_width: int
    linear_taps: int
    linear_lowest: float
    hc_mult: int
    hc_eps: float
    hc_sinkhorn_iters: int
    encoding: Encoding | None = None

    @property
    def linear_size(self) -> int:
        """Of all queries, keys or values of a delta attention layer."""
        return self.linear_heads * self.linear_width

    @property
    def latent_layers(self) -> int:
        """Layers that keep latents, the draft layer among them."""
        return sum(self.sparse) + 1

    def place(self, layer: int) -> int:
        """Of a layer, or the draft layer, among those of its kind."""
        kinds = (*self.sparse, True)
        return sum(kind == kinds[layer] for kind in kinds[:layer])


class _Linear(msgspec.Struct, frozen=True, kw_only=True):
    num_heads: int
    head_dim: int
    short_conv_kernel_size: int
    gate_lower_bound: float
    kda_layers: tuple[int, ...] | None = None
    full_attn_layers: tuple[int, ...] | None = None


class _Text(msgspec.Struct, frozen=True, kw_only=True):
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    layer_types: tuple[str, ...]
    linear_attn_config: _Linear
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    v_head_dim: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    index_kpool: int
    hc_mult: int
    hc_eps: float
    hc_sinkhorn_iters: int
    intermediate_size: int
    first_k_dense_replace: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    swiglu_limit: float
    rms_norm_eps: float
    max_position_embeddings: int
    qk_rope_head_dim: int = 0
    mla_use_nope: bool = True
    index_kpool_compress: bool = True
    index_kpool_always_select_tail: bool = True
    indexer_types: tuple[str, ...] | None = None
    mhc: bool = True
    mlp_layer_types: tuple[str, ...] | None = None
    n_shared_experts: int = 1
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    scoring_func: str = "sigmoid"
    topk_method: str = "noaux_tc"
    attention_bias: bool = False
    hidden_act: str = "silu"
    num_nextn_predict_layers: int | None = None
    eos_token_id: int | list[int] | None = None


class _Json(msgspec.Struct, frozen=True, kw_only=True):
    model_type: str
    text_config: _Text
    tie_word_embeddings: bool = False
    quantization_config: dict[str, Any] | None = None
    vision_config: dict[str, Any] | None = None


_POSITIVE = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "q_lora_rank", "kv_lora_rank",
    "qk_nope_head_dim", "v_head_dim", "index_n_heads", "index_head_dim", "index_topk", "index_kpool", "hc_mult",
    "hc_eps", "hc_sinkhorn_iters", "intermediate_size", "moe_intermediate_size", "n_routed_experts",
    "num_experts_per_tok", "n_group", "topk_group", "routed_scaling_factor", "swiglu_limit", "rms_norm_eps",
    "max_position_embeddings",
)  # fmt: skip
_ONLY: Mapping[str, object] = {
    "qk_rope_head_dim": 0, "mla_use_nope": True, "index_kpool_compress": True, "index_kpool_always_select_tail": True,
    "mhc": True, "n_shared_experts": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "attention_bias": False,
    "hidden_act": "silu", "num_nextn_predict_layers": 1,
}  # fmt: skip


def read_config(raw: Mapping[str, Any]) -> FlashConfig:
    """Check and read a config.json.

    Raises:
        ConfigError: naming the key that is missing or whose value is not supported.
    """
    whole = read_section(raw, _Json, "a GLM-5.3-Flash model")
    if whole.model_type != "glm5_next":
        raise refuse("model_type", whole.model_type, "'glm5_next'")
    if whole.tie_word_embeddings:
        raise refuse("tie_word_embeddings", True, "False")
    c = whole.text_config
    _check(c)
    linear, mixtures = c.linear_attn_config, range(c.first_k_dense_replace, c.num_hidden_layers)
    own = {name: getattr(c, name) for name in FlashConfig.__struct_fields__ if name in _Text.__struct_fields__}
    config = FlashConfig(**own | {
        "max_positions": c.max_position_embeddings,
        "eos_ids": end_tokens(c.eos_token_id),
        "latent_norm_eps": c.rms_norm_eps,
        "sparse": tuple(kind != LINEAR for kind in c.layer_types),
        "linear_heads": linear.num_heads,
        "linear_width": linear.head_dim,
        "linear_taps": linear.short_conv_kernel_size,
        "linear_lowest": linear.gate_lower_bound,
        "quantisation": read_storages(whole.quantization_config, mixtures, c.num_hidden_layers),
        "encoding": None
        if whole.vision_config is None
        else read_encoding(raw, width=c.hidden_size, vocab=c.vocab_size),
    })  # fmt: skip
    check_mixture(config)
    return config


def _check(c: _Text) -> None:
    require_values(c, positive=_POSITIVE, only=_ONLY)
    for whole in ("index_topk", "index_head_dim"):
        if getattr(c, whole) % c.index_kpool:
            raise refuse("index_kpool", c.index_kpool, f"a divisor of {whole}, {getattr(c, whole)}")
    _check_linear(c.linear_attn_config)
    _check_layers(c)


def _check_linear(c: _Linear) -> None:
    for name in ("num_heads", "head_dim", "short_conv_kernel_size"):
        if (value := getattr(c, name)) <= 0:
            raise refuse(f"linear_attn_config.{name}", value, "a positive number")
    if not -math.inf < c.gate_lower_bound < 0:
        raise refuse("linear_attn_config.gate_lower_bound", c.gate_lower_bound, "a negative number")


def _check_layers(c: _Text) -> None:
    """Every list that says what a layer is must say the same."""
    count, dense = c.num_hidden_layers, c.first_k_dense_replace
    if len(c.layer_types) != count or set(c.layer_types) - {LINEAR, *SPARSE}:
        raise refuse("layer_types", c.layer_types, f"{count} of {LINEAR}, {', '.join(SPARSE)}")
    if c.mlp_layer_types not in (None, ("dense",) * dense + ("sparse",) * (count - dense)):
        raise refuse("mlp_layer_types", c.mlp_layer_types, f"{dense} dense layers and sparse ones after them")
    if c.indexer_types not in (None, ("full",) * count):
        raise refuse("indexer_types", c.indexer_types, f"{count} times 'full'")
    for name, sparse in (("kda_layers", False), ("full_attn_layers", True)):
        layers = tuple(i for i, kind in enumerate(c.layer_types) if (kind != LINEAR) == sparse)
        if (value := getattr(c.linear_attn_config, name)) not in (None, layers):
            raise refuse(f"linear_attn_config.{name}", value, f"{layers}, as layer_types says")
