"""The fold: one sum of every rank's part, the same bits on each of them.

A library's all-reduce adds in an order that depends on its algorithm, the message size and the number of ranks. Here
every rank gathers all parts and adds them itself, in ascending order of rank, in float32, and rounds once at the end.
So ranks agree to the bit without telling each other what they picked, and this function is the oracle of any transport.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dgpp_core.api import EngineError

PAYLOADS = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that can be summed: each widens to float32 without loss."""


def fold(parts: Sequence[Tensor]) -> Tensor:
    """The sum of ``parts``, which stand in ascending order of rank.

    The chain begins with rank 0's value, not with zero, so that a sum of negative zeros keeps its sign. A payload in
    bfloat16 or float16 is widened first and rounded once; a float32 payload is float32 all the way.

    Args:
        parts: at least one; same shape, and same dtype of `PAYLOADS`.

    Returns:
        a tensor of its own, of the parts' shape and dtype.
    """
    if len(parts) == 2:
        return parts[0] + parts[1]  # torch adds narrow numbers in float32 too and rounds once: one kernel, same bits
    total = parts[0].to(torch.float32, copy=True)
    for part in parts[1:]:
        total += part  # a narrower part is widened exactly before it is added
    return total.to(parts[0].dtype)


def require_payload(part: Tensor) -> None:
    """Raise `EngineError` where ``part`` has a dtype that `fold` would not sum as promised."""
    if part.dtype not in PAYLOADS:
        raise EngineError(
            "a tensor of this dtype cannot be summed over the ranks",
            where="all_reduce",
            found=str(part.dtype),
            expected=" or ".join(map(str, PAYLOADS)),
        )
