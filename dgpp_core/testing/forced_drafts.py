"""Drafts that stand at a set rate, to time speculation on a model whose drafts are noise.

The step computes everything as always; only how many drafts count as right is decided otherwise. Replies are then not
the model's: a benchmark's hook, and nothing that serves uses it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dgpp_core.api import ConfigError

POSITIONS = 1 << 16
"""Lengths whose drafts are decided one by one; longer ones repeat them."""
_WORD = 0xFFFFFFFF


class ForcedAcceptance:
    """A `dgpp_core.engine.program.DecodeProgram.judge`: a draft stands where a hash of its position falls below a rate.

    The hash is in the manner of MurmurHash3's finaliser (Appleby, 2011), with products that fit 63 bits.

    Args:
        rate: share of drafts that stand where those before them do, 0 to 1.

    Raises:
        ConfigError: ``rate`` is no share.
    """

    def __init__(self, rate: float) -> None:
        if not 0 <= rate <= 1:
            raise ConfigError("no share of drafts", where="--accept-rate", found=str(rate), expected="0 to 1")
        self._below = int(rate * (1 << 32))
        self._tables: dict[tuple[int, torch.device], Tensor] = {}

    def __call__(self, lengths: Tensor, depth: int) -> Tensor:
        """How many of ``depth`` drafts stand at each of int64 ``lengths`` ``[B]``: looked up, for a step is timed."""
        key = depth, lengths.device
        if key not in self._tables:
            self._tables[key] = self.stand(torch.arange(POSITIONS), depth).to(lengths.device)
        return self._tables[key][lengths % POSITIONS]

    def stand(self, lengths: Tensor, depth: int) -> Tensor:
        """The same without a table, and so for any length."""
        word = lengths.unsqueeze(1) + torch.arange(1, depth + 1, device=lengths.device)
        word = (word * 0x85EBCA6B) & _WORD
        word = ((word ^ (word >> 13)) * 0x42B2AE35) & _WORD
        return ((word ^ (word >> 16)) < self._below).long().cumprod(dim=1).sum(dim=1)
