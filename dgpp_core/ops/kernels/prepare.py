"""The resident form of a weight on a GPU, by its stored form and shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from dgpp_core.api.errors import EngineError
from dgpp_core.formats.dense import DenseMatrix
from dgpp_core.formats.fp8 import Fp8BlockMatrix
from dgpp_core.formats.matrix import Matrix
from dgpp_core.formats.nvfp4 import Nvfp4Matrix
from dgpp_core.ops.kernels.pack import PackedBf16, PackedFp8, PackedNvfp4, pack_bf16, pack_fp8, pack_nvfp4
from dgpp_core.ops.kernels.pack_bf12 import PackedBf12, pack_bf12
from dgpp_core.ops.kernels.plan import plan
from dgpp_core.ops.kernels.stored import StoredWeight, stored_weight

Bf16Form = Literal["bf16", "bf12"]


Packed = PackedBf16 | PackedBf12 | PackedFp8 | PackedNvfp4 | StoredWeight
"""The last one is for what no fragment form fits."""

_FRAGMENTS: dict[str, type[PackedBf16 | PackedBf12 | PackedFp8 | PackedNvfp4]] = {
    "bf16": PackedBf16,
    "bf12": PackedBf12,
    "fp8": PackedFp8,
    "nvfp4": PackedNvfp4,
}
_NAMES: dict[type[Packed], str] = {kind: name for name, kind in _FRAGMENTS.items()} | {StoredWeight: "plain"}


def form_of(packed: Packed) -> str:
    """The short name of a resident form: bf16, bf12, fp8, nvfp4 or plain."""
    return _NAMES[type(packed)]


def fields_of(packed: Packed) -> tuple[Tensor, ...]:
    """The tensors of a resident form, in the order in which its kernels take them."""
    return tuple(getattr(packed, field) for field in packed.__struct_fields__)


def shape_of(packed: Packed) -> tuple[int, int]:
    """``(N, K)`` of the matrix."""
    if isinstance(packed, StoredWeight):
        return packed.shape
    first = fields_of(packed)[0]
    return first.shape[0] * 16, first.shape[1] * 64


def prepare(
    matrix: Tensor | Matrix,
    device: torch.device,
    name: str = "",
    bf16_form: Bf16Form = "bf16",
    consume: bool = False,
) -> Packed:
    """The resident form of ``matrix`` on ``device``, decided by its format and shape alone.

    Args:
        name: what an error calls the matrix.
        bf16_form: bf12 keeps BF16 matrices in 12 bits a weight, where few enough weights are outside its window.
        consume: the matrix may be overwritten, so that its resident form can take its place.

    Raises:
        CheckpointError: values that the form cannot hold and that no sound checkpoint has.
    """
    if isinstance(matrix, Tensor):
        matrix = DenseMatrix(matrix)
    rows, columns = matrix.shape
    if isinstance(matrix, DenseMatrix) and matrix.weight.dtype == torch.bfloat16 and plan("bf16", rows, columns):
        found = pack_bf12(matrix.weight, device) if bf16_form == "bf12" else None
        return found or pack_bf16(matrix.weight, device, consume)
    if isinstance(matrix, Nvfp4Matrix) and plan("nvfp4", rows, columns) and matrix.segment % 16 == 0:
        return pack_nvfp4(matrix, device, name, consume)
    if isinstance(matrix, Fp8BlockMatrix) and plan("fp8", rows, columns) and _whole_blocks(matrix):
        return pack_fp8(matrix, device, name, consume)
    return stored_weight(matrix, device)


def _whole_blocks(matrix: Fp8BlockMatrix) -> bool:
    return matrix.block[0] % 16 == 0 and matrix.block[1] % 128 == 0


def tensors_of(packed: Packed) -> dict[str, Tensor]:
    """The tensors of a resident form by ``form.field``: all that `from_tensors` needs."""
    if isinstance(packed, StoredWeight):
        return packed.tensors()
    form = form_of(packed)
    return {f"{form}.{field}": getattr(packed, field) for field in packed.__struct_fields__}


def from_tensors(tensors: Mapping[str, Tensor]) -> Packed:
    """The resident form of `tensors_of`.

    Raises:
        EngineError: the names are not those of one form.
    """
    form = next(iter(tensors), "").partition(".")[0]
    if form.startswith("plain "):
        return StoredWeight.from_tensors(tensors)
    kind = _FRAGMENTS.get(form)
    fields = {name.partition(".")[2]: tensor for name, tensor in tensors.items()}
    if kind is None or set(tensors) != {f"{form}.{field}" for field in kind.__struct_fields__}:
        raise EngineError(
            "prepared weights of an unknown form",
            found=", ".join(sorted(tensors)) or "nothing",
            expected=" or ".join(_NAMES.values()),
            hint="build the resident image again",
        )
    return kind(**fields)
