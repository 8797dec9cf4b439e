"""What a decode step reads, counted from the routing that happened."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import torch
from torch import Tensor

from dgpp_core.api import Drafter, Model
from dgpp_core.ops.experts import Experts
from dgpp_core.ops.router import Routing
from dgpp_core.testing.inspect import resident_tensor_bytes


class ExpertUse(msgspec.Struct, frozen=True, eq=False):
    """One call of a layer's experts: which of them rows were sent to."""

    experts: Experts
    chosen: frozenset[int]


@contextmanager
def recorded_routing() -> Iterator[list[ExpertUse]]:
    """Note every call of `Experts` while it lasts, in this process; it makes the host wait for the routing."""
    uses: list[ExpertUse] = []
    plain = Experts.__call__

    def recording(self: Experts, x: Tensor, routing: Routing, decode: bool = True) -> Tensor:
        uses.append(ExpertUse(self, frozenset(torch.unique(routing.ids).tolist())))
        return plain(self, x, routing, decode)

    Experts.__call__ = recording  # type: ignore[method-assign]
    try:
        yield uses
    finally:
        Experts.__call__ = plain  # type: ignore[method-assign]


def weight_bytes(model: Model, drafter: Drafter | None, unread: int, uses: list[ExpertUse]) -> int:
    """Bytes of weights that a step with these expert calls must read: each matrix once, each chosen expert once.

    A draft layer that runs several times in a step is counted once all the same: a floor.

    Args:
        unread: resident bytes that a step does not read as a whole (an embedding, rotary tables).
    """
    total = resident_tensor_bytes(model, drafter) - unread
    chosen: dict[int, tuple[Experts, frozenset[int]]] = {}
    for use in uses:
        before = chosen.get(id(use.experts), (use.experts, frozenset()))[1]
        chosen[id(use.experts)] = use.experts, before | use.chosen
    for experts, ids in chosen.values():
        held, entries = resident_tensor_bytes(experts), experts.experts + experts.shared
        total -= held * (experts.experts - len(ids)) // entries
    return total
