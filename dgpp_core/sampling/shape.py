"""Penalties, bias and mask: everything that happens to a row of logits before a token is chosen.

The order is binding: repetition, frequency, presence, bias, mask. Arithmetic is fp64; a logit is rounded to fp32 after
the penalties and after the bias. Only the tokens concerned are touched.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dgpp_core.api.errors import EngineError
from dgpp_core.sampling.params import SamplingParams

_LARGEST = torch.finfo(torch.float32).max
_NONE = float("-inf")


def shape(
    logits: Tensor,
    params: SamplingParams,
    counts: Tensor | None = None,
    bias: tuple[Tensor, Tensor] | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """A new row after penalties, bias and mask; a token that does not exist has -inf.

    Args:
        logits: float32 [vocab].
        counts: int32 [vocab], occurrences in prompt and output; None without penalties.
        bias: ids int64 [k], none twice, and values float64 [k].
        mask: which tokens exist: bool [vocab], or int32 [ceil(vocab / 32)] with token i at bit i % 32 of word i // 32.
    """
    row = logits + 0.0  # -0.0 becomes 0.0: equal logits must be ordered by id alone
    if counts is not None:
        ids = counts.nonzero().flatten()
        row[ids] = _fp32(_penalise(row[ids].double(), counts[ids].double(), params))
    if bias is not None:
        ids, values = bias
        row[ids] = _fp32(row[ids].double() + values)
    return row if mask is None else row.masked_fill_(~_allowed(mask.to(row.device), len(row)), _NONE)


def _penalise(logits: Tensor, counts: Tensor, params: SamplingParams) -> Tensor:
    """Repetition as in Keskar et al., "CTRL" (2019); frequency and presence as in the OpenAI API."""
    repetition = params.repetition_penalty
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    return repeated - counts * params.frequency_penalty - params.presence_penalty


def _fp32(logits: Tensor) -> Tensor:
    # A repetition penalty near 0 may pass the fp32 range; +inf would turn into NaN further on.
    return logits.clamp(max=_LARGEST).float() + 0.0


def _allowed(mask: Tensor, vocab_size: int) -> Tensor:
    """The mask as bool [vocab]."""
    if mask.dtype == torch.bool and mask.shape == (vocab_size,):
        return mask
    words = (vocab_size + 31) // 32
    if mask.dtype == torch.int32 and mask.shape == (words,):
        bits = mask.unsqueeze(1) >> torch.arange(32, dtype=torch.int32, device=mask.device)
        return (bits & 1).bool().flatten()[:vocab_size]
    raise EngineError(
        "a token mask has the wrong shape",
        found=f"{mask.dtype} {list(mask.shape)}",
        expected=f"torch.bool [{vocab_size}] or torch.int32 [{words}]",
        hint="build the mask for the vocabulary of the model",
    )
