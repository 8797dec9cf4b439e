"""GLM-5.3-Flash against transformers on its released layouts: every format, every layer, the draft layer, ranks."""

import copy
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from dgpp_glm.glm53_flash.specs import QUANTISED, TINY
from dgpp_glm.latent import Step
from safetensors.torch import save_file
from torch import Tensor, nn

from dgpp_core.api import StepBatch
from dgpp_core.config.settings import EngineSettings
from dgpp_core.formats.codec import encode
from dgpp_core.host.loading import load_plugins
from dgpp_core.testing.float64 import Float64, float64
from dgpp_core.testing.tensor_parallel import TensorParallelWorld
from dgpp_core.testing.world import World

_SPEC = importlib.util.spec_from_file_location("flash_reference", Path(__file__).with_name("flash_reference.py"))
assert _SPEC is not None
assert _SPEC.loader is not None
reference = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(reference)

KINDS = ["linear_attention", "indexed_attention", "linear_attention", "indexed_attention", "linear_attention"]
LAYERS, DENSE, EXPERTS = len(KINDS), 2, 4
LINEAR: dict[str, Any] = {
    "linear_num_heads": 4,
    "linear_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "linear_lower_bound": -5.0,
}
TEXT: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 64,
    "num_hidden_layers": LAYERS, "layer_types": KINDS, "indexer_types": ["full"] * LAYERS,
    "mlp_layer_types": ["dense"] * DENSE + ["sparse"] * (LAYERS - DENSE), "num_attention_heads": 4,
    "num_key_value_heads": 4, "q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 0,
    "v_head_dim": 48, "index_n_heads": 8, "index_head_dim": 32, "index_topk": 16, "index_kpool": 4,
    "index_kpool_always_select_tail": True, "n_routed_experts": EXPERTS, "num_experts_per_tok": 2,
    "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    "swiglu_limit": 1.5, "hc_mult": 4, "hc_eps": 1e-6, "hc_sinkhorn_iters": 20, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048, "pad_token_id": 0, "eos_token_id": [1, 2, 3], "hidden_act": "silu",
    "attention_bias": False, "tie_word_embeddings": False,
}  # fmt: skip
FORMATS = ("bf16", "fp8", "hybrid")
FLOAT32 = ("e_score_correction_bias", "A_log", "dt_bias", "_base", "_scale")
PREFIX = "model.language_model."
TOKENS = torch.randint(5, 512, (75,), generator=torch.Generator().manual_seed(31)).tolist()


class Pair:
    """The class's model, and a draft layer put together from its parts; random weights that move every path."""

    def __init__(self, seed: int) -> None:
        modeling = pytest.importorskip("transformers.models.glm5_next.modeling_glm5_next")
        from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig

        config = Glm5NextTextConfig(**TEXT, **LINEAR)
        config._attn_implementation = "eager"
        self.model: Any = modeling.Glm5NextTextModel(config).eval()
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False).requires_grad_(False)
        self.mtp = self._draft_layer(modeling, config)
        self.views, source = self.released(), torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, view in self.views.items():
                view.copy_(random_weight(name, view, source))

    def _draft_layer(self, modeling: Any, config: Any) -> Any:
        one = copy.deepcopy(config)
        one.num_hidden_layers, one.layer_types, one.mlp_layer_types = 1, ["indexed_attention"], ["sparse"]
        one._attn_implementation = "eager"
        mtp, size, eps = nn.Module(), config.hidden_size, config.rms_norm_eps
        for norm in ("enorm", "hnorm", "input_layernorm", "post_attention_layernorm"):
            setattr(mtp, norm, modeling.Glm5NextTextRMSNorm(size, eps))
        mtp.shared_head = nn.ModuleDict({"norm": modeling.Glm5NextTextRMSNorm(size, eps)})
        mtp.eh_proj = nn.Linear(2 * size, size, bias=False)
        mtp.self_attn, mtp.mlp = modeling.Glm5NextTextAttention(one, 0), modeling.Glm5NextTextMoE(one)
        return mtp.eval()

    def released(self) -> dict[str, Tensor]:
        """The weights by their names in a release, as views: the class keeps experts and convolutions together."""
        draft = {f"layers.{LAYERS}.{name}": value for name, value in self.mtp.state_dict().items()}
        names = {"lm_head.weight": self.head.weight.detach()}
        for name, value in {**self.model.state_dict(), **draft}.items():
            for part, released in ((".attn_hc.", ".hc_attn_"), (".ffn_hc.", ".hc_ffn_"), (".forget_gate.", ".")):
                name = name.replace(part, released)
            stem, _, part = f"{PREFIX}{name}".rpartition(".")
            if part == "gate_up_proj":
                for e in range(EXPERTS):
                    names[f"{stem}.{e}.gate_proj.weight"], names[f"{stem}.{e}.up_proj.weight"] = value[e].chunk(2)
            elif part == "down_proj":
                names |= {f"{stem}.{e}.down_proj.weight": value[e] for e in range(EXPERTS)}
            elif stem.endswith("conv1d"):
                pieces = zip("qkv", value.chunk(3), strict=True)
                names |= {f"{stem.removesuffix('conv1d')}{c}_conv1d.weight": piece for c, piece in pieces}
            else:
                names[f"{PREFIX}{name}"] = value
        return names

    @torch.inference_mode()
    def run(self, tokens: list[int]) -> tuple[list[Tensor], Tensor]:
        """The streams ``[T, S, H]`` before each layer and after the last, and the hidden states after the last norm.

        In float64: in float32 the class is up to 3e-5 of the largest value from that, most of it after the third layer.
        """
        found, model = list[Tensor](), float64(self.model)
        for layer in (*model.layers, model.hc_head):
            layer.register_forward_pre_hook(lambda _, given: found.append(given[0][0]))
        with Float64():
            hidden: Tensor = model(torch.tensor([tokens]), use_cache=False).last_hidden_state[0]
        return found, hidden

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """What the head says, in float64."""
        return hidden @ self.head.weight.double().T

    @torch.inference_mode()
    def drafted(self, hidden: Tensor, following: list[int]) -> Tensor:
        """The draft layer's rows, normed, in float64."""
        mtp, embedded = float64(self.mtp), self.model.embed_tokens(torch.tensor([following])).double()
        with Float64():
            x = mtp.eh_proj(torch.cat((mtp.enorm(embedded), mtp.hnorm(hidden[None])), -1))
            x = x + mtp.self_attn(mtp.input_layernorm(x), torch.ones(1, len(following), dtype=torch.bool))[0]
            out: Tensor = mtp.shared_head["norm"](x + mtp.mlp(mtp.post_attention_layernorm(x)))[0]
        return out


