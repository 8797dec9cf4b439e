"""The DeepSeek-V4.1-Flash that this package serves: the released config, a tiny one, the release's quantisation."""

from __future__ import annotations

from typing import Any

from dgpp_core.api import ModelSpec
from dgpp_deepseek.deepseek41.config import read_config
from dgpp_deepseek.deepseek41.shorter import shorten

QUANTISED: dict[str, dict[str, Any]] = {
    "fp8-fp4": {
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32], "scale_fmt": "ue8m0",
        "expert_dtype": "fp4",
    },
}  # fmt: skip
"""``quantization_config`` by weight format."""

_TEXT: dict[str, Any] = {
    "model_type": "deepseek_v41_text", "vocab_size": 129280, "hidden_size": 5120, "moe_intermediate_size": 2304,
    "num_hidden_layers": 40, "num_attention_heads": 64, "num_key_value_heads": 1, "head_dim": 512,
    "qk_rope_head_dim": 64, "q_lora_rank": 1280, "o_lora_rank": 1024, "o_groups": 8, "hidden_act": "silu",
    "swiglu_limit": 10.0, "rms_norm_eps": 1e-20, "attention_bias": False, "tie_word_embeddings": False,
    "max_position_embeddings": 1048576, "rope_theta": 10000,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 65536,
    },
    "n_routed_experts": 384, "n_shared_experts": 1, "num_experts_per_tok": 6, "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc", "norm_topk_prob": True, "routed_scaling_factor": 1.5, "sliding_window": 128,
    "compress_ratios": [0, 0, *[2] * 18, *[1] * 20, 0, 0, 0], "compress_rope_theta": 160000,
    "kv_source_layer_ids": [2, 8, 14, 20], "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
    "index_n_heads": 32, "index_head_dim": 128, "index_topk": 512, "candidate_source_layer_id": 20,
    "candidate_topk_blocks": 2048, "candidate_block_size": 8, "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6,
    "engram_layer_ids": [1, 14], "engram_num_embeddings": [384006168, 384016682], "engram_max_ngram_size": 4,
    "engram_vocab_size": 16000000, "engram_n_heads": 8, "engram_head_dim": 256, "engram_pad_token_id": 2,
    "engram_compressed_vocab_size": 99092, "num_nextn_predict_layers": 3, "dspark_block_size": 5,
    "dspark_noise_token_id": 128799, "dspark_target_layer_ids": [37, 38, 39], "dspark_markov_rank": 256,
    "dspark_n_routed_experts": 128, "dspark_num_experts_per_tok": 3,
}  # fmt: skip
FULL: dict[str, Any] = {
    "architectures": ["DeepseekV41ForCausalLM"], "model_type": "deepseek_v41", "dtype": "bfloat16", "bos_token_id": 0,
    "eos_token_id": 1, "pad_token_id": 2, "text_config": _TEXT, "quantization_config": QUANTISED["fp8-fp4"],
}  # fmt: skip
_TINY_TEXT: dict[str, Any] = _TEXT | {
    "vocab_size": 512, "hidden_size": 64, "moe_intermediate_size": 64, "num_hidden_layers": 5,
    "num_attention_heads": 8, "head_dim": 64, "qk_rope_head_dim": 16, "q_lora_rank": 32, "o_lora_rank": 64,
    "o_groups": 4, "swiglu_limit": 1.5, "max_position_embeddings": 4096,
    "rope_scaling": _TEXT["rope_scaling"] | {"original_max_position_embeddings": 256},
    "n_routed_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16, "compress_ratios": [0, 2, 1, 1, 1, 0, 0],
    "kv_source_layer_ids": [1, 2], "index_source_layer_ids": [1, 2, 4], "index_n_heads": 4, "index_head_dim": 64,
    "index_topk": 8, "candidate_source_layer_id": 2, "candidate_topk_blocks": 5, "candidate_block_size": 4,
    "hc_sinkhorn_iters": 3, "engram_layer_ids": [0, 1], "engram_num_embeddings": [6568, 7464],
    "engram_vocab_size": 500, "engram_n_heads": 4, "engram_head_dim": 32, "engram_compressed_vocab_size": 300,
    "num_nextn_predict_layers": 2, "dspark_noise_token_id": 510, "dspark_target_layer_ids": [2, 3, 4],
    "dspark_markov_rank": 32, "dspark_n_routed_experts": 4, "dspark_num_experts_per_tok": 2,
}  # fmt: skip
TINY: dict[str, Any] = FULL | {"text_config": _TINY_TEXT, "quantization_config": None}
SPECS = (
    ModelSpec(
        name="deepseek41-flash",
        title="DeepSeek-V4.1-Flash, 552B-A8B to A16B and n-gram tables of 196B, text",
        architectures=("DeepseekV41ForCausalLM",),
        repository="deepseek-ai/DeepSeek-V4.1-Flash",
        read_config=read_config,
        full_config=FULL,
        tiny_config=TINY,
        formats=("bf16", *QUANTISED),
        draft_depth=5,
        quantised=QUANTISED,
        shorten=shorten,
    ),
)
