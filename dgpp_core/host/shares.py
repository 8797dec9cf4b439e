"""Whether the state that one rank keeps is its share of the whole."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dgpp_core.api import ConfigError, PagedGroup, RecurrentGroup, StateGroup


def require_shares(whole: Sequence[StateGroup], share: Sequence[StateGroup], world: int) -> None:
    """Refuse a world whose ranks would not keep all of the state between them.

    A tensor of the checkpoint tells its axis and is checked there; heads are known to the model alone, and 2 of them
    among 4 ranks leave a projection that divides and a cache that does not. A group may be kept whole by every rank.

    Args:
        whole, share: a model's groups in a world of one and of ``world``.

    Raises:
        ConfigError: names the group, what a rank would keep and what there is.
    """
    for one, part in zip(whole, share, strict=True):
        kept, there = _kept(part), _kept(one)
        if math.prod(kept) * world < math.prod(there):
            raise ConfigError(
                f"the model's state cannot be divided among {world} ranks",
                where=f"world_size, state group {one.name}",
                found=f"{_described(one)} in all, {_described(part)} a rank",
                expected=f"a share for each of {world} ranks",
                hint="choose another world_size",
            )


def require_divided(model: str, groups: Sequence[StateGroup], world: int, ranks: int) -> None:
    """Refuse paged blocks that ``ranks`` of ``world`` ranks cannot divide, or that the model does not divide.

    Raises:
        ConfigError: naming the setting.
    """
    where = "engine.decode_context_parallel"
    if world % ranks:
        raise ConfigError(
            "KV blocks cannot be divided so", where=where, found=str(ranks), expected=f"a divisor of {world} ranks"
        )
    if {group.ranks for group in groups if isinstance(group, PagedGroup)} - {1} != {ranks} - {1}:
        raise ConfigError(f"{model} has no rows that ranks keep alike", where=where, found=str(ranks), expected="1")


def _kept(group: StateGroup) -> tuple[int, ...]:
    return group.shape if isinstance(group, RecurrentGroup) else (group.heads, group.width)


def _described(group: StateGroup) -> str:
    if isinstance(group, RecurrentGroup):
        return f"a state of {list(group.shape)}"
    return f"{group.heads} head{'s' if group.heads != 1 else ''} of width {group.width}"
