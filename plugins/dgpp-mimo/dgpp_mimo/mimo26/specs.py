"""The MiMo-V2.6-Flash that this package serves: the released config, a tiny one, and the release's quantisation."""

from __future__ import annotations

from typing import Any

from dgpp_core.api import ModelSpec
from dgpp_mimo.mimo26.config import read_config

_LAYERS = 48
_WINDOWED = [int(layer % 6 != 5 and layer != 0) for layer in range(_LAYERS)]

QUANTISED: dict[str, dict[str, Any]] = {
    "mxfp4": {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        "store_dtype": "mxfp4", "mxfp4_block_size": 32,
        "ignored_layers": [
            *(f"model.layers.{layer}.self_attn.o_proj" for layer in range(_LAYERS)), "model.decoder.self_attn.o_proj",
        ],
    },
}  # fmt: skip
"""``quantization_config`` by weight format: experts in MXFP4, fused projections and dense feed-forwards in FP8."""

FULL: dict[str, Any] = {
    "architectures": ["MiMoV2ForCausalLM"], "model_type": "mimo_v2", "vocab_size": 152576, "hidden_size": 4096,
    "num_hidden_layers": _LAYERS, "hybrid_layer_pattern": _WINDOWED, "moe_layer_freq": [0] + [1] * (_LAYERS - 1),
    "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 192, "v_head_dim": 128,
    "swa_num_attention_heads": 64, "swa_num_key_value_heads": 8, "swa_head_dim": 192, "swa_v_head_dim": 128,
    "rope_theta": 10000000, "swa_rope_theta": 10000.0, "partial_rotary_factor": 0.334, "sliding_window": 128,
    "sliding_window_size": 128, "attention_chunk_size": 128, "add_swa_attention_sink_bias": True,
    "add_full_attention_sink_bias": False, "attention_value_scale": 0.707, "attention_projection_layout": "fused_qkv",
    "attention_bias": False, "intermediate_size": 16384, "moe_intermediate_size": 2048, "hidden_act": "silu",
    "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": None, "scoring_func": "sigmoid",
    "topk_method": "noaux_tc", "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": None,
    "layernorm_epsilon": 1e-6, "max_position_embeddings": 1048576, "tie_word_embeddings": False,
    "num_nextn_predict_layers": 3, "eos_token_id": 151645, "pad_token_id": 151643, "dtype": "bfloat16",
    "quantization_config": QUANTISED["mxfp4"],
}  # fmt: skip
TINY: dict[str, Any] = FULL | {
    "vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 3, "hybrid_layer_pattern": [0, 1, 0],
    "moe_layer_freq": [0, 1, 1], "num_attention_heads": 8, "head_dim": 48, "v_head_dim": 32,
    "swa_num_attention_heads": 8, "swa_head_dim": 48, "swa_v_head_dim": 32, "sliding_window": 16,
    "sliding_window_size": 16, "attention_chunk_size": 16, "intermediate_size": 512, "moe_intermediate_size": 128,
    "n_routed_experts": 8, "num_experts_per_tok": 3, "max_position_embeddings": 4096, "eos_token_id": [1, 2],
    "pad_token_id": 0, "quantization_config": None,
}  # fmt: skip
SPECS = (
    ModelSpec(
        name="mimo26-flash",
        title="MiMo-V2.6-Flash, 309B-A15B",
        architectures=("MiMoV2ForCausalLM",),
        repository="XiaomiMiMo/MiMo-V2.6-Flash-RL",
        read_config=read_config,
        full_config=FULL,
        tiny_config=TINY,
        formats=("bf16", *QUANTISED),
        draft_depth=3,
        quantised=QUANTISED,
    ),
)
