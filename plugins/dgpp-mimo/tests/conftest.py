"""A tiny MiMo-V2 of transformers, and its checkpoint as released: fused, by expert, with draft blocks, quantised."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dgpp_mimo.mimo26.specs import QUANTISED, TINY
from safetensors.torch import save_file
from torch import Tensor, nn

from dgpp_core.formats.codec import encode

CHUNKS, HEADS, WIDTH, VALUE, EXPERTS = 4, 8, 48, 32, 8
WINDOWED = [0, 1, 1, 0, 1]
CONFIG: dict[str, Any] = TINY | {
    "num_hidden_layers": len(WINDOWED), "hybrid_layer_pattern": WINDOWED, "moe_layer_freq": [0, 1, 1, 1, 1],
    "rope_theta": 1000000, "eos_token_id": 2,
}  # fmt: skip
ROPE = {"rope_type": "default", "partial_rotary_factor": CONFIG["partial_rotary_factor"]}


def block_class() -> Any:
    """A draft block, put together of the class's attention and feed-forward."""
    from transformers.models.mimo_v2_flash import modeling_mimo_v2_flash as parts

    class Block(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            hidden, eps = config.hidden_size, config.rms_norm_eps
            norm = parts.MiMoV2FlashRMSNorm
            self.enorm, self.hnorm = norm(hidden, eps), norm(hidden, eps)
            self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
            self.input_layernorm, self.pre_mlp_layernorm = norm(hidden, eps), norm(hidden, eps)
            self.self_attn = parts.MiMoV2FlashAttention(config, config.layer_types.index("sliding_attention"))
            self.mlp, self.final_layernorm = parts.MiMoV2FlashMLP(config), norm(hidden, eps)

        def forward(self, embedded: Tensor, hidden: Tensor, angles: Any, mask: Any) -> Tensor:
            x = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), -1))
            x = x + self.self_attn(self.input_layernorm(x), angles, mask)[0]
            out: Tensor = self.final_layernorm(x + self.mlp(self.pre_mlp_layernorm(x)))
            return out

    return Block


class Pair:
    """The class's model and three draft blocks, with random weights that move every path."""

    def __init__(self, seed: int) -> None:
        transformers = pytest.importorskip("transformers")
        if not hasattr(transformers, "MiMoV2FlashConfig"):
            pytest.skip("this transformers has no MiMo-V2-Flash")
        same = (
            "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
            "v_head_dim", "sliding_window", "attention_value_scale", "intermediate_size", "moe_intermediate_size",
            "n_routed_experts", "num_experts_per_tok", "n_group", "topk_group", "max_position_embeddings",
        )  # fmt: skip
        config = transformers.MiMoV2FlashConfig(
            **{name: CONFIG[name] for name in same}, rms_norm_eps=1e-6, attention_bias=False, norm_topk_prob=True,
            layer_types=["sliding_attention" if flag else "full_attention" for flag in WINDOWED],
            mlp_layer_types=["dense"] + ["sparse"] * (len(WINDOWED) - 1), routed_scaling_factor=1.0,
            rope_parameters={
                "full_attention": ROPE | {"rope_theta": float(CONFIG["rope_theta"])},
                "sliding_attention": ROPE | {"rope_theta": float(CONFIG["swa_rope_theta"])},
            },
            tie_word_embeddings=False, bos_token_id=None, eos_token_id=2, pad_token_id=0,
        )  # fmt: skip
        config._attn_implementation = "eager"
        self.model: Any = transformers.MiMoV2FlashForCausalLM(config).eval()
        block = block_class()
        self.blocks: Any = nn.ModuleList([block(config) for _ in range(3)]).eval()
        self.tensors = dict(self.model.state_dict())
        self.tensors |= {f"model.mtp.layers.{name}": value for name, value in self.blocks.state_dict().items()}
        source = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, value in self.tensors.items():
                value.copy_(random_weight(name, value, source))

    @torch.inference_mode()
    def hidden(self, tokens: list[int]) -> Tensor:
        """Hidden states after the last norm, ``[T, hidden]``."""
        hidden: Tensor = self.model.model(torch.tensor([tokens])).last_hidden_state[0]
        return hidden

    @torch.inference_mode()
    def drafted(self, block: int, hidden: Tensor, tokens: list[int]) -> Tensor:
        """A block's rows from position 0 on, normed."""
        from transformers.masking_utils import create_sliding_window_causal_mask

        embedded = self.model.model.embed_tokens(torch.tensor([tokens]))
        positions = torch.arange(len(tokens))[None]
        angles = self.model.model.rotary_emb(embedded, positions, "sliding_attention")
        mask = create_sliding_window_causal_mask(
            config=self.model.config, inputs_embeds=embedded, attention_mask=None, past_key_values=None,
            position_ids=positions,
        )  # fmt: skip
        out: Tensor = self.blocks[block](embedded, hidden[None, : len(tokens)], angles, mask)[0]
        return out


