"""Parameters that the arithmetic cannot serve are refused by name."""

from __future__ import annotations

import math
from typing import Any

import pytest

from dgpp_core.api.errors import RequestError
from dgpp_core.sampling.params import SamplingParams
from dgpp_core.sampling.validate import validate

VOCAB = 100


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("temperature", v) for v in (-0.1, math.inf, math.nan)],
        *[("top_p", v) for v in (0.0, -0.5, 1.01, math.nan)],
        *[("min_p", v) for v in (-0.01, 1.01, math.nan)],
        ("top_k", -1),
        *[("repetition_penalty", v) for v in (0.0, -1.0, 100.5, math.inf, math.nan)],
        *[("frequency_penalty", v) for v in (math.inf, math.nan)],
        *[("presence_penalty", v) for v in (-math.inf, math.nan)],
        *[("seed", v) for v in (-1, 2**64)],
    ],
)
def test_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"^{name} is ") as caught:
        validate(SamplingParams(**{name: value}), VOCAB)
    assert (caught.value.param, caught.value.status) == (name, 400)


@pytest.mark.parametrize(
    ("bias", "param"),
    [
        (((99999999, 5.0),), "logit_bias.99999999"),
        (((VOCAB, 5.0),), f"logit_bias.{VOCAB}"),
        (((-1, 5.0),), "logit_bias.-1"),
        (((3, 1.0), (3, 1.0)), "logit_bias.3"),
        (((4, 1.0), (3, 1.0)), "logit_bias.3"),
        (((3, 100.5),), "logit_bias.3"),
        (((3, math.nan),), "logit_bias.3"),
    ],
)
def test_bias_refused_by_id(bias: tuple[tuple[int, float], ...], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        validate(SamplingParams(logit_bias=bias), VOCAB)
    assert caught.value.param == param
