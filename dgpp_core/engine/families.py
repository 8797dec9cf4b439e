"""The shapes that decode steps are captured in. Torch-free: the memory plan counts them."""

from __future__ import annotations

from collections.abc import Sequence

from dgpp_core.api import ConfigError
from dgpp_core.config.settings import EngineSettings

MOST_FAMILIES = 64
GRAPHS = 5
"""Most graphs of a family: a step whose requests are all greedy, one that samples, and three parts of any other."""


def family_sizes(slots: int) -> list[int]:
    """Segments of each family for up to ``slots`` requests: powers of two, the numbers halfway, and ``slots`` itself.

    1, 2, 3, 4, 6, 8, 12, 16, 24 ...: less than a third of a step's segments is inert.
    """
    sizes, size = {slots}, 1
    while size < slots:
        sizes |= {size, size * 3 // 2}
        size *= 2
    return sorted(size for size in sizes if size <= slots)


def depth_ladder(depth: int, least: int) -> tuple[int, ...]:
    """Draft depths that steps may have where the depth follows what stands: powers of two and ``depth`` itself.

    Args:
        least: no shallower one, unless ``depth`` is.
    """
    return tuple(sorted({depth, *(rung for rung in (1, 2, 4, 8) if least <= rung < depth)}))


def step_depths(depth: int, settings: EngineSettings) -> tuple[int, ...]:
    """Draft depths that an engine's steps may have, ``depth`` being the deepest."""
    return depth_ladder(depth, settings.mtp_schedule_min_depth) if settings.mtp_schedule and depth else (depth,)


def require_families(slots: int, depths: Sequence[int]) -> None:
    """Raise `ConfigError` where steps of up to ``slots`` requests at ``depths`` are too many shapes to capture."""
    if len(sizes := family_sizes(slots)) * len(depths) > MOST_FAMILIES:
        raise ConfigError(
            "too many decode shapes",
            where="max_concurrency",
            found=f"{len(sizes)} request counts x {len(depths)} draft depths",
            expected=f"<= {MOST_FAMILIES}",
            hint="lower max_concurrency or mtp_depth, or set decode_graph to false",
        )
