"""GLM-5.3 against transformers on its released layouts: dense and packed, prefill and step by step, several ranks."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dgpp_glm.glm53.specs import QUANTISED
from safetensors.torch import save_file
from torch import Tensor

from dgpp_core.api import ConfigError, StepBatch
from dgpp_core.config.settings import EngineSettings
from dgpp_core.formats.codec import encode
from dgpp_core.host.loading import load_plugins
from dgpp_core.testing.tensor_parallel import TensorParallelWorld
from dgpp_core.testing.world import World

LAYERS, EXPERTS, INNER, BLOCK = 6, 4, 256, 16
CONFIG: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": INNER,
    "num_hidden_layers": LAYERS, "first_k_dense_replace": 3, "num_attention_heads": 8, "num_key_value_heads": 8,
    "q_lora_rank": 128, "kv_lora_rank": 64, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 32,
    "n_routed_experts": EXPERTS, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
    "norm_topk_prob": True, "routed_scaling_factor": 2.5, "index_n_heads": 8, "index_head_dim": 32, "index_topk": 16,
    "indexer_types": ["full", "full", "shared", "shared", "full", "shared"], "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 8000000.0}, "max_position_embeddings": 2048,
    "attention_bias": False, "tie_word_embeddings": False, "pad_token_id": 0, "eos_token_id": [1, 2, 3],
    "hidden_act": "silu", "num_nextn_predict_layers": 1, "rope_interleave": True, "indexer_rope_interleave": True,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc",
}  # fmt: skip
CLASS_LATENT_EPS = 1e-6
"""The class makes the two latent norms with this one, whatever the config says."""

FORMATS = ("bf16", "int4int8", "nf4i8")
TOKENS = torch.randint(5, 512, (75,), generator=torch.Generator().manual_seed(31)).tolist()
ATTENTION = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
Release = Callable[[str], tuple[Any, Path]]


def random_weight(name: str, like: Tensor, source: torch.Generator) -> Tensor:
    """Large enough that nothing ties and every term counts; rounded to bfloat16, save for the router's bias."""
    noise = torch.randn(like.shape, generator=source)
    if name.endswith("e_score_correction_bias"):
        return 0.3 * noise
    if "norm" in name:
        return ((0 if name.endswith(".bias") else 1) + 0.2 * noise).bfloat16().float()
    scale = 0.5 if "embed" in name else like.shape[-1] ** -0.5 * (2 if ".indexer." in name or ".gate." in name else 1)
    return (scale * noise).bfloat16().float()


def released_names(model: Any) -> dict[str, Tensor]:
    """The weights by their names in a release, as views: the class keeps experts fused."""
    names: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        stem, _, part = name.rpartition(".")
        if part == "gate_up_proj":
            for e in range(EXPERTS):
                gate, up = torch.split(value[e], INNER)
                names |= {f"{stem}.{e}.gate_proj.weight": gate, f"{stem}.{e}.up_proj.weight": up}
        elif part == "down_proj":
            names |= {f"{stem}.{e}.down_proj.weight": value[e] for e in range(EXPERTS)}
        else:
            names[name] = value
    return names


def draft_shapes() -> dict[str, tuple[int, ...]]:
    """The draft layer's tensors, which the class does not have; its drafts are not looked at here."""
    model = load_plugins(environ={}).model("glm53")
    table = model.bindings(model.read_config(CONFIG | {"model_type": "glm_moe_dsa"}))
    return {b.name: b.shape for b in table.tensors if b.name.startswith(f"model.layers.{LAYERS}.")}


def bits_of(name: str) -> int:
    """Of a tensor in the packed release, by the release's own rule; 0 is dense."""
    stem = name.removesuffix(".weight").rpartition(".")[2]
    if not name.endswith(".weight") or f"layers.{LAYERS}." in name or int((name + ".0.0").split(".")[2]) < 3:
        return 0
    if ".mlp.experts." in name:
        return 4
    return 8 if ".shared_experts." in name or stem in ATTENTION else 0


