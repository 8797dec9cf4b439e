"""dgpp-llama keeps the contract, and computes what transformers computes."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from dgpp_llama.config import SPECS, read_config
from torch import Tensor

from dgpp_core.api import ConfigError
from dgpp_core.testing import ModelConformance

TEMPLATES = Path(__file__).parents[4] / "shared" / "data" / "chat_templates"


class TestSmolLM2(ModelConformance):
    """Every check of the kit, on the tiny config."""

    model = "smollm2"
    template = TEMPLATES / "SmolLM2-Instruct.jinja"
    worlds = (1, 2)

    @classmethod
    def golden_cases(cls) -> Mapping[str, Mapping[str, Any]]:
        """Prompts recorded from transformers, beside the checkout where they are there at all."""
        rendered = json.loads((TEMPLATES / "golden" / "SmolLM2-Instruct.json").read_text(encoding="utf-8"))
        cases = json.loads((TEMPLATES / "golden" / "conversations.json").read_text(encoding="utf-8"))
        return {name: case | rendered[name] for name, case in cases.items() if "prompt" in rendered[name]}

    def reference(self, weights: Mapping[str, Tensor], config: Mapping[str, Any], tokens: Sequence[int]) -> Tensor:
        """The same checkpoint in transformers, without a cache."""
        from transformers import LlamaConfig, LlamaForCausalLM

        model = LlamaForCausalLM(LlamaConfig(**config, attn_implementation="eager")).eval()
        model.load_state_dict(dict(weights), strict=False)
        with torch.inference_mode():
            return model(torch.tensor([list(tokens)])).logits[0]


class TestTied(TestSmolLM2):
    """The tied head of the real model: what it changes is the forward and the plan, not the scheduling."""

    test_exactness_matrix = None
    test_ranks_that_share_the_model_give_the_same_replies = None
    test_a_pipelined_engine_gives_the_same_replies = None

    @classmethod
    def host(cls) -> Any:
        """The installed plugin, with one field of its tiny config changed."""
        host = super().host()
        raw = dict(SPECS[0].tiny_config) | {"tie_word_embeddings": True}
        host.model("smollm2").spec = msgspec.structs.replace(SPECS[0], tiny_config=raw)
        return host


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", "64"), ("vocab_size", 0), ("num_key_value_heads", 3), ("hidden_act", "gelu"),
        ("rope_scaling", {"rope_type": "yarn", "factor": 4}), ("num_hidden_layers", None), ("attention_bias", True),
        ("num_key_value_heads", 0), ("head_dim", 15), ("rms_norm_eps", -1.0), ("rope_theta", 0),
        ("rope_theta", math.inf), ("sliding_window", 128), ("max_position_embeddings", 0),
    ],
)  # fmt: skip
def test_a_config_it_cannot_serve_is_refused_by_field(field: str, value: object) -> None:
    with pytest.raises(ConfigError) as refused:
        read_config(dict(SPECS[0].tiny_config) | {field: value})
    assert field.split("_")[0] in str(refused.value)


@pytest.mark.parametrize(("field", "only"), [("hidden_act", "silu"), ("attention_bias", False), ("mlp_bias", False)])
def test_each_value_that_is_not_the_only_one_is_named_by_itself(field: str, only: object) -> None:
    value = "gelu" if only == "silu" else True
    with pytest.raises(ConfigError, match=f"^config.json: {field} is not supported\n") as refused:
        read_config(dict(SPECS[0].tiny_config) | {field: value})
    found = refused.value
    assert (found.where, found.found, found.expected) == (field, repr(value), repr(only))


def test_rotary_sections_that_contradict_each_other_are_refused() -> None:
    raw = dict(SPECS[0].tiny_config)
    base, nested = raw["rope_theta"], {"rope_type": "default", "rope_theta": raw["rope_theta"]}
    assert read_config(raw | {"rope_parameters": nested}) == read_config(raw)
    with pytest.raises(ConfigError, match=r"rope_parameters\.rope_theta"):
        read_config(raw | {"rope_parameters": nested | {"rope_theta": base + 1}})
    with pytest.raises(ConfigError, match=r"rope_scaling\.rope_type"):
        read_config(raw | {"rope_parameters": nested, "rope_scaling": {"type": "yarn", "factor": 4.0}})
