"""The GLM-5.3 that this package serves: the released config, a tiny one, and the release's quantisation."""

from __future__ import annotations

from typing import Any

from dgpp_core.api import ModelSpec
from dgpp_glm.config import fewer_dense
from dgpp_glm.glm53.config import read_config
from dgpp_glm.quantisation import CODEBOOK

_LAYERS = r"re:model\.layers\.(?:[3-9]|[1-6][0-9]|7[0-7])\."
_GATED = "(?:gate_proj|up_proj|down_proj)$"
_ATTENTION = r"self_attn\.(?:q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj|o_proj)"


def _group(bits: int, target: str) -> dict[str, Any]:
    weights = {
        "actorder": None, "dynamic": False, "group_size": 64, "num_bits": bits, "strategy": "group", "symmetric": True,
        "type": "int",
    }  # fmt: skip
    return {"format": "pack-quantized", "input_activations": None, "targets": [target], "weights": weights}


QUANTISED: dict[str, dict[str, Any]] = {
    "int4int8": {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "config_groups": {
            "group_0": _group(8, rf"{_LAYERS}(?:{_ATTENTION}|mlp\.shared_experts\.{_GATED[:-1]})$"),
            "group_1": _group(4, rf"{_LAYERS}mlp\.experts\.\d+\.{_GATED}"),
        },
        "ignore": [
            "lm_head", "re:.*embed_tokens.*", r"re:model\.layers\.[0-2]\..*", r"re:.*self_attn\.indexer\..*",
            "re:.*norm.*", r"re:.*mlp\.gate$",
        ],
    },
    "nf4i8": dict(CODEBOOK),
}  # fmt: skip
"""``quantization_config`` by weight format; layers 0 to 2 and the draft layer, 78, are dense."""

FULL: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "vocab_size": 154880, "hidden_size": 6144,
    "num_hidden_layers": 78, "first_k_dense_replace": 3, "moe_layer_freq": 1, "num_attention_heads": 64,
    "num_key_value_heads": 64, "q_lora_rank": 2048, "kv_lora_rank": 512, "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64, "qk_head_dim": 256, "v_head_dim": 256, "head_dim": 192, "attention_bias": False,
    "rope_interleave": True, "indexer_rope_interleave": True,
    "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"}, "rms_norm_eps": 1e-5, "index_n_heads": 32,
    "index_head_dim": 128, "index_topk": 2048, "index_topk_freq": 4, "index_skip_topk_offset": 3,
    "index_share_for_mtp_iteration": True, "intermediate_size": 12288, "moe_intermediate_size": 2048,
    "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
    "norm_topk_prob": True, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    "hidden_act": "silu", "tie_word_embeddings": False, "num_nextn_predict_layers": 1,
    "max_position_embeddings": 1048576, "eos_token_id": [154820, 154827, 154829], "pad_token_id": 154820,
    "dtype": "bfloat16", "quantization_config": QUANTISED["int4int8"],
}  # fmt: skip
TINY: dict[str, Any] = FULL | {
    "vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 4, "first_k_dense_replace": 1,
    "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16, "qk_head_dim": 48, "v_head_dim": 64, "head_dim": 32, "index_n_heads": 2,
    "index_head_dim": 32, "index_topk": 16, "index_topk_freq": 2, "index_skip_topk_offset": 2,
    "intermediate_size": 256, "moe_intermediate_size": 256, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "max_position_embeddings": 4096, "eos_token_id": [1, 2, 3], "pad_token_id": 0, "quantization_config": None,
}  # fmt: skip
SPECS = (
    ModelSpec(
        name="glm53",
        title="GLM-5.3, 743B-A40B",
        architectures=("GlmMoeDsaForCausalLM",),
        repository="HawkBearPig/GLM-5.3-Int4-Int8Mix-RTN-g64",
        read_config=read_config,
        full_config=FULL,
        tiny_config=TINY,
        formats=("bf16", *QUANTISED),
        draft_depth=5,
        quantised=QUANTISED,
        shorten=fewer_dense,
    ),
)
