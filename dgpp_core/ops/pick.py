"""The likeliest token of each row of logits."""

from __future__ import annotations

from torch import Tensor


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The id of each row's largest logit, and whether the row is sound.

    Args:
        logits: float32 ``[M, V]``.

    Returns:
        int64 ``[M]``, ties to the lower id; bool ``[M]``: no logit is NaN or +inf, and at least one is finite. The pick
        of a row that is not sound means nothing.
    """
    if logits.is_cuda:
        from dgpp_core.ops.kernels import pick

        return pick.greedy(logits)
    peaks, tokens = logits.max(dim=1)
    return tokens, peaks.isfinite()
