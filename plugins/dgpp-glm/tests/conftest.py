"""A tiny GLM-4.7 of transformers, and its checkpoint as it is released: by expert, with the draft layer, quantised."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from dgpp_core.formats.codec import encode

LAYERS, EXPERTS, INNER = 3, 8, 64
CONFIG: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": INNER,
    "num_hidden_layers": LAYERS, "first_k_dense_replace": 1, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 32, "attention_bias": True, "use_qk_norm": True, "n_routed_experts": EXPERTS, "num_experts_per_tok": 3,
    "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 2048, "tie_word_embeddings": False, "pad_token_id": 0,
    "eos_token_id": [1, 2, 3], "hidden_act": "silu", "num_nextn_predict_layers": 1,
}  # fmt: skip
FLAT_ROPE = {"rope_theta": 10000.0, "rope_scaling": None, "partial_rotary_factor": 0.5}
NESTED_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
NVFP4 = {
    "quant_method": "modelopt", "quant_algo": "NVFP4", "producer": {"name": "modelopt", "version": "0.41.0"},
    "config_groups": {"group_0": {
        "input_activations": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
        "weights": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}, "targets": ["Linear"],
    }},
    "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
    "ignore": [*(f"model.layers.{i}.self_attn*" for i in range(LAYERS)), f"model.layers.{LAYERS}*", "lm_head"],
}  # fmt: skip
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


class Pair:
    """The class's model and its MTP runner, with random weights that move every path; ``views`` are those weights.

    Args:
        overrides: of the config.
    """

    def __init__(self, seed: int, **overrides: Any) -> None:
        from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

        layers = pytest.importorskip("transformers.modeling_layers")
        if not hasattr(layers, "MtpModel"):
            pytest.skip("this transformers has no multi-token-prediction runner")
        self.config = CONFIG | overrides
        config = Glm4MoeConfig(**self.config, **NESTED_ROPE)
        config._attn_implementation = "eager"
        self.model: Any = Glm4MoeForCausalLM(config).eval()
        self.mtp: Any = layers.MtpModel(self.model, 1).eval()
        self.views = released_names(self.model, self.mtp)
        source = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, view in self.views.items():
                view.copy_(random_weight(name, view, source))

    @torch.inference_mode()
    def hidden(self, tokens: list[int]) -> Tensor:
        """Hidden states after the last norm, ``[T, hidden]``."""
        hidden: Tensor = self.model.model(torch.tensor([tokens])).last_hidden_state[0]
        return hidden

    @torch.inference_mode()
    def drafted(self, hidden: Tensor, following: list[int], first: int = 0) -> Tensor:
        """The draft layer's rows, normed; the first one has position ``first``."""
        from transformers.masking_utils import create_causal_mask

        embedded = self.model.model.embed_tokens(torch.tensor([following]))
        positions = torch.arange(first, first + len(following))[None]
        mask = create_causal_mask(self.model.config, embedded, None, None, position_ids=positions)
        angles = self.model.model.rotary_emb(embedded, positions)
        out: Tensor = self.mtp.layers[0](embedded, hidden[None], angles, mask, positions, None)
        return out[0]


def random_weight(name: str, like: Tensor, source: torch.Generator) -> Tensor:
    """Large enough that nothing ties and every term counts; rounded to bfloat16, save for the router's bias."""
    noise = torch.randn(like.shape, generator=source)
    if name.endswith("e_score_correction_bias"):
        return 0.3 * noise
    if "norm" in name:
        return (1 + 0.2 * noise).bfloat16().float()
    scale = 0.2 if name.endswith(".bias") else 0.5 if "embed" in name else like.shape[-1] ** -0.5
    return (scale * noise).bfloat16().float()