def random_weight(name: str, like: Tensor, source: torch.Generator) -> Tensor:
    """Large enough that nothing ties and every term counts; rounded to bfloat16 where the release is."""
    noise, leaf = torch.randn(like.shape, generator=source), name.removesuffix(".weight").rpartition(".")[2]
    if leaf == "e_score_correction_bias":
        return 0.3 * noise
    if "norm" in leaf or leaf == "bias":
        noise = (0 if leaf == "bias" else 1) + 0.2 * noise
    elif leaf in ("A_log", "dt_bias") or leaf.endswith(("_base", "_scale", "_ape")):
        mean = {"dt_bias": -1.0, "hc_attn_scale": 0.7, "hc_ffn_scale": 0.7}.get(leaf, 0.0)
        noise = mean + (1.0 if leaf == "dt_bias" else 0.2 if leaf.endswith("_scale") else 0.5) * noise
    elif "embed" in leaf:
        noise = 0.5 * noise
    else:
        noise = noise * like.shape[-1] ** -0.5 * (2 if ".indexer." in name or leaf == "gate" else 1)
    return noise if name.endswith(FLOAT32) else noise.bfloat16().float()


def storage_of(fmt: str, name: str) -> str:
    """Of a tensor in a release of the format, by the release's own rule."""
    if fmt == "bf16" or f"{PREFIX}layers." not in name or not name.endswith(".weight"):
        return ""
    layer, leaf = int(name.removeprefix(f"{PREFIX}layers.").partition(".")[0]), name.split(".")[-2]
    if ".mlp." in name and leaf in ("gate_proj", "up_proj", "down_proj"):
        return "nvfp4_ct" if fmt == "hybrid" and ".experts." in name and layer < LAYERS else "fp8_block"
    latent = [*KINDS, "indexed_attention"][layer] == "indexed_attention"
    return "fp8_block" if latent and leaf in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj") else ""


def decoded(storage: str, held: dict[str, Tensor], shape: torch.Size) -> Tensor:
    """The values that a stored matrix stands for, element by element of its definition."""
    if storage == "fp8_block":
        rows, columns = (torch.arange(size) // 128 for size in shape)
        return held["weight"].float() * held["weight_scale_inv"].float()[rows][:, columns]
    half, packed = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6]), held["weight_packed"]
    codes, groups = torch.stack((packed & 15, packed >> 4), -1).view(shape).long(), torch.arange(shape[1]) // 16
    values = torch.where(codes < 8, half[codes % 8], -half[codes % 8])
    return values * (held["weight_scale"].float() / held["weight_global_scale"].float())[:, groups]


