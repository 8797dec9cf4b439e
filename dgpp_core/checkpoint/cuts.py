"""The part of a checkpoint tensor that one tensor-parallel rank holds. Torch-free: the memory plan uses it too."""

from __future__ import annotations

from dgpp_core.api.bindings import Binding
from dgpp_core.api.errors import CheckpointError


def cut_range(binding: Binding, rank: int, world: int) -> tuple[int, int]:
    """First index and length of ``rank``'s part along the cut axis; along axis 0, all of it, where nothing is cut.

    Raises:
        CheckpointError: the axis cannot be divided among ``world`` ranks.
    """
    if binding.cut is None:
        return 0, binding.shape[0] if binding.shape else 1
    size = binding.shape[binding.cut]
    if size % world:
        raise CheckpointError(
            f"the tensor {binding.name} cannot be divided among {world} ranks",
            where=f"axis {binding.cut} of {list(binding.shape)}",
            found=str(size),
            expected=f"a multiple of {world}",
            hint="choose another world_size",
        )
    return rank * (size // world), size // world


def cut_shape(binding: Binding, world: int) -> tuple[int, ...]:
    """Shape of one rank's part; raises as `cut_range`."""
    shape = list(binding.shape)
    if binding.cut is not None:
        shape[binding.cut] = cut_range(binding, 0, world)[1]
    return tuple(shape)
