"""What a GLM-5.3 config.json may say, and the tensors and state that follow from it."""

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from dgpp_glm.glm53.config import read_config
from dgpp_glm.glm53.specs import FULL, QUANTISED, TINY
from dgpp_glm.glm53.tables import bindings, groups

from dgpp_core.api import ConfigError
from dgpp_core.checkpoint.cuts import cut_shape
from dgpp_core.checkpoint.parameters import parameters
from dgpp_core.formats.storage import parts

RELEASED = Path(__file__).parents[4] / "shared" / "data" / "configs" / "glm53_int4int8.json"
BYTES = {"BF16": 2, "F32": 4, "I32": 4, "I64": 8}


def test_the_specs_config_is_the_recorded_one() -> None:
    if not RELEASED.is_file():
        pytest.skip(f"no recorded config at {RELEASED}")
    recorded = json.loads(RELEASED.read_text(encoding="utf-8"))
    assert {key: recorded[key] for key in FULL if key != "quantization_config"} == {
        key: value for key, value in FULL.items() if key != "quantization_config"
    }
    assert read_config(recorded).indexed == read_config(FULL).indexed, "its list is what period and offset say"
    assert bindings(read_config(recorded)) == bindings(read_config(FULL)), "the rules name the same matrices"


def test_which_layers_have_an_indexer() -> None:
    c = read_config(FULL)
    assert c.index_layers == (0, 1, 2, *range(6, 78, 4), 78)
    rule = {key: value for key, value in TINY.items() if not key.startswith("index_topk_f")}
    assert read_config(rule | {"index_topk_freq": 1}).indexed == (True,) * 4
    assert read_config(rule | {"index_topk_pattern": "FSSF"}).indexed == (True, False, False, True)
    listed = ["full", "full", "shared", "shared"]
    assert read_config(TINY | {"indexer_types": listed}).indexed == (True, True, False, False)
    for wrong in (["shared", *["full"] * 3], ["full"] * 3, ["full", "half", "full", "full"], []):
        with pytest.raises(ConfigError, match="indexer_types"):
            read_config(TINY | {"indexer_types": wrong})


def test_the_latents_norms_have_the_other_norms_epsilon_unless_told() -> None:
    assert read_config(FULL).latent_norm_eps == 1e-5
    assert read_config(FULL | {"latent_norm_eps": 1e-6}).latent_norm_eps == 1e-6


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_type", "glm4_moe"), ("hidden_size", "128"), ("num_hidden_layers", 0), ("attention_bias", True),
        ("kv_lora_rank", 0), ("q_lora_rank", None), ("rope_interleave", False), ("indexer_rope_interleave", False),
        ("scoring_func", "softmax"), ("moe_layer_freq", 2), ("num_nextn_predict_layers", 2), ("n_shared_experts", 0),
        ("mlp_layer_types", ["sparse"] * 4), ("rope_parameters", None), ("rope_parameters", {"rope_type": "yarn"}),
        ("qk_rope_head_dim", 64), ("qk_rope_head_dim", 5), ("index_topk", -1), ("latent_norm_eps", 0.0),
        ("rms_norm_eps", math.nan), ("first_k_dense_replace", 5), ("n_routed_experts", 10**12),
    ],
)  # fmt: skip
def test_a_config_it_cannot_serve_is_refused_by_field(field: str, value: object) -> None:
    with pytest.raises(ConfigError) as refused:
        read_config(TINY | {field: value})
    assert field in str(refused.value)


def changed(**weights: Any) -> dict[str, Any]:
    """The release's section with something else said about its first group's weights."""
    section = QUANTISED["int4int8"]
    group = section["config_groups"]["group_0"]
    return section | {"config_groups": {"group_0": group | {"weights": group["weights"] | weights}}}


