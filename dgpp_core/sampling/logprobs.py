"""What the sampler says about a picked token. Torch-free: the messages carry it."""

from __future__ import annotations

import msgspec


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural-log probability of a picked token and the best alternatives ``(id, logprob)`` in canonical order."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