def unpacked(bits: int, parts: dict[str, Tensor], shape: torch.Size) -> Tensor:
    """The values that packed words stand for, field by field of their definition."""
    codes = parts["weight_indices" if "weight_indices" in parts else "weight_packed"]
    words, half, columns = codes.long() & 0xFFFFFFFF, 1 << (bits - 1), torch.arange(shape[1])
    fields = (words[:, columns * bits // 32] >> (columns * bits % 32)) & (2 * half - 1)
    if "weight_packed" in parts:
        return (fields - half).float() * parts["weight_scale"].float()[:, columns // 64]
    levels = torch.tensor([-127, -88, -67, -50, -36, -23, -12, 0, 10, 20, 31, 43, 56, 71, 92, 127])
    values = levels[fields].double() * parts["weight_scale"].double()[:, columns // 128]
    turn = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(32)] for i in range(32)]).double() * 32**-0.5
    return (values.view(shape[0], -1, 32) @ turn).flatten(1).float()


def write_release(model: Any, folder: Path, fmt: str) -> None:
    """Write the checkpoint, and move the class's model onto the values that it now stands for."""
    tensors: dict[str, Tensor] = {}
    for name, view in released_names(model).items():
        bits = bits_of(name) if fmt != "bf16" and "layers." in name else 0
        if bits:
            storage = "code4_g128" if (fmt, bits) == ("nf4i8", 4) else f"int{bits}_g64"
            parts = encode(storage, view.detach().clone())
            tensors |= {f"{name.removesuffix('weight')}{suffix}": part for suffix, part in parts.items()}
            view.copy_(unpacked(bits, parts, view.shape))
        else:
            tensors[name] = view.clone() if name.endswith("e_score_correction_bias") else view.bfloat16()
    source = torch.Generator().manual_seed(5)
    for name, shape in draft_shapes().items():
        values = random_weight(name, torch.empty(shape), source)
        tensors[name] = values if name.endswith("e_score_correction_bias") else values.bfloat16()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    raw = CONFIG | {"architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "dtype": "bfloat16"}
    raw |= {"latent_norm_eps": CLASS_LATENT_EPS, "quantization_config": section(fmt)}
    (folder / "config.json").write_text(json.dumps(raw))


def section(fmt: str) -> dict[str, Any] | None:
    """The release's. Where its rules count the layers from 3 to 77, the draft layer would be one of them here."""
    if fmt == "bf16":
        return None
    text = json.dumps(QUANTISED[fmt]).replace("(?:[3-9]|[1-6][0-9]|7[0-7])", f"(?:[3-{LAYERS - 1}])")
    found: dict[str, Any] = json.loads(text)
    return found


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Release:
    """Makes the class's model and its checkpoint folder."""
    transformers = pytest.importorskip("transformers", minversion="5.24")
    made: dict[str, tuple[Any, Path]] = {}

    @torch.no_grad()
    def make(fmt: str) -> tuple[Any, Path]:
        if fmt not in made:
            config = transformers.GlmMoeDsaConfig(**CONFIG)
            config._attn_implementation = "eager"
            model, source = transformers.GlmMoeDsaForCausalLM(config).eval(), torch.Generator().manual_seed(21)
            for name, view in released_names(model).items():
                view.copy_(random_weight(name, view, source))
            write_release(model, folder := tmp_path_factory.mktemp(fmt), fmt)
            made[fmt] = model, folder
        return made[fmt]

    return make


def world(folder: Path, **settings: Any) -> World:
    model = load_plugins(environ={}).model("glm53")
    values = {"max_concurrency": 2, "kv_capacity": 512, "block_tokens": BLOCK, "mtp": True, "mtp_depth": 2}
    return World.from_checkpoint(model, folder, EngineSettings(**(values | settings)))


@torch.inference_mode()
def logits(served: World, counts: list[int]) -> Tensor:
    """Of all rows of the text, run so many a step; single rows are decode steps."""
    model, pools, rows, start = served.engine.model, served.engine.state.pools, [], 0
    for count in counts:
        at = torch.arange(start, start + count)
        batch = StepBatch(
            tokens=torch.tensor(TOKENS)[at], positions=at, counts=(count,), slots=torch.tensor([0]),
            lengths=torch.tensor([start]), block_tables=torch.arange(1, 12)[None], candidates=torch.tensor([0]),
            keep_rows=count == 1, max_length=start + count,
        )  # fmt: skip
        rows.append(model.forward(batch, pools))
        start += count
    return model.logits(torch.cat(rows))


def relative(found: Tensor, wanted: Tensor) -> float:
    return ((found - wanted).abs().max() / wanted.abs().max()).item()


WAYS = [[75], [1] * 75, [40, 16, 1, 1, 17]]


@pytest.mark.parametrize("fmt", FORMATS)
@torch.inference_mode()
def test_logits(release: Release, fmt: str) -> None:
    model, folder = release(fmt)
    wanted, served = model(torch.tensor([TOKENS])).logits[0], world(folder)
    whole = logits(served, WAYS[0])
    assert relative(whole, wanted) <= 1e-5
    assert all(torch.equal(logits(served, counts), whole) for counts in WAYS[1:])


def test_what_the_reference_can_tell_apart(release: Release) -> None:
    """Stored values from dense ones, a choice of keys from all keys, and one epsilon from the other."""
    _, folder = release("bf16")
    whole, packed = logits(world(folder), WAYS[0]), logits(world(release("int4int8")[1]), WAYS[0])
    assert relative(packed, whole) > 1e-2
    text = (folder / "config.json").read_text()
    for key, value in (("index_topk", 75), ("latent_norm_eps", 1e-5)):
        (folder / "config.json").write_text(json.dumps(json.loads(text) | {key: value}))
        assert relative(logits(world(folder), WAYS[0]), whole) > 1e-5
    (folder / "config.json").write_text(text)


@pytest.mark.parametrize("fmt", FORMATS)
def test_greedy_replies_are_those_of_transformers(release: Release, fmt: str) -> None:
    model, folder = release(fmt)
    prompt = TOKENS[:33]
    wanted = model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=-1)[0, 33:].tolist()
    assert world(folder, mtp=False, mtp_depth=1).reply(prompt, 8).tokens == wanted
    assert world(folder).reply(prompt, 8).tokens == wanted
    loaded = load_plugins(environ={}).model("glm53")
    settings = EngineSettings(max_concurrency=2, kv_capacity=512, block_tokens=BLOCK, mtp=True, mtp_depth=2)
    for ranks in (2,) if fmt == "nf4i8" else (2, 4):  # a codebook's groups of 128 do not divide further here
        assert TensorParallelWorld.load(loaded, folder, settings, ranks).reply(prompt, 8).tokens == wanted


def as_stored(latent: Tensor, kv_dtype: str) -> Tensor:
    """What is left of latents ``[..., 64]`` in the cache, by the formats' definition; ties apart."""
    amax = latent.abs().amax(-1, keepdim=True)
    if kv_dtype == "fp8":
        return (latent * (448 / amax)).to(torch.float8_e4m3fn).float() * (amax / 448)
    parts, levels = latent.reshape(*latent.shape[:-1], -1, 16), torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6])
    block = (parts.abs().amax(-1) * (448 / amax)).to(torch.float8_e4m3fn).float()
    step = (block * (amax / (6 * 448))).unsqueeze(-1)
    near = (parts.abs() / step).unsqueeze(-1).sub(levels).abs().argmin(-1)
    return (levels[near] * step * parts.sign()).flatten(-2)


