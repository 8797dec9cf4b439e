"""Weights as a checkpoint stores them, row by row: what the kernels for any shape and format read.

A tile of such a weight is decoded as it is loaded, to the values that its format gives in float32. Nothing is widened
in memory but codebooks, whose rows have to be turned back as a whole.
"""
# mypy: disallow_untyped_defs=False, disallow_untyped_decorators=False, disallow_untyped_calls=False

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch
import triton
from msgspec import Struct
from torch import Tensor
from triton import language as tl

from dgpp_core.formats.dense import DenseMatrix
from dgpp_core.formats.fp8 import Fp8BlockMatrix, Fp8ChannelMatrix
from dgpp_core.formats.matrix import Matrix
from dgpp_core.formats.mxfp4 import GROUP as MXFP4_GROUP
from dgpp_core.formats.mxfp4 import Mxfp4Matrix
from dgpp_core.formats.nvfp4 import GROUP as NVFP4_GROUP
from dgpp_core.formats.nvfp4 import Nvfp4Matrix
from dgpp_core.formats.packed_int import PackedIntMatrix

_WIDENED_ROWS = 1 << 11
"""That are widened at once: tens of megabytes in float32."""


@triton.jit
def _e4m3(code):
    return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def _e2m1(code):
    """The float32 of codes 0 .. 15: a sign, two bits of exponent, and one of mantissa, that counts halves at 0."""
    exponent, mantissa = (code >> 1) & 3, code & 1
    size = tl.where(exponent > 0, ((exponent + 126) << 23) | (mantissa << 22), mantissa * 0x3F000000)
    return (size | ((code & 8) << 28)).to(tl.float32, bitcast=True)


@triton.jit
def _e8m0(exponent):
    bits = exponent.to(tl.int32) << 23
    return tl.where(bits == 0, 1 << 22, bits).to(tl.float32, bitcast=True)


