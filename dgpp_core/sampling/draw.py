"""The exact draw from one row of shaped logits.

Canonical order is logit descending, then id ascending. Probabilities are held as integers, ``floor(p / p_max * 2**b)``
with ``b`` such that a whole vocabulary fits 62 bits (46 for 49,152 tokens): integer sums do not depend on their order,
so neither the thread count nor how many tokens were looked at can move a decision, and walking the survivors until the
running sum exceeds ``u`` times the mass always ends on a token of positive probability.

Sorting a whole vocabulary is slow, so a decision is first tried on a prefix of the canonical order. It is taken only
where it falls inside the prefix; the mass that it is measured against is that of the whole row.
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
# Logits are multiplied by the reciprocal of the temperature, which must stay finite; 1e-300 is as cold as any.
_COLDEST = 1e-300
_ID_BITS = 32


class Choice(msgspec.Struct, frozen=True):
    """A picked token and, where they were asked for, its logprobs."""

    token: int
    logprobs: TokenLogprobs | None


class _Weights(msgspec.Struct, frozen=True, eq=False):
    """Some or all tokens of a row after temperature and min-p.

    Attributes:
        scaled: float64 [m], (logit - largest) * (1 / temperature): at most 0.
        weights: int64 [m], floor(exp(scaled) * unit), or 0 below min-p.
        unit: the weight of the likeliest token.
        mass: the sum of all weights that count, which `weights` may be an excerpt of.
    """

    scaled: Tensor
    weights: Tensor
    unit: int
    mass: int

    def excerpt(self, ids: Tensor) -> _Weights:
        """The tokens ``ids``, on the host."""
        return _Weights(self.scaled[ids].cpu(), self.weights[ids].cpu(), self.unit, self.mass)


def draw(
    logits: Tensor, params: SamplingParams, u: float, logprobs: int = -1, widths: tuple[int, ...] = WIDTHS
) -> Choice:
    """Temperature, top-k, min-p, top-p, then the token at ``u`` of the remaining mass.

    Args:
        logits: float32 [vocab], shaped; at least one finite, no NaN, no +inf, no -0.0.
        params: temperature above 0.
        u: in [0, 1), a multiple of 2**-53. 0 picks the likeliest token, ties to the lower id.
        logprobs: alternatives to report; -1 reports nothing.
        widths: prefixes to try before the whole row; they change the speed alone.
    """
    keys, floor = _keys(logits), least_scaled(params)
    if 0 < params.top_k < len(logits):
        ids = _first(keys, params.top_k)
        choice = _decide(ids.cpu(), _weigh(logits[ids], params, floor), params, floor, u, logprobs)
    else:
        row = _weigh(logits, params, floor)
        choice = None
        for width in (*(w for w in widths if logprobs <= w < len(logits)), len(logits)):
            ids = _first(keys, width)
            choice = _decide(ids.cpu(), row.excerpt(ids), params, floor, u, logprobs)
            if choice is not None:
                break
    assert choice is not None, "all survivors together always decide"
    return choice


def inverse_temperature(params: SamplingParams) -> float:
    """What logits are multiplied by."""
    return 1.0 / max(params.temperature, _COLDEST)


def least_scaled(params: SamplingParams) -> float:
    """The least scaled logit that counts: that of min-p, or where a probability still is a number."""
    return max(math.log(params.min_p), _UNDERFLOW) if params.min_p else _UNDERFLOW


def weight_unit(tokens: int) -> int:
    """The weight of the likeliest of ``tokens`` tokens, a power of two: all together fit 62 bits."""
    return 1 << (62 - (tokens - 1).bit_length())


def _keys(logits: Tensor) -> Tensor:
    """Integers in canonical order, least first, int64 [vocab]: the logit's bits made monotone, above the id."""
    bits = logits.view(torch.int32)
    falling = (bits >> 31).bitwise_and_(0x7FFFFFFF).bitwise_xor_(bits).bitwise_not_()
    return falling.long().bitwise_left_shift_(_ID_BITS).add_(torch.arange(len(logits), device=logits.device))


def _first(keys: Tensor, count: int) -> Tensor:
    """The first ``count`` ids in canonical order, int64."""
    least = keys if count == len(keys) else keys.topk(count, largest=False, sorted=False).values
    return least.sort().values.bitwise_and_((1 << _ID_BITS) - 1)


def _weigh(logits: Tensor, params: SamplingParams, floor: float) -> _Weights:
    # The largest goes first: its 0 stays 0 at any temperature, so nothing overflows to NaN.
    scaled = logits.double().sub_(logits.amax()).mul_(inverse_temperature(params))
    unit = weight_unit(len(logits))
    weights = scaled.exp().mul_(unit).long()
    if params.min_p:
        weights.masked_fill_(scaled < floor, 0)
    return _Weights(scaled, weights, unit, int(weights.sum()))


def _decide(
    ids: Tensor, first: _Weights, params: SamplingParams, floor: float, u: float, logprobs: int
) -> Choice | None:
    """The choice, or None where it depends on tokens after ``first``, which are in canonical order."""
    scaled = first.scaled.cpu()
    kept = int((scaled >= floor).sum())
    running = first.weights.cpu()[:kept].cumsum(0)
    mass = first.mass
    if params.top_p < 1:
        part, whole = params.top_p.as_integer_ratio()
        crossing = int(torch.searchsorted(running, -(-mass * part // whole)))
        if crossing == kept:
            return None
        kept, mass = crossing + 1, int(running[crossing])
    at = int(torch.searchsorted(running, int(u * 2.0**53) * mass >> 53, right=True))
    if at >= kept:
        return None
    token = int(ids[at])
    if logprobs < 0:
        return Choice(token, None)
    norm = math.log(mass / first.unit)
    best = min(kept, logprobs)
    top = zip(ids[:best].tolist(), (scaled[:best] - norm).tolist(), strict=True)
    return Choice(token, TokenLogprobs(float(scaled[at]) - norm, tuple(top)))
