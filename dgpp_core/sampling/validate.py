"""The sampler's own check of its parameters. Torch-free.

The door checks the narrower ranges of the API; this is what the arithmetic needs, whoever sent the request.
"""

from __future__ import annotations

import math

from dgpp_core.api.errors import RequestError
from dgpp_core.sampling.params import SamplingParams


def validate(params: SamplingParams, vocab_size: int) -> None:
    """Refuse parameters that the sampler cannot serve.

    Raises:
        RequestError: naming the first parameter out of range.
    """
    p = params
    _require(math.isfinite(p.temperature) and p.temperature >= 0, "temperature", p.temperature, "finite, at least 0")
    _require(0 < p.top_p <= 1, "top_p", p.top_p, "above 0, at most 1")
    _require(p.top_k >= 0, "top_k", p.top_k, "at least 0; 0 is off")
    _require(0 <= p.min_p <= 1, "min_p", p.min_p, "from 0 to 1")
    _require(0 < p.repetition_penalty <= 100, "repetition_penalty", p.repetition_penalty, "above 0, at most 100")
    _require(math.isfinite(p.frequency_penalty), "frequency_penalty", p.frequency_penalty, "finite")
    _require(math.isfinite(p.presence_penalty), "presence_penalty", p.presence_penalty, "finite")
    _require(0 <= p.seed < 1 << 64, "seed", p.seed, "an unsigned 64-bit integer")
    last = -1
    for token, bias in p.logit_bias:
        where = f"logit_bias.{token}"
        _require(0 <= token < vocab_size, where, token, f"an id of the vocabulary, 0 to {vocab_size - 1}")
        _require(token > last, where, token, "ids in ascending order, none twice")
        _require(-100 <= bias <= 100, where, bias, "from -100 to 100")
        last = token


def _require(holds: bool, param: str, found: float, expected: str) -> None:
    if not holds:
        raise RequestError(f"{param} is {found!r}; expected: {expected}", param=param, code="invalid_parameter")
