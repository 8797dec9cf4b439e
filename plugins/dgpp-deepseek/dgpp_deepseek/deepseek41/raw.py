"""The keys of a DeepSeek-V4.1 config.json that are read, as they stand there."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class Scaling(msgspec.Struct, frozen=True, kw_only=True):
    """``text_config.rope_scaling``."""

    rope_type: Literal["yarn"]
    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: float


class Quantisation(msgspec.Struct, frozen=True, kw_only=True):
    """``quantization_config``; only the release's values are supported."""

    quant_method: str
    activation_scheme: str
    weight_block_size: list[int]
    scale_fmt: str
    expert_dtype: str


class Text(msgspec.Struct, frozen=True, kw_only=True):
    """``text_config``."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    rms_norm_eps: float
    hidden_act: str
    swiglu_limit: float
    max_position_embeddings: int
    rope_theta: float
    compress_rope_theta: float
    rope_scaling: Scaling | None
    sliding_window: int
    compress_ratios: list[int]
    kv_source_layer_ids: list[int]
    index_source_layer_ids: list[int]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int
    candidate_topk_blocks: int
    candidate_block_size: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    moe_intermediate_size: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    scoring_func: str
    topk_method: str
    norm_topk_prob: bool
    routed_scaling_factor: float
    engram_layer_ids: list[int]
    engram_num_embeddings: list[int]
    engram_max_ngram_size: int
    engram_vocab_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_pad_token_id: int
    engram_compressed_vocab_size: int
    num_nextn_predict_layers: int
    dspark_block_size: int
    dspark_noise_token_id: int
    dspark_target_layer_ids: list[int]
    dspark_markov_rank: int
    dspark_n_routed_experts: int
    dspark_num_experts_per_tok: int
    attention_bias: bool = False
    tie_word_embeddings: bool = False


class Root(msgspec.Struct, frozen=True, kw_only=True):
    """The whole file."""

    model_type: str
    text_config: Text
    eos_token_id: int | list[int] | None = None
    quantization_config: Quantisation | None = None
    vision_config: dict[str, Any] | None = None