@torch.no_grad()
def write_release(pair: Pair, folder: Path, fmt: str) -> None:
    """Write the checkpoint, and move the class's model onto the values that it now stands for."""
    tensors: dict[str, Tensor] = {}
    for name, view in pair.views.items():
        if storage := storage_of(fmt, name):
            held = encode(storage, view.detach().clone())
            tensors |= {f"{name.removesuffix('weight')}{suffix}": part for suffix, part in held.items()}
            view.copy_(decoded(storage, held, view.shape))
        else:
            tensors[name] = view.clone() if name.endswith(FLOAT32) else view.bfloat16()
    tensors["model.visual.post_layernorm.weight"] = torch.ones(8).bfloat16()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    text = {key: TINY["text_config"][key] for key in ("mla_use_nope", "mhc", "num_nextn_predict_layers")} | TEXT
    text |= {
        "model_type": "glm5_next_text", "first_k_dense_replace": DENSE,
        "linear_attn_config": {"num_heads": 4, "head_dim": 16, "short_conv_kernel_size": 4, "gate_lower_bound": -5.0},
    }  # fmt: skip
    raw = {key: value for key, value in TINY.items() if key != "vision_config"}
    section = None if fmt == "bf16" else QUANTISED[fmt]
    (folder / "config.json").write_text(json.dumps(raw | {"text_config": text, "quantization_config": section}))


Release = Callable[[str], tuple[Pair, Path]]


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Release:
    """Makes a pair and its checkpoint folder."""
    made: dict[str, tuple[Pair, Path]] = {}

    def make(fmt: str) -> tuple[Pair, Path]:
        if fmt not in made:
            made[fmt] = Pair(21), tmp_path_factory.mktemp(fmt)
            write_release(*made[fmt], fmt)
        return made[fmt]

    return make


SETTINGS = EngineSettings(max_concurrency=2, kv_capacity=512, block_tokens=16, mtp=True, mtp_depth=3)


def world(folder: Path, **settings: Any) -> World:
    chosen = msgspec.structs.replace(SETTINGS, **settings)
    return World.from_checkpoint(load_plugins(environ={}).model("glm53-flash"), folder, chosen)


def steps(counts: list[int]) -> list[StepBatch]:
    """The text in so many rows a step; single rows are decode steps."""
    made, start = [], 0
    for count in counts:
        at = torch.arange(start, start + count)
        made.append(
            StepBatch(
                tokens=torch.tensor(TOKENS)[at], positions=at, counts=(count,), slots=torch.tensor([0]),
                lengths=torch.tensor([start]), block_tables=torch.arange(1, 12)[None], candidates=torch.tensor([0]),
                keep_rows=count == 1, max_length=start + count,
            )
        )  # fmt: skip
        start += count
    return made


@torch.inference_mode()
def forward(served: World, counts: list[int]) -> tuple[Tensor, Tensor]:
    """Hidden states and logits of all rows."""
    model, pools = served.engine.model, served.engine.state.pools
    hidden = torch.cat([model.forward(batch, pools) for batch in steps(counts)])
    return hidden, model.logits(hidden)


