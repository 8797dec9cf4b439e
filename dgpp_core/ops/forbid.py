"""Tokens that a row may not have, taken out of its logits."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from dgpp_core.api.errors import EngineError

_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_ADDED = np.where(_BITS == 1, np.float32(0), np.float32(-np.inf))
"""What eight logits are given by a byte of their mask: float32 ``[256, 8]``."""


def forbid(logits: Tensor, masks: Tensor) -> None:
    """Give every token that a row's mask leaves out the logit -inf, in place.

    A logit of -inf stays one through penalties and bias, so this may come before them. A NaN or +inf of a forbidden
    token does not have to outlast this: whoever must know looks before.

    Args:
        logits: float32 ``[M, V]``, contiguous.
        masks: int32 ``[M, ceil(V / 32)]`` on the same device, with token i at bit i % 32 of word i // 32.

    Raises:
        EngineError: the shapes do not fit together.
    """
    rows, vocab = logits.shape
    words = (vocab + 31) // 32
    if masks.shape != (rows, words):
        raise EngineError(
            "token masks have the wrong shape",
            found=str(list(masks.shape)),
            expected=f"[{rows}, {words}]",
            hint="build the masks for the vocabulary of the model",
        )
    if logits.is_cuda:
        from dgpp_core.ops.kernels import forbid as kernels

        kernels.forbid(logits, masks)
        return
    # A look-up and a sum, eight logits at a time, takes a fifth of a store where bits are clear.
    whole, left = divmod(vocab, 8)
    values, eights = logits.numpy(), masks.numpy().view(np.uint8)
    head = values[:, : 8 * whole].reshape(rows, whole, 8)
    np.add(head, _ADDED.take(eights[:, :whole], axis=0), out=head)
    if left:
        values[:, 8 * whole :] += _ADDED[eights[:, whole], :left]