@triton.jit
def weight_tile(codes, scales, row, k, mask, K, KIND: tl.constexpr, SN: tl.constexpr, SK: tl.constexpr):
    """float32 values of a weight ``[N, K]`` at ``row`` (int64) and ``k``, in the shape that both have together.

    Args:
        mask: outside of it values are 0.
        KIND, SN, SK: see `StoredWeight`.
    """
    if KIND == "dense":
        value = tl.load(codes + row * K + k, mask=mask, other=0.0).to(tl.float32)
    elif KIND == "fp8":
        scale = tl.load(scales + row // SN * ((K + SK - 1) // SK) + k // SK, mask=mask, other=0.0)
        value = _e4m3(tl.load(codes + row * K + k, mask=mask, other=0)) * scale
    elif KIND == "mxfp4" or KIND == "nvfp4":
        scale = tl.load(scales + row * (K // SK) + k // SK, mask=mask, other=0)
        code = tl.load(codes + row * (K // 2) + k // 2, mask=mask, other=0).to(tl.int32)
        value = _e2m1((code >> (k % 2 * 4)) & 15) * (_e8m0(scale) if KIND == "mxfp4" else _e4m3(scale))
    else:
        BITS: tl.constexpr = 4 if KIND == "int4" else 8
        EACH: tl.constexpr = 32 // BITS
        word = tl.load(codes + row * (K // EACH) + k // EACH, mask=mask, other=0)
        field = (word >> (k % EACH * BITS)) & ((1 << BITS) - 1)
        scale = tl.load(scales + row * (K // SK) + k // SK, mask=mask, other=0.0).to(tl.float32)
        value = (field - (1 << (BITS - 1))).to(tl.float32) * scale
    return value


class StoredWeight(Struct, frozen=True, eq=False):
    """A weight ``[N, K]`` row by row.

    Attributes:
        kind: ``dense``, ``fp8``, ``mxfp4``, ``nvfp4``, ``int4`` or ``int8``.
        block: rows and columns that share a scale; (0, 0) where there is none.
        codes: as the format has them, FP8 as bytes; of a dense one the values.
        scales: as the format has them, e4m3 ones as bytes.
        multipliers: float32, each of equally many consecutive rows, applied to a finished product.
    """

    kind: str
    block: tuple[int, int]
    codes: Tensor
    scales: Tensor | None = None
    multipliers: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """``(N, K)``."""
        rows, width = self.codes.shape
        return rows, width * {"mxfp4": 2, "nvfp4": 2, "int4": 8, "int8": 4}.get(self.kind, 1)

    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        """Codes, scales and multipliers for a kernel; what there is none of is not read."""
        nothing = self.codes
        return (
            self.codes,
            nothing if self.scales is None else self.scales,
            nothing if self.multipliers is None else self.multipliers,
        )

    def meta(self) -> dict[str, Any]:
        """How a kernel reads them: constexpr arguments; SEGMENT is rows a multiplier, 0 for none."""
        segment = 0 if self.multipliers is None else len(self.codes) // len(self.multipliers)
        return {"KIND": self.kind, "SN": self.block[0], "SK": self.block[1], "SEGMENT": segment}

    def tensors(self) -> dict[str, Tensor]:
        """Its tensors by name; all that `from_tensors` needs."""
        name = f"plain {self.kind} {self.block[0]} {self.block[1]}"
        held = {"codes": self.codes, "scales": self.scales, "multipliers": self.multipliers}
        return {f"{name}.{field}": tensor for field, tensor in held.items() if tensor is not None}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        """The weight whose `tensors` these are; raises ValueError or TypeError where they are none's."""
        ((form, *_),) = {tuple(name.split(".")[:1]) for name in tensors}
        _, kind, rows, columns = form.split(" ")
        fields = {name.partition(".")[2]: tensor for name, tensor in tensors.items()}
        return cls(kind=kind, block=(int(rows), int(columns)), **fields)


def stored_weight(matrix: Matrix, device: torch.device, wide: torch.dtype = torch.float32) -> StoredWeight:
    """``matrix`` on ``device``, its tensors as they are.

    Args:
        wide: the dtype that a format without a kernel is widened to.
    """
    if isinstance(matrix, DenseMatrix):
        return StoredWeight("dense", (0, 0), matrix.weight.to(device).contiguous())
    if not isinstance(matrix, Fp8BlockMatrix | Fp8ChannelMatrix | Mxfp4Matrix | Nvfp4Matrix | PackedIntMatrix):
        return StoredWeight("dense", (0, 0), _widened(matrix, device, wide))
    held = {name: _plain_bytes(tensor.to(device)) for name, tensor in matrix.tensors().items()}
    if isinstance(matrix, Fp8BlockMatrix):
        return StoredWeight("fp8", matrix.block, held["codes"], held["scales"])
    if isinstance(matrix, Fp8ChannelMatrix):
        return StoredWeight("fp8", (1, matrix.shape[1]), held["codes"], held["scales"])
    if isinstance(matrix, Mxfp4Matrix):
        return StoredWeight("mxfp4", (1, MXFP4_GROUP), held["codes"], held["scales"])
    if isinstance(matrix, Nvfp4Matrix):
        return StoredWeight("nvfp4", (1, NVFP4_GROUP), held["codes"], held["scales"], held["globals"])
    return StoredWeight(f"int{matrix.bits}", (1, matrix.group), held["words"], held["scales"])


def _widened(matrix: Matrix, device: torch.device, wide: torch.dtype) -> Tensor:
    """The values of ``matrix``, some rows at a time: a layer's experts have no room in float32."""
    rows, columns = matrix.shape
    values = torch.empty(rows, columns, dtype=wide, device=device)
    for start in range(0, rows, _WIDENED_ROWS):
        count = min(_WIDENED_ROWS, rows - start)
        values[start : start + count] = matrix.rows(start, count).to(device).dequantise()
    return values


def _plain_bytes(tensor: Tensor) -> Tensor:
    tensor = tensor.contiguous()
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


def stored_cases() -> list[tuple[str, tuple[torch.dtype, torch.dtype], dict[str, Any]]]:
    """Every kind for compile cases: its name, the dtypes of codes and scales, and `StoredWeight.meta`."""
    u8, f32, bf16 = torch.uint8, torch.float32, torch.bfloat16

    def meta(kind: str, rows: int, columns: int, segment: int = 0) -> dict[str, Any]:
        return {"KIND": kind, "SN": rows, "SK": columns, "SEGMENT": segment}

    return [
        ("bf16", (bf16, bf16), meta("dense", 0, 0)),
        ("float32", (f32, f32), meta("dense", 0, 0)),
        ("fp8 128x128", (u8, f32), meta("fp8", 128, 128)),
        ("fp8 32x32", (u8, f32), meta("fp8", 32, 32)),
        ("mxfp4", (u8, u8), meta("mxfp4", 1, MXFP4_GROUP)),
        ("nvfp4", (u8, u8), meta("nvfp4", 1, NVFP4_GROUP, 64)),
        ("int4", (torch.int32, bf16), meta("int4", 1, 64)),
        ("int8", (torch.int32, torch.float16), meta("int8", 1, 128)),
    ]
