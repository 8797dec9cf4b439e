"""Qwen3.8-Flash-Next keeps every promise of the contract, and equals its equations."""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dgpp_core.testing import ModelConformance
from dgpp_core.testing.recorded import recorded_cases

TEMPLATES = Path(__file__).parents[4] / "shared" / "data" / "chat_templates"
_SPEC = importlib.util.spec_from_file_location("qwen_reference", Path(__file__).with_name("reference.py"))
assert _SPEC is not None
assert _SPEC.loader is not None
reference = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(reference)


class TestFlashNext(ModelConformance):
    """Every check of the kit, on the tiny config."""

    model = "qwen38-flash-next"
    template = TEMPLATES / "Qwen3.8.jinja"
    reply_tokens = 3
    worlds = (1, 2, 4)

    @classmethod
    def golden_cases(cls) -> Mapping[str, Mapping[str, Any]]:
        """Prompts recorded from transformers, beside the checkout where they are there at all."""
        return recorded_cases(TEMPLATES / "golden", "Qwen3.8")

    @pytest.fixture(scope="class")
    @classmethod
    def prompts(cls) -> list[list[int]]:
        """Shorter than the kit's, which take this model long; rows still have blocks to choose from."""
        source = torch.Generator().manual_seed(5)
        return [torch.randint(512, (n,), generator=source).tolist() for n in (37, 5, 21, 16, 33, 1, 49, 24)]

    def reference(self, weights: Mapping[str, Tensor], config: Mapping[str, Any], tokens: Sequence[int]) -> Tensor:
        """The equations."""
        plain = reference.Plain(weights, config)
        logits: Tensor = plain.logits(plain.hidden(tokens))
        return logits.float()