@pytest.mark.parametrize("kv_dtype", ["fp8", "fp4"])
def test_latents_in_few_bits(release: Release, kv_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The class, told to attend to what is left of its latents; every way to it and a draft layer change nothing."""
    from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaAttention

    model, folder = release("bf16")
    expand = GlmMoeDsaAttention.expand_kv

    def expand_stored(attention: Any, latent: Tensor, key: Tensor) -> Any:
        return expand(attention, as_stored(latent, kv_dtype), key.bfloat16().float())

    monkeypatch.setattr(GlmMoeDsaAttention, "expand_kv", expand_stored)
    with torch.inference_mode():
        wanted = model(torch.tensor([TOKENS])).logits[0]
    served = world(folder, kv_dtype=kv_dtype)
    assert served.engine.state.pools["latent"].dtype == torch.uint8
    whole = logits(served, WAYS[0])
    # A latent that lies between two codes may fall to either, and moves the rows that attend to it.
    apart = (whole - wanted).norm(dim=1) / wanted.norm(dim=1)
    assert apart.median() <= 1e-5
    assert all(torch.equal(logits(served, counts), whole) for counts in WAYS[1:])
    assert relative(whole, logits(world(folder), WAYS[0])) > 1e-2
    replies = [
        world(folder, kv_dtype=kv_dtype, mtp=depth > 0, mtp_depth=max(1, depth)).reply(TOKENS[:33], 8).tokens
        for depth in (0, 2)
    ]
    assert replies[0] == replies[1]


def test_a_model_with_one_form_of_its_cache_refuses_another() -> None:
    model = load_plugins(environ={}).model("glm47")
    config = model.read_config(model.spec.tiny_config)
    assert model.groups(config, 1, {"kv_dtype": "bf16"}) == model.groups(config)
    with pytest.raises(ConfigError, match=r"engine\.kv_dtype"):
        model.groups(config, 1, {"kv_dtype": "fp8"})
