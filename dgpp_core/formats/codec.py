"""A stored matrix from its checkpoint tensors, and back, by storage name."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dgpp_core.api.errors import CheckpointError
from dgpp_core.formats import codebook, fp8, mxfp4, nvfp4, packed_int
from dgpp_core.formats.dense import DenseMatrix
from dgpp_core.formats.matrix import Matrix
from dgpp_core.formats.scalars import decode_e8m0, encode_e8m0
from dgpp_core.formats.storage import STEM, Part, parts

_DTYPES = {
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64, "I32": torch.int32,
    "I8": torch.int8, "U8": torch.uint8, "F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip

_BLOCKS = {"fp8_block": 128, "fp8_e8m0_32": 32, "fp8_e8m0_128": 128}
_INTEGERS = {"int4_g64": (4, 64), "int8_g64": (8, 64), "int4_g128": (4, 128), "int8_g128": (8, 128)}
_CODEBOOKS = {"code3_g128": 3, "code4_g128": 4, "code6_g128": 6}


def decode(
    storage: str, tensors: Mapping[str, Tensor], shape: tuple[int, int], name: str = "matrix.weight", grids: int = 1
) -> Matrix:
    """The matrix ``[N, K]`` that ``tensors`` store.

    Args:
        storage: a storage name (`dgpp_core.formats.storage.STORAGES`).
        tensors: by the suffix of their `Part`; ignored parts need not be there.
        shape: ``(N, K)``.
        name: the binding's name, for messages.
        grids: of the binding: each of so many runs of rows has scale blocks that begin at its first row.

    Raises:
        CheckpointError: a tensor is missing or has another shape or dtype than its part.
        PluginError: as `parts`.
    """
    stored = parts(storage, name if storage == "dense" else name.removesuffix(STEM) + STEM, shape, grids)
    t = {part.suffix: _checked(part, tensors) for part in stored if part.use == "required" or part.suffix in tensors}
    _check_shape(t.get("weight_shape"), shape, name)
    match storage:
        case "dense":
            return DenseMatrix(t["weight"])
        case "fp8_block":
            return _blocks(t["weight"], t["weight_scale_inv"].to(torch.float32), 128, grids)
        case "fp8_e8m0_32" | "fp8_e8m0_128":
            edge = _BLOCKS[storage]
            return _blocks(t["weight"], decode_e8m0(t["scale"].view(torch.uint8)), edge, grids)
        case "fp8_channel":
            return fp8.Fp8ChannelMatrix(t["weight"], t["weight_scale"].to(torch.float32).reshape(-1))
        case "nvfp4":
            return nvfp4.from_multiplier(t["weight"], t["weight_scale"], t["weight_scale_2"])
        case "nvfp4_ct":
            return nvfp4.from_divisor(t["weight_packed"], t["weight_scale"], t["weight_global_scale"])
        case "mxfp4":
            return mxfp4.Mxfp4Matrix(t["weight"].view(torch.uint8), t["scale"].view(torch.uint8))
        case "mxfp4_u8":
            return mxfp4.Mxfp4Matrix(t["weight"].view(torch.uint8), t["weight_scale"].view(torch.uint8))
        case "code3_g128" | "code4_g128" | "code6_g128":
            return codebook.CodebookMatrix(t["weight_indices"], t["weight_scale"], _CODEBOOKS[storage])
        case _:
            return packed_int.PackedIntMatrix(t["weight_packed"], t["weight_scale"], *_INTEGERS[storage])


def _blocks(codes: Tensor, scales: Tensor, edge: int, grids: int) -> fp8.Fp8BlockMatrix:
    """Grids below each other as one matrix, in blocks that end where a grid does."""
    pairs = zip(codes.chunk(grids), scales.chunk(grids), strict=True)
    matrices = [fp8.Fp8BlockMatrix(c, s, (edge, edge)) for c, s in pairs]
    return matrices[0] if grids == 1 else fp8.Fp8BlockMatrix.stack(matrices)


def encode(storage: str, weight: Tensor, grids: int = 1) -> dict[str, Tensor]:
    """The checkpoint tensors of a float32 matrix ``[N, K]``, rounded to nearest, by suffix; on the matrix's device.

    For random checkpoints, tests and requantising at load. A dense matrix stays float32.

    Raises:
        CheckpointError, PluginError: as `parts`.
    """
    if grids > 1:
        made = [encode(storage, part) for part in weight.chunk(grids)]
        return {suffix: torch.cat([one[suffix] for one in made]) for suffix in made[0]}
    rows, columns = weight.shape
    stored = parts(storage, f"matrix{STEM}", (rows, columns))
    values = _encoded(storage, weight)
    if any(part.suffix == "weight_shape" for part in stored):
        values.append(torch.tensor([rows, columns]))
    suffixes = [part.suffix for part in stored if part.use != "ignored"]
    return dict(zip(suffixes, values, strict=True))


def convert(matrix: Matrix, storage: str) -> Matrix:
    """The matrix in another stored form, rounded to nearest; on its device, in float32 on the way.

    Convert a whole matrix before it is cut: its scales then do not depend on the number of ranks.

    Raises:
        CheckpointError, PluginError: as `parts`.
    """
    return decode(storage, encode(storage, matrix.dequantise()), matrix.shape)


def _encoded(storage: str, weight: Tensor) -> list[Tensor]:
    match storage:
        case "dense":
            return [weight]
        case "fp8_block":
            return [*fp8.encode_block(weight, (128, 128))]
        case "fp8_e8m0_32" | "fp8_e8m0_128":
            edge = _BLOCKS[storage]
            codes, scales = fp8.encode_block(weight, (edge, edge), power_of_two=True)
            return [codes, encode_e8m0(scales).view(torch.float8_e8m0fnu)]
        case "fp8_channel":
            return [*fp8.encode_channel(weight)]
        case "nvfp4":
            return [*nvfp4.encode(weight)]
        case "nvfp4_ct":
            return [*nvfp4.encode_divided(weight)]
        case "mxfp4":
            codes, exponents = mxfp4.encode(weight)
            return [codes, exponents.view(torch.float8_e8m0fnu)]
        case "mxfp4_u8":
            return [*mxfp4.encode(weight)]
        case "code3_g128" | "code4_g128" | "code6_g128":
            return [*codebook.encode(weight, _CODEBOOKS[storage])]
        case _:
            bits, group = _INTEGERS[storage]
            dtype = torch.bfloat16 if group == 64 else torch.float16
            return [*packed_int.encode(weight, bits, group, dtype)]


def _checked(part: Part, tensors: Mapping[str, Tensor]) -> Tensor:
    tensor = tensors.get(part.suffix)
    if tensor is None:
        raise CheckpointError(f"the checkpoint has no tensor {part.name}", where="decoding a stored matrix")
    if not part.fits(tuple(tensor.shape)) or tensor.dtype not in {_DTYPES[dtype] for dtype in part.dtypes}:
        raise CheckpointError(
            f"the tensor {part.name} cannot be decoded",
            where="decoding a stored matrix",
            found=f"{tensor.dtype} {list(tensor.shape)}",
            expected=f"{' or '.join(part.dtypes)} {list(part.shape)}",
            hint="config.json and the weights do not belong together",
        )
    return tensor


def _check_shape(stated: Tensor | None, shape: tuple[int, int], name: str) -> None:
    if stated is not None and tuple(stated.tolist()) != tuple(shape):
        raise CheckpointError(
            f"the matrix {name} says that it has another shape",
            where="weight_shape",
            found=str(stated.tolist()),
            expected=str(list(shape)),
            hint="config.json and the weights do not belong together",
        )