@pytest.mark.parametrize(
    ("section", "key"),
    [
        (changed(num_bits=3), "group_0.weights.num_bits"), (changed(group_size=32), "group_0.weights.group_size"),
        (changed(symmetric=False), "group_0.weights.symmetric"), (changed(actorder="group"), "weights.actorder"),
        (changed(strategy="channel"), "group_0.weights.strategy"), (changed(type="float"), "group_0.weights.type"),
        (QUANTISED["int4int8"] | {"config_groups": {}}, "config_groups"),
        (QUANTISED["int4int8"] | {"ignore": ["re:("]}, "ignore"),
        (
            QUANTISED["int4int8"] | {"format": "float-quantized", "config_groups": {"a": {"targets": ["Linear"]}}},
            "config_groups.a.format",
        ),
    ],
)  # fmt: skip
def test_a_quantisation_it_cannot_load_is_refused_by_key(section: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_config(TINY | {"quantization_config": section})
    assert key in str(refused.value)


def test_a_release_in_a_codebook() -> None:
    """Experts alone are in it; the draft layer and the first three are dense, as in the release in integers."""
    config = read_config(FULL | {"quantization_config": QUANTISED["nf4i8"]})
    stored = {b.name: b.storage for b in bindings(config).tensors}
    integers = {b.name: b.storage for b in bindings(read_config(FULL)).tensors}
    named = {"int4_g64": "code4_g128", "int8_g64": "int8_g64", "dense": "dense"}
    assert stored == {name: named[storage] for name, storage in integers.items()}
    held = parameters(bindings(config), 4)["layers.5.experts.down"]
    assert held.bytes("cuda") == 256 * 6144 * 512 * 2, "no kernel reads a codebook: a GPU keeps bfloat16 values"


@pytest.mark.parametrize(
    ("key", "value"),
    [("version", 2), ("format", "packed"), ("codebook", [*range(16)]), ("transform", {"type": "none"})],
)
def test_a_codebook_that_is_another_is_refused_by_key(key: str, value: object) -> None:
    with pytest.raises(ConfigError) as refused:
        read_config(TINY | {"quantization_config": QUANTISED["nf4i8"] | {key: value}})
    assert key in str(refused.value)


def test_experts_of_several_codebooks_are_refused_and_a_model_without_experts_is_not() -> None:
    section = {"quant_method": "dgpp_mixed346", "format": "dgpp_mixed346_h32_a8_g128_v1"}
    with pytest.raises(ConfigError, match="dgpp_nf4i8") as caught:
        read_config(TINY | {"quantization_config": section})
    assert caught.value.where == "quantization_config.quant_method"
    assert "differ in bits" in caught.value.hint
    dense = {"first_k_dense_replace": TINY["num_hidden_layers"], "quantization_config": QUANTISED["nf4i8"]}
    assert read_config(TINY | dense).quantisation.of("model.layers.2.self_attn.o_proj") == "dense"


def test_groups_of_128_for_every_linear_layer() -> None:
    section = changed(group_size=128)
    section["config_groups"]["group_0"] |= {"targets": ["Linear"]}
    stored = {b.name: b.storage for b in bindings(read_config(TINY | {"quantization_config": section})).tensors}
    assert stored["model.layers.3.self_attn.q_a_proj.weight"] == "int8_g128"
    assert stored["model.layers.2.self_attn.q_a_proj.weight"] == "dense", "it is one of those ignored"


def test_the_release_is_bound_tensor_by_tensor() -> None:
    """175,985 tensors of 427,414,105,472 bytes are in it."""
    table = bindings(read_config(FULL))
    stored = [part for b in table.tensors for part in parts(b.storage, b.name, b.shape)]
    assert len({part.name for part in stored}) == len(stored) == 175985
    kinds = Counter((b.storage, b.resident) for b in table.tensors if b.role == "linear")
    assert kinds["int4_g64", ""] == 75 * 256 * 3
    assert kinds["int8_g64", ""] == 75 * (4 + 3)
    assert kinds["int8_g64", "dense"] == 75, "what makes keys and values of latents is widened when it is loaded"
    assert kinds["dense", "nvfp4"] == 257 * 3 + 1, "the draft layer's experts and mix are dense there and recoded here"
    wide = ("F32",)
    sizes = (
        sum(math.prod(part.shape) * BYTES["F32" if b.formats == wide else _released(part.dtypes)] for part in each)
        for b in table.tensors
        for each in [parts(b.storage, b.name, b.shape)]
    )
    assert sum(sizes) == 427_414_105_472


def _released(dtypes: tuple[str, ...]) -> str:
    """Of those that a tensor may have, the one that the release gives it."""
    return "BF16" if "BF16" in dtypes else dtypes[0]


def test_what_ranks_hold() -> None:
    c = read_config(FULL)
    held = {b.name.removeprefix("model.layers.6."): cut_shape(b, 4) for b in bindings(c).tensors}
    assert held["self_attn.q_a_proj.weight"] == (2048, 6144)
    assert held["self_attn.q_b_proj.weight"] == (4096, 2048)
    assert held["self_attn.kv_b_proj.weight"] == (7168, 512)
    assert held["self_attn.o_proj.weight"] == (6144, 4096)
    assert held["self_attn.indexer.wq_b.weight"] == (4096, 2048)
    assert held["mlp.shared_experts.down_proj.weight"] == (6144, 512)
    with pytest.raises(ConfigError, match="world_size"):
        groups(c, 3)


def test_bytes_of_a_rank_on_a_gpu() -> None:
    """GiB of one rank of four, part by part, without the draft layer."""
    held = parameters(bindings(read_config(FULL)), 4)
    mine = {name: p.bytes("cuda") for name, p in held.items() if not name.startswith(("layers.78.", "draft."))}

    def gib(*ends: str) -> float:
        return sum(size for name, size in mine.items() if name.endswith(ends)) / 2**30

    experts = (".experts.gate_up", ".experts.down", ".shared.gate_up", ".shared.down")
    assert gib(*experts) == pytest.approx(90.33, abs=0.01)
    assert gib(".q", ".expand", ".o") == pytest.approx(3.14, abs=0.01)
    assert gib(".q_latent", ".latent") == pytest.approx(1.25, abs=0.01)
    assert gib(".index_q", ".index_k", ".index_gates") == pytest.approx(0.37, abs=0.01)
    assert (gib("embed"), gib("head")) == pytest.approx((1.77, 0.44), abs=0.01)


@pytest.mark.parametrize("ranks", [1, 4])
def test_the_state_of_a_token(ranks: int) -> None:
    """79 latent rows and 22 index keys, whole on every rank."""
    sizes = {group.name: (group.layers, group.heads * group.width) for group in groups(read_config(FULL), ranks)}
    assert sizes == {"latent": (79, 576), "index": (22, 128)}


def test_the_latents_of_a_token_in_few_bits() -> None:
    small = {kind: groups(read_config(FULL), 4, kind)[0] for kind in ("fp8", "fp4")}
    assert {kind: (group.width, group.dtype) for kind, group in small.items()} == {
        "fp8": (644, "uint8"), "fp4": (420, "uint8"),
    }  # fmt: skip
    assert groups(read_config(FULL), 4, "fp8")[1] == groups(read_config(FULL), 4)[1], "index keys stay as they are"
