"""What a built model really holds."""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from torch import Tensor

from dgpp_core.formats.resident import packed_linear_bytes


def resident_tensor_bytes(*roots: Any) -> int:
    """Bytes of every tensor reachable from ``roots`` through attributes and containers, each storage once."""
    seen: set[int] = set()
    storages: dict[int, int] = {}
    waiting = list(roots)
    while waiting:
        value = waiting.pop()
        if id(value) in seen or value is None:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            key, size = _storage(value)
            storages[key] = size
        elif isinstance(value, msgspec.Struct):
            waiting += [getattr(value, name) for name in value.__struct_fields__]
        elif isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list | tuple | set | frozenset):
            waiting += value
        elif hasattr(value, "__dict__") and not isinstance(value, type | torch.device):
            waiting += vars(value).values()
    return sum(storages.values())


def _storage(tensor: Tensor) -> tuple[int, int]:
    if tensor.is_mkldnn:  # opaque: torch does not tell its storage
        return id(tensor), packed_linear_bytes(tensor.shape[0], tensor.shape[1])
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()