def relative(found: Tensor, wanted: Tensor) -> float:
    """The largest error, against the largest value."""
    return float((found - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("fmt", FORMATS)
def test_logits_in_prefill_and_the_same_bits_otherwise(release: Release, fmt: str) -> None:
    pair, folder = release(fmt)
    _, wanted = pair.run(TOKENS)
    hidden, logits = forward(world(folder), [75])
    assert relative(hidden, wanted) <= 1e-5
    assert relative(logits, pair.logits(wanted)) <= 1e-5
    with torch.inference_mode():
        narrow = pair.head(pair.model(torch.tensor([TOKENS]), use_cache=False).last_hidden_state[0])
    assert relative(logits, pair.logits(wanted)) < relative(narrow, pair.logits(wanted)), "nearer than the class itself"
    plain = reference.Plain(pair.views, json.loads((folder / "config.json").read_text()))
    assert relative(plain.logits(plain.hidden(TOKENS)), pair.logits(wanted)) <= 1e-12
    ways = [[2, 38, 16, 1, 1, 17], *[[1] * 75] * (fmt == "bf16")]
    assert all(torch.equal(forward(world(folder), counts)[1], logits) for counts in ways)


@torch.inference_mode()
def test_each_layer_alone(release: Release) -> None:
    """Delta and latent attention, with a dense feed-forward and with experts, each from the class's own streams."""
    pair, folder = release("hybrid")
    streams, _ = pair.run(TOKENS)
    served = world(folder)
    model: Any = served.engine.model
    step = Step.of(steps([75])[0], served.engine.state.pools)
    kinds = set()
    for index, layer in enumerate(model.layers):
        kinds.add((KINDS[index], index < DENSE))
        assert relative(layer(streams[index].float(), step), streams[index + 1]) <= 1e-5
        assert relative(streams[index], streams[index + 1]) > 1e-2
    assert len(kinds) == 4


def test_what_the_reference_can_tell_apart(release: Release) -> None:
    """Stored values from dense ones, a choice of keys from all keys, and a limit from another."""
    logits = [forward(world(release(fmt)[1]), [75])[1] for fmt in FORMATS]
    assert relative(logits[1], logits[0]) > 1e-3
    assert relative(logits[2], logits[1]) > 1e-2
    _, folder = release("bf16")
    text = (folder / "config.json").read_text()
    for key, value in (("index_topk", 76), ("swiglu_limit", 1.6), ("hc_sinkhorn_iters", 1)):
        raw = json.loads(text)
        raw["text_config"][key] = value
        (folder / "config.json").write_text(json.dumps(raw))
        assert relative(forward(world(folder), [75])[1], logits[0]) > 1e-4, key
    (folder / "config.json").write_text(text)


@pytest.mark.parametrize("fmt", ["bf16", "hybrid"])
@torch.inference_mode()
def test_the_draft_layer_and_its_chain(release: Release, fmt: str) -> None:
    pair, folder = release(fmt)
    served, depth, ids = world(folder), 3, list(TOKENS)
    drafter, pools = served.engine.drafter, served.engine.state.pools
    assert drafter is not None
    (batch,) = steps([74])
    hidden = served.engine.model.forward(batch, pools)
    own = drafter.observe(batch, hidden, torch.tensor(ids[1:]), pools)
    _, wanted = pair.run(ids[:-1])
    plain = reference.Plain(pair.views, json.loads((folder / "config.json").read_text()))
    residual, normed = plain.drafted(wanted, ids[1:])
    drafter.recycle_normed = False  # type: ignore[attr-defined]
    assert relative(drafter.observe(batch, hidden, torch.tensor(ids[1:]), pools), residual) <= 1e-5
    drafter.recycle_normed = True  # type: ignore[attr-defined]
    assert relative(own, normed) <= 1e-5
    following, drafts = ids[1:], list[int]()
    for _ in range(depth):
        made = pair.drafted(wanted, following)
        if not drafts:
            assert relative(own, made) <= 1e-5
        drafts.append(int(pair.logits(made[-1]).argmax()))
        wanted, following = torch.cat((wanted, made[-1:])), [*following, drafts[-1]]
    tail = msgspec.structs.replace(
        batch, tokens=batch.tokens[-1:], positions=batch.positions[-1:], counts=(1,), lengths=batch.positions[-1:],
        keep_rows=True,
    )  # fmt: skip
    assert drafter.propose(tail, own[-1:], torch.tensor(ids[-1:]), depth, pools).tolist() == [drafts]


@pytest.mark.parametrize("fmt", FORMATS)
def test_greedy_replies_are_those_of_the_class(release: Release, fmt: str) -> None:
    """Undrafted, and drafted on several ranks, which cut scale blocks and groups; dense ones are the kit's."""
    pair, folder = release(fmt)
    ids = TOKENS[:33]
    for _ in range(6):
        ids = [*ids, int(pair.logits(pair.run(ids)[1][-1]).argmax())]
    assert world(folder, mtp=False, mtp_depth=1).reply(TOKENS[:33], 6).tokens == ids[33:]
    loaded = load_plugins(environ={}).model("glm53-flash")
    for ranks in () if fmt == "bf16" else (2, 4):
        assert TensorParallelWorld.load(loaded, folder, SETTINGS, ranks).reply(TOKENS[:33], 6).tokens == ids[33:]


@pytest.mark.parametrize("kv_dtype", ["fp8", "fp4"])
def test_latents_in_few_bits(release: Release, kv_dtype: str) -> None:
    """A row is stored before it is attended to: every way to it and a draft layer change nothing."""
    _, folder = release("bf16")
    served = world(folder, kv_dtype=kv_dtype)
    assert served.engine.state.pools["latent"].dtype == torch.uint8
    _, whole = forward(served, [75])
    assert torch.equal(forward(world(folder, kv_dtype=kv_dtype), [40, 16, 1, 1, 17])[1], whole)
    exact = forward(world(folder), [75])[1]
    apart = (whole - exact).norm(dim=1) / exact.norm(dim=1)
    assert 1e-3 < apart.median() < 0.3
    replies = [world(folder, kv_dtype=kv_dtype, mtp=d > 0, mtp_depth=max(1, d)).reply(TOKENS[:33], 6) for d in (0, 3)]
    assert replies[0].tokens == replies[1].tokens
