"""The exact draw from one row of shaped logits.

Canonical order is logit descending, then id ascending. Probabilities are held as integers, ``floor(p / p_max * 2**b)``
with ``b`` such that a whole vocabulary fits 62 bits (46 for 49,152 tokens): integer sums do not depend on their order,
so neither the thread count nor how many tokens were looked at can move a decision, and walking the survivors until the
running sum exceeds ``u`` times the mass always ends on a token of positive probability.

Sorting a whole vocabulary is slow, so a decision is first tried on a prefix of the canonical order. It is taken only if
tokens beyond the prefix cannot change it; the mass that it is measured against is that of the whole row.
"""

from __future__ import annotations

import math

import msgspec
import torch
from torch import Tensor

from dgpp_core.sampling.logprobs import TokenLogprobs
from dgpp_core.sampling.params import SamplingParams

WIDTHS = (256, 4096)
# exp() of less is 0 in fp64: such a token has no probability, and its logarithm no place in JSON.
_UNDERFLOW = -745.0
_NONE = float("-inf")


class Choice(msgspec.Struct, frozen=True):
    """A picked token and, where they were asked for, its logprobs."""

    token: int
    logprobs: TokenLogprobs | None


class _Row(msgspec.Struct, frozen=True, eq=False):
    """A row after the temperature.

    Attributes:
        logits: float32 [vocab], shaped.
        scaled: float64 [vocab], (logit - largest) / temperature: at most 0.
        weights: int64 [vocab], floor(exp(scaled) * unit).
        unit: the weight of the likeliest token.
    """

    logits: Tensor
    scaled: Tensor
    weights: Tensor
    unit: int


class _Prefix(msgspec.Struct, frozen=True, eq=False):
    """The first ids in canonical order, int64 [m]; ``whole`` if no other token exists."""

    ids: Tensor
    whole: bool


def draw(
    logits: Tensor, params: SamplingParams, u: float, logprobs: int = -1, widths: tuple[int, ...] = WIDTHS
) -> Choice:
    """Temperature, top-k, min-p, top-p, then the token at ``u`` of the remaining mass.

    Args:
        logits: float32 [vocab], shaped; at least one finite, no NaN, no +inf.
        params: temperature above 0.
        u: in [0, 1), a multiple of 2**-53. 0 picks the likeliest token, ties to the lower id.
        logprobs: alternatives to report; -1 reports nothing.
        widths: prefixes to try before the whole row; they change the speed alone.
    """
    row = _scale(logits, params.temperature)
    for width in (*widths, len(logits)):
        if width > params.top_k or width == len(logits):
            choice = _decide(row, _prefix(logits, width), params, u, logprobs)
            if choice is not None:
                return choice
    raise AssertionError("the whole row always decides")


def _scale(logits: Tensor, temperature: float) -> _Row:
    # The largest goes first: its 0 stays 0 at any temperature, so nothing overflows to NaN.
    scaled = logits.double().sub_(logits.amax()).div_(temperature)
    unit = 1 << (62 - (len(logits) - 1).bit_length())
    return _Row(logits, scaled, scaled.exp().mul_(unit).long(), unit)


def _prefix(logits: Tensor, width: int) -> _Prefix:
    """The canonical order as far as ``width`` largest logits tell it."""
    if width >= len(logits):
        values, ids = logits.sort(descending=True, stable=True)
        return _Prefix(ids[: int((values > _NONE).sum())], True)
    values, ids = logits.topk(width)
    # Of the tokens equal to the last one some may be missing: only those above it are surely all here.
    ids = ids[values > values[-1]].sort().values
    order = logits[ids].sort(descending=True, stable=True).indices
    return _Prefix(ids[order], bool(values[-1] == _NONE))


def _decide(row: _Row, prefix: _Prefix, params: SamplingParams, u: float, logprobs: int) -> Choice | None:
    """The choice, or None where it depends on tokens beyond the prefix."""
    ids, ended = prefix.ids, prefix.whole
    if params.top_k:
        ended = ended or len(ids) >= params.top_k
        ids = ids[: params.top_k]
        if not ended:
            return None
    floor = max(math.log(params.min_p), _UNDERFLOW) if params.min_p else _UNDERFLOW
    kept = ids[row.scaled[ids] >= floor]
    ended = ended or len(kept) < len(ids)
    if not len(kept):
        return None
    running = row.weights[kept].cumsum(0)
    mass = int(running[-1] if ended else row.weights[row.scaled >= floor].sum())
    if params.top_p < 1:
        part, whole = params.top_p.as_integer_ratio()
        crossing = int(torch.searchsorted(running, -(-mass * part // whole)))
        if crossing == len(kept):
            return None
        kept, mass, ended = kept[: crossing + 1], int(running[crossing]), True
    at = int(torch.searchsorted(running, int(u * 2.0**53) * mass >> 53, right=True))
    if at >= len(kept) or (len(kept) < logprobs and not ended):
        return None
    token = int(kept[at])
    return Choice(token, _logprobs(row, token, kept, mass, logprobs) if logprobs >= 0 else None)


def _logprobs(row: _Row, token: int, survivors: Tensor, mass: int, count: int) -> TokenLogprobs:
    """Natural logarithms of the final distribution."""
    norm = math.log(mass / row.unit)
    best = survivors[:count]
    top = zip(best.tolist(), (row.scaled[best] - norm).tolist(), strict=True)
    return TokenLogprobs(float(row.scaled[token]) - norm, tuple(top))
