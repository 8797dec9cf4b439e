"""Sampling parameters of one request. Torch-free: the front end and the messages use this too."""

from __future__ import annotations

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the next token is chosen; defaults are plain sampling from the model's distribution.

    Attributes:
        temperature: 0 is exact greedy.
        top_p: mass kept, (0, 1].
        top_k: candidates kept; 0 is off.
        min_p: kept if p >= min_p * max p, [0, 1].
        repetition_penalty: > 0; 1 is off.
        frequency_penalty: subtracted a count.
        presence_penalty: subtracted once.
        seed: unsigned 64 bit; a draw depends on it and on the token's absolute position alone.
        logit_bias: pairs (id, bias), ids ascending.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()

    @property
    def penalised(self) -> bool:
        """Whether token counts are needed."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0


GREEDY = SamplingParams(temperature=0.0)
