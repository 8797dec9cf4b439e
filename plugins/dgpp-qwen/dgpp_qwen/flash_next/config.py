"""config.json of a Qwen3.8-Flash-Next checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from dgpp_core.api import ModelConfig, end_tokens, read_section, refuse, require_values
from dgpp_qwen.flash_next.hashing import constants
from dgpp_qwen.flash_next.quantisation import Storages, read_storages
from dgpp_qwen.flash_next.scaling import Yarn, read_yarn
from dgpp_qwen.flash_next.vision import Encoding, read_encoding

SPARSE = ("full_attention", "indexed_attention", "qwen_sparse_attention")
"""Spellings of one layer type."""
LINEAR = "linear_attention"
MOST_EXPERTS = 1 << 17
"""Of all layers together: each takes three entries of the binding table. The release counts 25,088."""


class FlashNextConfig(ModelConfig, frozen=True, kw_only=True):
    """Shapes and constants of the text model; names as in config.json where there is one.

    Attributes:
        hidden_size: of all residual branches together, which is what the draft layer reads.
        width: of one branch; ``hidden_size`` in config.json.
        hc_count: residual branches.
        sparse: for each layer, whether it is block-sparse attention; otherwise it is a gated delta layer.
        top_blocks: index blocks that a row attends to.
        ple_layer: index of the layer before which the n-gram rows are added.
        boundary: the token across which no n-gram reaches.
        storages: how the checkpoint stores experts and table.
        encoding: the images' encoder; None without one.
        yarn: how the rotary embedding is stretched, if it is.
    """

    width: int
    hc_count: int
    hc_lowrank: int
    rms_norm_eps: float
    sparse: tuple[bool, ...]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    indexer_n_heads: int
    indexer_head_dim: int
    indexer_compress_ratio: int
    top_blocks: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    output_gate: Literal["sigmoid", "silu"]
    num_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    ple_layer: int
    ple_embed_dim: int
    ple_conv_kernel_size: int
    ngram_size: int
    heads_per_ngram: int
    ngram_vocab_size_base: int
    ngram_divisor: int
    ngram_parts: int
    seed: int
    boundary: int
    storages: Storages
    encoding: Encoding | None = None
    yarn: Yarn | None = None

    @property
    def layers(self) -> int:
        """Decoder layers, the draft layer not counted."""
        return len(self.sparse)

    @property
    def key_size(self) -> int:
        """Of all keys of a gated delta layer."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_size(self) -> int:
        """Of all values of a gated delta layer."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def channels(self) -> int:
        """Channels of a gated delta layer's convolution: queries, keys, values."""
        return 2 * self.key_size + self.value_size

    @property
    def query_size(self) -> int:
        """Of all queries of a sparse layer."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_value_size(self) -> int:
        """Of all keys, and of all values, of a sparse layer."""
        return self.num_key_value_heads * self.head_dim

    @property
    def ngram_heads(self) -> int:
        """Rows of the table that a token looks up."""
        return (self.ngram_size - 1) * self.heads_per_ngram


class _Text(msgspec.Struct, frozen=True, kw_only=True):
    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    layer_types: list[str]
    hc_count: int
    hc_lowrank: int
    rms_norm_eps: float
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_parameters: dict[str, Any]
    max_position_embeddings: int
    indexer_n_heads: int
    indexer_head_dim: int
    indexer_compress_ratio: int
    indexer_budget: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    ple_layer_ids: list[int]
    ple_embed_dim: int
    ple_conv_kernel_size: int
    ngram_size: int
    heads_per_ngram: int
    ngram_vocab_size_base: int
    make_ngram_vocab_size_divisible_by: int
    split_ngram_parts: int
    eos_token_id: int
    hidden_act: str = "silu"
    output_gate_type: str | None = None
    attention_bias: bool = False
    attention_dropout: float = 0.0
    indexer_kv_heads: int = 1
    mamba_ssm_dtype: str = "float32"
    norm_topk_prob: bool | None = None
    seed: int | None = None
    mtp_num_hidden_layers: int = 1
    mtp_use_dedicated_embeddings: bool = False
    tie_word_embeddings: bool = False


class _Json(msgspec.Struct, frozen=True, kw_only=True):
    model_type: str
    text_config: _Text
    eos_token_id: int | list[int] | None = None
    tie_word_embeddings: bool = False
    quantization_config: dict[str, Any] | None = None
    vision_config: dict[str, Any] | None = None
    language_model_only: bool = False


_POSITIVE = (
    "vocab_size", "hidden_size", "num_hidden_layers", "hc_count", "hc_lowrank", "rms_norm_eps", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "indexer_n_heads", "indexer_head_dim",
    "indexer_compress_ratio", "indexer_budget", "linear_num_key_heads", "linear_num_value_heads",
    "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim", "num_experts", "num_experts_per_tok",
    "moe_intermediate_size", "shared_expert_intermediate_size", "ple_embed_dim", "ple_conv_kernel_size",
    "heads_per_ngram", "ngram_vocab_size_base", "make_ngram_vocab_size_divisible_by", "split_ngram_parts",
)  # fmt: skip
_ONLY: Mapping[str, object] = {
    "model_type": "qwen4_exp_text", "hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0,
    "indexer_kv_heads": 1, "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1, "tie_word_embeddings": False,
    "mtp_use_dedicated_embeddings": False,
}  # fmt: skip
_DIVIDES = (
    ("num_key_value_heads", "num_attention_heads"), ("linear_num_key_heads", "linear_num_value_heads"),
    ("indexer_compress_ratio", "indexer_budget"), ("indexer_compress_ratio", "indexer_head_dim"),
)  # fmt: skip


def read_config(raw: Mapping[str, Any]) -> FlashNextConfig:
    """Check and read a config.json.

    Raises:
        ConfigError: naming the key that is missing or whose value is not supported.
    """
    whole = read_section(raw, _Json, "a Qwen3.8-Flash-Next model")
    if whole.model_type != "qwen4_exp":
        raise refuse("model_type", whole.model_type, "'qwen4_exp'")
    if whole.tie_word_embeddings:
        raise refuse("tie_word_embeddings", True, "False")
    c = whole.text_config
    _check(c)
    (theta, rotary), yarn = _rope(c), read_yarn(c.rope_parameters)
    eos = c.eos_token_id if whole.eos_token_id is None else whole.eos_token_id
    own = {name: getattr(c, name) for name in FlashNextConfig.__struct_fields__ if name in _Text.__struct_fields__}
    config = FlashNextConfig(**own | {
        "max_positions": max(c.max_position_embeddings, yarn.positions if yarn else 0),
        "hidden_size": c.hc_count * c.hidden_size,
        "eos_ids": end_tokens(eos),
        "width": c.hidden_size,
        "sparse": tuple(kind != LINEAR for kind in c.layer_types),
        "rotary_dim": rotary,
        "rope_theta": theta,
        "yarn": yarn,
        "top_blocks": c.indexer_budget // c.indexer_compress_ratio,
        "output_gate": c.output_gate_type or c.hidden_act,
        "norm_topk_prob": c.norm_topk_prob is not False,
        "ple_layer": c.ple_layer_ids[0] - 1,
        "ngram_divisor": c.make_ngram_vocab_size_divisible_by,
        "ngram_parts": c.split_ngram_parts,
        "seed": 1234 if c.seed is None else c.seed,
        "boundary": c.eos_token_id,
        "storages": read_storages(whole.quantization_config),
        "encoding": None
        if whole.vision_config is None or whole.language_model_only
        else read_encoding(raw, c.rope_parameters, width=c.hidden_size, rotary=rotary, vocab=c.vocab_size),
    })  # fmt: skip
    _check_pieces(config)
    return config


def _check(c: _Text) -> None:
    require_values(c, positive=_POSITIVE, only=_ONLY)
    for name, whole in _DIVIDES:
        if getattr(c, whole) % (value := getattr(c, name)):
            raise refuse(name, value, f"a divisor of {whole}, {getattr(c, whole)}")
    if len(c.layer_types) != c.num_hidden_layers or set(c.layer_types) - {LINEAR, *SPARSE}:
        raise refuse("layer_types", c.layer_types, f"{c.num_hidden_layers} of {LINEAR}, {', '.join(SPARSE)}")
    if c.output_gate_type not in (None, "sigmoid", "silu"):
        raise refuse("output_gate_type", c.output_gate_type, "'sigmoid' or 'silu'")
    if c.num_experts_per_tok > c.num_experts:
        raise refuse("num_experts_per_tok", c.num_experts_per_tok, f"at most {c.num_experts}")
    if c.num_hidden_layers * c.num_experts > MOST_EXPERTS:
        raise refuse("num_experts", c.num_experts, f"at most {MOST_EXPERTS} in {c.num_hidden_layers} layers")
    if len(c.ple_layer_ids) != 1 or not 1 <= c.ple_layer_ids[0] <= c.num_hidden_layers:
        raise refuse("ple_layer_ids", c.ple_layer_ids, f"one layer, 1 to {c.num_hidden_layers}")
    if c.layer_types[c.ple_layer_ids[0] - 1] != LINEAR:
        raise refuse("ple_layer_ids", c.ple_layer_ids, f"a layer of {LINEAR}")
    if c.ngram_size != 3:
        raise refuse("ngram_size", c.ngram_size, "3")
    if c.ple_embed_dim % (2 * c.heads_per_ngram):
        raise refuse("ple_embed_dim", c.ple_embed_dim, f"a multiple of {2 * c.heads_per_ngram}, the table's heads")
    if not 0 <= c.eos_token_id < c.vocab_size:
        raise refuse("eos_token_id", c.eos_token_id, "a token of the vocabulary")


def _check_pieces(c: FlashNextConfig) -> None:
    """Pieces of the table are equally high, all but the last, which has what is left: a row at least."""
    rows = constants(c).rows
    if (c.ngram_parts - 1) * -(-rows // c.ngram_parts) >= rows:
        raise refuse("split_ngram_parts", c.ngram_parts, f"equal pieces of {rows} rows, none of them empty")


def _rope(c: _Text) -> tuple[float, int]:
    """Base of the frequencies and turned dimensions; of text alone, so that its three positions are one."""
    theta = c.rope_parameters.get("rope_theta")
    if isinstance(theta, bool) or not (isinstance(theta, int | float) and 0 < theta < math.inf):
        raise refuse("rope_parameters.rope_theta", theta, "a positive number")
    factor = c.rope_parameters.get("partial_rotary_factor", 1.0)
    if isinstance(factor, bool) or not (isinstance(factor, int | float) and 0 < factor <= 1):
        raise refuse("rope_parameters.partial_rotary_factor", factor, "more than 0, at most 1")
    rotary = int(c.head_dim * factor)
    if not rotary or rotary % 2 or rotary > c.indexer_head_dim:
        raise refuse("rope_parameters.partial_rotary_factor", factor, "an even number of dimensions of both head_dim")
    return float(theta), rotary
