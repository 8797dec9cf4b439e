"""A tiny Qwen3.8-Flash-Next of transformers, and its checkpoint as it is released: by expert, by shard, quantised."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from dgpp_core.formats.codec import encode

LAYERS, EXPERTS, PARTS, RATIO, KEPT = 4, 8, 4, 4, 4
TEXT: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": LAYERS, "rms_norm_eps": 1e-6,
    "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"],
    "max_position_embeddings": 2048, "tie_word_embeddings": False, "hc_count": 4, "hc_lowrank": 16,
    "linear_num_key_heads": 4, "linear_num_value_heads": 12, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4, "output_gate_type": "sigmoid", "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 64, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 32,
    "indexer_budget": KEPT * RATIO, "indexer_compress_ratio": RATIO, "num_experts": EXPERTS, "num_experts_per_tok": 3,
    "moe_intermediate_size": 192, "shared_expert_intermediate_size": 64, "norm_topk_prob": True, "ple_layer_ids": [2],
    "ple_embed_dim": 64, "ple_conv_kernel_size": 4, "ngram_size": 3, "heads_per_ngram": 2,
    "ngram_vocab_size_base": 500, "make_ngram_vocab_size_divisible_by": 128, "split_ngram_parts": PARTS, "seed": 1234,
    "bos_token_id": 2, "eos_token_id": 2,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25, "mrope_section": [3, 3, 2],
        "mrope_interleaved": True,
    },
}  # fmt: skip
SECTIONS: dict[str, dict[str, Any] | None] = {
    "bf16": None,
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
            "modules_to_not_convert": ["lm_head"], "modules_to_convert": ["ple.ple_embedding.ngram_embedding"]},
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4", "config_groups": {"group_0": {
        "weights": {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False}, "targets": ["Linear"]}}},
}  # fmt: skip


def rotate_front(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the first dimensions of ``[T, ..., D]`` by the class's doubled angles ``[T, turned]``."""
    turned = cos.shape[-1]
    shape = (len(x), *[1] * (x.dim() - 2), turned)
    a, b = x[..., : turned // 2], x[..., turned // 2 : turned]
    front = x[..., :turned] * cos.view(shape) + torch.cat((-b, a), -1) * sin.view(shape)
    return torch.cat((front, x[..., turned:]), -1)


def ordered_choice(indexer: Any, x: Tensor, angles: tuple[Tensor, Tensor], mask: Any, cache: Any) -> Tensor:
    """The class's choice of keys with its open point settled: equal scores go to the lower block."""
    assert cache is None or not cache.get_seq_length()
    (cos, sin), made, wide = [a[0] for a in angles], indexer.index_qk_proj(x)[0], indexer.index_head_dim
    t = len(made)
    q = rotate_front(indexer.q_layernorm(made[:, :-wide].view(t, -1, wide)), cos, sin)
    pooled = made[: t // RATIO * RATIO, -wide:].view(-1, RATIO, wide).mean(1)
    first = slice(0, t // RATIO * RATIO, RATIO)
    pooled = rotate_front(indexer.k_layernorm(pooled), cos[first], sin[first])
    scores = torch.einsum("thd,bd->thb", q, pooled).relu().sum(1)
    seen = torch.zeros(t, t, dtype=torch.bool)
    for row in range(t):
        done = (row + 1) // RATIO
        for block in sorted(range(done), key=lambda b: (-scores[row, b].item(), b))[:KEPT]:
            seen[row, RATIO * block : RATIO * (block + 1)] = True
        seen[row, RATIO * done : row + 1] = True
    return seen[None, None]


class Pair:
    """The class's model, and a draft layer put together from its parts; random weights that move every path."""

    def __init__(self, seed: int) -> None:
        modeling = pytest.importorskip("transformers.models.qwen4_exp.modeling_qwen4_exp")
        from transformers import Qwen4ExpConfig

        self.modeling = modeling
        vision = {
            "depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "patch_size": 16,
            "temporal_patch_size": 2, "spatial_merge_size": 2, "in_channels": 3, "out_hidden_size": 64,
            "num_position_embeddings": 16,
        }  # fmt: skip
        config = Qwen4ExpConfig(text_config=copy.deepcopy(TEXT), vision_config=vision, tie_word_embeddings=False)
        config._attn_implementation = config.text_config._attn_implementation = "eager"
        self.model: Any = modeling.Qwen4ExpForConditionalGeneration(config).eval()
        self.text = self.model.model.language_model
        self.mtp = self._draft_layer(config.text_config)
        for module in (*self.model.modules(), *self.mtp.modules()):
            if type(module) is modeling.Qwen4ExpTextQSAIndexer:
                module.forward = ordered_choice.__get__(module)
        source = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, value in (*self.model.named_parameters(), *self.mtp.named_parameters()):
                value.copy_(random_weight(name, value, source))

    def _draft_layer(self, text: Any) -> Any:
        text = copy.deepcopy(text)
        text.layer_types, text.num_hidden_layers, text.ple_layer_ids = ["indexed_attention"], 1, []
        text._attn_implementation = "eager"
        mtp, size, eps = nn.Module(), text.hidden_size, text.rms_norm_eps
        mtp.pre_fc_norm_embedding = self.modeling.Qwen4ExpTextRMSNorm(size, eps=eps)
        mtp.pre_fc_norm_hidden = self.modeling.Qwen4ExpTextRMSNorm(size * text.hc_count, eps=eps)
        mtp.fc_embedding, mtp.fc_hidden = nn.Linear(size, size, bias=False), nn.Linear(size, size, bias=False)
        mtp.layers = nn.ModuleList([self.modeling.Qwen4ExpTextDecoderLayer(text, 0)])
        mtp.hyper_connection_mixer = self.modeling.Qwen4ExpTextGatedResidual(text, use_combine=False)
        return mtp.eval()

    @torch.inference_mode()
    def run(self, tokens: list[int]) -> tuple[Tensor, Tensor]:
        """All branches after the last layer ``[T, branches * width]``, and logits."""
        found: list[Tensor] = []
        hook = self.text.hyper_connection_mixer.register_forward_pre_hook(lambda _, given: found.append(given[0][0]))
        try:
            logits = self.model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
        finally:
            hook.remove()
        return found[0].clone(), logits

    @torch.inference_mode()
    def drafted(self, branches: Tensor, following: list[int]) -> tuple[Tensor, Tensor]:
        """The draft layer's branches of all rows, and its logits."""
        embedded, size = self.text.embed_tokens(torch.tensor([following])), TEXT["hidden_size"]
        positions = torch.arange(len(following)).view(1, 1, -1).expand(3, 1, -1)
        own = self.mtp.fc_hidden(self.mtp.pre_fc_norm_hidden(branches[None]).unflatten(-1, (-1, size)))
        own = own + self.mtp.fc_embedding(self.mtp.pre_fc_norm_embedding(embedded)).unsqueeze(-2)
        causal = torch.full((len(following),) * 2, torch.finfo(torch.float32).min).triu(1)[None, None]
        angles = self.text.rotary_emb(embedded, positions)
        out = self.mtp.layers[0](own.flatten(-2), position_embeddings=angles, attention_mask=causal)
        return out[0], self.model.lm_head(self.mtp.hyper_connection_mixer(out))[0]


def random_weight(name: str, like: Tensor, source: torch.Generator) -> Tensor:
    """Every parameter away from where it would do nothing; rounded to bfloat16."""
    noise = torch.randn(like.shape, generator=source)
    if name.endswith("A_log"):
        value = 0.8 * noise - 0.5
    elif name.endswith("dt_bias"):
        value = 0.8 * noise - 1.5
    elif name.endswith("linear_attn.norm.weight"):
        value = 1 + 0.2 * noise
    elif "norm" in name.split(".")[-2]:
        value = 0.2 * noise
    elif "embed" in name:
        value = 0.5 * noise
    else:
        gain = 2.0 if name.endswith(("mlp.gate.weight", "mix_weight_up.weight", "inject_weight.weight")) else 1.0
        value = gain * noise * like.shape[-1] ** -0.5
    return value.bfloat16().float()


def released(pair: Pair) -> dict[str, Tensor]:
    """The weights by their names in a release, as views: the class keeps experts fused and the table whole."""
    names: dict[str, Tensor] = {}
    for name, value in (pair.model.state_dict() | {f"mtp.{n}": v for n, v in pair.mtp.state_dict().items()}).items():
        stem, _, part = name.rpartition(".")
        if part == "gate_up_proj":
            for e in range(EXPERTS):
                names[f"{stem}.{e}.gate_proj.weight"], names[f"{stem}.{e}.up_proj.weight"] = value[e].chunk(2)
        elif part == "down_proj":
            names |= {f"{stem}.{e}.down_proj.weight": value[e] for e in range(EXPERTS)}
        elif name.endswith("ngram_embedding.weight"):
            names |= {f"{stem}.shard_{s}.weight": rows for s, rows in enumerate(value.chunk(PARTS))}
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


@torch.no_grad()
def write_release(pair: Pair, folder: Path, fmt: str) -> None:
    """Write the checkpoint, and move the class's model onto the values that it now stands for."""
    tensors: dict[str, Tensor] = {}
    scale = torch.tensor([0.0078]).bfloat16()
    for name, view in released(pair).items():
        stem = name.removesuffix(".weight")
        if ".mlp.experts." in name and fmt != "bf16":
            storage = "nvfp4" if fmt == "nvfp4" and not name.startswith("mtp.") else "fp8_block"
            parts = encode(storage, view.detach().clone())
            if storage == "fp8_block":
                parts["weight_scale_inv"] = parts["weight_scale_inv"].bfloat16()
            else:
                tensors[f"{stem}.input_scale"] = torch.tensor(1.0)
            tensors |= {f"{stem}.{suffix}": part for suffix, part in parts.items()}
            view.copy_(decoded(storage, parts, view.shape))
        elif ".shard_" in name and fmt != "bf16":
            tensors[name] = (view / scale.float()).to(torch.float8_e4m3fn)
            tensors[f"{stem.rpartition('.')[0]}.weight_scale"] = scale
            view.copy_((tensors[name].float() * scale.float()).bfloat16().float())
        else:
            tensors[name] = view.clone() if view.dtype == torch.int64 else view.bfloat16()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    config = {
        "architectures": ["Qwen4ExpForConditionalGeneration"], "model_type": "qwen4_exp",
        "text_config": {"model_type": "qwen4_exp_text", **TEXT}, "tie_word_embeddings": False,
        "quantization_config": SECTIONS[fmt],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="session")
def release(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Pair, Path]]:
    """Makes a pair and its checkpoint folder: ``release("nvfp4")``."""
    made: dict[str, tuple[Pair, Path]] = {}

    def make(fmt: str) -> tuple[Pair, Path]:
        if fmt not in made:
            pair, folder = Pair(21), tmp_path_factory.mktemp(fmt)
            write_release(pair, folder, fmt)
            made[fmt] = pair, folder
        return made[fmt]

    return make
