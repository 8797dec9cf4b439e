"""The shapes that decode steps are captured in. Torch-free: the memory plan counts them."""

from __future__ import annotations


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
