"""Products of a weight on a GPU with rows of activations: what `dgpp_core.ops.linear` and `mlp` use there."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Self, cast

import torch
from torch import Tensor

from dgpp_core.api.errors import EngineError
from dgpp_core.formats.matrix import Matrix
from dgpp_core.ops.kernels import prefill_broad
from dgpp_core.ops.kernels.dense_bf12 import dense_bf12, expand_bf12
from dgpp_core.ops.kernels.dense_bf16 import dense_bf16
from dgpp_core.ops.kernels.dense_fp8 import dense_fp8
from dgpp_core.ops.kernels.dense_nvfp4 import dense_nvfp4
from dgpp_core.ops.kernels.pack import PackedBf16
from dgpp_core.ops.kernels.pack_bf12 import PackedBf12
from dgpp_core.ops.kernels.plain import PRODUCT_META, SMALL_META, fold, gate, plain_product
from dgpp_core.ops.kernels.plan import Form, Plan, plan, prefill_meta
from dgpp_core.ops.kernels.prefill_dense import prefill_product
from dgpp_core.ops.kernels.prepare import (
    Bf16Form,
    Packed,
    fields_of,
    form_of,
    from_tensors,
    prepare,
    shape_of,
    tensors_of,
)
from dgpp_core.ops.kernels.stored import StoredWeight

_DECODE: dict[str, Any] = {"bf16": dense_bf16, "bf12": dense_bf12, "fp8": dense_fp8, "nvfp4": dense_nvfp4}


class CudaLinear:
    """``y = x @ weight.T`` on a GPU; a row's bits do not depend on the other rows of a call.

    Args:
        matrix: ``[N, K]``, a tensor or a stored matrix, on any device.
        device: where the weight is kept, in a form of its own.
        name: what errors call the matrix.
        bf16_form: ``bf12`` keeps a BF16 matrix in 12 bits a weight, with the same results to the bit.
        consume: the matrix may be overwritten, so that its resident form can take its place.

    Raises:
        CheckpointError: the matrix holds values no sound checkpoint has.
    """

    def __init__(
        self,
        matrix: Tensor | Matrix,
        device: torch.device,
        name: str = "",
        bf16_form: Bf16Form = "bf16",
        consume: bool = False,
    ) -> None:
        self._take(prepare(matrix, device, name, bf16_form, consume))

    @classmethod
    def from_prepared(cls, tensors: Mapping[str, Tensor]) -> Self:
        """The product of the tensors of `prepared`; raises `EngineError` for others."""
        made = cls.__new__(cls)
        made._take(from_tensors(tensors))
        return made

    def prepared(self) -> dict[str, Tensor]:
        """The resident tensors by ``form.field``."""
        return tensors_of(self._packed)

    def _take(self, packed: Packed) -> None:
        self._packed = packed
        self.form = form_of(packed)
        self.shape = shape_of(packed)
        self._plan = self._cut()

    def _cut(self) -> Plan | None:
        return None if self.form == "plain" else plan(cast(Form, self.form), *self.shape)

    def narrow(self, x: Tensor, decode: bool = True) -> Tensor:
        """``[M, K]`` to ``[M, N]`` in the dtype of ``x``, rounded once."""
        return self._whole(x, decode, x.dtype)

    __call__ = narrow

    def wide(self, x: Tensor, decode: bool = True) -> Tensor:
        """float32 ``[M, N]``."""
        return self._whole(x, decode, torch.float32)

    def partials(self, x: Tensor, decode: bool = True) -> Tensor:
        """float32 ``[S, M, N]``, S fixed by the weight's shape; the product is their sum in order."""
        if not self._split(decode):
            return self._whole(x, decode, torch.float32).unsqueeze(0)
        out = x.new_empty(self._splits, x.shape[0], self.shape[0], dtype=torch.float32)
        self._into(out, x, decode)
        return out

    @property
    def _splits(self) -> int:
        return self._plan.splits if self._plan else 1

    def _split(self, decode: bool) -> bool:
        """Whether a product comes in parts."""
        return decode and self._splits > 1

    def _whole(self, x: Tensor, decode: bool, dtype: torch.dtype, width: int = 0) -> Tensor:
        """The product in one piece, of ``width`` columns where those are not all."""
        if self._split(decode):
            return folded(self.partials(x, decode), dtype)
        out = x.new_empty(x.shape[0], width or self.shape[0], dtype=dtype)
        self._into(out, x, decode)
        return out

    def _into(self, out: Tensor, x: Tensor, decode: bool) -> None:
        """The product of ``x`` into ``out``, by the kernel of its form and phase."""
        if not len(x):
            return
        if self._plan is None:
            plain(self._packed, x, out)
        elif decode:
            self._decode(out, x, self._plan)
        else:
            prefill(self._packed, x, out)

    def _decode(self, out: Tensor, x: Tensor, cut: Plan) -> None:
        rows, columns = self.shape
        meta = cut.meta(rows, columns, len(x))
        grid = (-(-len(x) // meta["COLUMNS"]), rows // (16 * meta["R"]), cut.splits)
        _DECODE[self.form][grid](*fields_of(self._packed), words(x), out, len(x), **meta)


class CudaGateUp(CudaLinear):
    """``silu(x @ gate.T) (x @ up.T)``; the weight ``[2 I, K]`` is the rows of gate and then those of up."""

    def _cut(self) -> Plan | None:
        return None if self.form == "plain" else plan(cast(Form, self.form), *self.shape, gated=True)

    def narrow(self, x: Tensor, decode: bool = True) -> Tensor:
        """``[M, K]`` to ``[M, I]`` in the dtype of ``x``, rounded once."""
        if decode and self._plan and self._plan.fused:
            return self._whole(x, decode, x.dtype, self.shape[0] // 2)
        if not decode and self._plan and self.shape[0] % 32 == 0:
            out = x.new_empty(len(x), self.shape[0] // 2)
            if len(x):
                prefill(self._packed, x, out, gated=True)
            return out
        return gated(self.wide(x, decode), x.dtype)

    __call__ = narrow


def plain(packed: Packed, x: Tensor, out: Tensor) -> None:
    """The product of a weight of any shape into ``out``, in float32."""
    assert isinstance(packed, StoredWeight)
    rows, columns = packed.shape
    grid = (-(-len(x) // PRODUCT_META["ROWS"]), -(-rows // PRODUCT_META["COLUMNS"]))
    meta = packed.meta() | PRODUCT_META
    plain_product[grid](*packed.operands(), x.contiguous(), out, len(x), rows, columns, **meta)


def prefill(packed: Packed, x: Tensor, out: Tensor, gated: bool = False) -> None:
    """The product of many rows into ``out``, gated or whole; bf12 is expanded into memory that is free afterwards."""
    if isinstance(packed, PackedBf12):
        packed = expanded(packed)
    rows, columns = shape_of(packed)
    form = cast(Form, form_of(packed))
    words(x)
    capability, m = capability_of(x.device), len(x)
    if prefill_broad.fits(form, rows, m, capability, gated):
        grid = (-(-m // prefill_broad.COLUMNS_), -(-rows // prefill_broad.ROWS))
        weight = fields_of(packed)[0].view(torch.bfloat16)
        prefill_broad.prefill_broad[grid](weight, x.contiguous(), out, m, N=rows, K=columns, num_warps=8)
        return
    meta = prefill_meta(form, rows, columns, m, capability, gated)
    weights, scales, multipliers = (*fields_of(packed), *fields_of(packed)[:1] * 2)[:3]
    if form == "bf16":
        weights = weights.view(torch.bfloat16)
    grid = (-(-m // meta["COLUMNS"]), -(-rows // (16 * meta["W"])))
    prefill_product[grid](weights, scales, multipliers, x.contiguous(), out, m, **meta)


@functools.cache
def capability_of(device: torch.device) -> int:
    """Compute capability, 90 for 9.0."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def expanded(packed: PackedBf12) -> PackedBf16:
    """The same weights as bf16."""
    rows, columns = shape_of(packed)
    out = packed.signs.new_empty(rows // 16, columns // 64, 2, 2, 32, 4)
    expand_bf12[rows // 16, columns // 128](*fields_of(packed), out, K=columns, num_warps=1)
    return PackedBf16(out)


def words(x: Tensor) -> Tensor:
    """bfloat16 ``[M, K]`` as the int32 ``[M, K/2]`` that the kernels read.

    Raises:
        EngineError: another dtype.
    """
    if x.dtype != torch.bfloat16:
        raise EngineError("activations of a packed weight must be bfloat16", found=str(x.dtype))
    return x.contiguous().view(torch.int32)


def folded(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum of float32 ``[S, ...]`` over S, in order, rounded once."""
    out = parts.new_empty(parts.shape[1:], dtype=dtype)
    if out.numel():
        grid = (-(-out.numel() // SMALL_META["BLOCK"]),)
        fold[grid](parts, out, out.numel(), SPLITS=parts.shape[0], **SMALL_META)
    return out


def gated(wide: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 ``[M, 2 I]`` of gate and up to ``silu(gate) up`` ``[M, I]``, rounded once."""
    rows, width = wide.shape[0], wide.shape[1] // 2
    out = wide.new_empty(rows, width, dtype=dtype)
    if rows:
        gate[rows, -(-width // SMALL_META["BLOCK"])](wide, out, width, **SMALL_META)
    return out