def random_weight(name: str, like: Tensor, source: torch.Generator) -> Tensor:
    """Large enough that nothing ties and every term counts; rounded to bfloat16, save for the router's bias."""
    noise = torch.randn(like.shape, generator=source)
    if name.endswith("e_score_correction_bias"):
        return 0.3 * noise
    if name.endswith("sinks"):
        return (1 + noise).bfloat16().float()
    if "norm" in name:
        return (1 + 0.2 * noise).bfloat16().float()
    scale = 0.5 if "embed" in name else (2 if name.endswith("mlp.gate.weight") else 1) * like.shape[-1] ** -0.5
    return (scale * noise).bfloat16().float()


def fused(name: str, tensors: dict[str, Tensor]) -> list[list[Tensor]]:
    """Views of queries, keys and values of each chunk."""
    parts = [tensors[name.replace("q_proj", f"{part}_proj")].chunk(CHUNKS) for part in "qkv"]
    return [[part[chunk] for part in parts] for chunk in range(CHUNKS)]


def released(tensors: dict[str, Tensor]) -> dict[str, list[Tensor]]:
    """The class's tensors by their names in a release: each as views that lie below each other there."""
    names: dict[str, list[Tensor]] = {}
    for name, value in tensors.items():
        stem, _, last = name.rpartition(".")
        if name.endswith("self_attn.q_proj.weight"):
            views = [part for chunk in fused(name, tensors) for part in chunk]
            names[name.replace("q_proj", "qkv_proj")] = views
        elif name.endswith(("k_proj.weight", "v_proj.weight")):
            continue
        elif last == "sinks":
            names[f"{stem}.attention_sink_bias"] = [value]
        elif last == "gate_up_proj":
            for e in range(EXPERTS):
                gate, up = value[e].chunk(2)
                names |= {f"{stem}.{e}.gate_proj.weight": [gate], f"{stem}.{e}.up_proj.weight": [up]}
        elif last == "down_proj":
            names |= {f"{stem}.{e}.down_proj.weight": [value[e]] for e in range(EXPERTS)}
        else:
            names[name] = [value]
    return names


def stored_as(name: str) -> str:
    """Storage of a tensor in the quantised release, by its own rule."""
    if ".experts." in name:
        return "mxfp4_u8"
    dense_mlp = name.endswith(("mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight"))
    return "fp8_block" if dense_mlp or "qkv_proj" in name else ""


def decoded(storage: str, parts: dict[str, Tensor], shape: torch.Size, chunks: int) -> Tensor:
    """The values that a stored matrix stands for, element by element of its definition."""
    row = torch.arange(shape[0])
    if storage == "fp8_block":
        height, rows = shape[0] // chunks, parts["weight_scale_inv"].shape[0] // chunks
        scales = parts["weight_scale_inv"][rows * (row // height) + row % height // 128]
        return parts["weight"].float() * scales[:, torch.arange(shape[1]) // 128]
    levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = torch.stack((parts["weight"] & 15, parts["weight"] >> 4), -1).view(shape).long()
    values = torch.where(codes < 8, levels[codes % 8], -levels[codes % 8])
    return values * torch.exp2(parts["weight_scale"].float() - 127)[:, torch.arange(shape[1]) // 32]


def write_release(pair: Pair, folder: Path, fmt: str) -> None:
    """Write the checkpoint, and move the class's model onto the values that it now stands for."""
    tensors: dict[str, Tensor] = {}
    for name, views in released(pair.tensors).items():
        whole, stem = torch.cat(views) if len(views) > 1 else views[0].clone(), name.removesuffix(".weight")
        if fmt == "mxfp4" and (storage := stored_as(name)):
            chunks = CHUNKS if "qkv_proj" in name else 1
            parts = encode(storage, whole, chunks)
            tensors |= {f"{stem}.{suffix}": part for suffix, part in parts.items()}
            values = decoded(storage, parts, whole.shape, chunks)
            with torch.no_grad():
                for view, part in zip(views, values.split([len(view) for view in views]), strict=True):
                    view.copy_(part)
        else:
            tensors[name] = whole if name.endswith("e_score_correction_bias") else whole.bfloat16()
    tensors["visual.patch_embed.weight"] = torch.zeros(4, 4, dtype=torch.bfloat16)
    files: dict[str, dict[str, Tensor]] = {"model_pp0_ep0_shard0.safetensors": {}, "model_mtp.safetensors": {}}
    for name, value in tensors.items():
        files["model_mtp.safetensors" if ".mtp." in name else "model_pp0_ep0_shard0.safetensors"][name] = value
    for file, held in files.items():
        save_file({name: value.contiguous() for name, value in held.items()}, folder / file)
    placed = {name: file for file, held in files.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    section = {"quantization_config": QUANTISED["mxfp4"]} if fmt == "mxfp4" else {}
    (folder / "config.json").write_text(json.dumps({**CONFIG, **section}))


@pytest.fixture(scope="session")
def release(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Pair, Path]]:
    """Makes a pair and its checkpoint folder, ``bf16`` or ``mxfp4``."""
    made: dict[str, tuple[Pair, Path]] = {}

    def make(fmt: str) -> tuple[Pair, Path]:
        if fmt not in made:
            pair, folder = Pair(21), tmp_path_factory.mktemp(fmt)
            write_release(pair, folder, fmt)
            made[fmt] = pair, folder
        return made[fmt]

    return make
