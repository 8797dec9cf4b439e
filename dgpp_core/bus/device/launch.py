"""Launches of the collective's kernel: which binary, how many blocks, how many launches."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor

from dgpp_core.api import EngineError
from dgpp_core.bus.call import Call
from dgpp_core.bus.slab import Geometry

WARPS = 16


def meta_of(geometry: Geometry, rank: int, dtype: torch.dtype, *, reduce: bool, striped: bool) -> dict[str, Any]:
    """The constexpr arguments and options of one binary."""
    return {
        "RANK": rank,
        "WORLD": geometry.world,
        "CHANNELS": geometry.channels,
        "SLOT": geometry.slot_bytes // 4,
        "LANES": 32 * WARPS,
        "KIND": str(dtype).removeprefix("torch.") if reduce else "bytes",
        "REDUCE": reduce,
        "STRIPED": striped,
        "num_warps": WARPS,
    }


def tag_of(call: Call) -> int:
    """What a message carries to tell a collective from others; the same on all ranks that issue the same."""
    return zlib.crc32(f"{call.operation} {call.dtype} {call.shape} {call.dim}".encode()) & 0x7FFFFFFF


def words_of(part: Tensor) -> Tensor:
    """``part``'s bytes as int32, the last one filled up with zeros; a view where that can be."""
    flat = part.contiguous().view(-1).view(torch.uint8)
    if spare := -len(flat) % 4:
        flat = torch.cat([flat, flat.new_zeros(spare)])
    elif flat.data_ptr() % 4:
        flat = flat.clone()
    return flat.view(torch.int32)


def tensor_of(words: Tensor, like: Tensor) -> Tensor:
    """``words`` as a tensor of ``like``'s shape and dtype."""
    return words.view(torch.uint8)[: like.nbytes].view(like.dtype).view(like.shape)


def require_geometry(geometry: Geometry) -> None:
    """Raise `EngineError` where a kernel cannot have slots of this size."""
    if geometry.slot_bytes & (geometry.slot_bytes - 1) or geometry.world > 8:
        raise EngineError(
            "a kernel cannot work on this slab",
            found=f"slots of {geometry.slot_bytes} bytes, {geometry.world} ranks",
            expected="a power of two, at most 8 ranks",
        )
