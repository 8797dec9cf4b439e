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
