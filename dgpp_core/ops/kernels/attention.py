"""Grouped-query attention on a GPU: what `dgpp_core.layers.gqa` promises, by the kernels of decode and of prefill."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Literal, Protocol

import torch
from msgspec import Struct
from torch import Tensor

from dgpp_core.api.errors import EngineError
from dgpp_core.api.model import StepBatch
from dgpp_core.ops.kernels.attention_decode import (
    MAX_ROWS,
    MAX_SEGMENT,
    PARTS,
    decode_attention,
    decode_meta,
    query_lines,
    spread_of,
)
from dgpp_core.ops.kernels.attention_prefill import (
    ChunkCut,
    by_blocks,
    chunk_attention,
    chunk_cut,
    chunk_meta,
    chunk_work,
    place_meta,
    place_rows,
    place_tiles,
)
from dgpp_core.ops.kernels.attention_strips import LEAST, WARPS, fits, strip_attention, strip_meta
from dgpp_core.ops.kernels.heads import HeadShape
from dgpp_core.ops.rope import RotaryTable


class RowPlaces(Protocol):
    """What the kernels take from a step's `dgpp_core.layers.paged.PagedIndex`."""

    @property
    def batch(self) -> StepBatch: ...
    @property
    def block(self) -> Tensor: ...
    @property
    def offset(self) -> Tensor: ...


class DecodeChoice(Struct, frozen=True):
    """Which decode kernel, and how it is cut.

    Attributes:
        kernel: "strips" for the shapes that fit it, "tiles" for any.
        warps, least: of a program, and strips a warp of the smallest part; they decide a row's bits.
        registers: a thread may use; None is no limit.
        fetch: all of a program's keys are asked for before it waits.
        spread: programs a row and key head; None goes by the number of rows.
    """

    kernel: Literal["strips", "tiles"]
    warps: int = WARPS
    least: int = LEAST
    registers: int | None = None
    fetch: bool = True
    spread: int | None = None


