"""Allocation, snapshots and restores of state groups, without knowing what is in them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dgpp_core.api import DTYPE_BYTES, PagedGroup, RecurrentGroup, StateGroup, WindowGroup
from dgpp_core.engine.geometry import Geometry, pool_shape, snapshot_shape


class StatePools:
    """All state of one rank: a pool a group, an arena a window or recurrent group.

    Args:
        groups: of the model and its drafter; names are unique.
    """

    def __init__(self, groups: Sequence[StateGroup], geometry: Geometry, device: torch.device) -> None:
        self.groups, self.geometry = tuple(groups), geometry
        self.pools: dict[str, Tensor] = {}
        self.arenas: dict[str, Tensor] = {}
        for group in self.groups:
            dtype = getattr(torch, group.dtype)
            self.pools[group.name] = torch.zeros(pool_shape(group, geometry), dtype=dtype, device=device)
            shape = snapshot_shape(group, geometry.step_width)
            if shape is not None and geometry.snapshots:
                arena = (shape[0], geometry.snapshots, *shape[1:])
                self.arenas[group.name] = torch.zeros(arena, dtype=dtype, device=device)

    @property
    def bytes(self) -> int:
        """Bytes allocated."""
        return sum(t.numel() * t.element_size() for t in (*self.pools.values(), *self.arenas.values()))

    @property
    def bytes_per_token(self) -> int:
        """Bytes of paged rows a token, what a step reads of each token of its context."""
        paged = [group for group in self.groups if isinstance(group, PagedGroup)]
        return sum(g.layers * g.heads * g.width * DTYPE_BYTES[g.dtype] // g.ranks for g in paged)

    def clear(self, slot: int) -> None:
        """Make a slot's recurrent state fresh; window rows are dead by their positions."""
        for group in self.groups:
            if isinstance(group, RecurrentGroup):
                self.pools[group.name][:, slot].zero_()

    def save(self, slot: int, candidates: Tensor, arena: int, passed: tuple[Tensor, int] | None = None) -> None:
        """Copy a slot's window and recurrent state into an arena slot.

        A verify step leaves the state behind each of its rows: in candidates, and in a ring that is longer than its
        window by as many rows. So the state at an earlier position of the last step is still there.

        Args:
            candidates: int64 ``[slots or more]`` on the device: which recurrent candidate is a slot's committed one.
            passed: lengths, int64 ``[slots or more]`` on the device, and a position: the state to copy is that at
                the position, and nothing is copied where the slot's last step did not pass it.
        """
        chosen, taken = candidates[slot : slot + 1], None
        if passed is not None:
            lengths, position = passed
            chosen = chosen - lengths[slot : slot + 1] + position
            taken = (chosen >= 0) & (lengths[slot : slot + 1] >= position)
            chosen = chosen.clamp(0, self.geometry.step_width - 1)
        for name, target in self.arenas.items():
            rows = self.pools[name][:, slot]
            if not self._is_window(name):
                rows = rows.index_select(1, chosen).squeeze(1)
            target[:, arena] = rows if taken is None else torch.where(taken, rows, target[:, arena])

    def load(self, arena: int, slot: int) -> None:
        """Copy an arena slot into a slot, as its recurrent candidate 0."""
        for name, source in self.arenas.items():
            pool = self.pools[name]
            if self._is_window(name):
                pool[:, slot] = source[:, arena]
            else:
                pool[:, slot, 0] = source[:, arena]

    def _is_window(self, name: str) -> bool:
        return any(g.name == name and isinstance(g, WindowGroup) for g in self.groups)
