"""The collectives of a world of one."""

from __future__ import annotations

from torch import Tensor


class SoloBus:
    """Implements `dgpp_core.api.Bus` for one rank."""

    rank = 0
    world = 1
    capturable = True

    def all_reduce(self, partial: Tensor) -> Tensor:
        """The only rank's part is the sum."""
        return partial

    def all_gather(self, part: Tensor, dim: int) -> Tensor:
        """The only rank's part is the whole."""
        return part

    def barrier(self) -> None:
        """There is nobody to wait for."""

    def check(self) -> None:
        """Nothing can fail."""
