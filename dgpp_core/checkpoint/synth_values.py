"""Random values of a binding, as the checkpoint stores them. They depend on the seed and the binding's name alone."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from dgpp_core.api.bindings import Binding
from dgpp_core.checkpoint.check import parts_of
from dgpp_core.checkpoint.reader import TORCH_DTYPES
from dgpp_core.formats.codec import encode
from dgpp_core.formats.levels import LEVELS
from dgpp_core.formats.scalars import E2M1_LEVELS

ENCODED_ELEMENTS = 1 << 20
"""A stored matrix with fewer elements is a normal one, encoded; a larger one gets random codes, which takes no time."""

_PIECE = 1 << 22


def generator(binding: Binding, seed: int) -> np.random.Generator:
    """The binding's own source of random numbers."""
    key = hashlib.sha256(f"{seed}/{binding.name}".encode()).digest()
    return np.random.Generator(np.random.Philox(int.from_bytes(key[:8], "little")))


def random_tensor(binding: Binding, seed: int, dtype: str) -> Tensor:
    """The tensor that a dense ``binding`` gets: normal by its `Init`, or uniform bytes for an integer format."""
    return torch.cat(list(dense_pieces(binding, seed, dtype))).view(binding.shape)


def dense_pieces(binding: Binding, seed: int, dtype: str) -> Iterator[Tensor]:
    """`random_tensor`, flat and a few million elements at a time."""
    source, kind = generator(binding, seed), TORCH_DTYPES[dtype]
    if binding.init.values:
        yield torch.tensor(binding.init.values).to(kind)
        return
    left = math.prod(binding.shape)
    while True:
        count = min(left, _PIECE)
        if kind.is_floating_point:
            values = source.standard_normal(count, dtype=np.float32)
            values *= np.float32(binding.init.std)
            values += np.float32(binding.init.mean)
            yield torch.from_numpy(values).to(kind)
        else:
            yield _bytes(source, count * kind.itemsize).view(kind)
        left -= count
        if not left:
            return


def stored_tensors(binding: Binding, seed: int) -> dict[str, Tensor]:
    """The tensors of a stored matrix by name, in the dtypes and shapes of their parts.

    Codes are uniform, without those of a NaN; scales give the values the standard deviation of the binding's `Init`
    (within a factor of sqrt(2) where a scale is a power of two).
    """
    source = generator(binding, seed)
    if math.prod(binding.shape) < ENCODED_ELEMENTS:
        normal = source.standard_normal(binding.shape, dtype=np.float32) * np.float32(binding.init.std)
        made = encode(binding.storage, torch.from_numpy(normal), binding.grids)
    else:
        made = _random_codes(binding, source)
    parts = [part for part in parts_of(binding) if part.use != "ignored"]
    return {p.name: made[p.suffix].to(TORCH_DTYPES[p.dtypes[0]]).reshape(p.shape).contiguous() for p in parts}


def _random_codes(binding: Binding, source: np.random.Generator) -> dict[str, Tensor]:
    shapes = {part.suffix: part.shape for part in parts_of(binding)}
    made: dict[str, Tensor] = {}
    if "weight_shape" in shapes:
        made["weight_shape"] = torch.tensor(binding.shape)
    size = binding.init.std / _fill_codes(binding.storage, made, shapes, source)
    match binding.storage:
        case "nvfp4" | "nvfp4_ct":
            scales = torch.from_numpy(source.integers(0x38, 0x40, shapes["weight_scale"], np.uint8))
            made["weight_scale"] = scales.view(torch.float8_e4m3fn)  # 1 to 1.875
            size /= _rms(torch.arange(0x38, 0x40, dtype=torch.uint8).view(torch.float8_e4m3fn))
            made["weight_scale_2"], made["weight_global_scale"] = torch.tensor(size), torch.tensor(1 / size)
        case "mxfp4" | "fp8_e8m0_32" | "fp8_e8m0_128":
            made["scale"] = _exponents(source, shapes["scale"], size).view(torch.float8_e8m0fnu)
        case "mxfp4_u8":
            made["weight_scale"] = _exponents(source, shapes["weight_scale"], size)
        case "fp8_block":
            made["weight_scale_inv"] = _spread_scales(source, shapes["weight_scale_inv"], size)
        case _:
            made["weight_scale"] = _spread_scales(source, shapes["weight_scale"], size)
    return made


def _exponents(source: np.random.Generator, shape: tuple[int, ...], size: float) -> Tensor:
    """Of powers of two with the root mean square ``size``, roughly: half of them one less than the others."""
    low = 127 + round(math.log2(size / math.sqrt(0.625)))
    return torch.from_numpy(source.integers(low - 1, low + 1, shape, np.uint8))


def _fill_codes(
    storage: str, made: dict[str, Tensor], shapes: dict[str, tuple[int, ...]], source: np.random.Generator
) -> float:
    """Add the codes of a matrix; the root mean square of what they stand for."""
    suffix = next(name for name in ("weight_packed", "weight_indices", "weight") if name in shapes)
    if storage.startswith("int"):
        fields = _bytes(source, 4 * math.prod(shapes[suffix])).view(torch.int32)
        made[suffix] = _without_lowest(fields) if storage.startswith("int4") else fields
        highest = 7 if storage.startswith("int4") else 127
        return _rms(torch.tensor([*range(-highest, highest + 1), 0]))
    if storage.startswith("code"):
        made[suffix] = _bytes(source, 4 * math.prod(shapes[suffix])).view(torch.int32)
        return _rms(torch.tensor(LEVELS[int(storage[4])]))
    codes = _bytes(source, math.prod(shapes[suffix]))
    if not storage.startswith("fp8"):
        made[suffix] = codes
        return _rms(torch.tensor(E2M1_LEVELS))
    codes &= 0xBF  # a sign and the lower half of the exponents: at most 1.875, and no NaN
    made[suffix] = codes.view(torch.float8_e4m3fn)
    return _rms(torch.arange(64, dtype=torch.uint8).view(torch.float8_e4m3fn))


def _without_lowest(words: Tensor) -> Tensor:
    """4-bit fields with 8 (zero) for 0 (-8), whose missing counterpart would give a matrix a mean of its own."""
    used = words | (words >> 1) | (words >> 2) | (words >> 3)
    return words | ((~used & 0x11111111) << 3)


def _spread_scales(source: np.random.Generator, shape: tuple[int, ...], size: float) -> Tensor:
    """Uniform between half and one and a half of ``size``, and of that root mean square."""
    return torch.from_numpy((source.random(shape, np.float32) + 0.5) * np.float32(size / math.sqrt(13 / 12)))


def _bytes(source: np.random.Generator, count: int) -> Tensor:
    words = source.integers(0, 2**64, -(-count // 8), np.uint64)
    return torch.from_numpy(words).view(torch.uint8)[:count]


def _rms(values: Tensor) -> float:
    return float(values.to(torch.float64).square().mean().sqrt())
