"""The greedy pick over a vocabulary that is divided among ranks, without gathering the logits."""

from __future__ import annotations

import torch
from torch import Tensor

from dgpp_core.api import Bus

_ID_BITS = 32
_LAST_ID = (1 << _ID_BITS) - 1


def sharded_argmax(local_logits: Tensor, first_id: int, bus: Bus) -> tuple[Tensor, Tensor]:
    """Each row's largest logit over all ranks and its id, the lowest where several are equal, as `torch.max` gives it.

    A rank sends 8 bytes a row: the logit's bits, made so that integers compare as the logits do, above the complement
    of the id. No value is read by the host.

    Args:
        local_logits: float32 ``[M, V / W]``, this rank's slice; ``V`` is below 2**32.
        first_id: the id of the slice's first column.

    Returns:
        float32 ``[M]`` and int64 ``[M]``, the same bits on every rank. A NaN is larger than anything, as in torch; a
        maximum of -0.0 comes back as 0.0.

    Raises:
        EngineError: as the bus.
    """
    peaks, columns = local_logits.max(dim=1)
    keys = _ordered(peaks).bitwise_left_shift(_ID_BITS) + (_LAST_ID - first_id - columns)
    best = bus.all_gather(keys.unsqueeze(0), 0).amax(dim=0)
    ids = _LAST_ID - best.bitwise_and(_LAST_ID)
    return _logits(best.bitwise_right_shift(_ID_BITS)), ids


def _ordered(values: Tensor) -> Tensor:
    """int64, in int32's range: larger where the float32 is; equal for both zeros, and for all NaNs, which are last."""
    plain = torch.where(values.isnan(), torch.nan, values + 0.0)
    bits = plain.view(torch.int32)
    return torch.where(bits < 0, bits.bitwise_xor(0x7FFFFFFF), bits).long()


def _logits(ordered: Tensor) -> Tensor:
    bits = ordered.int()
    return torch.where(bits < 0, bits.bitwise_xor(0x7FFFFFFF), bits).view(torch.float32)
