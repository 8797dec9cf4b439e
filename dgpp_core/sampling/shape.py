"""Penalties and bias: everything that happens to a row of logits before a token is chosen.

The order is binding: repetition, frequency, presence, bias. Arithmetic is fp64; a logit is rounded to fp32 after the
penalties and after the bias. Only the tokens concerned are touched. A token that does not exist has -inf, before and
after, so that masks (`dgpp_core.ops.forbid`) need no place in the order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dgpp_core.sampling.params import SamplingParams

_LARGEST = torch.finfo(torch.float32).max


def shape(
    logits: Tensor,
    params: SamplingParams,
    counts: Tensor | None = None,
    bias: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """A new row after penalties and bias.

    Args:
        logits: float32 [vocab].
        counts: int32 [vocab], occurrences in prompt and output; None without penalties.
        bias: ids int64 [k], none twice, and values float64 [k].
    """
    row = logits + 0.0  # -0.0 becomes 0.0: equal logits must be ordered by id alone
    if counts is not None:
        ids = counts.nonzero().flatten()
        row[ids] = _fp32(_penalise(row[ids].double(), counts[ids].double(), params))
    if bias is not None:
        ids, values = bias
        row[ids] = _fp32(row[ids].double() + values)
    return row


def _penalise(logits: Tensor, counts: Tensor, params: SamplingParams) -> Tensor:
    """Repetition as in Keskar et al., "CTRL" (2019); frequency and presence as in the OpenAI API."""
    repetition = params.repetition_penalty
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    return repeated - counts * params.frequency_penalty - params.presence_penalty


def _fp32(logits: Tensor) -> Tensor:
    # A repetition penalty near 0 may pass the fp32 range; +inf would turn into NaN further on.
    return logits.clamp(max=_LARGEST).float() + 0.0
