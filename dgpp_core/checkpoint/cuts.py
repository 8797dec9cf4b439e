"""The part of a checkpoint tensor that one tensor-parallel rank holds. Torch-free: the memory plan uses it too."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

from dgpp_core.api.bindings import Binding
from dgpp_core.api.errors import CheckpointError, ScaleError


def cut_ranges(binding: Binding, rank: int, world: int) -> tuple[tuple[int, int], ...]:
    """First index and length along the cut axis of all that ``rank`` holds; without one, all of axis 0.

    There is one range, or one of each part that the checkpoint has fused.

    Raises:
        CheckpointError: the axis cannot be divided among ``world`` ranks.
    """
    if binding.cut is None:
        return ((0, binding.shape[0] if binding.shape else 1),)
    lengths = binding.fused or (binding.shape[binding.cut],)
    pieces = min(world, binding.heads or world)
    if world % pieces or (binding.heads or pieces) % pieces or any(length % pieces for length in lengths):
        raise _undivided(binding, lengths, world)
    starts, own = itertools.accumulate(lengths[:-1], initial=0), rank * pieces // world
    return tuple(
        (start + own * (length // pieces), length // pieces) for start, length in zip(starts, lengths, strict=True)
    )


def cut_shape(binding: Binding, world: int) -> tuple[int, ...]:
    """Shape of one rank's part; raises as `cut_ranges`."""
    shape = list(binding.shape)
    if binding.cut is not None:
        shape[binding.cut] = sum(length for _, length in cut_ranges(binding, 0, world))
    return tuple(shape)


@contextlib.contextmanager
def naming(binding: Binding, storage: str, world: int) -> Iterator[None]:
    """Formats know neither a tensor's name nor how many ranks there are: a `ScaleError` gets both.

    Raises:
        CheckpointError: in its place.
    """
    try:
        yield
    except ScaleError as error:
        divided = binding.cut is not None and world > 1
        axis = f"axis {binding.cut} of " if divided else ""
        raise CheckpointError(
            f"the tensor {binding.name} cannot be held as {storage}"
            + (f" by each of {world} ranks" if divided else ""),
            where=f"{axis}{list(binding.shape)}, {error.where}",
            found=error.found,
            expected=error.expected,
            hint="choose another world_size" if divided else "config.json and this storage do not belong together",
        ) from error


def _undivided(binding: Binding, lengths: tuple[int, ...], world: int) -> CheckpointError:
    found = " + ".join(map(str, lengths))
    return CheckpointError(
        f"the tensor {binding.name} cannot be divided among {world} ranks",
        where=f"axis {binding.cut} of {list(binding.shape)}",
        found=f"{found}, {binding.heads} heads" if binding.heads else found,
        expected=f"a multiple or a divisor of {binding.heads} ranks" if binding.heads else f"a multiple of {world}",
        hint="choose another world_size",
    )
