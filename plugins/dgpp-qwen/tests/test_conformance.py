"""Qwen3.8-Flash-Next keeps every promise of the contract, and equals its equations."""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from dgpp_core.testing import ModelConformance

_SPEC = importlib.util.spec_from_file_location("qwen_reference", Path(__file__).with_name("reference.py"))
assert _SPEC is not None
assert _SPEC.loader is not None
reference = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(reference)


class TestFlashNext(ModelConformance):
    """Every check of the kit, on the tiny config."""

    model = "qwen38-flash-next"
    reply_tokens = 8

    def reference(self, weights: Mapping[str, Tensor], config: Mapping[str, Any], tokens: Sequence[int]) -> Tensor:
        """The equations."""
        plain = reference.Plain(weights, config)
        logits: Tensor = plain.logits(plain.hidden(tokens))
        return logits.float()
