"""An independent sampler: plain Python numbers, no torch, the rules one after the other."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from dgpp_core.sampling.params import SamplingParams


@dataclass
class Verdict:
    """What the rules say.

    ``margin`` is the smallest distance, in probability, between a number that was compared and what it was compared
    with: below 1e-9 another rounding may rightly decide otherwise.
    """

    token: int
    logprob: float
    top: list[tuple[int, float]]
    survivors: list[int]
    probabilities: dict[int, float] = field(default_factory=dict)
    margin: float = 1.0


Reference = Callable[..., Verdict]


def shaped_logits(
    logits: Sequence[float], params: SamplingParams, history: Sequence[int], allowed: Sequence[bool] | None
) -> list[float]:
    """Repetition, frequency, presence, bias, mask; rounded to fp32 after the penalties and at the end."""
    counts, bias = Counter(history), dict(params.logit_bias)
    row = []
    for token, logit in enumerate(logits):
        value = float(logit)
        if counts[token]:
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
            value -= counts[token] * params.frequency_penalty
            value -= params.presence_penalty
        value = float(np.float32(value)) + bias.get(token, 0.0)
        if allowed is not None and not allowed[token]:
            value = -math.inf
        row.append(float(np.float32(value)))
    return row


def verdict(
    logits: Sequence[float],
    params: SamplingParams,
    u: float,
    *,
    history: Sequence[int] = (),
    allowed: Sequence[bool] | None = None,
    alternatives: int = 0,
) -> Verdict:
    row = shaped_logits(logits, params, history, allowed)
    order = sorted((t for t in range(len(row)) if row[t] > -math.inf), key=lambda t: (-row[t], t))
    peak, margin = row[order[0]], 1.0
    if params.temperature == 0:
        total = math.fsum(math.exp(row[t] - peak) for t in order)
        final = {t: row[t] - peak - math.log(total) for t in order}
        best = [(t, final[t]) for t in order[:alternatives]]
        return Verdict(order[0], final[order[0]], best, order, {t: math.exp(final[t]) for t in order})
    if params.top_k:
        order = order[: params.top_k]
    weight = {t: math.exp(max((row[t] - peak) / params.temperature, -1e6)) for t in order}
    if params.min_p:
        margin = min([margin, *(abs(weight[t] - params.min_p) for t in order if row[t] != peak)])
        order = [t for t in order if weight[t] >= params.min_p or row[t] == peak]
    order = [t for t in order if weight[t] > 0]
    if params.top_p < 1:
        total, mass, kept = math.fsum(weight[t] for t in order), 0.0, []
        for t in order:
            kept.append(t)
            mass += weight[t] / total
            margin = min(margin, abs(mass - params.top_p))
            if mass >= params.top_p:
                break
        order = kept
    total = math.fsum(weight[t] for t in order)
    chances = {t: weight[t] / total for t in order}
    accumulator, token = 0.0, order[-1]
    for t in order:
        accumulator += chances[t]
        margin = min(margin, abs(accumulator - u)) if accumulator < 1 - 1e-12 else margin
        if accumulator > u:
            token = t
            break
    logs = {t: (row[t] - peak) / params.temperature - math.log(total) for t in order}
    return Verdict(token, logs[token], [(t, logs[t]) for t in order[:alternatives]], order, chances, margin)


@pytest.fixture(scope="session")
def reference() -> Reference:
    return verdict