@lru_cache
def capability(device: torch.device) -> int:
    """Compute capability of a GPU: 90 for 9.0."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


class CudaGqa:
    """Everything between the two products of an attention layer; see `GroupedQueryAttention` for the arguments.

    Decode and verify rows take one kernel, prefill rows two; a row's bits are its own in each.

    Args:
        choice, cut: of the decode kernel and of prefill, for measurements and tests; None takes what was measured to be
            best.

    Raises:
        EngineError: the kernels do not take the shape.
    """

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        width: int,
        scale: float,
        *,
        bias: Tensor | None = None,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 0.0,
        rope: RotaryTable | None = None,
        choice: DecodeChoice | None = None,
        cut: ChunkCut | None = None,
    ) -> None:
        if heads % kv_heads or width > 256 or scale <= 0 or (q_norm is None) != (k_norm is None):
            norms = f"{'no' if q_norm is None else 'a'} norm of queries, {'no' if k_norm is None else 'a'} norm of keys"
            raise EngineError(
                "the attention kernels do not take this shape",
                found=f"{heads} query and {kv_heads} key heads of {width}, scale {scale}, {norms}",
                expected="a multiple of the key heads, at most 256 wide, a positive scale, both norms or none",
            )
        self.kv_heads, self.share, self.width, self.eps = kv_heads, heads // kv_heads, width, eps
        self.scale = scale * math.log2(math.e)
        self.bias, self.q_norm, self.k_norm, self.rope = bias, q_norm, k_norm, rope
        self._choice, self._cut = choice, cut
        self._arrived: Tensor | None = None

    def __call__(self, qkv: Tensor, index: RowPlaces, k_pool: Tensor, v_pool: Tensor, dtype: torch.dtype) -> Tensor:
        """As `GroupedQueryAttention.__call__`, for contiguous CUDA tensors.

        Raises:
            EngineError: more than `MAX_ROWS` decode rows.
        """
        shape = self._shape(k_pool.shape[2])
        out = torch.empty(len(qkv), self.kv_heads * self.share * self.width, dtype=dtype, device=qkv.device)
        segment = index.batch.uniform
        if index.batch.keep_rows and segment is not None:
            self._decode(out, qkv, index.batch, segment, k_pool, v_pool, shape)
        else:
            self._prefill(out, qkv, index, k_pool, v_pool, shape)
        return out

    def _shape(self, block: int) -> HeadShape:
        """What is compiled into the kernels, for pools of ``block`` tokens a block."""
        rotated = 0 if self.rope is None else 2 * self.rope.cos.shape[1]
        normed = self.q_norm is not None
        return HeadShape(self.kv_heads, self.share, self.width, rotated, block, self.bias is not None, normed)

    def _vectors(self, like: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Bias, norms of q and k, cosines and sines; ``like`` stands where there is none and is not read."""
        bias, q_norm, k_norm = (like if v is None else v for v in (self.bias, self.q_norm, self.k_norm))
        return bias, q_norm, k_norm, *((like, like) if self.rope is None else (self.rope.cos, self.rope.sin))

    def _decode(
        self,
        out: Tensor,
        qkv: Tensor,
        batch: StepBatch,
        segment: int,
        k_pool: Tensor,
        v_pool: Tensor,
        shape: HeadShape,
    ) -> None:
        rows, lines = len(qkv), len(qkv) * self.kv_heads
        if rows > MAX_ROWS or segment > MAX_SEGMENT:
            raise EngineError(
                "too many decode rows in one step",
                found=f"{rows} rows, {segment} a segment",
                expected=f"at most {MAX_ROWS}, {MAX_SEGMENT} a segment",
            )
        if self._arrived is None:
            self._arrived = torch.zeros(MAX_ROWS * self.kv_heads, dtype=torch.int32, device=qkv.device)
        choice = self._choice or DecodeChoice("strips" if fits(shape) and k_pool.dtype == torch.bfloat16 else "tiles")
        values = torch.empty(lines * PARTS * self.share * self.width, dtype=torch.float32, device=qkv.device)
        stats = torch.empty(lines * PARTS * 2 * query_lines(shape), dtype=torch.float32, device=qkv.device)
        tables = batch.block_tables
        pools: tuple[Tensor, ...] = (k_pool, v_pool)
        kernel, meta = decode_attention, decode_meta(shape, capability(qkv.device))
        if choice.kernel == "strips":
            pools = (*pools, k_pool.view(torch.int32), v_pool.view(torch.int32))
            kernel, meta = (
                strip_attention,
                strip_meta(shape, choice.warps, choice.least, choice.registers, choice.fetch),
            )
        kernel[(lines, choice.spread or spread_of(lines))](
            out, qkv, *self._vectors(qkv), *pools, tables, batch.positions,
            values, stats, self._arrived, tables.shape[1], segment, self.scale, self.eps, **meta,
        )  # fmt: skip

    def _prefill(
        self, out: Tensor, qkv: Tensor, index: RowPlaces, k_pool: Tensor, v_pool: Tensor, shape: HeadShape
    ) -> None:
        batch = index.batch
        q = torch.empty(out.shape, dtype=k_pool.dtype, device=qkv.device)
        place_rows[(len(qkv), place_tiles(shape))](
            q, qkv, *self._vectors(qkv), k_pool, v_pool, index.block, index.offset, batch.positions, self.eps,
            **place_meta(shape),
        )  # fmt: skip
        cut = self._cut or chunk_cut(shape, capability(qkv.device))
        work = chunk_work(batch.counts, self.share, cut.lines, qkv.device)
        chunk_attention[(self.kv_heads, len(work))](
            out, q, k_pool, v_pool, by_blocks(k_pool, cut), by_blocks(v_pool, cut), batch.block_tables,
            batch.positions, work, batch.block_tables.shape[1], self.scale, **chunk_meta(shape, cut),
        )  # fmt: skip
