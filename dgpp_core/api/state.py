"""State groups: what a model keeps for each request between steps.

The engine allocates, shares, snapshots, restores and rolls back groups without knowing what is in them. Tensors are
laid out so that one group of one layer is contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

Dtype = Literal["compute", "float32", "bfloat16", "float16", "float8_e4m3fn", "uint8", "int32", "int64"]
"""``compute`` is the dtype that activations have on the device; see `for_device`."""

DTYPE_BYTES: dict[str, int] = {
    "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "uint8": 1, "int32": 4, "int64": 8,
}  # fmt: skip
COMPUTE_DTYPE: dict[str, Dtype] = {"cpu": "float32", "cuda": "bfloat16"}
"""What ``compute`` stands for, by kind of device."""


class PagedGroup(msgspec.Struct, frozen=True, kw_only=True, tag="paged"):
    """Rows kept for every token, in blocks that requests with a common prefix share.

    Tensor: ``[layers, blocks, heads, block_tokens, width]``. A row past a request's committed length is dead.

    Attributes:
        ranks: among how many ranks blocks are divided, each of which would keep the same rows: setting
            ``decode_context_parallel``. A rank's tensor has so much fewer blocks; see
            `dgpp_core.layers.divided.DividedBlocks`.
    """

    name: str
    layers: int
    heads: int
    width: int
    dtype: Dtype = "float32"
    ranks: int = 1


class WindowGroup(msgspec.Struct, frozen=True, kw_only=True, tag="window"):
    """Rows of the last ``window`` tokens, in a ring a slot.

    Tensor: ``[layers, slots, heads, ring, width]``; the row of position p lies at ``p % ring``. The engine makes the
    ring ``window + step_width`` rows long, so that rejected draft rows never overwrite a row still in reach.
    """

    name: str
    layers: int
    heads: int
    width: int
    window: int
    dtype: Dtype = "float32"


class RecurrentGroup(msgspec.Struct, frozen=True, kw_only=True, tag="recurrent"):
    """A fixed block a request, replaced at each token.

    Tensor: ``[layers, slots, candidates, *shape]``. A verify step writes the state after its row r to candidate r; the
    engine then says which candidate is the committed one. All candidates of a fresh slot are zero.
    """

    name: str
    layers: int
    shape: tuple[int, ...]
    dtype: Dtype = "float32"


StateGroup = PagedGroup | WindowGroup | RecurrentGroup


def for_device(groups: Sequence[StateGroup], device: Literal["cpu", "cuda"]) -> tuple[StateGroup, ...]:
    """The groups as a device of that kind keeps them: ``compute`` replaced by the dtype it stands for.

    Sizes and pools are made of these; `DTYPE_BYTES` has no entry for ``compute``.
    """
    named = COMPUTE_DTYPE[device]
    return tuple(msgspec.structs.replace(g, dtype=named) if g.dtype == "compute" else g for g in groups)