def released_names(model: Any, mtp: Any) -> dict[str, Tensor]:
    """The weights by their names in a release, as views: the class keeps experts fused and the draft layer apart."""
    names: dict[str, Tensor] = {}
    draft = {f"model.layers.{LAYERS}.{name}": value for name, value in mtp.layers[0].state_dict().items()}
    for name, value in {**model.state_dict(), **draft}.items():
        name = name.replace(".mtp_block.", ".").replace(".post_norm.", ".shared_head.norm.")
        stem, _, part = name.rpartition(".")
        if part == "gate_up_proj":
            for e in range(EXPERTS):
                names[f"{stem}.{e}.gate_proj.weight"], names[f"{stem}.{e}.up_proj.weight"] = value[e].split(INNER)
        elif part == "down_proj":
            names |= {f"{stem}.{e}.down_proj.weight": value[e] for e in range(EXPERTS)}
        else:
            names[name] = value
    return names


def decoded(storage: str, parts: dict[str, Tensor], shape: torch.Size) -> Tensor:
    """The values that a stored matrix stands for, element by element of its definition."""
    if storage == "fp8_block":
        rows, columns = (torch.arange(size) // 128 for size in shape)
        return parts["weight"].float() * parts["weight_scale_inv"].float()[rows][:, columns]
    half = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = torch.stack((parts["weight"] & 15, parts["weight"] >> 4), -1).view(shape).long()
    groups = torch.arange(shape[1]) // 16
    values = torch.where(codes < 8, half[codes % 8], -half[codes % 8]) * parts["weight_scale"].float()[:, groups]
    return values * parts["weight_scale_2"].float()


def quantised_in(fmt: str, name: str) -> str:
    """Storage of a tensor in a release of the format, by the release's own rule."""
    stem = name.removesuffix(".weight").rpartition(".")[2]
    if fmt == "nvfp4" and stem in PROJECTIONS and f"layers.{LAYERS}." not in name:
        return "nvfp4"
    if fmt == "fp8" and name.endswith("_proj.weight") and stem != "eh_proj":
        return "fp8_block"
    return ""


def write_release(pair: Pair, folder: Path, fmt: str) -> None:
    """Write the checkpoint, and move the class's model onto the values that it now stands for."""
    tensors: dict[str, Tensor] = {}
    for name, view in pair.views.items():
        stem = name.removesuffix(".weight")
        if storage := quantised_in(fmt, name):
            parts = encode(storage, view.detach().clone())
            tensors |= {f"{stem}.{suffix}": part for suffix, part in parts.items()}
            with torch.no_grad():
                view.copy_(decoded(storage, parts, view.shape))
            if fmt == "nvfp4":
                tensors[f"{stem}.input_scale"] = torch.tensor(1.0)
        else:
            tensors[name] = view.clone() if name.endswith("e_score_correction_bias") else view.bfloat16()
    draft = f"model.layers.{LAYERS}."
    tensors[f"{draft}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{draft}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    section = {"bf16": {}, "fp8": {"quantization_config": FP8}, "nvfp4": {"quantization_config": NVFP4}}[fmt]
    if fmt == "nvfp4":
        for i in range(LAYERS):
            tensors[f"model.layers.{i}.self_attn.k_proj.k_scale"] = torch.tensor(1.0)
            tensors[f"model.layers.{i}.self_attn.v_proj.v_scale"] = torch.tensor(1.0)
    apart = {name: tensors.pop(name).contiguous() for name in [n for n in tensors if n.startswith(draft)]}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    save_file(apart, folder / "mtp.safetensors")
    names = {"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "dtype": "bfloat16"}
    rope = NESTED_ROPE if fmt == "fp8" else FLAT_ROPE
    (folder / "config.json").write_text(json.dumps({**names, **pair.config, **rope, **section}))


@pytest.fixture(scope="session")
def release(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Pair, Path]]:
    """Makes a pair and its checkpoint folder: ``release("nvfp4", n_group=2)``."""
    made: dict[str, tuple[Pair, Path]] = {}

    def make(fmt: str, **overrides: Any) -> tuple[Pair, Path]:
        key = f"{fmt}-{overrides}"
        if key not in made:
            pair, folder = Pair(21, **overrides), tmp_path_factory.mktemp(fmt)
            write_release(pair, folder, fmt)
            made[key] = pair, folder
        return made[key]

    return make
